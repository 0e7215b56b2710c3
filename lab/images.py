"""Pictures and arrays as square images of one size, gray or in color, as they are otherwise: for --task images. And
which pictures are drawings on plain paper, that become digits instead."""
import collections
import contextlib
import math
from pathlib import Path

import numpy as np

from . import frames
from .data import (
    WORK_SIDE,
    as_array,
    as_arrays,
    block_means,
    check_finite,
    check_not_just_above_1,
    gray_levels,
    is_picture,
    pixels_of,
    read_pixels,
    resample,
)
from .messages import InputError

LEAST_SIDE, MOST_CHANNELS = 8, 4   # of arrays that may be images
CROPPED = "no square: cropped to the square in the middle"
MUCH_CROPPED = "far from square: cropped to the square in the middle, less than two thirds of the picture"
MUCH_LONGER = 1.5                  # times the shorter side
TRANSPARENT = "transparent: laid on white"
GRAYED = "colors were turned into gray levels"
GRAY = "gray: red, green and blue are equal"
MOVED = "channels moved from the first axis to the last"
LOOKED_AT = 100                    # images of a set at most, by which it is taken for digits or for images
LOOKED_AT_SIDE = 64                # px, to which they are averaged down
DARK = 32                          # of 255: a set whose brightest level is below this has another range
SCALE = ("Give 0 to 255, or 0 to 1. Other quantities: scale each channel by fixed limits, the same for all images: "
         "(x - low) / (high - low)")
USUAL_SIDE = 32                    # px, of images whose own side is of no use
TWO_COLORS = 0.8                   # of the variance of a drawing's colors that paper and ink explain
MOST = 0.5                         # of a drawing, of its edge and of a set
FITS = 8                           # of the shading of paper, and of two colors


# -------------------------------------------------------------- pictures

def on_white(pixels):
    """Return pixels with transparency, (h, w, 4) uint8, as colors on white, (h, w, 3) float64 from 0 to 1. Larger ones
    are averaged down until their shorter side has about WORK_SIDE px"""
    colors = block_means(pixels, max(1, min(pixels.shape[:2]) // WORK_SIDE)) / 255
    alpha = colors[..., 3:]
    return colors[..., :3] * alpha + (1 - alpha)


def in_color(pixels, is_deep):
    """Return pixels, as read_pixels returns them, in color, (h, w, 3) float64 from 0 to 1: of a gray picture the three
    are equal"""
    if is_deep:
        return np.stack([gray_levels(pixels, is_deep)] * 3, -1)
    return on_white(pixels)


def is_transparent(pixels, is_deep):
    """Return whether pixels, as read_pixels returns them, are transparent in some place"""
    return not is_deep and bool((pixels[..., 3] < 255).any())


def is_colorful(pixels):
    """Return whether the pixels of a picture, (h, w, 4) uint8, have strong colors over much of it: more than lamplight
    on paper"""
    every = max(1, min(pixels.shape[:2]) // 100)
    colors = pixels[::every, ::every, :3].astype(int)
    return np.ptp(colors, axis=-1).mean() > 0.3 * 255


def gray_level_of(colors):
    """Return the gray levels of colors, (..., 3) -> (...), as bright as they are seen (ITU-R BT.601)"""
    return colors @ np.array([0.299, 0.587, 0.114])


def cropped_to_square(image, side):
    """Return the square in the middle of an image, (h, w) or (h, w, C) from 0 to 1, scaled to a side, as uint8: each
    pixel is the mean of the area that it covers"""
    height, width = image.shape[:2]
    inner = min(height, width)
    top, left = (height - inner) // 2, (width - inner) // 2
    square = image[top:top + inner, left:left + inner].reshape(inner, inner, -1)
    if inner != side:
        scale = side / inner
        square = np.stack([resample(channel, side, side, scale=scale) for channel in np.moveaxis(square, -1, 0)], -1)
    return np.rint(255 * square).clip(0, 255).astype(np.uint8).reshape(side, side, *image.shape[2:])


def done_to(shape, side):
    """Return the words for what cropped_to_square does to an image of a shape, a set"""
    words = set()
    if max(shape[:2]) > MUCH_LONGER * min(shape[:2]):
        words.add(MUCH_CROPPED)
    elif shape[0] != shape[1]:
        words.add(CROPPED)
    if min(shape[:2]) != side:
        words.add(f"{'enlarged' if min(shape[:2]) < side else 'scaled'} to {side}x{side} px")
    return words


def picture_to_image(picture, side, gray):
    """Return the path of a picture, or a picture of the package PIL, as an image, (side, side, 3) or, if gray,
    (side, side) uint8, and what was done to it, a set of words. Raise InputError as read_picture does"""
    pixels = pixels_of(picture) if is_picture(picture) else read_pixels(picture)
    image = in_color(*pixels)
    words = done_to(image.shape, side)
    if is_transparent(*pixels):
        words.add(TRANSPARENT)
    is_gray = np.ptp(image, axis=-1).max() < 1e-9
    if gray:
        image = gray_level_of(image)
        if not is_gray:
            words.add(GRAYED)
    elif is_gray:
        words.add(GRAY)
    return cropped_to_square(image, side), words


# -------------------------------------------------------------- arrays

def arrays_to_images(images, side, gray, report=lambda text: None):
    """Return images as (n, side, side) or (n, side, side, C) uint8, and what was done to how many, a Counter of words.

    images: (n, H, W), (n, H * H), (n, H, W, C) or (n, C, H, W) with 1 to 4 channels, or a list of images, arrays or
    pictures of the package PIL: uint8, or any numbers from 0 to 255 or from 0 to 1. gray: red, green and blue become a
    gray level. report(text) hears how far it is. Raise InputError for what is no image, or for several numbers of
    channels."""
    notes = collections.Counter()
    if isinstance(images, (list, tuple)) and any(map(is_picture, images)):
        images = [levels_of(image, notes) if is_picture(image) else image for image in images]
    parts = [channels_last(part, notes) for part in as_arrays(images)]
    kinds = {part.shape[3:] for part in parts}
    if len(kinds) > 1:
        raise InputError(f"images have several numbers of channels ({in_words(kinds)}). Give one")
    unit = largest_level(parts)
    found = []
    n = sum(map(len, parts))
    for part in parts:
        if gray and part.ndim == 4:
            part = in_gray(part)
            notes[GRAYED] += len(part)
        for words in done_to(part.shape[1:], side):
            notes[words] += len(part)
        for image in part:
            if len(found) % 1000 == 0:
                report(f"{len(found)} of {n} images read")
            found.append(cropped_to_square(image / unit, side))
    return np.stack(found), +notes


def levels_of(picture, notes):
    """Return a picture of the package PIL in color, (h, w, 3) uint8, and count in notes if it is transparent"""
    pixels = pixels_of(picture)
    notes[TRANSPARENT] += is_transparent(*pixels)
    return np.rint(255 * in_color(*pixels)).astype(np.uint8)


def in_words(shapes):
    """Return numbers of channels in words, as in "1, 3", of the last axes of shapes"""
    return ", ".join(str(math.prod(shape)) for shape in sorted(shapes))


def channels_last(array, notes):
    """Return an array of images as (n, H, W), or as (n, H, W, C) of 2 to 4 channels, and count in notes what moved.
    Raise InputError for other arrays"""
    given = f"{array.dtype} {array.shape}"
    if array.ndim == 2 and math.isqrt(array.shape[1]) ** 2 == array.shape[1]:
        array = array.reshape(len(array), math.isqrt(array.shape[1]), -1)
    if array.ndim == 4 and array.shape[1] <= MOST_CHANNELS < array.shape[3]:
        array = np.moveaxis(array, 1, -1)
        notes[MOVED] += len(array)
    if array.ndim == 4 and array.shape[3] == 1:
        array = array[..., 0]
    has_channels = array.ndim == 3 or (array.ndim == 4 and array.shape[3] <= MOST_CHANNELS)
    if not has_channels or min(array.shape[1:3]) < LEAST_SIDE:
        raise InputError(f"images are {given}. Give (n, H, W) or, with 1 to 4 channels, (n, H, W, C)")
    return array


def largest_level(parts):
    """Return the level of white in arrays: 255, or 1 where no number is larger. Raise InputError for levels of which it
    is not clear what they mean"""
    is_uint8 = all(part.dtype == np.uint8 for part in parts)
    if not is_uint8:
        check_finite(parts)
    least = min(float(part.min()) for part in parts)
    largest = max(float(part.max()) for part in parts)
    if least < 0 or largest > 255:
        raise InputError(f"images have levels from {least:.3g} to {largest:.3g}. {SCALE}")
    check_not_just_above_1(largest)
    white = 1 if largest <= 1 and not is_uint8 else 255
    if 0 < largest < DARK / 255 * white:
        raise InputError(f"images have levels up to {largest:.3g}, and would be nearly black. {SCALE}")
    if white == 1 or is_uint8:
        return white
    for part in parts:
        of_channels = part.max((0, 1, 2)) if part.ndim == 4 else np.array([largest])
        if ((0 < of_channels) & (of_channels <= 1)).any():
            said = ", ".join(f"{level:.3g}" for level in of_channels)
            raise InputError(f"the largest levels of the channels are {said}. Give all channels one range, 0 to 255 "
                             "or 0 to 1")
    return white


def in_gray(part):
    """Return images in color, (n, H, W, 3), as gray levels. Raise InputError for other channels"""
    if part.shape[3] != 3:
        raise InputError(f"--gray: is for red, green and blue, and these images have {part.shape[3]} channels. "
                         "Leave it out")
    return gray_level_of(part)


# -------------------------------------------------------------- drawings or other images

def looked_at(images, most=LOOKED_AT):
    """Return at most so many of some images, evenly spaced, as a list of colors, (h, w, 3) or, of an image with two
    channels, (h, w, 2), from 0 to 1. images: an array or a list of images, as `arrays_to_images` takes them, or a list
    of paths of pictures. What cannot be read is left out"""
    n = len(images) if hasattr(images, "__len__") else 0
    found = []
    for k in np.linspace(0, n - 1, min(n, most)).astype(int).tolist():
        with contextlib.suppress(InputError, ValueError, TypeError, KeyError):
            found.append(colors_of(images[k]))
    return found


def colors_of(image):
    """Return an image, or the picture at a path, as colors, as looked_at does. Raise InputError for what is no image"""
    if isinstance(image, (str, Path)):
        return in_color(*read_pixels(image))
    if is_picture(image):
        return in_color(*pixels_of(image))
    image = channels_last(as_array(image)[None], collections.Counter())[0]
    if image.dtype.kind not in "buif" or not np.isfinite(image).all():
        raise InputError("holds no levels of an image")
    image = image / max(float(image.max()), 1e-9)
    if image.ndim == 2:
        return np.stack([image] * 3, -1)
    return image[..., :3]


def is_drawing(colors):
    """Return whether an image, as looked_at returns it, is a drawing in one color on plain paper: none of two channels
    is.

    The paper covers more than half of the image and of its edge. It may be shaded smoothly: a quadratic surface is
    taken out. Paper and ink, the means of the two kinds of pixels, then explain TWO_COLORS of the variance. A frame
    around the paper is left out. An image of one color is blank paper."""
    if colors.shape[2] == 2:
        return False
    colors = block_means(colors, max(1, min(colors.shape[:2]) // LOOKED_AT_SIDE))
    colors = colors[frames.paper_of(gray_level_of(colors))]
    residual = without_shading(colors)
    is_ink = ink_of_two(residual)
    if not is_ink.any():
        return True
    total = ((residual - residual.mean(0)) ** 2).sum()
    within = sum(((part - part.mean(0)) ** 2).sum() for part in (residual[is_ink], residual[~is_ink]))
    at_edge = frames.edges(is_ink.reshape(colors.shape[:2]))
    has_paper = is_ink.mean() < MOST and at_edge.mean() < MOST
    return bool(has_paper and 1 - within / total >= TWO_COLORS)


def without_shading(colors):
    """Return the pixels of an image, (h, w, 3) -> (h * w, 3), minus a quadratic surface fitted to the half of them that
    is nearest to it: the paper's shading"""
    height, width = colors.shape[:2]
    pixels = colors.reshape(-1, 3)
    y, x = (grid.ravel() for grid in np.mgrid[-1:1:height * 1j, -1:1:width * 1j])
    terms = np.stack([np.ones(len(pixels)), x, y, x * x, x * y, y * y], 1)
    residual = pixels - np.median(pixels, 0)
    for _ in range(FITS):
        distance = np.linalg.norm(residual, axis=1)
        near = distance <= max(np.median(distance), 1e-3)
        residual = pixels - terms @ np.linalg.lstsq(terms[near], pixels[near], rcond=None)[0]
    return residual


def ink_of_two(residual):
    """Return which pixels, (n, 3), are ink, (n,) bool, by two means: of paper, from 0, and of ink, from the pixels that
    are farthest from it. None is if all are alike"""
    distance = np.linalg.norm(residual, axis=1)
    is_ink = distance > max(distance.max() / 2, 1e-6)
    for _ in range(FITS):
        if is_ink.all() or not is_ink.any():
            return np.zeros(len(residual), bool)
        to_ink, to_paper = (np.linalg.norm(residual - residual[part].mean(0), axis=1) for part in (is_ink, ~is_ink))
        is_ink = to_ink < to_paper
    return is_ink
