"""Training the networks: they learn, and nothing looks where it must not."""
import dataclasses

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import CNN, NETWORKS, TINY, assert_same

@pytest.mark.parametrize("config, lr, loss", [(TINY, 3e-3, "margin"), (NETWORKS["normalised"], 1e-2, "margin"),
                                              (dataclasses.replace(CNN, conv1_channels=4), 1e-2, "cross_entropy")])
def test_overfits_8_examples(digits, monkeypatch, config, lr, loss):
    config = dataclasses.replace(config, n_epochs=80, n_train=8, batch_size=8, n_val=1, lr=lr, warmup=0)
    always = next(mc.epoch_samples(digits, 0, config))
    monkeypatch.setattr(mc, "epoch_samples", lambda *_: [always])
    _, history = mc.train(config, data=digits)
    first, last = history["epochs"][0], history["epochs"][-1]
    assert last["train_accuracy"] == 1 and last["train_" + loss] < 0.05 * first["train_" + loss]
    if loss == "margin":
        assert last["train_recon"] < 0.5 * first["train_recon"] and last["val_recon_mse"] > 0
    else:
        assert last["train_loss"] == last["train_cross_entropy"] and not any("recon" in name for name in last)


class OnlyCounted:
    """Images nobody may look at: all that can be asked is how many there are."""

    def __len__(self):
        return 60

    def __getattr__(self, name):
        raise AssertionError(f"train looked at the test images ({name})")

    def __getitem__(self, key):
        raise AssertionError("train looked at the test images")

    __array__ = __iter__ = __getitem__


def test_train_never_looks_at_the_test_images(digits):
    hidden = digits | {"test": (OnlyCounted(), OnlyCounted())}
    (params, history), (expected, _) = (mc.train(TINY, data=data) for data in (hidden, digits))
    assert_same(params, expected)
    with mc.Runner(1) as runner:                                                        # history's is validation's
        val = mc.evaluate(params, mc.stream_pairs(digits, "val", TINY.n_val, TINY, "evaluation", 0), TINY, runner)
    last = history["epochs"][-1]
    assert {name: last["val_" + name] for name in mc.EPOCH_KEEPS if "val_" + name in last} == {
        name: val[name] for name in ("loss", "margin", "recon", "recon_mse", "set_accuracy", "any_accuracy")}
    assert last["train_loss"] == pytest.approx(last["train_margin"] + 0.0005 * last["train_recon"])
    assert np.isfinite(last["train_loss"]) and (history["source"], history["steps"]) == ("synthetic", 4)
