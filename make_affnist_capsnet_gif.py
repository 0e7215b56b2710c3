#!/usr/bin/env python3
"""Films a test digit that turns, leans, stretches and moves, what each network calls it, and how a capsule redraws it.

    python3 make_affnist_capsnet_gif.py --load weights/affnist_shared.npz --index 1 --fps 8
"""
from pathlib import Path

import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
from affnist_capsnet import DIGIT_NAMES, N_CLASSES, SIDES, InputError

import imageio.v3 as imageio
import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False})
BLUE, ORANGE, GRAY = "#0072B2", "#E69F00", "#999999"          # Okabe & Ito, colour-blind safe
LEVELS = 32                        # of red, green and blue: few colours, the same in every frame: a small file
WIDTH, ROW = 620, 190              # of the film, of a network's row, px
PATH = (                           # (factor, or where: the extremes it swings between); the others rest meanwhile
    ("turn", -60, 60), ("shear", -0.5, 0.5), ("down", 0.6, 1.3), ("across", 0.6, 1.3), ("place", -1, 1))
WITHIN = {"turn": (-20, 20), "shear": (-0.2, 0.2), "down": (0.8, 1.2), "across": (0.8, 1.2)}      # affNIST's
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


def film(image, label, networks, n, source):
    """image (28, 28) uint8, its label, networks: (name, config, weights) -> list of (h, w, 3) uint8 frames. The figure
    is built once; frames only change its data."""
    side = SIDES["affnist"]
    shown = scenes(n)
    images = np.stack([affnist.affine_digits(image[None], affnist.affine_matrix(**factors), Still(*place), side)[0][0]
                       for _, _, factors, place in shown])
    samples = {"images": images, "labels": np.full(len(images), label)}
    outs = []
    with affnist.Runner(1) as runner:
        for _, config, weights in networks:
            outs.append(runner.forward(weights, samples, config, decode="longest"))
    height = 60 + ROW * len(networks)
    fig = Figure((WIDTH / 100, height / 100), dpi=100)
    canvas = FigureCanvasAgg(fig)

    def add_axes(left, top, width, tall):
        """An axes at a place in screen px"""
        return fig.add_axes((left / WIDTH, 1 - (top + tall) / height, width / WIDTH, tall / height))

    heading = fig.suptitle("", fontsize=10, y=0.985)
    ax = add_axes(14, 66, 150, 150)
    picture = ax.imshow(images[0], cmap="gray_r", vmin=0, vmax=255, interpolation="nearest")
    ax.set(xticks=[], yticks=[], title=f"a test digit, {label}")
    rows = []
    for k, (name, config, _) in enumerate(networks):
        ax = add_axes(220, 76 + k * ROW, 210, 110)
        bars = ax.bar(range(N_CLASSES), [0] * N_CLASSES, color=GRAY)
        ax.set(ylim=(0, 1), yticks=[0, 1], title=f"{name}: "
               + ("lengths of its capsules" if config.model in affnist.CAPSULES else "probabilities"))
        ax.set_xticks(range(N_CLASSES), range(N_CLASSES))
        ax.tick_params(length=0, pad=2)
        redrawn = None
        if "recon" in outs[k]:
            ax = add_axes(456, 66 + k * ROW, 150, 150)
            redrawn = ax.imshow(outs[k]["recon"][0, 0], cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            ax.set(xticks=[], yticks=[], title="redrawn by the longest")
        rows.append((bars, redrawn))
    frames = []
    for t, (name, value, _, _) in enumerate(shown):
        low, high = WITHIN.get(name, (-np.inf, np.inf))
        beyond = "" if low <= value <= high else ", beyond affNIST's range"
        heading.set_text(f"Trained on moved {source}; {WORDS[name].format(value)}{beyond}")
        picture.set_data(images[t])
        for (bars, redrawn), out, (_, config, _) in zip(rows, outs, networks):
            heights = out["scores"][t]
            if config.model not in affnist.CAPSULES:
                heights = np.exp(heights - heights.max())
                heights /= heights.sum()
            for j, bar in enumerate(bars):
                bar.set_height(heights[j])
                bar.set_color(GRAY if j != heights.argmax() else BLUE if j == label else ORANGE)
            if redrawn:
                redrawn.set_data(out["recon"][t, 0])
        canvas.draw()
        frame = np.asarray(canvas.buffer_rgba())[..., :3]
        frames.append((np.round(frame / 255 * (LEVELS - 1)) * (255 / (LEVELS - 1))).astype(np.uint8))
    return frames


def main():
    parser = affnist.Parser(description=__doc__)
    parser.add_argument("--load", nargs="+", default=[str(affnist.WEIGHTS)], metavar="FILE", help="the networks, from "
                        f"checkpoints or weights (default weights/{affnist.WEIGHTS.name})")
    parser.add_argument("--index", type=int, default=1, metavar="N", help="which test digit, from 0 (default 1)")
    parser.add_argument("--frames", type=int, default=16, metavar="N", help="frames a factor (default 16)")
    parser.add_argument("--fps", type=float, default=8, metavar="X", help="frames a second (default 8)")
    parser.add_argument("--out", type=Path, default=Path("affnist_capsnet.gif"), metavar="FILE",
                        help="the GIF to write (default affnist_capsnet.gif)")
    affnist.add_config_flags(parser)
    args = parser.parse_args()
    if not 2 <= args.frames <= 60:
        raise InputError(f"--frames {args.frames}: must be between 2 and 60")
    if not 0.1 <= args.fps <= 50:
        raise InputError(f"--fps {args.fps}: must be between 0.1 and 50")
    for name in "out_json", "probe", "n_variants", "n_test", "threads", "affnist_dir", "tests_on":
        if hasattr(args, name):
            raise InputError(f"{affnist.flag_of(name)}: means nothing to a film; leave it out")
    if args.out.suffix.lower() != ".gif":
        raise InputError(f"--out {args.out}: a GIF is written; give a name that ends in .gif")
    affnist.check_writable(args.out)
    found = [affnist.look_at(path, args) for path in args.load]
    config = found[0][1]
    if any(each.task != "affnist" for _, each in found):
        raise InputError("--load: a network of --task mnist does not see 40x40 px; give those of --task affnist")
    if len({file.source for file, _ in found}) > 1:
        raise InputError("--load: these networks were trained on two kinds of digits; give those of one")
    say = affnist.Progress(config.quiet).say
    digits = affnist.load_digits(config, say)
    images, labels = digits["test"]
    if not 0 <= args.index < len(labels):
        raise InputError(f"--index {args.index}: must be between 0 and {len(labels) - 1}")
    networks = [(each.model, each, file.weights) for file, each in found]
    frames = film(images[args.index], int(labels[args.index]), networks, args.frames, DIGIT_NAMES[digits["source"]])
    affnist.write_atomically(
        args.out, lambda file: imageio.imwrite(file, frames, extension=".gif", duration=1000 / args.fps, loop=0))
    say(f"wrote {args.out}  ({len(frames)} frames, {args.out.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    affnist.run_cli(main)
