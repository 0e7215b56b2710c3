#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""List the claims of the papers that are tested here, with the papers' numbers and ours, or check some of them: train
every network that a claim compares, for one seed or several, and print each result beside the published ones.

A run with a published seed should give the published number to the last digit on the same NumPy and processor.
Elsewhere it rounds differently, and counts as a new seed if it is not within 0.2 points (of an MSE: 2%). A new
seed should lie within the 95% prediction interval of the published seeds: mean +- t * s * sqrt(1 + 1/n), with their
standard deviation s and Student's t. One published seed says nothing of others.

    python3 reproduce.py                                           # the claims: seconds
    python3 reproduce.py shapes                                    # train one seed of every network: a minute
    python3 reproduce.py affnist-translation --seeds 0-4 --jobs 2  # five seeds: five hours on two cores
    python3 reproduce.py affnist-translation --from-results        # compute it from results/, without training
    python3 reproduce.py --from-results                            # all claims: seconds
    python3 reproduce.py --quick                                   # what weights/ can show: ten minutes
"""
import difflib
import hashlib
import importlib
import os
import re
import shlex
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "results"), str(ROOT / "workflow")]
import multimnist_capsnet as capsnet  # before numpy: it sets the number of BLAS threads
from lab import running
from lab.files import home_path
from lab.messages import InputError, Parser, Progress, counted, flag_name, n_cores, run_cli
from lab.statistics import prediction_interval

import claims
import render
import result_files
import runs
from runs import AFF, MULTI, NORB

FOLDER = Path("runs", "reproduce")  # below the current folder; its subfolders are generations of tests/golden.json
QUICK_MINUTES = 3                  # of one core: what --quick trains at most for a claim
POINTS, SHARE = 0.002, 0.02        # how far the same seed may lie from its published number: fractions, other numbers


# -------------------------------------------------------------- what a claim needs

def draws(mark):
    """Return a measure's mark as one mark for each draw of the data (TABLE+TABLE/SETTING), which is itself for one"""
    names = re.search(r" ((?:[^ ,/]+\+)+[^ ,/]+)/", mark)
    return [mark.replace(names[1], table) for table in names[1].split("+")] if names else [mark]


def arms(measures):
    """Return (experiment, TABLE/SETTING) of all settings that some measures need, in their order"""
    found = {}
    for measure in measures:
        for one_draw in draws(measure.mark):
            experiment, one, other, *_ = render.asked(one_draw)
            found |= {(experiment, setting): None for setting in (one, other) if setting}
    return list(found)


def planned(experiment, setting, seed):
    """Return the Results that make a setting's result for a seed, those whose networks are needed first. A setting
    that is measured only on a file in weights/ has one result, whatever the seed."""
    known = {result.seed: result for result in render.PLANNED[experiment, setting]}
    result = known.get(seed) or max(known.values(), key=lambda each: bool(each.after))  # else one of a shipped file
    if result.after:
        needed_runs, names = [], []
        for name in result.after:
            *_, table, run = name.split("/")
            setting, _, its_seed = run.rpartition("-")
            # another network's seed may differ from the result's
            its_seed = seed + int(its_seed) - result.seed
            needed_runs += planned(experiment, f"{table}/{setting}", its_seed)
            names.append(needed_runs[-1].name)
        return [*needed_runs, result._replace(seed=seed, after=tuple(names))]
    if not result.is_training and " --seed " not in result.flags:
        return [result]
    flags = re.sub(r" --seed \d+", f" --seed {seed}", result.flags)
    return [result._replace(seed=seed, flags=flags)]


EVALUATED = {MULTI: 1.15, NORB: 1.2, AFF: 1.4}         # measured: time with validation and tests / time of training


def minutes(result, published):
    """Return how many minutes of one core a Result takes: the median of the published runs on one thread, else the run
    list's. Some were made on a busy machine."""
    runs_of = published.runs(result.experiment, f"{result.table}/{result.setting}").values()
    found = [run["seconds_train"] for run in runs_of if run["config"].get("threads") == 1]
    if not (result.is_training and found):
        return result.minutes
    return EVALUATED[result.experiment] * statistics.median(found) / 60


def needed(measures, seeds):
    """Return {name: Result} of all runs that some measures need for some seeds, in an order that they can be made in"""
    return {result.name: result for seed in seeds for arm in arms(measures) for result in planned(*arm, seed)}


def measures_of(claim, args):
    """Return the comparisons of a claim that the flags ask for"""
    return args.quick and claim.quick or claims.comparisons(claim)[:1 if args.quick or args.headline else None]


def duration(amount):
    return f"{amount / 60:.1f} h" if amount >= 90 else f"{max(1, round(amount))} min"


# -------------------------------------------------------------- running

def made(result):
    """Return the folder in which a Result is written"""
    return FOLDER / str(result_files.since(result) or "real") / result.name


def job_of(name, results, threads):
    """Return the Job of one of some Results, {name: Result}. The bits are the same for any number of threads."""
    result = results[name]
    folder = made(result).absolute()
    before = [made(results[run]).absolute() for run in result.after]
    command = runs.shell_command(result, folder, after=before).replace(" --quiet", "")
    words = shlex.split(command.replace("--threads 1 ", f"--threads {threads} "))[1:]
    return running.Job(name, words, folder, result.after)


def make(results, jobs, published, data_dir, say):
    """Make some Results, {name: Result}, `jobs` side by side. Those that are there stay; a run that was interrupted
    resumes. Raise InputError as soon as one fails: the others are stopped."""
    missing = {name: result for name, result in results.items() if not (made(result) / "metrics.json").exists()}
    total = sum(minutes(result, published) for result in missing.values())
    threads = max(1, n_cores() // jobs)
    say(f"{len(missing)} of {counted(len(results), 'run')} to do" + (
        f", about {duration(total)} of one core; {jobs} at a time, with {counted(threads, 'thread')} each. "
        "Interrupted, the same command resumes." if missing else f": they are in {FOLDER}"))
    check_mnist(missing.values(), data_dir)
    running.run([job_of(name, results, threads) for name in missing], jobs, say, ROOT)


def check_mnist(results, data_dir):
    """Raise InputError, before anything is trained, if some Results need MNIST and it cannot be had"""
    if any("--digits mnist" in runs.shell_command(result, "") for result in results):
        try:
            source = capsnet.load_data(capsnet.Config(digits="mnist", data_dir=data_dir))["source"]
        except capsnet.InputError as error:
            fault = str(error).split(". Give")[0]
            raise InputError(f"{fault}. Give the folder of MNIST's four files as --data-dir") from None
        if source != "mnist":
            raise InputError(f"{data_dir or '$MNIST_DIR'}: holds other images than MNIST's, on which this claim was "
                             "tested. Give the folder of MNIST's four files as --data-dir")


def read_line(result):
    """Return the result that make() has made of a Result, a dict. Raise InputError if its file is damaged."""
    return running.read_result(made(result) / "metrics.json", result.experiment)


def read_made(results):
    """Return the results that make() has made, as render.Results"""
    lines = {}
    for name, result in results.items():
        line = read_line(result)
        lines[name] = {"setting": result.setting, "seed": result.seed,
                       "generation": result_files.since(result)} | line
    return render.Results(FOLDER, lines)


# -------------------------------------------------------------- comparison with the published results

def agreement(seed, value, published, fraction):
    """Return whether one value agrees with the published ones, {seed: value}, None if that cannot be said, and a word
    on it. fraction: whether it is an accuracy or another number between 0 and 1."""
    mean, half = prediction_interval(list(published.values()))
    if seed in published:
        if value == published[seed]:
            return True, "identical"
        near = abs(value - published[seed])
        if near <= (POINTS if fraction else SHARE * abs(published[seed])):
            return True, "within 0.2 points" if fraction else "within 2%"
    if half != half:
        far = f"differs by more than {'0.2 points' if fraction else '2%'}"
        return (False, far) if seed in published else (None, "not judged: one published seed says nothing of others")
    inside = abs(value - mean) <= half
    return inside, f"{'within' if inside else 'outside'} the 95% prediction interval" + (
        ", not the published number" if seed in published else "")


def shown(values, mark):
    """Return the mean of some numbers as the documents write it"""
    experiment, one, other, key, styles = render.asked(mark)
    return render.number_text(values, styles, signed=bool(other))


def compare(measures, ours, published, say):
    """Print our results beside the published ones: of each measure its networks, then the difference. Return how many
    of the measures agree, and how many were compared"""
    agreeing = compared = 0
    for _, label, mark in measures:
        say(f"\n{label}")
        for name, part, counts in (row for one_draw in draws(mark) for row in rows_of(one_draw)):
            experiment, one, other, key, _ = render.asked(part)
            known, found = (results.by_seed(experiment, one, other, key) for results in (published, ours))
            if not found:
                say(f"  {name}: has not reached the accuracy asked for, or the two have no seed in common")
            for seed, value in found.items():
                text = f"  {name:34}  yours {shown([value], part):>8} (seed {seed})"
                if not known:
                    say(f"{text}  published: none yet")
                    continue
                agrees, word = agreement(seed, value, known, not key.endswith("mse"))
                if agrees is not None:
                    agreeing, compared = agreeing + agrees * counts, compared + counts
                if seed in known and word != "identical":
                    line = published.runs(experiment, one)[seed]
                    word += f" (made on {line['machine']['processor']}, NumPy {line['versions']['numpy']})"
                mean, half = prediction_interval(list(known.values()))
                if half == half and word != "identical":
                    word += f"; 95% of new seeds lie in {shown([mean - half], part)} to {shown([mean + half], part)}"
                if other and value * mean:
                    word += f"; its sign is {'that' if value * mean > 0 else 'not that'} of the published mean"
                same = f", this seed {shown([known[seed]], part)}" if seed in known else ""
                say(f"{text}  published {shown(list(known.values()), part)} (n = {len(known)}){same}\n{'':38}{word}")
    return agreeing, compared


def rows_of(mark):
    """Return (name, mark, whether it is the measure itself) of the settings that a measure compares, and of their
    difference"""
    what, *rest = mark.split(", ")
    experiment, one, other, key, _ = render.asked(mark)
    first, _, second = key.partition(" vs ")
    if not other or " once " in key or " when " in key:         # the epoch of the first depends on the second network
        return [("difference" if other else one, mark, True)]
    short, styles = what.partition(" ")[0], ["percent" if style == "points" else style for style in rest[1:]]
    return [(one, ", ".join([f"{short} {one}", first, *styles]), False),
            (other, ", ".join([f"{short} {other}", second or first, *styles]), False), ("difference", mark, True)]


def print_published(measures, published, say, deciding=()):
    """Print some measures, computed from the published results. deciding: those of a claim's tests that
    are the nearest, which get a star"""
    for measure in measures:
        star = "*" if measure in deciding else " "
        text = f"{star} {measure.label}: {published_number(measure, published)}"
        if isinstance(measure, claims.Test):
            planned_seeds = render.with_n(published, measure)
            text = f"{star} {measure.label}: {planned_seeds}; all seeds {published_number(measure, published)}"
        if set(arms([measure])) & published.stale:
            text += ", stale: the code has changed since"
        say(text)


def published_number(measure, published):
    """Return a measure computed from all seeds of the published results, as text"""
    experiment, one, other, key, styles = render.asked(measure.mark)
    values = published.samples(experiment, one, other, key)
    number = render.value(published, measure.mark)
    if not values:
        return number
    unit = "sets of toys" if "+" in measure.mark else "seeds" if len(values) > 1 else "seed"
    points = " points" if "points" in styles else ""
    return f"{number}{points} (n = {len(values)} {unit})"


LEGEND = ("\n*: the nearest tests; those of them that qualify decide. A test has two numbers. The first is the one "
          "that decides: of its planned seeds, with toys in the interval where there are few. The second is of all "
          "seeds, over seeds alone.\npoints: percentage points. +-: half of the 95% CI over n seeds; A to B: range "
          "of the seeds. docs/reference/claims.md says what verdicts mean.")


def print_claim(claim, published, say):
    """Print what the paper says and our verdict, which a finding of our own does not have"""
    say(f"\n{claim.name}: {claim.sentence}\n  paper: {claim.paper}")
    if claim.tests:
        say(f"  our verdict: {render.verdict(published, claim.name)}, {render.reason(published, claim.name)}\n"
            f"  tests for / against / none found / open: {render.counted(published, claim.name)}")
        if strongest := render.strongest_line(published, claim.name):
            say(f"  {strongest}")


def nearest(claim):
    """Return the tests of a claim that are the nearest to the paper's; none of a finding of our own"""
    return render.rule.nearest(claim.tests) if claim.tests else []


def seeds_shown(claim, published):
    """Return the published seeds' values of a claim's headline, as text"""
    found = []
    for one_draw in draws(claims.comparisons(claim)[0].mark):
        experiment, one, other, key, _ = render.asked(one_draw)
        found += [shown([value], one_draw) for value in published.by_seed(experiment, one, other, key).values()]
    return ", ".join(found) or "none yet"


# -------------------------------------------------------------- the papers' own data

REAL = {                           # name -> flag of the folder, paper, (experiment, setting, key, paper's number)
    "smallnorb-real": ("norb_dir", f"smallNORB ({claims.HINTON}, Table 2)", [
        (NORB, f"paper-{angle}/{model}", key, number) for angle, table in (
            ("azimuth", {"matrix-capsnet": (0.963, 0.865), "cnn": (0.963, 0.800), "cnn-bn": (None, None),
                         "cnn-dropout": (None, None)}),
            ("elevation", {"matrix-capsnet": (0.957, 0.877), "cnn": (0.957, 0.822), "cnn-bn": (None, None),
                           "cnn-dropout": (None, None)}))
        for model, numbers in table.items() for key, number in zip(("familiar", "novel"), numbers)]),
    "affnist-real": ("affnist_dir", f"affNIST ({claims.SABOUR}, section 5.2)", [
        (AFF, f"matched-accuracy/{model}", "real_affine_accuracy", number)
        for model, number in (("capsnet", 0.79), ("cnn", 0.66), ("cnn-dense", None))])}


def run_real(name, folder, seeds, jobs, published, data_dir, say):
    """Train the networks of a paper's table on its own data, in a folder of the user's, and print its numbers beside.
    Results are kept for each state of the folder's files and of the code: in another they are made anew."""
    flag, paper, rows = REAL[name]
    if not folder.is_dir():
        raise InputError(f"{flag_name(flag)} {folder}: no such folder. Give the folder of the data's files")
    module = importlib.import_module(rows[0][0])
    try:                                                                # now, not when the first run ends
        sum(1 for _ in (module.load_norb if flag == "norb_dir" else module.read_affnist)(str(folder)))
    except module.InputError as error:
        raise InputError(str(error)) from None
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))]
    results, keys = {}, {}
    for seed in seeds:
        for experiment, setting, _, _ in rows:
            result, = planned(experiment, setting, seed)
            data = " --data smallnorb" if experiment == NORB else ""
            state = hashlib.sha256(repr((files, result_files.since(result))).encode()).hexdigest()[:8]
            result = result._replace(flags=f"{result.flags}{data} {flag_name(flag)} {shlex.quote(str(folder))}",
                                     table=f"{name}-{result.table}-{state}")
            results[result.name] = result
            keys.setdefault((experiment, setting), {})[result.name] = result
    say(f"{name}: {paper}; networks and training as on our own images, no result is published here")
    make(results, jobs, published, data_dir, say)
    for experiment, setting, key, number in rows:
        lines = [read_line(result) for result in keys[experiment, setting].values()]
        values = [line[key] for line in lines if render.reached(line)]
        if not values:
            say(f"  {setting:32}  {key:22}  none of {len(lines)} reached --stop-at")
            continue
        say(f"  {setting:32}  {key:22}  yours {render.number_text(values, ('percent',)):>14}, n = {len(values)}; paper "
            + (f"{100 * number:.1f}%" if number else "none"))


# -------------------------------------------------------------- command line

def seeds_of(text):
    """Return the seeds of a text such as 0-4 or 0,2,7"""
    match = [re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part) for part in text.split(",")]
    ranges = [range(int(m[1]), int(m[2] or m[1]) + 1) for m in match if m]
    if not all(match) or not 0 < sum(map(len, ranges)) <= 1000:
        raise InputError(f"--seeds {text}: must be up to 1,000 seeds such as 0, 0-4 or 0,2,7")
    return list(dict.fromkeys(seed for some in ranges for seed in some))


def table(published, say):
    """Print all claims: the paper's number, ours, the verdict, and what a check of one seed takes"""
    for claim in claims.CLAIMS:
        headline, every = (sum(minutes(result, published) for result in needed(measures, [0]).values())
                           for measures in (claims.comparisons(claim)[:1], claims.comparisons(claim)))
        print_claim(claim, published, say)
        print_published(claims.comparisons(claim)[:1], published, say, nearest(claim))
        more = len(claims.comparisons(claim)) - 1
        with_more = f"; with {counted(more, 'more comparison')} {duration(every)}" if more > 0 else ""
        say(f"  one seed: {duration(headline)} of one core{with_more}")
    say(f"{LEGEND}\n\nOn the papers' own data, if you have the files:")
    for name, (flag, paper, _) in REAL.items():
        say(f"  {name} {flag_name(flag)} DIR: {paper}")


def check_flags(args):
    """Raise InputError for a flag that has no effect beside the others"""
    training, real = {"--seeds", "--jobs", "--data-dir"}, set(args.claims) & set(REAL)
    given = {flag for flag, value in {
        "--seeds": args.seeds, "--jobs": args.jobs, "--data-dir": args.data_dir, "--headline": args.headline,
        "--quick": args.quick, "--from-results": args.from_results}.items() if value}
    for where, holds, lost in (
            ("--from-results, which trains nothing", args.from_results, training | {"--quick"}),
            ("--quick, which chooses its comparisons", args.quick, {"--headline"}),
            (", ".join(real), real, {"--from-results", "--quick", "--headline"})):
        if holds and given & lost:
            raise InputError(f"{min(given & lost)} has no effect with {where}. Leave it out")
    if given and not (args.claims or args.quick or args.from_results):
        headline = " --headline" if args.headline else ""
        raise InputError(f"{min(given)}: of which claim? Name one, as in: python3 reproduce.py shapes{headline}")


def main():
    parser = Parser(description=__doc__)
    parser.usage = "%(prog)s [options] [CLAIM ...]"
    names = [*claims.BY_NAME, *REAL]
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="names of claims; without any, all are listed")
    parser.add_argument("--seeds", default="", metavar="SEEDS", help="seeds to train, such as 0-4 or 0,2 (default: 0)")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs side by side, which share the cores (default: 1)")
    parser.add_argument("--from-results", action="store_true", help="compute the claims from results/, do not train; "
                        "all claims if none is named")
    parser.add_argument("--headline", action="store_true", help="the first of the nearest tests of each "
                        "claim, not all")
    parser.add_argument("--quick", action="store_true", help="check on the networks in weights/, or train one seed if "
                        f"it takes at most {QUICK_MINUTES} minutes; of all claims if none is named")
    parser.add_argument("--data-dir", "--mnist-dir", default="", metavar="DIR", help="folder with MNIST's four files")
    parser.add_argument("--norb-dir", default="", metavar="DIR", help="folder with smallNORB's six files, for "
                        "smallnorb-real")
    parser.add_argument("--affnist-dir", default="", metavar="DIR", help="folder with affNIST's test_batches, for "
                        "affnist-real (needs SciPy)")
    args = parser.parse_args()
    for name in args.claims:
        if name not in names:
            near = [known for known in names if known == name.lower()] or [
                known for known in names if name.lower() in known] or difflib.get_close_matches(name, names, 3, 0.7)
            one_of = "" if len(near) == 1 else "one of "
            raise InputError(f"{name}: no such claim. Give {one_of}{', '.join(near or names)}")
    if args.jobs is not None and not 1 <= args.jobs <= 64:
        raise InputError(f"--jobs {args.jobs}: must be between 1 and 64")
    check_flags(args)
    for name, (flag, *_) in REAL.items():
        if bool(getattr(args, flag)) != (name in args.claims):
            raise InputError(f"{name} and {flag_name(flag)} DIR belong together. Give both or none")
    seeds, published, say = seeds_of(args.seeds or "0"), render.Results(ROOT / "results"), Progress(False).say
    data_dir, jobs = args.data_dir and str(home_path(args.data_dir).absolute()), args.jobs or 1
    if data_dir:
        os.environ["MNIST_DIR"] = data_dir
    if not (args.claims or args.quick or args.from_results):
        return table(published, say)
    runs_of = {name: needed(measures_of(claims.BY_NAME[name], args), seeds).values() for name in args.claims or
               claims.BY_NAME if name in claims.BY_NAME and not args.from_results}
    for name, results in runs_of.items():
        on_files = args.quick and claims.BY_NAME[name].quick
        if args.seeds and seeds != [0] and (on_files or not {*seeds} & {result.seed for result in results}):
            raise InputError(f"--seeds {args.seeds}: {name} is measured here on files of seed 0. Leave it out")
    if data_dir and args.claims and "affnist-real" not in args.claims and not any(
            "--digits mnist" in result.flags for results in runs_of.values() for result in results):
        raise InputError("--data-dir: no run of this claim uses MNIST. Leave it out")
    agreeing = compared = 0
    for name in args.claims or claims.BY_NAME:
        if name in REAL:
            folder = home_path(getattr(args, REAL[name][0])).absolute()
            run_real(name, folder, seeds, jobs, published, data_dir, say)
            continue
        claim = claims.BY_NAME[name]
        print_claim(claim, published, say)
        measures = measures_of(claim, args)
        if args.from_results:
            print_published(measures, published, say, nearest(claim))
            continue
        if args.quick:
            cost = sum(minutes(result, published) for result in needed(measures, seeds).values())
            if not claim.quick and cost > QUICK_MINUTES:
                say(f"  no quick check: {duration(cost)} of one core. Published seeds: "
                    f"{seeds_shown(claim, published)}")
                continue
        results = needed(measures, seeds)
        make(results, jobs, published, data_dir, say)
        counts = compare(measures, read_made(results), published, say)
        agreeing, compared = agreeing + counts[0], compared + counts[1]
    if args.from_results:
        say(LEGEND)
    if compared:
        agree = "comparison agrees" if compared == 1 else "comparisons agree"
        outside = ""
        if agreeing < compared:
            outside = "; a new seed, or another processor or NumPy, lies outside the interval one time in twenty"
        say(f"\n{agreeing} of {compared} {agree} with the published ones{outside}. One seed seldom decides: see "
            f"--seeds. Runs: {FOLDER}")


if __name__ == "__main__":
    run_cli(main)
