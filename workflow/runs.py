"""Every run behind the tables: experiment, table, setting, flags, seeds, about how many minutes of one core. What is no
training run of an experiment has its whole command for flags. And the commands that draw figures and films.

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
        """Which pin of tests/pins.json vouches for it: its flags without sizes and draws. Of what has a command of its
        own: that of the run that made the weights it loads, else that of no flags"""
        if self.after:
            return next(run.pin for run in RESULTS if run.name == self.after)
        if "python3 " in self.flags:
            return next((run.pin for path, run in WEIGHTS.items() if path in self.flags), "")
        words = shlex.split(self.flags)
        flags = [k for k, word in enumerate(words) if word.startswith("--")] + [len(words)]
        given = {words[start]: words[start + 1:end] for start, end in zip(flags, flags[1:])}
        given |= {flag: [value] for flag, value in SHRUNK.items() if flag in given}
        return " ".join(" ".join([flag, *given[flag]]) for flag in sorted(given) if flag not in SIZES)


SIZES = ("--n-epochs", "--n-train", "--n-val", "--n-test", "--batch-size", "--digits",
         "--toy-seed", "--tests-on")
SHRUNK = {"--stop-at": "0.02", "--n-per-class": "4", "--data": "shapes"}                       # in every pin
MULTI, NORB, AFF = FIRST = "multimnist_capsnet", "smallnorb_novel_viewpoint", "affnist_capsnet"
FOUND = sorted(path.stem for path in ROOT.glob("*.py") if "\n# TWIN core" in path.read_text())
EXPERIMENTS = sorted(FOUND, key=[*FIRST, *FOUND].index)
QUICK = "--n-epochs 12 --n-train 6000"
RESIDUAL = "--preset residual --warp 0.3 --batch-size 64"
LONG = "--n-epochs 20 --n-train 60000 --n-val 5000"
PAPERS_PAIRS = "--min-iou 0 --merge add"
CNN_MEAN = "--model cnn --cnn-head mean"
HEADS = {                          # heads on one trunk, of one size, and each routing without its routing
    **{model: f"--model {model}" for model in ("gap", "dynamic-shared", "dynamic", "em")},
    **{f"{model}-1": f"--model {model} --routing-iters 1" for model in ("dynamic-shared", "dynamic", "em")}}
PARTS = {                          # what is taken from one of them, or given to the other
    "dynamic-shared-1": "--model dynamic-shared --routing-iters 1",
    "dynamic-shared-no-places": "--model dynamic-shared --no-coord-add",
    "dynamic-shared-xent": "--model dynamic-shared --loss xent", "dynamic": "--model dynamic",
    "gap-places": "--model gap --places", "gap-margin": "--model gap --loss margin"}
SPLITS, DRAWS, SMALL_HEADS = ("azimuth", "elevation"), (2, 3, 4), "--preset small"
CAPS, PAPERS_CNN = "--model caps", "--model cnn --preset small --lr 2e-3"
PAPER = {                          # its two kinds of network, and that CNN normalised as the capsules are; minutes
    "caps": (f"{CAPS} --n-epochs 10", 4), "cnn": (f"{PAPERS_CNN} --n-epochs 16", 1),
    "cnn-norm": ("--model cnn-norm --preset small --lr 2e-3 --n-epochs 16", 1)}
STANDARD = {                       # the paper's ablations on the standard task
    **{f"caps-{n}": f"--routing-iters {n}" for n in (2, 3)}, "caps-spread": "--loss spread"}
AFF_NETWORKS = {
    "shared": "", "caps-1": "--model caps --routing-iters 1", "gap": "--model gap", "dense": "--model dense",
    "caps": "--model caps", "vectors": "--model vectors",
    "vectors-max": "--model vectors-max", "max": "--model max"}
MARGINS = 0, 4, 8                  # px of background around the canvas, tried on affine validation digits
BARE = "--squash none --loss xent --recon-weight 0"
STEPS = {                          # from a CNN of ten vectors to a capsule network, and what is taken from that one
    "start": f"--model vectors --padding 4 {BARE}", "transformation": BARE, "routing": f"--routing-iters 3 {BARE}",
    "squash": "--routing-iters 3 --loss xent --recon-weight 0", "margin": "--routing-iters 3 --recon-weight 0",
    "redrawing": "--routing-iters 3", "squash-relu": "--squash relu", "squash-last": "--squash last"}
PAPERS = {                         # its own kind: not normalised, no padding, Adam; controls of the capsules' size
    "caps": "--preset small --model caps", "cnn": "--preset small --model cnn",
    "dense": "--preset small --model dense"}
WIDE_CNN = "--preset small --model cnn --conv1-channels 64"                # convolutions as wide as the capsules'
AGREED = "--stop-at 0.98 --lr-schedule constant --n-train 6000 --n-epochs 40"                      # all four get there


RUNS = (                           # experiment, table, setting, flags, seeds, minutes of one seed on one core
    *((AFF, "margins", f"{name}-{px}", f"{AFF_NETWORKS[name]} --padding {px} --tests-on val", range(1), 4)
      for name in ("shared", "gap", "max", "vectors", "vectors-max", "caps", "dense") for px in MARGINS),
    *((AFF, table, name, f"{flags} {length}", range(5), 5)
      for table, length in (("papers-free", "--n-epochs 8"), ("papers-anywhere", "--task anywhere --n-epochs 8"),
                            ("papers", AGREED))
      for name, flags in PAPERS.items()),
    *((AFF, "free", name, AFF_NETWORKS[name], range(7), 4) for name in ("shared", "vectors", "gap")),
    *((AFF, "free", name, AFF_NETWORKS[name], range(5), 4)
      for name in ("max", "vectors-max", "dense", "caps-1", "caps")),
    *((MULTI, "main", name, f"{flags} {QUICK}", range(n), 3) for name, flags, n in (
        ("deep", "", 10), ("classic", "--preset classic", 5), ("adam", "--muon 0", 5))),
    *((MULTI, "control", name, f"{flags} {QUICK}", range(n), 3) for name, flags, n in (
        ("iters-1", "--routing-iters 1", 10), ("cnn", "--model cnn", 10), ("vectors", "--model vectors", 10),
        ("no-recon", "--recon-weight 0", 5))),
    *((MULTI, "parts", name, f"--preset parts {flags} {QUICK}", range(n), minutes) for name, flags, n, minutes in (
        ("iters-3", "--routing-iters 3", 10, 3), ("iters-1", "--routing-iters 1", 10, 3),
        ("cnn", "--model cnn", 5, 2), ("cnn-mean", CNN_MEAN, 5, 2))),
    *((NORB, f"wide-{split}", model, f"--model {model} --split {split}", range(10), 2)
      for split in SPLITS for model in ("dynamic-shared", "gap")),
    *((NORB, f"paper-{split}", name, f"{flags} --split {split}", range(10), minutes)
      for split in SPLITS for name, (flags, minutes) in PAPER.items()),
    *((NORB, f"toys{draw}-{split}", name, f"{flags} --toy-seed {draw} --split {split}", range(3), 2)
      for draw in DRAWS for split in SPLITS for name, flags in (
          ("dynamic-shared", "--model dynamic-shared"), ("gap", "--model gap"),
          *((name, PAPER[name][0]) for name in ("caps", "cnn")))),
    *((NORB, f"heads-{split}", head, f"{flags} {SMALL_HEADS} --split {split}", range(5), 1)
      for split in SPLITS for head, flags in HEADS.items()
      if split == "azimuth" or head in ("gap", "dynamic-shared", "dynamic-shared-1", "em", "em-1")),
    *((AFF, "steps", name, flags, range(3), 4) for name, flags in STEPS.items()),
    *((AFF, "few-10", name, f"{AFF_NETWORKS[name]} --n-per-class 10", range(5), 4)
      for name in ("shared", "gap", "max", "vectors")),
    *((MULTI, table, name, f"{RESIDUAL} {flags} {LONG}", range(2), 105) for table, name, flags in (
        ("main", "residual", ""), ("main", "paper", PAPERS_PAIRS),
        ("control", "paper-cnn", f"{CNN_MEAN} {PAPERS_PAIRS}"), ("control", "long-iters-1", "--routing-iters 1"))),
    *((AFF, "long", name, f"{AFF_NETWORKS[name]} --n-epochs 10 --n-train 24000", range(1), 18)
      for name in ("shared", "gap")),
    (AFF, "mnist", "shared", "--task mnist --n-train 55000 --n-epochs 10", range(3), 11),
    *((AFF, "edge", name, f"{AFF_NETWORKS[name]} --padding 0", range(3), 3)
      for name in ("shared", "gap")),
    (AFF, "papers", "cnn-64", f"{WIDE_CNN} {AGREED}", range(3), 48),
    *((NORB, "parts", part, flags, range(5), 2) for part, flags in PARTS.items()),
    *((NORB, "standard", setting, f"{CAPS} {flags} --split toys --n-epochs 2", range(3), 2)
      for setting, flags in STANDARD.items()),
    *((NORB, table, "nearest", f"--model nearest --split {split}", range(1), 0.2)
      for table, split in (("wide-azimuth", "azimuth"), ("wide-elevation", "elevation"), ("standard", "toys"))))
TOY = {MULTI: {"--n-epochs": 1, "--n-train": 96, "--n-val": 32, "--n-test": 64, "--digits": "auto"},
       NORB: {"--n-epochs": 1, "--n-train-toys": 1, "--n-test": 60},
       AFF: {"--n-epochs": 1, "--n-train": 96, "--n-val": 32, "--n-test": 32, "--digits": "auto"}}
DRAW, SHIPPED = f"python3 visualize_{MULTI}.py", "weights/multimnist_deep.npz"
AFF_PROBE = f"python3 probe_{AFF}.py"
ALIVE = f"python3 visualize_{NORB}.py --only alive"
AFF_NEAREST = "python3 tests/bench_affnist_nearest.py"
def off(experiment, table, setting, seeds):
    """Trained networks, tested without their routing: what they learned with it in place"""
    return [Result(experiment, f"{table}-off", setting, seed, f"python3 {experiment}.py --load {{checkpoint}} "
                   "--routing-iters 1 --digits mnist --threads 1 --quiet", 1, f"{experiment}/{table}/{setting}-{seed}")
            for seed in seeds]


LOOKS = [                          # what the figures say, in numbers
    Result(MULTI, "weights", "deep", 0, f"{DRAW} --load {SHIPPED} --only errors --digits mnist --threads 1", 1),
    Result(MULTI, "weights", "deep-papers-pairs", 0,
           f"python3 {MULTI}.py --load {SHIPPED} {PAPERS_PAIRS} --digits mnist --threads 1 --quiet", 1),
    *off(MULTI, "main", "deep", range(10)), *off(MULTI, "parts", "iters-3", range(10)),
    *off(AFF, "free", "caps", range(5)),
    *off(AFF, "papers-free", "caps", range(5)),
    Result(MULTI, "nearest", "pairs", 0, "python3 tests/bench_multimnist_nearest.py --digits mnist", 2),
    Result(AFF, "nearest", "digits", 0, f"{AFF_NEAREST} --digits mnist", 3),
    *(Result(AFF, "few-10", "nearest", seed, f"{AFF_NEAREST} --n-per-class 10 --digits mnist --seed {seed}", 1)
      for seed in range(5)),
    *(Result(AFF, "weights", name, 0, f"python3 {AFF}.py --load weights/affnist_{name}.npz --digits mnist --threads 1 "
             "--quiet", 1) for name in ("shared", "gap")),
    *(Result(AFF, "probes", name, seed, f"{AFF_PROBE} --load {{checkpoint}} --digits mnist --threads 1 --quiet", 3,
             f"{AFF}/free/{name}-{seed}")
      for name in ("shared", "caps", "vectors", "gap") for seed in range(5)),
    *(Result(AFF, "probes", f"shipped-{name}", 0, f"{AFF_PROBE} --load weights/affnist_{name}.npz --digits mnist "
             "--threads 1 --quiet", 3) for name in ("shared", "gap")),
    *(Result(NORB, "alive", "caps", seed, f"{ALIVE} --load {{checkpoint}} --threads 1", 1,
             f"{NORB}/paper-azimuth/caps-{seed}") for seed in range(5))]
SMALL = {                          # what makes a command small; what is given twice counts as last
    "nearest.py": "--n-known 200 --n-test 100 --digits auto",
    "probe_affnist": "--n-test 20 --digits auto",
    "--only alive": "--n-test 60",
    "--load": "--n-test 64 --digits auto"}


def all_flags(experiment, flags):
    """The runs of digits are on MNIST, unless they say otherwise"""
    return flags if experiment == NORB or "--digits" in flags else f"{flags} --digits mnist"


def results_of(table):
    return [Result(experiment, name, setting, seed, all_flags(experiment, flags), minutes)
            for experiment, name, setting, flags, seeds, minutes in table for seed in seeds]


RESULTS = results_of(RUNS) + LOOKS
CAPTIONS = {                       # of each table, in the lab book
    (AFF, "margins"): "How many px of background around the canvas suit which network: on validation digits.",
    (AFF, "papers-free"): "Small networks of the paper's own kind, after 96,000 moved digits.",
    (AFF, "papers-anywhere"): "The same, trained on digits placed anywhere that their ink fits.",
    (AFF, "papers"): "The same, stopped alike at 98% of moved validation digits.",
    (AFF, "papers-free-off"): "The paper's capsules, trained with routing and tested without it.",
    (AFF, "free"): "Networks on one trunk, after 48,000 moved digits.",
    (AFF, "free-off"): "Capsules of that trunk, trained with routing and tested without it.",
    (AFF, "steps"): "From a CNN of ten vectors to a capsule network by parts; what is taken from that one.",
    (AFF, "few-10"): "Trained on 10 digits of each class.",
    (AFF, "long"): "After 240,000 moved digits: the networks that come along.",
    (AFF, "mnist"): "The plain task: MNIST's test images.",
    (AFF, "edge"): "The same networks without padding.",
    (AFF, "nearest"): "Nearest neighbours in pixels.",
    (AFF, "weights"): "The networks that come along, from their files.",
    (AFF, "probes"): "Trained networks shown adversarial steps, turned digits, what is no digit; linear maps.",
    (MULTI, "main"): "Capsule networks, on fresh pairs.",
    (MULTI, "control"): "What stands beside them: CNNs, one routing iteration, no reconstruction.",
    (MULTI, "parts"): "A network no part of which sees more than half a digit.",
    (MULTI, "main-off"): "Trained with routing and tested without it.",
    (MULTI, "parts-off"): "The same, where no part sees more than half a digit.",
    (MULTI, "weights"): "The network that comes along, from its file.",
    (MULTI, "nearest"): "The nearest of the training pairs, in pixels.",
    **{(NORB, f"wide-{split}"): f"Vector capsules and global averages, new {split}s." for split in SPLITS},
    **{(NORB, f"paper-{split}"): f"The paper's matrix capsules and its kind of CNN, new {split}s." for split in SPLITS},
    **{(NORB, f"toys{draw}-{split}"): f"The same networks on draw {draw} of the toys, new {split}s."
       for draw in DRAWS for split in SPLITS},
    **{(NORB, f"heads-{split}"): f"Heads of one size on one trunk, new {split}s." for split in SPLITS},
    (NORB, "parts"): "What is taken from vector capsules, or given to a CNN.",
    (NORB, "standard"): "The standard task: new toys.",
    (NORB, "alive"): "How active EM capsules are that see blank ground, and those that see ink."}
AFF_SHIPPED = "weights/affnist_shared.npz weights/affnist_gap.npz"
TABLES_OF = {name: sorted(f"results/{name}/{path.name}" for path in (ROOT / "results" / name).glob("*.jsonl"))
             for name in EXPERIMENTS}
FIGURES = {                        # name -> command, what it draws from beside its own script, minutes of two cores
    "multimnist": (f"{DRAW} --load --digits mnist && {DRAW} --results", [f"{MULTI}.py", SHIPPED, *TABLES_OF[MULTI]], 1),
    "multimnist-page": (f"{DRAW} --image viz/{MULTI}/page.png --outdir viz/{MULTI}",
                        [f"{MULTI}.py", SHIPPED, f"viz/{MULTI}/page.png"], 1),
    "smallnorb": (f"python3 visualize_{NORB}.py --load --results",
                  [f"{NORB}.py", "weights/smallnorb_caps.npz", *TABLES_OF[NORB]], 1),
    "affnist": (f"python3 visualize_{AFF}.py --load --n-test 1000 --digits mnist --results",
                [f"{AFF}.py", "weights/affnist_shared.npz", *TABLES_OF[AFF]], 1),
    "findings": ("python3 results/render.py --pictures", sum(TABLES_OF.values(), []), 1)}
FILMS = {
    "multimnist": (f"python3 make_{MULTI}_gif.py {QUICK} --n-val 500 --snapshot-every 75",
                   [f"{MULTI}.py", SHIPPED], 3),
    "smallnorb": (f"python3 make_{NORB}_gif.py --n-test 600", [f"{NORB}.py"], 3),
    "affnist": (f"python3 make_{AFF}_gif.py --load {AFF_SHIPPED}", [f"{AFF}.py", *AFF_SHIPPED.split()], 1)}
WEIGHTS = {path: next(result for result in RESULTS if result.name == f"{name}-0") for path, name in (
    (SHIPPED, f"{MULTI}/main/residual"), ("weights/smallnorb_capsules.npz", f"{NORB}/wide-azimuth/dynamic-shared"),
    ("weights/smallnorb_gap.npz", f"{NORB}/wide-azimuth/gap"),
    ("weights/smallnorb_caps.npz", f"{NORB}/paper-azimuth/caps"), ("weights/affnist_shared.npz", f"{AFF}/long/shared"),
    ("weights/affnist_gap.npz", f"{AFF}/long/gap"),
    *((f"weights/affnist_small_{name}.npz", f"{AFF}/papers-free/{name}") for name in ("caps", "cnn", "dense")))}


def weights_command(path, result, checkpoint):
    """What makes a file of weights of a run's checkpoint; small ones, for the page, are slimmed"""
    if "small_" in path:
        return f"python3 workflow/slim.py {checkpoint} {path}"
    return f"python3 {result.experiment}.py --load {checkpoint} --n-test 1 --out-weights {path}"


def digest(*paths):
    """Of those of some files of the project that are there, together"""
    there = [ROOT / path for path in paths if (ROOT / path).exists()]
    return hashlib.sha256(b"".join(path.read_bytes() for path in there)).hexdigest()


def toy_line(experiment):
    """An experiment and the flags that make it small"""
    return shlex.join(map(str, (experiment, *(word for pair in TOY.get(experiment, {}).items() for word in pair))))


def shell_command(result, path, toy=False, checkpoint=""):
    """The command that makes a result and writes it to path; toy: in seconds; checkpoint: of the run it is after"""
    if "python3 " in result.flags:
        small = next(f" {flags}" for part, flags in SMALL.items() if part in result.flags) if toy else ""
        folder = f" --quiet --outdir {shlex.quote(str(Path(path).parent))}" if "visualize" in result.flags else ""
        command = result.flags.replace("{checkpoint}", shlex.quote(checkpoint))
        return f"{command}{small}{folder} --out-json {shlex.quote(path)}"
    words = shlex.split(result.flags)
    if toy:
        small = TOY.get(result.experiment, {"--n-epochs": 1})
        kept = [k for k, word in enumerate(words) if not {word, *words[max(0, k - 1):k]} & small.keys()]
        words = [words[k] for k in kept] + [str(word) for pair in small.items() for word in pair]
    words += ["--seed", result.seed, "--threads", 1, "--quiet", "--out-json", path]
    words += ["--checkpoint", path.replace(".json", ".npz")]
    return f"python3 {result.experiment}.py {shlex.join(map(str, words))}"
