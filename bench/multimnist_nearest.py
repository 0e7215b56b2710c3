#!/usr/bin/env python3
"""Measure how accurately the nearest training pair classifies MultiMNIST pairs: a baseline that knows as many pairs as
the default network sees in training.

    python3 bench/multimnist_nearest.py --digits mnist

A test pair gets the labels of the training pair at the smallest Euclidean distance between pixels, after both are
translated by whole pixels so that the center of mass of their ink is at the center of the canvas.
"""
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import multimnist_capsnet as capsnet  # before numpy: it sets BLAS to one thread
from lab.files import check_writable, machine, write_json
from lab.messages import InputError, Parser, run_cli
from lab.statistics import wilson_interval

import numpy as np


def in_the_middle(images):
    """Translate each image by whole px so that the center of mass of its ink is nearest to the center of the canvas.

    images: (n, side, side) uint8. Return (n, side, side) uint8; ink that leaves the canvas is cut off.
    """
    n, side, _ = images.shape
    position, ink = np.arange(side), images.astype(float)
    centers = np.stack([ink.sum(2) @ position, ink.sum(1) @ position], 1) / np.maximum(ink.sum((1, 2)), 1)[:, None]
    padded, translated = np.pad(images, ((0, 0), (side, side), (side, side))), np.empty_like(images)
    for k, (top, left) in enumerate(side - np.rint((side - 1) / 2 - centers).astype(int)):
        translated[k] = padded[k, top:top + side, left:left + side]
    return translated


def nearest(known, labels, images):
    """Return the labels, (n, ...), of the known image nearest to each image; of equally near images the first.

    known: (m, side, side) float32 in [0, 1]. labels: (m, ...). images: (n, side, side) uint8.
    """
    rows = known.reshape(len(known), -1)
    squares = np.einsum("np,np->n", rows, rows)
    predicted = []
    for start in range(0, len(images), 500):
        x = images[start:start + 500].reshape(-1, rows.shape[1]).astype(np.float32) / 255
        predicted.append(labels[(squares - 2 * (x @ rows.T)).argmin(1)])                # |x|^2 is the same for all
    return np.concatenate(predicted)


def accuracy(known, labels, pairs):
    """Return the exact-match accuracy on a stream of pairs, and its 95% Wilson interval.

    known: (m, side, side) uint8. labels: (m, 2). pairs: dicts of composites and labels, from stream_pairs.
    """
    known, hits, n = in_the_middle(known).astype(np.float32) / 255, 0, 0
    for chunk in pairs:
        predicted = nearest(known, labels, in_the_middle(chunk["composites"]))
        hits, n = hits + int(capsnet.exact_match(predicted, chunk["labels"]).sum()), n + len(predicted)
    return hits / n, wilson_interval(hits, n)


def add_data_flags(parser):
    """Add the flags that say which digits are measured, and where the result is written"""
    parser.add_argument("--digits", choices=("auto", "mnist", "synthetic"), default="auto", help="as the experiment's")
    parser.add_argument("--mnist-dir", "--data-dir", dest="data_dir", default="", metavar="DIR",
                        help="as the experiment's")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")


def untrained_result(module, config, source, metrics):
    """Return what --out-json holds: as result_of of an experiment, without a network. metrics: what was measured"""
    settings = {f.name: getattr(config, f.name) for f in module.SETTINGS
                if f.type is not str or "choices" in f.metadata}
    return {"experiment": module.EXPERIMENT, "config": settings, "source": source, "n_params": 0, **metrics,
            "seconds_train": 0.0, "ms_per_step": 0.0, "machine": machine(), "history": {},
            "versions": {"python": platform.python_version(), "numpy": np.__version__}}


def read_command_line(parser):
    """Read the command line of a baseline that knows some training pairs. Return its values, the
    Config and load_data's dict."""
    parser.add_argument("--n-known", type=int, default=72000, metavar="N", help="known pairs (default: 72000)")
    parser.add_argument("--n-test", type=int, default=10000, metavar="N", help="test pairs (default: 10000)")
    add_data_flags(parser)
    args = parser.parse_args()
    if not 1 <= args.n_known <= 10 ** 7:
        raise InputError(f"--n-known {args.n_known}: must be between 1 and 10,000,000")
    config = capsnet.Config(n_test=args.n_test, digits=args.digits, data_dir=args.data_dir)
    check_writable(args.out_json)
    data = capsnet.load_data(config)
    return args, config, data


def main():
    parser = Parser(__doc__)
    args, config, data = read_command_line(parser)
    parts = list(capsnet.stream_pairs(data, "train", args.n_known, config, capsnet.BATCHES, 0))
    known, labels = (np.concatenate([part[name] for part in parts]) for name in ("composites", "labels"))
    pairs = capsnet.stream_pairs(data, "test", config.n_test, config, capsnet.EVALUATION, 1)
    exact, (low, high) = accuracy(known, labels, pairs)
    print(f"nearest of {args.n_known:,} known pairs: exact-match accuracy {exact:.4f}, 95% CI {low:.4f} to {high:.4f}")
    if args.out_json:
        write_json(args.out_json, untrained_result(capsnet, config, data["source"], {
            "bench": {"n_known": args.n_known, "n_test": args.n_test}, "nearest": exact, "nearest_ci95": (low, high)}))


if __name__ == "__main__":
    run_cli(main)
