"""Blocks that several scripts hold between banner lines are the same to the letter, nothing else is there twice, and
every experiment is read in the same order."""
import ast
import collections
import itertools
import re

import pytest
from conftest import EXPERIMENTS, ROOT

SCRIPTS = {path.stem: path.read_text("utf-8") for path in sorted(ROOT.glob("*.py"))}
BUDGETS = {"multimnist_capsnet": 1900, "smallnorb_novel_viewpoint": 2451, "affnist_capsnet": 2022}  # lines of code


def blocks(text):
    """{name: text between its banner lines} of all twin blocks, each of which must be closed before the next begins"""
    found, name, start = {}, None, 0
    for banner in re.finditer(r"^# (END )?SHARED ([a-z0-9 ]+)[^\n]*\n?", text, re.M):
        end, called = banner[1], banner[2].strip()
        if end:
            assert called == name, f"END SHARED {called} closes {name}"
            found[name], name = text[start:banner.start()], None
        else:
            assert name is None and called not in found, f"SHARED {called} begins within {name}, or a second time"
            name, start = called, banner.start()
    assert name is None, f"SHARED {name} is not closed"
    return found


def definitions(text):
    """{name: source} of the functions and classes at top level outside twin blocks, decorators included"""
    for block in blocks(text).values():
        text = text.replace(block, "")
    return {node.name: "\n".join(map(ast.unparse, (*node.decorator_list, node))) for node in ast.parse(text).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def defined_twice(scripts):
    """Where the same source stands, under whatever name, outside the blocks of more than one place"""
    where = collections.defaultdict(list)
    for script, text in scripts.items():
        for name, source in definitions(text).items():
            where[source.replace(f" {name}(", " _(", 1)].append(f"{script}: {name}")
    return [places for places in where.values() if len(places) > 1]


def code_lines(text):
    """Return the number of lines that are neither blank, nor a comment, nor part of a docstring"""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, clean=False):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(1 for k, line in enumerate(text.splitlines(), 1)
               if k not in docstrings and line.strip() and not line.strip().startswith("#"))


SHARED = collections.defaultdict(dict)
for script in SCRIPTS:
    for title, block in blocks(SCRIPTS[script]).items():
        SHARED[title][script] = block


@pytest.mark.parametrize("name", SHARED)
def test_shared_blocks_are_the_same_to_the_letter(name):
    (first, expected), *others = SHARED[name].items()
    for script, text in others:
        for k, (a, b) in enumerate(itertools.zip_longest(expected.splitlines(), text.splitlines())):
            assert a == b, f"SHARED {name}, line {k + 1}: {first} has\n{a}\n{script} has\n{b}"
        assert text == expected
    assert name in ("mnist", "muon") or len(SHARED[name]) > 1, f"SHARED {name} stands in {first} only"


def test_nothing_is_defined_twice_outside_the_blocks():
    """It belongs into a block, or into the script that is imported"""
    assert not defined_twice(SCRIPTS)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_has_the_core_and_is_read_in_one_order(experiment):
    """Docstring, imports, preamble, legend, train; then task, paper, evaluation, settings, twins; and main"""
    text = SCRIPTS[experiment]
    assert {"preamble", "settings", "core"} <= blocks(text).keys()
    marks = (text.split("\n")[1], "\nimport ", "# SHARED preamble", "# END SHARED preamble", "# Axis legend",
             "# One sample, step by step:", "\ndef train(", "# ==== the task", "# ==== the paper", "\ndef forward(",
             "\ndef loss_and_grads(", "# ==== evaluation", "\ndef evaluate(", "# ==== settings", "# SHARED settings",
             "\nclass Config(", "\ndef check_config(", "# ==== shared", "# SHARED core", "# END SHARED core", "\ndef "
                                                                                                              "main(")
    short = re.sub("^# =====+ ", "# ==== ", text, flags=re.M)
    places = [short.index(mark) for mark in marks]
    assert places == sorted(places), marks[next(k for k, (a, b) in enumerate(zip(places, places[1:])) if a > b)]
    assert len(re.findall("^# ==== ", short, re.M)) == 5 and re.match('#!/usr/bin/env python3\n(# .*\n){4}"""', text)
    after = [node for node in ast.parse(text.split("# END SHARED core")[1].split("\n", 1)[1]).body
             if not ast.unparse(node).startswith("LAYERS")]                             # an experiment's own
    assert [type(node) for node in after] == [ast.FunctionDef, ast.If] and after[0].name == "main"
    assert ast.unparse(after[1]) == "if __name__ == '__main__':\n    run_cli(main)"
    shared = short[short.index("# ==== shared"):].split("\n", 1)[1]
    between = re.sub(r"^# SHARED .*?^# END SHARED [^\n]*\n", "", shared.split("# SHARED core")[0], flags=re.M | re.S)
    assert not between.strip(), "among the shared blocks is code that is not shared"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_scripts_stay_within_their_budgets(experiment):
    """Lines of code, without docstrings, comments and blank lines"""
    text, budget = SCRIPTS[experiment], BUDGETS.get(experiment, max(BUDGETS.values()))
    assert code_lines(text) <= budget, f"{code_lines(text)} lines of code: shorten it, or raise its budget above"
