"""Training the networks: they learn, the numbers stay the same, and nothing looks where it must not."""
import dataclasses

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import CNN, DROPPED, NETWORKS, TINY, assert_same, batch_of, float64, without_seconds


def train(digits, **changes):
    return mc.train(dataclasses.replace(TINY, **changes), data=digits)


@pytest.fixture(scope="module")
def reference(digits):
    """The toy run that others must equal: 2 epochs of 2 batches of 3 shards"""
    return train(digits)


# -------------------------------------------------------------- they learn

def test_overfits_8_examples(digits):
    params, history = train(digits, n_epochs=150, n_train=8, batch_size=8, n_val=1, fixed_pool=True, lr=1e-2,
                            conv1_channels=6, primary_types=2, primary_dim=6, digit_dim=8, decoder_hidden1=32,
                            decoder_hidden2=64)
    first, last = history["epochs"][0], history["epochs"][-1]
    assert last["train_accuracy"] == 1 and last["train_margin"] < 0.05 * first["train_margin"]
    assert last["train_recon"] < 0.5 * first["train_recon"]


def test_the_cnn_overfits_8_examples(digits):
    config = dataclasses.replace(
        CNN, n_epochs=120, n_train=8, batch_size=8, n_val=1, fixed_pool=True, lr=1e-2, cnn_channels=4, cnn_hidden=32)
    _, history = mc.train(config, data=digits)
    first, last = history["epochs"][0], history["epochs"][-1]
    assert last["train_accuracy"] == 1 and last["train_cross_entropy"] < 0.05 * first["train_cross_entropy"]
    assert (
        last["train_loss"] == last["train_cross_entropy"] and "train_recon" not in last and "val_recon_mse" not in last)


def test_pinned_losses(reference):
    """Numbers of this very run, written down: they move when the arithmetic does. Update them only if it was meant
    to."""
    _, history = reference
    names = ("train_loss", "train_margin", "train_recon", "val_loss")
    losses = [epoch[name] for epoch in history["epochs"] for name in names]
    assert losses == pytest.approx(PINNED, rel=1e-3)


PINNED = [1.88360, 1.60413, 558.951, 1.83688, 1.82338, 1.54394, 558.893, 1.78855]


def test_history_says_what_happened(reference, digits):
    params, history = reference
    assert history["source"] == "synthetic" and history["steps"] == 4 and history["seconds"] > 0
    assert [(epoch["epoch"], epoch["step"]) for epoch in history["epochs"]] == [(1, 2), (2, 4)]
    last = history["epochs"][-1]
    assert last["train_loss"] == pytest.approx(last["train_margin"] + 0.0005 * last["train_recon"])
    with mc.Runner(1) as runner:
        val = mc.evaluate(params, mc.stream_pairs(digits, "val", TINY.n_val, TINY, "evaluation", 0), TINY, runner)
    assert {name: last["val_" + name] for name in mc.EPOCH_KEEPS if "val_" + name in last} == \
        {name: val[name] for name in ("loss", "margin", "recon", "recon_mse", "set_accuracy", "any_accuracy")}
    assert list(last) == ["epoch", "step", "seconds",
                          *(f"train_{name}" for name in ("loss", "margin", "recon", "accuracy")),
                          *(f"val_{name}" for name in mc.EPOCH_KEEPS if name != "cross_entropy")]


class OnlyCounted:
    """Images nobody may look at: all that can be asked is how many there are."""

    def __len__(self):
        return 60

    def __getattr__(self, name):
        raise AssertionError(f"train looked at the test images ({name})")

    def __getitem__(self, key):
        raise AssertionError("train looked at the test images")

    __array__ = __iter__ = __getitem__


def test_train_never_looks_at_the_test_images(reference, digits):
    params, _ = mc.train(TINY, data=digits | {"test": (OnlyCounted(), OnlyCounted())})
    assert_same(params, reference[0])


@pytest.mark.parametrize("name", NETWORKS)
def test_same_bits_for_any_threads_and_after_resuming(digits, tmp_path, name):
    config, path = NETWORKS[name], str(tmp_path / "run.npz")
    params, history = mc.train(config, data=digits)
    again, _ = mc.train(dataclasses.replace(config, threads=2), data=digits)
    assert_same(params, again)

    def power_cut(step, *_):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mc.train(dataclasses.replace(config, checkpoint=path), power_cut, 1, digits)
    resumed, later = mc.train(dataclasses.replace(config, checkpoint=path, resume=True), data=digits)
    assert_same(params, resumed)
    assert without_seconds(later) == without_seconds(history)


# -------------------------------------------------------------- dropout

def test_dropout_drops_its_share_keeps_the_mean_and_is_drawn_anew_in_every_epoch(digits):
    config = dataclasses.replace(DROPPED, n_train=2000, cnn_hidden=20)
    first, second = (next(mc.epoch_samples(digits, epoch, config))["dropout_mask"] for epoch in (0, 1))
    assert first.shape == (2000, 20) and first.dtype == np.float32
    assert set(np.unique(first)) == {0, np.float32(1 / 0.6)}
    assert (first == 0).mean() == pytest.approx(0.4, abs=0.01) and first.mean() == pytest.approx(1, abs=0.02)
    assert not np.array_equal(first, second)
    pooled = dataclasses.replace(config, fixed_pool=True)
    a, b = (next(mc.epoch_samples(digits, epoch, pooled)) for epoch in (0, 1))
    assert np.array_equal(a["labels"], b["labels"]) and not np.array_equal(a["dropout_mask"], b["dropout_mask"])


def test_dropout_changes_no_pair_and_evaluation_drops_nothing(digits):
    plain, dropped = (next(mc.epoch_samples(digits, 0, config)) for config in (CNN, DROPPED))
    assert_same(plain, {name: a for name, a in dropped.items() if name != "dropout_mask"})
    params, val = mc.init_params(CNN), mc.draw_pairs(digits, "val", 16, CNN, "evaluation", 0)
    with mc.Runner(1) as runner:
        plain, dropped = (mc.evaluate(params, mc.in_chunks(val), config, runner) for config in (CNN, DROPPED))
    assert plain == dropped


def test_a_dropped_unit_is_silent_and_gets_no_gradient(digits):
    params, batch = float64(CNN), batch_of(digits, CNN)
    keep = np.ones((2, 6))
    keep[:, 2] = 0
    out, cache = mc.forward(params, batch["images"], CNN, dropout_mask=keep)
    silent = params | {"fc2_w": np.where(np.arange(6)[:, None] == 2, 0, params["fc2_w"])}
    np.testing.assert_allclose(out["scores"], mc.forward(silent, batch["images"], CNN)[0]["scores"], rtol=1e-12)
    grads = mc.backward(np.ones((2, 10)), None, cache, CNN)
    assert not grads["fc1_w"][:, 2].any() and not grads["fc2_w"][2].any()
