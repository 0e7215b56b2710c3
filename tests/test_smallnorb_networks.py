"""The networks: against literal ones, image by image; losses by hand; every gradient; receptive fields,
sizes; evaluation."""
import dataclasses
import itertools
import json
import math

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
import reference_smallnorb as literal
from conftest import assert_same
from gradcheck import RELU, check_coordinates, check_directions, check_loss, check_step, float_dtypes, poison
from reference_smallnorb import TRAINED, batch64, few, outputs, params64, running64, tiny

# ---------------------------------------------------------------- against literal networks

@pytest.mark.parametrize("model, changes", [
    ("matrix-capsnet", {}), ("matrix-capsnet", dict(routing_iters=1, data="toys")),
    ("matrix-capsnet", dict(routing_iters=3, coordinates=False)), ("matrix-capsnet", dict(inverse_temperature=0.3)),
    ("matrix-head", {}), ("matrix-head", dict(routing_iters=3, data="toys", width=3)),
    ("matrix-head", dict(coordinates=False))], ids=str)
def test_networks_of_matrix_capsules_against_literal_ones(monkeypatch, model, changes):
    """In evaluation, with running statistics"""
    monkeypatch.setattr(sn, "MASS_EPS", 0.0)
    config = tiny(model, **changes)
    params, batch = params64(config) | running64(config), batch64(config, 2)
    out = outputs(params, batch, config)
    for n in range(2):
        mu, x = literal.em_network_reference(params, batch["images"][n], config)
        np.testing.assert_allclose(out["mu"][n], mu, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(out["scores"][n], x, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(out["a"][n], 1 / (1 + np.exp(-x)), rtol=1e-4)
    children = 2 * 16 if model == "matrix-capsnet" else config.width * 9
    for step in out["class_steps"]:
        np.testing.assert_allclose(np.broadcast_to(step.R, (2, 5, children)).sum(1), 1, rtol=1e-12)
    assert len(out["class_steps"]) == config.routing_iters and np.ptp(out["scores"]) > 1e-3
    layers = ("primary_pose", "primary_a", "conv_mu", "conv_a", "conv2_mu", "conv2_a")
    assert {name for name in out if name in layers} == {*layers[:6 if model == "matrix-capsnet" else 2]}


@pytest.mark.parametrize("model, changes", [
    ("capsnet", {}), ("capsnet", dict(routing_iters=3, data="toys", width=3)), ("capsnet-shared", {}),
    ("capsnet-shared", dict(coordinates=False)), ("capsnet-shared", dict(routing_iters=1)),
    ("capsnet-shared", dict(coordinates=False, data="toys"))], ids=str)
def test_networks_of_vector_capsules_against_literal_ones(model, changes):
    """Primary capsules in the order (position, type), a matrix for each position or each type, coordinates in
    proportion to the lengths, the coupling coefficients of every iteration; in evaluation"""
    config = tiny(model, **changes)
    params, batch = params64(config) | running64(config), batch64(config, 2)
    out = outputs(params, batch, config)
    for n in range(2):
        v, couplings = literal.vector_network_reference(params, batch["images"][n], config)
        np.testing.assert_allclose(out["v"][n], v, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(out["scores"][n], np.sqrt((v * v).sum(1)), rtol=1e-4)
        for c, expected in zip(out["c"], couplings, strict=True):
            np.testing.assert_allclose(np.broadcast_to(c, (2, 5, len(expected)))[n].T, expected, rtol=1e-4)


@pytest.mark.parametrize("model, changes", [
    ("cnn", {}), ("cnn-bn", {}), ("cnn-gap", {}), ("cnn-gap", dict(coordinates=True, data="toys")),
    ("cnn", dict(preset="paper", width=0, data="toys", dropout=0.0))], ids=str)
def test_cnns_against_literal_ones(model, changes):
    """In evaluation; also the paper's with its padding and its 4.2 million weights"""
    config = tiny(model, **changes)
    params, batch = params64(config) | running64(config), batch64(config, 2)
    scores = outputs(params, batch, config)["scores"]
    for n in range(2):
        expected = literal.cnn_reference(params, batch["images"][n], config)
        np.testing.assert_allclose(scores[n], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", sn.PAPER_CNNS)
def test_dropout_drops_hidden_units_in_training_only(model):
    """Another half of them for every image; the others count twice, so that the mean stays. By default in the paper's
    CNN only"""
    config, plain = tiny(model, dropout=0.5), tiny(model)
    data = few(config)
    masks = np.concatenate([part["dropout_mask"] for k in range(40) for part in sn.epoch_samples(data, k, config)])
    assert masks.shape == (1600, 32) and masks.dtype == np.float32 and set(np.unique(masks)) == {0, 2}
    np.testing.assert_allclose([masks.mean(0).min(), masks.mean(0).max(), masks.mean(1).std()], [1, 1, 1 / 32 ** 0.5],
                               atol=0.12)
    params, batch = params64(config) | running64(config), batch64(config, 3)
    for n, mask in enumerate(batch["dropout_mask"]):
        scores = outputs(params | {"fc2_w": mask[:, None] * params["fc2_w"]}, batch | {"dropout_mask": None}, config)
        np.testing.assert_allclose(outputs(params, batch, config)["scores"][n], scores["scores"][n], rtol=1e-12)
    with sn.worker_threads(config) as workers:
        assert len({sn.evaluate(params, data["novel"], each, workers)["loss"] for each in (config, plain)}) == 1
    with_dropout, without = (next(sn.epoch_samples(data, 0, each)) for each in (config, plain))
    assert with_dropout.pop("dropout_mask").any()
    assert_same(with_dropout, without)                                                  # the same images
    assert [sn.Config(model=model, preset=preset).dropout for preset in ("small", "paper")] == [0, 0.5]
    assert sn.Config(model=model, preset="paper", width=8).dropout == 0.5


# ---------------------------------------------------------------- receptive fields

@pytest.mark.parametrize("model, side, size", [("matrix-capsnet", 4, 17), ("matrix-head", 3, 24)])
def test_coordinates_are_the_centers_of_measured_receptive_fields(rng, model, side, size):
    """Rows, then columns, of some images are changed one by one: which poses below the class capsules change? With one
    iteration, in which positions do not compete. The backbone is the same under all heads."""
    config = tiny(model, routing_iters=1)
    params, centers, changed = params64(config) | running64(config), sn.receptive_field_centers(config), 0
    for image in rng.random((3, 32, 32, 1)):
        images = np.repeat(image[None], 65, 0)
        for k in range(32):
            images[1 + k, k] += 2 * rng.random((32, 1))                                        # row k
            images[33 + k, :, k] += 2 * rng.random((32, 1))                                    # column k
        out, _ = sn.forward(params, images, config)
        poses = out["conv2_mu" if model == "matrix-capsnet" else "primary_pose"]               # (N, side, side, B, D)
        changed = changed | (np.abs(poses[1:] - poses[0]) > 1e-12).any((3, 4))
    changed = changed.reshape(2, 32, side, side)                                    # (row or column, k, position)
    for py, px in np.ndindex(side, side):
        for axis, position in ((0, py), (1, px)):
            seen = np.flatnonzero(changed[axis, :, py, px])
            assert (seen[0], seen[-1]) == literal.field(position, config)
            assert len(seen) == seen[-1] - seen[0] + 1 == size
            assert centers[py * side + px, 1 - axis] == pytest.approx((seen.mean() - 15.5) / 16)    # x is centers[:, 0]
    assert len(centers) == side ** 2
    for other in {"matrix-capsnet": (), "matrix-head": sn.VECTOR_MODELS}[model]:
        assert np.array_equal(sn.receptive_field_centers(tiny(other)), centers)


# ---------------------------------------------------------------- losses

def test_spread_loss_and_cross_entropy_by_hand():
    loss, _ = sn.spread_loss(np.full((2, 5), 0.4), np.array([1, 3]), 0.2)
    assert abs(loss - 4 * 0.2 ** 2) < 1e-12
    a = np.array([[0.8, 0.5, 0.7, 0.1, 0.1]])
    loss, da = sn.spread_loss(a, np.array([0]), 0.2)                                            # only 0.7 is within 0.2
    assert abs(loss - 0.01) < 1e-12
    np.testing.assert_allclose(da, [[-0.2, 0, 0.2, 0, 0]], atol=1e-12)
    loss, _ = sn.spread_loss(np.tile(a, (2, 1)), np.array([0, 0]), np.array([0.2, 0.4]))        # 0.5 within 0.4 too
    assert abs(loss - (0.1 ** 2 + 0.3 ** 2 + 0.1 ** 2) / 2) < 1e-9
    loss, dscores = sn.cross_entropy(np.log(np.array([[0.2, 0.3, 0.5]])), np.array([2]))
    assert abs(loss - math.log(2)) < 1e-12
    np.testing.assert_allclose(dscores, [[0.2, 0.3, -0.5]])


def test_classification_losses_by_hand():
    """Activations 0.8 of the right class and 0.1, 0.5 twice of others: 0.8 of 2.0, whatever a model's scores are"""
    a, batch = np.array([[0.5, 0.8, 0.1, 0.5, 0.1]]), {"labels": np.array([1]), "margin": 0.4}
    logits = np.log(a / (1 - a))
    expected = {"cross-entropy": math.log(2.0 / 0.8), "margin": 0.1 ** 2 + 0.5 * 2 * 0.4 ** 2, "spread": 2 * 0.1 ** 2}
    for (loss, value), model in itertools.product(expected.items(), TRAINED):
        scores, config = a if model in sn.VECTOR_MODELS else logits, tiny(model, loss=loss)
        if loss == "cross-entropy" and model not in sn.CAPSULES:
            scores = np.log(a)
        assert sn.classification_loss({"scores": scores}, batch, config)[0] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("model", ["matrix-capsnet", "capsnet", "cnn-gap"])
@pytest.mark.parametrize("loss", ["cross-entropy", "margin", "spread"])
def test_gradients_and_extremes_of_the_losses(rng, model, loss):
    """Logits of matrix capsules and CNNs, lengths of vectors; of activations of which nothing is left, in float32"""
    config, batch = tiny(model, loss=loss), {"labels": np.array([0, 4, 2]), "margin": np.array([0.2, 0.9, 0.6])}
    scores = rng.uniform(0.02, 0.98, (3, 5)) if model == "capsnet" else 2 * rng.standard_normal((3, 5))
    check_loss(lambda x: sn.classification_loss({"scores": x}, batch, config), scores, h=1e-6)
    for row in ([0] * 5, [1] * 5, [1, 0, 0, 0, 0]):
        scores = np.array([row] * 3, np.float32)
        scores = np.maximum(scores, np.float32(sn.SQUASH_EPS ** 0.5)) if model == "capsnet" else 2000 * scores - 1000
        value, dscores = sn.classification_loss({"scores": scores}, batch, config)
        assert np.isfinite(value) and np.isfinite(dscores).all() and dscores.dtype == np.float32


# ---------------------------------------------------------------- gradients, purity

NETWORKS = [
    *((model, {}) for model in TRAINED), ("matrix-capsnet", dict(loss="spread", coordinates=False)),
    ("matrix-capsnet", dict(routing_iters=3, data="toys", inverse_temperature=0.3)),
    ("matrix-head", dict(loss="margin", data="toys", routing_iters=3)), ("matrix-head", dict(routing_iters=1, width=3)),
    ("capsnet", dict(loss="cross-entropy", routing_iters=3)), ("cnn", dict(preset="paper", width=0)),
    ("capsnet-shared", dict(loss="cross-entropy", routing_iters=3, data="toys")),
    ("capsnet-shared", dict(coordinates=False)), ("cnn-gap", dict(loss="margin", coordinates=True)),
    ("cnn-gap", dict(loss="spread")), ("cnn", dict(dropout=0.5)), ("cnn-bn", dict(dropout=0.5))]


@pytest.mark.parametrize("model, changes", NETWORKS, ids=str)
def test_every_parameter_has_its_gradient(model, changes):
    config = tiny(model, **changes)
    params, batch = params64(config), batch64(config, 3)                                   # few ReLUs near their kink

    def loss_of(p):
        """The loss alone, with the batch's own statistics"""
        return sn.classification_loss(outputs(p, batch, config), batch, config)[0]
    terms, grads = check_step(sn, params, batch, config, loss_of)
    assert terms["accuracy"] == (outputs(params, batch, config)["scores"].argmax(1) == batch["labels"]).mean()
    check_directions(loss_of, params, grads, n=1, h=1e-7)
    check_coordinates(loss_of, params, grads, n=1, tol=10 * RELU, h=1e-7)


@pytest.mark.parametrize("model", TRAINED)
def test_no_memory_is_read_before_it_is_written(model, monkeypatch):
    """If fresh memory is full of nan: the same bits. float32 stays float32 in evaluation; backward says the same
    twice"""
    config = tiny(model)
    params, running = ({name: a.astype(np.float32) for name, a in of(config).items()} for of in (params64, running64))
    batch = {name: a.astype(np.float32) if name != "labels" else a for name, a in batch64(config, 5).items()}
    terms, *found = sn.loss_and_grads(params, batch, config)
    assert found[0].keys() == params.keys() and found[1].keys() == running.keys()
    assert float_dtypes(sn.forward(params | running, batch["images"], config)) == {np.dtype(np.float32)}
    _, cache = sn.forward(params, batch["images"], config, statistics={})
    dscores, first, second = np.ones((5, 5), np.float32), {}, {}
    sn.backward(dscores, cache, config, first)
    sn.backward(dscores, cache, config, second)
    assert_same(first, second)
    assert np.all(dscores == 1)
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", poison)
        patch.setattr(np, "empty_like", lambda a: poison(a.shape, a.dtype))
        again = sn.loss_and_grads(params, batch, config)
    assert again[0] == terms
    for expected, poisoned in zip(found, again[1:]):
        assert_same(expected, poisoned)


# ---------------------------------------------------------------- sizes

def size(config):
    return sum(math.prod(shape) for shape in sn.param_shapes(config).values())


@pytest.mark.parametrize("data, preset", [*itertools.product(("toys", "shapes"), ("small", "wide"))])
def test_networks_that_are_compared_have_as_many_weights(data, preset):
    """The heads as capsnet-shared, within 5%, the paper's CNN as its capsules: as near as any width brings them"""
    n = {model: size(sn.Config(model=model, data=data, preset=preset)) for model in TRAINED}
    for model in ("capsnet", "matrix-head", "cnn-gap"):
        assert abs(n[model] / n["capsnet-shared"] - 1) < 0.05, model
    assert abs(n["cnn"] / n["matrix-capsnet"] - 1) < 0.1
    for model in ("matrix-head", "capsnet", "cnn-gap", *sn.PAPER_CNNS):
        config = sn.Config(model=model, data=data, preset=preset)
        target, width = n["matrix-capsnet" if model in sn.PAPER_CNNS else "capsnet-shared"], sn.matched_width(config)
        assert all(abs(size(dataclasses.replace(config, width=other)) - target) >= abs(n[model] - target)
                   for other in (width - 1, width + 1))


BACKBONE = {                       # by preset, on two cameras; wide is twice as wide, paper as small
    "small": {"conv1_w": (3, 3, 2, 16), "conv2_w": (3, 3, 16, 16), "conv3_w": (3, 3, 16, 32),
              "conv4_w": (3, 3, 32, 32)},
    "wide": {"conv1_w": (3, 3, 2, 32), "conv2_w": (3, 3, 32, 32), "conv3_w": (3, 3, 32, 64),
             "conv4_w": (3, 3, 64, 64)}}
BACKBONE["paper"] = BACKBONE["small"]
MATRICES = {                       # of matrix-capsnet: 17 channels per type of primary capsules, 9 positions in a field
    "small": {"conv1_w": (5, 5, 2, 32), "primary_w": (1, 1, 32, 4 * 17), "conv_W": (9 * 4, 8, 4, 4),
              "conv2_W": (9 * 8, 8, 4, 4), "class_W": (8, 5, 4, 4)},
    "wide": {"conv1_w": (5, 5, 2, 64), "primary_w": (1, 1, 64, 4 * 17), "conv_W": (9 * 4, 4, 4, 4),
             "conv2_W": (9 * 4, 4, 4, 4), "class_W": (4, 5, 4, 4)},
    "paper": {"conv1_w": (5, 5, 2, 64), "primary_w": (1, 1, 64, 8 * 17), "conv_W": (9 * 8, 16, 4, 4),
              "conv2_W": (9 * 16, 16, 4, 4), "class_W": (16, 5, 4, 4)}}


@pytest.mark.parametrize("preset", ["small", "wide", "paper"])
def test_layers_are_as_large_as_the_documents_say(preset):
    """The paper's small network has 68K parameters, the default one 12,770"""
    def weights(model):
        shapes = sn.param_shapes(sn.Config(model=model, preset=preset))
        return {name: shape for name, shape in shapes.items() if name.lower().endswith("_w")}
    assert weights("matrix-capsnet") == MATRICES[preset]
    for model in ("capsnet-shared", "capsnet", "matrix-head", "cnn-gap"):
        assert weights(model).items() >= BACKBONE[preset].items()
    n = size(sn.Config(preset=preset))
    assert n == {"small": 18482, "wide": 12770, "paper": 68954}[preset]


@pytest.mark.parametrize("model", sn.PAPER_CNNS)
def test_the_papers_cnn_has_the_width_that_it_is_said_to_have(model):
    """With the default width given as a number it is the same network; with another one it is the paper's, too"""
    configs = [sn.Config(model=model, preset="paper", width=width) for width in (0, 32, 8)]
    default, given, narrow = map(sn.param_shapes, configs)
    assert default == given and default["fc1_w"] == (64 * 8 * 8, 1024) and narrow["fc1_w"] == (16 * 8 * 8, 1024)


# ---------------------------------------------------------------- training and evaluation

@pytest.mark.parametrize("model", ["cnn-gap", "matrix-capsnet", "capsnet"])
def test_evaluate_against_brute_force(model, monkeypatch):
    """A CNN's belief in a class is exp(score), that of capsules their activation: the score's logistic, or the score"""
    belief = {"cnn-gap": math.exp, "matrix-capsnet": lambda score: 1 / (1 + math.exp(-score)), "capsnet": float}[model]
    scores = np.random.default_rng(2).standard_normal((7, 5)).astype(np.float32)
    scores = abs(scores) if model == "capsnet" else scores
    labels = np.array([0, 1, 2, 3, 0, 1, 1])                                               # nothing of class 4
    monkeypatch.setattr(sn, "forward_shards", lambda *_: {"scores": scores})
    found = sn.evaluate({}, {"labels": labels}, tiny(model, loss="cross-entropy"), None)
    right = [max(range(5), key=lambda j: row[j]) == t for row, t in zip(scores, labels)]
    loss = sum(-math.log(belief(row[t]) / sum(belief(k) for k in row))
               for row, t in zip(scores.astype(float), labels)) / 7
    assert list(found["correct"]) == right and 0 < sum(right) < 7
    pairs = [(t, max(range(5), key=lambda j: row[j])) for row, t in zip(scores, labels)]
    assert found["confusion"] == [[pairs.count((t, j)) for j in range(5)] for t in range(5)]
    assert (found["accuracy"], found["loss"]) == pytest.approx((sum(right) / 7, loss), rel=1e-5)
    by_class = [[sum(r for r, t in zip(right, labels) if t == j)] for j in range(5)]       # no instances: one toy each
    assert (found["toy_n"], found["toy_hits"]) == ([[2], [3], [1], [1], [0]], by_class)


@pytest.mark.parametrize("model", TRAINED)
def test_activations_are_those_of_capsules_or_a_cnns_probabilities(model):
    out = {"scores": np.log([[1.0, 3.0, 4.0]]), "a": np.array([[0.2, 0.3, 0.4]])}
    expected = [[1 / 8, 3 / 8, 1 / 2]]
    if model in ("matrix-capsnet", "matrix-head"):
        expected = out["a"]
    if model in ("capsnet", "capsnet-shared"):
        expected = out["scores"]
    np.testing.assert_allclose(sn.class_activations(out, tiny(model)), expected)


def test_the_spread_loss_of_tests_has_its_last_margin(monkeypatch):
    """At equal activations it is four times 0.9 squared"""
    monkeypatch.setattr(sn, "forward_shards", lambda *_: {"scores": np.zeros((2, 5))})
    found = sn.evaluate({}, {"labels": np.array([1, 4])}, tiny("cnn-gap", loss="spread"), None)
    assert found["loss"] == pytest.approx(4 * 0.81)


def test_hits_are_counted_per_class_and_toy_by_hand():
    """Columns are the instances in ascending order; a class may lack one of them"""
    samples = {"labels": np.array([0, 0, 0, 4, 4]), "instances": np.array([5, 5, 2, 3, 3])}
    counts = sn.count_per_toy(samples, np.array([True, True, True, True, False]))
    assert counts == [[1, 0, 2], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 1, 0]]


def test_hits_per_toy_are_kept_at_every_epoch_and_at_the_end():
    """Of 25 test toys, in the order of their instances; over the toys they add up to the accuracies"""
    config = tiny("cnn-gap", n_epochs=3)
    data = few(config, n_test=60)
    for name in ("familiar", "novel"):
        data[name]["instances"] = np.resize([0, 1, 2, 3, 5], len(data[name]["labels"]))
    state = sn.train(config, data)
    with sn.worker_threads(config) as workers:
        test = sn.evaluate_test(sn.weights_of(state), data, config, workers)
    found = json.loads(sn.as_json(sn.result_of(config, state, data, test)))
    for name in ("familiar", "novel"):
        n, hits = found[f"{name}_toy_n"], found["history"][f"{name}_toy_hits"]
        assert np.shape(n) == (5, 5) and np.shape(hits) == (3, 5, 5)
        assert np.sum(hits, (1, 2)) / np.sum(n) == pytest.approx(found["history"][name])
        assert found[f"{name}_toy_hits"] == hits[-1]
        for k, instance in enumerate([0, 1, 2, 3, 5]):
            of_toy = data[name]["instances"] == instance
            right = np.bincount(data[name]["labels"][of_toy], test["correct"][name][of_toy], 5)
            assert [row[k] for row in hits[-1]] == right.tolist()


@pytest.mark.parametrize("split", ["azimuth", "elevation", "instance"])
def test_accuracy_at_each_angle_of_the_test_images_by_hand(split, monkeypatch):
    """Familiar ones at 10 and 20 degrees, novel ones at 90: 1 of 2, 2 of 2 and 0 of 1 right; the other angle does
    not count. Of the standard task the sweep leaves the training images out"""
    angle, other = ("elevations", "azimuths") if split == "elevation" else ("azimuths", "elevations")
    data = {"familiar": {angle: np.array([10, 20, 10, 20]), other: np.arange(4), "labels": np.arange(4)},
            "novel": {angle: np.array([90.5]), other: np.zeros(1), "labels": np.array([4])}}
    said = {4: [True, True, False, True], 1: [False]}
    monkeypatch.setattr(sn, "evaluate", lambda params, samples, *_: {
        "accuracy": len(samples["labels"]) / 4, "loss": 1.0, "confusion": [], "toy_n": [], "toy_hits": [],
        "correct": np.array(said[len(samples["labels"])])})
    found = sn.evaluate_test({}, data, sn.Config(split=split), None)
    first = 2 if split == "instance" else 0
    assert found["sweep"]["angles"] == [10, 20, 90.5][first:] and found["sweep"]["accuracy"] == [0.5, 1.0, 0.0][first:]
    assert (found["familiar"], found["novel"], found["drop"]) == (1, 0.25, 0.75)
    assert found["correct"]["familiar"].tolist() == said[4]
