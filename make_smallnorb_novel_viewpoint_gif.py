#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Films smallnorb_novel_viewpoint.py: a capsule network and a CNN learning, then both naming a plane that turns through
all azimuths under changing light, and where on the circle each is wrong.

    python3 make_smallnorb_novel_viewpoint_gif.py --n-test 600
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
NAMES = {"capsnet-shared": "capsules", "cnn-gap": "CNN"}
FPS, HOLD, MAX_FRAMES = 5, 2000, 200     # ms the last frame of a part stays; frames are kept in memory, 1 MB each
LEVELS = 32                     # of red, green and blue: few colors, the same in every frame: a small file, no flicker
WIDTH, HEIGHT = 800, 390           # of the film, px
TURNING = 2                        # the class that turns: plane
ELEVATION = 50                     # degrees


class Recorder:
    """A snapshot_callback that keeps, at each call, (step, familiar accuracy, held-out accuracy) and the weights"""

    def __init__(self, data, config):
        self.data = data
        self.config = config
        self.history = []

    def __call__(self, step, params, terms):
        with norb.Runner(self.config.threads) as runner:
            found = norb.evaluate_test_sets(params, self.data, self.config, runner)
        self.history.append(((step, found["familiar"], found["novel"]), params))


def film(config, snapshots, data):
    """Train one network with a Recorder -> its history, the steps as shares of the training"""
    n_steps = config.n_epochs * -(-len(data["train"]["labels"]) // config.batch_size)
    recorder = Recorder(data, config)
    norb.train(config, recorder, max(1, n_steps // (snapshots - 1)), data)
    return [((step / n_steps, *found), params) for (step, *found), params in recorder.history]


def shares(params, images, config):
    """How a network divides its belief among the classes, (N_CLASSES,): activations over their sum, or the softmax of
    a CNN's scores"""
    out, _ = norb.forward(params, images, config)
    if config.model in norb.CAPSULES:
        a = out.get("a", out["scores"])[0]
        return a / a.sum()
    p = np.exp(out["scores"][0] - out["scores"][0].max())
    return p / p.sum()


def view_of(label, azimuth, light, config):
    """One image as the networks eat it, and what to show of it: of the first test toy of a class, which training never
    showed, under one of the six lightings"""
    toy = norb.make_toy(label, norb.TOY_SPLITS["test"][0], config.toy_seed)
    views = norb.downsample(norb.draw_view(toy, ELEVATION, azimuth, 2 * NORB_SIDE))[light % len(norb.LIGHTINGS)]
    return norb.crop_batch(views[None], [0]), views[..., 0] / 255


def draw_frames(configs, histories, n_sweep):
    """-> list of (h, w, 3) uint8: the snapshots of both networks side by side, then a turning toy; and how many of them
    are of the training. One figure, built once."""
    first = configs[0]
    fig = Figure((WIDTH / 100, HEIGHT / 100), dpi=100)
    canvas = FigureCanvasAgg(fig)
    title = fig.suptitle("", fontsize=10, y=0.985)
    curves = fig.add_axes((0.07, 0.15, 0.26, 0.66))
    curves.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="share of training", ylabel="accuracy")
    curves.set_title("new toys. Solid: from sides trained on,\ndashed: from sides never shown", fontsize=8)
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
    fig.text(0.455, 0.395, "azimuth; gray: trained on\ndot: right, cross: wrong", ha="center", va="bottom",
             fontsize=7.5)
    panels, frames = [], []
    for k, color in enumerate(COLORS):
        ax = fig.add_axes((0.63, 0.55 - 0.44 * k, 0.34, 0.29))
        bars = ax.barh(range(N_CLASSES), [0] * N_CLASSES, color=color)
        ax.set(xlim=(0, 1), ylim=(N_CLASSES - 0.5, -0.5), xticks=[0, 0.5, 1])
        ax.set_yticks(range(N_CLASSES), NORB_NAMES, fontsize=8)
        ax.tick_params(labelsize=8)
        ax.set_xlabel("share of belief" if k else "", fontsize=8)
        panels.append((ax, bars))

    def show(label, azimuth, light, all_params, marked=False):
        images, shown = view_of(label, azimuth, light, first)
        picture.set_data(shown)
        trained, novel = (norb.in_range(azimuth, wanted) for wanted in ranges)
        where = "a side trained on" if trained else "a side never shown" if novel else "between"
        caption.set_text(f"{NORB_NAMES[label]} at {azimuth:.0f}°\n{where}")
        hand.set_xdata([np.deg2rad(azimuth)] * 2)
        for (ax, bars), config, params, ring in zip(panels, configs, all_params, (0.86, 0.6)):
            p = shares(params, images, config)
            for bar, width in zip(bars, p):
                bar.set_width(width)
            named = int(p.argmax())
            right = named == label
            if marked:
                dial.plot(np.deg2rad(azimuth), ring, "o" if right else "x", color=bars[0].get_facecolor(),
                          markersize=3 if right else 5)
            ax.set_title(f"{NAMES[config.model]}: {NORB_NAMES[named]}, {'right' if right else 'WRONG'}", fontsize=9,
                         fontweight="normal" if right else "bold")
        canvas.draw()
        frame = np.asarray(canvas.buffer_rgba())[..., :3]
        frames.append((np.round(frame / 255 * (LEVELS - 1)) * (255 / (LEVELS - 1))).astype(np.uint8))

    run_name = f"seed {first.seed}, {first.n_epochs} epochs"
    n, (low, high) = min(map(len, histories)), ranges[1]
    title.set_text(f"Training ({run_name}): toys and sides that it never shows")
    for k in range(n):
        for history, (solid, dashed) in zip(histories, lines):
            at, familiar, unseen = np.array([point for point, _ in history[:k + 1]]).T
            solid.set_data(at, familiar)
            dashed.set_data(at, unseen)
        show(k % N_CLASSES, (low + (high - low) * k / max(1, n - 1)) % 360, k, [history[k][1] for history in histories])
    title.set_text(f"After training: a {NORB_NAMES[TURNING]} that it never showed turns, both networks name it")
    for k in range(n_sweep):
        show(TURNING, 360.0 * k / n_sweep, 6 * k // n_sweep, [history[-1][1] for history in histories], True)
    return frames, n


def main():
    parser = norb.Parser(description=__doc__)
    parser.add_argument("--snapshots", type=int, default=16, metavar="N", help="frames of the training (default 16)")
    parser.add_argument(
        "--sweep-frames", type=int, default=36, metavar="N", help="frames of the full turn (default 36)")
    parser.add_argument("--out", type=Path, default=Path("smallnorb_novel_viewpoint.gif"), metavar="FILE",
                        help="the GIF to write (default smallnorb_novel_viewpoint.gif)")
    norb.add_config_flags(parser)
    args = parser.parse_args()
    for name, value in ("--snapshots", args.snapshots), ("--sweep-frames", args.sweep_frames):
        if not 2 <= value <= MAX_FRAMES:
            raise InputError(f"{name} {value}: must be between 2 and {MAX_FRAMES}")
    if args.out.suffix.lower() != ".gif":
        raise InputError(f"--out {args.out}: a GIF is written; give a name that ends in .gif")
    for name in "out_json", "checkpoint", "model":
        if hasattr(args, name):
            raise InputError(f"{norb.flag_name(name)}: goes with smallnorb_novel_viewpoint.py; leave it out here")
    given = norb.given_settings(args)
    configs = [norb.network_config(given, name) for name in NAMES]
    norb.check_applicable(given, configs)
    for config in configs:
        norb.check_config(config)
    if configs[0].data != "toys" or configs[0].split != "azimuth":
        raise InputError("--data, --split: the film shows a toy turning; leave them out")
    norb.check_writable(args.out)
    say = norb.Progress(configs[0].quiet).say
    data = norb.load_data(configs[0], say)
    histories = [film(config, args.snapshots, data) for config in configs]
    frames, n_training = draw_frames(configs, histories, args.sweep_frames)
    duration = [1000 / FPS] * len(frames)
    duration[n_training - 1] = duration[-1] = HOLD
    norb.write_atomically(
        args.out, lambda file: imageio.imwrite(file, frames, extension=".gif", duration=duration, loop=0))
    say(f"wrote {args.out}  ({len(frames)} frames, {args.out.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    norb.run_cli(main)
