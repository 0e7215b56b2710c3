"""Comparing networks: evaluation, the nearest neighbour, variants, seeds, summaries over runs, sweeps over azimuths."""
import dataclasses
import json
import math
from types import SimpleNamespace

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from conftest import assert_same
from reference_smallnorb import PARTS, TRAINED, tiny, write_norb

HEADS_TINY = dict(trunk_channels=2, head_types=2)       # sizes of the heads that caps is compared with


# ---------------------------------------------------------------- evaluation

@pytest.mark.parametrize("chunk", [2, 2048])
@pytest.mark.parametrize("model", ["gap", "caps", "self-routing"])
def test_evaluate_against_brute_force(model, chunk, monkeypatch):
    """A CNN's belief in a class is exp(score), that of capsules their activation: the score's logistic, or the score"""
    monkeypatch.setattr(sn, "CHUNK", chunk)
    belief = {"gap": math.exp, "caps": lambda score: 1 / (1 + math.exp(-score)), "self-routing": float}[model]
    scores, done = np.random.default_rng(2).standard_normal((7, 5)).astype(np.float32), []
    if model == "self-routing":
        scores = abs(scores)
    labels = np.array([0, 1, 2, 3, 0, 1, 1])                                               # nothing of class 4

    def fake_forward(params, part, *args, **kwargs):
        done.append(len(part["labels"]))
        return {"scores": scores[sum(done[:-1]):sum(done)]}

    samples = {"images": np.zeros((7, 32, 32, 1)), "labels": labels}
    found = sn.evaluate({}, samples, tiny(model, loss="xent"), SimpleNamespace(forward=fake_forward))
    named = [max(range(5), key=lambda j: row[j]) for row in scores]
    right = [j == t for j, t in zip(named, labels)]
    loss = sum(-math.log(belief(row[t]) / sum(belief(k) for k in row))
               for row, t in zip(scores.astype(float), labels)) / 7
    assert list(found.pop("predictions")) == named and sum(done) == 7
    *per_class, last = found.pop("per_class")
    assert 0 < sum(right) < 7 and math.isnan(last)
    assert per_class == [sum(hit for hit, t in zip(right, labels) if t == j) / list(labels).count(j) for j in range(4)]
    assert found == pytest.approx({"n": 7, "hits": sum(right), "accuracy": sum(right) / 7, "loss": loss}, rel=1e-5)


def test_viewpoint_extrapolation_is_the_difference_of_the_two_accuracies():
    config = tiny("gap")
    data = sn.load_data(config)
    params, _ = sn.train(config, data=data)
    with sn.Runner(1) as runner:
        found = sn.evaluate_viewpoint_extrapolation(params, data, config, runner)
        for name in ("familiar", "held_out"):
            one = sn.evaluate(params, data[name], config, runner)
            assert [found[name + end] for end in ("", "_loss", "_per_class")] == [
                one[key] for key in ("accuracy", "loss", "per_class")]
            assert np.mean(one["per_class"]) == pytest.approx(one["accuracy"])            # as many images of each class
    assert found["drop"] == found["familiar"] - found["held_out"]


@pytest.mark.parametrize("split", ["azimuth", "elevation"])
def test_accuracy_at_each_angle_of_the_test_images_by_hand(split, monkeypatch):
    """Familiar ones at 10 and 20 degrees, held-out ones at 90: 1 of 2, 2 of 2 and 0 of 1 right; the other angle does
    not count. The classes are 0 and 2, 1 and 3, 4; only 2 and 4 are taken for others"""
    other = {"azimuth": "elevations", "elevation": "azimuths"}[split]
    data = {"familiar": {split + "s": np.array([10, 20, 10, 20]), other: np.arange(4), "labels": np.arange(4)},
            "held_out": {split + "s": np.array([90]), other: np.zeros(1), "labels": np.array([4])}}
    said = {4: [0, 1, 4, 3], 1: [0]}

    def fake_evaluate(params, samples, *_):
        return {"accuracy": 0.5, "loss": 1.0, "per_class": [], "predictions": np.array(said[len(samples["labels"])])}

    monkeypatch.setattr(sn, "evaluate", fake_evaluate)
    found = sn.evaluate_viewpoint_extrapolation({}, data, tiny(split=split), None)
    assert found["sweep"]["angles"] == [10, 20, 90] and found["sweep"]["accuracy"] == [0.5, 1.0, 0.0]
    nan = math.nan
    np.testing.assert_array_equal(
        found["sweep"]["per_class"], [[1, nan, 0, nan, nan], [nan, 1, nan, 1, nan], [nan, nan, nan, nan, 0]])


def test_with_the_standard_task_the_sweep_leaves_the_training_images_out(monkeypatch):
    data = {"familiar": {"azimuths": np.array([0, 20]), "labels": np.array([0, 1])},
            "held_out": {"azimuths": np.array([20, 40.5]), "labels": np.array([1, 2])}}
    monkeypatch.setattr(sn, "evaluate", lambda params, samples, *_: {
        "accuracy": 1.0, "loss": 1.0, "per_class": [], "predictions": np.array([0, 1])})
    found = sn.evaluate_viewpoint_extrapolation({}, data, tiny(data="toys", split="toys"), None)
    assert found["sweep"]["angles"] == [20, 40.5] and found["sweep"]["accuracy"] == [0, 0]
    found = sn.evaluate_viewpoint_extrapolation({}, data, tiny(data="toys"), None)
    assert found["sweep"]["angles"] == [0, 20, 40.5] and found["sweep"]["accuracy"] == [1, 0.5, 0]


# ---------------------------------------------------------------- the nearest neighbour

def nearest_by_loops(images, known, labels):
    """-> squared distance to the nearest known image of each class (n, 5), inf where there is none"""
    table = [[math.inf] * 5 for _ in images]
    for n, image in enumerate(images):
        for other, label in zip(known, labels):
            table[n][label] = min(table[n][label], sum((a - b) ** 2 for a, b in zip(image.ravel(), other.ravel())))
    return np.array(table)


def nearest_scores(known, labels, images):
    params = {"images": known.reshape(len(known), -1), "labels": np.asarray(labels)}
    return sn.forward(params, images, tiny("nearest"))[0]["scores"]


def test_nearest_by_loops(rng):
    """Of a few real images; a class that was never shown is never named"""
    data = sn.load_data(tiny(n_elev=2))
    rows, tests = rng.permutation(80)[:12], rng.permutation(20)[:4]
    known, labels = data["train"]["images"][rows].astype(float), data["train"]["labels"][rows]
    images = data["held_out"]["images"][tests].astype(float)
    labels = np.where(labels == 3, 1, labels)
    scores = nearest_scores(known, labels, images)
    np.testing.assert_allclose(scores, -nearest_by_loops(images, known, labels), rtol=1e-9)
    assert np.all(scores[:, 3] == -np.inf) and not np.any(scores.argmax(1) == 3)


def test_nearest_of_what_it_knows_and_of_ties(rng):
    """A known image has distance 0; at equal distances the first class is named"""
    known = rng.integers(0, 9, (3, 32, 32, 1)).astype(float)
    twin = known[[0, 1, 2, 0]]
    scores = nearest_scores(twin, [4, 1, 0, 2], known)
    assert scores.argmax(1).tolist() == [2, 1, 0]
    assert scores[0, 4] == scores[0, 2] == scores[1, 1] == scores[2, 0] == 0 and scores.max() == 0
    np.testing.assert_array_equal(scores, -nearest_by_loops(known, twin, [4, 1, 0, 2]))


def test_training_nearest_is_keeping_the_training_images(monkeypatch):
    monkeypatch.setattr(sn, "CHUNK", 30)
    config, seen = tiny("nearest"), []
    data = sn.load_data(config)
    params, history = sn.train(config, lambda *args: seen.append(args), data=data)
    assert np.array_equal(params["images"], data["train"]["images"].reshape(80, -1)) and not seen
    assert np.array_equal(params["labels"], data["train"]["labels"]) and params["images"].dtype == np.float32
    assert history == {"source": "shapes", "epochs": [], "seconds": 0.0, "steps": 0}


@pytest.mark.parametrize("threads", [1, 2])
def test_results_of_nearest_by_loops(threads):
    config = tiny("nearest", n_test_per_combo=1, threads=threads)
    data = sn.load_data(config)
    record, params = sn.run_one("nearest", config, data)
    for name in PARTS[1:]:
        distance = nearest_by_loops(data[name]["images"].astype(float), data["train"]["images"].astype(float),
                                    data["train"]["labels"])
        assert record[name] == (distance.argmin(1) == data[name]["labels"]).mean()
    assert len(record["sweep"]["accuracy"]) == 36 and record["history"] == {} and record["n_params"] == 0
    assert record["ms_per_step"] == 0


def test_nearest_on_smallnorb_compares_central_crops(tmp_path):
    write_norb(tmp_path, 60)
    config = tiny("nearest", data="smallnorb", norb_dir=str(tmp_path))
    data = sn.load_data(config)
    params, _ = sn.train(config, data=data)
    crops, = sn.prepared(data["train"], "smallnorb")
    assert np.array_equal(params["images"], crops["images"].reshape(len(crops["labels"]), -1))
    with sn.Runner(1) as runner:
        found = sn.evaluate(params, data["train"], config, runner)
    assert found["accuracy"] == 1


def test_nearest_gets_for_nothing_what_looks_as_in_training():
    """Cross, frame and T at held-out azimuths, in the gap's ranges: there a training image with other noise (0.6 of
    the accuracy is theirs). L and tripod are all that is left to tell."""
    config = sn.Config(data="shapes", model="nearest", baseline="none", train_azimuths="0:60", test_azimuths="180:240",
                       quiet=True)
    record, _ = sn.run_one("nearest", config)
    accuracy = dict(zip(sn.CLASS_NAMES, record["held_out_per_class"]))
    assert [accuracy[name] for name in ("cross", "frame", "T")] == [1, 1, 1] and record["familiar"] == 1
    assert accuracy["L"] + accuracy["tripod"] < 1 and record["held_out"] < 0.8


def test_flags_of_training_mean_nothing_to_nearest_alone(tmp_path):
    """but may be given where another network of the run trains"""
    alone, among = dict(model="nearest", baseline="none"), dict(baseline="nearest,gap")
    given = [f.name for f in sn.options(sn.Config) if f.metadata["group"] == "training" and f.name != "seed"]
    values = {"lr_schedule": "exponential", "loss": "spread", "checkpoint": str(tmp_path / "run.npz")}
    for name in [*given, "checkpoint"]:
        value = values.get(name, 0.75 if isinstance(getattr(sn.Config(), name), float) else 3)
        with pytest.raises(sn.InputError, match=f"{sn.flag_of(name)}: means nothing to --model nearest"):
            sn.check_config(sn.Config(**alone, **{name: value}))
        sn.check_config(sn.Config(**among, **{name: value}))
        sn.check_config(sn.Config(model="nearest", baseline="gap", **{name: value}))
    sn.check_config(sn.Config(**alone, data="shapes", seed=7, n_train_views=3, n_seeds=2, threads=1,
                              out_json=str(tmp_path / "r.json")))


@pytest.mark.parametrize("n_seeds, model", [*((1, model) for model in sn.MODELS), (2, "self-routing"), (2, "nearest")])
def test_every_network_as_the_only_baseline(tmp_path, n_seeds, model):
    """with settings of training given, a checkpoint, and resumed: what one network needs does not harm the other"""
    config = tiny(n_epochs=1, baseline=model, n_seeds=n_seeds, checkpoint=str(tmp_path / "run.npz"), stop_familiar=0.9,
                  **HEADS_TINY if model in sn.HEADS else {})
    for resume in False, True:
        results = sn.run_all(dataclasses.replace(config, resume=resume), lambda text: None)
        assert {record["label"] for record, _ in results} == {"caps", model}


def test_nearest_beside_others_has_no_checkpoint(tmp_path):
    """and resuming the others leaves it alone"""
    config = tiny(n_epochs=1, baseline="nearest,gap", checkpoint=str(tmp_path / "run.npz"), **HEADS_TINY)
    results = sn.run_all(config)
    assert [record["label"] for record, _ in results] == ["caps", "nearest", "gap"]
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == ["run.gap-1.npz", "run.npz"]
    again = sn.run_all(dataclasses.replace(config, resume=True))
    for (one, params), (other, same) in zip(results, again):
        assert_same(params, same)
        assert one["held_out"] == other["held_out"]
    (tmp_path / "first").mkdir()
    config = dataclasses.replace(tiny("nearest"), baseline="gap", checkpoint=str(tmp_path / "first" / "run.npz"))
    sn.run_all(dataclasses.replace(config, n_epochs=1))
    assert [path.name for path in (tmp_path / "first").iterdir()] == ["run.gap-1.npz"]


# ---------------------------------------------------------------- variants

VALUES = {"loss": "spread", "routing_grad": "detached", "no_coord_add": True, "final_lambda": 0.3, "uniform": True,
          "preset": "paper", "lambda_schedule": "official", "dropout": 0.5, "places": True, "head_types": 6}


def foreign_cases():
    """(setting, a value, networks of a run that it means nothing to, those that it means something to)"""
    for f in sn.options(sn.Config):
        if own := f.metadata.get("models"):
            yield f.name, VALUES.get(f.name, 5), [model for model in sn.MODELS if model not in own], own


@pytest.mark.parametrize("name, value, others, own", list(foreign_cases()), ids=str)
def test_settings_of_one_network_are_refused_without_it(name, value, others, own):
    """with any other, or any two; not beside a network that uses them, whichever is the first; and variants strip
    them"""
    words = f"{sn.flag_of(name)}: means nothing to --model "
    for model in others:
        for baseline in ("none", *others):
            with pytest.raises(sn.InputError, match=words + model):
                sn.check_config(sn.Config(model=model, baseline=baseline, **{name: value}))
        for user in own:
            for config in (sn.Config(model=model, baseline=user, **{name: value}),
                           sn.Config(model=user, baseline=model, **{name: value})):
                sn.check_config(config)
                found = sn.variants(config)
                assert getattr(found[user], name) == value
                assert found[model] == sn.Config(model=model, baseline="none")


@pytest.mark.parametrize("flags", [
    dict(model="cnn", routing_iters=3), dict(model="caps", baseline="none", width=4), dict(width=4, ablations=True),
    dict(model="dynamic", no_coord_add=True, baseline="none"), dict(model="gap", baseline="none", conv_types=4),
    dict(model="gap", baseline="em", preset="paper"), dict(model="nearest", baseline="none", loss="spread"),
    dict(trunk_channels=4, baseline="cnn"), dict(model="dynamic", baseline="dynamic-shared", dropout=0.1),
    dict(model="dynamic-shared", baseline="none", width=4), dict(model="dynamic", baseline="em", uniform=True)],
    ids=str)
def test_settings_that_mean_nothing(flags):
    with pytest.raises(sn.InputError, match="means nothing to --model .*; leave it out"):
        sn.check_config(sn.Config(**flags))


@pytest.mark.parametrize("flags", [
    dict(model="cnn", routing_iters=3, baseline="caps"), dict(width=4), dict(width=4, baseline="cnn,gap"),
    dict(model="dynamic", no_coord_add=True, baseline="caps"), dict(routing_iters=3, ablations=True),
    dict(no_coord_add=True, ablations=True), dict(model="em", baseline="none", routing_iters=3, loss="spread"),
    dict(model="gap", baseline="cnn", preset="paper"), dict(model="dense", baseline="self-routing", uniform=True),
    dict(model="self-routing", baseline="none", loss="xent", head_types=4)],
    ids=str)
def test_settings_that_mean_something_to_some_network_of_the_run(flags):
    sn.check_config(sn.Config(**flags))


SIZES = {"conv1_channels": 40, "primary_types": 40, "conv_types": 40, "conv2_types": 40, "trunk_channels": 9,
         "head_types": 60, "width": 9, "primary_kernel": 2, "preset": "paper"}


@pytest.mark.parametrize("f", [f for f in sn.options(sn.Config) if f.metadata["group"] == "network"
                               and f.name != "model"], ids=lambda f: f.name)
def test_what_a_setting_means_something_to_is_what_it_changes(f):
    """The lists of networks in Config against the networks themselves: the shapes of their weights, if it is a size,
    else the gradients"""
    for model in TRAINED:
        if f.name in SIZES:
            config = sn.for_model(tiny(), model) if f.name != "preset" else sn.Config(data="shapes", model=model)
            changed = dataclasses.replace(config, **{f.name: SIZES[f.name]})
            same = sn.param_shapes(config) == sn.param_shapes(changed)
        else:
            config = tiny(model, **{"routing_iters": 3} if f.name != "routing_iters" else {})
            changed = dataclasses.replace(config, **{f.name: VALUES.get(f.name, 9)})
            batch = {"images": np.random.default_rng(0).random((2, 32, 32, 1)), "labels": np.array([0, 1])}
            before, after = (sn.loss_and_grads(sn.init_params(c), batch, c)[1] for c in (config, changed))
            same = all(np.array_equal(before[name], after.get(name)) for name in before)
        assert same == (model not in f.metadata["models"]), (f.name, model)


@pytest.mark.parametrize("model", TRAINED)
def test_every_network_is_trained_otherwise_with_another_loss_and_with_shifts(model):
    weights = []
    for changes in *({"loss": loss} for loss in ("xent", "margin", "spread")), {"max_shift": 2}:
        params, history = sn.train(tiny(model, n_epochs=1, n_per_combo=1, batch_size=20, **changes))
        assert np.isfinite(history["epochs"][-1]["train_loss"])
        weights.append(sn.digest_of(params))
    assert len(set(weights[:3])) == 3 and weights[3] not in weights[:3]


def test_variants_keep_their_own_recipes_and_what_was_given():
    found = sn.variants(sn.Config(baseline="dynamic,gap", lr=0.5))
    assert list(found) == ["caps", "dynamic", "gap"] and all(config.lr == 0.5 for config in found.values())
    for name in "loss", "routing_iters":
        assert [getattr(config, name) for config in found.values()] == [sn.RECIPES[model][name] for model in found]
    assert {config.loss for config in sn.variants(sn.Config(baseline="dynamic,gap", loss="spread")).values()} == {
        "spread"}
    assert list(sn.variants(sn.Config(baseline="none"))) == ["caps"]
    found = sn.variants(sn.Config(ablations=True))
    assert found["full"] == sn.Config(baseline="none") and len(found) == len(sn.ABLATIONS) + 1
    full = sn.settings_of(found["full"])
    for label, changes in sn.ABLATIONS.items():
        differing = {name for name, value in sn.settings_of(found[label]).items() if value != full[name]}
        usual = {name for name, value in changes.items() if full[name] == value}
        assert differing == set(changes) - usual, label


@pytest.mark.parametrize("model", [model for model in sn.MODELS if model != "caps"])
def test_ablations_of_another_network_are_refused(model):
    with pytest.raises(sn.InputError, match="--ablations"):
        sn.check_config(sn.Config(model=model, ablations=True))


# ---------------------------------------------------------------- seeds

def test_several_seeds_are_the_single_runs():
    config = tiny(n_epochs=2, n_per_combo=1, baseline="gap", n_seeds=2, **HEADS_TINY)
    said = []
    results = sn.run_all(config, said.append)
    assert [(r["label"], r["seed"]) for r, _ in results] == [("caps", 1), ("gap", 1), ("caps", 2), ("gap", 2)]
    assert len(said) == 4 and all(f"{r['label']}, seed {r['seed']}: " in line for (r, _), line in zip(results, said))
    alone = sn.run_all(dataclasses.replace(config, n_seeds=1, seed=2))
    for (many, many_params), (one, one_params) in zip(results[2:], alone):
        assert_same(many_params, one_params)
        for run in many, one:
            assert run["history"].pop("seconds") and run.pop("ms_per_step") and run.pop("seconds_train")
            del run["peak_rss_mb"], run["config"]                                       # these ran in other processes
        assert many == one


def test_a_checkpoint_a_run(tmp_path):
    config = tiny(n_epochs=1, n_per_combo=1, baseline="gap", n_seeds=2, checkpoint=str(tmp_path / "run.npz"),
                  **HEADS_TINY)
    sn.run_all(config, lambda text: None)
    names = ["run.caps-2.npz", "run.gap-1.npz", "run.gap-2.npz", "run.npz"]
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == names


# ---------------------------------------------------------------- summaries

def record(label, seed, held_out, familiar=1.0, history=((0.5, 0.4), (1.0, 0.6)), **changes):
    return {"label": label, "seed": seed, "held_out": held_out, "familiar": familiar, "drop": familiar - held_out,
            "seconds_train": 1.0, "ms_per_step": 2.0, "n_params": 10,
            "sweep": {"angles": list(sn.SWEEP), "accuracy": [held_out] * 36},
            "familiar_per_class": [1.0] * 5, "held_out_per_class": [held_out] * 5,
            "history": {"familiar": [f for f, _ in history], "held_out": [h for _, h in history]}} | changes


def test_summary_by_hand():
    records = [record("caps", 0, 0.8), record("gap", 0, 0.7), record("caps", 1, 0.6), record("gap", 1, 0.7)]
    summary = sn.summarize(records)
    mean, half = summary["caps"]["held_out"]
    assert np.isclose(mean, 0.7) and np.isclose(half, 12.7062 * np.std([0.8, 0.6], ddof=1) / math.sqrt(2))
    mean, half = summary["gap"]["difference"]                                              # 0.1 and -0.1
    assert np.isclose(mean, 0) and np.isclose(half, 12.7062 * 0.1 * math.sqrt(2) / math.sqrt(2))
    assert np.isclose(summary["gap"]["matched"][0], 0.6) and np.isclose(summary["gap"]["matched_difference"][0], -0.1)
    assert "difference" not in summary["caps"] and math.isnan(sn.mean_and_interval([0.5])[1])
    summary = sn.summarize([record("caps", 0, 0.8, history=((0.9, 0.1),)), record("gap", 0, 0.7)])
    assert "matched" not in summary["gap"]                                             # never as good on familiar views


def test_differences_are_the_first_networks_minus_the_others_paired_by_seed():
    """0.9 - 0.6 and 0.8 - 0.7: mean 0.2, standard deviation 0.1 sqrt(2)"""
    records = [record(label, seed, held_out, history=((1.0, held_out - 0.05),))
               for seed, held_outs in enumerate(((0.9, 0.6), (0.8, 0.7)))
               for label, held_out in zip(("caps", "cnn"), held_outs)]
    row = sn.summarize(records)["cnn"]
    assert row["difference"] == pytest.approx((0.2, 12.7062 * 0.1), rel=1e-5)
    assert row["seeds"] == [0, 1]
    assert row["sweep"]["angles"] == list(sn.SWEEP) and row["sweep"]["accuracy"] == pytest.approx([0.65] * 36)
    assert row["matched"][0] == pytest.approx(0.8) and row["matched_difference"][0] == pytest.approx(0.15)


def test_differences_are_of_the_seeds_that_both_networks_have():
    """in whatever order they come; drops are 1 minus held-out here, so that theirs have the other sign"""
    records = [record("caps", 0, 0.2), record("caps", 1, 0.9), record("caps", 2, 0.8),
               record("gap", 2, 0.6), record("gap", 1, 0.6)]
    row = sn.summarize(records)["gap"]
    assert row["seeds"] == [2, 1] and (row["n_pairs"], row["n_matched"]) == (2, 2)
    assert row["difference"] == pytest.approx((0.25, 12.7062 * 0.05), rel=1e-5)
    assert row["drop_difference"] == pytest.approx((-0.25, 12.7062 * 0.05), rel=1e-5)
    assert "difference" not in sn.summarize([record("caps", 0, 0.2), record("gap", 1, 0.2)])["gap"]


def test_what_learns_nothing_is_paired_with_every_seed():
    records = [record("caps", 0, 0.8), record("caps", 1, 0.6), record("nearest", 0, 0.5, n_params=0)]
    row = sn.summarize(records)["nearest"]
    assert row["difference"] == pytest.approx((0.2, 12.7062 * 0.1), rel=1e-5) and row["seeds"] == [0]
    several = [*records, record("nearest", 1, 0.7, n_params=0)]                         # of shapes: seeds of the noise
    assert sn.summarize(several)["nearest"]["difference"][0] == pytest.approx(0.1)


def test_matched_accuracy_is_of_the_seeds_that_matched():
    """Looks of seed 0: never as good as the other's 0.95; of seed 1 at the second, held-out 0.6 against 0.5"""
    records = [record("caps", 0, 0.8, history=((0.5, 0.3), (0.9, 0.8))), record("caps", 1, 0.8),
               *(record("gap", seed, 0.5, familiar=0.95) for seed in (0, 1))]
    row = sn.summarize(records)["gap"]
    assert (row["n_pairs"], row["n_matched"]) == (2, 1) and row["matched"][0] == pytest.approx(0.6)
    assert row["matched_difference"][0] == pytest.approx(0.1)


def test_accuracies_by_class_are_means_over_the_seeds():
    """of each class alone; a class without images stays nan, and in the file null"""
    records = [record("caps", seed, 0.5, held_out_per_class=per_class)
               for seed, per_class in enumerate(([1.0, 0.5, 0.0, 0.25, math.nan], [0.5, 0.5, 1.0, 0.75, math.nan]))]
    summary = sn.summarize([*records, record("gap", 0, 0.9), record("gap", 1, 0.7)])
    *known, last = summary["caps"]["held_out_per_class"]
    assert known == [0.75, 0.5, 0.5, 0.5] and math.isnan(last)
    assert summary["gap"]["held_out_per_class"] == pytest.approx([0.8] * 5)


def test_the_report_shows_accuracy_by_class_under_its_names(tmp_path):
    path, said = tmp_path / "r.json", []
    per_class = [1.0, 0.25, 0.5, 0.75, math.nan]
    sn.report(tiny(out_json=str(path)), [record("caps", 0, 0.5, held_out_per_class=per_class)], said.append)
    heads = [k for k, line in enumerate(said) if "by class" in line]
    assert len(heads) == 1 and said[heads[0]].split("\n")[1].split() == list(sn.CLASS_NAMES)
    assert said[heads[0] + 1].split() == ["caps", "1.000", "0.250", "0.500", "0.750", "nan"]
    written = json.loads(path.read_text())
    assert written["held_out_per_class"] == [1.0, 0.25, 0.5, 0.75, None]
    sn.report(tiny(out_json=str(path)), [record("caps", 0, 0.5), record("caps", 1, 0.7)], said.append)
    written = json.loads(path.read_text())
    assert written["summary"]["caps"]["held_out_per_class"] == [0.6] * 5 and len(written["runs"]) == 2
    said.clear()
    sn.report(tiny(data="smallnorb"), [record("caps", 0, 0.5)], said.append)
    assert any(line.split("\n")[-1].split() == list(sn.NORB_NAMES) for line in said)


def test_matched_familiar_by_hand():
    caps = record("caps", 0, 0.8, history=((0.7, 0.3), (0.95, 0.5), (1.0, 0.8)))
    assert sn.at_matched_familiar(caps, record("gap", 0, 0.7, familiar=0.95)) == 0.5
    assert sn.at_matched_familiar(caps, record("gap", 0, 0.7, familiar=0.96)) == 0.8


# ---------------------------------------------------------------- sweeps

def test_azimuth_sweep_counts_right_answers_at_each_azimuth(monkeypatch):
    """A network that is right at azimuths below 180 only, whatever the image"""
    def fake_evaluate(params, views, *args, **kwargs):
        right = views["azimuths"] < 180
        return {"predictions": np.where(right, views["labels"], (views["labels"] + 1) % 5)}

    monkeypatch.setattr(sn, "evaluate", fake_evaluate)
    right = [0, 1, 1, 1, 0, 0]
    expected = {"angles": [350, 0, 10, 170, 180, 350], "accuracy": right, "per_class": [[value] * 5 for value in right]}
    assert sn.azimuth_sweep({}, tiny(), None, [350, 0, 370, 170, 180, -10]) == expected


@pytest.mark.parametrize("azimuths", [[0, 50, 100, 150], [200, 330], [20, 100]], ids=PARTS[1:] + ("others",))
def test_the_sweep_has_its_own_noise_on_the_elevations_of_the_run(monkeypatch, azimuths):
    """also at the very views of the test sets"""
    seen = []

    def keep(params, views, *args, **kwargs):
        seen.append(views)
        return {"predictions": views["labels"]}

    monkeypatch.setattr(sn, "evaluate", keep)
    config, data = tiny(n_elev=2), sn.load_data(tiny(n_elev=2))
    sn.azimuth_sweep({}, config, None, azimuths)
    views, = seen
    assert set(views["elevations"]) == {30, 70}
    assert len(views["labels"]) == 5 * len(azimuths) * 2 * config.n_test_per_combo
    sn.azimuth_sweep({}, sn.changed(config, seed=config.seed + 1), None, azimuths)
    assert not np.array_equal(seen.pop()["images"], views["images"])                    # another seed's
    pool = np.concatenate([views["images"], *(data[name]["images"] for name in PARTS)]).reshape(-1, 1024)
    assert len(np.unique(pool, axis=0)) == len(pool)


@pytest.mark.parametrize("model", ["caps", "self-routing", "cnn", "nearest"])
def test_sweep_of_real_networks(model):
    config = tiny(model)
    params, _ = sn.train(config)
    with sn.Runner(1) as runner:
        sweep = sn.azimuth_sweep(params, config, runner, range(0, 360, 90))
    assert sweep["angles"] == [0, 90, 180, 270] and len(sweep["accuracy"]) == 4
    assert all(0 <= accuracy <= 1 for accuracy in sweep["accuracy"])


def test_distance_to_the_training_range():
    config = sn.Config(train_azimuths="0:60")
    distances = [sn.distance_to_training(azimuth, config) for azimuth in (0, 60, 90, 210, 220, 350)]
    assert distances == [0, 0, 30, 150, 140, 10]
    config = sn.Config(train_azimuths="290:420")
    assert [sn.distance_to_training(azimuth, config) for azimuth in (0, 60, 61, 280)] == [0, 0, 1, 10]
    config = sn.Config(split="elevation", train_elevations="30:40")
    assert [sn.distance_to_training(elevation, config) for elevation in (20, 30, 35, 45, 70)] == [10, 0, 0, 5, 30]


def test_gap_table_by_hand():
    config, accuracy = sn.Config(train_azimuths="0:60"), [0.0] * 36
    accuracy[9], accuracy[33] = 1.0, 0.4                                    # azimuths 90 and 330: 30 degrees away
    sweep = {"angles": list(range(0, 360, 10)), "accuracy": accuracy}
    table = sn.gap_table(config, {"caps": {"sweep": sweep}})
    assert list(table) == ["caps"] and list(table["caps"]) == [0, 30, 60, 90, 120, 150]
    assert np.isclose(table["caps"][30], 1.4 / 6) and table["caps"][0] == 0
    sweep = {"angles": [300, 0, 60, 280, 160], "accuracy": [1.0, 0.5, 0.25, 0.75, 0.0]}         # the paper's split
    assert sn.gap_table(sn.Config(), {"gap": {"sweep": sweep}})["gap"] == {0: 0.75, 30: 0.5, 120: 0.0}
    sweep = {"angles": [30, 40, 45, 70], "accuracy": [1.0, 0.5, 0.25, 0.75]}
    assert sn.gap_table(sn.Config(split="elevation"), {"gap": {"sweep": sweep}})["gap"] == {0: 0.75, 5: 0.25, 30: 0.75}
