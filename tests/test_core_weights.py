"""A trained network in a file: what it holds, and that what was changed, cut off or made by others is refused by
name."""
import dataclasses
import json

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import TINY, assert_same, toy_digits


@pytest.fixture(scope="module")
def trained():
    """-> config, weights, history of a toy run"""
    config = dataclasses.replace(TINY, n_train=40, n_epochs=1)
    return config, *mc.train(config, data=toy_digits())


@pytest.fixture
def file(trained, tmp_path):
    path = tmp_path / "net.npz"
    mc.save_weights(path, *trained)
    return path


def arrays_of(path):
    with np.load(path, allow_pickle=True) as file:
        return dict(file)


def test_weights_come_back_as_float16_made_of_them_with_settings_and_history(trained, file):
    config, weights, history = trained
    found = mc.load_network(file)
    assert_same(found.weights, {name: a.astype(np.float16).astype(np.float32) for name, a in weights.items()})
    assert found.adam_m == found.adam_v == found.average == {} and found.step == history["steps"] == 1
    assert found.history == history and found.source == "synthetic"
    assert mc.run_identity(found.config, found.source) == mc.run_identity(config, "synthetic")
    assert all(a.dtype == np.float16 for name, a in arrays_of(file).items() if "/" in name)


def test_the_same_network_makes_the_same_file(trained, file, tmp_path):
    mc.save_weights(tmp_path / "again.npz", *trained)
    found = mc.load_network(file)
    mc.save_weights(tmp_path / "once more.npz", found.config, found.weights, found.history)
    assert file.read_bytes() == (tmp_path / "again.npz").read_bytes() == (tmp_path / "once more.npz").read_bytes()


def test_a_checkpoints_network_is_its_running_mean_where_it_has_one(tmp_path):
    path = str(tmp_path / "run.npz")
    weights, _ = mc.train(dataclasses.replace(TINY, average=0.9, checkpoint=path), data=toy_digits())
    found = mc.load_network(path)
    assert_same(found.weights, weights)
    assert not np.array_equal(found.params["W"], weights["W"])


def test_no_run_goes_on_from_weights_alone(file):
    before = file.read_bytes()
    with pytest.raises(mc.InputError, match="net.npz: holds weights alone"):
        mc.train(dataclasses.replace(TINY, checkpoint=str(file), resume=True), data=toy_digits())
    assert file.read_bytes() == before


def test_what_float16_cannot_hold_is_refused_and_nothing_written(trained, tmp_path):
    config, weights, history = trained
    with pytest.raises(mc.InputError, match="params/conv1_b holds more than float16 can"):
        mc.save_weights(tmp_path / "x.npz", config, weights | {"conv1_b": weights["conv1_b"] + 1e5}, history)
    assert not (tmp_path / "x.npz").exists()


def edited(change):
    """-> a function that rewrites a file with its arrays changed"""
    return lambda path: np.savez(path, **change(arrays_of(path)))


def with_meta(arrays, config=None, history=None):
    """Arrays whose meta has other settings, or another history"""
    meta = json.loads(str(arrays["meta"]))
    meta |= {"config": meta["config"] | (config or {}), "history": meta["history"] if history is None else history}
    return arrays | {"meta": np.array(json.dumps(meta))}


def of_another_experiment(arrays):
    meta = json.loads(str(arrays.pop("meta")))
    arrays |= {"meta": np.array(json.dumps(meta | {"config": {"seed": 0, "azimuths": 6}}))}
    arrays.pop("digest")
    return arrays | {"digest": np.array(mc.digest_of(arrays))}


def with_another_digest(change):
    """Changed by one who knows about the digest"""
    def both(arrays):
        arrays = change(arrays)
        arrays.pop("digest")
        return arrays | {"digest": np.array(mc.digest_of(arrays))}
    return both


def with_new_meta(**changes):
    return edited(with_another_digest(lambda arrays: with_meta(arrays, **changes)))


DIGEST, NOT_WHOLE = "its digest", "not a whole file of a trained network"
SPOILS = {"a weight": (edited(lambda a: a | {"params/W": a["params/W"] + np.float16(0.01)}), DIGEST),
          "a sign of zero": (edited(lambda a: a | {"params/dec1_b": -0 * a["params/dec1_b"] - np.float16(0)}), DIGEST),
          "a dtype": (edited(lambda a: a | {"params/W": a["params/W"].astype(np.float32)}), DIGEST),
          "a setting": (edited(lambda a: with_meta(a, config={"seed": 7})), DIGEST),
          "an array more": (edited(lambda a: a | {"x": np.ones(3)}), DIGEST),
          "an array less": (edited(lambda a: {k: v for k, v in a.items() if k != "params/W"}), DIGEST),
          "without digest": (edited(lambda a: {k: v for k, v in a.items() if k != "digest"}), NOT_WHOLE),
          "another experiment": (edited(of_another_experiment), "of another experiment"),
          "another shape": (edited(with_another_digest(lambda a: a | {"params/W": a["params/W"][:1]})), NOT_WHOLE),
          "no number": (edited(with_another_digest(lambda a: a | {"params/W": a["params/W"] * np.float16(np.nan)})),
                        "no finite numbers"),
          "text for weights": (edited(with_another_digest(lambda a: a | {"params/W": a["params/W"].astype("U8")})), ""),
          "a setting of another type": (with_new_meta(config={"lr": "x"}), NOT_WHOLE),
          "no history": (with_new_meta(history={}), NOT_WHOLE),
          "no epochs": (with_new_meta(history={"epochs": None}), NOT_WHOLE),
          "pickled": (edited(lambda a: a | {"params/W": np.array({"a": 1}, object)}), NOT_WHOLE),
          "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-500]), NOT_WHOLE),
          "half": (lambda path: path.write_bytes(path.read_bytes()[:2000]), NOT_WHOLE),
          "empty": (lambda path: path.write_bytes(b""), NOT_WHOLE),
          "a byte": (lambda path: path.write_bytes(path.read_bytes()[:3000] + b"?" + path.read_bytes()[3001:]), ""),
          "a picture": (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(500)), NOT_WHOLE),
          "a folder": (lambda path: path.unlink() or path.mkdir(), NOT_WHOLE),
          "missing": (lambda path: path.unlink(), "no such file")}


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_was_changed_or_is_none_is_refused_by_name(file, spoil):
    change, fault = SPOILS[spoil]
    change(file)
    with pytest.raises(mc.InputError, match="net.npz") as error:
        mc.load_network(file)
    assert fault in str(error.value) and "\n" not in str(error.value)


def test_the_network_that_comes_along_is_whole():
    found = mc.load_network(mc.WEIGHTS)
    assert (found.config.preset, found.source, mc.n_params(found.weights)) == ("deep", "mnist", 1320688)
    assert mc.WEIGHTS.stat().st_size < 2.8e6
