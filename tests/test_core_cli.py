"""Each experiment's command line: trained, resumed, loaded, with the same answers; what a run leaves behind, and what
it must not destroy; wrong input in one line, before anything is trained."""
import json
import shlex
import stat

import multimnist_capsnet as mc
import smallnorb_novel_viewpoint as sn

import pytest
from conftest import EXPERIMENTS, POSIX, assert_same, runs, toy_flags

every_experiment = pytest.mark.parametrize("experiment", EXPERIMENTS)
TWO = {runs.MULTI: ("capsnet", "cnn"), runs.NORB: ("matrix-capsnet", "cnn"), runs.AFF: ("capsnet-shared", "cnn-gap")}


def read(path):
    return json.loads(path.read_text("utf-8"))


def few(flags):
    """Return those of some flags that a test of a trained network needs"""
    return [flag for flag in flags if flag.startswith(("--n-test=", "--digits="))]


@every_experiment
def test_trained_resumed_and_loaded_give_the_same_answers(call, tmp_path, experiment):
    module, flags, found = EXPERIMENTS[experiment], toy_flags(experiment), []
    train = [*flags, "--checkpoint=run.npz"]
    for words in (train, [*train, "--out-weights=net.npz"], ["--load=run.npz", *few(flags)],
                  ["--load=net.npz", *few(flags)]):
        code, out, err = call(module, module.main, *words, "--out-json", "out.json")
        assert (code, err) == (0, "") and out, err
        found.append(read(tmp_path / "out.json"))
    assert "resuming at step 2" not in out and not (tmp_path / "runs").exists()
    assert found[0]["hit_bits"] == found[1]["hit_bits"] == found[2]["hit_bits"] == found[3]["hit_bits"]
    assert found[0]["experiment"] == experiment and found[0]["history"] == found[1]["history"]
    for words, fault in (([*train, "--seed=1"], "--seed 1: run.npz has 0"),
                         (["--load=net.npz", "--lr=0.5"], "--lr 0.5: net.npz has "),
                         (["--load=none.npz"], "none.npz: No such file or directory. Give a file")):
        code, out, err = call(module, module.main, *words)
        assert code == 2 and err.startswith("error: ") and fault in err and err.count("\n") == 1, err


@every_experiment
def test_a_run_is_kept_and_the_command_that_it_prints_works(call, tmp_path, experiment):
    """Weights, settings, metrics and history, in a new folder each time"""
    module, flags = EXPERIMENTS[experiment], toy_flags(experiment)
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
    code, out, err = call(module, module.main, *again, *few(flags), "--out-json", "again.json")
    assert (code, err) == (0, "") and read(tmp_path / "again.json")["hit_bits"] == expected["hit_bits"]
    before = (folder / "weights.npz").read_bytes()
    assert call(module, module.main, *flags, "--quiet") == (0, "", "")
    second, = {*folder.parent.iterdir()} - {folder}
    assert second.name == folder.name + "-2" and (folder / "weights.npz").read_bytes() == before
    assert_same(module.load(second / "weights.npz")[1]["params"], state["params"])


@every_experiment
def test_several_models_are_those_of_single_commands_in_one_table(call, tmp_path, experiment):
    module, two = EXPERIMENTS[experiment], TWO[experiment]
    flags = [flag for flag in toy_flags(experiment) if not flag.startswith("--model")]
    code, out, err = call(module, module.main, *flags, "--model", *two)
    assert (code, err) == (0, "")
    folders = sorted((tmp_path / "runs" / experiment).iterdir())
    heading, = [line.split() for line in out.splitlines() if line.split() == [name[-15:] for name in two]]
    parameters, = [line.split()[-2:] for line in out.splitlines() if line.startswith("parameters")]
    results = {read(folder / "metrics.json")["config"]["model"]: read(folder / "metrics.json") for folder in folders}
    assert parameters == [f"{results[name]['n_params']:,}" for name in two] and heading
    assert call(module, module.main, *flags, "--model", two[1], "--out-json", "one.json")[0] == 0
    assert read(tmp_path / "one.json")["hit_bits"] == results[two[1]]["hit_bits"]
    loaded = [folder / "weights.npz" for folder in folders]
    code, out, err = call(module, module.main, "--load", *loaded, *few(flags))
    assert (code, err) == (0, "") and [line for line in out.splitlines() if line.startswith("parameters")]


def test_json_goes_to_standard_output(call):
    code, out, err = call(mc, mc.main, *toy_flags(runs.MULTI), "--quiet", "--out-json", "-")
    assert (code, err) == (0, "") and json.loads(out)["experiment"] == runs.MULTI


def test_a_killed_run_leaves_the_checkpoint_of_its_last_epoch(call, tmp_path, monkeypatch):
    """Ctrl-C: exit code 130, and the same command resumes"""
    flags, calls, good = [*toy_flags(runs.MULTI, n_epochs=2), "--checkpoint=run.npz"], [], mc.optimizer_step

    def stops(*given):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        good(*given)
    monkeypatch.setattr(mc, "optimizer_step", stops)
    assert call(mc, mc.main, *flags)[0] == 130
    assert mc.load(tmp_path / "run.npz")[1]["step"] == 2
    monkeypatch.setattr(mc, "optimizer_step", good)
    code, out, _ = call(mc, mc.main, *flags)
    assert code == 0 and "resuming at step 2" in out and "epoch 2/2" in out and "epoch 1/2" not in out
    assert call(mc, mc.main, *toy_flags(runs.MULTI, n_epochs=2), "--out-weights=whole.npz")[0] == 0
    assert_same(mc.load(tmp_path / "run.npz")[1]["params"], mc.load(tmp_path / "whole.npz")[1]["params"])


def test_a_run_that_diverges_leaves_the_last_good_checkpoint(call, tmp_path, monkeypatch):
    good, saved = mc.loss_and_grads, tmp_path / "run.npz"

    def goes_wrong(*given, **more):
        terms, *rest = good(*given, **more)
        return terms | ({"loss": float("nan")} if saved.exists() else {}), *rest
    monkeypatch.setattr(mc, "loss_and_grads", goes_wrong)
    code, _, err = call(mc, mc.main, *toy_flags(runs.MULTI, n_epochs=2), "--checkpoint=run.npz")
    assert code == 2 and err == "error: loss nan, step 3: diverged. Lower --lr\n"
    assert mc.load(tmp_path / "run.npz")[1]["step"] == 2 and not list(tmp_path.glob("runs/*/*/*"))


# -------------------------------------------------------------- outputs that cannot be written

@pytest.mark.parametrize("flag", ["--out-json", "--out-weights", "--checkpoint"])
@pytest.mark.parametrize("kind", [
    "folder", "below a file", pytest.param("too long", marks=POSIX)])
def test_an_output_that_cannot_be_written_is_found_before_training(call, tmp_path, flag, kind):
    """The remedy is in the line; nothing is trained"""
    (tmp_path / "file").write_text("kept", "utf-8")
    (tmp_path / "folder").mkdir()
    path = {"folder": "folder", "below a file": "file/x", "too long": "x" * 300}[kind]
    code, out, err = call(mc, mc.main, *toy_flags(runs.MULTI), flag, path)
    assert code == 2 and err.startswith("error: ") and path in err and err.count("\n") == 1 and "epoch" not in out, err
    assert (tmp_path / "file").read_text("utf-8") == "kept"


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "result"
    mc.write_file(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(mc.os, "replace", full)
        with pytest.raises(mc.InputError, match="cannot write .*result: No space left on device. Choose a writable"):
            mc.write_file(path, b"new")
    mc.write_file(path, None)
    mc.write_file(tmp_path / "a" / "b", None)
    assert path.read_bytes() == b"old" and {p.name for p in tmp_path.iterdir()} == {"home", "result", "a"}
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600 and not list((tmp_path / "a").iterdir())


# -------------------------------------------------------------- wrong input

WRONG = {                          # flags -> what the line says
    runs.MULTI: {"--lr=-1": "--lr -1.0: must be from", "--model cnn --routing-iters 2": "--routing-iters has no effect",
                 "--data-dir nowhere": "nowhere", "--digits mnist": "--data-dir"},
    runs.AFF: {"--n-test=-1": "--n-test -1: must be from", "--model cnn-gap --squash last": "--squash has no effect",
               "--data-dir nowhere": "nowhere"},
    runs.NORB: {"--n-elev 0 --data shapes": "--n-elev 0: must be from", "--train-azimuths 10": "--train-azimuths 10",
                "--data smallnorb --norb-dir nowhere": "nowhere", "--model cnn --routing-iters 3": "has no effect",
                "--train-azimuths 0:100 --test-azimuths 50:200": "--test-azimuths"}}


@pytest.mark.parametrize("experiment, flags, words", [(experiment, *pair) for experiment, of in WRONG.items()
                                                      for pair in of.items()])
def test_wrong_input_is_one_line_and_exit_code_2(call, experiment, flags, words):
    module = EXPERIMENTS[experiment]
    code, out, err = call(module, module.main, *flags.split())
    assert code == 2 and err.startswith("error: ") and words in err and err.count("\n") == 1 and "epoch" not in out, err


@pytest.mark.parametrize("flags", [["--n-epochs", "many"], ["--no-such-flag"], ["--lr"], ["--lr-schedule", "huge"]])
@every_experiment
def test_what_argparse_refuses_has_exit_code_2(call, experiment, flags):
    module = EXPERIMENTS[experiment]
    code, _, err = call(module, module.main, *flags)
    assert code == 2 and flags[0] in err.splitlines()[-1] and "error: " in err.splitlines()[-1]


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
    assert {config.data for config in trained[3:7]} == {"shapes"} and trained[7].routing_iters == 1
