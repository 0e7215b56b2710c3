#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0"]
# ///
"""Probes what a network of affnist_capsnet.py does with spoilt digits, with each transformation alone and with what is
no digit, and, of capsules, what their dimensions stand for.

    python3 probe_affnist_capsnet.py --load weights/affnist_gap.npz --digits mnist --out-json gap.json

Spoilt are moved test digits: by noise, a black square, less contrast, and by steps of all pixels, up or down, whose
signs are (Goodfellow et al. 2015)

- drawn at random;
- those of the gradient of (best wrong score - true score) at the digit;
- those that most of NOISY copies of the digit have, each with noise whose standard deviation is the step: where a
  network bends within a step, as maxima and ReLUs do on a background that is all black, the gradient at the digit
  itself says little of what the step will meet;
- either of the last two, shuffled: as many up and down of each digit's ink and of its background, but anywhere there.

What is no digit is told from moved test digits by scores that a network has anyway: of capsules the length of the
longest, what it is ahead of the second, and the error of the picture redrawn from it; of a softmax the largest
probability, the largest logit, the logarithm of the sum of their exponentials, and what the largest logit is ahead.

The network that comes along, seven minutes on one core:    python3 probe_affnist_capsnet.py
"""
import dataclasses

import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
from affnist_capsnet import BOX, CAPSULES, DIGIT_NAMES, N_CLASSES, SHIFTS, SIDES, InputError

import numpy as np

N_PROBED = 2000                    # test digits, and pictures of each kind that are none, at most
FACTOR_RANGES = {                  # one at a time, past affNIST's range
    "turn": tuple(float(turn) for turn in range(-60, 61, 10)),
    "shear": tuple(k / 20 for k in range(-12, 13, 3)),
    "down": tuple(k / 10 for k in range(5, 15)), "across": tuple(k / 10 for k in range(5, 15))}
SPOILT = {                         # how, and how much: none of them knows the network
    "noise": (32, 64, 128),        # standard deviation, grey levels of 255
    "occlusion": (6, 10, 14),      # side of a black square about one of the digit's pixels, px
    "contrast": (0.5, 0.25, 0.125)}                        # factor on every pixel
STEPS = 8, 16, 32                  # of all pixels, up or down, grey levels of 255
NOISY = 9                          # copies of a digit whose gradients vote
NO_DIGITS = "halves", "strokes", "noise", "blank", "shuffled", "inverted"
KNOWN_FACTORS = "x", "y", "slant", "rotation", "aspect", "stroke"                      # of synthetic digits
PROBES = {"robustness": "right with ", "factors": "right by   ", "detection": "AUROC from ",
          "dimensions": "R^2 of     "}


def probed_digits(digits, config, kind, **more):
    """Chunks of the first test digits, N_PROBED at most"""
    few = dataclasses.replace(config, n_test=min(config.n_test or N_PROBED, N_PROBED))
    return affnist.stream_digits(digits, few, kind, **more)


# ---------------------------------------------------------------- spoilt digits

def folded(params, config):
    """The same network without normalisations, whose running statistics go into the kernels before them, and without
    decoder -> params, config. Its backward has the gradient of what is evaluated."""
    plain = dataclasses.replace(config, norm="none", recon_weight=0.0, width=affnist.own_width(config))
    out = dict(params)
    for name in [name.removesuffix("_norm_gamma") for name in params if name.endswith("_norm_gamma")]:
        gamma, beta, mean, variance = (out.pop(f"{name}_norm_{end}") for end in ("gamma", "beta", "mean", "var"))
        scale = gamma / np.sqrt(variance + gamma.dtype.type(affnist.NORM_EPS))
        out[name + "_w"], out[name + "_b"] = params[name + "_w"] * scale, beta - mean * scale
    return {name: out[name] for name in affnist.param_shapes(plain)}, plain


def image_gradient(dscores, cache, config):
    """dscores (N, 10) -> the gradient of the images, (N, side, side): the adjoint of im2col_rows and of the margin"""
    _, dx = affnist.backward(dscores, None, cache, config, need_dx=True)
    N, rows, W, K = dx.shape
    dimages, p = np.zeros((N, rows + K - 1, W), dx.dtype), config.padding
    for k in range(K):
        dimages[:, k:k + rows] += dx[..., k]
    return dimages[:, p:W - p, p:W - p]


def adversarial_direction(params, config, samples, runner):
    """The signs of the gradient of (best wrong score - true score) with respect to each image, (n, side, side): one
    step along them is, to first order, what raises that difference most. Not of the loss: the margin loss of a digit
    that is named well has no gradient at all, so that no step would go anywhere."""
    params, config = folded(params, config)

    def one(rows):
        batch = affnist.to_batch(samples, rows, affnist.dtype_of(params))
        out, cache = affnist.forward(params, batch["images"], config)
        scores, labels, n = out["scores"].copy(), batch["labels"], np.arange(len(batch["labels"]))
        scores[n, labels] = -np.inf
        dscores = np.zeros_like(out["scores"])
        dscores[n, scores.argmax(1)], dscores[n, labels] = 1, -1
        return np.sign(image_gradient(dscores, cache, config))
    n = len(samples["labels"])
    return np.concatenate(runner.map(one, [np.arange(start, min(start + affnist.SHARD_SIZE, n))
                                           for start in range(0, n, affnist.SHARD_SIZE)]))


def voted_direction(params, config, part, much, rng, runner):
    """The sign that most of NOISY noisy copies of part's images have, (n, side, side); 0 where as many have each"""
    return np.sign(sum(adversarial_direction(params, config, part | {
        "images": spoil(part["images"], "noise", much, rng)}, runner) for _ in range(NOISY)))


def shuffled(signs, images, rng):
    """As many pixels up and down in each digit, of its ink and of its background, but which ones at random"""
    out = signs.copy()
    for image, new in zip(images, out):
        for here in image > 0, image == 0:
            new[here] = rng.permutation(new[here])
    return out


def directions(params, config, part, rng, runner):
    """Yields how the signs of a step are chosen, the step, the signs (n, side, side)"""
    blind, at_the_digit = (rng.choice([-1, 1], part["images"].shape),
                           adversarial_direction(params, config, part, runner))
    mixed = shuffled(at_the_digit, part["images"], rng)
    for much in STEPS:
        voted = voted_direction(params, config, part, much, rng, runner)
        yield "random signs", much, blind
        yield "adversarial", much, at_the_digit
        yield "adversarial, shuffled", much, mixed
        yield "vote", much, voted
        yield "vote, shuffled", much, shuffled(voted, part["images"], rng)


def spoil(images, how, much, rng):
    """images (n, side, side) uint8 with noise, a black square, or less contrast -> as many, uint8. See SPOILT."""
    if how == "noise":
        noisy = images + much * rng.standard_normal(images.shape, np.float32)
        return np.rint(np.clip(noisy, 0, 255)).astype(np.uint8)
    if how == "contrast":
        return np.rint(images * np.float32(much)).astype(np.uint8)
    out, half = images.copy(), much // 2
    for image in out:
        ink = np.argwhere(image) if image.any() else np.zeros((1, 2), int)
        row, column = ink[rng.integers(len(ink))]
        image[max(0, row - half):row - half + much, max(0, column - half):column - half + much] = 0
    return out


def robustness(params, digits, config, runner):
    """Accuracy on moved test digits that were spoilt -> {how: [[how much, accuracy], ...]}"""
    hits, n = {}, 0
    rng, of_signs = (affnist.rng_for(config.seed, "evaluation", key) for key in (5, 8))

    def count(how, much, part, images):
        right = affnist.evaluate(params, [part | {"images": images}], config, runner)["hits"]
        hits.setdefault(how, {}).setdefault(much, 0)
        hits[how][much] += right
    for part in probed_digits(digits, config, "test"):
        n += len(part["labels"])
        for how, much in [(name, much) for name, steps in SPOILT.items() for much in steps]:
            count(how, much, part, spoil(part["images"], how, much, rng))
        for how, much, signs in directions(params, config, part, of_signs, runner):
            count(how, much, part, np.clip(part["images"] + much * signs, 0, 255).astype(np.uint8))
    return {how: [[much, right / n] for much, right in found.items()] for how, found in hits.items()}


# ---------------------------------------------------------------- one transformation at a time

def accuracy_by_factor(params, digits, config, runner):
    """Accuracy on centred test digits, one factor away from rest -> {factor: [[value, accuracy], ...]}"""
    def accuracy(factors):
        shown = probed_digits(digits, config, "centred", factors=affnist.REST | factors)
        return float(affnist.evaluate(params, shown, config, runner)["accuracy"])
    return {name: [[value, accuracy({name: value})] for value in values] for name, values in FACTOR_RANGES.items()}


# ---------------------------------------------------------------- what is no digit

def strokes_at_random(n, rng):
    """Two strokes of different synthetic digits, drawn as one digit is. -> (n, 28, 28) uint8"""
    strokes = [(digit, stroke.strip()) for digit, _, glyph in affnist.GLYPHS for stroke in glyph.split("|")]
    images = []
    while len(images) < n:
        (one, first), (other, second) = (strokes[k] for k in rng.integers(len(strokes), size=2))
        if one != other:
            names = set(f"{first} {second}".split())
            points, basis = affnist._stroke_basis(f"{first} | {second}", len(names))
            points = points + 0.1 * rng.normal(0, 0.7, points.shape)
            width = np.exp(rng.normal(0.92, 0.26, 1)).clip(1.2, 4.5)
            dots = (basis @ points)[None] * np.array([0.8, 1.0])
            images.append(affnist._render(dots, width, rng.uniform(1.0, 1.6, 1), np.ones((1, affnist.DOTS)))[0])
    return np.rint(255 * np.stack(images)).astype(np.uint8)


def shifted(image, down, right):
    """image (H, W) moved by whole pixels; what leaves it is lost, what comes in is 0"""
    out, (H, W) = np.zeros_like(image), image.shape
    out[max(0, down):H + min(0, down), max(0, right):W + min(0, right)] = (
        image[max(0, -down):H - max(0, down), max(0, -right):W - max(0, right)])
    return out


def ink_centres(images):
    """Where the centre of each image's ink lies. images (n, H, W) uint8 -> (n, 2) = (row, column), px"""
    mass = np.maximum(images.sum((1, 2), dtype=np.int64), 1)[:, None]
    sums = [images.sum(3 - axis, dtype=np.int64) @ np.arange(images.shape[axis]) for axis in (1, 2)]
    return np.stack(sums, 1) / mass


def halves(images, labels, rng):
    """The upper half of each image above the lower half of one of another class, if there is one, drawn at random, both
    cut at the centre of their ink. images (n, H, W) uint8 -> as many"""
    centres, out = np.rint(ink_centres(images)).astype(int), images.copy()
    for k, label in enumerate(labels):
        others = np.flatnonzero(labels != label)
        other = rng.choice(others) if len(others) else k
        cut = centres[k, 0]
        out[k, cut:] = shifted(images[other], *(centres[k] - centres[other]))[cut:]
    return out


def no_digits(part, kind, config, rng):
    """As many pictures as there are digits in `part`: halves of two digits of different classes; strokes put together
    at random; noise, uniform; nothing; the digits' pixels shuffled; the digits inverted -> a dict like it"""
    images = part["images"]
    if kind == "halves":
        images = halves(images, part["labels"], rng)
    elif kind == "noise":
        images = rng.integers(0, 256, images.shape, np.uint8)
    elif kind == "blank":
        images = np.zeros_like(images)
    elif kind == "shuffled":
        images = rng.permuted(images.reshape(len(images), -1), axis=1).reshape(images.shape)
    elif kind == "inverted":
        images = 255 - images
    else:
        images = affnist.moved_digits(strokes_at_random(len(images), rng), SIDES[config.task], SHIFTS[config.task], rng)
    return part | {"images": images}


def confidences(params, part, config, runner):
    """How sure the network is that each picture is a digit, higher for surer -> {score: (n,)}"""
    out = runner.forward(params, part, config, decode="longest")
    scores = np.sort(out["scores"].astype(float), 1)
    top, ahead = scores[:, -1], scores[:, -1] - scores[:, -2]
    if config.model not in CAPSULES:
        above = np.log(np.exp(scores - top[:, None]).sum(1))
        return {"probability": np.exp(-above), "largest logit": top, "log-sum-exp": top + above, "ahead": ahead}
    found = {"length": top, "ahead": ahead}
    if "recon" in out:
        found["redrawn"] = -np.square(out["recon"][:, 0] - part["images"] / np.float32(255)).mean((1, 2), dtype=float)
    return found


def without_network(images):
    """Two scores that need no network: how little ink a picture has, how little its neighbouring pixels differ. images
    (n, side, side) uint8 -> {score: (n,)}"""
    level = images.astype(float)
    differences = sum(np.abs(np.diff(level, axis=axis)).sum((1, 2)) for axis in (1, 2))
    return {"little ink": -level.sum((1, 2)), "smoothness": -differences}


def auroc(of_digits, of_others):
    """The chance that a digit has a higher score than another picture, ties counting half: the area under the ROC"""
    others = np.sort(of_others)
    below = (np.searchsorted(others, of_digits) + np.searchsorted(others, of_digits, "right")) / 2
    return float(below.mean() / len(others))


def detection(params, digits, config, runner):
    """AUROC of moved test digits against what is no digit, by each score -> {kind: {score: AUROC}}. `together` is the
    sum of the length and of what is redrawn, each in units of its standard deviation over validation digits;
    without_network's say what a trivial cue would do."""
    valid = confidences(params, next(affnist.stream_digits(digits, config, "val")), config, runner)
    spread = {name: max(float(valid[name].std()), 1e-12) for name in ("length", "redrawn") if name in valid}

    def scores(parts):
        found = [confidences(params, part, config, runner) for part in parts]
        found = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
        found |= {"together": sum(found[name] / spread[name] for name in spread)} if len(spread) > 1 else {}
        return found | without_network(np.concatenate([part["images"] for part in parts]))
    test, rng = list(probed_digits(digits, config, "test")), affnist.rng_for(config.seed, "evaluation", 6)
    real = scores(test)
    return {kind: {name: auroc(real[name], others[name]) for name in real}
            for kind in NO_DIGITS
            for others in [scores([no_digits(part, kind, config, rng) for part in test])]}


# ---------------------------------------------------------------- what capsules know

def factor_r2(params, config, runner):
    """How well the true digit's capsule follows the known factors of 2 N_PROBED moved synthetic digits, each class
    apart -> which (10, factors), the dimension whose squared correlation with a factor is largest on one half of the
    digits; single (10, factors), that correlation on the other half; together (10, factors), there too, R^2 of a linear
    map of all dimensions, fitted to the first half"""
    images, labels, factors = affnist.synthesize_digits(2 * N_PROBED, config.seed)
    rng, side = affnist.rng_for(config.seed, "evaluation", 7), SIDES[config.task]
    most = SHIFTS[config.task] or SHIFTS["affnist"]
    shifts = rng.integers(-most, most + 1, (len(images), 2))
    samples = {"images": affnist.place_digits(images, (side - BOX) // 2 + shifts, side),
               "labels": labels.astype(np.int64)}
    v = runner.forward(params, samples, config)["v"][np.arange(len(labels)), labels].astype(float)   # (n, D)
    known = np.stack([shifts[:, 1], shifts[:, 0], *(factors[name] for name in KNOWN_FACTORS[2:])], 1).astype(float)

    def correlation(X, Y):
        """Squared, of every column of X with every column of Y"""
        X, Y = X - X.mean(0), Y - Y.mean(0)
        return (X.T @ Y) ** 2 / (np.square(X).sum(0)[:, None] * np.square(Y).sum(0) + 1e-24)
    which, single, together = np.zeros((N_CLASSES, known.shape[1]), int), *np.zeros((2, N_CLASSES, known.shape[1]))
    for digit in range(N_CLASSES):
        X, Y = v[labels == digit], known[labels == digit]
        half = len(X) // 2
        which[digit] = correlation(X[:half], Y[:half]).argmax(0)
        single[digit] = correlation(X[half:], Y[half:])[which[digit], np.arange(known.shape[1])]
        fit = np.linalg.lstsq(np.c_[X[:half], np.ones(half)], Y[:half], rcond=None)[0]
        rest = Y[half:] - np.c_[X[half:], np.ones(len(X) - half)] @ fit
        together[digit] = 1 - np.square(rest).sum(0) / np.square(Y[half:] - Y[half:].mean(0)).sum(0)
    return which, single, together


def dimensions(params, config, runner):
    """factor_r2 in short -> {factor: [["best dimension", R^2], ["all dimensions", R^2]]}, means over the ten digits"""
    _, single, together = factor_r2(params, config, runner)
    return {name: [["best dimension", float(best)], ["all dimensions", float(whole)]]
            for name, best, whole in zip(KNOWN_FACTORS, single.mean(0), together.mean(0))}


# ---------------------------------------------------------------- command line

def probes_of(params, digits, config, runner):
    """-> {probe: what it finds}: robustness, factors, detection and, of capsules, dimensions"""
    found = {"robustness": robustness(params, digits, config, runner),
             "factors": accuracy_by_factor(params, digits, config, runner),
             "detection": detection(params, digits, config, runner)}
    return found | ({"dimensions": dimensions(params, config, runner)} if config.model in CAPSULES else {})


def main():
    parser = affnist.Parser(description=__doc__)
    parser.add_argument("--load", default=str(affnist.WEIGHTS), metavar="FILE", help="the network, from a checkpoint "
                        f"or weights (default weights/{affnist.WEIGHTS.name})")
    affnist.add_config_flags(parser)
    args = parser.parse_args()
    found, config = affnist.look_at(args.load, args)
    affnist.check_config(config)
    if config.task != "affnist" or config.affnist_dir:
        raise InputError(f"--load {args.load}: is of --task {config.task}; give a network of affnist" if config.task !=
                         "affnist" else "--affnist-dir: means nothing to a probe; leave it out")
    progress = affnist.Progress(config.quiet)
    digits = affnist.load_digits(config, progress.say)
    with affnist.Runner(config.threads, progress=progress) as runner:
        probes = probes_of(found.weights, digits, config, runner)
    progress.say(f"{config.model}, {DIGIT_NAMES[digits['source']]}")
    for name, of in probes.items():
        for kind, values in of.items():
            shown = values.items() if isinstance(values, dict) else values
            progress.say(f"  {PROBES[name]}{kind:24}" + "  ".join(f"{what} {value:.3f}" for what, value in shown))
    if config.out_json:
        affnist.write_json(config.out_json, affnist.result_of(config, found.weights, found.history, probes) | {
            "source": digits["source"], "history": {}, "loaded": found.file})


if __name__ == "__main__":
    affnist.run_cli(main)
