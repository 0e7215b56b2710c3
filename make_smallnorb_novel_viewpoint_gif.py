#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Animate the training of the default command's networks on toys (or shapes, or smallNORB) as a GIF, then their
predictions for an object that rotates through all azimuths. With --load, the rotation alone, of trained networks.

    python3 make_smallnorb_novel_viewpoint_gif.py --n-test 600      # train, then animate: 6 minutes
    python3 make_smallnorb_novel_viewpoint_gif.py --data shapes     # half a minute
    python3 make_smallnorb_novel_viewpoint_gif.py --load            # the pretrained networks: half a minute
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
import smallnorb_novel_viewpoint as norb  # before numpy: it sets the number of BLAS threads
from lab import figures, networks
from lab.figures import COLORS, GRAY, MARKERS
from lab.messages import InputError, Parser, Progress, flag_name, run_cli
from smallnorb_novel_viewpoint import N_CLASSES, NORB_NAMES, NORB_SIDE, SHAPE_NAMES, data_name

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from visualize_smallnorb_novel_viewpoint import images_of, other_view, views_of

FPS, HOLD, MAX_FRAMES = 5, 2000, 200     # HOLD: ms of each part's last frame; all frames are in memory, 1 MB each
WIDTH, HEIGHT = 800, 390           # of the animation, px
ROTATING = {"shapes": 1}           # the class that rotates, L; of toys and smallNORB 2, plane
ELEVATION = 50                     # degrees
MAX_NETWORKS = 4


def record_training(config, snapshots, data):
    """Train a network and return its history, `snapshots` entries (or one for each step) of ((fraction of the training,
    accuracy on familiar views, accuracy on novel views), weights), of the untrained network first."""
    n_steps, history = config.n_epochs * -(-len(data["train"]["labels"]) // config.batch_size), []
    recorded = {round(k * n_steps / (snapshots - 1)) for k in range(snapshots)}

    def record(state, terms=None):
        if state["step"] in recorded:
            weights = {name: a.copy() for name, a in norb.weights_of(state).items()}
            with norb.worker_threads(config) as workers:
                test = norb.evaluate_test(weights, data, config, workers)
            history.append(((state["step"] / n_steps, test["familiar"], test["novel"]), weights))
    record(norb.initial_state(config))
    networks.train(norb, config, data, each_step=record)
    return history


def history_of(network):
    """Return the history of a loaded network as record_training does, an entry per epoch, with the final weights."""
    return [((each["epoch"] / network.config.n_epochs, each["familiar"], each["novel"]), network.weights)
            for each in network.history["epochs"]]


def render_view(label, azimuth, light, config):
    """Render one test object of a class; light: one of the six lightings of toys and smallNORB.

    Return the network input, (1, 32, 32, C), the image to display, (h, w) in [0, 1], its azimuth: smallNORB has one
    every 20 degrees, so the nearest; and words on another toy or lighting, where the data lack these.
    """
    other = ""
    if config.data == "toys":                                            # from any azimuth, not from stored ones alone
        toy = norb.make_toy(label, norb.TOY_SPLITS["test"][0], config.toy_seed)
        views = norb.downsample(norb.draw_view(toy, ELEVATION, azimuth, 2 * NORB_SIDE))
        images = views[light % len(norb.LIGHTINGS)][None]
    else:
        found = views_of(config, label, [azimuth], [ELEVATION], light % len(norb.LIGHTINGS))
        images, azimuth = found["images"], float(found["azimuths"][0])
        other = other_view(found, light % len(norb.LIGHTINGS))
    if config.data == "shapes":
        return images, images[0, ..., 0], azimuth, other
    return norb.crop_batch(images, [0]), images[0, ..., 0] / 255, azimuth, other


def note_on(names, trained):
    """Return a line on the settings of the training that are not the defaults. trained: Configs"""
    flags = {}
    for name, config in zip(names, trained):
        flags[name] = networks.training_flags(config, ["seed", "n_test"], ["model", "data"])
    return " ".join(figures.settings_of_training(flags))


def draw_frames(names, configs, histories, n_sweep, with_training, sources=(), note=""):
    """Return the frames, a list of (h, w, 3) uint8, and how many of them show the training.

    sources: of the data that loaded networks were trained on. note: what is written below. The
    training of all networks comes first, then an object that rotates through n_sweep azimuths. The
    figure is built once; frames only change its data.
    """
    rotating = ROTATING.get(configs[0].data, 2)
    names = [name if len(name) < 20 else name[:16] + "..." for name in names]
    first, classes, noun = configs[0], NORB_NAMES, "toy"
    if first.data == "shapes":
        classes, noun = SHAPE_NAMES, "shape"
    fig = Figure((WIDTH / 100, HEIGHT / 100), dpi=100)
    canvas = FigureCanvasAgg(fig)
    title = fig.suptitle("", fontsize=12, y=0.985)
    fig.text(0.5, 3 / HEIGHT, note, ha="center", color=GRAY,
             fontsize=min(8, 1150 / max(1, len(note))))
    curves = fig.add_axes((0.07, 0.14, 0.36, 0.63))
    curves.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="fraction of training", ylabel="accuracy")
    curves.set_title("solid: familiar azimuths\ndashed: novel azimuths", fontsize=10)
    curves.grid(alpha=0.3)
    lines = [[curves.plot([], [], style, color=color, marker=marker, markersize=4, clip_on=False,
                          label=name if style == "-" else None)[0] for style in ("-", "--")]
             for name, color, marker in zip(names, COLORS, MARKERS)]
    curves.legend(fontsize=10, loc="lower right")
    ax = fig.add_axes((0.475, 0.36, 0.2, 0.41))
    picture = ax.imshow(render_view(0, 0, 0, first)[1], cmap="gray", vmin=0, vmax=1)
    ax.set(xticks=[], yticks=[])
    caption = ax.set_title("", fontsize=10)
    texts = [fig.text(0.58, 0.28 - 0.065 * k, "", ha="center", va="center", color=color, fontsize=10)
             for k, color in zip(range(len(names)), COLORS)]
    dial = fig.add_axes((0.735, 0.13, 0.22, 0.6), projection="polar")
    ranges = norb.angle_ranges(first)
    low, high = ranges[0]
    dial.bar(np.deg2rad((low + high) / 2), 1, np.deg2rad(high - low), color="black", alpha=0.15)
    dial.set(yticks=[], ylim=(0, 1))
    dial.set_xticks(np.deg2rad([0, 90, 180, 270]), ["0°", "90°", "180°", "270°"], fontsize=10)
    order = "\nfirst network: outer ring" if len(names) > 1 else ""
    dial.set_title(f"azimuth (gray: familiar)\ndot: correct, cross: wrong{order}", fontsize=10)
    hand, = dial.plot([0, 0], [0, 1], color=GRAY, linewidth=1.5)
    frames, rings = [], np.linspace(0.88, 0.4, len(names))

    def add_frame(label, azimuth, light, all_params, marked=False):
        images, display, azimuth, other = render_view(label, azimuth, light, first)
        picture.set_data(display)
        familiar, novel = (norb.in_range(azimuth, bounds) for bounds in ranges)
        kind = "familiar azimuth" if familiar else "novel azimuth" if novel else "neither familiar nor novel"
        caption.set_text(f"{classes[label]}{other and f' ({other})'} at {azimuth:.0f}°,\n{kind}")
        hand.set_xdata([np.deg2rad(azimuth)] * 2)
        for name, text, config, params, ring in zip(names, texts, configs, all_params, rings):
            predicted = int(norb.forward(params, images, config)[0]["scores"][0].argmax())
            correct = predicted == label
            if marked:
                dial.plot(np.deg2rad(azimuth), ring, "o" if correct else "x", color=text.get_color(),
                          markersize=3.5 if correct else 6)
            text.set_text(f"{name}: {classes[predicted]}{'' if correct else ' ✗'}")
            text.set_fontweight("normal" if correct else "bold")
        frames.append(figures.frame_of(canvas))

    def show_curves(k):
        for history, (solid, dashed) in zip(histories, lines):
            fraction, familiar, novel = np.array([point for point, _ in history[:k]]).T
            solid.set_data(fraction, familiar)
            dashed.set_data(fraction, novel)
    n, (low, high) = min(map(len, histories)) if with_training else 0, ranges[1]
    title.set_text(f"During training (seed {first.seed}): test {noun}s at novel azimuths")
    for k in range(n):
        show_curves(k + 1)
        azimuth = (low + (high - low) * k / max(1, n - 1)) % 360
        add_frame(k % N_CLASSES, azimuth, k, [history[k][1] for history in histories])
    show_curves(max(map(len, histories)))
    others = "".join(f"\n{data_name(first.data, source)}" for source in dict.fromkeys(sources) if source != first.data)
    title.set_text(f"After training: predictions for a test {noun} ({classes[rotating]}) at all azimuths{others}")
    for k in range(n_sweep):
        add_frame(rotating, 360.0 * k / n_sweep, 6 * k // n_sweep, [history[-1][1] for history in histories], True)
    return frames, n


@figures.style()
def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--snapshots", type=int, metavar="N", help="frames of the training (default: 16)")
    parser.add_argument("--sweep-frames", type=int, default=36, metavar="N",
                        help="frames of the rotation (default: 36)")
    figures.add_animation_flags(parser, norb, FPS)
    networks.add_flags(parser, norb, "animate without training: the networks")
    args = parser.parse_args()
    loaded, snapshots = args.load is not None, 16 if args.snapshots is None else args.snapshots
    figures.check_animation_flags(args, norb, {"--snapshots": (snapshots, 2, MAX_FRAMES),
                                               "--sweep-frames": (args.sweep_frames, 2, MAX_FRAMES)})
    for name in ("snapshots", "n_test") if loaded else ():
        if getattr(args, name, None) is not None:
            raise InputError(f"{flag_name(name)} has no effect with --load, which neither trains nor tests. Leave it "
                             "out")
    runs = networks.chosen(norb, args)
    configs = [config for *_, config in runs]
    if not 1 <= len(runs) <= MAX_NETWORKS:
        raise InputError(f"the animation shows 1 to {MAX_NETWORKS} trained networks, not {len(runs)}. Give others by "
                         "--model or --load")
    if configs[0].split != "azimuth":
        raise InputError(f"the animation shows novel azimuths, not --split {configs[0].split}. Give other networks, or "
                         "leave --split out")
    if len({images_of(config) for config in configs}) > 1:
        raise InputError("--load: these networks have other familiar or novel images. Animate them one at a time")
    data = None if loaded else norb.load_data(configs[0])
    histories = [history_of(network) if loaded else record_training(config, snapshots, data)
                 for _, network, config in runs]
    names = networks.names_of(runs)
    trained = [network.config if loaded else config for _, network, config in runs]
    sources = [network.source for _, network, _ in runs if loaded]
    frames, n_training = draw_frames(names, configs, histories, args.sweep_frames, not loaded,
                                     sources, note_on(names, trained))
    durations = [1000 / args.fps] * len(frames)
    durations[n_training - 1] = durations[-1] = HOLD
    figures.write_animation(args.out, frames, durations, Progress(configs[0].quiet).say)


if __name__ == "__main__":
    run_cli(main)
