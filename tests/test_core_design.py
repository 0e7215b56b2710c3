"""What holds between an experiment's script and the rest: it imports NumPy alone, its numeric
primitives are those of the other scripts to the letter, its functions say what they do, and it has
the names that programs outside ask for."""
import ast
import functools
import inspect
import re
import sys

import lab

import pytest
from conftest import EXPERIMENTS, ROOT, runs

TEXTS = {name: (ROOT / f"{name}.py").read_text("utf-8") for name in EXPERIMENTS}
MODULE = inspect.getdoc(lab).partition("Module:")[2].partition("Of digits:")[0]
CONTRACT = set(re.findall(r"\w+", MODULE))
every_experiment = pytest.mark.parametrize("experiment", EXPERIMENTS)

# Numeric primitives: what several scripts have under one of these names has one text in all of
# them, so that a test of one copy is a test of all.
PAIRS = "squash votes softmax routing lengths add_coordinates conv2d linear norm max_pool"
PRIMITIVES = [f"{name}_{way}" for name in PAIRS.split() for way in ("forward", "backward")]
PRIMITIVES += "margin_loss cross_entropy reconstruction_loss".split()
PRIMITIVES += "schedule adam_step orthogonalize muon_step update_running_statistics".split()
PRIMITIVES += "im2col im2col_rows im2col_band col2im window_corners".split()
PRIMITIVES += "add_product sgemm openblas sigmoid as_view".split()



@functools.cache
def definitions(text):
    """Return {name: source} of the functions at top level, with their decorators"""
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1:node.end_lineno])
    return found


def copies_of(name, texts=TEXTS):
    """Return {experiment: source} of a primitive"""
    found = {experiment: definitions(text)[name] for experiment, text in texts.items()
             if name in definitions(text)}
    return found


def constants_of(source, module):
    """Return {name: value} of the numbers and texts of a module that a function reads"""
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    values = {name: getattr(module, name) for name in names if hasattr(module, name)}
    return {name: value for name, value in values.items() if isinstance(value, (int, float, str))}


# -------------------------------------------------------------- one text for one primitive

@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_primitive_has_the_same_text_in_all_scripts_that_have_it(name):
    copies = copies_of(name)
    assert len(copies) > 1, f"fewer than two scripts have {name}: take it out of PRIMITIVES"
    first, *others = copies
    for other in others:
        assert copies[other] == copies[first], f"{first}.py and {other}.py differ: change all copies"


@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_primitive_reads_the_same_constants_in_all_scripts_that_have_it(name):
    known = {}
    for experiment in copies_of(name):
        source = definitions(TEXTS[experiment])[name]
        for constant, value in constants_of(source, EXPERIMENTS[experiment]).items():
            assert known.setdefault(constant, value) == value, f"{experiment}.py: {constant}"


@pytest.mark.parametrize("name", ["routing_forward", "routing_backward", "adam_step"])
@every_experiment
def test_a_renamed_local_in_one_copy_is_a_difference(name, experiment):
    """The check itself: one local, renamed in one script"""
    source = definitions(TEXTS[experiment])[name]
    body = ast.parse(source).body[0]
    local = next(node.id for node in ast.walk(body)
                 if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    renamed = re.sub(rf"\b{local}\b", f"{local}_", source)
    texts = TEXTS | {experiment: TEXTS[experiment].replace(source, renamed)}
    assert len(set(copies_of(name, texts).values())) == 2


# -------------------------------------------------------------- alone

@every_experiment
def test_an_experiment_imports_nothing_but_the_standard_library_and_numpy(experiment):
    """but SciPy where a user has affNIST's files"""
    imported = {name.split(".")[0] for node in ast.walk(ast.parse(TEXTS[experiment])) for name in (
        [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names] if
        isinstance(node, ast.Import) else [])}
    assert imported - sys.stdlib_module_names - ({"scipy"} if experiment == runs.AFF else set()) == {"numpy"}


# -------------------------------------------------------------- the contract

@every_experiment
def test_an_experiment_has_what_programs_outside_ask_for(experiment):
    """The names that lab/__init__.py lists, and settings that say what they are"""
    module = EXPERIMENTS[experiment]
    assert {"train", "Config"} <= CONTRACT and not {name for name in CONTRACT if not hasattr(module, name)}
    assert module.EXPERIMENT == experiment and module.InputError.exit_code == 2
    assert all(path.is_file() for path in module.PRETRAINED) and isinstance(module.PRETRAINED, tuple)
    assert {"model", "preset", "seed", "n_epochs", "threads", "quiet"} <= {f.name for f in module.SETTINGS}
    known = {"help", "low", "high", "choices", "only", "runtime", "test", "alias", "metavar"}
    assert not {f.name for f in module.SETTINGS if not f.metadata.keys() <= known or not f.metadata["help"]}
    train = inspect.signature(module.train).parameters
    assert list(train) == ["config", "data", "state", "each_step", "each_epoch", "dtype"]
    for name, first in (("evaluate_test", "weights data config workers"), ("save", "path config state"),
                        ("batch_gradients", "params samples rows config workers"),
                        ("check_same", "path theirs given may_differ"), ("epoch_samples", "data epoch config"),
                        ("loss_and_grads", "params batch config share")):
        assert " ".join(inspect.signature(getattr(module, name)).parameters) == first, name


@every_experiment
def test_every_public_function_says_what_it_does(experiment):
    """In a docstring; a backward function may be described by its forward function"""
    functions = {name: thing for name, thing in vars(EXPERIMENTS[experiment]).items()
                 if inspect.isfunction(thing) and thing.__module__ == experiment}
    silent = [name for name, function in functions.items()
              if not function.__doc__ and not name.startswith("_") and not name.endswith("_backward")]
    assert not set(silent) - {"main"}
