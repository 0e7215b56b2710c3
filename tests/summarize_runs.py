#!/usr/bin/env python3
"""Mean and 95% t interval over the JSON files that runs with different seeds wrote, or a table of several settings.

    python3 tests/summarize_runs.py runs/default-*.json
    python3 tests/summarize_runs.py --table runs/default-*.json runs/*.json

The table has a row for each setting, the first file's first; differences are paired by seed with that first setting.
"""
import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import multimnist_capsnet as capsnet  # noqa: E402

KEYS = ("test_set_accuracy", "test_any_accuracy", "test_recon_mse", "baseline_recon_mse", "seconds_train",
        "ms_per_step", "pairs_per_second", "peak_rss_mb")
TABLE = (("set accuracy", "test_set_accuracy", "{:.3f}"), ("MSE", "test_recon_mse", "{:.4f}"),
         ("ms a step", "ms_per_step", "{:.0f}"))
PER_RUN = ("seed", "threads", "out_json", "checkpoint", "resume", "quiet", "mnist_dir")    # may differ between the runs


def settings(run):
    """What a run was told, without what may differ between its seeds; settings of later versions at their defaults"""
    told = capsnet.settings_of(capsnet.config_of(run["config"], ""))
    return {k: v for k, v in told.items() if k not in PER_RUN} | {"digits": run["source"]}


def load_run(path):
    try:
        with open(path) as file:
            run = json.load(file)
        [run[key] for key in (*KEYS, "config", "source", "n_params", "versions")]
        settings(run)
        return run
    except (OSError, ValueError, KeyError, TypeError, capsnet.InputError) as error:
        fail(f"{path}: not a file that --out-json wrote ({error})")


def fail(message):
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def table(paths):
    """One row for each setting: how it differs from the first one's, means, and the difference paired by seed"""
    groups = {}
    for path in dict.fromkeys(str(Path(path).resolve()) for path in paths):
        run = load_run(path)
        runs = groups.setdefault(json.dumps(settings(run), sort_keys=True), {})
        if run["config"]["seed"] in runs:
            fail(f"{path}: the second run of these settings with seed {run['config']['seed']}; name one of the two")
        runs[run["config"]["seed"]] = run
    (first, base), *_ = groups.items()
    first = json.loads(first)
    print("| setting | parameters | seeds | " + " | ".join(name for name, *_ in TABLE)
          + " | set accuracy against the first row |")
    print("|---|---|---|" + "---|" * len(TABLE) + "---|")
    for group, runs in groups.items():
        told = json.loads(group)
        usual = capsnet.settings_of(capsnet.Config(preset=told["preset"], model=told["model"]))
        shown = {
            k: v
            for k, v in told.items()
            if v != first[k]
            and (k in ("preset", "model") or v != usual[k]
                 or (told["preset"], told["model"]) == (first["preset"], first["model"]))}
        row = [" ".join(f"{k} {v}" for k, v in shown.items()) or "first", f"{next(iter(runs.values()))['n_params']:,}",
               " ".join(map(str, sorted(runs)))]
        for _, key, form in TABLE:
            values = [run[key] for run in runs.values() if run[key] is not None]
            mean, half = capsnet.mean_and_interval(values) if values else (math.nan, math.nan)
            row.append(
                (form.format(mean) + ("" if math.isnan(half) or key == "ms_per_step" else f" +- {form.format(half)}"))
                if values else "")
        shared = sorted(runs.keys() & base.keys()) if runs is not base else []
        if shared:
            mean, half = capsnet.mean_and_interval(
                [runs[s]["test_set_accuracy"] - base[s]["test_set_accuracy"] for s in shared])
            row.append(f"{mean:+.3f}" + ("" if math.isnan(half) else f" +- {half:.3f}"))
        print("| " + " | ".join([*row, ""][:len(TABLE) + 4]) + " |")


def main(paths):
    runs = [load_run(path) for path in paths]
    first = settings(runs[0])
    for path, run in zip(paths, runs):
        if differing := [f"{k} {v}, elsewhere {first[k]}" for k, v in settings(run).items() if v != first[k]]:
            fail(f"{path}: differs in more than its seed: {'; '.join(differing)}")
    seeds = [run["config"]["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        fail(f"the same seed twice: {seeds}")
    print(
        f"{runs[0]['source']} digits, seeds {seeds}, {runs[0]['n_params']:,} parameters, versions {runs[0]['versions']}"
    )
    for key in KEYS:
        values = [run[key] for run in runs]
        if None in values:                                                                     # the CNN redraws nothing
            continue
        mean, half = capsnet.mean_and_interval(values)
        print(f"{key:20s} {mean:10.4f}"
              + (f" +- {half:.4f}   " + " ".join(f"{v:.4f}" for v in values) if len(runs) > 1 else ""))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("paths", nargs="+", metavar="RUN.json", help="files that --out-json wrote")
    parser.add_argument("--table", action="store_true", help="one row for each setting, compared with the first file's")
    args = parser.parse_args()
    (table if args.table else main)(args.paths)
