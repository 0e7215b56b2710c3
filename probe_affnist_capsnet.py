#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0"]
# ///
"""Probe a network trained by affnist_capsnet.py: FGSM, rotated digits, images of no digit, linear probes of capsules.

sign_attack: accuracy on translated test digits after a one-step sign attack (FGSM, Goodfellow et al. 2015). Every pixel
changes by 32 gray levels, up or down. The signs are

- "gradient": those of the gradient of (best wrong score - true score) at the digit;
- "vote": those of the majority of 9 noisy copies of the digit, in which the noise has a standard deviation of 32 gray
  levels. Max pooling and ReLUs have kinks where the background is all black, so that the gradient at the digit itself
  describes a step of this size badly;
- "gradient shuffled", "vote shuffled": the control. Each digit keeps its numbers of signs up and down, within its ink
  and within its background, but their positions are random.

rotated: accuracy on centered test digits that are rotated by -60 to 60 degrees.

detection: AUROC of translated test digits against images of no digit, by scores that a network has anyway. For capsules
these are the length of the longest capsule, its difference to the second longest, and the error of its reconstruction;
for a softmax the largest probability, the log-sum-exp of the logits, and the difference of the two largest logits.

linear_probe, of capsules: how well a linear map of the true digit's capsule predicts the factors of synthetic digits.

    python3 probe_affnist_capsnet.py                       # the pretrained network: three minutes on one core
    python3 probe_affnist_capsnet.py --load weights/affnist_cnn-gap.npz --digits mnist --out-json gap.json
"""
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
from affnist_capsnet import BOX, CAPSULES, SIDES, data_name, max_shift
from lab import networks
from lab.files import check_writable, write_json
from lab.messages import InputError, Parser, Progress, run_cli

import numpy as np

N_PROBED = 2000                    # test digits, and images of each kind of non-digits, at most
ROTATIONS = tuple(float(angle) for angle in range(-60, 61, 20))                         # degrees
EPSILON = 32                       # of the sign attack, gray levels of 255
N_NOISY = 9                        # copies of a digit whose gradients vote on the signs
NON_DIGITS = "halves", "strokes", "noise", "blank", "shuffled", "inverted"             # see make_non_digits
KNOWN_FACTORS = "x", "y", "slant", "rotation", "aspect", "stroke"                      # of synthetic digits
# Printed before the scores; {} is the inner key of the result
LABELS = {"sign_attack": f"accuracy after a one-step sign attack (FGSM, epsilon {EPSILON}/255), signs from {{}}",
          "rotated": "accuracy on digits rotated by {} degrees", "linear_probe": "linear probe, R^2 of {}",
          "detection": "AUROC, translated digits against {} (chance 0.5)"}


def probed_digits(data, config, kind, **more):
    """Return chunks of the first test digits, at most N_PROBED of them; arguments as stream_digits'."""
    few = dataclasses.replace(config, n_test=min(config.n_test or N_PROBED, N_PROBED))
    return affnist.stream_digits(data, few, kind, **more)


# ---------------------------------------------------------------- one-step sign attacks

def fold_normalizations(params, config):
    """Return params and config of the same network without batch normalizations and without decoder.

    The running statistics are folded into the kernels before them, so that backward computes the gradient of the
    network that is evaluated.
    """
    plain = dataclasses.replace(config, norm="none", muon=None, recon_weight=0.0, width=affnist.matched_width(config))
    out = dict(params)
    for name in [name.removesuffix("_norm_gamma") for name in params if name.endswith("_norm_gamma")]:
        gamma, beta, mean, variance = (out.pop(f"{name}_norm_{end}") for end in ("gamma", "beta", "mean", "var"))
        scale = gamma / np.sqrt(variance + gamma.dtype.type(affnist.NORM_EPS))
        out[name + "_w"], out[name + "_b"] = params[name + "_w"] * scale, beta - mean * scale
    return {name: out[name] for name in affnist.param_shapes(plain)}, plain


def image_gradient(dscores, cache, config):
    """Return the gradient with respect to the images, (N, side, side), for dscores (N, 10).

    It is the adjoint of im2col_rows and of the padding, applied to convolutions_backward's dx.
    """
    convs_cache, head_cache, _ = cache
    dx = affnist.HEADS[config.model][1](dscores, 0, head_cache, config, {})
    dx = affnist.convolutions_backward(dx, convs_cache, {}, need_dx=True)               # (H-K+1, N, W, K), padded
    rows, N, W, K = dx.shape
    dimages, p = np.zeros((N, rows + K - 1, W), dx.dtype), config.padding
    for k in range(K):
        dimages[:, k:k + rows] += dx[..., k].swapaxes(0, 1)
    return dimages[:, p:W - p, p:W - p]


def adversarial_direction(params, config, samples, workers):
    """Return the signs of the gradient of (best wrong score - true score) for each image, (n, side, side).

    To first order, a step along these signs raises that difference most. It replaces the loss because the margin loss
    of a digit that is classified with confidence is flat: its gradient is zero.
    """
    params, config = fold_normalizations(params, config)

    def signs(rows):
        batch = affnist.to_batch(samples, rows, params["conv1_w"].dtype)
        out, cache = affnist.forward(params, batch["images"], config)
        scores, labels, n = out["scores"].copy(), batch["labels"], np.arange(len(batch["labels"]))
        scores[n, labels] = -np.inf
        dscores = np.zeros_like(out["scores"])
        dscores[n, scores.argmax(1)], dscores[n, labels] = 1, -1
        return np.sign(image_gradient(dscores, cache, config))
    return np.concatenate(list(workers.map(signs, affnist.batches(samples, affnist.SHARD))))


def voted_direction(params, config, samples, rng, workers):
    """Return the signs that most of N_NOISY noisy copies of the images have, (n, side, side); 0 where they are tied."""
    def noisy():
        images = samples["images"] + EPSILON * rng.standard_normal(samples["images"].shape, np.float32)
        return samples | {"images": np.rint(np.clip(images, 0, 255)).astype(np.uint8)}
    return np.sign(sum(adversarial_direction(params, config, noisy(), workers) for _ in range(N_NOISY)))


def shuffle_signs(signs, images, rng):
    """Return the signs of each image permuted at random within its ink and within its background."""
    out = signs.copy()
    for image, permuted in zip(images, out):
        for mask in image > 0, image == 0:
            permuted[mask] = rng.permutation(permuted[mask])
    return out


def sign_attack(params, data, config, workers):
    """Return the accuracy on translated test digits after a one-step sign attack, {source of the signs: accuracy}."""
    hits, n, rng = {}, 0, affnist.rng_for(config.seed, affnist.EVALUATION, 8)
    for samples in probed_digits(data, config, "test"):
        n += len(samples["labels"])
        for key, signs in (("gradient", adversarial_direction(params, config, samples, workers)),
                           ("vote", voted_direction(params, config, samples, rng, workers))):
            for name, direction in ((key, signs), (f"{key} shuffled", shuffle_signs(signs, samples["images"], rng))):
                attacked = np.clip(samples["images"] + EPSILON * direction, 0, 255).astype(np.uint8)
                metrics = affnist.evaluate(params, [samples | {"images": attacked}], config, workers)
                hits[name] = hits.get(name, 0) + metrics["hits"]
    return {name: correct / n for name, correct in hits.items()}


# ---------------------------------------------------------------- rotated digits

def rotated(params, data, config, workers):
    """Return the accuracy on centered test digits that are only rotated, {degrees: accuracy}."""
    def accuracy(angle):
        chunks = probed_digits(data, config, "centered", factors=affnist.IDENTITY | {"rotation": angle})
        return float(affnist.evaluate(params, chunks, config, workers)["accuracy"])
    return {f"{angle:.0f}": accuracy(angle) for angle in ROTATIONS}


# ---------------------------------------------------------------- images of no digit

def draw_strokes(n, rng):
    """Draw n images of two strokes of different synthetic digits, rendered as digits are: (n, 28, 28) uint8."""
    strokes = [(digit, stroke.strip()) for digit, _, glyph in affnist.GLYPHS for stroke in glyph.split("|")]
    images = []
    while len(images) < n:
        (one, first), (other, second) = (strokes[k] for k in rng.integers(len(strokes), size=2))
        if one != other:
            names = set(f"{first} {second}".split())
            points, basis = affnist.stroke_basis(f"{first} | {second}", len(names))
            points = points + 0.1 * rng.normal(0, 0.7, points.shape)
            width = np.exp(rng.normal(0.92, 0.26, 1)).clip(1.2, 4.5)
            dots = (basis @ points)[None] * np.array([0.8, 1.0])
            images.append(affnist.render_strokes(dots, width, rng.uniform(1.0, 1.6, 1), np.ones((1, affnist.DOTS)))[0])
    return np.rint(255 * np.stack(images)).astype(np.uint8)


def translate_image(image, dy, dx):
    """Return an image, (H, W), translated by (dy, dx) whole px; pixels that enter are 0."""
    out, (H, W) = np.zeros_like(image), image.shape
    out[max(0, dy):H + min(0, dy), max(0, dx):W + min(0, dx)] = (
        image[max(0, -dy):H - max(0, dy), max(0, -dx):W - max(0, dx)])
    return out


def ink_centers(images):
    """Return the center of mass of each image's ink, (n, 2) = (row, column), px. images: (n, H, W) uint8."""
    mass = np.maximum(images.sum((1, 2), dtype=np.int64), 1)[:, None]
    sums = [images.sum(3 - axis, dtype=np.int64) @ np.arange(images.shape[axis]) for axis in (1, 2)]
    return np.stack(sums, 1) / mass


def join_halves(images, labels, rng):
    """Replace the lower half of each image by that of a random image of another class, (n, H, W) uint8.

    Both images are cut at the center of mass of their ink, and these centers coincide. Without another class an image
    keeps its own lower half.
    """
    centers, out = np.rint(ink_centers(images)).astype(int), images.copy()
    for k, label in enumerate(labels):
        others = np.flatnonzero(labels != label)
        other = rng.choice(others) if len(others) else k
        cut = centers[k, 0]
        out[k, cut:] = translate_image(images[other], *(centers[k] - centers[other]))[cut:]
    return out


def make_non_digits(samples, kind, config, rng):
    """Return a dict like `samples` with images of no digit, one for each digit.

    kind: "halves" of two digits of different classes; "strokes" of two synthetic digits; uniform "noise"; "blank", all
    background; "shuffled", the digits' pixels in random order; "inverted", the digits in black on white.
    """
    images = samples["images"]
    if kind == "halves":
        images = join_halves(images, samples["labels"], rng)
    elif kind == "noise":
        images = rng.integers(0, 256, images.shape, np.uint8)
    elif kind == "blank":
        images = np.zeros_like(images)
    elif kind == "shuffled":
        images = rng.permuted(images.reshape(len(images), -1), axis=1).reshape(images.shape)
    elif kind == "inverted":
        images = 255 - images
    else:
        images = affnist.translate_digits(draw_strokes(len(images), rng), SIDES[config.task], max_shift(config), rng)
    return samples | {"images": images}


def confidences(params, samples, config, workers):
    """Return a network's confidence that each image is a digit, {score: (n,)}; a higher score is more confident."""
    out = affnist.forward_shards(params, samples, config, workers, decode="predicted")
    scores = np.sort(out["scores"].astype(float), 1)
    top, margin = scores[:, -1], scores[:, -1] - scores[:, -2]
    if config.model not in CAPSULES:
        log_sum = np.log(np.exp(scores - top[:, None]).sum(1))
        return {"probability": np.exp(-log_sum), "log-sum-exp": top + log_sum, "margin": margin}
    confidence = {"length": top, "margin": margin}
    if "recon" in out:
        error = np.square(out["recon"][:, 0] - samples["images"] / np.float32(255)).mean((1, 2), dtype=float)
        confidence["reconstruction"] = -error
    return confidence


def auroc(positives, negatives):
    """Return the area under the ROC curve: the probability that a positive scores above a negative; ties count half."""
    negatives = np.sort(negatives)
    below = (np.searchsorted(negatives, positives) + np.searchsorted(negatives, positives, "right")) / 2
    return float(below.mean() / len(negatives))


def detection(params, data, config, workers):
    """Return the AUROC of translated test digits against images of no digit, {kind: {score: AUROC}}.

    The score "little ink", minus the sum of an image's pixels, is a baseline without a network.
    """
    def scores(chunks):
        found = [confidences(params, chunk, config, workers) | {"little ink": -chunk["images"].sum((1, 2), dtype=float)}
                 for chunk in chunks]
        return {name: np.concatenate([chunk[name] for chunk in found]) for name in found[0]}
    test, rng = list(probed_digits(data, config, "test")), affnist.rng_for(config.seed, affnist.EVALUATION, 6)
    positives = scores(test)
    return {kind: {name: auroc(positives[name], negatives[name]) for name in positives}
            for kind in NON_DIGITS
            for negatives in [scores([make_non_digits(chunk, kind, config, rng) for chunk in test])]}


# ---------------------------------------------------------------- linear probes of capsules

def linear_probe(params, config, workers):
    """Return how well the true digit's capsule predicts the known factors of synthetic digits, {factor: R^2}.

    2 * N_PROBED translated synthetic digits are drawn. For each class, a linear map from the capsule's dimensions to
    the factors is fitted to one half of the digits and R^2 is computed on the other half; the mean over the classes is
    returned.
    """
    images, labels, factors = affnist.synthesize_digits(2 * N_PROBED, config.seed)
    rng, side, most = affnist.rng_for(config.seed, affnist.EVALUATION, 7), SIDES[config.task], max_shift(config)
    shifts = rng.integers(-most, most + 1, (len(images), 2))
    samples = {"images": affnist.place_digits(images, (side - BOX) // 2 + shifts, side),
               "labels": labels.astype(np.int64)}
    v = affnist.forward_shards(params, samples, config, workers)["v"]
    v = v[np.arange(len(labels)), labels].astype(float)                                 # (n, D)
    known = np.stack([shifts[:, 1], shifts[:, 0], *(factors[name] for name in KNOWN_FACTORS[2:])], 1).astype(float)
    r_squared = np.zeros((config.n_classes, len(KNOWN_FACTORS)))
    for digit in range(config.n_classes):
        X, Y = np.c_[v, np.ones(len(v))][labels == digit], known[labels == digit]
        half = len(X) // 2
        residual = Y[half:] - X[half:] @ np.linalg.lstsq(X[:half], Y[:half], rcond=None)[0]
        r_squared[digit] = 1 - np.square(residual).sum(0) / np.square(Y[half:] - Y[half:].mean(0)).sum(0)
    return dict(zip(KNOWN_FACTORS, r_squared.mean(0).tolist()))


# ---------------------------------------------------------------- command line

def run_probes(params, data, config, workers):
    """Return {probe: result}: sign_attack, rotated, detection and, for capsules of digits, linear_probe."""
    results = {probe.__name__: probe(params, data, config, workers) for probe in (sign_attack, rotated, detection)}
    synthetic = config.model in CAPSULES and data["source"] in affnist.DIGIT_NAMES      # which it can be tested on
    return results | ({"linear_probe": linear_probe(params, config, workers)} if synthetic else {})


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--load", default=str(affnist.PRETRAINED[0]), metavar="PLACE",
                        help="the network: a weights file or a run's folder (default: the pretrained "
                        f"weights/{affnist.PRETRAINED[0].name})")
    parser.add_argument("--out-json", metavar="FILE", help="write settings and results to this file; -: print")
    affnist.add_settings(parser)
    args = parser.parse_args()
    trained = networks.load_network(affnist, args.load).config
    if trained.task != "affnist" or max_shift(trained) is None:
        raise InputError(f"--load {args.load}: trained with --task {trained.task} --train-shift {trained.train_shift}; "
                         "the probes need a network trained with --task affnist and a --train-shift in pixels. Give "
                         "such a network; visualize_affnist_capsnet.py draws others")
    loaded, config = networks.load_for_evaluation(affnist, args.load, args)
    if config.affnist_dir:
        raise InputError("--affnist-dir: the probes do not read affNIST's files; leave it out")
    if getattr(args, "n_test", 0) > N_PROBED:
        raise InputError(f"--n-test {args.n_test}: the probes take {N_PROBED} test digits at most. Give fewer")
    check_writable(args.out_json)
    network = networks.make(affnist, args.load, loaded, config, affnist.load_data(config))
    with affnist.worker_threads(config) as workers:
        results = run_probes(network.params, network.data, config, workers)
    say, source = Progress(config.quiet or args.out_json == "-").say, network.data["source"]
    n = min(config.n_test or N_PROBED, N_PROBED, len(network.data["test"][0]))
    say(f"{config.model}, {data_name(source, loaded.source)}, the first {n:,} of the test")
    for probe, result in results.items():
        for key, value in result.items():
            items = value.items() if isinstance(value, dict) else [("", value)]
            say(f"  {LABELS[probe].format(key)}: " + "  ".join(f"{name} {x:.3f}".strip() for name, x in items))
    if args.out_json:
        _, state = affnist.load(args.load)
        write_json(args.out_json, affnist.result_of(config, state, {"source": source}, {}) | results | {
            "history": {}, "loaded": loaded.file})


if __name__ == "__main__":
    run_cli(main)
