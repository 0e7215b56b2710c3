#!/usr/bin/env python3
"""What nearest neighbours name of the first experiment's pairs: a baseline that knows as many as the default network.

    python3 tests/bench_multimnist_nearest.py [--n-known N] [--n-test N] [--digits mnist] [--mnist-dir DIR]
    [--out-json FILE]

A test pair is named after that training pair whose pixels are nearest, in Euclidean distance: as the two are placed, or
with both moved, by whole pixels, so that the centre of their ink lies in the middle.

--out-json writes a result for results/; its stamp is of 40 training steps of the default network on these digits.
"""
import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import multimnist_capsnet as capsnet  # noqa: E402  (before numpy: it sets BLAS to one thread)

import bench_affnist_nearest  # noqa: E402
import numpy as np  # noqa: E402
from bench_affnist_nearest import arguments, in_the_middle, nearest  # noqa: E402
from bench_multimnist_step import config_to_stamp, trained_elsewhere  # noqa: E402

SOURCES = Path(__file__), Path(bench_affnist_nearest.__file__)              # what a result's pixels were compared by

def accuracies(known, labels, pairs, prepared):
    """-> set accuracy over dicts of pairs, its Wilson interval, and how often at least one digit is right,
    prepared(composites) being what is compared"""
    known, both, one, n = prepared(known).astype(np.float32) / 255, 0, 0, 0
    for part in pairs:
        named = nearest(known, labels, prepared(part["composites"]))
        right = (named[:, :, None] == part["labels"][:, None]).any(1).sum(1)            # of two different digits each
        both, one, n = both + int((right == 2).sum()), one + int((right >= 1).sum()), n + len(named)
    return both / n, capsnet.wilson_interval(both, n), one / n


def main():
    args = arguments(capsnet, __doc__, 72000, "pairs")
    config = capsnet.Config(seed=args.seed, n_test=args.n_test, digits=args.digits, mnist_dir=args.mnist_dir)
    digits = capsnet.load_digits(config)
    known = capsnet.draw_pairs(digits, "train", args.n_known, config, "batches", 0)
    found = {}
    for key, name, prepared in (("placed", "as placed", np.asarray), ("centred", "ink in the middle", in_the_middle)):
        pairs = capsnet.stream_pairs(digits, "test", config.n_test, config, "evaluation", 1)
        both, (low, high), one = accuracies(known["composites"], known["labels"], pairs, prepared)
        found |= {f"nearest_{key}": both, f"nearest_{key}_ci95": (low, high), f"nearest_{key}_one": one}
        print(f"nearest of {args.n_known:,} pairs, {name}: set accuracy {both:.4f}, 95% interval [{low:.4f}, "
              f"{high:.4f}], at least one {one:.4f}", flush=True)
    if args.out_json:
        capsnet.write_json(args.out_json, trained_elsewhere(config_to_stamp(seed=args.seed)) | {
            **found, "bench": {
                "n_known": args.n_known, "n_test": args.n_test, "source": digits["source"],
                "sha256": hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()}})


if __name__ == "__main__":
    capsnet.run_cli(main)
