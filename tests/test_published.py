"""Published data sets of color images, each read from a small file written here in exactly its format: CIFAR-10 for
Python and binary, SVHN's cropped digits, MedMNIST."""
import os
import pickle
import struct
import sys

import affnist_capsnet as ac
from lab import datasets
from lab.messages import InputError

import numpy as np
import pytest
from conftest import assert_refused

import make_idx

NAMES = ["airplane", "automobile", "bird"]
N_TRAIN, N_TEST = 15, 6            # images of a batch, and of the test
IMAGES = np.random.default_rng(0).integers(0, 256, (5 * N_TRAIN + N_TEST, 32, 32, 3), dtype=np.uint8)
IMAGES[:, 3, 5] = 10, 20, 30       # red, green and blue of the pixel in row 3, column 5
LABELS = np.arange(len(IMAGES)) % 3


def rows_of(images):
    """Images as CIFAR-10 stores them, (n, 3072): 1,024 red bytes in row-major order, then the green ones, the blue"""
    rows = np.zeros((len(images), 3072), np.uint8)
    for channel in range(3):
        rows[:, 1024 * channel:1024 * (channel + 1)] = images[..., channel].reshape(-1, 1024)
    assert (rows[0, [3 * 32 + 5, 1024 + 3 * 32 + 5, 2048 + 3 * 32 + 5]] == [10, 20, 30]).all()
    return rows


def batches():
    """The files of CIFAR-10: name -> images, labels"""
    found = {f"data_batch_{k + 1}": slice(N_TRAIN * k, N_TRAIN * (k + 1)) for k in range(5)}
    found["test_batch"] = slice(5 * N_TRAIN, None)
    return {name: (IMAGES[part], LABELS[part]) for name, part in found.items()}


# -------------------------------------------------------------- as Python 2 pickled it

def text(word):
    """A str of Python 2: opcode U, its length, its bytes"""
    return b"U" + bytes([len(word)]) + word


def number(n):
    return b"J" + struct.pack("<i", n)


def pickled_by_python_2(rows, labels, name):
    """A batch as the authors' file has it, opcode by opcode: protocol 2, texts without a type, an array by its bytes"""
    kind = (b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN" + number(-1)
            + number(-1) + b"K\x00tb")
    array = (b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R(K\x01"
             + number(len(rows)) + number(3072) + b"\x86" + kind + b"\x89T" + struct.pack("<i", rows.size)
             + rows.tobytes() + b"tb")
    files = b"](" + b"".join(text(b"%d.png" % k) for k in range(len(rows))) + b"e"
    return (b"\x80\x02}(" + text(b"batch_label") + text(name.encode()) + text(b"labels")
            + b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e" + text(b"data") + array
            + text(b"filenames") + files + b"u.")


def write_python(folder, write=pickled_by_python_2):
    folder.mkdir(parents=True)
    for name, (images, labels) in batches().items():
        (folder / name).write_bytes(write(rows_of(images), labels, name))
    meta = b"".join(map(text, [name.encode() for name in NAMES]))
    (folder / "batches.meta").write_bytes(b"\x80\x02}(" + text(b"num_cases_per_batch") + b"K\x0f" + text(b"label_names")
                                          + b"](" + meta + b"e" + text(b"num_vis") + b"M\x00\x0cu.")
    (folder / "readme.html").write_text("<html>", "utf-8")


def pickled_by_python_3(rows, labels, name):
    """As people write it again"""
    return pickle.dumps({b"data": rows, b"labels": labels.tolist(), "batch_label": name}, protocol=2)


def write_binary(folder):
    folder.mkdir(parents=True)
    for name, (images, labels) in batches().items():
        records = np.concatenate([labels[:, None].astype(np.uint8), rows_of(images)], 1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n", "utf-8")


def in_torchvisions_root(folder):
    """Its folder among other files: the archive, MNIST's folder without files"""
    write_python(folder / "cifar-10-batches-py")
    (folder / "cifar-10-python.tar.gz").write_bytes(b"x")
    (folder / "empty").mkdir()


def as_set(images, labels):
    return sorted(zip([image.tobytes() for image in images], map(int, labels)))


CIFAR = {"Python": (write_python, "x"), "Python 3": (lambda path: write_python(path, pickled_by_python_3), "x"),
         "binary": (write_binary, "x"), "torchvision": (in_torchvisions_root, "x"),
         "alone in a folder": (lambda path: write_python(path / "cifar-10-batches-py"), "x"),
         "its files": (write_binary, "x/test_batch.bin x/data_batch_1.bin x/data_batch_2.bin x/data_batch_3.bin "
                                     "x/data_batch_4.bin x/data_batch_5.bin")}


@pytest.mark.parametrize("form", CIFAR)
def test_cifar_10_in_all_its_forms_becomes_the_same_data(call, tmp_path, form):
    write, sources = CIFAR[form]
    write(tmp_path / "x")
    code, out, err = call(ac, make_idx.main, *sources.split(), "data")
    assert (code, err) == (0, "") and "3 classes, 75 training and 6 test images" in out, err
    assert "as images of 32x32 px" in out and "(otherwise: --as digits)" in out and "note" not in out
    data = ac.read_idx_folder("data")
    assert data["names"] == NAMES
    train = [np.concatenate(pair) for pair in zip(data["train"], data["val"])]
    assert as_set(*train) == as_set(IMAGES[:75], LABELS[:75])
    assert as_set(*data["test"]) == as_set(IMAGES[75:], LABELS[75:])
    np.testing.assert_array_equal(data["test"][0][:, 3, 5], [[10, 20, 30]] * 6)


def test_what_is_printed_trains_on_cifar_10(call, tmp_path):
    write_python(tmp_path / "cifar-10-batches-py")
    out = call(ac, make_idx.main, "cifar-10-batches-py", "data")[1]
    words = out.splitlines()[-1].partition(".py ")[2].split()
    assert words[:2] == ["--task", "images"]
    code, out, err = call(ac, ac.main, *words, "--n-epochs", 1, "--n-train", 20, "--n-val", 2, "--batch-size", 10,
                          "--conv1-channels", 2, "--threads", 1)
    assert (code, err) == (0, "") and "correct test images" in out


def test_some_of_cifar_10s_files_are_said_to_be_some(call, tmp_path):
    write_python(tmp_path / "x")
    (tmp_path / "x/data_batch_2").unlink()
    (tmp_path / "x/batches.meta").unlink()
    code, out, err = call(ac, make_idx.main, "x", "data", "--as", "images", "--gray")
    assert code == 0 and "note: x: 4 of the 5 files of CIFAR-10's training images" in out
    data = ac.read_idx_folder("data")
    assert data["test"][0].shape == (6, 32, 32) and data["names"] == ["0", "1", "2"]


class Harm:
    """Runs code when it is unpickled"""

    def __init__(self, call, *given):
        self.call, self.given = call, given

    def __reduce__(self):
        return self.call, self.given


HARMFUL = {"a shell": Harm(os.system, "touch harmed"), "eval": Harm(eval, "open('harmed', 'w')"),
           "an array of objects": {"data": np.array([Harm(os.mkdir, "harmed")], object), "labels": [0]},
           "a constructor of NumPy": {"data": Harm(np.load, "harmed"), "labels": [0]},
           "a function of NumPy": {"data": Harm(np.save, "harmed", 1), "labels": [0]},
           "an attribute": {"data": Harm(getattr, "harmed", "upper"), "labels": [0]}}


@pytest.mark.parametrize("form", HARMFUL)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_runs_no_code(call, tmp_path, form, protocol):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/test_batch").write_bytes(pickle.dumps(HARMFUL[form], protocol))
    assert_refused(call(ac, make_idx.main, "x", "data"), "which may run code, and is not read")
    assert not (tmp_path / "harmed").exists() and not (tmp_path / "harmed.npy").exists()
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("array", [
    np.array([None, {}], object), np.zeros(3, [("a", "u1")]), np.zeros(3, complex), np.array(["a"])])
def test_an_array_of_no_numbers_is_refused(tmp_path, array):
    (tmp_path / "x").write_bytes(pickle.dumps({"data": array}, 2))
    with pytest.raises(InputError, match="damaged, or not a pickled dict of arrays"):
        datasets.read_pickle(tmp_path / "x")


def test_arrays_of_numbers_are_read_as_they_are(tmp_path):
    """Of either byte order and order of axes"""
    arrays = {"a": np.arange(6, dtype=">i4").reshape(2, 3), "b": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    (tmp_path / "x").write_bytes(pickle.dumps(arrays, 2))
    found = datasets.read_pickle(tmp_path / "x")
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def damaged_batch(change):
    """A batch of CIFAR-10 whose dict is changed"""
    batch = {"data": rows_of(IMAGES[:6]), "labels": LABELS[:6].tolist()}
    change(batch)
    return pickle.dumps(batch, 2)


@pytest.mark.parametrize("name, content, words", [
    ("data_batch_1", lambda: pickled_by_python_2(rows_of(IMAGES[:6]), LABELS[:6], "x")[:-3000], "batch_1: damaged"),
    ("data_batch_1", lambda: b"", "damaged, or not a pickled dict"),
    ("data_batch_1", lambda: b"<html>not found</html>", "damaged, or not a pickled dict"),
    ("data_batch_1", lambda: pickle.dumps([1], 2), "damaged, or not a pickled dict"),
    ("data_batch_1", lambda: damaged_batch(lambda batch: batch.pop("labels")), "lacks the images or the labels"),
    ("data_batch_1", lambda: damaged_batch(lambda batch: batch["labels"].pop()), "holds no images of 32x32 px"),
    ("data_batch_1", lambda: damaged_batch(lambda batch: batch.update(data=np.zeros((6, 9), np.uint8))), "no images"),
    ("data_batch_1", lambda: damaged_batch(lambda batch: batch.update(labels=["a"] * 6)), "no images of 32x32 px with"),
    ("data_batch_1.bin", lambda: bytes(3073 * 2 - 1), "has 6,145 bytes, and each image of CIFAR-10 3,073"),
    ("data_batch_1.bin", lambda: b"", "has 0 bytes")])
def test_damaged_files_of_cifar_10_are_refused(call, tmp_path, name, content, words):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / name).write_bytes(content())
    for source in "x", f"x/{name}":
        assert_refused(call(ac, make_idx.main, source, "data"), words)
        assert not (tmp_path / "data").exists()


def test_labels_without_a_name_and_two_sets_in_one_folder_are_refused(call, tmp_path):
    write_binary(tmp_path / "x/binary")
    (tmp_path / "x/binary/batches.meta.txt").write_text("airplane\n", "utf-8")
    assert_refused(call(ac, make_idx.main, "x/binary", "data"), "labels from 0 to 2, and the folder names of 1 class")
    write_python(tmp_path / "x/python")
    assert_refused(call(ac, make_idx.main, "x", "data"), "holds several data sets. Give one of them, such as")


# -------------------------------------------------------------- SVHN

def write_svhn(folder, **changes):
    """Its cropped digits, as MATLAB version 5: X (32, 32, 3, n), y (n, 1) of doubles, 10 for the digit 0"""
    scipy_io = pytest.importorskip("scipy.io")
    folder.mkdir()
    for name, part in ("train", slice(0, 60)), ("test", slice(60, 80)):
        images = IMAGES[part]
        X = np.zeros((32, 32, 3, len(images)), np.uint8)
        for k, image in enumerate(images):
            X[:, :, :, k] = image
        assert X[3, 5, 0, 0] == 10 and X[3, 5, 2, 0] == 30
        labels = np.arange(len(images)) % 10 + 1                                        # 1, 2, ... 9, 10
        content = {"X": X, "y": labels[:, None].astype(np.uint8)} | changes
        scipy_io.savemat(folder / f"{name}_32x32.mat", {key: a for key, a in content.items() if a is not None})


@pytest.mark.parametrize("sources", ["x", "x/test_32x32.mat x/train_32x32.mat"])
def test_svhns_cropped_digits(call, tmp_path, sources):
    write_svhn(tmp_path / "x")
    code, out, err = call(ac, make_idx.main, *sources.split(), "data")
    assert (code, err) == (0, "") and "10 classes, 60 training and 20 test images" in out, err
    data = ac.read_idx_folder("data")
    assert data["names"] == list("0123456789") and data["source"] == "data"
    digits = (np.arange(20) % 10 + 1) % 10                                              # 10 is the digit 0
    assert as_set(*data["test"]) == as_set(IMAGES[60:80], digits)
    np.testing.assert_array_equal(data["test"][0][:, 3, 5], [[10, 20, 30]] * 20)


def test_svhns_extra_images_are_added_if_they_are_named(call, tmp_path):
    write_svhn(tmp_path / "x")
    (tmp_path / "x/extra_32x32.mat").write_bytes((tmp_path / "x/train_32x32.mat").read_bytes())
    out = call(ac, make_idx.main, "x", "data")[1]
    assert "60 training and 20" in out and "extra_32x32.mat is left out. To add it, name all three files" in out
    names = [f"x/{name}_32x32.mat" for name in ("train", "test", "extra")]
    assert "120 training and 20" in call(ac, make_idx.main, *names, "more")[1]


@pytest.mark.parametrize("changes, words", [
    ({"y": None}, "lacks X, images (32, 32, 3, n), or y"), ({"X": np.zeros((5, 5))}, "lacks X"),
    ({"y": np.ones((3, 1))}, "lacks X"), ({"y": np.arange(60)[:, None]}, "labels from 0 to 59, and SVHN's are from 1"),
    ({"affNISTdata": 1}, "is affNIST's. affnist_capsnet.py tests on it: --affnist-dir")])
def test_other_mat_files_are_refused(call, tmp_path, changes, words):
    write_svhn(tmp_path / "x", **changes)
    assert_refused(call(ac, make_idx.main, "x/train_32x32.mat", "data"), words)


def test_damaged_mat_files_are_refused(call, tmp_path, monkeypatch):
    write_svhn(tmp_path / "x")
    path = tmp_path / "x/train_32x32.mat"
    for content in path.read_bytes()[:5000], b"no such page", b"":
        path.write_bytes(content)
        assert_refused(call(ac, make_idx.main, "x", "data"), "train_32x32.mat: damaged, or not a file of MATLAB")
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert_refused(call(ac, make_idx.main, "x", "data"), "needs SciPy: python3 -m pip install scipy")


# -------------------------------------------------------------- MedMNIST

def medmnist(channels):
    """A file's arrays: images (n, 28, 28, 3) or (n, 28, 28), labels (n, 1), of train, val and test"""
    images = IMAGES[:, :28, :28] if channels == 3 else IMAGES[:, :28, :28, 0]
    parts = {"train": slice(0, 40), "val": slice(40, 60), "test": slice(60, 80)}
    return {f"{part}_{name}": array[rows] for part, rows in parts.items()
            for name, array in (("images", images), ("labels", LABELS[:, None].astype(np.uint8)))}


@pytest.mark.parametrize("channels", [1, 3])
def test_medmnist(call, tmp_path, channels):
    """Validation images are for training, since there are test images"""
    arrays = medmnist(channels)
    np.savez_compressed(tmp_path / "pathmnist.npz", **arrays)
    code, out, err = call(ac, make_idx.main, "pathmnist.npz", "data")
    assert (code, err) == (0, "") and "3 classes, 60 training and 20 test images" in out, err
    assert "as images of 28x28 px" in out and "0 of 80 images looked at are drawings" in out
    data = ac.read_idx_folder("data")
    assert as_set(*data["test"]) == as_set(arrays["test_images"], LABELS[60:80])
    if channels == 3:
        np.testing.assert_array_equal(data["test"][0][:, 3, 5], [[10, 20, 30]] * 20)


@pytest.mark.parametrize("changes, words", [
    ({"train_images": np.zeros((40, 28, 28, 28), np.uint8)}, "images are uint8 (40, 28, 28, 28). Give (n, H, W)"),
    ({"train_labels": np.ones((40, 14), np.uint8)}, "labels are uint8 (40, 14). Give one for each image"),
    ({"test_labels": LABELS[:3, None]}, "has 20 images and 3 labels")])
def test_sets_of_medmnist_that_are_no_images_with_a_class_are_refused(call, tmp_path, changes, words):
    """Volumes, and several labels for an image"""
    np.savez(tmp_path / "x.npz", **medmnist(3) | changes)
    assert_refused(call(ac, make_idx.main, "x.npz", "data", "--as", "images"), words)


def test_a_damaged_npz_is_refused(call, tmp_path):
    np.savez(tmp_path / "x.npz", **medmnist(3))
    (tmp_path / "x.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:90_000])
    assert_refused(call(ac, make_idx.main, "x.npz", "data"), "not a file of arrays of numbers")
