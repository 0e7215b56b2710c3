"""The rule that decides a claim, from its tests and what they measured. It has no choices: which
tests there are, and the facts of each, stand in workflow/claims.py and workflow/history.py.

The nearest tests decide. How near a test is to the paper's is said by four facts, in this order:

    data       the paper's protocol, trained to a plateau; its protocol, shorter; ours
    task       as in the paper, with its matching; another
    control    of the paper's kind; another
    network    the paper's; its shape with fewer channels; another

All tests that share the nearest combination are asked. A test that does not qualify is dropped. If
none is left, or if those that are left differ, the claim is undecided: a farther test never
decides.

A test qualifies with at least three planned seeds and an interval; where networks are matched, four fifths of them
have to be matched; and, if its interval excludes zero, the side that is ahead must not have been
tuned with more hyperparameter configurations than the other. A number of configurations that was
not recorded counts as more.

From the 95% interval [low, high] of an effect, and the paper's effect p > 0:

    reproduced     low > 0 and high >= p
    smaller        low > 0 and high < p
    not found      the interval includes 0 and excludes p
    opposite       high < 0
    undecided      the interval includes 0 and p

Of an accuracy p: reached (low >= p), lower (high < p), otherwise undecided.
"""
import math
from typing import NamedTuple

DATA = ("paper", "shorter", "ours")
TASK = ("paper", "another")
CONTROL = ("paper", "another", "")             # "": an accuracy, which has no control
NETWORK = ("paper", "narrow", "another")
LEAST_SEEDS, LEAST_MATCHED = 3, 0.8
FOR, AGAINST, NONE = ("reproduced", "smaller", "reached"), ("opposite", "lower"), ("not found",)


class Measured(NamedTuple):
    """What was measured in a test, with the planned seeds alone, in the unit of the paper's number"""
    n_planned: int                 # seeds, or draws of the data, that were planned
    n: int                         # of those that have been run and, if asked for, matched
    mean: float
    low: float                     # ends of the 95% interval, nan if there is none
    high: float
    tried: tuple                   # configurations for either arm; None: not recorded
    lacks: str = ""                # why there is no interval although there are seeds


def distance(test):
    """Return how far a test is from the paper's, to be compared: the smallest is the nearest"""
    return (DATA.index(test.data), TASK.index(test.task), CONTROL.index(test.control),
            NETWORK.index(test.network))


def nearest(tests):
    """Return the tests that share the smallest distance"""
    least = min(map(distance, tests))
    return [test for test in tests if distance(test) == least]


def outcome(measured, paper, is_accuracy=False):
    """Return the verdict that one test alone would give"""
    if measured.n < LEAST_SEEDS or not math.isfinite(measured.low):
        return "undecided"
    if is_accuracy:
        if measured.low >= paper:
            return "reached"
        return "lower" if measured.high < paper else "undecided"
    if measured.high < 0:
        return "opposite"
    if measured.low > 0:
        return "reproduced" if measured.high >= paper else "smaller"
    return "undecided" if measured.high >= paper else "not found"


def why_not(measured, is_matched, is_accuracy=False):
    """Return why a test does not qualify; "" if it does"""
    if measured.lacks:
        return measured.lacks
    if is_matched and measured.n_planned and measured.n < LEAST_MATCHED * measured.n_planned:
        return f"{measured.n} of {measured.n_planned} planned seeds are matched"
    if measured.n < LEAST_SEEDS:
        seeds = "seed has" if measured.n == 1 else "seeds have"
        return f"{measured.n or 'no'} planned {seeds} been run"
    if is_accuracy or measured.low <= 0 <= measured.high:
        return ""
    ahead, behind = measured.tried if measured.low > 0 else measured.tried[::-1]
    if ahead is None:
        return "the configurations tried for the side that is ahead were not recorded"
    if behind is None or ahead <= behind:
        return ""
    return f"the side ahead had more configurations, {ahead} against {behind}"


def decide(tests, measure, paper, is_accuracy=False):
    """Return the verdict on a claim and its reason, in words.

    tests: with labels, the four facts, and is_matched. measure(test): Measured. paper: the
    paper's number."""
    asked = nearest(tests)
    dropped, given = {}, {}
    for test in asked:
        measured = measure(test)
        reason = why_not(measured, test.is_matched, is_accuracy)
        if reason:
            dropped.setdefault(reason, []).append(test.label)
        else:
            given[test.label] = outcome(measured, paper, is_accuracy)
    if not given:
        said = [f"{labels[0] if len(labels) == 1 else f'{len(labels)} tests'}: {reason}"
                for reason, labels in dropped.items()]
        return "undecided", "no nearest test qualifies (" + "; ".join(said) + ")"
    if len(set(given.values())) > 1:
        said = "; ".join(f"{label}: {verdict}" for label, verdict in given.items())
        return "undecided", f"the nearest tests differ ({said})"
    return next(iter(given.values())), f"from {' and from '.join(given)}"


def count(tests, measure, paper, is_accuracy=False):
    """Return how many of all tests are for the claim, against it, find none, or are open"""
    outcomes = [outcome(measure(test), paper, is_accuracy) for test in tests]
    n = [sum(one in kind for one in outcomes) for kind in (FOR, AGAINST, NONE)]
    return (*n, len(outcomes) - sum(n))
