#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0"]
# ///
"""affNIST CapsNet: capsule networks and CNNs trained on translated digits, tested on rotated, sheared and scaled ones.

Sabour, Frosst & Hinton, "Dynamic routing between capsules", NIPS 2017, sections 4 (the network), 5.1 (what the
dimensions of a capsule represent) and 5.2 (robustness to affine transformations).

Question: networks are trained on MNIST digits that are translated on a larger canvas, and on nothing else. When a
capsule network and a CNN classify translated digits equally well, is the capsule network more accurate on digits that
are also rotated, sheared and scaled (the paper: 79% against 66%)? If so, which part of the capsule network is the
reason?

    stage        layer                                                               output
    Input        a translated digit, 40x40 px, padded with 4 px of background        (N, 48, 48)
    Conv1, 2     3x3, 16 and 16 channels, then 2x2 max pooling                       (N, 22, 22, 16)
    Conv3, 4     3x3, 64 and 64 channels, then 2x2 max pooling                       (N, 9, 9, 64)
    Conv5        3x3, 128 channels                                                   (N, 7, 7, 128)
    PrimaryCaps  1x1, 16 types x 8-D, squash                                         (N, 784, 8)
    votes        u_hat_j|i = W_tj u_i + |u_i| P_j x_i                                (N, 10, 784, 16)
    routing      1 iteration (uniform coupling coefficients), squash                 (N, 10, 16)
    decoder      one capsule, the others masked: 160 -> 256 -> 512 -> 1600           (N, 40, 40)

This is the default network, `--model capsnet-shared`. W_tj is the transformation matrix from t, the type of capsule i,
to digit j, shared across positions. x_i is the center of capsule i's receptive field, (x, y) from -1 to 1; P_j
(`coordinate_W`) adds it to the vote: the coordinate addition of Hinton et al. (2018), for vectors. With uniform
coupling coefficients the sum of the votes is computed without computing the votes.

Loss: the margin loss of the digit capsules' lengths (Eq. 4) + 0.0005 x the summed squared error of the reconstruction.
Every convolution is followed by batch normalization (over groups of 16 samples) and a ReLU, PrimaryCaps by batch
normalization and the squash. Optimizer: Adam, with a warm-up and cosine decay of the learning rate; the normalized
kernels of the convolutions take steps along their orthogonalized momentum instead (Muon). Every gradient is written
out; there is no autograd.

Baselines (`--model`):

    capsnet     one transformation matrix per position and 3 routing iterations, as in the paper, on the same backbone
    cnn         the paper's CNN for MNIST, its three convolutions at 1/16 of their width
    cnn-dense   CNN: the backbone and a hidden dense layer
    cnn-gap     CNN: the backbone and global average pooling (GAP)
    cnn-gmp     CNN: the backbone and global max pooling (GMP)
    vector-gap  ten class vectors by global average pooling, with squash, margin loss and decoder; no primary capsules
    vector-gmp  the same by global max pooling

cnn-gap and cnn-gmp have about as many parameters as capsnet-shared without its decoder, cnn and cnn-dense about as many
as capsnet without its decoder would have with their padding: 1.8 million (capsnet, padded less: 1.1 million).

Flags that remove a part: `--routing-iters 1` (routing: uniform coupling coefficients), `--squash` (the squash of the
primary or of all capsules), `--loss cross-entropy` (the margin loss), `--recon-weight 0` (the decoder), `--norm none`
(batch normalization).

Deviations from the paper:

- The backbone is six small convolutions with batch normalization, not two 9x9 convolutions; `--preset paper --model
  capsnet` is the paper's network, `--preset small` the same at a quarter of its width.
- The default network shares its transformation matrices across positions, adds coordinates and has one routing
  iteration; the paper's has one matrix per position and three iterations (`--model capsnet`).
- The image is padded with background (`--padding`): 4 px for models with routing, 8 px for the others.
- Training is short, the learning rate has a cosine decay, and normalized kernels are trained by Muon, not Adam.
- cnn and cnn-dense have no dropout but with `--preset small` or `paper`. The paper's CNN for affNIST had max pooling;
  its layers are not published (cnn-dense is the nearest one here).
- Training stops after `--n-epochs`; the paper compares networks at equal accuracy on translated digits (`--stop-at`).
- Affine test digits are drawn here, within affNIST's reported ranges, because its files are not downloaded;
  `--affnist-dir` also tests on these files.

Examples, with times on two cores:
  python3 affnist_capsnet.py                         2.5 minutes: train capsnet-shared
  python3 affnist_capsnet.py --load                  1 minute: evaluate the pretrained network
  python3 affnist_capsnet.py --model cnn-gap         2 minutes: train a CNN with global average pooling
"""
import argparse
import base64
import contextlib
import ctypes
import dataclasses
import functools
import gzip
import hashlib
import http.client
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
import zlib
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

# SHARED preamble: imports, errors, declaration of settings ----------------------------------------------------

# One BLAS thread, set before numpy is imported: worker threads share the work in fixed shards instead, so that the bits
# do not depend on their number.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ[name] = "1"
try:
    import numpy as np
    from numpy.lib.stride_tricks import as_strided, sliding_window_view
except ImportError:
    np = None
if not hasattr(np, "vecdot") or "__file__" not in globals():
    print("error: this source does not run in a cell. Save it as a file and import that" if "__file__" not in globals()
          else f'error: NumPy 2 or later is missing: {sys.executable} -m pip install "numpy>=2"', file=sys.stderr)
    sys.exit(2)


class InputError(Exception):
    """Wrong input: the message is one line that says what is wrong and what to do next. Exit code 2."""


def option(default, text, group, **extra):
    """Declare a setting: its default, its help text and its group in --help (data, network, training or run). A default
    of None is filled in from DEFAULTS.

    extra: low, high, above (exclusive), choices: bounds of the value; metavar; runtime=True if a checkpoint can be
    resumed with another value: files, tests, and where data come from, since their source is compared; only={setting:
    values} if the setting applies to some models, tasks or data only; aliases={name: only}: other names of its flag,
    and what they apply to; older: the value in files that were written before the setting existed.
    """
    return dataclasses.field(default=default, metadata={"help": text, "group": group, **extra})


def describe(choices):
    """Return the help text of a setting's choices, {name: description}"""
    return "; ".join(f"{name}: {text}" for name, text in choices.items())

# END SHARED preamble -------------------------------------------------------------------------------------------------

# Axis legend, for the shape comments at line ends:
#   N batch   H W height, width   C F input and output channels   K kernel size   I primary capsules   J digit capsules
#   B types of primary capsules   E D dimensions of a primary (8) and of a digit capsule (16)
#   T terms of which du_hat is the sum (routing_backward)
#
# One sample, step by step:
#   load_digits           loads MNIST in three splits; select_training_digits: the digits to train on
#   epoch_samples         translates every training digit at random, a chunk of digits at a time
#   to_batch              converts the digits of one batch to floats in [0, 1]
#   forward               computes the backbone or the whole CNN (layers_forward); squash, votes and routing
#                         (capsules_forward); the reconstruction
#   classification_loss, reconstruction_loss      compare the scores with the label, the reconstruction with the image
#   backward              propagates their gradients through the same functions in reverse
#   optimizer_step        updates the parameters (Adam, Muon)
#   stream_digits         draws validation and test digits: translated, affine, or read from affNIST's own files
#   evaluate              computes accuracy and losses; evaluate_test_sets: of every test set of the task
#   report                prints the results and saves them


def train(config, snapshot_callback=None, snapshot_every=0, data=None, dtype=np.float32):
    """Train a network and return its weights and history. No test image is used.

    snapshot_callback(step, params, terms): called with copies at step 0, after every snapshot_every steps and at the
    end; it cannot change the run. data: load_digits' result, to load the digits only once. dtype: float64 in tests.
    Return params, {name: array}, with the running statistics of the normalizations (on data of your own with other than
    ten classes, evaluate them with fit_to_data(config, data)), and history: source of the digits, epochs (a dict each:
    training and validation losses and accuracies), seconds, steps.
    Raise InputError when a setting is invalid, the data cannot be loaded or the training diverges.
    """
    check_config(config)
    progress = Progress(config.quiet)
    data = load_digits(config, progress.say) if data is None else data
    check_digits(data, ("train", "val"))           # the test images are not even looked at
    config = fit_to_data(config, data)
    with Run(config, data["source"], config.n_train, progress, snapshot_callback, snapshot_every, dtype) as run:
        announce(run, data)
        for epoch in run.epochs():
            if any(earlier["val_accuracy"] >= config.stop_at > 0 for earlier in run.history["epochs"]):
                break
            for samples in epoch_samples(data, epoch, config):
                for rows in run.batches(samples):
                    run.update(len(rows), *run.runner.loss_and_grads(run.params, samples, rows, config))
            metrics = evaluate(run.weights, stream_digits(data, config, "val"), config, run.runner)
            run.close_epoch({"val_" + name: metrics[name] for name in EPOCH_METRICS if name in metrics},
                            f"validation accuracy {metrics['accuracy']:.4f}")
    return run.weights, run.history


# ============================================================== the task: digits, translated or affinely transformed

BOX, INK = 28, 20                  # sides of an MNIST image and of the square that its digit fits into, px
SIDES = {"affnist": 40, "mnist": 28}                           # of each task's canvas, px
N_CLASSES = 10                     # of MNIST; other data may have 2 to 62: Config.n_classes
# affNIST's ranges of the factors of an affine transformation: degrees, x per y, scale factors; and no transformation
RANGES = {"rotation": (-20.0, 20.0), "shear": (-0.2, 0.2), "scale_y": (0.8, 1.2), "scale_x": (0.8, 1.2)}
IDENTITY = {"rotation": 0.0, "shear": 0.0, "scale_y": 1.0, "scale_x": 1.0}
KINDS = "val", "test", "affine", "any_position", "centered"    # of digits (stream_digits); the index seeds a generator
TEST_SETS = {                                         # of each task: key of the result, kind of digits, printed name
    "affnist": (("familiar", "test", "translated digits"), ("any_position", "any_position", "digits at any position"),
                ("centered", "centered", "affine digits, centered"),
                ("affine", "affine", "affine digits, any position"), ("real_affine", "real", "affNIST's own digits")),
    "mnist": (("test", "test", "test digits"),)}


def place_digits(images, corners, side):
    """Place each 28x28 image on a black canvas of side x side px and return the canvases, (n, side, side) uint8.

    images: (n, 28, 28) uint8. corners: (n, 2), row and column of each image's upper left corner on its canvas, px. A
    corner may lie outside; what does not fit on the canvas is cut off.
    """
    canvas = np.zeros((len(images), side + 2 * BOX, side + 2 * BOX), np.uint8)
    windows = sliding_window_view(canvas, (BOX, BOX), axis=(1, 2), writeable=True)
    rows, columns = np.clip(corners.T + BOX, 0, side + BOX)
    windows[np.arange(len(images)), rows, columns] = images
    return canvas[:, BOX:-BOX, BOX:-BOX]


def max_shift(config):
    """Return the largest translation of training digits along each axis, px; None: any position on the canvas."""
    return None if config.train_shift == "full" else int(config.train_shift)


def test_sets(config):
    """Return the rows of TEST_SETS that apply to a Config: (result key, kind of digits, printed name).

    A network trained on digits at any position has no separate test set of these; affNIST's own files need
    --affnist-dir.
    """
    included = {"any_position": max_shift(config) is not None, "real": config.affnist_dir}
    return [row for row in TEST_SETS[config.task] if included.get(row[1], True)]


def translate_digits(images, side, max_shift, rng):
    """Translate each 28x28 image from the center of its canvas by up to max_shift whole px along each axis, at random.

    max_shift None: to any position at which all ink is on the canvas. Return (n, side, side) uint8.
    """
    if max_shift is None:
        return translate_anywhere(images, side, rng)
    shifts = rng.integers(-max_shift, max_shift + 1, (len(images), 2))
    return place_digits(images, (side - BOX) // 2 + shifts, side)


def translate_anywhere(images, side, rng):
    """Translate each 28x28 image to a random position, in whole px, at which all of its ink is on the canvas.

    Return (n, side, side) uint8.
    """
    corners = [rng.integers(-ink.argmax(1), side - BOX + 1 + ink[:, ::-1].argmax(1))
               for ink in (images.any(2), images.any(1))]                               # (n, 28), by row, by column
    return place_digits(images, np.stack(corners, 1), side)


def affine_matrix(rotation, shear, scale_y, scale_x):
    """Return the matrices of affine transformations, which act on column vectors (y, x), (n, 2, 2) float64.

    A matrix first scales by scale_y and scale_x, then shears (x += shear * y), then rotates by `rotation` degrees,
    counter-clockwise in the image. The arguments, numbers or (n,), are broadcast.
    """
    rotation, shear, scale_y, scale_x = np.broadcast_arrays(*map(np.float64, (rotation, shear, scale_y, scale_x)))
    cos, sin = np.cos(np.deg2rad(rotation)), np.sin(np.deg2rad(rotation))
    scale_and_shear = np.stack([scale_y, 0 * scale_y, shear * scale_y, scale_x], -1).reshape(-1, 2, 2)
    rotate = np.stack([cos, -sin, sin, cos], -1).reshape(-1, 2, 2)                      # y points down
    return rotate @ scale_and_shear


def transform_digits(images, matrices, rng, side):
    """Transform each 28x28 image by its matrix, bilinearly, and place it at random with all of its ink on the canvas.

    images: (n, 28, 28) uint8. matrices: (n, 2, 2), from affine_matrix. rng: None places each digit at the center of its
    canvas, or as near to the center as its ink allows.
    Return the canvases, (n, side, side) uint8, and centers, (n, 2): where the center (13.5, 13.5) of each image lies on
    its canvas, (row, column) in px. Ink that does not fit on the canvas, as MNIST's does, is centered and cut off.
    """
    middle = (BOX - 1) / 2
    y, x = np.mgrid[:BOX, :BOX] - middle
    ink = images > 0
    mapped = np.einsum("nij,jyx->niyx", matrices, np.stack([y, x]))                     # transformed pixel positions
    low, high = (np.where(ink[:, None], mapped, fill).reshape(len(images), 2, -1) for fill in (np.inf, -np.inf))
    margin = np.abs(matrices).sum(2)           # interpolated ink reaches this far from its pixel, and there it is 0
    low, high = np.minimum(low.min(2), 0) - margin + 1, np.maximum(high.max(2), 0) + margin - 1
    room = side - 1 - (high - low)
    fraction = rng.uniform(0, 1, (len(images), 2)) if rng else np.clip(
        ((side - 1) / 2 + low) / np.maximum(room, 1e-9), 0, 1)
    centers, inverses = np.where(room < 0, (side - 1 - low - high) / 2, fraction * room - low), np.linalg.inv(matrices)
    return np.concatenate([resample_affine(*(a[start:start + 64] for a in (images, inverses, centers)), side)
                           for start in range(0, len(images), 64)]), centers            # 64 digits fit in the CPU cache


def resample_affine(images, inverses, centers, side):
    """Draw each image, transformed, on its canvas by bilinear interpolation; return canvases (n, side, side) uint8.

    images: (n, 28, 28) uint8. inverses: (n, 2, 2), inverses of the transformations' matrices. centers: (n, 2), where
    each image's center lies on its canvas, px. Canvas pixel p gets the value of the image at inverse @ (p - center),
    relative to the image's center; outside of the image the value is 0.
    """
    n, pixel = len(images), np.arange(side)
    offset = np.stack(np.broadcast_arrays(pixel[:, None] - centers[:, 0, None, None],
                                          pixel - centers[:, 1, None, None]), 1)        # (n, 2, side, side)
    source = np.einsum("nij,njyx->niyx", inverses, offset) + (BOX - 1) / 2 + 1          # in the padded image
    source = np.clip(source, 0, BOX + 1 - 1e-6)
    corner = source.astype(np.int64)
    (y, x), (dy, dx) = corner.transpose(1, 0, 2, 3), (source - corner).transpose(1, 0, 2, 3)
    padded = np.pad(images.astype(float), ((0, 0), (1, 1), (1, 1)))
    flat = (np.arange(n)[:, None, None] * (BOX + 2) + y) * (BOX + 2) + x
    neighbors = ((row + column, weight_y * weight_x) for row, weight_y in ((0, 1 - dy), (BOX + 2, dy))
                 for column, weight_x in ((0, 1 - dx), (1, dx)))
    return np.rint(sum(weight * np.take(padded, flat + step) for step, weight in neighbors)).astype(np.uint8)


def stream_digits(digits, config, kind, factors=None):
    """Yield validation or test digits in dicts of at most CHUNK: images (n, side, side) uint8 and labels (n,) int64.

    kind: "val", validation digits, or "test", test digits, both translated as in training (with --task mnist as they
    are); "any_position", test digits translated by whole px to any position at which all ink is on the canvas, also
    beyond the training range; "affine", test digits transformed and placed at any position; "centered", test digits
    transformed and placed at the center of the canvas, or as near to it as their ink allows; "real", affNIST's own
    files. --eval-split val replaces the test images by validation images.
    factors: {factor: number} for all "affine" or "centered" digits; None draws them from RANGES. Each chunk has its own
    random generator.
    """
    if kind == "real":
        if digits["source"] not in DIGIT_NAMES:
            raise InputError(f"--affnist-dir holds digits, not {data_name(digits['source'])}. Leave it out")
        yield from read_affnist(config.affnist_dir)
        return
    images, labels = digits["val" if kind == "val" else config.eval_split]
    n, side = min((config.n_val if kind == "val" else config.n_test) or len(labels), len(labels)), SIDES[config.task]
    for start in range(0, n, CHUNK):
        rows = slice(start, min(start + CHUNK, n))
        rng = rng_for(config.seed, "evaluation", KINDS.index(kind), 0, start // CHUNK)
        if kind == "any_position":
            canvases = translate_anywhere(images[rows], side, rng)
        elif kind in ("affine", "centered"):
            values = factors or {name: rng.uniform(*bounds, rows.stop - start) for name, bounds in RANGES.items()}
            matrices = np.broadcast_to(affine_matrix(**values), (rows.stop - start, 2, 2))
            canvases, _ = transform_digits(images[rows], matrices, None if kind == "centered" else rng, side)
        else:
            canvases = translate_digits(images[rows], side, 0 if config.task == "mnist" else max_shift(config), rng)
        yield {"images": canvases, "labels": labels[rows].astype(np.int64)}


def select_training_digits(digits, config):
    """Return images and labels of the training digits: all of them, or --n-per-class of each class, drawn by the seed.

    Raise InputError when a class has fewer digits than that.
    """
    images, labels = digits["train"]
    if not config.n_per_class:
        return images, labels
    order = rng_for(config.seed, "data", 1).permutation(len(labels))
    chosen = [order[labels[order] == digit][:config.n_per_class] for digit in range(config.n_classes)]
    if (fewest := min(map(len, chosen))) < config.n_per_class:
        raise InputError(f"--n-per-class {config.n_per_class}: one class has only {fewest} digits; lower it, or 0: all")
    rows = np.sort(np.concatenate(chosen))
    return images[rows], labels[rows]


def epoch_samples(digits, epoch, config, dtype=np.float32):
    """Yield the randomly translated training digits of one epoch in dicts of samples, each some whole batches.

    A dict has at most CHUNK samples, or one batch: images (n, side, side) uint8, labels (n,) int64 and, with dropout,
    dropout_mask (n, units) float32, each entry 0 or 1 / (1 - dropout). Every digit appears once before any digit
    appears again. dtype is not used: to_batch converts.
    """
    images, labels = select_training_digits(digits, config)
    size, rng = max(1, CHUNK // config.batch_size) * config.batch_size, rng_for(config.seed, "batches", epoch)
    order = itertools.chain.from_iterable(map(rng.permutation, itertools.repeat(len(labels))))
    for k, start in enumerate(range(0, config.n_train, size)):
        rows = np.fromiter(itertools.islice(order, min(size, config.n_train - start)), np.int64)
        rng = rng_for(config.seed, "batches", epoch, k)
        samples = {"images": translate_digits(images[rows], SIDES[config.task], max_shift(config), rng),
                   "labels": labels[rows].astype(np.int64)}
        if config.dropout:
            samples["dropout_mask"] = draw_dropout_mask(rng, (len(rows), plan(config).n_dropped), config.dropout)
        yield samples


def to_batch(samples, rows, dtype=np.float32):
    """Return rows of a dict of samples as a network's input: images in [0, 1] and dropout_mask, if any, in `dtype`, and
    labels, (N,)."""
    batch = {name: a[rows] if name == "labels" else a[rows].astype(dtype) for name, a in samples.items()}
    return batch | {"images": batch["images"] / 255}


def read_affnist(folder):
    """Yield affNIST's own test digits, file by file, in dicts: images (n, 40, 40) uint8 and labels (n,) int64.

    folder: contains test_batches/1.mat, 2.mat, ..., or these files. Raise InputError when files or SciPy are missing,
    or when a file is damaged or has other contents.
    """
    root = home_path(folder)
    if root.name.startswith(("train", "valid")):
        raise InputError(f"--affnist-dir {folder}: holds training digits; give the folder that contains test_batches")
    paths = {path.name: path for base in (root, root / "test_batches") for path in base.glob("*.mat")
             if path.stem.isdigit()}                                    # a file in both folders counts once
    if not paths:
        raise InputError(f"--affnist-dir {folder}: no test_batches/1.mat, 2.mat, ... in this folder; give the folder "
                         "that contains affNIST's test_batches, unpacked")
    try:
        import scipy.io
    except ImportError:
        raise InputError(f"--affnist-dir needs SciPy. Install it: {sys.executable} -m pip install scipy") from None
    for path in sorted(paths.values(), key=lambda path: int(path.stem)):
        try:
            mat = scipy.io.loadmat(path, squeeze_me=True, struct_as_record=False, variable_names=["affNISTdata"])
            images, labels = (np.asarray(getattr(mat["affNISTdata"], name)) for name in ("image", "label_int"))
        except Exception as error:             # SciPy does not document which exceptions a damaged file can raise
            raise InputError(f"{path}: damaged, or not an affNIST file ({' '.join(str(error).split())[:80]}); download "
                             "it again") from None
        side, labels, images = SIDES["affnist"], np.atleast_1d(labels), images.reshape(len(images), -1)
        valid = len(labels) and labels.min() >= 0 and labels.max() < N_CLASSES
        if images.shape != (side * side, len(labels)) or images.dtype != np.uint8 or not valid:
            raise InputError(f"{path}: contains {images.dtype} of shape {images.shape} and {len(labels)} labels, not "
                             f"uint8 of shape ({side * side}, digits) and labels from 0 to 9; download it again")
        yield {"images": images.T.reshape(-1, side, side), "labels": labels.astype(np.int64)}


# ============================================================== the paper: capsules, routing, losses, networks

# SHARED dynamic routing: squash, votes, routing by agreement, lengths, margin loss -----------------------------------
# The axes of u_hat, b, c and their gradients are (N, J, I, ...): output capsule j comes before input capsule i.

SQUASH_EPS = 1e-9      # added inside the square root of a norm, so that a zero vector's gradient is 0, not 0/0


def squash_forward(s):
    """Squash the vectors s along the last axis to v = |s|^2 / (1 + |s|^2) * s / |s| (Sabour et al. 2017, Eq. 1).

    The direction is kept, the length is below 1. Return v, with the shape of s, and a cache for squash_backward.
    """
    norm = np.sqrt(np.einsum("...d,...d->...", s, s)[..., None] + SQUASH_EPS)           # (..., 1)
    gain = norm / (1 + norm * norm)
    return s * gain, (s, norm, gain)


def squash_backward(dv, cache):
    """Return ds, with the shape of s.

    With q = |s| and v = s q / (1 + q^2): ds = dv q / (1 + q^2) + s (s . dv) (1 - q^2) / (q (1 + q^2)^2).
    """
    s, norm, gain = cache
    radial = np.einsum("...d,...d->...", s, dv)[..., None]                              # (..., 1)
    radial *= (1 - norm * norm) / (norm * (1 + norm * norm) ** 2)
    ds = dv * gain
    ds += s * radial
    return ds


def votes_forward(u, W, empty=np.empty):
    """Compute the votes u_hat_j|i = W_ij u_i of all input capsules for all output capsules (Sabour et al. 2017, Eq. 2).

    u: input capsules, (N, I, E). W: transformation matrices, (I, E, J, D). W_ij is stored transposed, as (E, D), so
    that each i is one row-major GEMM (N, E) @ (E, J*D): OpenBLAS's AVX-512 kernels multiply such small matrices 1.8
    times as fast as with a transposed operand.
    Return u_hat, (N, J, I, D), a view of memory laid out as (N, I, J, D), and a cache for votes_backward.
    """
    (N, I, E), (_, _, J, D) = u.shape, W.shape
    u_hat = empty((N, I, J * D), u.dtype)
    np.matmul(u.transpose(1, 0, 2), W.reshape(I, E, J * D), out=u_hat.transpose(1, 0, 2))
    return u_hat.reshape(N, I, J, D).transpose(0, 2, 1, 3), (u, W, empty)


def votes_backward(du_hat, cache):
    """Return du (N, I, E) and dW (I, E, J, D) from du_hat (N, J, I, D)."""
    u, W, empty = cache
    (N, I, E), (_, _, J, D) = u.shape, W.shape
    by_i = du_hat.transpose(0, 2, 1, 3).reshape(N, I, J * D).transpose(1, 0, 2)         # (I, N, J*D)
    du, dW = empty(u.shape, u.dtype), empty(W.shape, W.dtype)
    np.matmul(by_i, W.reshape(I, E, J * D).transpose(0, 2, 1), out=du.transpose(1, 0, 2))
    np.matmul(u.transpose(1, 2, 0), by_i, out=dW.reshape(I, E, J * D))
    return du, dW


def softmax_forward(b):
    """Compute the coupling coefficients c_ij = exp(b_ij) / sum_k exp(b_ik) (Sabour et al. 2017, Eq. 3).

    b: routing logits, (N, J, I). The softmax runs over the output capsules, axis 1. Return c, (N, J, I), and a cache.
    """
    c = b - b.max(1, keepdims=True)
    np.exp(c, out=c)
    c /= c.sum(1, keepdims=True)
    return c, c


def softmax_backward(dc, c):
    """Return db from dc, both (N, J, I)."""
    db = dc - np.einsum("nji,nji->ni", c, dc)[:, None]
    db *= c
    return db


SQUASH, SOFTMAX = (squash_forward, squash_backward), (softmax_forward, softmax_backward)


def routing_forward(u_hat, n_iters, empty=np.empty, normalizer=SOFTMAX, nonlinearity=SQUASH):
    """Compute the output capsules by dynamic routing (Sabour et al. 2017, Procedure 1).

    Each iteration sets the coupling coefficients c = softmax(b) over the output capsules (Eq. 3), sums the votes into
    s_j = sum_i c_ij u_hat_j|i (Eq. 2), squashes s_j to v_j (Eq. 1), and adds the agreement u_hat_j|i . v_j to the
    logits b_ij, which start at zero for every sample. The last iteration skips that update, whose result would not be
    used.

    u_hat: votes, (N, J, I, D). n_iters: at least 1; 1 means uniform coupling coefficients. empty: np.empty or an Arena.
    normalizer, nonlinearity: (forward, backward) functions to use in place of the softmax and of the squash, in
    every iteration.
    Return v, (N, J, D), and a cache for routing_backward, whose `steps` hold c and v of every iteration: c is
    (N, J, I), but (1, I) in the first iteration, where it is the same for all samples and output capsules.

    All sums are BLAS calls: a matrix-vector product for every (n, j) reads u_hat once, whereas a GEMM with a
    block-diagonal matrix would need J times the arithmetic.
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
        v, v_cache = nonlinearity[0](s)
        steps.append(SimpleNamespace(c=c, v=v, c_cache=c_cache, v_cache=v_cache))
    return v, SimpleNamespace(u_hat=u_hat, steps=steps, empty=empty, normalizer=normalizer,
                              nonlinearity=nonlinearity)


def routing_backward(dv, cache):
    """Return du_hat (N, J, I, D) from dv (N, J, D), through all routing iterations.

    Each use of u_hat_j|i adds a coefficient times a D-dimensional direction to its gradient: c ds for a weighted sum,
    db v for an agreement. These T = 2 n_iters - 1 terms are collected, and du_hat is one batched product (I, T) @
    (T, D) for every (n, j). db, (N, J, I), is a sum over the iterations, as the logits are: b_r is also in b_(r+1).
    """
    u_hat, steps, empty = cache.u_hat, cache.steps, cache.empty
    N, J, I, D = u_hat.shape
    terms, db = [], 0
    for r in reversed(range(len(steps))):
        ds = cache.nonlinearity[1](dv, steps[r].v_cache)                                # (N, J, D)
        terms.append((steps[r].c, ds))
        if r == 0:                                                                      # its c is a constant
            break
        dc = np.matmul(u_hat, ds[..., None], out=empty((N, J, I, 1), dv.dtype))[..., 0]                     # (N, J, I)
        db = db + cache.normalizer[1](dc, steps[r].c_cache)                      # b_r = b_(r-1) + u_hat . v_(r-1)
        terms.append((db, steps[r - 1].v))
        dv = np.matmul(db[:, :, None], u_hat)[:, :, 0]                                  # (N, J, D), of v_(r-1)
    coefficients = empty((N, J, len(terms), I), dv.dtype)
    directions = empty((N, J, len(terms), D), dv.dtype)
    for t, (coefficient, direction) in enumerate(terms):
        coefficients[:, :, t] = coefficient
        directions[:, :, t] = direction
    return np.matmul(coefficients.transpose(0, 1, 3, 2), directions, out=reuse_if_arena(u_hat, empty))


def lengths_forward(v):
    """Compute the lengths |v_j|; the paper uses them as the probabilities that class j is present. v: (N, J, D). Return
    (N, J) and a cache."""
    lengths = np.sqrt(np.einsum("njd,njd->nj", v, v) + SQUASH_EPS)
    return lengths, (v, lengths)


def lengths_backward(dlengths, cache):
    """Return dv (N, J, D) from dlengths (N, J)."""
    v, lengths = cache
    return v * (dlengths / lengths)[..., None]


M_PLUS, M_MINUS = 0.9, 0.1
DOWN_WEIGHT = 0.5


def margin_loss(lengths, present):
    """Compute the margin loss (Sabour et al. 2017, Eq. 4), summed over the classes and averaged over the batch.

    L_k = T_k max(0, 0.9 - |v_k|)^2 + 0.5 (1 - T_k) max(0, |v_k| - 0.1)^2.
    lengths: |v_k|, (N, J). present: T_k, (N, J), 1 for the classes in the image, 0 for the others.
    Return the loss, a float, and dlengths, (N, J).
    """
    short, long = np.maximum(M_PLUS - lengths, 0), np.maximum(lengths - M_MINUS, 0)
    N = len(lengths)
    loss = float((present * short ** 2 + DOWN_WEIGHT * (1 - present) * long ** 2).sum()) / N
    return loss, (2 * DOWN_WEIGHT * (1 - present) * long - 2 * present * short) / N


# END SHARED dynamic routing ------------------------------------------------------------------------------------------


# SHARED votes with shared matrices: transformation matrices shared across positions ----------------------------------

def add_coordinates_forward(u, centers):
    """Append coordinates to each capsule, as two elements that are scaled by its length.

    u: vector capsules, (N, I, E), with I ordered (position, type); centers: x and y of the positions' receptive
    fields, (positions, 2). Return (N, I, E + 2) and a cache. Transformation matrices with two more rows then add
    learned multiples of the coordinates to the votes: a variant of the coordinate addition of Hinton et al. 2018, which
    adds them to two fixed elements. The scaling lets a capsule that sees nothing add nothing.
    """
    lengths, cache = lengths_forward(u)                                                 # (N, I)
    positions = np.repeat(centers.astype(u.dtype), u.shape[1] // len(centers), axis=0)  # (I, 2)
    return np.concatenate([u, lengths[..., None] * positions], -1), (cache, positions)


def add_coordinates_backward(dout, cache):
    """Return du, (N, I, E), from dout, (N, I, E + 2)."""
    lengths_cache, positions = cache
    dlengths = np.einsum("nik,ik->ni", dout[..., -2:], positions)
    return dout[..., :-2] + lengths_backward(dlengths, lengths_cache)


def shared_votes_forward(u, W, n_positions, empty=np.empty):
    """Compute votes with transformation matrices that are shared across positions: one per capsule type.

    u: vector capsules, (N, I, E), with I = n_positions * B ordered (position, type); W: (B, E, J, D). Return u_hat,
    (N, J, I, D), as a view, and a cache.
    """
    (N, I, E), (B, _, J, D) = u.shape, W.shape
    u_hat, cache = votes_forward(u.reshape(N * n_positions, B, E), W, empty)
    return u_hat.transpose(0, 2, 1, 3).reshape(N, I, J, D).transpose(0, 2, 1, 3), (cache, u.shape, B)


def shared_votes_backward(du_hat, cache):
    """Return the gradients du, (N, I, E), and dW, (B, E, J, D), from du_hat, (N, J, I, D)."""
    votes_cache, shape, B = cache
    _, J, _, D = du_hat.shape
    by_position = du_hat.transpose(0, 2, 1, 3).reshape(-1, B, J, D).transpose(0, 2, 1, 3)
    du, dW = votes_backward(by_position, votes_cache)
    return du.reshape(shape), dW


# END SHARED votes with shared matrices -------------------------------------------------------------------------------


def uniform_routing_forward(u, W, empty=np.empty):
    """Compute the weighted sums of the votes in one routing iteration, s (N, J, D), without computing the votes.

    With uniform coupling coefficients, 1/J, a transformation matrix can be applied after the sum over the n capsules
    that share it (Eq. 2): s_j = 1/J sum_t W_tj (u_t1 + ... + u_tn), with the n capsules of type t.
    u: primary capsules, (N, I, E), I = n * B ordered (position, type). W: (B, E, J, D); with one matrix per position,
    every capsule counts as a type: B = I, n = 1.
    """
    (N, I, E), (B, _, J, D) = u.shape, W.shape
    sums = u.reshape(N, I // B, B * E).sum(1)
    return (np.matmul(sums, W.reshape(B * E, J * D)) / J).reshape(N, J, D), (u.shape, sums, W, empty)


def uniform_routing_backward(ds, cache):
    """Return the gradients du (N, I, E) and dW (B, E, J, D) for ds (N, J, D)."""
    (N, I, E), sums, W, empty = cache
    B, _, J, D = W.shape
    ds = (ds / J).reshape(N, J * D)
    du, dW = ds @ W.reshape(B * E, J * D).T, np.matmul(sums.T, ds, out=empty((B * E, J * D), ds.dtype))
    return np.broadcast_to(du[:, None], (N, I // B, B * E)).reshape(N, I, E), dW.reshape(W.shape)


# SHARED reconstruction: the decoder's masked input and its loss ------------------------------------------------------

def mask_forward(v, digits):
    """Set all capsules but one to zero, once per digit to reconstruct: the input of the decoder.

    v: (N, J, D). digits: the capsules that are kept, (N, R). Return (N*R, J*D) and a cache.
    """
    (N, J, D), R = v.shape, digits.shape[1]
    masked = np.zeros((N, R, J, D), v.dtype)
    n, r = np.arange(N)[:, None], np.arange(R)
    masked[n, r, digits] = v[n, digits]
    return masked.reshape(N * R, J * D), (v.shape, digits)


def mask_backward(dmasked, cache):
    """Return dv (N, J, D) from dmasked (N*R, J*D)."""
    (N, J, D), digits = cache
    n, r = np.arange(N)[:, None], np.arange(digits.shape[1])
    dv = np.zeros((N, J, D), dmasked.dtype)
    np.add.at(dv, (n, digits), dmasked.reshape(N, -1, J, D)[n, r, digits])
    return dv


def reconstruction_loss(recon, target):
    """Compute the squared error of the reconstructions, summed over pixels and digits and averaged over the batch.

    recon, target: (N, R, H, W). Return the loss, a float, and drecon, (N, R, H, W).
    """
    error = recon - target
    N = len(recon)
    return float(np.vdot(error, error)) / N, error * (2 / N)


# END SHARED reconstruction -------------------------------------------------------------------------------------------

# SHARED cross entropy: the loss of a softmax -------------------------------------------------------------------------

def cross_entropy(scores, labels):
    """Compute the cross-entropy loss, -log softmax(scores)[label], averaged over the batch.

    scores: (N, J); labels: (N,) int. Return the loss, a float, and dscores, (N, J).
    """
    rows = np.arange(len(labels))
    log_p = scores - scores.max(1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    dscores = np.exp(log_p)
    dscores[rows, labels] -= 1
    dscores /= len(labels)
    return -float(log_p[rows, labels].sum()) / len(labels), dscores


# END SHARED cross entropy --------------------------------------------------------------------------------------------


def classification_loss(out, labels, config):
    """Return the name and value of the classification loss, a mean over the batch, and its gradient, (N, 10).

    out: from forward. labels: (N,). The margin loss (Eq. 4) is that of the class capsules' lengths; the cross-entropy
    is that of a CNN's scores or, for capsules, of the logarithms of their lengths: p_j = |v_j| / sum_k |v_k|.
    The gradient is with respect to out["scores"].
    """
    if config.loss == "margin":
        return "margin", *margin_loss(out["scores"], np.eye(config.n_classes, dtype=out["scores"].dtype)[labels])
    if config.model not in CAPSULES:
        return "cross_entropy", *cross_entropy(out["scores"], labels)
    loss, dlogs = cross_entropy(np.log(out["scores"]), labels)
    return "cross_entropy", loss, dlogs / out["scores"]


# -------------------------------------------------------------- the networks

ROUTED, VECTORS = ("capsnet-shared", "capsnet"), ("vector-gap", "vector-gmp")       # with votes; ten pooled vectors
POOLED_CNNS = "cnn-gap", "cnn-gmp"                             # as large as capsnet-shared by the channels of Conv5
CAPSULES, CNNS = ROUTED + VECTORS, (*POOLED_CNNS, "cnn-dense", "cnn")
MODELS, PAPER_MODELS = CAPSULES + CNNS, ("capsnet", "cnn-dense", "cnn")     # all; those that small and paper have
E, D = 8, 16                       # dimensions of a primary and of a digit capsule
VOTES_GAIN = 16.0                  # initial variance of the sum of a digit's votes / variance of primary capsules
CONV3, CONV5 = 64, 128             # channels of the backbone's third and fourth convolutions, and of its fifth
SIZES = {                          # of each preset: types of primary capsules, units of the decoder's two hidden layers
    "deep": (16, 256, 512), "small": (8, 256, 512), "paper": (32, 512, 1024)}


def backbone(config, width):
    """Return the layers of config.model: of a capsule network up to its capsules, of a CNN up to its scores.

    Max pooling precedes the ReLU, with the same result and a quarter of the ReLU's work. PrimaryCaps has the squash in
    place of a ReLU. width: of a CNN, from matched_width.
    """
    c, relu, pool = config.conv1_channels, ("relu",), ("max_pool",)
    global_pool = ("global_avg_pool" if config.model in ("cnn-gap", "vector-gap") else "global_max_pool",)

    def conv(name, F, K=3, stride=1):
        return "conv2d", name, K, stride, F
    capsules = SIZES[config.preset][0] * E
    deep = (conv("conv1", c), relu, conv("conv2", c), pool, relu, conv("conv3", CONV3), relu, conv("conv4", CONV3),
            pool, relu, conv("conv5", width if config.model in POOLED_CNNS else CONV5), relu)
    if config.model == "cnn":                      # in the paper 256, 256 and 128 channels, 328 and 192 units
        layers = (conv("conv1", c, K=5), relu, conv("conv2", c, K=5), relu, conv("conv3", -(-c // 2), K=5), relu,
                  ("flatten",), ("linear", "fc1", width), relu, ("linear", "fc2", -(-width * 192 // 328)), relu,
                  ("dropout",), ("linear", "fc3", config.n_classes))
    elif config.model == "cnn-dense":
        layers = (*deep, ("flatten",), ("linear", "fc1", width), relu, ("dropout",),
                  ("linear", "fc2", config.n_classes))
    elif config.model in POOLED_CNNS:
        layers = (*deep, global_pool, ("linear", "fc1", config.n_classes))
    elif config.model in VECTORS:
        layers = (*deep, conv("primary", config.n_classes * D, K=1), global_pool)
    elif config.preset == "deep":
        layers = (*deep, conv("primary", capsules, K=1))
    else:                                                                               # the paper's two convolutions
        layers = conv("conv1", c, K=9), relu, conv("primary", capsules, K=9, stride=2)
    return with_norms(layers) if config.norm == "batch" else layers


def decoder(config):
    """Return the layers that map masked capsules, (N, J*D), to the reconstruction's pixels in (0, 1), (N, H*W)."""
    _, h1, h2 = SIZES[config.preset]
    return (("linear", "dec1", h1), ("relu",), ("linear", "dec2", h2), ("relu",),
            ("linear", "dec3", SIDES[config.task] ** 2), ("sigmoid",))


@functools.cache
def plan(config, width=0):
    """Return the backbone's layers and what follows from them, in a namespace.

    layers; infer_shapes' shapes, side, channels and along; centers, (positions, 2): (x, y) of the centers of the
    receptive fields, -1 to 1 over the image; n_dropped: units that dropout acts on. width: 0 for matched_width's.
    """
    layers = backbone(config, width or matched_width(config))
    net = infer_shapes(layers, SIDES[config.task] + 2 * config.padding, 1, config.padding, rows=True)
    *_, n_dropped, _ = [math.prod(shape[:-1]) for shape in net.shapes.values()]         # inputs of the last layer
    return SimpleNamespace(layers=layers, centers=receptive_field_centers(net.along), n_dropped=n_dropped, **vars(net))


def param_shapes(config, width=0):
    """Return {name: shape} of config.model's parameters, in the order in which init_params draws them."""
    net, J, B = plan(config, width), config.n_classes, SIZES[config.preset][0]
    shapes = dict(net.shapes)
    if config.model in ROUTED:
        shapes["W"] = (B * (len(net.centers) if config.model == "capsnet" else 1), E, J, D)        # (I or B, E, J, D)
    shapes |= {"coordinate_W": (2, J, D)} if config.model == "capsnet-shared" else {}
    return shapes | (infer_shapes(decoder(config), 1, J * D).shapes if config.recon_weight else {})


@functools.cache
def matched_width(config):
    """Return the width at which a CNN has about as many parameters as the preset's capsule network without decoder.

    The width is the number of channels of Conv5 of POOLED_CNNS, which are matched to capsnet-shared, and of units of
    the first hidden layer of cnn-dense and cnn, which are matched to capsnet with their padding. Return 0 for
    capsules, and config.width where it is set.
    """
    if config.width or config.model in CAPSULES:
        return config.width

    def size(width, config=config):
        return sum(math.prod(shape) for shape in param_shapes(config, width).values())
    reference = "capsnet-shared" if config.model in POOLED_CNNS else "capsnet"
    target = size(0, dataclasses.replace(config, model=reference, conv1_channels=None, recon_weight=0.0))
    above = bisect_left(range(1, 4096), target, key=size) + 1             # the least width with at least target weights
    return min((max(1, above - 1), above), key=lambda width: abs(size(width) - target))


def init_params(config):
    """Return the initial parameters, {name: float32 array}, drawn by config.seed.

    Weights are normal with variance gain / fan-in: gain 2 (He) where a ReLU follows, VOTES_GAIN for the transformation
    matrices, 1 elsewhere. Biases and betas are 0, gammas 1.
    """
    rng, params, shapes = rng_for(config.seed, "init"), {}, param_shapes(config)
    last = [name for name in shapes if name.endswith("_w")][-1]                         # outputs scores, or pixels
    votes = E * len(plan(config).centers) * SIZES[config.preset][0]             # a digit capsule sums all these numbers
    for name, shape in shapes.items():          # dec1: all capsules but one are masked, so that D inputs are not zero
        fan_in = {"W": votes, "coordinate_W": votes, "dec1_w": D}.get(name, math.prod(shape[:-1]))
        gain = {"W": VOTES_GAIN, "coordinate_W": VOTES_GAIN, "primary_w": 1, last: 1}.get(name, 2)
        if name.endswith(("_b", "_gamma", "_beta")):
            params[name] = np.full(shape, name.endswith("_gamma"), np.float32)
        else:
            params[name] = rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(gain / fan_in))
    return params


def forward(params, images, config, digits=None, empty=np.empty, dropout_mask=None, statistics=None):
    """Compute the scores of a network and, for capsules, the capsules and the reconstruction.

    images: (N, side, side) in [0, 1]. digits: (N, 1), the digit whose capsule is decoded; None for the longest capsule.
    dropout_mask: (N, units), of a CNN; None for no dropout. statistics: None in evaluation, in training a dict to which
    the batch statistics are added, see layers_forward.
    Return out and a cache for backward. out: scores (N, 10), which are lengths for capsules; for capsules also v
    (N, 10, D) and, with a decoder, recon (N, 1, side, side); for models with routing also the primary capsules u
    (N, I, E), I ordered (row, column, type).
    """
    p = config.padding
    x = im2col_rows(np.pad(images, ((0, 0), (p, p), (p, p))), params["conv1_w"].shape[1])
    layers = [(*layer, dropout_mask) if layer == ("dropout",) else layer for layer in plan(config).layers]
    x, layers_cache = layers_forward(params, x, layers, empty, statistics)
    if config.model not in CAPSULES:
        return {"scores": x}, SimpleNamespace(layers=layers_cache, capsules=None)
    v, primary, capsules_cache = capsules_forward(params, x, config, empty)
    lengths, lengths_cache = lengths_forward(v)
    digits = lengths.argmax(1)[:, None] if digits is None else digits
    out = {"scores": lengths, "v": v, **primary}
    cache = SimpleNamespace(layers=layers_cache, capsules=capsules_cache, lengths=lengths_cache, decoder=None)
    if config.recon_weight:
        masked, cache.mask = mask_forward(v, digits)
        pixels, cache.decoder = layers_forward(params, masked, decoder(config), empty)
        out["recon"] = pixels.reshape(len(v), -1, *images.shape[1:])
    return out, cache


def backward(dscores, drecon, cache, config, need_dx=False):
    """Return the gradients of all parameters, {name: array}, and of im2col_rows' output (None unless need_dx).

    dscores: (N, 10), from classification_loss. drecon: (N, 1, side, side), from reconstruction_loss; None without a
    decoder.
    """
    grads, dx = {}, dscores
    if cache.capsules:
        dv = lengths_backward(dscores, cache.lengths)
        if cache.decoder:
            dmasked = layers_backward(drecon.reshape(len(drecon), -1), cache.decoder, decoder(config), grads)
            dv = dv + mask_backward(dmasked, cache.mask)
        dx = capsules_backward(dv, cache.capsules, config, grads)
    return grads, layers_backward(dx, cache.layers, plan(config).layers, grads, need_dx)


PLAIN = (lambda s: (s, None)), (lambda dv, cache: dv)
RELU = (lambda s: relu_forward(s)), (lambda dv, cache: relu_backward(dv, cache))      # lambdas: both are defined below
SQUASHES = {                       # for each --squash: (forward, backward) of primary and of digit capsules
    "all": (SQUASH, SQUASH), "last": (PLAIN, SQUASH), "none": (PLAIN, PLAIN), "relu": (RELU, PLAIN)}


def capsules_forward(params, x, config, empty):
    """Compute the digit capsules, v (N, J, D), from the backbone's output: squash, votes and routing.

    x: (N, side, side, C), or (N, C) for class vectors, which are pooled already and only squashed.
    Return v, {"u": primary capsules (N, I, E)} (empty for class vectors) and a cache for capsules_backward.
    """
    N, (first, last) = len(x), SQUASHES[config.squash]
    if config.model in VECTORS:
        v, routing_cache = last[0](x.reshape(N, -1, D))
        return v, {}, SimpleNamespace(routing=routing_cache, x_shape=x.shape)
    u, primary_cache = first[0](x.reshape(N, -1, E))                                    # (N, I, E)
    inputs, coordinates_cache, W, centers = u, None, params["W"], plan(config).centers
    if "coordinate_W" in params:
        inputs, coordinates_cache = add_coordinates_forward(u, centers)                 # (N, I, E + 2)
        W = np.concatenate([W, np.broadcast_to(params["coordinate_W"], (len(W), *params["coordinate_W"].shape))], 1)
    if config.routing_iters == 1:
        s, votes_cache = uniform_routing_forward(inputs, W, empty)
        v, routing_cache = last[0](s)
    else:
        u_hat, votes_cache = (votes_forward(inputs, W, empty) if config.model == "capsnet" else
                              shared_votes_forward(inputs, W, len(centers), empty))     # (N, J, I, D)
        v, routing_cache = routing_forward(u_hat, config.routing_iters, empty, nonlinearity=last)
    return v, {"u": u}, SimpleNamespace(primary=primary_cache, coordinates=coordinates_cache, votes=votes_cache,
                                        routing=routing_cache, x_shape=x.shape)


def capsules_backward(dv, cache, config, grads):
    """Return dx, with the shape of the backbone's output, for dv (N, J, D). Add the parameters' gradients to grads."""
    (_, first_backward), (_, last_backward) = SQUASHES[config.squash]
    if config.model in VECTORS:
        return last_backward(dv, cache.routing).reshape(cache.x_shape)
    if config.routing_iters == 1:
        du, dW = uniform_routing_backward(last_backward(dv, cache.routing), cache.votes)
    else:
        dvotes = votes_backward if config.model == "capsnet" else shared_votes_backward
        du, dW = dvotes(routing_backward(dv, cache.routing), cache.votes)
    grads["W"] = dW[:, :E]
    if cache.coordinates:
        grads["coordinate_W"] = dW[:, E:].sum(0)
        du = add_coordinates_backward(du, cache.coordinates)
    return first_backward(du, cache.primary).reshape(cache.x_shape)


# SHARED rows: the first convolution, of images with one channel ------------------------------------------------------

def im2col_rows(x, K):
    """Return K shifted copies of the rows of one-channel images x (N, H, W) as channels, (N, H-K+1, W, K).

    With them, a KxK convolution of one channel is a 1xK convolution of K channels: one GEMM with an inner dimension of
    K*K instead of K GEMMs with an inner dimension of K.
    """
    return np.ascontiguousarray(sliding_window_view(x, K, axis=1))

# END SHARED rows -----------------------------------------------------------------------------------------------------


def global_max_pool_forward(x):
    """Compute the maximum of each channel over all positions, y (N, C). x: (N, H, W, C)."""
    rows = x.reshape(len(x), -1, x.shape[-1])                                           # (N, H*W, C)
    argmax = rows.argmax(1)[:, None]                                                    # the first of equal maxima
    return np.take_along_axis(rows, argmax, 1)[:, 0], (x.shape, argmax)


def global_max_pool_backward(dy, cache):
    """Return dx, (N, H, W, C), for dy, (N, C): the position of the maximum gets the gradient."""
    (N, H, W, C), argmax = cache
    dx = np.zeros((N, H * W, C), dy.dtype)
    np.put_along_axis(dx, argmax, dy[:, None], 1)
    return dx.reshape(N, H, W, C)


def loss_and_grads(params, batch, config, empty=np.empty, batch_fraction=1.0):
    """Compute the losses and gradients of one batch, or of one shard of a batch; no argument is changed.

    batch: from to_batch. empty: with an Arena, the gradients are valid until its rewind(). batch_fraction: the shard's
    fraction of its batch, by which the losses and gradients, means over the shard, are multiplied.
    Return terms, grads, {name: array} like params, and the statistics of the batch normalizations. terms: loss = margin
    (or cross_entropy) + recon_weight * recon, recon being the summed squared error; hits, the number of correctly
    classified digits.
    """
    statistics = {}
    out, cache = forward(params, batch["images"], config, batch["labels"][:, None], empty, batch.get("dropout_mask"),
                         statistics)
    name, loss, dscores = classification_loss(out, batch["labels"], config)
    terms, drecon = {"loss": loss * batch_fraction, name: loss * batch_fraction}, None
    if "recon" in out:
        recon, drecon = reconstruction_loss(out["recon"], batch["images"][:, None])
        terms |= {"loss": terms["loss"] + config.recon_weight * recon * batch_fraction, "recon": recon * batch_fraction}
        drecon *= config.recon_weight * batch_fraction
    grads, _ = backward(dscores * batch_fraction, drecon, cache, config)
    return terms | {"hits": int((out["scores"].argmax(1) == batch["labels"]).sum())}, grads, statistics


def forward_rows(params, samples, rows, config, empty, decode="labels"):
    """Return forward's scores, v and recon for some rows of a dict of samples, {name: array with a row per sample}.

    decode: "labels" decodes the capsule of the true digit, "longest" the longest capsule.
    """
    batch = to_batch(samples, rows, params_dtype(params))
    out, _ = forward(params, batch["images"], config, batch["labels"][:, None] if decode == "labels" else None, empty)
    return {name: out[name] for name in ("scores", "v", "recon") if name in out}


# ============================================================== evaluation, report

def evaluate(params, chunks, config, runner):
    """Return the accuracy and the losses of a network over a stream of digits, as a dict.

    params: weights and running statistics. chunks: dicts of digits, from stream_digits.
    The dict has n, hits (correctly classified digits), accuracy, correct (n,) bool, loss, margin or cross_entropy,
    per_class (the accuracy of each class, nan for a class without digits) and, with a decoder, recon_mse (per pixel).
    """
    correct, labels, sums = [], [], np.zeros(2)
    for chunk in chunks:
        out, target = runner.forward(params, chunk, config), chunk["images"][:, None]
        correct.append(out["scores"].argmax(1) == chunk["labels"])
        labels.append(chunk["labels"])
        recon = reconstruction_loss(out["recon"], target.astype(out["recon"].dtype) / 255)[0] if "recon" in out else 0.0
        name, loss, _ = classification_loss(out, chunk["labels"], config)
        sums += np.array([loss, recon]) * len(chunk["labels"])
    correct, labels = np.concatenate(correct), np.concatenate(labels)
    (loss, recon), by_class = sums / len(correct), [correct[labels == digit] for digit in range(config.n_classes)]
    return {"n": len(correct), "hits": int(correct.sum()), "accuracy": correct.mean(), "correct": correct,
            "loss": loss + config.recon_weight * recon, name: loss,
            "per_class": [float(each.mean()) if len(each) else math.nan for each in by_class]} | (
                {"recon_mse": recon / SIDES[config.task] ** 2} if config.recon_weight else {})


EPOCH_METRICS = ("loss", "margin", "cross_entropy", "recon_mse", "accuracy")            # of evaluate, in the history


def evaluate_test_sets(params, digits, config, runner):
    """Return {result key: evaluate's dict} of every test set of the task."""
    return {key: evaluate(params, stream_digits(digits, config, kind), config, runner)
            for key, kind, _ in test_sets(config)}


def announce(run, digits):
    """Print the data, the network and the settings at the start of a run"""
    config, (_, labels), shift = run.config, select_training_digits(digits, run.config), max_shift(run.config)
    run.progress.say(
        f"data       {len(labels):,} for training, {data_name(digits['source'])}, translated "
        f"{'to any position' if shift is None else f'by up to {shift} px'}\n"
        f"network    {config.model}, preset {config.preset}: {n_params(run.params):,} parameters\n"
        f"training   {counted(config.n_epochs, 'epoch')} of {config.n_train:,} images, batch size {config.batch_size}, "
        f"learning rate {config.lr:g}, Muon step {config.muon:g}, {config.loss} loss, seed {config.seed}, threads "
        f"{run.runner.threads}"
        + f"; resuming at step {run.step} of {run.n_steps}" * (run.step > 0))


def test_result(config, params, history, tests, network=None):
    """Return the dict that --out-json writes. network: the one that was loaded, if it was not trained here"""
    metrics = {"hit_bits": {key: pack_bits(test["correct"]) for key, test in tests.items()}}
    for key, test in tests.items():
        n = min(test["n"], MNIST.files["test", "labels"][2][0])       # affNIST's files hold each digit in 32 variants
        metrics |= {f"{key}_accuracy": test["accuracy"], f"{key}_hits": test["hits"], f"{key}_n": test["n"],
                    f"{key}_accuracy_ci95": wilson_interval(test["accuracy"] * n, n),
                    f"{key}_per_class": test["per_class"], f"{key}_recon_mse": test.get("recon_mse")}
    return make_result(config, params, history, metrics) | (
        {"history": {}, "loaded": network.file} if network else {})                     # that file has its history


COLUMNS = {"familiar": "as in training", "any_position": "any position", "centered": "affine, centered",
           "affine": "affine, any position", "real_affine": "affNIST's own digits"}


def comparison_columns(result, tests):
    """Return the columns of a comparison, {metric: (accuracy, 95% interval from the test images)}"""
    return {COLUMNS.get(key, key): (test["accuracy"], result[f"{key}_accuracy_ci95"]) for key, test in tests.items()}


def prediction_rows(params, digits, config, runner):
    """Yield the rows of --predictions: a header, then for each test image its class, that predicted, and the scores"""
    yield ["test", "index", "true", "predicted", *(
        f"{'length' if config.model in CAPSULES else 'score'}_{j}" for j in range(config.n_classes))]
    for key, kind, _ in test_sets(config):
        count = itertools.count()
        for chunk in stream_digits(digits, config, kind):
            scores = runner.forward(params, chunk, config)["scores"]
            for true, row in zip(chunk["labels"], scores):
                yield [key, next(count), true, row.argmax(), *(f"{score:.4f}" for score in row)]


def remark(configs, source):
    """Return what the paper reports, to be read beside a comparison; of other images than digits nothing"""
    return "" if source not in DIGIT_NAMES else (
        "The paper, on MNIST: error 0.25% for its CapsNet, 0.39% for its CNN." if configs[0].task == "mnist" else
        "The paper, both networks trained to 99.2% on translated digits: accuracy on affNIST 79% for its CapsNet, "
        "66% for its CNN, which had max pooling.")


LOSSES = {"margin": "margin loss", "cross_entropy": "cross-entropy loss", "recon_mse": "reconstruction MSE per pixel"}


def report(config, results, tests, say):
    """Print the metrics of all test sets. results: of test_result"""
    say(f"\n{data_name(results['source'])}{', held-out training images' * (config.eval_split == 'val')}")
    for key, _, words in test_sets(config):
        (low, high), test = results[f"{key}_accuracy_ci95"], tests[key]
        say(f"  {words:31} accuracy {test['accuracy']:.4f} of {test['n']:,}   95% CI {low:.4f} to {high:.4f}   "
            + ", ".join(f"{loss} {test[name]:.4f}" for name, loss in LOSSES.items() if name in test))
    say(training_time(results))


# ============================================================== settings

# SHARED settings: those of every experiment --------------------------------------------------------------------------

@dataclass(frozen=True)
class Settings:
    """Settings that every experiment has. A setting's value is what the user gave, else its default; a default of None
    is filled in by preset_defaults(). Config adds n_epochs and lr, which have no common default."""
    seed: int = option(0, "seed of initialization, sampling and augmentation; results are bitwise identical for the "
                       "same seed, machine and NumPy version", "training", low=0, high=2 ** 32 - 1)
    batch_size: int = option(32, "samples per batch; a batch is computed in shards of 16, one per thread at a time, so "
                             "that at most N/16 threads work: two with 32, four with 64", "training", low=1, high=4096)
    warmup: int = option(0, "steps of linear learning-rate warm-up", "training", low=0, high=100_000)
    lr_schedule: str = option("cosine", "learning-rate schedule after the warm-up; cosine: decay to 0", "training",
                              choices=("cosine", "constant"))
    threads: int = option(0, "worker threads; 0: one per core. Results are bitwise identical for any number", "run",
                          low=0, high=256, runtime=True)
    checkpoint: str = option("", "save weights, optimizer state and history to this .npz after every epoch; run the "
                             "same command again to resume", "run", runtime=True)
    out_json: str = option("", "write settings and results to this JSON file; -: to standard output", "run",
                           runtime=True)
    run_dir: str = option("", "folder for the weights, settings, metrics and history of this run (default: a folder "
                          "below runs/, named after the model, the preset, the seed and a digest of other settings)",
                          "run", runtime=True, metavar="DIR")
    quiet: bool = option(False, "print only errors", "run", runtime=True)

    def __post_init__(self):
        for name, value in self.preset_defaults().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def preset_defaults(self):
        """Return {setting: default} by the rules of DEFAULTS that hold for this Config; later rules override earlier
        ones. A rule is ({setting: values}, {setting: default}); a default may be a function of {setting: value}."""
        defaults = {}
        for condition, values in DEFAULTS:
            known = defaults | {f.name: getattr(self, f.name) for f in dataclasses.fields(self)
                                if getattr(self, f.name) is not None}
            if all(known.get(name) in allowed for name, allowed in condition.items()):
                defaults |= {name: value(known) if callable(value) else value for name, value in values.items()}
        return defaults

# END SHARED settings -------------------------------------------------------------------------------------------------

ROUTING, ONLY_CAPSULES, PAPER = {"model": ROUTED}, {"model": CAPSULES}, ("small", "paper")


def twice_lr(settings):
    """2 x --lr, at most 1"""
    return min(2 * settings["lr"], 1.0)


DEFAULTS = (  # of settings that are not given: conditions, values; later rules override earlier ones
    ({}, {"train_shift": "6", "conv1_channels": 16, "norm": "batch", "lr": 0.01, "warmup": 200, "loss": "margin",
          "recon_weight": 0.0005, "routing_iters": 1, "padding": 4, "dropout": 0.0}),
    ({"model": CNNS}, {"loss": "cross-entropy", "recon_weight": 0.0}),
    ({"model": ("capsnet",)}, {"routing_iters": 3}),
    ({"model": (*VECTORS, *CNNS)}, {"padding": 8}),
    ({"preset": PAPER}, {"padding": 0, "norm": "none", "lr": 0.001, "warmup": 0}),
    ({"preset": ("small",), "model": ("capsnet",)}, {"conv1_channels": 64}),
    ({"preset": ("paper",), "model": ("capsnet", "cnn")}, {"conv1_channels": 256}),
    ({"preset": PAPER, "model": ("cnn-dense", "cnn")}, {"dropout": 0.5}),
    ({"task": ("mnist",)}, {"train_shift": "2", "padding": 0}),
    ({"norm": ("batch",)}, {"muon": twice_lr}),
    ({"norm": ("none",)}, {"muon": 0.0}))
MODEL_HELP = {
    "capsnet": "primary capsules, one transformation matrix per position, dynamic routing",
    "capsnet-shared": "as capsnet, but with coordinate addition and matrices shared across positions; by default with "
                      "one iteration, that is without routing",
    "vector-gap": "ten class vectors per position from the last convolution, averaged over positions and squashed; no "
                  "primary capsules, no routing",
    "vector-gmp": "as vector-gap, but with the maximum over positions of each element",
    "cnn-gap": "CNN with global average pooling", "cnn-gmp": "CNN with global max pooling",
    "cnn-dense": "CNN with one fully connected hidden layer",
    "cnn": "the plain CNN baseline, the paper's MNIST CNN: three convolutions, two fully connected hidden layers, "
           "sized to have as many parameters as capsnet"}
PRESETS = {
    "deep": "five or six convolutions (of cnn three), each with batch normalization; for all models",
    "small": "the paper's networks with a quarter of capsnet's channels, without normalization",
    "paper": "the paper's networks at full width"}


@dataclass(frozen=True)
class Config(Settings):
    """All settings of a run. Names, defaults and help texts of the command-line flags come from here."""
    n_epochs: int = option(4, "training epochs", "training", low=1, high=100_000)
    n_train: int = option(12000, "training samples per epoch; all training digits in random order, each newly "
                          "translated", "data", low=1, high=10_000_000)
    n_per_class: int = option(0, "training digits per class, drawn by the seed; 0: all", "data", low=0, high=10_000)
    n_val: int = option(5000, "validation samples; held-out training images, each with one fixed translation", "data",
                        low=1, high=5000)
    n_test: int = option(0, "test samples; the first N test images, 0: all. affNIST's own files are used whole", "data",
                         low=0, high=10_000, runtime=True)
    eval_split: str = option("test", "images that the test sets are made of; val: held-out training images", "data",
                             choices=("test", "val"), runtime=True)
    task: str = option("affnist", "affnist: digits on a 40x40 px canvas, trained on translated digits, tested on "
                       "translated ones and on affine ones (rotated by up to 20 degrees, sheared by up to 0.2, scaled "
                       "by 0.8 to 1.2 per axis); mnist: 28x28 px, trained on translated digits, tested on MNIST's test "
                       "images as they are", "data", choices=tuple(SIDES))
    train_shift: str = option(None, "translation of training digits, by -N to N px on each axis (6: the 28x28 image at "
                              "any position on the canvas, as in the paper); full: any position at which all of the "
                              "digit's ink is on the canvas", "data", metavar="N|full")
    affnist_dir: str = option("", "folder with affNIST's test_batches; tests on its files, too (needs SciPy)", "data",
                              runtime=True, metavar="DIR", only={"task": ("affnist",)})
    digits: str = option("auto", "digits to use; auto: MNIST from --data-dir, the cache or a download, else synthetic "
                         "digits, drawn by this script", "data", choices=("auto", "mnist", "synthetic"), runtime=True)
    data_dir: str = option("", "folder with the four idx files, raw or .gz, of MNIST, Fashion-MNIST, KMNIST, EMNIST "
                           "(DIR/emnist-SPLIT) or your own images; if not given, MNIST from $MNIST_DIR, then "
                           "~/.cache/hinton-mnist, then download", "data", runtime=True, metavar="DIR",
                           aliases={"mnist_dir": {}})
    transpose: bool = option(False, "exchange rows and columns of the images of --data-dir (done with EMNIST's anyway)",
                             "data", runtime=True)
    lr: float = option(None, "learning rate of Adam, reached after --warmup steps", "training", above=0)
    warmup: int = option(None, "steps of linear learning-rate warm-up", "training", low=0, high=100_000)
    muon: float = option(None, "step size of Muon (orthogonalized momentum) for the kernels of batch-normalized "
                         "convolutions, relative to the kernel's Frobenius norm; 0: Adam for all weights",
                         "training", low=0, high=1)
    loss: str = option(None, "classification loss; margin: of capsule lengths; cross-entropy: -log(|v_t| / sum_j "
                       "|v_j|) of capsule lengths, t being the true class", "training",
                       choices=("margin", "cross-entropy"), only=ONLY_CAPSULES)
    recon_weight: float = option(None, "weight of the reconstruction loss; its squared error is summed over pixels; 0: "
                                 "no decoder", "training", low=0, only=ONLY_CAPSULES)
    stop_at: float = option(0.0, "stop when validation accuracy, checked after every epoch, reaches X (0 to 1), to "
                            "compare networks at equal accuracy as the paper does; 0: train all epochs", "training",
                            low=0, high=1)
    model: str = option("capsnet-shared", describe(MODEL_HELP), "network", choices=MODELS)
    preset: str = option("deep", describe(PRESETS), "network", choices=tuple(PRESETS), only={"model": PAPER_MODELS})
    norm: str = option(None, "normalization after every convolution, PrimaryCaps included; batch: batch normalization "
                       "over shards of 16 samples (ghost batch normalization)", "network", choices=("batch", "none"))
    squash: str = option("all", "nonlinearities of primary and class capsules; all: squash both; last: squash only "
                         "class capsules, in every routing iteration; none: neither; relu: ReLU of primary capsules, "
                         "class capsules as they are. vector-gap and vector-gmp have class capsules only", "network",
                         choices=tuple(SQUASHES), only=ONLY_CAPSULES)
    padding: int = option(None, "px of background around the canvas", "network", low=0, high=20)
    conv1_channels: int = option(None, "channels of the first convolution; the second has as many, the third of cnn "
                                 "half as many", "network", low=1, high=1024)
    routing_iters: int = option(None, "routing iterations; 1: uniform coupling coefficients, no routing", "network",
                                low=1, high=50, only=ROUTING)
    dropout: float = None          # no flags: filled in from DEFAULTS, or set by the probe script
    width: int = 0
    n_classes: int = N_CLASSES     # of the data


DEFAULT_MODELS = {None: ("capsnet-shared",)}                       # trained if --model is not given
PRETRAINED = (Path(__file__).resolve().with_name("weights") / "affnist_capsnet-shared.npz",)
SOURCE_SETTING = "digits"                                           # the setting that says where the data come from
EVAL_SETTINGS = ("seed", "routing_iters")                          # may differ between training and evaluation
TEST_SETTINGS = ("digits", "task", "n_test", "eval_split")          # equal in all networks of a comparison
RENAMED = {                        # old names, which are refused with the new ones
    "--model caps": "--model capsnet", "--model shared": "--model capsnet-shared",
    "--model vectors": "--model vector-gap", "--model vectors-max": "--model vector-gmp",
    "--model gap": "--model cnn-gap", "--model max": "--model cnn-gmp", "--model dense": "--model cnn-dense",
    "--loss xent": "--loss cross-entropy", "--tests-on": "--eval-split", "--task anywhere": "--train-shift full"}


def check_config(config):
    """Raise InputError for settings out of range, or that contradict each other"""
    check_options(config)
    check_muon(config)
    most = (SIDES[config.task] - INK) // 2
    if config.train_shift != "full" and not (str(config.train_shift).isdecimal() and int(config.train_shift) <= most):
        raise InputError(f"--train-shift {config.train_shift}: must be a whole number from 0 to {most}, or full")
    if config.batch_size > config.n_train:
        raise InputError(f"--batch-size {config.batch_size} exceeds the {config.n_train} training digits of an epoch. "
                         "Lower --batch-size or raise --n-train")
    if config.eval_split == "val" and config.n_test > MNIST.n_val:
        raise InputError(f"--n-test {config.n_test}: --eval-split val has {MNIST.n_val} digits. Lower --n-test")


# ============================================================== shared blocks: the same code in other experiments

# SHARED mnist: the four files of MNIST, their cache and download, and synthetic digits as a fallback -----------------

MNIST = SimpleNamespace(
    name="MNIST", source="mnist", variable="MNIST_DIR", cache="~/.cache/hinton-mnist",
    n_val=5000,                                                         # the last training images
    mirrors=("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
    files={  # (split, kind): file name, magic number, shape, SHA-256 of the decompressed bytes
        ("train", "images"): ("train-images-idx3-ubyte", 2051, (60000, 28, 28),
                              "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        ("train", "labels"): ("train-labels-idx1-ubyte", 2049, (60000,),
                              "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ("test", "images"): ("t10k-images-idx3-ubyte", 2051, (10000, 28, 28),
                             "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        ("test", "labels"): ("t10k-labels-idx1-ubyte", 2049, (10000,),
                             "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2")})
N_SYNTHETIC = {"train": 20000, "val": 2500, "test": 5000}
DIGIT_NAMES = {"mnist": "MNIST digits", "synthetic": "SYNTHETIC digits"}         # in all output and figures


class DataNotFound(InputError):
    """Raised when a data set is not on this machine and cannot be downloaded."""


def parse_idx(raw, name, hint, spec=None):
    """Return the array in the bytes of one idx file of uint8 values, and the SHA-256 of its decompressed bytes.

    raw: the file's content, gzip-compressed or not. name, hint: for messages. spec: magic number, shape and SHA-256
    that the file must have. Raise InputError, naming the file and the fault, if it is damaged or another file.
    """
    hint = f"; {hint}" * bool(hint)
    try:
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{name}: corrupt or truncated gzip ({error}){hint}") from None
    start = 4 * (1 + raw[3]) if raw[:3] == b"\0\0\x08" and len(raw) > 3 else 0
    if not start or len(raw) < start or spec and raw[3] != len(spec[1]):
        raise InputError(f"{name}: not the idx file expected (it begins with {raw[:4].hex() or 'nothing'}){hint}")
    shape = tuple(np.frombuffer(raw[4:start], ">u4").tolist())
    if len(raw) != start + math.prod(shape) or spec and shape != spec[1]:
        raise InputError(f"{name}: says shape {shape} and holds {len(raw) - start} values, should be "
                         f"{spec[1] if spec else 'as many as it says'}{hint}")
    digest = hashlib.sha256(raw).hexdigest()
    if spec and digest != spec[2]:
        raise InputError(f"{name}: its SHA-256 is another, the file is damaged or of another data set{hint}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape), digest


def download_idx(data_set, name, spec, folder, timeout, say):
    """Download one file of a data set into folder, from the first mirror that has it complete, and return its path.

    spec: magic number, shape and SHA-256, for parse_idx: the content is verified before the file appears in folder.
    timeout: in seconds, for each mirror. Raise DataNotFound when no mirror has the file or folder is not writable.
    """
    faults, hint = [], f"pass a folder with {data_set.name}'s four files as --data-dir, or use --digits synthetic"
    for mirror in data_set.mirrors:
        try:
            say(f"downloading {mirror}{name}.gz")
            with urllib.request.urlopen(mirror + name + ".gz", timeout=timeout) as reply:
                raw = reply.read()
            parse_idx(raw, mirror + name + ".gz", "", spec)
        except (OSError, ValueError, http.client.HTTPException, InputError) as error:
            faults.append(f"{mirror.split('/')[2] or mirror}: {' '.join(str(error).split())}")
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / (name + ".gz"), lambda file, raw=raw: file.write(raw))
        except (OSError, InputError) as error:
            raise DataNotFound(f"the cache {folder} cannot be written ({error}); make room there, or {hint}") from None
        return folder / (name + ".gz")
    raise DataNotFound(f"could not download {name}.gz ({'; '.join(faults)}); check the network, or {hint}")


def load_idx(data_set, timeout, say):
    """Load a data set's four idx files from its cache, into which missing ones are downloaded: a dict as load_digits
    returns it. timeout: of a download, in seconds. Raise InputError when a file is damaged; DataNotFound when a
    download fails."""
    folder, arrays = home_path(data_set.cache), {}
    for key, (name, *spec) in data_set.files.items():
        path = next((p for p in (folder / name, folder / (name + ".gz")) if p.exists()), None)
        path = path or download_idx(data_set, name, spec, folder, timeout, say)
        arrays[key], _ = parse_idx(path.read_bytes(), path, "delete it to have it downloaded again", spec)
    return official_splits(data_set, arrays)


def official_splits(data_set, arrays):
    """Return load_digits' dict of a data set's four arrays, {(split, kind): array}; its last n_val training images are
    for validation"""
    images, labels, n = arrays["train", "images"], arrays["train", "labels"], -data_set.n_val
    return {"source": data_set.source, "train": (images[:n], labels[:n]), "val": (images[n:], labels[n:]),
            "test": (arrays["test", "images"], arrays["test", "labels"])}


IDX_NAME = r"(.*?[-.]?)(train|t10k|test)[-.](images|labels)[-.]idx[13][-.]ubyte(?:\.gz)?"


def load_data_dir(flag, place, transpose, say, data_set=MNIST):
    """Load the four idx files of any data set: a dict as load_digits returns it, with n_classes and, from a labels.txt,
    names.

    flag: what named the place, for messages. place: a folder, or FOLDER/PREFIX of the files' names where a folder holds
    several data sets. Files with MNIST's SHA-256 are MNIST. EMNIST, recognized by its names, is stored transposed.
    Labels may begin at 1. The validation images are a twelfth of each class of the training images, drawn at random,
    always the same.
    """
    where = home_path(place)
    folder, prefix = (where, None) if where.is_dir() else (where.parent, where.name)
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = re.fullmatch(IDX_NAME, path.name)
        if match and prefix in (None, match[1].strip("-.")):
            part = "train" if match[2] == "train" else "test", match[3]
            found.setdefault(match[1], {}).setdefault(part, []).append(path)
    complete = {name: files for name, files in found.items() if len(files) == 4}
    if len(complete) != 1:
        several = f"several data sets ({', '.join(name.strip('-.') for name in complete)}). Name one: {folder}/PREFIX"
        fault = several if complete else "no such folder. Give another" if not where.is_dir() and not found else (
            "not all four idx files: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
            "t10k-labels-idx1-ubyte, raw or .gz. Put them there")
        raise InputError(f"{flag} {place}: {fault}")
    (prefix, files), = complete.items()
    arrays, digests = {}, {}
    for key, paths in files.items():
        (arrays[key], digests[key]), *others = (parse_idx(path.read_bytes(), path, "get it again") for path in paths)
        if any(digest != digests[key] for _, digest in others):
            raise InputError(f"{paths[0]} and {paths[1]} differ. Remove one of them")
    same = [digests[key] == data_set.files[key][3] for key in files]
    if all(same):
        return official_splits(data_set, arrays)
    if sum(same) == 3:
        raise InputError(f"{files[list(files)[same.index(False)]][0]}: damaged, since the three other files are "
                         f"{data_set.name}'s; get the file again")
    labels = np.concatenate([arrays[split, "labels"].ravel() for split in ("train", "test")])
    first = int(labels.min(initial=0) if 0 in labels else 1)
    name, digest = prefix.strip("-.") or folder.resolve().name, "".join(digests.values()) + "T" * transpose
    digest = hashlib.sha256(digest.encode())
    data = {"source": f"{name}-{digest.hexdigest()[:8]}", "n_classes": int(labels.max(initial=0)) + 1 - first}
    for split in ("train", "test"):
        images = arrays[split, "images"]
        images = images.swapaxes(1, 2) if images.ndim == 3 and (transpose or "emnist" in prefix.lower()) else images
        data[split] = images, arrays[split, "labels"] - np.uint8(first)
        check_images(f"{flag} {place}, {files[split, 'images'][0].name} and its labels", *data[split], (28, 28), 62)
    if (folder / "labels.txt").is_file():
        data["names"] = (folder / "labels.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        if len(data["names"]) < data["n_classes"]:
            raise InputError(f"{folder / 'labels.txt'}: {len(data['names'])} lines for {data['n_classes']} classes. "
                             "Write the name of each class on a line of its own, or remove the file")
    (images, labels), rng = data["train"], np.random.default_rng(0)
    order = rng.permutation(len(labels))
    rank = np.zeros(len(labels), np.int64)                                              # of an image in its class
    for label in range(data["n_classes"]):
        rows = order[labels[order] == label]
        rank[rows] = np.arange(len(rows)) * 12 // max(1, len(rows))
    data |= {"train": (images[rank > 0], labels[rank > 0]), "val": (images[rank == 0], labels[rank == 0])}
    say(f"{name}: {data['n_classes']} classes, {len(labels):,} + {len(data['test'][1]):,} images; not {data_set.name}: "
        "the results in this repository do not apply")
    return data


def data_name(source):
    """Return what a data set is called in all output and figures; without the digest of its files"""
    return DIGIT_NAMES.get(source, f"images of {re.sub('-[0-9a-f]{8}$', '', source)}")


def class_names(data):
    """Return the name of each class: those of labels.txt, else the labels themselves"""
    return data.get("names") or list(map(str, range(data.get("n_classes", N_CLASSES))))


def check_digits(digits, splits=("train", "val", "test")):
    """Raise InputError, with the conversion to write, unless `digits` is what train() takes: a dict of source, a text,
    and splits, each (images, labels): (n, 28, 28) uint8, 0 black to 255, and (n,) integers from 0."""
    for split in ("source", *splits):
        if split not in digits:
            raise InputError(f"data has no {split!r}. Give {{'source': name, 'train': (images, labels), 'val': ..., "
                             "'test': ...}")
    for split in splits:
        check_images(f"data[{split!r}]", *digits[split], (28, 28), 62)


# Synthetic digits for machines without MNIST. One row per writing style: digit, relative frequency, strokes. A stroke
# is a smooth curve through control points, written xxyy on a 100 x 100 sheet (x right, y down); `|` lifts the pen.
# Strokes that contain the same point share it, so that a corner where two strokes meet stays joined when points are
# perturbed.
GLYPHS = (
    (0, 3, "5500 1812 0550 2288 5299 8287 9348 8012 5500"), (0, 2, "7508 4500 1522 0558 2893 6092 9055 8018 5003 3010"),
    (0, 1, "3508 1535 1070 4099 8085 9045 7810 5002 4212"), (0, 1, "3003 1025 0660 3096 7092 9560 8525 6206"),
    (1, 5, "5500 5250 5099"), (1, 1, "3816 5500 | 5500 5250 5099"),
    (1, 1, "3416 5000 | 5000 5050 5099 | 2799 5099 7399"), (2, 3, "1522 4500 7817 6848 3878 0897 | 0897 5094 9697"),
    (2, 3, "1825 4502 7520 6352 3588 1592 1476 3070 6586 9890"),
    (2, 2, "1530 3205 7008 7837 4585 1097 0582 3076 6592 9792"),
    (2, 3, "2015 5000 7018 5850 3285 1295 0380 1868 4578 9590"),
    (2, 2, "1535 2510 6002 7825 5060 2588 0885 1572 4078 9595"),
    (2, 1, "1515 4502 6818 5550 2582 0592 | 0592 4592 9988"),
    (2, 1, "1505 5002 8506 | 8506 5050 1096 | 1096 5095 9096"),
    (3, 3, "1512 4500 7515 6838 4048 | 4048 7255 8580 4599 0888"),
    (3, 2, "1812 4800 7012 6535 4548 | 4548 7550 9075 6098 2599 0585"),
    (3, 2, "0825 2505 6003 7520 4045 | 4045 7055 7580 4599 1592"),
    (3, 1, "1510 5000 8012 7035 4050 | 4050 6560 7080 4095 2590"),
    (3, 1, "1505 4505 7505 | 7505 6022 4540 | 4540 7553 7885 4599 1290"),
    (3, 2, "1512 4802 7515 6440 4050 3545 5046 7562 7585 4599 1290"),
    (3, 2, "2012 5000 8012 6838 4848 6855 7575 5095 2099 0590"), (4, 3, "2200 1555 | 1555 5054 9052 | 7505 7250 6899"),
    (4, 2, "6500 3835 0865 | 0865 5064 9765 | 6500 6550 6499"), (4, 2, "2000 1230 2550 5550 8035 | 8500 8035 7599"),
    (4, 2, "2502 1235 2255 5055 9545 | 7510 6850 6099"), (4, 1, "6205 1260 | 1260 5062 9558 | 7030 6650 6299"),
    (5, 3, "9003 5504 2503 | 2503 2045 | 2045 5038 8060 7090 4599 0890"),
    (5, 2, "8805 5202 2522 3542 6855 7580 4599 0890"), (5, 2, "3008 2248 5040 7862 7090 4099 0892 | 3008 6005 9903"),
    (5, 2, "9908 6506 3508 | 3508 2545 | 2545 5542 7562 6088 3099 0390"),
    (5, 1, "2812 2248 5040 7862 7488 4099 1590 | 3805 6505 9903"),
    (5, 1, "8505 3510 | 3510 2545 | 2545 5548 7270 5592 2095 0885"),
    (6, 3, "5500 2828 1462 2290 5299 7885 7260 4850 1868"), (6, 2, "4500 2040 1275 3598 6892 7268 5054 1872"),
    (6, 2, "7005 3520 1260 2895 6595 8272 6555 3565 2285"), (6, 2, "5000 2030 0870 3096 7095 9275 7558 4565 2585"),
    (6, 1, "3500 1845 1885 4599 8592 8575 5568 1885"), (7, 3, "0508 5006 8505 | 8505 6540 4599"),
    (7, 2, "0815 4508 8803 7530 5560 4099"), (7, 2, "0808 5006 8505 | 8505 6045 4599 | 2552 5551 8550"),
    (7, 1, "1225 1508 | 1508 5006 8805 | 8805 6845 5099"), (7, 1, "0530 2812 6015 8802 | 8802 6545 4599"),
    (8, 3, "8508 5000 2015 3538 6855 7880 5099 1585 2862 6040 8508"),
    (8, 2, "7812 5000 2212 2835 5548 8272 7795 4599 1388 1570 4550 7230 7812"),
    (8, 1, "5000 1812 2238 5048 7835 8010 5000 | 5048 1565 1590 5099 8588 8362 5048"),
    (8, 2, "8510 5500 3015 3840 6062 6085 4599 2585 3562 6538 8815"),
    (8, 2, "8515 5000 1520 3545 6068 5595 3590 3572 5550 8515"),
    (8, 1, "7808 5500 3015 3838 6260 7082 5099 2888 3665 6238 7808"),
    (9, 3, "7820 5000 1518 1442 4552 7235 7820 | 7820 7460 7099"),
    (9, 2, "7820 5000 1518 1442 4552 7235 7820 | 7820 8065 6295 3098 1292"),
    (9, 3, "7810 4502 1225 2250 5548 7612 | 7612 6855 5599"), (9, 1, "7806 5002 2518 2842 5545 8026 | 8026 7060 4899"),
    (9, 2, "7015 5000 1820 1842 4050 7030 | 8005 7545 6599"))
DOTS = 112                                                      # pen positions per glyph


def _stroke_basis(strokes, size):
    """Return the control points of a glyph's strokes and a matrix that maps them to evenly spaced pen positions.

    strokes: as in GLYPHS. size: K, the number of control points, to which both arrays are padded with zeros.
    Return points (K, 2), (x, y) in [-1, 1], and basis (DOTS, K).
    """
    keys = list(dict.fromkeys(strokes.replace("|", " ").split()))
    points = np.array([(int(key[:2]), int(key[2:])) for key in keys]) / 50 - 1    # (K, 2)
    rows, steps = [], []
    t = np.linspace(0, 1, 17)[:, None]
    for stroke in strokes.split("|"):
        knots = np.eye(len(keys))[[keys.index(key) for key in stroke.split()]]
        knots = np.vstack([2 * knots[0] - knots[1], knots, 2 * knots[-1] - knots[-2]])
        rows.append(np.vstack([                                                      # Catmull-Rom spline
            b + t / 2 * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * b - a - 3 * c + d)))
            for a, b, c, d in zip(knots, knots[1:], knots[2:], knots[3:])]))
        path = rows[-1] @ points
        steps.append(np.hypot(*np.diff(path, axis=0, prepend=path[:1]).T))           # lifting the pen adds no length
    rows, length = np.vstack(rows), np.cumsum(np.concatenate(steps))
    targets = np.linspace(0, length[-1], DOTS)
    basis = np.zeros((DOTS, size))
    basis[:, :len(keys)] = np.stack([np.interp(targets, length, column) for column in rows.T], 1)
    return np.vstack([points, np.zeros((size - len(keys), 2))]), basis


def _render(dots, width, edge, pressure):
    """Render pen positions as images of ink in [0, 1], scaled and centered as MNIST's digits are.

    dots: pen positions, (n, DOTS, 2), (x, y) in any unit. width: of the stroke, (n,) px. edge: width of its soft rim,
    (n,) px. pressure: factor of the width at each pen position, (n, DOTS). Return (n, 28, 28) float32.
    """
    low, high = dots.min(1), dots.max(1)                                             # (n, 2)
    scale = (20 - width * pressure.max(1)) / (high - low).max(1)  # the ink, not the pen's path, spans 20 px
    dots = (dots - ((low + high) / 2)[:, None]) * scale[:, None, None] + 9.5
    pixel = np.arange(20, dtype=np.float32)[:, None]
    distance = dots.astype(np.float32).transpose(2, 1, 0)[:, :, None] - pixel       # (2, DOTS, 20, n)
    distance = (distance / pressure.astype(np.float32).T[:, None]) ** 2  # more pressure widens the line
    nearest = np.full((20, 20, len(width)), np.inf, np.float32)
    squared = np.empty_like(nearest)
    for dx2, dy2 in zip(*distance):  # images are the last axis: long contiguous inner loops
        np.minimum(nearest, np.add(dy2[:, None], dx2[None], out=squared), out=nearest)
    ink = np.clip((width / 2 - np.sqrt(nearest)) / edge + 0.5, 0, 1)                 # (20, 20, n)
    ink *= ink * (3 - 2 * ink)                                    # saturated core, soft rim
    center = [(ink.sum(axis) * pixel).sum(0) / ink.sum((0, 1)) for axis in (1, 0)]
    top, left = np.clip(np.rint(14 - np.array(center)), 0, 8).astype(int)
    canvas = np.zeros((len(width), 28, 28), np.float32)
    image, row, column = np.ogrid[:len(width), :20, :20]
    canvas[image, top[:, None, None] + row, left[:, None, None] + column] = ink.transpose(2, 0, 1)
    return canvas


def synthesize_digits(n, seed):
    """Draw n synthetic digits: images (n, 28, 28) uint8, labels (n,) uint8 and factors, a dict of (n,) float32.

    Factors, in the order in which they act: style (which of the digit's glyphs), wobble (strength of the deformation),
    aspect (factor of the width, 1 is nominal), slant (shear, positive leans right), rotation (radians, positive is
    counter-clockwise) and stroke (mean width of the ink in px).
    """
    rng = rng_for(seed, "data")
    digit, weight = (np.array([row[i] for row in GLYPHS], float) for i in (0, 1))
    size = max(len(set(row[2].replace("|", " ").split())) for row in GLYPHS)
    points, basis = (np.stack(arrays) for arrays in zip(*(_stroke_basis(row[2], size) for row in GLYPHS)))
    labels = rng.integers(0, 10, n)
    cumulative = np.cumsum(weight / np.array([weight[digit == d].sum() for d in digit]))  # digit d covers (d, d + 1]
    glyph = np.searchsorted(cumulative, labels + rng.uniform(1e-6, 1 - 1e-6, n))           # (n,)
    factors = {"slant": rng.normal(0.15, 0.25, n), "rotation": rng.normal(0, 0.08, n),
               "aspect": np.exp(rng.normal(0, 0.2, n)),
               "stroke": np.exp(rng.normal(0.92, 0.26, n)).clip(1.2, 4.5),
               "style": glyph - np.searchsorted(digit, labels), "wobble": rng.uniform(0.03, 0.17, n)}
    images = np.empty((n, 28, 28), np.uint8)
    for start in range(0, n, 250):
        chunk = slice(start, start + 250)
        slant, rotation, aspect, stroke, _, wobble = (value[chunk] for value in factors.values())
        count = len(slant)
        control = points[glyph[chunk]] + wobble[:, None, None] * rng.normal(0, 0.7, (count, size, 2))
        dots = basis[glyph[chunk]] @ control                                    # (n, DOTS, 2)
        x, y = dots[..., 0], dots[..., 1]
        # A deformation without a linear part bends the strokes and does not change slant, rotation and aspect.
        warp = np.stack([x * x, x * y, y * y], -1) @ rng.normal(0, 1, (count, 3, 2))
        dots = dots + wobble[:, None, None] * warp
        cos, sin = np.cos(rotation), np.sin(rotation)
        zero = np.zeros(count)
        rotate = np.stack([cos, -sin, sin, cos], -1).reshape(-1, 2, 2)
        shear = np.stack([0.8 * aspect, zero, -slant, zero + 1], -1).reshape(-1, 2, 2)  # acts on rows (x, y)
        cycles, phase, depth = rng.uniform([[0.3], [0], [0]], [[3], [1], [0.4]], (3, count))[..., None]
        pressure = 1 + depth * np.sin(2 * np.pi * (cycles * np.linspace(0, 1, DOTS) + phase))    # (n, DOTS)
        pressure /= pressure.mean(1, keepdims=True)  # so that `stroke` is the mean width
        ink = _render(dots @ shear @ rotate, stroke, rng.uniform(1.0, 1.6, count), pressure)
        images[chunk] = np.rint(255 * ink)
    return images, labels.astype(np.uint8), {key: value.astype(np.float32) for key, value in factors.items()}


def load_digits(config, say=print, data_set=MNIST):
    """Load the images and labels of MNIST, or of synthetic digits in its place.

    Return {"source": "mnist" or "synthetic", "train": (images, labels), "val": ..., "test": ...}, with images
    (n, 28, 28) and labels (n,), both uint8. For MNIST, "train" has the first 55,000 training images and "val" the last
    5,000, so that no image is in two splits.

    With config.digits "auto", synthetic digits replace MNIST, with a notice, when no mirror can provide it: without a
    network, or when the answers are not MNIST's files. Raise InputError when a file in a folder or in the cache is
    damaged, also with "auto"; DataNotFound when config.digits is "mnist" and the download fails.
    """
    if config.data_dir and config.digits == "synthetic":
        raise InputError("--data-dir has no effect with --digits synthetic. Leave one of them out")
    if config.data_dir:
        return load_data_dir("--data-dir", config.data_dir, config.transpose, say, data_set)
    if config.digits != "synthetic":
        if user_dir := os.environ.get(data_set.variable):
            data = load_data_dir(data_set.variable, user_dir, False, say, data_set)
            if data["source"] != data_set.source:
                raise InputError(f"{data_set.variable} {user_dir}: holds other images than {data_set.name}'s. Set it "
                                 f"to the folder of {data_set.name}'s four files")
            return data
        try:
            return load_idx(data_set, 5 if config.digits == "auto" else 30, say)
        except DataNotFound as error:
            if config.digits != "auto":
                command = command_line(*sys.argv).replace(f" --digits {config.digits}", "")
                raise DataNotFound(f"{error}, as in: {command} --digits synthetic") from None
            bar = "!" * 79                                                      # printed even with --quiet
            print(f"{bar}\n!!  NO {data_set.name} HERE: these are SYNTHETIC digits. Numbers are not comparable with "
                  f"{data_set.name}'s.\n!!  {error}\n{bar}", file=sys.stderr, flush=True)
    digits, start = {"source": "synthetic"}, 0
    images, labels, _ = synthesize_digits(sum(N_SYNTHETIC.values()), config.seed)
    for split, n in N_SYNTHETIC.items():
        digits[split] = (images[start:start + n], labels[start:start + n])
        start += n
    return digits

# END SHARED mnist ----------------------------------------------------------------------------------------------------

# SHARED muon: steps of normalized kernels along their orthogonalized momentum ----------------------------------------

MUON_BETA, MUON_ITERS = 0.95, 5
MUON_POLYNOMIAL = 3.4445, -4.7750, 2.0315          # Jordan et al. 2024: steep at 0, so that few iterations suffice


def orthogonalize(g):
    """Approximate U V^T of the matrix g = U S V^T, (C, F), by Newton-Schulz iteration.

    X <- P X with P = a + b G + c G^2 and G = X X^T, starting from X = g / |g|. Singular values of the result are
    between 0.68 and 1.21, except where those of g are below |g| / 500.
    Only the small square matrix G is iterated, G <- P G P, and the product of all P is multiplied with the long X once:
    2 to 6 times as fast.
    """
    a, b, c = MUON_POLYNOMIAL
    x = g / (np.linalg.norm(g) + g.dtype.type(1e-12))
    x = x.T if len(g) > g.shape[1] else x
    gram, product = x @ x.T, np.eye(len(x), dtype=x.dtype)
    for _ in range(MUON_ITERS):
        factor = b * gram + c * (gram @ gram)
        factor[np.diag_indices(len(x))] += a
        product = factor @ product
        gram = factor @ gram @ factor
    x = product @ x
    return x.T if len(g) > g.shape[1] else x


def muon_step(params, shard_grads, momentum, names, relative_step, runner):
    """Take one step of Muon (Jordan et al. 2024), in place, for the kernels `names`.

    The gradient g is the sum of shard_grads, the momentum m = 0.95 m + g. A kernel moves along orthogonalize(g + 0.95
    m), by `relative_step` times its norm, and is then rescaled to its previous norm: a normalization follows the
    convolution, so that only the kernel's direction matters.
    """
    def update(name):
        w, m, *gs = (arrays[name].reshape(-1, params[name].shape[-1]) for arrays in (params, momentum, *shard_grads))
        g = sum(gs[1:], gs[0])
        m *= MUON_BETA
        m += g
        u = orthogonalize(g + MUON_BETA * m)
        norm = np.linalg.norm(w)
        w -= u * (relative_step * norm / (np.linalg.norm(u) + u.dtype.type(1e-12)))
        w *= norm / np.linalg.norm(w)
    runner.map(update, names)


def normalized_kernels(shapes):
    """Return the names of the kernels whose convolution is followed by a normalization. shapes: {name: shape}."""
    return [name for name, shape in shapes.items() if len(shape) == 4 and name[:-2] + "_norm_gamma" in shapes]


def optimizer_step(run, shard_grads, lr_factor):
    """Update all parameters of a Run in place: the kernels of normalized convolutions by Muon, the others by Adam.

    shard_grads: list of gradient dicts, which are added up. lr_factor: the schedule's factor of the learning rate.
    Without --muon, Adam updates all parameters.
    """
    config, params = run.config, run.params
    kernels = normalized_kernels({name: p.shape for name, p in params.items()}) if config.muon else []
    muon_step(params, shard_grads, run.adam_m, kernels, config.muon * lr_factor, run.runner)
    others = {name: p for name, p in params.items() if name not in kernels}
    adam_step(others, shard_grads, run.adam_m, run.adam_v, run.step + 1, config.lr * lr_factor, run.runner)


def check_muon(config):
    """Raise InputError when --muon is set for a network without normalized convolutions."""
    if config.muon and not normalized_kernels(param_shapes(config)):
        raise InputError(f"--muon {config.muon} applies to batch-normalized convolutions, and this network has none. "
                         "Use --muon 0 or --norm batch")

# END SHARED muon -----------------------------------------------------------------------------------------------------

# SHARED core: operations, training and files, the same in every experiment --------------------------------------------
#
# The core uses these names of the experiment: Config, DEFAULTS, DEFAULT_MODELS, RENAMED, PRETRAINED, SOURCE_SETTING,
# EVAL_SETTINGS, TEST_SETTINGS, check_config, train, evaluate_test_sets, test_result, prediction_rows,
# comparison_columns, remark, report, init_params, to_batch, loss_and_grads, forward_rows, optimizer_step.

EXPERIMENT = Path(__file__).stem
SHARD_SIZE = 16                    # samples that a thread computes at once: fixed, so that sums have one order
SWITCH_INTERVAL = 2e-5             # s, of sys.setswitchinterval (Python's default: 5 ms); on two threads of an AMD EPYC
                                   # a default step of MultiMNIST takes 0.96 times as long as with Python's default,
                                   # others 0.98 to 1.01
CHUNK = 2048                       # samples drawn or preprocessed at once, so that memory does not grow with the data
REPORT_SECONDS = 15                # without a terminal a line of progress appears at least so often
PURPOSES = ("data", "init", "batches", "evaluation")


def rng_for(seed, purpose, *key):
    """Return the random generator of one purpose (PURPOSES) and key, a child of SeedSequence(seed). It keeps no state
    between calls."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), *key)))


# -------------------------------------------------------------- primitives
# x and y are activations, (N, H, W, C) or (N, C). A forward function returns its output and a cache, which is what the
# backward function needs, in a tuple if it is more than one thing. The backward function takes the gradient of the
# output, which it does not modify, and the cache; it returns the gradients of the forward function's arguments, in
# their order.

class Arena:
    """Works as np.empty for temporaries that are needed again in every step: after rewind(), the k-th call returns the
    k-th array of the step before.

    Operations with large results have an argument `empty=np.empty`; with np.empty their results are new arrays, with an
    Arena they are overwritten after the next rewind(). This saves page faults of fresh large arrays (without it a
    training step takes 1.1 to 1.2 times as long) and aligns arrays to cache lines, so that no row of 16 floats is split
    between two lines (1.2 times as fast routing on an AMD EPYC, Zen 5; no difference on an Intel Xeon)."""

    def __init__(self):
        self.arrays, self.taken = [], 0

    def rewind(self):
        """Make all arrays available again"""
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
    """Return an array like `array` for a gradient. With an Arena it is `array` itself, which a backward function has
    read for the last time; without one it is new, so that the cache stays intact. Less memory traffic: without this a
    training step takes 1.03 times as long."""
    return array if isinstance(empty, Arena) else np.empty_like(array)


def im2col(x, width, stride, empty=np.empty):
    """Return windows along the rows of x (N, H, W, C): cols[p, r, n, ox] = x[n, stride*r + p, stride*ox:stride*ox +
    width], of shape (stride, ceil(H/stride), N, Wo, width*C).

    A full im2col copies every pixel K*K times, this one K times: the kernel's rows become K matrix products on bands of
    image rows, which are contiguous because the row's parity p comes first."""
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
    """Adjoint of im2col: add every window's entries to the pixels they were copied from. Return dx of `shape` (N, H, W,
    C), in memory (H, N, W, C)"""
    N, H, W, C = shape
    dx = empty((H, N, W * C), dcols.dtype)
    dx.fill(0)
    for p in range(stride):
        for ox in range(dcols.shape[3]):
            dx[p::stride, :, ox * stride * C:(ox * stride + width) * C] += dcols[p, :-(-(H - p) // stride), :, ox]
    return dx.reshape(H, N, W, C).transpose(1, 0, 2, 3)


def im2col_band(cols, ky, stride, Ho):
    """Return the rows of im2col's cols that kernel row ky sees, as one matrix (Ho*N*Wo, width*C), without a copy"""
    return cols[ky % stride, ky // stride:ky // stride + Ho].reshape(-1, cols.shape[-1])


@functools.cache
def sgemm():
    """Return cblas_sgemm of NumPy's OpenBLAS, or None if NumPy has another BLAS"""
    with contextlib.suppress(AttributeError):
        function, size, real, address = openblas().scipy_cblas_sgemm64_, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
        function.argtypes = [*[ctypes.c_int] * 3, *[size] * 3, real, address, size, address, size, real, address, size]
        return function
    return None


def add_product(a, b, out, part):
    """Compute out += a @ b, with scratch memory `part` of out's shape.

    If the operands are contiguous (b or its transpose), BLAS adds while it multiplies: one pass over memory, not three.
    Without this a step of affNIST's networks and of smallNORB's heads takes 1.03 to 1.08 times as long on an AMD EPYC,
    of small convolutions 1.05 to 1.13 times on an Intel Xeon."""
    (M, K), F, straight = a.shape, b.shape[1], b.flags.c_contiguous
    runs = a.flags.c_contiguous and out.flags.c_contiguous and (straight or b.flags.f_contiguous)
    if sgemm() is None or not runs or {x.dtype for x in (a, b, out)} != {np.dtype(np.float32)}:
        out += np.matmul(a, b, out=part)
        return
    sgemm()(101, 111, 111 if straight else 112, M, F, K, 1, a.ctypes.data, K, b.ctypes.data, F if straight else K, 1,
            out.ctypes.data, F)                                     # 101, 111, 112: row-major, as it is, transposed


def conv2d_forward(x, w, b, stride, empty=np.empty):
    """Compute a valid convolution. x (N, H, W, C), w (Kh, Kw, C, F), b (F,) or None.

    Return y (N, Ho, Wo, F), in memory (Ho, N, Wo, F), and a cache."""
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
    """Return dx, dw, db for dy (N, Ho, Wo, F); dx and db are None unless needed"""
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
    """Compute y = x w + b. x (N, C), w (C, F), b (F,) or None. Return y (N, F) and a cache"""
    y = np.matmul(x, w, out=empty((len(x), w.shape[1]), x.dtype))
    if b is not None:
        y += b
    return y, (x, w, empty)


def linear_backward(dy, cache, need_dx=True, need_db=True):
    """Return dx, dw, db for dy (N, F); dx and db are None unless needed"""
    x, w, empty = cache
    dx = np.matmul(dy, w.T, out=empty(x.shape, x.dtype)) if need_dx else None
    return dx, np.matmul(x.T, dy, out=empty(w.shape, w.dtype)), dy.sum(0) if need_db else None


NORM_EPS = 1e-5                    # inside the square root of a standard deviation


def norm_forward(x, gamma, beta, running=None, empty=np.empty):
    """Batch normalization (Ioffe & Szegedy 2015), per channel: y = gamma (x - mean) / sqrt(variance + eps) + beta.

    x (N, H, W, C), overwritten in evaluation; gamma, beta (C,). running: the (mean, variance) to use in evaluation; in
    training, without it, those of x over samples and positions. Return (y, (mean, variance)) and a cache. The variance
    that is returned, for the running statistics, is unbiased: n / (n - 1) times the one used, with n values per
    channel. All passes run over rows of W*C values, since loops over C alone, often 16, would be too short to be
    fast."""
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
    """Return dx, dgamma, dbeta for dy, for a forward pass with batch statistics:
    dx = gamma / std (dy - mean(dy) - xhat mean(dy xhat)), with xhat = (x - mean) / std"""
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
    """Return x (N, H, W, C) as rows (H*N, W*C), the order in which a convolution leaves it in memory"""
    return x.transpose(1, 0, 2, 3).reshape(x.shape[0] * x.shape[1], -1)


def norm_like(rows, x):
    """Undo norm_rows: return rows in the shape of x"""
    N, H, W, C = x.shape
    return rows.reshape(H, N, W, C).transpose(1, 0, 2, 3)


def relu_forward(x):
    """Compute max(x, 0) IN PLACE: x is the fresh output of a convolution, linear or pooling layer that nothing else
    uses"""
    y = np.maximum(x, 0, out=x)
    return y, y


def relu_backward(dy, y):
    return dy * (y > 0)


def sigmoid_forward(x):
    """Compute 1 / (1 + exp(-x)), by tanh so that it cannot overflow"""
    y = 0.5 * np.tanh(0.5 * x) + 0.5
    return y, y


def sigmoid_backward(dy, y):
    return dy * y * (1 - y)


def max_pool_forward(x):
    """2x2 max pooling; an odd last row or column is dropped. x (N, H, W, C). Return y (N, H//2, W//2, C) and a cache"""
    corners = window_corners(x)
    y = np.maximum(np.maximum(corners[0], corners[1]), np.maximum(corners[2], corners[3]))
    return y, (x, y)


def max_pool_backward(dy, cache):
    """Return dx. The first entry equal to its window's maximum gets the gradient, since on a blank background all four
    are equal. A ReLU may have been applied to y in place: where it made y 0 the gradient is 0."""
    x, y = cache
    dx, left = np.zeros_like(x), dy.copy()
    for corner, dcorner in zip(window_corners(x), window_corners(dx)):
        left -= np.multiply(corner == y, left, out=dcorner)
    return dx


def window_corners(x):
    """Return the four pixels of each 2x2 window as views. x (N, H, W, C) -> four arrays (N, H//2, W//2, C)"""
    H, W = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    return [x[:, i:H:2, j:W:2] for i in (0, 1) for j in (0, 1)]


def global_avg_pool_forward(x):
    """Global average pooling. x (N, H, W, C). Return y (N, C) and a cache"""
    return x.mean((1, 2)), x.shape


def global_avg_pool_backward(dy, shape):
    return np.broadcast_to(dy[:, None, None] / (shape[1] * shape[2]), shape)


def pad_forward(x, margin):
    """Pad with `margin` px of zeros on all sides. x (N, H, W, C). Return y (N, H + 2 margin, W + 2 margin, C), in
    memory (H + 2 margin, N, ...) as a convolution leaves its output, and a cache"""
    N, H, W, C = x.shape
    y = np.zeros((H + 2 * margin, N, W + 2 * margin, C), x.dtype).transpose(1, 0, 2, 3)
    y[:, margin:margin + H, margin:margin + W] = x
    return y, margin


def pad_backward(dy, margin):
    return dy[:, margin:dy.shape[1] - margin, margin:dy.shape[2] - margin]


def flatten_forward(x):
    """Flatten x (N, ...) to y (N, C). Return y and a cache"""
    return x.reshape(len(x), -1), x.shape


def flatten_backward(dy, shape):
    return dy.reshape(shape)


def dropout_forward(x, mask=None):
    """Multiply x (N, C) by a mask (N, C) whose entries are 0 or 1 / (1 - dropout), as in training; with None, as in
    evaluation, return x as it is. Return y and a cache"""
    return x if mask is None else x * mask, mask


def dropout_backward(dy, mask):
    return dy if mask is None else dy * mask


def draw_dropout_mask(rng, shape, dropout):
    """Return dropout_forward's mask, float32: an entry is 0 with probability `dropout`"""
    return (rng.random(shape, np.float32) >= dropout) / np.float32(1 - dropout)


# -------------------------------------------------------------- layers
# A backbone, or a whole CNN, is a tuple of layers (operation, *options): ("conv2d", name, K, stride, F), ("linear",
# name, F), ("norm", name), ("pad", px), ("dropout", mask), or an operation without options. A layer with weights names
# them in its first option.

LAYERS = {                         # operation -> forward and backward function; an experiment may add others
    "conv2d": (conv2d_forward, conv2d_backward), "linear": (linear_forward, linear_backward),
    "norm": (norm_forward, norm_backward), "relu": (relu_forward, relu_backward),
    "sigmoid": (sigmoid_forward, sigmoid_backward), "max_pool": (max_pool_forward, max_pool_backward),
    "global_avg_pool": (global_avg_pool_forward, global_avg_pool_backward), "pad": (pad_forward, pad_backward),
    "flatten": (flatten_forward, flatten_backward), "dropout": (dropout_forward, dropout_backward),
    "skip": (None, None), "add": (None, None)}                                          # ends of a residual branch
WITH_WEIGHTS = ("conv2d", "linear")


def has_bias(layers, k):
    """Return whether layer k, which has weights, has a bias: not before a normalization, which would cancel it"""
    return [operation for operation, *_ in layers[k + 1:k + 2]] != ["norm"]


def with_norms(layers):
    """Return the layers with a batch normalization after every convolution"""
    return tuple(part for layer in layers for part in (
        (layer, ("norm", layer[1] + "_norm")) if layer[0] == "conv2d" else (layer,)))


def infer_shapes(layers, side, channels, margin=0, rows=False):
    """Return what layers make of images of side x side px with `channels` channels.

    margin: px on each side that are padding of the image. rows: the image has one channel and its first convolution is
    computed on im2col_rows, with a kernel (1, K, K, F). The result has shapes, {name: shape} of the weights; side and
    channels of the output; and along (side,), the coordinates of the centers of the output's receptive fields, -1 to 1
    over the image without its margin."""
    shapes, inner = {}, side - 2 * margin
    offset, scale = float(-margin), 1                   # px: center of the first receptive field; distance of two
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
    """Return the (x, y) coordinates of a grid of receptive fields, (side * side, 2), row by row"""
    return np.stack([np.tile(along, len(along)), np.repeat(along, len(along))], 1)


def layers_forward(params, x, layers, empty=np.empty, statistics=None):
    """Apply layers to x. Return y and the list of the layers' caches.

    A ReLU or normalization that comes first modifies x in place. Layers between ("skip",) and ("add",) are a residual
    branch: ("add",) adds the x of ("skip",), which therefore no ReLU or normalization may follow directly. statistics:
    in training a dict, to which each normalization adds the mean and variance of these samples as NAME_mean and
    NAME_var; in evaluation None, so that the running statistics in params are used."""
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
    """Return dx for dy (None unless needed); the gradients of the weights are put into `grads`"""
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
    """Do one step of Adam in place, with step counting from 1; the gradient is the sum of shard_grads, in their order.

    p -= lr m_hat / (sqrt(v_hat) + eps), with m_hat and v_hat the bias-corrected moving averages of the gradient and of
    its square. These are kept as sums, adam_m = m / (1 - beta1) and adam_v = v / (1 - beta2), and all factors are
    combined into two numbers: 11 passes over memory instead of 16. The passes run over chunks that fit into the cache,
    shared among the runner's threads; each value is computed by itself, so the bits do not depend on the threads."""
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
    """Set values near 0 to 0, in place. The moving averages of weights that no longer get a gradient, such as those of
    a dead unit, decay to denormal numbers, with which processors are so slow that a step took twice its time."""
    for arrays in moments:
        for a in arrays.values():
            a[np.abs(a) < FLUSHED] = 0


def schedule(config, step, n_steps):
    """Return the fraction of the full learning rate at a step, counting from 0"""
    decay = 1 if config.lr_schedule == "constant" else 0.5 * (1 + math.cos(math.pi * step / n_steps))
    return decay * min(1, (step + 1) / max(1, config.warmup))


# -------------------------------------------------------------- running statistics

STATE_DECAY = 0.99                 # decay of the running statistics of batch normalization, per shard
STATE_SUFFIXES = ("_mean", "_var")


def init_state(params):
    """Return the initial running mean and variance of each batch normalization among the weights"""
    stems = [name.removesuffix("_gamma") for name in params if name.endswith("_gamma")]
    return {stem + suffix: np.full_like(params[stem + "_gamma"], suffix == "_var")
            for stem in stems for suffix in STATE_SUFFIXES}


def update_running_statistics(state, group_statistics, step):
    """Update running means and variances in place with the statistics of some shards, in order, whatever their sizes.

    The weight of a shard is 9 / (step + 9) at step 0, 1, ..., later 1 - STATE_DECAY, so that the initial values and
    those of young weights are soon forgotten."""
    keep = min(STATE_DECAY, step / (step + 9))
    for statistics in group_statistics:
        for name, found in statistics.items():
            state[name] += (found - state[name]) * (1 - keep)


# -------------------------------------------------------------- shards and threads

@functools.cache
def openblas():
    """Return NumPy's OpenBLAS library, or None if NumPy has another BLAS"""
    site = Path(np.__file__).parent
    for library in (*site.parent.glob("numpy.libs/*openblas*"), *site.glob(".dylibs/*openblas*")):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(library))
    return None


def limit_blas_to_one_thread():
    """Limit BLAS to one thread also if numpy was imported before this file, so that its BLAS did not see the
    environment variables set above. With more threads the rounding of products would depend on the number of cores."""
    with contextlib.suppress(AttributeError):
        openblas().scipy_openblas_set_num_threads64_(1)


def n_cores():
    """Return the number of cores that this process may use"""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Runner:
    """Splits batches into shards of SHARD_SIZE samples and shares them among worker threads (NumPy releases the GIL).

    Shards, and the order in which their results are summed, do not depend on the number of threads; hence the bits do
    not. A shard is also the group of samples over which batch normalization computes its statistics. n_expected: how
    many samples an evaluation will need, if known, for its messages. """

    def __init__(self, threads, batch_size=10 ** 9, progress=None, n_expected=0):
        limit_blas_to_one_thread()
        self.threads = min(threads or n_cores(), -(-batch_size // SHARD_SIZE))
        self.pool = ThreadPoolExecutor(self.threads) if self.threads > 1 else None
        sys.setswitchinterval(SWITCH_INTERVAL)
        self.progress = Progress(quiet=True) if progress is None else progress
        self.arenas, self.n_evaluated, self.n_expected = [], 0, n_expected

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def each(self, function, items):
        """Yield function(item) for all items, computed by the threads, in order. Overflow warnings are off, since Run
        checks the loss."""
        def quiet(item):
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                return function(item)
        return self.pool.map(quiet, items) if self.pool else map(quiet, items)

    def map(self, function, items):
        """Return each() as a list"""
        return list(self.each(function, items))

    def loss_and_grads(self, params, samples, rows, config):
        """Compute loss_and_grads of samples[rows], shard by shard. Return the terms, the list of the shards' gradients,
        whose sum is the batch's, and the list of their statistics."""
        shards = [rows[start:start + SHARD_SIZE] for start in range(0, len(rows), SHARD_SIZE)]
        self.arenas += [Arena() for _ in range(len(self.arenas), len(shards))]

        def one(arena_and_shard):
            arena, shard = arena_and_shard
            batch = to_batch(samples, shard, params_dtype(params))
            return loss_and_grads(params, batch, config, arena.rewind(), len(shard) / len(rows))
        all_terms, shard_grads, statistics = zip(*self.map(one, zip(self.arenas, shards)))
        return {name: sum(terms[name] for terms in all_terms) for name in all_terms[0]}, shard_grads, statistics

    def forward(self, params, samples, config, **options):
        """Compute forward_rows of all samples, shard by shard. Return its dict of arrays with a row per sample."""
        def one(some_shards):
            arena = Arena()
            outs = (forward_rows(params, samples, shard, config, arena.rewind(), **options) for shard in some_shards)
            return [{name: a.copy() for name, a in out.items()} for out in outs]
        shards, parts = [slice(at, at + SHARD_SIZE) for at in range(0, len(samples["labels"]), SHARD_SIZE)], []
        for outs in self.each(one, [shards[k:k + 8] for k in range(0, len(shards), 8)]):
            parts += outs
            self.n_evaluated += sum(len(next(iter(out.values()))) for out in outs)
            of = f" of {self.n_expected:,}" * (self.n_expected >= self.n_evaluated)
            self.progress.step(f"evaluating: {self.n_evaluated:,}{of} samples")
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# -------------------------------------------------------------- the training run

class Run:
    """A training run, as train() uses it: weights, Adam's moving averages, running statistics, step and history. It
    resumes from a checkpoint, checks for values that are not finite, and writes checkpoints, snapshots and messages.

    source: where the data come from. n_train: samples per epoch. The other arguments are train()'s.
    """

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
        self.saved, self.folder = "", make_run_folder(config, source, progress)         # where the last good state is
        if config.checkpoint and Path(config.checkpoint).exists():
            self.resume_from(load_network(config.checkpoint))
        if config.warmup > self.n_steps:
            progress.warn(f"--warmup {config.warmup} exceeds the run's {self.n_steps} steps, so the learning rate "
                          "never reaches its maximum. Lower --warmup or raise --n-epochs.")
        self.runner = Runner(config.threads, config.batch_size, progress)

    def __enter__(self):
        return self

    def __exit__(self, exception, *_):
        self.runner.__exit__()
        if exception is None and self.last_snapshot != self.step:
            self.snapshot()
        if exception is None and self.folder:
            self.save_weights(WEIGHTS_FILE)
        if exception is None and self.folder:
            (self.folder / PARTIAL_FILE).unlink(missing_ok=True)
        elif self.folder:
            with contextlib.suppress(OSError):
                os.removedirs(self.folder)                              # if nothing was saved

    @property
    def weights(self):
        """The weights and running statistics, which are evaluated and saved"""
        return self.params | self.state

    def resume_from(self, network):
        """Take over a checkpoint's state, or raise InputError if it belongs to another run"""
        path = self.config.checkpoint
        check_same_run(self.config, self.source, network, path)
        for group in CHECKPOINT:
            setattr(self, group, getattr(network, group))
        self.step, self.history = network.step, network.history
        self.saved = f" The last good state is in {path}."

    def epochs(self):
        """Yield the numbers of the remaining epochs, counting from 0"""
        self.snapshot()
        for epoch in range(self.step // self.steps_per_epoch, self.config.n_epochs):
            self.began, self.seen, self.sums = time.perf_counter(), 0, {}
            yield epoch

    def batches(self, samples):
        """Return the rows of each batch of a dict of samples"""
        n, size = len(samples["labels"]), self.config.batch_size
        return (np.arange(start, min(start + size, n)) for start in range(0, n, size))

    def update(self, n, terms, shard_grads, statistics):
        """Do one step with what Runner.loss_and_grads returned for n samples: weights, running statistics, messages,
        and a snapshot if it is due"""
        if not np.isfinite(terms["loss"]):
            raise InputError(f"loss {terms['loss']}, step {self.step + 1}: training diverged. Lower --lr.{self.saved}")
        optimizer_step(self, shard_grads, schedule(self.config, self.step, self.n_steps))
        update_running_statistics(self.state, statistics, self.step)
        self.step += 1
        if self.step % FLUSH_STEPS == 0:
            flush_denormals(self.adam_m, self.adam_v)
        self.seen, self.terms = self.seen + n, dict(terms)
        for name, term in terms.items():
            self.sums[name] = self.sums.get(name, 0) + term * (1 if name == "hits" else n)
        self.elapsed = time.perf_counter() - self.began
        self.so_far = (f"train loss {self.sums['loss'] / self.seen:.3f}  train accuracy "
                       f"{self.sums['hits'] / self.seen:.3f}  {self.seen / self.elapsed:.0f} samples/s")
        left = (self.n_steps - self.step) * self.config.batch_size * self.elapsed / self.seen
        self.progress.step(f"step {self.step}/{self.n_steps}  {left:.0f} s left  {self.so_far}")
        if self.snapshot_every and self.step % self.snapshot_every == 0:
            self.snapshot()

    def snapshot(self):
        """Call snapshot_callback with copies; its time does not count as training time"""
        if self.snapshot_callback:
            paused, self.last_snapshot = time.perf_counter(), self.step
            self.snapshot_callback(self.step, {name: p.copy() for name, p in self.weights.items()}, self.terms)
            self.began = getattr(self, "began", 0) + time.perf_counter() - paused

    def close_epoch(self, metrics, text):
        """Append the epoch, with the metrics of an evaluation, to the history, and save the checkpoint. text: to print
        after the training loss and accuracy"""
        bad = [name for name, value in (self.weights | metrics).items() if not np.isfinite(value).all()]
        if bad:
            raise InputError(f"{bad[0]} is not finite after step {self.step}: training diverged, or an image holds "
                             f"nan. Lower --lr.{self.saved}")
        epoch = self.step // self.steps_per_epoch
        self.history["seconds"] += self.elapsed
        self.history["steps"] = self.step
        means = {"train_" + name: total / self.seen for name, total in self.sums.items()}
        means["train_accuracy"] = means.pop("train_hits")
        when = {"epoch": epoch, "step": self.step, "seconds": self.elapsed}
        self.history["epochs"].append(when | means | metrics)
        self.progress.say(f"epoch {epoch}/{self.config.n_epochs}  {self.so_far}  {text}")
        if self.folder:
            self.save_weights(PARTIAL_FILE)
        if self.config.checkpoint:
            save_network(self.config.checkpoint, self.config, self.history,
                         {group: getattr(self, group) for group in CHECKPOINT})
            self.saved = f" The last good state is in {self.config.checkpoint}."


    def save_weights(self, name):
        """Write weights, settings and history to a file in the run's folder; if that fails, warn and train on"""
        try:
            save_network(self.folder / name, self.config, self.history, {"params": self.params, "state": self.state})
        except InputError as error:                                     # such as a disk that is full by now
            self.progress.warn(f"this run is not saved from here on: {error}")
            self.folder = None


WEIGHTS_FILE, PARTIAL_FILE, METRICS_FILE = "weights.npz", "weights.partial.npz", "metrics.json"      # in a run's folder
AUTO = "{auto}"                    # value of run_dir: the folder that run_folder names


def run_folder(config, source):
    """Return the folder of a run: config.run_dir or, if that is AUTO, runs/EXPERIMENT/MODEL-PRESET-seedS[-DIGEST]. The
    digest is of the settings and the data that differ from the defaults of this model and preset."""
    if config.run_dir != AUTO:
        return Path(config.run_dir)
    default = Config(model=config.model, preset=config.preset, seed=config.seed)
    usual = run_identity(default, getattr(default, SOURCE_SETTING))
    usual["source"] = usual["source"].replace("auto", "mnist")
    other = {name: value for name, value in run_identity(config, source).items() if value != usual.get(name)}
    digest = "-" + hashlib.sha256(json.dumps(other, sort_keys=True).encode()).hexdigest()[:8] if other else ""
    return Path("runs", EXPERIMENT, f"{config.model}-{config.preset}-seed{config.seed}{digest}")


def make_run_folder(config, source, progress):
    """Create the folder of a run and return it; None if nothing is to be saved, or, with a warning, if it cannot be.
    Raise InputError if the user named a folder that cannot be written."""
    if not config.run_dir:
        return None
    folder = run_folder(config, source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder / PARTIAL_FILE, folder / WEIGHTS_FILE, folder / METRICS_FILE)
    except (OSError, InputError) as error:
        reason = f"{folder}: {error.strerror}. Choose another folder" if isinstance(error, OSError) else error
        if config.run_dir != AUTO:
            raise InputError(f"--run-dir {reason}") from None
        progress.warn(f"this run will not be saved: {reason}")
        return None
    return folder


def run_identity(config, source):
    """Return what must agree for a checkpoint to be resumed: the settings that change training, and the data's
    source"""
    n_classes = getattr(config, "n_classes", 10)
    return {f.name: getattr(config, f.name) for f in options(config) if not f.metadata.get("runtime")} | (
        {"n_classes": n_classes} if n_classes != 10 else {}) | {"source": source}


CHECKPOINT = ("params", "state", "adam_m", "adam_v")               # dicts of arrays; a weights file has the first two


def save_network(path, config, history, groups):
    """Write some of CHECKPOINT's dicts, {name: dict}, with settings, history and a digest of everything, to one .npz,
    atomically"""
    arrays = {f"{group}/{name}": a for group, of in groups.items() for name, a in of.items()}
    arrays["meta"] = np.array(json.dumps({"format": 2, "experiment": EXPERIMENT, "step": history["steps"],
                                          "history": history, "config": run_identity(config, history["source"])}))
    arrays["digest"] = np.array(digest_of(arrays))
    write_atomically(path, lambda file: np.savez(file, **arrays))


def save_weights(path, config, weights, history):
    """Write a trained network for evaluation: weights as float16, running statistics as they are, no optimizer state.
    Raise InputError if a weight exceeds float16."""
    state = {name: a for name, a in weights.items() if name.endswith(STATE_SUFFIXES)}
    with np.errstate(over="ignore"):
        params = {name: a.astype(np.float16) for name, a in weights.items() if name not in state}
    if large := [name for name, a in params.items() if not np.isfinite(a).all()]:
        raise InputError(f"cannot write {path}: {large[0]} exceeds float16's maximum, {np.finfo(np.float16).max}. Use "
                         "--checkpoint, which keeps float32")
    save_network(path, config, history, {"params": params, "state": state})


def load_network(path):
    """Load what save_network or save_weights wrote, without unpickling anything.

    Return a namespace of CHECKPOINT's dicts (a weights file has empty optimizer dicts), float16 in float32; weights,
    which are evaluated; config, source, step and history. Raise InputError if the file is missing, damaged or of
    another network.
    """
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        if str(arrays.pop("digest")) != digest_of(arrays):
            raise InputError(f"{path}: its digest does not match its content: damaged or changed. Get the file again")
        meta = json.loads(str(arrays.pop("meta")))
        config = config_from_settings(meta["config"], path, meta.get("experiment", EXPERIMENT))
        groups = {group: {} for group in CHECKPOINT}
        for key, a in arrays.items():
            group, _, name = key.partition("/")
            groups[group][name] = a.astype(np.promote_types(a.dtype, np.float32))
        params = init_params(config)
        like = dict.fromkeys(CHECKPOINT, params) | {"state": init_state(params)}
        for group in CHECKPOINT if groups["adam_m"] else CHECKPOINT[:2]:
            held, needed = ({name: a.shape for name, a in of[group].items()} for of in (groups, like))
            if held != needed:
                raise InputError(f"{path}: its arrays do not fit its settings. Get the file again, or train a network")
        return SimpleNamespace(**groups, weights=groups["params"] | groups["state"], config=config,
                               source=meta["config"]["source"], step=meta["step"], history=meta["history"])
    except InputError:
        raise
    except Exception as error:                        # what a damaged zip file makes its reader raise is not documented
        fault = getattr(error, "strerror", "") or "not a complete file of a trained network"
        raise InputError(f"{path}: {fault}. Give a file that --checkpoint or --out-weights wrote") from None


def config_from_settings(settings, path, experiment=None):
    """Return the Config of a file's settings. Raise InputError if they are another experiment's or have old names."""
    if experiment not in (None, EXPERIMENT):
        raise InputError(f"{path}: holds a network of {experiment}.py. Give a network of {EXPERIMENT}.py")
    known = {f.name for f in options(Config)} | {"n_classes"}
    old = [old for name, value in settings.items() for old in (flag_name(name), f"{flag_name(name)} {value}")
           if old in RENAMED and (old != flag_name(name) or name not in known)]
    if old:
        renames = "; ".join(f"{name} is now called {RENAMED[name]}" for name in old)
        raise InputError(f"{path}: was written by an older version ({renames}). Train a new network, or load it with "
                         "that version (see CHANGELOG.md)")
    if unknown := settings.keys() - known - {"source"}:
        raise InputError(f"{path}: was trained with {flag_name(min(unknown))}, which is no setting of {EXPERIMENT}.py. "
                         "Give a network of this script and version")
    older = {f.name: f.metadata["older"] for f in options(Config) if "older" in f.metadata}
    return Config(**older | {name: value for name, value in settings.items() if name in known})


def check_same_run(config, source, network, path):
    """Raise InputError if a checkpoint belongs to another run, so that it is neither resumed nor overwritten"""
    if not network.adam_m:
        raise InputError(f"{path}: holds weights only; no run can resume from it. Give a file that --checkpoint wrote")
    ours, theirs = run_identity(config, source), run_identity(network.config, network.source)
    if differing := ", ".join(f"{name} {theirs.get(name)}, now {ours[name]}" for name in ours
                              if ours[name] != theirs.get(name)):
        raise InputError(f"{path}: belongs to another run ({differing}). Use the same settings, or another "
                         "--checkpoint")


# -------------------------------------------------------------- statistics

def wilson_interval(hits, n, z=1.959964):
    """Return the 95% Wilson score interval (low, high) of the proportion hits / n, which it always contains"""
    p, z2n = hits / n, z * z / n
    center, half = (p + z2n / 2) / (1 + z2n), z * np.sqrt(p * (1 - p) / n + z2n / (4 * n)) / (1 + z2n)
    return float(max(0, min(p, center - half))), float(min(1, max(p, center + half)))


T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)     # Student's t, 1 to 9 degrees


def mean_and_interval(values):
    """Return the mean and half the width of its 95% t interval, nan for one value"""
    df = len(values) - 1
    if df < 1:
        return float(np.mean(values)), math.nan
    t = T95[df - 1] if df <= len(T95) else 1.95996 + 2.3722 / df + 2.8225 / df ** 2 + 2.5558 / df ** 3
    return float(np.mean(values)), float(t * np.std(values, ddof=1) / math.sqrt(df + 1))


def params_dtype(params):
    """Return the dtype of some weights, which is that of all computations with them"""
    return next(iter(params.values())).dtype


def n_params(weights):
    """Return the number of trained parameters among some weights; running statistics do not count"""
    return sum(p.size for name, p in weights.items() if not name.endswith(STATE_SUFFIXES))


# -------------------------------------------------------------- settings

def options(config):
    """Return the fields of Config, or of an instance of it, that are settings"""
    return [f for f in dataclasses.fields(config) if "help" in f.metadata]


def flag_name(name):
    """Return the command-line flag of a setting"""
    return "--" + name.replace("_", "-")


def is_applicable(only, config):
    """Return whether what applies to `only` {setting: values} applies to a Config"""
    return all(getattr(config, name) in values for name, values in only.items())


def check_applicable(given, configs):
    """Raise InputError if a setting among those given, {name: value}, applies to none of the Configs"""
    for name, value in given.items():
        only = limits(name)
        if not any(is_applicable(only, config) for config in configs):
            other, values = next(item for item in only.items() if getattr(configs[0], item[0]) not in item[1])
            shown = flag_name(name if value is not False else f"no_{name}") + f" {value}" * (type(value) is not bool)
            raise InputError(f"{shown} applies to {flag_name(other)} {', '.join(values)}, not to "
                             f"{getattr(configs[0], other)}. Leave it out, or change {flag_name(other)}")


def limits(name):
    """Return {setting: values} of the models, tasks or data that a setting, or another name of its flag, applies to"""
    fields = {f.name: f.metadata for f in options(Config)}
    if name in fields:
        return fields[name].get("only", {})
    return next(f["aliases"][name] for f in fields.values() if name in f.get("aliases", {}))


def by_field(given):
    """Return settings {name: value} with other names of a flag replaced by the setting's own"""
    own = {alias: f.name for f in options(Config) for alias in f.metadata.get("aliases", {})}
    return {own.get(name, name): value for name, value in given.items()}


RULES = {                          # what a setting may require of its value, and the words for it
    "low": (lambda value, bound: value >= bound, "at least"),
    "high": (lambda value, bound: value <= bound, "at most"),
    "above": (lambda value, bound: value > bound, "more than"),
    "choices": (lambda value, names: value in names, "one of")}


def check_options(config):
    """Raise InputError for a value out of its range or without effect, or an output file that could not be written"""
    for f in options(config):
        value = getattr(config, f.name)
        if isinstance(value, float) and not np.isfinite(value):
            raise InputError(f"{flag_name(f.name)} {value}: must be a finite number")
        for rule, (holds, words) in RULES.items():
            if rule in f.metadata and not holds(value, f.metadata[rule]):
                bound = ", ".join(f.metadata[rule]) if rule == "choices" else f.metadata[rule]
                raise InputError(f"{flag_name(f.name)} {value}: must be {words} {bound}")
    check_applicable({f.name: getattr(config, f.name) for f in options(config) if getattr(config, f.name) != getattr(
        dataclasses.replace(config, **{f.name: f.default}), f.name)}, [config])
    check_writable(config.checkpoint, config.out_json)


def check_writable(*paths):
    """Raise InputError before training, not after it, if an output file could not be written or is given twice: do what
    write_atomically will do. Empty paths, and "-" for standard output, are ignored."""
    paths = [Path(os.path.realpath(path)) for path in paths if path and str(path) != "-"]
    for path in paths:
        if path.exists() and not path.is_file():
            raise InputError(f"cannot write {path}: it is a folder or a device. Give the name of a file")
        write_atomically(path, lambda file: file.write(bytes(2 ** 16)), keep=False)
        if path.exists() and not path.stat().st_mode & 0o200:
            raise InputError(f"cannot replace {path}: it is read-only. Give another name, or make it writable")
        if path.exists() and path.parent.stat().st_mode & 0o1000 and getattr(os, "geteuid", lambda: 0)() not in (
                0, path.stat().st_uid, path.parent.stat().st_uid):                      # a sticky folder, as /tmp
            raise InputError(f"cannot replace {path}: it belongs to another user. Give another name")
    if len(set(paths)) < len(paths):
        raise InputError(f"{max(paths, key=paths.count)}: two outputs have this name. Give each a file of its own")


def given_settings(args):
    """Return {name: value} of the settings that were given on the command line, under the name of the flag that was
    used"""
    names = [name for f in options(Config) for name in (f.name, *f.metadata.get("aliases", {}))]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def network_config(settings, model):
    """Return the Config of one model, with those of the given settings, {name: value}, that apply to it."""
    network = dataclasses.replace(Config(**by_field(settings)), model=model)
    applicable = {name: value for name, value in settings.items() if is_applicable(limits(name), network)}
    return Config(**by_field(applicable) | {"model": model})


def configs_from_args(args):
    """Return the Configs of a command line: for each seed of --n-seeds one of every model of --model.

    Raise InputError for a flag that applies to none of them.
    """
    given, n_seeds = given_settings(args), getattr(args, "n_seeds", 1)
    models = given.pop("model", None) or DEFAULT_MODELS.get(given.get(SOURCE_SETTING), DEFAULT_MODELS[None])
    models = [models] if isinstance(models, str) else dict.fromkeys(models)
    configs = [network_config(given, model) for model in models]
    check_applicable(given, configs)
    if n_seeds < 1:
        raise InputError(f"--n-seeds {n_seeds}: must be at least 1")
    return [dataclasses.replace(config, seed=config.seed + k) for k in range(n_seeds) for config in configs]


def runs_from_args(args):
    """Return the networks to train or, with --load, to evaluate: (name, network or None, Config, path of weights) each.

    Names are the models or, of files that differ in more than model and seed, the files' names, or those of the runs'
    folders. Output files of one of several runs are called FILE.NAME-SEED.npz. Raise InputError if the files differ in
    their test images, or if a flag has no effect.
    """
    if args.load is None:
        runs = [(config.model, None, config) for config in configs_from_args(args)]
        for k, (name, _, config) in enumerate(runs):
            folder = str(Path(config.run_dir, f"{name}-{config.seed}")) if len(runs) > 1 else config.run_dir
            folder = "" if args.no_save else folder if config.run_dir else AUTO
            runs[k] = name, None, dataclasses.replace(config, run_dir=folder)
    else:
        if hasattr(args, "n_seeds") or hasattr(args, "model"):
            raise InputError("--model and --n-seeds are for training: with --load the files say. Leave them out")
        paths = list(map(str, args.load or PRETRAINED))
        if len(set(map(os.path.realpath, paths))) < len(paths):
            raise InputError("--load: a file is given twice. Give each file once")
        loaded = [load_for_evaluation(path, args) for path in paths]
        # files that differ in model and seed only are named after their models: seeds of one model make one row
        models = [network.config.model for network, _ in loaded]
        kinds = {str(run_identity(dataclasses.replace(network.config, seed=0), "")) for network, _ in loaded}
        distinct = len({(network.config.model, network.config.seed) for network, _ in loaded}) == len(loaded)
        names = [file.name == WEIGHTS_FILE and file.parent.name or file.stem for file in map(Path, paths)]
        if len(set(names)) < len(names):
            names = [f"{Path(path).parent.name}-{Path(path).stem}-{k}" for k, path in enumerate(paths, 1)]
        names = models if distinct and len(kinds) == len(set(models)) else names
        runs = [(name, network, config) for name, (network, config) in zip(names, loaded)]
        for name in TEST_SETTINGS:
            if len(values := {getattr(config, name) for *_, config in runs}) > 1:
                raise InputError(f"--load: the networks were trained with {flag_name(name)} "
                                 f"{', '.join(map(str, sorted(values)))}. Load networks of the same data and split")

    def path_of(path, name, config):
        new = path and Path(path).with_name(f"{Path(path).stem}.{name}-{config.seed}{Path(path).suffix}")
        return str(new) if len(runs) > 1 else path
    return [(name, network, dataclasses.replace(config, checkpoint=path_of(config.checkpoint, name, config)),
             path_of(getattr(args, "out_weights", ""), name, config)) for name, network, config in runs]


def load_for_evaluation(path, args):
    """Load a trained network, and combine its settings with the flags in args.

    Return the network, as load_network does, and the Config to evaluate it with. Raise InputError for a flag that
    contradicts its training; only runtime settings and those of EVAL_SETTINGS may differ.
    """
    network, given, fields = load_network(path), given_settings(args), by_field(given_settings(args))
    choices = next(f.metadata["choices"] for f in options(Config) if f.name == SOURCE_SETTING)
    if network.source in choices:
        network.config = dataclasses.replace(network.config, **{SOURCE_SETTING: network.source})
    elif not fields.get("data_dir"):
        remedy = ("Give the folder of these images as --data-dir" if hasattr(network.config, "data_dir") else
                  "Evaluate it in a script, with load_network and evaluate_test_sets")
        raise InputError(f"{path}: was trained on {network.source}. {remedy}")
    network.file = {"file": Path(path).name, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
                    "trained_seed": network.config.seed}
    config = dataclasses.replace(network.config, **fields)
    check_applicable(given, [config])
    for f in options(Config):
        trained = getattr(network.config, f.name)
        if f.name in fields and f.name in ("checkpoint", "run_dir"):
            raise InputError(f"{flag_name(f.name)} is for training, but {path} is evaluated only. Leave it out")
        if fields.get(f.name, trained) != trained and not f.metadata.get("runtime") and f.name not in EVAL_SETTINGS:
            raise InputError(f"{flag_name(f.name)} {fields[f.name]}: {path} was trained with {trained}. Leave the flag "
                             "out, or train a new network without --load")
    for name in ("out_json", "out_weights", "predictions"):
        if (output := getattr(args, name, "")) and os.path.realpath(output) == os.path.realpath(path):
            raise InputError(f"{flag_name(name)} {output}: this is the network's own file. Give another name")
    return network, config


def check_images(where, images, labels, shape, n_classes, kind="u"):
    """Raise InputError, with the conversion to write, unless images are (n, *shape) uint8 (kind "f": floating-point),
    at least one, and labels (n,) integers from 0 to below n_classes"""
    images, labels = np.asarray(images), np.asarray(labels)
    n, each, size = len(images), images.shape[1:], ", ".join(map(str, shape))
    remedy = labels_remedy = ""
    if images.dtype != np.uint8 if kind == "u" else images.dtype.kind != kind:
        remedy = "images.astype(np.float32)" if kind == "f" else "(255 * images).round().astype(np.uint8)" if (
            images.dtype.kind in "fb" and n and images.min() >= 0 and images.max() <= 1) else (
            "images.astype(np.uint8), of gray levels from 0, black, to 255")
    elif each != shape or not n:
        remedy = {(math.prod(shape),): f"images.reshape(-1, {size})", (*shape, 1): "images[..., 0]",
                  (*shape, 3): "images.mean(-1).round().astype(np.uint8)"}.get(
            each, f"images of shape (n, {size}), at least one")
    elif labels.shape != (n,):
        labels_remedy = "labels.argmax(1)" if labels.ndim == 2 and len(labels) == n else "a label for each image"
    elif labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= n_classes:
        labels_remedy = "labels.astype(int)" if labels.dtype.kind not in "iu" else "labels - labels.min()" if (
            labels.max() - labels.min() < n_classes) else f"labels of {n_classes} classes or fewer"
    if remedy:
        raise InputError(f"{where}: the images are {images.dtype} of shape {images.shape}, not "
                         f"{'uint8' if kind == 'u' else 'floating-point'} (n, {size}). Give {remedy}")
    if labels_remedy:
        raise InputError(f"{where}: the labels are {labels.dtype} of shape {labels.shape}, not {n} integers from 0 to "
                         f"at most {n_classes - 1}. Give {labels_remedy}")


# -------------------------------------------------------------- files

def home_path(path):
    """Return a path with ~ expanded. Where there is no such home, as for a user without a passwd entry: a path at which
    nothing can be read or written."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(os.devnull, path)


def write_atomically(path, write, keep=True):
    """Call write(binary file) on a temporary file beside `path`, then rename it, so that the file is written whole or
    not at all; if not `keep`, only try to write. Raise InputError if it cannot be written.

    tempfile is not used: on Windows, before Python 3.12.4, it tries forever in a folder that denies access."""
    path = Path(os.path.realpath(path))                                 # a link is followed, not replaced
    temporary = f"{path}.{os.urandom(4).hex()}"
    try:
        try:
            with open(temporary, "xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            # Windows does not replace a file while another program reads it: wait for up to two seconds
            for is_last in ([False] * 40 * (os.name == "nt") + [True]) * keep:
                with contextlib.suppress(*[PermissionError] * (not is_last)):
                    return os.replace(temporary, path)
                time.sleep(0.05)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}. Choose a writable folder with free space"
                         ) from None


def digest_of(arrays):
    """Return the SHA-256 of the names, shapes, dtypes and bytes of a dict of arrays"""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape} {arrays[name].dtype}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def pack_bits(correct):
    """Return which samples were classified correctly, (n,) bool, as base64 text with eight samples per byte"""
    return base64.b64encode(np.packbits(correct)).decode()


def make_result(config, params, history, metrics):
    """Return the dict that --out-json writes: settings without paths, metrics, everything the bits depend on, and the
    history as columns"""
    settings = {f.name: getattr(config, f.name) for f in options(config)
                if "choices" in f.metadata or f.type in (int, float) or not f.metadata.get("runtime")}
    epochs = history["epochs"]
    return {"experiment": EXPERIMENT, "config": settings, "source": history["source"],
            "n_params": n_params(params), **metrics, "seconds_train": history["seconds"],
            "ms_per_step": 1e3 * history["seconds"] / max(1, history["steps"]),
            "versions": {"python": sys.version.split()[0], "numpy": np.__version__}, "machine": machine(),
            "history": {key: [epoch[key] for epoch in epochs] for key in (epochs[0] if epochs else ())}}


def counted(n, noun):
    """Return a number with its noun, as in 1 epoch, 12 epochs"""
    return f"{n:,} {noun}" + "s" * (n != 1)


def training_time(results):
    """Return the line of a report on the training time. results: of test_result"""
    return (f"  training time              {results['seconds_train']:.1f} s, {results['ms_per_step']:.1f} ms per step"
            + ", as the file says of its training" * ("loaded" in results))


def write_json(path, results):
    """Write a dict atomically, one line per key. Floats, except those of config, get five significant digits; nan and
    infinity become null."""
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return (float(f"{value:.5g}") if math.isfinite(value) else None) if isinstance(value, float) else value
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value if key == 'config' else plain(value))}"
                       for key, value in results.items())
    if str(path) == "-":
        Progress(False).say(f"{{\n{lines}\n}}")
    else:
        write_atomically(path, lambda file: file.write(f"{{\n{lines}\n}}\n".encode()))


def write_csv(path, rows):
    """Write rows of texts and numbers, none of which has a comma, as CSV, atomically"""
    write_atomically(path, lambda file: file.writelines((",".join(map(str, row)) + "\n").encode() for row in rows))


def add_predictions_flag(parser):
    """Add --predictions"""
    parser.add_argument("--predictions", default="", metavar="FILE", help="write index, true and predicted class, and "
                        "capsule lengths or scores of every test image to this CSV file")


def command_line(*words):
    """Return a command of Python to copy into this system's shell"""
    return (subprocess.list2cmdline(["python", *map(str, words)]) if os.name == "nt" else
            shlex.join(["python3", *map(str, words)]))


def machine():
    """Return what run times depend on: the processor's name and the number of cores"""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        processor = Path("/proc/cpuinfo").read_text("utf-8").split("model name")[1].split("\n")[0].strip("\t: ")
    return {"processor": processor, "cores": n_cores()}


# -------------------------------------------------------------- several networks

def run_experiment(args, load, n_test_samples):
    """Train the networks of a command line, or load them; evaluate them and report. Several are compared in a table.

    load(config, progress, evaluated): the data of a run; evaluated: the network is not trained. n_test_samples(data,
    config): the number of samples that evaluate_test_sets classifies.
    """
    runs = runs_from_args(args)
    out_json, needs, found, folders = runs[0][2].out_json, None, [], []
    runs = [(name, network, dataclasses.replace(config, quiet=config.quiet or out_json == "-"), path)
            for name, network, config, path in runs]
    progress = Progress(runs[0][2].quiet)
    for _, _, config, _ in runs:
        check_config(config)
    if len(runs) > 1 and args.predictions:
        raise InputError(f"--predictions {args.predictions}: is for one network. Give one model or file, and one seed")
    check_writable(out_json, args.predictions, *(path for _, _, config, weights in runs
                                                 for path in (config.checkpoint, weights)))
    for k, (name, network, config, out_weights) in enumerate(runs, 1):
        if len(runs) > 1:
            progress.say(f"\n{name}, seed {config.seed} ({k} of {len(runs)})")
        needed = [getattr(config, f.name) for f in options(config) if f.metadata["group"] == "data" or f.name == "seed"]
        if needed != needs:
            data, needs = load(config, progress, network is not None), needed
        config = fit_to_data(config, data, network, name)
        params, history = (network.weights, network.history) if network else train(config, data=data)
        if out_weights and config.model != "nearest":                   # which has no weights
            save_weights(out_weights, network.config if network else config, params, history)
            progress.say(f"wrote {out_weights}")
        with Runner(config.threads, progress=progress, n_expected=n_test_samples(data, config)) as runner:
            tests = evaluate_test_sets(params, data, config, runner)
            if args.predictions:
                write_csv(args.predictions, prediction_rows(params, data, config, runner))
                progress.say(f"wrote {args.predictions}")
        result = test_result(config, params, history | {"source": data["source"]}, tests, network)
        folder = run_folder(config, data["source"])
        if config.run_dir and not network:
            with contextlib.suppress(InputError):                       # train() has said it if it cannot be written
                if load_network(folder / WEIGHTS_FILE).history["seconds"] == history["seconds"]:    # not an older run
                    write_json(folder / METRICS_FILE, result)
                    folders.append(folder)
        columns = {"parameters": result["n_params"]} | comparison_columns(result, tests)
        found.append((name, network.config.seed if network else config.seed, columns, result))
    if len(runs) == 1:
        report(config, result, tests, progress.say)
    else:
        summary = compare(found)
        progress.say(f"\n{comparison_table(summary)}\n\n{remark([run[2] for run in runs], data['source'])}".rstrip())
        result = {"summary": summary, "runs": [result for *_, result in found]}
    if out_json:
        write_json(out_json, result)
        progress.say(f"wrote {out_json}")
    if folders:
        progress.say(f"\nsaved {', '.join(map(str, folders))} (weights, metrics, history)")
        weights, script = [folder / WEIGHTS_FILE for folder in folders], Path(sys.argv[0]).parent
        for text, name, unless in (("draw it:      ", f"visualize_{EXPERIMENT}.py", ("affnist_dir", "eval_split")),
                                   ("test it again:", f"{EXPERIMENT}.py", ())):
            flags = [word for f in options(config) if f.metadata["group"] == "data" and f.metadata.get("runtime")
                     and f.name not in (SOURCE_SETTING, *unless) and (value := getattr(config, f.name)) != f.default
                     for word in (flag_name(f.name), *([] if value is True else [value]))]
            progress.say(f"  {text} {command_line(script / name, '--load', *weights, *flags)}")


def fit_to_data(config, data, network=None, name=""):
    """Return a Config with the data's number of classes: n_classes, else that of MNIST, else one more than the largest
    label. Raise InputError if a loaded network was trained on other data; MNIST and synthetic digits may replace each
    other, and a folder may have another name."""
    if not hasattr(config, "n_classes"):
        return config
    similar, last = {"mnist", "synthetic"}, max(int(np.max(data[name][1])) for name in ("train", "val"))
    n_classes = data.get("n_classes") or (Config.n_classes if data["source"] in similar else max(2, last + 1))
    if last >= n_classes:
        raise InputError(f"data: has label {last}, and n_classes is {n_classes}. Give labels below it")
    if network and {network.source, data["source"]} <= similar or network is None:
        return config if network else dataclasses.replace(config, n_classes=n_classes)
    if len({re.sub(".*-(?=[0-9a-f]{8}$)", "", source) for source in (network.source, data["source"])}) > 1:   # digests
        raise InputError(f"{name}: was trained on {network.source} ({config.n_classes} classes), and these data are "
                         f"{data['source']} ({n_classes} classes). Give its own data as --data-dir, or a network that "
                         "was trained on these as --load")
    return config


def compare(found):
    """Compute the comparison of several runs: (name, seed, {metric: (value, 95% interval from the test images)}, _).

    The first metric is the number of parameters. Return {"seeds": [...], "networks": {name: {metric: [mean, low,
    high]}}, "differences": {"A - B": the same}}. The intervals are t intervals over the seeds; if every network has one
    seed, those from the test images, and no differences. Differences are paired by seed.
    """
    rows = {}
    for name, seed, columns, _ in found:
        rows.setdefault(name, {})[seed] = columns

    def summarize(values, of_images=None):
        mean, half = mean_and_interval(values)
        return [mean, *(of_images or (mean - half, mean + half))]
    seeds = list(dict.fromkeys(seed for _, seed, *_ in found)) if max(map(len, rows.values())) > 1 else []
    metrics = [metric for metric in columns if all(metric in of for _, _, of, _ in found)]
    networks = {name: {metric: summarize([of[metric][0] for of in row.values()], not seeds and columns[metric][1])
                       if metric != metrics[0] else columns[metric] for metric in metrics}
                for name, row in rows.items() for columns in [next(iter(row.values()))]}
    differences = {f"{a} - {b}": {metric: summarize([rows[a][k][metric][0] - rows[b][k][metric][0] for k in common])
                                  for metric in metrics[1:]}
                   for a, b in itertools.combinations(rows, 2) if len(common := rows[a].keys() & rows[b].keys()) > 1}
    return {"seeds": seeds, "networks": networks, "differences": differences}


def comparison_table(summary):
    """Return compare's result as text: a line per network, then a line per difference, in percentage points"""
    networks, differences = summary["networks"], summary["differences"]
    metrics, width = list(next(iter(networks.values()))), max(map(len, ("network", *networks, *differences)))

    def line(name, cells):
        return (f"{name:{width}}  {cells[0]:>10}" + "".join(f"  {cell:22}" for cell in cells[1:])).rstrip()

    def cell(sign, digits, mean, low, high):
        return f"{mean:{sign}.{digits}f}" + f" [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]" * math.isfinite(low)
    lines = [line("network", metrics), *(
        line(name, [f"{row[metrics[0]]:,}", *(cell("", 3, *row[metric]) for metric in metrics[1:])])
        for name, row in networks.items())]
    over = f"over {n} seeds" if (n := len(summary["seeds"])) > 1 else "from the test images; other seeds vary more"
    lines += [f"[95% CI {over}]"] + ["\nDifference in percentage points, paired by seed [95% CI]"] * bool(differences)
    lines += [line(name, ["", *(cell("+", 1, *np.multiply(100, row[metric])) for metric in metrics[1:])])
              for name, row in differences.items()]
    return "\n".join(lines)


# -------------------------------------------------------------- messages and command line

class Progress:
    """Messages of a run: on a terminal one line that is updated in place, elsewhere a line per epoch and, in longer
    phases, at least every REPORT_SECONDS; with quiet nothing."""

    dropped = None                 # why something could not be printed
    program = False                # whether this is a program's terminal, not a user's own script or notebook

    def __init__(self, quiet):
        self.quiet = quiet or sys.stdout is None
        # a Windows console understands escape sequences once it is told to, in mode 7
        self.live = (Progress.program and not self.quiet and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
            and (os.name != "nt" or ctypes.windll.kernel32.SetConsoleMode(ctypes.windll.kernel32.GetStdHandle(-11), 7)))
        self.last, self.pending = time.perf_counter(), False            # pending: a line that the next text replaces

    def say(self, text, end="\n"):
        """Print a line; on a terminal it replaces the line that is updated in place. What cannot be printed, on a full
        disk or after the reader has ended, is dropped: the run continues."""
        if not self.quiet:
            try:
                print("\r\x1b[K" * self.pending + text, end=end, flush=True)
            except (OSError, ValueError) as error:
                Progress.dropped = error
            self.pending = not end

    def step(self, text):
        """Report how far a phase is: on a terminal in place, elsewhere as a line of its own, not too often"""
        if not self.quiet and time.perf_counter() - self.last > (0.2 if self.live else REPORT_SECONDS):
            self.last = time.perf_counter()
            width = shutil.get_terminal_size().columns - 1 if self.live else None
            self.say(text[:width], end="" if self.live else "\n")

    def warn(self, text):
        self.say(f"warning: {text}")


class Parser(argparse.ArgumentParser):
    """Command line of a script. --help opens with the first paragraph of its docstring and the last one, which holds
    example commands."""

    def __init__(self, description=""):
        first, *_, last = (description or "See the source.").strip().split("\n\n") * 2   # python -OO has no docstrings
        super().__init__(usage="%(prog)s [options]", description=f"{first}\n\n{last}", allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_args(self, *args):
        """As ArgumentParser's; raise InputError for an old name of a flag or of one of its values"""
        words = [part for word in (args[0] if args else sys.argv[1:]) for part in word.split("=", 1)]
        for old, new in RENAMED.items():
            size = len(old.split())
            if any(words[k:k + size] == old.split() for k in range(len(words))):
                raise InputError(f"{old} is now called {new}")
        return super().parse_args(*args)

    def error(self, message):
        raise InputError(f"{message}. See --help")


def add_config_flags(parser, several=False):
    """Add a flag for every setting of Config, in groups. Flags that are not given leave no attribute: the defaults are
    Config's. several: --model takes several models, and --n-seeds is added; see configs_from_args."""
    groups = {name: parser.add_argument_group(name) for name in ("data", "network", "training", "run")}
    parser.epilog = "If several of a flag's listed defaults apply, the last of them is used."
    for f in options(Config):
        group, names = groups[f.metadata["group"]], f.metadata.get("choices")
        text = f.metadata["help"] + default_text(f) + applies_text(f.metadata.get("only", {}))
        flag = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS}          # argparse formats with %
        if f.type is bool:
            flag["action"] = "store_true" if f.default is False else argparse.BooleanOptionalAction
        else:
            metavar = f.metadata.get("metavar", {int: "N", float: "X", str: "FILE"}[f.type])
            flag |= {"type": f.type, "choices": names, "metavar": None if names else metavar}
        if several and f.name == "model":
            models = "; ".join(f"{' '.join(of)}{f' with {flag_name(SOURCE_SETTING)} {data}' * bool(data)}"
                               for data, of in DEFAULT_MODELS.items())
            flag |= {"nargs": "+", "metavar": "MODEL", "help": f"one network or several, which are compared. "
                     f"{f.metadata['help']} (default: {models})"}
        group.add_argument(flag_name(f.name), **flag)
        for alias, only in f.metadata.get("aliases", {}).items():
            text = f"another name of {flag_name(f.name)}{applies_text(only)}"
            group.add_argument(flag_name(alias), **flag | {"help": text})
    if several:
        groups["run"].add_argument("--no-save", action="store_true", help="do not save this run below runs/")
        groups["run"].add_argument("--n-seeds", type=int, default=argparse.SUPPRESS, metavar="K", help="train with K "
                                   "seeds, --seed and those that follow; report means and 95%% t intervals (default: "
                                   "1)")


def default_text(f):
    """Return what --help says of a setting's default: its value, or the values of DEFAULTS with the settings that they
    depend on, except for models that the setting does not apply to"""
    if f.default is not None:
        return "" if f.default is False or f.default == "" else f" (default: {f.default})"
    texts, applicable = [], set(f.metadata.get("only", {}).get("model", ()))
    for condition, defaults in DEFAULTS:
        models = set(condition.get("model", ()))
        if f.name in defaults and not (models and applicable and not models & applicable):
            who = " with ".join(f"{flag_name(name)} " * (name not in ("model", "preset")) + " or ".join(map(str, names))
                                for name, names in condition.items())
            value = defaults[f.name]
            texts.append((who + ": ") * bool(who) + str(value.__doc__ if callable(value) else value))
    return f" (default: {'; '.join(texts)})"


def applies_text(only):
    """Return what --help says of the models, tasks or data that a flag applies to"""
    return "".join(f" [{'' if name == 'model' else flag_name(name) + ' '}{', '.join(values)} only]"
                   for name, values in only.items())


def add_load_flag(parser, text, nargs="*"):
    """Add --load, whose help begins with `text`. nargs: "*" for several files, "?" for one"""
    names = ", ".join(path.name for path in (PRETRAINED if nargs == "*" else PRETRAINED[:1]))
    parser.add_argument(
        "--load", nargs=nargs, const=str(PRETRAINED[0]) if nargs == "?" else None, metavar="FILE",
        help=f"{text} in FILE, which --checkpoint or --out-weights wrote; if FILE is omitted, the pretrained {names} "
        "in weights/. Settings come from the file; apart from the test images and output files, only "
        f"{', '.join(map(flag_name, EVAL_SETTINGS))} can be overridden")


def add_out_weights_flag(parser):
    """Add --out-weights"""
    parser.add_argument("--out-weights", default="", metavar="FILE", help="write the trained network to this .npz for "
                        "evaluation: weights rounded to float16, settings and training history, no optimizer state; of "
                        "several networks FILE.MODEL-SEED.npz each, as with --checkpoint")


def run_cli(main):
    """Call main(). What the user can correct becomes one line on stderr and exit code 2, without a traceback."""
    for stream in (stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")):
        stream.reconfigure(errors="backslashreplace")                   # for terminals that lack a letter
    Progress.program = True
    np.seterr(over="ignore", invalid="ignore", divide="ignore")         # Run checks all values, in words
    try:
        main()
        if Progress.dropped or sys.stdout is None:
            raise Progress.dropped if isinstance(Progress.dropped, OSError) else BrokenPipeError
    except MemoryError:
        sys.exit(fail("out of memory. Lower --batch-size, --threads or the size of the network"))
    except KeyboardInterrupt:
        print("\nstopped. If --checkpoint was given, its file holds the last complete epoch", file=sys.stderr)
        sys.exit(130)
    except OSError as error:                    # standard output is closed, full or unread; a path cannot be looked up
        if not error.filename and sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1 if isinstance(error, BrokenPipeError) else
                 fail(f"{error.filename or 'standard output'}: {error.strerror}. Check disk, path and permissions"))
    except Exception as error:                  # each script has an InputError of its own
        if all(kind.__name__ != "InputError" for kind in type(error).__mro__):
            raise
        sys.exit(fail(str(error)))


def fail(message):
    """Print an error message on one line and return the exit code"""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2

# END SHARED core -----------------------------------------------------------------------------------------------------

LAYERS["global_max_pool"] = global_max_pool_forward, global_max_pool_backward


def main():
    parser = Parser(description=__doc__)
    add_load_flag(parser, "do not train; evaluate the networks")
    add_out_weights_flag(parser)
    add_predictions_flag(parser)
    add_config_flags(parser, several=True)

    def load(config, progress, evaluated):
        digits = load_digits(config, progress.say)
        sum(1 for _ in (stream_digits(digits, config, "real") if config.affnist_dir else ()))           # fail early
        return digits
    run_experiment(parser.parse_args(), load, lambda digits, config: len(test_sets(config)) * min(
        config.n_test or 10 ** 9, len(digits[config.eval_split][1])))


if __name__ == "__main__":
    run_cli(main)
