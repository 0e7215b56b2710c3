"""What the formulas of the matrix capsules mean: against slow literal loops and values worked out by hand."""
import math

import numpy as np
import pytest
import smallnorb_novel_viewpoint as sn

P, D = sn.P, sn.D


def literal_em(V, a, sees, beta_u, beta_a, n_iters, final_lambda, ratio):
    """Procedure 1 by loops. V[i][j] a (D,) vote or None where j does not see i; sees[i]: the parents of child i.

    -> mu {j: (D,)}, sigma2, activation, and the assignments R {(i, j)} of every iteration
    """
    parents = sorted({j for of_child in sees for j in of_child})
    R = {(i, j): 1 / len(sees[i]) for i in range(len(sees)) for j in sees[i]}
    history = []
    for t in range(n_iters):
        history.append(R)
        lambda_ = final_lambda * (1 - 0.95 ** (t + 1))
        mu, sigma2, act = {}, {}, {}
        for j in parents:                                                                      # M-step
            children = [i for i in range(len(sees)) if j in sees[i]]
            mass = sum(R[i, j] * a[i] for i in children) + sn.MASS_EPS
            mu[j], sigma2[j] = np.zeros(D), np.zeros(D)
            for h in range(D):
                mu[j][h] = sum(R[i, j] * a[i] * V[i][j][h] for i in children) / mass
                sigma2[j][h] = sum(R[i, j] * a[i] * (V[i][j][h] - mu[j][h]) ** 2 for i in children) / mass + 5e-4
            cost = sum((beta_u[j[-1]] + math.log(math.sqrt(sigma2[j][h]))) * mass * ratio for h in range(D))
            act[j] = 1 / (1 + math.exp(-lambda_ * (beta_a[j[-1]] - cost)))
        R = {}
        for i in range(len(sees)):                                                             # E-step
            p = {j: act[j] * math.prod(math.exp(-(V[i][j][h] - mu[j][h]) ** 2 / (2 * sigma2[j][h]))
                                       / math.sqrt(2 * math.pi * sigma2[j][h]) for h in range(D)) for j in sees[i]}
            for j in sees[i]:
                R[i, j] = p[j] / sum(p.values())
    return mu, sigma2, act, history


@pytest.mark.parametrize("n_iters", [1, 2, 3, 5])
def test_em_routing_of_class_capsules_by_loops(rng, n_iters):
    I, N, J = 6, 2, 3
    V, a = 0.4 * rng.standard_normal((I, N, J, D)), rng.random((N, I))
    beta_u, beta_a = rng.standard_normal(J), rng.standard_normal(J)
    (mu, act), cache = sn.em_routing_forward(V, a, beta_u, beta_a, n_iters, 2.0, J / I)
    for n in range(N):
        parents = [(j,) for j in range(J)]
        expected = literal_em([{(j,): V[i, n, j] for j in range(J)} for i in range(I)], a[n], [parents] * I, beta_u, beta_a,
                              n_iters, 2.0, J / I)
        for j in range(J):
            np.testing.assert_allclose(mu[n, j], expected[0][j,], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(act[n, j], expected[2][j,], rtol=1e-5)
            for t in range(n_iters):
                R = np.broadcast_to(cache[-1][t][0], (N, J, I))
                np.testing.assert_allclose(R[n, j], [expected[3][t][i, (j,)] for i in range(I)], rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("side, n_iters", [(5, 3), (6, 2), (7, 3)])
def test_convolutional_capsules_by_loops(rng, side, n_iters):
    """Children compete over all parents at all places that see them; matrices shared over places; 3x3, stride 2."""
    B, J, places = 2, 2, (side - 3) // 2 + 1
    config = sn.Config(em_iters=n_iters, final_lambda=2.0)
    pose, active = 0.5 * rng.standard_normal((1, side, side, B, D)), rng.random((1, side, side, B))
    W, beta_u, beta_a = rng.standard_normal((9 * B, J, P, P)), rng.standard_normal(J), rng.standard_normal(J)
    (mu, act), _ = sn.conv_caps_forward(pose, active, W, beta_u, beta_a, config)
    V, sees, a = [], [], []
    for y in range(side):
        for x in range(side):
            for b in range(B):
                votes = {}
                for py in range(places):
                    for px in range(places):
                        ky, kx = y - 2 * py, x - 2 * px
                        if 0 <= ky < 3 and 0 <= kx < 3:
                            for j in range(J):
                                matrix = W[(ky * 3 + kx) * B + b, j]
                                votes[py * places + px, j] = (pose[0, y, x, b].reshape(P, P) @ matrix).ravel()
                V.append(votes)
                sees.append(sorted(votes))
                a.append(active[0, y, x, b])
    covered = [k for k, of_child in enumerate(sees) if of_child]
    V, sees, a = ([column[k] for k in covered] for column in (V, sees, a))
    expected = literal_em(V, a, sees, beta_u, beta_a, n_iters, 2.0, places * places * J / (side * side * B))
    for (place, j), m in expected[0].items():
        np.testing.assert_allclose(mu[0, place, j], m, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(act[0, place, j], expected[2][place, j], rtol=1e-5)


def test_images_are_routed_alone(rng):
    """More images than a chunk, and each with the result that it has alone"""
    config, N = sn.Config(em_iters=3), sn.EM_CHUNK + 2
    pose, active = rng.standard_normal((N, 7, 7, 2, D)), rng.random((N, 7, 7, 2))
    W, beta = rng.standard_normal((18, 3, P, P)), rng.standard_normal((2, 3))
    (mu, a), _ = sn.conv_caps_forward(pose, active, W, *beta, config)
    for n in range(N):
        (mu1, a1), _ = sn.conv_caps_forward(pose[n:n + 1], active[n:n + 1], W, *beta, config)
        np.testing.assert_allclose(mu[n], mu1[0], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(a[n], a1[0], rtol=1e-9)


def test_m_step_by_hand():
    """Two children with activations 1 and 1/2, votes 1 and 4: mass 1.5, mean 2, variance (1 + 2) / 1.5 = 2"""
    V = np.zeros((2, 1, 1, D))
    V[0], V[1] = 1, 4
    (mu, sigma2, x), _ = sn.m_step_forward(V, V * V, np.array([[[1.0, 0.5]]]), np.array([0.3]), np.array([0.7]), 0.1, 0.5)
    np.testing.assert_allclose(mu, 2, rtol=1e-6)
    np.testing.assert_allclose(sigma2, 2 + 5e-4, rtol=1e-6)
    cost = 16 * (0.3 + math.log(math.sqrt(2.0005))) * 1.5 * 0.5
    np.testing.assert_allclose(x, 0.1 * (0.7 - cost), rtol=1e-6)


def test_e_step_by_hand():
    """A vote one sigma away from parent 0 in one dimension, two from parent 1; unlike activations and variances"""
    V = np.zeros((1, 1, 2, D))
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
    window, L = (N, H, H, B, 3, 2), N * 4
    logits = 5 * rng.standard_normal((L, J, 9 * B))
    R, _ = sn.responsibilities_forward(logits, window)
    total, seen = np.zeros((N, H, H, B)), np.zeros((N, H, H, B), int)
    for n in range(N):
        for py in range(2):
            for px in range(2):
                for k, (ky, kx, b) in enumerate(np.ndindex(3, 3, B)):
                    total[n, 2 * py + ky, 2 * px + kx, b] += R[n * 4 + py * 2 + px, :, k].sum()
                    seen[n, 2 * py + ky, 2 * px + kx, b] += 1
    np.testing.assert_allclose(total[seen > 0], 1, rtol=1e-12)
    assert (seen[:, 2, 2] == 4).all() and (seen[:, 0, 0] == 1).all() and (seen[:, 5] == 0).all()
    R, _ = sn.responsibilities_forward(logits, None)
    np.testing.assert_allclose(R.sum(1), 1, rtol=1e-12)


def test_permuting_parents_or_children_permutes_the_result(rng):
    I, L, J = 5, 3, 4
    V, a, beta = rng.standard_normal((I, L, J, D)), rng.random((L, I)), rng.standard_normal((2, J))
    (mu, act), _ = sn.em_routing_forward(V, a, *beta, 3, 1.0, J / I)
    order = rng.permutation(J)
    (mu2, act2), _ = sn.em_routing_forward(V[:, :, order], a, *beta[:, order], 3, 1.0, J / I)
    np.testing.assert_allclose(mu2, mu[:, order], rtol=1e-9)
    np.testing.assert_allclose(act2, act[:, order], rtol=1e-9)
    order = rng.permutation(I)
    (mu2, act2), _ = sn.em_routing_forward(V[order], a[:, order], *beta, 3, 1.0, J / I)
    np.testing.assert_allclose(mu2, mu, rtol=1e-9)
    np.testing.assert_allclose(act2, act, rtol=1e-9)


def test_agreement_wins(rng):
    """Children whose votes agree for one parent and scatter for the other are assigned to the first, and activate it"""
    V = rng.standard_normal((12, 1, 2, D))
    V[:, :, 0] = 0.5 + 0.01 * rng.standard_normal((12, 1, D))
    (mu, act), cache = sn.em_routing_forward(V, np.ones((1, 12)), np.zeros(2), np.zeros(2), 3, 1.0, 2 / 12)
    assert act[0, 0] > 0.95 > act[0, 1] and cache[-1][-1][0][0, 0].min() > 0.99
    np.testing.assert_allclose(mu[0, 0], 0.5, atol=0.02)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extremes_stay_finite(rng, dtype):
    I, L, J = 4, 2, 3
    for V in (np.zeros((I, L, J, D)), np.full((I, L, J, D), 7.0), 1e3 * rng.standard_normal((I, L, J, D))):
        for a in (np.zeros((L, I)), np.ones((L, I)), np.eye(L, I)):
            (mu, act), cache = sn.em_routing_forward(V.astype(dtype), a.astype(dtype), *np.zeros((2, J), dtype), 3, 1.0, J / I)
            grads = sn.em_routing_backward(np.ones_like(mu), np.ones_like(act), cache)
            assert all(np.isfinite(x).all() and x.dtype == dtype for x in (mu, act, *grads))


def test_votes_are_matrix_products(rng):
    G, L, J = 3, 4, 2
    M, W = rng.standard_normal((G, L, D)), rng.standard_normal((G, J, P, P))
    V, _ = sn.pose_votes_forward(M, W)
    for g, n, j in np.ndindex(G, L, J):
        np.testing.assert_allclose(V[g, n, j].reshape(P, P), M[g, n].reshape(P, P) @ W[g, j], rtol=1e-12)


# ---------------------------------------------------------------- the networks

def toy(**changes):
    return sn.Config(**{"conv1_channels": 3, "primary_types": 2, "conv_types": 3, "quiet": True, "threads": 1} | changes)


def params64(config, seed=3):
    rng = np.random.default_rng(seed)
    return {name: p.astype(np.float64) + (0.1 * rng.standard_normal(p.shape) if p.ndim == 1 else 0)
            for name, p in sn.init_params(config).items()}


@pytest.mark.parametrize("kernel", [1, 3])
def test_receptive_field_centres(rng, kernel):
    """A changed pixel changes just the convolutional capsules whose field, as field_centres has it, holds the pixel"""
    config = toy(primary_kernel=kernel, em_iters=1)                       # one iteration: no competition between places
    params, centres = params64(config), (sn.field_centres(config) * 16 + 15.5)
    radius = 2 + 2 * (kernel // 2) + 2
    images = rng.random((1, 32, 32, 1))
    before = sn.forward(params, {"images": images}, config)[0]["conv_mu"][0]
    for y, x in (15, 4), (3, 20), (24, 24), (11, 12):
        moved = images.copy()
        moved[0, y, x] += 0.5
        changed = (np.abs(sn.forward(params, {"images": moved}, config)[0]["conv_mu"][0] - before) > 1e-12).any((1, 2))
        inside = (np.abs(centres - (x, y)) <= radius).all(1)
        assert np.array_equal(changed, inside)


def test_coordinate_addition(rng):
    """With one EM iteration and equal activations the coordinates move the mean vote by their own mean: x in row 0, y in row 1"""
    config = toy(em_iters=1)
    params, batch = params64(config), {"images": rng.random((2, 32, 32, 1))}
    with_, without = (sn.forward(params, batch, c)[0] for c in (config, toy(em_iters=1, no_coord_add=True)))
    moved = (with_["mu"] - without["mu"]).reshape(2, 5, P, P)
    weights = with_["conv_a"].sum(-1) / with_["conv_a"].sum((1, 2))[:, None]                    # (N, places)
    mean = weights @ sn.field_centres(config)
    np.testing.assert_allclose(moved[:, :, :2, 3], np.broadcast_to(mean[:, None], (2, 5, 2)), atol=1e-6)
    moved[:, :, :2, 3] = 0
    np.testing.assert_allclose(moved, 0, atol=1e-9)
    centres = sn.field_centres(config)
    assert len(centres) == 25 and centres[1, 0] > centres[0, 0] and centres[1, 1] == centres[0, 1] and centres[5, 1] > centres[0, 1]


def test_scores(rng):
    out, _ = sn.forward(params64(toy()), {"images": rng.random((2, 32, 32, 1))}, toy())
    np.testing.assert_allclose(out["scores"], (out["mu"] ** 2).sum(-1) / 16 + 4 * (out["a"] - 0.5))
    out, _ = sn.forward(params64(toy()), {"images": rng.random((2, 32, 32, 1))}, toy(loss="spread"))
    assert np.array_equal(out["scores"], out["a"])


def test_parameter_counts():
    sizes = {model: sum(math.prod(p.shape) for p in sn.init_params(sn.Config(model=model)).values()) for model in sn.MODELS}
    assert sizes["cnn"] == 262_949 and 558_000 < sizes["dense-caps"] < 559_000 and sizes["caps"] == 25_758
    assert abs(sizes["cnn-pool"] / sizes["caps"] - 1) < 0.1 and abs(sizes["cnn-gap"] / sizes["caps"] - 1) < 0.1


# ---------------------------------------------------------------- losses

def test_spread_loss_by_hand():
    loss, da = sn.spread_loss(np.full((2, 5), 0.4), np.array([1, 3]), 0.2)
    assert abs(loss - 4 * 0.2 ** 2) < 1e-12
    a = np.array([[0.8, 0.5, 0.7, 0.1, 0.1]])
    loss, da = sn.spread_loss(a, np.array([0]), 0.2)                                            # only 0.7 is within 0.2
    assert abs(loss - 0.01) < 1e-12
    np.testing.assert_allclose(da, [[-0.2, 0, 0.2, 0, 0]], atol=1e-12)
    np.testing.assert_allclose(sn.spread_loss(np.tile(a, (2, 1)), np.array([0, 0]), np.array([0.2, 0.4]))[0],
                               (0.01 + 0.09 + 0.01 * 0 + 0.3 ** 2 - 0.09 + 0.1 ** 2) / 2, atol=1e-9)


def test_cross_entropy_by_hand():
    loss, dscores = sn.cross_entropy(np.log(np.array([[0.2, 0.3, 0.5]])), np.array([2]))
    assert abs(loss - math.log(2)) < 1e-12
    np.testing.assert_allclose(dscores, [[0.2, 0.3, -0.5]])
    assert abs(sn.cross_entropy(np.full((4, 5), 1e4), np.arange(4))[0] - math.log(5)) < 1e-9


def test_margin_rises():
    config = sn.resolved(sn.Config(n_epochs=8))
    data = sn.load_data(config)
    margins = [next(sn.epoch_samples(data, epoch, config))["margin"][0] for epoch in (0, 7)]
    np.testing.assert_allclose(margins, [0.2, 0.9], rtol=1e-6)


def test_pool_by_loops(rng):
    x = rng.standard_normal((2, 5, 6, 3))
    y, _ = sn.pool_forward(x)
    for n, i, j, c in np.ndindex(2, 2, 3, 3):
        assert y[n, i, j, c] == x[n, 2 * i:2 * i + 2, 2 * j:2 * j + 2, c].max()
