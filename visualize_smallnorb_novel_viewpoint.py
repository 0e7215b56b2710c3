#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4"]
# ///
"""Draws what smallnorb_novel_viewpoint.py finds out: trains its networks, or reads the results of its runs, and writes
PNGs.

The results are files that the experiment's --out-json wrote, or a table of results/; what is not given, and needed, is
trained here: the networks of --model and --baseline, by default dynamic-shared and gap. The figures of a single network
(poses, routing, aliveness) show `caps`, matrix capsules: the one in --load, or one that is trained with the same flags.

    python3 visualize_smallnorb_novel_viewpoint.py --load --results results/smallnorb_novel_viewpoint/wide-azimuth.jsonl
"""
import json
from dataclasses import dataclass
from pathlib import Path

import smallnorb_novel_viewpoint as norb  # before numpy: it sets the number of BLAS threads
from smallnorb_novel_viewpoint import N_CLASSES, NORB_NAMES, InputError, P

import matplotlib
import numpy as np
from matplotlib.figure import Figure

matplotlib.use("Agg")
matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
                            "image.interpolation": "nearest", "legend.frameon": False})
BLUE, ORANGE = "#0072B2", "#E69F00"                           # Okabe & Ito, colour-blind safe
GREEN, RED = "#009E73", "#D55E00"
PINK, GRAY = "#CC79A7", "#666666"
STYLES = {"caps": (BLUE, "-", "o"), "em": (BLUE, "-", "o"), "gap": (RED, "--", "s"), "dense": (ORANGE, "-.", "^"),
          "cnn": (GREEN, ":", "v"), "cnn-norm": (GREEN, "-", "v"), "dynamic": (PINK, ":", "D"),
          "dynamic-shared": (PINK, "-", "D"), "self-routing": ("#56B4E9", "-.", "P"), "nearest": (GRAY, ":", "x")}
CLASS_COLOURS = (BLUE, ORANGE, GREEN, RED, PINK)
WIDTH = 9                          # inches
OUTDIR = Path("viz/smallnorb_novel_viewpoint")
WEIGHTS = norb.WEIGHTS.with_name("smallnorb_caps.npz")        # the network whose poses and routing are drawn


@dataclass(frozen=True)
class Run:
    """What the figures are drawn from"""
    config: norb.Config            # of the capsule network
    params: dict                   # its weights; {} if not needed, as the next
    history: dict                  # of its training; {} if it was not trained here
    data: dict                     # load_data's result
    records: list                  # of the networks compared
    compared: norb.Config          # of one of these


# ---------------------------------------------------------------- helpers

def new_figure(height, title, note=""):
    fig = Figure((WIDTH, height), layout="constrained")
    fig.suptitle(title, fontsize=11)
    fig.supxlabel(note, fontsize=8, color=GRAY)
    return fig


def seeds_note(records):
    n = len({record["seed"] for record in records})
    return f"{n} seed{'s' * (n > 1)}" + (", mean and 95% t interval" if n > 1 else "")


def style_of(label):
    colour, line, marker = STYLES[label]
    return dict(color=colour, linestyle=line, marker=marker, markersize=4)


def by_label(records):
    groups = {}
    for record in records:
        groups.setdefault(record["label"], []).append(record)
    return groups


def band(ax, x, rows, label):
    """Mean of rows (seeds, points) over x, and its interval"""
    mean, half = np.array([norb.mean_and_interval(column) for column in np.transpose(rows)]).T
    style = style_of(label)
    ax.plot(x, mean, label=label, **style)
    ax.fill_between(
        x, mean - np.nan_to_num(half), mean + np.nan_to_num(half), color=style["color"], alpha=0.15, linewidth=0)


def pick(samples, **wanted):
    """Index of the first sample with these values; the nearest where there is none that equals"""
    distance = sum((np.abs(samples[name] - value) > 1e-6) * 1e3 * (name == "labels") + np.abs(samples[name] - value)
                   for name, value in wanted.items())
    return int(np.argmin(distance))


def show_image(ax, image, title="", colour=None):
    ax.imshow(image[..., 0], cmap="gray")
    ax.set(xticks=[], yticks=[])
    ax.set_title(title, fontsize=8, pad=3)
    ax.spines[:].set_visible(colour is not None)
    for spine in ax.spines.values() if colour else ():
        spine.set(color=colour, linewidth=2.5)


def prepared(samples, rows):
    """Some test images as the network eats them"""
    return norb.crop_batch(samples["images"], rows)


def guessing(ax, **line):
    ax.axhline(1 / N_CLASSES, color=GRAY, linewidth=1, linestyle=":", **line)


def shade_ranges(ax, config, text=True):
    """Mark the azimuths of training and the held-out ones on an axis of 0 to 360 degrees"""
    for (low, high), colour, word in zip(norb.ranges_of(config), (BLUE, ORANGE), ("training views", "held-out views")):
        for turn in -360, 0, 360:
            left, right = max(0, low + turn), min(360, high + turn)
            if left < right:
                ax.axvspan(left, right, color=colour, alpha=0.1, linewidth=0)
                if text and right - left > 50:
                    ax.text((left + right) / 2, 1.02, word, ha="center", fontsize=8, color=colour,
                            transform=ax.get_xaxis_transform())


# ---------------------------------------------------------------- figures

def draw_example_views(run):
    fig = new_figure(9.2, "One row of training views (blue) and one of held-out views (orange) each",
                     "as the networks see them, of 48x48 px the 32x32 in the middle; elevation and light differ from "
                     "image to image; the number is the azimuth in degrees")
    axes = fig.subplots(2 * N_CLASSES, 6)
    for k in range(2 * N_CLASSES):
        samples, colour = (run.data["train"], BLUE) if k % 2 == 0 else (run.data["held_out"], ORANGE)
        azimuths, elevations = np.unique(samples["azimuths"]), np.unique(samples["elevations"])
        for j, azimuth in enumerate(azimuths[np.linspace(0, len(azimuths) - 1, 6).astype(int)]):
            at = pick(samples, labels=k // 2, azimuths=azimuth, elevations=elevations[j % len(elevations)])
            show_image(axes[k, j], prepared(samples, [at])[0], f"{azimuth:.0f}°", colour)
        axes[k, 0].set_ylabel(NORB_NAMES[k // 2] if k % 2 == 0 else "", rotation=0, ha="right", va="center")
    return fig


def draw_toys(run, side=64):
    """Every toy of each class, from three sides; then one through azimuth, elevation and lighting"""
    seed, n = run.config.toy_seed, 10

    def picture(category, instance, azimuth, elevation, lighting):
        views = norb.light_up(*norb.cast_rays(norb.make_toy(category, instance, seed), azimuth, elevation, 2 * side),
                              elevation)
        return views[lighting].reshape(side, 2, side, 2).mean((1, 3))
    order = [*norb.TOY_SPLITS["train"], *norb.TOY_SPLITS["test"]]
    rows = [np.hstack([picture(category, toy, azimuth, 40, (toy + k) % len(norb.LIGHTINGS)) for toy in order])
            for category in range(N_CLASSES) for k, azimuth in enumerate((30, 140, 270))]
    one = (0, norb.TOY_SPLITS["train"][0])
    rows.append(np.hstack([picture(*one, azimuth, 40, 0) for azimuth in range(0, 360, 36)]))
    rows.append(np.hstack([*(picture(*one, 30, e, 0) for e in list(norb.TOY_ELEVATIONS)[::2]),
                           *(picture(*one, 30, 40, k) for k in range(n - len(norb.TOY_ELEVATIONS[::2])))]))
    fig = new_figure(15, "The toys: five classes of ten, each from three sides; the left five train, the right "
                     "five test", "below: one toy through azimuth; through elevation (five) and lighting (five)")
    ax = fig.subplots()
    sheet = np.vstack(rows)
    ax.imshow(np.round(sheet / 8) * 8, cmap="gray", vmin=0, vmax=255)
    for y in range(3, len(rows), 3):
        ax.axhline(y * side - 0.5, color="white", linewidth=2)
    ax.axvline(5 * side - 0.5, ymin=2 / len(rows), color=ORANGE, linewidth=2)
    ax.set(xticks=np.arange(n) * side + side / 2, xticklabels=[f"toy {toy}" for toy in order])
    ax.set_yticks([*(np.arange(N_CLASSES) * 3 + 1.5) * side, 15.5 * side, 16.5 * side],
                  [*norb.NORB_NAMES, "one animal:\nazimuth", "elevation,\nlighting"])
    ax.tick_params(length=0, labeltop=True, labelbottom=False)
    ax.spines[:].set_visible(False)
    return fig


def draw_elevation_strip(run):
    """The elevations that training shows"""
    elevations = np.unique(run.data["train"]["elevations"])
    fig = new_figure(5.6, "One view of each class over elevation")
    axes = fig.subplots(N_CLASSES, len(elevations))
    for k in range(N_CLASSES):
        rows = [pick(run.data["train"], labels=k, elevations=e) for e in elevations]
        for ax, image, e in zip(axes[k], prepared(run.data["train"], rows), elevations):
            show_image(ax, image, f"{e:.0f}°" if k == 0 else "")
        axes[k, 0].set_ylabel(NORB_NAMES[k], rotation=0, ha="right", va="center")
    return fig


def draw_training_curves(run):
    fig = new_figure(3.9, "Accuracy while training: familiar views are soon known, held-out views never quite",
                     seeds_note(run.records))
    axes = fig.subplots(1, 2, sharey=True)
    for label, records in by_label([record for record in run.records if record["history"]]).items():
        epochs = records[0]["history"]["epoch"]
        share = np.array(epochs) / epochs[-1]
        for ax, key in zip(axes, ("familiar", "held_out")):
            rows = [record["history"][key] for record in records if len(record["history"]["epoch"]) == len(share)]
            band(ax, share, rows, label)
    for ax, word in zip(axes, ("familiar views", "held-out views")):
        ax.set(xlabel="share of each network's own training", title=word, ylim=(0, 1.02))
        guessing(ax)
        ax.grid(alpha=0.3)
    axes[1].text(1, 1 / N_CLASSES + 0.02, "guessing", ha="right", fontsize=8, color=GRAY)
    axes[0].set_ylabel("accuracy")
    axes[0].legend(loc="center right")
    return fig


def draw_extrapolation_bars(run):
    """Familiar and held-out accuracy of each network, single seeds as dots, intervals, and the drop above"""
    fig = new_figure(
        4, "What each network loses when the viewpoint is new", f"{seeds_note(run.records)}; dots: single seeds")
    ax, groups, ticks = fig.subplots(), by_label(run.records), []
    for k, (label, runs) in enumerate(groups.items()):
        for shift, key, colour in (-0.2, "familiar", BLUE), (0.2, "held_out", ORANGE):
            mean, half = norb.mean_and_interval([run[key] for run in runs])
            ends = [[min(half, mean)], [min(half, 1 - mean)]]                           # accuracies end at 0 and 1
            ax.bar(k + shift, mean, 0.38, color=colour, alpha=0.75, yerr=ends if len(runs) > 1 else None, capsize=3,
                   label={"familiar": "familiar views", "held_out": "held-out views"}[key] if k == 0 else None)
            if len(runs) > 1:
                ax.plot(k + shift + np.linspace(-0.1, 0.1, len(runs)), [run[key] for run in runs], ".", color="black",
                        markersize=3)
        drop, half = norb.mean_and_interval([run["drop"] for run in runs])
        ax.text(k, 1.03, f"drop {drop:.3f}" + f"\n± {half:.3f}" * (len(runs) > 1), ha="center", va="bottom",
                fontsize=7.5)
        size = runs[0]["n_params"]
        ticks.append(f"{label}\n" + (f"{size:,} parameters" if size else "nothing trained"))
    guessing(ax, label="guessing")
    ax.set(ylim=(0, 1.22), ylabel="accuracy", yticks=np.arange(0, 1.01, 0.2))
    ax.set_xticks(range(len(ticks)), ticks)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
    return fig


def draw_per_class(run):
    """Held-out accuracy of each class, a group of bars, by each network; thin lines: on familiar views"""
    fig = new_figure(4, "Which classes are lost from new viewpoints",
                     f"{seeds_note(run.records)}; bars: held-out views, lines above them: familiar views")
    ax, groups = fig.subplots(), by_label(run.records)
    width = 0.84 / len(groups)
    for k, (label, runs) in enumerate(groups.items()):
        at = np.arange(N_CLASSES) + (k - (len(groups) - 1) / 2) * width
        held_out, familiar = (np.array([norb.mean_and_interval(column) for column in zip(*rows)]) for rows in zip(
            *((run["held_out_per_class"], run["familiar_per_class"]) for run in runs)))
        mean, half = np.nan_to_num(held_out).T
        ends = [np.minimum(half, mean), np.minimum(half, 1 - mean)]
        ax.bar(at, mean, 0.92 * width, color=style_of(label)["color"], alpha=0.8, label=label,
               yerr=ends if len(runs) > 1 else None, capsize=2)
        ax.hlines(familiar[:, 0], at - 0.46 * width, at + 0.46 * width, color="black", linewidth=1)
    guessing(ax, label="guessing")
    ax.set(ylim=(0, 1.02), ylabel="accuracy")
    ax.set_xticks(range(N_CLASSES), NORB_NAMES)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=5)
    return fig


def draw_azimuth_accuracy(run):
    fig = new_figure(
        3.9, "Accuracy around the full circle\n", f"{seeds_note(run.records)}; test images at each azimuth")
    ax = fig.subplots()
    for label, records in by_label(run.records).items():
        rows = [record["sweep"]["accuracy"] for record in records]
        band(ax, [*records[0]["sweep"]["angles"], 360], [[*row, row[0]] for row in rows], label)
    shade_ranges(ax, run.compared)
    ax.set(xlabel="azimuth, degrees", ylabel="accuracy", xlim=(0, 360), ylim=(0, 1.02), xticks=range(0, 361, 30))
    guessing(ax)
    ax.text(359, 1 / N_CLASSES + 0.02, "guessing", ha="right", fontsize=8, color=GRAY)
    ax.legend(loc="lower center", ncols=4)
    ax.grid(alpha=0.3)
    return fig


def draw_gap_sweep(run):
    """Accuracy by distance from the training range: of all test images, and of each class, as far as results say"""
    by_class = [record for record in run.records if "per_class" in record["sweep"]]
    trained = [record for record in by_class if record["n_params"]]
    fewer = f"; of each class {seeds_note(trained)}" * (len(by_class) < len(run.records))
    fig = new_figure(5.6, "Accuracy by distance from the nearest training azimuth",
                     f"{seeds_note(run.records)}{fewer}; both sides of the training range together; dotted: guessing")
    axes = fig.subplots(2, 3, sharex=True, sharey=True).ravel()
    distances = np.array([norb.distance_to_training(azimuth, run.compared)
                          for azimuth in run.records[0]["sweep"]["angles"]])
    x, titles = np.unique(distances), ("all classes", *NORB_NAMES)
    for label, records in by_label(run.records).items():
        rows = [np.array(record["sweep"]["accuracy"])[:, None] for record in records]          # (angles, 1)
        columns = [np.array(rows), *np.moveaxis([record["sweep"]["per_class"] for record in by_label(by_class)[label]],
                                                -1, 0)[..., None]]
        for ax, found in zip(axes, columns):
            band(ax, x, [[row[distances == d].mean() for d in x] for row in found], label)
    for k, (ax, title) in enumerate(zip(axes, titles)):
        ax.set(title=title, ylim=(0, 1.02), xticks=x if len(x) < 10 else x[::2])
        guessing(ax)
        ax.grid(alpha=0.3)
        if k % 3 == 0:
            ax.set_ylabel("accuracy")
        if k > 2:
            ax.set_xlabel("degrees from the training range")
    axes[2].legend(loc="lower left", bbox_to_anchor=(0, 0.2), fontsize=8)
    return fig


def one_of_each_class(run):
    """Rows of one held-out image of each class, from the middle of the range"""
    samples = run.data["held_out"]
    azimuths = np.unique(samples["azimuths"])
    return [pick(samples, labels=k, azimuths=azimuths[len(azimuths) // 2]) for k in range(N_CLASSES)]


def draw_pose_matrices(run):
    fig = new_figure(7.2, "The five class capsules' poses and activations for one held-out image of each class",
                     "framed thick: the class that the network names; title blue: the true class")
    rows = one_of_each_class(run)
    images = prepared(run.data["held_out"], rows)
    out, _ = norb.forward(run.params, images, run.config)
    axes = fig.subplots(N_CLASSES, N_CLASSES + 1)
    limit = np.abs(out["mu"]).max()
    for n in range(N_CLASSES):
        show_image(axes[n, 0], images[n])
        axes[n, 0].set_ylabel(NORB_NAMES[n], rotation=0, ha="right", va="center")
        for j in range(N_CLASSES):
            ax, named = axes[n, j + 1], out["scores"][n].argmax() == j
            picture = ax.imshow(out["mu"][n, j].reshape(P, P), cmap="RdBu", vmin=-limit, vmax=limit)
            ax.set(xticks=[], yticks=[])
            ax.set_title(
                f"{NORB_NAMES[j]}  a={out['a'][n, j]:.2f}", fontsize=8, pad=3, color=BLUE if n == j else "black")
            ax.spines[:].set_visible(True)
            for spine in ax.spines.values():
                spine.set(linewidth=3 if named else 0.5)
    fig.colorbar(picture, ax=axes, shrink=0.5, label="entry of the pose matrix mu")
    return fig


def draw_em_routing(run):
    """Which places vote for which class, in each EM iteration; R summed over the types of the conv capsules that are
    there. The R of the first M-step is the state before any E-step: uniform"""
    samples, at = run.data["held_out"], one_of_each_class(run)[2]
    image = prepared(samples, [at])
    out, _ = norb.forward(run.params, image, run.config)
    steps, weight = out["class_steps"], out["conv2_a"][0].reshape(-1, out["conv2_a"].shape[-1])      # (places, F)
    places, side = len(weight), int(np.sqrt(len(weight)))
    fig = new_figure(
        1.4 + 1.15 * len(steps), "EM routing of one held-out image: where the parts are that choose each class",
        "maps: sum over capsule types of a_i R_ij at each place, as each M-step gets them, one scale; first row: "
        "before the first E-step, R uniform\nright: spread of the votes, after each M-step")
    grid = fig.add_gridspec(len(steps), N_CLASSES + 3, width_ratios=[1.2] + [1] * N_CLASSES + [0.15, 1.8])
    show_image(fig.add_subplot(grid[0, 0]), image[0], f"{NORB_NAMES[samples['labels'][at]]},\nnamed "
               f"{NORB_NAMES[out['scores'][0].argmax()]}")
    maps = [np.broadcast_to(step.R[0], (N_CLASSES, weight.size)).reshape(N_CLASSES, -1, places) * weight.T
            for step in steps]
    maps = [m.sum(1).reshape(N_CLASSES, side, side) for m in maps]
    top = max(m.max() for m in maps)
    for t, m in enumerate(maps):
        for j in range(N_CLASSES):
            ax = fig.add_subplot(grid[t, j + 1])
            picture = ax.imshow(m[j], cmap="viridis", vmin=0, vmax=top)
            ax.set(xticks=[], yticks=[])
            ax.set_title(NORB_NAMES[j] if t == 0 else "", fontsize=8)
            if j == 0:
                ax.set_ylabel(f"M-step {t + 1}", fontsize=8)
    fig.colorbar(picture, cax=fig.add_subplot(grid[:, -2]), label="assigned activation")
    ax = fig.add_subplot(grid[:, -1])
    for j in range(N_CLASSES):
        ax.plot(range(1, len(steps) + 1), [np.log(step.sigma2[0, j]).mean() for step in steps], "o-",
                color=CLASS_COLOURS[j], label=NORB_NAMES[j])
    ax.set(xlabel="M-step", ylabel="mean of log sigma^2", xticks=range(1, len(steps) + 1))
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def draw_pose_tracking(run):
    """The pose of the true class's capsule while its toys turn"""
    fig = new_figure(
        5.6, "The true class capsule's pose while the object turns, and whether the network still names it",
        "mean over test images of a view; the six entries (row, column) of the pose that vary most; dots below: share "
        "named right, from none (red) to all (blue)")
    axes = fig.subplots(2, 1, sharex=True)
    samples = {name: np.concatenate([run.data[part][name] for part in ("familiar", "held_out")])
               for name in ("images", "labels", "azimuths")}
    for ax, k in zip(axes, (2, 1)):
        rows = np.flatnonzero(samples["labels"] == k)
        azimuths = np.unique(samples["azimuths"][rows])
        with norb.Runner(run.config.threads) as runner:
            out = runner.forward(run.params, {"images": prepared(samples, rows), "labels": rows}, run.config)
        of = [samples["azimuths"][rows] == azimuth for azimuth in azimuths]
        pose = np.array([out["mu"][at, k].mean(0) for at in of])                                # (azimuths, D)
        for colour, h in zip((*CLASS_COLOURS, GRAY), np.argsort(-pose.var(0))[:6]):
            ax.plot(azimuths, pose[:, h], color=colour, label=f"entry {h // P + 1},{h % P + 1}")
        right = np.array([(out["scores"][at].argmax(1) == k).mean() for at in of])
        ax.scatter(azimuths, np.full(len(azimuths), pose.min() - 0.2 * np.ptp(pose)), c=right, cmap="RdYlBu", vmin=0,
                   vmax=1, s=18, edgecolors="black", linewidths=0.4, clip_on=False)
        shade_ranges(ax, run.config, text=ax is axes[0])
        ax.set(ylabel=f"pose of \"{NORB_NAMES[k]}\"", xlim=(0, 360), xticks=range(0, 361, 30))
        ax.legend(fontsize=7, ncols=1, loc="center left", bbox_to_anchor=(1, 0.5))
    axes[1].set_xlabel("azimuth, degrees")
    return fig


FACTORS = ("sin azimuth", "cos azimuth", "elevation", "x", "y")
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


def aliveness(params, run, n=2000):
    """How much life there is in the capsules of some weights, over n test images of familiar views, or all that there
    are, shifted at random -> dict: a, {layer: (mean activation at empty places, which see nothing but ground, and at
    others; None where there is no such place)}; used, {layer: share of types that are on somewhere and off elsewhere};
    entropy of the classes' R in each iteration, nats, weighted by the activations; r2, of a linear map from the true
    class capsule's pose to FACTORS, fitted on every other image, of the rest"""
    rng, samples = np.random.default_rng(0), run.data["familiar"]
    rows = rng.permutation(len(samples["labels"]))[:n]
    shifts = rng.integers(-3, 4, (len(rows), 2))
    ground = norb.standardize(samples["images"][rows])[:, :1, :1]
    images = shift_images(prepared(samples, rows) - ground, shifts) + ground                   # the ground moves in
    parts = [norb.forward(params, images[k:k + 16], run.config)[0] for k in range(0, len(rows), 16)]
    found = {"a": {}, "used": {}}
    for name in FIELDS:
        a = np.concatenate([part[f"{name}_a"] for part in parts])                              # (n, H, W, types)
        empty = is_ground(images, ground, name, 0.02)
        found["a"][name] = tuple(float(a[at].mean()) if at.any() else None for at in (empty, ~empty))
        found["used"][name] = float(((a.max((0, 1, 2)) > 0.5) & (a.min((0, 1, 2)) < 0.5)).mean())
    found["entropy"] = []
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
    azimuth = np.deg2rad(samples["azimuths"][rows])
    targets = np.stack([np.sin(azimuth), np.cos(azimuth), samples["elevations"][rows], *shifts.T[::-1]], 1)
    mu, scores = np.concatenate([part["mu"] for part in parts]), []
    for k in range(N_CLASSES):
        of = np.flatnonzero(samples["labels"][rows] == k)
        inputs = np.c_[mu[of, k], np.ones(len(of))].astype(float)
        fit = np.linalg.lstsq(inputs[::2], targets[of[::2]], rcond=None)[0]
        rest = targets[of[1::2]]
        left, spread = ((rest - inputs[1::2] @ fit) ** 2).sum(0), ((rest - rest.mean(0)) ** 2).sum(0)
        scores.append(np.where(spread > 0, 1 - left / np.maximum(spread, 1e-12), 0))           # 0 of what does not vary
    found["r2"] = dict(zip(FACTORS, np.mean(scores, 0).tolist()))
    return found


def before_and_after(run):
    """aliveness before training, with the statistics of some training images, and after it -> {"before", "after"}"""
    first, statistics = norb.init_params(run.config), {}
    images = prepared(run.data["train"], np.arange(0, len(run.data["train"]["labels"]), 37)[:64])
    norb.forward(first, images, run.config, statistics=statistics)
    return {"before": aliveness(first | statistics, run), "after": aliveness(run.params, run)}


def draw_alive(found):
    """What the capsules do before training and after it, as before_and_after says"""
    found = list(found.values())
    fig = new_figure(3.6, "Capsules before training and after it",
                     "at most 2,000 test images of familiar views, shifted by up to 3 px; empty: sees nothing but "
                     "ground, as hardly a place of conv2 does\nR^2: on images that the linear map was not fitted to, "
                     "mean over classes")
    axes = fig.subplots(1, 3, width_ratios=[1.3, 0.8, 1.4])
    for k, (colour, word) in enumerate(((GRAY, "before"), (BLUE, "after"))):
        values = [value or 0.0 for name in FIELDS for value in found[k]["a"][name]]
        x = np.arange(len(values)) + 0.4 * k - 0.2
        axes[0].bar(x, values, 0.38, color=colour, label=word)
        axes[1].plot(range(1, len(found[k]["entropy"]) + 1), found[k]["entropy"], "o-", color=colour)
        x = np.arange(len(FACTORS)) + 0.4 * k - 0.2
        axes[2].bar(x, np.maximum(list(found[k]["r2"].values()), 0), 0.38, color=colour)
    axes[0].set_xticks(range(2 * len(FIELDS)), [f"{name}\n{where}" for name in FIELDS for where in ("empty", "filled")],
                       fontsize=7)
    axes[0].set(ylim=(0, 1), title="mean activation, by place")
    axes[0].legend()
    axes[1].axhline(np.log(N_CLASSES), color="black", linewidth=1, linestyle=":")
    axes[1].set(ylim=(0, 1.8), xlabel="iteration", title="entropy of the classes' R,\nnats (dotted: uniform)",
                xticks=range(1, len(found[0]["entropy"]) + 1))
    axes[2].set_xticks(range(len(FACTORS)), [name.replace(" ", "\n") for name in FACTORS], fontsize=8)
    axes[2].set(ylim=(0, 1), title="R^2 from the true class's pose")
    return fig


FIGURES = {draw.__name__.removeprefix("draw_"): draw for draw in (
    draw_example_views, draw_toys, draw_elevation_strip, draw_training_curves, draw_extrapolation_bars,
    draw_per_class, draw_azimuth_accuracy, draw_pose_matrices, draw_alive, draw_gap_sweep, draw_em_routing,
    draw_pose_tracking)}
COMPARING = ("training_curves", "extrapolation_bars", "per_class", "azimuth_accuracy", "gap_sweep")
OF_CAPSULES = ("pose_matrices", "alive", "em_routing", "pose_tracking")
SWEPT = ("azimuth_accuracy", "gap_sweep", "pose_tracking")     # show azimuths, hence need --split azimuth


# ---------------------------------------------------------------- command line

def load_results(path):
    """The records of a file that the experiment's --out-json wrote, or of a table of results/, a record a line"""
    try:
        text = Path(path).read_text()
        found = [json.loads(part) for part in (text.splitlines() if path.endswith(".jsonl") else [text])]
        records = [record for results in found for record in results.get("runs", [results])]
        needed = ("label", "seed", "held_out", "history", "n_params", "config")
        if not records or any(name not in record for record in records for name in needed):
            raise KeyError
        return records
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give one that smallnorb_novel_viewpoint.py --out-json wrote") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path}: not a whole file of smallnorb_novel_viewpoint.py --out-json; give another") from None


def gather(args, wanted, say):
    """Train what the figures wanted need and what is not given -> Run"""
    given, records, compared = norb.given_of(args), [], None
    found, config = norb.look_at(args.load, args) if args.load else (None, norb.network_of(given, "caps"))
    if config.model != "caps":
        raise InputError(f"{args.load}: holds a {config.model} network; the figures need --model caps")
    norb.check_config(config)
    if args.results:
        records = load_results(args.results)
        compared = norb.config_of(records[0]["config"], args.results)
    data = norb.load_data(config, say) if {*OF_CAPSULES, "example_views", "elevation_strip"} & wanted.keys() else {}
    params, history = (found.weights, found.history) if found else ({}, {})
    if not records and set(COMPARING) & wanted.keys():
        configs = norb.networks_of(given)
        results = norb.run_all(configs, say)
        records, compared = [record for record, _ in results], next(iter(configs.values()))
        params = params or next((p for record, p in results if record["label"] == "caps"), {})
    if set(OF_CAPSULES) & wanted.keys() and not params:
        params, history = norb.train(config, data=data)
    return Run(config, params, history, data, records, compared)


def wanted_figures(args, say):
    """{name: function} of the figures that these flags can have"""
    wanted = {name: draw for name, draw in FIGURES.items() if args.only in ("", name)}
    if getattr(args, "data", "toys") == "shapes" or getattr(args, "split", "azimuth") == "toys":
        raise InputError("--data shapes, --split toys: the figures show toys from viewpoints that training never did; "
                         "leave the flag out")
    for name in [name for name in SWEPT if name in wanted and getattr(args, "split", "azimuth") != "azimuth"]:
        if args.only:
            raise InputError(f"--only {name}: needs --split azimuth; leave one of them out")
        say(f"no {name}: it needs --split azimuth")
        del wanted[name]
    if args.load and not set(OF_CAPSULES) & wanted.keys():
        raise InputError(f"--load: means nothing to --only {args.only}, which shows no single network; leave it out")
    return wanted


def main():
    parser = norb.Parser(description=__doc__)
    parser.add_argument(
        "--outdir", type=Path, default=OUTDIR, metavar="DIR", help=f"folder for the PNGs (default {OUTDIR})")
    parser.add_argument(
        "--only", default="", choices=tuple(FIGURES), help="draw this figure alone, and train only what it needs")
    parser.add_argument("--load", nargs="?", default="", const=str(WEIGHTS), metavar="FILE", help="draw poses and "
                        "routing of the capsule network in this file, a checkpoint or weights; without FILE of the one "
                        "that comes along")
    parser.add_argument("--results", default="", metavar="FILE", help="results of the networks to compare")
    norb.add_config_flags(parser)
    args = parser.parse_args()
    out_json = getattr(args, "out_json", "")
    if out_json and (args.only != "alive" or args.load):
        raise InputError("--out-json: results come from smallnorb_novel_viewpoint.py; here it goes with --only alive, "
                         "which then trains; leave the flag, or --load, out")
    norb.check_writable(out_json)
    say = norb.Progress(hasattr(args, "quiet")).say
    wanted = wanted_figures(args, say)
    norb.make_outdir(args.outdir, wanted)
    run = gather(args, wanted, say)
    for name, draw in wanted.items():
        if name == "alive":
            found = before_and_after(run)
            norb.write_figure(draw(found), args.outdir / "alive.png", say)
            if out_json:
                norb.write_json(out_json, norb.result_of(run.config, run.params, run.history, {"alive": found}))
        else:
            norb.write_figure(draw(run), args.outdir / f"{name}.png", say)


if __name__ == "__main__":
    norb.run_cli(main)
