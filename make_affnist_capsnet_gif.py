#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Animate the predictions of two networks, trained on digits that were only translated, while test
digits are translated across the canvas, then rotated, sheared and scaled to the ends of affNIST's
ranges, as a GIF. A strip below each network keeps a mark of every frame. The default networks are
small versions of the 2017 paper's CapsNet and CNN.

Without --index a rule chooses the digits: for each network, in the order of --load, the first test
digit that all networks classify correctly at the center and that it misclassifies in more frames
than any other network.

    python3 make_affnist_capsnet_gif.py                  # half a minute
    python3 make_affnist_capsnet_gif.py --index 3 15
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
from affnist_capsnet import CAPSULES, SIDES, data_name
from lab import figures, networks
from lab.figures import BLUE, WRONG
from lab.messages import InputError, Parser, Progress, counted, flag_name, run_cli

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

GRAY = "#999999"
PAPER = "#FFFFFF"                  # of the strips, and of the hatch
HATCH = "///"                      # of wrong predictions, so that they do not differ by color alone
TOP, ROW, BOTTOM = 100, 216, 52    # heights of the titles, of a digit's row, of legend and note, px
PICTURE, BARS, GAP = 150, 265, 40  # widths, px
WIDTH = 620                        # of the whole animation at least, px
STRIP = 16                         # height of a strip, px
NETWORKS = [str(affnist.PRETRAINED[0].with_name(f"affnist_small_{name}.npz")) for name in ("capsnet", "cnn")]
FPS, HOLD = 8, 2000                # frames per second; ms of the last frame
NAMES = {"capsnet-shared": "CapsNet, shared matrices", "capsnet": "CapsNet, one matrix per position",
         "vector-gap": "ten class vectors, GAP", "vector-gmp": "ten class vectors, GMP",
         "cnn-gap": "CNN, global average pooling", "cnn-gmp": "CNN, global max pooling",
         "cnn-dense": "CNN with a hidden layer", "cnn": "the paper's MNIST CNN"}
MAX_DIGITS, MAX_NETWORKS = 4, 3
SEARCHED = 50                      # test digits, from the first, among which the rule chooses
PATH = (                           # (factor, lowest, highest value), animated one after another
    ("position", -1, 1), ("rotation", -20, 20), ("shear", -0.2, 0.2), ("scale_y", 0.8, 1.2), ("scale_x", 0.8, 1.2))
WORDS = {"rotation": "rotated by {:.0f}°", "shear": "sheared by {:.2f}", "scale_y": "scaled vertically by {:.2f}",
         "scale_x": "scaled horizontally by {:.2f}", "position": "translated across the canvas"}
PARTS = {"position": "translated", "rotation": "rotated", "shear": "sheared", "scale_y": "height",
         "scale_x": "width"}       # labels of the strips


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
        n_frames = 2 * n if name == "position" else n
        swing = np.sin(np.linspace(0, 2 * np.pi, n_frames, endpoint=False))
        for s in swing:
            value = middle + s * ((high - middle) if s > 0 else (middle - low))
            if name == "position":
                angle = np.arcsin(np.clip(s, -1, 1))
                scenes.append((name, value, affnist.IDENTITY, (0.9 * s, 0.9 * np.sin(2 * angle))))
            else:
                scenes.append((name, value, affnist.IDENTITY | {name: value}, (0, 0)))
    return scenes


def images_on_path(image, scenes):
    """Return a test digit, (28, 28) uint8, in every scene, (frames, side, side) uint8, and its
    translations from the center, (frames, 2) px, as (row, column)"""
    side = SIDES["affnist"]
    images = []
    translations = []
    for _, _, factors, position in scenes:
        canvases, centers = affnist.transform_digits(image[None], affnist.affine_matrix(**factors),
                                                     FixedPosition(*position), side)
        images.append(canvases[0])
        translations.append(centers[0] - (side - 1) / 2)
    return np.stack(images), np.stack(translations)


def activations(network, images):
    """Return the lengths of a network's capsules, or its probabilities, for images, (frames, J)"""
    labels = np.zeros(len(images), int)                    # only a reconstruction would need others
    samples = {"images": images, "labels": labels}
    with affnist.worker_threads(network.config) as workers:
        out = affnist.forward_shards(network.params, samples, network.config, workers)
    return affnist.class_activations(out, network.config)


def choose_digits(images, labels, shown, n):
    """Return the indices of test digits, one per network: the first digit that all networks
    classify correctly in the first frame, at the center, and that this network misclassifies in
    more frames than any other. n: frames per factor.

    A network for which there is none among the first SEARCHED digits gets the first digit that is
    not yet chosen.
    """
    scenes = make_scenes(n)
    chosen = {}                                                         # {place in shown: index}
    for index in range(min(SEARCHED, len(labels))):
        path, _ = images_on_path(images[index], scenes)
        predicted = np.stack([activations(network, path).argmax(1) for network in shown])
        wrong = predicted != labels[index]                              # (networks, frames)
        errors = wrong.sum(1)
        worst = int(errors.argmax())
        differs = errors[worst] > 0 and np.count_nonzero(errors == errors[worst]) == 1
        if differs and not wrong[:, 0].any():
            chosen.setdefault(worst, index)
        if len(chosen) == len(shown):
            break
    others = [index for index in range(len(labels)) if index not in chosen.values()]
    for k in range(min(len(shown), len(labels))):
        if k not in chosen:
            chosen[k] = others.pop(0)
    return [chosen[k] for k in sorted(chosen)]


class Panel:
    """What is drawn of a network for one digit: a bar per class, and a strip that fills with a mark
    per frame, blue in its lower half where the prediction is correct, in the color of wrong
    predictions in its upper half where it is wrong."""

    def __init__(self, ax_bars, ax_strip, heights, label, scenes):
        """heights: of the bars, (frames, J). label: the true class"""
        n, J = heights.shape
        self.heights, self.label, self.ax_strip = heights, label, ax_strip
        self.predicted = heights.argmax(1)
        self.correct = self.predicted == label
        highest = max(1, int(np.ceil(heights.max())))                   # without squash above 1
        self.bars = ax_bars.bar(range(J), [0] * J)
        ax_bars.set(ylim=(0, highest), yticks=[0, highest])
        ax_bars.tick_params(length=0, pad=3)
        self.marks = np.ones((2, n, 3))
        self.strip = ax_strip.imshow(self.marks, aspect="auto", extent=(0, n, 0, 1))
        factors = [name for name, *_ in scenes]
        middles = [factors.index(name) + factors.count(name) / 2 for name in PARTS]
        ax_strip.set_xticks(middles, PARTS.values(), fontsize=7)
        ax_strip.set_yticks([])
        ax_strip.tick_params(length=0, pad=2)
        ax_strip.spines[:].set(visible=True, color=GRAY)
        for name in PARTS:
            ax_strip.axvline(factors.index(name), color=GRAY, linewidth=0.8)

    def show(self, t):
        """Show frame t, and its mark beside those of the frames before it"""
        for bar, height in zip(self.bars, self.heights[t]):
            bar.set(height=height, facecolor=GRAY, hatch=None, linewidth=0)
        if self.correct[t]:
            self.bars[self.predicted[t]].set(facecolor=BLUE)
            self.marks[1, t] = to_rgb(BLUE)
        else:
            self.bars[self.predicted[t]].set(facecolor=WRONG, edgecolor=PAPER, hatch=HATCH)
            self.marks[0, t] = to_rgb(WRONG)
        self.strip.set_data(self.marks)
        n_correct = np.count_nonzero(self.correct[:t + 1])
        self.ax_strip.set_xlabel(f"correct in {n_correct} of {counted(t + 1, 'frame')}",
                                 fontsize=10, labelpad=1)


def heading_on(shown):
    """Return words on the digits that networks were trained on, and on those that they are shown"""
    data, source = shown[0].data, shown[0].history["source"]
    shifts = set()
    for network in shown:
        limit = affnist.max_shift(network.config)
        if limit is None:
            shifts.add("to any position")
        else:
            shifts.add(f"by up to {counted(limit, 'pixel')}")
    tested = f"{figures.words_for(affnist, data).noun}s"
    if source != data["source"]:
        tested = data_name(data["source"])
    trained = f"{data_name(source)} translated {' or '.join(sorted(shifts))}"
    return f"Trained on {trained}; tested on {tested}"


def note_on(shown):
    """Return words on the settings of training and test that are not the defaults"""
    lines = figures.settings_of_training({each.name: each.training_flags for each in shown})
    flags = dict.fromkeys(flag for network in shown for flag in network.test_flags)
    if flags:
        lines.append(f"Tested with {' '.join(flags)}.")
    return " ".join(lines)


def draw_frames(digits, shown, n):
    """Return the frames, a list of (h, w, 3) uint8: a row for each digit, networks side by side.

    digits: (index, image, (28, 28) uint8, label) each. shown: the networks. n: frames per factor.
    The figure is built once; frames only change its data.
    """
    scenes, heading, note = make_scenes(n), heading_on(shown), note_on(shown)
    data = shown[0].data
    classes = figures.class_names(data)
    noun = figures.words_for(affnist, data).noun
    width = max(PICTURE + GAP + (BARS + GAP) * len(shown), WIDTH)
    height = TOP + ROW * len(digits) + BOTTOM
    fig = Figure((width / 100, height / 100), dpi=100)
    canvas = FigureCanvasAgg(fig)

    def add_axes(left, top, wide, high):
        """Add axes at a position in px"""
        bottom = height - top - high
        return fig.add_axes((left / width, bottom / height, wide / width, high / height))

    title = fig.suptitle("", fontsize=min(12, 1.4 * width / len(heading)), y=1 - 8 / height)
    fig.text(0.5, 8 / height, note, ha="center", color=figures.GRAY,
             fontsize=min(8, 1.4 * width / max(1, len(note))))
    wrong = Patch(facecolor=WRONG, edgecolor=PAPER, hatch=HATCH, linewidth=0)
    legend = {"correct prediction": Patch(color=BLUE), "wrong prediction": wrong,
              "other classes": Patch(color=GRAY)}
    fig.legend(legend.values(), legend, loc="lower center", ncol=3, frameon=False, fontsize=10,
               bbox_to_anchor=(0.5, 20 / height))
    pictures = []                  # of digits: picture, its axes and words, images, translations
    panels = []
    for row, (index, image, label) in enumerate(digits):
        top = TOP + row * ROW
        images, translations = images_on_path(image, scenes)
        ax = add_axes(GAP // 2, top, PICTURE, PICTURE)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set(visible=True, color=GRAY)
        picture = ax.imshow(images[0], cmap="gray_r", vmin=0, vmax=255)
        words = f"test {noun} {index}: class {classes[label]}"
        pictures.append((picture, ax, words, images, translations))
        for k, network in enumerate(shown):
            model, preset = network.config.model, network.config.preset
            left = 3 * GAP // 2 + PICTURE + k * (BARS + GAP)
            ax_bars = add_axes(left, top, BARS, PICTURE - STRIP - 8)
            ax_strip = add_axes(left, top + PICTURE + 10, BARS, STRIP)
            heights = activations(network, images)
            panels.append(Panel(ax_bars, ax_strip, heights, label, scenes))
            figures.label_classes(ax_bars, classes, BARS, fontsize=9)
            if row == 0:
                quantity = "capsule lengths" if model in CAPSULES else "class probabilities"
                name = NAMES.get(model, model)
                ax_bars.set_title(f"{name}\n({model}, preset {preset}): {quantity}", pad=8)
    frames = []
    for t, (factor, value, _, _) in enumerate(scenes):
        title.set_text(f"{heading}\n{WORDS[factor].format(value)}")
        for picture, ax, words, images, translations in pictures:
            picture.set_data(images[t])
            down, right = np.abs(translations[t])
            ax.set_xlabel(f"{words}\ntranslated by {right:.0f} and {down:.0f} px", fontsize=9)
        for panel in panels:
            panel.show(t)
        frames.append(figures.frame_of(canvas))
    return frames


@figures.style()
def check_task(where, task):
    """Raise InputError for a task that the animation does not show. where: what has it"""
    if task != "affnist":
        raise InputError(f"{where} {task}: the animation shows networks of --task affnist, on digits on 40x40 px. "
                         "Give such networks; visualize_affnist_capsnet.py draws others")


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--load", nargs="+", action="extend", metavar="PLACE", help="weights files or folders of the "
                        "networks (default: the pretrained small capsnet and cnn)")
    parser.add_argument("--index", type=int, nargs="+", metavar="N", help="indices of the test "
                        "digits, from 0 (default: chosen by the rule above)")
    parser.add_argument("--frames", type=int, default=16, metavar="N", help="frames per factor (default: 16)")
    figures.add_animation_flags(parser, affnist, FPS)
    affnist.add_settings(parser)
    args = parser.parse_args()
    args.load, n_digits = args.load or NETWORKS, 1 if args.index is None else len(args.index)
    figures.check_animation_flags(args, affnist, {
        "--frames": (args.frames, 2, 60), "--index: digits": (n_digits, 1, MAX_DIGITS),
        "--load: networks": (len(args.load), 1, MAX_NETWORKS)})
    for name in "n_test", "threads", "affnist_dir", "eval_split":
        if hasattr(args, name):
            raise InputError(f"{flag_name(name)} has no effect on the animation. Leave it out")
    for path in args.load:
        check_task(f"{path}: --task", networks.load_network(affnist, path).config.task)
    check_task("--task", getattr(args, "task", "affnist"))
    loaded = [networks.load_for_evaluation(affnist, path, args) for path in args.load]
    if len({network.source for network, _ in loaded}) > 1:
        raise InputError("--load: these networks were trained on different digits. Give networks trained on the same")
    data = affnist.load_data(loaded[0][1])
    shown = [networks.make(affnist, path, *one, data) for path, one in zip(args.load, loaded)]
    images, labels = data["test"]
    if args.index is None:
        args.index = choose_digits(images, labels, shown, args.frames)
    if not 0 <= min(args.index) <= max(args.index) < len(labels):
        raise InputError(f"--index {' '.join(map(str, args.index))}: must be between 0 and {len(labels) - 1}")
    frames = draw_frames([(k, images[k], int(labels[k])) for k in args.index], shown, args.frames)
    durations = figures.held_last(len(frames), args.fps, HOLD)
    figures.write_animation(args.out, frames, durations, Progress(loaded[0][1].quiet).say)


if __name__ == "__main__":
    run_cli(main)
