"""Every gradient of the matrix capsules and their CNNs against centred differences; purity, buffers, dtypes."""
import dataclasses
from types import SimpleNamespace

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from gradcheck import RELU, SMOOTH, check_coordinates, check_directions, check_loss, check_op, poison
from reference_smallnorb import CAPSULES, CNNS, TRAINED, batch64, params64, tiny

P, D = sn.P, sn.D
WINDOW = sn.Window(1, 5, 5, 1)     # 2x2 places of parents


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


@pytest.mark.parametrize("window", [None, sn.Window(1, 5, 5, 2)])
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


@pytest.mark.parametrize("window", [None, WINDOW], ids=["class", "conv"])
@pytest.mark.parametrize("em_iters", [1, 2, 3])
@pytest.mark.parametrize("of", ["mu", "a", "both"])
def test_em_routing(rng, of, em_iters, window):
    """Through all iterations: votes, lower activations and both betas, which have no influence on the first mu"""
    L, J, I = (4, 2, 9) if window else (2, 3, 4)
    config = tiny(em_iters=em_iters, final_lambda=2.0)
    weights = of != "a", of != "mu"
    args = (rng.standard_normal((L, J, I, D)), rng.uniform(0.2, 1, (L, I)), *0.1 * rng.standard_normal((2, J)))
    n = 2 if (of, em_iters) == ("mu", 1) else 4

    def forward(*moved):
        (mu, act), cache = sn.em_routing_forward(*moved, *args[len(moved):], config, window)
        return joined(weights[0] * mu, weights[1] * act), cache

    def backward(dout, cache):
        dmu, dact = parted(dout, (L, J, D), (L, J))
        grads = sn.em_routing_backward(weights[0] * dmu, weights[1] * dact, cache)
        assert not any(g.any() for g in grads[n:])
        return grads[:n]

    check_op(forward, backward, *args[:n], tol=1e-5)


@pytest.mark.parametrize("window", [None, WINDOW], ids=["class", "conv"])
@pytest.mark.parametrize("em_iters", [2, 3])
def test_detached_holds_the_last_assignments(rng, monkeypatch, em_iters, window):
    """Its gradient is that of the routing whose responsibilities are frozen at what they were"""
    L, J, I = (4, 2, 9) if window else (2, 3, 5)
    config = tiny(em_iters=em_iters, final_lambda=2.0, routing_grad="detached")
    args = rng.standard_normal((L, J, I, D)), rng.uniform(0.2, 1, (L, I)), *rng.standard_normal((2, J))
    (mu, act), cache = sn.em_routing_forward(*args, config, window)
    frozen = [step.R.copy() for step in cache.steps[1:]]

    def forward(*args):
        replayed = iter(frozen)
        monkeypatch.setattr(sn, "responsibilities_forward", lambda *args, **kwargs: (next(replayed), None))
        (mu, act), cache = sn.em_routing_forward(*args, config, window)
        return joined(mu, act), cache

    check_op(forward, lambda dout, cache: sn.em_routing_backward(*parted(dout, (L, J, D), (L, J)), cache), *args,
             tol=1e-5)
    assert np.array_equal(forward(*args)[0], joined(mu, act))


def test_convolutional_capsules(rng):
    """More images than a chunk"""
    config, N, B, J = tiny(em_iters=2, final_lambda=2.0), sn.EM_CHUNK + 1, 1, 2

    def forward(*args):
        (mu, a), cache = sn.conv_caps_forward(*args, config)
        return joined(mu, a), cache

    def backward(dout, cache):
        return sn.conv_caps_backward(*parted(dout, (N, 1, J, D), (N, 1, J)), cache)

    check_op(forward, backward, rng.standard_normal((N, 3, 3, B, D)), rng.uniform(0.2, 1, (N, 3, 3, B)),
             rng.standard_normal((9 * B, J, P, P)), *0.1 * rng.standard_normal((2, J)), tol=1e-5)


@pytest.mark.parametrize("loss", ["xent", "spread"])
def test_class_scores(rng, loss):
    """The activations' gradient; the poses' too, unless it is the spread loss, to which they mean nothing"""
    mu, a = rng.standard_normal((2, 5, D)), rng.random((2, 5))
    if loss == "xent":
        check_op(lambda mu, a: sn.class_scores_forward(mu, a, tiny()), sn.class_scores_backward, mu, a)
    else:
        scores, cache = sn.class_scores_forward(mu, a, tiny(loss="spread"))
        dmu, da = sn.class_scores_backward(scores, cache)
        assert np.array_equal(scores, a) and np.array_equal(da, a) and dmu.shape == mu.shape and not dmu.any()


def test_primary_capsules(rng):
    N, H, W, B = 2, 2, 3, 2

    def forward(x):
        out, cache = sn.primary_caps_forward(x)
        return joined(*out), cache

    def backward(dout, cache):
        return sn.primary_caps_backward(*parted(dout, (N, H, W, B, D), (N, H, W, B)), cache)

    check_op(forward, backward, rng.standard_normal((N, H, W, B * (D + 1))))


def test_losses(rng):
    check_loss(sn.cross_entropy, rng.standard_normal((3, 5)), np.array([0, 4, 2]))
    check_loss(sn.spread_loss, rng.random((3, 5)), np.array([0, 4, 2]), 0.73)
    check_loss(sn.spread_loss, rng.random((3, 5)), np.array([0, 4, 2]), np.array([0.2, 0.9, 0.6]))


# ---------------------------------------------------------------- whole networks

BIG = dict(primary_types=2, primary_kernel=3, conv_types=3)
NETWORKS = [
    ("caps", {}), ("caps", BIG), ("caps", BIG | dict(loss="spread")), ("caps", BIG | dict(em_iters=3)),
    ("caps", dict(loss="spread", em_iters=3)), ("caps", BIG | dict(em_iters=1, no_coord_add=True)),
    ("caps", dict(primary_kernel=1, data="smallnorb")), ("caps", dict(data="smallnorb", primary_types=2)),
    ("caps", dict(primary_kernel=3, conv_types=1)), ("dense-caps", {}), ("dense-caps", dict(loss="spread")),
    ("dense-caps", dict(data="smallnorb")), ("dense-caps", dict(loss="spread", em_iters=1)), ("cnn", {}),
    ("cnn", dict(data="smallnorb")), ("cnn-pool", {}), ("cnn-pool", dict(data="smallnorb")), ("cnn-gap", {}),
    ("cnn-gap", dict(data="smallnorb")), ("cnn-gap", dict(loss="spread"))]


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("model, changes", NETWORKS, ids=str)
def test_every_parameter_has_its_gradient(model, changes, dropout):
    config = tiny(model, **changes)
    params, batch = params64(config), batch64(config, 3)                                   # few ReLUs near their kink
    if not dropout:
        del batch["dropout_mask"]
    terms, grads, _ = sn.loss_and_grads(params, batch, config)
    for name, g in grads.items():
        assert g.shape == params[name].shape and np.abs(g).max() > 1e-9, f"{name} is identically zero"

    def loss(p):
        return sn.loss_and_grads(p, batch, config)[0]["loss"]

    check_directions(loss, params, grads, n=2, h=1e-7 if model in CNNS else 1e-6)         # few kinks in so small a step
    if not dropout:
        check_coordinates(loss, params, grads, n=2, tol=10 * RELU, h=1e-6)
        half, half_grads, _ = sn.loss_and_grads(params, batch, config, batch_fraction=0.5)
        assert half["loss"] == terms["loss"] / 2
        np.testing.assert_allclose(half_grads["conv1_w"], grads["conv1_w"] / 2, rtol=1e-9)


@pytest.mark.parametrize("model, loss, em_iters", [("caps", "xent", 2), ("caps", "xent", 3), ("caps", "spread", 3),
                                                   ("dense-caps", "xent", 3)])
def test_detached_is_the_gradient_of_the_network_with_its_responsibilities_frozen(model, loss, em_iters, monkeypatch):
    config = tiny(model, loss=loss, em_iters=em_iters, routing_grad="detached")
    params, batch = params64(config), batch64(config, sn.EM_CHUNK + 1)
    frozen, original = [], sn.responsibilities_forward

    def record(*args, **kwargs):
        R, cache = original(*args, **kwargs)
        frozen.append(R.copy())
        return R, cache

    def value(p):
        replayed = iter(frozen)
        monkeypatch.setattr(sn, "responsibilities_forward", lambda *args, **kwargs: (next(replayed), None))
        terms, *_ = sn.loss_and_grads(p, batch, config)
        assert next(replayed, None) is None
        return terms["loss"]

    monkeypatch.setattr(sn, "responsibilities_forward", record)
    terms, grads, _ = sn.loss_and_grads(params, batch, config)
    assert len(frozen) == (3 if model == "caps" else 1) * (em_iters - 1)                   # chunks, and the classes
    assert value(params) == pytest.approx(terms["loss"], rel=1e-12)
    check_directions(value, params, grads, n=2)
    monkeypatch.setattr(sn, "responsibilities_forward", original)
    _, full, _ = sn.loss_and_grads(params, batch, dataclasses.replace(config, routing_grad="full"))
    assert not np.allclose(full["primary_w"], grads["primary_w"], rtol=1e-3)
    for name in {"conv_W", "class_W", "conv1_w"} & params.keys():
        assert np.abs(full[name] - grads[name]).max() > 1e-9, name


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
        for empty in (poison, arena.rewind()):
            terms, grads, _ = sn.loss_and_grads(params, batch, config, empty)
            assert terms == pure[0] and grads.keys() == params.keys()
            for name, g in pure[1].items():
                assert g.dtype == dtype and g.shape == params[name].shape, name
                np.testing.assert_array_equal(grads[name], g, err_msg=name)


@pytest.mark.parametrize("model", TRAINED)
def test_nothing_given_is_changed_and_a_backward_can_be_asked_twice(model):
    config = tiny(model)
    params, batch = params64(config), batch64(config, 6)
    before = {name: x.copy() for name, x in (params | batch).items()}
    forward, backward = sn.NETWORKS[model]
    _, cache = forward(params, batch["images"], config, np.empty, batch["dropout_mask"])
    dscores = np.random.default_rng(0).standard_normal((6, 5))
    kept = dscores.copy()
    first = {name: g.copy() for name, g in backward(dscores, cache, config).items()}
    second = backward(dscores, cache, config)
    assert np.array_equal(dscores, kept) and all(np.array_equal(first[name], second[name]) for name in params)
    assert all(np.array_equal(before[name], x) for name, x in (params | batch).items())


def floats(tree):
    """dtypes of all float arrays in nested tuples, lists, dicts and namespaces"""
    if isinstance(tree, SimpleNamespace):
        tree = vars(tree)
    if isinstance(tree, (tuple, list, dict)):
        return set().union(*map(floats, tree.values() if isinstance(tree, dict) else tree))
    return {tree.dtype} if isinstance(tree, (np.ndarray, np.floating)) and tree.dtype.kind == "f" else set()


@pytest.mark.parametrize("model", TRAINED)
@pytest.mark.parametrize("changes", [{}, dict(loss="spread", routing_grad="detached", em_iters=3)], ids=str)
def test_float32_stays_float32(model, changes):
    """Outputs, gradients, and all that is kept in between"""
    config = tiny(model, **changes)
    params = sn.init_params(config)
    batch = sn.to_batch(batch64(config, 5), slice(None))
    out, cache = sn.forward(params, batch["images"], config, dropout_mask=batch["dropout_mask"])
    assert floats(out) == {np.dtype(np.float32)} and floats(cache) == {np.dtype(np.float32)}
    terms, grads, _ = sn.loss_and_grads(params, batch, config, batch_fraction=0.3)
    assert floats(grads) == {np.dtype(np.float32)} and type(terms["loss"]) is float


@pytest.mark.parametrize("model", TRAINED)
def test_the_mean_of_shards_is_the_batchs_mean(model):
    """40 rows are shards of 16, 16 and 8: the last must weigh half as much"""
    config = tiny(model)
    params, samples = params64(config), batch64(config, 45)
    rows = np.arange(3, 43)
    samples = {name: x if name == "labels" else x.astype(np.float32) for name, x in samples.items()}
    whole, grads, _ = sn.loss_and_grads(params, sn.to_batch(samples, rows), config)
    with sn.Runner(2) as runner:
        terms, shard_grads, _ = runner.loss_and_grads(params, samples, rows, config)
        tests = {name: samples[name] for name in ("images", "labels")}
        scores = runner.forward(params, tests, config)["scores"]
    assert len(shard_grads) == 3 and terms == pytest.approx(whole, rel=1e-5)
    for name in params:
        total, largest = sum(g[name] for g in shard_grads), np.abs(grads[name]).max()
        np.testing.assert_allclose(total, grads[name], rtol=1e-3, atol=1e-5 * largest)
    plain, _ = sn.forward(params, samples["images"], config)
    np.testing.assert_allclose(scores, plain["scores"], rtol=1e-4, atol=1e-5)


def test_all_networks_are_tested():
    """The lists above hold every network there is"""
    assert {model for model, _ in NETWORKS} == set(TRAINED) == {*CAPSULES, *CNNS} == set(sn.MODELS) - {"nearest"}
