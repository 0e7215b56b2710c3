#!/usr/bin/env python3
"""Films smallnorb_novel_viewpoint.py: a capsule network and a CNN learning, then both watching a toy, or a shape, turn
through all azimuths under changing light.

    python3 make_smallnorb_novel_viewpoint_gif.py --seed 1 --n-epochs 8 --snapshots 8 --sweep-frames 12 --fps 10
"""
from pathlib import Path

import smallnorb_novel_viewpoint as norb  # before numpy: it sets the number of BLAS threads
from smallnorb_novel_viewpoint import N_CLASSES, InputError

import imageio.v3 as imageio
import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False})
BLUE = "#0072B2"  # Okabe & Ito, colour-blind safe
ORANGE = "#E69F00"
RED = "#D55E00"
GRAY = "#999999"
COLOURS = (BLUE, RED)              # of the two networks
HOLD, MAX_FRAMES = 2000, 200       # ms the last frame of a part stays; frames are kept in memory, 1 MB each
LEVELS = 32                     # of red, green and blue: few colours, the same in every frame: a small file, no flicker
WIDTH, HEIGHT = 800, 390           # of the film, px
TURNING = 4                        # the class that turns: car, or tripod, the hardest shape
ELEVATION = 50                     # degrees


class Recorder:
    """A snapshot_callback that keeps, at each call, (step, familiar accuracy, held-out accuracy) and the weights"""

    def __init__(self, data, config):
        self.data = data
        self.config = config
        self.history = []

    def __call__(self, step, params, terms):
        with norb.Runner(self.config.threads) as runner:
            found = norb.evaluate_viewpoint_extrapolation(params, self.data, self.config, runner)
        self.history.append(((step, found["familiar"], found["held_out"]), params))


def film(config, snapshots, data):
    """Train one network with a Recorder -> Recorder, number of steps"""
    n_steps = config.n_epochs * -(-len(data["train"]["labels"]) // config.batch_size)
    recorder = Recorder(data, config)
    norb.train(config, recorder, max(1, n_steps // max(1, snapshots - 1)), data)
    return recorder, n_steps


def shares(params, batch, config):
    """How a network divides its belief among the classes, (N_CLASSES,): activations over their sum, or the softmax of
    a CNN's scores"""
    out, _ = norb.forward(params, batch["images"], config)
    if config.model in norb.CAPSULES:
        a = out.get("a", out["scores"])[0]
        return a / a.sum()
    p = np.exp(out["scores"][0] - out["scores"][0].max())
    return p / p.sum()


def view_of(label, azimuth, light, config, rng):
    """One image of a class as the networks eat it, dict of arrays, and what to show of it: of shapes with noise; of the
    first test toy of the class, which training never showed, under one of the six lightings"""
    labels = np.array([label])
    if config.data == "shapes":
        images = norb.render(labels, np.array([azimuth]), np.array([float(ELEVATION)]), rng)
        return {"images": images, "labels": labels}, images[0, ..., 0]
    toy = norb.make_toy(label, norb.TOY_SPLITS["test"][0], config.toy_seed)
    views = norb.halve(norb.draw_view(toy, ELEVATION, azimuth, 2 * norb.NORB_SIDE))[light % len(norb.LIGHTINGS)]
    batch = next(norb.prepared({"images": views[None], "labels": labels}, config.data))
    return batch, views[..., 0] / 255


def draw_frames(recorders, steps, config, n_sweep, run_name):
    """-> list of (h, w, 3) uint8: the snapshots of both networks side by side, then a turning shape. One figure, built
    once."""
    fig = Figure((WIDTH / 100, HEIGHT / 100), dpi=100)
    canvas = FigureCanvasAgg(fig)
    names = [r.config.model for r in recorders]
    classes, side = (norb.CLASS_NAMES, norb.SIDE) if config.data == "shapes" else (norb.NORB_NAMES, norb.NORB_SIDE)
    ranges = {}
    title = fig.suptitle("", fontsize=10, y=0.985)
    curves = fig.add_axes((0.07, 0.15, 0.26, 0.66))
    curves.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="share of training", ylabel="accuracy")
    curves.set_title("solid: familiar views,\ndashed: held-out views", fontsize=8)
    curves.grid(alpha=0.3)
    lines = [
        [
            curves.plot([], [], style, color=colour, marker="o", markersize=3, clip_on=False,
                        label=name if style == "-" else None,
            )[0]
            for style in ("-", "--")]
        for name, colour in zip(names, COLOURS)]
    curves.legend(fontsize=8, loc="lower right")
    ax = fig.add_axes((0.37, 0.42, 0.17, 0.36))
    picture = ax.imshow(np.zeros((side, side)), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    caption = ax.set_title("", fontsize=8)
    dial = fig.add_axes((0.395, 0.05, 0.12, 0.22), projection="polar")
    for part, colour in ("train", BLUE), ("test", ORANGE):
        low, high = ranges[part] = norb.parse_range(getattr(config, f"{part}_azimuths"), f"--{part}-azimuths")
        dial.bar(np.deg2rad((low + high) / 2), 1, np.deg2rad(high - low), color=colour, alpha=0.35)
    dial.set(yticks=[], ylim=(0, 1))
    dial.set_xticks(np.deg2rad([0, 90, 180, 270]), ["0°", "90°", "180°", "270°"], fontsize=7)
    dial.tick_params(pad=-3)
    hand, = dial.plot([0, 0], [0, 1], color="black", linewidth=2)
    fig.text(0.455, 0.345, "azimuth: blue trained,\norange held out", ha="center", va="bottom", fontsize=7.5)
    panels = []
    for k, colour in enumerate(COLOURS[:len(names)]):
        ax = fig.add_axes((0.63, 0.55 - 0.44 * k, 0.34, 0.29))
        bars = ax.barh(range(N_CLASSES), [0] * N_CLASSES, color=colour)
        ax.set(xlim=(0, 1), ylim=(N_CLASSES - 0.5, -0.5), xticks=[0, 0.5, 1])
        ax.set_yticks(range(N_CLASSES), classes, fontsize=8)
        ax.tick_params(labelsize=8)
        if k:
            ax.set_xlabel("share of belief", fontsize=8)
        panels.append((ax, bars))
    rng, frames = np.random.default_rng(config.seed), []

    def show(label, azimuth, light, all_params):
        batch, shown = view_of(label, azimuth, light, config, rng)
        picture.set_data(shown)
        seen = [part for part, (low, high) in ranges.items() if (azimuth - low) % 360 <= high - low]
        caption.set_text(
            f"{classes[label]} at {azimuth:.0f}°\n"
            + {"train": "training range", "test": "held-out range"}.get(seen[0] if seen else "", "between the ranges"))
        hand.set_xdata([np.deg2rad(azimuth)] * 2)
        for (ax, bars), recorder, params in zip(panels, recorders, all_params):
            p = shares(params, norb.to_batch(batch, slice(None)), recorder.config)
            for bar, width in zip(bars, p):
                bar.set_width(width)
            named = int(p.argmax())
            ax.set_title(
                f"{recorder.config.model}: {classes[named]}, {'right' if named == label else 'WRONG'}",
                fontsize=9, fontweight="normal" if named == label else "bold")
        canvas.draw()
        frame = np.asarray(canvas.buffer_rgba())[..., :3]
        frames.append((np.round(frame / 255 * (LEVELS - 1)) * (255 / (LEVELS - 1))).astype(np.uint8))

    n = min(len(recorder.history) for recorder in recorders)
    held_out = ranges["test"][0] + (ranges["test"][1] - ranges["test"][0]) * np.arange(n) / max(1, n - 1)
    for k in range(n):
        for recorder, n_steps, (solid, dashed) in zip(recorders, steps, lines):
            at, familiar, unseen = np.array([point for point, _ in recorder.history[:k + 1]]).T
            solid.set_data(at / n_steps, familiar)
            dashed.set_data(at / n_steps, unseen)
        title.set_text(f"Training ({run_name}): held-out views, never trained on")
        show(k % N_CLASSES, held_out[k] % 360, k, [recorder.history[k][1] for recorder in recorders])
    n_training, thing = len(frames), "shape" if config.data == "shapes" else "toy that training never showed"
    for k in range(n_sweep):
        title.set_text(f"After training ({run_name}): one {thing} turns, both networks name it")
        show(TURNING, 360.0 * k / n_sweep, 6 * k // n_sweep, [recorder.history[-1][1] for recorder in recorders])
    return frames, n_training


def main():
    parser = norb.Parser(description=__doc__)
    parser.add_argument("--snapshots", type=int, default=16, metavar="N", help="frames of the training (default 16)")
    parser.add_argument(
        "--sweep-frames", type=int, default=36, metavar="N", help="frames of the full turn (default 36)")
    parser.add_argument("--fps", type=float, default=5, metavar="X", help="frames a second (default 5)")
    parser.add_argument("--out", type=Path, default=Path("smallnorb_novel_viewpoint.gif"), metavar="FILE",
                        help="the GIF to write (default smallnorb_novel_viewpoint.gif)")
    norb.add_config_flags(parser)
    args = parser.parse_args()
    config = norb.config_from_args(args)
    norb.check_config(config)
    for name, value in ("--snapshots", args.snapshots), ("--sweep-frames", args.sweep_frames):
        if not 2 <= value <= MAX_FRAMES:
            raise InputError(f"{name} {value}: must be between 2 and {MAX_FRAMES}")
    if not 0.1 <= args.fps <= 50:
        raise InputError(f"--fps {args.fps}: must be between 0.1 and 50")
    if config.data == "smallnorb" or config.split != "azimuth":
        raise InputError("the film shows toys or shapes turning: leave --data smallnorb and --split out")
    if config.out_json or config.checkpoint:
        raise InputError(
            "--out-json and --checkpoint: these come from smallnorb_novel_viewpoint.py; leave them out here")
    if len(norb.baselines(config)) != 1 or "nearest" in (config.model, config.baseline):
        raise InputError(
            f"--model {config.model} --baseline {config.baseline}: the film shows a network beside one other, "
            "both learning; name one")
    if args.out.suffix.lower() != ".gif":
        raise InputError(f"--out {args.out}: a GIF is written; give a name that ends in .gif")
    norb.check_writable(args.out)
    say, data = norb.Progress(config.quiet).say, norb.load_data(config)
    models = (config.model, config.baseline)
    filmed = [film(norb.for_model(config, model), args.snapshots, data) for model in models]
    epochs = {recorder.config.n_epochs for recorder, _ in filmed}
    frames, n_training = draw_frames([recorder for recorder, _ in filmed], [n for _, n in filmed], config,
                                     args.sweep_frames,
                                     f"seed {config.seed}, {' and '.join(map(str, sorted(epochs)))} epochs")
    duration = [1000 / args.fps] * len(frames)
    duration[n_training - 1] = duration[-1] = HOLD
    norb.write_atomically(
        args.out, lambda file: imageio.imwrite(file, frames, extension=".gif", duration=duration, loop=0))
    say(f"wrote {args.out}  ({len(frames)} frames, {args.out.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    norb.run_cli(main)
