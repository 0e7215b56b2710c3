"""Train the two micro files with several seeds, as they are and with one line changed: test accuracy and seconds.

    python3 bench/micro.py                                     # prints; more than an hour on one quiet core
    python3 bench/micro.py --out-json bench/micro.json         # keeps the results, and makes only those that it lacks

Each run is a process of its own, in which main(seed) loads MNIST, trains, and classifies the 10,000 test images.
"""
import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from lab.files import check_writable, machine, write_json
from lab.messages import run_cli

import numpy as np

CHANGES = {                        # of a file: {name: a line of it, and what replaces this line}
    "microcapsnet": {
        "as it is": None,
        "one iteration": ("ITERATIONS = 3\n", "ITERATIONS = 1\n"),
        "another squash": ("    return q ** 2 / (1 + q ** 2), 2 * q / (1 + q ** 2) ** 2\n",
                           "    return 1 - np.exp(-q), np.exp(-q)\n")},
    "micro_matrix_capsnet": {
        "as it is": None,
        "one iteration": ("LAMBDAS = (1 / 64, 1 / 16)\n", "LAMBDAS = (1 / 16,)\n")}}
RUN = """
import sys, time
import {name}
wall, cpu = time.perf_counter(), time.process_time()
accuracy = {name}.main({seed})
print("RESULT", accuracy, time.perf_counter() - wall, time.process_time() - cpu)
"""


def changed(name, change):
    """Return the text of a file with one of its CHANGES."""
    text = (ROOT / f"{name}.py").read_text("utf-8")
    if CHANGES[name][change] is None:
        return text
    before, after = CHANGES[name][change]
    if text.count(before) != 1:
        sys.exit(f"error: {name}.py does not contain {before.strip()!r} once. Mend CHANGES in bench/micro.py")
    return text.replace(before, after)


def run(name, change, seed):
    """Return one row of the results: a file, trained with a seed in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{name}.py").write_text(changed(name, change), "utf-8")
        done = subprocess.run([sys.executable, "-c", RUN.format(name=name, seed=seed)], cwd=folder,
                              capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {name}.py, {change}, seed {seed}: {done.stderr.strip().removeprefix('error: ')}")
    accuracy, wall, cpu = map(float, done.stdout.split("RESULT")[1].split())
    return {"file": name, "change": change, "seed": seed, "accuracy": accuracy, "seconds": wall,
            "cpu_seconds": cpu, "load": os.getloadavg()[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--out-json", type=Path, metavar="FILE")
    args = parser.parse_args()
    check_writable(args.out_json)
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    result = {"machine": machine(), "versions": versions, "rows": []}
    if args.out_json and args.out_json.exists():
        result["rows"] = json.loads(args.out_json.read_text("utf-8"))["rows"]
    there = {(row["file"], row["change"], row["seed"]): row for row in result["rows"]}

    print("| file | change | seed | accuracy, % | seconds | CPU seconds |", "|---" * 6 + "|", sep="\n")
    for name, changes in CHANGES.items():
        for change in changes:
            for seed in args.seeds:
                row = there.get((name, change, seed))
                if row is None:
                    row = run(name, change, seed)
                    result["rows"].append(row)
                    if args.out_json:
                        write_json(args.out_json, result)
                times = f"{row['seconds']:.0f} | {row['cpu_seconds']:.0f}"
                print(f"| {name} | {change} | {seed} | {100 * row['accuracy']:.2f} | {times} |", flush=True)


if __name__ == "__main__":
    run_cli(main)
