#!/usr/bin/env python3
"""Measure what a trained CapsNet loses if its coupling coefficients are replaced at test time.

    python3 bench/multimnist_coefficients.py --load RUN --digits mnist

The votes of a test pair stay as they are. The weighted sum of the votes that gives the digit
capsules is computed with

- "trained": the network's own coefficients, after as many iterations as in training
- "uniform": 1 / 10 each, which is one iteration
- "random": a softmax of normal random numbers with the standard deviation of the network's own
  logits, drawn anew for every pair
- "shuffled": the network's own, of which each primary capsule's ten are given to digits at random
- "mean": the mean of the network's own over training pairs, the same for every test pair
- "another pair": the network's own coefficients of the next test pair that has neither digit
- "5 iterations", "10 iterations": the network's own after more iterations

and the exact match and the reconstruction error of each are printed (Paik et al. 2019). Few primary
capsules of a trained network have coefficients that differ much, and normal logits of the same
standard deviation give no capsule such ones: the share of primary capsules that give one digit more
than a fifth, twice the uniform part, is printed, too. "shuffled" keeps it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import multimnist_capsnet as capsnet  # before numpy: it sets BLAS to one thread
from lab import networks
from lab.files import check_writable, write_json
from lab.messages import InputError, Progress, run_cli

import numpy as np

MORE_ITERATIONS = 5, 10
LARGE = 0.2  # of a coefficient, with ten digit capsules
RANDOM_KEY = 2  # of the generator of random logits; 0 and 1 are those of pairs


def votes(weights, images, config):
    """Return the votes of a network without routing, (N, J, I, D). images: (N, 36, 36) in [0,
    1]."""
    x, _ = capsnet.convolutions_forward(weights, images, config, None)
    u, _ = capsnet.squash_forward(x.reshape(len(x), -1, capsnet.E))
    u_hat, _ = capsnet.votes_forward(u, weights["W"])
    return u_hat


def routed(u_hat, n_iters):
    """Return the coupling coefficients after that many iterations of dynamic routing, (N, J, I)."""
    _, (_, steps) = capsnet.routing_forward(u_hat, n_iters)
    c, _, _ = steps[-1]
    N, J, I, _ = u_hat.shape
    return np.broadcast_to(c, (N, J, I))


def logit_variances(c):
    """Return the variance of the logits over the digit capsules, of each pair and primary
    capsule, (N, I), from the coupling coefficients, (N, J, I). Their logarithms are the logits
    minus a number that is the same for all digit capsules."""
    return np.log(c, dtype=float).var(1, ddof=1)


def random_coefficients(shape, deviation, rng):
    """Return coupling coefficients of random logits, float32 (N, J, I): a softmax over J of
    normal numbers with mean 0 and this standard deviation."""
    logits = deviation * rng.standard_normal(shape, np.float32)
    return capsnet.softmax_forward(logits)


def shuffled(c, rng):
    """Return coupling coefficients, (N, J, I), of which those of each pair and primary capsule are
    given to the digit capsules in a random order."""
    return rng.permuted(c, axis=1)


def strangers(labels):
    """Return for each pair of a batch the row of the next one, after the last one the first, that
    has neither of its digits, (N,); of the next one if all share a digit. labels: (N, 2)."""
    N = len(labels)
    found = np.zeros(N, int)
    for n in range(N):
        following = (n + np.arange(1, N + 1)) % N
        shares_a_digit = np.isin(labels[following], labels[n]).any(1)
        found[n] = following[np.argmin(shares_a_digit)]
    return found


def share_of_large(c):
    """Return the share of pairs and primary capsules whose largest coefficient is above LARGE"""
    return float((c.max(1) > LARGE).mean())


def outputs_with(weights, u_hat, c, labels):
    """Return the lengths of the digit capsules, (N, J), and the reconstructions of the labels'
    capsules, (N, 2, 36, 36), with given coupling coefficients, (N, J, I). u_hat: (N, J, I, D).
    labels: (N, 2)."""
    s = np.matmul(np.ascontiguousarray(c)[:, :, None, :], u_hat)[:, :, 0]  # (N, J, D)
    v, _ = capsnet.squash_forward(s)
    lengths, _ = capsnet.lengths_forward(v)
    recon, _ = capsnet.decoder_forward(weights, v, labels)
    return lengths, recon


def shards(chunk):
    """Return batches of a chunk of pairs, dicts as of to_batch, each of at most SHARD pairs."""
    return [capsnet.to_batch(chunk, rows) for rows in capsnet.batches(chunk, capsnet.SHARD)]


def deviation_of_logits(weights, chunks, config, workers):
    """Return the standard deviation of a network's logits after its last iteration over the
    digit capsules: the root of the mean of logit_variances over all pairs and primary capsules."""

    def mean_variance(batch):
        c = routed(votes(weights, batch["images"], config), config.routing_iters)
        return logit_variances(c).mean(), len(c)

    found = [one for chunk in chunks for one in workers.map(mean_variance, shards(chunk))]
    variances, sizes = np.transpose(found)
    return float(np.sqrt(np.average(variances, weights=sizes)))


def mean_coefficients(weights, chunk, config, workers):
    """Return the mean coupling coefficients after a network's last iteration over a chunk of pairs,
    float32 (J, I)."""

    def total(batch):
        c = routed(votes(weights, batch["images"], config), config.routing_iters)
        return c.sum(0, dtype=float)

    sums = sum(workers.map(total, shards(chunk)))
    return (sums / len(chunk["labels"])).astype(np.float32)


def measure(weights, chunks, config, rng_of_chunk, deviation, mean, workers):
    """Return {name of the coefficients: {"n", "hits", "exact_match", "recon_mse", "large"}}.

    chunks: dicts of pairs, as of stream_pairs. rng_of_chunk(k): the generator of the k-th
    chunk's random coefficients. deviation: of deviation_of_logits. mean: of mean_coefficients."""
    sums, n = {}, 0
    for k, chunk in enumerate(chunks):
        batches = shards(chunk)
        generators = rng_of_chunk(k).spawn(
            len(batches)
        )  # one for each, whatever the number of threads

        def one(job):
            batch, generator = job
            return compare(weights, batch, config, deviation, mean, generator)

        for found in workers.map(one, zip(batches, generators)):
            for name, values in found.items():
                sums[name] = sums.get(name, 0) + np.array(values)
        n += len(chunk["labels"])
    n_pixels = 2 * capsnet.CANVAS**2
    return {
        name: {
            "n": n,
            "hits": int(hits),
            "exact_match": hits / n,
            "recon_mse": square / (n * n_pixels),
            "large": large / n,
        }
        for name, (hits, square, large) in sums.items()
    }


def compare(weights, batch, config, deviation, mean, rng):
    """Return {name of the coefficients: (number of exact matches, summed squared error, summed
    share of large coefficients)} of one batch of pairs."""
    u_hat = votes(weights, batch["images"], config)
    N, J, I, _ = u_hat.shape
    own = routed(u_hat, config.routing_iters)
    coefficients = {
        "trained": own,
        "uniform": routed(u_hat, 1),
        "random": random_coefficients((N, J, I), deviation, rng),
        "shuffled": shuffled(own, rng),
        "mean": np.broadcast_to(mean, (N, J, I)),
        "another pair": own[strangers(batch["labels"])],
    }
    for n_iters in MORE_ITERATIONS:
        coefficients[f"{n_iters} iterations"] = routed(u_hat, n_iters)
    found = {}
    for name, c in coefficients.items():
        lengths, recon = outputs_with(weights, u_hat, c, batch["labels"])
        is_hit = capsnet.exact_match(capsnet.top_two(lengths), batch["labels"])
        square = np.square(recon - batch["sources"], dtype=float).sum()
        found[name] = (is_hit.sum(), square, N * share_of_large(c))
    return found


def main():
    args = networks.measuring_parser(capsnet, __doc__).parse_args()
    loaded, config = networks.load_for_evaluation(capsnet, args.load, args)
    if config.model != "capsnet" or config.routing_iters < 2:
        raise InputError(
            f"--load {args.load}: is --model {config.model} with {config.routing_iters} routing "
            "iterations. Give a capsnet with at least two"
        )
    check_writable(args.out_json)
    network = networks.make(capsnet, args.load, loaded, config, capsnet.load_data(config))
    config = network.config

    def test_pairs():
        return capsnet.stream_pairs(
            network.data, "test", config.n_test, config, capsnet.EVALUATION, 1
        )

    def rng_of_chunk(k):
        return capsnet.rng_for(config.seed, capsnet.EVALUATION, RANDOM_KEY, k)

    with capsnet.worker_threads(config) as workers:
        deviation = deviation_of_logits(network.params, test_pairs(), config, workers)
        training_pairs = next(capsnet.epoch_samples(network.data, config.n_epochs, config))
        mean = mean_coefficients(network.params, training_pairs, config, workers)
        found = measure(
            network.params, test_pairs(), config, rng_of_chunk, deviation, mean, workers
        )
        usual = capsnet.evaluate_test(network.params, network.data, config, workers)
    say, source = Progress(config.quiet or args.out_json == "-").say, network.data["source"]
    say(
        f"{capsnet.data_name(source, loaded.source)}, {found['trained']['n']:,} test pairs; "
        f"standard deviation of the logits {deviation:.3f}"
    )
    for name, metrics in found.items():
        say(
            f"  {name:13}  exact match {metrics['exact_match']:.4f}  reconstruction MSE "
            f"{metrics['recon_mse']:.4f}  largest above {LARGE}: {100 * metrics['large']:.1f}%"
        )
    if args.out_json:
        _, state = capsnet.load(args.load)
        write_json(
            args.out_json,
            capsnet.result_of(config, state, {"source": source}, usual)
            | {
                "coefficients": found,
                "logit_deviation": deviation,
                "history": {},
                "loaded": loaded.file,
            },
        )


if __name__ == "__main__":
    run_cli(main)
