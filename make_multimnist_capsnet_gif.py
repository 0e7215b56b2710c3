#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Animate the training of a CapsNet on two overlapping digits as a GIF: reconstructions, lengths of the digit capsules,
loss and accuracy. With --load, test pairs one after another, as a trained network separates them.

    python3 make_multimnist_capsnet_gif.py --n-epochs 12 --n-train 6000 --snapshot-every 75     # 3 minutes
    python3 make_multimnist_capsnet_gif.py --load                                               # seconds
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
import multimnist_capsnet as capsnet  # before numpy: it sets the number of BLAS threads
from lab import figures, networks
from lab.figures import BLUE, ORANGE
from lab.messages import InputError, Parser, Progress, flag_name, run_cli
from multimnist_capsnet import CANVAS

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

GRAY = "#999999"
CROSS = "\N{MULTIPLICATION SIGN}"
N_SHOWN, N_VAL = 4, 500            # test pairs in the montage, validation pairs for the curves
FPS, HOLD = 6, 2000                # frames per second; ms of the last frame
MAX_FRAMES = 200                   # all frames are in memory, 1 MB each
N_SCENES, SCENE_MS = 16, 1500      # with --load
WIDTH, HEIGHT = 800, 406           # of the animation, px
SCALE, GAP = 2, 2                  # screen px per image pixel; image pixels between images


class Recorder:
    """A hook of train that records what a frame shows, every so many steps and at the last one: metrics, capsule
    lengths and reconstructions."""

    def __init__(self, data, config, every):
        test = next(capsnet.stream_pairs(data, "test", config.n_test, config, capsnet.EVALUATION, 1))
        val = next(capsnet.stream_pairs(data, "val", config.n_val, config, capsnet.EVALUATION, 0))
        self.shown = {name: array[:N_SHOWN] for name, array in test.items()}
        self.val = {name: array[:N_VAL] for name, array in val.items()}
        self.config, self.every, self.snapshots = config, every, []

    def __call__(self, state, terms=None):
        if state["step"] % self.every == 0 or state["step"] == n_steps(self.config):
            self.snapshots.append({"step": state["step"]} | self.evaluate(capsnet.weights_of(state), self.config))

    def evaluate(self, weights, config):
        """Return a network's validation loss and accuracy, its capsule lengths and its reconstructions."""
        with capsnet.worker_threads(self.config) as workers:
            val = capsnet.evaluate(weights, [self.val], config, workers)
            out = capsnet.forward_shards(weights, self.shown, config, workers)
        return {"loss": val["loss"], "exact-match accuracy": val["exact_match"], "lengths": out["scores"],
                "recon": out["recon"]}


def n_steps(config):
    """Return the number of steps of a training"""
    return config.n_epochs * -(-config.n_train // config.batch_size)


def montage(shown, recon):
    """Return a gray picture in [0, 1], a row per pair: input, first digit, its reconstruction, second digit, its
    reconstruction."""
    a, b = shown["sources"].swapaxes(0, 1) / 255
    images = np.stack([shown["composites"] / 255, a, recon[:, 0], b, recon[:, 1]], 1)           # (n, 5, 36, 36)
    padded = np.pad(images, ((0, 0), (0, 0), (0, GAP), (0, GAP)), constant_values=1)
    return padded.swapaxes(1, 2).reshape(len(images) * (CANVAS + GAP), -1)[:-GAP, :-GAP]


def draw_frames(scenes, points, last_step, title, note, names=()):
    """Return the frames, a list of (h, w, 3) uint8, one per scene. The figure is built once; frames change its data.

    scenes: dicts of shown (the pairs), lengths and recon, and n, how many of the points of the curves are drawn.
    points: (step, validation loss, exact-match accuracy) each. note: what is written below. names:
    of the classes, if they have some.
    """
    first, pitch, J = scenes[0], CANVAS + GAP, scenes[0]["lengths"].shape[1]
    chance = 2 / (J * (J - 1))
    fig = Figure((WIDTH / 100, HEIGHT / 100), dpi=100)
    canvas = FigureCanvasAgg(fig)

    def add_axes(left, top, width, height):
        """Add axes at a position in screen px."""
        return fig.add_axes((left / WIDTH, 1 - (top + height) / HEIGHT, width / WIDTH, height / HEIGHT))

    fig.suptitle(title, fontsize=min(10, 1100 / len(title)), y=0.985)
    fig.text(0.5, 5 / HEIGHT, note, ha="center", color=figures.GRAY,
             fontsize=min(8, 1150 / len(note)))
    image = montage(first["shown"], first["recon"])
    ax = add_axes(10, 60, image.shape[1] * SCALE, image.shape[0] * SCALE)
    picture = ax.imshow(image, cmap="gray", vmin=0, vmax=1)
    columns = ["test pair", "first", "reconstruction", "second", "reconstruction"]
    ax.set_xticks(np.arange(len(columns)) * pitch + CANVAS / 2, columns, fontsize=8)
    ax.set_yticks([])
    ax.tick_params(length=0, labeltop=True, labelbottom=False)
    ax.spines[:].set_visible(False)
    labels = [[ax.text(column * pitch + 1, row * pitch + CANVAS - 2, "", fontsize=7, color="white")
               for column in (1, 3)] for row in range(len(first["lengths"]))]
    bars, marks = [], []
    for k in range(len(first["lengths"])):
        ax = add_axes(420, 60 + k * pitch * SCALE, 140, 56)
        bars.extend(ax.bar(range(J), [0] * J))
        ax.set(ylim=(0, 1), yticks=[0, 1])
        figures.label_classes(ax, names or list(map(str, range(J))), 140, fontsize=8)
        ax.tick_params(length=0, pad=2)
        ax.set_title("" if k else f"capsule lengths (orange: true\nclasses; {CROSS}: wrong prediction)", fontsize=8)
        marks.append(ax.text(1.02, 0.5, "", fontsize=14, va="center", transform=ax.transAxes))
    curves, (steps, *columns) = [], zip(*points)
    for name, top, values, limit in (("validation loss", 64, columns[0], 1.05 * max(columns[0])),
                                     ("validation accuracy\n(exact match)", 234, columns[1], 1)):
        ax = add_axes(606, top, 172, 106)
        ax.set(xlim=(0, last_step), ylim=(0, limit))
        ax.set_title(name, fontsize=8, pad=3)
        ax.locator_params(axis="y", nbins=3)           # short tick labels, beside the crosses
        ax.tick_params(labelsize=8)
        ax.grid(alpha=0.3)
        curves.append((ax.plot([], [], "o-", color=BLUE, markersize=3, clip_on=False)[0], values))
    ax.axhline(chance, color=GRAY, linestyle=":")
    ax.text(last_step, chance + 0.03, f"chance 1/{1 / chance:.0f}", ha="right", fontsize=8, color="#666666")
    frames = []
    for scene in scenes:
        shown, present = scene["shown"], capsnet.k_hot(scene["shown"]["labels"], bool, J)
        picture.set_data(montage(shown, scene["recon"]))
        for texts, pair in zip(labels, shown["labels"] if names else ()):
            for text, label in zip(texts, pair):
                text.set_text(names[label][:14])
        for bar, length, is_present in zip(bars, scene["lengths"].ravel(), present.ravel()):
            bar.set(height=length, color=ORANGE if is_present else GRAY)
        for mark, correct in zip(marks, capsnet.exact_match(capsnet.top_two(scene["lengths"]), shown["labels"])):
            mark.set_text("" if correct else CROSS)
        for line, values in curves:
            line.set_data(steps[:scene["n"]], values[:scene["n"]])
        ax.set_xlabel(f"step {steps[scene['n'] - 1]} of {last_step}")
        frames.append(figures.frame_of(canvas))
    return frames


def scenes_of_training(config, data, every):
    """Train a network; return scenes and points as draw_frames takes them, and the Network"""
    recorder = Recorder(data, config, every)
    recorder(capsnet.initial_state(config))
    network = networks.make(capsnet, config.model, None, config, data, each_step=recorder)
    scenes = []
    points = []
    for k, each in enumerate(recorder.snapshots, 1):
        scenes.append({"shown": recorder.shown, "lengths": each["lengths"],
                       "recon": each["recon"], "n": k})
        points.append((each["step"], each["loss"], each["exact-match accuracy"]))
    return scenes, points, network


def note_on(network):
    """Return what is written below: model, preset and seed, and the flags of training and test that
    are not the defaults"""
    unsaid = ["seed", "digits", "n_epochs", "n_train"]     # in the title, or already in the note
    unsaid.append("n_val")                                 # changes the curves alone
    note = network.label
    if flags := networks.training_flags(network.trained, unsaid):
        note += f", trained with {' '.join(flags)}"
    if network.test_flags:
        note += f", tested with {' '.join(network.test_flags)}"
    return note


def scenes_of_test_pairs(network):
    """Return N_SCENES scenes of different test pairs, as a loaded network separates them, and the points of its
    training history."""
    pairs = next(capsnet.stream_pairs(network.data, "test", N_SCENES * N_SHOWN, network.config, capsnet.EVALUATION, 1))
    with capsnet.worker_threads(network.config) as workers:
        out = capsnet.forward_shards(network.params, pairs, network.config, workers)
    epochs, rows = network.history["epochs"], [slice(k, k + N_SHOWN) for k in range(0, N_SCENES * N_SHOWN, N_SHOWN)]
    scenes = [{"shown": {name: array[part] for name, array in pairs.items()}, "lengths": out["scores"][part],
               "recon": out["recon"][part], "n": len(epochs)} for part in rows]
    return scenes, [(each["step"], each["val_loss"], each["val_exact_match"]) for each in epochs]


@figures.style()
def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--snapshot-every", type=int, metavar="N", help="steps between two frames (default: 75)")
    figures.add_animation_flags(parser, capsnet, FPS)
    networks.add_flags(parser, capsnet, "animate without training: the network")
    args = parser.parse_args()
    if hasattr(args, "recompute_statistics"):
        raise InputError("--recompute-statistics has no effect on the animation. Leave it out")
    every = 75 if args.snapshot_every is None else args.snapshot_every
    (label, network, config), *others = networks.chosen(capsnet, args)
    if others:
        raise InputError("the animation shows one network. Give one file and one model")
    if config.model != "capsnet":
        raise InputError(f"{'--load' if network else '--model'}: the animation shows a capsnet, not a {config.model}")
    for name in ("snapshot_every", "n_test") if network else ():
        if getattr(args, name, None) is not None:
            raise InputError(f"{flag_name(name)} has no effect with --load. Leave it out")
    if not network and (every < 1 or n_steps(config) / every > MAX_FRAMES):
        raise InputError(f"--snapshot-every {every}: an animation has at most {MAX_FRAMES} frames. Give at least "
                         f"{max(1, -(-n_steps(config) // MAX_FRAMES))}")
    figures.check_animation_flags(args, capsnet, {})
    data = capsnet.load_data(config)
    source, names = network and network.source, data.get("names", ())
    n_epochs = len(network.history["epochs"]) if network else config.n_epochs
    title = (f"Two overlapping {capsnet.data_name(data['source'], source)}, each reconstructed from its own capsule "
             f"({n_epochs} x {config.n_train:,} training pairs)")
    if network:
        shown = networks.make(capsnet, label, network, config, data)
        scenes, points = scenes_of_test_pairs(shown)
        last_step = network.step
    else:
        scenes, points, shown = scenes_of_training(capsnet.fit_to_data(config, data), data, every)
        last_step = n_steps(config)
    frames = draw_frames(scenes, points, last_step, title, note_on(shown), names)
    if not network:
        durations = figures.held_last(len(frames), args.fps, HOLD)
    elif args.fps is FPS:                                  # FPS itself: the user gave none
        durations = SCENE_MS
    else:
        durations = 1000 / args.fps
    figures.write_animation(args.out, frames, durations, Progress(config.quiet).say)


if __name__ == "__main__":
    run_cli(main)
