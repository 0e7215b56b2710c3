"""Each experiment's command line, in this process: what a run leaves behind, and what it must not destroy; what the
user can correct. All else: test_experiments.py."""
import contextlib
import io
import json
import os
import shlex
import stat
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import multimnist_capsnet as mc
import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from conftest import EXPERIMENTS, assert_refused, assert_same, run_offline, runs, toy, toy_flags

every_experiment = pytest.mark.parametrize("experiment", EXPERIMENTS)


def read(path):
    return json.loads(path.read_text("utf-8"))


@every_experiment
def test_a_run_is_kept_and_the_command_that_it_prints_works(call, tmp_path, experiment):
    """Weights, settings, metrics and history, in a new folder each time"""
    module, flags = EXPERIMENTS[experiment], toy_flags(experiment)
    few = [flag for flag in flags if flag.startswith(("--n-test=", "--digits="))]
    code, out, err = call(module, module.main, *flags)
    assert (code, err) == (0, "")
    folder, = (tmp_path / "runs" / experiment).iterdir()
    assert {path.name for path in folder.iterdir()} == {"weights.npz", "metrics.json"}
    (config, state), expected = module.load(folder), read(folder / "metrics.json")
    assert config.seed == 0 and len(state["history"]["epochs"]) == 1
    assert expected["n_params"] == sum(p.size for p in state["params"].values())
    assert {"source", "seconds_train", "ms_per_step", "versions", "machine", "history"} <= expected.keys()
    assert out.startswith(f"folder: {folder.relative_to(tmp_path)}\n")
    again = shlex.split(next(line for line in out.splitlines() if "--load" in line).partition(f"{experiment}.py ")[2])
    code, out, err = call(module, module.main, *again, *few, "--out-json", "again.json")
    assert (code, err) == (0, "") and read(tmp_path / "again.json")["hit_bits"] == expected["hit_bits"]
    before = (folder / "weights.npz").read_bytes()
    assert call(module, module.main, *flags, "--quiet") == (0, "", "")
    second, = {*folder.parent.iterdir()} - {folder}
    assert second.name == folder.name + "-2" and (folder / "weights.npz").read_bytes() == before
    assert_same(module.load(second)[1]["params"], state["params"])


@every_experiment
def test_runs_that_start_at_once_get_folders_of_their_own(experiment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = EXPERIMENTS[experiment]
    with ThreadPoolExecutor(8) as pool:
        folders = [folder for folder, _ in pool.map(module.new_folder, ["a-run"] * 24)]
    assert len(set(folders)) == 24 and all(folder.is_dir() for folder in folders)


@every_experiment
def test_a_run_that_fails_at_once_leaves_nothing(call, experiment, tmp_path, monkeypatch):
    module, before = EXPERIMENTS[experiment], {*tmp_path.iterdir()}

    def broken(*_, **__):
        raise module.InputError("loss nan")
    monkeypatch.setattr(module, "train", broken)
    for where in [], ["--outdir", tmp_path / "new" / "run"]:
        assert_refused(call(module, module.main, *toy_flags(experiment), *where), "loss nan")
        assert {*tmp_path.iterdir()} == before


def test_a_full_disk_after_the_first_epoch_keeps_that_epoch(call, tmp_path, monkeypatch):
    write_file, calls = mc.write_file, []

    def full(path, content):
        if path.name == "weights.npz" and content is not None:
            calls.append(path)
            if len(calls) == 2:
                raise mc.InputError(f"cannot write {path}: No space left on device. Make room")
        write_file(path, content)
    monkeypatch.setattr(mc, "write_file", full)
    flags = [*toy_flags(runs.MULTI), "--n-epochs", 2, "--outdir", "run"]
    assert_refused(call(mc, mc.main, *flags), "No space left on device")
    assert len(mc.load(tmp_path / "run")[1]["history"]["epochs"]) == 1
    code, out, _ = call(mc, mc.main, *flags)
    assert code == 0 and "resuming at step" in out and (tmp_path / "run" / "metrics.json").exists()


def test_a_finished_run_is_not_tested_anew_in_silence(call, tmp_path):
    """with other test settings the command that tests it is named; and no folder is written into twice"""
    flags = toy_flags(runs.MULTI)
    few = [flag for flag in flags if flag.startswith(("--n-test=", "--digits="))]
    assert call(mc, mc.main, *flags, "--outdir", "old")[0] == 0
    assert_refused(call(mc, mc.main, "--load", "old", "--outdir", "old", *few), "old: holds a run")
    again = call(mc, mc.main, *flags, "--outdir", "old", "--n-test", 9)
    assert_refused(again, "--n-test 9: old is finished, with 8. Test it again: ")


def test_a_run_is_not_resumed_on_other_images(call, tmp_path, monkeypatch):
    """also not if their folder has the same name; and a finished run is not taken for theirs"""
    flags = [*toy_flags(runs.MULTI), "--outdir", "run"]
    assert call(mc, mc.main, *flags)[0] == 0
    monkeypatch.setattr(mc, "synthesize_digits", lambda n, seed, draw=mc.synthesize_digits: draw(n, seed + 1))
    assert_refused(call(mc, mc.main, *flags), "run: was trained on SYNTHETIC digits, on other images")


def test_recomputed_statistics_are_not_trained_on(call, tmp_path):
    """neither with more epochs nor by a run without them"""
    flags = [*toy_flags(runs.MULTI), "--lr-schedule", "constant", "--outdir", "run"]
    assert call(mc, mc.main, *flags, "--recompute-statistics", 20)[0] == 0
    (tmp_path / "run" / "metrics.json").unlink()                        # as if it had been stopped during the test
    assert_refused(call(mc, mc.main, *flags), "--recompute-statistics 0: run has 20")
    more = call(mc, mc.main, *flags, "--recompute-statistics", 20, "--n-epochs", 2)
    assert_refused(more, "its statistics were recomputed after its last epoch. Start another run from it: --init run")


def test_two_runs_in_one_folder_do_not_overwrite_each_other(tmp_path, monkeypatch):
    config, data = toy(runs.MULTI, n_epochs=2)

    def another_saves(progress, state):                                 # after the first epoch
        os.utime(tmp_path / "weights.npz", ns=(1, 1))
    monkeypatch.setattr(mc.Progress, "epoch", another_saves)
    with pytest.raises(mc.InputError, match="another run saves here, too. Name another --outdir"):
        mc.run(config, data, mc.initial_state(config), tmp_path)


@every_experiment
def test_a_dangling_link_for_runs_is_refused(call, experiment, tmp_path):
    module = EXPERIMENTS[experiment]
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    assert_refused(call(module, module.main, *toy_flags(experiment)), "cannot make runs")


def test_a_damaged_result_is_named(call, tmp_path):
    flags = [*toy_flags(runs.MULTI), "--outdir", "run"]
    assert call(mc, mc.main, *flags)[0] == 0
    for text in "", "{", '{"config": {}}', '{"config": null}', '{"config": {"n_epochs": 1}}':
        (tmp_path / "run" / "metrics.json").write_text(text, "utf-8")
        assert_refused(call(mc, mc.main, *flags), "metrics.json: damaged. Delete it")


def test_the_line_within_an_epoch(monkeypatch):
    """On a terminal it is rewritten every second; in a log there is one every ten seconds, so none if epochs are
    shorter"""
    config = mc.Config(n_train=3200, n_epochs=2)                        # 100 steps an epoch
    times = iter(range(10_000))

    def said(seconds_per_step, on_terminal):
        clock = SimpleNamespace(perf_counter=lambda: seconds_per_step * next(times))
        out = io.StringIO()
        out.isatty = lambda: on_terminal
        monkeypatch.setattr(mc, "time", clock)
        with contextlib.redirect_stdout(out):
            progress = mc.Progress(config, {})
            for step in range(1, 101):
                progress.step({"step": step}, {"loss": 0.5})
        return out.getvalue()
    lines = said(0.5, False).splitlines()
    assert len(lines) == 4 and lines[0] == "step 20/200  loss 0.500  500 ms/step  0:01:30 left"
    assert said(0.05, False) == ""
    rewritten = said(0.5, True)
    assert "\n" not in rewritten and rewritten.count("\r") == 49 and rewritten.startswith("step 2/200")
    assert len({len(line) for line in rewritten.split("\r")[:-1]}) == 1


def test_json_goes_to_standard_output_and_the_progress_to_standard_error(tmp_path):
    code = ("import multimnist_capsnet as mc; mc.N_SYNTHETIC = {'train': 60, 'val': 40, 'test': 80}; "
            "mc.run_cli(mc.main)")
    flags = [flag for flag in toy_flags(runs.MULTI) if flag != "--quiet"]
    done = run_offline(tmp_path, "-c", code, *flags, "--out-json", "-")
    assert done.returncode == 0 and json.loads(done.stdout)["experiment"] == runs.MULTI and "epoch 1/" in done.stderr


def test_more_epochs_and_other_starts(call):
    """A run with a constant learning rate goes on as if it had been longer from the start. With cosine decay it has
    ended; its weights start another"""
    flags, constant = [*toy_flags(runs.MULTI), "--quiet"], ("--lr-schedule", "constant", "--outdir")
    for path, more in (("whole", ["--n-epochs", 2]), ("run", []), ("run", ["--n-epochs", 2])):
        assert call(mc, mc.main, *flags, *more, *constant, path) == (0, "", "")
    assert_same(mc.load("run")[1]["params"], mc.load("whole")[1]["params"])
    assert call(mc, mc.main, *flags, "--outdir", "old") == (0, "", "")
    assert_refused(call(mc, mc.main, *flags, "--n-epochs", 2, "--outdir", "old"), "another run from it: --init old")
    assert call(mc, mc.main, *flags, "--init", "old", "--lr", 1e-9, "--muon", 0, "--outdir", "new")[0] == 0
    old, new = (mc.load(path)[1] for path in ("old", "new"))
    assert all(np.allclose(p, old["params"][name], atol=1e-5) for name, p in new["params"].items()) and new["step"] < 9
    again = call(mc, mc.main, *flags, "--init", "whole", "--lr", 1e-9, "--muon", 0, "--outdir", "new")
    assert_refused(again, "new: started from other weights")
    assert_refused(call(mc, mc.main, *flags, "--model", "cnn", "--init", "old"), "has other layers or classes")


@every_experiment
def test_a_file_is_written_whole_or_not_at_all(experiment, tmp_path, monkeypatch):
    module, path = EXPERIMENTS[experiment], tmp_path / "result"
    module.write_file(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", full)
        with pytest.raises(module.InputError, match="cannot write .*result: No space left on device. Make it writable"):
            module.write_file(path, b"new")
    module.write_file(path, None)
    module.write_file(tmp_path / "a" / "b", None)
    assert path.read_bytes() == b"old" and {p.name for p in tmp_path.iterdir()} == {"home", "result", "a"}
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600 and not list((tmp_path / "a").iterdir())


@pytest.mark.parametrize("error, code, said", [
    (mc.InputError("two\nlines"), 2, "error: two lines\n"), (KeyboardInterrupt(), 130, "stopped\n"),
    (MemoryError(), 2, "error: out of memory\n"), (OSError(13, "Permission denied", "x"), 2, "error: [Errno 13]")])
@every_experiment
def test_what_the_user_can_correct_is_one_line(experiment, error, code, said, capsys):
    module = EXPERIMENTS[experiment]
    error = module.InputError(*error.args) if isinstance(error, mc.InputError) else error
    with pytest.raises(SystemExit) as stop:
        module.run_cli(lambda: (_ for _ in ()).throw(error))
    assert stop.value.code == code and capsys.readouterr().err.startswith(said)


def test_the_default_commands_of_the_viewpoint_experiment(call, monkeypatch):
    """Without --model the paper's two networks and a baseline; settings go to the models that they apply to"""
    trained = []
    monkeypatch.setattr(sn, "load_data", lambda *_: {})
    monkeypatch.setattr(sn, "print_table", lambda *_: None)
    monkeypatch.setattr(sn, "train_in", lambda folder, config, *_: trained.append(config))
    for flags in ((), ("--data", "shapes"), ("--model", "matrix-capsnet", "cnn", "--routing-iters", "1")):
        assert call(sn, sn.main, *flags)[0] == 0
    models = [config.model for config in trained]
    assert models[:3] == ["matrix-capsnet", "cnn", "cnn-bn"] and models[6:] == ["matrix-capsnet", "cnn"]
    assert models[3:6] == ["matrix-capsnet", "cnn", "cnn-gap"]
    assert [config.n_epochs for config in trained[:4]] == [10, 16, 16, 10]
    assert [config.lr for config in trained[:4]] == [5e-3, 2e-3, 2e-3, 2e-3]
    assert [config.preset for config in trained[:4]] == ["wide", "small", "small", "wide"]
    assert {config.data for config in trained[3:6]} == {"shapes"} and trained[6].routing_iters == 1


def test_a_longer_run_is_not_marked_as_finished_and_no_file_of_the_users_is_touched(call, tmp_path):
    flags = [*toy_flags(runs.MULTI), "--lr-schedule", "constant", "--outdir", "run"]
    assert call(mc, mc.main, *flags)[0] == 0
    for name in "weights.npz.bak", "weights.npz.1234":                  # a copy of the user's, and a killed run's
        (tmp_path / "run" / name).write_bytes(b"x")
    assert call(mc, mc.main, *flags, "--n-epochs", 2)[0] == 0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"weights.npz", "metrics.json", "metrics-1-epochs.json", "weights.npz.bak"}
    assert read(tmp_path / "run" / "metrics.json")["config"]["n_epochs"] == 2


@every_experiment
def test_values_of_another_type_are_refused_and_numpys_are_taken(experiment):
    module = EXPERIMENTS[experiment]
    for given in {"n_epochs": 1.5}, {"lr": "0.01"}, {"preset": ["small"]}, {"model": ["cnn"]}, {"seed": True}:
        with pytest.raises(module.InputError, match="must be a"):
            module.Config(**given)
    config = module.Config(n_epochs=np.int64(3), lr=np.float32(0.5), quiet=np.bool_(True))
    assert (config.n_epochs, config.lr, config.quiet) == (3, 0.5, True)
    assert json.dumps([config.n_epochs, config.lr, config.quiet]) == "[3, 0.5, true]"
