"""Ink that may not belong to what is written, and paper that is partly in the shadow: a network of digits
finds the digit or is in doubt, and make_idx.py warns."""
import multimnist_capsnet as mc
from lab import data, frames, parts

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import ROOT

import make_idx
import predict as program
from predict import load, predict

IMAGES, LABELS, _ = mc.synthesize_digits(30, 7)
INK, PAPER, SIDE = 25, 235, 200


@pytest.fixture(scope="module")
def network():
    return load(ROOT / "weights/affnist_capsnet-shared.npz")


def on_page(image, down=0, right=0, side=4):
    """Return the ink of a digit at the center of a page, or beside it, (200, 200) from 0 to 1"""
    page = np.zeros((SIDE, SIDE))
    top, left = ((SIDE - 28 * side) // 2 + shift for shift in (down, right))
    page[top:top + 28 * side, left:left + 28 * side] = np.kron(image, np.ones((side, side))) / 255
    return page


def drawn(ink, paper=PAPER):
    """Return ink on paper, (h, w) uint8; paper: its gray level, at each pixel or at all"""
    return np.rint(paper + (INK - paper) * ink).clip(0, 255).astype(np.uint8)


def with_lines(*lines):
    """Return a function that draws a digit with lines: slices of rows and of columns"""
    def draw(image):
        ink = on_page(image)
        for rows, columns in lines:
            ink[rows, columns] = 1
        return drawn(ink)
    return draw


def turned(image, angle):
    """Return a picture, turned about its center, each pixel the nearest one; None outside is the corner's"""
    y, x = np.indices(image.shape) - (SIDE - 1) / 2
    cosine, sine = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle))
    rows, columns = (np.rint(each + (SIDE - 1) / 2).astype(int).clip(0, SIDE - 1)
                     for each in (cosine * y - sine * x, sine * y + cosine * x))
    return image[rows, columns]


def on_table(image, angle):
    """Return a digit on a sheet of paper, turned a little, that lies on a dark table"""
    sheet = drawn(on_page(image, side=3))
    page = np.full((SIDE, SIDE), 50, np.uint8)
    page[28:-28, 28:-28] = sheet[28:-28, 28:-28]
    return turned(page, angle)


def touching(image):
    """Return a digit in a box that is as large as it"""
    ink = on_page(image, side=5)
    top, bottom, left, right = frames.span_of(ink > 0.5)
    box = np.zeros(ink.shape, bool)
    box[top + 2:bottom + 4, left - 4:right + 4] = True
    box[top + 6:bottom, left:right] = False
    return drawn(np.maximum(ink, box))


def crossed_out(image):
    ink = on_page(image)
    for x in range(20, 180):
        ink[130 - 3 * x // 10:134 - 3 * x // 10, x] = 1
    return drawn(ink)


ROWS, COLUMNS = np.indices((SIDE, SIDE))
SHADOWS = {"diagonal": ROWS + COLUMNS < 180, "upright": COLUMNS > 95, "over most": ROWS + COLUMNS < 250,
           "of a hand": np.hypot(ROWS - 200, COLUMNS - 30) < 110}
DASHES = [(slice(row, row + 4), slice(k, k + 11)) for row in (20, 176) for k in range(20, 180, 20)]
DASHES += [(columns, rows) for rows, columns in DASHES]
ANY = slice(None)
RIGHT = {
    **{f"shadow, {name}": lambda image, dark=dark: drawn(on_page(image), np.where(dark, 0.55 * PAPER, PAPER))
       for name, dark in SHADOWS.items()},
    "shadow, light ink": lambda image: 255 - drawn(on_page(image), np.where(ROWS + COLUMNS < 180, 195, 225)),
    "dashed box": with_lines(*DASHES),
    "box with gaps": with_lines((slice(20, 24), slice(40, 165)), (slice(176, 180), slice(20, 180)),
                                (slice(24, 176), slice(20, 24)), (slice(40, 165), slice(176, 180))),
    "corner marks": with_lines(*[(slice(y, y + 4), slice(x, x + 30)) for y in (10, 186) for x in (10, 160)],
                               *[(slice(y, y + 30), slice(x, x + 4)) for y in (10, 160) for x in (10, 186)]),
    "brackets": with_lines(*[(slice(20, 180), slice(x, x + 4)) for x in (24, 172)],
                           *[(slice(y, y + 4), slice(x, x + 20)) for y in (20, 176) for x in (24, 156)]),
    "sheet on a table": lambda image: on_table(image, 5), "sheet, turned left": lambda image: on_table(image, -4)}
IN_DOUBT = {
    "U-shaped box": with_lines((slice(130, 186), slice(22, 26)), (slice(130, 186), slice(175, 179)),
                               (slice(182, 186), slice(22, 179))),
    "short line below": with_lines((slice(172, 176), slice(35, 165))),
    "line beside": with_lines((slice(30, 170), slice(172, 176))),
    "mark in a corner": with_lines((slice(4, 40), slice(180, 184)), (slice(36, 40), slice(150, 184))),
    "two digits": lambda image: drawn(np.maximum(on_page(image, -50, -50, 3), on_page(IMAGES[0], 50, 50, 3))),
    "box that touches": touching, "crossed out": crossed_out}


@pytest.mark.parametrize("kind", [*RIGHT, *IN_DOUBT])
def test_a_network_of_digits_finds_the_digit_or_is_in_doubt(network, kind):
    """What can be told from the digit is left out; of the rest none is silently wrong"""
    found = predict(network, [(RIGHT | IN_DOUBT)[kind](image) for image in IMAGES])
    is_right, in_doubt = found.classes == LABELS, np.array(found.doubts) == "in doubt"
    assert (is_right | in_doubt).sum() >= len(IMAGES) - 1
    if kind in RIGHT:
        assert (is_right & ~in_doubt).sum() >= len(IMAGES) - 1
    else:
        assert in_doubt.any() and (found.notes.keys() & {data.TOUCHED, program.DIFFERS})


@pytest.mark.parametrize("lines", [
    [(0, ANY), (-1, ANY), (ANY, 0)], [(-1, ANY)], [(slice(10, 27), 1), (slice(10, 27), 26), (26, slice(1, 27))]])
def test_lines_in_images_of_28_px(network, lines):
    images = IMAGES.copy()
    for line in lines:
        images[(ANY, *line)] = 255
    for given in (images, 255 - images):
        found = predict(network, given)
        in_doubt = np.array(found.doubts) == "in doubt"
        assert ((found.classes == LABELS) | in_doubt).sum() >= len(IMAGES) - 1


def test_plain_pictures_have_one_reading(network):
    """Digits, broken strokes, letters with dots and accents; what is in doubt was so without"""
    pictures = [drawn(on_page(image)) for image in IMAGES]
    found = predict(network, pictures)
    assert program.DIFFERS not in found.notes and data.TOUCHED not in found.notes
    for image in IMAGES:
        assert parts.parts_of(image / 255) is None and parts.without_line_across(image / 255) is None
        assert not parts.is_open_box(image / 255)
    dotted, accented, equals, broken = np.zeros((4, 60, 60))
    dotted[5:12, 27:34] = dotted[20:55, 27:34] = 1                      # i
    accented[4:11, 15:22] = accented[4:11, 38:45] = 1                   # Ä, filled
    accented[18:56, 12:48] = 1
    equals[20:26, 10:50] = equals[34:40, 10:50] = 1
    broken[5:11, 12:50] = broken[13:50, 30:37] = 1                      # T
    for letter in (dotted, accented, equals, broken):
        assert parts.parts_of(letter) is None


def test_parts(network):
    """A line that is longer than the rest; two spots apart; a box with gaps; a line across"""
    square = np.zeros((60, 60))
    square[20:40, 20:40] = 1
    square[24:36, 24:36] = 0
    lined, two, boxed, crossed = (square.copy() for _ in range(4))
    lined[50:53, 5:55] = 1
    found = parts.parts_of(lined)
    np.testing.assert_array_equal(found.core, square)
    assert found.second is None and not found.is_around
    two[2:12, 2:12] = 1
    found = parts.parts_of(two)
    np.testing.assert_array_equal(found.second + found.core, two)
    for rows, columns in ((5, slice(5, 40)), (54, slice(20, 55)), (slice(5, 40), 5), (slice(20, 55), 54)):
        boxed[rows, columns] = 1
    found = parts.parts_of(boxed)
    np.testing.assert_array_equal(found.core, square)
    assert found.is_around and parts.parts_of(square) is None
    crossed[30, 2:58] = 1
    rest = parts.without_line_across(crossed)
    assert rest[[22, 38], 30].all() and not rest[30, :15].any()
    assert parts.without_line_across(square) is None and parts.without_line_across(np.zeros((9, 9))) is None
    open_box = np.zeros((40, 40))
    open_box[4:36, [4, 35]] = open_box[35, 4:36] = 1
    assert parts.is_open_box(open_box) and not parts.is_open_box(np.zeros((40, 40)))


def test_a_pair_network_keeps_both_digits():
    """Two digits beside each other are what it reads; a line below them leaves a doubt or the same digits"""
    pairs = load(ROOT / "weights/multimnist_capsnet.npz")
    beside = [np.maximum(on_page(one, 0, -30, 3), on_page(other, 0, 30, 3)) for one, other in zip(IMAGES, IMAGES[1:])]
    found = predict(pairs, [drawn(ink) for ink in beside])
    assert program.DIFFERS not in found.notes
    for ink in beside:
        ink[170:174, 25:175] = 1
    lined = predict(pairs, [drawn(ink) for ink in beside])
    same = (np.sort(lined.classes, 1) == np.sort(found.classes, 1)).all(1)
    assert (same | (np.array(lined.doubts) == "in doubt")).all()


def test_other_networks_and_data_sets_keep_all_ink(network, call, tmp_path):
    """What is written may be in several pieces: predict.py is in doubt, make_idx.py names the pictures"""
    pictures = [with_lines((slice(172, 176), slice(35, 165)))(image) for image in IMAGES]
    other = program.dataclasses.replace(network, source="letters")
    found = predict(other, pictures)
    assert found.inputs[:, 25:].max((1, 2)).min() > 0.25 and found.notes[program.DIFFERS] > 0
    for name, label in (("zero", 0), ("one", 1)):
        (tmp_path / "d" / name).mkdir(parents=True)
        for k, image in enumerate(IMAGES[LABELS == label]):
            imageio.imwrite(tmp_path / "d" / name / f"{k}.png", drawn(on_page(image)))
    for k in range(4):
        imageio.imwrite(tmp_path / "d" / "one" / f"line{k}.png", pictures[k])
    code, out, err = call(mc, make_idx.main, "d", "data")
    assert (code, err) == (0, "")
    assert f"images: {data.APART}: look at one/line0.png, one/line1.png, one/line2.png, ..." in out
    assert out.count("warning") == 1 and "warning: d: 4 of " in out
    make_idx.make(tmp_path / "arrays", ([*[drawn(on_page(image)) for image in IMAGES[:20]], pictures[0]],
                                        [0, 1] * 10 + [1]))


def test_arrays_of_28_px_with_a_line_are_named(tmp_path, capsys):
    """They stay as they are"""
    images = IMAGES.copy()
    images[3, -1] = 255
    make_idx.make(tmp_path / "data", (images, LABELS % 2))
    assert f"warning: train: 1 of 30 images: {data.APART}: look at image 3" in capsys.readouterr().out
    read = mc.read_idx_folder(tmp_path / "data")
    assert max(read[split][0][:, -1].min(1).max() for split in ("train", "val", "test")) == 255


def test_a_shadow_is_no_ink():
    """Nor is a table, a blank sheet half in the shadow, or noise; a bold letter at the edge stays"""
    dark = ROWS + COLUMNS < 180
    for image in IMAGES[:5]:
        plain = data.surface_ink(drawn(on_page(image)) / 255)
        shaded = data.surface_ink(drawn(on_page(image), np.where(dark, 130, PAPER)) / 255)
        assert np.abs(plain - shaded).mean() < 0.01
    noise = np.random.default_rng(0).normal(0, 0.05, dark.shape)
    for gray in (np.where(dark, 0.5, 0.9), 0.7 + noise):
        assert not data.shaded_ink(gray).any()
    letter = np.full((60, 60), 0.9)
    letter[:, :12] = letter[:10] = 0.1
    assert data.surface_ink(letter)[:10, 12:].min() > 0.9
