"""The initial value of every parameter of every network, by the rule that the documents give for it.

Every network: all models with all presets, all models with each other choice of each setting, and all
networks of the results. The rules know nothing of the code's own table of gains: they say what a
parameter does. A new parameter needs a rule here.
"""
import functools
import itertools
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import EXPERIMENTS, configs, golden, runs

HERE = f"tests/{Path(__file__).name}"

# -------------------------------------------------------------- the rules


def constant(value):
    """Return the rule of parameters that all start at a value"""
    def constant_value(of):
        return value, 0
    return constant_value


def inputs_of(of):
    """Return how many numbers a unit adds up: of the decoder's first layer those of one class vector,
    since the others are masked"""
    return 16 if of.name == "dec1_w" else math.prod(of.shape[:-1])


def before_relu(of):
    """He et al. 2015: a ReLU follows"""
    return 0, 2 / inputs_of(of)


def before_no_relu(of):
    """Glorot and Bengio 2010: none follows"""
    return 0, 1 / inputs_of(of)


def dense(of):
    """Layers fc1, fc2, ... and dec1, dec2, ...: a ReLU follows all but the last, which gives scores or
    pixels. The dense layer of vector-dense takes the place of transformation matrices"""
    if of.config.model == "vector-dense" and of.name == "fc1_w":
        return 0, 0.01 / inputs_of(of)
    kind, number = re.fullmatch(r"([a-z]+)(\d+)_w", of.name).groups()
    is_last = f"{kind}{int(number) + 1}_w" not in of.shapes
    return before_no_relu(of) if is_last else before_relu(of)


def transformation(of):
    """Matrices of vector capsules, which have 8 elements. MultiMNIST: variance 0.01 over a capsule's
    elements; affNIST 16, smallNORB 4, over the elements of all primary capsules"""
    if of.experiment == runs.MULTI:
        return 0, 0.01 / 8
    gain = {runs.AFF: 16, runs.NORB: 4}[of.experiment]
    return 0, gain / (8 * of.n_primary_capsules())


def near_identity(of):
    """Matrices of poses, 4x4"""
    return np.eye(4), 0.1 ** 2


RULES = {                          # a pattern of names: (start, variance of the noise around it)
    r"\w+_b": constant(0), r"\w+_norm_beta": constant(0), r"\w+_norm_gamma": constant(1),
    r"\w+_beta_u": constant(-1), r"\w+_beta_a": constant(-2),
    r"(conv|branch)\d_w": before_relu, r"primary_w": before_no_relu, r"(fc|dec)\d_w": dense,
    r"W|coordinate_W": transformation, r"(conv|conv2|class)_W": near_identity}


# -------------------------------------------------------------- the networks

def choices_of(f):
    """Return the values of a setting that has few"""
    return f.metadata.get("choices", (True, False) if f.type is bool else ())


def asked_networks(experiment):
    """Yield what is given for each network: {setting: value}"""
    settings = EXPERIMENTS[experiment].SETTINGS
    models, presets = (choices_of(f) for name in ("model", "preset") for f in settings if f.name == name)
    for model, preset in itertools.product(models, presets):
        yield {"model": model, "preset": preset}
    for model, f in itertools.product(models, settings):
        for value in choices_of(f):
            yield {"model": model, f.name: value}


def config_of(module, given):
    """Return the Config of what is given, None if it is refused"""
    try:
        config = module.Config(**given)
        module.param_shapes(config)
    except module.InputError:
        return None
    return config


def networks_of(experiment):
    """Return a Config for each network, {its model and shapes: Config}"""
    module = EXPERIMENTS[experiment]
    found = [config_of(module, given) for given in asked_networks(experiment)]
    for name, flags in golden.wanted():
        if name == experiment:
            found += configs(experiment, shlex.split(flags))
    return {(config.model, *module.param_shapes(config).items()): config for config in found if config}


class Alternating(np.random.Generator):
    """Its normal numbers are 1, -1, 1, ...: their mean square is exactly 1"""

    def standard_normal(self, size=None, dtype=float, out=None):
        signs = np.ones(math.prod(size), dtype)
        signs[1::2] = -1
        return signs.reshape(size)


def n_primary_capsules(module, config, params):
    """Return how many vector capsules a network has: those that it computes of an image"""
    shape = {runs.AFF: lambda: (40, 40) if config.task == "affnist" else (28, 28),
             runs.NORB: lambda: (32, 32, 1 if config.data == "shapes" else 2)}[module.EXPERIMENT]()
    out, _ = module.forward(params, np.zeros((1, *shape), np.float32), config, statistics={})
    return out["u"].shape[1]


def faults(experiment, config, params):
    """Yield what is wrong with the initial parameters of a network, a text for each parameter"""
    module = EXPERIMENTS[experiment]
    shapes = module.param_shapes(config)
    count = functools.partial(n_primary_capsules, module, config, params)
    for name, p in params.items():
        rule = next((rule for pattern, rule in RULES.items() if re.fullmatch(pattern, name)), None)
        if rule is None:
            yield f"{name}: no rule says its initial value. Add one to RULES of {HERE}"
            continue
        start, variance = rule(SimpleNamespace(
            experiment=experiment, config=config, name=name, shape=p.shape, shapes=shapes,
            n_primary_capsules=count))
        noise = (p - start).astype(float)
        if not np.isclose((noise ** 2).mean(), variance, rtol=1e-4, atol=0):
            yield (f"{name}: variance {(noise ** 2).mean():.3g} around its start, "
                   f"{variance:.3g} by {rule.__name__} in {HERE}")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_parameter_of_every_network_starts_as_its_rule_says(experiment, monkeypatch):
    module, wrong = EXPERIMENTS[experiment], {}
    monkeypatch.setattr(module, "rng_for", lambda *_: Alternating(np.random.PCG64(0)))
    for (model, *_), config in networks_of(experiment).items():
        params = module.init_params(config)
        assert {name: p.shape for name, p in params.items()} == module.param_shapes(config)
        assert {p.dtype for p in params.values()} <= {np.dtype(np.float32)}
        for fault in faults(experiment, config, params):
            wrong.setdefault(f"{model}, {fault}", config)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_model_and_preset_is_among_the_networks(experiment):
    settings, found = EXPERIMENTS[experiment].SETTINGS, networks_of(experiment).values()
    for name in "model", "preset":
        choices, = (choices_of(f) for f in settings if f.name == name)
        assert {getattr(config, name) for config in found} == set(choices)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_initial_weights_are_normal_numbers_of_their_seed(experiment):
    """Of the default network: 68.3% lie within a standard deviation, 95.4% within two. Each parameter has
    numbers of its own"""
    module, first_numbers = EXPERIMENTS[experiment], []
    params = module.init_params(module.Config())
    again, other = (module.init_params(module.Config(seed=seed)) for seed in (0, 1))
    for name, p in params.items():
        noise = p - np.eye(4, dtype=p.dtype) if name.endswith("_W") and p.shape[-2:] == (4, 4) else p
        assert np.array_equal(p, again[name])
        if p.std() > 0:
            assert not np.array_equal(p, other[name])
            first_numbers.append(noise.ravel()[:40])
            margin = 5 / noise.size ** 0.5
            assert abs(noise.mean()) < margin * noise.std()
            for k, share in ((1, 0.683), (2, 0.954)):
                assert abs((abs(noise) < k * noise.std()).mean() - share) < margin / 2, name
    between = np.corrcoef(first_numbers) - np.eye(len(first_numbers))
    assert len(first_numbers) >= 5 and abs(between).max() < 0.8


def test_a_parameter_without_a_rule_and_a_wrong_gain_are_faults():
    """The check itself, on a small network"""
    module, name = EXPERIMENTS[runs.MULTI], "conv1_w"
    config = module.Config(model="cnn")
    params = module.init_params(config)
    right = math.sqrt(2 / math.prod(params[name].shape[:-1])) * np.ones_like(params[name])
    assert not list(faults(runs.MULTI, config, {name: right}))
    for wrong in 1.01 * right, right / math.sqrt(2), 0 * right:
        assert len(list(faults(runs.MULTI, config, {name: wrong}))) == 1
    fault, = faults(runs.MULTI, config, {"attention_W": right})
    assert "attention_W: no rule" in fault and HERE in fault
