"""Programs beside affnist_capsnet.py on networks and data of --task images: those for digits, pairs and toys refuse
them in one line that says what they show or what takes them; compare.py and the figures take them."""
import json

import affnist_capsnet as ac
import multimnist_capsnet as mc
import smallnorb_novel_viewpoint as norb
from lab import networks

import numpy as np
import pytest
from conftest import assert_refused, idx, toy_images

import compare
import explore
import make_affnist_capsnet_gif
import make_multimnist_capsnet_gif
import make_smallnorb_novel_viewpoint_gif
import probe_affnist_capsnet
import visualize_affnist_capsnet
import visualize_multimnist_capsnet
import visualize_smallnorb_novel_viewpoint

SMALL = ["--task", "images", "--conv1-channels", 2, "--n-train", 24, "--n-val", 3, "--n-epochs", 1, "--batch-size", 12,
         "--threads", 1]


def write_images(folder, side, channels, n_classes=3):
    """Write four idx files of images"""
    folder.mkdir()
    data = toy_images(side, channels, n_classes)
    for split, name in ("train", "train"), ("test", "t10k"):
        images, labels = data[split]
        (folder / f"{name}-images-idx{images.ndim}-ubyte").write_bytes(idx(images))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with images of 21x21 px in color, pictures, gray ones of 32x32 px, gray, and networks for them, of which
    that for pictures is the folder run"""
    place = tmp_path_factory.mktemp("images")
    for name, side, channels in ("pictures", 21, 3), ("gray", 32, 1), ("ten", 28, 3):
        write_images(place / name, side, channels, 10 if name == "ten" else 3)
        data = ac.read_idx_folder(str(place / name))
        config = ac.fit_to_data(ac.Config(task="images", conv1_channels=2, data_dir=str(place / name)), data)
        state = ac.initial_state(config)
        state["history"]["source"] = name
        (place / f"of-{name}").mkdir()
        ac.save(place / f"of-{name}" / "weights.npz", config, state)
    return place


OTHERS = "visualize_affnist_capsnet.py"                                                 # draws networks of images
PROGRAMS = {                       # name: program, the experiment whose flags it has, words on a network of images
    "gif of affine digits": (make_affnist_capsnet_gif, ac, OTHERS),
    "gif of pairs": (make_multimnist_capsnet_gif, mc, "not a network of multimnist_capsnet.py"),
    "gif of toys": (make_smallnorb_novel_viewpoint_gif, norb, "not a network of smallnorb_novel_viewpoint.py"),
    "probes": (probe_affnist_capsnet, ac, OTHERS), "explore": (explore, ac, OTHERS),
    "figures of pairs": (visualize_multimnist_capsnet, mc, "not a network of multimnist_capsnet.py"),
    "figures of toys": (visualize_smallnorb_novel_viewpoint, norb, "not a network of smallnorb_novel_viewpoint.py"),
    "multimnist_capsnet.py": (mc, mc, "not a network of multimnist_capsnet.py"),
    "smallnorb_novel_viewpoint.py": (norb, norb, "not a network of smallnorb_novel_viewpoint.py")}
WITH_DATA = [name for name, (program, module, _) in PROGRAMS.items() if module is not norb and program is not explore]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("which", ["pictures", "gray", "ten"])
def test_networks_of_images_are_refused_where_they_cannot_be_shown(call, place, tmp_path, name, which):
    """also of ten classes and 28x28 px; nothing is written"""
    program, module, words = PROGRAMS[name]
    for flags in [["--data-dir", place / which], []] if name in WITH_DATA else [[]]:
        assert_refused(call(module, program.main, "--load", place / f"of-{which}", *flags), words)
    assert not list(tmp_path.rglob("*.png")) + list(tmp_path.rglob("*.gif"))


@pytest.mark.parametrize("name", WITH_DATA)
@pytest.mark.parametrize("which", ["pictures", "gray", "ten"])
def test_images_are_refused_where_digits_are_needed(call, place, tmp_path, name, which):
    """by the pretrained networks or before a training; the line names what takes them"""
    program, module, _ = PROGRAMS[name]
    assert_refused(call(module, program.main, "--data-dir", place / which), "affnist_capsnet.py --task images")
    assert not list(tmp_path.rglob("*.png")) + list(tmp_path.rglob("*.gif"))


def test_figures_of_digits_refuse_images_and_draw_those_of_their_task(call, place, tmp_path):
    """trained on the way; --results and --task go together as for digits"""
    draw = visualize_affnist_capsnet.main
    assert_refused(call(ac, draw, "--data-dir", place / "pictures"), "affnist_capsnet.py --task images")
    code, out, err = call(ac, draw, *SMALL, "--data-dir", place / "pictures", "--outdir", "viz", "--only", "examples",
                          "training_curves", "confusion")
    assert (code, err) == (0, ""), err
    assert {path.stem for path in (tmp_path / "viz").iterdir()} == {"examples", "training_curves", "confusion"}


def test_what_needs_the_data_of_a_network_names_them(call, place):
    """and does not look for MNIST first; programs that only draw digits name neither data nor weights"""
    for program in ac, visualize_affnist_capsnet, compare:
        _, _, err = answer = call(ac, program.main, "--load", place / "of-ten")
        assert_refused(answer, "was trained on images of ten. Give their folder, or that of others to test on, as --da")
        assert err.count("error: ") == 1
    for flags in ["--task", "images"], ["--task", "mnist"]:
        assert_refused(call(ac, make_affnist_capsnet_gif.main, *flags),
                       f"{' '.join(flags)}: the animation shows networks of --task affnist")


def test_examples_name_the_classes_of_data_of_ones_own(place):
    """above each image, also if a class has no test image; digits have no names there"""
    config = ac.Config(task="images", data_dir=str(place / "pictures"), train_shift="0")
    data = ac.load_data(config)
    images, labels = data["test"]
    data |= {"names": ["a cat", "a dog", "hippopotamus"], "test": (images[labels != 1], labels[labels != 1])}
    config = ac.fit_to_data(config, data)
    run = networks.Network("", config, config, {}, {"source": data["source"]}, data)
    titles = [ax.get_title() for ax in visualize_affnist_capsnet.draw_examples(run).axes]
    assert titles == ["a cat", "a dog", "hippopotam\u2026", "a cat", "hippopotam\u2026", ""]
    data |= {"source": "mnist"}
    assert not any(ax.get_title() for ax in visualize_affnist_capsnet.draw_examples(run).axes)


def test_models_are_compared_on_images(call, place, tmp_path):
    """and trained networks; the confusion matrix of each is in its JSON"""
    code, out, err = call(ac, compare.main, "affnist_capsnet", "--model", "capsnet-shared", "cnn-gap", "--n-seeds", 2,
                          *SMALL, "--data-dir", place / "pictures")
    assert code == 0 and "capsnet-shared" in out and "cnn-gap" in out and "accuracy" in out, err
    runs = sorted(path.parent for path in tmp_path.rglob("metrics.json"))
    assert len(runs) == 4
    metrics = json.loads((runs[0] / "metrics.json").read_text("utf-8"))
    assert np.array(metrics["test_confusion"]).shape == (3, 3) and np.sum(metrics["test_confusion"]) == 40
    code, out, err = call(ac, compare.main, "--load", runs[0], runs[-1], "--data-dir", place / "pictures")
    assert code == 0 and "accuracy" in out, err
    assert_refused(call(ac, compare.main, "affnist_capsnet", "--model", "cnn-gap", "--n-seeds", 2, "--data-dir",
                        place / "pictures"), "affnist_capsnet.py --task images")
