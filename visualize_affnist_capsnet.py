#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4"]
# ///
"""Draws what affnist_capsnet.py finds out, as PNGs: its digits and what a network redraws, trained here or from --load;
and what all the runs of results/ say, with --results.

    python3 visualize_affnist_capsnet.py --seed 1
    python3 visualize_affnist_capsnet.py --load --results
"""
import sys
from dataclasses import dataclass
from pathlib import Path

import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
from affnist_capsnet import DIGIT_NAMES, N_CLASSES, InputError

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

matplotlib.use("Agg")
matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
                            "image.interpolation": "nearest", "legend.frameon": False})
BLUE, ORANGE, GREEN, GRAY = "#0072B2", "#D55E00", "#009E73", "#666666"      # Okabe & Ito, color-blind safe
WIDTH = 8                          # inches
EXPERIMENT = "affnist_capsnet"
OUTDIR = Path("viz", EXPERIMENT)
RESULTS = affnist.WEIGHTS.parents[1] / "results"
TESTS = {                          # of digits: what is new about them to a network that was trained on moved ones
    "familiar_accuracy": "nothing new:\nmoved digits", "centered_accuracy": "new shapes:\naffine, in the middle",
    "any_position_accuracy": "new places:\nmoved further", "affine_accuracy": "both:\naffine, anywhere"}
PAPERS = {                         # setting -> who is compared there, color, marker
    "matched-accuracy/capsnet": ("the paper's kind of capsules", BLUE, "o"), "matched-accuracy/cnn": ("the paper's kind of CNN", ORANGE, "s"),
    "matched-accuracy/cnn-dense": ("a CNN that pools", GREEN, "^")}


def affine(label, one, other):
    """A line of the forest plot: a difference on affine digits anywhere"""
    return label, one, other, "affine_accuracy"


FOREST = [                         # what render.forest draws
    "The paper's capsules minus its kind of CNN, stopped alike",
    *((test.replace("\n", " "), "matched-accuracy/capsnet", "matched-accuracy/cnn", key) for key, test in list(TESTS.items())[1:]),
    "The same, but after 96,000 digits anywhere",
    *((test.replace("\n", " "), "any-position/capsnet", "any-position/cnn", key) for key, test in (
        ("centered_accuracy", "affine, in the middle"), ("affine_accuracy", "affine, anywhere"))),
    "A CNN that pools minus the paper's capsules, affine anywhere",
    affine("stopped alike", "matched-accuracy/cnn-dense", "matched-accuracy/capsnet"),
    affine("after 96,000 digits", "equal-training/cnn-dense", "equal-training/capsnet"),
    affine("after 96,000 digits anywhere", "any-position/cnn-dense", "any-position/capsnet"),
    "Shared capsules, affine anywhere, minus",
    affine("a CNN that averages", "backbone/capsnet-shared", "backbone/cnn-gap"),
    affine("a CNN that takes the largest", "backbone/capsnet-shared", "backbone/cnn-gmp"),
    affine("vectors that average, no matrices", "backbone/capsnet-shared", "backbone/vector-gap"),
    affine("capsules with a matrix for every place", "backbone/capsnet-shared", "backbone/capsnet-iters-1"),
    "The same, trained on 10 digits of each class",
    affine("a CNN that averages", "few-10/capsnet-shared", "few-10/cnn-gap"),
    affine("a CNN that takes the largest", "few-10/capsnet-shared", "few-10/cnn-gmp"),
    "What each step adds, affine anywhere",
    affine("matrices and places", "components/transformation", "components/start"),
    affine("routing, 3 iterations", "components/routing", "components/transformation"),
    affine("squash", "components/squash", "components/routing"), affine("margin loss", "components/margin", "components/squash"),
    affine("redrawing", "components/reconstruction", "components/margin")]


@dataclass(frozen=True)
class Run:
    """What the figures of a network are drawn from"""
    config: affnist.Config
    weights: dict
    digits: dict                   # load_digits' result
    runner: affnist.Runner


# ---------------------------------------------------------------- helpers

def new_figure(height, title, note):
    fig = Figure((WIDTH, height), layout="constrained")
    fig.suptitle(title, fontsize=11)
    fig.supxlabel(note, fontsize=8, color=GRAY)
    return fig


def show(ax, image, title="", color="black"):
    ax.imshow(image, cmap="gray_r", vmin=0, vmax=1 if image.dtype.kind == "f" else 255)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="#CCCCCC")
    ax.set_title(title, fontsize=8, pad=3, color=color)


def one_of_each(labels):
    """Index of the first sample of each class"""
    if missing := set(range(N_CLASSES)) - set(labels.tolist()):
        raise InputError(f"there is no digit {min(missing)} among the {len(labels)} that were drawn; raise --n-test, "
                         "--n-train")
    return [int(np.flatnonzero(labels == digit)[0]) for digit in range(N_CLASSES)]


def some(run, kind):
    """The first chunk of a stream of digits, one of each class"""
    part = next(affnist.stream_digits(run.digits, run.config, kind))
    rows = one_of_each(part["labels"])
    return {name: array[rows] for name, array in part.items()}


# ---------------------------------------------------------------- figures

def draw_digits(run):
    """Training digits, moved; test digits, moved further, in the middle but transformed, and both"""
    samples = next(affnist.epoch_samples(run.digits, 0, run.config))
    shown = [("trained on", samples["images"][one_of_each(samples["labels"])])]
    kinds = {"any_position": "new places", "centered": "new shapes", "affine": "both: affine"}
    shown += [(words, some(run, kind)["images"]) for kind, words in (
        [("test", "tested on")] if run.config.task == "mnist" else kinds.items())]
    fig = new_figure(0.85 * len(shown) + 0.6, "What networks are trained on, and what they are tested on",
                     DIGIT_NAMES[run.digits["source"]])
    for row, (text, images) in zip(fig.subplots(len(shown), N_CLASSES), shown):
        for ax, image in zip(row, images):
            show(ax, image)
        row[0].set_ylabel(text, rotation=0, ha="right", va="center")
    return fig


def draw_redrawn(run):
    """Test digits, and what the longest capsule makes of them"""
    kinds = [("test", "test")] if run.config.task == "mnist" else [("test", "moved"), ("affine", "affine")]
    fig = new_figure(1.9 * len(kinds) + 0.7, "Test digits, and each redrawn from its longest capsule",
                     f"{DIGIT_NAMES[run.digits['source']]}; {run.config.model}; above the redrawn digit what it was "
                     "named, orange where wrong")
    axes = fig.subplots(2 * len(kinds), N_CLASSES)
    for k, (kind, word) in enumerate(kinds):
        part = some(run, kind)
        out = run.runner.forward(run.weights, part, run.config, decode="longest")
        for j, (image, label) in enumerate(zip(part["images"], part["labels"])):
            named = int(out["scores"][j].argmax())
            show(axes[2 * k, j], image)
            show(axes[2 * k + 1, j], out["recon"][j, 0], f"{named}", "black" if named == label else ORANGE)
        axes[2 * k, 0].set_ylabel(word, rotation=0, ha="right", va="center")
        axes[2 * k + 1, 0].set_ylabel("redrawn", rotation=0, ha="right", va="center")
    return fig


def draw_papers(results):
    """What capsules and CNNs of the paper's kind name right, by what is new about the digits"""
    from render import mean_and_interval
    found = {(setting, key): results.samples(EXPERIMENT, setting, "", key) for setting in PAPERS for key in TESTS}
    if lacking := [setting for (setting, _), values in found.items() if not values]:
        raise InputError(f"--results {results.folder}: no result of {lacking[0]}; make it first")
    most = max(map(len, found.values()))
    fig = new_figure(3.6, "Small networks of the paper's kind, trained on moved digits, stopped alike",
                     f"means and 95% intervals over up to {most} seeds")
    ax = fig.subplots()
    for k, (setting, (label, color, marker)) in enumerate(PAPERS.items()):
        means, halves = zip(*(mean_and_interval(found[setting, key]) for key in TESTS))
        ax.errorbar(np.arange(len(TESTS)) + 0.15 * (k - 1), means, halves if most > 1 else None, color=color,
                    marker=marker, markersize=7, capsize=4, linestyle="none", label=label)
    ax.set_xticks(range(len(TESTS)), TESTS.values(), fontsize=10)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set(ylabel="named right", ylim=(0.5, 1))
    ax.grid(axis="y", alpha=0.3)
    ax.legend(loc="lower left", fontsize=10)
    return fig


def draw_network(args, progress):
    """Its digits and, if it has a decoder, what it redraws"""
    found, config = affnist.load_for_evaluation(args.load, args) if args.load else (None, affnist.config_from_args(args))
    affnist.check_config(config)
    figures = {"digits": draw_digits} | ({"redrawn": draw_redrawn} if config.recon_weight else {})
    affnist.make_outdir(args.outdir, figures)
    digits = affnist.load_digits(config, progress.say)
    weights = found.weights if found else affnist.train(config, data=digits)[0] if config.recon_weight else {}
    with affnist.Runner(config.threads, progress=progress) as runner:
        run = Run(config, weights, digits, runner)
        for name, draw in figures.items():
            affnist.write_figure(draw(run), args.outdir / f"{name}.png", progress.say)


def draw_results(args, say):
    """The figures of a folder of results, as results/render.py reads them"""
    sys.path.append(str(RESULTS))
    import render
    if not args.results.is_dir():
        raise InputError(f"--results {args.results}: no such folder; give the one that holds the results")
    try:
        results = render.Results(args.results)
        affnist.make_outdir(args.outdir, ("papers", "forest"))
        affnist.write_figure(draw_papers(results), args.outdir / "papers.png", say)
        render.forest(results, EXPERIMENT, FOREST, args.outdir / "forest.png", say)
    except (render.InputError, KeyError) as error:
        raise InputError(f"--results {args.results}: {error}") from None


def main():
    parser = affnist.Parser(description=__doc__)
    parser.add_argument(
        "--outdir", type=Path, default=OUTDIR, metavar="DIR", help=f"folder for the PNGs (default {OUTDIR})")
    affnist.add_load_flag(parser, "train nothing: draw what the network redraws")
    parser.add_argument("--results", nargs="?", type=Path, const=RESULTS, metavar="DIR", help="draw what all runs in "
                        "this folder say, the figures papers and forest; without DIR in results/; nothing is trained")
    affnist.add_config_flags(parser)
    args = parser.parse_args()
    for name in "checkpoint", "out_json", "affnist_dir", "eval_split":
        if hasattr(args, name):
            raise InputError(f"{affnist.flag_name(name)}: means nothing here; leave it out")
    progress = affnist.Progress(hasattr(args, "quiet"))
    if args.results and not args.load and (given := affnist.given_settings(args).keys() - {"quiet"}):
        raise InputError(f"{affnist.flag_name(min(given))}: means nothing to --results; leave it out")
    if args.results:
        draw_results(args, progress.say)
    if args.load or not args.results:
        draw_network(args, progress)


if __name__ == "__main__":
    affnist.run_cli(main)
