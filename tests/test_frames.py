"""Frames, boxes and positions of digits in pictures: the network sees the digit that it would see
without them, and what was left out is said."""
import multimnist_capsnet as mc
from lab import data, frames

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import ROOT

import make_idx
import predict as program
from predict import load, predict

IMAGES, LABELS, _ = mc.synthesize_digits(40, 7)
INK, PAPER = 25, 235


def paper(image, side=4, margin=8, ink=INK, ground=PAPER):
    """Return a digit on paper, (h, w) uint8, each of its pixels a square"""
    gray = np.pad(np.kron(image, np.ones((side, side))), margin) / 255
    return np.rint(ground + (ink - ground) * gray).astype(np.uint8)


def framed(gray, widths, level):
    return np.pad(gray, widths, constant_values=level)


def boxed(gray, width, at, level=INK, slant=0):
    """Return a picture with a box whose lines, slanted by some px, begin at a distance from its edge"""
    gray = gray.copy()
    h, w = gray.shape
    for x in range(at, w - at):
        y = at + round(slant * x / w)
        gray[y:y + width, x] = gray[h - y - width:h - y, x] = level
    for y in range(at, h - at):
        x = at + slant - round(slant * y / h)
        gray[y, x:x + width] = gray[y, w - x - width:w - x] = level
    return gray


FRAMES = {f"{width} px, {level}": lambda gray, width=width, level=level: framed(gray, width, level)
          for width in (1, 3, 8) for level in (0, 60, 128)}
FRAMES |= {
    "of other widths": lambda gray: framed(gray, ((2, 7), (3, 5)), 0),
    "noisy": lambda gray: (framed(gray, 5, 30) + np.random.default_rng(0).normal(0, 3, (146, 146))).clip(0, 255),
    "double": lambda gray: framed(framed(gray, 3, 0), 4, 245),
    "dark paper, white": lambda gray: framed(255 - gray, 4, 255),
    "gray paper, white": lambda gray: framed(gray // 2 + 60, 4, 255),
    **{f"box, {width} px": lambda gray, width=width: boxed(gray, width, 3) for width in (1, 3)},
    "gray box": lambda gray: boxed(gray, 2, 3, 150), "slanted box": lambda gray: boxed(gray, 2, 2, slant=3),
    "light box": lambda gray: boxed(255 - gray, 2, 3, 230),
    "frame and box": lambda gray: framed(boxed(gray, 2, 3), 5, 0)}


@pytest.fixture(scope="module")
def network():
    return load(ROOT / "weights/affnist_capsnet-shared.npz")


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_or_box_is_left_out(network, kind):
    """Nothing of it is on the image that a network sees, and what is said has the number"""
    pictures = [FRAMES[kind](paper(image, margin=12)) for image in IMAGES]
    result = predict(network, pictures)
    expected = predict(network, [paper(image) for image in IMAGES])
    assert np.abs(result.inputs - expected.inputs).mean((1, 2)).max() < 0.02
    assert (result.classes == expected.classes).mean() >= 0.95
    assert result.notes[data.FRAMED] == len(IMAGES) or kind == "noisy"
    np.testing.assert_allclose(data.find_ink(pictures[0] / 255)[:8], 0)


def test_files_and_data_sets_have_no_frames_either(network, call, tmp_path):
    """make_idx.py warns with the number"""
    for name, label in (("zero", 0), ("one", 1)):
        (tmp_path / "d" / name).mkdir(parents=True)
        for k, image in enumerate(IMAGES[LABELS == label]):
            picture = framed(paper(image), 3, 0) if k else paper(image)
            imageio.imwrite(tmp_path / "d" / name / f"{k}.png", picture)
    n = int((LABELS < 2).sum())
    code, out, err = call(mc, make_idx.main, "d", "data")
    assert (code, err) == (0, "") and f"warning: d: {n - 2} of {n} images: {data.FRAMED}" in out
    read = mc.read_idx_folder("data")
    for split in ("train", "val", "test"):
        assert read[split][0][:, :3].max(initial=0) < 100, "ink lies in 20x20 px"
    code, out, err = call(mc, program.main, ROOT / "weights/affnist_capsnet-shared.npz", "d/one")
    assert (code, err) == (0, "") and data.FRAMED in out
    rows = [line.split() for line in out.splitlines() if ".png" in line]
    assert [row[1] for row in rows] == ["1"] * len(rows)
    make_idx.make(tmp_path / "arrays", ([framed(paper(image), 4, 60) for image in IMAGES[:20]], LABELS[:20] % 2))


def test_what_is_drawn_is_no_frame():
    """Digits, also bold ones that fill the picture; a square; a ring"""
    for image in IMAGES:
        bold = data.dilate(image / 255, 2)
        rows, columns = np.nonzero(bold > 0.3)
        tight = bold[rows.min():rows.max() + 1, columns.min():columns.max() + 1]
        for gray in (image / 255, 1 - image / 255, bold, tight, 1 - tight, paper(image) / 255):
            assert frames.paper_of(gray) == (slice(0, gray.shape[0]), slice(0, gray.shape[1]))
            ink = gray if np.median(data.edges(gray)) < 0.5 else 1 - gray
            assert frames.box_in(ink) == (None, False)
    square = np.full((60, 60), 0.9)
    square[10:50, 10:50] = 0.1
    outline = square.copy()
    outline[14:46, 14:46] = 0.9
    for gray in (square, outline, 1 - outline):
        image, noticed = data.mnist_of(gray)[:2]
        assert not noticed and image[4:24, 4:24].max() == 255 and image[:4].max() < 30


def test_a_box_that_the_digit_touches_is_in_doubt(network, tmp_path, capsys):
    """It cannot be told from a letter, so nothing is removed"""
    for slant in 0, 3:
        touching = boxed(paper(IMAGES[1]), 3, 4, slant=slant)
        touching[6:122, 60:66] = INK
        result = predict(network, [touching, paper(IMAGES[1])])
        assert result.doubts == ["in doubt", ""] and result.notes[data.TOUCHED] == 1
    digits = [paper(image) for image in IMAGES[:12]]
    make_idx.make(tmp_path / "data", ([touching, *digits], [1, *[0, 1] * 6]))
    assert f"warning: train: 1 of 13 images: {data.TOUCHED}" in capsys.readouterr().out


def small(image, y, x, side=28):
    """Return a digit at half its size at a position of a dark image"""
    found = np.zeros((side, side), np.uint8)
    found[y:y + 14, x:x + 14] = image.reshape(14, 2, 14, 2).mean((1, 3))
    return found


def test_digits_of_the_networks_size_are_centered_if_they_are_small_or_elsewhere(network):
    """MNIST's own and affNIST's stay; of other data what is not centered is said, and --center does it"""
    where = np.random.default_rng(0).integers(0, 15, (len(IMAGES), 2))
    elsewhere = np.array([small(image, *at) for image, at in zip(IMAGES, where)])
    result, expected = predict(network, elsewhere), predict(network, IMAGES)
    assert (result.classes == expected.classes).mean() >= 0.95 and result.notes[data.OFF] == 40
    assert data.OFF not in expected.notes
    left = predict(network, elsewhere, center=False)
    np.testing.assert_array_equal(left.inputs[:, 6:-6, 6:-6], elsewhere / np.float32(255))
    assert data.is_like_mnist(IMAGES).all() and not data.is_like_mnist(elsewhere).any()
    corner = np.pad(IMAGES, ((0, 0), (0, 12), (12, 0)))
    assert data.is_like_mnist(corner).all()
    assert not data.is_like_mnist(np.pad(elsewhere, [(0, 0), (6, 6), (6, 6)])).any()
    blank = np.stack([np.zeros((28, 28), np.uint8), np.full((28, 28), 3, np.uint8), elsewhere[0]])
    np.testing.assert_array_equal(predict(network, blank).inputs[:2, 6:-6, 6:-6], blank[:2] / np.float32(255))
    other = program.dataclasses.replace(network, source="drawings")
    assert predict(other, elsewhere).notes[data.LEFT] == 40
    np.testing.assert_array_equal(predict(other, elsewhere).inputs, left.inputs)
    np.testing.assert_array_equal(predict(other, elsewhere, center=True).inputs, result.inputs)


def test_a_data_set_says_what_is_not_centered(tmp_path, capsys):
    elsewhere = np.array([small(image, 0, 0) for image in IMAGES])
    make_idx.make(tmp_path / "left", (elsewhere, LABELS % 2))
    assert f"note: train: 40 of 40 images: {data.LEFT}" in capsys.readouterr().out
    make_idx.make(tmp_path / "centered", (elsewhere, LABELS % 2), center=True)
    assert "scaled so that the ink fits" in (out := capsys.readouterr().out) and data.LEFT not in out
    assert mc.read_idx_folder(tmp_path / "centered")["test"][0][:, 4:24, 4:24].max((1, 2)).min() > 200


def test_a_ring_is_left_out_and_a_line_leaves_a_doubt(network):
    """A circle around the digit; a line below it; of faint ruled lines there is no doubt"""
    y, x = np.mgrid[:160, :160] - 79.5
    ring = np.abs(np.hypot(y, x) - 74) < 2
    digits = [paper(image, margin=24) for image in IMAGES[:12]]
    result = predict(network, [np.where(ring, INK, gray) for gray in digits])
    expected = predict(network, digits)
    assert result.classes.tolist() == expected.classes.tolist() and result.notes[data.FRAMED] == 12
    under, ruled = np.stack(digits), np.stack(digits)
    under[:, 148:151, 4:-4] = INK
    ruled[:, 10::24] = np.minimum(ruled[:, 10::24], 200)
    assert set(predict(network, under).doubts) == {"in doubt"}
    assert predict(network, ruled).notes.get(data.TOUCHED, 0) == 0


def test_spots_are_connected_ink():
    """As spreading the numbers from pixel to pixel finds them"""
    rng = np.random.default_rng(0)
    for _ in range(50):
        inked = rng.random(rng.integers(1, 30, 2)) < rng.random()
        spread = np.arange(1, inked.size + 1).reshape(inked.shape) * inked
        for _ in range(inked.size):
            spread = data.dilate(spread, 1.5) * inked
        spots = frames.spots_of(inked)
        pairs = {*zip(spread[inked].tolist(), spots[inked].tolist())}
        assert sorted(number for _, number in pairs) == list(range(1, len(np.unique(spread[inked])) + 1))
        assert ((spots > 0) == inked).all()
        for number, span in enumerate(frames.spans_of(spots).tolist(), 1):
            assert tuple(span) == frames.span_of(spots == number)
