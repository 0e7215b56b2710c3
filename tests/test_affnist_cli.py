"""The third experiment's command lines: end to end at toy size, offline; wrong input is one line and exit code 2."""
import json
import sys
from types import SimpleNamespace

import affnist_capsnet as ac

import imageio.v3 as imageio
import pytest

import make_affnist_capsnet_gif as film
import visualize_affnist_capsnet as figures

EXPERIMENT, FIGURES = "affnist_capsnet.py", "visualize_affnist_capsnet.py"
GIF = "make_affnist_capsnet_gif.py"
TOY = ("--digits synthetic --n-epochs 1 --n-train 64 --n-val 32 --n-test 64 --batch-size 16 --conv1-channels 4 "
       "--conv3-channels 4 --primary-types 2").split()


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """cli(*flags) -> exit code, stdout, stderr of the experiment in this process, with few synthetic digits, in
    tmp_path"""
    monkeypatch.setattr(ac, "N_SYNTHETIC", {"train": 60, "val": 40, "test": 80})
    monkeypatch.setattr(ac, "MNIST_MIRRORS", ())
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        monkeypatch.setattr(sys, "argv", [EXPERIMENT, *map(str, flags)])
        capsys.readouterr()
        code = 0
        try:
            ac.run_cli(ac.main)
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def toy_run(run_script, tmp_path_factory):
    """The experiment at toy size in a process of its own -> the finished process, its results and files"""
    folder = tmp_path_factory.mktemp("run")
    out, checkpoint, weights = folder / "out.json", folder / "run.npz", folder / "weights.npz"
    done = run_script(EXPERIMENT, *TOY, "--out-json", out, "--checkpoint", checkpoint, "--out-weights", weights)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return SimpleNamespace(stdout=done.stdout, results=json.loads(out.read_text()), checkpoint=checkpoint,
                           weights=weights)


def test_results_have_the_promised_keys(toy_run):
    results = toy_run.results
    for key in ("familiar", "placed", "affine"):
        low, high = results[f"{key}_accuracy_ci95"]
        assert 0 <= low <= results[f"{key}_accuracy"] <= high <= 1 and results[f"{key}_n"] == 64
        assert results[f"{key}_hits"] == pytest.approx(64 * results[f"{key}_accuracy"], abs=0.01)
        assert len(results[f"{key}_per_class"]) == 10 and results[f"{key}_recon_mse"] > 0
    assert results["source"] == "synthetic" and "test_accuracy" not in results and "real_affine_accuracy" not in results
    assert len(results["weights_sha256"] or "") in (0, 64) and results["history"]["epoch"] == [1]
    assert "moved test digits" in toy_run.stdout and "affine test digits" in toy_run.stdout
    assert "SYNTHETIC digits" in toy_run.stdout


def test_mnists_task_has_one_test(cli, tmp_path):
    code, out, stderr = cli(*TOY, "--task", "mnist", "--model", "gap", "--out-json", "r.json")
    assert code == 0, stderr
    found = json.loads((tmp_path / "r.json").read_text())
    assert "test_accuracy" in found and "affine_accuracy" not in found and "moved test" not in out


def test_a_loaded_network_gives_the_results_of_its_run(cli, toy_run, tmp_path):
    for path in (toy_run.checkpoint, toy_run.weights):
        code, out, stderr = cli("--load", path, "--n-test", 64, "--out-json", "again.json")
        assert code == 0, stderr
        again = json.loads((tmp_path / "again.json").read_text())
        assert again["loaded"]["file"] == path.name and again["affine_n"] == 64
    code, out, _ = cli("--load", toy_run.checkpoint, "--n-test", 64, "--n-variants", 2, "--out-json", "more.json")
    assert code == 0 and json.loads((tmp_path / "more.json").read_text())["affine_n"] == 128


def test_resuming_gives_the_same_bits(cli, tmp_path):
    flags = [*TOY, "--lr-schedule", "constant", "--quiet"]
    assert cli(*flags, "--n-epochs", 3, "--out-json", "whole.json") == (0, "", "")
    assert cli(*flags, "--n-epochs", 1, "--checkpoint", "part.npz") == (0, "", "")
    more = "--checkpoint", "part.npz", "--resume", "--out-json", "parted.json"
    assert cli(*flags, "--n-epochs", 3, *more) == (0, "", "")
    whole, parted = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "parted"))
    assert whole["history"]["train_loss"] == parted["history"]["train_loss"]
    assert whole["affine_hits"] == parted["affine_hits"]


BAD = {"--n-train 0": "--n-train", "--n-val 5001": "--n-val", "--n-test 0": "--n-test",
       "--n-variants 0": "--n-variants",
       "--task mnist --n-variants 2": "--n-variants: means nothing to --task mnist", "--max-shift 7": "--max-shift",
       "--task mnist --affnist-dir x": "--affnist-dir: means nothing", "--affnist-dir nowhere": "--affnist-dir",
       "--batch-size 65": "--batch-size", "--lr 0": "--lr", "--stop-at 2": "--stop-at", "--model nearest": "--model",
       "--model gap --routing-iters 2": "--routing-iters: means nothing", "--model vectors --no-places": "--no-places",
       "--model shared --width 4": "--width: means nothing", "--dropout 0.5": "--dropout: means nothing",
       "--model dense --loss margin": "--loss: means nothing", "--recon-weight -1": "--recon-weight",
       "--out-json no/x.json": "no/x", "--checkpoint folder": "folder", "--resume": "--checkpoint",
       "--model vectors --preset small": "vectors has the size of shared on the deep front end only",
       "--routing-grad detached": "--routing-grad: means nothing to one iteration",
       "--model vectors --front-end paper": "--front-end paper: vectors",
       "--model vectors --primary-types 3": "--primary-types: means nothing to --model vectors",
       "--preset small --conv3-channels 3": "--conv3-channels: means nothing to this front end",
       "--recon-weight 0 --decoder-hidden2 5": "--decoder-hidden2: means nothing to --recon-weight 0",
       "--n-per-class 5000": "--n-per-class 5000: of one digit there are", "--tests-on train": "--tests-on",
       "--load nothing.npz": "nothing.npz: no such file", "--mnist-dir nowhere --digits mnist": "nowhere"}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line_and_leaves_no_file(cli, tmp_path, flags):
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    words = flags.split()
    usual = [] if {"--load", "gap", "dense", "vectors"} & set(words) else TOY
    code, _, stderr = cli(*usual, *words)
    assert code == 2 and stderr.startswith("error: ") and BAD[flags] in stderr, stderr
    assert stderr.count("\n") == 1 and "Traceback" not in stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_of_another_task_is_refused(cli):
    assert cli(*TOY, "--checkpoint", "run.npz", "--quiet")[0] == 0
    code, _, stderr = cli(*TOY, "--task", "mnist", "--checkpoint", "run.npz", "--resume")
    assert code == 2 and "task" in stderr and stderr.count("\n") == 1


def test_figures_at_toy_size(run_script, toy_run, tmp_path):
    done = run_script(FIGURES, "--load", toy_run.weights, "--n-test", 64, "--outdir", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in (tmp_path / "a").glob("*.png")} == {
        "digits", "redrawn", "factors", "perturbations", "dimensions"}
    done = run_script(FIGURES, *TOY, "--networks", "caps,vectors", "--task", "mnist", "--outdir", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in (tmp_path / "b").glob("*.png")} == {
        "digits", "redrawn", "perturbations", "dimensions"}


@pytest.fixture
def results(tmp_path):
    """A folder with two seeds of every setting that the figures of results show"""
    def put(setting, seed, **more):
        path = tmp_path / "results" / f"{setting}-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"source": "mnist", "familiar_accuracy": 0.99 + seed / 1000,
                                    "placed_accuracy": 0.96, "affine_accuracy": 0.95, "centred_accuracy": 0.97,
                                    **more}))
    settings = {setting for rows in (*figures.STEPS.values(), *figures.PAPERS.values()) for _, setting in rows}
    for setting in sorted(settings | {"free/gap", "free/gap-8", "free/caps"}):
        for seed in (0, 1):
            factors = {name: [[value, 0.9 - seed / 10] for value in values] for name, values in
                       ac.FACTOR_RANGES.items()}
            put(setting, seed, **({"factors": factors} if setting in ("free/gap-8", "free/caps") else {}))
    return tmp_path / "results"


def test_figures_of_results(results, tmp_path, monkeypatch, capsys):
    def call(*flags):
        monkeypatch.setattr(sys, "argv", [FIGURES, "--results", str(results), "--outdir", str(tmp_path / "f"), *flags])
        code = 0
        try:
            ac.run_cli(figures.main)
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().err
    assert call() == (0, "") and {path.stem for path in (tmp_path / "f").glob("*.png")} == {
        "factors", "papers", "steps"}
    found = figures.probed_factors(results)
    assert set(found) == {"gap, 8 px", "caps"} and found["gap, 8 px"][0] == "gap" and len(found["gap, 8 px"][1]) == 2
    assert [run["familiar_accuracy"] for run in figures.results_in(results, "free/shared")] == [0.99, 0.991]
    assert len(figures.results_in(results, "free/shared-3")) == 2            # and "shared" is not "shared-3"
    code, stderr = call("--only", "digits")
    assert code == 2 and "--only digits: is not drawn from results" in stderr
    (results / "steps" / "margin-0.json").write_text("{")
    code, stderr = call("--only", "steps")
    assert code == 2 and "no JSON" in stderr and stderr.count("\n") == 1
    for path in (results / "steps").glob("margin-*.json"):
        path.unlink()
    code, stderr = call("--only", "steps")
    assert code == 2 and "no result of steps/margin" in stderr
    for path in (results / "free").glob("*.json"):
        path.unlink()
    code, stderr = call("--only", "factors", "--outdir", str(tmp_path / "new"))
    assert code == 2 and "made with --probe" in stderr and not (tmp_path / "new").exists()


def test_a_film_at_toy_size(run_script, toy_run, tmp_path):
    done = run_script(GIF, "--load", toy_run.weights, "--frames", 4, "--out", tmp_path / "film.gif")
    assert done.returncode == 0, done.stderr
    frames = imageio.imread(tmp_path / "film.gif", index=None)
    assert len(frames) == 20 and frames.shape[2] == 620 and (frames[0] != frames[1]).any()


@pytest.mark.parametrize("flags, named", [
    ("--frames 1", "--frames"), ("--fps 0", "--fps"), ("--index 5000", "--index"), ("--out no/x.gif", "no/x"),
    ("--out x.png", ".gif"),
    ("--out-json x.json", "--out-json"), ("--probe", "--probe: means nothing to a film"),
    ("--n-test 9", "--n-test: means nothing"), ("--load nothing.npz", "no such file")])
def test_what_the_film_refuses(run_script, toy_run, flags, named):
    done = run_script(GIF, *([] if "--load" in flags else ["--load", toy_run.weights]), *flags.split())
    assert done.returncode == 2 and named in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_scenes_rest_and_reach_the_ends():
    """Four frames a factor: at rest, at the upper end, at rest, at the lower end"""
    scenes = film.scenes(4)
    for k, (name, low, high) in enumerate(film.PATH):
        own = scenes[4 * k:4 * k + 4]
        rest = ac.REST.get(name, 0)
        assert [n for n, *_ in own] == [name] * 4
        assert [value for _, value, *_ in own] == pytest.approx([rest, high, rest, low])
        for _, value, factors, place in own:
            assert factors == (ac.REST | {name: value} if name in ac.REST else ac.REST)
            assert place == (0, 0) or name == "place"


@pytest.mark.parametrize("flags, named", [
    ("--networks shared,nets", "'nets' is none of"), ("--networks gap,gap", "named twice"),
    ("--model gap", "--model: means nothing here; give --networks"), ("--out-json x.json", "--out-json"),
    ("--only redrawn --networks gap", "none of the networks redraws"), ("--task mnist --only factors", "needs --task"),
    ("--only steps", "give --results"), ("--probe", "--probe: means nothing here"),
    ("--load nothing.npz --results .", "--load: means nothing to --results"),
    ("--load nothing.npz", "no such file"), ("--outdir /dev/null/x", "--outdir")])
def test_what_the_figures_refuse(run_script, flags, named):
    small = "--digits synthetic --n-epochs 1 --n-train 32 --n-val 16 --n-test 64"
    done = run_script(FIGURES, *("" if "--load" in flags else small).split(), *flags.split())
    assert done.returncode == 2 and named in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("flags, named", [("", "no such folder"), ("--n-epochs 2", "--n-epochs: means nothing to"),
                                          ("--seed 0", "--seed: means nothing to --results")])
def test_what_the_figures_of_results_refuse(run_script, flags, named):
    done = run_script(FIGURES, "--results", "nowhere", *flags.split())
    assert done.returncode == 2 and named in done.stderr and done.stderr.count("\n") == 1, done.stderr
