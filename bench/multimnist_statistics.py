#!/usr/bin/env python3
"""Measure whether the running statistics of batch normalization could be gathered so that they fit in evaluation.

    python3 bench/multimnist_statistics.py --load weights/long/multimnist_paper_protocol.npz --digits mnist

The weights of a trained network stay as they are, as at the end of training, when the learning rate is 0. Its running
statistics are gathered anew over training pairs, in five ways, and each time its validation pairs are classified. No
test image is used.
"""
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import multimnist_capsnet as capsnet  # before numpy: it sets BLAS to one thread
from lab.files import check_writable, write_json
from lab.messages import InputError, Parser, run_cli
from lab.statistics import wilson_interval

from multimnist_nearest import add_data_flags, untrained_result

WAYS = {                           # name: pairs of a group, weight of a new group, layer by layer
    "as in training": (16, 0.01, False), "slower decay": (16, 0.001, False), "groups of 64": (64, 0.01, False),
    "groups of 256": (256, 0.01, False), "layer by layer": (16, 0.01, True)}


def evaluation_statistics(weights, images, config):
    """Return the mean and the unbiased variance of each normalization's input, {name: (C,)}, if all normalizations
    before it use the running statistics in weights, as in evaluation. images: (N, 36, 36)"""
    found = {}
    for conv, _, (rows, gamma, *_), *_ in capsnet.convolutions_forward(weights, images, config, None)[1]:
        x = rows.reshape(-1, len(gamma))
        found |= {f"{conv.name}_norm_mean": x.mean(0), f"{conv.name}_norm_var": x.var(0, ddof=1)}
    return found


def gather(state, data, config, n, size, rate, layer_by_layer):
    """Return running statistics over n training pairs, {name: (C,)}. The k-th group of them counts max(rate, 1 / k)"""
    running = {name: a.copy() for name, a in state["running"].items()}
    k = 0
    for samples in capsnet.epoch_samples(data, config.n_epochs, dataclasses.replace(config, n_train=n)):
        for rows in capsnet.batches(samples, size):
            images, found, k = capsnet.to_batch(samples, rows)["images"], {}, k + 1
            if layer_by_layer:
                found = evaluation_statistics(state["params"] | running, images, config)
            else:
                capsnet.convolutions_forward(state["params"], images, config, found)
            for name, value in found.items():
                running[name] += (value - running[name]) * max(rate, 1 / k)
    return running


def main():
    parser = Parser(__doc__)
    parser.add_argument("--load", required=True, metavar="FILE", help="a network with batch normalization")
    parser.add_argument("--n-pairs", type=int, default=24000, metavar="N", help="training pairs (default: 24000)")
    parser.add_argument("--n-val", type=int, metavar="N", help="validation pairs (default: as in its training)")
    add_data_flags(parser)
    args = parser.parse_args()
    if not 1 <= args.n_pairs <= 10 ** 7:
        raise InputError(f"--n-pairs {args.n_pairs}: must be between 1 and 10,000,000")
    config, state = capsnet.load(args.load)
    if not state["running"]:
        raise InputError(f"{args.load}: has no batch normalization. Load another network")
    check_writable(args.out_json)
    n_val = config.n_val if args.n_val is None else args.n_val
    config = dataclasses.replace(config, digits=args.digits, data_dir=args.data_dir, n_val=n_val)
    data = capsnet.load_data(config)
    config, found = capsnet.fit_to_data(config, data), {}

    def measure(way, running):
        with capsnet.worker_threads(config) as workers:
            metrics = capsnet.validate(state["params"] | running, data, config, workers)
        accuracy, key = float(metrics["val_exact_match"]), way.replace(" ", "_")
        found.update({key: accuracy, key + "_ci95": wilson_interval(accuracy * config.n_val, config.n_val)})
        print(f"{way:24} validation accuracy {accuracy:.4f}", flush=True)
    measure("of the training", state["running"])
    for way, (size, rate, layer_by_layer) in WAYS.items():
        measure(way, gather(state, data, config, args.n_pairs, size, rate, layer_by_layer))
    measure("recomputed", capsnet.recompute_statistics(state, data, config, 800))
    if args.out_json:
        write_json(args.out_json, untrained_result(capsnet, config, data["source"], {
            "loaded": capsnet.identity_of(args.load, config), "n_params": sum(p.size for p in state["params"].values()),
            "bench": {"n_pairs": args.n_pairs, "n_val": config.n_val}, "validation": found}))


if __name__ == "__main__":
    run_cli(main)
