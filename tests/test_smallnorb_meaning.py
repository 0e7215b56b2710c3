"""What the formulas of the capsule networks and their CNNs mean: against slow literal loops and values worked out by
hand."""
import dataclasses
import math
from types import SimpleNamespace

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
import reference_smallnorb as literal
from reference_smallnorb import CAPSULES, CNNS, TRAINED, batch64, outputs, params64, state64, tiny

import visualize_smallnorb_novel_viewpoint as looks

P, D = sn.P, sn.D
SIDES = {"caps": {"conv1": 14, "primary": 14}, "cnn": {}, "gap": {"conv5": 3}, "dense": {"fc1": 1}}
SIDES |= {model: {"conv1": 30, "conv2": 28, "conv3": 12, "conv4": 10} | SIDES.get(model, {"primary": 5})
          for model in sn.HEADS}                                     # places that each normalisation sees, on an axis


def some_votes(rng, L, J, I, scale=1.0):
    """Votes (L, J, I, D), activations of the children (L, I), betas (2, J)"""
    return scale * rng.standard_normal((L, J, I, D)), rng.random((L, I)), rng.standard_normal((2, J))


@pytest.fixture
def exact(monkeypatch):
    """The mass without the small number that keeps a parent without children finite"""
    monkeypatch.setattr(sn, "MASS_EPS", 0.0)


# ---------------------------------------------------------------- EM routing

@pytest.mark.parametrize("iterations, schedule", [(1, "constant"), (2, "constant"), (3, "constant"), (5, "constant"),
                                                  (1, "official"), (3, "official")])
def test_em_routing_of_class_capsules_by_loops(exact, rng, iterations, schedule):
    N, J, I = 2, 3, 6
    config = tiny(routing_iters=iterations, final_lambda=0.3, lambda_schedule=schedule)
    V, a, (beta_u, beta_a) = some_votes(rng, N, J, I, 0.4)
    (mu, x), cache = sn.em_routing_forward(V, a, beta_u, beta_a, config)
    assert len(cache.steps) == iterations
    for n in range(N):
        votes = [{(j,): V[n, j, i] for j in range(J)} for i in range(I)]
        expected_mu, expected_sigma2, expected_x, R = literal.em_reference(votes, a[n], beta_u, beta_a, config)
        for j in range(J):
            np.testing.assert_allclose(mu[n, j], expected_mu[j,], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(x[n, j], expected_x[j,], rtol=1e-5)
            np.testing.assert_allclose(cache.steps[-1].sigma2[n, j], expected_sigma2[j,], rtol=1e-4)
        for step, expected_R in zip(cache.steps, R, strict=True):
            expected_R = [[of_child[j,] for of_child in expected_R] for j in range(J)]
            np.testing.assert_allclose(np.broadcast_to(step.R, (N, J, I))[n], expected_R, rtol=1e-4, atol=1e-12)


@pytest.fixture
def routings(monkeypatch):
    """Every call of em_routing_forward while a network runs -> list of its V, a and steps"""
    calls, original = [], sn.em_routing_forward

    def spy(V, a, *args, **kwargs):
        votes, active = V.copy(), a.copy()
        out, cache = original(V, a, *args, **kwargs)
        calls.append(SimpleNamespace(V=votes, a=active, steps=cache.steps))
        return out, cache

    monkeypatch.setattr(sn, "em_routing_forward", spy)
    return calls


@pytest.mark.parametrize("side, stride, iterations", [(5, 2, 3), (6, 2, 1), (6, 2, 2), (6, 2, 3), (7, 2, 3), (4, 1, 1),
                                                      (4, 1, 3), (5, 1, 2), (6, 1, 3)])
def test_convolutional_capsules_by_loops(exact, rng, routings, side, stride, iterations):
    """Children compete over all parents at all places that see them; matrices shared over places; 3x3, stride 2 or 1.
    R of every child sums to one and starts uniform."""
    B, J, places = 2, 3, (side - 3) // stride + 1
    config = tiny(routing_iters=iterations, final_lambda=0.4)
    pose, active = rng.standard_normal((1, side, side, B, D)), rng.random((1, side, side, B))
    W, betas = 0.5 * rng.standard_normal((9 * B, J, P, P)), rng.standard_normal((2, J))
    (mu, act), _ = sn.conv_caps_forward(pose, active, W, *betas, config, stride)
    votes, a = literal.conv_votes(pose[0], active[0], W, stride)
    expected_mu, expected_sigma2, expected_x, R = literal.em_reference(votes, a, *betas, config)
    steps = routings[0].steps
    assert len(routings) == 1 and mu.shape == (1, places, places, J, D) and len(expected_mu) == places ** 2 * J
    for (py, px, j), expected in expected_mu.items():
        np.testing.assert_allclose(mu[0, py, px, j], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(act[0, py, px, j], 1 / (1 + math.exp(-expected_x[py, px, j])), rtol=1e-5)
        np.testing.assert_allclose(steps[-1].sigma2[py * places + px, j], expected_sigma2[py, px, j], rtol=1e-4)
    seen = stride * (places - 1) + 3                                      # rows and columns that any parent sees
    for step, expected in zip(steps, R, strict=True):
        got, total = np.broadcast_to(step.R, (places ** 2, J, 9 * B)), np.zeros((side, side, B))
        for (py, px, j, ky, kx, b), value in zip(np.ndindex(places, places, J, 3, 3, B), got.ravel()):
            y, x = stride * py + ky, stride * px + kx
            assert value == pytest.approx(expected[(y * side + x) * B + b][py, px, j], rel=1e-3, abs=1e-9)
            total[y, x, b] += value
        np.testing.assert_allclose(total[:seen, :seen], 1, rtol=1e-9)
        assert not total[seen:].any() and not total[:, seen:].any()
    first = np.broadcast_to(steps[0].R, (places ** 2, J, 9 * B)).reshape(places, places, J, 3, 3, B)
    along = [min(k // stride + 1, places) for k in range(3)]              # rows of places that see row k
    for ky, kx in np.ndindex(3, 3):
        np.testing.assert_allclose(first[0, 0, :, ky, kx], 1 / (J * along[ky] * along[kx]))


@pytest.mark.parametrize("stride", [1, 2])
def test_images_are_routed_alone(rng, stride):
    """More images than a chunk, and each with the result that it has alone"""
    config, N = tiny(routing_iters=3), sn.EM_CHUNK + 2
    pose, active = rng.standard_normal((N, 7, 7, 2, D)), rng.random((N, 7, 7, 2))
    W, beta = rng.standard_normal((18, 3, P, P)), rng.standard_normal((2, 3))
    (mu, a), _ = sn.conv_caps_forward(pose, active, W, *beta, config, stride)
    for n in range(N):
        (mu1, a1), _ = sn.conv_caps_forward(pose[n:n + 1], active[n:n + 1], W, *beta, config, stride)
        np.testing.assert_allclose(mu[n], mu1[0], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(a[n], a1[0], rtol=1e-9)


def test_m_step_by_hand():
    """Two children with activations 1 and 1/2, votes 1 and 4: mass 1.5, mean 2, variance (1 + 2) / 1.5 = 2"""
    V = np.broadcast_to([[1.0], [4.0]], (1, 1, 2, D))
    (mu, sigma2, x), _ = sn.m_step_forward(
        V, V * V, np.array([[[1.0, 0.5]]]), np.array([0.3]), np.array([0.7]), lambda_=0.1, ratio=0.5)
    np.testing.assert_allclose(mu, 2, rtol=1e-6)
    np.testing.assert_allclose(sigma2, 2 + 5e-4, rtol=1e-6)
    cost = 16 * (0.3 + math.log(math.sqrt(2.0005))) * 1.5 * 0.5
    np.testing.assert_allclose(x, 0.7 - 0.1 * cost, rtol=1e-5)


def test_equal_votes_have_the_variance_of_the_floor():
    """and the cost 16 (beta_u + log sqrt(5e-4)) x mass"""
    V, r = np.full((1, 1, 3, D), 0.7), np.array([[[0.5, 0.25, 0.25]]])
    (mu, sigma2, x), _ = sn.m_step_forward(V, V * V, r, np.array([0.4]), np.array([0.3]), lambda_=0.2, ratio=0.5)
    np.testing.assert_allclose(mu, 0.7, rtol=1e-6)
    np.testing.assert_allclose(sigma2, 5e-4, rtol=1e-4)
    assert x[0, 0] == pytest.approx(0.3 - 0.2 * 16 * (0.4 + 0.5 * math.log(5e-4)) * 0.5, rel=1e-4)


def test_e_step_by_hand():
    """A vote one sigma away from parent 0 in one dimension, two from parent 1; unlike activations and variances"""
    V = np.zeros((1, 2, 1, D))
    V[..., 0] = 3
    mu, sigma2, x = np.zeros((1, 2, D)), np.ones((1, 2, D)), np.array([[0.0, math.log(3)]])    # activations 1/2, 3/4
    mu[0, :, 0], sigma2[0, :, 0] = (1, 2), (4, 0.25)
    logits, _ = sn.e_step_forward(V, V * V, mu, sigma2, x)
    expected = [math.log(0.5) - 0.5 - math.log(2), math.log(0.75) - 2 - math.log(0.5)]
    np.testing.assert_allclose(logits[0, :, 0], expected, rtol=1e-12)


def test_lambda_schedule():
    official = tiny(final_lambda=0.01, lambda_schedule="official")
    assert [round(sn.inverse_temperature(t, official), 8) for t in range(3)] == [0.0005, 0.000975, 0.00142625]
    assert [sn.inverse_temperature(t, tiny(final_lambda=0.3)) for t in range(3)] == [0.3] * 3
    assert sn.Config().lambda_schedule == "constant"


def test_a_capsule_with_its_share_of_children_is_half_on_at_first():
    """Each child that is on divides itself evenly; their votes scatter with a standard deviation of 1/e"""
    I, J, sign = 4, 2, np.array([1.0, -1.0, 1.0, -1.0])
    V = np.broadcast_to(math.sqrt(math.exp(-2) - 5e-4) * sign[:, None], (1, J, I, D))
    betas = np.full(J, sn.BETA_U), np.full(J, sn.BETA_A)
    (_, x), _ = sn.em_routing_forward(V, np.ones((1, I)), *betas, sn.Config(routing_iters=1))
    np.testing.assert_allclose(x, 0, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_responsibilities_sum_to_one_over_a_childs_parents(rng, stride):
    N, H, B, J = 2, 6, 2, 3
    window = sn.Window(N, H, H, B, stride=stride)
    places = 4 // stride
    assert window.parents == (places, places) and sn.Window(N, H, H, B).stride == 2
    logits = 5 * rng.standard_normal((N * places ** 2, J, 9 * B))
    R, _ = sn.responsibilities_forward(logits, window)
    total, seen = np.zeros((N, H, H, B)), np.zeros((N, H, H, B), int)
    for n, py, px in np.ndindex(N, places, places):
        for k, (ky, kx, b) in enumerate(np.ndindex(3, 3, B)):
            at = n, stride * py + ky, stride * px + kx, b
            total[at] += R[(n * places + py) * places + px, :, k].sum()
            seen[at] += 1
    np.testing.assert_allclose(total[seen > 0], 1, rtol=1e-12)
    assert (seen[:, 2, 2] == (4 if stride == 2 else 9)).all() and (seen[:, 0, 0] == 1).all()
    assert (seen[:, 5] == 0).all() == (stride == 2)
    R, _ = sn.responsibilities_forward(logits, None)
    np.testing.assert_allclose(R.sum(1), 1, rtol=1e-12)


@pytest.mark.parametrize("combine, start", [(np.add, 0.0), (np.maximum, -np.inf)])
def test_combining_over_places_by_loops(rng, combine, start):
    """What a child holds at all the places that see it is combined, and every one of its copies gets the result"""
    N, H, W, B = 2, 7, 6, 2
    window = sn.Window(N, H, W, B)
    x = rng.standard_normal((N * 3 * 2, 9 * B))
    kept, children = x.copy(), {}
    names = list(np.ndindex(N, 3, 2))
    for place, (n, py, px) in enumerate(names):
        for k, (ky, kx, b) in enumerate(np.ndindex(3, 3, B)):
            child = n, 2 * py + ky, 2 * px + kx, b
            children[child] = combine(children.get(child, start), x[place, k])
    out = sn.combine_over_places(x, window, combine)
    assert np.array_equal(x, kept)
    for place, (n, py, px) in enumerate(names):
        expected = [children[n, 2 * py + ky, 2 * px + kx, b] for ky, kx, b in np.ndindex(3, 3, B)]
        np.testing.assert_allclose(out[place], expected, rtol=1e-12)
    assert np.array_equal(sn.combine_over_places(x, None, combine), x)


def test_permuting_parents_or_children_permutes_the_result(rng):
    config = tiny(routing_iters=3, final_lambda=1.0)
    V, a, beta = some_votes(rng, 3, 4, 5)
    (mu, x), _ = sn.em_routing_forward(V, a, *beta, config)
    order = rng.permutation(4)
    (mu2, x2), _ = sn.em_routing_forward(V[:, order], a, *beta[:, order], config)
    np.testing.assert_allclose(mu2, mu[:, order], rtol=1e-9)
    np.testing.assert_allclose(x2, x[:, order], rtol=1e-9)
    order = rng.permutation(5)
    (mu2, x2), _ = sn.em_routing_forward(V[:, :, order], a[:, order], *beta, config)
    np.testing.assert_allclose(mu2, mu, rtol=1e-9)
    np.testing.assert_allclose(x2, x, rtol=1e-9)


def test_twice_the_children_change_nothing(exact, rng):
    """The mass is normalised by parents / children: every child doubled is the same layer"""
    V, a, betas = some_votes(rng, 2, 3, 6, 0.5)
    config = tiny(routing_iters=3, final_lambda=2.0)
    once, _ = sn.em_routing_forward(V, a, *betas, config)
    twice, _ = sn.em_routing_forward(np.concatenate([V, V], 2), np.concatenate([a, a], 1), *betas, config)
    for x, y in zip(once, twice):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def test_agreement_wins(rng):
    """Children whose votes agree for one parent and scatter for the other are assigned to the first, and activate it"""
    V = rng.standard_normal((1, 2, 12, D))
    V[:, 0] = 0.5 + 0.01 * rng.standard_normal((1, 12, D))
    config = tiny(routing_iters=3, final_lambda=1.0)
    (mu, x), cache = sn.em_routing_forward(V, np.ones((1, 12)), np.zeros(2), np.zeros(2), config)
    assert x[0, 0] > 3 > x[0, 1] and cache.steps[-1].R[0, 0].min() > 0.99
    np.testing.assert_allclose(mu[0, 0], 0.5, atol=0.02)


def test_a_child_that_is_off_has_no_say(rng):
    V, a, betas = some_votes(rng, 2, 3, 6)
    a[:, 4], other = 0, V.copy()
    other[:, :, 4] = 50 * rng.standard_normal((2, 3, D))
    config = tiny(routing_iters=3)
    for one, two in zip(*(sn.em_routing_forward(votes, a, *betas, config)[0] for votes in (V, other))):
        np.testing.assert_allclose(one, two, rtol=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "official"])
def test_a_capsule_without_active_children_is_as_active_as_beta_a_says(rng, schedule):
    """Off at first, whatever the votes, lambda and beta_u are"""
    config = tiny(routing_iters=2, final_lambda=2.0, lambda_schedule=schedule)
    for scale in 1e-3, 1.0, 100.0:
        V, a, betas = some_votes(rng, 2, 3, 6, scale)
        (mu, x), _ = sn.em_routing_forward(V, 0 * a, *betas, config)
        np.testing.assert_allclose(mu, 0, atol=1e-12)
        np.testing.assert_allclose(x, np.broadcast_to(betas[1], (2, 3)), atol=1e-4)
    params = sn.init_params(sn.Config())
    assert all(sn.sigmoid_forward(p)[0].max() < 0.12 for name, p in params.items() if name.endswith("_beta_a"))


def test_what_a_class_says_hangs_on_how_its_votes_scatter_not_on_where_they_are(exact, rng):
    V, a, betas = some_votes(rng, 2, 3, 6, 0.5)
    where, config = rng.standard_normal((1, 3, 1, D)), tiny(routing_iters=3)
    (mu, x), _ = sn.em_routing_forward(V, a, *betas, config)
    (moved_mu, moved_x), _ = sn.em_routing_forward(V + where, a, *betas, config)
    np.testing.assert_allclose(moved_x, x, rtol=1e-5)
    np.testing.assert_allclose(moved_mu, mu + where[:, :, 0], atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extremes_stay_finite(rng, dtype):
    L, J, I = 2, 3, 4
    config, betas = tiny(routing_iters=3, final_lambda=1.0), np.zeros((2, J), dtype)
    for V in (np.zeros((L, J, I, D)), np.full((L, J, I, D), 7.0), 1e3 * rng.standard_normal((L, J, I, D))):
        for a in (np.zeros((L, I)), np.ones((L, I)), np.eye(L, I)):
            (mu, x), cache = sn.em_routing_forward(V.astype(dtype), a.astype(dtype), *betas, config)
            grads = sn.em_routing_backward(np.ones_like(mu), np.ones_like(x), cache)
            assert all(np.isfinite(found).all() and found.dtype == dtype for found in (mu, x, *grads))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("final_lambda", [0.01, 100.0])
def test_extreme_convolutional_capsules_stay_finite(rng, dtype, final_lambda):
    """Huge poses, equal poses, all children off, one child on: no nan and no inf, forward and backward"""
    side, B, J = 5, 2, 3
    config = tiny(routing_iters=3, final_lambda=final_lambda)
    W, betas = rng.standard_normal((9 * B, J, P, P)).astype(dtype), np.zeros((2, J), dtype)
    one, shape = np.zeros((1, side, side, B)), (1, side, side, B, D)
    one[0, 2, 2, 1] = 1
    for pose in (1e4 * rng.standard_normal(shape), np.ones(shape), np.zeros(shape)):
        for active in (one, 0 * one, 1 + 0 * one, 1e-30 + 0 * one):
            (mu, a), cache = sn.conv_caps_forward(pose.astype(dtype), active.astype(dtype), W, *betas, config)
            grads = sn.conv_caps_backward(np.ones_like(mu), np.ones_like(a), cache)
            assert all(np.isfinite(g).all() and g.dtype == dtype for g in (mu, a, *grads))
            assert a.min() >= 0 and a.max() <= 1


def test_float32_is_accurate_enough(rng):
    """Variances are differences of squares: for votes of the networks' size float32 must still tell them"""
    V = 1.5 + 0.05 * rng.standard_normal((3, 5, 72, D))
    a, betas = rng.random((3, 72)), 0.1 * rng.standard_normal((2, 5))
    config = tiny(routing_iters=2, final_lambda=1.0)
    double, _ = sn.em_routing_forward(V, a, *betas, config)
    single, _ = sn.em_routing_forward(*(x.astype(np.float32) for x in (V, a, *betas)), config)
    np.testing.assert_allclose(single[0], double[0], rtol=0, atol=1e-3)
    np.testing.assert_allclose(single[1], double[1], rtol=1e-2)


# ---------------------------------------------------------------- votes and children

def test_votes_are_matrix_products(rng):
    G, L, J = 3, 4, 2
    M, W = rng.standard_normal((G, L, D)), rng.standard_normal((G, J, P, P))
    V, _ = sn.pose_votes_forward(M, W)
    for g, n, j in np.ndindex(G, L, J):
        np.testing.assert_allclose(V[g, n, j].reshape(P, P), M[g, n].reshape(P, P) @ W[g, j], rtol=1e-12)


@pytest.mark.parametrize("stride, rows, columns", [(2, 3, 2), (1, 5, 4)])
def test_children_of_every_place_by_loops_and_the_adjoint(rng, stride, rows, columns):
    x = rng.standard_normal((2, 7, 6, 2, 3))
    window = sn.Window(*x.shape[:4], stride=stride)
    cols = sn.im2col_capsules(x, window)
    assert cols.shape == (18, 2 * rows * columns, 3) and window.parents == (rows, columns)
    for k, (ky, kx, b) in enumerate(np.ndindex(3, 3, 2)):
        for place, (n, py, px) in enumerate(np.ndindex(2, rows, columns)):
            np.testing.assert_array_equal(cols[k, place], x[n, stride * py + ky, stride * px + kx, b])
    other = rng.standard_normal(cols.shape)
    assert np.vdot(cols, other) == pytest.approx(np.vdot(x, sn.col2im_capsules(other, window)), rel=1e-12)


def test_places_of_vectors_by_hand():
    """Two types at two places: each capsule's length times its place's x and y"""
    u = np.array([[[3.0, 4.0], [0.0, 2.0], [6.0, 8.0], [0.0, 0.0]]])
    placed, _ = sn.with_places_forward(u, np.array([[0.1, -0.2], [0.5, 0.3]]))
    expected = [[3, 4, 0.5, -1], [0, 2, 0.2, -0.4], [6, 8, 5, 3], [0, 0, 0, 0]]
    np.testing.assert_allclose(placed[0], expected, atol=1e-4)


def test_shared_votes_by_loops(rng):
    u, W = rng.standard_normal((2, 6, 3)), rng.standard_normal((2, 3, 4, 5))              # 3 places x 2 types
    u_hat, _ = sn.shared_votes_forward(u, W, 3)
    assert u_hat.shape == (2, 4, 6, 5)
    for n, place, b, j in np.ndindex(2, 3, 2, 4):
        np.testing.assert_allclose(u_hat[n, j, 2 * place + b], u[n, 2 * place + b] @ W[b, :, j], rtol=1e-12)


# ---------------------------------------------------------------- against literal networks

@pytest.mark.parametrize("model, changes", [
    ("caps", {}), ("caps", dict(routing_iters=1, data="toys")), ("caps", dict(primary_types=2, conv_types=3)),
    ("caps", dict(routing_iters=3, lambda_schedule="official")), ("caps", dict(no_coord_add=True, conv2_types=1)),
    ("em", {}), ("em", dict(routing_iters=3, data="smallnorb", width=3)), ("em", dict(no_coord_add=True)),
    ("em", dict(primary_kernel=3)),
    ("em", dict(routing_iters=1, lambda_schedule="official"))], ids=str)
def test_networks_of_matrix_capsules_against_literal_ones(exact, model, changes):
    """In evaluation, with running statistics; with dropout and without"""
    config = tiny(model, final_lambda=0.1, **changes)
    params, batch = params64(config) | state64(config), batch64(config, 2)
    for mask, n in ((batch["dropout_mask"], 0), (None, 1)):
        out = outputs(params, batch | {"dropout_mask": mask}, config)
        mu, x = literal.em_network_reference(params, batch["images"][n], config, None if mask is None else mask[n])
        np.testing.assert_allclose(out["mu"][n], mu, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(out["scores"][n], x, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(out["a"][n], 1 / (1 + np.exp(-x)), rtol=1e-4)
        assert np.ptp(x) > 1e-3


@pytest.mark.parametrize("model, changes", [
    ("dynamic", {}), ("dynamic", dict(routing_iters=3, data="toys", width=3)), ("dynamic", dict(routing_iters=1)),
    ("dynamic-shared", {}), ("dynamic-shared", dict(routing_iters=3, data="smallnorb", head_types=3)),
    ("dynamic-shared", dict(no_coord_add=True)), ("dynamic-shared", dict(primary_kernel=3, routing_iters=3)),
    ("dynamic", dict(primary_kernel=2)), ("self-routing", dict(primary_kernel=3)), ("self-routing", {}),
    ("self-routing", dict(uniform=True)),
    ("self-routing", dict(no_coord_add=True, width=3, data="toys"))], ids=str)
def test_networks_of_vector_capsules_against_literal_ones(model, changes):
    """Primary capsules in the order (place, type), a matrix for each place or each type, places in proportion to the
    lengths, the couplings of every iteration; in evaluation"""
    config = tiny(model, **changes)
    params, batch = params64(config) | state64(config), batch64(config, 2)
    out = outputs(params, batch, config)
    for n in range(2):
        v, couplings = literal.vector_network_reference(params, batch["images"][n], config)
        np.testing.assert_allclose(out["v"][n], v, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(out["scores"][n], np.sqrt((v * v).sum(1)), rtol=1e-4)
        for c, expected in zip(out["c"], couplings, strict=True):
            c = np.broadcast_to(c, (2, 5, len(expected)))[n]
            np.testing.assert_allclose(c.sum(0), 1, rtol=1e-12)
            np.testing.assert_allclose(c.T, expected, rtol=1e-4)
    if config.routing_iters > 1 and not config.uniform:
        assert np.ptp(out["c"][-1]) > 1e-3


def test_self_routing_without_its_routing_is_dynamic_routing_with_one_iteration():
    """so that one of them is the control of both"""
    one, other = sn.Config(model="self-routing", uniform=True), sn.Config(model="dynamic-shared", routing_iters=1)
    params = sn.init_params(one)
    assert params.keys() == sn.init_params(other).keys()
    assert all(np.array_equal(value, params[name]) for name, value in sn.init_params(other).items())
    samples = {"images": np.random.default_rng(0).standard_normal((4, 32, 32, 2), np.float32),
               "labels": np.arange(4)}
    found = [sn.loss_and_grads(params, samples, config) for config in (one, other)]
    for name, grad in found[0][1].items():
        np.testing.assert_allclose(grad, found[1][1][name], rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("model, changes", [
    *((model, dict(data=data)) for model in CNNS for data in ("shapes", "smallnorb")),
    ("gap", dict(places=True)), ("cnn", dict(preset="paper", width=0))], ids=str)
def test_cnns_against_literal_ones(model, changes):
    """In evaluation; also the paper's with its padding and its 4.2 million weights"""
    config = tiny(model, **changes)
    params, batch = params64(config) | state64(config), batch64(config, 2)
    scores = outputs(params, batch, config)["scores"]
    without = outputs(params, {"images": batch["images"]}, config)["scores"]
    for n in range(2):
        for got, kept in (scores[n], batch["dropout_mask"][n]), (without[n], 1):
            expected = literal.cnn_reference(params, batch["images"][n], config, kept)
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", TRAINED)
@pytest.mark.parametrize("loss", ["xent", "margin", "spread"])
def test_loss_and_hits_by_loops(model, loss):
    """Cross-entropy of log a, of CNNs of the scores; margin and spread loss of a: a length, or a logistic of a score"""
    config = tiny(model, loss=loss)
    params, batch = params64(config), batch64(config, 5)
    terms, *_ = sn.loss_and_grads(params, batch, config)
    scores = outputs(params, batch, config)["scores"]
    expected = hits = 0
    for s, t in zip(scores, batch["labels"]):
        hits += max(range(5), key=lambda j: s[j]) == t
        a = list(s) if model in sn.VECTOR_MODELS else [1 / (1 + math.exp(-x)) for x in s]
        if loss == "margin":
            expected += sum(max(0, 0.9 - a[j]) ** 2 if j == t else 0.5 * max(0, a[j] - 0.1) ** 2 for j in range(5)) / 5
        elif loss == "spread":
            expected += sum(max(0, 0.8 - (a[t] - a[j])) ** 2 for j in range(5) if j != t) / 5
        else:
            odds = a if model in CAPSULES else [math.exp(x) for x in s]
            expected += -math.log(odds[t] / sum(odds)) / 5
    assert terms["loss"] == pytest.approx(expected, rel=1e-12) and terms["hits"] == hits
    assert type(terms["loss"]) is float


@pytest.mark.parametrize("model", sn.EM_MODELS)
def test_responsibilities_of_class_capsules_are_reported_and_sum_to_one(model):
    config = tiny(model, routing_iters=3)
    out = outputs(params64(config), batch64(config, 2), config)
    assert len(out["class_steps"]) == 3
    for step in out["class_steps"]:
        np.testing.assert_allclose(np.broadcast_to(step.R, (2, 5, {"caps": 32, "em": 50}[model])).sum(1), 1, rtol=1e-12)
        assert step.mu.shape == step.sigma2.shape == (2, 5, D) and step.sigma2.min() >= 5e-4
    assert np.all(out["class_steps"][0].R == 0.2) and np.array_equal(out["class_steps"][-1].mu, out["mu"])


@pytest.mark.parametrize("changes", [{}, dict(no_coord_add=True)], ids=str)
def test_self_routing_without_a_say_is_dynamic_routing_of_one_iteration(changes):
    """its control uniform, its start, with no weights for the routing yet, and dynamic-shared, which then is uniform"""
    shared = tiny("dynamic-shared", routing_iters=1, head_types=2, **changes)
    params, batch = params64(shared), batch64(shared, 3)
    v = outputs(params, batch, shared)["v"]
    uniform = outputs(params, batch, tiny("self-routing", uniform=True, **changes))["v"]
    start = outputs(params | {"route_W": np.zeros((2, 8, 5))}, batch, tiny("self-routing", **changes))["v"]
    np.testing.assert_allclose(uniform, v, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(start, v, rtol=1e-9, atol=1e-12)
    assert not sn.init_params(sn.Config(model="self-routing"))["route_W"].any()


def test_one_place_is_the_difference_of_dynamic_and_dynamic_shared():
    """With the same matrix at every place, and no places in the votes, they are one network"""
    shared = tiny("dynamic-shared", no_coord_add=True, routing_iters=3)
    params, batch = params64(shared), batch64(shared, 3)
    everywhere = params | {"W": np.tile(params["W"], (25, 1, 1, 1))}
    v = outputs(everywhere, batch, tiny("dynamic", routing_iters=3))["v"]
    np.testing.assert_allclose(v, outputs(params, batch, shared)["v"], rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- the statistics of a normalisation

@pytest.mark.parametrize("model", TRAINED)
def test_training_uses_the_statistics_of_the_group_given_and_tells_them(model):
    """Evaluation with them, the variances those of all n numbers instead of n - 1, is the same function"""
    config, N = tiny(model), 4
    params, batch = params64(config), batch64(config, N)
    statistics = {}
    trained, _ = sn.forward(params, batch["images"], config, np.empty, None, statistics)
    assert statistics.keys() == {f"{layer}_norm_{end}" for layer in SIDES[model] for end in ("mean", "var")}
    for layer, side in SIDES[model].items():
        n = N * side * side
        statistics[layer + "_norm_var"] = statistics[layer + "_norm_var"] * (n - 1) / n
    evaluated = outputs(params | statistics, {"images": batch["images"]}, config)
    np.testing.assert_allclose(evaluated["scores"], trained["scores"], rtol=1e-9)


@pytest.mark.parametrize("model, stride", [("caps", 2), ("gap", 1)])
def test_statistics_by_numpy(model, stride):
    """Of the first convolution, channel by channel, over all images and places"""
    config = tiny(model)
    params, batch = params64(config), batch64(config, 4)
    _, _, found = sn.loss_and_grads(params, batch, config)
    x = np.stack([literal.conv_reference(image, params["conv1_w"], 0, stride) for image in batch["images"]])
    np.testing.assert_allclose(found["conv1_norm_mean"], x.mean((0, 1, 2)), rtol=1e-9)
    np.testing.assert_allclose(found["conv1_norm_var"], x.var((0, 1, 2), ddof=1), rtol=1e-9)


@pytest.mark.parametrize("model", TRAINED)
def test_an_images_scores_depend_on_its_batch_mates_in_training_only(model):
    config = tiny(model)
    params, batch = params64(config), batch64(config, 6)
    together, trained = (outputs(p, batch, config)["scores"] for p in (params | state64(config), params))
    for n in range(6):
        one = sn.to_batch(batch, slice(n, n + 1), np.float64)
        np.testing.assert_allclose(outputs(params | state64(config), one, config)["scores"][0], together[n], rtol=1e-9)
    fewer = outputs(params, sn.to_batch(batch, slice(0, 5), np.float64), config)["scores"]
    assert (np.abs(fewer - trained[:5]).max() < 1e-12) == (model == "cnn")


# ---------------------------------------------------------------- coordinates and places

def last_poses(params, images, config):
    """Poses of the last layer before the classes, (N, side, side, B, D), in evaluation with one iteration of EM
    routing, in which places do not compete"""
    out, _ = sn.forward(params | state64(config), images, config)
    return out["conv2_mu" if config.model == "caps" else "primary_pose"]


def test_a_pixel_is_seen_by_the_capsules_around_it(rng):
    """It changes just the last convolutional capsules whose field, as plan has its centre, holds the pixel"""
    config = tiny(primary_types=2, conv2_types=3, routing_iters=1)
    params, centres = params64(config), sn.plan(config).centres * 16 + 15.5
    images = rng.random((1, 32, 32, 1))
    before = last_poses(params, images, config)[0]
    for y, x in (15, 4), (3, 20), (24, 24), (11, 12), (28, 0), (29, 8):
        moved = images.copy()
        moved[0, y, x] += 0.5
        changed = (np.abs(last_poses(params, moved, config)[0] - before) > 1e-12).any((2, 3)).ravel()
        assert np.array_equal(changed, (np.abs(centres - (x, y)) <= 8).all(1))


@pytest.mark.parametrize("model, side, size, kernel", [("caps", 4, 17, None), ("em", 5, 16, 1), ("em", 3, 24, 3)])
def test_coordinates_are_the_centres_of_measured_receptive_fields(rng, model, side, size, kernel):
    """Rows, then columns, of some images are changed one by one; which capsules notice? The trunk is the same under all
    heads."""
    own = dict(primary_types=2) if model == "caps" else dict(trunk_channels=4, primary_kernel=kernel)
    config = tiny(model, routing_iters=1, **own)
    params, centres, seen_by = params64(config), sn.plan(config).centres, 0
    for image in rng.random((3, 32, 32, 1)):
        images = np.repeat(image[None], 65, 0)
        for k in range(32):
            images[1 + k, k] += 2 * rng.random((32, 1))                                        # row k
            images[33 + k, :, k] += 2 * rng.random((32, 1))                                    # column k
        poses = last_poses(params, images, config)
        seen_by = seen_by | (np.abs(poses[1:] - poses[0]) > 1e-12).any((3, 4))
    changed = seen_by.reshape(2, 32, side, side)                                      # (row or column, k, place)
    for py, px in np.ndindex(side, side):
        for axis, place in ((0, py), (1, px)):
            seen = np.flatnonzero(changed[axis, :, py, px])
            assert (seen[0], seen[-1]) == literal.field(place, config) and len(seen) == seen[-1] - seen[0] + 1 == size
            assert centres[py * side + px, 1 - axis] == pytest.approx((seen.mean() - 15.5) / 16)    # x is centres[:, 0]
    assert len(centres) == side ** 2 and np.abs(centres).max() < 1
    for other in {"caps": (), "em": sn.VECTOR_MODELS}[model]:
        assert np.array_equal(sn.plan(tiny(other, primary_kernel=kernel)).centres, centres)


@pytest.mark.parametrize("model", sn.EM_MODELS)
def test_coordinates_move_the_mean_vote_by_their_own_mean(rng, model):
    """With one EM iteration: x in row 0, y in row 1 of the right-hand column"""
    config = tiny(model, routing_iters=1)
    params, images = params64(config) | state64(config), rng.random((2, 32, 32, 1))
    with_, without = (sn.forward(params, images, dataclasses.replace(config, no_coord_add=no))[0] for no in (0, 1))
    moved = (with_["mu"] - without["mu"]).reshape(2, 5, P, P)
    active = with_["conv2_a" if model == "caps" else "primary_a"].sum(-1).reshape(2, -1)              # (N, places)
    mean = active / active.sum(1, keepdims=True) @ sn.plan(config).centres
    np.testing.assert_allclose(moved[:, :, :2, 3], np.broadcast_to(mean[:, None], (2, 5, 2)), atol=1e-6)
    moved[:, :, :2, 3] = 0
    np.testing.assert_allclose(moved, 0, atol=1e-9)


@pytest.mark.parametrize("model, side", [("caps", 4), ("em", 5)])
def test_coordinates_are_added_to_the_right_elements_of_every_vote(routings, model, side):
    """The votes themselves: x of the place to row 0, y to row 1 of the right-hand column, of all types alike; nothing
    else"""
    config = tiny(model)
    params, batch = params64(config), batch64(config, 2)
    for no_coord_add in (False, True):
        outputs(params, batch, dataclasses.replace(config, no_coord_add=no_coord_add))
    n = len(routings) // 2
    with_, without = routings[n - 1], routings[-1]
    assert n == {"caps": 3, "em": 1}[model] and with_.V.shape == (2, 5, 2 * side ** 2, D)
    assert model == "em" or [call.V.shape for call in routings[:2]] == [(2 * 36, 2, 9, D), (2 * 16, 2, 18, D)]
    added = (with_.V - without.V).reshape(2, 5, 2, side, side, P, P)                   # image, class, type, row, column
    for py, px in np.ndindex(side, side):
        np.testing.assert_allclose(added[:, :, :, py, px, 0, 3], literal.coordinate(px, config), rtol=0, atol=1e-12)
        np.testing.assert_allclose(added[:, :, :, py, px, 1, 3], literal.coordinate(py, config), rtol=0, atol=1e-12)
    added[..., :2, 3] = 0
    assert np.abs(added).max() < 1e-12


def test_transformation_matrices_of_the_class_capsules_are_shared_over_places(routings):
    """and dropout acts on their children's activations, not on their votes"""
    config = tiny(conv2_types=3, no_coord_add=True)
    params, batch = params64(config), batch64(config, 2)
    out = outputs(params, batch, config)
    V = routings[-1].V.reshape(2, 5, 3, 16, P, P)
    expected = np.einsum("npfab,fjbc->njfpac", out["conv2_mu"].reshape(2, 16, 3, P, P), params["class_W"])
    np.testing.assert_allclose(V, expected, rtol=1e-10, atol=1e-12)
    active = out["conv2_a"].reshape(2, 16, 3).transpose(0, 2, 1).reshape(2, 48)
    np.testing.assert_allclose(routings[-1].a, active * batch["dropout_mask"], rtol=1e-12)


def test_shapes_of_what_forward_says():
    config = tiny(primary_types=3, conv_types=4, data="toys")
    out = outputs(params64(config), batch64(config, 2), config)
    assert {name: out[name].shape for name in out if name != "class_steps"} == {
        "primary_pose": (2, 14, 14, 3, D), "primary_a": (2, 14, 14, 3), "conv_mu": (2, 6, 6, 4, D),
        "conv_a": (2, 6, 6, 4), "conv2_mu": (2, 4, 4, 2, D), "conv2_a": (2, 4, 4, 2), "mu": (2, 5, D), "a": (2, 5),
        "scores": (2, 5)}
    config = tiny("dynamic-shared", head_types=3)
    out = outputs(params64(config), batch64(config, 2), config)
    assert [c.shape for c in out.pop("c")] == [(1, 75), (2, 5, 75)]
    assert {name: x.shape for name, x in out.items()} == {"scores": (2, 5), "v": (2, 5, 16), "u": (2, 75, 8)}
    assert np.linalg.norm(out["u"], axis=-1).max() < 1 and out["scores"].max() < 1


def test_a_moved_image_moves_the_convolutional_capsules(rng):
    """4 px are one place of the first ones. Places inside, where every child has as many parents, keep their capsules
    when one iteration is made."""
    config = tiny(routing_iters=1, primary_types=2)
    params = params64(config) | state64(config)
    big = rng.random((1, 40, 40, 1))
    here, there = (sn.forward(params, big[:, 4:36, k:k + 32], config)[0] for k in (4, 0))
    below = sn.forward(params, big[:, :32, 4:36], config)[0]
    for name in ("conv_mu", "conv_a"):
        here_, right, down = (out[name].reshape(6, 6, 2, -1) for out in (here, there, below))
        np.testing.assert_allclose(right[1:5, 2:5], here_[1:5, 1:4], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(down[2:5, 1:5], here_[1:4, 1:5], rtol=1e-9, atol=1e-12)
        assert np.abs(right[1:5, 1:4] - here_[1:5, 1:4]).max() > 1e-3


@pytest.mark.parametrize("model", ["em", "dynamic-shared"])
def test_a_moved_image_moves_the_primary_capsules_on_the_trunk(rng, model):
    """4 px are one place"""
    config = tiny(model)
    params, big = params64(config) | state64(config), rng.random((1, 36, 36, 1))
    name = {"em": "primary_pose", "dynamic-shared": "u"}[model]
    here, right, down = (sn.forward(params, big[:, y:y + 32, x:x + 32], config)[0][name].reshape(5, 5, -1)
                         for y, x in ((4, 4), (4, 0), (0, 4)))
    np.testing.assert_allclose(right[:, 1:], here[:, :-1], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(down[1:], here[:-1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", TRAINED)
def test_the_order_of_the_classes_does_not_matter(model):
    config, order = tiny(model), [3, 1, 4, 0, 2]
    params, batch = params64(config), batch64(config, 3)
    axis = {"class_W": 1, "class_beta_u": 0, "class_beta_a": 0, "W": 2, "place_W": 1, "route_W": 2}
    last = "fc1" if model == "gap" else "fc2"
    axis |= {last + "_w": 1, last + "_b": 0} if model in CNNS else {}
    permuted = params | {name: np.take(params[name], order, k) for name, k in axis.items() if name in params}
    a, b = (outputs(p, batch, config) for p in (params, permuted))
    for name in {"scores", "mu", "a", "v"} & a.keys():
        np.testing.assert_allclose(b[name], a[name][:, order], rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- losses

def test_spread_loss_by_hand():
    loss, da = sn.spread_loss(np.full((2, 5), 0.4), np.array([1, 3]), 0.2)
    assert abs(loss - 4 * 0.2 ** 2) < 1e-12
    a = np.array([[0.8, 0.5, 0.7, 0.1, 0.1]])
    loss, da = sn.spread_loss(a, np.array([0]), 0.2)                                            # only 0.7 is within 0.2
    assert abs(loss - 0.01) < 1e-12
    np.testing.assert_allclose(da, [[-0.2, 0, 0.2, 0, 0]], atol=1e-12)
    loss, _ = sn.spread_loss(np.tile(a, (2, 1)), np.array([0, 0]), np.array([0.2, 0.4]))        # 0.5 within 0.4 too
    assert abs(loss - (0.1 ** 2 + 0.3 ** 2 + 0.1 ** 2) / 2) < 1e-9


def test_cross_entropy_by_hand():
    loss, dscores = sn.cross_entropy(np.log(np.array([[0.2, 0.3, 0.5]])), np.array([2]))
    assert abs(loss - math.log(2)) < 1e-12
    np.testing.assert_allclose(dscores, [[0.2, 0.3, -0.5]])
    assert abs(sn.cross_entropy(np.full((4, 5), 1e4), np.arange(4))[0] - math.log(5)) < 1e-9


def test_naming_losses_by_hand():
    """Activations 0.8 of the right class and 0.1, 0.5 twice of others: 0.8 of 2.0; each model says them in its way"""
    a, batch = np.array([[0.5, 0.8, 0.1, 0.5, 0.1]]), {"labels": np.array([1]), "margin": 0.4}
    logits = np.log(a / (1 - a))
    expected = {"xent": math.log(2.0 / 0.8), "margin": 0.1 ** 2 + 0.5 * 2 * 0.4 ** 2, "spread": 2 * 0.1 ** 2}
    for loss, value in expected.items():
        for model in TRAINED:
            scores, config = a if model in sn.VECTOR_MODELS else logits, tiny(model, loss=loss)
            if loss == "xent" and model in CNNS:
                scores = np.log(a)
            assert sn.naming_loss(scores, batch, config)[0] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("loss", ["xent", "margin", "spread"])
@pytest.mark.parametrize("model", ["caps", "dynamic", "gap"])
def test_losses_of_extreme_scores_stay_finite(model, loss, dtype):
    """Activations of which nothing is left; lengths of nothing are sqrt(SQUASH_EPS)"""
    batch = {"labels": np.array([0, 1]), "margin": np.array([0.2, 0.9], dtype)}
    extremes = [[0] * 5, [1] * 5, [1, 0, 0, 0, 0]]
    for row in extremes:
        scores = np.array([row, row], dtype)
        scores = np.maximum(scores, dtype(sn.SQUASH_EPS ** 0.5)) if model == "dynamic" else 2000 * scores - 1000
        value, dscores = sn.naming_loss(scores, batch, tiny(model, loss=loss))
        assert np.isfinite(value) and np.isfinite(dscores).all() and dscores.dtype == dtype


# ---------------------------------------------------------------- initial weights and sizes

@pytest.mark.parametrize("model", TRAINED)
def test_initial_weights(model):
    """Pose matrices near the identity; He's where a ReLU follows; routing weights and shifts 0, scales 1, betas as in
    BETA_U and BETA_A"""
    config = sn.Config(model=model)
    params = sn.init_params(config)
    constants = {"_b": 0, "_gamma": 1, "_norm_beta": 0, "_beta_u": -1, "_beta_a": -2, "route_W": 0}
    children = 9 * params["primary_norm_gamma"].size // 8 if model in sn.VECTOR_MODELS else None
    drawn = set()
    for name, p in params.items():
        assert p.dtype == np.float32
        constant = [value for end, value in constants.items() if name.endswith(end)]
        if constant:
            assert np.all(p == constant[0]), name
            continue
        drawn.add(name)
        mean = np.eye(P) if name in ("conv_W", "conv2_W", "class_W") else 0
        if name in ("W", "place_W"):
            std = (4 / (8 * children)) ** 0.5
        else:
            last = p.shape[-1] == 5 or name == "primary_w"
            std = 0.1 if name.endswith("_W") else ((1 if last else 2) / math.prod(p.shape[:-1])) ** 0.5
        assert (p - mean).std() == pytest.approx(std, rel=max(0.05, 3 / p.size ** 0.5)), name
        assert abs((p - mean).mean()) < 5 * std / p.size ** 0.5, name
    other = sn.init_params(dataclasses.replace(config, seed=1))
    assert all(np.array_equal(params[name], other[name]) == (name not in drawn) for name in params)


def test_at_first_a_vote_is_about_its_childs_pose():
    config = sn.Config(conv_types=20)
    V, _ = sn.pose_votes_forward(np.tile(np.arange(1.0, 17), (36, 1, 1)), sn.init_params(config)["conv_W"])
    assert V.shape == (36, 1, 20, D)
    np.testing.assert_allclose(V.mean((0, 1, 2)).reshape(P, P), np.arange(1, 17).reshape(P, P), atol=0.4)


def sizes(**changes):
    return {model: sn.n_params(sn.init_params(sn.changed(sn.Config(model=model), **changes))) for model in TRAINED}


@pytest.mark.parametrize("data", ["toys", "smallnorb", "shapes"])
def test_networks_that_are_compared_have_as_many_weights(data):
    """The heads as dynamic-shared, the paper's CNN as its capsules, within a tenth"""
    n = sizes(data=data)
    for model in sn.HEADS:
        assert abs(n[model] / n["dynamic-shared"] - 1) < 0.1, model
    assert abs(n["cnn"] / n["caps"] - 1) < 0.1
    assert data == "shapes" or (n["caps"], n["dynamic-shared"]) == (18_482, 31_568)


def test_sizes_follow_those_of_the_network_to_compare_with():
    n, larger = sizes(), sizes(head_types=40, conv1_channels=64, conv_types=16)
    for model in ("em", "dynamic", "self-routing", "gap", "dense"):
        assert larger[model] > n[model] and abs(larger[model] / larger["dynamic-shared"] - 1) < 0.1, model
    assert abs(larger["cnn"] / larger["caps"] - 1) < 0.1
    assert sn.init_params(sn.Config(model="gap", width=7))["conv5_w"].shape == (3, 3, 32, 7)
    assert sn.init_params(sn.Config(model="cnn", width=7))["conv1_w"].shape == (5, 5, 2, 7)
    assert sn.own_width(sn.Config(model="dynamic-shared", head_types=9)) == 9


def test_sizes_of_the_papers_networks():
    """The paper says 68 thousand and 4.2 million"""
    n = {model: sn.n_params(sn.init_params(sn.Config(model=model, preset="paper"))) for model in ("caps", "cnn")}
    assert n == {"caps": 68_954, "cnn": 4_253_349}


@pytest.mark.parametrize("model", [*sn.EM_MODELS, *CNNS])
def test_the_dropout_mask_has_a_column_for_each_input_of_the_last_layer(model):
    config = tiny(model)
    params, batch = params64(config), batch64(config, 2)
    n = sn.plan(config).n_dropped
    weights = {"gap": "fc1_w", "cnn": "fc2_w", "dense": "fc2_w"}
    assert n == (len(params[weights[model]]) if model in CNNS else {"caps": 2 * 16, "em": 2 * 25}[model])
    scores, seen = outputs(params, batch, config)["scores"], 0
    for k in range(n):
        flipped = batch | {"dropout_mask": batch["dropout_mask"].copy()}
        flipped["dropout_mask"][:, k] = 1 / 0.6 - flipped["dropout_mask"][:, k]
        seen += not np.array_equal(outputs(params, flipped, config)["scores"], scores)
    assert seen >= 0.5 * n                                                           # a ReLU may be off for both images


def test_a_place_is_empty_where_its_field_holds_nothing_but_ground():
    """A flat side of a toy is not ground; and the fields are those of the layers"""
    images = np.full((1, 32, 32, 2), 0.7)
    images[0, 10:14, 20:24] = 0.3                                                              # a flat toy
    config = sn.Config()
    assert looks.FIELDS.keys() == {"primary", "conv", "conv2"} and len(sn.plan(config).centres) == 16
    for name, n in (("primary", 14), ("conv", 6), ("conv2", 4)):
        step, size = looks.FIELDS[name]
        empty = looks.is_ground(images, np.full((1, 1, 1, 2), 0.7), name, 0.01)[0]
        assert empty.shape == (n, n)
        for y, x in np.ndindex(n, n):
            meets = step * y < 14 and step * y + size > 10 and step * x < 24 and step * x + size > 20
            assert empty[y, x] == (not meets)
    step, size = looks.FIELDS["conv2"]
    middles = step * np.arange(4) + (size - 1) / 2
    np.testing.assert_allclose(np.unique(sn.plan(config).centres[:, 0]), (middles - 15.5) / 16)


def test_what_is_said_of_the_capsules_life_by_hand(monkeypatch):
    """Activations 1 at empty places and 0 elsewhere; assignments that are uniform, then certain; a pose that holds the
    azimuth's sine and cosine and nothing else"""
    config, n = tiny(), 40
    rng, centres = np.random.default_rng(3), sn.plan(config).centres
    images = rng.random((n, sn.SIDE, sn.SIDE, 1)).astype(np.float32)
    images[:, :, 16:] = 0                                                               # ground on the right
    samples = {"images": images, "labels": np.arange(n) % sn.N_CLASSES, "azimuths": rng.uniform(0, 360, n),
               "elevations": rng.uniform(30, 70, n)}
    order = iter(np.random.default_rng(0).permutation(n).reshape(-1)[k:k + 16] for k in range(0, n, 16))

    def forward(params, shown, config):
        rows, N = next(order), len(shown)
        mu = np.zeros((N, sn.N_CLASSES, D))
        azimuth = np.deg2rad(samples["azimuths"][rows])
        mu[:, :, 3], mu[:, :, 5] = np.sin(azimuth)[:, None], 2 * np.cos(azimuth)[:, None] - 1
        out = {"mu": mu, "a": np.full((N, sn.N_CLASSES), 0.5)}
        for name in looks.FIELDS:
            empty = looks.is_ground(shown, np.zeros((N, 1, 1, 1)), name, 0.2)
            other = np.full(empty.shape, name == "conv2")                               # never off, or never on
            out[f"{name}_a"] = np.stack([empty, other], -1).astype(float)
        certain = np.zeros((N, sn.N_CLASSES, 2 * len(centres)))
        certain[:, 1] = 1
        return out | {"class_steps": [SimpleNamespace(R=np.ones((N, 1, certain.shape[2]))),
                                      SimpleNamespace(R=certain)]}, None
    monkeypatch.setattr(sn, "forward", forward)
    found = looks.aliveness({}, SimpleNamespace(data={"familiar": samples, "source": "shapes"}, config=config), n)
    assert found["a"] == {"primary": (0.5, 0.0), "conv": (0.5, 0.0), "conv2": (None, 0.5)}
    assert found["used"] == {"primary": 0.5, "conv": 0.5, "conv2": 0.0}
    np.testing.assert_allclose(found["entropy"], [np.log(5), 0], atol=1e-9)
    r2 = found["r2"]
    assert min(r2["sin azimuth"], r2["cos azimuth"]) > 1 - 1e-9 and max(r2["elevation"], r2["x"], r2["y"]) < 0.5
