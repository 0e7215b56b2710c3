"""Training the matrix capsules: it learns, is the loop it says it is, repeats itself to the bit, survives being killed,
stops and looks at its test views as told."""
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from conftest import ROOT, assert_same, without_seconds
from reference_smallnorb import PARTS, TINY, TRAINED, tiny


@pytest.fixture(scope="module")
def reference():
    """The toy run that others must equal: 2 epochs of 2 batches of 3 shards"""
    return sn.train(TINY)


# ---------------------------------------------------------------- the training loop

NO_DROPOUT = {model: dict(dropout=0.0) for model in TRAINED if model not in sn.VECTOR_MODELS}
OVERFIT = {model: dict(trunk_channels=8, head_types=8, width=8) for model in sn.HEADS} | {
    "caps": dict(conv1_channels=16, primary_types=2, conv_types=4, conv2_types=4, final_lambda=0.0625),
    "dynamic-shared": dict(trunk_channels=8, head_types=8), "cnn": dict(width=8)}
OVERFIT["em"] |= dict(final_lambda=0.0625)


@pytest.mark.parametrize("model", TRAINED)
def test_overfits_a_few_images(model):
    """Ten of them, in one shard: right in training, with the statistics of these ten, and, after as many steps as the
    running statistics need, with those too"""
    config = tiny(model, **OVERFIT[model] | dict(n_epochs=45, weight_decay=0.0, batch_size=10, n_train_views=2,
                                                 n_per_combo=1, lr=1e-2), **NO_DROPOUT.get(model, {}))
    data = sn.load_data(config)
    weights, history = sn.train(config, data=data)
    assert history["epochs"][-1]["train_accuracy"] == 1 and history["epochs"][-1]["train_loss"] < 0.75
    with sn.Runner(1) as runner:
        assert sn.evaluate(weights, data["train"], config, runner)["accuracy"] == 1


@pytest.mark.parametrize("changes", [
    {}, dict(loss="spread", average=0.4, lr_schedule="exponential"), dict(model="gap", max_shift=2),
    dict(model="self-routing"), dict(warmup=4, average=0.4), dict(warmup=100, lr_schedule="constant")], ids=str)
def test_train_is_decay_then_adam_with_the_scheduled_rate(changes):
    """The loop written out: 3 epochs of 2 batches of shards of 16, 16 and 8; weights shrink by lr x decay before Adam's
    step, gains and biases do not; the shards' statistics are folded into the running ones one after the other"""
    config = tiny(**dict(n_epochs=3, weight_decay=2.0) | changes)
    data, params = sn.load_data(config), sn.init_params(config)
    first = {name: p.copy() for name, p in params.items()}
    m, v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    mean, step = dict(first), 0
    state = {name[:-6] + end: np.full(p.shape, float(end == "_var")) for name, p in params.items()
             if name.endswith("_gamma") for end in ("_mean", "_var")}
    for epoch in range(3):
        samples, = sn.epoch_samples(data, epoch, config)
        for start in 0, 40:
            grads = dict.fromkeys(params, 0.0)
            for low, high in (0, 16), (16, 32), (32, 40):
                shard = sn.to_batch(samples, slice(start + low, start + high))
                _, of_shard, statistics = sn.loss_and_grads(params, shard, config)
                grads = {name: grads[name] + (high - low) / 40 * g for name, g in of_shard.items()}
                assert statistics.keys() == state.keys()
                for name, found in statistics.items():
                    state[name] = state[name] + (found - state[name]) * (1 - min(0.99, step / (step + 9)))
            lr = config.lr * {"cosine": (1 + np.cos(np.pi * step / 6)) / 2, "exponential": 0.96 ** (step / 2000),
                              "constant": 1}[config.lr_schedule]
            step += 1
            if step < config.warmup:
                lr *= step / config.warmup
            for name, g in grads.items():
                m[name] = 0.9 * m[name] + 0.1 * g
                v[name] = 0.999 * v[name] + 0.001 * g ** 2
                adam = m[name] / (1 - 0.9 ** step) / (np.sqrt(v[name] / (1 - 0.999 ** step)) + 1e-8)
                params[name] = params[name] * (1 - lr * 2 * (params[name].ndim > 1)) - lr * adam
                mean[name] = mean[name] + (params[name] - mean[name]) * (1 - min(config.average, step / (step + 9)))
            params = {name: p.astype(np.float32) for name, p in params.items()}
    trained, _ = sn.train(config, data=data)
    assert state and trained.keys() == params.keys() | state.keys()
    for name, expected in (mean if config.average else params).items():
        assert np.abs(trained[name] - expected).mean() < 2e-3 * np.abs(expected - first[name]).mean(), name
    for name, expected in state.items():
        np.testing.assert_allclose(trained[name], expected, rtol=1e-3, atol=1e-4, err_msg=name)


def test_history_says_what_happened(reference):
    params, history = reference
    assert history["source"] == "shapes" and history["steps"] == 4 and history["seconds"] > 0
    assert [(epoch["epoch"], epoch["step"]) for epoch in history["epochs"]] == [(1, 2), (2, 4)]
    with sn.Runner(1) as runner:
        found = sn.evaluate_viewpoint_extrapolation(params, sn.load_data(TINY), TINY, runner)
    for name in sn.EPOCH_KEEPS:
        assert history["epochs"][-1][name] == found[name]
    assert history["epochs"][-1].keys() == {"epoch", "step", "seconds", "train_loss", "train_accuracy", *sn.EPOCH_KEEPS}


def test_twenty_epochs_or_so_are_looked_at_and_the_last_one_always():
    _, history = sn.train(tiny("gap", n_epochs=41, n_per_combo=1, batch_size=20))
    assert [epoch["epoch"] for epoch in history["epochs"]] == [*range(2, 41, 2), 41]


def test_other_seed_other_bits_and_global_random_numbers_are_left_alone(reference):
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    params, _ = sn.train(TINY)
    assert np.random.random() == expected
    assert_same(params, reference[0])
    other, _ = sn.train(tiny(seed=2))
    assert not any(np.array_equal(other[name], params[name]) for name in params)


@pytest.mark.parametrize("model", TRAINED)
def test_same_seed_same_bits_for_any_number_of_threads(model):
    """once more, with two and with three, running statistics included"""
    config = tiny(model)
    expected = sn.train(config)
    assert expected[0].keys() == sn.init_params(config).keys() | sn.init_state(sn.init_params(config)).keys()
    for threads in 1, 2, 3:
        got = sn.train(dataclasses.replace(config, threads=threads))
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
    assert without_seconds(history) == without_seconds(reference[1]) and seen == [0, 2, 4]


def test_the_mean_of_the_weights():
    """average = running mean with decay min(average, step / (step + 9)), of the weights after each step; the running
    statistics are what they are without it"""
    config, kept = tiny(average=0.3), []
    params, _ = sn.train(config)
    sn.train(dataclasses.replace(config, average=0.0), lambda step, params, terms: kept.append(params), 1)
    mean, state = kept[0], sn.init_state(kept[0])
    assert len(kept) == 5 and state and all(np.array_equal(params[name], kept[-1][name]) for name in state)
    for step, weights in enumerate(kept[1:], 1):
        decay = min(0.3, step / (step + 9))
        mean = {name: decay * mean[name] + (1 - decay) * weights[name] for name in mean}
    for name in params.keys() - state.keys():
        np.testing.assert_allclose(params[name], mean[name], rtol=1e-4, atol=1e-6)


def test_weight_decay_shrinks_weights_only(monkeypatch):
    """With no gradient step, epochs at a constant rate leave w (1 - lr x decay)^steps, and gains and biases as they
    were"""
    monkeypatch.setattr(sn, "adam_step", lambda *args, **kwargs: None)
    config = tiny(lr_schedule="constant", lr=0.01, weight_decay=2.0)
    params, history = sn.train(config)
    for name, before in sn.init_params(config).items():
        factor = (1 - 0.02) ** history["steps"] if before.ndim > 1 else 1
        np.testing.assert_allclose(params[name], before * factor, rtol=1e-5)


LONG = dict(n_epochs=20, n_per_combo=1, batch_size=18, lr=1e-2, weight_decay=3.0, primary_types=2)
ROUGH = dict(n_epochs=10, n_per_combo=2, batch_size=20)


@pytest.mark.parametrize("changes", [
    LONG | dict(final_lambda=20.0), LONG | dict(routing_iters=4, weight_decay=0.0), LONG | dict(loss="spread"),
    ROUGH | dict(lr=0.3), ROUGH | dict(final_lambda=1e4, lr=0.03), ROUGH | dict(routing_iters=4, loss="spread"),
    *(ROUGH | dict(model=model, lr=0.3) for model in sn.HEADS)], ids=str)
def test_float32_stays_finite_over_many_rough_steps(changes):
    params, history = sn.train(tiny(lr_schedule="constant", **changes))
    assert history["steps"] >= 2 * changes["n_epochs"]
    assert all(np.isfinite(p).all() and p.dtype == np.float32 for p in params.values())
    assert all(math.isfinite(epoch["train_loss"]) for epoch in history["epochs"])


# ---------------------------------------------------------------- running statistics

NORMALISED = [model for model in TRAINED if model != "cnn"]


@pytest.mark.parametrize("model", NORMALISED)
def test_in_evaluation_an_image_is_seen_as_if_it_were_alone(model):
    """whatever else is in its batch, or in its shard: the running statistics are used, not those of the batch; in
    training it does depend on the others of its shard, by design"""
    config = tiny(model, **NO_DROPOUT.get(model, {}))
    data = sn.load_data(config)
    weights, _ = sn.train(config, data=data)
    weights = {name: a.astype(np.float64) for name, a in weights.items()}
    images = data["familiar"]["images"].astype(np.float64)
    together = sn.forward(weights, images, config)[0]["scores"]
    alone = np.concatenate([sn.forward(weights, image[None], config)[0]["scores"] for image in images])
    np.testing.assert_allclose(alone, together, rtol=1e-7, atol=1e-10)
    in_training = [sn.forward(weights, images[:n], config, statistics={})[0]["scores"][:2] for n in (2, 20)]
    assert np.abs(in_training[0] - in_training[1]).max() > 1e-4
    with sn.Runner(2) as runner:                                                        # shards of 16 and 4
        shards = runner.forward(weights, {"images": images, "labels": data["familiar"]["labels"]}, config)["scores"]
    np.testing.assert_allclose(shards, together, rtol=2e-3, atol=2e-4)                  # these are float32 images


@pytest.mark.parametrize("model", NORMALISED)
def test_running_statistics_of_the_images_at_hand_are_those_of_training(model):
    """With all that was shown as one shard, at fixed weights: then evaluation says what training said"""
    config = tiny(model)
    images = sn.load_data(config)["train"]["images"][::5].astype(np.float64)            # 16
    params = {name: p.astype(np.float64) for name, p in sn.init_params(config).items()}
    statistics, state = {}, sn.init_state(params)
    expected = sn.forward(params, images, config, statistics=statistics)[0]["scores"]
    sn.fold_statistics(state, [statistics], 0)
    for name, found in state.items():
        np.testing.assert_allclose(found, statistics[name], rtol=1e-12)                 # the first as they are
    found = sn.forward(params | state, images, config)[0]["scores"]
    np.testing.assert_allclose(found, expected, rtol=0.1, atol=0.1)                     # variances by n - 1, not by n


def test_a_step_leaves_its_weights_and_its_statistics_alone():
    """loss_and_grads is pure: the statistics are handed back, and the weights beside which the running ones stand are
    not changed"""
    config = tiny("gap")
    weights, _ = sn.train(config)
    before = {name: a.copy() for name, a in weights.items()}
    samples, = sn.epoch_samples(sn.load_data(config), 0, config)
    params = {name: a for name, a in weights.items() if not name.endswith(sn.STATE_ENDS)}
    batch = sn.to_batch(samples, slice(0, 16))
    images = batch["images"].copy()
    _, grads, statistics = sn.loss_and_grads(params, batch, config)
    assert grads.keys() == params.keys() and statistics.keys() == weights.keys() - params.keys()
    assert np.array_equal(images, batch["images"])
    assert_same(weights, before)


# ---------------------------------------------------------------- test views, and stopping by them

def test_the_test_images_do_not_matter_unless_training_stops_by_them(reference):
    data = sn.load_data(TINY)
    for name in PARTS[1:]:
        data[name] = data[name] | {"images": 0 * data[name]["images"], "labels": data[name]["labels"][::-1]}
    assert_same(sn.train(TINY, data=data)[0], reference[0])


@pytest.fixture
def looks(monkeypatch):
    """Every set of samples that evaluate is given -> list of their images"""
    seen, original = [], sn.evaluate

    def spy(params, samples, *args, **kwargs):
        seen.append(samples["images"])
        return original(params, samples, *args, **kwargs)

    monkeypatch.setattr(sn, "evaluate", spy)
    return seen


def rows_of(images, all_images):
    """Which rows of all_images the images are"""
    return [int(np.flatnonzero((all_images == image).all((1, 2, 3)))[0]) for image in images]


@pytest.mark.parametrize("n_eval, counts", [(7, (7, 7)), (15, (15, 10)), (0, (20, 10)), (1000, (20, 10))])
def test_a_fixed_subset_is_looked_at_while_training(reference, looks, n_eval, counts):
    """The same images at every epoch, drawn once without replacement, 0 or more than there are: all; no bit of the
    weights depends on it, and the final results use all images"""
    config, data = tiny(n_eval=n_eval), sn.load_data(TINY)
    record, params = sn.run_one("caps", config, data)
    assert_same(params, reference[0])
    epochs = looks[:4]
    for name, count, (first, second) in zip(PARTS[1:], counts, zip(epochs[:2], epochs[2:])):
        assert np.array_equal(first, second)
        rows = rows_of(first, data[name]["images"])
        assert len(rows) == count and rows == sorted(set(rows))
        assert (rows == list(range(count))) == (count == len(data[name]["labels"]))            # not the first ones
    final, sweep = looks[4:6], looks[6]
    assert all(np.array_equal(images, data[name]["images"]) for name, images in zip(PARTS[1:], final))
    assert len(looks) == 7 and len(sweep) == 36 * 5
    same = [record["history"][name][-1] == record[name] for name in ("familiar_loss", "held_out_loss")]
    assert same == [count == len(data[name]["labels"]) for name, count in zip(PARTS[1:], counts)]


def test_the_subset_is_drawn_by_the_seed():
    """Other rows of the two sets, and of another seed"""
    data = sn.load_data(tiny(n_test_views=4))
    drawn = []
    for seed in 1, 2:
        subsets = sn.fixed_subsets(data, tiny(n_eval=10, seed=seed))
        assert subsets["train"] is data["train"] and subsets["source"] == data["source"]
        for name in PARTS[1:]:
            drawn.append(rows_of(subsets[name]["images"], data[name]["images"]))
            for key, array in subsets[name].items():
                assert np.array_equal(array, data[name][key][drawn[-1]])
    assert len(set(map(tuple, drawn))) == 4


def test_stopping_at_familiar_accuracy_keeps_the_weights_so_far(tmp_path):
    """0.01 is reached at once: one epoch. A run that stopped stays so."""
    config = tiny(stop_familiar=0.01, lr_schedule="constant", checkpoint=str(tmp_path / "run.npz"))
    params, history = sn.train(config)
    assert history["steps"] == 2 and len(history["epochs"]) == 1
    assert_same(params, sn.train(tiny(n_epochs=1, lr_schedule="constant"))[0])
    again, same = sn.train(dataclasses.replace(config, resume=True))
    assert_same(again, params)
    assert same == history


def test_stopping_looks_at_the_familiar_views_of_each_epoch(monkeypatch):
    """Familiar accuracies 0.3, 0.5, 0.7 stop at the third look for 0.6, held-out ones of 0.9 do not"""
    n_looks = []

    def found(*args, **kwargs):
        n_looks.append(1)
        return {"familiar": 0.1 + 0.2 * len(n_looks), "held_out": 0.9, "drop": 0.0, "familiar_loss": 1.0,
                "held_out_loss": 1.0}

    monkeypatch.setattr(sn, "evaluate_viewpoint_extrapolation", found)
    _, history = sn.train(tiny("cnn", n_epochs=50, stop_familiar=0.6))
    assert [epoch["epoch"] for epoch in history["epochs"]] == [1, 2, 3] and history["steps"] == 6


def test_stops_when_a_network_has_learned_enough():
    _, history = sn.train(tiny("cnn", n_epochs=40, stop_familiar=0.6, dropout=0.0))
    familiar = [epoch["familiar"] for epoch in history["epochs"]]
    assert familiar[-1] >= 0.6 and len(familiar) < 40 and all(accuracy < 0.6 for accuracy in familiar[:-1])
    assert [epoch["epoch"] for epoch in history["epochs"]] == list(range(1, len(familiar) + 1))


@pytest.mark.parametrize("every", [0, 1, 2])
def test_a_run_that_stops_early_gives_its_last_snapshot(every):
    seen = []
    config = tiny(stop_familiar=0.01, n_epochs=9)
    params, _ = sn.train(config, lambda step, params, terms: seen.append((step, params)), every)
    assert [step for step, _ in seen] == ([0, 1, 2] if every == 1 else [0, 2])
    assert_same(seen[-1][1], params)


# ---------------------------------------------------------------- interrupted runs

@pytest.mark.parametrize("changes", [{}, dict(average=0.8, warmup=3), dict(model="self-routing", average=0.8)], ids=str)
@pytest.mark.parametrize("at", [1, 3])
def test_stopped_in_the_middle_of_an_epoch_and_resumed_is_never_stopped(tmp_path, changes, at):
    config = tiny(checkpoint=str(tmp_path / "run.npz"), resume=True, **changes)
    whole, whole_history = sn.train(tiny(**changes))

    def power_cut(step, params, terms):
        if step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sn.train(config, power_cut, 1)
    steps = []
    params, history = sn.train(dataclasses.replace(config, threads=2), lambda step, *_: steps.append(step), 1)
    assert steps == ([0, 1, 2, 3, 4] if at == 1 else [2, 3, 4])
    assert any(name.endswith("_norm_var") for name in params)                           # the running statistics too
    assert_same(params, whole)
    assert without_seconds(history) == without_seconds(whole_history)


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_killed_and_resumed(tmp_path, average):
    """SIGKILL as soon as the first epoch is saved; the rest ends with the bits of a run never killed"""
    path = tmp_path / "run.npz"
    config = tiny(n_epochs=20, average=average, n_per_combo=1, batch_size=18, checkpoint=str(path))
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import smallnorb_novel_viewpoint as sn; "
            f"sn.train(sn.Config(**{sn.settings_of(config)!r}))")
    process = subprocess.Popen([sys.executable, "-c", code, str(ROOT)])
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 0 < sn.load_checkpoint(path).step < 40
    params, history = sn.train(dataclasses.replace(config, resume=True))
    whole, whole_history = sn.train(dataclasses.replace(config, checkpoint=""))
    assert_same(params, whole)
    assert without_seconds(history) == without_seconds(whole_history)


def test_a_checkpoint_holds_the_weights_their_mean_and_the_running_statistics(tmp_path, reference):
    path = tmp_path / "run.npz"
    config = tiny(average=0.8, checkpoint=str(path))
    mean, _ = sn.train(config)
    found = sn.load_checkpoint(path)
    assert_same(found.params | found.state, reference[0])
    assert_same(found.average | found.state, mean)
    assert_same(found.weights, mean)
    assert found.state.keys() == {f"{layer}_norm_{what}" for layer in ("conv1", "primary") for what in ("mean", "var")}
    assert all(a.dtype == np.float32 for a in found.state.values())
    assert found.adam_m.keys() == found.adam_v.keys() == found.params.keys() and found.step == 4
    assert all(v.min() >= 0 for v in found.adam_v.values())
    expected = {f.name: getattr(config, f.name) for f in sn.options(config) if not f.metadata.get("runtime")}
    assert {name: getattr(found.config, name) for name in expected} == expected and found.source == "shapes"
    with pytest.raises(sn.InputError, match="another experiment"):
        sn.config_of({"recon_weight": 3} | sn.settings_of(found.config), path)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = str(tmp_path / "run.npz")
    sn.train(tiny(checkpoint=path, n_epochs=1))
    for changes, words in (({"seed": 2}, "seed 1, now 2"), ({"routing_iters": 3}, "routing_iters 2, now 3"),
                           ({"train_azimuths": "0:100"}, "train_azim"), ({"n_eval": 5}, "n_eval 0, now 5"),
                           ({"warmup": 9}, "warmup 0, now 9")):
        for resume in False, True:
            with pytest.raises(sn.InputError, match=words):
                sn.train(tiny(checkpoint=path, resume=resume, n_epochs=1, **changes))


def test_a_longer_spread_loss_run_is_another_run(tmp_path):
    """Its margin rises to the last epoch; any other run of a constant rate may go on"""
    config = tiny(loss="spread", lr_schedule="constant", checkpoint=str(tmp_path / "run.npz"), n_epochs=1)
    sn.train(config)
    with pytest.raises(sn.InputError, match="n_epochs 1, now 2"):
        sn.train(dataclasses.replace(config, n_epochs=2, resume=True))
    config = tiny(lr_schedule="constant", checkpoint=str(tmp_path / "xent.npz"), n_epochs=1)
    sn.train(config)
    longer, _ = sn.train(dataclasses.replace(config, n_epochs=2, resume=True))
    assert_same(longer, sn.train(tiny(lr_schedule="constant"))[0])


@pytest.mark.parametrize("spoil", ["all", "one", "its shape", "its name", "no number"])
def test_a_checkpoint_without_its_running_statistics_is_refused(tmp_path, spoil):
    """One that lacks them, or some, would be evaluated, and gone on from, with those of an untrained network"""
    path = tmp_path / "run.npz"
    config = tiny("gap", n_epochs=1, checkpoint=str(path))
    sn.train(config)
    with np.load(path) as file:
        arrays = dict(file)
    names = [name for name in arrays if name.startswith("state/")]
    assert len(names) == 10
    first = arrays[names[0]]
    left = {name: a for name, a in arrays.items() if name not in (names if spoil == "all" else names[:1])}
    left |= {"its shape": {names[0]: first[:-1]}, "its name": {"state/other_mean": first},
             "no number": {names[0]: first * np.nan}}.get(spoil, {})
    np.savez(path, **left)
    before = path.read_bytes()
    for load in (sn.load_checkpoint, sn.load_network, lambda _: sn.train(dataclasses.replace(config, resume=True))):
        with pytest.raises(sn.InputError, match="run.npz: (not a whole file|holds weights that are no finite numbers)"):
            load(path)
    assert path.read_bytes() == before
