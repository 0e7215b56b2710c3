#!/usr/bin/env python3
"""Mean and 95% t interval over the JSON files that runs with different seeds wrote.

    python3 tests/summarize_runs.py runs/default-*.json
"""
import argparse
import json
import math
import sys

KEYS = ("test_set_accuracy", "test_any_accuracy", "test_recon_mse", "baseline_recon_mse", "seconds_train", "ms_per_step",
        "pairs_per_second", "peak_rss_mb")
T_QUANTILE = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)                  # 97.5%, 1..9 degrees of freedom
PER_RUN = ("seed", "threads", "out_json", "checkpoint", "resume", "quiet", "mnist_dir")        # may differ between the runs


def mean_and_half_width(values):
    """Mean and half the width of its 95% t interval; nan for one value, the normal quantile beyond ten"""
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return mean, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, (T_QUANTILE[n - 2] if n <= 10 else 1.96) * deviation / math.sqrt(n)


def settings(run):
    return {k: v for k, v in run["config"].items() if k not in PER_RUN} | {"digits": run["digits"]}


def load_run(path):
    try:
        with open(path) as file:
            run = json.load(file)
        [run[key] for key in (*KEYS, "config", "digits", "n_params", "versions")]
        return run
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{path}: not a file that --out-json wrote ({error})")


def fail(message):
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def main(paths):
    runs = [load_run(path) for path in paths]
    first = settings(runs[0])
    for path, run in zip(paths, runs):
        if differing := [f"{k} {v}, elsewhere {first[k]}" for k, v in settings(run).items() if v != first[k]]:
            fail(f"{path}: differs in more than its seed: {'; '.join(differing)}")
    seeds = [run["config"]["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        fail(f"the same seed twice: {seeds}")
    print(f"{runs[0]['digits']} digits, seeds {seeds}, {runs[0]['n_params']:,} parameters, versions {runs[0]['versions']}")
    for key in KEYS:
        values = [run[key] for run in runs]
        mean, half = mean_and_half_width(values)
        print(f"{key:20s} {mean:10.4f}" + (f" +- {half:.4f}   " + " ".join(f"{v:.4f}" for v in values) if len(runs) > 1 else ""))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("paths", nargs="+", metavar="RUN.json", help="files that --out-json wrote")
    main(parser.parse_args().paths)
