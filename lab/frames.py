"""Frames, shadows and boxes around what is drawn or written: which part of a picture is its paper, and
which ink is a box that encloses the rest."""
import numpy as np

MIN_STEP = 0.12                    # between the gray levels of frame and paper, where black to white is 1
MAX_FRAME = 0.33                   # of the picture's side, on each side
MAX_FRAMES = 3                     # frames around frames
LIKE = 0.35                        # of the step: gray levels that differ by less are of one surface
ON_EDGE, ON_PAPER = 0.9, 0.85      # share of the picture's edge that is frame; the same, of the paper
ON_PAPER_WITHIN = 0.995            # the same, of a frame within a frame
MAX_INK = 0.5                      # of the paper
MIN_INK = 8                        # px
ALONG_EDGE = 0.1                   # share of the picture's edge that a shadow on it covers
WIDE = 6                           # a region is wider than this part of the picture's longer side
BOX_LEVELS = 0.12, 0.5             # of ink, where boxes are looked for: with soft edges, and without
BOX_SPAN = 0.6                     # of the picture's sides that a box spans
BOX_BAND = 0.07                    # of a box's side: how far its line may leave a straight one
SLACK = 0.02                       # of the picture's side: how far a sheet may reach beyond its straight sides
SHEET, ON_SHEET = 0.75, 0.95       # share of a sheet that is blank; of what is light that is on the sheet
BOX_LINE = 0.85                    # share of a side that has a line
MIN_IN_RING = 0.35                 # the same, of a ring, since some fonts have a dot in a zero
RING_BAND = 0.15                   # of a ring's side: how far its middle part may leave a straight line
RULE_SPAN, RULE_WIDTH = 0.8, 0.06  # of the picture's sides: a line across it
MIN_INSIDE = 0.2                   # of a box's longer side: what is drawn in it


def edges(images):
    """Return the gray levels at the edges of images, (..., h, w), as (..., 2 h + 2 w)"""
    return np.concatenate([images[..., 0, :], images[..., -1, :], images[..., 0], images[..., -1]], -1)


def sides_of(image):
    """Return four views of an image, (h, w), each of which begins at one side"""
    return image, image[::-1], image.T, image.T[::-1]


# -------------------------------------------------------------- frames

def paper_of(gray):
    """Return the slices of rows and columns of a picture that are its paper: all, unless it has a
    frame on all four sides.

    gray: gray levels from 0 to 1, (h, w). A frame has one gray level, another than the paper has
    within it, and the paper has ink, which is less than half of it. A frame within a frame is left
    out, too, unless ink touches it: it may be a letter. A picture whose frames end at a drawing, as a
    square does, has none.
    """
    top, left = 0, 0
    paper = gray
    found = before = (slice(0, gray.shape[0]), slice(0, gray.shape[1]))
    for k in range(MAX_FRAMES):
        inner = within_frame(paper, ON_PAPER if k == 0 else ON_PAPER_WITHIN)
        if inner is None:
            if k > 0 and within_frame(paper, ON_PAPER) is not None:     # what ink touches is no paper
                return before
            break
        rows, columns = inner
        top, left = top + rows.start, left + columns.start
        paper = paper[inner]
        before = found
        if has_ink(paper):
            found = (slice(top, top + paper.shape[0]), slice(left, left + paper.shape[1]))
    return found


def within_frame(gray, on_paper):
    """Return the slices within the outermost frame of a picture, or None if it has no frame. on_paper:
    share of the paper's edge that has the paper's gray level"""
    frame = np.median(edges(gray))
    sides = sides_of(gray)
    depths, levels = zip(*(depth_of_frame(side, frame) for side in sides))
    paper = np.median(levels)
    step = abs(paper - frame)
    if max(depths) == 0 or min(depths) == 0 or step < MIN_STEP or np.ptp(levels) > LIKE * step:
        return None
    if np.mean(np.abs(edges(gray) - frame) < LIKE * step) < ON_EDGE:
        return None
    slack = max(1, min(gray.shape) // 20)                                 # px
    for more in range(slack + 1):                                       # of a frame that is not quite upright
        rows = slice(depths[0] + more, gray.shape[0] - depths[1] - more)
        columns = slice(depths[2] + more, gray.shape[1] - depths[3] - more)
        if min(rows.stop - rows.start, columns.stop - columns.start) < 8:
            return None
        paper_edge = edges(gray[rows, columns])
        if np.mean(np.abs(paper_edge - paper) < LIKE * step) >= on_paper:
            break
    else:
        return None
    for side, depth in zip(sides, depths):                              # the frame ends where the paper begins
        is_frame = np.mean(np.abs(side[:depth] - frame) < LIKE * step, 1) >= ON_EDGE
        if depth + more - int(np.argmin([*is_frame, False])) > slack:
            return None
    return rows, columns


def depth_of_frame(gray, frame):
    """Return how many lines at the top of a picture belong to a frame of a gray level, and the gray
    level below them; 0 lines and the frame's level if there is no other one"""
    margin = gray.shape[1] // 5
    lines = gray[:max(2, int(MAX_FRAME * len(gray))), margin:gray.shape[1] - margin]
    profile = np.median(lines, 1)
    others = np.flatnonzero(np.abs(profile - frame) >= MIN_STEP)
    if not len(others):
        return 0, frame
    depth = int(others[0])
    while depth + 1 < len(profile) and depth < others[0] + 3:           # soft edges are between the two
        if abs(profile[depth + 1] - frame) < abs(profile[depth] - frame) + MIN_STEP / 4:
            break
        depth += 1
    return depth, profile[depth]


def has_ink(paper):
    """Return whether something is drawn on a picture's paper, whose gray level is that of its edge"""
    contrast = np.abs(paper - np.median(edges(paper)))
    inked = contrast > max(MIN_STEP, 0.5 * contrast.max())
    return MIN_INK <= inked.sum() <= MAX_INK * inked.size


def may_have_frame(images):
    """Return which of some images, (n, h, w) uint8, may have a frame: all four sides have a line, near
    the edge, most of which differs from the edge. Those of handwritten digits have none."""
    found = np.ones(len(images), bool)
    frame = np.median(edges(images), -1)
    for side in (images, images[:, ::-1], images.swapaxes(1, 2), images.swapaxes(1, 2)[:, ::-1]):
        margin = side.shape[2] // 5
        lines = side[found, :max(2, int(MAX_FRAME * side.shape[1])), margin:side.shape[2] - margin]
        differs = np.abs(lines - frame[found, None, None]) >= 255 * MIN_STEP
        found[found] = (differs.mean(2) >= 0.8).any(1)
    return found


# -------------------------------------------------------------- shadows

def region_at_edge(inked):
    """Return the part of some ink, (h, w) bool, that is a region at the picture's edge, such as a shadow
spots that touch much of the edge and are wider somewhere than a stroke; or None"""
    if not edges(inked).any():
        return None
    side = max(3, max(inked.shape) // WIDE)
    wide = ~maximum(~inked, side)
    spots = spots_of(inked)
    numbers = np.intersect1d(edges(spots), spots[wide & inked])
    region = np.isin(spots, numbers[numbers > 0])
    if edges(region).mean() < ALONG_EDGE:
        return None
    return region


def maximum(image, side):
    """Return the largest value of an image, (h, w), in a square around each pixel"""
    for _ in range(2):
        half = side // 2
        padded = np.pad(image, ((half, side - 1 - half), (0, 0)), mode="edge")
        reach = 1                                                       # rows of which it is the maximum
        while reach < side:
            step = min(reach, side - reach)
            padded = np.maximum(padded[:-step], padded[step:])
            reach += step
        image = padded.T
    return image


# -------------------------------------------------------------- boxes

def is_sheet(inked):
    """Return whether some ink, (h, w) bool, is a sheet of paper that is not quite upright: most of the
    picture, it covers the quadrilateral between its highest, rightmost, lowest and leftmost pixels"""
    if inked.mean() < BOX_SPAN ** 2:
        return False
    rows, columns = np.nonzero(inked)
    outermost = rows.argmin(), columns.argmax(), rows.argmax(), columns.argmin()
    corners = [(rows[k], columns[k]) for k in outermost]
    y, x = np.indices(inked.shape)
    within = np.ones(inked.shape, bool)
    for (y0, x0), (y1, x1) in zip(corners, corners[1:] + corners[:1]):
        area = (x1 - x0) * (y - y0) - (y1 - y0) * (x - x0)              # negative beyond the side, clockwise
        within &= area >= -SLACK * max(inked.shape) * np.hypot(y1 - y0, x1 - x0)
    covered = inked[within].sum()
    return covered >= SHEET * within.sum() and covered >= ON_SHEET * len(rows)


def spots_of(inked):
    """Return the number of its spot for each pixel of some ink, (h, w) bool: from 1; 0 without ink.
    Spots are connected, also diagonally.

    Each row of a spot consists of runs of pixels. Runs that touch take the smaller of their numbers,
    until no number changes.
    """
    width = inked.shape[1] + 1                                          # a blank column ends each row
    flat = np.pad(inked, ((0, 0), (0, 1))).ravel()
    change = np.diff(flat.astype(np.int8), prepend=0, append=0)
    starts, ends = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
    first = np.searchsorted(ends, starts + width - 1, side="right")     # of those that touch it below
    n_below = np.searchsorted(starts, ends + width, side="right") - first
    above = np.repeat(np.arange(len(starts)), n_below)
    below = np.arange(n_below.sum()) + np.repeat(first + n_below - n_below.cumsum(), n_below)
    numbers = np.arange(len(starts))
    while True:
        smaller = numbers.copy()
        least = np.minimum(numbers[above], numbers[below])
        np.minimum.at(smaller, numbers[above], least)
        np.minimum.at(smaller, numbers[below], least)
        smaller = smaller[smaller]
        if np.array_equal(smaller, numbers):
            break
        numbers = smaller
    spots = np.zeros(inked.shape, int)
    spots[inked] = np.repeat(np.unique(numbers, return_inverse=True)[1] + 1, ends - starts)
    return spots


def box_in(ink):
    """Look for a box around what is drawn: a spot of ink with a line on each of its four sides, or one
    that encloses the rest, such as a circle.

    ink: (h, w) from 0 to 1. Return the ink without the box, or None if there is no box with ink in
    it; and whether there is a line or a box that cannot be told from what is drawn: the ink touches
    the box, as in a square B, or a line crosses the picture, as a bar over a letter does.
    """
    in_doubt = False
    for level in BOX_LEVELS:
        inked = ink >= level
        if not may_be_boxed(inked):
            continue
        spots = spots_of(inked)
        spans = spans_of(spots)
        areas = (spans[:, 1] - spans[:, 0]) * (spans[:, 3] - spans[:, 2])
        largest = int(np.argmax(areas))
        top, bottom, left, right = spans[largest]
        box = spots[top:bottom, left:right] == largest + 1
        inside = np.zeros(ink.shape, bool)
        inside[top:bottom, left:right] = inked[top:bottom, left:right] & ~box
        is_rectangle = is_box(box, box_of(inked).shape) and middle_of(box).mean() <= MAX_INK
        in_doubt = is_rectangle and has_middle(box)
        if level == max(BOX_LEVELS) and has_rule(spans, ink.shape):
            in_doubt = True
        if in_doubt or inside.sum() < MIN_INK:
            continue
        y0, y1, x0, x1 = span_of(inside)
        share = max(y1 - y0, x1 - x0) / max(box.shape)
        is_ring = share >= MIN_IN_RING and encloses(box, inside[top:bottom, left:right])
        if min(box.shape[0] / ink.shape[0], box.shape[1] / ink.shape[1]) < BOX_SPAN:
            is_ring = False                                             # a letter, such as a theta
        if is_ring or is_rectangle and share >= MIN_INSIDE:
            return np.where(near(inside), ink, 0), False
    return None, bool(in_doubt)


def may_be_boxed(inked):
    """Return whether some ink, (h, w) bool, may have a box, a ring or a line across the picture"""
    if not inked.any():
        return False
    drawn = box_of(inked)
    if may_have_box(drawn[None])[0] and is_box(within_lines(drawn), drawn.shape):
        return True
    if max(inked.mean(1).max(), inked.mean(0).max()) >= RULE_SPAN * BOX_LINE:
        return True
    if min(drawn.shape) < 8:
        return False
    for side in (drawn, drawn.T):
        lines = side[len(side) // 4:len(side) - len(side) // 4]
        first, last = lines.argmax(1), lines[:, ::-1].argmax(1)
        runs = (np.diff(np.pad(lines, ((0, 0), (1, 0))).astype(int), axis=1) == 1).sum(1)
        if max(first.max(), last.max()) > RING_BAND * side.shape[1] or runs.max() < 3:
            return False
    return True


def encloses(ring, inside):
    """Return whether a spot has ink on both sides of what is in it, in each row and column"""
    for spot, drawn in ((ring, inside), (ring.T, inside.T)):
        lines = drawn.any(1)
        spot, drawn = spot[lines], drawn[lines]
        before = spot.argmax(1) < drawn.argmax(1)
        after = spot[:, ::-1].argmax(1) < drawn[:, ::-1].argmax(1)
        if not (spot.any(1) & before & after).all():
            return False
    return True


def has_rule(spans, shape):
    """Return whether one of several spots is a line across a picture of a shape: it is long and thin"""
    sizes = [((bottom - top) / shape[0], (right - left) / shape[1]) for top, bottom, left, right in spans]
    return len(sizes) > 1 and any(max(size) >= RULE_SPAN and min(size) <= RULE_WIDTH for size in sizes)


def may_have_box(inked):
    """Return which of some images of ink, (n, h, w) bool, may have a box: a line in its upper, lower,
    left and right half"""
    found = np.ones(len(inked), bool)
    for sides in (inked, inked.swapaxes(1, 2)):
        half = sides.shape[1] // 2
        is_line = lines_in(sides[found])
        found[found] = is_line[:, :half].any(1) & is_line[:, half:].any(1)
    return found


def have_line_at_edge(inked):
    """Return which of some images of ink, (n, h, w) bool, have a thin line along an edge: a row or a
    column, next to which there is less than half as much ink"""
    found = np.zeros(len(inked), bool)
    for side in (inked, inked[:, ::-1], inked.swapaxes(1, 2), inked.swapaxes(1, 2)[:, ::-1]):
        share = side[:, :4].mean(2)
        found |= ((share[:, :2] >= BOX_SPAN) & (share[:, 2:] < share[:, :2] / 2)).any(1)
    return found


def lines_in(inked):
    """Return which rows of some images of ink, (n, h, w) bool, are a line, perhaps slanted a little,
    across BOX_LINE of BOX_SPAN of the picture, (n, h)"""
    h = inked.shape[1]
    band = max(1, int(BOX_BAND * h / 2))
    padded = np.pad(inked, ((0, 0), (band, band), (0, 0)))
    thick = np.zeros_like(inked)
    for shift in range(2 * band + 1):
        thick |= padded[:, shift:shift + h]
    return thick.mean(2) >= BOX_LINE * BOX_SPAN


def within_lines(inked):
    """Return the part of a picture's ink, (h, w) bool, from its first to its last line, with the lines"""
    rows, columns = (np.flatnonzero(lines_in(side[None])[0] & side.any(1)) for side in (inked, inked.T))
    return inked[rows[0]:rows[-1] + 1, columns[0]:columns[-1] + 1]


def span_of(inked):
    """Return top, bottom, left and right of some ink, (h, w) bool"""
    rows, columns = (np.flatnonzero(inked.any(axis)) for axis in (1, 0))
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def spans_of(spots):
    """Return top, bottom, left and right of each spot, (n, 4). spots: as spots_of returns them"""
    rows, columns = np.nonzero(spots)
    numbers = spots[rows, columns] - 1
    n = spots.max(initial=0)
    spans = np.tile([len(spots), 0, spots.shape[1], 0], (n, 1))
    np.minimum.at(spans[:, 0], numbers, rows)
    np.maximum.at(spans[:, 1], numbers, rows + 1)
    np.minimum.at(spans[:, 2], numbers, columns)
    np.maximum.at(spans[:, 3], numbers, columns + 1)
    return spans


def box_of(inked):
    """Return the part of a picture that its ink, (h, w) bool, spans"""
    top, bottom, left, right = span_of(inked)
    return inked[top:bottom, left:right]


def is_box(spot, picture):
    """Return whether a spot of ink, (h, w) bool, spans much of a picture of some shape and has a line
    along each side"""
    if min(spot.shape[0] / picture[0], spot.shape[1] / picture[1]) < BOX_SPAN or min(spot.shape) < 8:
        return False
    return n_lines(spot) == 4


def n_lines(spot):
    """Return along how many of its four sides a spot of ink, (h, w) bool, has a line"""
    n = 0
    for side in sides_of(spot):
        band = max(2, round(BOX_BAND * len(side)))
        margin = side.shape[1] // 10                                    # corners may be round
        n += side[:band, margin:side.shape[1] - margin].any(0).mean() >= BOX_LINE
    return n


def middle_of(box):
    """Return the middle of a box, a half of its height and of its width"""
    h, w = box.shape
    return box[h // 4:h - h // 4, w // 4:w - w // 4]


def has_middle(box):
    """Return whether a box, (h, w) bool, has ink in its middle"""
    return bool(middle_of(box).sum() >= MIN_INK)


def near(inked):
    """Return which pixels are inked or next to ink: its soft edges belong to it"""
    padded = np.pad(inked, 1)
    rows = padded[:-2] | padded[1:-1] | padded[2:]
    return rows[:, :-2] | rows[:, 1:-1] | rows[:, 2:]
