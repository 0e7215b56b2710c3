"""A trained network in a file: what it holds, and that what was changed, cut off or made by others is refused by
name."""
import dataclasses
import json

import affnist_capsnet as ac
import multimnist_capsnet as mc
import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from conftest import TINY, assert_same, toy_digits
from reference_smallnorb import tiny


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
    assert (found.config.preset, found.source, mc.n_params(found.weights)) == ("residual", "mnist", 3059072)
    assert mc.WEIGHTS.stat().st_size < 6.5e6


@pytest.mark.parametrize("name, model, size", [("capsules", "dynamic-shared", 118_272), ("gap", "gap", 118_530)])
def test_the_second_experiments_networks_that_come_along_are_whole(name, model, size):
    found = sn.load_network(sn.WEIGHTS.with_name(f"smallnorb_{name}.npz"))
    assert (found.config.model, found.source, sn.n_params(found.weights)) == (model, "toys", size)
    assert (found.config.split, found.config.trunk_channels, found.config.toy_seed) == ("azimuth", 32, 0)
    assert sn.WEIGHTS.name == "smallnorb_capsules.npz"


@pytest.mark.parametrize("model, size", [("shared", 1_153_872), ("gap", 159_990)])
def test_the_third_experiments_networks_that_come_along_are_whole(model, size):
    path = ac.WEIGHTS.with_name(f"affnist_{model}.npz")
    found = ac.load_network(path)
    assert (found.config.model, found.config.task, found.source) == (model, "affnist", "mnist")
    assert (ac.n_params(found.weights), found.config.n_train) == (size, 24000) and path.stat().st_size < 2.8e6
    assert ac.WEIGHTS.name == "affnist_shared.npz"


def test_files_from_before_there_was_muon_are_of_adam():
    settings = {name: value for name, value in mc.settings_of(mc.Config()).items() if name != "muon"}
    assert mc.config_of(settings, "old.npz").muon == 0 != mc.Config().muon


# ---------------------------------------------------------------- running statistics of a normalisation

@pytest.fixture(scope="module")
def normalised():
    """-> config, weights, history of a toy run of the second experiment, whose networks are normalised"""
    config = tiny("self-routing", n_epochs=1)
    return config, *sn.train(config)


@pytest.fixture
def normalised_file(normalised, tmp_path):
    path = tmp_path / "net.npz"
    sn.save_weights(path, *normalised)
    return path


def test_running_statistics_are_kept_as_they_are_beside_weights_in_float16(normalised, normalised_file):
    config, weights, history = normalised
    arrays, found = arrays_of(normalised_file), sn.load_network(normalised_file)
    state = {name: a for name, a in weights.items() if name.endswith(("_mean", "_var"))}
    assert len(state) == 10 and {name[6:] for name in arrays if name.startswith("state/")} == set(state)
    for name, a in arrays.items():
        if "/" in name:
            assert a.dtype == (np.float32 if name.startswith("state/") else np.float16), name
    assert_same(found.state, state)
    assert_same(found.weights, {name: a if name in state else a.astype(np.float16).astype(np.float32)
                                for name, a in weights.items()})
    assert sn.n_params(weights) == sn.n_params(found.params) == sum(a.size for a in weights.values()) - sum(
        a.size for a in state.values())


def test_a_network_from_a_file_of_weights_names_the_test_images_as_before(normalised, normalised_file):
    """but for what float16 costs"""
    config, weights, _ = normalised
    images = sn.load_data(config)["held_out"]["images"]
    before, after = (sn.forward(w, images, config)[0]["scores"]
                     for w in (weights, sn.load_network(normalised_file).weights))
    np.testing.assert_allclose(after, before, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("what", ["all", "one", "another name", "another shape", "no number"])
def test_weights_without_their_running_statistics_are_refused(normalised_file, what):
    """by whoever knows about the digest, too"""
    def change(arrays):
        names = sorted(name for name in arrays if name.startswith("state/"))
        first = arrays[names[0]]
        left = {name: a for name, a in arrays.items() if name not in (names if what == "all" else names[:1])}
        return left | {"another name": {"state/other_mean": first}, "another shape": {names[0]: first[:-1]},
                       "no number": {names[0]: first * np.float32(np.nan)}}.get(what, {})
    edited(with_another_digest(change))(normalised_file)
    with pytest.raises(sn.InputError, match="net.npz: (not a whole file|holds weights that are no finite numbers)"):
        sn.load_network(normalised_file)


def test_running_statistics_that_were_changed_are_refused(normalised_file):
    edited(lambda a: a | {"state/conv1_norm_mean": a["state/conv1_norm_mean"] + np.float32(1e-6)})(normalised_file)
    with pytest.raises(sn.InputError, match="its digest"):
        sn.load_network(normalised_file)
