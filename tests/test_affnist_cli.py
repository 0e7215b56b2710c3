"""Figures and film of the third experiment: command lines at toy size, offline; wrong input is one line."""
import json
import os

import affnist_capsnet as ac
from lab.figures import BLUE, WRONG
from lab.networks import Network

import imageio.v3 as imageio
import numpy as np
import pytest
import runs
from conftest import assert_refused, toy
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import make_affnist_capsnet_gif as film
import visualize_affnist_capsnet as figures

TOY = "--digits synthetic --n-epochs 1 --n-train 64 --n-val 32 --n-test 64 --batch-size 16 --conv1-channels 4".split()


@pytest.fixture
def cli(call):
    """cli(program, *flags): call's answer"""
    return lambda program, *flags: call(ac, program.main, *flags)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The file of a network at toy size"""
    path, (config, data) = tmp_path_factory.mktemp("run") / "weights.npz", toy(runs.AFF, n_train=64)
    ac.save(path, config, ac.without_moments(ac.train(config, data)))
    return path


@pytest.mark.parametrize("flags, drawn", [
    ("--load {} --n-test 64 --digits synthetic", {"examples", "reconstructions", "perturbation", "training_curves"}),
    (" ".join([*TOY, "--model capsnet --task mnist --quiet --only training_curves"]), {"training_curves"})])
def test_figures_at_toy_size(cli, weights, tmp_path, flags, drawn):
    code, _, stderr = cli(figures, *flags.format(weights).split(), "--outdir", "a")
    assert code == 0, stderr
    assert {path.stem for path in (tmp_path / "a").glob("*.png")} == drawn


def test_a_film_at_toy_size(cli, weights, tmp_path):
    code, _, stderr = cli(film, "--load", weights, weights, "--index", 3, "--frames", 2, "--fps", 10, "--out",
                          "film.gif")
    assert code == 0, stderr
    assert imageio.immeta(tmp_path / "film.gif", index=1, plugin="pillow")["duration"] == 100     # ms
    frames = imageio.imread(tmp_path / "film.gif", index=None)
    assert len(frames) == 12 and (frames[0] != frames[1]).any()             # 2 per factor, 4 for the position
    assert imageio.immeta(tmp_path / "film.gif", index=11, plugin="pillow")["duration"] == film.HOLD
    colors = {tuple(map(int, color)) for color in frames[0].reshape(-1, frames.shape[3])[:, :3]}
    near = [min(sum(abs(a - b) for a, b in zip(color, to_rgb_255(wanted))) for color in colors)
            for wanted in (BLUE, WRONG)]
    assert max(near) < 30                                                   # the legend's


def to_rgb_255(color):
    return [255 * part for part in to_rgb(color)]


@pytest.mark.parametrize("errors, expected", [
    # Numbers of wrong frames per digit, of the first and of the second network; -: wrong in the first frame, too
    (["1 1", "2 3", "4 2", "1 5"], [2, 1]),
    (["0 0", "0 3", "0 4", "0 5"], [0, 1]),                                 # none for the first network
    (["3 -4", "0 2", "-5 1", "2 0"], [3, 1]),
    (["0 0", "1 1", "2 2", "3 3"], [0, 1])])
def test_the_digits_of_the_film_are_chosen_by_its_rule(monkeypatch, errors, expected):
    """For each network the first digit that it misclassifies in more frames than the other, and that both classify
    correctly in the first frame; else the first digit that is left"""
    n_frames = len(film.make_scenes(2))
    monkeypatch.setattr(film, "images_on_path", lambda image, scenes: (image, None))

    def activations(k, index):
        words = errors[index].split()[k]
        is_wrong = np.zeros(n_frames, int)
        first = 0 if words.startswith("-") else 1
        is_wrong[first:first + abs(int(words))] = 1
        return np.eye(2)[is_wrong]                                          # the true class is 0
    monkeypatch.setattr(film, "activations", activations)
    indices, labels = list(range(len(errors))), [0] * len(errors)
    assert film.choose_digits(indices, labels, [0, 1], 2) == expected


def test_a_slimmed_file_lacks_a_decoder_which_is_no_setting_of_its_training():
    config = ac.Config(model="capsnet", preset="small", recon_weight=0.0, n_epochs=8)
    assert Network("net", config, config, {}, {}, {}).training_flags == ["--n-epochs 8", "--recon-weight 0.0"]
    slim = Network("net", config, config, {}, {"slimmed": "no decoder"}, {})
    assert film.note_on([slim]) == "Trained with --n-epochs 8."


def test_a_strip_keeps_a_mark_per_frame_and_counts():
    scenes = film.make_scenes(2)
    heights = np.eye(3)[[0, 1] * (len(scenes) // 2)]                        # class 0 is true: every second one is wrong
    panel = film.Panel(*Figure().subplots(2), heights, 0, scenes)
    for t in range(3):
        panel.show(t)
    marks = panel.strip.get_array()
    np.testing.assert_allclose(marks[:, :4], [
        [(1, 1, 1), to_rgb(WRONG), (1, 1, 1), (1, 1, 1)], [to_rgb(BLUE), (1, 1, 1), to_rgb(BLUE), (1, 1, 1)]])
    assert panel.ax_strip.get_xlabel() == "correct in 2 of 3 frames"
    assert [bar.get_hatch() for bar in panel.bars] == [None] * 3
    panel.show(3)
    assert [bar.get_hatch() for bar in panel.bars] == [None, film.HATCH, None]


REFUSED = {
    film: {"--frames 1": "--frames", "--index 5000": "--index", "--out no/x.gif": "no/x", "--out x.png": ".gif",
           "--n-test 9": "--n-test has no effect", "--index 1 2 3 4 5": "digits 5",
           "--fps 0": "--fps 0: must be between 0.1 and 50", "--fps nan": "--fps nan",
           "--load nothing.npz": "No such file", "--recompute-statistics 9": "--recompute-statistics"},
    figures: {"--load nothing.npz": "No such file", "--results nowhere": "no such", "--eval-split val": "--eval-split",
              "--results . --seed 0": "--seed has no effect with --results", f"--outdir {os.devnull}/x": "--outdir"}}


@pytest.mark.parametrize("program, flags", [(program, flags) for program in REFUSED for flags in REFUSED[program]])
def test_what_siblings_refuse(cli, weights, program, flags):
    given = flags.split()
    if "--load" not in given and "--results" not in given:
        given += ["--load", weights] if program is film else [*TOY[:2], "--n-train", 32]
    assert_refused(cli(program, *given), REFUSED[program][flags])


@pytest.mark.parametrize("tested, given, fault", [
    (True, "affnist", None), (False, "", None),
    (True, "", "--affnist-dir left out: .* is finished, with it. Test it again: "),
    (False, "affnist", "--affnist-dir affnist: .* is finished, without it. Test it again: ")])
def test_a_finished_run_is_taken_as_it_is_only_if_it_was_tested_on_the_same_files(
        tmp_path, tested, given, fault):
    """With affNIST's own files, whose accuracy is that of the real digits among TEST_SETS"""
    key, = (key for key, kind, _ in ac.TEST_SETS["affnist"] if kind == "real")
    config = ac.Config(affnist_dir=given)
    result = {"config": vars(config), "source": "mnist", "trained_on": "mnist"}
    if tested:
        result[f"{key}_accuracy"] = 0.5
    (tmp_path / "metrics.json").write_text(json.dumps(result), "utf-8")
    if fault is None:
        assert ac.finished_result(tmp_path, config) == result
    else:
        with pytest.raises(ac.InputError, match=fault):
            ac.finished_result(tmp_path, config)
