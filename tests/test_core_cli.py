"""Each experiment's command line, in this process: what a run leaves behind, and what it must not destroy; what the
user can correct. All else: test_experiments.py."""
import base64
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shlex
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import multimnist_capsnet as mc
import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from conftest import EXPERIMENTS, POSIX, assert_refused, assert_same, run_offline, runs, toy, toy_flags

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


@every_experiment
def test_two_runs_in_one_folder_do_not_overwrite_each_other(experiment, tmp_path, monkeypatch):
    module, (config, data) = EXPERIMENTS[experiment], toy(experiment, n_epochs=2)

    def another_saves(progress, state):                                 # after the first epoch
        os.utime(tmp_path / "weights.npz", ns=(1, 1))
    monkeypatch.setattr(module.Progress, "epoch", another_saves)
    with pytest.raises(module.InputError, match="another run saves here, too. Name another --outdir"):
        module.run(config, data, module.initial_state(config), tmp_path)


@every_experiment
def test_a_dangling_link_for_runs_is_refused(call, experiment, tmp_path):
    module = EXPERIMENTS[experiment]
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    assert_refused(call(module, module.main, *toy_flags(experiment)), "cannot make runs")


@every_experiment
def test_a_damaged_result_is_named(call, experiment, tmp_path):
    module, flags = EXPERIMENTS[experiment], [*toy_flags(experiment), "--outdir", "run"]
    assert call(module, module.main, *flags)[0] == 0
    for text in "", "{", '{"config": {}}', '{"config": null}', '{"config": {"n_epochs": 1}}':
        (tmp_path / "run" / "metrics.json").write_text(text, "utf-8")
        assert_refused(call(module, module.main, *flags), "metrics.json: damaged. Delete it")


@every_experiment
def test_the_line_within_an_epoch(experiment, monkeypatch):
    """On a terminal it is rewritten every second; in a log there is one every ten seconds, so none if epochs are
    shorter"""
    module, data = EXPERIMENTS[experiment], {"train": {"labels": np.zeros(3200)}}
    n_train = {} if experiment == runs.NORB else {"n_train": 3200}
    config = module.Config(**n_train, n_epochs=2)                       # 100 steps an epoch
    times = iter(range(10_000))

    def said(seconds_per_step, on_terminal):
        clock = SimpleNamespace(perf_counter=lambda: seconds_per_step * next(times))
        out = io.StringIO()
        out.isatty = lambda: on_terminal
        monkeypatch.setattr(module, "time", clock)
        with contextlib.redirect_stdout(out):
            progress = module.Progress(config, data)
            for step in range(1, 201):
                progress.step({"step": step}, {"loss": 0.5})
                if step % 100 == 0:
                    progress.epoch({"history": {"epochs": [{"epoch": step // 100}]}})
        return out.getvalue()
    monkeypatch.setattr(module, "PROGRESS", "epoch {epoch}/{n_epochs}")
    lines = said(0.5, False).splitlines()
    assert [line.split()[1] for line in lines] == [
        "20/200", "40/200", "60/200", "80/200", "1/2", "120/200", "140/200", "160/200", "180/200", "2/2"]
    assert lines[0] == "step 20/200  loss 0.500  500 ms/step  0:01:30 left"
    assert said(0.05, False).split() == ["epoch", "1/2", "epoch", "2/2"]
    rewritten, rest = said(0.5, True).split("\n")[:2]
    assert rewritten.count("\r") == rest.count("\r") == 49 and rewritten.startswith("step 2/200")
    assert len({len(line) for line in rewritten.split("\r")}) == 1


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


@POSIX
@every_experiment
def test_a_link_to_a_file_is_followed_not_replaced(experiment, tmp_path):
    module, target, link = EXPERIMENTS[experiment], tmp_path / "a" / "result", tmp_path / "link"
    module.write_file(target, b"old")
    link.symlink_to(target)
    module.write_file(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert {path.name for path in tmp_path.rglob("*")} == {"home", "a", "result", "link"}


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


@every_experiment
def test_a_longer_run_is_not_marked_as_finished_and_no_file_of_the_users_is_touched(call, experiment, tmp_path):
    module = EXPERIMENTS[experiment]
    flags = [*toy_flags(experiment), "--lr-schedule", "constant", "--outdir", "run"]
    assert call(module, module.main, *flags)[0] == 0
    for name in "weights.npz.bak", "weights.npz.1234":                  # a copy of the user's, and a killed run's
        (tmp_path / "run" / name).write_bytes(b"x")
    assert call(module, module.main, *flags, "--n-epochs", 2)[0] == 0
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


# ---------------------------------------------------------------- what a run is, and what it says

@every_experiment
def test_a_run_from_other_weights_has_these_and_nothing_else_of_them(experiment, tmp_path):
    """Neither its steps nor moments nor epochs; it keeps whose they were"""
    module, (config, data) = EXPERIMENTS[experiment], toy(experiment)
    old = module.train(config, data)
    module.save(tmp_path / "old.npz", config, old)
    (tmp_path / "new").mkdir()
    state = module.begin(tmp_path / "new", config, data, tmp_path / "old.npz")
    assert_same(state["params"], old["params"])
    assert_same(state["running"], old["running"])
    for moments in state["adam_m"], state["adam_v"]:
        assert moments.keys() == old["params"].keys() and not any(a.any() for a in moments.values())
    assert state["step"] == 0 and state["history"]["epochs"] == []
    digest = hashlib.sha256((tmp_path / "old.npz").read_bytes()).hexdigest()
    assert state["history"]["init"] == digest
    other, _ = toy(experiment, model="cnn-gap" if experiment != runs.MULTI else "cnn")
    with pytest.raises(module.InputError, match="old.npz: has other layers or classes"):
        module.begin(tmp_path / "new", other, data, tmp_path / "old.npz")
    assert module.begin(tmp_path / "new", config, data, None)["history"]["init"] is None
    state = module.train(config, data, state)
    module.save(tmp_path / "new" / "weights.npz", config, state)
    assert module.begin(tmp_path / "new", config, data, tmp_path / "old.npz")["step"] == 2
    with pytest.raises(module.InputError, match="new: started from other weights. Give the same --init"):
        module.begin(tmp_path / "new", config, data, None)


@every_experiment
def test_a_run_goes_on_with_its_own_command_and_data_only(experiment, tmp_path):
    """Other labels are other data, and so are other names of the classes; fewer epochs are another run"""
    module, (config, data) = EXPERIMENTS[experiment], toy(experiment, n_epochs=2, lr_schedule="constant")
    folder = tmp_path / "run"
    folder.mkdir()
    state = module.train(config, data, module.begin(folder, config, data, None))
    module.save(folder / "weights.npz", config, state)
    assert module.begin(folder, config, data, None)["step"] == 4
    more, fewer = (dataclasses.replace(config, n_epochs=n) for n in (3, 1))
    assert module.begin(folder, more, data, None)["step"] == 4
    with pytest.raises(module.InputError, match="--n-epochs 1: .* has 2. Give that"):
        module.begin(folder, fewer, data, None)
    train = data["train"]
    if experiment == runs.NORB:
        others = [data | {"train": train | {"labels": train["labels"][::-1]}}]
    else:
        images, labels = train
        others = [data | {"train": (images, labels[::-1])}, data | {"names": [*"ABCDEFGHIJ"]}]
    for other in others:
        with pytest.raises(module.InputError, match="on other images or classes than are given now"):
            module.begin(folder, config, other, None)
    module.save(folder / "weights.npz", config, module.without_moments(state))
    with pytest.raises(module.InputError, match="its weights have no moments of the optimizer. Start another"):
        module.begin(folder, config, data, None)


@pytest.mark.parametrize("experiment", [runs.MULTI, runs.AFF])
def test_a_network_of_ten_classes_is_not_tested_on_ten_others(experiment):
    """Names decide, where both have them"""
    module, (config, _) = EXPERIMENTS[experiment], toy(experiment)
    state = module.initial_state(config)
    state["history"] |= {"source": "letters", "names": [*"ABCDEFGHIJ"]}
    for data in {"source": "letters", "names": [*"ABCDEFGHIJ"]}, {"source": "clothes"}:
        module.check_classes("net.npz", state, config, data)
    for data in {"source": "letters", "names": [*"KLMNOPQRST"]}, {"source": "mnist"}:
        with pytest.raises(module.InputError, match="net.npz: has other layers or classes. .*images of letters"):
            module.check_classes("net.npz", state, config, data)


@every_experiment
def test_a_network_that_is_tested_with_another_seed_keeps_that_of_its_training(call, experiment):
    module, flags = EXPERIMENTS[experiment], toy_flags(experiment)
    few = [flag for flag in flags if flag.startswith(("--n-test=", "--digits="))]
    assert call(module, module.main, *flags, "--seed", 4, "--outdir", "old")[0] == 0
    assert call(module, module.main, "--load", "old", "--seed", 9, *few, "--outdir", "new")[0] == 0
    assert module.load("new")[0] == module.load("old")[0] and module.load("old")[0].seed == 4
    found = json.loads(Path("new/metrics.json").read_text("utf-8"))
    assert (found["config"]["seed"], found["loaded"]["trained_seed"]) == (9, 4)
    digest = hashlib.sha256(Path("old/weights.npz").read_bytes()).hexdigest()
    assert (found["loaded"]["file"], found["loaded"]["sha256"]) == ("weights.npz", digest)


@every_experiment
def test_a_run_that_was_killed_while_it_saved_for_the_first_time_begins_anew(call, experiment, tmp_path):
    module, folder = EXPERIMENTS[experiment], tmp_path / "run"
    folder.mkdir()
    (folder / "weights.npz.1234").write_bytes(b"x")
    code, out, err = call(module, module.main, *toy_flags(experiment), "--outdir", "run")
    assert (code, err) == (0, "") and "epoch 1/1" in out
    assert {path.name for path in folder.iterdir()} == {"weights.npz", "metrics.json"}


@every_experiment
def test_a_file_of_weights_keeps_no_setting_of_the_machine(experiment, tmp_path):
    """Folders, threads and quiet are of the process that runs it"""
    module, (config, _) = EXPERIMENTS[experiment], toy(experiment)
    config = dataclasses.replace(config, threads=2, quiet=True)
    module.save(tmp_path / "net.npz", config, module.initial_state(config))
    kept = json.loads(str(np.load(tmp_path / "net.npz")["meta"]))["config"]
    assert not {"threads", "quiet", "data_dir", "affnist_dir", "norb_dir"} & kept.keys()
    assert {"model", "seed", "n_epochs", "lr"} <= kept.keys()
    assert module.load(tmp_path / "net.npz")[0].threads == 0


@every_experiment
def test_a_table_of_results_by_hand(experiment, monkeypatch, capsys):
    """A column is as wide as the longest name; 0 is a result, and what no network has is no row"""
    module = EXPERIMENTS[experiment]
    monkeypatch.setattr(module, "TABLE", {
        "n_params": ("parameters", ",d"), "hits": ("accuracy", ".4f"), "mse": ("error", ".4f"),
        "none": ("never", ".4f")})
    one = {"source": "a", "trained_on": "a", "n_params": 1234567, "hits": 0.5, "mse": None}
    other = {"source": "b", "trained_on": "a", "n_params": 12, "hits": 0.0, "mse": 0.25}
    module.print_table({"cnn": one, "a-network-of-a-long-name": other}, module.Config())
    label = "{:36}".format
    assert capsys.readouterr().out.splitlines() == [
        "", "Test samples of images of a, images of b (trained on images of a)",
        label("") + "                       cnn  a-network-of-a-long-name",
        label("parameters") + "                 1,234,567                        12",
        label("accuracy") + "                    0.5000                    0.0000",
        label("error") + "                         -                    0.2500"]


@pytest.mark.parametrize("experiment, rows", [
    (runs.MULTI, {
        "test_exact_match": "both digits correct (exact match)", "test_at_least_one": "at least one digit correct",
        "test_recon_mse": "reconstruction MSE per pixel", "baseline_recon_mse": "... of the mean digit"}),
    (runs.AFF, {
        "familiar_accuracy": "correct translated digits", "any_position_accuracy": "correct digits at any position",
        "centered_accuracy": "correct affine digits, centered",
        "affine_accuracy": "correct affine digits, any position",
        "real_affine_accuracy": "correct affNIST's own digits", "test_accuracy": "correct test images"}),
    (runs.NORB, {
        "familiar": "accuracy, familiar viewpoints", "novel": "accuracy, novel viewpoints", "drop": "drop"})])
def test_each_row_of_a_table_has_its_metric(experiment, rows, capsys):
    module = EXPERIMENTS[experiment]
    values = {name: (k + 1) / 16 for k, name in enumerate(rows)}
    result = {"source": "a", "trained_on": "a", "n_params": 12} | values
    module.print_table({"x": result}, module.Config())
    expected = {"parameters": "12"} | {rows[name]: f"{value:.4f}" for name, value in values.items()}
    lines = capsys.readouterr().out.splitlines()[3:]
    assert {line[:36].rstrip(): line[36:].strip() for line in lines} == expected


@every_experiment
def test_a_line_that_is_rewritten_is_removed_when_a_training_ends(experiment, tmp_path, monkeypatch):
    module, (config, data) = EXPERIMENTS[experiment], toy(experiment, quiet=False)
    out = io.StringIO()
    out.isatty = lambda: True

    def stopped(*_):
        print("step 1/2", end="\r")
        raise module.InputError("diverged")
    monkeypatch.setattr(module, "train", stopped)
    with contextlib.redirect_stdout(out), pytest.raises(module.InputError, match="diverged"):
        module.run(config, data, module.initial_state(config), tmp_path)
    *_, last, end = out.getvalue().split("\r")
    assert last.isspace() and len(last) >= len("step 1/2") and end == ""


@every_experiment
def test_a_result_by_hand(experiment, monkeypatch):
    """What it was tested and trained on, its size without running statistics, its times"""
    module = EXPERIMENTS[experiment]
    monkeypatch.setattr(module, "test_metrics", lambda test: {"found": test})
    epochs = [{"epoch": 1, "seconds": 2.0, "x": 5}, {"epoch": 2, "seconds": 4.0, "x": 6}]
    state = {"step": 4, "params": {"a": np.zeros((2, 3)), "b": np.zeros(5)},
             "running": {"c": np.zeros(7)}, "history": {"source": "mine", "epochs": epochs}}
    found = module.result_of(module.Config(threads=3, quiet=True), state, {"source": "yours"}, 0.5)
    assert (found["experiment"], found["source"], found["trained_on"]) == (experiment, "yours", "mine")
    assert (found["n_params"], found["found"]) == (11, 0.5)
    assert (found["seconds_train"], found["ms_per_step"]) == (6, 1500)
    assert found["history"] == {"epoch": [1, 2], "seconds": [2, 4], "x": [5, 6]}
    assert found["config"]["threads"] == 3 and found["config"]["seed"] == 0
    assert not {"quiet", "data_dir", "affnist_dir", "norb_dir"} & found["config"].keys()
    numbers = {"a": np.float32(0.5), "b": np.int64(3), "c": None}
    assert json.loads(module.as_json(numbers)) == {"a": 0.5, "b": 3, "c": None}


def test_correct_samples_are_kept_as_bits_the_first_one_highest():
    correct = np.array([True, False, False, False, False, False, True, True, True])     # 0x83, 0x80
    for module in EXPERIMENTS.values():
        assert module.packed_bits(correct) == base64.b64encode(b"\x83\x80").decode()


@pytest.mark.parametrize("experiment, given, flags", [
    (runs.MULTI, {"data_dir": "my data"}, " --data-dir 'my data'"), (runs.MULTI, {}, ""),
    (runs.AFF, {"data_dir": "mine", "affnist_dir": "theirs"}, " --data-dir mine --affnist-dir theirs"),
    (runs.NORB, {"data": "smallnorb", "norb_dir": "norb"}, " --norb-dir norb"), (runs.NORB, {}, "")])
def test_the_command_that_tests_a_run_by_hand(experiment, given, flags, monkeypatch):
    """With this Python's own path, if it is not the usual one"""
    module = EXPERIMENTS[experiment]
    monkeypatch.setattr(module.sys, "argv", ["x.py", "--seed", "5"])
    for usual, python in ((os.path.join(os.path.dirname(sys.executable), "python3"), "python3"),
                          (os.path.join(os.sep, "usual", "python3"), shlex.quote(sys.executable))):
        monkeypatch.setattr(module.shutil, "which", lambda name, usual=usual: usual)
        command = module.test_command("run", module.Config(**given))
        assert command == f"{python} x.py --load run{flags}"


# ---------------------------------------------------------------- several networks of the viewpoint experiment

def test_a_run_of_several_networks_that_is_stopped_says_how_far_each_is(tmp_path, monkeypatch):
    folders = {}
    for model, n_saved in (("cnn", 2), ("cnn-gap", 1), ("capsnet", None)):
        config, data = toy(runs.NORB, model=model, n_epochs=3)
        folders[config] = tmp_path / model
        if n_saved is not None:
            state = sn.initial_state(config)
            state["history"]["epochs"] = [{}] * n_saved
            sn.save(tmp_path / model / "weights.npz", config, state)
    monkeypatch.setattr(sn.sys, "argv", ["x.py", "--quiet"])
    said = sn.what_is_saved(folders, tmp_path, None)
    assert said.startswith(f"stopped; {tmp_path} has epoch 2/3 of cnn, epoch 1/3 of cnn-gap. To resume: ")
    assert said.endswith(f"x.py --quiet --outdir {tmp_path}")
    assert sn.what_is_saved(folders, "both", "both").endswith("x.py --quiet")
    nothing = {config: tmp_path / "nothing" for config in folders}
    assert "nothing is saved" in sn.what_is_saved(nothing, tmp_path, None)


def test_a_folder_of_several_networks_holds_nothing_else(call, tmp_path):
    flags = [flag for flag in toy_flags(runs.NORB) if not flag.startswith("--model")]
    two = ["--model", "cnn-gap", "cnn"]
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to-a-friend.txt").write_text("hello", "utf-8")
    refused = call(sn, sn.main, *flags, *two, "--outdir", "letters")
    assert_refused(refused, "letters: holds other files (to-a-friend.txt)")
    assert call(sn, sn.main, *flags, "--model", "cnn-gap", "--outdir", "one")[0] == 0
    refused = call(sn, sn.main, *flags, *two, "--outdir", "one")
    assert_refused(refused, "one: holds other files")
    assert call(sn, sn.main, *flags, *two, "--outdir", "both")[0] == 0
    (tmp_path / "both" / "notes.txt").write_text("of mine", "utf-8")            # beside runs: welcome
    code, out, err = call(sn, sn.main, *flags, *two, "--outdir", "both")
    assert (code, err) == (0, "") and "cnn-gap is finished" in out and "cnn is finished" in out


def test_the_table_of_networks_before_one_that_failed_is_printed(call, monkeypatch):
    train_in = sn.train_in

    def fails_at_the_second(folder, config, *more):
        if config.model == "cnn":
            raise sn.InputError("loss nan")
        return train_in(folder, config, *more)
    monkeypatch.setattr(sn, "train_in", fails_at_the_second)
    flags = [flag for flag in toy_flags(runs.NORB) if not flag.startswith("--model")]
    code, out, err = call(sn, sn.main, *flags, "--model", "cnn-gap", "cnn")
    assert code == 2 and "loss nan" in err
    assert "accuracy, novel viewpoints" in out and "cnn-gap" in out
