#!/usr/bin/env python3
"""Make a data set of images in color: MNIST's digits, padded to 32x32 px, each in a random color on a background of
another, as docs/reference/affnist_capsnet.md shows. Color says nothing about the class.

    python3 bench/colored_digits.py runs/colored-digits --digits mnist
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import affnist_capsnet as affnist  # before numpy: it sets BLAS to one thread
from lab.messages import Parser, run_cli

import numpy as np

from make_idx import make

SIDE = 32


def in_color(images, rng):
    colored = []
    for image in images:
        ink = np.pad(image, 2)[..., None] / 255                        # 32x32 px, from 0 to 1
        color, background = rng.integers(0, 256, (2, 3))
        colored.append((ink * color + (1 - ink) * background).astype(np.uint8))
    return np.stack(colored)


def main():
    parser = Parser(__doc__)
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--digits", choices=("auto", "mnist", "synthetic"), default="auto", help="as the experiment's")
    args = parser.parse_args()
    data, rng = affnist.load_data(affnist.Config(digits=args.digits)), np.random.default_rng(0)
    images, labels = map(np.concatenate, zip(data["train"], data["val"]))
    train = in_color(images, rng), labels
    images, labels = data["test"]
    test = in_color(images, rng), labels
    make(args.out, train, test, kind="images", side=SIDE)


if __name__ == "__main__":
    run_cli(main)
