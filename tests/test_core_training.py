"""The training run of the core: Adam and its schedules, shards, bit identity, checkpoints, divergence, files."""
import dataclasses
import json
import os
import signal
from pathlib import Path

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import CNN, NETWORKS, TINY, assert_same, toy_digits, without_seconds


def train(digits, callback=None, every=0, **changes):
    return mc.train(dataclasses.replace(TINY, **changes), callback, every, digits)


@pytest.fixture(scope="module")
def reference(digits):
    """The toy run that others must equal: 2 epochs of 2 batches of 3 shards"""
    return train(digits)


# -------------------------------------------------------------- Adam and its schedules

@pytest.mark.parametrize("threads, chunk", [(1, 7), (2, 7), (3, 1 << 15)])
def test_adam_is_the_textbooks(threads, chunk, monkeypatch):
    monkeypatch.setattr(mc, "ADAM_CHUNK", chunk)
    rng = np.random.default_rng(0)
    params = {"a": rng.standard_normal((5, 6)), "b": rng.standard_normal(3)}
    m, v = ({name: 0 * p for name, p in params.items()} for _ in range(2))
    theta = {name: list(p.ravel()) for name, p in params.items()}
    m1, v1 = ({name: [0.0] * p.size for name, p in params.items()} for _ in range(2))
    with mc.Runner(threads) as runner:
        for t in range(1, 6):
            shards = [{name: t * rng.standard_normal(p.shape) for name, p in params.items()} for _ in range(3)]
            lr = 0.1 / t
            mc.adam_step(params, shards, m, v, t, lr, runner)
            for name in params:
                for k in range(params[name].size):
                    g = sum(shard[name].ravel()[k] for shard in shards)
                    m1[name][k] = 0.9 * m1[name][k] + 0.1 * g
                    v1[name][k] = 0.999 * v1[name][k] + 0.001 * g * g
                    root = (v1[name][k] / (1 - 0.999 ** t)) ** 0.5
                    theta[name][k] -= lr * (m1[name][k] / (1 - 0.9 ** t)) / (root + 1e-8)
                np.testing.assert_allclose(params[name].ravel(), theta[name], rtol=1e-11)
                np.testing.assert_allclose(0.1 * m[name].ravel(), m1[name], rtol=1e-11)        # kept without (1 - beta)
                np.testing.assert_allclose(0.001 * v[name].ravel(), v1[name], rtol=1e-11)


def test_adams_first_step_is_lr_times_the_sign():
    params, grads = {"a": np.zeros(3, np.float32)}, {"a": np.array([5, -0.01, 0], np.float32)}
    mc.adam_step(params, [grads], {"a": np.zeros(3, np.float32)}, {"a": np.zeros(3, np.float32)}, 1, 0.1, mc.Runner(1))
    np.testing.assert_allclose(params["a"], [-0.1, 0.1, 0], rtol=1e-4)


def test_flush_takes_what_is_next_to_zero_and_nothing_else():
    moments = {"a": np.array([1e-40, -1e-36, 1e-34, -2, 0], np.float32)}, {"b": np.full((2, 2), 1e-45, np.float32)}
    mc.flush(*moments)
    np.testing.assert_array_equal(moments[0]["a"], np.array([0, 0, 1e-34, -2, 0], np.float32))
    assert not moments[1]["b"].any()


def test_a_run_flushes_its_moments_now_and_then(monkeypatch, digits):
    flushed = []
    monkeypatch.setattr(mc, "FLUSH_STEPS", 2)
    monkeypatch.setattr(mc, "flush", lambda *moments: flushed.append(len(moments)))
    mc.train(dataclasses.replace(TINY, n_epochs=1, n_train=5 * TINY.batch_size), data=digits)
    assert flushed == [2, 2]


@pytest.mark.parametrize("shape", [(20, 6), (6, 20), (7, 7), (1, 5)])
def test_orthogonalised_turns_singular_values_into_about_one(shape):
    """and leaves the singular vectors and the scale of the matrix out of it"""
    g = np.random.default_rng(0).standard_normal(shape)
    u, s, v = np.linalg.svd(g, full_matrices=False)
    x = mc.orthogonalised(g)
    inner = u.T @ x @ v.T
    np.testing.assert_allclose(inner, np.diag(np.diag(inner)), atol=1e-12)
    assert (np.diag(inner) > 0.6).all() and (np.diag(inner) < 1.3).all() and np.ptp(s) >= 0
    np.testing.assert_allclose(mc.orthogonalised(1e-3 * g), x, rtol=1e-6)
    assert mc.orthogonalised(g.astype(np.float32)).dtype == np.float32
    assert not mc.orthogonalised(np.zeros(shape)).any()


def test_orthogonalised_by_the_scalar_polynomial():
    """Of a diagonal matrix each number goes its own way"""
    numbers = np.array([3.0, 1.0, 0.2])
    expected = numbers / np.sqrt((numbers ** 2).sum())
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected ** 3 + 2.0315 * expected ** 5
    np.testing.assert_allclose(mc.orthogonalised(np.diag(numbers)), np.diag(expected), atol=1e-12)


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (24, 24)])
def test_orthogonalised_by_its_square_matrix_alone_is_what_the_long_form_finds(shape):
    """X <- a X + (b X X^T + c (X X^T)^2) X in float64, with singular values from 1 down to 1/2000; also in float32,
    whose rounding the square matrix feels twice"""
    u, _, v = np.linalg.svd(np.random.default_rng(0).standard_normal(shape), full_matrices=False)
    g = u * np.geomspace(1, 5e-4, min(shape)) @ v
    x = g / np.linalg.norm(g)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    np.testing.assert_allclose(mc.orthogonalised(g), x, atol=1e-9)
    error = mc.orthogonalised(g.astype(np.float32)) - x
    assert np.linalg.norm(error) < 1e-3 * np.linalg.norm(x)


def test_a_step_along_the_orthogonalised_momentum_by_hand():
    rng = np.random.default_rng(1)
    w, first, second = (rng.standard_normal((2, 3, 2, 4)) for _ in range(3))
    params, momentum = {"a_w": w.copy(), "b": np.ones(3)}, {"a_w": np.zeros_like(w)}
    with mc.Runner(1) as runner:
        mc.muon_step(params, [{"a_w": first}, {"a_w": second}], momentum, ["a_w"], 0.1, runner)
        u = mc.orthogonalised(1.95 * (first + second).reshape(12, 4)).reshape(w.shape)
        moved = w - 0.1 * np.linalg.norm(w) * u / np.linalg.norm(u)
        np.testing.assert_allclose(params["a_w"], moved * np.linalg.norm(w) / np.linalg.norm(moved), rtol=1e-9)
        np.testing.assert_allclose(momentum["a_w"], first + second)
        mc.muon_step(params, [{"a_w": first}], momentum, ["a_w"], 0.1, runner)
    np.testing.assert_allclose(momentum["a_w"], 0.95 * (first + second) + first)
    assert np.linalg.norm(params["a_w"]) == pytest.approx(np.linalg.norm(w)) and params["b"].tolist() == [1, 1, 1]


def test_only_normalised_kernels_leave_adam_and_there_must_be_some(digits):
    config = dataclasses.replace(NETWORKS["normalised"], muon=0.02, n_epochs=1)
    with mc.Run(config, "synthetic", 80, mc.Progress(True)) as run:
        assert run.kernels == [f"{name}_w" for name in ("conv1", "conv2", "conv3", "conv4", "conv5", "primary")]
    with pytest.raises(mc.InputError, match="--muon 0.02: is for normalised convolutions"):
        mc.Run(dataclasses.replace(config, norm="none"), "synthetic", 80, mc.Progress(True))
    params, _ = mc.train(config, data=digits)
    start = mc.init_params(config)
    for name in start:
        length = np.linalg.norm(start[name]) / max(1e-9, np.linalg.norm(params[name]))
        assert (abs(length - 1) < 1e-5) == (name in run.kernels), name


def test_muon_has_the_same_bits_for_any_threads_and_after_a_stop(digits, tmp_path):
    config = dataclasses.replace(NETWORKS["normalised"], muon=0.02, lr_schedule="constant")
    whole, _ = mc.train(config, data=digits)
    two, _ = mc.train(dataclasses.replace(config, threads=2), data=digits)
    path = str(tmp_path / "run.npz")
    mc.train(dataclasses.replace(config, n_epochs=1, checkpoint=path), data=digits)
    resumed, _ = mc.train(dataclasses.replace(config, checkpoint=path, resume=True), data=digits)
    assert_same(whole, two)
    assert_same(whole, resumed)


def test_learning_rate_schedules():
    def rate(schedule, step):
        return mc.learning_rate(mc.Config(lr=0.01, warmup=0, lr_schedule=schedule), step, 1000)
    assert [rate("cosine", step) for step in (0, 500, 1000)] == pytest.approx([0.01, 0.005, 0])
    assert [rate("exponential", step) for step in (0, 2000, 4000)] == pytest.approx([0.01, 0.0096, 0.009216])
    assert rate("exponential", 1000) == pytest.approx(0.01 * 0.96 ** 0.5)                      # no stairs
    assert [rate("constant", step) for step in (0, 999)] == [0.01, 0.01]


@pytest.mark.parametrize("schedule", ["cosine", "exponential", "constant"])
def test_learning_rate_is_a_python_float(schedule):
    """A NumPy scalar would lift Adam's float32 arithmetic to float64 under NumPy 2 only: slower, and other bits."""
    assert type(mc.learning_rate(mc.Config(lr_schedule=schedule), 7, 100)) is float


def test_warmup_raises_the_learning_rate_step_by_step(digits, monkeypatch):
    rates, good = [], mc.learning_rate
    monkeypatch.setattr(mc, "learning_rate", lambda *given: rates.append(good(*given)) or rates[-1])
    train(digits, warmup=3, lr=1e-3, lr_schedule="constant")
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])


def test_warmup_multiplies_the_schedule():
    config = mc.Config(lr=0.01, warmup=4)
    assert [mc.learning_rate(config, step, 8) for step in (0, 2, 3, 4)] == pytest.approx(
        [0.0025, 0.0075 * (1 + np.cos(np.pi / 4)) / 2, 0.01 * (1 + np.cos(3 * np.pi / 8)) / 2, 0.005])


def steps_by_hand(digits, config, params):
    """2 epochs of 2 batches of one shard -> the step's number, from 1, the part of the rate that is left to it, and its
    gradients with `params` as they then are"""
    step = 0
    for epoch in range(2):
        pairs, = mc.epoch_samples(digits, epoch, config)
        for rows in (slice(0, 16), slice(16, 32)):
            _, grads, _ = mc.loss_and_grads(params, mc.to_batch(pairs, rows), config)
            part = (1 + np.cos(np.pi * step / 4)) / 2 * min(1, (step + 1) / max(1, config.warmup))
            step += 1
            yield step, part, grads


def adam_by_hand(params, m, v, name, g, lr, step):
    m[name] = 0.9 * m[name] + 0.1 * g
    v[name] = 0.999 * v[name] + 0.001 * g ** 2
    params[name] = params[name] - np.float32(lr) * (m[name] / (1 - 0.9 ** step)) / (
        np.sqrt(v[name] / (1 - 0.999 ** step)) + 1e-8)


@pytest.mark.parametrize("changes", [
    dict(), dict(weight_decay=20.0), dict(average=0.15, warmup=3), dict(average=0.9)], ids=str)
def test_train_is_adam_on_fresh_batches_with_the_scheduled_rate(digits, changes):
    """The training loop written out: 2 epochs of 2 batches of one shard, learning rate lr * (1 + cos(pi step/4)) / 2.
    Weight decay shrinks what multiplies, not what is added; the running mean begins as a plain one."""
    config = dataclasses.replace(TINY, n_train=32, batch_size=16, digit_bias=True, **changes)
    params = mc.init_params(config)
    mean = {name: p.astype(float) for name, p in params.items()}
    m, v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    for step, part, grads in steps_by_hand(digits, config, params):
        for name, g in grads.items():
            if name not in ("conv1_b", "primary_b", "digit_b", "dec1_b", "dec2_b", "dec3_b"):
                params[name] = params[name] * np.float32(1 - config.lr * part * config.weight_decay)
            adam_by_hand(params, m, v, name, g, config.lr * part, step)
            kept = min(config.average, step / (step + 9))                               # 1/10, 2/11, 3/12, 4/13
            mean[name] = kept * mean[name] + (1 - kept) * params[name]
    trained, _ = mc.train(config, data=digits)
    for name, expected in (mean if config.average else params).items():
        moved = np.abs(expected - mc.init_params(config)[name]).mean()
        assert np.abs(trained[name] - expected).mean() < 1e-3 * moved, name


def test_train_takes_muon_steps_of_the_scheduled_share_and_does_not_decay_these_kernels(digits):
    """The loop written out for a normalised network: kernels of convolutions go by muon * schedule, warm-up and cosine
    alike, keep their length and are not decayed; all else is Adam's, matrices decayed"""
    config = dataclasses.replace(NETWORKS["normalised"], n_train=32, batch_size=16, muon=0.05, warmup=3,
                                 weight_decay=10.0)
    params = mc.init_params(config)
    kernels = [name for name in params if params[name].ndim == 4 and name != "W"]
    m, v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    for step, part, grads in steps_by_hand(digits, config, params):
        for name, g in grads.items():
            if name in kernels:
                m[name] = 0.95 * m[name] + g
                length, columns = np.linalg.norm(params[name]), params[name].shape[-1]
                u = mc.orthogonalised((g + 0.95 * m[name]).reshape(-1, columns)).reshape(g.shape)
                stepped = params[name] - 0.05 * part * length * u / np.linalg.norm(u)
                params[name] = (stepped * length / np.linalg.norm(stepped)).astype(np.float32)
                continue
            if name[-1] in "wW":
                params[name] = params[name] * np.float32(1 - config.lr * part * 10)
            adam_by_hand(params, m, v, name, g, config.lr * part, step)
    trained, _ = mc.train(config, data=digits)
    assert len(kernels) == 6
    for name, expected in params.items():
        moved = np.abs(expected - mc.init_params(config)[name]).mean()
        assert np.abs(trained[name] - expected).mean() < 1e-2 * moved, name


# -------------------------------------------------------------- shards and generators

def test_runner_forward_equals_one_big_batch(digits):
    params, pairs = mc.init_params(TINY), mc.draw_pairs(digits, "val", 70, TINY, "evaluation", 0)
    batch = mc.to_batch(pairs, slice(None))
    for decode, chosen in (("labels", batch["labels"]), ("top2", None)):
        whole, _ = mc.forward(params, batch["images"], TINY, chosen)
        for threads in (1, 3):
            with mc.Runner(threads) as runner:
                out = runner.forward(params, pairs, TINY, decode=decode)
            for name in ("lengths", "v", "recon", "digits"):
                np.testing.assert_allclose(out[name], whole[name], rtol=2e-4, atol=1e-6)


def test_shards_mean_equals_the_batchs_mean(digits):
    """40 rows are shards of 16, 16 and 8: the last must weigh half as much."""
    params, pairs = mc.init_params(TINY), mc.draw_pairs(digits, "train", 60, TINY, "data")
    rows = np.arange(10, 50)
    whole, grads, _ = mc.loss_and_grads(params, mc.to_batch(pairs, rows), TINY)
    with mc.Runner(2) as runner:
        terms, shard_grads, _ = runner.loss_and_grads(params, pairs, rows, TINY)
    assert terms == pytest.approx(whole, rel=1e-5)
    for name in params:
        total = sum(g[name] for g in shard_grads)
        np.testing.assert_allclose(total, grads[name], rtol=1e-3, atol=1e-5 * np.abs(grads[name]).max())


def test_generators_are_the_children_that_seedsequence_spawns():
    children = np.random.SeedSequence(7).spawn(len(mc.PURPOSES))
    for purpose, child in zip(mc.PURPOSES, children):
        assert mc.rng_for(7, purpose).random() == np.random.default_rng(child).random()
    assert (
        mc.rng_for(7, "batches", 3, 1).random() == np.random.default_rng(children[2].spawn(4)[3].spawn(2)[1]).random())


# -------------------------------------------------------------- same bits

def test_same_seed_same_bits_and_different_seed_different_bits(reference, digits):
    params, history = train(digits)
    assert_same(params, reference[0])
    assert without_seconds(history) == without_seconds(reference[1])
    other, _ = train(digits, seed=2)
    assert not any(np.array_equal(other[name], params[name]) for name in params)


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_does_not_change_a_bit(reference, digits, threads):
    params, history = train(digits, threads=threads)
    assert_same(params, reference[0])
    assert without_seconds(history) == without_seconds(reference[1])


@pytest.mark.parametrize("name", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_blas_has_one_thread(name):
    assert os.environ[name] == "1"


def test_a_callback_cannot_change_the_run(reference, digits):
    seen = []

    def vandal(step, params, terms):
        seen.append((step, terms and terms["loss"], {name: p.copy() for name, p in params.items()}))
        for p in params.values():
            p.fill(np.nan)
        if terms:
            terms.clear()
        np.random.seed(0)
        np.random.random(7)

    params, history = train(digits, vandal, 3)
    assert_same(params, reference[0])
    assert without_seconds(history) == without_seconds(reference[1])
    assert [step for step, *_ in seen] == [0, 3, 4] and seen[0][1] is None and seen[1][1] > 0
    assert_same(seen[0][2], mc.init_params(TINY))
    assert_same(seen[-1][2], params)


def test_train_leaves_global_random_numbers_alone(digits):
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    train(digits, n_epochs=1)
    assert np.random.random() == expected


# -------------------------------------------------------------- killed and resumed

def power_cut(step, *_):
    if step == 3:
        raise KeyboardInterrupt


def test_killed_in_the_middle_of_an_epoch_and_resumed_is_never_killed(reference, digits, tmp_path):
    path = str(tmp_path / "run.npz")
    with pytest.raises(KeyboardInterrupt):
        train(digits, power_cut, 1, checkpoint=path, resume=True)                       # nothing there yet: starts anew
    assert mc.load_checkpoint(path).step == 2
    steps = []
    params, history = train(digits, lambda step, *_: steps.append(step), 1, checkpoint=path, resume=True, threads=2)
    assert steps == [2, 3, 4]
    assert_same(params, reference[0])
    assert without_seconds(history) == without_seconds(reference[1])
    before = Path(path).read_bytes()
    again, _ = train(digits, checkpoint=path, resume=True)                              # nothing left to do
    assert_same(again, reference[0])
    assert Path(path).read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["home", "run.npz"]


def test_decay_and_running_mean_survive_being_killed(digits, tmp_path):
    changes = dict(average=0.5, weight_decay=1.0, warmup=3)
    params, history = train(digits, **changes)
    path = str(tmp_path / "run.npz")
    with pytest.raises(KeyboardInterrupt):
        train(digits, power_cut, 1, checkpoint=path, **changes)
    assert mc.load_checkpoint(path).average.keys() == params.keys()
    resumed, later = train(digits, checkpoint=path, resume=True, **changes)
    assert_same(params, resumed)
    assert without_seconds(history) == without_seconds(later)


@pytest.mark.parametrize("schedule", ["constant", "exponential"])
def test_a_run_whose_schedule_knows_no_end_may_be_resumed_with_more_epochs(digits, tmp_path, schedule):
    path = str(tmp_path / "run.npz")
    whole, _ = train(digits, lr_schedule=schedule)
    train(digits, lr_schedule=schedule, n_epochs=1, checkpoint=path)
    resumed, _ = train(digits, lr_schedule=schedule, checkpoint=path, resume=True)
    assert_same(whole, resumed)


def test_every_epoch_is_saved_as_soon_as_it_is_closed(digits, tmp_path, monkeypatch):
    """And the last snapshot comes after that: whoever draws it may read the file"""
    path, good = str(tmp_path / "run.npz"), mc.save_checkpoint
    steps = []
    monkeypatch.setattr(mc, "save_checkpoint", lambda *given: good(*given) or steps.append(f"saved {given[1].step}"))
    train(digits, lambda step, *_: steps.append(step), 3, checkpoint=path)
    assert steps == [0, "saved 2", 3, "saved 4", 4]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from conftest import TINY, mc, toy_digits
import dataclasses, numpy as np
saved, savez = [], np.savez
def half(file, **arrays):
    saved.append(1)
    savez(file, **arrays)
    if len(saved) == 2:
        file.truncate(999)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
def callback(step, *_):
    if step == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
np.savez = half
mc.train(dataclasses.replace(TINY, checkpoint={path!r}), callback, 1, toy_digits())
"""


@pytest.mark.parametrize("at", [3, -1], ids=["in an epoch", "while saving"])
def test_a_process_that_is_killed_leaves_a_whole_checkpoint(reference, digits, tmp_path, run_script, at):
    path = str(tmp_path / "run.npz")
    killed = run_script("-c", KILLED.format(tests=str(Path(__file__).parent), path=path, at=at))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert mc.load_checkpoint(path).step == 2
    params, history = train(digits, checkpoint=path, resume=True)
    assert_same(params, reference[0])
    assert without_seconds(history) == without_seconds(reference[1])


def test_a_checkpoint_holds_the_run(reference, digits, tmp_path):
    path = str(tmp_path / "run.npz")
    train(digits, checkpoint=path)
    found = mc.load_checkpoint(path)
    assert_same(found.params, reference[0])
    assert found.adam_m.keys() == found.adam_v.keys() == found.params.keys() and found.average == {}
    assert all(v.min() >= 0 and v.any() for v in found.adam_v.values())
    assert (found.step, found.source, without_seconds(found.history)) == (4, "synthetic", without_seconds(reference[1]))
    assert all(getattr(found.config, f.name) == getattr(TINY, f.name) for f in mc.options(TINY)
               if not f.metadata.get("runtime"))
    with pytest.raises(mc.InputError, match="run.npz: of another experiment"):
        mc.config_of(mc.settings_of(found.config) | {"azimuths": 6}, path)
    assert oct(os.stat(path).st_mode & 0o777) == oct(0o666 & ~mc.UMASK)


def test_a_checkpoints_config_can_become_another_networks():
    """What has its recipe's value counts as not given, so that the other network gets its own"""
    found = mc.config_of(mc.settings_of(dataclasses.replace(TINY, recon_weight=0.5)), "run.npz")
    assert found == dataclasses.replace(TINY, recon_weight=0.5)
    assert mc.for_model(found, "cnn").lr == CNN.lr != TINY.lr
    assert dataclasses.replace(found, preset="deep").recon_weight == 0.5


def test_a_checkpoint_knows_where_its_data_came_from(digits, tmp_path):
    path = str(tmp_path / "run.npz")
    mnist = digits | {"source": "mnist"}
    expected, _ = train(mnist)
    train(mnist, checkpoint=path)
    assert mc.load_checkpoint(path).source == "mnist"
    assert_same(expected, train(mnist, checkpoint=path, resume=True)[0])


@pytest.mark.parametrize("changes, named", [
    (dict(conv1_channels=4), "conv1_channels 3, now 4"), (dict(seed=2), "seed 1, now 2"),
    (dict(n_epochs=3), "n_epochs 2, now 3"), (dict(merge="add"), "merge max, now add")], ids=str)
def test_a_checkpoint_of_another_run_is_refused(digits, tmp_path, changes, named):
    path = tmp_path / "run.npz"
    train(digits, checkpoint=str(path), n_epochs=2, n_train=40)
    before = path.read_bytes()
    with pytest.raises(mc.InputError, match=named):
        train(digits, checkpoint=str(path), resume=True, **{"n_train": 40} | changes)
    with pytest.raises(mc.InputError, match="source synthetic, now mnist"):
        train(digits | {"source": "mnist"}, checkpoint=str(path), resume=True, n_train=40)
    assert path.read_bytes() == before


def test_a_checkpoint_from_before_a_setting_existed_can_be_gone_on_from(digits, tmp_path):
    path = str(tmp_path / "run.npz")
    expected, _ = train(digits, lr_schedule="constant")
    train(digits, lr_schedule="constant", n_epochs=1, checkpoint=path)
    with np.load(path) as file:
        arrays = dict(file)
    meta = json.loads(str(arrays["meta"]))
    for name in ("warmup", "model", "average"):
        del meta["config"][name]
    np.savez(path, **arrays | {"meta": np.array(json.dumps(meta))})
    resumed, _ = train(digits, lr_schedule="constant", checkpoint=path, resume=True)
    assert_same(expected, resumed)


def meta_only(meta):
    return lambda path: np.savez(path, meta=np.array(meta))


def strip(path, name):
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files if key != name}
    np.savez(path, **arrays)


def npy(path):
    with open(path, "wb") as file:
        np.save(file, np.zeros(3))


def flip_directory(path):
    """One bit of the zip's directory: the first entry's compression method"""
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 10] ^= 4
    path.write_bytes(raw)


SPOILS = {"empty": lambda p: p.write_bytes(b""), "text": lambda p: p.write_text("hello"),
          "zip stub": lambda p: p.write_bytes(b"PK\x03\x04"),
          "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1000]),
          "half": lambda p: p.write_bytes(p.read_bytes()[:9999]),
          "flipped": lambda p: p.write_bytes(p.read_bytes()[:5000] + b"?" + p.read_bytes()[5001:]),
          "without meta": lambda p: np.savez(p, a=np.zeros(3)), "meta is no json": meta_only("hello"),
          "other format": meta_only('{"format": 1}'), "only meta": meta_only('{"format": 2}'),
          "pickle": lambda p: np.savez(p, meta=np.array({"format": 2}, object)), "npy": npy,
          "directory flipped": flip_directory, "a parameter is missing": lambda p: strip(p, "params/W"),
          "a moment is missing": lambda p: strip(p, "adam_v/W")}


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_is_not_a_whole_checkpoint_is_refused_in_one_line(digits, tmp_path, spoil):
    path = tmp_path / "run.npz"
    train(digits, checkpoint=str(path), n_train=40)
    SPOILS[spoil](path)
    before = path.read_bytes()
    with pytest.raises(mc.InputError, match="run.npz") as error:
        train(digits, checkpoint=str(path), resume=True, n_train=40)
    assert "\n" not in str(error.value) and path.read_bytes() == before


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(mc.InputError, match="nothing.npz: no such file"):
        mc.load_checkpoint(tmp_path / "nothing.npz")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "result"
    mc.write_atomically(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"new")
        raise OSError(28, "No space left on device")

    with pytest.raises(mc.InputError, match="No space left"):
        mc.write_atomically(path, fail)
    assert path.read_bytes() == b"old" and sorted(p.name for p in tmp_path.iterdir()) == ["home", "result"]


def test_a_write_goes_through_a_link_and_gets_the_usual_permissions(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    mc.write_atomically(link, lambda file: file.write(b"new"))
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert oct(target.stat().st_mode & 0o777) == oct(0o666 & ~mc.UMASK)


def test_json_has_null_for_what_is_no_number(tmp_path):
    mc.write_json(tmp_path / "x.json", {"mean": 0.5, "half": float("nan"), "more": [float("inf"), {"n": 3}]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"mean": 0.5, "half": None, "more": [None, {"n": 3}]}


def test_a_folder_for_figures(tmp_path):
    mc.make_outdir(tmp_path / "a" / "b", ["one"])
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "a" / "b" / "one.png").mkdir()
    with pytest.raises(mc.InputError, match="one.png: it is a folder"):
        mc.make_outdir(tmp_path / "a" / "b", ["two", "one"])
    (tmp_path / "file").write_text("")
    with pytest.raises(mc.InputError, match="--outdir .*file/x: cannot be created"):
        mc.make_outdir(tmp_path / "file" / "x", ["one"])


# -------------------------------------------------------------- divergence

@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("lr", [1e20, 1e38])
def test_a_huge_learning_rate_stops_the_run(digits, lr):
    with pytest.raises(mc.InputError, match="diverged; lower --lr"):
        train(digits, lr=lr, n_epochs=4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoint(digits, tmp_path, monkeypatch, bad):
    path, good = tmp_path / "run.npz", mc.loss_and_grads
    calls = []

    def goes_wrong(*given):
        calls.append(1)
        terms, *rest = good(*given)
        return {**terms, "loss": bad if len(calls) > 8 else terms["loss"]}, *rest  # 3 shards a step: in the third

    monkeypatch.setattr(mc, "loss_and_grads", goes_wrong)
    with pytest.raises(mc.InputError, match=f"loss is {bad} at step 3.*last good state is in .*run.npz"):
        train(digits, checkpoint=str(path))
    found = mc.load_checkpoint(path)
    assert found.step == 2 and all(np.isfinite(p).all() for p in found.params.values())


def test_weights_that_are_not_finite_never_reach_the_checkpoint(digits, tmp_path, monkeypatch):
    path, good = tmp_path / "run.npz", mc.adam_step
    steps = []

    def goes_wrong(params, *others):
        good(params, *others)
        steps.append(1)
        if len(steps) == 4:                                                 # after the last step: no loss would show it
            params["dec3_b"][5] = np.nan

    monkeypatch.setattr(mc, "adam_step", goes_wrong)
    with pytest.raises(mc.InputError, match="diverged"):
        train(digits, checkpoint=str(path))
    assert mc.load_checkpoint(path).step == 2


def test_toy_digits_are_the_ones_other_processes_make(digits):
    assert all(np.array_equal(digits[split][0], toy_digits()[split][0]) for split in ("train", "val", "test"))


def test_history_survives_json(reference):
    assert json.loads(json.dumps(reference[1])) == reference[1]


NUMPY_FIRST = """
import os, sys
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.pop(name, None)
import numpy
sys.path.insert(0, {tests!r})
from conftest import TINY, mc, toy_digits
config = mc.Config(n_epochs=1, n_train=64, n_val=1, digits="synthetic", quiet=True, threads=1)
print(mc.train(config, data=toy_digits())[0]["dec3_w"].sum(dtype="f8").hex())
"""


def test_numpy_may_be_imported_before_the_experiment(digits, run_script):
    """BLAS is told then to use one thread, and the bits are those of a run whose environment variables said so"""
    config = mc.Config(n_epochs=1, n_train=64, n_val=1, digits="synthetic", quiet=True, threads=1)
    here = mc.train(config, data=toy_digits())[0]["dec3_w"].sum(dtype="f8").hex()
    done = run_script("-c", NUMPY_FIRST.format(tests=str(Path(__file__).parent)))
    assert done.stdout.split() == [here], done.stderr


def test_a_checkpoint_with_more_steps_than_asked_for_is_refused(digits, tmp_path):
    config = dataclasses.replace(TINY, lr_schedule="constant", checkpoint=str(tmp_path / "run.npz"))
    mc.train(config, data=digits)
    with pytest.raises(mc.InputError, match="holds 4 steps, --n-epochs 1 are 2"):
        mc.train(dataclasses.replace(config, n_epochs=1, resume=True), data=digits)


def test_an_evaluation_that_is_not_finite_is_not_laid_on_the_weights(digits, monkeypatch):
    good = mc.evaluate
    monkeypatch.setattr(mc, "evaluate", lambda *args: good(*args) | {"loss": np.nan})
    with pytest.raises(mc.InputError, match="val_loss is nan after step 2: an image holds what is no number"):
        mc.train(TINY, data=digits)
