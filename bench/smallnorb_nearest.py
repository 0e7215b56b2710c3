#!/usr/bin/env python3
"""Measure how accurately the nearest training image classifies novel viewpoints: the strongest cheap baseline.

    python3 bench/smallnorb_nearest.py [--data shapes] [--split elevation]

A test image gets the class of the training image at the smallest Euclidean distance between pixels. Both are what a
network sees in a test: the central crop of the standardized image, or of shapes the image itself. The flags say which
images, as those of smallnorb_novel_viewpoint.py do.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import smallnorb_novel_viewpoint as norb  # before numpy: it sets BLAS to one thread
from lab.files import check_writable, write_json
from lab.messages import Parser, run_cli

import numpy as np
from multimnist_nearest import untrained_result

DATA = ("data", "toy_seed", "norb_dir", "split", "train_azimuths", "test_azimuths", "n_train_views", "n_test_views",
        "n_elev", "n_per_combo", "n_train_toys", "n_test", "seed")      # the settings that choose images
TEST_SETS = "familiar", "novel"
BLOCK = 500                        # test images at once


def pixels(samples, rows=slice(None)):
    """Return the images that a network sees of some samples, as rows of pixels, (n, pixels) float64."""
    images = norb.to_batch(samples, rows, np.float64)["images"]
    return images.reshape(len(images), -1)


def nearest(known, labels, images):
    """Return the classes, (n,), of the known image nearest to each image; of equally near images the lowest class.

    known: (m, pixels) float64. labels: (m,). images: (n, pixels) float64.
    """
    squares = np.vecdot(known, known)
    predicted = []
    for start in range(0, len(images), BLOCK):
        x = images[start:start + BLOCK]
        distances = np.vecdot(x, x)[:, None] - 2 * (x @ known.T) + squares              # (n, m)
        of_classes = [distances[:, labels == j].min(1, initial=np.inf) for j in range(norb.N_CLASSES)]
        predicted.append(np.argmin(of_classes, axis=0))
    return np.concatenate(predicted)


def measure(data, config):
    """Return the metrics on both test sets, as evaluate_test of the experiment does, but without losses."""
    known, labels = pixels(data["train"]), data["train"]["labels"]
    found = {}
    for name in TEST_SETS:
        samples = data[name]
        found[name] = norb.metrics_of(nearest(known, labels, pixels(samples)), samples)
    return norb.metrics_of_test(found, data, config)


def main():
    parser = Parser(__doc__)
    for f in norb.SETTINGS:
        if f.name in DATA:
            default = "" if f.default in ("", None) else f" (default: {f.default})"
            parser.add_argument(norb.flag_of(f.name), type=f.type, choices=f.metadata.get("choices"), default=f.default,
                                metavar=f.metadata.get("metavar"), help=f.metadata["help"] + default)
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")
    args = parser.parse_args()
    config = norb.Config(**{name: getattr(args, name) for name in DATA})
    check_writable(args.out_json)
    data = norb.load_data(config)
    metrics = measure(data, config)
    scores = ", ".join(f"{name} {metrics[name]:.4f}" for name in TEST_SETS)
    print(f"accuracy of the nearest of {len(data['train']['labels']):,} training images: {scores}")
    if args.out_json:
        result = untrained_result(norb, config, data["source"], norb.test_metrics(metrics))
        result["config"] = {name: getattr(config, name) for name in DATA if name != "norb_dir"}
        write_json(args.out_json, result)


if __name__ == "__main__":
    run_cli(main)
