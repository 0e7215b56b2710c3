#!/usr/bin/env python3
"""How much the toys are like smallNORB: the nearest neighbour's error on the standard task, measured as LeCun, Huang &
Bottou (2004) did there (18.4%: raw grey levels, all training images), here on the left camera's 48x48 px; and how far
apart pictures are that must not be the same.

    python3 tests/bench_toys.py [--toy-seed 0] [--n-toys 5] [--n-test 24300] [--out-json FILE]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import smallnorb_novel_viewpoint as norb  # before numpy: it sets the number of BLAS threads

import numpy as np

CHUNK = 500                        # test images whose distances to all training images are known at once


def nearest_of_each_class(known, labels, images):
    """Root mean squared grey-level difference from each image (n, pixels) to the nearest known one of each class
    -> (n, classes)"""
    square = np.vecdot(known, known)
    found = []
    for start in range(0, len(images), CHUNK):
        part = images[start:start + CHUNK]
        distance = np.vecdot(part, part)[:, None] - 2 * (part @ known.T) + square
        found.append(np.stack([distance[:, labels == j].min(1, initial=np.inf) for j in range(norb.N_CLASSES)], 1))
    return np.sqrt(np.maximum(np.concatenate(found), 0) / known.shape[1])


def nearest_views(table, lighting=0):
    """The least such difference between two views of one toy, in one lighting, over all toys of a table"""
    here = table["lightings"] == lighting
    keys, least = np.stack([table["labels"], table["instances"]])[:, here], np.inf
    images = left(table)[here]
    for toy in np.unique(keys, axis=1).T:
        views = images[(keys == toy[:, None]).all(0)]
        square = np.vecdot(views, views)
        distance = square[:, None] - 2 * (views @ views.T) + square
        np.fill_diagonal(distance, np.inf)
        least = min(least, float(np.sqrt(max(distance.min(), 0) / views.shape[1])))
    return least


def left(table):
    """The left camera's pictures as rows of grey levels, float32"""
    return table["images"][..., 0].reshape(len(table["labels"]), -1).astype(np.float32)


def main():
    parser = norb.Parser(__doc__)
    parser.add_argument("--toy-seed", type=int, default=0, metavar="N", help="seed of the toys (default 0)")
    parser.add_argument("--n-toys", type=int, default=5, metavar="N", help="toys of each class to know, and to try "
                        "(default 5, that is all)")
    parser.add_argument("--n-test", type=int, default=0, metavar="N", help="test images, drawn at random; 0: all, the "
                        "default")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")
    args = parser.parse_args()
    norb.check_config(norb.Config(toy_seed=args.toy_seed, n_test=args.n_test, n_train_toys=args.n_toys))
    norb.check_writable(args.out_json)
    norb.hold_blas_to_one_thread()
    data = {}
    for split, toys in norb.TOY_SPLITS.items():
        table = norb.toy_tables(split)
        here = np.isin(table["instances"], toys[:args.n_toys])
        data[split] = {name: values[here] for name, values in table.items()}
    norb.add_toy_images(data, args.toy_seed)
    rows = np.sort(np.random.default_rng(0).permutation(len(data["test"]["labels"]))[:args.n_test or None])
    labels = data["test"]["labels"][rows]
    distance = nearest_of_each_class(left(data["train"]), data["train"]["labels"], left(data["test"])[rows])
    wrong = distance.argmin(1) != labels
    low, high = norb.wilson_interval(int(wrong.sum()), len(labels))
    others = distance.copy()
    others[np.arange(len(labels)), labels] = np.inf
    found = {"nearest_error": float(wrong.mean()), "nearest_error_ci95": (low, high),
             "nearest_error_per_class": norb.accuracy_per_class(labels, wrong),
             "nearest_other_class": float(others.min()), "nearest_views": min(map(nearest_views, data.values()))}
    print(f"nearest neighbour: {found['nearest_error']:.4f} wrong, 95% interval [{low:.4f}, {high:.4f}], by class "
          + ", ".join(f"{name} {share:.3f}" for name, share in zip(norb.NORB_NAMES, found["nearest_error_per_class"])))
    print(f"least difference, grey levels of 255, of a test and a training image of two classes: "
          f"{found['nearest_other_class']:.2f}; of two views of one toy: {found['nearest_views']:.2f}")
    if args.out_json:
        history = {"source": "toys", "epochs": [], "seconds": 0.0, "steps": 0}
        norb.write_json(args.out_json, norb.result_of(norb.Config(model="nearest"), {}, history, {
            "bench": {"toy_seed": args.toy_seed, "n_toys": args.n_toys, "n_test": len(labels)}, **found}))


if __name__ == "__main__":
    norb.run_cli(main)
