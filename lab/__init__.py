"""What the programs outside the experiments share. No experiment imports it, and it imports none: it works on them by
their command line, by their files, and as a module that a program hands over.

An experiment is a script EXPERIMENT.py beside this folder that defines `train` and has a folder in results/. This is
the contract with it, which tests/test_core_design.py checks.

Flags:    those of its settings; --outdir DIR is the folder of a run (default: a new one below runs/EXPERIMENT/), and
          the same command resumes it; --load PLACE tests a trained network, --load the first of PRETRAINED; --init
          PLACE starts from its weights; --out-json FILE copies metrics.json ("-": standard output). A PLACE is a
          weights file or the folder of a run.
A run:    a folder. weights.npz is replaced after every epoch and holds all that resuming needs; metrics.json is written
          last, and marks a finished run. Of several models, each has a folder in it.
Messages: a line after an epoch begins with "epoch K/N", one within an epoch with "step", one of a resumed run contains
          "resuming at"; an error of the user is one line "error: ..." on standard error, and exit code 2; Ctrl-C gives
          exit code 130.
JSON:     experiment, config (settings by name), source (of the data), trained_on (source of the training's), n_params,
          the metrics, confusion (counts: a row per class, a column per predicted one; affNIST and smallNORB have one
          per test set), hit_bits, seconds_train, ms_per_step, versions, machine, history (columns by name, one value
          per epoch); of --load, loaded (file, sha256, trained_seed) in place of the history. smallNORB has, of each
          test set, familiar or novel, toy_n (numbers of images: a row per class, a column per test toy in ascending
          order) and toy_hits (of those correctly classified), which its history has of every epoch, too.
Weights:  a file .npz of arrays params/NAME, state/NAME and, if it can be resumed, adam_m/NAME and adam_v/NAME; and
          meta, a JSON text: experiment, step, config, history (with the data's source).
Module:   EXPERIMENT, PRETRAINED, Config, SETTINGS, InputError, add_settings, given_settings, configs_of, check_same,
          weights_file, identity_of, digest_of, without_moments, Progress, load_data, fit_to_data, epoch_samples,
          to_batch, initial_state, train, weights_of, worker_threads, batches, batch_gradients, forward_shards,
          class_activations, LABELS_PER_IMAGE, image_shapes, prepare_images, evaluate, evaluate_test, validate,
          init_params, param_shapes, forward, loss_and_grads, result_of, test_metrics, data_name, class_names, save,
          load, run_cli, main
Of digits: synthesize_digits, and load_data's argument `download`.

A state, which train takes and returns, is a dict of params, running, adam_m, adam_v, step and history. SETTINGS are the
fields of Config, whose metadata have help and, where they apply, low and high, choices, only, runtime, test, alias,
metavar. Each experiment has an InputError of its own, with an exit_code.

forward returns out, a dict whose keys its docstring lists, and a cache. `scores`, (N, J), is what classes are predicted
by, the highest first: lengths or logits. class_activations(out, config), (N, J), is what is shown of the classes:
lengths or activations of capsules, probabilities of a CNN. LABELS_PER_IMAGE classes are predicted. class_names(data or
history) is the list of the classes' names, [] if they have none.

prepare_images(images, config) returns images as forward takes them. images: uint8, (n, *shape) with a shape of
image_shapes(config), whose first one is the usual one: (H, W) of ink, light on dark, or (H, W, C) of C cameras; of
networks with the setting task "images", (H, W) or (H, W, C) of any images with C channels, as they are.
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
    """Return the name of the experiment that wrote a weights file or the folder of a run; None if it is not such a
    place"""
    import numpy as np  # here: the list above is read without it
    if os.path.isdir(path):
        several = sorted(str(file.parent) for file in Path(path).glob("*/weights.npz"))
        path = Path(path, "weights.npz")
        if several and not path.exists():
            from .messages import InputError
            raise InputError(f"{path.parent}: holds several runs. Give one of them: {', '.join(several)}")
    try:
        with np.load(path, allow_pickle=False) as file:
            return json.loads(str(file["meta"]))["experiment"]
    except Exception:                  # what a damaged zip file makes its reader raise is not documented
        return None
