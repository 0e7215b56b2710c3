"""The command lines: end to end at toy size, offline; what the user gets wrong is one line and exit code 2."""
import dataclasses
import hashlib
import json
import re
import sys
from types import SimpleNamespace

import multimnist_capsnet as mc

import bench_multimnist_nearest
import bench_multimnist_step
import bench_synthetic_digits
import numpy as np
import pytest
from conftest import assert_same

EXPERIMENT = "multimnist_capsnet.py"
FIGURES, GIF = "visualize_multimnist_capsnet.py", "make_multimnist_capsnet_gif.py"
TOY = ("--digits synthetic --n-epochs 1 --n-train 64 --n-val 32 --n-test 64 --batch-size 16 --conv1-channels 4 "
       "--primary-types 2").split()
KEYS = ["experiment", "config", "source", "n_params", "test_set_accuracy", "test_hits", "test_set_accuracy_ci95",
        "test_any_accuracy", "test_recon_mse", "baseline_recon_mse", "pairs_per_second", "seconds_train", "ms_per_step",
        "peak_rss_mb", "versions", "machine", "script_sha256", "weights_sha256", "history"]


@pytest.fixture(scope="module")
def toy_run(run_script, tmp_path_factory):
    """The experiment at toy size in a process of its own -> the finished process, its --out-json and --checkpoint"""
    folder = tmp_path_factory.mktemp("run")
    out, checkpoint = folder / "out.json", folder / "run.npz"
    done = run_script(EXPERIMENT, *TOY, "--out-json", out, "--checkpoint", checkpoint)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return SimpleNamespace(stdout=done.stdout, results=json.loads(out.read_text()), checkpoint=checkpoint)


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """cli(*flags) -> exit code, stdout, stderr of the experiment in this process, with few synthetic digits, in
    tmp_path"""
    monkeypatch.setattr(mc, "N_SYNTHETIC", {"train": 60, "val": 40, "test": 40})
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        monkeypatch.setattr(sys, "argv", [EXPERIMENT, *map(str, flags)])
        capsys.readouterr()
        code = 0
        try:
            mc.run_cli(mc.main)
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


def parse(*flags):
    parser = mc.Parser(mc.__doc__)
    mc.add_config_flags(parser)
    return mc.config_from_args(parser.parse_args(list(map(str, flags))))


# ---------------------------------------------------------------- end to end

def test_results_have_exactly_the_promised_keys(toy_run):
    results = toy_run.results
    assert list(results) == KEYS
    asked, paths = mc.settings_of(parse(*TOY)), ("checkpoint", "resume", "out_json", "quiet", "mnist_dir")
    assert results["config"] == {name: value for name, value in asked.items() if name not in paths}
    assert results["source"] == "synthetic" and set(results["versions"]) == {"python", "numpy"}
    assert results["history"]["epoch"] == [1] and results["test_hits"] == 64 * results["test_set_accuracy"]
    low, high = results["test_set_accuracy_ci95"]
    assert 0 <= low <= results["test_set_accuracy"] <= high <= 1
    assert results["test_set_accuracy"] <= results["test_any_accuracy"] <= 1
    assert results["seconds_train"] > 0 and results["peak_rss_mb"] > 30
    assert results["ms_per_step"] == pytest.approx(1e3 * results["seconds_train"] / 4, rel=1e-3)
    assert results["pairs_per_second"] == pytest.approx(64 / results["seconds_train"], rel=1e-3)


def test_results_are_those_of_the_checkpoint(toy_run):
    """Evaluated anew from the file, through the API"""
    found = mc.load_checkpoint(toy_run.checkpoint)
    params, config = found.params | found.state, dataclasses.replace(found.config, n_test=64)
    digits = mc.load_digits(config)
    with mc.Runner(1) as runner:
        test = mc.evaluate(params, mc.stream_pairs(digits, "test", 64, config, "evaluation", 1), config, runner)
    results = toy_run.results
    assert mc.n_params(found.params) == results["n_params"]
    for name in ("set_accuracy", "any_accuracy", "recon_mse"):
        assert results["test_" + name] == pytest.approx(test[name], rel=1e-4)
    assert results["baseline_recon_mse"] == pytest.approx(test["baseline_recon_mse"], rel=1e-4)


def test_stdout_says_that_digits_are_synthetic_and_has_no_live_line(toy_run):
    assert "SYNTHETIC digits, 64 test pairs" in toy_run.stdout and "\r" not in toy_run.stdout


def test_quiet_prints_nothing_and_resuming_a_finished_run_gives_its_results(cli, tmp_path):
    flags = [*TOY, "--quiet", "--checkpoint", "run.npz", "--resume"]
    assert cli(*flags, "--out-json", "a.json") == (0, "", "")
    assert cli(*flags, "--out-json", "b.json", "--threads", 1) == (0, "", "")
    assert "steps were done before" in cli(*TOY, "--checkpoint", "run.npz", "--resume")[1]
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    same = [name for name in KEYS if name not in ("config", "peak_rss_mb")]
    assert {name: a[name] for name in same} == {name: b[name] for name in same}


MEASURED = ["source", "n_params", "test_set_accuracy", "test_hits", "test_set_accuracy_ci95", "test_any_accuracy",
            "test_recon_mse", "baseline_recon_mse", "seconds_train", "weights_sha256"]


def test_a_loaded_network_is_evaluated_without_training(cli, toy_run, tmp_path):
    """A checkpoint gives the results of the run that wrote it, its float16 weights nearly those; another --seed is
    another test"""
    def load(*flags):
        code, out, err = cli("--load", *flags, "--n-test", 64, "--digits", "synthetic", "--out-json", "x.json")
        assert (code, err) == (0, "") and "epoch" not in out and "test pairs" in out
        return json.loads((tmp_path / "x.json").read_text())
    mc.N_SYNTHETIC.update(train=20000, val=2500, test=5000)                             # as in the process of toy_run
    found = load(toy_run.checkpoint, "--out-weights", "net.npz")
    assert list(found) == [*KEYS, "loaded"] and found["loaded"]["file"] == "run.npz"
    assert {name: found[name] for name in MEASURED} == {name: toy_run.results[name] for name in MEASURED}
    half = load("net.npz")
    assert half["loaded"]["sha256"] == hashlib.sha256((tmp_path / "net.npz").read_bytes()).hexdigest()
    assert half["test_recon_mse"] == pytest.approx(found["test_recon_mse"], rel=1e-3)
    assert half["history"] == found["history"] == {}
    assert (tmp_path / "net.npz").stat().st_size < 0.18 * toy_run.checkpoint.stat().st_size
    other = load("net.npz", "--seed", 5)
    assert (other["config"]["seed"], other["loaded"]["trained_seed"]) == (5, 0)
    assert other["test_recon_mse"] != half["test_recon_mse"]
    papers = load("net.npz", "--min-iou", 0, "--merge", "add")                          # tested on the paper's pairs
    assert (papers["config"]["min_iou"], papers["config"]["merge"]) == (0, "add")
    assert papers["test_recon_mse"] != half["test_recon_mse"]
    mc.save_weights("same.npz", *(lambda n: (n.config, n.weights, n.history))(mc.load_network("net.npz")))
    assert (tmp_path / "same.npz").read_bytes() == (tmp_path / "net.npz").read_bytes()


@pytest.mark.parametrize("flags, named", [
    ("--lr 0.1", "--lr 0.1: run.npz was trained with 0.01"), ("--warp 1", "--warp 1.0"),
    ("--resume", "--resume: is of training"), ("--checkpoint a.npz", "--checkpoint: is of training"),
    ("--out-weights no/folder/x.npz", "no/folder"), ("--n-test 0", "--n-test 0")])
def test_what_means_nothing_to_a_loaded_network_is_refused(cli, toy_run, tmp_path, flags, named):
    (tmp_path / "run.npz").write_bytes(toy_run.checkpoint.read_bytes())
    code, _, stderr = cli("--load", "run.npz", *flags.split())
    assert code == 2 and stderr.startswith("error: ") and named in stderr and stderr.count("\n") == 1


def test_all_figures_from_a_checkpoint_and_no_file_else(toy_run, run_script, tmp_path):
    done = run_script(FIGURES, "--load", toy_run.checkpoint, "--outdir", tmp_path / "new" / "viz", "--n-test", 64)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert_pngs(tmp_path / "new" / "viz")


def test_one_figure_alone(toy_run, run_script, tmp_path):
    done = run_script(
        FIGURES, "--load", toy_run.checkpoint, "--outdir", tmp_path / "viz", "--only", "errors", "--n-test", 64)
    assert done.returncode == 0 and [path.name for path in (tmp_path / "viz").iterdir()] == ["errors.png"]


def test_what_the_figures_cannot_draw_is_refused(toy_run, run_script, tmp_path):
    for flags, named in (
        (["--model", "cnn"], "--model cnn"),
        (["--only", "disentanglement", "--load", toy_run.checkpoint], "--load"),
        (["--only", "disentanglement", "--out-json", tmp_path / "x.json"], "--out-json: a result is of one seed"),
        (["--only", "disentanglement", "--n-seeds", 0], "--n-seeds 0")):
        done = run_script(FIGURES, *flags, "--outdir", tmp_path / "viz")
        assert (done.returncode == 2 and named in done.stderr and done.stderr.count("\n") == 1
                and not (tmp_path / "viz").exists())
    for flags, named in ((["--model", "cnn"], "--model cnn"), (["--load", tmp_path / "none.npz"], "none.npz")):
        done = run_script(GIF, *flags, "--out", tmp_path / "x.gif")
        assert done.returncode == 2 and named in done.stderr and not (tmp_path / "x.gif").exists()


def test_the_digits_in_a_picture_are_named_and_redrawn(toy_run, run_script, tmp_path):
    import imageio.v3 as imageio
    page = np.full((120, 160), 230, np.uint8)
    page[30:90, 60:68] = page[50:58, 50:90] = 20
    imageio.imwrite(tmp_path / "page.png", page)
    flags = ["--load", toy_run.checkpoint, "--image", tmp_path / "page.png", "--outdir", tmp_path / "out"]
    done = run_script(FIGURES, *flags)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert re.search(r"named \d and \d: lengths", done.stdout)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["page_digits.png"]
    for more, named in ((["--only", "errors"], "--only"), (["--out-json", tmp_path / "x.json"], "--out-json"),
                        (["--image", tmp_path], "no such file"), (["--image", ""], "no such file"),
                        (["--lr", 0.5], "--lr 0.5"), (["--merge", "add"], "--merge: means nothing to --image"),
                        (["--n-test", 5], "--n-test: means nothing to --image")):
        done = run_script(FIGURES, *flags[:4], *more, "--outdir", tmp_path / "no")
        assert done.returncode == 2 and named in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert not (tmp_path / "no").exists()


def test_the_figures_results_say_what_the_figures_say(toy_run, run_script, tmp_path):
    done = run_script(FIGURES, "--load", toy_run.checkpoint, "--outdir", tmp_path / "viz", "--only", "training_curves",
                      "--n-test", 64, "--seed", 3, "--out-json", tmp_path / "x.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "x.json").read_text())
    assert list(found) == [*KEYS, "loaded", "errors", "routing"] and (tmp_path / "x.json").stat().st_size < 4096
    assert found["config"]["seed"] == 3 and found["loaded"]["trained_seed"] == 0
    assert len(found["errors"]["hardest_sets"]) == 6
    assert found["routing"]["entropy"][0] == pytest.approx(np.log(10), 1e-4)


def test_the_cnn_end_to_end(cli, tmp_path):
    flags = [*TOY[:TOY.index("--conv1-channels")], "--model", "cnn", "--cnn-channels", 4]
    code, out, err = cli(*flags, "--dropout", 0.2, "--checkpoint", "cnn.npz", "--out-json", "cnn.json")
    assert (code, err) == (0, "") and "cross-entropy, summed over the ten digits" in out and "10 log 2 = 6.931" in out
    results = json.loads((tmp_path / "cnn.json").read_text())
    assert list(results) == KEYS and results["test_recon_mse"] is None and "train_recon" not in results["history"]
    code, again, _ = cli(*flags, "--dropout", 0.2, "--checkpoint", "cnn.npz", "--resume")
    assert (code == 0
            and again.split("test pairs")[1].split("training")[0] == out.split("test pairs")[1].split("training")[0])


def test_all_figures_after_training(run_script, tmp_path):
    done = run_script(FIGURES, *TOY, "--quiet", "--outdir", tmp_path / "viz")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert_pngs(tmp_path / "viz")


def assert_pngs(folder):
    import matplotlib.image
    *files, answers = sorted(folder.iterdir(), key=lambda path: (path.suffix, path.name))
    assert len(files) >= 5 and all(path.suffix == ".png" for path in files)
    assert answers.name == "quiz_answers.txt" and len(answers.read_text().splitlines()) == 1 + 64
    for path in files:
        picture = matplotlib.image.imread(path)
        assert min(picture.shape[:2]) > 100 and picture[..., :3].std() > 0.01, path


def test_gif_has_a_frame_per_snapshot_and_does_not_change_the_run(toy_run, run_script, tmp_path):
    import imageio.v3 as imageio
    out, checkpoint = tmp_path / "toy.gif", tmp_path / "run.npz"
    done = run_script(GIF, *TOY, "--out", out, "--snapshot-every", 3, "--fps", 4, "--checkpoint", checkpoint, "--load",
                      toy_run.checkpoint)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    frames = imageio.imread(out)
    assert len(frames) == 4 and not np.array_equal(frames[0], frames[2])             # steps 0, 3 and 4, and the ending
    assert not np.array_equal(frames[2], frames[3])
    ours, theirs = mc.load_checkpoint(checkpoint), mc.load_checkpoint(toy_run.checkpoint)
    for group in mc.CHECKPOINT:
        assert_same(getattr(ours, group), getattr(theirs, group))


# ---------------------------------------------------------------- flags

@pytest.mark.parametrize("script, flags", [(EXPERIMENT, ["--load", "--out-weights"]),
                                           (FIGURES, ["--outdir", "--load", "--image", "--only", "--n-seeds"]),
                                           (GIF, ["--out", "--snapshot-every", "--fps", "--load"])])
def test_help_names_every_flag(run_script, script, flags):
    done = run_script(script, "--help")
    text = " ".join(done.stdout.split())
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout.splitlines()) > 30
    for f in mc.options(mc.Config):
        assert f"{mc.flag_of(f.name)} " in text and " ".join(f.metadata["help"].split()) in text
    assert all(flag in text for flag in flags)
    assert "option_strings" not in text                                                 # what a bare % would put there


# ---------------------------------------------------------------- bad input

BAD = {"--min-iou 1.5": "--min-iou", "--min-iou -0.1": "--min-iou", "--min-iou nan": "--min-iou",
       "--n-train 0": "--n-train", "--n-val 0": "--n-val", "--n-test -1": "--n-test", "--n-epochs 0": "--n-epochs",
       "--batch-size 0": "--batch-size", "--batch-size 65": "--batch-size", "--lr nan": "--lr", "--lr 0": "--lr",
       "--lr inf": "--lr", "--recon-weight -1": "--recon-weight", "--seed -1": "--seed", "--threads -1": "--threads",
       "--routing-iters 0": "--routing-iters", "--digit-dim 0": "--digit-dim",
       "--digits mnist --mnist-dir nowhere": "nowhere", "--digits auto --mnist-dir nowhere": "nowhere",
       "--digits mnist": "--mnist-dir", "--out-json no/folder/x.json": "no/folder", "--out-json folder": "folder",
       "--checkpoint no/folder/x.npz": "no/folder", "--checkpoint folder": "folder", "--resume": "--checkpoint",
       "--resume --checkpoint other.npz": "conv1_channels", "--resume --checkpoint torn.npz": "torn.npz",
       "--model cnn --routing-iters 2": "--routing-iters", "--dropout 0.5": "--dropout",
       "--model cnn --dropout 1": "--dropout", "--warmup -1": "--warmup",
       "--model cnn --cnn-channels 64 --primary-types 4": "--cnn-channels 64: leave room for",
       "--out-weights no/folder/x.npz": "no/folder", "--load nothing.npz": "nothing.npz: no such file",
       "--load folder": "folder: not a whole file", "--out-json a.json --checkpoint ./a.json": "would be written twice",
       "--out-weights result.json": "would be written twice",
       "--model cnn --cnn-hidden 50": "--conv1-channels: sets how large the CNN may be, and --cnn-hidden does"}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line_and_leaves_no_file(cli, tmp_path, flags):
    (tmp_path / "folder").mkdir()
    if "other" in flags or "torn" in flags:
        assert cli(*TOY, "--conv1-channels", 3, "--checkpoint", "other.npz", "--quiet")[0] == 0
        (tmp_path / "torn.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:5000])
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    extra = [] if "out-json" in flags else ["--out-json", "result.json"]
    code, _, stderr = cli(*TOY, *extra, *flags.split())
    assert code == 2 and stderr.startswith("error: ") and BAD[flags] in stderr
    assert stderr.count("\n") == 1 and stderr.endswith("\n") and "Traceback" not in stderr
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("flags", ["--digits emnist", "--n-train many", "--no-such-flag", "--merge", "--preset huge"])
def test_what_argparse_refuses_is_exit_code_2(cli, flags):
    code, _, stderr = cli(*flags.split())
    assert code == 2 and "error: " in stderr and flags.split()[0] in stderr


@pytest.mark.parametrize(
    "script, flags",
    [(EXPERIMENT, "--n-train 0"), (EXPERIMENT, "--lr 1e38 --n-epochs 2"), (FIGURES, "--load nothing.npz"),
     (FIGURES, "--n-test 0"), (FIGURES, "--load /dev/null"), (FIGURES, "--outdir /dev/null/x"),
     (GIF, "--snapshot-every 0"), (GIF, "--fps 0"), (GIF, "--fps nan"), (GIF, "--out no/folder/x.gif"),
     (GIF, "--out x.png"), (GIF, "--snapshot-every -3")])
def test_bad_input_of_a_real_process_is_one_line(run_script, script, flags):
    done = run_script(script, *TOY, *flags.split())
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


STEP, DIGITS, NEAREST = bench_multimnist_step, bench_synthetic_digits, bench_multimnist_nearest


@pytest.mark.parametrize("bench, flags, named", [
    *((STEP, f"{flag} {value}", f"{flag} {value}: must be at least 1")
      for flag, value in (("--rounds", 0), ("--repeats", 0), ("--batch-size", 0))),
    *((STEP, f"--threads {value}", f"--threads {value}: must be a number of threads")
      for value in (0, -1, "1,0", "1,1", "two", "1,")),
    (STEP, "--preset huge", "--preset"), (STEP, "--out-json folder", "folder"), (STEP, "--out-json no/x.json", "no/x"),
    (DIGITS, "--n-synthetic 49", "at least 50"), (DIGITS, "--n-epochs 0", "--n-epochs"), (DIGITS, "--seed -1", "-1"),
    (DIGITS, "--mnist-dir nowhere", "nowhere"), (DIGITS, "--digits mnist", "--mnist-dir"),
    (DIGITS, "--out-json no/x.json", "no/x"),
    (NEAREST, "--n-known 0", "--n-known"), (NEAREST, "--n-test 0", "--n-test"),
    (NEAREST, "--digits mnist", "--mnist-dir"), (NEAREST, "--out-json no/x.json", "no/x")])
def test_bad_input_of_a_benchmark_is_one_line(monkeypatch, capsys, tmp_path, bench, flags, named):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        mc.run_cli(bench.main)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and named in error and error.count("\n") == 1


def test_what_threads_are_worth_by_hand(monkeypatch, capsys):
    """Against one thread, which is timed though it was not asked for: 40 and 60 ms, with four 10 and 20"""
    asked = []

    def fake(steps, rounds, repeats):
        asked.append((list(steps), rounds, repeats))
        return {1: np.array([40.0, 60.0]), 4: np.array([10.0, 20.0])}

    monkeypatch.setattr(STEP, "time_in_turn", fake)
    config = STEP.config_to_stamp(batch_size=33)
    found = STEP.scaling(config, None, [4], 2, 3)
    assert asked == [([1, 4], 2, 3)]
    assert found == {1: {"ms": 50, "min": 40, "max": 60, "speedup": 1, "efficiency": 1},
                     4: {"ms": 15, "min": 10, "max": 20, "speedup": 3.5, "efficiency": 0.875}}
    STEP.print_scaling(found, config)
    said = capsys.readouterr().out
    assert "batch 33: 3 shards" in said and "| 4 | 15.0 | 10.0-20.0 | 3.50 | 88% |" in said


def test_the_benchmark_with_several_numbers_of_threads(monkeypatch, capsys, tmp_path):
    flags = f"--threads 1,2 --rounds 1 --repeats 1 --batch-size 2 --out-json {tmp_path / 'r.json'}"
    monkeypatch.setattr(sys, "argv", ["bench", *flags.split()])
    STEP.main()
    found = json.loads((tmp_path / "r.json").read_text())
    assert list(found["scaling"]) == ["1", "2"] and found["bench"]["threads"] == "1,2"
    assert "| 2 |" in capsys.readouterr().out and found["scaling"]["1"]["speedup"] == 1


def test_the_size_of_the_cnn():
    """Either --cnn-hidden or what sets how many parameters it may have; and enough room for a unit a class"""
    with pytest.raises(mc.InputError, match="--cnn-channels 256: leave room for 0 hidden units only.*--cnn-hidden"):
        mc.check_config(mc.Config(model="cnn", cnn_channels=256))
    mc.check_config(mc.Config(model="cnn", cnn_channels=64, cnn_hidden=100))
    with pytest.raises(mc.InputError, match="--primary-types: sets how large the CNN may be, and --cnn-hidden does"):
        mc.check_config(mc.Config(model="cnn", primary_types=3, cnn_hidden=100))
