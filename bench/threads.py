#!/usr/bin/env python3
"""Time a training step of four of our networks with more threads and larger batches.

    python3 bench/threads.py [--network paper multimnist cnn-gap em] [--threads 1 2 4 8] [--batch-size 32 64 128]
"""
import argparse
import itertools
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from lab.files import check_writable, machine, write_json
from lab.messages import InputError, run_cli

import numpy as np

NETWORKS = {"paper": (affnist, {"task": "mnist", "preset": "paper", "model": "capsnet"}),
            "multimnist": (multimnist, {}), "cnn-gap": (affnist, {"model": "cnn-gap"}),
            "em": (smallnorb, {"preset": "paper"})}


def setting(name, n, **given):
    """Return the module and the Config of a network, its initial weights and n synthetic digits or pairs, or images of
    noise"""
    module, flags = NETWORKS[name]
    if module is smallnorb:
        rng, known = np.random.default_rng(0), {f.name for f in module.SETTINGS}
        flags = {"batch_size": n} | flags | {key: value for key, value in given.items() if key in known}
        data = {"train": {"images": rng.integers(0, 256, (n, 48, 48, 2), np.uint8), "labels": rng.integers(0, 5, n)}}
        config = module.Config(**flags)
    else:
        config = module.Config(**{"n_train": n, "batch_size": n, "warmup": 0} | flags | given)
        data = {"train": module.synthesize_digits(600, 0)[:2]}
    return module, config, module.init_params(config), next(iter(module.epoch_samples(data, 0, config)))


def training_step(module, config, samples):
    """Return a function that does the step of train() with all samples as one batch"""
    state, workers = module.initial_state(config), module.worker_threads(config)
    rows = np.arange(len(samples["labels"]))

    def step():
        _, shard_grads, statistics = module.batch_gradients(state["params"], samples, rows, config, workers)
        module.optimizer_step(state, shard_grads, module.schedule(config, 0, 1), config, workers)
        module.update_running_statistics(state["running"], statistics, state["step"])
        state["step"] += 1
    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each, after one untimed (default: 10)")
    parser.add_argument("--out-json", metavar="FILE")
    args, rows = parser.parse_args(), []
    for flag, least in ("--repeats", args.repeats), ("--batch-size", min(args.batch_size)):
        if least < 1:
            raise InputError(f"{flag} {least}: must be at least 1")
    check_writable(args.out_json)
    result = vars(args) | machine() | {"numpy": np.__version__, "load": os.getloadavg(), "rows": rows}
    print(result, "| network | batch | threads | ms an image: median | least |", "|---" * 5 + "|", sep="\n")
    for name, n in itertools.product(args.network, args.batch_size):
        steps = {}
        for threads in args.threads:
            module, config, _, samples = setting(name, n, threads=threads)
            steps[threads] = training_step(module, config, samples)
        ms = {threads: [] for threads in steps}
        for k, threads in enumerate([*steps] * (1 + args.repeats)):
            start = time.perf_counter()
            steps[threads]()
            ms[threads] += [1000 * (time.perf_counter() - start) / n] * (k >= len(steps))
        for threads, taken in ms.items():
            median, least = np.median(taken), min(taken)
            rows.append({"network": name, "batch_size": n, "threads": threads, "ms": median, "ms_least": least})
            print(f"| {name} | {n} | {threads} | {median:.2f} | {least:.2f} |", flush=True)
    if args.out_json:
        write_json(args.out_json, result)


if __name__ == "__main__":
    run_cli(main)
