#!/usr/bin/env python3
"""Measure what the 16 numbers of a digit's capsule hold: position, rotation, shear, scale,
stroke thickness.

    python3 bench/affnist_dimensions.py --load weights/affnist_capsnet-shared.npz --digits mnist

Every test digit is drawn anew: its strokes are made thinner or thicker, it is rotated, sheared
and scaled, and placed at any position on the canvas. For each class, linear least squares from
the capsule of the true class, and a constant, to each of these factors is fitted to one half of
the digits. R^2 is computed on the other half and averaged over the classes: 1 if the capsule
says exactly what was drawn, 0 if it says nothing, and below 0 if chance was fitted. A digit's
own slant, size and thickness, which differ between writers, are not known, so that R^2 of these
factors cannot be 1.

Baselines, by the same regression: the center of mass of the ink; that, the second moments of the
ink, and its sum; and the capsules of the same network before its training.

The same is measured once more with all digits at the center of the canvas, where no position has to
be told from a shape.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import affnist_capsnet as affnist  # before numpy: it sets BLAS to one thread
from lab import networks
from lab.files import check_writable, write_json
from lab.messages import InputError, Progress, run_cli

import numpy as np

FACTORS = "x", "y", "rotation", "shear", "scale_x", "scale_y", "thickness"
MOST_THICKNESS = 0.5  # share of an erosion or a dilation by 1 px on each side of a stroke
RANDOM_KEY = 9  # of the generator of these digits; smaller ones are the probes'
N_STATISTICS = 800  # training digits for the normalizations of an untrained network


def thicken(images, amounts):
    """Return digits with thicker strokes or, for negative amounts, thinner ones.

    An amount is the share of the digit's dilation, or erosion, by 1 px in the four directions,
    with which the digit is mixed: a stroke becomes about two times the amount wider, in px.
    images: (n, H, W) uint8. amounts: (n,), from -1 to 1. Return (n, H, W) uint8."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    neighbors = np.stack(
        [
            images,
            padded[:, :-2, 1:-1],
            padded[:, 2:, 1:-1],
            padded[:, 1:-1, :-2],
            padded[:, 1:-1, 2:],
        ]
    )
    thickest, thinnest = neighbors.max(0), neighbors.min(0)
    share = np.abs(amounts)[:, None, None]
    extreme = np.where(amounts[:, None, None] > 0, thickest, thinnest)
    return np.rint((1 - share) * images + share * extreme).astype(np.uint8)


def draw(images, side, rng, is_centered=False):
    """Draw digits anew, each with random factors. images: (n, 28, 28) uint8. Return canvases,
    (n, side, side) uint8, and factors, (n, 7), in the order of FACTORS: the position of the
    middle of the image on the canvas in px, degrees, shear and scales as in affine_matrix, and
    the amount of thicken. Digits at the center have the same other factors as elsewhere."""
    n = len(images)
    drawn = {name: rng.uniform(*bounds, n) for name, bounds in affnist.RANGES.items()}
    matrices = affnist.affine_matrix(**drawn)
    drawn["thickness"] = rng.uniform(-MOST_THICKNESS, MOST_THICKNESS, n)
    thickened = thicken(images, drawn["thickness"])
    rng_of_positions = None if is_centered else rng
    canvases, centers = affnist.transform_digits(thickened, matrices, rng_of_positions, side)
    drawn["y"], drawn["x"] = centers.T
    return canvases, np.stack([drawn[name] for name in FACTORS], axis=1)


def draw_all(data, config, is_centered=False):
    """Return the test digits of load_data's dict, drawn anew: samples, a dict of images (n,
    side, side) uint8 and labels (n,); and factors, (n, 7). is_centered: see draw."""
    images, labels = data["test"]
    n = min(config.n_test or len(labels), len(labels))
    canvases, factors = [], []
    for k, start in enumerate(range(0, n, affnist.CHUNK)):
        rng = affnist.rng_for(config.seed, affnist.EVALUATION, RANDOM_KEY, k)
        part = images[start : min(start + affnist.CHUNK, n)]
        part_canvases, part_factors = draw(part, affnist.SIDES[config.task], rng, is_centered)
        canvases.append(part_canvases)
        factors.append(part_factors)
    samples = {"images": np.concatenate(canvases), "labels": labels[:n].astype(np.int64)}
    return samples, np.concatenate(factors)


def r_squared(inputs, targets, labels):
    """Return R^2 of a linear regression for each target, (T,), mean over the classes.

    The samples of a class are taken in turn for the two halves: the map is fitted to one, R^2 is
    computed on the other. inputs: (n, D). targets: (n, T). labels: (n,)."""
    found = []
    for label in np.unique(labels):
        own = labels == label
        x = np.concatenate([inputs[own], np.ones((own.sum(), 1))], axis=1).astype(float)
        y = targets[own]
        coefficients, *_ = np.linalg.lstsq(x[::2], y[::2], rcond=None)
        residual = y[1::2] - x[1::2] @ coefficients
        spread = y[1::2] - y[1::2].mean(0)
        found.append(1 - np.square(residual).sum(0) / np.square(spread).sum(0))
    return np.mean(found, axis=0)


def moments(images):
    """Return six numbers of each image's ink, (n, 6): the center of mass (x, y), the variances
    of x and y and their covariance, and the sum of the pixels. images: (n, H, W) uint8."""
    ink = images.astype(float) / 255
    total = np.maximum(ink.sum((1, 2)), 1e-9)
    row, column = np.arange(images.shape[1]), np.arange(images.shape[2])
    y = ink.sum(2) @ row / total
    x = ink.sum(1) @ column / total
    dy = row - y[:, None]  # (n, H)
    dx = column - x[:, None]  # (n, W)
    var_y = (ink.sum(2) * dy**2).sum(1) / total
    var_x = (ink.sum(1) * dx**2).sum(1) / total
    covariance = np.einsum("nyx,ny,nx->n", ink, dy, dx) / total
    return np.stack([x, y, var_x, var_y, covariance, total], axis=1)


def true_capsules(weights, samples, config, workers):
    """Return the capsules of the true classes, (n, 16), and the accuracy on these samples."""
    out = affnist.forward_shards(weights, samples, config, workers)
    labels = samples["labels"]
    accuracy = float((out["scores"].argmax(1) == labels).mean())
    return out["v"][np.arange(len(labels)), labels], accuracy


def untrained_weights(data, config):
    """Return the weights of a network before its training, with the statistics of its
    normalizations."""
    state = affnist.initial_state(config)
    state["running"] |= affnist.recompute_statistics(state, data, config, N_STATISTICS)
    return affnist.weights_of(state)


def measure(network, workers, is_centered=False):
    """Return R^2 of every factor, {"trained", "untrained", "center", "moments": {factor: R^2}},
    and the accuracy. network: lab.networks.Network. At the center positions hardly vary, and are
    left out."""
    samples, factors = draw_all(network.data, network.config, is_centered)
    names = FACTORS
    if is_centered:
        names, factors = FACTORS[2:], factors[:, 2:]
    capsules, accuracy = true_capsules(network.params, samples, network.config, workers)
    untrained, _ = true_capsules(
        untrained_weights(network.data, network.trained), samples, network.config, workers
    )
    of_ink = moments(samples["images"])
    inputs = {
        "trained": capsules,
        "untrained": untrained,
        "center": of_ink[:, :2],
        "moments": of_ink,
    }
    found = {
        name: dict(zip(names, r_squared(x, factors, samples["labels"]).tolist()))
        for name, x in inputs.items()
    }
    return found, accuracy


def print_r_squared(say, where, accuracy, found):
    """Print what measure returns. where: the digits' positions in words."""
    say(f"  digits {where}, {100 * accuracy:.1f}% correctly classified")
    for name, of_factors in found.items():
        words = [f"{factor} {value:.3f}" for factor, value in of_factors.items()]
        say(f"    {name:9}  " + "  ".join(words))


def main():
    args = networks.measuring_parser(affnist, __doc__).parse_args()
    loaded, config = networks.load_for_evaluation(affnist, args.load, args)
    if config.task != "affnist" or config.model not in affnist.CAPSULES:
        raise InputError(
            f"--load {args.load}: is --model {config.model} of --task {config.task}. Give a "
            f"network with capsules or vectors, {', '.join(affnist.CAPSULES)}, of --task affnist"
        )
    check_writable(args.out_json)
    network = networks.make(affnist, args.load, loaded, config, affnist.load_data(config))
    with affnist.worker_threads(config) as workers:
        found, accuracy = measure(network, workers)
        centered, centered_accuracy = measure(network, workers, is_centered=True)
    say = Progress(config.quiet or args.out_json == "-").say
    say(f"{config.model}, {affnist.data_name(network.data['source'], loaded.source)}; R^2")
    print_r_squared(say, "at any position", accuracy, found)
    print_r_squared(say, "at the center", centered_accuracy, centered)
    if args.out_json:
        _, state = affnist.load(args.load)
        write_json(
            args.out_json,
            affnist.result_of(config, state, {"source": network.data["source"]}, {})
            | {
                "dimensions": found,
                "dimensions_accuracy": accuracy,
                "centered_dimensions": centered,
                "centered_dimensions_accuracy": centered_accuracy,
                "history": {},
                "loaded": loaded.file,
            },
        )


if __name__ == "__main__":
    run_cli(main)
