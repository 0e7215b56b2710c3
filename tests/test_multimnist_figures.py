"""What the figures compute: R^2 of linear maps from capsules to known factors."""
import dataclasses

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import TINY

import visualize_multimnist_capsnet as viz

SIZES = (600, 200, 400)


def made():
    rng, n = np.random.default_rng(0), sum(SIZES)
    return rng, rng.integers(0, 10, n), rng.standard_normal((n, 5))


def test_r2_is_one_for_what_is_linear_in_each_class_and_zero_for_noise():
    rng, digits, features = made()
    maps = rng.standard_normal((10, 5))
    linear = np.einsum("nd,nd->n", features, maps[digits]) + digits
    factors = np.stack(
        [linear, linear + np.linalg.norm(maps[digits], axis=1) * rng.standard_normal(len(digits)),
         rng.standard_normal(len(digits))],
        1)
    r2 = viz.linear_r2(features, factors, digits, SIZES)
    assert r2[0] > 0.999 and r2[1] == pytest.approx(0.45, abs=0.12) and abs(r2[2]) < 0.12


def test_r2_gives_nothing_for_knowing_the_class():
    rng, digits, _ = made()
    names = np.eye(10)[digits] + 1e-3 * rng.standard_normal((len(digits), 10))
    assert abs(viz.linear_r2(names, (digits + 0.1 * rng.standard_normal(len(digits)))[:, None], digits, SIZES)[0]) < 0.2


def test_r2_survives_features_that_are_constant_where_it_is_fitted():
    _, digits, features = made()
    factors = features[:, :1].copy()
    features[:, 1], features[700:, 1] = 0, 1
    assert viz.linear_r2(features, factors, digits, SIZES)[0] > 0.99


def test_factors_are_the_placed_digits_own():
    pairs, factors = viz.factor_pairs(300, 5, TINY)
    images, labels, known = mc.synthesize_digits(225, 5)
    for n, k in ((0, 0), (7, 1), (299, 0)):
        digit = pairs["index"][n, k]
        assert pairs["labels"][n, k] == labels[digit]
        dy, dx = pairs["shifts"][n, k]
        np.testing.assert_array_equal(pairs["sources"][n, k], mc.shift_digits(images[[digit]], np.array([[dy, dx]]))[0])
        np.testing.assert_allclose(
            factors[n, k],
            [dx, dy, known["rotation"][digit], known["slant"][digit], np.log(known["aspect"][digit]),
             np.log(known["stroke"][digit])],
            rtol=1e-6)


def test_each_digits_own_capsule_is_probed(digits):
    pairs, params = mc.draw_pairs(digits, "val", 6, TINY, "data"), mc.init_params(TINY)
    with mc.Runner(1) as runner:
        out = runner.forward(params, pairs, TINY)
    features = viz.probed(out, pairs["labels"])
    for n in range(6):
        for k in (0, 1):
            np.testing.assert_array_equal(features[2 * n + k], out["v"][n, pairs["labels"][n, k]])


def test_networks_to_probe_differ_in_what_they_say_only():
    config = mc.Config(seed=1, n_train=40, batch_size=8, digits="synthetic")
    caps, silent, cnn = viz.networks_to_probe(config).values()
    assert caps == dataclasses.replace(config, min_iou=0.0) and silent == dataclasses.replace(caps, recon_weight=0.0)
    assert (cnn.model, cnn.n_train, cnn.seed, cnn.digits, cnn.min_iou, cnn.lr) == (
        "cnn", 40, 1, "synthetic", 0.0, mc.CNN["lr"])
    assert viz.networks_to_probe(dataclasses.replace(config, lr=1e-3))["CNN, last hidden layer"].lr == 1e-3
    mc.check_config(cnn)


@pytest.mark.parametrize("n, wrong", [(80, 5), (32, 0), (1250, 0)])
def test_the_error_figure_draws_groups_without_an_error(digits, n, wrong):
    pairs = mc.draw_pairs(digits, "test", n, TINY, "evaluation", 1)
    lengths = mc.k_hot(pairs["labels"], np.float32)
    lengths[:wrong] = lengths[:wrong, ::-1] + np.arange(10) / 100
    right = mc.both_right(mc.top_two(lengths), pairs["labels"])
    run = viz.Run(TINY, {}, {"source": "synthetic", "epochs": []}, "synthetic", {}, pairs, lengths, right, {})
    assert viz.draw_errors(run)
