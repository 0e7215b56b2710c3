#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Animate the predictions of two networks while test digits are moved to the edge of the canvas, then rotated, sheared
and scaled, as a GIF. The default networks are small versions of the 2017 paper's CapsNet and CNN.

    python3 make_affnist_capsnet_gif.py --index 3 15     # seconds
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
from affnist_capsnet import CAPSULES, SIDES, data_name
from lab import figures, networks
from lab.figures import BLUE, ORANGE
from lab.messages import InputError, Parser, Progress, counted, flag_name, run_cli

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

GRAY = "#999999"
LEGEND = {"correct prediction": BLUE, "wrong prediction": ORANGE, "other classes": GRAY}
TOP, ROW, BOTTOM = 96, 176, 32     # heights of the titles, of a digit's row, of the legend, px
PICTURE, BARS, GAP, WIDTH = 150, 250, 40, 620          # widths, px; the last of the whole animation at least
NETWORKS = [str(affnist.PRETRAINED[0].with_name(f"affnist_small_{name}.npz")) for name in ("capsnet", "cnn")]
FPS = 8                            # frames per second
NAMES = {"capsnet-shared": "CapsNet, shared matrices", "capsnet": "CapsNet, one matrix per position",
         "vector-gap": "ten class vectors, GAP", "vector-gmp": "ten class vectors, GMP",
         "cnn-gap": "CNN, global average pooling", "cnn-gmp": "CNN, global max pooling",
         "cnn-dense": "CNN with a hidden layer", "cnn": "the paper's MNIST CNN"}
MAX_DIGITS, MAX_NETWORKS = 4, 3
PATH = (                           # (factor, lowest, highest value), animated one after another
    ("position", -1, 1), ("rotation", -20, 20), ("shear", -0.2, 0.2), ("scale_y", 0.8, 1.2), ("scale_x", 0.8, 1.2))
WORDS = {"rotation": "rotated by {:.0f}°", "shear": "sheared by {:.2f}", "scale_y": "scaled vertically by {:.2f}",
         "scale_x": "scaled horizontally by {:.2f}", "position": "at any position"}


class FixedPosition:
    """A stand-in for a random generator: puts a digit at a given position, from -1 to 1 on both axes of the canvas."""

    def __init__(self, x, y):
        self.position = np.array([[(1 + y) / 2, (1 + x) / 2]])

    def uniform(self, low, high, shape):
        return self.position


def make_scenes(n):
    """Return a list of (factor, value, all matrix factors, position), n frames per factor, 2 n for the position.

    A factor swings from its nominal value to both ends of its range and back.
    """
    scenes = []
    for name, low, high in PATH:
        middle = affnist.IDENTITY.get(name, 0.0)
        swing = np.sin(np.linspace(0, 2 * np.pi, n * (1 + (name == "position")), endpoint=False))
        for s in swing:
            value = middle + s * ((high - middle) if s > 0 else (middle - low))
            if name == "position":
                angle = np.arcsin(np.clip(s, -1, 1))
                scenes.append((name, value, affnist.IDENTITY, (0.9 * s, 0.9 * np.sin(2 * angle))))
            else:
                scenes.append((name, value, affnist.IDENTITY | {name: value}, (0, 0)))
    return scenes


def draw_frames(digits, shown, n):
    """Return the frames, a list of (h, w, 3) uint8: a row for each digit, networks side by side.

    digits: pairs of an image, (28, 28) uint8, and its label. shown: the networks. n: frames per factor. The figure is
    built once; frames only change its data.
    """
    scenes, limits = make_scenes(n), {affnist.max_shift(network.config) for network in shown}
    shifts = {"to any position" if limit is None else f"by up to {counted(limit, 'pixel')}" for limit in limits}
    data, source = shown[0].data, shown[0].history["source"]
    names, classes = data.get("names", ()), figures.class_names(data)
    noun = figures.words_for(affnist, data).noun
    tested = f"{noun}s" if source == data["source"] else data_name(data["source"])
    heading = f"Trained on {data_name(source)} translated {' or '.join(sorted(shifts))}; tested on {tested}"
    width, height = max(PICTURE + 2 * GAP + (BARS + GAP) * len(shown) - GAP, WIDTH), TOP + ROW * len(digits) + BOTTOM
    fig = Figure((width / 100, height / 100), dpi=100)
    canvas = FigureCanvasAgg(fig)

    def add_axes(left, row, wide, title):
        """Add axes in the row of a digit; only the first row has titles."""
        ax = fig.add_axes((left / width, 1 - (TOP + row * ROW + PICTURE) / height, wide / width, PICTURE / height))
        ax.set_title("" if row else title, pad=8)
        return ax
    title = fig.suptitle("", fontsize=min(12, 1.4 * width / len(heading)), y=1 - 8 / height)
    fig.legend([Patch(color=color) for color in LEGEND.values()], LEGEND, loc="lower center", ncol=3, frameon=False,
               fontsize=10, bbox_to_anchor=(0.5, 0))
    rows = []                      # for each digit: images, its picture, its label, and (bars, heights) of each network
    for row, (image, label) in enumerate(digits):
        images = np.stack([affnist.transform_digits(
            image[None], affnist.affine_matrix(**factors), FixedPosition(*position), SIDES["affnist"])[0][0]
            for _, _, factors, position in scenes])
        ax = add_axes(GAP // 2, row, PICTURE, f"a test {noun}")
        ax.set(xticks=[], yticks=[], xlabel=f"class {label}: {names[label]}" if names else "")
        ax.spines[:].set(visible=True, color=GRAY)
        picture, panels = ax.imshow(images[0], cmap="gray_r", vmin=0, vmax=255, interpolation="nearest"), []
        for k, network in enumerate(shown):
            config, samples = network.config, {"images": images, "labels": np.full(len(images), label)}
            with affnist.worker_threads(config) as workers:
                out = affnist.forward_shards(network.params, samples, config, workers)
            quantity = "capsule lengths" if config.model in CAPSULES else "class probabilities"
            ax = add_axes(3 * GAP // 2 + PICTURE + k * (BARS + GAP), row, BARS,
                          f"{NAMES.get(config.model, config.model)}\n({config.model}): {quantity}")
            heights = affnist.class_activations(out, config)    # (frames, J)
            top = max(1, int(np.ceil(heights.max())))                   # without squash lengths exceed 1
            ax.set(ylim=(0, top), yticks=[0, top])
            figures.label_classes(ax, classes, BARS, fontsize=9)
            ax.tick_params(length=0, pad=3)
            panels.append((ax.bar(range(len(classes)), [0] * len(classes)), heights))
        rows.append((images, picture, label, panels))
    frames = []
    for t, (name, value, _, _) in enumerate(scenes):
        low, high = affnist.RANGES.get(name, (-np.inf, np.inf))
        beyond = "" if low <= value <= high else " (beyond affNIST's range)"
        title.set_text(f"{heading}\n{WORDS[name].format(value)}{beyond}")
        for images, picture, label, panels in rows:
            picture.set_data(images[t])
            for bars, heights in panels:
                for j, bar in enumerate(bars):
                    bar.set_height(heights[t, j])
                    bar.set_color(GRAY if j != heights[t].argmax() else BLUE if j == label else ORANGE)
        frames.append(figures.frame_of(canvas))
    return frames


@figures.style()
def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--load", nargs="+", action="extend", metavar="PLACE", help="weights files or folders of the "
                        "networks (default: the pretrained small capsnet and cnn)")
    parser.add_argument("--index", type=int, nargs="+", metavar="N", help="indices of the test "
                        "digits, from 0 (default: 3 15)")
    parser.add_argument("--frames", type=int, default=16, metavar="N", help="frames per factor (default: 16)")
    figures.add_animation_flags(parser, affnist, FPS)
    affnist.add_settings(parser)
    args = parser.parse_args()
    args.load, given, args.index = args.load or NETWORKS, args.index is not None, args.index or [3, 15]
    figures.check_animation_flags(args, affnist, {
        "--frames": (args.frames, 2, 60), "--index: digits": (len(args.index), 1, MAX_DIGITS),
        "--load: networks": (len(args.load), 1, MAX_NETWORKS)})
    for name in "n_test", "threads", "affnist_dir", "eval_split":
        if hasattr(args, name):
            raise InputError(f"{flag_name(name)} has no effect on the animation. Leave it out")
    loaded = [networks.load_for_evaluation(affnist, path, args) for path in args.load]
    if any(config.task != "affnist" for _, config in loaded):
        raise InputError("--load: only networks of --task affnist read 40x40 px. Give such networks")
    if len({network.source for network, _ in loaded}) > 1:
        raise InputError("--load: these networks were trained on different digits. Give networks trained on the same")
    data = affnist.load_data(loaded[0][1])
    shown = [networks.make(affnist, path, *one, data) for path, one in zip(args.load, loaded)]
    images, labels = data["test"]
    if not given:
        args.index = [min(k, len(labels) - 1) for k in args.index]                      # of a small data set
    if not 0 <= min(args.index) <= max(args.index) < len(labels):
        raise InputError(f"--index {' '.join(map(str, args.index))}: must be between 0 and {len(labels) - 1}")
    frames = draw_frames([(images[k], int(labels[k])) for k in args.index], shown, args.frames)
    figures.write_animation(args.out, frames, 1000 / args.fps, Progress(loaded[0][1].quiet).say)


if __name__ == "__main__":
    run_cli(main)
