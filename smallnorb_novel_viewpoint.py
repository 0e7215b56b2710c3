#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0"]
# ///
"""smallNORB novel viewpoints: matrix capsules with EM routing in NumPy, all gradients written out.

Hinton, Sabour & Frosst, "Matrix capsules with EM routing", ICLR 2018; also vector capsules with
dynamic routing (Sabour, Frosst & Hinton, NIPS 2017).

Question: networks are trained on images of objects from a limited range of viewpoints and tested on
novel viewpoints. Does a capsule network classify novel viewpoints better than a CNN? The paper
reports an error of 13.5% for capsules and 20.0% for a CNN on novel azimuths, at an equal error of
3.7% on familiar viewpoints. By default this script trains a small version of the paper's network
and two CNNs on the same images and prints their accuracies side by side.

Models (`--model`, one or several, which are trained in turn):
  - matrix-capsnet: the paper's network, of pose matrices and EM routing; see the table
  - cnn: the paper's CNN, its control, made as small: two convolutions and a hidden layer
  - cnn-bn: the same CNN with batch normalization, which matrix-capsnet has, too
  - four heads on one backbone of four 3x3 convolutions with batch normalization, because the
    backbone changes accuracy more than the head does, with about equal numbers of parameters:
    matrix-head (pose matrices and EM routing to the class capsules), capsnet (vector capsules and
    dynamic routing, one transformation matrix per capsule), capsnet-shared (the same with
    transformation matrices shared across positions and coordinate addition) and cnn-gap (global
    average pooling)

    stage        layer of matrix-capsnet, as it is by default           output
    Input        one toy from one viewpoint, two cameras                (N, 32, 32, 2)
    Conv1        5x5, stride 2, batch normalization, ReLU               (N, 14, 14, 64)
    PrimaryCaps  1x1, batch normalization: 4 types of capsules, each    (N, 14, 14, 4, 4x4 + 1)
                 of a 4x4 pose matrix M and an activation a
    ConvCaps1    3x3, stride 2, 4 types: votes V_ij = M_i W_ij of the   (N, 6, 6, 4, 4x4 + 1)
                 children i for the parents j, EM routing
    ConvCaps2    3x3, stride 1, 4 types: the same                       (N, 4, 4, 4, 4x4 + 1)
    ClassCaps    the same over all 4 x 4 x 4 children, with W shared    (N, 5, 4x4 + 1)
                 across positions and coordinate addition

It has 12,770 parameters; cnn and cnn-bn have 19,124 and 19,151, about as many as the
matrix-capsnet of `--preset small` (18,482). `--preset paper` has the paper's small network, of 64 channels and of 8, 16
and 16 types, and the paper's CNN, of 4.2 million parameters.

EM routing (Procedure 1) alternates two steps. In the M-step, every parent capsule j fits a diagonal
Gaussian to the votes V_ij of its children i; its activation a_j is high if the votes agree. In the
E-step, every child divides itself anew among its parents, in proportion to a_j times the density of
its vote. The loss is the cross-entropy of log a_j; gradients are propagated through all EM
iterations; the optimizer is Adam with cosine decay of the learning rate.

Deviations from the paper:
  - smaller networks
  - unless --preset is paper, the CNN has no dropout (`--dropout 0.5`) and 32 hidden units, not
    1024, and its convolutions are not padded
  - batch normalization in the first convolution and in PrimaryCaps
  - two EM iterations (`--routing-iters 3` for the paper's three)
  - an inverse temperature lambda that is the same in all iterations (`--inverse-temperature`)
  - beta_a outside of lambda: a_j = logistic(beta_a - lambda cost_j); one beta_a per parent type,
    not one for all
  - the mass sum_i R_ij a_i multiplied by parents / children (Gritzman 2019)
  - transformation matrices initialized near the identity
  - cross-entropy instead of the spread loss (`--loss spread`)

Data (`--data`): toys rendered by this script, with the structure of smallNORB; the real smallNORB
(`--norb-dir`); or five 3D shapes, of which three look the same from training and test azimuths,
being symmetric about the vertical axis.

Examples, with times on two cores:
  python3 smallnorb_novel_viewpoint.py                 4 minutes: train three networks on toys
  python3 smallnorb_novel_viewpoint.py --data shapes   30 seconds: the same, with five simple shapes
  python3 smallnorb_novel_viewpoint.py --load          10 seconds: test the pretrained capsules
"""
import argparse
import base64
import bisect
import collections
import contextlib
import ctypes
import dataclasses
import datetime
import difflib
import functools
import gzip
import hashlib
import io
import itertools
import json
import math
import numbers
import os
import platform
import shlex
import shutil
import struct
import sys
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

# BLAS works on one thread, since worker threads share a batch. This must be said before numpy is
# imported
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
                 "VECLIB_MAXIMUM_THREADS"):
    os.environ[variable] = "1"
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

EXPERIMENT = "smallnorb_novel_viewpoint"
PRETRAINED = tuple(Path(__file__).resolve().with_name("weights") / f"smallnorb_{model}.npz"
                   for model in ("matrix-capsnet", "cnn", "cnn-bn"))
# Letters of the axes, in docstrings and in comments at line ends:
#   N images   C channels in   F channels out   K kernel side
#   H W height and width of images and of channels; grids of capsules have rows and columns, since
#       there W are the transformation matrices, as in both papers
#   P = 4 side of a pose matrix   D = 16 elements of a capsule: of a pose matrix, or of a vector
#   E = 8 elements of a primary capsule that is a vector
#   B types of child capsules   I children of a parent (input capsules)
#   J types of parent capsules, or classes (output capsules)
#   L parent positions in a batch: N * rows * columns of convolutional capsules, N of class capsules
#   G groups of children that share transformation matrices   T terms of dV (see votes_gradient)


class InputError(Exception):
    """Wrong input: the message is one line that says what is wrong and what to do next"""
    exit_code = 2


# -------------------------------------------------------------- settings

def setting(default, text, **more):
    """Declare a setting with its help text. default: None stands for the model's. more:
      low, high  bounds of its value
      choices    all its values
      only       {another setting: the values of it that this one needs}
      alias      another flag for it
      metavar    what --help calls its value
      test       a trained network may be tested with another value
      runtime    a run may even be resumed with another value"""
    return dataclasses.field(default=default, metadata={"help": text} | more)


LAMBDA = 1 / 16                    # default of the inverse temperature of EM routing
MATRIX_MODELS = "matrix-capsnet", "matrix-head"
VECTOR_MODELS = "capsnet", "capsnet-shared"
CAPSULES = MATRIX_MODELS + VECTOR_MODELS
PAPER_CNNS = "cnn", "cnn-bn"
USUAL = {"n_epochs": 6, "lr": 5e-3, "loss": "cross-entropy", "preset": "wide", "routing_iters": 2,
         "coordinates": False, "dropout": 0.0, "train_azimuths": "300:400",
         "test_azimuths": "60:280"}
OF_VECTORS = USUAL | {"loss": "margin", "routing_iters": 3}
OF_CNN = USUAL | {"n_epochs": 16, "lr": 2e-3, "preset": "small"}
MODELS = {                         # by --model: its defaults
    "matrix-capsnet": USUAL | {"n_epochs": 10, "coordinates": True},
    "cnn": OF_CNN,
    "cnn-bn": OF_CNN,
    "cnn-gap": USUAL,
    "capsnet-shared": OF_VECTORS | {"coordinates": True},
    "capsnet": OF_VECTORS,
    "matrix-head": USUAL | {"coordinates": True}}
OF_SHAPES = {"n_epochs": 10, "lr": 2e-3, "preset": "wide", "train_azimuths": "0:150",
             "test_azimuths": "200:330"}
WITH_INSTANCES = {"data": ("toys", "smallnorb")}
WITH_SHAPES = {"data": ("shapes",)}
WITH_AZIMUTHS = {"split": ("azimuth", "instance")}


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run; the flags of the command line are made from them.

    A setting that is not given, or None, becomes its default. Raise InputError if a value is of
    another type or out of bounds, or if it differs from the default although the setting does not
    apply beside the others."""
    data: str = setting("toys", "toys: rendered here; smallnorb: its own files; shapes: five sets "
                        "of points (defaults: 10 epochs, lr 0.002, preset wide, azimuths 0:150, "
                        "200:330)", choices=("toys", "smallnorb", "shapes"), test=True)
    toy_seed: int = setting(0, "of the toys, independent of --seed", low=0, high=2 ** 32 - 1,
                            only={"data": ("toys",)}, test=True)
    norb_dir: str = setting("", "folder of smallNORB's six files", metavar="DIR",
                            only={"data": ("smallnorb",)}, runtime=True)
    split: str = setting("azimuth", "what is novel: azimuths; elevations (45 to 70 degrees, "
                         "training 30 to 40); or toys (instance: familiar are training toys)",
                         choices=("azimuth", "elevation", "instance"))
    train_azimuths: str = setting(None, "degrees, ends included, 400 being 40; instance 0:340",
                                  metavar="LOW:HIGH", only=WITH_AZIMUTHS)
    test_azimuths: str = setting(None, "those that are novel; instance 0:340",
                                 metavar="LOW:HIGH", only=WITH_AZIMUTHS)
    n_train_views: int = setting(6, "training azimuths, equally spaced", low=1, high=360,
                                 only=WITH_SHAPES)
    n_test_views: int = setting(6, "novel azimuths, equally spaced", low=1, high=360,
                                only=WITH_SHAPES | {"split": ("azimuth",)})
    n_elev: int = setting(3, "elevations, equally spaced", low=1, high=90, only=WITH_SHAPES)
    n_per_combo: int = setting(5, "training images per shape and viewpoint", low=1, high=1000,
                               only=WITH_SHAPES)
    n_train_toys: int = setting(5, "training toys per class", low=1, high=5, only=WITH_INSTANCES)
    n_test: int = setting(2000, "images in each test set, in views of six; 0: all",
                          low=0, high=24300, only=WITH_INSTANCES, test=True)
    model: str = setting("matrix-capsnet", "network; without --model also its controls",
                         choices=tuple(MODELS))
    preset: str = setting(None, "sizes: paper has the paper's matrix-capsnet and cnn; other "
                          "networks have the backbone of small, which is twice as wide in wide",
                          choices=("small", "wide", "paper"))
    width: int = setting(0, "capsule types; channels of conv1 (cnn, cnn-bn) or conv5 (cnn-gap); 0: "
                         "matched in size to matrix-capsnet (cnn, cnn-bn; of preset paper 32) "
                         "or to capsnet-shared (others)", low=0, high=4096,
                         only={"model": (*PAPER_CNNS, "cnn-gap", "capsnet", "matrix-head")})
    routing_iters: int = setting(None, "routing iterations; 1: uniform assignment, no routing",
                                 low=1, high=50, only={"model": CAPSULES}, test=True,
                                 alias="--em-iters")
    inverse_temperature: float = setting(LAMBDA, "lambda of EM routing, in all iterations", low=1e-4,
                                         high=10, only={"model": MATRIX_MODELS})
    coordinates: bool = setting(None, "coordinate addition; in cnn-gap, coordinates as channels",
                                only={"model": (*MATRIX_MODELS, "capsnet-shared", "cnn-gap")})
    dropout: float = setting(None, "fraction of hidden units set to 0 in a step; in the paper's "
                             "CNN 0.5", low=0, high=0.99, only={"model": PAPER_CNNS})
    loss: str = setting(None, "margin: the 2017 paper's; spread: the 2018 paper's, margin 0.2 to "
                        "0.9; cross-entropy: of the class activations",
                        choices=("cross-entropy", "margin", "spread"))
    seed: int = setting(0, "of all random numbers; the same seed, the same bits",
                        low=0, high=2 ** 32 - 1, test=True)
    n_epochs: int = setting(None, "training epochs", low=1, high=100_000)
    batch_size: int = setting(32, "images per step", low=1, high=4096)
    lr: float = setting(None, "learning rate of Adam", low=1e-9, high=1e6)
    lr_schedule: str = setting("cosine", "cosine: decay to 0", choices=("cosine", "constant"))
    warmup: int = setting(0, "steps of linear warm-up", low=0, high=100_000)
    threads: int = setting(0, "0: one per core; results do not depend on it",
                           low=0, high=256, runtime=True)
    quiet: bool = setting(False, "print only errors", runtime=True)

    def __post_init__(self):
        check_types(self)
        fill_in(self, defaults_of(self))
        angle_ranges(self)             # raises if they are impossible
        if self.split == "instance" and self.data == "shapes":
            raise InputError("--split instance: shapes has one instance per class. "
                             "Use --data toys or smallnorb")


SETTINGS = list(dataclasses.fields(Config))


def defaults_of(config):
    """Return {name: default} of all settings of a Config; some depend on its model or on other
    settings. A model that does not exist is refused by check_setting"""
    defaults = {f.name: f.default for f in dataclasses.fields(Config)}
    defaults |= MODELS.get(config.model, USUAL)
    if config.data == "shapes":
        defaults |= OF_SHAPES
    if config.split == "instance":
        defaults |= {"train_azimuths": "0:340", "test_azimuths": "0:340"}
    if is_paper_cnn(config):
        defaults["dropout"] = 0.5
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
    if config.model not in CAPSULES:
        return config
    return dataclasses.replace(config, routing_iters=1)


def configs_of(given):
    """Return the Config of each given model, from {setting: value}, in which model is a list. A
    setting that only others of these models have is left out"""
    models = dict.fromkeys(given.get("model", default_models(given)))    # without repetitions
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


def default_models(given):
    """Return the models that are trained without --model: the paper's network, its CNN and one that
    is stronger"""
    if given.get("data") == "shapes":
        return "matrix-capsnet", "cnn", "cnn-gap"
    return "matrix-capsnet", "cnn", "cnn-bn"


# -------------------------------------------------------------- training

def train(config, data, state=None, each_step=lambda *_: None, each_epoch=lambda *_: None,
          dtype=np.float32):
    """Train a network and return its state. Test images are only evaluated: no parameter depends on
    them. Nothing is printed.

    data: as load_data returns it. state: to resume from, at the end of an epoch. each_step(state,
    terms) is called after every step, each_epoch(state) after every epoch; what they keep they must
    copy. Progress has such hooks. dtype: float64 is for tests.

    The state, a dict, is everything that a run is: params {name: array}, running (statistics of the
    normalizations), adam_m and adam_v (moments), step and history. Raise InputError when training
    diverges."""
    config = fit_to_data(config, data)
    if state is None:
        state = initial_state(config, dtype)
    if not state["adam_m"]:
        raise InputError("this state has no moments of the optimizer, as without_moments leaves "
                         "it, and cannot be trained on. Save the whole state")
    state["history"]["source"] = data["source"]
    n_train = len(data["train"]["labels"])
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
            metrics |= {"train_" + name: total / n_train for name, total in sums.items()}
            metrics |= validate(weights_of(state), data, config, workers)
            state["history"]["epochs"].append(metrics)
            each_epoch(state)
    return state


def steps_per_epoch(config, data):
    """Return the number of batches of an epoch; the last one may be smaller"""
    return math.ceil(len(data["train"]["labels"]) / config.batch_size)


def epoch_batches(data, epoch, config):
    """Yield each batch of an epoch: the samples it is among, and its rows in them"""
    for samples in epoch_samples(data, epoch, config):
        for rows in batches(samples, config.batch_size):
            yield samples, rows


def initial_state(config, dtype=np.float32):
    """Return the state of a run before its first step (see train)"""
    params = {name: p.astype(dtype) for name, p in init_params(config).items()}
    running = {}
    if config.model != "cnn":                          # which has no normalization
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


SHARD = 16                         # samples that a thread computes at once, and that share the
                                   # statistics of a batch normalization


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


def batches(samples, size):
    """Return the rows of each batch of a dict of samples"""
    rows = np.arange(len(samples["labels"]))
    return np.split(rows, range(size, len(rows), size))


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


def forward_shards(weights, samples, config, workers):
    """Compute scores, v, mu and a of all samples, as far as forward has them, {name: array}"""
    def one(rows):
        batch = to_batch(samples, rows, weights["conv1_w"].dtype)
        out, _ = forward(weights, batch["images"], config)
        return {name: out[name] for name in ("scores", "mu", "a", "v") if name in out}
    parts = list(workers.map(one, batches(samples, SHARD)))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def class_activations(out, config):
    """Return a number from 0 to 1 for each class, (N, J): the activation of a matrix capsule, the
    length of a vector capsule or, of a CNN, the probability. out: of forward or forward_shards"""
    if config.model in MATRIX_MODELS:
        return out["a"]
    if config.model in VECTOR_MODELS:
        return out["scores"]
    return softmax_forward(out["scores"])


def evaluate(weights, samples, config, workers):
    """Return the metrics of one test set: those of metrics_of, and loss, what is minimized, as in
    loss_and_grads, mean over the images; of the spread loss with its final margin."""
    out = forward_shards(weights, samples, config, workers)
    batch = {"labels": samples["labels"], "margin": MARGINS[1]}
    loss, _ = classification_loss(out, batch, config)
    return metrics_of(out["scores"].argmax(1), samples) | {"loss": loss}


def metrics_of(predicted, samples):
    """Return the metrics of some predicted classes, (n,), a dict of
      accuracy          fraction of the images correctly classified
      correct           (n,) bool
      confusion         numbers of images, a list (J, J): a row per class, a column per predicted
                        class
      toy_n, toy_hits   numbers of images and of those correctly classified, see count_per_toy"""
    labels = samples["labels"]
    correct = predicted == labels
    confusion = np.zeros((N_CLASSES, N_CLASSES), int)
    np.add.at(confusion, (labels, predicted), 1)
    return {"accuracy": float(correct.mean()), "correct": correct, "confusion": confusion.tolist(),
            "toy_n": count_per_toy(samples, np.ones_like(correct)),
            "toy_hits": count_per_toy(samples, correct)}


def count_per_toy(samples, counted):
    """Return, for each toy, the number of images with `counted` True, a list (J, toys): a row per
    class, a column per instance that the samples have, in ascending order.

    Images of one toy are not independent, so that intervals resample toys. Samples without
    instances, as of shapes, have one toy per class. counted: (n,) bool."""
    labels = samples["labels"]
    instances = samples.get("instances", np.zeros_like(labels))
    different, columns = np.unique(instances, return_inverse=True)
    counts = np.zeros((N_CLASSES, len(different)), int)
    np.add.at(counts, (labels, columns), counted)
    return counts.tolist()


def evaluate_test(weights, data, config, workers):
    """Return the metrics on familiar and on novel viewpoints; see metrics_of_test"""
    found = {name: evaluate(weights, data[name], config, workers) for name in ("familiar", "novel")}
    return metrics_of_test(found, data, config)


def metrics_of_test(found, data, config):
    """Return the metrics on familiar and on novel viewpoints, a dict of
      familiar, novel   accuracies
      drop              their difference
      familiar_loss, familiar_confusion, familiar_toy_n, familiar_toy_hits, and the same of novel:
                        see metrics_of
      sweep             {"angles": azimuths or elevations in degrees, "accuracy": at each}, lists;
                        over both test sets or, with --split instance, over the novel toys
      correct           {"familiar": (n,) bool, "novel": (n,) bool}
    found: {"familiar": ..., "novel": ...}, the metrics of each test set."""
    correct = {name: found[name]["correct"] for name in found}
    metrics = {name: found[name]["accuracy"] for name in found}
    metrics["drop"] = metrics["familiar"] - metrics["novel"]
    for name in found:
        for key, value in found[name].items():
            if key not in ("accuracy", "correct"):
                metrics[f"{name}_{key}"] = value
    return metrics | {"sweep": accuracy_by_angle(data, correct, config), "correct": correct}


def accuracy_by_angle(data, correct, config):
    """Return the sweep of metrics_of_test. correct: {"familiar": (n,) bool, "novel": the same}"""
    swept = ("novel",) if config.split == "instance" else ("familiar", "novel")
    angles = np.concatenate([data[name][viewpoint_angle(config)] for name in swept])
    is_correct = np.concatenate([correct[name] for name in swept])
    sweep = {"angles": [], "accuracy": []}
    for angle in np.unique(angles):
        sweep["angles"].append(int(angle) if angle % 1 == 0 else float(angle))
        sweep["accuracy"].append(float(is_correct[angles == angle].mean()))
    return sweep


VALIDATED = ("familiar", "novel", "drop", "familiar_loss", "novel_loss",
             "familiar_toy_hits", "novel_toy_hits")


def validate(weights, data, config, workers):
    """Return the metrics after an epoch: those of the test images, which nothing is chosen by"""
    metrics = evaluate_test(weights, data, config, workers)
    return {name: metrics[name] for name in VALIDATED}


# -------------------------------------------------------------- the task: novel viewpoints

DATA, INIT, BATCHES, EVALUATION = range(4)                              # purposes of random numbers


def rng_for(seed, purpose, *key):
    """Return a generator for each purpose and key: drawing more of one thing does not change
    another"""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, *key)))


SIDE = 32                          # of an input image, px
N_CLASSES = 5                      # of every data set
SHAPE_NAMES = ("cross", "L", "T", "frame", "tripod")
NORB_NAMES = ("animal", "human", "plane", "truck", "car")
N_CHANNELS = {"shapes": 1, "smallnorb": 2, "toys": 2}
MARGINS = 0.2, 0.9                 # margin m of the spread loss in the first and in the last epoch
ELEVATIONS = (30, 40), (45, 70)    # training and novel ones of --split elevation, degrees
TOY_SPLITS = {"train": (4, 6, 7, 8, 9), "test": (0, 1, 2, 3, 5)}    # instances, as in smallNORB
NORB_SIDE = 48                     # of a toy's image, after downsampling by 2, px
CHUNK = 2048                       # images shuffled at once: memory does not grow with the data
MAX_BRIGHTNESS = 32                # of the training jitter: up to +-32 of 255 gray levels
CONTRASTS = 0.5, 1.5               # of the training jitter: factors


def load_data(config, without=()):
    """Load the images and labels of a run: {"source", "train", "familiar", "novel"}.

    The three splits are dicts of images (N, H, W, C), labels (N,) int64, azimuths and elevations
    (N,) in degrees and, of toys and smallNORB, instances and lightings (N,); see select_images.
    Toys that are not yet in the cache are rendered. without: names of splits to leave out."""
    data = {name: samples for name, samples in select_images(config).items() if name not in without}
    if config.data == "toys":
        add_toy_images([data[name] for name in data if name != "source"], config)
    return data


def select_images(config):
    """Return load_data's dict; toys have no images yet, since add_toy_images renders them.

    familiar: the training viewpoints with new pixel noise (shapes), or the training viewpoints of
    the test toys (toys, smallNORB). novel: the same objects from viewpoints outside the training
    range. With --split instance, smallNORB's standard task, the objects differ instead of the
    viewpoints: familiar holds the training toys, novel the test toys from the test azimuths. Raise
    InputError when a split has no image in its range of angles."""
    train, test = angle_ranges(config)
    if config.data == "shapes":
        return {"source": "shapes"} | shape_views(config, train, test)
    if config.data == "smallnorb":
        pools = load_norb(config.norb_dir)
    else:
        pools = {name: toy_tables(name) for name in TOY_SPLITS}
    instances = {"train": TOY_SPLITS["train"][:config.n_train_toys], "test": TOY_SPLITS["test"]}
    familiar = "train" if config.split == "instance" else "test"
    data = {"source": config.data}
    for name, toys, angles in (
            ("train", "train", train), ("familiar", familiar, train), ("novel", "test", test)):
        pool = pools[toys]
        angle = viewpoint_angle(config)
        mask = in_range(pool[angle], angles) & np.isin(pool["instances"], instances[toys])
        if not mask.any():
            raise InputError(f"no {name} images: none has {angle} in {angles}. Widen the range")
        if name != "train" and config.n_test:
            mask = sample_views(pool, mask, config.n_test)
        data[name] = {key: array[mask] for key, array in pool.items()}
    return data


def viewpoint_angle(config):
    """Return the name of the angle that accuracies are reported by, "azimuths" or "elevations", a
    key of load_data's dicts."""
    return "elevations" if config.split == "elevation" else "azimuths"


def angle_ranges(config):
    """Return the (low, high) ranges in degrees of the training viewpoints and of the novel
    viewpoints.

    Raise InputError when the two ranges of azimuths overlap, except with --split instance, where
    the toys differ."""
    if config.split == "elevation":
        return ELEVATIONS
    train = parse_range(config.train_azimuths, "--train-azimuths")
    test = parse_range(config.test_azimuths, "--test-azimuths")
    if config.split == "azimuth" and (starts_in(train, test) or starts_in(test, train)):
        raise InputError(f"--train-azimuths {train} and --test-azimuths {test} meet. "
                         "Choose ranges apart")
    return train, test


def starts_in(one, other):
    """Return whether a range (low, high) begins within another one on the circle, ends included"""
    return (one[0] - other[0]) % 360 <= other[1] - other[0]


def parse_range(text, flag):
    """Return (low, high), two floats with low <= high, less than 360 degrees apart, from the text
    "LOW:HIGH"."""
    with contextlib.suppress(ValueError):
        low, high = map(float, text.split(":"))
        if 0 <= high - low < 360:
            return low, high
    raise InputError(f"{flag} {text}: must be LOW:HIGH in degrees, less than 360 apart, "
                     "as in 0:150")


def in_range(angles, bounds):
    """Return whether angles, (N,) in degrees, are within bounds (low, high) on the circle, ends
    included, (N,) bool."""
    low, high = bounds
    return (np.asarray(angles) - low + 1e-6) % 360 <= high - low + 2e-6


def sample_views(pool, mask, n):
    """Return a mask, (N,) bool, of about n of the masked rows of pool, in whole views.

    A view is one toy from one viewpoint with all its lightings. The random choice is the same in
    every run."""
    rows = np.flatnonzero(mask)
    keys = [pool[name][rows] for name in ("labels", "instances", "elevations", "azimuths")]
    _, view_of_row = np.unique(np.stack(keys), axis=1, return_inverse=True)
    view_of_row = view_of_row.ravel()
    n_views = view_of_row.max() + 1
    n_chosen = math.ceil(n * n_views / len(rows))
    chosen = np.random.default_rng(0).permutation(n_views)[:n_chosen]
    return np.isin(np.arange(len(mask)), rows[np.isin(view_of_row, chosen)])


def epoch_samples(data, epoch, config):
    """Yield the training images of one epoch, shuffled, in chunks of whole batches.

    Each chunk is a dict of images (n, H, W, C), labels (n,) and margin (n,), the spread loss's
    margin m of this epoch; of toys and smallNORB also jitter (n, 4), random numbers for crop_batch;
    with dropout also dropout_mask (n, hidden units), each entry 0 or 1 / (1 - dropout)."""
    train = data["train"]
    order = rng_for(config.seed, BATCHES, epoch).permutation(len(train["labels"]))
    size = max(1, CHUNK // config.batch_size) * config.batch_size
    first, last = MARGINS
    margin = first + (last - first) * epoch / max(1, config.n_epochs - 1)
    for k, start in enumerate(range(0, len(order), size)):
        rng = rng_for(config.seed, BATCHES, epoch, k)
        rows = order[start:start + size]
        samples = {"images": train["images"][rows], "labels": train["labels"][rows],
                   "margin": np.full(len(rows), margin, np.float32)}
        if config.data != "shapes":
            samples["jitter"] = rng.random((4, len(rows))).T
        if config.dropout:
            n_hidden, _ = param_shapes(config)["fc2_w"]
            is_kept = rng.random((len(rows), n_hidden), np.float32) >= config.dropout
            samples["dropout_mask"] = is_kept / np.float32(1 - config.dropout)
        yield samples


def to_batch(samples, rows, dtype=np.float32):
    """Return the given rows of samples as one batch of floating-point type dtype, a dict of images
    (N, 32, 32, C), those of toys and smallNORB standardized and cropped, labels (N,) if the samples
    have them and, in training, margin (N,) and dropout_mask (N, hidden units)"""
    images = samples["images"]
    if images.dtype == np.uint8:
        jitter = samples["jitter"][rows] if "jitter" in samples else None
        images = crop_batch(images, rows, jitter, dtype)
    else:
        images = images[rows].astype(dtype, copy=False)
    batch = {"images": images}
    if "labels" in samples:
        batch["labels"] = samples["labels"][rows]
    for name in ("margin", "dropout_mask"):
        if name in samples:
            batch[name] = samples[name][rows].astype(dtype, copy=False)
    return batch


LABELS_PER_IMAGE = 1               # for predict.py, as are image_shapes and prepare_images


def image_shapes(config):
    """Return the shapes of the images that prepare_images takes. Toys and smallNORB have a channel
    for each camera, and 48x48 px, as in load_data's dicts, or 96x96, as in smallNORB's files"""
    if config.data == "shapes":
        return ((SIDE, SIDE, 1),)
    return (NORB_SIDE, NORB_SIDE, 2), (2 * NORB_SIDE, 2 * NORB_SIDE, 2)


def prepare_images(images, config):
    """Return images as forward takes them, (n, 32, 32, C) float32: shapes in [0, 1]; of toys and
    smallNORB the central crop of the standardized image. images: uint8 (n, *shape), with one of
    image_shapes"""
    if config.data == "shapes":
        return images / np.float32(255)
    if images.shape[1] > NORB_SIDE:
        images = downsample(images.transpose(0, 3, 1, 2))
    return crop_batch(images, slice(None))


def crop_batch(images, rows, jitter=None, dtype=np.float32):
    """Return network inputs, (n, 32, 32, 2) of type dtype, from the given rows of images, (N, 48,
    48, 2) uint8.

    jitter: (n, 4) random numbers in [0, 1), of the crop's row and column, contrast and brightness;
    None, in tests, for the central crop alone. As in the paper, the whole image is standardized
    first. The contrast jitter scales the image about its mean, the brightness jitter is in gray
    levels. Applied before the standardization they would be undone."""
    images = images[rows]
    n = len(images)
    n_corners = NORB_SIDE - SIDE + 1                        # rows or columns where a crop can begin
    if jitter is None:
        begin = n_corners // 2
        center = slice(begin, begin + SIDE)
        return standardize(images, dtype=dtype)[:, center, center].copy()
    top, left = (jitter[:, :2] * n_corners).astype(int).T
    low, high = CONTRASTS
    contrast = low + (high - low) * jitter[:, 2]
    brightness = MAX_BRIGHTNESS * (2 * jitter[:, 3] - 1)
    x = standardize(images, contrast, brightness, dtype)
    # A row of both cameras' pixels, (x, camera), is one axis: crops are then copied row by row
    x = x.reshape(n, NORB_SIDE, 2 * NORB_SIDE)
    windows = sliding_window_view(x, (SIDE, 2 * SIDE), axis=(1, 2))     # (n, 17, 33, 32, 64)
    return windows[np.arange(n), top, 2 * left].reshape(n, SIDE, SIDE, 2)


def standardize(images, contrast=1.0, brightness=0.0, dtype=np.float32):
    """Return images with zero mean and unit variance each, over all pixels and both cameras.

    images, uint8 (N, H, W, C), to dtype (N, H, W, C). After the standardization an image is
    multiplied by its contrast, and its brightness, in gray levels of the original image, is added;
    both are numbers or (N,). A standard deviation below one gray level counts as one, so that a
    constant image becomes 0."""
    n_pixels = math.prod(images.shape[1:])
    x = images.astype(dtype).reshape(len(images), n_pixels)
    x -= x.mean(1, keepdims=True)
    std = np.maximum(np.sqrt(np.vecdot(x, x) / n_pixels), 1)            # (N,)
    x *= (contrast / std).astype(dtype)[:, None]
    x += (brightness / std).astype(dtype)[:, None]
    return x.reshape(images.shape)


# -------------------------------------------------------------- the paper: poses, votes, EM routing
# V, R, r, the logits and their gradients have the axes (L, J, I, ...): parent position, parent
# type, child. In the first iteration R is the same for all parent types; R, r and dr then are
# (L, 1, I). A forward function returns its output and a cache; the backward function the gradients
# of the forward function's arguments.

P = 4                              # rows and columns of a pose matrix
D = P * P                          # elements of a capsule: of a pose matrix, or of a vector
SIGMA2_EPS = 5e-4                  # variance floor, as in the official code: one child has none
MASS_EPS = 1e-7                    # added to the mass, which is 0 if all children are inactive


class Window(collections.namedtuple("Window", "N rows columns B stride K", defaults=(3,))):
    """The 3x3 (K x K) receptive fields of convolutional capsules, at a stride. The children are N
    images with B types of capsules at rows x columns positions."""

    @property
    def parents(self):
        """The numbers of rows and columns of the parents."""
        return (self.rows - self.K) // self.stride + 1, (self.columns - self.K) // self.stride + 1

    def select(self, x, ky, kx, axis):
        """Return a view of x with the entries at kernel position (ky, kx) of all receptive fields.
        axis: the axis of x's rows; the next one has its columns."""
        n_rows, n_columns = self.parents
        rows = slice(ky, ky + self.stride * n_rows, self.stride)
        columns = slice(kx, kx + self.stride * n_columns, self.stride)
        return x[(*[slice(None)] * axis, rows, columns)]


def im2col_capsules(x, window):
    """Return the children in every receptive field, (K*K*B, L, C), children first.

    x: (N, rows, columns, B, C), the C = D elements of their poses, or their activations, C = 1."""
    K, stride = window.K, window.stride
    view = sliding_window_view(x, (K, K), axis=(1, 2))[:, ::stride, ::stride]
    # view: (N, parent rows, parent columns, B, C, K, K)
    cols = np.ascontiguousarray(view.transpose(5, 6, 3, 0, 1, 2, 4))
    return cols.reshape(K * K * window.B, -1, x.shape[-1])


def col2im_capsules(dcols, window):
    """Return dx, (N, rows, columns, B, C), the adjoint of im2col_capsules: the sum over all copies
    of a child. dcols: gradient with respect to im2col_capsules' result, (K*K*B, L, C)."""
    w, K, C = window, window.K, dcols.shape[-1]
    dx = np.zeros((w.B, w.N, w.rows, w.columns, C), dcols.dtype)
    dcols = dcols.reshape(K, K, w.B, w.N, *w.parents, C)
    for ky, kx in np.ndindex(K, K):
        target = w.select(dx, ky, kx, axis=2)
        target += dcols[ky, kx]
    return dx.transpose(1, 2, 3, 0, 4)


def pose_blocks(W):
    """Return transformation matrices W, (G, J, P, P), as block-diagonal matrices, (G, D, J*D).

    A block repeats W_ij for each row of a pose, so that the votes V_ij = M_i W_ij of all rows and
    all parents j are one matrix product."""
    G, J = W.shape[:2]
    blocks = np.zeros((G, P, P, J, P, P), W.dtype)          # (G, row, q, J, row, column)
    for row in range(P):
        blocks[:, row, :, :, row] = W.transpose(0, 2, 1, 3)
    return blocks.reshape(G, D, J * D)


def pose_votes_forward(M, W):
    """Compute the votes V_ij = M_i W_ij of pose matrices (Hinton et al. 2018).

    M: poses, (G, L, D), each with its P rows concatenated; L: here the positions that share
    matrices, of class capsules the children's; W:
    transformation matrices, (G, J, P, P). Return V, (G, L, J, D), in memory as (L, G, J, D), and a
    cache. The votes are computed as (L, D) @ (D, J*D) with the block-diagonal matrices of
    pose_blocks: four times as many multiplications as many 4x4 products, but faster as a few large
    matrix products."""
    G, L, _ = M.shape
    J = W.shape[1]
    blocks = pose_blocks(W)
    V = np.empty((L, G, J * D), M.dtype).transpose(1, 0, 2)
    np.matmul(M, blocks, out=V)
    return V.reshape(G, L, J, D), (M, blocks)


def pose_votes_backward(dV, cache):
    """Return the gradients dM, (G, L, D), and dW, (G, J, P, P), from dV, (G, L, J, D)."""
    M, blocks = cache
    G, L, J, _ = dV.shape
    dV = dV.reshape(G, L, J * D)
    dM = np.matmul(dV, blocks.transpose(0, 2, 1))
    dblocks = np.matmul(M.transpose(0, 2, 1), dV)           # (G, D, J*D)
    dblocks = dblocks.reshape(G, P, P, J, P, P)             # (G, row, q, J, row, column)
    dW = sum(dblocks[:, row, :, :, row] for row in range(P))
    return dM, dW.transpose(0, 2, 1, 3)                     # (G, J, q, column)


def combine_over_positions(x, window, combine):
    """Combine the values of each child over all receptive fields that contain it.

    x: (L, I), one value per parent position and child; combine: np.add or np.maximum. Return an
    array (L, I) in which all entries of the same child hold its combined value. window: the layer's
    Window, or None for class capsules, which have one position: x is returned."""
    if window is None:
        return x
    w, K = window, window.K
    x = x.reshape(w.N, *w.parents, K, K, w.B)
    start = 0 if combine is np.add else -np.inf
    children = np.full((w.N, w.rows, w.columns, w.B), start, x.dtype)
    for ky, kx in np.ndindex(K, K):
        target = w.select(children, ky, kx, axis=1)
        combine(target, x[:, :, :, ky, kx], out=target)
    return im2col_capsules(children[..., None], window)[..., 0].T.copy()


def responsibilities_forward(logits, window):
    """Compute the assignment probabilities R_ij (Procedure 1, last line of the E-step).

        R_ij = a_j p_j(V_ij) / sum_k a_k p_k(V_ik) = exp(logits_ij) / sum_k exp(logits_ik)

    The sum runs over all parents k of child i: all parent types at all positions whose receptive
    fields contain i, as in the paper. logits: log(a_j p_j(V_ij)) from e_step_forward, (L, J, I);
    window: see combine_over_positions. Return R, (L, J, I), and a cache. The maximum over the
    parents is subtracted before the exponential, to prevent overflow."""
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


BLOCK = 1 << 18                    # numbers of V read at once: 1 MB, which fits the cache


def blocks_of_positions(V):
    """Return the slices of parent positions in which V, (L, J, I, D), is read, block by block.

    A training step of the paper's network takes 0.6 of the time that it took with all votes and
    squares at once."""
    L, J, I, _ = V.shape
    size = max(1, BLOCK // (J * I * D))
    return [slice(start, start + size) for start in range(0, L, size)]


def side_by_side(V):
    """Return V, (L, J, I, D), with the votes for all parent types side by side, (L, 1, I, J*D): as
    votes for one parent type. So what has the same coefficients for all types is one product."""
    L, J, I, _ = V.shape
    return V.transpose(0, 2, 1, 3).reshape(L, 1, I, J * D)


def sum_over_children(r, V):
    """Return sum_i r_ij V_ij and sum_i r_ij V_ij^2, (2, L, J, D).

    r: (L, J, I) or, if it is the same for all parent types, (L, 1, I)."""
    L, J = V.shape[:2]
    is_shared = r.shape[1] == 1
    sums = np.empty((2, L, J, D), V.dtype)
    for part in blocks_of_positions(V):
        v = side_by_side(V[part]) if is_shared else V[part]
        coefficients = r[part, :, None]                     # (positions, J or 1, 1, I)
        sums[0, part] = np.matmul(coefficients, v).reshape(-1, J, D)
        sums[1, part] = np.matmul(coefficients, v * v).reshape(-1, J, D)
    return sums


def sum_over_elements(V, linear, quadratic, is_shared=False):
    """Return linear_j . V_ij + quadratic_j . V_ij^2, (L, J, I).

    linear, quadratic: (L, J, D). is_shared: return the sum over the parent types j, (L, 1, I),
    which is the gradient with respect to what all types share."""
    L, J, I, _ = V.shape
    if is_shared:
        linear = linear.reshape(L, 1, J * D)
        quadratic = quadratic.reshape(L, 1, J * D)
    sums = np.empty((L, 1 if is_shared else J, I), V.dtype)
    for part in blocks_of_positions(V):
        v = side_by_side(V[part]) if is_shared else V[part]
        sums[part] = (np.matmul(v, linear[part, ..., None])
                      + np.matmul(v * v, quadratic[part, ..., None]))[..., 0]
    return sums


def m_step_forward(V, r, beta_u, beta_a, lambda_, ratio):
    """Compute the parents' Gaussians and activations: the M-step of EM routing (Hinton et al. 2018,
    Procedure 1).

        mu_jh     = sum_i r_ij V_ijh / sum_i r_ij
        sigma2_jh = sum_i r_ij (V_ijh - mu_jh)^2 / sum_i r_ij + SIGMA2_EPS
        mass_j    = ratio * sum_i r_ij
        cost_j    = sum_h (beta_u_j + log sigma_jh) mass_j
        a_j       = logistic(x_j), x_j = beta_a_j - lambda cost_j

    r_ij = R_ij a_i is the assignment probability times the child's activation (the first line of
    the paper's M-step); h runs over the D pose elements.

    Differences from the paper: (1) In the paper the mass is sum_i r_ij. Here it is multiplied by
    ratio = parents / children (Gritzman 2019), so that the cost does not grow with the size of the
    layer. (2) The variance has a floor, SIGMA2_EPS, and sum_i r_ij has MASS_EPS added, so that it
    can be divided by. (3) The paper has a_j = logistic(lambda (beta_a - cost_j)). For constant
    lambda this is the same function with beta_a scaled by lambda; unscaled, Adam's steps, which are
    about lr in size, would hardly change it after multiplication by a small lambda. (4) The
    variance is computed as the weighted mean of V^2 minus mu^2, clamped at 0. (5) Every parent type
    has a beta_a of its own; in the paper all capsules share one.

    V: votes, (L, J, I, D). r: (L, J, I) or, in the first iteration, (L, 1, I): then one
    matrix-vector product per position replaces J products. beta_u, beta_a: (J,). lambda_: inverse
    temperature. Return (mu, sigma2, x), of shapes (L, J, D), (L, J, D) and (L, J), and a cache."""
    total = r.sum(-1, keepdims=True) + MASS_EPS             # (L, J, 1), or (L, 1, 1) as r
    mu, mean_V2 = sum_over_children(r, V) / total           # (L, J, D)
    variance = mean_V2 - mu * mu
    sigma2 = np.maximum(variance, 0) + SIGMA2_EPS
    unit_cost = D * beta_u + 0.5 * np.log(sigma2).sum(-1)   # (L, J)
    mass = ratio * total[..., 0]                            # (L, J), or (L, 1)
    x = beta_a - lambda_ * (unit_cost * mass)
    cache = SimpleNamespace(V=V, r=r, total=total, mu=mu, mean_V2=mean_V2, variance=variance,
                            sigma2=sigma2, unit_cost=unit_cost, mass=mass, lambda_=lambda_,
                            ratio=ratio)
    return (mu, sigma2, x), cache


def m_step_backward(dmu, dsigma2, dx, cache):
    """Return a term of dV and the gradients dr, with r's shape, dbeta_u and dbeta_a, (J,).

    dmu, dsigma2: (L, J, D); dx: (L, J). The term is a tuple for votes_gradient, (r, dsum_V,
    dsum_V2), which stands for dV_ij = r_ij (dsum_V_j + 2 V_ij dsum_V2_j). dsum_V and dsum_V2,
    (L, J, D), are the gradients with respect to the sums sum_i r_ij V_ij and sum_i r_ij V_ij^2."""
    c, total, mu = cache, cache.total, cache.mu
    is_shared = c.r.shape[1] == 1
    dcost = -c.lambda_ * dx                                 # cost = unit_cost * mass; (L, J)
    dunit_cost = dcost * c.mass
    dmean_V2 = dsigma2 + 0.5 * dunit_cost[..., None] / c.sigma2
    dmean_V2 = dmean_V2 * (c.variance > 0)                  # sigma2: variance clamped at 0
    dsum_V = (dmu - 2 * mu * dmean_V2) / total              # variance = mean_V2 - mu^2
    dsum_V2 = dmean_V2 / total
    # total divides both sums, and mass = ratio * total. It is a sum over i, so that dtotal goes to
    # every dr_ij
    dtotal = c.ratio * dcost * c.unit_cost - (dsum_V * mu + dsum_V2 * c.mean_V2).sum(-1)    # (L, J)
    if is_shared:
        dtotal = dtotal.sum(1, keepdims=True)
    dr = sum_over_elements(c.V, dsum_V, dsum_V2, is_shared)
    dr += dtotal[..., None]
    return (c.r, dsum_V, dsum_V2), dr, D * dunit_cost.sum(0), dx.sum(0)


def e_step_forward(V, mu, sigma2, x):
    """Compute the logits of the E-step of EM routing (Hinton et al. 2018, Procedure 1), in log
    space.

        logits_ij = log(a_j p_j(V_ij))
                  = log a_j + sum_h (-(V_ijh - mu_jh)^2 / (2 sigma2_jh) - log(sigma2_jh) / 2)

    p_j is the density of the parent's Gaussian. The paper's factor 1 / sqrt(2 pi) is left out,
    because it cancels when responsibilities_forward normalizes the logits to R_ij. Expanding the
    square gives linear_j . V_ij + quadratic_j . V_ij^2 + offset_j, which are two matrix-vector
    products per parent.

    V: votes, (L, J, I, D); mu, sigma2: (L, J, D); x: logits of the activations a_j, (L, J). Return
    the logits, (L, J, I), and a cache."""
    precision = 1 / sigma2
    linear = mu * precision                                 # (L, J, D)
    quadratic = -0.5 * precision
    offset = -0.5 * (mu * linear + np.log(sigma2)).sum(-1)  # (L, J)
    offset -= np.logaddexp(0, -x)                           # log a_j
    logits = sum_over_elements(V, linear, quadratic) + offset[..., None]
    cache = SimpleNamespace(V=V, mu=mu, precision=precision, x=x, linear=linear,
                            quadratic=quadratic)
    return logits, cache


def e_step_backward(dlogits, cache):
    """Return a term of dV and the gradients dmu, dsigma2, (L, J, D), and dx, (L, J).

    dlogits: (L, J, I). The term is a tuple for votes_gradient, (dlogits, linear, quadratic), which
    stands for dV_ij = dlogits_ij (linear_j + 2 V_ij quadratic_j)."""
    c, precision = cache, cache.precision
    doffset = dlogits.sum(-1)                               # (L, J)
    dlinear, dquadratic = sum_over_children(dlogits, c.V)   # (L, J, D)
    # offset has the term -mu linear / 2: half of its gradient reaches mu through linear, and half
    # directly
    along = doffset[..., None] * c.mu
    dmu = (dlinear - along) * precision
    dprecision = dlinear * c.mu - 0.5 * (dquadratic + along * c.mu)
    dsigma2 = -precision * (dprecision * precision + 0.5 * doffset[..., None])
    return (dlogits, c.linear, c.quadratic), dmu, dsigma2, doffset * sigmoid(-c.x)


def em_routing_forward(V, a, beta_u, beta_a, n_iters, lambda_=LAMBDA, window=None):
    """Compute the parent capsules by EM routing (Hinton et al. 2018, Procedure 1).

    The assignment probabilities R_ij start uniform over the parents whose receptive fields contain
    child i, of all types and positions. Each of the n_iters iterations is an M-step with
    r_ij = R_ij a_i. Between two M-steps, an E-step computes new R_ij. With n_iters = 1 there is no
    E-step, and R_ij stays uniform.

    Differences from the paper: lambda_ is the same in all iterations, while the paper increases it
    by a schedule; R_ij starts at one over the number of child i's parents, in the paper at one over
    the size of the parents' layer; see also m_step_forward. As in the paper, children compete over
    all parents at all positions.

    The ratio of the mass, parents / children, counts all capsules of both layers, also children
    that no receptive field contains: at stride 2 the last row and column of a grid of even side, 27
    of the 196 positions below ConvCaps1.

    V: votes, (L, J, I, D); a: activations of the children, (L, I); beta_u, beta_a: (J,); window:
    the receptive fields of convolutional capsules, or None for class capsules, where every parent
    receives votes from all children.

    Return (mu, x), the parents' poses, (L, J, D), and the logits of their activations, (L, J), with
    a_j = logistic(x_j); and a cache, whose `steps` hold R, (L, 1, I) first, then (L, J, I), mu,
    sigma2 and x of every iteration."""
    L, J, I, _ = V.shape
    if window is None:
        ratio = J / I
    else:
        ratio = math.prod(window.parents) * J / (window.rows * window.columns * window.B)
    ones = np.ones((L, I), V.dtype)
    n_parents = J * combine_over_positions(ones, window, np.add)
    R = (1 / n_parents)[:, None]                            # (L, 1, I)
    mu = sigma2 = x = e_cache = R_cache = None
    steps = []
    for t in range(n_iters):
        if t > 0:
            logits, e_cache = e_step_forward(V, mu, sigma2, x)
            R, R_cache = responsibilities_forward(logits, window)
        r = R * a[:, None]
        (mu, sigma2, x), m_cache = m_step_forward(V, r, beta_u, beta_a, lambda_, ratio)
        steps.append(SimpleNamespace(R=R, mu=mu, sigma2=sigma2, x=x,
                                     e_cache=e_cache, R_cache=R_cache, m_cache=m_cache))
    return (mu, x), SimpleNamespace(V=V, a=a, steps=steps)


def em_routing_backward(dmu, dx, cache):
    """Return the gradients dV, (L, J, I, D), da, (L, I), dbeta_u and dbeta_a, (J,).

    dmu: (L, J, D); dx: (L, J). They are propagated through all iterations, without a stop-gradient,
    as in the paper."""
    terms, dsigma2, da, dbeta_u, dbeta_a = [], 0, 0, 0, 0
    for step in reversed(cache.steps):
        term, dr, dbeta_u_t, dbeta_a_t = m_step_backward(dmu, dsigma2, dx, step.m_cache)
        terms.append(term)
        da = da + np.einsum("lji,lji->li", dr, step.R)
        dbeta_u = dbeta_u + dbeta_u_t
        dbeta_a = dbeta_a + dbeta_a_t
        if step.e_cache is None:                            # R is uniform, a constant
            break
        dr *= cache.a[:, None]                              # dr becomes dR
        dlogits = responsibilities_backward(dr, step.R_cache)
        term, dmu, dsigma2, dx = e_step_backward(dlogits, step.e_cache)
        terms.append(term)
    return votes_gradient(terms, cache.V), da, dbeta_u, dbeta_a


def votes_gradient(terms, V):
    """Return dV, (L, J, I, D), as the sum of the terms of all M-steps and E-steps.

    A term is (coefficient, linear, quadratic), of shapes (L, J, I), or (L, 1, I) of the first
    iteration, (L, J, D) and (L, J, D), and stands for dV_ij = coefficient_ij (linear_j + 2 V_ij
    quadratic_j). All T terms together take two products (I, T) @ (T, D) per parent."""
    L, J, I, _ = V.shape
    coefficients = [np.broadcast_to(coefficient, (L, J, I)) for coefficient, _, _ in terms]
    coefficients = np.stack(coefficients, 2)                # (L, J, T, I)
    linear = np.stack([linear for _, linear, _ in terms], 2)                # (L, J, T, D)
    quadratic = np.stack([quadratic for _, _, quadratic in terms], 2)
    dV = np.empty_like(V)
    for part in blocks_of_positions(V):
        rows = coefficients[part].transpose(0, 1, 3, 2)     # (positions, J, I, T)
        dv = dV[part]                                       # a view
        np.matmul(rows, 2 * quadratic[part], out=dv)
        dv *= V[part]
        dv += np.matmul(rows, linear[part], out=np.empty_like(dv))
    return dV


def primary_caps_forward(x):
    """Split the channels of x, (N, rows, columns, B*(D+1)), into poses, (N, rows, columns, B, D),
    and activations, (N, rows, columns, B), with a logistic on the activations. Return both and a
    cache."""
    N, rows, columns, F = x.shape
    B = F // (D + 1)
    pose = x[..., :B * D].reshape(N, rows, columns, B, D)
    activation = sigmoid(x[..., B * D:])
    return (pose, activation), activation


def primary_caps_backward(dpose, dactivation, activation):
    """Return dx, (N, rows, columns, B*(D+1)), from dpose, (N, rows, columns, B, D), and
    dactivation, (N, rows, columns, B)."""
    dlogits = dactivation * activation * (1 - activation)
    return np.concatenate([dpose.reshape(*dlogits.shape[:3], -1), dlogits], -1)


def conv_caps_forward(pose, activation, W, beta_u, beta_a, n_iters, stride, lambda_=LAMBDA):
    """Compute convolutional capsules: 3x3 receptive fields at a stride, votes, EM routing.

    pose: (N, rows, columns, B, D); activation: (N, rows, columns, B); W: transformation matrices,
    (9*B, J, P, P), shared across positions; beta_u, beta_a: (J,). Return (mu, a), (N, parent rows,
    parent columns, J, D) and the same without D, and a cache."""
    J, window = W.shape[1], Window(*pose.shape[:4], stride)
    child_a = im2col_capsules(activation[..., None], window)[..., 0].T.copy()   # (L, 9*B)
    V, votes_cache = pose_votes_forward(im2col_capsules(pose, window), W)   # (9*B, L, J, D)
    V = V.transpose(1, 2, 0, 3)                                             # (L, J, 9*B, D)
    (mu, x), em_cache = em_routing_forward(V, child_a, beta_u, beta_a, n_iters, lambda_, window)
    a = sigmoid(x)
    shape = (len(pose), *window.parents, J)
    return (mu.reshape(*shape, D), a.reshape(shape)), (window, votes_cache, em_cache, a)


def conv_caps_backward(dmu, da, cache):
    """Return the gradients dpose, dactivation, dW, dbeta_u and dbeta_a, with the inputs' shapes.

    dmu: (N, parent rows, parent columns, J, D); da: the same without D."""
    window, votes_cache, em_cache, a = cache
    dx = da.reshape(a.shape) * a * (1 - a)                  # (L, J)
    dmu = dmu.reshape(*dx.shape, D)
    dV, dchild_a, dbeta_u, dbeta_a = em_routing_backward(dmu, dx, em_cache)
    dM, dW = pose_votes_backward(dV.transpose(2, 0, 1, 3), votes_cache)
    dpose = col2im_capsules(dM, window)
    dactivation = col2im_capsules(dchild_a.T[..., None], window)[..., 0]
    return dpose, dactivation, dW, dbeta_u, dbeta_a


# Coordinate addition adds x and y to the first two elements of a vote's last column, of the P*P
# elements of a vote, row by row:
X_ELEMENT, Y_ELEMENT = P - 1, 2 * P - 1


def class_caps_forward(pose, activation, W, beta_u, beta_a, n_iters, centers=None, lambda_=LAMBDA):
    """Compute the class capsules by EM routing, with transformation matrices shared across
    positions.

    pose: (N, rows, columns, B, D); activation: (N, rows, columns, B); W: (B, J, P, P). centers: x
    and y of the receptive fields' centers, (positions, 2), for coordinate addition; None: without.
    Return (mu, x), (N, J, D) and (N, J), with a = logistic(x), and a cache."""
    N, rows, columns, B, _ = pose.shape
    n, J = rows * columns, W.shape[1]
    # children are in the order (type, position)
    M = pose.reshape(N, n, B, D).transpose(2, 1, 0, 3).reshape(B, n * N, D)
    child_a = activation.reshape(N, n, B).transpose(0, 2, 1).reshape(N, B * n)
    V, votes_cache = pose_votes_forward(M, W)               # (B, n*N, J, D)
    if centers is not None:
        x, y = np.repeat(centers.astype(V.dtype), N, axis=0).T      # (n*N,)
        V[..., X_ELEMENT] += x[:, None]
        V[..., Y_ELEMENT] += y[:, None]
    V = V.reshape(B * n, N, J, D).transpose(1, 2, 0, 3)     # (N, J, I, D)
    (mu, x), em_cache = em_routing_forward(V, child_a, beta_u, beta_a, n_iters, lambda_)
    return (mu, x), (activation.shape, votes_cache, em_cache)


def class_caps_backward(dmu, dx, cache):
    """Return the gradients dpose, dactivation, dW, dbeta_u and dbeta_a, with the inputs' shapes.

    dmu: (N, J, D); dx: (N, J)."""
    shape, votes_cache, em_cache = cache
    N, _, _, B = shape
    J = dx.shape[1]
    dV, dchild_a, dbeta_u, dbeta_a = em_routing_backward(dmu, dx, em_cache)
    dV = dV.transpose(2, 0, 1, 3).reshape(B, -1, J, D)      # (B, n*N, J, D)
    dM, dW = pose_votes_backward(dV, votes_cache)
    dpose = dM.reshape(B, -1, N, D).transpose(2, 1, 0, 3).reshape(*shape, D)
    dactivation = dchild_a.reshape(N, B, -1).transpose(0, 2, 1).reshape(shape)
    return dpose, dactivation, dW, dbeta_u, dbeta_a


# -------------------------------------------------------------- dynamic routing
# The axes of u_hat, b, c and their gradients are (N, J, I, ...): output capsule j comes before
# input capsule i.

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


# -------------------------------------------------------------- losses

def spread_loss(a, labels, margin):
    """Compute the spread loss (Hinton et al. 2018, Eq. 3), averaged over the batch.

        L = sum_{i != t} max(0, m - (a_t - a_i))^2

    a: activations, (N, J); labels: target classes t, (N,) int; margin: m, a float or (N,). The
    paper increases m from 0.2 to 0.9 during training. At equal activations the loss is (J-1) m^2.
    Return the loss, a float, and da, (N, J)."""
    rows = np.arange(len(labels))
    lead = a[rows, labels][:, None] - a                     # of the target class, (N, J)
    violation = np.maximum(np.reshape(margin, (-1, 1)) - lead, 0).astype(a.dtype, copy=False)
    violation[rows, labels] = 0
    da = violation * (2 / len(labels))
    da[rows, labels] = -da.sum(1)
    return float(np.vdot(violation, violation)) / len(labels), da


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


def cross_entropy(scores, labels):
    """Compute the cross-entropy loss, -log softmax(scores)[label], averaged over the batch.

    scores: (N, J); labels: (N,) int. Return the loss, a float, and dscores, (N, J)."""
    N, J = scores.shape
    log_p = scores - scores.max(1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    dscores = (np.exp(log_p) - np.eye(J, dtype=log_p.dtype)[labels]) / N
    return -float(log_p[np.arange(N), labels].sum()) / N, dscores


def classification_loss(out, batch, config):
    """Compute the loss named by config.loss, averaged over the batch.

    The spread loss and the margin loss take the activations a: lengths of vector capsules, else
    logistic(scores). Cross-entropy takes log a of capsules, but a CNN's logits as usual. out: the
    result of forward. batch: a dict with labels, (N,), and, for the spread loss, margin. Return the
    loss, a float, and dscores, (N, J)."""
    scores, labels = out["scores"], batch["labels"]
    if config.loss == "cross-entropy":
        return cross_entropy_of_scores(scores, labels, config)
    are_lengths = config.model in VECTOR_MODELS
    a = scores if are_lengths else sigmoid(scores)
    if config.loss == "spread":
        loss, da = spread_loss(a, labels, batch["margin"])
    else:
        loss, da = margin_loss(a, np.eye(N_CLASSES, dtype=a.dtype)[labels])
    if are_lengths:
        return loss, da
    return loss, da * a * (1 - a)


def cross_entropy_of_scores(scores, labels, config):
    """Compute the cross-entropy of classification_loss from scores, (N, J). Return the loss, a
    float, and dscores, (N, J)."""
    if config.model in VECTOR_MODELS:
        loss, dlogs = cross_entropy(np.log(scores), labels)
        return loss, dlogs / scores
    if config.model in MATRIX_MODELS:                       # log a = -log(1 + exp(-score))
        loss, dlogs = cross_entropy(-np.logaddexp(0, -scores), labels)
        return loss, dlogs * sigmoid(-scores)
    return cross_entropy(scores, labels)


# -------------------------------------------------------------- the networks
# A network is a table of convolutions, which one loop runs, and a head.

# Of matrix-capsnet the channels of Conv1 and the capsule types of PrimaryCaps, ConvCaps1 and
# ConvCaps2; of the backbone the channels of its first two convolutions; of capsnet-shared the types
# of its primary capsules
Size = collections.namedtuple("Size", "conv1 primary conv_caps1 conv_caps2 backbone types")
SIZES = {                          # by --preset
    "small": Size(32, 4, 8, 8, 16, 5),
    "wide": Size(64, 4, 4, 4, 32, 10),
    "paper": Size(64, 8, 16, 16, 16, 5)}
PAPER_WIDTH, PAPER_HIDDEN = 32, 1024    # of the paper's CNN: channels of conv1, hidden units
HIDDEN = 32                        # hidden units of smaller ones
IDENTITY_NOISE = 0.1               # standard deviation of initial matrices around the identity
BETA_U, BETA_A = -1.0, -2.0        # initial: a parent without active children has a = 0.12
VOTE_SUM_GAIN = 4.0                # of vectors: variance of a class's sum of votes / of capsules
E = 8                              # elements of a primary capsule that is a vector; others have D


# A convolution. F: channels of its output; K: side of its kernel; pad: rows and columns of zeros
# added on each side; pool: 2x2 max pooling after it; coordinates: x and y are added to its input as
# channels
Conv = collections.namedtuple("Conv", "name F K stride pool pad coordinates",
                              defaults=(3, 1, False, 0, False))


def convolutions(config):
    """Return the convolutions of a network, a tuple of Conv; the last one of a capsule network is
    PrimaryCaps"""
    return convolutions_of_width(config, width_of(config))


def convolutions_of_width(config, width):
    """Return the convolutions of a network that is as wide as --width says: types of primary
    capsules, channels of conv1 (cnn, cnn-bn) or of conv5 (cnn-gap). matrix-capsnet has its widths
    by preset"""
    size = SIZES[config.preset]
    if config.model == "matrix-capsnet":
        return Conv("conv1", size.conv1, 5, 2), Conv("primary", size.primary * (D + 1), 1)
    if config.model in PAPER_CNNS:
        pad = 2 if is_paper_cnn(config) else 0
        return (Conv("conv1", width, 5, pool=True, pad=pad),
                Conv("conv2", 2 * width, 5, pool=True, pad=pad))
    if config.model == "cnn-gap":
        last = Conv("conv5", width, coordinates=config.coordinates)
    elif config.model == "matrix-head":
        last = Conv("primary", width * (D + 1))
    else:
        last = Conv("primary", width * E)
    first = size.backbone
    return (Conv("conv1", first), Conv("conv2", first, pool=True),
            Conv("conv3", 2 * first), Conv("conv4", 2 * first, pool=True),
            last)


def conv_caps(config):
    """Return matrix-capsnet's two layers of convolutional capsules, with types of capsules in place
    of channels. Their parameters are conv_W, conv2_W, and so on; conv2_w is a convolution's"""
    if config.model != "matrix-capsnet":
        return ()
    size = SIZES[config.preset]
    return Conv("conv", size.conv_caps1, 3, 2), Conv("conv2", size.conv_caps2, 3)


def is_paper_cnn(config):
    """Return whether the network is the paper's CNN, with its padding and its hidden layer, with or
    without batch normalization"""
    return config.model in PAPER_CNNS and config.preset == "paper"


def width_of(config):
    """Return --width or, if it is 0, the default of the model: see convolutions_of_width"""
    if config.width or config.model == "matrix-capsnet":
        return config.width
    if config.model == "capsnet-shared":
        return SIZES[config.preset].types
    if is_paper_cnn(config):
        return PAPER_WIDTH
    return matched_width(config)


@functools.cache
def matched_width(config):
    """Return the width that gives config.model the number of parameters of its reference network:
    of cnn and cnn-bn matrix-capsnet, of the other models capsnet-shared. Of the two neighboring
    widths, the one whose number of parameters is nearer is used."""
    reference = "matrix-capsnet" if config.model in PAPER_CNNS else "capsnet-shared"
    reference = dataclasses.replace(config, model=reference, coordinates=True, dropout=None)
    target = n_weights(parameters(reference))

    def size(width):
        return n_weights(parameters_of_width(config, width))

    upper = 1 + bisect.bisect_left(range(1, 4096), target, key=size)    # the least that is as large
    lower = max(1, upper - 1)
    return min(lower, upper, key=lambda width: abs(size(width) - target))


def n_weights(table):
    """Return how many numbers the Parameters of a table have"""
    return sum(math.prod(p.shape) for p in table.values())


def receptive_fields(convs):
    """Return the coordinates of the centers of the receptive fields of some convolutions along an
    axis, (side,), from -1 to 1 over the image"""
    side = SIDE
    first = 0.0                    # center of the first receptive field, px
    step = 1                       # distance of the centers of two, px
    for conv in convs:
        side = (side + 2 * conv.pad - conv.K) // conv.stride + 1
        first += step * ((conv.K - 1) / 2 - conv.pad)
        step *= conv.stride
        if conv.pool:
            side //= 2
            first += step / 2
            step *= 2
    return (first + step * np.arange(side) - (SIDE - 1) / 2) / (SIDE / 2)


def receptive_field_centers(config):
    """Return x and y of the centers of the receptive fields, from -1 to 1 across the image, of the
    positions whose capsules vote for the class capsules, (positions, 2)"""
    along = receptive_fields(convolutions(config) + conv_caps(config))
    return np.stack([np.tile(along, len(along)), np.repeat(along, len(along))], 1)


# How a parameter starts: at start + std * noise
Parameter = collections.namedtuple("Parameter", "shape start std")


def constant(value, n):
    """Return the Parameter of n numbers that start at a value"""
    return Parameter((n,), value, 0)


def normal(shape, gain, fan_in=None):
    """Return the Parameter of normal weights with variance gain / fan-in. fan_in: the number of
    inputs that are added up; None: all axes of the shape but the last"""
    if fan_in is None:
        fan_in = math.prod(shape[:-1])
    return Parameter(shape, 0, np.sqrt(gain / fan_in))


def parameters(config):
    """Return {name: Parameter} of a network, in the order in which init_params draws them"""
    return parameters_of_width(config, width_of(config))


def parameters_of_width(config, width):
    """Return {name: Parameter} of a network; width: see convolutions_of_width.

    The gain is 2 where a ReLU follows (He initialization; not PrimaryCaps), VOTE_SUM_GAIN for the
    transformation matrices of vectors, and 1 elsewhere. Matrices of poses start near the
    identity."""
    table = {}
    channels = N_CHANNELS[config.data]
    convs = convolutions_of_width(config, width)
    for conv in convs:
        if conv.coordinates:
            channels += 2
        gain = 1 if conv.name == "primary" else 2
        table[conv.name + "_w"] = normal((conv.K, conv.K, channels, conv.F), gain)
        if config.model == "cnn":
            table[conv.name + "_b"] = constant(0, conv.F)
        else:
            table[conv.name + "_norm_gamma"] = constant(1, conv.F)
            table[conv.name + "_norm_beta"] = constant(0, conv.F)
        channels = conv.F
    side = len(receptive_fields(convs))
    n_positions = side * side
    if config.model in PAPER_CNNS:
        table |= cnn_head_parameters(n_positions * channels, config)
    elif config.model == "cnn-gap":
        table["fc1_w"] = normal((channels, N_CLASSES), 1)
        table["fc1_b"] = constant(0, N_CLASSES)
    elif config.model in MATRIX_MODELS:
        table |= matrix_head_parameters(channels // (D + 1), config)
    else:
        table |= capsnet_head_parameters(n_positions, channels // E, config)
    return table


def cnn_head_parameters(n_inputs, config):
    """Return {name: Parameter} of a hidden layer and the layer of the scores"""
    n_hidden = PAPER_HIDDEN if is_paper_cnn(config) else HIDDEN
    return {"fc1_w": normal((n_inputs, n_hidden), 2), "fc1_b": constant(0, n_hidden),
            "fc2_w": normal((n_hidden, N_CLASSES), 1), "fc2_b": constant(0, N_CLASSES)}


def matrix_head_parameters(n_types, config):
    """Return {name: Parameter} of the layers of matrix capsules above PrimaryCaps, which has
    n_types"""
    layers = [(conv.name, conv.K * conv.K, conv.F) for conv in conv_caps(config)]
    table = {}
    for name, n_positions, J in (*layers, ("class", 1, N_CLASSES)):
        shape = (n_positions * n_types, J, P, P)
        table[name + "_W"] = Parameter(shape, np.eye(P, dtype=np.float32), IDENTITY_NOISE)
        table[name + "_beta_u"] = constant(BETA_U, J)
        table[name + "_beta_a"] = constant(BETA_A, J)
        n_types = J
    return table


def capsnet_head_parameters(n_positions, n_types, config):
    """Return {name: Parameter} of the transformation matrices of vector capsules: one per capsule
    or, of capsnet-shared, one per type. Their fan-in is all elements of all primary capsules"""
    n_matrices = n_types if config.model == "capsnet-shared" else n_positions * n_types
    n_elements = n_positions * n_types * E
    table = {"W": normal((n_matrices, E, N_CLASSES, D), VOTE_SUM_GAIN, n_elements)}
    if config.coordinates:
        table["coordinate_W"] = normal((2, N_CLASSES, D), VOTE_SUM_GAIN, n_elements)
    return table


def param_shapes(config):
    """Return {name: shape} of the parameters"""
    return {name: p.shape for name, p in parameters(config).items()}


def init_params(config):
    """Draw the initial parameters, {name: float32 array}; see parameters_of_width"""
    rng = rng_for(config.seed, INIT)
    params = {}
    for name, p in parameters(config).items():
        noise = rng.standard_normal(p.shape, np.float32)
        params[name] = np.float32(p.start) + np.float32(p.std) * noise
    return params


def loss_and_grads(params, batch, config, share=1.0):
    """Compute the loss and all gradients of a batch, or of one shard of it. Pure function.

    batch: the result of to_batch. share: the shard's share of the samples in its batch. Loss,
    accuracy and gradients are means over the shard times share, so that they add up to means over
    the batch.

    Return (terms, grads, statistics). terms: loss, what is minimized, here the classification loss
    alone; and accuracy, the fraction of images correctly classified. grads: a dict with the keys of
    params. statistics: the mean and the variance that each normalization used."""
    statistics, grads = {}, {}
    out, cache = forward(params, batch["images"], config, statistics, batch.get("dropout_mask"))
    loss, dscores = classification_loss(out, batch, config)
    backward(dscores * share, cache, config, grads)
    accuracy = (out["scores"].argmax(1) == batch["labels"]).mean()
    return {"loss": loss * share, "accuracy": accuracy * share}, grads, statistics


def forward(params, images, config, statistics=None, dropout_mask=None):
    """Compute the outputs of the network and a cache for backward.

    images: (N, 32, 32, C). statistics: a dict in training, which receives the mean and variance of
    each normalization; None in evaluation, which uses the running ones in params. dropout_mask:
    (N, hidden units), of cnn and cnn-bn in training; None for no dropout.

    Return out and the cache. out is a dict of
      scores        (N, J), by which classes are predicted: of matrix capsules and CNNs logits, of
                    vector capsules their lengths
    of vector capsules, with I in the order (row, column, type):
      v             class capsules, (N, J, D)
      u             primary capsules, (N, I, E)
      c             list of the iterations' coupling coefficients, (1, I) first, then (N, J, I)
    of matrix capsules:
      mu, a         poses, (N, J, D), and activations, (N, J), of the class capsules
      class_steps   list of the EM iterations to the class capsules, each with R, (N, 1, I) first,
                    then (N, J, I), mu and sigma2, (N, J, D), with I in the order (type, row,
                    column)
      primary_pose  poses of the primary capsules, (N, rows, columns, B, D)
      primary_a     their activations, (N, rows, columns, B)
    and of matrix-capsnet
      conv_mu, conv_a, conv2_mu, conv2_a   the same of the convolutional capsules"""
    x, convs_cache = convolutions_forward(params, images, config, statistics)   # (N, side, side, C)
    head_forward, _ = HEADS[config.model]
    out, head_cache = head_forward(params, x, config, dropout_mask)
    return out, (convs_cache, head_cache)


def backward(dscores, cache, config, grads):
    """Put the gradients of all parameters into grads, {name: array}. dscores: (N, J), as
    classification_loss returns"""
    convs_cache, head_cache = cache
    _, head_backward = HEADS[config.model]
    dx = head_backward(dscores, head_cache, config, grads)
    convolutions_backward(dx, convs_cache, grads)


def convolutions_forward(params, images, config, statistics):
    """Compute all convolutions, each with a normalization or a bias, max pooling where it has it,
    and, but for PrimaryCaps, a ReLU. statistics: see forward. Return x (N, side, side, C) and a
    cache."""
    x = images.swapaxes(0, 1)                               # (H, N, W, C)
    convs = convolutions(config)
    caches = []
    for k, conv in enumerate(convs):
        if conv.coordinates:
            x = append_coordinates(x, receptive_fields(convs[:k]))
        if conv.pad:
            x = np.pad(x, ((conv.pad, conv.pad), (0, 0), (conv.pad, conv.pad), (0, 0)))
        x, conv_cache = conv2d_forward(x, params[conv.name + "_w"], conv.stride)
        norm_cache = pool_cache = None
        if config.model == "cnn":
            x += params[conv.name + "_b"]
        else:
            x, norm_cache = conv_norm_forward(params, x, conv.name + "_norm", statistics)
        if conv.pool:
            x, pool_cache = max_pool_forward(x)
        if conv.name != "primary":
            # overwrites the result of max pooling, which its cache holds, as max_pool_backward
            # expects
            np.maximum(x, 0, out=x)
        caches.append((conv, conv_cache, norm_cache, pool_cache, x))
    return x.swapaxes(0, 1), caches                         # (N, side, side, C)


def conv_norm_forward(params, x, name, statistics):
    """Compute a batch normalization. Return y and a cache. statistics: see forward."""
    running = None
    if statistics is None:
        running = [params[name + part] for part in STATISTICS]
    y, found, cache = norm_forward(x, params[name + "_gamma"], params[name + "_beta"], running)
    if statistics is not None:
        for part, value in zip(STATISTICS, found):
            statistics[name + part] = value
    return y, cache


def convolutions_backward(dx, caches, grads):
    """Put the gradients of all convolutions into grads. dx: (N, side, side, C)"""
    dx = dx.swapaxes(0, 1)                                  # (H, N, W, C)
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
        is_first = conv.name == "conv1"                     # nothing needs gradients of images
        dx, grads[conv.name + "_w"] = conv2d_backward(dx, conv_cache, need_dx=not is_first)
        if conv.pad and not is_first:
            dx = dx[conv.pad:-conv.pad, :, conv.pad:-conv.pad]
        if conv.coordinates:
            dx = dx[..., :-2]


def append_coordinates(x, along):
    """Return x (H, N, H, C) with the x and y coordinates of every position as two more channels.
    along: (H,)"""
    xy = np.stack(np.meshgrid(along, along), -1).astype(x.dtype)                # (H, H, 2)
    xy = np.broadcast_to(xy[:, None], (*x.shape[:3], 2))                        # (H, N, H, 2)
    return np.concatenate([x, xy], -1)


# Heads. Each computes out (see forward) from x (N, side, side, C); its backward function returns dx
# and puts the gradients of its parameters into grads. Only the CNN's has a use for dropout_mask.

def matrix_head_forward(params, x, config, _):
    """Compute primary capsules, two layers of convolutional capsules (matrix-capsnet only) and the
    class capsules."""
    def weights_of_layer(name):
        return params[name + "_W"], params[name + "_beta_u"], params[name + "_beta_a"]

    n_iters = config.routing_iters
    lambda_ = config.inverse_temperature
    (pose, activation), primary_cache = primary_caps_forward(x)
    out = {"primary_pose": pose, "primary_a": activation}
    caches = []
    for conv in conv_caps(config):
        (pose, activation), cache = conv_caps_forward(
            pose, activation, *weights_of_layer(conv.name), n_iters, conv.stride, lambda_)
        out[conv.name + "_mu"] = pose
        out[conv.name + "_a"] = activation
        caches.append((conv.name, cache))
    centers = receptive_field_centers(config) if config.coordinates else None
    (mu, scores), class_cache = class_caps_forward(
        pose, activation, *weights_of_layer("class"), n_iters, centers, lambda_)
    _, _, em_cache = class_cache
    out |= {"scores": scores, "mu": mu, "a": sigmoid(scores), "class_steps": em_cache.steps}
    return out, (primary_cache, caches, class_cache)


def matrix_head_backward(dscores, cache, config, grads):
    primary_cache, caches, class_cache = cache

    def keep(name, dW, dbeta_u, dbeta_a):
        grads[name + "_W"] = dW
        grads[name + "_beta_u"] = dbeta_u
        grads[name + "_beta_a"] = dbeta_a

    dmu = np.zeros((*dscores.shape, D), dscores.dtype)      # the loss depends on scores only
    dpose, dactivation, *of_weights = class_caps_backward(dmu, dscores, class_cache)
    keep("class", *of_weights)
    for name, conv_cache in reversed(caches):
        dpose, dactivation, *of_weights = conv_caps_backward(dpose, dactivation, conv_cache)
        keep(name, *of_weights)
    return primary_caps_backward(dpose, dactivation, primary_cache)


def capsnet_head_forward(params, x, config, _):
    """Compute primary vector capsules, and class capsules by dynamic routing (Sabour et al. 2017).

    capsnet has one transformation matrix per capsule; capsnet-shared shares its matrices across
    positions and, with --coordinates, uses coordinate addition."""
    u, squash_cache = squash_forward(x.reshape(len(x), -1, E))                  # (N, I, E)
    inputs, W, coordinates_cache = u, params["W"], None
    if config.coordinates:
        inputs, coordinates_cache = add_coordinates_forward(u, receptive_field_centers(config))
        of_coordinates = np.broadcast_to(params["coordinate_W"], (len(W), 2, *W.shape[2:]))
        W = np.concatenate([W, of_coordinates], 1)                              # (B, E + 2, J, D)
    u_hat, votes_cache = votes_forward(inputs, W)                               # (N, J, I, D)
    v, routing_cache = routing_forward(u_hat, config.routing_iters)
    lengths, lengths_cache = lengths_forward(v)
    _, steps = routing_cache
    out = {"scores": lengths, "v": v, "u": u, "c": [c for c, _, _ in steps]}
    return out, (x.shape, squash_cache, coordinates_cache, votes_cache, routing_cache,
                 lengths_cache)


def capsnet_head_backward(dscores, cache, config, grads):
    shape, squash_cache, coordinates_cache, votes_cache, routing_cache, lengths_cache = cache
    dv = lengths_backward(dscores, lengths_cache)
    du_hat = routing_backward(dv, routing_cache)
    du, dW = votes_backward(du_hat, votes_cache)
    grads["W"] = dW[:, :E]
    if config.coordinates:
        grads["coordinate_W"] = dW[:, E:].sum(0)
        du = add_coordinates_backward(du, coordinates_cache)
    return squash_backward(du, squash_cache).reshape(shape)


def cnn_head_forward(params, x, config, dropout_mask):
    """Compute the scores from a hidden layer, with dropout in training."""
    flat = x.reshape(len(x), -1)
    hidden, hidden_cache = linear_forward(flat, params["fc1_w"], params["fc1_b"])
    hidden = np.maximum(hidden, 0)
    kept = hidden
    if dropout_mask is not None:
        kept = hidden * dropout_mask
    scores, scores_cache = linear_forward(kept, params["fc2_w"], params["fc2_b"])
    return {"scores": scores}, (x.shape, hidden, dropout_mask, hidden_cache, scores_cache)


def cnn_head_backward(dscores, cache, config, grads):
    shape, hidden, dropout_mask, hidden_cache, scores_cache = cache
    dhidden, grads["fc2_w"], grads["fc2_b"] = linear_backward(dscores, scores_cache)
    if dropout_mask is not None:
        dhidden = dhidden * dropout_mask
    dhidden = dhidden * (hidden > 0)
    dx, grads["fc1_w"], grads["fc1_b"] = linear_backward(dhidden, hidden_cache)
    return dx.reshape(shape)


def gap_head_forward(params, x, config, _):
    """Compute the scores from the means over all positions."""
    scores, cache = linear_forward(x.mean((1, 2)), params["fc1_w"], params["fc1_b"])
    return {"scores": scores}, (x.shape, cache)


def gap_head_backward(dscores, cache, config, grads):
    shape, linear_cache = cache
    dmeans, grads["fc1_w"], grads["fc1_b"] = linear_backward(dscores, linear_cache)
    _, n_rows, n_columns, _ = shape
    return np.broadcast_to(dmeans[:, None, None] / (n_rows * n_columns), shape)


MATRIX_HEAD = matrix_head_forward, matrix_head_backward
CAPSNET_HEAD = capsnet_head_forward, capsnet_head_backward
CNN_HEAD = cnn_head_forward, cnn_head_backward
HEADS = {                          # by --model
    "matrix-capsnet": MATRIX_HEAD, "matrix-head": MATRIX_HEAD,
    "capsnet": CAPSNET_HEAD, "capsnet-shared": CAPSNET_HEAD,
    "cnn": CNN_HEAD, "cnn-bn": CNN_HEAD,
    "cnn-gap": (gap_head_forward, gap_head_backward)}


# -------------------------------------------------------------- optimizer

def optimizer_step(state, shard_grads, rate, config, workers):
    """Update all parameters in place by Adam. shard_grads: list of gradient dicts, which are added
    up. rate: the schedule's factor."""
    params, m, v = state["params"], state["adam_m"], state["adam_v"]
    step = state["step"] + 1
    adam_step(params, shard_grads, m, v, step, config.lr * rate, workers)
    if step % 500 == 0:
        # Moments of weights without a gradient decay to denormal numbers, which are slow
        for moments in m, v:
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


STATISTICS = "_mean", "_var"       # ends of the names of the running statistics


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


def sigmoid(x):
    """Compute 1 / (1 + exp(-x)), by tanh so that it cannot overflow"""
    return 0.5 * np.tanh(0.5 * x) + 0.5


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


@functools.cache
def openblas():
    """Return the OpenBLAS library that NumPy brings along, or None if it brings none"""
    site = Path(np.__file__).parent
    for library in (*site.parent.glob("numpy.libs/*openblas*"), *site.glob(".dylibs/*openblas*")):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(library))


@functools.cache
def sgemm():
    """Return cblas_sgemm of NumPy's OpenBLAS, or None if NumPy has another BLAS"""
    function = getattr(openblas(), "scipy_cblas_sgemm64_", None)
    if function is not None:
        enum, size, real, address = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
        function.argtypes = [enum, enum, enum, size, size, size, real, address, size, address, size,
                             real, address, size]
    return function


def n_cores():
    """Return the number of cores that this process may use"""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -------------------------------------------------------------- files of views, rendered toys

NORB_FILES = {                     # by split and kind of file; names hold the instances of its toys
    (split, kind): f"smallnorb-5x{toys}x9x18x6x2x96x96-{split}ing-{kind}.mat"
    for split, toys in (("train", "46789"), ("test", "01235"))
    for kind in ("cat", "info", "dat")}
NORB_FORMAT = {                    # by kind of file: magic number, dtype, shape of a row
    "dat": (0x1E3D4C55, "u1", (2, 96, 96)),
    "cat": (0x1E3D4C54, "<i4", ()),
    "info": (0x1E3D4C54, "<i4", (4,))}
NORB_CODES = (                     # name, valid codes, scale and offset from a code to a value
    ("labels", range(5), 1, 0),
    ("instances", range(10), 1, 0),
    ("elevations", range(9), 5, 30),
    ("azimuths", range(0, 36, 2), 10, 0),
    ("lightings", range(6), 1, 0))
NORB_ROWS = 24300                  # 5 classes x 5 toys x 9 elevations x 18 azimuths x 6 lightings
DATA_NAMES = {                     # in all output
    "toys": "rendered toys", "smallnorb": "smallNORB", "shapes": "five shapes"}


def class_names(data):
    """Return the names of the classes of load_data's dict, or of a history"""
    return SHAPE_NAMES if data["source"] == "shapes" else NORB_NAMES


def data_name(source, trained_on=None):
    """Return what a data set is called in all output, and the one that was trained on, if it is
    another"""
    name = DATA_NAMES.get(source, f"images of {source}")
    if trained_on not in (None, source):
        name += f" (trained on {data_name(trained_on)})"
    return name


def fit_to_data(config, data):
    """Return config as it is: of other experiments it gets sizes of the data. Raise InputError
    unless data are as load_data returns them"""
    shape, dtypes = (NORB_SIDE, NORB_SIDE, 2), ("u1",)
    if config.data == "shapes":
        shape, dtypes = (SIDE, SIDE, 1), ("f4", "f8")
    for split in ("train", "familiar", "novel"):
        if split in data:
            images = np.asarray(data[split]["images"])
            labels = np.asarray(data[split]["labels"])
            if images.dtype not in dtypes or images.shape[1:] != shape or len(images) == 0:
                raise InputError(f"{split}: images, {images.dtype} {images.shape}: "
                                 f"give {np.dtype(dtypes[-1])} {('n', *shape)}")
            if not are_labels(labels, len(images)):
                raise InputError(f"{split}: labels are {labels.dtype} {labels.shape}. "
                                 f"Give {len(images)} int64 from 0 to 4")
    return config


def are_labels(labels, n):
    """Return whether an array holds the classes of n images"""
    is_integer = labels.dtype.kind in "iu" and np.can_cast(labels.dtype, np.int64)
    return (is_integer and labels.shape == (n,)
            and labels.min() >= 0 and labels.max() < N_CLASSES)


def downsample(images):
    """Return images at half the resolution, with the cameras as channels: means of 2x2 pixels.

    (N, 2, H, W) uint8 to (N, H/2, W/2, 2) uint8. Means are rounded to the nearest integer, halves
    upwards."""
    rows = images[:, :, ::2].astype(np.uint16) + images[:, :, 1::2]     # (N, 2, H/2, W)
    sums = rows[..., ::2] + rows[..., 1::2]                             # (N, 2, H/2, W/2)
    means = ((sums + np.uint16(2)) >> 2).astype(np.uint8)
    return means.transpose(0, 2, 3, 1)


def read_norb_file(path, kind):
    """Return the array in one smallNORB file, .mat or .mat.gz; its number of rows N is read from
    the header.

    kind "dat": images, (N, 48, 48, 2) uint8; "cat": labels, (N,) int32; "info": (N, 4) int32.
    Images are downsampled from 96x96 px while they are read: 112 MB in place of 448. Raise
    InputError if the file is missing or damaged."""
    open_file = gzip.open if path.suffix == ".gz" else open
    try:
        with open_file(path, "rb") as file:
            array = read_norb_rows(file, kind)
            if file.read(1):               # reading past the end also checks gzip's CRC
                raise ValueError("it is longer than its header says")
    except FileNotFoundError:
        raise InputError(f"{path}: missing. Give the folder of smallNORB's six files as "
                         "--norb-dir") from None
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise InputError(f"{path}: damaged, or not a smallNORB {kind} file ({error}). "
                         "Get the file again") from None
    return array


def read_norb_rows(file, kind):
    """Return the array of read_norb_file from an open file. Raise ValueError or IndexError if its
    header is wrong, or if it is too short"""
    magic, dtype, shape = NORB_FORMAT[kind]
    n_axes = 1 + len(shape)
    header = np.frombuffer(file.read(4 * (2 + max(3, n_axes))), "<i4").tolist()
    N = header[2]
    is_right = header[:2] == [magic, n_axes] and header[3:2 + n_axes] == [*shape]
    if not is_right or not 1 <= N <= NORB_ROWS:
        raise ValueError(f"its header says {header}")
    if kind == "dat":
        array = np.empty((N, NORB_SIDE, NORB_SIDE, 2), np.uint8)
    else:
        array = np.empty((N, *shape), np.int32)
    row_size = np.dtype(dtype).itemsize * math.prod(shape)
    for start in range(0, N, 32):
        n = min(32, N - start)
        chunk = np.frombuffer(file.read(n * row_size), dtype).reshape(n, *shape)
        array[start:start + n] = downsample(chunk) if kind == "dat" else chunk
    return array


def load_norb(norb_dir):
    """Return the smallNORB files of a folder: {"train", "test"}, two dicts of arrays.

    images, (N, 48, 48, 2) uint8, whose channels are the left and the right camera; labels,
    instances, elevations and azimuths (degrees), lightings, all (N,) int64. Of .mat and .mat.gz,
    .mat is read."""
    return {split: load_norb_split(norb_dir, split) for split in TOY_SPLITS}


def load_norb_split(norb_dir, split):
    """Return one of load_norb's dicts"""
    read = {}
    for kind in ("cat", "info", "dat"):                                 # the small files first
        path = Path(os.path.expanduser(norb_dir), NORB_FILES[split, kind])
        if not path.exists():
            path = path.with_suffix(".mat.gz")
        read[kind] = read_norb_file(path, kind)
    not_together = InputError(f"{path}: does not fit the cat and info files beside it. "
                              "Get the three again")
    if len({len(array) for array in read.values()}) > 1:
        raise not_together
    arrays = {}
    for column, (name, codes, scale, offset) in zip((read["cat"], *read["info"].T), NORB_CODES):
        if not np.isin(column, codes).all():
            raise not_together
        arrays[name] = column.astype(np.int64) * scale + offset
    return arrays | {"images": read["dat"]}


# Shapes are five sets of points, drawn as blobs.

def shape_points():
    """Return the five shapes as arrays of points, (n, 3), in [-1, 1]^3: x right, y up, z towards
    the viewer."""
    segment = np.linspace                                   # (start, end, number of points)
    ends = [[0, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]]
    cross = np.array(ends, float) * 0.8
    ell = np.concatenate([segment((-0.5, 0.9, 0), (-0.5, -0.7, 0), 7),
                          segment((-0.5, -0.7, 0), (0.8, -0.7, 0), 6)[1:],
                          segment((-0.5, -0.7, 0), (-0.5, -0.7, 0.6), 3)[1:]])
    tee = np.concatenate([segment((-0.8, 0.8, 0), (0.8, 0.8, 0), 7),
                          segment((0, 0.8, 0), (0, -0.9, 0), 7)[1:]])
    corners = np.array(np.meshgrid(*[(-0.65, 0.65)] * 3)).reshape(3, 8).T
    edges = [segment(a, b, 5) for a, b in itertools.combinations(corners, 2)
             if np.count_nonzero(a != b) == 1]
    tripod = np.concatenate([segment((0, 0, 0), end, 6) for end in np.eye(3) * 0.9])
    return cross, ell, tee, np.concatenate(edges), np.unique(tripod, axis=0)


BLOB = 1.2                         # standard deviation of the Gaussian blob that draws a point, px
RADIUS = 9.5                       # length of one unit of a shape's coordinates, px
NOISE = 0.04                       # standard deviation of the pixel noise


def render(labels, azimuths, elevations, rng):
    """Return images of shapes from given viewpoints, (N, 32, 32, 1) float32 in [0, 1].

    labels, (N,) int; azimuths and elevations, (N,) in degrees. Under orthographic projection every
    point of a shape is drawn as a Gaussian blob, with a brightness from 0.5 (far) to 1 (near).
    Blobs are added and clipped at 1, then Gaussian pixel noise is added. A blob is the product of a
    row profile and a column profile, so that an image with n points is one matrix product (32, n) @
    (n, 32)."""
    images = np.empty((len(labels), SIDE, SIDE, 1), np.float32)
    pixels = np.arange(SIDE) - (SIDE - 1) / 2
    R = np.stack([*map(view_rotation, azimuths, elevations)])
    for label, points in enumerate(shape_points()):
        rows = np.flatnonzero(labels == label)
        turned = points @ R[rows].transpose(0, 2, 1)
        x, y, z = np.moveaxis(turned[..., None], 2, 0)                  # (images, points, 1) each
        columns = np.exp(-0.5 * ((pixels - RADIUS * x) / BLOB) ** 2)    # (images, points, 32)
        lines = np.exp(-0.5 * ((pixels - RADIUS * -y) / BLOB) ** 2)
        brightness = 0.75 + 0.25 * np.clip(z, -1, 1)
        images[rows, :, :, 0] = lines.transpose(0, 2, 1) @ (columns * brightness)
    np.minimum(images, 1, out=images)
    images += np.float32(NOISE) * rng.standard_normal(images.shape, np.float32)
    return np.clip(images, 0, 1, out=images)


def make_views(azimuths, elevations, n_per_view, rng):
    """Return n_per_view noisy images of every shape at every azimuth and elevation (degrees).

    The result is a dict of arrays with one row per image: images, labels, azimuths, elevations."""
    values = np.arange(N_CLASSES), azimuths, elevations, np.arange(n_per_view)
    grids = np.meshgrid(*values, indexing="ij")
    labels, azimuths, elevations, _ = (grid.ravel() for grid in grids)
    return {"images": render(labels, azimuths, elevations, rng), "labels": labels,
            "azimuths": azimuths % 360, "elevations": elevations}


def shape_views(config, train, test):
    """Return {"train", "familiar", "novel"}, three of make_views' dicts, from the given ranges of
    angles.

    Each split has n_train_views azimuths (novel azimuths: n_test_views) by n_elev elevations,
    equally spaced over their ranges: n_per_combo images of each training view, two images of each
    test view."""
    if config.split == "elevation":
        azimuth_range = parse_range(OF_SHAPES["train_azimuths"], "--train-azimuths")
        elevation_range = train
    else:
        azimuth_range = train
        elevation_range = (30, 70)
    azimuths = np.linspace(*azimuth_range, config.n_train_views)
    elevations = np.linspace(*elevation_range, config.n_elev)
    if config.split == "elevation":
        novel = azimuths, np.linspace(*test, config.n_elev)
    else:
        novel = np.linspace(*test, config.n_test_views), elevations
    return {
        "train": make_views(azimuths, elevations, config.n_per_combo, rng_for(config.seed, DATA)),
        "familiar": make_views(azimuths, elevations, 2, rng_for(config.seed, EVALUATION, 0)),
        "novel": make_views(*novel, 2, rng_for(config.seed, EVALUATION, 1))}


# Toys have the structure of smallNORB. The views that a run needs are rendered once and kept in a
# cache on disk.

TOYS_CACHE = "~/.cache/hinton-toys/toys-{}-version-1"   # seed of the toys; version of the renderer
TOY_ELEVATIONS = range(30, 75, 5)
TOY_AZIMUTHS = range(0, 360, 20)


def toy_tables(split):
    """Return the table of a split's toys, load_norb's dict without the images."""
    lightings = range(len(LIGHTINGS))
    values = range(N_CLASSES), TOY_SPLITS[split], TOY_ELEVATIONS, TOY_AZIMUTHS, lightings
    grids = np.meshgrid(*map(np.array, values), indexing="ij")
    return {name: grid.ravel() for (name, *_), grid in zip(NORB_CODES, grids)}


def toy_views(elevations, azimuths):
    """Return the indices, 0 to 161, of a toy's views with the given elevations and azimuths in
    degrees."""
    row = (elevations - TOY_ELEVATIONS.start) // TOY_ELEVATIONS.step
    column = (azimuths - TOY_AZIMUTHS.start) // TOY_AZIMUTHS.step
    return len(TOY_AZIMUTHS) * row + column


def toy_path(category, instance, toy_seed):
    """Return the path of the cache file of one toy."""
    folder = os.path.expanduser(TOYS_CACHE.format(toy_seed))
    return Path(folder, f"{NORB_NAMES[category]}-{instance}.npz")


def read_toy(path):
    """Return the cached views of a toy, {view index: images (6, 48, 48, 2)}; {} if the file is
    missing or damaged."""
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            return dict(zip(file["views"].tolist(), file["images"], strict=True))
    except Exception:              # what a damaged file makes its reader raise is not documented
        return {}


def draw_toy(category, instance, toy_seed, views):
    """Render views of a toy, given by their indices, add them to its cache file, if that can be
    written, and return {view index: images (6, 48, 48, 2) uint8}."""
    toy = make_toy(category, instance, toy_seed)
    drawn = {}
    for view in views:
        row, column = divmod(view, len(TOY_AZIMUTHS))
        images = draw_view(toy, TOY_ELEVATIONS[row], TOY_AZIMUTHS[column], 2 * NORB_SIDE)
        drawn[view] = downsample(images)
    path = toy_path(category, instance, toy_seed)
    known = read_toy(path) | drawn
    known_views = sorted(known)
    file = io.BytesIO()
    np.savez(file, views=known_views, images=np.stack([known[view] for view in known_views]))
    with contextlib.suppress(InputError):
        write_file(path, file.getvalue())
    return drawn


def add_toy_images(tables, config):
    """Add images to tables of toys, which are dicts as toy_tables returns them. Views that the
    cache lacks are rendered and added to it."""
    wanted = {}                    # by (label, instance): indices of views
    for table in tables:
        for label, instance, view, _ in rows_of_toys(table):
            wanted.setdefault((label, instance), set()).add(view)
    images_of = {toy: read_toy(toy_path(*toy, config.toy_seed)) for toy in wanted}
    missing = {toy: sorted(views - images_of[toy].keys()) for toy, views in wanted.items()}
    n_missing = sum(len(views) for views in missing.values())
    if n_missing:
        folder = toy_path(0, 0, config.toy_seed).parent
        say(f"rendering {n_missing:,} views of toys, to be kept in {folder}", config)
    for toy, views in missing.items():
        if views:
            images_of[toy] |= draw_toy(*toy, config.toy_seed, views)
    for table in tables:
        table["images"] = np.stack([images_of[label, instance][view][lighting]
                                    for label, instance, view, lighting in rows_of_toys(table)])


def rows_of_toys(table):
    """Return label, instance, index of the view and lighting of each row of a table, as ints"""
    views = toy_views(table["elevations"], table["azimuths"])
    columns = table["labels"], table["instances"], views, table["lightings"]
    return list(zip(*(column.tolist() for column in columns)))


# The renderer. A toy is a list of parts, (kind, matrix, center). A part maps a point p of a unit
# solid to center + matrix p in the toy's coordinates: x forward, y up, z to the toy's right. Unit
# solids:
#   ellipsoid   |p| <= 1
#   box         |x|, |y|, |z| <= 1
#   cylinder    x^2 + y^2 <= 1, |z| <= 1
#   cone        x^2 + y^2 <= ((1 - z) / 2)^2, |z| <= 1, with its apex at z = 1

ELLIPSOID, BOX, CYLINDER, CONE = range(4)
TOY_STYLES = {toy: style for five in TOY_SPLITS.values() for style, toy in enumerate(five)}
STEREO = 5.0                       # difference in azimuth between the two cameras, degrees
REACH = 0.92                       # of the farthest point from a toy's center, in half image sides
YAW = 6.0                          # limit of a toy's random rotation, degrees
STRETCH = 1.05                     # limit of its random scale factors
OFFSET = 0.04                      # limit of its random translation
LIGHTINGS = (                      # background, ambient, lamps: azimuth, height (degrees), strength
    (0.82, 0.18, ((-60, 40, 0.75),)),
    (0.79, 0.18, ((60, 40, 0.75),)),
    (0.76, 0.15, ((0, 75, 0.8),)),
    (0.82, 0.2, ((-60, 30, 0.45), (60, 30, 0.45))),
    (0.79, 0.22, ((170, 35, 0.5), (0, 30, 0.35))),
    (0.76, 0.2, ((-120, 40, 0.45), (20, 60, 0.5))))


def axis_rotation(axis, degrees):
    """Return the rotation matrix (3, 3) about the axis "x", "y" or "z" by an angle in degrees."""
    c = math.cos(math.radians(degrees))
    s = math.sin(math.radians(degrees))
    i, j = {"x": (1, 2), "y": (2, 0), "z": (0, 1)}[axis]
    R = np.eye(3)
    R[i, i] = R[j, j] = c
    R[i, j] = -s
    R[j, i] = s
    return R


def small_matmul(A, B):
    """Return A @ B, (n, 3) times (3, m), by explicit sums: the same bits on every processor, unlike
    BLAS."""
    return A[:, :1] * B[:1] + A[:, 1:2] * B[1:2] + A[:, 2:3] * B[2:3]


def view_rotation(azimuth, elevation):
    """Return the rotation matrix (3, 3) from a toy's coordinates to those of the camera.

    It rotates by azimuth about the vertical axis, then by elevation towards the viewer; both in
    degrees."""
    return small_matmul(axis_rotation("x", elevation), axis_rotation("y", azimuth))


def part(kind, center, size, rotation=None):
    """Return one part of a toy, (kind, matrix, center).

    size: (3,) extents along the part's own axes; rotation: rotation matrix (3, 3) of the part, or
    None."""
    M = np.diag(np.asarray(size, float) / 2)
    if rotation is not None:
        M = small_matmul(rotation, M)
    return kind, M, np.asarray(center, float)


def pair(kind, center, size, rotation=None):
    """Return a part and its mirror image beyond z = 0, the toy's plane of symmetry."""
    return with_mirror_image(*part(kind, center, size, rotation))


def with_mirror_image(kind, M, center):
    """Return a part and its mirror image on the other side of z = 0."""
    mirror = np.array([1, 1, -1.0])
    return [(kind, M, center), (kind, mirror[:, None] * M, center * mirror)]


def rod(kind, start, end, width, depth=None):
    """Return a cylinder from start to end, or a cone with its apex at end.

    width and depth (default: width) are the two diameters of the cross-section."""
    start = np.asarray(start, float)
    end = np.asarray(end, float)
    along = (end - start) / 2
    length = math.hypot(*along)
    not_along = [1, 0, 0] if abs(along[0]) < 0.9 * length else [0, 1, 0]
    across = np.cross(along / length, not_along)
    across /= math.hypot(*across)
    other = np.cross(along / length, across)
    if depth is None:
        depth = width
    M = np.stack([across * width / 2, other * depth / 2, along], 1)
    return kind, M, (start + end) / 2


def wings(x, y, span, chord, sweep, dihedral, thickness):
    """Return two swept plates, the right and the left wing; sweep and dihedral are angles in
    degrees."""
    back = math.tan(math.radians(sweep)) * span / 4
    up = math.tan(math.radians(dihedral)) * span / 4
    M = np.array([[chord / 2, 0, -back], [0, thickness / 2, up], [0, 0, span / 4]])
    return with_mirror_image(BOX, M, np.array([x - back, y + up, span / 4]))


# The five toys of a class in a split differ in style. Animals: trunk, snout or neither; humans:
# staff, rucksack, shield or nothing; planes: two engines, four engines, a propeller or none;
# trucks: the load; cars: the shape of the body.

def toy_animal(rng, style):
    """Return an animal: body, neck, head with ears, horns, trunk or snout, four legs, a tail."""
    length = rng.uniform(1, 1.6)
    height = rng.uniform(0.36, 0.72)
    leg = rng.uniform(0.2, 0.55)
    width = height * rng.uniform(0.6, 1)
    thick = rng.uniform(0.09, 0.22)
    y = leg + height / 2
    toy = [part(BOX if rng.random() < 0.15 else ELLIPSOID, (0, y, 0), (length, height, width))]
    if rng.random() < 0.4:
        toy.append(part(ELLIPSOID, (-length / 4, y + 0.08 * height, 0),
                        (0.55 * length, 1.15 * height, 1.1 * width)))
    neck = rng.choice([0.05, 0.15, 0.3, 0.55]) * rng.uniform(0.7, 1.2) + 0.12
    lean = math.radians(rng.uniform(10, 60))
    root = np.array([0.38 * length, y + 0.15 * height, 0])
    top = root + neck * np.array([math.sin(lean), math.cos(lean), 0])
    toy.append(rod(CYLINDER, root, top, rng.uniform(0.14, 0.3)))
    size = rng.uniform(0.24, 0.46)
    long = size * rng.uniform(0.9, 1.7)
    nod = axis_rotation("z", rng.uniform(-30, 25))
    forward = nod[:, 0] * long
    head = top + nod[:, 0] * long / 4
    toy.append(part(ELLIPSOID, head, (long, size, 0.85 * size), nod))
    ears = rng.integers(0, 4)
    if style == 0:
        toy.append(rod(CYLINDER, head + 0.4 * forward, head + 0.55 * forward - [0, 0.5, 0], 0.1))
    elif style == 1:
        toy.append(part(BOX, head + 0.55 * forward, (0.7 * size, 0.4 * size, 0.4 * size), nod))
    if ears == 0:
        toy += pair(CONE, head + [-0.05, 0.6 * size, 0.25 * size], (0.1, 0.1, 0.28),
                    axis_rotation("x", -90))
    elif ears == 1:
        toy += pair(ELLIPSOID, head + [-0.08, 0, 0.55 * size], (0.08, 0.34, 0.28))
    elif ears == 2:
        toy += [rod(CYLINDER, head + [0, 0.3 * size, 0.08 * s],
                    head + [-0.1, 0.3 * size + 0.35, 0.3 * s], 0.06) for s in (-1, 1)]
    x = length * rng.uniform(0.25, 0.38)
    z = width * rng.uniform(0.28, 0.42)
    stride = rng.uniform(-0.15, 0.15)
    for f in (1, -1):
        for s in (1, -1):
            foot = (f * (x + stride * s), 0, s * z)
            toy.append(rod(CYLINDER, (f * x, y - 0.1 * height, s * z), foot, thick))
    tail = rng.uniform(0.15, 0.6)
    up = math.radians(rng.uniform(-70, 60))
    root = np.array([-0.46 * length, y + 0.1 * height, 0])
    tip = root + tail * np.array([-math.cos(up), math.sin(up), 0])
    kind = CONE if rng.random() < 0.5 else CYLINDER
    toy.append(rod(kind, root, tip, rng.uniform(0.06, 0.16)))
    if rng.random() < 0.2:
        toy.append(part(ELLIPSOID, (0, y + height / 2, 0),
                        (0.35 * length, 0.6 * height, 0.6 * width)))
    return toy


def toy_human(rng, style):
    """Return a human: torso, head with or without a hat, two legs in stride, two bent arms, what is
    carried."""
    leg = rng.uniform(0.5, 0.8)
    hip = rng.uniform(0.08, 0.17)
    thick = rng.uniform(0.13, 0.24)
    torso = rng.uniform(0.45, 0.75)
    shoulders = rng.uniform(0.32, 0.6)
    deep = rng.uniform(0.2, 0.34)
    stride = rng.uniform(-0.35, 0.35)
    spread = rng.uniform(0, 0.18)
    toy = []
    for s in (1, -1):
        foot = np.array([stride * s, 0, s * (hip + spread)])
        toy += [rod(CYLINDER, (0, leg, s * hip), foot, thick),
                part(BOX, foot + [0.05, 0.03, 0], (0.24, 0.09, 0.9 * thick))]
    shape = rng.integers(0, 4)
    if shape == 0:
        toy.append(part(BOX, (0, leg + torso / 2, 0), (deep, torso, shoulders)))
    elif shape == 1:
        toy.append(part(ELLIPSOID, (0, leg + torso / 2, 0),
                        (1.3 * deep, 1.25 * torso, 1.1 * shoulders)))
    elif shape == 2:
        toy.append(rod(CYLINDER, (0, leg - 0.05, 0), (0, leg + torso, 0), shoulders, 1.1 * deep))
    else:
        toy.append(rod(CONE, (0, leg - 0.2, 0), (0, leg + 1.5 * torso, 0),
                       1.3 * shoulders, 1.8 * deep))
    head = rng.uniform(0.24, 0.38)
    y = leg + torso + 0.55 * head
    toy.append(part(ELLIPSOID, (0.02, y, 0), (head, 1.15 * head, 0.9 * head)))
    hat = rng.integers(0, 4)
    if hat == 0:
        toy += [rod(CYLINDER, (0, y + 0.3 * head, 0), (0, y + 0.7 * head, 0), 0.9 * head),
                rod(CYLINDER, (0, y + 0.3 * head, 0), (0, y + 0.36 * head, 0), 1.6 * head)]
    elif hat == 1:
        toy.append(rod(CONE, (0, y + 0.25 * head, 0), (0, y + 1.1 * head, 0), head))
    elif hat == 2:
        toy.append(part(ELLIPSOID, (-0.03, y + 0.15 * head, 0),
                        (1.15 * head, 1.15 * head, 1.1 * head)))
    thick = rng.uniform(0.1, 0.17)
    length = rng.uniform(0.22, 0.35)
    for s in (1, -1):
        out = math.radians(rng.choice([8, 15, 35, 80, 120]) + rng.uniform(-8, 8))
        ahead = math.radians(rng.uniform(-50, 80))
        bend = math.radians(rng.uniform(0, 80))
        upper = np.array([math.cos(out) * math.sin(ahead), -math.cos(out) * math.cos(ahead),
                          s * math.sin(out)])
        lower = upper * math.cos(bend) + np.array([1, 0.3, 0]) * math.sin(bend)
        shoulder = np.array([0, leg + 0.92 * torso, s * (shoulders / 2 + 0.2 * thick)])
        elbow = shoulder + length * upper
        hand = elbow + length * lower / math.hypot(*lower)
        toy += [rod(CYLINDER, shoulder, elbow, thick), rod(CYLINDER, elbow, hand, 0.9 * thick)]
    if style == 0:
        toy.append(rod(CYLINDER, hand - [0, 0.55, 0], hand + [0, 0.6, 0], 0.05))
    elif style == 1:
        toy.append(part(BOX, (-0.9 * deep, leg + 0.6 * torso, 0),
                        (0.2, 0.6 * torso, 0.7 * shoulders)))
    elif style == 2:
        toy.append(part(BOX, hand, (0.06, 0.5, 0.36)))
    return toy


def toy_plane(rng, style):
    """Return a plane: fuselage, one or two pairs of wings, tail, engines or a propeller, with or
    without wheels."""
    length = rng.uniform(1.3, 1.9)
    width = rng.uniform(0.16, 0.36)
    y = 0.4
    span = rng.uniform(1.2, 2.1)
    chord = rng.uniform(0.22, 0.5)
    sweep = rng.uniform(-5, 45)
    if rng.random() < 0.5:
        toy = [part(ELLIPSOID, (0, y, 0), (length, width, width))]
    else:
        toy = [rod(CYLINDER, (-0.42 * length, y, 0), (0.32 * length, y, 0), width),
               rod(CONE, (0.32 * length, y, 0), (0.55 * length, y, 0), width)]
    x = rng.uniform(-0.1, 0.25) * length
    high = rng.choice([-0.35, 0, 0.45]) * width
    dihedral = rng.uniform(-4, 10)
    thin = rng.uniform(0.05, 0.09)
    toy += wings(x, y + high, span, chord, sweep, dihedral, thin)
    if rng.random() < 0.25:
        gap = rng.uniform(0.3, 0.45)
        toy += wings(x + 0.05, y + high + gap, 0.95 * span, chord, sweep, dihedral, thin)
        strut = (x - 0.3 * span * math.tan(math.radians(sweep)), y + high + gap / 2, 0.3 * span)
        toy += pair(BOX, strut, (0.05, gap, 0.05))
    tail = -0.42 * length - 0.02
    fin = rng.uniform(0.3, 0.6)
    leaning = np.array([[0.13, -0.12, 0], [0, fin / 2, 0], [0, 0, 0.03]])
    toy.append((BOX, leaning, np.array([tail, y + fin / 2 + 0.03, 0])))
    above = 0.85 * fin if rng.random() < 0.3 else 0.05
    toy += wings(tail, y + above, span * rng.uniform(0.3, 0.5), 0.6 * chord, 0.7 * sweep, 0, 0.05)
    size = rng.uniform(0.1, 0.2)
    engines = ()                   # on each side: distance from the fuselage, scale
    if style == 0:
        engines = ((0.22, 1),)
    elif style == 1:
        engines = ((0.18, 0.8), (0.34, 0.8))
    for at, scale in engines:
        back = at * span * math.tan(math.radians(sweep))
        toy += pair(CYLINDER, (x - back, y + high - 0.1, at * span),
                    (scale * size, scale * size, 0.4), axis_rotation("y", 90))
    if style in (2, 3):
        nose = (length / 2, y, 0)
        toy += [part(BOX, nose, (0.04, 0.55, 0.09)), part(ELLIPSOID, nose, (0.12, 0.12, 0.12))]
    if rng.random() < 0.6:
        toy.append(part(ELLIPSOID, (0.18 * length, y + 0.4 * width, 0),
                        (length / 4, 0.6 * width, 0.6 * width)))
    if rng.random() < 0.4:
        toy += [*pair(CYLINDER, (0.05 * length, 0.1, 0.18), (0.16, 0.16, 0.07)),
                part(CYLINDER, (0.35 * length, 0.1, 0), (0.14, 0.14, 0.06))]
    return toy


def toy_truck(rng, style):
    """Return a truck: cab, chassis, four or six wheels; its load is a box, a tank, sand, logs or a
    crane."""
    length = rng.uniform(1.3, 1.9)
    width = rng.uniform(0.45, 0.7)
    wheel = rng.uniform(0.11, 0.22)
    bed = 1.5 * wheel
    cab = rng.uniform(0.3, 0.5)
    high = rng.uniform(0.5, 0.8)
    front = length / 2 - cab / 2
    toy = [part(BOX, (0, bed, 0), (length, 0.12, 0.8 * width)),
           part(BOX, (front, bed + high / 2, 0), (cab, high, width))]
    if rng.random() < 0.4:
        toy.append(part(BOX, (front + 0.75 * cab, bed + high / 4, 0),
                        (0.6 * cab, high / 2, 0.85 * width)))
    long = length - cab - rng.uniform(0.03, 0.2)
    tall = rng.uniform(0.45, 0.9)
    x = long / 2 - length / 2
    if style == 0:
        toy.append(part(BOX, (x, bed + tall / 2 + 0.05, 0),
                        (long, tall, width * rng.uniform(0.9, 1.1))))
    elif style == 1:
        toy.append(part(CYLINDER, (x, bed + 0.08 + 0.4 * tall, 0), (width, 0.8 * tall, long),
                        axis_rotation("y", 90)))
    elif style == 2:
        toy += [part(BOX, (x, bed + 0.1, 0), (long, 0.1, width)),
                *pair(BOX, (x, bed + 0.2, 0.48 * width), (long, 0.26, 0.05)),
                part(BOX, (0.02 - length / 2, bed + 0.2, 0), (0.05, 0.26, width)),
                part(ELLIPSOID, (x, bed + 0.2, 0), (0.8 * long, 0.7 * tall, 0.8 * width))]
    elif style == 3:
        for up, z in ((0.16, -0.12), (0.16, 0.12), (0.32, 0)):
            end = (front - cab / 2 - 0.03, bed + up, z)
            toy.append(rod(CYLINDER, (-length / 2, bed + up, z), end, 0.2))
    else:
        toy += [part(BOX, (x, bed + 0.12, 0), (long, 0.12, width)),
                part(BOX, (x - 0.3 * long, bed + 0.25, 0), (0.3, 0.3, 0.8 * width)),
                rod(CYLINDER, (x - 0.3 * long, bed + 0.15, 0),
                    (x + 0.55 * long, bed + 0.15 + 0.75 * long, 0), 0.12)]
    rear = 0.25 - length / 2
    axles = (length / 2 - cab / 2, rear, rear + 2.3 * wheel)
    n_axles = rng.integers(2, 4)
    wide = rng.uniform(0.1, 0.18)
    for axle in axles[:n_axles]:
        toy += pair(CYLINDER, (axle, wheel, 0.46 * width), (2 * wheel, 2 * wheel, wide))
    if rng.random() < 0.3:
        pipe = (front - cab / 2, bed + 0.75 * high, 0.45 * width)
        toy += pair(CYLINDER, pipe, (0.07, 0.07, 0.9 * high), axis_rotation("x", 90))
    return toy


def toy_car(rng, style):
    """Return a car: sedan, beetle, station wagon, convertible or race car, with or without a rear
    wing."""
    length = rng.uniform(1.2, 1.7)
    width = rng.uniform(0.55, 0.8)
    wheel = rng.uniform(0.11, 0.2)
    high = rng.uniform(0.16, 0.28)
    y = 0.9 * wheel + high / 2
    if rng.random() < 0.65:
        toy = [part(BOX, (0, y, 0), (length, high, width))]
    else:
        toy = [part(ELLIPSOID, (0, y, 0), (length, high, width)),
               part(BOX, (0, y - 0.15 * high, 0), (0.8 * length, high / 2, 0.9 * width))]
    long = length * rng.uniform(0.35, 0.65)
    tall = rng.uniform(0.14, 0.26)
    x = length * rng.uniform(-0.15, 0.05)
    top = y + high / 2
    if style == 0:
        toy.append(part(BOX, (x, top + tall / 2 - 0.02, 0), (long, tall, 0.85 * width)))
    elif style == 1:
        toy.append(part(ELLIPSOID, (x, top, 0), (1.3 * long, 2 * tall, 0.9 * width)))
    elif style == 2:
        toy.append(part(BOX, (-0.12 * length, top + tall / 2, 0),
                        (0.74 * length, tall, 0.9 * width)))
    elif style == 3:
        toy += [*pair(BOX, (x, top + 0.08, 0.22 * width), (0.1, 0.22, 0.3 * width)),
                part(BOX, (x + 0.25, top + 0.06, 0), (0.04, 0.18, 0.8 * width),
                     axis_rotation("z", 25))]
    else:
        toy += [part(ELLIPSOID, (x, top, 0), (0.7 * long, 1.5 * tall, 0.4 * width)),
                part(ELLIPSOID, (length / 4, y + 0.1 * high, 0),
                     (0.8 * length, 0.9 * high, width / 2))]
    racing = style == 4
    if rng.random() < 0.3 or racing:
        toy += [part(BOX, (-0.46 * length, top + 0.18, 0), (0.16, 0.04, 1.02 * width)),
                *pair(BOX, (-0.46 * length, top + 0.07, 0.35 * width), (0.08, 0.2, 0.05))]
    if rng.random() < 0.2:
        toy.append(part(BOX, (x, top + tall + 0.03, 0), (0.12, 0.1, 0.4 * width)))
    if rng.random() < 0.3:
        toy.append(part(BOX, (0.48 * length, y - 0.2 * high, 0), (0.12, 0.35 * high, 1.03 * width)))
    size = wheel * (2.4 if racing else 2)
    z = width * (0.58 if racing else 0.46)
    wide = rng.uniform(0.1, 0.2)
    for axle in (length * rng.uniform(0.28, 0.36), -length * rng.uniform(0.26, 0.36)):
        toy += pair(CYLINDER, (axle, wheel, z), (size, size, wide))
    return toy


TOY_MAKERS = (toy_animal, toy_human, toy_plane, toy_truck, toy_car)     # in NORB_NAMES' order


def corners(toy):
    """Return the corners, (8 n, 3), of the boxes around a toy's n parts."""
    signs = np.array(np.meshgrid(*[(-1.0, 1.0)] * 3)).reshape(3, 8)
    return np.concatenate([center + small_matmul(M, signs).T for _, M, center in toy])


def make_toy(category, instance, toy_seed):
    """Return one toy as a list of parts, scaled to the size of the image.

    category: index of the class; instance: 0 to 9. The toy is drawn at random from toy_seed, then
    rotated, scaled and translated at random within YAW, STRETCH and OFFSET, so that toys are not
    perfectly aligned."""
    rng = np.random.default_rng(np.random.SeedSequence(toy_seed, spawn_key=(category, instance)))
    toy = TOY_MAKERS[category](rng, TOY_STYLES[instance])
    transform = axis_rotation("y", rng.uniform(-YAW, YAW)) * rng.uniform(1 / STRETCH, STRETCH, 3)
    offset = rng.uniform(-OFFSET, OFFSET, 3)
    points = corners(toy)
    middle = (points.min(0) + points.max(0)) / 2
    size = np.sqrt(np.square(small_matmul(points - middle, transform.T)).sum(1).max())
    parts = []
    for kind, M, center in toy:
        M = small_matmul(transform, M) / size
        center = small_matmul(transform, (center - middle)[:, None])[:, 0] / size + offset
        parts.append((kind, M, center))
    return parts


def inverse_3x3(T):
    """Return the inverse of a matrix (3, 3), computed from its cofactors."""
    columns = np.cross(T[1], T[2]), np.cross(T[2], T[0]), np.cross(T[0], T[1])
    cofactors = np.stack(columns, 1)
    return cofactors / (T[0] * cofactors[:, 0]).sum()


FAR = np.float32(1e9)              # ray parameter beyond every part, in place of infinity
SLABS = {BOX: (0, 1, 2), ELLIPSOID: (), CYLINDER: (2,), CONE: (2,)}     # axes that planes bound


def intersect_part(kind, o, d):
    """Intersect parallel rays with a unit part and return where they enter it.

    A ray is o + t d, seen from a camera at t = +infinity, so that the visible intersection is the
    one with the largest t. A part is the common interior of a quadric, a t^2 + 2 b t + q <= 0 along
    the ray, and of slabs between two parallel planes. A ray is inside of each of them in an
    interval far <= t <= near; it hits the part where all intervals overlap.

    kind: ELLIPSOID, BOX, CYLINDER or CONE. o: origins of the rays in the part's coordinates, a list
    of three arrays that broadcast to the shape of the image; d: direction, (3,), the same for all
    rays; float32. Return three arrays: t of the entry point; face, the axis 0 to 2 of the plane
    through which the ray enters, or -1 for the curved face; and whether the ray hits the part."""
    near = FAR
    far = -FAR
    face = np.int8(-1)
    inside = True
    if kind != BOX:
        round_axes = range(3 if kind == ELLIPSOID else 2)
        a = sum(d[k] * d[k] for k in round_axes)
        b = sum(d[k] * o[k] for k in round_axes)
        q = sum(o[k] * o[k] for k in round_axes)
        if kind == CONE:
            radius = (1 - o[2]) / 2
            a = a - d[2] * d[2] / 4
            b = b + radius * d[2] / 2
            q = q - radius * radius
        else:
            q = q - 1
        if abs(a) <= 1e-6:
            a = np.float32(1e-6)
        root = b * b - a * q
        inside = root > 0
        root = np.sqrt(np.maximum(root, 0))
        near = (root - b) / a
        far = (-root - b) / a
        if a < 0:                  # steeper than the cone: keep the nappe below its apex
            if d[2] > 0:
                far = -FAR
            else:
                near = FAR
    for k in SLABS[kind]:
        along = d[k] if abs(d[k]) > 1e-6 else np.float32(1e-6)
        middle = -o[k] / along
        half = abs(1 / along)
        face = np.where(middle + half < near, np.int8(k), face)
        near = np.minimum(near, middle + half)
        far = np.maximum(far, middle - half)
    return near, face, inside & (near >= far)


def cast_rays(toy, azimuth, elevation, side):
    """Cast one ray per pixel under orthographic projection, to the nearest surface point of a toy.

    toy: list of parts; azimuth and elevation of the camera in degrees; side: of the image, px. Only
    the pixels in a part's bounding rectangle are tested.

    Return hit, (side, side) bool: whether a pixel shows the toy; and normals, (3, side, side)
    float32: the unit surface normal at that point in camera coordinates (x right, y up, z towards
    the camera), 0 where the ray hits nothing."""
    R = view_rotation(azimuth, elevation)
    pixels = (((np.arange(side) + 0.5) / side * 2 - 1) / REACH).astype(np.float32)
    depth = np.full((side, side), -FAR)
    normals = np.zeros((3, side, side), np.float32)
    for kind, M, center in toy:
        T = small_matmul(R, M)
        center = small_matmul(R, center[:, None])[:, 0]
        extent = np.abs(T).sum(1)
        left, right = np.searchsorted(pixels, center[0] + (-extent[0], extent[0]))
        top, bottom = np.searchsorted(pixels, -center[1] + (-extent[1], extent[1]))
        window = np.s_[top:bottom, left:right]
        x = pixels[left:right] - np.float32(center[0])
        y = -pixels[top:bottom, None] - np.float32(center[1])
        to_part = inverse_3x3(T).astype(np.float32)
        o = [row[0] * x + row[1] * y for row in to_part]
        d = to_part[:, 2]
        t, face, hits = intersect_part(kind, o, d)
        z = t + np.float32(center[2])
        rows, columns = np.nonzero(hits & (z > depth[window]))
        depth[window][rows, columns] = z[rows, columns]
        t = t[rows, columns]
        point = [o[k][rows, columns] + d[k] * t for k in range(3)]
        if kind != ELLIPSOID:
            faces = np.broadcast_to(face, z.shape)[rows, columns]
            # the gradient of the curved face, then of planes
            point[2] = (1 - point[2]) / 4 if kind == CONE else 0 * t
            for k in range(3):
                of_plane = np.where(faces == k, np.sign(d[k]), 0)
                point[k] = np.where(faces < 0, point[k], of_plane)
        normal = small_matmul(to_part.T, np.stack(point))
        length = np.sqrt(normal[0] * normal[0] + normal[1] * normal[1] + normal[2] * normal[2])
        normals[(slice(None), *window)][:, rows, columns] = normal / length
    return depth > -FAR, normals


def shade(hit, normals, elevation):
    """Return the six LIGHTINGS of one view, (6, side, side) uint8, by Lambertian shading.

    hit and normals: cast_rays' results; elevation of the cameras in degrees. A surface has the
    brightness of the ambient light plus, for every lamp, its strength times the cosine between the
    surface normal and the direction of the lamp; the background is light. A lamp's azimuth is
    relative to the cameras; its height is above the horizon, so that lamps do not follow the
    cameras' elevation."""
    images = np.empty((len(LIGHTINGS), *hit.shape), np.uint8)
    for image, (ground, ambient, lamps) in zip(images, LIGHTINGS):
        brightness = np.full(hit.shape, np.float32(ambient))
        for azimuth, height, strength in lamps:
            R = small_matmul(axis_rotation("y", azimuth), axis_rotation("x", -height))
            to_lamp = small_matmul(axis_rotation("x", elevation), R)[:, 2]
            lamp = (to_lamp * strength).astype(np.float32)
            cosine = lamp[0] * normals[0] + lamp[1] * normals[1] + lamp[2] * normals[2]
            brightness += np.maximum(cosine, 0)
        brightness = np.where(hit, brightness, np.float32(ground))
        image[:] = np.rint(255 * np.minimum(brightness, 1))
    return images


def draw_view(toy, elevation, azimuth, side):
    """Return the six lightings of one view from both cameras, (6, 2, side, side) uint8."""
    cameras = []
    for camera in (-STEREO / 2, STEREO / 2):
        hit, normals = cast_rays(toy, azimuth + camera, elevation, side)
        cameras.append(shade(hit, normals, elevation))
    return np.stack(cameras, 1)


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
    images, labels = data["train"]["images"], data["train"]["labels"]
    digest = hashlib.sha256(np.ascontiguousarray(images))
    digest.update(np.ascontiguousarray(labels))
    return digest.hexdigest()


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


# -------------------------------------------------------------- what is printed

def say(text, config, end="\n"):
    """Print a line. A closed pipe or terminal does not end a training"""
    if not config.quiet:
        with contextlib.suppress(OSError, ValueError):
            print(text, end=end, flush=True)


RUN_NAME = "{model}-{preset}-{data}-{split}-seed{seed}"        # of a new folder
SEVERAL_NAME = "several-{data}-{split}-seed{seed}"             # of one for several models
PROGRESS = ("epoch {epoch}/{n_epochs}  train loss {train_loss:.3f}  "
            "train accuracy {train_accuracy:.3f}  "
            "test accuracy: familiar {familiar:.3f}, novel {novel:.3f}  {seconds:.0f} s")


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
    "familiar": ("accuracy, familiar viewpoints", ".4f"),
    "novel": ("accuracy, novel viewpoints", ".4f"),
    "drop": ("drop", ".4f")}


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
        settings = settings | {"n_epochs": theirs.n_epochs}    # more epochs: compare the rest
    check_same(folder, theirs, settings, ("runtime",))
    # What a file of an earlier version, or of train alone, lacks is taken as equal
    if "init" in history and history["init"] != digest_of(init):
        raise InputError(f"{folder}: started from other weights. "
                         "Give the same --init, or another --outdir")
    of_data = {"source": data["source"], "data": digest_of_data(data)}
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
    """Raise InputError unless the network of a file has the layers of a Config"""
    if not fits(state["params"], config):
        raise InputError(f"{path}: has other layers or classes. Give its settings and data "
                         f"({data_name(state['history']['source'])})")


def finished_result(folder, config):
    """Return the result of the run in a folder if it is finished, else None. Of the settings of its
    test none may differ here: see check_same_run"""
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
    file.save(config, state)                           # before the test, which may fail
    with worker_threads(config) as workers:
        metrics = evaluate_test(weights_of(state), data, config, workers)
    result = result_of(config, state, data, metrics)
    write_file(folder / "metrics.json", as_json(result))
    return result


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
    """Return the metrics of evaluate_test as metrics.json names them: the same, but hit_bits, {test
    set: packed_bits}, in place of `correct`"""
    metrics = {name: value for name, value in test.items() if name != "correct"}
    metrics["hit_bits"] = {name: packed_bits(correct) for name, correct in test["correct"].items()}
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


def what_is_saved(folders, outdir, given_outdir):
    """Return what a stopped run has saved, and the command that resumes it. folders: {Config: its
    folder}"""
    saved = []
    for config, folder in folders.items():
        if (folder / "weights.npz").exists():
            _, state = load(folder)
            n_saved = len(state["history"]["epochs"])
            saved.append(f"epoch {n_saved}/{config.n_epochs} of {config.model}")
    if not saved:
        return "stopped before the first epoch ended; nothing is saved"
    words = sys.argv[1:]
    if given_outdir is None:
        words = [*words, "--outdir", outdir]
    return f"stopped; {outdir} has {', '.join(saved)}. To resume: {command_line(*words)}"


def train_and_test(args):
    """Train each model in a folder of its own, or go on there, and test it. Return {model:
    result}"""
    configs = configs_of(given_settings(args))
    first = configs[0]
    if len(configs) > 1 and args.init is not None:
        raise InputError("--init is for one network. Give one --model")
    name = RUN_NAME if len(configs) == 1 else SEVERAL_NAME
    with run_folder(args.outdir, name.format(**vars(first))) as outdir:
        say(f"folder: {outdir}", first)
        folders = {first: outdir}
        if len(configs) > 1:
            check_several(outdir, [config.model for config in configs])
            folders = {config: outdir / config.model for config in configs}
        results = {}
        try:
            data = load_data(first)
            for config, folder in folders.items():
                with run_folder(folder, None):
                    results[config.model] = train_in(folder, config, data, args.init)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(what_is_saved(folders, outdir, args.outdir)) from None
        finally:                                       # of models before one that failed, too
            if results:
                print_table(results, first)
        say(f"saved: {outdir} (weights.npz and metrics.json of each network)", first)
        say(f"test {first.model} again: {test_command(folders[first], first)}", first)
    return results


def test_command(folder, config):
    """Return the command line that tests the network in a folder"""
    words = ["--load", folder]
    if config.norb_dir:
        words += ["--norb-dir", config.norb_dir]
    return command_line(*words)


def check_several(folder, models):
    """Raise InputError if a folder for runs of several models holds a run of its own, or files and
    no such run"""
    if (folder / "weights.npz").exists():
        raise InputError(f"{folder}: holds other files (weights.npz). Name a new --outdir")
    others = [path.name for path in folder.iterdir() if path.name not in models]
    is_of_runs = any((folder / model / "weights.npz").exists() for model in models)
    if others and not is_of_runs:
        raise InputError(f"{folder}: holds other files ({others[0]}). Name a new --outdir")


def train_in(folder, config, data, init):
    """Train a network in a folder, or go on there, and test it. Return the result"""
    config = fit_to_data(config, data)
    state = begin(folder, config, data, init)
    result = finished_result(folder, config)
    if result is not None:
        say(f"{config.model} is finished", config)
        return result
    started = f"training {config.model}"
    if state["step"] > 0:
        started = f"{config.model}, resuming at step {state['step']}"
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
    """Test the network of --load; with --outdir, save it and its result there. Return {model:
    result}"""
    if args.init is not None:
        raise InputError("--init is for a training, and --load only tests. Leave one out")
    trained, state = load(args.load)
    config = tested_config(args, trained)
    data = load_data(config, without=("train",))
    config = fit_to_data(config, data)
    check_classes(args.load, state, config, data)
    if args.outdir is None:
        return {config.model: test_again(args.load, trained, config, data, state)}
    with run_folder(args.outdir, None) as folder:
        if is_begun(folder):
            raise InputError(f"{folder}: holds a run. Name a new --outdir")
        result = test_again(args.load, trained, config, data, state)
        save(folder / "weights.npz", trained, state)
        write_file(folder / "metrics.json", as_json(result))
        say(f"saved: {folder} (weights.npz, metrics.json)", config)
    return {config.model: result}


def test_again(path, trained, config, data, state):
    """Test the network of a file, whose training had the settings `trained`, with others. Print the
    table and return the result"""
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
    """Do what the command line asks for. Return the result or, of several models, {model:
    result}"""
    if args.load is None:
        results = train_and_test(args)
    else:
        results = test_saved(args)
    if len(results) == 1:
        return next(iter(results.values()))
    return results


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
        if message.endswith("azimuths: expected one argument"):
            message += ". Join a range that begins with a minus by =, as in --train-azimuths=-40:40"
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
                             "pretrained matrix-capsnet); --outdir saves the result")
    parser.add_argument("--init", metavar="PLACE",
                        help="start from the weights of a file or of another run")
    parser.add_argument("--out-json", metavar="FILE",
                        help="copy metrics.json here, of several models a dict of them; "
                             "-: to standard output")
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
        if f.name == "model":          # a list: several are trained; --help shows the choices once
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
    """Return the defaults of a setting in words: that of matrix-capsnet, then those of other
    models"""
    models_of = {}                                     # {default: the models that have it}
    for model, defaults in MODELS.items():
        models_of.setdefault(defaults[name], []).append(model)
    usual, *others = models_of
    words = [str(usual)]
    for default in others:
        words.append(f"{', '.join(models_of[default])} {default}")
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
