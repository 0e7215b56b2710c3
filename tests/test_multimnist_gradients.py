"""Every backward of the paper against centered differences, at awkward sizes; buffers and dtypes; training: networks
learn, and nothing looks where it must not."""
import dataclasses
from functools import partial

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import CNN, NETWORKS, TINY, assert_same, batch_of, float64
from gradcheck import RELU, check_coordinates, check_directions, check_loss, check_op, float_dtypes, normal, poison
from test_multimnist_meaning import AS_IT_IS, SIGMOID, terms_reference

N, I, J, D, E = 2, 3, 4, 5, 6

def routed(n_iters, size=1.5, **variant):
    return partial(mc.routing_forward, n_iters=n_iters, **variant), mc.routing_backward, size * normal(N, J, I, D)


OPS = {
    "squash short": (mc.squash_forward, mc.squash_backward, 0.05 * normal(N, I, D)),
    "squash": (mc.squash_forward, mc.squash_backward, normal(N, I, D)),
    "squash long": (mc.squash_forward, mc.squash_backward, 20 * normal(N, I, D)),
    "votes": (mc.votes_forward, mc.votes_backward, normal(N, I, E), normal(I, E, J, D, seed=1)),
    "softmax": (mc.softmax_forward, mc.softmax_backward, 2 * normal(N, J, I)),
    "lengths": (mc.lengths_forward, mc.lengths_backward, normal(N, J, D)),
    "mask": (lambda v: mc.mask_forward(v, np.array([[3, 0], [1, 2]])), mc.mask_backward, normal(N, J, D)),
    "mask, a digit twice": (lambda v: mc.mask_forward(v, np.array([[3, 3, 0], [1, 2, 1]])), mc.mask_backward,
                            normal(N, J, D)),
    **{f"routing {n}": routed(n) for n in (1, 2, 3, 5)},
    "routing by sigmoids": routed(3, 0.5, normalizer=SIGMOID),
    "routing without squash": routed(3, 0.3, nonlinearity=AS_IT_IS)}


@pytest.mark.parametrize("op", OPS)
def test_smooth_op(op):
    check_op(*OPS[op])


def test_squash_of_a_zero_vector_has_a_finite_gradient():
    v, cache = mc.squash_forward(np.zeros((N, D)))
    assert not v.any() and np.abs(mc.squash_backward(np.ones((N, D)), cache)).max() < 1e-4


def test_losses():
    lengths = np.array([[0.95, 0.05, 0.4, 0.7], [0.2, 0.85, 0.15, 0.02]])               # both sides of both margins
    check_loss(mc.margin_loss, lengths, np.array([[1.0, 1, 0, 0], [0, 1, 0, 1]]), tol=RELU)
    check_loss(mc.reconstruction_loss, normal(3, 2, 3, 4), normal(3, 2, 3, 4, seed=1))
    check_loss(mc.sigmoid_cross_entropy, 3 * normal(2, 4), np.array([[1.0, 0, 1, 0], [0, 1, 0, 1]]))


@pytest.mark.parametrize("name, n_iters", [("paper", 1), *((name, 3) for name in NETWORKS)])
def test_gradient_of_the_whole_network(digits, name, n_iters):
    config = NETWORKS[name]
    if config.model == "capsnet":
        config = dataclasses.replace(config, routing_iters=n_iters, recon_weight=0.01)
    params, batch = float64(config, seed=4), batch_of(digits, config)
    if config.model == "capsnet" and name != "paper":
        params["W"] *= 10                                                              # so that the decoder hears of it
    terms, grads, _ = mc.loss_and_grads(params, batch, config)

    def loss(p):
        out, _ = mc.forward(p, batch["images"], config, batch["labels"], statistics={})
        return terms_reference(out, batch, config)["loss"]

    assert loss(params) == pytest.approx(terms["loss"], rel=1e-12)
    assert all(g.any() and g.shape == params[key].shape for key, g in grads.items())
    third, third_grads, _ = mc.loss_and_grads(params, batch, config, batch_fraction=1 / 3)
    assert all(third[key] == pytest.approx(terms[key] / (1 if key == "hits" else 3)) for key in terms)
    assert all(np.allclose(3 * third_grads[key], g, rtol=1e-9, atol=1e-15) for key, g in grads.items())
    check_directions(loss, params, grads, n=1, h=1e-7)
    check_coordinates(loss, params, grads, n=1, h=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_results_depend_on_no_buffers_and_leave_inputs_as_they_were(digits, name):
    """np.empty, buffers full of nan, an Arena at its first use and at its later uses: all the same bits."""
    config, arena = NETWORKS[name], mc.Arena()
    params, pairs = float64(config), next(mc.epoch_samples(digits, 0, config))
    for rows in (slice(0, 4), slice(4, 7), slice(0, 4)):
        batch = mc.to_batch(pairs, rows, np.float64)
        before = {key: array.copy() for key, array in (params | batch).items()}
        pure = mc.loss_and_grads(params, batch, config)
        for empty in (poison, arena.rewind()):
            terms, grads, _ = mc.loss_and_grads(params, batch, config, empty)
            assert terms == pure[0]
            assert_same(grads, pure[1])
        assert_same(before, params | batch)


@pytest.mark.parametrize("name", NETWORKS)
def test_dtype_follows_the_inputs_everywhere(digits, name):
    config = NETWORKS[name]
    for dtype in (np.float32, np.float64):
        params, batch = ({key: a.astype(dtype) if a.dtype.kind == "f" else a for key, a in arrays.items()}
                         for arrays in (float64(config), batch_of(digits, config, 3)))
        found = mc.forward(params, batch["images"], config, statistics={}), mc.loss_and_grads(params, batch, config)[1:]
        assert float_dtypes(found) == {np.dtype(dtype)}


@pytest.mark.parametrize("config, lr, loss", [(TINY, 3e-3, "margin"), (NETWORKS["normalized"], 1e-2, "margin"),
                                              (dataclasses.replace(CNN, conv1_channels=4), 1e-2, "cross_entropy")])
def test_overfits_8_examples(digits, monkeypatch, config, lr, loss):
    config = dataclasses.replace(config, n_epochs=60, n_train=8, batch_size=8, n_val=1, lr=lr, warmup=0)
    always = next(mc.epoch_samples(digits, 0, config))
    monkeypatch.setattr(mc, "epoch_samples", lambda *_: [always])
    _, history = mc.train(config, data=digits)
    first, last = history["epochs"][0], history["epochs"][-1]
    assert last["train_accuracy"] == 1 and last["train_" + loss] < 0.05 * first["train_" + loss]
    if loss == "margin":
        assert last["train_recon"] < 0.5 * first["train_recon"] and last["val_recon_mse"] > 0


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
    last = history["epochs"][-1]
    assert last["train_loss"] == pytest.approx(last["train_margin"] + 0.0005 * last["train_recon"])
    assert np.isfinite(last["train_loss"]) and (history["source"], history["steps"]) == ("synthetic", 4)
