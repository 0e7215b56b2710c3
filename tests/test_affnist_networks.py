"""The networks of the third experiment: every gradient against centered differences; what they compute, by hand."""
import dataclasses
import functools
import math

import affnist_capsnet as ac

import conftest
import numpy as np
import pytest
from gradcheck import check_coordinates, check_directions, check_op, check_step, normal

WIDTHS = {"cnn-gap": 5, "cnn-gmp": 5, "cnn-dense": 6, "cnn": 3}
FEW = {"conv3": 4, "conv4": 4, "conv5": 8}                                              # channels, see few_units


def tiny(model, **more):
    """A Config of few channels, but for those that the backbone has anyway"""
    few = dict(seed=1, n_epochs=2, n_train=80, n_val=16, n_test=16, batch_size=40, digits="synthetic", threads=1,
               quiet=True, conv1_channels=3, width=WIDTHS.get(model, 0), model=model)
    return ac.Config(**few | more)


NETWORKS = {
    **{model: tiny(model) for model in ac.CAPSULES + ac.CNNS}, "cnn": tiny("cnn", padding=4),
    "three iterations": tiny("capsnet-shared", routing_iters=3),
    "no squash": tiny("capsnet-shared", squash="none", routing_iters=2),
    "last squash": tiny("capsnet", squash="last"), "relu": tiny("capsnet-shared", squash="relu"),
    "plain vectors": tiny("vector-gap", squash="none", loss="cross-entropy", recon_weight=0.0),
    "cross-entropy": tiny("capsnet-shared", loss="cross-entropy"), "no decoder": tiny("capsnet", recon_weight=0.0),
    "with dropout": tiny("cnn-dense", preset="small"), "not normalized": tiny("capsnet-shared", norm="none"),
    "the paper's": tiny("capsnet", preset="small"), "not padded": tiny("capsnet-shared", padding=0),
    "padded by 3": tiny("cnn-gap", padding=3), "mnist": tiny("capsnet-shared", task="mnist")}
SIZES = {                          # of images other than digits, for each model: side, channels
    "capsnet-shared": (21, 3), "capsnet": (20, 2), "vector-gap": (23, 3), "vector-gmp": (22, 1), "cnn-gap": (25, 3),
    "cnn-gmp": (21, 2), "cnn-dense": (23, 1), "cnn": (21, 3)}
NETWORKS |= {f"{model}, images": tiny(model, task="images", side=side, channels=channels)
             for model, (side, channels) in SIZES.items()}
NETWORKS |= {"the paper's, images": tiny("capsnet", preset="small", task="images", side=21, channels=3),
             "not padded, images": tiny("capsnet-shared", padding=0, task="images", side=29, channels=2)}


@pytest.fixture(autouse=True)
def few_units():
    """Few types of capsules, few units of the decoder, few channels: as if there were no others. few_units.undo():
    all of them"""
    convolutions_of_width = ac.convolutions_of_width

    def few_channels(config, width):
        return tuple(conv._replace(F=conv.F if width and conv.name == "conv5" else FEW.get(conv.name, conv.F))
                     for conv in convolutions_of_width(config, width))
    ac.matched_width.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ac, "TYPES", {"deep": 2, "small": 1, "paper": 1})
        patch.setattr(ac, "DECODER", dict.fromkeys(ac.DECODER, (6, 7)))
        patch.setattr(ac, "convolutions_of_width", few_channels)
        yield patch
    ac.matched_width.cache_clear()


float64 = functools.partial(conftest.float64, module=ac, shifted=("_b", "_beta"))


def batch_of(digits, config):
    """The first training samples of a run, of digits or, with task images, of images of the Config's size"""
    data = digits if config.task != "images" else conftest.toy_images(config.side, config.channels)
    return conftest.batch_of(data, config, n=3, module=ac)


def loss_of(params, batch, config, statistics=()):
    """The loss anew, from forward and the loss functions; statistics: of the batch, or, None, the running ones"""
    out, _ = ac.forward(params, batch["images"], config, batch["labels"], None if statistics is None else {},
                        batch.get("dropout_mask"))
    labels, scores = batch["labels"], out["scores"]
    if config.loss == "margin":
        loss = ac.margin_loss(scores, np.eye(10)[labels])[0]
    else:
        parts = scores if config.model in ac.CAPSULES else np.exp(scores)
        loss = -np.log(parts[np.arange(len(labels)), labels] / parts.sum(1)).mean()
    if "recon" not in out:
        return loss
    return loss + config.recon_weight * np.square(out["recon"] - batch["images"][:, None]).sum() / len(labels)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradient_of_the_whole_network(digits, name):
    config = NETWORKS[name]
    config = dataclasses.replace(config, recon_weight=0.01) if config.recon_weight else config
    params, batch = float64(config, seed=4), batch_of(digits, config)

    def loss(p):
        return loss_of(p, batch, config)
    terms, grads = check_step(ac, params, batch, config, loss)
    out, _ = ac.forward(params, batch["images"], config, None, {}, batch.get("dropout_mask"))
    assert terms["accuracy"] == (out["scores"].argmax(1) == batch["labels"]).mean()
    check_directions(loss, params, grads, n=1)
    check_coordinates(loss, params, grads, n=1)


@pytest.mark.parametrize("model", [*ac.VECTORS, *ac.CNNS])
def test_a_head_sees_the_positions_as_its_name_says(model):
    x, config = normal(2, 3, 4, 5), tiny(model)
    seen = x.mean((1, 2)) if "gap" in model else x.max((1, 2)) if "gmp" in model else x.reshape(2, -1)
    np.testing.assert_allclose(ac.features_forward(x, config)[0], seen, rtol=1e-12)
    check_op(lambda x: ac.features_forward(x, config), ac.features_backward, x)


@pytest.mark.parametrize("n_positions", [1, 3])
def test_one_iteration_without_votes_is_one_iteration_with_them(n_positions):
    """A matrix for every capsule, or for every type: the slow way through all votes is the oracle, there and back"""
    rng = np.random.default_rng(0)
    u, W, ds = (rng.standard_normal(shape) for shape in ((2, 6, 4), (6 // n_positions, 4, 3, 5), (2, 3, 5)))
    s, cache = ac.uniform_routing_forward(u, W)
    u_hat, votes_cache = ac.votes_forward(u, W)
    slow, routing_cache = ac.routing_forward(u_hat, 1, ac.PLAIN[0])
    np.testing.assert_allclose(s, slow, rtol=1e-12)
    by_hand = sum(W[i % len(W)].transpose(1, 2, 0) @ u[0, i] for i in range(6)) / 3
    np.testing.assert_allclose(s[0], by_hand, rtol=1e-12)
    for fast, oracle in zip(ac.uniform_routing_backward(ds, cache), ac.votes_backward(
            ac.routing_backward(ds, routing_cache, ac.PLAIN[1]), votes_cache)):
        np.testing.assert_allclose(fast, oracle, rtol=1e-12)
    check_op(ac.uniform_routing_forward, ac.uniform_routing_backward, u, W)


def test_shared_capsules_by_loops(digits):
    """Each vote is its type's matrix times u plus the place's matrix times its place, scaled by the capsule's length"""
    config = NETWORKS["capsnet-shared"]
    params, batch = float64(config), batch_of(digits, config)
    out, _ = ac.forward(params, batch["images"], config, statistics={})
    centers, B = ac.receptive_field_centers(config), 2
    for n in range(3):
        s = np.zeros((10, 16))
        for place, center in enumerate(centers):
            for kind in range(B):
                u = out["u"][n, place * B + kind]
                s += (np.einsum("e,ejd->jd", u, params["W"][kind])
                      + np.einsum("k,kjd->jd", np.linalg.norm(u) * center, params["coordinate_W"])) / 10
        norm = np.linalg.norm(s, axis=1, keepdims=True)
        np.testing.assert_allclose(out["v"][n], norm * s / (1 + norm ** 2), rtol=1e-6)


@pytest.mark.parametrize("squash, u, v", [
    ("all", "squashed", "squashed"), ("last", "plain", "squashed"), ("none", "plain", "plain"),
    ("relu", "cut", "plain")])
def test_what_is_squashed_is_what_the_setting_says(squash, u, v):
    """The primary capsules' numbers, as the backbone gives them, and the sums of votes, each by hand"""
    by_hand = {"plain": lambda s: s, "cut": lambda s: np.maximum(s, 0), "squashed": lambda s: (
        s * np.linalg.norm(s, axis=-1, keepdims=True) / (1 + np.square(s).sum(-1, keepdims=True)))}
    config = tiny("capsnet", squash=squash, routing_iters=1)
    params, x = float64(config), normal(3, 7, 7, 16)                                    # two types of capsules
    out, _ = ac.capsnet_head_forward(params, x.copy(), config, None)
    np.testing.assert_allclose(out["u"], by_hand[u](x.reshape(3, 98, 8)), rtol=1e-6)
    s = np.einsum("nie,iejd->njd", out["u"], params["W"]) / 10
    np.testing.assert_allclose(out["v"], by_hand[v](s), rtol=1e-6)


@pytest.mark.parametrize("padding, n", [(0, 5), (4, 7)])
def test_places_are_the_middles_of_the_receptive_fields(padding, n):
    """Of the deep front end: 3x3, 3x3, pool, 3x3, 3x3, pool, 3x3: fields of 24 px, 4 px apart, so that five cover
    40 px and seven 48; -1 to 1 over the image, whose middle is the middle field's"""
    centers = ac.receptive_field_centers(tiny("capsnet-shared", padding=padding))
    assert len(centers) == n * n
    x = np.unique(centers[:, 0])
    np.testing.assert_allclose(x, (np.arange(n) - n // 2) * 4 / 20, atol=1e-12)
    assert centers[0].tolist() == [x[0], x[0]] and centers[1].tolist() == [x[1], x[0]]  # x first, then y


def size_of(config, **more):
    return sum(math.prod(shape) for shape in ac.param_shapes(dataclasses.replace(config, **more)).values())


@pytest.mark.parametrize("model, of, more", [
    ("cnn-gap", "capsnet-shared", {}), ("cnn-gmp", "capsnet-shared", {}), ("cnn-dense", "capsnet", {"padding": 4}),
    ("cnn", "capsnet", {"padding": 4}), ("cnn", "capsnet", {"task": "mnist"}), ("cnn", "capsnet", {"preset": "small"}),
    ("cnn-dense", "capsnet", {"preset": "small"})])
def test_controls_have_the_size_of_the_capsules_without_their_decoder(model, of, more, few_units):
    """No other width comes as near: by trial of all, which is slow"""
    few_units.undo()
    config, wanted = ac.Config(model=model, **more), size_of(ac.Config(model=of, recon_weight=0.0, **more))
    assert ac.matched_width(config) == min(range(1, 600), key=lambda width: abs(size_of(config, width=width) - wanted))


@pytest.mark.parametrize("model, most, width", [("cnn-gap", 88, 3), ("cnn-dense", 400, 1), ("cnn", 206, 1)])
def test_a_cnn_that_is_larger_with_a_single_unit_is_refused(model, most, width, few_units):
    few_units.undo()
    assert ac.matched_width(ac.Config(model=model, conv1_channels=most)) == width
    with pytest.raises(ac.InputError, match="--conv1-channels: this CNN is larger than the capsule network"):
        ac.matched_width(ac.Config(model=model, conv1_channels=most + 1))


WEIGHTS = {                        # model, preset: of the convolutions and of the matrices
    ("capsnet-shared", "deep"): {
        "conv1_w": (1, 3, 3, 16), "conv2_w": (3, 3, 16, 16), "conv3_w": (3, 3, 16, 64), "conv4_w": (3, 3, 64, 64),
        "conv5_w": (3, 3, 64, 128), "primary_w": (1, 1, 128, 16 * 8), "W": (16, 8, 10, 16), "coordinate_W": (2, 10, 16),
        "dec1_w": (160, 256), "dec2_w": (256, 512), "dec3_w": (512, 1600)},
    ("capsnet", "paper"): {                                                 # 12 x 12 positions of 32 types
        "conv1_w": (1, 9, 9, 256), "primary_w": (9, 9, 256, 32 * 8), "W": (12 * 12 * 32, 8, 10, 16),
        "dec1_w": (160, 512), "dec2_w": (512, 1024), "dec3_w": (1024, 1600)},
    ("capsnet", "small"): {
        "conv1_w": (1, 9, 9, 64), "primary_w": (9, 9, 64, 8 * 8), "W": (12 * 12 * 8, 8, 10, 16),
        "dec1_w": (160, 256), "dec2_w": (256, 512), "dec3_w": (512, 1600)}}
OF_CNNS = {                        # preset: channels of the CNN's convolutions; paper: the paper's
    "paper": (256, 256, 128), "small": (16, 16, 8), "deep": (16, 16, 8)}


def test_layers_are_as_large_as_the_documents_say(few_units):
    few_units.undo()
    for (model, preset), expected in WEIGHTS.items():
        shapes = ac.param_shapes(ac.Config(model=model, preset=preset))
        assert {name: shape for name, shape in shapes.items() if name.lower().endswith("w")} == expected
    for preset, (first, second, third) in OF_CNNS.items():
        shapes = ac.param_shapes(ac.Config(model="cnn", preset=preset, width=328))
        assert (shapes["conv1_w"], shapes["conv2_w"]) == ((1, 5, 5, first), (5, 5, first, second))
        assert (shapes["conv3_w"], shapes["fc2_w"]) == ((5, 5, second, third), (328, 192))
    odd = ac.param_shapes(ac.Config(model="cnn", conv1_channels=3))
    assert odd["conv3_w"] == (5, 5, 3, 2)                                   # half of them, rounded up


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_padded_with_background(channels):
    """of which a normalization would hide a part"""
    config = tiny("cnn-gap", padding=2, task="images", side=20, channels=channels)
    image = np.ones((2, 20, 20) if channels == 1 else (2, 20, 20, channels))
    padded = ac.padded_input({"conv1_w": np.ones((1, 1, 1, 4))}, image, config)         # (H, N, W, C)
    expected = np.zeros((24, 2, 24, channels))
    expected[2:22, :, 2:22] = 1
    np.testing.assert_array_equal(padded, expected)


@pytest.mark.parametrize("accuracy, reached, stops", [
    (0.5, [0.25, 0.5], True), (0.5, [0.75, 0.25], True), (0.5, [0.25, 0.375], False), (0.5, [], False),
    (0.0, [0.25, 1.0], False)])
def test_an_accuracy_is_reached_if_an_epoch_had_it_or_more(accuracy, reached, stops):
    """0: train all epochs"""
    assert ac.has_reached(accuracy, [{"val_accuracy": one} for one in reached]) == stops


def test_stopping_at_an_accuracy(digits):
    config = tiny("cnn-gap", width=0, padding=0, n_epochs=10, lr=1e-2, warmup=0, stop_at=0.3, train_shift="0")
    state = ac.train(config, digits)
    reached = [epoch["val_accuracy"] >= 0.3 for epoch in state["history"]["epochs"]]
    assert reached[-1] and not any(reached[:-1]) and len(reached) < 10
    assert ac.train(config, digits, state)["step"] == 2 * len(reached)                  # has stopped before


@pytest.mark.parametrize("model, width, units, last", [("cnn-dense", 6, 6, "fc2_b"), ("cnn", 10, 6, "fc3_b")])
def test_dropout_drops_the_last_hidden_units(digits, model, width, units, last):
    """And scales the others up, so that their mean stays; another mask for every digit"""
    config = tiny(model, preset="small", n_train=2000, width=width)
    masks = np.concatenate([part["dropout_mask"] for part in ac.epoch_samples(digits, 0, config)])
    assert masks.shape == (2000, units) and set(np.unique(masks)) == {0, 2}
    assert masks.mean() == pytest.approx(1, abs=0.05)
    params, batch = float64(config), batch_of(digits, config)
    blind = ac.forward(params, batch["images"], config, dropout_mask=np.zeros((3, units)))[0]["scores"]
    np.testing.assert_allclose(blind, np.tile(params[last], (3, 1)))
    assert "dropout_mask" not in next(ac.epoch_samples(digits, 0, dataclasses.replace(config, dropout=0.0)))


@pytest.mark.parametrize("model", ac.CAPSULES + ac.CNNS)
def test_activations_are_lengths_or_a_cnns_probabilities(model):
    scores = np.log([[1.0, 3.0, 4.0]])
    expected = scores if model in ("capsnet-shared", "capsnet", "vector-gap", "vector-gmp") else [[1 / 8, 3 / 8, 1 / 2]]
    np.testing.assert_allclose(ac.class_activations({"scores": scores}, tiny(model)), expected)


@pytest.mark.parametrize("given, keys", [
    ({}, ["familiar", "any_position", "centered", "affine"]),
    ({"train_shift": "full"}, ["familiar", "centered", "affine"]),
    ({"affnist_dir": "x"}, ["familiar", "any_position", "centered", "affine", "real_affine"]),
    ({"task": "mnist"}, ["test"]), ({"task": "images"}, ["test"])], ids=str)
def test_test_sets_are_those_of_the_task(given, keys, monkeypatch):
    """Digits at any position are no other test of a network that is trained on these; affNIST's own are read only if
    their folder is given"""
    monkeypatch.setattr(ac, "evaluate", lambda weights, digits, *_: digits)
    monkeypatch.setattr(ac, "read_affnist", lambda folder: "real")
    monkeypatch.setattr(ac, "stream_digits", lambda data, config, kind: kind)
    found = ac.evaluate_test({}, {}, ac.Config(**given), None)
    assert list(found) == keys
    kinds = {"familiar": "test", "real_affine": "real"}
    assert found == {key: kinds.get(key, key) for key in keys}


def test_results_name_the_metrics_of_each_test_set_by_hand():
    """A network without a decoder has no error of reconstruction"""
    one = {"n": 8, "hits": 2, "accuracy": 0.25, "correct": np.arange(8) < 2, "confusion": [[2]], "loss": 0.7}
    found = ac.test_metrics({"familiar": one | {"recon_mse": 0.01}, "affine": one | {"hits": 3}})
    assert found == {
        "familiar_accuracy": 0.25, "familiar_hits": 2, "familiar_n": 8, "familiar_recon_mse": 0.01,
        "familiar_confusion": [[2]], "affine_accuracy": 0.25, "affine_hits": 3, "affine_n": 8,
        "affine_recon_mse": None, "affine_confusion": [[2]], "hit_bits": {"familiar": "wA==", "affine": "wA=="}}


@pytest.mark.parametrize("name", ["capsnet-shared", "cnn-gap"])
def test_evaluation_against_brute_force(digits, name, monkeypatch):
    """Over chunks of unequal size; of digits of which some classes are missing"""
    monkeypatch.setattr(ac, "CHUNK", 12)
    config = dataclasses.replace(NETWORKS[name], n_test=28)
    some = digits | {"test": tuple(a[digits["test"][1] < 7] for a in digits["test"])}
    weights, parts = ac.weights_of(ac.initial_state(config)), list(ac.stream_digits(some, config, "test"))
    with ac.worker_threads(config) as workers:
        found = ac.evaluate(weights, parts, config, workers)
    part = {key: np.concatenate([each[key] for each in parts]) for key in parts[0]}
    batch = ac.to_batch(part, slice(None))
    out, _ = ac.forward(weights, batch["images"], config, batch["labels"])
    right = out["scores"].argmax(1) == part["labels"]
    assert found["hits"] == right.sum() and found["accuracy"] == right.mean() and found["n"] == 28
    assert np.array_equal(found["correct"], right)
    term, (loss, _) = ac.loss_name(config), ac.classification_loss(out, part, config)
    assert term == ("margin" if name == "capsnet-shared" else "cross_entropy")
    assert found[term] == pytest.approx(loss, rel=1e-5)
    assert found["loss"] == pytest.approx(loss_of(weights, batch, config, statistics=None), rel=1e-5)
    if name == "capsnet-shared":
        assert found["recon_mse"] == pytest.approx(np.square(out["recon"][:, 0] - batch["images"]).mean(), rel=1e-5)
    pairs = list(zip(part["labels"], out["scores"].argmax(1)))
    assert found["confusion"] == [[pairs.count((row, column)) for column in range(10)] for row in range(10)]
