"""make_idx.py --as images: photographs and arrays of any kind become data for affnist_capsnet.py --task images."""
import affnist_capsnet as ac
from lab import images as lab_images
from lab.messages import InputError

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import ROOT, assert_refused, toy_images
from PIL import Image

import make_idx
import predict as program

NETWORK = ROOT / "weights/affnist_capsnet-shared.npz"               # of digits


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


def test_transparent_pictures_lie_on_white_which_is_said(call, tmp_path):
    """Half transparent black is gray; of files, and of pictures of the package PIL"""
    photographs = write_photographs(tmp_path / "photos")
    pixels = np.dstack([photographs, np.full(photographs.shape[:2], 255, np.uint8)])
    pixels[:20] = 0, 0, 0, 128
    imageio.imwrite(tmp_path / "photos/sea/clear.png", pixels)
    found, words = lab_images.picture_to_image(tmp_path / "photos/sea/clear.png", 40, False)
    assert lab_images.TRANSPARENT in words and (found[:20] == 127).all()
    code, out, err = call(ac, make_idx.main, "photos", "data", "--as", "images")
    assert code == 0 and f"1 of 13 images: {lab_images.TRANSPARENT}" in out + err
    picture = Image.fromarray(pixels)
    again, words = lab_images.picture_to_image(picture, 40, False)
    assert lab_images.TRANSPARENT in words and (again == found).all()
    arrays, notes = lab_images.arrays_to_images([picture] * 3, 40, False)
    assert notes[lab_images.TRANSPARENT] == 3 and (arrays == found).all()


@pytest.mark.parametrize("size, words", [
    ((30, 45), lab_images.CROPPED), ((30, 46), lab_images.MUCH_CROPPED), ((46, 30), lab_images.MUCH_CROPPED)])
def test_what_is_cut_off_is_said_if_it_is_much(size, words):
    """More than a third of the picture"""
    assert lab_images.done_to(size, 30) == {words}


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
    (SIZED - 128.0, "levels from -12"), (SIZED * np.nan, "NaN or infinite"), (SIZED.astype(int) * 300, "levels from"),
    (np.zeros((3, 24, 24, 5)), r"Give \(n, H, W\) or"), (np.zeros((3, 77)), r"\(3, 77\)"),
    ([SIZED[0], SIZED[1, ..., 0]], "several numbers of channels|images are")])
def test_arrays_that_are_no_images_are_refused(images, words):
    with pytest.raises(InputError, match=words):
        lab_images.arrays_to_images(images, 24, False)


@pytest.mark.parametrize("flags, words", [
    (["--as", "digits", "--side", 32], "are for --as images"), (["--as", "digits", "--gray"], "are for --as images"),
    (["--as", "images", "--side", 19], "--side 19: must be from 20 to 64"),
    (["--center", "--side", 32], "--center: is for --as digits"),
    (["--as", "images", "--side", 32, "--center"], "--center: is for --as digits")])
def test_flags_that_do_not_go_together_are_refused(call, tmp_path, flags, words):
    write_photographs(tmp_path / "photos", 3)
    assert_refused(call(ac, make_idx.main, "photos", "data", *flags), words)
    assert not (tmp_path / "data").exists()


# -------------------------------------------------------------- drawings become digits, others images

DIGITS, DIGIT_LABELS, _ = ac.synthesize_digits(60, 0)


def colored(ink, paper, of):
    """Return ink, (h, w) from 0 to 1, in a color on paper of another, (h, w, 3)"""
    return of * ink[..., None] + paper * (1 - ink[..., None])


def photograph(k, size=(48, 48)):
    """Return a picture as a photograph is: areas of several colors, some of them shaded, and noise"""
    rng = np.random.default_rng(k)
    image = np.ones((*size, 3)) * rng.random(3)
    y, x = np.mgrid[:1:size[0] * 1j, :1:size[1] * 1j]
    for _ in range(6):
        top, left, height, width = rng.uniform(0.1, 0.9, 4)
        area = (np.abs(y - top) < height / 2) & (np.abs(x - left) < width / 2)
        image[area] = rng.random(3) * (0.5 + 0.5 * y[area])[:, None]
    return (image + rng.normal(0, 0.02, image.shape)).clip(0, 1)


def page(k, noise=0.01, shade=0.2, blue=False):
    """Return a large digit of a pen on paper, lit from one side"""
    ink = DIGITS[k].repeat(4, 0).repeat(4, 1) / 255
    image = colored(ink, np.array([0.9, 0.88, 0.8]), np.array([0.1, 0.1, 0.7 if blue else 0.1]))
    light = 1 - shade * np.mgrid[:1:112j, :1:112j].sum(0)[..., None] / 2
    return (image * light + np.random.default_rng(k).normal(0, noise, image.shape)).clip(0, 1)


DRAWN = {
    "MNIST's kind": lambda k: colored(DIGITS[k] / 255, np.zeros(3), np.ones(3)),
    "dark on light": lambda k: colored(DIGITS[k] / 255, np.ones(3), np.zeros(3)),
    "in color on color": lambda k: colored(DIGITS[k] / 255, *np.random.default_rng(k).random((2, 3))),
    "black on yellow": lambda k: colored(DIGITS[k] / 255, np.array([0.98, 0.9, 0.2]), np.zeros(3)),
    "cropped to its ink": lambda k: colored(DIGITS[k, 4:24, 4:24] / 255, np.ones(3), np.zeros(3)),
    "a lamplit page": page, "a blue pen": lambda k: page(k, blue=True), "noise": lambda k: page(k, 0.05),
    "blank": lambda k: np.full((30, 40, 3), 0.7)}
NOT_DRAWN = {
    "a photograph": photograph, "a wide one": lambda k: photograph(k, (40, 90)),
    "noise": lambda k: np.random.default_rng(k).random((32, 32, 3)),
    "in gray": lambda k: photograph(k).mean(-1, keepdims=True).repeat(3, -1),
    "a landscape": lambda k: np.stack([np.mgrid[:1:32j, :1:32j][0] * c for c in (0.3, 0.9, 0.5)], -1) ** 3
    + 0.3 * (np.mgrid[:9:32j, :9:32j].sum(0) % 1)[..., None],
    "ink in several colors": lambda k: (lambda ink: colored(ink, np.ones(3), 0.9 * np.eye(3)[
        np.arange(28) // 5 % 3][:, None]))(DIGITS[k] / 255),
    "a disc that fills it": lambda k: ((np.mgrid[-1:1:32j, -1:1:32j] ** 2).sum(0) < 0.9)[..., None] * np.ones(3),
    "two channels": lambda k: photograph(k)[..., :2]}


@pytest.mark.parametrize("kind", DRAWN)
def test_drawings_are_known(kind):
    """In one color on plain paper"""
    assert np.mean([lab_images.is_drawing(DRAWN[kind](k)) for k in range(20)]) > 0.8


@pytest.mark.parametrize("kind", NOT_DRAWN)
def test_other_pictures_are_no_drawings(kind):
    assert np.mean([lab_images.is_drawing(NOT_DRAWN[kind](k)) for k in range(20)]) < 0.4


def write_folder(folder, pictures):
    """Write pictures, arrays from 0 to 1, of two classes in turn"""
    for k, picture in enumerate(pictures):
        (folder / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
        imageio.imwrite(folder / "ab"[k % 2] / f"{k}.png", np.rint(255 * picture).astype(np.uint8))


@pytest.mark.parametrize("n_drawn, n_others, is_digits", [(12, 0, True), (0, 12, False), (7, 6, True), (7, 7, False)])
def test_a_folder_becomes_digits_if_more_than_half_are_drawings(call, tmp_path, n_drawn, n_others, is_digits):
    """and says why, and how to choose the other, which works; a folder of color photographs keeps its colors"""
    drawn = [DRAWN["in color on color"](k) for k in range(40)]
    drawn = [picture for picture in drawn if np.ptp(picture @ [0.299, 0.587, 0.114]) > 0.3][:n_drawn]
    write_folder(tmp_path / "x", [*drawn, *(photograph(k) for k in range(n_others))])
    code, out, err = call(ac, make_idx.main, "x", "data")
    if is_digits and n_others:                                          # a photograph may have no ink
        assert code in (0, 2) and "--as images" in out + err
        return
    assert code == 0, err
    kinds = ["as digits: gray", "as images of "][:: 1 if is_digits else -1]
    reason = f", since {n_drawn} of {n_drawn + n_others} images looked at are drawings in one color on plain paper"
    other = "images" if is_digits else "digits"
    assert kinds[0] in out and f"{reason} (otherwise: --as {other})" in out and kinds[1] not in out
    assert ("--task images" in out) != is_digits
    found = ac.read_idx_folder("data")["test"][0]
    assert found.shape[1:] == ((28, 28) if is_digits else (32, 32, 3) if n_drawn else (48, 48, 3))
    if n_drawn == 0 or n_others == 0:
        code, out, err = call(ac, make_idx.main, "x", "other", "--as", other)
        assert "since" not in out and (kinds[1] in out or "no ink" in err)


def test_a_hundred_pictures_of_all_classes_are_looked_at(call, tmp_path):
    """Of each class or file as many as it has in proportion"""
    images = np.stack([DIGITS[k % 60] for k in range(300)])
    images[120:] = np.random.default_rng(0).integers(0, 256, images[120:].shape)
    make_idx.make(tmp_path / "data", (images, np.arange(300) // 100))
    assert len(lab_images.looked_at(images)) == 100
    found = [make_idx.Given("", images[part], [0], "x") for part in (slice(0, 120), slice(120, 300))]
    assert make_idx.decided(None, found).kind == "images"
    assert make_idx.decided(None, found[:1]).kind == "digits"


@pytest.mark.parametrize("images, side", [
    ([photograph(k, (40, 40)) for k in range(12)], 40), ([photograph(k, (80, 80)) for k in range(12)], 32),
    ([photograph(k, (40, 50)) for k in range(12)], 32), ([photograph(k, (20 + k,) * 2) for k in range(12)], 32)])
def test_the_side_of_images_is_their_own_if_it_is_of_use(call, tmp_path, images, side):
    write_folder(tmp_path / "x", images)
    for out, flags in ("a", []), ("b", ["--as", "images"]):
        assert f"as images of {side}x{side} px" in call(ac, make_idx.main, "x", out, *flags)[1]
        assert ac.read_idx_folder(out)["test"][0].shape[1:] == (side, side, 3)


def test_arrays_of_two_channels_are_images_by_themselves(tmp_path, capsys):
    data = toy_images(48, 2, n_classes=3)
    make_idx.make(tmp_path / "data", data["train"])
    said = capsys.readouterr().out
    assert "as images of 48x48 px" in said and "since they have two channels\n" in said
    with pytest.raises(InputError, match=r"24, 24, 5.*Give .n, H, W. or, with 1 to 4 channels"):
        make_idx.make(tmp_path / "data", (np.zeros((9, 24, 24, 5)), np.arange(9) % 3))
    assert ac.read_idx_folder(tmp_path / "data")["test"][0].shape[1:] == (48, 48, 2)


def test_pictures_that_cannot_be_read_do_not_decide(call, tmp_path):
    write_folder(tmp_path / "x", [photograph(k) for k in range(8)])
    (tmp_path / "x/a/none.png").write_bytes(b"none")
    assert_refused(call(ac, make_idx.main, "x", "data"), "none.png: is not a readable picture")
    assert not (tmp_path / "data").exists()


def test_all_pictures_that_cannot_be_read_are_named(call, tmp_path):
    """of all classes, the first with what is wrong; and so does predict.py"""
    write_folder(tmp_path / "x", [photograph(k) for k in range(8)])
    for name in "a/one.png", "a/two.png", "b/three.png":
        (tmp_path / "x" / name).write_bytes(b"none")
    words = "a/one.png: is not a readable picture", "2 more cannot be read: x/a/two.png, x/b/three.png. Mend these"
    for each, given in (make_idx, ("x", "data")), (program, (NETWORK, "x")), (program, (NETWORK, "x/b", "x/a")):
        _, out, err = result = call(ac, each.main, *given)
        assert_refused(result, "Mend these files, or leave them out")
        assert all(word in err for word in words) or given[1] == "x/b"


def test_a_class_without_test_images_is_said(tmp_path, capsys):
    images, labels = toy_images(24, 3, n_classes=3)["train"]
    make_idx.make(tmp_path / "data", (images, labels), (images[labels == 1], labels[labels == 1]), kind="images")
    assert "warning: no test images of 0, 2" in capsys.readouterr().out


def test_a_network_of_digits_says_of_a_photograph_that_it_is_no_drawing(call, tmp_path):
    """and of drawings nothing"""
    for name, picture in ("photograph", photograph(3)), ("page", page(3)):
        imageio.imwrite(tmp_path / f"{name}.png", np.rint(255 * picture).astype(np.uint8))
    (tmp_path / "page.webp").write_bytes(b"")
    code, out, err = call(ac, program.main, NETWORK, ".")
    assert code == 0 and "note: .: left out 1 file (no PNG or JPEG): page.webp" in out
    code, out, err = call(ac, program.main, NETWORK, "photograph.png", "page.png")
    assert code == 0 and f"1 of 2 images: {program.NO_DRAWING}" in out + err
    arrays = [imageio.imread(tmp_path / f"{name}.png") for name in ("photograph", "page")]
    network = program.load(NETWORK)
    for given in (["photograph.png", tmp_path / "page.png"], [Image.fromarray(array) for array in arrays],
                  np.stack([arrays[0][:48, :48]] * 2), np.stack([arrays[0]] * 2).transpose(0, 3, 1, 2)):
        n = 2 if isinstance(given, np.ndarray) else 1
        assert program.predict(network, given).notes[program.NO_DRAWING] == n
    assert program.NO_DRAWING not in program.predict(network, DIGITS[:4]).notes
    many = program.predict(network, np.stack([arrays[0]] * 101)).notes
    assert many[f"{program.NO_DRAWING} (at least: 100 were looked at)"] == 100


def test_networks_of_images_take_pictures_as_files_and_as_objects(tmp_path):
    """cropped and scaled as predict.py does; those of two channels refuse them"""
    for channels in 1, 2, 3:
        data = toy_images(24, channels, n_classes=3)
        config = ac.fit_to_data(ac.Config(task="images", conv1_channels=2), data)
        state = ac.initial_state(config)
        state["history"]["source"] = "mine"
        ac.save(tmp_path / "net.npz", config, state)
        network = program.load(tmp_path / "net.npz")
        pixels = np.rint(255 * photograph(0, (30, 40))).astype(np.uint8)
        imageio.imwrite(tmp_path / "a.png", pixels)
        given = [Image.fromarray(pixels), tmp_path / "a.png", str(tmp_path / "a.png")]
        if channels == 2:
            with pytest.raises(InputError, match="does not say what the 2 channels"):
                program.predict(network, given)
            continue
        result = program.predict(network, given)
        image, _ = lab_images.picture_to_image(tmp_path / "a.png", 24, gray=channels == 1)
        np.testing.assert_array_equal(result.inputs, ac.prepare_images(np.stack([image] * 3), config))
        assert result.notes[lab_images.CROPPED] == 3
        assert program.predict(network, given[0]).classes == result.classes[0]
        mixed = program.predict(network, [image, given[0]])
        assert mixed.classes.tolist() == result.classes[:2].tolist()
        with pytest.raises(InputError, match="none.png: no such file"):
            program.predict(network, [given[0], tmp_path / "none.png"])


def test_side_and_gray_are_of_images(tmp_path, capsys):
    """Of drawings, too, without kind"""
    for flags in dict(side=40), dict(gray=True):
        make_idx.make(tmp_path / "data", (DIGITS[:20], np.arange(20) % 2), **flags)
        assert "as images of" in capsys.readouterr().out


def test_pictures_without_a_folder_of_their_class_are_refused(call, tmp_path):
    write_folder(tmp_path / "x", [photograph(k) for k in range(8)])
    assert_refused(call(ac, make_idx.main, "x/a", "data"), "x/a: its pictures do not lie in folders of their classes")
    assert_refused(call(ac, ac.main, "--data-dir", "x"), "make them of what is there: python3 make_idx.py x OUT")
    assert_refused(call(ac, ac.main, "--data-dir", "y"), "y: no such folder. Give one that holds four idx files")
    assert_refused(call(ac, ac.main, "--task", "images"), "--task images: give the folder of your images as --data-dir")


def test_drawings_in_strong_colors_are_noticed(call, tmp_path):
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
    answer = call(ac, make_idx.main, "photos", "more")
    assert_refused(answer, "flat.png: no ink found. Mend this file, or leave it out; or keep pictures as they are")


def test_several_numbers_of_channels_are_refused():
    with pytest.raises(InputError, match="several numbers of channels .1, 3."):
        make_idx.data_set_of([make_idx.Chunk("", np.zeros(shape, np.uint8), ["a"] * 2, None)
                              for shape in ((2, 20, 20), (2, 20, 20, 3))], 0)


@pytest.mark.parametrize("level, fault", [
    (1.01, "levels up to 1.01, a little over 1. Clip them to 1"), (np.nan, "1 of 6 images has NaN or infinite levels")])
@pytest.mark.parametrize("how", [dict(kind="images", side=24), dict(kind="digits")], ids=lambda how: how["kind"])
def test_one_wrong_number_does_not_make_all_images_black(tmp_path, level, fault, how):
    """One pixel a little over 1 was taken for levels up to 255, without a word"""
    images = np.random.default_rng(0).random((6, 24, 24))
    images[0, 1, 1] = level
    with pytest.raises(InputError, match=fault):
        make_idx.make(tmp_path / "data", (images, np.arange(6) % 2), **how)


@pytest.mark.parametrize("images, fault", [
    (6.28 * SIZED / 255, "levels up to 6.26, and would be nearly black. Give 0 to 255, or 0 to 1. Other quantities"),
    (1e-3 * SIZED / 255, "levels up to 0.000996, and"), (SIZED // 16, "levels up to 15, and"),
    ((SIZED > 99).astype(np.uint8), "levels up to 1, and"),
    (SIZED / 255 - 0.5, "levels from -0.492 to 0.496. Give 0 to"),
    (SIZED * 1j, "complex128 .* Give real numbers: .n, H, W. or, with 1 to 4 channels")])
def test_levels_of_another_range_are_refused(tmp_path, images, fault):
    """since they would be stored as a few dark levels; a black image among others is none"""
    with pytest.raises(InputError, match=fault):
        make_idx.make(tmp_path / "data", (images, np.arange(6) % 2), kind="images")
    assert not (tmp_path / "data").exists()
    black = np.concatenate([SIZED, 0 * SIZED[:1]])
    found, _ = lab_images.arrays_to_images(black, 24, False)
    np.testing.assert_array_equal(found, black)
    booleans, _ = lab_images.arrays_to_images(SIZED > 99, 24, False)
    np.testing.assert_array_equal(booleans, 255 * (SIZED > 99))


def test_channels_of_different_ranges_are_refused(tmp_path):
    images = np.random.default_rng(0).random((6, 24, 24, 2)) * [1, 255]
    with pytest.raises(InputError, match="Give all channels one range"):
        make_idx.make(tmp_path / "data", (images, np.arange(6) % 2), kind="images", side=24)
