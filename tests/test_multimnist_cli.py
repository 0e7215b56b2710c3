"""The programs of MultiMNIST end to end at toy size, offline; what the user gets wrong is one line and exit code 2."""
import dataclasses
import json

import multimnist_capsnet as mc
from lab.networks import Network

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import assert_refused, assert_same, runs, toy, toy_run

import make_multimnist_capsnet_gif as gif
import visualize_multimnist_capsnet as viz

TOY = ("--digits synthetic --n-epochs 1 --n-train 64 --n-val 32 --n-test 64 --batch-size 16 --conv1-channels 4 "
       "--conv3-channels 8").split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The weights file of a run at toy size"""
    path, small = tmp_path_factory.mktemp("run") / "run.npz", dict(n_train=64, conv1_channels=4, conv3_channels=8)
    mc.save(path, toy(runs.MULTI, **small)[0], toy_run(runs.MULTI, **small))
    return path


@pytest.fixture
def cli(call):
    """cli(script, *flags): call's answer"""
    return lambda script, *flags: call(mc, script.main, *flags)


def assert_pngs(folder, names):
    pngs = {path.stem: imageio.imread(path)[..., :3] for path in folder.glob("*.png")}
    assert pngs.keys() == set(names)
    assert all(min(pixels.shape[:2]) > 100 and pixels.std() > 3 for pixels in pngs.values())


@pytest.mark.slow
def test_figures_of_several_networks(trained, cli, tmp_path):
    """One figure for all networks or one for each; what means nothing for a network is skipped with a word"""
    assert cli(mc, *TOY, "--model", "cnn", "--quiet", "--outdir", "cnn")[0] == 0
    code, out, err = cli(viz, "--load", trained, "cnn", "--n-test", 64, "--outdir", "both")
    assert (code, err) == (0, "")
    each = [f"{name}-{model}" for name in ("capsule_activations", "errors") for model in ("capsnet", "cnn")]
    assert_pngs(tmp_path / "both", [*each, "example_pairs", "reconstructions", "perturbation", "routing",
                                    "training_curves"])
    code, out, err = cli(viz, "--load", "cnn", "--n-test", 64, "--only", "routing", "errors")
    assert (code, err) == (0, "") and "routing: skipped, since only a capsnet whose" in out
    assert_pngs(tmp_path / "cnn" / "figures", ["errors"])              # the default folder, of one run


def test_the_figure_of_results(cli, tmp_path):
    assert cli(viz, "--results", "--outdir", "out", "--quiet") == (0, "", "")
    assert_pngs(tmp_path / "out", ["forest"])


def test_figures_of_a_network_that_is_trained_first(cli, tmp_path):
    flags = *TOY, "--quiet", "--outdir", "out", "--only", "training_curves", "--out-json", "x.json"
    assert cli(viz, *flags) == (0, "", "")
    assert_pngs(tmp_path / "out", ["training_curves"])
    assert json.loads((tmp_path / "x.json").read_text("utf-8")).keys() >= {"history", "errors", "routing"}


def test_a_picture_of_ones_own(cli, trained, tmp_path):
    page = np.full((120, 160), 230, np.uint8)
    page[30:90, 60:68] = page[50:58, 50:90] = 20
    imageio.imwrite(tmp_path / "page.png", page)
    code, out, err = cli(viz, "--load", trained, "--image", "page.png", "--outdir", "out")
    assert (code, err) == (0, "") and "lengths" in out
    assert_pngs(tmp_path / "out", ["page_digits"])


def test_the_animation_has_a_frame_per_snapshot_and_does_not_change_the_run(trained, cli, monkeypatch, tmp_path):
    out, states, train = tmp_path / "toy.gif", [], mc.train
    monkeypatch.setattr(mc, "train", lambda *args, **hooks: states.append(train(*args, **hooks)) or states[-1])
    assert cli(gif, *TOY, "--quiet", "--out", out, "--snapshot-every", 3) == (0, "", "")
    assert cli(mc, *TOY, "--quiet", "--outdir", "run") == (0, "", "")
    assert_same(*map(mc.weights_of, states))
    frames = imageio.imread(out)
    assert len(frames) == 3                                                 # steps 0, 3 and 4
    assert not np.array_equal(frames[0], frames[1]) and not np.array_equal(frames[1], frames[2])
    durations = [imageio.immeta(out, index=k, plugin="pillow")["duration"] for k in range(3)]    # ms
    assert durations == [160, 160, gif.HOLD]
    monkeypatch.setattr(gif, "N_SCENES", 2)
    assert cli(gif, "--load", trained, "--out", out, "--fps", gif.FPS)[0] == 0
    frames, meta = imageio.imread(out), imageio.immeta(out, index=1, plugin="pillow")
    assert len(frames) == 2 and not np.array_equal(frames[0], frames[1]) and meta["duration"] == 160    # ms


def test_the_animation_names_settings_that_are_not_the_defaults():
    trained = mc.Config(n_train=24, min_iou=0.5, preset="classic", seed=2)
    tested = dataclasses.replace(trained, routing_iters=1)
    network = Network("net", tested, trained, {}, {}, {})
    assert gif.note_on(network) == ("capsnet, preset classic, seed 2, trained with --min-iou 0.5, "
                                    "tested with --routing-iters 1")
    assert gif.note_on(Network("net", mc.Config(), mc.Config(), {}, {}, {})) == "capsnet, preset deep, seed 0"


PLAIN, LOADED = " ".join(TOY), "--load run.npz"
PICTURE = f"{LOADED} --image page.png"
BAD = [                            # script, flags, what the line names
    *((viz, flags, named) for flags, named in (
        ("--load cnn.npz --image page.png", "cnn.npz: --image needs a capsnet, not a cnn"),
        ("--load other.npz", "other.npz: was trained on images of shirts. Give their folder, or"),
        ("--only forest", "--only forest: is a figure of results"),
        (f"{LOADED} --outdir page.png/x", "page.png"), (f"{LOADED} --lr 0.5", "--lr 0.5: "),
        ("--results --only errors", "--only errors: is a figure of networks"), ("--results none", "--results none"),
        ("--results --lr 1", "--lr"), ("--image none.png", "none.png: no such file"),
        (f"{PICTURE} --only errors", "--only"), (f"{PICTURE} --out-json x.json", "--out-json"),
        (f"{PICTURE} --lr 0.5", "--lr"), (f"{PICTURE} --n-test 5", "--n-test has no"),
        (f"{LOADED} cnn.npz --out-json x.json", "--out-json"),
        ("--load cnn.npz --only routing --out-json x.json", "nothing was measured"),
        ("--image page.png", "page.png: is not a readable picture"))),
    *((gif, flags, named) for flags, named in (
        (f"{PLAIN} --model cnn", "--model: the animation"), (f"{PLAIN} --snapshot-every 0", "--snapshot-every 0"),
        (f"{PLAIN} --out x.png", "x.png"), (f"{PLAIN} --n-epochs 100 --snapshot-every 1", "at least 2"),
        (f"{PLAIN} --out no/folder/x.gif", "no/folder"), (f"{LOADED} --n-test 5", "--n-test"),
        (f"{LOADED} --snapshot-every 5", "--snapshot-every"), (f"{LOADED} cnn.npz", "one network"),
        (f"{LOADED} --recompute-statistics 9", "--recompute-statistics has no effect")))]


@pytest.mark.parametrize("script, flags, named", BAD, ids=lambda value: getattr(value, "__name__", value)[:60])
def test_bad_input_is_one_line_and_leaves_no_file(cli, trained, tmp_path, script, flags, named):
    (tmp_path / "run.npz").write_bytes(trained.read_bytes())
    (tmp_path / "page.png").write_bytes(b"hello")
    cnn = mc.Config(model="cnn", conv3_channels=2)
    for name, source in (("cnn", "synthetic"), ("other", "shirts")):
        mc.save(f"{name}.npz", cnn, mc.initial_state(cnn) | {"history": {"source": source, "epochs": []}})
    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    before = files()
    assert_refused(cli(script, *flags.split()), named)
    assert files() == before
