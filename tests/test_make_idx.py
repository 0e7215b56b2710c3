"""make_idx.py: every form in which people have data becomes the same four idx files; splits, copies, junk."""
import gzip
import re
import shutil

import affnist_capsnet as ac
import multimnist_capsnet as mc
from lab import data as data_sets
from lab.messages import InputError

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import POSIX, ROOT, assert_refused, idx, run_offline

import make_idx

MANY, NAMED, _ = mc.synthesize_digits(300, 0)
ROWS = np.stack([np.flatnonzero(NAMED == label)[:9] for label in range(10)], 1).ravel()
IMAGES, LABELS = MANY[ROWS], NAMED[ROWS]                               # nine of each class, in turn
TRAIN, TEST = (IMAGES[:60], LABELS[:60]), (IMAGES[60:], LABELS[60:])
PARTS = {"train": TRAIN, "test": TEST}


def write_idx(folder, style, code=8, kind=np.uint8, change=lambda images, labels: (images, labels), parts=PARTS):
    folder.mkdir(parents=True, exist_ok=True)
    for part, arrays in parts.items():
        for name, array, number in zip(("images-idx3-ubyte", "labels-" + style[1]), change(*arrays), (8, code)):
            (folder / f"{style[0]}{part}-{name}").write_bytes(idx(array, number, kind if number == code else np.uint8))


def write_pictures(folder, names="0123456789", parts=PARTS):
    for part, arrays in parts.items():
        for k, (image, label) in enumerate(zip(*arrays)):
            (folder / part / names[label]).mkdir(parents=True, exist_ok=True)
            imageio.imwrite(folder / part / names[label] / f"{k}.png", image)


def write_csv(path, images, labels, header=(), last=False):
    pixels, labels = images.reshape(len(images), -1).astype(str), labels.astype(str)
    np.savetxt(path, np.c_[pixels, labels] if last else np.c_[labels, pixels], "%s", ",", header=",".join(header),
               comments="")


def torchvision(path):
    write_idx(path / "MNIST/raw", ("", "idx1-ubyte"), parts={"train": TRAIN, "t10k": TEST})
    for file in (path / "MNIST/raw").iterdir():
        file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes()))


def arrays_in_files(path):
    for part, arrays in PARTS.items():
        for name, array in zip(("x", "y"), arrays):
            np.save(path / f"{name}_{part}.npy", array)


def csv_pair(path):
    write_csv(path / "mnist_train.csv", *TRAIN, ["label", *map(str, range(784))])
    np.savetxt(path / "mnist_test.csv", np.c_[TEST[1], TEST[0].reshape(30, -1)], delimiter=",")


def save(path, **arrays):
    np.savez(path / "test.npz", **arrays)


SPLIT = dict(x_train=TRAIN[0], y_train=TRAIN[1], x_test=TEST[0], y_test=TEST[1])
FORMS = {                          # what writes TRAIN and TEST below a folder, and what is given to make_idx.py there
    "torchvision": (torchvision, ["."]), "idx files": (torchvision, ["MNIST/raw/t10k-labels-idx1-ubyte"] * 2),
    "EMNIST": (lambda path: [write_idx(path / "e", (f"emnist-{name}-", "idx1-ubyte"), change=lambda images, labels: (
        images.swapaxes(1, 2), labels)) for name in ("digits", "mnist")], ["e/emnist-digits"]),
    "QMNIST": (lambda path: write_idx(path / "QMNIST/raw", ("qmnist-", "idx2-int"), 12, ">i4", lambda images, labels: (
        images, np.stack([labels, labels + 7], 1))), ["QMNIST"]),
    "Keras": (lambda path: save(path, **SPLIT), ["test.npz"]), "in a folder": (lambda path: save(path, **SPLIT), ["."]),
    "of other types": (lambda path: save(path, train_images=TRAIN[0] / 255, train_labels=np.eye(10)[TRAIN[1]],
                       test_images=255 - TEST[0][..., None], test_labels=TEST[1][:, None], extra=[1]), ["test.npz"]),
    ".npy files": (arrays_in_files, ["."]), "some .npy files": (arrays_in_files, ["x_test.npy", "y_train.npy",
                                                                               "y_test.npy", "x_train.npy"]),
    "two CSV files": (csv_pair, ["mnist_test.csv", "mnist_train.csv"]), "their folder": (csv_pair, ["."]),
    "split pictures": (lambda path: [write_pictures(path / "a/b"), (path / "a/notes.txt").touch()], ["a"]),
    "given folders": (write_pictures, ["test", "train"]),
    "other names": (lambda path: write_pictures(path, parts={"training": TRAIN, "validation": TEST}), ["."])}


def as_set(part):
    return sorted((image.tobytes(), int(label)) for image, label in zip(*part))


def written(path="data"):
    """The training, validation included, and test images of a data set, as sets, and what the experiment reads"""
    data = mc.read_idx_folder(str(path))
    return as_set(map(np.concatenate, zip(data["train"], data["val"]))), as_set(data["test"]), data


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_same_files(call, tmp_path, form):
    """With the split that it has, labels from 0 and their names, in mixed order"""
    make, sources = FORMS[form]
    (tmp_path / "given").mkdir()
    make(tmp_path / "given")
    code, out, err = call(mc, make_idx.main, *("given/" + source for source in sources), "data")
    assert (code, err) == (0, "") and "10 classes, 60 training and 30 test images" in out, err
    assert "split: as given" in out and ("inverted" in out) == (form == "of other types")
    train, test, data = written()
    assert (train, test) == (as_set(TRAIN), as_set(TEST)) and data["names"] == list("0123456789")
    assert len(set(data["test"][1][:10].tolist())) > 3                  # not sorted by class


def test_one_csv_file_is_split(call, tmp_path):
    """With a header, the label last and in words; or with quotes and numbers"""
    write_csv(tmp_path / "train.csv", IMAGES, np.array(["one", "two"])[LABELS % 2], [*"abc" * 261, "d", "class"], True)
    write_csv(tmp_path / "q.csv", IMAGES, np.array([f'"{name}"' for name in range(10)])[LABELS])
    for name, names, n_test in (("train", ["one", "two"], 14), ("q", list("0123456789"), 20)):
        code, out, err = call(mc, make_idx.main, f"{name}.csv", name)
        assert (code, err) == (0, "") and "split: a seventh of each class" in out, err
        train, test, data = written(name)
        assert data["names"] == names and len(test) == n_test
        assert sorted([*train, *test]) == as_set((IMAGES, LABELS % len(names)))


def test_labels_of_any_kind_are_names_and_emnists_classes_have_theirs(tmp_path):
    """EMNIST's letters are counted from 1"""
    for labels, names in (([15.0, 0], ["15", "0"]), (["1.5e+01", "x.0", "2.5"], ["15", "x.0", "2.5"]),
                          ([[0, 1], [1, 0]], ["1", "0"]), (np.array([[7.0], [b"a"]], object), ["7", "a"])):
        assert make_idx.names_of(labels) == names
    assert all(len(set(names)) == n for n, names in make_idx.EMNIST.items())
    letters = {"train": (MANY[:52], np.arange(52) % 26 + 1), "test": (MANY[52:78], np.arange(26) + 1)}
    write_idx(tmp_path, ("emnist-letters-", "idx1-ubyte"), parts=letters)
    parts = {part.part: part.labels for part in make_idx.read_idx_files(tmp_path, "emnist")}
    assert "".join(parts["test"]) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ" == "".join(parts["train"][:26])
    (tmp_path / "labels.txt").write_text("\n".join("zyxwvutsrqponmlkjihgfedcba"), "utf-8")
    assert next(make_idx.read_idx_files(tmp_path, "emnist")).labels[:3] == ["z", "y", "x"]
    (tmp_path / "labels.txt").write_text("a\nb\n", "utf-8")
    with pytest.raises(InputError, match="labels from 1 to 26, and labels.txt has 2 names"):
        next(make_idx.read_idx_files(tmp_path, "emnist"))


def test_mnist_stays_mnist(call, tmp_path, monkeypatch):
    """Its files keep their order, by which the experiments know it, and are not replaced; another order does not"""
    torchvision(tmp_path)
    raw = tmp_path / "MNIST/raw"
    digests = {path.name: mc.read_idx(path)[1] for path in raw.glob("*ubyte")}
    monkeypatch.setattr(make_idx, "MNIST", digests)
    assert_refused(call(mc, lambda: make_idx.make(raw, TRAIN)), "raw: holds a data set")
    save(tmp_path, **SPLIT)
    for source, same in (("MNIST", True), ("test.npz", True), ("swapped.npz", False)):
        np.savez(tmp_path / "swapped.npz", **SPLIT | {name: SPLIT[name][::-1] for name in ("x_test", "y_test")})
        assert call(mc, make_idx.main, source, f"of-{source}")[0] == 0
        found = {name: mc.read_idx(tmp_path / f"of-{source}" / name)[1] for name in digests}
        assert (found == digests) == same
    with pytest.raises(TypeError):
        data_sets.write_files(tmp_path / "of-MNIST", dict.fromkeys(digests, b"") | {"last": None})
    (tmp_path / "of-MNIST/folder").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        data_sets.write_files(tmp_path / "of-MNIST", dict.fromkeys([*digests, "folder"], b""))
    assert {name: mc.read_idx(tmp_path / "of-MNIST" / name)[1] for name in digests} == digests      # none is replaced


def test_classes_that_are_sorted_are_mixed(tmp_path, capsys):
    """Any first N of the training and test images have all classes; the same seed gives the same bits"""
    order = np.argsort(LABELS, kind="stable")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_idx.make(tmp_path / name, (IMAGES[order], LABELS[order]), seed=seed)
    assert capsys.readouterr().out.count("a seventh of each class is for testing") == 3
    same = [(tmp_path / "a" / path.name).read_bytes() == path.read_bytes() for path in (tmp_path / "b").iterdir()]
    assert all(same) and len(same) == 5 and written(tmp_path / "a")[1] != written(tmp_path / "c")[1]
    assert all(len(set(written(tmp_path / "a")[2][part][1][:10].tolist())) > 4 for part in ("train", "test"))


def test_copies_stay_on_one_side_of_our_split_and_are_told_of_a_given_one(tmp_path, capsys):
    """Also a copy under another class, which is in doubt"""
    images, labels = np.concatenate([IMAGES] * 2 + [IMAGES[:1]]), np.concatenate([LABELS] * 2 + [(LABELS[:1] + 1) % 10])
    make_idx.make(tmp_path / "ours", (images, labels))
    out = capsys.readouterr().out
    assert "copies of images: 91; all copies" in out and "warning: 1 image in two classes" in out
    train, test, _ = written(tmp_path / "ours")
    assert len(train) + len(test) == 181 and not {image for image, _ in train} & {image for image, _ in test}
    (stale := tmp_path / "ours/test-files.txt").touch()                 # of a set that this one replaces
    make_idx.make(tmp_path / "ours", TRAIN, tuple(np.concatenate([a, b[:7]]) for a, b in zip(TEST, TRAIN)))
    assert "warning: 7 of 37 test images are training" in capsys.readouterr().out and not stale.exists()


def test_junk_is_skipped_and_counted(call, tmp_path):
    """Validation images of a set that has test images are for training; classes are sorted by numbers"""
    write_pictures(tmp_path / "d", [f"c{k}" for k in range(2, 12)], PARTS | {"valid": TEST})
    for name in ".DS_Store", "train/Thumbs.db", "train/c2/._3.png", "train/c2/desktop.ini", "test/c2/n.txt":
        (tmp_path / "d" / name).write_bytes(b"x")
    (tmp_path / "d/__MACOSX/c2").mkdir(parents=True)
    (tmp_path / "d/train/.ipynb_checkpoints").mkdir()
    code, out, err = call(mc, make_idx.main, "d", "data")
    assert (code, err) == (0, "") and "test is for testing, val for training" in out, err
    assert "left out 6 files (that systems leave in folders): .DS_Store, ._3.png" in out
    assert "left out 1 file (no PNG or JPEG of a class): n.txt" in out and "training images (test/c10/18.png, " in out
    train, test, data = written()
    assert (train, test) == (as_set((IMAGES, LABELS)), as_set(TEST)) and data["names"][-1] == "c11"
    for path, image in zip((tmp_path / "data/test-files.txt").read_text("utf-8").splitlines(), data["test"][0]):
        np.testing.assert_array_equal(imageio.imread(tmp_path / "d" / path), image)


@pytest.mark.parametrize("images, said", [
    (np.round(IMAGES[:, 4:24, 4:24] / 16), "from 0 to 16 were scaled"), (np.stack([IMAGES] * 3, 1), "colors"),
    ([*np.pad(IMAGES[:9], 2)[2:-2], *255 - IMAGES[9:]], "9 of 90 images:"), (IMAGES.reshape(90, -1) > 99, "wrote")])
def test_arrays_of_other_kinds(tmp_path, capsys, images, said):
    make_idx.make(tmp_path / "data", (images, LABELS.astype(float)))
    assert said in capsys.readouterr().out
    make_idx.make(tmp_path / "same", (IMAGES, LABELS))
    found, expected = (written(tmp_path / name)[2]["test"] for name in ("data", "same"))
    np.testing.assert_array_equal(found[1], expected[1])
    assert np.abs(found[0].astype(float) - expected[0]).mean() < 25 and found[0].max() == 255


@pytest.mark.parametrize("array, words", [
    (IMAGES - 128.0, "from -128"), (IMAGES * np.nan, "NaN or infinite"), (IMAGES * 2.0, "to 510"),
    (IMAGES[:, 0], "(90, 28)"),
    (IMAGES[:80], "80 images and 90 labels"), (np.full((90, 32, 32), 0), "image 0: no ink"), (IMAGES * 1j, "complex")])
def test_arrays_that_are_no_images_are_refused(tmp_path, array, words):
    with pytest.raises(InputError, match=re.escape(words)):
        make_idx.make(tmp_path / "data", (array, LABELS), kind="digits")
    for labels in (LABELS[:, None] * [1, 2], LABELS * 1j, LABELS * 0, range(90), [[1], 2], [None], None):
        with pytest.raises(InputError, match="^train: label.* (are|is)|^has (1 class|90 classes)|^train is of type"):
            make_idx.make(tmp_path / "data", *([IMAGES, LABELS] if labels is None else [(IMAGES, labels)]),
                          kind="digits")
    assert not (tmp_path / "data").exists()


def draw(folder, name, shape, dark, n, size=(60, 80)):
    """Write n pictures of a bar, upright or lying, at random places, dark on light or light on dark"""
    (folder / name).mkdir(parents=True)
    rng = np.random.default_rng(len(name))
    for k in range(n):
        picture = np.full(size, 235 if dark else 20, np.uint8)
        top, left = rng.integers(3, 10), rng.integers(3, 30)
        picture[top:top + shape[0], left:left + shape[1]] = 30 if dark else 220
        picture[top + k:top + k + 2, left:left + shape[1] - 3] = 120    # no two are copies
        imageio.imwrite(folder / name / f"{k}.{'png' if k % 2 else 'jpg'}", picture)


@pytest.mark.parametrize("shade", [0.04, 0.25])
def test_ink_on_unevenly_lit_paper_is_that_on_even_paper(shade):
    """A noisy page that darkens from one corner to the other: no pixel of it is left"""
    even = np.full((60, 80), 0.9)
    even[15:45, 35:45] = 0.2
    lit = even - shade * np.mgrid[:0.5:60j, :0.5:80j].sum(0) + np.random.default_rng(0).normal(0, 0.01, even.shape)
    np.testing.assert_array_equal(data_sets.to_mnist(lit), data_sets.to_mnist(even))


def test_pictures_become_images_as_mnists(call, tmp_path):
    """Light on dark, in a box of 20 px, centered by mass; the command that is printed trains on them"""
    draw(tmp_path / "drawings", "bar", (40, 10), True, 14)
    draw(tmp_path / "drawings", "line", (10, 40), False, 14)
    code, out, err = call(mc, make_idx.main, "drawings", "data")
    assert (code, err) == (0, "") and "2 classes, 24 training and 4 test images" in out
    images, labels = written()[2]["test"]
    for image, label in zip(images, labels):
        rows, columns = (np.flatnonzero((image > 60).any(axis)) for axis in (1, 0))
        assert abs(len(rows) - (20 if label == 0 else 5)) <= 1 and abs(len(columns) - (5 if label == 0 else 20)) <= 1
        assert image.max() > 200 and image[:2].max() < 30
        assert np.average(np.arange(28) + 0.5, weights=image.sum(1)) == pytest.approx(14, abs=0.6)
    for path, image in zip((tmp_path / "data/test-files.txt").read_text("utf-8").splitlines(), images):
        assert np.array_equal(data_sets.to_mnist(data_sets.read_picture(tmp_path / "drawings" / path)), image)
    code, _, err = call(ac, ac.main, *out.splitlines()[-1].partition(".py ")[2].split(), "--n-epochs", 1, "--n-train",
                        22, "--n-val", 2, "--batch-size", 11, "--conv1-channels", 2, "--quiet")
    assert (code, err) == (0, "")


def test_what_cannot_be_read_is_refused_in_one_line(call, tmp_path):
    """and nothing is written"""
    (tmp_path / "empty").mkdir()
    torchvision(tmp_path / "root")
    write_idx(tmp_path / "root/Other/raw", ("", "idx1-ubyte"))
    for folder, prefix in ("two", "a-"), ("two", "b-"), ("cut", ""), ("half", ""):
        write_idx(tmp_path / folder, (prefix, "idx1-ubyte"))
    (tmp_path / "cut/test-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + bytes(20))
    (tmp_path / "half/test-images-idx3-ubyte").unlink()
    write_pictures(tmp_path / "split", parts=PARTS | {"val": (TEST[0][:1], np.array([0]))})
    write_pictures(tmp_path / "new", "abcdefghij", {"train": (TRAIN[0][:60], TRAIN[1] % 9), "test": TEST})
    shutil.copytree(tmp_path / "split/train/0", tmp_path / "flat/train")
    shutil.copytree(tmp_path / "split/train/1", tmp_path / "flat/test")
    write_pictures(tmp_path, parts={"few": (IMAGES[:22], LABELS[:22]), "bad": TRAIN})
    (tmp_path / "bad/0/0.png").write_bytes(b"no picture")
    for folder in ("none/a", "none/b", "full/labels.txt"):
        (tmp_path / folder).mkdir(parents=True)
    np.savez(tmp_path / "twice.npz", images=IMAGES, x=IMAGES, y=LABELS)
    np.savez(tmp_path / "half.npz", x_train=IMAGES)
    np.savez(tmp_path / "unnamed.npz", IMAGES, LABELS)
    np.save(tmp_path / "object.npy", np.array([None]))
    for name, text in (("x.zip", "x"), ("empty.csv", ""), ("odd.csv", "1,2,3\n2,3\n"),
                       ("none.csv", "p1,p2\n1,2\n"), ("word.csv", "1,2,3\n2,3,x\n"), ("small.csv", "1,2,3,4,5\n")):
        (tmp_path / name).write_text(text, "utf-8")
    for sources, words in (
            ("root", "holds several data sets. Give one of them, such as root"), ("two", "Give one of them: two"),
            ("cut", "damaged, or not an idx"), ("half", "lacks the images or the labels of test"),
            ("new", "new: test images of class j, but no training"), ("flat", "test, train hold no folders of classes"),
            ("bad", "0.png: is not a"), ("few", "class 2 has 1 different image for training. Give at least 3"),
            ("none", "a: has 0 PNG or JPEG"), ("split/train/0", "0: its pictures do not lie in folders of their cl"),
            ("empty", "empty: holds no folders of pictures, and no idx"),
            ("no", "no: no such file or folder"), ("x.zip", "x.zip: is no CSV"),
            ("twice.npz", "several arrays of images"), ("half.npz", "lacks the train images or labels. Name"),
            ("object.npy", "the array holds Python objects"), ("empty.csv", "has no rows of columns"),
            ("odd.csv", "row 2 has 2 columns between commas, and the first 3"),
            ("none.csv", "no column is called label (the header begins p1, p2)"),
            ("unnamed.npz", "no name says what"), ("word.csv", "row 2, column 3 has 'x' in place of a"),
            ("small.csv", "images are uint8 (1, 4). Give gray levels"),
            ("split --seed -1", "--seed -1: must be at least 0")):
        assert_refused(call(mc, make_idx.main, *sources.split(), "x"), words)
        assert not (tmp_path / "x").exists()
    for out, words in (("full", "labels.txt"), ("cut", "cut: holds a data set"), ("split/x", "x: lies in split")):
        assert_refused(call(mc, make_idx.main, "split", out), words)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["labels.txt"]


def test_arrays_are_known_by_any_usual_name(call, tmp_path):
    """Keys as trainX, xtrain and X_Train; a .npy file of each class, by the file's name, as Quick, Draw! has them"""
    for names in ("trainX trainY testX testY", "xtrain ytrain xtest ytest", "X_Train y_Train X_Test Y_Test",
                  "TrainImages TrainLabels TestImages TestLabels", "imagesTrain labelsTrain imagesTest labelsTest"):
        np.savez(tmp_path / "x.npz", **dict(zip(names.split(), (*TRAIN, *TEST))))
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        code, out, err = call(mc, make_idx.main, "x.npz", "data")
        assert (code, err) == (0, "") and written()[:2] == (as_set(TRAIN), as_set(TEST))
    (tmp_path / "drawings").mkdir()
    for label, name in enumerate(("full_numpy_bitmap_cat", "dog", "cafe\u0301")):
        np.save(tmp_path / f"drawings/{name}.npy", IMAGES[LABELS == label].reshape(9, 784))
    code, out, err = call(mc, make_idx.main, "drawings", "classes")
    assert (code, err) == (0, "") and written("classes")[2]["names"] == ["caf\xe9", "dog", "full_numpy_bitmap_cat"]
    for name, kind, part in (("boys", "", ""), ("axes", "", ""), ("by_class", "labels", ""), ("latest", "", ""),
                             ("trainer", "", ""), ("training_set", "", "train"), ("valImages", "images", "val")):
        assert (make_idx.kind_of(name), make_idx.part_of(name)) == (kind, part)


def test_names_of_folders_are_compared_in_one_form(call, tmp_path):
    """An accented letter is one character on one system, and a letter and an accent on another"""
    write_pictures(tmp_path / "d", ["caf\xe9", *"123456789"], {"train": TRAIN})
    write_pictures(tmp_path / "d", ["cafe\u0301", *"123456789"], {"test": TEST})
    code, out, err = call(mc, make_idx.main, "d", "data")
    assert (code, err) == (0, "") and written()[2]["names"] == [*"123456789", "caf\xe9"]


@POSIX
def test_backslashes_in_names_are_said(call, tmp_path):
    """as Python's zipfile leaves them of an archive that a program on Windows made; unzip does not"""
    (tmp_path / "d").mkdir()
    for k, image in enumerate(IMAGES[:20]):
        imageio.imwrite(tmp_path / "d" / f"train\\{k % 2}\\{k}.png", image)
    assert_refused(call(mc, make_idx.main, "d", "data"), "such as train\\0\\0.png: a program on Windows")


@POSIX
def test_a_class_may_have_a_backslash_in_its_name(call, tmp_path):
    names = [r"$\alpha", r"$\beta", *"23456789"]
    write_pictures(tmp_path / "d", names)
    code, out, err = call(mc, make_idx.main, "d", "data")
    assert (code, err) == (0, "") and set(written()[2]["names"]) == set(names)


def test_labels_that_are_objects_are_refused_with_advice_that_works(call, tmp_path):
    """np.savez makes such files, too"""
    labels = np.array([f"class {label}" for label in LABELS], object)
    np.savez(tmp_path / "x.npz", images=IMAGES, labels=labels)
    np.save(tmp_path / "y.npy", labels)
    assert_refused(call(mc, make_idx.main, "x.npz", "data"), "x.npz: the array labels holds Python objects, which are")
    assert_refused(call(mc, make_idx.main, "y.npy", "data"), "y.npy: the array holds Python objects")
    np.savez(tmp_path / "x.npz", images=IMAGES, labels=np.array(labels).astype(str))
    assert call(mc, make_idx.main, "x.npz", "data")[0] == 0 and written()[2]["names"][3] == "class 3"


@pytest.mark.slow
def test_the_page_runs_as_it_is_printed(tmp_path):
    """docs/own_data.md, from top to bottom, in an empty folder"""
    text = (ROOT / "docs/own_data.md").read_text("utf-8")
    for kind, code in re.findall(r"^```(python|bash)\n(.*?)^```", text, re.M | re.S):
        for command in [["-c", code]] if kind == "python" else [line.split()[1:] for line in code.splitlines()]:
            done = run_offline(tmp_path, *command, timeout=1000)
            assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "figures").glob("*.png"))) > 2 and float(done.stdout.split()[-1]) > 0.5
