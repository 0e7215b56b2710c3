"""Shared by all tests: the experiments, imported first; no network, no MNIST, a throw-away home; toy runs, digits."""
import argparse
import contextlib
import dataclasses
import functools
import importlib
import io
import os
import re
import subprocess
import sys
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "workflow")]
import runs

EXPERIMENTS = {name: importlib.import_module(name) for name in runs.EXPERIMENTS}
import multimnist_capsnet as mc
from lab import messages

import golden
import numpy as np  # after the experiments, which set the number of BLAS threads
import pytest

DEAD = "http://127.0.0.1:9/"       # the discard port: refused at once, on Windows after 2 s
HOMES = ("HOME", "USERPROFILE")    # the second on Windows
POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no such shell, signals, links or permissions")
TOY = dict(
    seed=1, n_epochs=2, n_train=80, n_val=16, n_test=16, batch_size=40, digits="synthetic", threads=1, quiet=True)
TINY = mc.Config(**TOY, preset="classic", conv1_channels=3)
DEEP = mc.Config(**TOY, preset="deep", conv1_channels=3, conv3_channels=6, norm="none")
CNN = mc.Config(**TOY, model="cnn", norm="none", conv1_channels=3, conv3_channels=6)
NETWORKS = {**{model: dataclasses.replace(CNN, model=model) for model in ("cnn", "cnn-vectors", "vector-dense")},
            "paper": TINY, "deep": DEEP, "cnn of means": dataclasses.replace(CNN, cnn_head="gap"),
            "cnn-vectors": dataclasses.replace(CNN, model="cnn-vectors", conv3_channels=32),
            "cnn-vectors of means": dataclasses.replace(CNN, model="cnn-vectors", cnn_head="gap"),
            "normalized": dataclasses.replace(DEEP, norm="batch", muon=0.02),
            "residual": dataclasses.replace(DEEP, norm="batch", preset="residual", conv3_channels=4),
            "half-digit": dataclasses.replace(DEEP, preset="half-digit"),
            "normalized cnn": dataclasses.replace(CNN, norm="batch"),
            "residual cnn": mc.Config(**TOY, model="cnn", norm="none", preset="residual", conv1_channels=3,
                                      conv3_channels=4)}
SMALL = {                          # what makes an experiment's default network, or its data, small
    runs.MULTI: dict(conv1_channels=2, conv3_channels=2), runs.AFF: dict(conv1_channels=2),
    runs.NORB: dict(data="shapes", preset="small", n_elev=1, n_per_combo=1)}


@pytest.fixture(autouse=True)
def isolation(monkeypatch, tmp_path):
    """No test reads the user's home, MNIST or the network."""
    (tmp_path / "home").mkdir()
    for name in HOMES:
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("MNIST_DIR", "http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for module in EXPERIMENTS.values():
        if hasattr(module, "MIRRORS"):
            monkeypatch.setattr(module, "MIRRORS", (DEAD + "a/", DEAD + "b/"))


def run_offline(home, script, *arguments, timeout=300):
    """Run a script, or "-c" and code, in a process and a home, with every proxy pointing to a dead port"""
    env = {name: value for name, value in os.environ.items() if name != "MNIST_DIR"}
    env |= dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), DEAD)
    env |= dict.fromkeys((*HOMES, "MPLCONFIGDIR"), str(home))
    env |= {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT), "no_proxy": "", "COLUMNS": "1000"}
    head = ["-c"] if script == "-c" else [str(ROOT / script)]
    return subprocess.run([sys.executable, *head, *map(str, arguments)], env=env, cwd=home, capture_output=True,
                          text=True, timeout=timeout)


@pytest.fixture(scope="session")
def run_script(tmp_path_factory):
    """run_script(file or "-c", *arguments) -> CompletedProcess of run_offline in one home for all tests"""
    return functools.partial(run_offline, tmp_path_factory.mktemp("offline"))


@pytest.fixture(scope="session")
def help_of():
    """{script at top level: what its --help prints}; each that imports lab finds it without Python's help (-P), too.
    The micro files have no flags, and no help"""
    found = {"microcapsnet.py": "", "micro_matrix_capsnet.py": ""}
    for path in sorted(path for path in ROOT.glob("*.py") if path.name not in found):
        module, text = importlib.import_module(path.stem), path.read_text("utf-8")
        assert "sys.path" in text or not re.search("^(from|import) lab", text, re.M)
        with unittest.mock.patch.dict(os.environ, COLUMNS="1000"), contextlib.redirect_stdout(io.StringIO()) as out:
            with unittest.mock.patch("sys.argv", [str(path), "--help"]), pytest.raises(SystemExit, match="^0$"):
                module.main()
        found[path.name] = out.getvalue()
    return found


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """call(experiment, main, *flags) -> exit code, stdout, stderr of the main of an experiment, a module, or of a
    program that works with it, in this process and in tmp_path; synthetic digits are few"""
    monkeypatch.chdir(tmp_path)
    for module in EXPERIMENTS.values():
        if hasattr(module, "N_SYNTHETIC"):
            monkeypatch.setattr(module, "N_SYNTHETIC", {"train": 60, "val": 40, "test": 80})

    def run(experiment, main, *flags):
        monkeypatch.setattr(sys, "argv", [f"{experiment.__name__}.py", *map(str, flags)])
        capsys.readouterr()
        try:
            (experiment if main is experiment.main else messages).run_cli(main)
        except SystemExit as stop:
            return stop.code, *capsys.readouterr()
        return 0, *capsys.readouterr()
    return run


def assert_refused(answer, words):
    """An answer of call is exit code 2 and one line of error, which has these words"""
    code, out, err = answer
    assert code == 2 and err.startswith("error: ") and words in err, out + err
    assert err.endswith("\n") and err.count("\n") == 1, err


def idx(array, code=8, kind=np.uint8):
    """Return an array as the bytes of an idx file, whose numbers are of the type that a code stands for"""
    return bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(kind).tobytes()


def toy_digits(seed=0, n=60):
    """What load_data returns, made of blocky class patterns of varying brightness in the central 20x20 box."""
    rng = np.random.default_rng(seed)
    patterns = np.kron(rng.random((10, 5, 5)) > 0.55, np.ones((4, 4)))                         # (10, 20, 20)
    digits = {"source": "synthetic"}
    for split in ("train", "val", "test"):
        labels = np.tile(np.arange(10, dtype=np.uint8), n // 10)
        images = np.zeros((n, 28, 28), np.uint8)
        images[:, 4:24, 4:24] = patterns[labels] * rng.uniform(120, 255, (n, 1, 1)) * rng.uniform(0.6, 1, (n, 20, 20))
        digits[split] = (images, labels)
    return digits


def toy_images(side, channels, n_classes=10, n=40):
    """What load_data returns, of images in color, (n, side, side, channels), or gray, (n, side, side): a pattern of
    each class, with noise. No channel is like another"""
    rng = np.random.default_rng(side + channels)
    shape = (side, side, channels) if channels > 1 else (side, side)
    patterns = rng.integers(0, 200, (n_classes, *shape))
    images = {"source": "pictures"}
    for split in ("train", "val", "test"):
        labels = np.arange(n) % n_classes
        images[split] = (patterns[labels] + rng.integers(0, 56, (n, *shape))).astype(np.uint8), labels
    return images


@pytest.fixture(scope="session")
def digits():
    return toy_digits()


def configs(experiment, words):
    """Return the Configs of a command's flags; of one that loads a network, whose file has them, none"""
    module, parser = EXPERIMENTS[experiment], argparse.ArgumentParser()
    module.add_settings(parser)
    parser.add_argument("--load", nargs="*")
    for flag in "--out-json", "--outdir":
        parser.add_argument(flag)
    args = parser.parse_args([str(word) for word in words])
    return module.configs_of(module.given_settings(args)) if args.load is None else []


def toy(experiment, **given):
    """Return the Config of what is given, at toy size, and its data: an epoch has a step of 17 samples, two shards, and
    one of 3"""
    module, small = EXPERIMENTS[experiment], SMALL.get(experiment, {})
    of_both = golden.applying(experiment, small | given)
    small = {name: value for name, value in small.items() if name in of_both}
    with unittest.mock.patch.dict(golden.SIZES, n_epochs=1, n_train=20, batch_size=17, n_val=8, n_test=8):
        kind = module.Config(**small | given)
        sizes = {f.name: golden.SIZES[f.name] for f in module.SETTINGS
                 if f.name in golden.SIZES and golden.applies(f, kind)}
        config = module.Config(**sizes | small | given)
        data = golden.tiny_data(experiment, config)
        return module.fit_to_data(config, data), data


def toy_run(experiment, state=None, each_step=lambda *_: None, each_epoch=lambda *_: None, dtype=np.float32, **given):
    """Return the state of a run of toy's, without its times"""
    config, data = toy(experiment, **given)
    state = EXPERIMENTS[experiment].train(config, data, state, each_step, each_epoch, dtype)
    return state | {"history": without_seconds(state["history"])}


def toy_flags(experiment, **given):
    """Return the flags of toy's Config"""
    (config, _), module = toy(experiment, **given), EXPERIMENTS[experiment]
    names = golden.SIZES.keys() - {"quiet"} | SMALL.get(experiment, {}).keys() | given.keys() | {"model"}
    return [f"{module.flag_of(f.name)}={getattr(config, f.name)}" for f in module.SETTINGS
            if f.name in names and golden.applies(f, config)]


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def float64(config, seed=3, module=mc, shifted=("_b",)):
    """The initial weights in float64, with biases off zero, so that no unit sits on a ReLU's kink."""
    rng = np.random.default_rng(seed)
    return {name: p.astype(np.float64) + (0.1 * rng.standard_normal(p.shape) if name.endswith(shifted) else 0)
            for name, p in module.init_params(config).items()}


def batch_of(digits, config, n=2, dtype=np.float64, module=mc):
    """The first n training samples of a run, as its network eats them"""
    return module.to_batch(next(module.epoch_samples(digits, 0, config)), slice(0, n), dtype)


def without_seconds(history):
    """history with the wall-clock times taken out"""
    return history | {"epochs": [epoch | {"seconds": 0} for epoch in history["epochs"]]}


def assert_same(a, b):
    """Two dicts of arrays agree bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
