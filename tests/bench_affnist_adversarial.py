#!/usr/bin/env python3
"""How weak the adversarial step of `--probe` is: the third experiment's shipped networks against stronger and blinder
steps.

    python3 tests/bench_affnist_adversarial.py [--n-test N] [--draws N] [--digits mnist] [--mnist-dir DIR] [--seed N]
    [--threads N] [--out-json FILE]

A step moves every pixel of a moved test digit by as many grey levels, up or down, and is then cut at black and white:
of the black background only what goes up is seen, so that signs which lift more of it are the larger step. Signs are

- drawn at random;
- those of the gradient of (best wrong score - true score) at the digit, the step of --probe (Goodfellow et al. 2015);
- those that more of --draws copies of the digit have than the other, each with noise whose standard deviation is the
  step, before it is cut: where a network bends within a step, as maxima and ReLUs do on a background that is all black,
  the gradient at the digit itself says little of what the step will meet;
- either of the last two, shuffled: as many up and down of each digit's ink and of its background, but anywhere there.

--out-json writes a result for results/; its stamp is of 40 training steps of the default network, and renewed only
where as many of the first digits are named right as before.
"""
import functools
import hashlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import affnist_capsnet as affnist  # noqa: E402  (before numpy: it sets BLAS to one thread)

import numpy as np  # noqa: E402
from bench_affnist_step import stamped  # noqa: E402
from bench_multimnist_step import require  # noqa: E402

SHIPPED = {"shared": "affnist_shared.npz", "gap --padding 8": "affnist_gap.npz"}
STEPS = affnist.SPOILT["adversarial"]
N_FIRST = 64


def shuffled(signs, images, rng):
    """As many pixels up and down in each digit, of its ink and of its background, but which ones at random"""
    out = signs.copy()
    for image, new in zip(images, out):
        for here in image > 0, image == 0:
            new[here] = rng.permutation(new[here])
    return out


def voted_direction(params, config, part, much, draws, rng, runner):
    """The sign that more of `draws` noisy copies of part's images have, (n, side, side); 0 where as many have each"""
    votes = sum(affnist.adversarial_direction(params, config, part | {
        "images": affnist.spoil(part["images"], "noise", much, rng)}, runner) for _ in range(draws))
    return np.sign(votes)


def directions(params, config, part, draws, rng, runner):
    """Yields name, step, signs (n, side, side) for each way to choose them and each of STEPS"""
    images = part["images"]
    blind, at_the_digit = rng.choice([-1, 1], images.shape), affnist.adversarial_direction(params, config, part, runner)
    mixed = shuffled(at_the_digit, images, rng)
    for much in STEPS:
        voted = voted_direction(params, config, part, much, draws, rng, runner)
        yield "random signs", much, blind
        yield "gradient at the digit", much, at_the_digit
        yield "gradient at the digit, shuffled", much, mixed
        yield "vote of noisy gradients", much, voted
        yield "vote of noisy gradients, shuffled", much, shuffled(voted, images, rng)


def accuracies(params, config, digits, draws, runner):
    """-> {way: {step: [accuracy, its Wilson interval]}}; the way "no step" has the step 0 alone"""
    hits, n, rng = {}, 0, np.random.default_rng(config.seed)

    def count(way, much, part):
        right = affnist.evaluate(params, [part], config, runner)["hits"]
        hits.setdefault(way, {}).setdefault(much, 0)
        hits[way][much] += right
    for part in affnist.stream_digits(digits, config, "test"):
        n += len(part["labels"])
        count("no step", 0, part)
        for way, much, signs in directions(params, config, part, draws, rng, runner):
            count(way, much, part | {"images": np.clip(part["images"] + much * signs, 0, 255).astype(np.uint8)})
    return {way: {str(much): [right / n, affnist.wilson_interval(right, n)] for much, right in of.items()}
            for way, of in hits.items()}


def shipped(settings):
    """Yields of each network in weights/ its name, its weights and its Config with these settings, fields of Config"""
    for name, file in SHIPPED.items():
        network = affnist.load_network(ROOT / "weights" / file)
        yield name, network.weights, affnist.changed(network.config, **settings)


def measured(digits, settings, draws, say=lambda text: None):
    """-> {network: its accuracies}"""
    found = {}
    with affnist.Runner(settings["threads"]) as runner:
        for name, weights, config in shipped(settings):
            found[name] = accuracies(weights, config, digits, draws, runner)
            for way, of in found[name].items():
                say(f"| {name} | {way} | " + " | ".join(
                    "{:.4f} [{:.4f}, {:.4f}]".format(of[much][0], *of[much][1]) if much in of else ""
                    for much in map(str, (0, *STEPS))) + " |")
    return found


def first_digits(digits, seed):
    """How many of the first are named right, {network: {way: {step: digits}}}: in seconds, to renew a stamp by"""
    found = measured(digits, {"n_test": N_FIRST, "seed": seed, "threads": 1}, 1)
    return {name: {way: {much: round(N_FIRST * share) for much, (share, _) in of.items()} for way, of in ways.items()}
            for name, ways in found.items()}


def arguments(text, **more):
    """The command line of what is measured of the shipped networks -> flags, settings, digits. more: the defaults and
    help texts of further flags, numbers of at least 1"""
    parser = affnist.Parser(text)
    parser.add_argument("--n-test", type=int, default=affnist.N_PROBED, metavar="N", help="test digits (default "
                        f"{affnist.N_PROBED}, as --probe takes)")
    for name, (default, words) in more.items():
        parser.add_argument(affnist.flag_of(name), type=int, default=default, metavar="N", help=words)
    parser.add_argument("--digits", choices=("auto", "mnist", "synthetic"), default="auto", help="as the experiment's")
    parser.add_argument("--mnist-dir", default="", metavar="DIR", help="folder with the four MNIST idx files (else "
                        "$MNIST_DIR, else ~/.cache/hinton-mnist, else download)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of what is drawn (default 0)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="default: one per core")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")
    args = parser.parse_args()
    require(args, affnist, n_test=1, seed=0, threads=1, **dict.fromkeys(more, 1))
    affnist.check_outputs(args.out_json)
    settings = {name: getattr(args, name) for name in ("n_test", "seed", "threads")}
    return args, settings, affnist.load_digits(
        affnist.Config(**settings, digits=args.digits, mnist_dir=args.mnist_dir))


def write(path, settings, digits, sources, bench, **found):
    """A result of the shipped networks, measured by the files `sources`"""
    affnist.write_json(path, stamped(affnist.Config(seed=settings["seed"])) | {
        "source": digits["source"], **found,
        "networks": {file: hashlib.sha256((ROOT / "weights" / file).read_bytes()).hexdigest()
                     for file in SHIPPED.values()},
        "bench": bench | {"n_test": settings["n_test"], "sha256": hashlib.sha256(
            b"".join(Path(source).read_bytes() for source in sources)).hexdigest()}})


def main():
    args, settings, digits = arguments(__doc__, draws=(9, "noisy copies of a digit (default 9)"))
    print("| network | signs; step, grey levels: | 0 | " + " | ".join(map(str, STEPS)) + " |\n|---|---|---|"
          + "---|" * len(STEPS), flush=True)
    found = measured(digits, settings, args.draws, functools.partial(print, flush=True))
    print(f"{args.n_test:,} moved test digits: {digits['source']}")
    if args.out_json:
        write(args.out_json, settings, digits, [__file__], {"draws": args.draws}, adversarial=found,
              first=first_digits(digits, args.seed))


if __name__ == "__main__":
    affnist.run_cli(main)
