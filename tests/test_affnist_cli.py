"""The third experiment's command lines: end to end at toy size, offline; wrong input is one line and exit code 2."""
import json
import os
import sys
from types import SimpleNamespace

import affnist_capsnet as ac

import imageio.v3 as imageio
import pytest
from conftest import ROOT

import make_affnist_capsnet_gif as film
import visualize_affnist_capsnet as figures

sys.path.insert(0, str(ROOT / "workflow"))
import runs  # noqa: E402

SCRIPTS = {"experiment": ac, "figures": figures, "film": film}
TOY = "--digits synthetic --n-epochs 1 --n-train 64 --n-val 32 --n-test 64 --batch-size 16 --conv1-channels 4".split()


@pytest.fixture
def cli(call):
    """cli(script, *flags): call's answer"""
    return lambda script, *flags: call(ac, SCRIPTS[script].main, *flags)


@pytest.fixture(scope="module")
def toy_run(run_script, tmp_path_factory):
    """The experiment at toy size in a process of its own -> what it printed, its results and files"""
    folder = tmp_path_factory.mktemp("run")
    out, checkpoint, weights = folder / "out.json", folder / "run.npz", folder / "weights.npz"
    done = run_script("affnist_capsnet.py", *TOY, "--out-json", out, "--checkpoint", checkpoint, "--out-weights",
                      weights)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return SimpleNamespace(stdout=done.stdout, results=json.loads(out.read_text("utf-8")), checkpoint=checkpoint,
                           weights=weights)


def test_results_have_the_promised_keys(toy_run):
    results = toy_run.results
    for key in ("familiar", "any_position", "centered", "affine"):
        low, high = results[f"{key}_accuracy_ci95"]
        assert 0 <= low <= results[f"{key}_accuracy"] <= high <= 1 and results[f"{key}_n"] == 64
        assert results[f"{key}_hits"] == pytest.approx(64 * results[f"{key}_accuracy"], abs=0.01)
        assert len(results[f"{key}_per_class"]) == 10 and results[f"{key}_recon_mse"] > 0
    assert results["source"] == "synthetic" and "test_accuracy" not in results and "real_affine_accuracy" not in results
    assert results["history"]["epoch"] == [1] and len(results["hit_bits"]) == 4
    assert "translated digits  " in toy_run.stdout and "affine digits, any position  " in toy_run.stdout
    assert "SYNTHETIC digits" in toy_run.stdout and "going on" not in toy_run.stdout


def test_mnists_task_has_one_test(cli, tmp_path):
    code, out, stderr = cli("experiment", *TOY, "--task", "mnist", "--model", "cnn-gap", "--out-json", "r.json")
    assert code == 0, stderr
    found = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert "test_accuracy" in found and "affine_accuracy" not in found and "affine digits" not in out


BAD = {"--lr 1e30 --n-epochs 9": "training diverged. Lower --lr",
       "--task mnist --affnist-dir x": "--affnist-dir x applies to --task affnist, not to mnist",
       "--affnist-dir nowhere": "--affnist-dir nowhere: no test_batches",
       "--affnist-dir x/training_batches": "training_batches: holds training digits",
       "--eval-split val --n-test 6000": "--n-test 6000: --eval-split val has 5000 digits",
       "--batch-size 65": "--batch-size", "--n-per-class 5000": "--n-per-class 5000: one class has only",
       "--load nothing.npz": "nothing.npz: No such file", "--mnist-dir nowhere --digits mnist": "nowhere"}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line_and_leaves_no_file(cli, tmp_path, flags):
    before = sorted(tmp_path.rglob("*"))
    code, _, stderr = cli("experiment", *([] if "--load" in flags else TOY), *flags.split())
    assert code == 2 and stderr.startswith("error: ") and BAD[flags] in stderr, stderr
    assert stderr.count("\n") == 1 and "Traceback" not in stderr
    assert sorted(tmp_path.rglob("*")) == before


# ---------------------------------------------------------------- figures

DRAWN = {"examples", "reconstructions", "perturbation", "training_curves"}


def test_figures_at_toy_size(cli, toy_run, tmp_path):
    code, _, stderr = cli("figures", "--load", toy_run.weights, "--n-test", 64, "--outdir", tmp_path / "a")
    assert code == 0, stderr
    assert {path.stem for path in (tmp_path / "a").glob("*.png")} == DRAWN
    code, _, stderr = cli("figures", *TOY, "--model", "capsnet", "--task", "mnist", "--outdir", tmp_path / "b",
                          "--quiet")
    assert code == 0, stderr
    assert {path.stem for path in (tmp_path / "b").glob("*.png")} == DRAWN


@pytest.fixture
def results(tmp_path):
    """A folder with two seeds of some settings that the figures of results show"""
    folder = tmp_path / "results"
    (folder / figures.EXPERIMENT).mkdir(parents=True)
    for table, names in (("matched-accuracy", ("capsnet", "cnn", "cnn-64", "cnn-dense")),
                         ("backbone", ("capsnet-shared", "cnn-gap"))):
        lines = [{"setting": name, "seed": seed, "generation": 1, "experiment": figures.EXPERIMENT,
                  "config": {"seed": seed}}
                 | {key: 0.9 + seed / 100 for key in figures.TESTS} for name in names for seed in (0, 1)]
        path = folder / figures.EXPERIMENT / f"{table}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return folder


def test_figures_of_results(results, tmp_path, cli):
    call = "figures", "--results", results, "--quiet"
    matched = results / figures.EXPERIMENT / "matched-accuracy.jsonl"
    assert cli(*call, "--outdir", tmp_path / "f") == (0, "", "")
    assert {path.stem for path in (tmp_path / "f").glob("*.png")} == {"matched_accuracy", "forest"}
    lines = matched.read_text("utf-8")
    for text, said in ("{", "not a result"), (lines.replace("any_position_accuracy", "p"), "any_position_accuracy"), (
            "", "no result of matched-accuracy/capsnet"):
        matched.write_text(text, "utf-8")
        code, _, stderr = cli(*call, "--outdir", tmp_path / "new")
        assert code == 2 and said in stderr and stderr.count("\n") == 1
        assert not (tmp_path / "new/matched_accuracy.png").exists()


def test_every_difference_of_the_forest_plot_is_planned():
    planned = {f"{result.table}/{result.setting}" for result in runs.RESULTS if result.experiment == runs.AFF}
    lines = [line for line in figures.FOREST if not isinstance(line, str)]
    assert {setting for _, one, other, _ in lines for setting in (one, other)} <= planned


# ---------------------------------------------------------------- the film

def test_a_film_at_toy_size(cli, toy_run, tmp_path):
    code, _, stderr = cli("film", "--load", toy_run.weights, toy_run.weights, "--frames", 4, "--out", "film.gif")
    assert code == 0, stderr
    frames = imageio.imread(tmp_path / "film.gif", index=None)
    assert len(frames) == 24 and (frames[0] != frames[1]).any()
    colors = {tuple(map(int, color)) for color in frames[0].reshape(-1, frames.shape[3])[:, :3]}
    near = [min(sum(abs(a - b) for a, b in zip(color, wanted)) for color in colors) for wanted in
            ((0, 114, 178), (230, 159, 0))]
    assert max(near) < 30                                                   # the legend's blue and orange


# ---------------------------------------------------------------- what siblings refuse

REFUSED = {
    "film": {"--frames 1": "--frames", "--index 5000": "--index", "--out no/x.gif": "no/x",
             "--out x.png": ".gif", "--out-json x.json": "--out-json", "--n-test 9": "--n-test has no effect",
             "--index 1 2 3 4 5": "digits 5", "--load nothing.npz": "No such file"},
    "figures": {"--out-json x.json": "--out-json", "--load nothing.npz": "No such file", "--results nowhere": "no such",
                "--results . --seed 0": "--seed has no effect with --results", f"--outdir {os.devnull}/x": "--outdir"}}


@pytest.mark.parametrize("script, flags", [(script, flags) for script in REFUSED for flags in REFUSED[script]])
def test_what_siblings_refuse(cli, toy_run, script, flags):
    few = "--digits synthetic --n-epochs 1 --n-train 32 --n-val 16 --n-test 64".split()
    before = {"film": [] if "--load" in flags else ["--load", toy_run.weights],
              "figures": [] if "--load" in flags or "--results" in flags else few}[script]
    code, _, stderr = cli(script, *before, *flags.split())
    assert code == 2 and REFUSED[script][flags] in stderr and stderr.count("\n") == 1, stderr
