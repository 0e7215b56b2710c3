#!/usr/bin/env python3
"""How weak the adversarial step of `--probe` is: the third experiment's shipped networks against stronger and blinder
steps of the same size.

    python3 tests/bench_affnist_adversarial.py [--n-test N] [--draws N] [--digits mnist] [--mnist-dir DIR] [--seed N]
    [--threads N] [--out-json FILE]

A step moves every pixel of a moved test digit by as many grey levels, up or down, and stays within black and white.
Up or down is drawn at random; or it is the sign of the gradient of (best wrong score - true score) at the digit, the
step of --probe (Goodfellow et al. 2015); or the sign that most of --draws copies of the digit have there, each with
noise whose standard deviation is the step: where a network bends within a step, as maxima and ReLUs do on a background
that is all black, the gradient at the digit itself says little of what the step will meet.

--out-json writes a result for results/; its stamp is of 40 training steps of the default network.
"""
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

SHIPPED = {name: f"affnist_{name}.npz" for name in ("shared", "gap")}
STEPS = affnist.SPOILT["adversarial"]


def voted_direction(params, config, part, much, draws, rng, runner):
    """The sign that most of `draws` noisy copies of part's images have, (n, side, side); 0 where as many have each"""
    votes = sum(affnist.adversarial_direction(params, config, part | {
        "images": affnist.spoil(part["images"], "noise", much, rng)}, runner) for _ in range(draws))
    return np.sign(votes)


def directions(params, config, part, draws, rng, runner):
    """Yields name, step, signs (n, side, side) for each way to choose them and each of STEPS"""
    images = part["images"]
    blind, at_the_digit = rng.choice([-1, 1], images.shape), affnist.adversarial_direction(params, config, part, runner)
    for much in STEPS:
        yield "random signs", much, blind
        yield "signs of the gradient at the digit", much, at_the_digit
        yield "signs of most gradients at noisy copies", much, voted_direction(
            params, config, part, much, draws, rng, runner)


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


def main():
    parser = affnist.Parser(__doc__)
    parser.add_argument("--n-test", type=int, default=affnist.N_PROBED, metavar="N", help="test digits (default "
                        f"{affnist.N_PROBED}, as --probe takes)")
    parser.add_argument("--draws", type=int, default=9, metavar="N", help="noisy copies of a digit (default 9)")
    parser.add_argument("--digits", choices=("auto", "mnist", "synthetic"), default="auto", help="as the experiment's")
    parser.add_argument("--mnist-dir", default="", metavar="DIR", help="folder with the four MNIST idx files (else "
                        "$MNIST_DIR, else ~/.cache/hinton-mnist, else download)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of places, signs and noise (default 0)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="default: one per core")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")
    args = parser.parse_args()
    require(args, affnist, n_test=1, draws=1, seed=0, threads=1)
    affnist.check_outputs(args.out_json)
    settings = {name: getattr(args, name) for name in ("n_test", "digits", "mnist_dir", "seed", "threads")}
    digits, found = affnist.load_digits(affnist.Config(**settings)), {}
    print(f"{digits['source']}: {args.n_test:,} moved test digits\n\n| network | step, grey levels: | 0 | "
          + " | ".join(map(str, STEPS)) + " |\n|---|---|---|" + "---|" * len(STEPS))
    with affnist.Runner(args.threads) as runner:
        for name, file in SHIPPED.items():
            network = affnist.load_network(ROOT / "weights" / file)
            config = affnist.changed(network.config, **settings)
            found[name] = accuracies(network.weights, config, digits, args.draws, runner)
            for way, of in found[name].items():
                print(f"| {name} | {way} | " + " | ".join(
                    "{:.4f} [{:.4f}, {:.4f}]".format(of[much][0], *of[much][1]) if much in of else ""
                    for much in map(str, (0, *STEPS))) + " |", flush=True)
    if args.out_json:
        affnist.write_json(args.out_json, stamped(affnist.Config(seed=args.seed, n_test=args.n_test)) | {
            "source": digits["source"], "adversarial": found,
            "networks": {file: hashlib.sha256((ROOT / "weights" / file).read_bytes()).hexdigest()
                         for file in SHIPPED.values()},
            "bench": {"n_test": args.n_test, "draws": args.draws,
                      "sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}})


if __name__ == "__main__":
    affnist.run_cli(main)
