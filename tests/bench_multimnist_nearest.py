#!/usr/bin/env python3
"""What nearest neighbors name of the first experiment's pairs: a baseline that knows as many as the default network.

    python3 tests/bench_multimnist_nearest.py --digits mnist

A test pair is named after that training pair whose pixels are nearest, in Euclidean distance, both moved by whole
pixels so that the center of their ink lies in the middle.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import multimnist_capsnet as capsnet  # before numpy: it sets BLAS to one thread

import numpy as np


def in_the_middle(images):
    """images (n, side, side) uint8, each moved by whole pixels so that the center of its ink lies in the middle, or as
    near as whole pixels allow; what would leave the canvas is lost"""
    n, side, _ = images.shape
    place, ink = np.arange(side), images.astype(float)
    centers = np.stack([ink.sum(2) @ place, ink.sum(1) @ place], 1) / np.maximum(ink.sum((1, 2)), 1)[:, None]
    padded, moved = np.pad(images, ((0, 0), (side, side), (side, side))), np.empty_like(images)
    for k, (top, left) in enumerate(side - np.rint((side - 1) / 2 - centers).astype(int)):
        moved[k] = padded[k, top:top + side, left:left + side]
    return moved


def nearest(known, labels, images):
    """labels of the known image, (m, side, side) in [0, 1], nearest to each of images, (n, side, side) uint8; the
    first, of equally near"""
    rows = known.reshape(len(known), -1)
    squares = np.einsum("np,np->n", rows, rows)
    named = []
    for start in range(0, len(images), 500):
        x = images[start:start + 500].reshape(-1, rows.shape[1]).astype(np.float32) / 255
        named.append(labels[(squares - 2 * (x @ rows.T)).argmin(1)])
    return np.concatenate(named)


def accuracy(known, labels, pairs):
    """-> share of dicts of pairs of which both digits are named right, its Wilson interval"""
    known, both, n = in_the_middle(known).astype(np.float32) / 255, 0, 0
    for part in pairs:
        named = nearest(known, labels, in_the_middle(part["composites"]))
        both, n = both + int(capsnet.exact_match(named, part["labels"]).sum()), n + len(named)
    return both / n, capsnet.wilson_interval(both, n)


def main():
    parser = capsnet.Parser(__doc__)
    parser.add_argument("--n-known", type=int, default=72000, metavar="N", help="known pairs (default 72000)")
    parser.add_argument("--n-test", type=int, default=10000, metavar="N", help="test pairs (default 10000)")
    parser.add_argument("--digits", choices=("auto", "mnist", "synthetic"), default="auto", help="as the experiment's")
    parser.add_argument("--mnist-dir", default="", metavar="DIR", help="as the experiment's")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")
    args = parser.parse_args()
    if args.n_known < 1:
        raise capsnet.InputError(f"--n-known {args.n_known}: must be at least 1")
    config = capsnet.Config(**{name: value for name, value in vars(args).items() if name != "n_known"})
    capsnet.check_options(config)
    digits = capsnet.load_digits(config)
    known = capsnet.draw_pairs(digits, "train", args.n_known, config, "batches", 0)
    pairs = capsnet.stream_pairs(digits, "test", config.n_test, config, "evaluation", 1)
    both, (low, high) = accuracy(known["composites"], known["labels"], pairs)
    print(f"nearest of {args.n_known:,} pairs: set accuracy {both:.4f}, 95% interval [{low:.4f}, {high:.4f}]")
    found = {"bench": {"n_known": args.n_known, "n_test": args.n_test}, "nearest": both, "nearest_ci95": (low, high)}
    if args.out_json:
        untrained = {"source": digits["source"], "epochs": [], "seconds": 0.0, "steps": 0}
        capsnet.write_json(args.out_json, capsnet.make_result(config, {}, untrained, found))


if __name__ == "__main__":
    capsnet.run_cli(main)
