"""The command lines: end to end at toy size, offline; what the user gets wrong is one line and exit code 2."""
import argparse
import dataclasses
import itertools
import json
import sys
from types import SimpleNamespace

import multimnist_capsnet as mc
import numpy as np
import pytest

EXPERIMENT, FIGURES, GIF = "multimnist_capsnet.py", "visualize_multimnist_capsnet.py", "make_multimnist_capsnet_gif.py"
TOY = ("--digits synthetic --n-epochs 1 --n-train 64 --n-val 32 --n-test 64 --batch-size 16 --conv1-channels 4 "
       "--primary-types 2").split()
KEYS = ["config", "digits", "n_params", "test_set_accuracy", "test_set_accuracy_ci95", "test_any_accuracy", "test_recon_mse",
        "baseline_recon_mse", "seconds_train", "ms_per_step", "pairs_per_second", "peak_rss_mb", "versions", "history"]


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
    """cli(*flags) -> exit code, stdout, stderr of the experiment in this process, with few synthetic digits, in tmp_path"""
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
    parser = argparse.ArgumentParser()
    mc.add_config_flags(parser)
    return mc.config_from_args(parser.parse_args(list(map(str, flags))))


# ---------------------------------------------------------------- end to end

def test_results_have_exactly_the_promised_keys(toy_run):
    results = toy_run.results
    assert list(results) == KEYS
    paths = {name: results["config"][name] for name in ("out_json", "checkpoint")}
    assert results["config"] == dataclasses.asdict(parse(*TOY)) | paths
    assert results["digits"] == "synthetic" and set(results["versions"]) == {"python", "numpy"} and len(results["history"]) == 1
    low, high = results["test_set_accuracy_ci95"]
    assert 0 <= low <= results["test_set_accuracy"] <= high <= 1
    assert results["test_set_accuracy"] <= results["test_any_accuracy"] <= 1
    assert results["seconds_train"] > 0 and results["peak_rss_mb"] > 30
    assert results["ms_per_step"] == pytest.approx(1e3 * results["seconds_train"] / 4)
    assert results["pairs_per_second"] == pytest.approx(64 / results["seconds_train"])


def test_results_are_those_of_the_checkpoint(toy_run):
    """Evaluated anew from the file, through the API"""
    params, _, _, meta = mc.load_checkpoint(toy_run.checkpoint)
    config = dataclasses.replace(mc.config_of(meta, toy_run.checkpoint), n_test=64)
    digits = mc.load_digits(config)
    with mc.Runner(1) as runner:
        test = mc.evaluate(params, mc.draw_pairs(digits, "test", 64, config, "evaluation", 1), config, runner)
    results = toy_run.results
    assert mc.n_params(params) == results["n_params"]
    for name in ("set_accuracy", "any_accuracy", "recon_mse"):
        assert test[name] == results["test_" + name]
    assert test["baseline_recon_mse"] == results["baseline_recon_mse"]


def test_stdout_says_that_digits_are_synthetic_and_has_no_live_line(toy_run):
    assert "SYNTHETIC digits, 64 test pairs" in toy_run.stdout and "\r" not in toy_run.stdout


def test_quiet_prints_nothing_and_resuming_a_finished_run_gives_its_results(cli, tmp_path):
    flags = [*TOY, "--quiet", "--checkpoint", "run.npz", "--resume"]
    assert cli(*flags, "--out-json", "a.json") == (0, "", "")
    assert cli(*flags, "--out-json", "b.json", "--threads", 1) == (0, "", "")
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    same = [name for name in KEYS if name not in ("config", "peak_rss_mb")]
    assert {name: a[name] for name in same} == {name: b[name] for name in same}


def test_all_figures_from_a_checkpoint_and_no_file_else(toy_run, run_script, tmp_path):
    done = run_script(FIGURES, "--load", toy_run.checkpoint, "--outdir", tmp_path / "new" / "viz", "--n-test", 64)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert_pngs(tmp_path / "new" / "viz")


def test_one_figure_alone(toy_run, run_script, tmp_path):
    done = run_script(FIGURES, "--load", toy_run.checkpoint, "--outdir", tmp_path / "viz", "--only", "errors", "--n-test", 64)
    assert done.returncode == 0 and [path.name for path in (tmp_path / "viz").iterdir()] == ["errors.png"]


def test_what_the_figures_cannot_draw_is_refused(toy_run, run_script, tmp_path):
    for flags, named in ((["--model", "cnn"], "--model cnn"), (["--only", "disentanglement", "--load", toy_run.checkpoint], "--load"),
                         (["--only", "disentanglement", "--n-seeds", 0], "--n-seeds 0")):
        done = run_script(FIGURES, *flags, "--outdir", tmp_path / "viz")
        assert done.returncode == 2 and named in done.stderr and done.stderr.count("\n") == 1 and not (tmp_path / "viz").exists()
    done = run_script(GIF, "--model", "cnn", "--out", tmp_path / "x.gif")
    assert done.returncode == 2 and "--model cnn" in done.stderr


def test_the_cnn_end_to_end(cli, tmp_path):
    flags = "--digits synthetic --n-epochs 1 --n-train 64 --n-val 32 --n-test 64 --batch-size 16 --model cnn --cnn-channels 4".split()
    code, out, err = cli(*flags, "--dropout", 0.2, "--checkpoint", "cnn.npz", "--out-json", "cnn.json")
    assert (code, err) == (0, "") and "cross-entropy, summed over the ten digits" in out and "10 log 2 = 6.931" in out
    results = json.loads((tmp_path / "cnn.json").read_text())
    assert list(results) == KEYS and results["test_recon_mse"] is None and "train_recon" not in results["history"][0]
    code, again, _ = cli(*flags, "--dropout", 0.2, "--checkpoint", "cnn.npz", "--resume")
    assert code == 0 and again.split("test pairs")[1].split("training")[0] == out.split("test pairs")[1].split("training")[0]


def test_all_figures_after_training(run_script, tmp_path):
    done = run_script(FIGURES, *TOY, "--quiet", "--outdir", tmp_path / "viz")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert_pngs(tmp_path / "viz")


def assert_pngs(folder):
    import matplotlib.image
    files = sorted(folder.iterdir())
    assert len(files) >= 5 and all(path.suffix == ".png" for path in files)
    for path in files:
        picture = matplotlib.image.imread(path)
        assert min(picture.shape[:2]) > 100 and picture[..., :3].std() > 0.01, path


def test_gif_has_a_frame_per_snapshot_and_does_not_change_the_run(toy_run, run_script, tmp_path):
    import imageio.v3 as imageio
    out, checkpoint = tmp_path / "toy.gif", tmp_path / "run.npz"
    done = run_script(GIF, *TOY, "--out", out, "--snapshot-every", 3, "--fps", 4, "--checkpoint", checkpoint)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    frames = imageio.imread(out)
    assert len(frames) == 3 and not np.array_equal(frames[0], frames[-1])                      # steps 0, 3 and 4
    for ours, theirs in zip(mc.load_checkpoint(checkpoint)[:3], mc.load_checkpoint(toy_run.checkpoint)[:3]):
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


# ---------------------------------------------------------------- flags

@pytest.mark.parametrize("script, flags", [(EXPERIMENT, []), (FIGURES, ["--outdir", "--load", "--only", "--n-seeds"]),
                                           (GIF, ["--out", "--snapshot-every", "--fps"])])
def test_help_names_every_flag_and_default(run_script, script, flags):
    done = run_script(script, "--help")
    text = " ".join(done.stdout.split())
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout.splitlines()) > 30
    for f in dataclasses.fields(mc.Config):
        assert f"--{f.name.replace('_', '-')}" in text
        assert " ".join(f.metadata["help"].split()) in text
        if f.default not in ("", False):
            assert f"(default {getattr(mc.Config(), f.name)}" in text
    assert all(flag in text for flag in flags)


def test_without_flags_the_settings_are_configs():
    assert parse() == mc.Config()


@pytest.mark.parametrize("field", dataclasses.fields(mc.Config), ids=lambda f: f.name)
def test_each_flag_sets_its_own_field(field):
    flag = "--" + field.name.replace("_", "-")
    if field.type is bool:
        assert parse(flag) == dataclasses.replace(mc.Config(), **{field.name: True})
        return
    choices = [c for c in field.metadata.get("choices", ()) if c != field.default] or [None]
    value = choices[-1] or {int: 7, float: 0.25, str: "x"}[field.type]
    expected = dataclasses.replace(mc.Config(), **{field.name: value} | {"preset": mc.PRESETS.get(value), "model": mc.CNN}.get(field.name, {}))
    assert parse(flag, value) == expected


def test_a_preset_yields_to_the_flags_given():
    config = parse("--conv1-channels", 8, "--preset", "paper")
    assert (config.conv1_channels, config.primary_types, config.decoder_hidden1, config.decoder_hidden2) == (8, 32, 512, 1024)


# ---------------------------------------------------------------- bad input

BAD = {
    "--min-iou 1.5": "--min-iou", "--min-iou -0.1": "--min-iou", "--min-iou nan": "--min-iou", "--n-train 0": "--n-train",
    "--n-val 0": "--n-val", "--n-test -1": "--n-test", "--n-epochs 0": "--n-epochs", "--batch-size 0": "--batch-size",
    "--batch-size 65": "--batch-size", "--lr nan": "--lr", "--lr 0": "--lr", "--lr inf": "--lr",
    "--recon-weight -1": "--recon-weight",
    "--seed -1": "--seed", "--threads -1": "--threads", "--routing-iters 0": "--routing-iters", "--digit-dim 0": "--digit-dim",
    "--digits mnist --mnist-dir nowhere": "nowhere", "--digits auto --mnist-dir nowhere": "nowhere",
    "--digits mnist": "--mnist-dir",
    "--out-json no/folder/x.json": "no/folder", "--out-json folder": "folder", "--checkpoint no/folder/x.npz": "no/folder",
    "--checkpoint folder": "folder", "--resume": "--checkpoint", "--resume --checkpoint other.npz": "conv1_channels",
    "--resume --checkpoint torn.npz": "torn.npz", "--model cnn --routing-iters 2": "--routing-iters", "--dropout 0.5": "--dropout",
    "--model cnn --dropout 1": "--dropout", "--warmup -1": "--warmup"}


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


@pytest.mark.parametrize("script, flags", [
    (EXPERIMENT, "--n-train 0"), (EXPERIMENT, "--lr 1e38 --n-epochs 2"), (FIGURES, "--load nothing.npz"),
    (FIGURES, "--n-test 0"), (FIGURES, "--load /dev/null"), (FIGURES, "--outdir /dev/null/x"), (GIF, "--snapshot-every 0"),
    (GIF, "--fps 0"), (GIF, "--fps nan"), (GIF, "--out no/folder/x.gif"), (GIF, "--snapshot-every -3")])
def test_bad_input_of_a_real_process_is_one_line(run_script, script, flags):
    done = run_script(script, *TOY, *flags.split())
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


def test_memory_interrupt_and_long_messages(capsys):
    def raises(error):
        def main():
            raise error
        with pytest.raises(SystemExit) as stop:
            mc.run_cli(main)
        return stop.value.code, capsys.readouterr().err

    assert raises(mc.InputError("two\nlines")) == (2, "error: two lines\n")
    code, text = raises(MemoryError())
    assert code == 2 and text.startswith("error: out of memory") and text.count("\n") == 1
    assert raises(KeyboardInterrupt())[0] == 130


def test_every_setting_with_a_range_is_refused_beyond_it():
    for f, (rule, beyond) in itertools.product(dataclasses.fields(mc.Config), (("low", -1), ("high", 1), ("above", 0))):
        if rule in f.metadata:
            with pytest.raises(mc.InputError, match="--" + f.name.replace("_", "-")):
                mc.check_config(dataclasses.replace(mc.Config(), **{f.name: f.metadata[rule] + beyond}))
    mc.check_config(mc.Config())
