#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Animate the training of a CapsNet and a CNN on toys as a GIF, then the predictions of both for a plane that rotates
through all azimuths under changing lighting.

    python3 make_smallnorb_novel_viewpoint_gif.py --n-test 600     # 5 minutes
"""
from pathlib import Path

import smallnorb_novel_viewpoint as norb  # before numpy: it sets the number of BLAS threads
from smallnorb_novel_viewpoint import N_CLASSES, NORB_NAMES, NORB_SIDE, InputError

import imageio.v3 as imageio
import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False})
COLORS = ("#0072B2", "#D55E00")  # of the two networks: Okabe & Ito, color-blind safe
NAMES = {"capsnet-shared": "CapsNet (capsnet-shared)", "cnn-gap": "CNN (cnn-gap)"}
PROBABILITIES = {"capsnet-shared": "class probability (normalized capsule lengths)",
                 "cnn-gap": "class probability (softmax)"}
FPS, HOLD, MAX_FRAMES = 5, 2000, 200     # HOLD: ms of each part's last frame; all frames are in memory, 1 MB each
LEVELS = 32                     # of red, green and blue: few colors, the same in every frame: a small file, no flicker
WIDTH, HEIGHT = 800, 390           # of the animation, px
ROTATING = 2                       # the class that rotates: plane
ELEVATION = 50                     # degrees


class Recorder:
    """A snapshot_callback that records (step, accuracy on familiar views, accuracy on novel views) and the weights."""

    def __init__(self, data, config):
        self.data = data
        self.config = config
        self.history = []

    def __call__(self, step, params, terms):
        with norb.Runner(self.config.threads) as runner:
            metrics = norb.evaluate_test_sets(params, self.data, self.config, runner)
        self.history.append(((step, metrics["familiar"], metrics["novel"]), params))


def record_training(config, snapshots, data):
    """Train a network with a Recorder and return its history, with steps as fractions of the training."""
    n_steps = config.n_epochs * -(-len(data["train"]["labels"]) // config.batch_size)
    recorder = Recorder(data, config)
    norb.train(config, recorder, max(1, n_steps // (snapshots - 1)), data)
    return [((step / n_steps, *accuracies), params) for (step, *accuracies), params in recorder.history]


def class_probabilities(params, images, config):
    """Return the class probabilities of one image, (N_CLASSES,): softmax of a CNN, else normalized activations."""
    out, _ = norb.forward(params, images, config)
    if config.model in norb.CAPSULES:
        a = out.get("a", out["scores"])[0]
        return a / a.sum()
    p = np.exp(out["scores"][0] - out["scores"][0].max())
    return p / p.sum()


def render_view(label, azimuth, light, config):
    """Render the first test toy of a class under one of the six lightings.

    Return the network input, (1, 32, 32, 2), and the image to display, (48, 48) in [0, 1].
    """
    toy = norb.make_toy(label, norb.TOY_SPLITS["test"][0], config.toy_seed)
    views = norb.downsample(norb.draw_view(toy, ELEVATION, azimuth, 2 * NORB_SIDE))[light % len(norb.LIGHTINGS)]
    return norb.crop_batch(views[None], [0]), views[..., 0] / 255


def draw_frames(configs, histories, n_sweep):
    """Return the frames, a list of (h, w, 3) uint8, and how many of them show the training.

    The training of both networks comes first, then a toy that rotates through n_sweep azimuths. The figure is built
    once; frames only change its data.
    """
    first = configs[0]
    fig = Figure((WIDTH / 100, HEIGHT / 100), dpi=100)
    canvas = FigureCanvasAgg(fig)
    title = fig.suptitle("", fontsize=10, y=0.985)
    curves = fig.add_axes((0.07, 0.15, 0.26, 0.66))
    curves.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="fraction of training", ylabel="accuracy")
    curves.set_title("test toys; solid: familiar azimuths,\ndashed: novel azimuths", fontsize=8)
    curves.grid(alpha=0.3)
    lines = [[curves.plot([], [], style, color=color, marker="o", markersize=3, clip_on=False,
                          label=NAMES[config.model] if style == "-" else None)[0] for style in ("-", "--")]
             for config, color in zip(configs, COLORS)]
    curves.legend(fontsize=8, loc="lower right")
    ax = fig.add_axes((0.37, 0.48, 0.17, 0.33))
    picture = ax.imshow(np.zeros((NORB_SIDE, NORB_SIDE)), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    caption = ax.set_title("", fontsize=8)
    dial = fig.add_axes((0.365, 0.06, 0.18, 0.28), projection="polar")
    ranges = norb.angle_ranges(first)
    low, high = ranges[0]
    dial.bar(np.deg2rad((low + high) / 2), 1, np.deg2rad(high - low), color="black", alpha=0.15)
    dial.set(yticks=[], ylim=(0, 1))
    dial.set_xticks(np.deg2rad([0, 90, 180, 270]), ["0°", "90°", "180°", "270°"], fontsize=7)
    dial.tick_params(pad=-3)
    hand, = dial.plot([0, 0], [0, 1], color="black", linewidth=1.5)
    fig.text(0.455, 0.395, "azimuth (gray: familiar)\ndot: correct, cross: wrong", ha="center", va="bottom",
             fontsize=8)
    panels, frames = [], []
    for k, (config, color) in enumerate(zip(configs, COLORS)):
        ax = fig.add_axes((0.63, 0.57 - 0.45 * k, 0.34, 0.27))
        bars = ax.barh(range(N_CLASSES), [0] * N_CLASSES, color=color)
        ax.set(xlim=(0, 1), ylim=(N_CLASSES - 0.5, -0.5), xticks=[0, 0.5, 1])
        ax.set_yticks(range(N_CLASSES), NORB_NAMES, fontsize=8)
        ax.tick_params(labelsize=8)
        ax.set_xlabel(PROBABILITIES[config.model], fontsize=8)
        panels.append((ax, bars))

    def add_frame(label, azimuth, light, all_params, marked=False):
        images, display = render_view(label, azimuth, light, first)
        picture.set_data(display)
        familiar, novel = (norb.in_range(azimuth, bounds) for bounds in ranges)
        kind = "familiar azimuth" if familiar else "novel azimuth" if novel else "neither familiar nor novel"
        caption.set_text(f"{NORB_NAMES[label]} at {azimuth:.0f}°\n{kind}")
        hand.set_xdata([np.deg2rad(azimuth)] * 2)
        for (ax, bars), config, params, ring in zip(panels, configs, all_params, (0.86, 0.6)):
            p = class_probabilities(params, images, config)
            for bar, width in zip(bars, p):
                bar.set_width(width)
            predicted = int(p.argmax())
            correct = predicted == label
            if marked:
                dial.plot(np.deg2rad(azimuth), ring, "o" if correct else "x", color=bars[0].get_facecolor(),
                          markersize=3 if correct else 5)
            ax.set_title(f"{NAMES[config.model]}: {NORB_NAMES[predicted]}, {'correct' if correct else 'WRONG'}",
                         fontsize=8.5, fontweight="normal" if correct else "bold")
        canvas.draw()
        frame = np.asarray(canvas.buffer_rgba())[..., :3]
        frames.append((np.round(frame / 255 * (LEVELS - 1)) * (255 / (LEVELS - 1))).astype(np.uint8))

    run_name = f"seed {first.seed}, {first.n_epochs} epochs"
    n, (low, high) = min(map(len, histories)), ranges[1]
    title.set_text(f"During training ({run_name}): predictions for test toys at novel azimuths")
    for k in range(n):
        for history, (solid, dashed) in zip(histories, lines):
            fraction, familiar, novel = np.array([point for point, _ in history[:k + 1]]).T
            solid.set_data(fraction, familiar)
            dashed.set_data(fraction, novel)
        azimuth = (low + (high - low) * k / max(1, n - 1)) % 360
        add_frame(k % N_CLASSES, azimuth, k, [history[k][1] for history in histories])
    title.set_text(f"After training: predictions of both networks for a test {NORB_NAMES[ROTATING]} at all azimuths")
    for k in range(n_sweep):
        add_frame(ROTATING, 360.0 * k / n_sweep, 6 * k // n_sweep, [history[-1][1] for history in histories], True)
    return frames, n


def main():
    parser = norb.Parser(description=__doc__)
    parser.add_argument("--snapshots", type=int, default=16, metavar="N", help="frames of the training (default: 16)")
    parser.add_argument(
        "--sweep-frames", type=int, default=36, metavar="N", help="frames of the rotation (default: 36)")
    parser.add_argument("--fps", type=float, default=FPS, metavar="X", help="frames per second (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("smallnorb_novel_viewpoint.gif"), metavar="FILE",
                        help="the GIF to write (default: smallnorb_novel_viewpoint.gif)")
    norb.add_config_flags(parser)
    args = parser.parse_args()
    for name, value in ("--snapshots", args.snapshots), ("--sweep-frames", args.sweep_frames):
        if not 2 <= value <= MAX_FRAMES:
            raise InputError(f"{name} {value}: must be between 2 and {MAX_FRAMES}")
    if not 0.1 <= args.fps <= 50:
        raise InputError(f"--fps {args.fps:g}: must be between 0.1 and 50 frames per second")
    if args.out.suffix.lower() != ".gif":
        raise InputError(f"--out {args.out}: the file is a GIF. Give a name that ends in .gif")
    for name in "out_json", "checkpoint", "model":
        if hasattr(args, name):
            raise InputError(f"{norb.flag_name(name)} has no effect on the animation. Leave it out")
    given = norb.given_settings(args)
    configs = [norb.network_config(given, name) for name in NAMES]
    norb.check_applicable(given, configs)
    for config in configs:
        norb.check_config(config)
    if configs[0].data != "toys" or configs[0].split != "azimuth":
        raise InputError("--data, --split: the animation shows toys at novel azimuths. Leave these flags out")
    norb.check_writable(args.out)
    say = norb.Progress(configs[0].quiet).say
    data = norb.load_data(configs[0], norb.Progress(configs[0].quiet))
    histories = [record_training(config, args.snapshots, data) for config in configs]
    frames, n_training = draw_frames(configs, histories, args.sweep_frames)
    duration = [1000 / args.fps] * len(frames)
    duration[n_training - 1] = duration[-1] = HOLD
    norb.write_atomically(
        args.out, lambda file: imageio.imwrite(file, frames, extension=".gif", duration=duration, loop=0))
    say(f"wrote {args.out}  ({len(frames)} frames, {args.out.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    norb.run_cli(main)
