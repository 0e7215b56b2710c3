"""The settings of both experiments, all taken from their Configs: each has a flag, its bounds and an effect; what is
not given comes from the preset, the network or the data; and the values that the results hang on, written down."""
import dataclasses
import io
import math
import sys
from types import SimpleNamespace

import multimnist_capsnet as mc
import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from conftest import assert_same, toy_digits

SCRIPTS = {"multimnist": mc, "smallnorb": sn}
TOY = {                            # of each experiment and network, a run of two steps, each of two shards
    "multimnist": {
        "caps": mc.Config(seed=1, n_epochs=1, n_train=40, n_val=4, n_test=4, batch_size=20, threads=1, quiet=True,
                          digits="synthetic", conv1_channels=2, primary_types=1, primary_dim=3, digit_dim=3,
                          decoder_hidden1=4, decoder_hidden2=5),
        "cnn": mc.Config(seed=1, n_epochs=1, n_train=40, n_val=4, n_test=4, batch_size=20, threads=1, quiet=True,
                         digits="synthetic", model="cnn", cnn_channels=8, conv1_channels=12)},
    "smallnorb": {"caps": sn.Config(data="shapes", seed=1, n_epochs=1, n_per_combo=2, n_test_per_combo=1, n_elev=2,
                                    n_train_views=2, n_test_views=2, conv1_channels=4, primary_types=2, conv_types=2,
                                    conv2_types=2, batch_size=20, baseline="none", threads=1, quiet=True)}}
TOY["smallnorb"] |= {model: sn.for_model(TOY["smallnorb"]["caps"], model) for model in sn.MODELS[1:]}
TOY["smallnorb"] |= {model: dataclasses.replace(TOY["smallnorb"][model], trunk_channels=2, head_types=2)
                     for model in sn.HEADS}


def of_data(config, data):
    """A Config of the second experiment on other data, without what means nothing to these"""
    foreign = [f for f in sn.options(config) if data not in f.metadata.get("of", (data,))]
    return sn.changed(config, data=data, **{f.name: f.default for f in foreign})


def toy_norb(n=40):
    """Some rows with smallNORB's columns, of all classes: half of them at training azimuths, half at held-out ones;
    six rows, those of all lightings, are a view of a toy; two toys of each class"""
    view = np.arange(6 * n) // 6
    return {"labels": view % 5, "instances": np.where(view // 5 % 2, 6, 4), "elevations": np.full(6 * n, 30),
            "azimuths": np.where(view < n // 2, 300, 100), "lightings": np.arange(6 * n) % 6}


def noise_for_toys(data, toy_seed, say=print, threads=0):
    """In the place of add_toy_images: noise of that seed"""
    for k, part in enumerate(part for part in data.values() if isinstance(part, dict)):
        rng, n = np.random.default_rng((toy_seed, k)), len(part["labels"])
        part["images"] = rng.integers(0, 256, (n, sn.NORB_SIDE, sn.NORB_SIDE, 2), np.uint8)


def noise_for_norb(norb_dir):
    """In the place of load_norb"""
    data = {split: toy_norb() for split in ("train", "test")}
    noise_for_toys(data, 99)
    return data


@pytest.fixture(autouse=True)
def no_toys_are_drawn(monkeypatch):
    """nor files read"""
    monkeypatch.setattr(sn, "toy_tables", lambda split: toy_norb())
    monkeypatch.setattr(sn, "add_toy_images", noise_for_toys)
    monkeypatch.setattr(sn, "load_norb", noise_for_norb)


def train(config):
    """-> what a run leaves: weights, and what evaluation found"""
    if isinstance(config, mc.Config):
        params, history = mc.train(config, data=DIGITS)
    else:
        params, history = sn.train(config)
    found = [{name: value for name, value in epoch.items() if "train" not in name and name != "seconds"}
             for epoch in history["epochs"]]
    return params, found


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


DIGITS = toy_digits()
KNOWN = {}                         # the runs that others are compared with


def trained(config):
    key = repr(config)
    KNOWN[key] = KNOWN.get(key) or train(config)
    return KNOWN[key]


def other_values(f, value):
    """Legal values of an option, from its metadata, other than `value`: each other choice, True, one more, half"""
    if "choices" in f.metadata:
        return [choice for choice in f.metadata["choices"] if choice != value]
    if f.type is bool:
        return [not value]
    if f.type is int:
        return [value + 1]
    if f.type is float:
        return [value / 2 or f.metadata.get("high", 1) / 2]
    if f.metadata.get("metavar") == "LOW:HIGH":
        low, high = map(int, value.split(":"))
        return [f"{low + 2}:{high - 2}"]
    raise LookupError(f"{f.name}: say in NEEDS what else it may be")


# What needs more than one changed value to show: what goes before, on both sides, and the values to try (None: all)
NEEDS = {
    ("multimnist", "warmup"): ({}, [3]),                                                # of one step it is none
    ("multimnist", "muon"): (dict(norm="batch"), [0.05]),
    ("smallnorb", "muon"): ({}, [0.02]),
    ("multimnist", "fixed_pool"): (dict(n_epochs=2), None),                             # the first epoch is the same
    ("multimnist", "preset"): ({}, ["classic"]),                    # paper's differs in what the toy runs have given
    ("multimnist", "cnn_hidden"): (dict(conv1_channels=16), None),  # refused beside what else sets the CNN's size
    ("smallnorb", "warmup"): ({}, [3]),
    ("smallnorb", "model"): ({}, sn.MODELS[:-2]),                                       # nearest does not train
    **{("smallnorb", name): ({}, [40])                              # one more may leave a CNN of the same size as wide
       for name in ("conv1_channels", "primary_types", "conv_types", "conv2_types", "head_types")},
    ("smallnorb", "split"): ({}, ["elevation"]),                                        # the shapes are no toys
    ("smallnorb", "preset"): ({}, None),                            # of sizes that are not given
    ("smallnorb", "width"): ({}, [5]),                                                  # 1 is what fits here
    ("smallnorb", "stop_familiar"): (dict(n_epochs=3), [1e-9]),                         # reached at once
    ("smallnorb", "n_train_toys"): ({}, [1]),                                           # there are two
    ("smallnorb", "n_test"): ({}, [60]),
    ("smallnorb", "train_elevations"): (dict(split="elevation"), None),                 # not read by the other split
    ("smallnorb", "test_elevations"): (dict(split="elevation"), None)}
# What changes what is evaluated while training, and no bit of the weights
LOOKS_ONLY = {("multimnist", "n_val"), ("smallnorb", "n_eval"), ("smallnorb", "test_azimuths"),
              ("smallnorb", "test_elevations"), ("smallnorb", "n_test_views"), ("smallnorb", "n_test_per_combo"),
              ("smallnorb", "n_test")}


def cases(runtime):
    """(experiment, option, model): every network that the option means something to; of the core's own options one, and
    of those of the second experiment that are not of some networks; of --model the last, the control"""
    for experiment, module in SCRIPTS.items():
        core = {f.name for f in mc.options(mc.Settings)} - {"n_epochs"}
        for f in module.options(module.Config):
            if bool(f.metadata.get("runtime")) == runtime:
                models = [model for model in f.metadata.get("models", TOY[experiment]) if model != "nearest"]
                one = f.name in core or runtime or module is sn and "models" not in f.metadata
                few = models[-1:] if f.name == "model" else models[:1] if one else models
                yield from ((experiment, f.name, model) for model in few)


def option_of(experiment, name):
    return next(f for f in SCRIPTS[experiment].options(SCRIPTS[experiment].Config) if f.name == name)


def changed(experiment, config, name, value):
    if name == "model":
        return SCRIPTS[experiment].for_model(config, value)
    return of_data(config, value) if name == "data" else dataclasses.replace(config, **{name: value})


@pytest.mark.parametrize("experiment, name, model", list(cases(runtime=False)))
def test_every_setting_has_an_effect(experiment, name, model):
    before, values = NEEDS.get((experiment, name), ({}, None))
    config = dataclasses.replace(TOY[experiment][model], **before)
    f = option_of(experiment, name)
    if config.__class__ is sn.Config and config.data not in f.metadata.get("of", (config.data,)):
        config = of_data(config, f.metadata["of"][0])
    if (experiment, name) == ("smallnorb", "preset"):
        config = sn.changed(config, **dict.fromkeys(sn.PRESETS["small"]))
    weights, found = trained(config)
    for value in values or other_values(f, getattr(config, name)):
        other, others = train(changed(experiment, config, name, value))
        if (experiment, name) in LOOKS_ONLY:
            assert_same(weights, other)
            assert found != others, f"{name}={value} changes nothing"
        else:
            assert not same(weights, other), f"{name}={value} changes nothing"


RUNTIME = {                        # of runtime options, what the rules of other_values do not know
    "checkpoint": lambda folder: dict(checkpoint=f"{folder}/run.npz"),
    "out_json": lambda folder: dict(out_json=f"{folder}/x.json"),
    "resume": lambda folder: dict(resume=True, checkpoint=f"{folder}/run.npz"),
    "mnist_dir": lambda folder: dict(mnist_dir=str(folder)),
    "norb_dir": lambda folder: dict(norb_dir=str(folder)),
    "baseline": lambda folder: dict(baseline="cnn")}


@pytest.mark.parametrize("experiment, name, model", list(cases(runtime=True)))
def test_runtime_options_change_no_bit(experiment, name, model, tmp_path):
    config = TOY[experiment][model]
    weights, found = trained(config)
    f = option_of(experiment, name)
    usual = [{name: value} for value in other_values(f, getattr(config, name))] if name not in RUNTIME else None
    if name == "norb_dir":
        config = of_data(config, "smallnorb")
        weights, found = trained(config)
    for changes in usual or [RUNTIME[name](tmp_path)]:
        other, others = train(dataclasses.replace(config, **changes))
        assert_same(weights, other)
        assert found == others


@pytest.mark.parametrize("experiment", SCRIPTS)
def test_exceptions_name_settings_that_exist(experiment):
    names = {f.name for f in SCRIPTS[experiment].options(SCRIPTS[experiment].Config)}
    assert {name for which, name in (*NEEDS, *LOOKS_ONLY) if which == experiment} <= names
    assert set(RUNTIME) <= {f.name for module in SCRIPTS.values() for f in module.options(module.Config)
                            if f.metadata.get("runtime")}


def test_the_two_experiments_share_the_options_of_the_core():
    """Same name, type, group, bounds: what a reader learns of the one holds in the other"""
    for f in mc.options(mc.Settings):
        for module in SCRIPTS.values():
            other = next(g for g in module.options(module.Config) if g.name == f.name)
            assert other.type == f.type
            for key in ("group", "low", "high", "above", "choices", "runtime"):
                assert other.metadata.get(key) == f.metadata.get(key), f.name


# -------------------------------------------------------------- flags

def parse(module, *flags):
    parser = module.Parser(module.__doc__)
    module.add_config_flags(parser)
    return module.config_from_args(parser.parse_args(list(map(str, flags))))


FLAGS = [(experiment, f.name) for experiment, module in SCRIPTS.items() for f in module.options(module.Config)]


@pytest.mark.parametrize("experiment, name", FLAGS)
def test_each_flag_sets_its_own_field(experiment, name):
    module, f = SCRIPTS[experiment], option_of(experiment, name)
    default = getattr(module.Config(), name)
    free_text = f.type is str and "choices" not in f.metadata
    for value in ["x"] if free_text else other_values(f, default):
        config = parse(module, module.flag_of(name), *([] if f.type is bool else [value]))
        assert getattr(config, name) == value
        fills_in = name in ("model", "preset", "data", "split", "norm")                 # the defaults of others
        expected = module.Config(**{name: value} if fills_in else {})
        assert module.settings_of(config) == module.settings_of(expected) | {name: value}
        assert [g.name for g in module.given_options(config)] == [name]


@pytest.mark.parametrize("module", SCRIPTS.values(), ids=SCRIPTS)
def test_without_flags_the_settings_are_configs(module):
    assert parse(module) == module.Config() and module.given_options(parse(module)) == []


@pytest.mark.parametrize("module", SCRIPTS.values(), ids=SCRIPTS)
def test_help_stands_in_four_groups_and_says_every_default(module, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    parser = module.Parser(module.__doc__)
    module.add_config_flags(parser)
    text = " ".join(parser.format_help().split())
    heads = [text.index(f" {group}: --") for group in ("data", "network", "training", "run")]
    assert heads == sorted(heads)
    ends = dict(zip(("data", "network", "training", "run"), zip(heads, (*heads[1:], len(text)))))
    for f in module.options(module.Config):
        start, end = ends[f.metadata["group"]]
        assert start < text.index(f"{module.flag_of(f.name)} ", heads[0]) < end
        assert " ".join(f.metadata["help"].split()) in text
        value = getattr(module.Config(), f.name)
        if value not in ("", False):
            assert f"(default {value}" in text[text.index(f" {module.flag_of(f.name)} ", heads[0]):][:500]
    assert module.__doc__.split("\n\n")[0] in parser.format_help()
    assert parser.format_help().rstrip().endswith(module.__doc__.split("\n\n")[-1].rstrip())


@pytest.mark.parametrize("experiment, name", FLAGS)
def test_every_option_with_a_bound_is_refused_beyond_it(experiment, name):
    module, f = SCRIPTS[experiment], option_of(experiment, name)
    bounds = {"low": lambda low: low - 1, "high": lambda high: high + 1, "above": lambda above: above,
              "choices": lambda _: "nothing"}
    for rule, beyond in bounds.items():
        if rule in f.metadata:
            with pytest.raises(module.InputError, match=module.flag_of(name) + " .*must be"):
                module.check_options(module.Config(**{name: beyond(f.metadata[rule])}), [module.Config().model])
    if f.type is float:
        with pytest.raises(module.InputError, match=module.flag_of(name) + ".*must be a finite number"):
            module.check_options(module.Config(**{name: math.nan}), [module.Config().model])
    assert f.type in (bool, str) or {"low", "above"} & set(f.metadata), f"{name}: any number is accepted"


def test_bounds_are_legal_themselves():
    for module in SCRIPTS.values():
        for f in module.options(module.Config):
            for rule in {"low", "high"} & set(f.metadata):
                config = module.Config(**{f.name: f.metadata[rule]})
                module.check_options(config, f.metadata.get("models", ["caps"]))


RESTRICTED = [(experiment, f.name, model) for experiment, module in SCRIPTS.items()
              for f in module.options(module.Config) for model in option_of(experiment, "model").metadata["choices"]
              if model not in f.metadata.get("models", [model])]


@pytest.mark.parametrize("experiment, name, model", RESTRICTED)
def test_what_means_nothing_to_the_network_is_refused(experiment, name, model):
    module = SCRIPTS[experiment]
    value = other_values(option_of(experiment, name), getattr(module.Config(), name))[0]
    config = module.Config(model=model, **{name: value})
    with pytest.raises(module.InputError, match=f"{module.flag_of(name)}: means nothing to --model {model}"):
        module.check_options(config, [model])
    assert [f.name for f in module.foreign_options(config, [model])] == [name]
    others = option_of(experiment, name).metadata["models"]
    module.check_options(config, [model, others[0]])                                    # it does to another of the run


def test_memory_interrupt_and_long_messages(capsys):
    def raises(error):
        def main():
            raise error
        with pytest.raises(SystemExit) as stop:
            mc.run_cli(main)
        return stop.value.code, capsys.readouterr().err

    assert raises(mc.InputError("two\nlines")) == (2, "error: two lines\n")
    code, text = raises(MemoryError())
    assert code == 2 and text.startswith("error: out of memory") and text.count("\n") == 1
    assert raises(KeyboardInterrupt())[0] == 130


def test_a_reader_that_has_gone_is_no_traceback(run_script):
    done = run_script(
        "-c", "import multimnist_capsnet as mc, os, sys\ndef main():\n    raise BrokenPipeError\nmc.run_cli(main)")
    assert (done.returncode, done.stderr) == (1, "")


def test_what_argparse_refuses_is_an_input_error():
    for flags in (["--n-train", "many"], ["--no-such-flag"], ["--merge"], ["--preset", "huge"]):
        with pytest.raises(mc.InputError, match=f"{flags[0]}.*see --help"):
            parse(mc, *flags)


def test_check_options_names_files_that_cannot_be_written(tmp_path):
    for changes, message in (
        (dict(resume=True), "--resume needs --checkpoint"),
        (dict(checkpoint=str(tmp_path)), "it is a folder"),
        (dict(out_json=f"{tmp_path}/no/x.json"), "missing or not writable")):
        with pytest.raises(mc.InputError, match=message):
            mc.check_options(mc.Config(**changes), ["caps"])
    mc.check_options(mc.Config(checkpoint=f"{tmp_path}/x.npz"), ["caps"])
    assert list(tmp_path.glob("*.npz")) == []


# -------------------------------------------------------------- progress

class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal, quiet, expected", [
    (False, False, "hello\nepoch 1\n"), (False, True, ""), (True, True, ""),
    (True, False, "hello\n\r\x1b[Kstep 1\r\x1b[Kepoch 1\n")])
def test_progress_is_one_live_line_on_a_terminal_and_a_line_an_epoch_elsewhere(monkeypatch, terminal, quiet, expected):
    monkeypatch.setattr("sys.stdout", Terminal() if terminal else io.StringIO())
    progress = mc.Progress(quiet)
    progress.say("hello")
    progress.step("step 1")
    progress.step("step 2, too soon")
    progress.epoch("epoch 1")
    assert sys.stdout.getvalue() == expected


# -------------------------------------------------------------- what was not given

def test_another_model_brings_its_own_recipe():
    for model, recipe in sn.RECIPES.items():
        config = dataclasses.replace(sn.Config(), model=model)
        assert config == sn.Config(model=model)
        assert {name: getattr(config, name) for name in recipe} == recipe
    vector = dataclasses.replace(sn.Config(), model="self-routing")
    assert (vector.loss, vector.routing_iters) == ("margin", 3) and (sn.Config().loss, sn.Config().routing_iters) == (
        "xent", 2)
    for data, values in sn.DATA.items():
        config = dataclasses.replace(sn.Config(), data=data)
        assert config == sn.Config(data=data) and {name: getattr(config, name) for name in values} == values
    for preset, values in sn.PRESETS.items():
        config = dataclasses.replace(sn.Config(), preset=preset)
        assert config == sn.Config(preset=preset) and {name: getattr(config, name) for name in values} == values
    cnn = dataclasses.replace(mc.Config(), model="cnn")
    assert cnn == mc.Config(model="cnn") and (cnn.lr, cnn.warmup) == (1e-2, 200)
    for preset, values in mc.PRESETS.items():
        config = dataclasses.replace(mc.Config(), preset=preset)
        assert config == mc.Config(preset=preset) and {name: getattr(config, name) for name in values} == values
    assert dataclasses.replace(mc.Config(model="cnn"), preset="paper") == mc.Config(model="cnn", preset="paper")


@pytest.mark.parametrize(
    "module, name, value, path",
    [(sn, "lr", 1e-3, ["gap"]), (sn, "loss", "margin", ["gap", "dynamic", "caps"]), (sn, "loss", "xent", ["dynamic"]),
     (sn, "routing_iters", 3, ["dynamic", "em"]), (sn, "n_epochs", 9, ["dense", "caps"]),
     (mc, "lr", 1e-3, ["cnn", "caps"]), (mc, "warmup", 7, ["cnn"]), (mc, "warmup", 0, ["cnn", "caps"])],
    ids=str)
def test_what_was_given_stays_through_replacements(module, name, value, path):
    config = module.Config(**{name: value})
    for model in path:
        config = dataclasses.replace(config, model=model)
        assert getattr(config, name) == value and config == module.Config(model=model, **{name: value})
        own = config.own_values() | {name: value}
        assert {key: getattr(config, key) for key in own} == own


def test_replacements_there_and_back_are_none():
    for module, other in ((sn, dict(model="dynamic", data="shapes", preset="paper")),
                          (mc, dict(model="cnn", preset="classic"))):
        usual = module.Config()
        away = dataclasses.replace(usual, **other)
        back = dataclasses.replace(away, **{name: getattr(usual, name) for name in other})
        assert away != usual and back == usual and module.given_options(back) == []
    there = dataclasses.replace(dataclasses.replace(mc.Config(recon_weight=0.5), preset="classic"), preset="paper")
    assert there == mc.Config(preset="paper", recon_weight=0.5)


def test_what_is_not_normalised_has_no_orthogonalised_steps_unless_they_are_asked_for():
    """on whatever way it came to be: --norm none, another preset, there and back"""
    assert mc.Config().muon == 0.02 == mc.Config(model="cnn").muon == mc.Config(preset="classic", model="cnn").muon
    for plain in (mc.Config(norm="none"), mc.Config(preset="classic"), mc.Config(model="cnn", norm="none"),
                  dataclasses.replace(mc.Config(), norm="none"), dataclasses.replace(mc.Config(), preset="paper"),
                  mc.changed(mc.Config(), preset="classic")):
        assert plain.muon == 0 and mc.given_options(plain) == mc.given_options(dataclasses.replace(plain))
    assert dataclasses.replace(mc.Config(preset="classic"), preset="deep") == mc.Config()
    assert mc.Config(preset="classic", norm="batch").muon == 0 and mc.Config(norm="none", muon=0.1).muon == 0.1


def test_a_value_given_in_a_replacement_stays_too():
    config = dataclasses.replace(dataclasses.replace(sn.Config(), n_epochs=40), data="shapes")
    assert config.n_epochs == 40 and config.train_azimuths == "0:150"
    config = dataclasses.replace(dataclasses.replace(sn.Config(), conv_types=12, routing_iters=1), preset="paper")
    assert (config.conv_types, config.conv2_types, config.routing_iters) == (12, 16, 1)
    config = dataclasses.replace(dataclasses.replace(mc.Config(), conv1_channels=8), preset="paper")
    assert (config.conv1_channels, config.primary_types) == (8, 32)


@pytest.mark.parametrize(
    "module, model, foreign, kept",
    [
        (sn, "cnn", dict(routing_iters=3, final_lambda=0.5, trunk_channels=4, no_coord_add=True, uniform=True),
         dict(lr=1e-3, seed=4, conv_types=4, loss="spread", preset="paper", width=7)),
        (sn, "em", dict(conv_types=4, preset="paper"), dict(routing_iters=3, loss="spread", dropout=0.1, head_types=5)),
        (sn, "dynamic", dict(no_coord_add=True, final_lambda=0.5, dropout=0.3), dict(routing_iters=2, width=3)),
        (sn, "dynamic-shared", dict(width=3, uniform=True), dict(no_coord_add=True, head_types=5)),
        (sn, "nearest", dict(max_shift=2, width=3, routing_iters=1), dict(n_test=600, toy_seed=3)),
        (sn, "gap", dict(routing_iters=3, routing_grad="detached", conv1_channels=16), dict(max_shift=2)),
        (mc, "cnn", dict(routing_iters=2, digit_bias=True, recon_weight=0.1, decoder_hidden1=9),
         dict(lr=1e-3, primary_types=3)),
        (mc, "caps", dict(dropout=0.5, cnn_channels=7, cnn_hidden=5), dict(n_train=77))],
    ids=str)
def test_for_model_drops_foreign_settings_and_keeps_the_others(module, model, foreign, kept):
    other = "caps" if model != "caps" else "cnn"
    config = module.for_model(module.Config(model=other, **foreign, **kept), model)
    assert config == module.Config(model=model, **kept)
    module.check_options(config, [model])


def test_variants_have_their_own_recipes_and_what_was_given():
    config = sn.Config(data="shapes", baseline="em,dynamic,self-routing,gap", conv_types=3, n_train_views=4)
    variants = sn.variants(config)
    assert list(variants) == ["caps", "em", "dynamic", "self-routing", "gap"]
    for model, variant in variants.items():
        recipe = sn.RECIPES[model]
        assert variant.model == model and {name: getattr(variant, name) for name in recipe} == recipe
        assert variant.n_train_views == 4 and variant.conv_types == (3 if model == "caps" else 8)
    given = sn.variants(dataclasses.replace(config, lr=1e-3, n_epochs=7, loss="spread"))
    assert {(variant.lr, variant.n_epochs, variant.loss) for variant in given.values()} == {(1e-3, 7, "spread")}


def test_ablations_have_their_networks_recipe_but_for_what_they_change():
    variants = sn.variants(sn.Config(ablations=True, data="shapes", n_per_combo=3))
    usual = dict(data="shapes", n_per_combo=3, baseline="none")
    assert variants["full"] == sn.Config(**usual)
    for label, changes in sn.ABLATIONS.items():
        assert variants[label] == sn.Config(**usual | changes), label
        sn.check_config(variants[label])
    assert variants["1 iteration"].routing_iters == 1 and variants["full"].routing_iters == 2


@pytest.mark.parametrize("module, given, changes", [
    (sn, {}, dict(data="shapes", n_epochs=3)), (sn, {}, dict(model="dynamic", loss="xent")),
    (sn, dict(routing_iters=3, n_epochs=40), dict(model="dynamic", data="shapes")),
    (mc, {}, dict(model="cnn", lr=2e-3)),
    (mc, dict(preset="classic", recon_weight=0.0005), dict(preset="paper"))], ids=str)
def test_changed_keeps_what_is_given_also_where_it_equals_a_recipes_value(module, given, changes):
    """which dataclasses.replace cannot tell from a value that was filled in"""
    config = module.changed(module.Config(**given), **changes)
    assert config == module.Config(**given | changes) and config.filled == module.Config(**given | changes).filled
    assert module.changed(config) == config


def test_a_flag_given_to_a_trained_network_is_given():
    """--load of a run with cross-entropy and --loss xent beside it: dynamic is trained with it too"""
    found = SimpleNamespace(config=sn.config_of(sn.settings_of(sn.Config()), "run.npz"))
    config = sn.config_to_look_at(found, SimpleNamespace(loss="xent", threads=1), "run.npz")
    assert sn.for_model(config, "dynamic").loss == "xent" and config.threads == 1
    assert sn.for_model(sn.config_to_look_at(found, SimpleNamespace(), "run.npz"), "dynamic").loss == "margin"
    for name, value in ("checkpoint", "run.npz"), ("resume", True), ("seed", 7):
        with pytest.raises(sn.InputError, match=f"--{name}.*run.npz"):
            sn.config_to_look_at(found, SimpleNamespace(**{name: value}), "run.npz")


def test_options_are_settings_and_not_what_was_filled_in():
    for module in SCRIPTS.values():
        assert "filled" not in module.settings_of(module.Config()) and "filled" not in repr(module.Config())
        assert None not in module.settings_of(module.Config()).values()


# -------------------------------------------------------------- pinned: what the results in the documents hang on

def test_multimnists_tables():
    deep = (("conv2d", "conv1", 3, 1, "conv1"), ("relu",), ("conv2d", "conv2", 3, 1, "conv1"), ("pool",), ("relu",),
            ("conv2d", "conv3", 3, 1, "conv3"), ("relu",), ("conv2d", "conv4", 3, 1, "conv3"), ("pool",), ("relu",),
            ("conv2d", "conv5", 3, 1, "2 conv3"), ("relu",))
    residual = (
        *deep[:2], ("conv2d", "conv2", 3, 1, "2 conv1"), *deep[3:7], ("keep",), ("pad", 1),
        ("conv2d", "branch1", 3, 1, "conv3"), ("relu",), ("pad", 1), ("conv2d", "branch2", 3, 1, "conv3"), ("add",),
        ("relu",), ("conv2d", "conv4", 3, 1, "2 conv3"), ("pool",), ("relu",), ("keep",), ("pad", 1),
        ("conv2d", "branch3", 3, 1, "2 conv3"), ("relu",), ("pad", 1), ("conv2d", "branch4", 3, 1, "2 conv3"),
        ("add",), ("relu",), ("conv2d", "conv5", 3, 1, "4 conv3"), ("relu",))
    parts = (*deep[:5], ("conv2d", "conv3", 3, 2, "2 conv3"), ("relu",))
    assert mc.FRONT_ENDS == {
        "deep": (*deep, ("conv2d", "primary", 1, 1, "primary")),
        "residual": (*residual, ("conv2d", "primary", 1, 1, "primary")),
        "parts": (*parts, ("conv2d", "primary", 1, 1, "primary")),
        "paper": (("conv2d", "conv1", 9, 1, "conv1"), ("relu",), ("conv2d", "primary", 9, 2, "primary"))}
    assert mc.CNN_TRUNKS == {"deep": deep, "residual": residual, "parts": parts}
    assert mc.PRESETS == {
        "deep": {"front_end": "deep", "conv1_channels": 16, "conv3_channels": 64, "norm": "batch",
                 "primary_types": 16, "decoder_hidden1": 256, "decoder_hidden2": 512, "lr": 0.01, "muon": 0.02,
                 "warmup": 200, "recon_weight": 0.01},
        "residual": {"front_end": "residual", "conv1_channels": 16, "conv3_channels": 64, "norm": "batch",
                     "primary_types": 16, "decoder_hidden1": 512, "decoder_hidden2": 1024, "lr": 0.003, "muon": 0.006,
                     "warmup": 200, "recon_weight": 0.005},
        "classic": {"front_end": "paper", "conv1_channels": 32, "conv3_channels": 64, "norm": "none",
                    "primary_types": 8, "decoder_hidden1": 256, "decoder_hidden2": 512, "lr": 0.002, "muon": 0.0,
                    "warmup": 0, "recon_weight": 0.0005},
        "paper": {"front_end": "paper", "conv1_channels": 256, "conv3_channels": 64, "norm": "none",
                  "primary_types": 32, "decoder_hidden1": 512, "decoder_hidden2": 1024, "lr": 0.002, "muon": 0.0,
                  "warmup": 0, "recon_weight": 0.0005}}
    assert mc.CNN == {"norm": "batch", "lr": 0.01, "muon": 0.02, "warmup": 200}


def test_smallnorbs_tables():
    assert sn.MODELS == ("caps", "em", "dynamic", "dynamic-shared", "self-routing", "cnn", "gap", "dense", "nearest")
    assert {model: (recipe["loss"], recipe["routing_iters"]) for model, recipe in sn.RECIPES.items()} == {
        model: ("margin", 3) if model in ("dynamic", "dynamic-shared", "self-routing") else ("xent", 2)
        for model in sn.MODELS}
    assert all(set(recipe) == {"loss", "routing_iters"} for recipe in sn.RECIPES.values())
    paper = {"n_epochs": 3, "train_azimuths": "300:400", "test_azimuths": "60:280"}
    assert sn.DATA == {"toys": paper, "smallnorb": paper,
                       "shapes": {"n_epochs": 40, "train_azimuths": "0:150", "test_azimuths": "200:330"}}
    assert sn.PRESETS == {"small": {"conv1_channels": 32, "primary_types": 4, "conv_types": 8, "conv2_types": 8},
                          "paper": {"conv1_channels": 64, "primary_types": 8, "conv_types": 16, "conv2_types": 16}}
    assert (sn.STATE_DECAY, sn.NORM_EPS, sn.BETA_U, sn.BETA_A, sn.IDENTITY_NOISE) == (0.99, 1e-5, -1, -2, 0.1)
    assert (sn.VECTOR, sn.CLASS_VECTOR, sn.VOTES_GAIN, sn.CNN_HIDDEN) == (8, 16, 4, 32)


CORE = dict(seed=0, batch_size=32, threads=0, checkpoint="", resume=False, out_json="", quiet=False)
DEFAULTS = {
    "multimnist": CORE | dict(
        n_epochs=12,
        lr=0.01,
        warmup=200,
        lr_schedule="cosine",
        weight_decay=0.0,
        muon=0.02,
        average=0.0,
        n_train=6000,
        n_val=2000,
        n_test=10000,
        digits="auto",
        mnist_dir="",
        min_iou=0.8,
        warp=0.0,
        views=1,
        merge="max",
        fixed_pool=False,
        model="caps",
        preset="deep",
        front_end="deep",
        conv1_channels=16,
        conv3_channels=64,
        norm="batch",
        primary_types=16,
        primary_dim=8,
        digit_dim=16,
        decoder_hidden1=256,
        decoder_hidden2=512,
        routing_iters=3,
        routing_grad="full",
        digit_bias=False,
        recon_weight=0.01,
        cnn_channels=16,
        cnn_head="dense",
        cnn_hidden=0,
        dropout=0.0,
    ),
    "smallnorb": CORE | dict(
        n_epochs=3,
        lr=0.005,
        warmup=0,
        lr_schedule="cosine",
        weight_decay=0.0,
        muon=0.0,
        average=0.0,
        dropout=0.0,
        loss="xent",
        stop_familiar=0.0,
        n_eval=0,
        data="toys",
        toy_seed=0,
        norb_dir="",
        split="azimuth",
        train_azimuths="300:400",
        test_azimuths="60:280",
        elevations="30:70",
        train_elevations="30:40",
        test_elevations="45:70",
        n_train_toys=5,
        n_test=2000,
        n_train_views=6,
        n_test_views=6,
        n_elev=3,
        n_per_combo=5,
        n_test_per_combo=2,
        max_shift=0,
        model="caps",
        preset="small",
        conv1_channels=32,
        primary_types=4,
        conv_types=8,
        conv2_types=8,
        trunk_channels=16,
        primary_kernel=3,
        head_types=5,
        width=0,
        routing_iters=2,
        uniform=False,
        places=False,
        final_lambda=0.0625,
        lambda_schedule="constant",
        no_coord_add=False,
        routing_grad="full",
        baseline="gap",
        ablations=False,
        n_seeds=1,
    )}


@pytest.mark.parametrize("experiment", SCRIPTS)
def test_defaults(experiment):
    found = SCRIPTS[experiment].settings_of(SCRIPTS[experiment].Config())
    assert found == DEFAULTS[experiment]
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in DEFAULTS[experiment].items()}


def test_constants_of_the_core():
    for module in SCRIPTS.values():
        assert (module.BETA1, module.BETA2, module.ADAM_EPS) == (0.9, 0.999, 1e-8)
        assert (module.SHARD_SIZE, module.CHUNK) == (16, 2048)
        assert module.PURPOSES == ("data", "init", "batches", "evaluation")
