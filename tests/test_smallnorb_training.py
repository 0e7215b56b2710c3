"""Training the matrix capsules: it learns, repeats itself to the bit, survives being killed, and its tables say what they mean."""
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import smallnorb_novel_viewpoint as sn
from conftest import ROOT, assert_same

TINY = sn.Config(seed=1, n_epochs=3, n_per_combo=1, n_test_per_combo=1, n_elev=1, n_train_views=4, n_test_views=2, conv1_channels=4,
                 primary_types=2, conv_types=2, batch_size=18, baseline="none", threads=1, quiet=True)


def tiny(**changes):
    return dataclasses.replace(TINY, **changes)


@pytest.fixture(scope="module")
def reference():
    return sn.train(TINY)


def without_seconds(history):
    return {name: value for name, value in history.items() if name != "seconds"}


@pytest.mark.parametrize("model, changes", [("caps", {}), ("cnn-gap", {"average": 0.0}), ("cnn", {}), ("cnn-pool", {}), ("dense-caps", {})])
def test_overfits_a_few_images(model, changes):
    config = tiny(model=model, n_epochs=150, dropout=0.0, weight_decay=0.0, batch_size=10, n_train_views=2, conv1_channels=16, conv_types=4,
                  lr=5e-3, lr_schedule="cosine", **changes)
    _, history = sn.train(config)
    assert history["epochs"][-1]["train_accuracy"] == 1 and history["epochs"][-1]["train_loss"] < 0.5


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("model", ["caps", "cnn-pool"])
def test_same_bits_for_any_number_of_threads(threads, model, reference):
    config = tiny(model=model, batch_size=40, n_per_combo=2)
    expected, got = sn.train(config), sn.train(dataclasses.replace(config, threads=threads))
    assert_same(expected[0], got[0])
    assert without_seconds(expected[1]) == without_seconds(got[1])


def test_snapshots_change_nothing(reference):
    seen = []

    def callback(step, params, terms):
        seen.append(step)
        for p in params.values():
            p[...] = np.nan

    params, history = sn.train(TINY, callback, 2)
    assert_same(params, reference[0])
    assert without_seconds(history) == without_seconds(reference[1]) and seen == [0, 2, 4, 6]


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_killed_and_resumed(tmp_path, average):
    """SIGKILL as soon as the first epoch is saved; the rest ends with the bits of a run never killed"""
    path = tmp_path / "run.npz"
    config = tiny(n_epochs=60, average=average, checkpoint=str(path))
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import smallnorb_novel_viewpoint as sn; "
            f"sn.train({config!r}.__class__(**{dataclasses.asdict(config)!r}))").replace(f"{config!r}.__class__", "sn.Config")
    process = subprocess.Popen([sys.executable, "-c", code, str(ROOT)])
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 0 < sn.load_checkpoint(path)[-1]["step"] < 120
    params, history = sn.train(dataclasses.replace(config, resume=True))
    whole, whole_history = sn.train(dataclasses.replace(config, checkpoint=""))
    assert_same(params, whole)
    assert without_seconds(history) == without_seconds(whole_history)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = str(tmp_path / "run.npz")
    sn.train(tiny(checkpoint=path))
    for changes, words in ({"seed": 2}, "seed 1, now 2"), ({"em_iters": 3}, "em_iters 2, now 3"), ({"train_azimuths": "0:100"}, "train_azim"):
        for resume in False, True:
            with pytest.raises(sn.InputError, match=words):
                sn.train(tiny(checkpoint=path, resume=resume, **changes))


def test_the_mean_of_the_weights():
    """average = running mean with decay min(average, step / (step + 9)), of the weights after each step"""
    config, kept = tiny(average=0.5), []
    params, _ = sn.train(config)
    sn.train(dataclasses.replace(config, average=0.0), lambda step, params, terms: kept.append(params), 1)
    mean = kept[0]
    for step, weights in enumerate(kept[1:-1] if len(kept) > 7 else kept[1:], 1):
        decay = min(0.5, step / (step + 9))
        mean = {name: decay * mean[name] + (1 - decay) * weights[name] for name in mean}
    for name in params:
        np.testing.assert_allclose(params[name], mean[name], rtol=1e-4, atol=1e-6)


def test_weight_decay_shrinks_weights_only(monkeypatch):
    """With no gradient step, 3 epochs at a constant rate leave w (1 - lr x decay)^steps, and the biases as they were"""
    monkeypatch.setattr(sn, "adam_step", lambda *args: None)
    config = sn.resolved(tiny(lr_schedule="constant", lr=0.01, weight_decay=2.0))
    params, history = sn.train(config)
    before = sn.init_params(config)
    for name, p in params.items():
        factor = (1 - 0.02) ** history["steps"] if p.ndim > 1 else 1
        np.testing.assert_allclose(p, before[name] * factor, rtol=1e-5)


def test_stops_at_familiar_accuracy():
    _, history = sn.train(tiny(model="cnn", n_epochs=40, stop_familiar=0.6, dropout=0.0))
    familiar = [epoch["familiar"] for epoch in history["epochs"]]
    assert familiar[-1] >= 0.6 and len(familiar) < 40 and all(accuracy < 0.6 for accuracy in familiar[:-1])
    assert [epoch["epoch"] for epoch in history["epochs"]] == list(range(1, len(familiar) + 1))


@pytest.mark.parametrize("changes", [{}, {"final_lambda": 20.0}, {"em_iters": 5, "weight_decay": 0.0}, {"loss": "spread"}])
def test_float32_em_stays_finite(changes):
    """Hundreds of steps"""
    params, history = sn.train(tiny(n_epochs=150, lr=1e-2, lr_schedule="constant", **changes))
    assert history["steps"] == 300 and all(np.isfinite(p).all() and p.dtype == np.float32 for p in params.values())
    assert all(math.isfinite(epoch["train_loss"]) for epoch in history["epochs"])


def test_not_a_number_is_one_clear_line():
    with pytest.raises(sn.InputError, match="diverged; lower --lr"):
        sn.train(tiny(model="cnn", lr=1e30, n_epochs=20))


# ---------------------------------------------------------------- comparing networks

def test_several_seeds_are_the_single_runs():
    config = tiny(n_epochs=2, baseline="cnn-gap", n_seeds=2)
    results = sn.run_all(config, lambda text: None)
    assert [(r["label"], r["seed"]) for r, _ in results] == [("caps", 1), ("cnn-gap", 1), ("caps", 2), ("cnn-gap", 2)]
    alone = sn.run_all(dataclasses.replace(config, n_seeds=1, seed=2))
    for (many, many_params), (one, one_params) in zip(results[2:], alone):
        assert_same(many_params, one_params)
        assert (many["held_out"], many["sweep"], many["history"]) == (one["held_out"], one["sweep"], one["history"])


def test_a_checkpoint_a_run(tmp_path):
    config = tiny(n_epochs=1, baseline="cnn-gap", n_seeds=2, checkpoint=str(tmp_path / "run.npz"))
    sn.run_all(config, lambda text: None)
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == ["run.caps-2.npz", "run.cnn-gap-1.npz", "run.cnn-gap-2.npz", "run.npz"]


def record(label, seed, held_out, familiar=1.0, history=((0.5, 0.4), (1.0, 0.6))):
    return {"label": label, "seed": seed, "held_out": held_out, "familiar": familiar, "drop": familiar - held_out, "seconds": 1.0,
            "ms_per_step": 2.0, "n_params": 10, "sweep": [held_out] * 36,
            "history": [{"familiar": f, "held_out": h} for f, h in history]}


def test_summary_by_hand():
    records = [record("caps", 0, 0.8), record("gap", 0, 0.7), record("caps", 1, 0.6), record("gap", 1, 0.7)]
    summary = sn.summarize(records)
    mean, half = summary["caps"]["held_out"]
    assert np.isclose(mean, 0.7) and np.isclose(half, 12.706 * np.std([0.8, 0.6], ddof=1) / math.sqrt(2))
    mean, half = summary["gap"]["difference"]                                                  # 0.1 and -0.1
    assert np.isclose(mean, 0) and np.isclose(half, 12.706 * 0.1 * math.sqrt(2) / math.sqrt(2))
    assert np.isclose(summary["gap"]["matched"][0], 0.6) and np.isclose(summary["gap"]["matched_difference"][0], -0.1)
    assert "difference" not in summary["caps"] and math.isnan(sn.mean_and_interval([0.5])[1])
    summary = sn.summarize([record("caps", 0, 0.8, history=((0.9, 0.1),)), record("gap", 0, 0.7)])
    assert "matched" not in summary["gap"]                                                     # never as good on familiar views


def test_matched_familiar_by_hand():
    caps = record("caps", 0, 0.8, history=((0.7, 0.3), (0.95, 0.5), (1.0, 0.8)))
    assert sn.at_matched_familiar(caps, record("gap", 0, 0.7, familiar=0.95)) == 0.5
    assert sn.at_matched_familiar(caps, record("gap", 0, 0.7, familiar=0.96)) == 0.8


def test_distance_to_the_training_range():
    config = sn.Config(train_azimuths="0:60")
    assert [sn.distance_to_training(azimuth, config) for azimuth in (0, 60, 90, 210, 220, 350)] == [0, 0, 30, 150, 140, 10]
    config = sn.Config(train_azimuths="290:420")
    assert [sn.distance_to_training(azimuth, config) for azimuth in (0, 60, 61, 280)] == [0, 0, 1, 10]


def test_gap_table_by_hand():
    config, sweep = sn.Config(train_azimuths="0:60"), [0.0] * 36
    sweep[9], sweep[33] = 1.0, 0.4                                                             # azimuths 90 and 330: 30 degrees away
    table = sn.gap_table(config, {"caps": {"sweep": sweep}})["caps"]
    assert list(table) == [0, 30, 60, 90, 120, 150] and np.isclose(table[30], 1.4 / 6) and table[0] == 0


def test_sweep_is_new_noise_at_every_azimuth():
    config = sn.resolved(tiny())
    with sn.Runner(1) as runner:
        sweep = sn.azimuth_sweep(sn.init_params(config), config, runner, range(0, 360, 90))
    assert len(sweep) == 4 and all(0 <= accuracy <= 1 for accuracy in sweep)


def test_t_table():
    """Against the quantile's own definition: two-sided tail of Student's density, integrated"""
    for df in (1, 2, 9, 19):
        x = np.linspace(-sn.T95[df], sn.T95[df], 200_001)
        density = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2)) * (1 + x * x / df) ** (-(df + 1) / 2)
        assert abs(np.trapezoid(density, x) - 0.95) < 2e-4
