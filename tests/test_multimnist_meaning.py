"""What gradient checks cannot see: the formulas themselves, against hand-computed numbers and slow literal
references."""
import dataclasses
import math

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import CNN, NETWORKS, TINY, batch_of, float64
from references import routing_reference, squash_reference

# -------------------------------------------------------------- slow literal references


def by_windows(x, K, stride, of_window):
    """Return of_window, (N, K, K, C) -> (N, F), of each K x K window of x (N, H, W, C), one at a time"""
    side = (x.shape[1] - K) // stride + 1
    return np.array([[of_window(x[:, row:row + K, column:column + K]) for column in stride * np.arange(side)]
                     for row in stride * np.arange(side)]).transpose(2, 0, 1, 3)


def convolutions_reference(p, x, config, running):
    """Return x (N, 36, 36, 1) after all convolutions. running: the statistics of normalizations; None: the batch's"""
    kept = None
    for conv in mc.convolutions(config):
        kept, w = x if conv.skip == "start" else kept, p[conv.name + "_w"]
        if conv.name == "conv1":                                                        # stored as (1, x, y, F)
            w = w[0].transpose(1, 0, 2)[:, :, None]
        x = np.pad(x, ((0, 0), *((int(conv.skip != ""),) * 2,) * 2, (0, 0)))
        x = by_windows(x, conv.K, conv.stride, lambda part, w=w: np.einsum("nyxc,yxcf->nf", part, w))
        if config.norm == "batch":
            norm = conv.name + "_norm"
            mean, variance = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if running is None else (
                running[norm + "_mean"], running[norm + "_var"])
            x = p[norm + "_gamma"] * (x - mean) / np.sqrt(variance + 1e-5) + p[norm + "_beta"]
        else:
            x = x + p[conv.name + "_b"]
        x = by_windows(x, 2, 2, lambda part: part.max((1, 2))) if conv.pool else x
        x = x + kept if conv.skip == "end" else x
        x = np.where(x > 0, x, 0) if conv.name != "primary" else x
    return x


def network_reference(p, images, labels, config, running=None):
    """Return out of forward, without u, c and digits, of a whole network"""
    x = convolutions_reference(p, images[..., None], config, running)
    features = x.mean((1, 2)) if config.cnn_head == "gap" else x.reshape(len(x), -1)
    if config.model in ("cnn", "cnn-vectors"):
        hidden = np.maximum(features @ p["fc1_w"] + p["fc1_b"], 0)
        scores = hidden @ p["fc2_w"] + p["fc2_b"]
        recon = {"recon": decoded(p, hidden.reshape(-1, 10, 16), labels)} if config.model == "cnn-vectors" else {}
        return {"scores": scores} | recon
    if config.model == "capsnet":
        u = squash_reference(x.reshape(len(x), -1, 8))
        _, v = routing_reference(np.einsum("nie,iejd->njid", u, p["W"]), config.routing_iters)[-1]
    else:
        v = squash_reference((features @ p["fc1_w"] + p["fc1_b"]).reshape(-1, 10, 16))
    return {"scores": np.sqrt((v * v).sum(-1) + 1e-9), "v": v, "recon": decoded(p, v, labels)}


def decoded(p, v, labels):
    """Return the reconstructions (N, R, 36, 36) of each pair's digits from their vectors among v (N, J, D), all others
    zero"""
    x = np.array([[np.where(np.arange(10)[:, None] == digit, pose, 0).ravel() for digit in pair]
                  for pose, pair in zip(v, labels)])                                    # (N, R, J*D)
    x = np.maximum(np.maximum(x @ p["dec1_w"] + p["dec1_b"], 0) @ p["dec2_w"] + p["dec2_b"], 0)
    return 1 / (1 + np.exp(-(x @ p["dec3_w"] + p["dec3_b"]))).reshape(len(v), -1, 36, 36)


def terms_reference(out, batch, config):
    """Return the terms of loss_and_grads, number by number"""
    labels = [set(pair) for pair in batch["labels"].tolist()]
    n, scores = len(labels), out["scores"]
    hits = sum(set(np.argsort(row)[-2:].tolist()) == pair for row, pair in zip(scores, labels))
    recon = {"recon": ((out["recon"] - batch["sources"]) ** 2).sum() / n} if "recon" in out else {}
    if config.model in ("cnn", "cnn-vectors"):
        name, loss = "cross_entropy", -sum(np.log(p if k in pair else 1 - p) for row, pair in zip(
            1 / (1 + np.exp(-scores)), labels) for k, p in enumerate(row)) / n
    else:
        name, loss = "margin", sum(max(0, 0.9 - x) ** 2 if k in pair else 0.5 * max(0, x - 0.1) ** 2
                                   for row, pair in zip(scores, labels) for k, x in enumerate(row)) / n
    return {"loss": loss + config.recon_weight * recon.get("recon", 0), name: loss, "accuracy": hits / n} | recon


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
    c = mc.softmax_forward(np.log([[[1.0, 5, 2], [3, 5, 2]]]))
    np.testing.assert_allclose(c, [[[0.25, 0.5, 0.5], [0.75, 0.5, 0.5]]], rtol=1e-12)
    with np.errstate(over="raise", invalid="raise"):
        np.testing.assert_allclose(mc.softmax_forward(np.array([[[1e4], [1e4], [-1e4]]]))[0, :, 0], [0.5, 0.5, 0])


@pytest.mark.parametrize("n_iters", [1, 2, 3, 5])
def test_routing_is_procedure_1(rng, n_iters):
    u_hat = 1.5 * rng.standard_normal((2, 4, 3, 5))
    last, (_, steps, *_) = mc.routing_forward(u_hat, n_iters)
    assert len(steps) == n_iters and steps[-1][1] is last
    for (c, v, *_), (expected_c, expected_v) in zip(steps, routing_reference(u_hat, n_iters)):
        np.testing.assert_allclose(v, expected_v, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(np.broadcast_to(c, u_hat.shape[:3]), expected_c, rtol=1e-9, atol=1e-12)


def test_routing_by_hand():
    """Two inputs, two outputs, 1-D: u_hat_1|. = (1, 1) agree, u_hat_2|. = (1, -1) do not. First v_1 = squash(1) =
    1/2, v_2 = 0, so b_.1 = 1/2, b_.2 = 0, c_.1 = sigmoid(1/2), s_1 = 2 sigmoid(1/2), s_2 = 0."""
    v, (_, steps, *_) = mc.routing_forward(np.array([[[[1.0], [1.0]], [[1.0], [-1.0]]]]), 2)
    c = 1 / (1 + np.exp(-0.5))
    np.testing.assert_allclose(steps[1][0][0], [[c, c], [1 - c, 1 - c]], rtol=1e-6)
    np.testing.assert_allclose(v[0, :, 0], [4 * c * c / (1 + 4 * c * c), 0], rtol=1e-6)


def test_couplings_sum_to_one_and_know_no_order_and_no_batch_mates(rng):
    u_hat, outputs, inputs = 2 * rng.standard_normal((2, 4, 6, 5)), [2, 0, 3, 1], [5, 2, 0, 3, 1, 4]
    v, (_, steps, *_) = mc.routing_forward(u_hat, 3)
    for c, *_ in steps[1:]:
        np.testing.assert_allclose(c.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(mc.routing_forward(u_hat[:, outputs], 3)[0], v[:, outputs], rtol=1e-12)
    same, (_, permuted, *_) = mc.routing_forward(u_hat[:, :, inputs], 3)
    np.testing.assert_allclose(same, v, rtol=1e-12)
    np.testing.assert_allclose(permuted[-1][0], steps[-1][0][:, :, inputs], rtol=1e-12)
    for n in range(2):
        np.testing.assert_allclose(mc.routing_forward(u_hat[n:n + 1], 3)[0][0], v[n], rtol=1e-12)


# -------------------------------------------------------------- losses

@pytest.mark.parametrize("lengths, present, loss", [
    ([[0] * 10], [3, 5], 1.62), ([[0.9, 0.9] + [0.1] * 8], [0, 1], 0), ([[1, 1] + [0] * 8], [0, 1], 0),
    ([[0.5, 0.7] + [0] * 8], [0, 1], 0.16 + 0.04), ([[0.9, 0.9, 0.6] + [0] * 7], [0, 1], 0.5 * 0.25),
    ([[1] * 10], [8, 9], 8 * 0.5 * 0.81)])
def test_margin_loss_by_hand(lengths, present, loss):
    T = mc.k_hot(np.array([present]), float, 10)
    assert T.sum() == 2 and T[0, present].all()
    assert mc.margin_loss(np.array(lengths, float), T)[0] == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("scores, loss", [
    ([[0.0] * 10], 10 * np.log(2)), ([[np.log(3)] * 2 + [0.0] * 8], 2 * np.log(4 / 3) + 8 * np.log(2)),
    ([[-np.log(3)] * 2 + [np.log(9)] + [-1e4] * 7], 2 * np.log(4) + np.log(10))])
def test_sigmoid_cross_entropy_by_hand(scores, loss):
    """0 and 1 are present. p = 3/4 for a score of log 3, 1/4 for -log 3, 9/10 for log 9; a score of -1e4 for an absent
    digit costs nothing. Mean over the batch, sum over the classes"""
    for n in (1, 2):
        present = mc.k_hot(np.array([[0, 1]] * n), float, 10)
        with np.errstate(over="raise", invalid="raise"):
            assert mc.sigmoid_cross_entropy(np.array(scores * n), present)[0] == pytest.approx(loss, rel=1e-9)


# -------------------------------------------------------------- the networks

@pytest.mark.parametrize("name, n_iters", [("paper", 1), *((name, 3) for name in NETWORKS)])
def test_every_network_against_a_literal_one(digits, name, n_iters, rng):
    """In training, and in evaluation, where a normalization has running statistics"""
    config = NETWORKS[name]
    config = dataclasses.replace(config, routing_iters=n_iters) if config.model == "capsnet" else config
    params, batch = float64(config), batch_of(digits, config, 3)
    state = {key: rng.uniform(0.5, 2, a.shape) for key, a in mc.initial_state(config)["running"].items()}
    for statistics, running in ((None, state), ({}, None)):
        out, _ = mc.forward(params | state, batch["images"], config, batch["labels"], statistics=statistics)
        expected = network_reference(params, batch["images"], batch["labels"], config, running)
        for key, value in expected.items():
            np.testing.assert_allclose(out[key], value, rtol=1e-8, atol=1e-11, err_msg=key)
            assert np.ptp(value) > 1e-6
    terms, _, found = mc.loss_and_grads(params, batch, config)
    assert terms == pytest.approx(terms_reference(expected, batch, config), rel=1e-8) and found.keys() == state.keys()


def test_training_masks_by_the_labels_and_inference_by_the_two_longest(digits):
    params, pairs = float64(TINY), next(mc.stream_pairs(digits, "val", 20, TINY, mc.EVALUATION, 0))
    labels, images = pairs["labels"], pairs["composites"] / 255
    assert np.array_equal(mc.forward(params, images, TINY, labels)[0]["digits"], labels)
    out, _ = mc.forward(params, images, TINY)
    assert np.array_equal(out["digits"], np.argsort(-out["scores"], 1)[:, :2])
    with mc.worker_threads(TINY) as workers:
        for decode, wanted in (("labels", labels), ("predicted", out["digits"])):
            assert np.array_equal(mc.forward_shards(params, pairs, TINY, workers, decode)["digits"], wanted)


def test_the_two_largest_are_found_by_scores_where_sigmoids_are_all_one():
    """The largest first; ties go to the smaller digit"""
    scores = np.array([[0.1, 0.9, 0.3, 0.8], [0.5, 0.2, 0.5, 0.5], [0, 0, 0, 0]])
    np.testing.assert_array_equal(mc.top_two(scores), [[1, 3], [0, 2], [0, 1]])
    logits = np.array([[18, 25, 22, -9, -9, -9, -9, -9, -9, -9]], np.float32)
    assert (mc.class_activations({"scores": logits}, CNN)[0, :3] == 1).all() and mc.top_two(logits).tolist() == [[1, 2]]
    assert mc.class_activations({"scores": scores}, TINY) is scores
    third = np.log([[1.0, 3.0]])                                        # the logits of 1/2 and of 3/4
    for model in mc.CNNS:
        found = mc.class_activations({"scores": third}, dataclasses.replace(CNN, model=model))
        np.testing.assert_allclose(found, [[0.5, 0.75]])
    assert mc.exact_match(np.array([[1, 2], [2, 1], [1, 3]]), np.array([[1, 2]] * 3)).tolist() == [True, True, False]


@pytest.mark.parametrize("n_classes", [2, 26, 62])
def test_a_cnn_of_other_data_has_the_size_of_their_capsule_network(n_classes):
    """whose matrices are as many as the classes"""
    def shapes_of(model):
        shapes = mc.param_shapes(mc.Config(model=model, n_classes=n_classes))
        return {name: shape for name, shape in shapes.items() if not name.startswith("dec")}
    budget = sum(map(math.prod, shapes_of("capsnet").values()))
    shapes = shapes_of("cnn")
    assert shapes["fc2_w"][1] == n_classes
    one_unit = shapes["fc1_w"][0] + 1 + n_classes
    assert budget - one_unit < sum(map(math.prod, shapes.values())) <= budget


@pytest.mark.parametrize("preset, n", [("deep", 1304800), ("residual", 3059072), ("classic", 2030224),
                                       ("paper", 11361808), ("half-digit", 1879008)])
def test_parameter_counts(preset, n):
    """Those of the documents. A CNN is within a hidden unit of the capsule network without its decoder, not larger"""
    def size_of(but="-", **given):
        shapes = mc.param_shapes(mc.Config(preset=preset, **given))
        return sum(math.prod(shape) for name, shape in shapes.items() if not name.startswith(but)), shapes
    budget, _ = size_of("dec")
    assert size_of()[0] == n == sum(p.size for p in mc.init_params(mc.Config(preset=preset)).values())
    if preset in mc.TWO_CONVOLUTIONS:                                   # of capsule networks alone
        return
    head = "gap" if preset == "residual" else "dense"                                   # 87 units fit on all positions
    size, shapes = size_of("dec", model="cnn-vectors", cnn_head=head)
    assert shapes["fc2_w"] == (160, 10) and 0.9 * budget * (preset == "deep") < size <= budget
    for head, channels in (("dense", 16), *(("gap", channels) for channels in range(2, 40))):
        size, shapes = size_of(model="cnn", cnn_head=head, conv1_channels=channels)
        assert budget - (shapes["fc1_w"][0] + 1 + 10) < size <= budget
    for given in {"model": "cnn", "conv1_channels": 2000}, {"model": "cnn-vectors", "preset": "residual"}:
        with pytest.raises(mc.InputError, match="--conv1-channels"):
            mc.param_shapes(mc.Config(**{"preset": preset} | given))


# -------------------------------------------------------------- evaluation

@pytest.mark.parametrize("chunks", [[slice(0, 3)], [slice(0, 2), slice(2, 3)]], ids=["whole", "in parts"])
def test_evaluate_against_brute_force(digits, monkeypatch, chunks):
    """Three pairs: both digits predicted (in the other order), one, none."""
    pairs = next(mc.stream_pairs(digits, "val", 3, TINY, mc.EVALUATION, 0))
    pairs["labels"] = np.array([[1, 2], [3, 4], [5, 6]])
    lengths = np.full((3, 10), 0.2, np.float32)
    lengths[0, [2, 1]] = 0.9, 0.6
    lengths[1, [3, 9]] = 0.5, 0.7
    lengths[2, [0, 7]] = 0.8, 0.8
    out = {"scores": lengths, "recon": np.random.default_rng(0).random((3, 2, 36, 36), np.float32)}

    def metrics(out, config):
        parts = [[{name: a[rows] for name, a in arrays.items()} for rows in chunks] for arrays in (pairs, out)]
        monkeypatch.setattr(mc, "forward_shards", lambda *_: parts[1].pop(0))
        return mc.evaluate({}, parts[0], config, None)
    test, target = metrics(out, TINY), pairs["sources"] / 255
    confusion = np.diag([0, 1, 1, 1, 0, 0, 0, 0, 0, 0.])                # found: 1, 2 and 3; 4 was taken for 9
    confusion[4, 9], confusion[5:7, [0, 7]] = 1, 0.5                    # 5 and 6 for 0 and 7
    assert test.pop("confusion") == confusion.tolist()
    margin = (0.09 + 8 * 0.005 + 0.16 + 0.49 + 7 * 0.005 + 0.5 * 0.36 + 2 * 0.49 + 6 * 0.005 + 2 * 0.5 * 0.49) / 3
    squares = np.square(out["recon"] - target).sum() / 3
    assert test.pop("correct").tolist() == [True, False, False] and type(test["hits"]) is int
    accuracy = {"n": 3, "hits": 1, "exact_match": 1 / 3, "at_least_one": 2 / 3,
                "baseline_recon_mse": np.square(target - np.mean(target, (0, 1))).mean()}
    assert test == pytest.approx(accuracy | {"margin": margin, "recon": squares, "loss": margin + 0.0005 * squares,
                                             "recon_mse": np.square(out["recon"] - target).mean()}, rel=1e-5)
    test = metrics({"scores": np.log(lengths / (1 - lengths))}, CNN)
    entropy = -np.log(np.where(mc.k_hot(pairs["labels"], bool, 10), lengths, 1 - lengths)).sum() / 3
    assert test.pop("correct").tolist() == [True, False, False] and test.pop("confusion") == confusion.tolist()
    assert test == pytest.approx(accuracy | {"cross_entropy": entropy, "loss": entropy}, rel=1e-5)


def test_results_name_the_metrics_of_the_test_by_hand():
    """The reconstruction's error per pixel, not its sum"""
    test = {"n": 8, "hits": 2, "exact_match": 0.25, "at_least_one": 0.5, "recon": 26.0, "recon_mse": 0.01,
            "baseline_recon_mse": 0.06, "correct": np.arange(8) < 2, "confusion": [[2.0]]}
    assert mc.test_metrics(test) == {
        "test_exact_match": 0.25, "test_hits": 2, "test_at_least_one": 0.5, "test_recon_mse": 0.01,
        "baseline_recon_mse": 0.06, "confusion": [[2.0]], "hit_bits": {"test": "wA=="}}


def test_results_say_which_pairs_were_correct():
    """Eight to a byte, the first in its highest bit"""
    correct = np.array([True, False, False, True, True, True, True, True, False, True])
    test = {"n": 10, "hits": 7, "exact_match": 0.7, "at_least_one": 1.0, "baseline_recon_mse": 0.1, "correct": correct,
            "confusion": [[1.0]]}
    state = {"params": {"a_w": np.zeros(5)}, "step": 8,
             "history": {"source": "synthetic", "epochs": [{"epoch": 1, "seconds": 2.0}] * 2}}
    found = mc.result_of(TINY, state, {"source": "synthetic"}, test)
    assert found["hit_bits"] == {"test": "n0A="} and (found["n_params"], found["test_hits"]) == (5, 7)
    assert found["test_recon_mse"] is None and found["ms_per_step"] == 500
