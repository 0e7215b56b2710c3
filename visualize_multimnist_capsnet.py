#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Draw figures of networks for two overlapping digits: example pairs, capsule activations, reconstructions,
perturbations, coupling coefficients, errors and training curves. Or the forest plot of all results; or classify and
reconstruct the two digits in a picture of your own.

    python3 visualize_multimnist_capsnet.py --load                            # the pretrained network: a minute
    python3 visualize_multimnist_capsnet.py --n-epochs 12 --n-train 6000      # train a network first: 3 minutes
    python3 visualize_multimnist_capsnet.py --load a.npz b.npz                # networks of your own
    python3 visualize_multimnist_capsnet.py --results                         # all runs in results/: seconds
    python3 visualize_multimnist_capsnet.py --image photo.png                 # a picture of your own: seconds
"""
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
import multimnist_capsnet as capsnet  # before numpy: it sets the number of BLAS threads
from lab import figures, networks
from lab.data import dilate, find_ink, ink_box, read_picture
from lab.figures import (
    BLUE,
    GRAY,
    ORANGE,
    WIDTH,
    WRONG,
    Drawing,
    class_names,
    label_classes,
    perturbed_reconstructions,
    show_montage,
    show_perturbations,
    write_figure,
)
from lab.files import check_writable, make_outdir, write_json
from lab.messages import InputError, Progress, counted, flag_name, run_cli
from lab.statistics import wilson_interval
from multimnist_capsnet import CANVAS, data_name

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

TINTS = np.array([[0.1, 0.55, 1], [1, 0.45, 0.05]])        # of the two digits; they add up to white where both have ink
EXPERIMENT = "multimnist_capsnet"
BOTH = "test_exact_match"
FOREST = [                         # rows of render.forest: heading, or label, first setting, second setting, metric
    "CapsNet minus CNN without a decoder (cnn)",
    ("72,000 training pairs, CNN with a dense layer", "main/deep", "control/cnn", BOTH),
    ("72,000 training pairs, CNN with GAP", "main/deep", "control/cnn-head-gap", BOTH),
    ("72,000 training pairs, CNN with GAP, tuned", "main/deep", "control/cnn-head-gap-tuned", BOTH),
    ("1.2 million, the paper's protocol, with GAP", "main/paper-protocol", "control/cnn-paper-protocol", BOTH),
    ("72,000, half-digit receptive fields, dense layer", "half-digit/iters-3", "half-digit/cnn", BOTH),
    ("72,000, half-digit receptive fields, GAP", "half-digit/iters-3", "half-digit/cnn-head-gap", BOTH),
    "CapsNet minus ten vectors with the same decoder, 72,000 training pairs",
    ("with ReLU in a CNN (cnn-vectors)", "main/deep", "control/cnn-vectors", BOTH),
    ("with squash and margin loss (vector-dense)", "main/deep", "control/vector-dense", BOTH),
    "CapsNet trained with 3 routing iterations minus CapsNet trained with 1",
    ("72,000 training pairs", "main/deep", "control/iters-1", BOTH),
    ("1.2 million pairs, residual", "main/residual", "control/residual-iters-1", BOTH),
    ("72,000 pairs, classic (the paper's network, narrow)", "main/classic", "control/classic-iters-1", BOTH),
    ("72,000 pairs, half-digit receptive fields", "half-digit/iters-3", "half-digit/iters-1", BOTH),
    ("360,000 pairs, half-digit receptive fields", "half-digit-long/iters-3", "half-digit-long/iters-1", BOTH),
    "CapsNet trained with 3 iterations: tested with 3 minus tested with 1 (uniform coupling)",
    ("72,000 training pairs", "main/deep", "main-uniform/deep", BOTH),
    ("1.2 million pairs, residual", "weights/residual", "weights/residual",
     "routing.exact_match.1 vs routing.exact_match.0"),
    ("72,000 pairs, half-digit receptive fields", "half-digit/iters-3", "half-digit-uniform/iters-3", BOTH),
    "CapsNet trained with the reconstruction loss minus CapsNet trained without it",
    ("72,000 training pairs", "main/deep", "control/no-recon", BOTH)]
OF_RESULTS = {"forest": lambda results: figures.forest(results, EXPERIMENT, FOREST, "exact-match accuracy")}


@dataclass(frozen=True)
class Run(networks.Network):
    """A trained network and its predictions on the test pairs, from which the figures are drawn."""

    @cached_property
    def test_pairs(self):
        """The first N test pairs, a dict"""
        chunks = list(capsnet.stream_pairs(self.data, "test", self.config.n_test, self.config, capsnet.EVALUATION, 1))
        return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}

    @cached_property
    def scores(self):
        """The scores of all classes, (n_test, J)"""
        return self.scores_with(self.config)

    @cached_property
    def activations(self):
        """Lengths of the digit capsules, or probabilities of a CNN, (n_test, J)"""
        return capsnet.class_activations({"scores": self.scores}, self.config)

    def scores_with(self, config):
        """Return the scores as another Config computes them, such as one with another number of routing iterations"""
        starts = range(0, len(self.test_pairs["labels"]), capsnet.CHUNK)        # all activations would fill the memory
        chunks = ({name: array[start:start + capsnet.CHUNK] for name, array in self.test_pairs.items()}
                  for start in starts)
        with capsnet.worker_threads(config) as workers:
            return np.concatenate([capsnet.forward_shards(self.params, chunk, config, workers)["scores"]
                                   for chunk in chunks])

    @cached_property
    def tests(self):
        """What evaluate_test returns"""
        with capsnet.worker_threads(self.config) as workers:
            return capsnet.evaluate_test(self.params, self.data, self.config, workers)

    @cached_property
    def correct(self):
        """Whether both digits are predicted (exact match), (n_test,) bool"""
        return capsnet.exact_match(capsnet.top_two(self.scores), self.test_pairs["labels"])


# ---------------------------------------------------------------- helpers

def new_figure(run, height, title):
    return figures.new_figure(height, title, (
        f"Test pairs of {data_name(run.data['source'])} (seed {run.config.seed}). Network: {run.config.model}, preset "
        f"{run.config.preset}, {counted(len(run.history['epochs']), 'epoch')} of {run.trained.n_train:,} pairs "
        f"of {data_name(run.history['source'])} (seed {run.trained.seed})."))


def short_names(run, classes):
    """Return the names of some classes; long ones are cut"""
    names = (class_names(run.data)[k] for k in classes)
    return [name if len(name) < 10 else f"{name[:8]}\u2026" for name in names]


def words_for(run):
    """Return what captions call what is classified"""
    return figures.words_for(capsnet, run.data)


def pair_label(run, classes, before=""):
    """Return the two classes of a pair as a title, after a word; each long name has a line of its own"""
    a, b = short_names(run, classes)
    space = " " if len(a + b) < 8 else "\n"
    if before:
        before += space
    return f"{before}{a} +{space}{b}"


def prediction_label(run, predicted, labels, correct=False):
    """Return the title of a test pair: the predicted classes and, of a wrong prediction, the true ones"""
    space = "\n\n" if max(map(len, class_names(run.data))) > 1 else "\n"
    return f"predicted\n{pair_label(run, predicted)}" + (space + pair_label(run, labels, "true")) * (not correct)


# ---------------------------------------------------------------- figures

def draw_reconstructions(run, n=8):
    """Draw n test pairs and the reconstructions from their two longest capsules.

    The capsules are selected without the labels. A reconstruction has the color of the true digit of its class, if the
    pair contains that class.
    """
    n = min(n, len(run.correct))
    labels, predicted = run.test_pairs["labels"][:n], capsnet.top_two(run.scores[:n])
    swap = (predicted[:, 0] == labels[:, 1]) | (predicted[:, 1] == labels[:, 0])
    predicted[swap] = predicted[swap, ::-1]
    batch = capsnet.to_batch(run.test_pairs, np.arange(n))
    out, _ = capsnet.forward(run.params, batch["images"], run.config, predicted)
    gray = batch["images"][..., None].repeat(3, -1)
    targets, recon = (digits[..., None] * TINTS[:, None, None] for digits in (batch["sources"], out["recon"]))
    words = words_for(run)
    kind = words.capsule if run.config.model == "capsnet" else "vector"
    fig = new_figure(run, 5.9, f"Two overlapping {words.noun}s, each reconstructed from its own {kind}\n"
                     "(the first test pairs; red: wrong prediction)")
    ax = fig.subplots()
    show_montage(ax, np.stack([gray, *recon.swapaxes(0, 1), recon.sum(1), targets.sum(1)]),
                 [prediction_label(run, predicted[k], labels[k], run.correct[k]) for k in range(n)],
                 ["input image", f"reconstruction\nof one {words.noun}", "reconstruction\nof the other",
                  "both\nreconstructions", f"true {words.noun}s"])
    for k in np.flatnonzero(~run.correct[:n]):
        ax.get_xticklabels()[k].set_color(WRONG)
    return fig


N_ROUTED = 64                      # test pairs over which the coupling coefficients are averaged


def coupling_coefficients(run):
    """Return the coupling coefficients of N_ROUTED test pairs, correctly classified ones first.

    Return the pairs' batch; c of every routing iteration, (r, N, J, I); and the lengths of the primary capsules,
    (N, J, I), which serve as weights in means of c.
    """
    batch = capsnet.to_batch(run.test_pairs, np.argsort(~run.correct, kind="stable")[:N_ROUTED])
    out, _ = capsnet.forward(run.params, batch["images"], run.config)
    lengths = np.linalg.norm(out["u"], axis=-1)[:, None].repeat(run.config.n_classes, 1)
    return batch, np.stack([np.broadcast_to(c, lengths.shape) for c in out["c"]]), lengths


def routing_metrics(run, uniform_scores):
    """Compute what routing changes, as a dict of the first (uniform) iteration's value and the last iteration's.

    Mean coupling coefficients to the digits in the image and to the other classes, over coupling_coefficients' pairs;
    exact-match accuracy on all test pairs and on the group whose digits hide each other most. uniform_scores: scores
    with uniform coupling, (n_test, J).
    """
    (batch, c, weight), (_, _, groups) = coupling_coefficients(run), visible_ink(run)
    in_image = capsnet.k_hot(batch["labels"], bool, run.config.n_classes)
    both = capsnet.exact_match(capsnet.top_two(uniform_scores), run.test_pairs["labels"]), run.correct
    to_digits, to_others = ([float(np.average(step[mask], weights=weight[mask])) for step in c[[0, -1]] if mask.any()]
                            for mask in (in_image, ~in_image))          # of two classes there are no others: []
    return {"coupling_to_digits_there": to_digits, "coupling_to_others": to_others,
            "largest_coupling": float(c[-1].max()), "exact_match": [float(correct.mean()) for correct in both],
            "exact_match_most_hidden": [float(correct[groups == groups.min()].mean()) for correct in both]}


def field_centers(config):
    """Return the coordinates of the centers of the primary capsules' receptive fields, along one axis, (side,), from -1
    to 1 over the image"""
    offset, scale, n = 0.0, 1, CANVAS                  # px: center of the first field; distance of two; their number
    for conv in capsnet.convolutions(config):
        padding = 1 if conv.skip else 0
        n = (n + 2 * padding - conv.K) // conv.stride + 1
        offset, scale = offset + scale * ((conv.K - 1) / 2 - padding), scale * conv.stride
        if conv.pool:
            n, offset, scale = n // 2, offset + scale / 2, 2 * scale
    return (offset + scale * np.arange(n) - (CANVAS - 1) / 2) / (CANVAS / 2)


def square_of_centers(along, side):
    """Return (low, size), in pixels, of the square of an image in which a grid of capsules has the centers of its
    receptive fields, with as much around each center as belongs to it. along: of field_centers. side: of the image."""
    step = (along[-1] - along[0]) / (len(along) - 1) if len(along) > 1 else 2
    return (along[0] - step / 2 + 1) * side / 2 - 0.5, step * len(along) * side / 2


def frame_centers(ax, along, side, color="white"):
    """Draw the square of square_of_centers into an image"""
    low, size = square_of_centers(along, side)
    ax.add_patch(Rectangle((low, low), size, size, fill=False, edgecolor=color, linewidth=1, linestyle=":"))


def draw_routing(run, n=3):
    """Draw how the coupling coefficients to n pairs' digits change at each position, relative to uniform coupling.

    All maps share one color scale: separate scales would exaggerate small changes.
    """
    batch, c, weight = coupling_coefficients(run)
    labels, sources, along = batch["labels"], batch["sources"], field_centers(run.config)
    n, side = min(n, len(labels)), len(along)
    routed, uniform = ((x * weight).reshape(*weight.shape[:2], side, side, -1).sum(-1) for x in (
        c[-1], 1 / run.config.n_classes))
    change = (routed / uniform - 1)[np.arange(n)[:, None], labels[:n]]                      # (n, 2, side, side)
    span = max(abs(change).max(), 0.01)
    words = words_for(run)
    fig = new_figure(run, 3.4, f"Coupling coefficients to the two {words.classes} of a pair at each position, after "
                     "routing")
    axes = fig.subplots(2, 2 * n, squeeze=False)
    for k, (above, below) in enumerate(axes.T):
        pair, which = divmod(k, 2)
        rest = batch["images"][pair] - sources[pair, which]
        above.imshow(sources[pair, which][..., None] * TINTS[which] + 0.4 * rest[..., None])
        frame_centers(above, along, CANVAS)
        above.set_title(pair_label(run, labels[pair], f"{short_names(run, labels[pair])[which]} in"))
        heatmap = below.imshow(change[pair, which], cmap="PuOr_r", vmin=-span, vmax=span)
        for ax in (above, below):
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(True)
    axes[0, 0].set_ylabel(f"{words.noun}\n(in color)")
    axes[1, 0].set_ylabel("coupling\n(dotted square)")
    fig.colorbar(heatmap, ax=axes, location="bottom", shrink=0.6, aspect=40, format=PercentFormatter(1, None),
                 label="change of the coupling coefficient by routing, relative to uniform")
    return fig


N_BINS = 8                         # groups of equally many pairs, by visible ink


def visible_ink(run):
    """Compute how much of each digit is visible, and group the test pairs by it.

    Return visible, (n_test, 2), the fraction of each digit's ink by which the pair exceeds the other digit; groups by
    the smaller of a pair's two fractions, for each a tuple (mean fraction, number of correct pairs, number of pairs);
    and the index of each pair's group, (n_test,).
    """
    a, b = (run.test_pairs["sources"].astype(np.float32) / 255).swapaxes(0, 1)
    pair = run.test_pairs["composites"].astype(np.float32) / 255
    visible = np.stack([(pair - other).sum((1, 2)) / own.sum((1, 2)) for own, other in ((a, b), (b, a))], 1)
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
    labels, predicted, (visible, groups, _) = run.test_pairs["labels"], capsnet.top_two(run.scores), visible_ink(run)
    noun = words_for(run).noun
    height, gap = (4.1, 6) if max(map(len, class_names(run.data))) < 4 else (5.4, 20)   # long names need space
    fig = new_figure(run, height, f"Exact-match errors: {1 - run.correct.mean():.1%} of {len(labels):,} test pairs\n")
    left, right = fig.subplots(1, 2, width_ratios=(1, 2.1))
    for fraction, n_correct, size in groups:
        accuracy, (lower, upper) = n_correct / size, wilson_interval(n_correct, size)
        left.errorbar(fraction, accuracy, [[accuracy - lower], [upper - accuracy]], fmt="o", color=BLUE, clip_on=False)
    left.set(xlabel=f"visible part of the more hidden {noun}\n(mean of the group)", ylabel="exact-match accuracy",
             ylim=(None, 1), title=f"accuracy with 95% CI, {len(groups)} equal groups")
    left.xaxis.set_major_formatter(PercentFormatter(1, 0))
    left.yaxis.set_major_formatter(PercentFormatter(1, 1))
    left.grid(alpha=0.3)
    missed = np.stack([(labels[:, [k]] != predicted).all(1) for k in (0, 1)], 1)               # (n_test, 2)
    order = [(n_, k) for n_, k in sorted(zip(*np.nonzero(missed)), key=lambda at: visible[at])]
    order = order[:n]
    if not order:
        right.axis("off")
        return fig
    pairs = run.test_pairs
    images = np.array([[pairs["composites"][r], pairs["sources"][r, k], pairs["sources"][r, 1 - k]] for r, k in order])
    titles = [prediction_label(run, predicted[r], labels[r]) for r, _ in order]
    show_montage(right, images.swapaxes(0, 1)[..., None].repeat(3, -1) / 255, titles,
                 ["input image", f"missed {noun}", f"other {noun}"], gap=gap)
    right.set_title(f"errors in which the missed {noun} is hidden most", color=WRONG)
    return fig


N_ACTIVATIONS = 6                  # test pairs shown by draw_capsule_activations


def draw_example_pairs(run, n=8):
    """Draw the first test pairs, and the two digits that each was merged from."""
    n = min(n, len(run.correct))
    pairs, noun = run.test_pairs, words_for(run).noun
    images = np.stack([pairs["composites"][:n], *pairs["sources"][:n].swapaxes(0, 1)]) / 255
    fig = new_figure(run, 3.3, f"Test pairs: two {noun}s of different classes, translated and merged")
    show_montage(fig.subplots(), images[..., None].repeat(3, -1),
                 [pair_label(run, labels) for labels in pairs["labels"][:n]],
                 ["input image", f"one {noun}", "the other"])
    return fig


def draw_capsule_activations(run):
    """Draw the lengths of the ten digit capsules for the first test pairs. The title has the hit rates of all test
    pairs: the longest capsule is one of the two digits; the two longest are exactly the two digits."""
    n, labels, J = min(N_ACTIVATIONS, len(run.correct)), run.test_pairs["labels"], run.config.n_classes
    top1 = (run.scores.argmax(1)[:, None] == labels).any(1).mean()
    words = words_for(run)
    what, kind = f"Probabilities of the {J} classes", "probability"
    if has_vectors(run.config):
        what, kind = f"Lengths of the {J} {words.capsule}s", "length"
    turned = 0.07 * (max(map(len, class_names(run.data))) - 1)                      # inches that long names take
    fig = new_figure(run, 3.8 + turned, f"{what}\nof {len(labels):,} test pairs, the largest is correct in {top1:.1%}, "
                     f"the two largest (exact match) in {run.correct.mean():.1%}")
    axes = fig.subplots(2, n, squeeze=False, height_ratios=(1, 1.2))
    for k, (above, below) in enumerate(axes.T):
        above.imshow(run.test_pairs["composites"][k], cmap="gray")
        above.set(xticks=[], yticks=[])
        title, color = (pair_label(run, labels[k]), "black") if run.correct[k] else (
            f"✗ {pair_label(run, labels[k])}", WRONG)
        above.set_title(title, color=color)
        colors = [ORANGE if j in labels[k] else "#bbbbbb" for j in range(J)]
        below.bar(range(J), run.activations[k], color=colors)
        below.set(ylim=(0, 1), yticks=[0, 0.5, 1] if k == 0 else [], xlabel="class")
        label_classes(below, class_names(run.data), 100, turned=True)
    axes[0, 0].set_ylabel("test pair\n(red, ✗: wrong)")
    axes[1, 0].set_ylabel(f"{kind}\n(orange: true {words.classes})")
    return fig


def draw_perturbation(run):
    """Draw the reconstructions of one digit of a correctly classified test pair while each dimension of its capsule is
    changed."""
    k = int(run.correct.argmax())
    label = run.test_pairs["labels"][k, 0]
    batch = capsnet.to_batch(run.test_pairs, [k])
    out, _ = capsnet.forward(run.params, batch["images"], run.config)
    fig = new_figure(run, 9.2, f"Reconstructions of class {class_names(run.data)[label]} while one dimension of "
                     f"its {words_for(run).capsule} is changed\n(column: added to the dimension)")
    show_perturbations(fig.subplots(), perturbed_reconstructions(
        capsnet, run.params, run.config, out["v"][0, label], label))
    return fig


def draw_confusion(run):
    """Draw the confusion matrix of the classes of all test pairs"""
    return figures.draw_confusion(
        {"": run.tests["confusion"]}, class_names(run.data), f"Confusion matrix of {run.label}",
        f"{run.tests['n']:,} test pairs of {data_name(run.data['source'])}.\nWhere both classes of a pair are missed, "
        "each counts half for each of the two that are predicted")


def has_decoder(config):
    """Return whether a network reconstructs digits"""
    return config.model != "cnn"


def has_vectors(config):
    """Return whether a network has class vectors that are squashed"""
    return config.model in ("capsnet", "vector-dense")


def is_capsnet(config):
    """Return whether a network has digit capsules with routing"""
    return config.model == "capsnet"


FIGURES = {
    "example_pairs": Drawing(draw_example_pairs, "first"),
    "capsule_activations": Drawing(draw_capsule_activations),
    "reconstructions": Drawing(draw_reconstructions, applies=has_decoder, lacks="a CNN without a decoder reconstructs "
                               "nothing"),
    "perturbation": Drawing(draw_perturbation, applies=has_vectors, lacks="only squashed class vectors have "
                            "dimensions to perturb"),
    "routing": Drawing(draw_routing, applies=lambda config: config != capsnet.with_uniform_coupling(config),
                       lacks="only a capsnet whose coupling coefficients are not uniform has some to show"),
    "errors": Drawing(draw_errors), "training_curves": figures.TRAINING_CURVES,
    "confusion": Drawing(draw_confusion, default=False)}


# ---------------------------------------------------------------- a picture of your own

DIGITS_SPAN = 22                   # px; longer side of both digits' bounding box, chosen on validation pairs
MIN_STROKE = 2.8                   # px; thinner strokes are widened to it; strokes of MNIST pairs are 3.6 px wide
# A prediction has low confidence if the second longest capsule is shorter than MIN_LENGTH or exceeds the third by less
# than MIN_MARGIN. Both were chosen on validation pairs: 12% of these have low confidence, with an exact-match accuracy
# of 0.74 against 0.99 for the others. Low confidence is also reported for 91% of single digits, 95% of pairs of one
# class, 93% of pairs rotated by 90 degrees, 72% of pairs rotated by 180 degrees and 58% of three overlapping digits.
MIN_LENGTH, MIN_MARGIN = 0.8, 0.5


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
    predicted, lengths, recon = out["digits"][0], out["scores"][0], out["recon"][0]
    (a, b), third = predicted, [int(j) for j in np.argsort(-lengths)[2:3]]              # of two classes there is none
    names = class_names({"names": network.history.get("names"), "n_classes": config.n_classes})
    words = figures.words_for(capsnet, network.history)
    first, second = names[a], names[b]
    is_short = lengths[b] < MIN_LENGTH
    uncertain = bool(is_short or any(lengths[b] - lengths[third] < MIN_MARGIN))
    reason = f"shorter than {MIN_LENGTH}" if is_short else f"less than {MIN_MARGIN} longer than the third"
    verdict = "low confidence" if uncertain else "predicted"
    say(f"{verdict}: {first} and {second}; capsule lengths {lengths[a]:.2f} and {lengths[b]:.2f}"
        + "".join(f", next longest {names[j]} with {lengths[j]:.2f}" for j in third))
    if uncertain:
        say(f"two overlapping {words.noun}s usually give two capsule lengths near 0.9 and no other long capsule")
    fig = Figure((WIDTH, 4.1), layout="constrained")
    why = f" (second longest capsule {reason})" if uncertain else ""
    fig.suptitle(f"{verdict.capitalize()}: {first} and {second}{why}", fontsize=11)
    fig.supxlabel(f"CapsNet trained for {counted(len(network.history['epochs']), 'epoch')} of "
                  f"{config.n_train:,} pairs of {data_name(network.source)} (seed {config.seed})",
                  fontsize=8, color=GRAY)
    axes = fig.subplots(2, 3)
    top, bottom, left, right = ink_box(ink)
    axes[0, 0].add_patch(Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, edgecolor=ORANGE))
    pictures = {"picture, bounding box of the ink": gray, f"network input, {CANVAS}x{CANVAS} px": image,
                "both reconstructions": np.einsum("rhw,rc->hwc", recon, TINTS).clip(0, 1),
                f"reconstruction from capsule {first}": recon[0], f"reconstruction from capsule {second}": recon[1]}
    for ax, (title, picture) in zip(axes.flat, pictures.items()):
        ax.imshow(picture, cmap="gray", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[], title=title)
        ax.spines[:].set_visible(False)
    bars = axes[1, 2]
    J = len(lengths)
    bars.bar(range(J), lengths, color=[BLUE if j in predicted else "#bbbbbb" for j in range(J)])
    bars.set(ylim=(0, 1), yticks=[0, 0.5, 1], title=f"lengths of the {words.capsule}s")
    label_classes(bars, names, 250, fontsize=9, turned=True)
    return fig


# ---------------------------------------------------------------- command line

def write_metrics(run, path):
    """Write the metrics of the test pairs, and those of errors and of routing"""
    state = {"params": {name: run.params[name] for name in capsnet.param_shapes(run.config)},
             "step": run.history["epochs"][-1]["step"], "history": run.history}
    result = capsnet.result_of(run.config, state, run.data, run.tests) | {"errors": error_metrics(run)}
    result |= {"loaded": run.loaded.file} if run.loaded else {}
    if is_capsnet(run.config):
        uniform = capsnet.with_uniform_coupling(run.config)
        result["routing"] = routing_metrics(run, run.scores_with(uniform))
    write_json(path, result)


def draw_image(args):
    """Classify and reconstruct the digits of --image, and draw them."""
    given = [*(name for name in ("only", "results", "out_json") if getattr(args, name)),
             *sorted(capsnet.given_settings(args).keys() - {"quiet"})]
    if given:
        raise InputError(f"{flag_name(given[0])} has no effect with --image, which draws that picture. Leave it out")
    if args.load and len(args.load) > 1:
        raise InputError(f"--load {' '.join(args.load)}: --image shows one network. Give one file")
    network = networks.load_network(capsnet, args.load[0] if args.load else capsnet.PRETRAINED[0])
    if not is_capsnet(network.config):
        raise InputError(f"--load {args.load[0]}: --image needs a capsnet, not a {network.config.model}. Give another "
                         "file")
    try:
        gray = read_picture(args.image)
        ink = find_ink(gray)
    except InputError as error:
        raise InputError(f"--image {args.image}: {error}") from None
    outdir, name = args.outdir or Path(), f"{Path(args.image).stem}_digits"
    say = Progress(getattr(args, "quiet", False)).say
    make_outdir(outdir, [name])
    write_figure(draw_picture(network, gray, ink, say), outdir / f"{name}.png", say)


@figures.style()
def main():
    parser = figures.figure_parser(capsnet, __doc__, FIGURES, OF_RESULTS)
    parser.add_argument("--image", metavar="PICTURE", help="classify and reconstruct the two overlapping digits in a "
                        "picture of any size, dark ink on a light background or the reverse, with the network of "
                        "--load (default: the pretrained network); writes PICTURE_digits.png, by default into the "
                        "current folder")
    parser.add_argument("--out-json", metavar="FILE", help="write the metrics of one network's test pairs, of its "
                        "errors and of its routing to this file; -: print")
    args = parser.parse_args()
    if args.image is not None:
        draw_image(args)
        return
    if args.out_json and (args.results or len(args.load or [0]) > 1 or len(getattr(args, "model", [0])) > 1):
        raise InputError("--out-json writes the metrics of one network. Draw one, or leave --out-json out")
    if args.out_json == "-":
        args.quiet = True
    check_writable(args.out_json)
    runs = figures.draw(capsnet, args, FIGURES, OF_RESULTS, lambda config, progress: capsnet.load_data(config), Run)
    if args.out_json and not runs:
        raise InputError(f"--out-json {args.out_json}: nothing was measured, as no figure was drawn. Draw another")
    if args.out_json:
        write_metrics(runs[0], args.out_json)


if __name__ == "__main__":
    run_cli(main)
