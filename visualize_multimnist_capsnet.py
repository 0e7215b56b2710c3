#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Draws what multimnist_capsnet.py learns: trains it, or loads a network, and writes one PNG per figure. Or names the
two digits in a picture of yours.

    python3 visualize_multimnist_capsnet.py --n-epochs 12 --n-train 6000
    python3 visualize_multimnist_capsnet.py --load
    python3 visualize_multimnist_capsnet.py --image photo.png
    python3 visualize_multimnist_capsnet.py --only disentanglement --n-seeds 3
"""
import dataclasses
import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import multimnist_capsnet as capsnet  # before numpy: it sets the number of BLAS threads
from multimnist_capsnet import CANVAS, CHANCE, DIGIT_NAMES, N_CLASSES, InputError

import imageio.v3 as imageio
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

matplotlib.use("Agg")
matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
                            "image.interpolation": "nearest", "legend.frameon": False})
BLUE = "#0072B2"  # Okabe & Ito, colour-blind safe
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
GRAY = "#666666"
TINTS = np.array([[0.1, 0.55, 1], [1, 0.45, 0.05]])        # of the two digits; they add up to white where both have ink
WIDTH, LEVELS = 9, 15              # inches; gray levels where tiles are many: PNGs stay small
OUTDIR = Path("viz/multimnist_capsnet")
N_LOOK = 512                       # test pairs among which digits to perturb are picked, always the first that qualify


@dataclass(frozen=True)
class Run:
    """What the figures are drawn from"""
    config: capsnet.Config         # its seed is that of the test pairs
    trained: capsnet.Config        # its seed is that of the training
    params: dict
    history: dict
    source: str                    # of the digits drawn
    train_pairs: dict              # the first the network trained on
    test_pairs: dict
    lengths: np.ndarray            # (n_test, 10)
    right: np.ndarray              # (n_test,) bool: both digits named
    test: dict                     # evaluate's result over all test pairs


# ---------------------------------------------------------------- helpers

def new_figure(run, height, title):
    config, trained = run.trained, run.history["source"]
    fig = Figure((WIDTH, height), layout="constrained")
    fig.suptitle(title, fontsize=11)
    pairs = f"{config.n_train:,} fresh pairs"
    other = "" if trained == run.source else f" of {DIGIT_NAMES[trained]}"
    seeds = f"seed {config.seed}" + f", test pairs {run.config.seed}" * (run.config.seed != config.seed)
    tested = f", of test pairs {run.config.min_iou:g}" * (run.config.min_iou != config.min_iou)
    fig.supxlabel(
        f"{DIGIT_NAMES[run.source]}, {seeds}, trained on {len(run.history['epochs'])} x {pairs}{other}, IoU of the "
        f"frames' middle boxes at least {config.min_iou:g}{tested}", fontsize=8, color=GRAY)
    return fig


def show_montage(ax, images, columns, rows=None, gap=(3, 3)):
    """images (R, C, h, w[, 3]) in [0, 1] as one picture, columns and rows labelled -> y of the rows' tops"""
    images = images if images.ndim == 5 else np.repeat(images[..., None], 3, -1)
    (R, C, h, w, _) = images.shape
    step_y = images.shape[2] + gap[0]
    step_x = images.shape[3] + gap[1]
    picture = np.ones((R, step_y, C, step_x, 3))
    picture[:, :h, :, :w] = images.transpose(0, 2, 1, 3, 4)
    ax.imshow(picture.reshape(R * step_y, C * step_x, 3)[:R * step_y - gap[0], :C * step_x - gap[1]].clip(0, 1))
    ax.set_xticks(np.arange(C) * step_x + w / 2 - 0.5, columns)
    ax.set_yticks(np.arange(R) * step_y + h / 2 - 0.5 if rows is not None else [], rows)
    ax.tick_params(length=0, labelsize=8, labeltop=True, labelbottom=False)
    ax.spines[:].set_visible(False)
    return np.arange(R) * step_y - 0.5


def right_first(run, n):
    """n test pairs: the first that are named right, then, if these are too few, the first that are not"""
    return np.argsort(~run.right, kind="stable")[:n]


def forward(run, rows, digits=None):
    """forward over some of the test pairs -> (out, batch)"""
    batch = capsnet.to_batch(run.test_pairs, rows)
    return forward_with_grid(run.params, batch["images"], run.config, digits), batch


def forward_with_grid(params, images, config, digits=None):
    """forward's out, and in `grid` rows and columns of the places of primary capsules"""
    side = capsnet.work_out(capsnet.trunk(config), CANVAS, 1, rows=True).side
    return capsnet.forward(params, images, config, digits)[0] | {"grid": (side, side)}


def in_chunks(pairs):
    """A dict of pairs as dicts of at most CHUNK, so that what a network makes of them fits into memory"""
    for start in range(0, len(pairs["labels"]), capsnet.CHUNK):
        yield {name: array[start:start + capsnet.CHUNK] for name, array in pairs.items()}


def capsule_lengths(params, pairs, config, runner):
    """runner.forward's lengths (n, 10)"""
    return np.concatenate([runner.forward(params, part, config)["lengths"] for part in in_chunks(pairs)])


def routing_maps(params, out):
    """What routing did, from forward's out -> namespace of: c (r, N, J, I) of all iterations; weight (N, J, I), the
    length of each primary capsule; and by place, summed over its types, change (r, N, J, side, side), the weighted mean
    of c over its first value, less 1, and evidence (N, J, side, side), what the last c lets through along v_j"""
    u = out["u"]
    (N, I, _), J = u.shape, N_CLASSES
    c = np.stack([np.broadcast_to(step, (N, J, I)) for step in out["c"]])
    weight = np.broadcast_to(np.linalg.norm(u, axis=-1)[:, None], (N, J, I))
    votes, _ = capsnet.votes_forward(u, params["W"])                                    # (N, J, I, D)
    unit = out["v"] / out["lengths"][..., None]

    def per_place(x):
        return x.reshape(*x.shape[:-1], *out["grid"], -1).sum(-1)
    return SimpleNamespace(c=c, weight=weight, change=per_place(c * weight) / per_place(weight) * J - 1,
                           evidence=per_place(c[-1] * np.matmul(votes, unit[..., None])[..., 0]))


def words(digits):
    return " + ".join(map(str, digits))


# ---------------------------------------------------------------- figures

def draw_training_curves(run):
    fig, epochs = new_figure(run, 4, "Training"), run.history["epochs"]
    (left, right), x = fig.subplots(1, 2), [e["epoch"] for e in epochs]
    curves = ((left, "train_loss", "training, mean over the epoch", BLUE, "--"),
              (left, "val_loss", "validation, at the epoch's end", BLUE, "-"),
              (left, "val_margin", "validation, margin loss alone", ORANGE, "-"),
              (right, "val_any_accuracy", "validation, at least one digit", GREEN, "-"),
              (right, "val_set_accuracy", "validation, both (set accuracy)", BLUE, "-"),
              (right, "train_accuracy", "training, both, mean over the epoch", BLUE, "--"))
    for ax, name, label, colour, style in curves:
        ax.plot(x, [e[name] for e in epochs], style, color=colour, marker="o", markersize=3.5, label=label)
    right.axhline(CHANCE, color=GRAY, linestyle=":", label="chance, both (1/45)")
    left.set(ylabel="loss", ylim=(0, None))
    right.set(ylabel="accuracy", ylim=(0, 1))
    for ax in left, right:
        ax.set(xlabel="epoch", xlim=(0.5, len(x) + 0.5))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1))
        ax.grid(alpha=0.3)
    return fig


def draw_example_pairs(run, n=8):
    fig = new_figure(run, 3.95, "What the network sees (top), and the two digits it is made of. "
                     "Boxes: the middle 20x20 px of each digit's frame")
    pairs, n = run.train_pairs, min(n, len(run.train_pairs["labels"]))
    images = np.concatenate([pairs["composites"][:n, None], pairs["sources"][:n]], 1)
    images = images.swapaxes(0, 1) / 255                                                # (3, n, 36, 36)
    ax, iou = fig.subplots(), capsnet.box_iou(pairs["shifts"][:n])
    show_montage(ax, images, [f"{words(pairs['labels'][k])}\nIoU {iou[k]:.2f}" for k in range(n)],
                 ["composite", "digit a", "digit b"])
    corner = (CANVAS - capsnet.BOX) / 2 - 0.5
    for k in range(n):
        for which, (dy, dx) in enumerate(pairs["shifts"][k]):
            for row in (0, which + 1):
                ax.add_patch(Rectangle((k * (CANVAS + 3) + corner + dx, row * (CANVAS + 3) + corner + dy), capsnet.BOX,
                                       capsnet.BOX, fill=False, linewidth=1, edgecolor=TINTS[which]))
    return fig


def draw_reconstructions(run, n=5):
    """Masks with the true digits, and with the longest capsule whose digit is not there: the wrong name, where one is
    wrong"""
    fig = new_figure(run, 5.4,
                     "Each digit redrawn from its own capsule, all other capsules masked. Last column: the longest "
                     "capsule\nwhose digit is NOT in the image (where a name is wrong, the digit named wrongly)")
    for ax, right, colour in zip(fig.subplots(1, 2), (True, False), (BLUE, RED)):
        rows = np.nonzero(run.right == right)[0][:n]
        ax.set_title(f"the first {len(rows)} test pairs {'named right' if right else 'NOT named right'}", color=colour)
        if not len(rows):
            ax.axis("off")
            continue
        labels, lengths = run.test_pairs["labels"][rows], run.lengths[rows]
        absent = np.where(capsnet.k_hot(labels, bool), -1, lengths).argmax(1)
        out, batch = forward(run, rows, np.column_stack([labels, absent]))
        a = batch["sources"][:, 0]
        b = batch["sources"][:, 1]
        redrawn = out["recon"]
        images = np.stack([batch["images"], a, redrawn[:, 0], b, redrawn[:, 1], redrawn[:, 2]], 1)
        tops = show_montage(
            ax, images, ["input", "target\na", "redrawn\na", "target\nb", "redrawn\nb", "absent"], gap=(13, 3))
        for top, (a, b), named, c in zip(tops, labels, capsnet.top_two(lengths), absent):
            ax.text(-0.5, top + CANVAS + 1.5, f"there: {a}, {b}    named: {named[0]}, {named[1]}    absent: {c}",
                    va="top", fontsize=8, color=colour)
        ax.set_ylim(tops[-1] + CANVAS + 12, -0.5)
    return fig


def draw_segmentation(run, n=8):
    """The two longest capsules, found without labels; each takes the colour of its true twin, if it has one"""
    n = min(n, len(run.right))
    labels, named = run.test_pairs["labels"][:n], capsnet.top_two(run.lengths[:n])
    swap = (named[:, 0] == labels[:, 1]) | (named[:, 1] == labels[:, 0])
    named[swap] = named[swap, ::-1]
    out, batch = forward(run, np.arange(n), named)
    gray = batch["images"][..., None]
    true, redrawn = (np.einsum("nrhw,rc->nhwc", digits, TINTS) for digits in (batch["sources"], out["recon"]))
    dyed = gray * redrawn / np.maximum(out["recon"].max(1), 1e-6)[..., None]  # a sigmoid may round to 0
    fig = new_figure(run, 5.2,
                     "Who owns which pixel? The two longest capsules redrawn, one colour each, white where both have "
                     "ink\n(the first test pairs; label blue: named right, orange: not)")
    ax = fig.subplots()
    show_montage(ax, np.stack([gray.repeat(3, -1), true, np.maximum(redrawn, 0.3 * gray), dyed]),
                 [f"there {words(labels[k])}\nnamed {words(named[k])}" for k in range(n)],
                 ["composite", "true\ndigits", "redrawn, over\na faint composite", "composite, dyed\nby the redrawn"])
    for tick, right in zip(ax.get_xticklabels(), run.right):
        tick.set_color(BLUE if right else RED)
    return fig


def draw_capsule_activations(run, n=14):
    n = min(n, len(run.right))
    fig = new_figure(run, 4.8, "Which digits are there? The two longest capsules say")
    left, right = fig.subplots(1, 2, width_ratios=(1.75, 1))
    labels, named = run.test_pairs["labels"][:n], capsnet.top_two(run.lengths[:n])
    picture = left.imshow(run.lengths[:n], cmap="Greys", vmin=0, vmax=1, aspect="auto")
    for k in range(n):
        for digit in labels[k]:
            left.add_patch(Rectangle((digit - 0.44, k - 0.42), 0.88, 0.84, fill=False, linewidth=2, edgecolor=ORANGE))
    left.plot(named, np.arange(n), "o", markersize=5, color="#56B4E9", markeredgecolor="black", markeredgewidth=0.6)
    left.set(
        xlabel="digit $k$", ylabel="test pair (digits there)",
        title="the first test pairs; frame: digit is there, dot: named\n(label blue: named right, orange: not)")
    left.set_xticks(range(N_CLASSES))
    left.set_yticks(range(n), [words(pair) for pair in labels])
    for tick, good in zip(left.get_yticklabels(), run.right):
        tick.set_color(BLUE if good else RED)
    left.spines[:].set_visible(False)
    fig.colorbar(picture, ax=left, label=r"capsule length $\|v_k\|$", shrink=0.8)
    shares = [run.test["set_accuracy"], run.test["any_accuracy"] - run.test["set_accuracy"],
              1 - run.test["any_accuracy"]]
    names = [f"{name}\n{share:.2%}" for name, share in zip(("both", "one", "none"), shares)]
    right.bar(names, shares, color=[BLUE, ORANGE, RED])
    for x, chance in enumerate((CHANCE, 16 / 45, 28 / 45)):
        right.plot([x - 0.4, x + 0.4], [chance] * 2, ":", color="black", label="chance" if x == 0 else None)
    right.set(xlabel="digits named right", ylabel="share", ylim=(0, 1), title=f"all {run.test['n']:,} test pairs")
    right.yaxis.set_major_formatter(PercentFormatter(1))
    right.legend(fontsize=8)
    return fig


def draw_pose_perturbation(run, n=4, crop=24):
    """Adds -0.25..0.25 to one of the (first 16) dimensions of a digit's capsule, and decodes it alone"""
    picks = {}                                                              # digit -> row of the first pair that has it
    for row in right_first(run, N_LOOK):
        digit = next((d for d in run.test_pairs["labels"][row].tolist() if d not in picks), None)
        if digit is not None and len(picks) < n:
            picks[digit] = row
    offsets = np.arange(-5, 6) / 20
    J = N_CLASSES
    R = D = capsnet.D
    C = len(offsets)
    fig = new_figure(run, 12.5,
                     "What the dimensions of a digit's capsule mean: each changed by -0.25 ... 0.25 in steps of 0.05"
                     "\nThe middle column is the capsule as found in a test composite")
    for ax, (digit, row) in zip(fig.subplots(2, 2).flat, picks.items()):
        v, pair = forward(run, np.array([row]))[0]["v"][0], run.test_pairs["labels"][row]
        masked = np.zeros((R, C, J, D), v.dtype)
        masked[:, :, digit] = v[digit]
        masked[np.arange(R), :, digit, np.arange(R)] += offsets
        pixels, _ = capsnet.layers_forward(run.params, masked.reshape(R * C, J * D), capsnet.decoder(run.config))
        images = pixels.reshape(R, C, CANVAS, CANVAS)
        y, x = (CANVAS - crop) // 2 + run.test_pairs["shifts"][row, list(pair).index(digit)]
        images = np.round(images[:, :, y:y + crop, x:x + crop] * LEVELS) / LEVELS
        show_montage(ax, images, ["-0.25", *[""] * 4, "as found", *[""] * 4, "+0.25"], range(1, R + 1), gap=(1, 1))
        ax.set(title=f"capsule of digit {digit}, length {np.linalg.norm(v[digit]):.2f}, in {words(pair)}",
               ylabel="dimension")
    return fig


N_ROUTED = 64                      # test pairs over which the coupling is averaged


def coupling_findings(run):
    """Numbers of the coupling coefficients at first and at last, over N_ROUTED pairs, as far as there are so many all
    named right; couplings are means weighted by the primary capsules' lengths"""
    rows = right_first(run, N_ROUTED)
    out, batch = forward(run, rows)
    found, here = routing_maps(run.params, out), capsnet.k_hot(batch["labels"], bool)
    ends = found.c[[0, -1]]
    return {"pairs": len(rows), "named_right": int(run.right[rows].sum()),
            "entropy": [float(-(step * np.log(step + 1e-30)).sum(1).mean()) for step in ends],
            "coupling_to_digits_there": [float(np.average(c[here], weights=found.weight[here])) for c in ends],
            "coupling_to_others": [float(np.average(c[~here], weights=found.weight[~here])) for c in ends],
            "largest_coupling": float(ends[-1].max())}


def routing_findings(run, uniform_lengths):
    """coupling_findings; and, of all test pairs, set accuracy with the couplings of the first iteration, which made
    uniform_lengths (n_test, 10), and with the last, and likewise of error_counts' most hidden group"""
    groups = error_counts(run).group
    rights = capsnet.both_right(capsnet.top_two(uniform_lengths), run.test_pairs["labels"]), run.right
    hidden = groups == groups.min()
    return coupling_findings(run) | {
        "set_accuracy": [float(right.mean()) for right in rights],
        "set_accuracy_most_hidden": [float(right[hidden].mean()) for right in rights]}


def draw_routing(run, n=3):
    """Coupling against 1/10, its value before routing, on ONE scale for all maps: a scale each would oversell small
    changes"""
    out, batch = forward(run, right_first(run, N_ROUTED))
    labels = batch["labels"]
    sources = batch["sources"]
    maps_of, N = routing_maps(run.params, out), len(labels)
    c, weight, change, evidence = maps_of.c, maps_of.weight, maps_of.change, maps_of.evidence
    n, shown = min(n, N), np.unique(np.linspace(0, len(c) - 1, min(len(c), 3)).astype(int))   # at most three iterations
    there = np.arange(n)[:, None], labels[:n]
    span, reach = max(abs(change[:, there[0], there[1]]).max(), 0.01), max(abs(evidence[there]).max(), 1e-3)
    fig = new_figure(
        run, 8.3, "Routing: how far the coupling moves from its start, 1/10, and where a digit's evidence lies")
    maps, charts = fig.subfigures(1, 2, width_ratios=(2.05, 1))
    axes = maps.subplots(2 * n, 2 + len(shown), squeeze=False)
    for k, row in enumerate(axes):
        pair, which = divmod(k, 2)
        digit = labels[pair, which]
        source, rest = sources[pair, which], batch["images"][pair] - sources[pair, which]
        row[0].imshow(source[..., None] * TINTS[which] + 0.4 * rest[..., None])
        row[0].set_ylabel(f"{digit} in {words(labels[pair])}")
        for ax, r in zip(row[1:], shown):
            moved = ax.imshow(change[r, pair, digit], cmap="PuOr_r", vmin=-span, vmax=span)
        proof = row[-1].imshow(evidence[pair, digit], cmap="PuOr_r", vmin=-reach, vmax=reach)
        for ax, title in zip(row, ["digit", *(f"iteration {r + 1}" for r in shown), "evidence"]):
            ax.set(xticks=[], yticks=[], title=title if k == 0 else "")
            ax.spines[:].set_visible(True)
    maps.colorbar(moved, ax=axes[:, 1:-1], location="bottom", shrink=0.8, aspect=30, format=PercentFormatter(1, 0),
                  label=r"$c_{ij}$ against 1/10: mean over" "\n" r"types, weighted by $\|u_i\|$")
    maps.colorbar(proof, ax=axes[:, -1], location="bottom", aspect=12, ticks=[-reach, 0, reach], format="%.2g",
                  label=r"$c_{ij}\,\hat{u}_{j|i}$ along $v_j$" "\nsummed over types")
    top, bottom = charts.subplots(2, 1)
    for r, colour in zip(shown[1:], (ORANGE, BLUE)[-len(shown[1:]):]):
        top.hist(c[r].ravel(), np.linspace(0, max(0.2, c.max()), 60), histtype="step", linewidth=1.5, color=colour,
                 label=f"iteration {r + 1}")
    top.axvline(1 / N_CLASSES, color=GRAY, linestyle=":", label="iteration 1")
    first, last = coupling_findings(run)["entropy"]
    top.set(yscale="log", xlabel="coupling coefficient $c_{ij}$",
            ylabel=f"how many, in {N} test pairs,\nthose named right first",
            title=f"mean entropy {first:.4f} at first,\n{last:.4f} at last")
    here = capsnet.k_hot(labels, bool)
    for mask, label, colour in (here, "digits there", BLUE), (~here, "other digits", ORANGE):
        bottom.plot(range(1, len(c) + 1), [np.average(step[mask], weights=weight[mask]) for step in c], "o-",
                    color=colour, label=label)
    bottom.axhline(1 / N_CLASSES, color=GRAY, linestyle=":", label="1/10")
    bottom.set(xlabel="routing iteration", xlim=(0.5, len(c) + 0.5), ylabel=r"mean $c_{ij}$, weighted by $\|u_i\|$")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for ax in top, bottom:
        ax.legend(fontsize=8)
    return fig


N_BINS = 8                         # groups of equally many pairs, by what is to be seen


def error_counts(run):
    """What the errors hang on -> namespace of: total and wrong (10, 10), pairs by (larger, smaller) digit and those not
    named right; shown (n_test, 2), the share of each digit's ink beyond the other's; groups, of pairs by the lesser of
    these: a tuple of its mean, hits, size each; group (n_test,), the number of a pair's"""
    labels, right = run.test_pairs["labels"], run.right
    a, b = (run.test_pairs["sources"].astype(np.float32) / 255).swapaxes(0, 1)
    shown = np.stack([np.maximum(x - y, 0).sum((1, 2)) / x.sum((1, 2)) for x, y in ((a, b), (b, a))], 1)
    low, high = np.sort(labels, 1).T
    total, wrong = (np.zeros((N_CLASSES, N_CLASSES), int) for _ in range(2))
    np.add.at(total, (high, low), 1)
    np.add.at(wrong, (high, low), ~right)
    least = shown.min(1)
    edges = np.unique(np.quantile(least, np.linspace(0, 1, N_BINS + 1)))
    where = np.clip(np.searchsorted(edges, least, "right") - 1, 0, max(0, len(edges) - 2))
    groups = [(float(least[where == k].mean()), int(right[where == k].sum()), int((where == k).sum()))
              for k in np.unique(where)]
    return SimpleNamespace(total=total, wrong=wrong, shown=shown, groups=groups, group=where)


def error_findings(run, n=6):
    """Numbers of the errors: the sets of digits that are missed most and least, as (smaller, larger, share), and what
    the first and the last of error_counts' groups show and score"""
    found = error_counts(run)
    sets = [(int(x), int(y), float(found.wrong[y, x] / found.total[y, x])) for y, x in zip(*np.nonzero(found.total))]
    sets.sort(key=lambda pair: pair[2])
    (least, hits, size), (most, more_hits, more) = found.groups[0], found.groups[-1]
    return {"groups": len(found.groups), "hardest_sets": sets[:-n - 1:-1], "easiest_sets": sets[:n],
            "most_hidden": [least, hits / size], "least_hidden": [most, more_hits / more]}


def draw_errors(run, n=10):
    """Which sets of digits fail, how success depends on what is to be seen, and the failures whose missed digit is
    hidden most"""
    labels, right = run.test_pairs["labels"], run.right
    found, named = error_counts(run), capsnet.top_two(run.lengths)
    fig = new_figure(run, 7.6, f"Errors: {1 - right.mean():.1%} of {len(right):,} test pairs")
    top, bottom = fig.subfigures(2, 1, height_ratios=(1.45, 1))
    left, middle = top.subplots(1, 2, width_ratios=(1.1, 1))
    share = np.divide(found.wrong, found.total, out=np.full(found.total.shape, np.nan), where=found.total > 0)
    picture = left.imshow(share, cmap="Greys", vmin=0)
    for y, x in zip(*np.nonzero(found.total)):
        dark = share[y, x] > 0.55 * np.nanmax(share)
        left.text(x, y, f"{share[y, x]:.0%}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
    left.set(xticks=range(N_CLASSES - 1), yticks=range(1, N_CLASSES), xlabel="smaller digit", ylabel="larger digit",
             xlim=(-0.5, 8.5), ylim=(9.5, 0.5), title="share of pairs not named right, by the two digits there")
    left.spines[:].set_visible(False)
    top.colorbar(picture, ax=left, shrink=0.8, format=PercentFormatter(1, 0))
    lowest = 1.0
    for least, hits, count in found.groups:
        lower, upper = capsnet.wilson_interval(hits, count)
        lowest = min(lowest, lower)
        middle.errorbar(least, hits / count, [[hits / count - lower], [upper - hits / count]], fmt="o", color=BLUE)
    middle.set(xlabel="share of the more hidden digit's ink beyond the other's", ylabel="set accuracy",
               ylim=(max(0, lowest - 0.1), 1.01),
               title=f"set accuracy, {len(found.groups)} equal groups of pairs, 95% intervals")
    middle.grid(alpha=0.3)
    missed = np.stack([(labels[:, [k]] != named).all(1) for k in (0, 1)], 1)                   # (n_test, 2)
    order = [(n_, k) for n_, k in sorted(zip(*np.nonzero(missed)), key=lambda at: found.shown[at])][:n]
    ax = bottom.subplots()
    if not order:
        ax.axis("off")
        return fig
    pairs = run.test_pairs
    images = np.array([[pairs["composites"][r], pairs["sources"][r, k], pairs["sources"][r, 1 - k]] for r, k in order])
    titles = [f"there {words(labels[r])}\nnamed {words(named[r])}\n{found.shown[r, k]:.0%} seen" for r, k in order]
    show_montage(ax, images.swapaxes(0, 1) / 255, titles, ["composite", "missed", "other"])
    ax.tick_params(labelsize=7)
    ax.set_title("the failures whose missed digit is hidden most", color=RED)
    return fig


QUIZ_ANSWERS = "quiz_answers.txt"
QUIZ = 10                          # rows, and columns, of test pairs that a reader may try


def draw_quiz(run):
    """The first test pairs, and nothing that says what they are"""
    images = run.test_pairs["composites"][:QUIZ * QUIZ] / 255
    rows = -(-len(images) // QUIZ)
    empty = np.ones((rows * QUIZ - len(images), *images.shape[1:]))
    fig = new_figure(run, 0.9 * rows + 0.9, f"Which two digits? {len(images)} test pairs")
    show_montage(fig.subplots(), np.concatenate([images, empty]).reshape(rows, QUIZ, *images.shape[1:]),
                 [f"+{k}" for k in range(QUIZ)], [QUIZ * k for k in range(rows)])
    return fig


def quiz_answers(run):
    """-> the answers to draw_quiz's questions, and the network's where they are others, as text"""
    labels, right = np.sort(run.test_pairs["labels"][:QUIZ * QUIZ], 1), run.right[:QUIZ * QUIZ]
    named = capsnet.top_two(run.lengths)
    lines = [f"{k}: {a} {b}" + ("" if right[k] else f"   (the network says {named[k][0]} {named[k][1]})")
             for k, (a, b) in enumerate(labels)]
    return "\n".join((f"quiz.png: its network names both digits of {right.sum()} of {len(right)} pairs", *lines, ""))


FIGURES = {draw.__name__.removeprefix("draw_"): draw for draw in (
    draw_training_curves, draw_example_pairs, draw_reconstructions, draw_segmentation, draw_capsule_activations,
    draw_pose_perturbation, draw_routing, draw_errors, draw_quiz)}


# ---------------------------------------------------------------- disentanglement

FACTORS = ("x", "y", "rotation", "slant", "width", "stroke")
FIT = 3                            # of --n-test: pairs to fit linear maps on
CHOOSE, SCORE = 0.5, 0.5           # to choose the ridge with, to score
LEAST_PAIRS = 200                  # --n-test with which every class has digits in each part
DIGITS_A_PAIR = 0.75               # digits synthesized for each of these pairs
RIDGES = 10.0 ** np.arange(-4, 4)  # of n, the number of digits
EVALUATION_SEED = 1_000_000        # added to a run's seed: digits that no network was trained on


def factor_pairs(n, seed, config):
    """n pairs of synthetic digits and the factors (n, 2, 6) of each: place in px, rotation, slant, log aspect, log
    stroke width"""
    images, labels, known = capsnet.synthesize_digits(max(200, int(n * DIGITS_A_PAIR)), seed)
    pairs = capsnet.generate_multimnist(
        images, labels, n, capsnet.rng_for(seed, "evaluation"), config.min_iou, config.merge)
    style = np.stack([known["rotation"], known["slant"], np.log(known["aspect"]), np.log(known["stroke"])], -1)[
        pairs["index"]]
    return pairs, np.concatenate([pairs["shifts"][..., ::-1], style], -1)


def linear_r2(features, factors, digits, sizes):
    """R^2 of linear maps, one for each digit class, from features (n, D) to factors (n, F). digits (n,): the classes.

    The first sizes[0] rows fit it by ridge regression, the next sizes[1] choose each factor's ridge, the rest give R^2
    = 1 - residual / variance about the class's mean, both summed over the classes: knowing the class alone earns
    nothing. -> (F,)
    """
    ends = np.cumsum(sizes)
    residual, variance = np.zeros((2, len(RIDGES), factors.shape[1])), np.zeros(factors.shape[1])
    for digit in range(N_CLASSES):
        rows = [np.nonzero(digits[start:end] == digit)[0] + start for start, end in zip((0, *ends[:-1]), ends)]
        x, y = features[rows[0]].astype(np.float64), factors[rows[0]]
        centre = x.mean(0)
        scale = x.std(0)
        middle = y.mean(0)
        scale = np.maximum(scale, 0.05 * scale.max() + 1e-12)    # a pixel hardly ever inked must not outweigh others
        x = (x - centre) / scale
        values, vectors = np.linalg.eigh(x.T @ x / len(x))
        projected = vectors.T @ (x.T @ (y - middle)) / len(x)
        for part in (0, 1):
            seen, truth = (features[rows[part + 1]] - centre) / scale @ vectors, factors[rows[part + 1]]
            for k, ridge in enumerate(RIDGES):
                guess = seen @ (projected / (values + ridge)[:, None]) + middle
                residual[part, k] += np.square(truth - guess).sum(0)
        variance += np.square(truth - truth.mean(0)).sum(0)
    return 1 - residual[1][residual[0].argmin(0), np.arange(factors.shape[1])] / variance


def networks_to_probe(config, given):
    """The capsule network with and without reconstruction, and the CNN of its size, all on synthetic digits placed
    independently of each other: with an IoU of at least 0.8 the middle of the pair alone tells 96% of the variance of
    each digit's place. given: {name: value} of the settings that were given, which the CNN gets, too"""
    config = dataclasses.replace(config, digits="synthetic", min_iou=0.0)
    return {"capsule": config, "capsule, trained without reconstruction": dataclasses.replace(config, recon_weight=0.0),
            "CNN, last hidden layer": capsnet.Config(**given | {
                "model": "cnn", "digits": "synthetic", "min_iou": 0.0, "conv1_channels": 16})}


def score_features(found, factors, digits, sizes, name, features):
    """Add linear_r2 of a representation to found, {name: (its dimensions, list of R^2)}"""
    found.setdefault(name, (features.shape[1], []))[1].append(linear_r2(features, factors, digits, sizes))


def disentanglement(config, given, n_seeds, say):
    """-> {representation: (its number of dimensions, R^2 (n_seeds, 6))}, of networks trained here with seeds
    config.seed, ..., and the first seed's capsule network: its config, params, history"""
    found, networks, first = {}, networks_to_probe(config, given), None
    config = networks["capsule"]
    for seed in range(config.seed, config.seed + n_seeds):
        sizes = [int(share * config.n_test) for share in (FIT, CHOOSE, SCORE)]
        parts = [factor_pairs(n, EVALUATION_SEED + 3 * seed + k, config) for k, n in enumerate(sizes)]
        pairs = {
            name: np.concatenate([part[name] for part, _ in parts]) for name in ("composites", "sources", "labels")}
        factors, digits = np.concatenate([f for _, f in parts]).reshape(-1, len(FACTORS)), pairs["labels"].ravel()

        score = functools.partial(score_features, found, factors, digits, [2 * n for n in sizes])
        for name, network in networks.items():
            network = dataclasses.replace(network, seed=seed)
            say(f"seed {seed}: {name}")
            params, history = capsnet.train(network)
            first = first or (network, params, history)
            with capsnet.Runner(network.threads) as runner:
                score(name, np.concatenate([probed(runner.forward(params, part, network), part["labels"])
                                            for part in in_chunks(pairs)]))
        score("raw pixels", np.repeat(pairs["composites"].reshape(len(pairs["labels"]), -1), 2, 0))
    return {name: (size, np.array(rows)) for name, (size, rows) in found.items()}, first


def probed(out, labels):
    """What stands for each of the two digits that are there: its capsule or, in the CNN, the hidden layer ->
    (2 n, D)"""
    if "v" in out:
        return np.take_along_axis(out["v"], labels[..., None], 1).reshape(2 * len(labels), -1)
    return np.repeat(out["hidden"], 2, 0)


def draw_disentanglement(found, config, n_seeds):
    fig = Figure((WIDTH, 4.2), layout="constrained")
    ax = fig.subplots()
    colours, places = (BLUE, "#56B4E9", ORANGE, GRAY), np.arange(len(FACTORS))
    for k, (name, (size, r2)) in enumerate(found.items()):
        mean, half = np.array([capsnet.mean_and_interval(column) for column in r2.T]).T
        ax.bar(places + (k - 1.5) * 0.2, mean, 0.19, yerr=half if n_seeds > 1 else None, color=colours[k],
               label=f"{name} ({size}-D)", capsize=2)
    ax.set_xticks(places, FACTORS)
    ax.set(ylabel="$R^2$ of a linear map, on new pairs", ylim=(min(0, *(r2.min() for _, r2 in found.values())), 1))
    ax.grid(axis="y", alpha=0.3)
    ax.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    fig.suptitle("What can be read off linearly about ONE of two overlapping digits?", fontsize=11)
    fig.supxlabel(
        f"SYNTHETIC digits, all shifts, seeds {config.seed} to {config.seed + n_seeds - 1}, {config.n_epochs} x "
        f"{config.n_train:,} pairs, preset {config.preset}\na linear map for each digit class, fitted to "
        f"{int(2 * FIT * config.n_test):,} digits; 95% intervals over the seeds", fontsize=8, color=GRAY)
    return fig


# ---------------------------------------------------------------- a picture of one's own

WORK_SIDE = 300                    # px to which a larger picture is averaged down
LEAST_SIDE = 12                    # px that a picture must have
LEAST_CONTRAST = 0.12              # of ink to ground, black to white being 1; and this many deviations of the noise:
LEAST_SIGNAL = 6
SPECK = 0.03                       # of the largest spot's ink: what is less is dirt
DIGITS_SPAN = 22                   # px of the canvas, the longer side of both digits' ink: chosen on validation pairs
LEAST_STROKE = 2.8                 # px of the canvas: thinner strokes are broadened to it; in MNIST's pairs it is 3.6
# An answer is a guess where the second capsule is shorter than the first number, or leads the third by less than the
# other. Chosen on validation pairs, of which 12% are guesses then, right in 0.74, the others in 0.99; of single digits
# 91% are, of a digit over another of its class 95%, of pairs turned by 90 degrees 93%, by 180 degrees 72%, of three
# digits 58%.
LEAST_LENGTH, LEAST_LEAD = 0.8, 0.5
GROUND_FITS, SURFACE = 8, 2        # rounds of fitting the ground, and its degree: light falls unevenly on paper


def read_picture(path):
    """A picture file -> its gray levels (h, w) float64, 0 black, 1 white, averaged down to about WORK_SIDE px"""
    if not Path(path).is_file():
        fault = "is a folder" if Path(path).is_dir() else "no such file"
        raise InputError(f"--image {path}: {fault}; give a PNG or JPEG")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with imageio.imopen(path, "r", plugin="pillow") as file:
                mode = file.metadata(index=0, exclude_applied=False).get("mode", "")
                plain = mode.startswith(("I", "F"))                                     # 16 or 32 bits: no conversion
                pixels = np.asarray(file.read(index=0, rotate=True, mode=None if plain else "RGBA"))
    except MemoryError:
        raise
    except Exception as error:                                      # the decoder of each format has errors of its own
        fault = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
        raise InputError(f"--image {path}: no picture that can be read ({fault}); give a whole PNG or JPEG") from None
    if min(pixels.shape[:2]) < LEAST_SIDE:
        size = " x ".join(map(str, pixels.shape[1::-1]))
        raise InputError(f"--image {path}: has {size} px; give one of at least {LEAST_SIDE} on each side")
    block = -(-max(pixels.shape[:2]) // WORK_SIDE)
    if plain:
        if not np.isfinite(pixels).all():
            raise InputError(f"--image {path}: holds what is no number; give another")
        return block_means(pixels[..., None], block)[..., 0].clip(0) / max(1, pixels.max())
    red, green, blue, alpha = np.moveaxis(block_means(pixels, block) / 255, -1, 0)
    gray = 0.299 * red + 0.587 * green + 0.114 * blue
    behind = float((gray * alpha).sum() < 0.5 * alpha.sum())                           # white, if what is drawn is dark
    return gray * alpha + behind * (1 - alpha)


def block_means(pixels, block):
    """Means of block x block px, what is left over at the edge dropped. (h, w, C) -> (h // block, w // block, C)"""
    h, w = (max(1, side // block) for side in pixels.shape[:2])
    cut = pixels[:h * block, :w * block].reshape(h, -1, w, min(block, pixels.shape[1]), pixels.shape[2])
    return np.stack([cut[..., k].mean((1, 3), dtype=np.float64) for k in range(pixels.shape[2])], -1)


def find_ink(gray, path):
    """Gray levels (h, w) -> ink (h, w) in [0, 1]: what differs from the ground, to its darker or its lighter side

    The ground is a smooth surface fitted to the pixels that lie near it; noise is how far these scatter. Ink is the
    side with more of what lies beyond the noise. Where nothing stands out so, as in a tight crop, whose ground may be
    less than half of it, the fit begins at the picture's frame. Raises InputError if nothing stands out then either.
    """
    h, w = gray.shape
    y, x = (grid.ravel() for grid in np.mgrid[-1:1:h * 1j, -1:1:w * 1j])
    terms = np.stack([x ** i * y ** j for i in range(SURFACE + 1) for j in range(SURFACE + 1 - i)], 1)
    values = gray.ravel()
    frame = np.concatenate([gray[[0, -1]].ravel(), gray[:, [0, -1]].ravel()])
    for start, share, sigmas in (gray, 0.5, 0.6745), (frame, 0.25, 0.3186):            # of a tight crop half may be ink
        above = np.abs(values - np.median(start))
        near = above <= np.quantile(above, share)
        for _ in range(GROUND_FITS):
            surface = terms @ np.linalg.lstsq(terms[near], values[near], rcond=None)[0]
            above = values - surface
            noise = max(np.quantile(np.abs(above), share) / sigmas, 1e-3)
            near = np.abs(above) <= 2.5 * noise
        beyond = [np.maximum(sign * above - 3 * noise, 0) for sign in (-1, 1)]
        ink = (-above if beyond[0].sum() >= beyond[1].sum() else above).reshape(h, w)
        strong = ink[ink > max(LEAST_CONTRAST, LEAST_SIGNAL * noise)]
        if strong.size >= 8:
            break
    else:
        raise InputError(f"--image {path}: holds no ink that stands out from its ground; give a picture of two digits "
                         "written over each other, dark on light or light on dark")
    contrast = (strong ** 5).sum() / (strong ** 4).sum()                                # of pen, not of ruled lines
    ink = np.clip((ink - 0.3 * contrast) / (0.5 * contrast), 0, 1)
    return without_specks(ink)


def without_specks(ink):
    """Drop the spots that have less than SPECK of the largest one's ink, and those that touch the picture's edge, such
    as a shadow or the table beside the paper, unless all do"""
    spots, seen = [], ink < 0.5
    h, w = ink.shape
    for start in zip(*np.nonzero(~seen)):
        if seen[start]:
            continue
        spot, todo = [], [start]
        seen[start] = True
        while todo:
            y, x = todo.pop()
            spot.append((y, x))
            for at in ((y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)):
                if 0 <= at[0] < h and 0 <= at[1] < w and not seen[at]:
                    seen[at] = True
                    todo.append(at)
        spots.append(np.array(spot).T)
    inside = [spot for spot in spots if spot.min() > 0 and spot[0].max() < h - 1 and spot[1].max() < w - 1]
    large = SPECK * max(spot.shape[1] for spot in spots)
    kept = [spot for spot in inside if spot.shape[1] >= large] or spots
    mask = np.zeros((h + 2, w + 2), bool)
    for y, x in (spot for spot in kept if spot.shape[1] >= large):
        mask[y + 1, x + 1] = True
    around = np.any([mask[1 + dy:h + 1 + dy, 1 + dx:w + 1 + dx] for dy in (-1, 0, 1) for dx in (-1, 0, 1)], 0)
    return ink * around                                                                 # soft edges belong to a spot


def ink_box(ink):
    """-> top, bottom, left, right of what is inked, in px"""
    rows, columns = (np.nonzero((ink >= 0.5).any(axis))[0] for axis in (1, 0))
    return rows[0], rows[-1] + 1, columns[0], columns[-1] + 1


def broadened(ink, radius):
    """Each pixel the maximum over a disc around it"""
    reach = int(radius)
    padded, out = np.pad(ink, reach), ink.copy()
    for dy, dx in ((dy, dx) for dy in range(-reach, reach + 1) for dx in range(-reach, reach + 1)):
        if dy * dy + dx * dx <= radius * radius:
            np.maximum(out, padded[reach + dy:reach + dy + len(ink), reach + dx:reach + dx + ink.shape[1]], out=out)
    return out


def to_canvas(ink, span=DIGITS_SPAN):
    """Ink (h, w) -> canvas (36, 36) in [0, 1]: its box centred, `span` px long on its longer side, thin strokes
    broadened. A canvas pixel is the mean of the ink that falls on it."""
    top, bottom, left, right = ink_box(ink)
    scale = span / max(bottom - top, right - left)
    edges = np.hypot(*np.gradient(np.pad(ink, 1)))
    stroke = 2 * ink.sum() / edges.sum()                                        # a strip's area over half its outline
    if stroke * scale < LEAST_STROKE:
        margin = int(np.ceil(LEAST_STROKE / scale))
        ink = broadened(np.pad(ink, margin), (LEAST_STROKE / scale - stroke) / 2)
        top, bottom, left, right = ink_box(ink)
        scale = span / max(bottom - top, right - left)

    def shares(low, high, n):
        """(36, n): how much of each canvas pixel each source pixel covers, along one side"""
        begins = (np.arange(n) - (low + high) / 2) * scale + CANVAS / 2
        pixel = np.arange(CANVAS)[:, None]
        return np.maximum(np.minimum(begins + scale, pixel + 1) - np.maximum(begins, pixel), 0)
    canvas = shares(top, bottom, len(ink)) @ ink @ shares(left, right, ink.shape[1]).T
    return canvas.clip(0, 1).astype(np.float32)


def draw_picture(found, gray, ink, say):
    """Name the two digits in a picture's ink, by a network that was loaded, redraw each, show its routing"""
    config, image = found.config, to_canvas(ink)
    out = forward_with_grid(found.weights, image[None], config)
    named, lengths, maps = out["digits"][0], out["lengths"][0], routing_maps(found.weights, out)
    third = int(np.argsort(-lengths)[2])
    guess = bool(lengths[named[1]] < LEAST_LENGTH or lengths[named[1]] - lengths[third] < LEAST_LEAD)
    word = "a guess" if guess else "named"
    say(f"{word}: {named[0]} and {named[1]}; lengths {lengths[named[0]]:.2f} and {lengths[named[1]]:.2f}, the next, of "
        f"{third}, {lengths[third]:.2f}")
    if guess:
        say("two digits written over each other would give two lengths near 0.9, and no third")
    redrawn = out["recon"][0]
    both = np.einsum("rhw,rc->hwc", redrawn, TINTS)
    fig = Figure((WIDTH, 4.6), layout="constrained")
    fig.suptitle(f"{word.capitalize()}: {named[0]} and {named[1]}" + " (not two capsules alone are long)" * guess,
                 fontsize=11)
    fig.supxlabel(f"a network trained on {len(found.history['epochs'])} x {config.n_train:,} pairs of "
                  f"{DIGIT_NAMES[found.source]}, seed {config.seed}; second row: where each digit's coupling moved in "
                  f"{config.routing_iters} iterations, and what that sends", fontsize=8, color=GRAY)
    axes = fig.subplots(2, 5)
    top, bottom, left, right = ink_box(ink)
    axes[0, 0].imshow(gray, cmap="gray", vmin=0, vmax=1)
    axes[0, 0].add_patch(Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, edgecolor=ORANGE))
    pictures = (None, image, redrawn[0], redrawn[1], both.clip(0, 1))
    titles = ("the picture,\nits ink boxed", "as the network\nsees it",
              *(f"{k} redrawn\nfrom its capsule" for k in named), "both, each\nin its colour")
    for ax, picture, title in zip(axes[0], pictures, titles):
        if picture is not None:
            ax.imshow(picture, cmap="gray", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[], title=title)
        ax.spines[:].set_visible(picture is None)
    change, evidence = maps.change[-1, 0, named], maps.evidence[0, named]
    for block, values, label, form, least in (
            (axes[1, :2], change, "{} coupling\nagainst 1/10", PercentFormatter(1, 0), -1),     # none left: -100%
            (axes[1, 2:4], evidence, "{} evidence", "%.2g", -np.inf)):
        limit = max(abs(values).max(), 1e-3)
        for ax, value, digit in zip(block, values, named):
            shown = ax.imshow(value, cmap="PuOr_r", vmin=-limit, vmax=limit)
            ax.set(xticks=[], yticks=[], title=label.format(f"{digit}:"))
            ax.spines[:].set_visible(True)
        low = max(-limit, least)
        bar = fig.colorbar(shown, ax=block, location="bottom", shrink=0.7, aspect=30, format=form,
                           ticks=[low, 0, limit])
        bar.ax.set_xlim(low, limit)
    bars = axes[1, 4]
    bars.bar(range(N_CLASSES), lengths, color=[BLUE if j in named else "#bbbbbb" for j in range(N_CLASSES)])
    bars.set(ylim=(0, 1), yticks=[0, 0.5, 1], title="capsule lengths", xlabel="digit")
    bars.set_xticks(range(N_CLASSES), range(N_CLASSES), fontsize=7)
    return fig


# ---------------------------------------------------------------- command line

def figures_of_one_run(args, found, config, say):
    """Train, or take the network that was found, evaluate it and draw -> {file: Figure, or text}"""
    digits = capsnet.load_digits(config, say)
    params, history = (found.weights, found.history) if found else capsnet.train(config, data=digits)
    test_pairs = capsnet.draw_pairs(digits, "test", config.n_test, config, "evaluation", 1)
    with capsnet.Runner(config.threads, progress=capsnet.Progress(config.quiet)) as runner:
        test = capsnet.evaluate(params, in_chunks(test_pairs), config, runner)
        lengths = capsule_lengths(params, test_pairs, config, runner)
        uniform = capsule_lengths(params, test_pairs, dataclasses.replace(config, routing_iters=1), runner)
    right = capsnet.both_right(capsnet.top_two(lengths), test_pairs["labels"])
    trained = found.config if found else config
    shown = next(capsnet.epoch_samples(digits, 0, trained))
    run = Run(config, trained, params, history, digits["source"], shown, test_pairs, lengths, right, test)
    figures = {f"{name}.png": draw(run) for name, draw in FIGURES.items() if args.only in ("", name)}
    if "quiz.png" in figures:
        figures[QUIZ_ANSWERS] = quiz_answers(run)
    findings = {"errors": error_findings(run), "routing": routing_findings(run, uniform)}
    capsnet.report(config, params, {**history, "source": digits["source"]}, test, say, found, **findings)
    return figures


def figures_of_disentanglement(config, given, n_seeds, say):
    found, first = disentanglement(config, given, n_seeds, say)
    if config.out_json:
        r2 = {"factors": FACTORS} | {name: [size, *rows[0].tolist()] for name, (size, rows) in found.items()}
        capsnet.write_json(config.out_json, capsnet.result_of(*first, {"r2": r2}))
    for name, (size, r2) in found.items():
        say(f"{name} ({size}-D): " + "  ".join(f"{factor} {mean:.3f}" for factor, mean in zip(FACTORS, r2.mean(0))))
    return {"disentanglement.png": draw_disentanglement(found, config, n_seeds)}


def check_flags(args, found, config):
    """Refuse what does not go together"""
    if config.model != "caps":
        fault = "--load: holds a CNN, which has no capsules to draw; give another" if found else (
            f"--model {config.model}: it has no capsules to draw; leave the flag out")
        raise InputError(fault)
    for name in capsnet.given_of(args) if args.image is not None else ():
        if name not in ("quiet", "threads"):
            raise InputError(f"{capsnet.flag_of(name)}: means nothing to --image; leave it out")
    if config.n_test > 100_000:
        raise InputError(f"--n-test {config.n_test}: figures hold their pairs in memory; give at most 100000")
    if args.image is not None and args.only:
        raise InputError("--image: draws one figure, of that picture; leave --only out")
    if args.n_seeds is not None and (not 1 <= args.n_seeds <= 100 or args.only != "disentanglement"):
        raise InputError(f"--n-seeds {args.n_seeds}: must be 1 to 100, and goes with --only disentanglement")
    if args.only != "disentanglement":
        return
    if not config.recon_weight:
        raise InputError("--recon-weight 0: disentanglement compares with that anyway; leave the flag out")
    if config.out_json and args.n_seeds != 1:
        raise InputError("--out-json: a result is of one seed; give --n-seeds 1, or leave the flag out")
    if found or config.checkpoint or config.digits == "mnist" or config.min_iou not in (
            0, capsnet.Config.min_iou):
        raise InputError(
            "--only disentanglement trains networks of its own, on synthetic digits with all shifts; leave --load, "
            "--checkpoint, --digits mnist and --min-iou out")
    if config.n_test < LEAST_PAIRS:
        raise InputError(f"--n-test {config.n_test}: must be at least {LEAST_PAIRS} for linear maps of ten digits")


def main():
    parser = capsnet.Parser(description=__doc__)
    parser.add_argument("--outdir", type=Path, metavar="DIR",
                        help=f"folder for the PNGs (default {OUTDIR}, with --image the current folder)")
    capsnet.add_load_flag(parser, "draw instead of training: the network")
    parser.add_argument("--image", metavar="PICTURE", help="name and redraw the two overlapping digits in a picture of "
                        "any size, ink dark on light or light on dark, by the network of --load; writes "
                        "PICTURE_digits.png")
    parser.add_argument("--only", default="", choices=(*FIGURES, "disentanglement"),
                        help="draw this figure alone; disentanglement is "
                        "drawn only if asked for: it trains three networks a seed, on synthetic digits")
    parser.add_argument("--n-seeds", type=int, metavar="N", help="seeds of disentanglement, from --seed on (default 3)")
    capsnet.add_config_flags(parser)
    args = parser.parse_args()
    pictured = args.image is not None
    load = str(capsnet.WEIGHTS) if pictured and args.load is None else args.load
    if pictured:
        check_flags(args, None, capsnet.Config())
    found, config = capsnet.look_at(load, args) if load is not None else (None, capsnet.config_from_args(args))
    capsnet.check_config(config)
    check_flags(args, found, config)
    outdir = args.outdir or (Path() if pictured else OUTDIR)
    name = f"{Path(args.image).stem}_digits" if pictured else args.only
    gray = read_picture(args.image) if pictured else None
    ink = find_ink(gray, args.image) if pictured else None
    capsnet.make_outdir(outdir, [name] if name else FIGURES)
    say = capsnet.Progress(config.quiet).say
    if pictured:
        figures = {f"{name}.png": draw_picture(found, gray, ink, say)}
    elif args.only == "disentanglement":
        n_seeds = 3 if args.n_seeds is None else args.n_seeds
        figures = figures_of_disentanglement(config, capsnet.given_of(args), n_seeds, say)
    else:
        figures = figures_of_one_run(args, found, config, say)
    for name, drawn in figures.items():
        if isinstance(drawn, Figure):
            capsnet.write_figure(drawn, outdir / name, say)
        else:
            capsnet.write_atomically(outdir / name, lambda file, text=drawn: file.write(text.encode()))
            say(f"wrote {outdir / name}")


if __name__ == "__main__":
    capsnet.run_cli(main)
