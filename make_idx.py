#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Make a data set of your own pictures: turn FOLDER/<class>/*.png or *.jpg into four files like MNIST's in OUT, which
the digit experiments train on.

Each picture becomes gray, light on dark, scaled so that its ink fits into 20x20 px, and moved so that the ink's center
of mass lies at the center of 28x28 px, as MNIST's digits are. A seventh of each class is kept for testing.

    python3 make_idx.py drawings data                          # seconds
    python3 affnist_capsnet.py --data-dir data                 # then train on it
"""
import contextlib
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
import figures
import multimnist_capsnet as capsnet  # before numpy: it sets the number of BLAS threads
from multimnist_capsnet import InputError

import numpy as np

import visualize_multimnist_capsnet as pictures

BOX, SIDE, MAX_CLASSES, MIN_IMAGES = 20, 28, 62, 3     # px of the ink and of the image; classes; pictures of a class
TEST_SHARE = 7                     # one of so many pictures of a class is for testing
ENDINGS = (".png", ".jpg", ".jpeg")
FAINT = 0.1                        # what is darker than this, of the brightest ink, does not count for the ink's box


def ink_of(gray):
    """Return the ink of a picture in [0, 1], light on dark: gray levels, inverted if the picture's edge is light.

    If the edge is uneven, as in a photograph, a smooth background is fitted and subtracted.
    """
    edge = np.concatenate([gray[0], gray[-1], gray[:, 0], gray[:, -1]])
    if np.ptp(np.quantile(edge, (0.1, 0.9))) > FAINT:
        with contextlib.suppress(InputError):                           # a tight crop has no background to fit
            return pictures.find_ink(gray, "")
    ink = (1 - gray if np.median(edge) > 0.5 else gray) - min(np.median(edge), 1 - np.median(edge))
    return np.clip(ink / max(ink.max(), 1e-9), 0, 1)


def resample(image, height, width, top=0.0, left=0.0, scale=1.0):
    """Return an image on a canvas of height x width px, scaled, its upper left corner at (top, left): each pixel is the
    mean of the area that it covers."""
    def coverage(n_out, start, n):
        pixel, low = np.arange(n_out)[:, None], start + scale * np.arange(n)
        return np.maximum(np.minimum(low + scale, pixel + 1) - np.maximum(low, pixel), 0)
    return coverage(height, top, image.shape[0]) @ image @ coverage(width, left, image.shape[1]).T


def to_mnist(gray):
    """Return a picture's ink as an image like MNIST's, (28, 28) uint8: its box fits into 20x20 px, its center of mass
    is at the center. Raise InputError if there is no ink."""
    ink = ink_of(gray)
    rows, columns = (np.flatnonzero((ink > FAINT).any(axis)) for axis in (1, 0))
    if not len(rows) or np.ptp(gray) < 0.05:
        raise InputError("no ink found")
    ink = ink[rows[0]:rows[-1] + 1, columns[0]:columns[-1] + 1]
    scale = BOX / max(ink.shape)
    y, x = (scale * ((ink.sum(axis) * (np.arange(n) + 0.5)).sum() / ink.sum()) for axis, n in (
        (1, ink.shape[0]), (0, ink.shape[1])))
    # centered by mass, but with all of the ink on the image
    top, left = (float(np.clip(SIDE / 2 - middle, 0, SIDE - scale * n)) for middle, n in zip((y, x), ink.shape))
    image = resample(ink, SIDE, SIDE, top, left, scale)
    return np.rint(255 * image / max(1, image.max())).astype(np.uint8)


def visible(folder):
    """Return the paths in a folder that are not hidden, as macOS and notebooks leave them"""
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def read_class(folder):
    """Return the paths of a folder's pictures and their images, (n, 28, 28) uint8. Raise InputError for an unreadable
    one."""
    images, paths = [], sorted(path for path in visible(folder) if path.suffix.lower() in ENDINGS)
    for path in paths:
        try:
            images.append(to_mnist(pictures.read_picture(path)))
        except InputError as error:
            fault = str(error).removeprefix(f"--image {path}: ")
            raise InputError(f"{path}: {fault}. Mend or remove this file") from None
    if len(images) < MIN_IMAGES:
        raise InputError(f"{folder}: has {len(images)} PNG or JPEG files. Give at least {MIN_IMAGES} of each class")
    return paths, np.stack(images)


def idx_bytes(array):
    """Return an array of uint8 values as the bytes of an idx file"""
    return b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


@figures.in_style
def main():
    parser = capsnet.Parser(description=__doc__)
    parser.usage = "%(prog)s FOLDER OUT [--seed N]"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="its folders are the classes and hold the pictures")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the four files, labels.txt and "
                        "test-files.txt, the pictures of the test images in their order")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice of test pictures (default: 0)")
    args = parser.parse_args()
    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: must be at least 0")
    if any(re.fullmatch(capsnet.IDX_NAME, path.name) for path in args.out.glob("*")):
        raise InputError(f"{args.out}: holds a data set. Give another folder, or remove its files")
    if not args.folder.is_dir():
        raise InputError(f"{args.folder}: no such folder. Give one that holds a folder of pictures for each class")
    folders = sorted(path for path in visible(args.folder) if path.is_dir())
    if not 2 <= len(folders) <= MAX_CLASSES:
        raise InputError(f"{args.folder}: has {len(folders)} folders of pictures. Give 2 to {MAX_CLASSES}, one a class")
    try:
        names = "".join(" ".join(folder.name.splitlines()) + "\n" for folder in folders).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{args.folder}: the name of a folder is not UTF-8 ({error.object!r}). Rename it") from None
    parts, tested = {"train": [], "t10k": []}, []
    for label, folder in enumerate(folders):
        paths, images = read_class(folder)
        order = np.random.default_rng((args.seed, label)).permutation(len(images))
        n_test = -(-len(images) // TEST_SHARE)
        for name, rows in (("t10k", order[:n_test]), ("train", order[n_test:])):
            parts[name] += [(image, label) for image in images[rows]]
        tested += [paths[row].relative_to(args.folder).as_posix() for row in order[:n_test]]
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{args.out}: cannot be created ({error.strerror}). Choose another folder") from None
    contents = {args.out / f"{name}-{kind}-ubyte": idx_bytes(array) for name, pairs in parts.items()
                for kind, array in zip(("images-idx3", "labels-idx1"), map(np.array, zip(*pairs)))}
    try:
        listed = "".join(" ".join(path.splitlines()) + "\n" for path in tested).encode(errors="backslashreplace")
        contents |= {args.out / "labels.txt": names, args.out / "test-files.txt": listed}
        for path, content in contents.items():
            capsnet.write_atomically(path, lambda file, content=content: file.write(content))
    except BaseException:                                               # all of them or none
        for path in contents:
            path.unlink(missing_ok=True)
        raise
    n_train = min(12_000, 100 * len(parts["train"]))                    # each picture a hundred times in an epoch
    script = Path(sys.argv[0]).parent / "affnist_capsnet.py"
    command = capsnet.command_line(script, "--data-dir", args.out, "--n-train", n_train)
    print(f"wrote {args.out}: {len(folders)} classes, {len(parts['train'])} training and {len(parts['t10k'])} test "
          f"images, whose files are listed in test-files.txt\n  train on it: {command}")
    if left := [path.name for folder in folders for path in visible(folder) if path.suffix.lower() not in ENDINGS]:
        print(f"left out {capsnet.counted(len(left), 'file')} that {'are' if len(left) > 1 else 'is'} neither PNG nor "
              f"JPEG: {', '.join(sorted(left)[:5])}{', ...' * (len(left) > 5)}")


if __name__ == "__main__":
    capsnet.run_cli(main)
