"""The code reproduces its golden values in float64, and default networks learn in float32 as they did.

tests/bands.json holds the loss that each default network comes to on a small synthetic data set, and how far it may lie
from it, as a share. After a change that was meant:  python3 tests/test_core_golden.py
"""
import dataclasses
import json
import unittest.mock
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import EXPERIMENTS, ROOT, golden, runs

BANDS = ROOT / "tests" / "bands.json"
N_STEPS, N_LAST, BATCH, BAND = 200, 50, 8, 0.15


def late_loss(experiment, dtype=np.float32):
    """The mean loss of the last N_LAST of N_STEPS steps of the default network, at its own learning rate, on as many
    samples as a fifth of these steps see; digits are moved or paired anew in every epoch"""
    module, losses, n = EXPERIMENTS[experiment], [], N_STEPS * BATCH // 5
    with unittest.mock.patch.dict(golden.SIZES, n_train=n, batch_size=BATCH, n_epochs=5):
        config = dataclasses.replace(golden.tiny_config(experiment, ""), warmup=20)
        data = golden.tiny_data(experiment, config)
    module.train(config, data, each_step=lambda state, terms: losses.append(terms["loss"]), dtype=dtype)
    assert len(losses) == N_STEPS
    return float(np.mean(losses[-N_LAST:]))


@pytest.mark.parametrize("experiment", [pytest.param(name, marks=[] if "norb" in name else [pytest.mark.slow])
                                        for name in EXPERIMENTS])
def test_default_networks_learn_in_float32_as_they_did(experiment):
    known = json.loads(BANDS.read_text("utf-8"))
    assert experiment in known, "no band; write it with python3 tests/test_core_golden.py"
    assert late_loss(experiment) == pytest.approx(known[experiment]["loss"], rel=known[experiment]["band"])


@pytest.mark.parametrize("experiment, flags", [key if key not in golden.combinations() else
                                               pytest.param(*key, marks=pytest.mark.slow) for key in golden.wanted()])
def test_all_golden_values_are_reproduced_in_float64_and_nearly_in_float32(experiment, flags):
    computed, distance = golden.compute(experiment, flags)
    old = golden.read()["values"].get(experiment, {}).get(flags)
    assert old, "no golden values are stored; store them with python3 tests/golden.py --write"
    faults = golden.differences({k: old[k] for k in old if k != "since"}, computed)
    assert not faults, "the experiment has changed; if it should: python3 tests/golden.py --write-all"
    assert distance <= golden.SINGLE, "gradients in float32 differ from those in float64"


MISSING, WRONG = "--data shapes --model cnn", "--data shapes --model cnn-gap"     # of smallNORB


@pytest.fixture
def changed_golden(monkeypatch, tmp_path):
    """A copy of tests/golden.json in which a set is missing and another is wrong: its path. Sets are
    computed in this process"""
    monkeypatch.setattr(golden, "pool", lambda: ThreadPoolExecutor(1))
    known = golden.stored()
    of_norb = known["values"][runs.NORB]
    of_norb.pop(MISSING)
    of_norb[WRONG]["steps"][0]["loss"] = 99.0
    monkeypatch.setattr(golden, "GOLDEN", tmp_path / "golden.json")
    golden.store(known["generation"], known["values"])
    return golden.GOLDEN


def run_golden(monkeypatch, *flags):
    monkeypatch.setattr("sys.argv", ["golden.py", *flags])
    golden.main()


def test_missing_golden_values_are_written_and_no_others(changed_golden, monkeypatch, capsys):
    """A wrong set stays as it is, to be found; the second time nothing is missing"""
    original_golden = ROOT / "tests" / "golden.json"
    before = changed_golden.read_text("utf-8").splitlines()
    run_golden(monkeypatch, "--write")
    out, after = capsys.readouterr().out, changed_golden.read_text("utf-8").splitlines()
    assert f"{MISSING}: new" in out and "1 of" in out and WRONG not in out
    assert len(after) == len(before) + 1 and set(before[1:]) <= set(after)
    found, original = golden.stored(), json.loads(original_golden.read_text("utf-8"))
    one, expected = (of["values"][runs.NORB][MISSING] for of in (found, original))
    assert found["generation"] == one["since"] == original["generation"] + 1
    assert one["tests"]["familiar"] == expected["tests"]["familiar"]
    run_golden(monkeypatch, "--write")
    assert "0 of" in capsys.readouterr().out
    assert changed_golden.read_text("utf-8").splitlines() == after


def test_changed_golden_values_are_reported_and_written_on_demand(
        changed_golden, monkeypatch, capsys):
    """--write-all is needed for a set that changed; what nothing needs any more goes"""
    monkeypatch.setattr(golden, "wanted", lambda: [(runs.NORB, MISSING), (runs.NORB, WRONG)])
    before = changed_golden.read_bytes()
    with pytest.raises(SystemExit, match="^1$"):
        run_golden(monkeypatch)
    out = capsys.readouterr().out
    assert f"{WRONG}: /steps/0/loss: 99, now" in out and f"{MISSING}: new" in out
    assert changed_golden.read_bytes() == before
    generation = golden.stored()["generation"]
    run_golden(monkeypatch, "--write-all")
    found = golden.stored()
    assert found["generation"] == generation + 1 and found["values"].keys() == {runs.NORB}
    since = {flags: one["since"] for flags, one in found["values"][runs.NORB].items()}
    assert since == dict.fromkeys((MISSING, WRONG), generation + 1)


if __name__ == "__main__":
    found = {experiment: {"loss": round(late_loss(experiment), 4), "band": BAND} for experiment in EXPERIMENTS}
    BANDS.write_text(json.dumps(found, indent=1) + "\n", "utf-8", newline="\n")
