"""What gradient checks cannot see: the formulas themselves, against hand-computed numbers and slow literal
references."""
import dataclasses
from types import SimpleNamespace

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import CNN, NETWORKS, TINY, batch_of, float64

# -------------------------------------------------------------- slow literal references


def squash_reference(s):
    """Eq. 1 along the last axis, with the root's 1e-9"""
    length = np.sqrt((s * s).sum(-1, keepdims=True) + 1e-9)
    return length ** 2 / (1 + length ** 2) * s / length


def softmax_reference(b):
    return np.exp(b) / sum(np.exp(b[:, k:k + 1]) for k in range(b.shape[1]))


def routing_reference(u_hat, n_iters, normalize=softmax_reference, end=squash_reference):
    """Procedure 1. u_hat (N, J, I, D) -> every iteration's c (N, J, I) and v (N, J, D)"""
    b, steps = np.zeros(u_hat.shape[:3]), []
    for _ in range(n_iters):
        c = normalize(b)
        v = end(np.einsum("nji,njid->njd", c, u_hat))
        b = b + np.einsum("njid,njd->nji", u_hat, v)
        steps.append((c, v))
    return steps


def by_windows(x, K, stride, of_window):
    """of_window (N, K, K, C) -> (N, F), of each K x K window of x (N, H, W, C), one at a time"""
    side = (x.shape[1] - K) // stride + 1
    return np.array([[of_window(x[:, row:row + K, column:column + K]) for column in stride * np.arange(side)]
                     for row in stride * np.arange(side)]).transpose(2, 0, 1, 3)


def literal(p, x, layers, running=None):
    """A batch x (N, H, W, C) or (N, C) through layers, as their names say. running: the statistics of normalizations,
    which without them are the batch's own"""
    kept = []
    for operation, *options in layers:
        w, b = (p.get(f"{options[0]}_{end}") if options else None for end in "wb")
        if operation == "conv2d":
            _, K, stride, _ = options
            if w.shape[:3] == (1, K, K) and x.shape[3] == 1:                            # the first: (1, x, y, F)
                w = w[0].transpose(1, 0, 2)[:, :, None]
            x = by_windows(x, K, stride, lambda part, w=w: np.einsum("nyxc,yxcf->nf", part, w))
            x = x if b is None else x + b
        elif operation == "linear":
            x = x @ w + b
        elif operation == "norm":
            stem, axes = options[0], tuple(range(x.ndim - 1))
            mean, variance = (x.mean(axes), x.var(axes)) if running is None else (
                running[stem + "_mean"], running[stem + "_var"])
            x = p[stem + "_gamma"] * (x - mean) / np.sqrt(variance + 1e-5) + p[stem + "_beta"]
        elif operation == "max_pool":
            x = by_windows(x, 2, 2, lambda part: part.max((1, 2)))
        elif operation == "pad":
            x = np.pad(x, ((0, 0), *((options[0], options[0]),) * 2, (0, 0)))
        elif operation == "skip":
            kept.append(x)
        else:
            x = {"relu": lambda x: np.where(x > 0, x, 0), "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
                 "flatten": lambda x: x.reshape(len(x), -1), "global_avg_pool": lambda x: x.mean((1, 2)),
                 "add": lambda x: x + kept.pop()}[operation](x)
    return x


def network_reference(p, images, labels, config, running=None):
    """A whole network, layer by layer -> forward's out, without u and c"""
    x = literal(p, images[..., None], mc.backbone(config), running)
    if config.model == "vector-dense":
        v = squash_reference((x.reshape(len(x), -1) @ p["fc1_w"] + p["fc1_b"]).reshape(-1, 10, 16))
        return {"lengths": np.sqrt((v * v).sum(-1) + 1e-9), "v": v, "recon": redrawn(p, v, labels, config)}
    if config.model != "capsnet":
        x = x.reshape(len(x), -1) if config.cnn_head == "dense" else x.mean((1, 2))
        hidden = np.maximum(x @ p["fc1_w"] + p["fc1_b"], 0)
        scores = hidden @ p["fc2_w"] + p["fc2_b"]
        out = {"scores": scores, "lengths": 1 / (1 + np.exp(-scores))}
        return out | ({"recon": redrawn(p, hidden.reshape(-1, 10, 16), labels, config)} if "dec1_w" in p else {})
    u = squash_reference(x.reshape(len(x), -1, 8))
    _, v = routing_reference(np.einsum("nie,iejd->njid", u, p["W"]), config.routing_iters)[-1]
    return {"lengths": np.sqrt((v * v).sum(-1) + 1e-9), "v": v, "recon": redrawn(p, v, labels, config)}


def redrawn(p, v, labels, config):
    """Each pair's digits from their vectors among v (N, J, D), all others zero -> (N, R, 36, 36)"""
    masked = np.array([[np.where(np.arange(10)[:, None] == digit, pose, 0).ravel() for digit in pair]
                       for pose, pair in zip(v, labels)])                               # (N, R, J*D)
    return literal(p, masked.reshape(-1, 160), mc.decoder(config)).reshape(len(v), -1, 36, 36)


def terms_reference(out, batch, config):
    """loss_and_grads' terms, number by number"""
    there = [set(pair) for pair in batch["labels"].tolist()]
    n, answers = len(there), out.get("scores", out["lengths"])
    hits = sum(set(np.argsort(row)[-2:].tolist()) == pair for row, pair in zip(answers, there))
    recon = ((out["recon"] - batch["sources"]) ** 2).sum() / n if "recon" in out else 0
    if "scores" in out:
        entropy = -sum(np.log(p if k in pair else 1 - p) for row, pair in zip(out["lengths"], there)
                       for k, p in enumerate(row)) / n
        loss = entropy + config.recon_weight * recon
        return {"loss": loss, "cross_entropy": entropy, "hits": hits} | ({"recon": recon} if recon else {})
    margin = sum(max(0, 0.9 - x) ** 2 if k in pair else 0.5 * max(0, x - 0.1) ** 2
                 for row, pair in zip(out["lengths"], there) for k, x in enumerate(row)) / n
    return {"loss": margin + config.recon_weight * recon, "margin": margin, "recon": recon, "hits": hits}


# -------------------------------------------------------------- capsules

@pytest.mark.parametrize("s, v", [([3, 4], [15 / 26, 20 / 26]), ([0, 1], [0, 0.5]), ([0, -0.5], [0, -0.2]),
                                  ([0.1, 0], [0.1 / 10.1, 0]), ([0, 0], [0, 0]),
                                  ([30, -40], [0.6 * 2500 / 2501, -0.8 * 2500 / 2501])])
def test_squash_by_hand(s, v):
    np.testing.assert_allclose(mc.squash_forward(np.array([s], float))[0][0], v, rtol=1e-6)


def test_lengths_and_softmax_by_hand(rng):
    """Lengths are below 1; couplings sum to 1 over the output capsules, and large logits do not overflow"""
    np.testing.assert_allclose(
        mc.lengths_forward(np.array([[[0.6, 0.8], [0.3, -0.4], [0, 0]]]))[0], [[1, 0.5, 0]], atol=1e-4)
    for scale in (1e-6, 1e-2, 1, 100):                         # at |s| = 4000 and more, float32 rounds the length to 1
        v, _ = mc.squash_forward((scale * rng.standard_normal((4, 10, 16))).astype(np.float32))
        lengths, _ = mc.lengths_forward(v)
        assert 0 <= lengths.min() and lengths.max() < 1
    c, _ = mc.softmax_forward(np.log([[[1.0, 5, 2], [3, 5, 2]]]))
    np.testing.assert_allclose(c, [[[0.25, 0.5, 0.5], [0.75, 0.5, 0.5]]], rtol=1e-12)
    with np.errstate(over="raise", invalid="raise"):
        np.testing.assert_allclose(mc.softmax_forward(np.array([[[1e4], [1e4], [-1e4]]]))[0][0, :, 0], [0.5, 0.5, 0])


SIGMOID = mc.sigmoid_forward, mc.sigmoid_backward
AS_IT_IS = (lambda s: (s, None)), (lambda dv, _: dv)
VARIANTS = {"the paper's": ({}, {}),
            "sigmoid, no squash": (dict(normalizer=SIGMOID, nonlinearity=AS_IT_IS),
                                   dict(normalize=lambda b: 1 / (1 + np.exp(-b)), end=lambda s: s))}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("n_iters", [1, 2, 3, 5])
def test_routing_is_procedure_1(rng, n_iters, variant):
    """The paper's, and with another normalizer and another nonlinearity in the softmax's and the squash's place"""
    given, literally = VARIANTS[variant]
    u_hat = (1.5 if not given else 0.3) * rng.standard_normal((2, 4, 3, 5))
    v, cache = mc.routing_forward(u_hat, n_iters, **given)
    assert len(cache.steps) == n_iters and cache.steps[-1].v is v
    for step, (c, expected) in zip(cache.steps, routing_reference(u_hat, n_iters, **literally)):
        np.testing.assert_allclose(step.v, expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(np.broadcast_to(step.c, u_hat.shape[:3]), c, rtol=1e-9, atol=1e-12)


def test_routing_by_hand():
    """Two inputs, two outputs, 1-D: u_hat_1|. = (1, 1) agree, u_hat_2|. = (1, -1) do not. First v_1 = squash(1) =
    1/2, v_2 = 0, so b_.1 = 1/2, b_.2 = 0, c_.1 = sigmoid(1/2), s_1 = 2 sigmoid(1/2), s_2 = 0."""
    v, cache = mc.routing_forward(np.array([[[[1.0], [1.0]], [[1.0], [-1.0]]]]), 2)
    c = 1 / (1 + np.exp(-0.5))
    np.testing.assert_allclose(cache.steps[1].c[0], [[c, c], [1 - c, 1 - c]], rtol=1e-6)
    np.testing.assert_allclose(v[0, :, 0], [4 * c * c / (1 + 4 * c * c), 0], rtol=1e-6)


def test_couplings_sum_to_one_and_know_no_order_and_no_batch_mates(rng):
    u_hat, outputs, inputs = 2 * rng.standard_normal((2, 4, 6, 5)), [2, 0, 3, 1], [5, 2, 0, 3, 1, 4]
    v, cache = mc.routing_forward(u_hat, 3)
    for step in cache.steps[1:]:
        np.testing.assert_allclose(step.c.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(mc.routing_forward(u_hat[:, outputs], 3)[0], v[:, outputs], rtol=1e-12)
    same, permuted = mc.routing_forward(u_hat[:, :, inputs], 3)
    np.testing.assert_allclose(same, v, rtol=1e-12)
    np.testing.assert_allclose(permuted.steps[-1].c, cache.steps[-1].c[:, :, inputs], rtol=1e-12)
    for n in range(2):
        np.testing.assert_allclose(mc.routing_forward(u_hat[n:n + 1], 3)[0][0], v[n], rtol=1e-12)


# -------------------------------------------------------------- losses

@pytest.mark.parametrize("lengths, present, loss", [
    ([[0] * 10], [3, 5], 1.62), ([[0.9, 0.9] + [0.1] * 8], [0, 1], 0), ([[1, 1] + [0] * 8], [0, 1], 0),
    ([[0.5, 0.7] + [0] * 8], [0, 1], 0.16 + 0.04), ([[0.9, 0.9, 0.6] + [0] * 7], [0, 1], 0.5 * 0.25),
    ([[1] * 10], [8, 9], 8 * 0.5 * 0.81)])
def test_margin_loss_by_hand(lengths, present, loss):
    T = mc.k_hot(np.array([present]), float)
    assert T.sum() == 2 and T[0, present].all()
    assert mc.margin_loss(np.array(lengths, float), T)[0] == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("scores, loss", [
    ([[0.0] * 10], 10 * np.log(2)), ([[np.log(3)] * 2 + [0.0] * 8], 2 * np.log(4 / 3) + 8 * np.log(2)),
    ([[-np.log(3)] * 2 + [np.log(9)] + [-1e4] * 7], 2 * np.log(4) + np.log(10))])
def test_sigmoid_cross_entropy_by_hand(scores, loss):
    """0 and 1 are there. p = 3/4 for a score of log 3, 1/4 for -log 3, 9/10 for log 9; a score of -1e4 for a digit that
    is not there costs nothing. Mean over the batch, sum over the answers"""
    for n in (1, 2):
        present = mc.k_hot(np.array([[0, 1]] * n), float)
        with np.errstate(over="raise", invalid="raise"):
            assert mc.sigmoid_cross_entropy(np.array(scores * n), present)[0] == pytest.approx(loss, rel=1e-9)


# -------------------------------------------------------------- the networks

@pytest.mark.parametrize("name, n_iters", [("paper", 1), *((name, 3) for name in NETWORKS)])
def test_every_network_against_a_literal_one(digits, name, n_iters, rng):
    """In training, and in evaluation, where a normalization has running statistics"""
    config = NETWORKS[name]
    config = dataclasses.replace(config, routing_iters=n_iters) if config.model == "capsnet" else config
    params, batch = float64(config), batch_of(digits, config, 3)
    state = {key: rng.uniform(0.5, 2, a.shape) for key, a in mc.init_state(params).items()}
    for statistics, running in ((None, state), ({}, None)):
        out, _ = mc.forward(params | state, batch["images"], config, batch["labels"], statistics=statistics)
        expected = network_reference(params, batch["images"], batch["labels"], config, running)
        for key, value in expected.items():
            np.testing.assert_allclose(out[key], value, rtol=1e-8, atol=1e-11, err_msg=key)
            assert np.ptp(value) > 1e-6
    terms, _, found = mc.loss_and_grads(params, batch, config)
    assert terms == pytest.approx(terms_reference(expected, batch, config), rel=1e-8) and found.keys() == state.keys()


def test_training_masks_by_the_labels_and_inference_by_the_two_longest(digits, params64, batch64):
    labels = np.array([[7, 2], [0, 9]])
    assert np.array_equal(mc.forward(params64, batch64["images"], TINY, labels)[0]["digits"], labels)
    out, _ = mc.forward(params64, batch64["images"], TINY)
    assert np.array_equal(out["digits"], np.argsort(-out["lengths"], 1)[:, :2])
    pairs = mc.draw_pairs(digits, "train", 2, TINY, "data")
    for how, wanted in (("labels", batch64["labels"]), ("top2", out["digits"])):
        assert np.array_equal(mc.forward_rows(params64, pairs, slice(None), TINY, np.empty, how)["digits"], wanted)


def test_the_two_longest_are_named_by_scores_where_sigmoids_are_all_one():
    """The longest first; ties go to the smaller digit"""
    lengths = np.array([[0.1, 0.9, 0.3, 0.8], [0.5, 0.2, 0.5, 0.5], [0, 0, 0, 0]])
    np.testing.assert_array_equal(mc.top_two(lengths), [[1, 3], [0, 2], [0, 1]])
    scores = np.array([[18, 25, 22, -9, -9, -9, -9, -9, -9, -9]], np.float32)
    out = {"scores": scores, "lengths": mc.sigmoid_forward(scores)[0]}
    assert (out["lengths"][0, :3] == 1).all() and mc.predict(out).tolist() == [[1, 2]]
    assert mc.exact_match(np.array([[1, 2], [2, 1], [1, 3]]), np.array([[1, 2]] * 3)).tolist() == [True, True, False]


@pytest.mark.parametrize("preset, n", [("deep", 1304800), ("residual", 3059072), ("classic", 2030224),
                                       ("paper", 11361808), ("half-digit", 1879008)])
def test_parameter_counts(preset, n):
    """Those that the help texts give, and the sizes of the CNNs: within a hidden unit of the capsule network without
    its decoder, and no larger"""
    params = mc.init_params(mc.Config(preset=preset))
    caps = sum(p.size for name, p in params.items() if not name.startswith("dec"))
    assert mc.n_params(params) == n
    head = "gap" if preset == "residual" else "dense"                                 # 87 units fit on all its places
    vectors = mc.param_shapes(mc.Config(preset=preset, model="cnn-vectors", cnn_head=head))
    without = sum(int(np.prod(shape)) for name, shape in vectors.items() if not name.startswith("dec"))
    assert vectors["fc2_w"] == (160, 10) and 0.9 * caps * (preset == "deep") < without <= caps
    for head, channels in (("dense", 16), *(("gap", channels) for channels in range(2, 40))):
        shapes = mc.param_shapes(mc.Config(preset=preset, model="cnn", cnn_head=head, conv1_channels=channels))
        size, a_unit_more = sum(int(np.prod(shape)) for shape in shapes.values()), shapes["fc1_w"][0] + 1 + 10
        assert caps - a_unit_more < size <= caps


@pytest.mark.parametrize("flags, side, channels, n", [
    (dict(preset="classic"), 10, 64, 2), (dict(preset="paper"), 10, 256, 2), (dict(), 4, 128, 6),
    (dict(preset="half-digit"), 7, 128, 4), (dict(preset="residual"), 4, 128, 10), (dict(model="cnn"), 4, 128, 5),
    (dict(model="cnn", preset="paper"), 4, 128, 5), (dict(model="cnn", preset="residual"), 4, 256, 9)], ids=str)
def test_sides_and_sizes_of_the_networks(flags, side, channels, n):
    """Outputs of the n convolutions, by hand: (side - kernel) // stride + 1, halved where maxima are taken: of the deep
    one 36 -> 34 -> 32 -> 16 -> 14 -> 12 -> 6 -> 4 -> 4; the residual branches keep 14 and 6"""
    config = mc.Config(**flags)
    params, layers = mc.init_params(config), mc.backbone(config)
    rows = mc.im2col_rows(np.zeros((1, 36, 36), np.float32), params["conv1_w"].shape[1])
    assert mc.layers_forward(params, rows, layers, statistics={})[0].shape == (1, side, side, channels)
    assert [p.ndim for name, p in params.items() if name != "W"].count(4) == n


def test_initial_weights_have_the_variance_their_fan_in_asks_for():
    caps, cnn = mc.init_params(mc.Config(preset="classic")), mc.init_params(mc.Config(model="cnn"))
    for params, name, std in ((caps, "conv1_w", (2 / 81) ** 0.5), (caps, "primary_w", (1 / (81 * 32)) ** 0.5),
                              (caps, "W", (0.01 / 8) ** 0.5), (caps, "dec1_w", (2 / 16) ** 0.5),
                              (caps, "dec3_w", (1 / 512) ** 0.5), (cnn, "fc1_w", (2 / 2048) ** 0.5),
                              (cnn, "fc2_w", (1 / cnn["fc2_w"].shape[0]) ** 0.5)):
        assert params[name].std() == pytest.approx(std, rel=0.06) and abs(params[name].mean()) < std / 15
    for params in (caps, cnn):
        assert not any(p.any() for name, p in params.items() if name.endswith(("_b", "_beta")))
    assert (cnn["conv3_norm_gamma"] == 1).all()


def test_loss_at_initialization_is_that_of_short_capsules_and_gray_images(digits):
    config = mc.Config(preset="classic", n_val=32, threads=1)
    val, params = mc.draw_pairs(digits, "val", 32, config, "evaluation", 0), mc.init_params(config)
    with mc.Runner(1) as runner:
        actual = mc.evaluate(params, [val], config, runner)
    gray = np.square(val["sources"] / 255 - 0.5).sum() / 32
    assert actual["recon"] == pytest.approx(gray, rel=0.02) and 1.3 < actual["margin"] < 1.62


# -------------------------------------------------------------- evaluation

@pytest.mark.parametrize("chunks", [[slice(0, 3)], [slice(0, 2), slice(2, 3)]], ids=["whole", "in parts"])
def test_evaluate_against_brute_force(digits, chunks):
    """Three pairs: both digits named (in the other order), one, none."""
    pairs = mc.draw_pairs(digits, "val", 3, TINY, "evaluation", 0)
    pairs["labels"] = np.array([[1, 2], [3, 4], [5, 6]])
    lengths = np.full((3, 10), 0.2, np.float32)
    lengths[0, [2, 1]] = 0.9, 0.6
    lengths[1, [3, 9]] = 0.5, 0.7
    lengths[2, [0, 7]] = 0.8, 0.8
    out = {"lengths": lengths, "recon": np.random.default_rng(0).random((3, 2, 36, 36), np.float32)}

    def evaluate(out, config):
        parts, seen = [{name: a[rows] for name, a in pairs.items()} for rows in chunks], iter(chunks)

        def forward(*_):
            rows = next(seen)
            return {name: a[rows] for name, a in out.items()}
        return mc.evaluate({}, parts, config, SimpleNamespace(forward=forward))
    test, target = evaluate(out, TINY), pairs["sources"] / 255
    margin = (0.09 + 8 * 0.005 + 0.16 + 0.49 + 7 * 0.005 + 0.5 * 0.36 + 2 * 0.49 + 6 * 0.005 + 2 * 0.5 * 0.49) / 3
    squares = np.square(out["recon"] - target).sum() / 3
    assert test.pop("correct").tolist() == [True, False, False]
    named = {"n": 3, "hits": 1, "exact_match": 1 / 3, "at_least_one": 2 / 3,
             "baseline_recon_mse": np.square(target - np.mean(target, (0, 1))).mean()}
    assert test == pytest.approx(named | {"margin": margin, "recon": squares, "loss": margin + 0.0005 * squares,
                                          "recon_mse": np.square(out["recon"] - target).mean()}, rel=1e-5)
    assert type(test["hits"]) is int
    scores = np.log(lengths / (1 - lengths))
    test = evaluate({"scores": scores, "lengths": lengths}, CNN)
    entropy = -np.log(np.where(mc.k_hot(pairs["labels"], bool), lengths, 1 - lengths)).sum() / 3
    assert test.pop("correct").tolist() == [True, False, False]
    assert test == pytest.approx(named | {"cross_entropy": entropy, "loss": entropy}, rel=1e-5)


def test_results_say_which_pairs_were_right():
    """Eight to a byte, the first in its highest bit"""
    right = np.array([True, False, False, True, True, True, True, True, False, True])
    test = {"n": 10, "hits": 7, "exact_match": 0.7, "at_least_one": 1.0, "baseline_recon_mse": 0.1, "correct": right}
    history = {"source": "synthetic", "epochs": [{"epoch": 1}] * 2, "seconds": 4.0, "steps": 8}
    found = mc.test_result(TINY, {"a_w": np.zeros(5), "a_mean": np.zeros(3)}, history, test)
    assert found["hit_bits"] == {"test": "n0A="} and (found["n_params"], found["test_hits"]) == (5, 7)
    assert found["test_recon_mse"] is None and found["ms_per_step"] == 500
    assert 0.39 < found["test_exact_match_ci95"][0] < 0.4
