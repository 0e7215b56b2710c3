"""Results as files, tables drawn from them, stamps: what is stale, and what is the same to the bit."""
import dataclasses
import hashlib
import json
import math
import re
import sys

import affnist_capsnet as ac
import multimnist_capsnet as mc
import smallnorb_novel_viewpoint as sn

import bench_affnist_adversarial
import bench_affnist_surest
import bench_synthetic_digits
import numpy as np
import pytest
from conftest import ROOT, TINY, toy_digits

sys.path.insert(0, str(ROOT / "results"))
import render  # noqa: E402

MULTI, NORB, AFF = "multimnist_capsnet", "smallnorb_novel_viewpoint", "affnist_capsnet"


@pytest.fixture
def ledger(tmp_path):
    """ledger(setting={seed: accuracy, ...}, ...) -> a Ledger of such results of the first experiment"""
    def make(stale=(), **settings):
        for setting, runs in settings.items():
            for seed, accuracy in runs.items():
                path = tmp_path / "results" / MULTI / "t" / f"{setting}-{seed}.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                config = mc.settings_of(mc.Config(seed=seed))
                path.write_text(json.dumps({
                    "experiment": MULTI, "config": config, "test_set_accuracy": accuracy, "n_params": 1234567,
                    "test_set_accuracy_ci95": [accuracy - 0.01, accuracy + 0.01], "weights_sha256": "bits",
                    "script_sha256": "old" if setting in stale else render.script_sha256(MULTI),
                    "versions": {"python": "3", "numpy": "2"}, "machine": {"processor": "P", "blas_kernels": "K"}}))
        return render.Ledger(tmp_path / "results")
    return make


# ---------------------------------------------------------------- what can be said of results

def test_means_intervals_and_paired_differences_by_hand(ledger):
    """0.6 and 0.8: mean 0.7, standard deviation 0.1 sqrt 2, t 12.706; differences 0.1 and 0.3 of the seeds both have"""
    found = ledger(a={0: 0.6, 1: 0.8}, b={1: 0.5, 0: 0.5, 2: 0.9}, one={7: 0.93})
    assert found.mean(MULTI, "t/a") == "0.700 +- 1.271" and found.plain(MULTI, "t/a", "test_set_accuracy", 2) == "0.70"
    assert found.difference(MULTI, "t/a", "t/b") == "+0.200 +- 1.271"
    assert found.mean(MULTI, "t/one") == "0.930 (0.920-0.940)"
    assert found.plain(MULTI, "t/one", "n_params") == "1,234,567"
    assert found.difference(MULTI, "t/a", "t/one") == found.mean(MULTI, "t/none") == "not run"


def test_runs_that_never_got_to_where_they_were_to_stop_are_not_compared(tmp_path):
    """a: both seeds reached 0.99 on validation digits; b: seed 0 alone; c: none"""
    for name, reached in (("a", (0.992, 0.991)), ("b", (0.993, 0.98)), ("c", (0.97, 0.98))):
        for seed, best in enumerate(reached):
            path = tmp_path / AFF / "matched" / f"{name}-{seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({
                "experiment": AFF, "config": {"seed": seed, "stop_at": 0.99}, "history": {"val_accuracy": [0.5, best]},
                "affine_accuracy": best - 0.1 * (name == "b")}))
    found = render.Ledger(tmp_path)
    assert found.difference(AFF, "matched/a", "matched/b", "affine_accuracy") == "+0.099"
    assert found.difference(AFF, "matched/a", "matched/c", "affine_accuracy") == "c did not get there"
    assert found.difference(AFF, "matched/a", "matched/d", "affine_accuracy") == "not run"


def test_lengths_are_compared_with_probabilities_seed_by_seed(tmp_path):
    """0.9 - 0.8 and 0.7 - 0.4: mean 0.2, standard deviation 0.1 sqrt 2, t 12.706; a third seed has no partner"""
    for name, score, areas in ("a", "length", (0.9, 0.7)), ("b", "probability", (0.8, 0.4, 0.5)):
        for seed, area in enumerate(areas):
            path = tmp_path / AFF / "free" / f"{name}-{seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            detection = {"halves": {score: area, "smoothness": 0.99, "redrawn": None}}
            path.write_text(json.dumps({"experiment": AFF, "config": {"seed": seed}, "detection": detection}))
    found = render.Ledger(tmp_path)
    assert render.probed(found, "free/b", "detection", "halves", render.SUREST) == {0: 0.8, 1: 0.4, 2: 0.5}
    assert render.probed(found, "free/b", "detection", "halves", ("redrawn",)) == {}
    assert render.detection_difference(found, "free/a", "free/b", "halves") == "+0.200 +- 1.271"
    assert render.detection_difference(found, "free/a", "free/c", "halves") == "not run"


def test_a_table_says_what_is_stale_and_what_it_was_made_with(ledger):
    found = ledger(stale=["b"], a={0: 0.6}, b={0: 0.7})
    assert found.stale(MULTI, ["t/a", "t/b", "t/none"]) == ["t/b"]
    text = render.about(found, MULTI, ["t/a", "t/b"])
    assert "Seed 0; P, K kernels, Python 3, NumPy 2." in text and "**Stale**" in text and "t/b" in text
    assert "Stale" not in render.about(found, MULTI, ["t/a"]) and "Not run" in render.about(found, MULTI, ["t/none"])


@pytest.mark.parametrize("spoil", ["text", "another seed", "another experiment", "no settings"])
def test_a_file_that_is_no_result_is_named(ledger, tmp_path, spoil):
    ledger(a={0: 0.6})
    path = tmp_path / "results" / MULTI / "t" / "a-0.json"
    result = json.loads(path.read_text())
    path.write_text({"text": "hello", "another seed": json.dumps(result | {"config": {"seed": 3}}),
                     "another experiment": json.dumps(result | {"experiment": NORB}),
                     "no settings": json.dumps({"experiment": MULTI})}[spoil])
    with pytest.raises(mc.InputError, match="a-0.json: not a result"):
        render.Ledger(tmp_path / "results")


# ---------------------------------------------------------------- the documents

DOCUMENT = "Text <!-- value: mean a -->0.1<!-- end --> more.\n\n<!-- table: two -->\nold\n<!-- end -->\nend\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A project with one document and two names"""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("nothing rendered\n")
    (tmp_path / "docs" / "a.md").write_text(DOCUMENT)
    monkeypatch.setattr(render, "VALUES", {"mean a": lambda ledger: ledger.mean(MULTI, "t/a")})
    monkeypatch.setattr(render, "TABLES", {"two": lambda ledger: f"| {ledger.mean(MULTI, 't/a')} |"})
    return tmp_path


def test_documents_are_rewritten_in_place_and_checked_byte_for_byte(ledger, root):
    ledger(a={0: 0.6, 1: 0.8})
    said, results = [], root / "results"
    assert render.render(root, results, check=True, say=said.append) == 1 and "docs/a.md: line 1" in said[0]
    assert (root / "docs" / "a.md").read_text() == DOCUMENT
    assert render.render(root, results, say=said.append) == 1
    expected = ("Text <!-- value: mean a -->0.700 +- 1.271<!-- end --> more.\n\n"
                "<!-- table: two -->\n| 0.700 +- 1.271 |\n<!-- end -->\nend\n")
    assert (root / "docs" / "a.md").read_text() == expected
    assert render.render(root, results, check=True) == render.render(root, results) == 0
    (root / "docs" / "a.md").write_text(expected.replace("0.700 +- 1.271 |", "0.701 +- 1.271 |"))
    assert render.render(root, results, check=True, say=said.append) == 1


def test_documents_can_be_written_elsewhere(ledger, root):
    ledger(a={0: 0.6})
    render.render(root, root / "results", into=root / "other")
    assert "0.600 (0.590-0.610)" in (root / "other" / "docs" / "a.md").read_text()
    assert (root / "docs" / "a.md").read_text() == DOCUMENT


def test_a_name_that_is_not_defined_is_refused(ledger, root):
    (root / "docs" / "a.md").write_text("<!-- table: three -->\n<!-- end -->")
    (root / "results").mkdir()
    with pytest.raises(mc.InputError, match="a.md: names the table 'three'"):
        render.render(root, root / "results")


DAMAGED = {"no end": ("Text <!-- value: mean a -->0.1 more.\n<!-- value: mean a -->2<!-- end -->", "has no end"),
           "no last end": ("<!-- value: mean a -->0.1", "has no end"),
           "no beginning": ("0.1<!-- end -->", "without its beginning"),
           "mistyped": ("<!-- value:mean a -->0.1<!-- end -->", "is no mark"),
           "mistyped end": ("<!-- value: mean a -->0.1<!--end-->", "is no mark")}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_mark_is_named_and_nothing_is_rewritten(ledger, root, name):
    """What lies between a mark and the next end is replaced: it must be its own end"""
    ledger(a={0: 0.6})
    text, fault = DAMAGED[name]
    (root / "docs" / "a.md").write_text("first line\n" + text)
    (root / "README.md").write_text("<!-- value: mean a -->old<!-- end -->")
    with pytest.raises(mc.InputError, match=f"a.md.*{fault}"):
        render.render(root, root / "results")
    assert (root / "docs" / "a.md").read_text() == "first line\n" + text and "old" in (root / "README.md").read_text()


def test_no_folder_of_results_is_not_an_empty_one(root):
    with pytest.raises(mc.InputError, match="nowhere: no such folder"):
        render.render(root, root / "nowhere")


def test_a_result_that_lacks_something_is_named_by_the_table_that_needs_it(tmp_path):
    path = tmp_path / MULTI / "main" / "deep-3.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"experiment": MULTI, "config": {"seed": 3}}))
    with pytest.raises(mc.InputError, match="table 'multimnist results': a result behind it lacks something"):
        render.rendered("<!-- table: multimnist results --><!-- end -->", render.Ledger(tmp_path), "a.md")


def test_a_result_of_other_weights_is_stale(ledger, tmp_path):
    found = ledger(a={0: 0.6}, b={0: 0.6})
    now = hashlib.sha256(mc.WEIGHTS.read_bytes()).hexdigest()
    for setting, sha256 in ("a", now), ("b", "0" * 64):
        found.results[MULTI, "t", setting][0]["loaded"] = {"file": mc.WEIGHTS.name, "sha256": sha256}
    assert found.stale(MULTI, ["t/a", "t/b"]) == ["t/b"]
    several = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (mc.WEIGHTS, ac.WEIGHTS)}
    for setting, networks in ("a", several | {ac.WEIGHTS.name: "0" * 64}), ("b", several):
        del found.results[MULTI, "t", setting][0]["loaded"]
        found.results[MULTI, "t", setting][0]["networks"] = networks
    assert found.stale(MULTI, ["t/a", "t/b"]) == ["t/a"]


def test_a_stamp_of_shipped_networks_is_renewed_where_they_do_as_before(digits, monkeypatch):
    monkeypatch.setattr(ac, "load_digits", lambda config: digits | {"asked for": config.digits})
    monkeypatch.setattr(bench_affnist_adversarial, "first_digits", lambda digits, seed: {digits["asked for"]: seed})
    result = {"experiment": AFF, "source": "mnist", "config": {"seed": 4}}
    assert render.same_evaluation(result | {"first": {"mnist": 4}})
    assert not render.same_evaluation(result | {"first": {"mnist": 5}})
    monkeypatch.setattr(render, "MADE_BY", {})                                          # the test below
    monkeypatch.setattr(bench_affnist_surest, "measured", lambda digits, settings: {"shared": {"halves": {
        digits["asked for"]: (settings["seed"] / settings["n_test"], 0.01)}}})
    for area, same in (0.5, True), (0.5004, False):
        surest = {"shared": {"halves": {"mnist": [area, 0.01]}}}
        assert render.same_evaluation(result | {"surest": surest, "bench": {"n_test": 8}}) is same


@pytest.mark.parametrize("experiment, key, names", [
    (AFF, "nearest", ["bench_affnist_nearest.py"]), (AFF, "adversarial", ["bench_affnist_adversarial.py"]),
    (AFF, "surest", ["bench_affnist_surest.py", "bench_affnist_adversarial.py"]),
    (MULTI, "nearest_placed", ["bench_multimnist_nearest.py", "bench_affnist_nearest.py"])])
def test_a_result_vouches_for_the_scripts_in_tests_that_made_it(experiment, key, names, monkeypatch):
    monkeypatch.setattr(render, "same_looks", lambda result: True)
    digest = hashlib.sha256(b"".join((ROOT / "tests" / name).read_bytes() for name in names)).hexdigest()
    for sha256, same in (digest, True), ("0" * 64, False):
        assert render.same_evaluation({"experiment": experiment, key: {}, "bench": {"sha256": sha256}}) is same


def test_every_result_that_names_a_digest_of_its_benchmark_is_checked():
    for path in (ROOT / "results").rglob("*.json"):
        result = json.loads(path.read_text())
        if "sha256" in result.get("bench", {}):
            assert len(render.MADE_BY.keys() & result.keys()) == 1, path


def test_tables_of_the_shipped_networks_by_hand(tmp_path):
    stamp = {"experiment": AFF, "config": {"seed": 0}, "script_sha256": "old",
             "versions": {"python": "3", "numpy": "2"}, "machine": {"processor": "P", "blas_kernels": "K"}}
    kinds = {kind: {"longest": [k / 10, 0.01]} for k, kind in enumerate(ac.NO_DIGITS)}
    for name, found in (("adversarial", {"adversarial": {"a": {
            "no step": {"0": [0.9, [0.8, 0.95]]}, "random signs": {"8": [0.7, [0.6, 0.75]]}}}}), (
            "surest", {"surest": {"a": kinds}})):
        path = tmp_path / AFF / "weights" / f"{name}-0.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(stamp | found))
    ledger = render.Ledger(tmp_path)
    lines = render.TABLES["affnist adversarial"](ledger).splitlines()
    assert lines[0] == "| step, grey levels: | 0 | 8 | 16 | 32 |"
    assert lines[2:4] == ["| `a`, no step | 0.900 [0.800, 0.950] |  |  |  |",
                          "| `a`, random signs |  | 0.700 [0.600, 0.750] |  |  |"]
    lines = render.TABLES["affnist surest"](ledger).splitlines()
    assert lines[0] == "|  | halves | strokes | noise | shuffled | inverted |"
    assert lines[2].startswith("| `a`: longest | 0.000 +- 0.010 | 0.100 +- 0.010 |")


def test_the_projects_documents_say_what_its_results_say():
    said = []
    assert render.render(ROOT, ROOT / "results", check=True, say=said.append) == 0, said


def test_every_table_and_value_is_used_in_a_document():
    text = "".join(path.read_text() for path in render.documents(ROOT))
    assert {name for kind, name, _ in render.MARK.findall(text) if kind == "table"} == set(render.TABLES)
    assert {name for kind, name, _ in render.MARK.findall(text) if kind == "value"} == set(render.VALUES)


def test_results_in_the_repository_are_small_and_name_no_path():
    for path in (ROOT / "results").rglob("*.json"):
        assert path.stat().st_size <= 5000, path
        assert not re.search(r'"/|\\\\|[a-z]:/', path.read_text()), path


# ---------------------------------------------------------------- what --out-json writes

def run(digits, **changes):
    config = dataclasses.replace(TINY, n_epochs=12, n_train=160, batch_size=40, **changes)
    params, history = mc.train(config, data=digits)
    test = {"set_accuracy": 0.25, "hits": 4, "n": 16, "any_accuracy": 0.5, "recon_mse": 0.1, "baseline_recon_mse": 0.2}
    return config, params, history, mc.results_of(config, params, history, test)


def test_a_result_holds_its_settings_the_bits_and_what_they_depend_on(digits, tmp_path):
    paths = {"checkpoint": str(tmp_path / "run.npz"), "out_json": str(tmp_path / "r.json")}
    config, params, history, result = run(digits, **paths)
    assert result["experiment"] == MULTI and result["script_sha256"] == render.script_sha256(MULTI)
    assert mc.config_of(result["config"], "r") == dataclasses.replace(config, checkpoint="", out_json="", quiet=False)
    assert not {"checkpoint", "resume", "out_json", "quiet", "mnist_dir"} & result["config"].keys()
    assert set(result["machine"]) == {"processor", "cores", "blas_kernels"} and result["machine"]["cores"] > 0
    seen = {}
    config = dataclasses.replace(config, checkpoint="")
    mc.train(config, lambda step, weights, _: seen.update({step: mc.digest_of(weights)}), 20, digits)
    assert result["weights_sha256"] == seen[40] != seen[20] and len({*seen.values()}) == len(seen) == 4
    assert mc.history_rows(result["history"]) == history["epochs"]


def test_the_stamp_survives_resuming_and_is_missing_of_a_shorter_run(digits, tmp_path):
    _, _, _, whole = run(digits)
    config = dataclasses.replace(TINY, n_epochs=12, n_train=160, batch_size=40, checkpoint=str(tmp_path / "run.npz"))

    def power_cut(step, *_):
        if step == 43:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        mc.train(config, power_cut, 1, digits)
    _, history = mc.train(dataclasses.replace(config, resume=True), data=digits)
    assert history["weights_sha256"] == whole["weights_sha256"]
    _, history = mc.train(TINY, data=digits)
    assert "weights_sha256" not in history


def test_history_is_thinned_and_floats_are_rounded_but_for_the_settings(digits, tmp_path):
    history = {"source": "mnist", "seconds": 1.0, "steps": 9, "weights_sha256": "x",
               "epochs": [{"epoch": k, "val_loss": 1 / (k + 1)} for k in range(100)]}
    config = dataclasses.replace(TINY, lr=0.0123456789)
    result = mc.result_of(config, {}, history, {"share": np.float64(2 / 3), "none": np.nan})
    assert len(result["history"]["epoch"]) == mc.MAX_LOOKS and result["history"]["epoch"][::mc.MAX_LOOKS - 1] == [0, 99]
    mc.write_json(tmp_path / "r.json", result)
    read = json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read["share"] == 0.66667 and read["none"] is None and read["config"]["lr"] == 0.0123456789
    assert (tmp_path / "r.json").stat().st_size < 4096


def test_digests_tell_arrays_apart():
    a = {"x": np.zeros((2, 3), np.float32), "y": np.ones(2)}
    changed = [a["x"].reshape(3, 2), a["x"].astype(np.float64), a["x"] + np.float32(1e-30)]
    others = [*(a | {"x": x} for x in changed), {"z": a["x"], "y": a["y"]}, {"y": a["y"]}]
    assert len({mc.digest_of(arrays) for arrays in (a, *others)}) == 6
    same = dict(reversed(a.items())), a | {"x": np.asfortranarray(a["x"])}
    assert {mc.digest_of(arrays) for arrays in same} == {mc.digest_of(a)}


# ---------------------------------------------------------------- benchmarks

@pytest.fixture(scope="module")
def timed(run_script, tmp_path_factory):
    """What --out-json of the benchmark of a step holds, at toy size"""
    path = tmp_path_factory.mktemp("bench") / "default-0.json"
    done = run_script("tests/bench_multimnist_step.py", "--no-torch", "--rounds", 1, "--repeats", 1, "--batch-size", 2,
                      "--threads", 1, "--out-json", path)
    assert done.returncode == 0 and done.stderr == "" and path.stat().st_size < 4096, done.stderr
    result = json.loads(path.read_text())
    assert f"peak memory of training: {result['peak_rss_mb']:.0f} MB" in done.stdout
    return result


def test_a_benchmark_is_a_result_whose_stamp_is_of_training(timed):
    config = mc.config_of(timed["config"], "r")
    assert timed["experiment"] == MULTI and (config.seed, config.batch_size, config.threads) == (0, 2, 1)
    assert timed["bench"] == {"threads": 1, "rounds": 1, "repeats": 1} and set(timed["steps"]) == {"numpy", "floor"}
    assert all(step["min"] <= step["ms"] <= step["max"] for step in timed["steps"].values())
    assert timed["steps"]["numpy"]["ratio"] == 1 and timed["versions"]["torch"] is None and timed["gflop"] > 0.1
    assert timed["stages"]["loss_and_grads"] > timed["stages"]["conv2d_forward"] > 0
    assert config.n_train == mc.STAMP_STEPS * config.batch_size and len(timed["weights_sha256"]) == 64


def write_benchmarks(folder, result, **settings):
    """settings: {name of the setting: what differs from `result`}"""
    for setting, changes in settings.items():
        path = folder / MULTI / "speed" / f"{setting.replace('_', '-')}-0.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        mc.write_json(path, result | changes)


def test_tables_of_speed_by_hand(tmp_path):
    step = {"ms": 20, "min": 19.96, "max": 21, "ratio": 1.0}
    result = {
        "experiment": MULTI, "config": mc.settings_of(mc.Config(threads=2)), "script_sha256": "old", "peak_rss_mb": 234,
        "bench": {"threads": 2, "rounds": 9, "repeats": 10}, "gflop": 4.0849, "stages": {"a": 1.5, "b": 0.25},
        "versions": {"python": "3", "numpy": "2", "torch": "4"}, "machine": {"processor": "P", "blas_kernels": "K"},
        "steps": {"numpy": step, "compiled": step | {"ms": 26, "ratio": 0.7749}}}
    slow = {"steps": {"numpy": step | {"ms": 500}}, "peak_rss_mb": 863.2, "script_sha256": render.script_sha256(MULTI)}
    slow |= {"versions": result["versions"] | {"torch": None}, "bench": {"threads": 1, "rounds": 1, "repeats": 3}}
    write_benchmarks(tmp_path, result, deep={}, deep_avx2={"stages": {"b": 0.5, "c": 2}}, paper=slow)
    found = render.Ledger(tmp_path)
    lines = render.TABLES["multimnist speed"](found).splitlines()
    assert lines[2] == ("| this program | 20.0 (20.0-21.0) | 1.00 | 20.0 (20.0-21.0) | 1.00 | not run |  | not run |  "
                        "| 500.0 (20.0-21.0) | 1.00 |")
    assert lines[3] == "| its matrix products alone |" + 5 * " not run |  |"
    assert lines[5].startswith("| PyTorch, torch.compile | 26.0 (20.0-21.0) | 0.77 | ")
    assert lines[-1].startswith("Seed 0; P, K kernels, Python 3, NumPy 2, PyTorch 4, threads: 2, rounds: 9 of 10 "
                                "steps; P, K kernels") and lines[-1].endswith("script: speed/deep, speed/deep-avx2.")
    lines = render.TABLES["multimnist stages"](found).splitlines()
    assert lines[2:5] == ["| a | 1.50 |  |", "| b | 0.25 | 0.50 |", "| c |  | 2.00 |"]
    text = render.TABLES["multimnist memory"](found)
    for row in ("the steps alone | 234 MB", "the largest | not run", "a step | 500 ms, 32 pairs", "alone | 863 MB",
                "an epoch of 6,000 pairs at that pace | 1.6 minutes", "an epoch of 60,000 | 15.6 minutes"):
        assert f"{row} |" in text
    assert "no PyTorch, threads: 1, rounds: 1 of 3 steps" in text
    assert render.VALUES["step gflop"](found) == "4.08"


def test_table_of_threads_by_hand(tmp_path):
    row = {"ms": 64, "min": 60.04, "max": 70, "speedup": 1.0, "efficiency": 1.0}
    result = {
        "experiment": MULTI, "config": mc.settings_of(mc.Config(threads=2)), "script_sha256": "old",
        "bench": {"threads": "1,2", "rounds": 9, "repeats": 10}, "machine": {"processor": "P", "blas_kernels": "K"},
        "versions": {"python": "3", "numpy": "2", "torch": None},
        "scaling": {"1": row, "2": row | {"ms": 40, "speedup": 1.604, "efficiency": 0.802}}}
    write_benchmarks(tmp_path, result, threads_32={})
    lines = render.TABLES["multimnist threads"](render.Ledger(tmp_path)).splitlines()
    assert lines[2:5] == ["| 32 | 2 | 1 | 64.0 (60.0-70.0) | 500 | 1.00 | 100% |",
                          "| 32 | 2 | 2 | 40.0 (60.0-70.0) | 800 | 1.60 | 80% |", "| 64 | 4 | not run |  |  |  |  |"]
    assert "threads: 1,2, rounds: 9 of 10 steps" in lines[-1]


def test_tables_of_what_the_figures_say_by_hand(tmp_path):
    errors = {"groups": 8, "hardest_sets": [[7, 8, 0.141], [5, 6, 0.1]], "easiest_sets": [[1, 7, 0.019]],
              "most_hidden": [0.337, 0.8], "least_hidden": [0.78, 0.966]}
    routing = {"pairs": 64, "named_right": 63, "entropy": [2.302585, 2.2776], "coupling_to_digits_there": [0.1, 0.1104],
               "coupling_to_others": [0.1, 0.0974], "set_accuracy": [0.92, 0.93],
               "set_accuracy_most_hidden": [0.8, 0.8125]}
    config = mc.settings_of(mc.Config(n_test=1000))
    result = {
        "experiment": MULTI, "config": config, "script_sha256": "", "test_set_accuracy": 0.93,
        "test_any_accuracy": 0.999, "versions": {"python": "3", "numpy": "2"},
        "machine": {"processor": "P", "blas_kernels": "K"}}
    for name, more in (("weights/deep-0", {"errors": errors, "routing": routing}),
                       ("disentanglement/deep-0", {"r2": {"factors": ["x", "y"], "capsule": [16, 0.8, 0.9]}}),
                       ("disentanglement/deep-1", {"r2": {"factors": ["x", "y"], "capsule": [16, 0.6, 0.9]},
                                                   "config": config | {"seed": 1}})):
        path = tmp_path / MULTI / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        mc.write_json(path, result | more)
    found = render.Ledger(tmp_path)
    text = render.TABLES["multimnist errors"](found)
    for row in ("1,000 test pairs", "missed | 7.00%", "one of the two digits right | 6.90%", "none right | 0.10%",
                "share missed | 7 with 8 (14%); 5 with 6 (10%)", "easiest sets | 1 with 7 (2%)",
                "for itself (34% on average) | 0.800", "keeps most (78%) | 0.966"):
        assert f"| {row} |" in text or f"{row} |" in text, row
    lines = render.TABLES["multimnist routing"](found).splitlines()
    assert lines[0].startswith("| 64 test pairs, those named right (63) taken first |")
    assert lines[2].endswith("(uniform: 2.3026) | 2.3026 | 2.2776 |") and lines[3].endswith("lengths | 0.100 | 0.110 |")
    assert lines[5].endswith("pairs | 0.9200 | 0.9300 |") and lines[6].endswith("itself | 0.800 | 0.812 |")
    lines = render.TABLES["multimnist disentanglement"](found).splitlines()
    assert lines[0] == "| R^2 of a linear map | dimensions | x | y |"
    assert lines[2] == "| capsule | 16 | 0.70 +- 1.27 | 0.90 +- 0.00 |"                  # 12.706 x 0.1414 / sqrt 2


@pytest.fixture
def norb_ledger(tmp_path):
    """norb_ledger({"table/setting": [held-out accuracy of seeds 0, 1, ...]}) -> a Ledger; familiar 0.9; trained on
    azimuths 300 to 40, looked at from 0 and 80, where only class 4 is ever right, as often as five times held-out"""
    def make(found):
        for setting, accuracies in found.items():
            for seed, held_out in enumerate(accuracies):
                path = tmp_path / NORB / f"{setting}-{seed}.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({
                    "experiment": NORB, "config": sn.settings_of(sn.Config(seed=seed)), "seed": seed, "n_params": 1,
                    "familiar": 0.9, "held_out": held_out, "drop": 0.9 - held_out, "seconds_train": 1.0,
                    "ms_per_step": 1.0, "held_out_per_class": [held_out] * 5, "script_sha256": "old", "history": {},
                    "sweep": {"angles": [0, 80], "accuracy": [1.0, held_out],
                              "per_class": [[1.0] * 5, [0, 0, 0, 0, 5 * held_out]]},
                    "versions": {"python": "3", "numpy": "2"}, "machine": {"processor": "P", "blas_kernels": "K"}}))
        return render.Ledger(tmp_path)
    return make


def cells(text, start):
    """Of the first row of a table that begins so"""
    return next([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
                if line.startswith(f"| {start}"))


def test_tables_of_heads_by_hand(norb_ledger):
    """Held-out 0.2 and 0.1, 0.1 and 0.1: differences 0.1 and 0, mean 0.05, t 12.706 times half of 0.1"""
    found = norb_ledger({"t-azimuth/a": [0.2, 0.1], "t-azimuth/b": [0.1, 0.1], "t-elevation/a": [0.15]})
    rows = (("routing", "a", "b"), ("none", "a", "missing"))
    text = render.norb_routing(found, ("t-azimuth", "t-elevation"), rows)
    assert cells(text, "routed")[1:] == [
        "azimuth, familiar", "azimuth, held-out", "elevation, familiar", "elevation, held-out"]
    assert cells(text, "routing")[1:] == ["+0.000 +- 0.000", "+0.050 +- 0.635", "not run", "not run"]
    assert cells(text, "none")[1:] == ["not run"] * 4
    text = render.norb_comparison(found, "t-azimuth", ("a", "b"))
    assert cells(text, "a")[1:] == ["0.900 +- 0.000", "0.150 +- 0.635", "0.750 +- 0.635", "", "", ""]
    assert cells(text, "b")[4:] == ["-0.050 +- 0.635", "+0.050 +- 0.635", ""]
    text = render.norb_sweep(found, (("one", "t-azimuth"), ("two", "t-elevation")), ("a", "b"))
    assert cells(text, "held-out accuracy")[1:] == ["one", "two"]
    assert cells(text, "`a` |")[1:] == ["0.150 +- 0.635", "0.150"]
    assert cells(text, "`a` minus `b`")[1:] == ["+0.050 +- 0.635", "not run"]
    text = render.norb_comparison(found, "t-azimuth", ("a", "t-elevation/a"))
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:4]] == ["a", "a"]
    assert cells(text, "a")[4:] == ["", "", ""] and text.splitlines()[3].split("|")[3].strip() == "0.150"


def test_the_table_of_the_capsules_life_by_hand(norb_ledger, tmp_path):
    """Over two seeds 0.2 and 0.4: 0.3, t 12.706 times half of 0.2; a layer without empty places; what is not there"""
    found = norb_ledger({"alive/caps": [0.5, 0.5]})
    assert cells(render.norb_alive(found, "alive/none"), "not run")[1:] == ["", ""]
    for seed, value in enumerate((0.2, 0.4)):
        path = tmp_path / NORB / "alive" / f"caps-{seed}.json"
        life = {"a": {"primary": [value, 0.1], "conv2": [None, 0.1]}, "used": {"primary": 1.0}, "entropy": [1.6, 0.5],
                "r2": {"x": value}}
        result = json.loads(path.read_text()) | {"alive": {"before": life, "after": life | {"entropy": [1.6, 0.7]}}}
        path.write_text(json.dumps(result))
    text = render.norb_alive(render.Ledger(tmp_path), "alive/caps")
    assert cells(text, "mean activation of `primary`, empty places")[1:] == ["0.30 +- 1.27"] * 2
    assert cells(text, "mean activation of `conv2`, empty places")[1:] == ["none"] * 2
    assert cells(text, "entropy of the classes' R, iteration 2")[1:] == ["0.50 +- 0.00", "0.70 +- 0.00"]
    assert cells(text, "R^2 of a linear map from the true class's pose to x")[1:] == ["0.30 +- 1.27"] * 2


def test_tables_of_errors_and_of_distances_by_hand(norb_ledger):
    """80 degrees are 40 from the training range; there the mean over classes is the held-out accuracy"""
    found = norb_ledger({"standard/a": [0.2, 0.1], "standard/b": [0.1, 0.1]})
    text = render.norb_standard(found, (("first", "a"), ("none", "c")))
    assert cells(text, "first")[1:] == ["85.0 +- 63.5", "10.0 +- 0.0"] and cells(text, "none")[1:] == ["not run"] * 2
    text = render.norb_by_distance(found, "standard", ("a", "b"))
    assert cells(text, "degrees")[2:7] == list(sn.NORB_NAMES)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert rows == [
        ["0", "`a`", *["1.00"] * 5, "1.000", ""], ["0", "`b`", *["1.00"] * 5, "1.000", "+0.000 +- 0.000"],
        ["40", "`a`", *["0.00"] * 4, "0.75", "0.150", ""],
        ["40", "`b`", *["0.00"] * 4, "0.50", "0.100", "-0.050 +- 0.635"]]


def test_the_table_of_speed_takes_pytorchs_faster_way(norb_ledger, tmp_path):
    """for the ratio of times, the larger one"""
    found = norb_ledger({"speed/a": [0.5]})
    found.results[NORB, "speed", "a"][0] |= {"bench": {"threads": 1, "rounds": 5, "repeats": 5}, "steps": {
        "caps": {"numpy": {"ms": 100, "ratio": 1}, "eager, products": {"ms": 400, "ratio": 0.25},
                 "eager, broadcast": {"ms": 250, "ratio": 0.4}, "compiled, products": {"ms": 125, "ratio": 0.8},
                 "compiled, broadcast": {"ms": 200, "ratio": 0.5}},
        "gap": {"numpy": {"ms": 20, "ratio": 1}}}}
    found.results[NORB, "speed", "a"][0]["versions"]["torch"] = "2"
    text = render.networks_speed(found, NORB, (("own", "speed/a"), ("none", "speed/b")))
    assert cells(text, "a training step")[1] == "own: ms"
    assert cells(text, "`caps`")[1:] == ["100.0", "0.40", "0.80", "not run", "", ""]
    assert cells(text, "`gap`")[1:] == ["20.0", "", "", "not run", "", ""]


@pytest.mark.parametrize("table", [name for name in render.TABLES if name.startswith("multimnist")])
def test_tables_without_results_say_so(tmp_path, table):
    text = render.TABLES[table](render.Ledger(tmp_path))
    assert "not run" in text and text.endswith("\nNot run yet.") and "nan" not in text


def test_the_benchmark_of_the_digits_writes_what_its_table_shows(digits, tmp_path, monkeypatch, capsys):
    path = tmp_path / MULTI / "synthetic" / "digits-0.json"
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["bench", *"--n-synthetic 100 --n-epochs 1 --out-json".split(), str(path)])
    monkeypatch.setattr(mc, "load_digits", lambda config: digits | {"source": "mnist"})
    monkeypatch.setattr(bench_synthetic_digits, "trained_elsewhere", lambda config: mc.result_of(
        config, {}, {"source": "synthetic", "seconds": 1, "steps": 40, "epochs": []}, {}))
    bench_synthetic_digits.main()
    result, said = json.loads(path.read_text()), capsys.readouterr().out
    low, high = result["mnist_reads_synthetic_ci95"]
    assert f"trained on MNIST, reads synthetic digits: {result['mnist_reads_synthetic']:.4f}" in said
    row = f"reads synthetic digits | {result['mnist_reads_synthetic']:.3f} ({low:.3f}-{high:.3f}) |"
    assert row in render.TABLES["multimnist synthetic digits"](render.Ledger(tmp_path)) and path.stat().st_size < 4096


# ---------------------------------------------------------------- stamps

@pytest.fixture(autouse=True)
def nothing_is_kept_from_other_tests():
    render.loaded.cache_clear()


def test_only_data_that_are_of_the_seed_are_drawn_for_every_seed(monkeypatch):
    """The others are read once for all results that follow each other"""
    seen = []
    for module, name in ((sn, "load_data"), (mc, "load_digits")):
        monkeypatch.setattr(module, name, lambda config, *_: seen.append(config.seed))
    for settings, seeds in ((dict(data="toys"), [0]), (dict(data="shapes"), [3, 4])):
        seen.clear()
        for seed in (3, 4):
            render.training_data(sn, sn.Config(seed=seed, lr=0.1 * seed, n_seeds=seed, **settings))
        assert seen == seeds
    for digits, seeds in (("mnist", [0]), ("auto", [3, 4]), ("synthetic", [3, 4])):
        seen.clear()
        for seed in (3, 4):
            render.training_data(mc, mc.Config(seed=seed, n_epochs=seed, digits=digits))
        assert seen == seeds


@pytest.fixture
def stale_result(digits, tmp_path, monkeypatch):
    """A result of the toy run made by another version of the script -> its path"""
    _, _, _, result = run(digits)
    monkeypatch.setattr(mc, "load_digits", lambda *_: toy_digits())
    path = tmp_path / "results" / MULTI / "t" / "a-1.json"
    path.parent.mkdir(parents=True)
    mc.write_json(path, result | {"script_sha256": "old"})
    return path


def test_restamp_renews_the_stamp_where_the_bits_are_the_same(stale_result, tmp_path):
    said, before = [], json.loads(stale_result.read_text())
    assert render.restamp(tmp_path / "results", said.append) == 0 and "the same bits" in said[0]
    after = json.loads(stale_result.read_text())
    assert after == before | {"script_sha256": render.script_sha256(MULTI)}
    assert render.restamp(tmp_path / "results", said.append) == 0 and len(said) == 1                # nothing left to do


@pytest.mark.parametrize("change, words", [
    (dict(weights_sha256="other"), "other bits; stays stale"), (dict(weights_sha256=None), "other bits; stays stale"),
    (dict(machine={"blas_kernels": "Z80"}), "made with Z80 kernels, here are others; stays stale")], ids=str)
def test_restamp_leaves_alone_what_it_cannot_vouch_for(stale_result, tmp_path, change, words):
    said = []
    stale_result.write_text(json.dumps(json.loads(stale_result.read_text()) | change))
    before = stale_result.read_bytes()
    assert render.restamp(tmp_path / "results", said.append) == 1 and words in said[0]
    assert stale_result.read_bytes() == before


def test_both_experiments_results_can_be_restamped(tmp_path):
    config = sn.Config(data="shapes", model="gap", baseline="none", n_epochs=3, trunk_channels=4, head_types=4,
                       threads=1, quiet=True)
    record, _ = sn.run_one("gap", config)
    path = tmp_path / "results" / NORB / "azimuth" / "gap-0.json"
    path.parent.mkdir(parents=True)
    sn.write_json(path, record | {"script_sha256": "old"})
    assert path.stat().st_size < 4096 and render.restamp(tmp_path / "results", lambda text: None) == 0
    assert record["weights_sha256"] and "state" not in record
    row = sn.summarize([json.loads(path.read_text())])["gap"]
    assert row["held_out"][0] == pytest.approx(record["held_out"], abs=1e-5)


def test_blas_kernels_are_those_that_openblas_says(monkeypatch):
    assert mc.machine()["blas_kernels"].isalnum()
    monkeypatch.setattr(mc, "openblas", lambda: None)
    assert mc.machine()["blas_kernels"] == "unknown"


def test_the_kept_result_of_the_network_that_comes_along_is_of_that_file():
    result = render.Ledger(ROOT / "results").runs(MULTI, "weights/deep")[0]
    assert result["loaded"]["sha256"] == hashlib.sha256(mc.WEIGHTS.read_bytes()).hexdigest()
    assert result["config"]["n_test"] == 10000 and result["weights_sha256"] == render.Ledger(ROOT / "results").runs(
        MULTI, "main/residual")[0]["weights_sha256"]


def test_tables_of_the_third_experiment_by_hand(tmp_path):
    """Four networks, two seeds: what sharing and what capsules are worth, and by how much the one changes the other"""
    affine = {"shared": (0.96, 0.96), "caps-1": (0.90, 0.92), "gap": (0.94, 0.95), "dense": (0.80, 0.80)}
    config = ac.settings_of(ac.Config())
    result = {"experiment": AFF, "script_sha256": "", "n_params": 1000, "seconds_train": 60.0,
              "versions": {"python": "3", "numpy": "2"}, "machine": {"processor": "P", "blas_kernels": "K"}}
    for name, values in affine.items():
        for seed, value in enumerate(values):
            path = tmp_path / AFF / "free" / f"{name}-{seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            ac.write_json(path, result | {
                "config": config | {"seed": seed}, "affine_accuracy": value, "familiar_accuracy": 0.99,
                "placed_accuracy": 0.98, "centred_accuracy": 0.97, "test_accuracy": 0.995,
                "centred_per_class": [1.0] * 10, "affine_per_class": [0.5 + seed / 4, *[1.0] * 8, math.nan],
                "factors": {"turn": [[-20.0, 0.5 + seed / 10], [0.0, 1.0]]},
                "detection": {"noise": {"length": 0.25} if name == "shared" else {"probability": 0.75}}})
    found = render.Ledger(tmp_path)
    lines = render.TABLES["affnist two by two"](found).splitlines()
    # sharing: ((.96 - .90) + (.94 - .80)) / 2 and ((.96 - .92) + (.95 - .80)) / 2; capsules: (.02 + .10) / 2 and
    # (.01 + .12) / 2; one with the other: .02 - .10 and .01 - .12, whose mean is -.095
    assert lines[4].startswith("| normalised, affine | +0.0975 +- ")
    assert "| +0.0625 +- " in lines[4] and "| -0.0950 +- " in lines[4]
    assert lines[2].startswith("| normalised, moved (familiar) | +0.0000 +- 0.0000 |") and "not run" in lines[5]
    lines = render.TABLES["affnist results"](found).splitlines()
    assert lines[2].endswith(
        "| 1,000 | 0.9900 +- 0.0000 | 0.9800 +- 0.0000 | 0.9700 +- 0.0000 | 0.9600 +- 0.0000 |  |  |")
    assert "| +0.0000 +- 0.0000 | -0.0500 +- " in lines[3] and lines[6].endswith("| not run |  |  |")
    for seed, last in enumerate((0.9921, 0.9922)):
        path = tmp_path / AFF / "matched" / f"shared-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        ac.write_json(path, result | {
            "config": config | {"seed": seed, "stop_at": 0.9922, "n_train": 96},
            "history": {"epoch": [1, 2 + seed], "val_accuracy": [0.5, last]},
            **{f"{test}_accuracy": 0.8 + seed / 10 for test in ("familiar", "placed", "centred", "affine")}})
    lines = render.TABLES["affnist matched"](render.Ledger(tmp_path)).splitlines()
    assert " | 0.9000" in lines[2] and "0.8500" not in lines[2]                             # of the one that got there
    assert lines[2].endswith("  |  | 1 of 2 | at least 240 |") and lines[3].endswith(" |  | 0 of 0 |  |")    # 2.5 x 96
    lines = render.TABLES["affnist classes"](found).splitlines()
    assert lines[2] == f"| `shared` | 1.000 / 0.625 |{' 1.000 / 1.000 |' * 8} 1.000 / nan |" and "dense" in lines[3]
    for seed in (0, 1):
        path = tmp_path / AFF / "few-10" / f"nearest-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        ac.write_json(path, result | {"config": config | {"seed": seed}, "nearest": {"ink in the middle": {
            "familiar": 0.4 + seed / 5, "centred": 0.5, "affine": 0.25}}})
    lines = render.TABLES["affnist few"](render.Ledger(tmp_path)).splitlines()
    row = "| nearest neighbour, ink in the middle | 0.500 +- 1.271 / 0.500 +- 0.000 / 0.250 +- 0.000 | not run |"
    assert any(line.startswith(row) for line in lines)
    lines = render.TABLES["affnist factors"](found).splitlines()
    assert next(line for line in lines if "degrees: -20" in line).startswith("| turned by, degrees: -20 | 0.550 +- ")
    none = " | ".join(["not run"] * 4)
    found_out = render.TABLES["affnist detection"](found)
    assert f"| noise: longest capsule, or top probability | 0.250 +- 0.000 | {none} | 0.750 +-" in found_out
    assert f"| noise: error of the redrawing |  | {none} |  |" in found_out
    assert render.VALUES["affnist shared minus gap affine"](found) == "not run"                      # that is gap-8
    assert "not run" in render.TABLES["affnist steps up"](found)
    assert "| 99.5" not in render.TABLES["affnist mnist"](found)
    for seed, accuracies in enumerate(((0.98, 0.9941, 0.99), (0.98, 0.99, 0.9945), (0.5, 0.6, 0.9))):
        path = tmp_path / AFF / "mnist" / f"gap-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        ac.write_json(path, result | {
            "config": config | {"seed": seed, "task": "mnist"}, "test_accuracy": 0.995, "seconds_train": 360.0,
            "history": {"step": [100, 200, 400], "val_accuracy": accuracies}})
    other = json.loads(path.read_text()) | {"config": config | {"seed": 3, "task": "mnist"}, "seconds_train": 9999.0}
    ac.write_json(path.parent / "gap-3.json", other | {"machine": other["machine"] | {"processor": "another"}})
    lines = render.TABLES["affnist mnist"](render.Ledger(tmp_path)).splitlines()
    # half of 6 minutes, and all; another machine's time is not among them
    assert "| `gap`, 550,000 digits | 0.500 +- 0.000 |  | 6.0 | 4.5 (2 of 4 seeds) |" in lines
    assert lines[2].endswith("| not run | 0.34 +- 0.032 |  |  |")
