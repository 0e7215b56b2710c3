"""Every gradient of the matrix capsules and their CNNs against centred differences."""
import dataclasses

import numpy as np
import pytest
import smallnorb_novel_viewpoint as sn
from gradcheck import RELU, SMOOTH, check_coordinates, check_directions, check_loss, check_op
from test_smallnorb_meaning import params64, toy

D, LAMBDA = sn.D, 2.0                # an inverse temperature at which activations matter


def test_pool(rng):
    check_op(sn.pool_forward, sn.pool_backward, rng.standard_normal((2, 5, 4, 3)))


def test_pose_votes(rng):
    check_op(sn.pose_votes_forward, sn.pose_votes_backward, rng.standard_normal((2, 3, D)), rng.standard_normal((2, 3, 4, 4)))


@pytest.mark.parametrize("window", [None, (1, 5, 5, 2, 3, 2)])
def test_responsibilities(rng, window):
    L, I = (4, 18) if window else (3, 5)
    check_op(lambda x: sn.responsibilities_forward(x, window), sn.responsibilities_backward, rng.standard_normal((L, 3, I)))


def test_m_step(rng):
    """mu, sigma2 and x together, as functions of votes, assignments and betas; also with the same assignments for all types"""
    I, L, J = 4, 2, 3
    for types in (J, 1):
        def forward(V, r, beta_u, beta_a):
            (mu, sigma2, x), cache = sn.m_step_forward(V, V * V, r, beta_u, beta_a, LAMBDA, 0.6)
            return np.concatenate([mu.ravel(), sigma2.ravel(), x.ravel()]), (V, r, cache)

        def backward(dout, cache):
            V, r, cache = cache
            dmu, dsigma2, dx = np.split(dout, [L * J * D, 2 * L * J * D])
            dr, du, da, ds1, ds2 = sn.m_step_backward(dmu.reshape(L, J, D), dsigma2.reshape(L, J, D), dx.reshape(L, J), cache)
            weight = np.broadcast_to(r, (L, J, I)).transpose(2, 0, 1)[..., None]
            return weight * (ds1 + 2 * V * ds2), dr, du, da

        check_op(forward, backward, rng.standard_normal((I, L, J, D)), rng.uniform(0.2, 1, (L, types, I)), rng.standard_normal(J),
                 rng.standard_normal(J), tol=10 * SMOOTH)


def test_e_step(rng):
    I, L, J = 4, 2, 3

    def forward(V, mu, sigma2, x):
        logits, cache = sn.e_step_forward(V, V * V, mu, sigma2, x)
        return logits, (V, cache)

    def backward(dout, cache):
        V, cache = cache
        dmu, dsigma2, dx = sn.e_step_backward(dout, cache)
        return dout.transpose(2, 0, 1)[..., None] * (cache[-2] + 2 * V * cache[-1]), dmu, dsigma2, dx

    check_op(forward, backward, rng.standard_normal((I, L, J, D)), rng.standard_normal((L, J, D)), rng.uniform(0.3, 2, (L, J, D)),
             rng.standard_normal((L, J)), tol=10 * SMOOTH)


@pytest.mark.parametrize("window", [None, (1, 5, 5, 1, 3, 2)])
@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_em_routing(rng, n_iters, window):
    """Through all iterations: votes, lower activations and both betas"""
    I, L, J = (9, 4, 2) if window else (4, 2, 3)
    for which in (0, 1):                                                                       # mu alone, activations alone
        check_op(lambda V, a, u, b: (lambda out, cache: (out[which], cache))(
                     *sn.em_routing_forward(V, a, u, b, n_iters, LAMBDA, 0.6, window)),
                 lambda dout, cache: sn.em_routing_backward(
                     *((dout, np.zeros((L, J))) if which == 0 else (np.zeros((L, J, D)), dout)), cache)[:2 if which == 0 and n_iters == 1
                                                                                                       else 4],
                 rng.standard_normal((I, L, J, D)), rng.uniform(0.2, 1, (L, I)),
                 *([] if which == 0 and n_iters == 1 else [0.1 * rng.standard_normal(J), 0.1 * rng.standard_normal(J)]),
                 tol=1e-5) if not (which == 0 and n_iters == 1) else None


def test_detached_holds_the_last_assignments(rng):
    """Its gradient is that of one M-step with the last R a constant"""
    I, L, J = 5, 2, 3
    V, a, u, b = rng.standard_normal((I, L, J, D)), rng.uniform(0.2, 1, (L, I)), rng.standard_normal(J), rng.standard_normal(J)
    _, cache = sn.em_routing_forward(V, a, u, b, 3, LAMBDA, 0.6)
    R = cache[-1][-1][0].copy()

    def forward(V, a, u, b):
        (mu, _, x), _ = sn.m_step_forward(V, V * V, R * a[:, None], u, b, sn.inverse_temperature(2, LAMBDA), 0.6)
        return np.concatenate([mu.ravel(), (1 / (1 + np.exp(-x))).ravel()]), sn.em_routing_forward(V, a, u, b, 3, LAMBDA, 0.6)[1]

    def backward(dout, cache):
        return sn.em_routing_backward(dout[:L * J * D].reshape(L, J, D), dout[L * J * D:].reshape(L, J), cache, detached=True)

    check_op(forward, backward, V, a, u, b, tol=1e-5)


def test_convolutional_capsules(rng):
    """More images than a chunk"""
    config, N, B, J = toy(em_iters=2, final_lambda=LAMBDA), sn.EM_CHUNK + 1, 1, 2

    def forward(pose, active, W, u, b):
        (mu, a), cache = sn.conv_caps_forward(pose, active, W, u, b, config)
        return np.concatenate([mu.ravel(), a.ravel()]), cache

    def backward(dout, cache):
        return sn.conv_caps_backward(dout[:N * J * D].reshape(N, 1, J, D), dout[N * J * D:].reshape(N, 1, J), cache)

    check_op(forward, backward, rng.standard_normal((N, 3, 3, B, D)), rng.uniform(0.2, 1, (N, 3, 3, B)),
             rng.standard_normal((9 * B, J, 4, 4)), 0.1 * rng.standard_normal(J), 0.1 * rng.standard_normal(J), tol=1e-5)


def test_losses(rng):
    check_loss(sn.cross_entropy, rng.standard_normal((3, 5)), np.array([0, 4, 2]))
    check_loss(sn.spread_loss, rng.random((3, 5)), np.array([0, 4, 2]), 0.73)


MODELS = [("caps", {}), ("caps", {"loss": "spread"}), ("caps", {"em_iters": 3}), ("caps", {"em_iters": 1, "no_coord_add": True}),
          ("caps", {"primary_kernel": 1, "data": "smallnorb"}), ("dense-caps", {}), ("dense-caps", {"loss": "spread"}), ("cnn", {}),
          ("cnn-pool", {}), ("cnn-gap", {}), ("cnn-gap", {"data": "smallnorb"})]


@pytest.mark.parametrize("model, changes", MODELS)
@pytest.mark.parametrize("dropout", [0, 0.4])
def test_whole_networks(rng, model, changes, dropout):
    config = toy(model=model, final_lambda=LAMBDA, cnn_width=3, **changes)
    params, channels = params64(config), sn.N_CHANNELS[config.data]
    batch = {"images": rng.random((5, 32, 32, channels)), "labels": np.array([0, 3, 2, 1, 4]), "margin": np.full(5, 0.8)}
    if dropout:
        batch["keep"] = (rng.random((5, sn.n_dropped(config))) >= dropout) / (1 - dropout)
    terms, grads = sn.loss_and_grads(params, batch, config)

    def loss(p):
        return sn.loss_and_grads(p, batch, config)[0]["loss"]

    check_directions(loss, params, grads, n=2, h=1e-7 if model.startswith("cnn") else 1e-6)   # few kinks in so small a step
    if not dropout:
        check_coordinates(loss, params, grads, n=2, tol=10 * RELU, h=1e-6)
        half, half_grads = sn.loss_and_grads(params, batch, config, share=0.5)
        assert half["loss"] == terms["loss"] / 2
        np.testing.assert_allclose(half_grads["conv1_w"], grads["conv1_w"] / 2, rtol=1e-9)


@pytest.mark.parametrize("model", sn.MODELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_and_arena(rng, model, dtype):
    """dtype follows the inputs everywhere; an arena changes no bit, even when it is used again"""
    config = toy(model=model)
    params = {name: p.astype(dtype) for name, p in params64(config).items()}
    batch = {"images": rng.random((5, 32, 32, 1)).astype(dtype), "labels": np.arange(5)}
    _, plain = sn.loss_and_grads(params, batch, config)
    arena = sn.Arena()
    for _ in range(2):
        _, grads = sn.loss_and_grads(params, batch, config, arena.rewind())
        for name in plain:
            assert plain[name].dtype == dtype and plain[name].shape == params[name].shape, name
            np.testing.assert_array_equal(plain[name], grads[name], err_msg=name)


def test_detached_network_differs(rng):
    config = toy(final_lambda=LAMBDA, em_iters=3)
    params, batch = params64(config), {"images": rng.random((2, 32, 32, 1)), "labels": np.array([0, 1])}
    full, detached = (sn.loss_and_grads(params, batch, dataclasses.replace(config, routing_grad=how))[1] for how in ("full", "detached"))
    assert all(np.abs(full[name] - detached[name]).max() > 1e-9 for name in ("conv_W", "class_W", "conv1_w"))
