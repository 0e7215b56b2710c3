"""What gradient checks cannot see: the formulas themselves, against hand-computed numbers and slow literal references."""
import dataclasses
from types import SimpleNamespace

import multimnist_capsnet as mc
import numpy as np
import pytest
from conftest import TINY

# ---------------------------------------------------------------- slow literal references

def conv_reference(x, w, b, stride):
    """Valid convolution, pixel by pixel: y[oy, ox] = b + sum of patch * w"""
    (N, H, W, _), (Kh, Kw, _, F) = x.shape, w.shape
    y = np.zeros((N, (H - Kh) // stride + 1, (W - Kw) // stride + 1, F))
    for n, oy, ox, f in np.ndindex(y.shape):
        y[n, oy, ox, f] = b[f]
        for ky, kx in np.ndindex(Kh, Kw):
            y[n, oy, ox, f] += x[n, oy * stride + ky, ox * stride + kx] @ w[ky, kx, :, f]
    return y


def squash_reference(s):
    length = np.sqrt(sum(k * k for k in s))
    return length ** 2 / (1 + length ** 2) * s / length


def routing_reference(u_hat, n_iters):
    """Procedure 1 for one sample. u_hat (I, J, D) -> v (J, D), c (I, J)"""
    I, J, D = u_hat.shape
    b = np.zeros((I, J))
    for _ in range(n_iters):
        c, v = np.zeros((I, J)), np.zeros((J, D))
        for i in range(I):
            for j in range(J):
                c[i, j] = np.exp(b[i, j]) / sum(np.exp(b[i, k]) for k in range(J))
        for j in range(J):
            v[j] = squash_reference(sum(c[i, j] * u_hat[i, j] for i in range(I)))
        for i in range(I):
            for j in range(J):
                b[i, j] += u_hat[i, j] @ v[j]
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
    u_hat = np.array([[u[i] @ p["W"][i, :, j] for j in range(10)] for i in range(len(u))])
    v, _ = routing_reference(u_hat, config.routing_iters)
    images = []
    for digit in digits:
        x = np.concatenate([v[j] if j == digit else 0 * v[j] for j in range(10)])
        x = np.maximum(x @ p["dec1_w"] + p["dec1_b"], 0)
        x = np.maximum(x @ p["dec2_w"] + p["dec2_b"], 0)
        images.append((1 / (1 + np.exp(-(x @ p["dec3_w"] + p["dec3_b"])))).reshape(36, 36))
    return np.array([np.sqrt(k @ k) for k in v]), v, np.array(images)


# ---------------------------------------------------------------- primitives

@pytest.mark.parametrize("stride, shape, width", [(1, (2, 5, 6, 3), 2), (2, (2, 7, 6, 2), 3), (2, (1, 6, 7, 1), 3),
                                                  (3, (2, 8, 9, 2), 4)])
def test_im2col_holds_the_windows_it_says(rng, stride, shape, width):
    x = rng.standard_normal(shape)
    N, H, W, C = shape
    cols, seen = mc.im2col(x, width, stride), 0
    for y in range(H):
        for n in range(N):
            for ox in range((W - width) // stride + 1):
                window = x[n, y, stride * ox:stride * ox + width].reshape(-1)
                np.testing.assert_array_equal(cols[y % stride, y // stride, n, ox], window)
                seen += 1
    assert seen == N * H * cols.shape[3] and cols.shape == (stride, -(-H // stride), N, (W - width) // stride + 1, width * C)


@pytest.mark.parametrize("stride, shape, kernel", [(1, (2, 5, 6, 3), (3, 2)), (2, (2, 7, 6, 2), (3, 2)),
                                                   (2, (1, 6, 9, 1), (3, 4)), (1, (2, 4, 5, 1), (1, 3)),
                                                   (3, (1, 9, 8, 2), (2, 4))])
def test_conv2d_against_naive_loops(rng, stride, shape, kernel):
    x, w, b = rng.standard_normal(shape), rng.standard_normal((*kernel, shape[3], 4)), rng.standard_normal(4)
    expected = conv_reference(x, w, b, stride)
    for given in (x, np.ascontiguousarray(x.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3), np.asfortranarray(x)):
        np.testing.assert_allclose(mc.conv2d_forward(given, w, b, stride)[0], expected, rtol=1e-12, atol=1e-12)


def test_fold_rows_turns_a_one_channel_convolution_into_one_over_a_row_of_channels(rng):
    x, w = rng.standard_normal((2, 6, 7)), rng.standard_normal((3, 3, 1, 4))
    folded, _ = mc.conv2d_forward(mc.fold_rows(x, 3), w[:, :, 0].transpose(1, 0, 2)[None], np.zeros(4), 1)
    np.testing.assert_allclose(folded, conv_reference(x[..., None], w, np.zeros(4), 1), rtol=1e-12, atol=1e-12)


def test_sigmoid_neither_overflows_nor_drifts():
    with np.errstate(all="raise"):
        y, _ = mc.sigmoid_forward(np.array([-1e4, -np.log(3), 0, np.log(3), 1e4]))
    np.testing.assert_allclose(y, [0, 0.25, 0.5, 0.75, 1], atol=1e-15)


# ---------------------------------------------------------------- capsules

@pytest.mark.parametrize("s, v", [([3, 4], [15 / 26, 20 / 26]), ([0, 1], [0, 0.5]), ([0, -0.5], [0, -0.2]),
                                  ([0.1, 0], [0.1 / 10.1, 0]), ([0, 0], [0, 0]),
                                  ([30, -40], [0.6 * 2500 / 2501, -0.8 * 2500 / 2501])])
def test_squash_by_hand(s, v):
    np.testing.assert_allclose(mc.squash_forward(np.array([s], float))[0][0], v, rtol=1e-6)


def test_lengths_by_hand_and_below_one(rng):
    np.testing.assert_allclose(mc.lengths_forward(np.array([[[0.6, 0.8], [0.3, -0.4], [0, 0]]]))[0], [[1, 0.5, 0]], atol=1e-4)
    for scale in (1e-6, 1e-2, 1, 100):                         # at |s| = 4000 and more, float32 rounds the length to 1
        v, _ = mc.squash_forward((scale * rng.standard_normal((4, 10, 16))).astype(np.float32))
        lengths, _ = mc.lengths_forward(v)
        assert 0 <= lengths.min() and lengths.max() < 1


@pytest.mark.parametrize("n_iters", [1, 2, 3, 5])
def test_routing_is_procedure_1(rng, n_iters, monkeypatch):
    monkeypatch.setattr(mc, "SQUASH_EPS", 0.0)
    u_hat = 1.5 * rng.standard_normal((2, 3, 4, 5))
    v, cache = mc.routing_forward(u_hat, n_iters)
    assert len(cache[1]) == n_iters
    for n in range(2):
        expected, c = routing_reference(u_hat[n], n_iters)
        np.testing.assert_allclose(v[n], expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(np.broadcast_to(cache[1][-1][0], (2, 4, 3))[n], c.T, rtol=1e-9, atol=1e-12)


def test_routing_by_hand():
    """Two inputs, two outputs, 1-D: u_hat_.1 = (1, 1) agree, u_hat_.2 = (1, -1) do not. First v_1 = squash(1) = 1/2, v_2 = 0,
    so b_.1 = 1/2, b_.2 = 0, c_.1 = sigmoid(1/2), s_1 = 2 sigmoid(1/2), s_2 = 0."""
    v, cache = mc.routing_forward(np.array([[[[1.0], [1.0]], [[1.0], [-1.0]]]]), 2)
    c = 1 / (1 + np.exp(-0.5))
    np.testing.assert_allclose(cache[1][1][0][0], [[c, c], [1 - c, 1 - c]], rtol=1e-6)
    np.testing.assert_allclose(v[0, :, 0], [4 * c * c / (1 + 4 * c * c), 0], rtol=1e-6)


def test_couplings_of_each_input_sum_to_one_over_the_outputs(rng):
    _, cache = mc.routing_forward(3 * rng.standard_normal((2, 30, 4, 5)), 3)
    (first, *_), *later = cache[1]
    assert np.all(first == 0.25)
    for c, *_ in later:
        np.testing.assert_allclose(c.sum(1), 1, rtol=1e-12)
        assert np.abs(c.sum(2) - 1).max() > 0.1


def test_softmax_does_not_overflow():
    with np.errstate(over="raise", invalid="raise"):
        np.testing.assert_allclose(mc.softmax(np.array([[[1e4], [1e4], [-1e4]]]))[0, :, 0], [0.5, 0.5, 0])


def test_a_samples_routing_does_not_depend_on_its_batch_mates(rng):
    u_hat = 2 * rng.standard_normal((4, 6, 4, 5))
    together, _ = mc.routing_forward(u_hat, 3)
    for n in range(4):
        np.testing.assert_allclose(mc.routing_forward(u_hat[n:n + 1], 3)[0][0], together[n], rtol=1e-12)


def test_permuting_the_output_capsules_permutes_the_result(rng):
    u_hat, order = 2 * rng.standard_normal((2, 6, 4, 5)), [2, 0, 3, 1]
    v, permuted = mc.routing_forward(u_hat, 3)[0], mc.routing_forward(u_hat[:, :, order], 3)[0]
    np.testing.assert_allclose(permuted, v[:, order], rtol=1e-12)


def test_more_iterations_sharpen_agreement(rng):
    u_hat = 0.3 * rng.standard_normal((1, 50, 4, 5))
    u_hat[:, :, 2] += 0.3                                                                      # all inputs agree on output 2
    lengths = [mc.lengths_forward(mc.routing_forward(u_hat, n)[0])[0][0, 2] for n in (1, 2, 3)]
    assert lengths[0] < lengths[1] < lengths[2]


def test_votes_are_one_matrix_per_pair_of_capsules(rng):
    u, W = rng.standard_normal((2, 3, 6)), rng.standard_normal((3, 6, 4, 5))
    u_hat, _ = mc.votes_forward(u, W)
    for n, i, j in np.ndindex(2, 3, 4):
        np.testing.assert_allclose(u_hat[n, i, j], W[i, :, j].T @ u[n, i], rtol=1e-12)


def test_mask_zeroes_all_but_one_capsule(rng):
    v = rng.standard_normal((2, 4, 5))
    masked = mc.mask_forward(v, np.array([[3, 0], [1, 2]]))[0].reshape(2, 2, 4, 5)
    for n, r, j in ((0, 0, 3), (0, 1, 0), (1, 0, 1), (1, 1, 2)):
        np.testing.assert_array_equal(masked[n, r, j], v[n, j])
        assert not np.delete(masked[n, r], j, 0).any()


# ---------------------------------------------------------------- losses

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


# ---------------------------------------------------------------- the model

@pytest.mark.parametrize("n_iters, types", [(1, 1), (3, 1), (3, 2)])
def test_the_whole_network_against_a_literal_one(rng, digits, n_iters, types, monkeypatch):
    monkeypatch.setattr(mc, "SQUASH_EPS", 0.0)
    config = dataclasses.replace(TINY, routing_iters=n_iters, primary_types=types)
    params = {name: p + 0.1 * rng.standard_normal(p.shape) for name, p in mc.init_params(config).items()}
    pairs = mc.draw_pairs(digits, "train", 2, config, "data")
    batch = mc.to_batch(pairs, slice(None), np.float64)
    out, _ = mc.forward(params, batch["composites"], config, batch["labels"])
    margin = recon = hits = 0
    for n in range(2):
        labels = batch["labels"][n]
        lengths, v, images = network_reference(params, batch["composites"][n], labels, config)
        np.testing.assert_allclose(out["lengths"][n], lengths, rtol=1e-9)
        np.testing.assert_allclose(out["v"][n], v, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(out["recon"][n], images, rtol=1e-9)
        for k in range(10):
            margin += max(0, 0.9 - lengths[k]) ** 2 / 2 if k in labels else 0.5 * max(0, lengths[k] - 0.1) ** 2 / 2
        recon += sum((redrawn - drawn) ** 2 for redrawn, drawn in zip(images.ravel(), batch["sources"][n].ravel())) / 2
        hits += set(np.argsort(lengths)[-2:]) == set(labels)
    terms, _ = mc.loss_and_grads(params, batch, config)
    assert terms == pytest.approx({"loss": margin + 0.0005 * recon, "margin": margin, "recon": recon, "hits": hits}, rel=1e-9)


def test_training_masks_by_the_labels_and_inference_by_the_two_longest(params64, batch64):
    labels = np.array([[7, 2], [0, 9]])
    assert np.array_equal(mc.forward(params64, batch64["composites"], TINY, labels)[0]["digits"], labels)
    out, _ = mc.forward(params64, batch64["composites"], TINY)
    assert np.array_equal(out["digits"], np.argsort(-out["lengths"], 1)[:, :2])


def test_each_digit_is_compared_with_its_own_source(params64, batch64):
    swapped = batch64 | {name: batch64[name][:, ::-1] for name in ("sources", "labels")}
    as_is, both, one = (mc.loss_and_grads(params64, batch, TINY)[0]["recon"] for batch in
                        (batch64, swapped, {**swapped, "labels": batch64["labels"]}))
    assert both == pytest.approx(as_is, rel=1e-12) and abs(one - as_is) > 1e-6 * as_is


def test_top_two_puts_the_longest_first_and_ties_go_to_the_smaller_digit():
    lengths = np.array([[0.1, 0.9, 0.3, 0.8], [0.5, 0.2, 0.5, 0.5], [0, 0, 0, 0]])
    np.testing.assert_array_equal(mc.top_two(lengths), [[1, 3], [0, 2], [0, 1]])


@pytest.mark.parametrize("flags, n", [({}, 2030224), (mc.PRESETS["paper"], 11361808)], ids=["default", "paper"])
def test_parameter_counts(flags, n):
    assert mc.n_params(mc.init_params(mc.Config(**flags))) == n


def test_initial_weights_have_the_variance_their_fan_in_asks_for():
    params = mc.init_params(mc.Config())
    for name, std in (("conv1_w", (2 / 81) ** 0.5), ("primary_w", (1 / (81 * 32)) ** 0.5), ("W", (mc.W_GAIN / 8) ** 0.5),
                      ("dec2_w", (2 / 256) ** 0.5), ("dec3_w", (1 / 512) ** 0.5)):
        assert params[name].std() == pytest.approx(std, rel=0.05) and abs(params[name].mean()) < std / 20
    assert not any(p.any() for name, p in params.items() if name.endswith("_b"))


def test_loss_at_initialisation_is_that_of_short_capsules_and_gray_images(digits, capsys):
    config = mc.Config(n_val=32, threads=1)
    val, params = mc.draw_pairs(digits, "val", 32, config, "evaluation", 0), mc.init_params(config)
    with mc.Runner(1) as runner:
        actual = mc.evaluate(params, val, config, runner)
        mc.announce(config, digits, params, runner, val, 0, mc.Progress(quiet=False))
    gray = 0.0005 * np.square(val["sources"] / 255 - 0.5).sum() / 32
    assert 0.0005 * actual["recon"] == pytest.approx(gray, rel=0.02) and 1.3 < actual["margin"] < 1.62
    text = capsys.readouterr().out
    assert "2,030,224" in text and f"loss {actual['loss']:.3f};" in text and f"= {1.62 + gray:.3f} if all capsules had length 0" in text


# ---------------------------------------------------------------- Adam and its schedules

@pytest.mark.parametrize("threads, chunk", [(1, 7), (2, 7), (3, 1 << 15)])
def test_adam_is_the_textbooks(threads, chunk, monkeypatch):
    monkeypatch.setattr(mc, "ADAM_CHUNK", chunk)
    rng = np.random.default_rng(0)
    params, m, v = ({"a": rng.standard_normal((5, 6)), "b": rng.standard_normal(3)} for _ in range(3))
    m, v = ({name: 0 * p for name, p in params.items()} for _ in range(2))
    theta, m1, v1 = ({name: [0.0] * p.size if k else list(p.ravel()) for name, p in params.items()} for k in range(3))
    with mc.Runner(threads) as runner:
        for t in range(1, 6):
            shards = [{name: t * rng.standard_normal(p.shape) for name, p in params.items()} for _ in range(3)]
            lr = 0.1 / t
            mc.adam_step(params, shards, m, v, t, lr, runner)
            for name in params:
                for k in range(params[name].size):
                    g = sum(shard[name].ravel()[k] for shard in shards)
                    m1[name][k] = 0.9 * m1[name][k] + 0.1 * g
                    v1[name][k] = 0.999 * v1[name][k] + 0.001 * g * g
                    theta[name][k] -= lr * (m1[name][k] / (1 - 0.9 ** t)) / ((v1[name][k] / (1 - 0.999 ** t)) ** 0.5 + 1e-8)
                np.testing.assert_allclose(params[name].ravel(), theta[name], rtol=1e-11)
                np.testing.assert_allclose(0.1 * m[name].ravel(), m1[name], rtol=1e-11)                # kept without (1 - beta)
                np.testing.assert_allclose(0.001 * v[name].ravel(), v1[name], rtol=1e-11)


def test_adams_first_step_is_lr_times_the_sign():
    params, grads = {"a": np.zeros(3, np.float32)}, {"a": np.array([5, -0.01, 0], np.float32)}
    mc.adam_step(params, [grads], {"a": np.zeros(3, np.float32)}, {"a": np.zeros(3, np.float32)}, 1, 0.1, mc.Runner(1))
    np.testing.assert_allclose(params["a"], [-0.1, 0.1, 0], rtol=1e-4)


def test_learning_rate_schedules():
    def rate(schedule, step):
        return mc.learning_rate(mc.Config(lr=0.01, lr_schedule=schedule), step, 1000)
    assert [rate("cosine", step) for step in (0, 500, 1000)] == pytest.approx([0.01, 0.005, 0])
    assert [rate("exponential", step) for step in (0, 2000, 4000)] == pytest.approx([0.01, 0.0096, 0.009216])
    assert rate("exponential", 1000) == pytest.approx(0.01 * 0.96 ** 0.5)                      # no stairs
    assert [rate("constant", step) for step in (0, 999)] == [0.01, 0.01]


@pytest.mark.parametrize("schedule", ["cosine", "exponential", "constant"])
def test_learning_rate_is_a_python_float(schedule):
    """A NumPy scalar would lift Adam's float32 arithmetic to float64 under NumPy 2 only: slower, and other bits."""
    assert type(mc.learning_rate(mc.Config(lr_schedule=schedule), 7, 100)) is float


# ---------------------------------------------------------------- evaluation

@pytest.mark.parametrize("hits, n, interval", [(50, 100, (0.403832, 0.596168)), (0, 10, (0, 0.277533)), (10, 10, (0.722467, 1)),
                                               (8, 10, (0.490162, 0.943318)), (1, 1, (0.206543, 1))])
def test_wilson_interval(hits, n, interval):
    low, high = mc.wilson_interval(hits, n)
    assert (low, high) == pytest.approx(interval, abs=1e-5)


@pytest.mark.parametrize("chunk", [2, 2048])
def test_evaluate_against_brute_force(digits, chunk, monkeypatch):
    """Three pairs: both digits named (in the other order), one, none."""
    monkeypatch.setattr(mc, "CHUNK", chunk)
    pairs = mc.draw_pairs(digits, "val", 3, TINY, "evaluation", 0)
    pairs["labels"] = np.array([[1, 2], [3, 4], [5, 6]])
    lengths = np.full((3, 10), 0.2, np.float32)
    lengths[0, [2, 1]], lengths[1, [3, 9]], lengths[2, [0, 7]] = (0.9, 0.6), (0.5, 0.7), (0.8, 0.8)
    recon, done = np.random.default_rng(0).random((3, 2, 36, 36), np.float32), []

    def fake_forward(params, part, config):
        start = sum(done)
        done.append(len(part["labels"]))
        return {"lengths": lengths[start:start + done[-1]], "recon": recon[start:start + done[-1]]}

    test = mc.evaluate({}, pairs, TINY, SimpleNamespace(forward=fake_forward))
    target = pairs["sources"] / 255
    margin = (0.09 + 8 * 0.005 + 0.16 + 0.49 + 7 * 0.005 + 0.5 * 0.36 + 2 * 0.49 + 6 * 0.005 + 2 * 0.5 * 0.49) / 3
    squares = np.square(recon - target).sum() / 3
    constant = np.mean(target, (0, 1))
    assert test == pytest.approx({
        "n": 3, "hits": 1, "set_accuracy": 1 / 3, "any_accuracy": 2 / 3, "margin": margin, "recon": squares,
        "loss": margin + 0.0005 * squares, "recon_mse": np.square(recon - target).mean(),
        "baseline_recon_mse": np.square(target - constant).mean()}, rel=1e-5)
    assert type(test["hits"]) is int


def test_runner_forward_equals_one_big_batch(digits):
    params, pairs = mc.init_params(TINY), mc.draw_pairs(digits, "val", 70, TINY, "evaluation", 0)
    batch = mc.to_batch(pairs, slice(None))
    for decode, chosen in (("labels", batch["labels"]), ("top2", None)):
        whole, _ = mc.forward(params, batch["composites"], TINY, chosen)
        for threads in (1, 3):
            with mc.Runner(threads) as runner:
                out = runner.forward(params, pairs, TINY, decode=decode)
            for name in ("lengths", "v", "recon", "digits"):
                np.testing.assert_allclose(out[name], whole[name], rtol=2e-4, atol=1e-6)


def test_shards_mean_equals_the_batchs_mean(digits):
    """40 rows are shards of 16, 16 and 8: the last must weigh half as much."""
    params, pairs = mc.init_params(TINY), mc.draw_pairs(digits, "train", 60, TINY, "data")
    rows = np.arange(10, 50)
    whole, grads = mc.loss_and_grads(params, mc.to_batch(pairs, rows), TINY)
    with mc.Runner(2) as runner:
        terms, shard_grads = runner.loss_and_grads(params, pairs, rows, TINY)
    assert terms == pytest.approx(whole, rel=1e-5)
    for name in params:
        total = sum(g[name] for g in shard_grads)
        np.testing.assert_allclose(total, grads[name], rtol=1e-3, atol=1e-5 * np.abs(grads[name]).max())


def test_generators_are_the_children_that_seedsequence_spawns():
    children = np.random.SeedSequence(7).spawn(len(mc.PURPOSES))
    for purpose, child in zip(mc.PURPOSES, children):
        assert mc.rng_for(7, purpose).random() == np.random.default_rng(child).random()
    assert mc.rng_for(7, "batches", 3, 1).random() == np.random.default_rng(children[2].spawn(4)[3].spawn(2)[1]).random()
