"""Pictures and arrays into data sets: read a picture, find its ink, make an image like MNIST's of it, split, write."""
import collections.abc
import contextlib
import hashlib
import math
import re
import sys
import typing
import warnings
from pathlib import Path

import numpy as np

from . import frames, parts
from .files import check_writable, make_folder, write_atomically
from .frames import edges
from .messages import InputError, fail, first_of

try:
    import imageio.v3 as imageio
except ImportError:
    sys.exit(fail(f"imageio is missing: {sys.executable} -m pip install imageio"))

WORK_SIDE = 300                    # px; larger pictures are averaged down to this side
MIN_SIDE = 12                      # px
MIN_CONTRAST = 0.12                # between ink and background, where black to white is 1
MIN_SIGNAL = 6                     # contrast of ink in standard deviations of the background's noise
MIN_INK = 8                        # px
SPECK = 0.03                       # spots with less than this fraction of the largest spot's ink are removed
GROUND_FITS, SURFACE = 8, 2        # fits of the background surface; its polynomial degree, for uneven illumination
IN_SHADOW = 0.1                    # share of the ink that is in a region at the edge, if that is a shadow on the paper
BOX, SIDE = 20, 28                 # px of the ink and of the image
MNIST_SPAN, CANVAS_SPAN = (16, 23), (13, 33)   # px of ink's longer side: MNIST has 18 to 20, affNIST's range 14 to 32
OFF_CENTER = 2                     # px from the image's center to the ink's; at most 1 in MNIST
MUCH_INK = 0.35                    # of the paper within a frame: more may be the paper itself
TEST_SHARE = 7                     # one of so many images of a class is for testing
ENDINGS = (".png", ".jpg", ".jpeg")
JUNK = "thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "@eadir"                  # what systems leave in folders
FEW_LIGHT = 0.05                   # fraction of an array below which images that are light at the edge stay as they are
FEW_GRAYS = 64                     # arrays whose brightest pixel is between 1 and this are scaled to 255
FAINT_LEVEL = 150                  # images whose brightest gray level, of 255, is below this are called faint
FAINT = 0.1                        # what is darker than this, of the brightest ink, does not count for the ink's box
MOST_NAMED = 20                    # files that a message names
EVEN = 0.01                        # a background whose gray levels differ by more has shades or noise: they are removed
ORIENTATION = 0x0112               # EXIF's tag
# EMNIST in the name of a file, also with punctuation between the letters, as E-MNIST, at the start of a word: not that
# of "the-mnist"
EMNIST_NAME = re.compile(r"emnist|(?<![^\W_])" + r"[\W_]*".join("emnist"), re.IGNORECASE)
TRANSPOSED = ("images transposed, as EMNIST's are stored. If they were upright, rename the file (of idx files, all "
              "four): a name without EMNIST leaves them as they are")
FRAMED = "a frame or box around the ink was left out"
TOUCHED = "in doubt: a line or a box may be part of the ink"
APART = "ink lies apart, such as a line, a part of a box or a second digit, and may be no part of what is written"
OFF = "of small or off-center ink: scaled and centered"
LEFT = "left as they are, 28x28 px and light on dark, though their ink is not centered as MNIST's is (--center)"
UPRIGHT = {                        # EXIF orientation: what turns such a picture upright (imageio's versions differ)
    2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1], 5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1), 7: lambda a: a[::-1, ::-1].swapaxes(0, 1), 8: np.rot90}


# -------------------------------------------------------------- pictures

def read_picture(path):
    """Return the gray levels of a picture file, (h, w) float64 from 0 (black) to 1 (white).

    Larger pictures are averaged down to about WORK_SIDE px. Raise InputError if the file is no readable picture; its
    message does not name the file.
    """
    return gray_levels(*read_pixels(path))


def read_pixels(path):
    """Return the pixels of a picture file, upright, and whether they are deep: (h, w, 4), red, green, blue and alpha,
    uint8; or, if they are deep, gray levels of 16 or 32 bits, (h, w). Raise InputError as read_picture does"""
    if not Path(path).is_file():
        fault = "is a folder" if Path(path).is_dir() else "no such file"
        raise InputError(f"{fault}. Give a PNG or JPEG file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with imageio.imopen(path, "r", plugin="pillow") as file:
                facts = file.metadata(index=0, exclude_applied=False)
                mode, turn = facts.get("mode", ""), UPRIGHT.get(facts.get("Orientation"), np.asarray)
                plain = mode.startswith(("I", "F"))                          # 16 or 32 bits: RGBA would truncate them
                pixels = turn(np.asarray(file.read(index=0, rotate=False, mode=None if plain else "RGBA")))
    except MemoryError:
        raise
    except Exception as error:                                      # each format's decoder raises its own exceptions
        cause = error.__cause__ or error
        if "Bomb" in type(cause).__name__ + str(cause)[:40] or "bomb" in str(cause):
            raise InputError("is too large. Give a picture of at most 10000 x 10000 px") from None
        fault = (str(cause) or type(error).__name__).splitlines()[0]
        raise InputError(f"is not a readable picture ({fault}). Give a PNG or JPEG file; export other "
                         "formats, such as HEIC, as JPEG") from None
    if min(pixels.shape[:2]) < MIN_SIDE:
        size = " x ".join(map(str, pixels.shape[1::-1]))
        raise InputError(f"has {size} px. Give a picture of at least {MIN_SIDE} x {MIN_SIDE} px")
    return pixels, plain


def gray_levels(pixels, is_deep):
    """Return the gray levels of a picture's pixels, (h, w) float64 from 0 to 1, averaged down to about
    WORK_SIDE px. What is transparent has the color of paper.

    pixels: (h, w, 4), red, green, blue and alpha, uint8; or, if is_deep, gray levels of 16 or 32 bits,
    (h, w). Raise InputError for NaN and infinite values.
    """
    block = -(-max(pixels.shape[:2]) // WORK_SIDE)
    if is_deep:
        if not np.isfinite(pixels).all():
            raise InputError("contains NaN or infinite values. Give another picture")
        return block_means(pixels[..., None], block)[..., 0].clip(0) / max(1, pixels.max())
    return on_paper(block_means(pixels, block) / 255)


def on_paper(colors):
    """Return colors with transparency, (..., h, w, 4) from 0 to 1, as gray levels, (..., h, w), on
    paper that is white if what is drawn is dark, and else black"""
    red, green, blue, alpha = np.moveaxis(colors, -1, 0)
    gray = 0.299 * red + 0.587 * green + 0.114 * blue
    drawn = (gray * alpha).sum((-2, -1), keepdims=True)
    background = (drawn < 0.5 * alpha.sum((-2, -1), keepdims=True)).astype(gray.dtype)
    return gray * alpha + background * (1 - alpha)


def is_picture(image):
    """Return whether an object is a picture of the package PIL"""
    return all(hasattr(image, name) for name in ("mode", "convert", "getexif"))


def pixels_of(picture):
    """Return the pixels of a picture of the package PIL as read_pixels returns those of its file. Raise InputError for
    one that has no colors"""
    is_deep = picture.mode.startswith(("I", "F"))
    try:
        if picture.mode == "La":                                        # of all modes alone without a way to RGBA
            picture = picture.convert("LA")
        pixels = np.asarray(picture if is_deep else picture.convert("RGBA"))
    except (ValueError, OSError) as error:
        raise InputError(f"a picture of mode {picture.mode} cannot be read ({error}). Give another, or "
                         "its gray levels as an array") from None
    turn = UPRIGHT.get(picture.getexif().get(ORIENTATION), np.asarray)
    return turn(pixels), is_deep


def block_means(pixels, block):
    """Return the means of blocks of block x block px; incomplete blocks at the edge are dropped.

    pixels: (h, w, C). Return (h // block, w // block, C).
    """
    h, w = (max(1, side // block) for side in pixels.shape[:2])
    blocks = pixels[:h * block, :w * block].reshape(h, -1, w, min(block, pixels.shape[1]), pixels.shape[2])
    return np.stack([blocks[..., k].mean((1, 3), dtype=np.float64) for k in range(pixels.shape[2])], -1)


def find_ink(gray):
    """Return the ink of a picture, (h, w) in [0, 1], as surface_ink finds it on the picture's paper, without frames
    and boxes. Raise InputError if no ink stands out."""
    return framed_ink(gray, surface_ink)[0]


def framed_ink(gray, ink_of_paper):
    """Return the ink of a picture, (h, w) in [0, 1], that is neither a frame nor a box around the rest; and what was
    noticed: a set of the words FRAMED and TOUCHED.

    ink_of_paper: a function of the gray levels of the picture's paper, which is all of it if it has no frame.
    """
    paper, ink, noticed = frames.paper_of(gray), np.zeros(gray.shape), set()
    ink[paper] = ink_of_paper(gray[paper])
    inside, touches = frames.box_in(ink[paper])
    if inside is not None:
        ink[paper] = inside
    if inside is not None or gray[paper].shape != gray.shape:
        noticed.add(FRAMED)
    inked = ink[paper] >= 0.5
    is_cut = gray[paper].shape != gray.shape and (edges(inked).any() or inked.mean() > MUCH_INK)
    if touches or is_cut:
        noticed.add(TOUCHED)
    return ink, noticed


def inks_of(gray, ink_of_paper, are_digits=False, n_pieces=1):
    """Return the ink of a picture, (h, w) in [0, 1], in a list with its other readings, and what was noticed: a set of
    the words FRAMED, TOUCHED and APART.

    Where ink lies apart, the picture may be read with it or without. If are_digits, what is written is known to be
    digits, each in one piece, to which what lies apart does not belong: the ink without it comes first, and what lies
    all around, as a box with gaps, is left out as a box is. A line across one digit may be none of its strokes; and
    three straight sides are a part of a box. ink_of_paper: as in framed_ink. n_pieces: as in parts_of
    """
    ink, noticed = framed_ink(gray, ink_of_paper)
    found = parts.parts_of(ink, n_pieces)
    if found is None:
        if not are_digits or n_pieces > 1:
            return [ink], noticed
        if parts.is_open_box(ink):
            noticed.add(TOUCHED)
        rest = parts.without_line_across(ink)
        if rest is None:
            return [ink], noticed
        return [ink, rest], noticed | {APART}
    inks = [ink, found.core]
    if are_digits:
        inks = [found.core, ink]
        if found.is_around:
            return [found.core], noticed | {FRAMED}
    if found.second is not None:
        inks.append(found.second)
    return inks, noticed | {APART}


def surface_ink(gray):
    """Return the ink of a picture, (h, w) in [0, 1]: the pixels that are darker, or lighter, than the background.

    gray: gray levels, (h, w). The background is a smooth surface fitted to the pixels near it; their residuals give the
    noise. Ink is on the side (darker or lighter) with more total contrast beyond the noise. If no ink stands out, as in
    a tight crop whose background covers less than half of the picture, the fit is repeated from the picture's frame.
    Where a region at the edge differs from the rest, as a shadow does, and there is ink in it, the paper's level is
    found at each pixel (see shaded_ink). Raise InputError if no ink stands out.
    """
    h, w = gray.shape
    y, x = (grid.ravel() for grid in np.mgrid[-1:1:h * 1j, -1:1:w * 1j])
    terms = np.stack([x ** i * y ** j for i in range(SURFACE + 1) for j in range(SURFACE + 1 - i)], 1)
    values = gray.ravel()
    for start, quantile, sigmas in (gray, 0.5, 0.6745), (edges(gray), 0.25, 0.3186):   # half of a tight crop may be ink
        residual = np.abs(values - np.median(start))
        near = residual <= np.quantile(residual, quantile)
        for _ in range(GROUND_FITS):
            surface = terms @ np.linalg.lstsq(terms[near], values[near], rcond=None)[0]
            residual = values - surface
            noise = max(np.quantile(np.abs(residual), quantile) / sigmas, 1e-3)
            near = np.abs(residual) <= 2.5 * noise
        darker, lighter = (np.maximum(sign * residual - 3 * noise, 0).sum() for sign in (-1, 1))
        ink = (-residual if darker >= lighter else residual).reshape(h, w)
        least = max(MIN_CONTRAST, MIN_SIGNAL * noise)
        if (ink > least).sum() >= MIN_INK:
            break
    else:
        ink = shaded_ink(gray)
        if not ink.any():
            raise InputError("no ink stands out from the background. Give a picture of dark ink on a light background, "
                             "or the reverse")
        return ink
    contrast = scaled_ink(ink, least)
    ink = without_specks(contrast)
    region = frames.region_at_edge(contrast > 0)
    if region is not None:
        shaded = shaded_ink(gray)
        inked = shaded >= 0.5
        is_ink = (ink[region] >= 0.5).any() or (inked & region).sum() > IN_SHADOW * inked.sum()
        if is_ink and inked.any() and abs(np.median(gray[inked]) - np.median(gray[region])) >= MIN_CONTRAST:
            return shaded
    return ink


def scaled_ink(contrast, least):
    """Return ink from 0 to 1 of its contrast to the paper, (h, w): what is less than 0.3 of the pen's contrast, such as
    ruled lines, is 0. least: contrast of ink"""
    strong = contrast[contrast > least]
    if strong.size < MIN_INK:
        return np.zeros(contrast.shape)
    pen = (strong ** 5).sum() / (strong ** 4).sum()
    return np.clip((contrast - 0.3 * pen) / (0.5 * pen), 0, 1)


def shaded_ink(gray):
    """Return the ink of a picture, (h, w) in [0, 1], on paper that is partly in the shadow, without what touches the
    picture's edge: no ink if none is darker than all of the paper at the edge, or lighter.

    The paper's level at a pixel is that of a surface without dark strokes: a morphological closing (or, of light ink,
    an opening) with a square that is wider than strokes. A shadow dims paper and ink by one factor, so that contrast is
    relative to the paper's level or, in a picture that was inverted, to what is missing to white: the one that finds
    more ink.
    """
    side = max(gray.shape) // 10 * 2 + 1                                    # odd, so that the level is not displaced
    low, high = np.quantile(edges(gray), (0.05, 0.95))
    darker = np.maximum(low - gray - MIN_CONTRAST, 0).sum()
    lighter = np.maximum(gray - high - MIN_CONTRAST, 0).sum()
    if darker < lighter:                                                    # as dark ink on light paper
        gray, low = 1 - gray, 1 - high
    level = -frames.maximum(-frames.maximum(gray, side), side)
    found = np.zeros(gray.shape)
    for light in level, 1 - level:
        contrast = (level - gray) / np.maximum(light, MIN_CONTRAST)
        contrast -= np.median(contrast)
        least = max(MIN_CONTRAST, MIN_SIGNAL * np.median(np.abs(contrast)) / 0.6745)
        ink = without_specks(scaled_ink(contrast, least), at_edge=False)
        inked = ink >= 0.5
        is_beyond = gray[inked] < low - MIN_CONTRAST
        if is_beyond.sum() > max(MIN_INK, inked.sum() // 2) and inked.sum() > (found >= 0.5).sum():
            found = ink
    return found


def without_specks(ink, at_edge=True):
    """Remove spots that are small or that touch the picture's edge, such as a shadow or the table beside the paper.

    Small means less than SPECK of the largest spot's ink. With at_edge spots at the edge stay if all large ones are
    there.
    """
    spots = frames.spots_of(ink >= 0.5)
    sizes = np.bincount(spots.ravel())
    sizes[0] = 0
    if not at_edge:
        sizes[edges(spots)] = 0
    large = (sizes > 0) & (sizes >= SPECK * sizes.max())
    inside = large.copy()
    inside[edges(spots)] = False
    kept = inside if inside.any() else large
    return ink * dilate(kept[spots].astype(float), 1.5)                     # dilated: a spot's soft edges belong to it


def ink_box(ink):
    """Return the bounding box of the ink: top, bottom, left, right in px."""
    rows, columns = (np.nonzero((ink >= 0.5).any(axis))[0] for axis in (1, 0))
    return rows[0], rows[-1] + 1, columns[0], columns[-1] + 1


def dilate(ink, radius):
    """Return the maximum over a disc around each pixel."""
    reach = int(radius)
    padded, out = np.pad(ink, reach), ink.copy()
    for dy, dx in ((dy, dx) for dy in range(-reach, reach + 1) for dx in range(-reach, reach + 1)):
        if dy * dy + dx * dx <= radius * radius:
            np.maximum(out, padded[reach + dy:reach + dy + len(ink), reach + dx:reach + dx + ink.shape[1]], out=out)
    return out


# -------------------------------------------------------------- images like MNIST's

def paper_ink(gray):
    """Return the ink of a picture in [0, 1], light on dark: gray levels, inverted if the picture's edge is light.

    If the edge is uneven, as in a photograph, a smooth background is fitted and subtracted, with its noise; so it is if
    a sheet of paper, not quite upright, lies on what is at the edge.
    """
    edge = edges(gray)
    if np.ptp(np.quantile(edge, (0.1, 0.9))) > EVEN:
        with contextlib.suppress(InputError):                           # a tight crop has no background to fit
            return surface_ink(gray)
    ink = (1 - gray if np.median(edge) > 0.5 else gray) - min(np.median(edge), 1 - np.median(edge))
    ink = np.clip(ink / max(ink.max(), 1e-9), 0, 1)
    if frames.is_sheet(ink >= 0.5):
        with contextlib.suppress(InputError):
            written = surface_ink(gray)
            if not edges(written >= 0.5).any():
                return written
    return ink


def resample(image, height, width, top=0.0, left=0.0, scale=1.0):
    """Return an image on a canvas of height x width px, scaled, its upper left corner at (top, left): each pixel is the
    mean of the area that it covers."""
    def coverage(n_out, start, n):
        pixel, low = np.arange(n_out)[:, None], start + scale * np.arange(n)
        return np.maximum(np.minimum(low + scale, pixel + 1) - np.maximum(low, pixel), 0)
    return coverage(height, top, image.shape[0]) @ image @ coverage(width, left, image.shape[1]).T


class Reading(typing.NamedTuple):
    """How a picture was read: the image, what was noticed, a set of words, and the images of its other readings"""
    image: np.ndarray
    noticed: set
    others: tuple = ()


def to_mnist(gray, center=False):
    """Return mnist_of's image"""
    return mnist_of(gray, center).image


def mnist_of(gray, center=False, are_digits=False):
    """Return the Reading of a picture's ink as an image like MNIST's, (28, 28) uint8: its box fits into 20x20 px, its
    center of mass is at the center. A picture of 28x28 px, light on dark, is such an image, unless it has a frame or
    center is True. are_digits: as in inks_of. Raise InputError if there is no ink."""
    if np.ptp(gray) < 0.05:
        raise InputError("no ink found")
    (ink, *others), noticed = inks_of(gray, paper_ink, are_digits)
    if gray.shape == (SIDE, SIDE) and np.median(edges(gray)) < 0.5 and FRAMED not in noticed and not center:
        return Reading(np.rint(255 * gray).astype(np.uint8), noticed)
    return Reading(centered(ink), noticed, tuple(map(centered, others)))


def centered(ink):
    """Return ink, (h, w) in [0, 1], light on dark, as an image like MNIST's. Raise InputError if there is none"""
    rows, columns = (np.flatnonzero((ink > FAINT).any(axis)) for axis in (1, 0))
    if not len(rows):
        raise InputError("no ink found")
    ink = ink[rows[0]:rows[-1] + 1, columns[0]:columns[-1] + 1]
    scale = BOX / max(ink.shape)
    y, x = (scale * ((ink.sum(axis) * (np.arange(n) + 0.5)).sum() / ink.sum()) for axis, n in (
        (1, ink.shape[0]), (0, ink.shape[1])))
    # centered by mass, but with all of the ink on the image
    top, left = (float(np.clip(SIDE / 2 - middle, 0, SIDE - scale * n)) for middle, n in zip((y, x), ink.shape))
    image = resample(ink, SIDE, SIDE, top, left, scale)
    return np.rint(255 * image / max(1, image.max())).astype(np.uint8)


def is_like_mnist(images):
    """Return which of some images, (n, h, w), light on dark, have ink of the size of MNIST's digits, whose longer side
    is 20 px; and, of 28x28 px, whether its center of mass is at the center, too. On a larger canvas it may have the
    sizes and positions of affNIST's."""
    side, brightest = images.shape[1], images.max((1, 2), keepdims=True)
    inked = images > FAINT * np.maximum(brightest, 1e-9)
    lengths = []
    for lines in (inked.any(2), inked.any(1)):
        lengths.append(lines.shape[1] - lines.argmax(1) - lines[:, ::-1].argmax(1))
    low, high = MNIST_SPAN if side == SIDE else CANVAS_SPAN
    span = np.maximum(*lengths)
    fits = (span >= low) & (span <= high)
    if side == SIDE:
        at, total = np.arange(side) + 0.5 - side / 2, np.maximum(images.sum((1, 2), dtype=float), 1e-9)
        for axis in (1, 2):
            fits &= np.abs(images.sum(axis, dtype=float) @ at / total) <= OFF_CENTER
    return fits | ~inked.any((1, 2))                                    # nothing to center


# -------------------------------------------------------------- data sets

def is_junk(path):
    """Return whether a system or an editor left a file or folder among pictures: hidden, or of a known name"""
    return path.name.startswith(".") or path.name.lower() in JUNK


def visible(folder):
    """Return the paths in a folder that are not junk, sorted"""
    return sorted(path for path in folder.iterdir() if not is_junk(path))


def as_array(values):
    """Return numbers of any kind as an array. Raise InputError if the object refuses to become one"""
    if isinstance(values, (list, tuple)):
        values = [as_array(each) if hasattr(each, "detach") else each for each in values]
    for name in ("detach", "cpu"):                                      # of a tensor: its gradient, its accelerator
        if hasattr(values, name):
            values = getattr(values, name)()
    try:
        return np.asarray(values)
    except (ValueError, TypeError):
        raise
    except Exception as error:                                          # each library has its own
        fault = " ".join(str(error).split())
        raise InputError(f"an object of type {type(values).__name__} becomes no array ({fault:.80}). Give a NumPy array"
                         ) from None


def image_of(image):
    """Return a picture of PIL, or the path of a picture file, as gray levels, (h, w) uint8; other objects as they are.
    Raise InputError for a picture that cannot be read"""
    if is_picture(image):
        return np.rint(255 * gray_levels(*pixels_of(image))).astype(np.uint8)
    if isinstance(image, memoryview):
        return np.asarray(image)
    if not isinstance(image, (str, Path)):
        return image
    try:
        return np.rint(255 * read_picture(image)).astype(np.uint8)
    except InputError as error:
        raise InputError(f"{image}: {error}") from None


def as_arrays(images):
    """Return images as a list of arrays of numbers, (n, ...): all in one or, where their sizes differ, one for each"""
    if is_picture(images) or isinstance(images, (str, Path)):
        images = [images]
    if isinstance(images, collections.abc.Mapping):
        keys = ", ".join(map(repr, images))
        raise InputError(f"images are a {type(images).__name__} with the keys {keys:.60}. Give the array of one key, "
                         "or, if each key has an image, list(images.values())")
    if isinstance(images, memoryview):
        images = np.asarray(images)
    if not hasattr(images, "__array__") and not isinstance(images, bytes) or (
            isinstance(images, np.ndarray) and images.dtype == object):
        with contextlib.suppress(TypeError):
            images = [image_of(image) for image in images]
    for split in (lambda: [as_array(images)], lambda: [as_array(image)[None] for image in images]):
        with contextlib.suppress(ValueError, TypeError):
            arrays = split()
            if arrays and all(array.dtype.kind in "buif" and array.ndim > 1 and array.size for array in arrays):
                return arrays
    shape = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else f"of type {type(images).__name__}"
    raise InputError(f"images are {shape}. Give real numbers: (n, H, W) or, with 1 to 4 channels, (n, H, W, C)")


def one_channel(gray, sides=(), cameras=1):
    """Return an array of images, as `gray_images` takes it, as gray levels (n, H, W), or (n, H, W, 2) of two cameras"""
    given, width = f"{gray.dtype} {gray.shape}", gray.shape[1]
    if gray.ndim > 2 and gray.shape[0] == gray.shape[1] != gray.shape[-1] > 4 and width in (*sides, SIDE):
        raise InputError(f"images are {given}. Give (n, H, W), the images first: np.moveaxis(images, -1, 0)")
    if gray.ndim == 2:
        is_flat = (side := math.isqrt(width)) ** 2 == width and (not sides or side in sides)
        gray = gray.reshape(-1, side, side) if is_flat else gray[None] if sides else gray
    if gray.ndim == 4 and gray.shape[1] <= 3 and gray.shape[3] > 4:
        gray = gray.transpose(0, 2, 3, 1)
    if gray.ndim == 4 and gray.shape[3] == 4:
        white = 255 if gray.max() > 1 else 1
        gray = white * on_paper(gray / np.float32(white))
    if gray.ndim == 4 and gray.shape[3] == 3:
        gray = gray @ np.array([0.299, 0.587, 0.114], np.float32)
    gray = gray[..., 0] if gray.ndim == 4 and gray.shape[3] == 1 else gray
    if min(gray.shape[1:3]) < 8 or gray.shape[3:] not in ((), (cameras,)) or gray.ndim < 3:
        raise InputError(f"images are {given}. Give gray levels, (n, H, W), or colors, (n, H, W, 3)")
    return gray


def check_finite(parts):
    """Raise InputError if one of some arrays of images, (n, ...), has a number that is not finite"""
    n = sum(map(len, parts))
    bad = sum(int((~np.isfinite(part).reshape(len(part), -1).all(1)).sum()) for part in parts)
    if bad:
        raise InputError(f"{bad} of {n} images {'has' if bad == 1 else 'have'} NaN or infinite levels. Leave them out")


def check_not_just_above_1(largest):
    """Raise InputError if the largest level of images is neither of 0 to 1 nor of 0 to 255: taken for 255, a little
    over 1 would make all images black"""
    if 1 < largest < 2:
        raise InputError(f"images have levels up to {largest:.4g}, a little over 1. Clip them to 1, or give 0 to 255")


def gray_images(images, sides=(), cameras=1):
    """Return images as a list of arrays of gray levels, (n, H, W) uint8, light on dark, all in one or, where their
    sizes differ, one for each; and what was done to how many images, a Counter of words.

    images: (n, H, W), (n, H * H), (n, H, W, 1, 3 or 4) or (n, 1 or 3, H, W), or a list of images; gray levels from 0 to
    255 or from 0 to 1, or to another maximum of at most FEW_GRAYS. sides: if given, an array (H, W) is one image unless
    W is the square of one of them. cameras: with 2, images may be (n, H, W, 2) or (n, 2, H, W), too, and none is
    inverted. Raise InputError for what is no image."""
    parts, notes = as_arrays(images), collections.Counter()
    grays = [one_channel(part, sides, cameras) for part in parts]
    check_finite(grays)
    least, largest = (float(of([of(gray) for gray in grays])) for of in (np.min, np.max))
    check_not_just_above_1(largest)
    if least < 0 or largest > 255.5:
        mend = "(x + 1) / 2" if -1 <= least < -0.5 and largest <= 1 else "0 to 255, or 0 to 1, before any normalization"
        raise InputError(f"images have gray levels from {least:.3g} to {largest:.3g}. Give {mend}")
    unit = 1 if largest <= 1 else largest if largest <= FEW_GRAYS else 255
    for k, (part, gray) in enumerate(zip(parts, grays)):
        if gray.size <= part.size / 3:
            notes["colors were turned into gray levels"] += len(gray)
        if unit not in (1, 255):
            notes[f"gray levels from 0 to {largest:g} were scaled to 255"] += len(gray)
        if gray.dtype != np.uint8 or unit != 255:
            gray = np.rint(gray * np.float32(255 / unit)).astype(np.uint8)
        light = np.median(edges(gray), -1) > 127 if cameras == 1 else np.zeros(1, bool)
        if light.mean() < FEW_LIGHT:               # ink that reaches the edge, as of clothes
            notes["light at the edge, left as so few are"] += int(light.sum())
            light[:] = False
        notes["dark on light: inverted"] += int(light.sum())
        grays[k] = np.where(light[:, None, None], 255 - gray, gray) if light.any() else gray
        brightest = int(grays[k].max())
        if brightest < FAINT_LEVEL:
            notes[f"faint, with gray levels up to {brightest} of 255"] += len(gray)
    return grays, +notes


def fitted(grays, sides, convert, is_right=None, report=lambda text: None):
    """Return arrays of images, (n, H, W[, 2]) uint8, as a list of images, of which some are converted; what was done to
    how many, a Counter of words; how many of another size were converted; and the Readings of those that were looked
    at, {number of the image: Reading}.

    Converted are images of another size than sides and, if is_right is given, those that have a frame or a box and
    those that are not right. convert(image from 0 to 1) returns a Reading. is_right(images, (n, H, W)) returns (n,)
    bool. report(text) hears how far it is. Raise InputError for an image without ink."""
    images = [image for gray in grays for image in gray]
    of_other_size, wrong, suspects, start = [], [], [], 0
    for gray in grays:
        rows = np.arange(start, start + len(gray))
        start += len(gray)
        if gray.shape[1] != gray.shape[2] or gray.shape[1] not in sides:
            of_other_size += rows.tolist()
        elif is_right:
            right = is_right(gray)
            framed = frames.may_have_frame(gray) | frames.may_have_box(gray >= 128)
            wrong += rows[~right].tolist()
            suspects += rows[right & framed].tolist()
    notes, readings, sizes = collections.Counter(), {}, {*of_other_size}
    for k in sorted([*of_other_size, *wrong, *suspects]):
        report(f"{k} of {len(images)} images scaled")
        try:
            reading = convert(images[k] / 255)
        except InputError as error:
            if k not in sizes:                                          # of a right size: it stays as it is
                continue
            raise InputError(f"image {k}: {error}. Leave it out") from None
        notes.update(reading.noticed)
        readings[k] = reading
        if k not in suspects or FRAMED in reading.noticed:
            images[k] = reading.image
    notes[OFF] += len(wrong)
    return images, +notes, len(of_other_size), readings


def faults_in_words(faults):
    """Return a message on pictures that cannot be read, {path: what is wrong}: the first with its fault, and others"""
    (path, fault), *others = faults.items()
    if not others:
        return f"{path}: {fault}. Mend this file, or leave it out"
    named = first_of([other for other, _ in others], MOST_NAMED)
    return f"{path}: {fault}. {len(others)} more cannot be read: {named}. Mend these files, or leave them out"


def look_at(names):
    """Return APART with the first names of the pictures of which it is said"""
    return f"{APART}: look at {first_of(names, 3)}"


def arrays_to_mnist(images, report=lambda text: None, center=False):
    """Return images, as `gray_images` takes them, as images like MNIST's, (n, 28, 28) uint8, and a Counter of what was
    done to how many, in words. Images of another size, with center all images, are scaled and centered like pictures.
    report(text) hears how far it is. Raise InputError for an image without ink."""
    def is_right(gray):
        return np.full(len(gray), not center)
    grays, notes = gray_images(images)
    found, noticed, n_scaled, readings = fitted(grays, (SIDE,), lambda gray: mnist_of(gray, True), is_right, report)
    found = np.stack(found)
    apart = {k for k, reading in readings.items() if APART in reading.noticed}
    apart.update(np.flatnonzero(frames.have_line_at_edge(found >= 128)).tolist())
    del noticed[APART]
    if apart:
        noticed[look_at([f"image {k}" for k in sorted(apart)])] = len(apart)
    noticed[f"scaled so that the ink fits into {BOX}x{BOX} px"] += n_scaled + noticed.pop(OFF, 0)
    noticed[LEFT] += int((~is_like_mnist(found)).sum())
    return found, notes + noticed


def is_emnist(path):
    """Return whether a file holds EMNIST's images, by its name"""
    return bool(EMNIST_NAME.search(Path(path).name))


def upright(images, path):
    """Return the array of images in a file upright, and TRANSPOSED, or "" if nothing was done: square images of EMNIST
    are stored transposed, in a file of any kind. images: (n, H * H), (n, H, H), (n, H, H, C) or (n, C, H, H)"""
    if not is_emnist(path):
        return images, ""
    side = math.isqrt(images.shape[-1])
    if images.ndim == 2 and side * side == images.shape[1]:
        return images.reshape(-1, side, side).swapaxes(1, 2).reshape(images.shape), TRANSPOSED
    for axis in (1, 2):
        if images.ndim in (3, 4) and images.ndim > axis + 1 and images.shape[axis] == images.shape[axis + 1]:
            return images.swapaxes(axis, axis + 1), TRANSPOSED
    return images, ""


def contents(images):
    """Return a number for each of some images, (n,); copies of an image have the same one"""
    seen = {}
    return np.array([seen.setdefault(hashlib.blake2b(image.tobytes(), digest_size=16).digest(), k)
                     for k, image in enumerate(images)], np.int64)


def choose_test_images(content, labels, seed):
    """Return which images are for testing, (n,) bool: a seventh of the different images of each class, with all copies.

    content, labels: of each image, (n,); content as `contents` returns it.
    """
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        different = np.unique(content[labels == label])
        order = np.random.default_rng((seed, label)).permutation(len(different))
        is_test |= np.isin(content, different[order[:-(-len(different) // TEST_SHARE)]])
    return is_test


def idx_bytes(array):
    """Return an array of uint8 values as the bytes of an idx file"""
    return b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def text_lines(names, errors="strict"):
    """Return names as the bytes of a text file, one per line. Raise InputError for a name that is not UTF-8."""
    try:
        return "".join(" ".join(name.splitlines()) + "\n" for name in names).encode(errors=errors)
    except UnicodeEncodeError as error:
        raise InputError(f"the name of a folder is not UTF-8 ({error.object!r}). Rename it") from None


def write_files(out, files):
    """Write files, {name: bytes}, into a folder: each whole, and none if one cannot be written"""
    make_folder(out)
    check_writable(*(out / name for name in files))
    try:
        for name, content in files.items():
            write_atomically(out / f"{name}.new", lambda file, content=content: file.write(content))
        for name in files:
            (out / f"{name}.new").replace(out / name)
    finally:
        for name in files:
            (out / f"{name}.new").unlink(missing_ok=True)
