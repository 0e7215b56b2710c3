"""Every backward against centred differences, at awkward sizes; purity of the buffers; dtypes."""
import dataclasses

import multimnist_capsnet as mc
import numpy as np
import pytest
from conftest import TINY
from gradcheck import RELU, check_coordinates, check_directions, check_loss, check_op

N, I, J, D, E = 2, 3, 4, 5, 6
CONVS = [(1, (2, 5, 6, 3), (3, 2)), (1, (2, 6, 5, 1), (1, 3)), (1, (1, 4, 4, 2), (4, 4)), (2, (2, 7, 6, 2), (3, 2)),
         (2, (2, 7, 9, 1), (3, 3)), (2, (1, 8, 5, 2), (2, 3)), (2, (2, 5, 5, 2), (1, 1)), (3, (2, 9, 8, 2), (2, 4))]


def normal(*shape, seed=0, off=0.0):
    """Standard normal numbers, pushed away from zero by `off`"""
    x = np.random.default_rng(seed).standard_normal(shape)
    return x + off * np.sign(x)


def poison(shape, dtype):
    """An np.empty that shows whoever reads memory it has not written"""
    return np.full(shape, np.nan, dtype)


@pytest.mark.parametrize("stride, shape, kernel", CONVS)
def test_conv2d(stride, shape, kernel):
    check_op(lambda x, w, b: mc.conv2d_forward(x, w, b, stride, poison), mc.conv2d_backward,
             normal(*shape), normal(*kernel, shape[3], 3, seed=1), normal(3, seed=2))


def test_conv2d_without_dx_gives_the_same_other_gradients():
    y, cache = mc.conv2d_forward(normal(2, 7, 6, 2), normal(3, 2, 2, 3), normal(3), 2)
    full, partial = mc.conv2d_backward(y, cache), mc.conv2d_backward(y, cache, need_dx=False)
    assert partial[0] is None and all(np.array_equal(a, b) for a, b in zip(full[1:], partial[1:]))


@pytest.mark.parametrize("stride, shape, kernel", CONVS)
def test_col2im_is_the_adjoint_of_im2col(stride, shape, kernel):
    x = normal(*shape)
    cols = mc.im2col(x, kernel[1], stride, lambda shape, dtype: np.zeros(shape, dtype))
    other = normal(*cols.shape, seed=1)
    assert np.vdot(cols, other) == pytest.approx(np.vdot(x, mc.col2im(other, shape, kernel[1], stride)), rel=1e-12)


OPS = {
    "linear": (mc.linear_forward, mc.linear_backward, normal(N, I), normal(I, J, seed=1), normal(J, seed=2)),
    "sigmoid": (mc.sigmoid_forward, mc.sigmoid_backward, 2 * normal(N, D)),
    "squash short": (mc.squash_forward, mc.squash_backward, 0.05 * normal(N, I, D)),
    "squash": (mc.squash_forward, mc.squash_backward, normal(N, I, D)),
    "squash long": (mc.squash_forward, mc.squash_backward, 20 * normal(N, I, D)),
    "votes": (mc.votes_forward, mc.votes_backward, normal(N, I, E), normal(I, E, J, D, seed=1)),
    "lengths": (mc.lengths_forward, mc.lengths_backward, normal(N, J, D)),
    "mask": (lambda v: mc.mask_forward(v, np.array([[3, 0], [1, 2]])), mc.mask_backward, normal(N, J, D)),
    "mask, a digit twice": (lambda v: mc.mask_forward(v, np.array([[3, 3, 0], [1, 2, 1]])), mc.mask_backward, normal(N, J, D)),
    **{f"routing {n}": (lambda u_hat, bias, n=n: mc.routing_forward(u_hat, n, bias=bias), mc.routing_backward,
                        1.5 * normal(N, I, J, D), normal(J, D, seed=1)) for n in (1, 2, 3, 5)}}


@pytest.mark.parametrize("op", OPS)
def test_smooth_op(op):
    check_op(*OPS[op])


def test_relu():
    check_op(mc.relu_forward, mc.relu_backward, normal(N, D, off=0.1), tol=RELU)


def test_squash_of_a_zero_vector_has_a_finite_gradient():
    v, cache = mc.squash_forward(np.zeros((N, D)))
    assert not v.any() and np.abs(mc.squash_backward(np.ones((N, D)), cache)).max() < 1e-4


@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_detached_routing_is_the_gradient_with_the_last_coupling_frozen(n_iters):
    u_hat = 1.5 * normal(N, I, J, D)
    v, cache = mc.routing_forward(u_hat, n_iters)
    c = np.broadcast_to(cache[1][-1][0], (N, J, I))

    def frozen(u_hat):
        return mc.squash_forward(np.einsum("nji,nijd->njd", c, u_hat))[0], cache

    np.testing.assert_allclose(frozen(u_hat)[0], v, rtol=1e-12)
    check_op(frozen, lambda dv, cache: mc.routing_backward(dv, cache, detached=True)[0], u_hat)
    same = np.allclose(mc.routing_backward(v, cache)[0], mc.routing_backward(v, cache, detached=True)[0])
    assert same == (n_iters == 1)


def test_margin_loss():
    lengths = np.array([[0.95, 0.05, 0.4, 0.7], [0.2, 0.85, 0.15, 0.02]])                      # both sides of both margins
    check_loss(mc.margin_loss, lengths, np.array([[1.0, 1, 0, 0], [0, 1, 0, 1]]), tol=RELU)


def test_reconstruction_loss():
    check_loss(mc.reconstruction_loss, normal(N, 2, 3, 4), normal(N, 2, 3, 4, seed=1))


def test_decoder(params64):
    names = [name for name in params64 if name.startswith("dec")]

    def loss(p):
        return np.vdot(dpixels, mc.decoder_forward(p, p["x"])[0])

    params = {"x": normal(3, params64["dec1_w"].shape[0])} | {name: params64[name] for name in names}
    pixels, cache = mc.decoder_forward(params, params["x"])
    dpixels = normal(*pixels.shape, seed=1)
    grads = {}
    grads["x"] = mc.decoder_backward(dpixels, cache, grads)
    assert np.array_equal(dpixels, normal(*pixels.shape, seed=1))
    check_directions(loss, params, grads)


@pytest.mark.parametrize("grad, n_iters", [("full", 1), ("full", 2), ("full", 3), ("detached", 2), ("detached", 3)])
def test_whole_model(params64, batch64, grad, n_iters, monkeypatch):
    config = dataclasses.replace(TINY, routing_grad=grad, routing_iters=n_iters, recon_weight=0.01)
    terms, grads = mc.loss_and_grads(params64, batch64, config)
    if grad == "detached":
        c = mc.forward(params64, batch64["composites"], config)[0]["c"][-1]
        monkeypatch.setattr(mc, "routing_forward", lambda u_hat, n_iters, empty=np.empty, bias=None: (
            mc.squash_forward(np.einsum("nji,nijd->njd", c, u_hat))[0], (u_hat, [], empty)))

    def loss(p):
        out, _ = mc.forward(p, batch64["composites"], config, batch64["labels"])
        margin, _ = mc.margin_loss(out["lengths"], mc.k_hot(batch64["labels"], np.float64))
        return margin + config.recon_weight * mc.reconstruction_loss(out["recon"], batch64["sources"])[0]

    assert loss(params64) == pytest.approx(terms["loss"], rel=1e-12)
    assert all(g.any() and g.shape == params64[name].shape for name, g in grads.items())
    check_directions(loss, params64, grads, n=2)
    check_coordinates(loss, params64, grads, n=2)


def test_results_do_not_depend_on_the_buffers(params64, digits):
    """np.empty, buffers full of nan, an Arena at its first use and at its later uses: all the same bits."""
    pairs = mc.draw_pairs(digits, "train", 7, TINY, "data")
    batches = [mc.to_batch(pairs, rows, np.float64) for rows in (slice(0, 4), slice(4, 7), slice(0, 4))]
    arena = mc.Arena()
    for batch in batches:
        pure = mc.loss_and_grads(params64, batch, TINY)
        for empty in (poison, arena.rewind()):
            terms, grads = mc.loss_and_grads(params64, batch, TINY, empty)
            assert terms == pure[0] and all(np.array_equal(grads[name], pure[1][name]) for name in params64)


def test_arena_returns_its_arrays_again_after_rewind_only():
    arena = mc.Arena()
    a, b = arena((2, 3), np.float32), arena((2, 3), np.float32)
    assert not np.shares_memory(a, b) and a.dtype == np.float32
    arena.rewind()
    assert arena([2, 3], np.float32) is a and arena((2, 3), np.float64).dtype == np.float64


def test_inputs_are_left_as_they_were(params64, batch64):
    before = {name: p.copy() for name, p in (params64 | batch64).items()}
    mc.loss_and_grads(params64, batch64, TINY)
    assert all(np.array_equal(before[name], p) for name, p in (params64 | batch64).items())


def float_dtypes(tree):
    """dtypes of all float arrays in nested tuples, lists and dicts"""
    if isinstance(tree, (tuple, list, dict)):
        return set().union(*map(float_dtypes, tree.values() if isinstance(tree, dict) else tree))
    return {tree.dtype} if isinstance(tree, np.ndarray) and tree.dtype.kind == "f" else set()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("grad", ["full", "detached"])
def test_dtype_follows_the_inputs_everywhere(params64, digits, dtype, grad):
    config = dataclasses.replace(TINY, routing_grad=grad)
    params = {name: p.astype(dtype) for name, p in params64.items()}
    batch = mc.to_batch(mc.draw_pairs(digits, "train", 3, config, "data"), slice(None), dtype)
    assert float_dtypes(mc.forward(params, batch["composites"], config)) == {np.dtype(dtype)}
    assert float_dtypes(mc.loss_and_grads(params, batch, config)[1]) == {np.dtype(dtype)}


def test_each_backward_keeps_float32():
    for forward, backward, *args in OPS.values():
        out, cache = forward(*[a.astype(np.float32) for a in args])
        assert float_dtypes((out, backward(out, cache))) == {np.dtype(np.float32)}


def test_initial_parameters_are_float32_and_training_keeps_them_so(digits):
    params, _ = mc.train(dataclasses.replace(TINY, n_epochs=1), digits=digits)
    assert float_dtypes([mc.init_params(TINY), params]) == {np.dtype(np.float32)}


def test_im2col_takes_any_strides():
    """A window must be one run in memory; views whose strides say otherwise, also on axes of length 1, are copied first."""
    rng = np.random.default_rng(0)
    for x in (rng.random((2, 8, 6))[..., None], rng.random((2, 8, 1, 6))[..., ::2], rng.random((6, 8, 2, 1)).transpose(2, 1, 0, 3),
              rng.random((2, 8, 6, 4))[:, ::2, ::2, 1:2]):
        np.testing.assert_array_equal(mc.im2col(x, 1, 2), mc.im2col(np.array(x.tolist()), 1, 2))
