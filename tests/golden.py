#!/usr/bin/env python3
"""Golden values: what every network of the results computes on tiny data, in float64.

    python3 tests/golden.py                report values that the code no longer reproduces; exit code 1 if any
    python3 tests/golden.py --write        compute and store the sets that are missing; all others stay
    python3 tests/golden.py --write-all    store what the code computes now; results of changed sets become stale

Golden values belong to a set of flags of workflow/runs.py without those that only set sizes. They hold a digest of the
samples drawn, the loss terms of every step of two tiny epochs of the real training loop, the norm of every gradient of
the first step, and the evaluation afterwards. Agreement within 1e-8 means: the same experiment. A different rounding
changes no golden value on any processor; a different formula, schedule, evaluation or data does.

tests/golden.json counts generations: `since` is the generation in which a set was last changed, and each result carries
the generation in which it was made.
"""
import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import multiprocessing
import re
import shlex
import sys
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "workflow")]
import runs

modules = {name: importlib.import_module(name) for name in runs.EXPERIMENTS}
import numpy as np  # after the experiments, which set the number of BLAS threads

GOLDEN = ROOT / "tests" / "golden.json"
TOLERANCE = 1e-8
SINGLE = 1e-3                      # of first gradients in float32, which may choose another of two near maxima
SIZES = {"n_epochs": 2, "n_train": 38, "n_val": 16, "n_test": 24, "batch_size": 18, "threads": 1, "quiet": True,
         "digits": "synthetic"}    # steps of 18, 18 and 2 samples: two groups of a normalization, which has 16


def applies(f, config):
    """Return whether a setting, a field of Config, applies to the model, preset, ... of a Config"""
    return all(getattr(config, name) in values for name, values in f.metadata.get("only", {}).items())


def applying(experiment, given):
    """Return those of some given settings, {name: value}, that apply beside each other"""
    fields = modules[experiment].Config.__dataclass_fields__

    def is_met(other, values):
        return given.get(other, fields[other].default) in values
    return {name: value for name, value in given.items() if all(
        is_met(other, values) for other, values in fields[name].metadata.get("only", {}).items())}


def tiny_config(experiment, flags):
    """Return the Config of some flags at toy size"""
    module, parser = modules[experiment], argparse.ArgumentParser()
    module.add_settings(parser)
    config = module.configs_of(module.given_settings(parser.parse_args(shlex.split(flags))))[0]
    return dataclasses.replace(config, **{f.name: SIZES[f.name] for f in module.SETTINGS
                                          if f.name in SIZES and applies(f, config)})


def tiny_data(experiment, config):
    """Return what train and evaluate_test take for data, drawn here: digits, images in color, or views of toys and
    shapes"""
    if getattr(config, "task", "") == "images":
        return few_images(experiment)
    digits = hasattr(modules[experiment], "synthesize_digits")
    return few_digits(experiment) if digits else few_views(experiment, config)


@functools.cache
def few_digits(experiment):
    """Return load_data's dict of few synthetic digits"""
    images, labels, _ = modules[experiment].synthesize_digits(600, 0)
    ends = {"train": (0, 400), "val": (400, 500), "test": (500, 600)}
    return {"source": "synthetic"} | {name: (images[low:high], labels[low:high]) for name, (low, high) in ends.items()}


@functools.cache
def few_images(experiment):
    """Return load_data's dict of few images in color, (32, 32, 3): synthetic digits in two colors each, drawn here"""
    rng, found = np.random.default_rng(0), {"source": "images"}
    for name, (images, labels) in ((name, part) for name, part in few_digits(experiment).items() if name != "source"):
        ink = np.pad(images, [(0, 0), (2, 2), (2, 2)])[..., None] / 255
        colors = rng.integers(0, 256, (2, len(images), 1, 1, 3))
        found[name] = (ink * colors[0] + (1 - ink) * colors[1]).astype(np.uint8), labels
    return found


def few_views(experiment, config):
    """Return load_data's dict of few images: of whole views where toys are drawn, so that few are"""
    module = modules[experiment]
    data = module.select_images(config)
    for name, n in (("train", SIZES["n_train"]), ("familiar", SIZES["n_test"]), ("novel", SIZES["n_test"])):
        rows = np.ones(len(data[name]["labels"]), bool)
        rows = (module.sample_views(data[name], rows, n).nonzero()[0] if config.data == "toys" else
                np.random.default_rng(0).permutation(len(rows)))
        data[name] = {key: array[rows[:n]] for key, array in data[name].items()}
    if config.data == "toys":
        module.add_toy_images([data[name] for name in ("train", "familiar", "novel")], config)
    return data


def summary(value):
    """What is kept of a result: numbers, and of arrays a digest, or their mean where they hold what was rounded"""
    if isinstance(value, dict):
        return {str(key): summary(item) for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "iub":
        kept = np.ascontiguousarray(value).astype(np.int64)
        return f"{value.shape} {hashlib.sha256(kept.tobytes()).hexdigest()[:16]}"
    if isinstance(value, np.ndarray):
        return [list(value.shape), float(value.mean(dtype=float))]
    if isinstance(value, (list, tuple)):
        return [summary(item) for item in value]
    return float(f"{value:.12g}") if isinstance(value, (float, np.floating)) else int(value)


def per_class(tests):
    """Return the results of a test with the accuracy of each class in place of the confusion matrix"""
    def right(counts):
        return [row[k] / sum(row) if any(row) else float("nan") for k, row in enumerate(counts)]
    return {key.replace("confusion", "per_class"): right(value) if "confusion" in key else
            per_class(value) if isinstance(value, dict) else value for key, value in tests.items()}


def drawn(module, samples):
    """Return a chunk of epoch_samples; images that to_batch crops at random, by the jitter of each, are cropped"""
    if "jitter" not in samples:
        return samples
    images = module.to_batch(samples, np.arange(len(samples["labels"])), float)["images"]
    return {name: a for name, a in samples.items() if name != "jitter"} | {"images": images}


def norms_of(shard_grads):
    """Return {name: norm of its gradient} of the gradients of a step's shards"""
    return {name: float(np.linalg.norm(sum(grads[name].astype(float) for grads in shard_grads)))
            for name in shard_grads[0]}


def first_gradients(module, data, config, dtype):
    """Return the norms of the first step's gradients, by the code that trains"""
    params = {name: p.astype(dtype) for name, p in module.init_params(config).items()}
    samples = next(iter(module.epoch_samples(data, 0, config)))
    with module.worker_threads(config) as workers:
        return norms_of(module.batch_gradients(params, samples, np.arange(config.batch_size), config, workers)[1])


def compute(experiment, flags):
    """Return the golden values of an experiment's flags, and the relative distance of the first step's gradients in
    float32 from those in float64. The hits of a step are its accuracy times its number of samples."""
    module, config = modules[experiment], tiny_config(experiment, flags)
    data = tiny_data(experiment, config)
    config = module.fit_to_data(config, data)
    steps, gradients = [], []
    values = {"drawn": summary({k: drawn(module, samples) for k, samples in enumerate(
        module.epoch_samples(data, 1, config))})}
    batch_gradients = module.batch_gradients

    def seen(*given):
        found = batch_gradients(*given)
        if not gradients:
            gradients.append(norms_of(found[1]))
        return found
    with unittest.mock.patch.object(module, "batch_gradients", seen):
        state = module.train(config, data, each_step=lambda state, terms: steps.append(dict(terms)), dtype=float)
    per_epoch = [len(rows) for samples in module.epoch_samples(data, 0, config)
                 for rows in module.batches(samples, config.batch_size)]
    steps = [{name: terms[name] for name in terms if name != "accuracy"} | {"hits": round(n * terms["accuracy"])}
             for terms, n in zip(steps, per_epoch * config.n_epochs)]
    values |= {"steps": summary(steps), "history": summary([{name: value for name, value in epoch.items()
                                                             if name != "seconds"}
                                                            for epoch in state["history"]["epochs"]])}
    with module.worker_threads(config) as workers:
        values["tests"] = summary(per_class(module.evaluate_test(module.weights_of(state), data, config, workers)))
    exact, = gradients
    single = first_gradients(module, data, config, np.float32)
    values["gradients"] = summary(exact)
    return values, max(abs(exact[name] - single[name]) for name in exact) / max(exact.values())


def pool():
    """Return a pool of two processes"""
    return concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))


def differences(known, found, at=""):
    """Return where computed values differ from golden ones, as a list of texts. Keys that only the computed values
    have, such as a new metric, are no difference."""
    if isinstance(known, dict) and isinstance(found, dict) and known.keys() <= found.keys():
        return [fault for key in known for fault in differences(known[key], found[key], f"{at}/{key}")]
    if isinstance(known, list) and isinstance(found, list) and len(known) == len(found):
        return [fault for k, pair in enumerate(zip(known, found)) for fault in differences(*pair, f"{at}/{k}")]
    number = (int, float)
    if isinstance(known, number) and isinstance(found, number):
        near = known == found or abs(known - found) <= TOLERANCE * max(1, abs(known))
        return [] if near or known != known and found != found else [f"{at}: {known:.12g}, now {found:.12g}"]
    return [] if known == found else [f"{at}: {known}, now {found}"]


def stored():
    """Return what tests/golden.json holds: generation, and values[experiment][flags]"""
    if not GOLDEN.exists():
        return {"generation": 0, "values": {}}
    return json.loads(GOLDEN.read_text("utf-8"))


def read():
    """Return the golden values, without those that are not computed any more: the accuracy per class
    and angle"""
    known = stored()
    for of_flags in known["values"].values():
        for one in of_flags.values():
            one["tests"].get("sweep", {}).pop("per_class", None)
    return known


def store(generation, values):
    """Write tests/golden.json, a set of flags on each line"""
    parts = []
    for experiment, of_flags in values.items():
        lines = [f"{json.dumps(flags)}: {json.dumps(one)}"
                 for flags, one in sorted(of_flags.items())]
        parts.append(f"{json.dumps(experiment)}: {{\n" + ",\n".join(lines) + "}")
    values_text = ",\n".join(parts)
    text = f'{{"generation": {generation}, "values": {{\n{values_text}}}}}\n'
    GOLDEN.write_text(text, "utf-8", newline="\n")


def wanted():
    """Return (experiment, flags) of every set that workflow/runs.py needs, and of each experiment's default"""
    return list(dict.fromkeys([*((result.experiment, result.golden_key) for result in runs.RESULTS),
                               *((name, "") for name in runs.EXPERIMENTS)]))


ALONE = ("--padding", "--n-per-class")                 # flags that are tried with every network


@functools.cache
def combinations():
    """Return the sets among wanted() that those that are left cover between them: each flag, and each two flags that
    are not ALONE, occur together in one that is left; widths do not count"""
    covered = {}
    for experiment, flags in wanted():
        parts = [part for part in re.findall(r"--\S+(?: (?!--)\S+)?", flags) if "-channels" not in part]
        pairs = itertools.combinations([part for part in parts if part.split()[0] not in ALONE], 2)
        if "matrix-capsnet --preset paper" in flags:                    # a third of the time: one is enough
            pairs = [("--model matrix-capsnet", "--preset paper")]
        covered[experiment, flags] = [(experiment, *pair) for pair in (*pairs, *((part,) for part in parts))]
    left, found = collections.Counter(pair for of in covered.values() for pair in of), set()
    for key, of in sorted(covered.items(), key=lambda item: len(item[1])):
        if of and all(left[pair] > 1 for pair in of):
            found.add(key)
            left.subtract(of)
    return found


def computed(keys):
    """Compute sets in two processes; yield (experiment, flags), the values and the distance of float32
    of each"""
    with pool() as workers:
        futures = {key: workers.submit(compute, *key) for key in keys}
        for key, future in futures.items():
            yield key, *future.result()


def report(key, faults, distance):
    print(f"{' '.join(key).strip()}: {'; '.join(faults[:3])}  (float32: {distance:.1e})", flush=True)


def write_missing():
    """Store the sets that tests/golden.json lacks, in a new generation; leave all others as they are"""
    known = stored()
    generation, values = known["generation"] + 1, known["values"]
    missing = [key for key in wanted() if key[1] not in values.get(key[0], {})]
    for key, found, distance in computed(missing):
        report(key, ["new"], distance)
        values.setdefault(key[0], {})[key[1]] = {"since": generation} | found
    if missing:
        store(generation, values)
    print(f"{len(missing)} of {len(wanted())} sets were missing")


def compare_all(write):
    """Report the sets that the code does not reproduce, and return how many. write: store them anew, in
    a new generation, and leave out the sets that nothing needs any more"""
    known, kept = read()["values"], stored()
    generation, values, n_changed = kept["generation"] + 1, {}, 0
    for (experiment, flags), found, distance in computed(wanted()):
        old = known.get(experiment, {}).get(flags)
        faults = ["new"]
        if old:
            faults = differences({name: old[name] for name in old if name != "since"}, found)
        if faults or distance > SINGLE:
            report((experiment, flags), faults, distance)
        if faults:
            n_changed += 1
            one = {"since": generation} | found
        else:
            one = kept["values"][experiment][flags]
        values.setdefault(experiment, {})[flags] = one
    if write:
        store(generation if n_changed else kept["generation"], values)
    return n_changed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="store the sets that are missing")
    what.add_argument("--write-all", action="store_true", help="store what the code computes now")
    args = parser.parse_args()
    if args.write:
        write_missing()
        return
    n_changed = compare_all(args.write_all)
    if n_changed and not args.write_all:
        sys.exit(1)


if __name__ == "__main__":
    main()
