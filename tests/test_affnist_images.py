"""Any square images: --task images of affnist_capsnet.py, in which side and channels come from the data. The gradients
of its networks: test_affnist_networks.py."""
import dataclasses
import json

import affnist_capsnet as ac
import multimnist_capsnet as mc
from lab.figures import drawn_channels
from lab.messages import InputError
from lab.networks import Network

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import assert_refused, idx, toy_images

import make_affnist_capsnet_gif as film
import predict as program
import probe_affnist_capsnet as probe
import visualize_affnist_capsnet as figures

ANY = ac.Config(task="images")


def fitted(side, channels, **more):
    """Return a Config for images, and such images"""
    data = toy_images(side, channels)
    small = dict(conv1_channels=2, n_train=20, n_val=8, n_test=20, n_epochs=1, batch_size=20, threads=1)
    return ac.fit_to_data(ac.Config(**small | {"task": "images"} | more), data), data


def write_images(folder, side, channels, n_classes=3):
    """Write four idx files of images, with a dimension of channels also if there is only one; return the arrays"""
    folder.mkdir()
    data = toy_images(side, channels, n_classes)
    for split, name in ("train", "train"), ("test", "t10k"):
        images, labels = data[split]
        images = images.reshape(-1, side, side, channels)
        (folder / f"{name}-images-idx4-ubyte").write_bytes(idx(images))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
    return data


# -------------------------------------------------------------- each channel reaches its own weights

def conv1_by_hand(images, w, at):
    """Return what Conv1 computes at a position, after its ReLU, (N, F), of uint8 images (N, H, W, C): each channel with
    its own weights w (K, K, C, F), without the help of another function"""
    row, column = at
    K, _, C, F = w.shape
    y = np.zeros((len(images), F))
    for n in range(len(images)):
        for ky in range(K):
            for kx in range(K):
                for c in range(C):
                    y[n] += float(images[n, row + ky, column + kx, c]) / 255 * w[ky, kx, c]
    return np.maximum(y, 0)


def conv1_of(data, config, at, w):
    """Return what the network computes there of the first training images, as it takes them in training"""
    params = {name: p.astype(float) for name, p in ac.init_params(config).items()} | {"conv1_w": w}
    samples = next(ac.epoch_samples(data, 0, config))
    images = ac.to_batch(samples, np.arange(3), float)["images"]
    _, caches = ac.convolutions_forward(params, images, config, None)
    *_, y = caches[0]                                                                   # (H, N, W, F)
    row, column = at
    return y[row, :, column]


def first_images(data, config):
    """Return the first three training images of an epoch"""
    images, labels = data["train"]
    order = ac.endless_permutations(len(labels), ac.rng_for(config.seed, ac.BATCHES, 0))
    return images[[next(order) for _ in range(3)]]


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_each_channel_meets_its_own_weights(channels):
    config, data = fitted(29, channels, norm="none", padding=0, model="vector-gap")
    rng = np.random.default_rng(0)
    w = rng.standard_normal((3, 3, channels, 2))
    images, at = first_images(data, config), (4, 7)
    np.testing.assert_allclose(conv1_of(data, config, at, w), conv1_by_hand(images, w, at), rtol=1e-10)


def test_a_network_that_gives_every_channel_the_first_is_found_out(monkeypatch):
    """The check itself: with the fault planted where images enter, the gradients are still right"""
    config, data = fitted(29, 3, norm="none", padding=0, model="vector-gap")
    right = ac.padded_input

    def planted(params, images, config):
        return right(params, np.repeat(images[..., :1], 3, -1), config)
    monkeypatch.setattr(ac, "padded_input", planted)
    w, images, at = np.random.default_rng(0).standard_normal((3, 3, 3, 2)), first_images(data, config), (4, 7)
    assert not np.allclose(conv1_of(data, config, at, w), conv1_by_hand(images, w, at), rtol=1e-2)


def test_a_reconstruction_is_compared_with_every_pixel_of_every_channel():
    """The summed squared error, times the paper's weight; its mean over pixels and channels after the test"""
    config, data = fitted(20, 3)
    assert config.recon_weight == 0.0005
    weights = ac.weights_of(ac.initial_state(config))
    chunk = next(ac.stream_digits(data, config, "test"))
    out, _ = ac.forward(weights, ac.prepare_images(chunk["images"], config), config, chunk["labels"])
    assert out["recon"].shape == (20, 1, 20, 20, 3)
    squares = 0.0
    for c in range(3):
        squares += ((out["recon"][:, 0, :, :, c] - chunk["images"][..., c] / 255) ** 2).sum()
    with ac.worker_threads(config) as workers:
        found = ac.evaluate(weights, [chunk], config, workers)
    assert found["recon_mse"] == pytest.approx(squares / (20 * 20 * 20 * 3), rel=1e-5)
    assert found["loss"] == pytest.approx(found["margin"] + 0.0005 * squares / 20, rel=1e-5)


# -------------------------------------------------------------- the images are used as they are

@pytest.mark.parametrize("side, channels", [(20, 1), (33, 3), (64, 4)])
def test_images_are_used_as_they_are(side, channels):
    config, data = fitted(side, channels)
    assert (config.side, config.channels, config.n_classes) == (side, channels, 10)
    for samples, split in (next(ac.stream_digits(data, config, "test")), "test"), (
            next(ac.epoch_samples(data, 0, config)), "train"):
        known = {image.tobytes() for image in data[split][0]}
        assert {image.tobytes() for image in samples["images"]} <= known
        assert samples["images"].shape[1:] == data[split][0].shape[1:]
    batch = ac.to_batch(samples, np.arange(3))["images"]
    np.testing.assert_array_equal(batch, samples["images"][:3] / np.float32(255))
    np.testing.assert_array_equal(batch, ac.prepare_images(samples["images"][:3], config))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_shift_moves_all_channels_alike(channels):
    """By at most so many pixels, all of which occur; what comes in is black"""
    image = toy_images(20, channels)["train"][0][0] // 2 + 1
    moved = ac.shift_images(np.stack([image] * 400), 2, np.random.default_rng(0))
    padded = np.pad(image, [(2, 2), (2, 2), (0, 0)][:image.ndim])
    candidates = {padded[row:row + 20, column:column + 20].tobytes() for row in range(5) for column in range(5)}
    assert {each.tobytes() for each in moved} == candidates
    config, data = fitted(20, channels, train_shift="2")
    assert {image.tobytes() for image in next(ac.stream_digits(data, config, "test"))["images"]} <= {
        image.tobytes() for image in data["test"][0]}                                   # tested as they are


def test_one_channel_may_have_an_axis():
    gray = toy_images(22, 1)
    with_axis = gray | {split: (gray[split][0][..., None], gray[split][1]) for split in ("train", "val", "test")}
    states = []
    for data in gray, with_axis:
        config = ac.fit_to_data(fitted(22, 1)[0], data)
        states.append(ac.train(config, data))
    for name, p in states[0]["params"].items():
        np.testing.assert_array_equal(p, states[1]["params"][name])


@pytest.mark.parametrize("model", ["capsnet-shared", "cnn-gap"])
def test_networks_learn_colors(model):
    """Two classes that differ in nothing but which channel is brighter"""
    rng = np.random.default_rng(0)
    data = {"source": "colors"}
    for split in ("train", "val", "test"):
        labels = np.arange(60) % 2
        images = rng.integers(0, 100, (60, 21, 21, 2))
        images[np.arange(60), :, :, labels] += 120
        data[split] = images.astype(np.uint8), labels
    config = ac.Config(task="images", model=model, conv1_channels=4, n_train=60, n_val=60, n_epochs=3, batch_size=20,
                       threads=1, warmup=0)
    assert ac.train(config, data)["history"]["epochs"][-1]["val_accuracy"] > 0.9


# -------------------------------------------------------------- what is refused

def with_images(data, change):
    """Return data whose training images are changed"""
    images, labels = data["train"]
    return data | {"train": (change(images), labels)}


@pytest.mark.parametrize("change, words", [
    (lambda x: x / 255, "train: images are float64 .* Give uint8"),
    (lambda x: x[:, :19, :19], "train: images are .*19, 19, 3.*sides from 20 to 64 and 1 to 4 channels"),
    (lambda x: np.pad(x, [(0, 0), (0, 41), (0, 41), (0, 0)]), "train: images are .*65, 65, 3"),
    (lambda x: x[:, :22], "train: images are .*22, 24, 3.*square"),
    (lambda x: x.repeat(2, -1), "train: images are .*24, 24, 6"),
    (lambda x: np.moveaxis(x, -1, 1), r"train: images are .*3, 24, 24.*\(n, side, side, channels\)"),
    (lambda x: x[..., 0], "train: images are .*40, 24, 24.*test .*24, 24, 3.*same size")])
def test_images_of_no_use_are_refused_in_one_line(change, words):
    with pytest.raises(ac.InputError, match=words):
        ac.train(ANY, with_images(toy_images(24, 3), change))


@pytest.mark.parametrize("module, config", [
    (ac, ac.Config()), (ac, ac.Config(task="mnist")), (mc, mc.Config())])
def test_tasks_of_digits_refuse_other_images_and_say_what_takes_them(module, config):
    for side, channels in (28, 3), (32, 1):
        with pytest.raises(module.InputError, match="gray digits, uint8 .n, 28, 28.*--task images"):
            module.train(config, toy_images(side, channels))


@pytest.mark.parametrize("given, words", [
    ({"side": 32}, "32x32 px, 1 channel: --task affnist is for gray digits"),
    ({"task": "mnist", "channels": 3}, "28x28 px, 3 channels: --task mnist"),
    ({"task": "images", "side": 19}, "sides from 20 to 64"), ({"task": "images", "channels": 5}, "1 to 4 channels"),
    ({"task": "images", "train_shift": "full"}, "--train-shift full: .* Give 0 to 10 px"),
    ({"task": "images", "affnist_dir": "x"}, "--affnist-dir applies only to --task affnist"),
    ({"task": "images", "side": 21, "padding": 0}, "--padding 0: images of 21 px .* Give --padding 2 or more")])
def test_settings_that_do_not_go_together_are_refused(given, words):
    with pytest.raises(ac.InputError, match=words):
        ac.Config(**given)
    if "padding" in given:
        assert ac.Config(**given | {"padding": 2}).padding == 2


@pytest.mark.parametrize("model", [*ac.CAPSULES, *ac.CNNS])
@pytest.mark.parametrize("side, channels", [(20, 4), (64, 1)])
def test_every_model_has_all_sides(model, side, channels):
    config = ac.Config(task="images", model=model, side=side, channels=channels)
    shapes = ac.param_shapes(config)
    assert min(map(min, shapes.values())) > 0
    if "dec3_b" in shapes:
        assert shapes["dec3_b"] == (side * side * channels,)


# -------------------------------------------------------------- on the command line

SMALL = ["--task", "images", "--conv1-channels", 2, "--n-train", 24, "--n-val", 3, "--n-epochs", 1, "--batch-size", 12,
         "--threads", 1]


@pytest.mark.parametrize("channels", [1, 3])
def test_color_files_are_trained_tested_and_resumed(call, tmp_path, channels):
    data = write_images(tmp_path / "pictures", 21, channels)
    code, out, err = call(ac, ac.main, *SMALL, "--data-dir", "pictures", "--outdir", "run")
    assert (code, err) == (0, "") and "images of pictures" in out and "correct test images" in out
    config, state = ac.load("run")
    assert (config.side, config.channels, config.n_classes) == (21, channels, 3)
    assert state["params"]["conv1_w"].shape == ((3, 3, 3, 2) if channels == 3 else (1, 3, 3, 2))
    read = ac.read_idx_folder("pictures")
    np.testing.assert_array_equal(read["test"][0].squeeze(), data["test"][0])
    found = json.loads((tmp_path / "run" / "metrics.json").read_text("utf-8"))
    assert found["test_n"] == 40 and found["config"]["task"] == "images"
    code, again, err = call(ac, ac.main, "--load", "run", "--data-dir", "pictures", "--out-json", "again.json")
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "again.json").read_text("utf-8"))["test_hits"] == found["test_hits"]
    assert "this run is finished" in call(ac, ac.main, *SMALL, "--data-dir", "pictures", "--outdir", "run")[1]
    write_images(tmp_path / "larger", 33, channels)
    assert_refused(call(ac, ac.main, "--load", "run", "--data-dir", "larger"),
                   f"run: was trained on images of {ac.size_in_words(config)}, and these have 33x33 px")
    for flags in ["--task", "affnist"], ["--task", "mnist"]:
        assert_refused(call(ac, ac.main, *flags, "--data-dir", "pictures"), "Other square images, gray or in color: ")
    assert_refused(call(mc, mc.main, "--data-dir", "pictures"), "affnist_capsnet.py --task images")


@pytest.mark.parametrize("channels", [2, 3])
def test_figures_show_images_with_their_channels(call, tmp_path, channels):
    """In color, or two channels side by side, reconstructions too; of other sizes one line"""
    write_images(tmp_path / "pictures", 21, channels)
    write_images(tmp_path / "larger", 33, channels)
    call(ac, ac.main, *SMALL, "--data-dir", "pictures", "--outdir", "run")
    names, of_data = ["examples", "reconstructions", "perturbation", "confusion"], ["--data-dir", "pictures"]
    code, out, err = call(ac, figures.main, "--load", "run", *of_data, "--outdir", "viz", "--only", *names)
    assert (code, err) == (0, "")
    assert {path.stem for path in (tmp_path / "viz").glob("*.png")} == set(names)
    assert_refused(call(ac, figures.main, "--load", "run", "--data-dir", "larger", "--outdir", "viz"),
                   f"trained on images of 21x21 px, {channels} channel")
    for tool, words in (film, "Give such networks"), (probe, "Give such a network"):
        assert_refused(call(ac, tool.main, "--load", "run", *of_data), words)


def test_channels_are_drawn_side_by_side():
    images = np.arange(2 * 3 * 4 * 2).reshape(2, 3, 4, 2)
    drawn = drawn_channels(images)
    np.testing.assert_array_equal(drawn[:, :, :4], images[..., 0])
    np.testing.assert_array_equal(drawn[:, :, 4:], images[..., 1])
    assert drawn_channels(images[..., :1].repeat(3, -1)).shape == (2, 3, 4, 3)
    four = drawn_channels(np.concatenate([images, images + 100], -1))                  # two rows of two
    np.testing.assert_array_equal(four, np.block([[images[..., 0], images[..., 1]],
                                                  [images[..., 0] + 100, images[..., 1] + 100]]))


@pytest.mark.parametrize("task, cmap", [("images", "gray"), ("mnist", "gray_r")])
def test_gray_images_are_drawn_as_they_are_and_digits_as_on_paper(digits, task, cmap):
    """Photographs were negatives"""
    config = ac.fit_to_data(ac.Config(task=task, conv1_channels=2, n_test=20, n_train=20, threads=1), digits)
    state = ac.initial_state(config)
    run = Network("net", config, config, ac.weights_of(state), {"source": "synthetic"}, digits)
    for fig in figures.draw_examples(run), figures.draw_reconstructions(run):
        assert {image.get_cmap().name for ax in fig.axes for image in ax.get_images()} == {cmap}
    labels = [ax.get_ylabel() for ax in figures.draw_examples(run).axes]
    assert ("training" if task == "images" else "training:\ntranslated") in labels
    assert "channels" not in str([text.get_text() for text in fig.texts])


@pytest.mark.parametrize("channels", [2, 4])
def test_notes_say_that_channels_are_beside_each_other(channels):
    config, data = fitted(21, channels)
    run = Network("net", config, config, ac.weights_of(ac.initial_state(config)), {"source": "pictures"}, data)
    for draw in figures.draw_examples, figures.draw_reconstructions, figures.draw_perturbation:
        assert f"The {channels} channels of an image are side by side, in gray" in draw(run).get_supxlabel()


def test_digits_are_images_too(digits):
    """MNIST's format, 28x28 px, as it is"""
    config = ac.fit_to_data(dataclasses.replace(ANY, n_test=5), digits)
    assert (config.side, config.channels) == (28, 1)
    np.testing.assert_array_equal(next(ac.stream_digits(digits, config, "test"))["images"], digits["test"][0][:5])


# -------------------------------------------------------------- predict.py

@pytest.fixture
def network(tmp_path):
    """network(side, channels) -> predict.py's Network of random weights, which is in tmp_path / "net.npz" """
    def make(side, channels):
        config, _ = fitted(side, channels)
        state = ac.initial_state(config)
        state["history"]["source"] = "pictures"
        ac.save(tmp_path / "net.npz", config, state)
        return program.load(tmp_path / "net.npz")
    return make


@pytest.mark.parametrize("side, channels", [(21, 1), (24, 2), (33, 3)])
def test_predictions_are_of_the_images_as_they_are(network, side, channels):
    net, images = network(side, channels), toy_images(side, channels)["test"][0][:5]
    out, _ = ac.forward(net.weights, images / np.float32(255), net.config)
    with_axis = images.reshape(5, side, side, channels)
    for given in images, images / 255, list(images), with_axis, np.moveaxis(with_axis, -1, 1):
        result = program.predict(net, given, reconstruct=True)
        np.testing.assert_allclose(result.scores, out["scores"], rtol=1e-4)
        assert not result.notes and result.reconstructions.shape == (5, 1, *images.shape[1:])
    assert program.predict(net, images[0]).scores.shape == (1, 10)


@pytest.mark.parametrize("change, words", [
    (lambda x: x[:, :20, :20], r"uint8 \(3, 20, 20, 3\).*\(n, 24, 24, 3\)"), (lambda x: x[..., 0], r"\(3, 24, 24\)"),
    (lambda x: x[..., :2], r"\(3, 24, 24, 2\)"), (lambda x: x.astype(float), "floats from .* to 25"),
    (lambda x: x.astype(int), "images are int64"), (lambda x: [x[0], x[1, :20]], "several sizes"),
    (lambda x: x[:0], r"\(0, 24, 24, 3\)"), (lambda x: x * np.nan, "have NaN or infinite levels")])
def test_a_network_of_colors_guesses_nothing(network, change, words):
    """A network with three channels once answered to three shifted gray rows"""
    net, images = network(24, 3), toy_images(24, 3)["test"][0][:3]
    with pytest.raises(InputError, match=words):
        program.predict(net, change(images))
    with pytest.raises(InputError, match="--center: is for digits"):
        program.predict(net, images, center=True)


def test_pictures_are_cropped_and_scaled_or_refused(network, call, tmp_path):
    """To the side of the network; in color for three channels, gray for one, refused for two; the table says what was
    done to them"""
    image = toy_images(24, 3)["test"][0][0]
    wide = np.pad(np.kron(image, np.ones((2, 2, 1), np.uint8)), [(0, 0), (6, 6), (0, 0)])
    for name, pixels in ("as it is", image), ("wide", wide), ("gray", image[..., 0]):
        imageio.imwrite(tmp_path / f"{name}.png", pixels)
    net = network(24, 3)
    found = program.picture_as_it_is(net, tmp_path / "as it is.png")
    np.testing.assert_array_equal(found.inputs[0], image / np.float32(255))
    assert not found.notes
    found = program.picture_as_it_is(net, tmp_path / "wide.png")
    np.testing.assert_array_equal(found.inputs[0], image / np.float32(255))
    said = str(found.notes)
    assert len(found.notes) == 2 and "cropped" in said and "scaled to 24x24 px" in said
    code, out, err = call(ac, program.main, "net.npz", "wide.png", "as it is.png")
    assert code == 0 and "note: 1 of 2 images: no square" in out + err
    found = program.picture_as_it_is(net, tmp_path / "gray.png")
    assert found.notes == {"gray: red, green and blue are equal": 1}
    assert_refused(call(ac, program.main, "net.npz", "wide.png", "--center"), "--center: is for digits")
    found = program.picture_as_it_is(network(24, 1), tmp_path / "gray.png")
    np.testing.assert_allclose(found.inputs[0], image[..., 0] / 255, atol=1 / 254)
    network(24, 2)
    assert_refused(call(ac, program.main, "net.npz", "wide.png"), "what the 2 channels of this network are. Give array")
