#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4"]
# ///
"""Draws what smallnorb_novel_viewpoint.py finds out, as PNGs: what it is about, and how its capsules route, from one
network, `caps`, that is trained here or comes from --load; and what all the runs of results/ say, with --results.

    python3 visualize_smallnorb_novel_viewpoint.py --load --results
"""
import sys
from dataclasses import dataclass
from pathlib import Path

import smallnorb_novel_viewpoint as norb  # before numpy: it sets the number of BLAS threads
from smallnorb_novel_viewpoint import N_CLASSES, NORB_NAMES, InputError

import matplotlib
import numpy as np
from matplotlib.figure import Figure

matplotlib.use("Agg")
matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
                            "image.interpolation": "nearest", "legend.frameon": False})
BLUE, ORANGE, GRAY = "#0072B2", "#E69F00", "#666666"          # Okabe & Ito, color-blind safe
WIDTH = 8                          # inches
EXPERIMENT = "smallnorb_novel_viewpoint"
OUTDIR = Path("viz", EXPERIMENT)
RESULTS = norb.WEIGHTS.parents[1] / "results"
WEIGHTS = norb.WEIGHTS.with_name("smallnorb_matrix-capsnet.npz")        # the network whose routing is drawn
AROUND = {                         # whose accuracy is drawn around the circle: what it is, color, line, marker
    "capsnet-shared": ("vector capsules", BLUE, "-", "D"), "cnn-gap": ("CNN that averages", "#D55E00", "--", "s"),
    "nearest": ("nearest training image", GRAY, ":", "x")}
TOYS_AGAIN = "+".join(f"toys{draw}-{{split}}" for draw in (2, 3, 4))


def both_splits(label, one, other, key="novel"):
    """Two lines of the forest plot; {split} in the names of tables stands for the split"""
    return [(f"{label}new {split}s", one.format(split=split), other.format(split=split), key)
            for split in ("azimuth", "elevation")]


FOREST = [                         # what render.forest draws
    "The paper's matrix capsules minus its kind of CNN",
    *both_splits("", "paper-{split}/matrix-capsnet", "paper-{split}/cnn"),
    *both_splits("that CNN normalized, ", "paper-{split}/matrix-capsnet", "paper-{split}/cnn-bn"),
    *both_splits("three other sets of toys, ", f"{TOYS_AGAIN}/matrix-capsnet", f"{TOYS_AGAIN}/cnn"),
    "Vector capsules minus a CNN that averages",
    *both_splits("wide backbone, ", "wide-{split}/capsnet-shared", "wide-{split}/cnn-gap"),
    *both_splits("three other sets of toys, ", f"{TOYS_AGAIN}/capsnet-shared", f"{TOYS_AGAIN}/cnn-gap"),
    *both_splits("small backbone, ", "heads-{split}/capsnet-shared", "heads-{split}/cnn-gap"),
    "Matrix capsules minus a CNN that averages",
    *both_splits("small backbone, ", "heads-{split}/matrix-head", "heads-{split}/cnn-gap"),
    "With routing minus without (one iteration)",
    *both_splits("dynamic routing, ", "heads-{split}/capsnet-shared", "heads-{split}/capsnet-shared-iters-1"),
    *both_splits("EM routing, ", "heads-{split}/matrix-head", "heads-{split}/matrix-head-iters-1")]


@dataclass(frozen=True)
class Run:
    """What the figures are drawn from"""
    config: norb.Config            # of the capsule network
    params: dict                   # its weights
    history: dict                  # of its training
    data: dict                     # load_data's result


# ---------------------------------------------------------------- helpers

def new_figure(height, title, note=""):
    fig = Figure((WIDTH, height), layout="constrained")
    fig.suptitle(title, fontsize=11)
    fig.supxlabel(note, fontsize=8, color=GRAY)
    return fig


def pick(samples, **wanted):
    """Index of the first sample with these values; the nearest where there is none that equals"""
    distance = sum((np.abs(samples[name] - value) > 1e-6) * 1e3 * (name == "labels") + np.abs(samples[name] - value)
                   for name, value in wanted.items())
    return int(np.argmin(distance))


def show_image(ax, image, title="", color=None):
    ax.imshow(image[..., 0], cmap="gray")
    ax.set(xticks=[], yticks=[])
    ax.set_title(title, fontsize=8, pad=3)
    ax.spines[:].set_visible(color is not None)
    for spine in ax.spines.values() if color else ():
        spine.set(color=color, linewidth=2.5)


def preprocess(samples, rows):
    """Some test images as the network eats them"""
    return norb.crop_batch(samples["images"], rows)


def shade_ranges(ax, config):
    """Mark the azimuths of training and the held-out ones on an axis of 0 to 360 degrees"""
    for (low, high), color, word in zip(norb.angle_ranges(config), (BLUE, ORANGE), ("training views", "held-out views")):
        for turn in -360, 0, 360:
            left, right = max(0, low + turn), min(360, high + turn)
            if left < right:
                ax.axvspan(left, right, color=color, alpha=0.1, linewidth=0)
                if right - left > 50:
                    ax.text((left + right) / 2, 1.02, word, ha="center", fontsize=8, color=color,
                            transform=ax.get_xaxis_transform())


# ---------------------------------------------------------------- figures of one network

def draw_example_views(run, n=4):
    """n training views of each class, and n views that are asked about"""
    fig = new_figure(6.2, "Left: what training shows. Right: other toys, from sides that it never shows",
                     "the middle 32x32 px, as a network sees them; the number is the azimuth in degrees")
    axes = fig.subplots(N_CLASSES, 2 * n + 1, width_ratios=[1] * n + [0.3] + [1] * n)
    for (k, j), ax in np.ndenumerate(axes):
        if j == n:
            ax.axis("off")
            continue
        samples, color = (run.data["train"], BLUE) if j < n else (run.data["novel"], ORANGE)
        azimuths, elevations = np.unique(samples["azimuths"]), np.unique(samples["elevations"])
        azimuth = azimuths[np.linspace(0, len(azimuths) - 1, n).astype(int)[j - (n + 1) * (j > n)]]
        at = pick(samples, labels=k, azimuths=azimuth, elevations=elevations[j % len(elevations)])
        show_image(ax, preprocess(samples, [at])[0], f"{azimuth:.0f}°", color)
        if j == 0:
            ax.set_ylabel(NORB_NAMES[k], rotation=0, ha="right", va="center")
    return fig


def draw_em_routing(run, label=2):
    """Which places vote for which class, before the E-step and after the last; summed over the types of the capsules
    that are there"""
    samples = run.data["novel"]
    azimuths = np.unique(samples["azimuths"])
    at = pick(samples, labels=label, azimuths=azimuths[len(azimuths) // 2])
    image = preprocess(samples, [at])
    out, _ = norb.forward(run.params, image, run.config)
    steps, weight = out["class_steps"], out["conv2_a"][0].reshape(-1, out["conv2_a"].shape[-1])      # (places, F)
    places, side = len(weight), int(np.sqrt(len(weight)))
    fig = new_figure(3.6, "EM routing: every class begins with the same votes, then each place chooses",
                     "4x4 places of the last capsule layer; bright: many active capsules there vote for this class")
    grid = fig.add_gridspec(2, N_CLASSES + 2, width_ratios=[1.3] + [1] * N_CLASSES + [0.12])
    show_image(fig.add_subplot(grid[:, 0]), image[0], f"{NORB_NAMES[samples['labels'][at]]}, a new side;\nnamed "
               f"{NORB_NAMES[out['scores'][0].argmax()]}")
    maps = [np.broadcast_to(step.R[0], (N_CLASSES, weight.size)).reshape(N_CLASSES, -1, places) * weight.T
            for step in (steps[0], steps[-1])]
    maps = [m.sum(1).reshape(N_CLASSES, side, side) for m in maps]
    top = max(m.max() for m in maps)
    for (t, m), word in zip(enumerate(maps), ("before", "after")):
        for j in range(N_CLASSES):
            ax = fig.add_subplot(grid[t, j + 1])
            picture = ax.imshow(m[j], cmap="viridis", vmin=0, vmax=top)
            ax.set(xticks=[], yticks=[])
            ax.set_title(NORB_NAMES[j] if t == 0 else "", fontsize=9)
            ax.set_ylabel(word if j == 0 else "")
    fig.colorbar(picture, cax=fig.add_subplot(grid[:, -1]), label="activation that votes")
    return fig


FIELDS = {"primary": (2, 5), "conv": (4, 9), "conv2": (4, 17)}           # of caps' layers: px between places; px seen


def is_ground(images, ground, name, tolerance):
    """Where a layer's receptive fields hold nothing but ground, up to a tolerance. images (n, 32, 32, C), ground
    (n, 1, 1, C) -> (n, rows, columns) bool"""
    step, size = FIELDS[name]
    far = np.abs(images - ground).max(-1)                                                      # (n, 32, 32)
    fields = np.lib.stride_tricks.sliding_window_view(far, (size, size), axis=(1, 2))[:, ::step, ::step]
    return fields.max((-1, -2)) < tolerance


def shift_images(images, shifts):
    """Move image n by shifts[n] = (down, right) px; what leaves is lost, what enters is 0. (N, H, W, C), (N, 2) ->
    (N, H, W, C)"""
    N, H, W, C = images.shape
    margin = np.abs(shifts).max()
    padded = np.pad(images, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    return np.stack([padded[n, margin - down:, margin - right:][:H, :W] for n, (down, right) in enumerate(shifts)])


def background_activity(params, run, n=2000):
    """How much life there is in the capsules of some weights, over n test images of familiar views, or all that there
    are, shifted at random -> dict: a, {layer: (mean activation at empty places, which see nothing but ground, and at
    others; None where there is no such place)}; entropy of the classes' R in each iteration, nats, weighted by the
    activations"""
    rng, samples = np.random.default_rng(0), run.data["familiar"]
    rows = rng.permutation(len(samples["labels"]))[:n]
    shifts = rng.integers(-3, 4, (len(rows), 2))
    ground = norb.standardize(samples["images"][rows])[:, :1, :1]
    images = shift_images(preprocess(samples, rows) - ground, shifts) + ground                   # the ground moves in
    parts = [norb.forward(params, images[k:k + 16], run.config)[0] for k in range(0, len(rows), 16)]
    found = {"a": {}, "entropy": []}
    for name in FIELDS:
        a = np.concatenate([part[f"{name}_a"] for part in parts])                              # (n, H, W, types)
        empty = is_ground(images, ground, name, 0.02)
        found["a"][name] = tuple(float(a[at].mean()) if at.any() else None for at in (empty, ~empty))
    for t in range(len(parts[0]["class_steps"])):
        total = weight = 0
        for part in parts:
            R = part["class_steps"][t].R
            R = np.broadcast_to(R / R.sum(1, keepdims=True) if R.shape[1] > 1 else 1 / N_CLASSES,
                                (len(part["a"]), N_CLASSES, R.shape[2]))
            last = part["conv2_a"]
            a = last.reshape(len(last), -1, last.shape[-1]).transpose(0, 2, 1).reshape(len(last), -1)
            total, weight = total - (a * (R * np.log(R + 1e-12)).sum(1)).sum(), weight + a.sum()
        found["entropy"].append(float(total / weight))
    return found


def before_and_after(run):
    """background_activity before training, with the statistics of some training images, and after it -> {"before", "after"}"""
    first, statistics = norb.init_params(run.config), {}
    images = preprocess(run.data["train"], np.arange(0, len(run.data["train"]["labels"]), 37)[:64])
    norb.forward(first, images, run.config, statistics=statistics)
    return {"before": background_activity(first | statistics, run), "after": background_activity(run.params, run)}


# ---------------------------------------------------------------- figures of results

def results_of(results, setting):
    """Those of all seeds"""
    if found := list(results.runs(EXPERIMENT, setting).values()):
        return found
    raise InputError(f"--results: no result of {setting}; make it first, or give another folder")


def draw_background_activity(found):
    """How active capsules are whose field shows nothing but ground, and others. found: one of before_and_after for each
    seed; of the layers that have such places"""
    layers = {"primary": "first capsules", "conv": "capsules after EM routing"}
    fig = new_figure(3.4, "Trained matrix capsules that see blank ground are the more active ones",
                     f"2,000 familiar test images; {len(found)} seed{'s' * (len(found) > 1)}, a dot each; "
                     "dotted lines: before training")
    ax = fig.subplots()
    for (k, name), (shift, where, color, word) in ((a, b) for a in enumerate(layers) for b in (
            (-0.2, 0, ORANGE, "sees nothing but blank ground"), (0.2, 1, BLUE, "sees a part of a toy"))):
        before, after = ([each[when]["a"][name][where] for each in found] for when in ("before", "after"))
        after, before = ([value for value in values if value is not None] or [0] for values in (after, before))
        ax.bar(k + shift, np.mean(after), 0.38, color=color, alpha=0.8, label=word if k == 0 else None)
        ax.plot(np.full(len(after), k + shift), after, "o", color="black", markersize=3)
        ax.hlines(np.mean(before), k + shift - 0.19, k + shift + 0.19, color="black", linestyle=":")
    ax.set_xticks(range(len(layers)), layers.values())
    ax.set(ylim=(0, 1), ylabel="mean activation")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def draw_azimuth_accuracy(results):
    fig = new_figure(3.9, "Accuracy around the circle: both lose most where toys turn to the front or the back\n",
                     "toys that training never showed; lines: means over seeds, bands: 95% t intervals")
    ax = fig.subplots()
    from render import mean_and_interval
    for model, (label, color, line, marker) in AROUND.items():
        found = results_of(results, f"wide-azimuth/{model}")
        rows = [[*each["sweep"]["accuracy"], each["sweep"]["accuracy"][0]] for each in found]
        mean, half = np.array([mean_and_interval(column) for column in np.transpose(rows)]).T
        x, half = [*found[0]["sweep"]["angles"], 360], np.nan_to_num(half)
        ax.plot(x, mean, line, marker=marker, color=color, markersize=4,
                label=f"{label}, {len(found)} seeds" * bool(found[0]["n_params"]) or label)
        ax.fill_between(x, mean - half, mean + half, color=color, alpha=0.15, linewidth=0)
    shade_ranges(ax, norb.Config())
    ax.set(xlabel="azimuth, degrees", ylabel="accuracy", xlim=(0, 360), ylim=(0, 1.02), xticks=range(0, 361, 30))
    ax.axhline(1 / N_CLASSES, color=GRAY, linewidth=1, linestyle=":")
    ax.text(359, 1 / N_CLASSES + 0.02, "guessing", ha="right", fontsize=8, color=GRAY)
    ax.legend(loc="lower center", ncols=3)
    ax.grid(alpha=0.3)
    return fig


OF_NETWORK = {"example_views": draw_example_views, "em_routing": draw_em_routing,
              "background_activity_of_one": lambda run: draw_background_activity([before_and_after(run)])}
OF_RESULTS = {"azimuth_accuracy": draw_azimuth_accuracy,
              "background_activity": lambda results: draw_background_activity([each["background_activity"] for each in results_of(results, "background-activity/matrix-capsnet")])}


# ---------------------------------------------------------------- command line

def draw_results(args, wanted, say):
    """The figures of a folder of results, as results/render.py reads them"""
    sys.path.append(str(RESULTS))
    import render
    if not args.results.is_dir():
        raise InputError(f"--results {args.results}: no such folder; give the one that holds the results")
    try:
        results = render.Results(args.results)
    except render.InputError as error:
        raise InputError(str(error)) from None
    for name in wanted:
        if name == "forest":
            render.forest(results, EXPERIMENT, FOREST, args.outdir / "forest.png", say)
        else:
            norb.write_figure(OF_RESULTS[name](results), args.outdir / f"{name}.png", say)


def network_to_draw(args, given, say):
    """Load it, or train it -> Run"""
    found, config = norb.load_for_evaluation(args.load, args) if args.load else (None, norb.network_config(given, "matrix-capsnet"))
    if config.model != "matrix-capsnet":
        raise InputError(f"{args.load}: holds a {config.model} network; the figures need --model matrix-capsnet")
    if config.data == "shapes" or config.split != "azimuth" and not args.only:
        raise InputError("--data, --split: the figures show toys from azimuths that training never did; leave the flag "
                         "out")
    norb.check_config(config)
    data = norb.load_data(config, say)
    return Run(config, *((found.weights, found.history) if found else norb.train(config, data=data)), data)


def wanted_figures(args, given):
    """Names of the figures of a network, and of those of results, that these flags ask for"""
    of_network = [f"{args.only}_of_one"] if args.only else ["example_views", "em_routing"]
    if not args.results:
        return of_network, []
    if args.load and args.only or given.keys() - {"quiet"} and not args.load:
        raise InputError("--results: the figures of results need no network; leave out its flags")
    return of_network if args.load else [], [args.only] if args.only else [*OF_RESULTS, "forest"]


def main():
    parser = norb.Parser(description=__doc__)
    parser.add_argument(
        "--outdir", type=Path, default=OUTDIR, metavar="DIR", help=f"folder for the PNGs (default {OUTDIR})")
    parser.add_argument("--only", default="", choices=("background_activity",), help="draw this figure alone")
    parser.add_argument("--load", nargs="?", default="", const=str(WEIGHTS), metavar="FILE", help="draw the routing of "
                        "the capsule network in this file, a checkpoint or weights; without FILE of the one that comes "
                        "along")
    parser.add_argument("--results", nargs="?", type=Path, const=RESULTS, metavar="DIR", help="draw what all runs in "
                        "this folder say; without DIR in results/; nothing is trained")
    norb.add_config_flags(parser)
    args = parser.parse_args()
    given, out_json = norb.given_settings(args), getattr(args, "out_json", "")
    if out_json and (args.only != "background_activity" or args.results):
        raise InputError("--out-json: results come from smallnorb_novel_viewpoint.py; here it goes with --only "
                         "background_activity alone; leave the flag, or --results, out")
    norb.check_writable(out_json)
    say = norb.Progress(hasattr(args, "quiet")).say
    of_network, of_results = wanted_figures(args, given)
    norb.make_outdir(args.outdir, [*of_network, *of_results])
    run = network_to_draw(args, given, say) if of_network else None
    for name in of_network:
        if out_json:
            found = before_and_after(run)
            norb.write_json(out_json, norb.make_result(run.config, run.params, run.history, {"background_activity": found}))
            norb.write_figure(draw_background_activity([found]), args.outdir / f"{name}.png", say)
        else:
            norb.write_figure(OF_NETWORK[name](run), args.outdir / f"{name}.png", say)
    if of_results:
        draw_results(args, of_results, say)


if __name__ == "__main__":
    norb.run_cli(main)
