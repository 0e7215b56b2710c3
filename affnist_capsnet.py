#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0"]
# ///
"""affNIST CapsNet: the 2017 paper's experiments with one object per image, on affine digits and MNIST; and any images.

Sabour, Frosst & Hinton, "Dynamic routing between capsules", NIPS 2017, sections 4 (the network), 5 (MNIST), 5.2
(robustness to affine transformations) and, by `--task images`, 7 (images in color and of other sizes).

Question of the default task: networks are trained on MNIST digits that are translated on a larger canvas, and on
nothing else. When a capsule network and a CNN classify translated digits equally well, is the capsule network more
accurate on affine digits, which are also rotated, sheared and scaled (the paper: 79% against 66%)? If so, which part of
it is the reason?

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
(`coordinate_W`) adds it to the vote: the coordinate addition of Hinton et al. (2018), for vectors; it is scaled by
|u_i|, so that an inactive capsule adds nothing. With uniform coupling coefficients the sum of the votes is computed
without computing the votes.

Every convolution is followed by batch normalization, over groups of 16 samples, and by a ReLU; PrimaryCaps has the
squash in place of the ReLU. The loss is the margin loss on the capsule lengths plus 0.0005 times the summed squared
error of the reconstruction. Muon (steps along the orthogonalized momentum) trains the kernels of the normalized
convolutions, Adam all other parameters.

Other tasks: `--task mnist` classifies MNIST's digits as they are; `--task images` any square images, gray or in color,
with sides from 20 to 64 px and 1 to 4 channels, all of which follow from the data. They are used as they are, padded by
4 px of zeros; `--train-shift` translates training images. The decoder reconstructs every pixel of every channel, with
the same weight for each.

Other models (`--model`), on the same backbone:
  - capsnet: one transformation matrix per capsule, not per type, and 3 routing iterations, as in the paper
  - vector-gap, vector-gmp: ten class vectors by global average or max pooling, with squash, margin loss and decoder;
    no primary capsules, no routing
  - cnn-gap, cnn-gmp, cnn-dense: CNNs with global average pooling, global max pooling or a hidden dense layer
  - cnn: not on the backbone, but the paper's CNN for MNIST at 1/16 of its width
The two pooled CNNs have about as many parameters as capsnet-shared without its decoder; the other two about as many as
capsnet would have without its decoder and with 8 px of padding, as they have.

Deviations from the paper:
  - six small convolutions with batch normalization, not two of 9x9 (`--preset paper --model capsnet`: the paper's
    network; `--preset small`: a quarter of its width), and Muon (`--muon 0`: Adam for all parameters)
  - by default shared matrices, coordinates and one routing iteration, and an image padded with background (`--padding`)
  - training is short, with a cosine decay of the learning rate; the paper stops at equal accuracy (`--stop-at`)
  - cnn and cnn-dense have dropout only with `--preset small` or `paper`; the layers of the paper's CNN for affNIST,
    which had max pooling, are not published
  - affine test digits are drawn here, within affNIST's ranges; `--affnist-dir` also tests on affNIST's own files

Examples, with times on two cores:
  python3 affnist_capsnet.py                         3 minutes: train capsnet-shared
  python3 affnist_capsnet.py --load                  1 minute: evaluate the pretrained network
  python3 affnist_capsnet.py --model cnn-gap         2 minutes: a CNN with global average pooling
"""
import argparse
import base64
import collections
import contextlib
import ctypes
import dataclasses
import datetime
import difflib
import functools
import gzip
import hashlib
import http.client
import io
import itertools
import json
import math
import numbers
import os
import platform
import re
import shlex
import shutil
import struct
import sys
import time
import urllib.request
import zipfile
import zlib
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# BLAS works on one thread, since worker threads share a batch. This must be said before numpy is
# imported.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
                 "VECLIB_MAXIMUM_THREADS"):
    os.environ[variable] = "1"
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

EXPERIMENT = "affnist_capsnet"
# a tuple, since other experiments have several
PRETRAINED = (Path(__file__).resolve().with_name("weights") / "affnist_capsnet-shared.npz",)
# Axis legend, in the shape comments at line ends:
#   N batch   H W height, width   C channels in   F channels out   K kernel side
#   I primary capsules   B types of primary capsules   J digit capsules, classes
#   E dimensions of a primary capsule (8)   D dimensions of a digit capsule (16)


class InputError(Exception):
    """Wrong input: the message is one line that says what is wrong and what to do next"""
    exit_code = 2


# -------------------------------------------------------------- settings

def setting(default, text, **more):
    """Declare a setting with its help text. default: None stands for the preset's. more:
      low, high  bounds of its value
      choices    all its values
      only       {another setting: the values of it that this one needs}
      alias      another flag for it
      metavar    what --help calls its value
      test       a trained network may be tested with another value
      runtime    a run may even be resumed with another value"""
    return dataclasses.field(default=default, metadata={"help": text} | more)


IMAGES = "images"                                      # the task of any images
LEAST_SIDE, LARGEST_SIDE, MOST_CHANNELS = 20, 64, 4    # of its images
ROUTED = "capsnet-shared", "capsnet"                   # models with votes
VECTORS = "vector-gap", "vector-gmp"                   # ten pooled vectors
POOLED_CNNS = "cnn-gap", "cnn-gmp"                     # matched in size by the channels of Conv5
CAPSULES = ROUTED + VECTORS                            # models with class capsules: ten vectors
CNNS = *POOLED_CNNS, "cnn-dense", "cnn"
WITH_PRESETS = "capsnet", "cnn-dense", "cnn"
ONLY_CAPSULES = {"model": CAPSULES}
NORMALIZED = {"norm": ("batch",)}
MODERN = {"train_shift": "6", "padding": 4, "conv1_channels": 16, "norm": "batch",
          "routing_iters": 1, "dropout": 0.0, "lr": 0.01, "warmup": 200, "muon": 0.02,
          "loss": "margin", "recon_weight": 0.0005}
PAPER = MODERN | {"padding": 0, "norm": "none", "routing_iters": 3, "lr": 0.001, "warmup": 0,
                  "muon": 0.0}
PRESETS = {                        # by --preset, of capsule networks; of others see defaults_of
    "deep": MODERN,
    "small": PAPER | {"conv1_channels": 64},
    "paper": PAPER | {"conv1_channels": 256}}


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run; the flags of the command line are made from them.

    A setting that is not given, or None, becomes its default. Raise InputError if a value is of
    another type or out of bounds, or if it differs from the default although the setting does not
    apply beside the others."""
    task: str = setting("affnist", "mnist: 28x28 px, tested on MNIST as it is; images: any square "
                        "images, gray or in color, as they are",
                        choices=("affnist", "mnist", IMAGES))
    digits: str = setting("auto", "auto: MNIST, else synthetic", test=True,
                          choices=("auto", "mnist", "synthetic"))
    data_dir: str = setting("", "folder of idx files; else $MNIST_DIR or download",
                            alias="--mnist-dir", metavar="DIR", runtime=True)
    affnist_dir: str = setting("", "folder that holds affNIST's test_batches, to test on all, too "
                               "(needs SciPy)", metavar="DIR", only={"task": ("affnist",)},
                               runtime=True)
    n_train: int = setting(12000, "training digits or images per epoch, each drawn and translated "
                           "anew: with fewer different ones they repeat",
                           low=1, high=10_000_000)
    n_per_class: int = setting(0, "different training digits per class; 0: all", low=0, high=10_000)
    n_val: int = setting(5000, "validation digits, of held-out training images", low=1, high=5000)
    n_test: int = setting(0, "test digits: the first N of MNIST, of other data N at random; 0: all",
                          low=0, high=10_000, test=True, runtime=True)
    eval_split: str = setting("test", "test, or val: held-out training images",
                              choices=("test", "val"), test=True, runtime=True)
    train_shift: str = setting(None, "largest translation of training digits on each axis, px; "
                               "full: any position with all ink on the canvas; of task mnist 2, "
                               "of task images 0",
                               choices=(*map(str, range(11)), "full"))
    model: str = setting("capsnet-shared", "network", choices=CAPSULES + CNNS)
    preset: str = setting("deep", "deep: six small convolutions; paper: the paper's two; small: these with a "
                          "quarter of the channels. Of CNNs: the defaults of that capsnet",
                          choices=tuple(PRESETS), only={"model": WITH_PRESETS})
    conv1_channels: int = setting(None, "channels of Conv1; CNNs 16, cnn of preset paper 256",
                                  low=1, high=1024)
    norm: str = setting(None, "normalization of convolutions, over 16 samples",
                        choices=("batch", "none"))
    padding: int = setting(None, "px of background around the canvas; 8 for models without votes "
                           "on deep, 0 for task mnist, 4 for task images on deep", low=0, high=20)
    squash: str = setting("all", "last: of class capsules alone; relu: ReLU of primary capsules, "
                          "no squash at all", choices=("all", "last", "none", "relu"),
                          only=ONLY_CAPSULES)
    routing_iters: int = setting(None, "1: no routing; of capsnet 3", low=1, high=50, test=True,
                                 only={"model": ROUTED})
    seed: int = setting(0, "of all random numbers; same seed, same bits",
                        low=0, high=2 ** 32 - 1, test=True)
    n_epochs: int = setting(4, "training epochs", low=1, high=100_000)
    stop_at: float = setting(0.0, "validation accuracy at which to stop; 0: train all epochs",
                             low=0, high=1)
    batch_size: int = setting(32, "digits per step", low=1, high=4096)
    lr: float = setting(None, "learning rate of Adam", low=1e-9, high=1e6)
    lr_schedule: str = setting("cosine", "cosine: decay to 0", choices=("cosine", "constant"))
    warmup: int = setting(None, "steps of linear warm-up", low=0, high=100_000)
    muon: float = setting(None, "step of Muon, relative to a kernel's norm: twice --lr; 0: Adam",
                          low=0, high=1, only=NORMALIZED)
    loss: str = setting(None, "of capsule lengths |v_j|; cross-entropy: -log(|v_t| / sum_j |v_j|) "
                        "for class t", choices=("margin", "cross-entropy"), only=ONLY_CAPSULES)
    recon_weight: float = setting(None, "of the squared error; 0: no decoder", low=0, high=1e6,
                                  only=ONLY_CAPSULES)
    recompute_statistics: int = setting(0, "before the test, recompute normalizations on up to N "
                                        "training samples", low=0, high=2000, test=True,
                                        runtime=True, only=NORMALIZED)
    threads: int = setting(0, "0: one per core; results do not depend on it",
                           low=0, high=256, runtime=True)
    quiet: bool = setting(False, "print only errors", runtime=True)
    # The rest have no flags
    n_classes: int = 10            # of the data, 2 to 62
    side: int = 28                 # of the data, px, only of task images: 20 to 64
    channels: int = 1              # of the data, only of task images: 1 to 4
    dropout: float = None          # before the last layer of cnn and cnn-dense
    width: int = 0                 # of a CNN; 0: as many parameters as the capsnet (matched_width)

    def __post_init__(self):
        check_types(self)
        fill_in(self, defaults_of(self))
        if self.affnist_dir and self.n_classes != 10:
            raise InputError("--affnist-dir: affNIST has ten digits, and these data other classes. "
                             "Leave it out")
        check_image_size(self)


SETTINGS = [f for f in dataclasses.fields(Config) if "help" in f.metadata]


def defaults_of(config):
    """Return {name: default} of all settings, given those that others depend on. PRESETS has the
    defaults of capsule networks; other models have some of their own"""
    # Models without presets have the deep backbone. A preset that does not exist counts as deep,
    # too: check_setting refuses it afterwards
    is_deep = config.model not in WITH_PRESETS or config.preset not in ("small", "paper")
    defaults = {f.name: f.default for f in dataclasses.fields(Config)}
    defaults |= PRESETS["deep" if is_deep else config.preset]
    defaults["routing_iters"] = 3 if config.model == "capsnet" else 1          # in place of PRESETS'
    if is_deep and config.model not in ROUTED:
        defaults["padding"] = 8
    if config.model in CNNS:
        defaults |= {"loss": "cross-entropy", "recon_weight": 0.0}
        defaults["dropout"] = 0.0 if is_deep else 0.5
        if config.model == "cnn-dense" or config.preset == "small":
            defaults["conv1_channels"] = 16
    if config.task == "mnist":
        defaults |= {"train_shift": "2", "padding": 0}
    if config.task == IMAGES:
        defaults["train_shift"] = "0"
        if is_deep:
            defaults["padding"] = 4
    norm = config.norm if config.norm is not None else defaults["norm"]
    if norm == "none":
        defaults["muon"] = 0.0
    else:
        lr = config.lr if config.lr is not None else defaults["lr"]
        defaults["muon"] = min(2 * lr, 1.0)
    return defaults


def fill_in(config, defaults):
    """Replace each setting of a Config that is None by its default, then check all"""
    for name, default in defaults.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, default)
    for f in SETTINGS:
        check_setting(f, config, defaults[f.name])


# By the type of a setting: the type of its values, and what it is called
KINDS_OF_VALUE = {
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a text in quotes"),
    bool: ((bool, np.bool_), "True or False")}


def check_types(config):
    """Raise InputError if a value is of another type than its field. Convert it to a type that JSON
    knows"""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if value is None:
            continue
        kind, in_words = KINDS_OF_VALUE[f.type]
        is_bool_for_number = isinstance(value, bool) and f.type is not bool
        if is_bool_for_number or not isinstance(value, kind):
            raise InputError(f"{flag_of(f.name)} {value}: must be {in_words}")
        object.__setattr__(config, f.name, f.type(value))


def check_setting(f, config, default):
    """Raise InputError if a setting's value is out of bounds, or if the setting does not apply and
    the value is not its default"""
    value = getattr(config, f.name)
    flag = flag_of(f.name)
    if not applies(f, config):
        if value != default:
            needed = [f"{flag_of(name)} {', '.join(values)}"
                      for name, values in f.metadata["only"].items()]
            raise InputError(f"{flag} applies only to {' and '.join(needed)}. Leave it out")
    elif "choices" in f.metadata:
        choices = f.metadata["choices"]
        if value not in choices:
            raise InputError(f"{flag} {value}: must be one of {', '.join(choices)}")
    elif "high" in f.metadata:
        low = f.metadata["low"]
        high = f.metadata["high"]
        if not low <= value <= high:
            raise InputError(f"{flag} {value}: must be from {low:g} to {high:.10g}")


def check_image_size(config):
    """Raise InputError if a Config's images have a size that its task or its network cannot take"""
    if config.task != IMAGES:
        if (config.side, config.channels) != (Config.side, Config.channels):
            raise InputError(f"images of {size_in_words(config)}: --task {config.task} is for gray "
                             "digits of 28x28 px. Other square images: --task images")
        return
    has_legal_side = LEAST_SIDE <= config.side <= LARGEST_SIDE
    if not has_legal_side or not 1 <= config.channels <= MOST_CHANNELS:
        raise InputError(f"images of {size_in_words(config)}: must have sides from {LEAST_SIDE} to "
                         f"{LARGEST_SIDE} px and 1 to {MOST_CHANNELS} channels")
    if config.train_shift == "full":
        raise InputError("--train-shift full: images have no ink that could stay on a canvas. "
                         "Give 0 to 10 px")
    convs = convolutions_of_width(config, config.width or 1)   # sides do not depend on the width
    if side_after(convs, config.side + 2 * config.padding) < 1:
        enough = next(p for p in itertools.count() if side_after(convs, config.side + 2 * p) > 0)
        raise InputError(f"--padding {config.padding}: images of {config.side} px are too small "
                         f"for the convolutions of {config.model}. Give --padding {enough} or more")


def size_in_words(config):
    """Return the size of a Config's images, as in 32x32 px, 3 channels"""
    plural = "" if config.channels == 1 else "s"
    return f"{config.side}x{config.side} px, {config.channels} channel{plural}"


def applies(f, config):
    """Return whether a setting has an effect beside the other settings of a Config"""
    needed = f.metadata.get("only", {})
    return all(getattr(config, name) in values for name, values in needed.items())


def flag_of(name):
    """Return the command-line flag of a setting"""
    return "--" + name.replace("_", "-")


def with_uniform_coupling(config):
    """Return the Config of the same network with uniform coupling coefficients, which is one
    routing iteration. A network without routing stays as it is"""
    if config.model not in ROUTED:
        return config
    return dataclasses.replace(config, routing_iters=1)


def configs_of(given):
    """Return the Config of each given model, from {setting: value}, in which model is a list. A
    setting that only others of these models have is left out: with --model capsnet cnn, as
    compare.py gives it, --routing-iters is a setting of capsnet alone"""
    models = dict.fromkeys(given.get("model", [Config.model]))           # without repetitions
    configs = []
    for model in models:
        own = {f.name: given[f.name] for f in SETTINGS
               if f.name in given and not is_of_another(f, model, models)}
        own["model"] = model
        configs.append(Config(**own))
    return configs


def is_of_another(f, model, models):
    """Return whether a setting does not apply to a model, but to another one of some models"""
    having = f.metadata.get("only", {}).get("model", models)
    return model not in having and any(other in having for other in models)


# -------------------------------------------------------------- training

def train(config, data, state=None, each_step=lambda *_: None, each_epoch=lambda *_: None,
          dtype=np.float32):
    """Train a network and return its state. The test images are never used, and nothing is printed.

    data: as load_data returns it. state: to resume from, at the end of an epoch.
    each_step(state, terms) is called after every step, each_epoch(state) after every epoch; what
    they keep they must copy. Progress has such hooks. dtype: float64 is for tests.

    The state, a dict, is everything that a run is: params {name: array}, running (statistics of the
    normalizations), adam_m and adam_v (moments; adam_m is also Muon's momentum), step and history.
    Raise InputError when training diverges."""
    config = fit_to_data(config, data)
    if state is None:
        state = initial_state(config, dtype)
    if not state["adam_m"]:
        raise InputError("this state has no moments of the optimizer, as without_moments leaves "
                         "it, and cannot be trained on. Save the whole state")
    state["history"]["source"] = data["source"]
    state["history"]["names"] = data.get("names")
    per_epoch = steps_per_epoch(config, data)
    with worker_threads(config) as workers:
        for epoch in range(state["step"] // per_epoch, config.n_epochs):
            if has_reached(config.stop_at, state["history"]["epochs"]):
                break
            began = time.perf_counter()
            sums = {}
            for samples, rows in epoch_batches(data, epoch, config):
                terms, shard_grads, statistics = batch_gradients(
                    state["params"], samples, rows, config, workers)
                if not math.isfinite(terms["loss"]):
                    raise InputError(f"loss {terms['loss']}, step {state['step'] + 1}: diverged. "
                                     "Lower --lr")
                rate = schedule(config, state["step"], config.n_epochs * per_epoch)
                optimizer_step(state, shard_grads, rate, config, workers)
                update_running_statistics(state["running"], statistics, state["step"])
                state["step"] += 1
                for name, term in terms.items():
                    sums[name] = sums.get(name, 0) + term * len(rows)
                each_step(state, terms)
            metrics = {"epoch": epoch + 1, "step": state["step"],
                       "seconds": time.perf_counter() - began}
            metrics |= {"train_" + name: total / config.n_train for name, total in sums.items()}
            metrics |= validate(weights_of(state), data, config, workers)
            state["history"]["epochs"].append(metrics)
            each_epoch(state)
    return state


def has_reached(target, epochs):
    """Return whether a validation accuracy, if it is above 0, was reached in one of some epochs"""
    return target > 0 and any(epoch["val_accuracy"] >= target for epoch in epochs)


def steps_per_epoch(config, data):
    """Return the number of batches of an epoch; the last one may be smaller. data: not used
    here; in another experiment the number depends on them"""
    return math.ceil(config.n_train / config.batch_size)


def epoch_batches(data, epoch, config):
    """Yield each batch of an epoch: the samples it is among, and its rows in them"""
    for samples in epoch_samples(data, epoch, config):
        for rows in batches(samples, config.batch_size):
            yield samples, rows


def batches(samples, size):
    """Return the rows of each batch of a dict of samples, a list of arrays"""
    rows = np.arange(len(samples["labels"]))
    return np.split(rows, range(size, len(rows), size))


def initial_state(config, dtype=np.float32):
    """Return the state of a run before its first step (see train)"""
    params = {name: p.astype(dtype) for name, p in init_params(config).items()}
    running = {}
    if config.norm == "batch":
        for conv in convolutions(config):
            running[conv.name + "_norm_mean"] = np.zeros(conv.F, dtype)
            running[conv.name + "_norm_var"] = np.ones(conv.F, dtype)
    return {
        "params": params,
        "running": running,
        "adam_m": {name: np.zeros_like(p) for name, p in params.items()},
        "adam_v": {name: np.zeros_like(p) for name, p in params.items()},
        "step": 0,
        "history": {"source": "", "epochs": []}}


def weights_of(state):
    """Return what is evaluated: parameters and running statistics, {name: array}"""
    return state["params"] | state["running"]


def worker_threads(config):
    """Return a pool of threads, of which each computes shards of a batch"""
    set_up_process()
    # NumPy keeps what it warns of per thread; train itself looks at every loss
    return ThreadPoolExecutor(config.threads or n_cores(),
                              initializer=lambda: np.seterr(all="ignore"))


def set_up_process():
    """Make the results of this process independent of its cores, and its steps faster. Called by
    main and by worker_threads, hence by train and before every evaluation; not by an import"""
    # BLAS on one thread, also if numpy was imported before this file: with more threads the
    # rounding of products would depend on the number of cores
    with contextlib.suppress(AttributeError):
        openblas().scipy_openblas_set_num_threads64_(1)
    # Threads take turns every 0.02 ms: with Python's 5 ms a default step takes 1.04 times as long
    sys.setswitchinterval(2e-5)
    # One heap for all threads, which keeps freed memory (glibc's mallopt): without, a step takes
    # 1.1 to 1.35 times as long. M_ARENA_MAX -8, M_MMAP_THRESHOLD -3, M_TRIM_THRESHOLD -1. glibc
    # before 2.35 refuses a threshold over 32 MB and keeps the one before
    with contextlib.suppress(AttributeError, OSError, TypeError):
        for option, value in (-8, 1), (-3, 1 << 25), (-3, 1 << 30), (-1, (1 << 31) - 1):
            ctypes.CDLL(None).mallopt(option, value)


@functools.cache
def openblas():
    """Return the OpenBLAS library that NumPy brings along, or None if it brings none"""
    site = Path(np.__file__).parent
    for library in (*site.parent.glob("numpy.libs/*openblas*"), *site.glob(".dylibs/*openblas*")):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(library))


def n_cores():
    """Return the number of cores that this process may use"""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SHARD = 16                         # samples that a thread computes at once, and that share the
                                   # statistics of a normalization


def batch_gradients(params, samples, rows, config, workers):
    """Compute loss_and_grads of samples[rows] in shards of 16, shared among the threads.

    Shards and the order of their sums, hence the bits, do not depend on the number of threads.
    Return the terms of the loss, the list of the shards' gradients, whose sum is the batch's, and
    the list of their statistics."""
    def one(start):
        batch = to_batch(samples, rows[start:start + SHARD], params["conv1_w"].dtype)
        return loss_and_grads(params, batch, config, share=len(batch["labels"]) / len(rows))
    shards = workers.map(one, range(0, len(rows), SHARD))
    shard_terms, shard_grads, shard_statistics = zip(*shards)
    terms = {name: sum(part[name] for part in shard_terms) for name in shard_terms[0]}
    return terms, shard_grads, shard_statistics


def forward_shards(weights, samples, config, workers, decode="labels"):
    """Compute the outputs of the network for all samples: scores, v and recon, as far as forward
    has them, {name: array}. decode: "labels" or "predicted" classes"""
    def one(rows):
        batch = to_batch(samples, rows, weights["conv1_w"].dtype)
        digits = batch["labels"] if decode == "labels" else None
        out, _ = forward(weights, batch["images"], config, digits)
        return {name: out[name] for name in ("scores", "v", "recon") if name in out}
    parts = list(workers.map(one, batches(samples, SHARD)))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def class_activations(out, config):
    """Return a number for each class, (N, J): the length of its vector, with a squash at most 1,
    or, of a CNN, its probability. out: of forward or forward_shards"""
    if config.model in CNNS:
        return softmax_forward(out["scores"])
    return out["scores"]


def evaluate(weights, chunks, config, workers):
    """Compute accuracy and losses over dicts of digits, such as those of stream_digits.

    Return a dict of
      n, hits             numbers of digits and of correctly classified ones
      accuracy, correct   hits / n; whether each digit was correctly classified, (n,) bool
      confusion           numbers of digits, a list (J, J): a row per class, a column per predicted
                          class
      loss                what is minimized, as in loss_and_grads, mean over the digits
      margin              its first term; cross_entropy in its place where that is the loss
      recon_mse           mean squared error per pixel and channel, only with a decoder"""
    labels, predicted = [], []
    loss_sum = recon_sum = 0.0
    for chunk in chunks:
        out = forward_shards(weights, chunk, config, workers)
        size = len(chunk["labels"])
        labels.append(chunk["labels"])
        predicted.append(out["scores"].argmax(1))
        loss, _ = classification_loss(out, chunk, config)
        loss_sum += loss * size
        if "recon" in out:
            # (n, 1, H, W) or (n, 1, H, W, C)
            target = chunk["images"][:, None].astype(out["scores"].dtype) / 255
            recon, _ = reconstruction_loss(out["recon"], target)
            recon_sum += recon * size
    labels = np.concatenate(labels)
    predicted = np.concatenate(predicted)
    n, J = len(labels), config.n_classes
    correct = labels == predicted
    confusion = np.bincount(labels * J + predicted, minlength=J * J).reshape(J, J)
    metrics = {
        "n": n,
        "hits": int(correct.sum()),
        "accuracy": correct.mean(),
        "correct": correct,
        "confusion": confusion.tolist(),
        "loss": loss_sum / n + config.recon_weight * (recon_sum / n),
        loss_name(config): loss_sum / n}
    if "recon" in out:
        metrics["recon_mse"] = recon_sum / n / math.prod(image_shape(config))
    return metrics


def validate(weights, data, config, workers):
    """Return evaluate's means over the validation digits, the same after every epoch, {"val_" +
    name: value}"""
    metrics = evaluate(weights, stream_digits(data, config, "val"), config, workers)
    means = "accuracy", "loss", loss_name(config), "recon_mse"
    return {"val_" + name: metrics[name] for name in means if name in metrics}


def evaluate_test(weights, data, config, workers):
    """Return {key: evaluate's metrics} of the task's TEST_SETS. A network trained on digits at any
    position has no separate test set of these; affNIST's own files need --affnist-dir."""
    metrics = {}
    for key, kind, _ in TEST_SETS[config.task]:
        is_same_as_familiar = kind == "any_position" and max_shift(config) is None
        is_missing = kind == "real" and not config.affnist_dir
        if is_same_as_familiar or is_missing:
            continue
        if kind == "real":
            digits = read_affnist(config.affnist_dir)
        else:
            digits = stream_digits(data, config, kind)
        metrics[key] = evaluate(weights, digits, config, workers)
    return metrics


# ------------------------------------------ the task: digits, translated or affinely transformed

DATA, INIT, BATCHES, EVALUATION = range(4)                     # purposes of random numbers


def rng_for(seed, purpose, *key):
    """Return a generator for each purpose and key: drawing more of one thing does not change
    another"""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, *key)))


BOX = 28                           # side of an MNIST image, px
SIDES = {"affnist": 40, "mnist": 28}       # of the canvas of a task of digits, px; see image_side
CHUNK = 2048                       # digits drawn at once, so that memory does not grow with all
# affNIST's ranges of the factors of an affine transformation: degrees, x per y, scale factors
RANGES = {"rotation": (-20.0, 20.0), "shear": (-0.2, 0.2),
          "scale_y": (0.8, 1.2), "scale_x": (0.8, 1.2)}
IDENTITY = {"rotation": 0.0, "shear": 0.0, "scale_y": 1.0, "scale_x": 1.0}     # no transformation
# Kinds of digits, see stream_digits; the place of a kind in this list seeds its generator
KINDS = "val", "test", "affine", "any_position", "centered"
TEST_SETS = {                      # of each task: key of the result, kind of digits, printed name
    "affnist": (("familiar", "test", "translated digits"),
                ("any_position", "any_position", "digits at any position"),
                ("centered", "centered", "affine digits, centered"),
                ("affine", "affine", "affine digits, any position"),
                ("real_affine", "real", "affNIST's own digits")),
    "mnist": (("test", "test", "test images"),),
    IMAGES: (("test", "test", "test images"),)}


def image_side(config):
    """Return the side of the images that a network sees, without their padding, px"""
    if config.task == IMAGES:
        return config.side
    return SIDES[config.task]


def image_shape(config):
    """Return the shape of the images that a network sees: (H, W) of one channel, or (H, W, C)"""
    side = image_side(config)
    if config.channels == 1:
        return side, side
    return side, side, config.channels


def place_digits(images, corners, side):
    """Return each image (n, 28, 28) uint8 on a black canvas, (n, side, side). corners: (n, 2), row
    and column of its upper left corner on the canvas, px, also outside; what does not fit on the
    canvas is cut off"""
    padded = np.zeros((len(images), side + 2 * BOX, side + 2 * BOX), np.uint8)
    windows = sliding_window_view(padded, (BOX, BOX), axis=(1, 2), writeable=True)
    rows, columns = np.clip(corners.T + BOX, 0, side + BOX)
    windows[np.arange(len(images)), rows, columns] = images
    return padded[:, BOX:-BOX, BOX:-BOX]


def max_shift(config):
    """Return the largest translation of training digits along each axis, px; None: any position on
    the canvas"""
    if config.train_shift == "full":
        return None
    return int(config.train_shift)


def translate_digits(images, side, max_shift, rng):
    """Return each 28x28 image on a canvas (n, side, side), translated at random from the center by
    up to max_shift whole px along each axis; None: to any position at which all ink is on the
    canvas"""
    if max_shift is None:
        corners = []
        for axis in (2, 1):                            # first the rows of corners, then the columns
            ink = images.any(axis)                                                      # (n, 28)
            before, after = ink.argmax(1), ink[:, ::-1].argmax(1)      # px without ink at both ends
            corners.append(rng.integers(-before, side - BOX + 1 + after))
        corners = np.stack(corners, 1)
    else:
        shifts = rng.integers(-max_shift, max_shift + 1, (len(images), 2))
        corners = (side - BOX) // 2 + shifts
    return place_digits(images, corners, side)


def shift_images(images, max_shift, rng):
    """Return each image, (n, H, W) or (n, H, W, C), translated at random by up to max_shift whole
    px along each axis; what comes in from outside is 0"""
    if max_shift == 0:
        return images
    n, height, width = images.shape[:3]
    margin = max_shift, max_shift
    no_margins = [(0, 0)] * (images.ndim - 3)                  # of channels
    padded = np.pad(images, [(0, 0), margin, margin, *no_margins])
    windows = sliding_window_view(padded, (height, width), axis=(1, 2))
    rows, columns = rng.integers(0, 2 * max_shift + 1, (2, n))
    shifted = windows[np.arange(n), rows, columns]                     # (n, H, W) or (n, C, H, W)
    if images.ndim == 4:
        shifted = np.moveaxis(shifted, 1, -1)
    return shifted


def translate(images, shift, config, rng):
    """Return images of the data as the network sees them, uint8: translated at random by up to
    `shift` px along each axis (see translate_digits), digits on the task's canvas"""
    if config.task == IMAGES:
        return shift_images(images.reshape(-1, *image_shape(config)), shift, rng)
    return translate_digits(images, SIDES[config.task], shift, rng)


def affine_matrix(rotation, shear, scale_y, scale_x):
    """Return the matrices of affine transformations, which act on column vectors (y, x), (n, 2, 2)
    float64.

    A matrix first scales by scale_y and scale_x, then shears (x += shear * y), then rotates by
    `rotation` degrees, counter-clockwise in the image. The arguments, numbers or (n,), are
    broadcast."""
    rotation, shear, scale_y, scale_x = np.broadcast_arrays(
        np.float64(rotation), np.float64(shear), np.float64(scale_y), np.float64(scale_x))
    cos, sin = np.cos(np.deg2rad(rotation)), np.sin(np.deg2rad(rotation))
    scale_and_shear = np.stack([scale_y, 0 * scale_y, shear * scale_y, scale_x], -1)
    rotate = np.stack([cos, -sin, sin, cos], -1)               # y points down
    return rotate.reshape(-1, 2, 2) @ scale_and_shear.reshape(-1, 2, 2)


def transform_digits(images, matrices, rng, side):
    """Transform each 28x28 image by its matrix, bilinearly, and place it at random with all of its
    ink on the canvas.

    images: (n, 28, 28) uint8. matrices: (n, 2, 2), from affine_matrix. rng: None places each digit
    at the center of its canvas, or as near to the center as its ink allows. Return the canvases,
    (n, side, side) uint8, and centers, (n, 2): where the center (13.5, 13.5) of each image lies on
    its canvas, (row, column) in px. Ink that does not fit on the canvas (MNIST's does) is centered
    and cut off."""
    # Positions of pixels, and of ink, are relative to the center of the image
    pixels = np.mgrid[:BOX, :BOX] - (BOX - 1) / 2                                      # (2, 28, 28)
    mapped = np.einsum("nij,jyx->niyx", matrices, pixels)                           # (n, 2, 28, 28)
    is_ink = images[:, None] > 0
    # At this distance from its pixel interpolated ink is 0, so that 1 less is still inked
    margin = np.abs(matrices).sum(2)
    low = mapped.min((2, 3), where=is_ink, initial=0) - margin + 1                      # (n, 2)
    high = mapped.max((2, 3), where=is_ink, initial=0) + margin - 1
    room = side - 1 - (high - low)       # the center lies between -low and -low + room
    if rng is None:                      # the fraction of the room that puts it at the middle
        fraction = ((side - 1) / 2 + low) / np.maximum(room, 1e-9)
    else:
        fraction = rng.uniform(0, 1, (len(images), 2))
    centers = np.clip(fraction, 0, 1) * room - low
    centers = np.where(room < 0, (side - 1 - low - high) / 2, centers)
    inverses = np.linalg.inv(matrices)
    # 64 images fit in the CPU cache
    parts = [slice(start, start + 64) for start in range(0, len(images), 64)]
    canvases = [resample_affine(images[k], inverses[k], centers[k], side) for k in parts]
    return np.concatenate(canvases), centers


def resample_affine(images, inverses, centers, side):
    """Draw each image, transformed, on its canvas by bilinear interpolation; return canvases
    (n, side, side) uint8.

    images: (n, 28, 28) uint8. inverses: (n, 2, 2), inverses of the transformations' matrices.
    centers: (n, 2), where each image's center lies on its canvas, px. Canvas pixel p gets the value
    of the image at inverse @ (p - center), relative to the image's center; outside of the image the
    value is 0."""
    offset = np.mgrid[:side, :side] - centers[..., None, None]                  # (n, 2, side, side)
    source = np.einsum("nij,njyx->inyx", inverses, offset) + (BOX - 1) / 2      # (2, n, side, side)
    # Positions in images with a border of one pixel, which is 0
    source = np.clip(source + 1, 0, BOX + 1 - 1e-6)
    padded = np.pad(images.astype(float), ((0, 0), (1, 1), (1, 1)))
    corner = source.astype(np.int64)
    y, x = corner
    dy, dx = source - corner
    width = BOX + 2
    image = np.arange(len(images))[:, None, None]
    index = (image * width + y) * width + x                                    # of padded.flatten()
    canvases = (1 - dy) * (1 - dx) * np.take(padded, index)
    canvases += (1 - dy) * dx * np.take(padded, index + 1)
    canvases += dy * (1 - dx) * np.take(padded, index + width)
    canvases += dy * dx * np.take(padded, index + width + 1)
    return np.rint(canvases).astype(np.uint8)


def stream_digits(data, config, kind, factors=None):
    """Yield validation or test digits in dicts of at most CHUNK: images (n, *image_shape(config))
    uint8 and labels (n,) int64. Each chunk has its own random generator.

    kind:
      val           validation digits, translated as in training; with --task mnist as they are
      test          test digits, translated as in training; with --task mnist or images as they are
      any_position  test digits translated to any position with all ink on the canvas
      affine        test digits transformed and placed at any position
      centered      the same, but at the center of the canvas, or as near to it as their ink allows
    --eval-split val: validation images, not test images. factors: {factor: number} for all "affine"
    or "centered" digits; None draws them from RANGES."""
    split, n = config.eval_split, config.n_test
    if kind == "val":
        split, n = "val", config.n_val
    images, labels = data[split]
    n = min(n or len(labels), len(labels))                     # 0: all
    # Other data may be in order of their classes
    if n < len(labels) and data["source"] not in DIGIT_NAMES:
        chosen = rng_for(0, EVALUATION, 2).permutation(len(labels))[:n]
        images, labels = images[chosen], labels[chosen]
    for k, start in enumerate(range(0, n, CHUNK)):
        rows = slice(start, min(start + CHUNK, n))
        rng = rng_for(config.seed, EVALUATION, KINDS.index(kind), 0, k)      # 0: a fixed key
        canvases = draw_digits_of_kind(images[rows], kind, config, rng, factors)
        yield {"images": canvases, "labels": labels[rows].astype(np.int64)}


def draw_digits_of_kind(images, kind, config, rng, factors):
    """Return images of a kind of digits on canvases, (n, *image_shape(config)) uint8; see
    stream_digits"""
    if kind in ("affine", "centered"):
        n, side = len(images), SIDES[config.task]
        if factors is None:
            factors = {name: rng.uniform(*bounds, n) for name, bounds in RANGES.items()}
        matrices = np.broadcast_to(affine_matrix(**factors), (n, 2, 2))
        canvases, _ = transform_digits(images, matrices, None if kind == "centered" else rng, side)
        return canvases
    if kind == "any_position":
        shift = None
    elif config.task == "mnist":
        shift = 0
    elif config.task == IMAGES and kind == "test":
        shift = 0
    else:
        shift = max_shift(config)
    return translate(images, shift, config, rng)


def training_rows(data, config):
    """Return the indices of --n-per-class training digits of each class, drawn by the seed, in
    order"""
    _, labels = data["train"]
    order = rng_for(config.seed, DATA, 1).permutation(len(labels))
    chosen = [order[labels[order] == label][:config.n_per_class]
              for label in range(config.n_classes)]
    if min(map(len, chosen)) < config.n_per_class:
        raise InputError(f"--n-per-class {config.n_per_class}: a class has fewer digits. Lower it")
    return np.sort(np.concatenate(chosen))


def endless_permutations(rows, rng):
    """Yield all of some rows in a random order, then again in another, without an end. rows: an
    array of them, or their number"""
    while True:
        yield from rng.permutation(rows)


def epoch_samples(data, epoch, config):
    """Yield the randomly translated training digits of one epoch in chunks of whole batches: images
    (n, *image_shape(config)) uint8, labels (n,) int64 and, with dropout, dropout_mask (n, units)
    float32, each entry 0 or 1 / (1 - dropout). Every digit appears once before any digit appears
    again."""
    images, labels = data["train"]
    known = training_rows(data, config) if config.n_per_class else len(labels)
    order = endless_permutations(known, rng_for(config.seed, BATCHES, epoch))
    size = max(1, CHUNK // config.batch_size) * config.batch_size
    for k, start in enumerate(range(0, config.n_train, size)):
        n = min(size, config.n_train - start)
        rows = np.fromiter(itertools.islice(order, n), np.int64)
        rng = rng_for(config.seed, BATCHES, epoch, k)
        samples = {
            "images": translate(images[rows], max_shift(config), config, rng),
            "labels": labels[rows].astype(np.int64)}
        if config.dropout:
            n_units = hidden_units(config.model, matched_width(config))[-1]
            kept = rng.random((n, n_units), np.float32) >= config.dropout
            samples["dropout_mask"] = kept / np.float32(1 - config.dropout)
        yield samples


def to_batch(samples, rows, dtype=np.float32):
    """Convert the given rows of a dict of samples to a batch: images in [0, 1] and dropout_mask, if
    any, of type dtype, and labels, (N,), if any."""
    batch = {name: array[rows] for name, array in samples.items()}
    batch["images"] = batch["images"].astype(dtype) / 255
    if "dropout_mask" in batch:
        batch["dropout_mask"] = batch["dropout_mask"].astype(dtype)
    return batch


LABELS_PER_IMAGE = 1               # for predict.py, as are image_shapes and prepare_images


def image_shapes(config):
    """Return the shapes of the images that prepare_images takes: of a canvas, and of a digit; of
    task images the only one, (H, W) or (H, W, C)"""
    if config.task == IMAGES:
        return (image_shape(config),)
    side = SIDES[config.task]
    return (side, side), (BOX, BOX)


def prepare_images(images, config):
    """Return images as forward takes them, (n, *image_shape(config)) float32 in [0, 1]. images:
    uint8 of that shape or, of digits, (n, 28, 28), which are placed at the center"""
    if config.task == IMAGES:
        return images.reshape(-1, *image_shape(config)) / np.float32(255)
    margin = (SIDES[config.task] - images.shape[1]) // 2
    return np.pad(images, ((0, 0), (margin, margin), (margin, margin))) / np.float32(255)


def read_affnist(folder):
    """Yield affNIST's own test digits, file by file, in dicts: images (n, 40, 40) uint8 and labels
    (n,) int64.
    folder: holds test_batches/1.mat, 2.mat, ... Raise InputError if files or SciPy are missing, or
    a file is damaged"""
    remedy = "Give a folder with test_batches, and SciPy"
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise InputError(f"--affnist-dir {folder}: {error}. {remedy}") from None
    where = Path(os.path.expanduser(folder), "test_batches")
    paths = sorted(where.glob("[0-9]*.mat"), key=lambda path: int(path.stem))
    for path in paths or [where / "1.mat"]:
        try:
            digits = loadmat(str(path), squeeze_me=True, struct_as_record=False)["affNISTdata"]
            images, labels = digits.image, np.atleast_1d(digits.label_int)
        except Exception as error:             # undocumented: what a damaged file makes SciPy raise
            fault = getattr(error, "strerror", None) or error
            raise InputError(f"--affnist-dir {folder}: {fault}. {remedy}") from None
        has_digits = images.dtype == np.uint8 and images.size == 1600 * len(labels) > 0
        if not has_digits or labels.min() < 0 or labels.max() > 9:
            raise InputError(f"--affnist-dir {folder}: {path.name} holds no digits. {remedy}")
        yield {"images": images.reshape(1600, -1).T.reshape(-1, 40, 40),
               "labels": labels.astype(np.int64)}


# ---------------------------------------------------------- the paper: capsules, routing, losses
# The axes of u_hat, b, c and their gradients are (N, J, I, ...): output capsule j comes before
# input capsule i. A forward function returns its output and a cache, which is what the backward
# function needs; the backward function returns the gradients of the forward function's arguments,
# in their order.

SQUASH_EPS = 1e-9                  # added inside the square root of a norm, so that a zero vector's
                                   # gradient is near 0, not 0/0


def squash_forward(s):
    """Squash the vectors s along the last axis to v = |s|^2 / (1 + |s|^2) * s / |s| (Sabour et al.
    2017, Eq. 1). The direction is kept, the length is below 1. Return v, with the shape of s, and a
    cache for squash_backward."""
    square = np.einsum("...d,...d->...", s, s)[..., None]                               # (..., 1)
    norm = np.sqrt(square + SQUASH_EPS)
    gain = norm / (1 + norm * norm)
    return s * gain, (s, norm, gain)


def squash_backward(dv, cache):
    """Return ds, with the shape of s. With q = |s|:
      ds = dv q / (1 + q^2) + s (s . dv) (1 - q^2) / (q (1 + q^2)^2)"""
    s, norm, gain = cache
    radial = np.einsum("...d,...d->...", s, dv)[..., None]                              # (..., 1)
    return dv * gain + s * (radial * ((1 - norm * norm) / (norm * (1 + norm * norm) ** 2)))


def votes_forward(u, W):
    """Compute the votes u_hat_j|i = W_ij u_i of all input capsules for all output capsules (Sabour
    et al. 2017, Eq. 2).

    u: input capsules, (N, I, E). W: transformation matrices, (B, E, J, D): one per capsule, B = I,
    or one for each of B types, with I ordered (position, type). W_ij is stored transposed, as
    (E, D), so that each type is one row-major GEMM (N*I/B, E) @ (E, J*D). Return u_hat,
    (N, J, I, D), and a cache for votes_backward."""
    N, I, E = u.shape
    B, _, J, D = W.shape
    u_hat = np.empty((N * I // B, B, J * D), u.dtype)
    by_type = u.reshape(-1, B, E).transpose(1, 0, 2)                                 # (B, N*I/B, E)
    np.matmul(by_type, W.reshape(B, E, J * D), out=u_hat.transpose(1, 0, 2))
    return u_hat.reshape(N, I, J, D).transpose(0, 2, 1, 3), (u, W)


def votes_backward(du_hat, cache):
    """Return du (N, I, E) and dW (B, E, J, D) from du_hat (N, J, I, D)."""
    u, W = cache
    B, E, J, D = W.shape
    du_hat = du_hat.transpose(0, 2, 1, 3).reshape(-1, B, J * D)                    # (N*I/B, B, J*D)
    du_hat = du_hat.transpose(1, 0, 2)                                             # (B, N*I/B, J*D)
    du = np.empty((u.size // (B * E), B, E), u.dtype)
    np.matmul(du_hat, W.reshape(B, E, J * D).transpose(0, 2, 1), out=du.transpose(1, 0, 2))
    dW = np.matmul(u.reshape(-1, B, E).transpose(1, 2, 0), du_hat)                     # (B, E, J*D)
    return du.reshape(u.shape), dW.reshape(W.shape)


def softmax_forward(b):
    """Compute the coupling coefficients c_ij = exp(b_ij) / sum_k exp(b_ik) (Sabour et al. 2017, Eq.
    3). b: routing logits, (N, J, I). The softmax runs over the output capsules, axis 1. Return c,
    (N, J, I)."""
    c = np.exp(b - b.max(1, keepdims=True))
    return c / c.sum(1, keepdims=True)


def softmax_backward(dc, c):
    """Return db from dc, both (N, J, I)."""
    return c * (dc - np.einsum("nji,nji->ni", c, dc)[:, None])


def routing_forward(u_hat, n_iters, squash_forward=squash_forward):
    """Compute the output capsules by dynamic routing (Sabour et al. 2017, Procedure 1).

    Each iteration sets the coupling coefficients c = softmax(b) over the output capsules (Eq. 3),
    sums the votes into s_j = sum_i c_ij u_hat_j|i (Eq. 2), squashes s_j to v_j (Eq. 1), and adds
    the agreement u_hat_j|i . v_j to the logits b_ij, which start at zero for every sample. The last
    iteration skips that update, which nothing would use.

    u_hat: votes, (N, J, I, D). n_iters: at least 1; 1 means uniform coupling coefficients.
    squash_forward: what computes v from s; --squash of affNIST can leave the squash out. Return v,
    (N, J, D), and a cache for routing_backward: u_hat and, of every iteration, c, v and the cache
    of the squash. c is (N, J, I), but (1, I) in the first iteration, where it is the same for all
    samples and output capsules."""
    N, J, I, D = u_hat.shape
    c = np.full((1, I), 1 / J, u_hat.dtype)
    s = np.matmul(c, u_hat.transpose(0, 2, 1, 3).reshape(N, I, J * D)).reshape(N, J, D)
    v, v_cache = squash_forward(s)
    steps = [(c, v, v_cache)]
    b = 0
    for _ in range(1, n_iters):
        b = b + np.matmul(u_hat, v[..., None])[..., 0]                                  # (N, J, I)
        c = softmax_forward(b)
        s = np.matmul(c[:, :, None, :], u_hat)[:, :, 0]                                 # (N, J, D)
        v, v_cache = squash_forward(s)
        steps.append((c, v, v_cache))
    return v, (u_hat, steps)


def routing_backward(dv, cache, squash_backward=squash_backward):
    """Return du_hat (N, J, I, D) from dv (N, J, D), through all routing iterations.
    squash_backward: of the forward pass's squash_forward.

    Each use of u_hat_j|i adds a coefficient times a D-dimensional direction to its gradient: c ds
    for a weighted sum, db v for an agreement. These T = 2 n_iters - 1 terms are collected, and
    du_hat is one batched product (I, T) @ (T, D) for every (n, j). db, (N, J, I), is a sum over the
    iterations, as the logits are: b_r is also in b_(r+1)."""
    u_hat, steps = cache
    N, J, I, D = u_hat.shape
    coefficients = []
    directions = []
    db = 0
    for r in reversed(range(len(steps))):
        c, _, v_cache = steps[r]
        ds = squash_backward(dv, v_cache)                                               # (N, J, D)
        coefficients.append(np.broadcast_to(c, (N, J, I)))
        directions.append(ds)
        if r > 0:                                           # in the first iteration c is a constant
            dc = np.matmul(u_hat, ds[..., None])[..., 0]                                # (N, J, I)
            db = db + softmax_backward(dc, c)                  # b_r = b_(r-1) + u_hat . v_(r-1)
            _, v_before, _ = steps[r - 1]
            coefficients.append(db)
            directions.append(v_before)
            dv = np.matmul(db[:, :, None], u_hat)[:, :, 0]                              # of v_(r-1)
    coefficients = np.stack(coefficients, 2).transpose(0, 1, 3, 2)                    # (N, J, I, T)
    directions = np.stack(directions, 2)                                              # (N, J, T, D)
    du_hat = np.empty_like(u_hat)                        # with its axes in the same order in memory
    return np.matmul(coefficients, directions, out=du_hat)


def lengths_forward(v):
    """Compute the lengths |v_j|, the probabilities that class j is present, (N, J), of v (N, J, D),
    and a cache."""
    lengths = np.sqrt(np.einsum("njd,njd->nj", v, v) + SQUASH_EPS)
    return lengths, (v, lengths)


def lengths_backward(dlengths, cache):
    """Return dv (N, J, D) from dlengths (N, J)."""
    v, lengths = cache
    return v * (dlengths / lengths)[..., None]


M_PLUS, M_MINUS, DOWN_WEIGHT = 0.9, 0.1, 0.5


def margin_loss(lengths, present):
    """Compute the margin loss (Sabour et al. 2017, Eq. 4), summed over the classes and averaged
    over the batch:
      L_k = T_k max(0, 0.9 - |v_k|)^2 + 0.5 (1 - T_k) max(0, |v_k| - 0.1)^2

    lengths: |v_k|, (N, J). present: T_k, (N, J), 1 for the classes in the image, 0 for the others.
    Return the loss, a float, and dlengths, (N, J)."""
    N = len(lengths)
    short = np.maximum(M_PLUS - lengths, 0)
    long = np.maximum(lengths - M_MINUS, 0)
    loss = present * short ** 2 + DOWN_WEIGHT * (1 - present) * long ** 2
    dlengths = 2 * DOWN_WEIGHT * (1 - present) * long - 2 * present * short
    return float(loss.sum()) / N, dlengths / N


def add_coordinates_forward(u, centers):
    """Append coordinates to each capsule, as two elements that are scaled by its length.

    u: vector capsules, (N, I, E), with I ordered (position, type); centers: x and y of the
    positions' receptive fields, (positions, 2). Return (N, I, E + 2) and a cache. Transformation
    matrices with two more rows then add learned multiples of the coordinates to the votes: a
    variant of the coordinate addition of Hinton et al. 2018, which adds them to two fixed elements.
    The scaling lets a capsule that sees nothing add nothing."""
    lengths, cache = lengths_forward(u)                                                 # (N, I)
    n_types = u.shape[1] // len(centers)
    positions = np.repeat(centers.astype(u.dtype), n_types, axis=0)                     # (I, 2)
    return np.concatenate([u, lengths[..., None] * positions], -1), (cache, positions)


def add_coordinates_backward(dout, cache):
    """Return du, (N, I, E), from dout, (N, I, E + 2)."""
    lengths_cache, positions = cache
    dlengths = np.einsum("nik,ik->ni", dout[..., -2:], positions)
    return dout[..., :-2] + lengths_backward(dlengths, lengths_cache)


def uniform_routing_forward(u, W):
    """Compute the weighted sums of the votes in one routing iteration, s (N, J, D), without
    computing the votes.

    With uniform coupling coefficients, 1/J, a transformation matrix can be applied after the sum
    over the n capsules that share it (Eq. 2): s_j = 1/J sum_t W_tj (u_t1 + ... + u_tn), with the n
    capsules of type t. u: primary capsules, (N, I, E), I = n * B ordered (position, type). W:
    (B, E, J, D); with one matrix per capsule, every capsule counts as a type: B = I, n = 1."""
    N, I, E = u.shape
    B, _, J, D = W.shape
    sums = u.reshape(N, I // B, B * E).sum(1)
    s = np.matmul(sums, W.reshape(B * E, J * D)) / J
    return s.reshape(N, J, D), (u.shape, sums, W)


def uniform_routing_backward(ds, cache):
    """Return the gradients du (N, I, E) and dW (B, E, J, D) for ds (N, J, D)."""
    (N, I, E), sums, W = cache
    B, _, J, D = W.shape
    ds = (ds / J).reshape(N, J * D)
    dsums = ds @ W.reshape(B * E, J * D).T                                              # (N, B*E)
    du = np.broadcast_to(dsums[:, None], (N, I // B, B * E)).reshape(N, I, E)
    return du, (sums.T @ ds).reshape(W.shape)


def reconstruction_loss(recon, target):
    """Compute the squared error of the reconstructions, summed over pixels and digits and averaged
    over the batch. recon, target: (N, R, H, W). Return the loss, a float, and drecon,
    (N, R, H, W)."""
    error = recon - target
    return float(np.vdot(error, error)) / len(recon), error * (2 / len(recon))

def cross_entropy(scores, labels):
    """Compute the cross-entropy loss, -log softmax(scores)[label], averaged over the batch.

    scores: (N, J); labels: (N,) int. Return the loss, a float, and dscores, (N, J)."""
    N, J = scores.shape
    log_p = scores - scores.max(1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    dscores = (np.exp(log_p) - np.eye(J, dtype=log_p.dtype)[labels]) / N
    return -float(log_p[np.arange(N), labels].sum()) / N, dscores


def classification_loss(out, batch, config):
    """Compute the classification loss: the margin loss on the lengths, or the cross-entropy of a
    CNN's logits or of the logarithms of lengths, p_j = |v_j| / sum_k |v_k|. out: the result of
    forward. batch: a dict with labels, (N,). Return the loss, a float, and dscores, (N, J)."""
    scores, labels = out["scores"], batch["labels"]
    if config.loss == "margin":
        return margin_loss(scores, np.eye(config.n_classes, dtype=scores.dtype)[labels])
    if config.model in CNNS:
        return cross_entropy(scores, labels)
    loss, dlogs = cross_entropy(np.log(scores), labels)
    return loss, dlogs / scores


def loss_name(config):
    """Return what the classification loss is called among the metrics"""
    return config.loss.replace("-", "_")


# -------------------------------------------------------------- the networks

E, D = 8, 16                       # dimensions of a primary and of a digit capsule
VOTE_SUM_GAIN = 16.0               # initial variance of the sum of a digit's votes / variance of
                                   # primary capsules
TYPES = {"deep": 16, "small": 8, "paper": 32}                  # of primary capsules, by --preset
DECODER = {"deep": (256, 512), "small": (256, 512), "paper": (512, 1024)}      # hidden units

# A convolution, in this order: valid, with F channels and a KxK kernel; a normalization or a bias;
# 2x2 max pooling if `pool`; a ReLU, but for PrimaryCaps.
Conv = collections.namedtuple("Conv", "name F K stride pool", defaults=(3, 1, False))


def convolutions(config):
    """Return the convolutions of a network. The last one of a capsule network is PrimaryCaps; in
    its place, networks of class vectors compute a vector per class and position"""
    return convolutions_of_width(config, matched_width(config))


def convolutions_of_width(config, width):
    """Return the convolutions of a network; width: of a CNN, see matched_width"""
    first = config.conv1_channels
    if config.model == "cnn":                               # in the paper 256, 256 and 128 channels
        return Conv("conv1", first, 5), Conv("conv2", first, 5), Conv("conv3", -(-first // 2), 5)
    n_types = TYPES[config.preset]
    if config.model == "capsnet" and config.preset != "deep":
        return Conv("conv1", first, 9), Conv("primary", n_types * E, 9, 2)
    conv5 = width if config.model in POOLED_CNNS else 128
    convs = (Conv("conv1", first), Conv("conv2", first, pool=True),
             Conv("conv3", 64), Conv("conv4", 64, pool=True),
             Conv("conv5", conv5))
    if config.model in ROUTED:
        return (*convs, Conv("primary", n_types * E, 1))
    if config.model in VECTORS:
        return (*convs, Conv("primary", config.n_classes * D, 1))
    return convs


def side_after(convs, side):
    """Return the side of the output of some convolutions, px, of an input whose side is `side`;
    below 1 if it is too small for them"""
    side_out, _, _ = field_grid(convs, side)
    return side_out


def field_grid(convs, side):
    """Return the side of the output of some convolutions, px, and where the centers of its
    receptive fields lie along an axis of their input, whose side is `side`: the first center and
    the distance of two, px"""
    first, distance = 0, 1
    for conv in convs:
        windows = [(conv.K, conv.stride)]
        if conv.pool:
            windows.append((2, 2))
        for K, stride in windows:
            side = (side - K) // stride + 1
            first += distance * (K - 1) / 2
            distance *= stride
    return side, first, distance


@functools.cache
def receptive_field_centers(config):
    """Return the centers (x, y) of the receptive fields of the last convolution, from -1 to 1 over
    the image without its padding, (positions, 2), row by row"""
    inner = image_side(config)
    side, first, distance = field_grid(convolutions(config), inner + 2 * config.padding)
    pixels = first - config.padding + distance * np.arange(side)           # in the image
    along = (pixels - (inner - 1) / 2) / (inner / 2)
    return np.stack([np.tile(along, side), np.repeat(along, side)], 1)


# How a parameter starts: normal, with this variance, or as a constant, whichever is not None
Parameter = collections.namedtuple("Parameter", "shape variance constant")


def constant(value, n):
    """Return the Parameter of n numbers that start at a value"""
    return Parameter((n,), None, value)


def normal(shape, gain, fan_in=None):
    """Return the Parameter of normal weights with variance gain / fan-in. fan_in: the number of
    inputs that are added up; None: all axes of the shape but the last"""
    if fan_in is None:
        fan_in = math.prod(shape[:-1])
    return Parameter(shape, gain / fan_in, None)


def dense_layers(name, units, fan_in=None):
    """Return {name: Parameter} of dense layers between these numbers of units, with ReLUs between
    them. The gain is 2 where a ReLU follows, else 1. fan_in: of the first layer, if not all of its
    inputs differ from 0"""
    table = {}
    n_layers = len(units) - 1
    for k in range(1, n_layers + 1):
        gain = 1 if k == n_layers else 2
        table[f"{name}{k}_w"] = normal(units[k - 1:k + 1], gain, fan_in if k == 1 else None)
        table[f"{name}{k}_b"] = constant(0, units[k])
    return table


def parameters(config):
    """Return {name: Parameter} of a network, in the order in which init_params draws them"""
    return parameters_of_width(config, matched_width(config))


def parameters_of_width(config, width):
    """Return {name: Parameter} of a network; width: of a CNN, see matched_width.

    The gain is 2 where a ReLU follows (He initialization; not PrimaryCaps), VOTE_SUM_GAIN for the
    transformation matrices, whose fan-in is all elements of all primary capsules, and 1
    elsewhere."""
    table = {}
    convs = convolutions_of_width(config, width)
    channels = config.channels
    for conv in convs:
        shape = (conv.K, conv.K, channels, conv.F)
        if conv.name == "conv1" and channels == 1:
            # im2col_rows has unrolled the rows of a window to channels
            shape = (1, conv.K, conv.K, conv.F)
        table[conv.name + "_w"] = normal(shape, 1 if conv.name == "primary" else 2)
        if config.norm == "batch":
            table[conv.name + "_norm_gamma"] = constant(1, conv.F)
            table[conv.name + "_norm_beta"] = constant(0, conv.F)
        else:
            table[conv.name + "_b"] = constant(0, conv.F)
        channels = conv.F
    J = config.n_classes
    side = side_after(convs, image_side(config) + 2 * config.padding)
    n_positions = side * side
    if config.model in ROUTED:
        n_types = TYPES[config.preset]
        n_matrices = n_types if config.model == "capsnet-shared" else n_types * n_positions
        n_elements = n_positions * n_types * E
        table["W"] = normal((n_matrices, E, J, D), VOTE_SUM_GAIN, fan_in=n_elements)
        if config.model == "capsnet-shared":
            table["coordinate_W"] = normal((2, J, D), VOTE_SUM_GAIN, fan_in=n_elements)
    elif config.model in CNNS:
        n_features = channels if config.model in POOLED_CNNS else channels * n_positions
        table |= dense_layers("fc", (n_features, *hidden_units(config.model, width), J))
    if config.recon_weight:
        first, second = DECODER[config.preset]
        n_pixels = math.prod(image_shape(config))              # and channels
        # All inputs but D are masked
        table |= dense_layers("dec", (J * D, first, second, n_pixels), fan_in=D)
    return table


def hidden_units(model, width):
    """Return the numbers of units of the hidden layers of a CNN, whose first one has `width`
    units"""
    if model == "cnn":
        return width, -(-width * 192 // 328)                   # in the paper 328 and 192
    if model == "cnn-dense":
        return (width,)
    return ()


@functools.cache
def matched_width(config):
    """Return the width at which a CNN has about as many parameters as the preset's capsule network
    without decoder: channels of Conv5 of POOLED_CNNS, which are matched to capsnet-shared, units of
    the first hidden layer of the others, which are matched to capsnet with their padding;
    config.width, where it is set; else 0"""
    if config.width or config.model not in CNNS:
        return config.width
    capsnet = dataclasses.replace(
        config, model="capsnet-shared" if config.model in POOLED_CNNS else "capsnet",
        conv1_channels=None, recon_weight=0.0)

    def size(width):
        return n_weights(parameters_of_width(config, width))

    target = n_weights(parameters_of_width(capsnet, 0))
    # The least width that has as many parameters or more: sizes rise with the width
    above = 1 + bisect_left(range(1, 65536), target, key=size)
    if above == 1:
        raise InputError("--conv1-channels: this CNN is larger than the capsule network. Lower it")
    if target - size(above - 1) <= abs(size(above) - target):
        return above - 1
    return above


def n_weights(table):
    """Return how many numbers the Parameters of a table have"""
    return sum(math.prod(p.shape) for p in table.values())


def param_shapes(config):
    """Return {name: shape} of the parameters of a network"""
    return {name: p.shape for name, p in parameters(config).items()}


def init_params(config):
    """Draw the initial parameters of a network: {name: float32 array}; see parameters_of_width"""
    rng = rng_for(config.seed, INIT)
    params = {}
    for name, p in parameters(config).items():
        if p.constant is None:
            noise = rng.standard_normal(p.shape, np.float32)
            params[name] = noise * np.float32(np.sqrt(p.variance))
        else:
            params[name] = np.full(p.shape, p.constant, np.float32)
    return params


def normalized_kernels(config):
    """Return the names of the kernels that are followed by a normalization"""
    if config.norm == "none":
        return []
    return [conv.name + "_w" for conv in convolutions(config)]

def loss_and_grads(params, batch, config, share=1.0):
    """Compute the losses and all gradients of a batch (see to_batch), or of one shard of it. Pure
    function.

    share: the shard's share of the samples in its batch. All losses and gradients are means over
    the shard times share, so that they add up to means over the batch.

    Return three dicts: terms, grads and statistics. terms:
      loss       what is minimized: margin + recon_weight * recon
      margin     the classification loss; cross_entropy in its place where that is --loss
      recon      the summed squared error; only with a decoder
      accuracy   the fraction of images that are correctly classified
    grads has the keys of params. statistics: the mean and the variance that each normalization
    used, {name: (C,)}."""
    labels = batch["labels"]
    statistics = {}
    dropout_mask = batch.get("dropout_mask")
    out, caches = forward(params, batch["images"], config, labels, statistics, dropout_mask)
    convs_cache, head_cache, decoder_cache = caches

    classification, dscores = classification_loss(out, batch, config)
    terms = {"loss": classification * share, loss_name(config): classification * share}
    grads = {}
    dv = 0
    if "recon" in out:
        recon, drecon = reconstruction_loss(out["recon"], batch["images"][:, None])
        terms["loss"] = (classification + config.recon_weight * recon) * share
        terms["recon"] = recon * share
        dv = decoder_backward(drecon * (config.recon_weight * share), decoder_cache, grads)
    terms["accuracy"] = (out["scores"].argmax(1) == labels).mean() * share

    _, head_backward = HEADS[config.model]
    dx = head_backward(dscores * share, dv, head_cache, config, grads)
    convolutions_backward(dx, convs_cache, grads)
    return terms, grads, statistics


def forward(params, images, config, digits=None, statistics=None, dropout_mask=None):
    """Compute the outputs of the network and a cache for backward.

    images: (N, *image_shape(config)), pixel values in [0, 1]. digits: (N,), whose capsules are
    decoded; None for the longest. statistics: a dict in training, which receives the mean and
    variance of each normalization; None in evaluation, which uses the running ones in params.
    dropout_mask: (N, units), of a CNN in training.

    Return out and the caches of convolutions, head and decoder. out is a dict of
      scores  (N, J), by which classes are predicted: the lengths of the class vectors; of a CNN
              logits
      v       class vectors, (N, J, D): digit capsules or, of vector-gap and vector-gmp, vectors;
              not of a CNN
      recon   the reconstruction, (N, 1, *image_shape(config)); only with a decoder
      u       primary capsules, (N, I, E), with I in the order (row, column, type); only of capsnet
              and capsnet-shared
    """
    head_forward, _ = HEADS[config.model]
    x, convs_cache = convolutions_forward(params, images, config, statistics)   # (N, side, side, C)
    out, head_cache = head_forward(params, x, config, dropout_mask)
    decoder_cache = None
    if config.recon_weight:
        if digits is None:
            digits = out["scores"].argmax(1)
        out["recon"], decoder_cache = decoder_forward(params, out["v"], digits[:, None],
                                                      config.channels)
    return out, (convs_cache, head_cache, decoder_cache)


def convolutions_forward(params, images, config, statistics):
    """Pad the images and compute all convolutions (see Conv), with rows first, as layers have it
    (see conv2d_forward). Return x (N, side, side, C) and a
    cache: for each convolution the Conv, the caches of its parts and its output. statistics: see
    forward"""
    x = padded_input(params, images, config)                                          # (H, N, W, C)
    caches = []
    for conv in convolutions(config):
        x, conv_cache = conv2d_forward(x, params[conv.name + "_w"], conv.stride)
        norm_cache = pool_cache = None
        if config.norm == "batch":
            x, norm_cache = conv_norm_forward(params, x, conv.name + "_norm", statistics)
        else:
            x += params[conv.name + "_b"]
        if conv.pool:
            x, pool_cache = max_pool_forward(x)
        if conv.name != "primary":
            np.maximum(x, 0, out=x)    # in place: y of pool_cache changes, which it may
        caches.append((conv, conv_cache, norm_cache, pool_cache, x))
    return x.swapaxes(0, 1), caches                                             # (N, side, side, C)


def padded_input(params, images, config):
    """Return images with their padding as the first convolution takes them, (H, N, W, C). Of one
    channel its C are the rows under a kernel, see im2col_rows"""
    margin = config.padding, config.padding
    if config.channels == 1:
        padded = np.pad(images, ((0, 0), margin, margin))
        return im2col_rows(padded, params["conv1_w"].shape[1])
    padded = np.pad(images, ((0, 0), margin, margin, (0, 0)))
    return np.ascontiguousarray(padded.swapaxes(0, 1))


def conv_norm_forward(params, x, name, statistics):
    """Compute the normalization of this name; statistics: see forward. Return y and a cache"""
    running = None
    if statistics is None:
        running = params[name + "_mean"], params[name + "_var"]
    y, found, cache = norm_forward(x, params[name + "_gamma"], params[name + "_beta"], running)
    if statistics is not None:
        statistics[name + "_mean"], statistics[name + "_var"] = found
    return y, cache

def convolutions_backward(dx, caches, grads, need_dx=False):
    """Put the gradients of all convolutions into grads. dx: (N, side, side, C). Return the gradient
    with respect to padded_input's output, or None unless needed"""
    dx = dx.swapaxes(0, 1)                                                            # (H, N, W, C)
    for conv, conv_cache, norm_cache, pool_cache, y in reversed(caches):
        if conv.name != "primary":
            dx = dx * (y > 0)
        if conv.pool:
            dx = max_pool_backward(dx, pool_cache)
        if norm_cache is None:
            grads[conv.name + "_b"] = dx.reshape(-1, conv.F).sum(0)
        else:
            dx, dgamma, dbeta = norm_backward(dx, norm_cache)
            grads[conv.name + "_norm_gamma"] = dgamma
            grads[conv.name + "_norm_beta"] = dbeta
        is_first = conv.name == "conv1"
        dx, grads[conv.name + "_w"] = conv2d_backward(dx, conv_cache, need_dx or not is_first)
    return dx


def recompute_statistics(state, data, config, n):
    """Return the statistics of all normalizations over up to n training samples (precise batch
    normalization), {name: array}: layer by layer, so that each layer sees what those before it
    compute in evaluation.

    In some long runs the running statistics, gathered while earlier layers used those of 16
    samples, do not fit."""
    chunk = next(iter(epoch_samples(data, config.n_epochs, config)))     # training has not seen it
    rows = np.arange(len(chunk["labels"]))[:n]
    statistics = {}
    convolutions_forward(weights_of(state), to_batch(chunk, rows)["images"], config, statistics)
    return statistics

# Heads. Each computes out (see forward) from x (N, side, side, C); its backward function returns dx
# and puts the gradients of its parameters into grads. dropout_mask: only of CNNs, in training. dv:
# the decoder's gradient, or 0.

def same_forward(s):
    """Return s, and no cache: what takes the place of a squash"""
    return s, None


def same_backward(dv, cache):
    return dv


def relu_forward(s):
    """Return max(s, 0) and a cache"""
    return np.maximum(s, 0), s


def relu_backward(dv, s):
    return dv * (s > 0)


SQUASH = squash_forward, squash_backward
PLAIN = same_forward, same_backward
RELU = relu_forward, relu_backward
SQUASHES = {                       # by --squash: (forward, backward) of primary, of class capsules
    "all": (SQUASH, SQUASH),
    "last": (PLAIN, SQUASH),
    "none": (PLAIN, PLAIN),
    "relu": (RELU, PLAIN)}


def capsnet_head_forward(params, x, config, dropout_mask):
    """Compute primary and digit capsules. x: the output of PrimaryCaps before the squash."""
    (primary_squash, _), (class_squash, _) = SQUASHES[config.squash]
    u, squash_cache = primary_squash(x.reshape(len(x), -1, E))                          # (N, I, E)
    inputs, W, coordinates_cache = u, params["W"], None
    if config.model == "capsnet-shared":                       # coordinates are two elements more
        centers = receptive_field_centers(config)
        inputs, coordinates_cache = add_coordinates_forward(u, centers)              # (N, I, E + 2)
        coordinate_W = np.stack([params["coordinate_W"]] * len(W))
        W = np.concatenate([W, coordinate_W], 1)                                  # (B, E + 2, J, D)
    if config.routing_iters == 1:
        s, votes_cache = uniform_routing_forward(inputs, W)
        v, routing_cache = class_squash(s)                                              # (N, J, D)
    else:
        u_hat, votes_cache = votes_forward(inputs, W)                                 # (N, J, I, D)
        v, routing_cache = routing_forward(u_hat, config.routing_iters, class_squash)   # (N, J, D)
    lengths, lengths_cache = lengths_forward(v)                                         # (N, J)
    cache = x.shape, squash_cache, coordinates_cache, votes_cache, routing_cache, lengths_cache
    return {"scores": lengths, "v": v, "u": u}, cache


def capsnet_head_backward(dscores, dv, cache, config, grads):
    shape, squash_cache, coordinates_cache, votes_cache, routing_cache, lengths_cache = cache
    (_, primary_squash_backward), (_, class_squash_backward) = SQUASHES[config.squash]
    dv = dv + lengths_backward(dscores, lengths_cache)
    if config.routing_iters == 1:
        ds = class_squash_backward(dv, routing_cache)
        du, dW = uniform_routing_backward(ds, votes_cache)
    else:
        du_hat = routing_backward(dv, routing_cache, class_squash_backward)
        du, dW = votes_backward(du_hat, votes_cache)
    grads["W"] = dW[:, :E]
    if config.model == "capsnet-shared":
        grads["coordinate_W"] = dW[:, E:].sum(0)
        du = add_coordinates_backward(du, coordinates_cache)
    return primary_squash_backward(du, squash_cache).reshape(shape)


def pooled_vectors_head_forward(params, x, config, dropout_mask):
    """A vector per class and position is averaged over the positions, or its maximum is taken, and
    squashed."""
    _, (class_squash, _) = SQUASHES[config.squash]
    pooled, pool_cache = features_forward(x, config)                                    # (N, J*D)
    v, squash_cache = class_squash(pooled.reshape(len(x), -1, D))
    lengths, lengths_cache = lengths_forward(v)
    return {"scores": lengths, "v": v}, (pool_cache, squash_cache, lengths_cache)


def pooled_vectors_head_backward(dscores, dv, cache, config, grads):
    pool_cache, squash_cache, lengths_cache = cache
    _, (_, class_squash_backward) = SQUASHES[config.squash]
    dv = dv + lengths_backward(dscores, lengths_cache)
    ds = class_squash_backward(dv, squash_cache)
    return features_backward(ds.reshape(len(ds), -1), pool_cache)


N_DENSE = {"cnn": 3, "cnn-dense": 2, "cnn-gap": 1, "cnn-gmp": 1}           # dense layers


def cnn_head_forward(params, x, config, dropout_mask):
    """Dense layers, with ReLUs between them and, in training, dropout before the last one."""
    y, features_cache = features_forward(x, config)
    caches = []
    gate = 1                               # what the ReLU and dropout before a layer multiply with
    last = N_DENSE[config.model]
    for k in range(1, last + 1):
        y, cache = linear_forward(y * gate, params[f"fc{k}_w"], params[f"fc{k}_b"])
        caches.append((k, gate, cache))
        gate = y > 0
        if dropout_mask is not None and k == last - 1:
            gate = gate * dropout_mask
    return {"scores": y}, (features_cache, caches)


def cnn_head_backward(dscores, dv, cache, config, grads):
    features_cache, caches = cache
    dy = dscores
    for k, gate, linear_cache in reversed(caches):
        dy, grads[f"fc{k}_w"], grads[f"fc{k}_b"] = linear_backward(dy, linear_cache)
        dy = dy * gate
    return features_backward(dy, features_cache)


CAPSNET_HEAD = capsnet_head_forward, capsnet_head_backward
POOLED_HEAD = pooled_vectors_head_forward, pooled_vectors_head_backward
CNN_HEAD = cnn_head_forward, cnn_head_backward
HEADS = {                          # by --model
    **dict.fromkeys(ROUTED, CAPSNET_HEAD),
    **dict.fromkeys(VECTORS, POOLED_HEAD),
    **dict.fromkeys(CNNS, CNN_HEAD)}


def features_forward(x, config):
    """Return the features (N, C) that a head sees, and a cache: the mean of each channel over all
    positions (-gap), its maximum (-gmp), or, of other models, all entries of x (N, H, W, C)."""
    N, H, W, C = x.shape
    rows = x.reshape(N, H * W, C)
    if config.model.endswith("gap"):
        shares = np.full_like(rows, 1 / (H * W))
    elif config.model.endswith("gmp"):                         # 1 for the first maximum, else 0
        is_maximum = np.arange(H * W)[:, None] == rows.argmax(1)[:, None]
        shares = is_maximum.astype(x.dtype)
    else:
        return x.reshape(N, H * W * C), (x.shape, None)
    return (rows * shares).sum(1), (x.shape, shares)


def features_backward(dy, cache):
    """Return dx (N, H, W, C) from dy (N, C)."""
    shape, shares = cache
    if shares is not None:
        dy = dy[:, None] * shares
    return dy.reshape(shape)


def sigmoid(x):
    """Compute 1 / (1 + exp(-x)), by tanh so that it cannot overflow"""
    return 0.5 * np.tanh(0.5 * x) + 0.5


def decoder_forward(params, v, digits, channels=1):
    """Reconstruct each of digits (N, R) from its vector in v (N, J, D), the others masked. Return
    the reconstructions, (N, R, side, side) or, of several channels, (N, R, side, side, channels),
    and a cache"""
    N, J, D = v.shape
    kept = np.eye(J, dtype=v.dtype)[digits][..., None]                                # (N, R, J, 1)
    masked = (v[:, None] * kept).reshape(-1, J * D)                                     # (N*R, J*D)
    y1, cache1 = linear_forward(masked, params["dec1_w"], params["dec1_b"])
    y1 = np.maximum(y1, 0)
    y2, cache2 = linear_forward(y1, params["dec2_w"], params["dec2_b"])
    y2 = np.maximum(y2, 0)
    y3, cache3 = linear_forward(y2, params["dec3_w"], params["dec3_b"])
    y3 = sigmoid(y3)                                                      # (N*R, pixels * channels)
    side = math.isqrt(y3.shape[1] // channels)
    shape = (side, side) if channels == 1 else (side, side, channels)
    return y3.reshape(*digits.shape, *shape), (kept, cache1, y1, cache2, y2, cache3, y3)


def decoder_backward(drecon, cache, grads):
    """Return dv (N, J, D), and put the gradients of the decoder's parameters into grads."""
    kept, cache1, y1, cache2, y2, cache3, y3 = cache
    N, R, J, _ = kept.shape
    dy3 = drecon.reshape(y3.shape) * y3 * (1 - y3)
    dy2, grads["dec3_w"], grads["dec3_b"] = linear_backward(dy3, cache3)
    dy1, grads["dec2_w"], grads["dec2_b"] = linear_backward(dy2 * (y2 > 0), cache2)
    dmasked, grads["dec1_w"], grads["dec1_b"] = linear_backward(dy1 * (y1 > 0), cache1)
    return (dmasked.reshape(N, R, J, -1) * kept).sum(1)


# -------------------------------------------------------------- optimizers

def optimizer_step(state, shard_grads, rate, config, workers):
    """Update all parameters in place: the kernels of normalized convolutions by Muon, the others by
    Adam; without --muon, Adam updates all. shard_grads: list of gradient dicts, which are added up.
    rate: the schedule's factor."""
    params, m, v = state["params"], state["adam_m"], state["adam_v"]
    step = state["step"] + 1
    kernels = normalized_kernels(config) if config.muon > 0 else []
    others = {name: p for name, p in params.items() if name not in kernels}
    muon_step(params, shard_grads, m, kernels, config.muon * rate, workers)
    adam_step(others, shard_grads, m, v, step, config.lr * rate, workers)
    if step % 500 == 0:           # moments of weights without a gradient decay to denormal numbers,
        for moments in m, v:       # which are slow
            for a in moments.values():
                a[np.abs(a) < 1e-35] = 0


def schedule(config, step, n_steps):
    """Return the fraction of the full learning rate at a step, counting from 0"""
    decay = 1
    if config.lr_schedule == "cosine":
        decay = 0.5 * (1 + math.cos(math.pi * step / n_steps))
    return decay * min(1, (step + 1) / max(1, config.warmup))


BETA1, BETA2, ADAM_EPS, ADAM_CHUNK = 0.9, 0.999, 1e-8, 1 << 17


def adam_step(params, shard_grads, adam_m, adam_v, step, lr, workers):
    """Do one step of Adam in place, with step counting from 1; the gradient is the sum of
    shard_grads, in their order.

    p -= lr m_hat / (sqrt(v_hat) + eps), with m_hat and v_hat the bias-corrected moving averages of
    the gradient and of its square. These are kept as sums, adam_m = m / (1 - beta1) and adam_v = v
    / (1 - beta2), and all factors are combined into two numbers: 11 passes over memory instead of
    16. The passes run over chunks that fit into the cache, shared among the threads; each value is
    computed by itself, so the bits do not depend on the threads."""
    root = float(np.sqrt((1 - BETA2) / (1 - BETA2 ** step)))       # sqrt(v_hat) = root sqrt(adam_v)
    rate = float(lr * (1 - BETA1) / (1 - BETA1 ** step) / root)
    eps = ADAM_EPS / root

    def update(chunks):
        for name, start in chunks:
            part = slice(start, start + ADAM_CHUNK)
            p, m, v = (as_view(arrays[name], -1)[part] for arrays in (params, adam_m, adam_v))
            first, *others = (grads[name].reshape(-1)[part] for grads in shard_grads)
            g = sum(others, first)
            m *= BETA1
            m += g
            v *= BETA2
            v += g * g
            p -= m / (np.sqrt(v) + eps) * rate

    chunks = [(name, start) for name in params for start in range(0, params[name].size, ADAM_CHUNK)]
    list(workers.map(update, [chunks[k::4] for k in range(4)]))


def as_view(array, *shape):
    """Return an array in another shape, to write into: never a copy"""
    view = array.reshape(shape)
    assert np.may_share_memory(view, array), "this reshape copies"
    return view


MUON_BETA, MUON_ITERS = 0.95, 5
MUON_POLYNOMIAL = 3.4445, -4.7750, 2.0315          # Jordan et al. 2024: steep at 0, so that few
                                                   # iterations suffice


def orthogonalize(g):
    """Approximate U V^T of the matrix g = U S V^T, (C, F), by Newton-Schulz iteration.

    X <- P X with P = a + b G + c G^2 and G = X X^T, starting from X = g / |g|. Singular values of
    the result are between 0.68 and 1.21, except where those of g are below |g| / 500. Only the
    small square matrix G is iterated, G <- P G P, and the product of all P is multiplied with the
    long X once: 2 to 6 times as fast."""
    if len(g) > g.shape[1]:
        return orthogonalize(g.T).T
    a, b, c = MUON_POLYNOMIAL
    x = g / (np.linalg.norm(g) + g.dtype.type(1e-12))
    gram = x @ x.T
    product = np.eye(len(x), dtype=x.dtype)
    for _ in range(MUON_ITERS):
        factor = b * gram + c * (gram @ gram)
        factor[np.diag_indices(len(x))] += a
        product = factor @ product
        gram = factor @ gram @ factor
    return product @ x


def muon_step(params, shard_grads, momentum, names, relative_step, workers):
    """Take one step of Muon (Jordan et al. 2024), in place, for the kernels `names`.

    The gradient g is the sum of shard_grads, the momentum m = 0.95 m + g. A kernel moves against
    orthogonalize(g + 0.95 m), by `relative_step` times its norm, and is then rescaled to its
    previous norm: a normalization follows the convolution, so that only the kernel's direction
    matters."""
    def update(name):
        n_outputs = params[name].shape[-1]
        w = as_view(params[name], -1, n_outputs)
        m = as_view(momentum[name], -1, n_outputs)
        first, *others = (grads[name].reshape(-1, n_outputs) for grads in shard_grads)
        g = sum(others, first)
        m *= MUON_BETA
        m += g
        u = orthogonalize(g + MUON_BETA * m)
        norm = np.linalg.norm(w)
        w -= u * (relative_step * norm / (np.linalg.norm(u) + u.dtype.type(1e-12)))
        w *= norm / np.linalg.norm(w)
    list(workers.map(update, names))


def update_running_statistics(running, shard_statistics, step):
    """Update running means and variances in place with the statistics of some shards, in order. A
    shard's weight is 9 / (step + 9), later 0.01, so that initial values and those of young weights
    are soon forgotten."""
    weight = 1 - min(0.99, step / (step + 9))
    for statistics in shard_statistics:
        for name, found in statistics.items():
            running[name] += (found - running[name]) * weight


# -------------------------------------------------------------- layers
# x and y are activations, (H, N, W, C) or (N, C). The row axis comes first, so that a band of rows,
# of all images, is contiguous.

def im2col_rows(x, K):
    """Return K shifted copies of the rows of one-channel images x (N, H, W) as channels,
    (H-K+1, N, W, K).

    With them, a KxK convolution of one channel is a 1xK convolution of K channels: one GEMM with an
    inner dimension of K*K instead of K GEMMs with an inner dimension of K."""
    return np.ascontiguousarray(sliding_window_view(x.swapaxes(0, 1), K, axis=0))


def im2col(x, width, stride):
    """Return windows along the rows of x (H, N, W, C), a list of `stride` arrays
    (ceil((H-p)/stride), N, Wo, width*C):
      cols[p][r, n, ox] = x[stride*r + p, n, stride*ox:stride*ox + width]

    A full im2col copies every pixel K*K times, this one K times: the kernel's rows become K matrix
    products on bands of image rows, which are contiguous because rows of each parity p have an
    array of their own."""
    H, N, W, C = x.shape
    windows = sliding_window_view(x.reshape(H, N, W * C), width * C, axis=2)
    windows = windows[:, :, ::stride * C]                                      # (H, N, Wo, width*C)
    return [np.ascontiguousarray(windows[p::stride]) for p in range(stride)]


def col2im(dcols, shape, width, stride):
    """Adjoint of im2col: add every window's entries to the pixels they were copied from. Return dx
    of `shape` (H, N, W, C)"""
    H, N, W, C = shape
    dx = np.zeros((H, N, W * C), dcols[0].dtype)
    for p, part in enumerate(dcols):
        for ox in range(part.shape[2]):
            first = ox * stride * C
            dx[p::stride, :, first:first + width * C] += part[:, :, ox]
    return dx.reshape(shape)


def im2col_band(cols, ky, stride, Ho):
    """Return the rows of im2col's cols that kernel row ky sees, as one matrix (Ho*N*Wo, width*C): a
    view"""
    top = ky // stride
    band = cols[ky % stride][top:top + Ho]
    return as_view(band, -1, band.shape[-1])


def conv2d_forward(x, w, stride):
    """Compute a valid convolution without a bias. x (H, N, W, C), w (Kh, Kw, C, F). Return y
    (Ho, N, Wo, F) and a cache."""
    Kh, Kw, C, F = w.shape
    Ho = (len(x) - Kh) // stride + 1
    cols = im2col(x, Kw, stride)
    kernel_rows = w.reshape(Kh, Kw * C, F)
    y = im2col_band(cols, 0, stride, Ho) @ kernel_rows[0]                             # (Ho*N*Wo, F)
    for ky in range(1, Kh):
        add_product(im2col_band(cols, ky, stride, Ho), kernel_rows[ky], y)
    _, N, Wo, _ = cols[0].shape
    return y.reshape(Ho, N, Wo, F), (x.shape, cols, w, stride)


def conv2d_backward(dy, cache, need_dx=True):
    """Return dx, or None unless needed, and dw for dy (Ho, N, Wo, F)"""
    shape, cols, w, stride = cache
    Kh, Kw, C, F = w.shape
    Ho = len(dy)
    dy = np.ascontiguousarray(dy).reshape(-1, F)                                      # (Ho*N*Wo, F)
    dw = np.stack([im2col_band(cols, ky, stride, Ho).T @ dy for ky in range(Kh)]).reshape(w.shape)
    if not need_dx:
        return None, dw
    kernel_rows = w.reshape(Kh, Kw * C, F)
    dcols = [np.zeros_like(part) for part in cols]
    for ky in range(Kh):
        add_product(dy, kernel_rows[ky].T, im2col_band(dcols, ky, stride, Ho))
    return col2im(dcols, shape, Kw, stride), dw


def add_product(a, b, out):
    """Compute out += a @ b. With NumPy's OpenBLAS in one pass over memory instead of three:
    without, a step takes 1.05 to 1.2 times as long"""
    if sgemm() is None or {x.dtype for x in (a, b, out)} != {np.dtype(np.float32)}:
        out += a @ b
        return
    assert a.flags.c_contiguous and out.flags.c_contiguous, "sgemm gets their addresses"
    (M, K), F = a.shape, b.shape[1]
    row_major, as_it_is, transposed = 101, 111, 112            # names of CBLAS
    order_of_b, step_of_b = as_it_is, F
    if not b.flags.c_contiguous:
        assert b.T.flags.c_contiguous, "sgemm takes b in rows or in columns"
        order_of_b, step_of_b = transposed, K
    sgemm()(row_major, as_it_is, order_of_b, M, F, K, 1, a.ctypes.data, K, b.ctypes.data, step_of_b,
            1, out.ctypes.data, F)


@functools.cache
def sgemm():
    """Return cblas_sgemm of NumPy's OpenBLAS, or None if NumPy has another BLAS"""
    function = getattr(openblas(), "scipy_cblas_sgemm64_", None)
    if function is not None:
        enum, size, real, address = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
        function.argtypes = [enum, enum, enum, size, size, size, real, address, size, address, size,
                             real, address, size]
    return function


def linear_forward(x, w, b):
    """Compute y = x w + b. x (N, C), w (C, F), b (F,). Return y (N, F) and a cache"""
    return x @ w + b, (x, w)


def linear_backward(dy, cache):
    """Return dx, dw, db for dy (N, F)"""
    x, w = cache
    return dy @ w.T, x.T @ dy, dy.sum(0)


NORM_EPS = 1e-5                    # inside the square root of a standard deviation


def norm_forward(x, gamma, beta, running=None):
    """Batch normalization (Ioffe & Szegedy 2015), per channel:
      y = gamma (x - mean) / sqrt(variance + eps) + beta

    x (H, N, W, C), gamma, beta (C,). running: the (mean, variance) to use in evaluation; in
    training, without it, those of x over samples and positions. Return y, (mean, variance) and a
    cache. The variance that is returned, for the running statistics, is unbiased: n / (n - 1) times
    the one used, with n values per channel. All passes run over rows of W*C values, since loops
    over C alone, often 16, would be too short to be fast."""
    _, _, W, C = x.shape
    n = x.size // C
    rows = x.reshape(-1, W * C)
    if running is None:
        sums = np.matmul(np.ones((1, len(rows)), x.dtype), rows).reshape(W, C).sum(0)
        squares = np.einsum("rc,rc->c", rows, rows).reshape(W, C).sum(0)
        mean = sums / n
        variance = np.maximum(squares / n - mean * mean, 0)
    else:
        mean, variance = running
    inv_std = 1 / np.sqrt(variance + x.dtype.type(NORM_EPS))
    y = rows * np.tile(gamma * inv_std, W)
    y += np.tile(beta - mean * gamma * inv_std, W)
    unbiased = variance * (n / max(1, n - 1))
    return y.reshape(x.shape), (mean, unbiased), (rows, gamma, mean, inv_std)


def norm_backward(dy, cache):
    """Return dx, dgamma, dbeta for dy, for a forward pass with batch statistics. With
    xhat = (x - mean) / std:
      dx = gamma / std (dy - mean(dy) - xhat mean(dy xhat))"""
    x, gamma, mean, inv_std = cache
    _, _, W, C = dy.shape
    n = dy.size // C
    rows = dy.reshape(-1, W * C)
    dbeta = np.matmul(np.ones((1, len(rows)), dy.dtype), rows).reshape(W, C).sum(0)
    products = np.einsum("rc,rc->c", rows, x).reshape(W, C).sum(0)
    dgamma = inv_std * (products - mean * dbeta)
    per_dy = gamma * inv_std
    per_x = -gamma * inv_std * inv_std * dgamma / n
    dx = x * np.tile(per_x, W)
    dx += np.tile(-per_x * mean - per_dy * dbeta / n, W)
    dx += rows * np.tile(per_dy, W)
    return dx.reshape(dy.shape), dgamma, dbeta


def max_pool_forward(x):
    """2x2 max pooling; an odd last row or column is dropped. x (H, N, W, C). Return y
    (H//2, N, W//2, C) and a cache, which holds y, too. A ReLU, but nothing else, may then be
    applied to y in place."""
    y = functools.reduce(np.maximum, window_corners(x))
    return y, (x, y)


def max_pool_backward(dy, cache):
    """Return dx. The first entry equal to its window's maximum gets the gradient, since on a blank
    background all four are equal. Where a ReLU that was applied to y in place (see
    max_pool_forward) made y 0, dy is 0, and so is dx."""
    x, y = cache
    dx = np.zeros_like(x)
    left = dy.copy()
    for corner, dcorner in zip(window_corners(x), window_corners(dx)):
        np.multiply(corner == y, left, out=dcorner)            # window_corners are views
        left -= dcorner
    return dx


def window_corners(x):
    """Return the four pixels of each 2x2 window as views. x (H, N, W, C) -> four arrays
    (H//2, N, W//2, C)"""
    H = x.shape[0] // 2 * 2
    W = x.shape[2] // 2 * 2
    return [x[i:H:2, :, j:W:2] for i in (0, 1) for j in (0, 1)]


# -------------------------------------------------------------- files of digits, synthetic digits

def write_file(path, content):
    """Write bytes under another name, then rename the file, so that it is written whole or not at
    all. content None: only raise InputError if the file could not be written"""
    path = Path(os.path.realpath(path))                        # a link is followed, not replaced
    aside = Path(f"{path}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise OSError(0, "is a folder or a device")
        aside.write_bytes(content or b"")
        if content is not None:
            aside.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}. Make it writable, with room, and "
                         "give the command again; or name another place") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def check_writable(path):
    """Raise InputError if a file could not be written"""
    write_file(path, None)


MNIST = {                          # file name: SHA-256 of the decompressed bytes
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"}
# EMNIST in a name, also as E-MNIST at the start of a word
EMNIST_NAME = re.compile(r"emnist|(?<![^\W_])" + r"[\W_]*".join("emnist"), re.IGNORECASE)
MIRRORS = ("https://storage.googleapis.com/cvdf-datasets/mnist/",
           "https://ossci-datasets.s3.amazonaws.com/mnist/")
N_SYNTHETIC = {"train": 20000, "val": 2500, "test": 5000}
DIGIT_NAMES = {                    # of the source of digits, in all output and figures
    "mnist": "MNIST digits",
    "synthetic": "SYNTHETIC digits"}


def load_data(config, download=True):
    """Load MNIST, another data set of --data-dir, or synthetic digits in their place.

    Digits "auto": synthetic digits replace MNIST, with a notice, where it cannot be had.
    download=False: do not download it. Return a dict of
      source            "mnist", "synthetic" or another data set's name
      train, val, test  (images, labels) each: (n, 28, 28) and (n,), both uint8; of task images
                        also (n, side, side) or (n, side, side, channels)
      n_classes         only of other data
      names             of the classes, only of other data with a file labels.txt"""
    if config.affnist_dir:                                     # refused now, not after the training
        next(read_affnist(config.affnist_dir))
    if config.task == IMAGES and not config.data_dir and config.digits == "auto":
        raise InputError("--task images: give the folder of your images as --data-dir, or train on "
                         "digits as images: --digits mnist")
    if config.data_dir or config.digits != "synthetic":
        given = "" if config.data_dir else os.environ.get("MNIST_DIR", "")
        try:
            return read_idx_folder(config.data_dir or given or download_mnist(download))
        except InputError as error:
            if not given:
                raise
            raise InputError(f"the environment variable MNIST_DIR: {error}"
                             + advice_on_path(given)) from None
        except ConnectionError as error:
            if config.digits == "mnist":
                raise InputError(f"{error}. Give its folder as --data-dir, or use "
                                 "--digits synthetic") from None
            print("!!  NO MNIST HERE: these are SYNTHETIC digits. Numbers are not comparable with "
                  f"MNIST's.\n!!  {error}. Give its folder as --data-dir",
                  file=sys.stderr, flush=True)
    images, labels, _ = synthesize_digits(sum(N_SYNTHETIC.values()), config.seed)
    data = {"source": "synthetic"}
    start = 0
    for split, n in N_SYNTHETIC.items():
        data[split] = images[start:start + n], labels[start:start + n]
        start += n
    return data


def advice_on_path(path):
    """Return how to mend a path that a shell should have read and did not, "" of another"""
    if "$" in path or "'" in path or '"' in path:
        return ". It has quotes or a $: set it to the path alone"
    return ""


def download_mnist(download):
    """Return the cache's folder, after downloading those of MNIST's files that it lacks. Raise
    ConnectionError if it still lacks one: no mirror has it, or download is False"""
    folder = Path(os.path.expanduser("~/.cache/hinton-mnist"))
    for name, digest in MNIST.items():
        path = folder / (name + ".gz")
        if not path.exists() and not (folder / name).exists():
            if not download:
                raise ConnectionError("MNIST is not on this machine")
            write_file(path, from_a_mirror(path.name, digest))
    return folder


def from_a_mirror(name, digest):
    """Return the bytes of a file of MNIST, which is compressed. digest: the SHA-256 of its
    decompressed bytes. Raise ConnectionError if no mirror has it"""
    fault = "MNIST is not on this machine"
    for mirror in MIRRORS:
        try:
            raw = urllib.request.urlopen(mirror + name, timeout=10).read()
            if hashlib.sha256(gzip.decompress(raw)).hexdigest() == digest:
                return raw
        except (OSError, EOFError, zlib.error, http.client.HTTPException) as error:
            fault = f"MNIST could not be downloaded: {str(error).split('. ')[0]}".strip()
    raise ConnectionError(fault)


def read_idx(path):
    """Return the array of an idx file of uint8 values, raw or .gz, and the SHA-256 of its
    decompressed bytes"""
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        n_axes = raw[3]
        shape = np.frombuffer(raw, ">u4", n_axes, 4)
        array = np.frombuffer(raw, np.uint8, offset=4 + 4 * n_axes).reshape(shape)
    except (OSError, EOFError, zlib.error, IndexError, ValueError):    # of gzip and NumPy
        raise InputError(f"{path}: damaged, or not an idx file of uint8 values. "
                         "Get the file again") from None
    return array, hashlib.sha256(raw).hexdigest()


def read_idx_folder(place):
    """Read a data set's four idx files into load_data's dict. Images have three dimensions, or four
    with channels last.

    place: a folder, or FOLDER/PREFIX of the files' names where a folder holds several data sets.
    EMNIST, recognized by its names, is stored transposed. Labels may begin at 1. Of MNIST the last
    5,000 training images are for validation, of other data a twelfth, always the same."""
    where = Path(os.path.expanduser(place))
    if where.is_dir():
        paths = where.glob("*ubyte*")
    else:
        paths = where.parent.glob(where.name + "*ubyte*")
    files = {}                                                 # {(split, kind): read_idx}
    prefixes = set()
    for path in sorted(paths):
        match = re.search(r"(train|t10k|test)[-.](images|labels)", path.name)
        if match:
            split = match[1].replace("t10k", "test")
            files[split, match[2]] = read_idx(path)
            prefixes.add(path.name[:match.start()])
    if not files and not where.exists():
        raise InputError(f"{place}: no such folder. Give one that holds four idx files")
    if len(files) < 4 or len(prefixes) > 1:
        raise InputError(f"{place}: no idx files of one data set. Give FOLDER/PREFIX, or make them "
                         f"of what is there: python3 make_idx.py {shlex.quote(str(place))} OUT")
    of_mnist = [digest in MNIST.values() for _, digest in files.values()]
    if any(of_mnist) and not all(of_mnist):
        raise InputError(f"{place}: some files are MNIST's, and some are damaged or another's. "
                         "Get the files again")
    prefix, = prefixes
    arrays = {key: array for key, (array, _) in files.items()}
    first_label = min(arrays[split, "labels"].min(initial=255) for split in ("train", "test"))
    data = {"source": "mnist"}
    for split in ("train", "test"):
        images, labels = arrays[split, "images"], arrays[split, "labels"]
        if EMNIST_NAME.search(prefix) and images.ndim == 3:
            images = images.swapaxes(1, 2)
        if first_label == 1:
            labels = labels - 1
        data[split] = images, labels
    n_train = len(data["train"][1])
    held_out = np.arange(n_train) >= n_train - 5000
    if not all(of_mnist):
        data["source"] = prefix.strip("-.") or where.resolve().name
        if data["source"] in DIGIT_NAMES:                      # a name that means other digits
            data["source"] += "-files"
        data["n_classes"] = count_classes(data)
        if (where / "labels.txt").is_file():
            data["names"] = read_names(where / "labels.txt", data["n_classes"])
        n_held_out = -(-n_train // 12)                         # a twelfth, rounded up
        held_out = rng_for(0, DATA, 2).permutation(n_train) < n_held_out      # 2: a key of its own
    images, labels = data["train"]
    data["train"] = images[~held_out], labels[~held_out]
    data["val"] = images[held_out], labels[held_out]
    return data


def read_names(path, n_classes):
    """Return the names of the classes in a file, one a line"""
    try:
        names = path.read_text("utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError:
        raise InputError(f"{path.parent}: labels.txt is not UTF-8. Save it as UTF-8") from None
    if len(names) != n_classes:
        raise InputError(f"{path.parent}: labels.txt has {len(names)} names. Give {n_classes}, one "
                         "a line")
    return names


def count_classes(data):
    """Return the number of classes. Raise InputError unless the splits that data have are uint8
    images, of any size, and labels"""
    n_classes = data.get("n_classes", 10 if data["source"] in DIGIT_NAMES else 2)
    for split in splits_of(data):
        where = f"{data['source']}, {split}"
        images, labels = map(np.asarray, data[split])
        n = len(images)
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or n == 0:
            raise InputError(f"{where}: images are {images.dtype} {images.shape}. "
                             "Give uint8 (n, 28, 28) or, with --task images, " + SIZES_IN_WORDS)
        are_whole_numbers = labels.dtype.kind in "iu" and labels.shape == (n,)
        if not are_whole_numbers or labels.min() < 0 or labels.max() > 61:
            raise InputError(f"{where}: labels are {labels.dtype} {labels.shape}. "
                             f"Give {n} from 0 to 61")
        n_classes = max(n_classes, 1 + int(labels.max()))
    return n_classes


SIZES_IN_WORDS = (f"square ones, (n, side, side) or (n, side, side, channels), with sides from "
                  f"{LEAST_SIDE} to {LARGEST_SIDE} and 1 to {MOST_CHANNELS} channels")


def splits_of(data):
    """Return which of train, val and test are in load_data's dict, sorted"""
    return sorted(data.keys() & {"train", "val", "test"})


def size_of_images(data):
    """Return side and number of channels of the images. Raise InputError unless all are square and
    of one size that --task images takes"""
    sizes = {}
    for split in splits_of(data):
        shape = np.shape(data[split][0])
        height, width = shape[1:3]
        channels = shape[3] if len(shape) == 4 else 1
        has_legal_side = height == width and LEAST_SIDE <= height <= LARGEST_SIDE
        if not has_legal_side or not 1 <= channels <= MOST_CHANNELS:
            raise InputError(f"{data['source']}, {split}: images are {shape}. "
                             f"Give {SIZES_IN_WORDS}")
        sizes[split] = height, channels
    first = min(sizes)
    for split, size in sizes.items():
        if size != sizes[first]:
            raise InputError(f"{data['source']}, {split}: images are "
                             f"{np.shape(data[split][0])}, and those of {first} "
                             f"{np.shape(data[first][0])}. Give all the same size")
    return sizes[first]


def check_digits(data, config):
    """Raise InputError unless the images have the size of MNIST's digits, which a task needs"""
    for split in splits_of(data):
        shape = np.shape(data[split][0])
        if shape[1:] != (BOX, BOX):
            raise InputError(f"{data['source']}, {split}: images are {shape}. --task {config.task} "
                             "is for gray digits, uint8 (n, 28, 28). Other square images, gray or "
                             f"in color: {EXPERIMENT}.py --task images")


def fit_to_data(config, data):
    """Return a Config with the data's number of classes and, of task images, with the side and the
    channels of the images"""
    n_classes = count_classes(data)
    if config.task != IMAGES:
        check_digits(data, config)
        return dataclasses.replace(config, n_classes=n_classes)
    side, channels = size_of_images(data)
    return dataclasses.replace(config, n_classes=n_classes, side=side, channels=channels)


def class_names(data):
    """Return the names of the classes of load_data's dict, or of a history; [] if they have none"""
    if data.get("names"):
        return data["names"]
    if data["source"] in DIGIT_NAMES:
        return [*"0123456789"]
    return []


def data_name(source, trained_on=None):
    """Return what a data set is called in all output and figures, and the one that was trained on,
    if it is another"""
    name = DIGIT_NAMES.get(source, f"images of {source}")
    if trained_on in (None, source):
        return name
    return f"{name} (trained on {data_name(trained_on)})"


# Synthetic digits for machines without MNIST. Of every writing style: digit, relative frequency,
# strokes. A stroke is a smooth curve through control points, written xxyy on a 100 x 100 sheet (x
# right, y down); `|` lifts the pen. Strokes that contain the same point share it, so that a corner
# where two strokes meet stays joined when points are perturbed.
GLYPHS = [(int(row[0]), int(row[2]), row[4:]) for row in """
0 3 5500 1812 0550 2288 5299 8287 9348 8012 5500; 0 2 7508 4500 1522 0558 2893 6092 9055 8018 5003
3010; 0 1 3508 1535 1070 4099 8085 9045 7810 5002 4212; 0 1 3003 1025 0660 3096 7092 9560 8525 6206;
1 5 5500 5250 5099; 1 1 3816 5500 | 5500 5250 5099; 1 1 3416 5000 | 5000 5050 5099 | 2799 5099 7399;
2 3 1522 4500 7817 6848 3878 0897 | 0897 5094 9697; 2 3 1825 4502 7520 6352 3588 1592 1476 3070 6586
9890; 2 2 1530 3205 7008 7837 4585 1097 0582 3076 6592 9792; 2 3 2015 5000 7018 5850 3285 1295 0380
1868 4578 9590; 2 2 1535 2510 6002 7825 5060 2588 0885 1572 4078 9595; 2 1 1515 4502 6818 5550 2582
0592 | 0592 4592 9988; 2 1 1505 5002 8506 | 8506 5050 1096 | 1096 5095 9096; 3 3 1512 4500 7515 6838
4048 | 4048 7255 8580 4599 0888; 3 2 1812 4800 7012 6535 4548 | 4548 7550 9075 6098 2599 0585; 3 2
0825 2505 6003 7520 4045 | 4045 7055 7580 4599 1592; 3 1 1510 5000 8012 7035 4050 | 4050 6560 7080
4095 2590; 3 1 1505 4505 7505 | 7505 6022 4540 | 4540 7553 7885 4599 1290; 3 2 1512 4802 7515 6440
4050 3545 5046 7562 7585 4599 1290; 3 2 2012 5000 8012 6838 4848 6855 7575 5095 2099 0590; 4 3 2200
1555 | 1555 5054 9052 | 7505 7250 6899; 4 2 6500 3835 0865 | 0865 5064 9765 | 6500 6550 6499; 4 2
2000 1230 2550 5550 8035 | 8500 8035 7599; 4 2 2502 1235 2255 5055 9545 | 7510 6850 6099; 4 1 6205
1260 | 1260 5062 9558 | 7030 6650 6299; 5 3 9003 5504 2503 | 2503 2045 | 2045 5038 8060 7090 4599
0890; 5 2 8805 5202 2522 3542 6855 7580 4599 0890; 5 2 3008 2248 5040 7862 7090 4099 0892 | 3008
6005 9903; 5 2 9908 6506 3508 | 3508 2545 | 2545 5542 7562 6088 3099 0390; 5 1 2812 2248 5040 7862
7488 4099 1590 | 3805 6505 9903; 5 1 8505 3510 | 3510 2545 | 2545 5548 7270 5592 2095 0885; 6 3 5500
2828 1462 2290 5299 7885 7260 4850 1868; 6 2 4500 2040 1275 3598 6892 7268 5054 1872; 6 2 7005 3520
1260 2895 6595 8272 6555 3565 2285; 6 2 5000 2030 0870 3096 7095 9275 7558 4565 2585; 6 1 3500 1845
1885 4599 8592 8575 5568 1885; 7 3 0508 5006 8505 | 8505 6540 4599; 7 2 0815 4508 8803 7530 5560
4099; 7 2 0808 5006 8505 | 8505 6045 4599 | 2552 5551 8550; 7 1 1225 1508 | 1508 5006 8805 | 8805
6845 5099; 7 1 0530 2812 6015 8802 | 8802 6545 4599; 8 3 8508 5000 2015 3538 6855 7880 5099 1585
2862 6040 8508; 8 2 7812 5000 2212 2835 5548 8272 7795 4599 1388 1570 4550 7230 7812; 8 1 5000 1812
2238 5048 7835 8010 5000 | 5048 1565 1590 5099 8588 8362 5048; 8 2 8510 5500 3015 3840 6062 6085
4599 2585 3562 6538 8815; 8 2 8515 5000 1520 3545 6068 5595 3590 3572 5550 8515; 8 1 7808 5500 3015
3838 6260 7082 5099 2888 3665 6238 7808; 9 3 7820 5000 1518 1442 4552 7235 7820 | 7820 7460 7099; 9
2 7820 5000 1518 1442 4552 7235 7820 | 7820 8065 6295 3098 1292; 9 3 7810 4502 1225 2250 5548 7612 |
7612 6855 5599; 9 1 7806 5002 2518 2842 5545 8026 | 8026 7060 4899; 9 2 7015 5000 1820 1842 4050
7030 | 8005 7545 6599
""".replace("\n", " ").strip().split("; ")]
DOTS = 112                         # pen positions per glyph


def stroke_basis(strokes, size):
    """Return the control points of a glyph's strokes and a matrix that maps them to evenly spaced
    pen positions.

    strokes: as in GLYPHS. size: K, the number of control points, to which both arrays are padded
    with zeros. Return points (K, 2), (x, y) in [-1, 1], and basis (DOTS, K)."""
    keys = control_points(strokes)
    points = np.zeros((size, 2))
    points[:len(keys)] = [(int(key[:2]) / 50 - 1, int(key[2:]) / 50 - 1) for key in keys]
    t = np.linspace(0, 1, 17)[:, None]
    curves, steps = [], []
    for stroke in strokes.split("|"):
        knots = np.eye(size)[[keys.index(key) for key in stroke.split()]]
        before = 2 * knots[0] - knots[1]
        after = 2 * knots[-1] - knots[-2]
        knots = np.vstack([before, knots, after])
        a, b, c, d = (knots[k:len(knots) - 3 + k, None] for k in range(4))     # Catmull-Rom spline
        cubic = 2 * a - 5 * b + 4 * c - d + t * (3 * b - a - 3 * c + d)
        curve = (b + t / 2 * (c - a + t * cubic)).reshape(-1, size)
        path = curve @ points
        curves.append(curve)
        # Distances between neighbors; the first is 0, so that lifting the pen adds no length
        steps.append(np.hypot(*np.diff(path, axis=0, prepend=path[:1]).T))
    curve = np.vstack(curves)
    length = np.cumsum(np.concatenate(steps))
    targets = np.linspace(0, length[-1], DOTS)
    basis = np.stack([np.interp(targets, length, column) for column in curve.T], 1)
    return points, basis


def control_points(strokes):
    """Return the control points of a glyph's strokes, each once"""
    return list(dict.fromkeys(strokes.replace("|", " ").split()))


def render_strokes(dots, width, edge, pressure):
    """Render pen positions as images of ink in [0, 1], scaled and centered as MNIST's digits are.

    dots: pen positions, (n, DOTS, 2), (x, y) in any unit. width: of the stroke, (n,) px. edge:
    width of its soft rim, (n,) px. pressure: factor of the width at each pen position, (n, DOTS).
    Return (n, 28, 28) float32."""
    low, high = dots.min(1), dots.max(1)                                                # (n, 2)
    room = 20 - width * pressure.max(1)            # the ink, not the pen's path, spans 20 px
    scale = room / (high - low).max(1)
    dots = (dots - ((low + high) / 2)[:, None]) * scale[:, None, None] + 9.5
    pressure = pressure.astype(np.float32).T[:, None]                                 # (DOTS, 1, n)
    pixel = np.arange(20, dtype=np.float32)[:, None]
    distance = dots.astype(np.float32).transpose(2, 1, 0)[:, :, None] - pixel     # (2, DOTS, 20, n)
    dx2, dy2 = (distance / pressure) ** 2          # more pressure widens the line
    nearest = dy2[0][:, None] + dx2[0]                                                 # (20, 20, n)
    for k in range(1, DOTS):
        nearest = np.minimum(nearest, dy2[k][:, None] + dx2[k])
    ink = np.clip((width / 2 - np.sqrt(nearest)) / edge + 0.5, 0, 1)                   # (20, 20, n)
    ink *= ink * (3 - 2 * ink)                     # saturated core, soft rim
    center = [(ink.sum(axis) * pixel).sum(0) / ink.sum((0, 1)) for axis in (1, 0)]
    top, left = np.clip(np.rint(14 - np.array(center)), 0, 8).astype(int)
    padded = np.pad(ink.transpose(2, 0, 1).astype(np.float32), ((0, 0), (8, 8), (8, 8)))
    windows = sliding_window_view(padded, (28, 28), axis=(1, 2))
    return windows[np.arange(len(width)), 8 - top, 8 - left]


def synthesize_digits(n, seed):
    """Draw n synthetic digits.

    Return images (n, 28, 28) uint8, labels (n,) uint8 and factors, a dict of (n,) float32, which
    are, in the order in which they act:
      style     which of the digit's glyphs
      wobble    strength of the deformation
      aspect    factor of the width, 1 is nominal
      slant     shear, positive leans right
      rotation  radians, positive is counter-clockwise
      stroke    mean width of the ink in px"""
    rng = rng_for(seed, DATA)
    digit = np.array([digit for digit, _, _ in GLYPHS], float)
    weight = np.array([weight for _, weight, _ in GLYPHS], float)
    size = max(len(control_points(strokes)) for _, _, strokes in GLYPHS)
    points, basis = zip(*(stroke_basis(strokes, size) for _, _, strokes in GLYPHS))
    points, basis = np.stack(points), np.stack(basis)
    labels = rng.integers(0, 10, n)
    share = weight / np.array([weight[digit == d].sum() for d in digit])     # of its digit's glyphs
    cumulative = np.cumsum(share)                              # digit d covers (d, d + 1]
    glyph = np.searchsorted(cumulative, labels + rng.uniform(1e-6, 1 - 1e-6, n))        # (n,)
    factors = {
        "slant": rng.normal(0.15, 0.25, n),
        "rotation": rng.normal(0, 0.08, n),
        "aspect": np.exp(rng.normal(0, 0.2, n)),
        "stroke": np.exp(rng.normal(0.92, 0.26, n)).clip(1.2, 4.5),
        "style": glyph - np.searchsorted(digit, labels),
        "wobble": rng.uniform(0.03, 0.17, n)}
    images = np.empty((n, 28, 28), np.uint8)
    for start in range(0, n, 250):
        chunk = slice(start, start + 250)
        of_chunk = {name: value[chunk, None] for name, value in factors.items()}       # (n, 1) each
        images[chunk] = draw_digits(points[glyph[chunk]], basis[glyph[chunk]], of_chunk, rng)
    factors = {name: value.astype(np.float32) for name, value in factors.items()}
    return images, labels.astype(np.uint8), factors


def draw_digits(points, basis, factors, rng):
    """Draw digits of stroke_basis's points (n, K, 2) and basis (n, DOTS, K). factors: those of
    synthesize_digits, (n, 1) each. Return (n, 28, 28) uint8"""
    n = len(points)
    wobble, rotation = factors["wobble"], factors["rotation"]
    control = points + wobble[:, None] * rng.normal(0, 0.7, points.shape)
    x, y = np.moveaxis(basis @ control, -1, 0)                                          # (n, DOTS)
    # A deformation without a linear part bends the strokes and does not change slant, rotation,
    # aspect
    bend = np.stack([x * x, x * y, y * y], -1) @ rng.normal(0, 1, (n, 3, 2))          # (n, DOTS, 2)
    x = x + wobble * bend[..., 0]
    y = y + wobble * bend[..., 1]
    x = 0.8 * factors["aspect"] * x - factors["slant"] * y
    cos, sin = np.cos(rotation), np.sin(rotation)
    dots = np.stack([cos * x + sin * y, cos * y - sin * x], -1)                       # (n, DOTS, 2)
    low, high = [[0.3], [0], [0]], [[3], [1], [0.4]]
    cycles, phase, depth = rng.uniform(low, high, (3, n))[..., None]                   # (n, 1) each
    waves = cycles * np.linspace(0, 1, DOTS) + phase
    pressure = 1 + depth * np.sin(2 * np.pi * waves)                                    # (n, DOTS)
    pressure /= pressure.mean(1, keepdims=True)    # so that `stroke` is the mean width
    edge = rng.uniform(1.0, 1.6, n)
    return np.rint(255 * render_strokes(dots, factors["stroke"][:, 0], edge, pressure))


# -------------------------------------------------------------- save and load

# A weights file has arrays GROUP/NAME, and meta, a JSON text. Its groups, and their keys in a
# state; "state" is an older name of the running statistics:
GROUPS = {"params": "params", "state": "running", "adam_m": "adam_m", "adam_v": "adam_v"}
META = {"experiment", "step", "config", "history"}             # keys of meta
# What zipfile, zlib and NumPy raise when they read a file that is damaged, or no .npz file at all
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError,
           struct.error, TypeError)


def save(path, config, state):
    """Write the settings and the whole state of a run to an .npz file. Without moments it can be
    tested, not resumed"""
    if not fits(state["params"], config):
        raise InputError("this Config is not the one of this state. "
                         "Give fit_to_data(config, data) of its training")
    kept = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)
            if "runtime" not in f.metadata}
    meta = {"experiment": EXPERIMENT, "step": state["step"], "history": state["history"],
            "config": kept}
    arrays = {f"{group}/{name}": array for group, key in GROUPS.items()
              for name, array in state[key].items()}
    file = io.BytesIO()
    np.savez(file, meta=np.array(json.dumps(meta)), **arrays)
    write_file(path, file.getvalue())


def without_moments(state):
    """Return a state that can be tested, but not resumed: its file has a third of the size"""
    return state | {"adam_m": {}, "adam_v": {}}


def load(path):
    """Return the Config and the state that save wrote to a file, or to the folder of a run.

    Of a file without moments their dicts are empty. float16 weights become float32. Raise
    InputError if the file is missing or damaged, or of another network."""
    path = weights_file(path)
    not_ours = InputError(f"{path}: damaged, or not a network of {EXPERIMENT}.py. "
                          "Give a file or a run's folder that it wrote")
    try:
        arrays = read_npz(path)
        meta = json.loads(str(arrays.pop("meta", "")))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}. "
                         "Give a weights file, or the folder of a run") from None
    except DAMAGED:
        raise not_ours from None
    if not is_meta(meta):
        raise not_ours
    state = {"step": meta["step"], "history": meta["history"]}
    state |= {key: {} for key in GROUPS.values()}
    for name, array in arrays.items():
        group, slash, param = name.partition("/")
        if slash and group not in GROUPS:
            raise not_ours
        if slash:                      # arrays without a slash, of earlier versions, are ignored
            state[GROUPS[group]][param] = array
    config = config_of_file(path, meta["config"])
    if not fits(state["params"], config):
        raise not_ours
    return config, state


def read_npz(path):
    """Return the arrays of an .npz file, {name: array}, those of type float16 as float32"""
    with open(path, "rb") as file:
        arrays = dict(np.load(io.BytesIO(file.read())))
    for name, array in arrays.items():
        if array.dtype == np.float16:
            arrays[name] = array.astype(np.float32)
    return arrays


def is_meta(meta):
    """Return whether a JSON value is what save wrote, of this experiment"""
    if not isinstance(meta, dict) or not META <= meta.keys() or meta["experiment"] != EXPERIMENT:
        return False
    if not isinstance(meta["config"], dict) or not isinstance(meta["history"], dict):
        return False
    return {"source", "epochs"} <= meta["history"].keys()


def config_of_file(path, settings):
    """Return the Config of the settings in a file, {name: value}. Raise InputError if it has others
    than this script"""
    known = {f.name for f in dataclasses.fields(Config)}
    unknown = settings.keys() - known - {"source"}             # which files had in earlier versions
    if unknown:
        raise InputError(f"{path}: has the setting {min(unknown)}, which this {EXPERIMENT}.py does "
                         "not know. Use the version that wrote it")
    try:
        return Config(**{name: settings[name] for name in settings.keys() & known})
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def weights_file(path):
    """Return the path of a weights file, which may be given as the folder of its run"""
    path = Path(path)
    if not os.path.isdir(path):
        return path
    several = sorted(str(file.parent) for file in path.glob("*/weights.npz"))
    if several and not (path / "weights.npz").exists():
        raise InputError(f"{path}: holds several runs. Give one of them: {', '.join(several)}")
    return path / "weights.npz"


def fits(arrays, config):
    """Return whether arrays, {name: array}, have the shapes of the parameters of a Config's
    network"""
    return param_shapes(config) == {name: array.shape for name, array in arrays.items()}


def identity_of(path, config):
    """Return what identifies a trained network in results: the file's name and digest, and the seed
    of its training"""
    path = weights_file(path)
    return {"file": path.name, "sha256": digest_of(path), "trained_seed": config.seed}


def digest_of(path):
    """Return the SHA-256 of a weights file or that of a folder; None if path is None"""
    if path is None:
        return None
    return hashlib.sha256(weights_file(path).read_bytes()).hexdigest()


def digest_of_data(data):
    """Return the SHA-256 of the images and labels that a network is trained on"""
    images, labels = data["train"]
    digest = hashlib.sha256(np.ascontiguousarray(images))
    digest.update(np.ascontiguousarray(labels))
    return digest.hexdigest()


# -------------------------------------------------------------- what is printed

def say(text, config, end="\n"):
    """Print a line. A closed pipe or terminal does not end a training"""
    if not config.quiet:
        with contextlib.suppress(OSError, ValueError):
            print(text, end=end, flush=True)


RUN_NAME = "{model}-{preset}-seed{seed}"                       # of a new folder
PROGRESS = ("epoch {epoch}/{n_epochs}  train loss {train_loss:.3f}  "
            "train accuracy {train_accuracy:.3f}  validation accuracy {val_accuracy:.4f}  "
            "{seconds:.0f} s")


class Progress:
    """The hooks of train that say how a training goes: the metrics of every epoch and, within an
    epoch, where it is. On a terminal that line is rewritten every second; elsewhere there is one
    about every ten seconds, so none if epochs are shorter."""

    def __init__(self, config, data):
        self.config = config
        self.per_epoch = steps_per_epoch(config, data)
        self.on_terminal = sys.stdout is not None and sys.stdout.isatty()
        self.interval = 1 if self.on_terminal else 10                   # s
        self.width = min(70, shutil.get_terminal_size().columns - 1)    # of the line rewritten
        self.n_steps = 0                                                # of this process
        self.began = time.perf_counter()
        self.said = self.began

    def step(self, state, terms):
        """Say where the training is, if that is due; the hook each_step"""
        self.n_steps += 1
        now = time.perf_counter()
        is_last_of_epoch = state["step"] % self.per_epoch == 0
        if now - self.said < self.interval or is_last_of_epoch:
            return
        self.said = now
        last_step = self.config.n_epochs * self.per_epoch
        seconds = (now - self.began) / self.n_steps                     # per step, with validations
        left = datetime.timedelta(seconds=round(seconds * (last_step - state["step"])))
        text = (f"step {state['step']}/{last_step}  loss {terms['loss']:.3f}  "
                f"{1e3 * seconds:.0f} ms/step  {left} left")
        if self.on_terminal:
            say(text[:self.width].ljust(self.width), self.config, end="\r")
        else:
            say(text, self.config)

    def epoch(self, state):
        """Print the metrics of the last epoch; the hook each_epoch"""
        metrics = state["history"]["epochs"][-1]
        text = PROGRESS.format(n_epochs=self.config.n_epochs, **metrics)
        say(text.ljust(self.width), self.config)
        self.said = time.perf_counter()

    def clear(self):
        """Remove the line that is rewritten"""
        if self.on_terminal:
            say(" " * self.width, self.config, end="\r")


TABLE = {                          # what is printed of a test: label, format
    "n_params": ("parameters", ",d"),
    **{f"{key}_accuracy": (f"correct {name}", ".4f")
       for test_sets in TEST_SETS.values() for key, _, name in test_sets}}


def print_table(results, config):
    """Print the metrics of tests, a row each; results: {name of a network: result_of it}"""
    width = 2 + max(14, *map(len, results))

    def print_row(label, cells):
        say(label.ljust(36) + "".join(cell.rjust(width) for cell in cells), config)

    sources = dict.fromkeys(data_name(result["source"], result["trained_on"])
                            for result in results.values())
    say(f"\nTest samples of {', '.join(sources)}", config)
    print_row("", results)
    for key, (label, form) in TABLE.items():
        values = [result.get(key) for result in results.values()]
        if any(value is not None for value in values):
            print_row(label, ["-" if value is None else format(value, form) for value in values])


def command_line(*words):
    """Return a command line of this script, to be copied: with this Python, if it is not the usual
    one"""
    usual = shutil.which("python3")
    python = sys.executable
    if usual is not None and Path(usual).parent == Path(sys.executable).parent:
        python = "python3"
    return shlex.join([python, sys.argv[0], *map(str, words)])


# -------------------------------------------------------------- a run is a folder
# weights.npz holds the whole state and is replaced after every epoch; metrics.json is written last,
# so that it marks a finished run. The same command resumes; no other run is overwritten.

@contextlib.contextmanager
def run_folder(outdir, name):
    """Make the folder of a run and give it to a `with` block: outdir or, if that is None, a new one
    below runs/. If nothing is saved in it, the block leaves no new folder behind"""
    if outdir is None:
        folder, made = new_folder(name)
    else:
        folder = Path(outdir)
        made = make_folder(folder)
    try:
        if not (folder / "metrics.json").exists():     # a finished run is only read
            check_writable(folder / "weights.npz")     # complain now, not after the first epoch
        yield folder
    finally:
        remove_empty(made)


def new_folder(name):
    """Make a folder that did not exist; of runs that start at once each gets its own. Return it,
    and what was made"""
    parents = make_folder(Path("runs", EXPERIMENT))
    for k in itertools.count(1):
        folder = Path("runs", EXPERIMENT, name)
        if k > 1:
            folder = folder.with_name(f"{name}-{k}")
        try:
            folder.mkdir()
            return folder, [folder, *parents]
        except FileExistsError:
            continue
        except OSError as error:
            remove_empty(parents)
            raise cannot_make(folder, error) from None


def make_folder(folder):
    """Make a folder and its parents, if they do not exist; return those that were made, the
    innermost first"""
    new = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remove_empty(new)
        raise cannot_make(folder, error) from None
    return new


def cannot_make(folder, error):
    """Return the InputError that says so"""
    return InputError(f"cannot make {folder}: {error.strerror}. Name a writable --outdir")


def remove_empty(folders):
    """Remove those of some folders that are empty"""
    for path in folders:
        with contextlib.suppress(OSError):
            path.rmdir()


def is_begun(folder):
    """Return whether a folder holds a run. Raise InputError if it holds anything else"""
    if (folder / "weights.npz").exists():
        return True
    others = [path.name for path in folder.iterdir() if path not in half_written(folder)]
    if others:
        raise InputError(f"{folder}: holds other files ({others[0]}). "
                         "Name a new --outdir, or the folder of a run")
    return False


def half_written(folder):
    """Return the files that a run left behind in its folder when it was killed while it saved; see
    write_file"""
    return [path for path in folder.glob("weights.npz.*") if path.suffix[1:].isdigit()]


def begin(folder, config, data, init):
    """Return the state from which a run continues: that in its folder or, if there is none yet, a
    new one, with the weights of the file `init` if that is not None. Raise InputError if the folder
    holds another run"""
    if is_begun(folder):
        theirs, state = load(folder)
        check_same_run(folder, theirs, state, config, data, init)
        return state
    state = initial_state(config)
    if init is not None:
        _, started = load(init)
        check_classes(init, started, config, data)
        state["params"] = started["params"]
        state["running"] = started["running"]
    state["history"]["init"] = digest_of(init)
    state["history"]["data"] = digest_of_data(data)
    return state


def check_same_run(folder, theirs, state, config, data, init):
    """Raise InputError if a run in a folder, with the settings `theirs`, is another one than a
    command asks for"""
    another = f"Start another run from it: --init {folder}"
    history = state["history"]
    settings = vars(config)
    if config.n_epochs > theirs.n_epochs:
        if theirs.lr_schedule == "cosine":
            raise InputError(f"{folder}: its learning rate ends at 0 with epoch {theirs.n_epochs}. "
                             f"{another}")
        if "recomputed" in history:
            raise InputError(f"{folder}: its statistics were recomputed after its last epoch. "
                             f"{another}")
        settings = settings | {"n_epochs": theirs.n_epochs}    # more epochs: compare the rest
    check_same(folder, theirs, settings, ("runtime",))
    n = history.get("recomputed", config.recompute_statistics)
    if n != config.recompute_statistics:               # once recomputed, a run keeps its number
        raise InputError(f"--recompute-statistics {config.recompute_statistics}: {folder} has {n}. "
                         "Give that, or name another folder")
    # What a file of an earlier version, or of train alone, lacks is taken as equal
    if "init" in history and history["init"] != digest_of(init):
        raise InputError(f"{folder}: started from other weights. "
                         "Give the same --init, or another --outdir")
    of_data = {"source": data["source"], "names": data.get("names"), "data": digest_of_data(data)}
    if any(key in history and history[key] != value for key, value in of_data.items()):
        raise InputError(f"{folder}: was trained on {data_name(history['source'])}, on other "
                         "images or classes than are given now. Give the same data, or another "
                         "--outdir")
    if not fits(state["adam_m"], config):
        raise InputError(f"{folder}: cannot be resumed, since its weights have no moments of the "
                         f"optimizer. {another}")


def check_same(path, theirs, given, may_differ):
    """Raise InputError if a given setting, {name: value}, contradicts those of a file or a run's
    folder. may_differ: words of the settings' metadata, "test" or "runtime"; settings with one of
    these may differ"""
    for f in SETTINGS:
        is_free = any(word in f.metadata for word in may_differ)
        own = getattr(theirs, f.name)
        if not is_free and f.name in given and given[f.name] != own:
            raise InputError(f"{flag_of(f.name)} {given[f.name]}: {path} has {own}. "
                             "Give that, or name another file or folder")


def check_same_size(path, theirs, config):
    """Raise InputError unless the network of a file, whose Config is `theirs`, was trained on
    images of the size that a Config has"""
    if image_shape(theirs) != image_shape(config):
        raise InputError(f"{path}: was trained on images of {size_in_words(theirs)}, and these "
                         f"have {size_in_words(config)}. Give images of its size")


def check_classes(path, state, config, data):
    """Raise InputError unless the network of a file has the layers of a Config and the classes of
    the data"""
    theirs = class_names(state["history"])
    ours = class_names(data)
    has_other_classes = theirs and ours and theirs != ours
    if has_other_classes or not fits(state["params"], config):
        raise InputError(f"{path}: has other layers or classes. Give its settings and data "
                         f"({data_name(state['history']['source'])})")


def finished_result(folder, config):
    """Return the result of the run in a folder if it is finished, else None. Raise InputError if
    the test of the finished run had other settings"""
    path = folder / "metrics.json"
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text("utf-8"))
        theirs = result["config"]
        goes_on = theirs["n_epochs"] < config.n_epochs
        data_name(result["source"], result["trained_on"])      # TypeError if they are damaged
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: damaged. "
                         "Delete it, and the same command tests the run again") from None
    if goes_on:
        return None
    changed = {f.name: getattr(config, f.name) for f in SETTINGS if "test" in f.metadata
               and f.name in theirs and theirs[f.name] != getattr(config, f.name)}
    if changed:
        flags = [word for name, value in changed.items() for word in (flag_of(name), value)]
        first = next(iter(changed))
        raise InputError(f"{flag_of(first)} {changed[first]}: {folder} is finished, with "
                         f"{theirs[first]}. Test it again: {test_command(folder, config, *flags)}")
    has_real_digits = "real_affine_accuracy" in result         # affNIST's own, see TEST_SETS
    if has_real_digits and not config.affnist_dir:
        raise InputError(f"--affnist-dir left out: {folder} is finished, with it. Test it again: "
                         f"{test_command(folder, config)}")
    if config.affnist_dir and not has_real_digits:
        again = test_command(folder, config)
        raise InputError(f"--affnist-dir {config.affnist_dir}: {folder} is finished, without it. "
                         f"Test it again: {again}")
    return result


# -------------------------------------------------------------- train and test

class RunFile:
    """weights.npz in the folder of a run, which no other run may write at the same time"""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / "weights.npz"
        self.written = self.modified()

    def modified(self):
        """Return when the file was last written, in ns; None if there is none"""
        if not self.path.exists():
            return None
        return self.path.stat().st_mtime_ns

    def save(self, config, state):
        """Replace the file, unless another run has written it since"""
        if self.modified() != self.written:
            raise InputError(f"{self.folder}: another run saves here, too. Name another --outdir")
        save(self.path, config, state)
        self.written = self.modified()


def run(config, data, state, folder):
    """Train a network from a state on and test it; write weights.npz after every epoch, and
    metrics.json. Return result_of it"""
    for path in half_written(folder):
        path.unlink()
    if (folder / "metrics.json").exists():
        # It is of fewer epochs (else finished_result would have returned it), and must not mark
        # this run as finished: keep it by another name
        n = len(state["history"]["epochs"])
        (folder / "metrics.json").replace(folder / f"metrics-{n}-epochs.json")
    progress = Progress(config, data)
    file = RunFile(folder)

    def after_epoch(state):
        file.save(config, state)
        progress.epoch(state)

    try:
        state = train(config, data, state, progress.step, after_epoch)
    finally:
        progress.clear()
    with worker_threads(config) as workers:
        if config.recompute_statistics:
            replace_statistics(state, data, config)
        elif state["running"] and not SHORT_RUN <= state["step"] < LONG_RUN:
            check_statistics(state, data, config, workers)
        file.save(config, state)       # recomputed statistics too, and before the test may fail
        metrics = evaluate_test(weights_of(state), data, config, workers)
    result = result_of(config, state, data, metrics)
    write_file(folder / "metrics.json", as_json(result))
    return result


def replace_statistics(state, data, config):
    """Put recomputed statistics, as --recompute-statistics asks for, into a state"""
    n = config.recompute_statistics
    state["running"] |= recompute_statistics(state, data, config, n)
    state["history"]["recomputed"] = n


# After at least LONG_RUN steps running statistics may not fit (see recompute_statistics), nor after
# fewer than SHORT_RUN, in which the weights change fast: then the validation accuracy with
# statistics recomputed on N_RECOMPUTED samples is compared
SHORT_RUN, LONG_RUN, N_RECOMPUTED = 500, 10_000, 800
WATCHED = "val_accuracy"


def check_statistics(state, data, config, workers):
    """Say so if the accuracy after the last epoch is a point higher with recomputed statistics; of
    a short run, whose accuracy is measured on fewer samples, five points"""
    weights = weights_of(state) | recompute_statistics(state, data, config, N_RECOMPUTED)
    metrics = validate(weights, data, config, workers)
    gain = metrics[WATCHED] - state["history"]["epochs"][-1][WATCHED]
    least = 0.05 if state["step"] < SHORT_RUN else 0.01
    if gain > least:
        say(f"Running statistics do not fit: {100 * gain:.1f} points more with "
            f"--recompute-statistics {N_RECOMPUTED}", config)


def result_of(config, state, data, test):
    """Return what metrics.json holds, a dict: the settings, the metrics of evaluate_test, versions
    and machine, and the history, {column: values}"""
    epochs = state["history"]["epochs"]
    columns = epochs[0] if epochs else ()
    seconds = sum(epoch["seconds"] for epoch in epochs)
    settings = {f.name: getattr(config, f.name) for f in SETTINGS
                if f.name != "quiet" and not f.name.endswith("_dir")}
    return {
        "experiment": EXPERIMENT,
        "source": data["source"],
        "trained_on": state["history"]["source"],
        "config": settings,
        "n_params": sum(array.size for array in state["params"].values()),
        **test_metrics(test),
        "seconds_train": seconds,
        "ms_per_step": 1e3 * seconds / max(1, state["step"]),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "machine": {"processor": processor_name(), "cores": n_cores()},
        "history": {name: [epoch[name] for epoch in epochs] for name in columns}}


def test_metrics(test):
    """Return the metrics of evaluate_test as metrics.json names them: KEY_accuracy, KEY_hits,
    KEY_n, KEY_recon_mse and KEY_confusion of each test set, and hit_bits, {KEY: packed_bits}"""
    metrics = {"hit_bits": {key: packed_bits(one["correct"]) for key, one in test.items()}}
    for key, one in test.items():
        for name in "accuracy", "hits", "n", "recon_mse", "confusion":
            metrics[f"{key}_{name}"] = one.get(name)
    return metrics


def packed_bits(correct):
    """Return which samples were correctly classified, (n,) bool, as a short text for JSON"""
    return base64.b64encode(np.packbits(correct)).decode()


def processor_name():
    """Return the processor's name, as far as the system tells it"""
    with contextlib.suppress(OSError, IndexError):
        line = Path("/proc/cpuinfo").read_text("utf-8").split("model name")[1].split("\n")[0]
        return line.strip("\t: ")
    return platform.processor() or platform.machine()


def as_json(result):
    """Return a result as the bytes of a JSON text"""
    return json.dumps(result, indent=1, default=float).encode()     # float: of NumPy's numbers


def what_is_saved(folder, config, outdir):
    """Return what a stopped run has saved, and the command that resumes it"""
    if not (folder / "weights.npz").exists():
        return "stopped before the first epoch ended; nothing is saved"
    _, state = load(folder)
    n_saved = len(state["history"]["epochs"])
    words = sys.argv[1:]
    if outdir is None:
        words = [*words, "--outdir", folder]
    return (f"stopped; {folder} has epoch {n_saved}/{config.n_epochs}. "
            f"To resume: {command_line(*words)}")


def train_and_test(args):
    """Train a network in a folder, or go on there, and test it. Return the result"""
    config, *others = configs_of(given_settings(args))
    if others:
        raise InputError(f"--model {config.model} {others[0].model}: this trains one network. "
                         f"For several: python3 compare.py {EXPERIMENT} --model ...")
    with run_folder(args.outdir, RUN_NAME.format(**vars(config))) as folder:
        say(f"folder: {folder}", config)
        try:
            result = train_in(folder, config, args.init)
        except KeyboardInterrupt:
            said = what_is_saved(folder, config, args.outdir)
            raise KeyboardInterrupt(said) from None                         # run_cli prints it
        print_table({config.model: result}, config)
        say(f"saved: {folder} (weights.npz, metrics.json)", config)
        say(f"test it again: {test_command(folder, config)}", config)
    return result


def test_command(folder, config, *flags):
    """Return the command line that tests the network in a folder, on the data of a Config"""
    words = ["--load", folder, *flags]
    if config.data_dir:
        words += ["--data-dir", config.data_dir]
    if config.affnist_dir:
        words += ["--affnist-dir", config.affnist_dir]
    return command_line(*words)


def train_in(folder, config, init):
    """Load the data, then train in a folder, go on there, or read what a finished run found. Return
    the result"""
    data = load_data(config)
    config = fit_to_data(config, data)
    state = begin(folder, config, data, init)
    result = finished_result(folder, config)
    if result is not None:
        say("this run is finished", config)
        return result
    started = f"training {config.model}"
    if state["step"] > 0:
        started = f"resuming at step {state['step']}"
    say(f"{started}, {data_name(data['source'])}", config)
    say_warmup(config, data)
    return run(config, data, state, folder)


def say_warmup(config, data):
    """Say if the learning rate is still warming up in the second half of the training"""
    n_steps = config.n_epochs * steps_per_epoch(config, data)
    if config.warmup > n_steps / 2:
        say(f"note: the learning rate warms up in {config.warmup} of {n_steps} steps. Lower "
            f"--warmup, as to {n_steps // 10}, or train longer", config)


def test_saved(args):
    """Test the network of --load and return the result; with --outdir, save both there"""
    if args.init is not None:
        raise InputError("--init is for a training, and --load only tests. Leave one out")
    trained, state = load(args.load)
    config = tested_config(args, trained)
    check_data_given(args, state["history"]["source"])
    data = load_data(config)
    config = fit_to_data(config, data)
    check_same_size(args.load, trained, config)
    check_classes(args.load, state, config, data)
    if args.outdir is None:
        return test_again(args.load, trained, config, data, state)
    with run_folder(args.outdir, None) as folder:
        if is_begun(folder):
            raise InputError(f"{folder}: holds a run. Name a new --outdir")
        result = test_again(args.load, trained, config, data, state)
        save(folder / "weights.npz", trained, state)
        write_file(folder / "metrics.json", as_json(result))
        say(f"saved: {folder} (weights.npz, metrics.json)", config)
    return result


def check_data_given(args, source):
    """Raise InputError if a network was trained on data of one's own, and the command names none"""
    is_named = hasattr(args, "data_dir") or hasattr(args, "digits")
    if source not in DIGIT_NAMES and not is_named:
        raise InputError(f"{args.load}: was trained on {data_name(source)}. Give their folder, or "
                         "that of others to test on, as --data-dir")


def test_again(path, trained, config, data, state):
    """Test the network of a file, whose training had the settings `trained`, with others. Print the
    table and return the result. Recomputed statistics, if there are any, are then in the state"""
    if config.recompute_statistics:
        replace_statistics(state, data, config)
    with worker_threads(config) as workers:
        metrics = evaluate_test(weights_of(state), data, config, workers)
    result = result_of(config, state, data, metrics)
    # The history of the training is in the run's own metrics.json
    result |= {"loaded": identity_of(path, trained), "history": {}}
    print_table({config.model: result}, config)
    return result


def tested_config(args, trained):
    """Return the Config of a trained network with the settings that are given for its test"""
    given = given_settings(args)
    if "model" in given:
        # Several names make one that no file has, which check_same refuses
        given["model"] = " ".join(given["model"])
    check_same(args.load, trained, given, ("runtime", "test"))
    return dataclasses.replace(trained, **given)


# -------------------------------------------------------------- command line

def main():
    """Train or test as the command line says; print a table, or with --out-json - JSON"""
    set_up_process()
    args = read_command_line()
    if args.out_json is None:
        train_or_test(args)
    elif args.out_json == "-" and sys.stdout is None:
        raise InputError("--out-json -: standard output is closed. Name a file")
    elif args.out_json == "-":
        with contextlib.redirect_stdout(sys.stderr):
            result = train_or_test(args)
        print(as_json(result).decode())
    else:
        check_writable(args.out_json)                  # complain now, not after the training
        result = train_or_test(args)
        write_file(args.out_json, as_json(result))


def train_or_test(args):
    """Do what the command line asks for, and return the result"""
    if args.load is None:
        return train_and_test(args)
    return test_saved(args)


REPLACED = {                       # flags that are gone, and what replaces them
    "--checkpoint": "--outdir DIR is the run's folder, and the same command resumes",
    "--out-weights": "--outdir DIR has weights.npz; workflow/slim.py makes it small"}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line"""

    def error(self, message):
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            words = message.removeprefix(prefix)
            flag = words.split()[0].partition("=")[0]
            if flag in REPLACED:
                raise InputError(f"{flag} is gone: {REPLACED[flag]}")
            alike = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            if alike:
                raise InputError(f"{message}. Did you mean {alike[0]}?")
        raise InputError(f"{message}. See --help")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with the docstring as it is, and texts beside longer flags, too"""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=32)


def read_command_line():
    """Return the command line's values; settings that are not given leave no attribute"""
    parser = Parser(description=__doc__, usage="%(prog)s [options]", allow_abbrev=False,
                    formatter_class=HelpFormatter)
    parser.add_argument("--outdir", metavar="DIR",
                        help="folder of the run, saved after every epoch; the same command resumes "
                             f"it (default: a new one below runs/{EXPERIMENT})")
    parser.add_argument("--load", nargs="?", const=PRETRAINED[0], metavar="PLACE",
                        help="test a network, in a file or a run's folder (default: the "
                             "pretrained one); --outdir saves the result")
    parser.add_argument("--init", metavar="PLACE",
                        help="start from the weights of a file or of another run")
    parser.add_argument("--out-json", metavar="FILE",
                        help="copy metrics.json here; -: to standard output")
    add_settings(parser)
    args = parser.parse_args()
    if args.out_json is not None and args.out_json.endswith(".npz"):
        raise InputError(f"--out-json {args.out_json}: is named like weights. Give a name.json")
    return args


METAVARS = {int: "N", float: "X", str: "TEXT"}          # in --help, by the type of a setting


def add_settings(parser):
    """Add a flag for every setting; those that are not given leave no attribute"""
    for f in SETTINGS:
        flags = [flag_of(f.name), *f.metadata.get("alias", "").split()]
        if f.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif "choices" in f.metadata:
            options = {"choices": f.metadata["choices"]}
        else:
            options = {"type": f.type, "metavar": f.metadata.get("metavar", METAVARS[f.type])}
        if f.name == "model":          # a list, for compare.py; --help shows the choices once
            options["nargs"] = "+"
            options["metavar"] = "{" + ",".join(options["choices"]) + "}", "MODEL"
        parser.add_argument(*flags, default=argparse.SUPPRESS, help=help_of(f), **options)


def help_of(f):
    """Return the help text of a setting: what it is, its default, and what it applies to"""
    text = f.metadata["help"]
    has_visible_default = f.type is not bool and f.default != ""
    if f.default is None:
        text += f" (default: {varying_default(f.name)})"
    elif has_visible_default:
        text += f" (default: {f.default})"
    for name, values in f.metadata.get("only", {}).items():
        choices = Config.__dataclass_fields__[name].metadata["choices"]
        others = [choice for choice in choices if choice not in values]
        if len(others) == 1:
            text += f" [not {name} {others[0]}]"
        else:
            text += f" [{name} {', '.join(values)} only]"
    return text


def varying_default(name):
    """Return the defaults of a setting in words: the usual one, then those of other presets"""
    presets_of = {}                                    # {default: the presets that have it}
    for preset, defaults in PRESETS.items():
        presets_of.setdefault(defaults[name], []).append(preset)
    usual, *others = presets_of
    words = [str(usual)]
    for default in others:
        words.append(f"{', '.join(presets_of[default])} {default}")
    return "; ".join(words)


def given_settings(args):
    """Return the settings that were given on the command line, {name: value}; model is a list"""
    return {f.name: getattr(args, f.name) for f in SETTINGS if hasattr(args, f.name)}


def run_cli(main):
    """Call main(). What the user can correct becomes one line on standard error and exit code 2,
    Ctrl-C one line and exit code 130; neither has a traceback"""
    np.seterr(all="ignore")
    try:
        main()
    except KeyboardInterrupt as stop:
        print(str(stop) or "stopped", file=sys.stderr)
        sys.exit(130)
    except (InputError, OSError, MemoryError) as error:
        message = str(error) or "out of memory"
        print("error: " + " ".join(message.split()), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run_cli(main)
