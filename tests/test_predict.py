"""predict.py names what is in pictures and arrays of any usual kind, says what it did to them, and refuses the rest."""
import csv

import affnist_capsnet as ac
import multimnist_capsnet as mc
import smallnorb_novel_viewpoint as sn
from lab.messages import InputError, Progress

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import EXPERIMENTS, ROOT, toy

import predict as program
from predict import load, predict

WEIGHTS = ROOT / "weights"
IMAGES, LABELS, _ = ac.synthesize_digits(60, 5)
BIG = np.pad(IMAGES, ((0, 0), (6, 6), (6, 6)))
KINDS = {                          # arrays of the same digits, and what is said of them
    "uint8": (BIG, {}), "unit": (BIG / 255, {}), "float32 to 255": (BIG.astype(np.float32), {}),
    "some dark": (np.concatenate([255 - BIG[:9], BIG[9:]]), {"inverted": 9}), "channel first": (BIG[:, None], {}),
    "channel last": (BIG[..., None], {}), "flat": (BIG.reshape(60, -1), {}), "faint": (BIG / 510, {"faint": 60}),
    "colors": (np.stack([BIG] * 3, 1), {"colors": 60}), "28 px": (IMAGES, {"28x28 px: placed": 60}),
    "any size": ([*BIG[:50], *IMAGES[50:58], *np.pad(IMAGES[58:], 3)[3:5]], {"placed": 10, "other size": 2})}


@pytest.fixture(scope="module")
def network():
    return load(WEIGHTS / "affnist_cnn-gap.npz")


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_any_usual_kind_give_the_same_classes(network, kind):
    images, said = KINDS[kind]
    result = predict(network, images)
    assert (result.classes == predict(network, BIG).classes).mean() > 0.96         # scaled anew, or brighter
    assert (result.classes == LABELS).mean() > 0.9 and (result.names == result.classes.astype(str)).all()
    assert sorted(said.values()) == sorted(result.notes.values()) and all(word in str(result.notes) for word in said)
    np.testing.assert_allclose(result.scores.sum(1), 1, rtol=1e-5)     # of a CNN: probabilities


def test_a_network_says_what_the_experiment_computes():
    """Of one image alone, too"""
    network = load(WEIGHTS / "affnist_capsnet-shared.npz")
    result = predict(network, BIG, reconstruct=True)
    out, _ = ac.forward(network.weights, BIG[:16] / np.float32(255), network.config)
    np.testing.assert_allclose(result.scores[:16], out["scores"], rtol=1e-4, atol=1e-6)
    assert result.capsules.shape == (60, 10, 16) and result.reconstructions.shape == (60, 1, 40, 40)
    assert predict(network, BIG[3]).classes.tolist() == [result.classes[3]] and not predict(network, BIG > 99).notes
    margins = np.sort(result.scores, 1)
    assert [bool(doubt) for doubt in result.doubts] == (margins[:, -1] - margins[:, -2] < program.CLOSE).tolist()


def test_two_digits_are_named_in_a_pair(tmp_path):
    """by the names that its data had, unless others are given. Of two classes there is no third that leaves a doubt"""
    config = mc.Config(n_classes=2, conv1_channels=4, conv3_channels=4, digits="synthetic")
    state = mc.initial_state(config)
    state["history"] |= {"source": "drawings", "names": ["bar", "line"]}
    mc.save(tmp_path / "net.npz", config, mc.without_moments(state))
    result = predict(load(tmp_path / "net.npz"), [*IMAGES[:2], BIG[2]])
    assert program.table_of(load(tmp_path / "net.npz"), ["x"] * 3, result)[0][-3:] == ["", "", ""]
    assert set(result.doubts) == {""} and set(result.names[0]) == {"bar", "line"}
    (tmp_path / "labels.txt").write_text("a\nb", "utf-8")
    assert load(tmp_path / "net.npz", tmp_path / "labels.txt").names == ("a", "b")
    network = load(WEIGHTS / "multimnist_capsnet.npz")
    pairs = mc.generate_multimnist(IMAGES, LABELS, 60, np.random.default_rng(0))
    result = predict(network, pairs["composites"])
    assert mc.exact_match(result.classes, pairs["labels"]).mean() > 0.7 and result.names.shape == (60,)
    assert (np.subtract(*result.scores[np.arange(60), result.classes.T]) >= 0).all()


def test_toys_have_two_cameras_or_one(rng):
    network = load(WEIGHTS / "smallnorb_matrix-capsnet.npz")
    views = rng.integers(0, 256, (3, 2, 96, 96), dtype=np.uint8)
    result = predict(network, views)
    out, _ = sn.forward(network.weights, sn.crop_batch(sn.downsample(views), np.arange(3)), network.config)
    np.testing.assert_allclose(result.scores, out["a"], rtol=1e-4)
    assert result.names[0] in sn.NORB_NAMES and result.capsules.shape == (3, 5, 16) and not result.notes
    one = predict(network, views[:, 0].repeat(2, 1).repeat(2, 2))       # larger: averaged down again
    both = predict(network, np.stack([views[:, 0]] * 2, 1))
    assert "both" in str(one.notes) and both.scores == pytest.approx(one.scores)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_images_are_prepared_as_for_the_training(experiment):
    """Those of a batch that is not augmented; and all that image_shapes names fit the network"""
    module, (config, data) = EXPERIMENTS[experiment], toy(experiment)
    samples = next(iter(module.epoch_samples(data, 0, config)))
    pixels = samples["composites" if "composites" in samples else "images"]
    batch = module.to_batch(samples, np.arange(3))["images"]
    if pixels.dtype == np.uint8:
        np.testing.assert_array_equal(module.prepare_images(pixels[:3], config), batch)
    weights = module.weights_of(module.initial_state(config))
    for shape in module.image_shapes(config):
        x = module.prepare_images(np.zeros((3, *shape), np.uint8), config)
        out, _ = module.forward(weights, x, config)
        assert x.shape == batch.shape and x.dtype == batch.dtype
        assert module.class_activations(out, config).shape == out["scores"].shape


def test_labels_of_any_type_are_no_hindrance(tmp_path):
    """np.savez writes texts from pandas as Python objects, which are not read"""
    np.savez(tmp_path / "x.npz", labels=np.array(["a"] * 3, object), images=BIG[:3])
    np.testing.assert_array_equal(program.images_in(tmp_path / "x.npz", Progress()), BIG[:3])


def test_paths_and_buffers_are_images(network, tmp_path):
    """as the advice on dicts and on axes gives them, too"""
    paths = [tmp_path / f"{k}.png" for k in range(6)]
    for path, image in zip(paths, BIG):
        imageio.imwrite(path, image)
    expected = predict(network, BIG[:6])
    named = dict(zip("abcdef", BIG))
    for images in (paths, list(map(str, paths)), memoryview(np.ascontiguousarray(BIG[:6])),
                   [memoryview(np.ascontiguousarray(image)) for image in BIG[:6]], list(named.values()),
                   np.moveaxis(BIG[:6].transpose(1, 2, 0), -1, 0)):
        np.testing.assert_array_equal(predict(network, images).scores, expected.scores)
    assert predict(network, str(paths[2])).classes.tolist() == [expected.classes[2]]


@pytest.mark.parametrize("images, fault", [
    (BIG - 128.0, "from -128 to 127"), (BIG * 300.0, "to 7.65e"), (BIG * np.nan, "NaN or infinite"),
    (BIG / 127.5 - 1, r"Give \(x \+ 1\) / 2"), ([BIG[0], "x.png"], "x.png: no such file. Give a PNG"),
    ([BIG[0], None], "of type list"),
    ({"a": BIG, "b": 1}, r"are a dict with the keys 'a', 'b'. Give the array of one key, or.* list\(images.values"),
    (BIG.transpose(1, 2, 0),
     r"\(40, 40, 60\). Give \(n, H, W\), the images first: np.moveaxis\(images, -1, 0\)"),
    (BIG[:, :5], r"uint8 \(60, 5"),
    (BIG[0, 0], r"\(n, H, W\)"), (BIG[:0], r"\(n, H, W\)"), (BIG.astype(str), r"\(n, H, W\)"),
    (np.zeros((2, 33, 33)), "image 0: no ink")], ids=lambda x: str(x)[:12])
def test_what_is_no_picture_is_refused(network, images, fault):
    with np.errstate(all="ignore"):
        with pytest.raises(InputError, match=fault):
            predict(network, images)


def test_files_and_folders_become_a_table(call, network, tmp_path):
    """of which a folder's pictures are in order of their names; CSV and capsules hold the same"""
    for k in range(3):
        (tmp_path / f"pictures/of {k}").mkdir(parents=True)
        imageio.imwrite(tmp_path / f"pictures/of {k}/{k}.png", 255 - np.kron(IMAGES[k], np.ones((4, 4), np.uint8)))
    corner = np.pad(IMAGES[2], ((0, 12), (0, 12)))                      # of the network's size: it stays there
    imageio.imwrite(tmp_path / "pictures/of 2/a,b.png", corner)
    np.savez(tmp_path / "more.npz", images=BIG[:2])
    (tmp_path / "labels.txt").write_text("\n".join(f"digit {j}" for j in range(10)), "utf-8-sig")
    words = [WEIGHTS / "affnist_capsnet-shared.npz", "pictures", "more.npz", "--labels", "labels.txt"]
    code, out, err = call(mc, program.main, *words, "--out", "table.csv", "--capsules", "capsules.npz")
    assert (code, err) == (0, "") and "wrote table.csv" in out
    with open("table.csv", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["file", "class", "score", "next", "next score", "doubt"] and len(rows) == 6
    assert [row[1] for row in rows] == [f"digit {j}" for j in LABELS[[0, 1, 2, 2, 0, 1]]]
    assert rows[0][0].endswith("0.png") and rows[3][0].endswith("a,b.png") and rows[5][0] == "more.npz[1]"
    assert float(rows[3][2]) == pytest.approx(predict(load(words[0]), corner).scores.max(), abs=1e-3)
    with np.load("capsules.npz") as file:
        assert file["capsules"].shape == (6, 10, 16) and file["files"].tolist() == [row[0] for row in rows]
    code, out, _ = call(mc, program.main, *words[:2], *[words[1] + f"/of {k}" for k in range(2)])
    assert code == 0 and out.count("png") == 6 and "class" in out and "note: 5 of 6 images: 28x28 px: placed" in out
    assert "note: 5 of 6 images: of another size, or dark on light" in out


@pytest.mark.parametrize("words, fault", [
    (["none.npz", "x.png"], "none.npz: no such file"), (["labels.txt", "x.png"], "not a file of a trained network"),
    (["{}", "none.png"], "none.png: no such file"), (["{}", "home"], "holds no PNG or JPEG"), (["{}"], "PICTURE"),
    (["{}", "labels.txt"], "is not a readable picture"), (["{}", "bad.npz"], "not a file of arrays"),
    (["{}", "empty.npz"], "holds no images"), (["{}", "x.npy", "--labels", "labels.txt"], "has 1 name, and"),
    (["{}", "x.npy", "--out", "home"], "it is a folder")])
def test_wrong_input_is_one_line(call, tmp_path, words, fault):
    (tmp_path / "labels.txt").write_text("one\n", "utf-8")
    (tmp_path / "bad.npz").write_bytes(b"PK\3\4 no arrays")
    np.savez(tmp_path / "empty.npz", n=3)
    np.save(tmp_path / "x.npy", BIG[:1])
    code, out, err = call(mc, program.main, *[str(word).format(WEIGHTS / "affnist_cnn-gap.npz") for word in words])
    assert code == 2 and fault in err and err.startswith("error: ") and err.count("\n") == 1
