"""Data of one's own: four idx files of any data set, from 2 to 62 classes; arrays given to train."""
import dataclasses
import gzip
import json
import shlex
from types import SimpleNamespace

import affnist_capsnet as ac
import multimnist_capsnet as mc
from lab import figures as lab_figures
from lab import networks
from lab.data import EMNIST_NAME
from lab.figures import DIGITS, IMAGES, class_names, draw_confusion, new_figure, say_data, words_for

import numpy as np
import pytest
from conftest import EXPERIMENTS, assert_refused, idx, runs, toy, toy_digits, toy_flags
from matplotlib.text import Text

import make_affnist_capsnet_gif as affnist_film
import make_multimnist_capsnet_gif as multi_film
import visualize_affnist_capsnet as affnist_figures
import visualize_multimnist_capsnet as multi_figures


def write_idx(path, array, zipped=False):
    path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))


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


@pytest.fixture(params=[mc, ac], ids=lambda module: module.EXPERIMENT)
def script(request):
    """Each script that reads such files"""
    return request.param


def test_names_of_files(script, tmp_path):
    """With dashes or dots, raw or gzipped, with a prefix; of several data sets in a folder one is named"""
    for k, given in enumerate(({}, {"style": "train-images.idx3-ubyte"}, {"zipped": True}, {"prefix": "kuzushiji-"})):
        found = write_data(tmp_path / str(k), **given)
        data = script.read_idx_folder(tmp_path / str(k))
        np.testing.assert_array_equal(data["test"][0], found["test"][0])
        assert data["n_classes"] == 3 and data["source"] == ("kuzushiji" if k == 3 else str(k))
    write_data(tmp_path / "3", 5, "other-")
    with pytest.raises(script.InputError, match="3: no idx files of one data set. Give FOLDER/PREFIX"):
        script.read_idx_folder(tmp_path / "3")
    assert script.read_idx_folder(tmp_path / "3" / "other")["n_classes"] == 5


@pytest.mark.parametrize("prefix", ["emnist-letters-", "E-MNIST.letters-"])
def test_emnist_is_transposed_and_its_letters_are_counted_from_0(script, tmp_path, prefix):
    """It is known by its name as in make_idx.py and predict.py"""
    assert script.EMNIST_NAME == EMNIST_NAME
    images, labels = write_data(tmp_path, 26, prefix, first=1, zipped=True, n=104)["test"]
    data = script.read_idx_folder(tmp_path)
    np.testing.assert_array_equal(data["test"][0], images.swapaxes(1, 2))
    np.testing.assert_array_equal(data["test"][1], labels)
    assert data["n_classes"] == 26


def test_validation_images_are_a_twelfth(script, tmp_path):
    """Drawn at random, but always the same; no image is in two splits; names come from labels.txt"""
    images, _ = write_data(tmp_path, 4, n=240)["train"]
    (tmp_path / "labels.txt").write_text("shirt\nshoe\nbag", "utf-8")
    with pytest.raises(script.InputError, match="labels.txt has 3 names. Give 4, one a line"):
        script.read_idx_folder(tmp_path)
    (tmp_path / "labels.txt").write_bytes("sh\xe9\nb\nc\nd".encode("latin-1"))
    with pytest.raises(script.InputError, match="labels.txt is not UTF-8. Save it as UTF-8"):
        script.read_idx_folder(tmp_path)
    (tmp_path / "labels.txt").write_text("shirt\nshoe\nbag\nhat\n\n", "utf-8-sig")
    data = script.read_idx_folder(tmp_path)
    assert len(data["val"][1]) == 20 and len(data["train"][1]) == 220 and len(set(data["val"][1])) == 4
    together, images = np.concatenate([data["train"][0], data["val"][0]]).reshape(240, -1), images.reshape(240, -1)
    np.testing.assert_array_equal(together[np.lexsort(together.T)], images[np.lexsort(images.T)])
    np.testing.assert_array_equal(data["val"][0], script.read_idx_folder(tmp_path)["val"][0])
    assert class_names(data) == ["shirt", "shoe", "bag", "hat"]
    run = SimpleNamespace(data=data)
    assert multi_figures.prediction_label(run, (0, 1), (2, 3)) == "predicted\nshirt +\nshoe\n\ntrue bag + hat"


def test_validation_images_of_sorted_files_are_of_all_classes(script, tmp_path):
    """A twelfth of 50 is 5, rounded up"""
    write_data(tmp_path, 2, n=50)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.repeat([0, 1], 25))
    data = script.read_idx_folder(tmp_path)
    assert len(data["val"][1]) == 5 and set(data["val"][1]) == {0, 1}


@pytest.mark.parametrize("train, test, expected", [
    ([1, 2, 3], [1, 2, 3], [0, 1, 2]), ([1, 2], [0, 1, 2], [0, 1, 2]), ([0, 1, 2], [1, 2], [1, 2])])
def test_labels_begin_at_1_if_no_file_has_a_0(script, tmp_path, train, test, expected):
    write_data(tmp_path, 3)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.resize(train, 48))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.resize(test, 12))
    data = script.read_idx_folder(tmp_path)
    assert sorted(set(data["test"][1])) == expected and data["n_classes"] == 3


@pytest.mark.parametrize("folder", ["mnist", "synthetic"])
def test_files_in_a_folder_of_that_name_are_not_taken_for_mnist(script, tmp_path, folder):
    write_data(tmp_path / folder)
    data = script.read_idx_folder(tmp_path / folder)
    assert data["source"] == f"{folder}-files"
    assert script.data_name(data["source"]) == f"images of {folder}-files"


def test_a_part_of_other_data_has_all_classes(tmp_path):
    """Also of files that are sorted by class; of MNIST they are the first"""
    data = {"source": "mine", "test": (np.zeros((300, 28, 28), np.uint8), np.repeat(np.arange(3, dtype=np.uint8), 100))}
    for source, classes in (("mine", {0, 1, 2}), ("mnist", {0})):
        parts = list(ac.stream_digits(data | {"source": source}, ac.Config(n_test=30), "test"))
        assert set(np.concatenate([part["labels"] for part in parts])) == classes


def test_files_that_do_not_fit_are_refused(script, tmp_path):
    """In one line; more images than labels, images of another size, too many classes, no whole file, a file missing"""
    write_data(tmp_path)
    for name, array, words in (("train-labels-idx1-ubyte", np.arange(9) % 3, ", train: labels are .* Give 48"),
                               ("train-images-idx3-ubyte", np.zeros((48, 32, 32)), r", (train|val): images are .*, "
                                r"32, 32\).* gray digits, uint8 \(n, 28, 28\)\. Other .*: .*--task images"),
                               ("t10k-labels-idx1-ubyte", np.full(12, 99), ", test: labels are .*from 0 to 61")):
        write_data(tmp_path)
        write_idx(tmp_path / name, array)
        with pytest.raises(script.InputError, match=words):
            script.fit_to_data(script.Config(), script.read_idx_folder(tmp_path))
    write_data(tmp_path, prefix="emnist-")
    write_idx(tmp_path / "emnist-train-images-idx3-ubyte", np.arange(9))
    with pytest.raises(script.InputError, match=r", train: images are uint8 \(9,\)"):
        script.read_idx_folder(tmp_path / "emnist")
    for content in b"", b"\0\0\x08\x03" + bytes(20), b"\x1f\x8bno gzip":       # others: test_experiments.py
        (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
        with pytest.raises(script.InputError, match="train-images-idx3-ubyte"):
            script.read_idx_folder(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    with pytest.raises(script.InputError, match="make_idx.py"):
        script.read_idx_folder(tmp_path)


@pytest.mark.parametrize("experiment, figures, film", [
    (mc, multi_figures, multi_film), pytest.param(ac, affnist_figures, affnist_film, marks=pytest.mark.slow)])
def test_any_data_set_is_trained_evaluated_drawn_and_animated(call, tmp_path, monkeypatch, experiment, figures, film):
    """With three classes, which no figure calls digits; a network refuses other data in words"""
    texts, write_figure = [], lab_figures.write_figure

    def collect(fig, *more):
        texts.extend(text.get_text() for text in fig.findobj(Text))
        write_figure(fig, *more)
    monkeypatch.setattr(lab_figures, "write_figure", collect)
    write_data(tmp_path / "clothes")
    small = ["--n-train", 24, "--n-val", 4, "--n-test", 8, "--n-epochs", 1, "--batch-size", 12, "--threads", 1]
    small += ["--conv1-channels", 2, *(["--conv3-channels", 40] if experiment is mc else [])]
    code, out, err = call(experiment, experiment.main, *small, "--data-dir", "clothes", "--outdir", "run")
    assert (code, err) == (0, "") and "images of clothes" in out, err
    found, (config, _) = json.loads((tmp_path / "run" / "metrics.json").read_text("utf-8")), experiment.load("run")
    assert found["source"] == "clothes" and config.n_classes == 3
    few = ["--n-test", 8, "--data-dir", "clothes"]
    for main, flags in ((experiment.main, few), (figures.main, [*few, "--outdir", "viz"]),
                        (film.main, ["--data-dir", "clothes", "--out", "a.gif"] + (
                            ["--frames", 2, "--index", 1] if experiment is ac else []))):
        code, out, err = call(experiment, main, "--load", "run", *flags)
        assert (code, err) == (0, ""), err
    assert list(tmp_path.glob("viz/*.png")) and (tmp_path / "a.gif").stat().st_size > 1000
    assert len(texts) > 50 and not [text for text in texts if "digit" in text]
    write_data(tmp_path / "letters", 5)
    assert_refused(call(experiment, figures.main, "--load", "run", "--data-dir", "letters", "--outdir", "viz"),
                   "was trained on 3 classes, and these data have 5")


@pytest.mark.parametrize("experiment, more", [(runs.MULTI, []), (runs.AFF, ["--eval-split", "val"])])
def test_a_finished_run_names_the_command_that_tests_it_again(call, tmp_path, experiment, more):
    """on its own data, with all that is to be different"""
    module = EXPERIMENTS[experiment]
    write_data(tmp_path / "my clothes", 2)
    few = [flag for flag in toy_flags(experiment) if not flag.startswith("--digits")]
    flags = [*few, "--data-dir", "my clothes", "--outdir", "run"]
    assert call(module, module.main, *flags)[0] == 0
    changed = [*more, "--n-test", 5, "--recompute-statistics", 16]
    answer = call(module, module.main, *flags, *changed)
    assert_refused(answer, "run is finished, with")
    again = answer[2].partition("Test it again: ")[2]
    words = shlex.split(again.partition(f"{experiment}.py ")[2])
    code, out, err = call(module, module.main, *words, "--out-json", "again.json")
    assert (code, err) == (0, "") and "Test samples of images of my clothes" in out, err
    found = json.loads((tmp_path / "again.json").read_text("utf-8"))
    assert found["config"]["n_test"] == 5 and found["config"]["recompute_statistics"] == 16
    assert not more or found["config"]["eval_split"] == "val"


@pytest.mark.parametrize("experiment", [runs.MULTI, runs.AFF])
def test_a_run_knows_the_names_of_its_classes(experiment):
    module, (config, data) = EXPERIMENTS[experiment], toy(experiment)
    names = [*"ABCDEFGHIJ"]
    state = module.train(config, data | {"source": "letters", "names": names})
    assert module.class_names(state["history"]) == names
    assert module.class_names(module.train(config, data)["history"]) == [*"0123456789"]


def test_captions_speak_of_digits_where_all_classes_are():
    for names, words in ((None, IMAGES), (["0", "digit 1"], DIGITS), (["0", "A"], IMAGES)):
        assert words_for(mc, {"source": "mine", "names": names}) is words
    assert words_for(mc, {"source": "mnist"}) is words_for(ac, {"source": "synthetic"}) is DIGITS


@pytest.mark.parametrize("J", [2, 10, 62])
def test_a_confusion_matrix_has_the_percentage_of_each_cell_and_the_names(J):
    counts = np.diag(np.full(J, 3))
    counts[0, 1], counts[1] = 1, 0                                      # of class 1 there is no image
    names = [f"class {j}" for j in range(J)]
    fig = draw_confusion({"familiar": counts, "novel": counts}, names, "a title")
    for ax in fig.axes[:2]:
        assert [text.get_text() for text in ax.texts] == ["75", "25", *["100"] * (J - 2)]
        assert [text.get_text() for text in ax.get_xticklabels()] == names
        assert [text.get_text() for text in ax.get_yticklabels()][:2] == ["class 0 (4)", "class 1 (0)"]


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


def test_a_network_is_drawn_on_other_data_which_its_figures_say():
    """of classes with the same names, where both have names"""
    config, data = mc.Config(), toy_digits() | {"source": "mine", "names": [*"abcdefghij"]}
    for names, fits in ((data["names"], True), ([*"abcdefghik"], False), (None, False)):
        loaded = SimpleNamespace(config=config, weights={}, history={"source": "mnist", "names": names})
        if fits:
            network = networks.make(mc, "x", loaded, config, data)
        else:
            with pytest.raises(networks.InputError, match="x: was trained on other classes: (a, b.*k|0, 1.*9). These"):
                networks.make(mc, "x", loaded, config, data)
    fig = new_figure(2, "a title", "a note")
    say_data(fig, mc, data, [network, network])
    assert fig.get_supxlabel() == "a note\nTested on images of mine (trained on MNIST digits)."
    tested = dataclasses.replace(network, config=mc.Config(routing_iters=1))
    say_data(fig, mc, data | {"source": "mnist"}, [tested])
    say_data(fig, mc, data, [tested], of_training=True)
    assert fig.get_supxlabel().splitlines()[2:] == ["Tested with --routing-iters 1.", "Trained on MNIST digits."]


def test_a_figure_says_the_settings_of_the_training_that_are_no_defaults():
    data = toy_digits() | {"source": "mnist"}

    def network(name, **given):
        config = mc.Config(**given)
        return networks.Network(name, config, config, {}, {"source": "mnist"}, data)
    long = network("long", preset="residual", warp=0.3, n_epochs=20, seed=3, threads=2)
    fig = new_figure(2, "a title")
    say_data(fig, mc, data, [long])
    assert fig.get_supxlabel() == "Trained with --warp 0.3 --n-epochs 20."
    fig = new_figure(2, "a title")
    say_data(fig, mc, data, [long, network("usual")])
    assert fig.get_supxlabel() == "long: trained with --warp 0.3 --n-epochs 20."


WRONG = {                          # what is done to the training images or labels
    "floats": lambda x, y: (x / 255, y), "flat": lambda x, y: (x.reshape(len(x), -1), y),
    "another size": lambda x, y: (x[:, :20], y), "more channels": lambda x, y: (x[..., None].repeat(3, -1), y),
    "empty": lambda x, y: (x[:0], y[:0]), "one-hot": lambda x, y: (x, np.eye(10)[y]), "fewer": lambda x, y: (x, y[:-1]),
    "float labels": lambda x, y: (x, y.astype(float)), "negative": lambda x, y: (x, y.astype(int) - 1),
    "too many classes": lambda x, y: (x, y + 99), "more bits": lambda x, y: (x.astype(np.uint16), y)}


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
