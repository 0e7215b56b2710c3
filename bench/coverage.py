"""How often 95% intervals over seeds and toys hold the true mean, by simulation.

    python3 bench/coverage.py                                  # prints; about a minute
    python3 bench/coverage.py --out-json bench/coverage.json   # writes the results as well

Differences of two networks are drawn for 25 toys, five of each of five classes, and several seeds: an effect of the
seed, one of the toy, and a rest, normally distributed; the true mean is 0. Two intervals are compared: over seeds and
toys (lab.statistics.crossed_interval), and over seeds alone.
"""
import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from lab.files import check_writable, write_json
from lab.messages import run_cli
from lab.statistics import crossed_interval, mean_and_interval

import numpy as np

CLASSES = np.repeat(np.arange(5), 5)
SEEDS = (3, 5, 10)
VARIANCES = {                      # of seed, toy and rest
    "all alike": (1, 1, 1), "seeds only": (1, 0, 1), "toys only": (0, 1, 1), "toys, few seeds' effect": (0.1, 1, 1),
    "seeds, few toys' effect": (1, 0.1, 1), "neither": (0, 0, 1)}


def coverage(n_seeds, variances, n_draws, rng):
    """Return how often the two intervals hold 0: over seeds and toys, over seeds alone."""
    of_seed, of_toy, of_rest = np.sqrt(variances)
    held = np.zeros(2)
    for _ in range(n_draws):
        values = (of_seed * rng.standard_normal((n_seeds, 1)) + of_toy * rng.standard_normal((1, len(CLASSES)))
                  + of_rest * rng.standard_normal((n_seeds, len(CLASSES))))
        for k, (mean, half) in enumerate((crossed_interval(values, CLASSES), mean_and_interval(values.mean(1)))):
            held[k] += abs(mean) <= half
    return (held / n_draws).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-draws", type=int, default=4000)
    parser.add_argument("--out-json", type=Path, metavar="FILE")
    args = parser.parse_args()
    check_writable(args.out_json)
    rng, rows = np.random.default_rng(0), []
    print("| seeds | variances of seed, toy, rest | seeds and toys | seeds alone |", "|---" * 4 + "|", sep="\n")
    for n_seeds in SEEDS:
        for name, variances in VARIANCES.items():
            crossed, seeds = coverage(n_seeds, variances, args.n_draws, rng)
            rows.append({"seeds": n_seeds, "variances": variances, "crossed": crossed, "seeds_alone": seeds})
            print(f"| {n_seeds} | {name}: {variances} | {crossed:.1%} | {seeds:.1%} |", flush=True)
    if args.out_json:
        write_json(args.out_json, {"n_draws": args.n_draws, "rows": rows})


if __name__ == "__main__":
    run_cli(main)
