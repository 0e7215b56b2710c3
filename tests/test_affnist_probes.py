"""The third experiment's probes: spoilt digits, each transformation alone, what is no digit; by hand and by loops."""
import dataclasses
import json
import sys

import affnist_capsnet as ac

import numpy as np
import pytest
from test_affnist_networks import NETWORKS, few_units, float64, tiny  # noqa: F401

import probe_affnist_capsnet as probe


@pytest.fixture
def runner():
    with ac.Runner(1) as runner:
        yield runner


def trained(config, digits):
    """The weights after a few steps: running statistics and all else as they are evaluated"""
    return ac.train(dataclasses.replace(config, n_epochs=1), data=digits | {"source": "synthetic"})[0]


# ---------------------------------------------------------------- the network without its normalisations

@pytest.mark.parametrize("name", [*ac.MODELS, "not normalised", "with dropout", "plain vectors"])
def test_a_folded_network_says_the_same(name):
    config, rng = NETWORKS[name], np.random.default_rng(0)
    weights = float64(config)
    weights |= {key: rng.random(a.shape) + 0.5 for key, a in ac.init_state(weights).items()}
    images = rng.random((2, ac.SIDES[config.task], ac.SIDES[config.task]))
    params, plain = probe.folded(weights, config)
    assert plain.norm == "none" and not any("norm" in name for name in params) and plain.recon_weight == 0
    np.testing.assert_allclose(ac.forward(params, images, plain)[0]["scores"],
                               ac.forward(weights, images, config)[0]["scores"], rtol=1e-9)


@pytest.mark.parametrize("model", ["shared", "caps", "gap", "cnn"])
def test_the_adversarial_direction_is_that_of_the_score_gap_that_is_evaluated(digits, runner, model):
    """Centred differences of (best wrong score - true score), with the running statistics, in float64"""
    config = tiny(model)
    weights = {name: a.astype(np.float64) for name, a in trained(config, digits).items()}
    noise = np.random.default_rng(1).integers(0, 256, (2, 40, 40), np.uint8)            # on black, maxima are ties
    part = {"images": noise, "labels": np.array([3, 8])}

    def gap(images):
        scores = ac.forward(weights, images, config)[0]["scores"].copy()
        right = scores[np.arange(2), part["labels"]].copy()
        scores[np.arange(2), part["labels"]] = -np.inf
        return scores.max(1) - right
    direction = probe.adversarial_direction(weights, config, part, runner)
    images, rng = part["images"] / 255, np.random.default_rng(0)
    assert direction.shape == images.shape and set(np.unique(direction)) <= {-1, 0, 1}
    for _ in range(12):
        y, x = rng.integers(10, 30, 2)
        step = np.zeros_like(images)
        step[:, y, x] = 1e-5
        slope = (gap(images + step) - gap(images - step)) / 2e-5
        clear = np.abs(slope) > 1e-5
        np.testing.assert_array_equal(direction[:, y, x][clear], np.sign(slope)[clear])


def test_a_digit_whose_loss_is_zero_has_a_direction_all_the_same(digits, runner):
    """The margin loss of a sure answer is flat; the gap between scores is not"""
    config = tiny("shared")
    weights = trained(config, digits)
    part = {name: a[:8] for name, a in next(ac.stream_digits(digits, config, "test")).items()}
    direction = probe.adversarial_direction(weights, config, part, runner)
    assert (np.abs(direction).sum((1, 2)) > 0).all()


# ---------------------------------------------------------------- spoilt digits

def test_spoilt_by_hand():
    rng, images = np.random.default_rng(0), np.zeros((50, 40, 40), np.uint8)
    images[:, 10:20, 12:18] = 200
    assert (probe.spoil(images, "contrast", 0.25, rng)[:, 10:20, 12:18] == 50).all()
    noisy = probe.spoil(images, "noise", 20, rng)
    assert noisy.dtype == np.uint8 and noisy[:, 12:18, 13:17].astype(float).std() == pytest.approx(20, rel=0.1)
    assert noisy[:, 12:18, 13:17].mean() == pytest.approx(200, abs=2)
    dark = noisy[:, 25:].astype(float)                       # below black there is nothing: half of the noise is lost
    assert dark.mean() == pytest.approx(20 / np.sqrt(2 * np.pi), rel=0.1)
    for side in (3, 6):
        covered = probe.spoil(images, "occlusion", side, rng)
        rows, columns = ((images != covered).any(axis) for axis in (2, 1))
        assert (rows.sum(1) >= 1).all() and (rows.sum(1) <= side).all() and (columns.sum(1) <= side).all()
        assert ((images != covered).sum((1, 2)) == rows.sum(1) * columns.sum(1)).all()         # one rectangle
        assert ((covered == 0) | (covered == 200)).all() and len(np.unique(covered.sum((1, 2)))) > 1
    black = np.zeros((2, 40, 40), np.uint8)
    np.testing.assert_array_equal(probe.spoil(black, "occlusion", 6, rng), black)
    assert images.max() == 200 and (images[:, 10:20, 12:18] == 200).all()              # the digits stay as they were


def test_robustness_counts_what_is_named_right(digits, runner, monkeypatch):
    config = tiny("gap", padding=0)                         # so little training gets padded digits nowhere
    weights = trained(config, digits)
    monkeypatch.setattr(probe, "SPOILT", {"contrast": (1.0, 0.0)})
    monkeypatch.setattr(probe, "STEPS", (0, 64))
    monkeypatch.setattr(probe, "NOISY", 1)
    found = probe.robustness(weights, digits, config, runner)
    plain = ac.evaluate(weights, ac.stream_digits(digits, config, "test"), config, runner)["accuracy"]
    (one, first), (zero, blank) = found["contrast"]
    labels = next(ac.stream_digits(digits, config, "test"))["labels"]
    shown = ac.forward(weights, np.zeros((1, 40, 40), np.float32), config)[0]["scores"].argmax()
    assert (one, zero) == (1.0, 0.0) and first == plain and blank == pytest.approx((labels == shown).mean())
    (_, still), (_, fooled) = found["adversarial"]
    assert still == plain and fooled <= plain


# ---------------------------------------------------------------- steps beside the adversarial one

def test_noisy_copies_vote_on_the_sign(runner, monkeypatch):
    """By columns: two of three say up; two say down; one says up and none down; as many say each"""
    said = [np.array([[[1, -1, 1, -1]]]), np.array([[[1, 1, 0, 1]]]), np.array([[[-1, -1, 0, 0]]])]
    shown = []

    def direction(params, config, part, runner):
        shown.append(part["images"])
        return said[len(shown) - 1]
    monkeypatch.setattr(probe, "adversarial_direction", direction)
    monkeypatch.setattr(probe, "NOISY", 3)
    part = {"images": np.full((1, 40, 40), 128, np.uint8), "labels": np.array([3])}
    voted = probe.voted_direction({}, None, part, 16, np.random.default_rng(0), runner)
    assert voted.tolist() == [[[1, -1, 1, 0]]]
    assert [images.astype(float).std() for images in shown] == pytest.approx([16] * 3, rel=0.1)
    assert not np.array_equal(shown[0], shown[1]) and (part["images"] == 128).all()


def test_shuffled_signs_are_as_many_of_the_ink_and_of_the_background():
    images = np.zeros((2, 40, 40), np.uint8)
    images[:, 10:30, 15:20] = 200
    signs = np.where(np.arange(40) < 17, 1, -1) * np.ones((2, 40, 1), int)
    out = probe.shuffled(signs, images, np.random.default_rng(0))
    for image, before, after in zip(images, signs, out):
        for here in image > 0, image == 0:
            assert not np.array_equal(before[here], after[here]) and sorted(before[here]) == sorted(after[here])
    assert not np.array_equal(out[0], out[1]) and (signs[0] == signs[1]).all()


def test_each_way_steps_along_its_own_signs(digits, runner, monkeypatch):
    """At the digit the gradient is up on the left and down on the right, at noisy copies the reverse. Who follows it is
    right as far as no pixel went the other way."""
    config, copies, steps = tiny("gap", n_test=20), [], []
    before = next(ac.stream_digits(digits, config, "test"))["images"].astype(int)

    def direction(params, config, part, runner):
        noisy = not np.array_equal(part["images"], before)
        copies.extend([part["images"].astype(int)] * noisy)
        return np.where((np.arange(40) < 20) != noisy, 1, -1) * np.ones(before.shape, int)

    def evaluate(params, parts, config, runner):
        moved = parts[0]["images"].astype(int) - before
        steps.append(moved)
        up_on_the_left = (moved[..., :20] >= 0).all((1, 2)) & (moved[..., 20:] <= 0).all((1, 2))
        return {"hits": int(up_on_the_left.sum())}
    monkeypatch.setattr(probe, "adversarial_direction", direction)
    monkeypatch.setattr(ac, "evaluate", evaluate)
    monkeypatch.setattr(probe, "NOISY", 3)
    monkeypatch.setattr(probe, "SPOILT", {})
    found = probe.robustness({}, digits, config, runner)
    assert {way: [accuracy for _, accuracy in of] for way, of in found.items()} == {
        "random signs": [0, 0, 0], "adversarial": [1, 1, 1], "adversarial, shuffled": [0, 0, 0],
        "vote": [0, 0, 0], "vote, shuffled": [0, 0, 0]}
    assert [much for much, _ in found["vote"]] == [8, 16, 32]
    assert [np.abs(moved).max() for moved in steps] == [*np.repeat(probe.STEPS, len(found))]
    blind, _, _, voted, _ = steps[:5]
    grey = (before > 96) & (before < 159)                   # where hardly anything is cut at black or white
    assert set(np.unique(blind[grey])) == {-8, 8} and abs(np.sign(blind[grey]).mean()) < 0.2
    assert (voted[..., :20] <= 0).all() and (voted[..., 20:] >= 0).all()
    noise = [(copy - before)[grey].std() for copy in copies]
    assert noise == pytest.approx(np.repeat(probe.STEPS, 3), rel=0.15)                  # three draws of each step


# ---------------------------------------------------------------- one transformation at a time

def test_centred_digits_have_their_middle_on_the_canvas(digits):
    config = tiny("gap")
    (part,) = ac.stream_digits(digits, config, "centred", factors=ac.REST)
    images = digits["test"][0][:config.n_test]
    padded = np.pad(images.astype(float), ((0, 0), (6, 6), (6, 6)))
    np.testing.assert_allclose(part["images"], padded, atol=1)
    (turned,) = ac.stream_digits(digits, config, "centred", factors=ac.REST | {"turn": 90.0})
    np.testing.assert_allclose(turned["images"], np.rot90(padded, axes=(1, 2)), atol=1)


def test_what_does_not_fit_in_the_middle_goes_as_near_to_it_as_it_can():
    image = np.zeros((1, 28, 28), np.uint8)
    image[0, 1:27, 1:6] = 255                                  # left of the middle: 1.4 times as wide it would be cut
    placed, centres = ac.affine_digits(image, ac.affine_matrix(0, 0, 1, 1.6), None, 40)
    assert placed.sum(dtype=float) == pytest.approx(1.6 * image.sum(dtype=float), rel=0.02)
    assert centres[0, 0] == 19.5 and 19.5 < centres[0, 1] < 23


def test_accuracy_by_factor_at_rest_is_that_of_centred_digits(digits, runner, monkeypatch):
    config = tiny("gap")
    weights = trained(config, digits)
    monkeypatch.setattr(probe, "FACTOR_RANGES", {"turn": (0.0, 180.0), "down": (1.0,)})
    found = probe.accuracy_by_factor(weights, digits, config, runner)
    plain = ac.evaluate(weights, ac.stream_digits(digits, config, "centred", ac.REST), config, runner)["accuracy"]
    assert found["turn"][0] == [0.0, plain] and found["down"] == [[1.0, plain]] and len(found["turn"]) == 2


# ---------------------------------------------------------------- what is no digit

def test_auroc_by_hand():
    assert probe.auroc(np.array([2.0, 3.0]), np.array([0.0, 1.0])) == 1
    assert probe.auroc(np.array([1.0, 3.0]), np.array([2.0])) == 0.5
    assert probe.auroc(np.array([1.0, 1.0]), np.array([1.0, 0.0])) == 0.75                   # ties count half
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, 60), rng.integers(2, 11, 50)
    pairs = [(x > y) + (x == y) / 2 for x in a for y in b]
    assert probe.auroc(a, b) == pytest.approx(np.mean(pairs))


def test_pictures_that_are_no_digits(digits):
    config, rng = tiny("gap"), np.random.default_rng(0)
    part = next(ac.stream_digits(digits, config, "test"))
    made = {kind: probe.no_digits(part, kind, config, rng)["images"] for kind in probe.NO_DIGITS}
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
    """A bar of three rows above the lower half of a cross that lies elsewhere: its rows from its ink's centre on"""
    bar, cross = np.zeros((2, 9, 9), np.uint8)
    bar[1:4, 2:5] = 10
    cross[6, 4:9], cross[4:9, 6] = 20, 20
    made, other = probe.halves(np.stack([bar, cross]), np.array([1, 4]), np.random.default_rng(0))
    assert made[:2].tolist() == bar[:2].tolist() and made[2].tolist() == [0, 20, 20, 20, 20, 20, 0, 0, 0]
    assert made[3:5, 3].tolist() == [20, 20] and made[3:].sum() == 40
    assert other[:6].tolist() == cross[:6].tolist() and (other[6:8, 5:8] == 10).all() and other[6:].sum() == 60
    alone = probe.halves(bar[None], np.array([1]), np.random.default_rng(0))               # nothing to put below
    assert np.array_equal(alone[0], bar)
    many = probe.halves(np.stack([*[bar] * 9, cross]), np.array([*[1] * 9, 4]), np.random.default_rng(0))
    assert all(np.array_equal(each, made) for each in many[:9])                         # never that of its own class


def test_strokes_are_of_two_digits_and_moved(digits, monkeypatch):
    drawn = []
    monkeypatch.setattr(ac, "GLYPHS", ((3, 1, "5500 5099 | 0050 9950"), (7, 1, "2020 8080")))
    basis = ac._stroke_basis
    monkeypatch.setattr(ac, "_stroke_basis", lambda strokes, size: drawn.append(strokes) or basis(strokes, size))
    probe.strokes_at_random(12, np.random.default_rng(0))
    assert len(drawn) == 12 and all(("2020 8080" in strokes) and ("5500" in strokes or "0050" in strokes)
                                    for strokes in drawn)
    box = np.zeros((50, 28, 28), np.uint8)
    box[:, 4:24, 4:24] = 9
    monkeypatch.setattr(probe, "strokes_at_random", lambda n, rng: box)
    part = {"images": np.zeros((50, 40, 40), np.uint8), "labels": np.zeros(50, int)}
    moved = probe.no_digits(part, "strokes", tiny("gap"), np.random.default_rng(0))["images"]
    tops = moved.any(2).argmax(1)
    assert tops.min() == 4 and tops.max() == 16                                         # 10, by up to 6 either way


def test_cues_without_a_network_by_hand():
    picture = np.zeros((1, 3, 3), np.uint8)
    picture[0, 1, 1] = 7
    found = probe.without_network(picture)
    assert found["little ink"].tolist() == [-7] and found["smoothness"].tolist() == [-28]


def test_scores_of_confidence_by_hand(digits, runner):
    part = {name: a[:3] for name, a in next(ac.stream_digits(digits, tiny("gap"), "test")).items()}
    for model in ("shared", "gap"):
        config = tiny(model)
        weights = trained(config, digits)
        out = ac.forward(weights, part["images"].astype(np.float32) / 255, config)[0]
        found, top = probe.confidences(weights, part, config, runner), np.sort(out["scores"], 1)
        np.testing.assert_allclose(found["ahead"], top[:, -1] - top[:, -2], rtol=1e-4, atol=1e-6)
        if model == "gap":
            powers = np.exp(out["scores"].astype(float))
            np.testing.assert_allclose(found["probability"], (powers / powers.sum(1, keepdims=True)).max(1), rtol=1e-5)
            np.testing.assert_allclose(found["log-sum-exp"], np.log(powers.sum(1)), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(found["largest logit"], top[:, -1], rtol=1e-5)
        else:
            np.testing.assert_allclose(found["length"], out["scores"].max(1), rtol=1e-5)
            error = [np.mean((out["recon"][k, 0] - part["images"][k] / 255.0) ** 2) for k in range(3)]
            np.testing.assert_allclose(found["redrawn"], -np.array(error), rtol=1e-4)


def test_scores_together_are_in_units_of_their_spread_over_validation_digits(digits, runner, monkeypatch):
    """Spreads of 4 and 10: digits score 1 and 4.1, others 0.975, 0.8 and 0.995. Sums as they are (4 against 8), sums in
    units of the test digits' spreads (2 against 2.19) or a difference would put another picture above a digit"""
    found = {"val": {"length": np.array([0.0, 8.0]), "redrawn": np.array([0.0, 20.0])},
             "digits": {"length": np.array([4.0, 0.0]), "redrawn": np.array([0.0, 41.0])},
             "others": {"length": np.array([3.9, 0.0, 4.5]), "redrawn": np.array([0.0, 8.0, -1.3])}}
    monkeypatch.setattr(probe, "confidences", lambda params, part, config, runner: found[part["kind"]])
    blank = np.zeros((2, 40, 40), np.uint8)
    monkeypatch.setattr(ac, "stream_digits", lambda digits, config, kind: iter([
        {"kind": "val" if kind == "val" else "digits", "images": blank}]))
    monkeypatch.setattr(probe, "no_digits", lambda part, kind, config, rng: {"kind": "others", "images": blank})
    each = probe.detection({}, digits, tiny("shared"), runner)["noise"]
    assert each["length"] == pytest.approx(2.5 / 6) and each["redrawn"] == pytest.approx(4.5 / 6)
    assert each["together"] == 1


# ---------------------------------------------------------------- what capsules know

def test_a_dimension_that_is_a_place_follows_the_place(monkeypatch):
    """Capsules whose first two dimensions are where the ink's middle lies, whose third is noise, and no more"""
    class Middles:
        def forward(self, params, samples, config):
            images, rng = samples["images"].astype(float), np.random.default_rng(0)
            y, x = ((images.sum(axis) * np.arange(40)).sum(1) / images.sum((1, 2)) for axis in (2, 1))
            v = np.zeros((len(x), 10, ac.D))
            v[..., 0], v[..., 1], v[..., 2] = x[:, None], -y[:, None], rng.standard_normal(len(x))[:, None]
            return {"v": v}
    monkeypatch.setattr(probe, "N_PROBED", 600)
    which, single, together = probe.factor_r2({}, tiny("shared"), Middles())
    assert which.shape == single.shape == together.shape == (10, 6)
    assert (which[:, 0] == 0).all() and (which[:, 1] == 1).all()                        # x goes right, y down
    assert (single[:, :2] > 0.97).all() and (single[:, 2:] < 0.2).all()
    assert (together[:, :2] > 0.97).all() and (together[:, 2:] < 0.15).all()
    found = probe.dimensions({}, tiny("shared"), Middles())
    assert list(found) == list(probe.KNOWN_FACTORS)
    (_, best), (_, whole) = found["x"]
    assert best == pytest.approx(single[:, 0].mean()) and whole == pytest.approx(together[:, 0].mean())


def test_the_best_of_many_dimensions_that_know_nothing_knows_nothing(monkeypatch):
    """Noise in all dimensions: the best of 16 on the digits by which it was chosen would have 4 times as much"""
    class Noise:
        def forward(self, params, samples, config):
            return {"v": np.random.default_rng(0).standard_normal((len(samples["labels"]), 10, ac.D))}
    monkeypatch.setattr(probe, "N_PROBED", 400)
    _, single, _ = probe.factor_r2({}, tiny("shared"), Noise())
    assert single.mean() < 1.3 / 40                                         # 40 digits of each class in a half


# ---------------------------------------------------------------- the command line

def test_what_a_probe_prints_and_keeps(digits, tmp_path, monkeypatch, capsys):
    config = tiny("shared", width=0)
    ac.save_weights(tmp_path / "w.npz", config, trained(config, digits), {
        "source": "synthetic", "epochs": [], "seconds": 0.0, "steps": 0})
    monkeypatch.setattr(probe, "FACTOR_RANGES", {"turn": (0.0, 30.0)})
    monkeypatch.setattr(probe, "N_PROBED", 100)
    monkeypatch.setattr(probe, "NOISY", 2)
    monkeypatch.setattr(ac, "N_SYNTHETIC", {"train": 60, "val": 40, "test": 80})
    call = f"x --load {tmp_path}/w.npz --digits synthetic --n-test 20 --threads 1".split()
    monkeypatch.setattr(sys, "argv", [*call, "--out-json", f"{tmp_path}/r.json"])
    probe.main()
    out, found = capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())
    assert [value for value, _ in found["factors"]["turn"]] == [0, 30] and found["loaded"]["file"] == "w.npz"
    assert set(found["dimensions"]) == set(probe.KNOWN_FACTORS) and "R^2 of     stroke" in out
    assert set(found["robustness"]) > set(probe.SPOILT) and set(found["detection"]) == set(probe.NO_DIGITS)
    assert "right with noise" in out and "right by   turn" in out and "AUROC from strokes" in out
    for flags, words in {"--affnist-dir x": "no test_batches", "--lr 1": "trained with 0.01",
                         "--out-json no/x.json": "cannot write", "--load no.npz": "No such file"}.items():
        monkeypatch.setattr(sys, "argv", [*call, *flags.split()])
        with pytest.raises(ac.InputError, match=words):
            probe.main()
