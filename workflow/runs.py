"""Every run behind the tables: experiment, table, setting, flags, seeds, about how many minutes of one core. What is no
training run of an experiment has its whole command for flags; a benchmark's minutes are those of the machine, which it
has to itself. And the commands that draw figures and films.

The Snakefile plans from this list; results/render.py draws from what the runs wrote.
"""
import hashlib
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Result(NamedTuple):
    """One result: one network, one seed"""
    experiment: str
    table: str
    setting: str
    seed: int
    flags: str
    minutes: float
    after: str = ""                # the name of the run whose checkpoint stands for {checkpoint} in its command

    @property
    def name(self):
        return f"{self.experiment}/{self.table}/{self.setting}-{self.seed}"

    @property
    def pin(self):
        """Which pin of tests/pins.json vouches for it: its flags without sizes. Of what has a command of its own: that
        of the run that made the weights it loads, else that of no flags"""
        if self.after:
            return next(run.pin for run in RESULTS if run.name == self.after)
        if "python3 " in self.flags:
            return next((run.pin for path, run in WEIGHTS.items() if path in self.flags), "")
        words = shlex.split(self.flags)
        flags = [k for k, word in enumerate(words) if word.startswith("--")] + [len(words)]
        given = {words[start]: words[start + 1:end] for start, end in zip(flags, flags[1:])}
        given |= {flag: [value] for flag, value in SHRUNK.items() if flag in given}
        return " ".join(" ".join([flag, *given[flag]]) for flag in sorted(given) if flag not in SIZES)


SIZES = ("--n-epochs", "--n-train", "--n-val", "--n-test", "--batch-size", "--digits", "--baseline")
SHRUNK = {"--stop-at": "0.02", "--n-per-class": "4", "--n-train-toys": "2", "--data": "shapes"}   # in every pin
MULTI, NORB, AFF = FIRST = "multimnist_capsnet", "smallnorb_novel_viewpoint", "affnist_capsnet"
FOUND = sorted(path.stem for path in ROOT.glob("*.py") if "\n# TWIN core" in path.read_text())
EXPERIMENTS = sorted(FOUND, key=[*FIRST, *FOUND].index)
QUICK = "--n-epochs 12 --n-train 6000"
RESIDUAL = "--preset residual --warp 0.3 --batch-size 64"
MIDDLE, LONG = "--n-epochs 10 --n-train 15000", "--n-epochs 20 --n-train 60000 --n-val 5000"
PLAIN = "--norm none --lr 5e-3 --conv1-channels 32 --recon-weight 0.002"
HEADS = {                          # heads on one trunk, of one size, and each routing without its routing
    **{model: f"--model {model}" for model in ("gap", "dense", "dynamic-shared", "dynamic", "em", "self-routing")},
    **{f"{model}-1": f"--model {model} --routing-iters 1" for model in ("dynamic-shared", "dynamic", "em")}}
PARTS = {                          # what is taken from one of them, or given to the other
    "dynamic-shared-1": "--model dynamic-shared --routing-iters 1",
    "dynamic-shared-no-places": "--model dynamic-shared --no-coord-add",
    "dynamic-shared-xent": "--model dynamic-shared --loss xent", "dynamic": "--model dynamic",
    "gap-places": "--model gap --places", "gap-margin": "--model gap --loss margin"}
SPLITS, SMALL_HEADS = ("azimuth", "elevation"), "--preset small"
SWEPT = "gap", "dynamic-shared", "em"                                       # heads that are trained on less
AZIMUTHS = {3: ("340:380", 12), 6: ("300:400", 6), 9: ("280:440", 4), 18: ("0:340", 2)}     # how many: which, epochs
CAPS, PAPERS_CNN = "--model caps", "--model cnn --preset small --lr 2e-3"
PAPER = {                          # its two kinds of network, and minutes
    "caps": (f"{CAPS} --n-epochs 10", 4), "cnn": (f"{PAPERS_CNN} --n-epochs 16", 1)}
STANDARD = {                       # the paper's ablations on the standard task
    **{f"caps-{n}": f"--routing-iters {n}" for n in (1, 2, 3)}, "caps-no-places": "--no-coord-add",
    "caps-spread": "--loss spread"}
AFF_NETWORKS = {                   # sharing of matrices over places and capsules, two by two; then others on the trunk
    "shared": "", "caps-1": "--model caps --routing-iters 1", "gap": "--model gap", "dense": "--model dense",
    "caps": "--model caps", "shared-3": "--routing-iters 3", "vectors": "--model vectors",
    "gap-8": "--model gap --padding 8", "max-8": "--model max --padding 8",                # the margin that suits them
    "cnn": "--model cnn --lr 2e-3"}
FOUR = tuple(AFF_NETWORKS)[:4]
BARE = "--squash none --loss xent --recon-weight 0"
STEPS = {                          # from a CNN of ten vectors to a capsule network, and what is taken from that one
    "start": f"--model vectors {BARE}", "transformation": BARE, "routing": f"--routing-iters 3 {BARE}",
    "squash": "--routing-iters 3 --loss xent --recon-weight 0", "margin": "--routing-iters 3 --recon-weight 0",
    "no-squash": "--routing-iters 3 --squash none", "no-margin": "--routing-iters 3 --loss xent"}
STEADY = "--lr-schedule constant --lr 1e-3"
MATCHED = f"--stop-at 0.9922 {STEADY} --n-train 6000 --n-epochs 40"
LEVEL = f"--stop-at 0.97 {STEADY} --n-train 3000 --n-epochs 40"                        # the paper's CNN gets there, too
PAPERS = {                         # its own kind: not normalised, no margin, Adam; controls of the capsules' size
    "caps": "--preset small --model caps", "caps-1": "--preset small --model caps --routing-iters 1",
    "cnn": "--preset small --model cnn",
    "cnn-64": "--preset small --model cnn --conv1-channels 64",
    "dense": "--preset small --model dense"}
AGREED = "--stop-at 0.98 --lr-schedule constant --n-train 6000 --n-epochs 40"                      # all four get there
FEW = (10, 100, 1000)              # training digits of a class
DIGITS_TASK = "--task mnist --n-train 55000"
RUNS = (                           # experiment, table, setting, flags, seeds, minutes of one seed on one core
    (MULTI, "main", "classic", f"--preset classic {QUICK}", range(3), 3),
    (MULTI, "main", "plain", f"{PLAIN} {QUICK}", range(3), 3),
    (MULTI, "main", "deep", QUICK, range(3), 3),
    (MULTI, "main", "adam", f"--muon 0 {QUICK}", range(3), 3),
    (MULTI, "main", "minute", "--n-epochs 8 --n-train 6000", range(3), 2),
    (MULTI, "main", "middle", f"{RESIDUAL} {MIDDLE}", range(3), 14),
    (MULTI, "main", "residual", f"{RESIDUAL} {LONG}", range(2), 105),
    (MULTI, "main", "paper", f"{RESIDUAL} --min-iou 0 --merge add {LONG}", range(1), 105),
    *((MULTI, "control", f"{run}-{name}", f"{flags} {length}", range(n), minutes)
      for run, length, n, minutes in (("middle", f"{RESIDUAL} {MIDDLE}", 3, 14), ("long", f"{RESIDUAL} {LONG}", 1, 105))
      for name, flags in (("iters-1", "--routing-iters 1"), ("cnn-mean", "--model cnn --cnn-head mean"))),
    (MULTI, "control", "long-cnn", f"--model cnn {RESIDUAL} {LONG}", range(1), 90),
    *((MULTI, "control", name, f"{flags} {QUICK}", range(3), 3) for name, flags in (
        ("iters-1", "--routing-iters 1"), ("no-recon", "--recon-weight 0"), ("cnn", "--model cnn"))),
    *((MULTI, "parts", name, f"--preset parts {flags} {QUICK}", range(3), minutes) for name, flags, minutes in (
        ("iters-3", "--routing-iters 3", 5), ("iters-1", "--routing-iters 1", 5), ("cnn", "--model cnn", 2),
        ("cnn-mean", "--model cnn --cnn-head mean", 2))),
    (MULTI, "main", "long", f"{PLAIN} --n-epochs 25 --n-train 60000 --n-val 5000", range(1), 100),
    (MULTI, "synthetic", "deep", "--n-epochs 8 --n-train 6000 --digits synthetic", range(1), 3),
    *((NORB, "shapes", model, f"--data shapes --model {flags} --baseline none", range(10), minutes)
      for model, flags, minutes in (("caps", "caps --preset small", 1.5), ("cnn", "cnn --preset small", 0.2),
                                    ("gap", "gap --preset small", 0.4), ("nearest", "nearest", 0.1))),
    *((NORB, f"heads-{split}", head, f"{flags} {SMALL_HEADS} --split {split} --baseline none", range(10), 1)
      for split in SPLITS for head, flags in HEADS.items()),
    *((NORB, f"wide-{split}", model, f"--model {model} --split {split} --baseline none", range(10), 2)
      for split in SPLITS for model in ("dynamic-shared", "gap")),
    *((NORB, "parts", part, f"{flags} --baseline none", range(5), 2) for part, flags in PARTS.items()),
    *((NORB, f"paper-{split}", name, f"{flags} --split {split} --baseline none", range(10), minutes)
      for split in SPLITS for name, (flags, minutes) in PAPER.items()),
    *((NORB, f"toys-{n}", head, f"--model {head} {SMALL_HEADS} --n-train-toys {n} --n-epochs {30 // n} --baseline none",
       range(5), 1)
      for n in (1, 2, 3) for head in SWEPT),
    *((NORB, f"azimuths-{n}", head, f"--model {head} {SMALL_HEADS} --split toys --train-azimuths {which} "
       f"--n-epochs {epochs} --baseline none", range(5), 1)
      for n, (which, epochs) in AZIMUTHS.items() for head in SWEPT),
    *((NORB, "standard", setting, f"{CAPS} {flags} --split toys --n-epochs 2 --baseline none", range(3), 2)
      for setting, flags in STANDARD.items()),
    *((NORB, "standard", name, f"{flags} --split toys --baseline none", range(3), 0.7)
      for name, flags in (("gap", f"--model gap {SMALL_HEADS} --n-epochs 2"), ("cnn", f"{PAPERS_CNN} --n-epochs 5"))),
    (NORB, "standard", "nearest", "--model nearest --split toys --baseline none", range(1), 0.5),
    *((NORB, f"wide-{split}", "nearest", f"--model nearest --split {split} --baseline none", range(1), 0.2)
      for split in SPLITS),
    *((AFF, "free", name, flags, range(3), 4)
      for name, flags in AFF_NETWORKS.items()),
    *((AFF, "edge", name, f"{AFF_NETWORKS[name]} --padding 0", range(3), 3) for name in (*FOUR, "caps", "cnn")),
    (AFF, "edge", "shared-8", "--padding 8", range(3), 4),
    *((AFF, "plain", name, f"{AFF_NETWORKS[name]} --norm none --lr 5e-3", range(3), 4) for name in (*FOUR, "caps")),
    *((AFF, "matched", name, f"{AFF_NETWORKS[name]} {MATCHED}", range(3), 6)
      for name in (*FOUR, "caps")),
    *((AFF, "level", name, f"{AFF_NETWORKS[name]} {LEVEL}", range(3), 3)
      for name in ("shared", "gap", "dense", "caps", "cnn")),
    *((AFF, "papers", name, f"{flags} {AGREED}", range(3), 5)
      for name, flags in PAPERS.items() if name != "cnn-64"),                              # an hour each
    *((AFF, "papers-free", name, f"{flags} --n-epochs 8", *((range(2), 30) if name == "cnn-64" else (range(3), 6)))
      for name, flags in PAPERS.items()),
    *((AFF, "steps", name, flags, range(3), 4) for name, flags in STEPS.items()),
    *((AFF, f"few-{n}", name, f"{AFF_NETWORKS[name]} --n-per-class {n}", range(1 if n == 1000 else 3), 4)
      for n in FEW for name in ("shared", "vectors", "caps", "gap-8", "max-8", "cnn")),
    *((AFF, "mnist", f"{n}{'-recon' * (weight > 0)}",
       f"--model caps --routing-iters {n} --recon-weight {weight} {DIGITS_TASK} --n-epochs 5", range(3), 6)
      for n in (1, 3) for weight in (0, 0.0005)),
    *((AFF, "mnist", name, f"{AFF_NETWORKS[name]} {DIGITS_TASK} --n-epochs 10", range(n), 11)
      for name, n in (("shared", 3), ("gap", 1))),
    (AFF, "mnist", "shared-long", f"{DIGITS_TASK} --n-epochs 20", range(1), 22),
    (AFF, "mnist", "paper", f"--preset paper --model caps {DIGITS_TASK} --n-epochs 2", range(1), 40),
    *((AFF, "long", name, f"{AFF_NETWORKS[name]} --n-epochs 10 --n-train 24000", range(1), 18)
      for name in ("shared", "gap-8")))
REAL_RUNS = tuple(                 # on files that cannot be shipped
    (NORB, "real-azimuth", model, f"--model {flags} --baseline none --data smallnorb --n-epochs 3", range(1), 5)
    for model, flags in (("caps", "caps --preset small"), ("cnn", "cnn --preset small"), ("gap", "gap --preset small"),
                         ("nearest", "nearest")))
TOY = {MULTI: {"--n-epochs": 1, "--n-train": 96, "--n-val": 32, "--n-test": 64, "--digits": "auto"},
       "shapes": {"--n-epochs": 1},
       NORB: {"--n-epochs": 1, "--n-train-toys": 1, "--n-test": 60},
       AFF: {"--n-epochs": 1, "--n-train": 96, "--n-val": 32, "--n-test": 32, "--digits": "auto"}}
DRAW, SHIPPED = f"python3 visualize_{MULTI}.py", "weights/multimnist_deep.npz"
PROBE = f"{DRAW} --only disentanglement {PLAIN} {QUICK} --n-val 500"
AFF_PROBE = f"python3 probe_{AFF}.py"
AFF_NEAREST = "python3 tests/bench_affnist_nearest.py"
ALIVE = f"python3 visualize_{NORB}.py --only alive {CAPS} --n-epochs 10"
LOOKS = [                          # what the figures say, in numbers
    Result(MULTI, "weights", "deep", 0, f"{DRAW} --load {SHIPPED} --only errors --digits mnist --threads 1", 1),
    Result(MULTI, "weights", "deep-papers-pairs", 0,
           f"python3 {MULTI}.py --load {SHIPPED} --min-iou 0 --merge add --digits mnist --threads 1 --quiet", 1),
    *(Result(MULTI, "disentanglement", "deep", seed, f"{PROBE} --n-seeds 1 --seed {seed} --threads 1", 11)
      for seed in range(3)),
    Result(NORB, "toys", "likeness", 0, "python3 tests/bench_toys.py", 2),
    Result(MULTI, "nearest", "pairs", 0, "python3 tests/bench_multimnist_nearest.py --digits mnist", 2),
    Result(AFF, "nearest", "digits", 0, f"{AFF_NEAREST} --digits mnist", 3),
    *(Result(AFF, f"few-{n}", "nearest", seed, f"{AFF_NEAREST} --n-per-class {n} --digits mnist --seed {seed}", 1)
      for n in FEW for seed in range(3)),
    *(Result(AFF, "weights", name, 0, f"python3 {AFF}.py --load weights/affnist_{name}.npz --digits mnist --threads 1 "
             "--quiet", 1) for name in ("shared", "gap")),
    *(Result(AFF, "probes", name, seed, f"{AFF_PROBE} --load {{checkpoint}} --digits mnist --threads 1 --quiet", 5,
             f"{AFF}/free/{name}-{seed}")
      for name in AFF_NETWORKS if name not in ("caps-1", "gap") for seed in range(3)),
    *(Result(NORB, "alive", "caps", seed, f"{ALIVE} --seed {seed} --threads 1", 5) for seed in range(3)),
    *(Result(NORB, "weights", name, 0, f"python3 {NORB}.py --load weights/smallnorb_{name}.npz --threads 1 "
             "--quiet", 0.3) for name in ("capsules", "gap", "caps"))]
STEP, DIGITS = "python3 tests/bench_step.py multimnist", "python3 tests/bench_synthetic_digits.py"
NORB_STEP = "python3 tests/bench_step.py smallnorb --threads 1"
AFF_STEP = "python3 tests/bench_step.py affnist --threads 1"
AVX2 = "OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2"
BENCHES = [                        # experiment, table, setting, seed, command, minutes of the whole machine
    Result(MULTI, "speed", "command", 0, f"python3 {MULTI}.py {QUICK} --seed 0 --digits mnist --quiet", 2),
    Result(MULTI, "speed", "deep", 0, STEP, 2),
    Result(MULTI, "speed", "deep-avx2", 0, f"{AVX2} {STEP} --threads 1", 2),
    Result(MULTI, "speed", "classic", 0, f"{STEP} --preset classic", 2),
    Result(MULTI, "speed", "residual", 0, f"{STEP} --preset residual --batch-size 64", 4),
    *(Result(MULTI, "speed", f"threads-{size}", 0, f"{STEP} --threads 1,2 --batch-size {size}", 2)
      for size in (32, 64, 128)),
    Result(MULTI, "speed", "paper", 0, f"{STEP} --preset paper --rounds 3 --repeats 3", 4),
    Result(NORB, "speed", "heads", 0, NORB_STEP, 5),
    Result(NORB, "speed", "heads-avx2", 0, f"{AVX2} {NORB_STEP}", 5),
    Result(AFF, "speed", "batch-32", 0, AFF_STEP, 3),
    Result(AFF, "speed", "batch-100", 0, f"{AFF_STEP} --batch-size 100", 5),
    Result(MULTI, "synthetic", "digits", 0, f"{DIGITS} --digits mnist", 1)]
SMALL = {                          # what makes a command small; what is given twice counts as last
    "bench_toys": "--n-toys 1 --n-test 100", "nearest.py": "--n-known 200 --n-test 100 --digits auto",
    "probe_affnist": "--n-test 20 --digits auto",
    "--only alive": "--n-epochs 1 --n-train-toys 1 --n-test 60",
    f"{NORB}.py --load": "--n-test 60", "--load": "--n-test 64 --digits auto",
    "disentanglement": "--n-epochs 1 --n-train 96 --n-val 32 --n-test 200",
    f"{MULTI}.py {QUICK}": "--n-epochs 1 --n-train 96 --n-val 32 --n-test 64 --digits auto",
    STEP: "--no-torch --rounds 1 --repeats 2 --batch-size 4",
    NORB_STEP: "--no-torch --rounds 1 --repeats 2 --models gap",
    AFF_STEP: "--no-torch --rounds 1 --repeats 2 --models gap --batch-size 4",
    DIGITS: "--n-synthetic 640 --n-epochs 1 --digits auto"}


def all_flags(experiment, flags):
    """The runs of digits are on MNIST, unless they say otherwise"""
    return flags if experiment == NORB or "--digits" in flags else f"{flags} --digits mnist"


def results_of(table):
    return [Result(experiment, name, setting, seed, all_flags(experiment, flags), minutes)
            for experiment, name, setting, flags, seeds, minutes in table for seed in seeds]


RESULTS, REAL = results_of(RUNS) + LOOKS, results_of(REAL_RUNS)
AFF_SHIPPED = "weights/affnist_shared.npz weights/affnist_gap.npz"
FIGURES = {                        # name -> command, what it draws from beside its own script, minutes of two cores
    "multimnist": (f"{DRAW} --load --digits mnist", [f"{MULTI}.py", SHIPPED], 1),
    "multimnist-page": (f"{DRAW} --image viz/{MULTI}/page.png --outdir viz/{MULTI}",
                        [f"{MULTI}.py", SHIPPED, f"viz/{MULTI}/page.png"], 1),
    "multimnist-disentanglement": (f"{PROBE} --n-seeds 3", [f"{MULTI}.py"], 15),
    "smallnorb": (f"python3 visualize_{NORB}.py --load --results results/{NORB}/wide-azimuth.jsonl",
                  [f"{NORB}.py", "weights/smallnorb_caps.npz"], 10),
    "affnist": (f"python3 visualize_{AFF}.py --load {AFF_SHIPPED} --n-test 1000 --digits mnist && "
                f"python3 visualize_{AFF}.py --results results/{AFF}",
                [f"{AFF}.py", *AFF_SHIPPED.split()], 3)}
FILMS = {
    "multimnist": (f"python3 make_{MULTI}_gif.py {QUICK} --n-val 500 --snapshot-every 75 --fps 6",
                   [f"{MULTI}.py", SHIPPED], 3),
    "smallnorb": (f"python3 make_{NORB}_gif.py --n-test 600 --fps 5", [f"{NORB}.py"], 3),
    "affnist": (f"python3 make_{AFF}_gif.py --load {AFF_SHIPPED}", [f"{AFF}.py", *AFF_SHIPPED.split()], 1)}
WEIGHTS = {path: next(result for result in RESULTS if result.name == f"{name}-0") for path, name in (
    (SHIPPED, f"{MULTI}/main/residual"), ("weights/smallnorb_capsules.npz", f"{NORB}/wide-azimuth/dynamic-shared"),
    ("weights/smallnorb_gap.npz", f"{NORB}/wide-azimuth/gap"),
    ("weights/smallnorb_caps.npz", f"{NORB}/paper-azimuth/caps"), ("weights/affnist_shared.npz", f"{AFF}/long/shared"),
    ("weights/affnist_gap.npz", f"{AFF}/long/gap-8"))}


def digest(*paths):
    """Of those of some files of the project that are there, together"""
    there = [ROOT / path for path in paths if (ROOT / path).exists()]
    return hashlib.sha256(b"".join(path.read_bytes() for path in there)).hexdigest()


def toy_line(experiment):
    """An experiment and the flags that make it small"""
    return shlex.join(map(str, (experiment, *(word for pair in TOY.get(experiment, {}).items() for word in pair))))


def shell_command(result, path, toy=False, norb_dir="", checkpoint=""):
    """The command that makes a result and writes it to path; toy: in seconds; checkpoint: of the run it is after"""
    if "python3 " in result.flags:
        small = next(f" {flags}" for part, flags in SMALL.items() if part in result.flags) if toy else ""
        folder = f" --quiet --outdir {shlex.quote(str(Path(path).parent))}" if "visualize" in result.flags else ""
        command = result.flags.replace("{checkpoint}", shlex.quote(checkpoint))
        return f"{command}{small}{folder} --out-json {shlex.quote(path)}"
    words = shlex.split(result.flags)
    if toy:
        small = TOY.get("shapes" if "shapes" in words else result.experiment, {"--n-epochs": 1})
        kept = [k for k, word in enumerate(words) if not {word, *words[max(0, k - 1):k]} & small.keys()]
        words = [words[k] for k in kept] + [str(word) for pair in small.items() for word in pair]
    words += ["--seed", result.seed, "--threads", 1, "--quiet", "--out-json", path]
    if "nearest" in words and toy:
        at = words.index("--n-epochs")
        del words[at:at + 2]
    elif "nearest" not in words:
        words += ["--checkpoint", path.replace(".json", ".npz"), "--resume"]
    if "smallnorb" in words:
        words += ["--norb-dir", norb_dir]
    return f"python3 {result.experiment}.py {shlex.join(map(str, words))}"
