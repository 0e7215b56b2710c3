"""make_idx.py --as images: photographs and arrays of any kind become data for affnist_capsnet.py --task images."""
import affnist_capsnet as ac
from lab import images as lab_images
from lab.messages import InputError

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import assert_refused, toy_images

import make_idx
import predict as program


def write_photographs(folder, n=6, size=(40, 60), mode="color"):
    """Write pictures of two classes with a red or a blue area on a background of any color, wider than high"""
    rng = np.random.default_rng(0)
    for label, channel in (("fire", 0), ("sea", 2)):
        (folder / label).mkdir(parents=True, exist_ok=True)
        for k in range(n):
            image = np.full((*size, 3), rng.integers(0, 120, 3), np.uint8)
            image[10:30, 20:40, channel] = rng.integers(200, 255)
            imageio.imwrite(folder / label / f"{k}.png", image if mode == "color" else image[..., channel])
    return image


@pytest.mark.parametrize("flags, shape", [([], (32, 32, 3)), (["--gray"], (32, 32))])
def test_photographs_from_the_folder_to_the_prediction(call, tmp_path, flags, shape):
    write_photographs(tmp_path / "photos")
    code, out, err = call(ac, make_idx.main, "photos", "data", "--as", "images", "--side", 32, *flags)
    assert code == 0 and "as images of 32x32 px" in out and "--task images --data-dir data" in out, err
    notes = f"12 of 12 images: {lab_images.CROPPED}", "12 of 12 images: scaled to 32x32 px"
    assert all(note in out + err for note in notes)
    assert (lab_images.GRAYED in out + err) == bool(flags)
    data = ac.read_idx_folder("data")
    assert data["train"][0].shape[1:] == shape and data["names"] == ["fire", "sea"]
    small = ["--n-train", 20, "--n-val", 2, "--n-epochs", 4, "--batch-size", 5, "--model", "cnn-gap", "--warmup", 0]
    code, out, err = call(ac, ac.main, "--task", "images", "--data-dir", "data", *small, "--outdir", "run")
    assert (code, err) == (0, "")
    code, out, err = call(ac, program.main, "run", "photos/fire/0.png", "photos/sea/1.png")
    assert code == 0 and "of 2 images: scaled to 32x32 px" in out + err and "fire" in out and "sea" in out


def test_what_is_cropped_and_scaled_by_hand(tmp_path):
    """The square in the middle, and of it means of 2x2 px; nothing is inverted, and a black picture stays black"""
    image = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    imageio.imwrite(tmp_path / "a.png", image)
    found, words = lab_images.picture_to_image(tmp_path / "a.png", 32, False)
    middle = image[:, 8:72].astype(float)
    means = (middle[::2, ::2] + middle[1::2, ::2] + middle[::2, 1::2] + middle[1::2, 1::2]) / 4
    assert np.abs(found - means).max() <= 0.51 and len(words) == 2
    gray, _ = lab_images.picture_to_image(tmp_path / "a.png", 32, True)
    assert np.abs(gray - means @ [0.299, 0.587, 0.114]).max() <= 0.51
    found, words = lab_images.arrays_to_images(np.zeros((2, 32, 32, 3), np.uint8), 32, False)
    assert not found.any() and not words


SIZED = toy_images(24, 3)["test"][0][:6]


@pytest.mark.parametrize("given, said", [
    (SIZED, ()), (SIZED / 255, ()), (SIZED.astype(float), ()), (np.moveaxis(SIZED, -1, 1), ("channels moved",)),
    (list(SIZED), ()), (np.pad(SIZED, [(0, 0), (0, 0), (3, 3), (0, 0)]), ("no square",)),
    (SIZED.repeat(2, 1).repeat(2, 2), ("scaled to 24x24 px",))],
    ids=["uint8", "unit", "floats", "channels first", "list", "wide", "large"])
def test_arrays_of_any_usual_kind_become_the_same_images(given, said):
    found, notes = lab_images.arrays_to_images(given, 24, False)
    np.testing.assert_array_equal(found, SIZED)
    assert len(notes) == len(said) and all(word in str(notes) for word in said)


def test_two_channels_are_kept_and_trained_on(tmp_path):
    """Arrays (n, 48, 48, 2) in Python, from data to prediction; made anew in gray in their place"""
    data = toy_images(48, 2, n_classes=3)
    images, labels = data["train"]
    make_idx.make(tmp_path / "data", (images, labels), kind="images", side=48)
    read = ac.read_idx_folder(tmp_path / "data")
    config = ac.fit_to_data(ac.Config(task="images", n_train=20, n_epochs=1, conv1_channels=2, threads=1), read)
    assert (config.side, config.channels, config.n_classes) == (48, 2, 3)
    together = {image.tobytes() for split in ("train", "val", "test") for image in read[split][0]}
    assert together == {image.tobytes() for image in images}
    ac.save(tmp_path / "net.npz", config, ac.train(config, read))
    assert program.predict(program.load(tmp_path / "net.npz"), images[:3]).scores.shape == (3, 3)
    make_idx.make(tmp_path / "data", (images[..., 0], labels), kind="images", side=20)
    assert ac.read_idx_folder(tmp_path / "data")["test"][0].shape[1:] == (20, 20)


@pytest.mark.parametrize("images, words", [
    (SIZED - 128.0, "levels from -12"), (SIZED * np.nan, "nan"), (SIZED.astype(int) * 300, "levels from"),
    (np.zeros((3, 24, 24, 5)), r"Give \(n, H, W\) or"), (np.zeros((3, 77)), r"\(3, 77\)"),
    ([SIZED[0], SIZED[1, ..., 0]], "several numbers of channels|images are")])
def test_arrays_that_are_no_images_are_refused(images, words):
    with pytest.raises(InputError, match=words):
        lab_images.arrays_to_images(images, 24, False)


@pytest.mark.parametrize("flags, words", [
    (["--as", "images"], "needs --side N, from 20 to 64 px, such as --side 32"),
    (["--side", 32], "are for --as images"),
    (["--as", "images", "--side", 19], "--side 19: must be from 20 to 64"), (["--gray"], "are for --as images"),
    (["--as", "images", "--side", 32, "--center"], "--center: is for --as digits")])
def test_flags_that_do_not_go_together_are_refused(call, tmp_path, flags, words):
    write_photographs(tmp_path / "photos", 3)
    assert_refused(call(ac, make_idx.main, "photos", "data", *flags), words)
    assert not (tmp_path / "data").exists()


def test_digits_stay_the_default_and_colors_are_noticed(call, tmp_path):
    images, labels, _ = ac.synthesize_digits(40, 0)
    for digit in 0, 1:
        (tmp_path / "photos" / str(digit)).mkdir(parents=True)
        for k in range(3):
            ink = images[labels == digit][k].repeat(3, 0).repeat(3, 1)[..., None] / 255
            paper = np.array([250, 230, 40]) * (1 - ink)
            imageio.imwrite(tmp_path / "photos" / str(digit) / f"{k}.png", paper.astype(np.uint8))
    code, out, err = call(ac, make_idx.main, "photos", "data")
    assert code == 0 and "as digits: gray" in out and "6 of 6 images: in color" in out + err
    assert ac.read_idx_folder("data")["test"][0].shape[1:] == (28, 28)
    code, out, err = call(ac, make_idx.main, "photos", "again", "--as", "digits")
    assert code == 0 and "in color" not in out + err
    imageio.imwrite(tmp_path / "photos" / "0" / "flat.png", np.full((40, 40, 3), (99, 99, 99), np.uint8))
    assert_refused(call(ac, make_idx.main, "photos", "more"), "flat.png: no ink found. Mend or remove this file, or "
                   "keep pictures as they are: --as images --side 32")


def test_several_numbers_of_channels_are_refused():
    with pytest.raises(InputError, match="several numbers of channels .1, 3."):
        make_idx.data_set_of([make_idx.Chunk("", np.zeros(shape, np.uint8), ["a"] * 2, None)
                              for shape in ((2, 20, 20), (2, 20, 20, 3))], 0)
