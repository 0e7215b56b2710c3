#!/usr/bin/env python3
"""Draws what multimnist_capsnet.py learns: trains it, or loads a checkpoint, and writes one PNG per figure.

    python3 visualize_multimnist_capsnet.py --n-epochs 12 --n-train 6000
    python3 visualize_multimnist_capsnet.py --load run.npz
    python3 visualize_multimnist_capsnet.py --only disentanglement --n-seeds 3
"""
import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

import multimnist_capsnet as capsnet  # before numpy: it sets the number of BLAS threads
from multimnist_capsnet import CANVAS, CHANCE, DIGIT_NAMES, N_CLASSES, InputError

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
    config: capsnet.Config
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
    config, trained = run.config, run.history["source"]
    fig = Figure((WIDTH, height), layout="constrained")
    fig.suptitle(title, fontsize=11)
    pairs = f"{config.n_train:,} {'pooled' if config.fixed_pool else 'fresh'} pairs"
    other = "" if trained == run.source else f" of {DIGIT_NAMES[trained]}"
    fig.supxlabel(
        f"{DIGIT_NAMES[run.source]}, seed {config.seed}, trained on {len(run.history['epochs'])} x {pairs}{other}, IoU "
        f"of the digits' boxes at least {config.min_iou:g}", fontsize=8, color=GRAY)
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
    return capsnet.forward(run.params, batch["images"], run.config, digits)[0], batch


def capsule_lengths(params, pairs, config, runner):
    """runner.forward's lengths (n, 10), a chunk of pairs at a time, so that the redrawn digits need not fit into
    memory"""
    chunks = range(0, len(pairs["labels"]), capsnet.CHUNK)
    return np.concatenate(
        [runner.forward(params, {k: a[start : start + capsnet.CHUNK] for k, a in pairs.items()}, config)["lengths"]
         for start in chunks])


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
                     "Boxes: 20x20 px around each digit")
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
                     "ink\n(the first test pairs; label blue: named right, red: not)")
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
        title="the first test pairs; frame: digit is there, dot: digit is named\n(label blue: named right, red: not)")
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
    D = run.config.digit_dim
    R, C = min(D, 16), len(offsets)
    fig = new_figure(run, 12.5,
                     "What the dimensions of a digit's capsule mean: each changed by -0.25 ... 0.25 in steps of 0.05"
                     "\nThe middle column is the capsule as found in a test composite")
    for ax, (digit, row) in zip(fig.subplots(2, 2).flat, picks.items()):
        v, pair = forward(run, np.array([row]))[0]["v"][0], run.test_pairs["labels"][row]
        masked = np.zeros((R, C, J, D), v.dtype)
        masked[:, :, digit] = v[digit]
        masked[np.arange(R), :, digit, np.arange(R)] += offsets
        images = capsnet.decoder_forward(run.params, masked.reshape(R * C, J * D))[0].reshape(R, C, CANVAS, CANVAS)
        y, x = (CANVAS - crop) // 2 + run.test_pairs["shifts"][row, list(pair).index(digit)]
        images = np.round(images[:, :, y:y + crop, x:x + crop] * LEVELS) / LEVELS
        show_montage(ax, images, ["-0.25", *[""] * 4, "as found", *[""] * 4, "+0.25"], range(1, R + 1), gap=(1, 1))
        ax.set(title=f"capsule of digit {digit}, length {np.linalg.norm(v[digit]):.2f}, in {words(pair)}",
               ylabel="dimension")
    return fig


def draw_routing(run, n=3, n_statistics=64):
    """Coupling against 1/10, its value before routing, on ONE scale for all maps: a scale each would oversell small
    changes"""
    out, batch = forward(run, right_first(run, n_statistics))
    labels = batch["labels"]
    sources = batch["sources"]
    u = out["u"]
    (N, I, _), J = u.shape, N_CLASSES
    c = np.stack([np.broadcast_to(step, (N, J, I)) for step in out["c"]])                       # (r, N, J, I)
    weight = np.broadcast_to(np.linalg.norm(u, axis=-1)[:, None], (N, J, I))
    votes, _ = capsnet.votes_forward(u, run.params["W"])                              # (N, J, I, D)
    unit = out["v"] / out["lengths"][..., None]

    def per_place(x):
        """Sum over the types: (..., I) -> (..., 10, 10)"""
        side = int(np.sqrt(I / run.config.primary_types))
        return x.reshape(*x.shape[:-1], side, side, -1).sum(-1)

    change = per_place(c * weight) / per_place(weight) * J - 1
    evidence = per_place(c[-1] * np.matmul(votes, unit[..., None])[..., 0])
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
    top.axvline(1 / J, color=GRAY, linestyle=":", label="iteration 1")
    first, last = (-(step * np.log(step + 1e-30)).sum(1).mean() for step in c[[0, -1]])
    top.set(yscale="log", xlabel="coupling coefficient $c_{ij}$", ylabel=f"how many, in {N} test pairs",
            title=f"mean entropy {first:.4f} at first,\n{last:.4f} at last")
    here = capsnet.k_hot(labels, bool)
    for mask, label, colour in (here, "digits there", BLUE), (~here, "other digits", ORANGE):
        bottom.plot(range(1, len(c) + 1), [np.average(step[mask], weights=weight[mask]) for step in c], "o-",
                    color=colour, label=label)
    bottom.axhline(1 / J, color=GRAY, linestyle=":", label="1/10")
    bottom.set(xlabel="routing iteration", xlim=(0.5, len(c) + 0.5), ylabel=r"mean $c_{ij}$, weighted by $\|u_i\|$")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for ax in top, bottom:
        ax.legend(fontsize=8)
    return fig


def draw_errors(run, n=10, n_bins=8):
    """Which sets of digits fail, how success depends on what is to be seen, and the failures whose missed digit is
    hidden most"""
    labels, right = run.test_pairs["labels"], run.right
    sources = run.test_pairs["sources"].astype(np.float32) / 255
    a, b = sources.swapaxes(0, 1)
    shown = [np.maximum(x - y, 0).sum((1, 2)) / x.sum((1, 2)) for x, y in ((a, b), (b, a))]
    shown = np.stack(shown, 1)                                                          # (n_test, 2)
    named = capsnet.top_two(run.lengths)
    fig = new_figure(run, 7.6, f"Errors: {1 - right.mean():.1%} of {len(right):,} test pairs")
    top, bottom = fig.subfigures(2, 1, height_ratios=(1.45, 1))
    left, middle = top.subplots(1, 2, width_ratios=(1.1, 1))
    low, high = np.sort(labels, 1).T
    total, wrong = (np.zeros((N_CLASSES, N_CLASSES)) for _ in range(2))
    np.add.at(total, (high, low), 1)
    np.add.at(wrong, (high, low), ~right)
    share = np.divide(wrong, total, out=np.full_like(total, np.nan), where=total > 0)
    picture = left.imshow(share, cmap="Greys", vmin=0)
    for y, x in zip(*np.nonzero(total)):
        dark = share[y, x] > 0.55 * np.nanmax(share)
        left.text(x, y, f"{share[y, x]:.0%}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
    left.set(xticks=range(N_CLASSES - 1), yticks=range(1, N_CLASSES), xlabel="smaller digit", ylabel="larger digit",
             xlim=(-0.5, 8.5), ylim=(9.5, 0.5), title="share of pairs not named right, by the two digits there")
    left.spines[:].set_visible(False)
    top.colorbar(picture, ax=left, shrink=0.8, format=PercentFormatter(1, 0))
    least = shown.min(1)
    edges = np.unique(np.quantile(least, np.linspace(0, 1, n_bins + 1)))
    where = np.clip(np.searchsorted(edges, least, "right") - 1, 0, len(edges) - 2)
    lowest = 1.0
    for k in range(len(edges) - 1):
        hits, count = right[where == k].sum(), (where == k).sum()
        if count:
            lower, upper = capsnet.wilson_interval(hits, count)
            lowest = min(lowest, lower)
            middle.errorbar(least[where == k].mean(), hits / count, [[hits / count - lower], [upper - hits / count]],
                            fmt="o", color=BLUE)
    middle.set(xlabel="share of the more hidden digit's ink beyond the other's", ylabel="set accuracy",
               ylim=(max(0, lowest - 0.1), 1.01),
               title=f"set accuracy, {len(edges) - 1} equal groups of pairs, 95% intervals")
    middle.grid(alpha=0.3)
    missed = np.stack([(labels[:, [k]] != named).all(1) for k in (0, 1)], 1)                   # (n_test, 2)
    order = [(n_, k) for n_, k in sorted(zip(*np.nonzero(missed)), key=lambda at: shown[at])][:n]
    ax = bottom.subplots()
    if not order:
        ax.axis("off")
        return fig
    images = np.array([[run.test_pairs["composites"][r] / 255, sources[r, k], sources[r, 1 - k]] for r, k in order]
    ).swapaxes(0, 1)
    titles = [f"there {words(labels[r])}\nnamed {words(named[r])}\n{shown[r, k]:.0%} seen" for r, k in order]
    show_montage(ax, images, titles, ["composite", "missed", "other"])
    ax.tick_params(labelsize=7)
    ax.set_title("the failures whose missed digit is hidden most", color=RED)
    return fig


FIGURES = {draw.__name__.removeprefix("draw_"): draw for draw in (
    draw_training_curves, draw_example_pairs, draw_reconstructions, draw_segmentation, draw_capsule_activations,
    draw_pose_perturbation, draw_routing, draw_errors)}


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


def networks_to_probe(config):
    """The capsule network with and without reconstruction, and the CNN of its size, all on synthetic digits placed
    independently of each other: with an IoU of at least 0.8 the middle of the pair alone tells 96% of the variance of
    each digit's place"""
    config = dataclasses.replace(config, digits="synthetic", min_iou=0.0)
    return {"capsule": config, "capsule, trained without reconstruction": dataclasses.replace(config, recon_weight=0.0),
            "CNN, last hidden layer": capsnet.for_model(config, "cnn")}


def score_features(found, factors, digits, sizes, name, features):
    """Add linear_r2 of a representation to found, {name: (its dimensions, list of R^2)}"""
    found.setdefault(name, (features.shape[1], []))[1].append(linear_r2(features, factors, digits, sizes))


def disentanglement(config, n_seeds, say):
    """-> {representation: (its number of dimensions, R^2 (n_seeds, 6))}, of networks trained here with seeds
    config.seed, ..."""
    found, networks = {}, networks_to_probe(config)
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
            params, _ = capsnet.train(network)
            with capsnet.Runner(network.threads) as runner:
                score(name, np.concatenate([probed(runner.forward(params, part, network), part["labels"]) for part in
                                            ({k: a[start:start + capsnet.CHUNK] for k, a in pairs.items()}
                                             for start in range(0, len(pairs["labels"]), capsnet.CHUNK))]))
        score("raw pixels", np.repeat(pairs["composites"].reshape(len(pairs["labels"]), -1), 2, 0))
    return {name: (size, np.array(rows)) for name, (size, rows) in found.items()}


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


# ---------------------------------------------------------------- command line

def load_run(path, args):
    """-> (config, params, history) of a checkpoint; flags that would have changed its training must agree with it"""
    found = capsnet.load_checkpoint(path)
    found.config = dataclasses.replace(found.config, digits=found.source)
    return capsnet.config_to_look_at(found, args, path), found.average or found.params, found.history


def figures_of_one_run(args, config, say):
    """Train, or load, one network, evaluate it and draw -> {name: Figure}"""
    config, params, history = load_run(args.load, args) if args.load else (config, None, None)
    digits = capsnet.load_digits(config, say)
    if not args.load:
        params, history = capsnet.train(config, data=digits)
    test_pairs = capsnet.draw_pairs(digits, "test", config.n_test, config, "evaluation", 1)
    with capsnet.Runner(config.threads) as runner:
        test = capsnet.evaluate(params, test_pairs, config, runner)
        lengths = capsule_lengths(params, test_pairs, config, runner)
    capsnet.report(config, params, {**history, "source": digits["source"]}, test, say)
    right = capsnet.both_right(capsnet.top_two(lengths), test_pairs["labels"])
    shown = next(capsnet.epoch_samples(digits, 0, config))
    run = Run(config, params, history, digits["source"], shown, test_pairs, lengths, right, test)
    return {name: draw(run) for name, draw in FIGURES.items() if args.only in ("", name)}


def main():
    parser = capsnet.Parser(description=__doc__)
    parser.add_argument(
        "--outdir", type=Path, default=OUTDIR, metavar="DIR", help=f"folder for the PNGs (default {OUTDIR})")
    parser.add_argument("--load", default="", metavar="RUN.npz", help="draw from this checkpoint instead of training")
    parser.add_argument("--only", default="", choices=(*FIGURES, "disentanglement"),
                        help="draw this figure alone; disentanglement is "
                        "drawn only if asked for: it trains three networks a seed, on synthetic digits")
    parser.add_argument("--n-seeds", type=int, metavar="N", help="seeds of disentanglement, from --seed on (default 3)")
    capsnet.add_config_flags(parser)
    args = parser.parse_args()
    config = load_run(args.load, args)[0] if args.load else capsnet.config_from_args(args)
    capsnet.check_config(config)
    if config.model != "caps":
        raise InputError("--model cnn: it has no capsules to draw; leave the flag out")
    disentangling = args.only == "disentanglement"
    n_seeds = 3 if args.n_seeds is None else args.n_seeds
    if n_seeds < 1 or args.n_seeds and not disentangling:
        raise InputError(f"--n-seeds {args.n_seeds}: must be at least 1, and goes with --only disentanglement")
    if disentangling and not config.recon_weight:
        raise InputError("--recon-weight 0: disentanglement compares with that anyway; leave the flag out")
    if disentangling and (args.load or config.out_json or config.checkpoint or config.digits == "mnist" or
                          config.min_iou not in (0, capsnet.Config.min_iou)):
        raise InputError(
            "--only disentanglement trains networks of its own, on synthetic digits with all shifts; leave --load, "
            "--checkpoint, --out-json, --digits mnist and --min-iou out")
    if disentangling and config.n_test < LEAST_PAIRS:
        raise InputError(f"--n-test {config.n_test}: must be at least {LEAST_PAIRS} for linear maps of ten digits")
    capsnet.make_outdir(args.outdir, [args.only] if args.only else FIGURES)
    if config.out_json:
        capsnet.check_writable(config.out_json)
    say = capsnet.Progress(config.quiet).say
    if disentangling:
        found = disentanglement(config, n_seeds, say)
        for name, (size, r2) in found.items():
            say(f"{name} ({size}-D): " + "  ".join(f"{factor} {mean:.3f}" for factor, mean in zip(FACTORS, r2.mean(0))))
        figures = {"disentanglement": draw_disentanglement(found, config, n_seeds)}
    else:
        figures = figures_of_one_run(args, config, say)
    for name, fig in figures.items():
        capsnet.write_figure(fig, args.outdir / f"{name}.png", say)


if __name__ == "__main__":
    capsnet.run_cli(main)
