"""Results as lines of tables; golden values, which decide what is stale; tables, numbers and verdicts in documents."""
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "results"), str(ROOT / "workflow")]
from lab.messages import InputError  # noqa: E402

import claims  # noqa: E402
import render  # noqa: E402
import result_files  # noqa: E402
import rule  # noqa: E402
import runs  # noqa: E402
from runs import AFF, MULTI, NORB  # noqa: E402

MADE_WITH = {"versions": {"python": "3", "numpy": "2"}, "machine": {"processor": "P"}}


def job(folder, name, **found):
    """What a run wrote: found, and what every result has; name: EXPERIMENT/TABLE/SETTING-SEED -> its path"""
    path = folder / "1" / name / "metrics.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    config = {"seed": int(name.rpartition("-")[2])} | found.pop("config", {})
    path.write_text(json.dumps({"experiment": name.split("/")[0], "config": config, **MADE_WITH, **found}), "utf-8")
    return path


@pytest.fixture
def results(tmp_path):
    """results({name: what was found, ...}) -> a Results of these in tmp_path/results"""
    def make(found):
        result_files.collect([job(tmp_path, name, **result) for name, result in found.items()], tmp_path / "results")
        return render.Results(tmp_path / "results")
    return make


@pytest.fixture
def accuracies(results):
    """accuracies(setting={seed: accuracy, ...}, ...) -> a Results of such results of multimnist_capsnet's table main"""
    return lambda **settings: results({
        f"{MULTI}/main/{setting}-{seed}": {"test_exact_match": value, "n_params": 1234567,
                                           "test_exact_match_ci95": [value - 0.01, value + 0.01]}
        for setting, runs in settings.items() for seed, value in runs.items()})


@pytest.fixture(scope="module")
def kept():
    return result_files.read(ROOT / "results")


# ---------------------------------------------------------------- lines

def test_lines_are_put_in_order_and_replaced_and_collecting_twice_changes_nothing(tmp_path):
    names = [f"{MULTI}/main/{run}" for run in ("deep-10", "b-c-2", "deep-9")]
    result_files.collect([job(tmp_path, name, test_hits=1) for name in names], tmp_path)
    table = tmp_path / MULTI / "main.jsonl"
    lines = [json.loads(line) for line in table.read_text("utf-8").splitlines()]
    assert [(line["setting"], line["seed"], line["generation"]) for line in lines] == [
        ("b-c", 2, 1), ("deep", 9, 1), ("deep", 10, 1)]
    before = table.read_bytes()
    paths = [job(tmp_path, name, test_hits=1) for name in names]
    result_files.collect(paths, tmp_path)
    assert table.read_bytes() == before and not any(path.exists() for path in paths)
    result_files.collect([job(tmp_path, names[2], test_hits=7)], tmp_path)
    assert [line["test_hits"] for line in result_files.read(tmp_path).values()] == [1, 7, 1]


def test_an_interval_is_added_and_counts_different_digits(tmp_path):
    """Of affNIST's own files there are 32 variants of 10,000 digits"""
    counts = {"familiar_hits": 200, "familiar_n": 400, "familiar_accuracy": 0.5,
              "real_affine_hits": 160000, "real_affine_n": 320000, "real_affine_accuracy": 0.5}
    result_files.collect([job(tmp_path, f"{AFF}/main/x-0", **counts),
                          job(tmp_path, f"{MULTI}/main/x-0", config={"n_test": 400}, test_hits=200,
                              test_exact_match=0.5)], tmp_path)
    of_digits, of_pairs = result_files.read(tmp_path).values()
    assert of_digits["familiar_accuracy_ci95"] == of_pairs["test_exact_match_ci95"] == [0.45123, 0.54877]
    assert of_digits["real_affine_accuracy_ci95"] == [0.4902, 0.5098]


def test_a_killed_collect_leaves_the_old_table_whole_and_the_results_where_they_were(tmp_path, monkeypatch):
    result_files.collect([job(tmp_path, f"{MULTI}/main/deep-0", test_hits=1)], tmp_path)
    before, path = result_files.read(tmp_path), job(tmp_path, f"{MULTI}/main/deep-1", test_hits=2)

    def power_cut(*_):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", power_cut)
        result_files.collect([path], tmp_path)
    assert result_files.read(tmp_path) == before and path.exists()
    result_files.collect([path], tmp_path)
    assert [line["test_hits"] for line in result_files.read(tmp_path).values()] == [1, 2]


@pytest.mark.parametrize("change", [
    "no JSON", {"config": {"seed": 3}}, {"experiment": NORB}, {"seed": 0}, {"generation": None}], ids=str)
def test_a_line_that_is_no_result_is_named(accuracies, tmp_path, change):
    accuracies(deep={0: 0.5, 1: 0.6})
    path = tmp_path / "results" / MULTI / "main.jsonl"
    first, second = path.read_text("utf-8").splitlines()
    spoilt = change if isinstance(change, str) else json.dumps(json.loads(second) | change)
    path.write_text(f"{first}\n{spoilt}\n", "utf-8")
    with pytest.raises(InputError, match="main.jsonl, line 2: not a result"):
        render.Results(tmp_path / "results")


# ---------------------------------------------------------------- what is stale

@pytest.mark.parametrize("experiment, flags, settings", [
    (MULTI, "--preset classic", ["main/classic"]),
    (AFF, "--model cnn-gap", ["backbone/cnn-gap", "long/cnn-gap", "probes/cnn-gap", "probes/pretrained-cnn-gap",
                              "trained-again/cnn-gap", "weights/cnn-gap", "weights/cnn-gap-recomputed"])])
def test_a_changed_golden_value_makes_its_own_results_stale_and_no_other(kept, monkeypatch, experiment, flags,
                                                                         settings):
    """Those of its flags, of any size, and what was measured on weights that such a run made"""
    golden = {name: {key: {"since": 1} for key in of} for name, of in result_files.GOLDEN.items()}
    monkeypatch.setattr(result_files, "GOLDEN", golden)
    for spoil in (lambda: golden[experiment][flags].update(since=10 ** 9), lambda: golden[experiment].pop(flags)):
        spoil()
        stale = {name.rpartition("-")[0] for name in kept if result_files.stale(name, kept)}
        there = {name.rpartition("-")[0] for name in kept}
        assert sorted(stale) == [f"{experiment}/{setting}" for setting in settings
                                 if f"{experiment}/{setting}" in there]


@pytest.mark.parametrize("name", [f"{MULTI}/weights/residual-0", f"{AFF}/weights/cnn-gap-0"])
def test_a_result_of_other_weights_is_stale(kept, name):
    line = kept[name]
    assert result_files.same_weights(line)
    parts = [("networks", file) for file in line.get("networks", {})] or [("loaded", "sha256")]
    assert all(result_files.stale(name, {name: line | {key: line[key] | {part: "0" * 64}}}) for key, part in parts)


def test_what_was_measured_on_a_run_is_stale_once_another_run_is_kept_in_its_place(kept):
    name, run = f"{MULTI}/main-uniform/deep-0", f"{MULTI}/main/deep-0"
    assert not result_files.stale(name, kept)
    assert result_files.stale(name, kept | {run: kept[run] | {"seconds_train": kept[run]["seconds_train"] + 1}})


def test_what_was_measured_on_several_runs_is_stale_once_one_of_them_is_another(kept):
    """Attacks on three networks by images made for three more, in the order of the command"""
    name = f"{NORB}/attacks/toys-0"
    lines = dict(kept)
    for k, run in enumerate(result_files.BY_NAME[name].after):
        lines[run] = {"seconds_train": 10.0 + k}
    lines[name] = {"generation": 10 ** 6, "seconds_train": 10.0,
                   "seconds_of_runs": [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]}
    assert not result_files.stale(name, lines)
    for run in result_files.BY_NAME[name].after:
        assert result_files.stale(name, lines | {run: {"seconds_train": 99.0}})


def test_each_run_of_a_measurement_has_its_place_in_the_command():
    result = result_files.BY_NAME[f"{AFF}/attacks/digits-4"]
    command = runs.shell_command(result, "out", after=["a b", "c", "d", "e", "f", "g"])
    assert "--load 'a b' c d --sources e f g --threads 1" in command and "{run}" not in command
    assert [run.rpartition("-")[2] for run in result.after] == ["4", "4", "4", "0", "0", "0"]


def test_weights_are_made_again_when_another_run_is_the_one_that_is_kept(kept, monkeypatch):
    path, result = next(iter(runs.WEIGHTS.items()))
    history = kept[result.name]["history"]
    other = {result.name: {"history": history | {"seconds": [second + 1 for second in history["seconds"]]}}}
    monkeypatch.setattr(result_files, "wanting", lambda *_: [])
    for lines, wanted in (kept, {}), (kept | other, {path: result}):
        monkeypatch.setattr(result_files, "read", lambda folder, lines=lines: lines)
        assert result_files.weights_wanting("") == wanted


def test_a_table_says_what_is_stale_and_what_it_was_made_with(accuracies, monkeypatch):
    found = accuracies(deep={0: 0.6})
    monkeypatch.setattr(result_files, "GOLDEN", {MULTI: {"": {"since": 1}}})
    assert render.seeds_line(found, MULTI, ["main/deep"]) == "Seeds: 1 of 10 planned."
    assert render.made_with(found, MULTI, ["main/deep"]) == "P, Python 3, NumPy 2."
    monkeypatch.setattr(result_files, "GOLDEN", {MULTI: {"": {"since": 2}}})
    found = render.Results(found.folder)
    assert render.seeds_line(found, MULTI, ["main/deep", "main/adam"]) == (
        "Seeds: 0 to 1 of 5 to 10 planned. **Stale**: main/deep.")
    assert render.made_with(found, MULTI, ["main/deep"]).endswith("**Stale**, to be run again: deep.")


# ---------------------------------------------------------------- what can be said of results

def test_means_intervals_and_paired_differences_by_hand(accuracies):
    """0.6 and 0.8: mean 0.7, standard deviation 0.1 sqrt 2, t 12.706; differences 0.1 and 0.3 of the seeds both have"""
    found = accuracies(deep={0: 0.6, 1: 0.8}, classic={1: 0.5, 0: 0.5, 2: 0.9}, residual={0: 0.93})

    def asked(text):
        return render.value(found, f"multimnist {text}")
    assert asked("main/deep, test_exact_match") == "0.700 +- 1.271"
    assert asked("main/deep, test_exact_match, plain, 2 digits") == "0.70"
    assert asked("main/deep, test_exact_match, seeds") == "2"
    assert asked("main/deep minus main/classic, test_exact_match") == "+0.200 +- 1.271"
    assert asked("main/deep minus main/classic, test_exact_match, points") == "+20.0 +- 127.1"
    assert asked("main/deep minus main/classic, test_exact_match, points, plain") == "20.0"
    assert asked("main/residual, test_exact_match") == "0.930 (0.920-0.940)"
    assert asked("main/residual, test_exact_match, percent, 2 digits") == "93.00 (92.00-94.00)%"
    assert asked("main/residual, n_params, plain") == "1,234,567"
    assert asked("main/deep minus main/residual, test_exact_match") == "-0.330"                   # one seed both have
    assert asked("main/residual minus main/classic, test_exact_match vs n_params, plain, 1 digits") == "-1,234,566"
    assert asked("main/adam, test_exact_match") == asked("main/deep minus main/adam, test_exact_match") == "not run"


def test_a_difference_once_the_first_was_as_good_as_the_second_at_its_end(results):
    """Seed 0 is at its second look, 0.6 minus 0.5; seed 1 at its first, 0.8 minus 0.5; seed 2 never"""
    found = results({f"{NORB}/paper-azimuth/{name}-{seed}": {"familiar": 0.9, "novel": 0.5, "history": {
        "familiar": looks, "novel": [0.8, 0.6, 0.1]}}
                     for seed, looks in enumerate(([0.8, 0.9, 0.7], [0.95, 0.1, 0.9], [0.8, 0.7, 0.6]))
                     for name in ("cnn", "matrix-capsnet")})
    mark = "smallnorb paper-azimuth/cnn minus paper-azimuth/matrix-capsnet, novel once familiar"
    assert render.value(found, mark) == "+0.200 +- 1.271" and render.value(found, f"{mark}, seeds") == "2"
    exactly = mark.replace("once", "when")                 # at 0.9 between no looks: the same
    assert render.value(found, exactly) == "+0.200 +- 1.271" and render.value(found, f"{exactly}, seeds") == "2"


@pytest.mark.parametrize("looks, enough, expected", [
    ([0.8, 0.9, 0.7], 0.85, 0.6), ([0.8, 0.7, 0.9], 0.85, 0.925), ([0.9, 0.8, 0.9], 0.85, 0.5),
    ([0.8, 0.7, 0.6], 0.85, None)])
def test_where_a_network_was_exactly_as_good_for_the_first_time(looks, enough, expected):
    found = render.when({"familiar": looks, "novel": [0.5, 0.7, 1.0]}, "novel", "familiar", enough)
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_difference_over_draws_has_the_draws_for_its_error(results):
    """Two draws: means over seeds 0.2 and 0.4, so 0.3 +- 12.706 times 0.1; the seeds' own spread does not count"""
    found = results({f"{NORB}/toys{draw}-azimuth/{name}-{seed}": {
        "novel": 0.1 * draw * (name == "cnn-gap") + 0.05 * seed}
                     for draw in (2, 4) for name in ("cnn-gap", "matrix-capsnet") for seed in (0, 1)})
    both = "toys2-azimuth+toys4-azimuth"
    assert render.value(found, f"smallnorb {both}/cnn-gap minus {both}/matrix-capsnet, novel") == "+0.300 +- 1.271"
    assert render.value(found, f"smallnorb {both}/cnn-gap, novel") == "0.325 +- 1.271"
    assert render.seeds_line(found, NORB, [f"{both}/cnn-gap"]) == "Seeds: 2 of 3 planned."
    assert render.value(found, "smallnorb toys2-azimuth+toys3-azimuth/cnn-gap, novel") == "not run"
    with pytest.raises(InputError, match="as many tables on either side"):
        render.value(found, f"smallnorb {both}/cnn-gap minus toys2-azimuth/matrix-capsnet, novel")


def test_runs_that_never_got_to_where_they_were_to_stop_are_not_compared(results):
    """caps: both seeds reached 0.98 on validation digits; cnn: seed 0 alone; dense: none"""
    found = results({f"{AFF}/matched-accuracy/{name}-{seed}": {
        "config": {"stop_at": 0.98}, "history": {"val_accuracy": [0.5, best]},
        "affine_accuracy": best - 0.1 * (name == "cnn")}
        for name, bests in (("capsnet", (0.992, 0.991)), ("cnn", (0.993, 0.97)), ("cnn-dense", (0.97, 0.96)))
        for seed, best in enumerate(bests)})
    for model, value in ("cnn", "+0.099"), ("cnn-dense", "not run"):
        mark = f"affnist matched-accuracy/capsnet minus matched-accuracy/{model}, affine_accuracy"
        assert render.value(found, mark) == value


def test_a_table_is_what_its_mark_says(accuracies):
    found = accuracies(deep={0: 0.6, 1: 0.8}, classic={0: 0.5, 1: 0.5})
    text = render.table(found, """multimnist
columns: both digits = test_exact_match, 2 digits | minus the first = test_exact_match minus first, points
a deep network = main/deep
the paper's = main/classic
none = main/adam""")
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:5]] == [
        ["a deep network", "0.70 +- 1.27", "", "2 of 10"], ["the paper's", "0.50 +- 0.00", "-20.0 +- 127.1", "2 of 5"],
        ["none", "not run", "not run", "0 of 5"]]


def test_a_lab_book_has_every_planned_run(accuracies):
    found = accuracies(deep={0: 0.6, 1: 0.8})
    book = render.results_log(found, MULTI)
    assert "| deep | 2 of 10 | 0.700 ± 1.271 / 0.010 | 1,234,567 |  | `--n-epochs 12 --n-train 6000" in book
    assert all(f"| {run.setting} | " in book for run in runs.RESULTS if run.experiment == MULTI)
    assert {(run.experiment, run.table) for run in result_files.BY_NAME.values()} == set(runs.CAPTIONS)


# ---------------------------------------------------------------- verdicts of claims

@pytest.mark.parametrize("mark, fault", [
    ("mnist paper", "mnist has no measure 'paper'. Give one of paper-network, small-network"),
    ("mnist 1, words", "mnist has no measure '1'. Give one of paper-network, small-network"),
    ("mnist", "mnist has no measure ''. Give one of paper-network, small-network"),
    ("minst paper-network", "no claim 'minst'. Give one of multimnist-accuracy, ")])
def test_a_mark_of_no_measure_is_refused_with_the_names_that_there_are(mark, fault):
    with pytest.raises(InputError) as error:
        render.measure(mark)
    assert str(error.value).startswith(fault) and "\n" not in str(error.value)


@pytest.mark.parametrize("n, low, high, said", [
    (3, 1, 9, "reproduced: above 0, and +7.9 is possible"), (3, 1, 5, "smaller: above 0, below +7.9"),
    (3, -1, 5, "not found: 0 is possible, +7.9 is not"), (3, -1, 9, "undecided: both 0 and +7.9 are possible"),
    (3, -5, -1, "opposite: the interval is below 0"), (2, -1, 5, "undecided: 2 planned seeds run, 3 needed"),
    (0, -1, 5, "undecided: no planned seed run, 3 needed")])
def test_a_verdict_is_given_with_its_reason(monkeypatch, n, low, high, said):
    """of the claim with the effect +7.9"""
    measured = rule.Measured(3, n, (low + high) / 2, low, high, (1, 1))
    monkeypatch.setattr(render, "measured", lambda results, test: measured)
    assert render.verdict_cell(None, "em-routing") == said


def test_an_arm_that_is_ahead_and_was_tuned_more_is_named_as_the_reason(monkeypatch):
    measured = rule.Measured(3, 3, 3, 1, 5, (6, 4))
    monkeypatch.setattr(render, "measured", lambda results, test: measured)
    said = "undecided: the side ahead had more configurations, 6 against 4"
    assert render.verdict_cell(None, "em-routing") == said


def test_of_the_nearest_tests_the_one_with_most_seeds_is_shown(monkeypatch):
    """since one with fewer than three seeds decides nothing"""
    tests = claims.BY_NAME["multimnist-cnn"].tests[:3]
    n_of = dict(zip(tests, (1, 5, 0), strict=True))
    monkeypatch.setattr(render, "measured", lambda results, test: rule.Measured(5, n_of[test], 1.5, 1, 2, (1, 1)))
    monkeypatch.setattr(rule, "nearest", lambda all_tests: tests)
    cell = render.nearest_cell(render.Results(None, {}), "multimnist-cnn")
    assert cell == "deeper CapsNet minus GAP-CNN: +1.5 +- 0.5 (n = 5)"


def test_a_finding_without_any_result_is_one_line_in_place_of_its_table():
    assert len(claims.BY_NAME["shapes"].measures) == 3
    said = render.others_table(render.Results(None, {}), "shapes")
    assert said == "*None of 3 comparisons has been run yet ([plan](../../results/plans.md)).*"


def test_a_measure_is_found_by_its_name_and_has_the_marks_styles_if_it_gives_some():
    default = (MULTI, "main/deep", "control/iters-1", "test_exact_match")
    assert render.measure("multimnist-routing default-network") == (*default, ["points"])
    assert render.measure("multimnist-routing default-network, words") == (*default, ["words"])


def test_a_difference_in_words_by_hand():
    # 1.2, 2.4: mean 1.8, t = 12.706, s = 0.8485: half = 12.706 * 0.8485 / sqrt(2) = 7.62
    assert render.number_text([0.012, 0.024], ("points",), True) == "+1.8 +- 7.6"
    assert render.in_words([0.012, 0.024], ()) == "1.8 percentage points (95% CI -5.8 to 9.4, n = 2)"
    assert render.in_words([0.012, 0.024], ("reversed",)) == "-1.8 percentage points (95% CI -9.4 to 5.8, n = 2)"
    assert render.in_words([0.012], ()) == "1.2 percentage points (n = 1)"
    assert render.number_text([-0.0001, 0.0001], ("points",), True).startswith("0.0 +- ")


def test_a_number_that_rounds_to_zero_has_no_sign():
    texts = [render.rounded(number, 1, signed=True) for number in (-0.04, 0.04, -0.06, 0.06)]
    assert texts == ["0.0", "0.0", "-0.1", "+0.1"]
    assert render.in_words([-0.0004], ()) == "0.0 percentage points (n = 1)"


# ---------------------------------------------------------------- the documents

MEAN = "<!-- value: multimnist main/deep, test_exact_match -->"
TABLE = "<!-- table: multimnist\ncolumns: both = test_exact_match\ndeep = main/deep\n-->"
DOCUMENT = f"Text {MEAN}0.1<!-- end --> more.\n\n{TABLE}\nold\n<!-- end -->\nend\n"


@pytest.fixture
def root(accuracies, tmp_path, monkeypatch):
    """A project with results and one document"""
    accuracies(deep={0: 0.6, 1: 0.8})
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("no mark\n", "utf-8")
    (tmp_path / "docs" / "a.md").write_text(DOCUMENT, "utf-8")
    monkeypatch.setattr(runs, "EXPERIMENTS", [])
    return tmp_path


def test_documents_are_rewritten_in_place_or_elsewhere_and_checked_byte_for_byte(root):
    said, folder, document = [], root / "results", root / "docs" / "a.md"
    expected = (f"Text {MEAN}0.700 ± 1.271<!-- end --> more.\n\n{TABLE}\n|  | both |\n| --- | --- |\n"
                "| deep | 0.700 ± 1.271 |\n\nSeeds: 2 of 10 planned.\n<!-- end -->\nend\n")
    assert render.render(root, folder, check=True, say=said.append) == 1 and "docs/a.md: line 1" in said[0]
    render.render(root, folder, into=root / "other", say=said.append)
    assert document.read_text("utf-8") == DOCUMENT and (root / "other" / "docs" / "a.md").read_text("utf-8") == expected
    assert render.render(root, folder, say=said.append) == 1 and document.read_text("utf-8") == expected
    assert render.render(root, folder, check=True) == render.render(root, folder) == 0
    document.write_text(expected.replace("0.700 ± 1.271 |", "0.701 ± 1.271 |"), "utf-8")
    assert render.render(root, folder, check=True, say=said.append) == 1


def test_the_claims_of_the_front_page_are_rendered_between_their_marks(root):
    """The figure and a row for each claim of the table; what is around them stays"""
    folder, path = ROOT / "results", root / "README.md"
    above, below = "# Title\n\n<!-- table: claims -->\n", "\n<!-- end -->\n\nText.\n"
    path.write_text(f"{above}old{below}", "utf-8")
    (root / "docs" / "a.md").unlink()
    assert render.render(root, folder, check=True) == 1
    assert render.render(root, folder) == 1
    text = path.read_text("utf-8")
    assert text.startswith(above) and text.endswith(below)
    figure, _, header, _, *rows = text.removeprefix(above).removesuffix(below).splitlines()
    assert figure.startswith("![") and figure.endswith("(viz/findings/claims.png)")
    assert header.startswith("| claim | paper |")
    sentences = [f"| {sentence}" for _, sentence, _ in claims.TABLE]
    assert [row.split(" | ")[0] for row in rows] == sentences
    assert render.render(root, folder, check=True) == 0


@pytest.mark.parametrize("text, fault", [
    ("<!-- table: three -->\n<!-- end -->", "a line of columns"),
    ("<!-- table: multimnist\ndeep = main/deep\n-->\n<!-- end -->", "a line of columns"),
    ("<!-- value: multimnist main/none, n_params --><!-- end -->", "has no such table and setting"),
    ("<!-- value: main/deep, n_params --><!-- end -->", "must be EXPERIMENT SETTING, KEY"),
    ("<!-- value: multimnist main/deep, n_params, short --><!-- end -->", "'short' is no style"),
    ("<!-- value: multimnist main/deep, wrong --><!-- end -->", "a result behind it lacks something"),
    (f"Text {MEAN}0.1 more.\n{MEAN}2<!-- end -->", "is no whole mark"), (f"{MEAN}0.1", "is no whole mark"),
    ("0.1<!-- end -->", "is no whole mark"), ("<!-- value:mean a -->0.1<!-- end -->", "is no whole mark"),
    (f"{MEAN}0.1<!--end-->", "is no whole mark")])
def test_a_damaged_mark_is_named_and_nothing_is_rewritten(root, text, fault):
    """What lies between a mark and the next end is replaced: it must be its own end"""
    (root / "docs" / "a.md").write_text("first line\n" + text, "utf-8")
    (root / "README.md").write_text(f"{MEAN}old<!-- end -->", "utf-8")
    with pytest.raises(InputError, match=f"(?s)a.md.*{fault}"):
        render.render(root, root / "results")
    assert (root / "docs" / "a.md").read_text("utf-8") == "first line\n" + text
    assert "old" in (root / "README.md").read_text("utf-8")
