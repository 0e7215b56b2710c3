#!/usr/bin/env python3
"""Recompute the statistics of a trained network's batch normalizations, layer by layer, and evaluate it with them.

In training, batch normalization uses the mean and variance of 16 samples, in all layers. In evaluation it uses running
means of these, which were gathered while all earlier layers used those of 16 samples. In evaluation those layers use
running ones, too, so that the layer's inputs are distributed differently. In some networks the running statistics do
not fit these inputs: validation accuracy is then far below training accuracy, and changes by several points from epoch
to epoch. Here the layers are taken in order. Each gets the mean and variance of its input over --n-samples newly drawn
training samples, while all earlier layers work as in evaluation. Weights do not change, and neither validation nor test
images are used. With --earlier-layers training, they use the statistics of 16 samples instead: a control.

    python3 workflow/recompute_statistics.py --load runs/EXPERIMENT/NAME/weights.npz --out-weights recomputed.npz
    python3 EXPERIMENT.py --load recomputed.npz                              # it loads like any other
    python3 workflow/recompute_statistics.py --load FILE --help              # the flags of that network's experiment
"""
import argparse
import contextlib
import importlib
import itertools
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import multimnist_capsnet as multimnist  # before numpy: it sets the number of BLAS threads
from lab.files import check_writable, write_json
from lab.messages import InputError, Parser, Progress, run_cli

import numpy as np
import runs

N_SAMPLES, MOST_SAMPLES = 800, 20_000


def experiment_of(path):
    """Return the module of the experiment that wrote a file, multimnist_capsnet if the file does not say"""
    with contextlib.suppress(Exception), np.load(path, allow_pickle=False) as file:
        name = json.loads(str(file["meta"]))["experiment"]
        return importlib.import_module(name) if name in runs.EXPERIMENTS else multimnist
    return multimnist                                                   # whose load_network says what is wrong with it


def training_samples(experiment, data, config, n):
    """Return n training samples as the network would have seen them after its last epoch, {name: array}"""
    found = []
    for epoch in itertools.count(config.n_epochs):
        for samples in experiment.epoch_samples(data, epoch, config):
            found.append(samples)
            if sum(len(each["labels"]) for each in found) >= n:
                return {name: np.concatenate([each[name] for each in found])[:n] for name in samples}


def recompute_statistics(experiment, weights, samples, config, earlier="evaluation"):
    """Return weights, {name: array}, with all NAME_mean and NAME_var recomputed in the order of the layers.

    samples: a dict of the experiment's training samples, all of which are used, 16 at a time. earlier: how earlier
    layers work meanwhile, "evaluation" or "training". The variance is unbiased, like the running one.
    """
    weights, done = dict(weights), set()
    names = {id(a): name.removesuffix("_gamma") for name, a in weights.items() if name.endswith("_gamma")}
    norm_forward, norm_backward = experiment.LAYERS["norm"]
    while len(done) < len(names):
        sums = {}                                                       # of the first layer that is not yet done

        def recording(x, gamma, beta, running, empty, sums=sums):
            name = names[id(gamma)]
            if name not in done and sums.keys() <= {name}:
                now = np.array([np.full(len(gamma), x.size // len(gamma)), x.sum((0, 1, 2), dtype=float),
                                np.square(x, dtype=float).sum((0, 1, 2))])
                sums[name] = sums.get(name, 0) + now
            return norm_forward(x, gamma, beta, running if earlier == "evaluation" else None, empty)

        experiment.LAYERS["norm"] = recording, norm_backward
        try:
            for rows in np.split(np.arange(len(samples["labels"])), range(16, len(samples["labels"]), 16)):
                experiment.forward_rows(weights, samples, rows, config, np.empty)
        finally:
            experiment.LAYERS["norm"] = norm_forward, norm_backward
        (name, (n, total, squares)), = sums.items()
        mean, dtype = total / n, weights[name + "_mean"].dtype
        weights[name + "_mean"] = mean.astype(dtype)
        weights[name + "_var"] = (np.maximum(squares - n * mean * mean, 0) / np.maximum(1, n - 1)).astype(dtype)
        done.add(name)
    return weights


def main():
    which = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    which.add_argument("--load", nargs="?", default="")
    experiment = experiment_of(which.parse_known_args()[0].load)
    parser = Parser(description=__doc__)
    parser.add_argument("--load", required=True, metavar="FILE", help="the network, from a checkpoint or weights")
    parser.add_argument("--n-samples", type=int, default=N_SAMPLES, metavar="N", help="training samples to draw, over "
                        f"which the statistics are computed (default: {N_SAMPLES})")
    parser.add_argument("--earlier-layers", default="evaluation", choices=("evaluation", "training"), help="how the "
                        "layers before the one whose statistics are computed work (default: evaluation)")
    parser.add_argument("--out-weights", default="", metavar="FILE", help="write the network, with the new statistics, "
                        "to this .npz for evaluation: weights rounded to float16, no optimizer state")
    experiment.add_config_flags(parser)
    args = parser.parse_args()
    network, config = experiment.load_for_evaluation(args.load, args)
    experiment.check_config(config)
    check_writable(config.out_json, args.out_weights)
    if not network.state:
        raise InputError(f"--load {args.load}: has no batch normalization. Give a network with it")
    if not 2 <= args.n_samples <= MOST_SAMPLES:
        raise InputError(f"--n-samples {args.n_samples}: must be at least 2 and at most {MOST_SAMPLES}")
    progress = Progress(config.quiet)
    data = (experiment.load_data(config, progress) if hasattr(experiment, "load_data") else
            experiment.load_digits(config, progress.say))
    config = experiment.fit_to_data(config, data, network, f"--load {args.load}")
    samples = training_samples(experiment, data, network.config, args.n_samples)
    if args.out_weights:                                                # recompute and test what will be written
        network.weights |= {name: a.astype(np.float16).astype(a.dtype) for name, a in network.params.items()}
    progress.say(f"batch normalization: statistics over {args.n_samples:,} training samples ({data['source']}), "
                 f"earlier layers as in {args.earlier_layers}")
    with experiment.Runner(config.threads, progress=progress) as runner:
        weights = recompute_statistics(experiment, network.weights, samples, network.config, args.earlier_layers)
        tests = experiment.evaluate_test_sets(weights, data, config, runner)
    recomputed = {"recomputed": {"n_samples": args.n_samples, "source": data["source"],
                                 "earlier_layers": args.earlier_layers}}
    if args.out_weights:
        experiment.save_weights(args.out_weights, network.config, weights, network.history | recomputed)
        progress.say(f"wrote {args.out_weights}")
    result = recomputed | experiment.test_result(config, weights, network.history | {"source": data["source"]}, tests,
                                                 network)
    experiment.report(config, result, tests, progress.say)
    if config.out_json:
        write_json(config.out_json, result)
        progress.say(f"wrote {config.out_json}")


if __name__ == "__main__":
    run_cli(main)
