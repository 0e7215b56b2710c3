"""The nearest neighbors in bench/ that networks are compared with: by hand, and their commands."""
import json
import sys

import affnist_capsnet as ac
import multimnist_capsnet as mc

import affnist_nearest
import multimnist_nearest
import numpy as np
import pytest


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


@pytest.fixture
def found(monkeypatch, tmp_path):
    """found(program, flags) -> what the command measured and wrote, with few synthetic digits"""
    for module in mc, ac:
        monkeypatch.setattr(module, "N_SYNTHETIC", {"train": 400, "val": 10, "test": 60})

    def run(program, flags):
        path = tmp_path / "r.json"
        monkeypatch.setattr(sys, "argv", f"x {flags} --digits synthetic --out-json {path}".split())
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
