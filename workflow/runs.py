"""Every run behind the tables: experiment, table, setting, flags, seeds and approximate minutes on one core. A result
that is not a training run of an experiment has its whole command as flags. Also the commands that draw figures and
animations.

The Snakefile plans from this list; results/render.py draws from what the runs wrote.
"""
import hashlib
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
import lab


class Result(NamedTuple):
    """One result: one network, one seed"""
    experiment: str
    table: str
    setting: str
    seed: int
    flags: str                     # of a training; of a measurement its whole command
    minutes: float
    after: tuple = ()              # names of the runs whose folders replace, in turn, {run} in its command
    is_training: bool = True       # or a measurement: on a trained network, or of a baseline that is not trained

    @property
    def name(self):
        return f"{self.experiment}/{self.table}/{self.setting}-{self.seed}"

    @property
    def golden_key(self):
        """Return the key of its golden values: its flags without sizes and draws. A result with a command of its own
        has the key of the run that made the weights it loads, else that of no flags."""
        if self.after:
            setting = self.after[0].rpartition("-")[0]
            return next(run.golden_key for run in RESULTS if run.name.rpartition("-")[0] == setting)
        if not self.is_training:
            return next((run.golden_key for path, run in WEIGHTS.items() if path in self.flags), "")
        words = shlex.split(self.flags)
        flags = [k for k, word in enumerate(words) if word.startswith("--")] + [len(words)]
        given = {words[start]: words[start + 1:end] for start, end in zip(flags, flags[1:])}
        given |= {flag: [value] for flag, value in SHRUNK.items() if flag in given}
        return " ".join(" ".join([flag, *given[flag]]) for flag in sorted(given) if flag not in SIZES)


SIZES = ("--n-epochs", "--n-train", "--n-val", "--n-test", "--batch-size", "--digits",
         "--data-dir", "--toy-seed", "--eval-split")
SHRUNK = {"--stop-at": "0.02", "--n-per-class": "4", "--data": "shapes"}                       # in every golden key
MULTI, NORB, AFF = lab.FIRST
EXPERIMENTS = lab.experiments()
QUICK = "--n-epochs 12 --n-train 6000"
RESIDUAL = "--preset residual --warp 0.3 --batch-size 64"
LONG = "--n-epochs 20 --n-train 60000 --n-val 5000"
PAPER_PROTOCOL = "--min-iou 0 --merge add"
CNN_GAP_HEAD = "--model cnn --cnn-head gap"
HEADS = {                          # heads on one backbone, of one size, and each routing head with one iteration
    **{model: f"--model {model}" for model in ("cnn-gap", "capsnet-shared", "capsnet", "matrix-head")},
    **{f"{model}-iters-1": f"--model {model} --routing-iters 1"
       for model in ("capsnet-shared", "capsnet", "matrix-head")}}
ABLATIONS = {                      # of capsnet-shared, and what a CNN gains from one of its parts
    "capsnet-shared-iters-1": "--model capsnet-shared --routing-iters 1",
    "capsnet-shared-no-coordinates": "--model capsnet-shared --no-coordinates",
    "capsnet-shared-cross-entropy": "--model capsnet-shared --loss cross-entropy", "capsnet": "--model capsnet",
    "cnn-gap-coordinates": "--model cnn-gap --coordinates", "cnn-gap-margin": "--model cnn-gap --loss margin"}
SPLITS, TOY_SEEDS, SMALL_HEADS = ("azimuth", "elevation"), (2, 3, 4), "--preset small"
MATRIX, SMALL_CNN = "--model matrix-capsnet", "--preset small --lr 2e-3 --n-epochs 16"
PAPER = {                          # its two networks, and that CNN with batch normalization; minutes
    "matrix-capsnet": (f"{MATRIX} --n-epochs 10", 4), "cnn": (f"--model cnn {SMALL_CNN}", 1),
    "cnn-bn": (f"--model cnn-bn {SMALL_CNN}", 1)}
CNN_CLOSER_TO_PAPER = {            # that CNN with the paper's dropout, and also at the paper's size; minutes
    "cnn-dropout": (f"--model cnn {SMALL_CNN} --dropout 0.5", 1),
    "cnn-paper": ("--model cnn --preset paper --lr 2e-3 --n-epochs 16", 5)}
STANDARD = {                       # the paper's ablations on the standard task
    **{f"matrix-capsnet-iters-{n}": f"--routing-iters {n}" for n in (1, 2, 3)},
    "matrix-capsnet-spread": "--loss spread"}
AFF_NETWORKS = {
    "capsnet-shared": "", "capsnet-iters-1": "--model capsnet --routing-iters 1",
    **{model: f"--model {model}" for model in ("cnn-gap", "cnn-dense", "capsnet", "vector-gap", "vector-gmp",
                                               "cnn-gmp")}}
PADDINGS = 0, 4, 8                 # px of background around the canvas, tried on affine validation digits
BARE = "--squash none --loss cross-entropy --recon-weight 0"
COMPONENTS = {                     # from a CNN of ten vectors to a capsule network, one component after another
    "start": f"--model vector-gap --padding 4 {BARE}", "transformation": BARE, "routing": f"--routing-iters 3 {BARE}",
    "squash": "--routing-iters 3 --loss cross-entropy --recon-weight 0", "margin": "--routing-iters 3 --recon-weight 0",
    "reconstruction": "--routing-iters 3", "squash-relu": "--squash relu", "squash-last": "--squash last"}
PAPERS = {model: f"--preset small --model {model}"       # narrow, no normalization, no padding, Adam
          for model in ("capsnet", "cnn", "cnn-dense")}
MATCHED_ANYWHERE = "--stop-at 0.95 --lr-schedule constant --n-train 6000 --n-epochs 40"
MORE_TOY_SEEDS = range(5, 11)      # of six more sets of toys
BACKGROUND_RUNS = {                # other losses, splits and toys for background activity
    "spread": "--split azimuth --loss spread", "elevation": "--split elevation", "toys2": "--split azimuth --toy-seed "
                                                                                          "2"}
PAPER_SIZE = "matrix-capsnet-paper"
SEEDS = range(5)                   # of networks that are trained again to be measured
TRAINED_AGAIN = (                  # experiment, setting, flags, minutes: weights of the first time were not kept
    *((AFF, name, AFF_NETWORKS[name], 4)
      for name in ("capsnet", "capsnet-shared", "vector-gap", "cnn-gap")),
    *((AFF, f"small-{name}", f"{PAPERS[name]} --n-epochs 8", 5) for name in ("capsnet", "cnn-dense")),
    *((NORB, name, f"{PAPER[name][0]} --split azimuth", PAPER[name][1])
      for name in ("matrix-capsnet", "cnn")),
    (NORB, "cnn-gap", "--model cnn-gap --split azimuth", 2))
LONG_RUNS = (                      # table, setting, flags, seeds
    ("main", "paper-protocol-long", "", range(4)),
    ("control", "cnn-paper-protocol-long", CNN_GAP_HEAD, range(4)),
    ("control", "paper-protocol-long-iters-1", "--routing-iters 1", range(4)),
    ("control", "cnn-paper-protocol-long-tuned", f"{CNN_GAP_HEAD} --lr 0.006 --muon 0.012", range(1, 4)))
COLORED = "runs/colored-digits"    # MNIST's digits in color, made by bench/colored_digits.py
QUICK_COLORED = "runs/quick/colored-digits"
GAP = "--train-azimuths 0:60"      # for accuracy by distance to the nearest training azimuth
GAP_SHAPES = f"{GAP} --test-azimuths 70:350 --n-test-views 29"
SHAPES_MODELS = "matrix-capsnet", "cnn", "cnn-gap"
WIDE_CNN = "--preset small --model cnn --conv1-channels 64"            # convolutions as wide as the capsule network's
MATCHED = "--stop-at 0.98 --lr-schedule constant --n-train 6000 --n-epochs 40"        # all four reach it


RUNS = (                           # experiment, table, setting, flags, seeds, minutes of one seed on one core
    *((AFF, "padding", f"{name}-{px}px", f"{AFF_NETWORKS[name]} --padding {px} --eval-split val", range(1), 4)
      for name in ("capsnet-shared", "cnn-gap", "cnn-gmp", "vector-gap", "vector-gmp", "capsnet", "cnn-dense")
      for px in PADDINGS),
    *((AFF, table, name, f"{flags} {length}", range(n), 5)
      for table, length, n in (("equal-training", "--n-epochs 8", 5), ("matched-accuracy", MATCHED, 8),
                               ("any-position", "--train-shift full --n-epochs 8", 5))
      for name, flags in PAPERS.items()),
    *((AFF, "backbone", name, AFF_NETWORKS[name], range(7), 4) for name in ("capsnet-shared", "vector-gap", "cnn-gap")),
    *((AFF, "backbone", name, AFF_NETWORKS[name], range(5), 4)
      for name in ("cnn-gmp", "vector-gmp", "cnn-dense", "capsnet-iters-1", "capsnet")),
    *((MULTI, "main", name, f"{flags} {QUICK}", range(n), 3) for name, flags, n in (
        ("deep", "", 10), ("classic", "--preset classic", 5), ("adam", "--muon 0", 5))),
    *((MULTI, "control", name, f"{flags} {QUICK}", range(n), 3) for name, flags, n in (
        ("iters-1", "--routing-iters 1", 10), ("cnn", "--model cnn", 10), ("cnn-vectors", "--model cnn-vectors", 10),
        ("no-recon", "--recon-weight 0", 5), ("cnn-head-gap", CNN_GAP_HEAD, 10),
        ("cnn-head-gap-tuned", f"{CNN_GAP_HEAD} --lr 0.03 --muon 0.01", 10),
        ("cnn-tuned", "--model cnn --lr 0.003 --muon 0.014 --conv1-channels 32", 10),
        ("iters-1-no-recon", "--routing-iters 1 --recon-weight 0", 10),
        ("cnn-gap-decoder", "--model cnn-vectors --cnn-head gap --lr 0.03 --muon 0.01 --recon-weight 0.003", 10))),
    *((MULTI, "half-digit", name, f"--preset half-digit {flags} {QUICK}", range(n), minutes)
      for name, flags, n, minutes in (
          ("iters-3", "--routing-iters 3", 10, 3), ("iters-1", "--routing-iters 1", 10, 3),
          ("cnn", "--model cnn", 5, 2), ("cnn-head-gap", CNN_GAP_HEAD, 5, 2))),
    *((NORB, f"wide-{split}", model, f"--model {model} --split {split}", range(10), 2)
      for split in SPLITS for model in ("capsnet-shared", "cnn-gap")),
    *((NORB, f"paper-{split}", name, f"{flags} --split {split}", range(10), minutes)
      for split in SPLITS for name, (flags, minutes) in PAPER.items()),
    *((NORB, f"toys{toy_seed}-{split}", name, f"{flags} --toy-seed {toy_seed} --split {split}", range(3), 2)
      for toy_seed in TOY_SEEDS for split in SPLITS for name, flags in (
          ("capsnet-shared", "--model capsnet-shared"), ("cnn-gap", "--model cnn-gap"),
          *((name, PAPER[name][0]) for name in ("matrix-capsnet", "cnn")))),
    *((NORB, f"heads-{split}", head, f"{flags} {SMALL_HEADS} --split {split}", range(5), 1)
      for split in SPLITS for head, flags in HEADS.items()
      if split == "azimuth" or head not in ("capsnet", "capsnet-iters-1")),
    *((AFF, "components", name, flags, range(3), 4) for name, flags in COMPONENTS.items()),
    *((AFF, "few-10", name, f"{AFF_NETWORKS[name]} --n-per-class 10", range(n), 4)
      for name, n in (("capsnet-shared", 15), ("cnn-gap", 5), ("cnn-gmp", 5), ("vector-gap", 15))),
    *((MULTI, table, name, f"{RESIDUAL} {flags} {LONG}", range(2), 105) for table, name, flags in (
        ("main", "residual", ""), ("main", "paper-protocol", PAPER_PROTOCOL),
        ("control", "cnn-paper-protocol", f"{CNN_GAP_HEAD} {PAPER_PROTOCOL}"),
        ("control", "residual-iters-1", "--routing-iters 1"))),
    *((AFF, "long", name, f"{AFF_NETWORKS[name]} --n-epochs 10 --n-train 24000", range(1), 18)
      for name in ("capsnet-shared", "cnn-gap")),
    (AFF, "mnist", "capsnet-shared", "--task mnist --n-train 55000 --n-epochs 10", range(3), 11),
    *((AFF, "no-padding", name, f"{AFF_NETWORKS[name]} --padding 0", range(3), 3)
      for name in ("capsnet-shared", "cnn-gap")),
    (AFF, "matched-accuracy", "cnn-64", f"{WIDE_CNN} {MATCHED}", range(8), 48),
    *((NORB, "ablations", name, flags, range(5), 2) for name, flags in ABLATIONS.items()),
    *((NORB, "standard", setting, f"{MATRIX} {flags} --split instance --n-epochs 2", range(3), 2)
      for setting, flags in STANDARD.items()),
    *((AFF, "any-position-matched", name, f"{PAPERS[name]} --train-shift full {MATCHED_ANYWHERE}", range(5), 12)
      for name in ("capsnet", "cnn")),
    *((MULTI, "half-digit-long", f"iters-{n}", f"--preset half-digit --routing-iters {n} --n-epochs 12 --n-train 30000",
       range(5), 15) for n in (3, 1)),
    *((NORB, f"toys{toy_seed}-azimuth", model, f"--model {model} --toy-seed {toy_seed} --split azimuth", range(3), 2)
      for toy_seed in MORE_TOY_SEEDS for model in ("capsnet-shared", "cnn-gap")),
    *((NORB, "em-iterations", name, flags, range(5), minutes) for name, flags, minutes in (
        ("matrix-capsnet", f"{PAPER['matrix-capsnet'][0]} --split azimuth", 4),
        ("matrix-head", f"{HEADS['matrix-head']} {SMALL_HEADS} --split azimuth", 1))),
    (MULTI, "control", "vector-dense", f"--model vector-dense {QUICK}", range(5), 3),
    (MULTI, "control", "classic-iters-1", f"--preset classic --routing-iters 1 {QUICK}", range(5), 6),
    (NORB, "paper-azimuth", "matrix-capsnet-iters-1", f"{PAPER['matrix-capsnet'][0]} --routing-iters 1 --split azimuth",
     range(5), 4),
    (AFF, "mnist", "capsnet-paper", "--task mnist --model capsnet --preset paper --n-train 55000 --n-epochs 15",
     range(3), 300),
    *((MULTI, table, name, f"{RESIDUAL} {flags} --n-epochs 32 {PAPER_PROTOCOL} --n-train 60000 --n-val 5000", seeds,
       180) for table, name, flags, seeds in LONG_RUNS),
    *((NORB, "shapes", model, f"--data shapes --model {model}", range(10), 0.3) for model in SHAPES_MODELS),
    *((NORB, "gap-shapes", model, f"--data shapes --model {model} {GAP_SHAPES}", range(10), 0.3)
      for model in SHAPES_MODELS),
    *((NORB, "pretrained", name, f"{PAPER[name][0]} --split azimuth", range(1), 1) for name in ("cnn", "cnn-bn")),
    *((NORB, "gap-toys", name, f"{flags} {GAP} --test-azimuths 80:340", range(5), minutes)
      for name, (flags, minutes) in (PAPER | {"cnn-gap": ("--model cnn-gap", 2)}).items()),
    *((NORB, "background-runs", name, f"{PAPER['matrix-capsnet'][0]} {flags}", range(3), 4)
      for name, flags in BACKGROUND_RUNS.items()),
    *((NORB, f"paper-{split}", name, f"{flags} --split {split}", range(10), minutes)
      for name, (flags, minutes) in CNN_CLOSER_TO_PAPER.items() for split in SPLITS),
    *((NORB, f"paper-{split}", PAPER_SIZE, f"{MATRIX} --preset paper --n-epochs 10 --split {split}", range(10), 40)
      for split in SPLITS),
    *((NORB, "paper-azimuth", f"{PAPER_SIZE}-{name}", f"{MATRIX} --preset paper --n-epochs 10 {flags} --split azimuth",
       range(n), minutes) for name, flags, n, minutes in (
           ("iters-1", "--routing-iters 1", 5, 30), ("iters-3", "--routing-iters 3", 5, 55),
           ("spread", "--loss spread", 3, 40))),
    *((AFF, "colored", model, f"--model {model} --task images --data-dir {COLORED} --n-train 6000 --n-epochs 4 --n-val "
       "1000", range(3), 2) for model in ("capsnet-shared", "capsnet", "cnn-gap", "cnn-dense")),
    *((experiment, "trained-again", name, flags, SEEDS, minutes)
      for experiment, name, flags, minutes in TRAINED_AGAIN),
    *((MULTI, "iterations", name, f"{flags} {QUICK}", SEEDS, minutes) for name, flags, minutes in (
        ("iters-3", "", 3), ("iters-5", "--routing-iters 5", 4), ("iters-10", "--routing-iters 10", 7))))
TOY = {MULTI: {"--n-epochs": 1, "--n-train": 96, "--n-val": 32, "--n-test": 64, "--digits": "auto"},
       NORB: {"--n-epochs": 1, "--n-train-toys": 1, "--n-test": 60},
       AFF: {"--n-epochs": 1, "--n-train": 96, "--n-val": 32, "--n-test": 32, "--digits": "auto"}}
TOY_SHAPES = {"--n-epochs": 1, "--n-per-combo": 1}
DRAW, PRETRAINED = f"python3 visualize_{MULTI}.py", "weights/multimnist_capsnet.npz"
LONG_RUN = "weights/long/multimnist_paper_protocol.npz"
PROBE = f"python3 probe_{AFF}.py"
BACKGROUND = f"python3 visualize_{NORB}.py --only background_activity"
AFF_NEAREST = "python3 bench/affnist_nearest.py"
NORB_NEAREST = "python3 bench/smallnorb_nearest.py"


def all_flags(experiment, flags):
    """Return flags with --digits mnist, unless they name the digits or other data, or the experiment has none"""
    names_data = "--digits" in flags or "--data-dir" in flags
    return flags if experiment == NORB or names_data else f"{flags} --digits mnist"


def measured(experiment, table, setting, seed, command, minutes, *after):
    """Return the Result of a command that trains no network of its own. after: names of runs, see
    Result"""
    return Result(experiment, table, setting, seed, command, minutes, after, is_training=False)


def uniform(experiment, table, setting, seeds):
    """Trained networks, tested with uniform coupling coefficients (one routing iteration)"""
    flags = all_flags(experiment, f"python3 {experiment}.py --load {{run}} --routing-iters 1")
    return [measured(experiment, f"{table}-uniform", setting, seed, f"{flags} --threads 1 --quiet", 1,
                     f"{experiment}/{table}/{setting}-{seed}") for seed in seeds]


def attacks(experiment, setting, models, flags, minutes):
    """Attacks on some networks that were trained again, by their own gradient and by that of the
    same models of the next seed, of the last seed those of the first"""
    again = f"{experiment}/trained-again"
    places = " {run}" * len(models)
    command = (f"python3 bench/attacks.py{flags} --load{places} --sources{places} "
               "--threads 1 --quiet")
    found = []
    for seed in SEEDS:
        following = (seed + 1) % len(SEEDS)
        runs_before = [f"{again}/{name}-{one}" for one in (seed, following) for name in models]
        found.append(measured(experiment, "attacks", setting, seed, command, minutes, *runs_before))
    return found


MEASUREMENTS = [                   # on trained networks, and baselines that are not trained
    measured(MULTI, "weights", "residual", 0,
             f"{DRAW} --load {PRETRAINED} --only errors --digits mnist --threads 1", 1),
    measured(MULTI, "weights", "residual-paper-protocol", 0,
           f"python3 {MULTI}.py --load {PRETRAINED} {PAPER_PROTOCOL} --digits mnist --threads 1 --quiet", 1),
    *(measured(experiment, "weights", f"{name}-recomputed", seed, f"python3 {experiment}.py --load {path} "
             "--recompute-statistics 800 --digits mnist --threads 1 --quiet", 2, *after)
      for experiment, name, path, seed, *after in (
        (MULTI, "residual", PRETRAINED, 0), (MULTI, "paper-protocol-long", LONG_RUN, 0),
        *((AFF, name, f"weights/affnist_{name}.npz", 0) for name in ("capsnet-shared", "cnn-gap")),
        *((MULTI, name, "{run}", seed, f"{MULTI}/{table}/{name}-{seed}") for table, name, _, seeds in LONG_RUNS
          for seed in seeds if (name, seed) != ("paper-protocol-long", 0)))),
    *uniform(MULTI, "main", "deep", range(10)), *uniform(MULTI, "half-digit", "iters-3", range(10)),
    *uniform(AFF, "backbone", "capsnet", range(5)),
    *uniform(AFF, "equal-training", "capsnet", range(5)),
    measured(MULTI, "nearest", "pairs", 0, "python3 bench/multimnist_nearest.py --digits mnist", 2),
    measured(MULTI, "linear", "pairs", 0, "python3 bench/multimnist_linear.py --digits mnist", 1),
    measured(MULTI, "statistics", "paper-protocol-long", 0, f"python3 bench/multimnist_statistics.py --load {LONG_RUN} "
           "--digits mnist", 15),
    measured(AFF, "nearest", "digits", 0, f"{AFF_NEAREST} --digits mnist", 3),
    measured(AFF, "colored", "nearest", 0, f"python3 bench/colored_nearest.py --data-dir {COLORED}", 3),
    *(measured(AFF, "few-10", "nearest", seed, f"{AFF_NEAREST} --n-per-class 10 --digits mnist --seed {seed}", 1)
      for seed in range(5)),
    *(measured(AFF, "weights", name, 0, f"python3 {AFF}.py --load weights/affnist_{name}.npz --digits mnist "
               "--threads 1 --quiet", 1) for name in ("capsnet-shared", "cnn-gap")),
    *(measured(AFF, "probes", name, seed, f"{PROBE} --load {{run}} --digits mnist --threads 1 --quiet", 3,
             f"{AFF}/backbone/{name}-{seed}")
      for name in ("capsnet-shared", "capsnet", "vector-gap", "cnn-gap") for seed in range(5)),
    *(measured(AFF, "probes", f"pretrained-{name}", 0, f"{PROBE} --load weights/affnist_{name}.npz --digits mnist "
             "--threads 1 --quiet", 3) for name in ("capsnet-shared", "cnn-gap")),
    *(measured(NORB, table, "nearest", 0, f"{NORB_NEAREST} --split {split}", 0.5) for table, split in (
        ("wide-azimuth", "azimuth"), ("wide-elevation", "elevation"), ("standard", "instance"))),
    *(measured(NORB, table, "nearest", seed, f"{NORB_NEAREST} {flags} --seed {seed}", 0.1) for table, flags in (
        ("shapes", "--data shapes"), ("gap-shapes", f"--data shapes {GAP_SHAPES}")) for seed in range(10)),
    *(measured(NORB, "background-activity", "matrix-capsnet", seed, f"{BACKGROUND} --load {{run}} --threads 1", 1,
             f"{NORB}/paper-azimuth/matrix-capsnet-{seed}") for seed in range(5)),
    *uniform(NORB, "em-iterations", "matrix-capsnet", range(5)),
    *uniform(NORB, "em-iterations", "matrix-head", range(5)),
    *(measured(NORB, "background-activity", name, seed, f"{BACKGROUND} --load {{run}} --threads 1", 1,
             f"{NORB}/background-runs/{name}-{seed}") for name in BACKGROUND_RUNS for seed in range(3)),
    *(measured(NORB, "background-activity", PAPER_SIZE, seed, f"{BACKGROUND} --load {{run}} --threads 1", 3,
             f"{NORB}/paper-azimuth/{PAPER_SIZE}-{seed}") for seed in range(5)),
    measured(NORB, "background-activity", "pretrained", 0, f"{BACKGROUND} --load weights/smallnorb_matrix-capsnet.npz "
           "--threads 1", 1),
    *(measured(AFF, "dimensions", name, seed, "python3 bench/affnist_dimensions.py --load {run} --digits mnist "
               "--threads 1 --quiet", 1, f"{AFF}/trained-again/{name}-{seed}")
      for name in ("capsnet", "capsnet-shared", "vector-gap") for seed in SEEDS),
    *(measured(MULTI, "coefficients", "iters-3", seed, "python3 bench/multimnist_coefficients.py --load {run} "
               "--digits mnist --threads 1 --quiet", 2, f"{MULTI}/iterations/iters-3-{seed}") for seed in SEEDS),
    *attacks(AFF, "digits", ("small-capsnet", "small-cnn-dense", "cnn-gap"), " --digits mnist", 6),
    *attacks(NORB, "toys", ("matrix-capsnet", "cnn", "cnn-gap"), "", 6)]
SMALL = {                          # what makes a command small; what is given twice counts as last
    "smallnorb_nearest.py --data shapes": "--n-per-combo 1",
    "smallnorb_nearest.py": "--n-train-toys 1 --n-test 60",
    "nearest.py": "--n-known 200 --n-test 100 --digits auto",
    "linear.py": "--n-known 200 --n-test 100 --digits auto",
    "dimensions.py": "--n-test 400 --digits auto",
    "coefficients.py": "--n-test 64 --digits auto",
    "attacks.py --digits": "--n-images 16 --digits auto", "attacks.py": "--n-images 16",
    "statistics.py": "--n-pairs 64 --n-val 64 --digits auto",
    "probe_affnist": "--n-test 20 --digits auto",
    "--only background_activity": "--n-test 60",
    "recompute-statistics": "--recompute-statistics 32 --n-test 64 --digits auto",
    f"{NORB}.py --load": "--n-test 60", "--load": "--n-test 64 --digits auto"}


def results_of(table):
    """Return the Results of a table of runs, one per seed"""
    return [Result(experiment, name, setting, seed, all_flags(experiment, flags), minutes)
            for experiment, name, setting, flags, seeds, minutes in table for seed in seeds]


RESULTS = results_of(RUNS) + MEASUREMENTS
CAPTIONS = {                       # of each table, in the results log
    (AFF, "padding"): "Padding (px of background around the canvas) of each network, chosen on validation digits.",
    (AFF, "equal-training"): "The paper's networks, narrow, each trained on 96,000 translated digits.",
    (AFF, "any-position"): "The same networks, trained on digits at any position on the canvas.",
    (AFF, "matched-accuracy"): "The same networks, each trained until it classifies 98% of translated validation "
    "digits. Seeds 3 to 7 of cnn-64 and 5 to 7 of the others were planned together, after the first had been looked "
    "at.",
    (AFF, "any-position-matched"): "Trained on digits at any position until 95% of such validation digits are correct.",
    (AFF, "backbone"): "Capsule networks and CNNs on one backbone, each trained on 48,000 translated digits.",
    (AFF, "backbone-uniform"): "Trained with routing, tested with uniform coupling coefficients.",
    (AFF, "equal-training-uniform"): "Trained with routing, tested with uniform coupling coefficients.",
    (AFF, "components"): "From ten pooled class vectors to a capsule network, one component after another.",
    (AFF, "few-10"): "Trained on ten digits of each class. Seeds 5 to 14 of capsnet-shared and vector-gap were planned "
    "together, after the first five had been looked at.",
    (AFF, "long"): "The pretrained networks: trained on 240,000 translated digits.",
    (AFF, "mnist"): "MNIST's own task: its test images as they are.",
    (AFF, "colored"): "MNIST's digits in random colors on random backgrounds, 32x32 px. Times are of a busy machine.",
    (AFF, "no-padding"): "Networks of the common backbone without padding.",
    (AFF, "nearest"): "Nearest neighbor in pixels.",
    (AFF, "trained-again"): "Networks of backbone and equal-training (small-), trained again to be measured.",
    (AFF, "dimensions"): "R\u00b2 of a linear regression from the true class's capsule to what was drawn.",
    (AFF, "attacks"): "Sign attacks (FGSM, BIM, PGD) on translated digits. Robustness: mean accuracy over eight "
    "epsilons, divided by the accuracy without attack; 1: no attack disturbs.",
    (AFF, "weights"): "The pretrained networks, evaluated from their files. For -recomputed, the statistics of batch "
    "normalization were recomputed.",
    (AFF, "probes"): "Trained networks on sign attacks (FGSM), rotated digits and images of no digit; linear probes.",
    (MULTI, "main"): "Capsule networks, trained on pairs drawn anew in every epoch.",
    (MULTI, "control"): "Controls: CNNs, one routing iteration, no reconstruction. Seeds 5 to 9 of cnn-head-gap were "
    "planned after the first five had been looked at. cnn-head-gap-tuned has the best learning rate and Muon step of "
    "22 configurations on validation pairs, cnn-tuned the best of its own 22, cnn-gap-decoder the best of three "
    "weights of reconstruction (results/plans.md). The two "
    "-paper-protocol-long were planned after seed 0 of main/paper-protocol-long had been looked at.",
    (MULTI, "half-digit"): "Networks whose receptive fields see half a digit.",
    (MULTI, "half-digit-long"): "The same networks, trained on five times as many pairs.",
    (MULTI, "main-uniform"): "Trained with routing, tested with uniform coupling coefficients.",
    (MULTI, "half-digit-uniform"): "Trained with routing, tested with uniform coupling coefficients.",
    (MULTI, "weights"): "The pretrained network (residual), evaluated from its file. It was trained on pairs that "
    "overlap more; one row tests it on the paper's pairs. For -recomputed, the statistics of batch normalization were "
    "recomputed, of this network or of one that was trained on 1.92 million pairs. Seeds 1 to 3, the CNN and one "
    "iteration were planned after seed 0 had been looked at, to be evaluated by recomputed statistics.",
    (MULTI, "iterations"): "The default network (iters-3, as main/deep) and with more iterations.",
    (MULTI, "coefficients"): "iters-3 of iterations, tested with other coupling coefficients.",
    (MULTI, "nearest"): "Nearest training pair, in pixels.",
    (MULTI, "linear"): "Linear least squares from the composite to each digit, for its true class.",
    (MULTI, "statistics"): "Running statistics of a trained network, gathered anew in several ways; validation pairs.",
    **{(NORB, f"wide-{split}"): f"capsnet-shared and cnn-gap, preset wide, novel {split}s." for split in SPLITS},
    **{(NORB, f"paper-{split}"): f"matrix-capsnet and the paper's CNN, novel {split}s. cnn-dropout and cnn-paper were "
       "planned after the other networks had been looked at, with the learning rate and epochs of cnn. "
       "matrix-capsnet-paper, the paper's small network, was planned last, with those of matrix-capsnet."
       for split in SPLITS},
    **{(NORB, f"toys{toy_seed}-{split}"): f"The same networks on the toys of --toy-seed {toy_seed}, novel {split}s."
       for toy_seed in TOY_SEEDS for split in SPLITS},
    **{(NORB, f"toys{toy_seed}-azimuth"): f"capsnet-shared and cnn-gap on the toys of --toy-seed {toy_seed}, novel "
                                          "azimuths."
       for toy_seed in MORE_TOY_SEEDS},
    (NORB, "em-iterations"): "Networks with EM routing, trained again for em-iterations-uniform.",
    (NORB, "em-iterations-uniform"): "Trained with EM routing, tested with one iteration (uniform assignment).",
    (NORB, "background-runs"): "Matrix capsules with another loss, split or set of toys, for background-activity.",
    **{(NORB, f"heads-{split}"): f"Heads of one size on one backbone, novel {split}s." for split in SPLITS},
    (NORB, "ablations"): "Parts removed from capsnet-shared, or added to a CNN.",
    (NORB, "shapes"): "Five shapes: trained on azimuths 0 to 150 degrees, novel azimuths 200 to 330.",
    (NORB, "gap-shapes"): "Five shapes, trained on azimuths 0 to 60 degrees: accuracy by distance to them.",
    (NORB, "pretrained"): "The CNNs of paper-azimuth, trained again for the pretrained files.",
    (NORB, "gap-toys"): "Toys, trained on azimuths 0 to 60 degrees: accuracy by distance to them.",
    (NORB, "standard"): "smallNORB's standard task: novel instances.",
    (NORB, "trained-again"): "Networks of paper-azimuth (matrix-capsnet, cnn) and wide-azimuth (cnn-gap), trained "
    "again to be measured.",
    (NORB, "attacks"): "Sign attacks (FGSM, BIM, PGD) on new toys at familiar azimuths. Robustness: mean accuracy over "
    "eight epsilons, divided by the accuracy without attack; 1: no attack disturbs.",
    (NORB, "background-activity"): "Mean activation of primary matrix capsules over the background and over the "
    "toy, after training."}
NORB_FIGURES = ("example_views", "familiar_vs_novel", "azimuth_accuracy", "gap_curve", "pose_matrices", "routing",
                "training_curves", "background_activity", "forest", "forest_ablations")
NORB_PRETRAINED = [f"weights/smallnorb_{model}.npz" for model in PAPER]
AFF_PRETRAINED = "weights/affnist_small_capsnet.npz weights/affnist_small_cnn.npz"
TABLES_OF = {name: sorted(f"results/{name}/{path.name}" for path in (ROOT / "results" / name).glob("*.jsonl"))
             for name in EXPERIMENTS}
FIGURES = {                        # name -> command, what it draws from beside its own script, minutes of two cores
    "multimnist": (f"{DRAW} --load --digits mnist --results --outdir viz/{MULTI}",
                   [f"{MULTI}.py", PRETRAINED, *TABLES_OF[MULTI]], 1),
    "multimnist-page": (f"{DRAW} --image viz/{MULTI}/page.png --outdir viz/{MULTI}",
                        [f"{MULTI}.py", PRETRAINED, f"viz/{MULTI}/page.png"], 1),
    "smallnorb": (f"python3 visualize_{NORB}.py --load --results --only {' '.join(NORB_FIGURES)} --outdir viz/{NORB}",
                  [f"{NORB}.py", *NORB_PRETRAINED, *TABLES_OF[NORB]], 1),
    "smallnorb-elevations": (f"python3 visualize_{NORB}.py --load {NORB_PRETRAINED[0]} --only elevation_strip --outdir "
                             f"viz/{NORB}", [f"{NORB}.py", NORB_PRETRAINED[0]], 1),
    "affnist": (f"python3 visualize_{AFF}.py --load --n-test 1000 --digits mnist --results --outdir viz/{AFF}",
                [f"{AFF}.py", "weights/affnist_capsnet-shared.npz", *TABLES_OF[AFF]], 1),
    "routing": ("python3 visualize_routing.py --outdir viz/routing", [f"{MULTI}.py", f"{NORB}.py"], 1),
    "findings": ("python3 results/render.py --pictures", sum(TABLES_OF.values(), ["workflow/claims.py"]), 1)}
ANIMATIONS = {
    "multimnist": (f"python3 make_{MULTI}_gif.py {QUICK} --n-val 500 --snapshot-every 75 --out {MULTI}.gif",
                   [f"{MULTI}.py"], 3),
    "smallnorb": (f"python3 make_{NORB}_gif.py --n-test 600 --out {NORB}.gif", [f"{NORB}.py"], 6),
    "affnist": (f"python3 make_{AFF}_gif.py --load {AFF_PRETRAINED} --out {AFF}.gif",
                [f"{AFF}.py", *AFF_PRETRAINED.split()], 1)}
WEIGHTS = {path: next(result for result in RESULTS if result.name == f"{name}-0") for path, name in (
    (PRETRAINED, f"{MULTI}/main/residual"), (LONG_RUN, f"{MULTI}/main/paper-protocol-long"),
    *((f"weights/smallnorb_{model}.npz", f"{NORB}/{table}/{model}") for model, table in (
        ("capsnet-shared", "wide-azimuth"), ("cnn-gap", "wide-azimuth"), ("matrix-capsnet", "paper-azimuth"),
        ("cnn", "pretrained"), ("cnn-bn", "pretrained"))),
    *((f"weights/affnist_{model}.npz", f"{AFF}/long/{model}") for model in ("capsnet-shared", "cnn-gap")),
    *((f"weights/affnist_small_{model}.npz", f"{AFF}/equal-training/{model}") for model in PAPERS))}


def weights_command(path, folder):
    """Return the command that makes a weights file from the folder of a run; those for the page are small"""
    command = f"python3 workflow/slim.py {folder} {path}"
    if "small_" in path:
        command += " --small"
    return command


def needs_colored(result):
    """Return whether a result needs the digits in color"""
    return COLORED in result.flags


def colored_command(toy=False):
    """Return the command that makes the digits in color, in a folder of its own at toy size"""
    digits = "auto" if toy else "mnist"
    return f"python3 bench/colored_digits.py {QUICK_COLORED if toy else COLORED} --digits {digits}"


def digest(*paths):
    """Return the digest of some files of the project together, of those that exist"""
    there = [ROOT / path for path in paths if (ROOT / path).exists()]
    return hashlib.sha256(b"".join(path.read_bytes() for path in there)).hexdigest()


def toy_line(experiment):
    """Return an experiment and the flags that make it small, as one shell line"""
    return shlex.join(map(str, (experiment, *(word for pair in TOY.get(experiment, {}).items() for word in pair))))


def shell_command(result, folder, toy=False, after=()):
    """Return the command that makes a result and writes it to metrics.json in a folder. toy: at a size that takes
    seconds. after: the folders of the runs that it comes after"""
    folder = str(folder)
    if not result.is_training:
        command = result.flags
        for one in after:
            command = command.replace("{run}", shlex.quote(str(one)), 1)
        if toy:
            command += " " + next(flags for part, flags in SMALL.items() if part in result.flags)
            command = command.replace(COLORED, QUICK_COLORED)
        if "visualize" in result.flags:
            command += f" --quiet --outdir {shlex.quote(folder)}"
        return f"{command} --out-json {shlex.quote(str(Path(folder, 'metrics.json')))}"
    words = shlex.split(result.flags)
    if toy:
        small = TOY_SHAPES if "--data shapes" in result.flags else TOY.get(result.experiment, {"--n-epochs": 1})
        kept = [k for k, word in enumerate(words) if not {word, *words[max(0, k - 1):k]} & small.keys()]
        words = [words[k] for k in kept] + [str(word) for pair in small.items() for word in pair]
        words = [QUICK_COLORED if word == COLORED else word for word in words]
    words += ["--seed", result.seed, "--threads", 1, "--quiet", "--outdir", folder]
    return f"python3 {result.experiment}.py {shlex.join(map(str, words))}"
