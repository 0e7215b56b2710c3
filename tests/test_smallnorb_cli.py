"""The novel-viewpoint scripts as their users call them: whole runs at toy size, and one clear line for every bad
input."""
import hashlib
import json
import sys

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from reference_smallnorb import TINY, TRAINED, flags_of, tiny, write_norb

SCRIPT = "smallnorb_novel_viewpoint.py"
TOY_DATA = "--data shapes --n-per-combo 1 --n-test-per-combo 1 --n-elev 1 --n-train-views 3 --n-test-views 2".split()
CAPS = "--n-epochs 2 --conv1-channels 4 --primary-types 2 --conv-types 2 --conv2-types 2".split()
HEADS = "--trunk-channels 4 --head-types 2".split()
TOY = [*TOY_DATA, *CAPS, *HEADS]   # of the default command, which compares caps with gap


def without_shapes(config):
    """config without what means something to the embedded shapes alone, of smallNORB"""
    own = {f.name: f.default for f in sn.options(config) if f.metadata.get("of") == ("shapes",)}
    return sn.changed(config, data="smallnorb", **own)


def good(done):
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def bad(done, words):
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    assert words in done.stderr, done.stderr


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """cli(*flags) -> exit code, stdout, stderr of the experiment in this process, in tmp_path"""
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, flags)])
        capsys.readouterr()
        code = 0
        try:
            sn.run_cli(sn.main)
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


# ---------------------------------------------------------------- runs

def test_default_run(run_script, tmp_path):
    out = good(run_script(SCRIPT, *TOY, "--out-json", tmp_path / "r.json", "--checkpoint", tmp_path / "r.npz"))
    assert "caps" in out and "gap" in out and "held-out, caps minus gap, paired by seed" in out
    results = json.loads((tmp_path / "r.json").read_text())
    assert results.keys() == {"summary", "runs"}
    run = results["runs"][0]
    assert run["label"] == "caps" and 0 <= run["held_out"] <= 1 and len(run["sweep"]["accuracy"]) == 36
    assert run["history"]["epoch"] == [1, 2]
    assert sorted(path.name for path in tmp_path.glob("r.*")) == ["r.gap-0.npz", "r.json", "r.npz"]
    again = good(run_script(SCRIPT, *TOY, "--checkpoint", tmp_path / "r.npz", "--resume"))
    assert out.split("\n\n")[1].split("training ")[0] == again.split("\n\n")[1].split("training ")[0]


def test_public_command(run_script):
    ranges = "--train-azimuths 0:150 --test-azimuths 200:330"
    few = "--data shapes --n-elev 1 --n-per-combo 1 --n-test-per-combo 1"
    good(run_script(SCRIPT, *f"--n-epochs 1 --lr 2e-3 --seed 0 {ranges} --routing-iters 3 {few}".split()))


@pytest.mark.parametrize("more", [
    "--n-seeds 2 --baseline dynamic,nearest", "--ablations", "--split elevation", "--n-eval 3 --warmup 2",
    "--baseline em,dynamic,dynamic-shared,self-routing,cnn,gap,dense,nearest",
    "--loss spread --routing-grad detached --no-coord-add --max-shift 2", "--lambda-schedule official --average 0.9"])
def test_ways_to_run(cli, more):
    flags = [*TOY_DATA, *CAPS] if "ablations" in more else TOY
    code, out, err = cli(*flags, *more.split())
    assert (code, err) == (0, "") and "held-out accuracy by class" in out
    labels = sn.ABLATIONS if "ablations" in more else more.split()[-1].split(",") * ("baseline" in more)
    assert all(f"\n{label} " in out for label in labels)
    angles = "elevations" if "elevation" in more else "azimuths"
    assert f"accuracy by distance from the range of training {angles}, degrees, mean over {angles}; symmetric" in out


@pytest.mark.parametrize("more", [
    "--model cnn --n-epochs 2 --quiet", "--model self-routing --uniform --n-epochs 2 --stop-familiar 0.1",
    "--model dense --width 3 --trunk-channels 2 --n-epochs 1 --loss margin", "--model nearest --split elevation"])
def test_ways_to_run_one_network(cli, more):
    code, out, err = cli(*TOY_DATA, "--baseline", "none", *more.split())
    assert (code, err) == (0, "") and ("--quiet" in more) == (out == "")


@pytest.mark.parametrize("model, others", [("gap", ""), ("em", "--baseline gap --n-seeds 2")])
def test_a_loaded_network_is_tested_without_training(cli, tmp_path, monkeypatch, model, others):
    """--out-weights keeps the first network, of the first seed; what --load finds on the same images is the same, but
    for what float16 costs, and to the bit with the checkpoint"""
    flags = [*flags_of(tiny(model, checkpoint="run.npz", seed=3)), *others.split()]
    assert cli(*flags, "--out-weights", "net.npz", "--out-json", "r.json") == (0, "", "")
    record = json.loads((tmp_path / "r.json").read_text())
    record = record["runs"][0] if others else record
    monkeypatch.setattr(sn, "train", None)
    for file, tolerance in ("run.npz", 0), ("net.npz", 0.1):
        code, out, err = cli("--load", file, "--out-json", "again.json")
        found = json.loads((tmp_path / "again.json").read_text())
        assert (code, err) == (0, "") and "training none; this network's had taken" in out
        sha256 = hashlib.sha256((tmp_path / file).read_bytes()).hexdigest()
        assert found["loaded"] == {"file": file, "trained_seed": 3, "sha256": sha256} and found["history"] == {}
        assert (found["label"], found["seed"], found["n_params"]) == (model, 3, record["n_params"])
        for name in "familiar", "held_out", "familiar_loss":
            assert found[name] == pytest.approx(record[name], abs=tolerance), name
    code, out, err = cli("--load", "net.npz", "--seed", 5, "--out-weights", "copy.npz", "--quiet")
    assert (code, out, err) == (0, "", "")
    assert (tmp_path / "copy.npz").read_bytes() == (tmp_path / "net.npz").read_bytes()


def test_the_standard_task_from_the_command_line(cli, tmp_path):
    flags = "--split toys --n-epochs 1 --n-train-toys 1 --n-test 20 --trunk-channels 2 --head-types 2".split()
    code, out, err = cli(*flags, "--model", "dynamic-shared", "--baseline", "gap,nearest", "--out-json", "r.json")
    assert (code, err) == (0, "") and "training images" in out and "new toys" in out
    sweep = json.loads((tmp_path / "r.json").read_text())["runs"][0]["sweep"]
    assert set(sweep["angles"]) <= set(range(0, 360, 20))


def test_a_loaded_network_may_be_shown_other_toys(cli, tmp_path):
    flags = "--n-epochs 1 --n-train-toys 1 --n-test 20 --trunk-channels 2 --model gap --baseline none --quiet".split()
    narrow = "--train-azimuths 0:20 --test-azimuths 60:80".split()
    assert cli(*flags, *narrow, "--out-weights", "net.npz") == (0, "", "")
    for more, n in ("--toy-seed 1", 20), ("--n-test 40", 40):
        code, out, err = cli("--load", "net.npz", *more.split(), "--out-json", "r.json")
        config = json.loads((tmp_path / "r.json").read_text())["config"]
        assert (code, err) == (0, "") and (config["n_test"], config["toy_seed"]) == (n, int("toy" in more))


def test_what_means_nothing_to_a_loaded_network_is_refused(cli, tmp_path):
    assert cli(*flags_of(tiny("gap")), "--out-weights", "net.npz") == (0, "", "")
    for flags, named in (("--baseline gap", "--baseline: means nothing to --load"), ("--ablations", "--ablations: "),
                         ("--n-seeds 2", "--n-seeds: means"), ("--lr 0.1", "--lr 0.1: net.npz was trained with"),
                         ("--checkpoint x.npz", "--checkpoint: is of training"), ("--n-test 3", "--n-test: means "),
                         ("--split elevation", "--split elevation: net.npz was trained with azimuth"),
                         ("--out-json net.npz", "--out-json net.npz: is the network's own file"),
                         ("--out-json x.json --out-weights x.json", "would be written twice"),
                         ("--write-norb folder", "--load: means nothing to --write-norb")):
        code, out, err = cli("--load", "net.npz", *flags.split())
        assert code == 2 and out == "" and err.startswith("error: ") and named in err, err
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["net.npz"]
    assert "--out-weights: means nothing to --model nearest" in cli(
        *TOY_DATA, "--model", "nearest", "--baseline", "none", "--out-weights", "x.npz")[2]


def test_settings_of_other_networks_are_refused_and_nothing_is_run(cli, tmp_path):
    for flags, named in (("--model cnn --routing-iters 3 --baseline none", "--routing-iters"),
                         ("--width 4 --baseline none", "--width"), ("--uniform", "--uniform"),
                         ("--model dynamic --no-coord-add --baseline none", "--no-coord-add"),
                         ("--model gap --preset paper", "--preset"),
                         ("--model nearest --baseline none --n-epochs 3", "--n-epochs")):
        code, out, err = cli(*flags.split(), "--out-json", "r.json")
        assert code == 2 and out == "" and err.startswith(f"error: {named}: means nothing to --model ")
        assert not list(tmp_path.glob("r.*"))


def test_smallnorb(run_script, tmp_path):
    write_norb(tmp_path, 90)
    flags = "--data", "smallnorb", "--norb-dir", tmp_path, "--n-epochs", 1, "--conv1-channels", 4, "--n-test", 30
    out = good(run_script(SCRIPT, *flags, *HEADS))
    assert "smallnorb images" in out and all(name in out for name in sn.NORB_NAMES) and "symmetric" not in out


@pytest.mark.parametrize("model", sn.MODELS)
def test_every_network_on_smallnorb_and_both_splits(cli, tmp_path, model):
    write_norb(tmp_path, 90)
    config = tiny(model, **{"n_epochs": 1} if model in TRAINED else {})
    norb, elevation = ["--norb-dir", tmp_path], ["--split", "elevation"]
    angles = {"azimuth": set(range(0, 360, 20)), "elevation": set(range(30, 75, 5))}
    for data, flags, split in ((without_shapes(config), norb, "azimuth"), (config, elevation, "elevation"),
                               (without_shapes(config), norb + elevation, "elevation")):
        assert cli(*flags_of(data), *flags, "--out-json", "r.json") == (0, "", "")
        run = json.loads((tmp_path / "r.json").read_text())
        assert 0 <= run["held_out"] <= 1 and len(run["sweep"]["angles"]) == len(run["sweep"]["accuracy"]) > 0
        assert data is config or set(run["sweep"]["angles"]) <= angles[split]


@pytest.mark.parametrize("config", [
    TINY, sn.Config(), sn.Config(no_coord_add=True, train_azimuths="290:420", lr=0.25, seed=7), tiny("gap")],
    ids=["toy", "default", "some", "gap"])
def test_flags_make_the_settings(config):
    parser = sn.Parser()
    sn.add_config_flags(parser)
    assert sn.config_from_args(parser.parse_args(flags_of(config))) == config


def test_results_are_those_of_the_checkpoint(cli, tmp_path):
    """Evaluated anew from the file, through the API. The file is JSON without nan, also with one seed."""
    assert cli(*flags_of(TINY), "--out-json", "a.json", "--checkpoint", "a.npz") == (0, "", "")
    text = (tmp_path / "a.json").read_text()
    run = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    checkpoint = sn.load_checkpoint(tmp_path / "a.npz")
    config = checkpoint.config
    with sn.Runner(2) as runner:
        found = sn.evaluate_viewpoint_extrapolation(checkpoint.weights, sn.load_data(config), config, runner)
        sweep = sn.azimuth_sweep(checkpoint.weights, config, runner)
    for name, value in (found | {"sweep": sweep["accuracy"]}).items():
        assert (run["sweep"]["accuracy"] if name == "sweep" else run[name]) == pytest.approx(value, rel=1e-4), name
    assert run["sweep"]["angles"] == sweep["angles"] and run["n_params"] == sn.n_params(checkpoint.params)
    for row, epoch in zip(sn.history_rows(run["history"]), checkpoint.history["epochs"], strict=True):
        assert row == pytest.approx(epoch, rel=1e-4)
    assert run.keys() == {"experiment", "config", "source", "n_params", "label", "seed", *found,
                          "seconds_train", "ms_per_step", "peak_rss_mb", "versions", "machine", "script_sha256",
                          "weights_sha256", "history"}
    assert run["ms_per_step"] == pytest.approx(1e3 * run["seconds_train"] / 4, rel=1e-3)
    assert sn.config_of(run["config"], "a.json") == sn.changed(TINY, quiet=False, baseline="gap")


# ---------------------------------------------------------------- bad input

BAD = {
    "--train-azimuths 0:210": "overlap",
    "--test-azimuths 340:380": "overlap",
    "--train-azimuths 150:0": "--train-azimuths 150:0",
    "--train-azimuths 5": "--train-azimuths 5: must be LOW:HIGH",
    "--test-azimuths 200": "--test-azimuths 200",
    "--elevations nan:70": "--elevations",
    "--train-azimuths 0:360": "0:360",
    "--split elevation --train-elevations 30:50": "overlap",
    "--split elevation --test-elevations 35:70": "overlap",
    "--baseline resnet": "resnet",
    "--baseline cnn,foo": "'foo' is none of",
    "--baseline cnn,": "--baseline cnn,: '' is none of",
    "--baseline cnn,cnn": "--baseline cnn,cnn: a network is named twice",
    "--ablations --baseline cnn": "--baseline: means nothing to --ablations",
    "--train-elevations 30:35": "--train-elevations: means nothing to --split azimuth; leave it out",
    "--test-elevations 50:70": "--test-elevations: means nothing to --split azimuth; leave it out",
    "--split elevation --test-azimuths 60:80": "--test-azimuths: means nothing to --split elevation; leave it out",
    "--split elevation --elevations 40:50": "--elevations: means nothing to --split elevation; leave it out",
    "--out-json no/folder/x.json": "no/folder",
    "--out-json folder": "folder",
    "--checkpoint no/folder/x.npz": "no/folder",
    "--checkpoint folder": "folder",
    "--resume": "--checkpoint",
    "--resume --checkpoint other.npz": "seed 5, now 1",
    "--checkpoint other.npz": "seed 5, now 1",
    "--resume --checkpoint torn.npz": "torn.npz",
    "--norb-dir folder --data smallnorb": "--n-train-views: means nothing to --data smallnorb; leave it out, or give",
    "--data toys": "--n-train-views: means nothing to --data toys; leave it out, or give --data shapes",
    "--data synthetic": "--data: invalid choice: 'synthetic'",
    "--norb-dir folder": "--norb-dir: means nothing to --data shapes; leave it out, or give --data smallnorb",
    "--toy-seed 3": "--toy-seed: means nothing to --data shapes; leave it out, or give --data toys",
    "--n-test 60": "--n-test: means nothing to --data shapes; leave it out, or give --data toys or smallnorb",
    "--toy-seed -1": "--toy-seed -1",
    "--write-norb toys": "means nothing to --write-norb",
    "--lr inf": "--lr",
    "--lr nan": "finite",
    "--lr 1e30 --lr-schedule constant --n-epochs 9": "diverged; lower --lr",
    "--max-shift 9": "--max-shift",
    "--dropout 1": "--dropout",
    "--final-lambda 0": "--final-lambda",
    "--n-seeds 0": "--n-seeds",
    "--model vit": "--model",
    "--n-epochs many": "--n-epochs",
    "--n-epochs 0": "--n-epochs 0: must be at least 1",
    "--n-eval -1": "--n-eval",
    "--no-such-flag": "--no-such-flag",
    "--width 3": "--width: means nothing to --model caps",
    "--width -1": "--width -1",
    "--uniform": "--uniform: means nothing to --model caps",
    "--em-iters 3": "unrecognized arguments: --em-iters",
    "--preset huge": "--preset",
    "--model cnn": "--routing-iters: means nothing to --model cnn",
    "--model gap": "--conv1-channels: means nothing to --model gap",
    "--model gap --ablations": "--conv1-channels"}
BAD_DATA = {                       # with the flags of the toy network alone
    "--data smallnorb": "--norb-dir: --data smallnorb",
    "--data smallnorb --norb-dir nowhere": "nowhere: no such folder",
    "--data smallnorb --norb-dir folder": "smallnorb-5x46789",
    "--data smallnorb --norb-dir folder --toy-seed 1": "--toy-seed: means nothing to --data smallnorb",
    "--data toys --norb-dir folder": "--norb-dir: means nothing to --data toys; leave it out, or give --data smallnorb",
    "--data toys --elevations 30:60": "--elevations: means nothing to --data toys; leave it out, or give --data shapes",
    "--data toys --toy-seed -1": "--toy-seed -1",
    "--data toys --n-test -1": "--n-test -1",
    "--data toys --n-train-toys 6": "--n-train-toys 6",
    "--data toys --train-azimuths 301:319": "no train images: none has azimuths in",
    "--data toys --train-azimuths 300:420": "overlap",
    "--data toys --split toys --test-elevations 60:80": "--test-elevations: means nothing to --split toys",
    "--data toys --split elevation --train-azimuths 0:20": "--train-azimuths: means nothing to --split elevation",
    "--data toys --train-azimuths nan:40": "must be two finite numbers, LOW not above HIGH",
    "--data toys --split toys --test-azimuths 0:360": "azimuth range 0:360: must span",
    "--data shapes --split toys": "--split toys: means nothing to --data shapes"}


@pytest.mark.parametrize("flags, words", [*BAD.items(), *BAD_DATA.items()], ids=[*BAD, *BAD_DATA])
def test_bad_input_is_one_line_and_leaves_no_file(cli, tmp_path, flags, words):
    (tmp_path / "folder").mkdir()
    if "other" in flags or "torn" in flags:
        sn.train(tiny(seed=5, checkpoint=str(tmp_path / "other.npz")))
        (tmp_path / "torn.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:5000])
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    extra = [] if "out-json" in flags else ["--out-json", "result.json"]
    usual = flags_of(without_shapes(TINY) if flags in BAD_DATA else TINY)
    code, _, stderr = cli(*usual, *extra, *flags.split())
    assert code == 2 and stderr.startswith("error: ") and words in stderr
    assert stderr.count("\n") == 1 and stderr.endswith("\n") and "Traceback" not in stderr
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_bad_input_of_a_real_process(run_script):
    bad(run_script(SCRIPT, *TOY, "--train-azimuths", "0:210"), "overlap")
    bad(run_script(SCRIPT, *TOY, "--foo"), "unrecognized")


def test_a_run_that_fails_in_another_process_is_one_line_too(cli, tmp_path):
    config = tiny("cnn", lr=1e30, lr_schedule="constant", n_epochs=9, n_seeds=2, out_json="r.json")
    code, _, stderr = cli(*flags_of(config))
    assert code == 2 and stderr.startswith("error: ") and "diverged" in stderr and stderr.count("\n") == 1
    assert not (tmp_path / "r.json").exists()


def test_help_shows_every_flag(run_script):
    text = " ".join(good(run_script(SCRIPT, "--help")).split())
    for f in sn.options(sn.Config):
        assert sn.flag_of(f.name) in text and " ".join(f.metadata["help"].split()) in text


# ---------------------------------------------------------------- figures and film

FIGURES = ["ablations", "alive", "azimuth_accuracy", "elevation_strip", "em_routing", "example_views",
           "extrapolation_bars", "gap_sweep", "per_class", "pose_matrices", "pose_tracking", "toys", "training_curves"]


def test_figures(run_script, tmp_path):
    results = [tmp_path / name for name in ("main.json", "ablations.json")]
    good(run_script(SCRIPT, *TOY, "--out-json", results[0], "--checkpoint", tmp_path / "run.npz", "--n-seeds", 2))
    good(run_script(SCRIPT, *TOY_DATA, *CAPS, "--ablations", "--out-json", results[1]))
    script = "visualize_smallnorb_novel_viewpoint.py"
    given = ["--results", results[0], "--ablation-results", results[1]]
    good(run_script(script, *given, "--load", tmp_path / "run.npz", "--outdir", tmp_path / "viz"))
    assert sorted(path.stem for path in (tmp_path / "viz").iterdir()) == FIGURES
    assert all(path.stat().st_size < 300_000 for path in (tmp_path / "viz").iterdir())
    bad(run_script(script, "--results", tmp_path / "none.json"), "none.json: no such file")
    (tmp_path / "broken.json").write_text("{}")
    bad(run_script(script, "--ablation-results", tmp_path / "broken.json"), "broken.json: not a whole file")
    bad(run_script(script, "--load", tmp_path / "run.npz", "--only", "toys"), "--load: means nothing to --only toys")
    bad(run_script(script, *given, "--load", tmp_path / "run.npz", "--seed", 5), "was trained with 0")
    for given in (["--load", tmp_path / "run.npz", "--only", "alive"], ["--only", "toys"]):
        bad(run_script(script, *given, "--out-json", tmp_path / "alive.json"), "--out-json: ")
    bad(run_script(script, "--outdir", results[0] / "viz"), "--outdir")
    bad(run_script(script, "--model", "cnn"), "--model cnn")
    bad(run_script(script, "--split", "toys"), "--split toys: the figures show viewpoints")


def test_figures_train_what_is_not_given(run_script, tmp_path):
    good(run_script("visualize_smallnorb_novel_viewpoint.py", *TOY, "--n-epochs", 1, "--outdir", tmp_path))
    drawn = sorted(path.stem for path in tmp_path.glob("*.png"))
    assert drawn == [name for name in FIGURES if name != "toys"]                        # of the shapes


def test_the_capsules_life_as_a_result(run_script, tmp_path):
    path = tmp_path / "r.json"
    good(run_script("visualize_smallnorb_novel_viewpoint.py", *TOY, "--n-epochs", 1, "--seed", 3, "--only", "alive",
                    "--out-json", path, "--outdir", tmp_path))
    found = json.loads(path.read_text())
    assert (tmp_path / "alive.png").exists() and found["config"]["seed"] == 3
    assert {when: set(said) for when, said in found["alive"].items()} == dict.fromkeys(
        ("before", "after"), {"a", "used", "entropy", "r2"})


def test_film(run_script, tmp_path):
    import imageio.v3 as imageio
    script, path = "make_smallnorb_novel_viewpoint_gif.py", tmp_path / "film.gif"
    good(run_script(script, *TOY, "--snapshots", 3, "--sweep-frames", 4, "--fps", 10, "--out", path))
    frames = imageio.imread(path)
    assert len(frames) == 3 + 4 and frames.shape[1:] == (390, 800, 3) and path.stat().st_size < 3e6
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 100
    for flags, words in (
        ("--snapshots 1", "--snapshots 1"), ("--fps 0", "--fps"), ("--sweep-frames 999", "--sweep-frames"),
        ("--data smallnorb", "--data"), ("--baseline none", "--baseline none"),
        (f"--out {tmp_path / 'no' / 'film.gif'}", "folder"), (f"--out {tmp_path / 'film.png'}", ".gif")):
        bad(run_script(script, *(TOY if "baseline" not in flags else [*TOY_DATA, *CAPS]), *flags.split()), words)
