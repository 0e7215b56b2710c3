#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Draw figures of a CapsNet for two overlapping digits: reconstructions, coupling coefficients, errors, and a forest
plot of all results. Or classify and reconstruct the two digits in a picture of your own.

    python3 visualize_multimnist_capsnet.py --load                            # the pretrained network: a minute
    python3 visualize_multimnist_capsnet.py --n-epochs 12 --n-train 6000      # train a network first: 3 minutes
    python3 visualize_multimnist_capsnet.py --results                         # all runs in results/: seconds
    python3 visualize_multimnist_capsnet.py --image photo.png                 # a picture of your own: seconds
"""
import dataclasses
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import multimnist_capsnet as capsnet  # before numpy: it sets the number of BLAS threads
from multimnist_capsnet import CANVAS, DIGIT_NAMES, N_CLASSES, InputError

import imageio.v3 as imageio
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from figures import make_outdir, write_figure

matplotlib.use("Agg")
matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
                            "image.interpolation": "nearest", "legend.frameon": False})
BLUE, ORANGE, RED, GRAY = "#0072B2", "#E69F00", "#D55E00", "#666666"             # Okabe & Ito, color-blind safe
TINTS = np.array([[0.1, 0.55, 1], [1, 0.45, 0.05]])        # of the two digits; they add up to white where both have ink
WIDTH = 8                          # inches
EXPERIMENT = "multimnist_capsnet"
OUTDIR = Path("viz", EXPERIMENT)
RESULTS = Path(__file__).with_name("results")
BOTH = "test_exact_match"
FOREST = [                         # rows of render.forest: heading, or label, first setting, second setting, metric
    "CapsNet minus CNN without a decoder (cnn)",
    ("72,000 training pairs", "main/deep", "control/cnn", BOTH),
    ("1.2 million pairs, the paper's protocol", "main/paper-protocol", "control/cnn-paper-protocol", BOTH),
    ("72,000 pairs, half-digit receptive fields", "half-digit/iters-3", "half-digit/cnn", BOTH),
    "CapsNet minus CNN with ten vectors and a decoder (cnn-vectors)",
    ("72,000 training pairs", "main/deep", "control/cnn-vectors", BOTH),
    "CapsNet trained with 3 routing iterations minus CapsNet trained with 1",
    ("72,000 training pairs", "main/deep", "control/iters-1", BOTH),
    ("1.2 million pairs", "main/residual", "control/residual-iters-1", BOTH),
    ("72,000 pairs, half-digit receptive fields", "half-digit/iters-3", "half-digit/iters-1", BOTH),
    "CapsNet trained with 3 iterations: tested with 3 minus tested with 1 (uniform coupling)",
    ("72,000 training pairs", "main/deep", "main-uniform/deep", BOTH),
    ("1.2 million pairs", "weights/residual", "weights/residual", "routing.exact_match.1 vs routing.exact_match.0"),
    ("72,000 pairs, half-digit receptive fields", "half-digit/iters-3", "half-digit-uniform/iters-3", BOTH),
    "CapsNet trained with the reconstruction loss minus CapsNet trained without it",
    ("72,000 training pairs", "main/deep", "control/no-recon", BOTH)]


@dataclass(frozen=True)
class Run:
    """A trained CapsNet and its predictions on the test pairs, from which the figures are drawn."""
    config: capsnet.Config         # settings of the evaluation; its seed draws the test pairs
    trained: capsnet.Config        # settings of the training
    params: dict
    history: dict
    source: str                    # of the test pairs' digits, a key of DIGIT_NAMES
    test_pairs: dict
    lengths: np.ndarray            # lengths of the digit capsules, (n_test, 10)
    correct: np.ndarray            # exact match: both digits are predicted, (n_test,) bool


# ---------------------------------------------------------------- helpers

def new_figure(run, height, title):
    fig = Figure((WIDTH, height), layout="constrained")
    fig.suptitle(title, fontsize=11)
    fig.supxlabel(f"Test pairs of {DIGIT_NAMES[run.source]} (seed {run.config.seed}). CapsNet trained for "
                  f"{len(run.history['epochs'])} epochs of {run.trained.n_train:,} pairs of "
                  f"{DIGIT_NAMES[run.history['source']]} (seed {run.trained.seed}).", fontsize=8, color=GRAY)
    return fig


def show_montage(ax, images, columns, rows, gap=3):
    """Show images, (R, C, h, w, 3) in [0, 1], as one picture with labeled columns and rows."""
    R, C, h, w, _ = images.shape
    step_y, step_x = h + gap, w + gap
    picture = np.ones((R, step_y, C, step_x, 3))
    picture[:, :h, :, :w] = images.transpose(0, 2, 1, 3, 4)
    ax.imshow(picture.reshape(R * step_y, C * step_x, 3)[:-gap, :-gap].clip(0, 1))
    ax.set_xticks(np.arange(C) * step_x + w / 2 - 0.5, columns)
    ax.set_yticks(np.arange(R) * step_y + h / 2 - 0.5, rows)
    ax.tick_params(length=0, labelsize=8, labeltop=True, labelbottom=False)
    ax.spines[:].set_visible(False)


def in_chunks(pairs):
    """Yield a dict of pairs as dicts of at most CHUNK pairs, so that a network's activations fit into memory."""
    for start in range(0, len(pairs["labels"]), capsnet.CHUNK):
        yield {name: array[start:start + capsnet.CHUNK] for name, array in pairs.items()}


def capsule_lengths(params, pairs, config, runner):
    """Return the lengths of the digit capsules for all pairs, (n, 10)."""
    return np.concatenate([runner.forward(params, chunk, config)["lengths"] for chunk in in_chunks(pairs)])


def pair_label(digits):
    return " + ".join(map(str, digits))


# ---------------------------------------------------------------- figures

def draw_reconstructions(run, n=8):
    """Draw n test pairs and the reconstructions from their two longest capsules.

    The capsules are selected without the labels. A reconstruction has the color of the true digit of its class, if the
    pair contains that class.
    """
    n = min(n, len(run.correct))
    labels, predicted = run.test_pairs["labels"][:n], capsnet.top_two(run.lengths[:n])
    swap = (predicted[:, 0] == labels[:, 1]) | (predicted[:, 1] == labels[:, 0])
    predicted[swap] = predicted[swap, ::-1]
    batch = capsnet.to_batch(run.test_pairs, np.arange(n))
    out, _ = capsnet.forward(run.params, batch["images"], run.config, predicted)
    gray = batch["images"][..., None].repeat(3, -1)
    targets, recon = (digits[..., None] * TINTS[:, None, None] for digits in (batch["sources"], out["recon"]))
    fig = new_figure(run, 5.9, "Two overlapping digits, each reconstructed from its own digit capsule\n"
                     "(the first test pairs; red: wrong prediction)")
    ax = fig.subplots()
    show_montage(ax, np.stack([gray, *recon.swapaxes(0, 1), recon.sum(1), targets.sum(1)]),
                 [f"predicted\n{pair_label(predicted[k])}" + f"\ntrue {pair_label(labels[k])}" * (not run.correct[k])
                  for k in range(n)], ["input image", "reconstruction\nof one digit", "reconstruction\nof the other",
                  "both\nreconstructions", "true digits"])
    for k in np.flatnonzero(~run.correct[:n]):
        ax.get_xticklabels()[k].set_color(RED)
    return fig


N_ROUTED = 64                      # test pairs over which the coupling coefficients are averaged


def coupling_coefficients(run):
    """Return the coupling coefficients of N_ROUTED test pairs, correctly classified ones first.

    Return the pairs' batch; c of every routing iteration, (r, N, J, I); and the lengths of the primary capsules,
    (N, J, I), which serve as weights in means of c.
    """
    batch = capsnet.to_batch(run.test_pairs, np.argsort(~run.correct, kind="stable")[:N_ROUTED])
    out, _ = capsnet.forward(run.params, batch["images"], run.config)
    lengths = np.linalg.norm(out["u"], axis=-1)[:, None].repeat(N_CLASSES, 1)
    return batch, np.stack([np.broadcast_to(c, lengths.shape) for c in out["c"]]), lengths


def routing_metrics(run, uniform_lengths):
    """Compute what routing changes, as a dict of the first (uniform) iteration's value and the last iteration's.

    Mean coupling coefficients to the digits in the image and to the other classes, over coupling_coefficients' pairs;
    exact-match accuracy on all test pairs and on the group whose digits hide each other most. uniform_lengths: lengths
    of the digit capsules with uniform coupling, (n_test, 10).
    """
    (batch, c, weight), (_, _, groups) = coupling_coefficients(run), visible_ink(run)
    in_image = capsnet.k_hot(batch["labels"], bool)
    both = capsnet.exact_match(capsnet.top_two(uniform_lengths), run.test_pairs["labels"]), run.correct
    to_digits, to_others = ([float(np.average(step[mask], weights=weight[mask])) for step in c[[0, -1]]]
                            for mask in (in_image, ~in_image))
    return {"coupling_to_digits_there": to_digits, "coupling_to_others": to_others,
            "largest_coupling": float(c[-1].max()), "exact_match": [float(correct.mean()) for correct in both],
            "exact_match_most_hidden": [float(correct[groups == groups.min()].mean()) for correct in both]}


def draw_routing(run, n=3):
    """Draw how the coupling coefficients to n pairs' digits change at each position, relative to uniform coupling.

    All maps share one color scale: separate scales would exaggerate small changes.
    """
    batch, c, weight = coupling_coefficients(run)
    labels, sources, side = batch["labels"], batch["sources"], capsnet.infer_shapes(
        capsnet.backbone(run.config), CANVAS, 1, rows=True).side
    n = min(n, len(labels))
    routed, uniform = ((x * weight).reshape(*weight.shape[:2], side, side, -1).sum(-1) for x in (c[-1], 1 / N_CLASSES))
    change = (routed / uniform - 1)[np.arange(n)[:, None], labels[:n]]                      # (n, 2, side, side)
    span = max(abs(change).max(), 0.01)
    fig = new_figure(run, 3.4, "Routing increases the coupling coefficients to a digit where some of its strokes are")
    axes = fig.subplots(2, 2 * n, squeeze=False)
    for k, (above, below) in enumerate(axes.T):
        pair, which = divmod(k, 2)
        rest = batch["images"][pair] - sources[pair, which]
        above.imshow(sources[pair, which][..., None] * TINTS[which] + 0.4 * rest[..., None])
        above.set_title(f"{labels[pair, which]} in {pair_label(labels[pair])}")
        heatmap = below.imshow(change[pair, which], cmap="PuOr_r", vmin=-span, vmax=span)
        for ax in (above, below):
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(True)
    axes[0, 0].set_ylabel("digit\n(in color)")
    axes[1, 0].set_ylabel("coupling\nto the digit")
    fig.colorbar(heatmap, ax=axes, location="bottom", shrink=0.6, aspect=40, format=PercentFormatter(1, 0),
                 label=f"change of $c_{{ij}}$ at each position after {len(c)} iterations, relative to uniform (1/10)")
    return fig


N_BINS = 8                         # groups of equally many pairs, by visible ink


def visible_ink(run):
    """Compute how much of each digit is visible, and group the test pairs by it.

    Return visible, (n_test, 2), the fraction of each digit's ink that exceeds the other digit's; groups by the smaller
    of a pair's two fractions, for each a tuple (mean fraction, number of correct pairs, number of pairs); and the index
    of each pair's group, (n_test,).
    """
    a, b = (run.test_pairs["sources"].astype(np.float32) / 255).swapaxes(0, 1)
    visible = np.stack([np.maximum(x - y, 0).sum((1, 2)) / x.sum((1, 2)) for x, y in ((a, b), (b, a))], 1)
    smaller = visible.min(1)
    edges = np.unique(np.quantile(smaller, np.linspace(0, 1, N_BINS + 1)))
    index = np.clip(np.searchsorted(edges, smaller, "right") - 1, 0, max(0, len(edges) - 2))
    groups = [(float(smaller[index == k].mean()), int(run.correct[index == k].sum()), int((index == k).sum()))
              for k in np.unique(index)]
    return visible, groups, index


def error_metrics(run):
    """Compute visible ink and exact-match accuracy of the most and the least hidden group of visible_ink."""
    _, groups, _ = visible_ink(run)
    (least, n_correct, size), (most, n_correct_last, size_last) = groups[0], groups[-1]
    return {"groups": len(groups), "most_hidden": [least, n_correct / size],
            "least_hidden": [most, n_correct_last / size_last]}


def draw_errors(run, n=5):
    """Draw exact-match accuracy by visible ink, and the n errors whose missed digit is hidden most."""
    labels, predicted, (visible, groups, _) = run.test_pairs["labels"], capsnet.top_two(run.lengths), visible_ink(run)
    fig = new_figure(run, 4.1, f"Exact-match errors: {1 - run.correct.mean():.1%} of {len(labels):,} test pairs\n")
    left, right = fig.subplots(1, 2, width_ratios=(1, 2.1))
    for fraction, n_correct, size in groups:
        accuracy, (lower, upper) = n_correct / size, capsnet.wilson_interval(n_correct, size)
        left.errorbar(fraction, accuracy, [[accuracy - lower], [upper - accuracy]], fmt="o", color=BLUE)
    left.set(xlabel="visible part of the more hidden digit\n(mean of the group)", ylabel="exact-match accuracy",
             ylim=(None, 1.01), title=f"accuracy with 95% CI, {len(groups)} equal groups")
    left.xaxis.set_major_formatter(PercentFormatter(1, 0))
    left.yaxis.set_major_formatter(PercentFormatter(1))
    left.grid(alpha=0.3)
    missed = np.stack([(labels[:, [k]] != predicted).all(1) for k in (0, 1)], 1)               # (n_test, 2)
    order = [(n_, k) for n_, k in sorted(zip(*np.nonzero(missed)), key=lambda at: visible[at])][:n]
    if not order:
        right.axis("off")
        return fig
    pairs = run.test_pairs
    images = np.array([[pairs["composites"][r], pairs["sources"][r, k], pairs["sources"][r, 1 - k]] for r, k in order])
    titles = [f"predicted\n{pair_label(predicted[r])}\ntrue {pair_label(labels[r])}" for r, _ in order]
    show_montage(right, images.swapaxes(0, 1)[..., None].repeat(3, -1) / 255, titles,
                 ["input image", "missed digit", "other digit"], gap=6)
    right.set_title("errors in which the missed digit is hidden most", color=RED)
    return fig


N_ACTIVATIONS = 6                  # test pairs shown by draw_capsule_activations


def draw_example_pairs(run, n=8):
    """Draw the first test pairs, and the two digits that each was merged from."""
    n = min(n, len(run.correct))
    pairs = run.test_pairs
    images = np.stack([pairs["composites"][:n], *pairs["sources"][:n].swapaxes(0, 1)]) / 255
    fig = new_figure(run, 3.3, "Test pairs: two digits of different classes, translated and merged")
    show_montage(fig.subplots(), images[..., None].repeat(3, -1),
                 [pair_label(labels) for labels in pairs["labels"][:n]], ["input image", "one digit", "the other"])
    return fig


def draw_capsule_activations(run):
    """Draw the lengths of the ten digit capsules for the first test pairs. The title has the hit rates of all test
    pairs: top 1, the longest capsule is one of the two digits; top 2, the two longest are exactly the two digits."""
    n, labels = min(N_ACTIVATIONS, len(run.correct)), run.test_pairs["labels"]
    top1 = (run.lengths.argmax(1)[:, None] == labels).any(1).mean()
    fig = new_figure(run, 3.8, f"Lengths of the ten digit capsules\nof {len(labels):,} test pairs top 1 is correct in "
                     f"{top1:.1%}, top 2 (exact match) in {run.correct.mean():.1%}")
    axes = fig.subplots(2, n, squeeze=False, height_ratios=(1, 1.2))
    for k, (above, below) in enumerate(axes.T):
        above.imshow(run.test_pairs["composites"][k], cmap="gray")
        above.set(xticks=[], yticks=[])
        above.set_title(pair_label(labels[k]), color="black" if run.correct[k] else RED)
        below.bar(range(N_CLASSES), run.lengths[k],
                  color=[ORANGE if j in labels[k] else "#bbbbbb" for j in range(N_CLASSES)])
        below.set(ylim=(0, 1), yticks=[0, 0.5, 1] if k == 0 else [], xlabel="class")
        below.set_xticks(range(N_CLASSES), range(N_CLASSES), fontsize=7)
    axes[0, 0].set_ylabel("test pair\n(red: wrong)")
    axes[1, 0].set_ylabel("capsule length\n(orange: true digits)")
    return fig


PERTURBATIONS = np.linspace(-0.25, 0.25, 11)             # added to one dimension of a capsule, as in the paper's Fig. 4


def perturbed_reconstructions(experiment, params, config, v, label):
    """Reconstruct a digit from its capsule with each dimension perturbed (Sabour et al. 2017, section 5.1, Fig. 4).

    experiment: the module of the network, multimnist_capsnet or affnist_capsnet. v: the capsule of class `label`, (D,).
    Return images, (D, 11, side, side), one row per dimension, one column for each of PERTURBATIONS.
    """
    capsules = v + PERTURBATIONS[:, None, None] * np.eye(len(v), dtype=v.dtype)         # (11, D, D)
    capsules = capsules.swapaxes(0, 1).reshape(-1, 1, len(v)).repeat(N_CLASSES, 1)      # (D * 11, J, D)
    masked, _ = experiment.mask_forward(capsules.astype(v.dtype), np.full((len(capsules), 1), label))
    pixels, _ = experiment.layers_forward(params, masked, experiment.decoder(config))
    side = int(round(pixels.shape[1] ** 0.5))
    return pixels.reshape(len(v), len(PERTURBATIONS), side, side)


def show_perturbations(ax, images):
    """Show perturbed_reconstructions, a row per dimension"""
    show_montage(ax, images[..., None].repeat(3, -1), [f"{step:+.2f}" if step else "0" for step in PERTURBATIONS],
                 [f"dim. {k}" for k in range(1, len(images) + 1)], gap=2)


def draw_perturbation(run):
    """Draw the reconstructions of one digit of a correctly classified test pair while each dimension of its capsule is
    changed."""
    k = int(run.correct.argmax())
    label = run.test_pairs["labels"][k, 0]
    batch = capsnet.to_batch(run.test_pairs, [k])
    out, _ = capsnet.forward(run.params, batch["images"], run.config)
    fig = new_figure(run, 9.2, f"Reconstructions of a {label} while one dimension of its digit capsule is changed\n"
                     "(column: added to the dimension)")
    show_perturbations(fig.subplots(), perturbed_reconstructions(
        capsnet, run.params, run.config, out["v"][0, label], label))
    return fig


CURVES = (                         # panels of training_curves: title, keys of a history's epochs
    ("loss", ("train_loss", "val_loss", "familiar_loss", "novel_loss")),
    ("margin loss", ("train_margin", "val_margin")),
    ("cross-entropy loss", ("train_cross_entropy", "val_cross_entropy")),
    ("reconstruction loss", ("train_recon", "val_recon")),
    ("accuracy", ("train_accuracy", "val_accuracy", "val_exact_match", "familiar", "novel")))
CURVE_STYLES = {"train": ("training", "-"), "val": ("validation", "--"), "familiar": ("familiar test images", "--"),
                "novel": ("novel test images", ":")}
CURVE_COLORS = (BLUE, RED, "#009E73", "#CC79A7", "#000000")


def training_curves(networks):
    """Return a Figure of the loss terms and accuracies of some networks in every epoch of their training.

    networks: {label: history}, at most five, of any of the experiments, each with at least one epoch.
    """
    epochs = {label: history["epochs"] for label, history in networks.items()}
    panels = [(title, keys) for title, keys in CURVES if any(keys[0] in each[0] for each in epochs.values())]
    fig = Figure((WIDTH, 3.1), layout="constrained")
    fig.suptitle("Training curves" + "".join(f" of {label}" for label in epochs if len(epochs) == 1), fontsize=11)
    for ax, (title, keys) in zip(fig.subplots(1, len(panels), squeeze=False)[0], panels):
        for (label, each), color in zip(epochs.items(), CURVE_COLORS):
            for key in (key for key in keys if key in each[0]):
                words, line = CURVE_STYLES[key.split("_")[0]]
                ax.plot([epoch["epoch"] for epoch in each], [epoch[key] for epoch in each], line, color=color,
                        marker="." if len(each) < 30 else None, label=f"{label}, {words}" if len(epochs) > 1 else words)
        ax.set(xlabel="epoch", title=title)
        ax.set_ylim(**{"top": 1} if title == "accuracy" else {"bottom": 0})
        ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return fig


def draw_training_curves(run):
    """Draw the training curves of a run's network, of any experiment."""
    config = getattr(run, "trained", run.config)
    return training_curves({f"{config.model}, preset {config.preset}, seed {config.seed}": run.history})


FIGURES = {draw.__name__.removeprefix("draw_"): draw for draw in (
    draw_example_pairs, draw_capsule_activations, draw_reconstructions, draw_perturbation, draw_routing, draw_errors,
    draw_training_curves)}

# ---------------------------------------------------------------- a picture of your own

WORK_SIDE = 300                    # px; larger pictures are averaged down to this side
MIN_SIDE = 12                      # px
MIN_CONTRAST = 0.12                # between ink and background, where black to white is 1
MIN_SIGNAL = 6                     # contrast of ink in standard deviations of the background's noise
SPECK = 0.03                       # spots with less than this fraction of the largest spot's ink are removed
DIGITS_SPAN = 22                   # px; longer side of both digits' bounding box, chosen on validation pairs
MIN_STROKE = 2.8                   # px; thinner strokes are widened to it; strokes of MNIST pairs are 3.6 px wide
# A prediction has low confidence if the second longest capsule is shorter than MIN_LENGTH or exceeds the third by less
# than MIN_MARGIN. Both were chosen on validation pairs: 12% of these have low confidence, with an exact-match accuracy
# of 0.74 against 0.99 for the others. Low confidence is also reported for 91% of single digits, 95% of pairs of one
# class, 93% of pairs rotated by 90 degrees, 72% of pairs rotated by 180 degrees and 58% of three overlapping digits.
MIN_LENGTH, MIN_MARGIN = 0.8, 0.5
GROUND_FITS, SURFACE = 8, 2        # fits of the background surface; its polynomial degree, for uneven illumination


def read_picture(path):
    """Return the gray levels of a picture file, (h, w) float64 from 0 (black) to 1 (white).

    Larger pictures are averaged down to about WORK_SIDE px. Raise InputError if the file is no readable picture.
    """
    if not Path(path).is_file():
        fault = "is a folder" if Path(path).is_dir() else "no such file"
        raise InputError(f"--image {path}: {fault}. Give a PNG or JPEG file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with imageio.imopen(path, "r", plugin="pillow") as file:
                mode = file.metadata(index=0, exclude_applied=False).get("mode", "")
                plain = mode.startswith(("I", "F"))                          # 16 or 32 bits: RGBA would truncate them
                pixels = np.asarray(file.read(index=0, rotate=True, mode=None if plain else "RGBA"))
    except MemoryError:
        raise
    except Exception as error:                                      # each format's decoder raises its own exceptions
        fault = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
        raise InputError(f"--image {path}: is not a readable picture ({fault}). Give a PNG or JPEG file") from None
    if min(pixels.shape[:2]) < MIN_SIDE:
        size = " x ".join(map(str, pixels.shape[1::-1]))
        raise InputError(f"--image {path}: has {size} px. Give a picture of at least {MIN_SIDE} x {MIN_SIDE} px")
    block = -(-max(pixels.shape[:2]) // WORK_SIDE)
    if plain:
        if not np.isfinite(pixels).all():
            raise InputError(f"--image {path}: contains NaN or infinite values. Give another picture")
        return block_means(pixels[..., None], block)[..., 0].clip(0) / max(1, pixels.max())
    red, green, blue, alpha = np.moveaxis(block_means(pixels, block) / 255, -1, 0)
    gray = 0.299 * red + 0.587 * green + 0.114 * blue
    background = float((gray * alpha).sum() < 0.5 * alpha.sum())                       # white if the ink is dark
    return gray * alpha + background * (1 - alpha)


def block_means(pixels, block):
    """Return the means of blocks of block x block px; incomplete blocks at the edge are dropped.

    pixels: (h, w, C). Return (h // block, w // block, C).
    """
    h, w = (max(1, side // block) for side in pixels.shape[:2])
    blocks = pixels[:h * block, :w * block].reshape(h, -1, w, min(block, pixels.shape[1]), pixels.shape[2])
    return np.stack([blocks[..., k].mean((1, 3), dtype=np.float64) for k in range(pixels.shape[2])], -1)


def find_ink(gray, path):
    """Return the ink of a picture, (h, w) in [0, 1]: the pixels that are darker, or lighter, than the background.

    gray: gray levels, (h, w). The background is a smooth surface fitted to the pixels near it; their residuals give the
    noise. Ink is on the side (darker or lighter) with more total contrast beyond the noise. If no ink stands out, as in
    a tight crop whose background covers less than half of the picture, the fit is repeated from the picture's frame.
    Raise InputError if no ink stands out then either.
    """
    h, w = gray.shape
    y, x = (grid.ravel() for grid in np.mgrid[-1:1:h * 1j, -1:1:w * 1j])
    terms = np.stack([x ** i * y ** j for i in range(SURFACE + 1) for j in range(SURFACE + 1 - i)], 1)
    values = gray.ravel()
    frame = np.concatenate([gray[[0, -1]].ravel(), gray[:, [0, -1]].ravel()])
    for start, quantile, sigmas in (gray, 0.5, 0.6745), (frame, 0.25, 0.3186):         # half of a tight crop may be ink
        residual = np.abs(values - np.median(start))
        near = residual <= np.quantile(residual, quantile)
        for _ in range(GROUND_FITS):
            surface = terms @ np.linalg.lstsq(terms[near], values[near], rcond=None)[0]
            residual = values - surface
            noise = max(np.quantile(np.abs(residual), quantile) / sigmas, 1e-3)
            near = np.abs(residual) <= 2.5 * noise
        darker, lighter = (np.maximum(sign * residual - 3 * noise, 0).sum() for sign in (-1, 1))
        ink = (-residual if darker >= lighter else residual).reshape(h, w)
        strong = ink[ink > max(MIN_CONTRAST, MIN_SIGNAL * noise)]
        if strong.size >= 8:
            break
    else:
        raise InputError(f"--image {path}: no ink stands out from the background. Give a picture of two overlapping "
                         "digits, dark on light or light on dark")
    contrast = (strong ** 5).sum() / (strong ** 4).sum()                    # of the pen, not of ruled lines
    ink = np.clip((ink - 0.3 * contrast) / (0.5 * contrast), 0, 1)
    return without_specks(ink)


def without_specks(ink):
    """Remove spots that are small or that touch the picture's edge, such as a shadow or the table beside the paper.

    Small means less than SPECK of the largest spot's ink. Spots at the edge stay if all large spots are there.
    """
    inked = ink >= 0.5
    spots = np.arange(1, ink.size + 1).reshape(ink.shape) * inked           # labels, spread until each spot has one
    while not np.array_equal(spots, spread := dilate(spots, 1.5) * inked):
        spots = spread
    sizes = np.bincount(spots.ravel())
    sizes[0] = 0
    large = sizes >= SPECK * sizes.max()
    inside = large.copy()
    for edge in spots[[0, -1]], spots[:, [0, -1]]:
        inside[edge] = False
    kept = inside if inside.any() else large
    return ink * dilate(kept[spots].astype(float), 1.5)                     # dilated: a spot's soft edges belong to it


def ink_box(ink):
    """Return the bounding box of the ink: top, bottom, left, right in px."""
    rows, columns = (np.nonzero((ink >= 0.5).any(axis))[0] for axis in (1, 0))
    return rows[0], rows[-1] + 1, columns[0], columns[-1] + 1


def dilate(ink, radius):
    """Return the maximum over a disc around each pixel."""
    reach = int(radius)
    padded, out = np.pad(ink, reach), ink.copy()
    for dy, dx in ((dy, dx) for dy in range(-reach, reach + 1) for dx in range(-reach, reach + 1)):
        if dy * dy + dx * dx <= radius * radius:
            np.maximum(out, padded[reach + dy:reach + dy + len(ink), reach + dx:reach + dx + ink.shape[1]], out=out)
    return out


def to_canvas(ink, span=DIGITS_SPAN):
    """Return ink, (h, w), as an input image of the network, (36, 36) in [0, 1].

    The ink's bounding box is centered, `span` px long on its longer side, and thin strokes are widened. A pixel of the
    canvas is the mean of the ink that falls on it.
    """
    top, bottom, left, right = ink_box(ink)
    scale = span / max(bottom - top, right - left)
    edges = np.hypot(*np.gradient(np.pad(ink, 1)))
    stroke = 2 * ink.sum() / edges.sum()                    # width of a strip: its area divided by half its outline
    if stroke * scale < MIN_STROKE:
        margin = int(np.ceil(MIN_STROKE / scale))
        ink = dilate(np.pad(ink, margin), (MIN_STROKE / scale - stroke) / 2)
        top, bottom, left, right = ink_box(ink)
        scale = span / max(bottom - top, right - left)

    def coverage(low, high, n):
        """Return the fraction of each canvas pixel that each source pixel covers along one axis, (36, n)."""
        start = (np.arange(n) - (low + high) / 2) * scale + CANVAS / 2
        pixel = np.arange(CANVAS)[:, None]
        return np.maximum(np.minimum(start + scale, pixel + 1) - np.maximum(start, pixel), 0)
    canvas = coverage(top, bottom, len(ink)) @ ink @ coverage(left, right, ink.shape[1]).T
    return canvas.clip(0, 1).astype(np.float32)


def draw_picture(network, gray, ink, say):
    """Draw a picture, the two digits that a loaded network predicts from its ink, and their reconstructions."""
    config, image = network.config, to_canvas(ink)
    out, _ = capsnet.forward(network.weights, image[None], config)
    predicted, lengths, recon = out["digits"][0], out["lengths"][0], out["recon"][0]
    (a, b), third = predicted, int(np.argsort(-lengths)[2])
    uncertain = bool(lengths[b] < MIN_LENGTH or lengths[b] - lengths[third] < MIN_MARGIN)
    verdict = "low confidence" if uncertain else "predicted"
    say(f"{verdict}: {a} and {b}; capsule lengths {lengths[a]:.2f} and {lengths[b]:.2f}, next longest {third} with "
        f"{lengths[third]:.2f}")
    if uncertain:
        say("two overlapping digits usually give two capsule lengths near 0.9 and no other long capsule")
    fig = Figure((WIDTH, 4.1), layout="constrained")
    fig.suptitle(f"{verdict.capitalize()}: {a} and {b}" + " (not exactly two long capsules)" * uncertain, fontsize=11)
    fig.supxlabel(f"CapsNet trained for {len(network.history['epochs'])} epochs of {config.n_train:,} pairs of "
                  f"{DIGIT_NAMES[network.source]} (seed {config.seed})", fontsize=8, color=GRAY)
    axes = fig.subplots(2, 3)
    top, bottom, left, right = ink_box(ink)
    axes[0, 0].add_patch(Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, edgecolor=ORANGE))
    pictures = {"picture, bounding box of the ink": gray, f"network input, {CANVAS}x{CANVAS} px": image,
                "both reconstructions": np.einsum("rhw,rc->hwc", recon, TINTS).clip(0, 1),
                f"reconstruction from capsule {a}": recon[0], f"reconstruction from capsule {b}": recon[1]}
    for ax, (title, picture) in zip(axes.flat, pictures.items()):
        ax.imshow(picture, cmap="gray", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[], title=title)
        ax.spines[:].set_visible(False)
    bars = axes[1, 2]
    bars.bar(range(N_CLASSES), lengths, color=[BLUE if j in predicted else "#bbbbbb" for j in range(N_CLASSES)])
    bars.set(ylim=(0, 1), yticks=[0, 0.5, 1], title="lengths of the digit capsules")
    bars.set_xticks(range(N_CLASSES), range(N_CLASSES))
    return fig


# ---------------------------------------------------------------- command line

def figures_of_one_run(args, network, config, say):
    """Evaluate a loaded network, or train one first, report its metrics and draw it; return {file name: Figure}."""
    digits = capsnet.load_digits(config, say)
    params, history = (network.weights, network.history) if network else capsnet.train(config, data=digits)
    test_pairs = capsnet.draw_pairs(digits, "test", config.n_test, config, "evaluation", 1)
    with capsnet.Runner(config.threads, progress=capsnet.Progress(config.quiet)) as runner:
        test = capsnet.evaluate(params, in_chunks(test_pairs), config, runner)
        lengths = capsule_lengths(params, test_pairs, config, runner)
        uniform = capsule_lengths(params, test_pairs, dataclasses.replace(config, routing_iters=1), runner)
    correct = capsnet.exact_match(capsnet.top_two(lengths), test_pairs["labels"])
    trained = network.config if network else config
    run = Run(config, trained, params, history, digits["source"], test_pairs, lengths, correct)
    figures = {f"{name}.png": draw(run) for name, draw in FIGURES.items() if args.only in ("", name)}
    metrics = {"errors": error_metrics(run), "routing": routing_metrics(run, uniform)}
    result = capsnet.test_result(config, params, {**history, "source": digits["source"]}, test, network) | metrics
    capsnet.report(config, result, test, say)
    if config.out_json:
        capsnet.write_json(config.out_json, result)
    return figures


def check_flags(args, network, config):
    """Raise InputError if the network is no CapsNet or if flags exclude each other."""
    if config.model != "capsnet":
        flag, remedy = (f"--load {args.load}", "Give another file") if network else (
            f"--model {config.model}", "Leave --model out")
        raise InputError(f"{flag}: the figures show a capsnet, not a {config.model}. {remedy}")
    alone = "--image" if args.image is not None else "--results" if args.results else ""
    for name in capsnet.given_settings(args) if alone else ():
        if name not in ("quiet", "threads"):
            raise InputError(f"{capsnet.flag_name(name)} has no effect with {alone}. Leave it out")
    if args.image is not None and (args.only or args.results):
        raise InputError("--image draws one figure, of that picture. Leave --only and --results out")
    if args.results and (args.load is not None or args.only):
        raise InputError("--results draws the forest plot of all runs, not one network. Leave --load and --only out")
    if args.results and not args.results.is_dir():
        raise InputError(f"--results {args.results}: no such folder. Give the folder that holds the results")


def main():
    parser = capsnet.Parser(description=__doc__)
    parser.add_argument("--outdir", type=Path, metavar="DIR",
                        help=f"folder for the PNGs (default: {OUTDIR}; with --image the current folder)")
    capsnet.add_load_flag(parser, "draw without training: the network")
    parser.add_argument("--image", metavar="PICTURE", help="classify and reconstruct the two overlapping digits in a "
                        "picture of any size, dark ink on a light background or the reverse, with the network of "
                        "--load (default: the pretrained network); writes PICTURE_digits.png")
    parser.add_argument("--results", nargs="?", type=Path, const=RESULTS, metavar="DIR", help="draw the forest plot of "
                        "all runs in this folder (default: results/) without training")
    parser.add_argument("--only", default="", choices=tuple(FIGURES), help="draw only this figure")
    capsnet.add_config_flags(parser)
    args = parser.parse_args()
    has_image = args.image is not None
    load = str(capsnet.PRETRAINED[0]) if has_image and args.load is None else args.load
    if has_image or args.results:
        check_flags(args, None, capsnet.Config())
    network, config = capsnet.load_for_evaluation(load, args) if load is not None else (
        None, *capsnet.configs_from_args(args))
    capsnet.check_config(config)
    check_flags(args, network, config)
    gray = read_picture(args.image) if has_image else None
    ink = find_ink(gray, args.image) if has_image else None
    outdir = args.outdir or (Path() if has_image else OUTDIR)
    name = f"{Path(args.image).stem}_digits" if has_image else args.only
    make_outdir(outdir, [name] if name else ["forest"] if args.results else FIGURES)
    say = capsnet.Progress(config.quiet).say
    if has_image:
        figures = {f"{name}.png": draw_picture(network, gray, ink, say)}
    elif args.results:
        sys.path.append(str(RESULTS))
        import render
        render.forest(render.Results(args.results), EXPERIMENT, FOREST, outdir / "forest.png", say,
                      "exact-match accuracy on test pairs")
        return
    else:
        figures = figures_of_one_run(args, network, config, say)
    for name, figure in figures.items():
        write_figure(figure, outdir / name, say)


if __name__ == "__main__":
    capsnet.run_cli(main)
