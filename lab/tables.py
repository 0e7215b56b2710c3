"""Text files of users: names of classes, and CSV files of labels and gray levels."""
import collections
import csv
import gzip
import math
import re
import zlib

import numpy as np

from .messages import InputError, counted

BOMS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16",
        b"\xfe\xff": "utf-16"}                                          # byte-order marks; UTF-32's begins as UTF-16's
LABELS = {"y", "label", "labels", "target", "targets", "class", "classes"}              # names of columns and arrays
SEPARATORS = {"\t": "tab", ";": "semicolon", ",": "comma", "|": "bar", " ": "space"}   # in this order, if two fit
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
IDS = {"id", "index", "idx", "imageid", "image_id", "image id", "row", "filename"}      # columns that are left out
UNNAMED = "unnamed: "              # pandas' name for a column without one, such as a second column of row numbers
MIN_PIXELS, MANY_MORE = 64, 3      # an image has at least so many; columns that may be more than the label and an image

# What was decided about a CSV file. levels: (n, pixels) numbers; labels: n texts, or None; words: the decision in words
Table = collections.namedtuple("Table", "levels labels words")


# -------------------------------------------------------------- text

def read_bytes(path):
    """Return the bytes of a file, raw or .gz. Raise InputError if it cannot be read"""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or 'damaged'}. Get the file again") from None


def text_in(path):
    """Return the text of a user's file, in UTF-8, or in UTF-16 or UTF-32 with its byte-order mark, which
    is left out. Raise InputError for other encodings, naming the line: to guess one would change letters"""
    raw = read_bytes(path)
    encoding = next((name for mark, name in BOMS.items() if raw.startswith(mark)), "utf-8")
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        raise InputError(f"{path}: line {line} is not {encoding.removesuffix('-sig').upper()}. Save the file as UTF-8, "
                         "which editors and Excel have as an encoding or a format") from None


def read_names(path):
    """Return the names in a text file, one a line; empty lines at its end are left out"""
    return [line.strip() for line in text_in(path).rstrip().splitlines()]


# -------------------------------------------------------------- CSV

def read_table(path, needs_labels=True):
    """Return the Table of a CSV file: in each row gray levels and, in a column of its own, a label.

    The separator is that of SEPARATORS which gives most columns, as many in all of the first rows. A
    header is a first row that has words where the second has numbers, or that counts the columns. The
    labels are in the column that a header calls so, else in the first or, if that has one value alone,
    in the last. Columns of row numbers or of ids are left out, as columns_of finds them. Without needs_labels a
    file may have pixels alone. Raise InputError for a file that is not so, and for an empty label.
    """
    lines = [line for line in text_in(path).splitlines() if line.strip(" ,;\t|")]
    separator = max(SEPARATORS, key=lambda separator: n_columns(lines[:6], separator))
    if n_columns(lines[:6], separator) < 2:
        raise InputError(f"{path}: has no rows of columns. Give a label and gray levels in each row, between commas")
    if all(line.endswith(separator) for line in lines[1:]):
        lines = [line.removesuffix(separator) for line in lines]
    first, *others = csv.reader(lines[:6], delimiter=separator)
    header = header_of(first, others)
    if header and not others:
        raise InputError(f"{path}: has a header alone. Give a label and gray levels in each row")
    lines = lines[1:] if header else lines
    width = len(others[0] if header else first)
    check_widths(path, lines, separator, width, bool(header))
    header = header or [""] * width
    header = [""] * (width - len(header)) + header                      # R's header has no name for row numbers
    cells = cells_of(lines, separator)
    left_out, label = columns_of(path, cells, header, needs_labels)
    used = [k for k in range(width) if k != label and k not in left_out]
    check_no_more(path, cells_of(lines[:20], separator), header, used)
    words = [f"separator {SEPARATORS[separator]}", "header" if any(header) else "no header"]
    for k in left_out:
        words.append(f"column {k + 1} ({header[k] or 'row ' + ('numbers' if are_numbers(cells(k)) else 'names')}) "
                     "left out")
    if label is not None:
        words.append(f"labels in column {label + 1}" + (f" ({header[label]})" if header[label] else ""))
    words.append(f"{len(used)} pixels")
    labels = None if label is None else [cell.strip() for cell in cells(label)]
    if labels and "" in labels:
        k = labels.index("") + 1 + any(header)
        raise InputError(f"{path}: row {k} has no label. Give it one, or remove the row")
    return Table(levels_of(path, lines, separator, used, any(header)), labels, ", ".join(words))


def n_columns(lines, separator):
    """Return how many columns all of some lines have with a separator; 1 if they have several numbers"""
    body = [line.removesuffix(separator) for line in lines[1:] or lines]
    widths = {len(row) for row in csv.reader(body, delimiter=separator)}
    return widths.pop() if len(widths) == 1 else 1


def header_of(first, others):
    """Return the names of columns in a first row, in lower case, or None if it is a row as the others"""
    names = [cell.strip().lower() for cell in first]
    if LABELS & {names[0], names[-1]} or LABELS & {*names[:3]}:
        return names
    numbers = [float(name) for name in names if NUMBER.fullmatch(name)]
    n_words = len(names) - len(numbers)
    n_below = sum(not NUMBER.fullmatch(cell.strip()) for cell in others[0]) if others else 1
    counts_up = len(numbers) > MIN_PIXELS and bool((np.diff(numbers[1:]) == 1).all())
    return names if n_words > n_below or counts_up else None


def check_widths(path, lines, separator, width, has_header):
    """Raise InputError unless all lines have a number of columns"""
    is_quoted = any('"' in line for line in lines)
    rows = csv.reader(lines, delimiter=separator) if is_quoted else lines
    for k, row in enumerate(rows):
        n = len(row) if is_quoted else row.count(separator) + 1
        if n != width:
            raise InputError(f"{path}: row {k + 1 + has_header} has {counted(n, 'column')} between "
                             f"{SEPARATORS[separator]}s, and the first {width}. Give a label and the same number of "
                             "gray levels in each row")


def cells_of(lines, separator):
    """Return a function that returns the cells of a column"""
    if any('"' in line for line in lines):
        return lambda k: [row[k] for row in csv.reader(lines, delimiter=separator)]
    return lambda k: [line.split(separator, k + 1)[k] for line in lines]


def columns_of(path, cells, header, needs_labels):
    """Return the columns that are left out and the column of labels, or None. cells(k): those of a column.

    Left out are columns that a header calls ids; and the first ones that are more than a label and a square image,
    if they have no name among names or all their cells differ. Raise InputError if a header names the columns, and
    none of them the labels"""
    width = len(header)
    named = [k for k, name in enumerate(header) if name in LABELS]
    if len(named) > 1:
        raise InputError(f"{path}: {len(named)} columns are called label ({', '.join(header[k] for k in named)}). Keep "
                         "one of them")
    left_out = [k for k, name in enumerate(header) if name in IDS or name.startswith(UNNAMED)]
    n_more = more_than_square(width - len(left_out) - 1)
    if not needs_labels and not named and is_square(width - len(left_out) - 1):
        n_more = int(any(header) and not header[0] or counts(cells(0)))
    elif not needs_labels and not named and is_square(width - len(left_out)):
        n_more = 0
    for k in range(n_more):
        is_unnamed = any(header) and not header[k]
        if k not in named + left_out and (is_unnamed or len(set(cells(k))) == len(cells(k))):
            left_out.append(k)
    left_out.sort()
    pixels = [k for k in range(width) if k not in left_out]
    if named:
        return left_out, named[0]
    if is_square(len(pixels)) and not needs_labels:
        return left_out, None
    start = pixels[0]
    if any(header) and not all(NUMBER.fullmatch(header[k]) for k in pixels):
        raise InputError(f"{path}: no column is called label (the header begins {', '.join(header[:3]):.60}). Call the "
                         "column of labels so")
    is_last = len(set(cells(start))) == 1 and len(set(cells(pixels[-1]))) > 1
    return left_out, pixels[-1] if is_last else start


def check_no_more(path, cells, header, used):
    """Raise InputError if the used columns are a few more than the pixels of a square image, naming those that are no
    pixels by their words or their names. cells(k): the first ones of a column"""
    n_more = more_than_square(len(used))
    if not n_more:
        return
    others = [k for k in used if not are_numbers(cells(k))]
    if not others and any(header):                                      # pixel0, pixel1, ... are no other names
        stems = [NUMBER.sub("", name) for name in header]
        usual = collections.Counter(stems[k] for k in used).most_common(1)[0][0]
        others = [k for k in used if stems[k] != usual]
    said = [f"column {k + 1} ({header[k] or 'unnamed'}: {', '.join(cells(k)[:3]):.40}, ...)" for k in others[:n_more]]
    which = ", ".join(said) or f"the first row begins {', '.join(cells(k)[0] for k in used[:4])}"
    side = math.isqrt(len(used))
    raise InputError(f"{path}: has {counted(n_more, 'column')} more than a label and the {side}x{side} pixels of an "
                     f"image: {which}. Remove what is no pixel, or call its column id in a header")


def more_than_square(n):
    """Return how many of n columns are more than the pixels of a square image; 0 if it is none or many"""
    return next((more for more in range(1, MANY_MORE + 1) if is_square(n - more)), 0) if not is_square(n) else 0


def are_numbers(cells):
    """Return whether all cells are numbers"""
    return all(NUMBER.fullmatch(cell.strip(' "')) for cell in cells)


def counts(cells):
    """Return whether cells are numbers that count up"""
    if not are_numbers(cells):
        return False
    return bool((np.diff([float(cell.strip(' "')) for cell in cells]) == 1).all())


def is_square(n):
    """Return whether n pixels are a square image"""
    return n >= MIN_PIXELS and math.isqrt(n) ** 2 == n


def levels_of(path, lines, separator, used, has_header):
    """Return the numbers in the used columns, (n, len(used)), uint8 if all are. Raise InputError for others"""
    options = {"delimiter": separator, "usecols": used, "ndmin": 2, "quotechar": '"', "comments": None}
    try:
        try:
            return np.loadtxt(lines, np.uint8, **options)
        except ValueError:                                              # no integers, which are read ten times as fast
            return np.loadtxt(lines, np.float32, **options)
    except ValueError:
        for k, row in enumerate(csv.reader(lines, delimiter=separator)):
            for j in used:
                if not NUMBER.fullmatch(row[j].strip()):
                    raise InputError(f"{path}: row {k + 1 + has_header}, column {j + 1} has {row[j]!r:.30} in place of "
                                     "a gray level. Mend it; a header may call a column label") from None
        raise InputError(f"{path}: has numbers that are no gray levels. Give 0 to 255, or 0 to 1") from None
