"""Every backward of the paper against centred differences, at awkward sizes; purity of the buffers; dtypes."""
import dataclasses
from types import SimpleNamespace

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import NETWORKS, TINY, assert_same, batch_of, float64
from gradcheck import RELU, check_coordinates, check_directions, check_loss, check_op, float_dtypes, normal, poison

N, I, J, D, E = 2, 3, 4, 5, 6


def routed(n_iters, **changes):
    """The settings of a routing: where tests change any"""
    return dataclasses.replace(TINY, routing_iters=n_iters, **changes)


# -------------------------------------------------------------- capsules

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
    **{f"routing {n}": (lambda u_hat, bias, n=n: mc.routing_forward(u_hat, routed(n), bias), mc.routing_backward,
                        1.5 * normal(N, J, I, D), normal(J, D, seed=1)) for n in (1, 2, 3, 5)}}


@pytest.mark.parametrize("op", OPS)
def test_smooth_op(op):
    check_op(*OPS[op])


def test_each_backward_keeps_float32():
    for forward, backward, *args in OPS.values():
        out, cache = forward(*[a.astype(np.float32) for a in args])
        assert float_dtypes((out, cache, backward(out, cache))) == {np.dtype(np.float32)}


def test_squash_of_a_zero_vector_has_a_finite_gradient():
    v, cache = mc.squash_forward(np.zeros((N, D)))
    assert not v.any() and np.abs(mc.squash_backward(np.ones((N, D)), cache)).max() < 1e-4


@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_detached_routing_is_the_gradient_with_the_last_coupling_frozen(n_iters):
    u_hat = 1.5 * normal(N, J, I, D)
    v, cache = mc.routing_forward(u_hat, routed(n_iters, routing_grad="detached"))
    c = np.broadcast_to(cache.steps[-1].c, (N, J, I))

    def frozen(u_hat):
        return mc.squash_forward(np.einsum("nji,njid->njd", c, u_hat))[0], cache

    np.testing.assert_allclose(frozen(u_hat)[0], v, rtol=1e-12)
    check_op(frozen, lambda dv, cache: mc.routing_backward(dv, cache)[0], u_hat)
    _, full = mc.routing_forward(u_hat, routed(n_iters))
    same = np.allclose(mc.routing_backward(v, full)[0], mc.routing_backward(v, cache)[0])
    assert same == (n_iters == 1)


def test_routing_with_buffers_and_votes_in_any_order_of_memory():
    """What routing gets is a view of votes_forward's memory, and in a step its buffers are an Arena's"""
    u_hat, bias = 1.5 * normal(N, J, I, D), normal(J, D, seed=1)
    dv = normal(N, J, D, seed=2)
    v, cache = mc.routing_forward(u_hat, TINY, bias)
    expected = (v, *mc.routing_backward(dv, cache))
    view = np.ascontiguousarray(u_hat.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    arena = mc.Arena()
    for given, empty in ((view, np.empty), (u_hat, poison), (u_hat.copy(), arena), (view.copy("K"), arena.rewind())):
        v, cache = mc.routing_forward(given, TINY, bias, empty)
        for got, wanted in zip((v, *mc.routing_backward(dv, cache)), expected):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)


# -------------------------------------------------------------- losses and decoder

def test_margin_loss():
    lengths = np.array([[0.95, 0.05, 0.4, 0.7], [0.2, 0.85, 0.15, 0.02]])               # both sides of both margins
    check_loss(mc.margin_loss, lengths, np.array([[1.0, 1, 0, 0], [0, 1, 0, 1]]), tol=RELU)


def test_reconstruction_loss():
    check_loss(mc.reconstruction_loss, normal(N, 2, 3, 4), normal(N, 2, 3, 4, seed=1))


def test_sigmoid_cross_entropy():
    check_loss(mc.sigmoid_cross_entropy, 3 * normal(2, 4), np.array([[1.0, 0, 1, 0], [0, 1, 0, 1]]))


def test_decoder(params64):
    names = [name for name in params64 if name.startswith("dec")]

    def loss(p):
        return np.vdot(dpixels, mc.decoder_forward(p, p["x"])[0])

    params = {"x": normal(3, params64["dec1_w"].shape[0])} | {name: params64[name] for name in names}
    pixels, caches = mc.decoder_forward(params, params["x"])
    dpixels = normal(*pixels.shape, seed=1)
    grads = {}
    grads["x"] = mc.decoder_backward(dpixels, caches, grads)
    assert np.array_equal(dpixels, normal(*pixels.shape, seed=1))
    check_directions(loss, params, grads)


# -------------------------------------------------------------- whole networks

@pytest.mark.parametrize(
    "name, grad, n_iters",
    [("paper", "full", 1), ("paper", "full", 2), ("paper", "full", 3), ("paper", "detached", 2),
     ("paper", "detached", 3), ("deep", "full", 3), ("deep", "detached", 2), ("biased", "full", 3),
     ("biased", "full", 1), ("biased", "detached", 2), ("cnn", "full", 3), ("cnn with dropout", "full", 3),
     ("normalised", "full", 2), ("normalised", "detached", 2), ("normalised cnn", "full", 3)])
def test_gradient_of_the_whole_network(digits, name, grad, n_iters, monkeypatch):
    config = NETWORKS[name]
    if config.model == "caps":
        config = dataclasses.replace(config, routing_grad=grad, routing_iters=n_iters, recon_weight=0.01)
    params, batch = float64(config, seed=4), batch_of(digits, config)
    if name in ("deep", "biased", "normalised"):
        params["W"] *= 10                                                              # so that the decoder hears of it
    terms, grads, _ = mc.loss_and_grads(params, batch, config)
    if grad == "detached":
        c = mc.forward(params, batch["images"], config, statistics={})[0]["c"][-1]

    def loss(p):
        def frozen(u_hat, *_, **__):                                                    # routing with the last c
            s = np.einsum("nji,njid->njd", c, u_hat) + p.get("digit_b", 0)
            return mc.squash_forward(s)[0], SimpleNamespace(steps=[])
        if grad == "detached":
            monkeypatch.setattr(mc, "routing_forward", frozen)
        out, _ = mc.forward(
            p, batch["images"], config, batch["labels"], dropout_mask=batch.get("dropout_mask"), statistics={})
        if config.model == "cnn":
            return mc.sigmoid_cross_entropy(out["scores"], mc.k_hot(batch["labels"], np.float64))[0]
        margin, _ = mc.margin_loss(out["lengths"], mc.k_hot(batch["labels"], np.float64))
        return margin + config.recon_weight * mc.reconstruction_loss(out["recon"], batch["sources"])[0]

    assert loss(params) == pytest.approx(terms["loss"], rel=1e-12)
    assert all(g.any() and g.shape == params[key].shape for key, g in grads.items())
    check_directions(loss, params, grads, n=2)
    check_coordinates(loss, params, grads, n=2)


# -------------------------------------------------------------- purity and dtypes

@pytest.mark.parametrize("name", NETWORKS)
def test_results_do_not_depend_on_the_buffers(digits, name):
    """np.empty, buffers full of nan, an Arena at its first use and at its later uses: all the same bits."""
    config, arena = NETWORKS[name], mc.Arena()
    params, pairs = float64(config), next(mc.epoch_samples(digits, 0, config))
    for rows in (slice(0, 4), slice(4, 7), slice(0, 4)):
        batch = mc.to_batch(pairs, rows, np.float64)
        pure = mc.loss_and_grads(params, batch, config)
        for empty in (poison, arena.rewind()):
            terms, grads, _ = mc.loss_and_grads(params, batch, config, empty)
            assert terms == pure[0]
            assert_same(grads, pure[1])


@pytest.mark.parametrize("name", NETWORKS)
def test_inputs_are_left_as_they_were(digits, name):
    params, batch = float64(NETWORKS[name]), batch_of(digits, NETWORKS[name])
    before = {key: array.copy() for key, array in (params | batch).items()}
    mc.loss_and_grads(params, batch, NETWORKS[name], mc.Arena())
    assert_same(before, params | batch)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name, grad", [("paper", "full"), ("paper", "detached"), ("deep", "full"), ("biased", "full"),
                                        ("cnn", "full"), ("cnn with dropout", "full")])
def test_dtype_follows_the_inputs_everywhere(digits, dtype, name, grad):
    config = NETWORKS[name]
    if grad == "detached":
        config = dataclasses.replace(config, routing_grad=grad)
    params = {key: p.astype(dtype) for key, p in float64(config).items()}
    batch = batch_of(digits, config, 3, dtype)
    whole = mc.forward(params, batch["images"], config, dropout_mask=batch.get("dropout_mask"))
    assert float_dtypes(whole) == {np.dtype(dtype)}
    assert float_dtypes(mc.loss_and_grads(params, batch, config)[1]) == {np.dtype(dtype)}


@pytest.mark.parametrize("name", NETWORKS)
def test_initial_parameters_are_float32_and_training_keeps_them_so(digits, name):
    config = dataclasses.replace(NETWORKS[name], n_epochs=1)
    params, _ = mc.train(config, data=digits)
    assert float_dtypes([mc.init_params(config), params]) == {np.dtype(np.float32)}
