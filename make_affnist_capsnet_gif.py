#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Films test digits that turn, lean, stretch and move, and what two networks call them.

    python3 make_affnist_capsnet_gif.py --index 1 15
"""
from pathlib import Path

import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
from affnist_capsnet import CAPSULES, DIGIT_NAMES, N_CLASSES, SIDES, InputError

import imageio.v3 as imageio
import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

matplotlib.rcParams.update({"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False,
                            "axes.spines.right": False})
BLUE, ORANGE, GRAY = "#0072B2", "#E69F00", "#999999"          # Okabe & Ito, color-blind safe
LEGEND = {"named right": BLUE, "named wrong": ORANGE, "not named": GRAY}
LEVELS = 32                        # of red, green and blue: few colors, the same in every frame: a small file
TOP, ROW, BOTTOM = 80, 176, 32     # heights of the headings, of a digit's row, of the legend, px
PICTURE, BARS, GAP = 150, 250, 40  # widths, px
NETWORKS = [str(affnist.WEIGHTS), str(affnist.WEIGHTS.with_name("affnist_cnn-gap.npz"))]
FPS = 8                            # frames a second
NAMES = {"capsnet-shared": "capsules", "capsnet": "capsules as in the paper", "vector-gap": "vectors that average",
         "vector-gmp": "vectors of maxima", "cnn-gap": "CNN that averages", "cnn-gmp": "CNN that takes the largest",
         "cnn-dense": "CNN that pools", "cnn": "CNN as in the paper"}
MAX_DIGITS, MAX_NETWORKS = 4, 3
PATH = (                           # (factor, or where: the extremes it swings between); the others rest meanwhile
    ("turn", -60, 60), ("shear", -0.5, 0.5), ("down", 0.6, 1.3), ("across", 0.6, 1.3), ("place", -1, 1))
WORDS = {"turn": "turned by {:.0f}°", "shear": "sheared by {:.2f}", "down": "stretched downwards by {:.2f}",
         "across": "stretched across by {:.2f}", "place": "moved"}


class Still:
    """In place of a random generator: where in the room that is left a digit is put, -1 to 1 on both axes"""

    def __init__(self, x, y):
        self.at = np.array([[(1 + y) / 2, (1 + x) / 2]])

    def uniform(self, low, high, shape):
        return self.at


def scenes(n):
    """-> a list of (factor, value, matrix factors, place): n frames a factor, there and back again"""
    found = []
    for name, low, high in PATH:
        middle = affnist.REST.get(name, 0.0)
        swing = np.sin(np.linspace(0, 2 * np.pi, n, endpoint=False))
        for s in swing:
            value = middle + s * ((high - middle) if s > 0 else (middle - low))
            if name == "place":
                angle = np.arcsin(np.clip(s, -1, 1))
                found.append((name, value, affnist.REST, (0.9 * s, 0.9 * np.sin(2 * angle))))
            else:
                found.append((name, value, affnist.REST | {name: value}, (0, 0)))
    return found


def shares(scores, config):
    """What the bars show: lengths of capsules, or probabilities of a softmax, (frames, 10)"""
    if config.model in CAPSULES:
        return scores
    shown = np.exp(scores - scores.max(1, keepdims=True))
    return shown / shown.sum(1, keepdims=True)


def film(digits, networks, n, source):
    """digits: (image (28, 28) uint8, label), networks: (config, weights) -> list of (h, w, 3) uint8 frames, a row for
    every digit, networks side by side. The figure is built once; frames only change its data."""
    shown = scenes(n)
    width, height = PICTURE + 2 * GAP + (BARS + GAP) * len(networks) - GAP, TOP + ROW * len(digits) + BOTTOM
    fig = Figure((width / 100, height / 100), dpi=100)
    canvas = FigureCanvasAgg(fig)

    def add_axes(left, row, wide, title):
        """An axes in the row of a digit; the first row has titles"""
        ax = fig.add_axes((left / width, 1 - (TOP + row * ROW + PICTURE) / height, wide / width, PICTURE / height))
        ax.set_title("" if row else title, pad=8)
        return ax
    heading = fig.suptitle("", fontsize=12, y=1 - 8 / height)
    fig.legend([Patch(color=color) for color in LEGEND.values()], LEGEND, loc="lower center", ncol=3, frameon=False,
               fontsize=10, bbox_to_anchor=(0.5, 0))
    rows = []                      # of every digit: images, its picture, label, and of every network (bars, heights)
    for row, (image, label) in enumerate(digits):
        images = np.stack([affnist.transform_digits(image[None], affnist.affine_matrix(**factors), Still(*place),
                                                 SIDES["affnist"])[0][0] for _, _, factors, place in shown])
        ax = add_axes(GAP // 2, row, PICTURE, "a test digit")
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set(visible=True, color=GRAY)
        picture, looks = ax.imshow(images[0], cmap="gray_r", vmin=0, vmax=255, interpolation="nearest"), []
        for k, (config, weights) in enumerate(networks):
            with affnist.Runner(1) as runner:
                out = runner.forward(weights, {"images": images, "labels": np.full(len(images), label)}, config)
            words = NAMES[config.model] + (": lengths" if config.model in CAPSULES else ": probabilities")
            ax = add_axes(3 * GAP // 2 + PICTURE + k * (BARS + GAP), row, BARS, words)
            ax.set(ylim=(0, 1), yticks=[0, 1])
            ax.set_xticks(range(N_CLASSES), range(N_CLASSES))
            ax.tick_params(length=0, pad=3)
            looks.append((ax.bar(range(N_CLASSES), [0] * N_CLASSES), shares(out["scores"], config)))
        rows.append((images, picture, label, looks))
    frames = []
    for t, (name, value, _, _) in enumerate(shown):
        low, high = affnist.RANGES.get(name, (-np.inf, np.inf))
        beyond = "" if low <= value <= high else ", further than in affNIST"
        heading.set_text(f"Trained on upright {source}, moved about.\nNow {WORDS[name].format(value)}{beyond}")
        for images, picture, label, looks in rows:
            picture.set_data(images[t])
            for bars, heights in looks:
                for j, bar in enumerate(bars):
                    bar.set_height(heights[t, j])
                    bar.set_color(GRAY if j != heights[t].argmax() else BLUE if j == label else ORANGE)
        canvas.draw()
        frame = np.asarray(canvas.buffer_rgba())[..., :3]
        frames.append((np.round(frame / 255 * (LEVELS - 1)) * (255 / (LEVELS - 1))).astype(np.uint8))
    return frames


def main():
    parser = affnist.Parser(description=__doc__)
    parser.add_argument("--load", nargs="+", default=NETWORKS, metavar="FILE", help="the networks, from checkpoints or "
                        "weights (default: the two that come along)")
    parser.add_argument("--index", type=int, nargs="+", default=[1, 15], metavar="N", help="which test digits, from 0 "
                        "(default 1 15)")
    parser.add_argument("--frames", type=int, default=16, metavar="N", help="frames a factor (default 16)")
    parser.add_argument("--out", type=Path, default=Path("affnist_capsnet.gif"), metavar="FILE",
                        help="the GIF to write (default affnist_capsnet.gif)")
    affnist.add_config_flags(parser)
    args = parser.parse_args()
    bounds = {"--frames": (args.frames, 2, 60), "--index: digits":
              (len(args.index), 1, MAX_DIGITS), "--load: networks": (len(args.load), 1, MAX_NETWORKS)}
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise InputError(f"{name} {value}: must be between {low} and {high}")
    for name in "out_json", "n_test", "threads", "affnist_dir", "eval_split":
        if hasattr(args, name):
            raise InputError(f"{affnist.flag_name(name)}: means nothing to a film; leave it out")
    if args.out.suffix.lower() != ".gif":
        raise InputError(f"--out {args.out}: a GIF is written; give a name that ends in .gif")
    affnist.check_writable(args.out)
    found = [affnist.load_for_evaluation(path, args) for path in args.load]
    if any(each.task != "affnist" for _, each in found):
        raise InputError("--load: a network of --task mnist does not see 40x40 px; give those of --task affnist")
    if len({file.source for file, _ in found}) > 1:
        raise InputError("--load: these networks were trained on two kinds of digits; give those of one")
    say = affnist.Progress(found[0][1].quiet).say
    digits = affnist.load_digits(found[0][1], say)
    images, labels = digits["test"]
    if not 0 <= min(args.index) <= max(args.index) < len(labels):
        raise InputError(f"--index {' '.join(map(str, args.index))}: must be between 0 and {len(labels) - 1}")
    frames = film([(images[k], int(labels[k])) for k in args.index],
                  [(each, file.weights) for file, each in found], args.frames, DIGIT_NAMES[digits["source"]])
    affnist.write_atomically(
        args.out, lambda file: imageio.imwrite(file, frames, extension=".gif", duration=1000 / FPS, loop=0))
    say(f"wrote {args.out}  ({len(frames)} frames, {args.out.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    affnist.run_cli(main)
