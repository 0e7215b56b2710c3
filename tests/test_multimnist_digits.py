"""MNIST files that are whole or refused; downloads; synthetic digits: of both scripts that have them."""
import contextlib
import gzip
import hashlib
import os
import socketserver
import threading
from pathlib import Path

import affnist_capsnet as ac
import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import DEAD, idx

N_TRAIN = 5004                     # the last 5,000 are for validation
RNG = np.random.default_rng(0)
ARRAYS = {"train-images-idx3": RNG.integers(0, 10, (N_TRAIN, 28, 28), np.uint8),
          "train-labels-idx1": np.arange(N_TRAIN), "t10k-labels-idx1": np.arange(4),
          "t10k-images-idx3": RNG.integers(0, 10, (4, 28, 28), np.uint8)}
FILES = {f"{name}-ubyte": idx(array % 10) for name, array in ARRAYS.items()}
ZIPPED = {f"{name}.gz": gzip.compress(raw, 1) for name, raw in FILES.items()}


@pytest.fixture(params=[mc, ac], ids=lambda module: module.EXPERIMENT)
def script(request):
    return request.param


@pytest.fixture
def put(script, monkeypatch):
    """put(folder, files): write them. They are taken for MNIST; synthetic digits are few"""
    monkeypatch.setattr(script, "MNIST", {name: hashlib.sha256(raw).hexdigest() for name, raw in FILES.items()})
    monkeypatch.setattr(script, "N_SYNTHETIC", {"train": 4, "val": 3, "test": 2})

    def write(folder, files=FILES):
        folder.mkdir(parents=True)
        for name, raw in files.items():
            (folder / name).write_bytes(raw)
        return folder
    return write


def cache():
    return Path(os.environ["HOME"]) / ".cache/hinton-mnist"


def assert_loads(script, data_dir=""):
    loaded = script.load_data(script.Config(digits="mnist", data_dir=str(data_dir)))
    assert loaded.pop("source") == "mnist" and list(loaded) == ["train", "test", "val"]
    for split, of, rows in (("train", "train", slice(4)), ("val", "train", slice(4, None)), ("test", "t10k", slice(4))):
        for array, kind in zip(loaded[split], ("images-idx3", "labels-idx1")):
            assert np.array_equal(array, ARRAYS[f"{of}-{kind}"][rows] % 10) and array.dtype == np.uint8


def test_mnist_is_read_raw_gzipped_and_from_the_environment(script, put, monkeypatch, tmp_path):
    put(tmp_path / "raw")
    monkeypatch.setenv("MNIST_DIR", str(put(tmp_path / "zipped", ZIPPED)))
    assert_loads(script)
    monkeypatch.setenv("MNIST_DIR", "/nowhere")
    assert_loads(script, tmp_path / "raw")                              # the flag wins
    for config, named in ((script.Config(data_dir="/no"), "/no"), (script.Config(), "/nowhere")):
        with pytest.raises(script.InputError, match=f"{named}: no such folder"):
            script.load_data(config)


@pytest.mark.parametrize("place, mend", [('"/data/mnist"', True), ("$HOME/mnist", True), ("/nowhere", False)])
def test_a_wrong_folder_in_the_environment_is_named_with_its_variable(script, monkeypatch, place, mend):
    monkeypatch.setenv("MNIST_DIR", place)
    with pytest.raises(script.InputError, match="^the environment variable MNIST_DIR: ") as error:
        script.load_data(script.Config())
    assert f"MNIST_DIR: {place}: no such folder" in str(error.value)
    assert ("It has quotes or a $: set it to the path alone" in str(error.value)) == mend


def flipped(raw, at):
    return raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1:]


DAMAGED = "train-images-idx3-ubyte.*: damaged"
DAMAGES = {  # what happens to the gzipped or raw training images (None: a folder has their name), what the message says
    "unreadable": (FILES, None, DAMAGED), "wrong magic": (FILES, lambda raw: flipped(raw, 3), DAMAGED),
    "bit flipped": (FILES, lambda raw: flipped(raw, 999), "some are damaged"),
    "gz flipped": (ZIPPED, lambda raw: flipped(raw, len(raw) // 2), DAMAGED)}


@pytest.mark.parametrize("where", ["folder", "cache"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_never_replaced(script, put, tmp_path, damage, where, monkeypatch):
    """Neither by synthetic digits nor, in the cache, by a mirror's: it may be the user's own"""
    files, harm, message = DAMAGES[damage]
    monkeypatch.setattr(script, "MIRRORS", (put(tmp_path / "mirror", ZIPPED).as_uri() + "/",))
    folder = put(tmp_path / "data" if where == "folder" else cache(), files)
    path = folder / list(files)[0]
    if harm:
        path.write_bytes(harm(files[path.name]))
    else:
        path.unlink()
        path.mkdir()
    before = {path.name: path.is_file() and path.read_bytes() for path in folder.iterdir()}
    for digits in ("mnist", "auto"):
        with pytest.raises(script.InputError, match=message) as error:
            script.load_data(script.Config(digits=digits, data_dir=str(folder) if where == "folder" else ""))
        assert str(folder) in str(error.value) and "\n" not in str(error.value)
    assert {path.name: path.is_file() and path.read_bytes() for path in folder.iterdir()} == before


@pytest.fixture
def serve():
    """serve(answer): the address of a local server that sends these bytes, whatever it is asked"""
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
ANSWERS = {  # what a mirror without MNIST sends; None: no server is there
    "dead": None, "nothing": b"", "not HTTP": b"\x00\x01 this is not HTTP\r\n\r\n", "empty": page(b""),
    "no such page": b"HTTP/1.0 404 Not Found\r\n\r\n", "HTML": page(b"<!DOCTYPE html><html>Please log in</html>"),
    "truncated gzip": page(WHOLE[:-40]), "another file": page(WHOLE), "less than promised": page(b"hello", 5000),
    "cut chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nhello"}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_mirror_without_mnist_is_passed_over_and_alone_is_as_no_network(
        script, put, serve, answer, monkeypatch, capsys, tmp_path):
    """auto: synthetic digits, and a notice that --quiet does not hide; mnist: an error; either way nothing is in the
    cache. With a good mirror behind it: MNIST, from then on from the cache"""
    bad = DEAD if ANSWERS[answer] is None else serve(ANSWERS[answer])
    monkeypatch.setattr(script, "MIRRORS", (bad,))
    digits = script.load_data(script.Config(quiet=True))
    out, err = capsys.readouterr()
    assert digits["source"] == "synthetic" and "SYNTHETIC" in err and "--data-dir" in err and not out
    assert [len(digits[split][1]) for split in ("train", "val", "test")] == [4, 3, 2]
    with pytest.raises(script.InputError, match="MNIST.*--data-dir.*--digits synthetic") as error:
        script.load_data(script.Config(digits="mnist"))
    assert "\n" not in str(error.value) and not cache().exists()
    monkeypatch.setattr(script, "MIRRORS", (bad, put(tmp_path / "good", ZIPPED).as_uri() + "/"))
    with pytest.raises(script.InputError, match="MNIST is not on this machine"):
        script.load_data(script.Config(digits="mnist"), download=False)
    assert_loads(script)
    assert sorted(path.name for path in cache().iterdir()) == sorted(ZIPPED)
    monkeypatch.setattr(script, "MIRRORS", (DEAD,))
    assert_loads(script)


def test_synthetic_digits_look_like_mnist(script):
    """uint8 28x28, ink in about 20x20 px, center of mass in the middle, black background and bright strokes;
    reproducible, and all different"""
    images, labels, factors = script.synthesize_digits(400, 0)
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
    again, other = script.synthesize_digits(400, 0), script.synthesize_digits(400, 1)
    assert all(map(np.array_equal, (images, labels), again)) and not np.array_equal(images, other[0])
    assert len(np.unique(images.reshape(400, -1), axis=0)) == 400
    assert set(factors) == {"slant", "rotation", "aspect", "stroke", "style", "wobble"}
    for name, factor in factors.items():
        assert np.array_equal(factor, again[2][name]) and len(factor) == 400 and np.std(factor) > 0


def test_the_pen_is_as_fast_everywhere_and_lifting_it_adds_no_length(script):
    """112 positions on two straight lines of 1.98, from the first's start to the second's end"""
    points, basis = script.stroke_basis("0000 0099 | 9900 9999", 5)
    np.testing.assert_allclose(points, [[-1, -1], [-1, 0.98], [0.98, -1], [0.98, 0.98], [0, 0]])
    x, y = (basis @ points).T
    length = np.arange(112) * 2 * 1.98 / 111
    np.testing.assert_allclose(x, np.where(length <= 1.98, -1, 0.98), atol=1e-9)
    np.testing.assert_allclose(y, np.where(length <= 1.98, length - 1, length - 1.98 - 1), atol=1e-9)


def test_the_stroke_is_the_mean_width_of_the_pen(script, monkeypatch):
    """It varies along a stroke, whose rim is 1 to 1.6 px wide"""
    seen = []
    render = script.render_strokes
    monkeypatch.setattr(script, "render_strokes", lambda *how: seen.append(how) or render(*how))
    _, _, factors = script.synthesize_digits(300, 0)
    _, width, edge, pressure = (np.concatenate(parts) for parts in zip(*seen))
    np.testing.assert_allclose(width, factors["stroke"], rtol=1e-6)
    np.testing.assert_allclose(pressure.mean(1), 1)
    assert 0.2 < np.ptp(pressure, 1).max() < 0.81 / 0.6 and 1 <= edge.min() < 1.1 < 1.5 < edge.max() <= 1.6


def test_factors_of_the_synthetic_digits_mean_what_they_say(script):
    """Within a class: slant leans the ink right, counter-clockwise rotation leans it left, a wide stroke makes more
    ink, aspect makes it wider than high; styles are counted from 0."""
    images, labels, factors = script.synthesize_digits(400, 0)
    y, x = np.mgrid[:28, :28] - 14.0
    ink, (xy, yy) = images.astype(float), ((images * moment).sum((1, 2)) for moment in (x * y, y * y))
    classes = labels[:, None] == np.arange(10)
    causes = np.column_stack([classes, *(factors[name] for name in ("slant", "rotation", "stroke"))])
    slant, rotation, _ = np.linalg.lstsq(causes, -xy / yy, rcond=None)[0][10:]
    assert 0.6 < slant < 1.2 and -1.4 < rotation < -0.6
    assert np.linalg.lstsq(causes, ink.mean((1, 2)), rcond=None)[0][12] > 5
    causes = np.column_stack([classes, np.log(factors["aspect"])])
    widths = np.log(np.sqrt((ink * x * x).sum((1, 2)) / yy))            # standard deviations of ink, per height
    assert 0.5 < np.linalg.lstsq(causes, widths, rcond=None)[0][10] < 1.2
    n_styles = np.bincount([digit for digit, *_ in script.GLYPHS])[labels]
    assert (factors["style"] >= 0).all() and (factors["style"] < n_styles).all()
    assert all(factors["style"][labels == digit].min() == 0 for digit in range(10))
