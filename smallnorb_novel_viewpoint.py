#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0"]
# ///
"""smallNORB novel viewpoints: capsules of vectors and of matrices, dynamic and EM routing, in NumPy, down to the last
gradient.

Hinton, Sabour & Frosst, "Matrix capsules with EM routing", ICLR 2018.

Question: a network sees objects from some viewpoints only. Does it know them from viewpoints it never saw, and does a
capsule network lose less there than the best CNN of the same size?

    stage        layer of the paper's network, `--model matrix-capsnet --preset small`         output (A=32, B=4, C=D=8)
    Input        a toy from one viewpoint, two cameras                               (N, 32, 32, 2)
    Conv1        5x5, stride 2, A channels, batch normalization, ReLU                (N, 14, 14, A)
    PrimaryCaps  1x1, B types of a 4x4 pose M and an activation a, normalized        (N, 14, 14, B, 4x4 + 1)
    ConvCaps1    3x3, stride 2, C types: votes V_ij = M_i W_ij, EM routing           (N, 6, 6, C, 4x4 + 1)
    ConvCaps2    3x3, stride 1, D types, likewise                                    (N, 4, 4, D, 4x4 + 1)
    class        votes V_ij = M_i W_ij with W shared over places, plus the place's   (N, 5, 4x4 + 1)
                 coordinates; EM routing over all 16 D children

EM routing (Procedure 1): every parent fits a Gaussian to the votes of its children (M-step), every child divides
itself among its parents by how well its votes fit (E-step), and so on. Loss: cross-entropy of log a_j, or the paper's
spread loss. Adam. The backward pass runs through everything, all EM iterations included.

The backbone decides more than the head. Hence the fair comparison is of heads on one normalized backbone of four
convolutions, at one size: `dynamic-shared`, the default, vector capsules whose matrices are shared over places, with
dynamic routing (Sabour, Frosst & Hinton 2017), beside `gap`, a CNN with global average pooling. Further heads: dynamic
routing with a matrix for every place, EM routing. `caps`'s own rival is the paper's CNN, `--model cnn`.

Data: toys, drawn here with smallNORB's structure, on any machine (the default); the real smallNORB's files; or five
embedded 3D shapes, of which three are symmetric about the vertical axis: their held-out azimuths equal training views.

Deviations from the paper: smaller (`--preset paper` has its small net); batch normalization; two EM iterations
(`--routing-iters 3`); an inverse temperature that is the same in all of them, 1/16, with beta_a outside of it; the mass
normalized by parents / children (Gritzman 2019); pose matrices that start near the identity; cross-entropy instead of
spread loss (`--loss spread`).

One command, two minutes on two cores:    python3 smallnorb_novel_viewpoint.py --seed 0
"""
import argparse
import base64
import bisect
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import gzip
import hashlib
import json
import math
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

# SHARED preamble: what import needs, the same in every experiment ----------------------------------------------------

# One BLAS thread, set before numpy is imported: worker threads share the work in fixed shards instead, so that the bits
# do not depend on their number.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ[name] = "1"
import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view


class InputError(Exception):
    """Something the user gave is wrong; the message is one line that names it and how to mend it. Exit code 2."""


def option(default, text, group, **extra):
    """A setting: its default, its help text, the group of --help it stands in (data, network, training or run). A
    default of None is the recipe's: what Config.recipe says of the preset, the network or the data.

    extra: low, high, above, choices, which bound its value; metavar; runtime=True, if no bit of the training depends on
    it; only={setting: values}, the networks, tasks or data to which it means something, if not to all.
    """
    return dataclasses.field(default=default, metadata={"help": text, "group": group, **extra})

# END SHARED preamble -------------------------------------------------------------------------------------------------

# Axis legend, in the shape comments at line ends:
#   N batch   H W height, width   C channels in   F channels out   K kernel side   B types of primary capsules
#   P = 4 side of a pose matrix   D = P*P a pose as a row   I children of a parent   J types of parents
#   L places of parents in a batch: (N, rows, columns) for convolutional capsules, (N,) for class capsules
#   G groups of children that share transformation matrices   T terms of dV, see votes_gradient
#
# A sample's way:
#   select_images         which toy from which viewpoint in which light, for training, familiar and held-out views
#   add_toy_images        draw_views: rays to the nearest part, Lambert's light; kept in a cache
#   epoch_samples         an epoch of them, in a new order, cropped and jittered; to_batch: some of them
#   forward               layers_forward: the backbone; then class capsules: vector_forward, of vectors by dynamic routing,
#                         or matrix_forward, of matrices, by em_routing_forward: m_step_forward, e_step_forward, ...
#   classification_loss           how far from the truth
#   vector_backward, matrix_backward, cnn_backward      the same way back
#   optimizer_step             Adam: new weights
#   evaluate              right on familiar views, and on held-out ones? run_all: of all networks; report: what is kept


def train(config, snapshot_callback=None, snapshot_every=0, data=None, dtype=np.float32):
    """Train config.model -> (params, history). Nothing depends on the test images it looks at.

    snapshot_callback(step, params, terms) gets copies, at step 0, every snapshot_every steps and at the end; it cannot
    change the run. data: load_data's result, to load only once. dtype: float64 is for tests. history: source of the
    data, epochs (one dict each: training loss and accuracy, accuracy on familiar and held-out views), seconds, steps.
    """
    check_config(config)
    progress = Progress(config.quiet)
    data = data or load_data(config, progress.say)
    if config.model == "nearest":
        return nearest_params(data, dtype), {"source": data["source"], "epochs": [], "seconds": 0.0, "steps": 0}
    n_train = len(data["train"]["labels"])
    with Run(config, data["source"], n_train, progress, snapshot_callback, snapshot_every, dtype) as run:
        announce(run, data)
        for epoch in run.epochs():
            for samples in epoch_samples(data, epoch, config, dtype):
                for rows in run.batches(samples):
                    run.update(len(rows), *run.runner.loss_and_grads(run.params, samples, rows, config))
            found = evaluate_test_sets(run.weights, data, config, run.runner)
            run.close_epoch({name: found[name] for name in EPOCH_METRICS},
                            f"familiar {found['familiar']:.3f}  held-out {found['novel']:.3f}")
    return run.weights, run.history


# ============================================================== the task: objects from some viewpoints, then others

SIDE, N_CLASSES = 32, 5            # of an image as the network eats it, px
CLASS_NAMES = ("cross", "L", "T", "frame", "tripod")
NORB_NAMES = ("animal", "human", "plane", "truck", "car")
N_CHANNELS = {"shapes": 1, "smallnorb": 2, "toys": 2}
MARGINS = 0.2, 0.9                 # of the spread loss, at the start and at the end of training
ELEVATIONS = (30, 40), (45, 70)    # ranges of training and held-out elevations with --split elevation, the paper's


def load_data(config, say=print, without=()):
    """-> {"source", "train", "familiar", "novel"}: dicts of images, labels (N,) int64, azimuths and elevations
    (N,), degrees. See select_images. without: names of those that nobody needs."""
    data = {name: part for name, part in select_images(config).items() if name not in without}
    if config.data == "toys":
        add_toy_images(data, config.toy_seed, say, config.threads)
    return data


def select_images(config):
    """load_data's dict; toys are still without images, which then are drawn.

    familiar: the training viewpoints with new noise (smallNORB: other toys); novel: viewpoints that training never
    shows. With --split instance the toys differ: familiar are those of training, novel others, from the test azimuths.
    """
    angle, by_toys, shapes = viewpoint_angle(config), config.split == "instance", config.data == "shapes"
    train, test = angle_ranges(config)
    if shapes:
        pools = shape_views(config, train, test)
    else:
        tables = load_norb(config.norb_dir) if config.data == "smallnorb" else {k: toy_tables(k) for k in TOY_SPLITS}
        pools = {"train": tables["train"], "familiar": tables["train" if by_toys else "test"],
                 "novel": tables["test"]}
    data = {"source": config.data}
    for (name, pool), wanted in zip(pools.items(), (train, train, test)):
        mask = in_range(pool[angle], wanted)
        if not shapes and (name == "train" or by_toys and name == "familiar"):
            mask = mask & np.isin(pool["instances"], TOY_SPLITS["train"][:config.n_train_toys])
        if not mask.any():
            raise InputError(f"no {name.replace('_', '-')} images: none has {angle} in {wanted}; widen the range")
        if name != "train" and not shapes and config.n_test:
            mask = sample_views(pool, mask, config.n_test)
        data[name] = {key: array[mask] for key, array in pool.items()}
    return data


def viewpoint_angle(config):
    """The angle that accuracies are told by, a key of load_data's dicts"""
    return "elevations" if config.split == "elevation" else "azimuths"


def angle_ranges(config):
    """(low, high) of that angle in training and of the held-out views, degrees. Azimuths that meet anywhere on the
    circle are refused, unless it is the toys that differ."""
    if config.split == "elevation":
        return ELEVATIONS
    train, test = (parse_range(getattr(config, name), flag_name(name)) for name in ("train_azimuths", "test_azimuths"))
    apart = (test[0] - train[0]) % 360 > train[1] - train[0] and (train[0] - test[0]) % 360 > test[1] - test[0]
    if config.split == "azimuth" and not apart:
        raise InputError(f"--train-azimuths {config.train_azimuths} and --test-azimuths {config.test_azimuths} meet; "
                         "choose them apart")
    return train, test


def parse_range(text, flag):
    """"LOW:HIGH" in degrees -> (low, high) floats, low <= high"""
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        raise InputError(f"{flag} {text}: must be LOW:HIGH in degrees, as in 0:150") from None
    if not 0 <= high - low < 360:
        raise InputError(f"{flag} {text}: must be two finite numbers, LOW not above HIGH, less than 360 degrees apart")
    return low, high


def in_range(angles, wanted):
    """Mask of angles (N,) in degrees: in a range (low, high), ends included, around the circle"""
    low, high = wanted
    return (np.asarray(angles) - low + 1e-6) % 360 <= high - low + 2e-6


def sample_views(pool, mask, n):
    """Of the rows in a mask those of whole views, drawn once and for all, in all about n rows -> the new mask"""
    rows = np.flatnonzero(mask)
    keys = np.stack([pool[name][rows] for name in ("labels", "instances", "elevations", "azimuths")])
    _, view = np.unique(keys, axis=1, return_inverse=True)
    n_views = view.max() + 1
    kept = np.random.default_rng(0).permutation(n_views)[:-(-n * n_views // len(rows))]
    new = np.zeros_like(mask)
    new[rows[np.isin(view.ravel(), kept)]] = True
    return new


def epoch_samples(data, epoch, config, dtype=np.float32):
    """The training images of one epoch in a new order, augmented, a chunk of whole batches at a time, with the spread
    loss's margin"""
    train = data["train"]
    rows = rng_for(config.seed, "batches", epoch).permutation(len(train["labels"]))
    size = max(1, CHUNK // config.batch_size) * config.batch_size
    margin = MARGINS[0] + (MARGINS[1] - MARGINS[0]) * epoch / max(1, config.n_epochs - 1)
    for k, start in enumerate(range(0, len(rows), size)):
        rng, part = rng_for(config.seed, "batches", epoch, k), rows[start:start + size]
        images = crop_batch(train["images"], part, rng, dtype) if data["source"] != "shapes" else train["images"][part]
        yield {"images": images, "labels": train["labels"][part], "margin": np.full(len(part), margin, np.float32)}


def preprocess(samples, source, dtype=np.float32):
    """Test images as the network eats them, a chunk at a time: smallNORB's central crops, standardized"""
    for start in range(0, len(samples["labels"]), CHUNK):
        rows = np.arange(start, min(start + CHUNK, len(samples["labels"])))
        images = crop_batch(samples["images"], rows, None, dtype) if source != "shapes" else samples["images"][rows]
        yield {"images": images, "labels": samples["labels"][rows]}


def to_batch(samples, rows, dtype=np.float32):
    """Rows of a dict of prepared samples as what the network eats"""
    return {name: a[rows] if name == "labels" else a[rows].astype(dtype, copy=False) for name, a in samples.items()}


# -------------------------------------------------------------- five shapes

def shape_points():
    """The five shapes as lists of points (n, 3) in [-1, 1]^3: x right, y up, z towards the viewer."""
    segment = np.linspace                                               # so many points from start to end
    cross = np.array([[0, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]], float) * 0.8
    ell = np.concatenate([segment((-0.5, 0.9, 0), (-0.5, -0.7, 0), 7), segment((-0.5, -0.7, 0), (0.8, -0.7, 0), 6)[1:],
                          segment((-0.5, -0.7, 0), (-0.5, -0.7, 0.6), 3)[1:]])
    tee = np.concatenate([segment((-0.8, 0.8, 0), (0.8, 0.8, 0), 7), segment((0, 0.8, 0), (0, -0.9, 0), 7)[1:]])
    corners = np.array(np.meshgrid(*[(-0.65, 0.65)] * 3)).reshape(3, 8).T
    frame = np.concatenate([segment(a, b, 5) for k, a in enumerate(corners) for b in corners[k + 1:]
                            if np.count_nonzero(a != b) == 1])
    tripod = np.concatenate([segment((0, 0, 0), end, 6) for end in ((0.9, 0, 0), (0, 0.9, 0), (0, 0, 0.9))])
    return cross, ell, tee, frame, np.unique(tripod, axis=0)


BLOB = 1.2                         # sigma of a blob, px
RADIUS = 9.5                       # length of a unit, px
NOISE = 0.04                       # sigma of the pixel noise


def render(labels, azimuths, elevations, rng):
    """Images of the shapes (N,) int at azimuths, elevations (N,) in degrees -> (N, 32, 32, 1) float32 in [0, 1].

    Orthographic projection; a point is a Gaussian blob, brighter the nearer (0.5 to 1); blobs add up and are clipped
    at 1; normal pixel noise. A blob is a product of its row and its column profile, so an image is ONE product (32, n)
    @ (n, 32).
    """
    images, R = np.empty((len(labels), SIDE, SIDE, 1), np.float32), np.stack([*map(view_rotation, azimuths, elevations)])
    pixels = np.arange(SIDE) - (SIDE - 1) / 2
    for label, points in enumerate(shape_points()):
        rows = np.flatnonzero(labels == label)
        x, y, z = np.moveaxis(points @ R[rows].transpose(0, 2, 1), -1, 0)                      # (n, points) each
        profile = [np.exp(-0.5 * ((pixels - RADIUS * at[..., None]) / BLOB) ** 2) for at in (x, -y)]
        bright = (0.75 + 0.25 * np.clip(z, -1, 1))[..., None]
        images[rows, :, :, 0] = profile[1].transpose(0, 2, 1) @ (profile[0] * bright)
    np.minimum(images, 1, out=images)
    images += np.float32(NOISE) * rng.standard_normal(images.shape, np.float32)
    return np.clip(images, 0, 1, out=images)


def make_views(azimuths, elevations, n_per_view, rng):
    """Every shape at every azimuth and elevation (degrees), n_per_view noisy images of each -> dict of arrays, one row
    an image"""
    values = np.arange(N_CLASSES), azimuths, elevations, np.arange(n_per_view)
    labels, a, e, _ = (grid.ravel() for grid in np.meshgrid(*values, indexing="ij"))
    return {"images": render(labels, a, e, rng), "labels": labels, "azimuths": a % 360, "elevations": e}


def shape_views(config, train, test):
    """make_views' dicts: six azimuths by three elevations of a split's ranges, five training images of each, two others
    of each to test with"""
    if config.split == "azimuth":
        elevations = np.linspace(30, 70, 3)
        seen, unseen = (np.linspace(*train, 6), elevations), (np.linspace(*test, 6), elevations)
    else:
        azimuths = np.linspace(*parse_range(config.train_azimuths, "--train-azimuths"), 6)
        seen, unseen = (azimuths, np.linspace(*train, 3)), (azimuths, np.linspace(*test, 3))
    return {"train": make_views(*seen, 5, rng_for(config.seed, "data")),
            "familiar": make_views(*seen, 2, rng_for(config.seed, "evaluation", 0)),
            "novel": make_views(*unseen, 2, rng_for(config.seed, "evaluation", 1))}


# -------------------------------------------------------------- the real smallNORB

NORB_FILES = {(split, kind): f"smallnorb-5x{toys}x9x18x6x2x96x96-{split}ing-{kind}.mat"
              for split, toys in (("train", "46789"), ("test", "01235")) for kind in ("dat", "cat", "info")}
NORB_FORMAT = {                    # magic number, dtype, shape of a row
    "dat": (0x1E3D4C55, "u1", (2, 96, 96)), "cat": (0x1E3D4C54, "<i4", ()), "info": (0x1E3D4C54, "<i4", (4,))}
NORB_SIDE = 48                     # side of an image as it is kept
NORB_ROWS = 24300                # rows of the real files: 5 classes x 5 toys x 9 elevations x 18 azimuths x 6 lightings
NORB_CODES = (                     # name, codes, scale, offset of the value
    ("labels", range(5), 1, 0), ("instances", range(10), 1, 0), ("elevations", range(9), 5, 30),
    ("azimuths", range(0, 36, 2), 10, 0), ("lightings", range(6), 1, 0))
MAX_BRIGHTNESS, CONTRASTS = 32, (0.5, 1.5)                         # jitter in training: gray levels of 0-255; factors


def downsample(images):
    """Means of 2x2 pixels, rounded half up to uint8; the cameras become channels. (N, 2, H, W) uint8 ->
    (N, H/2, W/2, 2) uint8"""
    rows = images[:, :, ::2].astype(np.uint16) + images[:, :, 1::2]                            # (N, 2, H/2, W)
    return ((rows[..., ::2] + rows[..., 1::2] + np.uint16(2)) >> 2).astype(np.uint8).transpose(0, 2, 3, 1)


def read_norb_file(path, kind):
    """One smallNORB file, raw or gzipped -> dat: uint8 (N, 48, 48, 2), cat: int32 (N,), info: int32 (N, 4). N is the
    header's.

    Read as a stream, 32 images at a time, halved from 96x96 on the way: rounding the means to uint8 costs at most half
    a gray level and keeps a split at 112 MB, where the file is 448 MB and float32 would be too. Raises InputError
    naming the file and the fault: missing, unreadable, corrupt or truncated gzip, another header, too few or too many
    bytes.
    """
    magic, dtype, shape = NORB_FORMAT[kind]
    header_size, row_size = 4 * (2 + max(3, 1 + len(shape))), np.dtype(dtype).itemsize * math.prod(shape)
    mend = "delete it and fetch it again"
    try:
        with (open(path, "rb") as raw,
              contextlib.nullcontext(raw) if raw.peek(2)[:2] != b"\x1f\x8b" else gzip.open(raw) as file):
            header = file.read(header_size)
            found, ndim, N, *rest = np.frombuffer(header.ljust(header_size, b"\0"), "<i4").tolist()
            if (found, ndim, *rest[:len(shape)]) != (magic, 1 + len(shape), *shape) or not 1 <= N <= NORB_ROWS:
                raise InputError(
                    f"{path}: its header says magic number 0x{found & 0xFFFFFFFF:08X}, {ndim} sizes, {[N, *rest]}, "
                    f"a smallNORB {kind} file's 0x{magic:08X}, {1 + len(shape)}, {[NORB_ROWS, *shape]} or less; {mend}")
            out = np.empty(
                (N, NORB_SIDE, NORB_SIDE, 2) if kind == "dat" else (N, *shape), np.uint8 if kind == "dat" else np.int32)
            for start in range(0, N, 32):
                rows = out[start:start + 32]
                part = file.read(len(rows) * row_size)
                if len(part) < len(rows) * row_size:
                    raise InputError(f"{path}: truncated, {start * row_size + len(part)} bytes of {N * row_size} that "
                                     f"the header says; {mend}")
                part = np.frombuffer(part, dtype).reshape(len(rows), *shape)
                rows[...] = downsample(part) if kind == "dat" else part
            if file.read(1):                                                            # here gzip checks its checksum
                raise InputError(f"{path}: bytes left over after the {N * row_size} that the header says; {mend}")
    except FileNotFoundError:
        raise InputError(f"{path}: missing; --norb-dir must be the folder of smallNORB's six files, dat, cat and "
                         "info of training and testing, .mat or .mat.gz") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: corrupt or truncated gzip ({error}); {mend}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check the file and its permissions"
                         ) from None
    return out


def load_norb(norb_dir):
    """-> {"train", "test"}: dicts of images uint8 (N, 48, 48, 2), channels left and right camera; labels, instances,
    elevations, azimuths (degrees), lightings, all int64 (N,). The folder holds the six files, each .mat or .mat.gz
    (if both, .mat is read). Raises InputError naming the file and the fault"""
    folder, data = Path(norb_dir).expanduser(), {"train": {}, "test": {}}
    for split, arrays in data.items():
        paths = {kind: folder / NORB_FILES[split, kind] for kind in NORB_FORMAT}
        paths = {kind: path if path.exists() else path.with_suffix(".mat.gz") for kind, path in paths.items()}
        columns = []
        for kind in "cat", "info":                                                    # the small ones first: fail early
            table = read_norb_file(paths[kind], kind)
            columns += [(paths[kind], column) for column in table.reshape(len(table), -1).T]
        for (path, column), (name, codes, scale, offset) in zip(columns, NORB_CODES, strict=True):
            wrong = np.flatnonzero(~np.isin(column, codes))
            if len(wrong):
                raise InputError(
                    f"{path}: {name[:-1]} {column[wrong[0]]} in row {wrong[0]}, must be {codes[0]} to {codes[-1]}"
                    f"{' and even' if codes.step == 2 else ''}; delete it and fetch it again")
            arrays[name] = column.astype(np.int64) * scale + offset
        arrays["images"] = read_norb_file(paths["dat"], "dat")
        if len({len(array) for array in arrays.values()}) > 1:
            raise InputError(f"{paths['dat']}: has {len(arrays['images'])} images, its cat and info files "
                             f"{len(arrays['labels'])} and {len(arrays['instances'])} rows; fetch all three again")
    return data


def standardize(images, contrast=1.0, brightness=0.0, dtype=np.float32):
    """Zero mean and unit variance per image, over its pixels and both cameras; then x contrast, + brightness in gray
    levels.

    uint8 (N, H, W, C) -> dtype (N, H, W, C). contrast and brightness: numbers or (N,). A constant image becomes 0: a
    standard deviation below one gray level counts as one.
    """
    x = images.astype(dtype).reshape(len(images), math.prod(images.shape[1:]))                 # (N, H*W*C)
    x -= x.mean(1, keepdims=True)
    std = np.maximum(np.sqrt(np.vecdot(x, x) / x.shape[1]), 1)                                 # (N,)
    x *= (contrast / std).astype(dtype)[:, None]
    x += (brightness / std).astype(dtype)[:, None]
    return x.reshape(images.shape)


def crop_batch(images, rows, rng=None, dtype=np.float32):
    """images[rows], uint8 (N, 48, 48, 2) in all, as the network eats them -> dtype (n, 32, 32, 2).

    With rng (training) every image has its own crop, brightness and contrast: 4 draws a row, whatever they hold. In
    the paper's order: standardize the whole image, then jitter, brightness in units of the image's gray and contrast
    about its mean. Jitter BEFORE standardizing would be undone by it, exactly. Without rng (test): the central crop as
    it is.
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
    x = x.reshape(n, NORB_SIDE, 2 * NORB_SIDE)
    windows = sliding_window_view(x, (SIDE, 2 * SIDE), axis=(1, 2))                     # (n, 17, 33, 32, 64)
    return windows[np.arange(n), down, 2 * right].reshape(n, SIDE, SIDE, 2)


# -------------------------------------------------------------- toys: a smallNORB that is drawn here
#
# A toy is a list of parts, (kind, matrix, center): where a unit part's point p stands is center + matrix p, x forward,
# y up, z to the toy's left. Unit parts: |p| <= 1; a cube -1..1; x^2 + y^2 <= 1 or, for the cone, <= ((1 - z) / 2)^2,
# with -1 <= z <= 1.

ELLIPSOID, BOX, CYLINDER, CONE = range(4)
TOYS_VERSION = 1                   # of the pictures; stands in the cache's name
TOYS_CACHE = Path("~/.cache/hinton-toys")
TOY_SPLITS = {"train": (4, 6, 7, 8, 9), "test": (0, 1, 2, 3, 5)}                        # instances, as in smallNORB
TOY_STYLES = {toy: style for five in TOY_SPLITS.values() for style, toy in enumerate(five)}
TOY_ELEVATIONS, TOY_AZIMUTHS = range(30, 75, 5), range(0, 360, 20)
STEREO = 5.0                       # degrees of azimuth between the two cameras
REACH = 0.92                       # of half the frame, from a toy's middle to its farthest point
YAW, STRETCH, OFFSET = 6.0, 1.05, 0.04     # how far a toy may stand turned (degrees), stretched, off (half frames)
LIGHTINGS = (                      # ground, ambient light, lamps: azimuth and height as seen by the cameras, strength
    (0.82, 0.18, ((-60, 40, 0.75),)), (0.79, 0.18, ((60, 40, 0.75),)), (0.76, 0.15, ((0, 75, 0.8),)),
    (0.82, 0.2, ((-60, 30, 0.45), (60, 30, 0.45))), (0.79, 0.22, ((170, 35, 0.5), (0, 30, 0.35))),
    (0.76, 0.2, ((-120, 40, 0.45), (20, 60, 0.5))))


def axis_rotation(axis, degrees):
    """Rotation matrix (3, 3) about an axis, x, y or z"""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    i, j = {"x": (1, 2), "y": (2, 0), "z": (0, 1)}[axis]
    R = np.eye(3)
    R[i, i] = R[j, j] = c
    R[i, j], R[j, i] = -s, s
    return R


def small_matmul(A, B):
    """Product of small matrices, (n, 3) times (3, m), by plain sums: the same bits whatever the processor"""
    return A[:, :1] * B[:1] + A[:, 1:2] * B[1:2] + A[:, 2:3] * B[2:3]


def view_rotation(azimuth, elevation):
    """Degrees: a turn about the vertical axis, then a nod towards the viewer. -> (3, 3)"""
    return small_matmul(axis_rotation("x", elevation), axis_rotation("y", azimuth))


def part(kind, center, size, turned=None):
    """A part of some size (3,) along its own axes, turned by a rotation matrix"""
    scaled = np.diag(np.asarray(size, float) / 2)
    return kind, scaled if turned is None else small_matmul(turned, scaled), np.asarray(center, float)


def pair(kind, center, size, turned=None):
    """A part and its mirror image at the toy's other side"""
    kind, M, center = part(kind, center, size, turned)
    mirror = np.array([1, 1, -1.0])
    return [(kind, M, center), (kind, mirror[:, None] * M, center * mirror)]


def rod(kind, start, end, width, depth=None):
    """A cylinder, or a cone that ends in a point, from start to end"""
    start, end = np.asarray(start, float), np.asarray(end, float)
    along = (end - start) / 2
    length = math.hypot(*along)
    across = np.cross(along / length, [1, 0, 0] if abs(along[0]) < 0.9 * length else [0, 1, 0])
    across /= math.hypot(*across)
    other = np.cross(along / length, across)
    return kind, np.stack([across * width / 2, other * (depth or width) / 2, along], 1), (start + end) / 2


def wings(x, y, span, chord, sweep, dihedral, thickness):
    """Two swept plates, left and right; angles in degrees"""
    back, up = math.tan(math.radians(sweep)) * span / 4, math.tan(math.radians(dihedral)) * span / 4
    M = np.array([[chord / 2, 0, -back], [0, thickness / 2, up], [0, 0, span / 4]])
    center, mirror = np.array([x - back, y + up, span / 4]), np.array([1, 1, -1.0])
    return [(BOX, M, center), (BOX, mirror[:, None] * M, center * mirror)]


# Of the five toys of a class in each split every one has another style: backbone, snout or neither; staff, rucksack,
# shield or nothing; two engines, four, a propeller or none; a truck's load; a car's body.

def toy_animal(rng, style):
    """Four legs, a body, a neck of some length, a head with ears, horns or a backbone, a tail"""
    length, height, leg = rng.uniform(1, 1.6), rng.uniform(0.36, 0.72), rng.uniform(0.2, 0.55)
    width, thick = height * rng.uniform(0.6, 1), rng.uniform(0.09, 0.22)
    y = leg + height / 2
    toy = [part(BOX if rng.random() < 0.15 else ELLIPSOID, (0, y, 0), (length, height, width))]
    if rng.random() < 0.4:
        toy.append(part(ELLIPSOID, (-length / 4, y + 0.08 * height, 0), (0.55 * length, 1.15 * height, 1.1 * width)))
    neck = rng.choice([0.05, 0.15, 0.3, 0.55]) * rng.uniform(0.7, 1.2) + 0.12
    lean = math.radians(rng.uniform(10, 60))
    root = np.array([0.38 * length, y + 0.15 * height, 0])
    top = root + neck * np.array([math.sin(lean), math.cos(lean), 0])
    toy.append(rod(CYLINDER, root, top, rng.uniform(0.14, 0.3)))
    size = rng.uniform(0.24, 0.46)
    long, nod = size * rng.uniform(0.9, 1.7), axis_rotation("z", rng.uniform(-30, 25))
    forward, head = nod[:, 0] * long, top + nod[:, 0] * long / 4
    toy.append(part(ELLIPSOID, head, (long, size, 0.85 * size), nod))
    ears = rng.integers(0, 4)
    if style == 0:
        toy.append(rod(CYLINDER, head + 0.4 * forward, head + 0.55 * forward - [0, 0.5, 0], 0.1))
    elif style == 1:
        toy.append(part(BOX, head + 0.55 * forward, (0.7 * size, 0.4 * size, 0.4 * size), nod))
    if ears == 0:
        toy += pair(CONE, head + [-0.05, 0.6 * size, 0.25 * size], (0.1, 0.1, 0.28), axis_rotation("x", -90))
    elif ears == 1:
        toy += pair(ELLIPSOID, head + [-0.08, 0, 0.55 * size], (0.08, 0.34, 0.28))
    elif ears == 2:
        toy += [rod(CYLINDER, head + [0, 0.3 * size, 0.08 * s], head + [-0.1, 0.3 * size + 0.35, 0.3 * s], 0.06)
                for s in (-1, 1)]
    x, z, stride = length * rng.uniform(0.25, 0.38), width * rng.uniform(0.28, 0.42), rng.uniform(-0.15, 0.15)
    toy += [rod(CYLINDER, (f * x, y - 0.1 * height, s * z), (f * (x + stride * s), 0, s * z), thick)
            for f in (1, -1) for s in (1, -1)]
    tail, up = rng.uniform(0.15, 0.6), math.radians(rng.uniform(-70, 60))
    root = np.array([-0.46 * length, y + 0.1 * height, 0])
    toy.append(rod(CONE if rng.random() < 0.5 else CYLINDER, root,
                   root + tail * np.array([-math.cos(up), math.sin(up), 0]), rng.uniform(0.06, 0.16)))
    if rng.random() < 0.2:
        toy.append(part(ELLIPSOID, (0, y + height / 2, 0), (0.35 * length, 0.6 * height, 0.6 * width)))
    return toy


def toy_human(rng, style):
    """Two legs in some stride, a backbone, a head with or without a hat, two bent arms, something carried or not"""
    leg, hip, thick = rng.uniform(0.5, 0.8), rng.uniform(0.08, 0.17), rng.uniform(0.13, 0.24)
    backbone, shoulders, deep = rng.uniform(0.45, 0.75), rng.uniform(0.32, 0.6), rng.uniform(0.2, 0.34)
    stride, spread = rng.uniform(-0.35, 0.35), rng.uniform(0, 0.18)
    toy = []
    for s in (1, -1):
        foot = np.array([stride * s, 0, s * (hip + spread)])
        toy += [rod(CYLINDER, (0, leg, s * hip), foot, thick),
                part(BOX, foot + [0.05, 0.03, 0], (0.24, 0.09, 0.9 * thick))]
    shape = rng.integers(0, 4)
    if shape == 0:
        toy.append(part(BOX, (0, leg + backbone / 2, 0), (deep, backbone, shoulders)))
    elif shape == 1:
        toy.append(part(ELLIPSOID, (0, leg + backbone / 2, 0), (1.3 * deep, 1.25 * backbone, 1.1 * shoulders)))
    elif shape == 2:
        toy.append(rod(CYLINDER, (0, leg - 0.05, 0), (0, leg + backbone, 0), shoulders, 1.1 * deep))
    else:
        toy.append(rod(CONE, (0, leg - 0.2, 0), (0, leg + 1.5 * backbone, 0), 1.3 * shoulders, 1.8 * deep))
    head, y = rng.uniform(0.24, 0.38), leg + backbone
    y += 0.55 * head
    toy.append(part(ELLIPSOID, (0.02, y, 0), (head, 1.15 * head, 0.9 * head)))
    hat = rng.integers(0, 4)
    if hat == 0:
        toy += [rod(CYLINDER, (0, y + 0.3 * head, 0), (0, y + 0.7 * head, 0), 0.9 * head),
                rod(CYLINDER, (0, y + 0.3 * head, 0), (0, y + 0.36 * head, 0), 1.6 * head)]
    elif hat == 1:
        toy.append(rod(CONE, (0, y + 0.25 * head, 0), (0, y + 1.1 * head, 0), head))
    elif hat == 2:
        toy.append(part(ELLIPSOID, (-0.03, y + 0.15 * head, 0), (1.15 * head, 1.15 * head, 1.1 * head)))
    thick, length = rng.uniform(0.1, 0.17), rng.uniform(0.22, 0.35)
    for s in (1, -1):
        out = math.radians(rng.choice([8, 15, 35, 80, 120]) + rng.uniform(-8, 8))
        ahead, bend = math.radians(rng.uniform(-50, 80)), math.radians(rng.uniform(0, 80))
        upper = np.array([math.cos(out) * math.sin(ahead), -math.cos(out) * math.cos(ahead), s * math.sin(out)])
        lower = upper * math.cos(bend) + np.array([1, 0.3, 0]) * math.sin(bend)
        shoulder = np.array([0, leg + 0.92 * backbone, s * (shoulders / 2 + 0.2 * thick)])
        elbow = shoulder + length * upper
        hand = elbow + length * lower / math.hypot(*lower)
        toy += [rod(CYLINDER, shoulder, elbow, thick), rod(CYLINDER, elbow, hand, 0.9 * thick)]
    if style == 0:
        toy.append(rod(CYLINDER, hand - [0, 0.55, 0], hand + [0, 0.6, 0], 0.05))
    elif style == 1:
        toy.append(part(BOX, (-0.9 * deep, leg + 0.6 * backbone, 0), (0.2, 0.6 * backbone, 0.7 * shoulders)))
    elif style == 2:
        toy.append(part(BOX, hand, (0.06, 0.5, 0.36)))
    return toy


def toy_plane(rng, style):
    """A fuselage, one or two pairs of wings, a tail, engines under the wings or a propeller, wheels or none"""
    length, width, y = rng.uniform(1.3, 1.9), rng.uniform(0.16, 0.36), 0.4
    span, chord, sweep = rng.uniform(1.2, 2.1), rng.uniform(0.22, 0.5), rng.uniform(-5, 45)
    if rng.random() < 0.5:
        toy = [part(ELLIPSOID, (0, y, 0), (length, width, width))]
    else:
        toy = [rod(CYLINDER, (-0.42 * length, y, 0), (0.32 * length, y, 0), width),
               rod(CONE, (0.32 * length, y, 0), (0.55 * length, y, 0), width)]
    x, high, dihedral = rng.uniform(-0.1, 0.25) * length, rng.choice([-0.35, 0, 0.45]) * width, rng.uniform(-4, 10)
    thin = rng.uniform(0.05, 0.09)
    toy += wings(x, y + high, span, chord, sweep, dihedral, thin)
    if rng.random() < 0.25:
        gap = rng.uniform(0.3, 0.45)
        toy += wings(x + 0.05, y + high + gap, 0.95 * span, chord, sweep, dihedral, thin)
        strut = (x - 0.3 * span * math.tan(math.radians(sweep)), y + high + gap / 2, 0.3 * span)
        toy += pair(BOX, strut, (0.05, gap, 0.05))
    tail, fin = -0.42 * length - 0.02, rng.uniform(0.3, 0.6)
    leaning = np.array([[0.13, -0.12, 0], [0, fin / 2, 0], [0, 0, 0.03]])
    toy.append((BOX, leaning, np.array([tail, y + fin / 2 + 0.03, 0])))
    toy += wings(tail, y + (0.85 * fin if rng.random() < 0.3 else 0.05), span * rng.uniform(0.3, 0.5), 0.6 * chord,
                 0.7 * sweep, 0, 0.05)
    size = rng.uniform(0.1, 0.2)
    for at, scale in {0: ((0.22, 1),), 1: ((0.18, 0.8), (0.34, 0.8))}.get(style, ()):
        toy += pair(CYLINDER, (x - at * span * math.tan(math.radians(sweep)), y + high - 0.1, at * span),
                    (scale * size, scale * size, 0.4), axis_rotation("y", 90))
    if style in (2, 3):
        nose = (length / 2, y, 0)
        toy += [part(BOX, nose, (0.04, 0.55, 0.09)), part(ELLIPSOID, nose, (0.12, 0.12, 0.12))]
    if rng.random() < 0.6:
        toy.append(part(ELLIPSOID, (0.18 * length, y + 0.4 * width, 0), (length / 4, 0.6 * width, 0.6 * width)))
    if rng.random() < 0.4:
        toy += [*pair(CYLINDER, (0.05 * length, 0.1, 0.18), (0.16, 0.16, 0.07)),
                part(CYLINDER, (0.35 * length, 0.1, 0), (0.14, 0.14, 0.06))]
    return toy


def toy_truck(rng, style):
    """A cab, with or without a bonnet, a chassis on four or six wheels; on it a box, a tank, sand, logs or a crane"""
    length, width, wheel = rng.uniform(1.3, 1.9), rng.uniform(0.45, 0.7), rng.uniform(0.11, 0.22)
    bed, cab, high = 1.5 * wheel, rng.uniform(0.3, 0.5), rng.uniform(0.5, 0.8)
    front = length / 2 - cab / 2
    toy = [part(BOX, (0, bed, 0), (length, 0.12, 0.8 * width)),
           part(BOX, (front, bed + high / 2, 0), (cab, high, width))]
    if rng.random() < 0.4:
        toy.append(part(BOX, (front + 0.75 * cab, bed + high / 4, 0), (0.6 * cab, high / 2, 0.85 * width)))
    long, tall = length - cab - rng.uniform(0.03, 0.2), rng.uniform(0.45, 0.9)
    x = long / 2 - length / 2
    if style == 0:
        toy.append(part(BOX, (x, bed + tall / 2 + 0.05, 0), (long, tall, width * rng.uniform(0.9, 1.1))))
    elif style == 1:
        toy.append(part(CYLINDER, (x, bed + 0.08 + 0.4 * tall, 0), (width, 0.8 * tall, long), axis_rotation("y", 90)))
    elif style == 2:
        toy += [part(BOX, (x, bed + 0.1, 0), (long, 0.1, width)),
                *pair(BOX, (x, bed + 0.2, 0.48 * width), (long, 0.26, 0.05)),
                part(BOX, (0.02 - length / 2, bed + 0.2, 0), (0.05, 0.26, width)),
                part(ELLIPSOID, (x, bed + 0.2, 0), (0.8 * long, 0.7 * tall, 0.8 * width))]
    elif style == 3:
        toy += [rod(CYLINDER, (-length / 2, bed + up, z), (front - cab / 2 - 0.03, bed + up, z), 0.2)
                for up, z in ((0.16, -0.12), (0.16, 0.12), (0.32, 0))]
    else:
        toy += [part(BOX, (x, bed + 0.12, 0), (long, 0.12, width)),
                part(BOX, (x - 0.3 * long, bed + 0.25, 0), (0.3, 0.3, 0.8 * width)),
                rod(CYLINDER, (x - 0.3 * long, bed + 0.15, 0), (x + 0.55 * long, bed + 0.15 + 0.75 * long, 0), 0.12)]
    axles = (length / 2 - cab / 2, 0.25 - length / 2, 0.25 - length / 2 + 2.3 * wheel)[:rng.integers(2, 4)]
    wide = rng.uniform(0.1, 0.18)
    for axle in axles:
        toy += pair(CYLINDER, (axle, wheel, 0.46 * width), (2 * wheel, 2 * wheel, wide))
    if rng.random() < 0.3:
        pipe = (front - cab / 2, bed + 0.75 * high, 0.45 * width)
        toy += pair(CYLINDER, pipe, (0.07, 0.07, 0.9 * high), axis_rotation("x", 90))
    return toy


def toy_car(rng, style):
    """A low body on four wheels: saloon, beetle, estate, open or racing car, with or without a wing behind"""
    length, width, wheel = rng.uniform(1.2, 1.7), rng.uniform(0.55, 0.8), rng.uniform(0.11, 0.2)
    high = rng.uniform(0.16, 0.28)
    y = 0.9 * wheel + high / 2
    if rng.random() < 0.65:
        toy = [part(BOX, (0, y, 0), (length, high, width))]
    else:
        toy = [part(ELLIPSOID, (0, y, 0), (length, high, width)),
               part(BOX, (0, y - 0.15 * high, 0), (0.8 * length, high / 2, 0.9 * width))]
    long, tall = length * rng.uniform(0.35, 0.65), rng.uniform(0.14, 0.26)
    x, top = length * rng.uniform(-0.15, 0.05), y + high / 2
    if style == 0:
        toy.append(part(BOX, (x, top + tall / 2 - 0.02, 0), (long, tall, 0.85 * width)))
    elif style == 1:
        toy.append(part(ELLIPSOID, (x, top, 0), (1.3 * long, 2 * tall, 0.9 * width)))
    elif style == 2:
        toy.append(part(BOX, (-0.12 * length, top + tall / 2, 0), (0.74 * length, tall, 0.9 * width)))
    elif style == 3:
        toy += [*pair(BOX, (x, top + 0.08, 0.22 * width), (0.1, 0.22, 0.3 * width)),
                part(BOX, (x + 0.25, top + 0.06, 0), (0.04, 0.18, 0.8 * width), axis_rotation("z", 25))]
    else:
        toy += [part(ELLIPSOID, (x, top, 0), (0.7 * long, 1.5 * tall, 0.4 * width)),
                part(ELLIPSOID, (length / 4, y + 0.1 * high, 0), (0.8 * length, 0.9 * high, width / 2))]
    racing = style == 4
    if rng.random() < 0.3 or racing:
        toy += [part(BOX, (-0.46 * length, top + 0.18, 0), (0.16, 0.04, 1.02 * width)),
                *pair(BOX, (-0.46 * length, top + 0.07, 0.35 * width), (0.08, 0.2, 0.05))]
    if rng.random() < 0.2:
        toy.append(part(BOX, (x, top + tall + 0.03, 0), (0.12, 0.1, 0.4 * width)))
    if rng.random() < 0.3:
        toy.append(part(BOX, (0.48 * length, y - 0.2 * high, 0), (0.12, 0.35 * high, 1.03 * width)))
    size, z, wide = wheel * (2.4 if racing else 2), width * (0.58 if racing else 0.46), rng.uniform(0.1, 0.2)
    for axle in (length * rng.uniform(0.28, 0.36), -length * rng.uniform(0.26, 0.36)):
        toy += pair(CYLINDER, (axle, wheel, z), (size, size, wide))
    return toy


TOY_MAKERS = (toy_animal, toy_human, toy_plane, toy_truck, toy_car)                     # in the order of NORB_NAMES


def corners(toy):
    """Corners (8 n, 3) of the boxes around a toy's parts"""
    signs = np.array(np.meshgrid(*[(-1.0, 1.0)] * 3)).reshape(3, 8)
    return np.concatenate([center + small_matmul(M, signs).T for _, M, center in toy])


def make_toy(category, instance, toy_seed):
    """One toy, its size that of the frame, a little turned, stretched and off the middle. -> list of parts"""
    rng = np.random.default_rng(np.random.SeedSequence(toy_seed, spawn_key=(category, instance)))
    toy = TOY_MAKERS[category](rng, TOY_STYLES[instance])
    stand = axis_rotation("y", rng.uniform(-YAW, YAW)) * rng.uniform(1 / STRETCH, STRETCH, 3)
    off = rng.uniform(-OFFSET, OFFSET, 3)
    at = corners(toy)
    middle = (at.min(0) + at.max(0)) / 2
    size = np.sqrt(np.square(small_matmul(at - middle, stand.T)).sum(1).max())
    return [(kind, small_matmul(stand, M) / size, small_matmul(stand, (center - middle)[:, None])[:, 0] / size + off)
            for kind, M, center in toy]


def inverse_3x3(T):
    """Of a matrix (3, 3), by its cofactors"""
    cofactors = np.stack([np.cross(T[1], T[2]), np.cross(T[2], T[0]), np.cross(T[0], T[1])], 1)
    return cofactors / (T[0] * cofactors[:, 0]).sum()


NOWHERE = np.float32(1e9)


def intersect_part(kind, o, d):
    """Where rays o + t d meet a unit part, coming from large t. o: list of three arrays, d (3,), float32 -> t; face, 0
    to 2 for a plane one across that axis, else -1; whether they meet it at all

    A part is the common inside of a curved face, a t^2 + 2 b t + q <= 0, and of pairs of planes: a ray is in each of
    them on an interval, and in the part where all of these overlap.
    """
    near, far, face, inside = NOWHERE, -NOWHERE, np.int8(-1), True
    if kind != BOX:
        round_axes = range(3 if kind == ELLIPSOID else 2)
        a = sum(d[k] * d[k] for k in round_axes)
        b, q = sum(d[k] * o[k] for k in round_axes), sum(o[k] * o[k] for k in round_axes)
        if kind == CONE:
            radius = (1 - o[2]) / 2
            a, b, q = a - d[2] * d[2] / 4, b + radius * d[2] / 2, q - radius * radius
        else:
            q = q - 1
        a = a if abs(a) > 1e-6 else np.float32(1e-6)
        root = b * b - a * q
        inside = root > 0
        root = np.sqrt(np.maximum(root, 0))
        near, far = (root - b) / a, (-root - b) / a
        if a < 0:                                                # steeper than the cone: in its lower or its upper half
            near, far = (near, -NOWHERE) if d[2] > 0 else (NOWHERE, far)
    for k in {BOX: (0, 1, 2), ELLIPSOID: ()}.get(kind, (2,)):
        along = d[k] if abs(d[k]) > 1e-6 else np.float32(1e-6)
        middle, half = -o[k] / along, abs(1 / along)
        face = np.where(middle + half < near, np.int8(k), face)
        near, far = np.minimum(near, middle + half), np.maximum(far, middle - half)
    return near, face, inside & (near >= far)


def cast_rays(toy, azimuth, elevation, side):
    """Parallel rays, one a pixel, to the nearest point of a toy. -> hit (side, side) bool, the surface's normals there
    (3, side, side) float32, as the camera sees them: x right, y up, z towards it; 0 elsewhere"""
    R = view_rotation(azimuth, elevation)
    places = (((np.arange(side) + 0.5) / side * 2 - 1) / REACH).astype(np.float32)
    depth, normals = np.full((side, side), -NOWHERE), np.zeros((3, side, side), np.float32)
    for kind, M, center in toy:
        T, center = small_matmul(R, M), small_matmul(R, center[:, None])[:, 0]
        reach = np.abs(T).sum(1)
        left, right = np.searchsorted(places, center[0] + (-reach[0], reach[0]))
        top, bottom = np.searchsorted(places, -center[1] + (-reach[1], reach[1]))
        if left == right or top == bottom:
            continue
        window = np.s_[top:bottom, left:right]
        x, y = places[left:right] - np.float32(center[0]), -places[top:bottom, None] - np.float32(center[1])
        to_part = inverse_3x3(T).astype(np.float32)
        o, d = [row[0] * x + row[1] * y for row in to_part], to_part[:, 2]
        t, face, meets = intersect_part(kind, o, d)
        z = t + np.float32(center[2])
        rows, columns = np.nonzero(meets & (z > depth[window]))
        if not len(rows):
            continue
        depth[window][rows, columns] = z[rows, columns]
        t = t[rows, columns]
        at = [o[k][rows, columns] + d[k] * t for k in range(3)]
        if kind != ELLIPSOID:
            flat = np.broadcast_to(face, z.shape)[rows, columns]
            at[2] = {BOX: 0 * t, CYLINDER: 0 * t, CONE: (1 - at[2]) / 4}[kind]          # the curved face's gradient
            at = [np.where(flat < 0, at[k], np.where(flat == k, np.sign(d[k]), 0)) for k in range(3)]
        normal = [to_part[0, k] * at[0] + to_part[1, k] * at[1] + to_part[2, k] * at[2] for k in range(3)]
        length = np.sqrt(normal[0] * normal[0] + normal[1] * normal[1] + normal[2] * normal[2])
        normals[(slice(None), *window)][:, rows, columns] = np.stack(normal) / length
    return depth > -NOWHERE, normals


def shade(hit, normals, elevation):
    """The six lightings of a view: ambient light and Lambert's, on a light ground. Lamps stand still as the cameras
    rise. -> (6, side, side) uint8"""
    images = np.empty((len(LIGHTINGS), *hit.shape), np.uint8)
    for image, (ground, ambient, lamps) in zip(images, LIGHTINGS):
        bright = np.full(hit.shape, np.float32(ambient))
        for azimuth, height, strength in lamps:
            lamp = small_matmul(axis_rotation("x", elevation), small_matmul(axis_rotation("y", azimuth), axis_rotation("x", -height)))[:, 2:] * strength
            lamp = lamp[:, 0].astype(np.float32)
            bright += np.maximum(lamp[0] * normals[0] + lamp[1] * normals[1] + lamp[2] * normals[2], 0)
        image[:] = np.rint(255 * np.minimum(np.where(hit, bright, np.float32(ground)), 1))
    return images


def draw_view(toy, elevation, azimuth, side):
    """The six lightings of a view -> (6, 2, side, side) uint8, left and right camera"""
    return np.stack([shade(*cast_rays(toy, azimuth + camera, elevation, side), elevation)
                     for camera in (-STEREO / 2, STEREO / 2)], 1)


def toy_views(elevations, azimuths):
    """Numbers of the views (elevation, azimuth) in degrees among the 162 of a toy"""
    row = (elevations - TOY_ELEVATIONS.start) // TOY_ELEVATIONS.step
    return len(TOY_AZIMUTHS) * row + (azimuths - TOY_AZIMUTHS.start) // TOY_AZIMUTHS.step


def toy_path(category, instance, toy_seed):
    folder = TOYS_CACHE.expanduser() / f"toys-{toy_seed}-version-{TOYS_VERSION}"
    return folder / f"{NORB_NAMES[category]}-{instance}.npz"


def read_toy(path, say):
    """The views of a toy that its file holds -> {number: images (6, 48, 48, 2)}, {} where there is none. A damaged one
    counts as none, with a word."""
    try:
        if not path.exists():
            return {}
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in ("views", "images")}
            if str(file["digest"]) != digest_of(found):
                raise ValueError
        return dict(zip(found["views"].tolist(), found["images"], strict=True))
    except Exception:                                 # what a damaged zip file makes its reader raise is not documented
        say(f"{path} is damaged, or no toy: drawing this toy anew")
        return {}


def save_toy(path, found):
    """Write a toy's file, with read_toy's dict -> why it could not be written, "" if it could"""
    arrays = {"views": np.array(sorted(found)), "images": np.stack([found[view] for view in sorted(found)])}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: np.savez(file, **arrays, digest=np.array(digest_of(arrays))))
    except (OSError, InputError) as error:
        return str(error)
    return ""


def draw_views(category, instance, toy_seed, views):
    """Views of a toy by their numbers -> (n, 6, 48, 48, 2) uint8, as load_norb gives them"""
    toy, n = make_toy(category, instance, toy_seed), len(TOY_AZIMUTHS)
    return np.stack([downsample(draw_view(toy, TOY_ELEVATIONS[view // n], TOY_AZIMUTHS[view % n], 2 * NORB_SIDE))
                     for view in views])


def add_toy_images(data, toy_seed, say=print, threads=0):
    """Give the tables in data {name: table} their images. Views of a toy that its file in the cache has not are drawn,
    in `threads` processes, 0: one a core, and added to it; a cache that cannot be written is done without, with a
    word."""
    parts = [table for table in data.values() if isinstance(table, dict)]
    keys = [(table["labels"], table["instances"], toy_views(table["elevations"], table["azimuths"])) for table in parts]
    wanted = {}
    for label, instance, view in zip(*map(np.concatenate, zip(*keys))):
        wanted.setdefault((int(label), int(instance)), set()).add(int(view))
    known = {which: read_toy(toy_path(*which, toy_seed), say) for which in wanted}
    missing = [(*which, toy_seed, sorted(views - known[which].keys())) for which, views in wanted.items()
               if views - known[which].keys()]
    fault = ""
    for (category, instance, _, views), images in map_processes(draw_views, missing, say, threads):
        known[category, instance] |= dict(zip(views, images))
        fault = fault or save_toy(toy_path(category, instance, toy_seed), known[category, instance])
    if fault:
        say(f"the toys cannot be kept for the next time ({fault})")
    for table, (labels, instances, views) in zip(parts, keys):
        table["images"] = np.empty((len(labels), NORB_SIDE, NORB_SIDE, 2), np.uint8)
        for k, key in enumerate(zip(labels.tolist(), instances.tolist(), views.tolist(), table["lightings"].tolist())):
            table["images"][k] = known[key[:2]][key[2]][key[3]]


def map_processes(draw, tasks, say, threads):
    """(task, draw(*task)) for all tasks, in order, worked out in so many processes, 0: one a core"""
    workers = min(threads or n_cores(), max(1, len(tasks)))
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for k, (task, drawn) in enumerate(zip(tasks, pool.map(draw, *zip(*tasks)))):
            say(f"\rdrawing toys: {k + 1} of {len(tasks)} ", end="")
            yield task, drawn
    say("\r", end="")


def toy_tables(split):
    """labels, instances, elevations, azimuths, lightings (N,) int64 of a split's rows, as load_norb gives them"""
    names = ("labels", "instances", "elevations", "azimuths", "lightings")
    values = (range(N_CLASSES), TOY_SPLITS[split], TOY_ELEVATIONS, TOY_AZIMUTHS, range(len(LIGHTINGS)))
    return dict(zip(names, (grid.ravel() for grid in np.meshgrid(*map(np.array, values), indexing="ij"))))


# ============================================================== the paper: poses, votes, EM routing, losses, networks
#
# V, R, r, the logits and their gradients are indexed alike, (L, J, I, ...): a parent's place, its type, then the child.

P, D = 4, 16
SIGMA2_EPS = 5e-4                  # a parent with one child would have no variance at all
MASS_EPS = 1e-7                    # a parent that no child belongs to


@dataclass(frozen=True)
class Window:
    """Which children the convolutional capsules of N images see: KxK places, at a stride, of (H, W) places with B
    types"""
    N: int
    H: int
    W: int
    B: int
    stride: int
    K: int = 3

    @property
    def parents(self):
        """Rows and columns of parents"""
        return (self.H - self.K) // self.stride + 1, (self.W - self.K) // self.stride + 1

    def at(self, x, ky, kx, axis):
        """What of x lies under entry (ky, kx) of all windows; rows and columns of x are axis and the one after it"""
        Ho, Wo = self.parents
        rows, columns = slice(ky, ky + self.stride * Ho, self.stride), slice(kx, kx + self.stride * Wo, self.stride)
        return x[(*[slice(None)] * axis, rows, columns)]


def im2col_capsules(x, window):
    """The children of every place. x (N, H, W, B, E) -> (K*K*B, N*Ho*Wo, E), children first"""
    K, stride = window.K, window.stride
    view = sliding_window_view(x, (K, K), axis=(1, 2))[:, ::stride, ::stride]           # (N, Ho, Wo, B, E, K, K)
    return np.ascontiguousarray(view.transpose(5, 6, 3, 0, 1, 2, 4)).reshape(K * K * window.B, -1, x.shape[-1])


def col2im_capsules(dcols, window):
    """Adjoint of im2col_capsules: add up what every child's copies hold. dcols (K*K*B, N*Ho*Wo, E) -> dx
    (N, H, W, B, E)"""
    w, K, E = window, window.K, dcols.shape[-1]
    dx = np.zeros((w.B, w.N, w.H, w.W, E), dcols.dtype)
    dcols = dcols.reshape(K, K, w.B, w.N, *w.parents, E)
    for ky in range(K):
        for kx in range(K):
            part = w.at(dx, ky, kx, axis=2)
            part += dcols[ky, kx]
    return dx.transpose(1, 2, 3, 0, 4)


def pose_blocks(W):
    """W (G, J, P, P) as (G, D, J*D): each W_ij once for every row of a pose, so that V_i = M_i W_i is ONE product for
    all rows and j"""
    G, J = W.shape[:2]
    blocks = np.zeros((G, P, P, J, P, P), W.dtype)                                      # (G, row, q, J, row, column)
    for row in range(P):
        blocks[:, row, :, :, row] = W.transpose(0, 2, 1, 3)
    return blocks.reshape(G, D, J * D)


def pose_votes_forward(M, W, empty=np.empty):
    """V_ij = M_i W_ij. M (G, L, D), W (G, J, P, P) -> V (G, L, J, D); poses are stored as rows of D = P*P numbers.

    As products (L, D) @ (D, J*D) with block-diagonal matrices: four times the arithmetic of the 4x4 products, but
    BLAS's.
    """
    (G, L, _), J = M.shape, W.shape[1]
    blocks, V = pose_blocks(W), empty((G, L, J, D), M.dtype)
    np.matmul(M, blocks, out=V.reshape(G, L, J * D))
    return V, (M, blocks, empty)


def pose_votes_backward(dV, cache):
    """dV (G, L, J, D) -> dM (G, L, D), dW (G, J, P, P)"""
    M, blocks, empty = cache
    G, L, J, _ = dV.shape
    dV = dV.reshape(G, L, J * D)
    dM = np.matmul(dV, blocks.transpose(0, 2, 1))
    dblocks = np.matmul(M.transpose(0, 2, 1), dV, out=empty(blocks.shape, M.dtype)).reshape(G, P, P, J, P, P)
    dW = sum(dblocks[:, row, :, :, row] for row in range(P)).transpose(0, 2, 1, 3)      # (G, J, q, column)
    return dM, dW


def combine_over_positions(x, window, combine):
    """Combine (np.add or np.maximum) what every child holds at all the places that see it, and hand it back to each of
    them.

    x (L, I) -> (L, I). window: a Window; None where every child has one place only.
    """
    if window is None:
        return x
    w, K = window, window.K
    x = x.reshape(w.N, *w.parents, K, K, w.B)
    children = np.full((w.N, w.H, w.W, w.B), 0 if combine is np.add else -np.inf, x.dtype)
    at = [(ky, kx, w.at(children, ky, kx, axis=1)) for ky in range(K) for kx in range(K)]
    for ky, kx, part in at:
        combine(part, x[:, :, :, ky, kx], out=part)
    out = np.empty_like(x)
    for ky, kx, part in at:
        out[:, :, :, ky, kx] = part
    return out.reshape(-1, K * K * w.B)


def responsibilities_forward(logits, window):
    """R_ij = exp(l_ij) / sum over all parents of i, of every type AND at every place. logits (L, J, I) -> R
    (L, J, I)"""
    R = logits - combine_over_positions(logits.max(1), window, np.maximum)[:, None]
    np.exp(R, out=R)
    R /= combine_over_positions(R.sum(1), window, np.add)[:, None]
    return R, (R, window)


def responsibilities_backward(dR, cache):
    R, window = cache
    dlogits = R * dR
    dlogits -= R * combine_over_positions(dlogits.sum(1), window, np.add)[:, None]
    return dlogits


def group_by_parent(V, n):
    """V (L, J, I, D) as n matrices of I rows, a view: one for each of the n = L*J parents, or n = L with all types in
    a row"""
    L, J, I, _ = V.shape
    return V.reshape(n, I, -1) if n == L * J else V.transpose(0, 2, 1, 3).reshape(L, I, -1)


def empty_like_votes(V, empty):
    """An array like V (L, J, I, D), in memory ordered (I, L, J, D), as the votes are"""
    L, J, I, _ = V.shape
    return empty((I, L, J, D), V.dtype).transpose(1, 2, 0, 3)


def m_step_forward(V, V2, r, beta_u, beta_a, lambda_, ratio):
    """Procedure 1, M-step. Votes V and their squares V2 (L, J, I, D), r_ij = R_ij a_i (L, J, I), or (L, 1, I) if the
    same for all types j: that is one matrix-vector product a place instead of J. beta_u, beta_a (J,).

    mu_j = sum_i r_ij V_ij / sum_i r_ij; sigma2_j likewise, of (V_ij - mu_j)^2 = V_ij^2 - mu_j^2 on average; both per
    dimension; cost_j = sum_h (beta_u + log sigma_jh) x mass; a_j = logistic(x_j), x_j = beta_a - lambda cost_j. The
    paper has lambda (beta_a - cost_j), which is the same with beta_a in other units: in these a step of Adam's moves it
    far enough. In the paper the mass is sum_i r_ij; here it is ratio times that, with ratio = parents / children
    (Gritzman 2019), so that a parent's cost does not grow with the layer. -> (mu, sigma2 (L, J, D), x (L, J)), cache
    """
    L, J, I, _ = V.shape
    n = r.shape[0] * r.shape[1]
    rows = r.reshape(n, 1, I)
    total = r.sum(-1, keepdims=True) + MASS_EPS                                         # (L, J or 1, 1)
    mu = np.matmul(rows, group_by_parent(V, n)).reshape(L, J, D) / total
    square = np.matmul(rows, group_by_parent(V2, n)).reshape(L, J, D) / total
    variance = square - mu * mu
    sigma2 = np.maximum(variance, 0) + SIGMA2_EPS
    unit_cost = D * beta_u + 0.5 * np.log(sigma2).sum(-1)                               # (L, J)
    mass = ratio * total[..., 0]
    x = beta_a - lambda_ * (unit_cost * mass)
    cache = SimpleNamespace(V=V, V2=V2, r=r, total=total, mu=mu, square=square, variance=variance, sigma2=sigma2,
                            unit_cost=unit_cost, mass=mass, lambda_=lambda_, ratio=ratio)
    return (mu, sigma2, x), cache


def m_step_backward(dmu, dsigma2, dx, cache):
    """-> dr, as r; dbeta_u, dbeta_a (J,); and dV as a term, (r, dvotes, dsquares): dV_ij = r_ij (dvotes_j + 2 V_ij
    dsquares_j), with the gradients dvotes and dsquares (L, J, D) of sum_i r_ij V_ij and of sum_i r_ij V_ij^2"""
    c, total, mu = cache, cache.total, cache.mu
    L, J, I, _ = c.V.shape
    n = total.size
    dcost = -c.lambda_ * dx                                                             # (L, J)
    dunit_cost = dcost * c.mass
    dsquare = (dsigma2 + 0.5 * dunit_cost[..., None] / c.sigma2) * (c.variance > 0)    # sigma2 = square - mu^2, clamped
    dvotes, dsquares = (dmu - 2 * mu * dsquare) / total, dsquare / total
    dtotal = c.ratio * dcost * c.unit_cost - (dvotes * mu + dsquares * c.square).sum(-1)
    dr = np.matmul(group_by_parent(c.V, n), dvotes.reshape(n, -1, 1))
    dr += np.matmul(group_by_parent(c.V2, n), dsquares.reshape(n, -1, 1))
    dr = dr.reshape(L, -1, I)
    dr += dtotal.reshape(*dr.shape[:2], -1).sum(-1, keepdims=True)
    return dr, D * dunit_cost.sum(0), dx.sum(0), (c.r, dvotes, dsquares)


def e_step_forward(V, V2, mu, sigma2, x):
    """Procedure 1, E-step, in log space: logits_ij = log a_j + log N(V_ij; mu_j, sigma2_j), (L, J, I), without the
    constant 2 pi.

    log N = sum_h (V mu - V^2 / 2 - mu^2 / 2) / sigma2 - log(sigma2) / 2: two matrix-vector products for each parent
    """
    L, J, I, _ = V.shape
    precision = 1 / sigma2
    linear, quadratic = mu * precision, -0.5 * precision                                # (L, J, D)
    offset = -0.5 * (mu * linear + np.log(sigma2)).sum(-1) - np.logaddexp(0, -x)        # (L, J)
    logits = np.matmul(group_by_parent(V, L * J), linear.reshape(-1, D, 1))
    logits += np.matmul(group_by_parent(V2, L * J), quadratic.reshape(-1, D, 1))
    logits = logits.reshape(L, J, I)
    logits += offset[..., None]
    return logits, SimpleNamespace(V=V, V2=V2, mu=mu, precision=precision, x=x, linear=linear, quadratic=quadratic)


def e_step_backward(dlogits, cache):
    """-> dmu, dsigma2 (L, J, D), dx (L, J); and dV as a term: dV_ij = dlogits_ij (linear_j + 2 V_ij quadratic_j),
    (dlogits, linear, quadratic)"""
    c, precision = cache, cache.precision
    L, J, I, _ = c.V.shape
    rows = dlogits.reshape(L * J, 1, I)
    doffset = dlogits.sum(-1)                                                           # (L, J)
    dlinear = np.matmul(rows, group_by_parent(c.V, L * J)).reshape(L, J, D)
    dquadratic = np.matmul(rows, group_by_parent(c.V2, L * J)).reshape(L, J, D)
    along = doffset[..., None] * c.mu                                                   # (L, J, D)
    dmu = (dlinear - along) * precision
    dprecision = dlinear * c.mu - 0.5 * (dquadratic + along * c.mu)
    dsigma2 = -precision * (dprecision * precision + 0.5 * doffset[..., None])
    return dmu, dsigma2, doffset * sigmoid_forward(-c.x)[0], (dlogits, c.linear, c.quadratic)


LAMBDA = 1 / 16                    # inverse temperature of the activations


def em_routing_forward(V, a, beta_u, beta_a, n_iters, lambda_=LAMBDA, window=None, empty=np.empty):
    """Procedure 1, EM routing. V (L, J, I, D), the children's activations a (L, I), beta_u, beta_a (J,) -> mu
    (L, J, D), x (L, J), whose logistic are the activations.

    R_ij starts uniform over the parents of i; then n_iters times: M-step with r_ij = R_ij a_i, and between two of them
    an E-step. window: which children a convolution's parents see; None: every parent sees all. The cache's steps hold
    every iteration's R (L, J, I), at first (L, 1, I), mu, sigma2 (L, J, D) and x (L, J).
    """
    L, J, I, _ = V.shape
    V2 = np.multiply(V, V, out=empty_like_votes(V, empty))
    ratio = J / I if window is None else math.prod(window.parents) * J / (window.H * window.W * window.B)
    R = (1 / (J * combine_over_positions(np.ones((L, I), V.dtype), window, np.add)))[:, None]      # the same for all types
    mu = sigma2 = x = e_cache = R_cache = None
    steps = []
    for t in range(n_iters):
        if t > 0:
            logits, e_cache = e_step_forward(V, V2, mu, sigma2, x)
            R, R_cache = responsibilities_forward(logits, window)
        (mu, sigma2, x), m_cache = m_step_forward(V, V2, R * a[:, None], beta_u, beta_a, lambda_, ratio)
        steps.append(SimpleNamespace(R=R, mu=mu, sigma2=sigma2, x=x, e_cache=e_cache, R_cache=R_cache, m_cache=m_cache))
    return (mu, x), SimpleNamespace(V=V, V2=V2, a=a, steps=steps, empty=empty)


def em_routing_backward(dmu, dx, cache):
    """dmu (L, J, D), dx (L, J) -> dV, da (L, I), dbeta_u, dbeta_a, through all iterations"""
    dsigma2, terms, da = 0, [], 0
    dbeta_u = dbeta_a = 0
    for t, step in reversed(list(enumerate(cache.steps))):
        dr, dbeta_u_of_t, dbeta_a_of_t, term = m_step_backward(dmu, dsigma2, dx, step.m_cache)
        terms.append(term)
        da = da + np.einsum("lji,lji->li", dr, step.R)
        dbeta_u, dbeta_a = dbeta_u + dbeta_u_of_t, dbeta_a + dbeta_a_of_t
        if t == 0:                                                                      # its R is a constant
            break
        dr *= cache.a[:, None]
        dlogits = responsibilities_backward(dr, step.R_cache)
        dmu, dsigma2, dx, term = e_step_backward(dlogits, step.e_cache)
        terms.append(term)
    return votes_gradient(terms, cache.V, cache.V2, cache.empty), da, dbeta_u, dbeta_a


def votes_gradient(terms, V, V2, empty):
    """dV_ij = sum over the terms (coefficient (L, J or 1, I), linear, quadratic (L, J, D)) of coefficient_ij
    (linear_j + 2 V_ij quadratic_j), with two products (I, T) @ (T, D) for every parent. -> (L, J, I, D)"""
    L, J, I, _ = V.shape
    T = len(terms)
    coefficients, directions = empty((L, J, T, I), V.dtype), empty((2, L, J, T, D), V.dtype)
    for t, (coefficient, linear, quadratic) in enumerate(terms):
        coefficients[:, :, t] = coefficient
        directions[0, :, :, t] = linear
        directions[1, :, :, t] = quadratic
    directions[1] *= 2
    coefficients = coefficients.reshape(L * J, T, I).transpose(0, 2, 1)
    directions = directions.reshape(2, L * J, T, D)
    dV, part = reuse_if_arena(V2, empty), empty_like_votes(V, empty)
    np.matmul(coefficients, directions[1], out=group_by_parent(dV, L * J))
    dV *= V
    np.matmul(coefficients, directions[0], out=group_by_parent(part, L * J))
    dV += part
    return dV


def conv_caps_forward(pose, active, W, beta_u, beta_a, n_iters, stride, empty=np.empty):
    """Convolutional capsules, 3x3 at a stride. pose (N, H, W, B, D), active (N, H, W, B), matrices W (9*B, J, P, P)
    -> mu (N, Ho, Wo, J, D), a (N, Ho, Wo, J)."""
    J, window = W.shape[1], Window(*pose.shape[:4], stride)
    children = im2col_capsules(active[..., None], window)[..., 0].T.copy()              # (N*Ho*Wo, 9*B)
    V, votes_cache = pose_votes_forward(im2col_capsules(pose, window), W, empty)        # (9*B, N*Ho*Wo, J, D)
    (mu, x), em_cache = em_routing_forward(V.transpose(1, 2, 0, 3), children, beta_u, beta_a, n_iters, window=window,
                                           empty=empty)
    a, a_cache = sigmoid_forward(x)
    shape = len(pose), *window.parents, J
    return (mu.reshape(*shape, D), a.reshape(shape)), SimpleNamespace(window=window, votes=votes_cache, em=em_cache,
                                                                     a=a_cache)


def conv_caps_backward(dmu, da, cache):
    """-> dpose, dactive, dW, dbeta_u, dbeta_a"""
    dx = sigmoid_backward(da.reshape(-1, da.shape[-1]), cache.a)
    dV, dchildren, dbeta_u, dbeta_a = em_routing_backward(dmu.reshape(*dx.shape, D), dx, cache.em)
    dM, dW = pose_votes_backward(dV.transpose(2, 0, 1, 3), cache.votes)
    dpose, dactive = (col2im_capsules(dcols, cache.window) for dcols in (dM, dchildren.T[..., None]))
    return dpose, dactive[..., 0], dW, dbeta_u, dbeta_a


# SHARED dynamic routing: squash, votes, routing by agreement, lengths, margin loss -----------------------------------
# u_hat, b, c and their gradients are indexed alike, (N, J, I, ...): j first, then the i that it hears.

SQUASH_EPS = 1e-9                  # inside the square root of a norm: the gradient at a zero vector is 0, not 0/0


def squash_forward(s):
    """Eq. 1: v = |s|^2 / (1 + |s|^2) * s / |s| along the last axis: the direction stays, the length gets below 1."""
    norm = np.sqrt(np.einsum("...d,...d->...", s, s)[..., None] + SQUASH_EPS)           # (..., 1)
    gain = norm / (1 + norm * norm)
    return s * gain, (s, norm, gain)


def squash_backward(dv, cache):
    """With q = |s| and v = s q / (1 + q^2): ds = dv q/(1+q^2) + s (s . dv) (1 - q^2) / (q (1 + q^2)^2)"""
    s, norm, gain = cache
    along = np.einsum("...d,...d->...", s, dv)[..., None]                               # (..., 1)
    along *= (1 - norm * norm) / (norm * (1 + norm * norm) ** 2)
    ds = dv * gain
    ds += s * along
    return ds


def votes_forward(u, W, empty=np.empty):
    """Eq. 2: u_hat_j|i = W_ij u_i. u (N, I, E), W (I, E, J, D) -> u_hat (N, J, I, D), a view of memory (N, I, J, D)

    W_ij stands transposed, as (E, D), so that each i is one row-major GEMM (N, E) @ (E, J*D): OpenBLAS's AVX-512
    kernels multiply such small matrices 1.8 times as fast as with a transposed operand.
    """
    (N, I, E), (_, _, J, D) = u.shape, W.shape
    u_hat = empty((N, I, J * D), u.dtype)
    np.matmul(u.transpose(1, 0, 2), W.reshape(I, E, J * D), out=u_hat.transpose(1, 0, 2))
    return u_hat.reshape(N, I, J, D).transpose(0, 2, 1, 3), (u, W, empty)


def votes_backward(du_hat, cache):
    """du_hat (N, J, I, D) -> du (N, I, E), dW (I, E, J, D)"""
    u, W, empty = cache
    (N, I, E), (_, _, J, D) = u.shape, W.shape
    by_i = du_hat.transpose(0, 2, 1, 3).reshape(N, I, J * D).transpose(1, 0, 2)         # (I, N, J*D)
    du, dW = empty(u.shape, u.dtype), empty(W.shape, W.dtype)
    np.matmul(by_i, W.reshape(I, E, J * D).transpose(0, 2, 1), out=du.transpose(1, 0, 2))
    np.matmul(u.transpose(1, 2, 0), by_i, out=dW.reshape(I, E, J * D))
    return du, dW


def softmax_forward(b):
    """Eq. 3: c_ij = exp(b_ij) / sum_k exp(b_ik), over the output capsules, axis 1. b (N, J, I) -> c (N, J, I)"""
    c = b - b.max(1, keepdims=True)
    np.exp(c, out=c)
    c /= c.sum(1, keepdims=True)
    return c, (c,)


def softmax_backward(dc, cache):
    c, = cache
    db = dc - np.einsum("nji,nji->ni", c, dc)[:, None]
    db *= c
    return db


SQUASH, SOFTMAX = (squash_forward, squash_backward), (softmax_forward, softmax_backward)


def routing_forward(u_hat, n_iters, empty=np.empty, normalizer=SOFTMAX, ending=SQUASH):
    """Procedure 1, dynamic routing. u_hat (N, J, I, D) -> v (N, J, D)

    For r = 1..n_iters: c = softmax_j(b), s_j = sum_i c_ij u_hat_j|i, v = squash(s), and b_ij += u_hat_j|i . v_j, with
    b = 0 at first, per sample; the update after the last squash would not be read. normalizer and ending, each a
    forward and its backward, may stand in the softmax's and the squash's place. The cache's steps hold each iteration's
    c (N, J, I), the first being the same for all, as (1, I), and v. All sums are BLAS calls: a matrix-vector product
    for every (n, j) reads u_hat once, where a GEMM against a block-diagonal matrix would do J times the arithmetic.
    """
    N, J, I, D = u_hat.shape
    steps = []
    b = v = None
    for r in range(n_iters):
        if r == 0:
            c, c_cache = normalizer[0](np.zeros((1, J, I), u_hat.dtype))[0][:, 0], None                 # (1, I)
            s = np.matmul(c, u_hat.transpose(0, 2, 1, 3).reshape(N, I, J * D)).reshape(N, J, D)
        else:
            agreement = np.matmul(u_hat, v[..., None], out=empty((N, J, I, 1), u_hat.dtype))[..., 0]        # (N, J, I)
            b = agreement if b is None else np.add(b, agreement, out=empty((N, J, I), u_hat.dtype))
            c, c_cache = normalizer[0](b)
            s = np.matmul(c[:, :, None, :], u_hat)[:, :, 0]                             # (N, J, D)
        v, v_cache = ending[0](s)
        steps.append(SimpleNamespace(c=c, v=v, c_cache=c_cache, v_cache=v_cache))
    return v, SimpleNamespace(u_hat=u_hat, steps=steps, empty=empty, normalizer=normalizer, ending=ending)


def routing_backward(dv, cache):
    """dv (N, J, D) -> du_hat (N, J, I, D), through every iteration

    Each place where u_hat_ij is used adds a coefficient times a direction, a D-vector, to its gradient: c ds from a
    weighted sum, db v from an agreement. These terms are gathered over all iterations, and du_hat is ONE batched
    product (I, T) @ (T, D) for every (n, j).
    """
    u_hat, steps, empty = cache.u_hat, cache.steps, cache.empty
    N, J, I, D = u_hat.shape
    terms, db = [], 0
    for r in reversed(range(len(steps))):
        ds = cache.ending[1](dv, steps[r].v_cache)
        terms.append((steps[r].c, ds))
        if r == 0:                                                                      # its c is a constant
            break
        dc = np.matmul(u_hat, ds[..., None], out=empty((N, J, I, 1), dv.dtype))[..., 0]                     # (N, J, I)
        db = db + cache.normalizer[1](dc, steps[r].c_cache)                      # b_r = b_(r-1) + u_hat . v_(r-1)
        terms.append((db, steps[r - 1].v))
        dv = np.matmul(db[:, :, None], u_hat)[:, :, 0]
    coefficients = empty((N, J, len(terms), I), dv.dtype)
    directions = empty((N, J, len(terms), D), dv.dtype)
    for t, (coefficient, direction) in enumerate(terms):
        coefficients[:, :, t] = coefficient
        directions[:, :, t] = direction
    return np.matmul(coefficients.transpose(0, 1, 3, 2), directions, out=reuse_if_arena(u_hat, empty))


def lengths_forward(v):
    """|v_j|, the probability that digit j is there. v (N, J, D) -> (N, J)"""
    lengths = np.sqrt(np.einsum("njd,njd->nj", v, v) + SQUASH_EPS)
    return lengths, (v, lengths)


def lengths_backward(dlengths, cache):
    v, lengths = cache
    return v * (dlengths / lengths)[..., None]


M_PLUS, M_MINUS = 0.9, 0.1
DOWN_WEIGHT = 0.5


def margin_loss(lengths, present):
    """Eq. 4, summed over capsules, mean over the batch. lengths, present (N, J), present 1 for digits there, else 0.

    L_k = T_k max(0, 0.9 - |v_k|)^2 + 0.5 (1 - T_k) max(0, |v_k| - 0.1)^2. -> loss (float), dlengths (N, J)
    """
    short, long = np.maximum(M_PLUS - lengths, 0), np.maximum(lengths - M_MINUS, 0)
    N = len(lengths)
    loss = float((present * short ** 2 + DOWN_WEIGHT * (1 - present) * long ** 2).sum()) / N
    return loss, (2 * DOWN_WEIGHT * (1 - present) * long - 2 * present * short) / N


# END SHARED dynamic routing ------------------------------------------------------------------------------------------


# SHARED cross entropy: the loss of a softmax -------------------------------------------------------------------------

def cross_entropy(scores, labels):
    """-log softmax(scores)[label], mean over the batch. scores (N, J), labels (N,) -> loss (float), dscores (N, J)"""
    n = np.arange(len(labels))
    log_p = scores - scores.max(1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    dscores = np.exp(log_p)
    dscores[n, labels] -= 1
    dscores /= len(labels)
    return -float(log_p[n, labels].sum()) / len(labels), dscores


# END SHARED cross entropy --------------------------------------------------------------------------------------------


def spread_loss(a, labels, margin):
    """Eq. 3: sum over i != t of max(0, m - (a_t - a_i))^2, mean over the batch. a (N, J), labels (N,), margin m, a
    float or (N,) -> loss (float), da (N, J). The paper raises m from 0.2 to 0.9; at equal activations the loss is
    (J-1) m^2.
    """
    n = np.arange(len(labels))
    short = np.maximum(np.reshape(margin, (-1, 1)) - (a[n, labels][:, None] - a), 0).astype(a.dtype, copy=False)
    short[n, labels] = 0
    da = short * (2 / len(labels))
    da[n, labels] = -da.sum(1)
    return float(np.vdot(short, short)) / len(labels), da


def log_sigmoid_forward(x):
    """log a of a = 1 / (1 + exp(-x))"""
    return -np.logaddexp(0, -x), (x,)


def log_sigmoid_backward(dy, cache):
    x, = cache
    return dy * sigmoid_forward(-x)[0]


def classification_loss(scores, batch, config):
    """The loss of forward's scores (N, J): of CNNs and matrix capsules those whose logistic are the activations a, of
    vector capsules the lengths, which are a. batch: labels (N,), margin. -> loss (float), dscores (N, J)"""
    vectors, labels = config.model in VECTOR_MODELS, batch["labels"]
    if config.loss == "cross-entropy":
        if config.model not in CAPSULES:
            return cross_entropy(scores, labels)
        logs, cache = (np.log(scores), (scores,)) if vectors else log_sigmoid_forward(scores)
        loss, dlogs = cross_entropy(logs, labels)
        return loss, dlogs / cache[0] if vectors else log_sigmoid_backward(dlogs, cache)
    a, cache = (scores, None) if vectors else sigmoid_forward(scores)
    if config.loss == "spread":
        loss, da = spread_loss(a, labels, batch["margin"])
    else:
        loss, da = margin_loss(a, np.eye(N_CLASSES, dtype=a.dtype)[labels])
    return loss, da if vectors else sigmoid_backward(da, cache)


# SHARED shared votes: of vector capsules whose matrices are shared over places ---------------------------------------

def add_coordinates_forward(u, centers):
    """Each capsule with its place, scaled by its length, as two more numbers. u (N, I, E), I ordered (place, type),
    centers (places, 2) -> (N, I, E + 2)"""
    lengths, cache = lengths_forward(u)                                                 # (N, I)
    places = np.repeat(centers.astype(u.dtype), u.shape[1] // len(centers), axis=0)     # (I, 2)
    return np.concatenate([u, lengths[..., None] * places], -1), (cache, places)


def add_coordinates_backward(dout, cache):
    lengths_cache, places = cache
    dlengths = np.einsum("nik,ik->ni", dout[..., -2:], places)
    return dout[..., :-2] + lengths_backward(dlengths, lengths_cache)


def shared_votes_forward(u, W, n_positions, empty=np.empty):
    """Votes of I = places x types capsules with a matrix for every type. u (N, I, E), W (B, E, J, D) -> u_hat
    (N, J, I, D), a view"""
    (N, I, E), (B, _, J, D) = u.shape, W.shape
    u_hat, cache = votes_forward(u.reshape(N * n_positions, B, E), W, empty)
    return u_hat.transpose(0, 2, 1, 3).reshape(N, I, J, D).transpose(0, 2, 1, 3), (cache, u.shape)


def shared_votes_backward(du_hat, cache):
    """du_hat (N, J, I, D) -> du (N, I, E), dW (B, E, J, D)"""
    votes_cache, shape = cache
    N, J, I, D = du_hat.shape
    B = len(votes_cache[1])
    by_place = du_hat.transpose(0, 2, 1, 3).reshape(-1, B, J, D).transpose(0, 2, 1, 3)
    du, dW = votes_backward(by_place, votes_cache)
    return du.reshape(shape), dW


# END SHARED shared votes ---------------------------------------------------------------------------------------------


def coordinate_channels_forward(x, along):
    """Each pixel's place as two more channels, x and y. x (N, H, H, C), along: H numbers -> (N, H, H, C + 2)"""
    N, H, *_ = x.shape
    along = np.array(along, x.dtype)
    across, down = np.broadcast_to(along, (N, H, H)), np.broadcast_to(along[:, None], (N, H, H))
    return np.concatenate([x, np.stack([across, down], -1)], -1), ()


def coordinate_channels_backward(dy, cache):
    return dy[..., :-2]


# -------------------------------------------------------------- the networks

MATRIX_MODELS, VECTOR_MODELS = ("matrix-capsnet", "matrix-head"), ("capsnet", "capsnet-shared")
PAPER_CNNS = "cnn", "cnn-bn"
CAPSULES, CNNS = MATRIX_MODELS + VECTOR_MODELS, (*PAPER_CNNS, "cnn-gap")
MODELS = (*CAPSULES, *CNNS, "nearest")
SIZES = {                          # of each preset: caps' A, B, C, D; the heads' first channels, and types
    "small": (32, 4, 8, 8, 16, 5), "wide": (64, 4, 4, 4, 32, 10), "paper": (64, 8, 16, 16, 16, 5)}
CONV_CAPS = (("conv", 2), ("conv2", 1))               # caps' two layers of convolutional capsules, 3x3: name, stride
IDENTITY_NOISE = 0.1               # around the identity, where pose matrices start
BETA_U, BETA_A = -1.0, -2.0        # at first: a capsule without children is off, 0.12; agreement turns it on
VOTES_GAIN = 4.0                   # of the variance of a class's summed votes of vector capsules
VECTOR, CLASS_VECTOR = 8, 16       # dimensions of primary and class capsules that are vectors
CNN_HIDDEN = 32                    # hidden units of cnn


def backbone(config, width=0):
    """The layers of config.model up to its primary capsules, these included; of a CNN all. width: another than its own.
    """
    A, B, _, _, t, _ = SIZES[config.preset]
    full = config.model in PAPER_CNNS and config.preset == "paper" and not config.width      # 4.2 million parameters
    width = width or (32 if full else matched_width(config))

    def conv(name, K, stride, F):
        return ("conv2d", name, K, stride, F), ("norm", name + "_norm"), ("relu",)

    def capsules(K, F):
        """Without the ReLU: vectors get a squash, of matrices the activations a logistic"""
        return conv("primary", K, 1, F)[:2]
    if config.model == "matrix-capsnet":
        return conv("conv1", 5, 2, A) + capsules(1, B * (D + 1))
    if config.model in PAPER_CNNS:
        pad, hidden = ((("pad", 2),), 1024) if full else ((), CNN_HIDDEN)
        layers = (*pad, ("conv2d", "conv1", 5, 1, width), ("relu",), ("max_pool",),
                  *pad, ("conv2d", "conv2", 5, 1, 2 * width), ("relu",), ("max_pool",),
                  ("flatten",), ("linear", "fc1", hidden), ("relu",), ("linear", "fc2", N_CLASSES))
        return layers if config.model == "cnn" else with_norms(layers)
    layers = (*conv("conv1", 3, 1, t), *conv("conv2", 3, 1, t), ("max_pool",),
              *conv("conv3", 3, 1, 2 * t), *conv("conv4", 3, 1, 2 * t), ("max_pool",))
    if config.model == "cnn-gap":
        along = infer_shapes(layers, SIDE, N_CHANNELS[config.data]).along
        places = (("coordinates", tuple(along)),) if config.coordinates else ()
        return (*layers, *places, *conv("conv5", 3, 1, width), ("global_avg_pool",), ("linear", "fc1", N_CLASSES))
    return layers + capsules(3, width * (D + 1 if config.model == "matrix-head" else VECTOR))


def class_capsule_inputs(config, width=0):
    """What the class capsules see: side and types of the grid of their children, and its centers (places, 2), x and y
    in [-1, 1] over the image. caps' convolutional capsules lie as the pixels of convolutions do."""
    layers = backbone(config, width)
    if config.model == "matrix-capsnet":
        types = SIZES[config.preset][2:]
        layers += tuple(("conv2d", name, 3, stride, F) for (name, stride), F in zip(CONV_CAPS, types))
    seen = infer_shapes(layers, SIDE, N_CHANNELS[config.data])
    numbers = {"matrix-capsnet": 1, "matrix-head": D + 1}.get(config.model, VECTOR)                        # of a capsule
    return SimpleNamespace(side=seen.side, types=seen.channels // numbers, centers=receptive_field_centers(seen.along))


def param_shapes(config, width=0):
    """Names and shapes of the weights of config.model, in the order in which they are drawn; width: another than its
    own"""
    shapes, J = infer_shapes(backbone(config, width), SIDE, N_CHANNELS[config.data]).shapes, N_CLASSES
    if config.model not in CAPSULES:
        return shapes
    seen = class_capsule_inputs(config, width)
    if config.model == "matrix-capsnet":
        _, *types = SIZES[config.preset]
        for (name, _), B, F in zip(CONV_CAPS, types, types[1:]):
            shapes |= {name + "_W": (9 * B, F, P, P), name + "_beta_u": (F,), name + "_beta_a": (F,)}
    if config.model in MATRIX_MODELS:
        return shapes | {"class_W": (seen.types, J, P, P), "class_beta_u": (J,), "class_beta_a": (J,)}
    groups = seen.types * (len(seen.centers) if config.model == "capsnet" else 1)
    shapes["W"] = (groups, VECTOR, J, CLASS_VECTOR)
    return shapes | ({} if config.model == "capsnet" or not config.coordinates else {"coordinate_W": (2, J, CLASS_VECTOR)})


@functools.cache
def matched_width(config):
    """--width, or that with which config.model has about as many weights as dynamic-shared; the paper's CNN: as caps"""
    if config.model == "capsnet-shared":
        return SIZES[config.preset][-1]
    if config.width or config.model in ("matrix-capsnet", "nearest"):
        return config.width

    def size(config, width=0):
        return sum(math.prod(shape) for shape in param_shapes(config, width).values())
    rival = "matrix-capsnet" if config.model in PAPER_CNNS else "capsnet-shared"
    target = size(dataclasses.replace(config, model=rival, coordinates=True))
    least = 1 + bisect.bisect_left(range(1, 4096), target, key=lambda width: size(config, width))
    return min((max(1, least - 1), least), key=lambda width: abs(size(config, width) - target))


def init_params(config):
    """-> flat dict of float32 arrays. He-normal where a ReLU follows, 1/fan-in variance elsewhere; pose matrices near
    the identity; biases 0."""
    rng, params, shapes = rng_for(config.seed, "init"), {}, param_shapes(config)
    last = [name for name in shapes if name.endswith("_w")][-1]                         # of a CNN: makes the scores
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape, np.float32)
        if name in ("W", "coordinate_W"):
            seen = class_capsule_inputs(config)
            children = len(seen.centers) * seen.types
            params[name] = noise * np.float32(np.sqrt(VOTES_GAIN / (VECTOR * children)))
        elif name.endswith("_W"):
            params[name] = np.eye(P, dtype=np.float32) + np.float32(IDENTITY_NOISE) * noise
        elif name.endswith("_w"):
            gain = 1 if name in ("primary_w", last) else 2
            params[name] = noise * np.float32(np.sqrt(gain / math.prod(shape[:-1])))
        else:
            start = {"gamma": 1, "u": BETA_U, "a": BETA_A}.get(name.split("_")[-1], 0)
            params[name] = np.full(shape, start, np.float32)
    return params


def forward(params, images, config, empty=np.empty, statistics=None):
    """images (N, 32, 32, C); statistics: a dict in training, see layers_forward. -> out, cache. out: scores (N, J), see
    classification_loss; of capsules also what their forward says."""
    network_forward, _ = NETWORKS[config.model]
    return network_forward(params, images, config, empty, statistics)


def cnn_forward(params, images, config, empty, statistics):
    scores, caches = layers_forward(params, images, backbone(config), empty, statistics)
    return {"scores": scores}, caches


def cnn_backward(dscores, caches, config):
    """dscores (N, J) -> grads"""
    grads = {}
    layers_backward(dscores, caches, backbone(config), grads, need_dx=False)
    return grads


def matrix_forward(params, images, config, empty, statistics):
    """The backbone, or caps' convolution; primary capsules; of caps two layers of convolutional capsules; class capsules.
    out: also primary_pose (N, H, W, B, D), primary_a (N, H, W, B), of caps conv_mu, conv_a, conv2_mu, conv2_a likewise,
    and what class_caps_forward says"""
    p, N, n_iters = params, len(images), config.routing_iters
    x, layer_caches = layers_forward(p, images, backbone(config), empty, statistics)
    (pose, active), primary_cache = primary_caps_forward(x)
    found, conv_caches = {"primary_pose": pose, "primary_a": active}, []
    for name, stride in CONV_CAPS if config.model == "matrix-capsnet" else ():
        (pose, active), cache = conv_caps_forward(
            pose, active, p[name + "_W"], p[name + "_beta_u"], p[name + "_beta_a"], n_iters, stride, empty)
        found |= {name + "_mu": pose, name + "_a": active}
        conv_caches.append((name, cache))
    centers = class_capsule_inputs(config).centers
    B, places = active.shape[-1], len(centers)
    M = pose.reshape(N, places, B, D).transpose(2, 1, 0, 3).reshape(B, places * N, D)           # a group a type
    children = active.reshape(N, places, B).transpose(0, 2, 1).reshape(N, B * places)
    out, class_cache = class_caps_forward(p, M, children, centers if config.coordinates else None, n_iters, empty)
    return out | found, SimpleNamespace(layers=layer_caches, primary=primary_cache, convs=conv_caches,
                                        classes=class_cache, a_shape=active.shape)


def matrix_backward(dscores, cache, config):
    """dscores (N, J) -> grads"""
    grads, (N, _, _, B) = {}, cache.a_shape
    dM, dchildren = class_caps_backward(dscores, cache.classes, grads)
    dpose = dM.reshape(B, -1, N, D).transpose(2, 1, 0, 3).reshape(*cache.a_shape, D)
    dactive = dchildren.reshape(N, B, -1).transpose(0, 2, 1).reshape(cache.a_shape)
    for name, conv_cache in reversed(cache.convs):
        dpose, dactive, grads[name + "_W"], grads[name + "_beta_u"], grads[name + "_beta_a"] = conv_caps_backward(
            dpose, dactive, conv_cache)
    dx = primary_caps_backward(dpose, dactive, cache.primary)
    layers_backward(dx, cache.layers, backbone(config), grads, need_dx=False)
    return grads


def vector_forward(params, images, config, empty, statistics):
    """The backbone; primary capsules, vectors; class capsules by dynamic routing. dynamic has a matrix for every place;
    dynamic-shared shares them over places and adds the place. out: scores, the lengths (N, J), v (N, J, 16), u
    (N, I, 8) and c, the couplings of each iteration, (N, J, I), of the first (1, I), with I ordered (place, type)"""
    p, N, W = params, len(images), params["W"]
    x, layer_caches = layers_forward(p, images, backbone(config), empty, statistics)
    u, squash_cache = squash_forward(x.reshape(N, -1, VECTOR))                          # (N, I, E)
    placed, coordinates_cache = u, None
    if config.model != "capsnet" and config.coordinates:
        placed, coordinates_cache = add_coordinates_forward(u, class_capsule_inputs(config).centers)
        W = np.concatenate([W, np.broadcast_to(p["coordinate_W"], (len(W), *p["coordinate_W"].shape))], 1)
    if config.model == "capsnet":
        u_hat, votes_cache = votes_forward(u, W, empty)                                 # (N, J, I, D)
    else:
        u_hat, votes_cache = shared_votes_forward(placed, W, x.shape[1] * x.shape[2], empty)
    v, routing_cache = routing_forward(u_hat, config.routing_iters, empty)
    lengths, lengths_cache = lengths_forward(v)
    return {"scores": lengths, "v": v, "u": u, "c": [step.c for step in routing_cache.steps]}, SimpleNamespace(
        layers=layer_caches, squash=squash_cache, places=coordinates_cache, votes=votes_cache, routing=routing_cache,
        lengths=lengths_cache, x_shape=x.shape)


def vector_backward(dlengths, cache, config):
    """dlengths (N, J) -> grads"""
    grads, dv = {}, lengths_backward(dlengths, cache.lengths)
    du_hat = routing_backward(dv, cache.routing)
    if config.model == "capsnet":
        du, grads["W"] = votes_backward(du_hat, cache.votes)
    else:
        du, dW = shared_votes_backward(du_hat, cache.votes)
        grads["W"] = dW[:, :VECTOR]
        if cache.places:
            grads["coordinate_W"] = dW[:, VECTOR:].sum(0)
            du = add_coordinates_backward(du, cache.places)
    dx = squash_backward(du, cache.squash).reshape(cache.x_shape)
    layers_backward(dx, cache.layers, backbone(config), grads, need_dx=False)
    return grads


def primary_caps_forward(x):
    """x (N, H, W, B*(D+1)) -> poses (N, H, W, B, D) and their activations' logistic (N, H, W, B)"""
    N, H, W, F = x.shape
    B = F // (D + 1)
    active, active_cache = sigmoid_forward(x[..., B * D:])
    return (x[..., :B * D].reshape(N, H, W, B, D), active), active_cache


def primary_caps_backward(dpose, dactive, active_cache):
    N, H, W, B = dactive.shape
    return np.concatenate([dpose.reshape(N, H, W, B * D), sigmoid_backward(dactive, active_cache)], -1)


def class_caps_forward(params, M, a, centers, n_iters, empty):
    """M (G, places*N, D): the children's poses, in groups that share a matrix; a (N, G*places): their activations;
    centers (places, 2): the coordinates to add to their votes, or None. -> out, cache

    out: mu (N, J, D), a (N, J), scores (N, J), whose logistic a is, and class_steps, for every EM iteration: R
    (N, J, I), at first (N, 1, I), mu and sigma2 (N, J, D), with I ordered (group, place).
    """
    p, N = params, len(a)
    V, votes_cache = pose_votes_forward(M, p["class_W"], empty)                         # (G, places*N, J, D)
    if centers is not None:
        by_place = V.reshape(len(V), len(centers), N, N_CLASSES, P, P)
        by_place[..., :2, P - 1] += centers.astype(V.dtype)[:, None, None]              # x, y: last column's top two
    V = V.reshape(-1, N, N_CLASSES, D).transpose(1, 2, 0, 3)                            # (N, J, I, D)
    (mu, x), em_cache = em_routing_forward(V, a, p["class_beta_u"], p["class_beta_a"], n_iters, empty=empty)
    steps = [SimpleNamespace(R=step.R, mu=step.mu, sigma2=step.sigma2) for step in em_cache.steps]
    cache = SimpleNamespace(votes=votes_cache, em=em_cache, M_shape=M.shape)
    return {"mu": mu, "a": sigmoid_forward(x)[0], "scores": x, "class_steps": steps}, cache


def class_caps_backward(dscores, cache, grads):
    """dscores (N, J) -> dM (G, places*N, D), da (N, G*places); the parameters' gradients go into `grads`"""
    dmu = np.zeros((*dscores.shape, D), dscores.dtype)                                  # the score is the activation's
    dV, da, grads["class_beta_u"], grads["class_beta_a"] = em_routing_backward(dmu, dscores, cache.em)
    dV = dV.transpose(2, 0, 1, 3).reshape(*cache.M_shape[:2], N_CLASSES, D)
    dM, grads["class_W"] = pose_votes_backward(dV, cache.votes)
    return dM, da


def nearest_params(data, dtype=np.float32):
    """What `nearest` knows: the training images as the networks eat them, (n, pixels), and their labels (n,)"""
    parts = list(preprocess(data["train"], data["source"], dtype))
    images = np.concatenate([part["images"].reshape(len(part["images"]), -1) for part in parts])
    return {"images": images.astype(dtype, copy=False), "labels": data["train"]["labels"]}


def nearest_forward(params, images, config, empty, statistics):
    """Scores (N, J): minus the squared Euclidean distance, in pixels, to the nearest training image of each class"""
    x, known = images.reshape(len(images), -1), params["images"]
    distance = np.vecdot(x, x)[:, None] - 2 * (x @ known.T) + np.vecdot(known, known)   # (N, n)
    scores = [-distance[:, params["labels"] == j].min(1, initial=np.inf) for j in range(N_CLASSES)]
    return {"scores": np.stack(scores, 1)}, None


NETWORKS = {**dict.fromkeys(MATRIX_MODELS, (matrix_forward, matrix_backward)),
            **dict.fromkeys(VECTOR_MODELS, (vector_forward, vector_backward)),
            **dict.fromkeys(CNNS, (cnn_forward, cnn_backward)), "nearest": (nearest_forward, None)}


def loss_and_grads(params, batch, config, empty=np.empty, batch_fraction=1.0):
    """One batch (to_batch's dict) -> (terms, grads, statistics): means over the batch, times `batch_fraction`, a
    shard's part of its batch. Pure; with an Arena the grads live until rewind(). terms: loss; hits: images named
    right."""
    statistics = {}
    out, cache = forward(params, batch["images"], config, empty, statistics)
    loss, dscores = classification_loss(out["scores"], batch, config)
    _, network_backward = NETWORKS[config.model]
    grads = network_backward(dscores * batch_fraction, cache, config)
    hits = int((out["scores"].argmax(1) == batch["labels"]).sum())
    return {"loss": loss * batch_fraction, "hits": hits}, {name: grads[name] for name in params}, statistics


def optimizer_step(run, shard_grads, share):
    """One step of Adam with all weights of a Run. share: of the whole learning rate"""
    adam_step(run.params, shard_grads, run.adam_m, run.adam_v, run.step + 1, run.config.lr * share, run.runner)


def forward_rows(params, samples, rows, config, empty):
    """forward of some prepared samples -> scores (n, J) and, of capsules, mu (n, J, D) and a (n, J), or v (n, J, 16)"""
    out, _ = forward(params, to_batch(samples, rows, params_dtype(params))["images"], config, empty)
    return {name: out[name] for name in ("scores", "mu", "a", "v") if name in out}


# ============================================================== evaluation, report

def evaluate(params, samples, config, runner):
    """-> dict: accuracy; loss, a mean, the spread loss's with its last margin; correct (n,) bool; per_class, the accuracy
    of each class, nan where there is no image of it"""
    right, loss = [], 0.0
    for part in preprocess(samples, config.data, params_dtype(params)):
        scores = runner.forward(params, part, config)["scores"]
        right.append(scores.argmax(1) == part["labels"])
        loss += classification_loss(scores, part | {"margin": MARGINS[1]}, config)[0] * len(scores)
    right = np.concatenate(right)
    return {"accuracy": float(right.mean()), "loss": loss / len(right), "correct": right,
            "per_class": accuracy_per_class(samples["labels"], right)}


def accuracy_per_class(labels, right):
    images, hits = (np.bincount(labels, weights, minlength=N_CLASSES) for weights in (None, right))
    return [float(hit / n) if n else math.nan for hit, n in zip(hits, images)]


def evaluate_test_sets(params, data, config, runner):
    """Accuracy on familiar viewpoints, on held-out ones, and the drop from one to the other; accuracies of each class;
    correct, {name: (n,) bool}; and, in `sweep`, the accuracy, also of each class, at each angle, azimuth or elevation, of
    the test images -> dict

    With --split instance the familiar images are those of training; the sweep is then of the held-out toys alone.
    """
    familiar, novel = (evaluate(params, data[name], config, runner) for name in ("familiar", "novel"))
    angles, labels, right = (np.concatenate(parts) for parts in zip(*(
        (data[name][viewpoint_angle(config)], data[name]["labels"], found["correct"])
        for name, found in (("familiar", familiar), ("novel", novel))
        if name == "novel" or config.split != "instance")))
    known = np.unique(angles)
    sweep = {"angles": [int(angle) if angle % 1 == 0 else float(angle) for angle in known],
             "accuracy": [float(right[angles == angle].mean()) for angle in known],
             "per_class": [accuracy_per_class(labels[angles == angle], right[angles == angle]) for angle in known]}
    return {"familiar": familiar["accuracy"], "novel": novel["accuracy"],
            "drop": familiar["accuracy"] - novel["accuracy"], "familiar_loss": familiar["loss"],
            "novel_loss": novel["loss"], "familiar_per_class": familiar["per_class"],
            "novel_per_class": novel["per_class"], "sweep": sweep,
            "correct": {"familiar": familiar["correct"], "novel": novel["correct"]}}


EPOCH_METRICS = ("familiar", "novel", "drop", "familiar_loss", "novel_loss")


def announce(run, data):
    """What a run prints at its start: data, network, settings"""
    config = run.config
    counts = ", ".join(f"{len(data[name]['labels'])} {name}" for name in ("train", "familiar", "novel"))
    run.progress.say(f"{config.model}, {config.preset}: {config.loss} loss, {n_params(run.params):,} parameters; "
                     f"{data['source']}: {counts}; seed {config.seed}, threads {run.runner.threads}"
                     + f"; going on at step {run.step} of {run.n_steps}" * (run.step > 0))


def network_config(given, model):
    """The Config of a network: of the settings given, {name: value}, those that mean something to it"""
    fields, network = {f.name: f for f in options(Config)}, dataclasses.replace(Config(**given), model=model)
    return Config(**{name: value for name, value in given.items() if is_applicable(fields[name], network)}
                  | {"model": model})


def test_result(config, params, history, tests, found=None):
    """The dict that --out-json writes. found: the network that was loaded, if it was not trained here"""
    measured = {key: test for key, test in tests.items() if key != "correct"}
    measured["hit_bits"] = {name: pack_bits(right) for name, right in tests["correct"].items()}
    return make_result(config, params, history, measured) | (
        {"n_params": 0} if config.model == "nearest" else {}) | (                       # it learns none
        {"history": {}, "loaded": found.file} if found else {})                         # its history is in that file


def report(config, params, history, tests, say, found=None):
    """Print evaluate_test_sets's results, and write --out-json"""
    results = test_result(config, params, history, tests, found)
    names = CLASS_NAMES if config.data == "shapes" else NORB_NAMES
    say(f"\n{config.data}, {config.split} split: images named right\n"
        f"  familiar views        {tests['familiar']:.3f}\n  new views             {tests['novel']:.3f}: "
        + ", ".join(f"{name} {accuracy:.3f}" for name, accuracy in zip(names, tests["novel_per_class"])))
    say(f"  training              {results['seconds_train']:.1f} s, {results['ms_per_step']:.1f} ms a step"
        + ", of the network that was loaded" * bool(found))
    if config.out_json:
        write_json(config.out_json, results)


# ============================================================== settings

# SHARED settings: what every experiment's Config has -----------------------------------------------------------------

@dataclass(frozen=True)
class Settings:
    """A setting has one value: what was given, else its default, else, where that is None, what Config.preset_defaults() says, a
    dict. Config adds n_epochs and lr, for which there is no common default."""
    seed: int = option(0, "seed of everything random; same seed, same bits", "training", low=0, high=2 ** 32 - 1)
    batch_size: int = option(32, "samples in a batch", "training", low=1, high=4096)
    warmup: int = option(0, "steps over which the learning rate first rises from 0", "training", low=0, high=100_000)
    lr_schedule: str = option("cosine", "cosine decay to 0, or constant", "training", choices=("cosine", "constant"))
    threads: int = option(0, "worker threads, 0 for one per core; does not change a bit", "run", low=0, high=256,
                          runtime=True)
    checkpoint: str = option("", "write weights and optimizer to this .npz at every epoch's end; go on from it if it "
                             "is there", "run", runtime=True)
    out_json: str = option("", "write settings and results to this file", "run", runtime=True)
    quiet: bool = option(False, "print nothing but errors", "run", runtime=True)

    def __post_init__(self):
        for name, value in self.preset_defaults().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

# END SHARED settings -------------------------------------------------------------------------------------------------

TOYS = {"n_epochs": 6, "train_azimuths": "300:400", "test_azimuths": "60:280"}         # the paper's ranges
DATA = {"toys": TOYS, "smallnorb": TOYS,
        "shapes": {"n_epochs": 40, "train_azimuths": "0:150", "test_azimuths": "200:330"}}
ALL_AZIMUTHS = {"train_azimuths": "0:340", "test_azimuths": "0:340"}                   # of --split instance
HEADS = (*CAPSULES[1:], *CNNS[2:])                 # on one backbone; caps and cnn are the paper's two, each with its own
ROUTED = {"model": CAPSULES}
WITH_WIDTH = {"model": (*PAPER_CNNS, *(name for name in HEADS if name != "capsnet-shared"))}
OF_TOYS, BY_AZIMUTH = {"data": ("toys", "smallnorb")}, {"split": ("azimuth", "instance")}


@dataclass(frozen=True)
class Config(Settings):
    """All settings of a run: the names, defaults and help texts of the command line flags come from here."""
    n_epochs: int = option(None, "epochs to train", "training", low=1, high=100_000)
    lr: float = option(5e-3, "Adam's learning rate at the start, or after the warm-up", "training", above=0)
    loss: str = option(None, "cross-entropy of log a, or of a CNN's scores; the margin loss, or the spread loss, of a, "
                       "which of a CNN is the scores' logistic", "training", choices=("cross-entropy", "margin", "spread"))
    data: str = option("toys", "toys, drawn here with smallNORB's structure; the real smallNORB; or five embedded 3D "
                       "shapes", "data", choices=tuple(DATA))
    toy_seed: int = option(0, "seed of the toys' shapes; the training's does not touch them", "data", low=0,
                           high=2 ** 32 - 1, only={"data": ("toys",)})
    norb_dir: str = option("", "folder with smallNORB's six .mat or .mat.gz files", "data", runtime=True, metavar="DIR",
                           only={"data": ("smallnorb",)})
    split: str = option("azimuth", "what differs between training and held-out images; toys: smallNORB's standard "
                        "task, training images and other toys, all views unless azimuths are given, which may overlap",
                        "data", choices=("azimuth", "elevation", "instance"))
    train_azimuths: str = option(None, "range of training azimuths, degrees, ends included", "data",
                                 metavar="LOW:HIGH", only=BY_AZIMUTH)
    test_azimuths: str = option(None, "range of held-out azimuths; 290:420 wraps", "data", metavar="LOW:HIGH",
                                only=BY_AZIMUTH)
    n_train_toys: int = option(5, "toys of each class to train with, the first ones", "data", low=1, high=5,
                               only=OF_TOYS)
    n_test: int = option(2000, "images of each test set of toys or smallNORB, whole views of all lightings, always the "
                         "same ones; 0: all", "data", low=0, high=NORB_ROWS, only=OF_TOYS)
    model: str = option("capsnet-shared", "network to train: dynamic-shared, dynamic, em, gap: "
                        "heads on one backbone; the paper's two, caps and cnn, or the latter normalized; nearest: "
                        "names by the nearest training image", "network", choices=MODELS)
    preset: str = option("wide", "sizes: small; wide, with a backbone of twice as many channels; or that of the paper's "
                         "small net, and its CNN as it is", "network", choices=tuple(SIZES))
    width: int = option(0, "types of capsules of another head than dynamic-shared, channels of gap and cnn; "
                        "0 for as many parameters as dynamic-shared, or caps, has", "network", low=0,
                        high=4096, only=WITH_WIDTH)
    routing_iters: int = option(None, "iterations of EM or dynamic routing; 1: uniform coupling", "network", low=1,
                                high=50, only=ROUTED)
    coordinates: bool = option(None, "coordinate addition: the position of a receptive field's center is added to the "
                               "votes for the class capsules, or, in cnn-gap, is two more channels before its last "
                               "convolution", "network", only={"model": (*MATRIX_MODELS, "capsnet-shared", "cnn-gap")})

    def preset_defaults(self):
        vectors = self.model in VECTOR_MODELS
        return DATA.get(self.data, TOYS) | (ALL_AZIMUTHS if self.split == "instance" else {}) | {
            "loss": "margin" if vectors else "cross-entropy", "routing_iters": 3 if vectors else 2,
            "coordinates": self.model in (*MATRIX_MODELS, "capsnet-shared")}


WEIGHTS = Path(__file__).with_name("weights") / "smallnorb_capsnet-shared.npz"               # the network that comes along
SOURCE_SETTING = "data"                                                     # the setting that says where data come from
EVAL_SETTINGS = ("seed", "toy_seed", "n_test", "routing_iters")             # what may differ from what a network trained with


def check_config(config):
    """check_options, and what concerns two settings at once"""
    check_options(config)
    angle_ranges(config)
    if config.split == "instance" and config.data == "shapes":
        raise InputError("--split instance: means nothing to --data shapes, which has no toys; leave one of them out")


# ============================================================== twins: machinery that stands alike in other experiments

# SHARED core: the machinery, the same in every experiment ------------------------------------------------------------
#
# It calls these of the experiment: Config, WEIGHTS, SOURCE_SETTING, EVAL_SETTINGS, param_shapes, init_params, to_batch,
# loss_and_grads, forward_rows, optimizer_step.

SHARD_SIZE = 16                    # samples a worker thread takes at once: fixed, so that sums have one order
SWITCH_INTERVAL = 2e-5                      # s a worker back from NumPy waits for Python's lock at most, not 5 ms; buys, on two
                                   # threads of an AMD EPYC: MultiMNIST's default step 0.96, others' 0.98 to 1.01
CHUNK = 2048                       # samples drawn or prepared at once: memory does not grow with the data
PURPOSES = ("data", "init", "batches", "evaluation")


def rng_for(seed, purpose, *key):
    """The generator of one purpose: that of SeedSequence(seed).spawn(...)'s child, with no state kept between calls."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), *key)))


# -------------------------------------------------------------- primitives
# x and y are activations, (N, H, W, C) or (N, C). Each forward gives its output and a cache, each backward takes the
# output's gradient, which it leaves as it is, and that cache, and gives the gradients in the order of the arguments.

class Arena:
    """np.empty for temporaries that come again every step: after rewind(), the k-th call returns the k-th array again.

    Every operation takes `empty=np.empty`, so that without an arena it is pure; with one, whatever it took is
    overwritten after the next rewind(). It buys: no page faults of fresh large arrays (a training step takes 1.1 to 1.2
    times as long with them), and arrays that begin at a cache line, so that no row of 16 floats lies across two (1.2
    times as fast routing on an AMD EPYC, Zen 5; no difference on an Intel Xeon).
    """

    def __init__(self):
        self.arrays, self.taken = [], 0

    def rewind(self):
        """Forget what was taken"""
        self.taken = 0
        return self

    def __call__(self, shape, dtype):
        shape, dtype = tuple(shape), np.dtype(dtype)
        known = self.arrays[self.taken:self.taken + 1]
        if not known or (known[0].shape, known[0].dtype) != (shape, dtype):
            size = math.prod(shape) * dtype.itemsize
            raw = np.empty(size + 64, np.uint8)
            self.arrays[self.taken:] = [raw[-raw.ctypes.data % 64:][:size].view(dtype).reshape(shape)]
        self.taken += 1
        return self.arrays[self.taken - 1]


def reuse_if_arena(array, empty):
    """An array like `array`: with an Arena it is `array` itself, whose content a backward reads for the last time;
    without one it is new, and the cache stays whole. Less memory to touch: a training step takes 1.03 times as long
    without."""
    return array if isinstance(empty, Arena) else np.empty_like(array)


def im2col(x, width, stride, empty=np.empty):
    """Windows along the rows of x (N, H, W, C): cols[p, r, n, ox] = x[n, stride*r + p, stride*ox:stride*ox + width].

    -> cols (stride, ceil(H/stride), N, Wo, width*C). A full im2col copies every pixel K*K times, this one K times; the
    kernel rows are then K GEMMs on bands of rows, which lie together in memory because the row's parity p comes first.
    """
    N, H, W, C = x.shape
    R, Wo = -(-H // stride), (W - width) // stride + 1
    if x.strides[2:] != (C * x.itemsize, x.itemsize):                                   # a window must be one run
        x = x.copy()
    sn, sh, sw, _ = x.strides
    cols = empty((stride, R, N, Wo, width * C), x.dtype)
    for p in range(stride):
        rows = -(-(H - p) // stride)
        shape, strides = (rows, N, Wo, width * C), (stride * sh, sn, stride * sw, x.itemsize)
        np.copyto(cols[p, :rows], as_strided(x[:, p:], shape, strides, writeable=False))
    return cols


def col2im(dcols, shape, width, stride, empty=np.empty):
    """Adjoint of im2col: add every window's entries to the pixels they came from. -> dx, in memory (H, N, W, C)"""
    N, H, W, C = shape
    dx = empty((H, N, W * C), dcols.dtype)
    dx.fill(0)
    for p in range(stride):
        for ox in range(dcols.shape[3]):
            dx[p::stride, :, ox * stride * C:(ox * stride + width) * C] += dcols[p, :-(-(H - p) // stride), :, ox]
    return dx.reshape(H, N, W, C).transpose(1, 0, 2, 3)


def im2col_band(cols, ky, stride, Ho):
    """The rows of im2col's cols that kernel row ky meets, as one matrix (Ho*N*Wo, width*C), without a copy."""
    return cols[ky % stride, ky // stride:ky // stride + Ho].reshape(-1, cols.shape[-1])


@functools.cache
def sgemm():
    """cblas_sgemm of NumPy's OpenBLAS; None where NumPy has another BLAS"""
    with contextlib.suppress(AttributeError):
        function, size, real, address = openblas().scipy_cblas_sgemm64_, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
        function.argtypes = [*[ctypes.c_int] * 3, *[size] * 3, real, address, size, address, size, real, address, size]
        return function
    return None


def add_product(a, b, out, part):
    """out += a @ b, with `part`, shaped as out, for scratch. Where all are runs in memory, b or its transpose, BLAS
    adds as it multiplies: one pass, not three. It buys: a step of affNIST's networks and of smallNORB's heads takes
    1.03 to 1.08 times as long without on an AMD EPYC, of small convolutions 1.05 to 1.13 times on an Intel Xeon."""
    (M, K), F, straight = a.shape, b.shape[1], b.flags.c_contiguous
    runs = a.flags.c_contiguous and out.flags.c_contiguous and (straight or b.flags.f_contiguous)
    if sgemm() is None or not runs or {x.dtype for x in (a, b, out)} != {np.dtype(np.float32)}:
        out += np.matmul(a, b, out=part)
        return
    sgemm()(101, 111, 111 if straight else 112, M, F, K, 1, a.ctypes.data, K, b.ctypes.data, F if straight else K, 1,
            out.ctypes.data, F)                                     # 101, 111, 112: row-major, as it is, transposed


def conv2d_forward(x, w, b, stride, empty=np.empty):
    """Valid convolution. x (N, H, W, C), w (Kh, Kw, C, F), b (F,) or None -> y (N, Ho, Wo, F), in memory (Ho, N, Wo,
    F)."""
    (N, H, W, C), (Kh, Kw, _, F) = x.shape, w.shape
    Ho, Wo = (H - Kh) // stride + 1, (W - Kw) // stride + 1
    cols = im2col(x, Kw, stride, empty)
    rows = w.reshape(Kh, Kw * C, F)
    y, part = empty((Ho * N * Wo, F), x.dtype), empty((Ho * N * Wo, F), x.dtype)
    np.matmul(im2col_band(cols, 0, stride, Ho), rows[0], out=y)
    for ky in range(1, Kh):
        add_product(im2col_band(cols, ky, stride, Ho), rows[ky], y, part)
    if b is not None:
        y += b
    return y.reshape(Ho, N, Wo, F).transpose(1, 0, 2, 3), (x.shape, cols, w, stride, empty)


def conv2d_backward(dy, cache, need_dx=True, need_db=True):
    """dy (N, Ho, Wo, F) -> dx, dw, db; dx and db are None unless needed"""
    (N, H, W, C), cols, w, stride, empty = cache
    (Kh, Kw, _, F), Ho = w.shape, dy.shape[1]
    rows = w.reshape(Kh, Kw * C, F)
    dy = np.ascontiguousarray(dy.transpose(1, 0, 2, 3)).reshape(-1, F)                  # (Ho*N*Wo, F)
    dw, db = empty(w.shape, w.dtype), dy.sum(0) if need_db else None
    for ky in range(Kh):
        np.matmul(im2col_band(cols, ky, stride, Ho).T, dy, out=dw.reshape(rows.shape)[ky])
    if not need_dx:
        return None, dw, db
    dcols, part = reuse_if_arena(cols, empty), empty((len(dy), Kw * C), dy.dtype)
    dcols[:, Ho:] = 0
    dcols[Kh:] = 0
    for ky in range(Kh):
        dband = im2col_band(dcols, ky, stride, Ho)
        if ky < stride:                                                                 # the first of its parity
            np.matmul(dy, rows[ky].T, out=dband)
        else:
            add_product(dy, rows[ky].T, dband, part)
    return col2im(dcols, (N, H, W, C), Kw, stride, empty), dw, db


def linear_forward(x, w, b, empty=np.empty):
    """x (N, C), w (C, F), b (F,) or None -> y (N, F)"""
    y = np.matmul(x, w, out=empty((len(x), w.shape[1]), x.dtype))
    if b is not None:
        y += b
    return y, (x, w, empty)


def linear_backward(dy, cache, need_dx=True, need_db=True):
    """dy (N, F) -> dx, dw, db; dx and db are None unless needed"""
    x, w, empty = cache
    dx = np.matmul(dy, w.T, out=empty(x.shape, x.dtype)) if need_dx else None
    return dx, np.matmul(x.T, dy, out=empty(w.shape, w.dtype)), dy.sum(0) if need_db else None


NORM_EPS = 1e-5                    # inside the square root of a standard deviation


def norm_forward(x, gamma, beta, running=None, empty=np.empty):
    """Batch normalization (Ioffe & Szegedy 2015): y = gamma (x - mean) / sqrt(variance + eps) + beta, channel by
    channel. x (N, H, W, C), in evaluation overwritten; gamma, beta (C,) -> (y, (mean, variance)), each of these (C,)

    running: the (mean, variance) to use, in evaluation. Without it they are those of x, over all its samples and
    places; of its n numbers a channel the variance that is returned, to be folded into the running one, is n / (n - 1)
    times the one that is used. All passes run over rows of W*C numbers: a loop over C alone, often 16, would be too
    short to be fast.
    """
    rows, lift = norm_rows(x), x.shape[2]
    n, C = rows.size // len(gamma), len(gamma)
    if running is not None:
        mean, variance = running
        scale = gamma / np.sqrt(variance + x.dtype.type(NORM_EPS))
        rows *= np.tile(scale, lift)
        rows += np.tile(beta - mean * scale, lift)
        return (norm_like(rows, x), running), None
    mean = np.matmul(np.ones((1, len(rows)), x.dtype), rows).reshape(lift, C).sum(0) / n
    square = np.einsum("rc,rc->c", rows, rows).reshape(lift, C).sum(0) / n
    variance = np.maximum(square - mean * mean, 0)
    scale = 1 / np.sqrt(variance + x.dtype.type(NORM_EPS))
    y = np.multiply(rows, np.tile(gamma * scale, lift), out=empty(rows.shape, x.dtype))
    y += np.tile(beta - mean * gamma * scale, lift)
    return (norm_like(y, x), (mean, variance * (n / max(1, n - 1)))), (rows, gamma, mean, scale, lift, empty)


def norm_backward(dy, cache):
    """dy, as x -> dx, dgamma, dbeta, of the forward without running statistics, whose gradient is not asked for:
    dx = gamma / std (dy - mean(dy) - xhat mean(dy xhat)), with xhat = (x - mean) / std and means as in the forward"""
    x, gamma, mean, scale, lift, empty = cache
    rows, C = norm_rows(dy), len(gamma)
    n = rows.size // C
    dbeta = np.matmul(np.ones((1, len(rows)), dy.dtype), rows).reshape(lift, C).sum(0)
    dgamma = scale * (np.einsum("rc,rc->c", rows, x).reshape(lift, C).sum(0) - mean * dbeta)
    per_dy, per_x = gamma * scale, -gamma * scale * scale * dgamma / n
    dx = np.multiply(x, np.tile(per_x, lift), out=reuse_if_arena(x, empty))
    dx += np.tile(-per_x * mean - per_dy * dbeta / n, lift)
    dx += np.multiply(rows, np.tile(per_dy, lift), out=empty(rows.shape, dy.dtype))
    return norm_like(dx, dy), dgamma, dbeta


def norm_rows(x):
    """x (N, H, W, C) as rows (H*N, W*C), the order in which a convolution leaves it in memory"""
    return x.transpose(1, 0, 2, 3).reshape(x.shape[0] * x.shape[1], -1)


def norm_like(rows, x):
    """norm_rows undone: rows in the shape of x"""
    N, H, W, C = x.shape
    return rows.reshape(H, N, W, C).transpose(1, 0, 2, 3)


def relu_forward(x):
    """max(x, 0), IN PLACE: x is the fresh output of a convolution, a linear layer or a maximum, and nobody else's"""
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


def max_pool_forward(x):
    """2x2 maximum, an odd last row or column left out. x (N, H, W, C) -> y (N, H//2, W//2, C)"""
    corners = window_corners(x)
    y = np.maximum(np.maximum(corners[0], corners[1]), np.maximum(corners[2], corners[3]))
    return y, (x, y)


def max_pool_backward(dy, cache):
    """The first entry that equals its window's maximum gets the window's gradient: on a plain background all four are
    equal. A ReLU may have been taken of y since, in place: where it made y 0 no gradient comes."""
    x, y = cache
    dx, left = np.zeros_like(x), dy.copy()
    for corner, dcorner in zip(window_corners(x), window_corners(dx)):
        left -= np.multiply(corner == y, left, out=dcorner)
    return dx


def window_corners(x):
    """The four pixels of each 2x2 window, as views. x (N, H, W, C) -> 4 x (N, H//2, W//2, C)"""
    H, W = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    return [x[:, i:H:2, j:W:2] for i in (0, 1) for j in (0, 1)]


def global_avg_pool_forward(x):
    """Global average: x (N, H, W, C) -> y (N, C)"""
    return x.mean((1, 2)), (x.shape,)


def global_avg_pool_backward(dy, cache):
    shape, = cache
    return np.broadcast_to(dy[:, None, None] / (shape[1] * shape[2]), shape)


def pad_forward(x, margin):
    """`margin` px of zeros all around. x (N, H, W, C) -> y (N, H + 2 margin, W + 2 margin, C), in memory (H + 2 margin,
    N, ...), as a convolution leaves its output"""
    N, H, W, C = x.shape
    y = np.zeros((H + 2 * margin, N, W + 2 * margin, C), x.dtype).transpose(1, 0, 2, 3)
    y[:, margin:margin + H, margin:margin + W] = x
    return y, (margin,)


def pad_backward(dy, cache):
    margin, = cache
    return dy[:, margin:dy.shape[1] - margin, margin:dy.shape[2] - margin]


def flatten_forward(x):
    """x (N, ...) -> y (N, C)"""
    return x.reshape(len(x), -1), (x.shape,)


def flatten_backward(dy, cache):
    shape, = cache
    return dy.reshape(shape)


# -------------------------------------------------------------- layers
# A backbone, or a CNN, is a tuple of layers, (operation, its options) each: ("conv2d", name, K, stride, F), ("linear",
# name, F), ("norm", name), ("pad", px), and operations without options. What has weights has their name first.

LAYERS = {                         # operation -> its forward and backward; an experiment may add others
    "conv2d": (conv2d_forward, conv2d_backward), "linear": (linear_forward, linear_backward),
    "norm": (norm_forward, norm_backward), "relu": (relu_forward, relu_backward),
    "sigmoid": (sigmoid_forward, sigmoid_backward), "max_pool": (max_pool_forward, max_pool_backward),
    "global_avg_pool": (global_avg_pool_forward, global_avg_pool_backward), "pad": (pad_forward, pad_backward),
    "flatten": (flatten_forward, flatten_backward),
    "skip": (None, None), "add": (None, None)}                                          # the ends of a residual branch
WITH_WEIGHTS = ("conv2d", "linear")


def has_bias(layers, k):
    """Whether layer k, which has weights, has a bias too: not before a normalization, which would take it away"""
    return [operation for operation, *_ in layers[k + 1:k + 2]] != ["norm"]


def with_norms(layers):
    """Layers with a normalization after every convolution"""
    return tuple(part for layer in layers for part in (
        (layer, ("norm", layer[1] + "_norm")) if layer[0] == "conv2d" else (layer,)))


def infer_shapes(layers, side, channels, margin=0, rows=False):
    """What layers make of images of side x side px, of which `margin` px all around are background -> shapes of their
    weights; side and channels of what comes out; along (side,), where the middles of its receptive fields lie along the
    image without its margin, which is -1..1.

    rows: the image is one channel, and its first convolution is of im2col_rows, whose kernel is (1, K, K, F).
    """
    shapes, inner = {}, side - 2 * margin
    offset, scale = float(-margin), 1                                   # of the first middle, from one to the next, px
    for k, (operation, *options) in enumerate(layers):
        name = options[0] if options else ""
        if operation == "conv2d":
            _, K, stride, F = options
            shapes[name + "_w"] = (1, K, K, F) if rows and not shapes else (K, K, channels, F)
            side, channels = (side - K) // stride + 1, F
            offset, scale = offset + scale * (K - 1) / 2, scale * stride
        elif operation == "linear":
            shapes[name + "_w"] = channels, options[1]
            channels = options[1]
        elif operation == "norm":
            shapes |= {name + "_gamma": (channels,), name + "_beta": (channels,)}
        elif operation == "max_pool":
            side, offset, scale = side // 2, offset + scale / 2, scale * 2
        elif operation == "pad":
            side, offset = side + 2 * options[0], offset - scale * options[0]
        elif operation == "coordinates":
            channels += 2
        elif operation == "flatten":
            channels *= side * side
        if operation in WITH_WEIGHTS and has_bias(layers, k):
            shapes[name + "_b"] = (channels,)
    along = (offset + scale * np.arange(side) - (inner - 1) / 2) / (inner / 2)
    return SimpleNamespace(shapes=shapes, side=side, channels=channels, along=along)


def receptive_field_centers(along):
    """The places of a grid of receptive fields, (side * side, 2): x and y, row by row"""
    return np.stack([np.tile(along, len(along)), np.repeat(along, len(along))], 1)


def layers_forward(params, x, layers, empty=np.empty, statistics=None):
    """x through layers. -> y, the list of the layers' caches

    A ReLU or a normalization that comes first works on x itself. What stands between ("skip",) and ("add",) is a
    residual branch: ("add",) adds x as it was at ("skip",), so that no ReLU or normalization may follow the latter,
    being in place. statistics: a dict in training, when each normalization uses the mean and variance of these samples
    and puts them into it, as NAME_mean and NAME_var; None in evaluation, when it uses those that stand beside the
    weights in params.
    """
    caches, kept = [], []
    for k, (operation, *options) in enumerate(layers):
        forward_fn, _ = LAYERS[operation]
        if operation == "skip":
            cache = kept.append(x)
        elif operation == "add":
            x, cache = x + kept.pop(), None
        elif operation in WITH_WEIGHTS:
            name, stride = options[0], options[2:3]                                     # a linear layer has none
            b = params[name + "_b"] if has_bias(layers, k) else None
            x, cache = forward_fn(x, params[name + "_w"], b, *stride, empty)
        elif operation == "norm":
            name, = options
            running = (params[name + "_mean"], params[name + "_var"]) if statistics is None else None
            (x, found), cache = forward_fn(x, params[name + "_gamma"], params[name + "_beta"], running, empty)
            if statistics is not None:
                statistics[name + "_mean"], statistics[name + "_var"] = found
        else:
            x, cache = forward_fn(x, *options)
        caches.append(cache)
    return x, caches


def layers_backward(dy, caches, layers, grads, need_dx=True):
    """dy -> dx (None unless needed); the gradients of the weights go into `grads`"""
    learn = (*WITH_WEIGHTS, "norm")
    first = [k for k, (operation, *_) in enumerate(layers) if operation in learn][:1] or [len(layers)]
    last = -1 if need_dx else first[0]                                                  # nothing below it has weights
    kept = []
    for k in reversed(range(max(last, 0), len(layers))):
        operation, *options = layers[k]
        _, backward_fn = LAYERS[operation]
        if operation == "add":
            kept.append(dy)
        elif operation == "skip":
            dy = dy + kept.pop()
        elif operation in WITH_WEIGHTS:
            name, need_db = options[0], has_bias(layers, k)
            dy, grads[name + "_w"], db = backward_fn(dy, caches[k], k != last, need_db)
            grads |= {name + "_b": db} if need_db else {}
        elif operation == "norm":
            name, = options
            dy, grads[name + "_gamma"], grads[name + "_beta"] = backward_fn(dy, caches[k])
        else:
            dy = backward_fn(dy, caches[k])
    return dy if need_dx else None


# -------------------------------------------------------------- Adam

BETA1, BETA2 = 0.9, 0.999
ADAM_EPS, ADAM_CHUNK = 1e-8, 1 << 17


def adam_step(params, shard_grads, adam_m, adam_v, step, lr, runner):
    """One Adam step in place, step counting from 1; the gradient is the sum of shard_grads, in their order.

    p -= lr m_hat / (sqrt(v_hat) + eps), m_hat and v_hat the bias-corrected means of the gradient and of its square.
    The means are kept as sums, adam_m = m / (1 - beta1), adam_v = v / (1 - beta2), and all factors are gathered into
    two numbers: 11 passes over memory instead of 16. They run over chunks that stay in cache and are shared among the
    runner's threads; each number is computed alone, so the bits do not depend on who computes it.
    """
    root = float(np.sqrt((1 - BETA2) / (1 - BETA2 ** step)))                           # sqrt(v_hat) = root sqrt(adam_v)
    rate, eps = float(lr * (1 - BETA1) / (1 - BETA1 ** step) / root), ADAM_EPS / root

    def update(chunks):
        scratch = np.empty((2, ADAM_CHUNK), np.result_type(*params.values()))
        for name, start in chunks:
            part = slice(start, start + ADAM_CHUNK)
            p, m, v, *gs = (arrays[name].reshape(-1)[part] for arrays in (params, adam_m, adam_v, *shard_grads))
            total, term = scratch[:, :p.size]
            g = gs[0] if len(gs) == 1 else np.add(gs[0], gs[1], out=total)
            for shard in gs[2:]:
                g += shard
            m *= BETA1
            m += g
            v *= BETA2
            v += np.multiply(g, g, out=term)
            np.sqrt(v, out=term)
            term += eps
            np.divide(m, term, out=term)
            term *= rate
            p -= term

    chunks = [(name, start) for name in params for start in range(0, params[name].size, ADAM_CHUNK)]
    runner.map(update, [chunks[k::runner.threads] for k in range(runner.threads)])


FLUSH_STEPS, FLUSHED = 500, 1e-35


def flush_denormals(*moments):
    """Set to 0, in place, what is next to it. The means of weights whose gradient has gone, such as a dead unit's,
    decay until they are denormal numbers, with which processors compute so slowly that a step took twice its time."""
    for arrays in moments:
        for a in arrays.values():
            a[np.abs(a) < FLUSHED] = 0


def schedule(config, step, n_steps):
    """The share of the whole learning rate at a step counting from 0"""
    decay = 1 if config.lr_schedule == "constant" else 0.5 * (1 + math.cos(math.pi * step / n_steps))
    return decay * min(1, (step + 1) / max(1, config.warmup))


# -------------------------------------------------------------- what is learned without a gradient

STATE_DECAY = 0.99                 # of the running means of a normalization, from one group of samples to the next
STATE_SUFFIXES = ("_mean", "_var")


def init_state(params):
    """The running mean and variance of each normalization among the weights"""
    stems = [name.removesuffix("_gamma") for name in params if name.endswith("_gamma")]
    return {stem + end: np.full_like(params[stem + "_gamma"], end == "_var") for stem in stems for end in STATE_SUFFIXES}


def update_running_statistics(state, group_statistics, step):
    """Fold the statistics of some groups of samples, whatever their sizes, into the running ones, in place, in the
    groups' order. step, from 0: a group weighs 9 / (step + 9), later 1 - STATE_DECAY: the first forget how it began,
    and young weights are soon forgotten."""
    keep = min(STATE_DECAY, step / (step + 9))
    for statistics in group_statistics:
        for name, found in statistics.items():
            state[name] += (found - state[name]) * (1 - keep)


# -------------------------------------------------------------- running in shards

@functools.cache
def openblas():
    """NumPy's OpenBLAS library, None where NumPy has another BLAS"""
    site = Path(np.__file__).parent
    for library in (*site.parent.glob("numpy.libs/*openblas*"), *site.glob(".dylibs/*openblas*")):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(library))
    return None


def limit_blas_to_one_thread():
    """Where numpy was imported before this file, its BLAS did not see the environment variables set above: tell it
    now. With more threads it would share out products, and round them, by the number of cores."""
    with contextlib.suppress(AttributeError):
        openblas().scipy_openblas_set_num_threads64_(1)


def n_cores():
    """Cores that this process may use"""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Runner:
    """Cuts batches into shards of SHARD_SIZE and shares them among worker threads (NumPy's loops release the GIL).

    Shards, and the order in which their results are added up, do not depend on the number of threads, nor do the bits.
    A shard is also the group of samples whose statistics a normalization uses.
    """

    def __init__(self, threads, batch_size=10 ** 9, progress=None):
        limit_blas_to_one_thread()
        self.threads = min(threads or n_cores(), -(-batch_size // SHARD_SIZE))
        self.pool = ThreadPoolExecutor(self.threads) if self.threads > 1 else None
        sys.setswitchinterval(SWITCH_INTERVAL)
        self.progress = progress or Progress(quiet=True)
        self.arenas, self.n_evaluated = [], 0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def each(self, function, items):
        """function(item) for all items, on the workers, in order. Overflow warnings are off: Run watches the loss."""
        def quiet(item):
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                return function(item)
        return self.pool.map(quiet, items) if self.pool else map(quiet, items)

    def map(self, function, items):
        return list(self.each(function, items))

    def loss_and_grads(self, params, samples, rows, config):
        """loss_and_grads of samples[rows], shard by shard -> (terms, list of the shards' grads, to be added up, list of
        their statistics)"""
        shards = [rows[start:start + SHARD_SIZE] for start in range(0, len(rows), SHARD_SIZE)]
        self.arenas += [Arena() for _ in range(len(self.arenas), len(shards))]

        def one(arena_and_shard):
            arena, shard = arena_and_shard
            batch = to_batch(samples, shard, params_dtype(params))
            return loss_and_grads(params, batch, config, arena.rewind(), len(shard) / len(rows))
        all_terms, shard_grads, statistics = zip(*self.map(one, zip(self.arenas, shards)))
        return {name: sum(terms[name] for terms in all_terms) for name in all_terms[0]}, shard_grads, statistics

    def forward(self, params, samples, config, **options):
        """forward_rows of all samples, shard by shard -> its dict of arrays, a row a sample"""
        def one(some_shards):
            arena = Arena()
            outs = (forward_rows(params, samples, shard, config, arena.rewind(), **options) for shard in some_shards)
            return [{name: a.copy() for name, a in out.items()} for out in outs]
        shards, parts = [slice(at, at + SHARD_SIZE) for at in range(0, len(samples["labels"]), SHARD_SIZE)], []
        for found in self.each(one, [shards[k:k + 8] for k in range(0, len(shards), 8)]):
            parts += found
            self.n_evaluated += sum(len(next(iter(part.values()))) for part in found)
            self.progress.step(f"evaluating: {self.n_evaluated} samples")
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# -------------------------------------------------------------- the training run

class Run:
    """A training run, as train() uses it: weights, Adam's moments, running statistics, step and history, and what keeps
    it safe: resuming, a check for numbers that are not finite, checkpoints at every epoch's end, snapshots, progress.
    source: where the data come from, n_train: samples in an epoch"""

    def __init__(self, config, source, n_train, progress, snapshot_callback=None, snapshot_every=0, dtype=np.float32):
        self.config, self.source, self.progress = config, source, progress
        self.snapshot_callback, self.snapshot_every, self.last_snapshot = snapshot_callback, snapshot_every, None
        self.params = {name: p.astype(dtype) for name, p in init_params(config).items()}
        self.adam_m, self.adam_v = ({name: np.zeros_like(p) for name, p in self.params.items()} for _ in range(2))
        self.state = init_state(self.params)
        self.steps_per_epoch = -(-n_train // config.batch_size)
        self.step, self.n_steps = 0, config.n_epochs * self.steps_per_epoch
        self.terms = None
        self.history = {"source": source, "epochs": [], "seconds": 0.0, "steps": 0}
        self.saved = ""                                                 # where to find the last good state
        if config.checkpoint and Path(config.checkpoint).exists():
            self.resume_from(load_network(config.checkpoint))
        if config.warmup > self.n_steps:
            progress.say(f"the warm-up of {config.warmup} steps is longer than the run, {self.n_steps}: train longer")
        self.runner = Runner(config.threads, config.batch_size, progress)

    def __enter__(self):
        return self

    def __exit__(self, exception, *_):
        self.runner.__exit__()
        if exception is None and self.last_snapshot != self.step:
            self.snapshot()

    @property
    def weights(self):
        """What is evaluated and kept: the weights and the running statistics"""
        return self.params | self.state

    def resume_from(self, found):
        """Take over a checkpoint's state, if this is its run"""
        path = self.config.checkpoint
        check_same_run(self.config, self.source, found, path)
        for group in CHECKPOINT:
            setattr(self, group, getattr(found, group))
        self.step, self.history = found.step, found.history
        self.saved = f" (the last good state is in {path})"

    def epochs(self):
        """The numbers of the epochs still to do, from 0"""
        self.snapshot()
        for epoch in range(self.step // self.steps_per_epoch, self.config.n_epochs):
            self.began, self.seen, self.sums = time.perf_counter(), 0, {}
            yield epoch

    def batches(self, samples):
        """The rows of each batch of a dict of samples"""
        n, size = len(samples["labels"]), self.config.batch_size
        return (np.arange(start, min(start + size, n)) for start in range(0, n, size))

    def update(self, n, terms, shard_grads, statistics):
        """One step with what Runner.loss_and_grads found for n samples: weights, running means; progress, perhaps a
        snapshot"""
        if not np.isfinite(terms["loss"]):
            raise InputError(f"the loss is {terms['loss']} at step {self.step + 1}: training diverged; lower "
                             f"--lr{self.saved}")
        optimizer_step(self, shard_grads, schedule(self.config, self.step, self.n_steps))
        update_running_statistics(self.state, statistics, self.step)
        self.step += 1
        if self.step % FLUSH_STEPS == 0:
            flush_denormals(self.adam_m, self.adam_v)
        self.seen, self.terms = self.seen + n, dict(terms)
        for name, term in terms.items():
            self.sums[name] = self.sums.get(name, 0) + term * (1 if name == "hits" else n)
        self.elapsed = time.perf_counter() - self.began
        self.so_far = (f"loss {self.sums['loss'] / self.seen:.3f}  accuracy {self.sums['hits'] / self.seen:.3f}  "
                       f"{self.seen / self.elapsed:.0f} samples/s")
        left = (self.n_steps - self.step) * self.config.batch_size * self.elapsed / self.seen
        self.progress.step(f"step {self.step}/{self.n_steps}  {left:.0f} s left  {self.so_far}")
        if self.snapshot_every and self.step % self.snapshot_every == 0:
            self.snapshot()

    def snapshot(self):
        """Call snapshot_callback with copies; its time is not training's"""
        if self.snapshot_callback:
            paused, self.last_snapshot = time.perf_counter(), self.step
            self.snapshot_callback(self.step, {name: p.copy() for name, p in self.weights.items()}, self.terms)
            self.began = getattr(self, "began", 0) + time.perf_counter() - paused

    def close_epoch(self, found=None, text=""):
        """Add the epoch, and what an evaluation found, a dict of numbers, to the history; save. text: to print"""
        bad = [name for name, value in (self.weights | (found or {})).items() if not np.isfinite(value).all()]
        if bad:
            raise InputError(f"{bad[0]} is not finite after step {self.step}: training diverged, or an image holds "
                             f"what is no number; lower --lr{self.saved}")
        epoch = self.step // self.steps_per_epoch
        self.history["seconds"] += self.elapsed
        self.history["steps"] = self.step
        if found is not None:
            means = {"train_" + name: total / self.seen for name, total in self.sums.items()}
            means["train_accuracy"] = means.pop("train_hits")
            when = {"epoch": epoch, "step": self.step, "seconds": self.elapsed}
            self.history["epochs"].append(when | means | found)
            line = f"epoch {epoch}/{self.config.n_epochs}  {self.so_far}  {text}"
            self.progress.say("\r" * self.progress.live + line)
        if self.config.checkpoint:
            save_network(self.config.checkpoint, self.config, self.history,
                         {group: getattr(self, group) for group in CHECKPOINT})
            self.saved = f" (the last good state is in {self.config.checkpoint})"


def run_identity(config, source):
    """What must agree for a checkpoint to be resumed: settings that change training, and where the data come from"""
    return {f.name: getattr(config, f.name) for f in options(config)
            if not f.metadata.get("runtime")} | {"source": source}


CHECKPOINT = ("params", "state", "adam_m", "adam_v")               # dicts of arrays; weights alone have the first two


def save_network(path, config, history, groups):
    """Some of CHECKPOINT's dicts, {name: dict}, with settings, history and a digest of all of it, in one .npz, written
    atomically"""
    arrays = {f"{group}/{name}": a for group, of in groups.items() for name, a in of.items()}
    arrays["meta"] = np.array(json.dumps({"format": 2, "step": history["steps"], "history": history,
                                          "config": run_identity(config, history["source"])}))
    arrays["digest"] = np.array(digest_of(arrays))
    write_atomically(path, lambda file: np.savez(file, **arrays))


def save_weights(path, config, weights, history):
    """A trained network to keep and to hand on: weights as float16, running statistics as they are, no optimizer"""
    state = {name: a for name, a in weights.items() if name.endswith(STATE_SUFFIXES)}
    with np.errstate(over="ignore"):
        params = {name: a.astype(np.float16) for name, a in weights.items() if name not in state}
    if large := [name for name, a in params.items() if not np.isfinite(a).all()]:
        raise InputError(f"cannot write {path}: {large[0]} holds more than float16 can, {np.finfo(np.float16).max}")
    save_network(path, config, history, {"params": params, "state": state})


def load_network(path):
    """-> what save_network wrote: CHECKPOINT's dicts, float32; weights, what is evaluated; config, source, step,
    history. Nothing is unpickled. Of weights alone the optimizer's dicts are empty."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        if str(arrays.pop("digest")) != digest_of(arrays):
            raise InputError(f"{path}: its digest is not that of what it holds: damaged or changed; get it anew")
        meta = json.loads(str(arrays.pop("meta")))
        config, groups = config_from_settings(meta["config"], path), {group: {} for group in CHECKPOINT}
        for key, a in arrays.items():
            group, _, name = key.partition("/")
            groups[group][name] = a.astype(np.float32)
        params = init_params(config)
        like = dict.fromkeys(CHECKPOINT, params) | {"state": init_state(params)}
        for group in CHECKPOINT if groups["adam_m"] else CHECKPOINT[:2]:
            held, needed = ({name: a.shape for name, a in of[group].items()} for of in (groups, like))
            if held != needed:
                raise InputError(f"{path}: its arrays are not those of the network that it names; give another")
        return SimpleNamespace(**groups, weights=groups["params"] | groups["state"], config=config,
                               source=meta["config"]["source"], step=meta["step"], history=meta["history"])
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; give a file that holds a trained network") from None
    except Exception:                                 # what a damaged zip file makes its reader raise is not documented
        raise InputError(f"{path}: not a whole file of a trained network; give another") from None


def config_from_settings(settings, path):
    """The Config of a file's settings"""
    known = {f.name for f in options(Config)}
    if unknown := settings.keys() - known - {"source"}:
        raise InputError(f"{path}: of another experiment, or trained with {min(unknown)}, which is no setting now")
    return Config(**{name: value for name, value in settings.items() if name in known})


def check_same_run(config, source, found, path):
    """Raise InputError if a checkpoint is another run's, which must be neither gone on from nor overwritten"""
    if not found.adam_m:
        raise InputError(f"{path}: holds weights alone, which no run can go on from; give what --checkpoint wrote")
    ours, theirs = run_identity(config, source), run_identity(found.config, found.source)
    if differing := ", ".join(f"{name} {theirs.get(name)}, now {ours[name]}" for name in ours
                              if ours[name] != theirs.get(name)):
        raise InputError(f"{path}: made by another run ({differing}); give the same settings, or another --checkpoint")


# -------------------------------------------------------------- statistics

def wilson_interval(hits, n, z=1.959964):
    """95% Wilson score interval of a proportion -> (low, high), around hits / n also where rounding would exclude it"""
    p, z2n = hits / n, z * z / n
    center, half = (p + z2n / 2) / (1 + z2n), z * np.sqrt(p * (1 - p) / n + z2n / (4 * n)) / (1 + z2n)
    return float(max(0, min(p, center - half))), float(min(1, max(p, center + half)))


def params_dtype(params):
    """That of all computing with some weights"""
    return next(iter(params.values())).dtype


def n_params(weights):
    """Number of the parameters among some weights, which running statistics are not"""
    return sum(p.size for name, p in weights.items() if not name.endswith(STATE_SUFFIXES))


# -------------------------------------------------------------- settings

def options(config):
    """The fields of Config, or of one, that are settings"""
    return [f for f in dataclasses.fields(config) if "help" in f.metadata]


def flag_name(name):
    return "--" + name.replace("_", "-")


def is_applicable(f, config):
    """Whether an option means something to a Config's network, task and data"""
    return all(getattr(config, name) in values for name, values in f.metadata.get("only", {}).items())


def check_applicable(given, configs):
    """Raise InputError for a setting among those given, {name: value}, that means nothing to any of the Configs"""
    for f in options(Config):
        if f.name in given and not any(is_applicable(f, config) for config in configs):
            of = next(name for name, values in f.metadata["only"].items() if getattr(configs[0], name) not in values)
            others = f"{flag_name(of)} {getattr(configs[0], of)}"
            raise InputError(f"{flag_name(f.name)}: means nothing to {others}; leave it out")


RULES = {                          # what an option may ask of its value, and in which words
    "low": (lambda value, bound: value >= bound, "at least"),
    "high": (lambda value, bound: value <= bound, "at most"),
    "above": (lambda value, bound: value > bound, "more than"),
    "choices": (lambda value, names: value in names, "one of")}


def check_options(config):
    """Raise InputError for a value out of its range, or an output file that could not be written"""
    for f in options(config):
        value = getattr(config, f.name)
        if isinstance(value, float) and not np.isfinite(value):
            raise InputError(f"{flag_name(f.name)} {value}: must be a finite number")
        for rule, (holds, words) in RULES.items():
            if rule in f.metadata and not holds(value, f.metadata[rule]):
                raise InputError(f"{flag_name(f.name)} {value}: must be {words} {f.metadata[rule]}")
    check_writable(config.checkpoint, config.out_json)


def check_writable(*paths):
    """Fail now, not after an hour of training, if one of the files to write, where it is given, could not be, or would
    be written over by another"""
    paths = [Path(os.path.realpath(path)) for path in paths if path]
    for path in paths:
        if path.exists() and not path.is_file():
            raise InputError(f"cannot write {path}: it is a folder or a device; give the name of a file")
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror} in its folder; choose another") from None
    if len(set(paths)) < len(paths):
        raise InputError(f"{paths[0]}: would be written twice; give every output a file of its own")


def make_outdir(outdir, names):
    """Create the folder of some figures, or raise InputError if it, or one of the PNGs, could not be written"""
    try:
        outdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--outdir {outdir}: cannot be created ({error.strerror}); give another folder") from None
    check_writable(*(outdir / f"{name}.png" for name in names))


def given_settings(args):
    """{name: value} of the settings among some arguments that were given"""
    return {f.name: getattr(args, f.name) for f in options(Config) if hasattr(args, f.name)}


def config_from_args(args):
    """The Config of the flags that were given"""
    given = given_settings(args)
    config = Config(**given)
    check_applicable(given, [config])
    return config


def load_for_evaluation(path, args):
    """-> the network in a file, as load_network gives it, and the Config to look at it with: its own, with the flags
    given in args; those that would have changed its training must agree with it, but for the settings EVAL_SETTINGS"""
    found, given = load_network(path), given_settings(args)
    found.config = dataclasses.replace(found.config, **{SOURCE_SETTING: found.source})
    found.file = {"file": Path(path).name, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
                  "trained_seed": found.config.seed}
    check_applicable(given, [found.config])
    for f in options(Config):
        known = getattr(found.config, f.name)
        if f.name in given and f.name == "checkpoint":
            raise InputError(f"--checkpoint: is of training, and {path} is trained; leave the flag out")
        if given.get(f.name, known) != known and not f.metadata.get("runtime") and f.name not in EVAL_SETTINGS:
            raise InputError(f"{flag_name(f.name)} {given[f.name]}: {path} was trained with {known}; leave the flag out, "
                             "or train anew without --load")
    config = dataclasses.replace(found.config, **given)
    if config.out_json and os.path.realpath(config.out_json) == os.path.realpath(path):
        raise InputError(f"--out-json {config.out_json}: is the network's own file; give another")
    return found, config


# -------------------------------------------------------------- files

UMASK = os.umask(0)
os.umask(UMASK)


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


def digest_of(arrays):
    """SHA-256 over names, shapes, dtypes and bytes of a dict of arrays"""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape} {arrays[name].dtype}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def pack_bits(right):
    """Which answers were right, (n,) bool, as text: eight a byte, base64"""
    return base64.b64encode(np.packbits(right)).decode()


def make_result(config, params, history, found):
    """What --out-json writes of one network: its settings (no paths), what was found, and all that the bits depend on;
    history as columns."""
    kept = {f.name: getattr(config, f.name) for f in options(config)
            if "choices" in f.metadata or f.type in (int, float) or not f.metadata.get("runtime")}
    epochs = history["epochs"]
    return {"experiment": Path(__file__).stem, "config": kept, "source": history["source"],
            "n_params": n_params(params), **found, "seconds_train": history["seconds"],
            "ms_per_step": 1e3 * history["seconds"] / max(1, history["steps"]),
            "versions": {"python": sys.version.split()[0], "numpy": np.__version__}, "machine": machine(),
            "history": {key: [epoch[key] for epoch in epochs] for key in (epochs[0] if epochs else ())}}


def write_json(path, results):
    """Write a dict atomically, a line a key. Floats but those of config have five digits; what JSON has no word for, as
    the interval of one seed, becomes null"""
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return (float(f"{value:.5g}") if math.isfinite(value) else None) if isinstance(value, float) else value
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value if key == 'config' else plain(value))}"
                       for key, value in results.items())
    write_atomically(path, lambda file: file.write(f"{{\n{lines}\n}}\n".encode()))


def write_figure(fig, path, say):
    """Write a matplotlib Figure as a PNG, atomically"""
    write_atomically(path, lambda file: fig.savefig(file, format="png", dpi=100, metadata={"Software": None}))
    say(f"wrote {path}  ({path.stat().st_size / 1e3:.0f} kB)")


def machine():
    """What the times depend on"""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        processor = Path("/proc/cpuinfo").read_text().split("model name")[1].split("\n")[0].strip("\t: ")
    return {"processor": processor, "cores": n_cores()}


# -------------------------------------------------------------- progress and command line

class Progress:
    """On a terminal one live line; elsewhere a line an epoch; with --quiet nothing."""

    def __init__(self, quiet):
        self.quiet, self.live = quiet, not quiet and sys.stdout.isatty()
        self.last = 0.0

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


class Parser(argparse.ArgumentParser):
    """Of a docstring's command line: --help opens with its last paragraph, the command to begin with, and its first"""

    def __init__(self, description=""):
        first, *_, last = description.split("\n\n") * 2
        super().__init__(usage="%(prog)s [--seed N] [--n-epochs N] [other flags, below]",
                         description=f"{last.strip()}\n\n{first}", allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        raise InputError(f"{message}; see --help")


def add_config_flags(parser):
    """One flag for every option of Config, in groups. Flags not given leave no trace: the defaults are Config's."""
    groups, usual = {}, Config()
    for f in sorted(options(Config), key=lambda f: ("data", "network", "training", "run").index(f.metadata["group"])):
        default = f"{getattr(usual, f.name)}, or as the recipe says" if f.default is None else f.default
        only = "; ".join(f"{flag_name(name)} {', '.join(map(str, values))}"
                         for name, values in f.metadata.get("only", {}).items())
        text = f.metadata["help"] + f" [{only}]" * bool(only) + f" (default {default})" * (default not in ("", False))
        flag = {"help": text.replace("%", "%%")}                                        # argparse formats with %
        if f.type is bool:
            flag["action"] = "store_true" if f.default is False else argparse.BooleanOptionalAction
        else:
            names = f.metadata.get("choices")
            metavar = f.metadata.get("metavar", {int: "N", float: "X", str: "FILE"}[f.type])
            flag |= {"type": f.type, "choices": names, "metavar": None if names else metavar}
        name = f.metadata["group"]
        groups[name] = groups.get(name) or parser.add_argument_group(name)
        groups[name].add_argument(flag_name(f.name), default=argparse.SUPPRESS, **flag)


def add_load_flag(parser, text):
    parser.add_argument(
        "--load", nargs="?", const=str(WEIGHTS), metavar="FILE",
        help=f"{text} of a file that --checkpoint or --out-weights wrote, without FILE that of weights/{WEIGHTS.name}; "
        f"{', '.join(map(flag_name, EVAL_SETTINGS))} may be others than those that it was trained with")


def add_out_weights_flag(parser):
    parser.add_argument("--out-weights", default="", metavar="FILE",
                        help="write the trained network to this .npz: float16, settings, a digest, no optimizer")


def run_cli(main):
    """Call main(); turn what the user can mend into one line and exit code 2."""
    try:
        main()
    except InputError as error:
        sys.exit(fail(str(error)))
    except MemoryError:
        sys.exit(fail("out of memory; lower --batch-size, --threads, or the sizes of the network"))
    except KeyboardInterrupt:
        print("\nstopped; --checkpoint, if it was given, holds the last whole epoch", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:                                                     # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def fail(message):
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2

# END SHARED core -----------------------------------------------------------------------------------------------------

LAYERS["coordinates"] = coordinate_channels_forward, coordinate_channels_backward


def main():
    parser = Parser(description=__doc__)
    add_load_flag(parser, "train nothing: test the network")
    add_out_weights_flag(parser)
    add_config_flags(parser)
    args = parser.parse_args()
    found, config = load_for_evaluation(args.load, args) if args.load is not None else (None, config_from_args(args))
    check_config(config)
    check_writable(config.checkpoint, config.out_json, args.out_weights)
    if config.model == "nearest" and args.out_weights:
        raise InputError("--out-weights: means nothing to --model nearest, which knows images; leave it out")
    progress = Progress(config.quiet)
    data = load_data(config, progress.say, ["train"] if found else ())
    params, history = (found.weights, found.history) if found else train(config, data=data)
    if args.out_weights:
        save_weights(args.out_weights, found.config if found else config, params, history)
    with Runner(config.threads, progress=progress) as runner:
        tests = evaluate_test_sets(params, data, config, runner)
    report(config, params, history, tests, progress.say, found)


if __name__ == "__main__":
    run_cli(main)
