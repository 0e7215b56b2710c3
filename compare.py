#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0"]
# ///
"""Compare variants of an experiment: train each with several seeds, or evaluate trained networks, and print a table of
means with 95% t intervals, and of differences that are paired by seed.

A variant is a model (--model) or any flags of the experiment's script (--variant); with both, every model has every
variant. Every run is a process of the script, with the flags that are given here and do not belong to this program.
With several models, a flag that one of them does not have is left out for it. Every run has a folder in runs/compare/:
finished ones are kept, and an interrupted one resumes, if the same command is given again. Another flag, or a change of
the script or of the data that a flag names, makes a new run.

    python3 compare.py affnist_capsnet --model capsnet-shared cnn-gap --n-seeds 3      # half an hour on two cores
    python3 compare.py multimnist_capsnet --variant "--routing-iters 3" --variant "--routing-iters 1" --n-seeds 3
    python3 compare.py --load weights/affnist_capsnet-shared.npz weights/affnist_cnn-gap.npz      # a minute
"""
import hashlib
import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
import lab
from lab import running
from lab.files import check_writable, home_path, write_json
from lab.messages import InputError, Parser, Progress, counted, flag_name, n_cores, run_cli
from lab.statistics import compare, comparison_table

FOLDER = Path("runs", "compare")   # below the current folder
METRICS = "accuracy", "exact_match", "at_least_one"    # how the keys of proportions end
VIEWS = "familiar", "novel", "drop"                    # other keys of proportions
OURS = {                           # flags of a script that this program sets, and what to give instead
    "--seed": "--first-seed or, with --load, none", "--outdir": ""}


class Arm(NamedTuple):
    """What is trained with every seed"""
    name: str                      # in the table
    words: list                    # its flags of the script


def split_flags(words):
    """Return the script's flags among some words as a list of lists: a flag with its values. Raise InputError for one
    that this program sets, or a word that belongs to no flag."""
    flags = []
    for word in words:
        if word.startswith("--"):
            flags.append([word])
        elif flags:
            flags[-1].append(word)
        else:
            raise InputError(f"{word}: belongs to no flag. See --help")
    for name in (flag.split("=")[0] for flag, *_ in flags):
        if name in OURS:
            raise InputError(f"{name}: this program sets it for each run. " + (
                f"Give {OURS[name]}" if OURS[name] else "Leave it out"))
    return flags


def settings_of(experiment):
    """Return the metadata of an experiment's settings, {flag: dict}"""
    fields = importlib.import_module(experiment).Config.__dataclass_fields__.values()
    return {flag: f.metadata for f in fields if "help" in f.metadata
            for flag in (flag_name(f.name), *f.metadata.get("alias", "").split())}


def flags_for(model, models, flags, settings):
    """Return those of some flags that a model has, as a list of words; one that no model has stays, and its script
    says so"""
    def has(one, flag):
        only = settings.get(flag.split("=")[0].replace("--no-", "--"), {}).get("only", {})
        return one in only.get("model", [one])

    words = []
    for flag in flags:
        if has(model, flag[0]) or not any(has(one, flag[0]) for one in models):
            words += flag
    return words


def arms_of(experiment, models, variants, flags):
    """Return the Arms of some models and variants, texts of flags. A variant is named by those of its flags that not
    all variants have"""
    settings = settings_of(experiment)
    known = settings["--model"]["choices"]
    default_model = importlib.import_module(experiment).Config.model
    for model in models:
        if model not in known:
            raise InputError(f"--model {model}: {experiment} has no such model. Give some of {', '.join(known)}")
    split = [split_flags(shlex.split(text)) for text in variants]
    shared = [flag for flag in split[0] if all(flag in other for other in split)]
    arms = []
    for model in models or [None]:
        for variant in split:
            own = [flag for flag in variant if flag not in shared]
            if model is not None:
                own = [flag for flag in own if flags_for(model, models, [flag], settings)]
            name = " ".join(" ".join(flag).removeprefix("--") for flag in own)
            words = [word for flag in (*flags, *variant) for word in flag]
            if len(models) > 1:
                name = f"{model} {name}".strip()
            if model is not None:
                words = ["--model", model, *flags_for(model, models, [*flags, *variant], settings)]
            elif "--model" not in words:
                words = ["--model", default_model, *words]
            if words not in [arm.words for arm in arms]:                # a model may lack what a variant changes
                arms.append(Arm(name or model or "default", words))
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise InputError(f"--variant: {max(names, key=names.count)} is given twice. Give each variant once")
    return arms


def digest_of(experiment, words):
    """Return what names a run: a digest of its script, of its flags, without those that do not change its numbers, and
    of the files that these name, by their sizes and times"""
    script = (lab.ROOT / f"{experiment}.py").read_bytes()
    places = [home_path(word.partition("=")[2] or after) for word, after in zip(words, [*words[1:], ""])
              if word.partition("=")[0].endswith(("-dir", "--init"))]
    files = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for place in places for path in sorted(
        place.rglob("*") if place.is_dir() else place.parent.glob(place.name + "*")) if path.is_file()]
    return hashlib.sha256(script + json.dumps([words, files]).encode()).hexdigest()[:10]


def folder_of(experiment, place, words, file=""):
    """Return the folder of a run with some flags, as words. file: a digest of the file that it loads"""
    place = re.sub(r"[^\w.=-]+", "-", place)
    return FOLDER / experiment / f"{place}-{digest_of(experiment, [*words, file])}"


def training_jobs(experiment, arms, seeds, threads):
    """Return {(name of an arm, seed): Job} of all trainings, seed by seed, so that an interrupted comparison is a fair
    one"""
    jobs = {}
    for seed in seeds:
        for arm in arms:
            words = [*arm.words, "--seed", str(seed)]
            folder = folder_of(experiment, f"{arm.name}-seed{seed}", words)
            command = [lab.ROOT / f"{experiment}.py", *words, "--threads", threads, "--outdir", folder]
            jobs[arm.name, seed] = running.Job(f"{arm.name}, seed {seed}", command, folder)
    return jobs


def loading_jobs(experiment, files, flags, threads):
    """Return the experiment and {file: Job} of the evaluations of some weights files"""
    weights = [file / "weights.npz" if file.is_dir() else file for file in files]
    if len(set(map(Path.resolve, weights))) < len(files):
        raise InputError("--load: a file is given twice. Give each file once")
    jobs = {}
    for file in files:
        found = lab.experiment_of(file)
        if found is None:
            fault = "not a weights file of an experiment" if file.exists() else "no such file"
            raise InputError(f"--load {file}: {fault}. Give a weights file or a run's folder")
        if experiment not in (None, found):
            raise InputError(f"--load {file}: is of {found}, not of {experiment}. Compare networks of one experiment")
        experiment = found
        words = ["--load", str(file.absolute()), *(word for flag in flags for word in flag)]
        digest = importlib.import_module(found).digest_of(file)
        folder = folder_of(found, f"load-{short_name(file)}", words, digest)
        command = [lab.ROOT / f"{found}.py", *words, "--threads", threads]
        jobs[file] = running.Job(str(file), [*command, "--out-json", folder / "metrics.json"], folder)
    return experiment, jobs


def names_of(results):
    """Return {file: (name, seed)} of loaded networks: their models, if files of one model differ in the seed only, else
    the files' names"""
    kinds = {json.dumps([result["config"] | {"seed": 0}, result["trained_on"]], sort_keys=True)
             for result in results.values()}
    named = {file: (result["config"]["model"], result["loaded"]["trained_seed"]) for file, result in results.items()}
    if len(kinds) == len({model for model, _ in named.values()}) and len(set(named.values())) == len(named):
        return named
    short = {file: short_name(file) for file in results}
    shown = {file: name if list(short.values()).count(name) == 1 else str(file) for file, name in short.items()}
    return {file: (shown[file], seed) for file, (_, seed) in named.items()}


def short_name(place):
    """Return the name of a run's folder, or that of a weights file without its ending"""
    if place.is_dir():
        return place.resolve().name
    if place.name == "weights.npz":
        return place.resolve().parent.name
    return place.stem


def values_of(result):
    """Return the numbers of a result that the table shows, {key: number}: n_params and the metrics"""
    found = {key: float(value) for key, value in result.items()
             if (key.endswith(METRICS) or key in VIEWS) and isinstance(value, int | float)}
    return {"n_params": result["n_params"]} | found


def main():
    parser = Parser(description=__doc__)
    parser.usage = ("%(prog)s EXPERIMENT [--model MODEL ...] [--variant FLAGS ...] [--n-seeds K] [options] "
                    "[flags of the script]")
    known = lab.experiments()
    parser.epilog = f"EXPERIMENT: one of {', '.join(known)}. With --load the files say it."
    parser.add_argument("--model", nargs="+", metavar="MODEL", help="models to train")
    parser.add_argument("--variant", action="append", metavar="FLAGS", help="flags of the script, in quotes; given for "
                        'each variant, as in --variant "--routing-iters 3" --variant "--routing-iters 1"')
    parser.add_argument("--n-seeds", type=int, default=1, metavar="K", help="seeds of each model (default: 1)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="the first seed (default: 0)")
    parser.add_argument("--load", nargs="+", action="extend", type=Path, metavar="PLACE", help="evaluate these trained "
                        "networks instead")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs side by side, which share the cores "
                        "(default: 1)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads of each run (default: the cores, "
                        "divided by --jobs)")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write the table's numbers to this file; -: to "
                        "standard output, and nothing else")
    parser.add_argument("--quiet", action="store_true", help="print no progress and no table")
    words = sys.argv[1:]               # not argparse's: it would take the value of an unknown flag for EXPERIMENT
    experiment = words.pop(0).removesuffix(".py") if words and not words[0].startswith("-") else None
    while "--variant" in words[:-1]:   # nor would it take a text that begins with -- for a value
        k = words.index("--variant")
        words[k:k + 2] = [f"--variant={words[k + 1]}"]
    args, others = parser.parse_known_args(words)
    flags = split_flags(others)
    if experiment not in (None, *known):
        raise InputError(f"{experiment}: no such experiment. Give one of {', '.join(known)}")
    is_training = bool(args.model or args.variant)
    if is_training == bool(args.load) or (is_training and not experiment):
        raise InputError("give EXPERIMENT and --model or --variant to train, or --load to evaluate trained networks. "
                         "See --help")
    for flag, value, low, high in (
            ("--n-seeds", args.n_seeds, 1, 1000), ("--jobs", args.jobs, 1, 64), ("--threads", args.threads, 0, 256),
            ("--first-seed", args.first_seed, 0, 2 ** 32 - args.n_seeds)):
        if not low <= value <= high:
            raise InputError(f"{flag} {value}: must be between {low} and {high:,}")
    if args.load and (args.n_seeds, args.first_seed) != (1, 0):
        raise InputError("--n-seeds and --first-seed are for training: with --load the files say. Leave them out")
    check_writable(args.out_json)
    progress, threads = Progress(args.quiet or args.out_json == "-"), args.threads or max(1, n_cores() // args.jobs)
    if args.load:
        experiment, jobs = loading_jobs(experiment, args.load, flags, threads)
    else:
        seeds = range(args.first_seed, args.first_seed + args.n_seeds)
        arms = arms_of(experiment, list(dict.fromkeys(args.model or [])), args.variant or [""], flags)
        jobs = training_jobs(experiment, arms, seeds, threads)
    n_missing = len(running.missing(jobs.values()))
    progress.say(f"{n_missing} of {counted(len(jobs), 'run')} to do, {args.jobs} at a time, with "
                 f"{counted(threads, 'thread')} each; interrupted, the same command resumes" if n_missing else
                 f"all of {counted(len(jobs), 'run')} are in {FOLDER / experiment}")
    running.run(list(jobs.values()), args.jobs, progress.say)
    results = {key: running.read_result(job.path, experiment) for key, job in jobs.items()}
    name = importlib.import_module(experiment).data_name
    data = list(dict.fromkeys(name(result["source"], result["trained_on"]) for result in results.values()))
    if len({result["source"] for result in results.values()}) > 1:
        raise InputError(f"these runs are of different data: {'; '.join(data)}. Say which, by a flag of the script")
    names = names_of(results) if args.load else {key: key for key in results}
    summary = compare([(*names[key], values_of(result)) for key, result in results.items()], signed=("drop",))
    progress.say(f"\nTest samples of {', '.join(data)}\n{comparison_table(summary)}")
    if args.out_json:
        write_json(args.out_json, {"experiment": experiment, "flags": [word for flag in flags for word in flag],
                                   "data": data, **summary, "runs": [str(job.folder) for job in jobs.values()]})
        progress.say(f"wrote {args.out_json}")


if __name__ == "__main__":
    run_cli(main)
