"""Results as lines of tables, pins that tell which are stale, tables and numbers drawn from them into the documents."""
import base64
import dataclasses
import json
import math
import os
import re
import sys

import multimnist_capsnet as mc
import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from conftest import ROOT, TINY

sys.path[:0] = [str(ROOT / "results"), str(ROOT / "workflow")]
import ledger  # noqa: E402
import render  # noqa: E402
import runs  # noqa: E402
from runs import AFF, MULTI, NORB  # noqa: E402

MADE_WITH = {"versions": {"python": "3", "numpy": "2", "torch": "4"}, "machine": {
    "processor": "P"}}


def job(folder, name, **found):
    """What a run wrote: found, and what every result has; name: EXPERIMENT/TABLE/SETTING-SEED -> its path"""
    path = folder / "1" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    config = {"seed": int(name.rpartition("-")[2])} | found.pop("config", {})
    path.write_text(json.dumps({"experiment": name.split("/")[0], "config": config, **MADE_WITH, **found}))
    return path


@pytest.fixture
def results(tmp_path):
    """results({name: what was found, ...}) -> a Ledger of these in tmp_path/results"""
    def make(found):
        ledger.collect([job(tmp_path, name, **result) for name, result in found.items()], tmp_path / "results")
        return render.Ledger(tmp_path / "results")
    return make


@pytest.fixture
def accuracies(results):
    """accuracies(setting={seed: accuracy, ...}, ...) -> a Ledger of such results of multimnist_capsnet's table main"""
    return lambda **settings: results({
        f"{MULTI}/main/{setting}-{seed}": {"test_set_accuracy": value, "n_params": 1234567,
                                           "test_set_accuracy_ci95": [value - 0.01, value + 0.01]}
        for setting, runs in settings.items() for seed, value in runs.items()})


@pytest.fixture(scope="module")
def kept():
    return ledger.read(ROOT / "results")


# ---------------------------------------------------------------- lines

def test_lines_are_put_in_order_and_replaced_and_collecting_twice_changes_nothing(tmp_path):
    names = [f"{MULTI}/main/{run}" for run in ("deep-10", "b-c-2", "deep-9")]
    ledger.collect([job(tmp_path, name, test_hits=1) for name in names], tmp_path)
    table = tmp_path / MULTI / "main.jsonl"
    lines = [json.loads(line) for line in table.read_text().splitlines()]
    assert [(line["setting"], line["seed"], line["pins"]) for line in lines] == [
        ("b-c", 2, 1), ("deep", 9, 1), ("deep", 10, 1)]
    before = table.read_bytes()
    paths = [job(tmp_path, name, test_hits=1) for name in names]
    ledger.collect(paths, tmp_path)
    assert table.read_bytes() == before and not any(path.exists() for path in paths)
    ledger.collect([job(tmp_path, names[2], test_hits=7)], tmp_path)
    assert [line["test_hits"] for line in ledger.read(tmp_path).values()] == [1, 7, 1]


def test_a_killed_collect_leaves_the_old_table_whole_and_the_results_where_they_were(tmp_path, monkeypatch):
    ledger.collect([job(tmp_path, f"{MULTI}/main/deep-0", test_hits=1)], tmp_path)
    before, path = ledger.read(tmp_path), job(tmp_path, f"{MULTI}/main/deep-1", test_hits=2)

    def power_cut(*_):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", power_cut)
        ledger.collect([path], tmp_path)
    assert ledger.read(tmp_path) == before and path.exists()
    ledger.collect([path], tmp_path)
    assert [line["test_hits"] for line in ledger.read(tmp_path).values()] == [1, 2]


@pytest.mark.parametrize("change", [
    "no JSON", {"config": {"seed": 3}}, {"experiment": NORB}, {"seed": 0}, {"pins": None}], ids=str)
def test_a_line_that_is_no_result_is_named(accuracies, tmp_path, change):
    accuracies(deep={0: 0.5, 1: 0.6})
    path = tmp_path / "results" / MULTI / "main.jsonl"
    first, second = path.read_text().splitlines()
    spoilt = change if isinstance(change, str) else json.dumps(json.loads(second) | change)
    path.write_text(f"{first}\n{spoilt}\n")
    with pytest.raises(mc.InputError, match="main.jsonl, line 2: not a result"):
        render.Ledger(tmp_path / "results")


def test_hits_of_every_image_are_unpacked_in_the_images_order(results):
    """Seven images, of which the first two and the last are named right"""
    hits = np.array([1, 1, 0, 0, 0, 0, 1], bool)
    bits = {"affine": base64.b64encode(np.packbits(hits)).decode()}
    found = results({f"{AFF}/free/gap-0": {"hit_bits": bits, "affine_n": 7}, f"{AFF}/free/gap-1": {}})
    assert list(found.hits(AFF, "free/gap", "affine")) == [0] and found.hits(AFF, "free/gap", "moved") == {}
    np.testing.assert_array_equal(found.hits(AFF, "free/gap", "affine")[0], hits)


# ---------------------------------------------------------------- what is stale

def test_every_run_has_a_pin_and_every_result_is_of_a_run_in_its_place_and_names_no_path(kept):
    assert all(ledger.since(result) for result in ledger.BY_NAME.values()) and kept.keys() <= ledger.BY_NAME.keys()
    for path in (ROOT / "results").rglob("*.jsonl"):
        texts = path.read_text().splitlines()
        places = [(line["setting"], line["seed"]) for line in map(json.loads, texts)]
        assert places == sorted(places), path
        assert not any(re.search(r'"/(home|root|tmp|work|Users)/|\\\\', text) for text in texts), path
    assert runs.EXPERIMENTS[:3] == [MULTI, NORB, AFF]


@pytest.mark.parametrize("experiment, pin, settings", [
    (NORB, "--data shapes --model gap --preset small", ["shapes/gap"]), (MULTI, "--preset classic", ["main/classic"]),
    (AFF, "--model gap --padding 8", ["free/gap-8", "long/gap-8", "probes/gap-8", "weights/gap"])])
def test_a_changed_pin_makes_its_own_results_stale_and_no_other(kept, monkeypatch, experiment, pin, settings):
    """Those of its flags, of any size, and what was measured on weights that such a run made"""
    pins = {name: {flags: {"since": 1} for flags in of} for name, of in ledger.PINS.items()}
    monkeypatch.setattr(ledger, "PINS", pins)
    for spoil in (lambda: pins[experiment][pin].update(since=10 ** 9), lambda: pins[experiment].pop(pin)):
        spoil()
        stale = {name.rpartition("-")[0] for name, line in kept.items() if ledger.stale(name, line)}
        assert sorted(stale) == [f"{experiment}/{setting}" for setting in settings]


@pytest.mark.parametrize("name", [f"{MULTI}/weights/deep-0", f"{AFF}/weights/gap-0"])
def test_a_result_of_other_weights_is_stale(kept, name):
    line = kept[name]
    assert ledger.same_weights(line)
    parts = [("networks", file) for file in line.get("networks", {})] or [("loaded", "sha256")]
    assert all(ledger.stale(name, line | {key: line[key] | {part: "0" * 64}}) for key, part in parts)


def test_weights_are_made_again_when_another_run_is_the_one_that_is_kept(kept, monkeypatch):
    path, result = next(iter(runs.WEIGHTS.items()))
    history = kept[result.name]["history"]
    other = {result.name: {"history": history | {"seconds": [second + 1 for second in history["seconds"]]}}}
    monkeypatch.setattr(ledger, "wanting", lambda *_: [])
    for lines, wanted in (kept, {}), (kept | other, {path: result}):
        monkeypatch.setattr(ledger, "read", lambda folder, lines=lines: lines)
        assert ledger.weights_wanting("") == wanted


def test_a_table_says_what_is_stale_and_what_it_was_made_with(accuracies, monkeypatch):
    monkeypatch.setattr(ledger, "PINS", {MULTI: {"": {"since": 1}}})
    found = accuracies(deep={0: 0.6}, nobodys={0: 0.7})
    text = render.about(found, MULTI, ["main/deep", "main/nobodys"])
    assert "Seed 0; P, Python 3, NumPy 2." in text and text.endswith("to be made again: main/nobodys.")
    assert "Stale" not in render.about(found, MULTI, ["main/deep"])
    assert "Not run" in render.about(found, MULTI, ["main/none"])


# ---------------------------------------------------------------- what can be said of results

def test_means_intervals_and_paired_differences_by_hand(accuracies):
    """0.6 and 0.8: mean 0.7, standard deviation 0.1 sqrt 2, t 12.706; differences 0.1 and 0.3 of the seeds both have"""
    found = accuracies(a={0: 0.6, 1: 0.8}, b={1: 0.5, 0: 0.5, 2: 0.9}, one={7: 0.93})
    assert found.mean(MULTI, "main/a") == "0.700 +- 1.271"
    assert found.plain(MULTI, "main/a", "test_set_accuracy", 2) == "0.70"
    assert found.difference(MULTI, "main/a", "main/b") == "+0.200 +- 1.271"
    assert found.mean(MULTI, "main/one") == "0.930 (0.920-0.940)"
    assert found.plain(MULTI, "main/one", "n_params") == "1,234,567"
    assert found.difference(MULTI, "main/a", "main/one") == found.mean(MULTI, "main/none") == "not run"


def test_runs_that_never_got_to_where_they_were_to_stop_are_not_compared(results):
    """a: both seeds reached 0.99 on validation digits; b: seed 0 alone; c: none"""
    found = results({f"{AFF}/matched/{name}-{seed}": {
        "config": {"stop_at": 0.99}, "history": {"val_accuracy": [0.5, best]},
        "affine_accuracy": best - 0.1 * (name == "b")}
        for name, reached in (("a", (0.992, 0.991)), ("b", (0.993, 0.98)), ("c", (0.97, 0.98)))
        for seed, best in enumerate(reached)})
    assert found.difference(AFF, "matched/a", "matched/b", "affine_accuracy") == "+0.099"
    assert found.difference(AFF, "matched/a", "matched/c", "affine_accuracy") == "c did not get there"
    assert found.difference(AFF, "matched/a", "matched/d", "affine_accuracy") == "not run"


def cells(text, start):
    """Of the first row of a table that begins so"""
    return next([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
                if line.startswith(f"| {start}"))


def test_tables_of_heads_by_hand(results):
    """Held-out 0.2 and 0.1, 0.1 and 0.1: differences 0.1 and 0, mean 0.05, t 12.706 times half of 0.1; 80 degrees are
    40 from the training range, and there the mean over classes is the held-out accuracy"""
    found = results({f"{NORB}/{setting}-{seed}": {
        "config": dataclasses.asdict(sn.Config(seed=seed)), "seed": seed, "n_params": 1, "familiar": 0.9,
        "held_out": held_out, "drop": 0.9 - held_out, "seconds_train": 1.0, "ms_per_step": 1.0, "history": {},
        "held_out_per_class": [held_out] * 5, "sweep": {"angles": [0, 80], "accuracy": [1.0, held_out],
                                                        "per_class": [[1.0] * 5, [0, 0, 0, 0, 5 * held_out]]}}
        for setting, found in (("standard/a", [0.2, 0.1]), ("standard/b", [0.1, 0.1]), ("toys-1/a", [0.15]))
        for seed, held_out in enumerate(found)})
    text = render.norb_routing(found, ("standard", "toys-1"), (("routing", "a", "b"), ("none", "a", "missing")))
    assert cells(text, "routing")[1:] == ["+0.000 +- 0.000", "+0.050 +- 0.635", "not run", "not run"]
    text = render.norb_comparison(found, "standard", ("a", "b", "toys-1/a"))
    assert cells(text, "a")[1:] == ["0.900 +- 0.000", "0.150 +- 0.635", "0.750 +- 0.635", "", "", ""]
    assert cells(text, "b")[4:] == ["-0.050 +- 0.635", "+0.050 +- 0.635", ""]
    text = render.norb_sweep(found, (("one", "standard"), ("two", "toys-1")), ("a", "b"))
    assert cells(text, "`a` minus `b`")[1:] == ["+0.050 +- 0.635", "not run"]
    assert cells(render.norb_standard(found, (("first", "a"),)), "first")[1:] == ["85.0 +- 63.5", "10.0 +- 0.0"]
    assert cells(render.norb_by_distance(found, "standard", ("a", "b")), "40 | `b`")[2:] == [
        *["0.00"] * 4, "0.50", "0.100", "-0.050 +- 0.635"]


def test_tables_of_sharing_and_capsules_by_hand(results):
    """Sharing: ((.96 - .90) + (.94 - .80)) / 2 and ((.96 - .92) + (.95 - .80)) / 2; capsules: (.02 + .10) / 2 and
    (.01 + .12) / 2; one with the other: .02 - .10 and .01 - .12, whose mean is -.095. Lengths tell what is no digit
    by 0.9 - 0.8 and 0.7 - 0.4 better than probabilities"""
    affine = {"shared": (0.96, 0.96), "caps-1": (0.90, 0.92), "gap": (0.94, 0.95), "dense": (0.80, 0.80)}
    areas = {"shared": ("length", 0.9, 0.7), "dense": ("probability", 0.8, 0.4)}
    found = results({f"{AFF}/free/{name}-{seed}": {
        "affine_accuracy": value, "familiar_accuracy": 0.99, "centred_accuracy": 0.97, "detection": {
            "halves": {areas[name][0]: areas[name][1 + seed], "redrawn": None} if name in areas else {}}}
        for name, values in affine.items() for seed, value in enumerate(values)})
    lines = render.TABLES["affnist two by two"](found).splitlines()
    assert lines[4].startswith("| normalised, affine | +0.0975 +- ")
    assert "| +0.0625 +- " in lines[4] and "| -0.0950 +- " in lines[4] and "not run" in lines[5]
    assert render.detection_difference(found, "free/shared", "free/dense", "halves") == "+0.200 +- 1.271"
    assert render.detection_difference(found, "free/shared", "free/gap", "halves") == "not run"


def test_tables_without_results_say_so(tmp_path):
    for name, table in render.TABLES.items():
        text = table(render.Ledger(tmp_path))
        assert "not run" in text and "nan" not in text, name


# ---------------------------------------------------------------- the documents

DOCUMENT = "Text <!-- value: mean a -->0.1<!-- end --> more.\n\n<!-- table: two -->\nold\n<!-- end -->\nend\n"


@pytest.fixture
def root(accuracies, tmp_path, monkeypatch):
    """A project with results, one document and two names"""
    accuracies(a={0: 0.6, 1: 0.8})
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("nothing rendered\n")
    (tmp_path / "docs" / "a.md").write_text(DOCUMENT)
    monkeypatch.setattr(render, "VALUES", {"mean a": lambda ledger: ledger.mean(MULTI, "main/a")})
    monkeypatch.setattr(render, "TABLES", {"two": lambda ledger: f"| {ledger.mean(MULTI, 'main/a')} |"})
    return tmp_path


def test_documents_are_rewritten_in_place_or_elsewhere_and_checked_byte_for_byte(root):
    said, results, document = [], root / "results", root / "docs" / "a.md"
    expected = ("Text <!-- value: mean a -->0.700 +- 1.271<!-- end --> more.\n\n"
                "<!-- table: two -->\n| 0.700 +- 1.271 |\n<!-- end -->\nend\n")
    assert render.render(root, results, check=True, say=said.append) == 1 and "docs/a.md: line 1" in said[0]
    render.render(root, results, into=root / "other", say=said.append)
    assert document.read_text() == DOCUMENT and (root / "other" / "docs" / "a.md").read_text() == expected
    assert render.render(root, results, say=said.append) == 1 and document.read_text() == expected
    assert render.render(root, results, check=True) == render.render(root, results) == 0
    document.write_text(expected.replace("0.700 +- 1.271 |", "0.701 +- 1.271 |"))
    assert render.render(root, results, check=True, say=said.append) == 1


@pytest.mark.parametrize("text, fault", [
    ("<!-- table: three -->\n<!-- end -->", "names the table 'three'"),
    ("Text <!-- value: mean a -->0.1 more.\n<!-- value: mean a -->2<!-- end -->", "is no whole mark"),
    ("<!-- value: mean a -->0.1", "is no whole mark"), ("0.1<!-- end -->", "is no whole mark"),
    ("<!-- value:mean a -->0.1<!-- end -->", "is no whole mark"),
    ("<!-- value: mean a -->0.1<!--end-->", "is no whole mark")])
def test_a_damaged_mark_is_named_and_nothing_is_rewritten(root, text, fault):
    """What lies between a mark and the next end is replaced: it must be its own end"""
    (root / "docs" / "a.md").write_text("first line\n" + text)
    (root / "README.md").write_text("<!-- value: mean a -->old<!-- end -->")
    with pytest.raises(mc.InputError, match=f"a.md.*{fault}"):
        render.render(root, root / "results")
    assert (root / "docs" / "a.md").read_text() == "first line\n" + text and "old" in (root / "README.md").read_text()


def test_what_is_not_there_is_named(results, tmp_path):
    with pytest.raises(mc.InputError, match="nowhere: no such folder"):
        render.render(tmp_path, tmp_path / "nowhere")
    with pytest.raises(mc.InputError, match="table 'multimnist results': a result behind it lacks something"):
        render.rendered("<!-- table: multimnist results --><!-- end -->", results({f"{MULTI}/main/deep-0": {}}), "a.md")


def test_the_projects_documents_say_what_its_results_say_and_use_every_name():
    said = []
    assert render.render(ROOT, ROOT / "results", check=True, say=said.append) == 0, said
    marks = render.MARK.findall("".join(path.read_text() for path in render.documents(ROOT)))
    assert {name for kind, name, _ in marks if kind == "table"} == set(render.TABLES)
    assert {name for kind, name, _ in marks if kind == "value"} == set(render.VALUES)


# ---------------------------------------------------------------- what --out-json writes

def test_a_result_holds_its_settings_and_a_thinned_history_rounded(tmp_path):
    history = {"source": "mnist", "seconds": 1.0, "steps": 9,
               "epochs": [{"epoch": k, "val_loss": 1 / (k + 1)} for k in range(100)]}
    config = dataclasses.replace(TINY, lr=0.0123456789, checkpoint="run.npz", out_json="r.json")
    found = {"share": np.float64(2 / 3), "none": math.nan}
    mc.write_json(tmp_path / "r.json", mc.result_of(config, {}, history, found))
    read = json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read["experiment"] == MULTI and read["share"] == 0.66667 and read["none"] is None
    assert mc.config_of(read["config"], "r") == dataclasses.replace(config, checkpoint="", out_json="", quiet=False)
    rows = [dict(zip(read["history"], row)) for row in zip(*read["history"].values())]
    assert len(rows) == mc.MAX_LOOKS and rows[0] == {"epoch": 0, "val_loss": 1.0} and rows[-1]["epoch"] == 99
