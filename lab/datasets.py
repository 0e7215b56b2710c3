"""Published data sets of images in color, in the files that their authors distribute: CIFAR-10 and SVHN."""
import pickle
import re

import numpy as np

from .messages import InputError, counted
from .tables import read_bytes, read_names

SIDE, CHANNELS = 32, 3
N_PIXELS = SIDE * SIDE * CHANNELS
N_BATCHES = 5                      # files of CIFAR-10's training images
CIFAR_FILE = re.compile(r"(data_batch_\d+|test_batch)(\.bin)?")
SVHN_FILE = re.compile(r"(train|test)_32x32\.mat")
SVHN_EXTRA = "extra_32x32.mat"     # 531,131 more training images
AGAIN = "Get the file again"


# -------------------------------------------------------------- pickles

class PickledType:
    """Stands for a NumPy data type in a pickle"""

    def __init__(self, name, *_):
        self.name = name.decode("ascii") if isinstance(name, bytes) else name
        self.order = "|"

    def __setstate__(self, state):
        order = state[1]
        self.order = order.decode("ascii") if isinstance(order, bytes) else order

    def as_type(self):
        """Return the NumPy type, of numbers. Raise ValueError for another"""
        if not re.fullmatch("[uif][1248]", self.name) or self.order not in ("|", "<", ">", "="):
            raise ValueError(f"an array of type {self.name}")
        return np.dtype(self.name).newbyteorder(self.order)


class PickledArray:
    """Stands for a NumPy array in a pickle. A pickle is a program, and may set an array's memory to what it likes: so
    the array is made from its bytes, by as_array, when the whole pickle is known"""

    def __init__(self, *_):
        self.state = None

    def __setstate__(self, state):
        self.state = state

    def as_array(self):
        """Return the array. Raise ValueError or TypeError if its bytes are not as its shape and type say"""
        _, shape, kind, is_fortran, raw = self.state
        if not isinstance(raw, bytes) or not isinstance(kind, PickledType):
            raise ValueError("an array of no numbers")
        order = "F" if is_fortran else "C"
        return np.frombuffer(raw, kind.as_type()).reshape(shape, order=order)


def text_as_bytes(text, encoding):
    """Return text as bytes, as Python 3 writes bytes into a pickle of an old protocol"""
    if encoding != "latin1":
        raise ValueError(f"a text in {encoding}")
    return text.encode("latin1")


HARMLESS = {                       # all that a pickle may call: what it gets in place of it
    **{(module, "_reconstruct"): PickledArray for module in ("numpy.core.multiarray", "numpy._core.multiarray")},
    ("numpy", "ndarray"): PickledArray, ("numpy", "dtype"): PickledType, ("_codecs", "encode"): text_as_bytes}


class HarmlessUnpickler(pickle.Unpickler):
    """Reads a pickle of NumPy arrays, bytes, texts, numbers, lists and dicts, and calls nothing else"""

    def find_class(self, module, name):
        if (module, name) not in HARMLESS:
            raise InputError(f"calls {module}.{name}, which may run code, and is not read. Give a file that its "
                             "authors distribute")
        return HARMLESS[module, name]


def read_pickle(path):
    """Return the dict that a pickle of Python 2 or 3 holds, with texts as keys, bytes as they are and arrays of
    numbers. Raise InputError for a damaged file and for one that would run code"""
    try:
        with open(path, "rb") as file:
            content = HarmlessUnpickler(file, encoding="bytes").load()
        found = {}
        for key, value in content.items():
            if isinstance(value, PickledArray):
                value = value.as_array()
            found[key.decode() if isinstance(key, bytes) else key] = value
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}. {AGAIN}") from None
    except Exception:                  # undocumented: what a damaged file makes pickle raise
        raise InputError(f"{path}: damaged, or not a pickled dict of arrays. {AGAIN}") from None
    return found


# -------------------------------------------------------------- CIFAR-10

def is_cifar(folder):
    """Return whether a folder holds files of CIFAR-10"""
    return any(CIFAR_FILE.fullmatch(path.name) and path.is_file() for path in folder.iterdir())


def cifar_batch(path):
    """Return the images, (n, 32, 32, 3) uint8, and the labels, (n,) from 0, of a file of CIFAR-10: a pickle, or binary
    (.bin). In both a row has the red pixels of an image, then the green ones, then the blue ones. Raise InputError for
    a damaged file"""
    if path.suffix == ".bin":
        raw = np.frombuffer(read_bytes(path), np.uint8)
        if not raw.size or raw.size % (1 + N_PIXELS):
            raise InputError(f"{path}: has {raw.size:,} bytes, and each image of CIFAR-10 {1 + N_PIXELS:,}. {AGAIN}")
        rows = raw.reshape(-1, 1 + N_PIXELS)
        labels, rows = rows[:, 0], rows[:, 1:]
    else:
        content = read_pickle(path)
        if not {"data", "labels"} <= content.keys():
            raise InputError(f"{path}: lacks the images or the labels of a batch of CIFAR-10. {AGAIN}")
        rows, labels = content["data"], np.array(content["labels"])
        is_batch = isinstance(rows, np.ndarray) and rows.dtype == np.uint8 and rows.shape[1:] == (N_PIXELS,)
        if not is_batch or labels.dtype.kind not in "iu" or labels.shape != (len(rows),):
            raise InputError(f"{path}: holds no images of 32x32 px with a label each, as CIFAR-10's. {AGAIN}")
    return rows.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1), labels


def cifar_names(folder):
    """Return the names of the classes, of batches.meta or batches.meta.txt in a folder; [] if it has neither"""
    if (folder / "batches.meta").is_file():
        names = read_pickle(folder / "batches.meta").get("label_names", [])
        return [name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in names]
    if (folder / "batches.meta.txt").is_file():
        return read_names(folder / "batches.meta.txt")
    return []


def read_cifar(paths, say):
    """Yield part ("train" or "test"), images, names of the labels and path of each of some files of CIFAR-10, which may
    be in several folders. say(text) hears of a folder that lacks some. Raise InputError for a damaged file"""
    for folder in sorted({path.parent for path in paths}):
        names = cifar_names(folder)
        for path in sorted(path for path in paths if path.parent == folder):
            images, labels = cifar_batch(path)
            if names and not 0 <= labels.min() <= labels.max() < len(names):
                raise InputError(f"{path}: has labels from {labels.min()} to {labels.max()}, and the folder names of "
                                 f"{counted(len(names), 'class')}. {AGAIN}")
            part = "test" if path.name.startswith("test") else "train"
            yield part, images, [names[label] if names else str(label) for label in labels.tolist()], path
        n_train = sum(path.parent == folder and path.name.startswith("data") for path in paths)
        if n_train != N_BATCHES:
            say(f"note: {folder}: {n_train} of the {N_BATCHES} files of CIFAR-10's training images are read")


# -------------------------------------------------------------- SVHN

def read_svhn(path):
    """Return the images, (n, 32, 32, 3) uint8, and the names of the digits of a file of SVHN's cropped digits, which
    MATLAB wrote: X (32, 32, 3, n) and y (n, 1), in which 10 stands for the digit 0. Raise InputError for a file that
    cannot be read, and where SciPy is missing"""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise InputError(f"{path}: reading .mat files needs SciPy: python3 -m pip install scipy") from None
    try:
        content = loadmat(str(path))
    except Exception as error:             # undocumented: what a damaged file makes SciPy raise
        fault = getattr(error, "strerror", None) or "damaged, or not a file of MATLAB up to version 7"
        raise InputError(f"{path}: {fault}. {AGAIN}") from None
    if "affNISTdata" in content:
        raise InputError(f"{path}: is affNIST's. affnist_capsnet.py tests on it: --affnist-dir FOLDER, which has "
                         "test_batches")
    images, labels = (np.asarray(content.get(name)) for name in ("X", "y"))
    if images.ndim == 3:                   # MATLAB drops an axis of one image
        images = images[..., None]
    has_images = images.dtype == np.uint8 and images.ndim == 4 and images.shape[2] == CHANNELS
    if not has_images or labels.dtype.kind not in "iuf" or labels.size != images.shape[3]:
        raise InputError(f"{path}: lacks X, images (32, 32, 3, n), or y, their labels, of SVHN's cropped digits. Give "
                         "train_32x32.mat and test_32x32.mat")
    labels = labels.ravel().astype(int)
    if not 1 <= labels.min() <= labels.max() <= 10:
        raise InputError(f"{path}: has labels from {labels.min()} to {labels.max()}, and SVHN's are from 1 to 10. "
                         f"{AGAIN}")
    return images.transpose(3, 0, 1, 2), [str(label % 10) for label in labels.tolist()]
