#!/usr/bin/env python3
"""Make a weights file to be shipped in weights/ of a run: weights as float16, no optimizer state.

With --small, for a network of affnist_capsnet.py on the page of explore.py, it also omits the decoder and rounds every
weight to a multiple of a power of two near half its array's standard deviation, which compresses well; its history says
what was changed. --load reads both.

    python3 workflow/slim.py RUN weights/affnist_small_capsnet.npz --small      # RUN: its folder, or a weights file
"""
import dataclasses
import importlib
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import lab
from lab.files import write_atomically
from lab.messages import InputError, Parser, run_cli

import numpy as np

SHARE = 1 / 2                      # of a standard deviation: a network of --preset small then takes about a megabyte


def rounded(a):
    """Return a matrix rounded as described above; a vector of biases as it is"""
    step = 2.0 ** np.round(np.log2(SHARE * a.std())) if a.ndim > 1 else 0
    return np.rint(a / step) * step if step else a


def slim(source, target, small):
    name = lab.experiment_of(source)
    if name is None:
        raise InputError(f"{source}: no trained network. Give a run's folder, or its weights.npz")
    experiment = importlib.import_module(name)
    config, state = experiment.load(source)
    params = state["params"]
    if small and name != "affnist_capsnet":
        raise InputError(f"{source}: --small is for networks of affnist_capsnet.py. Leave it out")
    if small:
        params = {name: rounded(a) for name, a in params.items() if not name.startswith("dec")}
        state["history"] |= {"slimmed": f"rounded to about {SHARE:g} standard deviations, no decoder; trained with "
                             f"recon_weight {config.recon_weight:g}"}
        config = dataclasses.replace(config, recon_weight=0.0)                          # as there is no decoder
    with np.errstate(over="ignore"):
        state["params"] = {name: a.astype(np.float16) for name, a in params.items()}
    if large := [name for name, a in state["params"].items() if not np.isfinite(a).all()]:
        raise InputError(f"{source}: {large[0]} exceeds float16's maximum. Ship the weights.npz itself")
    with tempfile.TemporaryDirectory() as folder:
        experiment.save(f"{folder}/net.npz", config, experiment.without_moments(state))
        with np.load(f"{folder}/net.npz") as file:
            write = np.savez_compressed if small else np.savez
            write_atomically(target, lambda out: write(out, **file))
    print(f"wrote {target}  ({Path(target).stat().st_size / 1e6:.2f} MB)")


def main():
    parser = Parser(description=__doc__)
    parser.usage = "%(prog)s [--small] RUN TARGET"
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or a weights file")
    parser.add_argument("target", metavar="TARGET", help="the file to write")
    parser.add_argument("--small", action="store_true", help="omit the decoder, and round every weight")
    args = parser.parse_args()
    slim(args.run, args.target, args.small)


if __name__ == "__main__":
    run_cli(main)
