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
        found = replaced.measure(
            weights, test_pairs(data), CONFIG, np.random.default_rng, 1.0, workers
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
    errors = [metrics["recon_mse"] for metrics in found.values()]
    assert len(set(errors)) == len(errors) == 6  # each of them changes something


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


def test_each_pair_gets_the_coefficients_of_the_next_one(trained, monkeypatch):
    """Also across batches, and the last pair those of the first"""
    data, state = trained
    weights = mc.weights_of(state)
    (pairs,) = test_pairs(data)
    images = mc.to_batch(pairs, slice(None))["images"]
    own = replaced.routed(replaced.votes(weights, images, CONFIG), 3)
    given = []
    usual = replaced.outputs_with

    def outputs_with(weights, u_hat, c, labels):
        given.append(c)
        return usual(weights, u_hat, c, labels)

    monkeypatch.setattr(replaced, "outputs_with", outputs_with)
    with mc.worker_threads(CONFIG) as workers:
        replaced.measure(weights, [pairs], CONFIG, np.random.default_rng, 1.0, workers)
    names = "trained", "uniform", "random", "another pair"
    of = {name: np.concatenate(given[k::6]) for k, name in enumerate(names)}
    np.testing.assert_allclose(of["trained"], own, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(of["another pair"], np.roll(own, -1, axis=0), rtol=1e-3, atol=1e-6)
    assert (of["uniform"] == np.float32(0.1)).all()
    assert not np.allclose(of["random"][0], of["random"][1])  # drawn anew for every pair


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
