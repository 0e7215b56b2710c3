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
squash in place of the ReLU. The loss is the margin loss on the capsule lengths plus 0.01 times the summed squared error
of the two reconstructions; gradients flow through all routing iterations. Muon (steps along the orthogonalized
momentum) trains the kernels of the normalized convolutions, Adam all other parameters.

Deviations from the paper and its official code:
  - six small convolutions, not two of 9x9 (`--preset classic`: two, with fewer channels; `--preset paper`: the paper's;
    `--preset residual`: ten, with skip connections; `--preset half-digit`: a receptive field of half a digit)
  - batch normalization (`--norm none` removes it) and Muon (`--muon 0`: Adam for all parameters)
  - a reconstruction weight of 0.01, not 0.0005; no bias on the digit capsules; cosine, not exponential decay
  - the central 20x20 px of the two digits overlap with IoU >= 0.8 in every pair (`--min-iou 0`: the paper's protocol)
  - the pixel-wise maximum of the two digits (`--merge add`: the sum clipped at 255, as in the official code)
  - newly drawn pairs in every epoch, not a fixed training set; in long runs also small deformations (`--warp`)

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# BLAS works on one thread, since worker threads share a batch. This must be said before numpy is
# imported.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
                 "VECLIB_MAXIMUM_THREADS"):
    os.environ[variable] = "1"
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

EXPERIMENT = "multimnist_capsnet"
# a tuple, since other experiments have several
PRETRAINED = (Path(__file__).resolve().with_name("weights") / "multimnist_capsnet.npz",)
# Axis legend, in the shape comments at line ends:
#   N batch   H W height, width   C channels in   F channels out   K kernel side
#   I primary capsules   J digit capsules, classes   R digits to reconstruct per image
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


MODERN = {"conv1_channels": 16, "norm": "batch", "lr": 0.01, "muon": 0.02, "warmup": 200,
          "recon_weight": 0.01}
PAPER = {"norm": "none", "lr": 0.002, "muon": 0.0, "warmup": 0, "recon_weight": 0.0005}
PRESETS = {                        # by --preset
    "deep": MODERN,
    "half-digit": MODERN,
    "residual": MODERN | {"lr": 0.003, "muon": 0.006, "recon_weight": 0.005},
    "classic": PAPER | {"conv1_channels": 32},
    "paper": PAPER | {"conv1_channels": 256}}
TWO_CONVOLUTIONS = "classic", "paper"                  # presets of the capsule network alone
NORMALIZED = {"norm": ("batch",)}
CNNS = "cnn", "cnn-vectors"        # their scores are logits; those of others are lengths of vectors
OF_CNNS = {"model": CNNS}
WITH_DECODER = {"model": ("capsnet", "cnn-vectors", "vector-dense")}


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run; the flags of the command line are made from them.

    A setting that is not given, or None, becomes its default. Raise InputError if a value is of
    another type or out of bounds, or if it differs from the default although the setting does not
    apply beside the others."""
    digits: str = setting("auto", "auto: MNIST, else synthetic", test=True,
                          choices=("auto", "mnist", "synthetic"))
    data_dir: str = setting("", "folder of idx files; else $MNIST_DIR or download",
                            alias="--mnist-dir", metavar="DIR", runtime=True)
    n_train: int = setting(6000, "training pairs per epoch, newly drawn in every epoch",
                           low=1, high=10_000_000)
    n_val: int = setting(2000, "validation pairs, of held-out training images", low=1, high=100_000)
    n_test: int = setting(10000, "test pairs", low=1, high=1_000_000, test=True, runtime=True)
    min_iou: float = setting(0.8, "minimum IoU of a pair's boxes; 0: the paper's pairs",
                             low=0, high=1, test=True)
    merge: str = setting("max", "how digits are merged; add: sum clipped at 255",
                         choices=("max", "add"), test=True)
    warp: float = setting(0.0, "strength of random deformations of training digits (see "
                          "warp_digits)", low=0, high=4)
    model: str = setting("capsnet", "network",
                         choices=("capsnet", "cnn", "cnn-vectors", "vector-dense"))
    preset: str = setting("deep", "convolutions, see above; classic and paper only with --model "
                          "capsnet", choices=tuple(PRESETS))
    conv1_channels: int = setting(None, "channels of Conv1", low=1, high=4096)
    conv3_channels: int = setting(64, "base width C, the channels of Conv3; half-digit: 2 C",
                                  low=1, high=4096,
                                  only={"preset": ("deep", "residual", "half-digit")})
    norm: str = setting(None, "normalization of convolutions, over groups of 16 samples",
                        choices=("batch", "none"))
    routing_iters: int = setting(3, "1: no routing", low=1, high=50, test=True,
                                 only={"model": ("capsnet",)})
    cnn_head: str = setting("dense", "gap: global average pooling first", choices=("dense", "gap"),
                            only=OF_CNNS)
    seed: int = setting(0, "of all random numbers; the same seed, the same bits",
                        low=0, high=2 ** 32 - 1, test=True)
    n_epochs: int = setting(12, "training epochs", low=1, high=10_000)
    batch_size: int = setting(32, "pairs per step", low=1, high=4096)
    lr: float = setting(None, "learning rate of Adam", low=1e-9, high=1e6)
    lr_schedule: str = setting("cosine", "cosine: decay to 0", choices=("cosine", "constant"))
    warmup: int = setting(None, "steps of linear warm-up", low=0, high=100_000)
    muon: float = setting(None, "step of Muon, relative to a kernel's norm; 0: Adam for all",
                          low=0, high=1, only=NORMALIZED)
    recon_weight: float = setting(None, "weight of the reconstructions' summed squared error",
                                  low=0, high=1e6, only=WITH_DECODER)
    recompute_statistics: int = setting(0, "before the test, recompute running statistics on "
                                        "up to N training pairs", low=0, high=2000, test=True,
                                        runtime=True, only=NORMALIZED)
    threads: int = setting(0, "0: one per core; results do not depend on it",
                           low=0, high=256, runtime=True)
    quiet: bool = setting(False, "print only errors", runtime=True)
    n_classes: int = 10            # no flag: of the data, 2 to 62

    def __post_init__(self):
        check_types(self)
        fill_in(self, defaults_of(self))
        if self.preset in TWO_CONVOLUTIONS and self.model != "capsnet":
            raise InputError(f"--preset {self.preset} applies only to --model capsnet. "
                             "Give another preset")


SETTINGS = [f for f in dataclasses.fields(Config) if "help" in f.metadata]


def defaults_of(config):
    """Return {name: default} of all settings of a Config; some depend on its preset or on another
    setting. A preset that does not exist is refused by check_setting"""
    defaults = {f.name: f.default for f in dataclasses.fields(Config)}
    defaults |= PRESETS.get(config.preset, MODERN)
    norm = config.norm if config.norm is not None else defaults["norm"]
    if norm == "none":
        defaults["muon"] = 0.0
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
    if config.model != "capsnet":
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
    """Compute the outputs of the network for all samples: scores, v, digits and recon, as far as
    forward has them, {name: array}. decode: "labels" or "predicted" classes"""
    def one(rows):
        batch = to_batch(samples, rows, weights["conv1_w"].dtype)
        digits = batch["labels"] if decode == "labels" else None
        out, _ = forward(weights, batch["images"], config, digits)
        return {name: out[name] for name in ("scores", "v", "digits", "recon") if name in out}
    parts = list(workers.map(one, batches(samples, SHARD)))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def top_two(scores):
    """Return the classes of the two highest scores, highest first, (N, 2) int64. Ties go to the
    smaller digit."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :2]


def k_hot(labels, dtype, J):
    """Return (N, J) of type dtype, 1 for the classes in labels (N, 2) and 0 for the others."""
    return np.eye(J, dtype=dtype)[labels].max(1)


def exact_match(predicted, labels):
    """Return whether each pair's two predicted classes are exactly its labels, (N,) bool; both
    (N, 2), in any order."""
    return (np.sort(predicted, 1) == np.sort(labels, 1)).all(1)


def class_activations(out, config):
    """Return a number from 0 to 1 for each class, (N, J): the length of its vector or, of a CNN,
    its probability. out: of forward or forward_shards"""
    if config.model in CNNS:
        return sigmoid(out["scores"])
    return out["scores"]


def evaluate(weights, chunks, config, workers):
    """Compute accuracies and losses over dicts of pairs, such as those of stream_pairs.

    Return a dict of
      n                   number of pairs
      exact_match, hits   fraction and number of the pairs whose two predicted classes are exactly
                          their two digits
      correct             whether each pair is such an exact match, (n,) bool
      confusion           see confusion_of_pairs
      at_least_one        fraction of the pairs with at least one of their digits among the two
                          predicted classes
      loss                what is minimized, as in loss_and_grads, mean over the pairs
      margin, recon       its terms; of a CNN cross_entropy in place of margin
      recon_mse           mean squared error per pixel of the reconstructions of the two true digits
      baseline_recon_mse  the same for the best constant image, the mean of all these digits
    recon and recon_mse only of a network with a decoder."""
    labels, predicted = [], []
    loss_sum = recon_sum = square_sum = 0.0
    pixel_sum = np.zeros((CANVAS, CANVAS))
    for chunk in chunks:
        out = forward_shards(weights, chunk, config, workers)
        size = len(chunk["labels"])
        labels.append(chunk["labels"])
        predicted.append(top_two(out["scores"]))
        target = chunk["sources"].astype(out["scores"].dtype) / 255                   # (n, 2, H, W)
        loss, _ = classification_loss(out, chunk, config)
        loss_sum += loss * size
        if "recon" in out:
            recon, _ = reconstruction_loss(out["recon"], target)
            recon_sum += recon * size
        square_sum += float(np.square(target).sum())
        pixel_sum += chunk["sources"].sum((0, 1))
    labels = np.concatenate(labels)
    predicted = np.concatenate(predicted)
    n = len(labels)
    n_found = (k_hot(labels, int, config.n_classes)
               * k_hot(predicted, int, config.n_classes)).sum(1)                        # of 2, (n,)
    n_pixels = 2 * CANVAS * CANVAS
    mean_digit = pixel_sum / (2 * n) / 255
    # Mean over pairs of |x - mean_digit|^2 = |x|^2 - 2 x . mean_digit + |mean_digit|^2 of both digits
    constant_error = square_sum / n - 2 * np.square(mean_digit).sum()
    correct = n_found == 2
    metrics = {
        "n": n,
        "hits": int(correct.sum()),
        "exact_match": correct.mean(),
        "correct": correct,
        "at_least_one": (n_found >= 1).mean(),
        "confusion": confusion_of_pairs(labels, predicted, config.n_classes).tolist(),
        loss_name(config): loss_sum / n,
        "loss": loss_sum / n + config.recon_weight * (recon_sum / n),
        "baseline_recon_mse": constant_error / n_pixels}
    if "recon" in out:
        metrics["recon"] = recon_sum / n
        metrics["recon_mse"] = recon_sum / n / n_pixels
    return metrics


def confusion_of_pairs(labels, predicted, J):
    """Count which classes are predicted for which, (J, J): a row per class in the image, a column
    per class predicted for it. One that is found counts on the diagonal; of two that are missed,
    each counts half in two columns. labels, predicted: (n, 2)"""
    here = k_hot(labels, float, J)                                                      # (n, J)
    there = k_hot(predicted, float, J)
    found = here * there
    missed = here * (1 - there)
    wrong = there * (1 - here)
    n_wrong = np.maximum(wrong.sum(1, keepdims=True), 1)
    return np.diag(found.sum(0)) + missed.T @ (wrong / n_wrong)


def validate(weights, data, config, workers):
    """Return evaluate's means over the validation pairs, the same after every epoch, {"val_" +
    name: value}"""
    # The last number, a key of the generator, is 0 for validation and 1 for test pairs
    pairs = stream_pairs(data, "val", config.n_val, config, EVALUATION, 0)
    metrics = evaluate(weights, pairs, config, workers)
    means = "exact_match", "at_least_one", loss_name(config), "loss", "recon", "recon_mse"
    return {"val_" + name: metrics[name] for name in means if name in metrics}


def evaluate_test(weights, data, config, workers):
    """Return evaluate's metrics of the test pairs"""
    pairs = stream_pairs(data, "test", config.n_test, config, EVALUATION, 1)
    return evaluate(weights, pairs, config, workers)


# ---------------------------------------------------------- the task: pairs of overlapping digits

DATA, INIT, BATCHES, EVALUATION = range(4)                     # purposes of random numbers


def rng_for(seed, purpose, *key):
    """Return a generator for each purpose and key: drawing more of one thing does not change
    another"""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, *key)))


CANVAS = 36                        # side of a composite, px
MAX_SHIFT = 4                      # a digit is translated by -4..+4 whole px on each axis
BOX = 20                           # px; MNIST's digits fit a 20x20 box, here assumed at the center
                                   # of the 28x28 image
CHUNK = 2048                       # pairs drawn at once, so that memory does not grow with all


def allowed_shift_pairs(min_iou):
    """Return all pairs of shifts for which the two digits' 20x20 px boxes overlap with IoU >=
    min_iou: (n, 2, 2) int64, (dy, dx) in px of the first and of the second digit"""
    n_shifts = 2 * MAX_SHIFT + 1
    pairs = np.indices((n_shifts,) * 4).reshape(4, -1).T.reshape(-1, 2, 2) - MAX_SHIFT
    overlaps = np.maximum(BOX - np.abs(pairs[:, 0] - pairs[:, 1]), 0)                   # (n, 2), px
    intersection = overlaps.prod(-1)                                                    # (n,), px^2
    union = 2 * BOX * BOX - intersection
    return pairs[intersection / union >= min_iou - 1e-12]


def shift_digits(images, shifts):
    """Return images (n, 28, 28) on canvases (n, 36, 36), translated from the center by shifts
    (n, 2), (dy, dx) px"""
    around = (2 * MAX_SHIFT, 2 * MAX_SHIFT)
    padded = np.pad(images, [(0, 0), around, around])                                  # (n, 44, 44)
    windows = sliding_window_view(padded, (CANVAS, CANVAS), axis=(1, 2))         # (n, 9, 9, 36, 36)
    tops = MAX_SHIFT - shifts[:, 0]
    lefts = MAX_SHIFT - shifts[:, 1]
    return windows[np.arange(len(images)), tops, lefts]


BEND_GRID = 5                      # nodes per side of the grid of an elastic deformation


def warp_digits(images, strength, rng):
    """Apply a small random affine and elastic deformation to every image, about its center.

    images: (n, 28, 28) uint8. strength: 1 means a rotation by up to 10 degrees, a shear by up to
    0.1, a scaling of each axis by up to 10%, and displacements drawn on a grid, as in resample,
    with a standard deviation of 0.5 px. All of these are proportional to strength. Return
    (n, 28, 28) uint8."""
    n = len(images)
    angle, shear, scale_y, scale_x = rng.uniform(-strength, strength, (4, n))
    cos = np.cos(angle * np.deg2rad(10))
    sin = np.sin(angle * np.deg2rad(10))
    shear = shear * 0.1
    scale_y = 1 + scale_y * 0.1
    scale_x = 1 + scale_x * 0.1
    upper = [cos * scale_y, (shear * cos + sin) * scale_x]     # rows of a matrix for each image
    lower = [-sin * scale_y, (cos - shear * sin) * scale_x]
    linear = np.stack(upper + lower, -1).reshape(n, 2, 2)
    displacement = rng.normal(0, 0.5 * strength, (n, 2, BEND_GRID, BEND_GRID))
    # 64 images at a time fit the processor's cache: 1.3 to 2.4 times as fast as all at once
    parts = [slice(start, start + 64) for start in range(0, n, 64)]
    return np.concatenate([resample(images[part], linear[part], displacement[part])
                           for part in parts])


def resample(images, linear, displacement):
    """Resample images under a linear map and a displacement field.

    The output pixel at p = (y, x), measured from the center, is the input at linear @ p +
    displacement(p), interpolated bilinearly between four pixels, and 0 outside its borders. images:
    (n, side, side) uint8. linear: (n, 2, 2). displacement: (n, 2, BEND_GRID, BEND_GRID) px, at the
    nodes of a grid, linearly interpolated between them. Return (n, side, side) uint8."""
    n, side, _ = images.shape
    center = (side - 1) / 2
    spacing = (side - 1) / (BEND_GRID - 1)
    nodes = np.arange(BEND_GRID)
    weights = np.maximum(0, 1 - np.abs(np.arange(side)[:, None] / spacing - nodes))
    source = (weights @ displacement @ weights.T).astype(np.float32)            # (n, 2, side, side)
    linear = linear.astype(np.float32)[..., None, None]
    from_center = np.arange(side, dtype=np.float32) - center
    source += linear[:, :, 0] * from_center[:, None] + linear[:, :, 1] * from_center
    # Positions in images with a border of one pixel, which is 0
    source = np.clip(source + np.float32(center + 1), 0, side + 1 - 1e-3)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1))).astype(np.float32)
    corner = source.astype(np.int32)
    y, x = corner.transpose(1, 0, 2, 3)                                            # (n, side, side)
    dy, dx = (source - corner).transpose(1, 0, 2, 3)
    width = side + 2
    image = np.arange(n, dtype=np.int32)[:, None, None]
    index = (image * width + y) * width + x                                    # of padded.flatten()
    upper = np.take(padded, index) * (1 - dx) + np.take(padded, index + 1) * dx
    below = index + width
    lower = np.take(padded, below) * (1 - dx) + np.take(padded, below + 1) * dx
    return np.rint(upper * (1 - dy) + lower * dy).astype(np.uint8)


def generate_multimnist(images, labels, n, rng, min_iou=0.8, merge="max", warp=0.0):
    """Draw n pairs of digits of different classes; all pairs of shifts with the required overlap
    are equally likely.

    images: (n_images, 28, 28) uint8. labels: (n_images,). min_iou: see allowed_shift_pairs. merge:
    "max" for the pixel-wise maximum of the two digits, "add" for their sum, clipped at 255. warp:
    the strength of warp_digits, which deforms each digit before it is translated.

    Return a dict of
      composites  the images, (n, 36, 36) uint8
      sources     the two digits of each, translated, (n, 2, 36, 36) uint8
      labels      their classes, (n, 2) int64
      shifts      their translations, (n, 2, 2) int64, px
      index       which of the images they are, (n, 2) int64"""
    labels = np.asarray(labels).astype(np.int64)
    allowed = allowed_shift_pairs(min_iou)
    index = draw_pairs(labels, n, rng)
    shifts = allowed[rng.integers(0, len(allowed), n)]
    digits = images[index.ravel()]
    if warp:
        digits = warp_digits(digits, warp, rng)
    sources = shift_digits(digits, shifts.reshape(-1, 2)).reshape(n, 2, CANVAS, CANVAS)
    if merge == "max":
        composites = sources.max(1)
    else:
        composites = np.minimum(sources.sum(1), 255).astype(np.uint8)
    return {"composites": composites, "sources": sources, "labels": labels[index],
            "shifts": shifts, "index": index}


def draw_pairs(labels, n, rng):
    """Return the indices of n pairs of digits, (n, 2) int64: the first uniform over all of labels,
    the second uniform over those of other classes"""
    by_class = np.argsort(labels, kind="stable")
    count = np.bincount(labels)
    start = np.cumsum(count) - count                           # of each class in by_class
    if (count > 0).sum() < 2:
        raise InputError("pairs need two classes among the training, the validation and the test "
                         "images. Give more")
    first = rng.integers(0, len(labels), n)
    label = labels[first]
    place = rng.integers(0, len(labels) - count[label])      # in by_class without the first's class
    place = place + count[label] * (place >= start[label])     # in by_class
    return np.stack([first, by_class[place]], 1)


def stream_pairs(data, split, n, config, *key, warp=0.0, size=CHUNK):
    """Yield n pairs from a split of load_data's dict, in dicts (see generate_multimnist) of at most
    `size` pairs, each drawn by the generator of the key (see rng_for) and its number"""
    images, labels = data[split]
    for k, start in enumerate(range(0, n, size)):
        rng = rng_for(config.seed, *key, k)
        yield generate_multimnist(images, labels, min(size, n - start), rng, config.min_iou,
                                  config.merge, warp)


def epoch_samples(data, epoch, config):
    """Return a generator of the training pairs of one epoch, newly drawn, in chunks of whole
    batches"""
    size = max(1, CHUNK // config.batch_size) * config.batch_size
    return stream_pairs(data, "train", config.n_train, config, BATCHES, epoch,
                        warp=config.warp, size=size)


def to_batch(pairs, rows, dtype=np.float32):
    """Return a dict of the given rows of pairs: images (N, 36, 36) and sources (N, 2, 36, 36),
    pixel values in [0, 1] of type dtype, and labels (N, 2)"""
    return {
        "images": pairs["composites"][rows].astype(dtype) / 255,
        "sources": pairs["sources"][rows].astype(dtype) / 255,
        "labels": pairs["labels"][rows]}


LABELS_PER_IMAGE = 2               # for predict.py, as are image_shapes and prepare_images


def image_shapes(config):
    """Return the shapes of the images that prepare_images takes: of a composite, and of a digit"""
    return (CANVAS, CANVAS), (28, 28)


def prepare_images(images, config):
    """Return images as forward takes them, (n, 36, 36) float32 in [0, 1]. images: (n, 36, 36)
    uint8, or (n, 28, 28), which are placed at the center"""
    margin = (CANVAS - images.shape[1]) // 2
    return np.pad(images, ((0, 0), (margin, margin), (margin, margin))) / np.float32(255)


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


def sigmoid(x):
    """Compute 1 / (1 + exp(-x)), by tanh so that it cannot overflow"""
    return 0.5 * np.tanh(0.5 * x) + 0.5


def sigmoid_cross_entropy(scores, present):
    """Compute the CNN's loss: binary cross-entropy with logits, summed over the classes and
    averaged over the batch. With p = sigmoid(score):
      -T log p - (1 - T) log(1 - p) = log(1 + exp(-score)) + (1 - T) score

    scores: (N, J). present: T, (N, J), 1 for the classes in the image, 0 for the others. Return the
    loss, a float, and dscores, (N, J)."""
    N = len(scores)
    loss = np.logaddexp(0, -scores) + (1 - present) * scores
    return float(loss.sum()) / N, (sigmoid(scores) - present) / N


def reconstruction_loss(recon, target):
    """Compute the squared error of the reconstructions, summed over pixels and digits and averaged
    over the batch. recon, target: (N, R, H, W). Return the loss, a float, and drecon,
    (N, R, H, W)."""
    error = recon - target
    return float(np.vdot(error, error)) / len(recon), error * (2 / len(recon))


def classification_loss(out, batch, config):
    """Compute the classification loss: the margin loss on the lengths or, for a CNN, the
    cross-entropy on its logits. out: the result of forward. batch: a dict with labels, (N, 2).
    Return the loss, a float, and dscores, (N, J)."""
    present = k_hot(batch["labels"], out["scores"].dtype, config.n_classes)
    if config.model in CNNS:
        return sigmoid_cross_entropy(out["scores"], present)
    return margin_loss(out["scores"], present)


def loss_name(config):
    """Return what the classification loss is called among the metrics"""
    if config.model in CNNS:
        return "cross_entropy"
    return "margin"


# -------------------------------------------------------------- the networks

E, D = 8, 16                       # dimensions of a primary and of a digit capsule
VOTE_GAIN = 0.01                   # initial variance of a vote / variance of primary capsules; with
                                   # 0.08 accuracy is 3 points lower after 12 epochs
TYPES = {"classic": 8, "paper": 32}                            # of primary capsules; others have 16
DECODER = {"residual": (512, 1024), "paper": (512, 1024)}      # hidden units; others 256 and 512

# A convolution, in this order: valid, with F channels and a KxK kernel; a normalization or a bias;
# 2x2 max pooling if `pool`; a ReLU, but for PrimaryCaps. A skip connection adds the input of a
# convolution with skip "start" to the output of the next one with skip "end"; these pad by one
# pixel.
Conv = collections.namedtuple("Conv", "name F K stride pool skip", defaults=(3, 1, False, ""))


def convolutions(config):
    """Return the convolutions of a network; the last one of a capsule network is PrimaryCaps"""
    first = config.conv1_channels
    base = config.conv3_channels
    primary = TYPES.get(config.preset, 16) * E
    if config.preset in TWO_CONVOLUTIONS:
        return Conv("conv1", first, 9), Conv("primary", primary, 9, 2)
    if config.preset == "half-digit":
        convs = (Conv("conv1", first), Conv("conv2", first, pool=True),
                 Conv("conv3", 2 * base, stride=2))
    elif config.preset == "residual":
        convs = (Conv("conv1", first), Conv("conv2", 2 * first, pool=True),
                 Conv("conv3", base),
                 Conv("branch1", base, skip="start"), Conv("branch2", base, skip="end"),
                 Conv("conv4", 2 * base, pool=True),
                 Conv("branch3", 2 * base, skip="start"), Conv("branch4", 2 * base, skip="end"),
                 Conv("conv5", 4 * base))
    else:
        convs = (Conv("conv1", first), Conv("conv2", first, pool=True),
                 Conv("conv3", base), Conv("conv4", base, pool=True),
                 Conv("conv5", 2 * base))
    if config.model == "capsnet":
        return (*convs, Conv("primary", primary, 1))
    return convs


def output_side(conv, side):
    """Return the side of a convolution's output, px, given that of its input"""
    if conv.skip:
        side = side + 2
    side = (side - conv.K) // conv.stride + 1
    if conv.pool:
        side = side // 2
    return side


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


def dense_layer(name, n_inputs, n_units, gain, fan_in=None):
    """Return {name: Parameter} of a dense layer"""
    return {name + "_w": normal((n_inputs, n_units), gain, fan_in),
            name + "_b": constant(0, n_units)}


def parameters(config):
    """Return {name: Parameter} of a network, in the order in which init_params draws them.

    The gain is 2 where a ReLU follows (He initialization), VOTE_GAIN for the transformation
    matrices and for the dense layer in their place in vector-dense, and 1 elsewhere."""
    table, side, channels = backbone_parameters(config)
    J = config.n_classes
    n_features = side * side * channels
    if config.cnn_head == "gap":                               # of CNNs only
        n_features = channels
    if config.model == "capsnet":
        table["W"] = normal((n_features // E, E, J, D), VOTE_GAIN, fan_in=E)
    elif config.model == "vector-dense":
        table |= dense_layer("fc1", n_features, J * D, VOTE_GAIN)
    else:
        n_hidden = cnn_hidden_units(config, n_weights(table), n_features)
        table |= dense_layer("fc1", n_features, n_hidden, 2)
        table |= dense_layer("fc2", n_hidden, J, 1)
    if config.model != "cnn":
        first, second = DECODER.get(config.preset, (256, 512))
        table |= dense_layer("dec1", J * D, first, 2, fan_in=D)               # all but D are masked
        table |= dense_layer("dec2", first, second, 2)
        table |= dense_layer("dec3", second, CANVAS * CANVAS, 1)
    return table


def backbone_parameters(config):
    """Return {name: Parameter} of the convolutions, and the side and the channels of their
    output"""
    table = {}
    side, channels = CANVAS, 1
    for conv in convolutions(config):
        shape = (conv.K, conv.K, channels, conv.F)
        if conv.name == "conv1":       # im2col_rows has unrolled the rows of a window to channels
            shape = (1, conv.K, conv.K, conv.F)
        table[conv.name + "_w"] = normal(shape, 1 if conv.name == "primary" else 2)
        if config.norm == "batch":
            table[conv.name + "_norm_gamma"] = constant(1, conv.F)
            table[conv.name + "_norm_beta"] = constant(0, conv.F)
        else:
            table[conv.name + "_b"] = constant(0, conv.F)
        side = output_side(conv, side)
        channels = conv.F
    return table, side, channels


def n_weights(table):
    """Return how many numbers the Parameters of a table have"""
    return sum(math.prod(p.shape) for p in table.values())


def cnn_hidden_units(config, n_backbone, n_features):
    """Return the largest size of the CNN's hidden layer for which it has at most as many parameters
    as the capsule network without its decoder, of the same preset and conv3_channels and with the
    preset's own conv1_channels. n_backbone: the number of parameters of the CNN's convolutions.
    n_features: of numbers that its hidden layer sees.

    For cnn-vectors, whose decoder is not counted either, it is J * D, as many units as the digit
    capsules have."""
    J = config.n_classes
    capsnet = Config(preset=config.preset, conv3_channels=config.conv3_channels, n_classes=J)
    table, side, channels = backbone_parameters(capsnet)
    n_capsnet = n_weights(table) + side * side * channels * J * D
    largest = (n_capsnet - n_backbone - J) // (n_features + 1 + J)
    wanted, least = largest, J
    if config.model == "cnn-vectors":
        wanted = least = J * D
    if largest < least:
        raise InputError("too few hidden units are left. Use --cnn-head gap or, with it, fewer "
                         "--conv1-channels")
    return wanted


def param_shapes(config):
    """Return {name: shape} of the parameters of a network"""
    return {name: p.shape for name, p in parameters(config).items()}


def init_params(config):
    """Draw the initial parameters of a network: {name: float32 array}; see parameters"""
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
    """Compute the losses and all gradients of a batch, or of one shard of it. Pure function.

    batch: the result of to_batch. share: the shard's share of the samples in its batch. All losses
    and gradients are means over the shard times share, so that they add up to means over the batch.

    Return three dicts: terms, grads and statistics. terms:
      loss       what is minimized: margin + recon_weight * recon
      margin     the classification loss; for cnn and cnn-vectors cross_entropy in its place
      recon      the summed squared error of both digits; not of cnn
      accuracy   the fraction of images that are correctly classified, here of pairs of which both
                 digits are (exact match)
    grads has the keys of params. statistics: the mean and the variance that each normalization
    used, {name: (C,)}."""
    labels = batch["labels"]
    statistics = {}
    out, caches = forward(params, batch["images"], config, labels, statistics)
    convs_cache, head_cache, decoder_cache = caches

    classification, dscores = classification_loss(out, batch, config)
    terms = {"loss": classification * share, loss_name(config): classification * share}
    grads = {}
    dv = 0
    if "recon" in out:
        recon, drecon = reconstruction_loss(out["recon"], batch["sources"])
        terms["loss"] = (classification + config.recon_weight * recon) * share
        terms["recon"] = recon * share
        dv = decoder_backward(drecon * (config.recon_weight * share), decoder_cache, grads)
    terms["accuracy"] = exact_match(top_two(out["scores"]), labels).mean() * share

    _, head_backward = HEADS[config.model]
    dx = head_backward(dscores * share, dv, head_cache, config, grads)
    convolutions_backward(dx, convs_cache, grads)
    return terms, grads, statistics


def forward(params, images, config, digits=None, statistics=None):
    """Compute the outputs of the network and a cache for backward.

    images: (N, 36, 36), pixel values in [0, 1]. digits: (N, R), the capsules to decode; None for
    the two predicted classes. statistics: a dict in training, which receives the mean and variance
    of each normalization; None in evaluation, which uses the running ones in params.

    Return out and the caches of convolutions, head and decoder. out is a dict of
      scores  (N, J), by which classes are predicted: the lengths of the class vectors; of cnn and
              cnn-vectors logits
      v       class vectors, (N, J, D): digit capsules or, of vector-dense and cnn-vectors, vectors;
              not of cnn
      digits  (N, R), as given, or the two predicted classes
      recon   their reconstructions, (N, R, 36, 36); not of cnn
      u       primary capsules, (N, I, E), with I in the order (row, column, type); only of capsnet
      c       list of the iterations' coupling coefficients, (1, I) first, then (N, J, I); only of
              capsnet
    """
    head_forward, _ = HEADS[config.model]
    x, convs_cache = convolutions_forward(params, images, config, statistics)   # (N, side, side, C)
    out, head_cache = head_forward(params, x, config)
    out["digits"] = top_two(out["scores"]) if digits is None else digits
    decoder_cache = None
    if "v" in out:
        out["recon"], decoder_cache = decoder_forward(params, out["v"], out["digits"])
    return out, (convs_cache, head_cache, decoder_cache)


def convolutions_forward(params, images, config, statistics):
    """Compute all convolutions (see Conv). Return x (N, side, side, C) and a cache: for each
    convolution the Conv, the caches of its parts and its output. statistics: see forward"""
    x = im2col_rows(images, params["conv1_w"].shape[1])                               # (H, N, W, C)
    caches = []
    kept = None                                                # where a skip connection starts
    for conv in convolutions(config):
        if conv.skip == "start":
            kept = x
        if conv.skip:
            x = np.pad(x, ((1, 1), (0, 0), (1, 1), (0, 0)))
        x, conv_cache = conv2d_forward(x, params[conv.name + "_w"], conv.stride)
        norm_cache = pool_cache = None
        if config.norm == "batch":
            x, norm_cache = conv_norm_forward(params, x, conv.name + "_norm", statistics)
        else:
            x += params[conv.name + "_b"]
        if conv.pool:
            x, pool_cache = max_pool_forward(x)
        if conv.skip == "end":
            x = x + kept
        if conv.name != "primary":
            np.maximum(x, 0, out=x)    # in place: y of pool_cache changes, which it may
        caches.append((conv, conv_cache, norm_cache, pool_cache, x))
    return x.swapaxes(0, 1), caches                                             # (N, side, side, C)


def conv_norm_forward(params, x, name, statistics):
    """Compute the normalization of this name; statistics: see forward. Return y and a cache"""
    running = None
    if statistics is None:
        running = params[name + "_mean"], params[name + "_var"]
    y, found, cache = norm_forward(x, params[name + "_gamma"], params[name + "_beta"], running)
    if statistics is not None:
        statistics[name + "_mean"], statistics[name + "_var"] = found
    return y, cache


def convolutions_backward(dx, caches, grads):
    """Put the gradients of all convolutions into grads. dx: (N, side, side, C)"""
    dx = dx.swapaxes(0, 1)                                                            # (H, N, W, C)
    dkept = None
    for conv, conv_cache, norm_cache, pool_cache, y in reversed(caches):
        if conv.name != "primary":
            dx = dx * (y > 0)
        if conv.skip == "end":
            dkept = dx
        if conv.pool:
            dx = max_pool_backward(dx, pool_cache)
        if norm_cache is None:
            grads[conv.name + "_b"] = dx.reshape(-1, conv.F).sum(0)
        else:
            dx, dgamma, dbeta = norm_backward(dx, norm_cache)
            grads[conv.name + "_norm_gamma"] = dgamma
            grads[conv.name + "_norm_beta"] = dbeta
        is_first = conv.name == "conv1"                        # no gradient of the image is needed
        dx, grads[conv.name + "_w"] = conv2d_backward(dx, conv_cache, need_dx=not is_first)
        if conv.skip:
            dx = dx[1:-1, :, 1:-1]
        if conv.skip == "start":
            dx = dx + dkept


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
# and puts the gradients of its parameters into grads. dv: the decoder's gradient, or 0.

def capsnet_head_forward(params, x, config):
    """Compute primary and digit capsules. x: the output of PrimaryCaps before the squash."""
    u, squash_cache = squash_forward(x.reshape(len(x), -1, E))                          # (N, I, E)
    u_hat, votes_cache = votes_forward(u, params["W"])                                # (N, J, I, D)
    v, routing_cache = routing_forward(u_hat, config.routing_iters)                     # (N, J, D)
    lengths, lengths_cache = lengths_forward(v)                                         # (N, J)
    _, steps = routing_cache
    out = {"scores": lengths, "v": v, "u": u, "c": [c for c, _, _ in steps]}
    return out, (x.shape, squash_cache, votes_cache, routing_cache, lengths_cache)


def capsnet_head_backward(dscores, dv, cache, config, grads):
    shape, squash_cache, votes_cache, routing_cache, lengths_cache = cache
    dv = dv + lengths_backward(dscores, lengths_cache)
    du_hat = routing_backward(dv, routing_cache)
    du, grads["W"] = votes_backward(du_hat, votes_cache)
    return squash_backward(du, squash_cache).reshape(shape)


def dense_vectors_head_forward(params, x, config):
    """A dense layer maps x to a vector per class, which is squashed."""
    s, dense_cache = linear_forward(x.reshape(len(x), -1), params["fc1_w"], params["fc1_b"])
    v, squash_cache = squash_forward(s.reshape(len(x), -1, D))                          # (N, J, D)
    lengths, lengths_cache = lengths_forward(v)
    return {"scores": lengths, "v": v}, (x.shape, dense_cache, squash_cache, lengths_cache)


def dense_vectors_head_backward(dscores, dv, cache, config, grads):
    shape, dense_cache, squash_cache, lengths_cache = cache
    dv = dv + lengths_backward(dscores, lengths_cache)
    ds = squash_backward(dv, squash_cache)
    dx, grads["fc1_w"], grads["fc1_b"] = linear_backward(ds.reshape(len(ds), -1), dense_cache)
    return dx.reshape(shape)


def cnn_head_forward(params, x, config):
    """Compute the logit of each class from a hidden layer, which sees all features or, with gap,
    their means over all positions. The hidden layer of cnn-vectors is a vector per class."""
    if config.cnn_head == "gap":
        features = x.mean((1, 2))                                                       # (N, C)
    else:
        features = x.reshape(len(x), -1)
    hidden, hidden_cache = linear_forward(features, params["fc1_w"], params["fc1_b"])
    hidden = np.maximum(hidden, 0)
    scores, scores_cache = linear_forward(hidden, params["fc2_w"], params["fc2_b"])
    out = {"scores": scores}
    if config.model == "cnn-vectors":
        out["v"] = hidden.reshape(len(x), -1, D)
    return out, (x.shape, hidden, hidden_cache, scores_cache)


def cnn_head_backward(dscores, dv, cache, config, grads):
    shape, hidden, hidden_cache, scores_cache = cache
    dhidden, grads["fc2_w"], grads["fc2_b"] = linear_backward(dscores, scores_cache)
    if config.model == "cnn-vectors":
        dhidden += dv.reshape(dhidden.shape)
    dhidden = dhidden * (hidden > 0)
    dx, grads["fc1_w"], grads["fc1_b"] = linear_backward(dhidden, hidden_cache)
    if config.cnn_head == "gap":
        _, H, W, _ = shape
        return np.broadcast_to(dx[:, None, None] / (H * W), shape)
    return dx.reshape(shape)


CNN_HEAD = cnn_head_forward, cnn_head_backward
HEADS = {                          # by --model
    "capsnet": (capsnet_head_forward, capsnet_head_backward),
    "vector-dense": (dense_vectors_head_forward, dense_vectors_head_backward),
    "cnn": CNN_HEAD,
    "cnn-vectors": CNN_HEAD}


def decoder_forward(params, v, digits):
    """Reconstruct each of digits (N, R) from its vector in v (N, J, D), the others masked. Return
    the reconstructions, (N, R, side, side), and a cache"""
    N, J, D = v.shape
    kept = np.eye(J, dtype=v.dtype)[digits][..., None]                                # (N, R, J, 1)
    masked = (v[:, None] * kept).reshape(-1, J * D)                                     # (N*R, J*D)
    y1, cache1 = linear_forward(masked, params["dec1_w"], params["dec1_b"])
    y1 = np.maximum(y1, 0)
    y2, cache2 = linear_forward(y1, params["dec2_w"], params["dec2_b"])
    y2 = np.maximum(y2, 0)
    y3, cache3 = linear_forward(y2, params["dec3_w"], params["dec3_b"])
    y3 = sigmoid(y3)                                                                 # (N*R, pixels)
    side = math.isqrt(y3.shape[1])
    return y3.reshape(*digits.shape, side, side), (kept, cache1, y1, cache2, y2, cache3, y3)


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
      train, val, test  (images, labels) each: (n, 28, 28) and (n,), both uint8
      n_classes         only of other data
      names             of the classes, only of other data with a file labels.txt"""
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
    """Read a data set's four idx files into load_data's dict.

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
    """Return the number of classes. Raise InputError unless the splits that data have are as
    load_data returns them"""
    n_classes = data.get("n_classes", 10 if data["source"] in DIGIT_NAMES else 2)
    for split in sorted(data.keys() & {"train", "val", "test"}):
        where = f"{data['source']}, {split}"
        images, labels = map(np.asarray, data[split])
        n = len(images)
        if images.dtype != np.uint8 or images.shape[1:] != (28, 28) or n == 0:
            raise InputError(f"{where}: images are {images.dtype} {images.shape}. "
                             "Give gray digits, uint8 (n, 28, 28). Other square images, gray or "
                             "in color: affnist_capsnet.py --task images")
        are_whole_numbers = labels.dtype.kind in "iu" and labels.shape == (n,)
        if not are_whole_numbers or labels.min() < 0 or labels.max() > 61:
            raise InputError(f"{where}: labels are {labels.dtype} {labels.shape}. "
                             f"Give {n} from 0 to 61")
        n_classes = max(n_classes, 1 + int(labels.max()))
    return n_classes


def fit_to_data(config, data):
    """Return a Config with the data's number of classes"""
    return dataclasses.replace(config, n_classes=count_classes(data))


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
            "train accuracy {train_accuracy:.3f}  validation accuracy {val_exact_match:.3f}  "
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
    "test_exact_match": ("both digits correct (exact match)", ".4f"),
    "test_at_least_one": ("at least one digit correct", ".4f"),
    "test_recon_mse": ("reconstruction MSE per pixel", ".4f"),
    "baseline_recon_mse": ("... of the mean digit", ".4f")}


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
WATCHED = "val_exact_match"


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
    """Return the metrics of evaluate_test as metrics.json names them, a dict"""
    return {
        "test_exact_match": test["exact_match"],
        "test_hits": test["hits"],
        "test_at_least_one": test["at_least_one"],
        "test_recon_mse": test.get("recon_mse"),
        "confusion": test["confusion"],
        "baseline_recon_mse": test["baseline_recon_mse"],
        "hit_bits": {"test": packed_bits(test["correct"])}}


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
