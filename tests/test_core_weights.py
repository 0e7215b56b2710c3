"""Files of weights: trained networks come back whole, or are refused by name."""
import dataclasses
import json

import lab

import numpy as np
import pytest
from conftest import EXPERIMENTS, ROOT, assert_same, golden, runs, toy, toy_run

SHIPPED = sorted((ROOT / "weights").glob("*.npz"))
GROUPS = "params", "running", "adam_m", "adam_v"


@pytest.fixture(params=EXPERIMENTS)
def file(request, tmp_path):
    """The weights file of a small network of each experiment, not trained"""
    module, (config, _) = EXPERIMENTS[request.param], toy(request.param)
    state = module.initial_state(config)
    state["history"]["source"] = "synthetic"
    module.save(tmp_path / "net.npz", config, module.without_moments(state))
    return tmp_path / "net.npz"


def arrays_of(path):
    with np.load(path, allow_pickle=True) as file:
        return dict(file)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_state_comes_back_to_the_last_bit(experiment, tmp_path):
    """All of it, or what evaluation needs; the same file if it is saved again"""
    module, (config, _), state = EXPERIMENTS[experiment], toy(experiment), toy_run(experiment)
    path, again = tmp_path / "run.npz", tmp_path / "again.npz"
    module.save(path, config, state)
    theirs, found = module.load(path)
    for group in GROUPS:
        assert_same(found[group], state[group])
    assert (found["step"], found["history"]) == (2, state["history"])
    same = [f.name for f in module.SETTINGS if not f.metadata.get("runtime")]
    assert [getattr(theirs, name) for name in same] == [getattr(config, name) for name in same]
    module.check_same(path, theirs, vars(config), ("runtime",))
    module.save(again, theirs, found)
    assert arrays_of(again).keys() == arrays_of(path).keys() and lab.experiment_of(path) == experiment
    module.save(path, config, module.without_moments(state))
    found = module.load(path)[1]
    assert_same(module.weights_of(found), module.weights_of(state))
    assert found["adam_m"] == found["adam_v"] == {}
    with pytest.raises(module.InputError, match="no moments of the optimizer.* Save the whole state"):
        module.train(config, toy(experiment)[1], found)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_pretrained_networks_are_as_accurate_as_they_were(path):
    """On digits that are drawn, not written, a little less than on those they were trained on"""
    experiment, = (name for name in EXPERIMENTS if name.split("_")[0] == path.stem.split("_")[0])
    module = EXPERIMENTS[experiment]
    config, state = module.load(path)
    config = dataclasses.replace(config, n_test=100, threads=1)
    assert {a.dtype for a in state["params"].values()} == {np.dtype(np.float32)}        # float16 in the file
    with module.worker_threads(config) as workers:
        test = module.evaluate_test(module.weights_of(state), golden.tiny_data(experiment, config), config, workers)
    test = test.get("familiar", test)
    accuracy = test["hits"] / test["n"] if isinstance(test, dict) else test
    assert accuracy > state["history"]["epochs"][-1]["train_accuracy"] - 0.1
    assert path.stat().st_size < 6.5e6 and path in {ROOT / name for name in runs.WEIGHTS}
    assert {*module.PRETRAINED} <= {*SHIPPED}                                           # what --load without FILE finds


def edited(change):
    """Return a function that rewrites a file with its arrays changed"""
    return lambda path: np.savez(path, **change(arrays_of(path)))


def with_meta(config=None, **changes):
    def change(arrays):
        meta = json.loads(str(arrays["meta"]))
        meta |= changes | {"config": meta["config"] | (config or {})}
        return arrays | {"meta": np.array(json.dumps(meta))}
    return change


def without(name):
    return lambda arrays: {key: a for key, a in arrays.items() if key != name}


def flip_directory(path):
    """One bit of the zip's directory: the first entry's compression method"""
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 10] ^= 4
    path.write_bytes(raw)


def of_list_config(arrays):
    meta = json.loads(str(arrays["meta"]))
    return arrays | {"meta": np.array(json.dumps(meta | {"config": [1]}))}


def write_one_array(path):
    """As np.save writes it, under a name that ends in .npz"""
    with open(path, "wb") as file:
        np.save(file, np.ones(3))


def first_of(arrays):
    """Return the name of the first parameter among the arrays of a file"""
    return next(name for name in arrays if name.startswith("params/"))


def of_another_network(arrays):
    """The settings are those of a network of another size"""
    experiment = json.loads(str(arrays["meta"]))["experiment"]
    larger = {"preset": "paper"} if experiment == runs.NORB else {"conv1_channels": 4}
    return with_meta(larger)(arrays)


DAMAGED = "damaged, or not a network of"
SPOILS = {                         # beside those of test_experiments.py: cut off, of another experiment, missing, ...
    "a shape": (edited(lambda a: a | {first_of(a): a[first_of(a)][None]}), DAMAGED),
    "an array less": (edited(lambda a: without(first_of(a))(a)), DAMAGED),
    "another group": (edited(lambda a: a | {"x/W": np.zeros(3)}), DAMAGED),
    "without meta": (edited(without("meta")), DAMAGED),
    "without history": (edited(with_meta(history={})), DAMAGED),
    "another network": (edited(of_another_network), DAMAGED),
    "a setting of a later version": (edited(with_meta({"smoothing": 0.1})), "has the setting smoothing"),
    "a setting of another type": (edited(with_meta({"seed": "x"})), "--seed x: must be a whole number"),
    "pickled": (edited(lambda a: a | {first_of(a): np.array({"a": 1}, object)}), DAMAGED),
    "history is a list": (edited(with_meta(history=[])), DAMAGED),
    "config is a list": (edited(of_list_config), DAMAGED),
    "one array": (write_one_array, DAMAGED),
    "empty": (lambda path: path.write_bytes(b""), DAMAGED), "directory": (flip_directory, DAMAGED)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")    # NumPy leaves a cut file open
@pytest.mark.parametrize("spoil", SPOILS)
def test_what_is_damaged_or_another_network_is_refused_by_name(file, request, spoil):
    module = EXPERIMENTS[request.node.callspec.params["file"]]
    change, fault = SPOILS[spoil]
    change(file)
    with pytest.raises(module.InputError, match="net.npz") as error:
        module.load(file)
    assert fault in str(error.value) and "\n" not in str(error.value)


def test_files_of_earlier_versions_load(file, request):
    """They had arrays beside the groups, and the data's source among the settings"""
    module = EXPERIMENTS[request.node.callspec.params["file"]]
    expected, _ = module.load(file)
    arrays = arrays_of(file) | {"history": np.zeros(3)}
    np.savez(file, **with_meta({"source": "synthetic"})(arrays))
    config, state = module.load(file)
    assert config == expected and module.fits(state["params"], config)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_state_is_not_saved_with_the_settings_of_another(experiment, tmp_path):
    module, (config, _) = EXPERIMENTS[experiment], toy(experiment)
    other, _ = toy(experiment, model="cnn-gap" if experiment != runs.MULTI else "cnn")
    with pytest.raises(module.InputError, match="this Config is not the one of this state"):
        module.save(tmp_path / "net.npz", other, module.initial_state(config))
    assert not (tmp_path / "net.npz").exists()


def test_of_a_folder_of_several_runs_one_is_asked_for(file, request, tmp_path):
    module = EXPERIMENTS[request.node.callspec.params["file"]]
    for name in "b", "a":
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "weights.npz").write_bytes(file.read_bytes())
    folder = tmp_path / "runs"
    with pytest.raises(module.InputError) as error:
        module.load(folder)
    assert str(error.value) == f"{folder}: holds several runs. Give one of them: {folder / 'a'}, {folder / 'b'}"
    module.load(folder / "a")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_mistake_in_the_code_is_not_called_a_damaged_file(experiment, tmp_path, monkeypatch):
    module, (config, _) = EXPERIMENTS[experiment], toy(experiment)
    module.save(tmp_path / "net.npz", config, module.initial_state(config))

    def mistaken(config):
        raise TypeError("a mistake")
    monkeypatch.setattr(module, "param_shapes", mistaken)
    with pytest.raises(TypeError, match="a mistake"):
        module.load(tmp_path / "net.npz")


def test_files_with_flipped_bits_are_refused_in_one_way(file, request):
    """Or load, where the bit does not matter: whatever zipfile, zlib and NumPy raise"""
    module = EXPERIMENTS[request.node.callspec.params["file"]]
    raw, rng = file.read_bytes(), np.random.default_rng(0)
    ends = np.concatenate([np.arange(400), np.arange(len(raw) - 400, len(raw))])
    for at in rng.choice(ends, 100, replace=False):
        flipped = bytearray(raw)
        flipped[at] ^= 1 << rng.integers(8)
        file.write_bytes(flipped)
        try:
            module.load(file)
        except module.InputError as error:
            assert DAMAGED in str(error)
