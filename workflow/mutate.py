#!/usr/bin/env python3
"""Are the tests sharp? Small wrong changes, one at a time, to a script's maths: which does no test notice?

    python3 workflow/mutate.py multimnist_capsnet
    python3 workflow/mutate.py smallnorb_novel_viewpoint --functions m_step_forward,e_step_forward

A mutant is one operator, comparison, number, sign or name (sum and mean, maximum and minimum) changed, or one term of a
sum dropped, in the sections of the paper, the networks, the optimizers and the layers. It is caught if a test of the
script fails, or hangs. Survivors are printed: each is a test that is missing, or changes nothing. Those that were found
to change nothing are listed, and why, in workflow/mutants.txt, and not tried.
"""
import argparse
import ast
import collections
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "workflow" / "mutants.txt"
TESTS = {                          # of each script, quick ones
    "multimnist_capsnet": ("multimnist_meaning", "multimnist_gradients", "core_primitives", "core_initial_values",
                           "core_training", "recompute_statistics"),
    "smallnorb_novel_viewpoint": ("smallnorb_routing", "smallnorb_networks", "core_initial_values", "core_training"),
    "affnist_capsnet": ("affnist_networks", "core_initial_values", "core_training")}
SECTIONS = "the paper", "files"   # banners: from the first, up to the second
SWAPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
         ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
         ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And}
NAMES = {"sum": "mean", "mean": "sum", "max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum"}


def changed(node):
    """Wrong ways to write one node, as nodes"""
    def like(**fields):
        return type(node)(**dict(ast.iter_fields(node)) | fields)
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in SWAPS:
        yield like(op=SWAPS[type(node.op)]())
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            yield node.left
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield like(ops=[SWAPS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1 if isinstance(node.value, int) else 2 * node.value or 1.0)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield like(attr=NAMES[node.attr])


def lines_of(text):
    """Numbers of the lines of the sections"""
    lines = text.splitlines()

    def at(title):
        return next(k for k, line in enumerate(lines) if re.match(f"# -{{20,}} {title}", line))
    return range(at(SECTIONS[0]) + 1, at(SECTIONS[1]) + 1)


def functions_of(script):
    """A script's text and, of its sections, those functions that no script before it has: equal ones are tried once"""
    text = (ROOT / f"{script}.py").read_text("utf-8")
    before = [functions_of(other)[1] for other in list(TESTS)[:list(TESTS).index(script)]]
    known, inside = {ast.dump(function) for found in before for function in found}, lines_of(text)
    return text, [function for function in ast.parse(text).body if isinstance(function, ast.FunctionDef)
                  and function.lineno in inside and ast.dump(function) not in known]


def nodes_of(tree):
    """A node and all below, but for those of a text's formatting, and the -1 of a reshape, for which -2 does as well"""
    yield tree
    reshapes = isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute) and tree.func.attr == "reshape"
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.JoinedStr) and not (reshapes and isinstance(node, ast.UnaryOp)):
            yield from nodes_of(node)


def harmless():
    """{(script, function, changed line)} of the mutants that are listed"""
    rows = [line.split(" :: ") for line in LISTED.read_text("utf-8").splitlines() if not line.startswith("#")]
    return {(script, function, line) for script, function, line, why in rows}


def mutants(script, names=()):
    """(function, the line that is changed, without its comment, the whole wrong text) of all"""
    text, functions = functions_of(script)
    lines = text.splitlines(keepends=True)
    for function in functions:
        for statement in function.body if not names or function.name in names else ():
            for node in nodes_of(statement):
                for wrong in changed(node):
                    (first, start), (last, end) = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
                    before = "".join(lines[:first - 1]) + lines[first - 1].encode()[:start].decode()
                    after = lines[last - 1].encode()[end:].decode() + "".join(lines[last:])
                    new = ast.unparse(ast.fix_missing_locations(wrong))
                    new = new if isinstance(node, ast.AugAssign) else f"({new})"
                    wrong_text = before + new + after
                    yield function.name, wrong_text.splitlines()[first - 1].split("  #")[0].strip(), wrong_text


class Calls:
    """A plugin of pytest's that notes which tests call which functions of a script, the quickest first"""

    def __init__(self, script):
        self.file, self.took, self.tests_of = str(ROOT / f"{script}.py"), {}, collections.defaultdict(set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        def look(frame, event, _):
            if frame.f_code.co_filename == self.file:
                self.tests_of[frame.f_code.co_name].add(item.nodeid)
        for function in vars(sys.modules[Path(self.file).stem]).values():
            getattr(function, "cache_clear", int)()
        start = time.perf_counter()
        threading.setprofile(look)                     # of the threads that the test starts
        sys.setprofile(look)
        result = yield
        sys.setprofile(None)
        threading.setprofile(None)
        self.took[item.nodeid] = time.perf_counter() - start
        return result

    def of(self, function):
        return sorted(self.tests_of[function], key=self.took.get)


def calls_of(script):
    calls = Calls(script)
    if pytest.main(["-qq", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", str(ROOT),
                    *(str(ROOT / "tests" / f"test_{name}.py") for name in TESTS[script])], plugins=[calls]):
        sys.exit("error: the tests fail as it is; mend what they name first")
    return calls


def survives(script, mutant, tests, timeout):
    if not tests:
        return True
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tests", "workflow", "lab"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in TESTS:
            (Path(folder) / "results" / name).mkdir(parents=True)
        for path in ROOT.glob("*.py"):
            shutil.copy(path, folder)
        (Path(folder) / f"{script}.py").write_text(mutant[-1], "utf-8")
        command = [sys.executable, "-m", "pytest", "-qx", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore", *tests]
        try:
            return subprocess.run(command, cwd=folder, capture_output=True, timeout=timeout).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("script", choices=TESTS)
    parser.add_argument("--functions", default="", help="names, comma-separated; all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a mutant counts as caught")
    args = parser.parse_args()
    known = harmless()
    every = [mutant for mutant in mutants(args.script, [name for name in args.functions.split(",") if name])
             if (args.script, *mutant[:2]) not in known]
    if not every or args.threads < 1:                  # before the tests, which take minutes
        parser.error("--threads: at least 1" if args.threads < 1 else f"--functions {args.functions}: {args.script}.py "
                     "has none of them, or all their mutants are in mutants.txt")
    survivors, calls = 0, calls_of(args.script)
    with ThreadPoolExecutor(args.threads) as pool:
        tried = pool.map(lambda mutant: survives(args.script, mutant, calls.of(mutant[0]), args.timeout), every)
        for mutant, survived in zip(every, tried):
            if survived:
                print(" :: ".join((args.script, *mutant[:2])), flush=True)
            survivors += survived
    print(f"{args.script}: caught {len(every) - survivors} of {len(every)} not listed")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
