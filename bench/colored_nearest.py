#!/usr/bin/env python3
"""Measure how accurately the nearest training image classifies digits in color: a baseline for the networks.

    python3 bench/colored_digits.py runs/colored-digits --digits mnist
    python3 bench/colored_nearest.py --data-dir runs/colored-digits

A test image gets the label of the known image at the smallest Euclidean distance between pixels. A second number is
that after color is removed by hand: each pixel becomes its distance to the color of the corner, divided by the largest
of the image. The networks have to learn what this builds in.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import affnist_capsnet as affnist  # before numpy: it sets BLAS to one thread
from lab.files import check_writable, write_json
from lab.messages import InputError, Parser, run_cli
from lab.statistics import wilson_interval

import numpy as np
from multimnist_nearest import add_data_flags, nearest, untrained_result


def without_color(images):
    """Return images in color, (n, H, W, 3) uint8, as gray levels, (n, H, W) uint8: each pixel's distance to the color
    of the upper left corner, of the largest in the image"""
    gray = np.empty(images.shape[:3], np.uint8)
    for k, image in enumerate(images):
        distance = np.linalg.norm(image.astype(float) - image[0, 0], axis=-1)
        gray[k] = np.rint(255 * distance / max(distance.max(), 1e-9))
    return gray


def accuracies(known, labels, images, true):
    """Return the accuracy in pixels and after color is removed, {key: accuracy}, and its 95% Wilson interval,
    {key_ci95: (low, high)}. known, images: (n, H, W, 3) uint8"""
    metrics = {}
    for key, seen in ("test", lambda images: images), ("without_color", without_color):
        predicted = nearest(seen(known).astype(np.float32) / 255, labels, seen(images))
        n_right = int((predicted == true).sum())
        metrics |= {key: n_right / len(true), f"{key}_ci95": wilson_interval(n_right, len(true))}
    return metrics


def main():
    parser = Parser(__doc__)
    for flag, default, text in ("--n-known", 55000, "known images"), ("--n-test", 10000, "test images"):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    add_data_flags(parser)
    args = parser.parse_args()
    if not 1 <= args.n_known <= 10 ** 7:
        raise InputError(f"--n-known {args.n_known}: must be between 1 and 10,000,000")
    if not args.data_dir:
        raise InputError("--data-dir: is missing. Give the folder that colored_digits.py has made")
    config = affnist.Config(task="images", model="cnn-gap", n_test=args.n_test, data_dir=args.data_dir)
    check_writable(args.out_json)
    data = affnist.load_data(config)
    if data["test"][0].shape[3:] != (3,):
        raise InputError(f"--data-dir {args.data_dir}: holds no images in color. Give the folder that "
                         "colored_digits.py has made")
    (known, labels), (images, true) = data["train"], data["test"]
    known, labels, images, true = known[:args.n_known], labels[:args.n_known], images[:args.n_test], true[:args.n_test]
    metrics = accuracies(known, labels, images, true)
    print(f"accuracy of the nearest of {len(known):,} known images: {metrics['test']:.4f} in pixels, "
          f"{metrics['without_color']:.4f} after color is removed")
    if args.out_json:
        write_json(args.out_json, untrained_result(affnist, config, data["source"], {
            "nearest": metrics, "bench": {"n_known": len(known)}}))


if __name__ == "__main__":
    run_cli(main)
