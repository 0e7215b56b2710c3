#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Use a trained network of any of the experiments: name what is in pictures or arrays.

A row per picture: its file, the class, its length (of a capsule) or probability (of a CNN), the next class, and a word
where the two are close. A network of multimnist_capsnet.py finds two digits. Pictures are PNG or JPEG files, or all of
a folder; arrays are .npy or .npz files, whose images are what `predict` takes.

In Python, load and predict do the same:

    from predict import load, predict
    network = load("weights/affnist_capsnet-shared.npz")
    result = predict(network, images)              # images: (n, H, W), any usual type
    result.classes, result.names, result.scores    # result.capsules: (n, J, D); predict(..., reconstruct=True)

    python3 predict.py weights/affnist_capsnet-shared.npz digit.png                    # seconds
    python3 predict.py weights/multimnist_capsnet.npz viz/multimnist_capsnet/page.png
    python3 predict.py runs/affnist_capsnet/cnn-gap-deep-seed0/weights.npz folder --out classes.csv
"""
import dataclasses
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import lab
from lab.data import ENDINGS, find_ink, read_picture, resample, to_mnist, visible
from lab.files import check_writable, write_atomically, write_csv
from lab.messages import InputError, Parser, Progress, counted, run_cli

import numpy as np

CLOSE = 0.2                        # a difference of two lengths or probabilities that leaves a doubt


@dataclasses.dataclass(frozen=True)
class Network:
    """A trained network: the experiment's module, settings, weights, names of its classes, what it was trained on"""
    module: object
    config: object
    weights: dict
    names: tuple
    source: str

    @property
    def sides(self):
        """Return the sizes of images that it takes without a change, and how many digits it names in one"""
        if self.module.EXPERIMENT == "multimnist_capsnet":
            return (self.module.CANVAS, 28), 2
        if self.module.EXPERIMENT == "affnist_capsnet":
            return (self.module.SIDES[self.config.task], 28), 1
        return ((32,) if self.config.data == "shapes" else (48, 96)), 1


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a network says of n images.

    classes: (n,), or (n, 2) of pairs of digits, the more certain first. names: the same in words, a list of tuples.
    scores: (n, J), lengths or activations of capsules, probabilities of a CNN. after: (n,), the next class. capsules:
    (n, J, D), None of a CNN. doubts: a word where the last class that is named and the next one are close, else "".
    reconstructions: (n, R, H, W), if asked for and the network has a decoder. inputs: (n, H, W[, C]), what the network
    saw. notes: what was done to the images, in words."""
    classes: np.ndarray
    names: list
    scores: np.ndarray
    after: np.ndarray
    capsules: np.ndarray
    doubts: list
    reconstructions: np.ndarray
    inputs: np.ndarray
    notes: list


def load(path, labels=None):
    """Return the Network in a weights file or a checkpoint. labels: a file with the names of its classes, one a line,
    in place of those that the network was trained with. Raise InputError if there is none"""
    name = lab.experiment_of(path)
    if name not in lab.experiments():
        fault = "not a file of a trained network" if Path(path).is_file() else "no such file"
        raise InputError(f"{path}: {fault}. Give the weights.npz or the checkpoint of a run")
    module = importlib.import_module(name)
    config, state = module.load(path)
    if getattr(config, "model", "") == "nearest":
        raise InputError(f"{path}: a nearest neighbor has no weights. Give a network's file")
    names = ({"shapes": module.CLASS_NAMES}.get(config.data, module.NORB_NAMES) if hasattr(config, "norb_dir") else
             tuple(map(str, range(config.n_classes))))
    known = state["history"].get("names") or ()
    names = tuple(known) if len(known) == len(names) else names
    if labels:
        try:
            given = tuple(Path(labels).read_text("utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{labels}: {getattr(error, 'strerror', None) or 'not UTF-8'}. Give a text file") from None
        if len(given) != len(names):
            raise InputError(f"{labels}: has {counted(len(given), 'name')}, and the network {len(names)} classes. Give "
                             "one a line")
        names = given
    return Network(module, config, module.weights_of(state), names, state["history"]["source"])


def predict(network, images, reconstruct=False):
    """Return the Prediction of a network for images.

    images: an array (n, H, W) or (H, W); (n, 1, H, W), and colors (n, H, W, 3 or 4), are taken, too; toys have two
    cameras, (n, H, W, 2) or (n, 2, H, W). Gray levels: 0 to 255, or 0 to 1 of a floating-point type. Raise InputError
    for what cannot be read so."""
    inputs, notes = prepared(network, np.asarray(images))
    module, config, pair = network.module, network.config, network.sides[1] == 2

    def one(rows):
        if hasattr(config, "norb_dir"):
            out, _ = module.forward(network.weights, module.to_batch({"images": inputs}, rows)["images"], config)
        else:
            out, _ = module.forward(network.weights, inputs[rows], config)
        return {key: out[key] for key in ("lengths", "scores", "a", "v", "mu", "recon") if key in out}
    with module.worker_threads(config) as workers:
        parts = list(workers.map(one, np.array_split(np.arange(len(inputs)), -(-len(inputs) // 16))))
    out = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    scores = next(out[key] for key in ("a", "lengths", "scores") if key in out)
    if not out.keys() & {"a", "lengths", "v"}:                          # logits of a softmax
        scores = np.exp(scores - scores.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
    order = np.argsort(-out.get("scores", scores), axis=1, kind="stable")               # sigmoids round to 1: by logits
    n_named = 2 if pair else 1
    classes, after = order[:, :n_named], order[:, min(n_named, order.shape[1] - 1)]
    rows = np.arange(len(order))
    close = (scores[rows, classes[:, -1]] - scores[rows, after] < CLOSE) & (order.shape[1] > n_named)
    names = [tuple(network.names[k] for k in named) for named in classes]
    return Prediction(
        classes if pair else classes[:, 0], names, scores, after,
        out.get("mu", out.get("v")), ["in doubt" if each else "" for each in close],
        out.get("recon") if reconstruct else None, inputs, notes)


# -------------------------------------------------------------- images

def prepared(network, images):
    """Return images as a network takes them, and what was done to them, in words"""
    notes, toys = [], hasattr(network.config, "norb_dir") and network.config.data != "shapes"
    if images.dtype.kind not in "buif" or images.ndim < 2 or not images.size:
        raise InputError(f"images are {images.dtype} {images.shape}. Give gray levels, (n, H, W)")
    if not np.isfinite(images).all() or images.min() < 0:
        raise InputError("images have negative or non-finite values. Give gray levels from 0 to 255, or from 0 to 1, "
                         "before any normalization")
    if images.max() > 255:
        raise InputError(f"images have values up to {images.max():g}. Give gray levels from 0 to 255, or from 0 to 1")
    is_unit = images.dtype.kind in "bf" and images.max() <= 1
    gray = images.astype(np.float32) / (1 if is_unit else 255)
    if images.dtype.kind == "f" and not is_unit:
        notes.append("gray levels were taken to be from 0 to 255")
    if images.dtype.kind in "iu" and images.max() == 1:
        raise InputError("images are integers up to 1. Give gray levels from 0 to 255, or bool")
    gray = gray[None] if gray.ndim == 2 else gray
    if gray.ndim == 4 and gray.shape[1] in (1, 2) and gray.shape[3] > 4:
        gray = gray.transpose(0, 2, 3, 1)
    if gray.ndim == 4 and gray.shape[3] in (3, 4):
        gray = gray[..., :3] @ np.array([0.299, 0.587, 0.114], np.float32)
        notes.append("colors were turned into gray levels")
    gray = gray[..., 0] if gray.ndim == 4 and gray.shape[3] == 1 else gray
    sides, _ = network.sides
    is_known = gray.ndim == 3 or toys and gray.ndim == 4 and gray.shape[3] == 2
    if not is_known or gray.shape[1] != gray.shape[2] or gray.shape[1] not in sides:
        raise InputError(f"images are {images.shape}. This network takes sides of {' or '.join(map(str, sides))} px: "
                         f"(n, {sides[0]}, {sides[0]})")
    if toys:
        return toy_views(network, gray, notes), notes
    edge = np.concatenate([gray[:, 0], gray[:, -1], gray[:, :, 0], gray[:, :, -1]], 1)
    dark = np.median(edge, axis=1) > 0.5
    if dark.any():
        gray = np.where(dark[:, None, None], 1 - gray, gray)
        notes.append(f"{counted(int(dark.sum()), 'image')} with a light background: inverted")
    if hasattr(network.config, "norb_dir"):
        return gray[..., None], notes
    margin = (sides[0] - gray.shape[1]) // 2
    if margin:
        notes.append(f"{gray.shape[1]}x{gray.shape[1]} px: placed at the center of {sides[0]}x{sides[0]} px")
    return np.pad(gray, ((0, 0), (margin, margin), (margin, margin))), notes


def toy_views(network, gray, notes):
    """Return views of toys, (n, 48, 48, 2) uint8, of gray (n, side, side[, 2]) in [0, 1]"""
    if gray.ndim == 3:
        gray = np.stack([gray, gray], -1)
        notes.append("one camera: its view was given to both")
    views = np.rint(255 * gray).astype(np.uint8)
    return network.module.downsample(views.transpose(0, 3, 1, 2)) if views.shape[1] == 96 else views


def picture(network, path):
    """Return a picture file as an image that `predict` takes"""
    gray = read_picture(path)
    if hasattr(network.config, "norb_dir"):
        side, scale = network.sides[0][-1], network.sides[0][-1] / max(gray.shape)
        return resample(gray, side, side, (side - gray.shape[0] * scale) / 2, (side - gray.shape[1] * scale) / 2, scale)
    if network.sides[1] == 2:
        from visualize_multimnist_capsnet import to_canvas  # here: it needs matplotlib
        return to_canvas(find_ink(gray))
    return to_mnist(gray)


def read_images(network, paths, progress):
    """Yield (names, images) of files and of folders. Raise InputError for what cannot be read"""
    for path in paths:
        if path.suffix in (".npy", ".npz"):
            try:
                content = np.load(path, allow_pickle=False)
                arrays = {"": content} if path.suffix == ".npy" else {key: content[key] for key in content.files}
            except (OSError, ValueError, EOFError) as error:
                fault = getattr(error, "strerror", None) or "not a file of arrays"
                raise InputError(f"{path}: {fault}. Give a .npy or .npz file of images") from None
            images = arrays.get("images", next((a for a in arrays.values() if a.ndim > 1), None))
            if images is None:
                raise InputError(f"{path}: holds no images. Give an array (n, H, W) by the name `images`")
            images = images[None] if images.ndim == 2 else images
            yield [f"{path}[{k}]" for k in range(len(images))], images
            continue
        files = [path]
        if path.is_dir():
            files = sorted(each for each in visible(path) if each.suffix.lower() in ENDINGS)
        if not files:
            raise InputError(f"{path}: holds no PNG or JPEG file. Give a folder of pictures")
        images = []
        for k, file in enumerate(files):
            try:
                images.append(picture(network, file))
            except InputError as error:
                raise InputError(f"{file}: {error}") from None
            progress.step(f"{k + 1} of {len(files)} pictures read")
        yield list(map(str, files)), np.stack(images)


# -------------------------------------------------------------- command line

def table_of(network, names, result):
    """Return a row for each image: its name, each class with its score, the next class with its score, a doubt"""
    rows = []
    for k, name in enumerate(names):
        classes = [*np.atleast_1d(result.classes[k]), result.after[k]]
        cells = [cell for j in classes for cell in (network.names[j], f"{result.scores[k, j]:.3f}")]
        rows.append([cell.replace(",", ";") for cell in (name, *cells, result.doubts[k])])      # for CSV
    return rows


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("weights", metavar="WEIGHTS", type=Path, help="weights.npz or checkpoint of a run")
    parser.add_argument("paths", metavar="PICTURE", nargs="+", type=Path, help="PNG or JPEG files, folders of them, "
                        ".npy or .npz files of images")
    parser.add_argument("--labels", metavar="FILE", type=Path, help="names of the classes, one a line, in place of "
                        "those of the labels.txt that the network was trained with")
    parser.add_argument("--out", metavar="FILE", help="write the table as CSV")
    parser.add_argument("--capsules", metavar="FILE", help="write scores and capsules as .npz")
    args = parser.parse_args()
    check_writable(args.out, args.capsules)
    network, progress = load(args.weights, args.labels), Progress()
    found, table = [], []
    for names, images in read_images(network, args.paths, progress):
        result = predict(network, images)
        for note in result.notes:
            progress.say(f"note: {note}")
        table += table_of(network, names, result)
        found.append(result)
    named = ["first", "score", "second", "score"] if network.sides[1] == 2 else ["class", "score"]
    table.insert(0, ["file", *named, "next", "score", "doubt"])
    if args.out:
        write_csv(args.out, table)
        progress.say(f"wrote {args.out}")
    else:
        widths = [max(map(len, column)) for column in zip(*table)]
        for row in table:
            progress.say("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    if args.capsules:
        arrays = {"files": np.array([row[0] for row in table[1:]]), "scores": np.concatenate([r.scores for r in found])}
        if found[0].capsules is not None:
            arrays["capsules"] = np.concatenate([result.capsules for result in found])
        write_atomically(args.capsules, lambda file: np.savez(file, **arrays))
        progress.say(f"wrote {args.capsules}")


if __name__ == "__main__":
    run_cli(main)
