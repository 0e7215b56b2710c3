"""FGSM, BIM and PGD: on a linear model, whose optimum is known; gradients of every attacked network
by finite differences."""

import json
import sys

import affnist_capsnet as ac
import smallnorb_novel_viewpoint as norb
from lab.messages import InputError

import attacks
import numpy as np
import pytest

DIGITS = {"capsnet": "--preset small", "cnn-dense": "--preset small", "cnn-gap": ""}
TOYS = ("matrix-capsnet", "cnn", "cnn-gap")


def digits_config(model, **more):
    """Settings of a small network with the structure of the attacked one"""
    more = {"digits": "synthetic", "threads": 1, "quiet": True} | more
    if model == "cnn-gap":
        return ac.Config(model=model, conv1_channels=4, **more)
    return ac.Config(model=model, preset="small", conv1_channels=8, **more)


def toys_config(model, **more):
    if model == "cnn":
        more = {"preset": "small"} | more
    return norb.Config(model=model, **more)


def network_of(module, config, dtype=np.float64):
    """An untrained Network whose normalizations have statistics as after training"""
    state = module.initial_state(config, dtype)
    rng = np.random.default_rng(1)
    for name, a in state["running"].items():
        low = 0.5 if name.endswith("var") else -0.5
        state["running"][name] = (rng.random(a.shape) + low).astype(dtype)
    return attacks.Network(module, config, module.weights_of(state))


NETWORKS = {  # those that are attacked, and two that pad images or add coordinates
    **{f"digits, {model}": digits_config(model) for model in DIGITS},
    **{f"toys, {model}": toys_config(model) for model in TOYS},
    "toys, cnn of the paper": toys_config("cnn", preset="paper", dropout=0.0),
    "toys, cnn-gap with coordinates": toys_config("cnn-gap", coordinates=True),
}


def made(name):
    """A Network and two images of noise, on which no two values are equal, in float64"""
    rng = np.random.default_rng(0)
    if name.startswith("digits"):
        return network_of(ac, NETWORKS[name]), rng.random((2, 40, 40))
    return network_of(norb, NETWORKS[name]), rng.random((2, 48, 48, 2))


# -------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_is_that_of_the_score_gap_by_centered_differences(name):
    """Along single pixels, at the edge and in the middle, and along all at once"""
    network, pixels = made(name)
    labels = np.array([3, 1])

    def value(pixels):
        scores, _ = attacks.scores_of(network, pixels)
        right = scores[np.arange(2), labels].copy()
        scores = scores.copy()
        scores[np.arange(2), labels] = -np.inf
        return scores.max(1) - right

    found = attacks.gradient(network, pixels, labels)
    assert found.shape == pixels.shape and found.dtype == np.float64
    rng = np.random.default_rng(2)
    directions = [(rng.standard_normal(pixels.shape) / 40, False) for _ in range(4)]
    for row, column in ((0, 0), (20, 17), (23, 30), (39, 3), (12, 21)):
        single = np.zeros_like(pixels)
        single[:, row, column] = 1.0
        directions.append((single, True))
    size = 1e-7
    for direction, single_pixel in directions:
        slope = (value(pixels + size * direction) - value(pixels - size * direction)) / (2 * size)
        along = (found * direction).reshape(2, -1).sum(1)
        np.testing.assert_allclose(along, slope, rtol=1e-4, atol=1e-4 * np.abs(slope).max() + 1e-9)
        if not single_pixel:  # the edge of an image may not be seen
            assert np.abs(slope).min() > 1e-9


@pytest.mark.parametrize("name", NETWORKS)
def test_scores_are_those_that_the_script_classifies_by(name):
    """Images of the data, by the script's own preparation"""
    network, pixels = made(name)
    images = np.rint(255 * pixels).astype(np.uint8)
    module = network.module
    prepared = (
        images / 255 if module is ac else norb.crop_batch(images, slice(None), dtype=np.float64)
    )
    usual, _ = module.forward(network.weights, prepared, network.config)
    found, _ = attacks.scores_of(network, images / 255)
    np.testing.assert_allclose(found, usual["scores"], rtol=1e-9)


def test_an_image_of_one_gray_level_has_no_gradient_of_its_spread():
    """Below one gray level the standard deviation counts as one: centered differences"""
    network, _ = made("toys, cnn")
    rng = np.random.default_rng(0)
    pixels = 0.5 + 0.2 / 255 * rng.standard_normal((1, 48, 48, 2))
    inputs, cache = attacks.inputs_forward(network, pixels)
    weights = rng.standard_normal(inputs.shape)
    found = attacks.inputs_backward(weights, cache)
    for _ in range(3):
        direction = rng.standard_normal(pixels.shape) / 255
        values = [
            (attacks.inputs_forward(network, pixels + size * direction)[0] * weights).sum()
            for size in (1e-3, -1e-3)
        ]
        assert (found * direction).sum() == pytest.approx((values[0] - values[1]) / 2e-3, rel=1e-5)


def test_the_gap_by_hand():
    scores = np.array([[1.0, 5.0, 2.0], [4.0, 0.0, 3.0]])
    values, dscores = attacks.gap(scores, np.array([1, 2]))
    assert values.tolist() == [-3, 1]
    assert dscores.tolist() == [[0, -1, 1], [1, 0, -1]]


# -------------------------------------------------------------- attacks


def linear(weights):
    return lambda pixels, labels: np.broadcast_to(weights, pixels.shape)


@pytest.mark.parametrize("attack", attacks.ATTACKS.values(), ids=attacks.ATTACKS)
@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.4])
def test_the_optimum_of_a_linear_model_is_found(attack, epsilon):
    """The largest w . x within epsilon and within 0 to 1 takes, of every pixel, the end that the
    weight's sign says"""
    rng = np.random.default_rng(0)
    pixels, weights = rng.random((5, 6, 6)), rng.standard_normal((6, 6))
    pixels[0] = 0.5  # nothing is cut off at 0 or 1
    best = np.where(weights > 0, np.minimum(pixels + epsilon, 1), np.maximum(pixels - epsilon, 0))
    found = attack(linear(weights), pixels, np.zeros(5, int), epsilon)
    np.testing.assert_allclose(found, best, atol=1e-12)
    gain = (weights * (found - pixels))[0].sum()
    assert gain == pytest.approx(epsilon * np.abs(weights).sum())


@pytest.mark.parametrize("attack", attacks.ATTACKS.values(), ids=attacks.ATTACKS)
def test_no_attack_leaves_epsilon_or_the_range(attack):
    """Of a gradient that changes its sign everywhere, in float32"""
    rng = np.random.default_rng(0)
    pixels = rng.random((3, 8, 8), np.float32)
    pixels[0] = np.rint(pixels[0])

    def ascent(pixels, labels):
        return np.sin(1e4 * pixels)

    for epsilon in attacks.EPSILONS[1:]:
        found = attack(ascent, pixels, np.zeros(3, int), epsilon)
        assert found.dtype == np.float32
        assert np.abs(found - pixels).max() <= epsilon * (1 + 1e-5)
        assert 0 <= found.min() and found.max() <= 1
        assert not np.array_equal(found, pixels)
    assert np.array_equal(
        attack(lambda pixels, labels: np.zeros_like(pixels), pixels, None, 0.1), pixels
    )


def test_bim_finds_a_maximum_that_fgsm_passes():
    """-(x - 0.55)^2 from 0.5 with epsilon 0.2: one step ends at 0.7, ten steps of 0.02 within
    one of the maximum"""

    def ascent(pixels, labels):
        return -2 * (pixels - 0.55)

    start = np.full((1, 1, 1), 0.5)
    assert attacks.fgsm(ascent, start, None, 0.2) == pytest.approx(0.7)
    assert attacks.bim(ascent, start, None, 0.2) == pytest.approx(0.55, abs=0.02)


def test_pgd_comes_back_from_a_wrong_first_step_and_bim_does_not():
    """A gradient that points down before the first step and up before the other nine. BIM ends at
    (9 - 1) / 10 of epsilon, PGD, (9 - 1) / 4, is cut off at epsilon"""
    start = np.full((1, 1, 1), 0.5)

    def moved(attack):
        signs = iter([-1.0] + 9 * [1.0])
        return attack(lambda pixels, labels: np.full_like(pixels, next(signs)), start, None, 0.1)

    assert moved(attacks.bim) == pytest.approx(0.58)
    assert moved(attacks.pgd) == pytest.approx(0.6)


def test_noise_moves_every_pixel_by_epsilon_up_or_down():
    pixels = np.full((4, 10, 10), 0.5, np.float32)
    found = attacks.noisy_images(pixels, np.random.default_rng(0))
    assert np.array_equal(found[0], pixels)
    for epsilon, images in zip(attacks.EPSILONS, found):
        np.testing.assert_allclose(np.abs(images - 0.5), epsilon, atol=1e-6)
    assert (found[-1] > 0.5).mean() == pytest.approx(0.5, abs=0.1)


@pytest.fixture
def threshold(monkeypatch):
    """A network of images with one pixel, whose class is 1 above 0.5; its gradient is 1, or -1 for
    class 1"""

    def scores_of(network, pixels):
        above = pixels[:, 0] - 0.5
        return np.stack([-above, above], axis=1), None

    def gradient(network, pixels, labels):
        return np.where(labels == 0, 1.0, -1.0)[:, None]

    monkeypatch.setattr(attacks, "scores_of", scores_of)
    monkeypatch.setattr(attacks, "gradient", gradient)
    return attacks.Network(ac, digits_config("capsnet"), {})


@pytest.mark.parametrize("attack", attacks.ATTACKS.values(), ids=attacks.ATTACKS)
def test_an_image_withstands_the_epsilons_that_do_not_change_its_class(threshold, attack):
    """0.496 is 0.004 below the threshold: of 0, 0.002, 0.005 ... it withstands two; 0.65 is class 1
    and withstands those up to 0.1; 0.9 is of class 1, but labelled 0; 0 withstands all"""
    pixels = np.array([[0.496], [0.65], [0.9], [0.0]])
    found = attacks.withstood(threshold, attack, pixels, np.array([0, 1, 0, 0]))
    assert found.tolist() == [2, 7, 0, 9]
    assert attacks.curve(found) == [0.75, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_an_image_that_is_wrong_once_does_not_count_at_larger_epsilons(threshold):
    """Given images that are right, wrong, and right again"""
    by_epsilon = [np.array([[0.1 if k != 3 else 0.9], [0.2]]) for k in range(9)]
    assert attacks.withstood_given(threshold, by_epsilon, np.array([0, 0])).tolist() == [3, 9]


def test_the_robustness_by_hand():
    """A curve that stays; one that falls to 0 at once; one that falls in the middle"""
    assert attacks.robustness([0.8] * 9) == pytest.approx(1)
    assert attacks.robustness([1] + [0] * 8) == 0
    assert attacks.robustness([0.5] * 5 + [0] * 4) == pytest.approx(0.5)
    assert np.isnan(attacks.robustness([0.0] * 9))


def test_the_share_of_zero_gradients(monkeypatch):
    monkeypatch.setattr(
        attacks, "gradient", lambda network, pixels, labels: np.array([[0, 1.0], [0, 0]])
    )
    assert attacks.zero_share(None, None, None) == 0.75


def test_each_attack_meets_the_network_that_it_should(monkeypatch):
    """Images that were made against a network have its name as their pixels"""
    monkeypatch.setattr(
        attacks,
        "images_against",
        lambda network, pixels, labels: {name: (name, network.name) for name in attacks.ATTACKS},
    )
    monkeypatch.setattr(attacks, "noisy_images", lambda pixels, rng: ("noise", ""))
    monkeypatch.setattr(
        attacks,
        "withstood",
        lambda network, attack, pixels, labels: (attack.__name__, network.name, "on", network.name),
    )
    monkeypatch.setattr(
        attacks,
        "withstood_given",
        lambda network, by_epsilon, labels: (*by_epsilon, "on", network.name),
    )
    caps, cnn = (
        attacks.Network(ac, digits_config(model), {}) for model in ("capsnet", "cnn-dense")
    )
    found = attacks.compare([caps, cnn], [cnn], None, None, None)
    assert found["capsnet"]["pgd"] == ("pgd", "capsnet", "on", "capsnet")
    assert found["capsnet"]["fgsm from cnn-dense"] == ("fgsm", "cnn-dense", "on", "capsnet")
    assert found["cnn-dense"]["noise"] == ("noise", "", "on", "cnn-dense")
    assert set(found["cnn-dense"]) == {
        "fgsm",
        "bim",
        "pgd",
        "noise",
        "fgsm from cnn-dense",
        "bim from cnn-dense",
        "pgd from cnn-dense",
    }


def test_views_of_toys_are_the_same_of_every_toy_and_prefer_no_lighting(monkeypatch):
    """500 of all 8,100 views: 20 of each of 25 toys; of each class 10 or 20 of each lighting"""
    chosen = {}

    def add_toy_images(tables, config):
        chosen.update(tables[0])
        tables[0]["images"] = np.zeros((len(tables[0]["labels"]), 1), np.uint8)

    monkeypatch.setattr(norb, "add_toy_images", add_toy_images)
    network = attacks.Network(norb, toys_config("cnn"), {})
    samples, source = attacks.samples_of(network, 500)
    assert source == "toys" and np.array_equal(samples["labels"], chosen["labels"])
    toys = chosen["labels"] * 10 + chosen["instances"]
    assert np.unique(toys, return_counts=True)[1].tolist() == [20] * 25
    for label in range(5):
        lightings = chosen["lightings"][chosen["labels"] == label]
        assert np.bincount(lightings).tolist() == [20, 20, 10, 20, 20, 10]


# -------------------------------------------------------------- the command


@pytest.fixture
def saved(monkeypatch, tmp_path):
    """saved(name, model, ...) -> a file with a network that was trained for two steps"""
    monkeypatch.setattr(ac, "N_SYNTHETIC", {"train": 400, "val": 10, "test": 60})

    def save(name, model, **more):
        config = digits_config(model, n_epochs=1, n_train=64, n_val=10, **more)
        path = tmp_path / name
        ac.save(path, config, ac.train(config, ac.load_data(config)))
        return path

    return save


def command(monkeypatch, *words):
    monkeypatch.setattr(
        sys, "argv", ["x", *map(str, words), "--digits", "synthetic", "--threads", "1"]
    )
    attacks.main()


def test_the_command(saved, monkeypatch, tmp_path, capsys):
    gap, gmp = saved("gap.npz", "cnn-gap"), saved("dense.npz", "cnn-dense")
    other = saved("other.npz", "cnn-gap", seed=1)
    monkeypatch.setattr(attacks, "EPSILONS", (0.0, 0.1, 0.4))
    out = tmp_path / "r.json"
    command(
        monkeypatch, "--load", gap, gmp, "--sources", other, "--n-images", 20, "--out-json", out
    )
    found = json.loads(out.read_text("utf-8"))
    own = "fgsm", "bim", "pgd"
    names = {"noise", *own, *(f"{attack} from cnn-gap" for attack in own)}
    assert set(found["attacks"]) == set(found["robustness"]) == {"cnn-gap", "cnn-dense"}
    assert set(found["robustness"]["cnn-gap"]) == names and found["n_images"] == 20
    first = {accuracies[0] for accuracies in found["attacks"]["cnn-gap"].values()}
    assert len(first) == 1  # without attack
    withstood = [int(digit) for digit in found["withstood"]["cnn-gap"]["pgd"]]
    assert len(withstood) == 20 and 0 <= min(withstood) <= max(withstood) <= 3
    assert found["attacks"]["cnn-gap"]["pgd"][1] == sum(n > 1 for n in withstood) / 20
    assert all(0 <= share < 1 for share in found["zero_gradients"].values())
    assert (
        len(found["seconds_of_runs"]) == 3 and found["seconds_of_runs"][0] == found["seconds_train"]
    )
    said = capsys.readouterr().out
    assert "20 images, pixels changed by up to 0.0, 0.1, 0.4 of their range" in said
    assert "  fgsm from cnn-gap " in said and "cnn-gap: gradient exactly 0 at " in said


def test_what_is_refused(saved, monkeypatch, tmp_path):
    gap = saved("gap.npz", "cnn-gap")
    full = saved("full.npz", "cnn-dense", train_shift="full")
    for words, named in (
        (["--load", gap, gap], "--load: gives two networks of --model cnn-gap"),
        (["--load", gap, full], "see different images"),
        (["--load", gap, "--n-images", 0], "--n-images 0: must be"),
        (["--load", tmp_path / "none.npz"], "is not a network of"),
        (["--load", gap, "--norb-dir", "x"], "--norb-dir: has no effect on networks of affnist"),
        (["--load", gap, "--out-json", tmp_path / "no" / "r.json"], "r.json"),
    ):
        with pytest.raises((InputError, ac.InputError), match=named):
            command(monkeypatch, *words)
