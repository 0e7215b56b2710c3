"""The novel-viewpoint scripts as their users call them: runs, figures, film; one clear
line for every bad input."""
import json
import sys
from types import SimpleNamespace

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest

import visualize_smallnorb_novel_viewpoint as looks

SCRIPT, FIGURES, FILM = (f"{start}smallnorb_novel_viewpoint{end}.py" for start, end in (
    ("", ""), ("visualize_", ""), ("make_", "_gif")))
TOY = "--data shapes --preset small --n-epochs 1 --batch-size 90 --threads 1".split()
FEW = "--n-train-toys 1 --train-azimuths 0:10 --test-azimuths 80:90 --n-test 60"       # views of toys are drawn
TOYS = f"--preset small --n-epochs 1 {FEW} --threads 1".split()


@pytest.fixture
def cli(monkeypatch, call):
    """cli(*flags): call's answer of the experiment, with few shapes"""
    original = sn.make_views
    monkeypatch.setattr(sn, "make_views", lambda a, e, n, rng: original(a, e[:1], min(n, 2), rng))
    return lambda *flags: call(sn, sn.main, *flags)


# ---------------------------------------------------------------- runs

@pytest.mark.parametrize("model", sn.MODELS)
def test_every_network_from_the_command_line(cli, tmp_path, model):
    code, out, err = cli(*TOY, "--model", model, "--split", "elevation", "--out-json", "r.json")
    assert (code, err) == (0, "") and all(name in out for name in sn.CLASS_NAMES)
    found = json.loads((tmp_path / "r.json").read_text("utf-8"), parse_constant=pytest.fail)
    right = np.unpackbits(np.frombuffer(sn.base64.b64decode(found["hit_bits"]["novel"]), np.uint8))
    assert ("loss" in out) == (model != "nearest")
    assert right.sum() / 60 == pytest.approx(found["novel"], abs=1e-4) and f"{found['novel']:.4f} of 60" in out


def test_toys_in_a_process_of_its_own(run_script, tmp_path):
    path = tmp_path / "net.npz"
    done = run_script(SCRIPT, *TOYS, "--model", "capsnet-shared", "--out-weights", path)
    assert done.returncode == 0 and done.stderr == "" and all(name in done.stdout for name in sn.NORB_NAMES)
    done = run_script(SCRIPT, "--load", path, "--toy-seed", 1, "--n-test", 12)
    assert done.returncode == 0 and "novel azimuths" in done.stdout


def test_preset_defaults():
    """Of a network, its data and its split, under what was given"""
    given = {"lr": 0.5, "routing_iters": 1, "coordinates": True}
    configs = [sn.network_config(given, name) for name in ("capsnet", "cnn-gap", "matrix-capsnet")]
    assert [config.routing_iters for config in configs] == [1, 2, 1]
    assert [config.coordinates for config in configs] == [False, True, True]
    assert [config.loss for config in configs] == ["margin", "cross-entropy", "cross-entropy"]
    assert {config.lr for config in configs} == {0.5}
    shapes, cnn, capsules = sn.Config(data="shapes"), sn.Config(model="cnn"), sn.Config()
    assert (shapes.n_epochs, shapes.lr, shapes.preset, shapes.train_azimuths) == (10, 2e-3, "wide", "0:150")
    assert (cnn.n_epochs, cnn.lr, cnn.preset, cnn.train_azimuths) == (16, 2e-3, "small", "300:400")
    assert (capsules.model, capsules.n_epochs, capsules.lr, capsules.preset) == ("matrix-capsnet", 10, 5e-3, "wide")
    assert sn.Config(split="instance").train_azimuths == "0:340" and sn.Config(split="instance",
                                                                               n_epochs=2).n_epochs == 2


# ---------------------------------------------------------------- bad input

BAD = {
    "--train-azimuths 0:210": "meet", "--train-azimuths 5": "--train-azimuths 5: must be LOW:HIGH",
    "--split instance": "--split instance applies to --data toys", "--lr 1e30 --n-epochs 9": "training diverged",
    "--model nearest --out-weights x.npz": "--out-weights does not apply", "--load none.npz": "none.npz: "}
BAD_DATA = {"--data smallnorb": "training-cat.mat: missing; --norb-dir", "--train-azimuths 301:319": "no train"}


@pytest.mark.parametrize("flags, words", [*((f"{' '.join(TOY)} {f}", words) for f, words in BAD.items()),
                                          *BAD_DATA.items()], ids=[*BAD, *BAD_DATA])
def test_bad_input_is_one_line_and_leaves_no_file(cli, tmp_path, flags, words):
    before = sorted(tmp_path.rglob("*"))
    code, _, err = cli(*flags.split())
    assert code == 2 and err.startswith("error: ") and words in err, err
    assert err.count("\n") == 1 and err.endswith("\n") and sorted(tmp_path.rglob("*")) == before


# ---------------------------------------------------------------- figures and film

def noise_run(rng, model="matrix-capsnet", **given):
    """A Run of an untrained network on 80 images of noise in each split"""
    config = sn.Config(model=model, preset="small", threads=1, **given)
    data = sn.select_images(sn.Config(n_test=600))
    for part in (data[name] for name in ("train", "familiar", "novel")):
        rows = rng.permutation(len(part["labels"]))[:80]
        part |= {name: array[rows] for name, array in part.items()}
        part["images"] = rng.integers(0, 256, (80, 48, 48, 2), np.uint8)
    params = sn.init_params(config)
    return looks.Run(model, config, config, params | sn.init_state(params), {"epochs": []}, data)


def test_every_figure_of_noise(rng, monkeypatch, tmp_path):
    """Of a network that learned nothing, and of results by hand: what has not been run is left out of the forest"""
    run = noise_run(rng)
    assert all(len(looks.FIGURES[name].draw(run).axes) > 10 for name in ("example_views", "routing"))
    for model in ("matrix-head", "capsnet", "capsnet-shared"):
        assert len(looks.FIGURES["routing"].draw(noise_run(rng, model)).axes) == 12
    of_one, of_two = (looks.draw_familiar_vs_novel(runs).axes[0] for runs in ([run], [run, run]))
    with sn.Runner(1) as runner:
        expected = sn.evaluate_test_sets(run.params, run.data, run.config, runner)
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
    sweep = {"angles": [0, 60, 80, 340], "accuracy": [0.9, 0.7, 0.5, 0.4]}
    activity = {when: {"a": {"primary": [0.7, 0.4], "conv": [None, 0.2]}} for when in ("before", "after")}
    for table, settings in (("paper-azimuth", sn.COMPARED), ("background-activity", ("matrix-capsnet",)),
                            *((table, models) for table, (_, models) in looks.GAPS.items())):
        found = dict(generation=1, sweep=sweep, background_activity=activity, n_params=10, seconds_train=1,
                     experiment=looks.EXPERIMENT)
        lines = [found | dict(setting=setting, seed=seed, novel=0.5 + seed / 10,
                              config={"seed": seed, "train_azimuths": "0:60"})
                 for setting in settings for seed in (0, 1)]
        path = tmp_path / looks.EXPERIMENT / f"{table}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    monkeypatch.setattr(sys, "argv", ["x", "--results", str(tmp_path), "--outdir", str(tmp_path / "viz"), "--quiet"])
    looks.main()
    assert {path.stem for path in (tmp_path / "viz").glob("*.png")} == {*looks.OF_RESULTS}


def test_accuracy_by_distance_to_the_training_azimuths():
    """Training azimuths 300 to 400 go around the circle; both sides count, and 0 is the mean of the familiar ones"""
    sweep = {"angles": [0, 20, 40, 60, 80, 280, 300], "accuracy": [0.9, 0.8, 1.0, 0.6, 0.5, 0.4, 0.7]}
    found = looks.accuracy_by_distance({"config": {"train_azimuths": "300:400"}, "sweep": sweep})
    assert found == pytest.approx({0: 0.85, 20: 0.5, 40: 0.5})


def test_what_routing_assigns_by_hand():
    """Two positions of three capsule types on a side of one... each weighted by its activation or length"""
    rng = np.random.default_rng(2)
    a, R = rng.random((1, 4, 4, 3)), rng.random((5, 48))
    steps = [SimpleNamespace(R=np.full((1, 1, 48), 0.2)), SimpleNamespace(R=R[None])]
    before, after = looks.routed_maps({"conv2_a": a, "class_steps": steps}, sn.Config())
    np.testing.assert_allclose(before, np.broadcast_to(0.2 * a[0].sum(-1), (5, 4, 4)))
    for j, y, x in ((0, 0, 0), (4, 2, 3)):                               # children are ordered (type, row, column)
        assert after[j, y, x] == pytest.approx(sum(R[j, t * 16 + y * 4 + x] * a[0, y, x, t] for t in range(3)))
    config = sn.Config(model="capsnet-shared")
    side = int(np.sqrt(len(sn.class_capsule_inputs(config).centers)))
    u, c = rng.random((1, side * side * 2, 8)), rng.random((5, side * side * 2))
    before, after = looks.routed_maps({"u": u, "c": [np.full((1, c.shape[1]), 0.2), c[None]]}, config)
    for j, y, x in ((0, 0, 0), (3, 1, 2)):                               # children are ordered (row, column, type)
        rows = [(y * side + x) * 2, (y * side + x) * 2 + 1]
        assert after[j, y, x] == pytest.approx(sum(c[j, k] * np.linalg.norm(u[0, k]) for k in rows))
        assert before[j, y, x] == pytest.approx(sum(0.2 * np.linalg.norm(u[0, k]) for k in rows))


@pytest.mark.slow
def test_figures_of_shapes_and_of_several_networks(cli, call, tmp_path):
    """All of them, for networks trained here and for their files"""
    few = (*TOY, "--n-elev", 1, "--n-per-combo", 1, "--batch-size", 30)
    code, out, err = call(sn, looks.main, *few, "--model", "matrix-capsnet", "nearest", "--outdir", "a", "--no-save")
    assert (code, err) == (0, ""), err
    drawn = {path.stem for path in (tmp_path / "a").glob("*.png")}
    strips = {f"elevation_strip-{name}" for name in ("matrix-capsnet", "nearest")}
    assert drawn == strips | {"example_views", "familiar_vs_novel", "azimuth_accuracy", "pose_matrices", "routing",
                              "training_curves"}
    assert cli(*few, "--model", "cnn", "cnn-gap", "--checkpoint", "r.npz", "--quiet") == (0, "", "")
    code, out, err = call(sn, looks.main, "--load", "r.cnn-0.npz", "r.cnn-gap-0.npz", "--outdir", "b", "--only",
                          "azimuth_accuracy", "pose_matrices")
    assert (code, err) == (0, "") and "pose_matrices: skipped, since only matrix capsules have" in out
    assert [path.stem for path in (tmp_path / "b").glob("*.png")] == ["azimuth_accuracy"]


def test_the_forest_asks_for_what_is_planned():
    """Every difference is one of settings that workflow/runs.py has"""
    sys.path.append(str(looks.figures.RESULTS))
    import render
    result_files = render.Results(looks.figures.RESULTS)
    differences = [line for line in looks.FOREST if not isinstance(line, str)]
    assert len(differences) <= 24 and all(isinstance(result_files.samples(looks.EXPERIMENT, *line[1:]), list)
                                          for line in differences)


def test_figures_and_film(call, tmp_path):
    import imageio.v3 as imageio

    import make_smallnorb_novel_viewpoint_gif as film
    done = call(sn, looks.main, *TOYS, "--only", "background_activity", "--out-json", "r.json", "--outdir", tmp_path,
                "--no-save")
    result = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert done[2] == "" and result["background_activity"].keys() == {"before", "after"}
    shapes = (*TOY, "--model", "cnn", "--n-elev", 1, "--n-per-combo", 1, "--batch-size", 30)
    for flags, n in ((shapes, (5, 6)), (("--load", sn.PRETRAINED[1]), (3,))):           # toys: tests/test_originals.py
        snapshots = ("--snapshots", 2) if "--load" not in flags else ()
        done = call(sn, film.main, *flags, *snapshots, "--sweep-frames", 3, "--out", "film.gif")
        frames = imageio.imread(tmp_path / "film.gif")
        assert done[2] == "" and len(frames) in n and frames.shape[1:] == (390, 800, 3)
        assert np.abs(frames[0].astype(int) - frames[-1]).max() > 100
    assert (tmp_path / "background_activity.png").exists()


def test_bad_input_of_figures_and_film(monkeypatch, capsys, tmp_path):
    import make_smallnorb_novel_viewpoint_gif as film
    monkeypatch.chdir(tmp_path)
    for script, flags, words in (
            (looks, "--results none", "none: no such folder"), (looks, "--results . --seed 1", "--seed has no effect"),
            (looks, "--only background_activity --results .", "--results .: holds no results"),
            (looks, "--only forest", "--only forest: is a figure of results"),
                                 (looks, "--out-json x.json", "--out-json works here only"),
            (film, "--snapshots 1", "--snapshots 1"), (film, "--split elevation", "--split"),
            (film, "--model nearest", "--model nearest: is not trained"), (film, "--n-seeds 2", "--n-seeds"),
            (film, "--out film.png", ".gif")):
        monkeypatch.setattr(sys, "argv", ["x", *flags.split()])
        with pytest.raises(SystemExit, match="2"):
            sn.run_cli(script.main)
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and words in err, err


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
    centers = sn.class_capsule_inputs(sn.Config(model="matrix-capsnet")).centers
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
