"""Gradients of the paper's functions and of whole networks against centered differences; dtypes."""
import dataclasses

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import NETWORKS, batch_of, float64
from gradcheck import RELU, check_coordinates, check_directions, check_loss, check_op, check_step, normal
from test_multimnist_meaning import terms_reference

N, I, J, D, E = 2, 3, 4, 5, 6
OPS = {
    **{f"squash{name}": (mc.squash_forward, mc.squash_backward, size * normal(N, I, D))
       for name, size in (("", 1), (" short", 0.05), (" long", 20))},
    "votes": (mc.votes_forward, mc.votes_backward, normal(N, I, E), normal(I, E, J, D, seed=1)),
    "softmax": (lambda b: [mc.softmax_forward(b)] * 2, mc.softmax_backward, 2 * normal(N, J, I)),
    "lengths": (mc.lengths_forward, mc.lengths_backward, normal(N, J, D)),
    **{f"routing {n}": (lambda u_hat, n=n: mc.routing_forward(u_hat, n), mc.routing_backward, 1.5 * normal(N, J, I, D))
       for n in (1, 2, 3, 5)}}


@pytest.mark.parametrize("op", OPS)
def test_smooth_op(op):
    check_op(*OPS[op])


def test_squash_of_a_zero_vector_has_a_finite_gradient():
    v, cache = mc.squash_forward(np.zeros((N, D)))
    assert not v.any() and np.abs(mc.squash_backward(np.ones((N, D)), cache)).max() < 1e-4


def test_losses():
    lengths = np.array([[0.95, 0.05, 0.4, 0.7], [0.2, 0.85, 0.15, 0.02]])               # both sides of both margins
    check_loss(mc.margin_loss, lengths, np.array([[1.0, 1, 0, 0], [0, 1, 0, 1]]), tol=RELU)
    check_loss(mc.reconstruction_loss, normal(3, 2, 3, 4), normal(3, 2, 3, 4, seed=1))
    check_loss(mc.sigmoid_cross_entropy, 3 * normal(2, 4), np.array([[1.0, 0, 1, 0], [0, 1, 0, 1]]))


@pytest.mark.parametrize("name, n_iters", [("paper", 1), *((name, 3) for name in NETWORKS)])
def test_gradient_of_the_whole_network(digits, name, n_iters):
    config = NETWORKS[name]
    if config.model == "capsnet":
        config = dataclasses.replace(config, routing_iters=n_iters, recon_weight=0.01)
    params, batch = float64(config, seed=4), batch_of(digits, config)
    if config.model == "capsnet" and name != "paper":
        params["W"] *= 10                                                              # votes that reach the decoder

    def loss(p):
        out, _ = mc.forward(p, batch["images"], config, batch["labels"], statistics={})
        return terms_reference(out, batch, config)["loss"]
    _, grads = check_step(mc, params, batch, config, loss)
    check_directions(loss, params, grads, n=1, h=1e-7)
    check_coordinates(loss, params, grads, n=1, h=1e-6)
