"""The settings of every experiment, by rules over its Config: each has a flag, bounds and an effect, or is gone."""
import contextlib
import functools
import math
import re

import numpy as np
import pytest
import runs
from conftest import EXPERIMENTS, NETWORKS, assert_same, configs, golden, toy, toy_run, without_seconds

OPTIONS = [(experiment, f) for experiment, module in EXPERIMENTS.items() for f in module.SETTINGS]
every_experiment = pytest.mark.parametrize("experiment", EXPERIMENTS)


def every_option(wanted=lambda f: True):
    chosen = [(experiment, f) for experiment, f in OPTIONS if wanted(f)]
    return pytest.mark.parametrize("experiment, f", chosen, ids=[f"{e.split('_')[0]}-{f.name}" for e, f in chosen])


def words_of(experiment, **given):
    """Return the flags that give these values"""
    flag = EXPERIMENTS[experiment].flag_of
    return [word for name, value in given.items() for word in (
        [flag(name if value else f"no_{name}")] if type(value) is bool else [flag(name), str(value)])]


def base_of(f):
    """Return what must be given for a setting to apply: the first model, task, data of those it is of"""
    return {name: values[0] for name, values in f.metadata.get("only", {}).items()}


def other_values(f, value):
    """Return legal values of a setting other than `value`"""
    if f.name.endswith("azimuths"):
        low, high = map(int, value.split(":"))
        return [f"{low + 20}:{high - 20}"]
    if "choices" in f.metadata or f.type is bool:
        return [other for other in f.metadata.get("choices", (True, False)) if other != value]
    if f.type is str:
        return ["x"]
    low, high = f.metadata["low"], f.metadata["high"]
    several = (value + 1, value - 1, 2 * value + 10, 1) if f.type is int else (value / 2, 1e-9, high / 2)
    return [other for other in several if other != value and low <= other <= high]


NEEDS = {                          # what else must be given for a setting to show
    "stop_at": dict(n_epochs=2),                                    # of one epoch the end is where it was
    "split": dict(data="toys")}                                     # shapes are no toys to be split by
NOT_HERE = {("data", "smallnorb")}                                  # values that ask for files that nobody may pass on


@functools.cache
def found(experiment, **given):
    """Return what a toy run leaves behind: weights, history, and what its tests find, as text"""
    (config, data), module = toy(experiment, **given), EXPERIMENTS[experiment]
    state = module.train(config, data)
    with module.worker_threads(config) as workers:
        tests = module.evaluate_test(module.weights_of(state), data, config, workers)
    digests = {name: (a.shape, hash(a.tobytes())) for name, a in module.weights_of(state).items()}
    return repr((digests, golden.summary(without_seconds(state["history"])["epochs"]), golden.summary(tests)))


def has_effect(experiment, f):
    """Return whether each choice of a setting changes what is found; of other settings one of several"""
    given = base_of(f) | NEEDS.get(f.name, {})
    if f.name == "preset":                                          # others may have one size in two presets
        given["model"] = "matrix-capsnet" if experiment == runs.NORB else "capsnet"
    usual = getattr(toy(experiment, **given)[0], f.name)
    values = [value for value in other_values(f, usual) if (f.name, value) not in NOT_HERE]
    changed = (found(experiment, **given | {f.name: value}) != found(experiment, **given) for value in values)
    return bool(values) and (all if "choices" in f.metadata else any)(changed)


@every_option(lambda f: not f.metadata.get("runtime") and f.name != "digits")         # which data are given
def test_every_setting_has_an_effect(experiment, f):
    assert has_effect(experiment, f)


@every_experiment
def test_runtime_settings_change_no_bit(experiment, capsys):
    """all at once, but for folders, whose files are not here"""
    given = {f.name: other_values(f, getattr(EXPERIMENTS[experiment].Config(), f.name))[0]
             for f in EXPERIMENTS[experiment].SETTINGS if f.metadata.get("runtime") and not f.name.endswith("_dir")}
    given |= {"quiet": False} | ({"digits": "auto"} if "digits" in given else {})
    state, expected = toy_run(experiment, **given), toy_run(experiment)
    assert_same(state["params"], expected["params"])
    assert_same(state["running"], expected["running"])
    assert given.keys() >= {"threads", "quiet"} and state["history"] == expected["history"]
    assert capsys.readouterr().out == ""                                # hooks print; see Progress


@every_option()
def test_each_flag_sets_its_own_field(experiment, f):
    base, module = base_of(f), EXPERIMENTS[experiment]
    for value in other_values(f, getattr(module.Config(**base), f.name)):
        config, *_ = configs(experiment, words_of(experiment, **base | {f.name: value}))    # of the first default model
        assert getattr(config, f.name) == value and config == module.Config(**base | {f.name: value})
    for alias in f.metadata.get("alias", "").split():
        config = configs(experiment, [*words_of(experiment, **base), alias, value])[0]
        assert getattr(config, f.name) == value


@every_experiment
def test_settings_have_one_value(experiment):
    """What is given, else the default, else the preset's; nothing is left open, and types are what they say"""
    module, config = EXPERIMENTS[experiment], configs(experiment, [])[0]
    assert config == module.Config()
    assert {*NEEDS, *(name for name, _ in NOT_HERE)} <= {f.name for _, f in OPTIONS}    # no exception without a setting
    for model in next(f for f in module.SETTINGS if f.name == "model").metadata["choices"]:
        of_model = module.Config(model=model)
        assert all(type(getattr(of_model, f.name)) is f.type for f in module.SETTINGS)
    given = {f.name: f.type(1) for f in module.SETTINGS if f.default is None and f.type in (int, float) and
             module.applies(f, config)}
    assert {name: getattr(module.Config(**given), name) for name in given} == given


DEFAULTS = [                       # experiment, what is given, what other settings are then; as the documents say
    (runs.MULTI, {}, dict(conv1_channels=16, norm="batch", lr=0.01, muon=0.02, warmup=200, recon_weight=0.01)),
    (runs.MULTI, dict(preset="residual"), dict(conv1_channels=16, lr=0.003, muon=0.006, recon_weight=0.005)),
    (runs.MULTI, dict(preset="classic"), dict(conv1_channels=32, norm="none", lr=0.002, muon=0, warmup=0,
                                              recon_weight=0.0005)),
    (runs.MULTI, dict(preset="paper"), dict(conv1_channels=256, norm="none", lr=0.002, muon=0, warmup=0)),
    (runs.MULTI, dict(norm="none"), dict(muon=0, lr=0.01, warmup=200)),
    (runs.AFF, {}, dict(train_shift="6", padding=4, conv1_channels=16, routing_iters=1, dropout=0, lr=0.01, muon=0.02,
                        loss="margin", recon_weight=0.0005, warmup=200, norm="batch")),
    (runs.AFF, dict(model="capsnet"), dict(padding=4, routing_iters=3)),
    (runs.AFF, dict(model="vector-gap"), dict(padding=8, routing_iters=1, loss="margin", recon_weight=0.0005)),
    (runs.AFF, dict(model="cnn"), dict(padding=8, conv1_channels=16, dropout=0, loss="cross-entropy", recon_weight=0)),
    (runs.AFF, dict(model="cnn", preset="paper"), dict(padding=0, conv1_channels=256, dropout=0.5, lr=0.001, muon=0,
                                                       warmup=0, norm="none")),
    (runs.AFF, dict(model="cnn", preset="small"), dict(padding=0, conv1_channels=16, dropout=0.5)),
    (runs.AFF, dict(model="cnn-dense", preset="paper"), dict(padding=0, conv1_channels=16, dropout=0.5)),
    (runs.AFF, dict(model="capsnet", preset="small"), dict(padding=0, conv1_channels=64, routing_iters=3, dropout=0)),
    (runs.AFF, dict(lr=0.003), dict(muon=0.006)), (runs.AFF, dict(lr=2.0), dict(muon=1)),
    (runs.AFF, dict(norm="none", lr=0.003), dict(muon=0)),
    (runs.AFF, dict(model="capsnet", preset="paper", norm="batch"), dict(muon=0.002, lr=0.001)),
    (runs.AFF, dict(task="mnist"), dict(train_shift="2", padding=0)),
    (runs.AFF, dict(task="mnist", model="cnn-gap"), dict(train_shift="2", padding=0)),
    (runs.AFF, dict(task="images", model="vector-gap"), dict(train_shift="0", padding=4)),
    (runs.AFF, dict(task="images", model="cnn", preset="paper"), dict(train_shift="0", padding=0)),
    (runs.NORB, {}, dict(n_epochs=10, lr=0.005, preset="wide", routing_iters=2, coordinates=True, dropout=0,
                         loss="cross-entropy", train_azimuths="300:400", test_azimuths="60:280")),
    (runs.NORB, dict(model="matrix-head"), dict(n_epochs=6, coordinates=True, routing_iters=2, preset="wide")),
    (runs.NORB, dict(model="capsnet"), dict(n_epochs=6, coordinates=False, routing_iters=3, loss="margin")),
    (runs.NORB, dict(model="capsnet-shared"), dict(n_epochs=6, coordinates=True, routing_iters=3, loss="margin")),
    (runs.NORB, dict(model="cnn-gap"), dict(n_epochs=6, coordinates=False, lr=0.005, loss="cross-entropy")),
    (runs.NORB, dict(model="cnn-bn"), dict(n_epochs=16, lr=0.002, preset="small", dropout=0)),
    (runs.NORB, dict(model="cnn-bn", preset="paper"), dict(n_epochs=16, dropout=0.5)),
    (runs.NORB, dict(data="shapes", model="cnn"), dict(n_epochs=10, lr=0.002, preset="wide", dropout=0,
                                                       train_azimuths="0:150", test_azimuths="200:330")),
    (runs.NORB, dict(split="instance"), dict(train_azimuths="0:340", test_azimuths="0:340"))]


@pytest.mark.parametrize("experiment, given, expected", DEFAULTS, ids=str)
def test_defaults_that_depend_on_other_settings(experiment, given, expected):
    config = EXPERIMENTS[experiment].Config(**given)
    assert {name: getattr(config, name) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("model", ["cnn", "cnn-vectors", "vector-dense"])
@pytest.mark.parametrize("preset", ["classic", "paper"])
def test_presets_of_two_convolutions_are_of_the_capsule_network(model, preset):
    module = EXPERIMENTS[runs.MULTI]
    with pytest.raises(module.InputError, match=f"--preset {preset} applies only to --model capsnet"):
        module.Config(model=model, preset=preset)


FRACTIONS = {"min_iou", "muon", "stop_at", "dropout"}


@every_option()
def test_every_bound_refuses_one_step_beyond_it(experiment, f):
    """and takes the bound itself. No number may be negative, and no fraction above 1"""
    module, bounds, flag = EXPERIMENTS[experiment], f.metadata, EXPERIMENTS[experiment].flag_of(f.name)
    assert f.type in (bool, str) or {"low", "high"} <= bounds.keys(), f"{f.name}: any number is accepted"
    if f.type in (int, float):
        assert bounds["low"] >= 0
        assert bounds["high"] <= 1 or f.name not in FRACTIONS
        for bound in bounds["low"], bounds["high"]:
            assert getattr(module.Config(**base_of(f) | {f.name: f.type(bound)}), f.name) == bound
        beyond = [bounds["low"] - 1, bounds["high"] + 1] if f.type is int else [
            np.nextafter(bounds["low"], -math.inf), np.nextafter(bounds["high"], math.inf), math.nan, math.inf]
        for value in map(f.type, beyond) if f.type is int else map(float, beyond):
            with pytest.raises(module.InputError, match=rf"^{flag} .*: must be from \S+ to \S+$"):
                module.Config(**base_of(f) | {f.name: value})
    elif "choices" in bounds:
        with pytest.raises(SystemExit):
            configs(experiment, [*words_of(experiment, **base_of(f)), flag, "no-such"])
        with pytest.raises(module.InputError, match=f"^{flag} no-such: must be one of .*{bounds['choices'][0]}"):
            module.Config(**base_of(f) | {f.name: "no-such"})


def restricted():
    """Yield (experiment, a setting, another, a value of it with which the first means nothing)"""
    for experiment, f in OPTIONS:
        others = {g.name: g for e, g in OPTIONS if e == experiment}
        for name, values in f.metadata.get("only", {}).items():
            assert set(values) <= set(others[name].metadata["choices"]), f"{f.name}: only={{{name}: {values}}}"
            for value in others[name].metadata["choices"]:
                if value not in values:
                    yield experiment, f, name, value


@pytest.mark.parametrize("experiment, f, name, value", list(restricted()), ids=lambda x: str(getattr(x, "name", x)))
def test_a_flag_that_does_not_apply_is_refused(experiment, f, name, value):
    """unless it is given the value that it has anyway"""
    module, given = EXPERIMENTS[experiment], base_of(f)
    usual, default = getattr(module.Config(**given), f.name), None
    with contextlib.suppress(module.InputError):                        # shapes have no --split instance
        default = getattr(module.Config(**given | {name: value}), f.name)
    other = next(one for one in (usual, *other_values(f, usual)) if one != default)
    words = words_of(experiment, **given | {name: value, f.name: other})
    with pytest.raises(module.InputError, match=rf"^{module.flag_of(f.name)} applies only to|has one instance"):
        configs(experiment, words)


@every_experiment
def test_help_names_every_flag_with_its_default(experiment, help_of):
    """It opens with the docstring, whose examples say how long they take"""
    module, text = EXPERIMENTS[experiment], help_of[f"{experiment}.py"]
    entries = {re.match(r"--([\w-]+)", entry)[1].replace("-", "_"): " ".join(entry.split())
               for entry in re.split(r"\n +(?=--)", text.split("\noptions:")[1])[1:]}
    names = {f.name for f in module.SETTINGS}
    assert {*entries} == names | {"outdir", "load", "init", "out_json"}
    for f in module.SETTINGS:
        said = entries[f.name]
        assert " ".join(f.metadata["help"].split()) in said
        default = getattr(module.Config(), f.name)
        assert f.default in ("", False) or str(default) in said, f.name
        assert all(str(choice) in said for choice in f.metadata.get("choices", ()))
        for name, values in f.metadata.get("only", {}).items():
            others = set(module.Config.__dataclass_fields__[name].metadata["choices"]) - set(values)
            assert all(value in said for value in values) or f"[not {name} {', '.join(others)}]" in said
    last = module.__doc__.strip().split("\n\n")[-1]
    assert last in text and len(re.findall(rf"^ +python3 {experiment}\.py.* {{2,}}\d.*$", last, re.M)) == 3


@pytest.mark.parametrize("experiment, entries", [
    (runs.MULTI, ["--lr X learning rate of Adam (default: 0.01; residual 0.003; classic, paper 0.002)",
                  "--conv1-channels N channels of Conv1 (default: 16; classic 32; paper 256)"]),
    (runs.NORB, ["--lr X learning rate of Adam (default: 0.005; cnn, cnn-bn 0.002)",
                 "(default: 10; cnn, cnn-bn 16; cnn-gap, capsnet-shared, capsnet, matrix-head 6)",
                 "(default: cross-entropy; capsnet-shared, capsnet margin)"])])
def test_help_says_which_presets_or_models_have_another_default(experiment, entries, help_of):
    text = " ".join(help_of[f"{experiment}.py"].split())
    assert all(entry in text for entry in entries)


@every_experiment
def test_a_model_that_is_given_twice_is_one(experiment):
    config, = configs(experiment, ["--model", "cnn", "cnn"])
    assert config == EXPERIMENTS[experiment].Config(model="cnn")


@every_experiment
def test_uniform_coupling_is_uniform_in_every_network(experiment):
    """with_uniform_coupling's network divides each capsule equally among all classes, and is another Config only if the
    network routes"""
    module = EXPERIMENTS[experiment]
    choices = module.Config.__dataclass_fields__["model"].metadata["choices"]
    configs = [toy(experiment, model=model)[0] for model in choices]
    if experiment == runs.MULTI:
        configs += NETWORKS.values()
    for config in configs:
        uniform = module.with_uniform_coupling(config)
        if uniform == config and config.routing_iters > 1:
            assert "routing_iters" not in golden.applying(experiment, vars(config))
            continue
        data = toy(experiment, model=config.model)[1]
        batch = module.to_batch(next(module.epoch_samples(data, 0, uniform)), slice(0, 2))
        out, _ = module.forward(module.weights_of(module.initial_state(uniform)), batch["images"], uniform)
        steps = out.get("c", [step.R for step in out.get("class_steps", [])])
        J = out["scores"].shape[1]
        assert len(steps) <= 1 and all(np.allclose(c, 1 / J) for c in steps), config.model
