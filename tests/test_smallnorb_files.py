"""smallNORB: files read right or refused in one line; standardized images; crops and jitter that mean what they say."""
import gzip
import tracemalloc

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from reference_smallnorb import norb_bytes, tiny, write_norb

import make_smallnorb_novel_viewpoint_gif as animation


def refusal(call, *args):
    """The one-line message of the InputError that call(*args) raises"""
    with pytest.raises(sn.InputError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message and ". " in message                      # a second sentence says what to do
    return message


def test_names_and_header_bytes_are_the_official_ones():
    """The bytes of a real file's first words, written out: little-endian, three sizes even in one dimension"""
    assert sn.NORB_FILES["train", "dat"] == "smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat"
    assert sn.NORB_FILES["train", "info"] == "smallnorb-5x46789x9x18x6x2x96x96-training-info.mat"
    assert sn.NORB_FILES["test", "cat"] == "smallnorb-5x01235x9x18x6x2x96x96-testing-cat.mat"
    assert len(set(sn.NORB_FILES.values())) == len(sn.NORB_FILES) == 6
    cat = bytes.fromhex("544c3d1e 01000000 02000000 01000000 01000000 03000000 04000000")
    assert norb_bytes("cat", np.array([3, 4])) == cat
    dat = bytes.fromhex("554c3d1e 04000000 01000000 02000000 60000000 60000000")
    assert norb_bytes("dat", np.zeros((1, 2, 96, 96))) == dat + bytes(2 * 96 * 96)


@pytest.mark.parametrize("n, packed", [(1, False), (37, True)])         # 37: one whole chunk of 32 and a rest
def test_round_trip(tmp_path, n, packed):
    files = write_norb(tmp_path, n)
    for path in list(tmp_path.glob("*.mat")) if packed else ():
        path.with_suffix(".mat.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
        path.unlink()
    data = sn.load_norb(str(tmp_path))
    assert list(data) == ["train", "test"]
    for split, got in data.items():
        raw, info = files[split, "dat"].astype(int), files[split, "info"]
        four = raw.reshape(n, 2, 48, 2, 48, 2).sum((3, 5)).transpose(0, 2, 3, 1)
        assert got["images"].dtype == np.uint8 and np.array_equal(got["images"], (four + 2) // 4)
        expected = {"labels": files[split, "cat"], "instances": info[:, 0], "elevations": 30 + 5 * info[:, 1],
                    "azimuths": 10 * info[:, 2], "lightings": info[:, 3]}
        assert set(got) == {"images", *expected}
        for name, want in expected.items():
            assert got[name].dtype == np.int64 and np.array_equal(got[name], want), name


IMAGES = np.random.default_rng(1).integers(0, 256, (3, 2, 96, 96), np.uint8)
GOOD, PACKED = norb_bytes("dat", IMAGES), gzip.compress(norb_bytes("dat", IMAGES))
FAULTS = {
    "empty": ("dat", b""), "header cut": ("dat", GOOD[:20]), "one byte short": ("dat", GOOD[:-1]),
    "one byte over": ("dat", GOOD + b"\0"), "big-endian": ("cat", norb_bytes("cat", np.array([0, 1, 2]), order=">")),
    "matlab file": ("dat", b"MATLAB 5.0 MAT-file, Platform: PCWIN"),
    "cat as info": ("info", norb_bytes("cat", np.array([0, 1, 2]))),
    "too many": ("dat", norb_bytes("dat", IMAGES, dims=(24301, 2, 96, 96))),
    "gzip cut": ("dat.gz", PACKED[:len(PACKED) // 2]), "no gzip": ("dat.gz", GOOD),
    "gzip checksum": ("dat.gz", PACKED[:-8] + bytes(4) + PACKED[-4:]), "gzip then junk": ("dat.gz", PACKED + b"junk")}
CODES = (("cat", 0, 5), ("cat", 0, -1), ("info", 0, 10), ("info", 1, 9), ("info", 3, 6), ("info", 2, 3),
         ("info", 2, 36))          # kind, column, code in row 2: labels, instances, elevations, lightings, azimuths


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_refused_by_name(tmp_path, fault):
    kind, raw = FAULTS[fault]
    kind, packed = kind.partition(".")[::2]
    path = tmp_path / f"it's some-{kind}.mat{'.' * bool(packed)}{packed}"
    path.write_bytes(raw)
    assert refusal(sn.read_norb_file, path, kind).startswith(f"{path}: damaged, or not a smallNORB {kind} file (")
    path.write_bytes(PACKED if packed else {"dat": GOOD, "cat": norb_bytes("cat", np.zeros(3)),
                                            "info": norb_bytes("info", np.zeros((3, 4)))}[kind])
    assert len(sn.read_norb_file(path, kind)) == 3


def test_faulty_folders_are_refused(tmp_path):
    """A file missing, codes out of range, numbers of rows that differ, training and testing files exchanged"""
    for folder in ("", str(tmp_path / "none"), str(tmp_path)):
        assert "training-cat.mat.gz: missing. Give the folder of" in refusal(sn.load_norb, folder)
    files = write_norb(tmp_path, 5)
    changed = []
    for kind, column, code in CODES:
        table = files["test", kind].copy()
        table.reshape(5, -1)[2, column] = code
        changed.append(("test", kind, table))
    for split, kind, table in (*changed, ("train", "cat", np.zeros(4)), ("train", "info", np.zeros((6, 4)))):
        path = tmp_path / sn.NORB_FILES[split, kind]
        path.write_bytes(norb_bytes(kind, table))
        assert refusal(sn.load_norb, str(tmp_path)).startswith(f"{tmp_path / sn.NORB_FILES[split, 'dat']}: ")
        path.write_bytes(norb_bytes(kind, files[split, kind]))
    assert len(sn.load_norb(str(tmp_path))["train"]["labels"]) == 5
    for kind in ("cat", "info", "dat"):
        for split, other in ("train", "test"), ("test", "train"):
            (tmp_path / sn.NORB_FILES[split, kind]).write_bytes(norb_bytes(kind, files[other, kind]))
    assert "no train images" in refusal(sn.load_data, sn.Config(data="smallnorb", norb_dir=str(tmp_path)))


@pytest.mark.parametrize("packed", [False, True])
def test_the_images_are_never_in_memory_whole(tmp_path, packed):
    """Peak of reading 400 images (7.4 MB at 96x96) below 0.6 of their size; the result itself is 0.25"""
    raw = np.random.default_rng(0).integers(0, 256, (400, 2, 96, 96), np.uint8)
    path, size = tmp_path / ("dat.mat" + ".gz" * packed), raw.nbytes
    path.write_bytes(gzip.compress(norb_bytes("dat", raw), 1) if packed else norb_bytes("dat", raw))
    del raw
    tracemalloc.start()
    try:
        images = sn.read_norb_file(path, "dat")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert images.nbytes == size / 4 and images.flags.c_contiguous and peak < 0.6 * size


def some_images(n, seed=0):
    """Random images of different means and contrasts"""
    rng = np.random.default_rng(seed)
    low, width = rng.integers(0, 150, (n, 1, 1, 1)), rng.integers(10, 105, (n, 1, 1, 1))
    return (low + width * rng.random((n, 48, 48, 2))).astype(np.uint8)


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (np.float64, 1e-12)])
def test_standardize(dtype, tolerance):
    images = some_images(6)
    images[2] = 77                                                      # constant
    images[3, ..., 0], images[3, ..., 1] = 50, 90                    # cameras share one mean: this one becomes -1 and 1
    before = images.copy()
    x = sn.standardize(images, dtype=dtype)
    assert x.dtype == dtype and x.shape == images.shape and np.array_equal(images, before)
    assert np.abs(x.mean((1, 2, 3), np.float64)).max() < tolerance
    assert np.abs(np.delete(x.astype(float).var((1, 2, 3)), 2) - 1).max() < tolerance
    assert (x[2] == 0).all() and np.allclose(x[3], [-1, 1], atol=tolerance)
    assert np.array_equal(x[4:5], sn.standardize(images[4:5], dtype=dtype))             # whatever the other images


def test_central_crop():
    images, rows = some_images(7), np.array([5, 0, 5])
    got = sn.crop_batch(images, rows)
    assert got.shape == (3, 32, 32, 2) and got.dtype == np.float32 and got.flags.c_contiguous
    assert np.array_equal(got, sn.standardize(images[rows])[:, 8:40, 8:40])
    assert sn.crop_batch(images, rows[:0]).shape == (0, 32, 32, 2)


def test_images_of_both_sizes_are_prepared_alike():
    """smallNORB's own 96x96 px, here each pixel four times: rows stay rows, and cameras cameras"""
    images, config = some_images(3), sn.Config()
    assert {shape for shape in sn.image_shapes(config)} == {(48, 48, 2), (96, 96, 2)}
    large = images.repeat(2, axis=1).repeat(2, axis=2)
    assert np.array_equal(sn.prepare_images(large, config), sn.prepare_images(images, config))
    assert np.array_equal(sn.prepare_images(images, config), sn.crop_batch(images, slice(None)))


@pytest.mark.parametrize("labels, are_fine", [
    (np.array([0, 4]), True), (np.array([0, 4], np.uint8), True), (np.array([0, 5]), False),
    (np.array([-1, 4]), False), (np.array([0.0, 4.0]), False), (np.array([[0, 4]]), False),
    (np.array([0]), False), (np.array([0, 4], np.uint64), False)], ids=str)
def test_labels_are_whole_numbers_from_0_to_4(labels, are_fine):
    assert sn.are_labels(labels, 2) == are_fine


def test_training_crops():
    """Every crop is a part of its own image, with its own contrast and brightness, both cameras alike: as its random
    numbers say, row, column, contrast, brightness"""
    images = some_images(20)
    rows, jitter = np.random.default_rng(2).permutation(20), np.random.default_rng(3).random((20, 4))
    crops = sn.crop_batch(images, rows, jitter)
    assert crops.shape == (20, 32, 32, 2) and crops.dtype == np.float32 and crops.flags.c_contiguous
    for image, crop, (down, right, contrast, brightness) in zip(images[rows].astype(float), crops, jitter):
        y, x, std = int(17 * down), int(17 * right), image.std()
        standardized = (image[y:y + 32, x:x + 32] - image.mean()) / std
        np.testing.assert_allclose(crop, (0.5 + contrast) * standardized + 32 * (2 * brightness - 1) / std, atol=1e-4)
    gray = sn.crop_batch(np.full((20, 48, 48, 2), 200, np.uint8), rows, jitter, np.float64)
    assert np.allclose(gray, 32 * (2 * jitter[:, 3, None, None, None] - 1))


@pytest.fixture(scope="module")
def norb(tmp_path_factory):
    """Six files of 160 rows -> folder, their arrays"""
    folder = tmp_path_factory.mktemp("norb")
    return str(folder), write_norb(folder, 160)


@pytest.mark.parametrize("split, angle, train, novel", [
    ("azimuth", 2, {0, 2, 4, 30, 32, 34}, set(range(6, 30, 2))), ("elevation", 1, {0, 1, 2}, {3, 4, 5, 6, 7, 8})])
def test_smallnorb_is_split_as_in_the_paper(norb, split, angle, train, novel):
    """Training viewpoints of the training toys; the same and the others of the test toys"""
    folder, files = norb
    data = sn.load_data(sn.Config(data="smallnorb", norb_dir=folder, split=split))
    assert data["source"] == "smallnorb"
    for name, file, codes in (("train", "train", train), ("familiar", "test", train), ("novel", "test", novel)):
        rows = np.flatnonzero(np.isin(files[file, "info"][:, angle], sorted(codes)))
        assert len(rows) and np.array_equal(data[name]["labels"], files[file, "cat"][rows])
        assert np.array_equal(data[name]["images"], sn.downsample(files[file, "dat"][rows]))
        assert np.array_equal(data[name]["azimuths"], 10 * files[file, "info"][rows, 2])
    two = sn.load_data(sn.Config(data="smallnorb", norb_dir=folder, split=split, n_train_toys=2))
    assert set(two["train"]["instances"]) == {4, 6}
    assert np.array_equal(two["novel"]["labels"], data["novel"]["labels"])


def test_views_of_one_toy_of_smallnorb(norb):
    """A view that the test files hold comes back by its angles; the animation says the azimuth of the image it shows"""
    folder, files = norb
    info, labels = files["test", "info"], files["test", "cat"]
    config, row = sn.Config(data="smallnorb", norb_dir=folder), np.flatnonzero((info[:, 0] == 0) & (info[:, 3] == 0))[0]
    views = animation.views_of(config, labels[row], [10 * info[row, 2]], [30 + 5 * info[row, 1]], lighting=0)
    assert np.array_equal(views["images"], sn.downsample(files["test", "dat"][[row]]))
    for azimuth in (13, 155, 349):
        shown = animation.render_view(labels[row], azimuth, 0, config)[2]
        views = animation.views_of(config, labels[row], [azimuth], [animation.ELEVATION], lighting=0)
        assert shown == views["azimuths"] and shown % 20 == 0


def test_smallnorb_is_cropped_at_random_in_training_and_in_the_middle_in_tests(norb):
    config = tiny("cnn-gap", data="smallnorb", norb_dir=norb[0])
    data = sn.load_data(config)
    order = sn.rng_for(config.seed, sn.BATCHES, 0).permutation(len(data["train"]["labels"]))
    jitter = sn.rng_for(config.seed, sn.BATCHES, 0, 0).random((4, len(order))).T
    epochs = [next(sn.epoch_samples(data, epoch, config)) for epoch in (0, 1)]
    batches = [sn.to_batch(samples, np.arange(len(order))) for samples in epochs]
    assert np.array_equal(batches[0]["images"], sn.crop_batch(data["train"]["images"], order, jitter))
    assert np.array_equal(batches[0]["labels"], data["train"]["labels"][order])
    both = np.concatenate([batch["images"] for batch in batches]).reshape(2 * len(order), -1)
    assert len(np.unique(both, axis=0)) == 2 * len(order)
    test, whole = sn.to_batch(data["novel"], slice(None))["images"], data["novel"]["images"].astype(float)
    whole = (whole - whole.mean((1, 2, 3), keepdims=True)) / whole.std((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(test, whole[:, 8:40, 8:40], rtol=1e-4, atol=1e-4)


def test_an_epoch_is_a_permutation_in_chunks_of_whole_batches(monkeypatch):
    """with the spread loss's margin, which rises in a straight line"""
    monkeypatch.setattr(sn, "CHUNK", 64)                                            # two batches of 30, less than three
    images = np.arange(1, 101, dtype=np.float32)[:, None, None, None] * np.ones((1, 32, 32, 1), np.float32)
    data = {"source": "shapes", "train": {"images": images, "labels": np.arange(100) % 5}}
    config = tiny("cnn-gap", batch_size=30, n_epochs=8)
    parts = list(sn.epoch_samples(data, 3, config))
    order = np.concatenate([part["images"][:, 0, 0, 0] for part in parts]).astype(int) - 1
    assert [len(part["labels"]) for part in parts] == [60, 40] and sorted(order) == list(range(100))
    assert np.array_equal(np.concatenate([part["labels"] for part in parts]), order % 5)
    np.testing.assert_allclose(parts[1]["margin"], 0.2 + 0.7 * 3 / 7, rtol=1e-6)
    again, other = (next(sn.epoch_samples(data, epoch, config))["labels"] for epoch in (3, 4))
    assert np.array_equal(again, parts[0]["labels"]) and not np.array_equal(other, again)
