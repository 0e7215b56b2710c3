"""The table over runs: rows by setting, differences paired by seed, wrong input named."""
import json

import multimnist_capsnet as mc

import pytest
import summarize_runs


@pytest.fixture
def write(tmp_path):
    """write(name, accuracy, **settings) -> path of a file like --out-json's"""
    def one(name, accuracy, mse=0.03, **settings):
        run = {key: 1.0 for key in summarize_runs.KEYS} | {
            "test_set_accuracy": accuracy,
            "test_recon_mse": mse,
            "n_params": 1000,
            "config": mc.settings_of(mc.Config(**settings)),
            "source": "mnist",
            "versions": {}}
        (tmp_path / name).write_text(json.dumps(run))
        return str(tmp_path / name)
    return one


def rows(capsys):
    return [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]


def test_differences_are_paired_by_seed(write, capsys):
    paths = [
        write("a0", 0.6, seed=0),
        write("a1", 0.7, seed=1),
        write("b1", 0.71, seed=1, routing_iters=1),
        write("b0", 0.63, seed=0, routing_iters=1)]
    summarize_runs.table(paths)
    first, other = rows(capsys)
    assert first[0] == "first" and other[0] == "routing_iters 1" and other[2] == "0 1"
    assert other[-1] == "+0.020 +- 0.127"                      # mean of 0.03 and 0.01; 12.706 x 0.01414 / sqrt(2)


def test_labels_show_what_differs_beyond_preset_and_model(write, capsys):
    classic = {"preset": "classic"}
    summarize_runs.table([write("a", 0.6), write("b", 0.8, **classic), write("c", 0.7, lr=1e-3, **classic),
                          write("d", 0.8, mse=None, model="cnn"), write("e", 0.8, recon_weight=0.0, **classic)])
    assert [row[0] for row in rows(capsys)] == [
        "first",
        "preset classic",
        "lr 0.001 preset classic",
        "model cnn",
        "preset classic recon_weight 0.0"]


def test_a_file_from_before_muon_is_of_a_run_without_it(write, capsys):
    old = write("a", 0.6, muon=0.0)
    run = json.loads(open(old).read())
    del run["config"]["muon"]
    open(old, "w").write(json.dumps(run))
    summarize_runs.table([old, write("b", 0.7), write("c", 0.8, muon=0.0, seed=1)])
    assert [row[0] for row in rows(capsys)] == ["first", "muon 0.02"]


def test_the_same_seed_twice_is_refused_and_the_same_file_counts_once(write, capsys):
    a, b = write("a", 0.6), write("b", 0.6)
    summarize_runs.table([a, a])
    with pytest.raises(SystemExit) as stop:
        summarize_runs.table([a, b])
    assert stop.value.code == 2 and "second run of these settings" in capsys.readouterr().err


def test_settings_of_later_versions_are_at_their_defaults(write, capsys):
    a, b = write("a", 0.6, seed=0), write("b", 0.7, seed=1)
    run = json.loads(open(b).read())
    del run["config"]["warmup"], run["config"]["model"]
    open(b, "w").write(json.dumps(run))
    summarize_runs.table([a, b])
    (only,) = rows(capsys)
    assert only[2] == "0 1"
