#!/usr/bin/env python3
"""Attack trained networks of affnist_capsnet.py or smallnorb_novel_viewpoint.py: FGSM, BIM and
PGD, white box and black box.

    python3 bench/attacks.py --load weights/smallnorb_matrix-capsnet.npz weights/smallnorb_cnn.npz

FGSM (Goodfellow et al. 2015) moves every pixel by epsilon along the sign of the gradient; BIM
(Kurakin et al. 2016) does so in ten steps of a tenth, with a new gradient before each. PGD (Madry
et al. 2018, here without a random start) takes ten steps of a quarter, each cut off at epsilon, so
that a pixel can come back from a wrong first step. Pixels have the range 0 to 1 and stay in it. The
gradient is that of the best wrong score minus the true class's score, which are lengths of capsules
or logits, with respect to the pixels; of toys it goes through the standardization of the image.

In the white box a network is attacked by its own gradient, in the black box by that of each
network of --sources, which has other initial weights. "noise" are random signs: what changes of
this size do without a gradient.

An attack may use less than it is allowed: an image counts as correct at an epsilon if it is at all
smaller ones, too. The robustness is the mean accuracy over all epsilons but 0, which are about
evenly spaced on a logarithmic scale, divided by the accuracy without attack: 1 for a network that
no attack disturbs, 0 for one that the smallest epsilon stops. A pixel whose gradient is exactly 0
is not moved: the share of these is printed for each network.

Attacked are translated test digits or views of new toys from familiar azimuths.
"""

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import lab  # before numpy: it sets BLAS to one thread
from lab import networks
from lab.files import check_writable, write_json
from lab.messages import InputError, Parser, Progress, run_cli

import numpy as np

# at most nine, so that the number that an image withstands is one digit in the results
EPSILONS = 0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4
N_STEPS = 10  # of BIM and PGD
DIGITS, TOYS = "affnist_capsnet", "smallnorb_novel_viewpoint"
RANDOM_KEY = 10  # of the generator of random signs


class Network(NamedTuple):
    """A trained network and the experiment that it is of."""

    module: object
    config: object
    weights: dict

    @property
    def name(self):
        """The model"""
        return self.config.model


# -------------------------------------------------------------- the gradient with respect to pixels


def inputs_forward(network, pixels):
    """Return what forward takes, and a cache. pixels: in [0, 1], digits (N, 40, 40), toys (N,
    48, 48, 2)."""
    if network.module.EXPERIMENT == DIGITS:
        return pixels, None
    norb = network.module
    standardized = norb.standardize(255 * pixels, dtype=pixels.dtype)
    begin = (norb.NORB_SIDE - norb.SIDE + 1) // 2  # as crop_batch does
    crop = slice(begin, begin + norb.SIDE)
    return standardized[:, crop, crop].copy(), (pixels, standardized, crop)


def inputs_backward(dinputs, cache):
    """Return the gradient with respect to the pixels. With z = (x - mean) / std:
      dx = (dz - mean(dz) - z mean(z dz)) / std
    without the last term where std counts as one gray level, as in standardize."""
    if cache is None:
        return dinputs
    pixels, z, crop = cache
    dz = np.zeros_like(z)
    dz[:, crop, crop] = dinputs
    axes = 1, 2, 3
    std = pixels.std(axes, keepdims=True)
    one_gray_level = 1 / 255
    along = np.where(std > one_gray_level, (z * dz).mean(axes, keepdims=True), 0)
    return (dz - dz.mean(axes, keepdims=True) - z * along) / np.maximum(std, one_gray_level)


def convolutions_backward(network, dx, caches):
    """Return the gradient with respect to the images of the network's input from that of the
    convolutions' output, dx (N, side, side, C).

    Normalizations use running statistics, which do not depend on the image: unlike in training,
    each is a factor per channel. caches: of convolutions_forward."""
    module = network.module
    dx = dx.swapaxes(0, 1)  # (H, N, W, C)
    for conv, conv_cache, norm_cache, pool_cache, y in reversed(caches):
        if conv.name != "primary":
            dx = dx * (y > 0)
        if conv.pool:
            dx = module.max_pool_backward(dx, pool_cache)
        if norm_cache is not None:
            _, gamma, _, inv_std = norm_cache
            dx = dx * (gamma * inv_std)
        dx, _ = module.conv2d_backward(dx, conv_cache)
        if module.EXPERIMENT == TOYS:
            if conv.pad:
                dx = dx[conv.pad : -conv.pad, :, conv.pad : -conv.pad]
            if conv.coordinates:
                dx = dx[..., :-2]
    if module.EXPERIMENT == TOYS:
        return dx.swapaxes(0, 1)
    return rows_backward(dx, network.config.padding)


def rows_backward(dx, padding):
    """Return the gradient with respect to digits, (N, H, W), from that of
    affnist_capsnet.padded_input's output, dx (rows, N, W, K): the K rows under a kernel are its
    channels."""
    n_rows, N, W, K = dx.shape
    dpadded = np.zeros((N, n_rows + K - 1, W), dx.dtype)
    for k in range(K):
        dpadded[:, k : k + n_rows] += dx[..., k].swapaxes(0, 1)
    inside = slice(padding, W - padding)
    return dpadded[:, inside, inside]


def head_backward(network, dscores, cache):
    """Return the gradient of the convolutions' output, (N, side, side, C). cache: of forward"""
    _, backward = network.module.HEADS[network.name]
    if network.module.EXPERIMENT == DIGITS:
        _, head_cache, _ = cache
        return backward(dscores, 0, head_cache, network.config, {})
    _, head_cache = cache
    return backward(dscores, head_cache, network.config, {})


def scores_of(network, pixels):
    """Return the scores by which a network predicts classes, (N, J), and a cache."""
    inputs, inputs_cache = inputs_forward(network, pixels)
    out, cache = network.module.forward(network.weights, inputs, network.config)
    return out["scores"], (inputs_cache, cache)


def gap(scores, labels):
    """Return the best wrong score minus the true class's, (N,), and its gradient with respect to
    the scores, (N, J)."""
    rows = np.arange(len(labels))
    wrong = scores.copy()
    wrong[rows, labels] = -np.inf
    best = wrong.argmax(1)
    dscores = np.zeros_like(scores)
    dscores[rows, best] = 1
    dscores[rows, labels] = -1
    return scores[rows, best] - scores[rows, labels], dscores


def gradient(network, pixels, labels):
    """Return the gradient of `gap` with respect to the pixels, with their shape. It is what an
    attack follows."""
    scores, (inputs_cache, cache) = scores_of(network, pixels)
    _, dscores = gap(scores, labels)
    dx = head_backward(network, dscores, cache)
    return inputs_backward(convolutions_backward(network, dx, cache[0]), inputs_cache)


# -------------------------------------------------------------- attacks
# ascent(pixels, labels) returns the gradient that an attack follows.


def step(pixels, signs, epsilon):
    """Return the pixels moved by epsilon along some signs, within 0 to 1."""
    return np.clip(pixels + pixels.dtype.type(epsilon) * signs, 0, 1)


def fgsm(ascent, pixels, labels, epsilon):
    """Return the images after one step of epsilon along the sign of the gradient."""
    return step(pixels, np.sign(ascent(pixels, labels)), epsilon)


def bim(ascent, pixels, labels, epsilon, n_steps=N_STEPS):
    """Return the images after n_steps steps of epsilon / n_steps, each along the sign of the
    gradient where it starts."""
    moved = pixels
    for _ in range(n_steps):
        moved = step(moved, np.sign(ascent(moved, labels)), epsilon / n_steps)
    return moved


def pgd(ascent, pixels, labels, epsilon, n_steps=N_STEPS):
    """Return the images after n_steps steps of a quarter of epsilon, each along the sign of the
    gradient where it starts, and cut off where a pixel has moved by more than epsilon."""
    lowest, highest = step(pixels, -1, epsilon), step(pixels, 1, epsilon)
    moved = pixels
    for _ in range(n_steps):
        moved = step(moved, np.sign(ascent(moved, labels)), epsilon / 4)
        moved = np.clip(moved, lowest, highest)
    return moved


ATTACKS = {"fgsm": fgsm, "bim": bim, "pgd": pgd}


def ascent_of(network):
    """Return the gradient that an attack on a network follows, as a function"""

    def ascent(pixels, labels):
        return gradient(network, pixels, labels)

    return ascent


def is_right(network, pixels, labels):
    """Return which images a network classifies correctly, (n,) bool."""
    scores, _ = scores_of(network, pixels)
    return scores.argmax(1) == labels


def withstood(network, attack, pixels, labels):
    """Return how many of EPSILONS, from 0 on, each image withstands when a network is attacked by
    its own gradient, (n,): it is classified correctly with these."""
    counts = np.zeros(len(labels), int)
    left = np.arange(len(labels))  # rows of the images that have withstood so far
    for epsilon in EPSILONS:
        moved = pixels[left]
        if epsilon:
            moved = attack(ascent_of(network), moved, labels[left], epsilon)
        left = left[is_right(network, moved, labels[left])]
        counts[left] += 1
        if len(left) == 0:
            break
    return counts


def withstood_given(network, by_epsilon, labels):
    """Return the same for given images, a list of (n, ...) for each of EPSILONS."""
    right = [is_right(network, pixels, labels) for pixels in by_epsilon]
    return np.cumprod(right, axis=0).sum(0)


def images_against(network, pixels, labels):
    """Return {attack: [images for each of EPSILONS]}, made by the gradient of a network."""
    return {
        name: [
            attack(ascent_of(network), pixels, labels, epsilon) if epsilon else pixels
            for epsilon in EPSILONS
        ]
        for name, attack in ATTACKS.items()
    }


def noisy_images(pixels, rng):
    """Return [images for each of EPSILONS], in which every pixel moves by epsilon, up or down at
    random."""
    signs = rng.choice(np.array([-1, 1], pixels.dtype), pixels.shape)
    return [step(pixels, signs, epsilon) for epsilon in EPSILONS]


def compare(attacked, sources, pixels, labels, rng):
    """Return {network: {attack: how many of EPSILONS each image withstands, (n,)}}.

    Attacks are "noise", those of ATTACKS and, made against a source, "ATTACK from SOURCE".
    attacked, sources: lists of Network."""
    given = {"noise": noisy_images(pixels, rng)}
    for source in sources:
        for name, made in images_against(source, pixels, labels).items():
            given[f"{name} from {source.name}"] = made
    found = {}
    for network in attacked:
        own = {
            name: withstood(network, attack, pixels, labels) for name, attack in ATTACKS.items()
        }
        others = {
            name: withstood_given(network, by_epsilon, labels)
            for name, by_epsilon in given.items()
        }
        found[network.name] = own | others
    return found


def zero_share(network, pixels, labels):
    """Return the share of pixels whose gradient is exactly 0, which no attack moves at first."""
    return float((gradient(network, pixels, labels) == 0).mean())


def measure(attacked, sources, samples, rng, workers):
    """Return what compare finds of all samples, and {network: zero_share}. samples: a dict of
    pixels (n, ...) and labels (n,)."""
    shards = attacked[0].module.batches(samples, attacked[0].module.SHARD)
    generators = rng.spawn(len(shards))  # one for each, whatever the number of threads

    def of_shard(job):
        rows, generator = job
        pixels, labels = samples["pixels"][rows], samples["labels"][rows]
        zeros = {network.name: zero_share(network, pixels, labels) for network in attacked}
        return compare(attacked, sources, pixels, labels, generator), zeros

    counts, zeros = zip(*workers.map(of_shard, zip(shards, generators)))
    joined = {
        name: {
            attack: np.concatenate([part[name][attack] for part in counts])
            for attack in counts[0][name]
        }
        for name in counts[0]
    }
    sizes = [len(rows) for rows in shards]
    shares = {
        name: float(np.average([part[name] for part in zeros], weights=sizes)) for name in joined
    }
    return joined, shares


def curve(counts):
    """Return the accuracy at each of EPSILONS. counts: how many of them each image withstands."""
    return [float((counts > k).mean()) for k in range(len(EPSILONS))]


def robustness(accuracies):
    """Return the mean accuracy over all epsilons but 0, divided by that without attack; nan if that
    is 0."""
    if accuracies[0] == 0:
        return float("nan")
    return float(np.mean(accuracies[1:]) / accuracies[0])


# -------------------------------------------------------------- networks, images, command line


def load_networks(paths, args):
    """Return the Networks of some files or folders of runs, the Config to test the first one
    with, and what lab.networks loaded of each. All must be of one experiment and of different
    models."""
    experiments = {str(path): lab.experiment_of(path) for path in paths}
    for path, experiment in experiments.items():
        if experiment not in (DIGITS, TOYS):
            raise InputError(f"{path}: is not a network of {DIGITS}.py or {TOYS}.py. Give one")
    if len(set(experiments.values())) > 1:
        raise InputError("--load: the networks are of two experiments. Give networks of one")
    module = importlib.import_module(next(iter(experiments.values())))
    for name in "digits", "data_dir", "norb_dir":
        if hasattr(args, name) and name not in {f.name for f in module.SETTINGS}:
            flag = "--" + name.replace("_", "-")
            raise InputError(
                f"{flag}: has no effect on networks of {module.EXPERIMENT}.py. Leave it out"
            )
    found = [networks.load_for_evaluation(module, path, args) for path in paths]
    return [Network(module, config, loaded.weights) for loaded, config in found], [
        loaded for loaded, _ in found
    ]


def check_networks(attacked, sources):
    """Raise InputError unless the networks can be attacked with the same images, and are told
    apart by their names."""
    for flag, group in (("--load", attacked), ("--sources", sources)):
        names = [network.name for network in group]
        if len(set(names)) < len(names):
            twice = max(names, key=names.count)
            raise InputError(f"{flag}: gives two networks of --model {twice}. Give one of each")
    task, *others = [images_of(network.config) for network in (*attacked, *sources)]
    if any(other != task for other in others):
        raise InputError(
            "--load, --sources: the networks see different images. Give networks of the same images"
        )
    config = attacked[0].config
    if attacked[0].module.EXPERIMENT == DIGITS and config.task != "affnist":
        raise InputError(
            f"--load: the networks are of --task {config.task}. Give networks of --task affnist"
        )
    if attacked[0].module.EXPERIMENT == TOYS and config.data == "shapes":
        raise InputError(
            "--load: the networks are of --data shapes. Give networks of toys or smallNORB"
        )


def images_of(config):
    """Return what the images that a network sees follow from"""
    names = "task", "train_shift", "data", "split", "toy_seed", "train_azimuths", "n_classes"
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def samples_of(network, n):
    """Return n test images, a dict of pixels in [0, 1] and labels (n,), and the source of the
    data: the first test digits, translated, or views of new toys from familiar azimuths, at
    regular intervals of all there are, so that no toy and hardly any lighting is preferred."""
    module, config = network.module, network.config
    if module.EXPERIMENT == DIGITS:
        data = module.load_data(config)
        chunk = next(module.stream_digits(data, config, "test"))
        images, labels = chunk["images"][:n], chunk["labels"][:n]
    else:
        data = module.select_images(dataclasses.replace(config, n_test=0))
        n_found = len(data["familiar"]["labels"])
        rows = np.arange(min(n, n_found)) * n_found // min(n, n_found)
        found = {name: column[rows] for name, column in data["familiar"].items()}
        if data["source"] == "toys":
            module.add_toy_images([found], config)
        images, labels = found["images"], found["labels"]
    return {"pixels": images / np.float32(255), "labels": labels}, data["source"]


def read_command_line():
    """Return the command line's values; those that are not given and belong to an experiment
    leave no attribute"""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--load",
        nargs="+",
        required=True,
        metavar="PLACE",
        help="networks that are attacked, of different models: weights files or folders of runs",
    )
    parser.add_argument(
        "--sources",
        nargs="*",
        default=[],
        metavar="PLACE",
        help="networks against which images of the black box are made",
    )
    parser.add_argument(
        "--n-images", type=int, default=500, metavar="N", help="images (default: 500)"
    )
    parser.add_argument(
        "--out-json", metavar="FILE", help="write settings and results to this file; -: print"
    )
    parser.add_argument(
        "--digits", choices=("auto", "mnist", "synthetic"), help="as affnist_capsnet.py's"
    )
    parser.add_argument("--data-dir", "--mnist-dir", metavar="DIR", help="as affnist_capsnet.py's")
    parser.add_argument("--norb-dir", metavar="DIR", help="as smallnorb_novel_viewpoint.py's")
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="0: one per core (default: 0)"
    )
    parser.add_argument("--quiet", action="store_true", help="print only errors")
    args = parser.parse_args()
    for name in "digits", "data_dir", "norb_dir":
        if getattr(args, name) is None:
            delattr(args, name)
    if not 1 <= args.n_images <= 2048:
        raise InputError(f"--n-images {args.n_images}: must be between 1 and 2048")
    return args


def main():
    args = read_command_line()
    everything, loaded = load_networks([*args.load, *args.sources], args)
    attacked, sources = everything[: len(args.load)], everything[len(args.load) :]
    check_networks(attacked, sources)
    check_writable(args.out_json)
    first = attacked[0]
    samples, source = samples_of(first, args.n_images)
    rng = first.module.rng_for(first.config.seed, first.module.EVALUATION, RANDOM_KEY)
    with first.module.worker_threads(first.config) as workers:
        counts, zeros = measure(attacked, sources, samples, rng, workers)
    curves = of_each(curve, counts)
    say = Progress(args.quiet or args.out_json == "-").say
    n_images = len(samples["labels"])
    epsilons = ", ".join(map(str, EPSILONS))
    say(f"{n_images:,} images, pixels changed by up to {epsilons} of their range:")
    say("accuracy at each, robustness")
    for network, of_network in curves.items():
        say(f"{network}: gradient exactly 0 at {100 * zeros[network]:.0f}% of the pixels")
        for attack, accuracies in of_network.items():
            words = "  ".join(f"{value:.3f}" for value in accuracies)
            say(f"  {attack:24}  {words}   {robustness(accuracies):.3f}")
    if args.out_json:
        write_json(args.out_json, result(first, args, source, loaded, counts, curves, zeros))


def result(first, args, source, loaded, counts, curves, zeros):
    """Return what --out-json holds: result_of of the experiment for the first network; of each
    network and attack the accuracies, the robustness, and, as a string of digits, how many epsilons
    each image withstands"""
    _, state = first.module.load(args.load[0])
    untested = {} if first.module.EXPERIMENT == DIGITS else {"correct": {}}
    whole = first.module.result_of(first.config, state, {"source": source}, untested)
    whole.pop("hit_bits", None)  # not of a test
    return whole | {
        "n_images": args.n_images,
        "epsilons": EPSILONS,
        "attacks": curves,
        "robustness": of_each(robustness, curves),
        "withstood": of_each(lambda found: "".join(map(str, found)), counts),
        "zero_gradients": zeros,
        "history": {},
        "seconds_of_runs": [
            sum(epoch["seconds"] for epoch in one.history["epochs"]) for one in loaded
        ],
    }


def of_each(function, found):
    """Return {network: {attack: function(value)}} of {network: {attack: value}}"""
    return {
        network: {attack: function(value) for attack, value in of_network.items()}
        for network, of_network in found.items()
    }


if __name__ == "__main__":
    run_cli(main)
