"""compare.py: models and seeds as processes, resumed, one table; trained networks; bad input in one line."""
import json
import re

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from conftest import run_offline

import compare

EXPERIMENT = "smallnorb_novel_viewpoint"
TOY = "--data", "shapes", "--n-elev", 1, "--n-per-combo", 1, "--n-epochs", 1
TRAIN = EXPERIMENT, "--model", "cnn", "matrix-capsnet", "--n-seeds", 2, "--jobs", 2, "--routing-iters", 1, *TOY


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A folder, and what the comparison that was made in it printed"""
    home = tmp_path_factory.mktemp("compared")
    done = run_offline(home, "compare.py", *TRAIN, "--out-json", "all.json")
    assert done.returncode == 0, done.stderr
    return home, done.stdout


def made(home):
    """The results in a folder, sorted by model and seed"""
    places = (home / "runs" / "compare" / EXPERIMENT).glob("*/metrics.json")
    lines = [json.loads(path.read_text("utf-8")) for path in places]
    return sorted(lines, key=lambda line: (line["config"]["model"], line["config"]["seed"]))


def test_every_model_is_trained_with_every_seed_and_its_own_flags(compared):
    """--routing-iters 1 is of the capsules; the CNN, which has no routing, is trained without it"""
    home, out = compared
    lines = made(home)
    assert [(line["config"]["model"], line["config"]["seed"]) for line in lines] == [
        ("cnn", 0), ("cnn", 1), ("matrix-capsnet", 0), ("matrix-capsnet", 1)]
    assert lines[2]["config"]["routing_iters"] == 1 and out.startswith("4 of 4 runs to do, 2 at a time")
    assert len(re.findall(r"^ +\d+ s  .*, seed \d  done$", out, re.M)) == 4
    assert not (home / "runs" / EXPERIMENT).exists()


def test_the_table_has_means_intervals_and_paired_differences(compared):
    home, out = compared
    cnn, capsules = (np.array([line["novel"] for line in made(home)]).reshape(2, 2))
    kept = json.loads((home / "all.json").read_text("utf-8"))
    assert kept["seeds"] == [0, 1] and list(kept["networks"]["cnn"]) == ["n_params", "familiar", "novel", "drop"]
    assert kept["networks"]["cnn"]["n_params"] == made(home)[0]["n_params"]
    mean, half = (cnn - capsules).mean(), 12.7062 * (cnn - capsules).std(ddof=1) / 2 ** 0.5
    found = kept["differences"]["cnn - matrix-capsnet"]["novel"]
    assert found == pytest.approx([mean, mean - half, mean + half], abs=1e-4)
    table = out[out.index("\nnetwork  "):]
    assert f"  {cnn.mean():.3f} [" in table and "\nTest samples of five shapes\n" in out
    assert "mean [95% t interval] over 2 seeds\n\nDifference in percentage points, paired by seed [95% CI]" in table
    assert f"  {100 * mean:+.1f} [{100 * (mean - half):+.1f}, " in table.split("cnn - matrix-capsnet")[1]


def test_what_is_made_is_not_made_again_and_a_run_that_was_stopped_resumes(compared):
    home, out = compared
    again = run_offline(home, "compare.py", *TRAIN)
    assert again.stdout.startswith("all of 4 runs are in ")
    assert again.stdout.endswith(out[out.index("\nnetwork  "):].removesuffix("wrote all.json\n"))
    path, = home.glob(f"runs/compare/{EXPERIMENT}/cnn-seed1-*/metrics.json")
    before = json.loads(path.read_text("utf-8"))["novel"]
    path.unlink()                                                       # its weights stay
    resumed = run_offline(home, "compare.py", *TRAIN)
    assert resumed.stdout.startswith("1 of 4 runs to do") and "resuming at" in resumed.stdout
    assert json.loads(path.read_text("utf-8"))["novel"] == before


def test_variants_are_named_by_the_flags_that_differ(tmp_path):
    """Flags of all variants are not in their names; every model has every variant"""
    variants = "--variant", "--width 8 --lr 0.01", "--variant", "--width 8 --lr=0.02", "--variant", "--width 8"
    flags = *variants, "--model", "cnn", "--n-seeds", 2, "--out-json", "all.json", *TOY
    done = run_offline(tmp_path, "compare.py", EXPERIMENT, *flags)
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "all.json").read_text("utf-8"))
    assert list(kept["networks"]) == ["lr 0.01", "lr=0.02", "cnn"]
    rates = {line["config"]["lr"] for line in made(tmp_path)}
    assert rates == {0.01, 0.02, 0.002} and {line["config"]["width"] for line in made(tmp_path)} == {8}
    arms = compare.arms_of(EXPERIMENT, ["cnn", "matrix-capsnet"], ["--routing-iters 3", ""], [])
    assert [arm.name for arm in arms] == ["cnn", "matrix-capsnet routing-iters 3", "matrix-capsnet"]
    assert arms[0].words == ["--model", "cnn"] and arms[1].words[2:] == ["--routing-iters", "3"]
    alone, = compare.arms_of(EXPERIMENT, [], ["--lr 0.1", "--lr 0.1"], [])
    assert alone.words == ["--model", "matrix-capsnet", "--lr", "0.1"]  # not all that the script trains by itself


def test_other_flags_are_another_run(compared):
    home, _ = compared
    done = run_offline(home, "compare.py", EXPERIMENT, "--model", "cnn", *TOY, "--lr", 0.01)
    assert done.stdout.startswith("1 of 1 run to do") and "one seed each: no intervals" in done.stdout
    assert "[" not in done.stdout[done.stdout.index("\nnetwork  "):] and "Difference" not in done.stdout


def test_trained_networks_are_compared_by_their_files(compared):
    home, out = compared
    files = sorted(home.glob(f"runs/compare/{EXPERIMENT}/matrix-capsnet-seed*"))[-2:]
    done = run_offline(home, "compare.py", "--load", *files, *TOY[:2], "--out-json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    novel = [line["novel"] for line in made(home) if line["config"]["model"] == "matrix-capsnet"][-2:]
    assert list(found["networks"]) == ["matrix-capsnet"] and found["networks"]["matrix-capsnet"]["novel"][0] == (
        pytest.approx(np.mean(novel), abs=1e-4))


@pytest.mark.parametrize("words, said", [
    (["nothing", "--model", "cnn"], "nothing: no such experiment. Give one of "),
    ([EXPERIMENT], "give EXPERIMENT and --model or --variant to train, or --load"),
    ([EXPERIMENT, "--model", "cnn", "perceptron"], "--model perceptron: .* no such model. Give some of .*cnn"),
    ([EXPERIMENT, "--model", "cnn", "--n-seeds", "0"], "--n-seeds 0: must be between 1 and 1,000"),
    ([EXPERIMENT, "--model", "cnn", "--first-seed", "-1"], "--first-seed -1: must be between 0 and 4,294,967,295"),
    ([EXPERIMENT, "--model", "cnn", "--seed", "3"], "--seed: this program sets it for each run. Give --first-seed"),
    ([EXPERIMENT, "--model", "cnn", "--outdir", "x"], "--outdir: .*Leave it out"),
    ([EXPERIMENT, "more", "--model", "cnn"], "more: belongs to no flag"),
    ([EXPERIMENT, "--model", "cnn", "--lr", "-1"], "cnn, seed 0: --lr -1.0: must be from 1e-09"),
    ([EXPERIMENT, "--model", "cnn", "--routing-iters", "3"], "cnn, seed 0: --routing-iters applies only to"),
    ([EXPERIMENT, "--model", "cnn", "--out-json", "no/x.json"], "cannot write .*x.json"),
    (["--load", "none.npz"], "--load none.npz: no such file"), (["--load", "text.npz"], "not a weights file of an"),
    (["--load", "text.npz", "text.npz"], "--load: a file is given twice"),
    (["--load", "text.npz", "--n-seeds", "2"], "--n-seeds and --first-seed are for training")])
def test_bad_input_is_one_line(call, tmp_path, words, said):
    (tmp_path / "text.npz").write_text("text", "utf-8")
    code, out, err = call(sn, compare.main, *words)
    assert code == 2 and re.search(f"^error: .*{said}", err) and err.count("\n") == 1 and out.count("\n") <= 1, err
