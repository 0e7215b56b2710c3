"""docs/exercises.md: `git apply` takes its diffs; the mistakes are caught by the tests that it says,
and not by the others that it names; what it claims of results holds in them.

It names test functions, not their cases: such a test fails if one of its cases does."""
import ast
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import EXPERIMENTS, ROOT

sys.path.insert(0, str(ROOT / "results"))
import render

TEXT = (ROOT / "docs" / "exercises.md").read_text("utf-8")
SIGNS = {"above zero": lambda mean, half: mean > half, "below zero": lambda mean, half: -mean > half,
         "including zero": lambda mean, half: abs(mean) <= half}


def exercise(chapter, title, text):
    """What one section of the document says: its diff and the file that holds it; tests that fail and
    that pass; of one about evidence the Python that its command runs instead"""
    def blocks(kind):
        return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S)
    (command,) = blocks("bash")
    code = re.fullmatch(r"python3 - <<'END'\n(.*)END\n", command, re.S)
    found = SimpleNamespace(chapter=chapter, title=title, text=text, command=command, code=code and code[1])
    if not code:
        (found.diff,), (named,) = blocks("diff"), blocks("text")
        found.file = ROOT / "docs" / "exercises" / f"{int(title.split('.')[0]):02d}.diff"
        found.fails, found.passes = (re.findall(rf'^{how} +"(.*)"$', named, re.M) for how in ("fails", "passes"))
    return found


EXERCISES = [exercise(chapter, title, text)
             for chapter, part in re.findall(r"^## (.*?)$(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
             for title, text in re.findall(r"^### (.*?)$(.*?)(?=^### |\Z)", part, re.M | re.S)]
CODE, EVIDENCE = ([one for one in EXERCISES if bool(one.code) == about] for about in (False, True))


def by_title(exercises):
    return pytest.mark.parametrize("one", exercises, ids=lambda one: one.title)


def test_every_section_is_an_exercise_of_one_kind():
    assert CODE and EVIDENCE and all(one.fails and one.passes for one in CODE)


@by_title(CODE)
def test_the_tests_that_are_named_exist(one):
    """By file and function, so that a case may be renamed"""
    for test in (*one.fails, *one.passes):
        file, _, function = test.partition("::")
        functions = re.findall(r"^def (test_\w+)", (ROOT / file).read_text("utf-8"), re.M)
        assert function in functions, f"{test}: name a test function of {file}"


@by_title(CODE)
def test_the_diff_that_is_shown_is_the_file_and_applies(one):
    """If it no longer applies: make the change by hand, then git diff > docs/exercises/NN.diff, and show it anew"""
    assert one.file.read_text("utf-8") == one.diff
    done = subprocess.run(["git", "apply", "--check", one.file], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in one.file.parent.iterdir()) == sorted(other.file.name for other in CODE)


def wrong_copy(one, folder):
    """A copy of the scripts and their tests with an exercise's mistake"""
    for name in ("tests", "workflow", "lab", "conformance"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in EXPERIMENTS:                                            # a folder in results/ makes it one
        (folder / "results" / name).mkdir(parents=True)
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, folder)
    subprocess.run(["git", "apply", one.file], cwd=folder, check=True)


def outcomes(one):
    """What becomes of the tests that an exercise names: {test: the worst outcome of its cases, or, if
    none was run, what pytest printed}"""
    with tempfile.TemporaryDirectory() as folder:
        wrong_copy(one, Path(folder))
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "-p", "no:cacheprovider",
                               *one.fails, *one.passes], cwd=folder, env=env, capture_output=True, text=True,
                              timeout=1000)
    cases = collections.defaultdict(set)
    for outcome, test in re.findall(r"^(PASSED|FAILED|ERROR) (\S+?::\w+)", done.stdout, re.M):
        cases[test].add(outcome)
    return {test: next((outcome for outcome in ("ERROR", "FAILED", "PASSED") if outcome in cases[test]),
                       done.stdout[-1000:]) for test in (*one.fails, *one.passes)}


# The first of each chapter that takes seconds; affNIST's take longer
FIRST = [next(one for one in CODE if one.chapter == chapter) for chapter in dict.fromkeys(one.chapter for one in CODE)
         if chapter != "affNIST"]


@by_title([one if one in FIRST else pytest.param(one, marks=pytest.mark.slow) for one in CODE])
def test_exactly_the_named_tests_catch_it(one):
    """In a process of its own"""
    assert outcomes(one) == dict.fromkeys(one.fails, "FAILED") | dict.fromkeys(one.passes, "PASSED")


@by_title(EVIDENCE)
def test_a_claim_holds_where_it_is_said_to_hold_and_not_where_it_is_not(one):
    """The command prints a number for each seed, then all of them; a mark is followed by where its interval lies"""
    done = subprocess.run([sys.executable, "-c", one.code], cwd=ROOT, capture_output=True, text=True)
    (first, second), result_files = done.stdout.splitlines(), render.Results(ROOT / "results")
    by_seed = ast.literal_eval(first)
    alone = re.findall(r"seed (\d+) alone: (\w+\szero)", one.text)
    assert f"-->{render.with_signs(second)}<!-- end --> points" in one.text
    said = re.findall(r"<!-- value: ([^>]*) -->[^<]*<!-- end --> points, (\w+ zero)", one.text)
    assert alone and {"above zero", "including zero"} <= {sign for _, sign in said}
    for seed, sign in alone:
        assert SIGNS[" ".join(sign.split())](by_seed[int(seed)], 0), seed
    for mark, sign in said:
        *what, _ = render.asked(mark)
        assert SIGNS[sign](*render.mean_and_interval(result_files.samples(*what))), mark
