"""The figures and the animation of smallNORB: what they show, by hand; their commands at toy size; bad input."""
import json
from types import SimpleNamespace

import smallnorb_novel_viewpoint as sn

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import assert_refused

import make_smallnorb_novel_viewpoint_gif as animation
import visualize_smallnorb_novel_viewpoint as looks

SHAPES = "--data shapes --preset small --n-epochs 1 --batch-size 30 --n-elev 1 --n-per-combo 1 --threads 1".split()
TOYS = ("--preset small --n-epochs 1 --n-train-toys 1 --train-azimuths 0:10 --test-azimuths 80:90 --n-test 60 "
        "--threads 1").split()


def noise_run(rng, model="matrix-capsnet", **given):
    """A Run of an untrained network on 80 images of noise in each split"""
    config = sn.Config(model=model, preset="small", threads=1, **given)
    data = sn.select_images(sn.Config(n_test=600))
    for part in (data[name] for name in ("train", "familiar", "novel")):
        rows = rng.permutation(len(part["labels"]))[:80]
        part |= {name: array[rows] for name, array in part.items()}
        part["images"] = rng.integers(0, 256, (80, 48, 48, 2), np.uint8)
    return looks.Run(model, config, config, sn.weights_of(sn.initial_state(config)), {"epochs": []}, data)


def test_every_figure_of_noise(rng):
    """Of a network that learned nothing; figures of results: test_core_results.py"""
    run = noise_run(rng)
    assert all(len(looks.FIGURES[name].draw(run).axes) > 10 for name in ("example_views", "routing"))
    for model in ("matrix-head", "capsnet", "capsnet-shared"):
        assert len(looks.FIGURES["routing"].draw(noise_run(rng, model)).axes) == 12
    of_one, of_two = (looks.draw_familiar_vs_novel(runs).axes[0] for runs in ([run], [run, run]))
    with sn.worker_threads(run.config) as workers:
        expected = sn.evaluate_test(run.params, run.data, run.config, workers)
    bars = [[bar.get_height() for bar in bars] for bars in of_one.containers if len(bars) == 6]
    assert [sum(heights[:5] * np.bincount(run.data[name]["labels"], minlength=5)) / 80 == pytest.approx(heights[5])
            for name, heights in zip(("familiar", "novel"), bars)] == [True, True]
    assert [heights[5] for heights in bars] == pytest.approx([expected["familiar"], expected["novel"]])
    assert f"drop {expected['drop']:.3f}" in of_two.get_xticklabels()[0].get_text()
    swept = looks.draw_azimuth_accuracy([run]).axes[0].containers[0].lines[0]
    assert swept.get_ydata() == pytest.approx(expected["sweep"]["accuracy"])
    assert len(looks.draw_elevation_strip(run).axes) == 5 * 9
    poses = looks.draw_pose_matrices(run, n=3)
    assert len(poses.axes) == 6 * 3 + 1 and poses.axes[3].images[0].get_array().shape == (4, 4)


def test_accuracy_by_distance_to_the_training_azimuths():
    """Training azimuths 300 to 400 go around the circle; both sides count, and 0 is the mean of the familiar ones"""
    sweep = {"angles": [0, 20, 40, 60, 80, 280, 300], "accuracy": [0.9, 0.8, 1.0, 0.6, 0.5, 0.4, 0.7]}
    found = looks.accuracy_by_distance({"config": {"train_azimuths": "300:400"}, "sweep": sweep})
    assert found == pytest.approx({0: 0.85, 20: 0.5, 40: 0.5})


def test_what_routing_assigns_by_hand():
    """Before routing and after it, each capsule weighted by its activation or length"""
    rng = np.random.default_rng(2)
    a, R = rng.random((1, 4, 4, 3)), rng.random((5, 48))
    steps = [SimpleNamespace(R=np.full((1, 1, 48), 0.2)), SimpleNamespace(R=R[None])]
    before, after = looks.routed_maps({"conv2_a": a, "class_steps": steps}, sn.Config())
    np.testing.assert_allclose(before, np.broadcast_to(0.2 * a[0].sum(-1), (5, 4, 4)))
    for j, y, x in ((0, 0, 0), (4, 2, 3)):                               # children are ordered (type, row, column)
        assert after[j, y, x] == pytest.approx(sum(R[j, t * 16 + y * 4 + x] * a[0, y, x, t] for t in range(3)))
    config = sn.Config(model="capsnet-shared")
    side = int(np.sqrt(len(sn.receptive_field_centers(config))))
    u, c = rng.random((1, side * side * 2, 8)), rng.random((5, side * side * 2))
    before, after = looks.routed_maps({"u": u, "c": [np.full((1, c.shape[1]), 0.2), c[None]]}, config)
    for j, y, x in ((0, 0, 0), (3, 1, 2)):                               # children are ordered (row, column, type)
        rows = [(y * side + x) * 2, (y * side + x) * 2 + 1]
        assert after[j, y, x] == pytest.approx(sum(c[j, k] * np.linalg.norm(u[0, k]) for k in rows))
        assert before[j, y, x] == pytest.approx(sum(0.2 * np.linalg.norm(u[0, k]) for k in rows))


def test_is_background_where_the_receptive_field_contains_no_toy():
    """A flat side of a toy is no background; and the receptive fields are those of the layers"""
    images = np.full((1, 32, 32, 2), 0.7)
    images[0, 10:14, 20:24] = 0.3                                                              # a flat toy
    for name, n in (("primary", 14), ("conv", 6), ("conv2", 4)):
        step, size = looks.RECEPTIVE_FIELDS[name]
        blank = looks.is_background(images, np.full((1, 1, 1, 2), 0.7), name, 0.01)[0]
        assert blank.shape == (n, n)
        for y, x in np.ndindex(n, n):
            meets = step * y < 14 and step * y + size > 10 and step * x < 24 and step * x + size > 20
            assert blank[y, x] == (not meets)
    centers = sn.receptive_field_centers(sn.Config(model="matrix-capsnet"))
    np.testing.assert_allclose(np.unique(centers[:, 0]), (step * np.arange(4) + (size - 1) / 2 - 15.5) / 16)
    shifted = looks.shift_images(images, np.array([[2, -3]]))
    assert np.array_equal(shifted[:, 2:, :-3], images[:, :-2, 3:]) and not shifted[:, :2].any()


def test_background_activity_by_hand(monkeypatch):
    """Of one type, activations are 1 over blank background and 0 elsewhere, of the other the same everywhere (but for
    conv2: 0, and 1); assignments that are uniform, then certain"""
    n, rng = 40, np.random.default_rng(3)
    images = rng.integers(0, 256, (n, 48, 48, 2)).astype(np.uint8)
    images[:, :, 24:] = images[:, 0, 0] = 200                                           # ground on the right
    samples = {"images": images, "labels": np.arange(n) % sn.N_CLASSES}

    def forward(params, shown, config):
        N = len(shown)
        out = {"a": np.full((N, 5), 0.5)}
        for name in looks.RECEPTIVE_FIELDS:
            blank = looks.is_background(shown, shown[:, -1:, -1:], name, 0.02)
            out[f"{name}_a"] = np.stack([blank, np.full(blank.shape, name == "conv2")], -1).astype(float)
        certain = np.zeros((N, 5, 32))
        certain[:, 1] = 1
        return out | {"class_steps": [SimpleNamespace(R=np.ones((N, 1, 32))), SimpleNamespace(R=certain)]}, None
    monkeypatch.setattr(sn, "forward", forward)
    found = looks.background_activity({}, SimpleNamespace(data={"familiar": samples}, config=sn.Config()), n)
    assert found["a"]["primary"] == found["a"]["conv"] == (0.5, 0.0)
    assert found["types"]["primary"] == found["types"]["conv"] == 1
    np.testing.assert_allclose(found["entropy"], [np.log(5), 0], atol=1e-9)


def test_a_view_of_another_toy_or_lighting_is_said():
    views = {"instances": np.array([0, 0]), "lightings": np.array([2, 2])}
    assert looks.other_view(views, 2) == looks.other_view({}) == ""
    assert looks.other_view(views | {"instances": np.array([3, 0])}, 1) == "toy 3, lighting 2"


def test_background_activity_of_a_network_trained_here(call, tmp_path):
    code, _, err = call(sn, looks.main, *TOYS, "--only", "background_activity", "--out-json", "r.json", "--outdir", "a")
    result = json.loads((tmp_path / "r.json").read_text("utf-8"), parse_constant=pytest.fail)
    assert (code, err) == (0, "") and result["background_activity"].keys() == {"before", "after"}
    assert (result["config"]["n_train_toys"], result["source"], result["n_params"]) == (1, "toys", 18_482)
    assert result["history"]["epoch"] == [1] and (tmp_path / "a" / "background_activity.png").exists()


@pytest.mark.parametrize("flags, n_frames", [                                           # toys: tests/test_originals.py
    ((*SHAPES, "--model", "cnn", "--snapshots", 2), 5), (("--load", sn.PRETRAINED[1]), 3)], ids=["trained", "loaded"])
def test_animation(call, tmp_path, flags, n_frames):
    """Of the start, the only step and three azimuths; of a loaded network, of these alone"""
    code, _, err = call(sn, animation.main, *flags, "--sweep-frames", 3, "--out", "a.gif")
    frames = imageio.imread(tmp_path / "a.gif")
    assert (code, err) == (0, "") and frames.shape == (n_frames, 390, 800, 3)
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 100


def test_the_animation_names_settings_that_are_not_the_defaults():
    """but not the number of test images, which has no effect on the training"""
    usual = sn.configs_of({"n_test": 600})
    assert animation.note_on([config.model for config in usual], usual) == ""
    for data in "toys", "shapes":
        config = sn.Config(data=data, model="cnn", preset="wide", n_epochs=3)
        words = "Trained with --preset wide --n-epochs 3." if data == "toys" else "Trained with --n-epochs 3."
        assert animation.note_on(["cnn"], [config]) == words
    two = animation.note_on(["a", "b"], [sn.Config(), sn.Config(lr=0.5)])
    assert two == "b: trained with --lr 0.5."


def test_what_is_recorded_of_a_training_are_copies_of_its_steps():
    config = sn.Config(data="shapes", model="cnn", n_epochs=5, batch_size=30, n_elev=1, n_per_combo=1, quiet=True)
    data, steps = sn.load_data(config), []
    history = animation.record_training(config, 4, data)
    state = sn.train(config, data, each_step=lambda state, _: steps.append(state["params"]["conv1_w"].copy()))
    assert [point[0] for point, _ in history] == [0, 0.4, 0.6, 1] and len(steps) == 5
    for (_, weights), expected in zip(history, (sn.init_params(config)["conv1_w"], *steps[1:3], steps[4]), strict=True):
        np.testing.assert_array_equal(weights["conv1_w"], expected)
    last = state["history"]["epochs"][-1]
    assert history[-1][0] == (1, last["familiar"], last["novel"])


def test_networks_of_other_images_are_told_apart_and_without_routing_there_is_no_routing_figure():
    """Familiar views are those of all networks in a figure; a loaded run may have ended early"""
    others = sn.Config(toy_seed=1), sn.Config(split="elevation"), sn.Config(split="instance", n_train_toys=1)
    assert len({looks.images_of(config) for config in (sn.Config(), sn.Config(n_train_toys=1), *others)}) == 4
    assert [looks.FIGURES["routing"].applies(sn.Config(routing_iters=n)) for n in (1, 2)] == [False, True]
    network = SimpleNamespace(config=sn.Config(n_epochs=4), weights={}, history={"epochs": [
        {"epoch": 1, "familiar": 0.5, "novel": 0.3}]})
    assert animation.history_of(network) == [((0.25, 0.5, 0.3), {})]


BAD = (                            # program, flags, words of the one line of error
    (looks, "--results none", "none: no such folder"), (looks, "--results . --seed 1", "--seed has no effect"),
    (looks, "--only background_activity --results .", "--results .: holds no results"),
    (looks, "--only forest", "--only forest: is a figure of results"),
    (looks, "--out-json x.json", "--out-json works here only"),
    (looks, "--out-json x.json --only background_activity --model cnn", "--out-json x.json: it is measured for"),
    (animation, "--snapshots 1", "--snapshots 1"), (animation, "--split elevation", "--split"),
    (animation, "--load --snapshots 9", "--snapshots has no"), (animation, "--load --n-test 9", "--n-test has no"),
    (animation, "--out a.png", ".gif"))


@pytest.mark.parametrize("program, flags, words", BAD, ids=[flags for _, flags, _ in BAD])
def test_bad_input_is_one_line_and_leaves_no_file(call, tmp_path, program, flags, words):
    assert_refused(call(sn, program.main, *flags.split()), words)
    assert not list(tmp_path.glob("*.*"))
