#!/usr/bin/env python3
"""Renders the tables and numbers of README.md and docs/ from the results.

    python3 results/render.py              rewrite the documents in place
    python3 results/render.py --check      say where a document and the results disagree; exit code 1 if one does

What a result is, and when it is stale, workflow/ledger.py says. In a document a table stands between
`<!-- table: NAME -->` and `<!-- end -->`, a number between `<!-- value: NAME -->` and `<!-- end -->`; the names are
defined in TABLES and VALUES below. A setting is named as "table/setting".
"""
import argparse
import base64
import math
import re
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "workflow")]
import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
import multimnist_capsnet as capsnet
import smallnorb_novel_viewpoint as norb

import numpy as np  # after them
from ledger import read, stale
from runs import AFF, MULTI, NORB

import probe_affnist_capsnet as probe

ACCURACY, MSE = "test_set_accuracy", "test_recon_mse"


# -------------------------------------------------------------- reading results

class Ledger:
    """The results, and the sentences that can be said of them"""

    def __init__(self, folder):
        try:
            lines = read(folder)
        except ValueError as error:
            raise capsnet.InputError(str(error)) from None
        self.results, self.stale = {}, set()
        for name, line in lines.items():
            experiment, table, _ = name.split("/")
            key = experiment, f"{table}/{line['setting']}"
            self.results.setdefault(key, {})[line["seed"]] = line
            self.stale |= {key} if stale(name, line) else set()

    def runs(self, experiment, setting):
        """The results of a setting, by seed; {} if there are none"""
        return self.results.get((experiment, setting), {})

    def first(self, experiment, setting):
        """The result of a setting's first seed, its only one if it is a benchmark's; {} if there is none"""
        return next(iter(self.runs(experiment, setting).values()), {})

    def hits(self, experiment, setting, test):
        """-> {seed: whether each image of a test was named right}, of the runs that kept it"""
        return {seed: np.unpackbits(np.frombuffer(base64.b64decode(run["hit_bits"][test]), np.uint8),
                                    count=run.get(f"{test}_n")).astype(bool)
                for seed, run in self.runs(experiment, setting).items() if test in run.get("hit_bits", {})}

    def values(self, experiment, setting, key):
        """A result's number for each seed; a number inside another is named by both keys"""
        outer, inner = key if isinstance(key, tuple) else (None, key)
        return [(run[outer] if outer else run)[inner] for run in self.runs(experiment, setting).values()]

    def mean(self, experiment, setting, key=ACCURACY, digits=3):
        """Mean +- 95% t interval over the seeds; of one seed with its Wilson interval; "not run" where nothing is. Of
        runs that stop at an accuracy those that reached it, if any did"""
        runs = self.runs(experiment, setting)
        kept = [seed for seed, run in runs.items() if reached(run)] or list(runs)
        values = [value for seed, value in zip(runs, self.values(experiment, setting, key)) if seed in kept]
        if not values or None in values:
            return "" if values else "not run"
        alone = runs[kept[0]].get(f"{key}_ci95") if len(values) == 1 else None
        wilson = f" ({alone[0]:.{digits}f}-{alone[1]:.{digits}f})" if alone else ""
        return interval(capsnet.mean_and_interval(values), digits=digits) + wilson

    def plain(self, experiment, setting, key, digits=0):
        """The mean alone"""
        values = self.values(experiment, setting, key)
        return f"{sum(values) / len(values):,.{digits}f}" if values else "not run"

    def minutes(self, experiment, setting):
        """Minutes of training, the mean over the seeds"""
        values = self.values(experiment, setting, "seconds_train")
        return f"{sum(values) / len(values) / 60:.0f}" if values else "not run"

    def r2(self, setting, name, factor):
        """Mean R^2 of a representation of the first experiment and a factor"""
        found = [run["r2"] for run in self.runs(MULTI, setting).values()]
        values = [r2[name][1 + r2["factors"].index(factor)] for r2 in found]
        return f"{sum(values) / len(values):.2f}" if values else "not run"

    def difference(self, experiment, one, other, key=ACCURACY, digits=3):
        """Mean of one minus other over the seeds that both have, +- its 95% t interval: paired by seed. Of runs that
        stop at an accuracy those that reached it"""
        a, b = self.runs(experiment, one), self.runs(experiment, other)
        short = [name for name, runs in ((one, a), (other, b)) if runs and not any(map(reached, runs.values()))]
        shared = sorted(seed for seed in a.keys() & b.keys() if reached(a[seed]) and reached(b[seed]))
        if not shared:
            names = " and ".join(name.rpartition("/")[2] for name in short)
            return f"{names} did not get there" if short else "not run"
        return interval(capsnet.mean_and_interval([a[seed][key] - b[seed][key] for seed in shared]), "+", digits)


def reached(run):
    """Whether a run that was to stop at an accuracy on validation digits got there; any other run: True"""
    goal = run.get("config", {}).get("stop_at")
    return not goal or max(run["history"]["val_accuracy"]) >= goal


def interval(pair, sign="", digits=3):
    """"mean +- half width", the mean alone where one seed has no interval"""
    if pair is None:
        return ""
    return f"{pair[0]:{sign}.{digits}f}" + (f" +- {pair[1]:.{digits}f}" if math.isfinite(pair[1]) else "")


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *(rows or [["not run", *[""] * (len(header) - 1)]])]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def shown(ledger, experiment, settings, header, rows):
    """A table, and below it what the results of these settings were made with"""
    return markdown(header, rows) + "\n" + about(ledger, experiment, settings)


def timed_with(run):
    """What else the times of tests/bench_multimnist_step.py depend on; "" for any other result"""
    if not {"steps", "scaling"} & run.keys():
        return ""
    torch, bench = run["versions"]["torch"], run["bench"]
    return (f", {f'PyTorch {torch}' if torch else 'no PyTorch'}, threads: {bench['threads']}, rounds: "
            f"{bench['rounds']} of {bench['repeats']} steps")


def about(ledger, experiment, settings):
    """The line under a table: seeds, machine, versions, and whether a result is stale"""
    runs = [run for setting in settings for run in ledger.runs(experiment, setting).values()]
    if not runs:
        return "\nNot run yet."
    of_seeds = {}
    for setting in settings:
        if seeds := ", ".join(map(str, ledger.runs(experiment, setting))):
            of_seeds.setdefault(seeds, []).append(setting)
    where = {seeds: f" ({', '.join(names)})" if len(of_seeds) > 1 else "" for seeds, names in of_seeds.items()}
    said = "; ".join(f"seed{'s' * (',' in seeds)} {seeds}{where[seeds]}" for seeds in of_seeds)
    machines = sorted({f"{run['machine']['processor']}, Python "
                       f"{run['versions']['python']}, NumPy {run['versions']['numpy']}{timed_with(run)}"
                       for run in runs})
    old = [setting for setting in settings if (experiment, setting) in ledger.stale]
    text = f"{said[0].upper()}{said[1:]}; {'; '.join(machines)}."
    return f"\n{text}" + (f" **Stale**, to be made again: {', '.join(old)}." if old else "")


# -------------------------------------------------------------- the tables

def multimnist_results(ledger, rows):
    """rows: (label, setting)"""
    cell, lines = partial(ledger.mean, MULTI), []
    for label, setting in rows:
        runs = list(ledger.runs(MULTI, setting).values())
        pairs = f"{runs[0]['config']['n_epochs'] * runs[0]['config']['n_train']:,}" if runs else ""
        seconds = f"{ledger.plain(MULTI, setting, 'seconds_train')} ({runs[0]['config']['threads']})" if runs else ""
        lines.append([label, pairs, seconds, cell(setting), cell(setting, "test_any_accuracy"), cell(setting, MSE, 4)])
    header = ["", "training pairs", "seconds (threads)", "set accuracy", "at least one", "reconstruction MSE"]
    return shown(ledger, MULTI, [setting for _, setting in rows], header, lines)


def multimnist_control(ledger, rows, first):
    """rows: (label, setting); differences from the setting `first`"""
    lines = [[label, ledger.plain(MULTI, setting, "n_params"), ledger.plain(MULTI, setting, "ms_per_step"),
              ledger.mean(MULTI, setting), "" if setting == first else ledger.difference(MULTI, first, setting)]
             for label, setting in rows]
    header = ["", "parameters", "ms a step", "set accuracy", "the first row minus it, paired by seed"]
    return shown(ledger, MULTI, [setting for _, setting in rows], header, lines)


def multimnist_speed(ledger, columns, rows):
    """columns: (label, setting), rows: (label, name of what was timed)"""
    def cells(setting, name):
        step = ledger.first(MULTI, setting).get("steps", {}).get(name)
        return [f"{step['ms']:.1f} ({step['min']:.1f}-{step['max']:.1f})", f"{step['ratio']:.2f}"] if step else [
            "not run", ""]
    header = ["", *(text for label, _ in columns for text in (f"{label}: ms (min-max)", "NumPy's time / its time"))]
    lines = [[label, *(text for _, setting in columns for text in cells(setting, name))] for label, name in rows]
    return shown(ledger, MULTI, [setting for _, setting in columns], header, lines)


def multimnist_threads(ledger, batches):
    """What a second thread is worth to a step; batches: sizes, one shard being 16 pairs"""
    lines = []
    for size in batches:
        found = ledger.first(MULTI, f"speed/threads-{size}").get("scaling", {})
        lines += [[size, size // capsnet.SHARD_SIZE, n, f"{row['ms']:.1f} ({row['min']:.1f}-{row['max']:.1f})",
                   f"{1e3 * size / row['ms']:.0f}", f"{row['speedup']:.2f}", f"{row['efficiency']:.0%}"]
                  for n, row in found.items()] or [[size, size // capsnet.SHARD_SIZE, "not run", *[""] * 4]]
    header = ["batch", "shards", "threads", "ms a step (min-max)", "pairs a second", "speed-up", "efficiency"]
    return shown(ledger, MULTI, [f"speed/threads-{size}" for size in batches], header, lines)


def multimnist_stages(ledger, columns):
    """columns: (label, setting)"""
    stages = [ledger.first(MULTI, setting).get("stages", {}) for _, setting in columns]
    names = list(dict.fromkeys(name for column in stages for name in column))
    lines = [[name, *(f"{column[name]:.2f}" if name in column else "" if column else "not run" for column in stages)]
             for name in names]
    header = ["stage, one thread, ms a step", *(label for label, _ in columns)]
    return shown(ledger, MULTI, [setting for _, setting in columns], header, lines)


def multimnist_memory(ledger, steps, whole, paper):
    """steps, paper: settings of the benchmark; whole: settings whose runs were trained and tested on MNIST"""
    alone, large = ledger.first(MULTI, steps), ledger.first(MULTI, paper)
    runs = [run for setting in whole for run in ledger.runs(MULTI, setting).values() if run.get("peak_rss_mb")]
    threads = ", ".join(map(str, sorted({run["config"]["threads"] for run in runs})))
    ms, size = (large["steps"]["numpy"]["ms"], large["config"]["batch_size"]) if large else (None, None)

    def peak(*runs):
        return f"{max(run['peak_rss_mb'] for run in runs):.0f} MB" if all(runs) and runs else "not run"

    def epoch(n):
        return f"{-(-n // size) * ms / 60e3:.1f} minutes" if large else "not run"

    def days(busy):
        """Of the paper's 60 million pairs, on so many cores that share it without loss"""
        return f"{6e7 / size * ms / 86.4e6 * large['bench']['threads'] / busy:.1f} days" if large else "not run"
    cores = large["bench"]["threads"] if large else 2
    lines = [
        ["peak memory, the steps alone", peak(alone)],
        ["peak memory, whole runs with MNIST, the largest", peak(*runs) + f", threads: {threads}" * bool(runs)],
        ["the paper's network, a step", f"{ms:.0f} ms, {size} pairs" if large else "not run"],
        ["its peak memory, the steps alone", peak(large)],
        ["an epoch of 6,000 pairs at that pace", epoch(6000)], ["an epoch of 60,000", epoch(60000)],
        [f"the paper's 60,000,000 pairs at that pace, on these {cores} cores: projected, not run", days(cores)],
        ["the same on 16 cores or more, of which batches of 128 keep 8 busy, if nothing is lost: projected", days(8)],
        ["the same on 64 cores, with batches of 1,024, which nobody has tried: projected likewise", days(64)]]
    return shown(ledger, MULTI, [steps, paper, *whole], ["", ""], lines)


def multimnist_errors(ledger, setting):
    run = ledger.first(MULTI, setting)
    if not run:
        return shown(ledger, MULTI, [setting], ["", ""], [])

    def sets(key, n):
        return "; ".join(f"{a} with {b} ({share:.0%})" for a, b, share in run["errors"][key][:n])
    both, any_of = run[ACCURACY], run["test_any_accuracy"]
    hidden, seen, groups = (run["errors"][key] for key in ("most_hidden", "least_hidden", "groups"))
    lines = [
        ["missed", f"{1 - both:.2%}"], ["one of the two digits right", f"{any_of - both:.2%}"],
        ["none right", f"{1 - any_of:.2%}"], ["hardest sets, share missed", sets("hardest_sets", 5)],
        ["easiest sets", sets("easiest_sets", 3)],
        [f"right in that 1/{groups} of the pairs whose more hidden digit keeps least ink for itself "
         f"({hidden[0]:.0%} on average)", f"{hidden[1]:.3f}"],
        [f"right in that 1/{groups} where it keeps most ({seen[0]:.0%})", f"{seen[1]:.3f}"]]
    return shown(ledger, MULTI, [setting], [f"{run['config']['n_test']:,} test pairs", ""], lines)


def multimnist_routing(ledger, setting):
    found = ledger.first(MULTI, setting).get("routing")
    rows = (("mean entropy of the coupling coefficients, nats (uniform: 2.3026)", "entropy", 4),
            ("mean coupling to the digits that are there, weighted by the primary capsules' lengths",
             "coupling_to_digits_there", 3), ("to the others, weighted likewise", "coupling_to_others", 3),
            ("set accuracy with these couplings, all test pairs", "set_accuracy", 4),
            ("of the eighth whose more hidden digit keeps least ink for itself", "set_accuracy_most_hidden", 3))
    pairs = "test pairs"
    if found:
        pairs = f"{found['pairs']} test pairs, those named right ({found['named_right']}) taken first"
    lines = [[label, *(f"{value:.{digits}f}" for value in found[key])] if found else [label, "not run", "not run"]
             for label, key, digits in rows]
    return shown(ledger, MULTI, [setting], [pairs, "at the start", "at the end"], lines)


def multimnist_disentanglement(ledger, setting):
    runs = list(ledger.runs(MULTI, setting).values())
    factors, *names = runs[0]["r2"] if runs else [""]
    lines = []
    for name in names:
        size, *_ = runs[0]["r2"][name]
        columns = zip(*(run["r2"][name][1:] for run in runs))
        found = [capsnet.mean_and_interval(column) for column in columns]
        lines.append([name, size, *(interval(pair, digits=2) for pair in found)])
    header = ["R^2 of a linear map", "dimensions", *(runs[0]["r2"][factors] if runs else ["not run"])]
    return shown(ledger, MULTI, [setting], header, lines)


def multimnist_synthetic_digits(ledger, setting, rows):
    """rows: (label, key)"""
    lines = [[label, ledger.mean(MULTI, setting, key)] for label, key in rows]
    return shown(ledger, MULTI, [setting], ["a small CNN ...", "accuracy (95% interval)"], lines)


def norb_summary(ledger, settings):
    """smallnorb_novel_viewpoint.py's own summary of some settings, the first being what the others are compared with"""
    records = [run | {"label": setting} for setting in settings for run in ledger.runs(NORB, setting).values()]
    return norb.summarize(records) if records else {}


def negative(pair):
    """The interval of minus the number"""
    return pair and (-pair[0], pair[1])


def norb_comparison(ledger, table, names):
    """names: settings of a table, or of another one, "table/setting"; from the others' numbers the first's are taken
    away"""
    settings = [name if "/" in name else f"{table}/{name}" for name in names]
    summary, lines = norb_summary(ledger, settings), []
    for name, setting in zip(names, settings):
        row = summary.get(setting, {})
        plain = [interval(row[key]) if row else "not run" for key in ("familiar", "held_out", "drop")]
        apart = [interval(negative(row.get(key)), "+")
                 for key in ("difference", "drop_difference", "matched_difference")]
        if 0 < row.get("n_matched", 0) < row.get("n_pairs", 0):
            apart[-1] += f" ({row['n_matched']} of {row['n_pairs']})"
        lines.append([name.rpartition("/")[2], *plain, *apart])
    first = names[0].rpartition("/")[2]
    header = ["", "familiar", "held-out", "drop", f"held-out, minus `{first}`'s", "drop, likewise",
              "held-out at matched familiar accuracy, likewise"]
    return shown(ledger, NORB, settings, header, lines)


def norb_matched(ledger, first, other):
    """Held-out accuracy of a setting minus that of another, the first, stopped when it was as good on familiar views"""
    row = norb_summary(ledger, [first, other]).get(other, {})
    return interval(negative(row.get("matched_difference")), "+") or "not run"


def networks_speed(ledger, experiment, columns):
    """columns: (label, setting); PyTorch in the faster of the ways in which its sums are written"""
    runs = [ledger.first(experiment, setting) for _, setting in columns]
    lines = []
    for model in dict.fromkeys(model for run in runs for model in run.get("steps", {})):
        cells = []
        for run in runs:
            steps = run.get("steps", {}).get(model)
            ratios = [[step["ratio"] for name, step in (steps or {}).items() if name.startswith(kind)]
                      for kind in ("eager", "compiled")]
            cells += [f"{steps['numpy']['ms']:.1f}" if steps else "not run",
                      *(f"{max(found):.2f}" if found else "" for found in ratios)]
        lines.append([f"`{model}`", *cells])
    header = ["a training step", *(text for label, _ in columns for text in (
        f"{label}: ms", "its time / eager PyTorch's", "its time / torch.compile's"))]
    return shown(ledger, experiment, [setting for _, setting in columns], header, lines)


def norb_per_class(ledger, table, names):
    settings = [f"{table}/{name}" for name in names]
    summary = norb_summary(ledger, settings)
    lines = [[name, *(f"{accuracy:.3f}" for accuracy in summary[setting]["held_out_per_class"])]
             if setting in summary else [name, "not run", *[""] * 4] for name, setting in zip(names, settings)]
    return markdown(["held-out accuracy", *norb.CLASS_NAMES], lines)


def norb_routing(ledger, tables, rows):
    """rows: (label, setting, its control), in each of some tables: what routing is worth, familiar and held-out"""
    keys = [(table, key) for table in tables for key in ("familiar", "held_out")]
    lines = [[label, *(ledger.difference(NORB, f"{table}/{name}", f"{table}/{control}", key) for table, key in keys)]
             for label, name, control in rows]
    header = ["routed minus uniform, paired by seed", *(
        f"{table.partition('-')[2]}, {key.replace('_', '-')}" for table, key in keys)]
    settings = dict.fromkeys(f"{table}/{name}" for table in tables for _, *names in rows for name in names)
    return shown(ledger, NORB, settings, header, lines)


def norb_sweep(ledger, columns, names):
    """columns: (label, table); held-out accuracy in each, and that of the first of some settings minus the others'"""
    first, *others = names
    lines = [[f"`{name}`", *(ledger.mean(NORB, f"{table}/{name}", "held_out") for _, table in columns)]
             for name in names]
    lines += [[f"`{first}` minus `{name}`", *(ledger.difference(NORB, f"{table}/{first}", f"{table}/{name}", "held_out")
                                              for _, table in columns)] for name in others]
    return shown(ledger, NORB, [f"{table}/{name}" for _, table in columns for name in names],
                 ["held-out accuracy", *(label for label, _ in columns)], lines)


def norb_standard(ledger, rows):
    """rows: (label, setting of the table standard): errors in percent"""
    def error(setting, key):
        values = [100 * (1 - value) for value in ledger.values(NORB, setting, key)]
        return interval(capsnet.mean_and_interval(values), digits=1) if values else "not run"
    settings = [f"standard/{name}" for _, name in rows]
    lines = [[label, error(setting, "held_out"), error(setting, "familiar")]
             for (label, _), setting in zip(rows, settings)]
    return shown(ledger, NORB, settings, ["error %", "new toys", "training toys"], lines)


def norb_alive(ledger, setting):
    """What the capsules of some networks do before training and after it, means over seeds"""
    runs = [run["alive"] for run in ledger.runs(NORB, setting).values()]
    cells = {}                                                              # label -> before, after: a value a seed
    for run in runs:
        for when, found in run.items():
            said = {f"mean activation of `{name}`, {where} places": value for name, pair in found["a"].items()
                    for where, value in zip(("empty", "other"), pair)}
            said |= {f"share of the types of `{name}` that are on somewhere, off elsewhere": value
                     for name, value in found["used"].items()}
            said |= {f"entropy of the classes' R, iteration {t}, nats (uniform: 1.61)": value
                     for t, value in enumerate(found["entropy"], 1)}
            said |= {f"R^2 of a linear map from the true class's pose to {name}": value
                     for name, value in found["r2"].items()}
            for label, value in said.items():
                cells.setdefault(label, {}).setdefault(when, []).append(value)
    lines = [[label, *("none" if None in values else interval(capsnet.mean_and_interval(values), digits=2)
                       for values in columns.values())] for label, columns in cells.items()]
    return shown(ledger, NORB, [setting], ["", "before training", "after it"], lines)


def norb_by_distance(ledger, table, names):
    """Accuracy per class of some settings at each distance from the training range, means over seeds; and the mean
    over classes of each other one minus the first's, paired by seed"""
    found = {}
    for name in names:
        for run in ledger.runs(NORB, f"{table}/{name}").values():
            config = norb.config_of(run["config"], NORB)
            for angle, per_class in zip(run["sweep"]["angles"], run["sweep"]["per_class"]):
                cell = found.setdefault(round(norb.distance_to_training(angle, config)), {}).setdefault(name, {})
                cell.setdefault(run["seed"], []).append(per_class)
    lines = []
    for distance, by_name in sorted(found.items()):
        means = {name: {seed: np.mean(rows, 0) for seed, rows in seeds.items()} for name, seeds in by_name.items()}
        for name in names:
            per_class = np.mean(list(means[name].values()), 0)
            shared = sorted(means[names[0]].keys() & means[name].keys())
            ahead = [float(np.mean(means[name][seed] - means[names[0]][seed])) for seed in shared]
            lines.append([distance, f"`{name}`", *(f"{value:.2f}" for value in per_class), f"{per_class.mean():.3f}",
                          "" if name == names[0] else interval(capsnet.mean_and_interval(ahead), "+")])
    header = ["degrees from training", "", *norb.NORB_NAMES, "mean", f"minus `{names[0]}`'s"]
    return markdown(header, lines)


AFF_KEYS = {"familiar_accuracy": "moved (familiar)", "placed_accuracy": "moved further",
            "centred_accuracy": "affine, in the middle", "affine_accuracy": "affine"}


def flags_of(setting):
    """What makes a setting, as in the first table"""
    return AFF_NAMES[setting.rpartition("/")[2]].split(":")[0]


def affnist_results(ledger, rows, first):
    """rows: (label, setting); of each the four tests, and what tells it from the setting `first`; where runs stop at an
    accuracy, how many reached it, and after how many digits, the mean over the seeds"""
    lines, minus = [], ("centred_accuracy", "affine_accuracy")
    stops = any(run["config"].get("stop_at") for _, setting in rows for run in ledger.runs(AFF, setting).values())
    for label, setting in rows:
        runs = ledger.runs(AFF, setting).values()
        lines.append([label, ledger.plain(AFF, setting, "n_params") if runs else "", *(
            ledger.mean(AFF, setting, key, 4) for key in AFF_KEYS), *(
            "" if setting == first or not runs else ledger.difference(AFF, setting, first, key, 4) for key in minus),
            *(stopped(runs) if stops else [])])
    header = ["", "parameters, with the decoder", *AFF_KEYS.values(), *(
        f"{AFF_KEYS[key]}: minus the first row's, paired by seed" for key in minus),
        *["reached it", "digits seen"] * stops]
    return shown(ledger, AFF, [setting for _, setting in rows], header, lines)


def stopped(runs):
    """Of runs that stop at an accuracy: how many reached it, and after how many digits, the mean over all, which is a
    lower bound where some did not"""
    seen = [run["history"]["epoch"][-1] * run["config"]["n_train"] for run in runs]
    there, least = sum(map(reached, runs)), "" if all(map(reached, runs)) else "at least "
    return [f"{there} of {len(runs)}", f"{least}{sum(seen) / len(seen):,.0f}" if seen else ""]


def affnist_nearest(ledger, setting):
    """What nearest neighbours name of each test"""
    found = ledger.first(AFF, setting).get("nearest", {})
    keys = [key.removesuffix("_accuracy") for key in AFF_KEYS]
    lines = [[f"nearest neighbour, {label}", *(f"{tests[key]:.4f}" for key in keys)] for label, tests in found.items()]
    return shown(ledger, AFF, [setting], ["", *AFF_KEYS.values()], lines)


def affnist_classes(ledger, settings, nearest):
    """Of each class the accuracy on affine digits in the middle and anywhere, means over seeds, of some settings; below
    them of the nearest neighbours"""
    keys = ("centred", "affine")
    found = {flags_of(setting): [
        np.mean(np.array(ledger.values(AFF, setting, f"{key}_per_class"), float), 0) for key in keys]
        for setting in settings if ledger.runs(AFF, setting)}
    for run in ledger.runs(AFF, nearest).values():
        found |= {f"nearest neighbour, {label}": [np.array(tests[f"{key}_per_class"], float) for key in keys]
                  for label, tests in run["nearest"].items()}
    lines = [[label, *(" / ".join(f"{accuracy:.3f}" for accuracy in pair) for pair in zip(*both))]
             for label, both in found.items()]
    header = ["affine in the middle / affine", *map(str, range(affnist.N_CLASSES))]
    return shown(ledger, AFF, [*settings, nearest], header, lines)


CORNERS = ("shared", "caps-1", "gap", "dense")
WORTH = {                          # the signs of these
    "sharing over places": (0.5, -0.5, 0.5, -0.5), "capsules": (0.5, 0.5, -0.5, -0.5),
    "sharing's worth with capsules minus without": (1, -1, -1, 1)}


def affnist_worth(ledger, table, signs, key):
    """A sum over four networks with these signs, paired by seed -> (its mean and interval, seeds that all four have)"""
    runs = [ledger.runs(AFF, f"{table}/{name}") for name in CORNERS]
    seeds = sorted(set.intersection(*({seed for seed, run in each.items() if reached(run)} for each in runs)))
    values = [sum(sign * each[seed][key] for sign, each in zip(signs, runs)) for seed in seeds]
    return interval(capsnet.mean_and_interval(values), "+", 4) if seeds else "not run", seeds


def affnist_two_by_two(ledger, tables):
    """tables: (label, table). What sharing over places and what capsules are worth, each the mean of its two
    differences, and the difference of these, by how much the one changes the other, paired by seed"""
    lines = []
    for label, table in tables:
        for key in ("familiar_accuracy", "centred_accuracy", "affine_accuracy"):
            found = [affnist_worth(ledger, table, signs, key) for signs in WORTH.values()]
            seeds = ", ".join(map(str, found[0][1]))
            lines.append([f"{label}, {AFF_KEYS[key]}", *(worth for worth, _ in found), seeds])
    settings = [f"{table}/{name}" for _, table in tables for name in CORNERS]
    return shown(ledger, AFF, settings, ["accuracy", *WORTH, "seeds"], lines)


def affnist_steps(ledger, rows, what):
    """rows: (label, setting, what it is compared with); what: that in words"""
    keys = {"familiar_accuracy": "familiar", "centred_accuracy": "affine, in the middle", "affine_accuracy": "affine"}
    lines = [[label, *(ledger.mean(AFF, setting, key, 4) for key in keys), *(
        ledger.difference(AFF, setting, other, key, 4) if other else "" for key in keys)]
        for label, setting, other in rows]
    header = ["", *keys.values(), *(f"{words}: minus {what}, paired by seed" for words in keys.values())]
    return shown(ledger, AFF, dict.fromkeys(setting for _, setting, _ in rows), header, lines)


def affnist_errors(ledger, rows, goal):
    """rows: (label, setting, the paper's error %): errors on MNIST's test digits in percent; and how long a run takes
    until it names the share `goal` of the validation digits right: the mean over the seeds that get there. Minutes are
    those of one machine, the first seed's: means over two would be nobody's"""
    lines = []
    for label, setting, paper in rows:
        runs = list(ledger.runs(AFF, setting).values())
        values = [100 * (1 - run["test_accuracy"]) for run in runs]
        timed = [run["seconds_train"] / 60 for run in runs if run["machine"] == runs[0]["machine"]]
        there, ways = 0, []
        for run in runs:
            steps = [step for step, accuracy in zip(run["history"]["step"], run["history"]["val_accuracy"])
                     if accuracy >= goal]
            there += bool(steps)
            if steps and run["machine"] == runs[0]["machine"]:
                ways.append(run["seconds_train"] / 60 * steps[0] / run["history"]["step"][-1])
        minutes = f"{np.mean(ways):.1f} " if ways else ""
        way = f"{minutes}({there} of {len(values)} seed{'s' * (len(values) > 1)})" if there else "never"
        lines.append([label, interval(capsnet.mean_and_interval(values), digits=3) if values else "not run", paper,
                      *([f"{np.mean(timed):.1f}", way] if values else ["", ""])])
    header = ["MNIST", "test error, %", "in the paper", "minutes of one core, on seed 0's machine",
              f"of these until {goal:.2%} of the validation digits are right"]
    return shown(ledger, AFF, [setting for _, setting, _ in rows], header, lines)


def affnist_few(ledger, columns, names, nearest):
    """columns: (label, table); three accuracies of some networks, and the first's minus each other's; and those of a
    nearest neighbour, `nearest` being the settings of which columns"""
    first, *others = names
    keys = ("familiar_accuracy", "centred_accuracy", "affine_accuracy")
    lines = [[flags_of(name), *(" / ".join(ledger.mean(AFF, f"{table}/{name}", key) for key in keys)
                             for _, table in columns)] for name in names]
    lines += [[f"{flags_of(first)} minus {flags_of(name)}", *(" / ".join(ledger.difference(
        AFF, f"{table}/{first}", f"{table}/{name}", key) for key in keys) for _, table in columns)] for name in others]
    found = [[run["nearest"]["ink in the middle"] for run in ledger.runs(AFF, setting).values()] for setting in nearest]
    lines.append(["nearest neighbour, ink in the middle", *(" / ".join(
        interval(capsnet.mean_and_interval([tests[key.removesuffix("_accuracy")] for tests in runs])) for key in keys)
        if runs else "not run" for runs in found)])
    header = ["familiar / affine in the middle / affine", *(label for label, _ in columns)]
    return shown(ledger, AFF, [*(f"{table}/{name}" for _, table in columns for name in names), *nearest], header, lines)


def probed(ledger, setting, probe, kind, names):
    """What --probe found, of the scores `names` the one that the network has -> {seed: it}"""
    found = {seed: dict(run[probe].get(kind, {})) for seed, run in ledger.runs(AFF, setting).items() if probe in run}
    return {seed: each[name] for seed, each in found.items() for name in names if each.get(name) is not None}


def detection_difference(ledger, one, other, kind):
    """AUROC of the longest capsule, or the top probability, of one minus that of the other, paired by seed"""
    a, b = (probed(ledger, setting, "detection", kind, SUREST) for setting in (one, other))
    if not a.keys() & b.keys():
        return "not run"
    return interval(capsnet.mean_and_interval([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]), "+")


def affnist_probe(ledger, probe, rows, columns, digits=3):
    """What the probes found: rows: (label, path into it: a kind and a value, a score, or scores of which a network has
    one), columns: settings; means over seeds"""
    def cell(setting, kind, names):
        values = list(probed(ledger, setting, probe, kind, names).values())
        if not values:                                                                  # what the network has not
            return "" if any(probe in run for run in ledger.runs(AFF, setting).values()) else "not run"
        return interval(capsnet.mean_and_interval(values), digits=digits)
    lines = [[label, *(cell(setting, kind, what if isinstance(what, tuple) else (what,)) for setting in columns)]
             for label, kind, what in rows]
    return shown(ledger, AFF, columns, ["", *map(flags_of, columns)], lines)


AFF_NAMES = {"shared": "`shared`: capsules, matrices shared over places, 1 iteration",
             "caps-1": "`caps --routing-iters 1`: a matrix for every place", "gap": "`gap`: global average",
             "dense": "`dense`: a hidden layer", "caps": "`caps`: a matrix for every place, 3 iterations",
             "shared-3": "`shared --routing-iters 3`", "vectors": "`vectors`: averages, no matrices",
             "gap-8": "`gap --padding 8`", "max-8": "`max --padding 8`: global maximum",
             "cnn": "`cnn`: the paper's, small"}
AFF_PAPERS = {"caps": "`--preset small --model caps`: the paper's, 3 iterations", "caps-1": "1 iteration",
              "cnn": "`cnn`, dropout: narrow convolutions, 16 channels",
              "cnn-64": "`cnn`, dropout: convolutions of 64 channels", "dense": "`dense`, maxima and dropout"}
SUREST = "length", "probability"
SEVEN = "shared", "vectors", "caps", "gap-8", "max-8", "dense", "cnn"
PROBED = tuple(f"probes/{name}" for name in SEVEN)
NETWORKS = ("caps", "cnn", "gap", "nearest")
HEADS = ("gap", "dense", "dynamic-shared", "dynamic-shared-1", "dynamic", "dynamic-1", "em", "em-1", "self-routing")
ROUTED = (("dynamic routing, shared matrices", "dynamic-shared", "dynamic-shared-1"),
          ("dynamic routing, a matrix for every place", "dynamic", "dynamic-1"), ("EM routing", "em", "em-1"),
          ("self-routing", "self-routing", "dynamic-shared-1"))
WIDE = ("dynamic-shared", "gap", "nearest")
PARTS = ("wide-azimuth/dynamic-shared", *(f"parts/{name}" for name in (
    "dynamic-shared-1", "dynamic-shared-no-places", "dynamic-shared-xent", "dynamic", "gap-places", "gap-margin")),
    "wide-azimuth/gap")
SWEPT = ("dynamic-shared", "gap", "em")
TABLES = {
    "multimnist results": partial(multimnist_results, rows=(
        ("the default, 8 x 6,000 fresh pairs", "main/minute"), ("the default, 12 x 6,000", "main/deep"),
        ("`--preset residual --warp 0.3 --batch-size 64`, 10 x 15,000", "main/middle"),
        ("the long run: the same, 20 x 60,000", "main/residual"),
        ("the long run with `--min-iou 0 --merge add`, the paper's protocol", "main/paper"),
        ("`--muon 0`, 12 x 6,000", "main/adam"), ("`--preset classic`, 12 x 6,000", "main/classic"),
        ("`--norm none --lr 5e-3 --conv1-channels 32 --recon-weight 0.002`, 12 x 6,000", "main/plain"),
        ("the same, 25 x 60,000", "main/long"))),
    "multimnist control": partial(multimnist_control, first="main/deep", rows=(
        ("capsules", "main/deep"), ("the same with 1 routing iteration", "control/iters-1"),
        ("the same without reconstruction", "control/no-recon"), ("the CNN of its size", "control/cnn"))),
    "multimnist middle control": partial(multimnist_control, first="main/middle", rows=(
        ("capsules, `--preset residual`, 10 x 15,000 pairs", "main/middle"),
        ("the same with 1 routing iteration", "control/middle-iters-1"),
        ("the CNN of its size, `--cnn-head mean`", "control/middle-cnn-mean"))),
    "multimnist long control": partial(multimnist_control, first="main/residual", rows=(
        ("capsules, the long run", "main/residual"), ("the same with 1 routing iteration", "control/long-iters-1"),
        ("the CNN of its size", "control/long-cnn"),
        ("the CNN of its size, `--cnn-head mean`", "control/long-cnn-mean"))),
    "multimnist parts": partial(multimnist_control, first="parts/iters-3", rows=(
        ("3 routing iterations, parts of half a digit", "parts/iters-3"),
        ("1 routing iteration", "parts/iters-1"), ("a CNN on these layers", "parts/cnn"),
        ("the same, `--cnn-head mean`", "parts/cnn-mean"))),
    "multimnist errors": partial(multimnist_errors, setting="weights/deep"),
    "multimnist routing": partial(multimnist_routing, setting="weights/deep"),
    "multimnist disentanglement": partial(multimnist_disentanglement, setting="disentanglement/deep"),
    "multimnist speed": partial(multimnist_speed, columns=(
        ("default", "speed/deep"), ("default held to AVX2", "speed/deep-avx2"),
        ("`--preset residual --batch-size 64`", "speed/residual"), ("`--preset classic`", "speed/classic"),
        ("`--preset paper`", "speed/paper")), rows=(
        ("this program", "numpy"), ("its matrix products alone", "floor"), ("PyTorch, eager", "eager"),
        ("PyTorch, torch.compile", "compiled"))),
    "multimnist threads": partial(multimnist_threads, batches=(32, 64, 128)),
    "multimnist stages": partial(multimnist_stages, columns=(
        ("default", "speed/deep"), ("default held to AVX2", "speed/deep-avx2"))),
    "multimnist memory": partial(
        multimnist_memory, steps="speed/deep", paper="speed/paper",
        whole=("main/classic", "main/deep", "main/residual", "main/paper", "main/long")),
    "multimnist synthetic digits": partial(multimnist_synthetic_digits, setting="synthetic/digits", rows=(
        ("trained on MNIST, reads the MNIST test set", "mnist_reads_mnist"),
        ("trained on MNIST, reads synthetic digits", "mnist_reads_synthetic"),
        ("trained on synthetic digits, reads the MNIST test set", "synthetic_reads_mnist"))),
    "affnist results": partial(affnist_results, first="free/shared", rows=[
        (label, f"free/{name}") for name, label in AFF_NAMES.items()]),
    "affnist nearest": partial(affnist_nearest, setting="nearest/digits"),
    "affnist classes": partial(affnist_classes, settings=[f"free/{name}" for name in SEVEN], nearest="nearest/digits"),
    "affnist edge": partial(affnist_results, first="edge/shared", rows=[
        (AFF_NAMES[name], f"edge/{name}") for name in ("shared", "caps-1", "gap", "dense", "caps", "cnn")]),
    "affnist margins": partial(affnist_results, first="free/shared", rows=[
        ("`shared --padding 0`", "edge/shared"), ("`shared`: 4 px", "free/shared"),
        ("`shared --padding 8`", "edge/shared-8"), ("`gap --padding 0`", "edge/gap"), ("`gap`: 4 px", "free/gap"),
        ("`gap --padding 8`", "free/gap-8")]),
    "affnist plain": partial(affnist_results, first="plain/shared", rows=[
        (AFF_NAMES[name], f"plain/{name}") for name in ("shared", "caps-1", "gap", "dense", "caps")]),
    "affnist matched": partial(affnist_results, first="matched/shared", rows=[
        (AFF_NAMES[name], f"matched/{name}") for name in ("shared", "caps-1", "gap", "dense", "caps")]),
    "affnist level": partial(affnist_results, first="level/shared", rows=[
        (AFF_NAMES[name], f"level/{name}") for name in ("shared", "gap", "dense", "caps", "cnn")]),
    **{f"affnist {table}": partial(affnist_results, first=f"{table}/caps", rows=[
        (label, f"{table}/{name}") for name, label in AFF_PAPERS.items() if (table, name) != ("papers", "cnn-64")])
        for table in ("papers", "papers-free")},
    "affnist two by two": partial(affnist_two_by_two, tables=(
        ("normalised", "free"), ("without padding", "edge"), ("not normalised", "plain"),
        ("stopped alike", "matched"))),
    "affnist steps up": partial(affnist_steps, what="the row above", rows=(
        ("ten vectors, averaged over places, cross-entropy of their lengths", "steps/start", None),
        ("+ transformation: shared matrices and the place", "steps/transformation", "steps/start"),
        ("+ routing: 3 iterations", "steps/routing", "steps/transformation"),
        ("+ squash", "steps/squash", "steps/routing"), ("+ margin loss", "steps/margin", "steps/squash"),
        ("+ reconstruction by class", "free/shared-3", "steps/margin"))),
    "affnist steps down": partial(affnist_steps, what="the first row", rows=(
        ("all five", "free/shared-3", None),
        ("- transformation, and routing, which needs votes", "free/vectors", "free/shared-3"),
        ("- routing: 1 iteration", "free/shared", "free/shared-3"),
        ("- squash", "steps/no-squash", "free/shared-3"), ("- margin loss", "steps/no-margin", "free/shared-3"),
        ("- reconstruction", "steps/margin", "free/shared-3"))),
    "affnist long": partial(affnist_results, first="long/shared", rows=[
        (AFF_NAMES[name], f"long/{name}") for name in ("shared", "gap-8")]),
    "affnist mnist": partial(affnist_errors, goal=0.9941, rows=(
        ("`caps`, 275,000 digits, 1 iteration, no reconstruction", "mnist/1", "0.34 +- 0.032"),
        ("1 iteration, reconstruction", "mnist/1-recon", "0.29 +- 0.011"),
        ("3 iterations, no reconstruction", "mnist/3", "0.35 +- 0.036"),
        ("3 iterations, reconstruction", "mnist/3-recon", "0.25 +- 0.005"),
        ("`shared`, 550,000 digits", "mnist/shared", ""),
        ("`shared`, 1,100,000 digits", "mnist/shared-long", ""), ("`gap`, 550,000 digits", "mnist/gap", ""),
        ("`--preset paper --model caps`, 110,000 digits", "mnist/paper", "0.25 +- 0.005 after far more"))),
    "affnist few": partial(affnist_few, names=("shared", "vectors", "caps", "gap-8", "max-8", "cnn"), columns=(
        ("10 digits a class", "few-10"), ("100", "few-100"), ("1,000", "few-1000"), ("all", "free")),
        nearest=("few-10/nearest", "few-100/nearest", "few-1000/nearest", "nearest/digits")),
    "affnist robustness": partial(affnist_probe, probe="robustness", columns=PROBED, rows=[
        (f"{words} {much:g}", how, much) for how, words in (
            ("noise", "noise, standard deviation in grey levels:"), ("occlusion", "a square erased, side, px:"),
            ("contrast", "contrast lowered to"), ("adversarial", "adversarial step, grey levels:"))
        for much in (probe.SPOILT | {"adversarial": probe.STEPS})[how]]),
    "affnist detection": partial(affnist_probe, probe="detection", columns=PROBED, rows=[
        (f"{kind}: {words}", kind, what) for kind in probe.NO_DIGITS for words, what in (
            ("longest capsule, or top probability", SUREST), ("error of the redrawing", "redrawn"),
            ("both", "together"), ("no network: least ink", "little ink"), ("no network: smoothest", "smoothness"))]),
    "affnist dimensions": partial(affnist_probe, probe="dimensions", digits=2, rows=[
        (f"{factor}, {which}", factor, which) for factor in probe.KNOWN_FACTORS
        for which in ("all dimensions", "best dimension")],
        columns=("probes/shared", "probes/shared-3", "probes/caps", "probes/vectors")),
    "affnist speed": partial(networks_speed, experiment=AFF, columns=(
        ("batches of 32", "speed/batch-32"), ("batches of 100", "speed/batch-100"))),
    "affnist factors": partial(affnist_probe, probe="factors", columns=PROBED, rows=[
        (f"{words} {value:g}", name, value) for name, words, values in (
            ("turn", "turned by, degrees:", (-60, -40, -20, 0, 20, 40, 60)),
            ("shear", "sheared by", (-0.6, -0.3, 0.3, 0.6)), ("down", "stretched downwards by", (0.5, 0.8, 1.2, 1.4)),
            ("across", "stretched across by", (0.5, 0.8, 1.2, 1.4)))
        for value in values]),
    "smallnorb wide azimuth": partial(norb_comparison, table="wide-azimuth", names=WIDE),
    "smallnorb wide elevation": partial(norb_comparison, table="wide-elevation", names=WIDE),
    "smallnorb parts": partial(norb_comparison, table="parts", names=PARTS),
    "smallnorb heads azimuth": partial(norb_comparison, table="heads-azimuth", names=HEADS),
    "smallnorb heads elevation": partial(norb_comparison, table="heads-elevation", names=HEADS),
    "smallnorb routing": partial(norb_routing, tables=("heads-azimuth", "heads-elevation"), rows=ROUTED),
    "smallnorb distance": partial(norb_by_distance, table="heads-azimuth", names=("gap", "dynamic-shared", "em")),
    "smallnorb alive": partial(norb_alive, setting="alive/caps"),
    "smallnorb paper azimuth": partial(
        norb_comparison, table="paper-azimuth", names=("cnn", "caps", "wide-azimuth/nearest")),
    "smallnorb paper elevation": partial(
        norb_comparison, table="paper-elevation", names=("cnn", "caps", "wide-elevation/nearest")),
    "smallnorb standard": partial(norb_standard, rows=(
        ("`caps`, 1 iteration", "caps-1"), ("2 iterations", "caps-2"), ("3 iterations", "caps-3"),
        ("2 iterations, no coordinate addition", "caps-no-places"), ("2 iterations, spread loss", "caps-spread"),
        ("`cnn`", "cnn"), ("`gap`", "gap"), ("nearest neighbour", "nearest"))),
    "smallnorb toys": partial(norb_sweep, names=SWEPT, columns=(
        ("1 toy a class", "toys-1"), ("2", "toys-2"), ("3", "toys-3"), ("5", "heads-azimuth"))),
    "smallnorb azimuths": partial(norb_sweep, names=SWEPT, columns=(
        ("3 azimuths", "azimuths-3"), ("6", "azimuths-6"), ("9", "azimuths-9"), ("18", "azimuths-18"))),
    "smallnorb speed": partial(networks_speed, experiment=NORB, columns=(
        ("own choice of kernels", "speed/heads"), ("both held to AVX2", "speed/heads-avx2"))),
    "smallnorb shapes": partial(norb_comparison, table="shapes", names=NETWORKS),
    "smallnorb shapes per class": partial(norb_per_class, table="shapes", names=NETWORKS)}
VALUES = {
    "classic accuracy": lambda ledger: ledger.mean(MULTI, "main/classic"),
    "deep accuracy": lambda ledger: ledger.mean(MULTI, "main/deep"),
    "plain long accuracy": lambda ledger: ledger.mean(MULTI, "main/long"),
    "paper accuracy": lambda ledger: ledger.mean(MULTI, "main/paper"),
    "long minutes": lambda ledger: ledger.minutes(MULTI, "main/residual"),
    "command seconds": lambda ledger: ledger.plain(MULTI, "speed/command", "seconds_train"),
    "command memory": lambda ledger: ledger.plain(MULTI, "speed/command", "peak_rss_mb"),
    "step memory": lambda ledger: ledger.plain(MULTI, "speed/deep", "peak_rss_mb"),
    "largest coupling": lambda ledger: ledger.plain(MULTI, "weights/deep", ("routing", "largest_coupling"), 2),
    "r2 of x": lambda ledger: ledger.r2("disentanglement/deep", "capsule", "x"),
    "r2 of y": lambda ledger: ledger.r2("disentanglement/deep", "capsule", "y"),
    "r2 of slant": lambda ledger: ledger.r2("disentanglement/deep", "capsule", "slant"),
    "shipped accuracy": lambda ledger: ledger.mean(MULTI, "weights/deep"),
    "shipped on paper's pairs": lambda ledger: ledger.mean(MULTI, "weights/deep-papers-pairs"),
    "shipped mse": lambda ledger: ledger.mean(MULTI, "weights/deep", MSE, 4),
    "nearest pairs placed": lambda ledger: ledger.mean(MULTI, "nearest/pairs", "nearest_placed"),
    "nearest pairs placed one": lambda ledger: ledger.mean(MULTI, "nearest/pairs", "nearest_placed_one"),
    "nearest pairs": lambda ledger: ledger.mean(MULTI, "nearest/pairs", "nearest_centred"),
    "nearest pairs one": lambda ledger: ledger.mean(MULTI, "nearest/pairs", "nearest_centred_one"),
    "mean image mse": lambda ledger: ledger.mean(MULTI, "weights/deep", "baseline_recon_mse", 4),
    "iterations": lambda ledger: ledger.difference(MULTI, "main/deep", "control/iters-1"),
    "step gflop": lambda ledger: ledger.plain(MULTI, "speed/deep", "gflop", 2),
    "synthetic accuracy": lambda ledger: ledger.mean(MULTI, "synthetic/deep"),
    "long cnn mean accuracy": lambda ledger: ledger.mean(MULTI, "control/long-cnn-mean"),
    "long cnn accuracy": lambda ledger: ledger.mean(MULTI, "control/long-cnn"),
    "middle minus cnn": lambda ledger: ledger.difference(MULTI, "main/middle", "control/middle-cnn-mean"),
    "middle iterations": lambda ledger: ledger.difference(MULTI, "main/middle", "control/middle-iters-1"),
    "parts minus cnn": lambda ledger: ledger.difference(MULTI, "parts/iters-3", "parts/cnn"),
    "parts iterations": lambda ledger: ledger.difference(MULTI, "parts/iters-3", "parts/iters-1"),
    "no recon minus cnn": lambda ledger: ledger.difference(MULTI, "control/no-recon", "control/cnn"),
    "deep minus cnn": lambda ledger: ledger.difference(MULTI, "main/deep", "control/cnn"),
    "shipped norb capsules": lambda ledger: ledger.mean(NORB, "weights/capsules", "held_out"),
    "shipped norb gap": lambda ledger: ledger.mean(NORB, "weights/gap", "held_out"),
    **{f"affnist {name} {test}": partial(Ledger.difference, experiment=AFF, one=one, other=other,
                                         key=f"{test}_accuracy", digits=4)
       for test in ("centred", "affine")
       for name, one, other in (
           ("caps minus cnn", "level/caps", "level/cnn"), ("caps minus dense", "matched/caps", "matched/dense"),
           ("longer caps minus cnn", "free/caps", "free/cnn"),
           *((f"few {n} shared minus {name}", f"few-{n}/shared", f"few-{n}/{name}")
             for n in (10, 100) for name in ("gap-8", "max-8", "vectors", "caps")),
           *((f"{table} caps minus {name}", f"{table}/caps", f"{table}/{name}")
             for table in ("papers", "papers-free") for name in ("cnn", "dense")),
           ("papers-free caps minus cnn-64", "papers-free/caps", "papers-free/cnn-64"),
           ("shared minus gap", "free/shared", "free/gap-8"),
           ("shared minus max", "free/shared", "free/max-8"), ("iterations caps", "free/caps", "free/caps-1"),
           ("iterations shared", "free/shared-3", "free/shared"), ("iterations papers", "papers/caps", "papers/caps-1"),
           ("matrices", "free/shared", "free/vectors"), ("squash", "steps/squash", "steps/routing"),
           ("level shared minus gap", "level/shared", "level/gap"),
           ("matched shared minus gap", "matched/shared", "matched/gap"),
           *((f"padding {name}", f"free/{name}", f"edge/{name}") for name in ("shared", "gap", "caps", "cnn")))},
    **{f"affnist shipped {name} {test}": partial(Ledger.mean, experiment=AFF, setting=f"weights/{name}",
                                                 key=f"{test}_accuracy", digits=4)
       for name in ("shared", "gap") for test in ("familiar", "affine")},
    **{f"affnist {name} worth {test}": lambda ledger, signs=signs, test=test: affnist_worth(
        ledger, "free", signs, f"{test}_accuracy")[0]
       for name, signs in (("sharing", WORTH["sharing over places"]), ("capsules", WORTH["capsules"]))
       for test in ("centred", "affine")},
    **{f"affnist {kind} {one} minus {other}": partial(detection_difference, one=f"probes/{one}",
                                                      other=f"probes/{other}", kind=kind)
       for kind in ("halves", "strokes") for one, other in (
           ("shared", "gap-8"), ("shared", "max-8"), ("shared", "vectors"), ("caps", "dense"))},
    "affnist mnist accuracy": partial(Ledger.mean, experiment=AFF, setting="mnist/shared",
                                      key="test_accuracy", digits=4),
    **{f"affnist papers-free {name} affine": partial(Ledger.mean, experiment=AFF, setting=f"papers-free/{name}",
                                                     key="affine_accuracy") for name in ("caps", "cnn", "dense")},
    "wide azimuth difference": lambda ledger: ledger.difference(
        NORB, "wide-azimuth/dynamic-shared", "wide-azimuth/gap", "held_out"),
    **{f"{name} toy{'s' * (n > 1)}": lambda ledger, n=n: ledger.difference(
        NORB, f"toys-{n}/dynamic-shared", f"toys-{n}/gap", "held_out")
       for n, name in enumerate(("one", "two", "three"), 1)},
    "wide elevation difference": lambda ledger: ledger.difference(
        NORB, "wide-elevation/dynamic-shared", "wide-elevation/gap", "held_out"),
    **{f"heads {split} {name}": partial(Ledger.difference, experiment=NORB, one=f"heads-{split}/{head}",
                                        other=f"heads-{split}/gap", key="held_out")
       for split in ("azimuth", "elevation") for name, head in (("best", "dynamic-shared-1"), ("em", "em"))},
    **{f"{name} {split}": partial(Ledger.difference, experiment=NORB, one=f"heads-{split}/{head}",
                                  other=f"heads-{split}/{head}-1", key="held_out")
       for split in ("azimuth", "elevation") for name, head in (("routing", "dynamic-shared"), ("em routing", "em"))},
    "sharing azimuth": partial(Ledger.difference, experiment=NORB, one="heads-azimuth/dynamic-shared",
                               other="heads-azimuth/dynamic", key="held_out"),
    **{name.format(split): partial(Ledger.difference, experiment=NORB, one=one.format(split), other=other.format(split),
                                   key="held_out")
       for split in ("azimuth", "elevation") for name, one, other in (
           ("paper {}", "paper-{}/caps", "paper-{}/cnn"), ("gap minus caps {}", "heads-{}/gap", "paper-{}/caps"))},
    **{f"paper {split} matched": partial(norb_matched, first=f"paper-{split}/cnn", other=f"paper-{split}/caps")
       for split in ("azimuth", "elevation")},
    "toys nearest error": lambda ledger: ledger.mean(NORB, "toys/likeness", "nearest_error"),
    "toys other class": lambda ledger: ledger.plain(NORB, "toys/likeness", "nearest_other_class", 1),
    "toys other view": lambda ledger: ledger.plain(NORB, "toys/likeness", "nearest_views", 1),
    "shapes caps": lambda ledger: ledger.mean(NORB, "shapes/caps", "held_out"),
    "shapes gap": lambda ledger: ledger.mean(NORB, "shapes/gap", "held_out"),
    "shapes nearest": lambda ledger: ledger.mean(NORB, "shapes/nearest", "held_out"),
    "shapes caps minus gap": lambda ledger: ledger.difference(NORB, "shapes/caps", "shapes/gap", "held_out")}


# -------------------------------------------------------------- the documents

MARK = re.compile(r"<!-- (table|value): ([^>]*?) -->((?:(?!<!--).)*)<!-- end -->", re.S)
PART = re.compile(r"<!--\s*(?:table|value|end)\b.*?-->", re.S)


def rendered(text, ledger, name):
    """A document's text with every table and number put in anew"""
    if damaged := PART.search(MARK.sub("", text)):           # what is no whole mark would take the text to the next end
        raise capsnet.InputError(f"{name}: {damaged[0]!r} is no whole mark; write <!-- table: NAME --> or "
                                 "<!-- value: NAME -->, and after its text <!-- end -->; nothing was changed")

    def put(match):
        kind, what = match[1], match[2]
        known = TABLES if kind == "table" else VALUES
        if what not in known:
            raise capsnet.InputError(f"{name}: names the {kind} {what!r}, which results/render.py does not define")
        try:
            body = known[what](ledger)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise capsnet.InputError(f"{kind} {what!r}: a result behind it lacks something ({error!r}); make it "
                                     "anew") from None
        return f"<!-- {kind}: {what} -->" + (f"\n{body}\n" if kind == "table" else body) + "<!-- end -->"
    return MARK.sub(put, text)


def documents(root):
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def render(root, folder, check=False, into=None, say=print):
    """Rewrite the documents, or only compare, or write them into another folder -> how many differ"""
    if not Path(folder).is_dir():
        raise capsnet.InputError(f"--results {folder}: no such folder; give the one that holds the results")
    ledger, texts = Ledger(folder), {path: path.read_text() for path in documents(root)}
    made = {path: rendered(text, ledger, path.name) for path, text in texts.items()}    # all, before one is written
    differing = [path for path in made if made[path] != texts[path]]
    for path in made if into else differing:
        new, name = made[path], path.relative_to(root)
        if check and not into:
            pairs = enumerate(zip(texts[path].splitlines(), [*new.splitlines(), ""]), 1)
            line = next(k for k, (old_line, new_line) in pairs if old_line != new_line)
            say(f"{name}: line {line} is not what results/ says; run python3 results/render.py")
            continue
        target = Path(into or root) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        capsnet.write_atomically(target, lambda file, new=new: file.write(new.encode()))
        say(f"rewrote {target}")
    return len(differing)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 where a document differs")
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR", help="where the results are")
    parser.add_argument("--into", type=Path, metavar="DIR", help="write the documents there, and leave these alone")
    args = parser.parse_args()
    sys.exit(1 if render(ROOT, args.results, args.check, args.into) and args.check else 0)


if __name__ == "__main__":
    capsnet.run_cli(main)
