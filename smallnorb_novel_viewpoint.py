#!/usr/bin/env python3
"""smallNORB novel viewpoints: matrix capsules with EM routing, in NumPy, down to the last gradient.

Hinton, Sabour & Frosst, "Matrix capsules with EM routing", ICLR 2018.

Question: a network sees objects from some viewpoints only. Does it know them from viewpoints it never saw, and does a capsule
network lose less there than the best CNN of the same size?

    stage        layer                                                               output (A=32, B=4, C=8)
    Input        a 3D shape from one viewpoint                                       (N, 32, 32, 1)
    Conv1        5x5, stride 2, A channels, ReLU                                     (N, 14, 14, A)
    PrimaryCaps  3x3, B types of a 4x4 pose M and an activation a (logistic)         (N, 12, 12, B, 4x4 + 1)
    ConvCaps     3x3, stride 2, C types: votes V_ij = M_i W_ij, EM routing           (N, 5, 5, C, 4x4 + 1)
    class        votes V_ij = M_i W_ij with W shared over places, plus the place's   (N, 5, 4x4 + 1)
                 coordinates; EM routing over all 25 C children

EM routing (Procedure 1): every parent fits a Gaussian to the votes of its children (M-step), every child divides itself among its
parents by how well its votes fit (E-step), and so on. Loss: cross-entropy on |mu_j|^2/16 + 4 (a_j - 0.5), or the paper's spread
loss. Adam. The backward pass runs through everything, all EM iterations included.

Data: five embedded 3D shapes on any machine (the default), or the real smallNORB's files.

Deviations from the paper: one layer of convolutional capsules instead of two, smaller; a 3x3 kernel for the primary capsules
(`--primary-kernel 1` is the paper's); an inverse temperature 100 times the official code's (`--final-lambda 0.01`); cross-entropy
instead of spread loss (`--loss spread`); dropout of children of the class capsules and strong weight decay.

One command, half a minute on two cores:    python3 smallnorb_novel_viewpoint.py --seed 0
"""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import gzip
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path


# One BLAS thread, set before numpy is imported: the worker threads below share the work in fixed shards instead, so that the
# bits do not depend on their number.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ[name] = "1"
import numpy as np  # noqa: E402
from numpy.lib.stride_tricks import as_strided, sliding_window_view  # noqa: E402

# Axis legend, in the shape comments at line ends:
#   N batch   H W height, width   C channels in   F channels out   K kernel side   B types of primary capsules
#   P = 4 side of a pose matrix   D = P*P a pose as a row   I children of a parent   J types of parents
#   L places of parents in a batch: (N, rows, columns) for convolutional capsules, (N,) for class capsules
#   G groups of children that share transformation matrices

SIDE, N_CLASSES, P, D = 32, 5, 4, 16
CLASS_NAMES = ("cross", "L", "T", "frame", "tripod")
NORB_NAMES = ("animal", "human", "plane", "truck", "car")
SHARD_SIZE = 16                    # samples a worker thread takes at once: fixed, so that sums have one order
CHUNK = 2048                       # samples prepared at once: memory does not grow with the data
PURPOSES = ("data", "init", "batches", "evaluation")
MODELS = ("caps", "dense-caps", "cnn", "cnn-pool", "cnn-gap")


class InputError(Exception):
    """Something the user gave is wrong; the message is one line that names it and how to mend it. Exit code 2."""


def option(default, text, **extra):
    return dataclasses.field(default=default, metadata={"help": text, **extra})


# What was chosen for each network on development viewpoints (see the README); it holds where a flag is not given.
_cosine, _averaged = dict(lr=3e-3, lr_schedule="cosine", average=0.0), dict(lr=3e-3, lr_schedule="constant", average=0.998)
RECIPES = {"caps": dict(n_epochs=40, weight_decay=3.0, dropout=0.5, **_cosine),
           "dense-caps": dict(n_epochs=40, weight_decay=0.0, dropout=0.0, **_cosine),
           "cnn": dict(n_epochs=40, weight_decay=0.0, dropout=0.0, **_cosine),
           "cnn-pool": dict(n_epochs=60, weight_decay=0.0, dropout=0.5, **_cosine),
           "cnn-gap": dict(n_epochs=100, weight_decay=1.0, dropout=0.0, **_averaged)}
RANGES = {"synthetic": dict(train_azimuths="0:150", test_azimuths="200:330"),
          "smallnorb": dict(train_azimuths="300:400", test_azimuths="60:280")}                # the paper's


def own_option(table, name, text, **extra):
    """An option whose default depends on the network or on the data"""
    return option(None, text, shown=", ".join(f"{key} {values[name]}" for key, values in table.items()), **extra)


@dataclass(frozen=True)
class Config:
    """All settings of a run: the names, defaults and help texts of the command line flags come from here."""
    seed: int = option(0, "seed of everything random; same seed, same bits", low=0)
    n_epochs: int = own_option(RECIPES, "n_epochs", "epochs to train", low=1)
    batch_size: int = option(32, "images in a batch", low=1)
    lr: float = own_option(RECIPES, "lr", "Adam's learning rate at the start", above=0)
    lr_schedule: str = own_option(RECIPES, "lr_schedule", "cosine decay to 0, the official code's 0.96^(step/2000), or constant",
                                  choices=("cosine", "exponential", "constant"))
    weight_decay: float = own_option(RECIPES, "weight_decay", "decoupled weight decay: every step shrinks the weights, not the biases, "
                                     "by lr x this", low=0)
    average: float = own_option(RECIPES, "average", "decay of the running mean of the weights, which then is what is evaluated; 0: no "
                                "mean", low=0, high=0.9999)
    stop_familiar: float = option(0.0, "stop when the accuracy on familiar views reaches this, as the paper does; 0: never",
                                  low=0, high=1)
    model: str = option("caps", "network to train", choices=MODELS)
    data: str = option("synthetic", "five embedded 3D shapes, or the real smallNORB", choices=("synthetic", "smallnorb"))
    norb_dir: str = option("", "folder with smallNORB's six .mat or .mat.gz files", runtime=True, metavar="DIR")
    split: str = option("azimuth", "what differs between training and held-out views", choices=("azimuth", "elevation"))
    train_azimuths: str = own_option(RANGES, "train_azimuths", "range of training azimuths, degrees, ends included",
                                     metavar="LOW:HIGH")
    test_azimuths: str = own_option(RANGES, "test_azimuths", "range of held-out azimuths; 290:420 wraps", metavar="LOW:HIGH")
    elevations: str = option("30:70", "range of all elevations with --split azimuth, degrees", metavar="LOW:HIGH")
    train_elevations: str = option("30:40", "range of training elevations with --split elevation", metavar="LOW:HIGH")
    test_elevations: str = option("45:70", "range of held-out elevations with --split elevation", metavar="LOW:HIGH")
    n_train_views: int = option(6, "azimuths in the training range", low=1)
    n_test_views: int = option(6, "azimuths in the held-out range", low=1)
    n_elev: int = option(3, "elevations in a range", low=1)
    n_per_combo: int = option(5, "noisy training images of each shape and viewpoint", low=1)
    n_test_per_combo: int = option(2, "noisy test images of each shape and viewpoint", low=1)
    max_shift: int = option(0, "training images are shifted at random by up to this many px on each axis", low=0, high=8)
    conv1_channels: int = option(32, "A, channels of the capsule network's first convolution", low=1)
    primary_types: int = option(4, "B, types of primary capsules", low=1)
    primary_kernel: int = option(3, "side of the primary capsules' kernel; 1 is the paper's", low=1, high=7)
    conv_types: int = option(8, "C, types of convolutional capsules", low=1)
    em_iters: int = option(2, "EM routing iterations", low=1)
    final_lambda: float = option(1.0, "inverse temperature of the activations, approached as final_lambda (1 - 0.95^(t+1))", above=0)
    no_coord_add: bool = option(False, "no coordinate addition in the class capsules' votes")
    routing_grad: str = option("full", "full: through every EM iteration; detached: the last responsibilities held fixed",
                               choices=("full", "detached"))
    loss: str = option("xent", "cross-entropy on |mu|^2/16 + 4 (a - 0.5), or the paper's spread loss", choices=("xent", "spread"))
    cnn_width: int = option(0, "channels of cnn-pool's and cnn-gap's first layer, 0 for as many parameters as the capsule network",
                            low=0)
    dropout: float = own_option(RECIPES, "dropout", "share of the last layer's inputs dropped in training: hidden units, or children of "
                                "the class capsules", low=0, high=0.95)
    baseline: str = option("cnn-gap", "networks to compare with, comma-separated; or none", runtime=True, metavar="NAMES")
    ablations: bool = option(False, "compare with variants of the capsule network instead", runtime=True)
    n_seeds: int = option(1, "seeds to run: --seed and those after it; more than one: a process a core", low=1, runtime=True)
    threads: int = option(0, "worker threads, 0 for one per core; does not change a bit", low=0, runtime=True)
    checkpoint: str = option("", "write weights and optimiser to this .npz at every epoch's end", runtime=True)
    resume: bool = option(False, "go on from --checkpoint if it exists", runtime=True)
    out_json: str = option("", "write settings and results to this file", runtime=True)
    quiet: bool = option(False, "print nothing but errors", runtime=True)


def resolved(config):
    """config with its network's recipe and its data's ranges where no value was given"""
    own = RECIPES[config.model] | RANGES[config.data]
    return dataclasses.replace(config, **{name: value for name, value in own.items() if getattr(config, name) is None})


def rng_for(seed, purpose, *key):
    """The generator of one purpose; equals SeedSequence(seed).spawn(...)'s child, without keeping a state between calls."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), *key)))


# ---------------------------------------------------------------- files

def write_atomically(path, write):
    """Call write(binary file) on a temporary file beside `path`, then rename it: whole or not at all."""
    path = Path(os.path.realpath(path))                                 # through a link, not over it
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~UMASK)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose a writable place with room") from None


UMASK = os.umask(0)
os.umask(UMASK)


def check_writable(path):
    """Fail now, not after an hour of training, if `path` could not be written."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise InputError(f"cannot write {path}: it is a folder or a device; give the name of a file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write {path}: the folder {path.parent} is missing or not writable; create it or choose another")


# ---------------------------------------------------------------- data: five shapes

def _segment(start, end, n):
    """n points from start to end, both included -> (n, 3)"""
    return np.linspace(start, end, n)


def shape_points():
    """The five shapes as lists of points (n, 3) in [-1, 1]^3: x right, y up, z towards the viewer."""
    cross = np.array([[0, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]], float) * 0.8
    ell = np.concatenate([_segment((-0.5, 0.9, 0), (-0.5, -0.7, 0), 7), _segment((-0.5, -0.7, 0), (0.8, -0.7, 0), 6)[1:],
                          _segment((-0.5, -0.7, 0), (-0.5, -0.7, 0.6), 3)[1:]])
    tee = np.concatenate([_segment((-0.8, 0.8, 0), (0.8, 0.8, 0), 7), _segment((0, 0.8, 0), (0, -0.9, 0), 7)[1:]])
    corners = np.array(np.meshgrid(*[(-0.65, 0.65)] * 3)).reshape(3, 8).T
    frame = np.concatenate([_segment(a, b, 5) for k, a in enumerate(corners) for b in corners[k + 1:]
                            if np.count_nonzero(a != b) == 1])
    tripod = np.concatenate([_segment((0, 0, 0), end, 6) for end in ((0.9, 0, 0), (0, 0.9, 0), (0, 0, 0.9))])
    return cross, ell, tee, frame, np.unique(tripod, axis=0)


def rotation(azimuth, elevation):
    """R(azimuth, elevation), degrees: a turn about the vertical axis, then a nod towards the viewer. (V,), (V,) -> (V, 3, 3)"""
    a, e = np.deg2rad(azimuth), np.deg2rad(elevation)
    zero, one = np.zeros_like(a), np.ones_like(a)
    turn = np.array([[np.cos(a), zero, np.sin(a)], [zero, one, zero], [-np.sin(a), zero, np.cos(a)]])
    nod = np.array([[one, zero, zero], [zero, np.cos(e), -np.sin(e)], [zero, np.sin(e), np.cos(e)]])
    return nod.transpose(2, 0, 1) @ turn.transpose(2, 0, 1)


BLOB, RADIUS, NOISE = 1.2, 9.5, 0.04       # sigma of a blob and length of a unit, px; sigma of the pixel noise


def render(labels, azimuths, elevations, rng):
    """Images of the shapes (N,) int at azimuths, elevations (N,) in degrees -> (N, 32, 32, 1) float32 in [0, 1].

    Orthographic projection; a point is a Gaussian blob, brighter the nearer (0.5 to 1); blobs add up and are clipped at 1;
    normal pixel noise. A blob is a product of its row and its column profile, so an image is ONE product (32, n) @ (n, 32).
    """
    images, R = np.empty((len(labels), SIDE, SIDE, 1), np.float32), rotation(azimuths, elevations)
    pixels = np.arange(SIDE) - (SIDE - 1) / 2
    for label, points in enumerate(shape_points()):
        rows = np.flatnonzero(labels == label)
        x, y, z = np.moveaxis(points @ R[rows].transpose(0, 2, 1), -1, 0)                      # (n, points) each
        profile = [np.exp(-0.5 * ((pixels - RADIUS * at[..., None]) / BLOB) ** 2).astype(np.float32) for at in (x, -y)]
        brightness = (0.75 + 0.25 * np.clip(z, -1, 1)).astype(np.float32)
        images[rows, :, :, 0] = profile[1].transpose(0, 2, 1) @ (profile[0] * brightness[..., None])
    np.minimum(images, 1, out=images)
    images += np.float32(NOISE) * rng.standard_normal(images.shape, np.float32)
    return np.clip(images, 0, 1, out=images)


def parse_range(text, flag):
    """"LOW:HIGH" in degrees -> (low, high) floats, low <= high"""
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        raise InputError(f"{flag} {text}: must be LOW:HIGH in degrees, as in 0:150") from None
    if not (np.isfinite([low, high]).all() and 0 <= high - low):
        raise InputError(f"{flag} {text}: LOW must not be above HIGH")
    return low, high


def split_by_azimuth(azimuths, train=(0, 150), test=(200, 330)):
    """Masks (train, held out) of azimuths (N,) in degrees. Ranges (low, high) include their ends and wrap around the circle.

    Raises InputError if the ranges meet anywhere on the circle.
    """
    for low, high in train, test:
        if not 0 <= high - low < 360:
            raise InputError(f"azimuth range {low:g}:{high:g}: must span 0 to less than 360 degrees")
    if (test[0] - train[0]) % 360 <= train[1] - train[0] or (train[0] - test[0]) % 360 <= test[1] - test[0]:
        raise InputError(f"training azimuths {train[0]:g}:{train[1]:g} and held-out azimuths {test[0]:g}:{test[1]:g} overlap; "
                         "choose --train-azimuths and --test-azimuths apart")
    azimuths = np.asarray(azimuths)
    return tuple((azimuths - low + 1e-6) % 360 <= high - low + 2e-6 for low, high in (train, test))


def split_by_elevation(elevations, train=(30, 40), test=(45, 70)):
    """Masks (train, held out) of elevations (N,) in degrees. Raises InputError if the ranges (low, high) meet."""
    if max(train[0], test[0]) <= min(train[1], test[1]):
        raise InputError(f"training elevations {train[0]:g}:{train[1]:g} and held-out elevations {test[0]:g}:{test[1]:g} overlap; "
                         "choose --train-elevations and --test-elevations apart")
    elevations = np.asarray(elevations)
    return tuple((low - 1e-6 <= elevations) & (elevations <= high + 1e-6) for low, high in (train, test))


def make_views(azimuths, elevations, n_per_combo, rng):
    """Every shape at every azimuth and elevation (degrees), n_per_combo noisy images of each -> dict of arrays, one row an image"""
    labels, a, e, _ = (grid.ravel() for grid in np.meshgrid(np.arange(N_CLASSES), azimuths, elevations, np.arange(n_per_combo),
                                                            indexing="ij"))
    return {"images": render(labels, a, e, rng), "labels": labels, "azimuths": a % 360, "elevations": e}


def load_data(config, say=print):
    """-> {"source", "train", "familiar", "held_out"}: dicts of images, labels (N,) int64, azimuths and elevations (N,), degrees.

    familiar: the training viewpoints with new noise (smallNORB: other toys); held_out: viewpoints that training never shows.
    """
    config = resolved(config)
    ranges = {name: parse_range(getattr(config, name), "--" + name.replace("_", "-"))
              for name in ("train_azimuths", "test_azimuths", "elevations", "train_elevations", "test_elevations")}
    angle = config.split + "s"
    split, train, test = {"azimuth": split_by_azimuth, "elevation": split_by_elevation}[config.split], *(
        ranges[part + angle] for part in ("train_", "test_"))
    split([], train, test)                                                                     # refuses an overlap
    if config.data == "smallnorb":
        found = load_norb(config.norb_dir)
        pools = {"train": (found["train"], 0), "familiar": (found["test"], 0), "held_out": (found["test"], 1)}
    else:
        azimuths = np.linspace(*ranges["train_azimuths"], config.n_train_views)
        elevations = np.linspace(*ranges["elevations" if config.split == "azimuth" else "train_elevations"], config.n_elev)
        seen = azimuths, elevations
        unseen = ((np.linspace(*test, config.n_test_views), elevations) if config.split == "azimuth" else
                  (azimuths, np.linspace(*test, config.n_elev)))
        views = {"train": (seen, config.n_per_combo, ("data",)), "familiar": (seen, config.n_test_per_combo, ("evaluation", 0)),
                 "held_out": (unseen, config.n_test_per_combo, ("evaluation", 1))}
        pools = {name: (make_views(*angles, n, rng_for(config.seed, *key)), int(name == "held_out"))
                 for name, (angles, n, key) in views.items()}
    data = {"source": config.data}
    for name, (pool, which) in pools.items():
        mask = split(pool[angle], train, test)[which]
        if not mask.any():
            raise InputError(f"no {name.replace('_', '-')} images: none has {angle} in {(train, test)[which]}; widen the range")
        data[name] = {key: array[mask] for key, array in pool.items()}
    return data


# ---------------------------------------------------------------- data: smallNORB

NORB_FILES = {(split, kind): f"smallnorb-5x{toys}x9x18x6x2x96x96-{split}ing-{kind}.mat"
              for split, toys in (("train", "46789"), ("test", "01235")) for kind in ("dat", "cat", "info")}
NORB_FORMAT = {"dat": (0x1E3D4C55, "u1", (2, 96, 96)), "cat": (0x1E3D4C54, "<i4", ()),     # magic number, dtype, shape of a row
               "info": (0x1E3D4C54, "<i4", (4,))}
NORB_SIDE = 48                     # side of an image as it is kept
NORB_ROWS = 24300                  # rows of the real files: 5 classes x 5 toys x 9 elevations x 18 azimuths x 6 lightings
NORB_CODES = (("labels", range(5), 1, 0), ("instances", range(10), 1, 0), ("elevations", range(9), 5, 30),
              ("azimuths", range(0, 36, 2), 10, 0), ("lightings", range(6), 1, 0))         # name, codes, scale, offset of the value
MAX_BRIGHTNESS, CONTRASTS = 32, (0.5, 1.5)                         # jitter in training: grey levels of 0-255; factors


def halve(images):
    """Means of 2x2 pixels, rounded half up to uint8; the cameras become channels. (N, 2, H, W) uint8 -> (N, H/2, W/2, 2) uint8"""
    rows = images[:, :, ::2].astype(np.uint16) + images[:, :, 1::2]                            # (N, 2, H/2, W)
    return ((rows[..., ::2] + rows[..., 1::2] + np.uint16(2)) >> 2).astype(np.uint8).transpose(0, 2, 3, 1)


def read_norb_file(path, kind):
    """One smallNORB file, raw or gzipped -> dat: uint8 (N, 48, 48, 2), cat: int32 (N,), info: int32 (N, 4). N is the header's.

    Read as a stream, 32 images at a time, halved from 96x96 on the way: rounding the means to uint8 costs at most half a grey
    level and keeps a split at 112 MB, where the file is 448 MB and float32 would be too. Raises InputError naming the file and
    the fault: missing, unreadable, corrupt or truncated gzip, wrong magic number or shape, truncated, bytes left over.
    """
    magic, dtype, shape = NORB_FORMAT[kind]
    header_size, row_size = 4 * (2 + max(3, 1 + len(shape))), np.dtype(dtype).itemsize * math.prod(shape)
    mend = "delete it and fetch it again"
    try:
        with open(path, "rb") as raw, contextlib.nullcontext(raw) if raw.peek(2)[:2] != b"\x1f\x8b" else gzip.open(raw) as file:
            header = file.read(header_size)
            if len(header) < header_size:
                raise InputError(f"{path}: truncated, {len(header)} bytes where the header alone has {header_size}; {mend}")
            found, ndim, N, *rest = np.frombuffer(header, "<i4").tolist()
            if found != magic:
                raise InputError(f"{path}: not a smallNORB {kind} file (magic number 0x{found & 0xffffffff:08X}, should be "
                                 f"0x{magic:08X}); {mend}")
            if ndim != 1 + len(shape):
                raise InputError(f"{path}: says {ndim} dimensions, a smallNORB {kind} file has {1 + len(shape)}; {mend}")
            if tuple(rest[:len(shape)]) != shape or not 1 <= N <= NORB_ROWS:
                raise InputError(f"{path}: says shape {(N, *rest[:len(shape)])}, should be ({', '.join(map(str, ('N', *shape)))}) "
                                 f"with N from 1 to {NORB_ROWS}; fetch smallNORB's file, 96x96 pixels, not another NORB's")
            out = np.empty((N, NORB_SIDE, NORB_SIDE, 2) if kind == "dat" else (N, *shape), np.uint8 if kind == "dat" else np.int32)
            for start in range(0, N, 32):
                rows = out[start:start + 32]
                part = file.read(len(rows) * row_size)
                if len(part) < len(rows) * row_size:
                    raise InputError(f"{path}: truncated, {start * row_size + len(part)} bytes of data where the header says "
                                     f"{N * row_size}; {mend}")
                part = np.frombuffer(part, dtype).reshape(len(rows), *shape)
                rows[...] = halve(part) if kind == "dat" else part
            if file.read(1):                                                                   # at its end gzip checks its checksum
                raise InputError(f"{path}: bytes left over after the {N * row_size} of data that the header says; {mend}")
    except FileNotFoundError:
        raise InputError(f"{path}: missing; put smallNORB's file there, .mat or .mat.gz") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: corrupt or truncated gzip ({error}); {mend}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check the file and its permissions") from None
    return out


def load_norb(norb_dir):
    """-> {"train", "test"}: dicts of images uint8 (N, 48, 48, 2), channels left and right camera; labels, instances, elevations,
    azimuths (degrees), lightings, all int64 (N,). The folder holds the six files, each .mat or .mat.gz (if both, .mat is read).

    Raises InputError naming the file and the fault: folder or file missing, damaged, row counts that differ, code out of range.
    """
    folder = Path(norb_dir).expanduser()
    if not norb_dir or not folder.is_dir():
        raise InputError(f"--norb-dir {norb_dir or '(not given)'}: no such folder; give the one that holds smallNORB's six .mat or "
                         ".mat.gz files")
    paths = {}
    for key, name in NORB_FILES.items():
        paths[key] = next((p for p in (folder / name, folder / (name + ".gz")) if os.path.exists(p)), None)
        if paths[key] is None:
            raise InputError(f"{folder / name}[.gz]: missing; --norb-dir must hold smallNORB's six files: dat, cat and info of "
                             "training and testing")
    data = {"train": {}, "test": {}}
    for split, arrays in data.items():
        columns = []
        for kind in "cat", "info":                                                             # the small ones first: fail early
            table = read_norb_file(paths[split, kind], kind)
            columns += [(paths[split, kind], column) for column in table.reshape(len(table), -1).T]
        for (path, column), (name, codes, scale, offset) in zip(columns, NORB_CODES, strict=True):
            wrong = np.flatnonzero(~np.isin(column, codes))
            if len(wrong):
                raise InputError(f"{path}: {name[:-1]} {column[wrong[0]]} in row {wrong[0]}, must be {codes[0]} to {codes[-1]}"
                                 f"{' and even' if codes.step == 2 else ''}; delete it and fetch it again")
            arrays[name] = column.astype(np.int64) * scale + offset
        arrays["images"] = read_norb_file(paths[split, "dat"], "dat")
        for kind, name in ("cat", "labels"), ("info", "instances"):
            if len(arrays[name]) != len(arrays["images"]):
                raise InputError(f"{paths[split, 'dat']} has {len(arrays['images'])} images but {paths[split, kind]} has "
                                 f"{len(arrays[name])} rows; fetch both again")
    return data


def standardize(images, contrast=1.0, brightness=0.0, dtype=np.float32):
    """Zero mean and unit variance per image, over its pixels and both cameras; then x contrast, + brightness in grey levels.

    uint8 (N, H, W, C) -> dtype (N, H, W, C). contrast and brightness: numbers or (N,). A constant image becomes 0: a standard
    deviation below one grey level counts as one.
    """
    x = images.astype(dtype).reshape(len(images), math.prod(images.shape[1:]))                 # (N, H*W*C)
    x -= x.mean(1, keepdims=True)
    std = np.maximum(np.sqrt(np.vecdot(x, x) / x.shape[1]), 1)                                 # (N,)
    x *= (contrast / std).astype(dtype)[:, None]
    x += (brightness / std).astype(dtype)[:, None]
    return x.reshape(images.shape)


def crop_batch(images, rows, rng=None, dtype=np.float32):
    """images[rows], uint8 (N, 48, 48, 2) in all, as the network eats them -> dtype (n, 32, 32, 2).

    With rng (training) every image has its own crop, brightness and contrast: 4 draws a row, whatever they hold. In the paper's
    order: standardise the whole image, then jitter, brightness in units of the image's grey and contrast about its mean.
    Jitter BEFORE standardising would be undone by it, exactly. Without rng (test): the central crop as it is.
    """
    images = images[rows]
    n, slack = len(images), NORB_SIDE - SIDE
    if rng is None:
        at = slice(slack // 2, slack // 2 + SIDE)
        return standardize(images, dtype=dtype)[:, at, at].copy()
    draws = rng.random((4, n))
    down, right = (draws[:2] * (slack + 1)).astype(int)
    contrast = CONTRASTS[0] + (CONTRASTS[1] - CONTRASTS[0]) * draws[2]
    x = standardize(images, contrast, MAX_BRIGHTNESS * (2 * draws[3] - 1), dtype)
    windows = sliding_window_view(x.reshape(n, NORB_SIDE, 2 * NORB_SIDE), (SIDE, 2 * SIDE), axis=(1, 2))  # (n, 17, 33, 32, 64)
    return windows[np.arange(n), down, 2 * right].reshape(n, SIDE, SIDE, 2)
N_CHANNELS = {"synthetic": 1, "smallnorb": 2}


# ---------------------------------------------------------------- batches

def shift_images(images, shifts):
    """Move image n by shifts[n] = (down, right) px; what leaves is lost, what enters is 0. (N, H, W, C), (N, 2) -> (N, H, W, C)"""
    N, H, W, C = images.shape
    margin = int(np.abs(shifts).max(initial=0))
    padded = np.zeros((N, H + 2 * margin, W + 2 * margin, C), images.dtype)
    padded[:, margin:margin + H, margin:margin + W] = images
    windows = sliding_window_view(padded, (H, W), axis=(1, 2))                                 # (N, 2m+1, 2m+1, C, H, W)
    return windows[np.arange(N), margin - shifts[:, 0], margin - shifts[:, 1]].transpose(0, 2, 3, 1)


def epoch_samples(data, epoch, config):
    """The training images of one epoch in a new order, augmented, a chunk of whole batches at a time, with the spread
    loss's margin and the dropout's mask"""
    train, rows = data["train"], rng_for(config.seed, "batches", epoch).permutation(len(data["train"]["labels"]))
    size = max(1, CHUNK // config.batch_size) * config.batch_size
    margin = MARGINS[0] + (MARGINS[1] - MARGINS[0]) * epoch / max(1, config.n_epochs - 1)
    for k, start in enumerate(range(0, len(rows), size)):
        rng, part = rng_for(config.seed, "batches", epoch, k), rows[start:start + size]
        images = crop_batch(train["images"], part, rng) if data["source"] == "smallnorb" else train["images"][part]
        if config.max_shift:
            images = shift_images(images, rng.integers(-config.max_shift, config.max_shift + 1, (len(part), 2)))
        samples = {"images": images, "labels": train["labels"][part]}
        samples["margin"] = np.full(len(part), margin, np.float32)                             # of the spread loss
        if config.dropout:
            keep = rng.random((len(part), n_dropped(config)), np.float32) >= config.dropout
            samples["keep"] = keep / np.float32(1 - config.dropout)
        yield samples


def to_batch(samples, rows, dtype=np.float32):
    """Rows of a dict of prepared samples as what the network eats"""
    return {name: a[rows] if name == "labels" else a[rows].astype(dtype, copy=False) for name, a in samples.items()}


# ---------------------------------------------------------------- primitives

class Arena:
    """np.empty for temporaries that come again every step: after rewind(), the k-th call returns the k-th array once more.

    Every operation takes `empty=np.empty`, so that without an arena it is pure; with one, whatever it took is overwritten after
    the next rewind(). It buys: no page faults of fresh large arrays (a training step takes 1.2 times as long with them), and
    arrays that begin at a cache line, so that no row of 16 floats lies across two (1.2 times as fast routing).
    """

    def __init__(self):
        self.arrays, self.taken = [], 0

    def rewind(self):
        self.taken = 0
        return self

    def __call__(self, shape, dtype):
        shape, dtype = tuple(shape), np.dtype(dtype)
        if self.taken == len(self.arrays) or (self.arrays[self.taken].shape, self.arrays[self.taken].dtype) != (shape, dtype):
            size = math.prod(shape) * dtype.itemsize
            raw = np.empty(size + 64, np.uint8)
            self.arrays[self.taken:] = [raw[-raw.ctypes.data % 64:][:size].view(dtype).reshape(shape)]
        self.taken += 1
        return self.arrays[self.taken - 1]


def recycle(array, empty):
    """An array like `array`: with an Arena it is `array` itself, whose content a backward reads for the last time; without one
    it is new, and the cache stays whole. Less memory to touch: a training step takes 1.03 times as long without."""
    return array if isinstance(empty, Arena) else np.empty_like(array)


def im2col(x, width, stride, empty=np.empty):
    """Unfold x (N, H, W, C) along its rows only: cols[p, r, n, ox] holds x[n, stride*r + p, stride*ox : stride*ox + width].

    -> cols (stride, ceil(H/stride), N, Wo, width*C). A full im2col copies every pixel K*K times, this one K times; the kernel
    rows are then K GEMMs on bands of rows, which lie together in memory because the row's parity p is the first axis.
    """
    N, H, W, C = x.shape
    R, Wo = -(-H // stride), (W - width) // stride + 1
    if x.strides[2:] != (C * x.itemsize, x.itemsize):                                          # a window must be one run
        x = x.copy()
    sn, sh, sw, _ = x.strides
    cols = empty((stride, R, N, Wo, width * C), x.dtype)
    for p in range(stride):
        rows = -(-(H - p) // stride)
        view = as_strided(x[:, p:], (rows, N, Wo, width * C), (stride * sh, sn, stride * sw, x.itemsize), writeable=False)
        np.copyto(cols[p, :rows], view)
    return cols


def band(cols, ky, stride, Ho):
    """The rows of cols that kernel row ky meets, as one matrix (Ho*N*Wo, width*C), without a copy."""
    return cols[ky % stride, ky // stride:ky // stride + Ho].reshape(-1, cols.shape[-1])


def conv2d_forward(x, w, b, stride, empty=np.empty):
    """Valid convolution. x (N, H, W, C), w (Kh, Kw, C, F), b (F,) -> y (N, Ho, Wo, F), a view of memory ordered (Ho, N, Wo, F)."""
    (N, H, W, C), (Kh, Kw, _, F) = x.shape, w.shape
    Ho, Wo = (H - Kh) // stride + 1, (W - Kw) // stride + 1
    cols = im2col(x, Kw, stride, empty)
    rows = w.reshape(Kh, Kw * C, F)
    y, part = empty((Ho * N * Wo, F), x.dtype), empty((Ho * N * Wo, F), x.dtype)
    np.matmul(band(cols, 0, stride, Ho), rows[0], out=y)
    for ky in range(1, Kh):
        y += np.matmul(band(cols, ky, stride, Ho), rows[ky], out=part)
    y += b
    return y.reshape(Ho, N, Wo, F).transpose(1, 0, 2, 3), (x.shape, cols, w, stride, empty)


def conv2d_backward(dy, cache, need_dx=True):
    """dy (N, Ho, Wo, F) -> dx (None unless needed), dw, db"""
    (N, H, W, C), cols, w, stride, empty = cache
    (Kh, Kw, _, F), Ho = w.shape, dy.shape[1]
    rows = w.reshape(Kh, Kw * C, F)
    dy = np.ascontiguousarray(dy.transpose(1, 0, 2, 3)).reshape(-1, F)                         # (Ho*N*Wo, F)
    dw, db = empty(w.shape, w.dtype), dy.sum(0)
    for ky in range(Kh):
        np.matmul(band(cols, ky, stride, Ho).T, dy, out=dw.reshape(rows.shape)[ky])
    if not need_dx:
        return None, dw, db
    dcols, part = recycle(cols, empty), empty((len(dy), Kw * C), dy.dtype)
    dcols[:, Ho:], dcols[Kh:] = 0, 0
    for ky in range(Kh):
        dband = band(dcols, ky, stride, Ho)
        if ky < stride:                                                                        # the first of its parity
            np.matmul(dy, rows[ky].T, out=dband)
        else:
            dband += np.matmul(dy, rows[ky].T, out=part)
    return col2im(dcols, (N, H, W, C), Kw, stride, empty), dw, db


def col2im(dcols, shape, width, stride, empty=np.empty):
    """Adjoint of im2col: add every column's entries back to the pixels they came from. -> dx, a view of memory (H, N, W, C)"""
    N, H, W, C = shape
    dx = empty((H, N, W * C), dcols.dtype)
    dx.fill(0)
    for p in range(stride):
        for ox in range(dcols.shape[3]):
            dx[p::stride, :, ox * stride * C:(ox * stride + width) * C] += dcols[p, :-(-(H - p) // stride), :, ox]
    return dx.reshape(H, N, W, C).transpose(1, 0, 2, 3)


def linear_forward(x, w, b, empty=np.empty):
    """x (N, C), w (C, F), b (F,) -> y (N, F)"""
    y = np.matmul(x, w, out=empty((len(x), w.shape[1]), x.dtype))
    y += b
    return y, (x, w, empty)


def linear_backward(dy, cache):
    x, w, empty = cache
    dx, dw = empty(x.shape, x.dtype), empty(w.shape, w.dtype)
    return np.matmul(dy, w.T, out=dx), np.matmul(x.T, dy, out=dw), dy.sum(0)


def relu_forward(x):
    """max(x, 0), IN PLACE: x is the fresh output of a convolution or linear layer, and nobody else's"""
    y = np.maximum(x, 0, out=x)
    return y, (y,)


def relu_backward(dy, cache):
    y, = cache
    return dy * (y > 0)


def sigmoid_forward(x):
    """1 / (1 + exp(-x)), written with tanh so that it cannot overflow"""
    y = 0.5 * np.tanh(0.5 * x) + 0.5
    return y, (y,)


def sigmoid_backward(dy, cache):
    y, = cache
    return dy * y * (1 - y)


def pool_forward(x):
    """2x2 maximum, an odd last row or column left out. x (N, H, W, C) -> y (N, H//2, W//2, C)"""
    corners = quarters(x)
    y = np.maximum(np.maximum(corners[0], corners[1]), np.maximum(corners[2], corners[3]))
    return y, (x, y)


def pool_backward(dy, cache):
    """The first entry that equals its window's maximum gets the window's gradient: on a plain background all four are equal"""
    x, y = cache
    dx, left = np.zeros_like(x), dy.copy()
    for corner, dcorner in zip(quarters(x), quarters(dx)):
        left -= np.multiply(corner == y, left, out=dcorner)
    return dx


def quarters(x):
    """The four pixels of each 2x2 window, as views. x (N, H, W, C) -> 4 x (N, H//2, W//2, C)"""
    H, W = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    return [x[:, i:H:2, j:W:2] for i in (0, 1) for j in (0, 1)]


# ---------------------------------------------------------------- capsules

SIGMA2_EPS = 5e-4                  # a parent with one child would have no variance at all
MASS_EPS = 1e-7                    # a parent that no child belongs to


def unfold(x, K, stride):
    """The children of every place of a KxK convolution. x (N, H, W, B, E) -> (K*K*B, N*Ho*Wo, E), children first"""
    N, H, W, B, E = x.shape
    view = sliding_window_view(x, (K, K), axis=(1, 2))[:, ::stride, ::stride]                  # (N, Ho, Wo, B, E, K, K)
    return np.ascontiguousarray(view.transpose(5, 6, 3, 0, 1, 2, 4)).reshape(K * K * B, -1, E)


def fold(dcols, shape, K, stride):
    """Adjoint of unfold: add up what every child's copies hold. dcols (K*K*B, N*Ho*Wo, E) -> (N, H, W, B, E)"""
    N, H, W, B, E = shape
    Ho, Wo = (H - K) // stride + 1, (W - K) // stride + 1
    dx, dcols = np.zeros((B, N, H, W, E), dcols.dtype), dcols.reshape(K, K, B, N, Ho, Wo, E)
    for ky in range(K):
        for kx in range(K):
            dx[:, :, ky:ky + stride * Ho:stride, kx:kx + stride * Wo:stride] += dcols[ky, kx]
    return dx.transpose(1, 2, 3, 0, 4)


def pose_blocks(W):
    """W (G, J, P, P) as (G, D, J*D): each W_ij once for every row of a pose, so that V_i = M_i W_i is ONE product for all rows and j"""
    G, J = W.shape[:2]
    blocks = np.zeros((G, P, P, J, P, P), W.dtype)                                             # (G, row, q, J, row, column)
    for row in range(P):
        blocks[:, row, :, :, row] = W.transpose(0, 2, 1, 3)
    return blocks.reshape(G, D, J * D)


def pose_votes_forward(M, W, empty=np.empty):
    """V_ij = M_i W_ij. M (G, L, D), W (G, J, P, P) -> V (G, L, J, D); poses are stored as rows of D = P*P numbers.

    As products (L, D) @ (D, J*D) with block-diagonal matrices: four times the arithmetic of the 4x4 products, but BLAS's.
    """
    (G, L, _), J = M.shape, W.shape[1]
    blocks = pose_blocks(W)
    V = np.matmul(M, blocks, out=empty((G, L, J * D), M.dtype))
    return V.reshape(G, L, J, D), (M, blocks, empty)


def pose_votes_backward(dV, cache):
    """dV (G, L, J, D) -> dM (G, L, D), dW (G, J, P, P)"""
    M, blocks, empty = cache
    G, L, J, _ = dV.shape
    dV = dV.reshape(G, L, J * D)
    dM = np.matmul(dV, blocks.transpose(0, 2, 1))
    dblocks = np.matmul(M.transpose(0, 2, 1), dV, out=empty(blocks.shape, M.dtype)).reshape(G, P, P, J, P, P)
    dW = sum(dblocks[:, row, :, :, row] for row in range(P)).transpose(0, 2, 1, 3)             # (G, J, q, column)
    return dM, dW


def over_places(x, window, combine):
    """Combine (np.add or np.maximum) what every child holds at all the places that see it, and hand it back to each of them.

    x (L, I) -> (L, I). window: (N, H, W, B, K, stride) of convolutional capsules; None where every child has one place only.
    """
    if window is None:
        return x
    N, H, W, B, K, stride = window
    Ho, Wo = (H - K) // stride + 1, (W - K) // stride + 1
    x = x.reshape(N, Ho, Wo, K, K, B)
    children = np.full((N, H, W, B), 0 if combine is np.add else -np.inf, x.dtype)
    at = [(ky, kx, children[:, ky:ky + stride * Ho:stride, kx:kx + stride * Wo:stride]) for ky in range(K) for kx in range(K)]
    for ky, kx, part in at:
        combine(part, x[:, :, :, ky, kx], out=part)
    out = np.empty_like(x)
    for ky, kx, part in at:
        out[:, :, :, ky, kx] = part
    return out.reshape(-1, K * K * B)


def responsibilities_forward(logits, window):
    """R_ij = exp(l_ij) / sum over all parents of i, of every type AND at every place. logits (L, J, I) -> R (L, J, I)"""
    R = logits - over_places(logits.max(1), window, np.maximum)[:, None]
    np.exp(R, out=R)
    R /= over_places(R.sum(1), window, np.add)[:, None]
    return R, (R, window)


def responsibilities_backward(dR, cache):
    R, window = cache
    dlogits = R * dR
    dlogits -= R * over_places(dlogits.sum(1), window, np.add)[:, None]
    return dlogits


def inverse_temperature(t, final_lambda):
    """lambda of EM iteration t = 0, 1, ..., as in the official code"""
    return final_lambda * (1 - 0.95 ** (t + 1))


def by_parent(V, n=None):
    """V (I, L, J, D) as one matrix (I, D) for each of the L*J parents, or as n matrices of I rows; a view"""
    return V.reshape(len(V), n or V.shape[1] * V.shape[2], -1).transpose(1, 0, 2)


def m_step_forward(V, V2, r, beta_u, beta_a, lambda_, ratio):
    """Procedure 1, M-step. Votes V and their squares V2 (I, L, J, D), r_ij = R_ij a_i (L, J, I), or (L, 1, I) if the same for all types
    j: that is one matrix-vector product a place instead of J. beta_u, beta_a (J,).

    mu_j = sum_i r_ij V_ij / sum_i r_ij; sigma2_j likewise, of (V_ij - mu_j)^2 = V_ij^2 - mu_j^2 on average; both per dimension;
    cost_j = sum_h (beta_u + log sigma_jh) x mass, mass = ratio sum_i r_ij, with ratio = parents / children, so that a
    parent's cost does not grow with the layer; a_j = logistic(lambda (beta_a - cost_j)).
    -> (mu, sigma2 (L, J, D), the activation's logit x (L, J)), the cache
    """
    (I, L, J, _), n = V.shape, r.shape[0] * r.shape[1]
    rows = r.reshape(n, 1, I)
    total = r.sum(-1, keepdims=True) + MASS_EPS                                                # (L, J or 1, 1)
    mu = np.matmul(rows, by_parent(V, n)).reshape(L, J, D) / total
    square = np.matmul(rows, by_parent(V2, n)).reshape(L, J, D) / total
    variance = square - mu * mu
    sigma2 = np.maximum(variance, 0) + SIGMA2_EPS
    unit_cost = D * beta_u + 0.5 * np.log(sigma2).sum(-1)                                      # (L, J)
    mass = ratio * total[..., 0]
    x = lambda_ * (beta_a - unit_cost * mass)
    return (mu, sigma2, x), (V, V2, total, mu, square, variance, sigma2, unit_cost, mass, lambda_, ratio)


def m_step_backward(dmu, dsigma2, dx, cache):
    """-> dr, as r; dbeta_u, dbeta_a (J,); ds1, ds2 (L, J, D): the gradient of V_ij is r_ij (ds1_j + 2 V_ij ds2_j)"""
    V, V2, total, mu, square, variance, sigma2, unit_cost, mass, lambda_, ratio = cache
    I, L, n = *V.shape[:2], total.size
    dcost = -lambda_ * dx                                                                      # (L, J)
    dunit = dcost * mass
    dsquare = (dsigma2 + 0.5 * dunit[..., None] / sigma2) * (variance > 0)                     # sigma2 = square - mu^2
    ds1, ds2 = (dmu - 2 * mu * dsquare) / total, dsquare / total
    dtotal = ratio * dcost * unit_cost - (ds1 * mu + ds2 * square).sum(-1)
    dr = np.matmul(by_parent(V, n), ds1.reshape(n, -1, 1))
    dr += np.matmul(by_parent(V2, n), ds2.reshape(n, -1, 1))
    dr = dr.reshape(L, -1, I)
    dr += dtotal.reshape(*dr.shape[:2], -1).sum(-1, keepdims=True)
    return dr, D * dunit.sum(0), lambda_ * dx.sum(0), ds1, ds2


def e_step_forward(V, V2, mu, sigma2, x):
    """Procedure 1, E-step, in log space: logits_ij = log a_j + log N(V_ij; mu_j, sigma2_j), (L, J, I), without the constant 2 pi.

    log N = sum_h (V mu - V^2 / 2 - mu^2 / 2) / sigma2 - log(sigma2) / 2: two matrix-vector products for each parent
    """
    I, L, J, _ = V.shape
    precision = 1 / sigma2
    linear, quadratic = mu * precision, -0.5 * precision                                       # (L, J, D)
    offset = -0.5 * (mu * linear + np.log(sigma2)).sum(-1) - np.logaddexp(0, -x)               # (L, J)
    logits = np.matmul(by_parent(V), linear.reshape(-1, D, 1))
    logits += np.matmul(by_parent(V2), quadratic.reshape(-1, D, 1))
    logits = logits.reshape(L, J, I)
    logits += offset[..., None]
    return logits, (V, V2, mu, precision, x, linear, quadratic)


def e_step_backward(dlogits, cache):
    """-> dmu, dsigma2 (L, J, D), dx (L, J); the gradient of V_ij is dlogits_ij (linear_j + 2 V_ij quadratic_j)"""
    V, V2, mu, precision, x, _, _ = cache
    I, L, J, _ = V.shape
    rows = dlogits.reshape(L * J, 1, I)
    doffset = dlogits.sum(-1)                                                                  # (L, J)
    dlinear = np.matmul(rows, by_parent(V)).reshape(L, J, D)
    dquadratic = np.matmul(rows, by_parent(V2)).reshape(L, J, D)
    along = doffset[..., None] * mu                                                            # (L, J, D)
    dmu = (dlinear - along) * precision
    dprecision = dlinear * mu - 0.5 * (dquadratic + along * mu)
    dsigma2 = -precision * (dprecision * precision + 0.5 * doffset[..., None])
    return dmu, dsigma2, doffset * sigmoid_forward(-x)[0]


def em_routing_forward(V, a, beta_u, beta_a, n_iters, final_lambda, ratio, window=None, empty=np.empty):
    """Procedure 1, EM routing. V (I, L, J, D), the children's activations a (L, I), beta_u, beta_a (J,) -> mu (L, J, D), a (L, J).

    R_ij starts uniform over the parents of i; then n_iters times: M-step with r_ij = R_ij a_i, E-step (not after the last).
    ratio = parents / children of one image; window: see over_places. The cache's last entry is the list of every iteration's
    (R (L, J, I), at first (L, 1, I), mu, sigma2 (L, J, D), x (L, J), ...).
    """
    I, L, J, _ = V.shape
    V2 = np.multiply(V, V, out=empty(V.shape, V.dtype))
    R = (1 / (J * over_places(np.ones((L, I), V.dtype), window, np.add)))[:, None]             # (L, 1, I), the same for all types
    steps = []
    for t in range(n_iters):
        r = R * a[:, None]
        (mu, sigma2, x), m_cache = m_step_forward(V, V2, r, beta_u, beta_a, inverse_temperature(t, final_lambda), ratio)
        e_cache = None
        if t < n_iters - 1:
            logits, e_cache = e_step_forward(V, V2, mu, sigma2, x)
        steps.append((R, mu, sigma2, x, r, m_cache, e_cache))
        if e_cache:
            R, _ = responsibilities_forward(logits, window)
    act, act_cache = sigmoid_forward(x)
    return (mu, act), (V, V2, a, window, act_cache, empty, steps)


def em_routing_backward(dmu, dact, cache, detached=False):
    """dmu (L, J, D), dact (L, J) -> dV, da (L, I), dbeta_u, dbeta_a, through all iterations; detached: with the last R held constant.

    Each M-step and each E-step adds to the gradient of V_ij a number times (a vector + 2 V_ij times another one). They are gathered over
    the steps, and dV takes two products (I, T) @ (T, D) for every parent.
    """
    V, V2, a, window, act_cache, empty, steps = cache
    I, L, J, _ = V.shape
    T = 1 if detached else 2 * len(steps) - 1
    numbers, vectors = empty((L, J, T, I), V.dtype), empty((2, L, J, T, D), V.dtype)
    dx, dsigma2 = sigmoid_backward(dact, act_cache), 0
    da, dbeta_u, dbeta_a = 0, 0, 0
    for k, t in enumerate(reversed(range(len(steps)))):
        R, _, _, _, r, m_cache, _ = steps[t]
        dr, du, db, ds1, ds2 = m_step_backward(dmu, dsigma2, dx, m_cache)
        numbers[:, :, 2 * k], vectors[0, :, :, 2 * k], vectors[1, :, :, 2 * k] = r, ds1, ds2
        da, dbeta_u, dbeta_a = da + np.einsum("lji,lji->li", dr, R), dbeta_u + du, dbeta_a + db
        if detached or t == 0:
            break
        dr *= a[:, None]
        dlogits = responsibilities_backward(dr, (R, window))
        e_cache = steps[t - 1][-1]
        dmu, dsigma2, dx = e_step_backward(dlogits, e_cache)
        numbers[:, :, 2 * k + 1], vectors[0, :, :, 2 * k + 1], vectors[1, :, :, 2 * k + 1] = dlogits, *e_cache[-2:]
    vectors[1] *= 2
    numbers, vectors = numbers.reshape(L * J, T, I).transpose(0, 2, 1), vectors.reshape(2, L * J, T, D)
    dV, part = recycle(V2, empty), empty(V.shape, V.dtype)
    np.matmul(numbers, vectors[1], out=by_parent(dV))
    dV *= V
    np.matmul(numbers, vectors[0], out=by_parent(part))
    dV += part
    return dV, da, dbeta_u, dbeta_a


EM_CHUNK = 4                       # images that are routed at once


def scratch_of(empty):
    """An arena for what comes again within a step; it lives as long as `empty`, if that is an arena itself"""
    return vars(empty).setdefault("scratch", Arena()) if isinstance(empty, Arena) else Arena()


def conv_caps_forward(pose, active, W, beta_u, beta_a, config, empty=np.empty):
    """Convolutional capsules, 3x3 with stride 2. pose (N, H, W, B, D), active (N, H, W, B), W (9*B, J, P, P)
    -> mu (N, places, J, D), a (N, places, J).

    The votes, 9/4 J times as large as the poses, are made for EM_CHUNK images at a time, always in the same memory, which stays in the
    processor's cache, and are made once more in the backward pass. It buys: a training step takes 1.2 times as long without.
    """
    N, H, Wd, B, _ = pose.shape
    places, J = ((H - 3) // 2 + 1) * ((Wd - 3) // 2 + 1), W.shape[1]
    mu, a = np.empty((N, places, J, D), pose.dtype), np.empty((N, places, J), pose.dtype)
    scratch, chunks = scratch_of(empty), []
    for start in range(0, N, EM_CHUNK):
        part = slice(start, min(start + EM_CHUNK, N))
        n = part.stop - start
        M, children = unfold(pose[part], 3, 2), unfold(active[part, ..., None], 3, 2)[..., 0].T.copy()
        V, votes_cache = pose_votes_forward(M, W, scratch.rewind())                            # (9*B, n*places, J, D)
        (m, act), em_cache = em_routing_forward(V, children, beta_u, beta_a, config.em_iters, config.final_lambda,
                                                places * J / (H * Wd * B), (n, H, Wd, B, 3, 2), scratch)
        mu[part], a[part] = m.reshape(n, places, J, D), act.reshape(n, places, J)
        chunks.append((part, votes_cache, em_cache))
    return (mu, a), (pose.shape, W, scratch, chunks)


def conv_caps_backward(dmu, da, cache, detached=False):
    """-> dpose, dactive, dW, dbeta_u, dbeta_a"""
    shape, W, scratch, chunks = cache
    dpose, dactive = np.empty(shape, dmu.dtype), np.empty(shape[:-1], dmu.dtype)
    J, sums = W.shape[1], None
    for part, votes_cache, em_cache in chunks:
        M, blocks, _ = votes_cache
        V, V2 = em_cache[:2]
        n = part.stop - part.start
        np.matmul(M, blocks, out=V.reshape(len(V), -1, J * D))
        np.multiply(V, V, out=V2)
        scratch.taken = 2                                                                      # those two come first in it
        dV, dchildren, du, db = em_routing_backward(dmu[part].reshape(-1, J, D), da[part].reshape(-1, J), em_cache, detached)
        dM, dW = pose_votes_backward(dV, votes_cache)
        dpose[part] = fold(dM, (n, *shape[1:]), 3, 2)
        dactive[part] = fold(dchildren.T[..., None], (n, *shape[1:4], 1), 3, 2)[..., 0]
        sums = (dW, du, db) if sums is None else tuple(x + y for x, y in zip(sums, (dW, du, db)))
    return dpose, dactive, *sums


# ---------------------------------------------------------------- losses

def cross_entropy(scores, labels):
    """-log softmax(scores)[label], mean over the batch. scores (N, J), labels (N,) -> loss (float), dscores (N, J)"""
    n = np.arange(len(labels))
    log_p = scores - scores.max(1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    dscores = np.exp(log_p)
    dscores[n, labels] -= 1
    dscores /= len(labels)
    return -float(log_p[n, labels].sum()) / len(labels), dscores


def spread_loss(a, labels, margin):
    """Eq. 3: sum over i != t of max(0, m - (a_t - a_i))^2, mean over the batch. a (N, J), labels (N,), margin m, a float or (N,)

    -> loss (float), da (N, J). The paper raises m from 0.2 to 0.9; at equal activations the loss is (J-1) m^2.
    """
    n = np.arange(len(labels))
    short = np.maximum(np.reshape(margin, (-1, 1)) - (a[n, labels][:, None] - a), 0).astype(a.dtype, copy=False)
    short[n, labels] = 0
    da = short * (2 / len(labels))
    da[n, labels] = -da.sum(1)
    return float(np.vdot(short, short)) / len(labels), da


# ---------------------------------------------------------------- the models

POOL_HIDDEN = 32                   # hidden units of cnn-pool
DENSE_CAPS = 8                     # primary capsules of dense-caps
MARGINS = 0.2, 0.9                 # of the spread loss, at the start and at the end of training


def param_shapes(config, width=0):
    """Names and shapes of the weights of config.model; width: cnn_width"""
    C, J, A, B, F = N_CHANNELS[config.data], N_CLASSES, config.conv1_channels, config.primary_types, config.conv_types
    K, w = config.primary_kernel, width or config.cnn_width
    if config.model == "caps":
        return {"conv1_w": (5, 5, C, A), "conv1_b": (A,), "primary_w": (K, K, A, B * (D + 1)), "primary_b": (B * (D + 1),),
                "conv_W": (9 * B, F, P, P), "conv_beta_u": (F,), "conv_beta_a": (F,),
                "class_W": (F, J, P, P), "class_beta_u": (J,), "class_beta_a": (J,)}
    if config.model == "dense-caps":
        return {"conv1_w": (5, 5, C, 16), "conv1_b": (16,), "primary_w": (4096, DENSE_CAPS * (D + 1)),
                "primary_b": (DENSE_CAPS * (D + 1),),
                "class_W": (DENSE_CAPS, J, P, P), "class_beta_u": (J,), "class_beta_a": (J,)}
    if config.model == "cnn":
        weights = {"conv1_w": (5, 5, C, 16), "fc1_w": (4096, 64), "fc2_w": (64, J)}
    elif config.model == "cnn-pool":
        weights = {"conv1_w": (5, 5, C, w), "conv2_w": (5, 5, w, 2 * w), "fc1_w": (25 * 2 * w, POOL_HIDDEN), "fc2_w": (POOL_HIDDEN, J)}
    else:
        weights = {"conv1_w": (5, 5, C, w), "conv2_w": (3, 3, w, 2 * w), "conv3_w": (3, 3, 2 * w, 2 * w), "fc1_w": (2 * w, J)}
    return {key: value for name, shape in weights.items() for key, value in ((name, shape), (name[:-1] + "b", shape[-1:]))}


def matched_width(config):
    """The width of config.model (cnn-pool, cnn-gap) whose number of weights comes closest to the capsule network's"""
    def size(width, model=config.model):
        return sum(math.prod(shape) for shape in param_shapes(dataclasses.replace(config, model=model), width).values())
    return min(range(1, 513), key=lambda width: abs(size(width) - size(1, "caps")))


def n_dropped(config):
    """Number of the inputs of the last layer, on which dropout acts"""
    return {"caps": config.conv_types * len(field_centres(config)), "dense-caps": DENSE_CAPS, "cnn": 64, "cnn-pool": POOL_HIDDEN,
            "cnn-gap": 2 * (config.cnn_width or matched_width(config))}[config.model]


def init_params(config):
    """-> flat dict of float32 arrays. He-normal where a ReLU follows, 1/fan-in variance elsewhere; biases and betas 0."""
    rng = rng_for(config.seed, "init")
    params, width = {}, config.cnn_width or matched_width(config)
    for name, shape in param_shapes(config, width).items():
        if name.endswith("_W"):
            params[name] = rng.standard_normal(shape, np.float32) * np.float32(POSE_STD)
        elif name.endswith("_w"):
            linear = name == "primary_w" or shape[-1] == N_CLASSES
            params[name] = rng.standard_normal(shape, np.float32) * np.float32(np.sqrt((2 - linear) / math.prod(shape[:-1])))
        else:
            params[name] = np.zeros(shape, np.float32)
    return params


POSE_STD = 0.5                     # of the entries of a transformation matrix: a vote has the variance of the pose it comes from

CNN_LAYERS = {                     # operation, name of its weights, stride
    "cnn": (("pad",), ("conv2d", "conv1", 2), ("relu",), ("linear", "fc1"), ("relu",), ("dropout",), ("linear", "fc2")),
    "cnn-pool": (("conv2d", "conv1", 1), ("relu",), ("pool",), ("conv2d", "conv2", 1), ("relu",), ("pool",),
                 ("linear", "fc1"), ("relu",), ("dropout",), ("linear", "fc2")),
    "cnn-gap": (("conv2d", "conv1", 2), ("relu",), ("conv2d", "conv2", 1), ("relu",), ("conv2d", "conv3", 2), ("relu",),
                ("mean",), ("dropout",), ("linear", "fc1"))}


def pad2(images):
    """2 px of zeros all around: a 5x5 convolution with stride 2 then turns 32x32 into 16x16"""
    return np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))


def cnn_forward(params, batch, config, empty):
    """-> scores (N, J); the cache holds one entry a layer"""
    x, caches, p = batch["images"], [], params
    for op, *more in CNN_LAYERS[config.model]:
        name, cache = more[0] if more else "", x.shape
        if op == "pad":
            x = pad2(x)
        elif op == "conv2d":
            x, cache = conv2d_forward(x, p[name + "_w"], p[name + "_b"], more[1], empty)
        elif op == "relu":
            x, cache = relu_forward(x)
        elif op == "pool":
            x, cache = pool_forward(x)
        elif op == "mean":
            x = x.mean((1, 2))
        elif op == "dropout":
            cache = batch.get("keep", 1)
            x = x * cache
        elif op == "linear":
            x, linear_cache = linear_forward(x.reshape(len(x), -1), p[name + "_w"], p[name + "_b"], empty)
            cache = cache, linear_cache
        caches.append(cache)
    return x, caches


def cnn_backward(dx, caches, config):
    """dscores (N, J) -> grads"""
    grads = {}
    for (op, *more), cache in zip(reversed(CNN_LAYERS[config.model]), reversed(caches)):
        if op == "conv2d":
            dx, grads[more[0] + "_w"], grads[more[0] + "_b"] = conv2d_backward(dx, cache, more[0] != "conv1")
            if more[0] == "conv1":
                break
        elif op == "relu":
            dx = relu_backward(dx, cache)
        elif op == "pool":
            dx = pool_backward(dx, cache)
        elif op == "mean":
            dx = np.broadcast_to(dx[:, None, None] / (cache[1] * cache[2]), cache)
        elif op == "dropout":
            dx = dx * cache
        elif op == "linear":
            shape, linear_cache = cache
            dx, grads[more[0] + "_w"], grads[more[0] + "_b"] = linear_backward(dx, linear_cache)
            dx = dx.reshape(shape)
    return grads


def field_centres(config):
    """Centres of the receptive fields of the convolutional capsules' places, x and y in [-1, 1] over the image -> (places, 2)"""
    grid = (SIDE - 5) // 2 + 1 - config.primary_kernel + 1
    along = 2 * (2 * np.arange((grid - 3) // 2 + 1) + 1 + (config.primary_kernel - 1) / 2) + 2             # px
    along = (along - (SIDE - 1) / 2) / (SIDE / 2)
    return np.stack([np.tile(along, len(along)), np.repeat(along, len(along))], 1)


def caps_forward(params, batch, config, empty):
    """Both capsule networks -> out, cache.

    out: the class capsules' mu (N, J, D), a (N, J), scores (N, J) and, for every EM iteration, class_steps: (R (N, J, I), at first
    (N, 1, I), mu, sigma2 (N, J, D)), with I ordered (type, place); primary_pose (N, H, W, B, D), primary_a (N, H, W, B); of caps also
    conv_mu (N, places, F, D), conv_a (N, places, F).
    """
    p, x, N, dense = params, batch["images"], len(batch["images"]), config.model == "dense-caps"
    x, conv1_cache = conv2d_forward(pad2(x) if dense else x, p["conv1_w"], p["conv1_b"], 2, empty)         # (N, 14, 14, A)
    h, relu_cache = relu_forward(x)
    if dense:
        x, primary_cache = linear_forward(h.reshape(N, -1), p["primary_w"], p["primary_b"], empty)
        x = x.reshape(N, 1, 1, -1)
    else:
        x, primary_cache = conv2d_forward(h, p["primary_w"], p["primary_b"], 1, empty)                     # (N, 12, 12, B*17)
    H, W, B = x.shape[1], x.shape[2], x.shape[3] // (D + 1)
    pose = x[..., :B * D].reshape(N, H, W, B, D)
    active, active_cache = sigmoid_forward(x[..., B * D:])                                                 # (N, H, W, B)
    if dense:
        M, a, places, conv_caches, conv = pose.reshape(N, B, D).transpose(1, 0, 2).copy(), active.reshape(N, B), 1, None, {}
    else:
        (mu, a), conv_caches = conv_caps_forward(pose, active, p["conv_W"], p["conv_beta_u"], p["conv_beta_a"], config, empty)
        (places, F), conv = a.shape[1:], {"conv_mu": mu, "conv_a": a}
        M = mu.transpose(2, 1, 0, 3).reshape(F, places * N, D)                                             # a group a type
        a = a.transpose(0, 2, 1).reshape(N, F * places)
    keep = batch.get("keep", 1)                                                                            # (N, I) or 1
    V, votes_cache = pose_votes_forward(M, p["class_W"], empty)
    V = V.reshape(-1, N, N_CLASSES, D)
    if not (dense or config.no_coord_add):
        by_place, centres = V.reshape(-1, places, N, N_CLASSES, P, P), field_centres(config).astype(V.dtype)
        by_place[..., 0, P - 1] += centres[:, 0, None, None]
        by_place[..., 1, P - 1] += centres[:, 1, None, None]
    (mu, act), em_cache = em_routing_forward(V, a * keep, p["class_beta_u"], p["class_beta_a"], config.em_iters, config.final_lambda,
                                             N_CLASSES / len(V), None, empty)
    scores = act if config.loss == "spread" else np.einsum("njd,njd->nj", mu, mu) / D + 4 * (act - 0.5)
    out = {"mu": mu, "a": act, "scores": scores, "class_steps": [step[:3] for step in em_cache[-1]], "primary_pose": pose,
           "primary_a": active, **conv}
    return out, (conv1_cache, relu_cache, primary_cache, active_cache, (N, H, W, B, places), conv_caches, keep, votes_cache, em_cache, mu)


def caps_backward(dscores, cache, config):
    """dscores (N, J) -> grads"""
    conv1_cache, relu_cache, primary_cache, active_cache, (N, H, W, B, places), conv_caches, keep, votes_cache, em_cache, mu = cache
    detached, dense, grads = config.routing_grad == "detached", config.model == "dense-caps", {}
    dmu, dact = (np.zeros_like(mu), dscores) if config.loss == "spread" else (dscores[..., None] * mu * (2 / D), 4 * dscores)
    dV, da, grads["class_beta_u"], grads["class_beta_a"] = em_routing_backward(dmu, dact, em_cache, detached)
    da = da * keep
    dM, grads["class_W"] = pose_votes_backward(dV.reshape(votes_cache[0].shape[:2] + dV.shape[2:]), votes_cache)
    if dense:
        dpose, dactive = dM.transpose(1, 0, 2).reshape(N, 1, 1, B, D), da.reshape(N, 1, 1, B)
    else:
        F = config.conv_types
        dmu = dM.reshape(F, places, N, D).transpose(2, 1, 0, 3)
        da = da.reshape(N, F, places).transpose(0, 2, 1)
        dpose, dactive, grads["conv_W"], grads["conv_beta_u"], grads["conv_beta_a"] = conv_caps_backward(dmu, da, conv_caches, detached)
    dx = np.empty((N, H, W, B * (D + 1)), mu.dtype)
    dx[..., :B * D] = dpose.reshape(N, H, W, B * D)
    dx[..., B * D:] = sigmoid_backward(dactive, active_cache)
    if dense:
        dh, grads["primary_w"], grads["primary_b"] = linear_backward(dx.reshape(N, -1), primary_cache)
        dh = dh.reshape(relu_cache[0].shape)
    else:
        dh, grads["primary_w"], grads["primary_b"] = conv2d_backward(dx, primary_cache)
    _, grads["conv1_w"], grads["conv1_b"] = conv2d_backward(relu_backward(dh, relu_cache), conv1_cache, need_dx=False)
    return grads


def forward(params, batch, config, empty=np.empty):
    """batch: to_batch's dict -> out with scores (N, J), for capsules also caps_forward's poses; and the cache"""
    if config.model in ("caps", "dense-caps"):
        return caps_forward(params, batch, config, empty)
    scores, cache = cnn_forward(params, batch, config, empty)
    return {"scores": scores}, cache


def loss_and_grads(params, batch, config, empty=np.empty, share=1.0):
    """One batch (to_batch's dict) -> (terms, grads): means over the batch, times `share`, a shard's part of its batch. Pure;
    with an Arena the grads live until rewind(). terms: loss; hits: images named right."""
    out, cache = forward(params, batch, config, empty)
    capsules = config.model in ("caps", "dense-caps")
    if capsules and config.loss == "spread":
        loss, dscores = spread_loss(out["scores"], batch["labels"], batch["margin"])
    else:
        loss, dscores = cross_entropy(out["scores"], batch["labels"])
    grads = (caps_backward if capsules else cnn_backward)(dscores * share, cache, config)
    return {"loss": loss * share, "hits": int((out["scores"].argmax(1) == batch["labels"]).sum())}, grads


def forward_rows(params, samples, rows, config, empty):
    """forward of some prepared samples -> scores (n, J) and, of capsules, mu (n, J, D) and a (n, J)"""
    out, _ = forward(params, to_batch(samples, rows), config, empty)
    return {name: out[name] for name in ("scores", "mu", "a") if name in out}


# ---------------------------------------------------------------- Adam

BETA1, BETA2, ADAM_EPS, ADAM_CHUNK = 0.9, 0.999, 1e-8, 1 << 17


def adam_step(params, shard_grads, adam_m, adam_v, step, lr, runner):
    """One Adam step in place, step counting from 1; the gradient is the sum of shard_grads, in their order.

    p -= lr m_hat / (sqrt(v_hat) + eps), m_hat and v_hat the bias-corrected means of the gradient and of its square. The means are
    kept as sums, adam_m = m / (1 - beta1), adam_v = v / (1 - beta2), and all factors are gathered into two numbers: 11 passes
    over memory instead of 16. They run over chunks that stay in cache and are shared among the runner's threads; each number is
    computed alone, so the bits do not depend on who computes it.
    """
    root = float(np.sqrt((1 - BETA2) / (1 - BETA2 ** step)))                                   # sqrt(v_hat) = root sqrt(adam_v)
    rate, eps = float(lr * (1 - BETA1) / (1 - BETA1 ** step) / root), ADAM_EPS / root

    def update(chunks):
        scratch = np.empty((2, ADAM_CHUNK), np.result_type(*params.values()))
        for name, start in chunks:
            p, m, v, *gs = (a[name].reshape(-1)[start:start + ADAM_CHUNK] for a in (params, adam_m, adam_v, *shard_grads))
            total, part = scratch[:, :p.size]
            g = gs[0] if len(gs) == 1 else np.add(gs[0], gs[1], out=total)
            for shard in gs[2:]:
                g += shard
            m *= BETA1
            m += g
            v *= BETA2
            v += np.multiply(g, g, out=part)
            np.sqrt(v, out=part)
            part += eps
            np.divide(m, part, out=part)
            part *= rate
            p -= part

    chunks = [(name, start) for name in params for start in range(0, params[name].size, ADAM_CHUNK)]
    runner.map(update, [chunks[k::runner.threads] for k in range(runner.threads)])


# ---------------------------------------------------------------- running in shards

def n_cores():
    """Cores that this process may use"""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Runner:
    """Cuts batches into shards of SHARD_SIZE and shares them among worker threads (NumPy releases the GIL in its loops).

    Shards, and the order in which their results are added up, do not depend on the number of threads: neither do the bits.
    """

    def __init__(self, threads, batch_size=10 ** 9):
        self.threads = min(threads or n_cores(), -(-batch_size // SHARD_SIZE))
        self.pool = ThreadPoolExecutor(self.threads) if self.threads > 1 else None
        self.arenas = []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def map(self, function, items):
        """function(item) for all items, on the workers. Overflow warnings are off: train() watches the loss instead."""
        def quiet(item):
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                return function(item)
        return list(self.pool.map(quiet, items) if self.pool else map(quiet, items))

    def loss_and_grads(self, params, samples, rows, config):
        """loss_and_grads of samples[rows], shard by shard -> (terms, list of the shards' grads, to be added up)"""
        shards = [rows[start:start + SHARD_SIZE] for start in range(0, len(rows), SHARD_SIZE)]
        self.arenas += [Arena() for _ in range(len(self.arenas), len(shards))]
        results = self.map(lambda arena_shard: loss_and_grads(
            params, to_batch(samples, arena_shard[1]), config, arena_shard[0].rewind(), len(arena_shard[1]) / len(rows)),
            zip(self.arenas, shards))
        terms = {name: sum(terms[name] for terms, _ in results) for name in results[0][0]}
        return terms, [grads for _, grads in results]

    def forward(self, params, samples, config, **options):
        """forward_rows of all samples, shard by shard -> its dict of arrays, a row a sample"""
        def one(some_shards):
            arena = Arena()
            outs = (forward_rows(params, samples, shard, config, arena.rewind(), **options) for shard in some_shards)
            return [{name: a.copy() for name, a in out.items()} for out in outs]
        shards = [slice(start, start + SHARD_SIZE) for start in range(0, len(samples["labels"]), SHARD_SIZE)]
        parts = sum(self.map(one, [shards[k:k + 8] for k in range(0, len(shards), 8)]), [])
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def wilson_interval(hits, n, z=1.959964):
    """95% Wilson score interval of a proportion -> (low, high), around hits / n also where rounding would exclude it"""
    p, z2n = hits / n, z * z / n
    centre, half = (p + z2n / 2) / (1 + z2n), z * np.sqrt(p * (1 - p) / n + z2n / (4 * n)) / (1 + z2n)
    return float(max(0, min(p, centre - half))), float(min(1, max(p, centre + half)))


# ---------------------------------------------------------------- evaluate, train

def prepared(samples, source):
    """Test images as the network eats them, a chunk at a time: smallNORB's central crops, standardised"""
    for start in range(0, len(samples["labels"]), CHUNK):
        rows = np.arange(start, min(start + CHUNK, len(samples["labels"])))
        images = crop_batch(samples["images"], rows, None) if source == "smallnorb" else samples["images"][rows]
        yield {"images": images, "labels": samples["labels"][rows]}


def evaluate(params, samples, config, runner):
    """-> dict: n, hits, accuracy, loss (mean cross-entropy of the scores), predictions (n,)"""
    predictions, loss = [], 0.0
    for part in prepared(samples, config.data):
        scores = runner.forward(params, part, config)["scores"]
        predictions.append(scores.argmax(1))
        loss += cross_entropy(scores, part["labels"])[0] * len(scores)
    predictions = np.concatenate(predictions)
    hits, n = int((predictions == samples["labels"]).sum()), len(predictions)
    return {"n": n, "hits": hits, "accuracy": hits / n, "loss": loss / n, "predictions": predictions}


def evaluate_viewpoint_extrapolation(params, data, config, runner):
    """Accuracy on familiar viewpoints, on held-out ones, and the drop from one to the other -> dict"""
    familiar, held_out = (evaluate(params, data[name], config, runner) for name in ("familiar", "held_out"))
    return {"familiar": familiar["accuracy"], "held_out": held_out["accuracy"], "drop": familiar["accuracy"] - held_out["accuracy"],
            "familiar_loss": familiar["loss"], "held_out_loss": held_out["loss"]}


def learning_rate(config, step, n_steps):
    """Adam's learning rate at a step counting from 0"""
    if config.lr_schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * step / n_steps))
    return config.lr * (0.96 ** (step / 2000) if config.lr_schedule == "exponential" else 1)


def open_ended(config):
    """Whether a run may be resumed with more epochs: nothing that it did depends on their number"""
    return config.lr_schedule != "cosine" and config.loss != "spread"


def run_identity(config, source):
    """What must agree for a checkpoint to be resumed: every setting that changes training, and where the data come from"""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)
            if not (f.metadata.get("runtime") or f.name == "n_epochs" and open_ended(config))} | {"source": source}


CHECKPOINT = ("params", "adam_m", "adam_v", "average")


def save_checkpoint(path, state, step, config, source, history):
    """All that a run needs to go on, in one .npz, written atomically. state: the dicts of arrays of CHECKPOINT, in its order"""
    arrays = {f"{group}/{name}": a for group, arrays in zip(CHECKPOINT, state) for name, a in arrays.items()}
    settings = run_identity(config, source) | {"n_epochs": config.n_epochs}
    meta = json.dumps({"format": 1, "step": step, "config": settings, "history": history})
    write_atomically(path, lambda file: np.savez(file, meta=np.array(meta), **arrays))


def load_checkpoint(path):
    """-> (*state, meta) of save_checkpoint; meta: step, config, history"""
    groups = {group: {} for group in CHECKPOINT}
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = json.loads(str(file["meta"]))
            for key in file.files:
                group, _, name = key.partition("/")
                if name:
                    groups[group][name] = file[key]
        shapes = [{name: a.shape for name, a in arrays.items()} for arrays in groups.values()]
        expected = {name: p.shape for name, p in init_params(config_of(meta, path)).items()}
        if meta["format"] != 1 or any(shape != expected for shape in shapes):
            raise ValueError("arrays are missing or of the wrong shape")
        return (*groups.values(), meta)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a checkpoint that --checkpoint wrote") from None
    except InputError:
        raise
    except Exception:                                  # what a damaged zip file makes its reader raise is not documented
        raise InputError(f"{path}: not a whole checkpoint that --checkpoint wrote; give another file") from None


def config_of(meta, path):
    """The Config of a checkpoint's run"""
    try:
        return Config(**{name: value for name, value in meta["config"].items() if name != "source"})
    except TypeError:
        raise InputError(f"{path}: a checkpoint of another experiment; give one that this one's --checkpoint wrote") from None


def check_same_run(config, source, meta, path):
    """Raise InputError if a checkpoint is another run's, which must be neither gone on from nor overwritten"""
    ours = run_identity(config, source)
    theirs = run_identity(config_of(meta, path), meta["config"].get("source"))                # fields of later versions at their defaults
    if differing := ", ".join(f"{name} {theirs[name]}, now {ours[name]}" for name in ours if ours[name] != theirs[name]):
        raise InputError(f"{path}: made by another run ({differing}); give the same settings, or another --checkpoint")


def check_fields(config):
    """Raise InputError for a value out of its field's range, or an output file that could not be written"""
    rules = {"low": (lambda value, low: value >= low, "at least"), "high": (lambda value, high: value <= high, "at most"),
             "above": (lambda value, bound: value > bound, "more than"), "choices": (lambda value, names: value in names, "one of")}
    for f in dataclasses.fields(config):
        value, flag = getattr(config, f.name), "--" + f.name.replace("_", "-")
        if isinstance(value, float) and not np.isfinite(value):
            raise InputError(f"{flag} {value}: must be a finite number")
        for rule, (holds, words) in rules.items():
            if rule in f.metadata and not holds(value, f.metadata[rule]):
                raise InputError(f"{flag} {value}: must be {words} {f.metadata[rule]}")
    if config.resume and not config.checkpoint:
        raise InputError("--resume needs --checkpoint FILE: the file to go on from")
    for path in filter(None, (config.checkpoint, config.out_json)):
        check_writable(path)


def check_config(config):
    """check_fields, and what concerns two flags at once"""
    for name in "model", "data":                                                               # on which other defaults depend
        if getattr(config, name) not in Config.__dataclass_fields__[name].metadata["choices"]:
            raise InputError(f"--{name} {getattr(config, name)}: must be one of {Config.__dataclass_fields__[name].metadata['choices']}")
    config = resolved(config)
    check_fields(config)
    if config.ablations and config.model != "caps":
        raise InputError(f"--ablations: are variants of the capsule network; leave --model {config.model} out")
    for name in ("train_azimuths", "test_azimuths", "elevations", "train_elevations", "test_elevations"):
        parse_range(getattr(config, name), "--" + name.replace("_", "-"))
    if unknown := [name for name in baselines(config) if name not in MODELS]:
        raise InputError(f"--baseline {config.baseline}: {unknown[0]} is none of {', '.join(MODELS)}")
    if config.model == "caps" and config.primary_kernel > 12:
        raise InputError(f"--primary-kernel {config.primary_kernel}: must be at most 12")


class Progress:
    """On a terminal one live line; elsewhere a line an epoch; with --quiet nothing."""

    def __init__(self, quiet):
        self.quiet, self.live, self.last = quiet, not quiet and sys.stdout.isatty(), 0.0

    def say(self, text, end="\n"):
        """Print; a text that starts with a carriage return replaces the live line, and is for terminals only"""
        if text.startswith("\r") and self.live:
            print("\r\x1b[K" + text[1:shutil.get_terminal_size().columns], end=end, flush=True)
        elif not (self.quiet or text.startswith("\r")):
            print(text, end=end, flush=True)

    def step(self, text):
        if self.live and time.perf_counter() - self.last > 0.2:
            self.last = time.perf_counter()
            self.say("\r" + text, end="")

    def epoch(self, text):
        self.say("\r" + text if self.live else text)


def train(config, snapshot_callback=None, snapshot_every=0, data=None):
    """Train config.model -> (params, history). Nothing depends on the test images it looks at, except with --stop-familiar.

    params: the weights' running mean if --average is set, else the weights. snapshot_callback(step, params, terms) gets copies of
    them, at step 0, every snapshot_every steps and at the end; it cannot change the run. data: load_data's result, to load only
    once. history: epochs (a dict for each of about 20 epochs, or every one with --stop-familiar: training loss and accuracy,
    accuracy on familiar and held-out views), seconds, steps.
    """
    check_config(config)
    config, progress = resolved(config), Progress(config.quiet)
    data = data or load_data(config)
    params = init_params(config)
    adam_m, adam_v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    average = {name: p.copy() for name, p in params.items()}
    n_train = len(data["train"]["labels"])
    steps_per_epoch = -(-n_train // config.batch_size)
    n_steps, step = config.n_epochs * steps_per_epoch, 0
    look_every = 1 if config.stop_familiar else max(1, config.n_epochs // 20)
    history = {"epochs": [], "seconds": 0.0, "steps": 0}
    saved, terms = "", None                                             # where to find the last good state
    if config.checkpoint and Path(config.checkpoint).exists():
        found = load_checkpoint(config.checkpoint)
        check_same_run(config, data["source"], found[-1], config.checkpoint)
        if config.resume:
            params, adam_m, adam_v, average, meta = found
            step, history = meta["step"], meta["history"]
            saved = f" (the last good state is in {config.checkpoint})"
    elif config.resume:
        progress.say(f"{config.checkpoint} is not there yet: starting anew")

    def snapshot(terms):
        kept = average if config.average else params
        return snapshot_callback(step, {name: p.copy() for name, p in kept.items()}, terms)

    with Runner(config.threads, config.batch_size) as runner:
        announce(config, data, params, runner, step, progress)
        if snapshot_callback:
            snapshot(None)
        for epoch in range(step // steps_per_epoch, config.n_epochs):
            if config.stop_familiar and history["epochs"] and history["epochs"][-1]["familiar"] >= config.stop_familiar:
                if snapshot_callback and terms and not (snapshot_every and step % snapshot_every == 0):
                    snapshot(dict(terms))
                break
            began, loss, hits, seen = time.perf_counter(), 0.0, 0, 0
            for samples in epoch_samples(data, epoch, config):
                for start in range(0, len(samples["labels"]), config.batch_size):
                    rows = np.arange(start, min(start + config.batch_size, len(samples["labels"])))
                    terms, grads = runner.loss_and_grads(params, samples, rows, config)
                    if not np.isfinite(terms["loss"]):
                        raise InputError(f"the loss is {terms['loss']} at step {step + 1}: training diverged; lower --lr{saved}")
                    lr = learning_rate(config, step, n_steps)
                    for p in params.values() if config.weight_decay else ():
                        if p.ndim > 1:
                            p *= 1 - lr * config.weight_decay
                    adam_step(params, grads, adam_m, adam_v, step + 1, lr, runner)
                    step, seen = step + 1, seen + len(rows)
                    for name, p in params.items() if config.average else ():
                        average[name] += (p - average[name]) * (1 - min(config.average, step / (step + 9)))
                    loss, hits = loss + terms["loss"] * len(rows), hits + terms["hits"]
                    left = (n_steps - step) * config.batch_size * (time.perf_counter() - began) / seen
                    progress.step(f"step {step}/{n_steps}  {left:.0f} s left  loss {loss / seen:.3f}  accuracy {hits / seen:.3f}")
                    if snapshot_callback and (step == n_steps or snapshot_every and step % snapshot_every == 0):
                        paused = time.perf_counter()
                        snapshot(dict(terms))
                        began += time.perf_counter() - paused                          # its time is not training's
            history["seconds"] += time.perf_counter() - began
            history["steps"] = step
            if not all(np.isfinite(p).all() for p in params.values()):
                raise InputError(f"the weights are not finite after step {step}: training diverged; lower --lr{saved}")
            if (epoch + 1) % look_every == 0 or epoch + 1 == config.n_epochs:
                found = evaluate_viewpoint_extrapolation(average if config.average else params, data, config, runner)
                history["epochs"].append({"epoch": epoch + 1, "step": step, "train_loss": loss / seen, "train_accuracy": hits / seen,
                                          **found})
                progress.epoch(f"epoch {epoch + 1}/{config.n_epochs}  loss {loss / seen:.3f}  accuracy {hits / seen:.3f}  familiar "
                               f"{found['familiar']:.3f}  held-out {found['held_out']:.3f}  "
                               f"{seen * (epoch + 1) / history['seconds']:.0f} images/s")
            if config.checkpoint:
                save_checkpoint(config.checkpoint, (params, adam_m, adam_v, average), step, config, data["source"], history)
                saved = f" (the last good state is in {config.checkpoint})"
    return average if config.average else params, history


def announce(config, data, params, runner, step, progress):
    """What a run prints at its start: data, network, parameters, threads, and its initial loss beside that of guessing"""
    counts = ", ".join(f"{len(data[name]['labels'])} {name.replace('_', '-')}" for name in ("train", "familiar", "held_out"))
    loss = evaluate(params, data["familiar"], config, runner)["loss"]
    shape = {"caps": f"A={config.conv1_channels} B={config.primary_types} C={config.conv_types}, {config.em_iters} EM iterations, gradient "
             f"{config.routing_grad}, {config.loss} loss; ", "dense-caps": f"{config.em_iters} EM iterations; "}.get(config.model, "")
    progress.say(f"{config.model}: {shape}{n_params(params):,} parameters; {data['source']} images: {counts}; seed {config.seed}, "
                 f"{runner.threads} thread{'s' * (runner.threads > 1)}; "
                 + (f"going on at step {step}" if step else f"initial loss {loss:.3f}, guessing {math.log(N_CLASSES):.3f}"))


# ---------------------------------------------------------------- comparing networks

SWEEP = range(0, 360, 10)          # azimuths of a sweep, degrees
ABLATIONS = {"detached gradient": dict(routing_grad="detached"), "spread loss": dict(loss="spread"),
             "no coordinate addition": dict(no_coord_add=True), "1 EM iteration": dict(em_iters=1),
             "3 EM iterations": dict(em_iters=3), "3 iterations, no decay": dict(em_iters=3, weight_decay=0.0),
             "no weight decay": dict(weight_decay=0.0), "no dropout": dict(dropout=0.0), "dense capsules": dict(model="dense-caps")}


def baselines(config):
    return [] if config.baseline == "none" else config.baseline.split(",")


def variants(config):
    """{label: Config}, the first being the network that the others are compared with"""
    if config.ablations:
        return {label: dataclasses.replace(config, ablations=False, **changes) for label, changes in ({"full": {}} | ABLATIONS).items()}
    return {name: dataclasses.replace(config, model=name) for name in (config.model, *baselines(config))}


def azimuth_sweep(params, config, runner, azimuths=SWEEP):
    """Accuracy at each azimuth (degrees), on new noise -> list of floats. Embedded shapes only."""
    elevations = np.linspace(*parse_range(config.elevations, "--elevations"), config.n_elev)
    views = make_views(np.array(azimuths), elevations, config.n_test_per_combo, rng_for(config.seed, "evaluation", 2))
    right = evaluate(params, views, config, runner)["predictions"] == views["labels"]
    return [float(right[views["azimuths"] == azimuth % 360].mean()) for azimuth in azimuths]


def run_one(label, config, data=None):
    """Train and test one network -> (record for --out-json, params)"""
    data = data or load_data(config)
    params, history = train(config, data=data)
    with Runner(config.threads) as runner:
        found = evaluate_viewpoint_extrapolation(params, data, config, runner)
        sweep = azimuth_sweep(params, config, runner) if config.data == "synthetic" and config.split == "azimuth" else None
    return {"label": label, "seed": config.seed, "n_params": n_params(params), **found, "seconds": history["seconds"],
            "ms_per_step": 1e3 * history["seconds"] / max(1, history["steps"]), "sweep": sweep, "history": history["epochs"]}, params


def run_all(config, say=print):
    """Every variant with every seed -> list of (record, params). Several seeds: independent processes, one a core, one thread each."""
    jobs = []
    for k in range(config.n_seeds):
        for label, variant in variants(config).items():
            path = Path(config.checkpoint)
            if config.checkpoint and (label, k) != (next(iter(variants(config))), 0):
                path = path.with_name(f"{path.stem}.{label.replace(' ', '-')}-{config.seed + k}{path.suffix}")
            jobs.append((label, dataclasses.replace(variant, seed=config.seed + k, checkpoint=str(path) if config.checkpoint else "")))
    if config.n_seeds == 1:
        data = load_data(config)
        return [run_one(label, job, data) for label, job in jobs]
    workers = min(config.threads or n_cores(), len(jobs))
    results = []
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run_one, label, dataclasses.replace(job, threads=1, quiet=True)) for label, job in jobs]
        try:
            for future in futures:
                results.append(future.result())
                record = results[-1][0]
                say(f"{record['label']}, seed {record['seed']}: familiar {record['familiar']:.3f}  held-out {record['held_out']:.3f}  "
                    f"{record['seconds']:.0f} s")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
       2.110, 2.101, 2.093)        # Student's t, two-sided 95%, by degrees of freedom


def mean_and_interval(values):
    """Mean and half width of its 95% t interval (nan for one value)"""
    n = len(values)
    t = math.nan if n < 2 else T95[n - 1] if n <= len(T95) else 1.96
    return float(np.mean(values)), float(t * np.std(values, ddof=1) / math.sqrt(n)) if n > 1 else math.nan


def at_matched_familiar(record, reference):
    """Held-out accuracy when the network first was as good on familiar views as `reference`, another record, at its end; None if never"""
    return next((epoch["held_out"] for epoch in record["history"] if epoch["familiar"] >= reference["familiar"]), None)


def summarize(records):
    """Records of several networks and seeds -> {label: {"familiar": (mean, half width), "held_out", "drop", "difference", ...}}

    difference: held-out accuracy of the first network minus this one's, paired by seed. matched: the first network's held-out accuracy at
    the first look at which its familiar accuracy reached this network's final one, and matched_difference, minus this one's held-out.
    """
    by_label = {}
    for record in records:
        by_label.setdefault(record["label"], []).append(record)
    first, summary = next(iter(by_label.values())), {}
    for label, runs in by_label.items():
        row = {key: mean_and_interval([run[key] for run in runs]) for key in ("familiar", "held_out", "drop", "seconds", "ms_per_step")}
        row |= {"n_params": runs[0]["n_params"], "seeds": [run["seed"] for run in runs]}
        if runs is not first:
            row["difference"] = mean_and_interval([a["held_out"] - b["held_out"] for a, b in zip(first, runs)])
            matched = [(at_matched_familiar(a, b), b["held_out"]) for a, b in zip(first, runs)]
            if all(m is not None for m, _ in matched):
                row["matched"] = mean_and_interval([m for m, _ in matched])
                row["matched_difference"] = mean_and_interval([m - h for m, h in matched])
        if runs[0]["sweep"]:
            row["sweep"] = np.mean([run["sweep"] for run in runs], 0).tolist()
        summary[label] = row
    return summary


def n_params(params):
    return sum(p.size for p in params.values())


# ---------------------------------------------------------------- command line

class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, as for all other bad input"""

    def error(self, message):
        raise InputError(f"{message}; see --help")


def add_config_flags(parser):
    """One flag for every field of Config. Flags that are not given leave no trace: the defaults are Config's."""
    for f in dataclasses.fields(Config):
        default = f.metadata.get("shown", f.default)
        flag = dict(help=f.metadata["help"] + (f" (default {default})" if default not in ("", False) else ""))
        if f.type is bool:
            flag.update(action="store_true")
        else:
            names = f.metadata.get("choices")
            flag.update(type=f.type, choices=names,
                        metavar=None if names else f.metadata.get("metavar", {int: "N", float: "X", str: "FILE"}[f.type]))
        parser.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, **flag)


def config_from_args(args):
    """The Config of the flags that were given"""
    return Config(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if hasattr(args, f.name)})


def run_cli(main):
    """Call main(); turn what the user can mend into one line and exit code 2."""
    try:
        main()
    except InputError as error:
        sys.exit(fail(str(error)))
    except MemoryError:
        sys.exit(fail("out of memory; lower --batch-size or the network's sizes"))
    except KeyboardInterrupt:
        print("\nstopped; --checkpoint, if it was given, holds the last whole epoch", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:                                                             # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def fail(message):
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def peak_rss_mb():
    """Peak resident memory of this process, MB (10^6 bytes); None where the system does not tell"""
    with contextlib.suppress(OSError, IndexError):                      # Linux; getrusage would count a parent's memory too
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    with contextlib.suppress(ImportError):
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return None


def report(config, records, say):
    """Print the comparison, and write --out-json"""
    summary = summarize(records)

    def cell(pair):
        return f"{pair[0]:.3f}" + (f" +- {pair[1]:.3f}" if np.isfinite(pair[1]) else "")

    say(f"\n{config.data} images, {config.split} split; {config.n_seeds} seed{'s' * (config.n_seeds > 1)}"
        + (", mean +- 95% t interval" if config.n_seeds > 1 else "") + f"\n{'':24}parameters  familiar views     held-out views     drop")
    for label, row in summary.items():
        say(f"{label:24}{row['n_params']:10,}  {cell(row['familiar']):17}  {cell(row['held_out']):17}  {cell(row['drop'])}")
    first = next(iter(summary))
    for label, row in summary.items():
        if "difference" in row:
            matched = f"; stopped at {label}'s familiar accuracy {cell(row['matched_difference'])}" if "matched" in row else ""
            say(f"held-out, {first} minus {label}, paired by seed: {cell(row['difference'])}{matched}")
    if gaps := gap_table(config, summary):
        say("held-out accuracy by distance from the nearest training azimuth, degrees\n" + f"{'':24}"
            + "".join(f"{gap:>8}" for gap in next(iter(gaps.values()))))
        for label, row in gaps.items():
            say(f"{label:24}" + "".join(f"{accuracy:8.3f}" for accuracy in row.values()))
    seconds = sum(record["seconds"] for record in records)
    say(f"training {seconds:.1f} s" + (f", peak memory {peak_rss_mb():.0f} MB" if peak_rss_mb() else ""))
    if config.out_json:
        results = {"config": dataclasses.asdict(config), "summary": summary, "runs": records, "peak_rss_mb": peak_rss_mb(),
                   "versions": {"python": sys.version.split()[0], "numpy": np.__version__}}
        results = json.loads(json.dumps(results), parse_constant=lambda _: None)              # JSON has no nan: intervals of one seed
        write_atomically(config.out_json, lambda file: file.write((json.dumps(results, indent=1) + "\n").encode()))


def distance_to_training(azimuth, config):
    """Degrees from an azimuth to the nearest end of the training range; 0 inside"""
    low, high = parse_range(resolved(config).train_azimuths, "--train-azimuths")
    return 0 if (azimuth - low) % 360 <= high - low else min((azimuth - high) % 360, (low - azimuth) % 360)


def gap_table(config, summary):
    """{label: {distance to the training range, degrees: mean accuracy}} of the sweeps, in steps of 30 degrees; {} without sweeps"""
    bins = {}
    for azimuth in SWEEP:
        bins.setdefault(-(-round(distance_to_training(azimuth, config)) // 30) * 30, []).append(SWEEP.index(azimuth))
    return {label: {gap: float(np.mean([row["sweep"][k] for k in at])) for gap, at in sorted(bins.items())}
            for label, row in summary.items() if "sweep" in row}


def main():
    parser = Parser(description=__doc__.split("\n\n")[0], epilog="\n\n".join(__doc__.split("\n\n")[-1:]),
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_flags(parser)
    config = config_from_args(parser.parse_args())
    check_config(config)
    say = Progress(config.quiet).say
    report(config, [record for record, _ in run_all(config, say)], say)


if __name__ == "__main__":
    run_cli(main)
