#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Serve a page in the browser on which the pretrained networks can be tried: draw two overlapping digits, transform a
digit, view a toy from all sides.

The server listens on this machine only and needs no internet. Every answer is a forward pass of an experiment's own
script on the image that the page shows. For a toy the page shows one camera's image; the networks get both
cameras' images at half its resolution, cropped to the central two thirds. The page's files are in explore/.

    python3 explore.py                             # opens the page in a few seconds; Ctrl-C stops the server
    python3 explore.py --load my-network.npz       # also shows a network of your own
"""
import base64
import contextlib
import dataclasses
import http.server
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import webbrowser
import zlib
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
import affnist_capsnet as affnist  # before numpy: they set the number of BLAS threads
import multimnist_capsnet as multi
import smallnorb_novel_viewpoint as norb
from lab import figures
from lab.data import MIN_SIDE, WORK_SIDE, find_ink
from lab.messages import InputError, Parser, run_cli
from lab.networks import load_network
from multimnist_capsnet import CANVAS

import numpy as np

import visualize_multimnist_capsnet as pictures

ROOT = Path(__file__).resolve().parent
NETWORKS = {                       # of each experiment: file in weights/ -> name on the page, description
    multi: {"multimnist_capsnet": ("capsnet", "ten convolutions, then dynamic routing to ten digit capsules")},
    affnist: {"affnist_capsnet-shared": ("capsnet-shared", "CapsNet, transformation matrices shared across positions"),
              "affnist_cnn-gap": ("cnn-gap", "CNN with global average pooling, on the same backbone"),
              "affnist_small_capsnet": ("capsnet", "the paper's CapsNet, small: a transformation matrix per position"),
              "affnist_small_cnn": ("cnn", "the paper's CNN, small: three convolutions, two hidden layers"),
              "affnist_small_cnn-dense": ("cnn-dense", "CNN with max pooling: five convolutions, a hidden layer")},
    norb: {"smallnorb_capsnet-shared": ("capsnet-shared", "CapsNet, transformation matrices shared across positions"),
           "smallnorb_cnn-gap": ("cnn-gap", "CNN with global average pooling, on the same backbone"),
           "smallnorb_matrix-capsnet": ("matrix-capsnet", "the paper's network, small: pose matrices and EM routing")}}
N_CLASSES = 10                     # digits
CAPSULES = {multi: ("capsnet",), affnist: affnist.CAPSULES, norb: norb.CAPSULES}       # models with class capsules
PAGE = {"/": ("index.html", "text/html"), "/explore.js": ("explore.js", "text/javascript"),
        "/explore.css": ("explore.css", "text/css")}           # these paths and /ask are the only ones
MAX_BODY, N_DIGITS = 1_000_000, 200                            # bytes of a request; test digits to choose from
MAX_PAGES = 100                    # whose newest requests are known; an older page's request is stale, and sent again
SIDE = affnist.SIDES["affnist"]    # px, of the canvas in the tab of affine digits
MAX_SIDE = WORK_SIDE               # px, of the user's own picture
EXTENT, STEP, CHUNK = 12, 2, 12    # of a map: px from the center, px between positions, positions per forward pass
AZIMUTHS = range(0, 360, 10)       # of a ring, degrees
HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Content-Security-Policy": "default-src "
           "'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
           "form-action 'none'; frame-ancestors 'self' http://localhost:* http://127.0.0.1:* vscode-webview:"}
LOOPBACK = r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"              # names of this machine, with any port (ssh -L)
STALE = {"stale": True}            # the answer if the page has sent a newer request of the same kind
FIELDS = {                         # of requests: type, bounds and length of numbers; str: base64, bounds of its bytes
    "image": (str, CANVAS ** 2, CANVAS ** 2), "routing": (int, 0, 1),
    "a": (int, 0, N_CLASSES - 1), "b": (int, 0, N_CLASSES - 1), "v": (float, -10, 10, 2 * multi.D),
    "width": (int, MIN_SIDE, MAX_SIDE), "gray": (str, MIN_SIDE ** 2, MAX_SIDE ** 2), "digit": (int, 0, N_DIGITS - 1),
    "rotation": (float, -180, 180), "shear": (float, -1, 1), "scale_y": (float, 0.3, 2), "scale_x": (float, 0.3, 2),
    "y": (float, -SIDE, SIDE), "x": (float, -SIDE, SIDE), "network": (int, 0, 99), "azimuth": (float, -360, 360),
    "elevation": (float, 0, 90), "light": (int, 0, 5), "category": (int, 0, norb.N_CLASSES - 1), "toy": (int, 0, 4),
    "page": (int, 0, 2 ** 32 - 1)}
DIGIT, TOY = ("digit", "rotation", "shear", "scale_y", "scale_x"), ("category", "toy", "elevation", "light")
REQUESTS = {                       # kind, which is a method of Guide -> its fields; optional: "page", a random number
    "start": (), "pair": ("image", "routing"), "reconstruct": ("a", "b", "v"), "picture": ("width", "gray"),
    "digit": (*DIGIT, "y", "x"), "map": (*DIGIT, "network"), "toy": (*TOY, "azimuth"), "ring": TOY}


def check_field(name, x):
    """Return the value of a request's field, base64 as bytes. Raise InputError if it is not as FIELDS says."""
    kind, low, high, *length = FIELDS[name]
    if kind is str:
        good = type(x) is str and len(x) % 4 == 0 and re.fullmatch("[A-Za-z0-9+/]*={0,2}", x)
        x = np.frombuffer(base64.b64decode(x), np.uint8) if good else x
        good = good and low <= x.size <= high
    else:
        numbers, n = (x, *length) if length and type(x) is list else ([x], 1 - len(length))
        good = len(numbers) == n and all(type(k) in (int, kind) and low <= k <= high for k in numbers)
    if not good:
        times = f", {length[0]} times" if length else ""
        raise InputError(f"{name}: must be {kind.__name__}, {low} to {high}{times}")
    return x


def encode(image):
    """Return pixels, uint8 or floats in [0, 1], as base64 of bytes."""
    image = image if image.dtype == np.uint8 else np.rint(255 * image).astype(np.uint8)
    return base64.b64encode(image.tobytes()).decode()


def shipped_digits():
    """Return 100 test digits of MNIST, (100, 28, 28) uint8, and their labels, for demonstrations only. They come with
    the project, ten of each class, classes in turn; see explore/mnist_digits.md."""
    sheet = figures.imageio.imread(ROOT / "explore" / "mnist_digits.png").reshape(10, 28, 10, 28)  # rows are classes
    return sheet.transpose(2, 0, 1, 3).reshape(100, 28, 28), np.tile(np.arange(10, dtype=np.uint8), 10)


def score_name(module, model):
    """Return what the page shows of a model for each class: a capsule's length or activation, or a probability."""
    return "activation" if model in norb.MATRIX_MODELS else "length" if model in CAPSULES[module] else "probability"


def familiar_azimuths(config):
    """Return the lowest and the highest azimuth in degrees of the training views of a network for toys"""
    low, high = (0, 360) if config.split == "elevation" else norb.angle_ranges(config)[0]
    return (low, low + 360) if high - low >= 340 else (low, high)       # toys have one every 20 degrees


class Guide:
    """Answers the page's requests with the experiments' own functions.

    The methods named in REQUESTS take the fields of a request and return its answer, a dict for json.
    """

    def __init__(self, own=()):
        self.networks = {module: [(*texts, load_network(module, ROOT / "weights" / f"{name}.npz"))
                                  for name, texts in files.items()] for module, files in NETWORKS.items()}
        found = [(path, *self.identify(path)) for path in own]
        if len(pairs := [str(path) for path, module, _ in found if module is multi]) > 1:
            raise InputError(f"--load {' '.join(pairs)}: the page shows one network for overlapping digits. Give one "
                             "of these files")
        for path, module, network in found:
            others = self.networks[module] if module is not multi else []
            text = f"yours: {network.config.model}, trained on {network.source}"
            self.networks[module] = [*others, (Path(path).stem, text, network)]
        ((*_, self.pair_network), *_), self.digit_networks, self.toy_networks = self.networks.values()
        try:                                                   # MNIST if it is on this machine: never download it
            self.source = "MNIST"
            mnist = multi.load_data(multi.Config(digits="mnist"), download=False)
            if mnist["source"] != "mnist":
                raise multi.InputError("$MNIST_DIR has other images")
            self.images, self.labels = (a[:N_DIGITS] for a in mnist["test"])
        except multi.InputError:
            self.source, (self.images, self.labels) = "shipped", shipped_digits()
        self.lock = threading.Lock()
        self.queues = {kind: SimpleNamespace(lock=threading.Lock(), count=0, newest={}) for kind in REQUESTS}
        self.key = f"{zlib.crc32(json.dumps(self.start()).encode()):x}"        # of another guide's networks and digits

    def identify(self, path):
        """Return the experiment of a network's file, and the network. Raise InputError if the page cannot show it."""
        if not Path(path).exists():
            raise InputError(f"--load {path}: no such place. Give a weights file or a run's folder")
        others = ""
        conditions = (lambda c: c.model == "capsnet"), (lambda c: c.task == "affnist"), (
            lambda c: c.data != "shapes")
        for module, condition in zip(NETWORKS, conditions):
            with contextlib.suppress(module.InputError):
                if condition((network := load_network(module, path)).config):
                    n_classes = getattr(network.config, "n_classes", N_CLASSES)
                    names = network.history.get("names") or list(map(str, range(n_classes)))
                    if [name.removeprefix("digit ") for name in names] == list("0123456789"):
                        return module, network
                    others = f" (this one has other classes: {', '.join(names):.40}; the page shows ten digits, 0 to 9)"
        raise InputError(f"--load {path}: not a network that the page can show{others}. Give a run's folder: "
                         "a capsnet of multimnist_capsnet.py, or a network for 40x40 px digits or for toys. Others: "
                         "visualize_affnist_capsnet.py --load")

    def answer(self, request):
        """Return the answer to a request of the page; both are dicts. Raise InputError if the request is wrong.

        Requests of one kind are answered one at a time. Of those that wait only each page's newest is answered; the
        others are stale.
        """
        if type(request) is not dict or type(kind := request.pop("ask", None)) is not str or kind not in REQUESTS:
            raise InputError(f"ask: must be one of {', '.join(REQUESTS)}")
        if request.keys() - {"page"} != set(REQUESTS[kind]):
            raise InputError(f"{kind}: must have the fields {', '.join(REQUESTS[kind]) or 'ask alone'}")
        fields, queue = {name: check_field(name, x) for name, x in request.items()}, self.queues[kind]
        page = fields.pop("page", 0)
        with self.lock:
            queue.count = number = queue.count + 1
            queue.newest = {**dict([*queue.newest.items()][-MAX_PAGES:]), page: number}
        def is_stale():
            return queue.newest.get(page) != number
        more = {"is_stale": is_stale} if kind in ("map", "ring") else {}
        with queue.lock:
            return STALE if is_stale() else getattr(self, kind)(**fields, **more)

    def start(self):
        """Return what the page needs once: test digits, names of the networks, constants."""
        names = [[[name, text, score_name(module, network.config.model)] for name, text, network in networks]
                 for module, networks in self.networks.items()]
        for entry, (*_, network) in zip(names[2], self.toy_networks):
            entry.append(familiar_azimuths(network.config))
        return {"source": self.source, "digits": encode(self.images), "labels": self.labels.tolist(), "networks": names,
                "thresholds": [pictures.MIN_LENGTH, pictures.MIN_MARGIN], "extent": [EXTENT, STEP],
                "ranges": affnist.RANGES, "train_shift": affnist.max_shift(affnist.Config()),
                "sides": [MIN_SIDE, MAX_SIDE], "azimuths": list(AZIMUTHS),
                "familiar_azimuths": norb.angle_ranges(norb.Config())[0]}

    def pair(self, image, routing):
        """Classify and reconstruct two overlapping digits, with routing or with uniform coupling coefficients."""
        config = self.pair_network.config
        config = config if routing else multi.with_uniform_coupling(config)
        image = image.reshape(1, CANVAS, CANVAS).astype(np.float32) / 255
        out, _ = multi.forward(self.pair_network.weights, image, config)
        predicted, along = out["digits"][0], pictures.field_centers(config)
        grid = len(along)
        weight = np.linalg.norm(out["u"][0], axis=-1).reshape(grid * grid, -1)         # lengths of primary capsules
        c = np.stack([np.broadcast_to(step, (1, N_CLASSES, weight.size))[0, predicted] for step in out["c"]])
        couplings = np.average(c.reshape(-1, 2, *weight.shape), -1, np.broadcast_to(weight, (len(c), 2, *weight.shape)))
        return {"lengths": out["scores"][0].tolist(), "digits": predicted.tolist(), "grid": grid,
                "square": [float(x) for x in pictures.square_of_centers(along, CANVAS)],
                "v": out["v"][0, predicted].tolist(), "couplings": couplings.tolist(),
                "reconstructions": [encode(digit) for digit in out["recon"][0]]}

    def reconstruct(self, a, b, v):
        """Reconstruct two digits from their digit capsules a and b, whose vectors v holds one after the other."""
        capsules = np.zeros((2, N_CLASSES, multi.D), np.float32)
        capsules[[0, 1], [a, b]] = np.reshape(v, (2, -1))
        recon, _ = multi.decoder_forward(self.pair_network.weights, capsules, np.array([[a], [b]]))
        return {"reconstructions": [encode(digit) for digit in recon[:, 0]]}

    def picture(self, width, gray):
        """Return a picture's ink as the network input of visualize_multimnist_capsnet.py --image. gray: its rows."""
        if gray.size % width or not MIN_SIDE <= gray.size // width <= MAX_SIDE:
            raise InputError(f"gray: must be {MIN_SIDE} to {MAX_SIDE} rows of {width} bytes")
        try:
            ink = find_ink(gray.reshape(-1, width) / 255)
        except InputError:
            raise InputError("No ink stands out from the background of the picture. Choose a picture of two "
                             "overlapping digits, dark on light or light on dark.") from None
        return {"image": encode(pictures.to_canvas(ink))}

    def transformed(self, digit, positions, side=SIDE, **factors):
        """Return a test digit, transformed, at each of the positions, (n, side, side) uint8.

        positions: (n, 2), (y, x) of the digit's center in px from the center of the canvas.
        """
        if digit >= len(self.images):
            raise InputError(f"digit: must be below {len(self.images)}, the number of digits here")
        inverses = np.linalg.inv(affnist.affine_matrix(**factors)).repeat(len(positions), 0)
        images = self.images[[digit]].repeat(len(positions), 0)
        return affnist.resample_affine(images, inverses, np.asarray(positions, float) + (side - 1) / 2, side)

    def digit(self, y, x, **digit):
        """Return a transformed digit and every network's scores and reconstruction."""
        image, answers = self.transformed(positions=[(y, x)], **digit), []
        for *_, network in self.digit_networks:
            out, _ = affnist.forward(network.weights, image.astype(np.float32) / 255, network.config)
            recon = {"reconstruction": encode(out["recon"])} if "recon" in out else {}
            answers.append({"scores": out["scores"][0].tolist(), **recon})
        return {"image": encode(image), "answers": answers}

    def map(self, network, is_stale, **digit):
        """Return a network's predictions for a digit at each position, row by row, and where all its ink is visible."""
        if network >= len(self.digit_networks):
            raise InputError(f"network: must be below {len(self.digit_networks)}")
        *_, network = self.digit_networks[network]
        axis, predicted = range(-EXTENT, EXTENT + 1, STEP), []
        config = dataclasses.replace(network.config, recon_weight=0.0)
        images = self.transformed(positions=list(itertools.product(axis, axis)), **digit)
        for start in range(0, len(images), CHUNK):
            if is_stale():
                return STALE
            chunk = images[start:start + CHUNK].astype(np.float32) / 255
            predicted += affnist.forward(network.weights, chunk, config)[0]["scores"].argmax(1).tolist()
        whole = self.transformed(positions=[(0, 0)], side=3 * SIDE, **digit).sum()         # may exceed every position's
        return {"predicted": predicted, "visible": (images.sum((1, 2)) >= 0.98 * whole).tolist()}

    def view(self, category, toy, azimuth, elevation, light):
        """Return the picture of a test toy, (96, 96), and the networks' input, (1, 32, 32, 2)."""
        toy = norb.make_toy(category, norb.TOY_SPLITS["test"][toy], norb.Config().toy_seed)
        views = norb.draw_view(toy, elevation, azimuth, 2 * norb.NORB_SIDE)
        return views[light, 0], norb.crop_batch(norb.downsample(views)[[light]], [0])

    def toy(self, **view):
        """Return the picture of a test toy and every network's activations; of a CNN its scores."""
        picture, image = self.view(**view)
        outputs = [norb.forward(network.weights, image, network.config)[0] for *_, network in self.toy_networks]
        return {"image": encode(picture), "answers": [out.get("a", out["scores"])[0].tolist() for out in outputs]}

    def ring(self, is_stale, **view):
        """Return every network's predictions for a test toy at each of AZIMUTHS."""
        images = []
        for azimuth in AZIMUTHS:
            if is_stale():
                return STALE
            images.append(self.view(azimuth=azimuth, **view)[1])
        outputs = [norb.forward(network.weights, np.concatenate(images), network.config)[0]
                   for *_, network in self.toy_networks]
        return {"predicted": [out["scores"].argmax(1).tolist() for out in outputs]}


# ---------------------------------------------------------------- the server

class Handler(http.server.BaseHTTPRequestHandler):
    timeout, error_message_format, error_content_type = 2, "%(message)s\n", "text/plain"      # timeout in seconds

    def do_GET(self):
        path = self.path.partition("?")[0]                     # editors add a query to what they open
        host = self.headers.get("Host", "")
        if not re.fullmatch(LOOPBACK, host) or self.headers.get("Origin", f"http://{host}") != f"http://{host}":
            port = self.server.server_address[1]
            self.send_error(403, "this server answers only to localhost and 127.0.0.1. From another machine: ssh -L "
                            f"{port}:localhost:{port} THIS_MACHINE, then open http://localhost:{port}/ there")
        elif self.command in ("GET", "HEAD") and path in PAGE:
            name, content_type = PAGE[path]
            self.send((ROOT / "explore" / name).read_text(encoding="utf-8"), content_type)
        elif self.command == "POST" and self.path == "/ask":
            try:
                answer = self.server.guide.answer(self.read_json())
                self.send(json.dumps(answer, separators=(",", ":")), "application/json")
            except InputError as error:
                self.send_error(400, str(error))
            except (ValueError, RecursionError, TimeoutError):
                self.send_error(400, "the request's body is not JSON, or incomplete")
        else:
            self.send_error(404, "no such page")

    do_POST = do_HEAD = do_GET

    def read_json(self):
        """Return the request's body, parsed. Raise InputError if it is too long."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,7}", length) or int(length) > MAX_BODY:
            raise InputError(f"Content-Length: must be at most {MAX_BODY}")
        return json.loads(self.rfile.read(int(length)))

    def send(self, text, content_type):
        body = text.encode()
        self.send_response(200)
        headers = {"Content-Type": f"{content_type}; charset=utf-8", "Content-Length": len(body)}
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def end_headers(self):
        if self.command == "POST":
            self.send_header("X-Facts", self.server.guide.key)         # by which an open page notices another guide
        super().end_headers()

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    """Serves each request in a thread of its own; server_close waits for all of them."""
    daemon_threads, request_queue_size, guide = False, 128, None
    allow_reuse_address, allow_reuse_port = os.name != "nt", False      # Windows would share a port that is taken

    def shutdown_request(self, request):
        """End a connection after what the client still sends, for 0.2 seconds: to close it before that makes Windows
        drop the answer"""
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            request.settimeout(0.2)
            for _ in range(MAX_BODY // 2 ** 16):
                if not request.recv(2 ** 16):
                    break
        super().shutdown_request(request)

    def handle_error(self, request, address):
        """Ignore errors of connections that the browser has closed."""


def main():
    parser = Parser(description=__doc__)
    parser.usage = "%(prog)s [--port N] [--no-browser] [--load FILE ...]"
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port of the server; 0: any free "
                        "one (default: 8000)")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
    parser.add_argument("--load", nargs="+", action="extend", default=[], metavar="PLACE", help="also show networks of "
                        "your own; one of multimnist_capsnet.py replaces the pretrained network")
    args = parser.parse_args()
    if not 0 <= args.port <= 65535:
        raise InputError(f"--port {args.port}: must be between 0 and 65535")
    guide = Guide(args.load)
    for port in range(args.port, min(args.port + 50, 65536)) if args.port else [0]:
        try:
            server = Server(("127.0.0.1", port), Handler)
            break
        except OSError as error:
            why = error.strerror
    else:
        raise InputError(f"--port {args.port}: neither this port nor the next 49 are free ({why}). Give another, 1 to "
                         "65535")
    server.guide, url = guide, f"http://127.0.0.1:{server.server_address[1]}/"
    for number in signal.SIGINT, signal.SIGTERM:       # also where a shell started this with & and ignores SIGINT
        signal.signal(number, signal.default_int_handler)
    with server, contextlib.suppress(KeyboardInterrupt):
        taken = f"port {args.port} is taken: " if port != args.port else ""
        print(f"{taken}{url}  (Ctrl-C stops the server)", flush=True)
        if not args.no_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        server.serve_forever(0.1)
    print("\nstopped")


if __name__ == "__main__":
    run_cli(main)
