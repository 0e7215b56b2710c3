#!/usr/bin/env python3
"""What nearest neighbours name of the third experiment's digits: the strongest of the cheap baselines.

    python3 tests/bench_affnist_nearest.py [--n-known N] [--n-per-class N] [--n-test N] [--digits mnist]
    [--mnist-dir DIR] [--seed N] [--out-json FILE]

Known are MNIST's first 55,000 training images, or so many of each class, those that the networks of that seed are
trained on, each moved at random once, as the networks see them. A digit is named
after the one whose pixels are nearest, in Euclidean distance: as the two are placed, or with both moved, by whole
pixels, so that the centre of their ink lies in the middle. The latter is told that place does not matter, which the
networks have to learn; neither is told anything of turning, shearing and stretching.

"""
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import affnist_capsnet as affnist  # noqa: E402  (before numpy: it sets BLAS to one thread)

import numpy as np  # noqa: E402
from bench_step import header, require  # noqa: E402

KINDS = {key: kind for key, kind, _ in affnist.TESTS["affnist"] if kind != "real"}


def in_the_middle(images):
    """images (n, side, side) uint8, each moved by whole pixels so that the centre of its ink lies in the middle, or as
    near as whole pixels allow; what would leave the canvas is lost"""
    by = np.rint((images.shape[1] - 1) / 2 - affnist.ink_centres(images)).astype(int)
    return np.stack([affnist.shifted(image, *each) for image, each in zip(images, by)])


def nearest(known, labels, images):
    """labels of the known image nearest to each of images, (n, side, side) uint8 -> (n,); the first, of equally near"""
    rows = known.reshape(len(known), -1)
    squares = np.einsum("np,np->n", rows, rows)
    named = []
    for start in range(0, len(images), 500):
        x = images[start:start + 500].reshape(-1, rows.shape[1]).astype(np.float32) / 255
        named.append(labels[(squares - 2 * (x @ rows.T)).argmin(1)])
    return np.concatenate(named)


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


def arguments(module, text, n_known, what, **more):
    """The command line of a nearest neighbour beside the experiment `module`, among n_known digits or what there is;
    more: the help texts of further flags, numbers that are 0 unless given"""
    parser = module.Parser(text)
    parser.add_argument("--n-known", type=int, default=n_known, metavar="N", help=f"{what} that are known (default "
                        f"{n_known})")
    parser.add_argument("--n-test", type=int, default=10000, metavar="N", help=f"test {what} (default 10000)")
    parser.add_argument("--digits", choices=("auto", "mnist", "synthetic"), default="auto", help="as the experiment's")
    parser.add_argument("--mnist-dir", default="", metavar="DIR", help="folder with the four MNIST idx files (else "
                        "$MNIST_DIR, else ~/.cache/hinton-mnist, else download)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=f"seed of the {what} (default 0)")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")
    for name, words in more.items():
        parser.add_argument(module.flag_of(name), type=int, default=0, metavar="N", help=words)
    args = parser.parse_args()
    require(args, module, n_known=1, n_test=1, seed=0, **dict.fromkeys(more, 0))
    return args


def main():
    args = arguments(affnist, __doc__, 55000, "digits", n_per_class="known digits of each class, in place of --n-known "
                     "(default 0: --n-known)")
    n_known = affnist.N_CLASSES * args.n_per_class or args.n_known
    config = affnist.Config(seed=args.seed, n_test=args.n_test, n_train=n_known, n_per_class=args.n_per_class,
                            digits=args.digits, mnist_dir=args.mnist_dir, model="gap", batch_size=1)
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
        affnist.write_json(args.out_json, header(affnist, config) | {
            "source": digits["source"], "nearest": found, "bench": {"n_known": len(known)}})


if __name__ == "__main__":
    affnist.run_cli(main)
