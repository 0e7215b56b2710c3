"""What the formulas of the matrix capsules and their networks mean: against slow literal loops and values worked out by
hand."""
import dataclasses
import math
from types import SimpleNamespace

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
import reference_smallnorb as literal
from reference_smallnorb import CAPSULES, CNNS, TRAINED, batch64, outputs, params64, tiny

P, D = sn.P, sn.D


def some_votes(rng, L, J, I, scale=1.0):
    """Votes (L, J, I, D), activations of the children (L, I), betas (2, J)"""
    return scale * rng.standard_normal((L, J, I, D)), rng.random((L, I)), rng.standard_normal((2, J))


@pytest.fixture
def exact(monkeypatch):
    """The mass without the small number that keeps a parent without children finite"""
    monkeypatch.setattr(sn, "MASS_EPS", 0.0)


# ---------------------------------------------------------------- EM routing

@pytest.mark.parametrize("em_iters", [1, 2, 3, 5])
def test_em_routing_of_class_capsules_by_loops(exact, rng, em_iters):
    N, J, I = 2, 3, 6
    config = tiny(em_iters=em_iters, final_lambda=2.0)
    V, a, (beta_u, beta_a) = some_votes(rng, N, J, I, 0.4)
    (mu, act), cache = sn.em_routing_forward(V, a, beta_u, beta_a, config)
    assert len(cache.steps) == em_iters
    for n in range(N):
        votes = [{(j,): V[n, j, i] for j in range(J)} for i in range(I)]
        expected_mu, expected_sigma2, expected_act, R = literal.em_reference(votes, a[n], beta_u, beta_a, config)
        for j in range(J):
            np.testing.assert_allclose(mu[n, j], expected_mu[j,], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(act[n, j], expected_act[j,], rtol=1e-5)
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


@pytest.mark.parametrize("side, em_iters", [(5, 3), (6, 1), (6, 2), (6, 3), (7, 3)])
def test_convolutional_capsules_by_loops(exact, rng, routings, side, em_iters):
    """Children compete over all parents at all places that see them; matrices shared over places; 3x3, stride 2. R of
    every child sums to one and starts uniform."""
    B, J, places = 2, 3, (side - 3) // 2 + 1
    config = tiny(em_iters=em_iters, final_lambda=3.0)
    pose, active = rng.standard_normal((1, side, side, B, D)), rng.random((1, side, side, B))
    W, betas = 0.5 * rng.standard_normal((9 * B, J, P, P)), rng.standard_normal((2, J))
    (mu, act), _ = sn.conv_caps_forward(pose, active, W, *betas, config)
    votes, a = literal.conv_votes(pose[0], active[0], W)
    expected_mu, expected_sigma2, expected_act, R = literal.em_reference(votes, a, *betas, config)
    steps = routings[0].steps
    assert len(routings) == 1 and mu.shape == (1, places ** 2, J, D) and len(expected_mu) == places ** 2 * J
    for (py, px, j), expected in expected_mu.items():
        place = py * places + px
        np.testing.assert_allclose(mu[0, place, j], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(act[0, place, j], expected_act[py, px, j], rtol=1e-5)
        np.testing.assert_allclose(steps[-1].sigma2[place, j], expected_sigma2[py, px, j], rtol=1e-4)
    seen = 2 * places + 1                                                 # rows and columns that any parent sees
    for step, expected in zip(steps, R, strict=True):
        got, total = np.broadcast_to(step.R, (places ** 2, J, 9 * B)), np.zeros((side, side, B))
        for (py, px, j, ky, kx, b), value in zip(np.ndindex(places, places, J, 3, 3, B), got.ravel()):
            y, x = 2 * py + ky, 2 * px + kx
            assert value == pytest.approx(expected[(y * side + x) * B + b][py, px, j], rel=1e-3, abs=1e-9)
            total[y, x, b] += value
        np.testing.assert_allclose(total[:seen, :seen], 1, rtol=1e-9)
        assert not total[seen:].any() and not total[:, seen:].any()
    first = np.broadcast_to(steps[0].R, (places ** 2, J, 9 * B)).reshape(places, places, J, 3, 3, B)
    np.testing.assert_allclose(first[0, 0, :, 0, 0], 1 / J)
    np.testing.assert_allclose(first[0, 0, :, 2, 0], 1 / (2 * J))
    np.testing.assert_allclose(first[0, 0, :, 2, 2], 1 / (4 * J))


def test_images_are_routed_alone(rng):
    """More images than a chunk, and each with the result that it has alone"""
    config, N = tiny(em_iters=3), sn.EM_CHUNK + 2
    pose, active = rng.standard_normal((N, 7, 7, 2, D)), rng.random((N, 7, 7, 2))
    W, beta = rng.standard_normal((18, 3, P, P)), rng.standard_normal((2, 3))
    (mu, a), _ = sn.conv_caps_forward(pose, active, W, *beta, config)
    for n in range(N):
        (mu1, a1), _ = sn.conv_caps_forward(pose[n:n + 1], active[n:n + 1], W, *beta, config)
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
    np.testing.assert_allclose(x, 0.1 * (0.7 - cost), rtol=1e-6)


def test_equal_votes_have_the_variance_of_the_floor():
    """and the cost 16 (beta_u + log sqrt(5e-4)) x mass"""
    V, r = np.full((1, 1, 3, D), 0.7), np.array([[[0.5, 0.25, 0.25]]])
    (mu, sigma2, x), _ = sn.m_step_forward(V, V * V, r, np.array([0.4]), np.array([0.3]), lambda_=0.2, ratio=0.5)
    np.testing.assert_allclose(mu, 0.7, rtol=1e-6)
    np.testing.assert_allclose(sigma2, 5e-4, rtol=1e-4)
    assert x[0, 0] == pytest.approx(0.2 * (0.3 - 16 * (0.4 + 0.5 * math.log(5e-4)) * 0.5), rel=1e-4)


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
    assert [round(sn.inverse_temperature(t, 0.01), 8) for t in range(3)] == [0.0005, 0.000975, 0.00142625]


def test_responsibilities_sum_to_one_over_a_childs_parents(rng):
    N, H, B, J = 2, 6, 2, 3
    window, L = sn.Window(N, H, H, B), N * 4
    assert window.parents == (2, 2)
    logits = 5 * rng.standard_normal((L, J, 9 * B))
    R, _ = sn.responsibilities_forward(logits, window)
    total, seen = np.zeros((N, H, H, B)), np.zeros((N, H, H, B), int)
    for n, py, px in np.ndindex(N, 2, 2):
        for k, (ky, kx, b) in enumerate(np.ndindex(3, 3, B)):
            total[n, 2 * py + ky, 2 * px + kx, b] += R[n * 4 + py * 2 + px, :, k].sum()
            seen[n, 2 * py + ky, 2 * px + kx, b] += 1
    np.testing.assert_allclose(total[seen > 0], 1, rtol=1e-12)
    assert (seen[:, 2, 2] == 4).all() and (seen[:, 0, 0] == 1).all() and (seen[:, 5] == 0).all()
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
    config = tiny(em_iters=3, final_lambda=1.0)
    V, a, beta = some_votes(rng, 3, 4, 5)
    (mu, act), _ = sn.em_routing_forward(V, a, *beta, config)
    order = rng.permutation(4)
    (mu2, act2), _ = sn.em_routing_forward(V[:, order], a, *beta[:, order], config)
    np.testing.assert_allclose(mu2, mu[:, order], rtol=1e-9)
    np.testing.assert_allclose(act2, act[:, order], rtol=1e-9)
    order = rng.permutation(5)
    (mu2, act2), _ = sn.em_routing_forward(V[:, :, order], a[:, order], *beta, config)
    np.testing.assert_allclose(mu2, mu, rtol=1e-9)
    np.testing.assert_allclose(act2, act, rtol=1e-9)


def test_twice_the_children_change_nothing(exact, rng):
    """The mass is normalised by parents / children: every child doubled is the same layer"""
    V, a, betas = some_votes(rng, 2, 3, 6, 0.5)
    config = tiny(em_iters=3, final_lambda=2.0)
    once, _ = sn.em_routing_forward(V, a, *betas, config)
    twice, _ = sn.em_routing_forward(np.concatenate([V, V], 2), np.concatenate([a, a], 1), *betas, config)
    for x, y in zip(once, twice):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def test_agreement_wins(rng):
    """Children whose votes agree for one parent and scatter for the other are assigned to the first, and activate it"""
    V = rng.standard_normal((1, 2, 12, D))
    V[:, 0] = 0.5 + 0.01 * rng.standard_normal((1, 12, D))
    config = tiny(em_iters=3, final_lambda=1.0)
    (mu, act), cache = sn.em_routing_forward(V, np.ones((1, 12)), np.zeros(2), np.zeros(2), config)
    assert act[0, 0] > 0.95 > act[0, 1] and cache.steps[-1].R[0, 0].min() > 0.99
    np.testing.assert_allclose(mu[0, 0], 0.5, atol=0.02)


def test_a_child_that_is_off_has_no_say_and_nobodys_parent_stays_finite(rng):
    V, a, betas = some_votes(rng, 2, 3, 6)
    a[:, 4], other = 0, V.copy()
    other[:, :, 4] = 50 * rng.standard_normal((2, 3, D))
    config = tiny(em_iters=3, final_lambda=2.0)
    for one, two in zip(*(sn.em_routing_forward(votes, a, *betas, config)[0] for votes in (V, other))):
        np.testing.assert_allclose(one, two, rtol=1e-12)
    (mu, act), _ = sn.em_routing_forward(V, 0 * a, *betas, tiny(em_iters=2, final_lambda=2.0))
    np.testing.assert_allclose(mu, 0, atol=1e-12)
    expected = 1 / (1 + np.exp(-2 * (1 - 0.95 ** 2) * betas[1]))
    np.testing.assert_allclose(act, np.broadcast_to(expected, (2, 3)), rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extremes_stay_finite(rng, dtype):
    L, J, I = 2, 3, 4
    config, betas = tiny(em_iters=3, final_lambda=1.0), np.zeros((2, J), dtype)
    for V in (np.zeros((L, J, I, D)), np.full((L, J, I, D), 7.0), 1e3 * rng.standard_normal((L, J, I, D))):
        for a in (np.zeros((L, I)), np.ones((L, I)), np.eye(L, I)):
            (mu, act), cache = sn.em_routing_forward(V.astype(dtype), a.astype(dtype), *betas, config)
            grads = sn.em_routing_backward(np.ones_like(mu), np.ones_like(act), cache)
            assert all(np.isfinite(x).all() and x.dtype == dtype for x in (mu, act, *grads))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("final_lambda", [0.01, 100.0])
def test_extreme_convolutional_capsules_stay_finite(rng, dtype, final_lambda):
    """Huge poses, equal poses, all children off, one child on: no nan and no inf, forward and backward"""
    side, B, J = 5, 2, 3
    config = tiny(em_iters=3, final_lambda=final_lambda)
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
    config = tiny(em_iters=2, final_lambda=1.0)
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


def test_children_of_every_place_by_loops_and_the_adjoint(rng):
    x = rng.standard_normal((2, 7, 6, 2, 3))
    window = sn.Window(*x.shape[:4])
    cols = sn.im2col_capsules(x, window)
    assert cols.shape == (18, 2 * 3 * 2, 3) and window.parents == (3, 2)
    for k, (ky, kx, b) in enumerate(np.ndindex(3, 3, 2)):
        for place, (n, py, px) in enumerate(np.ndindex(2, 3, 2)):
            np.testing.assert_array_equal(cols[k, place], x[n, 2 * py + ky, 2 * px + kx, b])
    other = rng.standard_normal(cols.shape)
    assert np.vdot(cols, other) == pytest.approx(np.vdot(x, sn.col2im_capsules(other, window)), rel=1e-12)


# ---------------------------------------------------------------- against literal networks

@pytest.mark.parametrize("changes", [
    {}, dict(em_iters=1), dict(em_iters=3, primary_types=2), dict(primary_kernel=3, conv_types=1),
    dict(primary_kernel=6), dict(no_coord_add=True), dict(loss="spread"), dict(data="smallnorb"),
    dict(model="dense-caps"), dict(model="dense-caps", em_iters=3, loss="spread", data="smallnorb")], ids=str)
def test_capsule_networks_against_literal_ones(exact, changes):
    config = tiny(**changes)
    params, batch = params64(config), batch64(config, 2)
    for dropout_mask in (batch["dropout_mask"], None):
        out = outputs(params, batch | {"dropout_mask": dropout_mask}, config)
        for n in range(2):
            kept = None if dropout_mask is None else dropout_mask[n]
            mu, a = literal.caps_reference(params, batch["images"][n], config, kept)
            np.testing.assert_allclose(out["mu"][n], mu, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(out["a"][n], a, rtol=1e-4)
            expected = a if config.loss == "spread" else (mu * mu).sum(1) / 16 + 4 * (a - 0.5)
            np.testing.assert_allclose(out["scores"][n], expected, rtol=1e-4, atol=1e-6)
        assert config.loss != "spread" or np.array_equal(out["scores"], out["a"])


@pytest.mark.parametrize("model", CNNS)
@pytest.mark.parametrize("data", ["synthetic", "smallnorb"])
def test_cnns_against_literal_ones(model, data):
    config = tiny(model, data=data)
    params, batch = params64(config), batch64(config, 2)
    scores = outputs(params, batch, config)["scores"]
    without = outputs(params, {"images": batch["images"]}, config)["scores"]
    for n in range(2):
        for got, kept in (scores[n], batch["dropout_mask"][n]), (without[n], 1):
            expected = literal.cnn_reference(params, batch["images"][n], model, kept)
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", TRAINED)
@pytest.mark.parametrize("loss", ["xent", "spread"])
def test_loss_and_hits_by_loops(model, loss):
    config = tiny(model, loss=loss)
    params, batch = params64(config), batch64(config, 5)
    terms, *_ = sn.loss_and_grads(params, batch, config)
    scores = outputs(params, batch, config)["scores"]
    expected = hits = 0
    for s, t in zip(scores, batch["labels"]):
        hits += max(range(5), key=lambda j: s[j]) == t
        if loss == "spread" and model in CAPSULES:
            expected += sum(max(0, 0.8 - (s[t] - s[j])) ** 2 for j in range(5) if j != t) / 5
        else:
            expected += -math.log(math.exp(s[t]) / sum(math.exp(k) for k in s)) / 5
    assert terms["loss"] == pytest.approx(expected, rel=1e-12) and terms["hits"] == hits
    assert type(terms["loss"]) is float


def test_responsibilities_of_class_capsules_are_reported_and_sum_to_one(rng):
    config = tiny(em_iters=3)
    out = outputs(params64(config), batch64(config, 2), config)
    assert len(out["class_steps"]) == 3
    for step in out["class_steps"]:
        np.testing.assert_allclose(np.broadcast_to(step.R, (2, 5, 18)).sum(1), 1, rtol=1e-12)
        assert step.mu.shape == step.sigma2.shape == (2, 5, D) and step.sigma2.min() >= 5e-4
    assert np.all(out["class_steps"][0].R == 0.2) and np.array_equal(out["class_steps"][-1].mu, out["mu"])


# ---------------------------------------------------------------- coordinates and places

@pytest.mark.parametrize("kernel", [1, 3])
def test_a_pixel_is_seen_by_the_capsules_around_it(rng, kernel):
    """It changes just the convolutional capsules whose field, as field_centres has it, holds the pixel"""
    config = tiny(primary_kernel=kernel, primary_types=2, conv_types=3, em_iters=1)     # no competition between places
    params, centres = params64(config), sn.field_centres(config) * 16 + 15.5
    radius = 2 + 2 * (kernel // 2) + 2
    images = rng.random((1, 32, 32, 1))
    before = sn.forward(params, images, config)[0]["conv_mu"][0]
    for y, x in (15, 4), (3, 20), (24, 24), (11, 12):
        moved = images.copy()
        moved[0, y, x] += 0.5
        changed = (np.abs(sn.forward(params, moved, config)[0]["conv_mu"][0] - before) > 1e-12).any((1, 2))
        assert np.array_equal(changed, (np.abs(centres - (x, y)) <= radius).all(1))


@pytest.mark.parametrize("kernel", [1, 3, 6])
def test_coordinates_are_the_centres_of_measured_receptive_fields(rng, kernel):
    """Rows, then columns, of the image are changed one by one; which capsules notice? One EM iteration: no
    competition."""
    config = tiny(primary_kernel=kernel, em_iters=1, primary_types=2)
    params, centres = params64(config), sn.field_centres(config)
    n = math.isqrt(len(centres))
    images = np.repeat(rng.random((1, 32, 32, 1)), 65, 0)
    for k in range(32):
        images[1 + k, k] += rng.random((32, 1))                                                # row k
        images[33 + k, :, k] += rng.random((32, 1))                                            # column k
    mu = sn.forward(params, images, config)[0]["conv_mu"]
    changed = (np.abs(mu[1:] - mu[0]) > 1e-12).any((2, 3)).reshape(2, 32, n, n)       # (row or column, k, place)
    for py, px in np.ndindex(n, n):
        for axis, place in ((0, py), (1, px)):
            seen = np.flatnonzero(changed[axis, :, py, px])
            assert (seen[0], seen[-1]) == literal.field(place, kernel) and len(seen) == seen[-1] - seen[0] + 1
            assert centres[py * n + px, 1 - axis] == pytest.approx((seen.mean() - 15.5) / 16)  # x is centres[:, 0]
    assert np.abs(centres).max() < 1


def test_coordinates_move_the_mean_vote_by_their_own_mean(rng):
    """With one EM iteration: x in row 0, y in row 1 of the right-hand column"""
    config = tiny(em_iters=1, primary_kernel=3, primary_types=2, conv_types=3)
    params, images = params64(config), rng.random((2, 32, 32, 1))
    with_, without = (sn.forward(params, images, dataclasses.replace(config, no_coord_add=no))[0] for no in (0, 1))
    moved = (with_["mu"] - without["mu"]).reshape(2, 5, P, P)
    weights = with_["conv_a"].sum(-1) / with_["conv_a"].sum((1, 2))[:, None]                   # (N, places)
    centres = sn.field_centres(config)
    mean = weights @ centres
    np.testing.assert_allclose(moved[:, :, :2, 3], np.broadcast_to(mean[:, None], (2, 5, 2)), atol=1e-6)
    moved[:, :, :2, 3] = 0
    np.testing.assert_allclose(moved, 0, atol=1e-9)
    assert len(centres) == 25 and centres[1, 0] > centres[0, 0] and centres[1, 1] == centres[0, 1]
    assert centres[5, 1] > centres[0, 1]


def test_coordinates_are_added_to_the_right_elements_of_every_vote(routings):
    """The votes themselves: x of the place to row 0, y to row 1 of the right-hand column, of all types alike; nothing
    else"""
    config = tiny(conv_types=3)
    params, batch = params64(config), batch64(config, 2)
    for no_coord_add in (False, True):
        outputs(params, batch, dataclasses.replace(config, no_coord_add=no_coord_add))
    conv, with_, _, without = routings
    assert conv.V.shape == (2 * 9, 3, 9, D) and with_.V.shape == (2, 5, 3 * 9, D)
    added = (with_.V - without.V).reshape(2, 5, 3, 3, 3, P, P)                         # image, class, type, row, column
    for py, px in np.ndindex(3, 3):
        x, y = ((sum(literal.field(place, 7)) / 2 - 15.5) / 16 for place in (px, py))
        np.testing.assert_allclose(added[:, :, :, py, px, 0, 3], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(added[:, :, :, py, px, 1, 3], y, rtol=0, atol=1e-12)
    added[..., :2, 3] = 0
    assert np.abs(added).max() < 1e-12


def test_transformation_matrices_of_the_class_capsules_are_shared_over_places(routings):
    """and dropout acts on their children's activations, not on their votes"""
    config = tiny(conv_types=3, no_coord_add=True)
    params, batch = params64(config), batch64(config, 2)
    out = outputs(params, batch, config)
    V = routings[-1].V.reshape(2, 5, 3, 9, P, P)
    expected = np.einsum("npfab,fjbc->njfpac", out["conv_mu"].reshape(2, 9, 3, P, P), params["class_W"])
    np.testing.assert_allclose(V, expected, rtol=1e-10, atol=1e-12)
    active = out["conv_a"].transpose(0, 2, 1).reshape(2, 27)
    np.testing.assert_allclose(routings[-1].a, active * batch["dropout_mask"], rtol=1e-12)


def test_a_moved_image_moves_the_convolutional_capsules(rng):
    """4 px are one place. Places inside, where every child has as many parents, keep their capsules when one iteration
    is made."""
    config = tiny(primary_kernel=3, em_iters=1, primary_types=2)
    params = params64(config)
    big = rng.random((1, 40, 40, 1))
    here, there = (sn.forward(params, big[:, 4:36, k:k + 32], config)[0] for k in (4, 0))
    below = sn.forward(params, big[:, :32, 4:36], config)[0]
    for name in ("conv_mu", "conv_a"):
        here_, right, down = (out[name].reshape(5, 5, 2, -1) for out in (here, there, below))
        np.testing.assert_allclose(right[1:4, 2:4], here_[1:4, 1:3], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(down[2:4, 1:4], here_[1:3, 1:4], rtol=1e-9, atol=1e-12)
        assert np.abs(right[1:4, 1:3] - here_[1:4, 1:3]).max() > 1e-3


@pytest.mark.parametrize("model", CAPSULES)
def test_the_order_of_the_classes_does_not_matter(model):
    config, order = tiny(model), [3, 1, 4, 0, 2]
    params, batch = params64(config), batch64(config, 3)
    permuted = params | {"class_W": params["class_W"][:, order]} | {
        name: params[name][order] for name in ("class_beta_u", "class_beta_a")}
    a, b = (outputs(p, batch, config)["scores"] for p in (params, permuted))
    np.testing.assert_allclose(b, a[:, order], rtol=1e-9)


@pytest.mark.parametrize("model", TRAINED)
def test_an_images_scores_do_not_depend_on_its_batch_mates(model):
    config = tiny(model)
    params, batch = params64(config), batch64(config, 6)
    together = outputs(params, batch, config)["scores"]
    for n in range(6):
        alone = outputs(params, sn.to_batch(batch, slice(n, n + 1), np.float64), config)["scores"]
        np.testing.assert_allclose(alone[0], together[n], rtol=1e-9)


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


# ---------------------------------------------------------------- initial weights and sizes

@pytest.mark.parametrize("model", TRAINED)
def test_initial_weights(model):
    config = sn.Config(model=model)
    params = sn.init_params(config)
    assert all(p.dtype == np.float32 for p in params.values())
    for name, p in params.items():
        if p.ndim == 1:
            assert not p.any(), name
        else:
            last = p.shape[-1] == 5 or name == "primary_w"
            std = 0.5 if name.endswith("_W") else ((1 if last else 2) / math.prod(p.shape[:-1])) ** 0.5
            assert p.std() == pytest.approx(std, rel=max(0.05, 3 / p.size ** 0.5)), name
            assert abs(p.mean()) < 5 * std / p.size ** 0.5
    other = sn.init_params(dataclasses.replace(config, seed=1))
    assert all(np.array_equal(params[name], other[name]) == (params[name].ndim == 1) for name in params)


def test_cnns_have_as_many_weights_as_the_capsule_network_whatever_its_size():
    def sizes(**changes):
        return {model: sn.n_params(sn.init_params(sn.Config(model=model, **changes))) for model in TRAINED}

    for changes in {}, dict(conv1_channels=48, conv_types=12), dict(data="smallnorb"):
        n = sizes(**changes)
        assert abs(n["cnn-pool"] / n["caps"] - 1) < 0.1 and abs(n["cnn-gap"] / n["caps"] - 1) < 0.1
    n = sizes()
    assert n["cnn"] == 262_949 and 558_000 < n["dense-caps"] < 559_000 and n["caps"] == 25_758
    assert sn.init_params(sn.Config(model="cnn-gap", cnn_width=7))["conv1_w"].shape == (5, 5, 1, 7)


@pytest.mark.parametrize("model", TRAINED)
def test_the_dropout_mask_has_a_column_for_each_input_of_the_last_layer(model):
    config = tiny(model)
    params, batch = params64(config), batch64(config, 2)
    n, weights = sn.n_dropped(config), {"caps": None, "dense-caps": "class_W", "cnn-gap": "fc1_w"}.get(model, "fc2_w")
    assert n == (len(params[weights]) if weights else config.conv_types * len(sn.field_centres(config)))
    scores, seen = outputs(params, batch, config)["scores"], 0
    for k in range(n):
        flipped = batch | {"dropout_mask": batch["dropout_mask"].copy()}
        flipped["dropout_mask"][:, k] = 1 / 0.6 - flipped["dropout_mask"][:, k]
        seen += not np.array_equal(outputs(params, flipped, config)["scores"], scores)
    assert seen > 0.5 * n                                                            # a ReLU may be off for both images
