"""The second experiment's networks as wholes: against slow literal ones; what their layers mean; gradients; purity; dtypes."""
import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import smallnorb_novel_viewpoint as sn
from gradcheck import check_directions
from smallnorb_toy import batch64, caps_reference, cnn_reference, conv_votes, em_reference, field, params64, tiny

D, CAPSULES, CNNS = sn.D, ("caps", "dense-caps"), ("cnn", "cnn-pool", "cnn-gap")


# ---------------------------------------------------------------- against literal networks

@pytest.mark.parametrize("changes", [
    {}, dict(em_iters=1), dict(em_iters=3, primary_types=2), dict(primary_kernel=3, conv_types=1), dict(primary_kernel=6),
    dict(no_coord_add=True), dict(loss="spread"), dict(data="smallnorb"), dict(model="dense-caps"),
    dict(model="dense-caps", em_iters=3, loss="spread", data="smallnorb")], ids=str)
def test_capsule_networks_against_literal_ones(changes, monkeypatch):
    monkeypatch.setattr(sn, "MASS_EPS", 0.0)
    config = tiny(**changes)
    params, batch = params64(config), batch64(config, 2)
    for keep in (True, False):
        out, _ = sn.forward(params, batch if keep else {"images": batch["images"]}, config)
        for n in range(2):
            mu, a = caps_reference(params, batch["images"][n], config, batch["keep"][n] if keep else None)
            np.testing.assert_allclose(out["mu"][n], mu, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(out["a"][n], a, rtol=1e-4)
            expected = a if config.loss == "spread" else (mu * mu).sum(1) / 16 + 4 * (a - 0.5)
            np.testing.assert_allclose(out["scores"][n], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", CNNS)
@pytest.mark.parametrize("data", ["synthetic", "smallnorb"])
def test_cnns_against_literal_ones(model, data):
    config = tiny(model=model, data=data)
    params, batch = params64(config), batch64(config, 2)
    scores = sn.forward(params, batch, config)[0]["scores"]
    without = sn.forward(params, {"images": batch["images"]}, config)[0]["scores"]
    for n in range(2):
        for got, keep in (scores[n], batch["keep"][n]), (without[n], 1):
            np.testing.assert_allclose(got, cnn_reference(params, batch["images"][n], model, keep), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", sn.MODELS)
@pytest.mark.parametrize("loss", ["xent", "spread"])
def test_loss_and_hits_by_loops(model, loss):
    config = tiny(model=model, loss=loss)
    params, batch = params64(config), batch64(config, 5)
    terms, _ = sn.loss_and_grads(params, batch, config)
    scores, expected, hits = sn.forward(params, batch, config)[0]["scores"], 0, 0
    for s, t in zip(scores, batch["labels"]):
        hits += max(range(5), key=lambda j: s[j]) == t
        if loss == "spread" and model in CAPSULES:
            expected += sum(max(0, 0.8 - (s[t] - s[j])) ** 2 for j in range(5) if j != t) / 5
        else:
            expected += -math.log(math.exp(s[t]) / sum(math.exp(k) for k in s)) / 5
    assert terms["loss"] == pytest.approx(expected, rel=1e-12) and terms["hits"] == hits and type(terms["loss"]) is float


# ---------------------------------------------------------------- EM routing

@pytest.fixture
def routings(monkeypatch):
    """Every call of em_routing_forward while a network runs -> list of its V, a, ratio, window, steps"""
    calls, original = [], sn.em_routing_forward

    def spy(V, a, beta_u, beta_a, n_iters, final_lambda, ratio, window=None, empty=np.empty):
        votes, active = V.copy(), a.copy()
        out, cache = original(V, a, beta_u, beta_a, n_iters, final_lambda, ratio, window, empty)
        calls.append(SimpleNamespace(V=votes, a=active, ratio=ratio, window=window, steps=[step[:3] for step in cache[-1]]))
        return out, cache

    monkeypatch.setattr(sn, "em_routing_forward", spy)
    return calls


@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_every_iteration_of_convolutional_routing_by_loops(rng, routings, n_iters):
    """R of every child over its parents, at all places: sums to one, starts uniform; mu and sigma2"""
    side, B, J, places = 6, 2, 3, 2
    config = tiny(em_iters=n_iters, final_lambda=3.0)
    pose, active = rng.standard_normal((1, side, side, B, D)), rng.random((1, side, side, B))
    W, betas = rng.standard_normal((9 * B, J, 4, 4)), rng.standard_normal((2, J))
    sn.conv_caps_forward(pose, active, 0.5 * W, *betas, config)
    votes, a = conv_votes(pose[0], active[0], 0.5 * W)
    ratio = places * places * J / (side * side * B)
    mu, sigma2, _, history = em_reference(votes, a, *betas, n_iters, 3.0, ratio)
    call, = routings
    assert call.ratio == pytest.approx(ratio)
    for j in mu:
        place = j[0] * places + j[1]
        np.testing.assert_allclose(call.steps[-1][1][place, j[2]], mu[j], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(call.steps[-1][2][place, j[2]], sigma2[j], rtol=1e-4)
    for (R, *_), expected in zip(call.steps, history, strict=True):
        R, total = np.broadcast_to(R, (places ** 2, J, 9 * B)), np.zeros((side, side, B))
        for (py, px, j, ky, kx, b), value in zip(np.ndindex(places, places, J, 3, 3, B), R.ravel()):
            y, x = 2 * py + ky, 2 * px + kx
            assert value == pytest.approx(expected[(y * side + x) * B + b][py, px, j], rel=1e-3, abs=1e-9)
            total[y, x, b] += value
        np.testing.assert_allclose(total[:5, :5], 1, rtol=1e-9)
        assert not total[5].any() and not total[:, 5].any()                                    # nobody sees the last row and column
    first = np.broadcast_to(call.steps[0][0], (places ** 2, J, 9 * B)).reshape(places, places, J, 3, 3, B)
    np.testing.assert_allclose(first[0, 0, :, 0, 0], 1 / J)
    np.testing.assert_allclose(first[0, 0, :, 2, 0], 1 / (2 * J))
    np.testing.assert_allclose(first[0, 0, :, 2, 2], 1 / (4 * J))


def test_responsibilities_of_class_capsules_are_reported_and_sum_to_one(rng):
    config = tiny(em_iters=3)
    out, _ = sn.forward(params64(config), batch64(config, 2), config)
    assert len(out["class_steps"]) == 3
    for R, mu, sigma2 in out["class_steps"]:
        np.testing.assert_allclose(np.broadcast_to(R, (2, 5, 18)).sum(1), 1, rtol=1e-12)
        assert mu.shape == sigma2.shape == (2, 5, D) and sigma2.min() >= 5e-4
    assert np.all(out["class_steps"][0][0] == 0.2) and np.array_equal(out["class_steps"][-1][1], out["mu"])


def test_twice_the_children_change_nothing(rng):
    """The mass is normalised by parents / children: every child doubled is the same layer"""
    V, a, betas = 0.5 * rng.standard_normal((6, 2, 3, D)), rng.random((2, 6)), rng.standard_normal((2, 3))
    once, _ = sn.em_routing_forward(V, a, *betas, 3, 2.0, 3 / 6)
    twice, _ = sn.em_routing_forward(np.concatenate([V, V]), np.concatenate([a, a], 1), *betas, 3, 2.0, 3 / 12)
    for x, y in zip(once, twice):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def test_equal_votes_have_the_variance_of_the_floor():
    """and the cost 16 (beta_u + log sqrt(5e-4)) x mass"""
    V = np.full((3, 1, 1, D), 0.7)
    (mu, sigma2, x), _ = sn.m_step_forward(V, V * V, np.array([[[0.5, 0.25, 0.25]]]), np.array([0.4]), np.array([0.3]), 0.2, 0.5)
    np.testing.assert_allclose(mu, 0.7, rtol=1e-6)
    np.testing.assert_allclose(sigma2, 5e-4, rtol=1e-4)
    assert x[0, 0] == pytest.approx(0.2 * (0.3 - 16 * (0.4 + 0.5 * math.log(5e-4)) * 0.5), rel=1e-4)


def test_a_child_that_is_off_has_no_say_and_nobodys_parent_stays_finite(rng):
    V, a, betas = rng.standard_normal((6, 2, 3, D)), rng.random((2, 6)), rng.standard_normal((2, 3))
    a[:, 4], other = 0, V.copy()
    other[4] = 50 * rng.standard_normal((2, 3, D))
    for one, two in zip(*(sn.em_routing_forward(votes, a, *betas, 3, 2.0, 0.5)[0] for votes in (V, other))):
        np.testing.assert_allclose(one, two, rtol=1e-12)
    (mu, act), _ = sn.em_routing_forward(V, 0 * a, *betas, 2, 2.0, 0.5)
    np.testing.assert_allclose(mu, 0, atol=1e-12)
    np.testing.assert_allclose(act, np.broadcast_to(1 / (1 + np.exp(-2 * (1 - 0.95 ** 2) * betas[1])), (2, 3)), rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("final_lambda", [0.01, 100.0])
def test_extreme_convolutional_capsules_stay_finite(rng, dtype, final_lambda):
    """Huge poses, equal poses, all children off, one child on: no nan and no inf, forward and backward"""
    side, B, J = 5, 2, 3
    config = tiny(em_iters=3, final_lambda=final_lambda)
    W, betas = rng.standard_normal((9 * B, J, 4, 4)).astype(dtype), np.zeros((2, J), dtype)
    one = np.zeros((1, side, side, B))
    one[0, 2, 2, 1] = 1
    for pose in (1e4 * rng.standard_normal((1, side, side, B, D)), np.ones((1, side, side, B, D)), np.zeros((1, side, side, B, D))):
        for active in (one, 0 * one, 1 + 0 * one, 1e-30 + 0 * one):
            (mu, a), cache = sn.conv_caps_forward(pose.astype(dtype), active.astype(dtype), W, *betas, config)
            grads = sn.conv_caps_backward(np.ones_like(mu), np.ones_like(a), cache)
            assert all(np.isfinite(g).all() and g.dtype == dtype for g in (mu, a, *grads))
            assert a.min() >= 0 and a.max() <= 1


def test_float32_is_accurate_enough(rng):
    """Variances are differences of squares: for votes of the networks' size float32 must still tell them"""
    V = 1.5 + 0.05 * rng.standard_normal((72, 3, 5, D))
    a, betas = rng.random((3, 72)), 0.1 * rng.standard_normal((2, 5))
    double, _ = sn.em_routing_forward(V, a, *betas, 2, 1.0, 5 / 72)
    single, _ = sn.em_routing_forward(V.astype(np.float32), a.astype(np.float32), *betas.astype(np.float32), 2, 1.0, 5 / 72)
    np.testing.assert_allclose(single[0], double[0], rtol=0, atol=1e-3)
    np.testing.assert_allclose(single[1], double[1], rtol=1e-2)


# ---------------------------------------------------------------- coordinates and places

@pytest.mark.parametrize("kernel", [1, 3, 6])
def test_coordinates_are_the_centres_of_measured_receptive_fields(rng, kernel):
    """Rows, then columns, of the image are changed one by one; which capsules notice? Activations alone: one EM iteration."""
    config = tiny(primary_kernel=kernel, em_iters=1, primary_types=2)
    params, centres = params64(config), sn.field_centres(config)
    n = math.isqrt(len(centres))
    images = np.repeat(rng.random((1, 32, 32, 1)), 65, 0)
    for k in range(32):
        images[1 + k, k] += rng.random((32, 1))                                                # row k
        images[33 + k, :, k] += rng.random((32, 1))                                            # column k
    mu = sn.forward(params, {"images": images}, config)[0]["conv_mu"]
    changed = (np.abs(mu[1:] - mu[0]) > 1e-12).any((2, 3)).reshape(2, 32, n, n)                # (row or column, k, place)
    for py, px in np.ndindex(n, n):
        for axis, place in ((0, py), (1, px)):
            seen = np.flatnonzero(changed[axis, :, py, px])
            assert (seen[0], seen[-1]) == field(place, kernel) and len(seen) == seen[-1] - seen[0] + 1
            assert centres[py * n + px, 1 - axis] == pytest.approx((seen.mean() - 15.5) / 16)  # x is centres[:, 0]
    assert np.abs(centres).max() < 1


def test_coordinates_are_added_to_the_right_elements_of_every_vote(rng, routings):
    """The votes themselves: x of the place to row 0, y to row 1 of the right-hand column, of all types alike; nothing else"""
    config = tiny(conv_types=3)
    params, batch = params64(config), batch64(config, 2)
    for no_coord_add in (False, True):
        sn.forward(params, batch, dataclasses.replace(config, no_coord_add=no_coord_add))
    conv, with_, _, without = routings
    assert conv.window is not None and with_.window is None and with_.V.shape == (3 * 9, 2, 5, D)
    added = (with_.V - without.V).reshape(3, 3, 3, 2, 5, 4, 4)                                 # type, row, column, image, class
    for py, px in np.ndindex(3, 3):
        x, y = ((sum(field(place, 7)) / 2 - 15.5) / 16 for place in (px, py))
        np.testing.assert_allclose(added[:, py, px, :, :, 0, 3], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(added[:, py, px, :, :, 1, 3], y, rtol=0, atol=1e-12)
    added[..., :2, 3] = 0
    assert np.abs(added).max() < 1e-12


def test_transformation_matrices_of_the_class_capsules_are_shared_over_places(rng, routings):
    config = tiny(conv_types=3, no_coord_add=True)
    params = params64(config)
    out, _ = sn.forward(params, batch64(config, 2), config)
    V = routings[-1].V.reshape(3, 9, 2, 5, 4, 4)
    expected = np.einsum("npfab,fjbc->fpnjac", out["conv_mu"].reshape(2, 9, 3, 4, 4), params["class_W"])
    np.testing.assert_allclose(V, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(routings[-1].a / batch64(config, 2)["keep"].clip(1), out["conv_a"].transpose(0, 2, 1).reshape(2, 27)
                               * (batch64(config, 2)["keep"] > 0), rtol=1e-12)


def test_a_moved_image_moves_the_convolutional_capsules(rng):
    """4 px are one place. Places inside, where every child has as many parents, keep their capsules when one iteration is made."""
    config = tiny(primary_kernel=3, em_iters=1, primary_types=2)
    params = params64(config)
    big = rng.random((1, 40, 40, 1))
    here, there = (sn.forward(params, {"images": big[:, 4:36, k:k + 32]}, config)[0] for k in (4, 0))
    below = sn.forward(params, {"images": big[:, :32, 4:36]}, config)[0]
    for name in ("conv_mu", "conv_a"):
        here_, right, down = (out[name].reshape(5, 5, 2, -1) for out in (here, there, below))
        np.testing.assert_allclose(right[1:4, 2:4], here_[1:4, 1:3], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(down[2:4, 1:4], here_[1:3, 1:4], rtol=1e-9, atol=1e-12)
        assert np.abs(right[1:4, 1:3] - here_[1:4, 1:3]).max() > 1e-3


def test_the_order_of_the_classes_does_not_matter(rng):
    config, order = tiny(), [3, 1, 4, 0, 2]
    params, batch = params64(config), batch64(config, 3)
    permuted = params | {"class_W": params["class_W"][:, order]} | {
        name: params[name][order] for name in ("class_beta_u", "class_beta_a")}
    a, b = (sn.forward(p, batch, config)[0]["scores"] for p in (params, permuted))
    np.testing.assert_allclose(b, a[:, order], rtol=1e-9)


def test_an_images_scores_do_not_depend_on_its_batch_mates():
    for model in sn.MODELS:
        config = tiny(model=model)
        params, batch = params64(config), batch64(config, 6)
        together = sn.forward(params, batch, config)[0]["scores"]
        for n in range(6):
            alone = sn.forward(params, sn.to_batch(batch, slice(n, n + 1), np.float64), config)[0]["scores"]
            np.testing.assert_allclose(alone[0], together[n], rtol=1e-9)


def test_unfold_by_loops_and_fold_is_its_adjoint(rng):
    x = rng.standard_normal((2, 7, 6, 2, 3))
    cols = sn.unfold(x, 3, 2)
    assert cols.shape == (18, 2 * 3 * 2, 3)
    for k, (ky, kx, b) in enumerate(np.ndindex(3, 3, 2)):
        for place, (n, py, px) in enumerate(np.ndindex(2, 3, 2)):
            np.testing.assert_array_equal(cols[k, place], x[n, 2 * py + ky, 2 * px + kx, b])
    other = rng.standard_normal(cols.shape)
    assert np.vdot(cols, other) == pytest.approx(np.vdot(x, sn.fold(other, x.shape, 3, 2)), rel=1e-12)


# ---------------------------------------------------------------- initial weights and sizes

@pytest.mark.parametrize("model", sn.MODELS)
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
    for changes in ({}, dict(conv1_channels=48, conv_types=12), dict(data="smallnorb")):
        n = {model: sn.n_params(sn.init_params(sn.Config(model=model, **changes))) for model in sn.MODELS}
        assert abs(n["cnn-pool"] / n["caps"] - 1) < 0.1 and abs(n["cnn-gap"] / n["caps"] - 1) < 0.1
    assert sn.init_params(sn.Config(model="cnn-gap", cnn_width=7))["conv1_w"].shape == (5, 5, 1, 7)
    assert sn.n_params(sn.init_params(sn.Config(model="cnn"))) == 262_949


@pytest.mark.parametrize("model", sn.MODELS)
def test_the_dropout_mask_has_a_column_for_each_input_of_the_last_layer(model):
    config = tiny(model=model)
    params, batch = params64(config), batch64(config, 2)
    n, weights = sn.n_dropped(config), {"caps": None, "dense-caps": "class_W", "cnn-gap": "fc1_w"}.get(model, "fc2_w")
    assert n == (len(params[weights]) if weights else config.conv_types * len(sn.field_centres(config)))
    scores, seen = sn.forward(params, batch, config)[0]["scores"], 0
    for k in range(n):
        flipped = batch | {"keep": batch["keep"].copy()}
        flipped["keep"][:, k] = 1 / 0.6 - flipped["keep"][:, k]
        seen += not np.array_equal(sn.forward(params, flipped, config)[0]["scores"], scores)
    assert seen > 0.5 * n                                                                      # a ReLU may be off for both images


# ---------------------------------------------------------------- gradients

GRADIENTS = [("caps", {}), ("caps", dict(loss="spread", em_iters=3)), ("caps", dict(data="smallnorb", primary_types=2)),
             ("caps", dict(primary_kernel=3, conv_types=1)), ("dense-caps", dict(data="smallnorb")),
             ("dense-caps", dict(loss="spread", em_iters=1)), ("cnn", dict(data="smallnorb")), ("cnn-pool", {}),
             ("cnn-pool", dict(data="smallnorb")), ("cnn-gap", dict(data="smallnorb")), ("cnn-gap", dict(loss="spread"))]


@pytest.mark.parametrize("model, changes", GRADIENTS, ids=str)
def test_every_parameter_has_its_gradient(model, changes):
    config = tiny(model=model, **changes)
    params, batch = params64(config), batch64(config, 3)                                       # few ReLUs near their kink
    _, grads = sn.loss_and_grads(params, batch, config)
    for name, g in grads.items():
        assert g.shape == params[name].shape and np.abs(g).max() > 1e-9, f"{name} is identically zero"
    check_directions(lambda p: sn.loss_and_grads(p, batch, config)[0]["loss"], params, grads, n=2,
                     h=1e-7 if model in CNNS else 1e-6)


@pytest.mark.parametrize("model, loss, n_iters", [("caps", "xent", 2), ("caps", "spread", 3), ("dense-caps", "xent", 3)])
def test_detached_is_the_gradient_of_the_network_with_its_last_responsibilities_frozen(model, loss, n_iters, monkeypatch):
    config = tiny(model=model, loss=loss, em_iters=n_iters, routing_grad="detached")
    params, batch = params64(config), batch64(config, sn.EM_CHUNK)                             # one chunk: routings come in order
    last, original = [], sn.em_routing_forward

    def record(*args):
        out, cache = original(*args)
        last.append(cache[-1][-1][0].copy())
        return out, cache

    monkeypatch.setattr(sn, "em_routing_forward", record)
    terms, grads = sn.loss_and_grads(params, batch, config)
    frozen = list(last)
    assert len(frozen) == (2 if model == "caps" else 1)

    def routing(V, a, beta_u, beta_a, n_iters, final_lambda, ratio, window=None, empty=np.empty):
        r = frozen[len(calls)] * a[:, None]
        calls.append(1)
        (mu, _, x), _ = sn.m_step_forward(V, V * V, r, beta_u, beta_a, sn.inverse_temperature(n_iters - 1, final_lambda), ratio)
        return (mu, 1 / (1 + np.exp(-x))), (V, V * V, [])

    def value(p):
        calls.clear()
        out, _ = sn.forward(p, batch, config)
        return (sn.spread_loss(out["scores"], batch["labels"], 0.8) if loss == "spread" else
                sn.cross_entropy(out["scores"], batch["labels"]))[0]

    calls = []
    monkeypatch.setattr(sn, "em_routing_forward", routing)
    assert value(params) == pytest.approx(terms["loss"], rel=1e-12)
    check_directions(value, params, grads, n=2)
    monkeypatch.setattr(sn, "em_routing_forward", original)
    full = sn.loss_and_grads(params, batch, dataclasses.replace(config, routing_grad="full"))[1]
    assert not np.allclose(full["primary_w"], grads["primary_w"], rtol=1e-3)


# ---------------------------------------------------------------- purity, buffers, dtypes

def poison(shape, dtype):
    """An np.empty that shows whoever reads memory it has not written"""
    return np.full(shape, np.nan, dtype)


@pytest.mark.parametrize("model", sn.MODELS)
def test_results_do_not_depend_on_the_buffers(model):
    """np.empty, buffers full of nan, an Arena at its first use and later, shards of several sizes: all the same bits"""
    config = tiny(model=model)
    params, samples, arena = params64(config), batch64(config, 14), sn.Arena()
    for rows in (slice(0, 9), slice(9, 14), slice(0, 9), slice(3, 4)):                         # chunks of 4, 4, 1; of 4, 1; of 1
        batch = sn.to_batch(samples, rows, np.float64)
        pure = sn.loss_and_grads(params, batch, config)
        for empty in (poison, arena.rewind()):
            terms, grads = sn.loss_and_grads(params, batch, config, empty)
            assert terms == pure[0] and all(np.array_equal(grads[name], pure[1][name]) for name in params)


@pytest.mark.parametrize("model", sn.MODELS)
def test_nothing_given_is_changed_and_a_backward_can_be_asked_twice(model):
    config = tiny(model=model)
    params, batch = params64(config), batch64(config, 6)
    before = {name: x.copy() for name, x in (params | batch).items()}
    out, cache = sn.forward(params, batch, config)
    dscores = np.random.default_rng(0).standard_normal((6, 5))
    kept, backward = dscores.copy(), sn.caps_backward if model in CAPSULES else sn.cnn_backward
    first = {name: g.copy() for name, g in backward(dscores, cache, config).items()}
    second = backward(dscores, cache, config)
    assert np.array_equal(dscores, kept) and all(np.array_equal(first[name], second[name]) for name in params)
    assert all(np.array_equal(before[name], x) for name, x in (params | batch).items())


def floats(tree):
    """dtypes of all float arrays in nested tuples, lists and dicts"""
    if isinstance(tree, (tuple, list, dict)):
        return set().union(*map(floats, tree.values() if isinstance(tree, dict) else tree))
    return {tree.dtype} if isinstance(tree, (np.ndarray, np.floating)) and tree.dtype.kind == "f" else set()


@pytest.mark.parametrize("model", sn.MODELS)
@pytest.mark.parametrize("changes", [{}, dict(loss="spread", routing_grad="detached", em_iters=3)], ids=str)
def test_float32_stays_float32(model, changes):
    """Outputs, gradients, and all that is kept in between"""
    config = tiny(model=model, **changes)
    params = sn.init_params(config)
    batch = sn.to_batch(batch64(config, 5), slice(None))
    out, cache = sn.forward(params, batch, config)
    assert floats(out) == {np.dtype(np.float32)} and floats(cache) == {np.dtype(np.float32)}
    terms, grads = sn.loss_and_grads(params, batch, config, share=0.3)
    assert floats(grads) == {np.dtype(np.float32)} and type(terms["loss"]) is float


# ---------------------------------------------------------------- evaluation

@pytest.mark.parametrize("chunk", [2, 2048])
def test_evaluate_against_brute_force(chunk, monkeypatch):
    monkeypatch.setattr(sn, "CHUNK", chunk)
    scores, labels, done = np.random.default_rng(2).standard_normal((5, 5)).astype(np.float32), np.array([0, 1, 2, 3, 4]), []

    def fake_forward(params, part, config):
        done.append(len(part["labels"]))
        return {"scores": scores[sum(done[:-1]):sum(done)]}

    found = sn.evaluate({}, {"images": np.zeros((5, 32, 32, 1)), "labels": labels}, tiny(), SimpleNamespace(forward=fake_forward))
    named = [max(range(5), key=lambda j: row[j]) for row in scores]
    hits = sum(j == t for j, t in zip(named, labels))
    loss = sum(-math.log(math.exp(row[t]) / sum(math.exp(k) for k in row)) for row, t in zip(scores.astype(float), labels)) / 5
    assert list(found.pop("predictions")) == named and sum(done) == 5
    assert found == pytest.approx({"n": 5, "hits": hits, "accuracy": hits / 5, "loss": loss}, rel=1e-5)


def test_viewpoint_extrapolation_is_the_difference_of_the_two_accuracies():
    data = sn.load_data(tiny())
    config = tiny(model="cnn-gap")
    params = sn.init_params(config)
    with sn.Runner(1) as runner:
        found = sn.evaluate_viewpoint_extrapolation(params, data, config, runner)
        for name in ("familiar", "held_out"):
            one = sn.evaluate(params, data[name], config, runner)
            assert (found[name], found[name + "_loss"]) == (one["accuracy"], one["loss"])
    assert found["drop"] == found["familiar"] - found["held_out"]


@pytest.mark.parametrize("model", sn.MODELS)
def test_the_mean_of_shards_is_the_batchs_mean(model):
    """40 rows are shards of 16, 16 and 8: the last must weigh half as much"""
    config = tiny(model=model)
    params, samples, rows = params64(config), batch64(config, 45), np.arange(3, 43)
    samples = {name: x if name == "labels" else x.astype(np.float32) for name, x in samples.items()}
    whole, grads = sn.loss_and_grads(params, sn.to_batch(samples, rows), config)
    with sn.Runner(2) as runner:
        terms, shard_grads = runner.loss_and_grads(params, samples, rows, config)
        scores = runner.forward(params, {name: samples[name] for name in ("images", "labels")}, config)["scores"]
    assert len(shard_grads) == 3 and terms == pytest.approx(whole, rel=1e-5)
    for name in params:
        np.testing.assert_allclose(sum(g[name] for g in shard_grads), grads[name], rtol=1e-3, atol=1e-5 * np.abs(grads[name]).max())
    plain, _ = sn.forward(params, {"images": samples["images"]}, config)
    np.testing.assert_allclose(scores, plain["scores"], rtol=1e-4, atol=1e-5)
