"""Each experiment's command line, in this process: what a run leaves behind, and what it must not destroy; what the
user can correct. All else: test_experiments.py."""
import json
import shlex
import stat

import multimnist_capsnet as mc
import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from conftest import EXPERIMENTS, assert_refused, assert_same, run_offline, runs, toy_flags

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
    (config, state), expected = module.load(folder / "weights.npz"), read(folder / "metrics.json")
    assert config.seed == 0 and not state["adam_m"] and len(state["history"]["epochs"]) == 1
    assert expected["n_params"] == sum(p.size for p in state["params"].values())
    assert {"source", "seconds_train", "ms_per_step", "versions", "machine", "history"} <= expected.keys()
    assert f"wrote {folder.relative_to(tmp_path) / 'metrics.json'}" in out
    again = shlex.split(next(line for line in out.splitlines() if "--load" in line).partition(f"{experiment}.py ")[2])
    code, out, err = call(module, module.main, *again, *few, "--out-json", "again.json")
    assert (code, err) == (0, "") and read(tmp_path / "again.json")["hit_bits"] == expected["hit_bits"]
    before = (folder / "weights.npz").read_bytes()
    assert call(module, module.main, *flags, "--quiet") == (0, "", "")
    second, = {*folder.parent.iterdir()} - {folder}
    assert second.name == folder.name + "-2" and (folder / "weights.npz").read_bytes() == before
    assert_same(module.load(second / "weights.npz")[1]["params"], state["params"])


def test_json_goes_to_standard_output_and_the_progress_to_standard_error(tmp_path):
    code = ("import multimnist_capsnet as mc; mc.N_SYNTHETIC = {'train': 60, 'val': 40, 'test': 80}; "
            "mc.run_cli(mc.main)")
    flags = [flag for flag in toy_flags(runs.MULTI) if flag != "--quiet"]
    done = run_offline(tmp_path, "-c", code, *flags, "--out-json", "-")
    assert done.returncode == 0 and json.loads(done.stdout)["experiment"] == runs.MULTI and "epoch 1/" in done.stderr


def test_more_epochs_and_other_starts(call):
    """A run with a constant learning rate goes on as if it had been longer from the start. With cosine decay it has
    ended; its weights start another"""
    flags, constant = [*toy_flags(runs.MULTI), "--quiet"], ("--lr-schedule", "constant", "--checkpoint")
    for path, more in (("whole.npz", ["--n-epochs", 2]), ("run.npz", []), ("run.npz", ["--n-epochs", 2])):
        assert call(mc, mc.main, *flags, *more, *constant, path) == (0, "", "")
    assert_same(mc.load("run.npz")[1]["params"], mc.load("whole.npz")[1]["params"])
    assert call(mc, mc.main, *flags, "--checkpoint", "old.npz") == (0, "", "")
    assert_refused(call(mc, mc.main, *flags, "--n-epochs", 2, "--checkpoint", "old.npz"), "Use --init old.npz instead")
    assert call(mc, mc.main, *flags, "--init", "old.npz", "--lr", 1e-9, "--muon", 0, "--out-weights", "new.npz")[0] == 0
    old, new = (mc.load(path)[1] for path in ("old.npz", "new.npz"))
    assert all(np.allclose(p, old["params"][name], atol=1e-5) for name, p in new["params"].items()) and new["step"] < 9
    assert_refused(call(mc, mc.main, *flags, "--model", "cnn", "--init", "old.npz"), "has other layers or classes")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "result"
    mc.write_file(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(mc.os, "replace", full)
        with pytest.raises(mc.InputError, match="cannot write .*result: No space left on device. Name a file"):
            mc.write_file(path, b"new")
    mc.write_file(path, None)
    mc.write_file(tmp_path / "a" / "b", None)
    assert path.read_bytes() == b"old" and {p.name for p in tmp_path.iterdir()} == {"home", "result", "a"}
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600 and not list((tmp_path / "a").iterdir())


@pytest.mark.parametrize("error, code, said", [
    (mc.InputError("two\nlines"), 2, "error: two lines\n"), (KeyboardInterrupt(), 130, ""),
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
    monkeypatch.setattr(sn, "run", lambda config, *_: (trained.append(config), []))
    for flags in ((), ("--data", "shapes"), ("--model", "matrix-capsnet", "cnn", "--routing-iters", "1")):
        assert call(sn, sn.main, *flags)[0] == 0
    models = [config.model for config in trained]
    assert models[:3] == ["matrix-capsnet", "cnn", "cnn-bn"] and models[7:] == ["matrix-capsnet", "cnn"]
    assert models[3:7] == ["matrix-capsnet", "cnn", "cnn-gap", "nearest"]
    assert [config.n_epochs for config in trained[:4]] == [10, 16, 16, 10]
    assert [config.lr for config in trained[:4]] == [5e-3, 2e-3, 2e-3, 2e-3]
    assert [config.preset for config in trained[:4]] == ["wide", "small", "small", "wide"]
    assert {config.data for config in trained[3:7]} == {"shapes"} and trained[7].routing_iters == 1
