"""Ink that may not belong to what is written: parts of a box, lines, marks, another digit."""
import typing

import numpy as np

from .frames import (
    BOX_LEVELS,
    MIN_IN_RING,
    MIN_INK,
    ON_EDGE,
    RING_BAND,
    box_of,
    n_lines,
    near,
    sides_of,
    span_of,
    spans_of,
    spots_of,
)

LINE_WIDTH = 0.15                  # of a line's length, at most
PROMINENT = 0.4                    # of the largest spot's ink: as prominent
NEAR = 0.25                        # of the core's longer side: what is so near belongs to it
CLOSE = 0.1                        # the same, of lines
LONGER = 1.25                      # how often a line beside the core is longer than it
FAR = 0.6                          # of the longer side of all ink: a core that is as short is small
FLAT = 0.35                        # of its length: the height of what may be a stroke
AT_SIDE = 0.15                     # share of each side of a box with gaps that has ink
N_ANGLES = 64                      # directions of lines across
ACROSS_WIDTH = 0.08                # of its length: a line across, thinner than the strokes of a digit
ON_LINE = 0.95                     # share of it that has ink
BEYOND = 0.1                       # of its length: by which each end reaches beyond the rest
MIN_REST = 0.2                     # share of the ink that is not the line


class Parts(typing.NamedTuple):
    """The ink of a picture in parts, each (h, w) from 0 to 1.

    core: what is written, and what is near; second: a spot apart from it that is as prominent, or None;
    is_around: whether what lies apart surrounds the core, as a box with gaps does."""
    core: np.ndarray
    second: np.ndarray | None = None
    is_around: bool = False


def parts_of(ink, n_pieces=1):
    """Look for ink that may not belong to what is written: a part of a box, a line, a mark in a corner,
    a page number, another digit.

    What is written is the core: the most prominent spot, or the n_pieces most prominent ones, with
    what is near. Any other ink lies apart if, together, it surrounds the core, or makes the whole much
    longer than the core, since an image is scaled by its longer side; of what lies beside the core,
    lines that are longer than the core and spots that enclose it on some sides lie apart, too.

    ink: (h, w) from 0 to 1. Return Parts, or None if nothing lies apart.
    """
    spots = spots_of(ink >= min(BOX_LEVELS))                            # faint ink joins a broken stroke
    n = spots.max(initial=0)
    if n < 2:
        return None
    spans = spans_of(spots)
    sizes = np.bincount(spots.ravel())[1:]
    are_lines = np.array([is_line(*np.nonzero(spots == number)) for number in range(1, n + 1)])

    def ink_of(chosen):
        return np.where(near(np.isin(spots, np.flatnonzero(chosen) + 1)), ink, 0)
    first = most_prominent(spans, sizes, are_lines, ink.shape)
    similar = (sizes >= MIN_IN_RING * sizes[first]) & ~are_lines & ~enclosing(spans, spans[first])
    similar[first] = False
    core = np.zeros(n, bool)
    core[np.argsort(-sizes * similar)[:min(n_pieces - 1, similar.sum())]] = True
    core[first] = True
    if core.all():
        return None
    span = joint_span(spans[core])
    if not are_lines[first] and surrounds(np.isin(spots, np.flatnonzero(~core) + 1), span):
        return Parts(ink_of(core), is_around=True)
    apart = ~core & (are_lines & longer(spans, span) | enclosing(spans, span))
    while True:                                                         # what is near belongs to the core
        more = core | ~apart & (gaps(spans, span) <= NEAR * length_of(span))
        if np.array_equal(more, core):
            break
        core = more
        span = joint_span(spans[core])
    if length_of(span) < FAR * length_of(joint_span(spans)):
        apart = ~core
    if not apart.any():
        return None
    similar &= apart
    if not similar.any():
        return Parts(ink_of(~apart))
    second = np.arange(n) == np.argmax(sizes * similar)
    return Parts(ink_of(~apart), ink_of(second))


def without_line_across(ink):
    """Return ink, (h, w) from 0 to 1, without a thin, straight line of which both ends reach beyond the
    rest: the digit is crossed out, or joined to a line beside it. Return None if there is no such line.

    Lines are looked for between the points that are farthest from each other, and along the ink's sides.
    """
    inked = ink >= max(BOX_LEVELS)
    points = np.argwhere(inked)
    if len(points) < MIN_INK:
        return None
    angles = np.pi * np.arange(N_ANGLES) / N_ANGLES
    along = np.stack([np.sin(angles), np.cos(angles)], 1) @ points.T
    longest = along[np.ptp(along, axis=1).argmax()]
    lines = [(points[longest.argmin()], points[longest.argmax()])]
    for axis in (0, 1):
        for outermost in (points[:, axis].min(), points[:, axis].max()):
            side = points[points[:, axis] == outermost]
            lines.append((side[0], side[-1]))
    for start, end in lines:
        is_rest = beside_line(inked, points, start, end)
        if is_rest is not None:
            rest = np.zeros(ink.shape, bool)
            rest[tuple(points[is_rest].T)] = True
            return np.where(near(rest), ink, 0)
    return None


def beside_line(inked, points, start, end):
    """Return which of the points of some ink, (n, 2), are not on the line between two of them; or None if
    there is no ink on much of the line, if it is not thin, or if its ends do not reach beyond the rest"""
    length = np.hypot(*(end - start))
    if length < MIN_INK:
        return None
    line = start + np.linspace(0, 1, int(length) + 2)[:, None] * (end - start)
    if near(inked)[tuple(np.rint(line).astype(int).T)].mean() < ON_LINE:
        return None
    direction = (end - start) / length
    at = (points - start) @ direction / length
    distance = np.abs((points - start) @ [direction[1], -direction[0]])
    is_end = (at < BEYOND) | (at > 1 - BEYOND)
    half = distance[is_end].max()
    if 2 * half + 1 > ACROSS_WIDTH * length:
        return None
    is_rest = distance > half + 1
    if is_rest.sum() < max(MIN_INK, MIN_REST * len(points)):
        return None
    if at[is_rest].min() < BEYOND or at[is_rest].max() > 1 - BEYOND:
        return None
    return is_rest


def is_line(rows, columns):
    """Return whether pixels at some rows and columns are a straight, thin line in any direction"""
    if len(rows) < MIN_INK:
        return False
    variances = np.linalg.eigvalsh(np.cov(rows, columns))               # of a strip: its side squared / 12
    return variances[0] <= LINE_WIDTH ** 2 * variances[1]


def most_prominent(spans, sizes, are_lines, picture):
    """Return which of several spots is the most prominent: the largest that is no line, or one within it
    that is large, too; of lines alone, the one next to the center

    spans: (n, 4); sizes: (n,) px; are_lines: (n,) bool; picture: its shape."""
    large = sizes >= PROMINENT * sizes.max()
    if are_lines[large].all():
        distances = np.hypot(*(middles(spans) - np.array(picture)[:, None] / 2))
        return int(np.argmin(np.where(large, distances, np.inf)))
    first = int(np.argmax(sizes * (large & ~are_lines)))
    within = large & [enclosing(spans[first][None], span)[0] for span in spans]
    within &= [length_of(span) >= MIN_IN_RING * length_of(spans[first]) for span in spans]
    within[first] = False
    if within.any():
        return int(np.argmax(sizes * within))
    return first


def middles(spans):
    """Return the middles of spans, (n, 4), as rows and columns, (2, n)"""
    return np.stack([spans[:, :2].mean(1), spans[:, 2:].mean(1)])


def enclosing(spans, span):
    """Return which of some spans, (n, 4), overlap another one and reach beyond it on three sides"""
    top, bottom, left, right = span
    beyond = spans[:, 0] < top, spans[:, 1] > bottom, spans[:, 2] < left, spans[:, 3] > right
    return (np.sum(beyond, 0) >= 3) & (gaps(spans, span) == 0)


def longer(spans, span):
    """Return which of some spans, (n, 4), are longer in their direction than another one, at a distance"""
    heights, widths = spans[:, 1] - spans[:, 0], spans[:, 3] - spans[:, 2]
    top, bottom, left, right = span
    is_upright = heights > widths
    is_longer = np.where(is_upright, heights / (bottom - top), widths / (right - left)) > LONGER
    return is_longer & (gaps(spans, span) > CLOSE * length_of(span))


def gaps(spans, span):
    """Return the distances, px, between some spans, (n, 4), and another one; 0 where they overlap"""
    top, bottom, left, right = span
    down = np.maximum(np.maximum(spans[:, 0] - bottom, top - spans[:, 1]), 0)
    along = np.maximum(np.maximum(spans[:, 2] - right, left - spans[:, 3]), 0)
    return np.hypot(down, along)


def surrounds(inked, span):
    """Return whether some ink, (h, w) bool, lies all around a span: near the sides of a rectangle, at a
    part of each"""
    top, bottom, left, right = span
    y0, y1, x0, x1 = span_of(inked)
    if not (y0 < top and bottom < y1 and x0 < left and right < x1):
        return False
    if length_of(span) < MIN_IN_RING * max(y1 - y0, x1 - x0):
        return False
    if min(bottom - top, right - left) < FLAT * length_of(span):        # between two lines, as in a letter
        return False
    box = box_of(inked)
    near_sides = np.zeros(box.shape, bool)
    for side, is_near in zip(sides_of(box), sides_of(near_sides)):
        depth = max(1, int(RING_BAND * len(side)))
        if side[:depth].any(0).mean() < AT_SIDE:
            return False
        is_near[:depth] = True
    return (box & near_sides).sum() >= ON_EDGE * box.sum()


def joint_span(spans):
    """Return top, bottom, left and right of several spans, (n, 4), together"""
    return spans[:, 0].min(), spans[:, 1].max(), spans[:, 2].min(), spans[:, 3].max()


def length_of(span):
    """Return the longer side of a span: top, bottom, left, right"""
    return max(span[1] - span[0], span[3] - span[2])


def is_open_box(ink):
    """Return whether ink, (h, w) from 0 to 1, has a line along three of its sides, as where a digit is
    joined to a part of a box"""
    inked = ink >= max(BOX_LEVELS)
    return bool(inked.any()) and min(box_of(inked).shape) >= 8 and n_lines(box_of(inked)) >= 3
