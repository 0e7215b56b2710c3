"""The code reproduces its golden values in float64, and default networks learn in float32 as they did.

tests/bands.json holds the loss that each default network comes to on a small synthetic data set, and how far it may lie
from it, as a share. After a change that was meant:  python3 tests/test_core_golden.py
"""
import dataclasses
import json
import unittest.mock

import numpy as np
import pytest
from conftest import EXPERIMENTS, ROOT, golden

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


@pytest.mark.beside(what=late_loss)
@pytest.mark.parametrize("experiment", [pytest.param(name, marks=[] if "norb" in name else [pytest.mark.slow])
                                        for name in EXPERIMENTS])
def test_default_networks_learn_in_float32_as_they_did(beside, experiment):
    known = json.loads(BANDS.read_text("utf-8"))
    assert experiment in known, "no band; write it with python3 tests/test_core_golden.py"
    assert beside() == pytest.approx(known[experiment]["loss"], rel=known[experiment]["band"])


@pytest.mark.beside(what=golden.compute)
@pytest.mark.parametrize("experiment, flags", [key if key not in golden.combinations() else
                                               pytest.param(*key, marks=pytest.mark.slow) for key in golden.wanted()])
def test_all_golden_values_are_reproduced_in_float64_and_nearly_in_float32(beside, experiment, flags):
    computed, distance = beside()
    old = golden.read()["values"].get(experiment, {}).get(flags)
    faults = ["none stored"] if old is None else golden.differences({k: old[k] for k in old if k != "since"}, computed)
    faults += [f"float32 is {distance:.0e} away"] * (not distance <= golden.SINGLE)
    assert not faults, "the experiment has changed; if that was meant: python3 tests/golden.py --write"


if __name__ == "__main__":
    found = {experiment: {"loss": round(late_loss(experiment), 4), "band": BAND} for experiment in EXPERIMENTS}
    BANDS.write_text(json.dumps(found, indent=1) + "\n", "utf-8", newline="\n")
