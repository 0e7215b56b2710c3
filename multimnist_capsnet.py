#!/usr/bin/env python3
"""MultiMNIST CapsNet: dynamic routing between capsules, in NumPy, down to the last gradient.

Sabour, Frosst & Hinton, "Dynamic routing between capsules", NIPS 2017.

Question: two handwritten digits lie on top of each other. Can a network name both, and redraw each one alone from its own
16-D capsule, although it only ever saw the composite?

    stage        layer                                                               output
    Input        composite of two digits, each shifted by up to 4 px                 (N, 36, 36)
    Conv1        9x9, stride 1, 32 channels, ReLU                                    (N, 28, 28, 32)
    PrimaryCaps  9x9, stride 2, 8 types x 8-D, squash                                (N, 800, 8)
    votes        u_hat_ij = W_ij u_i                                                 (N, 800, 10, 16)
    routing      3 iterations, softmax over the 10 digit capsules, b = 0 at first    (N, 10, 16)
    decoder      one capsule, the others masked: 160 -> 256 -> 512 -> 1296           (N, 36, 36), once per digit

Loss: margin loss on the capsule lengths + 0.0005 x summed squared error of the two redrawn digits. Adam. The backward pass
runs through everything, all routing iterations included.

Deviations from the paper: a smaller network (`--preset paper` is the paper's); the two digits' boxes overlap with an IoU of at
least 0.8 (`--min-iou 0` is the paper's protocol); pixel-wise max as the merge (`--merge add` is the official code's); fresh
pairs every epoch; cosine decay of the learning rate; no bias on the digit capsules (`--digit-bias` adds the official code's).

`--preset deep` replaces the two 9x9 convolutions by six small ones, and is far more accurate for the same time. `--model cnn` is the
control: the same five small convolutions below PrimaryCaps, one hidden layer and ten sigmoids, no larger than the capsule network without its decoder.

One command, about a minute on two cores:    python3 multimnist_capsnet.py --n-epochs 12 --n-train 6000 --seed 0
"""
import argparse
import contextlib
import dataclasses
import gzip
import hashlib
import http.client
import json
import math
import os
import shutil
import sys
import tempfile
import time
import zlib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path


# One BLAS thread, set before numpy is imported: the worker threads below share the work in fixed shards instead, so that the
# bits do not depend on their number.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ[name] = "1"
import numpy as np  # noqa: E402
from numpy.lib.stride_tricks import as_strided, sliding_window_view  # noqa: E402

# Axis legend, in the shape comments at line ends:
#   N batch   H W height, width   C channels in   F channels out   K kernel side   I primary capsules   J digit capsules
#   E dimensions of a primary capsule (8)   D dimensions of a digit capsule (16)   T outer products in du_hat

CANVAS = 36                        # side of a composite, px
MAX_SHIFT = 4                      # a digit moves by -4..+4 whole px on each axis
BOX = 20                           # MNIST digits are size-normalised into 20x20; the paper's overlap is that of these boxes
N_CLASSES = 10
CHANCE, CHANCE_ANY = 1 / 45, 17 / 45                           # one set out of C(10, 2); sets that share a digit with it
SHARD_SIZE = 16                    # samples a worker thread takes at once: fixed, so that sums have one order
CHUNK = 2048                       # pairs drawn at once: memory does not grow with --n-train
PURPOSES = ("data", "init", "batches", "evaluation")


class InputError(Exception):
    """Something the user gave is wrong; the message is one line that names it and how to mend it. Exit code 2."""


class NotAtHand(InputError):
    """MNIST is not here and cannot be fetched"""


def option(default, text, **extra):
    return dataclasses.field(default=default, metadata={"help": text, **extra})


FRONT_ENDS = {                     # convolutions: kernel, stride, channels in units of --conv1-channels; the last one makes PrimaryCaps
    "paper": ((9, 1, 1), (9, 2, None)),
    "deep": ((3, 1, 1), (3, 1, 1), "pool", (3, 1, 2), (3, 1, 2), "pool", (3, 1, 4), (1, 1, None))}
PRESETS = {
    "default": dict(front_end="paper", conv1_channels=32, primary_types=8, decoder_hidden1=256, decoder_hidden2=512, lr=2e-3, warmup=0,
                    recon_weight=0.0005),
    "paper": dict(front_end="paper", conv1_channels=256, primary_types=32, decoder_hidden1=512, decoder_hidden2=1024, lr=2e-3,
                  warmup=0, recon_weight=0.0005),
    "deep": dict(front_end="deep", conv1_channels=32, primary_types=16, decoder_hidden1=256, decoder_hidden2=512, lr=5e-3,
                 warmup=200, recon_weight=0.002)}
CNN = dict(lr=5e-3, warmup=200)    # instead of the preset's


def preset_option(name, text, **extra):
    values = {preset: sizes[name] for preset, sizes in PRESETS.items()} | ({"cnn": CNN[name]} if name in CNN else {})
    shown = ", ".join(str(v) if p == "default" else f"{p} {v}" for p, v in values.items() if p == "default" or v != values["default"])
    return option(None, text, shown=shown, **extra)


@dataclass(frozen=True)
class Config:
    """All settings of a run: the names, defaults and help texts of the command line flags come from here."""
    seed: int = option(0, "seed of everything random; same seed, same bits", low=0)
    n_epochs: int = option(12, "epochs to train", low=1)
    n_train: int = option(6000, "training pairs in an epoch", low=1)
    n_val: int = option(2000, "validation pairs, made of training images held out", low=1)
    n_test: int = option(10000, "test pairs, seen once, after training", low=1, runtime=True)
    batch_size: int = option(32, "pairs in a batch", low=1)
    lr: float = preset_option("lr", "Adam's learning rate at the start, or after the warm-up", above=0)
    warmup: int = preset_option("warmup", "steps over which the learning rate first rises from 0", low=0)
    lr_schedule: str = option("cosine", "cosine decay to 0, the official code's 0.96^(step/2000), or constant",
                              choices=("cosine", "exponential", "constant"))
    digits: str = option("auto", "auto: MNIST if at hand or to be fetched, else synthetic", choices=("auto", "mnist", "synthetic"),
                        runtime=True)
    mnist_dir: str = option("", "folder with the four MNIST idx files, raw or .gz (else $MNIST_DIR, else ~/.cache/hinton-mnist, "
                            "else download)", runtime=True, metavar="DIR")
    min_iou: float = option(0.8, "least IoU of the two digits' 20x20 boxes, for every pair; 0 is the paper's protocol",
                            low=0, high=1)
    merge: str = option("max", "pixel-wise max, or the official code's add and clip", choices=("max", "add"))
    fixed_pool: bool = option(False, "reuse one pool of --n-train pairs instead of fresh pairs every epoch")
    model: str = option("caps", "the capsule network, or a CNN of at most as many parameters as it has without its decoder",
                        choices=("caps", "cnn"))
    preset: str = option("default", "what is not given: default's (2.03M parameters), the paper's (11.36M), or those of a deeper and "
                         "narrower network, which is more accurate for the same time (1.32M)", choices=tuple(PRESETS))
    front_end: str = preset_option("front_end", "layers up to PrimaryCaps: the paper's two 9x9, or six small ones",
                                   choices=tuple(FRONT_ENDS))
    conv1_channels: int = preset_option("conv1_channels", "channels of Conv1; the deep front end goes up to four times as many", low=1)
    primary_types: int = preset_option("primary_types", "types of primary capsules, each at every place", low=1)
    primary_dim: int = option(8, "dimensions of a primary capsule", low=1)
    digit_dim: int = option(16, "dimensions of a digit capsule", low=1)
    decoder_hidden1: int = preset_option("decoder_hidden1", "units of the decoder's first layer", low=1, model="caps")
    decoder_hidden2: int = preset_option("decoder_hidden2", "units of the decoder's second layer", low=1, model="caps")
    routing_iters: int = option(3, "routing iterations; 1 means uniform coupling", low=1, model="caps")
    routing_grad: str = option("full", "full: through every routing iteration; detached: the last coupling coefficients held "
                               "fixed", choices=("full", "detached"), model="caps")
    digit_bias: bool = option(False, "a bias on every digit capsule before its squash, at first 0.1, as in the official code",
                              model="caps")
    recon_weight: float = preset_option("recon_weight", "weight of the summed squared error of the redrawn digits", low=0, model="caps")
    cnn_channels: int = option(32, "channels of the CNN's first convolution; later ones have 2 or 4 times as many", low=1, model="cnn")
    cnn_hidden: int = option(0, "units of the CNN's hidden layer, 0 for as many as its number of parameters allows", low=0,
                             model="cnn")
    dropout: float = option(0.0, "share of the CNN's hidden units dropped in training", low=0, high=0.99, model="cnn")
    threads: int = option(0, "worker threads, 0 for one per core; does not change a bit", low=0, runtime=True)
    checkpoint: str = option("", "write weights and optimiser to this .npz at every epoch's end", runtime=True)
    resume: bool = option(False, "go on from --checkpoint if it exists", runtime=True)
    out_json: str = option("", "write settings and results to this file", runtime=True)
    quiet: bool = option(False, "print nothing but errors", runtime=True)

    def __post_init__(self):
        """What was not given comes from the preset, the CNN's learning rate from CNN"""
        for name, size in (PRESETS.get(self.preset, {}) | (CNN if self.model == "cnn" else {})).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, size)


def rng_for(seed, purpose, *key):
    """The generator of one purpose; equals SeedSequence(seed).spawn(...)'s child, without keeping a state between calls."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), *key)))


# ---------------------------------------------------------------- data: digits

MNIST_MIRRORS = ("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/")
MNIST_CACHE = Path("~/.cache/hinton-mnist")
MNIST_FILES = {  # split, kind -> file, magic number, shape, SHA-256 of the decompressed bytes
    ("train", "images"): ("train-images-idx3-ubyte", 2051, (60000, 28, 28),
                          "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    ("train", "labels"): ("train-labels-idx1-ubyte", 2049, (60000,),
                          "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    ("test", "images"): ("t10k-images-idx3-ubyte", 2051, (10000, 28, 28),
                         "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    ("test", "labels"): ("t10k-labels-idx1-ubyte", 2049, (10000,),
                         "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2")}
N_VAL_IMAGES = 5000                # the last of the training images
N_SYNTHETIC = {"train": 20000, "val": 2500, "test": 5000}
DIGIT_NAMES = {"mnist": "MNIST digits", "synthetic": "SYNTHETIC digits"}                       # in everything printed or drawn


def parse_idx(raw, name, magic, shape, sha256):
    """The array in the bytes of one idx file, checked against what MNIST's must be. raw: bytes, gzipped or not.

    Raises InputError naming the file and the fault: not gzip, wrong magic number, wrong size, wrong checksum.
    """
    mend = "delete it and download it again"
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{name}: corrupt or truncated gzip ({error}); {mend}") from None
    header = np.frombuffer(raw[:4 + 4 * len(shape)], ">i4") if len(raw) >= 4 + 4 * len(shape) else ()
    if len(header) == 0 or header[0] != magic:
        raise InputError(f"{name}: not the idx file expected here (magic number {header[0] if len(header) else 'missing'}, "
                         f"should be {magic}); {mend}")
    size = 4 + 4 * len(shape) + int(np.prod(shape))
    if tuple(header[1:]) != shape or len(raw) != size:
        raise InputError(f"{name}: holds {len(raw)} bytes and says shape {tuple(map(int, header[1:]))}, "
                         f"MNIST's has {size} bytes and shape {shape}; {mend}")
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise InputError(f"{name}: SHA-256 differs from MNIST's, the file is damaged or another data set; {mend}")
    return np.frombuffer(raw, np.uint8, offset=size - int(np.prod(shape))).reshape(shape)


def write_atomically(path, write):
    """Call write(binary file) on a temporary file beside `path`, then rename it: whole or not at all."""
    path = Path(os.path.realpath(path))                                 # through a link, not over it
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~UMASK)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose a writable place with room") from None


UMASK = os.umask(0)
os.umask(UMASK)


def check_writable(path):
    """Fail now, not after an hour of training, if `path` could not be written."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise InputError(f"cannot write {path}: it is a folder or a device; give the name of a file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write {path}: the folder {path.parent} is missing or not writable; create it or choose another")


def download_mnist_file(name, spec, folder, timeout, say):
    """Fetch one MNIST file from the first mirror that has it whole; verified before it appears in `folder`."""
    faults = []
    for mirror in MNIST_MIRRORS:
        try:
            say(f"downloading {mirror}{name}.gz")
            with urllib.request.urlopen(mirror + name + ".gz", timeout=timeout) as reply:
                total, parts, got = int(reply.headers.get("Content-Length") or 0), [], 0
                while part := reply.read(1 << 18):
                    parts.append(part)
                    got += len(part)
                    say(f"\r{got / 1e6:.1f} of {total / 1e6:.1f} MB ", end="")
            say("\r", end="")
            raw = b"".join(parts)
            parse_idx(raw, mirror + name + ".gz", *spec)
        except (OSError, ValueError, http.client.HTTPException, InputError) as error:
            faults.append(f"{mirror.split('/')[2] or mirror}: {error}")
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / (name + ".gz"), lambda file: file.write(raw))
        except (OSError, InputError) as error:
            raise NotAtHand(f"MNIST's cache {folder} cannot be written ({error}); make room there, or pass a folder with the four "
                            "MNIST files as --mnist-dir, or use --digits synthetic") from None
        return folder / (name + ".gz")
    raise NotAtHand(f"could not download {name}.gz ({'; '.join(faults)}); check the network, or put the four MNIST files in a "
                     "folder and pass it as --mnist-dir, or use --digits synthetic")


def load_mnist(mnist_dir, timeout, say):
    """-> {"train": (images, labels), "test": ...} as uint8. Looks in mnist_dir, $MNIST_DIR, the cache, then the mirrors."""
    given = mnist_dir or os.environ.get("MNIST_DIR", "")
    folder = Path(given or MNIST_CACHE).expanduser()
    if given and not folder.is_dir():
        raise InputError(f"{'--mnist-dir' if mnist_dir else 'MNIST_DIR'} {given}: no such folder; give the one that holds the four "
                         "MNIST idx files")
    arrays = {}
    for (split, kind), (name, *spec) in MNIST_FILES.items():
        found = next((p for p in (folder / name, folder / (name + ".gz")) if p.exists()), None)
        if found is None and given:
            raise InputError(f"{folder / name}[.gz]: missing; put the four MNIST idx files there, or leave --mnist-dir and MNIST_DIR "
                             "unset to download them")
        found = found or download_mnist_file(name, spec, folder, timeout, say)
        try:
            raw = found.read_bytes()
        except OSError as error:
            raise InputError(f"{found}: cannot be read ({error.strerror}); check the file and its permissions") from None
        arrays[split, kind] = parse_idx(raw, str(found), *spec)
    return {split: (arrays[split, "images"], arrays[split, "labels"]) for split in ("train", "test")}


# The digits for a machine without MNIST. One row per writing style: digit, relative frequency, strokes. A stroke is a smooth
# curve through control points written xxyy on a 100 x 100 sheet (x right, y down); `|` lifts the pen. Strokes that name the
# same point share it, so that a corner (two strokes meeting) stays joined when the points are perturbed.
GLYPHS = (
    (0, 3, "5500 1812 0550 2288 5299 8287 9348 8012 5500"),
    (0, 2, "7508 4500 1522 0558 2893 6092 9055 8018 5003 3010"),
    (0, 1, "3508 1535 1070 4099 8085 9045 7810 5002 4212"),
    (0, 1, "3003 1025 0660 3096 7092 9560 8525 6206"),
    (1, 5, "5500 5250 5099"),
    (1, 1, "3816 5500 | 5500 5250 5099"),
    (1, 1, "3416 5000 | 5000 5050 5099 | 2799 5099 7399"),
    (2, 3, "1522 4500 7817 6848 3878 0897 | 0897 5094 9697"),
    (2, 3, "1825 4502 7520 6352 3588 1592 1476 3070 6586 9890"),
    (2, 2, "1530 3205 7008 7837 4585 1097 0582 3076 6592 9792"),
    (2, 3, "2015 5000 7018 5850 3285 1295 0380 1868 4578 9590"),
    (2, 2, "1535 2510 6002 7825 5060 2588 0885 1572 4078 9595"),
    (2, 1, "1515 4502 6818 5550 2582 0592 | 0592 4592 9988"),
    (2, 1, "1505 5002 8506 | 8506 5050 1096 | 1096 5095 9096"),
    (3, 3, "1512 4500 7515 6838 4048 | 4048 7255 8580 4599 0888"),
    (3, 2, "1812 4800 7012 6535 4548 | 4548 7550 9075 6098 2599 0585"),
    (3, 2, "0825 2505 6003 7520 4045 | 4045 7055 7580 4599 1592"),
    (3, 1, "1510 5000 8012 7035 4050 | 4050 6560 7080 4095 2590"),
    (3, 1, "1505 4505 7505 | 7505 6022 4540 | 4540 7553 7885 4599 1290"),
    (3, 2, "1512 4802 7515 6440 4050 3545 5046 7562 7585 4599 1290"),
    (3, 2, "2012 5000 8012 6838 4848 6855 7575 5095 2099 0590"),
    (4, 3, "2200 1555 | 1555 5054 9052 | 7505 7250 6899"),
    (4, 2, "6500 3835 0865 | 0865 5064 9765 | 6500 6550 6499"),
    (4, 2, "2000 1230 2550 5550 8035 | 8500 8035 7599"),
    (4, 2, "2502 1235 2255 5055 9545 | 7510 6850 6099"),
    (4, 1, "6205 1260 | 1260 5062 9558 | 7030 6650 6299"),
    (5, 3, "9003 5504 2503 | 2503 2045 | 2045 5038 8060 7090 4599 0890"),
    (5, 2, "8805 5202 2522 3542 6855 7580 4599 0890"),
    (5, 2, "3008 2248 5040 7862 7090 4099 0892 | 3008 6005 9903"),
    (5, 2, "9908 6506 3508 | 3508 2545 | 2545 5542 7562 6088 3099 0390"),
    (5, 1, "2812 2248 5040 7862 7488 4099 1590 | 3805 6505 9903"),
    (5, 1, "8505 3510 | 3510 2545 | 2545 5548 7270 5592 2095 0885"),
    (6, 3, "5500 2828 1462 2290 5299 7885 7260 4850 1868"),
    (6, 2, "4500 2040 1275 3598 6892 7268 5054 1872"),
    (6, 2, "7005 3520 1260 2895 6595 8272 6555 3565 2285"),
    (6, 2, "5000 2030 0870 3096 7095 9275 7558 4565 2585"),
    (6, 1, "3500 1845 1885 4599 8592 8575 5568 1885"),
    (7, 3, "0508 5006 8505 | 8505 6540 4599"),
    (7, 2, "0815 4508 8803 7530 5560 4099"),
    (7, 2, "0808 5006 8505 | 8505 6045 4599 | 2552 5551 8550"),
    (7, 1, "1225 1508 | 1508 5006 8805 | 8805 6845 5099"),
    (7, 1, "0530 2812 6015 8802 | 8802 6545 4599"),
    (8, 3, "8508 5000 2015 3538 6855 7880 5099 1585 2862 6040 8508"),
    (8, 2, "7812 5000 2212 2835 5548 8272 7795 4599 1388 1570 4550 7230 7812"),
    (8, 1, "5000 1812 2238 5048 7835 8010 5000 | 5048 1565 1590 5099 8588 8362 5048"),
    (8, 2, "8510 5500 3015 3840 6062 6085 4599 2585 3562 6538 8815"),
    (8, 2, "8515 5000 1520 3545 6068 5595 3590 3572 5550 8515"),
    (8, 1, "7808 5500 3015 3838 6260 7082 5099 2888 3665 6238 7808"),
    (9, 3, "7820 5000 1518 1442 4552 7235 7820 | 7820 7460 7099"),
    (9, 2, "7820 5000 1518 1442 4552 7235 7820 | 7820 8065 6295 3098 1292"),
    (9, 3, "7810 4502 1225 2250 5548 7612 | 7612 6855 5599"),
    (9, 1, "7806 5002 2518 2842 5545 8026 | 8026 7060 4899"),
    (9, 2, "7015 5000 1820 1842 4050 7030 | 8005 7545 6599"),
)
DOTS = 112                                                      # pen positions per glyph


def _stroke_basis(strokes, size):
    """Control points (K, 2) and the matrix (DOTS, K) from them to pen positions evenly spaced in length."""
    names = list(dict.fromkeys(strokes.replace("|", " ").split()))
    points = np.array([(int(name[:2]), int(name[2:])) for name in names]) / 50 - 1    # (K, 2)
    rows, steps, t = [], [], np.linspace(0, 1, 17)[:, None]
    for stroke in strokes.split("|"):
        knots = np.eye(len(names))[[names.index(name) for name in stroke.split()]]
        knots = np.vstack([2 * knots[0] - knots[1], knots, 2 * knots[-1] - knots[-2]])
        rows.append(np.vstack([                                                      # Catmull-Rom spline
            b + t / 2 * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * b - a - 3 * c + d)))
            for a, b, c, d in zip(knots, knots[1:], knots[2:], knots[3:])]))
        path = rows[-1] @ points
        steps.append(np.hypot(*np.diff(path, axis=0, prepend=path[:1]).T))           # a lift has no length
    rows, length = np.vstack(rows), np.cumsum(np.concatenate(steps))
    even = np.linspace(0, length[-1], DOTS)
    basis = np.zeros((DOTS, size))
    basis[:, :len(names)] = np.stack([np.interp(even, length, column) for column in rows.T], 1)
    return np.vstack([points, np.zeros((size - len(names), 2))]), basis


def _render(dots, width, edge, pressure):
    """Pen positions (n, DOTS, 2) -> ink in [0, 1] (n, 28, 28), sized and centred as MNIST does."""
    low, high = dots.min(1), dots.max(1)                                             # (n, 2)
    scale = (20 - width * pressure.max(1)) / (high - low).max(1)  # the ink, not its axis, spans 20
    dots = (dots - ((low + high) / 2)[:, None]) * scale[:, None, None] + 9.5
    pixel = np.arange(20, dtype=np.float32)[:, None]
    gap = dots.astype(np.float32).transpose(2, 1, 0)[:, :, None] - pixel       # (2, DOTS, 20, n)
    gap = (gap / pressure.astype(np.float32).T[:, None]) ** 2  # a pressed pen reaches further
    nearest = np.full((20, 20, len(width)), np.inf, np.float32)
    squared = np.empty_like(nearest)
    for across, down in zip(*gap):  # images last: long contiguous inner loops
        np.minimum(nearest, np.add(down[:, None], across[None], out=squared), out=nearest)
    ink = np.clip((width / 2 - np.sqrt(nearest)) / edge + 0.5, 0, 1)                 # (20, 20, n)
    ink *= ink * (3 - 2 * ink)                                    # saturated core, soft rim
    centre = [(ink.sum(axis) * pixel).sum(0) / ink.sum((0, 1)) for axis in (1, 0)]
    top, left = np.clip(np.rint(14 - np.array(centre)), 0, 8).astype(int)
    canvas = np.zeros((len(width), 28, 28), np.float32)
    image, row, column = np.ogrid[:len(width), :20, :20]
    canvas[image, top[:, None, None] + row, left[:, None, None] + column] = ink.transpose(2, 0, 1)
    return canvas


def synthesize_digits(n, seed):
    """Draw n digits: images (n, 28, 28) uint8, labels (n,) uint8 and factors, a dict of (n,) float32.

    Factors, in the order they act: style (which of its digit's glyphs), wobble (how far it is deformed),
    aspect (width factor, 1 is nominal), slant (shear, positive leans right), rotation (radians, positive is
    counter-clockwise) and stroke (mean width of the ink in px).
    """
    random = rng_for(seed, "data")
    digit, weight = (np.array([row[i] for row in GLYPHS], float) for i in (0, 1))
    size = max(len(set(row[2].replace("|", " ").split())) for row in GLYPHS)
    points, basis = (np.stack(part) for part in zip(*(_stroke_basis(row[2], size) for row in GLYPHS)))
    labels = random.integers(0, 10, n)
    share = np.cumsum(weight / np.array([weight[digit == d].sum() for d in digit]))  # digit d: (d, d + 1]
    glyph = np.searchsorted(share, labels + random.uniform(1e-6, 1 - 1e-6, n))           # (n,)
    factors = {
        "slant": random.normal(0.15, 0.25, n), "rotation": random.normal(0, 0.08, n),
        "aspect": np.exp(random.normal(0, 0.2, n)),
        "stroke": np.exp(random.normal(0.92, 0.26, n)).clip(1.2, 4.5),
        "style": glyph - np.searchsorted(digit, labels), "wobble": random.uniform(0.03, 0.17, n)}
    images = np.empty((n, 28, 28), np.uint8)
    for start in range(0, n, 250):
        part = slice(start, start + 250)
        slant, rotation, aspect, stroke, _, wobble = (value[part] for value in factors.values())
        count = len(slant)
        control = points[glyph[part]] + wobble[:, None, None] * random.normal(0, 0.7, (count, size, 2))
        dots = basis[glyph[part]] @ control                                    # (n, DOTS, 2)
        x, y = dots[..., 0], dots[..., 1]
        # A warp without linear part bends the strokes and leaves slant, rotation and aspect what they say.
        warp = np.stack([x * x, x * y, y * y], -1) @ random.normal(0, 1, (count, 3, 2))
        dots = dots + wobble[:, None, None] * warp
        cos, sin, zero = np.cos(rotation), np.sin(rotation), np.zeros(count)
        turn = np.stack([cos, -sin, sin, cos], -1).reshape(-1, 2, 2)
        shear = np.stack([0.8 * aspect, zero, -slant, zero + 1], -1).reshape(-1, 2, 2)  # acts on rows (x, y)
        cycles, phase, depth = random.uniform([[0.3], [0], [0]], [[3], [1], [0.4]], (3, count))[..., None]
        pressure = 1 + depth * np.sin(2 * np.pi * (cycles * np.linspace(0, 1, DOTS) + phase))    # (n, DOTS)
        pressure /= pressure.mean(1, keepdims=True)  # keeps `stroke` the mean width
        ink = _render(dots @ shear @ turn, stroke, random.uniform(1.0, 1.6, count), pressure)
        images[part] = np.rint(255 * ink)
    return images, labels.astype(np.uint8), {key: value.astype(np.float32) for key, value in factors.items()}


def load_digits(config, say=print):
    """-> {"source": "mnist" | "synthetic", "train" | "val" | "test": (images (n, 28, 28) uint8, labels (n,) uint8)}.

    MNIST: the first 55,000 training images, the last 5,000, the test images. No image is in two splits. With digits="auto", a
    machine without MNIST and network gets synthetic digits; a damaged file is an error all the same, never a reason to switch.
    """
    if config.digits != "synthetic":
        try:
            mnist = load_mnist(config.mnist_dir, 5 if config.digits == "auto" else 30, say)
            (images, labels), n_train = mnist["train"], 60000 - N_VAL_IMAGES
            return {"source": "mnist", "train": (images[:n_train], labels[:n_train]), "val": (images[n_train:], labels[n_train:]),
                    "test": mnist["test"]}
        except NotAtHand as error:
            if config.digits == "mnist":
                raise
            print(f"{'!' * 79}\n!!  NO MNIST HERE: these are SYNTHETIC digits. Numbers are not comparable with MNIST's.\n"
                  f"!!  {error}\n{'!' * 79}", file=sys.stderr, flush=True)                     # --quiet does not hide it
    digits, start = {"source": "synthetic"}, 0
    images, labels, _ = synthesize_digits(sum(N_SYNTHETIC.values()), config.seed)
    for split, n in N_SYNTHETIC.items():
        digits[split] = (images[start:start + n], labels[start:start + n])
        start += n
    return digits


# ---------------------------------------------------------------- data: pairs

def legal_shift_pairs(min_iou):
    """All ((dy, dx), (dy, dx)) of two digits whose 20x20 boxes overlap with IoU >= min_iou. -> (n, 2, 2) int64, px."""
    shifts = np.arange(-MAX_SHIFT, MAX_SHIFT + 1)
    pairs = np.stack(np.meshgrid(*[shifts] * 4, indexing="ij"), -1).reshape(-1, 2, 2)
    return pairs[box_iou(pairs) >= min_iou - 1e-12]


def box_iou(shifts):
    """IoU of two 20x20 boxes shifted by shifts (..., 2, 2) whole px. -> (...)"""
    sides = np.maximum(BOX - np.abs(shifts[..., 0, :] - shifts[..., 1, :]), 0)
    intersection = sides[..., 0] * sides[..., 1]
    return intersection / (2 * BOX * BOX - intersection)


def shift_digits(images, shifts):
    """Put each 28x28 image on a 36x36 canvas, its centre moved by shifts (n, 2) = (dy, dx) px. -> (n, 36, 36) uint8"""
    margin = 2 * MAX_SHIFT
    padded = np.pad(images, ((0, 0), (margin, margin), (margin, margin)))                      # (n, 44, 44)
    windows = sliding_window_view(padded, (CANVAS, CANVAS), axis=(1, 2))                       # (n, 9, 9, 36, 36)
    return windows[np.arange(len(images)), MAX_SHIFT - shifts[:, 0], MAX_SHIFT - shifts[:, 1]]


def overlay_pair(a, b, shift_a=(0, 0), shift_b=(0, 0), merge="max"):
    """Merge two 28x28 uint8 digits, shifted by (dy, dx) px. -> composite (36, 36), sources (2, 36, 36), both uint8"""
    shifts = np.array([shift_a, shift_b])
    if shifts.shape != (2, 2) or abs(shifts).max() > MAX_SHIFT:
        raise InputError(f"shifts {shift_a}, {shift_b}: must be (dy, dx) of at most {MAX_SHIFT} px")
    sources = shift_digits(np.stack([a, b]), shifts)
    return merge_sources(sources[None], merge)[0], sources


def merge_sources(sources, merge):
    """sources (n, 2, 36, 36) uint8 -> composites (n, 36, 36) uint8: pixel-wise max, or sum clipped at 255"""
    if merge not in ("max", "add") or sources.dtype != np.uint8:
        raise InputError(f"merge {merge} of {sources.dtype} digits: merge must be max or add, digits uint8 in [0, 255]")
    if merge == "max":
        return sources.max(1)
    return np.minimum(sources.sum(1, dtype=np.uint16), 255).astype(np.uint8)


def generate_multimnist(images, labels, n, rng, min_iou=0.8, merge="max"):
    """Draw n pairs of digits of different classes with the guaranteed overlap, every legal placement equally likely.

    images (M, 28, 28) uint8, labels (M,). -> dict of composites (n, 36, 36) and sources (n, 2, 36, 36), uint8, labels (n, 2)
    int64, shifts (n, 2, 2) int64 px, index (n, 2) int64 into images.
    """
    labels = np.asarray(labels)
    by_class = np.argsort(labels, kind="stable")
    start = np.searchsorted(labels[by_class], np.arange(N_CLASSES + 1))
    if (np.diff(start) > 0).sum() < 2:
        raise InputError("pairs need digits of at least two classes; give more images")
    legal = legal_shift_pairs(min_iou)
    first = rng.integers(0, len(labels), n)
    label = labels[first].astype(np.int64)
    count = start[label + 1] - start[label]
    second = rng.integers(0, len(labels) - count)                       # uniform over the images of the other classes:
    second = by_class[second + count * (second >= start[label])]        # step over the first digit's class
    index = np.stack([first, second], 1)
    shifts = legal[rng.integers(0, len(legal), n)]
    sources = shift_digits(images[index.ravel()], shifts.reshape(-1, 2)).reshape(n, 2, CANVAS, CANVAS)
    return {"composites": merge_sources(sources, merge), "sources": sources, "labels": labels[index].astype(np.int64),
            "shifts": shifts, "index": index}


def draw_pairs(digits, split, n, config, purpose, *key):
    """n pairs from one split, drawn in chunks of CHUNK, each from its own generator."""
    parts = [generate_multimnist(*digits[split], min(CHUNK, n - start), rng_for(config.seed, purpose, *key, start // CHUNK),
                                 config.min_iou, config.merge) for start in range(0, n, CHUNK)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def to_batch(pairs, rows, dtype=np.float32):
    """Rows of a dict of pairs as what the network eats: pixels in [0, 1] in `dtype`, labels (N, 2), and the dropout's mask."""
    batch = {"composites": pairs["composites"][rows].astype(dtype) / 255, "sources": pairs["sources"][rows].astype(dtype) / 255,
             "labels": pairs["labels"][rows]}
    return batch | ({"keep": pairs["keep"][rows].astype(dtype)} if "keep" in pairs else {})


# ---------------------------------------------------------------- primitives

class Arena:
    """np.empty for temporaries that come again every step: after rewind(), the k-th call returns the k-th array once more.

    Every operation takes `empty=np.empty`, so that without an arena it is pure; with one, whatever it took is overwritten after
    the next rewind(). It buys: no page faults of fresh large arrays (a training step takes 1.2 times as long with them), and
    arrays that begin at a cache line, so that no row of 16 floats lies across two (1.2 times as fast routing).
    """

    def __init__(self):
        self.arrays, self.taken = [], 0

    def rewind(self):
        self.taken = 0
        return self

    def __call__(self, shape, dtype):
        shape, dtype = tuple(shape), np.dtype(dtype)
        if self.taken == len(self.arrays) or (self.arrays[self.taken].shape, self.arrays[self.taken].dtype) != (shape, dtype):
            size = math.prod(shape) * dtype.itemsize
            raw = np.empty(size + 64, np.uint8)
            self.arrays[self.taken:] = [raw[-raw.ctypes.data % 64:][:size].view(dtype).reshape(shape)]
        self.taken += 1
        return self.arrays[self.taken - 1]


def recycle(array, empty):
    """An array like `array`: with an Arena it is `array` itself, whose content a backward reads for the last time; without one
    it is new, and the cache stays whole. Less memory to touch: a training step takes 1.03 times as long without."""
    return array if isinstance(empty, Arena) else np.empty_like(array)


def im2col(x, width, stride, empty=np.empty):
    """Unfold x (N, H, W, C) along its rows only: cols[p, r, n, ox] holds x[n, stride*r + p, stride*ox : stride*ox + width].

    -> cols (stride, ceil(H/stride), N, Wo, width*C). A full im2col copies every pixel K*K times, this one K times; the kernel
    rows are then K GEMMs on bands of rows, which lie together in memory because the row's parity p is the first axis.
    """
    N, H, W, C = x.shape
    R, Wo = -(-H // stride), (W - width) // stride + 1
    if x.strides[2:] != (C * x.itemsize, x.itemsize):                                          # a window must be one run
        x = x.copy()
    sn, sh, sw, _ = x.strides
    cols = empty((stride, R, N, Wo, width * C), x.dtype)
    for p in range(stride):
        rows = -(-(H - p) // stride)
        view = as_strided(x[:, p:], (rows, N, Wo, width * C), (stride * sh, sn, stride * sw, x.itemsize), writeable=False)
        np.copyto(cols[p, :rows], view)
    return cols


def band(cols, ky, stride, Ho):
    """The rows of cols that kernel row ky meets, as one matrix (Ho*N*Wo, width*C), without a copy."""
    return cols[ky % stride, ky // stride:ky // stride + Ho].reshape(-1, cols.shape[-1])


def conv2d_forward(x, w, b, stride, empty=np.empty):
    """Valid convolution. x (N, H, W, C), w (Kh, Kw, C, F), b (F,) -> y (N, Ho, Wo, F), a view of memory ordered (Ho, N, Wo, F)."""
    (N, H, W, C), (Kh, Kw, _, F) = x.shape, w.shape
    Ho, Wo = (H - Kh) // stride + 1, (W - Kw) // stride + 1
    cols = im2col(x, Kw, stride, empty)
    rows = w.reshape(Kh, Kw * C, F)
    y, part = empty((Ho * N * Wo, F), x.dtype), empty((Ho * N * Wo, F), x.dtype)
    np.matmul(band(cols, 0, stride, Ho), rows[0], out=y)
    for ky in range(1, Kh):
        y += np.matmul(band(cols, ky, stride, Ho), rows[ky], out=part)
    y += b
    return y.reshape(Ho, N, Wo, F).transpose(1, 0, 2, 3), (x.shape, cols, w, stride, empty)


def conv2d_backward(dy, cache, need_dx=True):
    """dy (N, Ho, Wo, F) -> dx (None unless needed), dw, db"""
    (N, H, W, C), cols, w, stride, empty = cache
    (Kh, Kw, _, F), Ho = w.shape, dy.shape[1]
    rows = w.reshape(Kh, Kw * C, F)
    dy = np.ascontiguousarray(dy.transpose(1, 0, 2, 3)).reshape(-1, F)                         # (Ho*N*Wo, F)
    dw, db = empty(w.shape, w.dtype), dy.sum(0)
    for ky in range(Kh):
        np.matmul(band(cols, ky, stride, Ho).T, dy, out=dw.reshape(rows.shape)[ky])
    if not need_dx:
        return None, dw, db
    dcols, part = recycle(cols, empty), empty((len(dy), Kw * C), dy.dtype)
    dcols[:, Ho:], dcols[Kh:] = 0, 0
    for ky in range(Kh):
        dband = band(dcols, ky, stride, Ho)
        if ky < stride:                                                                        # the first of its parity
            np.matmul(dy, rows[ky].T, out=dband)
        else:
            dband += np.matmul(dy, rows[ky].T, out=part)
    return col2im(dcols, (N, H, W, C), Kw, stride, empty), dw, db


def col2im(dcols, shape, width, stride, empty=np.empty):
    """Adjoint of im2col: add every column's entries back to the pixels they came from. -> dx, a view of memory (H, N, W, C)"""
    N, H, W, C = shape
    dx = empty((H, N, W * C), dcols.dtype)
    dx.fill(0)
    for p in range(stride):
        for ox in range(dcols.shape[3]):
            dx[p::stride, :, ox * stride * C:(ox * stride + width) * C] += dcols[p, :-(-(H - p) // stride), :, ox]
    return dx.reshape(H, N, W, C).transpose(1, 0, 2, 3)


def linear_forward(x, w, b, empty=np.empty):
    """x (N, C), w (C, F), b (F,) -> y (N, F)"""
    y = np.matmul(x, w, out=empty((len(x), w.shape[1]), x.dtype))
    y += b
    return y, (x, w, empty)


def linear_backward(dy, cache):
    x, w, empty = cache
    dx, dw = empty(x.shape, x.dtype), empty(w.shape, w.dtype)
    return np.matmul(dy, w.T, out=dx), np.matmul(x.T, dy, out=dw), dy.sum(0)


def relu_forward(x):
    """max(x, 0), IN PLACE: x is the fresh output of a convolution or linear layer, and nobody else's"""
    y = np.maximum(x, 0, out=x)
    return y, (y,)


def relu_backward(dy, cache):
    y, = cache
    return dy * (y > 0)


def sigmoid_forward(x):
    """1 / (1 + exp(-x)), written with tanh so that it cannot overflow"""
    y = 0.5 * np.tanh(0.5 * x) + 0.5
    return y, (y,)


def sigmoid_backward(dy, cache):
    y, = cache
    return dy * y * (1 - y)


def pool_forward(x):
    """2x2 maximum, an odd last row or column left out. x (N, H, W, C) -> y (N, H//2, W//2, C)"""
    corners = quarters(x)
    y = np.maximum(np.maximum(corners[0], corners[1]), np.maximum(corners[2], corners[3]))
    return y, (x, y)


def pool_backward(dy, cache):
    """The first entry that equals its window's maximum gets the window's gradient: on a plain background all four are equal"""
    x, y = cache
    dx, left = np.zeros_like(x), dy.copy()
    for corner, dcorner in zip(quarters(x), quarters(dx)):
        left -= np.multiply(corner == y, left, out=dcorner)
    return dx


def quarters(x):
    """The four pixels of each 2x2 window, as views. x (N, H, W, C) -> 4 x (N, H//2, W//2, C)"""
    H, W = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    return [x[:, i:H:2, j:W:2] for i in (0, 1) for j in (0, 1)]


# ---------------------------------------------------------------- capsules

SQUASH_EPS = 1e-9                  # inside the square root of a norm: the gradient at a zero vector is 0, not 0/0


def squash_forward(s):
    """Eq. 1: v = |s|^2 / (1 + |s|^2) * s / |s| along the last axis: the direction stays, the length goes into [0, 1)."""
    norm = np.sqrt(np.einsum("...d,...d->...", s, s)[..., None] + SQUASH_EPS)                  # (..., 1)
    gain = norm / (1 + norm * norm)
    return s * gain, (s, norm, gain)


def squash_backward(dv, cache):
    """With q = |s| and v = s q / (1 + q^2): ds = dv q/(1+q^2) + s (s . dv) (1 - q^2) / (q (1 + q^2)^2)"""
    s, norm, gain = cache
    along = np.einsum("...d,...d->...", s, dv)[..., None]                                      # (..., 1)
    along *= (1 - norm * norm) / (norm * (1 + norm * norm) ** 2)
    ds = dv * gain
    ds += s * along
    return ds


def votes_forward(u, W, empty=np.empty):
    """Eq. 2: u_hat_j|i = W_ij u_i. u (N, I, E), W (I, E, J, D) -> u_hat (N, I, J, D)

    W_ij stands transposed, as (E, D), so that each i is one row-major GEMM (N, E) @ (E, J*D): OpenBLAS's AVX-512 kernels
    multiply such small matrices 1.8 times as fast as with a transposed operand.
    """
    (N, I, E), (_, _, J, D) = u.shape, W.shape
    u_hat = empty((N, I, J * D), u.dtype)
    np.matmul(u.transpose(1, 0, 2), W.reshape(I, E, J * D), out=u_hat.transpose(1, 0, 2))
    return u_hat.reshape(N, I, J, D), (u, W, empty)


def votes_backward(du_hat, cache):
    """du_hat (N, I, J, D) -> du (N, I, E), dW (I, E, J, D)"""
    u, W, empty = cache
    (N, I, E), (_, _, J, D) = u.shape, W.shape
    by_i = du_hat.reshape(N, I, J * D).transpose(1, 0, 2)                                      # (I, N, J*D)
    du, dW = empty(u.shape, u.dtype), empty(W.shape, W.dtype)
    np.matmul(by_i, W.reshape(I, E, J * D).transpose(0, 2, 1), out=du.transpose(1, 0, 2))
    np.matmul(u.transpose(1, 2, 0), by_i, out=dW.reshape(I, E, J * D))
    return du, dW


def softmax(b):
    """Eq. 3: c_ij = exp(b_ij) / sum_k exp(b_ik), over the digit capsules, axis 1. b (N, J, I) -> c (N, J, I)"""
    c = b - b.max(1, keepdims=True)
    np.exp(c, out=c)
    c /= c.sum(1, keepdims=True)
    return c


def routing_forward(u_hat, n_iters, empty=np.empty, bias=None):
    """Procedure 1, dynamic routing. u_hat (N, I, J, D), bias (J, D) or None -> v (N, J, D)

    For r = 1..n_iters: c = softmax_j(b), s_j = sum_i c_ij u_hat_j|i (+ bias_j), v = squash(s), b_ij += u_hat_j|i . v_j, with b = 0
    at first, per sample; the update after the last squash would not be read. The cache holds each iteration's c (the first is the
    constant 1/J) and v. All sums are BLAS calls: a matrix-vector product for every (n, j) reads u_hat once, where a GEMM
    against a block-diagonal matrix would do J times the arithmetic.
    """
    N, I, J, D = u_hat.shape
    votes = u_hat.transpose(0, 2, 1, 3)                                                        # (N, J, I, D)
    steps, b = [], None
    for r in range(n_iters):
        if r == 0:
            c = np.full((1, I), 1 / J, u_hat.dtype)
            s = np.matmul(c, u_hat.reshape(N, I, J * D)).reshape(N, J, D)
        else:
            agreement = np.matmul(votes, v[..., None], out=empty((N, J, I, 1), u_hat.dtype))[..., 0]   # (N, J, I)
            b = agreement if b is None else np.add(b, agreement, out=empty((N, J, I), u_hat.dtype))
            c = softmax(b)
            s = np.matmul(c[:, :, None, :], votes)[:, :, 0]                                    # (N, J, D)
        if bias is not None:
            s += bias
        v, squash_cache = squash_forward(s)
        steps.append((c, v, squash_cache))
    return v, (u_hat, steps, empty)


def routing_backward(dv, cache, detached=False):
    """dv (N, J, D) -> du_hat (N, I, J, D), dbias (J, D), through every iteration; detached: with the last c held constant.

    Each place where u_hat_ij is used adds a number times a D-vector to its gradient: c ds from a weighted sum, db v from an
    agreement. They are gathered over all iterations, and du_hat is ONE batched product (I, T) @ (T, D) for every (n, j).
    """
    u_hat, steps, empty = cache
    N, I, J, D = u_hat.shape
    votes, T = u_hat.transpose(0, 2, 1, 3), 1 if detached else 2 * len(steps) - 1
    numbers, vectors = empty((N, J, T, I), dv.dtype), empty((N, J, T, D), dv.dtype)
    db, dbias = 0, 0
    for r in reversed(range(len(steps))):
        c, _, squash_cache = steps[r]
        ds, t = squash_backward(dv, squash_cache), 2 * (len(steps) - 1 - r)
        dbias = dbias + ds.sum(0)                                                              # it is added in every iteration
        numbers[:, :, t], vectors[:, :, t] = c, ds
        if detached or r == 0:                                                                 # c of the first is a constant
            break
        dc = np.matmul(votes, ds[..., None], out=empty((N, J, I, 1), dv.dtype))[..., 0]        # (N, J, I)
        dc -= np.einsum("nji,nji->ni", c, dc)[:, None]                                         # softmax's Jacobian
        dc *= c
        db = db + dc                                                                           # b_r = b_(r-1) + u_hat . v_(r-1)
        v = steps[r - 1][1]
        numbers[:, :, t + 1], vectors[:, :, t + 1] = db, v
        dv = np.matmul(db[:, :, None], votes)[:, :, 0]
    du_hat = recycle(u_hat, empty)
    np.matmul(numbers.transpose(0, 1, 3, 2), vectors, out=du_hat.transpose(0, 2, 1, 3))
    return du_hat, dbias


def lengths_forward(v):
    """|v_j|, the probability that digit j is there. v (N, J, D) -> (N, J)"""
    lengths = np.sqrt(np.einsum("njd,njd->nj", v, v) + SQUASH_EPS)
    return lengths, (v, lengths)


def lengths_backward(dlengths, cache):
    v, lengths = cache
    return v * (dlengths / lengths)[..., None]


def mask_forward(v, digits):
    """Keep one capsule, zero the others, once for every digit to redraw. v (N, J, D), digits (N, R) -> (N*R, J*D)"""
    (N, J, D), R = v.shape, digits.shape[1]
    masked = np.zeros((N, R, J, D), v.dtype)
    n, r = np.arange(N)[:, None], np.arange(R)
    masked[n, r, digits] = v[n, digits]
    return masked.reshape(N * R, J * D), (v.shape, digits)


def mask_backward(dmasked, cache):
    (N, J, D), digits = cache
    n, r = np.arange(N)[:, None], np.arange(digits.shape[1])
    dv = np.zeros((N, J, D), dmasked.dtype)
    np.add.at(dv, (n, digits), dmasked.reshape(N, -1, J, D)[n, r, digits])
    return dv


# ---------------------------------------------------------------- losses

M_PLUS, M_MINUS, DOWN_WEIGHT = 0.9, 0.1, 0.5


def margin_loss(lengths, present):
    """Eq. 4, summed over capsules, mean over the batch. lengths, present (N, J), present 1 for digits there, else 0.

    L_k = T_k max(0, 0.9 - |v_k|)^2 + 0.5 (1 - T_k) max(0, |v_k| - 0.1)^2. -> loss (float), dlengths (N, J)
    """
    short, long = np.maximum(M_PLUS - lengths, 0), np.maximum(lengths - M_MINUS, 0)
    N = len(lengths)
    loss = float((present * short ** 2 + DOWN_WEIGHT * (1 - present) * long ** 2).sum()) / N
    return loss, (2 * DOWN_WEIGHT * (1 - present) * long - 2 * present * short) / N


def sigmoid_cross_entropy(scores, present):
    """The CNN's loss: -log of the probability of each of the ten answers, summed, mean over the batch. scores, present (N, J)

    With p = 1 / (1 + exp(-score)): -T log p - (1 - T) log(1 - p) = log(1 + exp(-score)) + (1 - T) score. -> loss (float), dscores
    """
    N = len(scores)
    loss = float((np.logaddexp(0, -scores) + (1 - present) * scores).sum()) / N
    return loss, (sigmoid_forward(scores)[0] - present) / N


def naming_loss(out, labels, config):
    """The loss on the names: margin loss on the lengths, or the CNN's cross-entropy on its scores. -> its name, loss, gradient"""
    present = k_hot(labels, out["lengths"].dtype)
    if config.model == "cnn":
        return "cross_entropy", *sigmoid_cross_entropy(out["scores"], present)
    return "margin", *margin_loss(out["lengths"], present)


def reconstruction_loss(recon, target):
    """Squared error summed over pixels and digits, mean over the batch. recon, target (N, R, H, W) -> loss (float), drecon"""
    error = recon - target
    N = len(recon)
    return float(np.vdot(error, error)) / N, error * (2 / N)


# ---------------------------------------------------------------- the models

W_GAIN = 0.01                      # of a vote's variance: short capsules at first learn faster than longer ones (0.08: -3 points)
DIGIT_BIAS = 0.1                   # at first, as in the official code


def conv_layers(config):
    """The convolutions of config.model, the deep ones in the CNN -> list of (name, kernel, stride, channels, whether 2x2 maxima follow), and the side and
    channels of what comes out"""
    P, layers, side = config.primary_types * config.primary_dim, [], CANVAS
    unit = config.cnn_channels if config.model == "cnn" else config.conv1_channels
    for layer in FRONT_ENDS["deep"][:-1] if config.model == "cnn" else FRONT_ENDS[config.front_end]:
        if layer == "pool":
            layers[-1], side = (*layers[-1][:-1], True), side // 2
            continue
        kernel, stride, width = layer
        name = f"conv{len(layers) + 1}" if width else "primary"
        layers.append((name, kernel, stride, unit * width if width else P, False))
        side = (side - kernel) // stride + 1
    return layers, side, layers[-1][3]


def param_shapes(config):
    """Names and shapes of the weights of config.model, in the order in which they are drawn"""
    (layers, side, C), J, D = conv_layers(config), N_CLASSES, config.digit_dim
    shapes, channels = {}, 1
    for k, (name, K, _, F, _) in enumerate(layers):
        shapes[name + "_w"] = (K, K, channels, F) if k else (1, K, K, F)        # (1, kernel column, kernel row, F): see fold_rows
        shapes[name + "_b"], channels = (F,), F
    h1, h2 = config.decoder_hidden1, config.decoder_hidden2
    dense = {"dec1": (J * D, h1), "dec2": (h1, h2), "dec3": (h2, CANVAS * CANVAS)}
    if config.model == "cnn":
        hidden = config.cnn_hidden or affordable_hidden(config, shapes, side * side * C)
        dense = {"fc1": (side * side * C, hidden), "fc2": (hidden, J)}
    else:
        shapes["W"] = (side * side * config.primary_types, config.primary_dim, J, D)           # (I, E, J, D)
        if config.digit_bias:
            shapes["digit_b"] = (J, D)
    return shapes | {name + end: shape[k:] for name, shape in dense.items() for k, end in enumerate(("_w", "_b"))}


def affordable_hidden(config, convs, inputs):
    """Units of the CNN's hidden layer with which it has at most as many parameters as the capsule network without its decoder"""
    caps = dataclasses.replace(config, model="caps", digit_bias=False)
    budget = sum(math.prod(shape) for name, shape in param_shapes(caps).items() if not name.startswith("dec"))
    return (budget - sum(map(math.prod, convs.values())) - N_CLASSES) // (inputs + 1 + N_CLASSES)


def init_params(config):
    """-> flat dict of float32 arrays. He-normal where a ReLU follows, 1/fan-in variance elsewhere; biases 0."""
    rng, params = rng_for(config.seed, "init"), {}
    for name, shape in param_shapes(config).items():
        fan_in = {"W": config.primary_dim, "dec1_w": config.digit_dim}.get(name, math.prod(shape[:-1]))    # the rest is masked
        gain = {"W": W_GAIN, "primary_w": 1, "dec3_w": 1, "fc2_w": 1}.get(name, 2)
        if name.endswith("_b"):
            params[name] = np.full(shape, DIGIT_BIAS if name == "digit_b" else 0, np.float32)
        else:
            params[name] = rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(gain / fan_in))
    return params


def fold_rows(x, K):
    """x (N, H, W) -> (N, H-K+1, W, K): K shifted copies of the rows as channels. With it a KxK convolution of a one-channel
    image is a 1xK convolution of K channels, one GEMM with an inner dimension of K*K instead of K GEMMs with K."""
    return np.ascontiguousarray(sliding_window_view(x, K, axis=1))


def convs_forward(params, images, layers, empty=np.empty):
    """images (N, 36, 36) -> (N, side, side, C): convolution, 2x2 maxima where there are any, ReLU; no ReLU after PrimaryCaps"""
    x, caches = fold_rows(images, layers[0][1]), []
    for name, _, stride, _, pooled in layers:
        x, conv_cache = conv2d_forward(x, params[name + "_w"], params[name + "_b"], stride, empty)
        x, pool_cache = pool_forward(x) if pooled else (x, None)
        x, relu_cache = relu_forward(x) if name != "primary" else (x, None)
        caches.append((name, conv_cache, pool_cache, relu_cache))
    return x, caches


def convs_backward(dx, caches, grads):
    """dx (N, side, side, C); the parameters' gradients go into `grads`"""
    for name, conv_cache, pool_cache, relu_cache in reversed(caches):
        dx = dx if relu_cache is None else relu_backward(dx, relu_cache)
        dx = dx if pool_cache is None else pool_backward(dx, pool_cache)
        dx, grads[name + "_w"], grads[name + "_b"] = conv2d_backward(dx, conv_cache, need_dx=name != "conv1")


def forward(params, composites, config, digits=None, empty=np.empty, keep=None):
    """composites (N, 36, 36) in [0, 1]; digits (N, R) whose capsules to decode, None for the two longest; keep (N, hidden), the
    mask of the CNN's dropout, None for none.

    -> out and the cache. out of the capsule network: lengths (N, 10), v (N, 10, D), digits (N, R), recon (N, R, 36, 36), the primary
    capsules u (N, I, E) and, in c, each iteration's coupling coefficients, the first (1, I), the others (N, 10, I), with I ordered
    (row, column, type). out of the CNN: scores (N, 10), their sigmoids as lengths, digits, and hidden (N, hidden), the penultimate layer.
    """
    p, N = params, len(composites)
    x, convs_cache = convs_forward(p, composites, conv_layers(config)[0], empty)
    if config.model == "cnn":
        out, cache = cnn_head_forward(p, x, keep, empty)
        return out | {"digits": answers(out) if digits is None else digits}, (convs_cache, *cache)
    u, squash_cache = squash_forward(x.reshape(N, -1, config.primary_dim))                               # (N, I, E)
    u_hat, votes_cache = votes_forward(u, p["W"], empty)
    v, routing_cache = routing_forward(u_hat, config.routing_iters, empty, p.get("digit_b"))
    lengths, lengths_cache = lengths_forward(v)
    if digits is None:
        digits = top_two(lengths)
    masked, mask_cache = mask_forward(v, digits)
    decoded, decoder_cache = decoder_forward(p, masked, empty)
    out = {"lengths": lengths, "v": v, "u": u, "digits": digits, "recon": decoded.reshape(N, -1, CANVAS, CANVAS),
           "c": [c for c, _, _ in routing_cache[1]]}
    return out, (convs_cache, x.shape, squash_cache, votes_cache, routing_cache, lengths_cache, mask_cache, decoder_cache)


def forward_rows(params, pairs, rows, config, empty, decode="labels"):
    """forward of some pairs of a dict -> its arrays with a row a pair (lengths, digits; v, recon; scores, hidden); it decodes the digits
    that are there or, with decode="top2", the two longest capsules."""
    batch = to_batch(pairs, rows)
    out, _ = forward(params, batch["composites"], config, batch["labels"] if decode == "labels" else None, empty)
    return {name: out[name] for name in ("lengths", "v", "digits", "recon", "scores", "hidden") if name in out}


def backward(dnames, drecon, cache, config):
    """dnames (N, 10), naming_loss's gradient, drecon (N, R, 36, 36), which the CNN has not -> grads, keys as params"""
    grads = {}
    if config.model == "cnn":
        convs_backward(cnn_head_backward(dnames, cache[1:], grads), cache[0], grads)
        return grads
    convs_cache, primary_shape, squash_cache, votes_cache, routing_cache, lengths_cache, mask_cache, decoder_cache = cache
    dmasked = decoder_backward(drecon.reshape(-1, CANVAS * CANVAS), decoder_cache, grads)
    dv = mask_backward(dmasked, mask_cache) + lengths_backward(dnames, lengths_cache)
    du_hat, dbias = routing_backward(dv, routing_cache, config.routing_grad == "detached")
    if config.digit_bias:
        grads["digit_b"] = dbias
    du, grads["W"] = votes_backward(du_hat, votes_cache)
    convs_backward(squash_backward(du, squash_cache).reshape(primary_shape), convs_cache, grads)
    return grads


def cnn_head_forward(params, x, keep, empty=np.empty):
    """x (N, side, side, C), keep (N, hidden) or None -> out with scores (N, 10), lengths (N, 10), here
    their sigmoids, and hidden; and the cache"""
    p, shape = params, x.shape
    hidden, fc1_cache = linear_forward(x.reshape(len(x), -1), p["fc1_w"], p["fc1_b"], empty)
    hidden, relu_cache = relu_forward(hidden)
    scores, fc2_cache = linear_forward(hidden if keep is None else hidden * keep, p["fc2_w"], p["fc2_b"], empty)
    return {"lengths": sigmoid_forward(scores)[0], "scores": scores, "hidden": hidden}, (shape, fc1_cache, relu_cache, keep, fc2_cache)


def cnn_head_backward(dscores, cache, grads):
    """dscores (N, 10) -> dx (N, side, side, C); the parameters' gradients go into `grads`"""
    shape, fc1_cache, relu_cache, keep, fc2_cache = cache
    dx, grads["fc2_w"], grads["fc2_b"] = linear_backward(dscores, fc2_cache)
    dx = relu_backward(dx if keep is None else dx * keep, relu_cache)
    dx, grads["fc1_w"], grads["fc1_b"] = linear_backward(dx, fc1_cache)
    return dx.reshape(shape)


def decoder_forward(params, x, empty=np.empty):
    """Masked capsules (M, J*D) -> pixels in (0, 1), (M, 36*36)"""
    p, caches = params, []
    for layer, activation in ("dec1", relu_forward), ("dec2", relu_forward), ("dec3", sigmoid_forward):
        x, linear_cache = linear_forward(x, p[layer + "_w"], p[layer + "_b"], empty)
        x, activation_cache = activation(x)
        caches.append((linear_cache, activation_cache))
    return x, caches


def decoder_backward(dx, caches, grads):
    """dx (M, 36*36) -> gradient of the masked capsules (M, J*D); the parameters' gradients go into `grads`"""
    for layer, activation, (linear_cache, activation_cache) in zip(
            ("dec3", "dec2", "dec1"), (sigmoid_backward, relu_backward, relu_backward), reversed(caches)):
        dx = activation(dx, activation_cache)
        dx, grads[layer + "_w"], grads[layer + "_b"] = linear_backward(dx, linear_cache)
    return dx


def top_two(lengths):
    """The two longest capsules, the longest first. lengths (N, J) -> (N, 2) int64; ties go to the smaller digit"""
    return np.argsort(-lengths, axis=1, kind="stable")[:, :2]


def answers(out):
    """The two digits that a network names, (N, 2): of the CNN by its scores, since sigmoids round to 1 and would tie"""
    return top_two(out.get("scores", out["lengths"]))


def k_hot(labels, dtype):
    """labels (N, 2) -> (N, 10), 1 for the digits present"""
    present = np.zeros((len(labels), N_CLASSES), dtype)
    present[np.arange(len(labels))[:, None], labels] = 1
    return present


def loss_and_grads(params, batch, config, empty=np.empty, share=1.0):
    """One batch (to_batch's dict) -> (terms, grads): means over the batch, times `share`, a shard's part of its batch. Pure;
    with an Arena the grads live until rewind().

    terms: loss = margin + recon_weight * recon; recon is the summed squared error of both digits; hits: pairs named right. The
    CNN's: loss = cross_entropy, and hits.
    """
    out, cache = forward(params, batch["composites"], config, batch["labels"], empty, batch.get("keep"))
    name, loss, dnames = naming_loss(out, batch["labels"], config)
    terms, drecon = {"loss": loss * share, name: loss * share}, None
    if "recon" in out:
        recon, drecon = reconstruction_loss(out["recon"], batch["sources"])
        terms |= {"loss": terms["loss"] + config.recon_weight * (recon * share), "recon": recon * share}
        drecon *= config.recon_weight * share
    grads = backward(dnames * share, drecon, cache, config)
    hits = int((np.sort(answers(out), 1) == np.sort(batch["labels"], 1)).all(1).sum())
    return terms | {"hits": hits}, grads


# ---------------------------------------------------------------- Adam

BETA1, BETA2, ADAM_EPS, ADAM_CHUNK = 0.9, 0.999, 1e-8, 1 << 17


def adam_step(params, shard_grads, adam_m, adam_v, step, lr, runner):
    """One Adam step in place, step counting from 1; the gradient is the sum of shard_grads, in their order.

    p -= lr m_hat / (sqrt(v_hat) + eps), m_hat and v_hat the bias-corrected means of the gradient and of its square. The means are
    kept as sums, adam_m = m / (1 - beta1), adam_v = v / (1 - beta2), and all factors are gathered into two numbers: 11 passes
    over memory instead of 16. They run over chunks that stay in cache and are shared among the runner's threads; each number is
    computed alone, so the bits do not depend on who computes it.
    """
    root = float(np.sqrt((1 - BETA2) / (1 - BETA2 ** step)))                                   # sqrt(v_hat) = root sqrt(adam_v)
    rate, eps = float(lr * (1 - BETA1) / (1 - BETA1 ** step) / root), ADAM_EPS / root

    def update(chunks):
        scratch = np.empty((2, ADAM_CHUNK), np.result_type(*params.values()))
        for name, start in chunks:
            p, m, v, *gs = (a[name].reshape(-1)[start:start + ADAM_CHUNK] for a in (params, adam_m, adam_v, *shard_grads))
            total, part = scratch[:, :p.size]
            g = gs[0] if len(gs) == 1 else np.add(gs[0], gs[1], out=total)
            for shard in gs[2:]:
                g += shard
            m *= BETA1
            m += g
            v *= BETA2
            v += np.multiply(g, g, out=part)
            np.sqrt(v, out=part)
            part += eps
            np.divide(m, part, out=part)
            part *= rate
            p -= part

    chunks = [(name, start) for name in params for start in range(0, params[name].size, ADAM_CHUNK)]
    runner.map(update, [chunks[k::runner.threads] for k in range(runner.threads)])


# ---------------------------------------------------------------- running in shards

def n_cores():
    """Cores that this process may use"""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Runner:
    """Cuts batches into shards of SHARD_SIZE and shares them among worker threads (NumPy releases the GIL in its loops).

    Shards, and the order in which their results are added up, do not depend on the number of threads: neither do the bits.
    """

    def __init__(self, threads, batch_size=10 ** 9):
        self.threads = min(threads or n_cores(), -(-batch_size // SHARD_SIZE))
        self.pool = ThreadPoolExecutor(self.threads) if self.threads > 1 else None
        self.arenas = []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def map(self, function, items):
        """function(item) for all items, on the workers. Overflow warnings are off: train() watches the loss instead."""
        def quiet(item):
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                return function(item)
        return list(self.pool.map(quiet, items) if self.pool else map(quiet, items))

    def loss_and_grads(self, params, samples, rows, config):
        """loss_and_grads of samples[rows], shard by shard -> (terms, list of the shards' grads, to be added up)"""
        shards = [rows[start:start + SHARD_SIZE] for start in range(0, len(rows), SHARD_SIZE)]
        self.arenas += [Arena() for _ in range(len(self.arenas), len(shards))]
        results = self.map(lambda arena_shard: loss_and_grads(
            params, to_batch(samples, arena_shard[1]), config, arena_shard[0].rewind(), len(arena_shard[1]) / len(rows)),
            zip(self.arenas, shards))
        terms = {name: sum(terms[name] for terms, _ in results) for name in results[0][0]}
        return terms, [grads for _, grads in results]

    def forward(self, params, samples, config, **options):
        """forward_rows of all samples, shard by shard -> its dict of arrays, a row a sample"""
        def one(some_shards):
            arena = Arena()
            outs = (forward_rows(params, samples, shard, config, arena.rewind(), **options) for shard in some_shards)
            return [{name: a.copy() for name, a in out.items()} for out in outs]
        shards = [slice(start, start + SHARD_SIZE) for start in range(0, len(samples["labels"]), SHARD_SIZE)]
        parts = sum(self.map(one, [shards[k:k + 8] for k in range(0, len(shards), 8)]), [])
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# ---------------------------------------------------------------- evaluate, train

def wilson_interval(hits, n, z=1.959964):
    """95% Wilson score interval of a proportion -> (low, high), around hits / n also where rounding would exclude it"""
    p, z2n = hits / n, z * z / n
    centre, half = (p + z2n / 2) / (1 + z2n), z * np.sqrt(p * (1 - p) / n + z2n / (4 * n)) / (1 + z2n)
    return float(max(0, min(p, centre - half))), float(min(1, max(p, centre + half)))


def evaluate(params, pairs, config, runner):
    """Accuracies and losses over a dict of pairs.

    set_accuracy: the two longest capsules are exactly the two digits; any_accuracy: at least one of them is; recon_mse: mean
    squared error per pixel of the redrawn digits (masked by the true labels); baseline_recon_mse: that of always drawing
    these pairs' mean digit, the best constant image. The CNN has cross_entropy
    for margin, and redraws nothing: no recon, no recon_mse.
    """
    hits = np.zeros(2, int)
    sums = np.zeros(3)
    n = len(pairs["labels"])
    for start in range(0, n, CHUNK):
        part = {name: pairs[name][start:start + CHUNK] for name in ("composites", "sources", "labels")}
        out, size = runner.forward(params, part, config), len(part["labels"])
        named = (answers(out)[:, :, None] == part["labels"][:, None, :]).any(1).sum(1)        # digits named right
        hits += (named == 2).sum(), (named >= 1).sum()
        target = part["sources"].astype(np.float32) / 255
        name, loss, _ = naming_loss(out, part["labels"], config)
        recon = reconstruction_loss(out["recon"], target)[0] if "recon" in out else 0.0
        sums += np.array([loss, recon, float(np.square(target).sum() / size)]) * size
    loss, recon, square = sums / n
    mean = pairs["sources"].mean((0, 1)) / 255                                                           # float64
    per_pixel = 2 * CANVAS * CANVAS
    redrawn = {"recon": recon, "recon_mse": recon / per_pixel} if "recon" in out else {}
    return {"n": n, "hits": int(hits[0]), "set_accuracy": hits[0] / n, "any_accuracy": hits[1] / n,
            "loss": loss + config.recon_weight * recon, name: loss, **redrawn, "baseline_recon_mse": (square - 2 * float(np.square(mean).sum())) / per_pixel}


def learning_rate(config, step, n_steps):
    """Adam's learning rate at a step counting from 0"""
    if config.lr_schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * step / n_steps))
    return config.lr * (0.96 ** (step / 2000) if config.lr_schedule == "exponential" else 1)


def open_ended(config):
    """Whether a run may be resumed with more epochs: nothing that it did depends on their number"""
    return config.lr_schedule != "cosine"


def run_identity(config, source):
    """What must agree for a checkpoint to be resumed: every setting that changes training, and where the data come from"""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)
            if not (f.metadata.get("runtime") or f.name == "n_epochs" and open_ended(config))} | {"source": source}


CHECKPOINT = ("params", "adam_m", "adam_v")


def save_checkpoint(path, state, step, config, source, history):
    """All that a run needs to go on, in one .npz, written atomically. state: the dicts of arrays of CHECKPOINT, in its order"""
    arrays = {f"{group}/{name}": a for group, arrays in zip(CHECKPOINT, state) for name, a in arrays.items()}
    settings = run_identity(config, source) | {"n_epochs": config.n_epochs}
    meta = json.dumps({"format": 1, "step": step, "config": settings, "history": history})
    write_atomically(path, lambda file: np.savez(file, meta=np.array(meta), **arrays))


def load_checkpoint(path):
    """-> (*state, meta) of save_checkpoint; meta: step, config, history"""
    groups = {group: {} for group in CHECKPOINT}
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = json.loads(str(file["meta"]))
            for key in file.files:
                group, _, name = key.partition("/")
                if name:
                    groups[group][name] = file[key]
        shapes = [{name: a.shape for name, a in arrays.items()} for arrays in groups.values()]
        expected = {name: p.shape for name, p in init_params(config_of(meta, path)).items()}
        if meta["format"] != 1 or any(shape != expected for shape in shapes):
            raise ValueError("arrays are missing or of the wrong shape")
        return (*groups.values(), meta)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a checkpoint that --checkpoint wrote") from None
    except InputError:
        raise
    except Exception:                                  # what a damaged zip file makes its reader raise is not documented
        raise InputError(f"{path}: not a whole checkpoint that --checkpoint wrote; give another file") from None


def config_of(meta, path):
    """The Config of a checkpoint's run"""
    try:
        return Config(**{name: value for name, value in meta["config"].items() if name != "source"})
    except TypeError:
        raise InputError(f"{path}: a checkpoint of another experiment; give one that this one's --checkpoint wrote") from None


def check_same_run(config, source, meta, path):
    """Raise InputError if a checkpoint is another run's, which must be neither gone on from nor overwritten"""
    ours = run_identity(config, source)
    theirs = run_identity(config_of(meta, path), meta["config"].get("source"))                # fields of later versions at their defaults
    if differing := ", ".join(f"{name} {theirs[name]}, now {ours[name]}" for name in ours if ours[name] != theirs[name]):
        raise InputError(f"{path}: made by another run ({differing}); give the same settings, or another --checkpoint")


def check_fields(config):
    """Raise InputError for a value out of its field's range, or an output file that could not be written"""
    rules = {"low": (lambda value, low: value >= low, "at least"), "high": (lambda value, high: value <= high, "at most"),
             "above": (lambda value, bound: value > bound, "more than"), "choices": (lambda value, names: value in names, "one of")}
    for f in dataclasses.fields(config):
        value, flag = getattr(config, f.name), "--" + f.name.replace("_", "-")
        if isinstance(value, float) and not np.isfinite(value):
            raise InputError(f"{flag} {value}: must be a finite number")
        for rule, (holds, words) in rules.items():
            if rule in f.metadata and not holds(value, f.metadata[rule]):
                raise InputError(f"{flag} {value}: must be {words} {f.metadata[rule]}")
    if config.resume and not config.checkpoint:
        raise InputError("--resume needs --checkpoint FILE: the file to go on from")
    for path in filter(None, (config.checkpoint, config.out_json)):
        check_writable(path)


def check_config(config):
    """check_fields, and what concerns two flags at once"""
    check_fields(config)
    if config.batch_size > config.n_train:
        raise InputError(f"--batch-size {config.batch_size}: more than --n-train {config.n_train}; lower one or raise the other")
    usual = Config(preset=config.preset, model=config.model)
    for f in dataclasses.fields(config):
        if f.metadata.get("model", config.model) != config.model and getattr(config, f.name) != getattr(usual, f.name):
            raise InputError(f"--{f.name.replace('_', '-')}: means nothing to --model {config.model}; leave it out")
    if config.model == "cnn":
        if config.cnn_hidden:
            for name in ("preset", "front_end", "conv1_channels", "primary_types", "primary_dim", "digit_dim"):
                if getattr(config, name) != getattr(Config(), name):
                    raise InputError(f"--{name.replace('_', '-')}: sets how large the CNN may be, and --cnn-hidden does; leave one out")
        elif (hidden := param_shapes(config)["fc2_w"][0]) < N_CLASSES:
            raise InputError(f"--cnn-channels {config.cnn_channels}: leave room for {max(0, hidden)} hidden units only, within the capsule network's "
                             "number of parameters; lower it, or give --cnn-hidden")


class Progress:
    """On a terminal one live line; elsewhere a line an epoch; with --quiet nothing."""

    def __init__(self, quiet):
        self.quiet, self.live, self.last = quiet, not quiet and sys.stdout.isatty(), 0.0

    def say(self, text, end="\n"):
        """Print; a text that starts with a carriage return replaces the live line, and is for terminals only"""
        if text.startswith("\r") and self.live:
            print("\r\x1b[K" + text[1:shutil.get_terminal_size().columns], end=end, flush=True)
        elif not (self.quiet or text.startswith("\r")):
            print(text, end=end, flush=True)

    def step(self, text):
        if self.live and time.perf_counter() - self.last > 0.2:
            self.last = time.perf_counter()
            self.say("\r" + text, end="")

    def epoch(self, text):
        self.say("\r" + text if self.live else text)


def train(config, snapshot_callback=None, snapshot_every=0, digits=None):
    """Train -> (params, history). Never looks at the test images.

    snapshot_callback(step, params, terms) gets copies, at step 0, every snapshot_every steps and at the end; it cannot change
    the run. digits: load_digits' result, to load only once. history: epochs (one dict each: train and validation losses and
    accuracies), seconds, steps, source of the digits.
    """
    check_config(config)
    progress = Progress(config.quiet)
    digits = digits or load_digits(config, progress.say)
    params = init_params(config)
    adam_m, adam_v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    steps_per_epoch = -(-config.n_train // config.batch_size)
    n_steps, step = config.n_epochs * steps_per_epoch, 0
    history = {"digits": digits["source"], "epochs": [], "seconds": 0.0, "steps": 0}
    saved = ""                                                          # where to find the last good state
    if config.checkpoint and Path(config.checkpoint).exists():
        found = load_checkpoint(config.checkpoint)
        check_same_run(config, digits["source"], found[-1], config.checkpoint)
        if config.resume:
            params, adam_m, adam_v, meta = found
            step, history = meta["step"], meta["history"]
            saved = f" (the last good state is in {config.checkpoint})"
    elif config.resume:
        progress.say(f"{config.checkpoint} is not there yet: starting anew")
    val = draw_pairs(digits, "val", config.n_val, config, "evaluation", 0)
    with Runner(config.threads, config.batch_size) as runner:
        announce(config, digits, params, runner, val, step, progress)
        if snapshot_callback:
            snapshot_callback(step, {name: p.copy() for name, p in params.items()}, None)
        for epoch in range(step // steps_per_epoch, config.n_epochs):
            began, sums, seen = time.perf_counter(), {}, 0
            for pairs in epoch_pairs(digits, epoch, config):
                for start in range(0, len(pairs["labels"]), config.batch_size):
                    rows = np.arange(start, min(start + config.batch_size, len(pairs["labels"])))
                    terms, grads = runner.loss_and_grads(params, pairs, rows, config)
                    if not np.isfinite(terms["loss"]):
                        raise InputError(f"the loss is {terms['loss']} at step {step + 1}: training diverged; lower --lr{saved}")
                    lr = learning_rate(config, step, n_steps) * min(1, (step + 1) / max(1, config.warmup))
                    adam_step(params, grads, adam_m, adam_v, step + 1, lr, runner)
                    step, seen = step + 1, seen + len(rows)
                    for name, term in terms.items():
                        sums[name] = sums.get(name, 0) + term * (1 if name == "hits" else len(rows))
                    rate = seen / (time.perf_counter() - began)
                    left = (config.n_epochs * config.n_train - epoch * config.n_train - seen) / rate
                    progress.step(f"step {step}/{n_steps}  {left:.0f} s left  loss {sums['loss'] / seen:.3f}  accuracy "
                                  f"{sums['hits'] / seen:.3f}  {rate:.0f} pairs/s")
                    if snapshot_callback and (step == n_steps or snapshot_every and step % snapshot_every == 0):
                        paused = time.perf_counter()
                        snapshot_callback(step, {name: p.copy() for name, p in params.items()}, dict(terms))
                        began += time.perf_counter() - paused                          # its time is not training's
            seconds = time.perf_counter() - began
            held_out = evaluate(params, val, config, runner)
            if not (np.isfinite(held_out["loss"]) and all(np.isfinite(p).all() for p in params.values())):
                raise InputError(f"the weights are not finite after step {step}: training diverged; lower --lr{saved}")
            history["seconds"] += seconds
            history["steps"] = step
            sums["set_accuracy"] = sums.pop("hits")
            kept = ("loss", "margin", "cross_entropy", "recon", "recon_mse", "set_accuracy", "any_accuracy")
            history["epochs"].append({
                "epoch": epoch + 1, "step": step, "seconds": seconds, **{"train_" + name: total / seen for name, total in sums.items()},
                **{"val_" + name: held_out[name] for name in kept if name in held_out}})
            progress.epoch(f"epoch {epoch + 1}/{config.n_epochs}  loss {sums['loss'] / seen:.3f}  accuracy "
                           f"{sums['set_accuracy'] / seen:.3f}  validation {held_out['set_accuracy']:.3f}  {seen / seconds:.0f} pairs/s")
            if config.checkpoint:
                save_checkpoint(config.checkpoint, (params, adam_m, adam_v), step, config, digits["source"], history)
                saved = f" (the last good state is in {config.checkpoint})"
    return params, history


def epoch_pairs(digits, epoch, config):
    """The pairs of one epoch, a chunk of whole batches at a time: fresh ones, or always the same pool."""
    images, labels = digits["train"]
    size = max(1, CHUNK // config.batch_size) * config.batch_size
    for k, start in enumerate(range(0, config.n_train, size)):
        rng = rng_for(config.seed, "batches", 0 if config.fixed_pool else epoch, k)
        pairs = generate_multimnist(images, labels, min(size, config.n_train - start), rng, config.min_iou, config.merge)
        if config.dropout:
            rng, shape = rng_for(config.seed, "batches", epoch, k, 1), (len(pairs["labels"]), param_shapes(config)["fc2_w"][0])
            pairs["keep"] = (rng.random(shape, np.float32) >= config.dropout) / np.float32(1 - config.dropout)
        yield pairs


def n_params(params):
    return sum(p.size for p in params.values())


def announce(config, digits, params, runner, val, step, progress):
    """What a run prints at its start: data, shapes, parameters, threads, and whether the initial loss is what it should be."""
    actual = evaluate(params, val, config, runner)["loss"]
    if config.model == "cnn":
        network = f"CNN, {config.cnn_channels} to {params['conv5_b'].size} channels, {params['fc1_b'].size} hidden units"
        expected = f"10 log 2 = {N_CLASSES * math.log(2):.3f} if every sigmoid said 1/2"
    else:
        square = np.square(val["sources"] / 255 - 0.5).sum() / len(val["labels"])
        expected = (f"1.62 + {config.recon_weight} x {square:.0f} = {2 * M_PLUS ** 2 + config.recon_weight * square:.3f} if all capsules "
                    "had length 0 and all pixels were gray")
        I, E, J, D = params["W"].shape
        network = (f"{config.front_end} front end, Conv1 {config.conv1_channels}, {I} x {E}-D primary capsules, {J} x {D}-D digit capsules, "
                   f"{config.routing_iters} routing iterations, gradient {config.routing_grad}{', biases' * config.digit_bias}")
    progress.say(
        f"digits      {digits['source']}: {len(digits['train'][1])} training, {len(digits['val'][1])} validation, "
        f"{len(digits['test'][1])} test images; IoU >= {config.min_iou}, merge {config.merge}, "
        f"{'one pool of' if config.fixed_pool else 'fresh'} pairs\n"
        f"network     {network}; {n_params(params):,} parameters\n"
        f"training    {config.n_epochs} x {config.n_train} pairs, batches of {config.batch_size}, lr {config.lr} {config.lr_schedule}"
        f"{f' after {config.warmup} steps of warm-up' * (config.warmup > 0)}{f', dropout {config.dropout}' * (config.dropout > 0)}, "
        f"seed {config.seed}, {runner.threads} thread{'s' * (runner.threads > 1)}"
        + (f"; going on at step {step} with loss {actual:.3f}" if step else
           f"\ninitial     loss {actual:.3f}; {expected}"))


# ---------------------------------------------------------------- command line

class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, as for all other bad input"""

    def error(self, message):
        raise InputError(f"{message}; see --help")


def add_config_flags(parser):
    """One flag for every field of Config. Flags that are not given leave no trace: the defaults are Config's."""
    for f in dataclasses.fields(Config):
        default = f.metadata.get("shown", f.default)
        flag = dict(help=f.metadata["help"] + (f" (default {default})" if default not in ("", False) else ""))
        if f.type is bool:
            flag.update(action="store_true")
        else:
            names = f.metadata.get("choices")
            flag.update(type=f.type, choices=names,
                        metavar=None if names else f.metadata.get("metavar", {int: "N", float: "X", str: "FILE"}[f.type]))
        parser.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, **flag)


def config_from_args(args):
    """The Config of the flags that were given"""
    return Config(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if hasattr(args, f.name)})


def run_cli(main):
    """Call main(); turn what the user can mend into one line and exit code 2."""
    try:
        main()
    except InputError as error:
        sys.exit(fail(str(error)))
    except MemoryError:
        sys.exit(fail("out of memory; lower --batch-size or the network's sizes"))
    except KeyboardInterrupt:
        print("\nstopped; --checkpoint, if it was given, holds the last whole epoch", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:                                                             # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def fail(message):
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def peak_rss_mb():
    """Peak resident memory of this process, MB (10^6 bytes); None where the system does not tell"""
    with contextlib.suppress(OSError, IndexError):                      # Linux; getrusage would count a parent's memory too
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    with contextlib.suppress(ImportError):
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return None


def results_of(config, params, history, test):
    """The dict that --out-json writes"""
    return {"config": dataclasses.asdict(config), "digits": history["digits"], "n_params": n_params(params),
            "test_set_accuracy": test["set_accuracy"], "test_set_accuracy_ci95": wilson_interval(test["hits"], test["n"]),
            "test_any_accuracy": test["any_accuracy"], "test_recon_mse": test.get("recon_mse"),
            "baseline_recon_mse": test["baseline_recon_mse"], "seconds_train": history["seconds"],
            "ms_per_step": 1e3 * history["seconds"] / history["steps"],
            "pairs_per_second": config.n_train * len(history["epochs"]) / history["seconds"], "peak_rss_mb": peak_rss_mb(),
            "versions": {"python": sys.version.split()[0], "numpy": np.__version__}, "history": history["epochs"]}


def report(config, params, history, test, say):
    """Print evaluate's result on the test pairs, and write --out-json."""
    results = results_of(config, params, history, test)
    low, high = results["test_set_accuracy_ci95"]
    if config.model == "cnn":
        loss = f"  loss                    {test['loss']:.4f}   cross-entropy, summed over the ten digits\n"
    else:
        loss = (f"  reconstruction MSE      {test['recon_mse']:.4f}   per pixel; {test['baseline_recon_mse']:.4f} for the mean image\n"
                f"  losses                  {test['loss']:.4f} = margin {test['margin']:.4f} + weight x {test['recon']:.2f}\n")
    say(f"\n{DIGIT_NAMES[results['digits']]}, {test['n']} test pairs\n"
        f"  set accuracy            {test['set_accuracy']:.4f}   95% interval [{low:.4f}, {high:.4f}], chance {CHANCE:.4f}\n"
        f"  at least one            {test['any_accuracy']:.4f}   chance {CHANCE_ANY:.4f}\n{loss}"
        f"  training                {results['seconds_train']:.1f} s, {results['ms_per_step']:.1f} ms a step, "
        f"{results['pairs_per_second']:.0f} pairs/s" + (f", peak memory {results['peak_rss_mb']:.0f} MB" if results["peak_rss_mb"] else ""))
    if config.out_json:
        write_atomically(config.out_json, lambda file: file.write((json.dumps(results, indent=1) + "\n").encode()))


def main():
    parser = Parser(description=__doc__.split("\n\n")[0], epilog="\n\n".join(__doc__.split("\n\n")[-1:]),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_flags(parser)
    config = config_from_args(parser.parse_args())
    check_config(config)
    progress = Progress(config.quiet)
    digits = load_digits(config, progress.say)
    params, history = train(config, digits=digits)
    with Runner(config.threads) as runner:
        test = evaluate(params, draw_pairs(digits, "test", config.n_test, config, "evaluation", 1), config, runner)
    report(config, params, history, test, progress.say)


if __name__ == "__main__":
    run_cli(main)
