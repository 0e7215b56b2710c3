"""More of the second experiment's runs: the training loop written out, what must not matter, interrupted runs, bad input."""
import dataclasses
import json
import sys

import numpy as np
import pytest
import smallnorb_novel_viewpoint as sn
from conftest import assert_same
from smallnorb_toy import TINY, flags_of, tiny
from test_smallnorb_files import write_norb

PARTS = ("train", "familiar", "held_out")


def without_seconds(history):
    return {**history, "seconds": 0}


@pytest.fixture(scope="module")
def reference():
    """The toy run that others must equal: 2 epochs of 2 batches of 3 shards"""
    return sn.train(TINY)


# ---------------------------------------------------------------- the training loop

@pytest.mark.parametrize("changes", [{}, dict(loss="spread", average=0.4, lr_schedule="exponential"),
                                     dict(model="cnn-pool", max_shift=2)], ids=str)
def test_train_is_decay_then_adam_with_the_scheduled_rate(changes):
    """The loop written out: 3 epochs of 2 batches; weights shrink by lr x decay before Adam's step, biases do not"""
    config = tiny(n_epochs=3, weight_decay=2.0, **changes)
    data, params = sn.load_data(config), sn.init_params(config)
    first = {name: p.copy() for name, p in params.items()}
    m, v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    mean, step = dict(first), 0
    for epoch in range(3):
        samples, = sn.epoch_samples(data, epoch, config)
        for rows in (slice(0, 40), slice(40, 80)):
            _, grads = sn.loss_and_grads(params, sn.to_batch(samples, rows), config)
            lr = config.lr * ((1 + np.cos(np.pi * step / 6)) / 2 if config.lr_schedule == "cosine" else 0.96 ** (step / 2000))
            step += 1
            for name, g in grads.items():
                m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.999 * v[name] + 0.001 * g ** 2
                params[name] = params[name] * (1 - lr * 2 * (params[name].ndim > 1)) - lr * (m[name] / (1 - 0.9 ** step)) / (
                    np.sqrt(v[name] / (1 - 0.999 ** step)) + 1e-8)
                mean[name] = mean[name] + (params[name] - mean[name]) * (1 - min(config.average, step / (step + 9)))
    trained, _ = sn.train(config, data=data)
    for name, expected in (mean if config.average else params).items():
        assert np.abs(trained[name] - expected).mean() < 2e-3 * np.abs(expected - first[name]).mean(), name


def test_history_says_what_happened(reference):
    params, history = reference
    assert history["steps"] == 4 and history["seconds"] > 0
    assert [(epoch["epoch"], epoch["step"]) for epoch in history["epochs"]] == [(1, 2), (2, 4)]
    assert json.loads(json.dumps(history)) == history
    with sn.Runner(1) as runner:
        found = sn.evaluate_viewpoint_extrapolation(params, sn.load_data(TINY), TINY, runner)
    assert {name: history["epochs"][-1][name] for name in found} == found


@pytest.mark.parametrize("changes", [
    dict(routing_grad="detached"), dict(em_iters=1), dict(em_iters=3), dict(loss="spread"), dict(no_coord_add=True),
    dict(final_lambda=1.0), dict(weight_decay=0.0), dict(dropout=0.0), dict(lr_schedule="constant"), dict(lr=1e-3),
    dict(average=0.9), dict(max_shift=1), dict(batch_size=30), dict(train_azimuths="0:100")], ids=str)
def test_every_setting_has_an_effect(reference, changes):
    assert not np.array_equal(sn.train(tiny(**changes))[0]["conv_W"], reference[0]["conv_W"])


def test_other_seed_other_bits_and_global_random_numbers_are_left_alone(reference):
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    params, _ = sn.train(TINY)
    assert np.random.random() == expected
    assert_same(params, reference[0])
    other, _ = sn.train(tiny(seed=2))
    assert not any(np.array_equal(other[name], params[name]) for name in params)


def test_the_test_images_do_not_matter_unless_training_stops_by_them(reference):
    data = sn.load_data(TINY)
    for name in PARTS[1:]:
        data[name] = data[name] | {"images": 0 * data[name]["images"], "labels": data[name]["labels"][::-1]}
    assert_same(sn.train(TINY, data=data)[0], reference[0])


def test_stopping_at_familiar_accuracy_keeps_the_weights_so_far(tmp_path):
    """0.01 is reached at once: one epoch. A run that stopped stays so."""
    config = tiny(stop_familiar=0.01, lr_schedule="constant", checkpoint=str(tmp_path / "run.npz"))
    params, history = sn.train(config)
    assert history["steps"] == 2 and len(history["epochs"]) == 1
    assert_same(params, sn.train(tiny(n_epochs=1, lr_schedule="constant"))[0])
    again, same = sn.train(dataclasses.replace(config, resume=True))
    assert_same(again, params)
    assert same == history


def test_stopping_looks_at_the_familiar_views_of_each_epoch(monkeypatch):
    """Familiar accuracies 0.3, 0.5, 0.7 stop at the third look for 0.6, held-out ones of 0.9 do not"""
    looks = []

    def found(*args):
        looks.append(1)
        return {"familiar": 0.1 + 0.2 * len(looks), "held_out": 0.9, "drop": 0.0, "familiar_loss": 1.0, "held_out_loss": 1.0}

    monkeypatch.setattr(sn, "evaluate_viewpoint_extrapolation", found)
    _, history = sn.train(tiny(model="cnn", n_epochs=50, stop_familiar=0.6))
    assert [epoch["epoch"] for epoch in history["epochs"]] == [1, 2, 3] and history["steps"] == 6


# ---------------------------------------------------------------- interrupted runs

@pytest.mark.parametrize("average", [0.0, 0.8])
@pytest.mark.parametrize("at", [1, 3])
def test_stopped_in_the_middle_of_an_epoch_and_resumed_is_never_stopped(tmp_path, average, at):
    config = tiny(average=average, checkpoint=str(tmp_path / "run.npz"), resume=True)
    whole, whole_history = sn.train(tiny(average=average))

    def power_cut(step, params, terms):
        if step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sn.train(config, power_cut, 1)
    steps = []
    params, history = sn.train(dataclasses.replace(config, threads=2), lambda step, *_: steps.append(step), 1)
    assert steps == ([0, 1, 2, 3, 4] if at == 1 else [2, 3, 4])
    assert_same(params, whole)
    assert without_seconds(history) == without_seconds(whole_history)


def test_a_checkpoint_holds_the_weights_and_their_mean(tmp_path, reference):
    path = tmp_path / "run.npz"
    mean, _ = sn.train(tiny(average=0.8, checkpoint=str(path)))
    params, adam_m, adam_v, average, meta = sn.load_checkpoint(path)
    assert_same(params, reference[0])
    assert_same(average, mean)
    assert adam_m.keys() == adam_v.keys() == params.keys() and meta["step"] == 4 and all(v.min() >= 0 for v in adam_v.values())
    assert {name: value for name, value in meta["config"].items() if name in ("seed", "average", "em_iters")} == dict(
        seed=1, average=0.8, em_iters=2)
    with pytest.raises(sn.InputError, match="another experiment"):
        sn.config_of({"config": meta["config"] | {"routing_iters": 3}}, path)


SPOILS = {"empty": lambda p: p.write_bytes(b""), "half": lambda p: p.write_bytes(p.read_bytes()[:9000]),
          "flipped": lambda p: p.write_bytes(p.read_bytes()[:5000] + b"?" + p.read_bytes()[5001:]),
          "another file": lambda p: np.savez(p, a=np.zeros(3)), "without the mean": lambda p: strip(p, "average/class_W")}


def strip(path, name):
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files if key != name}
    np.savez(path, **arrays)


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_is_not_a_whole_checkpoint_is_refused_in_one_line(tmp_path, spoil):
    path = tmp_path / "run.npz"
    sn.train(tiny(n_epochs=1, checkpoint=str(path)))
    SPOILS[spoil](path)
    before = path.read_bytes()
    with pytest.raises(sn.InputError, match="run.npz") as error:
        sn.train(tiny(n_epochs=1, checkpoint=str(path), resume=True))
    assert "\n" not in str(error.value) and path.read_bytes() == before


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoint(tmp_path, monkeypatch, bad):
    path, calls, good = tmp_path / "run.npz", [], sn.loss_and_grads

    def goes_wrong(*args):
        calls.append(1)
        terms, grads = good(*args)
        return {**terms, "loss": bad if len(calls) > 8 else terms["loss"]}, grads              # 3 shards a step: in the third

    monkeypatch.setattr(sn, "loss_and_grads", goes_wrong)
    with pytest.raises(sn.InputError, match=f"loss is {bad} at step 3.*last good state is in .*run.npz"):
        sn.train(tiny(checkpoint=str(path)))
    params, *_, meta = sn.load_checkpoint(path)
    assert meta["step"] == 2 and all(np.isfinite(p).all() for p in params.values())


def test_weights_that_are_not_finite_never_reach_the_checkpoint(tmp_path, monkeypatch):
    path, steps, good = tmp_path / "run.npz", [], sn.adam_step

    def goes_wrong(params, *args):
        good(params, *args)
        steps.append(1)
        if len(steps) == 4:                                                    # after the last step: no loss would show it
            params["class_beta_a"][3] = np.nan

    monkeypatch.setattr(sn, "adam_step", goes_wrong)
    with pytest.raises(sn.InputError, match="diverged"):
        sn.train(tiny(checkpoint=str(path)))
    assert sn.load_checkpoint(path)[-1]["step"] == 2


@pytest.mark.parametrize("changes", [dict(lr=0.3, lr_schedule="constant"), dict(final_lambda=1e4, lr=0.03),
                                     dict(em_iters=4, loss="spread")], ids=str)
def test_a_hundred_rough_steps_stay_finite(changes):
    params, history = sn.train(tiny(n_epochs=60, batch_size=20, n_per_combo=2, **changes))
    assert history["steps"] == 120 and all(np.isfinite(p).all() and p.dtype == np.float32 for p in params.values())


# ---------------------------------------------------------------- comparing networks

def test_mean_and_interval_by_hand():
    assert sn.mean_and_interval([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5, 3.182 * 1.2909944 / 2), rel=1e-5)
    mean, half = sn.mean_and_interval([0.5] * 29 + [1.5])
    assert (mean, half) == pytest.approx((16 / 30, 1.96 * (1 / 30) ** 0.5 / 30 ** 0.5), rel=1e-5)


def test_differences_are_the_first_networks_minus_the_others_paired_by_seed():
    """0.9 - 0.6 and 0.8 - 0.7: mean 0.2, standard deviation 0.1 sqrt(2)"""
    records = [{"label": label, "seed": seed, "familiar": 1.0, "held_out": held_out, "drop": 1 - held_out, "seconds": 1.0,
                "ms_per_step": 1.0, "n_params": 9, "sweep": None, "history": [{"familiar": 1.0, "held_out": held_out - 0.05}]}
               for seed, held_outs in enumerate(((0.9, 0.6), (0.8, 0.7))) for label, held_out in zip(("caps", "cnn"), held_outs)]
    row = sn.summarize(records)["cnn"]
    assert row["difference"] == pytest.approx((0.2, 12.706 * 0.1), rel=1e-9) and row["seeds"] == [0, 1] and "sweep" not in row
    assert row["matched"][0] == pytest.approx(0.8) and row["matched_difference"][0] == pytest.approx(0.15)


def test_variants_keep_their_own_recipes_and_what_was_given():
    found = sn.variants(sn.Config(baseline="cnn,cnn-pool", lr=0.5))
    assert list(found) == ["caps", "cnn", "cnn-pool"] and all(config.lr == 0.5 for config in found.values())
    assert [sn.resolved(config).weight_decay for config in found.values()] == [
        sn.RECIPES[model]["weight_decay"] for model in found]
    assert list(sn.variants(sn.Config(baseline="none"))) == ["caps"]
    found = sn.variants(sn.Config(ablations=True))
    assert found["full"] == sn.Config() and len(found) == len(sn.ABLATIONS) + 1
    for label, changes in sn.ABLATIONS.items():
        differing = {name for name, value in dataclasses.asdict(found[label]).items() if value != getattr(found["full"], name)}
        assert differing <= set(changes) and sn.resolved(found[label]) != sn.resolved(found["full"]), label


def test_azimuth_sweep_counts_right_answers_at_each_azimuth(monkeypatch):
    """A network that is right at azimuths below 180 only, whatever the image"""
    def fake_evaluate(params, views, config, runner):
        right = views["azimuths"] < 180
        return {"predictions": np.where(right, views["labels"], (views["labels"] + 1) % 5)}

    monkeypatch.setattr(sn, "evaluate", fake_evaluate)
    assert sn.azimuth_sweep({}, tiny(), None, [350, 0, 370, 170, 180, -10]) == [0, 1, 1, 1, 0, 0]


def test_the_sweep_has_its_own_noise_on_the_elevations_of_the_run(monkeypatch):
    seen = []

    def keep(params, views, config, runner):
        seen.append(views)
        return {"predictions": views["labels"]}

    monkeypatch.setattr(sn, "evaluate", keep)
    config, data = tiny(n_elev=2), sn.load_data(tiny(n_elev=2))
    sn.azimuth_sweep({}, config, None, [0.0, 100.0])
    views, = seen
    assert set(views["elevations"]) == {30, 70} and len(views["labels"]) == 5 * 2 * 2 * config.n_test_per_combo
    pool = np.concatenate([views["images"], *(data[name]["images"] for name in PARTS)]).reshape(-1, 1024)
    assert len(np.unique(pool, axis=0)) == len(pool)


# ---------------------------------------------------------------- the command line

@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """cli(*flags) -> exit code, stdout, stderr of the experiment in this process, in tmp_path"""
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        monkeypatch.setattr(sys, "argv", ["smallnorb_novel_viewpoint.py", *map(str, flags)])
        capsys.readouterr()
        code = 0
        try:
            sn.run_cli(sn.main)
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("config", [TINY, sn.Config(), sn.Config(no_coord_add=True, train_azimuths="290:420", lr=0.25, seed=7)],
                         ids=["toy", "default", "some"])
def test_flags_make_the_settings(config):
    parser = sn.Parser()
    sn.add_config_flags(parser)
    assert sn.config_from_args(parser.parse_args(flags_of(config))) == config


def test_results_are_those_of_the_checkpoint(cli, tmp_path):
    """Evaluated anew from the file, through the API"""
    assert cli(*flags_of(TINY), "--out-json", "a.json", "--checkpoint", "a.npz") == (0, "", "")
    results = json.loads((tmp_path / "a.json").read_text())
    params, *_, meta = sn.load_checkpoint(tmp_path / "a.npz")
    config = sn.config_of(meta, "a.npz")
    with sn.Runner(2) as runner:
        found = sn.evaluate_viewpoint_extrapolation(params, sn.load_data(config), config, runner)
        sweep = sn.azimuth_sweep(params, config, runner)
    run, = results["runs"]
    assert {name: run[name] for name in found} == found and run["sweep"] == sweep and run["n_params"] == sn.n_params(params)
    assert run.keys() == {"label", "seed", "n_params", *found, "seconds", "ms_per_step", "sweep", "history"}
    assert run["ms_per_step"] == pytest.approx(1e3 * run["seconds"] / 4)
    assert results["config"] == dataclasses.asdict(tiny(out_json="a.json", checkpoint="a.npz"))
    assert results["summary"]["caps"]["held_out"][0] == found["held_out"] and set(results["versions"]) == {"python", "numpy"}


@pytest.mark.parametrize("model", sn.MODELS)
def test_every_network_on_smallnorb_and_both_splits(cli, tmp_path, model):
    write_norb(tmp_path, 90)
    config = tiny(model=model, n_epochs=1)
    norb, elevation = ["--data", "smallnorb", "--norb-dir", tmp_path], ["--split", "elevation"]
    for flags in norb, elevation, norb + elevation:
        assert cli(*flags_of(config), *flags, "--out-json", "r.json") == (0, "", "")
        run, = json.loads((tmp_path / "r.json").read_text())["runs"]
        assert run["sweep"] is None and 0 <= run["held_out"] <= 1


BAD = {
    "--train-azimuths 0:210": "overlap", "--test-azimuths 340:380": "overlap", "--train-azimuths 150:0": "--train-azimuths 150:0",
    "--test-azimuths 200": "--test-azimuths 200", "--elevations nan:70": "--elevations", "--train-azimuths 0:360": "0:360",
    "--split elevation --train-elevations 30:50": "overlap", "--baseline resnet": "resnet", "--baseline cnn,": "--baseline",
    "--out-json no/folder/x.json": "no/folder", "--out-json folder": "folder", "--checkpoint no/folder/x.npz": "no/folder",
    "--checkpoint folder": "folder", "--resume": "--checkpoint", "--resume --checkpoint other.npz": "seed 5, now 1",
    "--checkpoint other.npz": "seed 5, now 1", "--resume --checkpoint torn.npz": "torn.npz", "--data smallnorb": "--norb-dir",
    "--data smallnorb --norb-dir nowhere": "nowhere", "--data smallnorb --norb-dir folder": "smallnorb-5x46789", "--lr inf": "--lr",
    "--lr 1e30 --lr-schedule constant --n-epochs 9 --model cnn": "diverged; lower --lr", "--max-shift 9": "--max-shift",
    "--dropout 1": "--dropout", "--final-lambda 0": "--final-lambda", "--n-seeds 0": "--n-seeds", "--model vit": "--model",
    "--n-epochs many": "--n-epochs", "--no-such-flag": "--no-such-flag"}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line_and_leaves_no_file(cli, tmp_path, flags):
    (tmp_path / "folder").mkdir()
    if "other" in flags or "torn" in flags:
        sn.train(tiny(seed=5, checkpoint=str(tmp_path / "other.npz")))
        (tmp_path / "torn.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:5000])
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    extra = [] if "out-json" in flags else ["--out-json", "result.json"]
    code, _, stderr = cli(*flags_of(TINY), *extra, *flags.split())
    assert code == 2 and stderr.startswith("error: ") and BAD[flags] in stderr
    assert stderr.count("\n") == 1 and stderr.endswith("\n") and "Traceback" not in stderr
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_a_run_that_fails_in_another_process_is_one_line_too(cli, tmp_path):
    config = tiny(model="cnn", lr=1e30, lr_schedule="constant", n_epochs=9, n_seeds=2, out_json="r.json")
    code, _, stderr = cli(*flags_of(config))
    assert code == 2 and stderr.startswith("error: ") and "diverged" in stderr and stderr.count("\n") == 1
    assert not (tmp_path / "r.json").exists()


# ---------------------------------------------------------------- known to be wrong

def test_results_of_one_seed_are_json(cli, tmp_path):
    assert cli(*flags_of(TINY), "--out-json", "a.json")[0] == 0
    json.loads((tmp_path / "a.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_run_that_stops_early_gives_its_last_snapshot():
    seen = []
    params, _ = sn.train(tiny(stop_familiar=0.01), lambda step, params, terms: seen.append((step, params)))
    assert [step for step, _ in seen] == [0, 2]
    assert_same(seen[-1][1], params)


def test_a_longer_spread_loss_run_is_another_run(tmp_path):
    config = tiny(loss="spread", lr_schedule="constant", checkpoint=str(tmp_path / "run.npz"))
    sn.train(config)
    try:
        longer, _ = sn.train(dataclasses.replace(config, n_epochs=4, resume=True))
    except sn.InputError:
        return
    assert_same(longer, sn.train(tiny(loss="spread", lr_schedule="constant", n_epochs=4))[0])


@pytest.mark.parametrize("model", ["cnn", "cnn-gap"])
def test_ablations_of_a_network_without_capsules_are_refused(model):
    with pytest.raises(sn.InputError, match="--ablations"):
        sn.check_config(sn.Config(model=model, ablations=True))
