"""What the programs outside the experiments share. No experiment imports it, and it imports none: it works on them by
their command line, by their files, and as a module that a program hands over.

An experiment is a script EXPERIMENT.py beside this folder that defines `train` and has a folder in results/. This is
the contract with it.

Flags:    those of its settings; --model takes several models; --seed and --n-seeds; --load FILE evaluates a trained
          network; --checkpoint FILE is written after every epoch, and resumed if it exists; --out-json FILE ("-":
          standard output); --out-weights FILE; --threads; --quiet; --no-save.
Messages: a line of progress begins with "epoch K/N", one of a resumed run contains "resuming at"; an error of the user
          is one line "error: ..." on standard error, and exit code 2; Ctrl-C gives exit code 130.
JSON:     experiment, config (settings by name), source (of the data), n_params, the metrics, seconds_train, versions,
          machine, history (columns by name, one value per epoch); of a loaded network also loaded: file, sha256,
          trained_seed. Of several networks: runs, a list of these, and summary.
Weights:  a file .npz of arrays params/NAME and state/NAME, their digest, and meta, a JSON text: experiment, step,
          config, history.
Module:   EXPERIMENT, its name; Config, a dataclass whose fields' metadata describe the settings; load_data or
          load_digits; train; evaluate; forward; loss_and_grads; load_network; save_network; and InputError, an error of
          the user, which is known by its name.
"""
import json
import os
import zipfile
from pathlib import Path

# One BLAS thread, set before numpy is imported, as in the experiments: with more threads the rounding of products would
# depend on the number of cores.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ[name] = "1"

ROOT = Path(__file__).resolve().parents[1]
FIRST = ("multimnist_capsnet", "smallnorb_novel_viewpoint", "affnist_capsnet")        # the order in tables


def experiments():
    """Return the names of all experiments, those of FIRST first"""
    found = sorted(path.stem for path in ROOT.glob("*_*.py") if (ROOT / "results" / path.stem).is_dir()
                   and "\ndef train(" in path.read_text("utf-8"))
    return sorted(found, key=[*FIRST, *found].index)


def experiment_of(path):
    """Return the name of the experiment that wrote a weights file; None if it is not such a file"""
    import numpy as np  # here: the list above is read without it
    try:
        with np.load(path, allow_pickle=False) as file:
            return json.loads(str(file["meta"]))["experiment"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
