"""lab/: the list of experiments, messages, files, statistics, processes. It imports no experiment."""
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import lab
import multimnist_capsnet as mc
from lab import files, messages, running, statistics
from lab.messages import InputError

import numpy as np
import pytest
from conftest import EXPERIMENTS, POSIX, ROOT

MODULES = sorted((ROOT / "lab").glob("*.py"))


def test_it_imports_no_experiment(run_script):
    names = ", ".join(f"lab.{path.stem}" for path in MODULES if path.stem != "__init__")
    done = run_script("-c", f"import {names}, sys; print(*{set(EXPERIMENTS)} & sys.modules.keys())")
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


# -------------------------------------------------------------- experiments

def test_an_experiment_is_a_script_that_trains_and_has_results(monkeypatch, tmp_path):
    assert lab.experiments() == list(EXPERIMENTS) and lab.experiments()[:3] == list(lab.FIRST)
    for name in ("a_net", "b_net", "c_net", lab.FIRST[1]):
        (tmp_path / f"{name}.py").write_text("\ndef train(config):\n    pass\n" * (name != "b_net"), "utf-8")
        if name != "c_net":
            (tmp_path / "results" / name).mkdir(parents=True)
    monkeypatch.setattr(lab, "ROOT", tmp_path)
    assert lab.experiments() == [lab.FIRST[1], "a_net"]


def test_a_weights_file_says_its_experiment(tmp_path):
    for module in EXPERIMENTS.values():
        assert lab.experiment_of(module.PRETRAINED[0]) == module.EXPERIMENT
    (tmp_path / "text.npz").write_text("text", "utf-8")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    (tmp_path / "cut.npz").write_bytes(mc.PRETRAINED[0].read_bytes()[:1000])
    assert [lab.experiment_of(tmp_path / f"{name}.npz") for name in ("none", "text", "other", "cut")] == [None] * 4


# -------------------------------------------------------------- messages

class Other(Exception):
    """An experiment's InputError is another class, with the same exit code"""
    exit_code = 2


@pytest.mark.parametrize("error, code, said", [
    (InputError("two\nlines"), 2, "error: two lines\n"), (Other("another's"), 2, "error: another's\n"),
    (KeyboardInterrupt(), 130, "\nstopped\n"),
    (MemoryError(), 2, "error: out of memory. Give less at once"),
    (OSError(13, "Permission denied", "x/y"), 2, "error: x/y: Permission denied. Check disk")])
def test_what_the_user_can_mend_is_one_line(error, code, said, capsys):
    with pytest.raises(SystemExit) as stop:
        messages.run_cli(lambda: (_ for _ in ()).throw(error))
    text = capsys.readouterr().err
    assert stop.value.code == code and text.startswith(said) and text.strip().count("\n") == 0


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        messages.run_cli(lambda: 1 / 0)


@POSIX
def test_output_that_is_lost_is_no_traceback(run_script):
    """Exit code 1 at a closed pipe"""
    code = ("import os; from lab import messages\ndef main():\n"
            "    reader, writer = os.pipe()\n    os.close(reader)\n    os.dup2(writer, 1)\n"
            "    messages.Progress(quiet=False).say('lost')\nmessages.run_cli(main)")
    done = run_script("-c", code)
    assert (done.returncode, done.stderr) == (1, "")


def test_progress_on_a_terminal_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(messages.Progress, "program", True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    progress = messages.Progress()
    for k in range(2):
        progress.last -= 1
        progress.step(f"step {k}")
    progress.say("done")
    progress.step("too soon")
    assert capsys.readouterr().out == "step 0\r\x1b[Kstep 1\r\x1b[Kdone\n"


def test_a_wrong_flag_is_refused_and_help_has_the_description(capsys):
    parser = messages.Parser("One.\n\nTwo.\n\n    three")
    with pytest.raises(InputError, match="unrecognized arguments: --no. See --help"):
        parser.parse_args(["--no"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "One.\n\nTwo.\n\n    three" in capsys.readouterr().out


def test_words():
    assert (messages.counted(1, "run"), messages.counted(1200, "run")) == ("1 run", "1,200 runs")
    assert messages.flag_name("n_test") == "--n-test" and messages.n_cores() >= 1
    assert messages.command_line("a b.py", "--x", 1).endswith('"a b.py" --x 1' if os.name == "nt" else "'a b.py' --x 1")


# -------------------------------------------------------------- files

def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "result"
    files.write_atomically(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"new")
        raise OSError(28, "No space left on device")
    with pytest.raises(InputError, match="cannot write .*result: No space left"):
        files.write_atomically(path, fail)
    assert path.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["home", "result"]


@POSIX
def test_a_write_follows_a_link(tmp_path):
    path = tmp_path / "result"
    path.write_bytes(b"old")
    (tmp_path / "link").symlink_to(path)
    files.write_atomically(tmp_path / "link", lambda file: file.write(b"new"))
    assert (tmp_path / "link").is_symlink() and path.read_bytes() == b"new"


@pytest.mark.parametrize("n_times", [3, 99])
def test_on_windows_a_file_that_another_program_reads_is_replaced_once_that_is_done(tmp_path, monkeypatch, n_times):
    """or, after two seconds, left as it is"""
    path, calls = tmp_path / "result", []
    path.write_bytes(b"old")

    def replace(source, target):
        calls.append(source)
        if len(calls) <= n_times:
            raise PermissionError(13, "Permission denied")
        os.replace(source, target)
    monkeypatch.setattr(files, "os", SimpleNamespace(**vars(os) | {"name": "nt", "replace": replace}))
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    with pytest.raises(InputError, match="result: Permission denied") if n_times > 3 else contextlib.nullcontext():
        files.write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == (b"old" if n_times > 3 else b"new") and len(calls) == min(n_times, 40) + 1


def test_what_cannot_be_written_is_said_at_once(tmp_path):
    for paths, fault in (([tmp_path], "it is a folder or a device"), ([tmp_path / "no" / "x"], "x: No such file"),
                         ([tmp_path / "x", tmp_path / "home" / ".." / "x"], "two outputs have this name")):
        with pytest.raises(InputError, match=fault):
            files.check_writable(*paths)
    files.check_writable("", "-", None, tmp_path / "x")
    assert os.listdir(tmp_path) == ["home"]


def test_json_and_csv(tmp_path, capsys):
    found = {"config": {"lr": 0.123456789}, "mean": 0.123456789, "half": float("nan"), "more": [float("inf"), {"n": 3}]}
    files.write_json(tmp_path / "x.json", found)
    files.write_json("-", found)
    text = (tmp_path / "x.json").read_text("utf-8")
    assert capsys.readouterr().out == text and json.loads(text) == {
        "config": {"lr": 0.123456789}, "mean": 0.12346, "half": None, "more": [None, {"n": 3}]}
    files.write_csv(tmp_path / "x.csv", [["a", "b"], [1, 0.5]])
    assert (tmp_path / "x.csv").read_bytes() == b"a,b\n1,0.5\n"


def test_a_home_is_found_or_nothing(monkeypatch):
    assert files.home_path("~") == files.Path.home()
    monkeypatch.setattr(files.Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError()))
    assert str(files.home_path("~/x")).startswith(os.devnull) and files.machine()["cores"] == messages.n_cores()


# -------------------------------------------------------------- statistics

@pytest.mark.parametrize("hits, n, interval", [
    (50, 100, (0.403832, 0.596168)), (0, 10, (0, 0.277533)), (10, 10, (0.722467, 1)), (8, 10, (0.490162, 0.943318)),
    (1, 1, (0.206543, 1))])
def test_wilson_interval(hits, n, interval):
    assert statistics.wilson_interval(hits, n) == pytest.approx(interval, abs=1e-5)


def test_wilsons_interval_holds_its_proportion():
    for n in range(1, 400):
        for hits in (0, n // 3, n):
            low, high = statistics.wilson_interval(hits, n)
            assert 0 <= low <= hits / n <= high <= 1


def test_a_bootstrap_over_toys():
    """Whose views are all correct or all wrong: of two toys one is drawn, so 0 or 1 at its ends. A difference over the
    same toys has no interval where every toy has the same. Of toys with an image each it is a t interval"""
    toys, correct = np.repeat([0, 1], 50), np.repeat([True, False], 50)
    assert statistics.bootstrap_interval(0 * toys, toys, correct) == (0, 1)
    views = np.arange(100) % 2 * 2 - 1                                  # half of each toy's views are familiar
    assert statistics.bootstrap_interval(0 * toys, toys, correct, views) == (0, 0)
    assert statistics.bootstrap_interval(0 * toys, toys, views > 0, views) == (1, 1)
    assert np.isnan(statistics.bootstrap_interval(0 * toys, 0 * toys, correct)).all()
    toys, correct = np.arange(100), np.arange(100) % 2 > 0
    half = 1.96 * correct.std(ddof=1) / 10
    assert statistics.bootstrap_interval(0 * toys, toys, correct) == pytest.approx((0.5 - half, 0.5 + half), abs=0.01)
    classes = np.repeat([0, 1], 50)                                     # all of one class are correct: none varies
    assert statistics.bootstrap_interval(classes, toys, classes > 0) == pytest.approx((0.5, 0.5))


def share_within(t, df):
    """P(|T| <= t), by Simpson's rule over the density, which is symmetric"""
    x, step = np.linspace(0, t, 4001, retstep=True)
    log_factor = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(math.pi * df)
    density = np.exp(log_factor - (df + 1) / 2 * np.log1p(x * x / df))
    return 2 * step / 3 * (density[0] + 4 * density[1:-1:2].sum() + 2 * density[2:-1:2].sum() + density[-1])


def test_mean_and_interval():
    """1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7, t of 2 degrees of freedom; and t holds 95% for every n"""
    assert statistics.mean_and_interval([1, 2, 6]) == pytest.approx((3, 4.3027 * math.sqrt(7 / 3)), rel=1e-4)
    assert statistics.mean_and_interval([0.25] * 5) == (0.25, 0)
    for n in (*range(2, 60), 200, 10 ** 4):
        values = np.arange(n) % 2 * 1.0
        mean, half = statistics.mean_and_interval(values)
        assert mean == values.mean() and all(type(number) is float for number in (mean, half))
        assert share_within(half / (values.std(ddof=1) / math.sqrt(n)), n - 1) == pytest.approx(0.95, abs=2e-5), n
    assert math.isnan(statistics.mean_and_interval([0.25])[1])                                  # one value has none


def test_the_t_quantile_of_degrees_of_freedom_that_are_no_integer():
    for df in (1, 1.5, 2.3, 4.7, 8.9, 9, 9.5, 33.3):
        assert share_within(statistics.t_quantile(df), df) == pytest.approx(0.95, abs=2e-3), df


def test_the_interval_over_seeds_and_toys_by_hand():
    """Two seeds, two classes of two toys. Mean squares: of seeds 4 * 1.125 = 4.5 (1 degree of freedom), of toys within
    classes 2 * 2.5 / 2 = 2.5 (2), of the rest 1 / 2 (2); then 4.5 + 2.5 - 0.5 = 6.5"""
    values, classes = [[1, 3, 2, 2], [3, 5, 2, 4]], [0, 0, 1, 1]
    df = 6.5 ** 2 / (4.5 ** 2 / 1 + 2.5 ** 2 / 2 + 0.5 ** 2 / 2)
    half = statistics.t_quantile(df) * math.sqrt(6.5 / 8)
    assert statistics.crossed_interval(values, classes) == pytest.approx((2.75, half))
    assert math.isnan(statistics.crossed_interval(values[:1], classes)[1])                      # one seed has none


def test_the_interval_over_seeds_and_toys_is_no_shorter_than_over_seeds_alone():
    """Where toys do not differ it is that interval"""
    values = np.array([[1.0], [2.0], [6.0]]) + np.zeros(4)
    assert statistics.crossed_interval(values, [0, 0, 1, 1]) == pytest.approx(statistics.mean_and_interval([1, 2, 6]))
    assert statistics.crossed_interval(np.ones((3, 4)), [0, 0, 1, 1]) == (1, 0)


def test_intervals_over_seeds_and_toys_hold_the_true_mean():
    """In 93 to 97% of draws, with 3% for chance; bench/coverage.py has more draws"""
    from bench import coverage
    for n_seeds, variances in (3, (1, 1, 1)), (5, (0.1, 1, 1)), (10, (1, 0.1, 1)), (10, (0, 1, 1)):
        share, _ = coverage.coverage(n_seeds, variances, 500, np.random.default_rng(0))
        assert 0.90 < share < 0.99, (n_seeds, variances)


def test_a_new_value_lies_in_the_prediction_interval():
    """1, 2, 6: t s sqrt(1 + 1/3)"""
    assert statistics.prediction_interval([1, 2, 6]) == pytest.approx((3, 4.3027 * math.sqrt(7 * 4 / 3)), rel=1e-4)
    assert math.isnan(statistics.prediction_interval([1])[1])


def test_comparison_by_hand():
    """Two seeds of two networks: means 0.5 and 0.3; differences 0.1 and 0.3, t of 1 degree of freedom is 12.7062. No
    interval of a proportion leaves 0 to 1"""
    rows = [("a", 0, {"n_params": 7000, "x": 0.4, "y": 1.0}), ("b", 0, {"n_params": 5, "x": 0.3}),
            ("a", 1, {"n_params": 7000, "x": 0.6, "y": 1.0}), ("b", 1, {"n_params": 5, "x": 0.3})]
    found, half = statistics.compare(rows), 12.7062 * 0.1
    assert found["seeds"] == [0, 1] and found["n"] == {"a": 2, "b": 2}
    assert found["networks"]["a"] == {"n_params": 7000, "x": [0.5, 0, 1]}
    signed = statistics.compare(rows, signed=["x"])["networks"]["a"]["x"]
    assert signed == pytest.approx([0.5, 0.5 - half, 0.5 + half], abs=1e-5)
    assert found["networks"]["b"]["x"] == pytest.approx([0.3] * 3)
    assert found["differences"] == {"a - b": {"x": pytest.approx([0.2, 0.2 - half, 0.2 + half], abs=1e-5)}}
    table = statistics.comparison_table(found).splitlines()
    assert table[0].split() == ["network", "n_params", "x"] and table[1].split() == ["a", "7,000", "0.500", "[0.000,",
                                                                                     "1.000]"]
    assert table[3:6] == ["mean [95% t interval] over 2 seeds", "",
                          "Difference in percentage points, paired by seed [95% CI]"]
    assert table[6].split() == ["a", "-", "b", "+20.0", f"[{20 - 100 * half:+.1f},", f"{20 + 100 * half:+.1f}]"]
    uneven = statistics.compare(rows[:3])               # b has one seed, and its interval would not be over seeds
    assert uneven["networks"]["a"] == found["networks"]["a"] and uneven["differences"] == {}
    assert uneven["networks"]["b"]["x"][0] == 0.3 and np.isnan(uneven["networks"]["b"]["x"][1:]).all()
    assert "over 1 to 2 seeds" in (text := statistics.comparison_table(uneven)) and "nan" not in text
    assert statistics.comparison_table(statistics.compare(rows[:2])).endswith("\none seed each: no intervals")


# -------------------------------------------------------------- processes

def job(path, name, code, *after):
    """Return a Job that runs some code and then writes its file"""
    folder = path / name
    code += f"; open({str(folder / 'metrics.json')!r}, 'w').write('made')"
    return running.Job(name, ["-c", code], folder, after)


def test_commands_run_side_by_side_once_and_after_those_they_need(tmp_path):
    said, folder = [], tmp_path / "made"
    jobs = [job(folder, "b", f"print('epoch 1/1  lo'); open({str(folder / 'a' / 'metrics.json')!r})", "a"),
            job(folder, "a", "import time; time.sleep(0.5); print('noise')")]
    running.run(jobs, 2, said.append)
    assert [line.split("s  ")[1] for line in said] == ["a  done", "b  epoch 1/1  lo", "b  done"]
    assert running.missing(jobs) == [] and running.run(jobs, 2, said.append) is None and len(said) == 3


def test_one_that_fails_is_named_and_stops_the_others(tmp_path):
    jobs = [job(tmp_path, "slow", "import time; time.sleep(60)"),
            job(tmp_path, "bad", f"print({str(tmp_path / 'bad')!r}, 'is damaged'); raise SystemExit(2)")]
    begin = time.monotonic()
    with pytest.raises(InputError, match=r"^bad: .*is damaged. Delete .*bad to begin this run anew .command: \S+"):
        running.run(jobs, 2, lambda text: None)
    assert time.monotonic() - begin < 30 and len(running.missing(jobs)) == 2
    with pytest.raises(InputError, match="file.x: cannot be created .*Choose another folder"):
        (tmp_path / "file").write_text("", "utf-8")
        running.make_places([job(tmp_path / "file", "x", "")])


def test_a_result_is_read_whole(tmp_path):
    path = tmp_path / "x.json"
    for content in ("", "{", "[1]", '{"experiment": "b", "config": {}}', '{"experiment": "a"}'):
        path.write_text(content, "utf-8")
        with pytest.raises(InputError, match="x.json: not a whole result. Delete it"):
            running.read_result(path, "a")
    path.write_text('{"experiment": "a", "config": {}}', "utf-8")
    assert running.read_result(path, "a") == {"experiment": "a", "config": {}}


@POSIX
def test_a_program_that_a_scheduler_ends_leaves_no_temporary_file(tmp_path):
    code = ("import sys, time; sys.path.insert(0, sys.argv[1]); from lab import files, messages\n"
            "def write(file): print('began', flush=True); time.sleep(60)\n"
            "messages.run_cli(lambda: files.write_atomically('a.gif', write))")
    with subprocess.Popen([sys.executable, "-c", code, str(ROOT)], cwd=tmp_path, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"began\n" and len(list(tmp_path.glob("a.gif*"))) == 1
        program.terminate()
        assert program.wait(30) == 143
    assert not list(tmp_path.glob("a.gif*"))
