"""smallNORB: files read right or refused in one line; standardized; crops and jitter that mean what they say."""
import gzip
import tracemalloc

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from reference_smallnorb import norb_bytes, tiny, write_norb

import make_smallnorb_novel_viewpoint_gif as film


def refusal(call, *args):
    """The one-line message of the InputError that call(*args) raises"""
    with pytest.raises(sn.InputError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message and "; " in message                      # "; " comes before how to mend it
    return message


# ---------------------------------------------------------------- files

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
GOOD = norb_bytes("dat", IMAGES)
CAT = norb_bytes("cat", np.array([0, 1, 2]))
INFO = norb_bytes("info", np.array([[4, 0, 2, 0]] * 3))
PACKED = gzip.compress(GOOD)
FAULTS = {
    "empty": ("dat", b"", "its header says"),
    "header cut": ("dat", GOOD[:20], "magic number 0x1E3D4C55, 4 sizes, [3, 2, 96, 0], a smallNORB"),
    "one byte short": ("dat", GOOD[:-1], f"truncated, {IMAGES.size - 1} bytes of {IMAGES.size} that the header says"),
    "one byte over": ("dat", GOOD + b"\0", "left over"),
    "big-endian": ("cat", norb_bytes("cat", np.array([0, 1, 2]), order=">"), "says magic number 0x544C3D1E"),
    "matlab file": ("dat", b"MATLAB 5.0 MAT-file, Platform: PCWIN", "a smallNORB dat file's 0x1E3D4C55, 4, [24300, 2,"),
    "cat as info": ("info", CAT, "a smallNORB info file's 0x1E3D4C54, 2, [24300, 4] or less"),
    "too many": ("dat", norb_bytes("dat", IMAGES, dims=(24301, 2, 96, 96)), "[24301, 2, 96, 96]"),
    "gzip cut": ("dat", PACKED[:len(PACKED) // 2], "corrupt or truncated gzip"),
    "gzip checksum": ("dat", PACKED[:-8] + bytes(4) + PACKED[-4:], "corrupt or truncated gzip"),
    "gzip then junk": ("dat", PACKED + b"junk", "corrupt or truncated gzip")}
CODES = {                          # kind, column, code in row 2
    "label 5 in row 2, must be 0 to 4": ("cat", 0, 5), "label -1": ("cat", 0, -1), "instance 10": ("info", 0, 10),
    "elevation 9 in row 2, must be 0 to 8": ("info", 1, 9), "lighting 6 in row 2": ("info", 3, 6),
    "azimuth 3 in row 2, must be 0 to 34 and even": ("info", 2, 3), "azimuth 36": ("info", 2, 36)}


def test_faulty_files_are_refused_by_name(tmp_path):
    for kind, raw, words in FAULTS.values():
        path = tmp_path / f"it's some-{kind}.mat"
        path.write_bytes(raw)
        message = refusal(sn.read_norb_file, path, kind)
        assert message.startswith(f"{path}: ") and words in message, message
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(OSError) as caught:                          # which run_cli turns into a line
        sn.read_norb_file(path, "dat")
    assert caught.value.filename == str(path)


def test_faulty_folders_are_refused(tmp_path):
    """A file missing, codes out of range, row counts that differ"""
    for folder in ("", str(tmp_path / "none"), str(tmp_path)):
        assert "training-cat.mat: missing; --norb-dir must be the folder of" in refusal(sn.load_norb, folder)
    files = write_norb(tmp_path, 5)
    for words, (kind, column, code) in CODES.items():
        table, path = files["test", kind].copy(), tmp_path / sn.NORB_FILES["test", kind]
        table.reshape(5, -1)[2, column] = code
        path.write_bytes(norb_bytes(kind, table))
        message = refusal(sn.load_norb, str(tmp_path))
        assert message.startswith(f"{path}: ") and words in message
        path.write_bytes(norb_bytes(kind, files["test", kind]))
    for kind, table in (("cat", np.zeros(4)), ("info", np.zeros((6, 4)))):
        path = tmp_path / sn.NORB_FILES["train", kind]
        path.write_bytes(norb_bytes(kind, table))
        message = refusal(sn.load_norb, str(tmp_path))
        assert "training-dat.mat: has 5 images, its cat and info files " in message and str(len(table)) in message
        path.write_bytes(norb_bytes(kind, files["train", kind]))
    assert len(sn.load_norb(str(tmp_path))["train"]["labels"]) == 5


@pytest.mark.parametrize("packed", [False, True])
def test_the_images_are_never_in_memory_whole(tmp_path, packed):
    """Peak of reading 400 images (7.4 MB at 96x96) below 0.6 of their size; the result itself is 0.25"""
    raw = np.random.default_rng(0).integers(0, 256, (400, 2, 96, 96), np.uint8)
    path, size = tmp_path / "dat.mat", raw.nbytes
    path.write_bytes(gzip.compress(norb_bytes("dat", raw), 1) if packed else norb_bytes("dat", raw))
    del raw
    tracemalloc.start()
    try:
        images = sn.read_norb_file(path, "dat")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert images.nbytes == size / 4 and images.flags.c_contiguous and peak < 0.6 * size


# ---------------------------------------------------------------- batches

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
    assert np.array_equal(x[4:5], sn.standardize(images[4:5], dtype=dtype))             # whatever the company


def test_central_crop():
    images, rows = some_images(7), np.array([5, 0, 5])
    got = sn.crop_batch(images, rows)
    assert got.shape == (3, 32, 32, 2) and got.dtype == np.float32 and got.flags.c_contiguous
    assert np.array_equal(got, sn.standardize(images[rows])[:, 8:40, 8:40])
    assert sn.crop_batch(images, rows[:0]).shape == (0, 32, 32, 2)


def recover(images, crops):
    """(down, right, contrast, brightness in gray levels) of every crop, by trying all 17 x 17 places and fitting a
    line"""
    found = []
    for image, crop in zip(images.astype(float), crops.astype(float)):
        mean, std = image.mean(), max(image.std(), 1)
        best = None
        for down, right in np.ndindex(17, 17):
            z = (image[down:down + 32, right:right + 32] - mean) / std
            slope = ((z - z.mean()) * crop).sum() / ((z - z.mean()) ** 2).sum()
            shift = crop.mean() - slope * z.mean()
            error = np.abs(slope * z + shift - crop).max()
            if best is None or error < best[0]:
                best = error, (down, right, slope, shift * std)
        assert best[0] < 1e-4
        found.append(best[1])
    return np.array(found)


def test_training_crops():
    """Every crop is a place of its own image, with its own contrast and brightness; both cameras alike; drawn as
    documented: down, right, contrast, brightness, for every row whatever the images hold"""
    images = some_images(20)
    rows = np.random.default_rng(2).permutation(20)
    crops = sn.crop_batch(images, rows, np.random.default_rng(3))
    assert crops.shape == (20, 32, 32, 2) and crops.dtype == np.float32 and crops.flags.c_contiguous
    draws = np.random.default_rng(3).random((4, 20))
    expected = [draws[0] * 17 // 1, draws[1] * 17 // 1, 0.5 + draws[2], 32 * (2 * draws[3] - 1)]
    assert np.allclose(recover(images[rows], crops).T, expected, atol=0.01)
    rng = np.random.default_rng(3)
    gray = sn.crop_batch(np.full((20, 48, 48, 2), 200, np.uint8), rows, rng, np.float64)
    assert np.allclose(gray, expected[3][:, None, None, None])
    assert rng.random() == np.random.default_rng(3).random(81)[80]


# ---------------------------------------------------------------- viewpoints and epochs

@pytest.fixture(scope="module")
def norb(tmp_path_factory):
    """Six files of 160 rows -> folder, their arrays"""
    folder = tmp_path_factory.mktemp("norb")
    return folder, write_norb(folder, 160)


@pytest.mark.parametrize("split, angle, train, novel", [
    ("azimuth", 2, {0, 2, 4, 30, 32, 34}, set(range(6, 30, 2))), ("elevation", 1, {0, 1, 2}, {3, 4, 5, 6, 7, 8})])
def test_smallnorb_is_split_as_in_the_paper(norb, split, angle, train, novel):
    """Training viewpoints of the training toys; the same and the others of the test toys"""
    folder, files = norb
    data = sn.load_data(sn.Config(data="smallnorb", norb_dir=str(folder), split=split))
    assert data["source"] == "smallnorb"
    for name, file, codes in (("train", "train", train), ("familiar", "test", train), ("novel", "test", novel)):
        info = files[file, "info"]
        toys = sn.TOY_SPLITS["train"] if name == "train" else range(10)
        rows = np.flatnonzero(np.isin(info[:, angle], sorted(codes)) & np.isin(info[:, 0], toys))
        assert len(rows) and np.array_equal(data[name]["labels"], files[file, "cat"][rows])
        assert np.array_equal(data[name]["images"], sn.downsample(files[file, "dat"][rows]))
        assert np.array_equal(data[name]["azimuths"], 10 * files[file, "info"][rows, 2])
    two = sn.load_data(sn.Config(data="smallnorb", norb_dir=str(folder), split=split, n_train_toys=2))
    assert set(two["train"]["instances"]) == {4, 6}
    assert np.array_equal(two["novel"]["labels"], data["novel"]["labels"])


def test_toys_that_do_not_test_generalization_are_refused(tmp_path):
    """By what the files hold: exchanged; the same toy in both; instances of no split; a category that is missing"""
    def tables(train, test, labels=range(5)):
        return {split: {"labels": np.repeat(labels, len(toys)), "instances": np.tile(toys, len(labels))}
                for split, toys in (("train", train), ("test", test))}
    sn.check_toys(tables((4, 6, 7, 8, 9), (0, 1, 2, 3, 5)), "here")
    sn.check_toys(tables((4,), (0, 7)), "here")                                         # files of one's own
    for found, words in ((tables((0, 1, 2, 3, 5), (4, 6)), "hold the toys for testing, and the other way round"),
                         (tables((4, 6), (0, 6)), "animal 6 is in both the training and the testing files"),
                         (tables((0, 1), (2, 3)), "instance 0; instances for training are (4, 6, 7, 8, 9)"),
                         (tables((4,), (0,), (0, 1, 2, 4)), "training files hold no truck")):
        with pytest.raises(sn.InputError) as error:
            sn.check_toys(found, "here")
        assert words in str(error.value) and str(error.value).startswith("--norb-dir here: its " * ("its" in words))
    write_norb(tmp_path, 160)
    for end in ("cat", "info", "dat"):
        one, other = (tmp_path / sn.NORB_FILES[split, end] for split in ("train", "test"))
        other.rename(tmp_path / "x"), one.rename(other), (tmp_path / "x").rename(one)
    with pytest.raises(sn.InputError, match="exchange their names"):
        sn.load_data(sn.Config(data="smallnorb", norb_dir=str(tmp_path)))


WRONG = {                          # what is done to the training part -> the conversion that is named
    "floats": (lambda part: {"images": part["images"] / 255}, "(255 * images).round().astype(np.uint8)"),
    "standardized": (lambda part: {"images": part["images"] - 128.0}, "images.astype(np.uint8), of gray levels"),
    "wide integers": (lambda part: {"images": part["images"].astype(int)}, "images.astype(np.uint8), of gray levels"),
    "one camera": (lambda part: {"images": part["images"][..., :1]}, "images of shape (n, 48, 48, 2), at least one"),
    "empty": (lambda part: {name: a[:0] for name, a in part.items()}, "at least one"),
    "one-hot": (lambda part: {"labels": np.eye(5)[part["labels"]]}, "labels.argmax(1)"),
    "fewer": (lambda part: {"labels": part["labels"][:-1]}, "a label for each image"),
    "fewer angles": (lambda part: {"azimuths": part["azimuths"][:-1]}, "a row for each image"),
    "float labels": (lambda part: {"labels": part["labels"] / 1.0}, "labels.astype(int)"),
    "from 1": (lambda part: {"labels": part["labels"] + 1}, "labels - labels.min()"),
    "ten classes": (lambda part: {"labels": np.arange(len(part["labels"]))}, "labels of 5 classes or fewer")}


def own(norb):
    return sn.Config(model="cnn-gap", preset="small", data="smallnorb", norb_dir=str(norb[0]), n_epochs=1, quiet=True)


@pytest.mark.parametrize("name", WRONG)
def test_arrays_that_train_cannot_take_are_refused_with_the_conversion(norb, name):
    config = own(norb)
    data, (change, remedy) = sn.load_data(config), WRONG[name]
    sn.check_views(data | {"source": "mine"}, config)
    with pytest.raises(sn.InputError) as error:
        sn.train(config, data=data | {"train": data["train"] | change(data["train"])})
    assert remedy in str(error.value) and "data['train']" in str(error.value)
    for missing, words in ((data | {"train": {"images": data["train"]["images"]}}, "has no 'azimuths'"),
                           ({"source": "mine"}, "data has no 'train'"), ({}, "data has no 'source'")):
        with pytest.raises(sn.InputError, match=words):
            sn.train(config, data=missing)


def test_a_source_of_ones_own_is_trained_reported_saved_and_loaded(norb, tmp_path, call):
    config = own(norb)
    data, said = sn.load_data(config) | {"source": "my photographs"}, []
    params, history = sn.train(config, data=data)
    with sn.Runner(1) as runner:
        tests = sn.evaluate_test_sets(params, data, config, runner)
    sn.report(config, sn.test_result(config, params, history, tests), tests, said.append)
    assert said
    sn.save_weights(tmp_path / "w.npz", config, params, history)
    assert sn.load_network(tmp_path / "w.npz").source == "my photographs"
    code, _, err = call(sn, sn.main, "--load", "w.npz")
    assert code == 2 and "was trained on my photographs. Evaluate it in a script" in err


def test_views_of_one_toy_of_smallnorb(norb):
    """A view that the test files hold comes back by its angles"""
    folder, files = norb
    info, labels = files["test", "info"], files["test", "cat"]
    row = np.flatnonzero((info[:, 0] == 0) & (info[:, 3] == 0))[0]
    views = sn.views_of(sn.Config(data="smallnorb", norb_dir=str(folder)), labels[row], [10 * info[row, 2]],
                            [30 + 5 * info[row, 1]], lighting=0)
    assert np.array_equal(views["images"], sn.downsample(files["test", "dat"][[row]]))
    config = sn.Config(data="smallnorb", norb_dir=str(folder))
    for azimuth in (13, 155, 349):                     # the animation says the azimuth of the image that it shows
        shown = film.render_view(labels[row], azimuth, 0, config)[2]
        assert shown == sn.views_of(config, labels[row], [azimuth], [film.ELEVATION], lighting=0)["azimuths"]
        assert shown % 20 == 0


def test_smallnorb_is_cropped_at_random_in_training_and_in_the_middle_in_tests(norb):
    config = tiny("cnn-gap", data="smallnorb", norb_dir=str(norb[0]))
    data = sn.load_data(config)
    part, = sn.epoch_samples(data, 0, config)
    order = sn.rng_for(config.seed, "batches", 0).permutation(len(data["train"]["labels"]))
    expected = sn.crop_batch(data["train"]["images"], order, sn.rng_for(config.seed, "batches", 0, 0))
    assert np.array_equal(part["images"], expected) and np.array_equal(part["labels"], data["train"]["labels"][order])
    other = next(sn.epoch_samples(data, 1, config))["images"]
    both = np.concatenate([part["images"], other]).reshape(2 * len(order), -1)
    assert len(np.unique(both, axis=0)) == 2 * len(order)
    test = np.concatenate([part["images"] for part in sn.preprocess(data["novel"], "smallnorb")])
    whole = data["novel"]["images"].astype(float)
    whole = (whole - whole.mean((1, 2, 3), keepdims=True)) / whole.std((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(test, whole[:, 8:40, 8:40], rtol=1e-4, atol=1e-4)


def test_an_epoch_is_a_permutation_in_chunks_of_whole_batches(monkeypatch):
    """with the spread loss's margin, which rises in a straight line; tests come in their order"""
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
    tests = list(sn.preprocess(data["train"], "shapes"))
    assert [len(part["images"]) for part in tests] == [64, 36]
    assert np.array_equal(np.concatenate([part["images"] for part in tests]), images)
