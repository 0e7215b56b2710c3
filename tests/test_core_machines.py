"""Nothing about the machine stops a script: closed or full outputs, other systems, options of Python and Matplotlib."""
import ast
import os
import platform
import re
import subprocess
import sys
from types import SimpleNamespace

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import EXPERIMENTS, POSIX, ROOT

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
def test_a_run_survives_an_output_that_is_closed(shell, tmp_path):
    """One that nobody reads, or that is full: test_experiments.py"""
    done = shell("$RUN >&-")
    assert "Traceback" not in done.stderr
    assert len(list(tmp_path.glob("runs/*/*/metrics.json"))) == 1


@POSIX
def test_a_script_that_is_started_through_a_link_finds_its_weights(shell, tmp_path):
    (tmp_path / "link.py").symlink_to(ROOT / "smallnorb_novel_viewpoint.py")
    done = shell(f'"{sys.executable}" -c "import runpy; print(*runpy.run_path(\'link.py\')[\'PRETRAINED\'])"')
    assert str(ROOT / "weights" / "smallnorb_cnn.npz") in done.stdout


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


def test_a_picture_that_is_too_large_says_which_size_works(monkeypatch, tmp_path):
    from lab import data

    from PIL import Image
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    imageio.imwrite(tmp_path / "x.png", np.full((60, 60), 255, np.uint8))
    with pytest.raises(data.InputError, match="is too large. Give a picture of at most 10000 x 10000 px"):
        data.read_picture(tmp_path / "x.png")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_import_leaves_the_process_alone_and_training_prepares_it(experiment):
    """But for environment variables, which must be set before numpy is imported"""
    code = (f"import ctypes, os, sys; before = sys.getswitchinterval(); loaded = []; "
            f"ctypes.CDLL = lambda *_: loaded.append(1); import {experiment} as m; "
            f"import numpy as np; assert sys.getswitchinterval() == before and not loaded; "
            f"assert os.environ['OPENBLAS_NUM_THREADS'] == '1'; m.worker_threads(m.Config()); "
            f"assert sys.getswitchinterval() < 1e-4 and loaded")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_system_that_lacks_what_linux_has(monkeypatch, tmp_path, experiment):
    """No list of this process's cores, no /proc/cpuinfo"""
    module = EXPERIMENTS[experiment]
    lacking = {name: value for name, value in vars(os).items() if name != "sched_getaffinity"}
    with monkeypatch.context() as patch:
        patch.setattr(module, "os", SimpleNamespace(**lacking))
        patch.setattr(module, "Path", lambda path: tmp_path / str(path).lstrip("/"))
        patch.setattr(module, "test_metrics", lambda test: {})
        state = {"history": {"source": "x", "epochs": []}, "params": {}, "step": 0}
        found = module.result_of(module.Config(), state, {"source": "x"}, {})
    processor = platform.processor() or platform.machine()
    assert found["machine"] == {"processor": processor, "cores": os.cpu_count()} and found["history"] == {}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_processor_is_called_by_its_name_not_its_number(monkeypatch, tmp_path, experiment):
    module = EXPERIMENTS[experiment]
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel\t\t: 85\nmodel name\t: A CPU @ 2.50GHz\nstepping\t: 7\n\nprocessor\t: 1\n"
        "model name\t: another\n", "utf-8")
    monkeypatch.setattr(module, "Path", lambda path: tmp_path / str(path).split("/")[-1])
    assert module.processor_name() == "A CPU @ 2.50GHz"


def test_text_is_utf_8_on_every_system():
    """The default encoding of Windows is another; every call that reads or writes text says utf-8"""
    for path in (path for pattern in ("*.py", "lab/*.py", "tests/*.py", "results/*.py", "workflow/*.py")
                 for path in ROOT.glob(pattern)):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = getattr(call, "func", None) and getattr(call.func, "id", getattr(call.func, "attr", ""))
            if name in ("read_text", "write_text") or name == "open" and isinstance(call.func, ast.Name):
                said = ast.unparse(call)
                binary = re.search(r"'[rwxa]\+?b\+?'", said)
                assert "utf-8" in said or binary, f"{path.name}, line {call.lineno}: {said}"
