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
ink, and its sum; the first 16 principal components of the pixels, for each class; the capsules of
the same network before its training; and 16 random numbers, whose R^2 is that of no information.

The same is measured once more with all digits at the center of the canvas, where no position has to
be told from a shape. There each digit is drawn twice, and a map is fitted from the difference of
the two capsules to the difference of the factors, too: what differs between writers is the same in
both, and does not limit R^2 of these differences.
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
RANDOM_KEYS = 9, 11  # of the generators of the two drawings; smaller ones are the probes'
NOISE_KEY = 12  # of the generator of random numbers
N_COMPONENTS = 16  # of the pixels, as many as a capsule has numbers
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


def draw_all(data, config, is_centered=False, key=RANDOM_KEYS[0]):
    """Return the test digits of load_data's dict, drawn anew: samples, a dict of images (n,
    side, side) uint8 and labels (n,); and factors, (n, 7). is_centered: see draw. key: of the
    generator."""
    images, labels = data["test"]
    n = min(config.n_test or len(labels), len(labels))
    canvases, factors = [], []
    for k, start in enumerate(range(0, n, affnist.CHUNK)):
        rng = affnist.rng_for(config.seed, affnist.EVALUATION, key, k)
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


def principal_axes(samples):
    """Return for each class the mean and the first N_COMPONENTS principal axes of its pixels,
    {label: (mean (P,), axes (N_COMPONENTS, P))}, of the digits to which r_squared fits a map."""
    found = {}
    for label in np.unique(samples["labels"]):
        own = samples["images"][samples["labels"] == label][::2]
        pixels = own.reshape(len(own), -1).astype(float)
        mean = pixels.mean(0)
        _, _, axes = np.linalg.svd(pixels - mean, full_matrices=False)
        found[label] = mean, axes[:N_COMPONENTS]
    return found


def components(samples, axes):
    """Return each digit's coordinates along its class's principal axes, (n, N_COMPONENTS)."""
    n_axes = min(len(of_class) for _, of_class in axes.values())
    found = np.zeros((len(samples["labels"]), n_axes))
    for label, (mean, of_class) in axes.items():
        own = samples["labels"] == label
        pixels = samples["images"][own].reshape(own.sum(), -1)
        found[own] = (pixels - mean) @ of_class[:n_axes].T
    return found


def inputs_of(network, untrained, samples, axes, key, workers):
    """Return what factors are read from, {name: (n, D)}, and the accuracy of the trained network.

    network: lab.networks.Network. untrained: weights before its training. axes: of
    principal_axes. key: of the drawing."""
    config = network.config
    capsules, accuracy = true_capsules(network.params, samples, config, workers)
    before, _ = true_capsules(untrained, samples, config, workers)
    of_ink = moments(samples["images"])
    rng = affnist.rng_for(config.seed, affnist.EVALUATION, NOISE_KEY, key)
    found = {
        "trained": capsules,
        "untrained": before,
        "center": of_ink[:, :2],
        "moments": of_ink,
        "components": components(samples, axes),
        "random": rng.standard_normal(capsules.shape),
    }
    return found, accuracy


def r_squared_of_each(inputs, factors, labels, names):
    """Return {name of the inputs: {factor: R^2}}. factors: (n, len(names))"""
    return {
        name: dict(zip(names, r_squared(x, factors, labels).tolist())) for name, x in inputs.items()
    }


def measure(network, untrained, workers):
    """Return {"dimensions": R^2 of each factor at any position, "dimensions_accuracy": accuracy}."""
    key = RANDOM_KEYS[0]
    samples, factors = draw_all(network.data, network.config, key=key)
    axes = principal_axes(samples)
    inputs, accuracy = inputs_of(network, untrained, samples, axes, key, workers)
    return {
        "dimensions": r_squared_of_each(inputs, factors, samples["labels"], FACTORS),
        "dimensions_accuracy": accuracy,
    }


def measure_centered(network, untrained, workers):
    """Return the same of digits at the center, "centered_dimensions" and its accuracy, and
    "centered_differences", R^2 of the differences between two drawings of each digit. Positions
    hardly vary, and are left out."""
    names = FACTORS[2:]
    drawings, axes = [], None
    for key in RANDOM_KEYS:
        samples, factors = draw_all(network.data, network.config, is_centered=True, key=key)
        axes = axes or principal_axes(samples)  # those of the first drawing for both
        inputs, accuracy = inputs_of(network, untrained, samples, axes, key, workers)
        drawings.append((inputs, factors[:, 2:], accuracy))
    (first, of_first, accuracy), (second, of_second, _) = drawings
    labels = samples["labels"]
    differences = {name: second[name] - first[name] for name in first}
    return {
        "centered_dimensions": r_squared_of_each(first, of_first, labels, names),
        "centered_dimensions_accuracy": accuracy,
        "centered_differences": r_squared_of_each(
            differences, of_second - of_first, labels, names
        ),
    }


def print_r_squared(say, heading, found):
    """Print a heading and what r_squared_of_each returns."""
    say(f"  {heading}")
    for name, of_factors in found.items():
        words = [f"{factor} {value:.3f}" for factor, value in of_factors.items()]
        say(f"    {name:10}  " + "  ".join(words))


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
    untrained = untrained_weights(network.data, network.trained)
    with affnist.worker_threads(config) as workers:
        found = measure(network, untrained, workers)
        found |= measure_centered(network, untrained, workers)
    say = Progress(config.quiet or args.out_json == "-").say
    say(f"{config.model}, {affnist.data_name(network.data['source'], loaded.source)}; R^2")
    right = 100 * found["dimensions_accuracy"]
    centered_right = 100 * found["centered_dimensions_accuracy"]
    for heading, key in (
        (f"digits at any position, {right:.1f}% correctly classified", "dimensions"),
        (f"digits at the center, {centered_right:.1f}%", "centered_dimensions"),
        ("differences between two drawings of a digit at the center", "centered_differences"),
    ):
        print_r_squared(say, heading, found[key])
    if args.out_json:
        _, state = affnist.load(args.load)
        write_json(
            args.out_json,
            affnist.result_of(config, state, {"source": network.data["source"]}, {})
            | found
            | {"history": {}, "loaded": loaded.file},
        )


if __name__ == "__main__":
    run_cli(main)
