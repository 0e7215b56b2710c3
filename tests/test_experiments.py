"""Black-box tests of the scripts alone. Each experiment is copied into an empty folder and runs there as a process,
without network, MNIST or other files of the project; the tests look at what it prints and writes.

Each run is made once, for all tests that look at it; two processes run side by side.
"""
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import claims
import numpy as np
import pytest
import runs
from conftest import DEAD, HOMES, POSIX, ROOT, assert_same, idx, toy_digits

MULTI, NORB, AFF = runs.MULTI, runs.NORB, runs.AFF
every_experiment = pytest.mark.parametrize("experiment", runs.EXPERIMENTS)
DIGITS = ("train", "t10k")         # the two parts of a data set in idx files
ENVIRONMENT = dict(os.environ)     # before a test changes it while a run is being started in a thread
EPOCHS = 2                         # of every run that is killed, resumed or compared
MANY = 40                          # of one that is stopped by Ctrl-C, which a process may notice late
RUN = {                            # the flags of the run that most tests look at
    MULTI: {**runs.TOY[MULTI], "--model": "capsnet"},
    AFF: {**runs.TOY[AFF], "--model": "capsnet-shared", "--conv1-channels": 4},
    NORB: {**runs.TOY_SHAPES, "--n-elev": 1, "--data": "shapes", "--model": "matrix-capsnet", "--preset": "small"}}
SEVERAL = "cnn-gap", "matrix-capsnet"                    # of the experiment whose question is a comparison
OTHERS = {                         # other tasks and networks, which must train, too; the metrics that they report
    MULTI: {"--model vector-dense --min-iou 0 --merge add --warp 0.3": ("test_exact_match", "test_recon_mse"),
            "--preset classic --conv1-channels 4 --lr-schedule constant": ("test_exact_match", "test_recon_mse")},
    NORB: {"--data toys --n-train-toys 1 --train-azimuths 300:300 --test-azimuths 80:80 --n-test 30 --model cnn":
           ("familiar", "novel"), "--model cnn-gap": ("familiar", "novel")},
    AFF: {"--task mnist --model cnn-gap": ("test_accuracy",),
          "--preset small --model capsnet --conv1-channels 8 --train-shift full": ("affine_accuracy",)}}
CHANGES = {                        # of an evaluation, without training again
    MULTI: "--routing-iters 1 --min-iou 0", AFF: "--routing-iters 3", NORB: "--routing-iters 1"}
SHIPPED = {MULTI: "affnist_cnn-gap", AFF: "smallnorb_cnn", NORB: "multimnist_capsnet"}    # of another experiment


def words_of(flags):
    return [str(word) for pair in flags.items() for word in pair]


LONG = "x" * 300
BROKEN = ("torn-digits", "text-digits", "three-files", "few-labels", "gzip-digits")
# What a user gets wrong, each kind of mistake once: flags -> what the line of error names; "": the first of the flags.
# All bounds, choices and rules between flags: test_core_settings.py. A word that names a place of run_cases is that
# place: run, the folder of a finished run; net.npz, its weights; torn.npz, flipped.npz, text.npz and other.npz, no
# network of this experiment; torn, text and other, folders with such weights; published, one whose weights have no
# moments; letters, a folder with another file; empty, a folder. A key of BROKEN is a folder of digits.
BAD_FLAGS = {
    "--no-such-flag": "", "--epochs 1": "Did you mean --n-epochs?",
    "--checkpoint x": "--outdir", "--out-weights x": "slim.py",
    "--n-epochs many": "", "--n-epochs 0": "", "--n-epochs 1.5": "", "--lr": "", "--lr nan": "",
    "--model nobody": "", "--seed -1": "", "--lr 1e30 --warmup 0 --n-epochs 9": "--lr", "stray": "stray"}
BAD_FILES = {
    **{f"--out-json {name}": name.split("/")[0] for name in ("empty", ".", "net.npz/x.json", LONG)},
    **{f"--outdir {name}": name.split("/")[0] for name in ("net.npz", "net.npz/x", LONG, "letters")},
    "--load": ".npz", f"--load {LONG}": LONG, "--load net.npz run": "run", "--load ''": "weights.npz: No such file",
    **{f"--load {name}": name for name in ("none.npz", "empty", "torn.npz", "flipped.npz", "text.npz", "other.npz")},
    "--load net.npz --lr 0.5": "--lr", "--load net.npz --model cnn": "--model",
    "--load net.npz --init net.npz": "--init", "--load net.npz --out-json net.npz": "named like weights",
    "--load net.npz --outdir run": "holds a run", f"--out-json {os.devnull}": "folder or a device",
    "--outdir run --seed 1": "seed", "--outdir run --lr 0.123": "lr", "--outdir run --init net.npz": "--init",
    "--outdir published": "moments", **{f"--outdir {name}": name for name in ("torn", "text", "other")}}
BAD_DIGITS = {
    "--digits roman": "", "--n-train 0": "", "--model cnn --recon-weight 0.1": "--recon-weight",
    **{f"--data-dir {name}": name for name in ("nowhere", "empty", *BROKEN, LONG)}}
BAD = {
    MULTI: BAD_FLAGS | BAD_FILES | BAD_DIGITS | {
        "--min-iou 2": "", "--model cnn --routing-iters 2": "--routing-iters", "--cnn-head gap": "",
        "--model cnn capsnet": "compare.py", "--model cnn --preset classic": "--preset classic applies only to",
        "--outdir run --min-iou 0.5": "min", "--preset classic --conv3-channels 8": "--conv3-channels"},
    AFF: BAD_FLAGS | BAD_FILES | BAD_DIGITS | {
        "--train-shift far": "", "--n-per-class 5000": "", "--model cnn-gap --loss margin": "--loss",
        "--affnist-dir nowhere": "", "--task mnist --affnist-dir empty": "--affnist-dir",
        "--model cnn-gap --routing-iters 2": "--routing-iters", "--model cnn-gap --preset small": "--preset",
        "--model cnn-gap --conv1-channels 100": "--conv1-channels", "--model cnn cnn-gap": "compare.py"},
    NORB: BAD_FLAGS | BAD_FILES | {
        "--data norb": "", "--data smallnorb": "--norb-dir", "--data smallnorb --norb-dir nowhere": "nowhere",
        "--data smallnorb --norb-dir empty": "empty", "--norb-dir empty": "", "--split instance": "",
        "--train-azimuths 5": "", "--train-azimuths 90:0": "", "--train-azimuths 0:210": "", "--train-azimuths a:b": "",
        "--train-azimuths 1:2:3": "", "--test-azimuths nan:3": "", "--data toys --train-azimuths 301:319": "azimuth",
        "--model cnn cnn-gap --outdir run": "run", "--model cnn cnn-gap --init net.npz": "--init",
        "--toy-seed 1": "", "--data toys --n-elev 2": "--n-elev", "--model cnn --dropout 1": "--dropout",
        "--model cnn --routing-iters 3": "--routing-iters", "--width 8": ""}}


# ---------------------------------------------------------------- processes

DRIVER = """
import json, os, sys, traceback, types
script, cases, results = sys.argv[1:]
with open(script, encoding="utf-8") as file:
    code = compile(file.read(), script, "exec")
done = {}
with open(cases, encoding="utf-8") as file:
    cases = json.load(file)
for name, folder, words in cases:
    os.chdir(folder)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__, sys.argv, status = script, [script, *words], 0
    for stream in ("stdout", "stderr"):
        setattr(sys, stream, open(os.path.join(folder, os.pardir, stream), "w", encoding="utf-8"))
    try:
        exec(code, vars(main))
    except SystemExit as stop:
        status = stop.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.close(), sys.stderr.close()
    done[name] = status
with open(results, "w", encoding="utf-8") as file:
    json.dump(done, file)
"""


class Alone:
    """The runs of one experiment, as futures: each attribute is awaited by calling it"""

    def __init__(self, experiment, home, digits, pool):
        self.experiment, self.home, self.digits, self.pool = experiment, home, digits, pool
        self.data = ["--data-dir", str(digits / "good")] if "--digits" in RUN[experiment] else []
        self.small = words_of({**RUN[experiment], "--n-epochs": EPOCHS}) + self.data
        files = "--outdir run --out-json result.json".split()
        one = [*self.small, "--threads", "1", *files]
        self.trained = self.start(self.run, "trained", one)
        self.unread = self.start(self.run_unread, "unread", [*self.small, "--threads", "2", *files])
        self.resumed = self.start(self.run_killed, "resumed", one)
        many = ["--threads", "1", "--n-epochs", str(MANY)]
        self.stopped = self.start(self.run_stopped, "stopped", [*self.small, *many])
        self.full = self.start(self.run_full, "full", [*one, "--n-epochs", "1"])
        self.cases = self.start(self.run_cases)

    def start(self, function, *arguments):
        future = self.pool.submit(function, *arguments)

        def result():
            if future.exception():             # said anew: an exception that is raised often grows with each traceback
                pytest.fail(f"{function.__name__}: {future.exception()!r}", pytrace=False)
            return future.result()
        return result

    def open(self, name, words, **streams):
        """Start the script in a folder of its own, in which there is nothing else; synthetic digits are few"""
        folder = self.home / self.experiment / name
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / f"{self.experiment}.py"
        text, few = (ROOT / script.name).read_text("utf-8"), '"train": 80, "val": 20, "test": 20}'
        script.write_text(text.replace('"train": 20000, "val": 2500, "test": 5000}', few), "utf-8")
        return folder, subprocess.Popen([sys.executable, script.name, *words], cwd=folder, env=self.environment(),
                                        text=True, encoding="utf-8", stderr=subprocess.PIPE, **streams)

    def environment(self):
        gone = ("MNIST_DIR", "PYTHONPATH", "PYTHONSAFEPATH")
        env = {name: value for name, value in ENVIRONMENT.items() if name not in gone}
        env |= dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), DEAD)
        return env | dict.fromkeys(HOMES, str(self.home)) | {"no_proxy": "", "COLUMNS": "1000", "PYTHONUTF8": "1"}

    def run(self, name, words):
        """Run the script to its end"""
        folder, process = self.open(name, words, stdout=subprocess.PIPE)
        out, err = process.communicate(timeout=300)
        return SimpleNamespace(folder=folder, code=process.returncode, out=out, err=err)

    def run_unread(self, name, words):
        """Run the script as in `script | head -1`: the first line is read, then nobody reads any more"""
        folder, process = self.open(name, words, stdout=subprocess.PIPE)
        out = process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        return SimpleNamespace(folder=folder, code=process.wait(300), out=out, err=err)

    def run_full(self, name, words):
        """Run the script on a disk that is full"""
        if not os.path.exists("/dev/full"):
            return None
        with open("/dev/full", "w", encoding="utf-8") as full:
            folder, process = self.open(name, words, stdout=full)
            return SimpleNamespace(folder=folder, err=process.communicate(timeout=300)[1], code=process.returncode)

    def run_killed(self, name, words):
        """Kill the script after its first epoch, then run the same command again"""
        folder, process = self.open(name, words, stdout=subprocess.PIPE)
        for line in process.stdout:
            if line.startswith("epoch 1/") or process.poll() is not None:
                break
        process.kill()
        left = process.communicate()[0]
        assert process.returncode not in (0, 2) and f"epoch {EPOCHS}/" not in left, "ended before it was killed"
        with np.load(folder / "run" / "weights.npz"):                       # a whole file
            pass
        assert not (folder / "run" / "metrics.json").exists()
        return self.run(name, words)

    def run_stopped(self, name, words):
        """Press Ctrl-C after the first epoch; then give the command that is printed. The signal is ignored by what runs
        in the background of a shell, and by its children: not by this one"""
        def heed():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        posix = {"preexec_fn": heed} if os.name == "posix" else {}
        folder, process = self.open(name, words, stdout=subprocess.PIPE, **posix)
        for line in process.stdout:
            if line.startswith("epoch 1/") or process.poll() is not None:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
        command = err.partition("To resume: ")[2]
        assert command, f"ended before it was stopped: {err}"
        again = self.run(name, shlex.split(command)[2:])
        return SimpleNamespace(folder=folder, code=process.returncode, out=out, err=err, again=again)

    def run_cases(self):
        """Run the cases in one process, each in a folder of its own -> {name: how it ended}"""
        trained = self.trained()
        parts = self.home / self.experiment / "parts"
        parts.mkdir()
        if trained.code == 0:
            shutil.copytree(trained.folder / "run", parts / "run")
            shutil.copyfile(parts / "run" / "weights.npz", parts / "net.npz")
            whole = (parts / "net.npz").read_bytes()
            (parts / "torn.npz").write_bytes(whole[:len(whole) // 2])
            (parts / "flipped.npz").write_bytes(whole[:3000] + bytes([whole[3000] ^ 255]) + whole[3001:])
            with np.load(parts / "net.npz") as file:
                kept = {name: file[name] for name in file.files if not name.startswith("adam_")}
            (parts / "published").mkdir()
            np.savez(parts / "published" / "weights.npz", **kept)
        (parts / "text.npz").write_text("no network\n", "utf-8")
        shutil.copyfile(ROOT / "weights" / f"{SHIPPED[self.experiment]}.npz", parts / "other.npz")
        for name in ("torn", "text", "other"):
            if (parts / f"{name}.npz").exists():
                (parts / name).mkdir()
                shutil.copyfile(parts / f"{name}.npz", parts / name / "weights.npz")
        (parts / "letters").mkdir()
        (parts / "letters" / "to-a-friend.txt").write_text("hello\n", "utf-8")
        names = {path.name for path in parts.iterdir()}
        found, todo = {}, []
        for k, (name, words) in enumerate(self.listed_cases(trained)):
            folder = self.home / self.experiment / f"case{k}" / "here"
            folder.mkdir(parents=True)
            for word in words:
                if word == "empty":
                    (folder / word).mkdir()
                elif (name_of := word.split("/")[0]) in names and not (folder / name_of).exists():
                    copy = shutil.copytree if (parts / name_of).is_dir() else shutil.copyfile
                    copy(parts / name_of, folder / name_of)
            found[name] = SimpleNamespace(folder=folder, before=content_of(folder))
            todo.append((name, str(folder), words))
        (parts / "cases.json").write_text(json.dumps(todo), "utf-8")
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, str(trained.folder / f"{self.experiment}.py"), str(parts / "cases.json"),
             str(parts / "codes.json")], cwd=parts, env=self.environment(), capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        for name, code in json.loads((parts / "codes.json").read_text("utf-8")).items():
            case = found[name]
            case.code, case.after = code, content_of(case.folder)
            case.out, case.err = ((case.folder.parent / part).read_text("utf-8") for part in ("stdout", "stderr"))
        return found

    def listed_cases(self, trained):
        """Yield the name and the flags of each case"""
        base = [*self.small, "--threads", "1"]

        def based(flags):
            return [*(["--threads", "1"] if re.search("--load|--data (toys|smallnorb)", flags) else base), *self.data]
        json_file = ["--out-json", "result.json"]
        yield "as printed", [*loading_words(self.experiment, trained), *self.size(), *self.data, *json_file]
        for name in ("run", "net.npz", "published"):
            yield f"load {name}", ["--load", name, *self.size(), *self.data, *json_file]
        yield "again", [*base, "--outdir", "run", *json_file]
        yield "changed", ["--load", "net.npz", *self.size(), *self.data, *shlex.split(CHANGES[self.experiment]),
                          *json_file]
        yield "saved", ["--load", "run", *self.size(), *self.data, "--outdir", "copy"]
        if self.experiment == NORB:
            yield "several", [*base, "--model", *SEVERAL, "--outdir", "both", *json_file]
            yield "several again", [*base, "--model", *SEVERAL, "--outdir", "both"]
        for flags in OTHERS[self.experiment]:
            words = [*based(flags), *shlex.split(flags), "--n-epochs", "1", *json_file]
            yield f"other {flags}", words
        for flags in BAD[self.experiment]:
            words = [str(self.digits / word) if word in BROKEN else word for word in shlex.split(flags)]
            yield f"bad {flags}", [*based(flags), *words]

    def size(self):
        """The flags that say how many test images an evaluation has"""
        given = RUN[self.experiment]
        return ["--n-test", str(given["--n-test"])] if "--n-test" in given else []


def content_of(folder):
    """Return {path: bytes, or None of a folder} of everything in a folder"""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """alone(experiment) -> its runs, begun when the first test asks for them"""
    home, begun = tmp_path_factory.mktemp("alone"), {}
    write_digits(home / "digits")
    pool = ThreadPoolExecutor(2)

    def ask(experiment):
        if experiment not in begun:
            begun[experiment] = Alone(experiment, home, home / "digits", pool)
        return begun[experiment]
    yield ask
    pool.shutdown(cancel_futures=True)


def write_digits(home):
    """Write four idx files of toy digits to home/good, and data sets with one fault each beside it"""
    arrays = dict(zip(DIGITS, (toy_digits(n=800)["train"], toy_digits(n=200)["test"])))
    for name in ("good", *BROKEN):
        (home / name).mkdir(parents=True)
        for part, (images, labels) in arrays.items():
            (home / name / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
            (home / name / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    images, labels = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
    (home / "torn-digits" / images).write_bytes((home / "good" / images).read_bytes()[:5000])
    (home / "text-digits" / images).write_text("five, seven\n", "utf-8")
    (home / "three-files" / labels).unlink()
    (home / "few-labels" / labels).write_bytes(idx(arrays["train"][1][:700]))
    (home / "gzip-digits" / images).unlink()
    (home / "gzip-digits" / f"{images}.gz").write_bytes(gzip.compress((home / "good" / images).read_bytes())[:5000])


def loading_words(experiment, trained):
    """Return the flags of the command with which, as a run says in the end, its network is loaded"""
    commands = re.findall(rf"{experiment}\.py (--load .*)", trained.out)
    words = shlex.split(commands[-1] if commands else "--load none.npz")
    return [str(trained.folder / word) if (trained.folder / word).exists() else word for word in words]


def result_of(folder):
    """Return the JSON that --out-json wrote, which holds no NaN"""
    return json.loads((folder / "result.json").read_text("utf-8"), parse_constant=pytest.fail)


def timeless(result):
    """Return a result without times and without what the command line says about files, threads and machine"""
    if isinstance(result, dict):
        return {key: timeless(value) for key, value in result.items() if not re.search(
            "second|^ms_|^(threads|machine|versions|loaded)$", key)}
    return result


def arrays_of(path):
    """Return all arrays of numbers of a weights file, without times"""
    with np.load(path) as file:
        return {name: file[name] for name in file.files if file[name].dtype.kind in "biuf" and "second" not in name}


def claimed(experiment):
    """Return the metrics of a run of an experiment that the claims use; names with a dot are of other programs"""
    marks = [mark for claim in claims.CLAIMS for *_, mark in (*claim.measures, *claim.quick)]
    keys = [mark.split(", ")[1] for mark in marks if experiment.startswith(mark.split()[0])]
    return {word for key in keys if "." not in key for word in key.split()} - {"once", "when"}


def assert_fine(run):
    assert run.code == 0 and run.err == "", run.err


def assert_same_arrays(one, other):
    ours = arrays_of(one)
    assert len(ours) > 3
    assert_same(ours, arrays_of(other))


def assert_same_metrics(one, other, exactly=True):
    """Assert that two results, of a training or an evaluation, have the same metrics; if not exactly, within 0.1"""
    left_out = {"config", "history", "source"}
    ours, theirs = ({key: value for key, value in timeless(result).items() if key not in left_out}
                    for result in (one, other))
    shared = ours.keys() & theirs.keys()
    assert shared & METRICS == ours.keys() & METRICS
    if exactly:
        assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    else:
        for key in shared & METRICS:
            assert theirs[key] == pytest.approx(ours[key], abs=0.1), key


METRICS = {key for experiment in runs.EXPERIMENTS for key in claimed(experiment)}


# ---------------------------------------------------------------- train

@every_experiment
def test_a_run_prints_a_line_for_each_epoch_and_in_the_end_what_it_saved_and_how_to_load_it(alone, experiment):
    """Nothing else is written, and nothing on stderr"""
    run = alone(experiment).trained()
    assert_fine(run)
    epochs = [line for line in run.out.splitlines() if line.startswith("epoch ")]
    assert [line.split()[1] for line in epochs] == [f"{k}/{EPOCHS}" for k in range(1, EPOCHS + 1)]
    assert all("loss" in line and "accuracy" in line for line in epochs)
    assert "\r" not in run.out and "nan" not in run.out.lower()
    assert run.out.startswith("folder: run\n")
    assert f"{experiment}.py --load run" in run.out.splitlines()[-1]
    assert {path.name for path in run.folder.iterdir()} == {f"{experiment}.py", "run", "result.json"}
    assert {path.name for path in (run.folder / "run").iterdir()} == {"weights.npz", "metrics.json"}
    assert (run.folder / "result.json").read_text("utf-8") == (run.folder / "run" / "metrics.json").read_text("utf-8")


@every_experiment
def test_a_result_has_the_promised_keys(alone, experiment):
    found = result_of(alone(experiment).trained().folder)
    assert found["experiment"] == experiment and found["config"]["n_epochs"] == EPOCHS
    assert (found["config"]["seed"], found["config"]["model"]) == (0, RUN[experiment]["--model"])
    assert found["n_params"] > 1000 and found["seconds_train"] > 0
    assert found["versions"]["numpy"] == np.__version__ and found["machine"]
    assert found["history"]["epoch"] == list(range(1, EPOCHS + 1))
    assert all(len(values) == EPOCHS for values in found["history"].values())
    wanted = claimed(experiment) - {"test_accuracy"}                   # of MNIST's task; see OTHERS
    assert wanted and all(0 <= found[key] <= 1 for key in wanted)


@pytest.mark.parametrize("experiment, flags", [(name, flags) for name in OTHERS for flags in OTHERS[name]])
def test_other_tasks_and_networks_train(alone, experiment, flags):
    case = alone(experiment).cases()[f"other {flags}"]
    assert_fine(case)
    assert all(0 <= result_of(case.folder)[key] <= 1 for key in OTHERS[experiment][flags])
    assert {*claimed(experiment)} <= {key for found in OTHERS[experiment].values() for key in found} | {
        *result_of(alone(experiment).trained().folder)}


# ---------------------------------------------------------------- the same bits

@every_experiment
def test_any_number_of_threads_makes_the_same_network(alone, experiment):
    """and so does the same seed in another process, which is the first half of it"""
    runner = alone(experiment)
    one, two = runner.trained().folder, runner.unread().folder
    assert_same_arrays(one / "run" / "weights.npz", two / "run" / "weights.npz")
    assert timeless(result_of(one)) == timeless(result_of(two))


@every_experiment
def test_killed_and_resumed_is_never_killed(alone, experiment):
    whole, resumed = alone(experiment).trained(), alone(experiment).resumed()
    assert_fine(resumed)
    assert_same_arrays(whole.folder / "run" / "weights.npz", resumed.folder / "run" / "weights.npz")
    assert timeless(result_of(whole.folder)) == timeless(result_of(resumed.folder))
    assert f"epoch {EPOCHS}/{EPOCHS}" in resumed.out and f"epoch 1/{EPOCHS}" not in resumed.out


@POSIX
@every_experiment
def test_ctrl_c_says_in_one_line_what_is_saved_and_the_command_that_resumes(alone, experiment):
    stopped = alone(experiment).stopped()
    assert stopped.code == 130 and stopped.err.count("\n") == 1, stopped.err
    assert re.search(rf"has epoch \d+/{MANY}\b.* To resume: ", stopped.err), stopped.err
    assert_fine(stopped.again)
    folder, = (stopped.folder / "runs" / experiment).iterdir()
    assert (folder / "metrics.json").exists()
    assert f"epoch {MANY}/{MANY}" in stopped.again.out and f"epoch 1/{MANY}" not in stopped.again.out


@every_experiment
def test_a_finished_run_that_is_begun_again_trains_nothing(alone, experiment):
    case = alone(experiment).cases()["again"]
    assert_fine(case)
    assert timeless(result_of(case.folder)) == timeless(result_of(alone(experiment).trained().folder))
    assert "epoch 1/" not in case.out and f"epoch {EPOCHS}/" not in case.out
    assert "Test samples of" in case.out and case.after["run/metrics.json"] == case.before["run/metrics.json"]


# ---------------------------------------------------------------- load

@pytest.mark.parametrize("loaded", ["as printed", "load run", "load net.npz", "load published"])
@every_experiment
def test_what_is_loaded_evaluates_to_the_accuracy_after_training(alone, experiment, loaded):
    """By the command that a run prints, its folder, a file of weights, and one without moments"""
    runner = alone(experiment)
    case = runner.cases()[loaded]
    assert_fine(case)
    trained, found = result_of(runner.trained().folder), result_of(case.folder)
    assert found["experiment"] == experiment and found["n_params"] == trained["n_params"]
    assert_same_metrics(trained, found)
    assert "epoch 1/" not in case.out


@every_experiment
def test_an_evaluation_may_change_what_no_weight_depends_on(alone, experiment):
    case = alone(experiment).cases()["changed"]
    assert_fine(case)
    words = shlex.split(CHANGES[experiment])
    config = result_of(case.folder)["config"]
    assert {f"--{key.replace('_', '-')}": value for key, value in config.items()}.items() >= {
        flag: float(value) for flag, value in zip(words[::2], words[1::2])}.items()


@every_experiment
def test_a_test_of_a_network_writes_nothing_unless_a_folder_is_named(alone, experiment):
    runner = alone(experiment)
    case = runner.cases()["load run"]
    assert case.after.keys() - case.before.keys() == {"result.json"}
    case = runner.cases()["saved"]
    assert_fine(case)
    assert case.after.keys() - case.before.keys() == {"copy", "copy/weights.npz", "copy/metrics.json"}
    assert_same_arrays(case.folder / "copy" / "weights.npz", case.folder / "run" / "weights.npz")
    assert case.after["run/weights.npz"] == case.before["run/weights.npz"]


# ---------------------------------------------------------------- several networks

def test_several_models_are_trained_in_turn_and_compared_in_one_table(alone):
    """The last is the network that is trained when it is the only one. Each has a folder; the same command prints the
    table of the finished runs again"""
    runner = alone(NORB)
    case = runner.cases()["several"]
    assert_fine(case)
    table = case.out[case.out.rindex(f"epoch {EPOCHS}/{EPOCHS}"):]
    assert re.search(r"^ +{} +{}$\n".format(*SEVERAL) + r"(.* {4}[\d,.-]+ +[\d,.-]+\n){3,}", table, re.M), table
    found = result_of(case.folder)
    assert {model: result["config"]["model"] for model, result in found.items()} == dict(zip(SEVERAL, SEVERAL))
    assert_same_metrics(found[SEVERAL[-1]], result_of(runner.trained().folder))
    assert {path.name for path in (case.folder / "both").iterdir()} == set(SEVERAL)
    assert not (case.folder / "runs").exists()
    again = runner.cases()["several again"]
    assert_fine(again)


# ---------------------------------------------------------------- standard output

@pytest.mark.parametrize("output", ["unread", pytest.param("full", marks=pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="no /dev/full"))])
@every_experiment
def test_training_goes_on_when_the_output_is_lost(alone, experiment, output):
    """Nobody reads it, or it cannot be written"""
    run = getattr(alone(experiment), output)()
    assert output == "full" or run.out
    assert "Traceback" not in run.err and "Exception" not in run.err, run.err
    assert (run.folder / "run" / "weights.npz").exists() and (run.folder / "result.json").exists()


# ---------------------------------------------------------------- what the user gets wrong

@pytest.mark.parametrize("experiment, flags", [(name, flags) for name in BAD for flags in BAD[name]])
def test_bad_input_is_one_line_and_leaves_everything_as_it_was(alone, experiment, flags):
    case = alone(experiment).cases()[f"bad {flags}"]
    assert case.code == 2, case.out + case.err
    assert case.err.startswith("error: ") and case.err.endswith("\n") and case.err.count("\n") == 1, case.err
    assert (BAD[experiment][flags] or flags.split()[0]) in case.err, case.err
    assert len(case.err) > 20 and ("Errno" not in case.err or LONG in flags)            # of LONG the system's own words
    assert "epoch 1/" not in case.out or "--lr" in flags
    assert {name: content for name, content in case.after.items() if content is not None or name in case.before} == (
        case.before)
