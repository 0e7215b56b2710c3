"""The probes of the affNIST networks: FGSM, rotated digits, images of no digit, linear probes; by hand and by loops."""
import dataclasses
import json
import os

import affnist_capsnet as ac

import numpy as np
import pytest
from conftest import assert_refused
from test_affnist_networks import NETWORKS, few_units, float64, tiny  # noqa: F401

import probe_affnist_capsnet as probe


@pytest.fixture
def workers():
    with ac.worker_threads(tiny("cnn-gap")) as workers:
        yield workers


def trained(config, digits):
    """The weights after a few steps: running statistics and all else as they are evaluated"""
    return ac.weights_of(ac.train(dataclasses.replace(config, n_epochs=1), digits))


@pytest.mark.parametrize("name", [*ac.CAPSULES, *ac.CNNS, "not normalized", "with dropout", "plain vectors"])
def test_a_folded_network_says_the_same(name):
    config, rng = NETWORKS[name], np.random.default_rng(0)
    weights = float64(config)
    weights |= {key: rng.random(a.shape) + 0.5 for key, a in ac.initial_state(config)["running"].items()}
    images = rng.random((2, ac.SIDES[config.task], ac.SIDES[config.task]))
    params, plain = probe.fold_normalizations(weights, config)
    assert plain.norm == "none" and not any("norm" in name for name in params) and plain.recon_weight == 0
    np.testing.assert_allclose(ac.forward(params, images, plain)[0]["scores"],
                               ac.forward(weights, images, config)[0]["scores"], rtol=1e-9)


@pytest.mark.parametrize("model", ["capsnet-shared", "capsnet", "cnn-gap", "cnn"])
def test_the_adversarial_direction_is_that_of_the_score_gap_that_is_evaluated(digits, workers, model):
    """Centered differences of (best wrong score - true score), with the running statistics, in float64. It is not zero
    either where the margin loss of a sure answer is flat"""
    config = tiny(model)
    weights = {name: a.astype(np.float64) for name, a in trained(config, digits).items()}
    noise = np.random.default_rng(1).integers(0, 256, (2, 40, 40), np.uint8)            # on black, maxima are ties
    part = {"images": noise, "labels": np.array([3, 8])}

    def gap(images):
        scores = ac.forward(weights, images, config)[0]["scores"].copy()
        right = scores[np.arange(2), part["labels"]].copy()
        scores[np.arange(2), part["labels"]] = -np.inf
        return scores.max(1) - right
    direction = probe.adversarial_direction(weights, config, part, workers)
    images, rng = part["images"] / 255, np.random.default_rng(0)
    assert direction.shape == images.shape and set(np.unique(direction)) <= {-1, 0, 1}
    for _ in range(12):
        y, x = rng.integers(10, 30, 2)
        step = np.zeros_like(images)
        step[:, y, x] = 1e-5
        slope = (gap(images + step) - gap(images - step)) / 2e-5
        clear = np.abs(slope) > 1e-5
        np.testing.assert_array_equal(direction[:, y, x][clear], np.sign(slope)[clear])
    part = {name: a[:8] for name, a in next(ac.stream_digits(digits, config, "test")).items()}
    assert model == "cnn" or probe.adversarial_direction(weights, config, part, workers).any((1, 2)).all()


def test_noisy_copies_vote_on_the_sign(workers, monkeypatch):
    """By columns: two of three say up; two say down; one says up and none down; as many say each"""
    said = [np.array([[[1, -1, 1, -1]]]), np.array([[[1, 1, 0, 1]]]), np.array([[[-1, -1, 0, 0]]])]
    shown = []

    def direction(params, config, part, workers):
        shown.append(part["images"])
        return said[len(shown) - 1]
    monkeypatch.setattr(probe, "adversarial_direction", direction)
    monkeypatch.setattr(probe, "N_NOISY", 3)
    part = {"images": np.full((1, 40, 40), 128, np.uint8), "labels": np.array([3])}
    voted = probe.voted_direction({}, None, part, np.random.default_rng(0), workers)
    assert voted.tolist() == [[[1, -1, 1, 0]]]
    assert [images.astype(float).std() for images in shown] == pytest.approx([probe.EPSILON] * 3, rel=0.1)
    assert not np.array_equal(shown[0], shown[1]) and (part["images"] == 128).all()


def test_shuffled_signs_are_as_many_of_the_ink_and_of_the_background():
    images = np.zeros((2, 40, 40), np.uint8)
    images[:, 10:30, 15:20] = 200
    signs = np.where(np.arange(40) < 17, 1, -1) * np.ones((2, 40, 1), int)
    out = probe.shuffle_signs(signs, images, np.random.default_rng(0))
    for image, before, after in zip(images, signs, out):
        for here in image > 0, image == 0:
            assert not np.array_equal(before[here], after[here]) and sorted(before[here]) == sorted(after[here])
    assert not np.array_equal(out[0], out[1]) and (signs[0] == signs[1]).all()


def test_each_way_steps_along_its_own_signs(digits, workers, monkeypatch):
    """At the digit the gradient is up on the left and down on the right, at noisy copies the reverse. Who follows it is
    right as far as no pixel went the other way."""
    config, copies, moves = tiny("cnn-gap", n_test=20), [], []
    before = next(ac.stream_digits(digits, config, "test"))["images"].astype(int)

    def direction(params, config, part, workers):
        noisy = not np.array_equal(part["images"], before)
        copies.extend([part["images"].astype(int)] * noisy)
        return np.where((np.arange(40) < 20) != noisy, 1, -1) * np.ones(before.shape, int)

    def evaluate(params, parts, config, workers):
        moved = parts[0]["images"].astype(int) - before
        moves.append(moved)
        up_on_the_left = (moved[..., :20] >= 0).all((1, 2)) & (moved[..., 20:] <= 0).all((1, 2))
        return {"hits": int(up_on_the_left.sum())}
    monkeypatch.setattr(probe, "adversarial_direction", direction)
    monkeypatch.setattr(ac, "evaluate", evaluate)
    monkeypatch.setattr(probe, "N_NOISY", 3)
    assert probe.sign_attack({}, digits, config, workers) == {
        "gradient": 1, "gradient shuffled": 0, "vote": 0, "vote shuffled": 0}
    assert [np.abs(moved).max() for moved in moves] == [probe.EPSILON] * 4
    assert (moves[2][..., :20] <= 0).all() and (moves[2][..., 20:] >= 0).all()
    gray = (before > 96) & (before < 159)                   # where hardly anything is cut at black or white
    assert [(copy - before)[gray].std() for copy in copies] == pytest.approx([probe.EPSILON] * 3, rel=0.15)


def test_digits_rotated_by_0_degrees_are_the_centered_ones(digits, workers, monkeypatch):
    config = tiny("cnn-gap")
    weights = trained(config, digits)
    monkeypatch.setattr(probe, "ROTATIONS", (0.0, 180.0))
    found = probe.rotated(weights, digits, config, workers)
    plain = ac.evaluate(weights, ac.stream_digits(digits, config, "centered", ac.IDENTITY), config, workers)["accuracy"]
    assert found.keys() == {"0", "180"} and found["0"] == plain


def test_auroc_by_hand():
    assert probe.auroc(np.array([2.0, 3.0]), np.array([0.0, 1.0])) == 1
    assert probe.auroc(np.array([1.0, 3.0]), np.array([2.0])) == 0.5
    assert probe.auroc(np.array([1.0, 1.0]), np.array([1.0, 0.0])) == 0.75                   # ties count half
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, 60), rng.integers(2, 11, 50)
    pairs = [(x > y) + (x == y) / 2 for x in a for y in b]
    assert probe.auroc(a, b) == pytest.approx(np.mean(pairs))


def test_pictures_that_are_no_digits(digits):
    config, rng = tiny("cnn-gap"), np.random.default_rng(0)
    part = next(ac.stream_digits(digits, config, "test"))
    made = {kind: probe.make_non_digits(part, kind, config, rng)["images"] for kind in probe.NON_DIGITS}
    assert all(images.shape == part["images"].shape and images.dtype == np.uint8 for images in made.values())
    np.testing.assert_array_equal(made["inverted"].astype(int), 255 - part["images"].astype(int))
    shuffled, digit = (np.sort(images.reshape(len(images), -1)) for images in (made["shuffled"], part["images"]))
    np.testing.assert_array_equal(shuffled, digit)
    assert not np.array_equal(made["shuffled"], part["images"])
    assert not made["blank"].any()
    assert made["noise"].mean() == pytest.approx(127.5, abs=2) and made["noise"].min() == 0
    ink, of_digits = ((images > 127).mean() for images in (made["strokes"], part["images"]))
    assert of_digits / 2 < ink < 2 * of_digits and made["strokes"].max() == 255


def test_halves_of_two_digits_by_hand():
    """A bar of three rows above the lower half of a cross that lies elsewhere: its rows from its ink's center on"""
    bar, cross = np.zeros((2, 9, 9), np.uint8)
    bar[1:4, 2:5] = 10
    cross[6, 4:9], cross[4:9, 6] = 20, 20
    made, other = probe.join_halves(np.stack([bar, cross]), np.array([1, 4]), np.random.default_rng(0))
    assert made[:2].tolist() == bar[:2].tolist() and made[2].tolist() == [0, 20, 20, 20, 20, 20, 0, 0, 0]
    assert made[3:5, 3].tolist() == [20, 20] and made[3:].sum() == 40
    assert other[:6].tolist() == cross[:6].tolist() and (other[6:8, 5:8] == 10).all() and other[6:].sum() == 60
    alone = probe.join_halves(bar[None], np.array([1]), np.random.default_rng(0))               # nothing to put below
    assert np.array_equal(alone[0], bar)
    many = probe.join_halves(np.stack([*[bar] * 9, cross]), np.array([*[1] * 9, 4]), np.random.default_rng(0))
    assert all(np.array_equal(each, made) for each in many[:9])                         # never that of its own class


def test_little_ink_needs_no_network(digits, workers, monkeypatch):
    """Blank pictures have less than any digit, inverted ones more"""
    monkeypatch.setattr(probe, "confidences", lambda params, part, *_: {"margin": np.zeros(len(part["images"]))})
    found = probe.detection({}, digits, tiny("cnn-gap"), workers)
    assert found["inverted"] == {"margin": 0.5, "little ink": 1} and found["blank"] == {"margin": 0.5, "little ink": 0}
    assert found["shuffled"]["little ink"] == 0.5


def test_scores_of_confidence_by_hand(digits, workers):
    part = {name: a[:3] for name, a in next(ac.stream_digits(digits, tiny("cnn-gap"), "test")).items()}
    for model in ("capsnet-shared", "cnn-gap"):
        config = tiny(model)
        weights = trained(config, digits)
        out = ac.forward(weights, part["images"].astype(np.float32) / 255, config)[0]
        found, top = probe.confidences(weights, part, config, workers), np.sort(out["scores"], 1)
        np.testing.assert_allclose(found["margin"], top[:, -1] - top[:, -2], rtol=1e-4, atol=1e-6)
        if model == "cnn-gap":
            powers = np.exp(out["scores"].astype(float))
            np.testing.assert_allclose(found["probability"], (powers / powers.sum(1, keepdims=True)).max(1), rtol=1e-5)
            np.testing.assert_allclose(found["log-sum-exp"], np.log(powers.sum(1)), rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_allclose(found["length"], out["scores"].max(1), rtol=1e-5)
            error = [np.mean((out["recon"][k, 0] - part["images"][k] / 255.0) ** 2) for k in range(3)]
            np.testing.assert_allclose(found["reconstruction"], -np.array(error), rtol=1e-4)


def test_linear_probes_find_what_is_in_a_capsule_and_nothing_else(monkeypatch):
    """Capsules whose first two dimensions are where the ink's middle lies, whose third is noise, and no more. Then
    noise in all 16: on the digits that the map was fitted to it would explain two fifths of 40 digits' factors"""
    def middles(params, samples, config, workers):
        images, rng = samples["images"].astype(float), np.random.default_rng(0)
        y, x = ((images.sum(axis) * np.arange(40)).sum(1) / images.sum((1, 2)) for axis in (2, 1))
        v = np.zeros((len(x), 10, ac.D))
        v[..., 0], v[..., 1], v[..., 2] = x[:, None], -y[:, None], rng.standard_normal(len(x))[:, None]
        return {"v": v}

    def noise(params, samples, config, workers):
        return {"v": np.random.default_rng(0).standard_normal((len(samples["labels"]), 10, ac.D))}
    monkeypatch.setattr(probe, "N_PROBED", 600)
    monkeypatch.setattr(ac, "forward_shards", middles)
    found = probe.linear_probe({}, tiny("capsnet-shared"), None)
    assert list(found) == list(probe.KNOWN_FACTORS)
    assert min(found["x"], found["y"]) > 0.97 and max(found[name] for name in probe.KNOWN_FACTORS[2:]) < 0.15
    monkeypatch.setattr(probe, "N_PROBED", 400)
    monkeypatch.setattr(ac, "forward_shards", noise)
    assert max(probe.linear_probe({}, tiny("capsnet-shared"), None).values()) < 0


def test_what_a_probe_prints_and_keeps(digits, tmp_path, monkeypatch, call):
    config = tiny("capsnet-shared", n_epochs=1)
    ac.save(tmp_path / "w.npz", config, ac.without_moments(ac.train(config, digits)))
    for name, value in (("ROTATIONS", (0.0, 30.0)), ("N_PROBED", 100), ("N_NOISY", 2)):
        monkeypatch.setattr(probe, name, value)
    flags = f"--load w.npz --model {config.model} --digits synthetic --n-test 20 --threads 1".split()
    code, out, err = call(ac, probe.main, *flags, "--out-json", "r.json")
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert found["rotated"].keys() == {"0", "30"} and found["loaded"]["file"] == "w.npz"
    assert found["config"]["n_test"] == 20 and found["n_params"] == sum(map(np.size, ac.init_params(config).values()))
    assert set(found["linear_probe"]) == set(probe.KNOWN_FACTORS) and "linear probe, R^2 of stroke: " in out
    assert set(found["detection"]) == set(probe.NON_DIGITS)
    assert "AUROC, translated digits against strokes (chance 0.5): length " in out
    assert "one-step sign attack (FGSM, epsilon 32/255), signs from vote shuffled: " in out
    assert "accuracy on digits rotated by 30 degrees: " in out
    for words, named in {"--affnist-dir x": "probes do not read", "--lr 1": "has 0.01", "--load no.npz": "No such file",
                         "--n-test 101": "take 100 test digits at most",
                         f"--out-json {os.devnull}/x.json": "cannot write"}.items():
        assert_refused(call(ac, probe.main, *flags, *words.split()), named)
    for name in ("sign_attack", "rotated", "detection"):                # of one's own images: no synthetic digits
        monkeypatch.setattr(probe, name, unprobed := lambda *_: {})
        unprobed.__name__ = name
    assert "linear_probe" not in probe.run_probes({}, {"source": "clothes"}, config, None)
