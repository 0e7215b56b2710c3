"""The nearest neighbors in bench/ that networks are compared with: by hand, and their commands."""
import itertools
import json
import sys
from pathlib import Path

import affnist_capsnet as ac
import multimnist_capsnet as mc
from lab.messages import InputError

import affnist_nearest
import colored_digits
import colored_nearest
import multimnist_linear
import multimnist_nearest
import numpy as np
import pytest
import smallnorb_nearest

ROOT = Path(__file__).resolve().parents[1]


def test_pairs_are_classified_by_their_nearest_by_hand(monkeypatch):
    """Four known pairs, each a bright pixel; two of five test pairs are correct, one of them in the other order"""
    known = np.zeros((4, 2, 2), np.uint8)
    known.reshape(4, 4)[np.arange(4), np.arange(4)] = 200
    labels = np.array([[3, 1], [4, 5], [0, 9], [7, 2]])
    pairs = {"composites": known[[0, 1, 2, 3, 3]], "labels": np.array([[1, 3], [4, 5], [0, 8], [5, 7], [0, 1]])}
    monkeypatch.setattr(multimnist_nearest, "in_the_middle", np.asarray)
    both, (low, high) = multimnist_nearest.accuracy(known, labels, [pairs])
    assert both == 2 / 5 and low < both < high


def test_ink_is_moved_to_the_middle_by_hand():
    """The center of mass of ink at (0, 1) and twice as much at (0, 5) is (0, 3 2/3)"""
    image = np.zeros((1, 7, 7), np.uint8)
    image[0, 0, 1], image[0, 0, 5] = 100, 200
    middle, = multimnist_nearest.in_the_middle(image)
    assert middle[3, 0] == 100 and middle[3, 4] == 200 and middle.sum() == 300


def test_the_nearest_training_image_by_loops():
    """At equal distances the first class is predicted, and a class that was never shown never is"""
    rng = np.random.default_rng(5)
    known, labels = rng.integers(0, 3, (6, 1024)).astype(float), np.array([4, 1, 0, 2, 1, 4])
    known[3] = known[0]
    images = np.concatenate([known[:2], rng.integers(0, 3, (3, 1024)).astype(float)])
    table = np.full((5, 5), np.inf)
    for (n, image), (known_image, label) in itertools.product(enumerate(images), zip(known, labels)):
        table[n, label] = min(table[n, label], ((image - known_image) ** 2).sum())
    predicted = smallnorb_nearest.nearest(known, labels, images)
    assert predicted.tolist() == table.argmin(1).tolist() and predicted[:2].tolist() == [2, 1]
    assert np.all(np.isinf(table[:, 3])) and 3 not in predicted


@pytest.fixture
def found(monkeypatch, tmp_path):
    """found(program, flags) -> what the command measured and wrote, with few synthetic digits"""
    for module in mc, ac:
        monkeypatch.setattr(module, "N_SYNTHETIC", {"train": 400, "val": 10, "test": 60})

    def run(program, flags, digits="--digits synthetic"):
        path = tmp_path / "r.json"
        monkeypatch.setattr(sys, "argv", f"x {flags} {digits} --out-json {path}".split())
        program.main()
        return json.loads(path.read_text("utf-8"))
    return run


def test_both_commands(found, capsys):
    pairs = found(multimnist_nearest, "--n-known 50 --n-test 20")
    low, high = pairs["nearest_ci95"]
    assert low <= pairs["nearest"] <= high
    for flags, n_known in (("--n-known 60", 60), ("--n-per-class 2 --n-known 60", 20)):
        one = found(affnist_nearest, f"{flags} --n-test 0")
        assert one["bench"]["n_known"] == n_known
        assert f"nearest of {n_known} known digits: " in capsys.readouterr().out
    for key in ("familiar", "any_position", "centered", "affine"):
        low, high = one["nearest"][key + "_ci95"]
        assert low <= one["nearest"][key] <= high
    with pytest.raises(ac.InputError, match="--n-per-class -1"):
        found(affnist_nearest, "--n-per-class -1")


def test_the_command_for_viewpoints(found, capsys):
    """Its metrics have the names of a network's; training and familiar images have the same viewpoints"""
    one = found(smallnorb_nearest, "--data shapes --n-per-combo 1 --n-elev 1", digits="")
    assert "nearest of 30 training images: familiar 1.0000, novel" in capsys.readouterr().out
    assert one["familiar"] == 1 and one["drop"] == pytest.approx(1 - one["novel"]) and one["n_params"] == 0
    assert (one["config"]["data"], one["config"]["train_azimuths"], one["source"]) == ("shapes", "0:150", "shapes")
    assert sum(map(sum, one["novel_toy_hits"])) == round(60 * one["novel"])
    assert [len(one["sweep"][key]) for key in ("angles", "accuracy")] == [12, 12]
    with pytest.raises(InputError, match="unrecognized arguments: --lr"):
        found(smallnorb_nearest, "--lr 1", digits="")


def test_linear_maps_by_hand():
    """Two pixels. A digit of class 0 is the first pixel of the composite, one of class 1 half of the second; a class
    without a digit maps to an empty image"""
    rng = np.random.default_rng(0)
    composites = rng.integers(0, 256, (40, 1, 2)).astype(np.uint8)
    sources = np.zeros((40, 2, 1, 2))
    sources[:, 0, 0, 0] = composites[:, 0, 0]
    sources[:, 1, 0, 1] = composites[:, 0, 1] / 2
    pairs = {"composites": composites, "sources": sources, "labels": np.tile([0, 1], (40, 1))}
    maps = multimnist_linear.fit([pairs], 3)
    assert maps[0] == pytest.approx(np.array([[1, 0], [0, 0], [0, 0]]), abs=1e-3)
    assert maps[1] == pytest.approx(np.array([[0, 0], [0, 0.5], [0, 0]]), abs=1e-3)
    assert not maps[2].any()
    error, constant = multimnist_linear.errors(maps, [pairs])
    digits = sources.reshape(80, 2) / 255
    assert error == pytest.approx(0, abs=1e-5)
    assert constant == pytest.approx(np.square(digits - digits.mean(0)).mean())


def test_the_linear_baseline_from_the_command_line(found):
    result = found(multimnist_linear, "--n-known 50 --n-test 20")
    assert 0 < result["test_recon_mse"] < 1 and 0 < result["baseline_recon_mse"] < 1


def test_digits_in_color_by_hand():
    """A background and a digit in one color each, between which the ink's level interpolates; the digit is found again
    when color is removed"""
    images = np.zeros((3, 28, 28), np.uint8)
    images[:, 5:20, 9:12] = 255
    images[:, 20, 9:12] = 51
    colored = colored_digits.in_color(images, np.random.default_rng(0))
    colors = np.random.default_rng(0)
    for image in colored:
        color, background = colors.integers(0, 256, (2, 3))
        assert image.shape == (32, 32, 3) and (image[0] == background).all() and (image[7, 11] == color).all()
        assert np.abs(image[22, 11] - (0.2 * color + 0.8 * background)).max() <= 1
    gray = colored_nearest.without_color(colored)
    assert np.abs(gray.astype(int) - np.pad(images, [(0, 0), (2, 2), (2, 2)])).max() <= 3


def test_the_page_shows_how_digits_are_colored():
    """docs/reference/affnist_capsnet.md has the function as the file has it"""
    page = (ROOT / "docs" / "reference" / "affnist_capsnet.md").read_text("utf-8")
    file = (ROOT / "bench" / "colored_digits.py").read_text("utf-8")
    shown = page.partition("def in_color")[2].partition("\n```")[0]
    assert shown and "def in_color" + shown.rstrip() in file


def test_the_commands_for_digits_in_color(found, capsys, monkeypatch, tmp_path):
    """From digits to the baseline: the set is read by the experiment, and the nearest image is found in it"""
    monkeypatch.setattr(sys, "argv", f"x {tmp_path / 'colored'} --digits synthetic".split())
    monkeypatch.setattr(ac, "N_SYNTHETIC", {"train": 400, "val": 10, "test": 60})
    colored_digits.main()
    data = ac.read_idx_folder(str(tmp_path / "colored"))
    assert data["test"][0].shape == (60, 32, 32, 3) and data["names"] == list("0123456789")
    one = found(colored_nearest, f"--data-dir {tmp_path / 'colored'} --n-known 300", digits="")
    assert "nearest of 300 known images: " in capsys.readouterr().out
    assert one["nearest"]["test"] < one["nearest"]["without_color"] <= 1
    with pytest.raises(InputError, match="--data-dir: is missing"):
        found(colored_nearest, "")
