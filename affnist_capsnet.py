#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0"]
# ///
"""affNIST CapsNet: one digit, and what an affine transformation that was never trained on does to its name.

Sabour, Frosst & Hinton, "Dynamic routing between capsules", NIPS 2017, sections 4, 5.1 and 5.2.

Question: networks are trained on MNIST's digits, moved about on a larger canvas and nothing else. Do capsules then know
digits that are turned, sheared and stretched better than a CNN does that names moved ones equally well (the paper: 79%
against 66%), and if so, which part of a capsule network is it?

    stage        layer                                                               output
    Input        a digit somewhere on 40x40 px, 4 px of background around it         (N, 48, 48)
    Conv1, 2     3x3, 16 and 16 channels, then 2x2 maximum                           (N, 22, 22, 16)
    Conv3, 4     3x3, 64 and 64 channels, then 2x2 maximum                           (N, 9, 9, 64)
    Conv5        3x3, 128 channels                                                   (N, 7, 7, 128)
    PrimaryCaps  1x1, 16 types x 8-D, squash                                         (N, 784, 8)
    votes        u_hat_ij = W_tj u_i + |u_i| P_j place_i, t being the type of i      (N, 10, 784, 16)
    routing      1 iteration, uniform coupling, for which no vote need be made       (N, 10, 16)
    decoder      one capsule, the others masked: 160 -> 256 -> 512 -> 1600           (N, 40, 40)

Every convolution is batch-normalized over 16 samples; a ReLU follows, after PrimaryCaps the squash. Loss: margin loss
on the capsule lengths + 0.0005 x summed squared error of the redrawn digit. Adam; the kernels of the convolutions go
along their orthogonalize momentum (Muon). Every gradient is written out.

Its rivals: capsules with a matrix for every place, as in the paper (`--model capsnet`); on the same backbone global average
pooling (`gap`), global maximum (`max`), a dense layer (`dense`), and class vectors that are averages (`vectors`) or
maxima (`vectors-max`) alone; and the paper's CNN made small (`cnn`). `--routing-iters`, `--squash`, `--loss`,
`--recon-weight 0` take parts away.

Deviations from the paper: six small convolutions, normalized, for its two of 9x9 (`--preset paper --model capsnet` has
them); a margin of background; cosine decay of the learning rate; Muon, where convolutions are normalized; affine test
digits drawn here in affNIST's reported ranges, since its files are not fetched (`--affnist-dir` reads them).

One command, 2 1/2 minutes on two cores:    python3 affnist_capsnet.py --seed 0
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
import shlex
import shutil
import sys
import tempfile
import time
import urllib.request
import zlib
from bisect import bisect_left
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
#   N batch   H W height, width   C channels in   F channels out   K kernel side   I primary capsules   J digit capsules
#   B types of primary capsules   E D dimensions of a primary (8) and of a digit capsule (16)   T terms of du_hat
#
# A sample's way:
#   load_digits           the digits of MNIST, three splits; select_training_digits: those to train on
#   epoch_samples         an epoch of them, each moved, a chunk at a time; to_batch: some of them as floats
#   forward               layers_forward: the backbone, of a CNN all of it; capsules_forward: squash, votes, routing
#   classification_loss, reconstruction_loss; backward      how far from the truth; and the same way back
#   optimizer_step             Muon and Adam: new weights
#   stream_digits         validation and test digits: moved, moved further, transformed, or affNIST's own
#   evaluate              named right? evaluate_test_sets: on every kind of test digits; report: what is printed and kept


def train(config, snapshot_callback=None, snapshot_every=0, data=None, dtype=np.float32):
    """Train -> (params, history). Never looks at a test image.

    snapshot_callback(step, params, terms) gets copies, at step 0, every snapshot_every steps and at the end; it cannot
    change the run. data: load_digits' result, to load only once. dtype: float64 is for tests. history: source of the
    digits, epochs (one dict each: train and validation losses and accuracies), seconds, steps.
    """
    check_config(config)
    progress = Progress(config.quiet)
    data = data or load_digits(config, progress.say)
    with Run(config, data["source"], config.n_train, progress, snapshot_callback, snapshot_every, dtype) as run:
        announce(run, data)
        for epoch in run.epochs():
            if any(before["val_accuracy"] >= config.stop_at > 0 for before in run.history["epochs"]):
                break
            for samples in epoch_samples(data, epoch, config):
                for rows in run.batches(samples):
                    run.update(len(rows), *run.runner.loss_and_grads(run.params, samples, rows, config))
            found = evaluate(run.weights, stream_digits(data, config, "val"), config, run.runner)
            run.close_epoch({"val_" + name: found[name] for name in EPOCH_METRICS if name in found}, f"validation {found['accuracy']:.4f}")
    return run.weights, run.history


# ============================================================== the task: one digit, moved, or turned and stretched

BOX, INK = 28, 20                  # sides of an MNIST image and of the square that its digit fits, px
SIDES = {"affnist": 40, "mnist": 28}                           # of each task's canvas, px
SHIFTS = {"affnist": "6", "mnist": "2"}                        # --train-shift where it is not given
N_CLASSES = 10
RANGES = {"turn": (-20.0, 20.0), "shear": (-0.2, 0.2), "down": (0.8, 1.2), "across": (0.8, 1.2)}        # affNIST's
KINDS = "val", "test", "affine", "any_position", "centered"           # of digits; their order is that of their generators
TEST_SETS = {                                         # of each task: key of the result, kind of digits, what is printed
    "affnist": (("familiar", "test", "moved test digits"), ("any_position", "any_position", "moved further"),
                ("centered", "centered", "affine, in the middle"), ("affine", "affine", "affine test digits"),
                ("real_affine", "real", "affNIST's files")),
    "mnist": (("test", "test", "test digits"),)}
REST = {"turn": 0.0, "shear": 0.0, "down": 1.0, "across": 1.0}          # no transformation: degrees, a share, factors


def place_digits(images, corners, side):
    """Put each 28x28 image on a canvas of side x side px with its upper left corner at corners (n, 2) = (row, column)
    px, which may lie outside. -> (n, side, side) uint8; what does not fit is cut off"""
    canvas = np.zeros((len(images), side + 2 * BOX, side + 2 * BOX), np.uint8)
    windows = sliding_window_view(canvas, (BOX, BOX), axis=(1, 2), writeable=True)
    rows, columns = np.clip(corners.T + BOX, 0, side + BOX)
    windows[np.arange(len(images)), rows, columns] = images
    return canvas[:, BOX:-BOX, BOX:-BOX]


def max_shift(config):
    """Return how far training digits are translated on each axis, px; None for any position on the canvas"""
    return None if config.train_shift == "full" else int(config.train_shift)


def test_sets(config):
    """Return the rows of TEST_SETS that a Config is tested on. Digits at any position are no other test set to a network
    that was trained on them, and affNIST's files need --affnist-dir."""
    wanted = {"any_position": max_shift(config) is not None, "real": config.affnist_dir}
    return [(key, kind, words) for key, kind, words in TEST_SETS[config.task] if wanted.get(kind, True)]


def translate_digits(images, side, max_shift, rng):
    """Each 28x28 image moved from the canvas' middle by up to max_shift whole px on each axis; None: to anywhere on it
    where all of its ink fits. -> (n, side, side)"""
    if max_shift is None:
        return translate_anywhere(images, side, rng)
    shifts = rng.integers(-max_shift, max_shift + 1, (len(images), 2))
    return place_digits(images, (side - BOX) // 2 + shifts, side)


def translate_anywhere(images, side, rng):
    """Each 28x28 image moved by whole pixels to anywhere on the canvas where all of its ink fits. -> (n, side, side)"""
    corners = [rng.integers(-ink.argmax(1), side - BOX + 1 + ink[:, ::-1].argmax(1))
               for ink in (images.any(2), images.any(1))]                               # (n, 28), by row, by column
    return place_digits(images, np.stack(corners, 1), side)


def affine_matrix(turn, shear, down, across):
    """The 2x2 matrices, acting on columns (y, x), that first stretch by `down` and `across`, then shear x by
    `shear` times y, then turn by `turn` degrees, counter-clockwise as seen. -> (n, 2, 2)"""
    turn, shear, down, across = np.broadcast_arrays(*(np.asarray(a, float) for a in (turn, shear, down, across)))
    cos, sin = np.cos(np.deg2rad(turn)), np.sin(np.deg2rad(turn))
    sheared = np.stack([down, 0 * down, shear * down, across], -1).reshape(-1, 2, 2)
    turned = np.stack([cos, -sin, sin, cos], -1).reshape(-1, 2, 2)                      # y grows downwards
    return turned @ sheared


def transform_digits(images, matrices, rng, side):
    """Each 28x28 image transformed by its 2x2 matrix, bilinear, and put anywhere on a canvas where all of its ink fits;
    without rng in the canvas' middle, or as near to it as all of its ink fits.

    images (n, 28, 28) uint8, matrices (n, 2, 2), see affine_matrix -> images (n, side, side) uint8 and centers (n, 2),
    where the middle (13.5, 13.5) of each image has come to lie, px. Raises InputError if the ink of one cannot fit.
    """
    middle = (BOX - 1) / 2
    y, x = np.mgrid[:BOX, :BOX] - middle
    ink = images > 0
    at = np.einsum("nij,jyx->niyx", matrices, np.stack([y, x]))                         # where each pixel comes to lie
    low, high = (np.where(ink[:, None], at, fill).reshape(len(images), 2, -1) for fill in (np.inf, -np.inf))
    margin = np.abs(matrices).sum(2)                                  # of what a pixel adds to those around it
    low, high = np.minimum(low.min(2), 0) - margin + 1, np.maximum(high.max(2), 0) + margin - 1   # at its edge, 0
    room = side - 1 - (high - low)
    if (room < 0).any():
        raise InputError(f"a transformed digit does not fit into {side}x{side} px; lower its scale or shear")
    share = rng.uniform(0, 1, (len(images), 2)) if rng else np.clip(
        ((side - 1) / 2 + low) / np.maximum(room, 1e-9), 0, 1)
    centers, back = share * room - low, np.linalg.inv(matrices)                         # (n, 2), (n, 2, 2)
    return np.concatenate([resample_affine(*(a[start:start + 64] for a in (images, back, centers)), side)       # in cache
                           for start in range(0, len(images), 64)]), centers


def resample_affine(images, back, centers, side):
    """Each output pixel p taken from back @ (p - center) of its image, counted from its middle, interpolated between
    four. images (n, 28, 28) uint8, back (n, 2, 2), centers (n, 2) -> (n, side, side) uint8"""
    n, pixel = len(images), np.arange(side)
    offset = np.stack(np.broadcast_arrays(pixel[:, None] - centers[:, 0, None, None],
                                          pixel - centers[:, 1, None, None]), 1)        # (n, 2, side, side)
    source = np.einsum("nij,njyx->niyx", back, offset) + (BOX - 1) / 2 + 1              # in the padded image
    source = np.clip(source, 0, BOX + 1 - 1e-6)
    corner = source.astype(np.int64)
    (y, x), (dy, dx) = corner.transpose(1, 0, 2, 3), (source - corner).transpose(1, 0, 2, 3)
    padded = np.pad(images.astype(float), ((0, 0), (1, 1), (1, 1)))
    flat = (np.arange(n)[:, None, None] * (BOX + 2) + y) * (BOX + 2) + x
    four = ((row + column, down * across) for row, down in ((0, 1 - dy), (BOX + 2, dy))
            for column, across in ((0, 1 - dx), (1, dx)))
    return np.rint(sum(share * np.take(padded, flat + step) for step, share in four)).astype(np.uint8)


def stream_digits(digits, config, kind, factors=None):
    """Test or validation digits in dicts of at most CHUNK: images (n, side, side) uint8, labels (n,).

    kind: "val", validation digits, or "test", moved, or with --task mnist as they are; of test digits also "affine",
    transformed, anywhere on the canvas; "any_position", moved by whole pixels to wherever they fit, which is further than
    training moves them; "centered", transformed, their middle on the canvas', or as near as their ink allows; "real",
    affNIST's files. factors: those of affine or centerd digits, {factor: number}, where they are not to be drawn."""
    if kind == "real":
        yield from read_affnist(config.affnist_dir)
        return
    images, labels = digits["val" if kind == "val" else config.eval_split]
    n, side = min((config.n_val if kind == "val" else config.n_test) or len(labels), len(labels)), SIDES[config.task]
    for start in range(0, n, CHUNK):
        part = slice(start, min(start + CHUNK, n))
        rng = rng_for(config.seed, "evaluation", KINDS.index(kind), 0, start // CHUNK)
        if kind == "any_position":
            shown = translate_anywhere(images[part], side, rng)
        elif kind in ("affine", "centered"):
            drawn = factors or {name: rng.uniform(*within, part.stop - start) for name, within in RANGES.items()}
            matrices = np.broadcast_to(affine_matrix(**drawn), (part.stop - start, 2, 2))
            shown, _ = transform_digits(images[part], matrices, None if kind == "centered" else rng, side)
        else:
            shown = translate_digits(images[part], side, 0 if config.task == "mnist" else max_shift(config), rng)
        yield {"images": shown, "labels": labels[part].astype(np.int64)}


def select_training_digits(digits, config):
    """-> images, labels of the digits to train on: --n-per-class of each class, other ones for each seed, or all"""
    images, labels = digits["train"]
    if not config.n_per_class:
        return images, labels
    order = rng_for(config.seed, "data", 1).permutation(len(labels))
    kept = [order[labels[order] == digit][:config.n_per_class] for digit in range(N_CLASSES)]
    if (least := min(map(len, kept))) < config.n_per_class:
        raise InputError(f"--n-per-class {config.n_per_class}: of one digit there are {least}; lower it, or 0 for all")
    kept = np.sort(np.concatenate(kept))
    return images[kept], labels[kept]


def epoch_samples(digits, epoch, config, dtype=np.float32):
    """The digits of one epoch, moved, a chunk of whole batches at a time: every digit once before one comes again"""
    images, labels = select_training_digits(digits, config)
    size, rng = max(1, CHUNK // config.batch_size) * config.batch_size, rng_for(config.seed, "batches", epoch)
    order = itertools.chain.from_iterable(map(rng.permutation, itertools.repeat(len(labels))))
    for k, start in enumerate(range(0, config.n_train, size)):
        rows = np.fromiter(itertools.islice(order, min(size, config.n_train - start)), np.int64)
        rng = rng_for(config.seed, "batches", epoch, k)
        samples = {"images": translate_digits(images[rows], SIDES[config.task], max_shift(config), rng),
                   "labels": labels[rows].astype(np.int64)}
        if config.dropout:
            kept = rng.random((len(rows), plan(config).n_dropped), np.float32) >= config.dropout
            samples["dropout_mask"] = kept / np.float32(1 - config.dropout)
        yield samples


def to_batch(samples, rows, dtype=np.float32):
    """Rows of a dict of samples as what the network eats: images, pixels in [0, 1] in `dtype`, labels (N,), and the
    dropout_mask, if there is one"""
    batch = {name: a[rows] if name == "labels" else a[rows].astype(dtype) for name, a in samples.items()}
    return batch | {"images": batch["images"] / 255}


def read_affnist(folder):
    """affNIST's test digits, file by file: dicts of images (n, 40, 40) uint8 and labels (n,). Raises InputError that
    names what is missing or wrong."""
    place = Path(folder).expanduser()
    paths = [path for at in (place / "test_batches", place) for path in at.glob("*.mat") if path.stem.isdigit()]
    if not paths:
        raise InputError(f"--affnist-dir {folder}: no test_batches/1.mat, 2.mat, ... there; give the folder that holds "
                         "affNIST's test_batches")
    try:
        import scipy.io
    except ImportError:
        raise InputError("--affnist-dir: SciPy reads its files, MATLAB's; python3 -m pip install scipy") from None
    for path in sorted(paths, key=lambda path: int(path.stem)):
        try:
            found = scipy.io.loadmat(path, squeeze_me=True, struct_as_record=False, variable_names=["affNISTdata"])
            images, labels = (np.asarray(getattr(found["affNISTdata"], name)) for name in ("image", "label_int"))
        except Exception as error:                       # what a damaged file makes the reader raise is not documented
            raise InputError(f"{path}: damaged, or not affNIST's ({' '.join(str(error).split())[:80]}); get it anew"
                             ) from None
        side, labels, images = SIDES["affnist"], np.atleast_1d(labels), images.reshape(len(images), -1)
        known = len(labels) and labels.min() >= 0 and labels.max() < N_CLASSES
        if images.shape != (side * side, len(labels)) or images.dtype != np.uint8 or not known:
            raise InputError(f"{path}: holds {images.dtype} of shape {images.shape} beside {len(labels)} labels, not "
                             f"uint8 of shape ({side * side}, digits) beside labels from 0 to 9; get it anew")
        yield {"images": images.T.reshape(-1, side, side), "labels": labels.astype(np.int64)}


# ============================================================== the paper: capsules, routing, losses, the networks

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


def uniform_routing_forward(u, W, empty=np.empty):
    """One routing iteration without a vote: couplings are 1/J, so that the matrices can come after the sum over the n
    capsules that share one: s_j = 1/J sum_types W_j (u_1 + ... + u_n). u (N, I, E), W (B, E, J, D), I = n B, ordered
    (place, type) -> s (N, J, D)"""
    (N, I, E), (B, _, J, D) = u.shape, W.shape
    sums = u.reshape(N, I // B, B * E).sum(1)
    return (np.matmul(sums, W.reshape(B * E, J * D)) / J).reshape(N, J, D), (u.shape, sums, W, empty)


def uniform_routing_backward(ds, cache):
    """ds (N, J, D) -> du (N, I, E), dW (B, E, J, D)"""
    (N, I, E), sums, W, empty = cache
    B, _, J, D = W.shape
    ds = (ds / J).reshape(N, J * D)
    du, dW = ds @ W.reshape(B * E, J * D).T, np.matmul(sums.T, ds, out=empty((B * E, J * D), ds.dtype))
    return np.broadcast_to(du[:, None], (N, I // B, B * E)).reshape(N, I, E), dW.reshape(W.shape)


# SHARED reconstruction: a class's capsule redraws what it saw --------------------------------------------------------

def mask_forward(v, digits):
    """Keep one capsule, zero the others, once for every digit to redraw. v (N, J, D), digits (N, R) -> (N*R, J*D)"""
    (N, J, D), R = v.shape, digits.shape[1]
    masked = np.zeros((N, R, J, D), v.dtype)
    n, r = np.arange(N)[:, None], np.arange(R)
    masked[n, r, digits] = v[n, digits]
    return masked.reshape(N * R, J * D), (v.shape, digits)


def mask_backward(dmasked, cache):
    (N, J, D), digits = cache
    n, r = np.arange(N)[:, None], np.arange(digits.shape[1])
    dv = np.zeros((N, J, D), dmasked.dtype)
    np.add.at(dv, (n, digits), dmasked.reshape(N, -1, J, D)[n, r, digits])
    return dv


def reconstruction_loss(recon, target):
    """Squared error summed over pixels and digits, mean over the batch. recon, target (N, R, H, W) -> loss (float),
    drecon"""
    error = recon - target
    N = len(recon)
    return float(np.vdot(error, error)) / N, error * (2 / N)


# END SHARED reconstruction -------------------------------------------------------------------------------------------

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


def classification_loss(out, labels, config):
    """The loss on the names: of a CNN the cross-entropy of its scores, of capsules the margin loss on their lengths, or
    the cross-entropy of their logarithms: p_j = |v_j| / sum_k |v_k|. -> its name, loss (float), its gradient (N, J)"""
    if config.loss == "margin":
        return "margin", *margin_loss(out["scores"], np.eye(N_CLASSES, dtype=out["scores"].dtype)[labels])
    if config.model not in CAPSULES:
        return "cross_entropy", *cross_entropy(out["scores"], labels)
    loss, dlogs = cross_entropy(np.log(out["scores"]), labels)
    return "cross_entropy", loss, dlogs / out["scores"]


# -------------------------------------------------------------- the networks

CAPSULES, CNNS = ("capsnet-shared", "capsnet", "vector-gap", "vector-gmp"), ("cnn-gap", "cnn-gmp", "cnn-dense", "cnn")
VECTORS = CAPSULES[2:]                                         # averages, or maxima, over places: no votes, no routing
MODELS = CAPSULES + CNNS
ROUTED = ("capsnet-shared", "capsnet")                                    # those with primary capsules, votes and routing
PAPER_MODELS = ("capsnet", "cnn-dense", "cnn")                        # those that presets small and paper have
E, D = 8, 16                       # dimensions of a primary and of a digit capsule
VOTES_GAIN = 16.0                  # of the variance of a digit's summed votes, at first
CONV3, CONV5 = 64, 128             # channels of the backbone's third and fourth convolutions, and of its fifth
SIZES = {                          # of each preset: types of primary capsules, units of the decoder's two hidden layers
    "deep": (16, 256, 512), "small": (8, 256, 512), "paper": (32, 512, 1024)}


def backbone(config, width):
    """The layers of config.model up to its capsules, or to its scores. Maxima come before the ReLU, which then has a
    quarter of the work; of PrimaryCaps the squash takes the ReLU's place. width: see matched_width."""
    c, relu, pool = config.conv1_channels, ("relu",), ("max_pool",)

    def conv(name, F, K=3, stride=1):
        return "conv2d", name, K, stride, F
    capsules = SIZES[config.preset][0] * E
    deep = (conv("conv1", c), relu, conv("conv2", c), pool, relu, conv("conv3", CONV3), relu, conv("conv4", CONV3),
            pool, relu, conv("conv5", width if config.model in ("cnn-gap", "cnn-gmp") else CONV5), relu)
    if config.model == "cnn":                      # of 256, 256 and 128 channels, 328 and 192 units in the paper
        layers = (conv("conv1", c, K=5), relu, conv("conv2", c, K=5), relu, conv("conv3", -(-c // 2), K=5), relu,
                  ("flatten",), ("linear", "fc1", width), relu, ("linear", "fc2", -(-width * 192 // 328)), relu,
                  ("dropout",), ("linear", "fc3", N_CLASSES))
    elif config.model == "cnn-dense":
        layers = (*deep, ("flatten",), ("linear", "fc1", width), relu, ("dropout",), ("linear", "fc2", N_CLASSES))
    elif config.model in ("cnn-gap", "cnn-gmp"):
        layers = (*deep, ("global_avg_pool",) if config.model == "cnn-gap" else ("global_max_pool",), ("linear", "fc1", N_CLASSES))
    elif config.model in VECTORS:
        seen = ("global_avg_pool",) if config.model == "vector-gap" else ("global_max_pool",)
        layers = (*deep, conv("primary", N_CLASSES * D, K=1), seen)
    elif config.preset == "deep":
        layers = (*deep, conv("primary", capsules, K=1))
    else:                                                                               # the paper's two
        layers = conv("conv1", c, K=9), relu, conv("primary", capsules, K=9, stride=2)
    return with_norms(layers) if config.norm == "batch" else layers


def decoder(config):
    """The layers from masked capsules (N, J*D) to pixels in (0, 1), (N, H*W)"""
    _, h1, h2 = SIZES[config.preset]
    return (("linear", "dec1", h1), ("relu",), ("linear", "dec2", h2), ("relu",),
            ("linear", "dec3", SIDES[config.task] ** 2), ("sigmoid",))


@functools.cache
def plan(config, width=0):
    """infer_shapes of backbone, the layers, their places, and the units that dropout acts on; width: not the network's"""
    layers = backbone(config, width or matched_width(config))
    found = infer_shapes(layers, SIDES[config.task] + 2 * config.padding, 1, config.padding, rows=True)
    *_, n_dropped, _ = [math.prod(shape[:-1]) for shape in found.shapes.values()]       # what the last layer sees
    return SimpleNamespace(layers=layers, places=receptive_field_centers(found.along), n_dropped=n_dropped, **vars(found))


def param_shapes(config, width=0):
    """Names and shapes of the weights of config.model, in the order in which they are drawn"""
    found, J, B = plan(config, width), N_CLASSES, SIZES[config.preset][0]
    shapes = dict(found.shapes)
    if config.model in ROUTED:
        shapes["W"] = (B * (len(found.places) if config.model == "capsnet" else 1), E, J, D)       # (I or B, E, J, D)
    shapes |= {"coordinate_W": (2, J, D)} if config.model == "capsnet-shared" else {}
    return shapes | (infer_shapes(decoder(config), 1, J * D).shapes if config.recon_weight else {})


@functools.cache
def matched_width(config):
    """Channels of the last convolution of gap and max, units of the first hidden layer of dense and cnn, with which
    they have about as many weights as the preset's shared, or caps, without decoder. 0 for capsules."""
    if config.width or config.model in CAPSULES:
        return config.width

    def size(width, config=config):
        return sum(math.prod(shape) for shape in param_shapes(config, width).values())
    like = "capsnet-shared" if config.model in ("cnn-gap", "cnn-gmp") else "capsnet"
    target = size(0, dataclasses.replace(config, model=like, conv1_channels=None, recon_weight=0.0))
    above = bisect_left(range(1, 4096), target, key=size) + 1                           # the first that is not smaller
    return min((max(1, above - 1), above), key=lambda width: abs(size(width) - target))


def init_params(config):
    """-> flat dict of float32 arrays. He-normal where a ReLU follows, 1/fan-in variance elsewhere, of the votes'
    matrices VOTES_GAIN times that; biases 0."""
    rng, params, shapes = rng_for(config.seed, "init"), {}, param_shapes(config)
    last = [name for name in shapes if name.endswith("_w")][-1]                         # makes scores, or pixels
    votes = E * len(plan(config).places) * SIZES[config.preset][0]                      # that a digit's capsule sums
    for name, shape in shapes.items():
        fan_in = {"W": votes, "coordinate_W": votes, "dec1_w": D}.get(name, math.prod(shape[:-1]))   # the rest is masked
        gain = {"W": VOTES_GAIN, "coordinate_W": VOTES_GAIN, "primary_w": 1, last: 1}.get(name, 2)
        if name.endswith(("_b", "_gamma", "_beta")):
            params[name] = np.full(shape, name.endswith("_gamma"), np.float32)
        else:
            params[name] = rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(gain / fan_in))
    return params


def forward(params, images, config, digits=None, empty=np.empty, dropout_mask=None, statistics=None):
    """images (N, side, side) in [0, 1]; digits (N, 1) whose capsule to decode, None for the longest; dropout_mask
    (N, units) of a CNN, None for none; statistics: a dict in training, see layers_forward. -> out, cache

    out: scores (N, 10), of capsules their lengths; and of capsules v (N, 10, D) and, with a decoder, recon (N, 1, side,
    side); of those that are routed the primary capsules u (N, I, E), I ordered (row, column, type).
    """
    p = config.padding
    x = im2col_rows(np.pad(images, ((0, 0), (p, p), (p, p))), params["conv1_w"].shape[1])
    layers = [(*layer, dropout_mask) if layer == ("dropout",) else layer for layer in plan(config).layers]
    x, layers_cache = layers_forward(params, x, layers, empty, statistics)
    if config.model not in CAPSULES:
        return {"scores": x}, SimpleNamespace(layers=layers_cache, capsules=None)
    v, found, capsules_cache = capsules_forward(params, x, config, empty)
    lengths, lengths_cache = lengths_forward(v)
    digits = lengths.argmax(1)[:, None] if digits is None else digits
    out = {"scores": lengths, "v": v, **found}
    cache = SimpleNamespace(layers=layers_cache, capsules=capsules_cache, lengths=lengths_cache, decoder=None)
    if config.recon_weight:
        masked, cache.mask = mask_forward(v, digits)
        pixels, cache.decoder = layers_forward(params, masked, decoder(config), empty)
        out["recon"] = pixels.reshape(len(v), -1, *images.shape[1:])
    return out, cache


def backward(dscores, drecon, cache, config, need_dx=False):
    """dscores (N, 10), classification_loss's gradient; drecon (N, 1, side, side), None without a decoder -> grads, keys as
    params; and, if it is needed, that of im2col_rows' output, else None"""
    grads, dx = {}, dscores
    if cache.capsules:
        dv = lengths_backward(dscores, cache.lengths)
        if cache.decoder:
            dmasked = layers_backward(drecon.reshape(len(drecon), -1), cache.decoder, decoder(config), grads)
            dv = dv + mask_backward(dmasked, cache.mask)
        dx = capsules_backward(dv, cache.capsules, config, grads)
    return grads, layers_backward(dx, cache.layers, plan(config).layers, grads, need_dx)


PLAIN = (lambda s: (s, None)), (lambda dv, cache: dv)
RELU = (lambda s: relu_forward(s)), (lambda dv, cache: relu_backward(dv, cache))      # they stand further below
SQUASHES = {                       # --squash: of the primary capsules, and of the digits'
    "all": (SQUASH, SQUASH), "last": (PLAIN, SQUASH), "none": (PLAIN, PLAIN), "relu": (RELU, PLAIN)}


def capsules_forward(params, x, config, empty):
    """The backbone's output x (N, side, side, C), of vectors (N, C) -> v (N, J, D), what else is worth knowing, cache"""
    N, (first, last) = len(x), SQUASHES[config.squash]
    if config.model in VECTORS:
        v, routing_cache = last[0](x.reshape(N, N_CLASSES, D))
        return v, {}, SimpleNamespace(routing=routing_cache, x_shape=x.shape)
    u, primary_cache = first[0](x.reshape(N, -1, E))                                    # (N, I, E)
    parts, coordinates_cache, W, places = u, None, params["W"], plan(config).places
    if "coordinate_W" in params:
        parts, coordinates_cache = add_coordinates_forward(u, places)
        W = np.concatenate([W, np.broadcast_to(params["coordinate_W"], (len(W), 2, N_CLASSES, D))], 1)
    if config.routing_iters == 1:
        s, votes_cache = uniform_routing_forward(parts, W, empty)
        v, routing_cache = last[0](s)
    else:
        u_hat, votes_cache = (votes_forward(parts, W, empty) if config.model == "capsnet" else
                              shared_votes_forward(parts, W, len(places), empty))       # (N, J, I, D)
        v, routing_cache = routing_forward(u_hat, config.routing_iters, empty, ending=last)
    return v, {"u": u}, SimpleNamespace(primary=primary_cache, places=coordinates_cache, votes=votes_cache,
                                        routing=routing_cache, x_shape=x.shape)


def capsules_backward(dv, cache, config, grads):
    """-> dx, as x; the parameters' gradients go into `grads`"""
    (_, first_backward), (_, last_backward) = SQUASHES[config.squash]
    if config.model in VECTORS:
        return last_backward(dv, cache.routing).reshape(cache.x_shape)
    if config.routing_iters == 1:
        du, dW = uniform_routing_backward(last_backward(dv, cache.routing), cache.votes)
    else:
        votes_back = votes_backward if config.model == "capsnet" else shared_votes_backward
        du, dW = votes_back(routing_backward(dv, cache.routing), cache.votes)
    grads["W"] = dW[:, :E]
    if cache.places:
        grads["coordinate_W"] = dW[:, E:].sum(0)
        du = add_coordinates_backward(du, cache.places)
    return first_backward(du, cache.primary).reshape(cache.x_shape)


# SHARED rows: the first convolution, of an image with one channel ----------------------------------------------------

def im2col_rows(x, K):
    """x (N, H, W) -> (N, H-K+1, W, K): K shifted copies of the rows as channels. With it a KxK convolution of a
    one-channel image is a 1xK convolution of K channels, one GEMM with an inner dimension of K*K instead of K GEMMs
    with K."""
    return np.ascontiguousarray(sliding_window_view(x, K, axis=1))

# END SHARED rows -----------------------------------------------------------------------------------------------------


def global_max_pool_forward(x):
    """Global maximum: x (N, H, W, C) -> y (N, C)"""
    rows = x.reshape(len(x), -1, x.shape[-1])                                           # (N, H*W, C)
    at = rows.argmax(1)[:, None]                                                        # the first of equals
    return np.take_along_axis(rows, at, 1)[:, 0], (x.shape, at)


def global_max_pool_backward(dy, cache):
    (N, H, W, C), at = cache
    dx = np.zeros((N, H * W, C), dy.dtype)
    np.put_along_axis(dx, at, dy[:, None], 1)
    return dx.reshape(N, H, W, C)


def loss_and_grads(params, batch, config, empty=np.empty, batch_fraction=1.0):
    """One batch (to_batch's dict) -> (terms, grads, statistics): means over the batch, times `batch_fraction`, a
    shard's part of its batch. Pure; with an Arena the grads live until rewind(). statistics: of the normalizations.

    terms: loss = margin (or cross_entropy) + recon_weight * recon; recon is the summed squared error; hits: digits
    named right.
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
    """forward of some samples of a dict -> its arrays with a row a sample; it decodes the capsule of the digit that is
    there or, with decode="longest", the longest one"""
    batch = to_batch(samples, rows, params_dtype(params))
    out, _ = forward(params, batch["images"], config, batch["labels"][:, None] if decode == "labels" else None, empty)
    return {name: out[name] for name in ("scores", "v", "recon") if name in out}


# ============================================================== evaluation, report

def evaluate(params, chunks, config, runner):
    """Accuracy and losses over dicts of digits -> dict: n, hits, accuracy, correct (n,), loss, margin or cross_entropy,
    per_class (the accuracy of each class; nan where there is none of it) and, with a decoder, recon_mse, per pixel"""
    right, labels, sums = [], [], np.zeros(2)
    for part in chunks:
        out, target = runner.forward(params, part, config), part["images"][:, None]
        right.append(out["scores"].argmax(1) == part["labels"])
        labels.append(part["labels"])
        recon = reconstruction_loss(out["recon"], target.astype(out["recon"].dtype) / 255)[0] if "recon" in out else 0.0
        name, loss, _ = classification_loss(out, part["labels"], config)
        sums += np.array([loss, recon]) * len(part["labels"])
    right, labels = np.concatenate(right), np.concatenate(labels)
    (loss, recon), of_class = sums / len(right), [right[labels == digit] for digit in range(N_CLASSES)]
    return {"n": len(right), "hits": int(right.sum()), "accuracy": right.mean(), "correct": right,
            "loss": loss + config.recon_weight * recon, name: loss,
            "per_class": [float(each.mean()) if len(each) else math.nan for each in of_class]} | (
                {"recon_mse": recon / SIDES[config.task] ** 2} if config.recon_weight else {})


EPOCH_METRICS = ("loss", "margin", "cross_entropy", "recon_mse", "accuracy")


def evaluate_test_sets(params, digits, config, runner):
    """-> {key: what evaluate finds} of all the tests of the task"""
    return {key: evaluate(params, stream_digits(digits, config, kind), config, runner)
            for key, kind, _ in test_sets(config)}


def announce(run, digits):
    """What a run prints at its start: data, network, settings"""
    config, (_, labels) = run.config, select_training_digits(digits, run.config)
    where = "to any position" if max_shift(config) is None else f"by up to {max_shift(config)} px"
    run.progress.say(
        f"digits      {len(labels)} to train on: {digits['source']}, moved {where}\n"
        f"network     {config.model}, {config.preset}; {n_params(run.params):,} parameters\n"
        f"training    {config.n_epochs} x {config.n_train} digits, batches of {config.batch_size}, lr {config.lr}, "
        f"{config.loss} loss, seed {config.seed}, threads {run.runner.threads}"
        + f"; going on at step {run.step} of {run.n_steps}" * (run.step > 0))


def test_result(config, params, history, tests, found=None):
    """The dict that --out-json writes. found: the network that was loaded, if it was not trained here"""
    measured = {"hit_bits": {key: pack_bits(test["correct"]) for key, test in tests.items()}}
    for key, test in tests.items():
        n = min(test["n"], MNIST.files["test", "labels"][2][0])       # affNIST's files hold each digit in 32 variants
        measured |= {f"{key}_accuracy": test["accuracy"], f"{key}_hits": test["hits"], f"{key}_n": test["n"],
                     f"{key}_accuracy_ci95": wilson_interval(test["accuracy"] * n, n),
                     f"{key}_per_class": test["per_class"], f"{key}_recon_mse": test.get("recon_mse")}
    return make_result(config, params, history, measured) | (
        {"history": {}, "loaded": found.file} if found else {})                         # its history is in that file


def report(config, params, history, tests, say, found=None):
    """Print evaluate_test_sets's results, and write --out-json"""
    results = test_result(config, params, history, tests, found)
    say(f"\n{DIGIT_NAMES[results['source']]}{', of the validation images' * (config.eval_split == 'val')}")
    for key, _, words in test_sets(config):
        (low, high), test = results[f"{key}_accuracy_ci95"], tests[key]
        say(f"  {words:22}{test['accuracy']:.4f} of {test['n']}, 95% interval [{low:.4f}, {high:.4f}]"
            + (f", redrawn with error {test['recon_mse']:.4f}" if "recon_mse" in test else ""))
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

NOT_NORMALIZED = {"norm": "none", "lr": 1e-3, "warmup": 0}
PRESETS = {                        # what is not given
    "deep": {"conv1_channels": 16, "norm": "batch", "lr": 1e-2, "warmup": 200},
    "small": {"conv1_channels": 64, **NOT_NORMALIZED}, "paper": {"conv1_channels": 256, **NOT_NORMALIZED}}
ONLY_CAPSULES = {"model": CAPSULES}


@dataclass(frozen=True)
class Config(Settings):
    """All settings of a run: the names, defaults and help texts of the command line flags come from here."""
    n_epochs: int = option(4, "epochs to train", "training", low=1, high=100_000)
    n_train: int = option(12000, "training digits in an epoch, each moved at random", "data", low=1, high=10_000_000)
    n_per_class: int = option(0, "training digits of each class, drawn by the seed; 0: all", "data", low=0, high=10_000)
    n_val: int = option(5000, "validation digits, training images held out, moved once", "data", low=1, high=5000)
    n_test: int = option(0, "test digits, the first there are; 0: all", "data", low=0, high=10_000, runtime=True)
    eval_split: str = option("test", "images to draw tests from", "data", choices=("test", "val"), runtime=True)
    task: str = option("affnist", "affnist: digits translated on a 40x40 px canvas, tested on translated and on affine "
                       "ones; mnist: on 28x28 px, tested as they are", "data", choices=tuple(SIDES))
    train_shift: str = option(None, "training digits are translated by up to N px on each axis; full: to any position "
                              "at which all of their ink is on the canvas", "data", metavar="N|full")
    affnist_dir: str = option("", "folder with affNIST's test_batches: test on its files, too; needs SciPy", "data",
                              runtime=True, metavar="DIR", only={"task": ("affnist",)})
    digits: str = option("auto", "auto: MNIST if at hand or to be fetched, else synthetic", "data",
                         choices=("auto", "mnist", "synthetic"), runtime=True)
    mnist_dir: str = option("", "folder with the four MNIST idx files, raw or .gz (else $MNIST_DIR, else "
                            "~/.cache/hinton-mnist, else download)", "data", runtime=True, metavar="DIR")
    lr: float = option(None, "Adam's learning rate at the start, or after the warm-up", "training", above=0)
    warmup: int = option(None, "steps over which the learning rate first rises from 0", "training", low=0, high=100_000)
    muon: float = option(None, "step of a normalized kernel along its orthogonalize momentum (Muon), as a share of "
                         "the kernel's length, in Adam's place; 0, as with --norm none: Adam for all", "training",
                         low=0, high=1)
    loss: str = option(None, "margin loss, or cross-entropy: of capsules with the logarithms of their lengths as "
                       "scores", "training", choices=("margin", "cross-entropy"), only=ONLY_CAPSULES)
    recon_weight: float = option(None, "weight of the summed squared error of the redrawn digit; 0: no decoder",
                                 "training", low=0, only=ONLY_CAPSULES)
    stop_at: float = option(0.0, "stop at this accuracy on validation digits; 0: never", "training", low=0, high=1)
    model: str = option("capsnet-shared", "capsules whose matrices are shared over places, or with one for every place (caps), "
                        "or averages or maxima without a matrix (vectors, vectors-max); other heads on that backbone, as "
                        "large as shared (gap, max) or caps (dense) without decoder; the paper's cnn, as large as caps",
                        "network", choices=MODELS)
    preset: str = option("deep", "six small normalized convolutions, and what is not given; or, not normalized, caps "
                         "on the paper's two, at a quarter of its width (small) or as they are, and cnn and dense as "
                         "large, with dropout", "network", choices=tuple(PRESETS), only={"model": PAPER_MODELS})
    norm: str = option(None, "batch normalization, over 16 samples, or none", "network", choices=("batch", "none"))
    squash: str = option("all", "capsules that are squashed: all; last, the digits' alone; none; relu: none, "
                         "with a ReLU of the primary capsules", "network", choices=tuple(SQUASHES), only=ONLY_CAPSULES)
    padding: int = option(None, "px of background around the image; if not given, what suits the network", "network",
                          low=0, high=20)
    conv1_channels: int = option(None, "channels of Conv1 and 2; cnn: Conv3 has half", "network", low=1, high=1024)
    routing_iters: int = option(None, "iterations; 1: uniform", "network", low=1, high=50, only={"model": ROUTED})
    dropout: float = None          # these are no flags: the recipe says them
    width: int = 0

    def preset_defaults(self):
        capsules = self.model in CAPSULES
        narrow = self.model == "cnn-dense" or (self.model, self.preset) == ("cnn", "small")
        values = PRESETS.get(self.preset, {}) | {
            "loss": "margin" if capsules else "cross-entropy", "recon_weight": 0.0005 if capsules else 0.0,
            "routing_iters": 3 if self.model == "capsnet" else 1, "train_shift": SHIFTS.get(self.task),
            "padding": 0 if self.preset != "deep" or self.task == "mnist" else 4 if self.model in ROUTED else 8,
            "dropout": 0.5 if self.preset != "deep" and self.model in ("cnn-dense", "cnn") else 0.0}
        values |= {"conv1_channels": 16} if narrow else {}
        lr = values.get("lr") if self.lr is None else self.lr
        return values | {"muon": 2 * lr if (self.norm or values.get("norm")) == "batch" else 0.0}


WEIGHTS = Path(__file__).with_name("weights") / "affnist_capsnet-shared.npz"                   # the network that comes along
SOURCE_SETTING = "digits"                                                   # the setting that says where data come from
EVAL_SETTINGS = ("seed", "routing_iters")                                    # what may differ from what a network trained with


def check_config(config):
    """check_options, and what concerns two settings at once"""
    check_options(config)
    check_muon(config)
    most = (SIDES[config.task] - INK) // 2
    if config.train_shift != "full" and not (str(config.train_shift).isdecimal() and int(config.train_shift) <= most):
        raise InputError(f"--train-shift {config.train_shift}: must be a whole number of pixels, 0 to {most}, or full")
    if config.batch_size > config.n_train:
        raise InputError(f"--batch-size {config.batch_size}: more than --n-train {config.n_train}; lower it")
    if config.eval_split == "val" and config.n_test > MNIST.n_val:
        raise InputError(f"--n-test {config.n_test}: with --eval-split val there are {MNIST.n_val} digits; lower it")
    if config.affnist_dir:
        sum(1 for _ in read_affnist(config.affnist_dir))                                # now, not after training


# ============================================================== twins: machinery that stands alike in other experiments

# SHARED mnist: a data set of four idx files, its cache and download, and synthetic digits where it cannot be had -----

MNIST = SimpleNamespace(
    name="MNIST", source="mnist", variable="MNIST_DIR", cache="~/.cache/hinton-mnist",
    n_val=5000,                                                         # the last of the training images
    mirrors=("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
    files={  # split, kind -> file, magic number, shape, SHA-256 of the decompressed bytes
        ("train", "images"): ("train-images-idx3-ubyte", 2051, (60000, 28, 28),
                              "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        ("train", "labels"): ("train-labels-idx1-ubyte", 2049, (60000,),
                              "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ("test", "images"): ("t10k-images-idx3-ubyte", 2051, (10000, 28, 28),
                             "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        ("test", "labels"): ("t10k-labels-idx1-ubyte", 2049, (10000,),
                             "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2")})
N_SYNTHETIC = {"train": 20000, "val": 2500, "test": 5000}
DIGIT_NAMES = {"mnist": "MNIST digits", "synthetic": "SYNTHETIC digits"}         # in everything printed or drawn


class DataNotFound(InputError):
    """A data set is not here and cannot be fetched"""


def parse_idx(raw, name, magic, shape, sha256):
    """The array in the bytes of one idx file, checked against what it must be. raw: bytes, gzipped or not.

    Raises InputError naming the file and the fault: not gzip, wrong magic number, wrong size, wrong checksum.
    """
    mend = "give the right one, or delete it to have it downloaded again"
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{name}: corrupt or truncated gzip ({error}); {mend}") from None
    start = 4 + 4 * len(shape)
    header = np.frombuffer(raw[:start], ">i4").tolist() if len(raw) >= start else ["missing"]
    if header[0] != magic:
        raise InputError(f"{name}: not the idx file expected here (magic number {header[0]}, not {magic}); {mend}")
    size = start + math.prod(shape)
    if tuple(header[1:]) != shape or len(raw) != size:
        raise InputError(f"{name}: holds {len(raw)} bytes and says shape {tuple(header[1:])}, should be {size} bytes "
                         f"and shape {shape}; {mend}")
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise InputError(f"{name}: its SHA-256 is another, the file is damaged or of another data set; {mend}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def download_idx(data_set, name, spec, folder, timeout, say):
    """Fetch one file of a data set from the first mirror that has it whole; verified before it appears in `folder`"""
    faults, mend = [], f"pass a folder with {data_set.name}'s four files as --mnist-dir, or use --digits synthetic"
    for mirror in data_set.mirrors:
        try:
            say(f"downloading {mirror}{name}.gz")
            with urllib.request.urlopen(mirror + name + ".gz", timeout=timeout) as reply:
                raw = reply.read()
            parse_idx(raw, mirror + name + ".gz", *spec)
        except (OSError, ValueError, http.client.HTTPException, InputError) as error:
            faults.append(f"{mirror.split('/')[2] or mirror}: {' '.join(str(error).split())}")
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / (name + ".gz"), lambda file, raw=raw: file.write(raw))
        except (OSError, InputError) as error:
            raise DataNotFound(f"the cache {folder} cannot be written ({error}); make room there, or {mend}") from None
        return folder / (name + ".gz")
    raise DataNotFound(f"could not download {name}.gz ({'; '.join(faults)}); check the network, or {mend}")


def load_idx(data_set, given, timeout, say):
    """-> {"train": (images, labels), "val": ..., "test": ...}, uint8. Looks in the folder given, else in that which the
    data set's variable names, as $MNIST_DIR, else in the cache, else at the mirrors."""
    variable = data_set.variable
    flag, given = ("--mnist-dir", given) if given else (variable, os.environ.get(variable, ""))
    folder, arrays = Path(given or data_set.cache).expanduser(), {}
    if given and not folder.is_dir():
        raise InputError(f"{flag} {given}: no such folder; give the one that holds {data_set.name}'s four idx files")
    for (split, kind), (name, *spec) in data_set.files.items():
        found = next((p for p in (folder / name, folder / (name + ".gz")) if p.exists()), None)
        if found is None and given:
            raise InputError(f"{folder / name}[.gz]: missing; put {data_set.name}'s four idx files there, or leave "
                             f"--mnist-dir and {variable} unset to download them")
        found = found or download_idx(data_set, name, spec, folder, timeout, say)
        try:
            arrays[split, kind] = parse_idx(found.read_bytes(), str(found), *spec)
        except OSError as error:
            fault = f"{found}: cannot be read ({error.strerror}); check the file and its permissions"
            raise InputError(fault) from None
    images, labels, n = arrays["train", "images"], arrays["train", "labels"], -data_set.n_val
    return {"train": (images[:n], labels[:n]), "val": (images[n:], labels[n:]),
            "test": (arrays["test", "images"], arrays["test", "labels"])}


# The digits for a machine without MNIST. One row per writing style: digit, relative frequency, strokes. A stroke is a
# smooth curve through control points written xxyy on a 100 x 100 sheet (x right, y down); `|` lifts the pen. Strokes
# that name the same point share it, so that a corner (two strokes meeting) stays joined when the points are perturbed.
GLYPHS = (
    (0, 3, "5500 1812 0550 2288 5299 8287 9348 8012 5500"),
    (0, 2, "7508 4500 1522 0558 2893 6092 9055 8018 5003 3010"),
    (0, 1, "3508 1535 1070 4099 8085 9045 7810 5002 4212"),
    (0, 1, "3003 1025 0660 3096 7092 9560 8525 6206"),
    (1, 5, "5500 5250 5099"),
    (1, 1, "3816 5500 | 5500 5250 5099"),
    (1, 1, "3416 5000 | 5000 5050 5099 | 2799 5099 7399"),
    (2, 3, "1522 4500 7817 6848 3878 0897 | 0897 5094 9697"),
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
    (3, 2, "2012 5000 8012 6838 4848 6855 7575 5095 2099 0590"),
    (4, 3, "2200 1555 | 1555 5054 9052 | 7505 7250 6899"),
    (4, 2, "6500 3835 0865 | 0865 5064 9765 | 6500 6550 6499"),
    (4, 2, "2000 1230 2550 5550 8035 | 8500 8035 7599"),
    (4, 2, "2502 1235 2255 5055 9545 | 7510 6850 6099"),
    (4, 1, "6205 1260 | 1260 5062 9558 | 7030 6650 6299"),
    (5, 3, "9003 5504 2503 | 2503 2045 | 2045 5038 8060 7090 4599 0890"),
    (5, 2, "8805 5202 2522 3542 6855 7580 4599 0890"),
    (5, 2, "3008 2248 5040 7862 7090 4099 0892 | 3008 6005 9903"),
    (5, 2, "9908 6506 3508 | 3508 2545 | 2545 5542 7562 6088 3099 0390"),
    (5, 1, "2812 2248 5040 7862 7488 4099 1590 | 3805 6505 9903"),
    (5, 1, "8505 3510 | 3510 2545 | 2545 5548 7270 5592 2095 0885"),
    (6, 3, "5500 2828 1462 2290 5299 7885 7260 4850 1868"),
    (6, 2, "4500 2040 1275 3598 6892 7268 5054 1872"),
    (6, 2, "7005 3520 1260 2895 6595 8272 6555 3565 2285"),
    (6, 2, "5000 2030 0870 3096 7095 9275 7558 4565 2585"),
    (6, 1, "3500 1845 1885 4599 8592 8575 5568 1885"),
    (7, 3, "0508 5006 8505 | 8505 6540 4599"),
    (7, 2, "0815 4508 8803 7530 5560 4099"),
    (7, 2, "0808 5006 8505 | 8505 6045 4599 | 2552 5551 8550"),
    (7, 1, "1225 1508 | 1508 5006 8805 | 8805 6845 5099"),
    (7, 1, "0530 2812 6015 8802 | 8802 6545 4599"),
    (8, 3, "8508 5000 2015 3538 6855 7880 5099 1585 2862 6040 8508"),
    (8, 2, "7812 5000 2212 2835 5548 8272 7795 4599 1388 1570 4550 7230 7812"),
    (8, 1, "5000 1812 2238 5048 7835 8010 5000 | 5048 1565 1590 5099 8588 8362 5048"),
    (8, 2, "8510 5500 3015 3840 6062 6085 4599 2585 3562 6538 8815"),
    (8, 2, "8515 5000 1520 3545 6068 5595 3590 3572 5550 8515"),
    (8, 1, "7808 5500 3015 3838 6260 7082 5099 2888 3665 6238 7808"),
    (9, 3, "7820 5000 1518 1442 4552 7235 7820 | 7820 7460 7099"),
    (9, 2, "7820 5000 1518 1442 4552 7235 7820 | 7820 8065 6295 3098 1292"),
    (9, 3, "7810 4502 1225 2250 5548 7612 | 7612 6855 5599"),
    (9, 1, "7806 5002 2518 2842 5545 8026 | 8026 7060 4899"),
    (9, 2, "7015 5000 1820 1842 4050 7030 | 8005 7545 6599"))
DOTS = 112                                                      # pen positions per glyph


def _stroke_basis(strokes, size):
    """Control points (K, 2) and the matrix (DOTS, K) from them to pen positions evenly spaced in length."""
    names = list(dict.fromkeys(strokes.replace("|", " ").split()))
    points = np.array([(int(name[:2]), int(name[2:])) for name in names]) / 50 - 1    # (K, 2)
    rows, steps = [], []
    t = np.linspace(0, 1, 17)[:, None]
    for stroke in strokes.split("|"):
        knots = np.eye(len(names))[[names.index(name) for name in stroke.split()]]
        knots = np.vstack([2 * knots[0] - knots[1], knots, 2 * knots[-1] - knots[-2]])
        rows.append(np.vstack([                                                      # Catmull-Rom spline
            b + t / 2 * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * b - a - 3 * c + d)))
            for a, b, c, d in zip(knots, knots[1:], knots[2:], knots[3:])]))
        path = rows[-1] @ points
        steps.append(np.hypot(*np.diff(path, axis=0, prepend=path[:1]).T))           # a lift has no length
    rows, length = np.vstack(rows), np.cumsum(np.concatenate(steps))
    even = np.linspace(0, length[-1], DOTS)
    basis = np.zeros((DOTS, size))
    basis[:, :len(names)] = np.stack([np.interp(even, length, column) for column in rows.T], 1)
    return np.vstack([points, np.zeros((size - len(names), 2))]), basis


def _render(dots, width, edge, pressure):
    """Pen positions (n, DOTS, 2) -> ink in [0, 1] (n, 28, 28), sized and centerd as MNIST does."""
    low, high = dots.min(1), dots.max(1)                                             # (n, 2)
    scale = (20 - width * pressure.max(1)) / (high - low).max(1)  # the ink, not its axis, spans 20
    dots = (dots - ((low + high) / 2)[:, None]) * scale[:, None, None] + 9.5
    pixel = np.arange(20, dtype=np.float32)[:, None]
    gap = dots.astype(np.float32).transpose(2, 1, 0)[:, :, None] - pixel       # (2, DOTS, 20, n)
    gap = (gap / pressure.astype(np.float32).T[:, None]) ** 2  # a pressed pen reaches further
    nearest = np.full((20, 20, len(width)), np.inf, np.float32)
    squared = np.empty_like(nearest)
    for across, down in zip(*gap):  # images last: long contiguous inner loops
        np.minimum(nearest, np.add(down[:, None], across[None], out=squared), out=nearest)
    ink = np.clip((width / 2 - np.sqrt(nearest)) / edge + 0.5, 0, 1)                 # (20, 20, n)
    ink *= ink * (3 - 2 * ink)                                    # saturated core, soft rim
    center = [(ink.sum(axis) * pixel).sum(0) / ink.sum((0, 1)) for axis in (1, 0)]
    top, left = np.clip(np.rint(14 - np.array(center)), 0, 8).astype(int)
    canvas = np.zeros((len(width), 28, 28), np.float32)
    image, row, column = np.ogrid[:len(width), :20, :20]
    canvas[image, top[:, None, None] + row, left[:, None, None] + column] = ink.transpose(2, 0, 1)
    return canvas


def synthesize_digits(n, seed):
    """Draw n digits: images (n, 28, 28) uint8, labels (n,) uint8 and factors, a dict of (n,) float32.

    Factors, in the order they act: style (which of its digit's glyphs), wobble (how far it is deformed),
    aspect (width factor, 1 is nominal), slant (shear, positive leans right), rotation
    (radians, positive is counter-clockwise) and stroke (mean width of the ink in px).
    """
    random = rng_for(seed, "data")
    digit, weight = (np.array([row[i] for row in GLYPHS], float) for i in (0, 1))
    size = max(len(set(row[2].replace("|", " ").split())) for row in GLYPHS)
    points, basis = (np.stack(part) for part in zip(*(_stroke_basis(row[2], size) for row in GLYPHS)))
    labels = random.integers(0, 10, n)
    share = np.cumsum(weight / np.array([weight[digit == d].sum() for d in digit]))  # digit d: (d, d + 1]
    glyph = np.searchsorted(share, labels + random.uniform(1e-6, 1 - 1e-6, n))           # (n,)
    factors = {"slant": random.normal(0.15, 0.25, n), "rotation": random.normal(0, 0.08, n),
               "aspect": np.exp(random.normal(0, 0.2, n)),
               "stroke": np.exp(random.normal(0.92, 0.26, n)).clip(1.2, 4.5),
               "style": glyph - np.searchsorted(digit, labels), "wobble": random.uniform(0.03, 0.17, n)}
    images = np.empty((n, 28, 28), np.uint8)
    for start in range(0, n, 250):
        part = slice(start, start + 250)
        slant, rotation, aspect, stroke, _, wobble = (value[part] for value in factors.values())
        count = len(slant)
        control = points[glyph[part]] + wobble[:, None, None] * random.normal(0, 0.7, (count, size, 2))
        dots = basis[glyph[part]] @ control                                    # (n, DOTS, 2)
        x, y = dots[..., 0], dots[..., 1]
        # A warp without linear part bends the strokes and leaves slant, rotation and aspect what they say.
        warp = np.stack([x * x, x * y, y * y], -1) @ random.normal(0, 1, (count, 3, 2))
        dots = dots + wobble[:, None, None] * warp
        cos, sin = np.cos(rotation), np.sin(rotation)
        zero = np.zeros(count)
        turn = np.stack([cos, -sin, sin, cos], -1).reshape(-1, 2, 2)
        shear = np.stack([0.8 * aspect, zero, -slant, zero + 1], -1).reshape(-1, 2, 2)  # acts on rows (x, y)
        cycles, phase, depth = random.uniform([[0.3], [0], [0]], [[3], [1], [0.4]], (3, count))[..., None]
        pressure = 1 + depth * np.sin(2 * np.pi * (cycles * np.linspace(0, 1, DOTS) + phase))    # (n, DOTS)
        pressure /= pressure.mean(1, keepdims=True)  # keeps `stroke` the mean width
        ink = _render(dots @ shear @ turn, stroke, random.uniform(1.0, 1.6, count), pressure)
        images[part] = np.rint(255 * ink)
    return images, labels.astype(np.uint8), {key: value.astype(np.float32) for key, value in factors.items()}


def load_digits(config, say=print, data_set=MNIST):
    """-> {"source": "mnist" | "synthetic", "train" | "val" | "test": (images (n, 28, 28) uint8, labels (n,) uint8)}.

    MNIST: the first 55,000 training images, the last 5,000, the test images. No image is in two splits. With
    digits="auto" a machine without MNIST gets synthetic digits, and a notice, if no mirror has MNIST for it, be there
    no network or one whose answers are not MNIST. A damaged file in a folder or in the cache is an error all the same,
    never a reason to switch.
    """
    if config.digits != "synthetic":
        try:
            found = load_idx(data_set, config.mnist_dir, 5 if config.digits == "auto" else 30, say)
            return {"source": data_set.source} | found
        except DataNotFound as error:
            if config.digits != "auto":
                given = shlex.join(["python3", *sys.argv]).replace(f" --digits {config.digits}", "")
                raise DataNotFound(f"{error}, as in: {given} --digits synthetic") from None
            bar = "!" * 79                                                      # --quiet does not hide this
            print(f"{bar}\n!!  NO {data_set.name} HERE: these are SYNTHETIC digits. Numbers are not comparable with "
                  f"{data_set.name}'s.\n!!  {error}\n{bar}", file=sys.stderr, flush=True)
    digits, start = {"source": "synthetic"}, 0
    images, labels, _ = synthesize_digits(sum(N_SYNTHETIC.values()), config.seed)
    for split, n in N_SYNTHETIC.items():
        digits[split] = (images[start:start + n], labels[start:start + n])
        start += n
    return digits

# END SHARED mnist ----------------------------------------------------------------------------------------------------

# SHARED muon: steps of normalized kernels along their orthogonalize momentum ----------------------------------------

MUON_BETA, MUON_ROUNDS = 0.95, 5
MUON_POLYNOMIAL = 3.4445, -4.7750, 2.0315          # Jordan et al. 2024: steep at 0, so that few rounds do


def orthogonalize(g):
    """g (C, F) = U S V^T -> about U V^T, singular values between 0.7 and 1.2 but for those that were under |g| / 500:
    Newton-Schulz, X <- P X with P = a + b G + c G^2 and G = X X^T, from X = g / |g|.

    Only the small square G is iterated, G <- P G P, and the product of all P meets the long X once: 2 to 6 times as
    fast."""
    a, b, c = MUON_POLYNOMIAL
    x = g / (np.linalg.norm(g) + g.dtype.type(1e-12))
    x = x.T if len(g) > g.shape[1] else x
    square, product = x @ x.T, np.eye(len(x), dtype=x.dtype)
    for _ in range(MUON_ROUNDS):
        factor = b * square + c * (square @ square)
        factor[np.diag_indices(len(x))] += a
        product = factor @ product
        square = factor @ square @ factor
    x = product @ x
    return x.T if len(g) > g.shape[1] else x


def muon_step(params, shard_grads, momentum, names, share, runner):
    """One step of the kernels `names` in place: with the momentum m = 0.95 m + g, along orthogonalize(g + 0.95 m), by
    `share` of the kernel's length, which then is what it was: to the normalization behind it only its direction counts.
    """
    def update(name):
        w, m, *gs = (arrays[name].reshape(-1, params[name].shape[-1]) for arrays in (params, momentum, *shard_grads))
        g = sum(gs[1:], gs[0])
        m *= MUON_BETA
        m += g
        u = orthogonalize(g + MUON_BETA * m)
        length = np.linalg.norm(w)
        w -= u * (share * length / (np.linalg.norm(u) + u.dtype.type(1e-12)))
        w *= length / np.linalg.norm(w)
    runner.map(update, names)


def normalized_kernels(shapes):
    """The names of the normalized convolutions' kernels among {name: shape}"""
    return [name for name, shape in shapes.items() if len(shape) == 4 and name[:-2] + "_norm_gamma" in shapes]


def optimizer_step(run, shard_grads, share):
    """One step of all weights of a Run: of normalized kernels by muon_step, if --muon is set, of the others by
    adam_step. share: of the whole learning rate"""
    config, params = run.config, run.params
    kernels = normalized_kernels({name: p.shape for name, p in params.items()}) if config.muon else []
    muon_step(params, shard_grads, run.adam_m, kernels, config.muon * share, run.runner)
    others = {name: p for name, p in params.items() if name not in kernels}
    adam_step(others, shard_grads, run.adam_m, run.adam_v, run.step + 1, config.lr * share, run.runner)


def check_muon(config):
    """Refuse --muon where no convolution is normalized"""
    if config.muon and not normalized_kernels(param_shapes(config)):
        raise InputError(f"--muon {config.muon}: is for normalized convolutions, and this network has none; leave it "
                         "or --norm none out")

# END SHARED muon -----------------------------------------------------------------------------------------------------

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

LAYERS |= {"global_max_pool": (global_max_pool_forward, global_max_pool_backward), "dropout": (                 # by 0 or 1 / (1 - p)
    lambda x, mask=None: (x if mask is None else x * mask, mask), lambda dy, mask: dy if mask is None else dy * mask)}


def main():
    parser = Parser(description=__doc__)
    add_load_flag(parser, "train nothing: test the network")
    add_out_weights_flag(parser)
    add_config_flags(parser)
    args = parser.parse_args()
    found, config = load_for_evaluation(args.load, args) if args.load is not None else (None, config_from_args(args))
    check_config(config)
    check_writable(config.checkpoint, config.out_json, args.out_weights)
    progress = Progress(config.quiet)
    digits = load_digits(config, progress.say)
    params, history = (found.weights, found.history) if found else train(config, data=digits)
    if args.out_weights:
        save_weights(args.out_weights, found.config if found else config, params, history)
    with Runner(config.threads, progress=progress) as runner:
        tests = evaluate_test_sets(params, digits, config, runner)
    report(config, params, history | {"source": digits["source"]}, tests, progress.say, found)


if __name__ == "__main__":
    run_cli(main)
