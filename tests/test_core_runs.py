"""What a run leaves behind, and what it must not destroy; outputs that cannot be written are found before training."""
import dataclasses
import json
import os
import stat

import multimnist_capsnet as mc

import golden
import pytest
from conftest import EXPERIMENTS, POSIX, SMALL, assert_same, runs, toy


def small_flags(experiment):
    """Return the flags of toy's Config"""
    (config, _), module = toy(experiment), EXPERIMENTS[experiment]
    names = {f.name for f in module.options(config) if f.name != "quiet"}
    names &= golden.SIZES.keys() | SMALL.get(experiment, {}).keys()
    return [f"--model={config.model}", *(f"{module.flag_name(name)}={getattr(config, name)}" for name in sorted(names)
                                         if module.is_applicable(module.limits(name), config))]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_run_is_saved_and_the_next_commands_are_said(call, tmp_path, experiment):
    """Weights, settings, metrics and history; the commands that it ends with work"""
    module = EXPERIMENTS[experiment]
    code, out, err = call(module, module.main, *small_flags(experiment), "save", "--out-json", "r.json")
    assert (code, err) == (0, "")
    folder, = (tmp_path / "runs" / experiment).iterdir()
    assert {path.name for path in folder.iterdir()} == {"weights.npz", "metrics.json"}
    assert (folder / "metrics.json").read_text("utf-8") == (tmp_path / "r.json").read_text("utf-8")
    network = module.load_network(folder / "weights.npz")
    assert network.history["epochs"] and not network.adam_m and network.config.seed == 0
    *_, saved, draw, again = out.splitlines()
    relative = folder.relative_to(tmp_path) / "weights.npz"
    assert saved == f"saved {relative.parent} (weights, metrics, history)"
    few = [word for flag in small_flags(experiment) if flag.startswith("--n-test=") for word in flag.split("=")]
    tested = few * (experiment != runs.NORB)                                            # whose files hold --n-test
    assert draw == "  draw it:       " + module.command_line(f"visualize_{experiment}.py", "--load", relative, *tested)
    script, *flags = again.split()[4:]
    assert script == f"{experiment}.py"
    code, out, err = call(module, module.main, *flags, "--out-json", "again.json")
    assert (code, err) == (0, "")
    found, expected = (json.loads((tmp_path / name).read_text("utf-8")) for name in ("again.json", "r.json"))
    assert found["hit_bits"] == expected["hit_bits"] and not list(folder.parent.glob("*/weights.partial.npz"))


def test_names_of_runs():
    """Model, preset and seed; other settings or data have a digest, and settings that change no bit have none"""
    def name(source="mnist", **given):
        return str(mc.run_folder(mc.Config(run_dir=mc.AUTO, **given), source))
    assert name() == os.path.join("runs", "multimnist_capsnet", "capsnet-deep-seed0")
    assert name(model="cnn", preset="residual", seed=3).endswith("cnn-residual-seed3")
    assert name(threads=2, quiet=True, n_test=5, digits="mnist") == name()
    others = [name(lr=0.5), name(n_epochs=3), name("synthetic"), name("synthetic", lr=0.5), name(min_iou=0.0)]
    assert len({*others, name()}) == 6 and all(other.startswith(name() + "-") for other in others)
    assert str(mc.run_folder(mc.Config(run_dir="mine"), "mnist")) == "mine"


def test_where_a_run_is_saved(call, tmp_path):
    """--quiet saves, --no-save does not, --run-dir chooses; several have a folder each"""
    flags = [*small_flags(runs.MULTI), "--quiet"]
    assert call(mc, mc.main, *flags) == (0, "", "") and not (tmp_path / "runs").exists()
    assert call(mc, mc.main, *flags, "save") == (0, "", "") and len(list(tmp_path.glob("runs/*/*/weights.npz"))) == 1
    assert call(mc, mc.main, *flags, "--run-dir", "mine/one") == (0, "", "")
    assert {path.name for path in (tmp_path / "mine" / "one").iterdir()} == {"weights.npz", "metrics.json"}
    assert call(mc, mc.main, *flags, "--run-dir", "two", "--n-seeds", 2) == (0, "", "")
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["capsnet-0", "capsnet-1"]
    code, _, err = call(mc, mc.main, "--load", "mine/one/weights.npz", "--run-dir", "x")
    assert code == 2 and "--run-dir is for training" in err


def test_a_run_replaces_an_older_one_only_when_it_is_complete(call, tmp_path, monkeypatch):
    """A run of the same settings that is interrupted leaves the complete one as it was"""
    flags = [*small_flags(runs.MULTI), "--quiet", "--run-dir", "r", "--n-epochs=2"]
    assert call(mc, mc.main, *flags)[0] == 0
    before, calls, good = (tmp_path / "r" / "weights.npz").read_bytes(), [], mc.optimizer_step

    def stops(*given):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        good(*given)
    monkeypatch.setattr(mc, "optimizer_step", stops)
    assert call(mc, mc.main, *flags)[0] == 130
    assert (tmp_path / "r" / "weights.npz").read_bytes() == before
    partial = mc.load_network(tmp_path / "r" / "weights.partial.npz")                   # after its first epoch
    assert len(partial.history["epochs"]) == 1
    monkeypatch.setattr(mc, "optimizer_step", good)
    assert call(mc, mc.main, *flags)[0] == 0
    (tmp_path / "before.npz").write_bytes(before)
    again, first = (mc.load_network(path).weights for path in (tmp_path / "r" / "weights.npz", tmp_path / "before.npz"))
    assert_same(again, first)
    assert not (tmp_path / "r" / "weights.partial.npz").exists()


def test_a_run_that_cannot_be_saved_is_trained_all_the_same(call, tmp_path):
    (tmp_path / "runs").write_text("a file", "utf-8")
    code, out, err = call(mc, mc.main, *small_flags(runs.MULTI), "save")
    assert (code, err) == (0, "") and "warning: this run will not be saved: " in out and "exact match" in out
    assert "draw it" not in out and (tmp_path / "runs").read_text("utf-8") == "a file"
    code, out, err = call(mc, mc.main, *small_flags(runs.MULTI), "--run-dir", "runs")    # but not in a folder by name
    assert code == 2 and err.startswith("error: --run-dir runs: ") and "epoch" not in out and err.count("\n") == 1


def test_a_disk_that_fills_up_during_training_does_not_end_it(call, tmp_path, monkeypatch):
    """It is said once; the metrics are still printed"""
    def full(path, *_):
        raise mc.InputError(f"cannot write {path}: No space left on device")
    monkeypatch.setattr(mc, "save_network", full)
    code, out, err = call(mc, mc.main, *small_flags(runs.MULTI), "save", "--n-epochs=2")
    assert (code, err) == (0, "") and out.count("warning: this run is not saved from here on") == 1
    assert "exact match" in out and not list(tmp_path.glob("runs/*/*/*.npz"))


def test_a_run_that_diverges_at_once_leaves_no_folder(call, tmp_path):
    code, _, err = call(mc, mc.main, *small_flags(runs.MULTI), "save", "--lr", "1e38", "--n-epochs=3", "--warmup=0")
    assert code == 2 and "diverged" in err and not list(tmp_path.glob("runs/*/*"))


def test_figures_save_the_networks_that_they_train(call, tmp_path):
    import visualize_multimnist_capsnet as viz
    flags = [*small_flags(runs.MULTI), "--only", "example_pairs", "--quiet", "--outdir", "viz"]
    assert call(mc, viz.main, *flags) == (0, "", "") and len(list(tmp_path.glob("runs/*/*/weights.npz"))) == 1
    assert call(mc, viz.main, *flags, "--no-save", "--lr", "0.5") == (0, "", "")
    assert len(list(tmp_path.glob("runs/*/*"))) == 1


# ---------------------------------------------------------------- outputs

def test_json_to_standard_output_is_nothing_but_json(call):
    code, out, err = call(mc, mc.main, *small_flags(runs.MULTI), "--out-json", "-")
    assert (code, err) == (0, "") and json.loads(out)["experiment"] == runs.MULTI


@pytest.mark.parametrize("kind, words", [
    ("read-only", "it is read-only"), pytest.param("long", "name too long", marks=POSIX),
    pytest.param("sticky", "it belongs to another user", marks=POSIX)])
def test_an_output_that_cannot_be_replaced_is_found_before_training(call, tmp_path, monkeypatch, kind, words):
    """The remedy is in the line; nothing is trained, nothing is changed"""
    path = tmp_path / ("x" * 250 + ".json" if kind == "long" else "r.json")
    if kind != "long":
        path.write_text("kept", "utf-8")
    if kind == "read-only":
        path.chmod(0o444)
    if kind == "sticky":
        folder = tmp_path / "sticky"
        folder.mkdir()
        folder.chmod(0o1777)
        path = path.rename(folder / "r.json")
        monkeypatch.setattr(os, "geteuid", lambda: 12345, raising=False)
    code, out, err = call(mc, mc.main, *small_flags(runs.MULTI), "--out-json", path)
    assert code == 2 and words in err.lower() and err.count("\n") == 1 and "epoch" not in out
    assert kind == "long" or path.read_text("utf-8") == "kept"
    assert kind != "read-only" or stat.S_IMODE(path.stat().st_mode) == 0o444


def test_a_full_disk_is_found_before_training(monkeypatch, tmp_path):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def write(self, _):
            raise OSError(28, "No space left on device")
    monkeypatch.setattr(mc, "open", lambda *_: Full(), raising=False)
    with pytest.raises(mc.InputError, match="r.npz: No space left on device. Choose a writable folder with free space"):
        mc.check_config(dataclasses.replace(mc.Config(), checkpoint=str(tmp_path / "r.npz")))
