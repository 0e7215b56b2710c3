"""The workflow end to end, at toy size, in a copy of the project: two runs in parallel, one of them killed in the
middle and resumed, the tables checked afterwards; golden values decide what is stale. Needs requirements-dev.txt."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "workflow"))
from lab.files import five_digits  # noqa: E402

import mutate  # noqa: E402
import result_files  # noqa: E402
import runs  # noqa: E402

TOY_RUNS = """

TOY_FLAGS = "--n-epochs 12 --n-train 320 --n-val 32 --n-test 64 --digits synthetic --conv1-channels 2"
RESULTS = [Result(MULTI, "main", "deep", seed, TOY_FLAGS, 0.1) for seed in (0, 1)]
"""
TOY_KEY = "--conv1-channels 2"
MARK = "<!-- value: multimnist main/deep, n_params, plain -->not run<!-- end -->\n"


@pytest.fixture
def project(tmp_path):
    """A copy of the project, without results, whose workflow has two short runs with empty golden values"""
    copy = tmp_path / "project"
    left_out = shutil.ignore_patterns(".git", ".venv", "runs", ".snakemake", "__pycache__", "*.gif", "viz", "*.jsonl")
    shutil.copytree(ROOT, copy, ignore=left_out)
    with open(copy / "workflow" / "runs.py", "a", encoding="utf-8") as file:
        file.write(TOY_RUNS)
    experiment = copy / "multimnist_capsnet.py"        # few synthetic digits: drawing all takes longer than a toy run
    text, few = experiment.read_text("utf-8"), '"train": 400, "val": 100, "test": 100}'
    text, n_found = re.subn('"train": 20000, "val": 2500, "test": 5000}', few, text)
    assert n_found == 1
    experiment.write_text(text, "utf-8", newline="\n")
    set_generation(copy, 1)
    for document in copy / "README.md", *(copy / "docs").rglob("*.md"):  # they speak of other runs
        document.write_text(f"# {document.stem}\n\n{MARK}", "utf-8")
    return copy


def set_generation(project, since):
    """Let the golden values of the two runs have changed in a generation"""
    path = project / "tests" / "golden.json"
    golden = json.loads(path.read_text("utf-8"))
    golden["values"]["multimnist_capsnet"][TOY_KEY] = {"since": since}
    path.write_text(json.dumps(golden), "utf-8")


def start(project, *words):
    python = str(Path(sys.executable).parent)
    env = os.environ | {"PATH": f"{python}{os.pathsep}{os.environ['PATH']}", "HOME": str(project.parent)}
    return subprocess.Popen([sys.executable, "-m", "snakemake", "--cores", "2", *words], cwd=project, env=env,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run(project, *words):
    process = start(project, *words)
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


def planned(project):
    """How many runs a dry run would train"""
    code, out = run(project, "tables", "--dry-run")
    assert code == 0, out
    return max(map(int, re.findall(r"^train +(\d+)$", out, re.M)), default=0)


def training(project, seed):
    """Process number of the project's training run of a seed; None if there is none. Others on the machine may train
    with that seed too: only a process that works in the project's folder is ours to kill."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, where = (folder / "cmdline").read_text("utf-8").split("\0"), (folder / "cwd").resolve(strict=True)
        except OSError:
            continue
        ours = where == project.resolve() and words[0].endswith("python3") and "multimnist_capsnet.py" in words
        if ours and "--seed" in words and words[words.index("--seed") + 1] == str(seed):
            return int(folder.name)
    return None


def test_a_run_without_golden_values_is_not_started(project):
    with open(project / "workflow" / "runs.py", "a", encoding="utf-8") as file:
        file.write('TOY_FLAGS += " --warp 0.5"\n'
                   'RESULTS = [Result(MULTI, "main", "deep", 0, TOY_FLAGS, 0.1)]\n')
    code, out = run(project, "tables", "--dry-run")
    assert code != 0 and "error: no golden values for multimnist_capsnet/main/deep-0; store them with" in out


def test_one_table_or_one_setting_can_be_made_alone(project):
    with open(project / "workflow" / "runs.py", "a", encoding="utf-8") as file:
        file.write('RESULTS = [Result(MULTI, table, "deep", 0, TOY_FLAGS, 0.1) for table in ("main", "control")]\n')
    for only, n in (("multimnist_capsnet", 2), ("multimnist_capsnet/main", 1), ("multimnist_capsnet/main/deep", 1)):
        code, out = run(project, "tables", "--dry-run", "--config", f"only={only}")
        assert code == 0 and f"{n} of {n} results are missing or stale" in out
    code, out = run(project, "tables", "--dry-run", "--config", "only=multimnist_capsnet/mian")
    assert code != 0 and "error: --config only=multimnist_capsnet/mian: workflow/runs.py has no such" in out


def test_figures_and_animations_are_listed_with_their_time(project):
    code, out = run(project, "figures", "animations", "weights", "--dry-run", "--printshellcmds")
    drawn = re.findall(r"^Job \d+: (figures|animations) (\S+): about \d+ minutes of two cores$", out, re.M)
    assert code == 0 and sorted(drawn) == sorted(
        [("figures", name) for name in runs.FIGURES] + [("animations", name) for name in runs.ANIMATIONS]), out
    assert all(command in out for command, *_ in (*runs.FIGURES.values(), *runs.ANIMATIONS.values()))


def test_every_job_on_slurm_has_a_memory_and_a_time_limit(project):
    """From the minutes of the run list. A dry run prints the resources of a rule that has no message."""
    pytest.importorskip("snakemake_executor_plugin_slurm", reason="requirements-dev.txt is not installed")
    snakefile = project / "workflow" / "Snakefile"
    snakefile.write_text(re.sub(r"    message:\n(?: {8}.*\n)+", "", snakefile.read_text("utf-8")), "utf-8")
    code, out = run(project, "tables", "figures", "--profile", "workflow/slurm", "--dry-run")
    limits = re.findall(r"^rule (train|draw):(?:\n .*)*?\n    resources: .*mem_mb=4000,.* runtime=(\d+)$", out, re.M)
    assert code == 0 and sorted(limits) == sorted(
        [("train", "61")] * 2 + [("draw", str(60 + 4 * minutes)) for *_, minutes in runs.FIGURES.values()]), out


def test_no_process_of_another_folder_is_taken_for_ours(tmp_path):
    """So that the test below cannot kill somebody's run with the same seed"""
    (tmp_path / "elsewhere").mkdir()
    words = ["python3", "-c", "import time; time.sleep(60)", "multimnist_capsnet.py", "--seed", "77"]
    sleeper = subprocess.Popen(words, executable=sys.executable, cwd=tmp_path / "elsewhere")
    try:
        assert training(tmp_path, 77) is None and training(tmp_path / "elsewhere", 77) == sleeper.pid
    finally:
        sleeper.kill()
        sleeper.wait()


def test_killed_resumed_checked_and_not_run_again(project, tmp_path):
    assert planned(project) == 2
    process = start(project, "tables")
    deadline = time.monotonic() + 120
    while not (found := list(project.glob("runs/results/*/*/main/deep-0/weights.npz"))) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(training(project, 0), signal.SIGKILL)
    out, _ = process.communicate(timeout=300)
    assert process.returncode != 0 and found and not result_files.read(project / "results"), out
    code, out = run(project, "tables")
    assert code == 0, out
    made = result_files.read(project / "results")
    assert list(made) == [f"multimnist_capsnet/main/deep-{seed}" for seed in (0, 1)]
    assert all(line["generation"] == 1 for line in made.values()) and not list(project.glob("runs/results/**/*.json"))

    # the killed run has found what one found that never was
    line = made["multimnist_capsnet/main/deep-0"]
    whole = tmp_path / "whole.json"
    flags = [f"--{name.replace('_', '-')}={line['config'][name]}" for name in
             ("n_epochs", "n_train", "n_val", "n_test", "conv1_channels")]
    flags += ["--digits=synthetic", "--quiet", "--threads=2", f"--outdir={tmp_path / 'whole'}", f"--out-json={whole}"]
    subprocess.run([sys.executable, "multimnist_capsnet.py", *flags], cwd=project, check=True)
    other = five_digits(json.loads(whole.read_text("utf-8")))
    assert line["history"]["train_loss"] == other["history"]["train_loss"]
    assert all(line[key] == other[key] for key in ("test_exact_match", "test_recon_mse"))

    # the documents say it; nothing is run again, here or in a copy with other times, except where golden values changed
    assert subprocess.run([sys.executable, "results/render.py", "--check"], cwd=project).returncode == 0
    assert f"{line['n_params']:,}" in (project / "docs" / "reference" / "multimnist_capsnet.md").read_text("utf-8")
    assert planned(project) == 0
    fresh = tmp_path / "fresh"
    left_out = shutil.ignore_patterns(".snakemake")
    shutil.copytree(project, fresh, ignore=left_out, copy_function=shutil.copyfile)
    with open(fresh / "multimnist_capsnet.py", "a", encoding="utf-8") as file:
        file.write("# a change of wording\n")
    assert planned(fresh) == 0
    set_generation(fresh, 2)
    assert planned(fresh) == 2


def test_a_slim_network_names_digits_as_the_whole_one_does(tmp_path):
    whole, slim = ROOT / "weights" / "affnist_capsnet-shared.npz", tmp_path / "slim.npz"
    subprocess.run([sys.executable, "workflow/slim.py", str(whole), str(slim), "--small"], cwd=ROOT, check=True)
    code = """if True:
        import sys, affnist_capsnet as affnist
        images = affnist.place_digits(affnist.synthesize_digits(100, 0)[0], affnist.np.full((100, 2), 6), 40) / 255
        networks = [affnist.load(path) for path in sys.argv[1:]]
        named = [affnist.forward(affnist.weights_of(state), images.astype("f4"), config)[0]["scores"].argmax(1)
                 for config, state in networks]
        assert (named[0] == named[1]).mean() >= 0.95 and "0.0005" in networks[1][1]["history"]["slimmed"]"""
    subprocess.run([sys.executable, "-c", code, str(whole), str(slim)], cwd=ROOT, check=True)
    assert slim.stat().st_size < whole.stat().st_size / 8


@pytest.mark.parametrize("command, said", [
    ("slim.py weights/affnist_capsnet-shared.npz", "the following arguments are required"),
    ("slim.py nowhere.npz TARGET", "nowhere.npz"),
    ("slim.py README.md TARGET", "no trained network"),
    ("slim.py weights/smallnorb_cnn.npz TARGET --small", "--small is for networks of affnist_capsnet.py. Leave it out"),
    ("slim.py weights/affnist_cnn-gap.npz TARGET/net.npz", "TARGET"),
    ("mutate.py affnist_capsnet --functions nothing", "--functions nothing: affnist_capsnet.py has none of them"),
    ("mutate.py affnist_capsnet --threads 0", "--threads: at least 1")])
def test_tools_refuse_in_one_line_and_leave_nothing_behind(tmp_path, command, said):
    target = tmp_path / "target"
    target.write_text("as it was", "utf-8")
    program, *words = command.replace("TARGET", str(target)).split()
    run = subprocess.run([sys.executable, f"workflow/{program}", *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and said.replace("TARGET", str(target)) in run.stderr.splitlines()[-1], run
    assert "Traceback" not in run.stderr
    assert [*tmp_path.iterdir()] == [target] and target.read_text("utf-8") == "as it was"


def test_each_mutant_that_is_said_to_change_nothing_is_one():
    """workflow/mutants.txt names lines as they would be: it must keep up with the scripts"""
    every = {(script, *mutant[:2]) for script in mutate.TESTS for mutant in mutate.mutants(script)}
    assert {script for script, *_ in every} == set(mutate.TESTS)
    assert mutate.harmless() <= every, mutate.harmless() - every
