#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "imageio>=2.31.0"]
# ///
"""Make a data set of your own: turn pictures, arrays or other files into four files like MNIST's in OUT. Drawings
become digits, which all experiments for digits train on; other pictures become images as they are, gray or in color,
for affnist_capsnet.py --task images.

DATA is one of these, or several of its files. "train", "test" or "val" in the name of a folder, file or array says
which part of the data it holds:
  - a folder of PNG or JPEG files with a folder for each class, also below train/ and test/
  - four idx files: MNIST's, EMNIST's, QMNIST's; their folder, torchvision's folder, or FOLDER/PREFIX of their names
  - CSV files: in each row a label and then the gray levels
  - .npz or .npy files of images and labels, as Keras's mnist.npz and MedMNIST's files
  - CIFAR-10, for Python or binary: its folder, or torchvision's; SVHN's train_32x32.mat and test_32x32.mat (needs
    SciPy)

A picture is taken for a drawing if it has one color on plain paper that covers more than half of it and of its edge. If
more than half of up to 100 of the pictures are drawings, all become digits, else images. --as digits and --as images
choose otherwise.

Digits: each picture becomes gray, light on dark, scaled so that its ink fits into 20x20 px, and moved so that the
ink's center of mass lies at the center of 28x28 px, as MNIST's digits are. A frame or box around the ink is left out,
and a warning names pictures with ink that lies apart, such as a line or a second digit. Images of 28x28 px that are
light on dark stay as they are, unless --center is given.

Images: each picture keeps its colors (--gray: it does not) and its background. It is cropped to the square in its
middle and scaled to --side N px (default: their own side, if all are squares of 20 to 64 px, else 32). Arrays keep
their channels, at most four. Train on such a data set with affnist_capsnet.py --task images.

Where no part is for testing, a seventh of each class is. The order is mixed, except that of MNIST itself.

In Python, make does the same with arrays:

    from make_idx import make
    make("data", (images, labels))                             # or make("data", (images, labels), (images, labels))
    make("data", (images, labels), kind="images", side=32)

    python3 make_idx.py drawings data                          # seconds
    python3 affnist_capsnet.py --data-dir data                 # then train on it
    python3 make_idx.py photographs data --as images --side 32
    python3 affnist_capsnet.py --task images --data-dir data
"""
import collections
import dataclasses
import hashlib
import itertools
import os
import re
import string
import sys
import unicodedata
import zipfile
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
from affnist_capsnet import LARGEST_SIDE, LEAST_SIDE, MNIST
from lab.data import (
    APART,
    ENDINGS,
    FRAMED,
    LEFT,
    TOUCHED,
    arrays_to_mnist,
    as_array,
    choose_test_images,
    contents,
    faults_in_words,
    gray_levels,
    idx_bytes,
    is_emnist,
    is_junk,
    is_like_mnist,
    look_at,
    mnist_of,
    read_pixels,
    text_lines,
    upright,
    visible,
    write_files,
)
from lab.datasets import CIFAR_FILE, SVHN_EXTRA, SVHN_FILE, is_cifar, read_cifar, read_svhn
from lab.images import (
    LOOKED_AT,
    MOST,
    USUAL_SIDE,
    arrays_to_images,
    in_words,
    is_colorful,
    is_drawing,
    looked_at,
    picture_to_image,
)
from lab.messages import InputError, Parser, Progress, command_line, counted, first_of, run_cli
from lab.tables import LABELS, read_bytes, read_names, read_table

import numpy as np

MAX_CLASSES, MIN_IMAGES = 62, 3    # classes at most; different images of a class at least, for training, val and test
PARTS = {"train": "train", "training": "train", "test": "test", "testing": "test", "t10k": "test", "val": "val",
         "valid": "val", "validation": "val"}                           # what names of folders and files say
IMAGES = {"x", "image", "images", "img", "imgs", "data", "pixels", "digits"}
ARRAYS = re.compile(r"\.(csv|csv\.gz|npy|npz)$", re.IGNORECASE)
IDX_NAME = re.compile(r"(.*?)[-._]?(train|t10k|test)[-._](images|labels)[-.]idx\d[-.](?:ubyte|int)(?:\.gz)?")
IDX_TYPES = {8: np.uint8, 9: np.int8, 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
EMNIST = {26: string.ascii_uppercase, 47: string.digits + string.ascii_uppercase + "abdefghnqrt",
          62: string.digits + string.ascii_uppercase + string.ascii_lowercase}          # number of classes: names

OBJECTS = "Object arrays"          # in NumPy's message on arrays of Python objects
WITH_CHANNELS = *(name.replace("idx3", "idx4") for name in MNIST if "idx3" in name),    # files of images with channels
WRITTEN = *MNIST, *WITH_CHANNELS, "labels.txt", "test-files.txt"       # the names of all files in OUT
IN_COLOR = "in color, and turned into gray digits; to keep what it shows: --as images"

# What was read of a part of a data set. part: "train", "test", "val" or "" (not said); images: an array, or a list of
# images or of the paths of pictures; labels: n, of any kind; where: the file or folder, or what messages call it;
# files: of pictures, their n names, else None; kind: "images" of a data set that is known for such, else ""
Given = collections.namedtuple("Given", "part images labels where files kind", defaults=(None, ""))
# The same, as images of the data set: images (n, 28, 28) or of another size uint8; labels: n names
Chunk = collections.namedtuple("Chunk", "part images labels files")


@dataclasses.dataclass(frozen=True)
class How:
    """How pictures and arrays become images: as digits, or as they are but for their size. Raise InputError for what
    does not go together"""
    kind: str = "digits"           # or images
    center: bool = False           # of digits: center also images of 28x28 px that are light on dark
    side: int = None               # of images, px
    gray: bool = False             # of images: without their colors
    reason: str = ""               # why this program chose the kind; "" if it was given

    def __post_init__(self):
        if self.kind not in ("digits", "images"):
            raise InputError(f"--as {self.kind}: must be digits or images")
        if self.kind == "images":
            if self.center:
                raise InputError("--center: is for --as digits. Leave it out")
            if self.side is not None and not LEAST_SIDE <= self.side <= LARGEST_SIDE:
                raise InputError(f"--side {self.side}: must be from {LEAST_SIDE} to {LARGEST_SIDE}")
        elif self.side is not None or self.gray:
            raise InputError("--side and --gray: are for --as images. Give that in place of --as digits, or leave them "
                             "out")

    def picture(self, path):
        """Return a picture file as an image, uint8, and what was noticed, a set of words"""
        if self.kind == "images":
            return picture_to_image(path, self.side, self.gray)
        pixels, is_deep = read_pixels(path)
        image, noticed, _ = mnist_of(gray_levels(pixels, is_deep), self.center)
        if self.reason and not is_deep and is_colorful(pixels):
            noticed = {*noticed, IN_COLOR}
        return image, noticed

    def arrays(self, images, report):
        """Return arrays as images, (n, ...) uint8, and what was done to how many, a Counter of words"""
        if self.kind == "images":
            return arrays_to_images(images, self.side, self.gray, report)
        return arrays_to_mnist(images, report, self.center)

    def in_words(self):
        """Return what is said of all images"""
        said = "as digits: gray, light on dark, the ink at the center of 28x28 px"
        if self.kind == "images":
            said = (f"as images of {self.side}x{self.side} px, in 8 bits, cropped and scaled where they have another "
                    "size, otherwise as they are")
        return f"{said}, since {self.reason}" if self.reason else said


def how_given(kind, center, side, gray):
    """Return the How of what was given, or None if the kind is not said and does not follow: side and gray are of
    images, center is of digits. Raise InputError for what does not go together"""
    if kind == "" and (side is not None or gray):
        kind = "images"
    if kind == "" and center:
        kind = "digits"
    return How(kind, center, side, gray) if kind else None


def decided(how, found):
    """Return a How whose kind and side are decided. how: a How, or None if the kind was not given. found: the Givens,
    which are looked at"""
    if how is None and any(given.kind for given in found):
        how = How("images", reason="CIFAR-10 and SVHN are such (otherwise: --as digits)")
    if how is not None and (how.kind == "digits" or how.side is not None):
        return how
    seen = seen_of(found)
    has_channels = any(getattr(given.images, "ndim", 0) == 4 for given in found)
    if how is None and any(colors.shape[2] == 2 for colors in seen):
        how = How("images", reason="they have two channels")
    elif how is None and not seen and has_channels:                          # no images: then this is said
        how = How("images")
    elif how is None:
        n = sum(map(is_drawing, seen))
        is_digits = n > MOST * len(seen) or not seen
        kind, other = ("digits", "images") if is_digits else ("images", "digits")
        how = How(kind, reason=f"{n} of {counted(len(seen), 'image')} looked at are drawings in one color on plain "
                  f"paper (otherwise: --as {other})")
    if how.kind == "images":
        how = dataclasses.replace(how, side=own_side(seen))
    return how


def seen_of(found):
    """Return what is looked at of all Givens together, as looked_at returns it: about LOOKED_AT images, of each Given
    in proportion to its number of images, but at least one"""
    numbers = [len(given.images) if hasattr(given.images, "__len__") else 0 for given in found]
    progress, seen = Progress(), []
    for given, n in zip(found, numbers):
        progress.step(f"{given.where}: {len(seen)} images looked at")
        share = n / max(1, sum(numbers))
        seen += looked_at(given.images, max(1, round(LOOKED_AT * share)))
    return seen


def own_side(seen):
    """Return the side of images, px: their own if all that are looked at are square, of one size and of use, else
    USUAL_SIDE"""
    shapes = {colors.shape[:2] for colors in seen}
    height, width = shapes.pop() if len(shapes) == 1 else (0, 0)
    return height if height == width and LEAST_SIDE <= height <= LARGEST_SIDE else USUAL_SIDE


# -------------------------------------------------------------- names

def words_of(name):
    """Return the words of a name in lower case: x_train, xTrain, trainX, xtrain and X-Train are x and train"""
    words = re.findall("[A-Z]?[a-z]+[0-9]*[a-z]*|[A-Z]+|[0-9]+", name)
    found = []
    for word in (word.lower() for word in words):
        part = next((part for part in PARTS if word.startswith(part) or word.endswith(part)), "")
        rest = word.replace(part, "", 1) if part else ""
        found += [part, rest] if rest in LABELS | IMAGES else [word]
    return found


def part_of(name):
    """Return the part of a data set that a name says: "train", "test", "val", or "" if none"""
    return next((PARTS[word] for word in words_of(name) if word in PARTS), "")


def composed(name):
    """Return a name with composed letters: systems write an accented letter as one character or as two"""
    return unicodedata.normalize("NFC", name)


def kind_of(name):
    """Return what an array holds by its name: "labels", "images", or "" if it does not say"""
    words = set(words_of(name))
    return "labels" if words & LABELS else "images" if words & IMAGES else ""


def by_number(name):
    """Return a key that sorts names with numbers in them by the numbers"""
    return [int(part) if k % 2 else part for k, part in enumerate(re.split(r"(\d+)", name))]


def names_of(labels):
    """Return labels, (n,), (n, 1) or one-hot (n, J), numbers, words or other objects, as a list of n names. Raise
    InputError for other arrays"""
    try:
        labels = as_array(labels)
    except ValueError:                                                  # lists of several lengths
        raise InputError("labels are lists of several lengths. Give one label for each image, (n,)") from None
    if labels.ndim == 2 and labels.shape[1] > 1 and np.isin(labels, (0, 1)).all() and (labels.sum(1) == 1).all():
        labels = labels.argmax(1)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind == "c":
        raise InputError(f"labels are {labels.dtype} {labels.shape}. Give one for each image, (n,)")
    names = [label.decode(errors="replace") if isinstance(label, bytes) else str(label) for label in labels]
    names = [composed(name) for name in names]
    for k, name in enumerate(names):                                    # of floats, as 3.0 and np.savetxt's 3.000e+00
        if name in ("nan", "None", "<NA>", "NaT") and not isinstance(labels[k], str):
            raise InputError(f"label {k} is {name}. Leave this image out, or give its label")
        if re.fullmatch(r"[-+]?\d+\.\d*(e[-+]\d+)?", name) and float(name).is_integer():
            names[k] = str(int(float(name)))
    return names


# -------------------------------------------------------------- folders

def read_folder(folder):
    """Yield the Givens in a folder. Raise InputError for what cannot be read"""
    folder = innermost(folder)
    inside = visible(folder)
    split = [path.name for path in inside if "\\" in path.name and path.is_file()]
    archived = collections.Counter(name.partition("\\")[0] for name in split)
    if os.name != "nt" and max(archived.values(), default=0) > 1:        # a class may be called $\alpha
        raise InputError(f"{folder}: has folders within names of files, such as {split[0]}: a program on Windows made "
                         "the archive. Unpack it with: unzip ARCHIVE.zip -d FOLDER")
    if any(IDX_NAME.fullmatch(path.name) for path in inside):
        yield from read_idx_files(folder, "")
        return
    published = [path for path in inside if is_published(path)]
    if published:
        if (folder / SVHN_EXTRA).is_file():
            Progress().say(f"note: {folder}: {SVHN_EXTRA} is left out. To add it, name all three files")
        yield from read_files(published)
        return
    folders = [path for path in inside if path.is_dir()]
    files = [path for path in inside if ARRAYS.search(path.name)]
    if files and not folders:
        yield from read_files(files)
        return
    parts = [(part_of(path.name), path) for path in folders]
    split = [(part, path) for part, path in parts if part and any(below.is_dir() for below in visible(path))]
    if not split and parts and all(part for part, _ in parts):
        raise InputError(f"{folder}: {', '.join(path.name for path in folders)} hold no folders of classes. Put the "
                         "pictures of each class into a folder of its own")
    for part, path in split or [("", folder)]:
        yield from read_classes(path, part, folder)


def is_published(path):
    """Return whether a path is a file of CIFAR-10 or of SVHN's cropped digits"""
    return path.is_file() and any(name.fullmatch(path.name) for name in (CIFAR_FILE, SVHN_FILE))


def innermost(folder):
    """Return the folder that holds the data: a folder's only folder, torchvision's NAME/raw, or CIFAR-10's. Raise
    InputError if there are several"""
    while True:
        inside = visible(folder)
        found = [path / "raw" for path in [folder, *inside] if (path / "raw").is_dir()
                 and any(IDX_NAME.fullmatch(file.name) for file in (path / "raw").iterdir())]
        found += [path for path in inside if path.is_dir() and is_cifar(path)]
        if len(found) > 1:
            raise InputError(f"{folder}: holds several data sets. Give one of them, such as {found[0]}")
        if found:
            return found[0]
        folders = [path for path in inside if path.is_dir()]
        has_data = any(IDX_NAME.fullmatch(path.name) or ARRAYS.search(path.name) or is_published(path)
                       for path in inside)
        if has_data or len(folders) != 1 or any(path.suffix.lower() in ENDINGS for path in visible(folders[0])):
            return folder
        folder = folders[0]


def read_classes(folder, part, root):
    """Yield a Given of each class: of the paths of the pictures of each folder in a folder. root: files are named from
    there"""
    for of_class in [path for path in visible(folder) if path.is_dir()]:
        paths = [path for path in visible(of_class) if path.suffix.lower() in ENDINGS]
        if not paths:
            raise InputError(f"{of_class}: has 0 PNG or JPEG files. Give at least {MIN_IMAGES} of each class, or "
                             "remove this folder")
        files = [path.relative_to(root).as_posix() for path in paths]
        yield Given(part, paths, [composed(of_class.name)] * len(paths), folder, files)


def say_notes(progress, where, notes, n_images):
    """Print what was done to how many images; as a warning if what they show may have changed"""
    for note, n in notes.items():
        kind = "warning" if note.startswith((FRAMED, TOUCHED, APART)) else "note"
        progress.say(f"{kind}: {where}: {n:,} of {counted(n_images, 'image')}: {note}")


def left_out(folder, used):
    """Return the names of what a system left in a folder, and of the files below it that are not used"""
    junk, unused = [path.name for path in folder.iterdir() if is_junk(path)], []
    for path in visible(folder):
        if path.is_dir():
            more = left_out(path, used)
            junk, unused = junk + more[0], unused + more[1]
        elif path.as_posix() not in used:
            unused.append(path.name)
    return junk, unused


# -------------------------------------------------------------- files

def read_idx_files(folder, prefix):
    """Yield the Givens of the idx files in a folder whose names begin with a prefix. EMNIST, recognized by these names,
    is stored transposed. The names of the classes are those of a labels.txt, if the folder has one"""
    found, prefixes, arrays = collections.defaultdict(dict), set(), {}
    for path in visible(folder):
        match = IDX_NAME.fullmatch(path.name)
        if match and path.name.startswith(prefix):
            found[PARTS[match[2]]][match[3]] = path
            prefixes.add(match[1])
    if len(prefixes) > 1:
        raise InputError(f"{folder}: holds several data sets. Give one of them: "
                         f"{', '.join(str(folder / name) for name in sorted(prefixes))}")
    for part, paths in found.items():
        if len(paths) < 2:
            raise InputError(f"{folder}: lacks the images or the labels of {part}. Get its file")
        images, labels = read_idx(paths["images"]), read_idx(paths["labels"])
        if not labels.size:
            raise InputError(f"{paths['labels']}: holds no labels. Get the file again")
        if labels.ndim == 2:                                            # QMNIST: the class, then where it comes from
            labels = labels[:, 0]
        arrays[part] = images, labels, paths["images"]
    of_emnist = any(map(is_emnist, prefixes))
    is_named = (folder / "labels.txt").is_file()
    for part, (images, labels, where) in arrays.items():
        names = names_of(labels)
        if of_emnist or is_named:
            first, last = (int(of(of(each[1]) for each in arrays.values())) for of in (min, max))
            known = EMNIST.get(last - first + 1, [str(label) for label in range(first, last + 1)])
            if is_named:
                known = read_names(folder / "labels.txt")
            if is_named and (first not in (0, 1) or len(known) != last - first + 1):
                raise InputError(f"{folder}: has labels from {first} to {last}, and labels.txt has "
                                 f"{counted(len(known), 'name')}. Give one a line for labels from 0 or 1, or remove it")
            names = [known[label - first] for label in labels.tolist()]
        yield Given(part, images, names, where)


def read_idx(path):
    """Return the array of an idx file"""
    raw = read_bytes(path)
    try:
        shape = np.frombuffer(raw, ">u4", raw[3], 4)
        return np.frombuffer(raw, IDX_TYPES[raw[2]], offset=4 + 4 * len(shape)).reshape(shape)
    except (IndexError, KeyError, ValueError):
        raise InputError(f"{path}: damaged, or not an idx file. Get the file again") from None


def read_files(paths):
    """Yield the Givens of CSV, .npy and .npz files, and of those of CIFAR-10 and SVHN. Several .npy files whose names
    say neither images nor labels, and no part, hold a class each, by its name. Raise InputError for others"""
    arrays = {}
    of_cifar = [path for path in paths if CIFAR_FILE.fullmatch(path.name) and path.is_file()]
    for part, images, names, path in read_cifar(of_cifar, Progress().say):
        yield Given(part, images, names, path, kind="images")
    paths = [path for path in paths if path not in of_cifar]
    of_classes = [path for path in paths if path.suffix.lower() == ".npy"]
    if len(of_classes) < 2 or any(kind_of(path.stem) or part_of(path.stem) for path in of_classes):
        of_classes = []
    for path in paths:
        if path.name.lower().removesuffix(".gz").endswith(".csv"):
            yield Given(part_of(path.name), *read_csv(path), path)
            continue
        if path.suffix.lower() == ".mat" and path.is_file():
            yield Given(part_of(path.name), *read_svhn(path), path, kind="images")
            continue
        if path in of_classes:
            array = arrays_of(path)[""]
            yield Given(part_of(path.stem), array, [composed(path.stem)] * len(array), path)
            continue
        if path.suffix.lower() not in (".npy", ".npz"):
            fault = "no such file or folder"
            if path.is_file():
                fault = "is no CSV, .npy, .npz or .mat file, and none of CIFAR-10's"
            raise InputError(f"{path}: {fault}. Give one, or a folder of pictures; unpack an archive first")
        for key, array in arrays_of(path).items():
            name = part_of(key) or part_of(path.stem), kind_of(key) or kind_of(path.stem)
            if name in arrays and name[1]:
                raise InputError(f"{path}: has several arrays of {' '.join(name).strip()}. Leave one out")
            arrays[name] = path, array
    if arrays and not any(kind for _, kind in arrays):
        raise InputError(f"{paths[0]}: no name says what its arrays hold. Name them images and labels, or x_train, "
                         "y_train, x_test and y_test")
    for part in sorted({part for part, kind in arrays if kind}):
        if not {(part, "images"), (part, "labels")} <= arrays.keys():
            raise InputError(f"{paths[0]}: lacks the {part} images or labels. Name the arrays images and labels, or "
                             "x_train, y_train, x_test and y_test")
        path, images = arrays[part, "images"]
        yield Given(part, images, arrays[part, "labels"][1], path)


def arrays_of(path, needs_all=True):
    """Return the arrays of a .npy or .npz file by their names, that of .npy by "". Without needs_all those of Python
    objects in a .npz file are left out. Raise InputError for others"""
    key = ""
    try:
        content = np.load(path, allow_pickle=False)
        if not hasattr(content, "files"):
            return {"": content}
        arrays = {}
        for key in content.files:
            try:
                arrays[key] = content[key]
            except ValueError as error:
                if needs_all or OBJECTS not in str(error):
                    raise
        return arrays
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        if OBJECTS in str(error):
            name = key or "labels"
            which = f"the array {key}" if key else "the array"
            raise InputError(f"{path}: {which} holds Python objects, which are not read, as they may run "
                             f"code. Save numbers, or texts as np.array({name}).astype(str)") from None
        fault = getattr(error, "strerror", None) or "not a file of arrays of numbers"
        raise InputError(f"{path}: {fault}. Save it again with np.savez") from None


def read_csv(path, needs_labels=True):
    """Return the images, (n, H * H), and the labels of a CSV file, and print what was decided about its columns"""
    table = read_table(path, needs_labels)
    Progress().say(f"{path}: {table.words}")
    return table.levels, table.labels


# -------------------------------------------------------------- images

def chunks_of(found, how):
    """Return the Chunks of some Givens, and print what was done to how many images. how: a How"""
    chunks = []
    for where, group in itertools.groupby(found, lambda given: given.where):     # all classes of a folder have one
        group = list(group)
        if group[0].files is None:
            chunks += [of_arrays(given, how) for given in group]
        else:
            chunks += of_pictures(group, where, how)
    return chunks


def of_pictures(group, folder, how):
    """Return a Chunk for each class of a folder of pictures, of their Givens"""
    progress, chunks = Progress(), []
    notes, n_pictures, apart, faults = collections.Counter(), 0, [], {}
    for given in group:
        images = []
        for k, path in enumerate(given.images):
            progress.step(f"{path.parent}: {k} of {len(given.images)} pictures read")
            try:
                image, noticed = how.picture(path)
            except InputError as error:
                faults[path] = error
                continue
            images.append(image)
            notes.update(noticed - {APART})
            if APART in noticed:
                apart.append(given.files[k])
        if faults:                                                      # the others are read, to name all that fail
            continue
        images = np.stack(images)
        if how.kind != "images":
            notes[LEFT] += int((~is_like_mnist(images)).sum())
        n_pictures += len(images)
        chunks.append(Chunk(given.part, images, given.labels, given.files))
    if faults:
        kept = "" if how.kind == "images" else "; or keep pictures as they are: --as images"
        raise InputError(f"{faults_in_words(faults)}{kept}")
    if apart:
        notes[look_at(apart)] = len(apart)
    say_notes(progress, folder, +notes, n_pictures)
    return chunks


def of_arrays(given, how):
    """Return the Chunk of a Given that holds arrays of images and labels"""
    progress, images, where = Progress(), given.images, given.where
    if isinstance(where, Path):
        images, words = upright(images, where)
        if words:
            progress.say(f"{where}: {words}")
    try:
        names = names_of(given.labels)
        images, notes = how.arrays(images, lambda text: progress.step(f"{where}: {text}"))
        if len(images) != len(names):
            raise InputError(f"has {len(images)} images and {len(names)} labels. Give a label for each image")
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    say_notes(progress, where, notes, len(images))
    return Chunk(given.part, images, names, None)


# -------------------------------------------------------------- a data set

def data_set_of(chunks, seed):
    """Return Chunks as the files of a data set, {name: bytes}, and a summary and further lines that say what was done.
    Raise InputError for classes that have too few images"""
    shapes = {each.images.shape[3:] for each in chunks}
    if len(shapes) > 1:
        raise InputError(f"has images with several numbers of channels ({in_words(shapes)}). Give one, or --gray")
    images = np.concatenate([each.images for each in chunks])
    named = [label for each in chunks for label in each.labels]
    parts = [each.part for each in chunks for _ in each.labels]
    files = [name for each in chunks for name in each.files or [""] * len(each.labels)]
    tested = {"test", "val"} & {*parts} if len({*parts}) > 1 else ()    # one part alone is split
    tested = "test" if "test" in tested else "".join(tested)
    names = sorted({name for name, part in zip(named, parts) if part != tested or not tested}, key=by_number)
    if unknown := sorted({*named} - {*names}, key=by_number):
        raise InputError(f"test images of class {unknown[0]}, but no training images. Give some, or leave them out")
    if not 2 <= len(names) <= MAX_CLASSES:
        noun = "class" if len(names) == 1 else "classes"
        raise InputError(f"has {len(names)} {noun}. Give 2 to {MAX_CLASSES}")
    labels, content = np.array([names.index(name) for name in named]), contents(images)
    if tested:
        is_test = np.array([part == tested for part in parts])
        said = [f"split: as given, {tested} is for testing"]
        if {*parts} >= {"val", "test"}:
            said[0] += ", val for training"
        is_known = is_test & np.isin(content, content[~is_test])
        if is_known.any():
            said.append(f"warning: {is_known.sum():,} of {is_test.sum():,} test images are training images")
            both = [name for name, known in zip(files, is_known) if name and known]
            if both:
                said[-1] += f" ({first_of(both, 3)})"
    else:
        is_test = choose_test_images(content, labels, seed)
        said = ["split: a seventh of each class is for testing"]
        if n_copies := len(content) - len(np.unique(content)):
            said.append(f"copies of images: {n_copies:,}; all copies of an image are on one side of the split")
    if n_doubtful := len({*zip(content.tolist(), labels.tolist())}) - len(np.unique(content)):
        said.append(f"warning: {counted(n_doubtful, 'image')} in two classes")
    untested = [name for k, name in enumerate(names) if not is_test[labels == k].any()]
    if untested:
        said.append(f"warning: no test images of {first_of(untested, 5)}")
    for k, name in enumerate(names):
        n = len(np.unique(content[(labels == k) & ~is_test]))
        if n < MIN_IMAGES - 1:
            raise InputError(f"class {name} has {counted(n, 'different image')} for training. Give at least "
                             f"{MIN_IMAGES - bool(tested)} different images of each class")
    rows, idx = ordered(images, labels, is_test, seed)
    n_train, n_test = map(len, rows.values())
    said.insert(0, f"{len(names)} classes, {n_train:,} training and {n_test:,} test images")
    texts = {"labels.txt": text_lines(names)}
    if any(files):
        texts["test-files.txt"] = text_lines((files[row] for row in rows["t10k"]), "backslashreplace")
        said[0] += ", whose files are listed in test-files.txt"
    return idx | texts, said


def ordered(images, labels, is_test, seed):
    """Return the rows of the training and test images in mixed order, {"train" or "t10k": rows}, and the bytes of their
    files, {name: bytes}. The order of MNIST's own images stays, since the scripts recognize MNIST by its bytes."""
    rows = {"train": np.flatnonzero(~is_test), "t10k": np.flatnonzero(is_test)}
    mixed = {part: np.random.default_rng((seed, 0, 0)).permutation(some) for part, some in rows.items()}
    for order in rows, mixed:
        idx = {f"{part}-{kind}-ubyte": idx_bytes(array[some]) for part, some in order.items()
               for kind, array in ((f"images-idx{images.ndim}", images), ("labels-idx1", labels))}
        if all(hashlib.sha256(idx.get(name, b"")).hexdigest() == digest for name, digest in MNIST.items()):
            break
    return order, idx


def check_out(out, replace=False):
    """Raise InputError if a folder holds files of a data set. With replace it may hold one of this program's"""
    there = sorted(path.name for path in out.glob("*") if path.name in WRITTEN or IDX_NAME.fullmatch(path.name))
    n_files = len({*there} & {*MNIST, *WITH_CHANNELS})
    is_ours = {*there} <= {*WRITTEN} and n_files == 4 and "labels.txt" in there
    if there and not (replace and is_ours):
        raise InputError(f"{out}: holds a data set or a part of one ({there[0]}). Give another folder, or remove its "
                         "files")


def make(out, train, test=None, seed=0, center=False, kind="", side=None, gray=False):
    """Write arrays as a data set into a folder, in place of one that `make` or this program wrote there, and print what
    was done.

    train, test: (images, labels), images as `arrays_to_mnist` or, of kind "images", `arrays_to_images` takes them,
    labels numbers or names; without test, a seventh of each class is for testing. kind: "digits", "images" or "", which
    chooses by the images. center: whether images of 28x28 px that are light on dark are scaled and centered, too, as
    all other digits are. side: of images, px; gray: of images, whether they lose their colors. Raise InputError for
    other arrays."""
    how = how_given(kind, center, side, gray)
    out, found = Path(out), []
    check_out(out, replace=True)
    for part, arrays in (("train", train), ("test", test)):
        if arrays is not None or part == "train":
            if not isinstance(arrays, (tuple, list)) or len(arrays) != 2:
                raise InputError(f"{part} is of type {type(arrays).__name__}. Give a pair, (images, labels)")
            found.append(Given(part, *arrays, part))
    how = decided(how, found)
    files, said = data_set_of(chunks_of(found, how), seed)
    write_files(out, files)
    for name in {*WRITTEN} - {*files}:                                  # of the data set that was there
        (out / name).unlink(missing_ok=True)
    Progress().say("\n  ".join([f"wrote {out}: {said[0]}", how.in_words(), *said[1:]]))


def without_data(folder):
    """Return what is wrong with a folder without data"""
    if any(path.suffix.lower() in ENDINGS for path in visible(folder)):
        return ("its pictures do not lie in folders of their classes. Put the pictures of each class into a folder of "
                "its own, named like the class")
    return ("holds no folders of pictures, and no idx, CSV, .npy or .npz files, CIFAR-10 or SVHN. Give one that does")


def main():
    parser = Parser(description=__doc__)
    parser.usage = "%(prog)s DATA [DATA ...] OUT [--as digits|images] [--side N] [--gray] [--seed N] [--center]"
    parser.add_argument("sources", type=Path, nargs="+", metavar="DATA", help="a folder with a folder of pictures for "
                        "each class, idx files, CSV files, or .npz or .npy files")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the four files, labels.txt (the names of the "
                        "classes) and, of pictures, test-files.txt (the files of the test images in their order)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice of test images and of the "
                        "order (default: 0)")
    parser.add_argument("--as", dest="kind", choices=("digits", "images"), default="", help="digits: gray, light on "
                        "dark, centered like MNIST's; images: as they are, cropped to a square of --side px, for "
                        "affnist_capsnet.py --task images (default: digits, if more than half are drawings)")
    parser.add_argument("--side", type=int, metavar="N", help=f"of --as images, px, from {LEAST_SIDE} to "
                        f"{LARGEST_SIDE} (default: their own, or {USUAL_SIDE})")
    parser.add_argument("--gray", action="store_true", help="turn colors into gray levels [--as images only]")
    parser.add_argument("--center", action="store_true", help="scale and center also images of 28x28 px that are light "
                        "on dark")
    args = parser.parse_args()
    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: must be at least 0")
    how = how_given(args.kind, args.center, args.side, args.gray)
    check_out(args.out)
    for source in args.sources:
        if source.is_dir() and args.out.resolve().is_relative_to(source.resolve()):
            raise InputError(f"{args.out}: lies in {source}, which is read. Give a folder outside of it")
    found, files, idx_files = [], [], set()
    for source in args.sources:
        match = IDX_NAME.fullmatch(source.name)
        if source.is_dir():
            found += [each._replace(part=each.part or part_of(source.name)) for each in read_folder(source)]
        elif match or not source.suffix and any(source.parent.glob(source.name + "*ubyte*")):
            idx_files.add((source.parent, match[1] if match else source.name))
        else:
            files.append(source)
    for folder, prefix in sorted(idx_files):
        found += read_idx_files(folder, prefix)
    found += read_files(files)
    how = decided(how, found)
    chunks = chunks_of(found, how)
    try:
        if not chunks:
            raise InputError(without_data(args.sources[0]))
        content, said = data_set_of(chunks, args.seed)
    except InputError as error:
        raise InputError(f"{args.sources[0]}: {error}") from None
    write_files(args.out, content)
    for source in [source for source in args.sources if source.is_dir() and any(each.files for each in chunks)]:
        root = innermost(source)
        junk, unused = left_out(source, {(root / name).as_posix() for each in chunks for name in each.files or ()})
        for names, why in ((junk, "that systems leave in folders"), (unused, "no PNG or JPEG of a class")):
            if names:
                said.append(f"left out {counted(len(names), 'file')} ({why}): {first_of(sorted({*names}), 5)}")
    n_train = len(content["train-labels-idx1-ubyte"]) - 8
    script = Path(sys.argv[0]).parent / "affnist_capsnet.py"
    task = ["--task", "images"] if how.kind == "images" else []
    said.append("train on it: " + command_line(script, *task, "--data-dir", args.out, "--n-train",
                                               min(12_000, 100 * n_train)))
    Progress().say("\n  ".join([f"wrote {args.out}: {said[0]}", how.in_words(), *said[1:]]))


if __name__ == "__main__":
    run_cli(main)
