#!/usr/bin/env python3
"""Which score of a network tells best what is no digit: of the third experiment's shipped networks, those that --probe
takes beside others that cost nothing.

    python3 tests/bench_affnist_surest.py [--n-test N] [--digits mnist] [--mnist-dir DIR] [--seed N] [--threads N]
    [--out-json FILE]

Of capsules the length of the longest (as --probe takes), and what it is ahead of the second; of a softmax the largest
probability (as --probe takes), the largest logit, the logarithm of the sum of their exponentials (minus the energy of
Liu et al. 2020), and what the largest logit is ahead of the second. Areas under the ROC, moved test digits against as
many pictures of each kind, the same ones as --probe's, with the 95% interval of DeLong et al. 1988.

--out-json writes a result for results/; its stamp is of 40 training steps of the default network, and renewed only
where the areas come out as before.
"""
from pathlib import Path

import bench_affnist_adversarial  # before numpy: the experiment sets BLAS to one thread
from bench_affnist_adversarial import affnist, arguments, np, shipped, write

SOURCES = Path(__file__), Path(bench_affnist_adversarial.__file__)


def scores_of(out, capsules):
    """out (n, classes), lengths or logits -> {score: (n,)}, higher for surer"""
    out = np.sort(out.astype(float), 1)
    ahead = out[:, -1] - out[:, -2]
    if capsules:
        return {"longest": out[:, -1], "longest minus second": ahead}
    above = np.log(np.exp(out - out[:, -1:]).sum(1))
    return {"probability": np.exp(-above), "largest logit": out[:, -1], "log-sum-exp": out[:, -1] + above,
            "largest minus second": ahead}


def area(of_digits, of_others):
    """affnist.auroc and half of its 95% interval, from how many others each digit is ahead of, and the reverse"""
    m, n = len(of_digits), len(of_others)
    ahead = [(np.searchsorted(there, here) + np.searchsorted(there, here, "right")) / 2
             for here, there in ((of_digits, np.sort(of_others)), (of_others, np.sort(of_digits)))]
    variance = (ahead[0] / n).var(ddof=1) / m + (ahead[1] / m).var(ddof=1) / n
    return affnist.auroc(of_digits, of_others), 1.96 * float(np.sqrt(variance))


def areas(params, config, digits, runner):
    """-> {kind: {score: [area, half of its interval]}}"""
    def scores(parts):
        found = [scores_of(runner.forward(params, part, config)["scores"], config.model in affnist.CAPSULES)
                 for part in parts]
        return {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    test, rng = list(affnist.probed_digits(digits, config, "test")), affnist.rng_for(config.seed, "evaluation", 6)
    real = scores(test)
    return {kind: {name: area(real[name], others[name]) for name in real}
            for kind in affnist.NO_DIGITS
            for others in [scores([affnist.no_digits(part, kind, config, rng) for part in test])]}


def measured(digits, settings):
    """-> {network: its areas}"""
    with affnist.Runner(settings["threads"]) as runner:
        return {name: areas(weights, config, digits, runner) for name, weights, config in shipped(settings)}


def main():
    args, settings, digits = arguments(__doc__)
    if args.n_test < 2:
        raise affnist.InputError(f"--n-test {args.n_test}: must be at least 2, for an interval")
    found = measured(digits, settings)
    print("| network | score | " + " | ".join(affnist.NO_DIGITS) + " |\n|---|---|" + "---|" * len(affnist.NO_DIGITS))
    for network, kinds in found.items():
        for score in kinds["halves"]:
            print(f"| {network} | {score} | " + " | ".join(
                "{:.4f} +- {:.4f}".format(*kinds[kind][score]) for kind in affnist.NO_DIGITS) + " |")
    print(f"{min(args.n_test, affnist.N_PROBED):,} moved test digits: {digits['source']}")
    if args.out_json:
        write(args.out_json, settings, digits, SOURCES, {}, surest=found)


if __name__ == "__main__":
    affnist.run_cli(main)
