#!/usr/bin/env python3
"""What nearest neighbors name of the third experiment's digits: the strongest of the cheap baselines.

    python3 tests/bench_affnist_nearest.py [--n-known N] [--n-per-class N] --digits mnist

Known are MNIST's first 55,000 training images, or so many of each class, those that the networks of that seed are
trained on, each moved at random once, as the networks see them. A digit is named after the one whose pixels are
nearest, in Euclidean distance, both moved by whole pixels so that the center of their ink lies in the middle. So it is
told that place does not matter, which the networks have to learn; nothing of turning, shearing and stretching.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import affnist_capsnet as affnist  # before numpy: it sets BLAS to one thread

import numpy as np
from bench_multimnist_nearest import in_the_middle, nearest


def accuracies(known, labels, digits, config):
    """-> {test: accuracy, its Wilson interval under test_ci95}"""
    known, found = in_the_middle(known).astype(np.float32) / 255, {}
    for key, kind, _ in affnist.TEST_SETS["affnist"][:4]:
        right = np.concatenate([nearest(known, labels, in_the_middle(part["images"])) == part["labels"]
                                for part in affnist.stream_digits(digits, config, kind)])
        found |= {key: right.mean().item(), f"{key}_ci95": affnist.wilson_interval(right.sum().item(), len(right))}
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
                            digits=args.digits, mnist_dir=args.mnist_dir, model="cnn-gap", batch_size=1,
                            out_json=args.out_json)
    affnist.check_config(config)
    digits = affnist.load_digits(config)
    parts = list(affnist.epoch_samples(digits, 0, config))
    known, labels = (np.concatenate([part[name] for part in parts]) for name in ("images", "labels"))
    found = accuracies(known, labels, digits, config)
    print(f"nearest of {len(known):,}: " + ", ".join(f"{key} {found[key]:.4f}" for key in list(found)[::2]))
    if args.out_json:
        untrained = {"source": digits["source"], "epochs": [], "seconds": 0.0, "steps": 0}
        affnist.write_json(args.out_json, affnist.make_result(
            config, {}, untrained, {"nearest": found, "bench": {"n_known": len(known)}}))


if __name__ == "__main__":
    affnist.run_cli(main)
