"""The networks beside the paper's: the deep front end, biases on the digit capsules, and the CNN that is the control."""
import dataclasses

import multimnist_capsnet as mc
import numpy as np
import pytest
from conftest import TINY, assert_same
from gradcheck import RELU, check_coordinates, check_directions, check_loss, check_op
from test_meaning import conv_reference, routing_reference, squash_reference

DEEP = dataclasses.replace(TINY, front_end="deep", recon_weight=0.01)
BIASED = dataclasses.replace(TINY, digit_bias=True, recon_weight=0.01)
CNN = mc.Config(seed=1, n_epochs=2, n_train=80, n_val=16, n_test=16, batch_size=40, digits="synthetic", threads=1, quiet=True,
                model="cnn", cnn_channels=3, cnn_hidden=6)
DROPPED = dataclasses.replace(CNN, dropout=0.4)
NETWORKS = {"deep": DEEP, "biased": BIASED, "cnn": CNN, "cnn with dropout": DROPPED}


def params64(config, seed=3):
    """The initial weights in float64, with biases off zero"""
    rng = np.random.default_rng(seed)
    return {name: p.astype(np.float64) + (0.1 * rng.standard_normal(p.shape) if name.endswith("_b") else 0)
            for name, p in mc.init_params(config).items()}


def batch_of(digits, config, n=2):
    pairs = next(mc.epoch_pairs(digits, 0, config))
    return mc.to_batch(pairs, slice(0, n), np.float64)


# ---------------------------------------------------------------- gradients

@pytest.mark.parametrize("shape", [(2, 4, 6, 3), (1, 5, 5, 2), (2, 3, 4, 1)])
def test_pool_gradient(shape):
    check_op(mc.pool_forward, mc.pool_backward, np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape) / 10.0)


def test_a_windows_gradient_goes_to_one_entry_only_also_where_all_are_equal():
    _, cache = mc.pool_forward(np.ones((1, 4, 4, 1)))
    dx = mc.pool_backward(np.array([[[[1.0], [2]], [[3], [4]]]]), cache)[0, :, :, 0]
    np.testing.assert_array_equal(dx, [[1, 0, 2, 0], [0] * 4, [3, 0, 4, 0], [0] * 4])


def test_sigmoid_cross_entropy_gradient():
    check_loss(mc.sigmoid_cross_entropy, 3 * np.random.default_rng(0).standard_normal((2, 4)), np.array([[1.0, 0, 1, 0], [0, 1, 0, 1]]))


@pytest.mark.parametrize("name, grad, n_iters", [("deep", "full", 3), ("deep", "detached", 2), ("biased", "full", 3), ("biased", "full", 1),
                                                 ("biased", "detached", 2), ("cnn", "full", 3), ("cnn with dropout", "full", 3)])
def test_gradient_of_the_whole_network(digits, name, grad, n_iters, monkeypatch):
    config = dataclasses.replace(NETWORKS[name], routing_grad=grad, routing_iters=n_iters)
    params, batch = params64(config, seed=4), batch_of(digits, config)
    if "W" in params:
        params["W"] *= 10                                                      # so that the decoder hears of it
    terms, grads = mc.loss_and_grads(params, batch, config)
    if grad == "detached":
        c = mc.forward(params, batch["composites"], config)[0]["c"][-1]
        monkeypatch.setattr(mc, "routing_forward", lambda u_hat, n_iters, empty=np.empty, bias=None: (
            mc.squash_forward(np.einsum("nji,nijd->njd", c, u_hat) + (0 if bias is None else bias))[0], (u_hat, [], empty)))

    def loss(p):
        out, _ = mc.forward(p, batch["composites"], config, batch["labels"], keep=batch.get("keep"))
        if config.model == "cnn":
            return mc.sigmoid_cross_entropy(out["scores"], mc.k_hot(batch["labels"], np.float64))[0]
        margin, _ = mc.margin_loss(out["lengths"], mc.k_hot(batch["labels"], np.float64))
        return margin + config.recon_weight * mc.reconstruction_loss(out["recon"], batch["sources"])[0]

    assert loss(params) == pytest.approx(terms["loss"], rel=1e-12)
    assert all(g.shape == params[key].shape and g.any() for key, g in grads.items())
    check_directions(loss, params, grads, n=2)
    check_coordinates(loss, params, grads, n=2)


@pytest.mark.parametrize("name", NETWORKS)
def test_results_do_not_depend_on_the_buffers(digits, name):
    config, arena = NETWORKS[name], mc.Arena()
    params, pairs = params64(config), next(mc.epoch_pairs(digits, 0, config))
    for rows in (slice(0, 4), slice(4, 7), slice(0, 4)):
        batch = mc.to_batch(pairs, rows, np.float64)
        pure = mc.loss_and_grads(params, batch, config)
        for empty in (lambda shape, dtype: np.full(shape, np.nan, dtype), arena.rewind()):
            terms, grads = mc.loss_and_grads(params, batch, config, empty)
            assert terms == pure[0]
            assert_same(grads, pure[1])


@pytest.mark.parametrize("name", NETWORKS)
def test_everything_stays_float32(digits, name):
    config = NETWORKS[name]
    params, pairs = mc.init_params(config), next(mc.epoch_pairs(digits, 0, config))
    _, grads = mc.loss_and_grads(params, mc.to_batch(pairs, slice(0, 3)), config)
    assert {a.dtype for a in (*params.values(), *grads.values())} == {np.dtype(np.float32)}


# ---------------------------------------------------------------- meaning

def test_pool_by_hand():
    x = np.arange(2 * 3 * 5, dtype=float).reshape(1, 3, 5, 2)
    y, cache = mc.pool_forward(x)
    np.testing.assert_array_equal(y[0], [[[12, 13], [16, 17]]])                # the third row and the fifth column are left out
    dx = mc.pool_backward(np.array([[[[1.0, 2], [3, 4]]]]), cache)
    assert dx.sum() == 10 and dx[0, 1, 1].tolist() == [1, 2] and dx[0, 1, 3].tolist() == [3, 4]


@pytest.mark.parametrize("scores, present, loss", [
    ([[0.0] * 10], [0, 1], 10 * np.log(2)), ([[np.log(3)] * 2 + [0.0] * 8], [0, 1], 2 * np.log(4 / 3) + 8 * np.log(2)),
    ([[-np.log(3)] * 2 + [np.log(9)] + [-1e4] * 7], [0, 1], 2 * np.log(4) + np.log(10))])
def test_sigmoid_cross_entropy_by_hand(scores, present, loss):
    """p = 3/4 for a score of log 3, 1/4 for -log 3, 9/10 for log 9; a score of -1e4 for a digit that is not there costs nothing"""
    with np.errstate(over="raise", invalid="raise"):
        assert mc.sigmoid_cross_entropy(np.array(scores), mc.k_hot(np.array([present]), float))[0] == pytest.approx(loss, rel=1e-9)
    two = mc.sigmoid_cross_entropy(np.array(scores * 2), mc.k_hot(np.array([present] * 2), float))[0]
    assert two == pytest.approx(loss, rel=1e-9)                                # mean over the batch, sum over the answers


def convs_reference(p, image, strides, pooled):
    """First convolution, ReLU, ... pixel by pixel. image (36, 36) -> (1, side, side, C)"""
    x = image[None, :, :, None]
    for k, stride in enumerate(strides, 1):
        w = p[f"conv{k}_w"]
        x = conv_reference(x, w[0].transpose(1, 0, 2)[:, :, None] if k == 1 else w, p[f"conv{k}_b"], stride)
        if k in pooled:
            side = x.shape[1] // 2
            x = np.array([[[x[0, 2 * i:2 * i + 2, 2 * j:2 * j + 2].max((0, 1)) for j in range(side)] for i in range(side)]])
        x = np.maximum(x, 0)
    return x


def test_the_deep_network_against_a_literal_one(digits, monkeypatch):
    monkeypatch.setattr(mc, "SQUASH_EPS", 0.0)
    params, batch = params64(DEEP), batch_of(digits, DEEP)
    out, _ = mc.forward(params, batch["composites"], DEEP, batch["labels"])
    for n in range(2):
        h = convs_reference(params, batch["composites"][n], [1] * 5, (2, 4))
        s = (h @ params["primary_w"][0, 0] + params["primary_b"]).reshape(-1, DEEP.primary_dim)
        u = np.array([squash_reference(x) for x in s])
        u_hat = np.einsum("ie,iejd->ijd", u, params["W"])
        v, _ = routing_reference(u_hat, DEEP.routing_iters)
        np.testing.assert_allclose(out["u"][n], u, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(out["v"][n], v, rtol=1e-9, atol=1e-12)


def test_the_cnn_against_a_literal_one(digits):
    params, batch = params64(CNN), batch_of(digits, CNN)
    out, _ = mc.forward(params, batch["composites"], CNN)
    for n in range(2):
        x = convs_reference(params, batch["composites"][n], [1] * 5, (2, 4)).ravel()
        hidden = np.maximum(x @ params["fc1_w"] + params["fc1_b"], 0)
        scores = hidden @ params["fc2_w"] + params["fc2_b"]
        np.testing.assert_allclose(out["hidden"][n], hidden, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(out["scores"][n], scores, rtol=1e-9)
        np.testing.assert_allclose(out["lengths"][n], 1 / (1 + np.exp(-scores)), rtol=1e-9)
        assert set(out["digits"][n]) == set(np.argsort(scores)[-2:])


@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_a_bias_is_added_before_every_squash(n_iters, monkeypatch):
    """Procedure 1 with a bias is Procedure 1 with one more input, whose coupling is held at 1 and whose votes are the bias"""
    monkeypatch.setattr(mc, "SQUASH_EPS", 0.0)
    rng = np.random.default_rng(0)
    u_hat, bias, b, I = rng.standard_normal((6, 4, 5)), rng.standard_normal((4, 5)), np.zeros((6, 4)), 6
    for _ in range(n_iters):
        c = np.exp(b) / np.exp(b).sum(1, keepdims=True)
        v = np.array([squash_reference(sum(c[i, j] * u_hat[i, j] for i in range(I)) + bias[j]) for j in range(4)])
        b = b + np.array([[u_hat[i, j] @ v[j] for j in range(4)] for i in range(I)])
    np.testing.assert_allclose(mc.routing_forward(u_hat[None], n_iters, bias=bias)[0][0], v, rtol=1e-9)


def test_digit_biases_start_at_a_tenth_and_change_nothing_else():
    plain, biased = mc.init_params(TINY), mc.init_params(BIASED)
    assert biased.pop("digit_b").tolist() == np.full((10, 5), 0.1, np.float32).tolist()
    assert_same(plain, biased)


def test_sides_and_sizes_of_the_networks():
    """Outputs of the convolutions, by hand: (side - kernel) // stride + 1, halved where maxima are taken"""
    assert mc.conv_layers(mc.Config())[1:] == (10, 64)                         # 36 -> 28 -> 10
    layers, *out = mc.conv_layers(mc.Config(preset="deep"))                    # 36 -> 34 -> 32 -> 16 -> 14 -> 12 -> 6 -> 4 -> 4
    assert [name for name, *_ in layers] == ["conv1", "conv2", "conv3", "conv4", "conv5", "primary"] and out == [4, 128]
    layers, *out = mc.conv_layers(mc.Config(model="cnn"))
    assert [name for name, *_ in layers] == ["conv1", "conv2", "conv3", "conv4", "conv5"] and out == [4, 128]


@pytest.mark.parametrize("preset", mc.PRESETS)
@pytest.mark.parametrize("channels", [8, 32])
def test_the_cnn_is_as_large_as_the_capsule_network_without_decoder_and_no_larger(preset, channels):
    config = mc.Config(preset=preset, model="cnn", cnn_channels=channels)
    caps = sum(p.size for name, p in mc.init_params(mc.Config(preset=preset)).items() if not name.startswith("dec"))
    shapes = mc.param_shapes(config)
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    a_unit_more = shapes["fc1_w"][0] + 1 + 10
    assert caps - a_unit_more < size <= caps


# ---------------------------------------------------------------- training

@pytest.mark.parametrize("name", NETWORKS)
def test_same_bits_for_any_threads_and_after_resuming(digits, tmp_path, name):
    config, path = NETWORKS[name], str(tmp_path / "run.npz")
    params, history = mc.train(config, digits=digits)
    again, _ = mc.train(dataclasses.replace(config, threads=2), digits=digits)
    assert_same(params, again)

    def power_cut(step, *_):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mc.train(dataclasses.replace(config, checkpoint=path), power_cut, 1, digits)
    resumed, later = mc.train(dataclasses.replace(config, checkpoint=path, resume=True), digits=digits)
    assert_same(params, resumed)
    assert [epoch["train_loss"] for epoch in later["epochs"]] == [epoch["train_loss"] for epoch in history["epochs"]]


@pytest.mark.parametrize("changes", [dict(front_end="deep"), dict(digit_bias=True), dict(warmup=3)], ids=str)
def test_capsule_settings_have_an_effect(digits, changes):
    a, b = (mc.train(dataclasses.replace(TINY, n_epochs=1, **c), digits=digits)[0] for c in ({}, changes))
    assert a["dec3_b"].tolist() != b["dec3_b"].tolist()


@pytest.mark.parametrize("changes", [dict(dropout=0.3), dict(cnn_channels=2), dict(cnn_hidden=7), dict(lr=1e-3)], ids=str)
def test_cnn_settings_have_an_effect(digits, changes):
    a, b = (mc.train(dataclasses.replace(CNN, n_epochs=1, **c), digits=digits)[0] for c in ({}, changes))
    assert a["fc2_b"].tolist() != b["fc2_b"].tolist()


def test_warmup_raises_the_learning_rate_step_by_step(digits, monkeypatch):
    rates, good = [], mc.adam_step

    def spy(params, grads, m, v, step, lr, runner):
        rates.append(lr)
        good(params, grads, m, v, step, lr, runner)
    monkeypatch.setattr(mc, "adam_step", spy)
    mc.train(dataclasses.replace(TINY, warmup=3, lr=1e-3, lr_schedule="constant"), digits=digits)
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])


def test_dropout_drops_its_share_keeps_the_mean_and_is_drawn_anew_in_every_epoch(digits):
    config = dataclasses.replace(DROPPED, n_train=2000, cnn_hidden=20)
    first, second = (next(mc.epoch_pairs(digits, epoch, config))["keep"] for epoch in (0, 1))
    assert first.shape == (2000, 20) and first.dtype == np.float32
    assert set(np.unique(first)) == {0, np.float32(1 / 0.6)}
    assert (first == 0).mean() == pytest.approx(0.4, abs=0.01) and first.mean() == pytest.approx(1, abs=0.02)
    assert not np.array_equal(first, second)
    pooled = dataclasses.replace(config, fixed_pool=True)
    a, b = (next(mc.epoch_pairs(digits, epoch, pooled)) for epoch in (0, 1))
    assert np.array_equal(a["labels"], b["labels"]) and not np.array_equal(a["keep"], b["keep"])


def test_dropout_changes_no_pair_and_evaluation_drops_nothing(digits):
    plain, dropped = (next(mc.epoch_pairs(digits, 0, config)) for config in (CNN, DROPPED))
    assert_same(plain, {name: a for name, a in dropped.items() if name != "keep"})
    params, val = mc.init_params(CNN), mc.draw_pairs(digits, "val", 16, CNN, "evaluation", 0)
    with mc.Runner(1) as runner:
        assert mc.evaluate(params, val, CNN, runner) == mc.evaluate(params, val, DROPPED, runner)


def test_a_dropped_unit_is_silent_and_gets_no_gradient(digits):
    params, batch = params64(CNN), batch_of(digits, CNN)
    keep = np.ones((2, 6))
    keep[:, 2] = 0
    out, cache = mc.forward(params, batch["composites"], CNN, keep=keep)
    silent = params | {"fc2_w": np.where(np.arange(6)[:, None] == 2, 0, params["fc2_w"])}
    np.testing.assert_allclose(out["scores"], mc.forward(silent, batch["composites"], CNN)[0]["scores"], rtol=1e-12)
    grads = mc.backward(np.ones((2, 10)), None, cache, CNN)
    assert not grads["fc1_w"][:, 2].any() and not grads["fc2_w"][2].any()


def test_the_cnn_overfits_8_examples(digits):
    config = dataclasses.replace(CNN, n_epochs=120, n_train=8, batch_size=8, n_val=1, fixed_pool=True, lr=1e-2, cnn_channels=4, cnn_hidden=32)
    _, history = mc.train(config, digits=digits)
    first, last = history["epochs"][0], history["epochs"][-1]
    assert last["train_set_accuracy"] == 1 and last["train_cross_entropy"] < 0.05 * first["train_cross_entropy"]
    assert last["train_loss"] == last["train_cross_entropy"] and "train_recon" not in last and "val_recon_mse" not in last


@pytest.mark.parametrize("model, field", [
    *(("cnn", name) for name in ("routing_iters", "routing_grad", "digit_bias", "recon_weight", "decoder_hidden1")),
    *(("caps", name) for name in ("cnn_channels", "cnn_hidden", "dropout"))])
def test_settings_that_mean_nothing_to_the_model_are_refused(model, field):
    value = {"routing_grad": "detached", "digit_bias": True, "recon_weight": 0.5, "dropout": 0.5}.get(field, 7)
    with pytest.raises(mc.InputError, match=f"--{field.replace('_', '-')}.*means nothing to --model {model}"):
        mc.check_config(mc.Config(model=model, **{field: value}))


def test_a_cnn_without_room_for_hidden_units_is_refused():
    with pytest.raises(mc.InputError, match="--cnn-channels 64: leave room for 0 hidden units only.*--cnn-hidden"):
        mc.check_config(mc.Config(model="cnn", preset="deep", cnn_channels=64))
    mc.check_config(mc.Config(model="cnn", cnn_channels=64, cnn_hidden=100))
    with pytest.raises(mc.InputError, match="--primary-types: sets how large the CNN may be, and --cnn-hidden does"):
        mc.check_config(mc.Config(model="cnn", primary_types=3, cnn_hidden=100))


def test_the_cnn_answers_by_its_scores_where_sigmoids_are_all_one():
    scores = np.array([[25, 18, 22, -9, -9, -9, -9, -9, -9, -9]], np.float32)
    out = {"scores": scores, "lengths": mc.sigmoid_forward(scores)[0]}
    assert mc.answers(out).tolist() == [[0, 2]] and mc.answers({"lengths": scores}).tolist() == [[0, 2]]


def test_a_checkpoint_from_before_a_setting_existed_can_be_gone_on_from(digits, tmp_path):
    path = str(tmp_path / "run.npz")
    params, _ = mc.train(dataclasses.replace(TINY, checkpoint=path), digits=digits)
    *state, meta = mc.load_checkpoint(path)
    del meta["config"]["warmup"], meta["config"]["model"]
    mc.check_same_run(TINY, "synthetic", meta, path)
