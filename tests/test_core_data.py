"""Data of one's own: four idx files of any data set, from 2 to 62 classes; arrays given to train()."""
import csv
import gzip
import json
from types import SimpleNamespace

import affnist_capsnet as ac
import multimnist_capsnet as mc
from lab import data as data_sets
from lab.figures import call_images, new_figure

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import EXPERIMENTS, runs, toy, toy_digits

import make_affnist_capsnet_gif as affnist_film
import make_idx
import make_multimnist_capsnet_gif as multi_film
import visualize_affnist_capsnet as affnist_figures
import visualize_multimnist_capsnet as multi_figures

SILENT = mc.Progress(quiet=True).say


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


def test_names_of_files(tmp_path):
    """With dashes or dots, raw or gzipped, with a prefix; of several data sets in a folder one is named"""
    for k, given in enumerate(({}, {"style": "train-images.idx3-ubyte"}, {"zipped": True}, {"prefix": "kuzushiji-"})):
        found = write_data(tmp_path / str(k), **given)
        data = mc.load_data_dir("--data-dir", str(tmp_path / str(k)), False, SILENT)
        np.testing.assert_array_equal(data["test"][0], found["test"][0])
        assert data["n_classes"] == 3 and data["source"].startswith("kuzushiji-" if k == 3 else f"{k}-")
    write_data(tmp_path / "3", 5, "other-")
    with pytest.raises(mc.InputError, match=r"several data sets \(kuzushiji, other\). Name one: .*3.PREFIX"):
        mc.load_data_dir("--data-dir", str(tmp_path / "3"), False, SILENT)
    assert mc.load_data_dir("--data-dir", str(tmp_path / "3" / "other"), False, SILENT)["n_classes"] == 5


def test_emnist_is_turned_and_its_letters_are_counted_from_0(tmp_path):
    """EMNIST's files are stored transposed; --transpose turns those of others, which are then another data set"""
    images, labels = write_data(tmp_path, 26, "emnist-letters-", first=1, zipped=True, n=104)["test"]
    data = mc.load_data_dir("--data-dir", str(tmp_path), False, SILENT)
    np.testing.assert_array_equal(data["test"][0], images.swapaxes(1, 2))
    np.testing.assert_array_equal(data["test"][1], labels)
    assert data["n_classes"] == 26
    images, _ = write_data(tmp_path / "mine")["test"]
    plain, turned = (mc.load_data_dir("--data-dir", str(tmp_path / "mine"), transpose, SILENT)
                     for transpose in (False, True))
    np.testing.assert_array_equal(plain["test"][0], turned["test"][0].swapaxes(1, 2))
    assert plain["source"] != turned["source"] and plain["source"].rpartition("-")[0] == "mine"


def test_validation_images_are_a_twelfth_of_each_class(tmp_path):
    """Drawn at random, but always the same; no image is in two splits; names come from labels.txt"""
    (images, _), said = write_data(tmp_path, 4, n=240)["train"], []
    (tmp_path / "labels.txt").write_text("shirt\nshoe\nbag\nhat\n", "utf-8")
    data = mc.load_data_dir("--data-dir", str(tmp_path), False, said.append)
    assert np.bincount(data["val"][1]).tolist() == [5] * 4 and np.bincount(data["train"][1]).tolist() == [55] * 4
    together, images = np.concatenate([data["train"][0], data["val"][0]]).reshape(240, -1), images.reshape(240, -1)
    np.testing.assert_array_equal(together[np.lexsort(together.T)], images[np.lexsort(images.T)])
    again = mc.load_data_dir("--data-dir", str(tmp_path), False, SILENT)
    np.testing.assert_array_equal(data["val"][0], again["val"][0])
    assert mc.class_names(data) == ["shirt", "shoe", "bag", "hat"] and mc.class_names({"n_classes": 2}) == ["0", "1"]
    run = SimpleNamespace(data=data)
    assert multi_figures.prediction_label(run, (0, 1), (2, 3)) == "predicted\nshirt +\nshoe\ntrue bag + hat"
    run = SimpleNamespace(data={"names": ["a cardigan", "b"]})
    assert multi_figures.pair_label(run, (0, 1)) == "a cardig\u2026 +\nb"
    assert multi_figures.prediction_label(SimpleNamespace(data={}), (3, 5), (3, 8)) == "predicted\n3 + 5\ntrue 3 + 8"
    assert said == [f"{tmp_path.name}: 4 classes, 240 + 60 images; not MNIST: the results in this repository do not "
                    "apply"]
    (tmp_path / "labels.txt").write_text("shirt\nshoe\nbag", "utf-8")
    with pytest.raises(mc.InputError, match="labels.txt: 3 lines for 4 classes"):
        mc.load_data_dir("--data-dir", str(tmp_path), False, SILENT)


def test_files_that_do_not_fit_are_refused(tmp_path):
    """In one line that says what to do; more images than labels, an image of another size, too many classes, no file"""
    found = write_data(tmp_path / "a")
    for name, array, words in (("train-labels-idx1-ubyte", np.arange(9) % 3, "a label for each image"),
                               ("train-images-idx3-ubyte", np.zeros((48, 32, 32)), "images of shape"),
                               ("t10k-labels-idx1-ubyte", np.full(12, 99), "integers from 0 to at most 61")):
        write_data(tmp_path / "a")
        write_idx(tmp_path / "a" / name, array)
        of_file = f"^--data-dir .*a, {name.replace('labels-idx1', 'images-idx3')} .*{words}"
        with pytest.raises(mc.InputError, match=of_file):
            mc.load_data_dir("--data-dir", str(tmp_path / "a"), False, SILENT)
    write_data(tmp_path / "a")
    (tmp_path / "a" / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + bytes(20))
    with pytest.raises(mc.InputError, match="train-images-idx3-ubyte: says shape"):
        mc.load_data_dir("--data-dir", str(tmp_path / "a"), False, SILENT)
    (tmp_path / "a" / "train-images-idx3-ubyte").unlink()
    with pytest.raises(mc.InputError, match="--data-dir .*a: not all four idx files"):
        mc.load_data_dir("--data-dir", str(tmp_path / "a"), False, SILENT)
    assert found["train"][0].shape == (48, 28, 28)


@pytest.mark.parametrize("experiment, figures, film", [
    (mc, multi_figures, multi_film), pytest.param(ac, affnist_figures, affnist_film, marks=pytest.mark.slow)])
def test_any_data_set_is_trained_evaluated_drawn_and_filmed(call, tmp_path, experiment, figures, film):
    """With three classes, for every model; a network refuses other data in words"""
    write_data(tmp_path / "clothes")
    small = ["--n-train", 24, "--n-val", 4, "--n-test", 8, "--n-epochs", 1, "--batch-size", 12, "--threads", 1]
    small += ["--conv1-channels", 2, *(["--conv3-channels", 40] if experiment is mc else [])]
    models = experiment.MODELS
    code, out, err = call(experiment, experiment.main, *small, "--data-dir", "clothes", "--model", *models,
                          "--checkpoint", "r.npz", "--out-json", "r.json")
    assert (code, err) == (0, ""), err
    assert "clothes: 3 classes, 48 + 12 images; not MNIST" in out
    found = json.loads((tmp_path / "r.json").read_text("utf-8"))["runs"]
    assert all(run["source"].startswith("clothes-") for run in found)
    path = f"r.{experiment.DEFAULT_MODELS[None][0]}-0.npz"
    network = experiment.load_network(path)
    assert network.config.n_classes == 3 and network.source == found[0]["source"]
    few = ["--n-test", 8, "--data-dir", "clothes"]
    for main, flags in ((experiment.main, few), (figures.main, [*few, "--outdir", "viz"]),
                        (film.main, ["--data-dir", "clothes", "--out", "a.gif"] + (
                            ["--frames", 2, "--index", 1] if experiment is ac else []))):
        code, out, err = call(experiment, main, "--load", path, *flags)
        assert (code, err) == (0, ""), err
    assert list(tmp_path.glob("viz/*.png")) and (tmp_path / "a.gif").stat().st_size > 1000
    write_data(tmp_path / "letters", 5)
    for flags, words in ((("--load", path), f"{path}: was trained on clothes-"),
                         (("--load", path, "--data-dir", "letters"), "(3 classes), and these data are letters-"),
                         (("--load", "--data-dir", "letters"), "was trained on mnist (10 classes)"),
                         (("--digits", "synthetic", "--data-dir", "letters"), "--data-dir has no effect")):
        code, _, err = call(experiment, experiment.main, *flags)
        assert code == 2 and words in err and err.count("\n") == 1, err


def test_figures_of_other_images_do_not_speak_of_digits():
    fig = new_figure(2, "Two overlapping digits, each from its own digit capsule", "true digits in orange")
    fig.subplots().set_title("the missed digit")
    call_images(fig)
    assert [text.get_text() for text in (fig._suptitle, fig._supxlabel, fig.axes[0].title)] == [
        "Two overlapping images, each from its own class capsule", "true classes in orange", "the missed image"]


def test_a_network_knows_its_data_by_their_content_and_the_classes_follow_from_the_labels(tmp_path):
    """Its folder may have another name; arrays of one's own need no n_classes; a label beyond it is refused"""
    data = toy_digits() | {"source": "pictures"}
    few = {name: (images[labels < 3], labels[labels < 3]) for name, (images, labels) in list(data.items())[1:]}
    three = data | few
    assert mc.fit_to_data(mc.Config(), three).n_classes == 3 and mc.fit_to_data(mc.Config(), data).n_classes == 10
    assert mc.fit_to_data(mc.Config(), three | {"source": "mnist"}).n_classes == 10
    with pytest.raises(mc.InputError, match="has label 9, and n_classes is 4"):
        mc.fit_to_data(mc.Config(), data | {"n_classes": 4})
    network, config = SimpleNamespace(source="clothes-0123abcd"), mc.Config(n_classes=3)
    assert mc.fit_to_data(config, three | {"source": "other name-0123abcd"}, network) is config
    with pytest.raises(mc.InputError, match="was trained on my drawings"):              # names without a digest
        mc.fit_to_data(config, three | {"source": "your drawings"}, SimpleNamespace(source="my drawings"), "file")
    assert mc.data_name("clothes-0123abcd") == "images of clothes"
    assert mc.data_name("my drawings") == "images of my drawings"
    with pytest.raises(mc.InputError, match="or a network that was trained on these as --load"):
        mc.fit_to_data(config, three | {"source": "clothes-0123abce"}, network, "file")
    assert mc.remark([config], "clothes-0123abcd") == ac.remark([ac.Config()], "pictures") == ""


def test_chance_follows_the_number_of_classes():
    """Of 45 pairs of 10 classes one is right, 17 have at least one right class; of 3 pairs of 3 classes 1, and all"""
    assert mc.chance(mc.Config()) == pytest.approx((1 / 45, 17 / 45))
    assert mc.chance(mc.Config(n_classes=3)) == pytest.approx((1 / 3, 1))
    assert mc.chance(mc.Config(n_classes=2)) == (1, 1)


WRONG = {                          # what is done to the training images or labels -> the conversion that is named
    "floats": (lambda x, y: (x / 255, y), "(255 * images).round().astype(np.uint8)"),
    "bool": (lambda x, y: (x > 0, y), "(255 * images).round().astype(np.uint8)"),
    "standardized": (lambda x, y: ((x - x.mean()) / x.std(), y), "images.astype(np.uint8), of gray levels"),
    "flat": (lambda x, y: (x.reshape(len(x), -1), y), "images.reshape(-1, 28, 28)"),
    "channel": (lambda x, y: (x[..., None], y), "images[..., 0]"),
    "rgb": (lambda x, y: (x[..., None].repeat(3, -1), y), "images.mean(-1).round().astype(np.uint8)"),
    "size": (lambda x, y: (x[:, :20], y), "images of shape (n, 28, 28), at least one"),
    "empty": (lambda x, y: (x[:0], y[:0]), "at least one"),
    "one-hot": (lambda x, y: (x, np.eye(10)[y]), "labels.argmax(1)"),
    "fewer": (lambda x, y: (x, y[:-1]), "a label for each image"),
    "float labels": (lambda x, y: (x, y.astype(float)), "labels.astype(int)"),
    "negative": (lambda x, y: (x, y.astype(int) - 1), "labels - labels.min()")}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("experiment", [runs.MULTI, runs.AFF])
def test_arrays_that_train_cannot_take_are_refused_with_the_conversion(experiment, name):
    (config, _), module, data = toy(experiment), EXPERIMENTS[experiment], toy_digits()
    change, remedy = WRONG[name]
    with pytest.raises(module.InputError) as error:
        module.train(config, data=data | {"train": change(*data["train"])})
    assert remedy in str(error.value) and "data['train']" in str(error.value)
    with pytest.raises(module.InputError, match="data has no 'val'"):
        module.train(config, data={name: part for name, part in data.items() if name != "val"})


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_source_of_ones_own_is_trained_reported_saved_and_loaded(experiment, tmp_path):
    """Digits also without test images, which train() does not need"""
    (config, data), module, said = toy(experiment), EXPERIMENTS[experiment], []
    data = data | {"source": "my drawings"}
    params, history = module.train(config, data={name: part for name, part in data.items() if name != "test"})
    with module.Runner(1) as runner:
        tests = module.evaluate_test_sets(params, data, config, runner)
    module.report(config, module.test_result(config, params, history, tests), tests, said.append)
    assert "images of my drawings" in "".join(said) or experiment == runs.NORB
    module.save_weights(tmp_path / "w.npz", config, params, history)
    assert module.load_network(tmp_path / "w.npz").source == "my drawings"


# ---------------------------------------------------------------- pictures, predictions

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
    data = mc.load_data_dir("--data-dir", str(tmp_path / "data"), False, SILENT)
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
                        "--conv1-channels", 2, "--predictions", "p.csv", "--quiet")
    assert (code, err) == (0, "")
    (tmp_path / "full" / "labels.txt").mkdir(parents=True)
    code, _, err = call(mc, make_idx.main, "drawings", "full")
    assert code == 2 and "labels.txt" in err and [path.name for path in (tmp_path / "full").iterdir()] == ["labels.txt"]
    write_data(tmp_path / "zipped", zipped=True)
    (tmp_path / "drawings" / "bar" / "0.jpg").write_bytes(b"no picture")
    for flags, words in ((("drawings", "data"), "data: holds a data set"), (("drawings", "zipped"), "holds a data set"),
                         (("drawings", "x", "--seed", -1), "--seed -1: must be at least 0"),
                         (("none", "x"), "none: no such folder. Give one that"), (("drawings", "x"), "0.jpg: is not a"),
                         (("drawings/bar", "x"), "has 0 folders"), (("drawings",), "OUT")):
        code, _, err = call(mc, make_idx.main, *flags)
        assert code == 2 and words in err and err.count("\n") == 1 and not (tmp_path / "x").exists(), err


@pytest.mark.parametrize("experiment", [mc, ac])
def test_predictions_of_every_test_image(call, tmp_path, experiment):
    """Their hits are those of the report; of one network only. A CNN has no lengths"""
    cnn = experiment.Config(model="cnn", n_classes=2)
    assert next(experiment.prediction_rows({}, {}, cnn, None))[-2:] == ["score_0", "score_1"]
    write_data(tmp_path / "clothes")
    small = ["--n-train", 24, "--n-val", 4, "--n-test", 8, "--n-epochs", 1, "--batch-size", 12, "--data-dir", "clothes",
             "--conv1-channels", 2, *(["--conv3-channels", 4] if experiment is mc else [])]
    code, _, err = call(experiment, experiment.main, *small, "--predictions", "p.csv", "--out-json", "r.json")
    assert (code, err) == (0, "")
    with open(tmp_path / "p.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = json.loads((tmp_path / "r.json").read_text("utf-8"))
    lengths = np.array([[float(row[f"length_{j}"]) for j in range(3)] for row in rows])
    if experiment is mc:
        assert [int(row["index"]) for row in rows] == list(range(8))
        hits = sum((row["true_1"], row["true_2"]) == (row["predicted_1"], row["predicted_2"]) for row in rows)
        assert hits == found["test_hits"]
        assert all({int(row["predicted_1"]), int(row["predicted_2"])} == set(np.argsort(-of)[:2])
                   for row, of in zip(rows, lengths) if len(set(of)) == 3)
    else:
        for key in ("familiar", "any_position", "centered", "affine"):
            of_test = [row for row in rows if row["test"] == key]
            assert sum(row["true"] == row["predicted"] for row in of_test) == found[f"{key}_hits"] and len(of_test) == 8
    code, _, err = call(experiment, experiment.main, *small, "--predictions", "p.csv", "--n-seeds", 2)
    assert code == 2 and "--predictions p.csv: is for one network" in err
