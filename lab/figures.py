"""What the programs that draw figures and animations share: style, flags, the networks to draw, output files, training
curves."""
import contextlib
import functools
import hashlib
import io
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from . import ROOT
from .files import check_writable, make_outdir, write_atomically
from .messages import InputError, Parser, Progress, fail, flag_name
from .networks import Network, add_flags, chosen, make, names_of

if ROOT in Path(sys.argv[0]).resolve().parents:          # run as a program: no notebook's backend, no user's style
    os.environ["MPLBACKEND"] = "agg"
    os.environ.pop("MATPLOTLIBRC", None)
try:
    import imageio.v3 as imageio
    import matplotlib
except ImportError as error:
    sys.exit(fail(f"{error.name} is missing: {sys.executable} -m pip install matplotlib imageio"))
import numpy as np
from matplotlib import font_manager
from matplotlib.collections import Collection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

STYLE = {"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
         "image.interpolation": "nearest", "legend.frameon": False,
         "text.parse_math": False}                                      # a $ in a class's name is a $
BLUE, ORANGE, RED, GREEN, PINK, GRAY = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#666666"  # Okabe & Ito
WRONG = "#B00020"                  # of wrong predictions: a darker red, which is not taken for orange
COLORS = (BLUE, RED, GREEN, PINK, "black")       # of the networks in one figure
MARKERS = "Dso^x"
WIDTH = 8                          # of a figure, inches
RESULTS = ROOT / "results"


def style():
    """Return a context, or decorator, in which figures have this project's style, whatever the user's settings are"""
    kept = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
    return matplotlib.rc_context(kept | STYLE)


class Drawing(NamedTuple):
    """A figure of trained networks"""
    draw: Callable                 # of a Network, or of a list of them if kind is "all"
    kind: str = "each"             # each: a figure per network; all: one for all networks; first: one, of their data
    applies: Callable = lambda config: True                    # to a network of this Config
    lacks: str = ""                # why it does not apply to other networks
    default: bool = True           # drawn unless --only names others


# ---------------------------------------------------------------- command line

def figure_parser(module, description, drawings, of_results):
    """Return the Parser of a figure script: flags of the experiment, --load, --results, --only and --outdir."""
    parser = Parser(description=description)
    parser.add_argument("--outdir", type=Path, metavar="DIR",
                        help="folder for the PNGs (default: figures/ in the folder of the loaded run, else "
                             f"{default_outdir(module)})")
    parser.add_argument("--only", nargs="+", default=[], choices=list(dict.fromkeys((*drawings, *of_results))),
                        metavar="FIGURE", help="draw only these figures. Of networks: " + ", ".join(
                            name if one.default else f"{name} (only so)" for name, one in drawings.items()) +
                        "; of results: " + ", ".join(of_results))
    parser.add_argument("--results", nargs="?", type=Path, const=RESULTS, metavar="DIR", help="draw the figures of all "
                        "runs in this folder (default: results/), without training")
    add_flags(parser, module, "draw without training: the networks")
    return parser


def default_outdir(module, load=()):
    """Return the folder of one's own figures: of one loaded run that of the run, else one below the current folder"""
    if load and len(load) == 1:
        file = module.weights_file(load[0])
        if file.name == "weights.npz":
            return file.with_name("figures")
    return Path("runs", module.EXPERIMENT, "figures")


def draw(module, args, drawings, of_results, load, kind=Network):
    """Draw the figures that the flags ask for, of networks or of results. Return the networks that were drawn.

    drawings: {name: Drawing}. of_results: {name: function of render.Results}. load(config, progress): the data. kind:
    of the networks, a subclass of Network.
    """
    progress, outdir = Progress(getattr(args, "quiet", False)), args.outdir or default_outdir(module, args.load)
    of_networks = args.load is not None or not args.results
    if not of_networks and (given := module.given_settings(args).keys() - {"quiet"}):
        raise InputError(f"{flag_name(min(given))} has no effect with --results. Leave it out")
    for name in args.only:
        if not (args.results and name in of_results or of_networks and name in drawings):
            which = "results. Give --results" if name in of_results else "networks. Give --load"
            raise InputError(f"--only {name}: is a figure of {which}")
    of_results = {name: of for name, of in of_results.items() if args.results and name in (args.only or of_results)}
    runs = chosen(module, args) if of_networks else []
    planned = plan({name: one for name, one in drawings.items() if name not in of_results and (
        name in args.only or not args.only and one.default)}, runs, progress.say)
    networks, results = [], load_results(args.results) if of_results else None
    for name in [each for each in of_results if runs and each in drawings and (args.only or drawings[each].default)]:
        progress.say(f"{name}: drawn of the results, not of the networks. For theirs leave --results out")
    make_outdir(outdir, [*(name for name, _, _ in planned), *of_results])
    data = load(runs[0][2], progress) if planned else None
    for name, (_, network, config) in zip(names_of(runs), runs if planned else ()):
        networks.append(make(module, name, network, config, data, kind))
    for name, draw_one, which in planned:
        shown = networks[which] if isinstance(which, int) else [networks[k] for k in which]
        fig = draw_one(shown)
        say_data(fig, module, data, shown if isinstance(shown, list) else [shown], draw_one == draw_training_curves)
        write_figure(fig, outdir / f"{name}.png", progress.say)
    for name, draw_one in of_results.items():
        try:
            write_figure(draw_one(results), outdir / f"{name}.png", progress.say)
        except (KeyError, ValueError) as error:
            raise InputError(f"--results {args.results}: {name}: {error!r} is missing or damaged") from None
    return networks


class Words(NamedTuple):
    """What captions call what is classified"""
    noun: str
    classes: str
    capsule: str


DIGITS = Words("digit", "digits", "digit capsule")
IMAGES = Words("image", "classes", "class capsule")


def words_for(module, data):
    """Return the Words for load_data's dict, or for a history: DIGITS if all classes have the names of digits"""
    names = [name.removeprefix("digit ") for name in module.class_names(data)]
    return DIGITS if names and set(names) <= set("0123456789") else IMAGES


def settings_of_training(flags):
    """Return lines on the settings of trainings that are not the defaults. flags: {name: list} of
    each network"""
    trained = {}
    for name, given in flags.items():
        trained.setdefault(" ".join(given), []).append(name)
    lines = []
    for given, names in trained.items():
        whose = f"{', '.join(names)}: trained" if len(trained) > 1 else "Trained"
        if given:
            lines.append(f"{whose} with {given}.")
    return lines


def say_data(fig, module, data, networks, of_training=False):
    """Say in a figure's last lines with which settings its networks were trained that are not the defaults; on which
    data, if it is of_training; else which data and settings they were tested with, if they were trained with others"""
    trained_with = {network.name: network.training_flags for network in networks}
    for line in settings_of_training(trained_with):
        add_note(fig, line)
        fig.set_figheight(fig.get_figheight() + 0.2)
    for source in dict.fromkeys(network.history["source"] for network in networks):
        if of_training:
            add_note(fig, f"Trained on {module.data_name(source)}.")
        elif source != data["source"]:
            add_note(fig, f"Tested on {module.data_name(data['source'], source)}.")
    flags = dict.fromkeys(flag for network in networks for flag in network.test_flags)
    if flags and not of_training:
        add_note(fig, f"Tested with {' '.join(flags)}.")
        fig.set_figheight(fig.get_figheight() + 0.2)                    # a fixed height has no room for three lines


def add_note(fig, words):
    """Add a line to what is written below a figure"""
    fig.supxlabel(f"{fig.get_supxlabel()}\n{words}".strip(), fontsize=8, color=GRAY)


def plan(drawings, runs, say=print):
    """Return which figures to draw of some networks.chosen: (file name, function, index or indices of runs).

    A figure of one network is called NAME, or NAME-NETWORK if there are several such networks. One that applies to none
    of the networks is skipped with a word.
    """
    names, planned = names_of(runs), []
    for name, one in drawings.items() if runs else ():
        which = [k for k, (_, _, config) in enumerate(runs) if one.applies(config)]
        if not which:
            say(f"{name}: skipped, since {one.lacks}")
        elif one.kind == "each":
            planned += [(f"{name}-{names[k]}" if len(which) > 1 else name, one.draw, k) for k in which]
        else:
            planned.append((name, one.draw, which if one.kind == "all" else which[0]))
    return planned


def load_results(folder):
    """Return the render.Results of a folder. Raise InputError if it is missing or damaged."""
    if str(RESULTS) not in sys.path:
        sys.path.append(str(RESULTS))
    import render
    render.check_folder(folder)
    return render.Results(folder)


def forest(results, experiment, rows, metric="accuracy"):
    """Return the forest plot of render.forest"""
    import render
    return render.forest(results, experiment, rows, metric)


# ---------------------------------------------------------------- files

def content_digest(fig):
    """Return a digest of a figure's texts and of the points of its lines, bands and marks, to five digits.

    Computed before the figure is drawn: ticks, and the layout, depend on matplotlib's version.
    """
    shown = [text.get_text() for text in fig.findobj(Text)]
    for points in (*(line.get_xydata() for line in fig.findobj(Line2D)),
                   *(path.vertices for marks in fig.findobj(Collection) for path in marks.get_paths())):
        shown += [f"{x:.5g}" for x in np.asarray(points, float).ravel()]
    return hashlib.sha256("\n".join(shown).encode()).hexdigest()[:16]


def add_fonts(fig, say=print):
    """Let a figure's texts use, for letters that their font lacks, other fonts of this machine; say in one line which
    letters no font has"""
    texts = [text for text in fig.findobj(Text) if text.get_text().strip()]
    letters = {letter for text in texts for letter in text.get_text() if not letter.isspace()}
    families, lacking = fonts_for(frozenset(letters))
    if families:
        for text in texts:
            own = text.get_fontfamily()
            text.set_fontfamily([*own, *(family for family in families if family not in own)])
    if lacking:
        say(f"note: no font here has {' '.join(sorted(lacking)[:8])}, drawn as boxes. Install a font that has these "
            "letters, such as Noto Sans CJK, or give the classes other names in labels.txt")


@functools.cache
def fonts_for(letters):
    """Return the families of fonts that some letters need beside the default font, and the letters that none has"""
    lacking = letters - letters_of(font_manager.findfont(font_manager.FontProperties()))
    families = []
    for font in font_manager.fontManager.ttflist if lacking else ():
        with contextlib.suppress(OSError, RuntimeError):                # a damaged font
            if (found := lacking & letters_of(font.fname)) and "last resort" not in font.name.lower():
                families.append(font.name)
                lacking = lacking - found
    return families, lacking


@functools.cache
def letters_of(path):
    """Return the letters that a font file has"""
    return frozenset(map(chr, font_manager.get_font(path).get_charmap()))


@contextlib.contextmanager
def without_glyph_warnings():
    """Leave out matplotlib's warning for each letter that no font has: add_fonts says it in one line"""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s)Glyph .* missing from")
        yield


RESOLUTIONS = (200, 150, 100)      # dots per inch: the first with which a PNG is small enough, else the last
MAX_BYTES = 300_000                # of a PNG


def write_figure(fig, path, say=print):
    """Write a matplotlib Figure as a PNG, atomically. It holds content_digest's result as the text "Content"."""
    metadata = {"Software": None, "Content": content_digest(fig)}
    add_fonts(fig, say)
    for dpi in RESOLUTIONS:
        drawn = io.BytesIO()
        with without_glyph_warnings():
            fig.savefig(drawn, format="png", dpi=dpi, metadata=metadata)
        if drawn.tell() <= MAX_BYTES:
            break
    write_atomically(path, lambda file: file.write(drawn.getvalue()))
    say(f"wrote {path}  ({path.stat().st_size / 1e3:.0f} kB)")


# ---------------------------------------------------------------- drawing

def class_names(data):
    """Return the name of each class of load_data's dict: those of labels.txt, else the labels themselves"""
    return data.get("names") or list(map(str, range(data.get("n_classes", 10))))


def short_name(name, most):
    """Return the name of a class with so many letters at most: where it is longer, its beginning and an ellipsis"""
    return name if len(name) <= most else f"{name[:most - 1]}\u2026"


def label_classes(ax, names, width, fontsize=7, turned=False):
    """Label the classes along a bar chart's x axis, `width` px long: by their names where these fit, or where they may
    be turned and are ten at most; else by number"""
    step, longest = -(-len(names) // 10), max(map(len, names))
    at, fits = range(0, len(names), step), 5.6 * longest * len(names) <= width          # px of a letter at 7 points
    named = longest == 1 or step == 1 and (fits or turned)
    ax.set_xticks(at, names[::step] if named else at, fontsize=7 if named else fontsize, rotation=90 * (named > fits))


def new_figure(height, title, note=""):
    fig = Figure((WIDTH, height), layout="constrained")
    fig.suptitle(title, fontsize=11)
    fig.supxlabel(note, fontsize=8, color=GRAY)
    return fig


def show_montage(ax, images, columns, rows, gap=3):
    """Show images, (R, C, h, w, 3) in [0, 1], as one picture with labeled columns and rows."""
    R, C, h, w, _ = images.shape
    step_y, step_x = h + gap, w + gap
    picture = np.ones((R, step_y, C, step_x, 3))
    picture[:, :h, :, :w] = images.transpose(0, 2, 1, 3, 4)
    ax.imshow(picture.reshape(R * step_y, C * step_x, 3)[:-gap, :-gap].clip(0, 1))
    ax.set_xticks(np.arange(C) * step_x + w / 2 - 0.5, columns)
    ax.set_yticks(np.arange(R) * step_y + h / 2 - 0.5, rows)
    ax.tick_params(length=0, labelsize=8, labeltop=True, labelbottom=False)
    ax.spines[:].set_visible(False)


def draw_confusion(matrices, names, title, note=""):
    """Return a Figure of confusion matrices, {heading: (J, J) numbers}: a row per true class, a column per predicted
    one; in a cell the percentage of its row, which is blue where correct, orange where wrong, the stronger the more.
    """
    J, shown = len(names), [short_name(name, 14) for name in names]
    (cell, size), columns = (0.3, 8) if J <= 20 else (0.22, 6.5), 2 if J <= 10 and len(matrices) > 1 else 1
    side, rows = max(3, cell * J), -(-len(matrices) // columns)                         # inches
    fig = new_figure(rows * (side + 1.1) + 0.6, title, f"Percent of the images of a true class; {note}")
    fig.set_figwidth(max(WIDTH, side + 2.2))
    axes = fig.subplots(rows, columns, squeeze=False).ravel()
    for ax, (heading, matrix) in zip(axes, matrices.items()):
        counts, right = np.array(matrix, float), np.eye(J, dtype=bool)
        share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        colors = np.where(right[..., None], to_rgb(BLUE), to_rgb(ORANGE))
        ax.imshow(1 - np.sqrt(share)[..., None] * (1 - colors))
        for i, j in np.argwhere(share >= 0.005):
            ax.text(j, i, f"{100 * share[i, j]:.0f}", ha="center", va="center", fontsize=size,
                    color="white" if i == j and share[i, j] > 0.5 else "black")
        ax.set_xticks(range(J), shown, rotation=90 * (max(map(len, shown)) > 12 * side / J), fontsize=size)
        ax.set_yticks(range(J), [f"{name} ({n:,.0f})" for name, n in zip(shown, counts.sum(1))], fontsize=size)
        ax.set(title=heading, xlabel="predicted class", ylabel="true class (images)")
        ax.tick_params(length=0)
        ax.grid(color=GRAY, alpha=0.12, linewidth=0.5)
    return fig


PERTURBATIONS = np.linspace(-0.25, 0.25, 11)             # added to one dimension of a capsule, as in the paper's Fig. 4


def perturbed_reconstructions(experiment, params, config, v, label):
    """Reconstruct a digit from its capsule with each dimension perturbed (Sabour et al. 2017, section 5.1, Fig. 4).

    experiment: the module of the network, multimnist_capsnet or affnist_capsnet. v: the capsule of class `label`, (D,).
    Return images, (D, 11, side, side) or, in color, (D, 11, side, side, channels), one row per dimension, one column
    for each of PERTURBATIONS.
    """
    capsules = v + PERTURBATIONS[:, None, None] * np.eye(len(v), dtype=v.dtype)         # (11, D, D)
    capsules = capsules.swapaxes(0, 1).reshape(-1, 1, len(v)).repeat(config.n_classes, 1)     # (D * 11, J, D)
    more = [config.channels] if hasattr(config, "channels") else []
    pixels, _ = experiment.decoder_forward(params, capsules.astype(v.dtype), np.full((len(capsules), 1), label), *more)
    return pixels.reshape(len(v), len(PERTURBATIONS), *pixels.shape[2:])


def drawn_channels(images):
    """Return images with channels, (..., H, W, C), as they are drawn: three in color, as they are; others one beside
    the other, as gray images (..., H, C * W); four in two rows, (..., 2 * H, 2 * W)"""
    *_, width, channels = images.shape
    if channels == 3:
        return images
    if channels == 4:
        rows = [drawn_channels(images[..., half]) for half in (slice(0, 2), slice(2, 4))]
        return np.concatenate(rows, -2)
    return np.moveaxis(images, -1, -2).reshape(*images.shape[:-2], channels * width)


def show_perturbations(ax, images):
    """Show perturbed_reconstructions, a row per dimension. Those of a decoder that is trained little are faint: they
    are made brighter, and the figure says so"""
    if (brightest := images[:, PERTURBATIONS == 0].max()) < 0.7:
        images = images / brightest
        add_note(ax.figure, f"This decoder's reconstructions are faint, as after little training: {brightest:.2f}, the "
                 "brightest pixel of column 0, is drawn white.")
    if images.ndim == 5:
        images = drawn_channels(images)
    if images.ndim == 4:                                       # gray: as red, green and blue
        images = images[..., None].repeat(3, -1)
    show_montage(ax, images, [f"{step:+.2f}" if step else "0" for step in PERTURBATIONS],
                 [f"dim. {k}" for k in range(1, len(images) + 1)], gap=2)


CURVES = (                         # panels of training_curves: title, keys of a history's epochs
    ("total loss", ("train_loss", "val_loss", "familiar_loss", "novel_loss")),
    ("margin loss", ("train_margin", "val_margin")),
    ("cross-entropy loss", ("train_cross_entropy", "val_cross_entropy")),
    ("reconstruction loss,\nsquared error", ("train_recon", "val_recon")),
    ("accuracy", ("train_accuracy", "val_accuracy", "val_exact_match", "familiar", "novel")))
CURVE_STYLES = {"train": ("training", "-"), "val": ("validation", "--"), "familiar": ("familiar views", "--"),
                "novel": ("novel views", ":")}


def training_curves(networks):
    """Return a Figure of the loss terms and accuracies of some networks in every epoch of their training.

    networks: {label: history}, of any of the experiments, each with at least one epoch; the first five are drawn.
    """
    epochs = {label: history["epochs"] for label, history in list(networks.items())[:len(COLORS)]}
    panels = [(title, keys) for title, keys in CURVES if any(keys[0] in each[0] for each in epochs.values())]
    first = f"the first {len(epochs)} of {len(networks)} networks; " if len(networks) > len(epochs) else ""
    fig = new_figure(3.3, "Training curves" + "".join(f" of {label}" for label in epochs if len(epochs) == 1),
                     f"{first}loss terms are means per sample")
    for ax, (title, keys) in zip(fig.subplots(1, len(panels), squeeze=False)[0], panels):
        for (label, each), color, marker in zip(epochs.items(), COLORS, MARKERS):
            for key in (key for key in keys if key in each[0]):
                words, line = CURVE_STYLES[key.split("_")[0]]
                ax.plot([epoch["epoch"] for epoch in each], [epoch[key] for epoch in each], line, color=color,
                        clip_on=False, marker=marker if len(epochs) > 1 else ".", markersize=4,
                        markevery=-(-len(each) // 30),                  # so that marks do not hide a long curve
                        label=f"{label}, {words}" if len(epochs) > 1 else words)
        ax.set(xlabel="epoch")
        ax.set_title(title, fontsize=10 if len(epochs) == 1 else 8)     # a legend beside takes the panels' width
        last = max(each[-1]["epoch"] for each in epochs.values())
        ax.set_xlim(*((1, last) if last > 1 else (0, 2)))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        ax.set_ylim(**{"top": 1} if title == "accuracy" else {"bottom": 0})
        ax.grid(alpha=0.3)
    if len(epochs) > 1:
        ax.legend(fontsize=8, handlelength=3.5, loc="center left", bbox_to_anchor=(1.05, 0.5))
    else:
        ax.legend(fontsize=8)
    return fig


def draw_training_curves(networks):
    """Draw the training curves of some networks, of any experiment."""
    labels = [network.label if len(networks) == 1 else network.name for network in networks]
    labels = [label if labels.count(label) == 1 else f"{label}, seed {network.trained.seed}"
              for label, network in zip(labels, networks)]
    return training_curves({label: network.history for label, network in zip(labels, networks)})


TRAINING_CURVES = Drawing(draw_training_curves, "all")


# ---------------------------------------------------------------- animations

LEVELS = 32                        # of red, green and blue: few colors, the same in every frame, for a small file


def add_animation_flags(parser, module, fps):
    """Add --fps and --out"""
    parser.add_argument("--fps", type=float, default=fps, metavar="X", help="frames per second (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the GIF to write (default: "
                        f"{default_outdir(module) / module.EXPERIMENT}.gif)")


def check_animation_flags(args, module, bounds):
    """Set the default of --out. Raise InputError if --fps or --out is invalid, or a flag is out of its bounds, {flag:
    (value, low, high)}."""
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise InputError(f"{name} {value}: must be between {low} and {high}")
    if not 0.1 <= args.fps <= 50:
        raise InputError(f"--fps {args.fps:g}: must be between 0.1 and 50 frames per second")
    if args.out is None:
        args.out = default_outdir(module) / f"{module.EXPERIMENT}.gif"
        make_outdir(args.out.parent, [])
    if args.out.suffix.lower() != ".gif":
        raise InputError(f"--out {args.out}: the file is a GIF. Give a name that ends in .gif")
    check_writable(args.out)


@functools.cache
def say_once(text):
    """Print a line, once"""
    Progress().say(text)


def frame_of(canvas):
    """Return what a canvas shows as a frame, (h, w, 3) uint8 of LEVELS values"""
    add_fonts(canvas.figure, say_once)
    with without_glyph_warnings():
        canvas.draw()
    frame = np.asarray(canvas.buffer_rgba())[..., :3]
    return (np.round(frame / 255 * (LEVELS - 1)) * (255 / (LEVELS - 1))).astype(np.uint8)


def held_last(n, fps, hold):
    """Return the durations of n frames, ms, of which the last is held"""
    return [1000 / fps] * (n - 1) + [hold]


def write_animation(path, frames, durations, say=print):
    """Write frames as a GIF that loops, atomically. durations: ms, of each frame or of all; a GIF has steps of 10"""
    write_atomically(path, lambda file: imageio.imwrite(file, frames, extension=".gif", duration=durations, loop=0))
    say(f"wrote {path}  ({len(frames)} frames, {path.stat().st_size / 1e6:.2f} MB)")
