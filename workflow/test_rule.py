"""The rule that decides claims, by hand; and what the project's own claims give it."""
import collections
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results"), str(ROOT / "workflow")]
import claims
import history
import render
import rule

PLAIN = claims.Test("t", "t", "", "ours", "paper", "paper", "narrow")


def measured(low, high, n=3, n_planned=3, tried=(1, 1), lacks=""):
    return rule.Measured(n_planned, n, (low + high) / 2, low, high, tried, lacks)


def decide(*pairs, paper=2.9, is_accuracy=False):
    """Return the verdict on (test, measured) pairs"""
    of = {test.name: found for test, found in pairs}
    return rule.decide([test for test, _ in pairs], lambda test: of[test.name], paper, is_accuracy)


@pytest.mark.parametrize("low, high, expected", [
    (0.1, 3.0, "reproduced"), (0.1, 2.9, "reproduced"), (3.5, 4.0, "reproduced"), (0.1, 2.8, "smaller"),
    (-0.1, 2.8, "not found"), (0.0, 1.0, "not found"), (-0.1, 2.9, "undecided"), (-0.1, 9.0, "undecided"),
    (-2.0, -0.1, "opposite"), (math.nan, math.nan, "undecided")])
def test_the_verdict_of_an_effect_of_2_9_points(low, high, expected):
    assert rule.outcome(measured(low, high), 2.9) == expected


@pytest.mark.parametrize("low, high, expected", [
    (94.8, 96.0, "reached"), (94.0, 94.7, "lower"), (94.0, 94.8, "undecided"), (94.7, 96.0, "undecided")])
def test_the_verdict_of_an_accuracy_of_94_8_percent(low, high, expected):
    assert rule.outcome(measured(low, high), 94.8, is_accuracy=True) == expected


@pytest.mark.parametrize("found, why", [
    (measured(1, 2), ""), (measured(-1, 2, tried=(None, None)), ""),
    (measured(1, 2, n=2), "2 planned seeds have been run"), (measured(1, 2, n=1), "1 planned seed has been run"),
    (measured(1, 2, n=0), "no planned seeds have been run"),
    (measured(1, 2, tried=(22, 3)), "the side ahead had more configurations, 22 against 3"),
    (measured(-2, -1, tried=(22, 3)), ""), (measured(-2, -1, tried=(3, 22)), "22 against 3"),
    (measured(1, 2, tried=(6, 6)), ""), (measured(1, 2, tried=(6, None)), ""),
    (measured(1, 2, tried=(None, 6)), "were not recorded"), (measured(1, 2, tried=(None, None)), "not recorded"),
    (measured(math.nan, math.nan, n=10, lacks="no hits per toy"), "no hits per toy")])
def test_what_qualifies(found, why):
    """A side that is ahead must not have been tuned more; what was not recorded counts as more"""
    said = rule.why_not(found, is_matched=False)
    assert (said == "") == (why == "") and why in said


def test_four_fifths_of_the_planned_seeds_must_be_matched():
    assert rule.why_not(measured(1, 2, n=4, n_planned=5), is_matched=True) == ""
    assert rule.why_not(measured(1, 2, n=3, n_planned=5), is_matched=True) == "3 of 5 planned seeds are matched"
    assert rule.why_not(measured(1, 2, n=3, n_planned=5), is_matched=False) == ""


def test_data_come_before_the_task_and_this_before_control_and_network():
    facts = [("paper", "another", "another", "another"), ("shorter", "paper", "another", "another"),
             ("shorter", "another", "paper", "paper"), ("ours", "paper", "paper", "paper"),
             ("ours", "paper", "paper", "narrow"), ("ours", "paper", "another", "paper")]
    tests = [claims.Test(str(k), "", "", *four) for k, four in enumerate(facts)]
    assert [test.name for test in sorted(reversed(tests), key=rule.distance)] == list("012345")
    assert [test.name for test in rule.nearest(tests)] == ["0"]
    assert len(rule.nearest([*tests, tests[0]._replace(name="6")])) == 2


def test_a_farther_test_never_decides():
    """Not even if no nearest test qualifies"""
    near, far = PLAIN, PLAIN._replace(name="far", network="another")
    assert decide((near, measured(1, 2)), (far, measured(-2, -1))) == ("smaller", "from t")
    verdict, reason = decide((near, measured(1, 2, n=2)), (far, measured(-2, -1)))
    assert verdict == "undecided" and "t: 2 planned seeds have been run" in reason and "far" not in reason


def test_nearest_tests_have_to_agree_and_those_that_do_not_qualify_are_dropped():
    one, other = PLAIN, PLAIN._replace(name="u", label="u")
    assert decide((one, measured(1, 2)), (other, measured(0.5, 2.5))) == ("smaller", "from t and from u")
    assert decide((one, measured(1, 2)), (other, measured(1, 4)))[0] == "undecided"
    assert decide((one, measured(1, 2)), (other, measured(1, 4, tried=(9, 1)))) == ("smaller", "from t")


def test_tests_are_counted():
    tests = [PLAIN._replace(name=name) for name in "abcde"]
    of = dict(zip("abcde", (measured(1, 2), measured(1, 9, tried=(9, 0)), measured(-2, -1), measured(-1, 1),
                            measured(1, 2, n=2))))
    assert rule.count(tests, lambda test: of[test.name], 2.9) == (2, 1, 1, 1)


# ---------------------------------------------------------------- the project's claims

WITH_TESTS = [claim for claim in claims.CLAIMS if claim.tests]
ALL_TESTS = [(claim, test) for claim in WITH_TESTS for test in claim.tests]


@pytest.fixture(scope="module")
def results():
    return render.Results(ROOT / "results")


@pytest.mark.parametrize("claim, test", ALL_TESTS, ids=[f"{claim.name}-{test.name}" for claim, test in ALL_TESTS])
def test_a_test_has_its_facts_and_its_history(claim, test):
    assert test.data in rule.DATA and test.task in rule.TASK and test.network in rule.NETWORK
    assert test.control == "" if claim.is_accuracy else test.control in ("paper", "another")
    _, one, other, key, styles = render.asked(test.mark)
    assert test.is_matched == (" once " in key or "matched" in one)
    assert {"points", "percent"} & {*styles}
    for setting in filter(None, (one, other)):
        assert history.of(test.mark.split()[0], setting).about_seeds


def test_names_are_unique_within_a_claim_and_a_pair_of_settings_is_one_test():
    for claim in claims.CLAIMS:
        names = [one.name for one in (*claim.tests, *claim.measures, *claim.quick)]
        assert len(names) == len({*names}), claim.name
        pairs = collections.Counter(frozenset(render.asked(test.mark)[1:3]) for test in claim.tests)
        assert max(pairs.values(), default=1) == 1, (claim.name, pairs.most_common(1))


def test_a_claim_with_a_number_has_tests_and_the_table_has_all_of_these():
    assert [claim.name for claim in WITH_TESTS] == [claim.name for claim in claims.CLAIMS if claim.theirs is not None]
    assert {name for name, *_ in claims.TABLE} == {claim.name for claim in WITH_TESTS}


@pytest.mark.parametrize("split", ["azimuth", "elevation"])
def test_who_is_stopped_is_the_more_accurate_at_familiar_viewpoints(results, split):
    """On average over the seeds, as claims.FAMILIAR says"""
    def mean(network):
        values = results.values(render.SHORT["smallnorb"], f"paper-{split}/{network}", "familiar")
        return sum(values.values()) / len(values)
    assert list(claims.FAMILIAR[split]) == sorted(claims.FAMILIAR[split], key=mean)


def test_planned_seeds_alone_enter_a_test(results):
    claim = claims.BY_NAME["multimnist-routing"]
    (test,) = [test for test in claim.tests if test.name == "default-network"]
    experiment, one, other, key, _ = render.asked(test.mark)
    values, n_planned = render.planned_values(results, test)
    assert n_planned == 3 and list(values) == [0, 1, 2]
    found = results.by_seed(experiment, one, other, key)
    assert len(found) == 10 and values == {seed: found[seed] for seed in (0, 1, 2)}


def test_the_hits_per_toy_of_a_result_add_up_to_its_accuracy(results):
    """Those that are read from hit_bits, and those that a result has"""
    run = results.runs(render.SHORT["smallnorb"], "paper-azimuth/matrix-capsnet-paper")[0]
    for name in ("familiar", "novel"):
        accuracies, classes = render.toy_hits.accuracies(run, name)
        assert accuracies.mean() == pytest.approx(run[name], abs=1e-5)
        assert collections.Counter(classes.tolist()) == dict.fromkeys(range(5), 5)
    assert render.toy_hits.accuracies(run, "novel", epoch=3) is None
    kept = {"novel_toy_n": [[4, 0], [2, 2]], "novel_toy_hits": [[3, 0], [2, 1]],
            "history": {"novel_toy_hits": [[[1, 0], [1, 0]], [[3, 0], [2, 1]]]}}
    accuracies, classes = render.toy_hits.accuracies(kept, "novel")
    assert accuracies.tolist() == pytest.approx([3 * 3 / 8, 2 * 3 / 8, 1 * 3 / 8]) and classes.tolist() == [0, 1, 1]
    assert render.toy_hits.accuracies(kept, "novel", 0)[0].mean() == pytest.approx(2 / 8)


def test_a_test_on_toys_contains_the_toys(results):
    """Its interval is wider than over seeds alone; of the same mean"""
    claim = claims.BY_NAME["smallnorb-azimuth"]
    (test,) = [test for test in claim.tests if test.name == "paper-small-vs-wide-cnn-gap"]
    found = render.measured(results, test)
    values, _ = render.planned_values(results, test)
    mean, half = render.mean_and_interval([100 * value for value in values.values()])
    assert found.mean == pytest.approx(mean, abs=1e-3) and found.high - found.mean > 1.5 * half


def test_the_strongest_control_has_the_highest_mean_of_those_with_three_seeds(results):
    arms, ours, control = render.strongest(results, "affnist-translation")
    def mean(setting):
        values = results.values(render.SHORT[arms.experiment], setting, arms.key)
        return sum(values.values()) / len(values)
    assert control == max(arms.controls, key=mean) and ours == max(arms.ours, key=mean)
