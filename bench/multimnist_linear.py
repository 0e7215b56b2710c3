#!/usr/bin/env python3
"""Measure how well a linear map reconstructs each of two overlapping digits: a baseline without a network.

    python3 bench/multimnist_linear.py --digits mnist

For each class, linear least squares from the pixels of the composite, and a constant, to the pixels of the digit of
that class, on as many training pairs as the default network sees. Each digit of a test pair is reconstructed by the map
of its true class, as networks reconstruct it from the capsule of its true class; outputs are clipped to [0, 1].
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import multimnist_capsnet as capsnet  # before numpy: it sets BLAS to one thread
from lab.files import write_json
from lab.messages import Parser, run_cli

import numpy as np
from multimnist_nearest import read_command_line, untrained_result

RIDGE = 1e-6                       # of the mean square of an input: border pixels are never inked


def inputs_of(composites):
    """Return the pixels of images (n, side, side) uint8 in [0, 1], and a constant: (n, side^2 + 1)."""
    pixels = composites.reshape(len(composites), -1) / 255
    return np.concatenate([pixels, np.ones((len(pixels), 1))], axis=1)


def fit(pairs, n_classes):
    """Return the least-squares maps, (n_classes, side^2 + 1, side^2). A class without a digit gets
    a map to an empty image.

    pairs: dicts of composites (n, side, side), sources (n, 2, side, side) and labels (n, 2), from
    stream_pairs."""
    moments = products = None
    for chunk in pairs:
        x = inputs_of(chunk["composites"])
        digits = chunk["sources"].reshape(len(x), 2, -1) / 255
        if moments is None:
            moments = np.zeros((n_classes, x.shape[1], x.shape[1]))
            products = np.zeros((n_classes, x.shape[1], digits.shape[2]))
        for label in range(n_classes):
            for k in range(2):
                rows = chunk["labels"][:, k] == label
                moments[label] += x[rows].T @ x[rows]
                products[label] += x[rows].T @ digits[rows, k]
    maps = np.zeros_like(products)
    for label in range(n_classes):
        ridge = RIDGE * np.trace(moments[label]) / len(moments[label])
        if ridge > 0:
            regular = moments[label] + ridge * np.eye(len(moments[label]))
            maps[label] = np.linalg.solve(regular, products[label])
    return maps


def errors(maps, pairs):
    """Return the mean squared error per pixel of the maps' reconstructions, and that of the best
    constant image."""
    square = n = 0
    total, total_square = 0, 0
    for chunk in pairs:
        x = inputs_of(chunk["composites"])
        digits = chunk["sources"].reshape(len(x), 2, -1) / 255
        for label in range(len(maps)):
            for k in range(2):
                rows = chunk["labels"][:, k] == label
                found = np.clip(x[rows] @ maps[label], 0, 1)
                square += np.square(found - digits[rows, k]).sum()
        n += 2 * len(x)
        total = total + digits.sum((0, 1))
        total_square += np.square(digits).sum()
    n_pixels = maps.shape[2]
    constant = (total_square - np.square(total).sum() / n) / (n * n_pixels)
    return float(square / (n * n_pixels)), float(constant)


def main():
    parser = Parser(__doc__)
    args, config, data = read_command_line(parser)
    known = capsnet.stream_pairs(data, "train", args.n_known, config, capsnet.BATCHES, 0)
    maps = fit(known, data.get("n_classes", 10))
    pairs = capsnet.stream_pairs(data, "test", config.n_test, config, capsnet.EVALUATION, 1)
    error, constant = errors(maps, pairs)
    print(f"linear maps of {args.n_known:,} pairs: reconstruction MSE {error:.4f} per pixel; best constant image "
          f"{constant:.4f}")
    if args.out_json:
        write_json(args.out_json, untrained_result(capsnet, config, data["source"], {
            "bench": {"n_known": args.n_known, "n_test": args.n_test}, "test_recon_mse": error,
            "baseline_recon_mse": constant}))


if __name__ == "__main__":
    run_cli(main)
