#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Draw figures of smallnorb_novel_viewpoint.py, of toys, smallNORB or shapes: training and test views, accuracy on
familiar and novel viewpoints and around the circle, pose matrices, routing and training curves of networks; of all
results, accuracy by azimuth and by distance to the training azimuths, and two forest plots.

    python3 visualize_smallnorb_novel_viewpoint.py --load --results        # the pretrained networks: half a minute
    python3 visualize_smallnorb_novel_viewpoint.py                         # train the default networks: 4 minutes
    python3 visualize_smallnorb_novel_viewpoint.py --data shapes           # the same for five shapes: half a minute
    python3 visualize_smallnorb_novel_viewpoint.py --load a.npz b.npz      # networks of your own
"""
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
import smallnorb_novel_viewpoint as norb  # before numpy: it sets the number of BLAS threads
from lab import figures, networks
from lab.figures import BLUE, COLORS, GRAY, GREEN, MARKERS, ORANGE, RED, Drawing, new_figure
from lab.files import check_writable, write_json
from lab.messages import InputError, counted, run_cli
from lab.statistics import bootstrap_interval, proportion_interval, wilson_interval
from smallnorb_novel_viewpoint import N_CLASSES

import numpy as np

EXPERIMENT = "smallnorb_novel_viewpoint"
SWEEP = {                          # networks in the figures of results: label, color, line, marker
    "matrix-capsnet": ("matrix-capsnet", BLUE, "-", "D"), "cnn": ("cnn", RED, "--", "s"),
    "cnn-bn": ("cnn-bn", GREEN, "-.", "o"), "cnn-gap": ("cnn-gap", ORANGE, "-.", "^"),
    "nearest": ("nearest training image", GRAY, ":", "x")}
OTHER_TOYS = "+".join(f"toys{toy_seed}-{{split}}" for toy_seed in (2, 3, 4))
SIX_TOYS = "+".join(f"toys{toy_seed}-azimuth" for toy_seed in range(5, 11))


def against_cnns(split):
    """Return rows of the forest plot: matrix capsules minus CNNs at novel viewpoints of one split.

    "novel once familiar" compares where the first setting reaches the second's familiar accuracy.
    """
    paper, heads = f"paper-{split}", f"heads-{split}"
    other_toys = OTHER_TOYS.format(split=split)
    return [
        ("paper's small network minus paper's CNN, matched", f"{paper}/cnn-paper",
         f"{paper}/matrix-capsnet-paper", "novel once familiar, reversed"),
        ("the same, not matched", f"{paper}/matrix-capsnet-paper", f"{paper}/cnn-paper", "novel"),
        ("paper's small network minus cnn-gap", f"{paper}/matrix-capsnet-paper",
         f"{heads}/cnn-gap", "novel"),
        ("matrix-capsnet minus paper's CNN", f"{paper}/matrix-capsnet", f"{paper}/cnn-paper",
         "novel"),
        ("matrix-capsnet minus cnn", f"{paper}/matrix-capsnet", f"{paper}/cnn", "novel"),
        ("the same, three other sets of toys", f"{other_toys}/matrix-capsnet", f"{other_toys}/cnn",
         "novel"),
        ("matrix-capsnet minus cnn-bn", f"{paper}/matrix-capsnet", f"{paper}/cnn-bn", "novel"),
        ("matrix-capsnet minus cnn with dropout, matched", f"{paper}/matrix-capsnet",
         f"{paper}/cnn-dropout", "novel once familiar"),
        ("matrix-capsnet minus cnn-gap", f"{paper}/matrix-capsnet", f"{heads}/cnn-gap", "novel")]


def both_splits(label, first, second):
    """Return two rows of a forest plot; the split replaces {split} in the names of the settings."""
    return [(f"{label}, novel {split}s", first.format(split=split), second.format(split=split),
             "novel") for split in ("azimuth", "elevation")]


FOREST = [                         # rows of render.forest: heading, or label, settings, metric
    "Novel azimuths: matrix capsules minus a CNN; matched: at about equal familiar accuracy",
    *against_cnns("azimuth"),
    "Novel elevations: matrix capsules minus a CNN; matched: at about equal familiar accuracy",
    *against_cnns("elevation")]
ABLATIONS = [                      # rows of render.forest
    "Vector capsules with shared matrices (capsnet-shared) minus GAP-CNN (cnn-gap)",
    *both_splits("wide backbone", "wide-{split}/capsnet-shared", "wide-{split}/cnn-gap"),
    *both_splits("three other sets of toys", f"{OTHER_TOYS}/capsnet-shared",
                 f"{OTHER_TOYS}/cnn-gap"),
    ("six further sets of toys, novel azimuths", f"{SIX_TOYS}/capsnet-shared",
     f"{SIX_TOYS}/cnn-gap", "novel"),
    *both_splits("small backbone", "heads-{split}/capsnet-shared", "heads-{split}/cnn-gap"),
    "Matrix capsules with EM routing (matrix-head) minus GAP-CNN (cnn-gap)",
    *both_splits("small backbone", "heads-{split}/matrix-head", "heads-{split}/cnn-gap"),
    "Trained and tested with two EM iterations minus with one",
    ("paper's small network, novel azimuths", "paper-azimuth/matrix-capsnet-paper",
     "paper-azimuth/matrix-capsnet-paper-iters-1", "novel"),
    ("matrix-capsnet, novel azimuths", "paper-azimuth/matrix-capsnet",
     "paper-azimuth/matrix-capsnet-iters-1", "novel"),
    *both_splits("matrix-head", "heads-{split}/matrix-head", "heads-{split}/matrix-head-iters-1"),
    "Trained and tested with three EM iterations minus with one",
    ("paper's small network, novel azimuths", "paper-azimuth/matrix-capsnet-paper-iters-3",
     "paper-azimuth/matrix-capsnet-paper-iters-1", "novel"),
    "Trained and tested with three iterations of dynamic routing minus with one",
    ("capsnet, novel azimuths", "heads-azimuth/capsnet", "heads-azimuth/capsnet-iters-1", "novel"),
    ("capsnet-shared, novel azimuths", "heads-azimuth/capsnet-shared",
     "heads-azimuth/capsnet-shared-iters-1", "novel")]


@dataclass(frozen=True)
class Run(networks.Network):
    """A network, its data and its predictions, from which the figures are drawn."""

    @cached_property
    def tests(self):
        """What evaluate_test returns"""
        with norb.worker_threads(self.config) as workers:
            return norb.evaluate_test(self.params, self.data, self.config, workers)

    @cached_property
    def activity(self):
        """What activity_before_and_after returns"""
        return activity_before_and_after(self)


# ---------------------------------------------------------------- helpers

def noun(config):
    return "shape" if config.data == "shapes" else "toy"


def kinds_of(config):
    """Return what is familiar or novel: azimuths, elevations, or toys"""
    return "toys" if config.split == "instance" else norb.viewpoint_angle(config)


def nearest_sample(samples, **values):
    """Return the index of the first sample of this label whose azimuth and elevation are nearest to these values."""
    distance = sum(np.abs(samples[name] - value) for name, value in values.items())
    if "labels" in values:
        distance = np.where(samples["labels"] == values["labels"], distance, np.inf)
    return int(np.argmin(distance))


def views_of(config, label, azimuths, elevations, lighting=0):
    """Return views of one test object of a class: a dict with the keys of load_data's splits.

    azimuths, elevations: (N,), degrees. Shapes are rendered from exactly there. Of toys and smallNORB, row k is the
    view of the first test toy nearest to there; where a file lacks this toy or lighting, another is taken."""
    azimuths, elevations = np.array(azimuths, float), np.array(elevations, float)
    if config.data == "shapes":
        labels = np.full(len(azimuths), label)
        return {"images": norb.render(labels, azimuths, elevations, norb.rng_for(config.seed, norb.EVALUATION, 2)),
                "labels": labels, "azimuths": azimuths % 360, "elevations": elevations}
    pool = norb.load_norb(config.norb_dir)["test"] if config.data == "smallnorb" else norb.toy_tables("test")
    stored = np.flatnonzero(pool["labels"] == label)
    distance = 1e3 * ((pool["instances"] != norb.TOY_SPLITS["test"][0]) * 1.0 + (pool["lightings"] != lighting))[stored]
    distance = distance + np.abs((pool["azimuths"][stored] - azimuths[:, None] + 180) % 360 - 180)
    rows = stored[(distance + np.abs(pool["elevations"][stored] - elevations[:, None])).argmin(1)]
    views = {name: array[rows] for name, array in pool.items()}
    if config.data == "toys":
        norb.add_toy_images([views], config)
    return views


def other_view(views, lighting=0):
    """Return words on views of another test toy or lighting than views_of was asked for, where the data lack it"""
    asked = {"instances": ("toy", norb.TOY_SPLITS["test"][0]), "lightings": ("lighting", lighting)}
    others = [f"{word} {k}" for name, (word, first) in asked.items() for k in np.unique(views.get(name, first))
              if k != first]
    return ", ".join(others)


def show_image(ax, image, title="", color=None):
    ax.imshow(image[..., 0], cmap="gray")
    ax.set(xticks=[], yticks=[])
    ax.set_title(title, fontsize=8, pad=3)
    ax.spines[:].set_visible(color is not None)
    for spine in ax.spines.values() if color else ():
        spine.set(color=color, linewidth=2.5)


def preprocess(samples, rows, config):
    """Return the given rows of the images as network inputs, (n, 32, 32, C)."""
    return samples["images"][rows] if config.data == "shapes" else norb.crop_batch(samples["images"], rows)


def shade_ranges(ax, config):
    """Mark the familiar azimuths and the novel azimuths on an axis from 0 to 360 degrees; with --split instance all
    are familiar"""
    if config.split == "instance":
        return
    texts = [f"{which} {norb.viewpoint_angle(config)}" for which in ("familiar", "novel")]
    for (low, high), color, text in zip(norb.angle_ranges(config), (BLUE, ORANGE), texts):
        for offset in -360, 0, 360:
            left, right = max(0, low + offset), min(360, high + offset)
            if left < right:
                ax.axvspan(left, right, color=color, alpha=0.1, linewidth=0)
                if right - left > (50 if norb.viewpoint_angle(config) == "azimuths" else 5):
                    ax.text((left + right) / 2, 1.02, text, ha="center", fontsize=8, color=GRAY,
                            transform=ax.get_xaxis_transform())


def accuracy_interval(samples, correct, rows=slice(None)):
    """Return the 95% interval (low, high) of the accuracy on some rows of a test set: of toys the wider one of a
    bootstrap over toys, whose images are not independent, and of Wilson's over images; of shapes Wilson's."""
    low, high = wilson_interval(correct[rows].sum(), len(correct[rows]))
    if "instances" not in samples:
        return low, high
    found = bootstrap_interval(samples["labels"][rows], samples["instances"][rows], correct[rows])
    return np.fmin(low, found[0]), np.fmax(high, found[1])


def drop_interval(run):
    """Return the 95% interval of the drop, by a bootstrap over the toys that both test sets show, as text"""
    parts = [run.data[name] for name in ("familiar", "novel")]
    if "instances" not in parts[0]:
        return ""
    classes, toys = (np.concatenate([part[name] for part in parts]) for name in ("labels", "instances"))
    correct = np.concatenate([run.tests["correct"][name] for name in ("familiar", "novel")])
    low, high = bootstrap_interval(classes, toys, correct, np.repeat([1, -1], [len(part["labels"]) for part in parts]))
    return f"\n[{low:.2f}, {high:.2f}]" if np.isfinite(low) else ""


# ---------------------------------------------------------------- figures of one network

def draw_example_views(run, n=4):
    """Draw n training views and n novel test views of each class."""
    novel = "novel toys" if run.config.split == "instance" else f"test views at novel {kinds_of(run.config)}"
    fig = new_figure(6.2, f"Left (blue): training views. Right (orange): {novel}",
                     f"network input, 32x32 px{CROP * (run.config.data != 'shapes')}; numbers: azimuth, elevation")
    axes = fig.subplots(N_CLASSES, 2 * n + 1, width_ratios=[1] * n + [0.3] + [1] * n)
    for (k, j), ax in np.ndenumerate(axes):
        if j == n:
            ax.axis("off")
            continue
        samples, color = (run.data["train"], BLUE) if j < n else (run.data["novel"], ORANGE)
        if not (samples["labels"] == k).any():                          # of few test images
            ax.set(xticks=[], yticks=[])
            ax.text(0.5, 0.5, "none drawn", ha="center", va="center", fontsize=8, transform=ax.transAxes)
            continue
        azimuths, elevations = np.unique(samples["azimuths"]), np.unique(samples["elevations"])
        azimuth = azimuths[np.linspace(0, len(azimuths) - 1, n).astype(int)[j - (n + 1) * (j > n)]]
        row = nearest_sample(samples, labels=k, azimuths=azimuth, elevations=elevations[j % len(elevations)])
        show_image(ax, preprocess(samples, [row], run.config)[0],
                   f"{samples['azimuths'][row]:.0f}°, {samples['elevations'][row]:.0f}°", color)
        if j == 0:
            ax.set_ylabel(norb.class_names(run.data)[k], rotation=0, ha="right", va="center")
    return fig


CROP = " (the center of the first camera's image)"


def draw_elevation_strip(run):
    """Draw one test toy of each class at a training azimuth from each elevation, with the network's predictions."""
    elevations, names = norb.TOY_ELEVATIONS, norb.class_names(run.data)
    low, high = norb.parse_range(run.config.train_azimuths, "--train-azimuths")
    step = 1 if run.config.data == "shapes" else 20                     # degrees between the azimuths that there are
    azimuth = step * round((low + high) / 2 / step) % 360
    fig = new_figure(5.4, f"One test {noun(run.config)} of each class from nine elevations, predictions of {run.name}",
                     f"azimuth {azimuth}°, in the range of training; blue frame: correct; orange: wrong, with the "
                     "predicted class")
    axes = fig.subplots(N_CLASSES, len(elevations), squeeze=False)
    for k in range(N_CLASSES):
        samples = views_of(run.config, k, np.full(len(elevations), azimuth), elevations)
        images = preprocess(samples, np.arange(len(elevations)), run.config)
        predicted = norb.forward(run.params, images, run.config)[0]["scores"].argmax(1)
        for ax, image, elevation, label in zip(axes[k], images, samples["elevations"], predicted):
            wrong = f", {names[label]}" if label != k else ""
            show_image(ax, image, f"{elevation:.0f}°{wrong}", ORANGE if wrong else BLUE)
        axes[k, 0].set_ylabel("\n".join(filter(None, (names[k], other_view(samples)))), rotation=0, ha="right",
                              va="center")
    return fig


def draw_familiar_vs_novel(runs):
    """Draw the accuracy of each network on familiar and on novel viewpoints, with 95% CIs over the test toys, and its
    drop; of one network the accuracy of each class, too."""
    first, angle, names = runs[0], kinds_of(runs[0].config), norb.class_names(runs[0].data)
    groups = []                    # label, run, class or None
    for run in runs:
        groups += [(names[k], run, k) for k in range(N_CLASSES) if len(runs) == 1]
        drop = f"drop {run.tests['drop']:.3f}{drop_interval(run)}"
        groups.append((f"{run.name if len(runs) > 1 else 'all classes'}\n{drop}", run, None))
    title = "of each network" if len(runs) > 1 else f"of {first.label}"
    counts = [f"{len(first.data[name]['labels']):,}" for name in ("familiar", "novel")]
    bars = "error bars and brackets" if drop_interval(first) else "error bars"
    fig = new_figure(3.4, f"Accuracy on familiar and on novel {angle} {title}",
                     f"{first.config.data}; one seed each; {bars}: "
                     f"95% CI {over_what(first)}, from {' + '.join(counts)} images")
    ax = fig.subplots()
    for shift, color, name in ((-0.2, BLUE, "familiar"), (0.2, ORANGE, "novel")):
        samples, found = first.data[name], []
        for _, run, k in groups:
            rows, correct = samples["labels"] == k if k is not None else slice(None), run.tests["correct"][name]
            found.append((correct[rows].mean(), *accuracy_interval(samples, correct, rows)) if len(correct[rows]) else
                         (np.nan,) * 3)
        mean, low, high = np.array(found).T
        bars = ax.bar(np.arange(len(mean)) + shift, mean, 0.38, yerr=(mean - low, high - mean), color=color, capsize=3,
                      label=f"{name} {angle}")
        ax.bar_label(bars, ["" if np.isnan(value) else f"{value:.2f}" for value in mean], label_type="center",
                     fontsize=8, color="white" if color == BLUE else "black")
    ax.set_xticks(range(len(groups)), [label for label, *_ in groups])
    ax.set(ylim=(0, 1), ylabel="accuracy")
    ax.axhline(1 / N_CLASSES, color=GRAY, linewidth=1, linestyle=":", label="chance")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def over_what(run):
    """Return what the intervals of a network's test are over"""
    return "over toys" if "instances" in run.data["novel"] else "over images"


def draw_confusion(run):
    """Draw the confusion matrices of familiar and of novel viewpoints"""
    return figures.draw_confusion({f"{name} {kinds_of(run.config)}": run.tests[f"{name}_confusion"]
                                   for name in ("familiar", "novel")}, norb.class_names(run.data),
                                  f"Confusion matrices of {run.label}", norb.data_name(run.data["source"]))


def draw_azimuth_accuracy(runs):
    """Draw the accuracy of each network at each azimuth (--split elevation: elevation) of the test images, with 95% CIs
    over the test toys."""
    angle, first = norb.viewpoint_angle(runs[0].config), runs[0]
    drawn = f"; the first {len(COLORS)} of {len(runs)} networks" if len(runs) > len(COLORS) else ""
    fig, ax = axes_by_angle(first.config, f"Test accuracy by {angle[:-1]}",
                            f"{first.config.data}; error bars: 95% CI {over_what(first)}{drawn}")
    names = ("familiar", "novel") if first.config.split != "instance" else ("novel",)
    samples = {key: np.concatenate([first.data[name][key] for name in names])
               for key in first.data["novel"].keys() & {angle, "labels", "instances"}}
    angles = samples[angle]
    for k, (run, color, marker) in enumerate(zip(runs, COLORS, MARKERS)):
        correct = np.concatenate([run.tests["correct"][name] for name in names])
        mean, low, high = np.array([(correct[angles == value].mean(),
                                     *accuracy_interval(samples, correct, angles == value))
                                    for value in np.unique(angles)]).T
        ax.errorbar(np.unique(angles) + (1.5 if angle == "azimuths" else 0.5) * k, mean, (mean - low, high - mean),
                    fmt=marker, linestyle="none", color=color, markersize=4, capsize=2, label=f"{run.name}")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8.5)
    return fig


def axes_by_angle(config, title, note):
    """Return a Figure and axes of accuracy by angle, with the ranges of familiar and novel angles."""
    angle = norb.viewpoint_angle(config)
    fig = new_figure(3.9, f"{title}\n", note)
    ax = fig.subplots()
    limits, ticks = ((-6, 366), range(0, 361, 30)) if angle == "azimuths" else ((28, 74), range(30, 71, 5))
    ax.set(xlabel=f"{angle[:-1]} (degrees)", ylabel="accuracy", xlim=limits, ylim=(0, 1.02), xticks=ticks)
    shade_ranges(ax, config)
    ax.axhline(1 / N_CLASSES, color=GRAY, linewidth=1, linestyle=":")
    ax.text(limits[1], 1 / N_CLASSES + 0.02, "chance", ha="right", fontsize=8, color=GRAY)
    ax.grid(alpha=0.3)
    return fig, ax


def draw_pose_matrices(run, label=2, n=6, elevation=45):
    """Draw the class capsules' pose matrices and activations for one test toy from n azimuths."""
    azimuths, names = np.linspace(0, 360, n, endpoint=False), norb.class_names(run.data)
    samples = views_of(run.config, label, azimuths, np.full(n, elevation))
    azimuths, images = samples["azimuths"], preprocess(samples, np.arange(n), run.config)
    out, _ = norb.forward(run.params, images, run.config)
    poses, span = out["mu"].reshape(n, N_CLASSES, norb.P, norb.P), np.abs(out["mu"]).max()
    fig = new_figure(6.4, f"Pose matrices of the five class capsules for a {noun(run.config)} at {n} azimuths",
                     f"{run.label}; number above a matrix: activation of the capsule; bold: the true class")
    axes = fig.subplots(N_CLASSES + 1, n)
    for k in range(n):
        show_image(axes[0, k], images[k], f"{azimuths[k]:.0f}°")
        for j in range(N_CLASSES):
            shown = axes[j + 1, k].imshow(poses[k, j], cmap="PuOr_r", vmin=-span, vmax=span)
            axes[j + 1, k].set(xticks=[], yticks=[])
            weight = "bold" if j == label else "normal"
            axes[j + 1, k].set_title(f"{out['a'][k, j]:.2f}", fontsize=8, pad=2, fontweight=weight)
    for j in range(N_CLASSES):
        axes[j + 1, 0].set_ylabel(names[j], rotation=0, ha="right", va="center",
                                  fontweight="bold" if j == label else "normal")
    axes[0, 0].set_ylabel("\n".join(filter(None, ("input", other_view(samples)))), rotation=0, ha="right", va="center")
    fig.colorbar(shown, ax=axes, shrink=0.6, label="element of the 4x4 pose matrix")
    return fig


def routed_maps(out, config):
    """Return what each position of the capsules below the class capsules contributes to each class, before and after
    routing, (2, J, side, side), of one image.

    out: of norb.forward for this image. A map is the sum over the capsule types at a position of the routing's weight
    (assignment probability R, or coupling coefficient c) times the activation, or the length, of the capsule.
    """
    if config.model in norb.MATRIX_MODELS:
        a = out["conv2_a" if config.model == "matrix-capsnet" else "primary_a"][0]                      # (H, W, B)
        side, weight, order = len(a), a.reshape(-1, a.shape[-1]), (0, 2, 1)
        steps = [out["class_steps"][k].R[0] for k in (0, -1)]
        shape = weight.shape[::-1]                                                         # I ordered (type, position)
    else:
        side = int(np.sqrt(len(norb.receptive_field_centers(config))))
        weight = np.linalg.norm(out["u"][0], axis=-1).reshape(side * side, -1)
        steps, order, shape = [out["c"][0], out["c"][-1][0]], (0, 1, 2), weight.shape     # I ordered (position, type)
    maps = [np.broadcast_to(R, (N_CLASSES, weight.size)).reshape(-1, *shape).transpose(order) * weight for R in steps]
    return np.stack([m.sum(-1).reshape(N_CLASSES, side, side) for m in maps])


def draw_routing(run, label=2):
    """Draw what each position of the capsules below the class capsules contributes to each class, before and after
    routing: before it, the coefficients are uniform."""
    samples, names = run.data["novel"], norb.class_names(run.data)
    azimuths = np.unique(samples["azimuths"])
    row = nearest_sample(samples, labels=label, azimuths=azimuths[len(azimuths) // 2])
    image = preprocess(samples, [row], run.config)
    out, _ = norb.forward(run.params, image, run.config)
    maps = routed_maps(out, run.config)
    kind = "assignment probability R times activation" if run.config.model in norb.MATRIX_MODELS else (
        "coupling coefficient c times length")
    fig = new_figure(3.6, f"Routing assigns the capsules at each position to the classes ({run.name})",
                     f"{kind}, summed over capsule types; a map shows {maps.shape[-1]}x{maps.shape[-1]} positions")
    grid = fig.add_gridspec(2, N_CLASSES + 2, width_ratios=[1.4] + [1] * N_CLASSES + [0.12])
    show_image(fig.add_subplot(grid[:, 0]), image[0], f"{names[samples['labels'][row]]}, novel "
               f"{kinds_of(run.config)[:-1]};\npredicted: {names[out['scores'][0].argmax()]}")
    for (t, j), ax in ((at, fig.add_subplot(grid[at[0], at[1] + 1])) for at in np.ndindex(2, N_CLASSES)):
        heatmap = ax.imshow(maps[t, j], cmap="viridis", vmin=0, vmax=maps.max())
        ax.set(xticks=[], yticks=[])
        ax.set_title(names[j] if t == 0 else "", fontsize=9)
        ax.set_ylabel(("before routing", "after routing")[t] if j == 0 else "")
    fig.colorbar(heatmap, cax=fig.add_subplot(grid[:, -1]), label="assigned to the class")
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
    elsewhere)}, None if there is no such position. "types": {layer: number of capsule types whose mean activation is
    higher there}. "entropy": entropy of the assignment probabilities R over the classes in each EM iteration, in nats,
    weighted by the activations.
    """
    rng, samples = np.random.default_rng(0), run.data["familiar"]
    rows = rng.permutation(len(samples["labels"]))[:n]
    shifts = rng.integers(-3, 4, (len(rows), 2))
    background = norb.standardize(samples["images"][rows])[:, :1, :1]
    images = shift_images(preprocess(samples, rows, run.config) - background, shifts) + background   # so that it enters
    outputs = [norb.forward(params, images[k:k + 16], run.config)[0] for k in range(0, len(rows), 16)]
    metrics = {"a": {}, "types": {}, "entropy": []}
    for name in RECEPTIVE_FIELDS:
        a = np.concatenate([out[f"{name}_a"] for out in outputs])                              # (n, H, W, types)
        blank = is_background(images, background, name, 0.02)
        metrics["a"][name] = tuple(float(a[mask].mean()) if mask.any() else None for mask in (blank, ~blank))
        if blank.any() and not blank.all():
            metrics["types"][name] = int((a[blank].mean(0) > a[~blank].mean(0)).sum())
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
    images = preprocess(run.data["train"], np.arange(0, len(run.data["train"]["labels"]), 37)[:64], run.config)
    norb.forward(initial, images, run.config, statistics=statistics)
    return {"before": background_activity(initial | statistics, run), "after": background_activity(run.params, run)}


# ---------------------------------------------------------------- figures of results

def results_of(results, experiment, setting):
    """Return the results of all seeds of a setting. Raise InputError if there is none."""
    if of_seeds := list(results.runs(experiment, setting).values()):
        return of_seeds
    raise InputError(f"--results {results.folder}: no result of {setting}. Run it first, or give another folder")


def draw_background_activity(activities):
    """Draw the mean activation of capsules over blank background and over the toys.

    activities: a result of activity_before_and_after for each seed. Drawn are the layers that have both kinds of
    positions.
    """
    layers = {"primary": "primary capsules", "conv": "capsules after EM routing"}
    fig = new_figure(3.4, "Mean activation of matrix capsules over blank background and over the toy",
                     f"up to 2,000 familiar test images; bars: mean over n = {counted(len(activities), 'seed')}; "
                     "dots: one seed each; dotted lines: mean before training")
    ax = fig.subplots()
    for (k, name), (shift, index, color, label) in ((a, b) for a in enumerate(layers) for b in (
            (-0.2, 0, ORANGE, "only background"), (0.2, 1, BLUE, "part of the toy"))):
        before, after = ([each[when]["a"][name][index] for each in activities] for when in ("before", "after"))
        after, before = ([value for value in values if value is not None] or [np.nan] for values in (after, before))
        ax.bar(k + shift, np.mean(after), 0.38, color=color, alpha=0.8, label=label if k == 0 else None)
        ax.plot(np.full(len(after), k + shift), after, "o", color="black", markersize=3)
        ax.hlines(np.mean(before), k + shift - 0.19, k + shift + 0.19, color="black", linestyle=":")
    ax.set_xticks(range(len(layers)), layers.values())
    ax.set(ylim=(0, 1), ylabel="mean activation (0 to 1)")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), title="the receptive field contains", alignment="left")
    return fig


def draw_azimuth_results(results):
    """Draw accuracy by azimuth, mean and 95% CI over seeds. Raise InputError if a setting has no result."""
    fig, ax = axes_by_angle(norb.Config(), "Accuracy on test toys by azimuth: lowest where they show front or back",
                            "mean over n seeds; bands: 95% CI")
    for model in norb.default_models({}):
        label, color, line, marker = SWEEP[model]
        of_seeds = results_of(results, EXPERIMENT, f"paper-azimuth/{model}")
        rows = [[*each["sweep"]["accuracy"], each["sweep"]["accuracy"][0]] for each in of_seeds]
        mean, low, high = np.array([proportion_interval(column) for column in np.transpose(rows)]).T
        x = [*of_seeds[0]["sweep"]["angles"], 360]
        ax.plot(x, mean, line, marker=marker, color=color, markersize=4, label=f"{label}, n = {len(of_seeds)}")
        ax.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    ax.legend(loc="lower center", ncols=3, columnspacing=1, fontsize=8.5)
    return fig


def draw_forest(results, rows):
    """Draw differences in accuracy with their 95% CIs. rows: those of render.forest"""
    fig = figures.forest(results, EXPERIMENT, rows, "accuracy on novel viewpoints")
    words = "intervals over seeds do not contain other toys"
    fig.supxlabel(f"{fig.get_supxlabel()}\n{words}", fontsize=9)
    return fig


GAPS = {                           # of the gap curve: title, networks
    "gap-shapes": ("five shapes", ("matrix-capsnet", "cnn", "cnn-gap", "nearest")),
    "gap-toys": ("toys", ("matrix-capsnet", "cnn", "cnn-bn", "cnn-gap"))}


def accuracy_by_distance(result):
    """Return {distance to the nearest training azimuth, degrees: accuracy} of one result, 0 for familiar azimuths."""
    low, high = norb.parse_range(result["config"]["train_azimuths"], "--train-azimuths")
    by_distance = {}
    for angle, accuracy in zip(result["sweep"]["angles"], result["sweep"]["accuracy"]):
        distance = 0.0 if norb.in_range(angle, (low, high)) else min((angle - high) % 360, (low - angle) % 360)
        by_distance.setdefault(distance, []).append(accuracy)
    return {distance: float(np.mean(values)) for distance, values in sorted(by_distance.items())}


def draw_gap_curve(results):
    """Draw accuracy against the distance to the nearest training azimuth. Raise InputError if there is no result."""
    fig = new_figure(4.4, "Accuracy by distance to the nearest training azimuth (training azimuths: 0° to 60°)",
                     "mean over n seeds; bands: 95% CI; distance 0: familiar azimuths")
    for ax, (table, (title, models)) in zip(fig.subplots(1, len(GAPS), sharey=True), GAPS.items()):
        for model in models:
            label, color, line, marker = SWEEP[model]
            curves = [accuracy_by_distance(each) for each in results_of(results, EXPERIMENT, f"{table}/{model}")]
            mean, low, high = np.array([proportion_interval([curve[x] for curve in curves]) for x in curves[0]]).T
            ax.plot([*curves[0]], mean, line, marker=marker, color=color, markersize=4,
                    label=f"{label}, n = {len(curves)}")
            ax.fill_between([*curves[0]], low, high, color=color, alpha=0.15, linewidth=0)
        ax.axhline(1 / N_CLASSES, color=GRAY, linewidth=1, linestyle=":")
        ax.set(title=title, xlabel="distance (degrees)", ylim=(0, 1.02), xticks=range(0, 151, 30))
        ax.grid(alpha=0.3)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=8)
    fig.axes[0].set_ylabel("accuracy (dotted: chance)")
    return fig


def images_of(config):
    """Return what decides which images are familiar, and which novel: networks that share it are tested on the same"""
    sizes = {"shapes": (config.n_train_views, config.n_test_views, config.n_elev),
             "toys": (config.toy_seed,)}.get(config.data, ())
    toys = config.n_train_toys if config.split == "instance" else None
    return config.data, config.split, *norb.angle_ranges(config), sizes, toys


def model_in(*models):
    """Return a function that says whether a Config has one of these models"""
    return lambda config: config.model in models


def draw_activity_of_one(run):
    """Draw draw_background_activity of one network"""
    return draw_background_activity([run.activity])


FIGURES = {
    "example_views": Drawing(draw_example_views, "first"),
    "familiar_vs_novel": Drawing(draw_familiar_vs_novel, "all"),
    "azimuth_accuracy": Drawing(draw_azimuth_accuracy, "all"),
    "elevation_strip": Drawing(draw_elevation_strip),
    "pose_matrices": Drawing(draw_pose_matrices, applies=model_in(*norb.MATRIX_MODELS), lacks="only matrix capsules "
                             "have pose matrices"),
    "routing": Drawing(draw_routing, applies=lambda config: config != norb.with_uniform_coupling(config),
                       lacks="only capsules whose assignment is not uniform are routed"),
    "training_curves": figures.TRAINING_CURVES,
    "background_activity": Drawing(draw_activity_of_one, applies=lambda config: config.model == "matrix-capsnet" and
                                   config.data != "shapes", lacks="it is measured for a matrix-capsnet on toys",
                                   default=False),
    "confusion": Drawing(draw_confusion, default=False)}
OF_RESULTS = {
    "azimuth_accuracy": draw_azimuth_results, "gap_curve": draw_gap_curve,
    "background_activity": lambda results: draw_background_activity([
        each["background_activity"] for each in results_of(results, EXPERIMENT, "background-activity/matrix-capsnet")]),
    "forest": lambda results: draw_forest(results, FOREST),
    "forest_ablations": lambda results: draw_forest(results, ABLATIONS)}


# ---------------------------------------------------------------- command line

def write_activity(run, path):
    """Write the activity over blank background, with the settings and the history of the training, as JSON"""
    state = {"params": {name: run.params[name] for name in norb.param_shapes(run.config)}, "history": run.history,
             "step": max((epoch["step"] for epoch in run.history["epochs"]), default=0)}
    result = norb.result_of(run.config, state, run.data, {"correct": {}}) | {"background_activity": run.activity}
    write_json(path, {name: value for name, value in result.items() if name != "hit_bits"})        # not of a test


@figures.style()
def main():
    parser = figures.figure_parser(norb, __doc__, FIGURES, OF_RESULTS)
    parser.add_argument("--out-json", metavar="FILE", help="write the activity that --only background_activity draws "
                        "to this file; -: print")
    args = parser.parse_args()
    if args.out_json and (args.only != ["background_activity"] or args.results):
        raise InputError("--out-json works here only with --only background_activity and without --results. For the "
                         "metrics of a run give it to smallnorb_novel_viewpoint.py")
    if args.out_json == "-":
        args.quiet = True
    check_writable(args.out_json)
    if args.load is not None and len({images_of(config) for *_, config in networks.chosen(norb, args)}) > 1:
        raise InputError("--load: these networks have other familiar or novel images. Draw them one at a time")
    background = FIGURES["background_activity"]
    if args.out_json and not any(background.applies(config) for *_, config in networks.chosen(norb, args)):
        raise InputError(f"--out-json {args.out_json}: {background.lacks}. Give such a network")
    runs = figures.draw(norb, args, FIGURES, OF_RESULTS, lambda config, progress: norb.load_data(config), Run)
    if args.out_json:
        write_activity(next(run for run in runs if background.applies(run.config)), args.out_json)


if __name__ == "__main__":
    run_cli(main)
