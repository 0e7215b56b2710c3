"""EM routing and votes: against slow literal loops and by hand; every gradient against centered differences."""
import math
from types import SimpleNamespace

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
import reference_smallnorb as literal
from gradcheck import SMOOTH, check_directions, check_op

P, D = sn.P, sn.D
WINDOWS = {"class": None, "conv": sn.Window(1, 5, 5, 1, 2), "conv2": sn.Window(1, 4, 4, 1, 1)}      # 2x2 parents


def some_votes(rng, L, J, I, scale=1.0):
    """Votes (L, J, I, D), activations of the children (L, I), betas (2, J)"""
    return scale * rng.standard_normal((L, J, I, D)), rng.random((L, I)), rng.standard_normal((2, J))


def joined(*arrays):
    return np.concatenate([a.ravel() for a in arrays])


def parted(dout, *shapes):
    """The reverse of joined"""
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(dout, ends[:-1]), shapes, strict=True)]


def of_votes(term, V):
    """The gradient dV that a term (coefficient, linear, quadratic) stands for"""
    coefficient, linear, quadratic = term
    return coefficient[..., None] * (linear[:, :, None] + 2 * V * quadratic[:, :, None])


@pytest.fixture
def exact(monkeypatch):
    """The mass without the small number that keeps a parent without children finite"""
    monkeypatch.setattr(sn, "MASS_EPS", 0.0)


@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_em_routing_of_class_capsules_by_loops(exact, rng, n_iters):
    N, J, I = 2, 3, 6
    V, a, (beta_u, beta_a) = some_votes(rng, N, J, I, 0.4)
    (mu, x), cache = sn.em_routing_forward(V, a, beta_u, beta_a, n_iters, 0.3)
    for n in range(N):
        votes = [{(j,): V[n, j, i] for j in range(J)} for i in range(I)]
        expected_mu, expected_sigma2, expected_x, R = literal.em_reference(votes, a[n], beta_u, beta_a, n_iters, 0.3)
        for j in range(J):
            np.testing.assert_allclose(mu[n, j], expected_mu[j,], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(x[n, j], expected_x[j,], rtol=1e-5)
            np.testing.assert_allclose(cache.steps[-1].sigma2[n, j], expected_sigma2[j,], rtol=1e-4)
        for step, expected_R in zip(cache.steps, R, strict=True):
            expected_R = [[of_child[j,] for of_child in expected_R] for j in range(J)]
            np.testing.assert_allclose(np.broadcast_to(step.R, (N, J, I))[n], expected_R, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("side, stride, n_iters", [(5, 2, 3), (6, 2, 1), (7, 2, 2), (4, 1, 3), (5, 1, 2)])
def test_convolutional_capsules_by_loops(exact, rng, side, stride, n_iters):
    """Children compete over all parents at all positions that see them; matrices are shared across positions; stride 2
    or 1. R of every child sums to one and starts uniform."""
    B, J, n = 2, 3, (side - 3) // stride + 1
    pose, active = rng.standard_normal((1, side, side, B, D)), rng.random((1, side, side, B))
    W, betas = 0.5 * rng.standard_normal((9 * B, J, P, P)), rng.standard_normal((2, J))
    (mu, act), cache = sn.conv_caps_forward(pose, active, W, *betas, n_iters, stride)
    votes, a = literal.conv_votes(pose[0], active[0], W, stride)
    expected_mu, expected_sigma2, expected_x, R = literal.em_reference(votes, a, *betas, n_iters)
    steps = cache[2].steps
    assert mu.shape == (1, n, n, J, D) and len(expected_mu) == n ** 2 * J
    for (py, px, j), expected in expected_mu.items():
        np.testing.assert_allclose(mu[0, py, px, j], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(act[0, py, px, j], literal.logistic(expected_x[py, px, j]), rtol=1e-5)
        np.testing.assert_allclose(steps[-1].sigma2[py * n + px, j], expected_sigma2[py, px, j], rtol=1e-4)
    seen = stride * (n - 1) + 3                                           # rows and columns that any parent sees
    for step, expected in zip(steps, R, strict=True):
        got, total = np.broadcast_to(step.R, (n ** 2, J, 9 * B)), np.zeros((side, side, B))
        for (py, px, j, ky, kx, b), value in zip(np.ndindex(n, n, J, 3, 3, B), got.ravel()):
            y, x = stride * py + ky, stride * px + kx
            assert value == pytest.approx(expected[(y * side + x) * B + b][py, px, j], rel=1e-3, abs=1e-9)
            total[y, x, b] += value
        np.testing.assert_allclose(total[:seen, :seen], 1, rtol=1e-9)
    first = np.broadcast_to(steps[0].R, (n ** 2, J, 9 * B)).reshape(n, n, J, 3, 3, B)
    along = [min(k // stride + 1, n) for k in range(3)]              # rows of positions that see row k
    for ky, kx in np.ndindex(3, 3):
        np.testing.assert_allclose(first[0, 0, :, ky, kx], 1 / (J * along[ky] * along[kx]))


def test_m_step_by_hand():
    """Two children with activations 1 and 1/2, votes 1 and 4: mass 1.5, mean 2, variance (1 + 2) / 1.5 = 2"""
    V = np.broadcast_to([[1.0], [4.0]], (1, 1, 2, D))
    (mu, sigma2, x), _ = sn.m_step_forward(
        V, np.array([[[1.0, 0.5]]]), np.array([0.3]), np.array([0.7]), lambda_=0.1, ratio=0.5)
    np.testing.assert_allclose(mu, 2, rtol=1e-6)
    np.testing.assert_allclose(sigma2, 2 + 5e-4, rtol=1e-6)
    cost = 16 * (0.3 + math.log(math.sqrt(2.0005))) * 1.5 * 0.5
    np.testing.assert_allclose(x, 0.7 - 0.1 * cost, rtol=1e-5)
    (mu, _, _), _ = sn.m_step_forward(V, np.full((1, 1, 2), sn.MASS_EPS / 2), np.zeros(1), np.zeros(1), 0.1, 0.5)
    np.testing.assert_allclose(mu, 2.5 / 2)                               # next to no mass: half of it is the epsilon's


def test_equal_votes_have_the_variance_of_the_floor():
    """and the cost 16 (beta_u + log sqrt(5e-4)) x mass"""
    V, r = np.full((1, 1, 3, D), 0.7), np.array([[[0.5, 0.25, 0.25]]])
    (mu, sigma2, x), _ = sn.m_step_forward(V, r, np.array([0.4]), np.array([0.3]), lambda_=0.2, ratio=0.5)
    np.testing.assert_allclose(mu, 0.7, rtol=1e-6)
    np.testing.assert_allclose(sigma2, 5e-4, rtol=1e-4)
    assert x[0, 0] == pytest.approx(0.3 - 0.2 * 16 * (0.4 + 0.5 * math.log(5e-4)) * 0.5, rel=1e-4)


def test_e_step_by_hand():
    """A vote one sigma away from parent 0 in one dimension, two from parent 1; unlike activations and variances"""
    V = np.zeros((1, 2, 1, D))
    V[..., 0] = 3
    mu, sigma2, x = np.zeros((1, 2, D)), np.ones((1, 2, D)), np.array([[0.0, math.log(3)]])    # activations 1/2, 3/4
    mu[0, :, 0], sigma2[0, :, 0] = (1, 2), (4, 0.25)
    logits, _ = sn.e_step_forward(V, mu, sigma2, x)
    expected = [math.log(0.5) - 0.5 - math.log(2), math.log(0.75) - 2 - math.log(0.5)]
    np.testing.assert_allclose(logits[0, :, 0], expected, rtol=1e-12)


def test_a_capsule_with_its_share_of_children_starts_with_an_activation_of_one_half():
    """Each active child divides itself evenly; their votes scatter with a standard deviation of 1/e"""
    I, J, sign = 4, 2, np.array([1.0, -1.0, 1.0, -1.0])
    V = np.broadcast_to(math.sqrt(math.exp(-2) - 5e-4) * sign[:, None], (1, J, I, D))
    betas = np.full(J, sn.BETA_U), np.full(J, sn.BETA_A)
    (_, x), _ = sn.em_routing_forward(V, np.ones((1, I)), *betas, 1)
    np.testing.assert_allclose(x, 0, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extremes_stay_finite(rng, dtype):
    """Huge poses, equal poses, all children off, one child on: no nan and no inf, forward and backward"""
    side, B, J = 5, 2, 3
    W, betas = rng.standard_normal((9 * B, J, P, P)).astype(dtype), np.zeros((2, J), dtype)
    one, shape = np.zeros((1, side, side, B)), (1, side, side, B, D)
    one[0, 2, 2, 1] = 1
    for pose in (1e4 * rng.standard_normal(shape), np.ones(shape), np.zeros(shape)):
        for active in (one, 0 * one, 1 + 0 * one, 1e-30 + 0 * one):
            (mu, a), cache = sn.conv_caps_forward(pose.astype(dtype), active.astype(dtype), W, *betas, 3, 2)
            grads = sn.conv_caps_backward(np.ones_like(mu), np.ones_like(a), cache)
            assert all(np.isfinite(g).all() and g.dtype == dtype for g in (mu, a, *grads))
            assert a.min() >= 0 and a.max() <= 1


def test_shared_votes_and_positions_by_hand(rng):
    """Of two types at three positions; each capsule's length times its position's x and y is added"""
    u, W = rng.standard_normal((2, 6, 3)), rng.standard_normal((2, 3, 4, 5))
    u_hat, _ = sn.votes_forward(u, W)
    assert u_hat.shape == (2, 4, 6, 5)
    for n, place, b, j in np.ndindex(2, 3, 2, 4):
        np.testing.assert_allclose(u_hat[n, j, 2 * place + b], u[n, 2 * place + b] @ W[b, :, j], rtol=1e-12)
    u = np.array([[[3.0, 4.0], [0.0, 2.0], [6.0, 8.0], [0.0, 0.0]]])
    placed, _ = sn.add_coordinates_forward(u, np.array([[0.1, -0.2], [0.5, 0.3]]))
    np.testing.assert_allclose(placed[0], [[3, 4, 0.5, -1], [0, 2, 0.2, -0.4], [6, 8, 5, 3], [0, 0, 0, 0]], atol=1e-4)


def test_votes_and_responsibilities(rng):
    check_op(sn.pose_votes_forward, sn.pose_votes_backward, rng.standard_normal((2, 3, D)),
             rng.standard_normal((2, 3, P, P)))
    for window, L, I in ((None, 3, 5), (sn.Window(1, 5, 5, 2, 2), 4, 18), (sn.Window(1, 4, 4, 2, 1), 4, 18)):
        check_op(lambda x, window=window: sn.responsibilities_forward(x, window), sn.responsibilities_backward,
                 rng.standard_normal((L, 2, I)))
    centers = rng.standard_normal((3, 2))
    check_op(lambda u: sn.add_coordinates_forward(u, centers), sn.add_coordinates_backward,
             rng.standard_normal((2, 6, 4)))
    for B in 2, 6:
        check_op(sn.votes_forward, sn.votes_backward, rng.standard_normal((2, 6, 3)),
                 rng.standard_normal((B, 3, 4, 5)))


def check_m_step(rng, types):
    """Check the gradients of an M-step: mu, sigma2 and x together, as functions of votes, assignments
    and betas. types: of the parents, 3, or 1 if assignments are the same for all of them. Return
    sigma2"""
    L, J, I = 2, 3, 4
    args = (rng.standard_normal((L, J, I, D)), rng.uniform(0.2, 1, (L, types, I)),
            rng.standard_normal(J), rng.standard_normal(J))

    def forward(V, r, beta_u, beta_a):
        out, cache = sn.m_step_forward(V, r, beta_u, beta_a, 2.0, 0.6)
        return joined(*out), SimpleNamespace(V=V, m_step=cache)

    def backward(dout, cache):
        term, dr, dbeta_u, dbeta_a = sn.m_step_backward(*parted(dout, (L, J, D), (L, J, D), (L, J)), cache.m_step)
        return of_votes(term, cache.V), dr, dbeta_u, dbeta_a
    check_op(forward, backward, *args, tol=10 * SMOOTH)
    return sn.m_step_forward(*args, 2.0, 0.6)[0][1]


@pytest.mark.parametrize("types", [3, 1])
def test_m_step(rng, types):
    check_m_step(rng, types)


@pytest.mark.parametrize("types", [3, 1])
def test_m_step_where_a_variance_is_at_its_floor(rng, types, monkeypatch):
    """Of 6 dimensions the variance comes out negative, as rounding makes it where all votes are equal:
    sigma2 stays at its floor, and no gradient flows through it"""
    lowered, sums = np.where(np.arange(D) % 3, 0.0, 99.0), sn.sum_over_children
    monkeypatch.setattr(sn, "sum_over_children",
                        lambda r, V: sums(r, V) - np.array([[[0 * lowered]], [[lowered]]]))
    sigma2 = check_m_step(rng, types)
    assert np.all((sigma2 == sn.SIGMA2_EPS) == (lowered > 0))


def test_e_step(rng):
    L, J, I = 2, 3, 4

    def forward(V, mu, sigma2, x):
        logits, cache = sn.e_step_forward(V, mu, sigma2, x)
        return logits, SimpleNamespace(V=V, e_step=cache)

    def backward(dout, cache):
        term, dmu, dsigma2, dx = sn.e_step_backward(dout, cache.e_step)
        return of_votes(term, cache.V), dmu, dsigma2, dx
    check_op(forward, backward, rng.standard_normal((L, J, I, D)), rng.standard_normal((L, J, D)),
             rng.uniform(0.3, 2, (L, J, D)), rng.standard_normal((L, J)), tol=10 * SMOOTH)


@pytest.mark.parametrize("of, n_iters, layer", [
    ("mu", 1, "class"), ("x", 1, "class"), ("mu", 2, "class"), ("both", 3, "class"), ("both", 2, "conv"),
    ("x", 2, "conv2")])
def test_em_routing(rng, of, n_iters, layer):
    """Through all iterations: votes, lower activations and both betas, which have no influence on the first mu"""
    window = WINDOWS[layer]
    L, J, I = (4, 2, 9) if window else (2, 3, 4)
    weights = of != "x", of != "mu"
    args = (rng.standard_normal((L, J, I, D)), rng.uniform(0.2, 1, (L, I)), *0.1 * rng.standard_normal((2, J)))
    n = 2 if (of, n_iters) == ("mu", 1) else 4

    def forward(*moved):
        (mu, x), cache = sn.em_routing_forward(*moved, *args[len(moved):], n_iters, 1.0, window)
        return joined(weights[0] * mu, weights[1] * x), cache

    def backward(dout, cache):
        dmu, dx = parted(dout, (L, J, D), (L, J))
        grads = sn.em_routing_backward(weights[0] * dmu, weights[1] * dx, cache)
        assert not any(g.any() for g in grads[n:])
        return grads[:n]
    check_op(forward, backward, *args[:n], tol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blocks_of_votes_do_not_change_the_bits(rng, dtype, monkeypatch):
    """One position at a time, three, so that the last block is smaller, or all at once, there and back"""
    N, B, J = 2, 2, 3
    args = [a.astype(dtype) for a in (rng.standard_normal((N, 5, 6, B, D)), rng.uniform(0.2, 1, (N, 5, 6, B)),
                                      rng.standard_normal((9 * B, J, P, P)), *0.1 * rng.standard_normal((2, J)))]
    found = []
    for positions in 1, 3, 1000:
        monkeypatch.setattr(sn, "BLOCK", positions * J * 9 * B * D)
        (mu, a), cache = sn.conv_caps_forward(*args, 3, 1)
        found.append((mu, a, *sn.conv_caps_backward(mu, a, cache)))
    for one in found[1:]:
        assert all(np.array_equal(x, y) for x, y in zip(one, found[0], strict=True))


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutional_capsules(rng, stride):
    """Several positions and types, three images, a row that nobody sees; in random directions"""
    N, H, W, B, J = 3, 6, 5, 2, 3
    Ho, Wo = sn.Window(N, H, W, B, stride).parents
    assert (Ho, Wo) == ((4, 3) if stride == 1 else (2, 2))

    def forward(p):
        (mu, a), cache = sn.conv_caps_forward(*p.values(), 3, stride)
        return joined(mu, a), cache
    params = dict(pose=rng.standard_normal((N, H, W, B, D)), active=rng.uniform(0.2, 1, (N, H, W, B)),
                  W=rng.standard_normal((9 * B, J, P, P)), beta_u=0.1 * rng.standard_normal(J),
                  beta_a=0.1 * rng.standard_normal(J))
    out, cache = forward(params)
    dout = rng.standard_normal(out.shape)
    grads = sn.conv_caps_backward(*parted(dout, (N, Ho, Wo, J, D), (N, Ho, Wo, J)), cache)
    check_directions(lambda p: np.vdot(dout, forward(p)[0]), params, dict(zip(params, grads)), tol=1e-5)


def test_primary_capsules(rng):
    N, H, W, B = 2, 2, 3, 2

    def forward(x):
        out, cache = sn.primary_caps_forward(x)
        return joined(*out), cache

    def backward(dout, cache):
        return sn.primary_caps_backward(*parted(dout, (N, H, W, B, D), (N, H, W, B)), cache)
    check_op(forward, backward, rng.standard_normal((N, H, W, B * (D + 1))))
    (pose, active), _ = sn.primary_caps_forward(np.zeros((N, H, W, 16 * (D + 1))))
    assert (pose.shape, active.shape) == ((N, H, W, 16, D), (N, H, W, 16))
