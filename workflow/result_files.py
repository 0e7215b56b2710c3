"""The results as files: results/EXPERIMENT/TABLE.jsonl has one line per run, sorted by setting and seed. A line is what
metrics.json holds of a run, preceded by the run's setting, its seed and the generation of tests/golden.json in which it
was made.

A result is tied to the golden values of its flags: what that network computes on tiny data. It is stale if they have
changed since it was made, if there are none, or if it was measured on weights that have changed since.
"""
import hashlib
import json
import math
import os
import re
from pathlib import Path

from lab.files import five_digits
from lab.statistics import wilson_interval

import numpy as np
from runs import RESULTS, ROOT, WEIGHTS

BY_NAME = {result.name: result for result in RESULTS}
GOLDEN = json.loads((ROOT / "tests" / "golden.json").read_text("utf-8"))["values"]


def read(folder):
    """Return {name of a result, EXPERIMENT/TABLE/SETTING-SEED: its line} of all tables in a folder"""
    found = {}
    for path in sorted(Path(folder).glob("*/*.jsonl")):
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read ({getattr(error, 'strerror', 'not UTF-8')}). Get the file again, "
                             "or check its permissions") from None
        for k, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
                name = f"{path.parent.name}/{path.stem}/{line['setting']}-{line['seed']}"
                known = line["experiment"], line["config"]["seed"], type(line["generation"])
                if known != (path.parent.name, line["seed"], int) or name in found:
                    raise ValueError("another experiment or seed, or one that is there already")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {k}: not a result ({error!r}). Restore the file, as with git checkout, "
                                 "or make it anew") from None
            found[name] = line
    return found


def since(result):
    """Return the generation in which the golden values of a result last changed; None if there are none"""
    return GOLDEN.get(result.experiment, {}).get(result.golden_key, {}).get("since")


def same_weights(line):
    """Return whether the weights files that a result was measured on, if any, are unchanged"""
    loaded = {line["loaded"]["file"]: line["loaded"]["sha256"]} if "loaded" in line else {}
    paths = {path.name: path for path in (ROOT / "weights").rglob("*.npz")}
    return all(file in paths and hashlib.sha256(paths[file].read_bytes()).hexdigest() == sha256
               for file, sha256 in (loaded | line.get("networks", {})).items())


def stale(name, lines):
    """Return whether a result has to be made again. A result that comes after a run was measured on its weights,
    which are not kept; the run is recognized by its training time."""
    line, result = lines[name], BY_NAME.get(name)
    last = since(result) if result else None
    if last is None or last > line["generation"]:
        return True
    if result.after:
        seconds = line.get("seconds_of_runs", [line["seconds_train"]])
        return any(run in lines and lines[run]["seconds_train"] != its_seconds
                   for run, its_seconds in zip(result.after, seconds, strict=True))
    return not same_weights(line)


def wanting(results, folder):
    """Return those of some results that a folder lacks, or has but stale"""
    lines = read(folder)
    return [result for result in results if result.name not in lines or stale(result.name, lines)]


def weights_wanting(folder):
    """Return the weights files that are missing or come from another run than the one in a folder, {path: the run}. A
    run is recognized by its last epoch: losses, accuracies and seconds."""
    lines = read(folder)

    def fresh(path, result):
        if wanting([result], folder) or not (ROOT / path).exists():
            return False
        with np.load(ROOT / path, allow_pickle=False) as file:
            last = json.loads(str(file["meta"]))["history"]["epochs"][-1]
        kept = {key: column[-1] for key, column in lines[result.name]["history"].items()}
        numbers = [key for key in kept if not isinstance(kept[key], list)]              # no hits per toy
        return kept.keys() == last.keys() and all(
            math.isclose(kept[key], last[key], rel_tol=1e-4) for key in numbers)
    return {path: result for path, result in WEIGHTS.items() if not fresh(path, result)}


def with_intervals(found):
    """Return a result with the 95% intervals, from the test images, of the accuracies of its test sets; and with the
    accuracy of each class in place of a confusion matrix"""
    intervals, found = {}, dict(found)
    for key in [key for key in found if key.endswith("confusion")]:
        rows = found.pop(key)
        found[key.replace("confusion", "per_class")] = [row[k] / sum(row) if any(row) else None
                                                        for k, row in enumerate(rows)]
    for key, name in ((key, re.sub("_(exact_match|accuracy)$", "", key)) for key in found):
        if key != name and f"{name}_hits" in found:
            n = min(found.get(f"{name}_n", found["config"].get("n_test")), 10_000)     # affNIST: 32 variants of a digit
            intervals[f"{key}_ci95"] = wilson_interval(found[key] * n, n)
    return intervals | found


def collect(paths, folder):
    """Move results, each in a file .../GENERATION/EXPERIMENT/TABLE/SETTING-SEED/metrics.json, into a folder's tables,
    where they replace those of the same setting and seed. A table is replaced whole or not at all."""
    new = {}
    for path in map(Path, paths):
        generation, experiment, table, run = path.parts[-5:-1]
        setting, _, seed = run.rpartition("-")
        line = {"setting": setting, "seed": int(seed), "generation": int(generation)}
        line |= five_digits(with_intervals(json.loads(path.read_text("utf-8"))))
        new.setdefault(Path(folder, experiment, f"{table}.jsonl"), []).append(line)
    for path, lines in new.items():
        there = path.read_text("utf-8").splitlines() if path.exists() else []
        by_run = {(line["setting"], line["seed"]): line for line in [*map(json.loads, there), *lines]}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text("".join(f"{json.dumps(by_run[run])}\n" for run in sorted(by_run)), "utf-8", newline="\n")
        os.replace(temporary, path)
    for path in paths:
        os.unlink(path)                      # so that the run is made again once its result is stale
