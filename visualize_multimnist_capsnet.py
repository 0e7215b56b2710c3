#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Draws what multimnist_capsnet.py learns: trains it, or loads a network, and writes one PNG per figure. Or draws what
all the runs of results/ say. Or names the two digits in a picture of yours.

    python3 visualize_multimnist_capsnet.py --n-epochs 12 --n-train 6000
    python3 visualize_multimnist_capsnet.py --load
    python3 visualize_multimnist_capsnet.py --results
    python3 visualize_multimnist_capsnet.py --image photo.png
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

matplotlib.use("Agg")
matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
                            "image.interpolation": "nearest", "legend.frameon": False})
BLUE, ORANGE, RED, GRAY = "#0072B2", "#E69F00", "#D55E00", "#666666"             # Okabe & Ito, color-blind safe
TINTS = np.array([[0.1, 0.55, 1], [1, 0.45, 0.05]])        # of the two digits; they add up to white where both have ink
WIDTH = 8                          # inches
EXPERIMENT = "multimnist_capsnet"
OUTDIR = Path("viz", EXPERIMENT)
RESULTS = capsnet.WEIGHTS.parents[1] / "results"
BOTH = "test_exact_match"
FOREST = [                         # what render.forest draws: label, one setting, the other, key
    "Capsules minus a CNN that redraws nothing",
    ("72,000 pairs", "main/deep", "control/cnn", BOTH),
    ("1,200,000 of the paper's kind", "main/paper-protocol", "control/cnn-paper-protocol", BOTH),
    ("parts of half a digit", "half-digit/iters-3", "half-digit/cnn", BOTH),
    "Capsules minus a CNN that redraws digits, too",
    ("72,000 pairs", "main/deep", "control/cnn-vectors", BOTH),
    "Trained with routing minus trained without",
    ("72,000 pairs", "main/deep", "control/iters-1", BOTH),
    ("1,200,000 pairs", "main/residual", "control/residual-iters-1", BOTH),
    ("parts of half a digit", "half-digit/iters-3", "half-digit/iters-1", BOTH),
    "Trained with routing: on minus switched off",
    ("72,000 pairs", "main/deep", "main-uniform/deep", BOTH),
    ("1,200,000 pairs", "weights/residual", "weights/residual", "routing.exact_match.1 vs routing.exact_match.0"),
    ("parts of half a digit", "half-digit/iters-3", "half-digit-uniform/iters-3", BOTH),
    "Trained to redraw minus trained to name alone",
    ("72,000 pairs", "main/deep", "control/no-recon", BOTH)]


@dataclass(frozen=True)
class Run:
    """What the figures are drawn from"""
    config: capsnet.Config         # its seed is that of the test pairs
    trained: capsnet.Config        # its seed is that of the training
    params: dict
    history: dict
    source: str                    # of the digits drawn
    test_pairs: dict
    lengths: np.ndarray            # (n_test, 10)
    right: np.ndarray              # (n_test,) bool: both digits named


# ---------------------------------------------------------------- helpers

def new_figure(run, height, title):
    fig = Figure((WIDTH, height), layout="constrained")
    fig.suptitle(title, fontsize=11)
    fig.supxlabel(f"{DIGIT_NAMES[run.source]}; a network trained on {len(run.history['epochs'])} x "
                  f"{run.trained.n_train:,} pairs of {DIGIT_NAMES[run.history['source']]}, seed {run.trained.seed}; "
                  f"test pairs of seed {run.config.seed}", fontsize=8, color=GRAY)
    return fig


def show_montage(ax, images, columns, rows, gap=3):
    """images (R, C, h, w, 3) in [0, 1] as one picture, columns and rows labelled"""
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
    """A dict of pairs as dicts of at most CHUNK, so that what a network makes of them fits into memory"""
    for start in range(0, len(pairs["labels"]), capsnet.CHUNK):
        yield {name: array[start:start + capsnet.CHUNK] for name, array in pairs.items()}


def capsule_lengths(params, pairs, config, runner):
    """runner.forward's lengths (n, 10)"""
    return np.concatenate([runner.forward(params, part, config)["lengths"] for part in in_chunks(pairs)])


def words(digits):
    return " + ".join(map(str, digits))


# ---------------------------------------------------------------- figures

def draw_reconstructions(run, n=8):
    """The two longest capsules, found without labels; each takes the color of its true twin, if it has one"""
    n = min(n, len(run.right))
    labels, named = run.test_pairs["labels"][:n], capsnet.top_two(run.lengths[:n])
    swap = (named[:, 0] == labels[:, 1]) | (named[:, 1] == labels[:, 0])
    named[swap] = named[swap, ::-1]
    batch = capsnet.to_batch(run.test_pairs, np.arange(n))
    out, _ = capsnet.forward(run.params, batch["images"], run.config, named)
    gray = batch["images"][..., None].repeat(3, -1)
    true, redrawn = (digits[..., None] * TINTS[:, None, None] for digits in (batch["sources"], out["recon"]))
    fig = new_figure(run, 5.7, "Two digits on top of each other, each redrawn alone from its own capsule\n"
                     "the first test pairs; where a name is wrong, what is there stands below it")
    ax = fig.subplots()
    show_montage(ax, np.stack([gray, *redrawn.swapaxes(0, 1), redrawn.sum(1), true.sum(1)]),
                 [f"named {words(named[k])}" + ("" if run.right[k] else f"\nis {words(labels[k])}") for k in range(n)],
                 ["the network\nsees", "and redraws\none digit", "... and\nthe other", "both\ntogether",
                  "what was\nthere"])
    for k in np.flatnonzero(~run.right[:n]):
        ax.get_xticklabels()[k].set_color(RED)
    return fig


N_ROUTED = 64                      # test pairs over which the coupling is averaged


def routing_of(run):
    """Of N_ROUTED pairs, the first that are named right, if there are so many -> their batch; couplings c (r, N, J, I)
    of all iterations; and the lengths (N, J, I) of the primary capsules, by which they are weighted"""
    batch = capsnet.to_batch(run.test_pairs, np.argsort(~run.right, kind="stable")[:N_ROUTED])
    out, _ = capsnet.forward(run.params, batch["images"], run.config)
    lengths = np.linalg.norm(out["u"], axis=-1)[:, None].repeat(N_CLASSES, 1)
    return batch, np.stack([np.broadcast_to(c, lengths.shape) for c in out["c"]]), lengths


def routing_findings(run, uniform_lengths):
    """Of routing_of's pairs: mean couplings at first and at last. Of all test pairs: set accuracy with the couplings of
    the first iteration, which made uniform_lengths (n_test, 10), and with the last, and likewise of ink_shown's most
    hidden group"""
    (batch, c, weight), (_, _, groups) = routing_of(run), ink_shown(run)
    here = capsnet.k_hot(batch["labels"], bool)
    rights = capsnet.exact_match(capsnet.top_two(uniform_lengths), run.test_pairs["labels"]), run.right
    there, others = ([float(np.average(step[mask], weights=weight[mask])) for step in c[[0, -1]]]
                     for mask in (here, ~here))
    return {"coupling_to_digits_there": there, "coupling_to_others": others, "largest_coupling": float(c[-1].max()),
            "exact_match": [float(right.mean()) for right in rights],
            "exact_match_most_hidden": [float(right[groups == groups.min()].mean()) for right in rights]}


def draw_routing(run, n=3):
    """Couplings of each place after the last iteration against 1/10, their value at first, on ONE scale for all maps: a
    scale each would oversell small changes"""
    batch, c, weight = routing_of(run)
    labels, sources, side = batch["labels"], batch["sources"], capsnet.infer_shapes(
        capsnet.backbone(run.config), CANVAS, 1, rows=True).side
    n = min(n, len(labels))
    moved, held = ((x * weight).reshape(*weight.shape[:2], side, side, -1).sum(-1) for x in (c[-1], 1 / N_CLASSES))
    change = (moved / held - 1)[np.arange(n)[:, None], labels[:n]]                      # (n, 2, side, side)
    span = max(abs(change).max(), 0.01)
    fig = new_figure(run, 3.3, "Routing: the couplings to a digit grow where some of its strokes lie")
    axes = fig.subplots(2, 2 * n, squeeze=False)
    for k, (above, below) in enumerate(axes.T):
        pair, which = divmod(k, 2)
        rest = batch["images"][pair] - sources[pair, which]
        above.imshow(sources[pair, which][..., None] * TINTS[which] + 0.4 * rest[..., None])
        above.set_title(f"{labels[pair, which]} in {words(labels[pair])}")
        shown = below.imshow(change[pair, which], cmap="PuOr_r", vmin=-span, vmax=span)
        for ax in (above, below):
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(True)
    axes[0, 0].set_ylabel("the digit")
    axes[1, 0].set_ylabel("couplings\nto it")
    fig.colorbar(shown, ax=axes, location="bottom", shrink=0.6, aspect=40, format=PercentFormatter(1, 0),
                 label=f"couplings $c_{{ij}}$ of each place after {len(c)} iterations, against 1/10 at first")
    return fig


N_BINS = 8                         # groups of equally many pairs, by what is to be seen


def ink_shown(run):
    """-> (n_test, 2), the share of each digit's ink beyond the other's; groups of pairs by the lesser of these: a tuple
    of its mean, hits, size each; (n_test,), the number of a pair's group"""
    a, b = (run.test_pairs["sources"].astype(np.float32) / 255).swapaxes(0, 1)
    shown = np.stack([np.maximum(x - y, 0).sum((1, 2)) / x.sum((1, 2)) for x, y in ((a, b), (b, a))], 1)
    least = shown.min(1)
    edges = np.unique(np.quantile(least, np.linspace(0, 1, N_BINS + 1)))
    where = np.clip(np.searchsorted(edges, least, "right") - 1, 0, max(0, len(edges) - 2))
    groups = [(float(least[where == k].mean()), int(run.right[where == k].sum()), int((where == k).sum()))
              for k in np.unique(where)]
    return shown, groups, where


def error_findings(run):
    """What the first and the last of ink_shown's groups show and score"""
    _, groups, _ = ink_shown(run)
    (least, hits, size), (most, more_hits, more) = groups[0], groups[-1]
    return {"groups": len(groups), "most_hidden": [least, hits / size], "least_hidden": [most, more_hits / more]}


def draw_errors(run, n=5):
    """How success depends on what is to be seen, and the failures whose missed digit is hidden most"""
    labels, named, (shown, groups, _) = run.test_pairs["labels"], capsnet.top_two(run.lengths), ink_shown(run)
    fig = new_figure(run, 3.9, f"Not both named right: {1 - run.right.mean():.1%} of {len(labels):,} test pairs, most "
                     "where one digit hides the other")
    left, right = fig.subplots(1, 2, width_ratios=(1, 2.1))
    for least, hits, count in groups:
        lower, upper = capsnet.wilson_interval(hits, count)
        left.errorbar(least, hits / count, [[hits / count - lower], [upper - hits / count]], fmt="o", color=BLUE)
    left.set(xlabel="how much of the more hidden digit\nlies beside the other", ylabel="both digits named right",
             ylim=(None, 1.01), title=f"{len(groups)} equal groups of pairs, 95% intervals")
    left.xaxis.set_major_formatter(PercentFormatter(1, 0))
    left.yaxis.set_major_formatter(PercentFormatter(1))
    left.grid(alpha=0.3)
    missed = np.stack([(labels[:, [k]] != named).all(1) for k in (0, 1)], 1)                   # (n_test, 2)
    order = [(n_, k) for n_, k in sorted(zip(*np.nonzero(missed)), key=lambda at: shown[at])][:n]
    if not order:
        right.axis("off")
        return fig
    pairs = run.test_pairs
    images = np.array([[pairs["composites"][r], pairs["sources"][r, k], pairs["sources"][r, 1 - k]] for r, k in order])
    titles = [f"says {words(named[r])}\nis {words(labels[r])}" for r, _ in order]
    show_montage(right, images.swapaxes(0, 1)[..., None].repeat(3, -1) / 255, titles,
                 ["the pair", "the digit\nit missed", "the other"], gap=6)
    right.set_title("failures whose missed digit is hidden most", color=RED)
    return fig


FIGURES = {draw.__name__.removeprefix("draw_"): draw for draw in (
    draw_reconstructions, draw_routing, draw_errors)}

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
    inked = ink >= 0.5
    spots = np.arange(1, ink.size + 1).reshape(ink.shape) * inked                       # to become a number for each
    while not np.array_equal(spots, spread := broadened(spots, 1.5) * inked):
        spots = spread
    sizes = np.bincount(spots.ravel())
    sizes[0] = 0
    large = sizes >= SPECK * sizes.max()
    inside = large.copy()
    for edge in spots[[0, -1]], spots[:, [0, -1]]:
        inside[edge] = False
    kept = inside if inside.any() else large
    return ink * broadened(kept[spots].astype(float), 1.5)                              # soft edges belong to a spot


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
    """Ink (h, w) -> canvas (36, 36) in [0, 1]: its box centerd, `span` px long on its longer side, thin strokes
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
    """Name the two digits in a picture's ink, by a network that was loaded, and redraw each"""
    config, image = found.config, to_canvas(ink)
    out, _ = capsnet.forward(found.weights, image[None], config)
    named, lengths = out["digits"][0], out["lengths"][0]
    third = int(np.argsort(-lengths)[2])
    guess = bool(lengths[named[1]] < LEAST_LENGTH or lengths[named[1]] - lengths[third] < LEAST_LEAD)
    word = "a guess" if guess else "named"
    say(f"{word}: {named[0]} and {named[1]}; lengths {lengths[named[0]]:.2f} and {lengths[named[1]]:.2f}, the next, of "
        f"{third}, {lengths[third]:.2f}")
    if guess:
        say("two digits written over each other would give two lengths near 0.9, and no third")
    redrawn = out["recon"][0]
    fig = Figure((WIDTH, 4.1), layout="constrained")
    fig.suptitle(f"{word.capitalize()}: {named[0]} and {named[1]}" + " (not two capsules alone are long)" * guess,
                 fontsize=11)
    fig.supxlabel(f"a network trained on {len(found.history['epochs'])} x {config.n_train:,} pairs of "
                  f"{DIGIT_NAMES[found.source]}, seed {config.seed}", fontsize=8, color=GRAY)
    axes = fig.subplots(2, 3)
    top, bottom, left, right = ink_box(ink)
    axes[0, 0].add_patch(Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, edgecolor=ORANGE))
    pictures = {"the picture, its ink boxed": gray, "as the network sees it": image,
                "both redrawn, each in its color": np.einsum("rhw,rc->hwc", redrawn, TINTS).clip(0, 1),
                f"{named[0]} redrawn from its capsule": redrawn[0], f"{named[1]} redrawn from its capsule": redrawn[1]}
    for ax, (title, picture) in zip(axes.flat, pictures.items()):
        ax.imshow(picture, cmap="gray", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[], title=title)
        ax.spines[:].set_visible(False)
    bars = axes[1, 2]
    bars.bar(range(N_CLASSES), lengths, color=[BLUE if j in named else "#bbbbbb" for j in range(N_CLASSES)])
    bars.set(ylim=(0, 1), yticks=[0, 0.5, 1], title="how sure of each digit:\nits capsule's length")
    bars.set_xticks(range(N_CLASSES), range(N_CLASSES))
    return fig


# ---------------------------------------------------------------- command line

def figures_of_one_run(args, found, config, say):
    """Train, or take the network that was found, evaluate it and draw -> {file: Figure}"""
    digits = capsnet.load_digits(config, say)
    params, history = (found.weights, found.history) if found else capsnet.train(config, data=digits)
    test_pairs = capsnet.draw_pairs(digits, "test", config.n_test, config, "evaluation", 1)
    with capsnet.Runner(config.threads, progress=capsnet.Progress(config.quiet)) as runner:
        test = capsnet.evaluate(params, in_chunks(test_pairs), config, runner)
        lengths = capsule_lengths(params, test_pairs, config, runner)
        uniform = capsule_lengths(params, test_pairs, dataclasses.replace(config, routing_iters=1), runner)
    right = capsnet.exact_match(capsnet.top_two(lengths), test_pairs["labels"])
    trained = found.config if found else config
    run = Run(config, trained, params, history, digits["source"], test_pairs, lengths, right)
    figures = {f"{name}.png": draw(run) for name, draw in FIGURES.items() if args.only in ("", name)}
    findings = {"errors": error_findings(run), "routing": routing_findings(run, uniform)}
    capsnet.report(config, params, {**history, "source": digits["source"]}, test, say, found, **findings)
    return figures


def check_flags(args, found, config):
    """Refuse what does not go together"""
    if config.model != "capsnet":
        fault = "--load: holds a CNN, which has no capsules to draw; give another" if found else (
            f"--model {config.model}: it has no capsules to draw; leave the flag out")
        raise InputError(fault)
    alone = "--image" if args.image is not None else "--results" if args.results else ""
    for name in capsnet.given_settings(args) if alone else ():
        if name not in ("quiet", "threads"):
            raise InputError(f"{capsnet.flag_name(name)}: means nothing to {alone}; leave it out")
    if args.image is not None and (args.only or args.results):
        raise InputError("--image: draws one figure, of that picture; leave --only and --results out")
    if args.results and (args.load is not None or args.only):
        raise InputError("--results: draws forest, of no one network; leave --load and other figures out")
    if args.results and not args.results.is_dir():
        raise InputError(f"--results {args.results}: no such folder; give the one that holds the results")


def main():
    parser = capsnet.Parser(description=__doc__)
    parser.add_argument("--outdir", type=Path, metavar="DIR",
                        help=f"folder for the PNGs (default {OUTDIR}, with --image the current folder)")
    capsnet.add_load_flag(parser, "draw instead of training: the network")
    parser.add_argument("--image", metavar="PICTURE", help="name and redraw the two overlapping digits in a picture of "
                        "any size, ink dark on light or light on dark, by the network of --load; writes "
                        "PICTURE_digits.png")
    parser.add_argument("--results", nargs="?", type=Path, const=RESULTS, metavar="DIR", help="draw what all runs in "
                        "this folder say, forest; without DIR in results/; nothing is trained")
    parser.add_argument("--only", default="", choices=tuple(FIGURES), help="draw this figure alone")
    capsnet.add_config_flags(parser)
    args = parser.parse_args()
    pictured = args.image is not None
    load = str(capsnet.WEIGHTS) if pictured and args.load is None else args.load
    if pictured or args.results:
        check_flags(args, None, capsnet.Config())
    found, config = capsnet.load_for_evaluation(load, args) if load is not None else (None, capsnet.config_from_args(args))
    capsnet.check_config(config)
    check_flags(args, found, config)
    gray = read_picture(args.image) if pictured else None
    ink = find_ink(gray, args.image) if pictured else None
    outdir = args.outdir or (Path() if pictured else OUTDIR)
    name = f"{Path(args.image).stem}_digits" if pictured else args.only
    capsnet.make_outdir(outdir, [name] if name else ["forest"] if args.results else FIGURES)
    say = capsnet.Progress(config.quiet).say
    if pictured:
        figures = {f"{name}.png": draw_picture(found, gray, ink, say)}
    elif args.results:
        sys.path.append(str(RESULTS))
        import render
        render.forest(render.Results(args.results), EXPERIMENT, FOREST, outdir / "forest.png", say)
        return
    else:
        figures = figures_of_one_run(args, found, config, say)
    for name, figure in figures.items():
        capsnet.write_figure(figure, outdir / name, say)


if __name__ == "__main__":
    capsnet.run_cli(main)
