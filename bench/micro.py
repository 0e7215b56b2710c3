"""Train the two micro files with several seeds: test accuracy, seconds of wall time and of CPU time.

    python3 bench/micro.py                                     # prints; about 20 minutes on one quiet core
    python3 bench/micro.py --out-json bench/micro.json         # writes the results as well

Each run is a process of its own, in which main(seed) loads MNIST, trains, and classifies the 10,000 test images.
"""
import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from lab.files import check_writable, machine, write_json
from lab.messages import InputError, run_cli

import numpy as np

FILES = ("microcapsnet", "micro_matrix_capsnet")
RUN = """
import sys, time
import {name}
wall, cpu = time.perf_counter(), time.process_time()
accuracy = {name}.main({seed})
print("RESULT", accuracy, time.perf_counter() - wall, time.process_time() - cpu)
"""


def run(name, seed):
    """Return one row of the results: a file, trained with a seed in a new process."""
    done = subprocess.run([sys.executable, "-c", RUN.format(name=name, seed=seed)], cwd=ROOT, capture_output=True,
                          text=True)
    if done.returncode:
        raise InputError(f"{name}.py, seed {seed}: {done.stderr.strip().removeprefix('error: ')}")
    accuracy, wall, cpu = map(float, done.stdout.split("RESULT")[1].split())
    return {"file": name, "seed": seed, "accuracy": accuracy, "seconds": wall, "cpu_seconds": cpu}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--out-json", metavar="FILE")
    args, rows = parser.parse_args(), []
    check_writable(args.out_json)
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    result = {"machine": machine(), "versions": versions, "load": os.getloadavg(), "rows": rows}
    print(result, "| file | seed | accuracy, % | seconds | CPU seconds |", "|---" * 5 + "|", sep="\n")
    for name in FILES:
        for seed in args.seeds:
            row = run(name, seed)
            rows.append(row)
            times = f"{row['seconds']:.0f} | {row['cpu_seconds']:.0f}"
            print(f"| {name} | {seed} | {100 * row['accuracy']:.2f} | {times} |", flush=True)
    if args.out_json:
        write_json(args.out_json, result)


if __name__ == "__main__":
    run_cli(main)
