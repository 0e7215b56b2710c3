"""Hits per toy of smallNORB's results, by which intervals resample toys."""
import base64
import functools

import smallnorb_novel_viewpoint as norb  # before numpy: it sets the number of BLAS threads

import numpy as np


@functools.cache
def layout(split, train_azimuths, test_azimuths, name):
    """Return classes and instances, (n,) each, of the images of a test set of all 25 test toys."""
    config = norb.Config(data="toys", split=split, train_azimuths=train_azimuths,
                         test_azimuths=test_azimuths)
    samples = norb.select_images(config)[name]
    return samples["labels"], samples["instances"]


def accuracies(run, name, epoch=None):
    """Return the accuracy on each toy times its share of the images, times the number of toys, so
    that their mean is the accuracy; and the toys' classes. Both (toys,), None if the result does
    not have them.

    run: a result. name: familiar or novel. epoch: index of an evaluation in its history; without it
    the end of training."""
    if f"{name}_toy_n" in run:
        n = np.array(run[f"{name}_toy_n"], float)
        hits = run[f"{name}_toy_hits"] if epoch is None else run["history"][f"{name}_toy_hits"][epoch]
        classes = np.repeat(np.arange(len(n)), n.shape[1]).reshape(n.shape)
        shown = n > 0
        return np.array(hits)[shown] * shown.sum() / n.sum(), classes[shown]
    if epoch is not None:
        return None
    config = run["config"]
    labels, instances = layout(config["split"], config["train_azimuths"], config["test_azimuths"], name)
    bits = np.unpackbits(np.frombuffer(base64.b64decode(run["hit_bits"][name]), np.uint8))
    if not len(labels) <= len(bits) < len(labels) + 8:
        return None
    toys, index = np.unique(np.stack([labels, instances]), axis=1, return_inverse=True)
    hits = np.bincount(index.ravel(), bits[:len(labels)], toys.shape[1])
    return hits * toys.shape[1] / len(labels), toys[0]
