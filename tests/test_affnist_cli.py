"""Figures and film of the third experiment: command lines at toy size, offline; wrong input is one line."""
import json
import os

import affnist_capsnet as ac

import imageio.v3 as imageio
import pytest
import runs
from conftest import assert_refused, toy

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
    assert len(frames) == 8 and (frames[0] != frames[1]).any()
    colors = {tuple(map(int, color)) for color in frames[0].reshape(-1, frames.shape[3])[:, :3]}
    near = [min(sum(abs(a - b) for a, b in zip(color, wanted)) for color in colors) for wanted in
            ((0, 114, 178), (230, 159, 0))]
    assert max(near) < 30                                                   # the legend's blue and orange


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
