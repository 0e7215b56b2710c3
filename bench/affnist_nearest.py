#!/usr/bin/env python3
"""Measure how accurately the nearest training image classifies affNIST digits: the strongest cheap baseline.

    python3 bench/affnist_nearest.py [--n-known N] [--n-per-class N] --digits mnist

The known digits are MNIST's 55,000 training images or, with --n-per-class, the images of each class on which the
networks of the same seed are trained. Each of them is translated once at random, as in training. A test digit gets the
label of the known digit at the smallest Euclidean distance between pixels, after both are translated by whole pixels
so that the center of mass of their ink is at the center of the canvas. This builds invariance to translation into the
baseline, which the networks have to learn; rotation, shear and scale are not corrected.
"""
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import affnist_capsnet as affnist  # before numpy: it sets BLAS to one thread
from lab.files import check_writable, write_json
from lab.messages import InputError, Parser, run_cli
from lab.statistics import wilson_interval

import numpy as np
from multimnist_nearest import add_data_flags, in_the_middle, nearest, untrained_result


def accuracies(known, labels, data, config):
    """Return the accuracy on each test set, {key: accuracy}, and its 95% Wilson interval, {key_ci95: (low, high)}.

    known: (m, side, side) uint8. labels: (m,). data: from load_data.
    """
    known, metrics = in_the_middle(known).astype(np.float32) / 255, {}
    for key, kind, *_ in affnist.TEST_SETS["affnist"][:4]:                              # but affNIST's own files
        hits = np.concatenate([nearest(known, labels, in_the_middle(chunk["images"])) == chunk["labels"]
                               for chunk in affnist.stream_digits(data, config, kind)])
        metrics |= {key: hits.mean().item(), f"{key}_ci95": wilson_interval(hits.sum().item(), len(hits))}
    return metrics


def main():
    parser = Parser(__doc__)
    for flag, default, text in (
            ("--n-known", 55000, "known digits"), ("--n-test", 10000, "test digits"), ("--seed", 0, "random seed"),
            ("--n-per-class", 0, "known digits per class; 0: --n-known digits of any class")):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    add_data_flags(parser)
    args = parser.parse_args()
    if not 1 <= args.n_known <= 10 ** 7:
        raise InputError(f"--n-known {args.n_known}: must be between 1 and 10,000,000")
    config = affnist.Config(seed=args.seed, n_test=args.n_test, n_train=args.n_known, n_per_class=args.n_per_class,
                            digits=args.digits, data_dir=args.data_dir, model="cnn-gap", batch_size=1)
    check_writable(args.out_json)
    data = affnist.load_data(config)
    config = affnist.fit_to_data(config, data)
    if config.n_per_class:
        config = dataclasses.replace(config, n_train=config.n_classes * config.n_per_class)
    parts = list(affnist.epoch_samples(data, 0, config))
    known, labels = (np.concatenate([part[name] for part in parts]) for name in ("images", "labels"))
    metrics = accuracies(known, labels, data, config)
    scores = ", ".join(f"{key} {metrics[key]:.4f}" for key in list(metrics)[::2])
    print(f"accuracy of the nearest of {len(known):,} known digits: {scores}")
    if args.out_json:
        write_json(args.out_json, untrained_result(affnist, config, data["source"], {
            "nearest": metrics, "bench": {"n_known": len(known)}}))


if __name__ == "__main__":
    run_cli(main)
