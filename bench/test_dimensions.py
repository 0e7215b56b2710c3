"""What capsule dimensions hold: each formula by hand, and the command."""

import json
import sys

import affnist_capsnet as ac
from lab.messages import InputError

import affnist_dimensions as dimensions
import numpy as np
import pytest

CONFIG = ac.Config(
    model="vector-gap",
    conv1_channels=4,
    digits="synthetic",
    n_train=64,
    n_val=32,
    n_epochs=1,
    threads=1,
    quiet=True,
)


def test_r_squared_of_known_relations():
    """Of two classes with different maps: an exact linear relation, one half of whose variance
    is noise, and none"""
    rng = np.random.default_rng(0)
    n = 40000
    labels = np.arange(n) % 2
    inputs = rng.standard_normal((n, 3))
    exact = inputs @ [1.0, -2.0, 0.5] + 7
    exact[labels == 1] = 3 - inputs[labels == 1] @ [4.0, 1.0, 0.0]
    noisy = inputs[:, 0] + rng.standard_normal(n)
    found = dimensions.r_squared(
        inputs, np.stack([exact, noisy, rng.standard_normal(n)], 1), labels
    )
    assert found[0] == pytest.approx(1)
    assert found[1] == pytest.approx(0.5, abs=0.04)
    assert found[2] == pytest.approx(0, abs=0.01)


def test_r_squared_is_that_of_the_half_that_was_not_fitted():
    """By hand, one class of six samples. Even ones lie on y = 2 x + 1, odd ones have y = 0, 0, 3
    at x = 0, 1, 2: the residuals are -1, -3, -2, the deviations from their mean -1, -1, 2"""
    x = np.array([[0.0], [0], [1], [1], [2], [2]])
    y = np.array([[1.0], [0], [3], [0], [5], [3]])
    assert dimensions.r_squared(x, y, np.zeros(6)) == pytest.approx(1 - 14 / 6)
    noise = np.random.default_rng(0).standard_normal((60, 17))
    assert dimensions.r_squared(noise[:, 1:], noise[:, :1], np.zeros(60)) < 0


def test_strokes_become_thicker_and_thinner_by_hand():
    dot = np.zeros((1, 5, 5), np.uint8)
    dot[0, 2, 2] = 200
    thicker = dimensions.thicken(dot, np.array([0.5]))[0]
    assert thicker[2].tolist() == [0, 100, 200, 100, 0]
    assert thicker[:, 2].tolist() == [0, 100, 200, 100, 0]
    assert thicker.sum() == 600
    thinner = dimensions.thicken(dot, np.array([-0.5]))[0]
    assert thinner[2].tolist() == [0, 0, 100, 0, 0]
    assert thinner.sum() == 100
    assert np.array_equal(dimensions.thicken(dot, np.array([0.0])), dot)


@pytest.mark.parametrize("amount", [-0.5, -0.2, 0.3, 0.5])
def test_the_amount_is_half_of_the_width_that_a_stroke_gains(amount):
    """A vertical bar of 4 px: each row's ink, in px"""
    bar = np.zeros((1, 12, 20), np.uint8)
    bar[:, :, 8:12] = 250
    width = dimensions.thicken(bar, np.array([amount]))[0, 6].sum() / 250
    assert width == pytest.approx(4 + 2 * amount, abs=0.02)


def test_moments_by_hand():
    """Two pixels of equal ink at (x, y) = (1, 2) and (5, 4)"""
    image = np.zeros((1, 6, 8), np.uint8)
    image[0, 2, 1] = image[0, 4, 5] = 255
    assert dimensions.moments(image)[0].tolist() == pytest.approx([3, 3, 4, 1, 2, 2])
    assert np.isfinite(dimensions.moments(np.zeros((1, 6, 8), np.uint8))).all()


def test_factors_are_what_was_drawn():
    """A dot in the middle of the image lies where x and y say; of a horizontal bar the slope
    follows from the rotation, since a shear along x leaves it horizontal, and its variance along
    itself from the scale along x"""
    rng = np.random.default_rng(0)
    dot = np.zeros((50, 28, 28), np.uint8)
    dot[:, 12:16, 12:16] = 255
    canvases, factors = dimensions.draw(dot, 40, rng)
    drawn = dict(zip(dimensions.FACTORS, factors.T))
    x, y, *_ = dimensions.moments(canvases).T
    np.testing.assert_allclose(x, drawn["x"], atol=0.1)
    np.testing.assert_allclose(y, drawn["y"], atol=0.1)
    for name, (low, high) in {**ac.RANGES, "thickness": (-0.5, 0.5)}.items():
        assert low <= drawn[name].min() < drawn[name].max() <= high
        assert drawn[name].max() - drawn[name].min() > 0.8 * (high - low)
    assert drawn["x"].max() - drawn["x"].min() > 20

    # at the center the other factors are the same, and x and y hardly vary
    _, same = dimensions.draw(dot, 40, np.random.default_rng(0), is_centered=True)
    assert np.array_equal(same[:, 2:], factors[:, 2:])
    assert np.ptp(same[:, :2]) < 1e-6 and same[0, 0] == pytest.approx(19.5)

    bar = np.zeros((50, 28, 28), np.uint8)
    bar[:, 13:15, 6:22] = 255
    canvases, factors = dimensions.draw(bar, 40, rng)
    drawn = dict(zip(dimensions.FACTORS, factors.T))
    _, _, var_x, var_y, covariance, _ = dimensions.moments(canvases).T
    slope = np.rad2deg(np.arctan2(2 * covariance, var_x - var_y)) / 2
    assert np.corrcoef(slope, drawn["rotation"])[0, 1] < -0.98  # y points down
    assert np.corrcoef(np.sqrt(var_x + var_y), drawn["scale_x"])[0, 1] > 0.95


@pytest.fixture
def trained(monkeypatch):
    """Data, and the state of a network that was trained for two steps"""
    monkeypatch.setattr(ac, "N_SYNTHETIC", {"train": 400, "val": 10, "test": 600})
    data = ac.load_data(CONFIG)
    return data, ac.train(CONFIG, data)


def test_the_digits_of_a_seed_do_not_depend_on_the_model(trained):
    data, _ = trained
    samples, factors = dimensions.draw_all(data, CONFIG)
    again, same = dimensions.draw_all(data, ac.Config(model="capsnet", digits="synthetic"))
    assert np.array_equal(samples["images"], again["images"]) and np.array_equal(factors, same)
    others, _ = dimensions.draw_all(data, ac.Config(model="capsnet", digits="synthetic", seed=1))
    assert not np.array_equal(samples["images"], others["images"])
    few, _ = dimensions.draw_all(data, ac.Config(digits="synthetic", n_test=7))
    assert np.array_equal(few["labels"], samples["labels"][:7])


@pytest.fixture
def network_with_capsules(trained, monkeypatch):
    """network_with_capsules(number) -> a Network whose true capsules have number(samples) as their
    first entry, and noise elsewhere"""

    def make(number):
        data, _ = trained

        def forward_shards(weights, samples, config, workers):
            labels = samples["labels"]
            v = np.random.default_rng(0).standard_normal((len(labels), 10, 16))
            v[np.arange(len(labels)), labels, 0] = number(samples)
            return {"v": v, "scores": np.eye(10)[labels]}

        monkeypatch.setattr(ac, "forward_shards", forward_shards)
        return dimensions.networks.Network("", CONFIG, CONFIG, {}, {}, data)

    return make


def test_the_capsule_of_the_true_class_is_probed(trained, network_with_capsules):
    """Capsules that hold x in the true class's first number and noise elsewhere"""
    data, _ = trained
    _, factors = dimensions.draw_all(data, CONFIG)
    found = dimensions.measure(network_with_capsules(lambda samples: factors[:, 0]), {}, None)
    of = found["dimensions"]
    assert of["trained"]["x"] == pytest.approx(1) and of["trained"]["rotation"] < 0.1
    assert of["center"]["x"] > 0.95 and of["moments"]["y"] > 0.95
    assert of["random"]["x"] < 0.1
    assert found["dimensions_accuracy"] == 1


def test_differences_do_not_depend_on_what_is_the_same_in_both_drawings(
    trained, network_with_capsules
):
    """Capsules that hold the rotation, plus a slant of each writer's own that is ten times as
    large"""
    data, _ = trained
    own = 100 * np.random.default_rng(1).standard_normal(600)
    rotations = [
        dimensions.draw_all(data, CONFIG, True, key)[1][:, 2] for key in dimensions.RANDOM_KEYS
    ]
    assert not np.array_equal(*rotations)
    calls = []

    def number(samples):  # trained and untrained, of the first and of the second drawing
        calls.append(samples)
        return own[: len(rotations[0])] + rotations[(len(calls) - 1) // 2]

    found = dimensions.measure_centered(network_with_capsules(number), {}, None)
    assert len(calls) == 4
    assert np.array_equal(calls[0]["labels"], calls[2]["labels"])
    assert not np.array_equal(calls[0]["images"], calls[2]["images"])
    assert found["centered_dimensions"]["trained"]["rotation"] < 0.2
    assert found["centered_differences"]["trained"]["rotation"] == pytest.approx(1)
    assert found["centered_differences"]["trained"]["thickness"] < 0.2


def test_principal_components_by_hand():
    """Of each class, pixels along one direction, with other lengths: the coordinate is the length
    minus the mean of the digits that are fitted. Axes of one class are not those of another"""
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], 100)
    images = np.zeros((200, 2, 2), np.uint8)
    lengths = rng.integers(0, 200, 200)
    images[:100, 0, 0] = lengths[:100]
    images[100:, 1, 1] = lengths[100:]
    images[:, 0, 1] = 7  # the same everywhere
    samples = {"images": images, "labels": labels}
    axes = dimensions.principal_axes(samples)
    found = dimensions.components(samples, axes)
    for label in (0, 1):
        own = labels == label
        expected = lengths[own] - lengths[own][::2].mean()
        np.testing.assert_allclose(np.abs(found[own, 0]), np.abs(expected), atol=1e-9)
        np.testing.assert_allclose(found[own, 1:], 0, atol=1e-9)


def test_the_command(trained, tmp_path, monkeypatch, capsys):
    _, state = trained
    ac.save(tmp_path / "w.npz", CONFIG, state)
    words = f"x --load {tmp_path}/w.npz --digits synthetic --out-json {tmp_path}/r.json"
    monkeypatch.setattr(sys, "argv", words.split())
    dimensions.main()
    found = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert set(found["dimensions"]) == {
        "trained",
        "untrained",
        "center",
        "moments",
        "components",
        "random",
    }
    assert all(tuple(one) == dimensions.FACTORS for one in found["dimensions"].values())
    assert found["dimensions"]["untrained"] != found["dimensions"]["trained"]
    assert found["loaded"]["file"] == "w.npz" and 0 <= found["dimensions_accuracy"] <= 1
    assert "  untrained   x " in capsys.readouterr().out
    for key in "centered_dimensions", "centered_differences":
        assert all(tuple(one) == dimensions.FACTORS[2:] for one in found[key].values())
    for config in (
        ac.Config(model="cnn-gap", conv1_channels=4),
        ac.Config(task="mnist", conv1_channels=4),
    ):
        ac.save(
            tmp_path / "w.npz", config, ac.initial_state(config) | {"history": state["history"]}
        )
        with pytest.raises(InputError, match="Give a network with capsules or vectors"):
            dimensions.main()
