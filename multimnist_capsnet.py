#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0"]
# ///
"""MultiMNIST CapsNet: dynamic routing between capsules in NumPy, with every gradient written out.

Sabour, Frosst & Hinton, "Dynamic Routing Between Capsules", NIPS 2017, section 6.

Question: two handwritten digits overlap in one image. Can a network classify both, and reconstruct each one separately
from its own 16-D capsule, when its input is always the composite of the two?

    stage        layer                                                               output
    input        composite of two digits, each translated by up to 4 px per axis     (N, 36, 36)
    Conv1, 2     3x3, 16 and 16 channels, then 2x2 max pooling                       (N, 16, 16, 16)
    Conv3, 4     3x3, 64 and 64 channels, then 2x2 max pooling                       (N, 6, 6, 64)
    Conv5        3x3, 128 channels                                                   (N, 4, 4, 128)
    PrimaryCaps  1x1, 16 types x 8-D, squash                                         (N, 256, 8)
    votes        u_hat_j|i = W_ij u_i                                                (N, 10, 256, 16)
    routing      3 iterations, softmax over the 10 digit capsules, b = 0 at first    (N, 10, 16)
    decoder      one capsule, the others masked: 160 -> 256 -> 512 -> 1296           (N, 36, 36), once per digit

Every convolution is followed by batch normalization, over groups of 16 samples, and by a ReLU; PrimaryCaps has the
squash in place of the ReLU.

The loss is the margin loss on the capsule lengths plus 0.01 times the summed squared error of the two reconstructions;
gradients flow through all routing iterations. Muon (steps along the orthogonalized momentum) trains the kernels of the
normalized convolutions, Adam all other parameters.

Deviations from the paper and its official code:
  - six small convolutions, not two of 9x9 (`--preset classic`: two, with fewer channels; `--preset paper`: the paper's)
  - batch normalization (`--norm none` removes it)
  - a reconstruction weight of 0.01, not 0.0005
  - the central 20x20 px of the two digits overlap with IoU >= 0.8 in every pair (`--min-iou 0`: the paper's protocol)
  - the pixel-wise maximum of the two digits (`--merge add`: the sum clipped at 255, as in the official code)
  - in long runs, small random affine and elastic deformations of the training digits (`--warp`)
  - newly drawn pairs in every epoch, not a fixed training set
  - cosine decay of the learning rate, not exponential decay
  - Muon (`--muon 0`: Adam for all parameters)
  - no bias on the digit capsules

Control models (`--model`), on the same backbone without PrimaryCaps:
  - cnn: a hidden layer and ten sigmoids, at most as many parameters as the capsule network without its decoder
    (`--cnn-head gap`: the hidden layer follows global average pooling)
  - cnn-vectors: that CNN with ten 16-D vectors as its hidden layer, and a decoder that reconstructs digits from them
  - vector-dense: ten 16-D class vectors from a dense layer, with the squash, the margin loss and the decoder, but no
    primary capsules and no routing

Examples, with times on two cores:
  python3 multimnist_capsnet.py                      1.5 minutes: train a capsule network (12 epochs of 6,000 pairs)
  python3 multimnist_capsnet.py --load               30 seconds: evaluate the pretrained network
  python3 multimnist_capsnet.py --model cnn          1 minute: train the CNN baseline
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

# Axis legend, in the shape comments at line ends:
#   N batch   H W height, width   C channels in   F channels out   K kernel side   I primary capsules   J digit capsules
#   E dimensions of a primary capsule (8)   D dimensions of a digit capsule (16)   R digits to reconstruct per image
#   T terms of du_hat
#
# One sample, step by step:
#   load_digits           load the digits of MNIST in three splits
#   generate_multimnist   draw two digits of different classes, translate each of them, and merge them into a composite
#   epoch_samples         generate the pairs of an epoch in chunks; to_batch converts a batch of them to floats
#   forward               layers_forward: the backbone; caps_head_forward: squash, votes, routing, decoder
#   classification_loss   compute the margin loss on the capsule lengths
#   reconstruction_loss   compute the squared error of the two reconstructions
#   backward              compute the gradients in reverse order: caps_head_backward, layers_backward
#   optimizer_step        update the parameters by Muon and Adam
#   evaluate              compute accuracies and losses; report prints and saves the results


def train(config, snapshot_callback=None, snapshot_every=0, data=None, dtype=np.float32):
    """Train a network and return its parameters and its history. The test images are never used.

    snapshot_callback: called as snapshot_callback(step, params, terms) at the start, every snapshot_every steps (0:
    never in between) and at the end. It gets copies, so that it cannot change the run; terms are the last step's (see
    loss_and_grads), None before the first. data: the result of load_digits; None to call it. dtype: of parameters and
    activations; float64 is for tests.

    Return (params, history). params: {name: array}, with the running statistics of the normalizations; to evaluate them
    on data of your own with other than ten classes, use fit_to_data(config, data) as their config. history: a dict
    of source (of the digits), epochs (one dict per epoch, with training and validation losses and accuracies), seconds
    (training time) and steps. Raise InputError when a setting or the data are invalid, or when training diverges.
    """
    check_config(config)
    progress = Progress(config.quiet)
    data = load_digits(config, progress.say) if data is None else data
    check_digits(data, ("train", "val"))           # the test images are not even looked at
    config = fit_to_data(config, data)
    with Run(config, data["source"], config.n_train, progress, snapshot_callback, snapshot_every, dtype) as run:
        announce(run, data)
        for epoch in run.epochs():
            for pairs in epoch_samples(data, epoch, config):
                for rows in run.batches(pairs):
                    run.update(len(rows), *run.runner.loss_and_grads(run.params, pairs, rows, config))
            metrics = evaluate(run.weights, validation_pairs(data, config), config, run.runner)
            run.close_epoch({"val_" + name: metrics[name] for name in EPOCH_METRICS if name in metrics},
                            f"validation accuracy {metrics['exact_match']:.3f}")
    return run.weights, run.history


# ============================================================== the task: pairs of overlapping digits

CANVAS = 36                        # side of a composite, px
MAX_SHIFT = 4                      # a digit is translated by -4..+4 whole px on each axis
BOX = 20                           # px; MNIST's digits fit a 20x20 box, here assumed at the center of the 28x28 image
N_CLASSES = 10                     # of MNIST; other data may have 2 to 62: Config.n_classes
# chance: of 45 pairs of classes 1 is correct, and 17 have at least one correct class


def allowed_shift_pairs(min_iou):
    """Return all pairs of shifts for which the two digits' 20x20 px boxes overlap with IoU >= min_iou.

    The result is (n, 2, 2) int64: (dy, dx) in px of the first and of the second digit.
    """
    shifts = np.arange(-MAX_SHIFT, MAX_SHIFT + 1)
    pairs = np.stack(np.meshgrid(*[shifts] * 4, indexing="ij"), -1).reshape(-1, 2, 2)
    return pairs[box_iou(pairs) >= min_iou - 1e-12]


def box_iou(shifts):
    """Return the IoU (intersection over union) of two shifted 20x20 px boxes, with shape (...).

    shifts: (..., 2, 2), (dy, dx) in px of both boxes.
    """
    sides = np.maximum(BOX - np.abs(shifts[..., 0, :] - shifts[..., 1, :]), 0)
    intersection = sides[..., 0] * sides[..., 1]
    return intersection / (2 * BOX * BOX - intersection)


def shift_digits(images, shifts):
    """Place 28x28 images on 36x36 canvases, translated from the center by shifts.

    images: (n, 28, 28) uint8. shifts: (n, 2) whole px, (dy, dx). Return (n, 36, 36) uint8.
    """
    margin = 2 * MAX_SHIFT
    padded = np.pad(images, ((0, 0), (margin, margin), (margin, margin)))               # (n, 44, 44)
    windows = sliding_window_view(padded, (CANVAS, CANVAS), axis=(1, 2))                # (n, 9, 9, 36, 36)
    return windows[np.arange(len(images)), MAX_SHIFT - shifts[:, 0], MAX_SHIFT - shifts[:, 1]]


def merge_sources(sources, merge):
    """Merge the two digits of every pair into one image, the composite.

    sources: (n, 2, 36, 36) uint8. merge: "max" for the pixel-wise maximum, "add" for the sum clipped at 255.
    Return (n, 36, 36) uint8.
    """
    if merge == "max":
        return sources.max(1)
    return np.minimum(sources.sum(1, dtype=np.uint16), 255).astype(np.uint8)


BEND_GRID = 5                      # nodes per side of the grid on which an elastic deformation is drawn


def warp_digits(images, strength, rng):
    """Apply a small random affine and elastic deformation to every image, about its center.

    images: (n, 28, 28) uint8. strength: 1 means a rotation by up to 10 degrees, a shear by up to 0.1, a scaling of each
    axis by up to 10%, and normally distributed displacements with a standard deviation of 0.5 px, drawn on a BEND_GRID
    x BEND_GRID grid and linearly interpolated between its nodes. All of these are proportional to strength.
    Return (n, 28, 28) uint8.
    """
    n = len(images)
    angle, shear, scale_y, scale_x = rng.uniform(-strength, strength, (4, n)) * [[np.deg2rad(10)], [0.1], [0.1], [0.1]]
    cos, sin = np.cos(angle), np.sin(angle)
    linear = np.stack([cos * (1 + scale_y), (shear * cos + sin) * (1 + scale_x),
                       -sin * (1 + scale_y), (cos - shear * sin) * (1 + scale_x)], -1).reshape(n, 2, 2)
    displacement = rng.normal(0, 0.5 * strength, (n, 2, BEND_GRID, BEND_GRID))
    # 64 images at a time fit the processor's cache: 12 times as fast as all at once.
    return np.concatenate([resample(*(array[start:start + 64] for array in (images, linear, displacement)))
                           for start in range(0, n, 64)])


def resample(images, linear, displacement):
    """Resample images under a linear map and a displacement field.

    The output pixel at p = (y, x), measured from the center, is the input at linear @ p + displacement(p), interpolated
    bilinearly between four pixels; the input is 0 outside its borders.
    images: (n, side, side) uint8. linear: (n, 2, 2). displacement: (n, 2, BEND_GRID, BEND_GRID) px, at the nodes of a
    grid, linearly interpolated between them. Return (n, side, side) uint8.
    """
    n, side, _ = images.shape
    center, pixel = (side - 1) / 2, np.arange(side, dtype=np.float32)
    spacing = (side - 1) / (BEND_GRID - 1)
    weights = np.maximum(0, 1 - np.abs(np.arange(side)[:, None] / spacing - np.arange(BEND_GRID)))
    source = (weights @ displacement @ weights.T).astype(np.float32)                    # (n, 2, side, side)
    linear = linear.astype(np.float32)[..., None, None]
    source += linear[:, :, 0] * (pixel - center)[:, None] + linear[:, :, 1] * (pixel - center)
    padded = np.zeros((n, side + 2, side + 2), np.float32)
    padded[:, 1:-1, 1:-1] = images
    source = np.clip(source + np.float32(center + 1), 0, side + 1 - 1e-3)
    corner = source.astype(np.int32)
    (y, x), (dy, dx) = corner.transpose(1, 0, 2, 3), (source - corner).transpose(1, 0, 2, 3)
    index = (np.arange(n, dtype=np.int32)[:, None, None] * (side + 2) + y) * (side + 2) + x
    upper, lower = (np.take(padded, index + offset) * (1 - dx) + np.take(padded, index + offset + 1) * dx
                    for offset in (0, side + 2))
    return np.rint(upper * (1 - dy) + lower * dy).astype(np.uint8)


def generate_multimnist(images, labels, n, rng, min_iou=0.8, merge="max", warp=0.0):
    """Draw n pairs of digits of different classes; all pairs of shifts with the required overlap are equally likely.

    images: (n_images, 28, 28) uint8. labels: (n_images,). min_iou: see allowed_shift_pairs. merge: see merge_sources.
    warp: the strength of warp_digits, which deforms each digit before it is translated; 0 for none.

    Return a dict of composites (n, 36, 36) and sources (n, 2, 36, 36), both uint8, labels (n, 2), shifts (n, 2, 2) in
    px, and index (n, 2), the two digits' indices in images, all int64. Raise InputError when labels has fewer than two
    classes.
    """
    labels = np.asarray(labels)
    by_class = np.argsort(labels, kind="stable")
    start = np.searchsorted(labels[by_class], np.arange(int(labels.max(initial=0)) + 2))
    if (np.diff(start) > 0).sum() < 2:
        raise InputError("pairs need digits of at least two classes; give more images")
    allowed = allowed_shift_pairs(min_iou)
    first = rng.integers(0, len(labels), n)
    label = labels[first].astype(np.int64)
    count = start[label + 1] - start[label]
    second = rng.integers(0, len(labels) - count)                       # uniform over the images of all other classes,
    second = by_class[second + count * (second >= start[label])]        # by skipping the first digit's class
    index = np.stack([first, second], 1)
    shifts = allowed[rng.integers(0, len(allowed), n)]
    digits = images[index.ravel()]
    digits = warp_digits(digits, warp, rng) if warp else digits
    sources = shift_digits(digits, shifts.reshape(-1, 2)).reshape(n, 2, CANVAS, CANVAS)
    return {"composites": merge_sources(sources, merge), "sources": sources, "labels": labels[index].astype(np.int64),
            "shifts": shifts, "index": index}


def stream_pairs(digits, split, n, config, purpose, *key):
    """Yield n pairs from one split of load_digits' result, in dicts (see generate_multimnist) of at most CHUNK pairs.

    Memory use does not grow with n: each chunk is drawn when it is needed, from its own random generator, which
    purpose, key and the chunk's number identify.
    """
    for start in range(0, n, CHUNK):
        rng = rng_for(config.seed, purpose, *key, start // CHUNK)
        yield generate_multimnist(*digits[split], min(CHUNK, n - start), rng, config.min_iou, config.merge)


def validation_pairs(digits, config):
    """Return an iterator over chunks of the validation pairs, which are the same after every epoch."""
    return stream_pairs(digits, "val", config.n_val, config, "evaluation", 0)


def draw_pairs(digits, split, n, config, purpose, *key):
    """Return the pairs that stream_pairs yields, concatenated into one dict."""
    chunks = list(stream_pairs(digits, split, n, config, purpose, *key))
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def epoch_samples(digits, epoch, config, dtype=np.float32):
    """Yield the training pairs of one epoch, newly drawn, in chunks of whole batches (dtype is unused)."""
    size = max(1, CHUNK // config.batch_size) * config.batch_size
    for k, start in enumerate(range(0, config.n_train, size)):
        n, rng = min(size, config.n_train - start), rng_for(config.seed, "batches", epoch, k)
        yield generate_multimnist(*digits["train"], n, rng, config.min_iou, config.merge, config.warp)


def to_batch(pairs, rows, dtype=np.float32):
    """Convert the given rows of a dict of pairs to a batch.

    Return a dict of images (N, 36, 36) and sources (N, 2, 36, 36), pixel values in [0, 1] of type dtype, and labels
    (N, 2).
    """
    return {"images": pairs["composites"][rows].astype(dtype) / 255,
            "sources": pairs["sources"][rows].astype(dtype) / 255, "labels": pairs["labels"][rows]}


# ============================================================== the paper: capsules, routing, losses, the network

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


def sigmoid_cross_entropy(scores, present):
    """Compute the CNN's loss: binary cross-entropy with logits, summed over the classes and averaged over the batch.

    With p = sigmoid(score): -T log p - (1 - T) log(1 - p) = log(1 + exp(-score)) + (1 - T) score.
    scores: (N, J). present: T, (N, J), 1 for the classes in the image, 0 for the others.
    Return the loss, a float, and dscores, (N, J).
    """
    N = len(scores)
    loss = float((np.logaddexp(0, -scores) + (1 - present) * scores).sum()) / N
    return loss, (sigmoid_forward(scores)[0] - present) / N


def classification_loss(out, labels, config):
    """Compute the classification loss: the margin loss on the lengths or, for a CNN, the cross-entropy on its scores.

    out: the result of forward. labels: (N, 2). Return the loss's name ("margin" or "cross_entropy"), the loss, a float,
    and its gradient with respect to the lengths or the scores, (N, 10).
    """
    present = k_hot(labels, out["lengths"].dtype, out["lengths"].shape[1])
    if "scores" in out:
        return "cross_entropy", *sigmoid_cross_entropy(out["scores"], present)
    return "margin", *margin_loss(out["lengths"], present)


# -------------------------------------------------------------- the networks

E, D = 8, 16                       # dimensions of a primary and of a digit capsule
W_GAIN = 0.01        # initial variance of W is W_GAIN / E: capsules that start short learn faster (0.08: -3 points)
SIZES = {            # for each preset: types of primary capsules, units of the decoder's first and second hidden layer
    "deep": (16, 256, 512), "residual": (16, 512, 1024), "half-digit": (16, 256, 512), "classic": (8, 256, 512),
    "paper": (32, 512, 1024)}


def backbone(config):
    """Return the layers of the backbone (see LAYERS), for the capsule network including PrimaryCaps.

    Max pooling comes before the ReLU, which then has a quarter of the work. PrimaryCaps has no ReLU; its squash belongs
    to the head.
    """
    c, C, relu, pool = config.conv1_channels, config.conv3_channels, ("relu",), ("max_pool",)

    def conv(k, F, K=3, stride=1):
        return "conv2d", f"conv{k}", K, stride, F

    def branch(k, F):
        """Return a residual block: two 3x3 convolutions and a skip connection from its input to its output."""
        first, second = (("conv2d", f"branch{n}", 3, 1, F) for n in (k, k + 1))
        return ("skip",), ("pad", 1), first, relu, ("pad", 1), second, ("add",), relu
    deep = (conv(1, c), relu, conv(2, c), pool, relu, conv(3, C), relu, conv(4, C), pool, relu, conv(5, 2 * C), relu)
    residual = (conv(1, c), relu, conv(2, 2 * c), pool, relu, conv(3, C), relu, *branch(1, C),
                conv(4, 2 * C), pool, relu, *branch(3, 2 * C), conv(5, 4 * C), relu)
    half_digit = (conv(1, c), relu, conv(2, c), pool, relu, conv(3, 2 * C, stride=2), relu)
    layers = {"residual": residual, "half-digit": half_digit}.get(config.preset, deep)
    if config.model == "capsnet" and config.preset in ("classic", "paper"):
        layers = conv(1, c, K=9), relu, ("conv2d", "primary", 9, 2, SIZES[config.preset][0] * E)
    elif config.model == "capsnet":
        layers += (("conv2d", "primary", 1, 1, SIZES[config.preset][0] * E),)
    return with_norms(layers) if config.norm == "batch" else layers


def decoder(config):
    """Return the layers of the decoder, from masked capsules (N, J*D) to pixel values in (0, 1), (N, H*W)."""
    _, h1, h2 = SIZES[config.preset]
    return (("linear", "dec1", h1), ("relu",), ("linear", "dec2", h2), ("relu",), ("linear", "dec3", CANVAS * CANVAS),
            ("sigmoid",))


def vector_head(config):
    """Return the layers of vector-dense that compute its class vectors, before the squash"""
    return ("flatten",), ("linear", "fc1", config.n_classes * D)


def cnn_head(config, hidden):
    """Return the layers of the CNN's head in two tuples: up to the hidden units, and from these to the scores."""
    pooling = {"dense": ("flatten",), "gap": ("global_avg_pool",)}[config.cnn_head]
    return (pooling, ("linear", "fc1", hidden), ("relu",)), (("linear", "fc2", config.n_classes),)


def param_shapes(config):
    """Return {name: shape} of the parameters of config.model, in the order in which init_params draws them."""
    J = config.n_classes
    if config.model == "vector-dense":
        return infer_shapes((*backbone(config), *vector_head(config)), CANVAS, 1, rows=True).shapes | infer_shapes(
            decoder(config), 1, J * D).shapes
    if config.model != "capsnet":
        to_hidden, to_scores = cnn_head(config, cnn_hidden_units(config))
        decoder_shapes = infer_shapes(decoder(config), 1, J * D).shapes if config.model == "cnn-vectors" else {}
        return infer_shapes((*backbone(config), *to_hidden, *to_scores), CANVAS, 1, rows=True).shapes | decoder_shapes
    convs = infer_shapes(backbone(config), CANVAS, 1, rows=True)
    return convs.shapes | {"W": (convs.side ** 2 * convs.channels // E, E, J, D)} | infer_shapes(
        decoder(config), 1, J * D).shapes                                               # W (I, E, J, D)


@functools.cache
def cnn_hidden_units(config):
    """Return the size of the CNN's hidden layer that matches the capsule network's number of parameters.

    It is the largest size for which the CNN has at most as many parameters as the capsule network without its decoder,
    of the same preset and conv3_channels and with the preset's own conv1_channels. For cnn-vectors, whose decoder is
    not counted either, it is at most J * D, as many units as the digit capsules have. It can be zero or
    negative when the convolutions alone have too many parameters.
    """
    J = config.n_classes
    capsnet = param_shapes(Config(preset=config.preset, conv3_channels=config.conv3_channels, n_classes=J))
    budget = sum(math.prod(shape) for name, shape in capsnet.items() if not name.startswith("dec"))
    convs = infer_shapes(backbone(config), CANVAS, 1, rows=True)
    inputs = convs.channels * (convs.side ** 2 if config.cnn_head == "dense" else 1)
    units = (budget - sum(map(math.prod, convs.shapes.values())) - J) // (inputs + 1 + J)
    return min(units, J * D) if config.model == "cnn-vectors" else units


def init_params(config):
    """Draw the initial parameters: {name: float32 array}, as param_shapes says.

    Weights are normal, with variance 2 / fan-in where a ReLU follows (He initialization), W_GAIN / fan-in for the
    transformation matrices and the dense layer of vector-dense, and 1 / fan-in elsewhere. Biases and the
    normalizations' shifts are 0, the normalizations' scales are 1.
    """
    rng, params = rng_for(config.seed, "init"), {}
    for name, shape in param_shapes(config).items():
        fan_in = {"W": E, "dec1_w": D}.get(name, math.prod(shape[:-1]))                 # dec1: all but D are masked
        gain = {"W": W_GAIN, "primary_w": 1, "dec3_w": 1, "fc2_w": 1}.get(name, 2)
        gain = W_GAIN if (config.model, name) == ("vector-dense", "fc1_w") else gain
        if name.endswith(("_b", "_gamma", "_beta")):
            params[name] = np.full(shape, name.endswith("_gamma"), np.float32)
        else:
            params[name] = rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(gain / fan_in))
    return params


def forward(params, images, config, digits=None, empty=np.empty, statistics=None):
    """Compute the outputs of the network and a cache for backward.

    images: (N, 36, 36), pixel values in [0, 1]. digits: (N, R), the capsules to decode; None for the two predicted
    classes. empty: np.empty, or an Arena for temporaries. statistics: a dict in training, which receives the batch
    statistics; None in evaluation (see layers_forward).

    Return out, a dict, and the cache. For capsnet, out has lengths (N, 10), v (N, 10, D), digits (N, R), recon
    (N, R, 36, 36), the primary capsules u (N, I, E) and c, the list of the iterations' coupling coefficients: (1, I)
    for the first, (N, 10, I) for the others, with I in the order (row, column, type). For vector-dense the same without
    u and c. For cnn and cnn-vectors: scores (N, 10), lengths (their sigmoids), digits and, for cnn-vectors, recon.
    """
    head_forward, _ = HEADS[config.model]
    x = im2col_rows(images, params["conv1_w"].shape[1])
    x, convs_cache = layers_forward(params, x, backbone(config), empty, statistics)        # (N, side, side, C)
    out, head_cache = head_forward(params, x, config, digits, empty)
    return out, SimpleNamespace(convs=convs_cache, head=head_cache)


def backward(dscores, drecon, cache, config):
    """Return the gradients of all parameters, a dict with the keys of params.

    dscores: (N, 10), the gradient that classification_loss returns. drecon: (N, R, 36, 36), or None without a decoder.
    """
    grads, (_, head_backward) = {}, HEADS[config.model]
    dx = head_backward(dscores, drecon, cache.head, config, grads)
    layers_backward(dx, cache.convs, backbone(config), grads, need_dx=False)
    return grads


# SHARED rows: the first convolution, of images with one channel ------------------------------------------------------

def im2col_rows(x, K):
    """Return K shifted copies of the rows of one-channel images x (N, H, W) as channels, (N, H-K+1, W, K).

    With them, a KxK convolution of one channel is a 1xK convolution of K channels: one GEMM with an inner dimension of
    K*K instead of K GEMMs with an inner dimension of K.
    """
    return np.ascontiguousarray(sliding_window_view(x, K, axis=1))

# END SHARED rows -----------------------------------------------------------------------------------------------------


def caps_head_forward(params, x, config, digits, empty):
    """Compute the capsule network's out (see forward) and a cache from the backbone's output x (N, side, side, C).

    x is the output of PrimaryCaps before the squash.
    """
    u, squash_cache = squash_forward(x.reshape(len(x), -1, E))                          # (N, I, E)
    u_hat, votes_cache = votes_forward(u, params["W"], empty)                           # (N, J, I, D)
    v, routing_cache = routing_forward(u_hat, config.routing_iters, empty)              # (N, J, D)
    out, classes_cache = class_vectors_forward(params, v, config, digits, empty)
    return out | {"u": u, "c": [step.c for step in routing_cache.steps]}, SimpleNamespace(
        x_shape=x.shape, squash=squash_cache, votes=votes_cache, routing=routing_cache, classes=classes_cache)


def caps_head_backward(dlengths, drecon, cache, config, grads):
    """Return dx (N, side, side, C), and put the gradients of the head's parameters into grads."""
    dv = class_vectors_backward(dlengths, drecon, cache.classes, config, grads)
    du_hat = routing_backward(dv, cache.routing)
    du, grads["W"] = votes_backward(du_hat, cache.votes)
    return squash_backward(du, cache.squash).reshape(cache.x_shape)


def class_vectors_forward(params, v, config, digits, empty):
    """Compute the lengths of the class vectors v (N, J, D), and the decoder's reconstructions of `digits`.

    digits: (N, R); None for the two longest vectors. Return a dict of lengths, v, digits and recon, and a cache.
    """
    lengths, lengths_cache = lengths_forward(v)
    digits = top_two(lengths) if digits is None else digits
    masked, mask_cache = mask_forward(v, digits)
    pixels, decoder_cache = layers_forward(params, masked, decoder(config), empty)
    return {"lengths": lengths, "v": v, "digits": digits, "recon": pixels.reshape(len(v), -1, CANVAS, CANVAS)}, (
        SimpleNamespace(lengths=lengths_cache, mask=mask_cache, decoder=decoder_cache))


def class_vectors_backward(dlengths, drecon, cache, config, grads):
    """Return dv (N, J, D), and put the gradients of the decoder's parameters into grads."""
    dmasked = layers_backward(drecon.reshape(-1, CANVAS * CANVAS), cache.decoder, decoder(config), grads)
    return mask_backward(dmasked, cache.mask) + lengths_backward(dlengths, cache.lengths)


def vector_head_forward(params, x, config, digits, empty):
    """Compute out of vector-dense (see forward) and a cache from the backbone's output x (N, side, side, C).

    A dense layer maps x to ten vectors, which are squashed.
    """
    s, layers_cache = layers_forward(params, x, vector_head(config), empty)
    v, squash_cache = squash_forward(s.reshape(len(x), -1, D))
    out, classes_cache = class_vectors_forward(params, v, config, digits, empty)
    return out, SimpleNamespace(layers=layers_cache, squash=squash_cache, classes=classes_cache)


def vector_head_backward(dlengths, drecon, cache, config, grads):
    """Return dx (N, side, side, C), and put the gradients of the head's parameters into grads."""
    ds = squash_backward(class_vectors_backward(dlengths, drecon, cache.classes, config, grads), cache.squash)
    return layers_backward(ds.reshape(len(ds), -1), cache.layers, vector_head(config), grads)


def cnn_head_forward(params, x, config, digits, empty):
    """Compute out of cnn and cnn-vectors (see forward) and a cache from the backbone's output x (N, side, side, C)."""
    to_hidden, to_scores = cnn_head(config, cnn_hidden_units(config))
    hidden, hidden_cache = layers_forward(params, x, to_hidden, empty)
    scores, scores_cache = layers_forward(params, hidden, to_scores, empty)
    out = {"lengths": sigmoid_forward(scores)[0], "scores": scores}
    out["digits"] = predict(out) if digits is None else digits
    cache = SimpleNamespace(hidden=hidden_cache, scores=scores_cache)
    if config.model == "cnn-vectors":
        masked, cache.mask = mask_forward(hidden.reshape(len(x), -1, D), out["digits"])
        pixels, cache.decoder = layers_forward(params, masked, decoder(config), empty)
        out["recon"] = pixels.reshape(len(x), -1, CANVAS, CANVAS)
    return out, cache


def cnn_head_backward(dscores, drecon, cache, config, grads):
    """Return dx (N, side, side, C), and put the gradients of the head's parameters into grads."""
    to_hidden, to_scores = cnn_head(config, cnn_hidden_units(config))
    dhidden = layers_backward(dscores, cache.scores, to_scores, grads)
    if config.model == "cnn-vectors":
        dmasked = layers_backward(drecon.reshape(-1, CANVAS * CANVAS), cache.decoder, decoder(config), grads)
        dhidden = dhidden + mask_backward(dmasked, cache.mask).reshape(dhidden.shape)
    return layers_backward(dhidden, cache.hidden, to_hidden, grads)


CNN_HEAD = cnn_head_forward, cnn_head_backward
HEADS = {"capsnet": (caps_head_forward, caps_head_backward), "cnn": CNN_HEAD, "cnn-vectors": CNN_HEAD,
         "vector-dense": (vector_head_forward, vector_head_backward)}


def top_two(lengths):
    """Return the indices of the two longest capsules, longest first, (N, 2) int64. Ties go to the smaller digit."""
    return np.argsort(-lengths, axis=1, kind="stable")[:, :2]


def predict(out):
    """Return the two predicted classes, (N, 2).

    A CNN's classes are ranked by its scores, because sigmoids round to 1 and would tie.
    """
    return top_two(out.get("scores", out["lengths"]))


def k_hot(labels, dtype, J=N_CLASSES):
    """Return (N, J) of type dtype, 1 for the classes in labels (N, 2) and 0 for the others."""
    present = np.zeros((len(labels), J), dtype)
    present[np.arange(len(labels))[:, None], labels] = 1
    return present


def loss_and_grads(params, batch, config, empty=np.empty, batch_fraction=1.0):
    """Compute the losses and all gradients of a batch, or of one shard of it. Pure function.

    batch: the result of to_batch. batch_fraction: the shard's share of the samples in its batch. All losses and
    gradients are means over the shard times batch_fraction, so that they add up to means over the batch. empty:
    np.empty, or an Arena, with which the gradients are valid until its rewind().

    Return (terms, grads, statistics). terms: loss = margin + recon_weight * recon, where recon is the summed squared
    error of both digits, and hits, the number of pairs with both digits correctly classified. For cnn and cnn-vectors,
    cross_entropy takes the place of margin; cnn has no recon. grads: a dict with the keys of params. statistics: the
    mean and the variance that each normalization used.
    """
    statistics = {}
    out, cache = forward(params, batch["images"], config, batch["labels"], empty, statistics)
    name, loss, dscores = classification_loss(out, batch["labels"], config)
    terms, drecon = {"loss": loss * batch_fraction, name: loss * batch_fraction}, None
    if "recon" in out:
        recon, drecon = reconstruction_loss(out["recon"], batch["sources"])
        recon *= batch_fraction
        terms |= {"loss": terms["loss"] + config.recon_weight * recon, "recon": recon}
        drecon *= config.recon_weight * batch_fraction
    grads = backward(dscores * batch_fraction, drecon, cache, config)
    return terms | {"hits": int(exact_match(predict(out), batch["labels"]).sum())}, grads, statistics


def exact_match(predicted, labels):
    """Return for each pair whether its two predicted classes are exactly its two labels, (N,) bool.

    predicted, labels: (N, 2), in any order.
    """
    return (np.sort(predicted, 1) == np.sort(labels, 1)).all(1)


def forward_rows(params, pairs, rows, config, empty, decode="labels"):
    """Run forward on the given rows of a dict of pairs and return its per-sample outputs.

    decode: "labels" to reconstruct the digits that are present, "top2" those of the two predicted classes.
    Return a dict of lengths, digits and, where the network has them, v, recon and scores, with one row per pair.
    """
    batch = to_batch(pairs, rows, params_dtype(params))
    out, _ = forward(params, batch["images"], config, batch["labels"] if decode == "labels" else None, empty)
    return {name: out[name] for name in ("lengths", "v", "digits", "recon", "scores") if name in out}


# ============================================================== evaluation, report

def evaluate(params, chunks, config, runner):
    """Compute accuracies and losses over dicts of pairs, such as those of stream_pairs.

    Return a dict of
      n                   number of pairs
      exact_match, hits   fraction and number of the pairs whose two predicted classes are exactly their two digits
      correct             whether each pair is such an exact match, (n,) bool
      at_least_one        fraction of the pairs with at least one of their digits among the two predicted classes
      loss, margin, recon as in loss_and_grads, means over the pairs
      recon_mse           mean squared error per pixel of the reconstructions of the two true digits
      baseline_recon_mse  the same for the best constant image, the mean of all these digits
    For cnn and cnn-vectors, cross_entropy takes the place of margin; cnn has no recon and no recon_mse.
    """
    n_correct, sums = [], np.zeros(3)                                                   # correct digits of each pair
    pixel_sum = np.zeros((CANVAS, CANVAS), np.int64)                                    # over all digits, gray levels
    for chunk in chunks:
        out, size = runner.forward(params, chunk, config), len(chunk["labels"])
        n_correct.append((predict(out)[:, :, None] == chunk["labels"][:, None, :]).any(1).sum(1))
        target = chunk["sources"].astype(out["lengths"].dtype) / 255
        name, loss, _ = classification_loss(out, chunk["labels"], config)
        recon = reconstruction_loss(out["recon"], target)[0] if "recon" in out else 0.0
        sums += np.array([loss, recon, float(np.square(target).sum() / size)]) * size
        pixel_sum += chunk["sources"].sum((0, 1), dtype=np.int64)
    n_correct = np.concatenate(n_correct)
    n, per_pixel = len(n_correct), 2 * CANVAS * CANVAS
    loss, recon, square = sums / n
    recon_metrics = {"recon": recon, "recon_mse": recon / per_pixel} if "recon" in out else {}
    return {"n": n, "hits": int((n_correct == 2).sum()), "exact_match": (n_correct == 2).sum() / n,
            "at_least_one": (n_correct >= 1).sum() / n, "correct": n_correct == 2,
            "loss": loss + config.recon_weight * recon, name: loss, **recon_metrics,
            "baseline_recon_mse": (square - 2 * float(np.square(pixel_sum / (2 * n) / 255).sum())) / per_pixel}


def evaluate_test_sets(params, digits, config, runner):
    """Return the result of evaluate on the test pairs."""
    return evaluate(params, stream_pairs(digits, "test", config.n_test, config, "evaluation", 1), config, runner)


EPOCH_METRICS = ("loss", "margin", "cross_entropy", "recon", "recon_mse", "exact_match", "at_least_one")


def announce(run, digits):
    """Print the data, the network and the settings at the start of a run"""
    config = run.config
    run.progress.say(
        f"data       {', '.join(f'{len(digits[k][1]):,} {k}' for k in ('train', 'val', 'test') if k in digits)} "
        f"{data_name(digits['source'])}; pairs with IoU >= {config.min_iou:g}, merge {config.merge}, warp "
        f"{config.warp:g}\n"
        f"network    {config.model}, preset {config.preset}: {n_params(run.params):,} parameters\n"
        f"training   {counted(config.n_epochs, 'epoch')} of {config.n_train:,} pairs, batch size {config.batch_size}, "
        f"learning rate {config.lr:g}, Muon step {config.muon:g}, seed {config.seed}, threads {run.runner.threads}"
        + f"; resuming at step {run.step} of {run.n_steps}" * (run.step > 0))


def test_result(config, params, history, test, network=None):
    """Return the dict that --out-json writes. network: the one that was loaded, if it was not trained here"""
    metrics = {"test_exact_match": test["exact_match"], "test_hits": test["hits"],
               "test_exact_match_ci95": wilson_interval(test["hits"], test["n"]),
               "test_at_least_one": test["at_least_one"], "test_recon_mse": test.get("recon_mse"),
               "baseline_recon_mse": test["baseline_recon_mse"], "hit_bits": {"test": pack_bits(test["correct"])}}
    return make_result(config, params, history, metrics) | (
        {"history": {}, "loaded": network.file} if network else {})                     # that file has its history


def comparison_columns(result, test):
    """Return the columns of a comparison, {metric: (value, 95% interval from the test pairs or None)}"""
    return {"exact match": (test["exact_match"], result["test_exact_match_ci95"]),
            "at least one digit": (test["at_least_one"], None)}


def chance(config):
    """Return the probabilities that two random classes are exactly the two of a pair, and that one of them is"""
    n_pairs = math.comb(config.n_classes, 2)
    return 1 / n_pairs, 1 - math.comb(config.n_classes - 2, 2) / n_pairs


def prediction_rows(params, digits, config, runner):
    """Yield the rows of --predictions: a header, then of each test pair its classes, those predicted, the lengths"""
    kind = "score" if config.model in ("cnn", "cnn-vectors") else "length"              # of a CNN the sigmoids
    yield ["index", "true_1", "true_2", "predicted_1", "predicted_2", *(f"{kind}_{j}" for j in range(config.n_classes))]
    for k, chunk in enumerate(stream_pairs(digits, "test", config.n_test, config, "evaluation", 1)):
        out = runner.forward(params, chunk, config)
        for n, (true, two, row) in enumerate(zip(np.sort(chunk["labels"]), np.sort(predict(out)), out["lengths"])):
            yield [k * CHUNK + n, *true, *two, *(f"{length:.4f}" for length in row)]


def remark(configs, source):
    """Return what the paper reports, to be read beside a comparison; of other images than digits nothing"""
    return "" if source not in DIGIT_NAMES else (
        "The paper, with 60 million training pairs, --min-iou 0 and --merge add: exact match 94.8% with three routing "
        "iterations, 92.5% with one, 91.9% for its CNN.")


def report(config, results, test, say):
    """Print evaluate's metrics of the test pairs. results: of test_result"""
    low, high = results["test_exact_match_ci95"]
    say(f"\n{data_name(results['source'])}, {test['n']:,} test pairs, --min-iou {config.min_iou:g}, --merge "
        f"{config.merge}\n"
        f"  exact match (both digits)  {test['exact_match']:.4f}   95% CI {low:.4f} to {high:.4f}; chance "
        f"{chance(config)[0]:.4f}\n"
        f"  at least one digit         {test['at_least_one']:.4f}   chance {chance(config)[1]:.4f}\n"
        f"  loss                       {test['loss']:.4f}")
    for name in [name for name in ("margin", "cross_entropy") if name in test]:
        say(f"  {name.replace('_', '-') + ' loss':27}{test[name]:.4f}")
    if "recon_mse" in test:
        say(f"  reconstruction loss        {test['recon']:.4f}   times --recon-weight {config.recon_weight:g}\n"
            f"  reconstruction MSE         {test['recon_mse']:.4f}   per pixel; {test['baseline_recon_mse']:.4f} for "
            "the mean digit")
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

DEFAULTS = (  # of settings that are not given: conditions, values; later rules override earlier ones
    ({}, {"conv1_channels": 16, "conv3_channels": 64, "norm": "batch", "lr": 0.01, "muon": 0.02, "warmup": 200,
          "recon_weight": 0.01}),
    ({"preset": ("residual",)}, {"lr": 0.003, "muon": 0.006, "recon_weight": 0.005}),
    ({"preset": ("classic", "paper")}, {"recon_weight": 0.0005}),
    ({"model": ("capsnet",), "preset": ("classic", "paper")}, {"norm": "none", "lr": 0.002, "warmup": 0}),
    ({"model": ("capsnet",), "preset": ("classic",)}, {"conv1_channels": 32}),
    ({"model": ("capsnet",), "preset": ("paper",)}, {"conv1_channels": 256}),
    ({"norm": ("none",)}, {"muon": 0.0}))
MODELS = {
    "capsnet": "primary capsules, one transformation matrix per position, dynamic routing",
    "cnn": "the plain CNN baseline, with at most as many parameters as the capsule network without its decoder",
    "cnn-vectors": "a CNN whose hidden layer is ten vectors with a decoder",
    "vector-dense": "ten class vectors from a dense layer: squash, margin loss, no primary capsules, no routing"}
PRESETS = {
    "deep": "six convolutions, batch-normalized, the last of which is PrimaryCaps (capsnet: 1.30M parameters)",
    "residual": "ten convolutions with residual connections, for long runs (3.06M)",
    "half-digit": "four convolutions, the last of which is PrimaryCaps; receptive fields of half a digit (1.88M)",
    "classic": "capsnet with the paper's two 9x9 convolutions, narrow (2.03M); other models as in deep",
    "paper": "the same, with the paper's widths (11.36M)"}
CAPSNET, CNNS, WITH_DECODER = ({"model": models} for models in (
    ("capsnet",), ("cnn", "cnn-vectors"), ("capsnet", "cnn-vectors", "vector-dense")))


@dataclass(frozen=True)
class Config(Settings):
    """All settings of a run. Names, defaults and help texts of the command-line flags come from here."""
    n_epochs: int = option(12, "training epochs", "training", low=1, high=100_000)
    n_train: int = option(6000, "training samples per epoch; pairs, newly drawn in every epoch", "data", low=1,
                          high=10_000_000)
    n_val: int = option(2000, "validation samples; pairs of held-out training images", "data", low=1, high=100_000)
    n_test: int = option(10000, "test samples; pairs, evaluated once, after training", "data", low=1, high=1_000_000,
                         runtime=True)
    lr: float = option(None, "learning rate of Adam, reached after --warmup steps", "training", above=0)
    warmup: int = option(None, "steps of linear learning-rate warm-up", "training", low=0, high=100_000)
    muon: float = option(None, "step size of Muon (orthogonalized momentum) for the kernels of batch-normalized "
                         "convolutions, relative to the kernel's Frobenius norm; 0: Adam for all weights",
                         "training", low=0, high=1)
    digits: str = option("auto", "digits to use; auto: MNIST from --data-dir, the cache or a download, else synthetic "
                         "digits, drawn by this script", "data", choices=("auto", "mnist", "synthetic"), runtime=True)
    data_dir: str = option("", "folder with the four idx files, raw or .gz, of MNIST, Fashion-MNIST, KMNIST, EMNIST "
                           "(DIR/emnist-SPLIT) or your own images; if not given, MNIST from $MNIST_DIR, then "
                           "~/.cache/hinton-mnist, then download", "data", runtime=True, metavar="DIR",
                           aliases={"mnist_dir": {}})
    transpose: bool = option(False, "exchange rows and columns of the images of --data-dir (done with EMNIST's anyway)",
                             "data", runtime=True)
    min_iou: float = option(0.8, "minimum IoU of the two digits' 20x20 px boxes in every pair; 0 is the paper's "
                            "protocol", "data", low=0, high=1)
    merge: str = option("max", "how two digits are merged; max: pixel-wise maximum; add: add and clip at 255, as the "
                        "official code does", "data", choices=("max", "add"))
    warp: float = option(0.0, "strength of random warps of training digits; 1: rotation up to 10 degrees, shear up to "
                         "0.1, scale up to 10%, bending by about half a pixel; 0: none", "data", low=0, high=4)
    model: str = option("capsnet", describe(MODELS), "network", choices=tuple(MODELS))
    preset: str = option("deep", describe(PRESETS), "network", choices=tuple(PRESETS))
    conv1_channels: int = option(None, "channels of the first convolution; Conv2 has as many, with --preset residual "
                                 "twice as many", "network", low=1, high=4096)
    conv3_channels: int = option(None, "base width C; deep: C in Conv3 and Conv4, 2C in Conv5; residual: C, 2C and 4C; "
                                 "half-digit: 2C in Conv3, its last before PrimaryCaps", "network", low=1, high=4096,
                                 only={"preset": ("deep", "residual", "half-digit")})
    norm: str = option(None, "normalization after every convolution, PrimaryCaps included; batch: batch normalization "
                       "over shards of 16 samples (ghost batch normalization)", "network", choices=("batch", "none"))
    routing_iters: int = option(3, "routing iterations; 1: uniform coupling coefficients, no routing", "network", low=1,
                                high=50, only=CAPSNET)
    recon_weight: float = option(None, "weight of the reconstruction loss; its squared error is summed over pixels and "
                                 "both digits", "training", low=0, only=WITH_DECODER)
    cnn_head: str = option("dense", "input of the CNN's hidden layer; dense: all features of all positions; gap: "
                           "global average pooling", "network", choices=("dense", "gap"), only=CNNS)
    n_classes: int = N_CLASSES     # no flag: of the data


DEFAULT_MODELS = {None: ("capsnet",)}                              # trained if --model is not given
PRETRAINED = (Path(__file__).resolve().with_name("weights") / "multimnist_capsnet.npz",)
SOURCE_SETTING = "digits"                                           # the setting that says where the data come from
EVAL_SETTINGS = ("seed", "min_iou", "merge", "routing_iters")      # may differ between training and evaluation
TEST_SETTINGS = ("digits", "min_iou", "merge", "n_test")           # equal in all networks of a comparison
RENAMED = {                        # old names, which are refused with the new ones
    "--model caps": "--model capsnet", "--model vectors": "--model cnn-vectors",
    "--preset parts": "--preset half-digit", "--cnn-head mean": "--cnn-head gap"}


def check_config(config):
    """Raise InputError for settings out of range, or that contradict each other"""
    check_options(config)
    check_muon(config)
    if config.batch_size > config.n_train:
        raise InputError(f"--batch-size {config.batch_size} exceeds the {config.n_train} training pairs of an epoch. "
                         "Lower --batch-size or raise --n-train")
    least = config.n_classes * (D if config.model == "cnn-vectors" else 1)
    if config.model in CNNS["model"] and cnn_hidden_units(config) < least:
        raise InputError(f"--conv1-channels {config.conv1_channels} --conv3-channels {config.conv3_channels}: the CNN "
                         f"would have only {max(0, cnn_hidden_units(config))} hidden units within the capsule "
                         "network's number of parameters. Lower them, or use --cnn-head gap")


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


def main():
    parser = Parser(description=__doc__)
    add_load_flag(parser, "do not train; evaluate the networks")
    add_out_weights_flag(parser)
    add_predictions_flag(parser)
    add_config_flags(parser, several=True)
    run_experiment(parser.parse_args(), lambda config, progress, evaluated: load_digits(config, progress.say),
                   lambda digits, config: config.n_test)


if __name__ == "__main__":
    run_cli(main)
