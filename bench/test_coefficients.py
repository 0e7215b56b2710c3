"""Coupling coefficients that are replaced: each formula by hand, the network's own against the
script, the command."""

import dataclasses
import json
import sys

import multimnist_capsnet as mc
from lab.messages import InputError

import multimnist_coefficients as replaced
import numpy as np
import pytest

CONFIG = mc.Config(
    conv1_channels=4,
    conv3_channels=8,
    digits="synthetic",
    n_train=64,
    n_val=32,
    n_test=40,
    n_epochs=1,
    threads=1,
    quiet=True,
)


@pytest.fixture
def trained(monkeypatch):
    """Data, and the state of a network that was trained for two steps, with larger matrices: its
    routing matters"""
    monkeypatch.setattr(mc, "N_SYNTHETIC", {"train": 400, "val": 10, "test": 60})
    data = mc.load_data(CONFIG)
    state = mc.train(CONFIG, data)
    state["params"]["W"] *= 20
    return data, state


def test_pairs(data):
    return mc.stream_pairs(data, "test", CONFIG.n_test, CONFIG, mc.EVALUATION, 1)


test_pairs.__test__ = False


def test_the_networks_own_coefficients_are_those_of_the_script(trained):
    """ "trained", "uniform" and more iterations are what the script's evaluation finds with as
    many iterations"""
    data, state = trained
    weights = mc.weights_of(state)
    with mc.worker_threads(CONFIG) as workers:
        mean = np.full((10, 1), 0.1, np.float32)
        found = replaced.measure(
            weights, test_pairs(data), CONFIG, np.random.default_rng, 1.0, mean, workers
        )
        for name, n_iters in (
            ("trained", 3),
            ("uniform", 1),
            ("5 iterations", 5),
            ("10 iterations", 10),
        ):
            config = dataclasses.replace(CONFIG, routing_iters=n_iters)
            usual = mc.evaluate_test(weights, data, config, workers)
            assert found[name]["hits"] == usual["hits"] and found[name]["n"] == 40
            assert found[name]["exact_match"] == usual["exact_match"]
            assert found[name]["recon_mse"] == pytest.approx(usual["recon_mse"], rel=1e-4)
    assert found.pop("mean")["recon_mse"] == pytest.approx(found["uniform"]["recon_mse"])
    errors = [metrics["recon_mse"] for metrics in found.values()]
    assert len(set(errors)) == len(errors) == 7  # each of them changes something
    assert found["trained"]["large"] > 0
    assert found["shuffled"]["large"] == pytest.approx(found["trained"]["large"])
    assert found["uniform"]["large"] == 0


def test_random_coefficients_are_a_softmax_over_digit_capsules_with_the_given_deviation():
    rng = np.random.default_rng(0)
    c = replaced.random_coefficients((200, 10, 50), 0.7, rng)
    assert c.shape == (200, 10, 50) and c.dtype == np.float32
    np.testing.assert_allclose(c.sum(1), 1, rtol=1e-5)
    assert np.sqrt(replaced.logit_variances(c).mean()) == pytest.approx(0.7, rel=0.01)
    uniform = replaced.random_coefficients((2, 10, 3), 0.0, rng)
    np.testing.assert_allclose(uniform, 0.1)


def test_the_variance_of_logits_by_hand():
    """Logits 0, 1, 2 of three digit capsules: variance 1 with J - 1; another number added to all
    changes nothing"""
    logits = np.array([0.0, 1, 2])[None, :, None] + np.array([0.0, 5])
    c = mc.softmax_forward(logits)
    np.testing.assert_allclose(replaced.logit_variances(c), [[1, 1]])


def test_the_deviation_is_that_of_the_networks_own_logits(trained):
    """All logits are written down from the votes, in float64, and their variance is averaged at
    once"""
    data, state = trained
    weights = mc.weights_of(state)
    with mc.worker_threads(CONFIG) as workers:
        found = replaced.deviation_of_logits(weights, test_pairs(data), CONFIG, workers)
    (pairs,) = test_pairs(data)
    images = mc.to_batch(pairs, slice(None))["images"]
    u_hat = replaced.votes(weights, images, CONFIG).astype(float)
    _, (_, steps) = mc.routing_forward(u_hat, 3)
    b = sum(np.einsum("njid,njd->nji", u_hat, v) for _, v, _ in steps[:2])
    deviations = b - b.mean(1, keepdims=True)
    assert found == pytest.approx(np.sqrt((deviations**2).sum(1).mean() / 9), rel=1e-3)
    assert found > 0.1


def test_the_mean_is_that_of_all_pairs(trained):
    data, state = trained
    weights = mc.weights_of(state)
    (pairs,) = test_pairs(data)
    with mc.worker_threads(CONFIG) as workers:
        found = replaced.mean_coefficients(weights, pairs, CONFIG, workers)
    images = mc.to_batch(pairs, slice(None))["images"]
    own = replaced.routed(replaced.votes(weights, images, CONFIG), 3)
    assert found.shape == own.shape[1:] and found.dtype == np.float32
    np.testing.assert_allclose(found, own.mean(0), rtol=1e-3)
    np.testing.assert_allclose(found.sum(0), 1, rtol=1e-5)


def test_shuffled_coefficients_are_those_of_the_same_primary_capsule_in_another_order():
    rng = np.random.default_rng(0)
    c = replaced.random_coefficients((3, 10, 40), 1.0, rng)
    found = replaced.shuffled(c, rng)
    np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(c, axis=1))
    assert (found != c).mean() == pytest.approx(0.9, abs=0.05)
    assert not np.array_equal(np.argsort(found[0, :, 0]), np.argsort(found[0, :, 1]))


def test_the_next_pair_without_a_common_digit_by_hand():
    """Of the first, the third: the second has its 2. Of the last one, from the beginning"""
    labels = np.array([[1, 2], [2, 3], [4, 5], [5, 1]])
    assert replaced.strangers(labels).tolist() == [2, 2, 0, 1]
    assert replaced.strangers(np.array([[1, 2], [1, 3], [1, 4]])).tolist() == [1, 2, 0]
    assert replaced.strangers(np.array([[1, 2]])).tolist() == [0]


def test_the_share_of_large_coefficients_by_hand():
    c = np.array([[0.1, 0.3], [0.8, 0.1], [0.05, 0.1]]).T[None]  # (1, 2, 3)
    assert replaced.share_of_large(c) == pytest.approx(2 / 3)


def test_each_pair_gets_the_coefficients_that_it_should(trained, monkeypatch):
    data, state = trained
    weights = mc.weights_of(state)
    (pairs,) = test_pairs(data)
    images = mc.to_batch(pairs, slice(None))["images"]
    own = replaced.routed(replaced.votes(weights, images, CONFIG), 3)
    mean = own.mean(0)
    given = []
    usual = replaced.outputs_with

    def outputs_with(weights, u_hat, c, labels):
        given.append(c)
        return usual(weights, u_hat, c, labels)

    monkeypatch.setattr(replaced, "outputs_with", outputs_with)
    with mc.worker_threads(CONFIG) as workers:
        replaced.measure(weights, [pairs], CONFIG, np.random.default_rng, 1.0, mean, workers)
    names = "trained", "uniform", "random", "shuffled", "mean", "another pair"
    of = {name: np.concatenate(given[k::8]) for k, name in enumerate(names)}
    np.testing.assert_allclose(of["trained"], own, rtol=1e-3, atol=1e-6)
    shards = [slice(0, 16), slice(16, 32), slice(32, 40)]
    others = [own[rows][replaced.strangers(pairs["labels"][rows])] for rows in shards]
    np.testing.assert_allclose(of["another pair"], np.concatenate(others), rtol=1e-3, atol=1e-6)
    assert (of["uniform"] == np.float32(0.1)).all()
    assert (of["mean"] == mean).all()
    np.testing.assert_allclose(np.sort(of["shuffled"], 1), np.sort(own, 1), rtol=1e-3, atol=1e-6)
    for drawn in of["random"], of["shuffled"]:
        assert not np.allclose(drawn[0], drawn[1])  # anew for every pair


def test_the_weighted_sum_by_hand():
    """Two capsules vote for one digit, with one dimension: 0.25 * 4 + 0.5 * 2 = 2 is squashed to
    4 / 5"""
    u_hat = np.array([4.0, 2.0]).reshape(1, 1, 2, 1)
    c = np.array([0.25, 0.5]).reshape(1, 1, 2)
    weights = {
        "dec1_w": np.ones((1, 2)),
        "dec1_b": np.zeros(2),
        "dec2_w": np.ones((2, 2)),
        "dec2_b": np.zeros(2),
        "dec3_w": np.ones((2, 4)),
        "dec3_b": np.zeros(4),
    }
    lengths, recon = replaced.outputs_with(weights, u_hat, c, np.array([[0, 0]]))
    assert lengths == pytest.approx(np.array([[0.8]]))
    assert recon.shape == (1, 2, 2, 2)
    assert recon == pytest.approx(np.full((1, 2, 2, 2), 1 / (1 + np.exp(-3.2))))


def test_the_command(trained, tmp_path, monkeypatch, capsys):
    _, state = trained
    mc.save(tmp_path / "w.npz", CONFIG, state)
    words = f"x --load {tmp_path}/w.npz --digits synthetic --n-test 20 --out-json {tmp_path}/r.json"
    monkeypatch.setattr(sys, "argv", words.split())
    replaced.main()
    found = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert set(found["coefficients"]) == {
        "trained",
        "uniform",
        "random",
        "shuffled",
        "mean",
        "another pair",
        "5 iterations",
        "10 iterations",
    }
    assert found["coefficients"]["trained"]["exact_match"] == found["test_exact_match"]
    assert (
        found["logit_deviation"] > 0
        and found["config"]["n_test"] == 20
        and found["loaded"]["file"] == "w.npz"
    )
    again = dict(found)
    monkeypatch.setattr(sys, "argv", [*words.split(), "--threads", "2"])
    replaced.main()
    again = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert again["coefficients"] == found["coefficients"]  # also the random ones
    for change in {"model": "cnn"}, {"routing_iters": 1}:
        config = dataclasses.replace(CONFIG, **change)
        mc.save(
            tmp_path / "w.npz", config, mc.initial_state(config) | {"history": state["history"]}
        )
        monkeypatch.setattr(sys, "argv", words.split())
        with pytest.raises(InputError, match="Give a capsnet with at least two"):
            replaced.main()
