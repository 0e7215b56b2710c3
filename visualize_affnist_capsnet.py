#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4"]
# ///
"""Draws what affnist_capsnet.py finds out: trains its networks, or loads them, and writes one PNG per figure.

    python3 visualize_affnist_capsnet.py --networks shared,gap --seed 1
    python3 visualize_affnist_capsnet.py --load shared.npz gap.npz
    python3 visualize_affnist_capsnet.py --results results/affnist_capsnet

The figures of a single network (redrawn digits, perturbations) show the first one that has capsules and a decoder.
"""
import json
from dataclasses import dataclass
from pathlib import Path

import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
from affnist_capsnet import DIGIT_NAMES, N_CLASSES, SIDES, InputError

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

import probe_affnist_capsnet as probe

matplotlib.use("Agg")
matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
                            "image.interpolation": "nearest", "legend.frameon": False})
GRAY = "#666666"
STYLES = {"shared": ("#0072B2", "-", "o"), "caps": ("#CC79A7", "-", "D"), "vectors": ("#56B4E9", "-.", "P"),
          "vectors-max": ("#F0E442", "-.", "X"),
          "gap": ("#D55E00", "--", "s"), "max": ("#E69F00", "--", "^"), "dense": ("#009E73", ":", "v"),
          "cnn": (GRAY, ":", "x")}                                          # Okabe & Ito, colour-blind safe
WIDTH = 9                          # inches
OUTDIR = Path("viz/affnist_capsnet")
PERTURBED = np.linspace(-0.25, 0.25, 11)                                    # the paper's, Figure 4


@dataclass(frozen=True)
class Network:
    label: str
    config: affnist.Config
    weights: dict


@dataclass(frozen=True)
class Run:
    """What the figures are drawn from"""
    networks: list
    digits: dict                   # load_digits' result
    runner: affnist.Runner
    results: Path | None = None    # a folder of results, where figures are of those

    @property
    def config(self):
        return self.networks[0].config


# ---------------------------------------------------------------- helpers

def new_figure(run, height, title, note=""):
    fig = Figure((WIDTH, height), layout="constrained")
    fig.suptitle(title, fontsize=11)
    fig.supxlabel(f"{DIGIT_NAMES[run.digits['source']]}{note}", fontsize=8, color=GRAY)
    return fig


def show(ax, image, title="", colour="black"):
    ax.imshow(image, cmap="gray_r", vmin=0, vmax=1 if image.dtype.kind == "f" else 255)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="#CCCCCC")
    ax.set_title(title, fontsize=8, pad=3, color=colour)


def one_of_each(labels):
    """Index of the first sample of each class"""
    if missing := set(range(N_CLASSES)) - set(labels.tolist()):
        raise InputError(f"there is no digit {min(missing)} among the {len(labels)} that were drawn; raise --n-test, "
                         "--n-train")
    return [int(np.flatnonzero(labels == digit)[0]) for digit in range(N_CLASSES)]


def some(run, kind, **more):
    """The first chunk of a stream of digits, one of each class"""
    part = next(affnist.stream_digits(run.digits, run.config, kind, **more))
    rows = one_of_each(part["labels"])
    return {name: array[rows] for name, array in part.items()}


# ---------------------------------------------------------------- figures

def test_word(run):
    """MNIST's test digits stay as they are; on the larger canvas they are moved"""
    return "moved" if run.config.task == "affnist" else "test"


def draw_digits(run):
    """Training digits, moved; test digits, moved, moved further, in the middle as one factor after the other and as all
    transform them, and so anywhere"""
    samples = next(affnist.epoch_samples(run.digits, 0, run.config))
    rows = one_of_each(samples["labels"])
    shown = [("training", samples["images"][rows]), (test_word(run), some(run, "test")["images"])]
    if run.config.task == "affnist":
        shown.append(("moved further", some(run, "placed")["images"]))
        for text, change in (("turned by 20°", {"turn": 20.0}), ("sheared by 0.2", {"shear": 0.2}),
                             ("taller, 1.2", {"down": 1.2}), ("narrower, 0.8", {"across": 0.8}),
                             ("affine,\nin the middle", {})):
            shown.append((text, some(run, "centred", factors=affnist.REST | change if change else None)["images"]))
        shown.append(("affine", some(run, "affine")["images"]))
    fig = new_figure(run, 1.05 * len(shown) + 0.6, "What the networks are trained on, and what they are tested on")
    for row, (text, images) in zip(np.atleast_2d(fig.subplots(len(shown), N_CLASSES)), shown):
        for ax, image in zip(row, images):
            show(ax, image)
        row[0].set_ylabel(text, rotation=0, ha="right", va="center")
    return fig


def draw_redrawn(run):
    """Test digits, and what the longest capsule makes of them"""
    network = next(network for network in run.networks if network.config.recon_weight)
    kinds = [("test", test_word(run))] + [("affine", "affine")] * (run.config.task == "affnist")
    fig = new_figure(run, 2.2 * len(kinds) + 0.7, f"Test digits, and each redrawn from its longest capsule "
                     f"({network.label})", "; above the redrawn digit what it was named, orange where wrong")
    axes = fig.subplots(2 * len(kinds), N_CLASSES)
    for k, (kind, word) in enumerate(kinds):
        part = some(run, kind)
        out = run.runner.forward(network.weights, part, network.config, decode="longest")
        for j, (image, label) in enumerate(zip(part["images"], part["labels"])):
            named = int(out["scores"][j].argmax())
            show(axes[2 * k, j], image)
            show(axes[2 * k + 1, j], out["recon"][j, 0], f"{named}", "black" if named == label else STYLES["gap"][0])
        axes[2 * k, 0].set_ylabel(word, rotation=0, ha="right", va="center")
        axes[2 * k + 1, 0].set_ylabel("redrawn", rotation=0, ha="right", va="center")
    return fig


FACTOR_WORDS = {"turn": "turned by, degrees", "shear": "sheared by", "down": "stretched downwards by",
                "across": "stretched across by"}


def draw_factors(run):
    """Which transformation costs what: wrong answers of these networks, or of those of some results, means over their
    seeds; a logarithmic axis, which parts the networks where they are good, and ends at half a digit"""
    found = probed_factors(run.results) if run.results else {
        network.label: (network.config.model, [probe.accuracy_by_factor(network.weights, run.digits, network.config,
                                                                        run.runner)]) for network in run.networks}
    n, tested = max(len(runs) for _, runs in found.values()), min(run.config.n_test or probe.N_PROBED, probe.N_PROBED)
    fig = new_figure(run, 3.8, "Test digits turned, sheared or stretched, one factor at a time",
                     f", the first {tested:,} test digits, in the middle of the canvas; lower is better; shaded: "
                     f"affNIST's range{seeds_said(n)}")
    axes = fig.subplots(1, len(FACTOR_WORDS), sharey=True)
    for ax, (name, text) in zip(axes, FACTOR_WORDS.items()):
        ax.axvspan(*affnist.RANGES[name], color="#EEEEEE", linewidth=0)
        for label, (model, runs) in found.items():
            colour, line, marker = STYLES[model]
            values, accuracy = np.mean([each[name] for each in runs], 0).T
            ax.plot(values, np.maximum(1 - accuracy, 0.5 / tested), color=colour, linestyle=line, marker=marker,
                    markersize=3, label=label)
        ax.set_xlabel(text)
        ax.grid(alpha=0.3)
    axes[0].set(yscale="log", ylabel="named wrong")
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    axes[-1].legend(fontsize=8, loc="upper right")
    return fig


def seeds_said(n):
    return f"; up to {n} seeds" * (n > 1)


def results_in(folder, setting):
    """The results of a setting, "table/name", in the order of their seeds"""
    table, name = setting.split("/")
    path = folder / f"{table}.jsonl"
    try:
        lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
        return sorted((line for line in lines if line["setting"] == name), key=lambda line: line["seed"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"--results {folder}: {path.name} holds a line that is no result ({error!r}); make it anew"
                         ) from None


BEST_MARGIN = {"gap": "gap-8", "max": "max-8"}            # the setting of a network that a wider margin helps


def probed_factors(folder):
    """-> {network: (model, the probe's factors of each seed)} of the table probes"""
    found = {BEST_MARGIN.get(model, model).replace("-8", ", 8 px"): (model, [run["factors"] for run in results_in(
        folder, f"probes/{BEST_MARGIN.get(model, model)}")]) for model in affnist.MODELS}
    found = {model: pair for model, pair in found.items() if pair[1]}
    if not found:
        raise InputError(f"--results {folder}: no network has been probed; make the table probes first")
    return found


STEPS = {                          # of each half of the figure: what is on the axis, whose results
    "added, one after the other": (("ten vectors", "steps/start"), ("+ transformation", "steps/transformation"),
                                   ("+ routing", "steps/routing"), ("+ squash", "steps/squash"),
                                   ("+ margin loss", "steps/margin"), ("+ reconstruction", "free/shared-3")),
    "taken from the whole, one at a time": (("all five", "free/shared-3"), ("- transformation,\nrouting",
                                                                            "free/vectors"),
                                            ("- routing", "free/shared"), ("- squash", "steps/no-squash"),
                                            ("- margin loss", "steps/no-margin"), ("- reconstruction", "steps/margin"))}
KINDS = {"familiar_accuracy": ("moved digits (familiar)", GRAY, "s"),
         "placed_accuracy": ("digits moved further", STYLES["dense"][0], "D"),
         "centred_accuracy": ("affine digits in the middle", STYLES["gap"][0], "^"),
         "affine_accuracy": ("affine digits anywhere", STYLES["shared"][0], "o")}


PAPERS = {words: tuple((label, f"{table}/{name}") for label, name in (
    ("capsules,\n3 iterations", "caps"), ("capsules,\n1 iteration", "caps-1"), ("CNN", "cnn"),
    ("CNN that pools", "dense"))) for words, table in (
        ("after 96,000 moved digits each", "papers-free"), ("stopped at 98% of moved digits", "papers"))}
IN_THE_PAPER = {"caps": 0.79, "cnn": 0.66}                                  # of affNIST's own digits


def draw_panels(run, title, panels, kinds, decimals=1):
    """A panel for each of `panels`, {title: ((label, setting), ...)}: wrong answers of the tests `kinds`, means over
    seeds with their 95% intervals"""
    n = max(len(results_in(run.results, setting)) for rows in panels.values() for _, setting in rows)
    fig = new_figure(run, 4.0, title, f"; lower is better; 95% intervals{seeds_said(n)}")
    for ax, (words, rows) in zip(fig.subplots(1, len(panels), sharey=True), panels.items()):
        labels, settings = zip(*rows)
        for k, setting in enumerate(settings):
            runs = results_in(run.results, setting)
            if not runs:
                raise InputError(f"--results {run.results}: no result of {setting}; make it first")
            for key in kinds:
                of_test, colour, marker = KINDS[key]
                mean, half = affnist.mean_and_interval([1 - each[key] for each in runs])
                ax.errorbar(k, mean, half if np.isfinite(half) else None, color=colour, marker=marker, capsize=3,
                            linestyle="none", label=of_test if k == 0 else None)
        ax.set_xticks(range(len(rows)), labels, rotation=30, ha="right")
        ax.set_title(words)
        ax.grid(axis="y", alpha=0.3)
    fig.axes[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=decimals))
    fig.axes[0].set(ylabel="named wrong", ylim=(0, None))
    return fig


def draw_steps(run):
    """From a CNN to a capsule network in five steps"""
    fig = draw_panels(run, "From a CNN to a capsule network in five steps, on one trunk", STEPS,
                      ("familiar_accuracy", "centred_accuracy", "affine_accuracy"))
    fig.axes[0].legend(fontsize=8, loc="upper left")
    return fig


def draw_papers(run):
    """The paper's gap, and what it is made of"""
    fig = draw_panels(run, "Small networks of the paper's kind", PAPERS, tuple(KINDS), decimals=0)
    for ax, rows in zip(fig.axes, PAPERS.values()):
        names = [setting.rpartition("/")[2] for _, setting in rows]
        ax.scatter(*zip(*((names.index(name), 1 - accuracy) for name, accuracy in IN_THE_PAPER.items())), marker="_",
                   s=400, color="black", label="affine digits, in the paper")
    fig.axes[0].legend(fontsize=8, loc="upper left")
    return fig


def perturbed(network, v, digit):
    """A digit's capsule v (D,) with each dimension moved in turn -> redrawn (D, len(PERTURBED), side, side)"""
    moved = np.repeat(v[None], affnist.D * len(PERTURBED), 0).reshape(affnist.D, len(PERTURBED), affnist.D)
    for d in range(affnist.D):
        moved[d, :, d] += PERTURBED.astype(v.dtype)
    capsules = np.zeros((affnist.D * len(PERTURBED), N_CLASSES, affnist.D), v.dtype)
    capsules[:, digit] = moved.reshape(-1, affnist.D)
    masked, _ = affnist.mask_forward(capsules, np.full((len(capsules), 1), digit))
    pixels, _ = affnist.layers_forward(network.weights, masked, affnist.decoder(network.config))
    side = SIDES[network.config.task]
    return pixels.reshape(affnist.D, len(PERTURBED), side, side)


def draw_perturbations(run):
    """The paper's Figure 4: the dimensions of a digit's capsule moved one at a time, here those three of each digit
    whose movement changes the picture most"""
    network = next(network for network in run.networks if network.config.recon_weight)
    part = some(run, "test")
    out = run.runner.forward(network.weights, part, network.config)
    fig = new_figure(run, 6.4, "What the dimensions of a digit's capsule stand for",
                     f"; {network.label}; each strip: one dimension moved by -0.25 to 0.25, the three that change the "
                     "picture most")
    axes = fig.subplots(N_CLASSES, 3)
    redrawn = [perturbed(network, out["v"][digit, digit], digit) for digit in range(N_CLASSES)]
    # one window for all pictures, so that place can be compared: the part of the canvas in which any has ink
    ink = np.max(redrawn, (0, 1, 2)) > 0.1
    rows, columns = (np.flatnonzero(ink.any(axis)) for axis in (1, 0))
    window = (slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)) if ink.any() else (slice(None),) * 2
    for digit, pictures in enumerate(redrawn):
        most = np.argsort(-np.square(pictures[:, -1] - pictures[:, 0]).sum((1, 2)), kind="stable")[:3]
        for ax, d in zip(axes[digit], most):
            frames = [np.pad(image[window], ((0, 0), (0, 1)), constant_values=0.25) for image in pictures[d]]
            show(ax, np.concatenate(frames, 1)[:, :-1], f"digit {digit}, dimension {d}")
    return fig


def draw_dimensions(run):
    """Which dimension of each digit's capsule follows which factor of synthetic digits best"""
    network = next(network for network in run.networks if network.config.model in affnist.CAPSULES)
    which, single, together = probe.factor_r2(network.weights, network.config, run.runner)
    fig = new_figure(run, 4.6, "How well a digit's capsule knows how the digit is drawn",
                     f"; {network.label}, before synthetic digits, whose factors are known: chosen and fitted on one "
                     "half, measured on the other")
    shown = {"$R^2$ of a linear map of all 16 dimensions": together,
             "squared correlation of the best single dimension": single}
    for ax, (title, values) in zip(fig.subplots(1, 2, sharey=True), shown.items()):
        ax.imshow(np.clip(values, 0, 1), cmap="cividis", vmin=0, vmax=1, aspect="auto")
        for (digit, factor), value in np.ndenumerate(values):
            text = f"{value:.2f}" + f"\ndim {which[digit, factor]}" * (values is single)
            ax.text(factor, digit, text, ha="center", va="center", fontsize=6.5, linespacing=0.95,
                    color="black" if value > 0.55 else "white")
        ax.set_xticks(range(len(probe.KNOWN_FACTORS)), probe.KNOWN_FACTORS)
        ax.set_yticks(range(N_CLASSES), range(N_CLASSES))
        ax.set_title(title)
    fig.axes[0].set_ylabel("digit")
    return fig


FIGURES = {"digits": draw_digits, "redrawn": draw_redrawn, "factors": draw_factors,
           "perturbations": draw_perturbations, "dimensions": draw_dimensions, "steps": draw_steps,
           "papers": draw_papers}
OF_RESULTS, ONLY_OF_RESULTS = ("factors", "steps", "papers"), ("steps", "papers")
NEEDS = {                          # of a figure: what one of the networks must be, and how to say that none is
    "redrawn": (lambda config: config.recon_weight, "none of the networks redraws digits; give one with a decoder"),
    "perturbations": (lambda config: config.recon_weight, "none of the networks redraws digits; give one that does"),
    "dimensions": (lambda config: config.model in affnist.CAPSULES, "none of the networks has capsules; give one"),
    "factors": (lambda config: config.task == "affnist", "needs --task affnist")}


def configs_of(args):
    """The Configs of the networks to draw: of those that are loaded, or of those to train, each with the settings given
    that mean something to it"""
    if args.load:
        return [affnist.look_at(path, args)[1] for path in args.load]
    names, given, configs = args.networks.split(","), affnist.given_of(args), []
    unknown = [name for name in names if name not in affnist.MODELS]
    if unknown or len(set(names)) < len(names):
        fault = f"'{unknown[0]}' is none of {', '.join(affnist.MODELS)}" if unknown else "a network is named twice"
        raise InputError(f"--networks {args.networks}: {fault}")
    for name in names:
        bare = affnist.Config(model=name, task=given.get("task", "affnist"))
        configs.append(affnist.Config(model=name, **{f.name: given[f.name] for f in affnist.options(affnist.Config)
                                                     if f.name in given and affnist.means_something(f, bare)}))
    affnist.check_given(given, configs)
    return configs


def networks_of(args, configs, wanted, say):
    """The networks, loaded or trained; without weights where none are wanted"""
    if args.load:
        found = [affnist.load_network(path) for path in args.load]
        if len({(each.config.task, each.source) for each in found}) > 1:
            raise InputError("--load: these networks are of two tasks, or of two kinds of digits; give those of one")
        models = [each.model for each in configs]
        labels = [model if models.count(model) == 1 else Path(path).stem for model, path in zip(models, args.load)]
        return [Network(*each, file.weights) for *each, file in zip(labels, configs, found)]
    networks = []
    for own in configs:
        if wanted != ["digits"]:
            say(f"training {own.model}")
        networks.append(Network(own.model, own, {} if wanted == ["digits"] else affnist.train(own)[0]))
    return networks


def draw_results(args, quiet):
    """The figures of a folder of results"""
    useless = ["load"] * bool(args.load) + [name for name in affnist.given_of(args) if name != "quiet"]
    if useless:
        raise InputError(f"{affnist.flag_of(useless[0])}: means nothing to --results; leave it out")
    if args.only and args.only not in OF_RESULTS:
        raise InputError(f"--only {args.only}: is not drawn from results; leave out --results")
    if not args.results.is_dir():
        raise InputError(f"--results {args.results}: no such folder; give the one that holds the results")
    wanted = [name for name in OF_RESULTS if args.only in ("", name)]
    source = next((run["source"] for run in results_in(args.results, "free/shared")), "mnist")
    run = Run([Network("", affnist.Config(), {})], {"source": source}, None, args.results)
    figures = [(name, FIGURES[name](run)) for name in wanted]                           # all, before one is written
    affnist.make_outdir(args.outdir, wanted)
    for name, fig in figures:
        affnist.write_figure(fig, args.outdir / f"{name}.png", affnist.Progress(quiet).say)


def main():
    parser = affnist.Parser(description=__doc__)
    parser.add_argument(
        "--outdir", type=Path, default=OUTDIR, metavar="DIR", help=f"folder for the PNGs (default {OUTDIR})")
    parser.add_argument(
        "--only", default="", choices=tuple(FIGURES), help="draw this figure alone, and train only what it needs")
    parser.add_argument("--load", nargs="*", metavar="FILE", help="draw the networks in these files, checkpoints or "
                        f"weights; without FILE that of weights/{affnist.WEIGHTS.name}")
    parser.add_argument("--networks", default="shared,gap", metavar="NAMES", help="networks to train, where none are "
                        "loaded, separated by commas (default shared,gap)")
    parser.add_argument("--results", type=Path, metavar="DIR", help="draw the means of the runs in this folder, such "
                        "as results/affnist_capsnet: the figures factors, steps and papers, and train nothing")
    affnist.add_config_flags(parser)
    args = parser.parse_args()
    args.load = [str(affnist.WEIGHTS)] if args.load == [] else args.load or []
    if args.results:
        return draw_results(args, hasattr(args, "quiet"))
    for name in "model", "checkpoint", "resume", "out_json", "affnist_dir", "tests_on":
        if hasattr(args, name):
            raise InputError(f"{affnist.flag_of(name)}: means nothing here; "
                             + ("give --networks" if name == "model" else "leave it out"))
    configs = configs_of(args)
    for each in configs:
        affnist.check_config(each)
    lacking = {name: words for name, (holds, words) in NEEDS.items() if not any(map(holds, configs))} | dict.fromkeys(
        ONLY_OF_RESULTS, "is drawn from results; give --results")
    if args.only in lacking:
        raise InputError(f"--only {args.only}: {lacking[args.only]}")
    wanted = [name for name in FIGURES if args.only in ("", name) and name not in lacking]
    affnist.make_outdir(args.outdir, wanted)
    progress = affnist.Progress(configs[0].quiet)
    networks = networks_of(args, configs, wanted, progress.say)
    with affnist.Runner(configs[0].threads, progress=progress) as runner:
        run = Run(networks, affnist.load_digits(configs[0], progress.say), runner)
        for name in wanted:
            affnist.write_figure(FIGURES[name](run), args.outdir / f"{name}.png", progress.say)


if __name__ == "__main__":
    affnist.run_cli(main)
