#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0"]
# ///
"""Probes what a trained network of affnist_capsnet.py does with digits that are turned far, with steps against it and
with what is no digit, and, of capsules, what a linear map finds in them.

    python3 probe_affnist_capsnet.py --load weights/affnist_cnn-gap.npz --digits mnist --out-json gap.json

Steps of all pixels of moved test digits, STEP gray levels up or down (Goodfellow et al. 2015), by the signs

- of the gradient of (best wrong score - true score) at the digit;
- that most of NOISY copies of the digit have, each with noise whose standard deviation is the step: where a network
  bends within a step, as maxima and ReLUs do on a background that is all black, the gradient at the digit itself says
  little of what the step will meet;
- of either, shuffled: as many up and down of each digit's ink and of its background, but anywhere there.

What is no digit is told from moved test digits by scores that a network has anyway: of capsules the length of the
longest, what it is ahead of the second, and the error of the picture redrawn from it; of a softmax the largest
probability, the logarithm of the sum of the logits' exponentials, and what the largest logit is ahead.

The network that comes along, three minutes on one core:    python3 probe_affnist_capsnet.py
"""
import dataclasses

import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
from affnist_capsnet import BOX, CAPSULES, DIGIT_NAMES, N_CLASSES, SIDES, InputError, max_shift

import numpy as np

N_PROBED = 2000                    # test digits, and pictures of each kind that are none, at most
TURNS = tuple(float(turn) for turn in range(-60, 61, 20))                                # degrees
STEP = 32                          # of all pixels, up or down, gray levels of 255
NOISY = 9                          # copies of a digit whose gradients vote
NO_DIGITS = "halves", "strokes", "noise", "blank", "shuffled", "inverted"
KNOWN_FACTORS = "x", "y", "slant", "rotation", "aspect", "stroke"                      # of synthetic digits
SAYS = {"sign_attack": "right after a step by", "rotated": "right turned by", "detection": "AUROC, from",
        "linear_probe": "R^2 of a linear map, of"}


def probed_digits(digits, config, kind, **more):
    """Chunks of the first test digits, N_PROBED at most"""
    few = dataclasses.replace(config, n_test=min(config.n_test or N_PROBED, N_PROBED))
    return affnist.stream_digits(digits, few, kind, **more)


# ---------------------------------------------------------------- steps against it

def folded(params, config):
    """The same network without normalizations, whose running statistics go into the kernels before them, and without
    decoder -> params, config. Its backward has the gradient of what is evaluated."""
    plain = dataclasses.replace(config, norm="none", recon_weight=0.0, width=affnist.matched_width(config))
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
        batch = affnist.to_batch(samples, rows, affnist.params_dtype(params))
        out, cache = affnist.forward(params, batch["images"], config)
        scores, labels, n = out["scores"].copy(), batch["labels"], np.arange(len(batch["labels"]))
        scores[n, labels] = -np.inf
        dscores = np.zeros_like(out["scores"])
        dscores[n, scores.argmax(1)], dscores[n, labels] = 1, -1
        return np.sign(image_gradient(dscores, cache, config))
    n = len(samples["labels"])
    return np.concatenate(runner.map(one, [np.arange(start, min(start + affnist.SHARD_SIZE, n))
                                           for start in range(0, n, affnist.SHARD_SIZE)]))


def voted_direction(params, config, part, rng, runner):
    """The sign that most of NOISY noisy copies of part's images have, (n, side, side); 0 where as many have each"""
    def noisy():
        images = part["images"] + STEP * rng.standard_normal(part["images"].shape, np.float32)
        return part | {"images": np.rint(np.clip(images, 0, 255)).astype(np.uint8)}
    return np.sign(sum(adversarial_direction(params, config, noisy(), runner) for _ in range(NOISY)))


def shuffled(signs, images, rng):
    """As many pixels up and down in each digit, of its ink and of its background, but which ones at random"""
    out = signs.copy()
    for image, new in zip(images, out):
        for here in image > 0, image == 0:
            new[here] = rng.permutation(new[here])
    return out


def sign_attack(params, digits, config, runner):
    """Accuracy on moved test digits after a step -> {how its signs are chosen: accuracy}"""
    hits, n, rng = {}, 0, affnist.rng_for(config.seed, "evaluation", 8)
    for part in probed_digits(digits, config, "test"):
        n += len(part["labels"])
        for how, signs in (("gradient", adversarial_direction(params, config, part, runner)),
                           ("vote", voted_direction(params, config, part, rng, runner))):
            for name, way in ((how, signs), (f"{how} shuffled", shuffled(signs, part["images"], rng))):
                stepped = np.clip(part["images"] + STEP * way, 0, 255).astype(np.uint8)
                right = affnist.evaluate(params, [part | {"images": stepped}], config, runner)["hits"]
                hits[name] = hits.get(name, 0) + right
    return {name: right / n for name, right in hits.items()}


# ---------------------------------------------------------------- digits that are turned

def rotated(params, digits, config, runner):
    """Accuracy on centerd test digits, turned and no more -> {degrees: accuracy}"""
    def accuracy(turn):
        shown = probed_digits(digits, config, "centered", factors=affnist.REST | {"turn": turn})
        return float(affnist.evaluate(params, shown, config, runner)["accuracy"])
    return {f"{turn:.0f}": accuracy(turn) for turn in TURNS}


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


def ink_centers(images):
    """Where the center of each image's ink lies. images (n, H, W) uint8 -> (n, 2) = (row, column), px"""
    mass = np.maximum(images.sum((1, 2), dtype=np.int64), 1)[:, None]
    sums = [images.sum(3 - axis, dtype=np.int64) @ np.arange(images.shape[axis]) for axis in (1, 2)]
    return np.stack(sums, 1) / mass


def halves(images, labels, rng):
    """The upper half of each image above the lower half of one of another class, if there is one, drawn at random, both
    cut at the center of their ink. images (n, H, W) uint8 -> as many"""
    centers, out = np.rint(ink_centers(images)).astype(int), images.copy()
    for k, label in enumerate(labels):
        others = np.flatnonzero(labels != label)
        other = rng.choice(others) if len(others) else k
        cut = centers[k, 0]
        out[k, cut:] = shifted(images[other], *(centers[k] - centers[other]))[cut:]
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
        images = affnist.translate_digits(strokes_at_random(len(images), rng), SIDES[config.task], max_shift(config), rng)
    return part | {"images": images}


def confidences(params, part, config, runner):
    """How sure the network is that each picture is a digit, higher for surer -> {score: (n,)}"""
    out = runner.forward(params, part, config, decode="longest")
    scores = np.sort(out["scores"].astype(float), 1)
    top, ahead = scores[:, -1], scores[:, -1] - scores[:, -2]
    if config.model not in CAPSULES:
        above = np.log(np.exp(scores - top[:, None]).sum(1))
        return {"probability": np.exp(-above), "log-sum-exp": top + above, "margin": ahead}
    found = {"length": top, "margin": ahead}
    if "recon" in out:
        found["reconstruction"] = -np.square(out["recon"][:, 0] - part["images"] / np.float32(255)).mean((1, 2), dtype=float)
    return found


def auroc(of_digits, of_others):
    """The chance that a digit has a higher score than another picture, ties counting half: the area under the ROC"""
    others = np.sort(of_others)
    below = (np.searchsorted(others, of_digits) + np.searchsorted(others, of_digits, "right")) / 2
    return float(below.mean() / len(others))


def detection(params, digits, config, runner):
    """AUROC of moved test digits against what is no digit, by each score -> {kind: {score: AUROC}}. `little ink`, how
    dark a picture is, needs no network."""
    def scores(parts):
        found = [confidences(params, part, config, runner) | {"little ink": -part["images"].sum((1, 2), dtype=float)}
                 for part in parts]
        return {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    test, rng = list(probed_digits(digits, config, "test")), affnist.rng_for(config.seed, "evaluation", 6)
    real = scores(test)
    return {kind: {name: auroc(real[name], others[name]) for name in real}
            for kind in NO_DIGITS
            for others in [scores([no_digits(part, kind, config, rng) for part in test])]}


# ---------------------------------------------------------------- what capsules know

def linear_probe(params, config, runner):
    """How well the true digit's capsule follows the known factors of 2 N_PROBED moved synthetic digits -> {factor: R^2
    of a linear map of its dimensions, fitted to one half of the digits, on the other half; each class apart, the mean}
    """
    images, labels, factors = affnist.synthesize_digits(2 * N_PROBED, config.seed)
    rng, side = affnist.rng_for(config.seed, "evaluation", 7), SIDES[config.task]
    most = max_shift(config)
    shifts = rng.integers(-most, most + 1, (len(images), 2))
    samples = {"images": affnist.place_digits(images, (side - BOX) // 2 + shifts, side),
               "labels": labels.astype(np.int64)}
    v = runner.forward(params, samples, config)["v"][np.arange(len(labels)), labels].astype(float)   # (n, D)
    known = np.stack([shifts[:, 1], shifts[:, 0], *(factors[name] for name in KNOWN_FACTORS[2:])], 1).astype(float)
    explained = np.zeros((N_CLASSES, len(KNOWN_FACTORS)))
    for digit in range(N_CLASSES):
        X, Y = np.c_[v, np.ones(len(v))][labels == digit], known[labels == digit]
        half = len(X) // 2
        rest = Y[half:] - X[half:] @ np.linalg.lstsq(X[:half], Y[:half], rcond=None)[0]
        explained[digit] = 1 - np.square(rest).sum(0) / np.square(Y[half:] - Y[half:].mean(0)).sum(0)
    return dict(zip(KNOWN_FACTORS, explained.mean(0).tolist()))


# ---------------------------------------------------------------- command line

def probes_of(params, digits, config, runner):
    """-> {probe: what it finds}: sign_attack, rotated, detection and, of capsules, linear_probe"""
    found = {"sign_attack": sign_attack(params, digits, config, runner), "rotated": rotated(params, digits, config, runner),
             "detection": detection(params, digits, config, runner)}
    return found | ({"linear_probe": linear_probe(params, config, runner)} if config.model in CAPSULES else {})


def main():
    parser = affnist.Parser(description=__doc__)
    parser.add_argument("--load", default=str(affnist.WEIGHTS), metavar="FILE", help="the network, from a checkpoint "
                        f"or weights (default weights/{affnist.WEIGHTS.name})")
    affnist.add_config_flags(parser)
    args = parser.parse_args()
    found, config = affnist.load_for_evaluation(args.load, args)
    affnist.check_config(config)
    if config.task != "affnist" or max_shift(config) is None:
        raise InputError(f"--load {args.load}: was trained with --task {config.task} --train-shift "
                         f"{config.train_shift}; the probes need --task affnist and a number of pixels")
    if config.affnist_dir:
        raise InputError("--affnist-dir: the probes do not read affNIST's files; leave it out")
    progress = affnist.Progress(config.quiet)
    digits = affnist.load_digits(config, progress.say)
    with affnist.Runner(config.threads, progress=progress) as runner:
        probes = probes_of(found.weights, digits, config, runner)
    progress.say(f"{config.model}, {DIGIT_NAMES[digits['source']]}")
    for probe, of in probes.items():
        for kind, value in of.items():
            scores = value.items() if isinstance(value, dict) else [("", value)]
            progress.say(f"  {SAYS[probe]} {kind}: " + "  ".join(f"{name} {each:.3f}".strip() for name, each in scores))
    if config.out_json:
        affnist.write_json(config.out_json, affnist.make_result(config, found.weights, found.history, probes) | {
            "source": digits["source"], "history": {}, "loaded": found.file})


if __name__ == "__main__":
    affnist.run_cli(main)
