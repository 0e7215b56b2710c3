"""The novel-viewpoint scripts as their users call them: whole runs at toy size, and one clear line for every bad input."""
import dataclasses
import json

import numpy as np
import pytest
import smallnorb_novel_viewpoint as sn
from test_smallnorb_files import write_norb

SCRIPT = "smallnorb_novel_viewpoint.py"
TOY = ("--n-epochs 2 --n-per-combo 1 --n-test-per-combo 1 --n-elev 1 --n-train-views 3 --n-test-views 2 --conv1-channels 4 --primary-types 2 "
       "--conv-types 2").split()


def good(done):
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def bad(done, words):
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    assert words in done.stderr, done.stderr


def test_default_run(run_script, tmp_path):
    out = good(run_script(SCRIPT, *TOY, "--out-json", tmp_path / "r.json", "--checkpoint", tmp_path / "r.npz"))
    assert "caps" in out and "cnn-gap" in out and "held-out, caps minus cnn-gap, paired by seed" in out
    results = json.loads((tmp_path / "r.json").read_text())
    assert results.keys() == {"config", "summary", "runs", "peak_rss_mb", "versions"}
    run = results["runs"][0]
    assert run["label"] == "caps" and 0 <= run["held_out"] <= 1 and len(run["sweep"]) == 36 and run["history"][-1]["epoch"] == 2
    assert sorted(path.name for path in tmp_path.glob("r.*")) == ["r.cnn-gap-0.npz", "r.json", "r.npz"]
    again = good(run_script(SCRIPT, *TOY, "--checkpoint", tmp_path / "r.npz", "--resume"))
    assert out.split("\n\n")[1].split("training ")[0] == again.split("\n\n")[1].split("training ")[0]


def test_public_command(run_script):
    good(run_script(SCRIPT, *"--n-epochs 1 --lr 2e-3 --seed 0 --train-azimuths 0:150 --test-azimuths 200:330 --em-iters 3 --n-per-combo 1".split()))


@pytest.mark.parametrize("more", ["--n-seeds 2 --baseline cnn,cnn-pool,dense-caps", "--ablations", "--split elevation",
                                  "--model cnn --baseline none --quiet", "--loss spread --routing-grad detached --no-coord-add --max-shift 2",
                                  "--model dense-caps --baseline none --stop-familiar 0.1"])
def test_ways_to_run(run_script, more):
    out = good(run_script(SCRIPT, *TOY, *more.split()))
    assert ("--quiet" in more) == (out == "")
    if "ablations" in more:
        assert all(label in out for label in sn.ABLATIONS)


def test_smallnorb(run_script, tmp_path):
    write_norb(tmp_path, 90)
    out = good(run_script(SCRIPT, "--data", "smallnorb", "--norb-dir", tmp_path, "--n-epochs", 1, "--conv1-channels", 4))
    assert "smallnorb images" in out


@pytest.mark.parametrize("flags, words", [
    ("--train-azimuths 0:210", "overlap"), ("--train-azimuths 5", "--train-azimuths 5: must be LOW:HIGH"),
    ("--split elevation --test-elevations 35:70", "overlap"), ("--baseline cnn,foo", "foo is none of"), ("--resume", "--checkpoint"),
    ("--data smallnorb", "--norb-dir (not given)"), ("--data smallnorb --norb-dir /nonexistent", "/nonexistent: no such folder"),
    ("--out-json /nonexistent/r.json", "/nonexistent"), ("--lr nan", "finite"), ("--n-epochs 0", "--n-epochs 0: must be at least 1"),
    ("--model foo", "foo"), ("--lr 1e30 --model cnn --n-epochs 20", "lower --lr"), ("--n-epochs x", "invalid"), ("--foo", "unrecognized")])
def test_bad_input(run_script, flags, words, tmp_path):
    bad(run_script(SCRIPT, *TOY, *flags.split()), words)


def test_every_bound_is_checked():
    for f in dataclasses.fields(sn.Config):
        for rule, beyond in ("low", -1), ("high", 1), ("above", 0), ("choices", "x"):
            if rule in f.metadata:
                value = "nonsense" if rule == "choices" else f.metadata[rule] + beyond
                with pytest.raises(sn.InputError, match=f.name.replace("_", "-")):
                    sn.check_config(dataclasses.replace(sn.Config(), **{f.name: value}))
    for model in sn.MODELS:
        sn.check_config(sn.Config(model=model))


def test_help_shows_every_flag(run_script):
    text = " ".join(good(run_script(SCRIPT, "--help")).split())
    for f in dataclasses.fields(sn.Config):
        assert "--" + f.name.replace("_", "-") in text and " ".join(f.metadata["help"].split()) in text


# ---------------------------------------------------------------- figures and film

FIGURES = ["ablations", "azimuth_accuracy", "elevation_strip", "em_routing", "example_views", "extrapolation_bars", "gap_sweep",
           "novel_viewpoint_training_curves", "pose_matrices", "pose_tracking"]


def test_figures(run_script, tmp_path):
    results = [tmp_path / name for name in ("main.json", "gap.json", "ablations.json")]
    good(run_script(SCRIPT, *TOY, "--out-json", results[0], "--checkpoint", tmp_path / "run.npz", "--n-seeds", 2))
    good(run_script(SCRIPT, *TOY, "--train-azimuths", "0:60", "--test-azimuths", "180:240", "--out-json", results[1]))
    good(run_script(SCRIPT, *TOY, "--ablations", "--out-json", results[2]))
    script = "visualize_smallnorb_novel_viewpoint.py"
    given = ["--results", results[0], "--gap-results", results[1], "--ablation-results", results[2]]
    good(run_script(script, *given, "--load", tmp_path / "run.npz", "--outdir", tmp_path / "viz"))
    assert sorted(path.stem for path in (tmp_path / "viz").iterdir()) == FIGURES
    assert all(path.stat().st_size < 300_000 for path in (tmp_path / "viz").iterdir())
    bad(run_script(script, "--results", tmp_path / "none.json"), "none.json: no such file")
    (tmp_path / "broken.json").write_text("{}")
    bad(run_script(script, "--gap-results", tmp_path / "broken.json"), "broken.json: not a whole file")
    bad(run_script(script, *given, "--load", tmp_path / "run.npz", "--seed", 5), "was trained with 0")
    bad(run_script(script, "--outdir", results[0] / "viz"), "--outdir")
    bad(run_script(script, "--model", "cnn"), "--model cnn")


def test_figures_train_what_is_not_given(run_script, tmp_path):
    good(run_script("visualize_smallnorb_novel_viewpoint.py", *TOY, "--n-epochs", 1, "--outdir", tmp_path))
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == FIGURES


def test_film(run_script, tmp_path):
    import imageio.v3 as imageio
    script, path = "make_smallnorb_novel_viewpoint_gif.py", tmp_path / "film.gif"
    good(run_script(script, *TOY, "--snapshots", 3, "--sweep-frames", 4, "--fps", 10, "--out", path))
    frames = imageio.imread(path)
    assert len(frames) == 3 + 4 and frames.shape[1:] == (390, 800, 3) and path.stat().st_size < 3e6
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 100
    for flags, words in ("--snapshots 1", "--snapshots 1"), ("--fps 0", "--fps"), ("--sweep-frames 999", "--sweep-frames"), (
            "--data smallnorb", "--data"), ("--baseline none", "--baseline none"), (f"--out {tmp_path / 'no' / 'film.gif'}", "folder"):
        bad(run_script(script, *TOY, *flags.split()), words)
