"""reproduce.py: its claims are those of the documents; what it trains is compared with the published results as it
says."""
import functools
import re

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import ROOT, assert_refused, runs

import reproduce
from reproduce import claims, render

PUBLISHED = render.Results(ROOT / "results")


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: claim.name)
def test_every_measure_of_a_claim_has_results_or_runs_that_make_them(claim):
    assert len({measure.label for measure in claim.measures}) == len(claim.measures)
    for measure in claim.measures + claim.quick:
        mark = measure.mark
        experiment, one, other, key, _ = render.asked(mark)
        values = PUBLISHED.samples(experiment, one, other, key)
        assert values or all(any(result.minutes for result in reproduce.planned(*arm, 0))
                             for arm in reproduce.arms([measure]))
        assert not values or np.isfinite(values).all()
        name = mark.split(", ")[0].split(" ", 1)[1]
        assert render.value(PUBLISHED, mark) != "not run" or not values, name


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: claim.name)
def test_a_name_stands_for_one_measure_of_a_claim(claim):
    named = (*claim.tests, *claim.measures, *claim.quick)
    assert len({one.name for one in named}) == len(named)
    assert all(re.fullmatch("[a-z0-9]+(-[a-z0-9]+)+|[a-z]{2,}", one.name) for one in named)


def test_every_claim_has_a_section_with_all_its_numbers():
    text = (ROOT / "docs" / "reference" / "claims.md").read_text(encoding="utf-8")
    assert re.findall(r"^## ([a-z-]+)$", text, re.M) == [
        claim.name for papers in (True, False) for claim in claims.CLAIMS if bool(claim.tests) == papers]
    for claim in claims.CLAIMS:
        section = re.search(rf"^## {claim.name}\n(.*?)(?=^##? |\Z)", text, re.M | re.S)[1]
        assert f"<!-- table: claim {claim.name} -->" in section and claim.sentence[:20] in section
        assert bool(claim.tests) == (f"<!-- verdict: {claim.name} -->" in section)
        assert bool(claim.tests and claim.measures) == (f"<!-- table: others {claim.name} -->" in section)


def test_a_measure_over_several_sets_of_toys_is_checked_set_by_set():
    mark = "smallnorb a+b/x minus a+b/y, novel, points"
    assert reproduce.draws(mark) == ["smallnorb a/x minus a/y, novel, points", "smallnorb b/x minus b/y, novel, points"]
    assert reproduce.draws("smallnorb a/x, novel") == ["smallnorb a/x, novel"]
    assert reproduce.rows_of("smallnorb a/x minus b/y, k.1 vs k.2, 3 digits") == [
        ("a/x", "smallnorb a/x, k.1, 3 digits", False), ("b/y", "smallnorb b/y, k.2, 3 digits", False),
        ("difference", "smallnorb a/x minus b/y, k.1 vs k.2, 3 digits", True)]
    assert len(reproduce.rows_of("smallnorb a/x minus a/y, novel once familiar, points")) == 1
    assert reproduce.rows_of("affnist a/x minus a/y, k, points")[1] == ("a/y", "affnist a/y, k, percent", False)


@pytest.mark.parametrize("seed, value, fraction, expected", [
    (0, 0.900, True, (True, "identical")), (0, 0.9019, True, (True, "within 0.2 points")),
    (0, 0.9025, True, (True, "within the 95% prediction interval, not the published number")),
    (0, 0.95, True, (False, "outside the 95% prediction interval, not the published number")),
    (0, 0.917, False, (True, "within 2%")), (7, 0.91, True, (True, "within the 95% prediction interval")),
    (7, 0.85, True, (False, "outside the 95% prediction interval"))])
def test_what_agrees(seed, value, fraction, expected):
    """Published 0.90, 0.91 and 0.905: mean 0.905, s = 0.005, prediction interval +- 0.0248"""
    assert reproduce.agreement(seed, value, {0: 0.90, 1: 0.91, 2: 0.905}, fraction) == expected
    word = "not judged: one published seed says nothing of others"
    assert reproduce.agreement(7, 0.9, {0: 0.9}, True) == (None, word)
    assert reproduce.agreement(0, 0.8, {0: 0.9}, True) == (False, "differs by more than 0.2 points")


@pytest.fixture
def check(call, monkeypatch):
    """check(*flags): call's answer of reproduce.py, whose runs are of toy size"""
    monkeypatch.setattr(runs, "shell_command", functools.partial(runs.shell_command, toy=True))
    monkeypatch.setattr(reproduce, "check_mnist", lambda results, data_dir: None)
    tiny = {"--conv1-channels": 2, "--conv3-channels": 4, "--n-test": 16}
    monkeypatch.setitem(runs.TOY, runs.MULTI, runs.TOY[runs.MULTI] | tiny)
    measures = (claims.multi("one", "with routing - without", "main/deep", "main-uniform/deep"),)
    monkeypatch.setitem(claims.BY_NAME, "toy", claims.Claim("toy", "Toys.", "no number", measures=measures))
    return lambda *flags: call(mc, functools.partial(reproduce.main), *flags)


@pytest.mark.parametrize("measure", [
    claims.toys("one", "nearest neighbor - cnn", "shapes/nearest", "shapes/cnn"),
    pytest.param(claims.multi("one", "with routing - without", "main/deep", "main-uniform/deep"),
                 marks=pytest.mark.slow)])
def test_two_results_are_made_and_compared_with_the_published_ones(check, monkeypatch, tmp_path, measure):
    """Trained networks; a network and what is measured on it. A second call makes nothing and compares
    anew, of a published seed and of a new one"""
    monkeypatch.setitem(claims.BY_NAME, "toy", claims.Claim("toy", "Toys.", "no number", measures=(measure,)))
    code, out, err = check("toy", "--jobs", 2)
    assert (code, err) == (0, ""), err
    assert "2 of 2 runs to do" in out and "2 at a time" in out
    assert re.search("[01] of 1 comparison agrees with the published ones", out)
    assert "  epoch 1/1  train loss" in out
    assert re.search("outside the 95% prediction interval, not the published number .made on .*, NumPy 2", out)
    lines = [line for line in out.splitlines() if line.startswith("  ") and "published" in line and "yours" in line]
    rows = reproduce.rows_of(measure.mark)
    assert [line.split()[0] for line in lines] == [name for name, *_ in rows]
    assert len(lines) == 3 and all("(n = 10), this seed" in line for line in lines)
    code, again, _ = check("toy")
    assert code == 0 and "0 of 2 runs to do: they are in" in again
    assert [line for line in again.splitlines() if line.startswith("  ") and "yours" in line] == lines
    code, out, _ = check("toy", "--seeds", "0,77")
    assert code == 0 and "2 of 4 runs to do" in out and "(seed 77)" in out
    assert re.search("new seeds lie in .* sign is", out)
    assert len(list(tmp_path.glob("runs/reproduce/*/*/*/*-77/metrics.json"))) == 2


def test_published_results_and_quick_checks(check):
    """All claims, with a legend; two of them"""
    code, out, err = check("--from-results")
    assert (code, err) == (0, "") and all(f"\n{claim.name}: " in out for claim in claims.CLAIMS)
    assert "+0.5 +- 0.2 points (n = 10 seeds)" in out
    assert out.rstrip().endswith("docs/reference/claims.md says what verdicts mean.")
    assert "\n* CapsNet minus CNN with max pooling, matched: -2.1 +- 2.8 (n = 5); all seeds -1.9 +- 1.7 points" in out
    code, out, err = check("shapes", "multimnist-routing", "--from-results")
    assert (code, err) == (0, "") and out.count("paper: ") == 2
    for name in ("shapes", "multimnist-routing"):
        for measure in claims.comparisons(claims.BY_NAME[name]):
            number = render.value(PUBLISHED, measure.mark)
            if isinstance(measure, claims.Test):
                number = f"{render.with_n(PUBLISHED, measure)}; all seeds {number}"
            assert f"{measure.label}: {number}" in out
    code, out, _ = check()
    assert code == 0 and all(f"\n{claim.name}: {claim.sentence}\n  paper: {claim.paper}\n" + "  our verdict: " *
                             bool(claim.tests) in out for claim in claims.CLAIMS)
    code, out, _ = check("affnist-translation", "--quick")
    assert code == 0
    assert re.search(r"no quick check: \d+ min of one core. Published seeds: ([+-]?\d\.\d, ){7}[+-]?\d\.\d", out)


def test_a_stale_result_is_named(monkeypatch):
    """Of a difference also if it is the second of its settings"""
    said, measure = [], claims.multi("one", "label", "main/deep", "control/cnn")
    reproduce.print_published([measure], PUBLISHED, said.append)
    monkeypatch.setattr(PUBLISHED, "stale", {(reproduce.MULTI, "control/cnn")})
    reproduce.print_published([measure], PUBLISHED, said.append)
    assert said[1] == f"{said[0]}, stale: the code has changed since" and " points (n = 10 seeds)" in said[0]


def test_a_run_that_fails_is_named(check, monkeypatch, tmp_path):
    toy = runs.shell_command
    monkeypatch.setattr(runs, "shell_command", lambda *args, **given: f"{toy(*args, **given)} --lr -1")
    assert_refused(check("toy"), "error: multimnist_capsnet/main/deep-0: --lr -1.0: must be from 1e-09")
    assert not list(tmp_path.rglob("*.json"))


def test_a_new_seed_of_what_is_measured_on_a_shipped_file_is_trained():
    of = [[result.name for result in reproduce.planned(runs.MULTI, "weights/paper-protocol-long-recomputed", seed)]
          for seed in (0, 1, 3)]
    assert len(of[0]) == 1 and [name.replace("-3", "-1") for name in of[2]] == of[1] and len(of[1]) == 2


def test_a_new_seed_of_what_is_measured_on_several_networks_needs_those_of_the_next_seed_too():
    *first, attacked = reproduce.planned(runs.AFF, "attacks/digits", 7)
    again = f"{runs.AFF}/trained-again"
    assert attacked.after == (f"{again}/small-capsnet-7", f"{again}/small-cnn-dense-7", f"{again}/cnn-gap-7",
                              f"{again}/small-capsnet-8", f"{again}/small-cnn-dense-8", f"{again}/cnn-gap-8")
    assert tuple(result.name for result in first) == attacked.after
    assert all(result.seed == int(result.name.rpartition("-")[2]) for result in first)


@pytest.mark.parametrize("flags, words", {
    "nothing": "nothing: no such claim. Give one of multimnist-accuracy, ", "em-rooting": "Give em-routing",
    "MNIST": "Give mnist", "routing": "Give one of multimnist-routing, em-routing",
    "shapes --from-results --seeds 1": "--seeds has no effect with --from-results",
    "shapes --from-results --jobs 2": "--jobs has no effect", "shapes --quick --headline": "--headline has no effect",
    "smallnorb-real --norb-dir x --quick": "--quick has no effect with smallnorb-real",
    "smallnorb-real --norb-dir x": "--norb-dir", "--headline": "--headline: of which claim?",
    "shapes --seeds 3-1": "--seeds 3-1: must", "shapes --seeds 0-999999999": "must be up to 1,000 seeds",
    "shapes --seeds x": "--seeds x: must be up to 1,000 seeds", "shapes --jobs 0": "--jobs 0: must be between",
    "smallnorb-real": "smallnorb-real and --norb-dir DIR belong together", "--norb-dir x": "belong together",
    "shapes --data-dir .": "--data-dir: no run of this claim uses MNIST",
    "multimnist-accuracy --quick --seeds 3": "multimnist-accuracy is measured here on files of seed 0",
    "--quick --seeds 0-3": "is measured here on files of seed 0",
    "--seeds 1": "--seeds: of which claim?"}.items())
def test_what_is_wrong_is_refused_in_one_line(check, flags, words):
    assert_refused(check(*flags.split()), words)


def test_without_mnist_nothing_is_trained_on_other_digits(call):
    code, out, err = call(mc, reproduce.main, "mnist")
    assert code == 2 and err.startswith("error: MNIST could not be downloaded") and "SYNTHETIC" not in err + out


@pytest.mark.slow
def test_the_papers_own_data_are_compared_with_their_numbers(check, tmp_path, monkeypatch):
    from reference_smallnorb import write_norb
    from test_affnist_digits import write_affnist
    monkeypatch.setitem(runs.TOY, runs.NORB, {"--n-epochs": 1, "--n-test": 60})
    (tmp_path / "norb").mkdir()
    write_norb(tmp_path / "norb", 160)
    code, out, err = check("smallnorb-real", "--norb-dir", "norb")
    assert (code, err) == (0, "")
    assert re.search(r"paper-azimuth/matrix-capsnet +novel +yours +\d+\.\d%, n = 1; paper 86.5%", out)
    assert re.search(r"paper-elevation/cnn +novel +yours +\d+\.\d%, n = 1; paper 82.2%", out)
    assert re.search(r"\b0 of \d+ runs to do", check("smallnorb-real", "--norb-dir", "norb")[1])
    (tmp_path / "norb" / "note.txt").write_text("another state", "utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(reproduce, "make", lambda *_: None)
        code, _, err = check("smallnorb-real", "--norb-dir", "norb")
    assert code == 2 and "not a whole result" in err                    # of the new state there is none yet
    rng = np.random.default_rng(0)
    write_affnist(tmp_path / "affnist" / "test_batches" / "1.mat", rng.integers(0, 256, (20, 40, 40)).astype(np.uint8),
                  (np.arange(20) % 10).astype(np.uint8))
    assert "none of 1 reached --stop-at" in check("affnist-real", "--affnist-dir", "affnist")[1]      # 98%
    monkeypatch.setitem(runs.TOY, runs.AFF, runs.TOY[runs.AFF] | {"--stop-at": 0.001})
    code, out, err = check("affnist-real", "--affnist-dir", "affnist", "--seeds", 1)
    assert (code, err) == (0, ""), err
    assert re.search(r"matched-accuracy/cnn +real_affine_accuracy +yours +\d+\.\d%, n = 1; paper 66.0%", out)
