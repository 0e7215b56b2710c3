"""Text files of users: whatever program wrote a CSV file or the names of classes, they are read right or refused in one
line that says what to change."""
import string

import multimnist_capsnet as mc
from lab import tables
from lab.messages import InputError

import numpy as np
import pytest
from conftest import ROOT, assert_refused

import make_idx
import predict as program

IMAGES, LABELS, _ = mc.synthesize_digits(40, 3)
PIXELS = IMAGES.reshape(40, -1)
NAMES = ["zero, nought", "one", "zwölf", "three"]
NUMBERS = [str(k) for k in range(784)]


def text_of(rows, separator=",", quoted=False, end=""):
    cells = [[f'"{cell}"' if quoted or separator in str(cell) else str(cell) for cell in row] for row in rows]
    return "".join(separator.join(row) + end + "\n" for row in cells)


def rows(labels=LABELS, before=lambda k: [], header=()):
    return [*([header] if header else []), *([*before(k), label, *pixels] for k, (label, pixels) in enumerate(
        zip(labels, PIXELS.tolist())))]


def with_second(cell):
    """Return rows of labels, a cell that is no pixel, and pixels"""
    return [[label, cell, *row] for label, row in zip(LABELS, PIXELS.tolist())]


WORDS = [NAMES[label % 4] for label in LABELS]
LAST = [[*pixels, label] for label, pixels in zip(LABELS, PIXELS.tolist())]
FILES = {                          # text, encoding, labels, words of the decision
    "index": (text_of(rows(before=lambda k: [k])), "utf-8", LABELS, "column 1 (row numbers) left out"),
    "pandas": (text_of(rows(before=lambda k: [k], header=["", "label", *NUMBERS])), "utf-8", LABELS,
               "column 2 (label)"),
    "id": (text_of(rows(before=lambda k: [f"a{k}"], header=["id", "label", *NUMBERS])), "utf-8", LABELS,
           "column 1 (id) left out"),
    "shuffled": (text_of(rows(before=lambda k: [k * 7 % 40], header=["", "label", *NUMBERS])), "utf-8", LABELS,
                 "column 1 (row numbers) left out, labels in column 2"),
    "shuffled, no header": (text_of(rows(before=lambda k: [k * 7 % 40])), "utf-8", LABELS, "column 1 (row numbers)"),
    "files, no header": (text_of(rows(before=lambda k: [f"{k}.png"])), "utf-8", LABELS, "column 1 (row names) left"),
    "two indices": (text_of(rows(before=lambda k: [k, k * 7 % 40], header=["", "Unnamed: 0.1", "label", *NUMBERS])),
                    "utf-8", LABELS, "column 1 (row numbers) left out, column 2 (unnamed: 0.1) left out, "
                    "labels in column 3"),
    "two indices, no header": (text_of(rows(before=lambda k: [k, 99 - k])), "utf-8", LABELS, "labels in column 3"),
    "id later": (text_of([["label", "id", *NUMBERS], *with_second(7)]), "utf-8", LABELS,
                 "column 2 (id) left out, labels in column 1"),
    "R": (text_of(rows(before=lambda k: [k + 1], header=["label", *NUMBERS])), "utf-8", LABELS,
          "(row numbers) left out"),
    "header of numbers": (text_of(rows(header=list(range(785)))), "utf-8", LABELS, "header, labels in column 1 (0)"),
    "header and index of numbers": (text_of(rows(before=lambda k: [k], header=["", *range(785)])), "utf-8", LABELS,
                                    "left out, labels in column 2"),
    "all quoted": (text_of(rows(header=["label", *NUMBERS]), quoted=True), "utf-8", LABELS, "header, labels"),
    "quoted, no header": (text_of(rows(), quoted=True), "utf-8", LABELS, "no header, labels in column 1"),
    "comma in a label": (text_of(rows(WORDS)), "utf-8", WORDS, "separator comma"),
    "trailing comma": (text_of(rows(header=["label", *NUMBERS]), end=","), "utf-8", LABELS, "784 pixels"),
    "tab": (text_of(rows(header=["label", *NUMBERS]), "\t"), "utf-8", LABELS, "separator tab"),
    "semicolon": (text_of(rows(WORDS, header=["Class", *NUMBERS]), ";"), "utf-8-sig", WORDS, "separator semicolon"),
    "UTF-16": (text_of(rows(WORDS, header=["label", *NUMBERS]), "\t"), "utf-16", WORDS, "separator tab, header"),
    "last": (text_of(LAST), "utf-8", LABELS, "labels in column 785"),
    "last, called so": (text_of([[*NUMBERS, "target"], *LAST], ";"), "utf-8", LABELS, "column 785 (target)")}


@pytest.mark.parametrize("kind", FILES)
def test_a_csv_file_is_read_as_it_was_meant_and_the_decision_is_said(tmp_path, kind):
    text, encoding, labels, words = FILES[kind]
    (tmp_path / "x.csv").write_bytes(text.encode(encoding))
    found = tables.read_table(tmp_path / "x.csv")
    np.testing.assert_array_equal(found.levels, PIXELS)
    assert found.labels == [str(label) for label in labels]
    assert words in found.words and "784 pixels" in found.words, found.words


@pytest.mark.parametrize("name, is_so", [
    ("emnist-digits-test.csv", 1), ("EMNIST_Digits.npz", 1), ("e-mnist digits (1).csv", 1), ("my_E.MNIST.csv", 1),
    ("the-mnist.csv", 0), ("made_mnist.csv", 0), ("mnist_test.csv", 0), ("emnist/test.csv", 0),
    ("FashionMNIST.npz", 0)])
def test_emnist_is_known_by_a_files_name_in_all_programs(call, tmp_path, name, is_so):
    """and in files of all kinds: transposed, it is said, and a file of another name stays as it is, as is advised"""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    for give, name in (("transposed", path.name), ("upright", f"x{path.suffix}")):
        images = IMAGES.swapaxes(1, 2) if give == "transposed" and is_so else IMAGES
        if path.suffix == ".csv":
            np.savetxt(path.with_name(name), np.c_[LABELS % 2, images.reshape(40, -1)], "%d", ",")
        else:
            np.savez(path.with_name(name), images=images, labels=LABELS % 2)
    tables_of = {}
    for name in (path.name, f"x{path.suffix}"):
        code, out, err = call(mc, make_idx.main, path.with_name(name), f"{name} data")
        assert (code, err) == (0, "") and ("rename the file" in out) == (is_so and name == path.name)
        code, out, err = call(mc, program.main, ROOT / "weights/affnist_cnn-gap.npz", path.with_name(name), "--out",
                              "out.csv")
        assert (code, err) == (0, "") and ("rename the file" in out) == (is_so and name == path.name)
        found = [line.split(",")[1:] for line in (tmp_path / "out.csv").read_text("utf-8").splitlines()[1:]]
        tables_of[name] = mc.read_idx_folder(tmp_path / f"{name} data")["test"][0].tolist(), found
    assert tables_of[path.name] == tables_of[f"x{path.suffix}"]


def test_emnist_as_csv_is_transposed(call, tmp_path):
    """as its idx files are; the decision is printed"""
    stored = IMAGES.swapaxes(1, 2).reshape(40, -1)
    np.savetxt(tmp_path / "emnist-digits-train.csv", np.c_[LABELS % 2, stored], "%d", ",")
    np.savetxt(tmp_path / "other-train.csv", np.c_[LABELS % 2, PIXELS], "%d", ",")
    for name in "emnist-digits", "other":
        code, out, err = call(mc, make_idx.main, f"{name}-train.csv", name)
        assert (code, err) == (0, "") and "separator comma, no header, labels in column 1, 784 pixels" in out
        assert ("transposed" in out) == (name == "emnist-digits")
    a, b = (mc.read_idx_folder(name)["test"][0] for name in ("emnist-digits", "other"))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("text, fault", [
    (b"label,a\n1,2\n\xe9,3\n", "line 3 is not UTF-8. Save the file as UTF-8"),
    (text_of(rows(header=["name", *[f"p{k}" for k in NUMBERS]])).encode(),
     "no column is called label (the header begins name"),
    (text_of(rows(header=["label", "class", *NUMBERS[1:]])).encode(), "2 columns are called label (label, class)"),
    (text_of(rows(["", *LABELS[1:]], header=["label", *NUMBERS])).encode(), "row 2 has no label"),
    (text_of([*rows(), [1, 2]]).encode(), "row 41 has 2 columns between commas, and the first 785"),
    (b"label,0,1\n", "has a header alone"), (b"\n", "has no rows of columns"),
    (text_of([["label", "split", *NUMBERS], *with_second("train")]).encode(),
     "1 column more than a label and the 28x28 pixels of an image: column 2 (split: train, train"),
    (text_of([["label", "writer", *NUMBERS], *with_second(5)]).encode(),
     "column 2 (writer: 5, 5, 5, ...). Remove what is no pixel, or call its column id"),
    (text_of(with_second(5)).encode(), "the first row begins 5, 0"),
    (b"1;0,5\n" * 3, "in place of a gray level")])
def test_a_csv_file_that_is_unclear_is_refused_in_one_line(call, tmp_path, text, fault):
    (tmp_path / "x.csv").write_bytes(text)
    assert_refused(call(mc, make_idx.main, "x.csv", "data"), fault)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_names_are_read_in_every_unicode_encoding(call, tmp_path, encoding):
    """by predict.py and make_idx.py, with empty lines at the end; others are refused, naming the line"""
    names = ["zéro", *string.ascii_lowercase[1:10]]
    (tmp_path / "labels.txt").write_bytes(("\r\n".join(names) + "\r\n\r\n").encode(encoding))
    weights = ROOT / "weights/affnist_cnn-gap.npz"
    assert program.load(weights, tmp_path / "labels.txt").names == tuple(names)
    (tmp_path / "idx").mkdir()
    for part, n in (("train", 30), ("test", 10)):
        (tmp_path / f"idx/{part}-images-idx3-ubyte").write_bytes(make_idx.idx_bytes(IMAGES[:n]))
        (tmp_path / f"idx/{part}-labels-idx1-ubyte").write_bytes(make_idx.idx_bytes(np.arange(n) % 10))
    (tmp_path / "idx/labels.txt").write_bytes((tmp_path / "labels.txt").read_bytes())
    assert call(mc, make_idx.main, "idx", "data")[0] == 0
    assert (tmp_path / "data/labels.txt").read_text("utf-8").splitlines()[-1] == "zéro"
    (tmp_path / "labels.txt").write_bytes("eins\nzéro\n".encode("latin-1"))
    with pytest.raises(InputError, match="labels.txt: line 2 is not UTF-8. Save the file as UTF-8"):
        program.load(weights, tmp_path / "labels.txt")


def test_predict_takes_the_rows_of_a_csv_file_for_pictures(call, tmp_path):
    """Kaggle's test.csv has no labels; another has them"""
    (tmp_path / "test.csv").write_text(text_of([[f"pixel{k}" for k in range(784)], *PIXELS.tolist()]), "utf-8")
    (tmp_path / "labeled.csv").write_text(text_of(rows(header=["label", *NUMBERS])), "utf-8")
    (tmp_path / "id.csv").write_text(text_of([["ImageId", *NUMBERS], *([k, *row] for k, row in enumerate(
        PIXELS.tolist()))]), "utf-8")
    for name in "test", "labeled", "id":
        code, out, err = call(mc, program.main, ROOT / "weights/affnist_cnn-gap.npz", f"{name}.csv", "--out", "out.csv")
        assert (code, err) == (0, "") and "784 pixels" in out
        found = [line.split(",")[1] for line in (tmp_path / "out.csv").read_text("utf-8").splitlines()[1:]]
        assert np.mean(np.array(found) == LABELS.astype(str)) >= 0.9 and len(found) == 40
