"""The layers that all experiments share: by hand, against loops, and their gradients. They have the same
text in all experiments (test_core_design.py), so that one script's are tried."""
import itertools

import multimnist_capsnet as mc

import numpy as np
import pytest
from gradcheck import RELU, check_op, normal
from references import conv_reference

CONVS = [(1, (5, 2, 6, 3), (3, 2)), (1, (6, 2, 5, 1), (1, 3)), (1, (4, 1, 4, 2), (4, 4)), (2, (7, 2, 6, 2), (3, 2)),
         (2, (7, 2, 9, 1), (3, 3)), (2, (8, 1, 5, 2), (2, 3)), (2, (5, 2, 5, 2), (1, 1)), (3, (9, 2, 8, 2), (2, 4))]
every_convolution = pytest.mark.parametrize("stride, shape, kernel", CONVS)


def test_im2col_takes_any_strides(rng):
    """A window must be one run in memory; views whose strides say otherwise, also on axes of length 1, are copied"""
    for x in (rng.random((2, 8, 6))[..., None], rng.random((2, 8, 1, 6))[..., ::2],
              rng.random((6, 8, 2, 1)).transpose(2, 1, 0, 3), rng.random((2, 8, 6, 4))[:, ::2, ::2, 1:2]):
        np.testing.assert_array_equal(mc.im2col(x, 1, 2), mc.im2col(np.array(x.tolist()), 1, 2))


@every_convolution
def test_conv2d_against_naive_loops(rng, stride, shape, kernel):
    """Whatever the order in memory"""
    x, w = rng.standard_normal(shape), rng.standard_normal((*kernel, shape[3], 4))
    images = x.swapaxes(0, 1)
    for given in (x, np.ascontiguousarray(images).swapaxes(0, 1), np.asfortranarray(x)):
        y = mc.conv2d_forward(given, w, stride)[0].swapaxes(0, 1)
        np.testing.assert_allclose(y, [conv_reference(image, w, 0, stride) for image in images], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(7, 5, 3), (1, 5, 3), (7, 1, 3), (7, 5, 1)], ids=str)
def test_a_product_is_added_with_and_without_blas(sizes, monkeypatch):
    """Small whole numbers, of which float32 rounds none; b also transposed"""
    M, K, F = sizes
    for blas, dtype, order in itertools.product((mc.sgemm, lambda: None), (np.float32, float), "CF"):
        monkeypatch.setattr(mc, "sgemm", blas)
        x, y, z = (np.arange(m * n).reshape(m, n).astype(dtype) % 11 for m, n in ((M, K), (K, F), (M, F)))
        y = np.asarray(y, order=order)
        expected = z + x @ y
        mc.add_product(x, y, z)
        np.testing.assert_array_equal(z, expected)


def test_norm_in_float32_of_numbers_far_from_zero():
    """A mean 30 standard deviations away costs three digits of the variance, and no variance is ever negative"""
    x = 30 + np.random.default_rng(0).standard_normal((4, 10, 10, 2))
    x[..., 1] = 12.3
    exact, rounded = (mc.norm_forward(x.astype(dtype), np.ones(2, dtype), np.zeros(2, dtype))
                      for dtype in (float, np.float32))
    np.testing.assert_allclose(rounded[0][..., 0], exact[0][..., 0], atol=2e-3)
    assert abs(rounded[0][..., 1]).max() < 0.02 and rounded[1][1][1] >= 0


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3)])
def test_norm_by_its_definition(rng, order):
    """In training every channel gets mean beta and standard deviation gamma; in evaluation what the running mean and
    variance say; whatever the order in memory"""
    x = np.ascontiguousarray((3 + 2 * rng.standard_normal((4, 3, 5, 2))).transpose(order)).transpose(np.argsort(order))
    C, axes = 2, (0, 1, 2)
    gamma, beta = rng.standard_normal((2, C))
    y, found, _ = mc.norm_forward(x, gamma, beta)
    expected = gamma * (x - x.mean(axes)) / np.sqrt(x.var(axes) + 1e-5) + beta
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found, [x.mean(axes), x.var(axes, ddof=1)], rtol=1e-12)
    running = rng.standard_normal(C), rng.random(C) + 0.1
    y, *_ = mc.norm_forward(x, gamma, beta, running)
    np.testing.assert_allclose(y, gamma * (x - running[0]) / np.sqrt(running[1] + 1e-5) + beta, rtol=1e-10, atol=1e-12)
    alone, found, cache = mc.norm_forward(np.full((1, 1, 1, C), 7.0), gamma, beta)            # one number a channel
    assert np.allclose(alone, beta, atol=1e-12) and not found[1].any()
    assert np.isfinite(mc.norm_backward(alone, cache)[0]).all()
    of_two = np.array([1.0, 4]).reshape(2, 1, 1, 1)
    assert mc.norm_forward(of_two, np.ones(1), np.zeros(1))[1][1] == pytest.approx(4.5)


def test_sigmoid_neither_overflows_nor_drifts():
    with np.errstate(all="raise"):
        y = mc.sigmoid(np.array([-1e4, -np.log(3), 0, np.log(3), 1e4]))
    np.testing.assert_allclose(y, [0, 0.25, 0.5, 0.75, 1], atol=1e-15)


def test_pool_by_hand():
    """An odd row or column is left out; a window's gradient goes to one entry only, also where all are equal; and to
    none where a ReLU, in place, has made the maximum 0"""
    x = np.arange(2 * 3 * 5, dtype=float).reshape(3, 1, 5, 2)
    y, cache = mc.max_pool_forward(x)
    np.testing.assert_array_equal(y[:, 0], [[[12, 13], [16, 17]]])
    dx = mc.max_pool_backward(np.array([[[[1.0, 2], [3, 4]]]]), cache)
    assert dx.sum() == 10 and dx[1, 0, 1].tolist() == [1, 2] and dx[1, 0, 3].tolist() == [3, 4]
    for value in (1.0, 0.0, -1.0):
        _, cache = mc.max_pool_forward(np.full((4, 1, 4, 1), value))
        dx = mc.max_pool_backward(np.array([[[[1.0], [2]]], [[[3], [4]]]]), cache)[:, 0, :, 0]
        np.testing.assert_array_equal(dx, [[1, 0, 2, 0], [0] * 4, [3, 0, 4, 0], [0] * 4])
    y, cache = mc.max_pool_forward(np.array([-3.0, -1, 5, 1, -2, -4, 2, 3]).reshape(2, 2, 2, 1))
    np.maximum(y, 0, out=y)
    assert mc.max_pool_backward(np.ones((1, 2, 1, 1)), cache).ravel().tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


@every_convolution
def test_conv2d_gradients(stride, shape, kernel):
    x, w = normal(*shape), normal(*kernel, shape[3], 3, seed=1)
    check_op(lambda x, w: mc.conv2d_forward(x, w, stride), mc.conv2d_backward, x, w)
    y, cache = mc.conv2d_forward(x, w, stride)
    dx, dw = mc.conv2d_backward(y, cache, need_dx=False)
    assert dx is None and np.array_equal(dw, mc.conv2d_backward(y, cache)[1])
    _, cache = mc.conv2d_forward(x.astype(np.float32), w.astype(np.float32), stride)
    wide = np.repeat(y, 2, axis=-1).astype(np.float32)[..., ::2]                        # not contiguous
    for one, other in zip(mc.conv2d_backward(wide, cache), mc.conv2d_backward(wide.copy(), cache)):
        np.testing.assert_array_equal(one, other)


def test_linear_gradients():
    check_op(mc.linear_forward, mc.linear_backward, normal(2, 3), normal(3, 4, seed=1), normal(4, seed=2))


@pytest.mark.parametrize("shape", [(2, 3, 4, 2), (1, 2, 3, 2)])
def test_norm_gradients(shape):
    def forward(x, gamma, beta):
        y, _, cache = mc.norm_forward(x, gamma, beta)
        return y, cache
    gamma, beta = normal(shape[-1], seed=1), normal(shape[-1], seed=2)
    check_op(forward, mc.norm_backward, normal(*shape), gamma, beta)
    check_op(forward, mc.norm_backward, normal(*shape[:2][::-1], *shape[2:]).swapaxes(0, 1), gamma, beta)


def test_pool_gradients():
    """Its numbers are apart, and off the kinks"""
    x = (np.random.default_rng(0).permutation(96).reshape(2, 6, 4, 2) - 47.5) / 20
    check_op(mc.max_pool_forward, mc.max_pool_backward, x, tol=RELU)


def test_what_is_written_into_is_never_a_copy(rng):
    x = rng.random((4, 6))
    mc.as_view(x, -1)[3] = 7
    assert x[0, 3] == 7
    with pytest.raises(AssertionError, match="this reshape copies"):
        mc.as_view(x.T, -1)


def test_products_of_two_types_are_added_too():
    """BLAS gets float32 alone"""
    for types in itertools.product((np.float32, float), repeat=3):
        x, y, z = (np.full((2, 2), value, dtype) for value, dtype in zip((2, 3, 5), types))
        mc.add_product(x, y, z)
        assert z.dtype == types[2] and (z == 5 + 2 * 2 * 3).all()


@pytest.mark.skipif(mc.sgemm() is None, reason="NumPy has another BLAS")
def test_blas_gets_whole_rows():
    """It is told where arrays begin in memory, and how long their rows are"""
    a, b, out = (np.ones(shape, np.float32) for shape in ((4, 6), (6, 10), (4, 10)))
    half = np.ones((4, 5), np.float32)
    for wrong in (a[:, ::2], b[:3], out), (a, b[:, ::2], half), (a, b[:, :5], half), (a, b, out.T):
        with pytest.raises(AssertionError, match="sgemm"):
            mc.add_product(*wrong)
