"""MNIST files that are whole or refused; downloads; synthetic digits."""
import gzip
import hashlib
import http.server
import os
import socketserver
import threading
from pathlib import Path

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import DEAD, TINY

# -------------------------------------------------------------- MNIST files

@pytest.fixture
def mnist(monkeypatch, tmp_path):
    """Four small idx files in tmp_path/mnist, with MNIST_FILES changed to ask for exactly these -> folder, arrays"""
    rng, folder = np.random.default_rng(0), tmp_path / "mnist"
    table, arrays = {}, {}
    folder.mkdir()
    for (split, kind), (name, magic, shape, _) in mc.MNIST_FILES.items():
        shape = (6 if split == "train" else 4, *shape[1:])
        arrays[split, kind] = rng.integers(0, 10, shape, np.uint8)
        raw = np.array([magic, *shape], ">i4").tobytes() + arrays[split, kind].tobytes()
        (folder / name).write_bytes(raw)
        table[split, kind] = (name, magic, shape, hashlib.sha256(raw).hexdigest())
    monkeypatch.setattr(mc, "MNIST_FILES", table)
    return folder, arrays


def gzip_all(folder):
    for path in list(folder.iterdir()):
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def assert_loads(arrays, mnist_dir="", say=lambda *_, **__: None):
    loaded = mc.load_mnist(str(mnist_dir), 5, say)
    for split in ("train", "test"):
        for k, kind in enumerate(("images", "labels")):
            np.testing.assert_array_equal(loaded[split][k], arrays[split, kind])
            assert loaded[split][k].dtype == np.uint8


def test_mnist_is_read_raw_gzipped_and_from_the_environment(mnist, monkeypatch):
    folder, arrays = mnist
    assert_loads(arrays, folder)
    monkeypatch.setenv("MNIST_DIR", str(folder))
    assert_loads(arrays)
    gzip_all(folder)
    assert_loads(arrays)
    monkeypatch.setenv("MNIST_DIR", "/nowhere")
    assert_loads(arrays, folder)                                                               # the flag wins


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def become_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = {  # what happens to the gzipped or raw training images -> what the message says
    "missing": (False, Path.unlink, "missing"),
    "empty": (False, lambda p: p.write_bytes(b""), "magic number missing"),
    "truncated": (False, lambda p: p.write_bytes(p.read_bytes()[:-9]), "bytes"),
    "too long": (False, lambda p: p.write_bytes(p.read_bytes() + b"x"), "bytes"),
    "wrong magic": (False, lambda p: flip(p, 3), "magic number 2055, should be 2051"),
    "wrong shape": (False, lambda p: flip(p, 7), "shape"),
    "bit flipped": (False, lambda p: flip(p, 999), "SHA-256"),
    "unreadable": (False, become_folder, "cannot be read"),
    "html page": (False, lambda p: p.write_bytes(b"<!DOCTYPE html><html>404</html>"), "magic number"),
    "gz truncated": (True, lambda p: p.write_bytes(p.read_bytes()[:-99]), "gzip"),
    "gz stub": (True, lambda p: p.write_bytes(p.read_bytes()[:2]), "gzip"),
    "gz flipped": (True, lambda p: flip(p, p.stat().st_size // 2), "gzip")}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("digits_flag", ["mnist", "auto"])
def test_a_damaged_file_is_named_and_never_replaced_by_synthetic_digits(mnist, damage, digits_flag):
    folder, _ = mnist
    gzipped, harm, message = DAMAGES[damage]
    if gzipped:
        gzip_all(folder)
    harm(folder / ("train-images-idx3-ubyte" + ".gz" * gzipped))
    with pytest.raises(mc.InputError, match=message) as error:
        mc.load_digits(mc.Config(digits=digits_flag, mnist_dir=str(folder)), lambda *_, **__: None)
    assert "train-images-idx3-ubyte" in str(error.value) and "\n" not in str(error.value)


def test_a_missing_folder_is_named(monkeypatch):
    with pytest.raises(mc.InputError, match="--mnist-dir /no/where: no such folder"):
        mc.load_digits(mc.Config(mnist_dir="/no/where"))
    monkeypatch.setenv("MNIST_DIR", "/no/where/else")
    with pytest.raises(mc.InputError, match="MNIST_DIR /no/where/else: no such folder"):
        mc.load_digits(mc.Config())


# -------------------------------------------------------------- downloads

CACHE = Path(".cache/hinton-mnist")


def cached():
    folder = Path(os.environ["HOME"]) / CACHE
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """serve(handler) -> address of a local server that answers with it"""
    servers = []

    def start(handler):
        servers.append(socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler))
        servers[-1].daemon_threads = True
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_second_mirror_is_used_when_the_first_is_dead_and_then_the_cache(mnist, serve, monkeypatch):
    folder, arrays = mnist
    gzip_all(folder)
    address = serve(lambda *request: QuietHandler(*request, directory=str(folder)))
    monkeypatch.setattr(mc, "MNIST_MIRRORS", (DEAD, address))
    assert_loads(arrays)
    assert cached() == sorted(name + ".gz" for name, *_ in mc.MNIST_FILES.values())
    monkeypatch.setattr(mc, "MNIST_MIRRORS", (DEAD,))
    assert_loads(arrays)                                                                       # from the cache
    flip(Path(os.environ["HOME"]) / CACHE / "t10k-labels-idx1-ubyte.gz", 20)
    with pytest.raises(mc.InputError, match="t10k-labels"):
        mc.load_digits(mc.Config(digits="auto"), lambda *_, **__: None)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "another file", "absent"])
def test_a_corrupt_mirror_leaves_nothing_in_the_cache(mnist, damage, monkeypatch):
    folder, arrays = mnist
    gzip_all(folder)
    name = next(iter(mc.MNIST_FILES.values()))[0]
    bad, good = folder / (name + ".gz"), (folder / (name + ".gz")).read_bytes()
    {"truncated": lambda: bad.write_bytes(good[:-30]), "flipped": lambda: flip(bad, 99),
     "another file": lambda: bad.write_bytes(gzip.compress(b"hello")), "absent": bad.unlink}[damage]()
    monkeypatch.setattr(mc, "MNIST_MIRRORS", (folder.as_uri() + "/",))
    with pytest.raises(mc.InputError, match=f"could not download {name}.gz") as error:
        mc.load_digits(mc.Config(digits="mnist"), lambda *_, **__: None)
    assert cached() == [] and "\n" not in str(error.value)
    second = folder.parent / "second"
    second.mkdir()
    for path in folder.iterdir():
        (second / path.name).write_bytes(path.read_bytes())
    (second / bad.name).write_bytes(good)
    monkeypatch.setattr(mc, "MNIST_MIRRORS", (folder.as_uri() + "/", second.as_uri() + "/"))
    assert_loads(arrays)


def cut_short(request):
    """Promises more bytes than it sends"""
    request.recv(9999)
    request.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 5000\r\n\r\nhello")


def cut_chunks(request):
    request.recv(9999)
    request.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nhello")


def garbage(request):
    request.recv(9999)
    request.sendall(b"\x00\x01 this is not HTTP\r\n\r\n")


@pytest.mark.parametrize("answer", [cut_short, cut_chunks, garbage, lambda request: request.recv(9999)],
                         ids=["cut short", "cut chunks", "garbage", "hangs up"])
def test_a_mirror_that_misbehaves_counts_as_dead(mnist, serve, answer, monkeypatch):
    folder, arrays = mnist
    gzip_all(folder)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            answer(self.request)

    monkeypatch.setattr(mc, "MNIST_MIRRORS", (serve(Handler), folder.as_uri() + "/"))
    assert_loads(arrays)


def page(body):
    """A mirror that answers every request with this body, and says that all is well"""
    def answer(request):
        request.recv(9999)
        request.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return answer


WRONG = {
    "not HTTP": garbage, "HTML": page(b"<!DOCTYPE html><html>Please log in</html>"), "nothing": page(b""),
    "truncated gzip": page(gzip.compress(bytes(range(256)) * 99)[:-40]), "another file": page(gzip.compress(b"hello")),
    "less than promised": cut_short}


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("answer", WRONG)
def test_mirrors_without_mnist_are_as_no_network(serve, answer, quiet, monkeypatch, capsys):
    """auto: synthetic digits, and a notice that --quiet does not hide; mnist: an error; either way nothing in the
    cache"""
    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            WRONG[answer](self.request)

    monkeypatch.setattr(mc, "MNIST_MIRRORS", (serve(Handler),))
    monkeypatch.setattr(mc, "N_SYNTHETIC", {"train": 4, "val": 3, "test": 2})
    digits = mc.load_digits(mc.Config(digits="auto", quiet=quiet), mc.Progress(quiet).say)
    out, err = capsys.readouterr()
    assert digits["source"] == "synthetic" and "SYNTHETIC" in err and "could not download" in err and cached() == []
    assert (out == "") == quiet
    with pytest.raises(mc.InputError, match="could not download train-images-idx3-ubyte.gz") as error:
        mc.load_digits(mc.Config(digits="mnist"), lambda *_, **__: None)
    assert "\n" not in str(error.value) and cached() == []


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "missing"])
@pytest.mark.parametrize("digits_flag", ["mnist", "auto"])
def test_a_damaged_file_in_the_cache_is_an_error_too(mnist, damage, digits_flag, monkeypatch):
    """Also where a mirror has it whole: what lies there may be somebody's own"""
    folder, _ = mnist
    gzipped, harm, message = DAMAGES[damage]
    gzip_all(folder)
    monkeypatch.setattr(mc, "MNIST_MIRRORS", (folder.as_uri() + "/",))
    cache = Path(os.environ["HOME"]) / CACHE
    cache.mkdir(parents=True)
    for path in folder.iterdir():
        raw = path.read_bytes()
        (cache / path.name if gzipped else cache / path.stem).write_bytes(raw if gzipped else gzip.decompress(raw))
    harm(cache / ("train-images-idx3-ubyte" + ".gz" * gzipped))
    with pytest.raises(mc.InputError, match=message) as error:
        mc.load_digits(mc.Config(digits=digits_flag), lambda *_, **__: None)
    assert "train-images-idx3-ubyte" in str(error.value) and not isinstance(error.value, mc.NotAtHand)


def test_no_mirror_is_one_line_for_mnist_and_a_notice_for_auto(monkeypatch, capsys):
    with pytest.raises(mc.InputError, match="could not download.*--mnist-dir.*--digits synthetic") as error:
        mc.load_digits(mc.Config(digits="mnist"), lambda *_, **__: None)
    assert "\n" not in str(error.value)
    images = np.zeros((9, 28, 28), np.uint8)
    monkeypatch.setattr(mc, "N_SYNTHETIC", {"train": 4, "val": 3, "test": 2})
    monkeypatch.setattr(mc, "synthesize_digits", lambda n, seed: (images[:n], np.arange(n, dtype=np.uint8), {}))
    digits = mc.load_digits(mc.Config(digits="auto"), lambda *_, **__: None)                           # as with --quiet
    assert digits["source"] == "synthetic" and "SYNTHETIC" in capsys.readouterr().err
    assert [list(digits[split][1]) for split in ("train", "val", "test")] == [[0, 1, 2, 3], [4, 5, 6], [7, 8]]


def test_mnist_splits_are_disjoint(monkeypatch):
    def numbered(start, n):
        return np.arange(start, start + n), np.zeros(n, np.uint8)
    monkeypatch.setattr(mc, "load_mnist", lambda *_: {"train": numbered(0, 60000), "test": numbered(60000, 10000)})
    digits = mc.load_digits(mc.Config(digits="mnist"))
    assert digits["source"] == "mnist"
    for split, first, last in (("train", 0, 54999), ("val", 55000, 59999), ("test", 60000, 69999)):
        np.testing.assert_array_equal(digits[split][0], np.arange(first, last + 1))
        assert len(digits[split][1]) == len(digits[split][0])


# -------------------------------------------------------------- synthetic digits

FACTORS = ("slant", "rotation", "aspect", "stroke", "style", "wobble")


@pytest.fixture(scope="module")
def synthetic():
    return mc.synthesize_digits(400, 0)


def test_synthetic_digits_look_like_mnist(synthetic):
    """uint8 28x28, ink in about 20x20 px, centre of mass in the middle, black ground and bright strokes"""
    images, labels, _ = synthetic
    assert (images.shape == (400, 28, 28) and images.dtype == np.uint8 and labels.shape == (400,)
            and labels.dtype.kind in "ui")
    assert set(labels) == set(range(10)) and np.bincount(labels).min() > 10
    assert np.all(images.max((1, 2)) > 150) and np.all((images > 0).mean((1, 2)) < 0.6)
    assert 0.05 < images.mean() / 255 < 0.25
    y, x = np.mgrid[:28, :28]
    for image in images.astype(float):
        rows, columns = (np.flatnonzero((image > 64).any(axis)) for axis in (1, 0))
        assert 12 <= max(np.ptp(rows), np.ptp(columns)) + 1 <= 22
        centre = np.array([(image * y).sum(), (image * x).sum()]) / image.sum()
        assert np.abs(centre - 14).max() < 0.6


def test_synthetic_digits_are_reproducible_and_all_different(synthetic):
    images, labels, factors = synthetic
    again, other = mc.synthesize_digits(400, 0), mc.synthesize_digits(400, 1)
    assert (
        np.array_equal(images, again[0]) and np.array_equal(labels, again[1]) and not np.array_equal(images, other[0]))
    assert len(np.unique(images.reshape(400, -1), axis=0)) == 400
    assert all(np.array_equal(factors[name], again[2][name]) for name in factors)


@pytest.mark.parametrize("name", FACTORS)
def test_each_factor_of_the_synthetic_digits_varies(synthetic, name):
    factor = np.asarray(synthetic[2][name])
    assert len(factor) == 400 and np.std(factor) > 0


def test_factors_of_the_synthetic_digits_mean_what_they_say(synthetic):
    """Within a class: slant leans the ink right, counter-clockwise rotation leans it left, a wide stroke makes more
    ink."""
    images, labels, factors = synthetic
    y, x = np.mgrid[:28, :28] - 14.0
    ink, (xy, yy) = images.astype(float), ((images * moment).sum((1, 2)) for moment in (x * y, y * y))
    classes = labels[:, None] == np.arange(10)
    causes = np.column_stack([classes, *(factors[name] for name in ("slant", "rotation", "stroke"))])
    slant, rotation, _ = np.linalg.lstsq(causes, -xy / yy, rcond=None)[0][10:]
    assert 0.6 < slant < 1.2 and -1.4 < rotation < -0.6
    assert np.linalg.lstsq(causes, ink.mean((1, 2)), rcond=None)[0][12] > 5


def test_synthetic_classes_can_be_told_apart(synthetic):
    """A nearest-neighbour classifier on half of them names most of the others: the labels mean something."""
    images, labels = synthetic[0].reshape(400, -1) / 255, synthetic[1]
    near = np.square(images[200:, None] - images[None, :200]).sum(2).argmin(1)
    assert (labels[near] == labels[200:]).mean() > 0.6


def test_synthetic_splits_are_disjoint(monkeypatch):
    monkeypatch.setattr(mc, "N_SYNTHETIC", {"train": 60, "val": 30, "test": 30})
    digits = mc.load_digits(TINY)
    images = np.concatenate([digits[split][0] for split in ("train", "val", "test")])
    assert len(np.unique(images.reshape(120, -1), axis=0)) == 120
