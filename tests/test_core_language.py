"""The code, its help and the page are written in the words of the papers, PyTorch and scikit-learn: a list of phrases
that once stood for these words and that nobody outside could understand."""
import re

import pytest
from conftest import EXPERIMENTS, ROOT

PRIVATE = (                        # what not to write; the words to use are the field's
    "told apart", "told from zero", "not told", "comes? along", "named right", "names? (?:both|the two|two) digits",
    "redraw", "redrawn", "as the recipe", "recipe says", "lab book", "kind of CNN", "that averages",
    "takes the largest", "surer", "how sure", "made small", "stopped alike", "as many digits", "share of belief",
    "means nothing to", "a coin", "equal shares", "switched off", "moved further", "moved digits",
    "a matrix for every place", "over places",
    "going on at", "goes on from", "kernels' steps", "a sample's way", "what is told", "stands? (?:in|on|for|at) ",
    "twins?", "ledger", "\\bpins?\\b", "named wrong", "new sides?", "aliveness", "\\bfilms?\\b", "colour", "centre",
    "normalis", "neighbour", "\\bgrey")
PATTERNS = "*.py", "lab/*.py", "explore/*", "workflow/*", "results/*.py", "conf*/**/*.py", "README.md", "docs/*.md"
FILES = sorted(str(path.relative_to(ROOT)) for pattern in PATTERNS for path in ROOT.glob(pattern) if path.is_file())


def offences(text):
    """Return the lines of a text that hold one of the phrases"""
    return [f"line {k}: {found[0]!r}" for k, line in enumerate(text.splitlines(), 1)
            if (found := re.search("|".join(PRIVATE), line, re.I))]


@pytest.mark.parametrize("name", FILES)
def test_no_private_phrase_is_left(name):
    if not name.endswith(".png"):
        assert not offences((ROOT / name).read_text("utf-8"))


def test_help_has_no_private_phrase(help_of):
    assert not {script: found for script, text in help_of.items() if (found := offences(text))}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_public_function_has_a_docstring_that_says_what_it_does(experiment):
    """It begins with a capital letter or a size; a backward function may be described by its forward function"""
    module = EXPERIMENTS[experiment]
    functions = {name: thing for name, thing in vars(module).items() if callable(thing) and not name.startswith("_")
                 and getattr(thing, "__module__", "") == experiment and name != "main"}
    unclear = [name for name, thing in functions.items() if not re.match("[A-Z0-9]", thing.__doc__ or "")
               and not name.endswith("_backward")]
    assert not set(unclear) - {"twice_lr"}                              # whose docstring is a part of --help
