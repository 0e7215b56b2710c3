"""Data of one's own: four idx files of any data set, from 2 to 62 classes; arrays given to train; pictures."""
import gzip
import json
from types import SimpleNamespace

import affnist_capsnet as ac
import multimnist_capsnet as mc
from lab import data as data_sets
from lab import networks
from lab.figures import call_images, class_names, new_figure

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import EXPERIMENTS, assert_refused, runs, toy, toy_digits

import make_affnist_capsnet_gif as affnist_film
import make_idx
import make_multimnist_capsnet_gif as multi_film
import visualize_affnist_capsnet as affnist_figures
import visualize_multimnist_capsnet as multi_figures


def write_idx(path, array, zipped=False):
    raw = b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if zipped else raw)


def write_data(folder, n_classes=3, prefix="", style="train-images-idx3-ubyte", first=0, zipped=False, n=48):
    """Write a data set of n training images and n / 4 test images; return {split: (images, labels)}"""
    folder.mkdir(parents=True, exist_ok=True)
    rng, found = np.random.default_rng(0), {}
    patterns = np.zeros((n_classes, 28, 28))
    patterns[:, 4:24, 4:24] = rng.integers(0, 2, (n_classes, 20, 20)) * 200
    for split, size in (("train", n), ("t10k", n // 4)):
        labels = np.arange(size) % n_classes
        images = (patterns[labels] * rng.uniform(0.7, 1, (size, 1, 1))).astype(np.uint8)
        found["test" if split == "t10k" else split] = images, labels
        for kind, array in (("images", images), ("labels", labels + first)):
            name = prefix + style.replace("train", split).replace("images-idx3", f"{kind}-idx{array.ndim}").replace(
                "images.idx3", f"{kind}.idx{array.ndim}")
            write_idx(folder / (name + ".gz" * zipped), array, zipped)
    return found


def read(path):
    return mc.read_idx_folder(str(path))


def test_names_of_files(tmp_path):
    """With dashes or dots, raw or gzipped, with a prefix; of several data sets in a folder one is named"""
    for k, given in enumerate(({}, {"style": "train-images.idx3-ubyte"}, {"zipped": True}, {"prefix": "kuzushiji-"})):
        found = write_data(tmp_path / str(k), **given)
        data = read(tmp_path / str(k))
        np.testing.assert_array_equal(data["test"][0], found["test"][0])
        assert data["n_classes"] == 3 and data["source"] == ("kuzushiji" if k == 3 else str(k))
    write_data(tmp_path / "3", 5, "other-")
    with pytest.raises(mc.InputError, match="--data-dir .*3: needs the four idx files of one data set"):
        read(tmp_path / "3")
    assert read(tmp_path / "3" / "other")["n_classes"] == 5


def test_emnist_is_transposed_and_its_letters_are_counted_from_0(tmp_path):
    images, labels = write_data(tmp_path, 26, "emnist-letters-", first=1, zipped=True, n=104)["test"]
    data = read(tmp_path)
    np.testing.assert_array_equal(data["test"][0], images.swapaxes(1, 2))
    np.testing.assert_array_equal(data["test"][1], labels)
    assert data["n_classes"] == 26


def test_validation_images_are_a_twelfth_of_each_class(tmp_path):
    """Drawn at random, but always the same; no image is in two splits; names come from labels.txt"""
    images, _ = write_data(tmp_path, 4, n=240)["train"]
    (tmp_path / "labels.txt").write_text("shirt\nshoe\nbag\nhat\n", "utf-8")
    data = read(tmp_path)
    assert np.bincount(data["val"][1]).tolist() == [5] * 4 and np.bincount(data["train"][1]).tolist() == [55] * 4
    together, images = np.concatenate([data["train"][0], data["val"][0]]).reshape(240, -1), images.reshape(240, -1)
    np.testing.assert_array_equal(together[np.lexsort(together.T)], images[np.lexsort(images.T)])
    np.testing.assert_array_equal(data["val"][0], read(tmp_path)["val"][0])
    assert class_names(data) == ["shirt", "shoe", "bag", "hat"]
    run = SimpleNamespace(data=data)
    assert multi_figures.prediction_label(run, (0, 1), (2, 3)) == "predicted\nshirt +\nshoe\ntrue bag + hat"


def test_files_that_do_not_fit_are_refused(tmp_path):
    """In one line; more images than labels, images of another size, too many classes, no whole file, a file missing"""
    write_data(tmp_path)
    for name, array, words in (("train-labels-idx1-ubyte", np.arange(9) % 3, ", train: labels are .* Give 48"),
                               ("train-images-idx3-ubyte", np.zeros((48, 32, 32)), r", train: images are .*48, 32, 32"),
                               ("t10k-labels-idx1-ubyte", np.full(12, 99), ", test: labels are .*from 0 to 61")):
        write_data(tmp_path)
        write_idx(tmp_path / name, array)
        with pytest.raises(mc.InputError, match=words):
            read(tmp_path)
    for content in b"", b"\0\0\x08\x03" + bytes(20), b"\x1f\x8bno gzip":       # others: test_experiments.py
        (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
        with pytest.raises(mc.InputError, match="train-images-idx3-ubyte"):
            read(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    with pytest.raises(mc.InputError, match="make_idx.py"):
        read(tmp_path)


@pytest.mark.parametrize("experiment, figures, film", [
    (mc, multi_figures, multi_film), pytest.param(ac, affnist_figures, affnist_film, marks=pytest.mark.slow)])
def test_any_data_set_is_trained_evaluated_drawn_and_animated(call, tmp_path, experiment, figures, film):
    """With three classes; a network refuses other data in words"""
    write_data(tmp_path / "clothes")
    small = ["--n-train", 24, "--n-val", 4, "--n-test", 8, "--n-epochs", 1, "--batch-size", 12, "--threads", 1]
    small += ["--conv1-channels", 2, *(["--conv3-channels", 40] if experiment is mc else [])]
    code, out, err = call(experiment, experiment.main, *small, "--data-dir", "clothes", "--out-weights", "w.npz",
                          "--out-json", "r.json")
    assert (code, err) == (0, "") and "images of clothes" in out, err
    found, (config, _) = json.loads((tmp_path / "r.json").read_text("utf-8")), experiment.load("w.npz")
    assert found["source"] == "clothes" and config.n_classes == 3
    few = ["--n-test", 8, "--data-dir", "clothes"]
    for main, flags in ((experiment.main, few), (figures.main, [*few, "--outdir", "viz"]),
                        (film.main, ["--data-dir", "clothes", "--out", "a.gif"] + (
                            ["--frames", 2, "--index", 1] if experiment is ac else []))):
        code, out, err = call(experiment, main, "--load", "w.npz", *flags)
        assert (code, err) == (0, ""), err
    assert list(tmp_path.glob("viz/*.png")) and (tmp_path / "a.gif").stat().st_size > 1000
    write_data(tmp_path / "letters", 5)
    assert_refused(call(experiment, figures.main, "--load", "w.npz", "--data-dir", "letters", "--outdir", "viz"),
                   "was trained on 3 classes, and these data have 5")


def test_figures_of_other_images_do_not_speak_of_digits():
    fig = new_figure(2, "Two overlapping digits, each from its own digit capsule", "true digits in orange")
    fig.subplots().set_title("the missed digit")
    call_images(fig)
    assert [text.get_text() for text in (fig._suptitle, fig._supxlabel, fig.axes[0].title)] == [
        "Two overlapping images, each from its own class capsule", "true classes in orange", "the missed image"]


def test_the_classes_follow_from_the_labels():
    """of arrays of one's own; digits have ten"""
    data = toy_digits() | {"source": "pictures"}
    few = {name: (images[labels < 3], labels[labels < 3]) for name, (images, labels) in list(data.items())[1:]}
    for module in mc, ac:
        for given, n in ((data | few, 3), (data, 10), (data | few | {"source": "mnist"}, 10),
                         (data | few | {"n_classes": 4}, 4)):
            assert module.fit_to_data(module.Config(), given).n_classes == n
        assert module.data_name("my drawings") == "images of my drawings"
    with pytest.raises(networks.InputError, match="was trained on 10 classes, and these data have 3"):
        networks.make(mc, "x", SimpleNamespace(), mc.Config(), data | few)




WRONG = {                          # what is done to the training images or labels
    "floats": lambda x, y: (x / 255, y), "flat": lambda x, y: (x.reshape(len(x), -1), y),
    "another size": lambda x, y: (x[:, :20], y), "more channels": lambda x, y: (x[..., None].repeat(3, -1), y),
    "empty": lambda x, y: (x[:0], y[:0]), "one-hot": lambda x, y: (x, np.eye(10)[y]), "fewer": lambda x, y: (x, y[:-1]),
    "float labels": lambda x, y: (x, y.astype(float)), "negative": lambda x, y: (x, y.astype(int) - 1),
    "too many classes": lambda x, y: (x, y + 99)}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_arrays_that_train_cannot_take_are_refused(experiment, name):
    given = {"data": "toys", "n_train_toys": 1, "train_azimuths": "0:0"} if experiment == runs.NORB else {}
    (config, data), module = toy(experiment, **given), EXPERIMENTS[experiment]
    part = data["train"]
    of_dict = isinstance(part, dict)
    images, labels = WRONG[name](*((part["images"], part["labels"]) if of_dict else part))
    wrong = part | {"images": images, "labels": labels} if of_dict else (images, labels)
    words = "labels" if "label" in name or name in ("one-hot", "fewer", "negative", "too many classes") else "images"
    with pytest.raises(module.InputError, match=f"train: .*{words}"):
        module.train(config, data | {"train": wrong})


def draw(folder, name, shape, dark, n, size=(60, 80)):
    """Write n pictures of a bar, upright or lying, at random places, dark on light or light on dark"""
    (folder / name).mkdir(parents=True)
    rng = np.random.default_rng(len(name))
    for k in range(n):
        picture = np.full(size, 235 if dark else 20, np.uint8)
        top, left = rng.integers(3, 10), rng.integers(3, 30)
        picture[top:top + shape[0], left:left + shape[1]] = 30 if dark else 220
        imageio.imwrite(folder / name / f"{k}.{'png' if k % 2 else 'jpg'}", picture)


def test_ink_on_unevenly_lit_paper_is_that_on_even_paper():
    """A page that darkens from 0.9 to 0.65 from one corner to the other"""
    even = np.full((60, 80), 0.9)
    even[15:45, 35:45] = 0.2
    lit = even - 0.25 * np.add.outer(np.linspace(0, 0.5, 60), np.linspace(0, 0.5, 80))
    expected, found = data_sets.to_mnist(even).astype(int), data_sets.to_mnist(lit).astype(int)
    assert (found[:3] == 0).all() and (found[:, :3] == 0).all() and np.abs(found - expected).mean() < 8


def test_pictures_become_four_files_as_mnists(call, tmp_path):
    """Light on dark, in a box of 20 px, centered by mass; a seventh for testing; two commands train on them"""
    draw(tmp_path / "drawings", "bar", (40, 10), True, 14)
    draw(tmp_path / "drawings", "line", (10, 40), False, 14)
    (tmp_path / "drawings" / "bar" / "note.txt").write_text("x", "utf-8")
    (tmp_path / "drawings" / "line" / "photo.heic").write_bytes(b"x")
    (tmp_path / "drawings" / ".ipynb_checkpoints").mkdir()              # what is hidden is neither class nor picture
    (tmp_path / "drawings" / "bar" / "._1.png").write_bytes(b"of macOS")
    code, out, err = call(mc, make_idx.main, "drawings", "data")
    assert (code, err) == (0, "") and "2 classes, 24 training and 4 test images" in out
    data = read(tmp_path / "data")
    assert data["names"][:2] == ["bar", "line"] and np.bincount(data["test"][1]).tolist() == [2, 2]
    for image, label in zip(*data["test"]):
        rows, columns = (np.flatnonzero((image > 60).any(axis)) for axis in (1, 0))
        assert abs(len(rows) - (20 if label == 0 else 5)) <= 1 and abs(len(columns) - (5 if label == 0 else 20)) <= 1
        assert image.max() > 200 and image[:2].max() < 30
        mass = image.astype(float)
        assert (mass.sum(1) * (np.arange(28) + 0.5)).sum() / mass.sum() == pytest.approx(14, abs=0.6)
    command = out.splitlines()[1].partition(".py ")[2].split()
    assert out.splitlines()[2] == "left out 2 files that are neither PNG nor JPEG: note.txt, photo.heic"
    tested = (tmp_path / "data" / "test-files.txt").read_text("utf-8").splitlines()
    assert [path.split("/")[0] for path in tested] == ["bar", "bar", "line", "line"]
    for path, image in zip(tested, data["test"][0]):
        assert np.array_equal(data_sets.to_mnist(data_sets.read_picture(tmp_path / "drawings" / path)), image)
    code, _, err = call(ac, ac.main, *command, "--n-epochs", 1, "--n-train", 22, "--n-val", 2, "--batch-size", 11,
                        "--conv1-channels", 2, "--quiet")
    assert (code, err) == (0, "")
    (tmp_path / "full" / "labels.txt").mkdir(parents=True)
    assert_refused(call(mc, make_idx.main, "drawings", "full"), "labels.txt")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["labels.txt"]
    write_data(tmp_path / "zipped", zipped=True)
    (tmp_path / "drawings" / "bar" / "0.jpg").write_bytes(b"no picture")
    for flags, words in ((("drawings", "data"), "data: holds a data set"), (("drawings", "zipped"), "holds a data set"),
                         (("drawings", "x", "--seed", -1), "--seed -1: must be at least 0"),
                         (("none", "x"), "none: no such folder. Give one that"), (("drawings", "x"), "0.jpg: is not a"),
                         (("drawings/bar", "x"), "has 0 folders"), (("drawings",), "OUT")):
        assert_refused(call(mc, make_idx.main, *flags), words)
        assert not (tmp_path / "x").exists()
