#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0"]
# ///
"""smallNORB novel viewpoints: capsule networks tested on viewpoints that training never shows, in pure NumPy: matrix
capsules with EM routing (Hinton, Sabour & Frosst, "Matrix capsules with EM routing", ICLR 2018) against small CNNs;
also vector capsules with dynamic routing (Sabour, Frosst & Hinton, NIPS 2017).

Question: networks are trained on images of objects from a limited range of viewpoints and tested on novel viewpoints.
Does a capsule network classify novel viewpoints better than a CNN? The paper reports an error of 13.5%
for capsules and 20.0% for a CNN on novel azimuths, at an equal error of 3.7% on familiar viewpoints. By default this
script trains the paper's network and two CNNs on the same images and prints their accuracies side by side.

    stage        layer of the paper's network, `--model matrix-capsnet --preset small`         output (A=32, B=4, C=D=8)
    Input        one toy from one viewpoint, two cameras                             (N, 32, 32, 2)
    Conv1        5x5, stride 2, A channels, batch normalization, ReLU                (N, 14, 14, A)
    PrimaryCaps  1x1, batch normalization: B types of a 4x4 pose M, an activation a  (N, 14, 14, B, 4x4 + 1)
    ConvCaps1    3x3, stride 2, C types: votes V_ij = M_i W_ij, EM routing           (N, 6, 6, C, 4x4 + 1)
    ConvCaps2    3x3, stride 1, D types: votes V_ij = M_i W_ij, EM routing           (N, 4, 4, D, 4x4 + 1)
    ClassCaps    votes V_ij = M_i W_ij with W shared across positions, coordinate    (N, 5, 4x4 + 1)
                 addition; EM routing over all 4 x 4 x D children

A to D are the paper's letters, numbers of channels or capsule types; in the code below, D is the size of a pose. The
default preset of matrix-capsnet, wide, has A=64 and B=C=D=4, and 12,770 parameters; that of cnn and cnn-bn, small,
has 19,124 and 19,151.

EM routing (Procedure 1) alternates two steps. In the M-step, every parent capsule j fits a diagonal Gaussian to the
votes V_ij of its children i; its activation a_j is high if the votes agree. In the E-step, every child divides itself
anew among its parents, in proportion to a_j times the density of its vote. The loss is the cross-entropy of log a_j, or
the paper's spread loss (`--loss spread`). The optimizer is Adam with cosine decay of the learning rate. Gradients are
propagated through all EM iterations.

Models (`--model`, one or several, which are compared):

    matrix-capsnet  the paper's network, as in the table above
    cnn             the paper's CNN baseline, smaller: as many parameters as matrix-capsnet of the same preset (small
                    or wide); --preset paper has the paper's 4.2 million
    cnn-bn          the same CNN with batch normalization
    nearest         the class of the nearest training image in pixel space

and four heads on one backbone of four 3x3 convolutions with batch normalization, with about equal numbers of
parameters, because the backbone changes accuracy more than the head does:

    capsnet-shared  vector capsules, dynamic routing (Sabour, Frosst & Hinton 2017), transformation matrices shared
                    across positions, coordinate addition
    capsnet         vector capsules, dynamic routing, one transformation matrix per position
    matrix-head     pose matrices and EM routing to the class capsules
    cnn-gap         CNN baseline with global average pooling

Data (`--data`):

    toys            default: toys rendered by this script, with the structure of smallNORB
    smallnorb       the real smallNORB files (`--norb-dir`)
    shapes          five 3D shapes, drawn as blobs; three of them are symmetric about the vertical axis, so that their
                    test azimuths show the same images as training azimuths

Deviations from the paper:

  - smaller networks (`--preset paper` has the paper's small network, A=64, B=8, C=D=16, and its CNN)
  - unless --preset is paper without --width, the CNN has no dropout (`--dropout 0.5`) and 32 hidden units, not 1024,
    and its convolutions are not padded
  - batch normalization in the first convolution and in PrimaryCaps
  - two EM iterations (`--routing-iters 3` for the paper's three)
  - an inverse temperature lambda that is 1/16 in all iterations
  - beta_a outside of lambda: a_j = logistic(beta_a - lambda cost_j); one beta_a per parent type, not one for all
  - the mass sum_i R_ij a_i multiplied by parents / children (Gritzman 2019)
  - transformation matrices initialized near the identity
  - cross-entropy instead of the spread loss (`--loss spread`)

Examples, with times on two cores:
  python3 smallnorb_novel_viewpoint.py                 4 minutes: train matrix-capsnet, cnn and cnn-bn on toys
  python3 smallnorb_novel_viewpoint.py --data shapes   30 seconds: the same question with five simple shapes
  python3 smallnorb_novel_viewpoint.py --load          20 seconds: evaluate the three pretrained networks
"""
import argparse
import base64
import bisect
import concurrent.futures.process
import contextlib
import ctypes
import dataclasses
import functools
import gzip
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
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

# Axis legend, for the shape comments at line ends:
#   N batch   H W height, width   C input channels   F output channels   K kernel size   B types of primary capsules
#   P = 4 side of a pose matrix   D = P*P elements of a pose   E elements of a vector capsule
#   I children of a parent (input capsules)   J types of parents (output capsules)
#   L parent positions in a batch: N * rows * columns for convolutional capsules, N for class capsules
#   G groups of children that share transformation matrices   T terms of dV (see votes_gradient)
#
# One sample, step by step:
#   select_images         choose object, viewpoint and lighting of every training, familiar and novel image
#   add_toy_images        render the toys: draw_views casts rays and shades the surfaces; views are cached on disk
#   epoch_samples         shuffle, crop and jitter the images of an epoch; to_batch takes one batch of them
#   forward               layers_forward computes the backbone; then the class capsules are computed by vector_forward
#                         (vector capsules, dynamic routing) or matrix_forward (pose matrices, em_routing_forward)
#   em_routing_forward    alternates m_step_forward and e_step_forward
#   classification_loss   cross-entropy, margin loss or spread loss
#   vector_backward, matrix_backward, cnn_backward      backpropagate through the same steps in reverse order
#   optimizer_step        update the weights with Adam
#   evaluate_test_sets    classify familiar and novel viewpoints; report prints and saves the accuracies


def train(config, snapshot_callback=None, snapshot_every=0, data=None, dtype=np.float32):
    """Train config.model and return its parameters and its training history, (params, history).

    Test images are only evaluated: no parameter depends on them.

    snapshot_callback(step, params, terms) receives copies at step 0, every snapshot_every steps and after the last
    step, but not for `nearest`; it cannot change the run. data: load_data's result, to load the data only once. dtype:
    float32; tests use float64. history: dict of source (the data set), epochs (one dict per epoch with training loss,
    training accuracy and EPOCH_METRICS), seconds and steps. Raises InputError if the configuration is invalid.
    """
    check_config(config)
    progress = Progress(config.quiet)
    data = load_data(config, progress) if data is None else data
    check_views(data, config)
    if config.model == "nearest":
        return nearest_params(data, config, dtype), {"source": data["source"], "epochs": [], "seconds": 0.0, "steps": 0}
    n_train = len(data["train"]["labels"])
    with Run(config, data["source"], n_train, progress, snapshot_callback, snapshot_every, dtype) as run:
        announce(run, data)
        for epoch in run.epochs():
            for samples in epoch_samples(data, epoch, config, dtype):
                for rows in run.batches(samples):
                    run.update(len(rows), *run.runner.loss_and_grads(run.params, samples, rows, config))
            metrics = evaluate_test_sets(run.weights, data, config, run.runner)
            run.close_epoch({name: metrics[name] for name in EPOCH_METRICS},
                            f"test accuracy: familiar {metrics['familiar']:.3f}, novel {metrics['novel']:.3f}")
    return run.weights, run.history


# ============================================================== the task: classify objects from novel viewpoints

SIDE, N_CLASSES = 32, 5            # side of an input image, px; classes of every data set
CLASS_NAMES = ("cross", "L", "T", "frame", "tripod")
NORB_NAMES = ("animal", "human", "plane", "truck", "car")
N_CHANNELS = {"shapes": 1, "smallnorb": 2, "toys": 2}
MARGINS = 0.2, 0.9                 # margin m of the spread loss in the first and in the last epoch
ELEVATIONS = (30, 40), (45, 70)    # training and novel elevations of --split elevation, degrees, as in the paper


def load_data(config, progress=None, without=()):
    """Return the images and labels of a run: {"source", "train", "familiar", "novel"}.

    The three splits are dicts of images (N, H, W, C), labels (N,) int64, azimuths and elevations (N,) in degrees; see
    select_images. progress: a Progress for messages, or None. without: names of splits to leave out.
    """
    data = {name: samples for name, samples in select_images(config).items() if name not in without}
    if config.data == "toys":
        add_toy_images(data, config.toy_seed, progress, config.threads)
    return data


def select_images(config):
    """Return load_data's dict; toys have no images yet, since add_toy_images renders them.

    familiar: the training viewpoints with new pixel noise (shapes), or the training viewpoints of the test toys
    (toys, smallNORB). novel: the same objects from viewpoints outside the training range. With --split instance,
    smallNORB's standard task, the objects differ instead of the viewpoints: familiar holds the training toys, novel
    the test toys from the test azimuths.

    Raises InputError when a split has no image in its range of angles.
    """
    angle, by_instance, shapes = viewpoint_angle(config), config.split == "instance", config.data == "shapes"
    train, test = angle_ranges(config)
    if shapes:
        pools = shape_views(config, train, test)
    else:
        tables = load_norb(config.norb_dir) if config.data == "smallnorb" else {k: toy_tables(k) for k in TOY_SPLITS}
        check_toys(tables, config.norb_dir)
        pools = {"train": tables["train"], "familiar": tables["train" if by_instance else "test"],
                 "novel": tables["test"]}
    data = {"source": config.data}
    for (name, pool), angle_range in zip(pools.items(), (train, train, test)):
        mask = in_range(pool[angle], angle_range)
        if not shapes and (name == "train" or by_instance and name == "familiar"):
            mask = mask & np.isin(pool["instances"], TOY_SPLITS["train"][:config.n_train_toys])
        if not mask.any():
            raise InputError(f"no {name} images: none has {angle} in {angle_range}; widen the range")
        if name != "train" and not shapes and config.n_test:
            mask = sample_views(pool, mask, config.n_test)
        data[name] = {key: array[mask] for key, array in pool.items()}
    return data


def check_toys(tables, norb_dir):
    """Raise InputError if the training and testing files of a folder hold each other's toys, the same toy, or not all
    categories"""
    toys = {split: set(zip(table["labels"].tolist(), table["instances"].tolist())) for split, table in tables.items()}
    held = {split: {instance for _, instance in of_split} for split, of_split in toys.items()}
    fault = ""
    if held["train"] <= {*TOY_SPLITS["test"]} and held["test"] <= {*TOY_SPLITS["train"]}:
        fault = "its training files hold the toys for testing, and the other way round; exchange their names"
    elif same := min(toys["train"] & toys["test"], default=None):
        fault = f"{NORB_NAMES[same[0]]} {same[1]} is in both the training and the testing files; test on other toys"
    elif other := held["train"] - {*TOY_SPLITS["train"]}:
        fault = f"its training files hold instance {min(other)}; instances for training are {TOY_SPLITS['train']}"
    for split, of_split in toys.items():
        if missing := [name for k, name in enumerate(NORB_NAMES) if k not in {label for label, _ in of_split}]:
            fault = fault or f"its {split}ing files hold no {missing[0]}; give files with all {N_CLASSES} categories"
    if fault:
        raise InputError(f"--norb-dir {norb_dir}: {fault}")


def check_views(data, config):
    """Raise InputError, with the conversion to write, unless `data` is what train() takes: load_data's dict, of a
    source, a text, and of train, familiar and novel. Images are (N, 48, 48, 2) uint8, standardized by epoch_samples; of
    --data shapes (N, 32, 32, 1) floating-point. labels are (N,) integers from 0 to 4."""
    shape, kind = ((SIDE, SIDE, 1), "f") if config.data == "shapes" else ((NORB_SIDE, NORB_SIDE, 2), "u")
    for split in ("source", "train", "familiar", "novel"):
        if split not in data:
            raise InputError(f"data has no {split!r}. Give what load_data returns, with images and labels of your own")
    for split in ("train", "familiar", "novel"):
        if missing := {"images", "labels", "azimuths", "elevations"} - {*data[split]}:
            raise InputError(f"data[{split!r}] has no {min(missing)!r}. Give an array of it, with a row for each image")
        check_images(f"data[{split!r}]", data[split]["images"], data[split]["labels"], shape, N_CLASSES, kind)
        if wrong := [name for name, rows in data[split].items() if len(rows) != len(data[split]["labels"])]:
            raise InputError(f"data[{split!r}]: {wrong[0]} has {len(data[split][wrong[0]])} rows for "
                             f"{len(data[split]['labels'])} images. Give a row for each image")


def viewpoint_angle(config):
    """Return the name of the angle that accuracies are reported by, "azimuths" or "elevations", a key of load_data's
    dicts."""
    return "elevations" if config.split == "elevation" else "azimuths"


def angle_ranges(config):
    """Return the (low, high) ranges in degrees of the training viewpoints and of the novel viewpoints.

    Raises InputError when the two ranges of azimuths overlap on the circle, except with --split instance, where the
    toys differ and the ranges may overlap.
    """
    if config.split == "elevation":
        return ELEVATIONS
    train, test = (parse_range(getattr(config, name), flag_name(name)) for name in ("train_azimuths", "test_azimuths"))
    disjoint = (test[0] - train[0]) % 360 > train[1] - train[0] and (train[0] - test[0]) % 360 > test[1] - test[0]
    if config.split == "azimuth" and not disjoint:
        raise InputError(f"--train-azimuths {config.train_azimuths} and --test-azimuths {config.test_azimuths} meet; "
                         "choose them apart")
    return train, test


def parse_range(text, flag):
    """Return (low, high), two floats with low <= high, from the text "LOW:HIGH" in degrees.

    Raises InputError, naming the flag, for other texts and for ranges of 360 degrees or more.
    """
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        raise InputError(f"{flag} {text}: must be LOW:HIGH in degrees, as in 0:150") from None
    if not 0 <= high - low < 360:
        raise InputError(f"{flag} {text}: must be two finite numbers, LOW not above HIGH, less than 360 degrees apart")
    return low, high


def in_range(angles, bounds):
    """Return a bool mask, (N,): whether angles, (N,) in degrees, are within bounds (low, high) on the circle.

    Both ends are included, up to a tolerance of 1e-6 degrees.
    """
    low, high = bounds
    return (np.asarray(angles) - low + 1e-6) % 360 <= high - low + 2e-6


def sample_views(pool, mask, n):
    """Return a mask, (N,) bool, of about n of the masked rows of pool, in whole views.

    A view is one toy from one viewpoint with all its lightings. The random choice is the same in every run.
    """
    rows = np.flatnonzero(mask)
    keys = np.stack([pool[name][rows] for name in ("labels", "instances", "elevations", "azimuths")])
    _, view_index = np.unique(keys, axis=1, return_inverse=True)
    n_views = view_index.max() + 1
    chosen = np.random.default_rng(0).permutation(n_views)[:-(-n * n_views // len(rows))]
    return np.isin(np.arange(len(mask)), rows[np.isin(view_index.ravel(), chosen)])


def epoch_samples(data, epoch, config, dtype=np.float32):
    """Yield the training images of one epoch in chunks of whole batches: shuffled and augmented.

    Each chunk is a dict of images (n, 32, 32, C), labels (n,) and margin (n,), the spread loss's margin m of this
    epoch; with dropout, also dropout_mask (n, hidden units), each entry 0 or 1 / (1 - dropout).
    """
    train = data["train"]
    order = rng_for(config.seed, "batches", epoch).permutation(len(train["labels"]))
    size = max(1, CHUNK // config.batch_size) * config.batch_size
    margin = MARGINS[0] + (MARGINS[1] - MARGINS[0]) * epoch / max(1, config.n_epochs - 1)
    for k, start in enumerate(range(0, len(order), size)):
        rng, rows = rng_for(config.seed, "batches", epoch, k), order[start:start + size]
        images = crop_batch(train["images"], rows, rng, dtype) if config.data != "shapes" else train["images"][rows]
        samples = {"images": images, "labels": train["labels"][rows], "margin": np.full(len(rows), margin, np.float32)}
        if config.dropout:
            shape = len(rows), param_shapes(config)["fc2_w"][0]
            samples["dropout_mask"] = draw_dropout_mask(rng, shape, config.dropout)
        yield samples


def preprocess(samples, source, dtype=np.float32):
    """Yield test images in chunks, as dicts of images (n, 32, 32, C) and labels (n,).

    Toys and smallNORB: standardized images, cropped at the center. Shapes: the images as they are.
    """
    for start in range(0, len(samples["labels"]), CHUNK):
        rows = np.arange(start, min(start + CHUNK, len(samples["labels"])))
        images = crop_batch(samples["images"], rows, None, dtype) if source != "shapes" else samples["images"][rows]
        yield {"images": images, "labels": samples["labels"][rows]}


def to_batch(samples, rows, dtype=np.float32):
    """Return the given rows of samples, a dict of prepared arrays, as one batch of floating-point type dtype."""
    return {name: a[rows] if name == "labels" else a[rows].astype(dtype, copy=False) for name, a in samples.items()}


# -------------------------------------------------------------- five shapes

def shape_points():
    """Return the five shapes as arrays of points, (n, 3), in [-1, 1]^3: x right, y up, z towards the viewer."""
    segment = np.linspace                                               # (start, end, number of points)
    cross = np.array([[0, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]], float) * 0.8
    ell = np.concatenate([segment((-0.5, 0.9, 0), (-0.5, -0.7, 0), 7), segment((-0.5, -0.7, 0), (0.8, -0.7, 0), 6)[1:],
                          segment((-0.5, -0.7, 0), (-0.5, -0.7, 0.6), 3)[1:]])
    tee = np.concatenate([segment((-0.8, 0.8, 0), (0.8, 0.8, 0), 7), segment((0, 0.8, 0), (0, -0.9, 0), 7)[1:]])
    corners = np.array(np.meshgrid(*[(-0.65, 0.65)] * 3)).reshape(3, 8).T
    frame = np.concatenate([segment(a, b, 5) for k, a in enumerate(corners) for b in corners[k + 1:]
                            if np.count_nonzero(a != b) == 1])
    tripod = np.concatenate([segment((0, 0, 0), end, 6) for end in ((0.9, 0, 0), (0, 0.9, 0), (0, 0, 0.9))])
    return cross, ell, tee, frame, np.unique(tripod, axis=0)


BLOB = 1.2                         # standard deviation of the Gaussian blob that draws a point, px
RADIUS = 9.5                       # length of one unit of a shape's coordinates, px
NOISE = 0.04                       # standard deviation of the pixel noise


def render(labels, azimuths, elevations, rng):
    """Return images of shapes from given viewpoints, (N, 32, 32, 1) float32 in [0, 1].

    labels, (N,) int; azimuths and elevations, (N,) in degrees. Under orthographic projection every point of a shape
    is drawn as a Gaussian blob, with a brightness from 0.5 (far) to 1 (near). Blobs are added and clipped at 1, then
    Gaussian pixel noise is added. A blob is the product of a row profile and a column profile, so that an image with
    n points is one matrix product (32, n) @ (n, 32).
    """
    images, pixels = np.empty((len(labels), SIDE, SIDE, 1), np.float32), np.arange(SIDE) - (SIDE - 1) / 2
    R = np.stack([*map(view_rotation, azimuths, elevations)])
    for label, points in enumerate(shape_points()):
        rows = np.flatnonzero(labels == label)
        x, y, z = np.moveaxis(points @ R[rows].transpose(0, 2, 1), -1, 0)                      # (n, points) each
        profile = [np.exp(-0.5 * ((pixels - RADIUS * coordinate[..., None]) / BLOB) ** 2) for coordinate in (x, -y)]
        brightness = (0.75 + 0.25 * np.clip(z, -1, 1))[..., None]
        images[rows, :, :, 0] = profile[1].transpose(0, 2, 1) @ (profile[0] * brightness)
    np.minimum(images, 1, out=images)
    images += np.float32(NOISE) * rng.standard_normal(images.shape, np.float32)
    return np.clip(images, 0, 1, out=images)


def make_views(azimuths, elevations, n_per_view, rng):
    """Return n_per_view noisy images of every shape at every azimuth and elevation (degrees).

    The result is a dict of arrays with one row per image: images, labels, azimuths, elevations.
    """
    values = np.arange(N_CLASSES), azimuths, elevations, np.arange(n_per_view)
    labels, a, e, _ = (grid.ravel() for grid in np.meshgrid(*values, indexing="ij"))
    return {"images": render(labels, a, e, rng), "labels": labels, "azimuths": a % 360, "elevations": e}


def shape_views(config, train, test):
    """Return {"train", "familiar", "novel"}, three of make_views' dicts, from the given ranges of angles.

    Each split has n_train_views azimuths (novel azimuths: n_test_views) by n_elev elevations, equally spaced over their
    ranges: n_per_combo images of each training view, two images of each test view.
    """
    azimuths, elevations = train, (30, 70)
    if config.split == "elevation":
        azimuths, elevations = parse_range(config.train_azimuths, "--train-azimuths"), train
    familiar = np.linspace(*azimuths, config.n_train_views), np.linspace(*elevations, config.n_elev)
    novel = (np.linspace(*test, config.n_test_views), familiar[1]) if config.split == "azimuth" else (
        familiar[0], np.linspace(*test, config.n_elev))
    return {"train": make_views(*familiar, config.n_per_combo, rng_for(config.seed, "data")),
            "familiar": make_views(*familiar, 2, rng_for(config.seed, "evaluation", 0)),
            "novel": make_views(*novel, 2, rng_for(config.seed, "evaluation", 1))}


# -------------------------------------------------------------- the real smallNORB

NORB_FILES = {(split, kind): f"smallnorb-5x{toys}x9x18x6x2x96x96-{split}ing-{kind}.mat"
              for split, toys in (("train", "46789"), ("test", "01235")) for kind in ("dat", "cat", "info")}
NORB_FORMAT = {                    # by kind of file: magic number, dtype, shape of a row
    "dat": (0x1E3D4C55, "u1", (2, 96, 96)), "cat": (0x1E3D4C54, "<i4", ()), "info": (0x1E3D4C54, "<i4", (4,))}
NORB_SIDE = 48                     # side of an image after downsampling by 2, px
NORB_ROWS = 24300                  # rows of a split: 5 classes x 5 toys x 9 elevations x 18 azimuths x 6 lightings
NORB_CODES = (                     # name, valid codes, scale and offset that convert a code to a value
    ("labels", range(5), 1, 0), ("instances", range(10), 1, 0), ("elevations", range(9), 5, 30),
    ("azimuths", range(0, 36, 2), 10, 0), ("lightings", range(6), 1, 0))
MAX_BRIGHTNESS, CONTRASTS = 32, (0.5, 1.5)     # training jitter: up to +-32 of 255 gray levels; factors of contrast


def downsample(images):
    """Return images at half the resolution, with the cameras as channels: means of 2x2 pixels.

    (N, 2, H, W) uint8 to (N, H/2, W/2, 2) uint8. Means are rounded to the nearest integer, halves upwards.
    """
    rows = images[:, :, ::2].astype(np.uint16) + images[:, :, 1::2]                            # (N, 2, H/2, W)
    return ((rows[..., ::2] + rows[..., 1::2] + np.uint16(2)) >> 2).astype(np.uint8).transpose(0, 2, 3, 1)


def read_norb_file(path, kind):
    """Return the array in one smallNORB file, raw or gzipped; its number of rows N is read from the header.

    kind "dat": images, (N, 48, 48, 2) uint8; "cat": labels, (N,) int32; "info": (N, 4) int32. The file is read as a
    stream and downsampled from 96x96 px, 32 images at a time. Rounding the means to uint8 costs at most half a gray
    level and stores a split in 112 MB; the file has 448 MB, and float32 images would need as much.

    Raises InputError naming the file and the fault: missing, unreadable, corrupt or truncated gzip, an unexpected
    header, too few or too many bytes.
    """
    magic, dtype, shape = NORB_FORMAT[kind]
    header_size, row_size = 4 * (2 + max(3, 1 + len(shape))), np.dtype(dtype).itemsize * math.prod(shape)
    fix = "delete it and fetch it again"
    try:
        with (open(path, "rb") as raw,
              contextlib.nullcontext(raw) if raw.peek(2)[:2] != b"\x1f\x8b" else gzip.open(raw) as file):
            header = file.read(header_size)
            actual, ndim, N, *rest = np.frombuffer(header.ljust(header_size, b"\0"), "<i4").tolist()
            if (actual, ndim, *rest[:len(shape)]) != (magic, 1 + len(shape), *shape) or not 1 <= N <= NORB_ROWS:
                raise InputError(
                    f"{path}: its header says magic number 0x{actual & 0xFFFFFFFF:08X}, {ndim} sizes, {[N, *rest]}, "
                    f"a smallNORB {kind} file's 0x{magic:08X}, {1 + len(shape)}, {[NORB_ROWS, *shape]} or less; {fix}")
            out = np.empty(
                (N, NORB_SIDE, NORB_SIDE, 2) if kind == "dat" else (N, *shape), np.uint8 if kind == "dat" else np.int32)
            for start in range(0, N, 32):
                rows = out[start:start + 32]
                if len(chunk := file.read(len(rows) * row_size)) < len(rows) * row_size:
                    raise InputError(f"{path}: truncated, {start * row_size + len(chunk)} bytes of {N * row_size} that "
                                     f"the header says; {fix}")
                chunk = np.frombuffer(chunk, dtype).reshape(len(rows), *shape)
                rows[...] = downsample(chunk) if kind == "dat" else chunk
            if file.read(1):                                           # reading past the end also checks gzip's CRC
                raise InputError(f"{path}: bytes left over after the {N * row_size} that the header says; {fix}")
    except FileNotFoundError:
        raise InputError(f"{path}: missing; --norb-dir must be the folder of smallNORB's six files, dat, cat and "
                         "info of training and testing, .mat or .mat.gz") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: corrupt or truncated gzip ({error}); {fix}") from None
    return out


def load_norb(norb_dir):
    """Return the smallNORB files of a folder: {"train", "test"}, two dicts of arrays.

    images, (N, 48, 48, 2) uint8, whose channels are the left and the right camera; labels, instances, elevations and
    azimuths (degrees), lightings, all (N,) int64. The folder holds the six files, each as .mat or .mat.gz; if both
    exist, .mat is read. Raises InputError naming the file and the fault.
    """
    folder, data = home_path(norb_dir), {"train": {}, "test": {}}
    for split, arrays in data.items():
        paths = {kind: folder / NORB_FILES[split, kind] for kind in NORB_FORMAT}
        paths = {kind: next((p for p in (path, path.with_suffix(".mat.gz")) if p.exists()), path)
                 for kind, path in paths.items()}
        columns = []
        for kind in "cat", "info":                                     # the small files first, to fail early
            table = read_norb_file(paths[kind], kind)
            columns += [(paths[kind], column) for column in table.reshape(len(table), -1).T]
        for (path, column), (name, codes, scale, offset) in zip(columns, NORB_CODES, strict=True):
            if len(wrong := np.flatnonzero(~np.isin(column, codes))):
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
    """Return images with zero mean and unit variance each, over all pixels and both cameras.

    images, uint8 (N, H, W, C), to dtype (N, H, W, C). After the standardization an image is multiplied by its
    contrast, and its brightness, in gray levels of the original image, is added; both are numbers or (N,). A standard
    deviation below one gray level counts as one, so that a constant image becomes 0.
    """
    x = images.astype(dtype).reshape(len(images), math.prod(images.shape[1:]))                 # (N, H*W*C)
    x -= x.mean(1, keepdims=True)
    std = np.maximum(np.sqrt(np.vecdot(x, x) / x.shape[1]), 1)                                 # (N,)
    x *= (contrast / std).astype(dtype)[:, None]
    x += (brightness / std).astype(dtype)[:, None]
    return x.reshape(images.shape)


def crop_batch(images, rows, rng=None, dtype=np.float32):
    """Return network inputs, (n, 32, 32, 2) of type dtype, from the given rows of images (N, 48, 48, 2) uint8.

    With rng (training), every image has a random crop, brightness and contrast, from four random numbers per image.
    As in the paper, the whole image is standardized first. The contrast jitter scales the image about its mean, the
    brightness jitter is in gray levels. Jitter applied before the standardization would be undone by it. Without rng
    (test), the result is the central crop of the standardized image.
    """
    images = images[rows]
    n, slack = len(images), NORB_SIDE - SIDE
    if rng is None:
        center = slice(slack // 2, slack // 2 + SIDE)
        return standardize(images, dtype=dtype)[:, center, center].copy()
    draws = rng.random((4, n))
    top, left = (draws[:2] * (slack + 1)).astype(int)
    contrast = CONTRASTS[0] + (CONTRASTS[1] - CONTRASTS[0]) * draws[2]
    x = standardize(images, contrast, MAX_BRIGHTNESS * (2 * draws[3] - 1), dtype)
    x = x.reshape(n, NORB_SIDE, 2 * NORB_SIDE)
    windows = sliding_window_view(x, (SIDE, 2 * SIDE), axis=(1, 2))                     # (n, 17, 33, 32, 64)
    return windows[np.arange(n), top, 2 * left].reshape(n, SIDE, SIDE, 2)


# -------------------------------------------------------------- toys: rendered objects with the structure of smallNORB
#
# A toy is a list of parts, (kind, matrix, center). A part maps a point p of a unit solid to center + matrix p in the
# toy's coordinates: x forward, y up, z to the toy's right. Unit solids: ellipsoid |p| <= 1; box |x|, |y|, |z| <= 1;
# cylinder x^2 + y^2 <= 1, |z| <= 1; cone x^2 + y^2 <= ((1 - z) / 2)^2, |z| <= 1, with its apex at z = 1.

ELLIPSOID, BOX, CYLINDER, CONE = range(4)
TOYS_VERSION = 1                   # of the rendered images; part of the cache folder's name
TOYS_CACHE = Path("~/.cache/hinton-toys")
TOY_SPLITS = {"train": (4, 6, 7, 8, 9), "test": (0, 1, 2, 3, 5)}         # instances of a class, as in smallNORB
TOY_STYLES = {toy: style for five in TOY_SPLITS.values() for style, toy in enumerate(five)}
TOY_ELEVATIONS, TOY_AZIMUTHS = range(30, 75, 5), range(0, 360, 20)
STEREO = 5.0                       # difference in azimuth between the two cameras, degrees
REACH = 0.92                       # distance from a toy's center to its farthest point, in half image sides
YAW, STRETCH, OFFSET = 6.0, 1.05, 0.04     # limits of a toy's random rotation (degrees), scale factors and offset
LIGHTINGS = (                      # background, ambient, lamps: azimuth from the cameras, height (degrees), strength
    (0.82, 0.18, ((-60, 40, 0.75),)), (0.79, 0.18, ((60, 40, 0.75),)), (0.76, 0.15, ((0, 75, 0.8),)),
    (0.82, 0.2, ((-60, 30, 0.45), (60, 30, 0.45))), (0.79, 0.22, ((170, 35, 0.5), (0, 30, 0.35))),
    (0.76, 0.2, ((-120, 40, 0.45), (20, 60, 0.5))))


def axis_rotation(axis, degrees):
    """Return the rotation matrix (3, 3) about the axis "x", "y" or "z" by an angle in degrees."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    i, j = {"x": (1, 2), "y": (2, 0), "z": (0, 1)}[axis]
    R = np.eye(3)
    R[i, i] = R[j, j] = c
    R[i, j], R[j, i] = -s, s
    return R


def small_matmul(A, B):
    """Return A @ B, (n, 3) times (3, m), by explicit sums: the same bits on every processor, unlike BLAS."""
    return A[:, :1] * B[:1] + A[:, 1:2] * B[1:2] + A[:, 2:3] * B[2:3]


def view_rotation(azimuth, elevation):
    """Return the rotation matrix (3, 3) from a toy's coordinates to those of the camera.

    It rotates by azimuth about the vertical axis, then by elevation towards the viewer; both in degrees.
    """
    return small_matmul(axis_rotation("x", elevation), axis_rotation("y", azimuth))


def part(kind, center, size, rotation=None):
    """Return one part of a toy, (kind, matrix, center).

    size: (3,) extents along the part's own axes; rotation: rotation matrix (3, 3) of the part, or None.
    """
    scaled = np.diag(np.asarray(size, float) / 2)
    return kind, scaled if rotation is None else small_matmul(rotation, scaled), np.asarray(center, float)


def pair(kind, center, size, rotation=None):
    """Return a part and its mirror image on the other side of the toy's plane of symmetry, z = 0."""
    kind, M, center = part(kind, center, size, rotation)
    mirror = np.array([1, 1, -1.0])
    return [(kind, M, center), (kind, mirror[:, None] * M, center * mirror)]


def rod(kind, start, end, width, depth=None):
    """Return a cylinder from start to end, or a cone with its apex at end.

    width and depth (default: width) are the two diameters of the cross-section.
    """
    start, end = np.asarray(start, float), np.asarray(end, float)
    along = (end - start) / 2
    length = math.hypot(*along)
    across = np.cross(along / length, [1, 0, 0] if abs(along[0]) < 0.9 * length else [0, 1, 0])
    across /= math.hypot(*across)
    other = np.cross(along / length, across)
    return kind, np.stack([across * width / 2, other * (depth or width) / 2, along], 1), (start + end) / 2


def wings(x, y, span, chord, sweep, dihedral, thickness):
    """Return two swept plates, the right and the left wing; sweep and dihedral are angles in degrees."""
    back, up = math.tan(math.radians(sweep)) * span / 4, math.tan(math.radians(dihedral)) * span / 4
    M = np.array([[chord / 2, 0, -back], [0, thickness / 2, up], [0, 0, span / 4]])
    center, mirror = np.array([x - back, y + up, span / 4]), np.array([1, 1, -1.0])
    return [(BOX, M, center), (BOX, mirror[:, None] * M, center * mirror)]


# The five toys of a class in a split differ in style. Animals: trunk, snout or neither; humans: staff, rucksack, shield
# or nothing; planes: two engines, four engines, a propeller or none; trucks: the load; cars: the shape of the body.

def toy_animal(rng, style):
    """Return an animal: body, neck, head with ears, horns, trunk or snout, four legs, a tail."""
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
    """Return a human: torso, head with or without a hat, two legs in stride, two bent arms, what is carried."""
    leg, hip, thick = rng.uniform(0.5, 0.8), rng.uniform(0.08, 0.17), rng.uniform(0.13, 0.24)
    torso, shoulders, deep = rng.uniform(0.45, 0.75), rng.uniform(0.32, 0.6), rng.uniform(0.2, 0.34)
    stride, spread = rng.uniform(-0.35, 0.35), rng.uniform(0, 0.18)
    toy = []
    for s in (1, -1):
        foot = np.array([stride * s, 0, s * (hip + spread)])
        toy += [rod(CYLINDER, (0, leg, s * hip), foot, thick),
                part(BOX, foot + [0.05, 0.03, 0], (0.24, 0.09, 0.9 * thick))]
    shape = rng.integers(0, 4)
    if shape == 0:
        toy.append(part(BOX, (0, leg + torso / 2, 0), (deep, torso, shoulders)))
    elif shape == 1:
        toy.append(part(ELLIPSOID, (0, leg + torso / 2, 0), (1.3 * deep, 1.25 * torso, 1.1 * shoulders)))
    elif shape == 2:
        toy.append(rod(CYLINDER, (0, leg - 0.05, 0), (0, leg + torso, 0), shoulders, 1.1 * deep))
    else:
        toy.append(rod(CONE, (0, leg - 0.2, 0), (0, leg + 1.5 * torso, 0), 1.3 * shoulders, 1.8 * deep))
    head, y = rng.uniform(0.24, 0.38), leg + torso
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
        shoulder = np.array([0, leg + 0.92 * torso, s * (shoulders / 2 + 0.2 * thick)])
        elbow = shoulder + length * upper
        hand = elbow + length * lower / math.hypot(*lower)
        toy += [rod(CYLINDER, shoulder, elbow, thick), rod(CYLINDER, elbow, hand, 0.9 * thick)]
    if style == 0:
        toy.append(rod(CYLINDER, hand - [0, 0.55, 0], hand + [0, 0.6, 0], 0.05))
    elif style == 1:
        toy.append(part(BOX, (-0.9 * deep, leg + 0.6 * torso, 0), (0.2, 0.6 * torso, 0.7 * shoulders)))
    elif style == 2:
        toy.append(part(BOX, hand, (0.06, 0.5, 0.36)))
    return toy


def toy_plane(rng, style):
    """Return a plane: fuselage, one or two pairs of wings, tail, engines or a propeller, with or without wheels."""
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
    """Return a truck: cab, chassis, four or six wheels; its load is a box, a tank, sand, logs or a crane."""
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
    """Return a car: sedan, beetle, station wagon, convertible or race car, with or without a rear wing."""
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


TOY_MAKERS = (toy_animal, toy_human, toy_plane, toy_truck, toy_car)         # in the order of NORB_NAMES


def corners(toy):
    """Return the corners, (8 n, 3), of the boxes around a toy's n parts."""
    signs = np.array(np.meshgrid(*[(-1.0, 1.0)] * 3)).reshape(3, 8)
    return np.concatenate([center + small_matmul(M, signs).T for _, M, center in toy])


def make_toy(category, instance, toy_seed):
    """Return one toy as a list of parts, scaled to the size of the image.

    category: index of the class; instance: 0 to 9. The toy is drawn at random from toy_seed, then rotated, scaled and
    translated at random within YAW, STRETCH and OFFSET, so that toys are not perfectly aligned.
    """
    rng = np.random.default_rng(np.random.SeedSequence(toy_seed, spawn_key=(category, instance)))
    toy = TOY_MAKERS[category](rng, TOY_STYLES[instance])
    transform = axis_rotation("y", rng.uniform(-YAW, YAW)) * rng.uniform(1 / STRETCH, STRETCH, 3)
    offset, points = rng.uniform(-OFFSET, OFFSET, 3), corners(toy)
    middle = (points.min(0) + points.max(0)) / 2
    size = np.sqrt(np.square(small_matmul(points - middle, transform.T)).sum(1).max())
    return [(kind, small_matmul(transform, M) / size,
             small_matmul(transform, (center - middle)[:, None])[:, 0] / size + offset)
            for kind, M, center in toy]


def inverse_3x3(T):
    """Return the inverse of a matrix (3, 3), computed from its cofactors."""
    cofactors = np.stack([np.cross(T[1], T[2]), np.cross(T[2], T[0]), np.cross(T[0], T[1])], 1)
    return cofactors / (T[0] * cofactors[:, 0]).sum()


FAR = np.float32(1e9)              # ray parameter beyond every part, in place of infinity


def intersect_part(kind, o, d):
    """Intersect parallel rays with a unit part and return where they enter it.

    A ray is o + t d, seen from a camera at t = +infinity, so that the visible intersection is the one with the
    largest t. A part is the common interior of a quadric, a t^2 + 2 b t + q <= 0 along the ray, and of slabs between
    two parallel planes. A ray is inside of each of them in an interval far <= t <= near; it hits the part where all
    intervals overlap.

    kind: ELLIPSOID, BOX, CYLINDER or CONE. o: origins of the rays in the part's coordinates, a list of three arrays
    that broadcast to the shape of the image; d: direction, (3,), the same for all rays; float32. Return three arrays:
    t of the entry point; face, the axis 0 to 2 of the plane through which the ray enters, or -1 for the curved face;
    and whether the ray hits the part.
    """
    near, far, face, inside = FAR, -FAR, np.int8(-1), True
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
        if a < 0:                                                # steeper than the cone: keep the nappe below its apex
            near, far = (near, -FAR) if d[2] > 0 else (FAR, far)
    for k in {BOX: (0, 1, 2), ELLIPSOID: ()}.get(kind, (2,)):
        along = d[k] if abs(d[k]) > 1e-6 else np.float32(1e-6)
        middle, half = -o[k] / along, abs(1 / along)
        face = np.where(middle + half < near, np.int8(k), face)
        near, far = np.minimum(near, middle + half), np.maximum(far, middle - half)
    return near, face, inside & (near >= far)


def cast_rays(toy, azimuth, elevation, side):
    """Cast one ray per pixel under orthographic projection, to the nearest surface point of a toy.

    toy: list of parts; azimuth and elevation of the camera in degrees; side: of the image, px. Only the pixels in a
    part's bounding rectangle are tested.

    Return hit, (side, side) bool: whether a pixel shows the toy; and normals, (3, side, side) float32: the unit
    surface normal at that point in camera coordinates (x right, y up, z towards the camera), 0 where the ray hits
    nothing.
    """
    R = view_rotation(azimuth, elevation)
    pixels = (((np.arange(side) + 0.5) / side * 2 - 1) / REACH).astype(np.float32)
    depth, normals = np.full((side, side), -FAR), np.zeros((3, side, side), np.float32)
    for kind, M, center in toy:
        T, center = small_matmul(R, M), small_matmul(R, center[:, None])[:, 0]
        extent = np.abs(T).sum(1)
        left, right = np.searchsorted(pixels, center[0] + (-extent[0], extent[0]))
        top, bottom = np.searchsorted(pixels, -center[1] + (-extent[1], extent[1]))
        if left == right or top == bottom:
            continue
        window = np.s_[top:bottom, left:right]
        x, y = pixels[left:right] - np.float32(center[0]), -pixels[top:bottom, None] - np.float32(center[1])
        to_part = inverse_3x3(T).astype(np.float32)
        o, d = [row[0] * x + row[1] * y for row in to_part], to_part[:, 2]
        t, face, hits = intersect_part(kind, o, d)
        z = t + np.float32(center[2])
        rows, columns = np.nonzero(hits & (z > depth[window]))
        if not len(rows):
            continue
        depth[window][rows, columns] = z[rows, columns]
        t = t[rows, columns]
        point = [o[k][rows, columns] + d[k] * t for k in range(3)]
        if kind != ELLIPSOID:
            faces = np.broadcast_to(face, z.shape)[rows, columns]
            point[2] = {BOX: 0 * t, CYLINDER: 0 * t, CONE: (1 - point[2]) / 4}[kind]     # gradient of the curved face
            point = [np.where(faces < 0, point[k], np.where(faces == k, np.sign(d[k]), 0)) for k in range(3)]
        normal = [to_part[0, k] * point[0] + to_part[1, k] * point[1] + to_part[2, k] * point[2] for k in range(3)]
        length = np.sqrt(normal[0] * normal[0] + normal[1] * normal[1] + normal[2] * normal[2])
        normals[(slice(None), *window)][:, rows, columns] = np.stack(normal) / length
    return depth > -FAR, normals


def shade(hit, normals, elevation):
    """Return the six LIGHTINGS of one view, (6, side, side) uint8, by Lambertian shading.

    hit and normals: cast_rays' results; elevation of the cameras in degrees. A surface has the brightness of the
    ambient light plus, for every lamp, its strength times the cosine between the surface normal and the direction of
    the lamp; the background is light. A lamp's azimuth is relative to the cameras; its height is above the horizon,
    so that lamps do not follow the cameras' elevation.
    """
    images = np.empty((len(LIGHTINGS), *hit.shape), np.uint8)
    for image, (ground, ambient, lamps) in zip(images, LIGHTINGS):
        brightness = np.full(hit.shape, np.float32(ambient))
        for azimuth, height, strength in lamps:
            R = small_matmul(axis_rotation("y", azimuth), axis_rotation("x", -height))
            lamp = (small_matmul(axis_rotation("x", elevation), R)[:, 2] * strength).astype(np.float32)
            brightness += np.maximum(lamp[0] * normals[0] + lamp[1] * normals[1] + lamp[2] * normals[2], 0)
        image[:] = np.rint(255 * np.minimum(np.where(hit, brightness, np.float32(ground)), 1))
    return images


def draw_view(toy, elevation, azimuth, side):
    """Return the six lightings of one view from both cameras, (6, 2, side, side) uint8: left, right."""
    return np.stack([shade(*cast_rays(toy, azimuth + camera, elevation, side), elevation)
                     for camera in (-STEREO / 2, STEREO / 2)], 1)


def toy_views(elevations, azimuths):
    """Return the indices, 0 to 161, of a toy's views with the given elevations and azimuths in degrees."""
    row = (elevations - TOY_ELEVATIONS.start) // TOY_ELEVATIONS.step
    return len(TOY_AZIMUTHS) * row + (azimuths - TOY_AZIMUTHS.start) // TOY_AZIMUTHS.step


def toy_path(category, instance, toy_seed):
    """Return the path of the cache file of one toy."""
    folder = home_path(TOYS_CACHE) / f"toys-{toy_seed}-version-{TOYS_VERSION}"
    return folder / f"{NORB_NAMES[category]}-{instance}.npz"


def read_toy(path, progress):
    """Return the cached views of a toy: {view index: images (6, 48, 48, 2)}.

    Return {} if the file does not exist, and, after a message, if it is damaged.
    """
    try:
        if not path.exists():
            return {}
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("views", "images")}
            if str(file["digest"]) != digest_of(arrays):
                raise ValueError
        return dict(zip(arrays["views"].tolist(), arrays["images"], strict=True))
    except Exception:                                 # NumPy does not document which errors a damaged file raises
        progress.warn(f"{path} is damaged; rendering this toy again")
        return {}


def save_toy(path, views):
    """Write a toy's views, read_toy's dict, to the cache; return the error message, or "" on success."""
    arrays = {"views": np.array(sorted(views)), "images": np.stack([views[view] for view in sorted(views)])}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: np.savez(file, **arrays, digest=np.array(digest_of(arrays))))
    except (OSError, InputError) as error:
        return str(error)
    return ""


def draw_views(category, instance, toy_seed, views):
    """Render views of a toy, given by their indices, and return (n, 6, 48, 48, 2) uint8, as load_norb does."""
    toy, n = make_toy(category, instance, toy_seed), len(TOY_AZIMUTHS)
    return np.stack([downsample(draw_view(toy, TOY_ELEVATIONS[view // n], TOY_AZIMUTHS[view % n], 2 * NORB_SIDE))
                     for view in views])


def add_toy_images(data, toy_seed, progress=None, threads=0):
    """Add images to the tables of toys in data, {name: table}; each table is a dict as in toy_tables.

    Views that a toy's cache file lacks are rendered, in `threads` processes (0: one per core), and added to that
    file. If the cache cannot be written, a warning says so and the images are used without being saved. progress: a
    Progress for messages, or None.
    """
    progress = Progress(quiet=True) if progress is None else progress
    tables = [table for table in data.values() if isinstance(table, dict)]
    ids = [(table["labels"], table["instances"], toy_views(table["elevations"], table["azimuths"])) for table in tables]
    wanted = {}
    for label, instance, view in zip(*map(np.concatenate, zip(*ids))):
        wanted.setdefault((int(label), int(instance)), set()).add(int(view))
    images_of = {toy: read_toy(toy_path(*toy, toy_seed), progress) for toy in wanted}
    missing = [(*toy, toy_seed, sorted(views - images_of[toy].keys())) for toy, views in wanted.items()
               if views - images_of[toy].keys()]
    failure = ""
    for (category, instance, _, views), images in map_processes(draw_views, missing, progress, threads):
        images_of[category, instance] |= dict(zip(views, images))
        failure = failure or save_toy(toy_path(category, instance, toy_seed), images_of[category, instance])
    if failure:
        progress.warn(f"the rendered toys are not saved, so the next run renders them again: {failure}")
    for table, (labels, instances, views) in zip(tables, ids):
        table["images"] = np.empty((len(labels), NORB_SIDE, NORB_SIDE, 2), np.uint8)
        for k, key in enumerate(zip(labels.tolist(), instances.tolist(), views.tolist(), table["lightings"].tolist())):
            table["images"][k] = images_of[key[:2]][key[2]][key[3]]


MIN_VIEWS = 40                     # of toys, about 1 second, for which worker processes are worth their start


def map_processes(draw, tasks, progress, threads):
    """Yield (task, draw(*task)) for all tasks, in order, computed in worker processes (0 threads: one per core).

    Few views (under MIN_VIEWS) are computed in this process, and all where workers cannot start.
    """
    workers, done, main = min(threads or n_cores(), len(tasks)), 0, sys.modules["__main__"]
    with contextlib.suppress(concurrent.futures.process.BrokenProcessPool):
        if workers > 1 and sum(len(views) for *_, views in tasks) >= MIN_VIEWS:
            with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
                if __name__ != "__main__":           # so that workers do not import, that is run, a user's own script
                    sys.modules["__main__"] = type(main)("__main__")
                try:
                    results = pool.map(draw, *zip(*tasks))
                finally:
                    sys.modules["__main__"] = main
                for done, (task, result) in enumerate(zip(tasks, results), 1):
                    progress.step(f"rendering toys: {done} of {len(tasks)}")
                    yield task, result
    for k, task in enumerate(tasks[done:], done + 1):
        progress.step(f"rendering toys: {k} of {len(tasks)}")
        yield task, draw(*task)


def toy_tables(split):
    """Return the table of a split: labels, instances, elevations, azimuths, lightings, each (N,) int64.

    The rows are those of load_norb's dict, without the images.
    """
    names = ("labels", "instances", "elevations", "azimuths", "lightings")
    values = (range(N_CLASSES), TOY_SPLITS[split], TOY_ELEVATIONS, TOY_AZIMUTHS, range(len(LIGHTINGS)))
    return dict(zip(names, (grid.ravel() for grid in np.meshgrid(*map(np.array, values), indexing="ij"))))


def views_of(config, label, azimuths, elevations, lighting=0, progress=None):
    """Return views of one test object of a class: a dict with the keys of load_data's splits.

    azimuths, elevations: (N,), degrees. Shapes are rendered from exactly there. Of toys and smallNORB, the first test
    toy: row k is the stored view nearest to azimuths[k] and elevations[k]; where a file lacks this toy or lighting,
    another is taken.
    """
    azimuths, elevations = np.array(azimuths, float), np.array(elevations, float)
    if config.data == "shapes":
        labels = np.full(len(azimuths), label)
        return {"images": render(labels, azimuths, elevations, rng_for(config.seed, "evaluation", 2)),
                "labels": labels, "azimuths": azimuths % 360, "elevations": elevations}
    pool = load_norb(config.norb_dir)["test"] if config.data == "smallnorb" else toy_tables("test")
    stored = np.flatnonzero(pool["labels"] == label)
    distance = 1e3 * ((pool["instances"] != TOY_SPLITS["test"][0]) * 1.0 + (pool["lightings"] != lighting))[stored]
    distance = distance + np.abs((pool["azimuths"][stored] - azimuths[:, None] + 180) % 360 - 180)
    rows = stored[(distance + np.abs(pool["elevations"][stored] - elevations[:, None])).argmin(1)]
    views = {name: array[rows] for name, array in pool.items()}
    if config.data == "toys":
        add_toy_images({"views": views}, config.toy_seed, progress, config.threads)
    return views


# ============================================================== the paper: poses, votes, EM routing, losses, networks
#
# V, R, r, the logits and their gradients have the axes (L, J, I, ...): parent position, parent type, child.

P, D = 4, 16                       # rows of a pose matrix, and its elements
SIGMA2_EPS = 5e-4                  # variance floor, as in the official code: one child alone has no variance
MASS_EPS = 1e-7                    # added to the mass: a parent without active children would divide by zero


@dataclass(frozen=True)
class Window:
    """The 3x3 (K x K) receptive fields of convolutional capsules, at a stride.

    The children are N images with H x W positions and B types of capsules.
    """
    N: int
    H: int
    W: int
    B: int
    stride: int
    K: int = 3

    @property
    def parents(self):
        """The numbers of rows and columns of the parents."""
        return (self.H - self.K) // self.stride + 1, (self.W - self.K) // self.stride + 1

    def select(self, x, ky, kx, axis):
        """Return a view of x with the entries at kernel position (ky, kx) of all receptive fields.

        axis: the axis of x's rows; the next one has its columns.
        """
        Ho, Wo = self.parents
        rows, columns = slice(ky, ky + self.stride * Ho, self.stride), slice(kx, kx + self.stride * Wo, self.stride)
        return x[(*[slice(None)] * axis, rows, columns)]


def im2col_capsules(x, window):
    """Return the children in every receptive field, (K*K*B, N*Ho*Wo, E), children first; x: (N, H, W, B, E)."""
    K, stride = window.K, window.stride
    view = sliding_window_view(x, (K, K), axis=(1, 2))[:, ::stride, ::stride]           # (N, Ho, Wo, B, E, K, K)
    return np.ascontiguousarray(view.transpose(5, 6, 3, 0, 1, 2, 4)).reshape(K * K * window.B, -1, x.shape[-1])


def col2im_capsules(dcols, window):
    """Return dx, (N, H, W, B, E), the adjoint of im2col_capsules: the sum over all copies of a child.

    dcols: gradient with respect to im2col_capsules' result, (K*K*B, N*Ho*Wo, E).
    """
    w, K, E = window, window.K, dcols.shape[-1]
    dx = np.zeros((w.B, w.N, w.H, w.W, E), dcols.dtype)
    dcols = dcols.reshape(K, K, w.B, w.N, *w.parents, E)
    for ky in range(K):
        for kx in range(K):
            target = w.select(dx, ky, kx, axis=2)
            target += dcols[ky, kx]
    return dx.transpose(1, 2, 3, 0, 4)


def pose_blocks(W):
    """Return transformation matrices W, (G, J, P, P), as block-diagonal matrices, (G, D, J*D).

    A block repeats W_ij for each row of a pose, so that the votes V_ij = M_i W_ij of all rows and all parents j are
    one matrix product.
    """
    G, J = W.shape[:2]
    blocks = np.zeros((G, P, P, J, P, P), W.dtype)                                      # (G, row, q, J, row, column)
    for row in range(P):
        blocks[:, row, :, :, row] = W.transpose(0, 2, 1, 3)
    return blocks.reshape(G, D, J * D)


def pose_votes_forward(M, W, empty=np.empty):
    """Compute the votes V_ij = M_i W_ij of pose matrices (Hinton et al. 2018).

    M: poses, (G, L, D), each with its P rows concatenated, of L positions that share matrices; W: transformation
    matrices, (G, J, P, P). Return V, (G, L, J, D), and a cache. The votes are computed as (L, D) @ (D, J*D) with the
    block-diagonal matrices of pose_blocks: four times as many multiplications as many 4x4 products, but faster as a few
    large matrix products.
    """
    (G, L, _), J = M.shape, W.shape[1]
    blocks, V = pose_blocks(W), empty((G, L, J, D), M.dtype)
    np.matmul(M, blocks, out=V.reshape(G, L, J * D))
    return V, (M, blocks, empty)


def pose_votes_backward(dV, cache):
    """Return the gradients dM, (G, L, D), and dW, (G, J, P, P), from dV, (G, L, J, D)."""
    M, blocks, empty = cache
    G, L, J, _ = dV.shape
    dV = dV.reshape(G, L, J * D)
    dM = np.matmul(dV, blocks.transpose(0, 2, 1))
    dblocks = np.matmul(M.transpose(0, 2, 1), dV, out=empty(blocks.shape, M.dtype)).reshape(G, P, P, J, P, P)
    dW = sum(dblocks[:, row, :, :, row] for row in range(P)).transpose(0, 2, 1, 3)      # (G, J, q, column)
    return dM, dW


def combine_over_positions(x, window, combine):
    """Combine the values of each child over all receptive fields that contain it.

    x: (L, I), one value per parent position and child; combine: np.add or np.maximum. Return an array (L, I) in which
    all entries of the same child hold its combined value. window: the layer's Window, or None for class capsules,
    which have one position: x is returned.
    """
    if window is None:
        return x
    w, K = window, window.K
    x = x.reshape(w.N, *w.parents, K, K, w.B)
    children = np.full((w.N, w.H, w.W, w.B), 0 if combine is np.add else -np.inf, x.dtype)
    targets = [(ky, kx, w.select(children, ky, kx, axis=1)) for ky in range(K) for kx in range(K)]
    for ky, kx, target in targets:
        combine(target, x[:, :, :, ky, kx], out=target)
    out = np.empty_like(x)
    for ky, kx, target in targets:
        out[:, :, :, ky, kx] = target
    return out.reshape(-1, K * K * w.B)


def responsibilities_forward(logits, window):
    """Compute the assignment probabilities R_ij (Procedure 1, last line of the E-step).

        R_ij = a_j p_j(V_ij) / sum_k a_k p_k(V_ik) = exp(logits_ij) / sum_k exp(logits_ik)

    The sum runs over all parents k of child i: all parent types at all positions whose receptive fields contain i, as
    in the paper. logits: log(a_j p_j(V_ij)) from e_step_forward, (L, J, I); window: see combine_over_positions.
    Return R, (L, J, I), and a cache. The maximum over the parents is subtracted before the exponential, to prevent
    overflow.
    """
    R = logits - combine_over_positions(logits.max(1), window, np.maximum)[:, None]
    np.exp(R, out=R)
    R /= combine_over_positions(R.sum(1), window, np.add)[:, None]
    return R, (R, window)


def responsibilities_backward(dR, cache):
    """Return dlogits, (L, J, I), from dR, (L, J, I)."""
    R, window = cache
    dlogits = R * dR
    dlogits -= R * combine_over_positions(dlogits.sum(1), window, np.add)[:, None]
    return dlogits


def group_by_parent(V, n):
    """Return votes V, (L, J, I, D), as a view of n matrices with I rows, for batched products.

    n = L*J: one matrix (I, D) per parent; n = L: one matrix (I, J*D) per parent position, with all parent types.
    """
    L, J, I, _ = V.shape
    return V.reshape(n, I, -1) if n == L * J else V.transpose(0, 2, 1, 3).reshape(L, I, -1)


def empty_like_votes(V, empty):
    """Return an uninitialized array of V's shape (L, J, I, D) in V's memory order, (I, L, J, D)."""
    L, J, I, _ = V.shape
    return empty((I, L, J, D), V.dtype).transpose(1, 2, 0, 3)


def m_step_forward(V, V2, r, beta_u, beta_a, lambda_, ratio):
    """Compute the parents' Gaussians and activations: the M-step of EM routing (Hinton et al. 2018, Procedure 1).

        mu_jh     = sum_i r_ij V_ijh / sum_i r_ij
        sigma2_jh = sum_i r_ij (V_ijh - mu_jh)^2 / sum_i r_ij + SIGMA2_EPS
        mass_j    = ratio * sum_i r_ij
        cost_j    = sum_h (beta_u_j + log sigma_jh) mass_j
        a_j       = logistic(x_j), x_j = beta_a_j - lambda cost_j

    r_ij = R_ij a_i is the assignment probability times the child's activation (the first line of the paper's M-step);
    h runs over the D pose elements.

    Differences from the paper: (1) In the paper the mass is sum_i r_ij. Here it is multiplied by ratio = parents /
    children (Gritzman 2019), so that the cost does not grow with the size of the layer. (2) The variance has a floor,
    SIGMA2_EPS, and sum_i r_ij has MASS_EPS added, so that it can be divided by. (3) The paper has
    a_j = logistic(lambda (beta_a - cost_j)). For constant lambda this is the same function with beta_a scaled by
    lambda; unscaled, Adam's steps, which are about lr in size, would hardly change it after multiplication by a small
    lambda. (4) The variance is computed as the weighted mean of V^2 minus mu^2, clamped at 0. (5) Every parent type has
    a beta_a of its own; in the paper all capsules share one.

    V, V2: votes and their squares, (L, J, I, D). r: (L, J, I), or (L, 1, I) if it is the same for all parent types,
    as in the first iteration; then one matrix-vector product per position replaces J products. beta_u, beta_a: (J,).
    lambda_: inverse temperature. Return (mu, sigma2, x), of shapes (L, J, D), (L, J, D) and (L, J), and a cache.
    """
    L, J, I, _ = V.shape
    n = r.shape[0] * r.shape[1]
    rows = r.reshape(n, 1, I)
    total = r.sum(-1, keepdims=True) + MASS_EPS                                         # (L, J or 1, 1)
    mu = np.matmul(rows, group_by_parent(V, n)).reshape(L, J, D) / total
    mean_V2 = np.matmul(rows, group_by_parent(V2, n)).reshape(L, J, D) / total
    variance = mean_V2 - mu * mu
    sigma2 = np.maximum(variance, 0) + SIGMA2_EPS
    unit_cost = D * beta_u + 0.5 * np.log(sigma2).sum(-1)                               # (L, J)
    mass = ratio * total[..., 0]
    x = beta_a - lambda_ * (unit_cost * mass)
    cache = SimpleNamespace(V=V, V2=V2, r=r, total=total, mu=mu, mean_V2=mean_V2, variance=variance, sigma2=sigma2,
                            unit_cost=unit_cost, mass=mass, lambda_=lambda_, ratio=ratio)
    return (mu, sigma2, x), cache


def m_step_backward(dmu, dsigma2, dx, cache):
    """Return a term of dV and the gradients dr, with r's shape, dbeta_u and dbeta_a, (J,).

    dmu, dsigma2: (L, J, D); dx: (L, J). The term is a tuple for votes_gradient, (r, dsum_V, dsum_V2), which stands
    for dV_ij = r_ij (dsum_V_j + 2 V_ij dsum_V2_j). dsum_V and dsum_V2, (L, J, D), are the gradients with respect to the
    sums sum_i r_ij V_ij and sum_i r_ij V_ij^2.
    """
    c, total, mu = cache, cache.total, cache.mu
    L, J, I, _ = c.V.shape
    n = total.size
    dcost = -c.lambda_ * dx                                                     # cost = unit_cost * mass; (L, J)
    dunit_cost = dcost * c.mass
    dmean_V2 = (dsigma2 + 0.5 * dunit_cost[..., None] / c.sigma2) * (c.variance > 0)    # sigma2: variance clamped at 0
    dsum_V, dsum_V2 = (dmu - 2 * mu * dmean_V2) / total, dmean_V2 / total               # variance = mean_V2 - mu^2
    # total divides both sums, and mass = ratio * total; it is a sum over i, so that dtotal goes to every dr_ij
    dtotal = c.ratio * dcost * c.unit_cost - (dsum_V * mu + dsum_V2 * c.mean_V2).sum(-1)
    dr = np.matmul(group_by_parent(c.V, n), dsum_V.reshape(n, -1, 1))
    dr += np.matmul(group_by_parent(c.V2, n), dsum_V2.reshape(n, -1, 1))
    dr = dr.reshape(L, -1, I)                                                           # (L, J, I), or (L, 1, I)
    dr += dtotal.reshape(*dr.shape[:2], -1).sum(-1, keepdims=True)
    return (c.r, dsum_V, dsum_V2), dr, D * dunit_cost.sum(0), dx.sum(0)


def e_step_forward(V, V2, mu, sigma2, x):
    """Compute the logits of the E-step of EM routing (Hinton et al. 2018, Procedure 1), in log space.

        logits_ij = log(a_j p_j(V_ij)) = log a_j + sum_h (-(V_ijh - mu_jh)^2 / (2 sigma2_jh) - log(sigma2_jh) / 2)

    p_j is the density of the parent's Gaussian. The paper's factor 1 / sqrt(2 pi) is left out, because it cancels
    when responsibilities_forward normalizes the logits to R_ij. Expanding the square gives linear_j . V_ij +
    quadratic_j . V_ij^2 + offset_j, which are two matrix-vector products per parent.

    V, V2: votes and their squares, (L, J, I, D); mu, sigma2: (L, J, D); x: logits of the activations a_j, (L, J).
    Return the logits, (L, J, I), and a cache.
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
    """Return a term of dV and the gradients dmu, dsigma2, (L, J, D), and dx, (L, J).

    dlogits: (L, J, I). The term is a tuple for votes_gradient, (dlogits, linear, quadratic), which stands for
    dV_ij = dlogits_ij (linear_j + 2 V_ij quadratic_j).
    """
    c, precision = cache, cache.precision
    L, J, I, _ = c.V.shape
    rows = dlogits.reshape(L * J, 1, I)
    doffset = dlogits.sum(-1)                                                           # (L, J)
    dlinear = np.matmul(rows, group_by_parent(c.V, L * J)).reshape(L, J, D)
    dquadratic = np.matmul(rows, group_by_parent(c.V2, L * J)).reshape(L, J, D)
    along = doffset[..., None] * c.mu      # offset has -mu linear / 2: -along / 2 is its share of dlinear, (L, J, D)
    dmu = (dlinear - along) * precision
    dprecision = dlinear * c.mu - 0.5 * (dquadratic + along * c.mu)
    dsigma2 = -precision * (dprecision * precision + 0.5 * doffset[..., None])
    return (dlogits, c.linear, c.quadratic), dmu, dsigma2, doffset * sigmoid_forward(-c.x)[0]


LAMBDA = 1 / 16                    # inverse temperature lambda of the activations, the same in all iterations


def em_routing_forward(V, a, beta_u, beta_a, n_iters, lambda_=LAMBDA, window=None, empty=np.empty):
    """Compute the parent capsules by EM routing (Hinton et al. 2018, Procedure 1).

    The assignment probabilities R_ij start uniform over the parents whose receptive fields contain child i, of all
    types and positions. Each of the n_iters iterations is an M-step with r_ij = R_ij a_i. Between two M-steps, an
    E-step computes new R_ij. With n_iters = 1 there is no E-step, and R_ij stays uniform.

    Differences from the paper: lambda_ is the same in all iterations, while the paper increases it by a schedule; R_ij
    starts at one over the number of child i's parents, in the paper at one over the size of the parents' layer; the
    default of --routing-iters is 2, the paper's is 3; see also m_step_forward. As in the paper, children compete over
    all parents at all positions.

    V: votes, (L, J, I, D); a: activations of the children, (L, I); beta_u, beta_a: (J,); window: the receptive fields
    of convolutional capsules, or None for class capsules, where every parent receives votes from all children.

    Return (mu, x), the parents' poses, (L, J, D), and the logits of their activations, (L, J), with
    a_j = logistic(x_j); and a cache, whose `steps` hold R, (L, J, I) or at first (L, 1, I), mu, sigma2 and x of every
    iteration.
    """
    L, J, I, _ = V.shape
    V2 = np.multiply(V, V, out=empty_like_votes(V, empty))
    ratio = J / I if window is None else math.prod(window.parents) * J / (window.H * window.W * window.B)
    R = (1 / (J * combine_over_positions(np.ones((L, I), V.dtype), window, np.add)))[:, None]      # (L, 1, I)
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
    """Return the gradients dV, (L, J, I, D), da, (L, I), dbeta_u and dbeta_a, (J,).

    dmu: (L, J, D); dx: (L, J). They are propagated through all iterations, without a stop-gradient, as in the paper.
    """
    dsigma2, terms, da = 0, [], 0
    dbeta_u = dbeta_a = 0
    for t, step in reversed(list(enumerate(cache.steps))):
        term, dr, dbeta_u_t, dbeta_a_t = m_step_backward(dmu, dsigma2, dx, step.m_cache)
        terms.append(term)
        da = da + np.einsum("lji,lji->li", dr, step.R)
        dbeta_u, dbeta_a = dbeta_u + dbeta_u_t, dbeta_a + dbeta_a_t
        if t == 0:                                                                      # R is uniform, a constant
            break
        dr *= cache.a[:, None]
        dlogits = responsibilities_backward(dr, step.R_cache)
        term, dmu, dsigma2, dx = e_step_backward(dlogits, step.e_cache)
        terms.append(term)
    return votes_gradient(terms, cache.V, cache.V2, cache.empty), da, dbeta_u, dbeta_a


def votes_gradient(terms, V, V2, empty):
    """Return dV, (L, J, I, D), as the sum of the terms of all M-steps and E-steps.

    A term is (coefficient, linear, quadratic), of shapes (L, J or 1, I), (L, J, D) and (L, J, D), and stands for
    dV_ij = coefficient_ij (linear_j + 2 V_ij quadratic_j). All T terms together take two products (I, T) @ (T, D) per
    parent.
    """
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
    dV, linear_term = reuse_if_arena(V2, empty), empty_like_votes(V, empty)
    np.matmul(coefficients, directions[1], out=group_by_parent(dV, L * J))
    dV *= V
    np.matmul(coefficients, directions[0], out=group_by_parent(linear_term, L * J))
    dV += linear_term
    return dV


def conv_caps_forward(pose, activation, W, beta_u, beta_a, n_iters, stride, empty=np.empty):
    """Compute convolutional capsules: 3x3 receptive fields at a stride, votes, EM routing.

    pose: (N, H, W, B, D); activation: (N, H, W, B); W: transformation matrices, (9*B, J, P, P), shared across
    positions; beta_u, beta_a: (J,). Return (mu, a), of shapes (N, Ho, Wo, J, D) and (N, Ho, Wo, J), and a cache.
    """
    J, window = W.shape[1], Window(*pose.shape[:4], stride)
    child_a = im2col_capsules(activation[..., None], window)[..., 0].T.copy()           # (N*Ho*Wo, 9*B)
    V, votes_cache = pose_votes_forward(im2col_capsules(pose, window), W, empty)        # (9*B, N*Ho*Wo, J, D)
    (mu, x), em_cache = em_routing_forward(V.transpose(1, 2, 0, 3), child_a, beta_u, beta_a, n_iters, window=window,
                                           empty=empty)
    a, a_cache = sigmoid_forward(x)
    shape = len(pose), *window.parents, J
    return (mu.reshape(*shape, D), a.reshape(shape)), SimpleNamespace(window=window, votes=votes_cache, em=em_cache,
                                                                     a=a_cache)


def conv_caps_backward(dmu, da, cache):
    """Return the gradients dpose, dactivation, dW, dbeta_u and dbeta_a, with the inputs' shapes.

    dmu: (N, Ho, Wo, J, D); da: (N, Ho, Wo, J).
    """
    dx = sigmoid_backward(da.reshape(-1, da.shape[-1]), cache.a)
    dV, dchild_a, dbeta_u, dbeta_a = em_routing_backward(dmu.reshape(*dx.shape, D), dx, cache.em)
    dM, dW = pose_votes_backward(dV.transpose(2, 0, 1, 3), cache.votes)
    dpose, dactivation = (col2im_capsules(dcols, cache.window) for dcols in (dM, dchild_a.T[..., None]))
    return dpose, dactivation[..., 0], dW, dbeta_u, dbeta_a


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


def spread_loss(a, labels, margin):
    """Compute the spread loss (Hinton et al. 2018, Eq. 3), averaged over the batch.

        L = sum_{i != t} max(0, m - (a_t - a_i))^2

    a: activations, (N, J); labels: target classes t, (N,) int; margin: m, a float or (N,). The paper increases m from
    0.2 to 0.9 during training. At equal activations the loss is (J-1) m^2. Return the loss, a float, and da, (N, J).
    """
    rows = np.arange(len(labels))
    violation = np.maximum(np.reshape(margin, (-1, 1)) - (a[rows, labels][:, None] - a), 0).astype(a.dtype, copy=False)
    violation[rows, labels] = 0
    da = violation * (2 / len(labels))
    da[rows, labels] = -da.sum(1)
    return float(np.vdot(violation, violation)) / len(labels), da


def log_sigmoid_forward(x):
    """Return log(logistic(x)) and a cache, computed without overflow."""
    return -np.logaddexp(0, -x), x


def log_sigmoid_backward(dy, x):
    """Return dx, with x's shape."""
    return dy * sigmoid_forward(-x)[0]


def classification_loss(scores, batch, config):
    """Compute the loss named by config.loss from the scores of forward, averaged over the batch.

    scores: (N, J). Those of matrix capsules and CNNs are logits, with activations a = logistic(scores); those of
    vector capsules are their lengths, which are the activations. Cross-entropy takes log a of capsules, but a CNN's
    scores as usual. batch: dict with labels, (N,), and margin. Return the loss, a float, and dscores, (N, J).
    """
    vectors, labels = config.model in VECTOR_MODELS, batch["labels"]
    if config.loss == "cross-entropy":
        if config.model not in CAPSULES:
            return cross_entropy(scores, labels)
        loss, dlogs = cross_entropy(np.log(scores) if vectors else log_sigmoid_forward(scores)[0], labels)
        return loss, dlogs / scores if vectors else log_sigmoid_backward(dlogs, scores)
    a, cache = (scores, None) if vectors else sigmoid_forward(scores)
    if config.loss == "spread":
        loss, da = spread_loss(a, labels, batch["margin"])
    else:
        loss, da = margin_loss(a, np.eye(N_CLASSES, dtype=a.dtype)[labels])
    return loss, da if vectors else sigmoid_backward(da, cache)


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


def coordinate_channels_forward(x, coordinates):
    """Append the x and y coordinates of every position to x as two channels.

    x: (N, H, H, C); coordinates: H numbers, the same for rows and columns. Return (N, H, H, C + 2) and an empty
    cache.
    """
    N, H, *_ = x.shape
    coordinates = np.array(coordinates, x.dtype)
    across, down = np.broadcast_to(coordinates, (N, H, H)), np.broadcast_to(coordinates[:, None], (N, H, H))
    return np.concatenate([x, np.stack([across, down], -1)], -1), ()


def coordinate_channels_backward(dy, cache):
    """Return dx, (N, H, H, C), from dy, (N, H, H, C + 2)."""
    return dy[..., :-2]


# -------------------------------------------------------------- the networks

MATRIX_MODELS, VECTOR_MODELS = ("matrix-capsnet", "matrix-head"), ("capsnet", "capsnet-shared")
PAPER_CNNS = "cnn", "cnn-bn"
CAPSULES, CNNS = MATRIX_MODELS + VECTOR_MODELS, (*PAPER_CNNS, "cnn-gap")
MODELS = (*CAPSULES, *CNNS, "nearest")
SIZES = {                          # A, B, C, D of matrix-capsnet; first channels of the backbone, capsule types
    "small": (32, 4, 8, 8, 16, 5), "wide": (64, 4, 4, 4, 32, 10), "paper": (64, 8, 16, 16, 16, 5)}
CONV_CAPS = ("conv", 2), ("conv2", 1)   # matrix-capsnet's two layers of convolutional capsules: name, stride
IDENTITY_NOISE = 0.1               # standard deviation of initial transformation matrices around the identity
BETA_U, BETA_A = -1.0, -2.0        # initial: a parent without active children has a = logistic(-2) = 0.12
VOTES_GAIN = 4.0                   # initial variance of W times its fan-in, for vector capsules
VECTOR, CLASS_VECTOR = 8, 16       # elements of a primary and of a class capsule that are vectors
CNN_HIDDEN = 32                    # hidden units of cnn and cnn-bn, but with --preset paper and no --width


def backbone(config, width=0):
    """Return the layers of config.model up to and including its primary capsules, or all layers of a CNN.

    width: overrides the model's own width (types of capsules, or channels).
    """
    A, B, _, _, t, _ = SIZES[config.preset]
    paper_size = config.model in PAPER_CNNS and config.preset == "paper" and not config.width   # 4.2 million parameters
    width = width or (32 if paper_size else matched_width(config))

    def conv(name, K, stride, F):
        return ("conv2d", name, K, stride, F), ("norm", name + "_norm"), ("relu",)

    def capsules(K, F):
        """Return the layers of the primary capsules, without ReLU: the head applies a squash or a logistic."""
        return conv("primary", K, 1, F)[:2]
    if config.model == "matrix-capsnet":
        return conv("conv1", 5, 2, A) + capsules(1, B * (D + 1))
    if config.model in PAPER_CNNS:
        pad, hidden = ((("pad", 2),), 1024) if paper_size else ((), CNN_HIDDEN)
        layers = (*pad, ("conv2d", "conv1", 5, 1, width), ("relu",), ("max_pool",),
                  *pad, ("conv2d", "conv2", 5, 1, 2 * width), ("relu",), ("max_pool",),
                  ("flatten",), ("linear", "fc1", hidden), ("relu",), ("dropout",), ("linear", "fc2", N_CLASSES))
        return layers if config.model == "cnn" else with_norms(layers)
    layers = (*conv("conv1", 3, 1, t), *conv("conv2", 3, 1, t), ("max_pool",),
              *conv("conv3", 3, 1, 2 * t), *conv("conv4", 3, 1, 2 * t), ("max_pool",))
    if config.model == "cnn-gap":
        positions = infer_shapes(layers, SIDE, N_CHANNELS[config.data]).along
        coordinates = (("coordinates", tuple(positions)),) if config.coordinates else ()
        return (*layers, *coordinates, *conv("conv5", 3, 1, width), ("global_avg_pool",), ("linear", "fc1", N_CLASSES))
    return layers + capsules(3, width * (D + 1 if config.model in MATRIX_MODELS else VECTOR))


def class_capsule_inputs(config, width=0):
    """Return the grid of capsules from which the class capsules receive votes.

    The result has the fields side (positions per axis), types (capsule types per position) and centers,
    (positions, 2): x and y of the centers of the receptive fields, from -1 to 1 across the image. The receptive
    fields of matrix-capsnet's convolutional capsules are those of convolutions with the same kernels and strides.
    """
    layers = backbone(config, width)
    if config.model == "matrix-capsnet":
        types = SIZES[config.preset][2:]
        layers += tuple(("conv2d", name, 3, stride, F) for (name, stride), F in zip(CONV_CAPS, types))
    grid = infer_shapes(layers, SIDE, N_CHANNELS[config.data])
    capsule_size = 1 if config.model == "matrix-capsnet" else D + 1 if config.model in MATRIX_MODELS else VECTOR
    centers = receptive_field_centers(grid.along)
    return SimpleNamespace(side=grid.side, types=grid.channels // capsule_size, centers=centers)


def param_shapes(config, width=0):
    """Return the names and shapes of config.model's parameters, in the order of their initialization.

    width: overrides the model's own width.
    """
    shapes, J = infer_shapes(backbone(config, width), SIDE, N_CHANNELS[config.data]).shapes, N_CLASSES
    if config.model not in CAPSULES:
        return shapes
    inputs = class_capsule_inputs(config, width)
    if config.model == "matrix-capsnet":
        _, *types = SIZES[config.preset]
        for (name, _), B, F in zip(CONV_CAPS, types, types[1:]):
            shapes |= {name + "_W": (9 * B, F, P, P), name + "_beta_u": (F,), name + "_beta_a": (F,)}
    if config.model in MATRIX_MODELS:
        return shapes | {"class_W": (inputs.types, J, P, P), "class_beta_u": (J,), "class_beta_a": (J,)}
    groups = inputs.types * (len(inputs.centers) if config.model == "capsnet" else 1)
    shapes["W"] = (groups, VECTOR, J, CLASS_VECTOR)
    return shapes | ({"coordinate_W": (2, J, CLASS_VECTOR)} if config.model != "capsnet" and config.coordinates else {})


@functools.cache
def matched_width(config):
    """Return --width or, if it is 0, the width that gives config.model the reference network's parameter count.

    The reference network is matrix-capsnet for cnn and cnn-bn, and capsnet-shared for all other models. Of the two
    neighboring widths, the one whose number of parameters is nearer is used.
    """
    if config.model == "capsnet-shared":
        return SIZES[config.preset][-1]
    if config.width or config.model in ("matrix-capsnet", "nearest"):
        return config.width

    def size(config, width=0):
        return sum(math.prod(shape) for shape in param_shapes(config, width).values())
    reference = "matrix-capsnet" if config.model in PAPER_CNNS else "capsnet-shared"
    target = size(dataclasses.replace(config, model=reference, coordinates=True))
    upper = 1 + bisect.bisect_left(range(1, 4096), target, key=lambda width: size(config, width))
    return min((max(1, upper - 1), upper), key=lambda width: abs(size(config, width) - target))


def init_params(config):
    """Return the initial parameters, a flat dict of float32 arrays.

    Weights are He-normal where a ReLU follows and have variance 1 / fan-in elsewhere; W and coordinate_W of vector
    capsules, VOTES_GAIN / (elements of all children). Transformation matrices of poses are the identity plus noise.
    beta_u and beta_a start at BETA_U and BETA_A, other biases at 0.
    """
    rng, params, shapes = rng_for(config.seed, "init"), {}, param_shapes(config)
    last = [name for name in shapes if name.endswith("_w")][-1]                     # in a CNN: the layer of the scores
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape, np.float32)
        if name in ("W", "coordinate_W"):
            inputs = class_capsule_inputs(config)
            children = len(inputs.centers) * inputs.types
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


def forward(params, images, config, empty=np.empty, statistics=None, dropout_mask=None):
    """Run config.model on images, (N, 32, 32, C), and return its outputs, a dict, and a cache.

    The outputs are scores, (N, J), see classification_loss; for capsules, also those of matrix_forward or
    vector_forward. statistics: a dict in training, which receives the batch statistics; None in evaluation; see
    layers_forward. dropout_mask: (N, hidden units), of cnn and cnn-bn in training; None for no dropout.
    """
    masks = () if dropout_mask is None else (dropout_mask,)
    return NETWORKS[config.model][0](params, images, config, empty, statistics, *masks)


def cnn_forward(params, images, config, empty, statistics, dropout_mask=None):
    """Compute the scores of a CNN, {"scores": (N, J)}, and a cache."""
    layers = [(*layer, dropout_mask) if layer == ("dropout",) else layer for layer in backbone(config)]
    scores, caches = layers_forward(params, images, layers, empty, statistics)
    return {"scores": scores}, caches


def cnn_backward(dscores, caches, config):
    """Return the gradients of all parameters, a dict, from dscores, (N, J)."""
    grads = {}
    layers_backward(dscores, caches, backbone(config), grads, need_dx=False)
    return grads


def matrix_forward(params, images, config, empty, statistics):
    """Compute the outputs of matrix-capsnet or matrix-head, and a cache.

    The layers are the backbone (matrix-capsnet: one convolution), the primary capsules, two layers of convolutional
    capsules (matrix-capsnet only) and the class capsules. The outputs are those of class_caps_forward, primary_pose,
    (N, H, W, B, D), primary_a, (N, H, W, B), and, for matrix-capsnet, the poses and activations of the convolutional
    capsules: conv_mu, conv_a, conv2_mu, conv2_a.
    """
    p, N, n_iters = params, len(images), config.routing_iters
    x, layer_caches = layers_forward(p, images, backbone(config), empty, statistics)
    (pose, activation), primary_cache = primary_caps_forward(x)
    layer_outputs, conv_caches = {"primary_pose": pose, "primary_a": activation}, []
    for name, stride in CONV_CAPS if config.model == "matrix-capsnet" else ():
        (pose, activation), cache = conv_caps_forward(
            pose, activation, p[name + "_W"], p[name + "_beta_u"], p[name + "_beta_a"], n_iters, stride, empty)
        layer_outputs |= {name + "_mu": pose, name + "_a": activation}
        conv_caches.append((name, cache))
    centers = class_capsule_inputs(config).centers
    B, n_positions = activation.shape[-1], len(centers)
    M = pose.reshape(N, n_positions, B, D).transpose(2, 1, 0, 3).reshape(B, n_positions * N, D)     # one group per type
    child_a = activation.reshape(N, n_positions, B).transpose(0, 2, 1).reshape(N, B * n_positions)
    out, class_cache = class_caps_forward(p, M, child_a, centers if config.coordinates else None, n_iters, empty)
    return out | layer_outputs, SimpleNamespace(layers=layer_caches, primary=primary_cache, convs=conv_caches,
                                        classes=class_cache, a_shape=activation.shape)


def matrix_backward(dscores, cache, config):
    """Return the gradients of all parameters, a dict, from dscores, (N, J)."""
    grads, (N, _, _, B) = {}, cache.a_shape
    dM, dchild_a = class_caps_backward(dscores, cache.classes, grads)
    dpose = dM.reshape(B, -1, N, D).transpose(2, 1, 0, 3).reshape(*cache.a_shape, D)
    dactivation = dchild_a.reshape(N, B, -1).transpose(0, 2, 1).reshape(cache.a_shape)
    for name, conv_cache in reversed(cache.convs):
        dpose, dactivation, grads[name + "_W"], grads[name + "_beta_u"], grads[name + "_beta_a"] = conv_caps_backward(
            dpose, dactivation, conv_cache)
    dx = primary_caps_backward(dpose, dactivation, cache.primary)
    layers_backward(dx, cache.layers, backbone(config), grads, need_dx=False)
    return grads


def vector_forward(params, images, config, empty, statistics):
    """Compute the outputs of capsnet or capsnet-shared (Sabour et al. 2017), and a cache.

    The layers are the backbone, primary vector capsules, and class capsules by dynamic routing. capsnet has one
    transformation matrix per position; capsnet-shared shares its matrices across positions and uses coordinate
    addition. The outputs are scores, the lengths of the class capsules, (N, J); v, the class capsules, (N, J, 16); u,
    the primary capsules, (N, I, 8), with I ordered (position, type); and c, the coupling coefficients of each
    iteration, (N, J, I), in the first iteration (1, I).
    """
    p, N, W = params, len(images), params["W"]
    x, layer_caches = layers_forward(p, images, backbone(config), empty, statistics)
    u, squash_cache = squash_forward(x.reshape(N, -1, VECTOR))                          # (N, I, E)
    capsules, coordinates_cache = u, None
    if config.model != "capsnet" and config.coordinates:
        capsules, coordinates_cache = add_coordinates_forward(u, class_capsule_inputs(config).centers)
        W = np.concatenate([W, np.broadcast_to(p["coordinate_W"], (len(W), *p["coordinate_W"].shape))], 1)
    if config.model == "capsnet":
        u_hat, votes_cache = votes_forward(u, W, empty)                                 # (N, J, I, D)
    else:
        u_hat, votes_cache = shared_votes_forward(capsules, W, x.shape[1] * x.shape[2], empty)
    v, routing_cache = routing_forward(u_hat, config.routing_iters, empty)
    lengths, lengths_cache = lengths_forward(v)
    return {"scores": lengths, "v": v, "u": u, "c": [step.c for step in routing_cache.steps]}, SimpleNamespace(
        layers=layer_caches, squash=squash_cache, coordinates=coordinates_cache, votes=votes_cache,
        routing=routing_cache, lengths=lengths_cache, x_shape=x.shape)


def vector_backward(dlengths, cache, config):
    """Return the gradients of all parameters, a dict, from dlengths, (N, J)."""
    grads, dv = {}, lengths_backward(dlengths, cache.lengths)
    du_hat = routing_backward(dv, cache.routing)
    if config.model == "capsnet":
        du, grads["W"] = votes_backward(du_hat, cache.votes)
    else:
        du, dW = shared_votes_backward(du_hat, cache.votes)
        grads["W"] = dW[:, :VECTOR]
        if cache.coordinates:
            grads["coordinate_W"] = dW[:, VECTOR:].sum(0)
            du = add_coordinates_backward(du, cache.coordinates)
    dx = squash_backward(du, cache.squash).reshape(cache.x_shape)
    layers_backward(dx, cache.layers, backbone(config), grads, need_dx=False)
    return grads


def primary_caps_forward(x):
    """Split the channels of x into poses and activations, with a logistic on the activations.

    x: (N, H, W, B*(D+1)). Return (pose, activation), (N, H, W, B, D) and (N, H, W, B), and a cache.
    """
    N, H, W, F = x.shape
    B = F // (D + 1)
    activation, activation_cache = sigmoid_forward(x[..., B * D:])
    return (x[..., :B * D].reshape(N, H, W, B, D), activation), activation_cache


def primary_caps_backward(dpose, dactivation, activation_cache):
    """Return dx, (N, H, W, B*(D+1)), from dpose, (N, H, W, B, D), and dactivation, (N, H, W, B)."""
    N, H, W, B = dactivation.shape
    return np.concatenate([dpose.reshape(N, H, W, B * D), sigmoid_backward(dactivation, activation_cache)], -1)


def class_caps_forward(params, M, a, centers, n_iters, empty):
    """Compute the class capsules by EM routing, with transformation matrices shared across positions.

    M: poses of the children, (G, positions*N, D), in G groups (capsule types) that share a matrix; a: their
    activations, (N, G*positions). centers: x and y of the receptive fields' centers, (positions, 2); coordinate
    addition adds them to the first two elements of the right-hand column of each vote. None: no coordinate addition.

    Return a dict of outputs and a cache: mu, (N, J, D); a, (N, J); scores, (N, J), with a = logistic(scores);
    class_steps, which holds R, (N, J, I) or at first (N, 1, I), mu and sigma2, (N, J, D), of each EM iteration, with
    I ordered (group, position).
    """
    p, N = params, len(a)
    V, votes_cache = pose_votes_forward(M, p["class_W"], empty)                         # (G, positions*N, J, D)
    if centers is not None:
        by_position = V.reshape(len(V), len(centers), N, N_CLASSES, P, P)
        by_position[..., :2, P - 1] += centers.astype(V.dtype)[:, None, None]           # x, y: last column's top two
    V = V.reshape(-1, N, N_CLASSES, D).transpose(1, 2, 0, 3)                            # (N, J, I, D)
    (mu, x), em_cache = em_routing_forward(V, a, p["class_beta_u"], p["class_beta_a"], n_iters, empty=empty)
    steps = [SimpleNamespace(R=step.R, mu=step.mu, sigma2=step.sigma2) for step in em_cache.steps]
    cache = SimpleNamespace(votes=votes_cache, em=em_cache, M_shape=M.shape)
    return {"mu": mu, "a": sigmoid_forward(x)[0], "scores": x, "class_steps": steps}, cache


def class_caps_backward(dscores, cache, grads):
    """Return dM, (G, positions*N, D), and da, (N, G*positions), from dscores, (N, J).

    The gradients of class_W, class_beta_u and class_beta_a are stored in grads.
    """
    dmu = np.zeros((*dscores.shape, D), dscores.dtype)                                  # the loss depends on x only
    dV, da, grads["class_beta_u"], grads["class_beta_a"] = em_routing_backward(dmu, dscores, cache.em)
    dV = dV.transpose(2, 0, 1, 3).reshape(*cache.M_shape[:2], N_CLASSES, D)
    dM, grads["class_W"] = pose_votes_backward(dV, cache.votes)
    return dM, da


def nearest_params(data, config, dtype=np.float32):
    """Return the training images as network inputs, (n, pixels), and their labels, (n,), for `nearest`."""
    chunks = list(preprocess(data["train"], config.data, dtype))
    images = np.concatenate([chunk["images"].reshape(len(chunk["images"]), -1) for chunk in chunks])
    return {"images": images.astype(dtype, copy=False), "labels": data["train"]["labels"]}


def nearest_forward(params, images, config, empty, statistics):
    """Compute the scores of `nearest`, {"scores": (N, J)}.

    A score is minus the squared Euclidean distance, in pixel space, to the nearest training image of the class.
    """
    x, train_images = images.reshape(len(images), -1), params["images"]
    distance = np.vecdot(x, x)[:, None] - 2 * (x @ train_images.T) + np.vecdot(train_images, train_images)   # (N, n)
    scores = [-distance[:, params["labels"] == j].min(1, initial=np.inf) for j in range(N_CLASSES)]
    return {"scores": np.stack(scores, 1)}, None


NETWORKS = {**dict.fromkeys(MATRIX_MODELS, (matrix_forward, matrix_backward)),
            **dict.fromkeys(VECTOR_MODELS, (vector_forward, vector_backward)),
            **dict.fromkeys(CNNS, (cnn_forward, cnn_backward)), "nearest": (nearest_forward, None)}


def loss_and_grads(params, batch, config, empty=np.empty, batch_fraction=1.0):
    """Compute the loss of one batch and its gradients; return (terms, grads, statistics).

    batch: to_batch's dict. batch_fraction: the shard's share of its batch, by which loss and gradients are
    multiplied. terms: loss, the mean over the samples times batch_fraction, and hits, the number of correctly
    classified images. statistics: the batch statistics of the normalizations. The function is pure; with an Arena as
    `empty`, the gradients are valid until its rewind().
    """
    statistics = {}
    out, cache = forward(params, batch["images"], config, empty, statistics, batch.get("dropout_mask"))
    loss, dscores = classification_loss(out["scores"], batch, config)
    grads = NETWORKS[config.model][1](dscores * batch_fraction, cache, config)
    hits = int((out["scores"].argmax(1) == batch["labels"]).sum())
    return {"loss": loss * batch_fraction, "hits": hits}, grads, statistics


def optimizer_step(run, shard_grads, lr_factor):
    """Update all weights of a Run by one step of Adam, at lr_factor times the learning rate."""
    adam_step(run.params, shard_grads, run.adam_m, run.adam_v, run.step + 1, run.config.lr * lr_factor, run.runner)


def forward_rows(params, samples, rows, config, empty):
    """Return the outputs of forward for the given rows of prepared samples.

    scores, (n, J); for matrix capsules also mu, (n, J, D), and a, (n, J); for vector capsules also v, (n, J, 16).
    """
    out, _ = forward(params, to_batch(samples, rows, params_dtype(params))["images"], config, empty)
    return {name: out[name] for name in ("scores", "mu", "a", "v") if name in out}


# ============================================================== evaluation and report

def evaluate(params, samples, config, runner):
    """Return the metrics of one test set, a dict.

    accuracy; loss, the mean, for the spread loss with its final margin; correct, (n,) bool; per_class, the accuracy
    of each class, nan for a class without images.
    """
    correct, loss = [], 0.0
    for chunk in preprocess(samples, config.data, params_dtype(params)):
        scores = runner.forward(params, chunk, config)["scores"]
        correct.append(scores.argmax(1) == chunk["labels"])
        loss += classification_loss(scores, chunk | {"margin": MARGINS[1]}, config)[0] * len(scores)
    correct = np.concatenate(correct)
    return {"accuracy": float(correct.mean()), "loss": loss / len(correct), "correct": correct,
            "per_class": accuracy_per_class(samples["labels"], correct)}


def accuracy_per_class(labels, correct):
    """Return the accuracy of each class, nan for a class without images; labels, correct: (n,)."""
    images, hits = (np.bincount(labels, weights, minlength=N_CLASSES) for weights in (None, correct))
    return [float(hit / n) if n else math.nan for hit, n in zip(hits, images)]


def evaluate_test_sets(params, data, config, runner):
    """Return the metrics on familiar and on novel viewpoints, a dict.

    familiar, novel: accuracies; drop: their difference; familiar_loss, novel_loss; familiar_per_class,
    novel_per_class; correct: {"familiar", "novel"}, (n,) bool each; sweep: a dict of angles (azimuths or elevations,
    degrees), accuracy and per_class at each angle, over both test sets. With --split instance the familiar images are
    training images, and the sweep is over the novel toys only.
    """
    familiar, novel = (evaluate(params, data[name], config, runner) for name in ("familiar", "novel"))
    angles, labels, correct = (np.concatenate(parts) for parts in zip(*(
        (data[name][viewpoint_angle(config)], data[name]["labels"], metrics["correct"])
        for name, metrics in (("familiar", familiar), ("novel", novel))
        if name == "novel" or config.split != "instance")))
    distinct = np.unique(angles)
    sweep = {"angles": [int(angle) if angle % 1 == 0 else float(angle) for angle in distinct],
             "accuracy": [float(correct[angles == angle].mean()) for angle in distinct],
             "per_class": [accuracy_per_class(labels[angles == angle], correct[angles == angle]) for angle in distinct]}
    return {"familiar": familiar["accuracy"], "novel": novel["accuracy"],
            "drop": familiar["accuracy"] - novel["accuracy"], "familiar_loss": familiar["loss"],
            "novel_loss": novel["loss"], "familiar_per_class": familiar["per_class"],
            "novel_per_class": novel["per_class"], "sweep": sweep,
            "correct": {"familiar": familiar["correct"], "novel": novel["correct"]}}


EPOCH_METRICS = ("familiar", "novel", "drop", "familiar_loss", "novel_loss")     # in every epoch's history


def announce(run, data):
    """Print the data, the network and the settings at the start of a run"""
    config, counts = run.config, {name: len(data[name]["labels"]) for name in ("train", "familiar", "novel")}
    run.progress.say(
        f"data       {data['source']}: {counts['train']:,} training images; test images: {counts['familiar']:,} of "
        f"familiar, {counts['novel']:,} of novel {'toys' if config.split == 'instance' else config.split + 's'}\n"
        f"network    {config.model}, preset {config.preset}: {n_params(run.params):,} parameters\n"
        f"training   {counted(config.n_epochs, 'epoch')}, batch size {config.batch_size}, learning rate {config.lr:g}, "
        f"{config.loss} loss, seed {config.seed}, threads {run.runner.threads}"
        + f"; resuming at step {run.step} of {run.n_steps}" * (run.step > 0))


def test_result(config, params, history, tests, network=None):
    """Return the dict that --out-json writes. network: the one that was loaded, if it was not trained here"""
    metrics = {key: test for key, test in tests.items() if key != "correct"}
    metrics["hit_bits"] = {name: pack_bits(correct) for name, correct in tests["correct"].items()}
    return make_result(config, params, history, metrics) | (
        {"n_params": 0} if config.model == "nearest" else {}) | (                       # none are trained
        {"history": {}, "loaded": network.file} if network else {})                     # that file has its history


def comparison_columns(result, tests):
    """Return the columns of a comparison, {metric: (value, 95% interval from the test images or None)}"""
    intervals = {name: wilson_interval(correct.sum(), len(correct)) for name, correct in tests["correct"].items()}
    return {f"{name} accuracy": (tests[name], intervals[name]) for name in intervals} | {"drop": (tests["drop"], None)}


def prediction_rows(params, data, config, runner):
    """Yield the rows of --predictions: a header, then for each test image its class, that predicted, and the scores"""
    yield ["test", "index", "true", "predicted", *(f"score_{j}" for j in range(N_CLASSES))]
    for name in ("familiar", "novel"):
        chunks = preprocess(data[name], config.data, params_dtype(params))
        scores = np.concatenate([runner.forward(params, chunk, config)["scores"] for chunk in chunks])
        for n, (true, row) in enumerate(zip(data[name]["labels"], scores)):
            yield [name, n, true, row.argmax(), *(f"{score:.4f}" for score in row)]


def remark(configs, source):
    """Return what the paper reports and what to expect here, to be read beside a comparison"""
    if configs[0].data == "shapes" and configs[0].split == "azimuth":
        return ("Three of the five shapes are symmetric about the vertical axis: from novel azimuths they look as from "
                "training azimuths, and the nearest training image, which learns nothing, classifies them too.")
    paper = ("The paper, on smallNORB: error on novel azimuths 13.5% for matrix capsules, 20.0% for its CNN; on novel "
             "elevations 12.3% and 17.8%; each at the same error on familiar viewpoints (3.7%; 4.3%).")
    usual = [run_identity(Config(model=config.model, seed=config.seed), "") for config in configs]
    return paper + EXPECTED * (usual == [run_identity(config, "") for config in configs if config.model in COMPARED])


def report(config, results, tests, say):
    """Print the metrics of both test sets. results: of test_result"""
    names = CLASS_NAMES if config.data == "shapes" else NORB_NAMES
    what = "toys" if config.split == "instance" else f"{config.split}s"
    say(f"\n{config.data}{', familiar: training images' * (config.split == 'instance')}; 95% CIs: as if independent")
    for key, per_class in ("familiar", tests["familiar_per_class"]), ("novel", tests["novel_per_class"]):
        correct = tests["correct"][key]
        low, high = wilson_interval(correct.sum(), len(correct))
        say(f"  {key + ' ' + what:21} accuracy {tests[key]:.4f} of {len(correct):,}   95% CI {low:.4f} to {high:.4f}   "
            + f"{config.loss} loss {tests[key + '_loss']:.4f}   " * (config.model != "nearest")
            + ", ".join(f"{name} {accuracy:.3f}" for name, accuracy in zip(names, per_class)))
    say(f"  drop                  {tests['drop']:.4f}\n{training_time(results)}")


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

HEADS = (*CAPSULES[1:], *CNNS[2:])                 # on one backbone; matrix-capsnet and the paper's CNNs have their own
DEFAULTS = (  # of settings that are not given: conditions, values; later rules override earlier ones
    ({}, {"n_epochs": 6, "lr": 5e-3, "train_azimuths": "300:400", "test_azimuths": "60:280", "loss": "cross-entropy",
          "preset": "wide", "routing_iters": 2, "coordinates": False, "dropout": 0.0}),
    ({"model": ("matrix-capsnet",)}, {"n_epochs": 10}),
    ({"model": PAPER_CNNS}, {"n_epochs": 16, "lr": 2e-3, "preset": "small"}),
    ({"preset": ("paper",), "model": PAPER_CNNS, "width": (0,)}, {"dropout": 0.5}),
    ({"data": ("shapes",)}, {"n_epochs": 10, "lr": 2e-3, "preset": "wide", "train_azimuths": "0:150",
                             "test_azimuths": "200:330"}),
    ({"split": ("instance",)}, {"train_azimuths": "0:340", "test_azimuths": "0:340"}),
    ({"model": VECTOR_MODELS}, {"loss": "margin", "routing_iters": 3}),
    ({"model": (*MATRIX_MODELS, "capsnet-shared")}, {"coordinates": True}))
DATA = {
    "toys": "rendered here, with smallNORB's structure", "smallnorb": "smallNORB's own files",
    "shapes": "five shapes made of points, rendered here as blobs"}
MODEL_HELP = {
    "matrix-capsnet": "the 2018 network: pose matrices, EM routing throughout",
    "matrix-head": "pose matrices and EM routing on the common backbone, that of capsnet and cnn-gap",
    "capsnet": "primary capsules, one transformation matrix per position, dynamic routing",
    "capsnet-shared": "as capsnet, but with coordinate addition and matrices shared across positions",
    "cnn": "the plain CNN baseline, the paper's with fewer units and no dropout (--preset paper: as the paper's)",
    "cnn-bn": "the same CNN with batch normalization", "cnn-gap": "CNN with global average pooling",
    "nearest": "nearest training image in pixels, not trained"}
PRESETS = {
    "small": "common backbone of 16 to 32 channels; matrix-capsnet with A, B, C, D = 32, 4, 8, 8",
    "wide": "common backbone of 32 to 64 channels; matrix-capsnet with A, B, C, D = 64, 4, 4, 4",
    "paper": "matrix-capsnet as the paper's small network (A, B, C, D = 64, 8, 16, 16), cnn as its CNN (4.2M "
             "parameters, dropout)"}
ROUTED = {"model": CAPSULES}
WITH_WIDTH = {"model": (*PAPER_CNNS, *(name for name in HEADS if name != "capsnet-shared"))}
OF_TOYS, OF_SHAPES = {"data": ("toys", "smallnorb")}, {"data": ("shapes",)}
BY_AZIMUTH = {"split": ("azimuth", "instance")}


@dataclass(frozen=True)
class Config(Settings):
    """All settings of a run. Names, defaults and help texts of the command-line flags come from here."""
    n_epochs: int = option(None, "training epochs", "training", low=1, high=100_000)
    lr: float = option(None, "learning rate of Adam, reached after --warmup steps", "training", above=0)
    loss: str = option(None, "classification loss; margin: the 2017 paper's; spread: the 2018 paper's, with a margin "
                       "from 0.2 to 0.9 (last epoch, tests); cross-entropy: -log(a_t / sum_j a_j) for class "
                       "activations a and true class t, softmax cross-entropy for CNNs. margin and spread use a CNN's "
                       "scores through a logistic function", "training", choices=("cross-entropy", "margin", "spread"))
    data: str = option("toys", describe(DATA), "data", choices=tuple(DATA))
    toy_seed: int = option(0, "seed that the toys are generated from, independent of --seed", "data", low=0,
                           high=2 ** 32 - 1, only={"data": ("toys",)})
    norb_dir: str = option("", "folder with smallNORB's six .mat or .mat.gz files", "data", runtime=True, metavar="DIR",
                           only={"data": ("smallnorb",)})
    split: str = option("azimuth", "what is novel in testing; azimuth: azimuths, of other toys; elevation: elevations, "
                        "of other toys (training 30 to 40 degrees, novel 45 to 70); instance: toys, as in smallNORB's "
                        "standard task. Familiar test images show other toys from training viewpoints, with instance "
                        "the training toys", "data", choices=("azimuth", "elevation", "instance"))
    train_azimuths: str = option(None, "range of training azimuths in degrees, ends included; 300:400 wraps around",
                                 "data", metavar="LOW:HIGH", only=BY_AZIMUTH)
    test_azimuths: str = option(None, "range of novel azimuths in degrees, ends included", "data", metavar="LOW:HIGH",
                                only=BY_AZIMUTH)
    n_train_views: int = option(6, "training azimuths, equally spaced over their range", "data", low=1, high=360,
                                only=OF_SHAPES)
    n_test_views: int = option(6, "novel azimuths, equally spaced over their range", "data", low=1, high=360,
                               only=OF_SHAPES | {"split": ("azimuth",)})
    n_elev: int = option(3, "elevations, equally spaced over their range", "data", low=1, high=90, only=OF_SHAPES)
    n_per_combo: int = option(5, "training images per shape, azimuth and elevation, with different noise", "data",
                              low=1, high=1000, only=OF_SHAPES)
    n_train_toys: int = option(5, "training toys per class", "data", low=1, high=5, only=OF_TOYS)
    n_test: int = option(2000, "test samples; about N images in each test set, always all lightings of a viewpoint, "
                         "the same for every seed; 0: all", "data", low=0, high=NORB_ROWS, only=OF_TOYS)
    model: str = option("matrix-capsnet", describe(MODEL_HELP), "network", choices=MODELS)
    preset: str = option(None, describe(PRESETS), "network", choices=tuple(PRESETS))
    width: int = option(0, "number of capsule types (matrix-head, capsnet) or channels (CNNs); 0: chosen to match "
                        "the parameters of matrix-capsnet (cnn, cnn-bn) or capsnet-shared (others)", "network",
                        low=0, high=4096, only=WITH_WIDTH)
    routing_iters: int = option(None, "routing iterations; 1: uniform coupling coefficients, no routing", "network",
                                low=1, high=50, only=ROUTED, aliases={"em_iters": {"model": MATRIX_MODELS}})
    coordinates: bool = option(None, "coordinate addition: add the coordinates of the receptive field's center to the "
                               "votes for the class capsules; in cnn-gap, append them as two channels before its last "
                               "convolution", "network", only={"model": (*MATRIX_MODELS, "capsnet-shared", "cnn-gap")})
    dropout: float = option(None, "fraction of the hidden units that are set to 0 in each training step, at random",
                            "network", low=0, high=0.99, only={"model": PAPER_CNNS}, older=0.0)


COMPARED = ("matrix-capsnet", "cnn", "cnn-bn")
EXPECTED = ("\nHere, with the default settings, mean accuracy on novel azimuths of toys over ten seeds: matrix-capsnet "
            "0.582, cnn 0.558, cnn-bn 0.577. One seed can come out either way.")
DEFAULT_MODELS = {None: COMPARED, "shapes": ("matrix-capsnet", "cnn", "cnn-gap", "nearest")}   # without --model
PRETRAINED = tuple(Path(__file__).resolve().with_name("weights") / f"smallnorb_{model}.npz" for model in COMPARED)
SOURCE_SETTING = "data"                                             # the setting that says where the data come from
EVAL_SETTINGS = ("seed", "toy_seed", "n_test", "routing_iters")    # may differ between training and evaluation
TEST_SETTINGS = ("data", "split", "train_azimuths", "test_azimuths", "toy_seed", "n_test", "n_train_views",
                 "n_test_views", "n_elev")                                                     # equal when compared
RENAMED = {                        # old names, which are refused with the new ones
    "--model caps": "--model matrix-capsnet", "--model em": "--model matrix-head", "--model dynamic": "--model capsnet",
    "--model dynamic-shared": "--model capsnet-shared", "--model gap": "--model cnn-gap",
    "--model cnn-norm": "--model cnn-bn", "--loss xent": "--loss cross-entropy", "--split toys": "--split instance",
    "--places": "--coordinates", "--no-coord-add": "--no-coordinates"}


def check_config(config):
    """Raise InputError for settings out of range, or that contradict each other"""
    check_options(config)
    angle_ranges(config)
    if config.split == "instance" and config.data == "shapes":
        raise InputError("--split instance applies to --data toys, smallnorb, not to shapes, which has one instance "
                         "per class")


# ============================================================== shared blocks: the same code in other experiments

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

LAYERS["coordinates"] = coordinate_channels_forward, coordinate_channels_backward


def main():
    parser = Parser(description=__doc__)
    add_load_flag(parser, "do not train; evaluate the networks")
    add_out_weights_flag(parser)
    add_predictions_flag(parser)
    add_config_flags(parser, several=True)
    args = parser.parse_args()
    if args.out_weights and getattr(args, "model", []) == ["nearest"]:
        raise InputError("--out-weights does not apply to --model nearest, which has no weights. Give other models")
    if hasattr(args, "train_azimuths") and not hasattr(args, "data"):
        Progress(hasattr(args, "quiet")).say("the images are of rendered toys; five simple shapes, smaller and faster: "
                                             "--data shapes")
    run_experiment(args, lambda config, progress, evaluated: load_data(config, progress, ["train"] * evaluated),
                   lambda data, config: sum(len(data[name]["labels"]) for name in ("familiar", "novel")))


if __name__ == "__main__":
    run_cli(main)
