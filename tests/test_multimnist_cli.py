"""The command lines: end to end at toy size, offline; what the user gets wrong is one line and exit code 2."""
import json

import multimnist_capsnet as mc

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import assert_same

import make_multimnist_capsnet_gif as gif
import visualize_multimnist_capsnet as viz

FEW = {"train": 60, "val": 40, "test": 40}
TOY = ("--digits synthetic --n-epochs 1 --n-train 64 --n-val 32 --n-test 64 --batch-size 16 --conv1-channels 4 "
       "--conv3-channels 8").split()
KEYS = ["experiment", "config", "source", "n_params", "test_exact_match", "test_hits", "test_exact_match_ci95",
        "test_at_least_one", "test_recon_mse", "baseline_recon_mse", "hit_bits", "seconds_train",
        "ms_per_step", "versions", "machine", "history"]


@pytest.fixture(scope="module")
def alone(run_script):
    """alone(script, *flags): a script in a process of its own, with few digits, which must end well"""
    def run(script, *flags):
        done = run_script("-c", f"import multimnist_capsnet as c, {script.__name__} as script; c.N_SYNTHETIC = {FEW}; "
                          "c.run_cli(script.main)", *flags)
        assert done.returncode == 0 and done.stderr == "", done.stderr
    return run


@pytest.fixture(scope="module")
def toy_run(alone, tmp_path_factory):
    """The checkpoint of the experiment at toy size"""
    path = tmp_path_factory.mktemp("run") / "run.npz"
    alone(mc, *TOY, "--quiet", "--checkpoint", path)
    return path


@pytest.fixture
def cli(call):
    """cli(*flags): call's answer"""
    return lambda *flags, script=mc: call(mc, script.main, *flags)


def test_the_experiment_in_a_process_of_its_own(run_script, tmp_path):
    done = run_script(f"{mc.__name__}.py", *TOY, "--out-json", tmp_path / "x.json")
    assert done.returncode == 0 and done.stderr == ""
    assert list(json.loads((tmp_path / "x.json").read_text("utf-8"))) == KEYS
    assert "SYNTHETIC digits, 64 test pairs" in done.stdout and "\r" not in done.stdout


def test_the_cnn_end_to_end(cli, tmp_path):
    assert cli(*TOY, "--model", "cnn", "--quiet", "--out-json", "x.json") == (0, "", "")
    found = json.loads((tmp_path / "x.json").read_text("utf-8"))
    assert list(found) == KEYS and found["test_recon_mse"] is None and "train_cross_entropy" in found["history"]


def assert_pngs(folder, names):
    pngs = {path.stem: imageio.imread(path)[..., :3] for path in folder.glob("*.png")}
    assert pngs.keys() == set(names)
    assert all(min(pixels.shape[:2]) > 100 and pixels.std() > 3 for pixels in pngs.values())


@pytest.mark.slow
def test_all_figures_end_to_end(toy_run, alone, tmp_path):
    outdir, out = tmp_path / "new" / "viz", tmp_path / "x.json"
    alone(viz, "--load", toy_run, "--outdir", outdir, "--n-test", 64, "--seed", 3, "--out-json", out)
    assert_pngs(outdir, viz.FIGURES)
    found = json.loads(out.read_text("utf-8"))
    assert list(found) == [*KEYS, "loaded", "errors", "routing"] and out.stat().st_size < 4096
    assert (found["config"]["seed"], found["loaded"]["trained_seed"]) == (3, 0)


@pytest.mark.slow
def test_figures_of_several_networks(toy_run, cli, tmp_path):
    """One figure for all networks or one for each; what means nothing for a network is skipped with a word"""
    assert cli(*TOY, "--model", "cnn", "--quiet", "--checkpoint", "cnn.npz")[0] == 0
    code, out, err = cli("--load", toy_run, "cnn.npz", "--n-test", 64, "--outdir", "both", script=viz)
    assert (code, err) == (0, "")
    each = [f"{name}-{model}" for name in ("capsule_activations", "errors") for model in ("capsnet", "cnn")]
    assert_pngs(tmp_path / "both", [*each, "example_pairs", "reconstructions", "perturbation", "routing",
                                    "training_curves"])
    code, out, err = cli("--load", "cnn.npz", "--n-test", 64, "--only", "routing", "errors", script=viz)
    assert (code, err) == (0, "") and "routing: skipped, since only a capsnet with two" in out
    assert_pngs(tmp_path / "runs" / "multimnist_capsnet" / "figures", ["errors"])       # the default folder


def test_the_figure_of_results(cli, tmp_path):
    assert cli("--results", "--outdir", "out", "--quiet", script=viz) == (0, "", "")
    assert_pngs(tmp_path / "out", ["forest"])


def test_a_picture_of_ones_own(cli, toy_run, tmp_path):
    page = np.full((120, 160), 230, np.uint8)
    page[30:90, 60:68] = page[50:58, 50:90] = 20
    imageio.imwrite(tmp_path / "page.png", page)
    code, out, err = cli("--load", toy_run, "--image", "page.png", "--outdir", "out", script=viz)
    assert (code, err) == (0, "") and "lengths" in out
    assert_pngs(tmp_path / "out", ["page_digits"])


def test_the_film_has_a_frame_per_snapshot_and_does_not_change_the_run(toy_run, alone, cli, monkeypatch, tmp_path):
    out, checkpoint = tmp_path / "toy.gif", tmp_path / "run.npz"
    alone(gif, *TOY, "--out", out, "--snapshot-every", 3, "--checkpoint", checkpoint)
    frames = imageio.imread(out)
    assert len(frames) == 4 and not np.array_equal(frames[0], frames[2])             # steps 0, 3 and 4, and the ending
    assert not np.array_equal(frames[2], frames[3])
    monkeypatch.setattr(gif, "N_SCENES", 2)
    assert cli("--load", toy_run, "--out", out, script=gif)[0] == 0
    frames = imageio.imread(out)
    assert len(frames) == 2 and not np.array_equal(frames[0], frames[1])
    ours, theirs = mc.load_network(checkpoint), mc.load_network(toy_run)
    for group in mc.CHECKPOINT:
        assert_same(getattr(ours, group), getattr(theirs, group))


# ---------------------------------------------------------------- bad input

CNN = mc.Config(model="cnn", conv3_channels=2)
PLAIN, LOADED = " ".join(TOY), "--load run.npz"
PICTURE = f"{LOADED} --image page.png"
BAD = [                            # script, flags, what the line names
    *((mc, f"{PLAIN} {flags}", named) for flags, named in (
        ("--batch-size 65", "--batch-size 65 exceeds the 64 training pairs"), ("--lr 1e38 --n-epochs 2", "diverged"),
        ("--digits mnist", "--data-dir"), ("--model cnn --conv1-channels 512", "would have only 0 hidden units"),
        ("--out-weights no/folder/x.npz", "no/folder"), ("--checkpoint torn.npz", "torn.npz"))),
    (mc, f"{LOADED} --load folder", "folder"),
    *((viz, flags, named) for flags, named in (
        ("--load cnn.npz --image page.png", "cnn.npz: --image needs a capsnet, not a cnn"),
        ("--only forest", "--only forest: is a figure of results"),
        (f"{LOADED} --outdir page.png/x", "page.png"),
        ("--results --only errors", "--only errors: is a figure of networks"), ("--results none", "--results none"),
        ("--results --lr 1", "--lr"), ("--image none.png", "none.png: no such file"),
        (f"{PICTURE} --only errors", "--only"), (f"{PICTURE} --out-json x.json", "--out-json"),
        (f"{PICTURE} --lr 0.5", "--lr"), (f"{PICTURE} --n-test 5", "--n-test has no effect with --image"),
        ("--image page.png", "page.png: is not a readable picture"))),
    *((gif, f"{PLAIN} {flags}", named) for flags, named in (
        ("--model cnn", "--model: the animation"), ("--snapshot-every 0", "--snapshot-every 0"),
        ("--out x.png", "x.png"), ("--n-epochs 100 --snapshot-every 1", "at least 2"),
        ("--out no/folder/x.gif", "no/folder"), ("--out-json x.json", "--out-json")))]


@pytest.mark.parametrize("script, flags, named", BAD, ids=lambda value: getattr(value, "__name__", value)[:60])
def test_bad_input_is_one_line_and_leaves_no_file(cli, toy_run, tmp_path, script, flags, named):
    (tmp_path / "folder").mkdir()
    (tmp_path / "run.npz").write_bytes((toy_run).read_bytes())
    (tmp_path / "torn.npz").write_bytes((toy_run).read_bytes()[:5000])
    (tmp_path / "page.png").write_bytes(b"hello")
    params, history = mc.init_params(CNN), {"source": "synthetic", "epochs": [], "seconds": 0.0, "steps": 0}
    mc.save_weights("cnn.npz", CNN, params | mc.init_state(params), history)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    code, _, stderr = cli(*flags.split(), script=script)
    assert code == 2 and stderr.startswith("error: ") and named in stderr, stderr
    assert stderr.count("\n") == 1 and stderr.endswith("\n")
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
