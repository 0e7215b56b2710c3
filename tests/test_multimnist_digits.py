"""MNIST files that are whole or refused; downloads; synthetic digits."""
import contextlib
import gzip
import hashlib
import os
import shutil
import socketserver
import sys
import threading
from pathlib import Path

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import DEAD, TINY

SILENT = mc.Progress(quiet=True).say


@pytest.fixture
def mnist(monkeypatch, tmp_path):
    """Four small idx files in tmp_path/mnist, with MNIST changed to ask for exactly these -> folder, arrays"""
    rng, folder = np.random.default_rng(0), tmp_path / "mnist"
    table, arrays = {}, {}
    folder.mkdir()
    for (split, kind), (name, magic, shape, _) in mc.MNIST.files.items():
        shape = (6 if split == "train" else 4, *shape[1:])
        arrays[split, kind] = rng.integers(0, 10, shape, np.uint8)
        raw = np.array([magic, *shape], ">i4").tobytes() + arrays[split, kind].tobytes()
        (folder / name).write_bytes(raw)
        table[split, kind] = (name, magic, shape, hashlib.sha256(raw).hexdigest())
    monkeypatch.setattr(mc.MNIST, "files", table)
    monkeypatch.setattr(mc.MNIST, "n_val", 2)
    monkeypatch.setattr(mc, "N_SYNTHETIC", {"train": 4, "val": 3, "test": 2})
    return folder, arrays


def gzip_all(folder):
    for path in list(folder.iterdir()):
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def assert_loads(arrays, mnist_dir=""):
    """The last of the training images are for validation"""
    loaded = mc.load_digits(mc.Config(digits="mnist", data_dir=str(mnist_dir)), SILENT)
    assert loaded.pop("source") == "mnist" and list(loaded) == ["train", "val", "test"]
    for split, of, rows in (("train", "train", slice(0, 4)), ("val", "train", slice(4, 6)), ("test", "test", slice(4))):
        for array, kind in zip(loaded[split], ("images", "labels")):
            assert np.array_equal(array, arrays[of, kind][rows]) and array.dtype == np.uint8


def test_mnist_is_read_raw_gzipped_and_from_the_environment(mnist, monkeypatch):
    folder, arrays = mnist
    assert_loads(arrays, folder)
    monkeypatch.setenv("MNIST_DIR", str(folder))
    gzip_all(folder)
    assert_loads(arrays)
    monkeypatch.setenv("MNIST_DIR", "/nowhere")
    assert_loads(arrays, folder)                                                               # the flag wins
    for config, named in ((mc.Config(data_dir="/no"), "--data-dir /no"), (mc.Config(), "MNIST_DIR /nowhere")):
        with pytest.raises(mc.InputError, match=f"{named}: no such folder"):
            mc.load_digits(config)


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


DAMAGES = {  # what happens to the gzipped or raw training images -> what the message says
    "missing": (False, Path.unlink, "missing|not all four idx files"),
    "unreadable": (False, lambda p: (p.unlink(), p.mkdir()), "directory|denied"),       # an OSError
    "empty": (False, lambda p: p.write_bytes(b""), "begins with nothing"),
    "truncated": (False, lambda p: p.write_bytes(p.read_bytes()[:-9]), "values"),
    "wrong magic": (False, lambda p: flip(p, 3), "begins with 00000807|says shape"),
    "wrong shape": (False, lambda p: flip(p, 7), "shape"),
    "bit flipped": (False, lambda p: flip(p, 999), "SHA-256|damaged, since the three other"),
    "gz truncated": (True, lambda p: p.write_bytes(p.read_bytes()[:-99]), "gzip"),
    "gz flipped": (True, lambda p: flip(p, p.stat().st_size // 2), "gzip")}


@pytest.mark.parametrize("where, damage", [*(("folder", damage) for damage in DAMAGES),
                                           *(("cache", damage) for damage in DAMAGES if damage != "missing")])
def test_a_damaged_file_is_named_and_never_replaced(mnist, damage, where, monkeypatch):
    """Neither by synthetic digits nor, in the cache, by a mirror's: what lies there may be somebody's own"""
    folder, _ = mnist
    gzipped, harm, message = DAMAGES[damage]
    if where == "cache":
        cache = Path(os.environ["HOME"]) / ".cache/hinton-mnist"
        mirror = Path(shutil.copytree(folder, folder.parent / "mirror"))
        gzip_all(mirror)
        cache.parent.mkdir()
        folder = folder.rename(cache)
        monkeypatch.setattr(mc.MNIST, "mirrors", (mirror.as_uri() + "/",))
    if gzipped:
        gzip_all(folder)
    harm(folder / ("train-images-idx3-ubyte" + ".gz" * gzipped))
    for digits in ("mnist", "auto"):
        with pytest.raises((mc.InputError, OSError), match=message) as error:
            mc.load_digits(mc.Config(digits=digits, data_dir=str(folder) if where == "folder" else ""), SILENT)
        assert "train-images-idx3-ubyte" in str(error.value) and ("delete it" in str(error.value)) == (
            where == "cache" and damage != "unreadable") and "\n" not in str(error.value)
        assert not isinstance(error.value, mc.DataNotFound) and isinstance(error.value, OSError) == (
            damage == "unreadable")


def cached():
    folder = Path(os.environ["HOME"]) / ".cache/hinton-mnist"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def serve():
    """serve(answer) -> address of a local server that sends these bytes, whatever it is asked"""
    with contextlib.ExitStack() as stack:
        def start(answer):
            def handle(request, *_):
                request.recv(9999)
                request.sendall(answer)
            server = stack.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), handle))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_address[1]}/"
        yield start


def page(body, says=None):
    """What a mirror sends that says that all is well"""
    return b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % (says or len(body)) + body


WHOLE = gzip.compress(bytes(range(256)) * 99)
ANSWERS = {  # what a mirror without MNIST sends; None: it is not even there
    "dead": None, "nothing": b"", "not HTTP": b"\x00\x01 this is not HTTP\r\n\r\n", "empty": page(b""),
    "no such page": b"HTTP/1.0 404 Not Found\r\n\r\n", "HTML": page(b"<!DOCTYPE html><html>Please log in</html>"),
    "truncated gzip": page(WHOLE[:-40]), "another file": page(WHOLE), "less than promised": page(b"hello", 5000),
    "cut chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nhello"}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_mirror_without_mnist_is_passed_over_and_alone_is_as_no_network(mnist, serve, answer, monkeypatch, capsys):
    """auto: synthetic digits, and a notice that --quiet does not hide; mnist: an error; either way nothing is in the
    cache. With a good mirror behind it: MNIST, from then on from the cache"""
    bad = DEAD if ANSWERS[answer] is None else serve(ANSWERS[answer])
    monkeypatch.setattr(mc.MNIST, "mirrors", (bad,))
    for quiet in (False, True):
        digits = mc.load_digits(mc.Config(digits="auto", quiet=quiet), mc.Progress(quiet).say)
        out, err = capsys.readouterr()
        assert digits["source"] == "synthetic" and "SYNTHETIC" in err and "could not download" in err
        assert [len(digits[split][1]) for split in ("train", "val", "test")] == [4, 3, 2] and (out == "") == quiet
    said = "could not download train-images-idx3-ubyte.gz.*--data-dir.*--digits synthetic"
    with pytest.raises(mc.DataNotFound, match=said) as error:
        mc.load_digits(mc.Config(digits="mnist"), SILENT)
    assert "\n" not in str(error.value) and cached() == []
    monkeypatch.setattr(sys, "argv", ["x.py", "--task", "mnist", "--digits", "mnist"])
    with pytest.raises(mc.DataNotFound, match="as in: python3? x.py --task mnist --digits synthetic$"):
        mc.load_digits(mc.Config(digits="mnist"), SILENT)
    folder, arrays = mnist
    gzip_all(folder)
    monkeypatch.setattr(mc.MNIST, "mirrors", (bad, folder.as_uri() + "/"))
    assert_loads(arrays)
    assert cached() == sorted(name + ".gz" for name, *_ in mc.MNIST.files.values())
    monkeypatch.setattr(mc.MNIST, "mirrors", (DEAD,))
    assert_loads(arrays)


def test_synthetic_digits_look_like_mnist():
    """uint8 28x28, ink in about 20x20 px, center of mass in the middle, black ground and bright strokes; reproducible,
    and all different"""
    images, labels, factors = mc.synthesize_digits(400, 0)
    assert images.shape == (400, 28, 28) and images.dtype == labels.dtype == np.uint8 and labels.shape == (400,)
    assert set(labels) == set(range(10)) and np.bincount(labels).min() > 10
    assert np.all(images.max((1, 2)) > 150) and np.all((images > 0).mean((1, 2)) < 0.6)
    assert 0.05 < images.mean() / 255 < 0.25
    y, x = np.mgrid[:28, :28]
    for image in images.astype(float):
        rows, columns = (np.flatnonzero((image > 64).any(axis)) for axis in (1, 0))
        assert 12 <= max(np.ptp(rows), np.ptp(columns)) + 1 <= 22
        center = np.array([(image * y).sum(), (image * x).sum()]) / image.sum()
        assert np.abs(center - 14).max() < 0.6
    again, other = mc.synthesize_digits(400, 0), mc.synthesize_digits(400, 1)
    assert all(map(np.array_equal, (images, labels), again)) and not np.array_equal(images, other[0])
    assert len(np.unique(images.reshape(400, -1), axis=0)) == 400
    assert set(factors) == {"slant", "rotation", "aspect", "stroke", "style", "wobble"}
    for name, factor in factors.items():
        assert np.array_equal(factor, again[2][name]) and len(factor) == 400 and np.std(factor) > 0


def test_factors_of_the_synthetic_digits_mean_what_they_say():
    """Within a class: slant leans the ink right, counter-clockwise rotation leans it left, a wide stroke makes more
    ink."""
    images, labels, factors = mc.synthesize_digits(400, 0)
    y, x = np.mgrid[:28, :28] - 14.0
    ink, (xy, yy) = images.astype(float), ((images * moment).sum((1, 2)) for moment in (x * y, y * y))
    classes = labels[:, None] == np.arange(10)
    causes = np.column_stack([classes, *(factors[name] for name in ("slant", "rotation", "stroke"))])
    slant, rotation, _ = np.linalg.lstsq(causes, -xy / yy, rcond=None)[0][10:]
    assert 0.6 < slant < 1.2 and -1.4 < rotation < -0.6
    assert np.linalg.lstsq(causes, ink.mean((1, 2)), rcond=None)[0][12] > 5


def test_splits_are_disjoint(monkeypatch):
    monkeypatch.setattr(mc, "N_SYNTHETIC", {"train": 60, "val": 30, "test": 30})
    digits = mc.load_digits(TINY)
    images = np.concatenate([digits[split][0] for split in ("train", "val", "test")])
    assert len(np.unique(images.reshape(120, -1), axis=0)) == 120
    assert mc.MNIST.n_val == 5000 and mc.MNIST.files["train", "images"][2][0] == 60000


def test_a_raw_and_a_gzipped_file_must_be_the_same(mnist):
    """Both may lie there, as torchvision leaves them; other images in one of them are not silently preferred"""
    folder, arrays = mnist
    raw = folder / "train-labels-idx1-ubyte"
    (folder / (raw.name + ".gz")).write_bytes(gzip.compress(raw.read_bytes()))
    assert_loads(arrays, folder)
    flip(raw, 9)
    with pytest.raises(mc.InputError, match="train-labels-idx1-ubyte and .*train-labels-idx1-ubyte.gz differ. Remove"):
        mc.load_digits(mc.Config(data_dir=str(folder)), SILENT)
