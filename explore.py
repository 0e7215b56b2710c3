#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Serves a page to play with the trained networks: draw two digits over each other, move one about, turn a toy.

It listens on this machine alone, needs no network, and asks the networks in weights/; the page is in explore/. Every
answer is an experiment's own forward of the picture that the page shows.

    python3 explore.py
"""
import base64
import contextlib
import dataclasses
import http.server
import itertools
import json
import re
import threading
import webbrowser
from pathlib import Path
from types import SimpleNamespace

import affnist_capsnet as affnist  # before numpy: they set the number of BLAS threads
import multimnist_capsnet as multi
import smallnorb_novel_viewpoint as norb
from multimnist_capsnet import CANVAS, N_CLASSES, InputError

import numpy as np

import visualize_multimnist_capsnet as pictures

ROOT = Path(__file__).parent
NETWORKS = {                       # of each experiment: file in weights/ -> its name on the page, what it is
    multi: {"multimnist_capsnet": ("capsules", "ten small convolutions, then ten capsules that route")},
    affnist: {"affnist_capsnet-shared": ("capsules", "six small convolutions; every place has the same matrices"),
              "affnist_cnn-gap": ("CNN that averages", "five of the same convolutions, then a mean over all places"),
              "affnist_small_capsnet": ("small capsules", "the paper's kind: every place has matrices of its own"),
              "affnist_small_cnn": ("small CNN", "the paper's kind: three convolutions, two hidden layers"),
              "affnist_small_cnn-dense": ("small CNN that pools", "five convolutions with maxima, a hidden layer")},
    norb: {"smallnorb_capsnet-shared": ("vector capsules", "five convolutions, then class capsules that route"),
           "smallnorb_cnn-gap": ("CNN that averages", "five convolutions, then a mean over all places"),
           "smallnorb_matrix-capsnet": ("matrix capsules", "the paper's kind: pose matrices and EM routing")}}
PAGE = {"/": ("index.html", "text/html"), "/explore.js": ("explore.js", "text/javascript"),
        "/explore.css": ("explore.css", "text/css")}           # and /ask: all the paths that there are
MAX_BODY, N_DIGITS = 1_000_000, 200                            # bytes of an ask; test digits to pick from
SIDE = affnist.SIDES["affnist"]    # of the second tab's canvas, px
SMALL, LARGE = pictures.LEAST_SIDE, pictures.WORK_SIDE         # sides of a picture of one's own, px
FAR, STEP, AT_ONCE = 12, 2, 12     # of a map: px from the middle, px between places, places named at once
AZIMUTHS = range(0, 360, 10)       # of a ring
HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Content-Security-Policy": "default-src "
           "'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
           "form-action 'none'; frame-ancestors 'none'"}
STALE = {"stale": True}            # in place of an answer: a newer ask of the same kind has come
FIELDS = {                         # of asks: a number's bounds, and how many of it; of base64, str, those of its bytes
    "image": (str, CANVAS ** 2, CANVAS ** 2), "routed": (int, 0, 1),
    "a": (int, 0, N_CLASSES - 1), "b": (int, 0, N_CLASSES - 1), "v": (float, -10, 10, 2 * multi.D),
    "width": (int, SMALL, LARGE), "gray": (str, SMALL ** 2, LARGE ** 2), "digit": (int, 0, N_DIGITS - 1),
    "turn": (float, -180, 180), "shear": (float, -1, 1), "down": (float, 0.3, 2), "across": (float, 0.3, 2),
    "y": (float, -SIDE, SIDE), "x": (float, -SIDE, SIDE), "network": (int, 0, 99), "azimuth": (float, -360, 360),
    "elevation": (float, 0, 90), "light": (int, 0, 5), "category": (int, 0, norb.N_CLASSES - 1), "toy": (int, 0, 4)}
PLACE, TOY = ("digit", "turn", "shear", "down", "across"), ("category", "toy", "elevation", "light")
ASKS = {"start": (), "pair": ("image", "routed"), "redraw": ("a", "b", "v"),                           # Guide's methods
        "picture": ("width", "gray"), "digit": (*PLACE, "y", "x"), "map": (*PLACE, "network"),
        "toy": (*TOY, "azimuth"), "ring": TOY}


def checked(name, x):
    """A field's value as it is used. Raises InputError if it is not what FIELDS says"""
    kind, low, high, *length = FIELDS[name]
    if kind is str:
        good = type(x) is str and len(x) % 4 == 0 and re.fullmatch("[A-Za-z0-9+/]*={0,2}", x)
        x = np.frombuffer(base64.b64decode(x), np.uint8) if good else x
        good = good and low <= x.size <= high
    else:
        numbers, n = (x, *length) if length and type(x) is list else ([x], 1 - len(length))
        good = len(numbers) == n and all(type(k) in (int, kind) and low <= k <= high for k in numbers)
    if not good:
        raise InputError(f"{name}: must be {kind.__name__}, {low} to {high}" + f", {length} times" * len(length))
    return x


def coded(image):
    """Pixels in [0, 1], or bytes -> base64"""
    image = image if image.dtype == np.uint8 else np.rint(255 * image).astype(np.uint8)
    return base64.b64encode(image.tobytes()).decode()


class Guide:
    """Answers asks by the experiments' own functions"""

    def __init__(self, own=()):
        self.networks = {module: [(*words, module.load_network(ROOT / "weights" / f"{name}.npz"))
                                  for name, words in files.items()] for module, files in NETWORKS.items()}
        for path in own:
            module, found = self.load_for_evaluation(path)
            kept = self.networks[module] if module is not multi else []
            self.networks[module] = [*kept, (Path(path).stem, f"yours: {found.config.model}", found)]
        ((*_, self.pairs), *_), self.moved, self.toys = self.networks.values()
        try:                                                   # MNIST if it is here, never a download
            self.source, here = "MNIST", SimpleNamespace(**vars(multi.MNIST) | {"mirrors": ()})
            self.images, self.labels = (a[:N_DIGITS] for a in multi.load_idx(here, "", 1, print)["test"])
        except multi.DataNotFound:
            self.source, (self.images, self.labels, _) = "synthetic", multi.synthesize_digits(N_DIGITS, 0)
        self.door, self.desks = threading.Lock(), {k: SimpleNamespace(lock=threading.Lock(), newest=0) for k in ASKS}

    def load_for_evaluation(self, path):
        """-> the experiment of a network's file, and the network"""
        fits = (lambda c: c.model == "capsnet"), (lambda c: c.task != "mnist"), (lambda c: c.data != "shapes")
        for module, fit in zip(NETWORKS, fits):
            with contextlib.suppress(module.InputError):
                if fit((found := module.load_network(path)).config):
                    return module, found
        raise InputError(f"--load {path}: no trained network of pairs with capsules, of 40x40 px digits, or of toys; "
                         "or no file at all")

    def answer(self, ask):
        """A dict that the page sent -> the dict to send back. Of asks of one kind one is worked on at a time, and of
        those that wait only the newest, the others are stale. Raises InputError for a wrong one."""
        if type(ask) is not dict or type(what := ask.pop("ask", None)) is not str or what not in ASKS:
            raise InputError(f"ask: must be one of {', '.join(ASKS)}")
        if ask.keys() != set(ASKS[what]):
            raise InputError(f"{what}: must have the fields {', '.join(ASKS[what]) or 'ask alone'}")
        ask, desk = {name: checked(name, x) for name, x in ask.items()}, self.desks[what]
        with self.door:
            desk.newest = ticket = desk.newest + 1
        late = {"is_late": lambda: desk.newest != ticket} if what in ("map", "ring") else {}
        with desk.lock:
            return getattr(self, what)(**ask, **late) if desk.newest == ticket else STALE

    def start(self):
        names = [[[name, words, found.config.model in getattr(module, "CAPSULES", "capsnet")]
                  for name, words, found in networks] for module, networks in self.networks.items()]
        return {"source": self.source, "digits": coded(self.images), "labels": self.labels.tolist(), "networks": names,
                "least": [pictures.LEAST_LENGTH, pictures.LEAST_LEAD], "far": [FAR, STEP],
                "ranges": affnist.RANGES, "moved": affnist.max_shift(affnist.Config()), "azimuths": list(AZIMUTHS),
                "trained": norb.angle_ranges(norb.Config())[0], "large": LARGE}

    def pair(self, image, routed):
        config = self.pairs.config if routed else dataclasses.replace(self.pairs.config, routing_iters=1)
        image = image.reshape(1, CANVAS, CANVAS).astype(np.float32) / 255
        out, _ = multi.forward(self.pairs.weights, image, config)
        named, grid = out["digits"][0], multi.infer_shapes(multi.backbone(config), CANVAS, 1, rows=True).side
        weight = np.linalg.norm(out["u"][0], axis=-1).reshape(grid * grid, -1)          # of a place's primary capsules
        c = np.stack([np.broadcast_to(step, (1, N_CLASSES, weight.size))[0, named] for step in out["c"]])
        return {"lengths": out["lengths"][0].tolist(), "digits": named.tolist(), "v": out["v"][0, named].tolist(),
                "redrawn": [coded(digit) for digit in out["recon"][0]], "grid": grid, "shares": np.average(
                    c.reshape(-1, 2, *weight.shape), -1, np.broadcast_to(weight, (len(c), 2, *weight.shape))).tolist()}

    def redraw(self, a, b, v):
        """Two digits redrawn, each from a capsule's numbers, of which v holds both"""
        capsules = np.zeros((2, N_CLASSES, multi.D), np.float32)
        capsules[[0, 1], [a, b]] = np.reshape(v, (2, -1))
        masked, _ = multi.mask_forward(capsules, np.array([[a], [b]]))
        redrawn, _ = multi.layers_forward(self.pairs.weights, masked, multi.decoder(self.pairs.config))
        return {"redrawn": [coded(digit) for digit in redrawn]}

    def picture(self, width, gray):
        """A picture's gray levels, row by row -> the canvas that visualize_multimnist_capsnet.py --image makes of it"""
        if gray.size % width or not SMALL <= gray.size // width <= LARGE:
            raise InputError(f"gray: must be {SMALL} to {LARGE} rows of {width} bytes")
        return {"image": coded(pictures.to_canvas(pictures.find_ink(gray.reshape(-1, width) / 255, "PICTURE")))}

    def placed(self, digit, places, **factors):
        """A test digit, transformed, its middle at each of these places, (n, 2) px from the canvas' middle"""
        back = np.linalg.inv(affnist.affine_matrix(**factors)).repeat(len(places), 0)
        images = self.images[[digit]].repeat(len(places), 0)
        return affnist.resample_affine(images, back, np.asarray(places, float) + (SIDE - 1) / 2, SIDE)

    def digit(self, y, x, **which):
        image, answers = self.placed(places=[(y, x)], **which), []
        for *_, found in self.moved:
            out, _ = affnist.forward(found.weights, image.astype(np.float32) / 255, found.config)
            redrawn = {"redrawn": coded(out["recon"])} if "recon" in out else {}
            answers.append({"scores": out["scores"][0].tolist(), **redrawn})
        return {"image": coded(image), "answers": answers}

    def map(self, network, is_late, **which):
        """What a network names a digit at each place, row by row; whole: none of its ink is cut off there"""
        if network >= len(self.moved):
            raise InputError(f"network: must be below {len(self.moved)}")
        *_, found = self.moved[network]
        along, named, config = range(-FAR, FAR + 1, STEP), [], dataclasses.replace(found.config, recon_weight=0.0)
        images = self.placed(places=list(itertools.product(along, along)), **which)
        for start in range(0, len(images), AT_ONCE):
            if is_late():
                return STALE
            part = images[start:start + AT_ONCE].astype(np.float32) / 255
            named += affnist.forward(found.weights, part, config)[0]["scores"].argmax(1).tolist()
        ink = images.sum((1, 2))
        return {"named": named, "whole": (ink >= 0.98 * ink.max()).tolist()}

    def view(self, category, toy, azimuth, elevation, light):
        """A toy that training never showed -> its picture, and what networks get of it"""
        toy = norb.make_toy(category, norb.TOY_SPLITS["test"][toy], norb.Config().toy_seed)
        views = norb.draw_view(toy, elevation, azimuth, 2 * norb.NORB_SIDE)
        return views[light, 0], norb.crop_batch(norb.downsample(views)[[light]], [0])

    def toy(self, **which):
        picture, seen = self.view(**which)
        outs = [norb.forward(found.weights, seen, found.config)[0] for *_, found in self.toys]
        return {"image": coded(picture), "answers": [out["scores"][0].tolist() for out in outs]}

    def ring(self, is_late, **which):
        """What each network names a toy from each of AZIMUTHS"""
        seen = []
        for azimuth in AZIMUTHS:
            if is_late():
                return STALE
            seen.append(self.view(azimuth=azimuth, **which)[1])
        outs = [norb.forward(found.weights, np.concatenate(seen), found.config)[0] for *_, found in self.toys]
        return {"named": [out["scores"].argmax(1).tolist() for out in outs]}


# ---------------------------------------------------------------- the server

class Handler(http.server.BaseHTTPRequestHandler):
    timeout, error_message_format, error_content_type = 2, "%(message)s\n", "text/plain"      # s, for more of a request

    def do_GET(self):
        hosts = [f"{name}:{self.server.server_address[1]}" for name in ("127.0.0.1", "localhost")]
        host, origin = self.headers.get("Host"), self.headers.get("Origin", "http://" + hosts[0])
        if host not in hosts or origin.removeprefix("http://") not in hosts:
            self.send_error(403, "this page is for this machine alone")
        elif self.command == "GET" and self.path in PAGE:
            name, kind = PAGE[self.path]
            self.send((ROOT / "explore" / name).read_text(encoding="utf-8"), kind)
        elif self.command == "POST" and self.path == "/ask":
            try:
                self.send(json.dumps(self.server.guide.answer(self.asked()), separators=(",", ":")), "application/json")
            except InputError as error:
                self.send_error(400, str(error).replace("--image PICTURE: ", "the picture "))
            except (ValueError, RecursionError, TimeoutError):
                self.send_error(400, "the body is no JSON, or did not come")
        else:
            self.send_error(404, "no such page")

    do_POST = do_GET

    def asked(self):
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,7}", length) or int(length) > MAX_BODY:
            raise InputError(f"Content-Length: must be at most {MAX_BODY}")
        return json.loads(self.rfile.read(int(length)))

    def send(self, text, kind):
        body = text.encode()
        self.send_response(200)
        for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": len(body)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    """A thread for each request; server_close waits for them all"""
    daemon_threads, request_queue_size, guide = False, 128, None

    def handle_error(self, request, address):
        """A browser that has gone takes its connection along"""


def main():
    parser = multi.Parser(description=__doc__)
    parser.usage = "%(prog)s [--port N] [--no-browser] [--load FILE ...]"
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="where to listen (default 8000)")
    parser.add_argument("--no-browser", action="store_true", help="open no browser")
    parser.add_argument("--load", nargs="+", default=[], metavar="FILE", help="networks of your own: of pairs in place "
                        "of the one that comes along, of moved digits and of toys beside those")
    args = parser.parse_args()
    guide = Guide(args.load)
    for port in range(max(args.port, 1), min(args.port + 50, 65536)):
        with contextlib.suppress(OSError):
            server = Server(("127.0.0.1", port), Handler)
            break
    else:
        raise InputError(f"--port {args.port}: cannot be had, nor the next ones; give another, 1 to 65535")
    server.guide, url = guide, f"http://127.0.0.1:{port}/"
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"port {args.port} is taken: " * (port != args.port) + f"{url}  (Ctrl-C stops it)", flush=True)
        if not args.no_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        server.serve_forever(0.1)
    print("\nstopped")


if __name__ == "__main__":
    norb.run_cli(lambda: affnist.run_cli(lambda: multi.run_cli(main)))         # each has an InputError of its own
