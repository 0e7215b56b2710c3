#!/usr/bin/env python3
"""What nearest neighbours name of the third experiment's digits: the strongest of the cheap baselines.

    python3 tests/bench_affnist_nearest.py [--n-known N] [--n-per-class N] --digits mnist

Known are MNIST's first 55,000 training images, or so many of each class, those that the networks of that seed are
trained on, each moved at random once, as the networks see them. A digit is named after the one whose pixels are
nearest, in Euclidean distance: as the two are placed, or with both moved, by whole pixels, so that the centre of their
ink lies in the middle. The latter is told that place does not matter, which the networks have to learn; neither is told
anything of turning, shearing and stretching.
"""
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import affnist_capsnet as affnist  # before numpy: it sets BLAS to one thread

import numpy as np
from bench_multimnist_nearest import in_the_middle, nearest

KINDS = {key: kind for key, kind, _ in affnist.TESTS["affnist"] if kind != "real"}


def accuracies(known, labels, digits, config, prepared):
    """-> {test: accuracy, its Wilson interval under test_ci95, that of each class under test_per_class},
    prepared(images) being what is compared"""
    known, found = prepared(known).astype(np.float32) / 255, {}
    for key, kind in KINDS.items():
        right, of = [], []
        for part in affnist.stream_digits(digits, config, kind):
            right.append(nearest(known, labels, prepared(part["images"])) == part["labels"])
            of.append(part["labels"])
        right, of = np.concatenate(right), np.concatenate(of)
        found |= {key: right.mean().item(), f"{key}_ci95": affnist.wilson_interval(right.sum().item(), len(of)),
                  f"{key}_per_class": [right[of == digit].mean().item() if (of == digit).any() else math.nan
                                       for digit in range(affnist.N_CLASSES)]}
    return found


def main():
    parser = affnist.Parser(__doc__)
    for flag, default, text in (
            ("--n-known", 55000, "known digits"), ("--n-test", 10000, "test digits"), ("--seed", 0, "of the digits"),
            ("--n-per-class", 0, "known digits of each class, in place of --n-known")):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default {default})")
    parser.add_argument("--digits", choices=("auto", "mnist", "synthetic"), default="auto", help="as the experiment's")
    parser.add_argument("--mnist-dir", default="", metavar="DIR", help="as the experiment's")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")
    args = parser.parse_args()
    n_known = affnist.N_CLASSES * max(0, args.n_per_class) or args.n_known
    config = affnist.Config(seed=args.seed, n_test=args.n_test, n_train=n_known, n_per_class=args.n_per_class,
                            digits=args.digits, mnist_dir=args.mnist_dir, model="gap", batch_size=1,
                            out_json=args.out_json)
    affnist.check_config(config)
    digits = affnist.load_digits(config)
    parts = list(affnist.epoch_samples(digits, 0, config))
    known, labels = (np.concatenate([part[name] for part in parts]) for name in ("images", "labels"))
    found = {"as placed": accuracies(known, labels, digits, config, np.asarray),
             "ink in the middle": accuracies(known, labels, digits, config, in_the_middle)}
    print("| nearest of {:,} | {} |\n|{}".format(len(known), " | ".join(KINDS), "---|" * (1 + len(KINDS))))
    for name, tests in found.items():
        print(f"| {name} | " + " | ".join(f"{tests[key]:.4f}" for key in KINDS) + " |")
    if args.out_json:
        untrained = {"source": digits["source"], "epochs": [], "seconds": 0.0, "steps": 0}
        affnist.write_json(args.out_json, affnist.result_of(
            config, {}, untrained, {"nearest": found, "bench": {"n_known": len(known)}}))


if __name__ == "__main__":
    affnist.run_cli(main)
