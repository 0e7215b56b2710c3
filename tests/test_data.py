"""Pairs that really overlap; MNIST files that are whole or refused; synthetic digits."""
import dataclasses
import gzip
import hashlib
import http.server
import itertools
import os
import socketserver
import threading
import time
from pathlib import Path

import multimnist_capsnet as mc
import numpy as np
import pytest
from conftest import DEAD, TINY


def iou_reference(shifts):
    """IoU of two 20x20 boxes, by painting them"""
    canvas = np.zeros((2, 36, 36), bool)
    for k, (dy, dx) in enumerate(shifts):
        canvas[k, 8 + dy:28 + dy, 8 + dx:28 + dx] = True
    return (canvas[0] & canvas[1]).sum() / (canvas[0] | canvas[1]).sum()


# ---------------------------------------------------------------- placements

@pytest.mark.parametrize("shifts, iou", [(((0, 0), (0, 0)), 1), (((-4, 4), (-4, 4)), 1), (((0, 0), (0, 1)), 380 / 420),
                                         (((1, 0), (0, 1)), 361 / 439), (((2, 0), (0, 0)), 360 / 440),
                                         (((0, 1), (2, 0)), 342 / 458),
                                         (((-4, -4), (4, 4)), 144 / 656)])
def test_box_iou_by_hand(shifts, iou):
    assert mc.box_iou(np.array(shifts)) == pytest.approx(iou) == pytest.approx(iou_reference(shifts))


def test_legal_shift_pairs_by_hand():
    """On one axis 9, 16 and 14 of the 81 pairs of shifts are 0, 1 and 2 apart. IoU >= 0.8 allows the offsets (0, 0), (0, 1),
    (1, 0), (1, 1), (0, 2), (2, 0): 9*9 + 2*9*16 + 16*16 + 2*9*14 = 877 of 6561."""
    every = list(itertools.product(itertools.product(range(-4, 5), repeat=2), repeat=2))
    assert sorted(map(tuple, mc.legal_shift_pairs(0).reshape(-1, 4))) == sorted(a + b for a, b in every)
    legal = mc.legal_shift_pairs(0.8)
    assert len(legal) == 877 == sum(iou_reference(pair) >= 0.8 for pair in every)
    assert len(mc.legal_shift_pairs(1)) == 81 and mc.box_iou(legal).min() == pytest.approx(360 / 440)
    assert len(mc.legal_shift_pairs(360 / 440)) == 877                                         # the bound itself is inside


@pytest.mark.parametrize("dy, dx", [(0, 0), (4, -4), (-4, 4), (-1, 3)])
def test_shift_moves_down_and_right(dy, dx):
    image = np.zeros((1, 28, 28), np.uint8)
    image[0, 10, 5], image[0, 27, 27], image[0, 0, 0] = 9, 7, 5
    canvas = mc.shift_digits(image, np.array([[dy, dx]]))
    assert canvas.shape == (1, 36, 36) and canvas.sum() == 21
    assert (canvas[0, 14 + dy, 9 + dx], canvas[0, 31 + dy, 31 + dx], canvas[0, 4 + dy, 4 + dx]) == (9, 7, 5)


def test_merges():
    sources = np.array([[[[0, 200, 255]], [[10, 100, 255]]]], np.uint8)
    np.testing.assert_array_equal(mc.merge_sources(sources, "max"), [[[10, 200, 255]]])
    np.testing.assert_array_equal(mc.merge_sources(sources, "add"), [[[10, 255, 255]]])
    assert mc.merge_sources(sources, "max").dtype == mc.merge_sources(sources, "add").dtype == np.uint8


@pytest.mark.parametrize("merge", ["max", "add"])
def test_overlay_pair(digits, merge):
    a, b = digits["train"][0][:2]
    composite, sources = mc.overlay_pair(a, b, (1, -2), (0, 4), merge)
    np.testing.assert_array_equal(sources[0, 5:33, 2:30], a)
    np.testing.assert_array_equal(sources[1, 4:32, 8:36], b)
    merged = sources.max(0) if merge == "max" else sources.sum(0, dtype=int).clip(max=255)
    np.testing.assert_array_equal(composite, merged)
    assert composite.dtype == np.uint8 and composite.shape == (36, 36)


# ---------------------------------------------------------------- pairs

@pytest.mark.parametrize("min_iou, merge", [(0.8, "max"), (0, "add"), (1, "max")])
def test_every_pair_is_what_it_says(digits, min_iou, merge):
    images, labels = digits["train"]
    pairs = mc.generate_multimnist(images, labels, 500, np.random.default_rng(0), min_iou, merge)
    assert {name: (a.shape, a.dtype) for name, a in pairs.items()} == {
        "composites": ((500, 36, 36), np.uint8), "sources": ((500, 2, 36, 36), np.uint8), "labels": ((500, 2), np.int64),
        "shifts": ((500, 2, 2), np.int64), "index": ((500, 2), np.int64)}
    assert np.all(pairs["labels"][:, 0] != pairs["labels"][:, 1]) and np.abs(pairs["shifts"]).max() <= 4
    for k in range(500):
        assert iou_reference(pairs["shifts"][k]) >= min_iou
        composite, sources = mc.overlay_pair(*images[pairs["index"][k]], *pairs["shifts"][k], merge)
        np.testing.assert_array_equal(pairs["composites"][k], composite)
        np.testing.assert_array_equal(pairs["sources"][k], sources)
        np.testing.assert_array_equal(pairs["labels"][k], labels[pairs["index"][k]])


def test_placements_and_partners_are_uniform():
    """All 877 placements occur alike; the second digit is any image of another class, alike, whatever the classes' sizes."""
    labels = np.repeat(np.arange(4, dtype=np.uint8), [1, 2, 3, 6])[np.random.default_rng(1).permutation(12)]
    images, rng = np.zeros((12, 28, 28), np.uint8), np.random.default_rng(0)
    parts = [mc.generate_multimnist(images, labels, 2000, rng) for _ in range(15)]
    index, shifts = (np.concatenate([part[name] for part in parts]) for name in ("index", "shifts"))
    _, counts = np.unique(shifts.reshape(-1, 4), axis=0, return_counts=True)
    assert len(counts) == 877 and np.abs(counts - 30000 / 877).max() < 5 * (30000 / 877) ** 0.5
    table = np.zeros((12, 12))
    np.add.at(table, (index[:, 0], index[:, 1]), 1)
    allowed = labels[:, None] != labels
    expected = allowed / allowed.sum(1, keepdims=True) * 30000 / 12
    assert not table[~allowed].any() and np.all(np.abs(table - expected) <= 5 * expected ** 0.5)


def test_one_class_is_refused(digits):
    with pytest.raises(mc.InputError, match="two classes"):
        mc.generate_multimnist(digits["train"][0][:3], np.array([4, 4, 4]), 2, np.random.default_rng(0))


def test_sampling_is_fast(digits):
    def pairs_per_second():
        began = time.perf_counter()
        mc.generate_multimnist(*digits["train"], 2048, np.random.default_rng(0))
        return 2048 / (time.perf_counter() - began)
    assert max(pairs_per_second() for _ in range(10)) > 20000


def test_pairs_do_not_depend_on_one_another_or_on_how_many_are_drawn(digits, monkeypatch):
    monkeypatch.setattr(mc, "CHUNK", 40)
    few, many = (mc.draw_pairs(digits, "val", n, TINY, "evaluation", 0) for n in (80, 110))
    test, other_seed = (mc.draw_pairs(digits, "val", 80, config, "evaluation", key) for config, key in
                        ((TINY, 1), (dataclasses.replace(TINY, seed=2), 0)))
    assert len(many["labels"]) == 110 and np.array_equal(few["index"], many["index"][:80])
    assert not np.array_equal(few["index"][:40], few["index"][40:])
    assert not np.array_equal(few["index"], test["index"]) and not np.array_equal(few["index"], other_seed["index"])


def test_epochs_are_fresh_unless_the_pool_is_fixed(digits, monkeypatch):
    monkeypatch.setattr(mc, "CHUNK", 64)                                                       # one batch of 40, less than two
    def drawn(epoch, **changes):
        parts = list(mc.epoch_pairs(digits, epoch, dataclasses.replace(TINY, n_train=100, **changes)))
        assert [len(part["labels"]) for part in parts] == [40, 40, 20]
        return np.concatenate([part["index"] for part in parts])
    first = drawn(0)
    assert np.array_equal(first, drawn(0))
    assert not np.array_equal(first, drawn(1)) and not np.array_equal(first, drawn(0, seed=2))
    assert np.array_equal(drawn(0, fixed_pool=True), drawn(1, fixed_pool=True))
    assert not np.array_equal(first[:40], first[40:80])


def test_to_batch_scales_to_one(digits):
    pairs = mc.draw_pairs(digits, "train", 5, TINY, "data")
    batch = mc.to_batch(pairs, np.array([3, 1]))
    np.testing.assert_allclose(batch["composites"], pairs["composites"][[3, 1]] / 255, rtol=1e-6)
    np.testing.assert_allclose(batch["sources"], pairs["sources"][[3, 1]] / 255, rtol=1e-6)
    assert np.array_equal(batch["labels"], pairs["labels"][[3, 1]]) and batch["composites"].dtype == np.float32


# ---------------------------------------------------------------- MNIST files

@pytest.fixture
def mnist(monkeypatch, tmp_path):
    """Four small idx files in tmp_path/mnist, with MNIST_FILES changed to ask for exactly these -> folder, arrays"""
    rng, folder, table, arrays = np.random.default_rng(0), tmp_path / "mnist", {}, {}
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


# ---------------------------------------------------------------- downloads

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
        return "http://127.0.0.1:%d/" % servers[-1].server_address[1]

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


def test_no_mirror_is_one_line_for_mnist_and_a_notice_for_auto(monkeypatch, capsys):
    with pytest.raises(mc.InputError, match="could not download.*--mnist-dir.*--digits synthetic") as error:
        mc.load_digits(mc.Config(digits="mnist"), lambda *_, **__: None)
    assert "\n" not in str(error.value)
    images = np.zeros((9, 28, 28), np.uint8)
    monkeypatch.setattr(mc, "N_SYNTHETIC", {"train": 4, "val": 3, "test": 2})
    monkeypatch.setattr(mc, "synthesize_digits", lambda n, seed: (images[:n], np.arange(n, dtype=np.uint8), {}))
    digits = mc.load_digits(mc.Config(digits="auto"), lambda *_, **__: None)                                  # as with --quiet
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


# ---------------------------------------------------------------- synthetic digits

FACTORS = ("slant", "rotation", "aspect", "stroke", "style", "wobble")


@pytest.fixture(scope="module")
def synthetic():
    return mc.synthesize_digits(400, 0)


def test_synthetic_digits_look_like_mnist(synthetic):
    """uint8 28x28, ink in about 20x20 px, centre of mass in the middle, black ground and bright strokes"""
    images, labels, _ = synthetic
    assert images.shape == (400, 28, 28) and images.dtype == np.uint8 and labels.shape == (400,) and labels.dtype.kind in "ui"
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
    assert np.array_equal(images, again[0]) and np.array_equal(labels, again[1]) and not np.array_equal(images, other[0])
    assert len(np.unique(images.reshape(400, -1), axis=0)) == 400
    assert all(np.array_equal(factors[name], again[2][name]) for name in factors)


@pytest.mark.parametrize("name", FACTORS)
def test_each_factor_of_the_synthetic_digits_varies(synthetic, name):
    factor = np.asarray(synthetic[2][name])
    assert len(factor) == 400 and np.std(factor) > 0


def test_factors_of_the_synthetic_digits_mean_what_they_say(synthetic):
    """Within a class: slant leans the ink right, counter-clockwise rotation leans it left, a wide stroke makes more ink."""
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
