"""Several networks with one command: --model A B, --n-seeds K, --load A B; their comparison by hand."""
import json

import multimnist_capsnet as mc
import smallnorb_novel_viewpoint as sn

import golden
import numpy as np
import pytest
from conftest import EXPERIMENTS, SMALL, runs, toy

import visualize_smallnorb_novel_viewpoint as norb_figures

TWO = {runs.MULTI: ("capsnet", "cnn"), runs.NORB: ("matrix-capsnet", "cnn"), runs.AFF: ("capsnet-shared", "cnn-gap")}


def test_comparison_by_hand():
    """Two seeds of two networks: means 0.5 and 0.3; differences 0.1 and 0.3, t of 1 degree of freedom is 12.7062"""
    rows = [("a", 0, {"parameters": 7, "x": (0.4, (0.1, 0.9))}, {}), ("b", 0, {"parameters": 5, "x": (0.3, None)}, {}),
            ("a", 1, {"parameters": 7, "x": (0.6, None)}, {}), ("b", 1, {"parameters": 5, "x": (0.3, None)}, {})]
    found = mc.compare(rows)
    half = 12.7062 * np.std([0.4, 0.6], ddof=1) / np.sqrt(2)
    assert found["seeds"] == [0, 1] and found["networks"]["a"]["parameters"] == 7
    assert found["networks"]["a"]["x"] == pytest.approx([0.5, 0.5 - half, 0.5 + half], abs=1e-5)
    assert found["networks"]["b"]["x"] == pytest.approx([0.3] * 3)
    assert found["differences"]["a - b"]["x"] == pytest.approx([0.2, 0.2 - half, 0.2 + half], abs=1e-5)
    table = mc.comparison_table(found)
    assert "[95% CI over 2 seeds]" in table and f"+20.0 [{20 - 100 * half:+.1f}, {20 + 100 * half:+.1f}]" in table
    uneven = mc.compare(rows[:3])                       # b has one seed, and its interval would not be over seeds
    assert uneven["networks"]["a"]["x"] == found["networks"]["a"]["x"]
    assert uneven["networks"]["b"]["x"][0] == 0.3 and np.isnan(uneven["networks"]["b"]["x"][1:]).all()
    one = mc.compare(rows[:2])
    assert one["networks"]["a"]["x"] == [0.4, 0.1, 0.9] and one["differences"] == {}
    assert "0.400 [0.100, 0.900]" in mc.comparison_table(one) and "from the test images" in mc.comparison_table(one)
    assert np.isnan(one["networks"]["b"]["x"][1:]).all() and "nan" not in mc.comparison_table(one)


@pytest.mark.parametrize("experiment", [runs.MULTI, *(pytest.param(name, marks=pytest.mark.slow)
                                                      for name in (runs.NORB, runs.AFF))])
def test_several_networks_are_those_of_single_commands(call, tmp_path, experiment):
    """Two models and two seeds: the same images, hits and files as four commands; loaded again: the same accuracies"""
    (config, _), module, (first, second) = toy(experiment), EXPERIMENTS[experiment], TWO[experiment]
    small = [f"{module.flag_name(name)}={getattr(config, name)}"
             for name in sorted(golden.SIZES.keys() | SMALL.get(experiment, {}).keys())
             if name in {f.name for f in module.options(config)} and name not in ("quiet", "n_val")
             and module.is_applicable(module.limits(name), config)]
    code, out, err = call(module, module.main, *small, "--model", first, second, "--n-seeds", 2, "--checkpoint",
                          "r.npz", "--out-weights", "w.npz", "--out-json", "all.json")
    assert (code, err) == (0, ""), err
    found = json.loads((tmp_path / "all.json").read_text("utf-8"), parse_constant=pytest.fail)
    files = {f"{kind}.{model}-{seed}.npz" for kind in "rw" for model in (first, second) for seed in (0, 1)}
    assert {path.name for path in tmp_path.glob("*.npz")} == files
    assert [(run["config"]["model"], run["config"]["seed"]) for run in found["runs"]] == [
        (first, 0), (second, 0), (first, 1), (second, 1)]
    assert [*found["summary"]["networks"]] == [first, second] and [*found["summary"]["differences"]] == [
        f"{first} - {second}"]
    assert module.remark([config], "synthetic") in out and f"{second}, seed 1 (4 of 4)" in out
    assert call(module, module.main, *small, "--model", second, "--seed", 1, "--out-json", "one.json")[0] == 0
    alone = json.loads((tmp_path / "one.json").read_text("utf-8"))
    assert alone["hit_bits"] == found["runs"][3]["hit_bits"]
    few = [word for word in small if word.startswith("--n-test")]
    code, out, err = call(module, module.main, "--load", f"r.{first}-1.npz", f"r.{second}-1.npz", *few, "--out-json",
                          "load.json")
    assert (code, err) == (0, "") and f"\n{first}, seed 1 (1 of 2)" in out and "95% CI from the test images" in out
    every = [f"r.{model}-{seed}.npz" for seed in (0, 1) for model in (first, second)]
    assert call(module, module.main, "--load", *every, *few, "--out-json", "every.json")[0] == 0
    both = json.loads((tmp_path / "every.json").read_text("utf-8"))["summary"]       # seeds of one model make one row
    assert both["seeds"] == [0, 1] and both["networks"].keys() == found["summary"]["networks"].keys()
    assert both["differences"].keys() == found["summary"]["differences"].keys()
    again = json.loads((tmp_path / "load.json").read_text("utf-8"))
    assert [run["hit_bits"] for run in again["runs"]] == [run["hit_bits"] for run in found["runs"][2:]]
    assert again["runs"][0]["loaded"]["file"] == f"r.{first}-1.npz"


def test_files_with_one_name_are_told_apart(call, tmp_path):
    """Two files of the same name, model and seed, in two folders, or with other settings"""
    small = "--data shapes --n-epochs 1 --n-elev 1 --n-per-combo 1 --threads 1 --quiet --model cnn".split()
    for folder, rate in (("a", "0.01"), ("b", "0.02")):
        (tmp_path / folder).mkdir()
        assert call(sn, sn.main, *small, "--lr", rate, "--checkpoint", f"{folder}/net.npz")[0] == 0
    code, _, _ = call(sn, sn.main, "--load", "a/net.npz", "b/net.npz", "--out-json", "r.json")
    found = json.loads((tmp_path / "r.json").read_text("utf-8"))["summary"]
    assert code == 0 and [*found["networks"]] == ["a-net-1", "b-net-2"] and not found["differences"]
    code, _, err = call(sn, sn.main, "--load", "a/net.npz", "./a/net.npz")
    assert code == 2 and "--load: a file is given twice" in err
    for folder in "ab":                                               # runs that were saved are called by their folders
        (tmp_path / folder / "net.npz").rename(tmp_path / folder / sn.WEIGHTS_FILE)
    loaded = "--load", f"a/{sn.WEIGHTS_FILE}", f"b/{sn.WEIGHTS_FILE}"
    code, _, err = call(sn, sn.main, *loaded, "--out-weights", "c.npz")
    assert (code, err) == (0, "") and {*tmp_path.glob("c.*")} == {tmp_path / "c.a-0.npz", tmp_path / "c.b-0.npz"}
    code, _, err = call(sn, norb_figures.main, *loaded, "--only", "elevation_strip", "--outdir", "viz")
    assert (code, err) == (0, "") and (tmp_path / "viz" / "elevation_strip-a.png").exists()


def test_networks_of_other_data_are_not_compared(call):
    """Nor flags that have no effect"""
    toys = "--preset small --n-epochs 1 --n-train-toys 1 --train-azimuths 0:10 --n-test 60 --threads 1 --quiet".split()
    for range_, path in (("80:90", "a.npz"), ("100:110", "b.npz")):
        assert call(sn, sn.main, *toys, "--model", "cnn", "--test-azimuths", range_, "--checkpoint", path)[0] == 0
    for flags, words in (("--load a.npz b.npz", "networks were trained with --test-azimuths 100:110, 80:90. Load"),
                         ("--load a.npz --n-seeds 2", "--model and --n-seeds are for training"),
                         ("--load a.npz --model cnn", "--model and --n-seeds are for training"),
                         ("--n-seeds 0", "--n-seeds 0: must be at least 1"),
                         ("--model cnn cnn-bn --routing-iters 2", "--routing-iters 2 applies to --model"),
                         ("--model nearest --out-weights x.npz", "--out-weights does not apply to --model nearest")):
        code, _, err = call(sn, sn.main, *flags.split())
        assert code == 2 and words in err and err.count("\n") == 1, err


def test_the_default_commands_compare_networks(call, monkeypatch):
    """Of toys the paper's two and the strongest baseline, of shapes those of the original and the nearest image"""
    trained = []
    monkeypatch.setattr(sn, "run_experiment", lambda args, *_: trained.extend(sn.configs_from_args(args)))
    for flags in ((), ("--data", "shapes"), ("--routing-iters", "1"), ("--train-azimuths", "0:150")):
        code, out, _ = call(sn, sn.main, *flags)
        assert code == 0 and ("--data shapes" in out) == (flags[:1] == ("--train-azimuths",))
    assert [config.model for config in trained[:7]] == ["matrix-capsnet", "cnn", "cnn-bn", "matrix-capsnet", "cnn",
                                                        "cnn-gap", "nearest"]
    assert [config.n_epochs for config in trained[:4]] == [10, 16, 16, 10] and trained[7].routing_iters == 1


def test_what_the_default_command_promises_is_in_the_results():
    """Means over ten seeds"""
    lines = [json.loads(line) for line in (golden.ROOT / "results" / runs.NORB / "paper-azimuth.jsonl").read_text(
        "utf-8").splitlines()]
    for model in sn.COMPARED:
        novel = [line["novel"] for line in lines if line["setting"] == model]
        assert len(novel) == 10 and f"{model} {np.mean(novel):.3f}" in sn.EXPECTED
