"""The training run: Adam, Muon and their schedule, shards, the same bits however it ran, checkpoints, divergence."""
import dataclasses
import io
import json
import os
import re
from pathlib import Path

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import EXPERIMENTS, NETWORKS, TINY, assert_same, toy, toy_run


def train(digits, callback=None, every=0, **changes):
    return mc.train(dataclasses.replace(TINY, **changes), callback, every, digits)


# -------------------------------------------------------------- Adam, Muon, schedule

@pytest.mark.parametrize("threads, chunk, n_shards", [(1, 7, 3), (2, 7, 2), (3, 1 << 15, 1)])
def test_adam_is_the_textbooks(threads, chunk, n_shards, monkeypatch):
    """also where gradients are as small as eps"""
    monkeypatch.setattr(mc, "ADAM_CHUNK", chunk)
    rng = np.random.default_rng(0)
    params = {"a": rng.standard_normal((5, 6)), "b": rng.standard_normal(3)}
    m, v = ({name: 0 * p for name, p in params.items()} for _ in range(2))
    theta, m1, v1 = ({name: factor * p for name, p in params.items()} for factor in (1, 0, 0))
    with mc.Runner(threads) as runner:
        for t in range(1, 6):
            shards = [{name: rng.standard_normal(p.shape) * {"a": t, "b": 1e-8}[name] for name, p in params.items()}
                      for _ in range(n_shards)]
            kept = [{name: g.copy() for name, g in shard.items()} for shard in shards]
            mc.adam_step(params, shards, m, v, t, 0.1 / t, runner)
            for name in params:
                g = sum(shard[name] for shard in kept)
                m1[name], v1[name] = 0.9 * m1[name] + 0.1 * g, 0.999 * v1[name] + 0.001 * g * g
                m_hat, v_hat = m1[name] / (1 - 0.9 ** t), v1[name] / (1 - 0.999 ** t)
                theta[name] = theta[name] - 0.1 / t * m_hat / (np.sqrt(v_hat) + 1e-8)
                np.testing.assert_allclose(params[name], theta[name], rtol=1e-11)
                np.testing.assert_allclose(0.1 * m[name], m1[name], rtol=1e-11)        # kept without (1 - beta)
                np.testing.assert_allclose(0.001 * v[name], v1[name], rtol=1e-11)


def test_a_run_flushes_its_moments_now_and_then(monkeypatch, digits):
    a, b = np.array([1e-40, -1e-36, 1e-34, -2, 0], np.float32), np.full((2, 2), 1e-45, np.float32)
    mc.flush_denormals({"a": a}, {"b": b})
    assert a.tolist() == np.array([0, 0, 1e-34, -2, 0], np.float32).tolist() and not b.any() and mc.FLUSH_STEPS == 500
    flushed = []
    monkeypatch.setattr(mc, "FLUSH_STEPS", 2)
    monkeypatch.setattr(mc, "flush_denormals", lambda *moments: flushed.append(len(moments)))
    train(digits, n_epochs=1, n_train=5 * TINY.batch_size)
    assert flushed == [2, 2]


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (7, 7), (1, 5)])
def test_orthogonalized_is_newton_schulz_without_its_long_products(shape):
    """X <- a X + (b X X^T + c (X X^T)^2) X in float64, with singular values from 1 down to 1/2000; also in float32,
    whose rounding the square matrix feels twice. Those that are not tiny end between 0.6 and 1.3"""
    u, _, v = np.linalg.svd(np.random.default_rng(0).standard_normal(shape), full_matrices=False)
    g = u * np.geomspace(1, 5e-4, min(shape)) @ v
    x = g / np.linalg.norm(g)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    np.testing.assert_allclose(mc.orthogonalize(g), x, atol=1e-9)
    single = mc.orthogonalize(g.astype(np.float32))
    assert single.dtype == np.float32 and np.linalg.norm(single - x) < 1e-3 * np.linalg.norm(x)
    values = np.linalg.svd(mc.orthogonalize(u * np.linspace(1, 0.3, min(shape)) @ v), compute_uv=False)
    assert 0.6 < values.min() and values.max() < 1.3 and not mc.orthogonalize(np.zeros(shape)).any()


def test_schedules():
    def share(step, schedule="cosine", warmup=0, n_steps=1000):
        return mc.schedule(mc.Config(warmup=warmup, lr_schedule=schedule), step, n_steps)
    assert [share(step) for step in (0, 250, 500, 1000)] == pytest.approx([1, (2 + 2 ** 0.5) / 4, 0.5, 0])
    assert [share(step, "constant") for step in (0, 999)] == [1, 1]
    assert [share(step, "constant", 4) for step in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert [share(step, warmup=4, n_steps=8) for step in (0, 2, 3, 4)] == pytest.approx(
        [0.25, 0.75 * (1 + np.cos(np.pi / 4)) / 2, (1 + np.cos(3 * np.pi / 8)) / 2, 0.5])
    assert not isinstance(share(7), np.generic)                     # which would lift float32 under NumPy 2


@pytest.mark.parametrize("network, muon", [("normalized", 0.05), ("paper", 0.0)])
def test_train_takes_the_scheduled_steps_and_folds_statistics(digits, network, muon):
    """The loop written out in float64, 2 epochs of a batch of shards of 16 and 8 and one of a single sample: kernels go
    by muon * schedule and keep their length, all else goes by Adam with lr * schedule; statistics fold in order"""
    config = dataclasses.replace(NETWORKS[network], n_train=25, batch_size=24, muon=muon, warmup=3)
    params = {name: p.astype(float) for name, p in mc.init_params(config).items()}
    state, kernels = mc.init_state(params), mc.normalized_kernels({name: p.shape for name, p in params.items()})
    m, v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    losses = []
    for step in range(4):
        pairs, = mc.epoch_samples(digits, step // 2, config)
        shards = (slice(24, 25),) if step % 2 else (slice(0, 16), slice(16, 24))
        parts = [(rows.stop - rows.start, *mc.loss_and_grads(params, mc.to_batch(pairs, rows, float), config))
                 for rows in shards]
        share = (1 + np.cos(np.pi * step / 4)) / 2 * min(1, (step + 1) / 3)
        for n, terms, _, found in parts:
            losses.append(n * terms["loss"])
            state = {name: a + (found[name] - a) * (9 / (step + 9)) for name, a in state.items()}
        for name, p in params.items():
            g = sum(n * grads[name] for n, _, grads, _ in parts) / sum(n for n, *_ in parts)
            if name in kernels:
                m[name] = 0.95 * m[name] + g
                u = mc.orthogonalize((g + 0.95 * m[name]).reshape(-1, g.shape[-1])).reshape(g.shape)
                stepped = p - muon * share * np.linalg.norm(p) * u / np.linalg.norm(u)
                params[name] = stepped * np.linalg.norm(p) / np.linalg.norm(stepped)
            else:
                m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.999 * v[name] + 0.001 * g ** 2
                root = np.sqrt(v[name] / (1 - 0.999 ** (step + 1))) + 1e-8
                params[name] = p - config.lr * share * (m[name] / (1 - 0.9 ** (step + 1))) / root
    trained, history = mc.train(config, data=digits, dtype=float)
    assert len(kernels) == 6 * (muon > 0) and trained.keys() == params.keys() | state.keys()
    if not kernels:
        with pytest.raises(mc.InputError, match="--muon 0.1 applies to batch-normalized convolutions"):
            mc.check_muon(dataclasses.replace(config, muon=0.1))
    assert [epoch["train_loss"] for epoch in history["epochs"]] == pytest.approx(np.reshape(losses, (2, 3)).sum(1) / 25)
    for name, expected in (params | state).items():
        np.testing.assert_allclose(trained[name], expected, rtol=1e-6, atol=1e-8, err_msg=name)


# -------------------------------------------------------------- shards and generators

def test_generators_are_the_children_that_seedsequence_spawns():
    children = np.random.SeedSequence(7).spawn(len(mc.PURPOSES))
    assert mc.PURPOSES == ("data", "init", "batches", "evaluation")
    for purpose, child in zip(mc.PURPOSES, children):
        assert mc.rng_for(7, purpose).random() == np.random.default_rng(child).random()
    assert (
        mc.rng_for(7, "batches", 3, 1).random() == np.random.default_rng(children[2].spawn(4)[3].spawn(2)[1]).random())


def test_runner_forward_equals_one_big_batch(digits):
    """200 samples are 13 shards, eight of which a thread takes at once"""
    params, pairs = mc.init_params(TINY), mc.draw_pairs(digits, "val", 200, TINY, "evaluation", 0)
    whole, _ = mc.forward(params, mc.to_batch(pairs, slice(None))["images"], TINY, None)
    for threads in (1, 3):
        with mc.Runner(threads) as runner:
            out = runner.forward(params, pairs, TINY, decode="top2")
        assert runner.n_evaluated == 200
        for name in ("lengths", "v", "recon", "digits"):
            np.testing.assert_allclose(out[name], whole[name], rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("threads, batch_size, expected", [(5, 10 ** 9, 5), (5, 32, 2), (5, 33, 3), (1, 32, 1),
                                                           (0, 10 ** 9, mc.n_cores())])
def test_a_runner_has_no_more_threads_than_a_batch_has_shards(threads, batch_size, expected):
    with mc.Runner(threads, batch_size) as runner:
        assert runner.threads == expected and bool(runner.pool) == (expected > 1)
    with mc.Runner(threads, batch_size) as runner, np.errstate(all="raise"):
        assert np.isinf(runner.map(np.exp, [1e3, 1.0])[0])                              # silent: Run watches the loss


# -------------------------------------------------------------- the same bits however it ran

RUNS = {}                          # each experiment's toy run that others must equal, and what its snapshots were


@pytest.fixture(params=EXPERIMENTS)
def reference(request):
    """-> experiment, the weights and the history of its toy run, 2 epochs of 2 steps, {step: (weights, terms)}"""
    if request.param not in RUNS:
        seen = {}
        run = toy_run(request.param, lambda step, weights, terms: seen.update({step: (weights, terms)}), 1, n_epochs=2)
        RUNS[request.param] = (request.param, *run, seen)
    return RUNS[request.param]


def assert_is(run, reference):
    assert_same(run[0], reference[1])
    assert run[1] == reference[2]


def test_neither_threads_nor_a_callback_change_a_bit_another_seed_does(reference):
    """A callback may do what it likes with its copies, and comes at the steps that it asked for and at the end"""
    experiment, weights, history, snapshots = reference
    steps, before = [], np.random.get_state()[1].tolist()

    def vandal(step, given, terms):
        steps.append(step)
        assert_same(given, snapshots[step][0])
        for a in given.values():
            a.fill(np.nan)
        if terms:
            terms.clear()

    assert_is(toy_run(experiment, vandal, 3, n_epochs=2, threads=2), reference)
    assert steps == [0, 3, 4] and np.random.get_state()[1].tolist() == before           # nor NumPy's own generator
    other, _ = toy_run(experiment, seed=5)
    assert other.keys() == weights.keys() and not any(np.array_equal(other[name], weights[name]) for name in weights
                                                      if np.ptp(snapshots[0][0][name]))


def test_history_and_snapshots_say_what_happened(reference):
    experiment, weights, history, snapshots = reference
    module = EXPERIMENTS[experiment]
    init = module.init_params(toy(experiment)[0])
    assert_same(snapshots[0][0], init | module.init_state(init))
    assert_same(snapshots[4][0], weights)
    assert list(snapshots) == [0, 1, 2, 3, 4] and snapshots[0][1] is None and history["steps"] == 4
    for k, epoch in enumerate(history["epochs"], 1):
        (_, a), (_, b) = snapshots[2 * k - 1], snapshots[2 * k]
        assert (epoch["epoch"], epoch["step"]) == (k, 2 * k) and len(history["epochs"]) == 2
        for name in a.keys() - {"hits"}:
            assert epoch["train_" + name] == pytest.approx((17 * a[name] + 3 * b[name]) / 20)
        assert epoch["train_accuracy"] == (a["hits"] + b["hits"]) / 20 and "train_hits" not in epoch
    assert json.loads(json.dumps(history)) == history


def power_cut(at):
    def cut(step, *_):
        if step == at:
            raise KeyboardInterrupt
    return cut


@pytest.mark.parametrize("at", [1, 4])
def test_killed_and_resumed_is_never_killed(reference, tmp_path, at):
    """in the first epoch, and after the last step but before that is saved; with other threads afterwards"""
    experiment, path, refused = reference[0], tmp_path / "run.npz", EXPERIMENTS[reference[0]].InputError
    given = dict(n_epochs=2, checkpoint=str(path))
    with pytest.raises(KeyboardInterrupt):
        toy_run(experiment, power_cut(at), 1, **given)
    assert path.exists() == (at > 1)
    steps = []
    assert_is(toy_run(experiment, lambda step, *_: steps.append(step), 1, threads=2, **given), reference)
    assert steps == list(range({1: 0, 4: 2}[at], 5))
    before = path.read_bytes()
    assert_is(toy_run(experiment, **given), reference)                                  # nothing left to do
    for changes, fault in ((dict(seed=1), "belongs to another run .seed 0, now 1.. Use the same settings"),
                           (dict(n_epochs=3), "belongs to another run .n_epochs 2, now 3")):  # its cosine knew the end
        with pytest.raises(refused, match=f"run.npz: {fault}"):
            toy_run(experiment, **given | changes)
    assert path.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["home", "run.npz"]


def test_a_float64_run_resumes_in_float64(digits, tmp_path):
    config = dataclasses.replace(TINY, checkpoint=str(tmp_path / "run.npz"))
    with pytest.raises(KeyboardInterrupt):
        mc.train(config, power_cut(3), 1, digits, np.float64)
    resumed, _ = mc.train(config, data=digits, dtype=np.float64)
    assert_same(resumed, mc.train(TINY, data=digits, dtype=np.float64)[0])
    assert {p.dtype for p in resumed.values()} == {np.dtype(np.float64)}


NUMPY_FIRST = """
import os, sys
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.pop(name, None)
import numpy
sys.path.insert(0, {tests!r})
from conftest import mc, toy_run
print(toy_run("multimnist_capsnet", conv3_channels=64)[0]["dec3_w"].sum(dtype="f8").hex())
"""


def test_numpy_may_be_imported_before_the_experiment(run_script):
    """BLAS is told then to use one thread, and the bits are those of a run whose environment variables said so"""
    assert all(os.environ[name] == "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    here = toy_run("multimnist_capsnet", conv3_channels=64)[0]["dec3_w"].sum(dtype="f8").hex()
    done = run_script("-c", NUMPY_FIRST.format(tests=str(Path(__file__).parent)))
    assert done.stdout.split() == [here], done.stderr


# -------------------------------------------------------------- divergence

@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoint(digits, tmp_path, monkeypatch, bad):
    path, good, calls = tmp_path / "run.npz", mc.loss_and_grads, []

    def goes_wrong(*given):
        calls.append(1)
        terms, *rest = good(*given)
        return {**terms, "loss": bad if len(calls) > 8 else terms["loss"]}, *rest       # 3 shards a step: in the third

    monkeypatch.setattr(mc, "loss_and_grads", goes_wrong)
    with pytest.raises(mc.InputError, match=f"loss {bad}, step 3.*last good state is in .*run.npz"):
        train(digits, checkpoint=str(path))
    found = mc.load_network(path)
    assert found.step == 2 and all(np.isfinite(p).all() for p in found.params.values())


def test_what_is_not_finite_after_an_epoch_never_reaches_the_checkpoint(digits, tmp_path, monkeypatch):
    """Weights of the last step, which no loss would show; and what an evaluation finds"""
    path, good, good_step, steps = tmp_path / "run.npz", mc.evaluate, mc.adam_step, []

    def goes_wrong(params, *others):
        good_step(params, *others)
        steps.append(1)
        params["dec3_b"][5] = np.nan if len(steps) == 4 else params["dec3_b"][5]

    monkeypatch.setattr(mc, "adam_step", goes_wrong)
    with pytest.raises(mc.InputError, match="dec3_b is not finite after step 4: .*last good state is in .*run.npz"):
        train(digits, checkpoint=str(path))
    assert mc.load_network(path).step == 2
    monkeypatch.setattr(mc, "evaluate", lambda *args: good(*args) | {"loss": np.nan})
    with pytest.raises(mc.InputError, match="val_loss is not finite after step 2: .*an image holds nan"):
        train(digits)


# -------------------------------------------------------------- what a run says

class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal, quiet, expected", [
    (False, False, "hello\nepoch 1\n"), (False, True, ""), (True, True, ""),
    (True, False, "hello\nstep 1\r\x1b[Kepoch 1\n")])
@pytest.mark.parametrize("program", [True, False])
def test_progress_is_one_live_line_on_a_terminal_and_a_line_an_epoch_elsewhere(monkeypatch, terminal, quiet, expected,
                                                                               program):
    """Imported into a script or notebook, nothing is updated in place"""
    expected = expected if program else expected.replace("step 1\r\x1b[K", "")
    monkeypatch.setattr(mc.Progress, "program", program)
    monkeypatch.setattr("sys.stdout", Terminal() if terminal else io.StringIO())
    progress = mc.Progress(quiet)
    progress.last -= 1                                              # s ago
    progress.say("hello")
    progress.step("step 1")
    progress.step("step 2, too soon")
    progress.say("epoch 1")
    assert mc.sys.stdout.getvalue() == expected


def test_without_a_terminal_a_long_phase_is_reported_every_fifteen_seconds(monkeypatch, capsys):
    """and the messages of an epoch begin anew; a warning begins with the word"""
    now = [100.0]
    monkeypatch.setattr(mc.time, "perf_counter", lambda: now[0])
    progress = mc.Progress(quiet=False)
    for step in range(1, 46):
        now[0] += 1
        progress.step(f"step {step}")
    progress.warn("too long")
    assert capsys.readouterr().out == "step 16\nstep 32\nwarning: too long\n"


@pytest.fixture
def clock(monkeypatch):
    """A clock that is a second later whenever somebody looks"""
    now = [0.0]

    def perf_counter():
        now[0] += 1
        return now[0]
    monkeypatch.setattr(mc.time, "perf_counter", perf_counter)
    monkeypatch.setattr(mc.shutil, "get_terminal_size", lambda **_: os.terminal_size((120, 24)))
    return now


def test_the_live_line_counts_steps_time_and_samples(digits, clock, monkeypatch):
    """Epochs of 40, 40 and 8 samples, 3 steps; then the validation's samples, which it counts on"""
    monkeypatch.setattr(mc.Progress, "program", True)
    monkeypatch.setattr("sys.stdout", Terminal())
    _, history = train(digits, quiet=False, n_train=88)
    lines = re.split(r"[\r\n]+", mc.sys.stdout.getvalue().replace("\x1b[K", ""))
    steps = [re.match(r"step (\d)/6  (\d+) s left  train loss (\S+)  train accuracy (\S+)  (\d+) samples/s", line)
             for line in lines if line.startswith("step")]
    assert [int(step[1]) for step in steps] == [1, 2, 3, 4, 5, 6]
    for k, (seen, step) in enumerate(zip((40, 80, 88) * 2, steps), 1):
        seconds = 1 + 3 * ((k - 1) % 3)                             # step() looks twice, for a line; update() once
        assert int(step[5]) == round(seen / seconds) and int(step[2]) == round((6 - k) * 40 * seconds / seen)
    for step, epoch in zip((steps[2], steps[5]), history["epochs"]):
        assert float(step[3]) == pytest.approx(epoch["train_loss"], abs=6e-4)
        assert float(step[4]) == pytest.approx(epoch["train_accuracy"], abs=6e-4)
    assert [line for line in lines if "evaluating" in line] == ["evaluating: 16 samples", "evaluating: 32 samples"]
    assert [line[:16] for line in lines if line.startswith("epoch")] == ["epoch 1/2  train", "epoch 2/2  train"]
    assert history["seconds"] == sum(epoch["seconds"] for epoch in history["epochs"]) == 14


def test_a_callbacks_time_is_not_trainings(digits, clock):
    history = train(digits, lambda *_: clock.__setitem__(0, clock[0] + 1000), 1)[1]
    assert 0 < history["seconds"] < 100


def test_a_warm_up_longer_than_the_run_is_told(digits, capsys):
    for warmup in (4, 5):
        train(digits, quiet=False, warmup=warmup)
        said = capsys.readouterr().out
        assert ("warning: --warmup 5 exceeds the run's 4 steps, so the learning rate never reaches its maximum. Lower "
                "--warmup" in said) == (warmup == 5)
