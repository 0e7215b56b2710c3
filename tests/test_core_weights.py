"""Files: trained networks come back whole, or are refused by name; results; what cannot be written."""
import contextlib
import dataclasses
import gc
import json
import os
from types import SimpleNamespace

import multimnist_capsnet as mc
from lab import figures

import numpy as np
import pytest
from conftest import EXPERIMENTS, POSIX, ROOT, TINY, assert_same, golden, runs, toy, toy_digits


@pytest.fixture(scope="module", params=EXPERIMENTS)
def trained(request):
    """-> module, and the Config, weights, history and data of a toy run"""
    config, data = toy(request.param)
    return EXPERIMENTS[request.param], config, *EXPERIMENTS[request.param].train(config, data=data), data


@pytest.fixture
def file(tmp_path, tiny):
    mc.save_weights(tmp_path / "net.npz", *tiny)
    return tmp_path / "net.npz"


@pytest.fixture(scope="module")
def tiny():
    config = dataclasses.replace(TINY, n_train=40, n_epochs=1, norm="batch")
    return config, *mc.train(config, data=toy_digits())


def arrays_of(path):
    with np.load(path, allow_pickle=True) as file:
        return dict(file)


# -------------------------------------------------------------- there and back

def test_weights_come_back_as_float16_with_statistics_settings_and_history(trained, tmp_path):
    module, config, weights, history, data = trained
    path, again = tmp_path / "net.npz", tmp_path / "again.npz"
    module.save_weights(path, config, weights, history)
    found = module.load_network(path)
    kept = {name: a if name.endswith(module.STATE_SUFFIXES) else a.astype(np.float16).astype(np.float32)
            for name, a in weights.items()}
    assert_same(found.weights, kept)
    assert found.weights == found.params | found.state and found.adam_m == found.adam_v == {}
    assert (found.step, found.history, found.source) == (history["steps"], history, data["source"])
    assert module.run_identity(found.config, found.source) == module.run_identity(config, data["source"])
    assert all(a.dtype == (np.float32 if key.startswith("state/") else np.float16)
               for key, a in arrays_of(path).items() if "/" in key)
    n_state = sum(a.size for a in found.state.values())
    assert module.n_params(weights) == module.n_params(found.params) == sum(a.size for a in weights.values()) - n_state
    module.save_weights(again, found.config, found.weights, found.history)
    assert again.read_bytes() == path.read_bytes()                                      # same network, same file


def test_a_checkpoint_holds_the_whole_run(trained, tmp_path):
    module, config, weights, history, data = trained
    path = tmp_path / "run.npz"
    module.train(dataclasses.replace(config, checkpoint=str(path)), data=data)
    found = module.load_network(path)
    assert_same(found.weights, weights)
    assert found.adam_m.keys() == found.adam_v.keys() == found.params.keys()
    assert all(v.min() >= 0 for v in found.adam_v.values()) and any(m.any() for m in found.adam_m.values())
    assert (found.step, found.source) == (2, data["source"])
    (tmp_path / "another").touch()
    assert path.stat().st_mode == (tmp_path / "another").stat().st_mode


SHIPPED = sorted((ROOT / "weights").glob("*.npz"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_networks_that_come_along_still_name_what_they_did(path):
    """Digits, if drawn and not written, a little worse than those they trained on"""
    experiment, = (name for name in EXPERIMENTS if name.split("_")[0] == path.stem.split("_")[0])
    module = EXPERIMENTS[experiment]
    found = module.load_network(path)
    config = dataclasses.replace(found.config, n_test=100, threads=1)
    with module.Runner(1) as runner:
        tests = module.evaluate_test_sets(found.weights, golden.tiny_data(experiment, config), config, runner)
    tests = tests.get("familiar", tests)
    accuracy = tests["hits"] / tests["n"] if isinstance(tests, dict) else tests
    assert accuracy > found.history["epochs"][-1]["train_accuracy"] - 0.1
    assert path.stat().st_size < 6.5e6 and path in {ROOT / name for name in runs.WEIGHTS}
    assert {*module.PRETRAINED} <= {*SHIPPED}                                  # what --load without FILE finds


# -------------------------------------------------------------- what was changed, cut off, or made by others

def edited(change, digest=False):
    """-> a function that rewrites a file with its arrays changed; digest: by one who knows about the digest"""
    def rewrite(path):
        arrays = change(arrays_of(path))
        if digest:
            arrays["digest"] = np.array(mc.digest_of({name: a for name, a in arrays.items() if name != "digest"}))
        np.savez(path, **arrays)
    return rewrite


def with_meta(config=None, **changes):
    def change(arrays):
        meta = json.loads(str(arrays["meta"]))
        meta |= changes | {"config": meta["config"] | (config or {})}
        return arrays | {"meta": np.array(json.dumps(meta))}
    return change


def without(*names):
    return lambda arrays: {name: a for name, a in arrays.items() if name not in names}


def flip_directory(path):
    """One bit of the zip's directory: the first entry's compression method"""
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 10] ^= 4
    path.write_bytes(raw)


def cut(keep):
    return lambda path: path.write_bytes(path.read_bytes()[:keep])


DIGEST, NOT_WHOLE, OTHERS = "its digest does not match its content", "not a complete file of a", "its arrays do not fit"
SPOILS = {"a weight": (edited(lambda a: a | {"params/W": a["params/W"] + np.float16(0.01)}), DIGEST),
          "a sign of zero": (edited(lambda a: a | {"params/dec1_b": -0 * a["params/dec1_b"] - np.float16(0)}), DIGEST),
          "a dtype": (edited(lambda a: a | {"params/W": a["params/W"].astype(np.float32)}), DIGEST),
          "a shape": (edited(lambda a: a | {"params/dec1_b": a["params/dec1_b"][None]}), DIGEST),
          "a statistic": (edited(lambda a: a | {"state/conv1_norm_var": a["state/conv1_norm_var"] * 1.01}), DIGEST),
          "a setting": (edited(with_meta({"seed": 7})), DIGEST),
          "an array more": (edited(lambda a: a | {"x": np.ones(3)}), DIGEST),
          "an array less": (edited(without("params/W")), DIGEST),
          "without digest": (edited(without("digest")), NOT_WHOLE),
          "without meta": (edited(without("meta"), True), NOT_WHOLE),
          "another experiment": (edited(with_meta({"azimuths": 6}), True), "was trained with --azimuths, which is no "
                                                                           "setting"),
          "a file of another script": (edited(with_meta(experiment="affnist_capsnet"), True),
                                       "holds a network of affnist_capsnet.py. Give a network of "
                                       "multimnist_capsnet.py"),
          "another network": (edited(with_meta({"conv1_channels": 4}), True), OTHERS),
          "a weight less": (edited(without("params/W"), True), OTHERS),
          "a statistic less": (edited(without("state/conv1_norm_var"), True), OTHERS),
          "half an optimizer": (edited(lambda a: a | {"adam_m/W": a["params/W"]}, True), OTHERS),
          "another group": (edited(lambda a: a | {"x/W": a["params/W"]}, True), NOT_WHOLE),
          "a setting of another type": (edited(with_meta({"conv1_channels": "x"}), True), NOT_WHOLE),
          "pickled": (edited(lambda a: a | {"params/W": np.array({"a": 1}, object)}), NOT_WHOLE),
          "cut off": (cut(-500), NOT_WHOLE), "empty": (cut(0), NOT_WHOLE),
          "a byte": (lambda path: path.write_bytes(path.read_bytes()[:3000] + b"?" + path.read_bytes()[3001:]), ""),
          "directory": (flip_directory, NOT_WHOLE),
          "a folder": (lambda path: path.unlink() or path.mkdir(), ". Give a file"),
          "missing": (lambda path: path.unlink(), "No such file or directory. Give a file")}


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("spoil", SPOILS)
def test_what_was_changed_or_is_none_is_refused_by_name(file, spoil):
    """and is not left open, since Windows neither replaces nor removes an open file"""
    change, fault = SPOILS[spoil]
    change(file)
    with pytest.raises(mc.InputError, match="net.npz") as error:
        mc.load_network(file)
    assert fault in str(error.value) and "\n" not in str(error.value)
    del error
    gc.collect()                                                    # closes what was left open, with a warning


def test_no_run_goes_on_from_weights_alone(file, tiny):
    before = file.read_bytes()
    with pytest.raises(mc.InputError, match="net.npz: holds weights only"):
        mc.train(dataclasses.replace(tiny[0], checkpoint=str(file)), data=toy_digits())
    found = SimpleNamespace(config=tiny[0], source="mnist", adam_m={"W": 0})
    with pytest.raises(mc.InputError, match="belongs to another run .source mnist, now synthetic."):
        mc.check_same_run(tiny[0], "synthetic", found, "run.npz")
    assert file.read_bytes() == before


def test_what_float16_cannot_hold_is_refused_and_nothing_written(tiny, tmp_path):
    config, weights, history = tiny
    with pytest.raises(mc.InputError, match="W exceeds float16's maximum"):
        mc.save_weights(tmp_path / "x.npz", config, weights | {"W": weights["W"] + 1e5}, history)
    assert os.listdir(tmp_path) == ["home"]


# -------------------------------------------------------------- looking at a trained network

def look(file, **given):
    return mc.load_for_evaluation(file, SimpleNamespace(**given))


def test_a_trained_network_is_looked_at_with_its_own_settings(file, tiny):
    """What no training hangs on may be given, and what is free; what agrees is no fault"""
    found, config = look(file, seed=7, min_iou=0.5, n_test=9, threads=3, merge="add", lr=tiny[0].lr)
    assert config == dataclasses.replace(found.config, seed=7, min_iou=0.5, n_test=9, threads=3, merge="add")
    assert (found.config.seed, found.config.digits, found.config.conv1_channels) == (1, "synthetic", 3)
    assert found.file == {"file": "net.npz", "trained_seed": 1,
                          "sha256": mc.hashlib.sha256(file.read_bytes()).hexdigest()}


@pytest.mark.parametrize("given, fault", [
    (dict(lr=0.1), "--lr 0.1: .*net.npz was trained with 0.002. Leave the flag out, or train a new network without "
                   "--load"),
    (dict(checkpoint="x.npz"), "--checkpoint is for training, but .*net.npz is evaluated only"),
    (dict(cnn_head="gap"), "--cnn-head gap applies to --model cnn, cnn-vectors, not to")])
def test_what_would_have_changed_its_training_is_refused(file, given, fault):
    with pytest.raises(mc.InputError, match=fault):
        look(file, **given)
    for name in ("out_json", "out_weights", "predictions"):
        with pytest.raises(mc.InputError, match=f"{mc.flag_name(name)} .*: this is the network's own file"):
            look(file, **{name: str(file)})


# -------------------------------------------------------------- writing

def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "result"
    mc.write_atomically(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"new")
        raise OSError(28, "No space left on device")
    with pytest.raises(mc.InputError, match="cannot write .*result: No space left"):
        mc.write_atomically(path, fail)
    assert path.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["home", "result"]


@POSIX
def test_a_write_follows_a_link(tmp_path):
    path = tmp_path / "result"
    path.write_bytes(b"old")
    (tmp_path / "link").symlink_to(path)
    mc.write_atomically(tmp_path / "link", lambda file: file.write(b"new"))
    assert (tmp_path / "link").is_symlink() and path.read_bytes() == b"new"


@pytest.mark.parametrize("n_times", [3, 99])
def test_on_windows_a_file_that_another_program_reads_is_replaced_once_that_is_done(tmp_path, monkeypatch, n_times):
    """or, after two seconds, left as it is"""
    path, calls = tmp_path / "result", []
    path.write_bytes(b"old")

    def replace(source, target):
        calls.append(source)
        if len(calls) <= n_times:
            raise PermissionError(13, "Permission denied")
        os.replace(source, target)
    monkeypatch.setattr(mc, "os", SimpleNamespace(**vars(os) | {"name": "nt", "replace": replace}))
    monkeypatch.setattr(mc.time, "sleep", lambda seconds: None)
    with pytest.raises(mc.InputError, match="result: Permission denied") if n_times > 3 else contextlib.nullcontext():
        mc.write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == (b"old" if n_times > 3 else b"new") and len(calls) == min(n_times, 40) + 1
    assert sorted(os.listdir(tmp_path)) == ["home", "result"]


def test_what_cannot_be_written_is_said_at_once(tmp_path):
    for given, fault in ((dict(checkpoint=str(tmp_path)), "it is a folder or a device"),
                         (dict(out_json=f"{tmp_path}/no/x.json"), "x.json: No such file or directory. Choose"),
                         (dict(out_json=f"{tmp_path}/x", checkpoint=f"{tmp_path}/home/../x"), "two outputs have this "
                                                                                              "name")):
        with pytest.raises(mc.InputError, match=fault):
            mc.check_options(mc.Config(**given))
    mc.check_writable("", f"{tmp_path}/x.npz", "", f"{tmp_path}/y.npz")
    assert os.listdir(tmp_path) == ["home"]
    figures.make_outdir(tmp_path / "a" / "b", ["one"])
    (tmp_path / "a" / "b" / "one.png").mkdir()
    with pytest.raises(figures.InputError, match="one.png: it is a folder"):
        figures.make_outdir(tmp_path / "a" / "b", ["two", "one"])
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(figures.InputError, match="--outdir .*file.x: cannot be created"):
        figures.make_outdir(tmp_path / "file" / "x", ["one"])


def test_a_result_keeps_settings_versions_and_epochs(trained, tmp_path):
    module, config, weights, history, _ = trained
    epochs = [{"epoch": k, "loss": k / 3} for k in range(1, 31)]
    result = module.make_result(config, weights, history | {"epochs": epochs, "seconds": 3.0, "steps": 60}, {"hits": 5})
    kept = {f.name for f in module.options(config)} - set(result["config"])
    assert kept == {f.name for f in module.options(config) if f.metadata.get("runtime") and f.type in (str, bool)
                    and "choices" not in f.metadata}                                    # paths, and what is said
    assert (result["hits"], result["ms_per_step"], result["experiment"]) == (5, 50, module.__name__)
    assert result["history"] == {"epoch": list(range(1, 31)), "loss": [k / 3 for k in range(1, 31)]}
    assert result["n_params"] == module.n_params(weights) and result["machine"]["cores"] == module.n_cores()
    module.write_json(tmp_path / "x.json", {"config": {"lr": 0.123456789}, "mean": 0.123456789, "half": float("nan"),
                                            "more": [float("inf"), {"n": 3}]})
    assert json.loads((tmp_path / "x.json").read_text("utf-8")) == {
        "config": {"lr": 0.123456789}, "mean": 0.12346, "half": None, "more": [None, {"n": 3}]}
    assert module.pack_bits(np.array([1, 0, 0, 0, 0, 0, 0, 1, 1], bool)) == "gYA="


@pytest.mark.parametrize("error, code, said", [
    (mc.InputError("two\nlines"), 2, "error: two lines"), (KeyboardInterrupt(), 130, "\nstopped. If --checkpoint"),
    (MemoryError(), 2, "error: out of memory. Lower --batch-size")])
def test_what_the_user_can_mend_is_one_line(error, code, said, capsys):
    with pytest.raises(SystemExit) as stop:
        mc.run_cli(lambda: (_ for _ in ()).throw(error))
    text = capsys.readouterr().err
    assert stop.value.code == code and text.startswith(said) and text.strip().count("\n") == 0


def test_a_reader_that_has_gone_is_no_traceback(run_script):
    done = run_script("-c", "import multimnist_capsnet as mc\ndef main():\n    raise BrokenPipeError\nmc.run_cli(main)")
    assert (done.returncode, done.stderr) == (1, "")
