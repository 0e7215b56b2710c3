"""The training run: Adam, Muon and their schedule, shards, the same bits however it ran, saving, divergence."""
import dataclasses
import json
import os
from pathlib import Path

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import EXPERIMENTS, NETWORKS, TINY, assert_same, toy, toy_run


@pytest.mark.parametrize("threads, chunk, n_shards", [(1, 7, 3), (2, 7, 2), (3, 1 << 15, 1)])
def test_adam_is_the_textbooks(threads, chunk, n_shards, monkeypatch):
    """also where gradients are as small as eps"""
    monkeypatch.setattr(mc, "ADAM_CHUNK", chunk)
    rng = np.random.default_rng(0)
    params = {"a": rng.standard_normal((5, 6)), "b": rng.standard_normal(3)}
    m, v = ({name: 0 * p for name, p in params.items()} for _ in range(2))
    theta, m1, v1 = ({name: factor * p for name, p in params.items()} for factor in (1, 0, 0))
    with mc.worker_threads(mc.Config(threads=threads)) as workers:
        for t in range(1, 6):
            shards = [{name: rng.standard_normal(p.shape) * {"a": t, "b": 1e-8}[name] for name, p in params.items()}
                      for _ in range(n_shards)]
            kept = [{name: g.copy() for name, g in shard.items()} for shard in shards]
            mc.adam_step(params, shards, m, v, t, 0.1 / t, workers)
            for name in params:
                g = sum(shard[name] for shard in kept)
                m1[name], v1[name] = 0.9 * m1[name] + 0.1 * g, 0.999 * v1[name] + 0.001 * g * g
                m_hat, v_hat = m1[name] / (1 - 0.9 ** t), v1[name] / (1 - 0.999 ** t)
                theta[name] = theta[name] - 0.1 / t * m_hat / (np.sqrt(v_hat) + 1e-8)
                np.testing.assert_allclose(params[name], theta[name], rtol=1e-11)
                np.testing.assert_allclose(0.1 * m[name], m1[name], rtol=1e-11)        # kept without (1 - beta)
                np.testing.assert_allclose(0.001 * v[name], v1[name], rtol=1e-11)


def test_denormal_moments_become_zero_every_500_steps():
    """Which are slow; those of weights that have had no gradient for long. The last weight takes a step of Adam"""
    small, config = np.array([1e-40, -1e-36, 1e-34, 0], np.float32), dataclasses.replace(TINY, muon=0.0)
    for module, step in ((module, step) for module in EXPERIMENTS.values() for step in (499, 500)):
        state = {"params": {"a": np.zeros(4, np.float32)}, "adam_m": {"a": small / np.float32(0.9)},
                 "adam_v": {"a": np.abs(small)}, "step": step}
        module.optimizer_step(state, [{"a": small == 0}], 0.5, config, mc.worker_threads(config))
        assert (state["adam_m"]["a"] != 0).tolist() == [step == 500, step == 500, True, True]
        assert state["params"]["a"][3] == pytest.approx(-0.05 * config.lr / (0.001 / (1 - 0.999 ** (step + 1))) ** 0.5)


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
    running = mc.initial_state(config, float)["running"]
    kernels = [name for name in params if muon and name.replace("_w", "_norm_gamma") in params and name.endswith("_w")]
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
            running = {name: a + (found[name] - a) * (9 / (step + 9)) for name, a in running.items()}
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
    state = mc.train(config, digits, dtype=float)
    trained, epochs = mc.weights_of(state), state["history"]["epochs"]
    assert len(kernels) == 6 * (muon > 0) and trained.keys() == params.keys() | running.keys()
    assert [epoch["train_loss"] for epoch in epochs] == pytest.approx(np.reshape(losses, (2, 3)).sum(1) / 25)
    for name, expected in (params | running).items():
        np.testing.assert_allclose(trained[name], expected, rtol=1e-6, atol=1e-8, err_msg=name)


def test_running_statistics_forget_fast_at_first():
    """At last 0.99 of what was stays, group by group; the statistics' first values are 0 and 1"""
    running = mc.initial_state(NETWORKS["normalized"])["running"]
    assert {float(a.min()) for name, a in running.items() if name.endswith("_mean")} == {0}
    assert {float(a.min()) for name, a in running.items() if name.endswith("_var")} == {1}
    running = {"a_mean": np.zeros(2, np.float32), "a_var": np.ones(2, np.float32)}
    mc.update_running_statistics(running, [{"a_mean": np.array([1.0, 2])}, {"a_mean": np.array([5.0, 0])}], 10 ** 6)
    np.testing.assert_allclose(running["a_mean"], [0.01 * 0.99 + 0.05, 0.02 * 0.99], rtol=1e-6)
    assert running["a_mean"].dtype == np.float32 and running["a_var"].tolist() == [1, 1]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_eight_examples_are_learned_by_heart(experiment, monkeypatch):
    """In float32, at the default network's own kinds of layers, optimizer and loss, in two shards"""
    module = EXPERIMENTS[experiment]
    monkeypatch.setattr(module, "SHARD", 5)
    config, data = toy(experiment, n_epochs=150, warmup=5, lr_schedule="constant")
    samples = {name: a[:8] for name, a in next(iter(module.epoch_samples(data, 0, config))).items()}
    state, terms = module.initial_state(config), None
    with module.worker_threads(config) as workers:
        for step in range(config.n_epochs):
            terms, grads, _ = module.batch_gradients(state["params"], samples, np.arange(8), config, workers)
            module.optimizer_step(state, grads, 1.0, config, workers)
            state["step"] = step + 1
            if terms["accuracy"] == 1:
                return
    pytest.fail(f"not in {config.n_epochs} steps: {terms}")


RUNS = {}                          # each experiment's toy run that others must equal, and its states step by step


def copied(state):
    return {key: {name: a.copy() for name, a in value.items()} for key, value in state.items()
            if key not in ("step", "history")}


@pytest.fixture(params=EXPERIMENTS)
def reference(request):
    """Return an experiment, the state of its toy run of 2 epochs of 2 steps, and its copies after each step, [(state,
    terms)]"""
    if request.param not in RUNS:
        seen = []
        state = toy_run(request.param, each_step=lambda state, terms: seen.append((copied(state), dict(terms))),
                        n_epochs=2)
        RUNS[request.param] = request.param, state, seen
    return RUNS[request.param]


def assert_is(state, expected):
    for group in ("params", "running", "adam_m", "adam_v"):
        assert_same(state[group], expected[group])
    assert (state["step"], state["history"]) == (expected["step"], expected["history"])


def test_neither_threads_nor_hooks_change_a_bit_and_another_seed_does(reference):
    experiment, expected, seen = reference
    steps, before = [], np.random.get_state()[1].tolist()
    state = toy_run(experiment, each_step=lambda state, terms: steps.append((state["step"], terms["loss"])),
                    each_epoch=lambda state: steps.append("epoch"), n_epochs=2, threads=2)
    assert_is(state, expected)
    losses = [terms["loss"] for _, terms in seen]
    assert steps == [(1, losses[0]), (2, losses[1]), "epoch", (3, losses[2]), (4, losses[3]), "epoch"]
    assert np.random.get_state()[1].tolist() == before                                  # NumPy's own generator rests
    other, first = toy_run(experiment, seed=5)["params"], EXPERIMENTS[experiment].init_params(toy(experiment)[0])
    assert not any(np.array_equal(other[name], p) for name, p in expected["params"].items() if np.ptp(first[name]))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_what_is_looked_at_is_not_learned_from(experiment):
    """Neither images and labels for validation nor those of tests: black ones with other labels change no weight"""
    config, data = toy(experiment)
    module, other = EXPERIMENTS[experiment], dict(data)
    for name in {"val", "test"} & data.keys():
        other[name] = 0 * data[name][0], data[name][1][::-1]
    for name in {"familiar", "novel"} & data.keys():
        other[name] = data[name] | {"images": 0 * data[name]["images"], "labels": data[name]["labels"][::-1]}
    assert_same(*(module.weights_of(module.train(config, each)) for each in (data, other)))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_there_are_as_many_threads_as_asked_for_or_else_as_cores_that_may_be_used(monkeypatch, experiment):
    """A process may have fewer cores than its machine; a system that cannot count them has one"""
    module = EXPERIMENTS[experiment]
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: {0: {0, 3, 5}}[pid], raising=False)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 64)
    asked = []
    monkeypatch.setattr(module, "ThreadPoolExecutor", lambda n, **more: asked.append(n))
    for threads in (0, 5, 1):
        module.worker_threads(module.Config(threads=threads))
    assert asked == [3, 5, 1]
    monkeypatch.delattr(module.os, "sched_getaffinity")
    assert module.n_cores() == 64
    monkeypatch.setattr(module.os, "cpu_count", lambda: None)
    assert module.n_cores() == 1


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_threads_print_no_warning_of_numpys(experiment):
    """A loss that is not finite is said in one line"""
    module = EXPERIMENTS[experiment]
    with module.worker_threads(module.Config(threads=1)) as workers:
        assert set(workers.submit(np.geterr).result().values()) == {"ignore"}


def test_history_says_what_happened(reference):
    experiment, state, seen = reference
    first = EXPERIMENTS[experiment].initial_state(toy(experiment)[0])
    assert first["step"] == 0 and first["history"]["epochs"] == [] and first["params"].keys() == state["params"].keys()
    assert len(state["history"]["epochs"]) == 2 and state["step"] == 4
    for k, epoch in enumerate(state["history"]["epochs"]):
        (_, a), (_, b) = seen[2 * k:2 * k + 2]
        assert (epoch["epoch"], epoch["step"]) == (k + 1, 2 * k + 2)
        for name in a:
            assert epoch["train_" + name] == pytest.approx((17 * a[name] + 3 * b[name]) / 20)
    assert json.loads(json.dumps(state["history"], default=float)) == state["history"]


NUMPY_FIRST = """
import os, sys
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.pop(name, None)
import numpy
sys.path.insert(0, {tests!r})
from conftest import mc, toy_run
print(toy_run("multimnist_capsnet", conv3_channels=64)["params"]["dec3_w"].sum(dtype="f8").hex())
"""


def test_numpy_may_be_imported_before_the_experiment(run_script):
    """BLAS is told then to use one thread, and the bits are those of a run whose environment variables said so"""
    assert all(os.environ[name] == "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    here = toy_run("multimnist_capsnet", conv3_channels=64)["params"]["dec3_w"].sum(dtype="f8").hex()
    done = run_script("-c", NUMPY_FIRST.format(tests=str(Path(__file__).parent)))
    assert done.stdout.split() == [here], done.stderr


def test_training_with_another_blas_is_the_same_but_for_its_rounding(monkeypatch):
    """NumPy for macOS has Accelerate, which add_product does not call; no bit depends on the number of threads there"""
    expected = toy_run("multimnist_capsnet", conv3_channels=8)["params"]
    monkeypatch.setattr(mc, "openblas", lambda: None)
    monkeypatch.setattr(mc, "sgemm", lambda: None)
    found = toy_run("multimnist_capsnet", conv3_channels=8)["params"]
    assert_same(toy_run("multimnist_capsnet", conv3_channels=8, threads=2)["params"], found)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_weights_are_written_before_the_test_which_may_fail(experiment, monkeypatch, tmp_path):
    module, (config, data) = EXPERIMENTS[experiment], toy(experiment)

    def fail(*_):
        raise module.InputError("a damaged test file")
    monkeypatch.setattr(module, "result_of", fail)
    with pytest.raises(module.InputError, match="a damaged test file"):
        module.run(config, data, module.initial_state(config), tmp_path)
    assert module.load(tmp_path)[1]["step"] == 2 and not (tmp_path / "metrics.json").exists()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_the_run(experiment, monkeypatch, bad):
    module, calls = EXPERIMENTS[experiment], []
    good = module.loss_and_grads

    def goes_wrong(*given, **more):
        calls.append(1)
        terms, *rest = good(*given, **more)
        return {**terms, "loss": bad if len(calls) > 3 else terms["loss"]}, *rest       # 3 shards in 2 steps
    monkeypatch.setattr(module, "loss_and_grads", goes_wrong)
    saved = []                                                                          # nothing after that step
    with pytest.raises(module.InputError, match=f"loss {bad}, step 3.*diverged. Lower --lr"):
        toy_run(experiment, each_epoch=lambda state: saved.append(state["step"]), n_epochs=2)
    assert saved == [2]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_warm_up_that_is_longer_than_half_of_the_training_is_said(experiment, capsys):
    """A small training at a rate that is still low looked like a bad network"""
    module, (config, data) = EXPERIMENTS[experiment], toy(experiment)
    n_steps = config.n_epochs * module.steps_per_epoch(config, data)
    module.say_warmup(dataclasses.replace(config, quiet=False, warmup=n_steps), data)
    assert f"warms up in {n_steps} of {n_steps} steps. Lower --warmup" in capsys.readouterr().out
    module.say_warmup(dataclasses.replace(config, quiet=False, warmup=n_steps // 2), data)
    assert capsys.readouterr().out == ""
