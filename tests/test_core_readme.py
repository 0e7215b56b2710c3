"""README.md: the numbers of its prose are those of the results, and its code is microcapsnet.py's. Its
table of claims is rendered (tests/test_core_results.py)."""
import inspect
import re
import sys

import pytest
from conftest import ROOT

import microcapsnet

sys.path.insert(0, str(ROOT / "results"))
import render  # noqa: E402

README = (ROOT / "README.md").read_text("utf-8")
PROSE = re.sub(r"^```.*?^```|^<!-- table: .*?<!-- end -->", "", README, flags=re.M | re.S)
PROSE = " ".join(PROSE.split())
NUMBERS = [                        # a phrase, with {} for its number; what the number must be
    ("Expect both digits right in {} of the test pairs",
     "value: multimnist main/deep, test_exact_match, percent, plain"),
    ("of the test pairs (mean of {} seeds)",
     "value: multimnist main/deep, test_exact_match, seeds"),
    ("on affine digits at the center of the canvas ({} points against max pooling)",
     "claim: affnist-centered matched-vs-max-pooling"),
    ("[capsules see half of a digit's height and width](docs/reference/claims.md#multimnist-routing) "
     "({} points", "claim: multimnist-routing half-digit"),
    ("; {} after five times as many pairs)", "claim: multimnist-routing half-digit-long")]
SPELLED = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(scope="module")
def results():
    return render.Results(ROOT / "results")


def pattern(phrase):
    """Return the regular expression of a phrase, whose group is its number"""
    before, after = map(re.escape, phrase.split("{}"))
    return f"{before}(.{{1,30}}?){after}"


@pytest.mark.parametrize("phrase, mark", NUMBERS, ids=[mark for _, mark in NUMBERS])
def test_a_number_of_the_prose_is_that_of_the_results(results, phrase, mark):
    kind, what = mark.split(": ", 1)
    number = render.filled(kind, what, results, "NUMBERS")
    source = f"The results give {number} ({mark})."
    said = re.findall(pattern(phrase), PROSE)
    assert len(said) == 1, (
        f"README.md says {phrase!r} {len(said)} times: change the phrase in NUMBERS. {source}")
    digits = str(SPELLED.index(said[0])) if said[0] in SPELLED else said[0]
    assert digits == number, f"README.md says {phrase.format(said[0])!r}. {source}"


def test_every_number_with_an_interval_has_a_source():
    rest = PROSE
    for phrase, _ in NUMBERS:
        rest = re.sub(pattern(phrase), "", rest)
    unknown = re.findall(r"[^ (]+ ± \d+\.?\d*", rest)
    assert not unknown, f"README.md says {unknown}: add the phrase and its mark to NUMBERS"


def test_the_code_is_that_of_the_micro_file():
    shown = re.search(r"^```python\n(.*?)\n```$", README, re.M | re.S)[1]
    source = inspect.getsource(microcapsnet.route)
    lines = source.replace(f'    """{microcapsnet.route.__doc__}"""\n', "").rstrip()
    assert shown == lines, (
        f"README.md's code is not that of microcapsnet.py; paste these lines:\n\n{lines}")
