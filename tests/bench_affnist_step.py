#!/usr/bin/env python3
"""How long a training step of the third experiment's networks takes, beside PyTorch with the same arithmetic.

    python3 tests/bench_affnist_step.py [--models shared,caps,gap] [--batch-size 32] [--threads 2] [--rounds 5]
    [--repeats 10] [--no-torch] [--out-json FILE]

One step is: forward with batch statistics, backward through all routing iterations, sum over shards, Adam for all
weights with a learning rate of 0. Compared in one run, in turn, round by round (ratios are medians over rounds, so that
a machine whose speed drifts favours nobody):
  eager     the same arithmetic in PyTorch with autograd and fused Adam, if torch can be imported
  compiled  the same under torch.compile
PyTorch normalises its whole batch at once, as its users do; these networks groups of 16. Before that its loss and
gradients are compared with ours in float64, on one group. Then the milliseconds of each stage of the first network on
one thread.

Both sides choose their kernels by the processor. To hold both to AVX2, set OPENBLAS_CORETYPE=Haswell
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2.
"""
import os
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import affnist_capsnet as affnist  # noqa: E402  (before numpy: it sets BLAS to one thread)

import numpy as np  # noqa: E402
from bench_multimnist_step import KERNEL_CHOICES, numpy_step, require, stage_table, time_in_turn  # noqa: E402

AGREEMENT = 1e-8                   # of gradients, relative to each parameter's largest
LR = 0.0                           # steps that went anywhere would fit their one batch: see bench_multimnist_step.py


def random_samples(config, n, seed=0):
    """Images of random pixels: the time of a step does not depend on what they show"""
    rng, side = np.random.default_rng(seed), affnist.SIDES[config.task]
    images = rng.integers(0, 256, (n, side, side), np.uint8)
    samples = {"images": images, "labels": np.arange(n) % affnist.N_CLASSES}
    if config.dropout:
        kept = rng.random((n, affnist.n_dropped(config)), np.float32) >= config.dropout
        samples["dropout_mask"] = kept / np.float32(1 - config.dropout)
    return samples


# -------------------------------------------------------------- the same in PyTorch

def torch_loss(config):
    """-> a function of (params, images (N, 1, side, side), labels, dropout_mask): the same network and loss in
    PyTorch"""
    import torch
    import torch.nn.functional as F
    drawn, J = affnist.plan(config), affnist.N_CLASSES
    centres = torch.from_numpy(drawn.centres)

    def squash(s):
        if config.no_squash:
            return s
        norm = (s.square().sum(-1, keepdim=True) + affnist.SQUASH_EPS).sqrt()
        return s * (norm / (1 + norm * norm))

    def trunk(p, x, dropout_mask):
        for operation, *options in drawn.layers:
            name = options[0] if options else None
            if operation == "conv2d":
                x = F.conv2d(x, p[name + "_w"], p.get(name + "_b"), stride=options[1])
            elif operation == "linear":
                x = x @ p[name + "_w"] + p[name + "_b"]
            elif operation == "norm":
                x = F.batch_norm(x, None, None, p[name + "_gamma"], p[name + "_beta"], True, eps=affnist.NORM_EPS)
            elif operation == "relu":
                x = F.relu(x)
            elif operation == "pool":
                x = F.max_pool2d(x, 2)
            elif operation == "mean":
                x = x.mean((2, 3))
            elif operation == "largest":
                x = x.amax((2, 3))
            elif operation == "flatten":
                x = x.permute(0, 2, 3, 1).flatten(1)
            elif operation == "dropout":
                x = x if dropout_mask is None else x * dropout_mask
        return x

    def votes(p, u):
        """u (N, places, types, E) -> (N, I, J, D)"""
        if config.model == "caps":
            return torch.einsum("nie,iejd->nijd", u.flatten(1, 2), p["W"])
        u_hat = torch.einsum("npbe,bejd->npbjd", u, p["W"])
        if not config.no_places:
            lengths = (u.square().sum(-1) + affnist.SQUASH_EPS).sqrt()
            place = centres.to(u.dtype) @ p["place_W"].flatten(1)        # (places, J D)
            u_hat = u_hat + lengths[..., None, None] * place.reshape(1, -1, 1, J, affnist.D)
        return u_hat.flatten(1, 2)

    def uniform(p, u):
        """One iteration: the sum over places before the matrices, which makes no votes, as ours"""
        if config.model == "caps":
            return torch.einsum("nie,iejd->njd", u.flatten(1, 2), p["W"]) / J
        s = torch.einsum("nbe,bejd->njd", u.sum(1), p["W"])
        if not config.no_places:
            lengths = (u.square().sum(-1) + affnist.SQUASH_EPS).sqrt().sum(2)                # (N, places)
            s = s + torch.einsum("nk,kjd->njd", lengths @ centres.to(u.dtype), p["place_W"])
        return s / J

    def capsules(p, x):
        if config.model == "vectors":
            return squash(x.mean((2, 3)).reshape(len(x), J, -1))
        u = squash(x.permute(0, 2, 3, 1).reshape(len(x), drawn.side ** 2, -1, affnist.E))
        if config.routing_iters == 1:
            return squash(uniform(p, u))
        u_hat = votes(p, u)
        b = torch.zeros(u_hat.shape[:3], dtype=x.dtype)
        for r in range(config.routing_iters):
            v = squash(torch.einsum("nij,nijd->njd", b.softmax(2), u_hat))
            if r < config.routing_iters - 1:
                b = b + torch.einsum("nijd,njd->nij", u_hat, v)
        return v

    def loss_of(p, images, labels, dropout_mask=None):
        x = trunk(p, F.pad(images, [config.padding] * 4), dropout_mask)
        if config.model not in affnist.CAPSULES:
            return F.cross_entropy(x, labels)
        v = capsules(p, x)
        lengths = (v.square().sum(-1) + affnist.SQUASH_EPS).sqrt()
        present = F.one_hot(labels, J).to(v.dtype)
        loss = (present * F.relu(0.9 - lengths).square() + 0.5 * (1 - present) * F.relu(lengths - 0.1).square())
        loss = loss.sum(1).mean() if config.loss == "margin" else F.nll_loss(
            (lengths / lengths.sum(1, keepdim=True)).log(), labels)
        if config.recon_weight:
            z = (present[..., None] * v).flatten(1)
            z = F.relu(z @ p["dec1_w"] + p["dec1_b"])
            z = F.relu(z @ p["dec2_w"] + p["dec2_b"])
            z = torch.sigmoid(z @ p["dec3_w"] + p["dec3_b"])
            loss = loss + config.recon_weight * (z - images.flatten(1)).square().sum(1).mean()
        return loss
    return loss_of


def as_torch(name, p):
    """A weight as PyTorch has it: kernels (F, C, row, column)"""
    if p.ndim != 4 or not name.endswith("_w"):
        return p
    return p[0].permute(2, 1, 0)[:, None] if name == "conv1_w" else p.permute(3, 2, 0, 1)


def torch_params(params, dtype):
    import torch
    return {name: as_torch(name, torch.from_numpy(p).to(dtype)).contiguous().requires_grad_()
            for name, p in params.items()}


def torch_batch(batch):
    import torch
    mask = batch.get("dropout_mask")
    return (torch.from_numpy(batch["images"])[:, None], torch.from_numpy(batch["labels"]),
            None if mask is None else torch.from_numpy(mask))


def gradients_differ(config):
    """By how much PyTorch's float64 loss and gradients differ from ours on one group of samples, relative to the loss
    and to each parameter's largest gradient"""
    import torch
    params = {name: p.astype(np.float64) for name, p in affnist.init_params(config).items()}
    batch = affnist.to_batch(random_samples(config, 8), np.arange(8), np.float64)
    terms, grads, _ = affnist.loss_and_grads(params, batch, config)
    theirs = torch_params(params, torch.float64)
    loss = torch_loss(config)(theirs, *torch_batch(batch))
    loss.backward()
    worst = abs(loss.item() - terms["loss"]) / terms["loss"]
    for name, grad in grads.items():
        ours = as_torch(name, torch.from_numpy(np.ascontiguousarray(grad)))
        worst = max(worst, float((theirs[name].grad - ours).abs().max() / ours.abs().max()))
    return worst


def torch_steps(config, samples, threads):
    """-> {"eager": step, "compiled": step}, PyTorch's version"""
    import torch
    torch.set_num_threads(threads)
    torch._dynamo.reset()                          # else the networks before count against the limit of recompilations
    batch = torch_batch(affnist.to_batch(samples, np.arange(config.batch_size)))

    def stepper(loss_function):
        params = torch_params(affnist.init_params(config), torch.float32)
        adam = torch.optim.Adam(params.values(), lr=LR, fused=True)

        def run():
            adam.zero_grad(set_to_none=True)
            loss = loss_function(params, *batch)
            loss.backward()
            adam.step()
            return loss.item()
        return run
    return {"eager": stepper(torch_loss(config)),
            "compiled": stepper(torch.compile(torch_loss(config), dynamic=False))}, torch.__version__


# -------------------------------------------------------------- command line

def times_of(config, args):
    """-> {name: milliseconds of each round}, PyTorch's version"""
    samples, torch_version = random_samples(config, config.batch_size), None
    with affnist.Runner(args.threads, config.batch_size) as runner:
        steps = {"numpy": numpy_step(config, samples, runner, affnist, LR)}
        if not args.no_torch:
            try:
                error = gradients_differ(config)
                if not error < AGREEMENT:
                    sys.exit(f"error: {config.model}: PyTorch's gradients differ by {error}; the times would compare "
                             "different things")
                more, torch_version = torch_steps(config, samples, args.threads)
                for run in more.values():
                    run()                                                                      # compiles here
                steps |= more
            except ImportError:
                print("PyTorch is not installed: these times stand alone")
        return time_in_turn(steps, args.rounds, args.repeats), torch_version


def stamped(config):
    """-> the result of enough steps on synthetic digits for a stamp: settings, versions, machine. It vouches for the
    bits that this code makes, not for the milliseconds."""
    config = affnist.changed(config, n_epochs=1, n_train=affnist.STAMP_STEPS * config.batch_size, n_val=64, n_test=1,
                             digits="synthetic", threads=1, quiet=True)
    params, history = affnist.train(config)
    result = affnist.result_of(config, params, history, {})
    return {key: value for key, value in result.items() if key not in ("seconds_train", "ms_per_step", "history")}


def main():
    parser = affnist.Parser(__doc__)
    parser.add_argument("--models", default="shared,caps,gap", metavar="NAMES", help="networks to time (default "
                        "shared,caps,gap)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="digits in a step (default 32)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="default: one per core")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="each times all in turn (default 5)")
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="steps of each in a round (default 10)")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")
    args = parser.parse_args()
    require(args, affnist, batch_size=1, threads=1, rounds=1, repeats=1)
    models = args.models.split(",")
    for model in models:
        if model not in affnist.MODELS:
            raise affnist.InputError(f"--models {args.models}: {model} is none of {', '.join(affnist.MODELS)}")
    configs = {model: affnist.for_model(affnist.Config(batch_size=args.batch_size), model) for model in models}
    steps, torch_version = {}, None
    for model, config in configs.items():
        steps[model], torch_version = times_of(config, args)
    print(f"{platform.platform()}, {os.cpu_count()} cores, {args.threads} threads, Python {platform.python_version()}, "
          f"NumPy {np.__version__}, PyTorch {torch_version or 'not used'}")
    print("kernels: "
          + (", ".join(f"{name}={os.environ[name]}" for name in KERNEL_CHOICES if name in os.environ) or "own choice"))
    print(f"batch {args.batch_size}\n\n| one training step | | ms (median) | min-max over rounds | NumPy's time / its "
          "time |\n|---|---|---|---|---|")
    for model, times in steps.items():
        for name, t in times.items():
            print(f"| {model} | {name} | {np.median(t):.1f} | {t.min():.1f}-{t.max():.1f} | "
                  f"{np.median(times['numpy'] / t):.2f} |")
    first = configs[models[0]]
    with affnist.Runner(1) as runner:
        stages = stage_table(affnist, numpy_step(first, random_samples(first, first.batch_size), runner, affnist, LR))
    print(f"\n| stage of {models[0]}, one thread | ms a step |\n|---|---|")
    for name, t in stages.items():
        print(f"| {name} | {t:.2f} |")
    if args.out_json:
        result = stamped(first)
        result["versions"]["torch"] = torch_version
        affnist.write_json(args.out_json, result | {
            "kernel_choices": {name: os.environ[name] for name in KERNEL_CHOICES if name in os.environ},
            "bench": {"threads": args.threads, "rounds": args.rounds, "repeats": args.repeats},
            "steps": {model: {name: {"ms": np.median(t), "min": t.min(), "max": t.max(),
                                     "ratio": np.median(times["numpy"] / t)} for name, t in times.items()}
                      for model, times in steps.items()},
            "stages": stages})


if __name__ == "__main__":
    affnist.run_cli(main)
