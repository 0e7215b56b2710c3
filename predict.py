#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Use a trained network of any of the experiments: name what is in pictures or arrays.

A row per picture: its file, the class, its length (of a capsule) or probability (of a CNN), the next class, and a word
where the two are close. A network of multimnist_capsnet.py finds two digits. Pictures are PNG or JPEG files, or all
below a folder; arrays are .npy, .npz or CSV files, whose images are what `predict` takes. If the network knows only
drawings, a note counts pictures that are none, such as photographs.

In Python, load and predict do the same:

    from predict import load, predict
    network = load("weights/affnist_capsnet-shared.npz")
    result = predict(network, images)              # images: (n, H, W), any usual type
    result.classes, result.names, result.scores    # (n,), (n,), (n, J); class Prediction has the others

    python3 predict.py weights/affnist_capsnet-shared.npz digit.png                    # seconds
    python3 predict.py weights/multimnist_capsnet.npz viz/multimnist_capsnet/page.png
    python3 predict.py runs/affnist_capsnet/cnn-gap-deep-seed0/weights.npz folder --out classes.csv
"""
import collections
import dataclasses
import functools
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import lab
from lab.data import (
    APART,
    ENDINGS,
    LEFT,
    TOUCHED,
    Reading,
    check_finite,
    check_not_just_above_1,
    edges,
    faults_in_words,
    fitted,
    gray_images,
    gray_levels,
    inks_of,
    is_junk,
    is_like_mnist,
    is_picture,
    mnist_of,
    read_pixels,
    resample,
    surface_ink,
    upright,
)
from lab.files import check_writable, write_atomically, write_csv
from lab.images import LOOKED_AT, in_color, is_drawing, looked_at, picture_to_image
from lab.messages import InputError, Parser, Progress, counted, first_of, run_cli
from lab.tables import read_names

import numpy as np

from make_idx import arrays_of, read_csv

OF_ARRAYS = ".npy", ".npz", ".csv", ".csv.gz"
CLOSE = 0.2                        # a difference of two lengths or probabilities that leaves a doubt
DIFFERS = "in doubt: another class without, or with, ink that lies apart, such as a line or a second digit"
SCALED = "of another size, or dark on light: ink found, scaled and centered"           # drawn images
NO_DRAWING = "no drawing in one color on plain paper, as this network knows: of a photograph its class says nothing"
SCALED_VIEW = "of another size: scaled"                                                # others


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
        """Return the sides of images that it takes without a change but of place, px"""
        return [shape[0] for shape in self.module.image_shapes(self.config)]

    @property
    def channels(self):
        """Return the shape of a pixel: () of a gray level, or (n,) of n cameras"""
        return self.module.image_shapes(self.config)[0][2:]

    @property
    def n_cameras(self):
        """Return how many cameras took its images"""
        return self.channels[0] if self.channels else 1

    @property
    def is_drawn(self):
        """Return whether its images are ink on a background, as those without channels are"""
        return self.channels == ()

    @property
    def is_of_digits(self):
        """Return whether it was trained on MNIST's digits or on the synthetic ones, all of which are centered"""
        return self.source in getattr(self.module, "DIGIT_NAMES", ())

    @property
    def is_of_any_images(self):
        """Return whether it was trained on any images, as they were, by --task images"""
        return getattr(self.config, "task", "") == "images"

    @property
    def scaled(self):
        """Return the words for images that were scaled"""
        return SCALED if self.is_drawn else SCALED_VIEW


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a network says of n images; J classes, D entries of a capsule.

    classes: (n,) int, or (n, 2) of pairs of digits, the more certain first
    names: the same in words, an array (n,) of str, or of tuples of two
    scores: (n, J), lengths or activations of capsules, probabilities of a CNN
    after: (n,) int, the next class after those that are named
    capsules: (n, J, D), vectors or flat pose matrices; None of a CNN
    doubts: n words, "in doubt" where the last class that is named and the next one differ by less than CLOSE, or where
        the ink may be a box around what is drawn and touches it, or where ink lies apart and the class without it is
        another, else ""
    reconstructions: (n, 1, H, W) of the class, with channels (n, 1, H, W, C); (n, 2, H, W) of a pair; of inputs' range;
        None unless asked for
        and the network has a decoder
    inputs: what the network saw: (n, H, W) of digits, from 0 to 1, light on dark; (n, H, W, C) of shapes and toys
    notes: what was done to how many images, {words: number}"""
    classes: np.ndarray
    names: np.ndarray
    scores: np.ndarray
    after: np.ndarray
    capsules: np.ndarray
    doubts: list
    reconstructions: np.ndarray
    inputs: np.ndarray
    notes: dict


def load(path, labels=None):
    """Return the Network in a weights file or in the folder of a run. labels: a file with the names of its classes,
    one a line, in place of those that the network was trained with. Raise InputError if there is none"""
    name = lab.experiment_of(path)
    if name not in lab.experiments():
        fault = "not a file of a trained network" if Path(path).exists() else "no such file"
        raise InputError(f"{path}: {fault}. Give a weights file or the folder of a run")
    module = importlib.import_module(name)
    config, state = module.load(path)
    names = tuple(module.class_names(state["history"]) or map(str, range(config.n_classes)))
    if labels:
        given = tuple(read_names(Path(labels)))
        if len(given) != len(names):
            raise InputError(f"{labels}: has {counted(len(given), 'name')}, and the network {len(names)} classes. Give "
                             "one a line")
        names = given
    return Network(module, config, module.weights_of(state), names, state["history"]["source"])


def predict(network, images, reconstruct=False, center=None):
    """Return the Prediction of a network for images.

    images: an array (n, H, W) or (H, W), or a list of them, of any size, or pictures of the package PIL, or paths of
    picture files; (n, H * H), (n, 1 or 3, H, W) and (n, H, W, 1, 3 or 4) are taken, too; toys have two cameras,
    (n, H, W, 2) or (n, 2, H, W). Gray levels: 0 to 255, or 0 to 1. Networks of --task images take images of the side
    and the channels that they were trained on, as they are: uint8, or floats from 0 to 1, (n, *shape) or, with
    channels first, (n, C, H, W); pictures and files are cropped and scaled for them.
    reconstruct: whether the result has reconstructions.
    center: whether images of the network's size are scaled and centered, too, as all others are; None: where the
    network was trained on MNIST's digits and the ink is smaller, larger or farther from the center than theirs.
    Raise InputError for what cannot be read so."""
    return classified(network, prepared(network, images, center), reconstruct)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Images as a network takes them.

    inputs: (n, ...); notes: what was done to how many, {words: number}; in_doubt: which are in doubt already, (n,) bool
    others: {row: inputs of the image's other readings, (m, ...)}"""
    inputs: np.ndarray
    notes: dict
    in_doubt: np.ndarray
    others: dict = dataclasses.field(default_factory=dict)


def joined(parts):
    """Return several Prepared as one"""
    notes, others, n = collections.Counter(), {}, 0
    for part in parts:
        notes.update(part.notes)
        others |= {n + row: inputs for row, inputs in part.others.items()}
        n += len(part.inputs)
    return Prepared(np.concatenate([part.inputs for part in parts]), dict(notes),
                    np.concatenate([part.in_doubt for part in parts]), others)


def classified(network, images, reconstruct=False):
    """Return the Prediction of a network for images, a Prepared"""
    inputs, n_named = images.inputs, network.module.LABELS_PER_IMAGE
    out = outputs(network, inputs)
    scores = out["activations"]
    order = np.argsort(-out["scores"], axis=1, kind="stable")           # probabilities round to 1: by logits
    classes, after = order[:, :n_named], order[:, min(n_named, order.shape[1] - 1)]
    rows = np.arange(len(order))
    close = (scores[rows, classes[:, -1]] - scores[rows, after] < CLOSE) & (order.shape[1] > n_named)
    differs = reads_otherwise(network, images.others, classes)
    doubtful = close | images.in_doubt | differs
    notes = collections.Counter(images.notes)
    notes[DIFFERS] += int(differs.sum())
    if n_named == 1:
        classes = classes[:, 0]
        names = np.array(network.names)[classes]
    else:
        names = np.fromiter((tuple(network.names[k] for k in named) for named in classes), object, len(classes))
    return Prediction(
        classes, names, scores, after,
        out.get("mu", out.get("v")), ["in doubt" if each else "" for each in doubtful],
        out.get("recon") if reconstruct else None, inputs, dict(+notes))


def reads_otherwise(network, others, classes):
    """Return for which images, (n,) bool, a network finds other classes in another reading of the picture. others: as
    of Prepared; classes: (n, 1), or (n, 2) of pairs"""
    differs = np.zeros(len(classes), bool)
    if others:
        found = outputs(network, np.concatenate(list(others.values())))["scores"]
        found = np.argsort(-found, axis=1, kind="stable")[:, :classes.shape[1]]
        rows = np.repeat(list(others), [len(inputs) for inputs in others.values()])
        np.logical_or.at(differs, rows, (np.sort(found, 1) != np.sort(classes[rows], 1)).any(1))
    return differs


def outputs(network, inputs):
    """Return what a network computes of images as it takes them, {name: (n, ...)}"""
    module, config = network.module, network.config

    def one(rows):
        out, _ = module.forward(network.weights, inputs[rows], config)
        out["activations"] = module.class_activations(out, config)
        kept = "activations", "scores", "v", "mu", "recon"
        return {key: out[key] for key in kept if key in out}
    with module.worker_threads(config) as workers:
        parts = list(workers.map(one, np.array_split(np.arange(len(inputs)), -(-len(inputs) // 16))))
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


# -------------------------------------------------------------- images

def prepared(network, images, center=None):
    """Return images of any kind as a Prepared. center: as in predict"""
    if network.is_of_any_images:
        refuse_centering(network, center)
        if any(map(is_picture_or_path, listed(images))):
            return joined([one_as_it_is(network, k, image) for k, image in enumerate(listed(images))])
        inputs = as_they_are(network, images)
        return Prepared(inputs, {}, np.zeros(len(inputs), bool))
    grays, notes = gray_images(images, (*network.sides, 28, 32), network.n_cameras)
    if network.is_drawn:
        notes += no_drawings(images)
    if network.n_cameras == 2:
        notes["one camera: its view was given to both"] += sum(len(gray) for gray in grays if gray.ndim == 3)
        grays = [np.stack([gray, gray], -1) if gray.ndim == 3 else gray for gray in grays]
    found, noticed, readings = fitted_to(network, grays, center)
    return with_readings(network, found, notes + noticed, readings)


def listed(images):
    """Return a list or a tuple as it is, and another object as the only one of a list"""
    return images if isinstance(images, (list, tuple)) else [images]


def is_picture_or_path(image):
    """Return whether an image is a picture of the package PIL or the path of a file"""
    return is_picture(image) or isinstance(image, (str, Path))


def no_drawings(images):
    """Return how many of some images are no drawings, a Counter of words: of pictures, files, and arrays in color, of
    which at most LOOKED_AT are looked at"""
    is_array_in_color = getattr(images, "ndim", 0) == 4 and {*images.shape[1::2]} & {3, 4}
    if not is_array_in_color:
        images = [image for image in listed(images) if is_picture_or_path(image)]
    words = NO_DRAWING
    if len(images) > LOOKED_AT:
        words += f" (at least: {LOOKED_AT} were looked at)"
    return collections.Counter({words: sum(not is_drawing(colors) for colors in looked_at(images))})


def one_as_it_is(network, k, image):
    """Return number k of a list of images for a network of --task images, a picture, a path or an array, as a Prepared.
    Raise InputError as picture_as_it_is and as_they_are do"""
    if not is_picture_or_path(image):
        inputs = as_they_are(network, image)
        return Prepared(inputs, {}, np.zeros(len(inputs), bool))
    try:
        return picture_as_it_is(network, image)
    except InputError as error:
        name = f"image {k}" if is_picture(image) else image
        raise InputError(f"{name}: {error}") from None


def with_readings(network, images, notes, readings):
    """Return a list of images of the network's sizes as a Prepared. notes: a Counter; readings: {row: Reading} of those
    that were looked at"""
    in_doubt = np.zeros(len(images), bool)
    others = {}
    for row, reading in readings.items():
        in_doubt[row] = TOUCHED in reading.noticed
        if reading.others:
            others[row] = inputs_of(network, reading.others, collections.Counter())
    inputs = inputs_of(network, images, notes)
    del notes[APART]                                                    # it is said where the class differs
    return Prepared(inputs, dict(+notes), in_doubt, others)


def refuse_centering(network, center):
    """Raise InputError if images are to be centered for a network that takes them as they are"""
    if center and network.is_of_any_images:
        raise InputError("--center: is for digits, and this network takes images as they are. Leave it out")


def as_they_are(network, images):
    """Return images for a network of --task images, which takes them as they are. Raise InputError for any that do not
    have its side and its channels, or for values of which it is not clear what they mean"""
    [shape] = network.module.image_shapes(network.config)
    channels = shape[2] if len(shape) == 3 else 1
    wanted = f"This network takes uint8, or floats from 0 to 1, {('n', *shape)}".replace("'", "")
    try:
        array = np.asarray(images)
    except ValueError:
        raise InputError(f"images have several sizes. {wanted}") from None
    last = (*shape[:2], channels)
    first = (channels, *shape[:2])
    if array.shape in (shape, last):           # one image alone; with channels first it would be as
        array = array[None]                    # good as several gray images
    if array.shape[1:] == first:
        array = np.moveaxis(array, 1, -1)
    if array.shape[1:] not in (shape, last) or len(array) == 0:
        raise InputError(f"images are {array.dtype} {array.shape}. {wanted}")
    if array.dtype.kind == "f":
        check_finite([array])
        check_not_just_above_1(array.max())
        if not (array.min() >= 0 and array.max() <= 1):
            raise InputError(f"images are floats from {array.min():.3g} to {array.max():.3g}. {wanted}")
        array = np.rint(array * np.float32(255)).astype(np.uint8)
    if array.dtype != np.uint8:
        raise InputError(f"images are {array.dtype}. {wanted}")
    return network.module.prepare_images(array, network.config)


def picture_as_it_is(network, picture):
    """Return the path of a picture, or a picture of the package PIL, cropped and scaled for a network of --task images,
    as a Prepared. Raise InputError if the network's channels are neither gray nor red, green and blue"""
    [(side, _, *channels)] = network.module.image_shapes(network.config)
    if channels not in ([], [3]):
        raise InputError(f"a picture does not say what the {channels[0]} channels of this network are. Give arrays, "
                         f"(n, {side}, {side}, {channels[0]}), in a .npy file")
    image, words = picture_to_image(picture, side, gray=not channels)
    inputs = network.module.prepare_images(image[None], network.config)
    return Prepared(inputs, dict.fromkeys(words, 1), np.zeros(1, bool))


def prepared_picture(network, path, center=None):
    """Return a picture file for a network of digits, shapes or toys as a Prepared. Drawings of the network's size that
    are dark on light are scaled and centered, too"""
    pixels = read_pixels(path)
    gray = gray_levels(*pixels)
    fits = gray.shape in [(side, side) for side in network.sides]
    if fits and network.is_drawn and np.median(edges(gray)) < 0.5 and np.ptp(gray) >= 0.05:
        [image], notes, readings = fitted_to(network, [np.rint(255 * gray).astype(np.uint8)[None]], center)
    else:
        reading = resized(network, gray)
        image, notes, readings = reading.image, collections.Counter(reading.noticed), {0: reading}
        if image.shape != gray.shape or not np.allclose(gray, image / 255, atol=0.01):
            notes[network.scaled] += 1
    if network.is_drawn and not is_drawing(in_color(*pixels)):
        notes[NO_DRAWING] += 1
    return with_readings(network, [image], notes, readings)


def fitted_to(network, grays, center):
    """Return arrays of images, as `gray_images` returns them, as a list of images of the network's sizes, a Counter of
    what was done to how many, and the Readings of those that were looked at, {row: Reading}. center: as in predict"""
    notes, is_right = collections.Counter(), None
    if network.is_drawn:
        def is_right(images):
            fits = np.ones(len(images), bool)
            if center is None and network.module.LABELS_PER_IMAGE == 1:
                fits = is_like_mnist(images)
            if center is None and not network.is_of_digits:
                notes[LEFT] += int((~fits).sum())
                fits[:] = True
            return fits & (not center)
    found, noticed, n_other, readings = fitted(grays, network.sides, functools.partial(resized, network), is_right)
    notes += noticed
    notes[network.scaled] += n_other
    return found, notes, readings


def inputs_of(network, images, notes):
    """Return images of the network's sizes as it takes them, and count in notes how many are smaller than its input"""
    sides = network.sides
    n_placed = sum(len(image) < sides[0] for image in images)
    notes[f"{sides[-1]}x{sides[-1]} px: placed at the center of {sides[0]}x{sides[0]} px"] += n_placed
    images = [image.reshape(1, *image.shape[:2], *network.channels) for image in images]
    return np.concatenate([network.module.prepare_images(image, network.config) for image in images])


def resized(network, gray):
    """Return the Reading of gray levels in [0, 1], (h, w) or, of two cameras, (h, w, 2), of any size: an image that a
    network takes without a change but of place, uint8. Raise InputError if there is no ink"""
    if not network.is_drawn:
        (h, w), side = gray.shape[:2], network.sides[-1]
        scale = side / max(h, w)
        views = [resample(view, side, side, (side - h * scale) / 2, (side - w * scale) / 2, scale)
                 for view in np.moveaxis(np.atleast_3d(gray), -1, 0)]
        return Reading(np.rint(255 * np.stack(views, -1)).astype(np.uint8).squeeze(), set())
    if network.module.LABELS_PER_IMAGE == 2:
        from visualize_multimnist_capsnet import to_canvas  # here: it needs matplotlib
        inks, noticed = inks_of(gray, surface_ink, network.is_of_digits, n_pieces=2)
        image, *others = [np.rint(255 * to_canvas(ink)).astype(np.uint8) for ink in inks]
        return Reading(image, noticed, tuple(others))
    return mnist_of(gray, center=True, are_digits=network.is_of_digits)


def predict_files(network, paths, progress, center=None):
    """Yield a path, a name for each image in it and their Prediction. Raise InputError for what cannot be read"""
    refuse_centering(network, center)
    pictures = {}
    for path in paths:
        if not path.name.lower().endswith(OF_ARRAYS):
            pictures[path] = pictures_in(path, progress)
    files = [file for some in pictures.values() for file in some]
    read = read_pictures(network, files, progress, center)
    for path in paths:
        if path in pictures:
            result = classified(network, joined([read[file] for file in pictures[path]]))
            yield path, list(map(str, pictures[path])), result
            continue
        images = images_in(path, progress)
        try:
            result = predict(network, images, center=center)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        yield path, [f"{path}[{k}]" for k in range(len(result.classes))], result


def read_pictures(network, files, progress, center):
    """Return picture files as {file: Prepared}. Raise InputError that names all that cannot be read"""
    read, faults = {}, {}
    for k, file in enumerate(files):
        progress.step(f"{k} of {len(files)} pictures read")
        try:
            if network.is_of_any_images:
                read[file] = picture_as_it_is(network, file)
            else:
                read[file] = prepared_picture(network, file, center)
        except InputError as error:
            faults[file] = error
    if faults:
        raise InputError(faults_in_words(faults))
    return read


def images_in(path, progress):
    """Return the array of images in a .npy, .npz or CSV file. Raise InputError if it has none"""
    if ".csv" in path.name.lower():
        images, _ = read_csv(path, needs_labels=False)
    else:
        arrays = arrays_of(path, needs_all=False)
        images = arrays.get("images", next((a for a in arrays.values() if a.ndim > 1), None))
    if images is None:
        raise InputError(f"{path}: holds no images. Give an array (n, H, W) by the name `images`")
    images, words = upright(images, path)
    if words:
        progress.say(f"{path}: {words}")
    return images


def pictures_in(path, progress):
    """Return the picture files in a folder, at any depth, or a file itself, and say which other files are left out.
    Raise InputError if there is no picture"""
    if not path.is_dir():
        return [path]
    inside = [each for each in sorted(path.rglob("*")) if each.is_file()
              and not any(is_junk(Path(part)) for part in each.relative_to(path).parts)]
    files = [each for each in inside if each.suffix.lower() in ENDINGS]
    if not files:
        raise InputError(f"{path}: holds no PNG or JPEG file, nor do the folders in it. Give others")
    others = [each.name for each in inside if each.suffix.lower() not in ENDINGS]
    if others:
        progress.say(f"note: {path}: left out {counted(len(others), 'file')} (no PNG or JPEG): {first_of(others, 5)}")
    return files


# -------------------------------------------------------------- command line

def table_of(network, names, result):
    """Return a row for each image: its name, each class with its score, the next class with its score, a doubt"""
    rows = []
    for k, name in enumerate(names):
        classes = [*np.atleast_1d(result.classes[k]), result.after[k]]
        cells = [cell for j in classes for cell in (network.names[j], f"{result.scores[k, j]:.3f}")]
        cells[-2:] = ("", "") if len(set(classes)) < len(classes) else cells[-2:]       # no class is left
        rows.append([name, *cells, result.doubts[k]])
    return rows


def quoted(cell):
    """Return a text as a cell of a CSV file: in quotes if it has a comma, a quote or a line break"""
    return '"' + cell.replace('"', '""') + '"' if set(cell) & set(',"\n\r') else cell


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("weights", metavar="WEIGHTS", type=Path,
                        help="a network: its weights file or the folder of its run")
    parser.add_argument("paths", metavar="PICTURE", nargs="+", type=Path, help="PNG or JPEG files, "
                        "folders with such files at any depth, .npy, .npz or CSV files of images")
    parser.add_argument("--labels", metavar="FILE", type=Path, help="names of the classes, one a line, in place of "
                        "those of the labels.txt that the network was trained with")
    parser.add_argument("--center", action="store_true", help="scale and center also images that have the "
                        "network's size and are light on dark, as MNIST's digits are (default: where the network was "
                        "trained on MNIST's digits and the ink is smaller, larger or farther from the center)")
    parser.add_argument("--out", metavar="FILE", help="write the table as CSV")
    parser.add_argument("--capsules", metavar="FILE", help="write scores and capsules as .npz")
    args = parser.parse_args()
    if "-" in (args.out, args.capsules):
        raise InputError("--out and --capsules write files, and the table is printed without --out. Give a file's name")
    check_writable(args.out, args.capsules)
    network, progress = load(args.weights, args.labels), Progress()
    found, table, notes = [], [], collections.Counter()
    center = True if args.center else None
    for _, names, result in predict_files(network, args.paths, progress, center):
        table += table_of(network, names, result)
        notes.update(result.notes)
        found.append(result)
    for note, n in notes.items():
        progress.say(f"note: {n:,} of {counted(len(table), 'image')}: {note}")
    is_pair = network.module.LABELS_PER_IMAGE == 2
    named = ["first", "first score", "second", "second score"] if is_pair else ["class", "score"]
    table.insert(0, ["file", *named, "next", "next score", "doubt"])
    if args.out:
        write_csv(args.out, [list(map(quoted, row)) for row in table])
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
