"""The primitives of the core, and the table that strings them together: by hand, against loops, and their gradients."""
import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import assert_same
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

@pytest.mark.parametrize("stride, shape, width", [(1, (2, 5, 6, 3), 2), (2, (2, 7, 6, 2), 3), (2, (1, 6, 7, 1), 3),
                                                  (3, (2, 8, 9, 2), 4)])
def test_im2col_holds_the_windows_it_says(rng, stride, shape, width):
    x = rng.standard_normal(shape)
    N, H, W, C = shape
    cols, seen = mc.im2col(x, width, stride), 0
    for y in range(H):
        for n in range(N):
            for ox in range((W - width) // stride + 1):
                window = x[n, y, stride * ox:stride * ox + width].reshape(-1)
                np.testing.assert_array_equal(cols[y % stride, y // stride, n, ox], window)
                seen += 1
    assert cols.shape == (stride, -(-H // stride), N, (W - width) // stride + 1, width * C)
    assert seen == N * H * cols.shape[3]


@pytest.mark.parametrize("stride, shape, kernel", [(1, (2, 5, 6, 3), (3, 2)), (2, (2, 7, 6, 2), (3, 2)),
                                                   (2, (1, 6, 9, 1), (3, 4)), (1, (2, 4, 5, 1), (1, 3)),
                                                   (3, (1, 9, 8, 2), (2, 4))])
def test_conv2d_against_naive_loops(rng, stride, shape, kernel):
    x, b = rng.standard_normal(shape), rng.standard_normal(4)
    w = rng.standard_normal((*kernel, shape[3], 4))
    expected = conv_reference(x, w, b, stride)
    for given in (x, np.ascontiguousarray(x.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3), np.asfortranarray(x)):
        np.testing.assert_allclose(mc.conv2d_forward(given, w, b, stride)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(7, 5, 6), (40, 48, 16), (1, 5, 6), (7, 1, 6), (7, 5, 1), (1, 1, 1)])
def test_a_product_is_added_whatever_lies_where_in_memory(rng, shape, dtype):
    """By BLAS's own sum or by NumPy's: rows in runs, columns in runs, parts of larger arrays, every other row. And
    nothing beside `out` is touched"""
    M, K, N = shape

    def laid_out(rows, columns):
        x = rng.standard_normal((2 * rows, columns + 3)).astype(dtype)
        return [x[:rows, :columns], np.asfortranarray(x[:rows, :columns]), x[::2, :columns], x[:rows, 2:columns + 2],
                x[:rows, :columns][::-1]]

    for a in laid_out(M, K):
        for b in laid_out(K, N):
            whole = rng.standard_normal((2 * M, N + 2)).astype(dtype)
            for at in np.s_[:M, :N], np.s_[::2, 1:N + 1]:
                expected, found = whole.copy(), whole.copy()
                expected[at] += a @ b
                mc.add_product(a, b, found[at], np.empty((M, N), dtype))
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    out = np.asfortranarray(whole[:M, :N])
    expected = out + a @ b
    mc.add_product(a, b, out, np.empty((M, N), dtype))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_products_are_added_without_openblas_too(rng, monkeypatch):
    a, b, out = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 48), (48, 16), (40, 16)))
    expected = out + a @ b
    monkeypatch.setattr(mc, "sgemm", lambda: None)
    mc.add_product(a, b, out, np.empty_like(out))
    np.testing.assert_array_equal(out, expected)


def test_im2col_rows_turns_a_one_channel_convolution_into_one_over_a_row_of_channels(rng):
    x, w = rng.standard_normal((2, 6, 7)), rng.standard_normal((3, 3, 1, 4))
    folded, _ = mc.conv2d_forward(mc.im2col_rows(x, 3), w[:, :, 0].transpose(1, 0, 2)[None], np.zeros(4), 1)
    np.testing.assert_allclose(folded, conv_reference(x[..., None], w, np.zeros(4), 1), rtol=1e-12, atol=1e-12)


def test_sigmoid_neither_overflows_nor_drifts():
    with np.errstate(all="raise"):
        y, _ = mc.sigmoid_forward(np.array([-1e4, -np.log(3), 0, np.log(3), 1e4]))
    np.testing.assert_allclose(y, [0, 0.25, 0.5, 0.75, 1], atol=1e-15)


def test_pool_by_hand():
    x = np.arange(2 * 3 * 5, dtype=float).reshape(1, 3, 5, 2)
    y, cache = mc.pool_forward(x)
    np.testing.assert_array_equal(y[0], [[[12, 13], [16, 17]]])        # the third row and the fifth column are left out
    dx = mc.pool_backward(np.array([[[[1.0, 2], [3, 4]]]]), cache)
    assert dx.sum() == 10 and dx[0, 1, 1].tolist() == [1, 2] and dx[0, 1, 3].tolist() == [3, 4]


def test_a_windows_gradient_goes_to_one_entry_only_also_where_all_are_equal():
    for value in (1.0, 0.0, -1.0):
        _, cache = mc.pool_forward(np.full((1, 4, 4, 1), value))
        dx = mc.pool_backward(np.array([[[[1.0], [2]], [[3], [4]]]]), cache)[0, :, :, 0]
        np.testing.assert_array_equal(dx, [[1, 0, 2, 0], [0] * 4, [3, 0, 4, 0], [0] * 4])


def test_pool_takes_the_gradient_only_where_a_relu_left_the_maximum():
    """A ReLU in place on the maxima shuts the windows that it sets to 0"""
    y, cache = mc.pool_forward(np.array([-3.0, -1, -2, -4, 5, 1, 2, 3]).reshape(2, 2, 2, 1))
    mc.relu_forward(y)
    dx = mc.pool_backward(np.ones((2, 1, 1, 1)), cache)
    assert dx.ravel().tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


def test_places_by_hand():
    """x grows to the right, y downwards; the same for every image, and without a gradient"""
    y, cache = mc.places_forward(np.full((2, 2, 2, 1), 7.0), (-0.5, 0.25))
    assert y[1].tolist() == [[[7, -0.5, -0.5], [7, 0.25, -0.5]], [[7, -0.5, 0.25], [7, 0.25, 0.25]]]
    assert np.array_equal(y[0], y[1]) and np.array_equal(mc.places_backward(y, cache), y[..., :1])


def test_mean_pad_flatten_and_dropout_by_hand():
    x = np.arange(8.0).reshape(1, 2, 2, 2)
    y, cache = mc.mean_forward(x)
    assert y.tolist() == [[3, 4]]
    assert mc.mean_backward(np.array([[4.0, 8]]), cache).tolist() == [[[[1, 2], [1, 2]], [[1, 2], [1, 2]]]]
    y, cache = mc.pad_forward(x[..., :1], 1)
    assert y[0, :, :, 0].tolist() == [[0] * 4, [0, 0, 2, 0], [0, 4, 6, 0], [0] * 4]
    assert mc.pad_backward(np.arange(16.0).reshape(1, 4, 4, 1), cache)[0, :, :, 0].tolist() == [[5, 6], [9, 10]]
    y, cache = mc.flatten_forward(x)
    assert y.tolist() == [list(range(8))] and np.array_equal(mc.flatten_backward(y, cache), x)
    y, cache = mc.dropout_forward(np.array([[1.0, 2, 3]]), np.array([[0, 2.0, 2]]))
    assert y.tolist() == [[0, 4, 6]] and mc.dropout_backward(np.ones((1, 3)), cache).tolist() == [[0, 2, 2]]


@pytest.mark.parametrize("shape, order", [((4, 3, 5, 2), (0, 1, 2, 3)), ((4, 3, 5, 2), (1, 0, 2, 3)), ((6, 3), (0, 1))])
def test_norm_by_its_definition(rng, shape, order):
    """In training every channel gets mean beta and standard deviation gamma; in evaluation what the running mean and
    variance say; whatever the order in memory"""
    x = np.ascontiguousarray((3 + 2 * rng.standard_normal(shape)).transpose(order)).transpose(np.argsort(order))
    C, axes = shape[-1], tuple(range(len(shape) - 1))
    gamma, beta = rng.standard_normal(C), rng.standard_normal(C)
    n = x.size // C
    mean, variance = x.mean(axes), x.var(axes)
    (y, found), _ = mc.norm_forward(x.copy(order="K"), gamma, beta, None, poison)
    np.testing.assert_allclose(y, gamma * (x - mean) / np.sqrt(variance + 1e-5) + beta, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found, [mean, x.var(axes, ddof=1)], rtol=1e-12)
    np.testing.assert_allclose(found[1], variance * n / (n - 1), rtol=1e-12)
    running = rng.standard_normal(C), rng.random(C) + 0.1
    (y, same), _ = mc.norm_forward(x.copy(order="K"), gamma, beta, running)
    assert same is running
    np.testing.assert_allclose(y, gamma * (x - running[0]) / np.sqrt(running[1] + 1e-5) + beta, rtol=1e-10, atol=1e-12)


def test_norm_of_a_single_number_a_channel_is_beta():
    """A last group of one sample: no variance, and nothing that is not finite"""
    (y, found), cache = mc.norm_forward(np.full((1, 3), 7.0), np.ones(3), np.arange(3.0))
    assert y.tolist() == [[0, 1, 2]] and [list(a) for a in found] == [[7, 7, 7], [0, 0, 0]]
    assert np.isfinite(mc.norm_backward(np.ones((1, 3)), cache)[0]).all()


def test_running_statistics_forget_fast_at_first_and_fold_in_order():
    state = mc.init_state({"a_gamma": np.ones(2, np.float32), "a_w": np.ones(3)})
    assert {name: a.tolist() for name, a in state.items()} == {"a_mean": [0, 0], "a_var": [1, 1]}
    groups = [{"a_mean": np.array([1.0, 2]), "a_var": np.array([3.0, 4])},
              {"a_mean": np.array([5.0, 0]), "a_var": np.ones(2)}]
    mc.fold_statistics(state, groups[:1], 0)
    assert state["a_mean"].tolist() == [1, 2] and state["a_var"].tolist() == [3, 4]            # the start is forgotten
    mc.fold_statistics(state, groups[1:], 1)
    np.testing.assert_allclose(state["a_mean"], [0.1 * 1 + 0.9 * 5, 0.1 * 2], rtol=1e-6)
    mc.fold_statistics(state, groups, 10 ** 6)                                          # 0.99 of what was, twice
    np.testing.assert_allclose(state["a_mean"][0], (4.6 * 0.99 + 0.01) * 0.99 + 0.05, rtol=1e-6)
    assert state["a_mean"].dtype == np.float32


def test_im2col_takes_any_strides():
    """A window must be one run in memory; views whose strides say otherwise, also on axes of length 1, are copied
    first."""
    rng = np.random.default_rng(0)
    for x in (rng.random((2, 8, 6))[..., None], rng.random((2, 8, 1, 6))[..., ::2],
              rng.random((6, 8, 2, 1)).transpose(2, 1, 0, 3), rng.random((2, 8, 6, 4))[:, ::2, ::2, 1:2]):
        np.testing.assert_array_equal(mc.im2col(x, 1, 2), mc.im2col(np.array(x.tolist()), 1, 2))


# -------------------------------------------------------------- gradients

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


MASK = np.array([[2.0, 0, 2], [0, 2, 2]])
OPS = {"linear": (mc.linear_forward, mc.linear_backward, normal(2, 3), normal(3, 4, seed=1), normal(4, seed=2)),
       "sigmoid": (mc.sigmoid_forward, mc.sigmoid_backward, 2 * normal(2, 5)),
       "mean": (mc.mean_forward, mc.mean_backward, normal(2, 3, 4, 5)),
       "pad": (lambda x: mc.pad_forward(x, 2), mc.pad_backward, normal(2, 3, 4, 2)),
       "no pad": (lambda x: mc.pad_forward(x, 0), mc.pad_backward, normal(2, 3, 4, 2)),
       "places": (lambda x: mc.places_forward(x, (0.3, -1.0, 2.0)), mc.places_backward, normal(2, 3, 3, 2)),
       "flatten": (mc.flatten_forward, mc.flatten_backward, normal(2, 3, 4, 2)),
       "dropout": (lambda x: mc.dropout_forward(x, MASK.astype(x.dtype)), mc.dropout_backward, normal(2, 3)),
       "no dropout": (lambda x: mc.dropout_forward(x, None), mc.dropout_backward, normal(2, 3))}


@pytest.mark.parametrize("op", OPS)
def test_smooth_op(op):
    check_op(*OPS[op])


def test_relu():
    check_op(mc.relu_forward, mc.relu_backward, normal(2, 5, off=0.1), tol=RELU)


@pytest.mark.parametrize("shape", [(2, 3, 4, 2), (5, 3), (1, 2, 3, 2)])
def test_norm(shape):
    def forward(x, gamma, beta):
        (y, _), cache = mc.norm_forward(x, gamma, beta, None, poison)
        return y, cache
    check_op(forward, mc.norm_backward, normal(*shape), normal(shape[-1], seed=1), normal(shape[-1], seed=2))
    other_order = normal(*shape[:2][::-1], *shape[2:]).swapaxes(0, 1)
    check_op(forward, mc.norm_backward, other_order, normal(shape[-1], seed=1), normal(shape[-1], seed=2))


@pytest.mark.parametrize("shape", [(2, 4, 6, 3), (1, 5, 5, 2), (2, 3, 4, 1)])
def test_pool_gradient(shape):
    x = np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape) / 10.0
    check_op(mc.pool_forward, mc.pool_backward, x)


def test_each_backward_keeps_float32():
    for forward, backward, *args in OPS.values():
        out, cache = forward(*[a.astype(np.float32) for a in args])
        assert float_dtypes((out, backward(out.copy(), cache))) == {np.dtype(np.float32)}


def test_linear_without_dx_gives_the_same_other_gradients():
    y, cache = mc.linear_forward(normal(2, 3), normal(3, 4), normal(4))
    (dx, *full), (nothing, *partial) = mc.linear_backward(y, cache), mc.linear_backward(y, cache, need_dx=False)
    assert dx is not None and nothing is None and all(np.array_equal(a, b) for a, b in zip(full, partial))


# -------------------------------------------------------------- the table of layers

STACKS = {                         # x, layers, the shapes of their weights: each kind of layer, and a small CNN of all
    "conv2d": ((2, 7, 6, 2), [("conv2d", "a", 2)], {"a_w": (3, 2, 2, 4), "a_b": (4,)}),
    "linear": ((3, 4), [("linear", "a")], {"a_w": (4, 5), "a_b": (5,)}),
    "all": ((2, 9, 8, 2),
            [("pad", 1), ("conv2d", "a", 1), ("pool",), ("relu",), ("conv2d", "b", 2), ("sigmoid",), ("flatten",),
             ("linear", "c"), ("relu",), ("dropout",), ("linear", "d")],
            {"a_w": (3, 3, 2, 4), "a_b": (4,), "b_w": (2, 3, 4, 3), "b_b": (3,), "c_w": (6, 3), "c_b": (3,),
             "d_w": (3, 5), "d_b": (5,)}),
    "global average": ((2, 5, 6, 2), [("conv2d", "a", 1), ("relu",), ("mean",), ("linear", "b")],
                       {"a_w": (2, 3, 2, 3), "a_b": (3,), "b_w": (3, 4), "b_b": (4,)}),
    "normalised": ((3, 6, 7, 2), [("norm", "n"), ("sigmoid",), ("conv2d", "a", 1), ("norm", "m"), ("relu",), ("pool",),
                                  ("flatten",), ("linear", "b"), ("norm", "k"), ("sigmoid",), ("linear", "c")],
                   {"n_gamma": (2,), "n_beta": (2,), "a_w": (3, 2, 2, 4), "m_gamma": (4,), "m_beta": (4,),
                    "b_w": (24, 5), "k_gamma": (5,), "k_beta": (5,), "c_w": (5, 2), "c_b": (2,)}),
    "residual": ((2, 4, 5, 2),
                 [("conv2d", "a", 1), ("keep",), ("pad", 1), ("conv2d", "b", 1), ("norm", "n"), ("sigmoid",), ("keep",),
                  ("pad", 1), ("conv2d", "c", 1), ("add",), ("add",), ("relu",), ("flatten",), ("linear", "d")],
                 {"a_w": (2, 2, 2, 3), "a_b": (3,), "b_w": (3, 3, 3, 3), "n_gamma": (3,), "n_beta": (3,),
                  "c_w": (3, 3, 3, 3), "c_b": (3,), "d_w": (36, 2), "d_b": (2,)}),
    "places": ((2, 3, 3, 2), [("places", (-0.5, 0.1, 0.8)), ("conv2d", "a", 1), ("places", (0.3, 0.4)), ("flatten",)],
               {"a_w": (2, 2, 4, 3), "a_b": (3,)}),
    "global maximum": ((2, 5, 6, 2), [("conv2d", "a", 1), ("largest",), ("linear", "b")],
                       {"a_w": (2, 3, 2, 3), "a_b": (3,), "b_w": (3, 4), "b_b": (4,)}),
    "nothing learned": ((2, 4, 6, 3), [("pad", 1), ("pool",), ("mean",), ("dropout",)], {})}



def stack(name):
    """-> input, layers, weights that leave every ReLU open or shut, but not on its kink"""
    shape, layers, shapes = STACKS[name]
    params = {
        key: normal(*s, seed=k) / np.sqrt(max(1, np.prod(s[:-1]))) for k, (key, s) in enumerate(shapes.items(), 1)}
    return np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape) / np.prod(shape) - 0.5, layers, params


@pytest.mark.parametrize("name", STACKS)
def test_gradients_through_the_table_of_layers(name):
    x, layers, params = stack(name)
    (y, caches), grads = mc.layers_forward(params, x.copy(), layers, poison, MASK, {}), {}
    dy = normal(*y.shape, seed=9)
    dx = mc.layers_backward(dy, caches, layers, grads)
    assert len(caches) == len(layers) and np.array_equal(dy, normal(*y.shape, seed=9))
    check_directions(lambda p: np.vdot(dy, mc.layers_forward(p, p["x"].copy(), layers, poison, MASK, {})[0]),
                     params | {"x": x}, grads | {"x": dx})


@pytest.mark.parametrize("name", [name for name in STACKS if STACKS[name][2]])
def test_layers_without_dx_give_the_same_gradients_of_the_weights(name):
    """No gradient of the input: nothing is computed below the first layer with weights"""
    x, layers, params = stack(name)
    y, caches = mc.layers_forward(params, x, layers, dropout_mask=MASK, statistics={})
    full, partial = {}, {}
    assert mc.layers_backward(y, caches, layers, full).shape == x.shape
    assert mc.layers_backward(y, caches, layers, partial, need_dx=False) is None
    assert full.keys() == params.keys()
    assert_same(full, partial)


def test_each_layer_kind_of_the_table_is_tried():
    tried = {operation for _, layers, _ in STACKS.values() for operation, *_ in layers}
    assert tried == set(mc.LAYERS) and set(mc.WITH_WEIGHTS) == {"conv2d", "linear"}


def test_layers_without_weights_have_nothing_to_learn():
    x, grads = normal(2, 4, 4, 1), {}
    layers = (("pool",), ("flatten",))
    y, caches = mc.layers_forward({}, x, layers)
    assert mc.layers_backward(y, caches, layers, grads, need_dx=False) is None and grads == {}
    assert mc.layers_backward(y, caches, layers, grads).shape == x.shape


def test_layers_are_their_operations_one_after_the_other():
    x, layers, p = stack("all")
    h = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    h = conv_reference(h, p["a_w"], p["a_b"], 1)                                        # (2, 9, 8, 4)
    h = np.maximum(h[:, :8].reshape(2, 4, 2, 4, 2, 4).max((2, 4)), 0)
    h = 1 / (1 + np.exp(-conv_reference(h, p["b_w"], p["b_b"], 2))).reshape(2, -1)
    h = np.maximum(h @ p["c_w"] + p["c_b"], 0)
    for mask, given in ((MASK, MASK), (1, None)):
        y, _ = mc.layers_forward(p, x.copy(), layers, dropout_mask=given)
        np.testing.assert_allclose(y, h * mask @ p["d_w"] + p["d_b"], rtol=1e-12)


def test_a_residual_branch_is_added_to_what_it_began_with():
    """x + (3 x + 2 (3 x)): a branch within a branch; and no gradient is lost where they meet"""
    x, grads = normal(2, 3, 3, 1), {}
    layers = [("conv2d", "one", 1), ("keep",), ("conv2d", "three", 1), ("keep",), ("conv2d", "two", 1), ("add",),
              ("add",)]
    params = {f"{name}_w": np.full((1, 1, 1, 1), factor)
              for name, factor in (("one", 1.0), ("two", 2.0), ("three", 3.0))}
    params |= {name[:-2] + "_b": np.zeros(1) for name in params}
    y, caches = mc.layers_forward(params, x, layers)
    np.testing.assert_allclose(y, x + (3 * x + 2 * (3 * x)), rtol=1e-14)
    np.testing.assert_allclose(mc.layers_backward(np.ones_like(y), caches, layers, grads), np.full(x.shape, 10.0))
    assert grads["three_w"].item() == pytest.approx(3 * x.sum()) and grads["two_w"].item() == pytest.approx(3 * x.sum())
    assert grads["one_w"].item() == pytest.approx(10 * x.sum())


def test_buffers_of_the_layers_change_nothing():
    """np.empty, buffers full of nan, an Arena at its first use and at its later uses: all the same bits"""
    x, layers, params = stack("all")

    def run(empty):
        y, caches = mc.layers_forward(params, x.copy(), layers, empty, MASK)
        grads = {}
        return {"y": y, "x": mc.layers_backward(y.copy(), caches, layers, grads)} | grads

    arena = mc.Arena()
    for empty in (poison, arena, arena.rewind(), arena.rewind()):
        assert_same(run(empty), run(np.empty))


# -------------------------------------------------------------- Arena

def test_arena_returns_its_arrays_again_after_rewind_only():
    arena = mc.Arena()
    a, b = arena((2, 3), np.float32), arena((2, 3), np.float32)
    assert not np.shares_memory(a, b) and a.dtype == np.float32
    arena.rewind()
    assert arena([2, 3], np.float32) is a and arena((2, 3), np.float64).dtype == np.float64


def test_arena_keeps_what_was_taken_before_a_mark():
    arena = mc.Arena()
    before, mark = arena((4,), np.float64), arena.mark()
    after = arena((5,), np.float64)
    assert arena.rewind(mark) is arena and arena((5,), np.float64) is after
    arena.rewind()
    assert arena((4,), np.float64) is before


def test_arenas_arrays_begin_at_a_cache_line():
    arena = mc.Arena()
    assert all(arena(shape, dtype).ctypes.data % 64 == 0 for shape, dtype in
               (((3,), np.float32), ((1, 7), np.float64), ((5, 5, 5), np.uint8)))


def test_only_an_arena_lends_its_arrays_to_a_backward():
    a, arena = np.ones(3), mc.Arena()
    assert mc.reuse_if_arena(a, arena) is a and not np.shares_memory(mc.reuse_if_arena(a, np.empty), a)
    inner = mc.inner_arena(arena)
    assert mc.inner_arena(arena) is inner is not arena and mc.inner_arena(np.empty) is not mc.inner_arena(np.empty)
