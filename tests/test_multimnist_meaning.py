"""What gradient checks cannot see: the formulas themselves, against hand-computed numbers and slow literal
references."""
import dataclasses
from types import SimpleNamespace

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import BIASED, CNN, DEEP, NETWORKS, TINY, assert_same, batch_of, float64
from test_core_primitives import conv_reference

# -------------------------------------------------------------- slow literal references

ZEROS = np.zeros((10, 1))


def squash_reference(s):
    length = np.sqrt(sum(k * k for k in s))
    return length ** 2 / (1 + length ** 2) * s / length if length else 0 * s


def routing_reference(u_hat, n_iters, bias=ZEROS):
    """Procedure 1 for one sample. u_hat (J, I, D) -> v (J, D), c (J, I)"""
    J, I, D = u_hat.shape
    b = np.zeros((J, I))
    for _ in range(n_iters):
        c, v = np.zeros((J, I)), np.zeros((J, D))
        for i in range(I):
            for j in range(J):
                c[j, i] = np.exp(b[j, i]) / sum(np.exp(b[k, i]) for k in range(J))
        for j in range(J):
            v[j] = squash_reference(sum(c[j, i] * u_hat[j, i] for i in range(I)) + bias[j])
        for i in range(I):
            for j in range(J):
                b[j, i] += u_hat[j, i] @ v[j]
    return v, c


def network_reference(p, image, digits, config):
    """The whole network for one image, layer by layer as the paper draws it -> lengths, v, one image per digit"""
    C, T, E = config.conv1_channels, config.primary_types, config.primary_dim
    h = np.zeros((28, 28, C))
    for y, x in np.ndindex(28, 28):
        h[y, x] = np.maximum(np.einsum("yx,xyf->f", image[y:y + 9, x:x + 9], p["conv1_w"][0]) + p["conv1_b"], 0)
    u = []
    for y, x in np.ndindex(10, 10):
        patch = h[2 * y:2 * y + 9, 2 * x:2 * x + 9]
        for s in (np.einsum("yxc,yxcf->f", patch, p["primary_w"]) + p["primary_b"]).reshape(T, E):
            u.append(squash_reference(s))
    u_hat = np.array([[u[i] @ p["W"][i, :, j] for i in range(len(u))] for j in range(10)])
    v, _ = routing_reference(u_hat, config.routing_iters)
    images = []
    for digit in digits:
        x = np.concatenate([v[j] if j == digit else 0 * v[j] for j in range(10)])
        x = np.maximum(x @ p["dec1_w"] + p["dec1_b"], 0)
        x = np.maximum(x @ p["dec2_w"] + p["dec2_b"], 0)
        images.append((1 / (1 + np.exp(-(x @ p["dec3_w"] + p["dec3_b"])))).reshape(36, 36))
    return np.array([np.sqrt(k @ k) for k in v]), v, np.array(images)


def convs_reference(p, image, strides, pooled):
    """First convolution, ReLU, ... pixel by pixel. image (36, 36) -> (1, side, side, C)"""
    x = image[None, :, :, None]
    for k, stride in enumerate(strides, 1):
        w = p[f"conv{k}_w"]
        x = conv_reference(x, w[0].transpose(1, 0, 2)[:, :, None] if k == 1 else w, p[f"conv{k}_b"], stride)
        if k in pooled:
            side = x.shape[1] // 2
            x = np.array(
                [[[x[0, 2 * i:2 * i + 2, 2 * j:2 * j + 2].max((0, 1)) for j in range(side)] for i in range(side)]])
        x = np.maximum(x, 0)
    return x


# -------------------------------------------------------------- capsules

@pytest.mark.parametrize("s, v", [([3, 4], [15 / 26, 20 / 26]), ([0, 1], [0, 0.5]), ([0, -0.5], [0, -0.2]),
                                  ([0.1, 0], [0.1 / 10.1, 0]), ([0, 0], [0, 0]),
                                  ([30, -40], [0.6 * 2500 / 2501, -0.8 * 2500 / 2501])])
def test_squash_by_hand(s, v):
    np.testing.assert_allclose(mc.squash_forward(np.array([s], float))[0][0], v, rtol=1e-6)


def test_lengths_by_hand_and_below_one(rng):
    np.testing.assert_allclose(
        mc.lengths_forward(np.array([[[0.6, 0.8], [0.3, -0.4], [0, 0]]]))[0], [[1, 0.5, 0]], atol=1e-4)
    for scale in (1e-6, 1e-2, 1, 100):                         # at |s| = 4000 and more, float32 rounds the length to 1
        v, _ = mc.squash_forward((scale * rng.standard_normal((4, 10, 16))).astype(np.float32))
        lengths, _ = mc.lengths_forward(v)
        assert 0 <= lengths.min() and lengths.max() < 1


def route(u_hat, n_iters, bias=None):
    return mc.routing_forward(u_hat, dataclasses.replace(TINY, routing_iters=n_iters), bias)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 5])
def test_routing_is_procedure_1(rng, n_iters, monkeypatch):
    monkeypatch.setattr(mc, "SQUASH_EPS", 0.0)
    u_hat = 1.5 * rng.standard_normal((2, 4, 3, 5))
    v, cache = route(u_hat, n_iters)
    assert len(cache.steps) == n_iters and cache.steps[-1].v is v
    for n in range(2):
        for r, step in enumerate(cache.steps, 1):
            expected, c = routing_reference(u_hat[n], r)
            np.testing.assert_allclose(step.v[n], expected, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(np.broadcast_to(step.c, u_hat.shape[:3])[n], c, rtol=1e-9, atol=1e-12)


def test_routing_by_hand():
    """Two inputs, two outputs, 1-D: u_hat_1|. = (1, 1) agree, u_hat_2|. = (1, -1) do not. First v_1 = squash(1) =
    1/2, v_2 = 0, so b_.1 = 1/2, b_.2 = 0, c_.1 = sigmoid(1/2), s_1 = 2 sigmoid(1/2), s_2 = 0."""
    v, cache = route(np.array([[[[1.0], [1.0]], [[1.0], [-1.0]]]]), 2)
    c = 1 / (1 + np.exp(-0.5))
    np.testing.assert_allclose(cache.steps[1].c[0], [[c, c], [1 - c, 1 - c]], rtol=1e-6)
    np.testing.assert_allclose(v[0, :, 0], [4 * c * c / (1 + 4 * c * c), 0], rtol=1e-6)


@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_a_bias_is_added_before_every_squash(rng, n_iters, monkeypatch):
    """It shapes the agreement of every iteration, not only the last result"""
    monkeypatch.setattr(mc, "SQUASH_EPS", 0.0)
    u_hat = rng.standard_normal((4, 6, 5))
    bias = rng.standard_normal((4, 5))
    expected, c = routing_reference(u_hat, n_iters, bias)
    v, cache = route(u_hat[None], n_iters, bias)
    np.testing.assert_allclose(v[0], expected, rtol=1e-9)
    np.testing.assert_allclose(np.broadcast_to(cache.steps[-1].c, (1, 4, 6))[0], c, rtol=1e-9)


def test_couplings_of_each_input_sum_to_one_over_the_outputs(rng):
    _, cache = route(3 * rng.standard_normal((2, 4, 30, 5)), 3)
    first, *later = cache.steps
    assert np.all(first.c == 0.25)
    for step in later:
        np.testing.assert_allclose(step.c.sum(1), 1, rtol=1e-12)
        assert np.abs(step.c.sum(2) - 1).max() > 0.1


def test_softmax_does_not_overflow():
    with np.errstate(over="raise", invalid="raise"):
        np.testing.assert_allclose(mc.softmax_forward(np.array([[[1e4], [1e4], [-1e4]]]))[0][0, :, 0], [0.5, 0.5, 0])


def test_softmax_by_hand():
    """Over the output capsules: each input's column sums to 1"""
    c, _ = mc.softmax_forward(np.log([[[1.0, 5, 2], [3, 5, 2]]]))
    np.testing.assert_allclose(c, [[[0.25, 0.5, 0.5], [0.75, 0.5, 0.5]]], rtol=1e-12)


def test_a_samples_routing_does_not_depend_on_its_batch_mates(rng):
    u_hat = 2 * rng.standard_normal((4, 5, 6, 5))
    together, _ = route(u_hat, 3)
    for n in range(4):
        np.testing.assert_allclose(route(u_hat[n:n + 1], 3)[0][0], together[n], rtol=1e-12)


def test_permuting_the_output_capsules_permutes_the_result(rng):
    u_hat, order = 2 * rng.standard_normal((2, 4, 6, 5)), [2, 0, 3, 1]
    v, permuted = route(u_hat, 3)[0], route(u_hat[:, order], 3)[0]
    np.testing.assert_allclose(permuted, v[:, order], rtol=1e-12)


def test_the_order_of_the_input_capsules_does_not_matter(rng):
    u_hat, order = 2 * rng.standard_normal((2, 4, 6, 5)), [5, 2, 0, 3, 1, 4]
    (v, cache), (same, permuted) = route(u_hat, 3), route(u_hat[:, :, order], 3)
    np.testing.assert_allclose(same, v, rtol=1e-12)
    np.testing.assert_allclose(permuted.steps[-1].c, cache.steps[-1].c[:, :, order], rtol=1e-12)


def test_more_iterations_sharpen_agreement(rng):
    u_hat = 0.3 * rng.standard_normal((1, 4, 50, 5))
    u_hat[:, 2] += 0.3                                                                    # all inputs agree on output 2
    lengths = [mc.lengths_forward(route(u_hat, n)[0])[0][0, 2] for n in (1, 2, 3)]
    assert lengths[0] < lengths[1] < lengths[2]


def test_votes_are_one_matrix_per_pair_of_capsules(rng):
    u, W = rng.standard_normal((2, 3, 6)), rng.standard_normal((3, 6, 4, 5))
    u_hat, _ = mc.votes_forward(u, W)
    assert u_hat.shape == (2, 4, 3, 5)
    for n, j, i in np.ndindex(2, 4, 3):
        np.testing.assert_allclose(u_hat[n, j, i], W[i, :, j].T @ u[n, i], rtol=1e-12)


def test_mask_zeroes_all_but_one_capsule(rng):
    v = rng.standard_normal((2, 4, 5))
    masked = mc.mask_forward(v, np.array([[3, 0], [1, 2]]))[0].reshape(2, 2, 4, 5)
    for n, r, j in ((0, 0, 3), (0, 1, 0), (1, 0, 1), (1, 1, 2)):
        np.testing.assert_array_equal(masked[n, r, j], v[n, j])
        assert not np.delete(masked[n, r], j, 0).any()


# -------------------------------------------------------------- losses

@pytest.mark.parametrize("lengths, present, loss", [
    ([[0] * 10], [3, 5], 1.62), ([[0.9, 0.9] + [0.1] * 8], [0, 1], 0), ([[1, 1] + [0] * 8], [0, 1], 0),
    ([[0.5, 0.7] + [0] * 8], [0, 1], 0.16 + 0.04), ([[0.9, 0.9, 0.6] + [0] * 7], [0, 1], 0.5 * 0.25),
    ([[1] * 10], [8, 9], 8 * 0.5 * 0.81)])
def test_margin_loss_by_hand(lengths, present, loss):
    T = mc.k_hot(np.array([present]), float)
    assert T.sum() == 2 and T[0, present].all()
    assert mc.margin_loss(np.array(lengths, float), T)[0] == pytest.approx(loss, abs=1e-12)


def test_losses_are_sums_over_outputs_and_means_over_the_batch():
    T = mc.k_hot(np.array([[0, 1], [2, 3]]), float)
    lengths = np.zeros((2, 10))
    lengths[0, :2] = 0.9
    assert mc.margin_loss(lengths, T)[0] == pytest.approx((0 + 1.62) / 2)
    recon, target = np.zeros((2, 2, 3, 3)), np.zeros((2, 2, 3, 3))
    target[0, 0, 1], target[1, 1, 0, 2] = 0.5, 2
    assert mc.reconstruction_loss(recon, target)[0] == pytest.approx((3 * 0.25 + 4) / 2)


@pytest.mark.parametrize("scores, present, loss", [
    ([[0.0] * 10], [0, 1], 10 * np.log(2)), ([[np.log(3)] * 2 + [0.0] * 8], [0, 1], 2 * np.log(4 / 3) + 8 * np.log(2)),
    ([[-np.log(3)] * 2 + [np.log(9)] + [-1e4] * 7], [0, 1], 2 * np.log(4) + np.log(10))])
def test_sigmoid_cross_entropy_by_hand(scores, present, loss):
    """p = 3/4 for a score of log 3, 1/4 for -log 3, 9/10 for log 9; a score of -1e4 for a digit that is not there
    costs nothing"""
    with np.errstate(over="raise", invalid="raise"):
        assert mc.sigmoid_cross_entropy(np.array(scores), mc.k_hot(np.array([present]), float))[0] == pytest.approx(
            loss, rel=1e-9)
    two = mc.sigmoid_cross_entropy(np.array(scores * 2), mc.k_hot(np.array([present] * 2), float))[0]
    assert two == pytest.approx(loss, rel=1e-9)                              # mean over the batch, sum over the answers


# -------------------------------------------------------------- the networks

@pytest.mark.parametrize("n_iters, types", [(1, 1), (3, 1), (3, 2)])
def test_the_whole_network_against_a_literal_one(rng, digits, n_iters, types, monkeypatch):
    monkeypatch.setattr(mc, "SQUASH_EPS", 0.0)
    config = dataclasses.replace(TINY, routing_iters=n_iters, primary_types=types)
    params = {name: p + 0.1 * rng.standard_normal(p.shape) for name, p in mc.init_params(config).items()}
    pairs = mc.draw_pairs(digits, "train", 2, config, "data")
    batch = mc.to_batch(pairs, slice(None), np.float64)
    out, _ = mc.forward(params, batch["images"], config, batch["labels"])
    margin = recon = hits = 0
    for n in range(2):
        labels = batch["labels"][n]
        lengths, v, images = network_reference(params, batch["images"][n], labels, config)
        np.testing.assert_allclose(out["lengths"][n], lengths, rtol=1e-9)
        np.testing.assert_allclose(out["v"][n], v, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(out["recon"][n], images, rtol=1e-9)
        for k in range(10):
            margin += max(0, 0.9 - lengths[k]) ** 2 / 2 if k in labels else 0.5 * max(0, lengths[k] - 0.1) ** 2 / 2
        recon += sum((redrawn - drawn) ** 2 for redrawn, drawn in zip(images.ravel(), batch["sources"][n].ravel())) / 2
        hits += set(np.argsort(lengths)[-2:]) == set(labels)
    terms, *_ = mc.loss_and_grads(params, batch, config)
    assert terms == pytest.approx(
        {"loss": margin + 0.0005 * recon, "margin": margin, "recon": recon, "hits": hits}, rel=1e-9)


@pytest.mark.parametrize("name", ["normalised", "normalised cnn"])
def test_a_normalised_network_in_evaluation_is_one_without_whose_weights_are_scaled(digits, name, rng):
    """w gamma / std and beta - mean gamma / std, with the running statistics"""
    config = NETWORKS[name]
    params, batch = float64(config), batch_of(digits, config)
    assert not any(key in params for key in ("conv1_b", "conv5_b", "primary_b"))
    state = {key: rng.uniform(0.5, 2, a.shape) for key, a in mc.init_state(params).items()}
    norms = {key.removesuffix("_gamma") for key in params if key.endswith("_gamma")}
    assert len(norms) == (6 if config.model == "caps" else 5)
    plain = {key: p for key, p in params.items() if not key.endswith(("_gamma", "_beta"))}
    for norm in norms:
        params[norm + "_gamma"] = rng.uniform(-1, 1, params[norm + "_gamma"].shape)
        params[norm + "_beta"] = rng.standard_normal(params[norm + "_beta"].shape)
        scale = params[norm + "_gamma"] / np.sqrt(state[norm + "_var"] + 1e-5)
        layer = norm.removesuffix("_norm")
        plain |= {layer + "_w": plain[layer + "_w"] * scale,
                  layer + "_b": params[norm + "_beta"] - state[norm + "_mean"] * scale}
    out, _ = mc.forward(params | state, batch["images"], config, batch["labels"])
    expected, _ = mc.forward(plain, batch["images"], dataclasses.replace(config, norm="none"), batch["labels"])
    for key in ("lengths", "recon", "scores"):
        if key in expected:
            np.testing.assert_allclose(out[key], expected[key], rtol=1e-9, atol=1e-12)
            assert np.ptp(expected[key]) > 1e-6


def test_the_deep_network_against_a_literal_one(digits, monkeypatch):
    monkeypatch.setattr(mc, "SQUASH_EPS", 0.0)
    params, batch = float64(DEEP), batch_of(digits, DEEP)
    out, _ = mc.forward(params, batch["images"], DEEP, batch["labels"])
    for n in range(2):
        h = convs_reference(params, batch["images"][n], [1] * 5, (2, 4))
        s = (h @ params["primary_w"][0, 0] + params["primary_b"]).reshape(-1, DEEP.primary_dim)
        u = np.array([squash_reference(x) for x in s])
        u_hat = np.einsum("ie,iejd->jid", u, params["W"])
        v, _ = routing_reference(u_hat, DEEP.routing_iters)
        np.testing.assert_allclose(out["u"][n], u, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(out["v"][n], v, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("head, of_places", [("dense", np.ravel), ("mean", lambda h: h.mean((0, 1, 2))),
                                             ("max", lambda h: h.max((0, 1, 2)))])
def test_the_cnn_against_a_literal_one(digits, head, of_places):
    config = dataclasses.replace(CNN, cnn_head=head)
    params, batch = float64(config), batch_of(digits, config)
    out, _ = mc.forward(params, batch["images"], config)
    for n in range(2):
        x = of_places(convs_reference(params, batch["images"][n], [1] * 5, (2, 4)))
        hidden = np.maximum(x @ params["fc1_w"] + params["fc1_b"], 0)
        scores = hidden @ params["fc2_w"] + params["fc2_b"]
        np.testing.assert_allclose(out["hidden"][n], hidden, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(out["scores"][n], scores, rtol=1e-9)
        np.testing.assert_allclose(out["lengths"][n], 1 / (1 + np.exp(-scores)), rtol=1e-9)
        assert set(out["digits"][n]) == set(np.argsort(scores)[-2:])


def test_training_masks_by_the_labels_and_inference_by_the_two_longest(params64, batch64):
    labels = np.array([[7, 2], [0, 9]])
    assert np.array_equal(mc.forward(params64, batch64["images"], TINY, labels)[0]["digits"], labels)
    out, _ = mc.forward(params64, batch64["images"], TINY)
    assert np.array_equal(out["digits"], np.argsort(-out["lengths"], 1)[:, :2])


def test_each_digit_is_compared_with_its_own_source(params64, batch64):
    swapped = batch64 | {name: batch64[name][:, ::-1] for name in ("sources", "labels")}
    as_is, both, one = (mc.loss_and_grads(params64, batch, TINY)[0]["recon"] for batch in
                        (batch64, swapped, {**swapped, "labels": batch64["labels"]}))
    assert both == pytest.approx(as_is, rel=1e-12) and abs(one - as_is) > 1e-6 * as_is


def test_top_two_puts_the_longest_first_and_ties_go_to_the_smaller_digit():
    lengths = np.array([[0.1, 0.9, 0.3, 0.8], [0.5, 0.2, 0.5, 0.5], [0, 0, 0, 0]])
    np.testing.assert_array_equal(mc.top_two(lengths), [[1, 3], [0, 2], [0, 1]])


def test_the_cnn_answers_by_its_scores_where_sigmoids_are_all_one():
    scores = np.array([[25, 18, 22, -9, -9, -9, -9, -9, -9, -9]], np.float32)
    out = {"scores": scores, "lengths": mc.sigmoid_forward(scores)[0]}
    assert mc.answers(out).tolist() == [[0, 2]] and mc.answers({"lengths": scores}).tolist() == [[0, 2]]


@pytest.mark.parametrize("preset, n", [("deep", 1304800), ("residual", 3059072), ("classic", 2030224),
                                       ("paper", 11361808)])
def test_parameter_counts(preset, n):
    assert mc.n_params(mc.init_params(mc.Config(preset=preset))) == n


@pytest.mark.parametrize("flags, side, channels, names", [
    (dict(preset="classic"), 10, 64, ["conv1", "primary"]),                             # 36 -> 28 -> 10
    (dict(norm="none"), 4, 128, ["conv1", "conv2", "conv3", "conv4", "conv5", "primary"]),
    (dict(front_end="parts", norm="none"), 7, 128, ["conv1", "conv2", "conv3", "primary"]),             # 16 -> 7
    (dict(front_end="residual", norm="none"), 4, 128,
     ["conv1", "conv2", "conv3", "branch1", "branch2", "conv4", "branch3", "branch4", "conv5", "primary"]),
    (dict(model="cnn", norm="none"), 4, 128, ["conv1", "conv2", "conv3", "conv4", "conv5"]),
    (dict(model="cnn", preset="paper", norm="none"), 4, 128, ["conv1", "conv2", "conv3", "conv4", "conv5"]),
    (dict(model="cnn", front_end="residual", norm="none"), 4, 256,
     ["conv1", "conv2", "conv3", "branch1", "branch2", "conv4", "branch3", "branch4", "conv5"])], ids=str)
def test_sides_and_sizes_of_the_networks(flags, side, channels, names):
    """Outputs of the convolutions, by hand: (side - kernel) // stride + 1, halved where maxima are taken: of the deep
    one 36 -> 34 -> 32 -> 16 -> 14 -> 12 -> 6 -> 4 -> 4; the residual branches keep 14 and 6"""
    config = mc.Config(**flags)
    convs = mc.trunk(config)
    assert (convs.side, convs.channels) == (side, channels)
    assert [options[0] for operation, *options in convs.layers if operation == "conv2d"] == names
    assert list(convs.shapes) == [name + end for name in names for end in ("_w", "_b")]
    assert all(operation in ("conv2d", "pad") for operation, *options in convs.layers if options)
    params = mc.init_params(config)
    rows = mc.im2col_rows(np.zeros((1, 36, 36), np.float32), params["conv1_w"].shape[1])
    out, _ = mc.layers_forward(params, rows, convs.layers)
    assert out.shape == (1, side, side, channels)


@pytest.mark.parametrize("front_end, start, size, stride", [("parts", 0, 10, 4), ("deep", 0, 24, 4),
                                                            ("residual", -12, 48, 4), ("paper", 0, 17, 2)])
def test_what_a_primary_capsule_sees(rng, front_end, start, size, stride):
    """Place i sees `size` pixels from start + stride i on, and no other, of each row and column; by hand: 3x3 adds
    twice the distance of the pixels below, a maximum once, and doubles it"""
    config = mc.Config(front_end=front_end, norm="none")
    params, layers, image = float64(config), mc.trunk(config).layers, rng.random((1, 36, 36))

    def primary(image):
        return mc.layers_forward(params, mc.im2col_rows(image, params["conv1_w"].shape[1]), layers)[0]
    before, seen = primary(image), np.zeros((mc.trunk(config).side, 36), bool)
    for pixel in range(36):
        changed = image.copy()
        changed[0, pixel] += rng.random(36)
        seen[:, pixel] = (primary(changed) != before).any((0, 2, 3))
    pixels = np.arange(36)
    for place, row in enumerate(seen):
        first = start + stride * place
        assert (row == ((pixels >= first) & (pixels < first + size))).all()


@pytest.mark.parametrize("preset", mc.PRESETS)
@pytest.mark.parametrize("channels", [4, 16])
@pytest.mark.parametrize("head", mc.CNN_HEADS)
def test_the_cnn_is_as_large_as_the_capsule_network_without_decoder_and_no_larger(preset, channels, head):
    config = mc.Config(preset=preset, model="cnn", cnn_channels=channels, cnn_head=head)
    caps = sum(p.size for name, p in mc.init_params(mc.Config(preset=preset)).items() if not name.startswith("dec"))
    shapes = mc.param_shapes(config)
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    a_unit_more = shapes["fc1_w"][0] + 1 + 10
    assert caps - a_unit_more < size <= caps


def test_initial_weights_have_the_variance_their_fan_in_asks_for():
    params = mc.init_params(mc.Config(preset="classic"))
    for name, std in (("conv1_w", (2 / 81) ** 0.5), ("primary_w", (1 / (81 * 32)) ** 0.5),
                      ("W", (mc.W_GAIN / 8) ** 0.5), ("dec2_w", (2 / 256) ** 0.5), ("dec3_w", (1 / 512) ** 0.5)):
        assert params[name].std() == pytest.approx(std, rel=0.05) and abs(params[name].mean()) < std / 20
    assert not any(p.any() for name, p in params.items() if name.endswith("_b"))


def test_digit_biases_start_at_a_tenth_and_change_nothing_else():
    plain, biased = mc.init_params(TINY), mc.init_params(BIASED)
    assert biased.pop("digit_b").tolist() == np.full((10, 5), 0.1, np.float32).tolist()
    assert_same(plain, biased)


def test_loss_at_initialisation_is_that_of_short_capsules_and_gray_images(digits, capsys):
    config = mc.Config(preset="classic", n_val=32, threads=1)
    val, params = mc.draw_pairs(digits, "val", 32, config, "evaluation", 0), mc.init_params(config)
    with mc.Runner(1) as runner:
        actual = mc.evaluate(params, mc.in_chunks(val), config, runner)
    with mc.Run(config, "synthetic", 6000, mc.Progress(quiet=False)) as run:
        mc.announce(run, digits, val)
    gray = 0.0005 * np.square(val["sources"] / 255 - 0.5).sum() / 32
    assert 0.0005 * actual["recon"] == pytest.approx(gray, rel=0.02) and 1.3 < actual["margin"] < 1.62
    text = capsys.readouterr().out
    assert ("2,030,224" in text and f"loss {actual['loss']:.3f};" in text
            and f"= {1.62 + gray:.3f} if all capsules had length 0" in text)


# -------------------------------------------------------------- evaluation

@pytest.mark.parametrize("chunk", [2, 2048])
def test_evaluate_against_brute_force(digits, chunk, monkeypatch):
    """Three pairs: both digits named (in the other order), one, none."""
    monkeypatch.setattr(mc, "CHUNK", chunk)
    pairs = mc.draw_pairs(digits, "val", 3, TINY, "evaluation", 0)
    pairs["labels"] = np.array([[1, 2], [3, 4], [5, 6]])
    lengths = np.full((3, 10), 0.2, np.float32)
    lengths[0, [2, 1]] = 0.9, 0.6
    lengths[1, [3, 9]] = 0.5, 0.7
    lengths[2, [0, 7]] = 0.8, 0.8
    recon, done = np.random.default_rng(0).random((3, 2, 36, 36), np.float32), []

    def fake_forward(_, part, *__):
        start = sum(done)
        done.append(len(part["labels"]))
        return {"lengths": lengths[start:start + done[-1]], "recon": recon[start:start + done[-1]]}

    test = mc.evaluate({}, mc.in_chunks(pairs), TINY, SimpleNamespace(forward=fake_forward))
    target = pairs["sources"] / 255
    margin = (0.09 + 8 * 0.005 + 0.16 + 0.49 + 7 * 0.005 + 0.5 * 0.36 + 2 * 0.49 + 6 * 0.005 + 2 * 0.5 * 0.49) / 3
    squares = np.square(recon - target).sum() / 3
    constant = np.mean(target, (0, 1))
    assert test == pytest.approx({
        "n": 3, "hits": 1, "set_accuracy": 1 / 3, "any_accuracy": 2 / 3, "margin": margin, "recon": squares,
        "loss": margin + 0.0005 * squares, "recon_mse": np.square(recon - target).mean(),
        "baseline_recon_mse": np.square(target - constant).mean()}, rel=1e-5)
    assert type(test["hits"]) is int


@pytest.mark.parametrize("decode", ["labels", "top2"])
@pytest.mark.parametrize("network", ["deep", "normalised cnn"])
def test_five_views_are_averaged_and_the_pair_as_it_is_is_redrawn(digits, network, decode):
    """A pixel beyond the edge is lost, not brought back at the other side"""
    config = dataclasses.replace(NETWORKS[network], views=5)
    params = mc.init_params(config) | mc.init_state(mc.init_params(config))
    pairs = mc.draw_pairs(digits, "val", 6, config, "evaluation", 0)
    pairs["sources"][:, :, 0] = 200                                                     # ink at the upper edge
    images = mc.to_batch(pairs, slice(None))["images"]
    up, down, left, right = (np.zeros_like(images) for _ in range(4))
    up[:, :-1], down[:, 1:], left[:, :, :-1], right[:, :, 1:] = images[:, 1:], images[:, :-1], images[:, :, 1:], (
        images[:, :, :-1])
    out = mc.forward_rows(params, pairs, slice(None), config, np.empty, decode)
    alone = mc.forward_rows(params, pairs, slice(None), dataclasses.replace(config, views=1), np.empty, decode)
    name = "scores" if config.model == "cnn" else "lengths"
    mean = np.mean([mc.forward(params, view, config)[0][name] for view in (images, up, down, left, right)], axis=0)
    np.testing.assert_allclose(out[name], mean, rtol=1e-5)
    assert not np.allclose(out[name], alone[name], rtol=1e-4) and out.keys() == alone.keys()
    if config.model == "cnn":
        np.testing.assert_allclose(out["lengths"], 1 / (1 + np.exp(-mean)), rtol=1e-5)
        assert np.array_equal(out["digits"], mc.top_two(out["scores"]))
        return
    np.testing.assert_array_equal(out["v"], alone["v"])
    expected = pairs["labels"] if decode == "labels" else mc.top_two(out["lengths"])
    assert np.array_equal(out["digits"], expected)
    redrawn = mc.forward(params, images, config, expected)[0]["recon"]
    np.testing.assert_allclose(out["recon"], redrawn, rtol=1e-5)


def test_figures_and_films_refuse_views_that_they_would_not_show():
    mc.check_one_view(mc.Config())
    with pytest.raises(mc.InputError, match="--views 5: figures and films"):
        mc.check_one_view(mc.Config(views=5))


def test_the_cnn_has_its_own_steps_but_the_residual_networks_where_that_is_its_trunk():
    steps = {preset: (config.lr, config.muon, config.norm) for preset in mc.PRESETS
             for config in [mc.Config(model="cnn", preset=preset)]}
    assert steps == {"residual": (0.003, 0.006, "batch"), **dict.fromkeys(("deep", "classic", "paper"),
                                                                          (0.01, 0.02, "batch"))}
