"""README.md: the numbers of its prose are those of the results, and its code is microcapsnet.py's. Its
table of claims is rendered (tests/test_core_results.py)."""
import inspect
import re
import sys
import textwrap

import pytest
from conftest import ROOT

import microcapsnet

sys.path.insert(0, str(ROOT / "results"))
import claims  # noqa: E402
import render  # noqa: E402

README = (ROOT / "README.md").read_text("utf-8")
PROSE = re.sub(r"^```.*?^```|^<!-- table: .*?<!-- end -->", "", README, flags=re.M | re.S)
PROSE = " ".join(PROSE.split())
NUMBERS = [                        # a phrase, with {} for its number; what the number must be
    ("reads both digits correctly in {} of the test pairs",
     "value: multimnist main/deep, test_exact_match, percent, plain"),
    ("of the test pairs (mean of {} seeds)",
     "value: multimnist main/deep, test_exact_match, seeds"),
    ("on affine digits at the center of the canvas ({} points against max pooling)",
     "claim: affnist-centered matched-vs-max-pooling"),
    ("at novel azimuths of toys ({} points)", "test: smallnorb-azimuth paper-small-vs-wide-cnn-gap"),
    ("[capsules see half of a digit's height and width](docs/reference/claims.md#multimnist-routing) "
     "({} points)", "claim: multimnist-routing half-digit")]
SPELLED = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
CODE = ("route", "b = np.zeros", "b = b +")             # function; how its first and last line shown begin


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
    if kind == "test":                                  # of a claim: with planned seeds, and toys
        claim, name = what.split()
        (test,) = [test for test in claims.BY_NAME[claim].tests if test.name == name]
        number = render.with_signs(render.test_number(results, test))
    else:
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


def excerpt(name, first, last):
    """Return the lines of a function of the script from the one that begins with `first` to the
    next one that begins with `last`"""
    lines = inspect.getsource(getattr(microcapsnet, name)).splitlines()
    begins = [k for k, line in enumerate(lines) if line.strip().startswith(first)]
    assert begins, f"{name} has no line that begins with {first!r}: change CODE"
    ends = [k for k, line in enumerate(lines) if line.strip().startswith(last) and k > begins[0]]
    assert ends, f"{name} has no later line that begins with {last!r}: change CODE"
    return textwrap.dedent("\n".join(lines[begins[0]:ends[0] + 1]))


def test_the_code_is_that_of_the_micro_file():
    shown = re.search(r"^```python\n(.*?)\n```$", README, re.M | re.S)[1]
    lines = excerpt(*CODE)
    assert shown == lines, (
        f"README.md's code is not that of microcapsnet.py; paste these lines:\n\n{lines}")
