#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Draw figures of smallnorb_novel_viewpoint.py: training and test views and the EM routing of one matrix-capsnet; with
--results accuracy by azimuth, activity of capsules over blank background, and a forest plot of all results.

    python3 visualize_smallnorb_novel_viewpoint.py --load --results                      # half a minute
    python3 visualize_smallnorb_novel_viewpoint.py --load --only background_activity     # one network: half a minute
    python3 visualize_smallnorb_novel_viewpoint.py --n-epochs 10                         # train one first: 4 minutes
"""
import sys
from dataclasses import dataclass
from pathlib import Path

import smallnorb_novel_viewpoint as norb  # before numpy: it sets the number of BLAS threads
from smallnorb_novel_viewpoint import N_CLASSES, NORB_NAMES, InputError

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from figures import make_outdir, write_figure
from visualize_multimnist_capsnet import draw_training_curves

matplotlib.use("Agg")
matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
                            "image.interpolation": "nearest", "legend.frameon": False})
BLUE, ORANGE, GRAY = "#0072B2", "#E69F00", "#666666"          # Okabe & Ito, color-blind safe
WIDTH = 8                          # inches
EXPERIMENT = "smallnorb_novel_viewpoint"
OUTDIR = Path("viz", EXPERIMENT)
RESULTS = Path(__file__).with_name("results")
WEIGHTS = norb.PRETRAINED[0]        # the pretrained network whose routing is drawn
SWEEP = {                          # networks in the figure of accuracy by azimuth: label, color, line, marker
    "capsnet-shared": ("CapsNet (capsnet-shared)", BLUE, "-", "D"),
    "cnn-gap": ("CNN with GAP (cnn-gap)", "#D55E00", "--", "s"), "nearest": ("nearest training image", GRAY, ":", "x")}
OTHER_TOYS = "+".join(f"toys{toy_seed}-{{split}}" for toy_seed in (2, 3, 4))


def both_splits(label, first, second, key="novel"):
    """Return two rows of the forest plot, one per split; the split replaces {split} in the names of the settings."""
    return [(f"{label}novel {split}s", first.format(split=split), second.format(split=split), key)
            for split in ("azimuth", "elevation")]


FOREST = [                         # rows of render.forest: heading, or label, first setting, second setting, metric
    "Matrix capsules with EM routing (matrix-capsnet) minus a small version of the paper's CNN (cnn)",
    *both_splits("", "paper-{split}/matrix-capsnet", "paper-{split}/cnn"),
    *both_splits("three other sets of toys, ", f"{OTHER_TOYS}/matrix-capsnet", f"{OTHER_TOYS}/cnn"),
    "matrix-capsnet minus that CNN with batch normalization (cnn-bn)",
    *both_splits("", "paper-{split}/matrix-capsnet", "paper-{split}/cnn-bn"),
    "CapsNet with shared matrices (capsnet-shared) minus CNN with GAP (cnn-gap)",
    *both_splits("wide backbone, ", "wide-{split}/capsnet-shared", "wide-{split}/cnn-gap"),
    *both_splits("three other sets of toys, ", f"{OTHER_TOYS}/capsnet-shared", f"{OTHER_TOYS}/cnn-gap"),
    *both_splits("small backbone, ", "heads-{split}/capsnet-shared", "heads-{split}/cnn-gap"),
    "Matrix capsules on the small backbone (matrix-head) minus CNN with GAP (cnn-gap)",
    *both_splits("", "heads-{split}/matrix-head", "heads-{split}/cnn-gap"),
    "Trained and tested with routing (3 iterations; EM 2) minus the same with 1 iteration (uniform)",
    *both_splits("capsnet-shared, ", "heads-{split}/capsnet-shared", "heads-{split}/capsnet-shared-iters-1"),
    *both_splits("matrix-head, ", "heads-{split}/matrix-head", "heads-{split}/matrix-head-iters-1")]


@dataclass(frozen=True)
class Run:
    """A matrix-capsnet and its data, from which the figures are drawn."""
    config: norb.Config
    params: dict
    history: dict
    data: dict                     # of load_data


# ---------------------------------------------------------------- helpers

def new_figure(height, title, note=""):
    fig = Figure((WIDTH, height), layout="constrained")
    fig.suptitle(title, fontsize=11)
    fig.supxlabel(note, fontsize=8, color=GRAY)
    return fig


def nearest_sample(samples, **values):
    """Return the index of the first sample of this label whose azimuth and elevation are nearest to these values."""
    distance = sum((np.abs(samples[name] - value) > 1e-6) * 1e3 * (name == "labels") + np.abs(samples[name] - value)
                   for name, value in values.items())
    return int(np.argmin(distance))


def show_image(ax, image, title="", color=None):
    ax.imshow(image[..., 0], cmap="gray")
    ax.set(xticks=[], yticks=[])
    ax.set_title(title, fontsize=8, pad=3)
    ax.spines[:].set_visible(color is not None)
    for spine in ax.spines.values() if color else ():
        spine.set(color=color, linewidth=2.5)


def preprocess(samples, rows):
    """Return the given rows of the images as network inputs, (n, 32, 32, 2)."""
    return norb.crop_batch(samples["images"], rows)


def shade_ranges(ax, config):
    """Mark the familiar azimuths and the novel azimuths on an axis from 0 to 360 degrees."""
    texts = "familiar azimuths", "novel azimuths"
    for (low, high), color, text in zip(norb.angle_ranges(config), (BLUE, ORANGE), texts):
        for offset in -360, 0, 360:
            left, right = max(0, low + offset), min(360, high + offset)
            if left < right:
                ax.axvspan(left, right, color=color, alpha=0.1, linewidth=0)
                if right - left > 50:
                    ax.text((left + right) / 2, 1.02, text, ha="center", fontsize=8, color=GRAY,
                            transform=ax.get_xaxis_transform())


# ---------------------------------------------------------------- figures of one network

def draw_example_views(run, n=4):
    """Draw n training views and n novel test views of each class."""
    fig = new_figure(6.2, "Left (blue): training views. Right (orange): test views of other toys at novel azimuths",
                     "network input: central 32x32 px of the first camera's image; numbers: azimuth")
    axes = fig.subplots(N_CLASSES, 2 * n + 1, width_ratios=[1] * n + [0.3] + [1] * n)
    for (k, j), ax in np.ndenumerate(axes):
        if j == n:
            ax.axis("off")
            continue
        samples, color = (run.data["train"], BLUE) if j < n else (run.data["novel"], ORANGE)
        azimuths, elevations = np.unique(samples["azimuths"]), np.unique(samples["elevations"])
        azimuth = azimuths[np.linspace(0, len(azimuths) - 1, n).astype(int)[j - (n + 1) * (j > n)]]
        row = nearest_sample(samples, labels=k, azimuths=azimuth, elevations=elevations[j % len(elevations)])
        show_image(ax, preprocess(samples, [row])[0], f"{azimuth:.0f}°", color)
        if j == 0:
            ax.set_ylabel(NORB_NAMES[k], rotation=0, ha="right", va="center")
    return fig


def draw_elevation_strip(run, azimuth=340):
    """Draw the first test toy of each class at one azimuth from each elevation, with the network's predictions."""
    elevations = np.unique(run.data["familiar"]["elevations"])
    fig = new_figure(5.4, f"One test toy of each class from every elevation, azimuth {azimuth}°",
                     "blue frame: predicted correctly; orange frame: not, with the predicted class")
    axes = fig.subplots(N_CLASSES, len(elevations), squeeze=False)
    for k in range(N_CLASSES):
        samples = norb.views_of_toy(run.config, k, np.full(len(elevations), azimuth), elevations)
        images = preprocess(samples, np.arange(len(elevations)))
        predicted = norb.forward(run.params, images, run.config)[0]["scores"].argmax(1)
        for ax, image, elevation, label in zip(axes[k], images, samples["elevations"], predicted):
            wrong = f", {NORB_NAMES[label]}" if label != k else ""
            show_image(ax, image, f"{elevation:.0f}°{wrong}", ORANGE if wrong else BLUE)
        axes[k, 0].set_ylabel(NORB_NAMES[k], rotation=0, ha="right", va="center")
    return fig


def draw_em_routing(run, label=2):
    """Draw the activation that each position of the last capsule layer assigns to each class, before and after routing.

    Before routing the assignment probabilities R are uniform; after routing they are those of the last E-step. A map is
    the sum of R times the activation over the capsule types at a position.
    """
    samples = run.data["novel"]
    azimuths = np.unique(samples["azimuths"])
    row = nearest_sample(samples, labels=label, azimuths=azimuths[len(azimuths) // 2])
    image = preprocess(samples, [row])
    out, _ = norb.forward(run.params, image, run.config)
    steps, weight = out["class_steps"], out["conv2_a"][0].reshape(-1, out["conv2_a"].shape[-1])      # (positions, F)
    positions, side = len(weight), int(np.sqrt(len(weight)))
    fig = new_figure(3.6, "EM routing: the capsules at each position are assigned to the classes",
                     f"each map: the {side}x{side} positions of the last capsule layer below the class capsules")
    grid = fig.add_gridspec(2, N_CLASSES + 2, width_ratios=[1.4] + [1] * N_CLASSES + [0.12])
    show_image(fig.add_subplot(grid[:, 0]), image[0], f"{NORB_NAMES[samples['labels'][row]]}, novel azimuth;"
               f"\npredicted: {NORB_NAMES[out['scores'][0].argmax()]}")
    maps = [np.broadcast_to(step.R[0], (N_CLASSES, weight.size)).reshape(N_CLASSES, -1, positions) * weight.T
            for step in (steps[0], steps[-1])]
    maps = [m.sum(1).reshape(N_CLASSES, side, side) for m in maps]
    top = max(m.max() for m in maps)
    for (t, m), text in zip(enumerate(maps), ("before routing", "after routing")):
        for j in range(N_CLASSES):
            ax = fig.add_subplot(grid[t, j + 1])
            heatmap = ax.imshow(m[j], cmap="viridis", vmin=0, vmax=top)
            ax.set(xticks=[], yticks=[])
            ax.set_title(NORB_NAMES[j] if t == 0 else "", fontsize=9)
            ax.set_ylabel(text if j == 0 else "")
    fig.colorbar(heatmap, cax=fig.add_subplot(grid[:, -1]), label="activation assigned to the class")
    return fig


RECEPTIVE_FIELDS = {"primary": (2, 5), "conv": (4, 9), "conv2": (4, 17)}       # of each capsule layer: stride, size, px


def is_background(images, background, name, tolerance):
    """Return where the receptive fields of a layer contain only background, (n, rows, columns) bool.

    images: (n, 32, 32, C). background: (n, 1, 1, C), from which a background pixel differs by less than the tolerance.
    """
    stride, size = RECEPTIVE_FIELDS[name]
    difference = np.abs(images - background).max(-1)                                           # (n, 32, 32)
    windows = np.lib.stride_tricks.sliding_window_view(difference, (size, size), axis=(1, 2))[:, ::stride, ::stride]
    return windows.max((-1, -2)) < tolerance


def shift_images(images, shifts):
    """Return images, (N, H, W, C), translated by shifts[n] = (down, right) px; pixels that enter are 0.

    shifts: (N, 2) int.
    """
    N, H, W, C = images.shape
    margin = np.abs(shifts).max()
    padded = np.pad(images, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    return np.stack([padded[n, margin - down:, margin - right:][:H, :W] for n, (down, right) in enumerate(shifts)])


def background_activity(params, run, n=2000):
    """Measure the activity of the capsules over blank background, on n familiar test images translated at random.

    Return a dict. "a": {layer: (mean activation where the receptive field contains only background, mean activation
    elsewhere)}, None if there is no such position. "entropy": entropy of the assignment probabilities R over the
    classes in each EM iteration, in nats, weighted by the activations.
    """
    rng, samples = np.random.default_rng(0), run.data["familiar"]
    rows = rng.permutation(len(samples["labels"]))[:n]
    shifts = rng.integers(-3, 4, (len(rows), 2))
    background = norb.standardize(samples["images"][rows])[:, :1, :1]
    images = shift_images(preprocess(samples, rows) - background, shifts) + background       # so that background enters
    outputs = [norb.forward(params, images[k:k + 16], run.config)[0] for k in range(0, len(rows), 16)]
    metrics = {"a": {}, "entropy": []}
    for name in RECEPTIVE_FIELDS:
        a = np.concatenate([out[f"{name}_a"] for out in outputs])                              # (n, H, W, types)
        blank = is_background(images, background, name, 0.02)
        metrics["a"][name] = tuple(float(a[mask].mean()) if mask.any() else None for mask in (blank, ~blank))
    for t in range(len(outputs[0]["class_steps"])):
        total = weight = 0
        for out in outputs:
            R = out["class_steps"][t].R
            R = np.broadcast_to(R / R.sum(1, keepdims=True) if R.shape[1] > 1 else 1 / N_CLASSES,
                                (len(out["a"]), N_CLASSES, R.shape[2]))
            last = out["conv2_a"]
            a = last.reshape(len(last), -1, last.shape[-1]).transpose(0, 2, 1).reshape(len(last), -1)
            total, weight = total - (a * (R * np.log(R + 1e-12)).sum(1)).sum(), weight + a.sum()
        metrics["entropy"].append(float(total / weight))
    return metrics


def activity_before_and_after(run):
    """Return background_activity before and after training, {"before": ..., "after": ...}.

    The untrained network takes its normalization statistics from 64 training images.
    """
    initial, statistics = norb.init_params(run.config), {}
    images = preprocess(run.data["train"], np.arange(0, len(run.data["train"]["labels"]), 37)[:64])
    norb.forward(initial, images, run.config, statistics=statistics)
    return {"before": background_activity(initial | statistics, run), "after": background_activity(run.params, run)}


# ---------------------------------------------------------------- figures of results

def results_of(results, setting):
    """Return the results of all seeds of a setting. Raise InputError if there is none."""
    if of_seeds := list(results.runs(EXPERIMENT, setting).values()):
        return of_seeds
    raise InputError(f"--results: no result of {setting}. Run it first, or give another folder")


def draw_background_activity(activities):
    """Draw the mean activation of capsules over blank background and over the toys.

    activities: a result of activity_before_and_after for each seed. Drawn are the layers that have both kinds of
    positions.
    """
    layers = {"primary": "primary capsules", "conv": "capsules after EM routing"}
    fig = new_figure(3.4, "After training, matrix capsules are more active over blank background than over the toy",
                     f"up to 2,000 test images at familiar azimuths; bars: mean over n = {len(activities)} "
                     f"seed{'s' * (len(activities) > 1)}; dots: one seed each; dotted lines: mean before training")
    ax = fig.subplots()
    for (k, name), (shift, index, color, label) in ((a, b) for a in enumerate(layers) for b in (
            (-0.2, 0, ORANGE, "only background"), (0.2, 1, BLUE, "part of the toy"))):
        before, after = ([each[when]["a"][name][index] for each in activities] for when in ("before", "after"))
        after, before = ([value for value in values if value is not None] or [0] for values in (after, before))
        ax.bar(k + shift, np.mean(after), 0.38, color=color, alpha=0.8, label=label if k == 0 else None)
        ax.plot(np.full(len(after), k + shift), after, "o", color="black", markersize=3)
        ax.hlines(np.mean(before), k + shift - 0.19, k + shift + 0.19, color="black", linestyle=":")
    ax.set_xticks(range(len(layers)), layers.values())
    ax.set(ylim=(0, 1), ylabel="mean activation (0 to 1)")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), title="the receptive field contains", alignment="left")
    return fig


def draw_azimuth_accuracy(results):
    """Draw accuracy by azimuth, mean and 95% CI over seeds. Raise InputError if a setting has no result."""
    fig = new_figure(3.9, "Accuracy on test toys by azimuth: lowest where they show their front or their back\n",
                     "lines: mean over n seeds; bands: 95% CI")
    ax = fig.subplots()
    from render import mean_and_interval
    for model, (label, color, line, marker) in SWEEP.items():
        of_seeds = results_of(results, f"wide-azimuth/{model}")
        rows = [[*each["sweep"]["accuracy"], each["sweep"]["accuracy"][0]] for each in of_seeds]
        mean, half = np.array([mean_and_interval(column) for column in np.transpose(rows)]).T
        x, half = [*of_seeds[0]["sweep"]["angles"], 360], np.nan_to_num(half)
        ax.plot(x, mean, line, marker=marker, color=color, markersize=4,
                label=f"{label}, n = {len(of_seeds)}" * bool(of_seeds[0]["n_params"]) or label)
        ax.fill_between(x, mean - half, mean + half, color=color, alpha=0.15, linewidth=0)
    shade_ranges(ax, norb.Config())
    ax.set(xlabel="azimuth (degrees)", ylabel="accuracy", xlim=(0, 360), ylim=(0, 1.02), xticks=range(0, 361, 30))
    ax.axhline(1 / N_CLASSES, color=GRAY, linewidth=1, linestyle=":")
    ax.text(359, 1 / N_CLASSES + 0.02, "chance", ha="right", fontsize=8, color=GRAY)
    ax.legend(loc="lower center", ncols=3, columnspacing=1, fontsize=8.5)
    ax.grid(alpha=0.3)
    return fig


def draw_familiar_vs_novel(run):
    """Draw the accuracy of each class on familiar and on novel viewpoints, with 95% CIs from the test images."""
    metrics, correct = [], {}
    with norb.Runner(run.config.threads) as runner:
        tests = norb.evaluate_test_sets(run.params, run.data, run.config, runner)
    for name in ("familiar", "novel"):
        labels, hit = run.data[name]["labels"], tests["correct"][name]
        groups = [hit[labels == k] for k in range(N_CLASSES)] + [hit]
        correct[name] = [(group.mean(), *norb.wilson_interval(group.sum(), len(group))) if len(group) else (0, 0, 0)
                         for group in groups]
        metrics.append(f"{name} {tests[name]:.3f}")
    fig = new_figure(3.4, f"Accuracy of {run.config.model}: {', '.join(metrics)}, drop {tests['drop']:.3f}",
                     f"toys that training never shows; error bars: 95% CI from the test images; seed {run.config.seed}")
    ax = fig.subplots()
    for shift, color, (name, values) in zip((-0.2, 0.2), (BLUE, ORANGE), correct.items()):
        mean, low, high = np.array(values).T
        ax.bar(np.arange(len(mean)) + shift, mean, 0.38, yerr=(mean - low, high - mean), color=color, capsize=3,
               label=f"{name} {norb.viewpoint_angle(run.config)}")
    ax.set_xticks(range(N_CLASSES + 1), [*NORB_NAMES, "all classes"])
    ax.set(ylim=(0, 1), ylabel="accuracy")
    ax.axhline(1 / N_CLASSES, color=GRAY, linewidth=1, linestyle=":", label="chance")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def draw_pose_matrices(run, label=2, n=6, elevation=45):
    """Draw the class capsules' pose matrices and activations for one test toy from n azimuths."""
    azimuths = np.linspace(0, 360, n, endpoint=False)
    samples = norb.views_of_toy(run.config, label, azimuths, np.full(n, elevation))
    azimuths, images = samples["azimuths"], preprocess(samples, np.arange(n))
    out, _ = norb.forward(run.params, images, run.config)
    poses, span = out["mu"].reshape(n, N_CLASSES, norb.P, norb.P), np.abs(out["mu"]).max()
    fig = new_figure(6.4, "Pose matrices of the five class capsules while the azimuth of the object changes",
                     "number above a matrix: activation of the capsule; orange: the true class")
    axes = fig.subplots(N_CLASSES + 1, n)
    for k in range(n):
        show_image(axes[0, k], images[k], f"{azimuths[k]:.0f}°")
        for j in range(N_CLASSES):
            shown = axes[j + 1, k].imshow(poses[k, j], cmap="PuOr_r", vmin=-span, vmax=span)
            axes[j + 1, k].set(xticks=[], yticks=[])
            color = ORANGE if j == label else "black"
            axes[j + 1, k].set_title(f"{out['a'][k, j]:.2f}", fontsize=8, pad=2, color=color)
    for j in range(N_CLASSES):
        axes[j + 1, 0].set_ylabel(NORB_NAMES[j], rotation=0, ha="right", va="center")
    axes[0, 0].set_ylabel("input", rotation=0, ha="right", va="center")
    fig.colorbar(shown, ax=axes, shrink=0.6, label="element of the 4x4 pose matrix")
    return fig


NETWORK_FIGURES = {"example_views": draw_example_views, "elevation_strip": draw_elevation_strip,
                   "em_routing": draw_em_routing, "familiar_vs_novel": draw_familiar_vs_novel,
                   "pose_matrices": draw_pose_matrices,
                   "training_curves": draw_training_curves,
                   "background_activity_of_one": lambda run: draw_background_activity([activity_before_and_after(run)])}
RESULT_FIGURES = {"azimuth_accuracy": draw_azimuth_accuracy,
                  "background_activity": lambda results: draw_background_activity([each["background_activity"]
                      for each in results_of(results, "background-activity/matrix-capsnet")])}


# ---------------------------------------------------------------- command line

def draw_results(args, names, say):
    """Draw the named figures of a folder of results. Raise InputError if a result is missing or damaged."""
    sys.path.append(str(RESULTS))
    import render
    if not args.results.is_dir():
        raise InputError(f"--results {args.results}: no such folder. Give the folder that holds the results")
    try:
        results = render.Results(args.results)
    except render.InputError as error:
        raise InputError(str(error)) from None
    for name in names:
        if name == "forest":
            render.forest(results, EXPERIMENT, FOREST, args.outdir / "forest.png", say, "accuracy on novel viewpoints")
        else:
            write_figure(RESULT_FIGURES[name](results), args.outdir / f"{name}.png", say)


def network_to_draw(args, given, say):
    """Load or train the network that the figures show, and its data. Return a Run."""
    network, config = norb.load_for_evaluation(args.load, args) if args.load else (
        None, norb.network_config(given, "matrix-capsnet"))
    if config.model != "matrix-capsnet":
        raise InputError(f"--load {args.load}: the figures show a matrix-capsnet, not a {config.model}. Give another "
                         "file")
    if config.data == "shapes" or config.split != "azimuth" and not args.only:
        raise InputError("--data, --split: the figures show toys at novel azimuths. Leave these flags out")
    norb.check_config(config)
    data = norb.load_data(config, norb.Progress(config.quiet))
    return Run(config, *((network.weights, network.history) if network else norb.train(config, data=data)), data)


def requested_figures(args, given):
    """Return the names of the figures of a network and of the figures of results that the flags ask for."""
    of_network = [f"{args.only}_of_one"] if args.only else [
        "example_views", "elevation_strip", "em_routing", "familiar_vs_novel", "pose_matrices", "training_curves"]
    if not args.results:
        return of_network, []
    if args.load and args.only or given.keys() - {"quiet"} and not args.load:
        raise InputError("--results: these figures show results, not a network. Leave the other flags out")
    return of_network if args.load else [], [args.only] if args.only else [*RESULT_FIGURES, "forest"]


def main():
    parser = norb.Parser(description=__doc__)
    parser.add_argument(
        "--outdir", type=Path, default=OUTDIR, metavar="DIR", help=f"folder for the PNGs (default: {OUTDIR})")
    parser.add_argument("--only", default="", choices=("background_activity",), help="draw only this figure")
    parser.add_argument("--load", nargs="?", default="", const=str(WEIGHTS), metavar="FILE", help="draw the "
                        "matrix-capsnet in FILE, a checkpoint or weights (default: the pretrained network), without "
                        "training")
    parser.add_argument("--results", nargs="?", type=Path, const=RESULTS, metavar="DIR", help="draw the figures of all "
                        "runs in this folder (default: results/) without training")
    norb.add_config_flags(parser)
    args = parser.parse_args()
    given, out_json = norb.given_settings(args), getattr(args, "out_json", "")
    if out_json and (args.only != "background_activity" or args.results):
        raise InputError("--out-json works here only with --only background_activity and without --results. For the "
                         "metrics of a run give it to smallnorb_novel_viewpoint.py")
    norb.check_writable(out_json)
    say = norb.Progress(hasattr(args, "quiet")).say
    of_network, of_results = requested_figures(args, given)
    make_outdir(args.outdir, [*of_network, *of_results])
    run = network_to_draw(args, given, say) if of_network else None
    for name in of_network:
        if out_json:
            activity = activity_before_and_after(run)
            result = norb.make_result(run.config, run.params, run.history, {"background_activity": activity})
            norb.write_json(out_json, result)
            write_figure(draw_background_activity([activity]), args.outdir / f"{name}.png", say)
        else:
            write_figure(NETWORK_FIGURES[name](run), args.outdir / f"{name}.png", say)
    if of_results:
        draw_results(args, of_results, say)


if __name__ == "__main__":
    norb.run_cli(main)
