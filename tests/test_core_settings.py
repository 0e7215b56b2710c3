"""The settings of every experiment, by rules over its Config: each has a flag, bounds and an effect, or is gone."""
import dataclasses
import math
import re
import sys

import numpy as np
import pytest
import runs
from conftest import EXPERIMENTS, assert_same, golden, toy, toy_run, without_seconds

OPTIONS = [(experiment, f) for experiment, module in EXPERIMENTS.items() for f in module.options(module.Config)]
NAMES = [f"{experiment.split('_')[0]}-{f.name}" for experiment, f in OPTIONS]
every_option = pytest.mark.parametrize("experiment, f", OPTIONS, ids=NAMES)


def parse(experiment, **given):
    """The Config of the flags that give these values"""
    module = EXPERIMENTS[experiment]
    parser = module.Parser(module.__doc__)
    module.add_config_flags(parser)
    flags = [[module.flag_name(f"no_{name}" if value is False else name)] + [str(value)] * (type(value) is not bool)
             for name, value in given.items()]
    return module.configs_from_args(parser.parse_args(sum(flags, [])))[0]


def base_of(f):
    """What must be given for a setting to mean something: the first network, task or data of each kind that it is of"""
    return {name: values[0] for name, values in f.metadata.get("only", {}).items()}


def other_values(experiment, f, value):
    """Legal values of a setting, by its declaration, other than `value`"""
    if f.metadata.get("metavar") == "LOW:HIGH":
        low, high = map(int, value.split(":"))
        return [f"{low + 20}:{high - 20}"]
    if f.metadata.get("metavar") == "N|full":
        return [other for other in ("3", "full") if other != value]
    if "choices" in f.metadata or f.type is bool:
        return [other for other in f.metadata.get("choices", (True, False)) if other != value]
    if f.type is str:
        return ["x"]
    several = (value + 1, value - 1, 2 * value + 10, 1) if f.type is int else (
        value / 2, 1e-9, f.metadata.get("high", 2) / 2)
    rules = EXPERIMENTS[experiment].RULES
    return [other for other in several if other != value and all(
        holds(other, f.metadata[rule]) for rule, (holds, _) in rules.items() if rule in f.metadata)]


# -------------------------------------------------------------- each has an effect

NEEDS = {                          # what else must be given for a setting to show
    "stop_at": dict(n_epochs=2),                                    # of one epoch the end is where it was
    "split": dict(data="toys")}                                     # shapes are no toys to be split by
NOT_HERE = {("data", "smallnorb")}                                  # values that ask for files that nobody may pass on
FOUND = {}


def found(experiment, **given):
    """What a toy run leaves behind: weights, history, and what its tests find, as text"""
    key = experiment, repr(given)
    if key not in FOUND:
        (config, data), module = toy(experiment, **given), EXPERIMENTS[experiment]
        weights, history = module.train(config, data=data)
        with module.Runner(1) as runner:
            tests = module.evaluate_test_sets(weights, data, config, runner)
        digests = {name: (a.shape, hash(a.tobytes())) for name, a in weights.items()}
        FOUND[key] = repr((digests, golden.summary(without_seconds(history)["epochs"]), golden.summary(tests)))
    return FOUND[key]


@pytest.mark.parametrize("experiment, f", [pair for pair in OPTIONS if not pair[1].metadata.get("runtime")],
                         ids=[name for name, (_, f) in zip(NAMES, OPTIONS) if not f.metadata.get("runtime")])
def test_every_setting_has_an_effect(experiment, f):
    """each choice of a setting; of other settings one value of several"""
    given = base_of(f) | NEEDS.get(f.name, {})
    if f.name == "preset":                                          # others may have one size in two presets
        given["model"] = "matrix-capsnet" if hasattr(EXPERIMENTS[experiment], "MATRIX_MODELS") else "capsnet"
    usual = getattr(toy(experiment, **given)[0], f.name)
    values = [value for value in other_values(experiment, f, usual) if (f.name, value) not in NOT_HERE]
    changed = (found(experiment, **given | {f.name: value}) != found(experiment, **given) for value in values)
    assert values and (all if "choices" in f.metadata else any)(changed), f"{f.name} changes nothing"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_runtime_options_change_no_bit(experiment, tmp_path, capsys):
    """all at once, but for the folders, whose files are not here"""
    module, given = EXPERIMENTS[experiment], {}
    for f in module.options(module.Config):
        if f.metadata.get("runtime") and f.metadata.get("metavar") != "DIR":
            value = other_values(experiment, f, getattr(module.Config(), f.name))[0]
            given[f.name] = str(tmp_path / f.name) if value == "x" and "metavar" not in f.metadata else value
    given |= {"quiet": False} | ({"digits": "auto"} if "digits" in given else {})
    weights, history = toy_run(experiment, **given)
    expected, usual = toy_run(experiment)
    assert_same(weights, expected)
    assert given.keys() >= {"threads", "checkpoint", "out_json", "quiet"}
    assert history == usual and "epoch 1/1" in capsys.readouterr().out


# -------------------------------------------------------------- flags

@every_option
def test_each_flag_sets_its_own_field(experiment, f):
    base, module = base_of(f), EXPERIMENTS[experiment]
    for value in other_values(experiment, f, getattr(module.Config(**base), f.name)):
        config = parse(experiment, **base, **{f.name: value})
        assert getattr(config, f.name) == value and config == module.Config(**base | {f.name: value})


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_settings_have_one_value(experiment):
    """What is given, else the default, else that of DEFAULTS; nothing is left open, and types are what they say"""
    module = EXPERIMENTS[experiment]
    config = parse(experiment)
    assert config == module.Config() and {module.SOURCE_SETTING, *module.EVAL_SETTINGS} <= {f.name


 for f in module.options(config)}
    assert {*NEEDS, *(name for name, _ in NOT_HERE)} <= {f.name for _, f in OPTIONS}    # no exception without a setting
    for f in module.options(config):
        value = getattr(config, f.name)
        assert type(value) is f.type and (f.default is None or value == f.default), f.name
        assert f.default is not None or value == config.preset_defaults()[f.name]
        assert f.metadata["help"][0] != " " and f.metadata["group"] in ("data", "network", "training", "run")
    given = {name: f.type(1) for name, f in ((f.name, f) for f in module.options(config) if f.default is None)
             if f.type in (int, float)}
    assert {name: getattr(module.Config(**given), name) for name in given} == given


@every_option
def test_every_bound_refuses_one_step_beyond_it(experiment, f):
    module = EXPERIMENTS[experiment]
    step = (lambda bound, way: bound + way) if f.type is int else (lambda bound, way: float(np.nextafter(bound, way)))
    beyond = {"low": lambda low: step(low, -1), "high": lambda high: step(high, 1 if f.type is int else math.inf),
              "above": lambda above: above, "choices": lambda _: "no such"}
    for rule in f.metadata.keys() & module.RULES.keys():
        value, words = beyond[rule](f.metadata[rule]), module.RULES[rule][1]
        with pytest.raises(module.InputError, match=f"^{module.flag_name(f.name)} .*: must be {words} "):
            module.check_options(dataclasses.replace(module.Config(), **{f.name: value}))
        if rule in ("low", "high"):
            module.check_options(module.Config(**base_of(f) | {f.name: f.metadata[rule]}))
    if f.type is float:
        for value in (math.nan, math.inf):
            with pytest.raises(module.InputError, match=f"{module.flag_name(f.name)} {value}: must be a finite number"):
                module.check_options(module.Config(**{f.name: value}))
    assert f.type in (bool, str) or {"low", "above"} & f.metadata.keys(), f"{f.name}: any number is accepted"


def restricted():
    """(experiment, a setting, another, a value of it with which the first means nothing)"""
    for experiment, f in OPTIONS:
        others = {g.name: g for e, g in OPTIONS if e == experiment}
        for name, values in f.metadata.get("only", {}).items():
            assert set(values) <= set(others[name].metadata["choices"]), f"{f.name}: only={{{name}: {values}}}"
            for value in others[name].metadata["choices"]:
                if value not in values:
                    yield experiment, f, name, value


@pytest.mark.parametrize("experiment, f, name, value", list(restricted()), ids=lambda x: str(getattr(x, "name", x)))
def test_a_flag_that_does_not_apply_is_refused_and_the_message_says_to_what_it_applies(experiment, f, name, value):
    module, given = EXPERIMENTS[experiment], base_of(f)
    for other in other_values(experiment, f, getattr(module.Config(**given), f.name))[:1]:
        with pytest.raises(module.InputError) as error:
            parse(experiment, **given | {name: value, f.name: other})
        flag = module.flag_name(f"no_{f.name}" if other is False else f.name) + f" {other}" * (type(other) is not bool)
        where = f"{module.flag_name(name)} {', '.join(f.metadata['only'][name])}"
        assert str(error.value) == (f"{flag} applies to {where}, not to {value}. Leave it out, or change "
                                    f"{module.flag_name(name)}")
        configs = module.Config(**given | {name: value}), module.Config(**given)
        module.check_applicable({f.name: other}, configs)                               # it applies to the second


@pytest.mark.parametrize("experiment, model, given", [
    (runs.AFF, "cnn-gap", {"loss": "margin"}), (runs.AFF, "cnn-gap", {"recon_weight": 0.1}),
    (runs.NORB, "cnn", {"routing_iters": 3}), (runs.MULTI, "cnn", {"routing_iters": 1})])
def test_train_refuses_a_setting_that_does_not_apply_to_the_model(experiment, model, given):
    """as the command line does, and not what a default says"""
    config, data = toy(experiment, model=model, **given)
    with pytest.raises(EXPERIMENTS[experiment].InputError, match=r"--.* applies to --model .*, not to cnn"):
        EXPERIMENTS[experiment].train(config, data=data)


def test_another_name_of_a_flag_is_accepted_where_it_applies():
    """--em-iters of the NumPy reproduction that the second experiment grew from"""
    module = EXPERIMENTS[runs.NORB]
    assert parse(runs.NORB, model="matrix-head", em_iters=3) == module.Config(model="matrix-head", routing_iters=3)
    with pytest.raises(module.InputError, match="^--em-iters 3 applies to --model matrix-capsnet, matrix-head, not"):
        parse(runs.NORB, model="capsnet", em_iters=3)


@pytest.mark.parametrize("experiment, old, new", [(experiment, old, new) for experiment, module in EXPERIMENTS.items()
                                                  for old, new in module.RENAMED.items()])
def test_an_old_name_is_refused_with_the_new_one(experiment, old, new, tmp_path):
    """On the command line, with a space or an equals sign, and in a file's settings"""
    module = EXPERIMENTS[experiment]
    for words in {tuple(old.split()), (old.replace(" ", "="),)}:
        with pytest.raises(module.InputError, match=f"^{old} is now called {new}$"):
            module.Parser().parse_args([*words, "--no-such-flag"])
    (flag, _, value), names = new.partition(" "), {f.name for f in module.options(module.Config)}
    assert flag.removeprefix("--").removeprefix("no-").replace("-", "_") in names
    if value:
        name = flag[2:].replace("-", "_")
        f = next(f for f in module.options(module.Config) if name in (f.name, *f.metadata.get("aliases", {})))
        module.check_options(module.Config(**base_of(f) | {name: value}))
    name, _, value = old.removeprefix("--").partition(" ")
    settings = module.run_identity(module.Config(), "x") | {name.replace("-", "_"): value}
    with pytest.raises(module.InputError, match=rf"^w.npz: .* older version \({old} is now called {new}\)"):
        module.config_from_settings(settings, "w.npz")


def test_a_flag_of_two_experiments_has_the_same_help():
    """up to the first semicolon; a model or preset of two experiments is the same kind of network"""
    texts = {}
    for _, f in OPTIONS:
        if f.name not in ("model", "preset", "task", "data"):
            texts.setdefault(f.name, set()).add((f.metadata["help"].split(";")[0], f.metadata["group"], f.type))
    assert not {name: found for name, found in texts.items() if len(found) > 1}
    kinds = {}
    for module in EXPERIMENTS.values():
        for name, text in getattr(module, "MODEL_HELP", getattr(module, "MODELS", None)).items():
            kinds.setdefault(name, set()).add(text.split(",")[0])
    assert not {name: found for name, found in kinds.items() if len(found) > 1}


def test_help_lists_the_defaults_that_depend_on_other_settings():
    """By hand, from EXAMPLES of three kinds; and every value of DEFAULTS is in its flag's help"""
    multi, aff = EXPERIMENTS[runs.MULTI], EXPERIMENTS[runs.AFF]
    fields = {f.name: f for f in multi.options(multi.Config)}
    assert multi.default_text(fields["lr"]) == " (default: 0.01; residual: 0.003; capsnet with classic or paper: 0.002)"
    assert multi.default_text(fields["seed"]) == " (default: 0)" and multi.default_text(fields["quiet"]) == ""
    fields = {f.name: f for f in aff.options(aff.Config)}
    assert aff.default_text(fields["muon"]) == " (default: --norm batch: 2 x --lr, at most 1; --norm none: 0.0)"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_help_names_every_flag_with_its_default_and_begins_with_examples(experiment, monkeypatch, capsys):
    module = EXPERIMENTS[experiment]
    monkeypatch.setenv("COLUMNS", "3000")
    monkeypatch.setattr(sys, "argv", [f"{experiment}.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        module.main()
    text = capsys.readouterr().out
    head, *entries = re.split(r"\n +(?=--|-h)", text.split("\noptions:\n")[0] + text.split("\noptions:")[1])
    said = {re.match(r"(?:-h, )?--([\w-]+)", entry)[1].replace("-", "_"): " ".join(entry.split()) for entry in entries}
    options = {f.name: f for f in module.options(module.Config)}
    aliases = {alias for f in options.values() for alias in f.metadata.get("aliases", {})}
    assert stop.value.code == 0
    others = {"help", "load", "out_weights", "n_seeds", "no_save", "predictions"}
    assert said.keys() == options.keys() | aliases | others
    assert len(said) <= 43, f"{len(said)} flags, with --help, are too many"
    for name, f in options.items():
        default = "" if name == "model" else module.default_text(f)
        assert " ".join(f.metadata["help"].split()) in said[name] and default in said[name], name
        assert name == "model" or f.default in ("", False, None) or f"(default: {f.default})" in said[name]
        assert f.default is not None or str(getattr(module.Config(), name)) in said[name] or name == "muon"
        assert all(str(choice) in said[name] for choice in f.metadata.get("choices", ()))
        assert all(value in said[name] for values in f.metadata.get("only", {}).values() for value in values)
    first, *_, last = module.__doc__.strip().split("\n\n")
    assert text.split("\n\n")[1].strip() == first.strip() and last in text
    assert len(re.findall(rf"^ +python3 {experiment}\.py.* {{2,}}\d.*$", last, re.M)) == 3
    groups = [text.index(f"\n{group}:\n") for group in ("options", "data", "network", "training", "run")]
    assert groups == sorted(groups)


@pytest.mark.parametrize("flags", [["--n-epochs", "many"], ["--no-such-flag"], ["--lr"], ["--lr-schedule", "huge"]])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_what_argparse_refuses_is_one_line_and_exit_code_2(experiment, flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{experiment}.py", *flags])
    with pytest.raises(SystemExit) as stop:
        EXPERIMENTS[experiment].run_cli(EXPERIMENTS[experiment].main)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and re.fullmatch(f"error: .*{flags[0]}.*See --help\n", said)
