#!/usr/bin/env python3
"""Make a small weights file of a network of affnist_capsnet.py, to be shipped in weights/ for explore.py.

It omits the decoder and rounds every weight to a multiple of a power of two near half its array's standard deviation,
which compresses well. --load still reads the file; its history says what was changed.

    python3 workflow/slim.py CHECKPOINT weights/affnist_small_capsnet.npz
"""
import dataclasses
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
from lab.files import write_atomically
from lab.messages import run_cli

import numpy as np

SHARE = 1 / 2                      # of a standard deviation: a network of --preset small then takes about a megabyte


def rounded(a):
    """Return a matrix rounded as described above, as float16; a vector of biases only as float16"""
    step = 2.0 ** np.round(np.log2(SHARE * a.std())) if a.ndim > 1 else 0
    return (np.rint(a / step) * step if step else a).astype(np.float16)


def slim(source, target):
    found = affnist.load_network(source)
    params = {name: rounded(a) for name, a in found.params.items() if not name.startswith("dec")}
    history = found.history | {"slimmed": f"rounded to about {SHARE:g} standard deviations, no decoder; trained with "
                               f"recon_weight {found.config.recon_weight:g}"}
    config = dataclasses.replace(found.config, recon_weight=0.0)                        # as there is no decoder
    with tempfile.TemporaryDirectory() as folder:
        affnist.save_network(f"{folder}/net.npz", config, history, {"params": params, "state": found.state})
        with np.load(f"{folder}/net.npz") as file:
            write_atomically(target, lambda out: np.savez_compressed(out, **file))
    print(f"wrote {target}  ({Path(target).stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    run_cli(lambda: slim(*sys.argv[1:3]) if len(sys.argv) == 3 else print(__doc__))
