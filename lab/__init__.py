"""What the programs outside the experiments share. No experiment imports it, and it imports none: it works on them by
their command line, by their files, and as a module that a program hands over.

An experiment is a script EXPERIMENT.py beside this folder that defines `train` and has a folder in results/. This is
the contract with it, which tests/test_core_design.py checks.

Flags:    those of its settings; --model takes several models, which are trained in turn; --load FILE evaluates a
          trained network, --load the first of PRETRAINED; --checkpoint FILE is written after every epoch, and resumed
          if it exists; --out-weights FILE; --out-json FILE ("-": standard output). Weights and JSON are written to a
          new folder runs/EXPERIMENT/NAME unless these name a place.
Messages: a line of progress begins with "epoch K/N", one of a resumed run contains "resuming at"; an error of the user
          is one line "error: ..." on standard error, and exit code 2; Ctrl-C gives exit code 130.
JSON:     experiment, config (settings by name), source (of the data), trained_on (source of the training's), n_params,
          the metrics, confusion (counts: a row per class, a column per predicted one; affNIST and smallNORB have one
          per test set), hit_bits, seconds_train, ms_per_step, versions, machine, history (columns by name, one value
          per epoch).
Weights:  a file .npz of arrays params/NAME, state/NAME and, of a checkpoint, adam_m/NAME and adam_v/NAME; and meta, a
          JSON text: experiment, step, config, history (with the data's source).
Module:   EXPERIMENT, PRETRAINED, Config, SETTINGS, InputError, add_settings, given_settings, configs_of, check_same,
          check_useful, load_data, fit_to_data, epoch_samples, to_batch, initial_state, train, weights_of,
          worker_threads, batches, batch_gradients, forward_shards, evaluate, evaluate_test, validate, init_params,
          param_shapes, forward, loss_and_grads, result_of, test_metrics, data_name, save, load, run_cli, main
Of digits: synthesize_digits, and load_data's argument `download`.

A state, which train takes and returns, is a dict of params, running, adam_m, adam_v, step and history. SETTINGS are the
fields of Config, whose metadata have help and, where they apply, low and high, choices, only, runtime, test, alias. An
InputError is known by its name, since each experiment has its own.
"""
import json
import os
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
    except Exception:                  # what a damaged zip file makes its reader raise is not documented
        return None
