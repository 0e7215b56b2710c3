"""The rules that keep an experiment one short file: it is read in one order, imports nothing of the project, runs
alone, shares its primitives to the letter with the others, has the names that programs outside ask for, and stays in
its budget."""
import ast
import collections
import inspect
import re
import sys

import lab

import pytest
from conftest import EXPERIMENTS, ROOT, runs

TEXTS = {name: (ROOT / f"{name}.py").read_text("utf-8") for name in EXPERIMENTS}
CODE = {runs.MULTI: 1000, runs.AFF: 1100, runs.NORB: 1650}          # lines without docstrings, comments and blanks
OVER = {runs.MULTI: 25, runs.AFF: 30}                 # lines too many: shorten, but not below 3% of a step
TESTS = 8000                       # lines of all tests
CONTRACT = set(re.findall(r"\w+", inspect.getdoc(lab).partition("Module:")[2].partition("Of digits:")[0]))
EXPORTS = {                        # of one experiment: names that only figures, animations and other programs use
    runs.MULTI: set(), runs.AFF: {"IDENTITY"}, runs.NORB: {"CLASS_NAMES"}}
every_experiment = pytest.mark.parametrize("experiment", EXPERIMENTS)
own = dict.fromkeys
DIFFERENT = {                      # functions and classes of one name that are no primitives: why their texts differ
    **own("Config configs_of".split(), "settings and their rules are the experiment's"),
    **own("train main".split(), "the number of samples of an epoch, and which data are loaded"),
    **own("evaluate evaluate_test validate forward_shards test_metrics".split(), "metrics are the task's"),
    **own("load_data fit_to_data data_name epoch_samples to_batch".split(), "the data are the task's"),
    **own("convolutions convolutions_forward convolutions_backward param_shapes init_params matched_width "
          "loss_and_grads forward classification_loss capsnet_head_forward capsnet_head_backward "
          "vector_head_forward vector_head_backward cnn_head_forward cnn_head_backward".split(),
          "the networks are the experiment's"),
    **own(["check_classes"], "of smallNORB: all data have the same classes"),
    **own("routing_forward routing_backward".split(), "of affNIST: the squash can be left out"),
    **own("optimizer_step".split(), "of smallNORB: no Muon")}


def code_lines(text):
    """Return the number of lines that are neither blank, nor a comment, nor part of a docstring"""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, clean=False):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(1 for k, line in enumerate(text.splitlines(), 1)
               if k not in docstrings and line.strip() and not line.strip().startswith("#"))


def definitions(text):
    """Return {name: source} of the functions and classes at top level"""
    lines = text.splitlines()
    return {node.name: "\n".join(lines[node.lineno - 1:node.end_lineno]) for node in ast.parse(text).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def top_level(text):
    """Return the names that a script defines or imports at top level"""
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        for name in (n for n in ast.walk(node) if isinstance(node, ast.Assign) and isinstance(n, ast.Name)):
            if isinstance(name.ctx, ast.Store):
                yield name.id
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)


# -------------------------------------------------------------- one text for one name

def test_functions_of_one_name_are_the_same_text_in_all_experiments():
    found = collections.defaultdict(set)
    for text in TEXTS.values():
        for name, source in definitions(text).items():
            found[name].add(source)
    differing = {name for name, sources in found.items() if len(sources) > 1}
    assert not differing - DIFFERENT.keys(), "make them the same text, or give them other names"
    assert not DIFFERENT.keys() - differing, "these need no exception"


def test_nothing_is_written_twice_under_two_names():
    where = collections.defaultdict(set)
    for text in TEXTS.values():
        for name, source in definitions(text).items():
            where[source.replace(f" {name}(", " _(", 1)].add(name)
    assert not [names for names in where.values() if len(names) > 1]


@every_experiment
def test_no_name_at_top_level_is_unused(experiment):
    text = TEXTS[experiment]
    names = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    unused = set(top_level(text)) - {name.id for name in names if isinstance(name.ctx, ast.Load)} - CONTRACT - {"_"}
    assert unused == EXPORTS.get(experiment, set())
    others = "".join(path.read_text("utf-8") for folder in ("", "lab", "workflow", "conformance")
                     for path in (ROOT / folder).glob("*.py") if path.stem not in EXPERIMENTS)
    assert all(f".{name}" in others for name in unused), "nobody outside uses these"


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
    assert len(CONTRACT) > 15 and not {name for name in CONTRACT if not hasattr(module, name)}
    assert module.EXPERIMENT == experiment and module.InputError.__name__ == "InputError"
    assert all(path.is_file() for path in module.PRETRAINED) and isinstance(module.PRETRAINED, tuple)
    assert {"model", "preset", "seed", "n_epochs", "threads", "quiet"} <= {f.name for f in module.SETTINGS}
    known = {"help", "low", "high", "choices", "only", "runtime", "test", "alias"}
    assert not {f.name for f in module.SETTINGS if not f.metadata.keys() <= known or not f.metadata["help"]}
    train = inspect.signature(module.train).parameters
    assert list(train) == ["config", "data", "state", "each_step", "each_epoch", "dtype"]
    for name, first in (("evaluate_test", "weights data config workers"), ("save", "path config state groups"),
                        ("batch_gradients", "params samples rows config workers"),
                        ("check_same", "path theirs given may_differ"), ("epoch_samples", "data epoch config"),
                        ("loss_and_grads", "params batch config share")):
        assert " ".join(inspect.signature(getattr(module, name)).parameters) == first, name


# -------------------------------------------------------------- order and budgets

@every_experiment
def test_an_experiment_is_read_in_one_order(experiment):
    """Docstring, settings, training, task, paper, networks, optimizers, layers, data, files and command line; the loop
    is among the first 250 lines, routing in the first 45%"""
    text = TEXTS[experiment]
    assert re.match('#!/usr/bin/env python3\n(# .*\n){4}"""', text)
    sections = re.findall(r"^# -{62} (\w+)", text, re.M)
    assert sections[:4] == ["settings", "training", "the", "the"] and sections[-1] == "save"
    assert sections[-4:-1] in (["optimizers", "layers", "files"], ["optimizer", "layers", "files"])
    lines = text.splitlines()

    def at(start):
        return next((k for k, line in enumerate(lines, 1) if line.startswith(start)), 0)
    assert 0 < at("def train(") < 250
    routing = at("def em_routing_forward(") or at("def routing_forward(")
    assert 0 < routing < 0.45 * len(lines)
    assert "\n".join(lines[-2:]) == 'if __name__ == "__main__":\n    run_cli(main)'


@every_experiment
def test_an_experiment_stays_within_its_budget(experiment):
    """Lines of code; an experiment that is not listed may have as many as the longest"""
    budget = CODE.get(experiment, max(CODE.values())) + OVER.get(experiment, 0)
    assert code_lines(TEXTS[experiment]) <= budget, "shorten it: budgets are not raised"


def test_lab_stays_within_its_budget():
    sizes = {path.name: code_lines(path.read_text("utf-8")) for path in (ROOT / "lab").glob("*.py")}
    assert sum(sizes.values()) <= 900 and max(sizes.values()) <= 270, sizes


def test_the_tests_stay_within_their_budget():
    sizes = {path.name: len(path.read_text("utf-8").splitlines()) for path in (ROOT / "tests").glob("*.py")}
    lines = sum(sizes.values())
    assert lines <= TESTS, sizes
