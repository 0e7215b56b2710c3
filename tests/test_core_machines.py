"""Nothing about the machine stops a script: closed or full outputs, terminals, users without a home, other options."""
import ast
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import multimnist_capsnet as mc

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import POSIX, ROOT, assert_same, toy_run

TINY = ("--digits synthetic --n-epochs 1 --n-train 64 --n-val 16 --n-test 16 --conv1-channels 2 --conv3-channels 4 "
        "--threads 1").split()
SCRIPT = f"import multimnist_capsnet as c; c.N_SYNTHETIC = {dict(train=60, val=40, test=80)}; c.run_cli(c.main)"


@pytest.fixture
def shell(tmp_path):
    """shell(line, **environment) -> CompletedProcess of a shell line in tmp_path, in which $RUN trains at toy size"""
    def run(line, **extra):
        env = {name: value for name, value in os.environ.items() if name not in ("MNIST_DIR", "PYTHONPATH")}
        env |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)} | extra
        command = f'"{sys.executable}" -c "{SCRIPT}" {" ".join(TINY)}'
        return subprocess.run(["bash", "-c", line.replace("$RUN", command)], cwd=tmp_path, capture_output=True,
                              text=True, env={name: value for name, value in env.items() if value is not None},
                              timeout=100)
    return run


@POSIX
@pytest.mark.parametrize("line", [
    "$RUN >&-", "$RUN | true; exit ${PIPESTATUS[0]}",
    pytest.param("$RUN > /dev/full", marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full"))])
def test_a_run_survives_an_output_that_cannot_be_written(shell, tmp_path, line):
    """What cannot be printed is dropped; the exit code says so, and of a full disk a line"""
    done = shell(line)
    full = "error: standard output: No space left on device. Check disk, path and permissions\n"
    assert (done.returncode, done.stderr) == ((2, full) if "full" in line else (1, ""))
    assert len(list(tmp_path.glob("runs/*/*/metrics.json"))) == 1


@POSIX
@pytest.mark.parametrize("flag", ["--digits mnist --data-dir", "--digits auto --data-dir", "--load"])
def test_a_path_that_cannot_be_looked_up_is_one_line(shell, flag):
    """Such as one that is too long, or below a folder without permission"""
    done = shell(f"$RUN {flag} {'x' * 300} 2>&1")
    assert done.returncode == 2 and done.stdout.count("\n") == 1 and "too long" in done.stdout, done.stdout


@pytest.mark.slow
@POSIX
def test_letters_that_the_terminal_lacks_are_escaped(shell, tmp_path):
    done = shell(f'"{sys.executable}" "{ROOT}/visualize_routing.py" --n-iters 1 --outdir ü', PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and "wrote \\xfc/dynamic_routing.png" in done.stdout
    assert (tmp_path / "ü" / "em_routing.svg").exists()


@pytest.mark.slow
@POSIX
@pytest.mark.parametrize("script", ["affnist_capsnet.py", "make_multimnist_capsnet_gif.py"])
def test_without_docstrings(shell, script):
    """python -OO; help_of tries all scripts with -P"""
    done = shell(f'"{sys.executable}" -OO "{ROOT}/{script}" --help', PYTHONPATH=None)
    assert (done.returncode, done.stderr) == (0, "") and "--seed" in done.stdout


@POSIX
def test_a_script_that_is_started_through_a_link_finds_its_weights(shell, tmp_path):
    (tmp_path / "link.py").symlink_to(ROOT / "smallnorb_novel_viewpoint.py")
    done = shell(f'"{sys.executable}" -c "import runpy, sys; sys.argv = [\'link.py\', \'--help\']; '
                 f'runpy.run_path(\'link.py\')[\'main\']()"', PYTHONPATH=None)
    assert done.returncode == 0 and "smallnorb_matrix-capsnet.npz" in done.stdout
    done = shell(f'"{sys.executable}" -c "import runpy; print(*runpy.run_path(\'link.py\')[\'PRETRAINED\'])"')
    assert str(ROOT / "weights" / "smallnorb_cnn.npz") in done.stdout


@POSIX
def test_a_source_in_a_cell_and_an_old_numpy_say_so_in_one_line(shell, tmp_path):
    done = shell(f'"{sys.executable}" -c "exec(open(\'{ROOT}/affnist_capsnet.py\').read())"')
    assert done.returncode == 2 and done.stderr == (
        "error: this source does not run in a cell. Save it as a file and import that\n")
    (tmp_path / "numpy" / "lib").mkdir(parents=True)
    (tmp_path / "numpy" / "__init__.py").write_text("__version__ = '1.26.4'", "utf-8")
    (tmp_path / "numpy" / "lib" / "__init__.py").write_text("", "utf-8")
    (tmp_path / "numpy" / "lib" / "stride_tricks.py").write_text("as_strided = sliding_window_view = None", "utf-8")
    for content in (None, "raise ImportError"):
        if content:
            (tmp_path / "numpy" / "__init__.py").write_text(content, "utf-8")                    # as if there were none
        done = shell(f'"{sys.executable}" "{ROOT}/smallnorb_novel_viewpoint.py"', PYTHONPATH=str(tmp_path))
        assert done.returncode == 2 and done.stderr == (
            f'error: NumPy 2 or later is missing: {sys.executable} -m pip install "numpy>=2"\n')


@POSIX
def test_a_user_without_a_home_has_no_cache(shell, tmp_path):
    """Toys are rendered, with a word; MNIST cannot be kept, with a remedy"""
    nobody = ("import os, pwd\ndef gone(*_):\n    raise KeyError\npwd.getpwuid = pwd.getpwnam = gone\n"
              "os.environ.pop('HOME', None)\n")
    (tmp_path / "toys.py").write_text(nobody + "import sys\nimport smallnorb_novel_viewpoint as s\nsys.argv = ['s', "
        "*'--model cnn --n-epochs 1 --n-train-toys 1 --n-test 60 --train-azimuths 0:0 --test-azimuths 80:80'.split()]\n"
        "s.run_cli(s.main)", "utf-8")
    done = shell(f'"{sys.executable}" toys.py', HOME=None)
    assert (done.returncode, done.stderr) == (0, "") and "warning: the rendered toys are not saved" in done.stdout
    (tmp_path / "digits.py").write_text(nobody + "import sys\nimport multimnist_capsnet as c\nsys.argv = ['c', "
        "'--digits', 'mnist']\nc.run_cli(c.main)", "utf-8")
    dead = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = shell(f'"{sys.executable}" digits.py', HOME=None, **dead)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--data-dir" in done.stderr
    done = shell("$RUN --mnist-dir ~nosuchuser --digits mnist")
    assert done.returncode == 2 and "~nosuchuser: no such folder" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
@POSIX
def test_no_notebook_backend_or_style_gets_into_a_figure(shell, tmp_path):
    (tmp_path / "rc").mkdir()
    (tmp_path / "rc" / "matplotlibrc").write_text("figure.facecolor: red\nbackend: nonsense\n", "utf-8")
    style, inline = {"MATPLOTLIBRC": str(tmp_path / "rc")}, "module://matplotlib_inline.backend_inline"
    for folder, settings in (("plain", {}), ("notebook", style | {"MPLBACKEND": inline}),
                             ("nonsense", style | {"MPLBACKEND": "nonsense"})):
        done = shell(f'"{sys.executable}" "{ROOT}/visualize_routing.py" --outdir {folder}', **settings)
        assert (done.returncode, done.stderr) == (0, "")
        plain, found = (tmp_path / drawn / "em_routing.png" for drawn in ("plain", folder))
        assert found.read_bytes() == plain.read_bytes()


def test_imported_figure_code_changes_no_setting():
    code = ("import matplotlib; before = dict(matplotlib.rcParams); import visualize_smallnorb_novel_viewpoint, "
            "visualize_multimnist_capsnet, visualize_affnist_capsnet; assert dict(matplotlib.rcParams) == before")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.slow
@POSIX
def test_a_terminal_that_knows_no_escapes_gets_plain_lines(tmp_path):
    import pty
    for term, escapes in (("dumb", False), ("xterm", True)):
        parent, child = pty.openpty()
        env = os.environ | {"TERM": term, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, *TINY, "--no-save", "--n-train", "800"],
                                   cwd=tmp_path, stdout=child, env=env)
        os.close(child)
        text = b""
        while True:
            try:
                part = os.read(parent, 4096)
            except OSError:
                break
            if not part:
                break
            text += part
        os.close(parent)
        assert process.wait() == 0 and (b"\x1b" in text) == escapes and b"exact match" in text


@POSIX
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_explore_ends_cleanly_even_where_the_shell_ignores_interrupts(tmp_path, number):
    """As a script starts it with &; on any free port; for a browser at the end of a tunnel, but for no other name"""
    code = ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; sys.argv = ['explore.py', "
            "'--port', '0', '--no-browser']; import explore; explore.Guide = lambda *_: None; explore.main()")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    url = process.stdout.readline().split()[0]
    for host, expected in (("localhost:9000", 200), ("[::1]:1", 200), ("a.example:80", 403), ("localhost.a:80", 403)):
        request = urllib.request.Request(url, headers={"Host": host})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                assert (answer.status, host) == (expected, host)
        except urllib.error.HTTPError as error:
            assert (error.code, host) == (expected, host) and b"ssh -L" in error.read()
    process.send_signal(number)
    assert process.wait(10) == 0 and "stopped" in process.stdout.read()
    process.stdout.close()


def test_explore_refuses_impossible_ports(run_script):
    for port in (-1, 70000):
        done = run_script("explore.py", "--port", port, "--no-browser")
        assert done.returncode == 2 and done.stderr == f"error: --port {port}: must be between 0 and 65535\n"


def test_a_picture_that_is_too_large_says_which_size_works(monkeypatch, tmp_path):
    from lab import data

    from PIL import Image
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    imageio.imwrite(tmp_path / "x.png", np.full((60, 60), 255, np.uint8))
    with pytest.raises(data.InputError, match="is too large. Give a picture of at most 10000 x 10000 px"):
        data.read_picture(tmp_path / "x.png")


# -------------------------------------------------------------- Windows and macOS, as far as Linux can play them

def system(**changes):
    """os, as a module sees it, of another system"""
    return SimpleNamespace(**vars(os) | changes)


def test_printed_commands_can_be_copied_into_the_systems_shell(monkeypatch):
    """cmd and PowerShell know no single quotes, and no python3"""
    words = "x.py", "--load", Path("a b") / "w.npz"
    assert mc.command_line(*words) == "python3 x.py --load 'a b/w.npz'"
    monkeypatch.setattr(mc, "os", system(name="nt"))
    assert mc.command_line(*words) == 'python x.py --load "a b/w.npz"'
    assert mc.command_line("x.py", r"runs\w.npz") == r"python x.py runs\w.npz"


@pytest.mark.parametrize("understands", [1, 0])
def test_a_windows_console_is_told_to_understand_escapes_or_gets_plain_lines(monkeypatch, understands):
    told = []
    kernel32 = SimpleNamespace(GetStdHandle={-11: "stdout"}.get,
                               SetConsoleMode=lambda *mode: told.append(mode) or understands)
    monkeypatch.setattr(mc, "os", system(name="nt", environ={}))
    monkeypatch.setattr(mc.ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    monkeypatch.setattr(mc.Progress, "program", True)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    assert bool(mc.Progress(quiet=False).live) == bool(understands) and told == [("stdout", 7)]
    assert not mc.Progress(quiet=True).live and len(told) == 1


def test_a_system_that_lacks_what_linux_has(monkeypatch, tmp_path):
    """No list of this process's cores, no user's number, no /proc/cpuinfo"""
    lacking = {name: value for name, value in vars(os).items() if name not in ("sched_getaffinity", "geteuid")}
    monkeypatch.setattr(mc, "os", SimpleNamespace(**lacking))
    (tmp_path / "x.json").touch()
    mc.check_writable(tmp_path / "x.json")
    monkeypatch.setattr(mc, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    assert mc.machine() == {"processor": mc.platform.processor() or mc.platform.machine(), "cores": os.cpu_count()}


def test_training_with_another_blas_is_the_same_but_for_its_rounding(monkeypatch):
    """NumPy for macOS has Accelerate, which add_product does not call; no bit depends on the number of threads there"""
    def run(**given):
        return toy_run("multimnist_capsnet", conv3_channels=8, **given)[0]
    expected = run()
    monkeypatch.setattr(mc, "openblas", lambda: None)
    monkeypatch.setattr(mc, "sgemm", mc.sgemm.__wrapped__)
    assert mc.sgemm() is None
    found = run()
    assert_same(run(threads=2), found)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_text_is_utf_8_on_every_system():
    """The default encoding of Windows is another; every call that reads or writes text says utf-8"""
    for path in (path for pattern in ("*.py", "lab/*.py", "tests/*.py", "results/*.py", "workflow/*.py")
                 for path in ROOT.glob(pattern)):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and re.search(r"(^|\.read_|\.write_)(open|text)$", ast.unparse(call.func)):
                said = ast.unparse(call)
                assert "utf-8" in said or re.search("'[rwxa]b'", said), f"{path.name}, line {call.lineno}: {said}"


def test_a_run_that_diverges_ends_in_one_line(run_script):
    """In its first evaluation, whose overflow NumPy would report in lines of its own"""
    flags = "--data shapes --n-per-combo 1 --batch-size 90 --lr 1e30 --no-save --model matrix-capsnet --threads 1"
    done = run_script("smallnorb_novel_viewpoint.py", *flags.split())
    assert done.returncode == 2 and done.stderr.startswith("error: familiar_loss is not finite after step 1")
    assert done.stderr.count("\n") == 1
