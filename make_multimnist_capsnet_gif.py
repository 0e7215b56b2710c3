#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Animate the training of a CapsNet on two overlapping digits as a GIF: reconstructions, lengths of the digit capsules,
loss and accuracy.

    python3 make_multimnist_capsnet_gif.py --n-epochs 12 --n-train 6000 --snapshot-every 75     # 3 minutes
"""
from pathlib import Path

import multimnist_capsnet as capsnet  # before numpy: it sets the number of BLAS threads
from multimnist_capsnet import CANVAS, CHANCE, N_CLASSES, InputError

import imageio.v3 as imageio
import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False})
BLUE = "#0072B2"  # Okabe & Ito, color-blind safe
ORANGE = "#E69F00"
GRAY = "#999999"
CROSS = "\N{MULTIPLICATION SIGN}"
N_SHOWN, N_VAL = 4, 500            # test pairs in the montage, validation pairs for the curves
FPS, HOLD, MAX_FRAMES = 6, 2000, 200     # HOLD: ms of the last frames; all frames are in memory, 1 MB each
LEVELS = 32                     # of red, green and blue: few colors, the same in every frame: a small file, no flicker
WIDTH, HEIGHT = 800, 390           # of the animation, px
SCALE, GAP = 2, 2                  # screen px per image pixel; image pixels between images


class Recorder:
    """A snapshot_callback that records what a frame shows: metrics, capsule lengths and reconstructions."""

    def __init__(self, digits, config):
        test = next(capsnet.stream_pairs(digits, "test", config.n_test, config, "evaluation", 1))
        val = next(capsnet.validation_pairs(digits, config))
        self.shown = {name: array[:N_SHOWN] for name, array in test.items()}
        self.val = {name: array[:N_VAL] for name, array in val.items()}
        self.config, self.snapshots = config, []

    def __call__(self, step, params, terms):
        self.snapshots.append({"step": step} | self.evaluate(params, self.config))

    def evaluate(self, params, config):
        """Return a network's validation loss and accuracy, its capsule lengths and its reconstructions."""
        with capsnet.Runner(self.config.threads) as runner:
            val = capsnet.evaluate(params, [self.val], config, runner)
            out = runner.forward(params, self.shown, config)
        return {"loss": val["loss"], "exact-match accuracy": val["exact_match"], "lengths": out["lengths"],
                "recon": out["recon"]}


def montage(shown, recon):
    """Return a gray picture in [0, 1], a row per pair: input, first digit, its reconstruction, second digit, its
    reconstruction."""
    a, b = shown["sources"].swapaxes(0, 1) / 255
    images = np.stack([shown["composites"] / 255, a, recon[:, 0], b, recon[:, 1]], 1)           # (n, 5, 36, 36)
    padded = np.pad(images, ((0, 0), (0, 0), (0, GAP), (0, GAP)), constant_values=1)
    return padded.swapaxes(1, 2).reshape(len(images) * (CANVAS + GAP), -1)[:-GAP, :-GAP]


def draw_frames(recorder, n_steps, title, ending):
    """Return the frames, a list of (h, w, 3) uint8: one per snapshot, and one of the ending.

    ending: title and Recorder.evaluate of another network. The figure is built once; frames only change its data.
    """
    shown = recorder.shown
    snapshots = recorder.snapshots
    pitch = CANVAS + GAP
    fig = Figure((WIDTH / 100, HEIGHT / 100), dpi=100)
    canvas = FigureCanvasAgg(fig)

    def add_axes(left, top, width, height):
        """Add axes at a position in screen px."""
        return fig.add_axes((left / WIDTH, 1 - (top + height) / HEIGHT, width / WIDTH, height / HEIGHT))

    heading = fig.suptitle(title, fontsize=10, y=0.985)
    first = montage(shown, snapshots[0]["recon"])
    ax = add_axes(10, 60, first.shape[1] * SCALE, first.shape[0] * SCALE)
    picture = ax.imshow(first, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    columns = ["test image", "digit 1", "reconstruction", "digit 2", "reconstruction"]
    ax.set_xticks(np.arange(len(columns)) * pitch + CANVAS / 2, columns, fontsize=8)
    ax.set_yticks([])
    ax.tick_params(length=0, labeltop=True, labelbottom=False)
    ax.spines[:].set_visible(False)
    bars, marks = [], []
    for k, pair in enumerate(shown["labels"]):
        ax = add_axes(420, 60 + k * pitch * SCALE, 140, 56)
        bars.extend(
            ax.bar(range(N_CLASSES), [0] * N_CLASSES, color=[ORANGE if j in pair else GRAY for j in range(N_CLASSES)]))
        ax.set(ylim=(0, 1), yticks=[0, 1])
        ax.set_xticks(range(N_CLASSES), range(N_CLASSES), fontsize=8)
        ax.tick_params(length=0, pad=2)
        ax.set_title("" if k else f"capsule lengths (orange: true\ndigits; {CROSS}: wrong prediction)", fontsize=8)
        marks.append(ax.text(1.02, 0.5, "", fontsize=14, va="center", transform=ax.transAxes))
    curves, steps = [], [s["step"] for s in snapshots]
    for name, top, limit in ("loss", 64, 1.05 * max(s["loss"] for s in snapshots)), ("exact-match accuracy", 234, 1):
        ax = add_axes(606, top, 172, 106)
        ax.set(xlim=(0, n_steps), ylim=(0, limit))
        ax.set_title(f"{name}\n({len(recorder.val['labels'])} validation pairs)", fontsize=8, pad=3)
        ax.locator_params(axis="y", nbins=3)           # short tick labels, beside the crosses
        ax.tick_params(labelsize=8)
        ax.grid(alpha=0.3)
        curves.append((ax.plot([], [], "o-", color=BLUE, markersize=3, clip_on=False)[0], [s[name] for s in snapshots]))
    ax.axhline(CHANCE, color=GRAY, linestyle=":")
    ax.text(n_steps, CHANCE + 0.03, "chance 1/45", ha="right", fontsize=8, color="#666666")
    frames = []
    for k, snapshot in enumerate([*snapshots, snapshots[-1] | ending[1]]):
        picture.set_data(montage(shown, snapshot["recon"]))
        for bar, length in zip(bars, snapshot["lengths"].ravel()):
            bar.set_height(length)
        for mark, correct in zip(marks, capsnet.exact_match(capsnet.top_two(snapshot["lengths"]), shown["labels"])):
            mark.set_text("" if correct else CROSS)
        for line, values in curves:
            line.set_data(steps[:k + 1], values[:k + 1])
        ax.set_xlabel(f"step {snapshot['step']} of {n_steps}")
        if k == len(snapshots):
            heading.set_text(ending[0])
            accuracy = snapshot["exact-match accuracy"]
            ax.axhline(accuracy, color=ORANGE, linestyle="--")
            ax.text(n_steps, 0.25, f"dashed: pretrained, {accuracy:.3f}", ha="right", fontsize=8, color="#8a5f00")
        canvas.draw()
        frame = np.asarray(canvas.buffer_rgba())[..., :3]
        frames.append((np.round(frame / 255 * (LEVELS - 1)) * (255 / (LEVELS - 1))).astype(np.uint8))
    return frames


def main():
    parser = capsnet.Parser(description=__doc__)
    parser.add_argument(
        "--snapshot-every", type=int, default=75, metavar="N", help="steps between two frames (default: 75)")
    parser.add_argument("--fps", type=float, default=FPS, metavar="X", help="frames per second (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("multimnist_capsnet.gif"), metavar="FILE",
                        help="the GIF to write (default: multimnist_capsnet.gif)")
    capsnet.add_config_flags(parser)
    args = parser.parse_args()
    config, = capsnet.configs_from_args(args)
    capsnet.check_config(config)
    if config.model != "capsnet":
        raise InputError(f"--model {config.model}: the animation shows a capsnet. Leave --model out")
    n_steps = config.n_epochs * -(-config.n_train // config.batch_size)
    if args.snapshot_every < 1 or n_steps / args.snapshot_every > MAX_FRAMES:
        raise InputError(
            f"--snapshot-every {args.snapshot_every}: an animation has at most {MAX_FRAMES} frames. Give at least "
            f"{max(1, -(-n_steps // MAX_FRAMES))}")
    if config.out_json:
        raise InputError("--out-json has no effect on an animation. Leave it out, or run multimnist_capsnet.py")
    if not 0.1 <= args.fps <= 50:
        raise InputError(f"--fps {args.fps:g}: must be between 0.1 and 50 frames per second")
    if args.out.suffix.lower() != ".gif":
        raise InputError(f"--out {args.out}: the file is a GIF. Give a name that ends in .gif")
    capsnet.check_writable(args.out)
    pretrained = capsnet.load_network(capsnet.PRETRAINED[0])
    say = capsnet.Progress(config.quiet).say
    digits = capsnet.load_digits(config, say)
    recorder = Recorder(digits, config)
    capsnet.train(config, recorder, args.snapshot_every, digits)
    name = capsnet.DIGIT_NAMES[digits["source"]]
    title = (f"Two overlapping {name}, each reconstructed from its own capsule ({config.n_epochs} x {config.n_train:,} "
             f"training pairs, seed {config.seed})")
    ending = (f"The same test pairs with the pretrained network ({pretrained.config.n_epochs} x "
              f"{pretrained.config.n_train:,} training pairs of {capsnet.DIGIT_NAMES[pretrained.source]})",
              recorder.evaluate(pretrained.weights, pretrained.config))
    frames = draw_frames(recorder, n_steps, title, ending)
    duration = [1000 / args.fps] * (len(frames) - 2) + [HOLD] * 2
    capsnet.write_atomically(
        args.out, lambda file: imageio.imwrite(file, frames, extension=".gif", duration=duration, loop=0))
    say(f"wrote {args.out}  ({len(frames)} frames, {args.out.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    capsnet.run_cli(main)
