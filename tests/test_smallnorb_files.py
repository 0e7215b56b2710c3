"""smallNORB: files read right or refused in one line; standardised; crops and jitter that mean what they say."""
import errno
import gzip
import tracemalloc
import zlib

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from reference_smallnorb import norb_bytes, tiny, write_norb


def refusal(call, *args):
    """The one-line message of the InputError that call(*args) raises"""
    with pytest.raises(sn.InputError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message and "; " in message                      # "; " comes before how to mend it
    return message


# ---------------------------------------------------------------- files

def test_file_names_are_the_official_ones():
    assert sn.NORB_FILES["train", "dat"] == "smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat"
    assert sn.NORB_FILES["train", "info"] == "smallnorb-5x46789x9x18x6x2x96x96-training-info.mat"
    assert sn.NORB_FILES["test", "cat"] == "smallnorb-5x01235x9x18x6x2x96x96-testing-cat.mat"
    assert len(set(sn.NORB_FILES.values())) == len(sn.NORB_FILES) == 6


def test_header_bytes_by_hand():
    """The bytes of a real file's first words, written out: little-endian, three sizes even in one dimension"""
    cat = bytes.fromhex("544c3d1e 01000000 02000000 01000000 01000000 03000000 04000000")
    assert norb_bytes("cat", np.array([3, 4])) == cat
    dat = bytes.fromhex("554c3d1e 04000000 01000000 02000000 60000000 60000000")
    assert norb_bytes("dat", np.zeros((1, 2, 96, 96))) == dat + bytes(2 * 96 * 96)


@pytest.mark.parametrize("n", [1, 37])                                  # 37: one whole chunk of 32 and a rest
def test_round_trip(tmp_path, n):
    files, data = write_norb(tmp_path, n), sn.load_norb(str(tmp_path))
    assert list(data) == ["train", "test"]
    for split, got in data.items():
        raw = files[split, "dat"].astype(int)
        assert got["images"].shape == (n, 48, 48, 2) and got["images"].dtype == np.uint8
        for i in {0, n - 1}:
            for y, x, c in np.ndindex(48, 48, 2):
                four = sum(raw[i, c, 2 * y + dy, 2 * x + dx] for dy in (0, 1) for dx in (0, 1))
                assert got["images"][i, y, x, c] == (four + 2) // 4
        info = files[split, "info"]
        for name, want in (
            ("labels", files[split, "cat"]),
            ("instances", info[:, 0]),
            ("elevations", 30 + 5 * info[:, 1]),
            ("azimuths", 10 * info[:, 2]),
            ("lightings", info[:, 3])):
            assert got[name].shape == (n,) and got[name].dtype == np.int64
            assert np.array_equal(got[name], want), name
        assert set(got) == {"images", "labels", "instances", "elevations", "azimuths", "lightings"}


def test_extremes_do_not_overflow():
    white = np.full((1, 2, 96, 96), 255, np.uint8)
    assert (sn.halve(white) == 255).all() and sn.halve(white).dtype == np.uint8


def test_real_viewpoints_in_degrees(tmp_path):
    """All 9 x 18 viewpoints of the real set: elevations 30 to 70 in fives, azimuths 0 to 340 in twenties"""
    write_norb(tmp_path, 162)
    e, a = (g.ravel() for g in np.meshgrid(np.arange(9), np.arange(0, 36, 2), indexing="ij"))
    info = np.stack([np.zeros(162), e, a, np.zeros(162)], 1)
    (tmp_path / sn.NORB_FILES["train", "info"]).write_bytes(norb_bytes("info", info))
    train = sn.load_norb(str(tmp_path))["train"]
    assert sorted(set(train["elevations"].tolist())) == list(range(30, 71, 5))
    assert sorted(set(train["azimuths"].tolist())) == list(range(0, 341, 20))


def test_gz_equals_raw(tmp_path):
    for gz in (False, True):
        (tmp_path / str(gz)).mkdir()
        write_norb(tmp_path / str(gz), 5, gz)
    raw, packed = (sn.load_norb(str(tmp_path / str(gz))) for gz in (False, True))
    for split in raw:
        for name in raw[split]:
            assert np.array_equal(raw[split][name], packed[split][name])
    for path in (tmp_path / "True").iterdir():                       # gzipped content under the bare name reads as well
        path.rename(path.with_suffix(""))
    assert np.array_equal(sn.load_norb(str(tmp_path / "True"))["test"]["images"], raw["test"]["images"])


IMAGES = np.random.default_rng(1).integers(0, 256, (3, 2, 96, 96), np.uint8)
GOOD = norb_bytes("dat", IMAGES)
CAT = norb_bytes("cat", np.array([0, 1, 2]))
INFO = norb_bytes("info", np.array([[4, 0, 2, 0]] * 3))
PACKED = gzip.compress(GOOD)
FAULTS = {
    "empty": ("dat", b"", "truncated, 0 bytes"),
    "header cut": ("dat", GOOD[:23], "header alone has 24"),
    "one byte short": (
        "dat",
        GOOD[:-1],
        f"truncated, {IMAGES.size - 1} bytes of data where the header says {IMAGES.size}"),
    "no data": ("cat", CAT[:20], "truncated, 0 bytes of data where the header says 12"),
    "info cut": ("info", INFO[:-16], "truncated, 32 bytes"),
    "one byte over": ("dat", GOOD + b"\0", "left over"),
    "label over": ("cat", CAT + b"\0\0\0\0", "left over"),
    "gzipped bytes over": ("dat", gzip.compress(GOOD + b"\0"), "left over"),
    "big-endian": (
        "cat",
        norb_bytes("cat", np.array([0, 1, 2]), order=">"),
        "magic number 0x544C3D1E, should be 0x1E3D4C54"),
    "matlab file": ("dat", b"MATLAB 5.0 MAT-file, Platform: PCWIN", "magic number"),
    "int32 images": ("dat", norb_bytes("dat", IMAGES, magic=0x1E3D4C54), "should be 0x1E3D4C55"),
    "double labels": ("cat", norb_bytes("cat", np.array([0]), magic=0x1E3D4C53), "magic number 0x1E3D4C53"),
    "cat as info": ("info", CAT, "says 1 dimensions, a smallNORB info file has 2"),
    "info as cat": ("cat", INFO, "says 2 dimensions, a smallNORB cat file has 1"),
    "huge ndim": ("dat", norb_bytes("dat", IMAGES, ndim=2**30), "dimensions"),
    "negative ndim": ("dat", norb_bytes("dat", IMAGES, ndim=-1), "dimensions"),
    "108 px": (
        "dat",
        norb_bytes("dat", np.zeros((1, 2, 108, 108))),
        "says shape (1, 2, 108, 108), should be (N, 2, 96, 96)"),
    "one camera": ("dat", norb_bytes("dat", np.zeros((1, 1, 96, 96))), "should be (N, 2, 96, 96)"),
    "five infos": ("info", norb_bytes("info", np.zeros((3, 5))), "says shape (3, 5), should be (N, 4)"),
    "no images": ("dat", norb_bytes("dat", IMAGES, dims=(0, 2, 96, 96)), "N from 1 to 24300"),
    "too many": ("dat", norb_bytes("dat", IMAGES, dims=(2**31 - 1, 2, 96, 96)), "N from 1 to 24300"),
    "negative count": ("cat", norb_bytes("cat", np.array([0]), dims=(-1,)), "says shape (-1,), should be (N)"),
    "gzip cut": ("dat", PACKED[:len(PACKED) // 2], "corrupt or truncated gzip"),
    "gzip tail cut": ("dat", PACKED[:-4], "corrupt or truncated gzip"),
    "gzip header cut": ("dat", PACKED[:5], "corrupt or truncated gzip"),
    "gzip checksum": ("dat", PACKED[:-8] + bytes(4) + PACKED[-4:], "corrupt or truncated gzip"),
    "gzip body": ("dat", PACKED[:20000] + bytes(64) + PACKED[20064:], "corrupt or truncated gzip"),
    "gzip then junk": ("dat", PACKED + b"junk", "corrupt or truncated gzip")}


@pytest.mark.parametrize("kind, raw, words", FAULTS.values(), ids=FAULTS)
def test_faulty_file(tmp_path, kind, raw, words):
    path = tmp_path / f"it's some-{kind}.mat"
    path.write_bytes(raw)
    message = refusal(sn.read_norb_file, path, kind)
    assert message.startswith(f"{path}: ") and words in message


def test_faults_reach_the_loader(tmp_path):
    """Through load_norb the message names the file found there, .gz included"""
    write_norb(tmp_path, 2, gz=True)
    path = tmp_path / (sn.NORB_FILES["test", "dat"] + ".gz")
    path.write_bytes(path.read_bytes()[:-9])
    assert refusal(sn.load_norb, str(tmp_path)).startswith(f"{path}: corrupt or truncated gzip")


def test_zlib_error_is_caught(tmp_path, monkeypatch):
    """A decompressor that gives up in its own way is still one line"""
    path = tmp_path / "a.mat"
    path.write_bytes(PACKED)
    monkeypatch.setattr(gzip.GzipFile, "read", lambda *_: (_ for _ in ()).throw(zlib.error("Error -3")))
    assert "corrupt or truncated gzip (Error -3)" in refusal(sn.read_norb_file, path, "dat")


def test_missing_and_unreadable(tmp_path):
    assert "missing" in refusal(sn.read_norb_file, tmp_path / "none.mat", "dat")
    for folder in ("", str(tmp_path / "none")):
        message = refusal(sn.load_norb, folder)
        assert message.startswith("--norb-dir") and "six .mat or .mat.gz files" in message
    write_norb(tmp_path, 2)
    (tmp_path / "file").write_bytes(b"")
    assert "no such folder" in refusal(sn.load_norb, str(tmp_path / "file"))
    for name in sn.NORB_FILES.values():
        path = tmp_path / name
        path.rename(tmp_path / "aside")
        message = refusal(sn.load_norb, str(tmp_path))
        assert message.startswith(f"{path}[.gz]: missing") and "--norb-dir must hold smallNORB's six files" in message
        (tmp_path / "aside").rename(path)
    path.unlink()
    path.mkdir()                                                        # a folder under a file's name cannot be read
    assert refusal(sn.load_norb, str(tmp_path)).startswith(f"{path}: cannot be read (Is a directory)")


def test_without_permission(tmp_path, monkeypatch):
    """Played, since root may read everything"""
    def denied(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", path)
    monkeypatch.setattr("builtins.open", denied)
    path = tmp_path / "a.mat"
    assert refusal(sn.read_norb_file, path, "cat").startswith(f"{path}: cannot be read (Permission denied)")


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("kind, table", [("cat", np.zeros(4)), ("info", np.zeros((6, 4)))])
def test_counts_that_differ(tmp_path, split, kind, table):
    write_norb(tmp_path, 5)
    path = tmp_path / sn.NORB_FILES[split, kind]
    path.write_bytes(norb_bytes(kind, table))
    message = refusal(sn.load_norb, str(tmp_path))
    assert f"{tmp_path / sn.NORB_FILES[split, 'dat']} has 5 images" in message
    assert f"{path} has {len(table)} rows" in message


@pytest.mark.parametrize(
    "kind, column, code, words",
    [
        ("cat", 0, 5, "label 5 in row 2, must be 0 to 4"),
        ("cat", 0, -1, "label -1"),
        ("info", 0, 10, "instance 10"),
        ("info", 0, -1, "instance -1"),
        ("info", 1, 9, "elevation 9 in row 2, must be 0 to 8"),
        ("info", 1, -3, "elevation -3"),
        ("info", 2, 3, "azimuth 3 in row 2, must be 0 to 34 and even"),
        ("info", 2, 36, "azimuth 36"),
        ("info", 2, -2, "azimuth -2"),
        ("info", 3, 6, "lighting 6 in row 2, must be 0 to 5"),
        ("info", 3, 2**31 - 1, "lighting 2147483647")])
def test_codes_out_of_range(tmp_path, kind, column, code, words):
    table = write_norb(tmp_path, 4)["test", kind]
    table.reshape(4, -1)[2, column] = code
    path = tmp_path / sn.NORB_FILES["test", kind]
    path.write_bytes(norb_bytes(kind, table))
    message = refusal(sn.load_norb, str(tmp_path))
    assert message.startswith(f"{path}: ") and words in message


@pytest.mark.parametrize("gz", [False, True])
def test_the_images_are_never_in_memory_whole(tmp_path, gz):
    """Peak of reading 400 images (7.4 MB at 96x96) below 0.6 of their size; the result itself is 0.25"""
    raw = np.random.default_rng(0).integers(0, 256, (400, 2, 96, 96), np.uint8)
    path, size = tmp_path / "dat.mat", raw.nbytes
    path.write_bytes(gzip.compress(norb_bytes("dat", raw), 1) if gz else norb_bytes("dat", raw))
    del raw
    tracemalloc.start()
    try:
        images = sn.read_norb_file(path, "dat")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert images.nbytes == size / 4 and images.flags.c_contiguous
    assert peak < 0.6 * size


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
    assert (x[2] == 0).all()
    assert np.allclose(x[3], [-1, 1], atol=tolerance)
    one = images[0].astype(float)
    assert np.allclose(x[0], (one - one.mean()) / one.std(), atol=max(tolerance, 1e-12))


def test_standardize_does_not_depend_on_the_company():
    images = some_images(9)
    assert np.array_equal(sn.standardize(images)[4:5], sn.standardize(images[4:5]))


def test_central_crop():
    images, rows = some_images(7), np.array([5, 0, 5])
    got = sn.crop_batch(images, rows)
    assert got.shape == (3, 32, 32, 2) and got.dtype == np.float32 and got.flags.c_contiguous
    assert np.array_equal(got, sn.standardize(images[rows])[:, 8:40, 8:40])
    assert np.array_equal(sn.crop_batch(images, slice(2, 4)), sn.crop_batch(images, np.array([2, 3])))
    assert sn.crop_batch(images, rows, dtype=np.float64).dtype == np.float64
    for rng in (None, np.random.default_rng(0)):
        assert sn.crop_batch(images, rows[:0], rng).shape == (0, 32, 32, 2)


def recover(images, crops):
    """(down, right, contrast, brightness in grey levels) of every crop, by trying all 17 x 17 places and fitting a
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
    """Every crop is a place of its own image, with its own contrast and brightness in their ranges; both cameras
    alike"""
    images = some_images(40)
    rows = np.random.default_rng(2).permutation(40)
    crops = sn.crop_batch(images, rows, np.random.default_rng(3))
    assert crops.shape == (40, 32, 32, 2) and crops.dtype == np.float32 and crops.flags.c_contiguous
    found = recover(images[rows], crops)
    down, right, contrast, brightness = found.T
    assert (0.5 <= contrast).all() and (contrast <= 1.5).all() and np.ptp(contrast) > 0.7
    assert (np.abs(brightness) <= 32.01).all() and brightness.min() < -20 and brightness.max() > 20
    assert len(set(zip(down, right))) > 25 and np.ptp(down) > 12 and np.ptp(right) > 12
    assert np.abs(np.corrcoef(found.T) - np.eye(4)).max() < 0.5
    draws = np.random.default_rng(3).random((4, 40))                  # as documented: down, right, contrast, brightness
    expected = [draws[0] * 17 // 1, draws[1] * 17 // 1, 0.5 + draws[2], 32 * (2 * draws[3] - 1)]
    assert np.allclose(found.T, expected, atol=0.01)


def test_crops_reach_every_place():
    """The corners 0 and 16 included: pixels tell their place, (y, x) = channels"""
    image = np.stack(np.meshgrid(np.arange(48), np.arange(48), indexing="ij"), -1).astype(np.uint8)[None]
    x = sn.crop_batch(image, np.zeros(4000, int), np.random.default_rng(0), np.float64)
    step = x[:, 1, 0, 0] - x[:, 0, 0, 0]                                # one grey level, whatever the contrast
    assert np.allclose(x[:, 0, 1, 1] - x[:, 0, 0, 1], step) and np.allclose(x[:, 31, 0, 0] - x[:, 0, 0, 0], 31 * step)
    assert np.allclose(x[:, 5, 0, 1], x[:, 0, 0, 1])
    for axis in (0, 1):                                               # centre of the crop against brightness: undo both
        draws = np.random.default_rng(0).random((4, 4000))
        brightness = 32 * (2 * draws[3] - 1) / image.std()
        place = np.rint((x[:, 0, 0, axis] - brightness) / step + image.mean()).astype(int)
        assert np.array_equal(np.unique(place), np.arange(17))


def test_same_generator_same_bits():
    images, rows = some_images(12), np.arange(12)
    a, b, c = (sn.crop_batch(images, rows, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


def test_draws_depend_on_the_number_of_rows_only():
    after = []
    black = np.zeros((20, 48, 48, 2), np.uint8)
    for images, rows, dtype in (some_images(9), np.arange(9), np.float32), (black, slice(4, 13), np.float64):
        rng = np.random.default_rng(7)
        sn.crop_batch(images, rows, rng, dtype)
        after.append(rng.random())
    assert after[0] == after[1] == np.random.default_rng(7).random(37)[36]


def test_constant_images_stay_finite():
    images = np.full((3, 48, 48, 2), 200, np.uint8)
    assert (sn.crop_batch(images, np.arange(3)) == 0).all()
    assert (np.abs(sn.crop_batch(images, np.arange(3), np.random.default_rng(0))) <= 32).all()


# ---------------------------------------------------------------- viewpoints and epochs

@pytest.fixture(scope="module")
def norb(tmp_path_factory):
    """Six files of 160 rows -> folder, their arrays"""
    folder = tmp_path_factory.mktemp("norb")
    return folder, write_norb(folder, 160)


@pytest.mark.parametrize("split, angle, train, held_out", [
    ("azimuth", 2, {0, 2, 4, 30, 32, 34}, set(range(6, 30, 2))), ("elevation", 1, {0, 1, 2}, {3, 4, 5, 6, 7, 8})])
def test_smallnorb_is_split_as_in_the_paper(norb, split, angle, train, held_out):
    """Training viewpoints of the training toys; the same and the others of the test toys"""
    folder, files = norb
    data = sn.load_data(sn.Config(data="smallnorb", norb_dir=str(folder), split=split))
    assert data["source"] == "smallnorb"
    for name, file, codes in (("train", "train", train), ("familiar", "test", train), ("held_out", "test", held_out)):
        info = files[file, "info"]
        toys = sn.TOY_SPLITS["train"] if name == "train" else range(10)
        rows = np.flatnonzero(np.isin(info[:, angle], sorted(codes)) & np.isin(info[:, 0], toys))
        assert len(rows) and np.array_equal(data[name]["labels"], files[file, "cat"][rows])
        assert np.array_equal(data[name]["images"], sn.halve(files[file, "dat"][rows]))
        assert np.array_equal(data[name]["azimuths"], 10 * files[file, "info"][rows, 2])
    assert len(data["familiar"]["labels"]) + len(data["held_out"]["labels"]) == 160


def test_smallnorb_is_cropped_at_random_in_training_and_in_the_middle_in_tests(norb):
    config = tiny(data="smallnorb", norb_dir=str(norb[0]))
    data = sn.load_data(config)
    part, = sn.epoch_samples(data, 0, config)
    order = sn.rng_for(config.seed, "batches", 0).permutation(len(data["train"]["labels"]))
    assert part["images"].shape == (len(order), 32, 32, 2) and part["images"].dtype == np.float32
    expected = sn.crop_batch(data["train"]["images"], order, sn.rng_for(config.seed, "batches", 0, 0))
    assert np.array_equal(part["images"], expected) and np.array_equal(part["labels"], data["train"]["labels"][order])
    first, second = (next(sn.epoch_samples(data, number, config))["images"] for number in (0, 1))
    assert len(np.unique(np.concatenate([first, second]).reshape(2 * len(order), -1), axis=0)) == 2 * len(order)
    test = np.concatenate([part["images"] for part in sn.prepared(data["held_out"], "smallnorb")])
    whole = data["held_out"]["images"].astype(float)
    whole = (whole - whole.mean((1, 2, 3), keepdims=True)) / whole.std((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(test, whole[:, 8:40, 8:40], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", ["shapes", "smallnorb", "toys"])
def test_test_images_come_in_chunks_and_in_order(source, monkeypatch, rng):
    monkeypatch.setattr(sn, "CHUNK", 4)
    side, channels = (48, 2) if source != "shapes" else (32, 1)
    samples = {"images": rng.integers(0, 256, (10, side, side, channels), np.uint8), "labels": np.arange(10)}
    parts = list(sn.prepared(samples, source))
    assert [len(part["images"]) for part in parts] == [4, 4, 2]
    assert np.array_equal(np.concatenate([part["labels"] for part in parts]), np.arange(10))
    assert all(part["images"].shape[1:] == (32, 32, channels) for part in parts)


def test_a_range_without_images_is_refused(norb):
    for changes, name in ((dict(train_azimuths="301:310"), "train"), (dict(test_azimuths="61:79"), "held-out")):
        with pytest.raises(sn.InputError, match=f"no {name} images.*widen"):
            sn.load_data(sn.Config(data="smallnorb", norb_dir=str(norb[0]), **changes))


@pytest.mark.parametrize("n_test", [0, 7, 40])
def test_a_subset_of_the_test_views_is_whole_views_and_the_same_for_every_seed(norb, n_test):
    """Of a view, toy, elevation and azimuth, all images or none; none is asked for in training, of which all stay"""
    folder, _ = norb
    names = ("labels", "instances", "elevations", "azimuths")
    config = sn.Config(data="smallnorb", norb_dir=str(folder), n_test=n_test)
    every, some = sn.load_data(sn.changed(config, n_test=0)), sn.load_data(config)
    again = sn.load_data(sn.changed(config, seed=7))
    for name in "familiar", "held_out":
        assert all(np.array_equal(some[name][key], again[name][key]) for key in some[name])
        views = [list(zip(*(part[name][key].tolist() for key in names))) for part in (some, every)]
        assert all(views[0].count(view) == views[1].count(view) for view in views[0])
        n = n_test or len(views[1])
        assert n - 3 <= len(views[0]) <= n + 6 or len(views[0]) == len(views[1]) < n
    assert all(np.array_equal(some["train"][key], every["train"][key]) for key in every["train"])


def test_fewer_toys_to_train_with_are_the_first_ones(norb):
    folder, _ = norb
    config = sn.Config(data="smallnorb", norb_dir=str(folder))
    usual, two = sn.load_data(config), sn.load_data(sn.changed(config, n_train_toys=2))
    assert set(usual["train"]["instances"]) == {4, 6, 7, 8, 9} and set(two["train"]["instances"]) == {4, 6}
    kept = usual["train"]["instances"] <= 6
    assert np.array_equal(two["train"]["images"], usual["train"]["images"][kept])
    assert all(np.array_equal(usual[name]["images"], two[name]["images"]) for name in ("familiar", "held_out"))
