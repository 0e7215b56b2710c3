"""Every gradient of the capsule networks and their CNNs against centred differences; purity, buffers, dtypes."""
import dataclasses
import itertools
from types import SimpleNamespace

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from gradcheck import RELU, SMOOTH, check_coordinates, check_directions, check_loss, check_op, poison
from reference_smallnorb import CAPSULES, CNNS, TRAINED, batch64, params64, state64, tiny

P, D = sn.P, sn.D
WINDOWS = {"class": None, "conv": sn.Window(1, 5, 5, 1), "conv2": sn.Window(1, 4, 4, 1, stride=1)}      # 2x2 parents


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


# ---------------------------------------------------------------- EM routing

def test_pose_votes(rng):
    check_op(sn.pose_votes_forward, sn.pose_votes_backward, rng.standard_normal((2, 3, D)),
             rng.standard_normal((2, 3, P, P)))


@pytest.mark.parametrize("window", [None, sn.Window(1, 5, 5, 2), sn.Window(1, 4, 4, 2, stride=1)])
def test_responsibilities(rng, window):
    L, I = (4, 18) if window else (3, 5)
    check_op(lambda x: sn.responsibilities_forward(x, window), sn.responsibilities_backward,
             rng.standard_normal((L, 3, I)))


def m_step_op(L, J, lambda_, ratio, lowered=0.0):
    """forward and backward of V, r, beta_u, beta_a -> mu, sigma2 and x, joined. lowered (D,): taken from the squares of
    the votes, so that a variance comes out negative, as rounding makes it where all votes are equal"""
    shapes = (L, J, D), (L, J, D), (L, J)

    def forward(V, r, beta_u, beta_a):
        out, cache = sn.m_step_forward(V, V * V - lowered, r, beta_u, beta_a, lambda_, ratio)
        return joined(*out), SimpleNamespace(V=V, m_step=cache)

    def backward(dout, cache):
        dr, dbeta_u, dbeta_a, term = sn.m_step_backward(*parted(dout, *shapes), cache.m_step)
        return of_votes(term, cache.V), dr, dbeta_u, dbeta_a

    return forward, backward


@pytest.mark.parametrize("types", [3, 1])
def test_m_step(rng, types):
    """mu, sigma2 and x together, as functions of votes, assignments and betas; also with the same assignments for all
    types"""
    L, J, I = 2, 3, 4
    check_op(*m_step_op(L, J, lambda_=2.0, ratio=0.6), rng.standard_normal((L, J, I, D)),
             rng.uniform(0.2, 1, (L, types, I)), rng.standard_normal(J), rng.standard_normal(J), tol=10 * SMOOTH)


@pytest.mark.parametrize("types", [3, 1])
def test_m_step_where_the_variance_is_clamped(rng, types):
    """sigma2 stays at its floor, and mu, x change with the votes as if it were constant: no gradient flows through
    it"""
    L, J, I = 2, 3, 4
    lowered = np.where(np.arange(D) % 3, 0.0, 9.0)                        # of 6 dimensions: far below any variance
    forward, backward = m_step_op(L, J, lambda_=2.0, ratio=0.6, lowered=lowered)
    args = (rng.standard_normal((L, J, I, D)), rng.uniform(0.2, 1, (L, types, I)), rng.standard_normal(J),
            rng.standard_normal(J))
    _, sigma2, _ = parted(forward(*args)[0], (L, J, D), (L, J, D), (L, J))
    assert np.all((sigma2 == sn.SIGMA2_EPS) == (lowered > 0))
    check_op(forward, backward, *args, tol=10 * SMOOTH)


def test_no_gradient_flows_through_the_variance_of_equal_votes(rng):
    """Rounding leaves it at or below 0 in many dimensions: there sigma2 is its floor, and only mu's gradient reaches
    the votes"""
    L, J, I = 8, 1, 6
    V = np.broadcast_to(rng.standard_normal((L, J, 1, D)), (L, J, I, D)).astype(np.float32)
    r = rng.uniform(0.2, 1, (L, J, I)).astype(np.float32)
    betas = np.zeros((2, J), np.float32)
    (_, sigma2, _), cache = sn.m_step_forward(V, V * V, r, *betas, 1.0, 0.5)
    clamped = cache.variance <= 0
    assert 0.2 < clamped.mean() and np.all(sigma2[clamped] == np.float32(sn.SIGMA2_EPS))
    dmu, dsigma2, dx = (rng.standard_normal(shape).astype(np.float32) for shape in ((L, J, D), (L, J, D), (L, J)))
    _, _, _, (coefficient, linear, quadratic) = sn.m_step_backward(dmu, dsigma2, dx, cache)
    assert np.array_equal(coefficient, r) and not quadratic[clamped].any()
    np.testing.assert_allclose(linear[clamped], (dmu / r.sum(-1, keepdims=True))[clamped], rtol=1e-4)


def test_e_step(rng):
    L, J, I = 2, 3, 4

    def forward(V, mu, sigma2, x):
        logits, cache = sn.e_step_forward(V, V * V, mu, sigma2, x)
        return logits, SimpleNamespace(V=V, e_step=cache)

    def backward(dout, cache):
        dmu, dsigma2, dx, term = sn.e_step_backward(dout, cache.e_step)
        return of_votes(term, cache.V), dmu, dsigma2, dx

    check_op(forward, backward, rng.standard_normal((L, J, I, D)), rng.standard_normal((L, J, D)),
             rng.uniform(0.3, 2, (L, J, D)), rng.standard_normal((L, J)), tol=10 * SMOOTH)


def test_votes_gradient_is_the_sum_of_its_terms(rng):
    L, J, I = 3, 2, 4
    V = rng.standard_normal((L, J, I, D))
    terms = [(rng.standard_normal((L, types, I)), *rng.standard_normal((2, L, J, D))) for types in (1, J, J)]
    dV = sn.votes_gradient(terms, V, V * V, np.empty)
    np.testing.assert_allclose(dV, sum(of_votes(term, V) for term in terms), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("of, iterations, layer", [
    *itertools.product(["mu", "x", "both"], [1, 2, 3], ["class"]), *itertools.product(["both"], [1, 3], ["conv"]),
    ("mu", 2, "conv"), ("mu", 1, "conv2"), ("x", 2, "conv2"), ("both", 3, "conv2")])
def test_em_routing(rng, of, iterations, layer):
    """Through all iterations: votes, lower activations and both betas, which have no influence on the first mu"""
    window = WINDOWS[layer]
    L, J, I = (4, 2, 9) if window else (2, 3, 4)
    schedule = "official" if of == "both" else "constant"
    config = tiny(routing_iters=iterations, final_lambda=1.0, lambda_schedule=schedule)
    weights = of != "x", of != "mu"
    args = (rng.standard_normal((L, J, I, D)), rng.uniform(0.2, 1, (L, I)), *0.1 * rng.standard_normal((2, J)))
    n = 2 if (of, iterations) == ("mu", 1) else 4

    def forward(*moved):
        (mu, x), cache = sn.em_routing_forward(*moved, *args[len(moved):], config, window)
        return joined(weights[0] * mu, weights[1] * x), cache

    def backward(dout, cache):
        dmu, dx = parted(dout, (L, J, D), (L, J))
        grads = sn.em_routing_backward(weights[0] * dmu, weights[1] * dx, cache)
        assert not any(g.any() for g in grads[n:])
        return grads[:n]

    check_op(forward, backward, *args[:n], tol=1e-5)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("iterations", [2, 3])
def test_detached_holds_the_last_assignments(rng, monkeypatch, iterations, window):
    """Its gradient is that of the routing whose responsibilities are frozen at what they were"""
    L, J, I = (4, 2, 9) if window else (2, 3, 5)
    config = tiny(routing_iters=iterations, final_lambda=1.0, routing_grad="detached")
    args = rng.standard_normal((L, J, I, D)), rng.uniform(0.2, 1, (L, I)), *rng.standard_normal((2, J))
    (mu, x), cache = sn.em_routing_forward(*args, config, window)
    frozen = [step.R.copy() for step in cache.steps[1:]]

    def forward(*args):
        replayed = iter(frozen)
        monkeypatch.setattr(sn, "responsibilities_forward", lambda *args, **kwargs: (next(replayed), None))
        (mu, x), cache = sn.em_routing_forward(*args, config, window)
        return joined(mu, x), cache

    check_op(forward, lambda dout, cache: sn.em_routing_backward(*parted(dout, (L, J, D), (L, J)), cache), *args,
             tol=1e-5)
    assert np.array_equal(forward(*args)[0], joined(mu, x))


def conv_caps_op(config, stride, N, Ho, Wo, J):
    def forward(*args):
        (mu, a), cache = sn.conv_caps_forward(*args, config, stride)
        return joined(mu, a), cache

    def backward(dout, cache):
        return sn.conv_caps_backward(*parted(dout, (N, Ho, Wo, J, D), (N, Ho, Wo, J)), cache)

    return forward, backward


def conv_caps_args(rng, N, H, W, B, J):
    return (rng.standard_normal((N, H, W, B, D)), rng.uniform(0.2, 1, (N, H, W, B)),
            rng.standard_normal((9 * B, J, P, P)), *0.1 * rng.standard_normal((2, J)))


@pytest.mark.parametrize("H, W, stride", [(4, 3, 1), (3, 4, 2)])
def test_convolutional_capsules(rng, monkeypatch, H, W, stride):
    """Of two places, and of one with a column that nobody sees; more images than a chunk"""
    monkeypatch.setattr(sn, "EM_CHUNK", 1)
    op = conv_caps_op(tiny(routing_iters=2, final_lambda=2.0), stride, 2, 3 - stride, 1, 2)
    check_op(*op, *conv_caps_args(rng, 2, H, W, 1, 2), tol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutional_capsules_that_share_children(rng, stride):
    """Many places and types, in random directions"""
    N, H, W, B, J = sn.EM_CHUNK + 1, 6, 5, 2, 3
    grid = sn.Window(N, H, W, B, stride=stride).parents
    assert grid == ((4, 3) if stride == 1 else (2, 2))
    forward, backward = conv_caps_op(tiny(routing_iters=3, final_lambda=2.0), stride, N, *grid, J)
    params = dict(zip(("pose", "active", "W", "beta_u", "beta_a"), conv_caps_args(rng, N, H, W, B, J)))
    out, cache = forward(*params.values())
    dout = rng.standard_normal(out.shape)
    grads = dict(zip(params, backward(dout, cache)))
    check_directions(lambda p: np.vdot(dout, forward(*p.values())[0]), params, grads, tol=1e-5)


def test_primary_capsules(rng):
    N, H, W, B = 2, 2, 3, 2

    def forward(x):
        out, cache = sn.primary_caps_forward(x)
        return joined(*out), cache

    def backward(dout, cache):
        return sn.primary_caps_backward(*parted(dout, (N, H, W, B, D), (N, H, W, B)), cache)

    check_op(forward, backward, rng.standard_normal((N, H, W, B * (D + 1))))


# ---------------------------------------------------------------- vector capsules

def test_places_of_vectors(rng):
    centres = rng.standard_normal((3, 2))
    check_op(lambda u: sn.with_places_forward(u, centres), sn.with_places_backward, rng.standard_normal((2, 6, 4)))


def test_shared_votes(rng):
    """Of 3 places x 2 types"""
    check_op(lambda u, W: sn.shared_votes_forward(u, W, 3), sn.shared_votes_backward, rng.standard_normal((2, 6, 3)),
             rng.standard_normal((2, 3, 4, 5)))


def test_self_routing(rng):
    u_hat, logits = rng.standard_normal((2, 4, 3, 5)), rng.standard_normal((2, 4, 3))
    check_op(sn.self_routing_forward, sn.self_routing_backward, u_hat, logits)

    def uniform_backward(dv, cache):
        du_hat, dlogits = sn.self_routing_backward(dv, cache)
        assert dlogits is None
        return du_hat

    check_op(lambda u_hat: sn.self_routing_forward(u_hat, None), uniform_backward, u_hat)


@pytest.mark.parametrize("routing_grad", ["full", "detached"])
@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_dynamic_routing(rng, monkeypatch, iterations, routing_grad):
    """Without a bias; detached: with its couplings frozen at what they were"""
    config = tiny("dynamic", routing_iters=iterations, routing_grad=routing_grad)
    u_hat = rng.standard_normal((2, 4, 3, 5))
    frozen = [step.c.copy() for step in sn.routing_forward(u_hat, config)[1].steps[1:]]

    def forward(u_hat):
        replayed = iter(frozen)
        if routing_grad == "detached":
            monkeypatch.setattr(sn, "softmax_forward", lambda b: (next(replayed), None))
        return sn.routing_forward(u_hat, config)

    check_op(forward, lambda dv, cache: sn.routing_backward(dv, cache)[0], u_hat, tol=1e-5)


# ---------------------------------------------------------------- losses

def test_losses(rng):
    check_loss(sn.cross_entropy, rng.standard_normal((3, 5)), np.array([0, 4, 2]))
    check_loss(sn.spread_loss, rng.random((3, 5)), np.array([0, 4, 2]), 0.73)
    check_loss(sn.spread_loss, rng.random((3, 5)), np.array([0, 4, 2]), np.array([0.2, 0.9, 0.6]))
    check_loss(sn.margin_loss, rng.random((3, 5)), np.eye(5)[[0, 4, 2]])
    check_op(sn.log_sigmoid_forward, sn.log_sigmoid_backward, 3 * rng.standard_normal((3, 5)))


@pytest.mark.parametrize("loss", ["xent", "margin", "spread"])
@pytest.mark.parametrize("model", TRAINED)
def test_the_loss_of_every_networks_scores(rng, model, loss):
    """Logits of matrix capsules and CNNs, lengths of vectors"""
    scores = rng.uniform(0.02, 0.98, (3, 5)) if model in sn.VECTOR_MODELS else 2 * rng.standard_normal((3, 5))
    batch = {"labels": np.array([0, 4, 2]), "margin": np.array([0.2, 0.9, 0.6])}
    check_loss(sn.naming_loss, scores, batch, tiny(model, loss=loss), h=1e-6)


# ---------------------------------------------------------------- whole networks

BIG = dict(primary_types=2, conv_types=3, conv2_types=1)
SOFT = dict.fromkeys(sn.EM_MODELS, {"final_lambda": 0.1})                # no activation so near 1 that nothing moves it
NETWORKS = [
    ("caps", {}), ("caps", BIG | dict(loss="margin", data="smallnorb")),
    ("caps", BIG | dict(loss="spread", no_coord_add=True)), ("caps", dict(routing_iters=1, loss="spread")),
    ("caps", dict(routing_iters=3, lambda_schedule="official", data="toys")),
    ("em", {}), ("em", dict(loss="margin", data="smallnorb", routing_iters=3)), ("em", dict(loss="spread", width=3)),
    ("em", dict(routing_iters=1, no_coord_add=True, data="toys", lambda_schedule="official", final_lambda=2.0)),
    ("dynamic", {}), ("dynamic", dict(loss="xent", routing_iters=3, data="toys")),
    ("dynamic", dict(loss="spread", routing_iters=1, data="smallnorb")),
    ("dynamic-shared", {}), ("dynamic-shared", dict(loss="xent", routing_iters=3, data="toys", head_types=3)),
    ("dynamic-shared", dict(loss="spread", routing_iters=1)), ("dynamic-shared", dict(no_coord_add=True)),
    ("self-routing", {}), ("self-routing", dict(loss="xent", data="toys", no_coord_add=True, width=3)),
    ("self-routing", dict(loss="spread", uniform=True)),
    ("self-routing", dict(loss="xent", uniform=True, no_coord_add=True, data="smallnorb")),
    ("cnn", {}), ("cnn", dict(loss="margin", data="toys")), ("cnn", dict(loss="spread", data="smallnorb", width=3)),
    ("gap", {}), ("gap", dict(loss="margin", data="toys")), ("gap", dict(loss="spread", data="smallnorb", width=3)),
    ("dense", {}), ("dense", dict(loss="margin", data="toys")),
    ("dense", dict(loss="spread", data="smallnorb", width=3))]


def training_loss(params, batch, config):
    """The loss alone, with the batch's own statistics"""
    out, _ = sn.forward(params, batch["images"], config, np.empty, batch.get("dropout_mask"), {})
    return sn.naming_loss(out["scores"], batch, config)[0]


@pytest.mark.parametrize("model, changes, dropout", [
    (*network, dropout) for network in NETWORKS for dropout in (True, False)
    if not (dropout and network[0] in sn.VECTOR_MODELS)], ids=str)
def test_every_parameter_has_its_gradient(model, changes, dropout):
    config = tiny(model, **SOFT.get(model, {}) | changes)
    params, batch = params64(config), batch64(config, 3)                                   # few ReLUs near their kink
    if not dropout:
        batch.pop("dropout_mask", None)
    terms, grads, _ = sn.loss_and_grads(params, batch, config)
    assert terms["loss"] == training_loss(params, batch, config)
    for name, g in grads.items():
        assert g.shape == params[name].shape and np.abs(g).max() > 1e-9, f"{name} is identically zero"
    check_directions(lambda p: training_loss(p, batch, config), params, grads, n=1 if dropout else 2, h=1e-7)
    if not dropout:
        check_coordinates(lambda p: training_loss(p, batch, config), params, grads, n=1, tol=10 * RELU, h=1e-7)
        half, half_grads, _ = sn.loss_and_grads(params, batch, config, batch_fraction=0.5)
        assert half["loss"] == terms["loss"] / 2
        np.testing.assert_allclose(half_grads["conv1_w"], grads["conv1_w"] / 2, rtol=1e-9)


@pytest.mark.parametrize("model, loss, iterations", [
    ("caps", "xent", 2), ("caps", "spread", 3), ("em", "xent", 3), ("em", "margin", 2), ("dynamic", "margin", 2),
    ("dynamic", "xent", 3), ("dynamic-shared", "spread", 3)])
def test_detached_is_the_gradient_of_the_network_with_its_couplings_frozen(model, loss, iterations, monkeypatch):
    """Responsibilities of EM routing, couplings of dynamic routing"""
    config = tiny(model, loss=loss, routing_iters=iterations, routing_grad="detached", **SOFT.get(model, {}))
    params, batch = params64(config), batch64(config, sn.EM_CHUNK + 1)
    divide = "responsibilities_forward" if model in sn.EM_MODELS else "softmax_forward"
    frozen, original = [], getattr(sn, divide)

    def record(*args, **kwargs):
        R, cache = original(*args, **kwargs)
        frozen.append(R.copy())
        return R, cache

    def value(p):
        replayed = iter(frozen)
        monkeypatch.setattr(sn, divide, lambda *args, **kwargs: (next(replayed), None))
        loss = training_loss(p, batch, config)
        assert next(replayed, None) is None
        return loss

    monkeypatch.setattr(sn, divide, record)
    terms, grads, _ = sn.loss_and_grads(params, batch, config)
    assert len(frozen) == (5 if model == "caps" else 1) * (iterations - 1)        # chunks of 2 layers, and the classes
    assert value(params) == pytest.approx(terms["loss"], rel=1e-12)
    check_directions(value, params, grads, n=1, h=1e-7)
    monkeypatch.setattr(sn, divide, original)
    _, full, _ = sn.loss_and_grads(params, batch, dataclasses.replace(config, routing_grad="full"))
    for name in params:
        assert np.abs(full[name] - grads[name]).max() > 1e-3 * np.abs(full[name]).max(), name


def test_scales_and_shifts_before_a_normalisation_mean_nothing():
    """A convolution before one has no bias, and no gradient along its own weights, whose scale is taken away"""
    for model, layers in {"caps": ("conv1", "primary"), "dense": ("conv2", "conv4", "fc1")}.items():
        config = tiny(model)
        params = params64(config)
        _, grads, _ = sn.loss_and_grads(params, batch64(config, 4), config)
        for name in layers:
            w, dw = params[name + "_w"], grads[name + "_w"]
            assert name + "_b" not in params
            assert np.abs((w * dw).sum((*range(w.ndim - 1),))).max() < 1e-3 * np.abs(w * dw).sum()


def test_statistics_take_part_in_the_gradient():
    """With the statistics held at what they are the gradient is another one"""
    config = tiny("gap")
    params, batch = params64(config), batch64(config, 4)
    _, grads, statistics = sn.loss_and_grads(params, batch, config)
    d = np.random.default_rng(0).standard_normal(params["conv5_w"].shape)
    ends = []
    for step in (1e-6, -1e-6):
        moved = params | statistics | {"conv5_w": params["conv5_w"] + step * d}
        scores = sn.forward(moved, batch["images"], config, dropout_mask=batch["dropout_mask"])[0]["scores"]
        ends.append(sn.naming_loss(scores, batch, config)[0])
    assert abs((ends[0] - ends[1]) / 2e-6 / np.vdot(d, grads["conv5_w"]) - 1) > 0.05


# ---------------------------------------------------------------- purity, buffers, dtypes

@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("model", TRAINED)
def test_results_do_not_depend_on_the_buffers(model, dtype):
    """np.empty, buffers full of nan, an Arena at its first use and later, shards of several sizes: all the same bits"""
    config = tiny(model)
    params = {name: p.astype(dtype) for name, p in params64(config).items()}
    samples, arena = batch64(config, 14), sn.Arena()
    for rows in (slice(0, 9), slice(9, 14), slice(0, 9), slice(3, 4)):                # chunks of 4, 4, 1; of 4, 1; of 1
        batch = sn.to_batch(samples, rows, dtype)
        pure = sn.loss_and_grads(params, batch, config)
        assert pure[1].keys() == params.keys() and pure[2].keys() == sn.init_state(params).keys()
        for empty in (poison, arena.rewind()):
            terms, *arrays = sn.loss_and_grads(params, batch, config, empty)
            assert terms == pure[0]
            for found, expected in zip(arrays, pure[1:]):
                assert found.keys() == expected.keys()
                for name, x in expected.items():
                    assert x.dtype == dtype and name not in params or x.shape == params[name].shape, name
                    np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.mark.parametrize("model", TRAINED)
def test_results_in_evaluation_do_not_depend_on_the_buffers(model):
    config = tiny(model)
    params, images, arena = params64(config) | state64(config), batch64(config, 9)["images"], sn.Arena()
    for rows in (slice(0, 5), slice(5, 9), slice(0, 5)):
        pure = sn.forward(params, images[rows], config)[0]["scores"]
        for empty in (poison, arena.rewind()):
            assert np.array_equal(sn.forward(params, images[rows], config, empty)[0]["scores"], pure)


@pytest.mark.parametrize("model", TRAINED)
def test_nothing_given_is_changed_and_a_backward_can_be_asked_twice(model):
    config = tiny(model)
    params, state, batch = params64(config), state64(config), batch64(config, 6)
    given = params | state | batch
    before = {name: x.copy() for name, x in given.items()}
    forward, backward = sn.NETWORKS[model]
    forward(params | state, batch["images"], config, np.empty, None, None)
    assert all(np.array_equal(before[name], x) for name, x in given.items())
    _, cache = forward(params, batch["images"], config, np.empty, batch.get("dropout_mask"), {})
    dscores = np.random.default_rng(0).standard_normal((6, 5))
    kept = dscores.copy()
    first = {name: g.copy() for name, g in backward(dscores, cache, config).items()}
    second = backward(dscores, cache, config)
    assert np.array_equal(dscores, kept) and all(np.array_equal(first[name], second[name]) for name in params)
    assert all(np.array_equal(before[name], x) for name, x in given.items())
    scores = np.full((6, 5), 0.4)
    for loss in "xent", "margin", "spread":
        sn.naming_loss(scores, batch, dataclasses.replace(config, loss=loss))
        assert np.all(scores == 0.4)


def floats(tree):
    """dtypes of all float arrays in nested tuples, lists, dicts and namespaces"""
    if isinstance(tree, SimpleNamespace):
        tree = vars(tree)
    if isinstance(tree, (tuple, list, dict)):
        return set().union(*map(floats, tree.values() if isinstance(tree, dict) else tree))
    return {tree.dtype} if isinstance(tree, (np.ndarray, np.floating)) and tree.dtype.kind == "f" else set()


@pytest.mark.parametrize("model", TRAINED)
@pytest.mark.parametrize("changes", [dict(loss="xent"), dict(loss="margin", routing_iters=3),
                                     dict(loss="spread", routing_grad="detached")], ids=str)
def test_float32_stays_float32(model, changes):
    """Outputs, gradients, statistics, and all that is kept in between"""
    config = tiny(model, **changes)
    params = sn.init_params(config)
    batch = sn.to_batch(batch64(config, 5), slice(None))
    for weights, statistics in ((params, {}), (params | sn.init_state(params), None)):
        out, cache = sn.forward(weights, batch["images"], config, np.empty, batch.get("dropout_mask"), statistics)
        assert floats((out, cache)) == {np.dtype(np.float32)}
    terms, grads, statistics = sn.loss_and_grads(params, batch, config, batch_fraction=0.3)
    assert floats((grads, statistics)) == {np.dtype(np.float32)} and type(terms["loss"]) is float


@pytest.mark.parametrize("model", TRAINED)
def test_a_batch_is_the_weighted_sum_of_its_shards(model):
    """40 rows are shards of 16, 16 and 8, each a group with statistics of its own: the last weighs half as much"""
    config = tiny(model)
    params, samples = params64(config), batch64(config, 45)
    rows = np.arange(3, 43)
    samples = {name: x if name == "labels" else x.astype(np.float32) for name, x in samples.items()}
    with sn.Runner(2) as runner:
        terms, shard_grads, statistics = runner.loss_and_grads(params, samples, rows, config)
        tests, weights = {name: samples[name] for name in ("images", "labels")}, params | state64(config)
        scores = runner.forward(weights, tests, config)["scores"]
    shards, total = [slice(3, 19), slice(19, 35), slice(35, 43)], dict.fromkeys(terms, 0)
    for shard, grads, found in itertools.zip_longest(shards, shard_grads, statistics):
        share = (shard.stop - shard.start) / 40
        alone, expected, group = sn.loss_and_grads(params, sn.to_batch(samples, shard), config)
        total["loss"] += share * alone["loss"]
        total["hits"] += alone["hits"]
        assert found.keys() == group.keys() and all(np.array_equal(found[name], x) for name, x in group.items())
        for name in params:
            largest = np.abs(expected[name]).max()
            np.testing.assert_allclose(grads[name], share * expected[name], rtol=1e-3, atol=1e-5 * largest)
    assert terms == pytest.approx(total, rel=1e-6)
    plain, _ = sn.forward(weights, samples["images"], config)
    np.testing.assert_allclose(scores, plain["scores"], rtol=1e-4, atol=1e-5)


def test_all_networks_are_tested():
    """The lists above hold every network there is, each with every loss"""
    assert set(TRAINED) == {*CAPSULES, *CNNS} == set(sn.MODELS) - {"nearest"}
    tested = {(model, tiny(model, **changes).loss) for model, changes in NETWORKS}
    assert tested == set(itertools.product(TRAINED, ("xent", "margin", "spread")))
