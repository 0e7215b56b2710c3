"""The primitives of the core, and the layers that string them together: by hand, against loops, and their gradients."""
import itertools

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import EXPERIMENTS, assert_same
from gradcheck import RELU, check_directions, check_op, float_dtypes, normal, poison

CONVS = [(1, (2, 5, 6, 3), (3, 2)), (1, (2, 6, 5, 1), (1, 3)), (1, (1, 4, 4, 2), (4, 4)), (2, (2, 7, 6, 2), (3, 2)),
         (2, (2, 7, 9, 1), (3, 3)), (2, (1, 8, 5, 2), (2, 3)), (2, (2, 5, 5, 2), (1, 1)), (3, (2, 9, 8, 2), (2, 4))]


def conv_reference(x, w, b, stride):
    """Valid convolution, pixel by pixel: y[oy, ox] = b + sum of patch * w"""
    (N, H, W, _), (Kh, Kw, _, F) = x.shape, w.shape
    y = np.zeros((N, (H - Kh) // stride + 1, (W - Kw) // stride + 1, F))
    for n, oy, ox, f in np.ndindex(y.shape):
        y[n, oy, ox, f] = b[f]
        for ky, kx in np.ndindex(Kh, Kw):
            y[n, oy, ox, f] += x[n, oy * stride + ky, ox * stride + kx] @ w[ky, kx, :, f]
    return y


# -------------------------------------------------------------- meaning

@pytest.mark.parametrize("stride, shape, kernel", CONVS)
def test_im2col_holds_the_windows_it_says_and_col2im_is_its_adjoint(rng, stride, shape, kernel):
    x, width = rng.standard_normal(shape), kernel[1]
    N, H, W, C = shape
    cols, Wo = mc.im2col(x, width, stride, lambda shape, dtype: np.zeros(shape, dtype)), (W - width) // stride + 1
    assert cols.shape == (stride, -(-H // stride), N, Wo, width * C)
    for y, n, ox in np.ndindex(H, N, Wo):
        window = x[n, y, stride * ox:stride * ox + width].reshape(-1)
        np.testing.assert_array_equal(cols[y % stride, y // stride, n, ox], window)
    other = normal(*cols.shape, seed=1)
    back = mc.col2im(other, shape, width, stride, poison)
    assert np.vdot(cols, other) == pytest.approx(np.vdot(x, back), rel=1e-12)


def test_im2col_takes_any_strides(rng):
    """A window must be one run in memory; views whose strides say otherwise, also on axes of length 1, are copied"""
    for x in (rng.random((2, 8, 6))[..., None], rng.random((2, 8, 1, 6))[..., ::2],
              rng.random((6, 8, 2, 1)).transpose(2, 1, 0, 3), rng.random((2, 8, 6, 4))[:, ::2, ::2, 1:2]):
        np.testing.assert_array_equal(mc.im2col(x, 1, 2), mc.im2col(np.array(x.tolist()), 1, 2))


@pytest.mark.parametrize("stride, shape, kernel", CONVS)
def test_conv2d_against_naive_loops(rng, stride, shape, kernel):
    x, w, b = rng.standard_normal(shape), rng.standard_normal((*kernel, shape[3], 4)), rng.standard_normal(4)
    for given in (x, np.ascontiguousarray(x.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3), np.asfortranarray(x)):
        for bias in (b, None):
            y, _ = mc.conv2d_forward(given, w, bias, stride, poison)
            expected = conv_reference(x, w, 0 * b if bias is None else b, stride)
            np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(7, 5, 3), (1, 5, 3), (7, 1, 3), (7, 5, 1)], ids=str)
def test_a_product_is_added_whatever_lies_in_memory_how(sizes, monkeypatch):
    """Small whole numbers, of which float32 rounds none; rows with gaps between them and float64 go to NumPy; and all
    of them where NumPy's BLAS is not to be had"""
    M, K, F = sizes
    for blas, dtype, order, gaps in itertools.product(
            (mc.sgemm, lambda: None), (np.float32, float), "CF", ((), (0,), (1,), (2,), (0, 1, 2))):
        monkeypatch.setattr(mc, "sgemm", blas)
        x, y, z = (np.zeros((rows, columns * (1 + (k in gaps))), dtype, order if k == 1 else "C")[:, ::1 + (k in gaps)]
                   for k, (rows, columns) in enumerate(((M, K), (K, F), (M, F))))
        for matrix in (x, y, z):
            matrix[:] = np.arange(matrix.size).reshape(matrix.shape) % 11
        expected = z + x @ y
        mc.add_product(x, y, z, np.full((M, F), np.nan, dtype))
        np.testing.assert_array_equal(z, expected)


def test_norm_in_float32_of_numbers_far_from_zero():
    """A mean 30 standard deviations away costs three digits of the variance, and no channel is ever negative"""
    x = 30 + np.random.default_rng(0).standard_normal((4, 10, 10, 2))
    x[..., 1] = 12.3
    exact, rounded = (mc.norm_forward(x.astype(dtype), np.ones(2, dtype), np.zeros(2, dtype))[0]
                      for dtype in (float, np.float32))
    np.testing.assert_allclose(rounded[0][..., 0], exact[0][..., 0], atol=2e-3)
    assert abs(rounded[0][..., 1]).max() < 0.02 and rounded[1][1][1] >= 0


def test_sigmoid_neither_overflows_nor_drifts():
    with np.errstate(all="raise"):
        y, _ = mc.sigmoid_forward(np.array([-1e4, -np.log(3), 0, np.log(3), 1e4]))
    np.testing.assert_allclose(y, [0, 0.25, 0.5, 0.75, 1], atol=1e-15)


def test_pool_by_hand():
    """An odd row or column is left out; a window's gradient goes to one entry only, also where all are equal; and to
    none where a ReLU, in place, has made the maximum 0"""
    x = np.arange(2 * 3 * 5, dtype=float).reshape(1, 3, 5, 2)
    y, cache = mc.max_pool_forward(x)
    np.testing.assert_array_equal(y[0], [[[12, 13], [16, 17]]])
    dx = mc.max_pool_backward(np.array([[[[1.0, 2], [3, 4]]]]), cache)
    assert dx.sum() == 10 and dx[0, 1, 1].tolist() == [1, 2] and dx[0, 1, 3].tolist() == [3, 4]
    for value in (1.0, 0.0, -1.0):
        _, cache = mc.max_pool_forward(np.full((1, 4, 4, 1), value))
        dx = mc.max_pool_backward(np.array([[[[1.0], [2]], [[3], [4]]]]), cache)[0, :, :, 0]
        np.testing.assert_array_equal(dx, [[1, 0, 2, 0], [0] * 4, [3, 0, 4, 0], [0] * 4])
    y, cache = mc.max_pool_forward(np.array([-3.0, -1, -2, -4, 5, 1, 2, 3]).reshape(2, 2, 2, 1))
    assert mc.relu_forward(y)[0] is y
    assert mc.max_pool_backward(np.ones((2, 1, 1, 1)), cache).ravel().tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3)])
def test_norm_by_its_definition(rng, order):
    """In training every channel gets mean beta and standard deviation gamma; in evaluation what the running mean and
    variance say; whatever the order in memory"""
    x = np.ascontiguousarray((3 + 2 * rng.standard_normal((4, 3, 5, 2))).transpose(order)).transpose(np.argsort(order))
    C, axes = 2, (0, 1, 2)
    gamma, beta = rng.standard_normal((2, C))
    (y, found), _ = mc.norm_forward(x.copy(order="K"), gamma, beta, None, poison)
    expected = gamma * (x - x.mean(axes)) / np.sqrt(x.var(axes) + 1e-5) + beta
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found, [x.mean(axes), x.var(axes, ddof=1)], rtol=1e-12)
    running = rng.standard_normal(C), rng.random(C) + 0.1
    (y, same), _ = mc.norm_forward(x.copy(order="K"), gamma, beta, running)
    assert same is running
    (alone, found), cache = mc.norm_forward(np.full((1, 1, 1, C), 7.0), gamma, beta)          # one number a channel
    assert np.allclose(alone[0], beta, atol=1e-12) and not found[1].any()
    assert np.isfinite(mc.norm_backward(alone, cache)[0]).all()
    of_two = np.array([1.0, 4]).reshape(2, 1, 1, 1)
    assert mc.norm_forward(of_two, np.ones(1), np.zeros(1))[0][1][1] == pytest.approx(4.5)
    np.testing.assert_allclose(y, gamma * (x - running[0]) / np.sqrt(running[1] + 1e-5) + beta, rtol=1e-10, atol=1e-12)


def test_running_statistics_forget_fast_at_first():
    """step by step in test_core_training; at last 0.99 of what was stays, group by group"""
    state = mc.init_state({"a_gamma": np.ones(2, np.float32), "a_w": np.ones(3)})
    assert {name: a.tolist() for name, a in state.items()} == {"a_mean": [0, 0], "a_var": [1, 1]}
    mc.update_running_statistics(state, [{"a_mean": np.array([1.0, 2])}, {"a_mean": np.array([5.0, 0])}], 10 ** 6)
    np.testing.assert_allclose(state["a_mean"], [0.01 * 0.99 + 0.05, 0.02 * 0.99], rtol=1e-6)
    assert state["a_mean"].dtype == np.float32 and state["a_var"].tolist() == [1, 1]


# -------------------------------------------------------------- gradients

@pytest.mark.parametrize("stride, shape, kernel", CONVS)
def test_conv2d(stride, shape, kernel):
    x, w, b = normal(*shape), normal(*kernel, shape[3], 3, seed=1), normal(3, seed=2)
    check_op(lambda x, w, b: mc.conv2d_forward(x, w, b, stride, poison), mc.conv2d_backward, x, w, b)


def test_linear():
    check_op(lambda *xwb: mc.linear_forward(*xwb, poison), mc.linear_backward,
             normal(2, 3), normal(3, 4, seed=1), normal(4, seed=2))


@pytest.mark.parametrize("need_dx, need_db", [(False, True), (True, False), (False, False)])
def test_gradients_that_are_not_needed_are_none_and_the_others_the_same(need_dx, need_db):
    conv = mc.conv2d_forward(normal(2, 7, 6, 2), normal(3, 2, 2, 3), normal(3), 2)
    for (y, cache), backward in ((conv, mc.conv2d_backward),
                                 (mc.linear_forward(normal(2, 3), normal(3, 4), normal(4)), mc.linear_backward)):
        full, part = backward(y, cache), backward(y, cache, need_dx, need_db)
        assert [a is None for a in part] == [not need_dx, False, not need_db] and None not in [type(a) for a in full]
        assert all(np.array_equal(a, b) for a, b in zip(full, part) if b is not None)


@pytest.mark.parametrize("shape", [(2, 3, 4, 2), (1, 2, 3, 2)])
def test_norm(shape):
    def forward(x, gamma, beta):
        (y, _), cache = mc.norm_forward(x, gamma, beta, None, poison)
        return y, cache
    gamma, beta = normal(shape[-1], seed=1), normal(shape[-1], seed=2)
    check_op(forward, mc.norm_backward, normal(*shape), gamma, beta)
    check_op(forward, mc.norm_backward, normal(*shape[:2][::-1], *shape[2:]).swapaxes(0, 1), gamma, beta)


PLAIN = {operation: pair for module in (*EXPERIMENTS.values(), mc) for operation, pair in module.LAYERS.items()
         if operation not in (*module.WITH_WEIGHTS, "norm", "skip", "add")}
OPTIONS = {"pad": [(2,), (0,)], "coordinates": [((0.3, -1.0, 2.0, 0.5),)],                   # of those that have some
           "dropout": [(), (np.float32([0, 2]),)]}


@pytest.mark.parametrize("operation", PLAIN)
def test_every_layer_without_weights(operation):
    """of all experiments; its numbers are apart, and off the kinks. float32 stays float32"""
    forward, backward = PLAIN[operation]
    shape = (2, 4, 4, 3) if operation == "coordinates" else (2, 6, 4, 2)
    x = (np.random.default_rng(0).permutation(96).reshape(shape) - 47.5) / 20
    for options in OPTIONS.get(operation, [()]):
        check_op(lambda x, options=options: forward(x, *options), backward, x, tol=RELU)
        out, cache = forward(x.astype(np.float32), *options)
        assert float_dtypes((out, backward(out.copy(), cache))) == {np.dtype(np.float32)}


def test_a_dropout_mask_keeps_the_mean():
    """An entry is 0 with the given probability, otherwise 1 / (1 - probability); every draw is another one"""
    rng = np.random.default_rng(0)
    mask = mc.draw_dropout_mask(rng, (400, 50), 0.2)
    assert mask.dtype == np.float32 and mask.shape == (400, 50) and set(np.unique(mask)) == {0, np.float32(1.25)}
    assert np.mean(mask == 0) == pytest.approx(0.2, abs=0.01) and np.ptp((mask == 0).mean(0)) < 0.2
    assert not np.array_equal(mask, mc.draw_dropout_mask(rng, (400, 50), 0.2))
    assert mc.draw_dropout_mask(rng, (3, 4), 0.0).min() == 1


# -------------------------------------------------------------- layers

STACKS = {                         # side and channels of the input, layers: each kind, and a small CNN of them
    "conv2d": (7, 2, (("conv2d", "a", 3, 2, 4),)),
    "linear": (1, 4, (("flatten",), ("linear", "a", 5))),
    "all": (9, 2, (("pad", 1), ("conv2d", "a", 3, 1, 4), ("max_pool",), ("relu",), ("conv2d", "b", 2, 2, 3),
                   ("sigmoid",),
                   ("flatten",), ("linear", "c", 3), ("relu",), ("dropout",), ("linear", "d", 5))),
    "global average": (6, 2, (("conv2d", "a", 3, 1, 3), ("relu",), ("global_avg_pool",), ("linear", "b", 4))),
    "normalized": (7, 2, (("norm", "n"), ("sigmoid",), ("conv2d", "a", 3, 1, 4), ("norm", "m"), ("relu",),
                          ("max_pool", ),
                          ("flatten",), ("linear", "b", 5), ("sigmoid",), ("linear", "c", 2))),
    "residual": (5, 2, (("conv2d", "a", 2, 1, 3), ("skip",), ("pad", 1), ("conv2d", "b", 3, 1, 3), ("norm", "n"),
                        ("sigmoid",), ("skip",), ("pad", 1), ("conv2d", "c", 3, 1, 3), ("add",), ("add",), ("relu",),
                        ("flatten",), ("linear", "d", 2))),
    "nothing learned": (6, 3, (("pad", 1), ("max_pool",), ("global_avg_pool",)))}


def stack(name, N=3):
    """-> input, layers, weights of the shapes that infer_shapes says, which leave no ReLU on its kink"""
    side, channels, layers = STACKS[name]
    params = {key: normal(*shape, seed=k) / np.sqrt(max(1, np.prod(shape[:-1])))
              for k, (key, shape) in enumerate(mc.infer_shapes(layers, side, channels).shapes.items(), 1)}
    shape = N, side, side, channels
    x = (np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape) + 0.25) / np.prod(shape) - 0.5
    return x, layers, params


@pytest.mark.parametrize("name", STACKS)
def test_gradients_through_layers(name):
    x, layers, params = stack(name)
    (y, caches), grads = mc.layers_forward(params, x.copy(), layers, poison, {}), {}
    dy = normal(*y.shape, seed=9)
    dx = mc.layers_backward(dy, caches, layers, grads)
    assert len(caches) == len(layers) and np.array_equal(dy, normal(*y.shape, seed=9))
    check_directions(lambda p: np.vdot(dy, mc.layers_forward(p, p["x"].copy(), layers, poison, {})[0]),
                     params | {"x": x}, grads | {"x": dx})
    partial = {}                                                    # without dx: nothing below the first weights
    assert mc.layers_backward(dy, caches, layers, partial, need_dx=False) is None
    assert_same(grads, partial)


def test_each_layer_of_the_core_is_tried():
    assert {operation for _, _, layers in STACKS.values() for operation, *_ in layers} == set(mc.LAYERS)


def test_layers_are_their_operations_one_after_the_other():
    x, layers, p = stack("all")
    h = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    h = conv_reference(h, p["a_w"], p["a_b"], 1)                                        # (3, 9, 9, 4)
    h = np.maximum(h[:, :8, :8].reshape(3, 4, 2, 4, 2, 4).max((2, 4)), 0)
    h = 1 / (1 + np.exp(-conv_reference(h, p["b_w"], p["b_b"], 2)))
    dense = np.maximum(h.reshape(3, -1) @ p["c_w"] + p["c_b"], 0) @ p["d_w"] + p["d_b"]
    np.testing.assert_allclose(mc.layers_forward(p, x.copy(), layers)[0], dense, rtol=1e-12)
    means, _ = mc.layers_forward(p, x.copy(), (*layers[:6], ("global_avg_pool",)))
    np.testing.assert_allclose(means, h.mean((1, 2)), rtol=1e-12)
    x, layers, p = stack("residual")
    first, _ = mc.layers_forward(p, x.copy(), layers[:1])
    b, _ = mc.layers_forward(p, first.copy(), layers[2:6], statistics={})               # a branch within a branch
    c, _ = mc.layers_forward(p, b.copy(), layers[7:9])
    y, _ = mc.layers_forward(p, x.copy(), layers[:11], statistics={})
    np.testing.assert_allclose(y, first + (b + c), rtol=1e-12)


def test_a_normalization_uses_these_samples_in_training_and_running_statistics_in_evaluation():
    """and puts the former where they can be folded into the latter"""
    x, layers, p = stack("normalized")
    found = {}
    mc.layers_forward(p, x.copy(), layers, statistics=found)
    assert set(found) == {f"{name}_{end}" for name in "nm" for end in ("mean", "var")}
    np.testing.assert_allclose(found["n_mean"], x.mean((0, 1, 2)), atol=1e-12)
    np.testing.assert_allclose(found["n_var"], x.var((0, 1, 2)) * 147 / 146, rtol=1e-12)
    state = {name: np.full_like(a, name.endswith("var")) for name, a in found.items()}
    y, _ = mc.layers_forward(p | state, x[:1].copy(), layers)
    whole, _ = mc.layers_forward(p | state, x.copy(), layers)
    np.testing.assert_allclose(y, whole[:1], rtol=1e-12)                                # each sample by itself
    other, _ = mc.layers_forward(p | state | {"m_mean": state["m_mean"] + 1}, x.copy(), layers)
    assert not np.allclose(other, whole)


# -------------------------------------------------------------- what layers make of an image

TRUNKS = {                         # side, margin, layers
    "strides": (31, 0, (("conv2d", "a", 5, 2, 1), ("conv2d", "b", 3, 3, 1))),
    "pools": (30, 3, (("conv2d", "a", 3, 1, 1), ("max_pool",), ("relu",), ("conv2d", "b", 2, 1, 1), ("max_pool",))),
    "a wide pad": (25, 0, (("conv2d", "a", 3, 2, 1), ("pad", 2), ("conv2d", "b", 5, 1, 1))),
    "pads": (22, 1, (("max_pool",), ("skip",), ("pad", 1), ("conv2d", "a", 3, 1, 1), ("add",),
                     ("conv2d", "b", 3, 2, 1)))}


@pytest.mark.parametrize("name", TRUNKS)
def test_receptive_fields_lie_where_work_out_says(name):
    """By brute force: a dot wanders down the diagonal, and units that see it change"""
    side, margin, layers = TRUNKS[name]
    worked = mc.infer_shapes(layers, side, 1, margin)
    params = {key: np.full(shape, 0.5) for key, shape in worked.shapes.items()}
    dots = np.zeros((side + 1, side, side, 1))
    dots[np.arange(side), np.arange(side), np.arange(side)] = 1                         # the last image is empty
    y, _ = mc.layers_forward(params, dots, layers)
    assert y.shape == (side + 1, worked.side, worked.side, worked.channels) and worked.along.shape == (worked.side,)
    inner, seen = side - 2 * margin, 0
    for k in range(worked.side):
        field = np.flatnonzero(y[:-1, k, k, 0] != y[-1, k, k, 0])
        if field[0] > 0 and field[-1] < side - 1:                                       # not cut off by the edge
            middle = (field[0] + field[-1]) / 2 - margin
            assert worked.along[k] == pytest.approx((middle + 0.5) / inner * 2 - 1, abs=1e-12)
            seen += 1
    assert seen > 2 and np.allclose(np.diff(worked.along, 2), 0)


def test_shapes_that_work_out_says():
    """A convolution before a normalization has no bias; rows: the first one's kernel is im2col_rows'"""
    layers = (("conv2d", "a", 3, 1, 2), ("relu",), ("conv2d", "b", 2, 2, 3), ("flatten",), ("linear", "c", 5))
    a, b, c = {"a_w": (3, 3, 1, 2)}, {"b_w": (2, 2, 2, 3)}, {"c_w": (27, 5), "c_b": (5,)}
    assert mc.infer_shapes(layers, 8, 1).shapes == a | {"a_b": (2,)} | b | {"b_b": (3,)} | c
    assert mc.infer_shapes(layers, 8, 1, rows=True).shapes == {"a_w": (1, 3, 3, 2), "a_b": (2,)} | b | {"b_b": (3,)} | c
    normed = (layers[0], ("norm", "a_norm"), layers[1], layers[2], ("norm", "b_norm"), *layers[3:])
    norms = [{f"{name}_norm_{end}": (n,) for end in ("gamma", "beta")} for name, n in (("a", 2), ("b", 3))]
    assert mc.with_norms(layers) == normed and mc.infer_shapes(normed, 8, 1).shapes == a | norms[0] | b | norms[1] | c
    assert [mc.has_bias(normed, k) for k in (0, 3, 6)] == [False, False, True]
    worked = mc.infer_shapes((*layers[:3], ("global_avg_pool",)), 8, 1)
    assert (worked.side, worked.channels) == (3, 3) and mc.infer_shapes(layers, 8, 1).channels == 5
    assert mc.infer_shapes((("coordinates",),), 4, 3).channels == 5  # their x and y come to them
    # x, y
    assert mc.receptive_field_centers(np.array([-1.0, 0.5])).tolist() == [[-1, -1], [0.5, -1], [-1, 0.5], [0.5, 0.5]]


# -------------------------------------------------------------- Arena

def test_an_arena_gives_its_arrays_again_after_rewind_only():
    arena = mc.Arena()
    a, b = arena((2, 3), np.float32), arena((2, 3), np.float32)
    assert not np.shares_memory(a, b) and (a.shape, a.dtype) == ((2, 3), np.float32)
    assert arena.rewind() is arena and arena([2, 3], np.float32) is a
    assert arena((2, 3), np.float64).dtype == np.float64 and arena((2, 3), np.float32) is not b
    assert arena.rewind()((3, 2), np.float32).shape == (3, 2) and arena.rewind()((2, 3), np.float32) is not a


def test_an_arena_begins_at_cache_lines():
    arena = mc.Arena()
    before = arena((4,), np.float64)
    assert all(arena(shape, dtype).ctypes.data % 64 == 0 for shape, dtype in
               (((3,), np.float32), ((1, 7), np.float64), ((5, 5, 5), np.uint8)))
    assert mc.reuse_if_arena(before, arena) is before                                   # which no other buffer lends
    assert not np.shares_memory(mc.reuse_if_arena(before, np.empty), before)


@pytest.mark.parametrize("name", ["all", "normalized", "residual"])
def test_buffers_change_nothing(name):
    """np.empty, buffers full of nan, an Arena at its first use and at its later uses: all the same bits"""
    x, layers, params = stack(name)

    def run(empty):
        y, caches = mc.layers_forward(params, x.copy(), layers, empty, {})
        grads = {}
        return {"y": y.copy(), "x": mc.layers_backward(y.copy(), caches, layers, grads)} | grads

    arena = mc.Arena()
    for empty in (poison, arena, arena.rewind(), arena.rewind()):
        assert_same(run(empty), run(np.empty))
