#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Draw figures of affnist_capsnet.py: training and test digits, reconstructions, perturbations and training curves of
networks; of all results, accuracy at matched validation accuracy and two forest plots.

    python3 visualize_affnist_capsnet.py --load --results      # the pretrained network and all runs: seconds
    python3 visualize_affnist_capsnet.py --seed 1              # train a network first: 3 minutes
    python3 visualize_affnist_capsnet.py --load a.npz b.npz    # networks of your own
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
from affnist_capsnet import data_name
from lab import figures
from lab.figures import (
    BLUE,
    GRAY,
    GREEN,
    RED,
    WRONG,
    Drawing,
    class_names,
    new_figure,
    perturbed_reconstructions,
    short_name,
    show_perturbations,
)
from lab.messages import InputError, flag_name, run_cli
from lab.statistics import proportion_interval

import numpy as np
from matplotlib.ticker import PercentFormatter

EXPERIMENT = "affnist_capsnet"
TESTS = {                          # metric -> how its test digits differ from the training digits
    "familiar_accuracy": "familiar:\ntranslated as in training", "centered_accuracy": "novel shapes:\naffine, centered",
    "any_position_accuracy": "novel positions:\nat any position", "affine_accuracy": "both:\naffine, any position"}
MATCHED = {                        # setting -> network, color, marker
    "matched-accuracy/capsnet": ("CapsNet (capsnet)", BLUE, "o"),
    "matched-accuracy/cnn": ("the paper's MNIST CNN, narrow (cnn)", RED, "s"),
    "matched-accuracy/cnn-64": ("the same, as wide as the CapsNet (cnn-64)", GRAY, "D"),
    "matched-accuracy/cnn-dense": ("CNN with max pooling (cnn-dense)", GREEN, "^")}


LONGEST_NAME = 11                  # letters of a class's name above an image
CONTROLS = {                       # of the small CapsNet: setting -> what it is
    "cnn-dense": "CNN with max pooling (cnn-dense)",
    "cnn": "narrow CNN without pooling (cnn)",
    "cnn-64": "the same, as wide as the CapsNet (cnn-64)"}


def matched(metric):
    """Return rows of a forest plot: the small CapsNet minus each control, matched accuracy."""
    return [(label, "matched-accuracy/capsnet", f"matched-accuracy/{name}", metric)
            for name, label in CONTROLS.items()]


def minus(first, *controls):
    """Return rows of a forest plot, on affine digits at any position.

    first: setting. controls: (label, setting).
    """
    return [(label, first, second, "affine_accuracy") for label, second in controls]


FOREST = [                         # rows of render.forest: heading, or label, settings, metric
    "Small CapsNet minus a CNN of matched accuracy, affine digits at any position",
    *matched("affine_accuracy"),
    "the same, translated digits at any position (only the position is new)",
    *matched("any_position_accuracy"),
    "the same, affine digits at the center (only the shape is new)",
    *matched("centered_accuracy"),
    "Both trained on digits at any position, affine digits at any position",
    ("cnn, matched accuracy", "any-position-matched/capsnet", "any-position-matched/cnn",
     "affine_accuracy"),
    ("cnn, 96,000 digits each", "any-position/capsnet", "any-position/cnn", "affine_accuracy"),
    ("cnn-dense, 96,000 digits each", "any-position/capsnet", "any-position/cnn-dense",
     "affine_accuracy"),
    "the same, affine digits at the center",
    ("cnn, matched accuracy", "any-position-matched/capsnet", "any-position-matched/cnn",
     "centered_accuracy"),
    ("cnn, 96,000 digits each", "any-position/capsnet", "any-position/cnn", "centered_accuracy"),
    "Both trained on 96,000 translated digits, affine digits at any position",
    *minus("equal-training/capsnet", ("cnn-dense", "equal-training/cnn-dense"),
           ("cnn", "equal-training/cnn"))]
ABLATIONS = [                      # rows of render.forest
    "CapsNet with shared matrices, 1 iteration (capsnet-shared) minus a control",
    *minus("backbone/capsnet-shared", ("average-pooled vectors (vector-gap)", "backbone/vector-gap"),
           ("max-pooled vectors (vector-gmp)", "backbone/vector-gmp"),
           ("CNN with GAP (cnn-gap)", "backbone/cnn-gap"),
           ("CNN with GMP (cnn-gmp)", "backbone/cnn-gmp"),
           ("one matrix per position (capsnet, 1 iteration)", "backbone/capsnet-iters-1")),
    "the same, trained on ten digits per class",
    *minus("few-10/capsnet-shared", ("vector-gap", "few-10/vector-gap"),
           ("cnn-gap", "few-10/cnn-gap"), ("cnn-gmp", "few-10/cnn-gmp")),
    "CapsNet with one matrix per position, 3 iterations (capsnet) minus a control",
    *minus("backbone/capsnet", ("the same with 1 iteration", "backbone/capsnet-iters-1"),
           ("vector-gap", "backbone/vector-gap"), ("cnn-gap", "backbone/cnn-gap"),
           ("CNN with a hidden layer (cnn-dense)", "backbone/cnn-dense")),
    "Effect of each part, added one after another to average-pooled vectors",
    *minus("components/transformation",
           ("primary capsules, shared matrices, coordinates", "components/start")),
    *minus("components/routing", ("3 routing iterations", "components/transformation")),
    *minus("components/squash", ("squash", "components/routing")),
    *minus("components/margin", ("margin loss", "components/squash")),
    *minus("components/reconstruction", ("reconstruction", "components/margin"))]


# ---------------------------------------------------------------- helpers

def show_image(ax, image, run, title="", color="black"):
    """Show an image of a run: digits are dark on light, as on paper, any images as they are"""
    if image.ndim == 3:
        image = figures.drawn_channels(image)
    cmap = "gray" if run.config.task == affnist.IMAGES else "gray_r"
    ax.imshow(image, cmap=cmap, vmin=0, vmax=1 if image.dtype.kind == "f" else 255)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="#CCCCCC")
    ax.set_title(title, fontsize=8, pad=3, color=color)


def one_of_each_class(chunks, run):
    """Return the first image of each class, of the first ten at most, as a dict of images and labels. chunks: dicts of
    these, which may be in the order of their classes. A class without an image is left out"""
    found = {}
    for chunk in chunks:
        for label, row in zip(*np.unique(chunk["labels"], return_index=True)):
            found.setdefault(int(label), (chunk["images"][row], label))
        if found.keys() >= set(range(n_shown(run))):
            break
    images, labels = zip(*(found[label] for label in sorted(found)[:n_shown(run)]))
    return {"images": np.stack(images), "labels": np.array(labels)}


def channels_in_words(config):
    """Return what a note says of images whose channels are drawn side by side, "" of others"""
    if config.channels in (1, 3):
        return ""
    return f"\nThe {config.channels} channels of an image are side by side, in gray."


def hide_empty(fig):
    """Hide axes without an image"""
    for ax in (ax for ax in fig.axes if not ax.has_data()):
        ax.axis("off")


def forward(run, samples):
    """Return the outputs of a run's network for a dict of samples, with the longest capsule's reconstruction."""
    with affnist.worker_threads(run.config) as workers:
        return affnist.forward_shards(run.params, samples, run.config, workers, decode="predicted")


def n_shown(run):
    """Return how many classes a figure shows: all, or the first ten"""
    return min(10, run.config.n_classes)


def capsule_of(run):
    """Return what captions call a capsule of the last layer"""
    return figures.words_for(affnist, run.data).capsule


def class_examples(run, kind):
    """Return one test digit of each class, as a dict of images and labels."""
    return one_of_each_class(affnist.stream_digits(run.data, run.config, kind), run)


# ---------------------------------------------------------------- figures

def draw_examples(run):
    """Draw one test digit of each kind and class and, unless the network was trained on other data, one training digit
    of each class."""
    rows = []
    if run.history["source"] == run.data["source"]:
        training = affnist.epoch_samples(run.data, 0, run.config)
        text = "training" if run.config.train_shift == "0" else "training:\ntranslated"
        rows.append((text, one_of_each_class(training, run)))
    tests = {"test": "test"}
    if run.config.task == "affnist":
        tests = {"any_position": "test: at\nany position", "centered": "test: affine,\ncentered",
                 "affine": "test: affine,\nany position"}
    rows += [(text, class_examples(run, kind)) for kind, text in tests.items()]
    title = "Training and test images" if len(rows) > len(tests) else "Test images"
    title += ", one of each class" if run.config.n_classes <= 10 else " of the first ten classes"
    size = "x".join(map(str, rows[-1][1]["images"].shape[1:]))
    note = f"{data_name(run.data['source'])}, {size} px{channels_in_words(run.config)}"
    if run.config.task == "affnist":
        note += "; affine: rotated, sheared and scaled"
    fig = new_figure(0.85 * len(rows) + 0.6, title, note)
    names = [""] * 10 if run.data["source"] in affnist.DIGIT_NAMES else class_names(run.data)
    for axes, (text, samples) in zip(fig.subplots(len(rows), n_shown(run), squeeze=False), rows):
        for ax, image, label in zip(axes, samples["images"], samples["labels"]):
            show_image(ax, image, run, short_name(names[label], LONGEST_NAME))
        axes[0].set_ylabel(text, rotation=0, ha="right", va="center")
    hide_empty(fig)
    return fig


def draw_reconstructions(run):
    """Draw one test digit of each class, and its reconstruction from the longest digit capsule."""
    kinds = [("test", "translated"), ("affine", "affine")] if run.config.task == "affnist" else [("test", "test")]
    fig = new_figure(1.9 * len(kinds) + 0.7,
                     f"Test images and their reconstructions from the longest {capsule_of(run)}",
                     f"{data_name(run.data['source'])}, network {run.config.model}; above a reconstruction "
                     f"is the predicted class (red, ✗: wrong){channels_in_words(run.config)}")
    axes = fig.subplots(2 * len(kinds), n_shown(run))
    names = [short_name(name, LONGEST_NAME) for name in class_names(run.data)]
    for k, (kind, text) in enumerate(kinds):
        samples = class_examples(run, kind)
        out = forward(run, samples)
        for j, (image, label) in enumerate(zip(samples["images"], samples["labels"])):
            predicted = out["scores"][j].argmax()
            show_image(axes[2 * k, j], image, run)
            title, color = (names[predicted], "black") if predicted == label else (f"✗ {names[predicted]}", WRONG)
            show_image(axes[2 * k + 1, j], out["recon"][j, 0], run, title, color)
        axes[2 * k, 0].set_ylabel(text, rotation=0, ha="right", va="center")
        axes[2 * k + 1, 0].set_ylabel("reconstruction", rotation=0, ha="right", va="center")
    hide_empty(fig)
    return fig


def draw_matched_accuracy(results):
    """Draw accuracy on each kind of test digits, of networks with matched validation accuracy.

    Raise InputError if a setting has no result.
    """
    accuracies = {(setting, key): results.samples(EXPERIMENT, setting, "", key) for setting in MATCHED for key in TESTS}
    if missing := [setting for (setting, _), values in accuracies.items() if not values]:
        raise InputError(f"--results {results.folder}: no result of {missing[0]}. Run it first")
    has_interval = max(map(len, accuracies.values())) > 1
    fig = new_figure(3.6, "Small networks, trained on translated digits until 98% of validation digits are correct",
                     "mean and 95% CI over n seeds")
    ax = fig.subplots()
    for k, (setting, (label, color, marker)) in enumerate(MATCHED.items()):
        mean, low, high = np.transpose([proportion_interval(accuracies[setting, key]) for key in TESTS])
        ax.errorbar(np.arange(len(TESTS)) + 0.14 * (k - 1.5), mean, [mean - low, high - mean] if has_interval else None,
                    color=color,
                    marker=marker, markersize=6, capsize=4, linestyle="none",
                    label=f"{label}, n = {len(accuracies[setting, 'affine_accuracy'])}")
    ax.set_xticks(range(len(TESTS)), TESTS.values(), fontsize=10)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set(ylabel="test accuracy", ylim=(0.5, 1))
    ax.grid(axis="y", alpha=0.3)
    ax.legend(loc="lower left", fontsize=10)
    return fig


def draw_perturbation(run):
    """Draw the reconstructions of a translated test digit while each dimension of its digit capsule is changed."""
    samples = class_examples(run, "test")
    out = forward(run, samples)
    correct = np.flatnonzero(out["scores"].argmax(1) == samples["labels"])
    k = correct[0] if len(correct) else 0
    label = samples["labels"][k]
    height = 5.4 if run.config.channels == 2 else 9.2                  # inches; two channels are wide
    fig = new_figure(height, f"Reconstructions of class {class_names(run.data)[label]} while one dimension of its "
                     f"{capsule_of(run)} is changed\n(column: added to the dimension)",
                     f"{data_name(run.data['source'])}, network {run.config.model}{channels_in_words(run.config)}")
    show_perturbations(fig.subplots(), perturbed_reconstructions(
        affnist, run.params, run.config, out["v"][k, label], label))
    return fig


def draw_confusion(run):
    """Draw the confusion matrix of each test set"""
    with affnist.worker_threads(run.config) as workers:
        test = affnist.evaluate_test(run.params, run.data, run.config, workers)
    return figures.draw_confusion({TESTS.get(f"{key}_accuracy", "test images"): one["confusion"]
                                   for key, one in test.items()}, class_names(run.data),
                                  f"Confusion matrices of {run.label}", data_name(run.data["source"]))


def has_decoder(config):
    """Return whether a network reconstructs digits"""
    return bool(config.recon_weight)


FIGURES = {
    "examples": Drawing(draw_examples, "first"),
    "reconstructions": Drawing(draw_reconstructions, applies=has_decoder, lacks="a network without a decoder "
                               "reconstructs nothing"),
    "perturbation": Drawing(draw_perturbation, applies=has_decoder, lacks="a network without a decoder has no "
                            "reconstructions"),
    "training_curves": figures.TRAINING_CURVES, "confusion": Drawing(draw_confusion, default=False)}
OF_RESULTS = {
    "matched_accuracy": draw_matched_accuracy,
    "forest": lambda results: figures.forest(results, EXPERIMENT, FOREST),
    "forest_ablations": lambda results: figures.forest(
        results, EXPERIMENT, ABLATIONS, "accuracy on affine digits at any position")}


@figures.style()
def main():
    args = figures.figure_parser(affnist, __doc__, FIGURES, OF_RESULTS).parse_args()
    for name in "affnist_dir", "eval_split":
        if hasattr(args, name):
            raise InputError(f"{flag_name(name)} has no effect on figures. Leave it out")
    figures.draw(affnist, args, FIGURES, OF_RESULTS, lambda config, progress: affnist.load_data(config))


if __name__ == "__main__":
    run_cli(main)
