#!/usr/bin/env python3
"""How long a training step of an experiment's networks takes, beside PyTorch with the same arithmetic.

    python3 tests/bench_step.py multimnist [--preset residual|classic|paper] [--batch-size 32] [--threads 2]
    python3 tests/bench_step.py smallnorb --models caps,gap --routing-iters 3 [--no-torch] [--out-json FILE]
    python3 tests/bench_step.py affnist --threads 1 --batch-size 128

One step is: forward with batch statistics, backward through all routing iterations, sum over shards, Adam for all
weights, with a learning rate of 0: steps that went anywhere would fit their one batch, until numbers next to zero made
PyTorch twice as slow. Beside it, in turn, round by round, if torch can be imported: PyTorch with autograd and fused
Adam, eager and under torch.compile; ratios are medians over rounds. PyTorch normalises its whole batch at once, as its
users do; these networks groups of 16. Before that its loss and gradients are compared with ours in float64, on one
group.

With two threads the compiled graph of smallnorb's caps, with three iterations, corrupts memory in PyTorch 2.13 on some
processors; then give --threads 1. Both sides choose their kernels by the processor. To hold both to AVX2, set
OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2.
"""
import os
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import affnist_capsnet as affnist  # before numpy: they set BLAS to one thread
import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb

import numpy as np

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None

EXPERIMENTS = {"multimnist": multimnist, "affnist": affnist, "smallnorb": smallnorb}
UNTIMED = ("nearest", smallnorb), ("cnn", multimnist)
USUAL = {"multimnist": "caps", "affnist": "shared,caps,gap", "smallnorb": ",".join(smallnorb.MODELS[:-1])}
AGREEMENT = 1e-8                   # of gradients, relative to each parameter's largest
KERNEL_CHOICES = ("OPENBLAS_CORETYPE", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def random_samples(module, config, n):
    """Random pixels: the time of a step does not depend on what is drawn"""
    rng, labels = np.random.default_rng(0), np.arange(n) % module.N_CLASSES
    if module is smallnorb:
        shape = n, smallnorb.SIDE, smallnorb.SIDE, smallnorb.N_CHANNELS[config.data]
        return {"images": rng.standard_normal(shape, np.float32), "labels": labels,
                "margin": np.full(n, 0.9, np.float32)}
    if module is multimnist:
        sources = rng.integers(0, 256, (n, 2, multimnist.CANVAS, multimnist.CANVAS), np.uint8)
        return {"composites": sources.max(1), "sources": sources, "labels": np.stack([labels, (labels + 1) % 10], 1)}
    side = affnist.SIDES[config.task]
    return {"images": rng.integers(0, 256, (n, side, side), np.uint8), "labels": labels}         # nothing is dropped


def numpy_step(module, config, runner):
    """-> a function that does one training step of an experiment's network, of no length"""
    params, samples = module.init_params(config), random_samples(module, config, config.batch_size)
    adam_m, adam_v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    state, rows = module.init_state(params), np.arange(config.batch_size)

    def run():
        _, grads, statistics = runner.loss_and_grads(params, samples, rows, config)
        module.adam_step(params, grads, adam_m, adam_v, 1, 0.0, runner)
        module.fold_statistics(state, statistics, 1)
    return run


# -------------------------------------------------------------- the same in PyTorch

def torch_layers(module, layers, p, x):
    """x (N, C, H, W) or (N, C) through layers"""
    kept = []
    for operation, *options in layers:
        name = options[0] if options else None
        if operation == "conv2d":
            x = F.conv2d(x, p[name + "_w"], p.get(name + "_b"), stride=options[2])
        elif operation == "linear":
            x = F.linear(x, p[name + "_w"].T, p.get(name + "_b"))
        elif operation == "norm":
            x = F.batch_norm(x, None, None, p[name + "_gamma"], p[name + "_beta"], True, eps=module.NORM_EPS)
        elif operation == "places":
            along = torch.tensor(name, dtype=x.dtype).expand(len(x), 1, *x.shape[2:])
            x = torch.cat([x, along, along.mT], 1)
        elif operation == "keep":
            kept.append(x)
        elif operation == "add":
            x = x + kept.pop()
        elif operation != "dropout":
            x = {"relu": F.relu, "sigmoid": torch.sigmoid, "pool": lambda x: F.max_pool2d(x, 2),
                 "pad": lambda x, px=name: F.pad(x, [px] * 4),
                 "mean": lambda x: x.mean((2, 3)), "largest": lambda x: x.amax((2, 3)),
                 "flatten": lambda x: x.permute(0, 2, 3, 1).flatten(1)}[operation](x)
    return x


def norm_of(s):
    """Length along the last axis, which stays"""
    return (s.square().sum(-1, keepdim=True) + affnist.SQUASH_EPS).sqrt()


def squash(s):
    norm = norm_of(s)
    return s * (norm / (1 + norm * norm))


def class_vectors(p, x, config, places, ending=squash, first=squash):
    """The primary capsules x (N, C, H, W) -> the vectors of the classes (N, J, D): votes with a matrix for every
    capsule, or for every type and with their places (places, 2); dynamic routing"""
    N, _, H, width = x.shape
    W, n_iters = p["W"], config.routing_iters
    u = first(x.permute(0, 2, 3, 1).reshape(N, H * width, -1, W.shape[1]))             # (N, places, types, E)
    shared = len(W) == u.shape[2]
    at = lambda: torch.einsum("pk,kjd->pjd", places.to(x.dtype), p["place_W"])  # noqa: E731
    if n_iters == 1:                                                                    # no votes are made, as ours
        s = torch.einsum("nie,iejd->njd", u.sum(1) if shared else u.flatten(1, 2), W)
        if "place_W" in p:
            s = s + torch.einsum("np,pjd->njd", norm_of(u)[..., 0].sum(2), at())
        return ending(s / W.shape[2])
    u_hat = torch.einsum("npbe,bejd->npbjd" if shared else "npbe,pbejd->npbjd", u,
                         W if shared else W.reshape(*u.shape[1:], *W.shape[2:]))
    if "place_W" in p:
        u_hat = u_hat + norm_of(u)[..., None] * at()[:, None]
    u_hat = u_hat.flatten(1, 2)                                                         # (N, I, J, D)
    b = torch.zeros(u_hat.shape[:3], dtype=x.dtype)
    for r in range(n_iters):
        v = ending(torch.einsum("nij,nijd->njd", b.softmax(2), u_hat))
        if r < n_iters - 1:
            b = b + torch.einsum("nijd,njd->nij", u_hat, v)
    return v


def margin_loss(lengths, present):
    short, long = F.relu(0.9 - lengths).square(), F.relu(lengths - 0.1).square()
    return (present * short + 0.5 * (1 - present) * long).sum(1).mean()


def redrawing_loss(module, layers, weight, p, v, labels, target):
    """Of the digits labels (N, R), each redrawn from its capsule, against target (N, R, H, W)"""
    mask = F.one_hot(labels, module.N_CLASSES).to(v.dtype)                              # (N, R, J)
    masked = (mask[..., None] * v[:, None]).flatten(2).flatten(0, 1)
    pixels = torch_layers(module, layers, p, masked).reshape(target.shape)
    return weight * (pixels - target).square().sum((1, 2, 3)).mean()


# Each makes a loss, a function of weights and batch, of a Config; what is NumPy's is worked out before, not compiled.

def multimnist_loss(config):
    layers, decoder = multimnist.trunk(config), multimnist.decoder(config)

    def loss_of(p, batch):
        labels, x = batch["labels"], torch_layers(multimnist, layers, p, batch["images"][:, None])
        present = F.one_hot(labels, multimnist.N_CLASSES).sum(1).to(x.dtype)
        v = class_vectors(p, x, config, None)
        return margin_loss(norm_of(v)[..., 0], present) + redrawing_loss(
            multimnist, decoder, config.recon_weight, p, v, labels, batch["sources"])
    return loss_of


def affnist_loss(config):
    plan, decoder = affnist.plan(config), affnist.decoder(config)
    places, plain = torch.from_numpy(plan.places), lambda s: s  # noqa: E731
    first, ending = {"all": (squash, squash), "last": (plain, squash), "none": (plain, plain),
                     "relu": (F.relu, plain)}[config.squash]

    def loss_of(p, batch):
        labels, images = batch["labels"], batch["images"][:, None]
        x = torch_layers(affnist, plan.layers, p, F.pad(images, [config.padding] * 4))
        if config.model not in affnist.CAPSULES:
            return F.cross_entropy(x, labels)
        v = (ending(x.reshape(len(x), affnist.N_CLASSES, -1)) if config.model in affnist.VECTORS else
             class_vectors(p, x, config, places, ending, first))
        lengths = norm_of(v)[..., 0]
        loss = (margin_loss(lengths, F.one_hot(labels, affnist.N_CLASSES).to(v.dtype)) if config.loss == "margin" else
                F.nll_loss((lengths / lengths.sum(1, keepdim=True)).log(), labels))
        return loss + (redrawing_loss(affnist, decoder, config.recon_weight, p, v, labels[:, None], images)
                       if config.recon_weight else 0)
    return loss_of


def smallnorb_loss(config):
    layers, places = smallnorb.trunk(config), None
    if config.model in smallnorb.CAPSULES:
        places = torch.from_numpy(smallnorb.children_of(config).centres)

    def loss_of(p, batch):
        labels, x = batch["labels"], torch_layers(smallnorb, layers, p, batch["images"].permute(0, 3, 1, 2))
        if config.model in smallnorb.VECTOR_MODELS:
            v = class_vectors(p, x, config, places)
            return margin_loss(norm_of(v)[..., 0], F.one_hot(labels, smallnorb.N_CLASSES).to(v.dtype))
        em = config.model in smallnorb.EM_MODELS
        return F.cross_entropy(F.logsigmoid(em_scores(p, x, config, places)) if em else x, labels)
    return loss_of


def em_routing(V, a, u, b, ratio, normalise, start, n_iters):
    """V (N, L, I, J, D), a (N, L, I), normalise(logits (N, L, I, J)) -> R; start: R at first. -> mu, x. Its sums are
    batched products with V and V^2, since broadcasting takes PyTorch longer"""
    R, D = start, V.shape[-1]
    products = torch.cat([V, V * V], -1).transpose(2, 3)                                # (N, L, J, I, 2D)
    for t in range(n_iters):
        r = R * a[..., None]                                                            # (N, L, I, J)
        total = r.sum(2) + smallnorb.MASS_EPS                                           # (N, L, J)
        means = (r.transpose(2, 3)[..., None, :] @ products).squeeze(-2) / total[..., None]
        mu, square = means.split(D, -1)
        sigma2 = F.relu(square - mu * mu) + smallnorb.SIGMA2_EPS
        half_log = 0.5 * sigma2.log().sum(-1)
        x = b - smallnorb.LAMBDA * (D * u + half_log) * total * ratio
        if t < n_iters - 1:
            weights = torch.cat([mu / sigma2, -0.5 / sigma2], -1)
            offset = F.logsigmoid(x) - half_log - 0.5 * (mu * mu / sigma2).sum(-1)
            R = normalise((products @ weights[..., None]).squeeze(-1).transpose(2, 3) + offset[:, :, None])
    return mu, x


def conv_caps(p, name, pose, a, stride, n_iters):
    """pose (N, H, H, B, D), a (N, H, H, B) -> mu (N, side, side, F, D), a (N, side, side, F)"""
    (N, H, _, B), W, P = a.shape, p[name + "_W"], smallnorb.P
    side, C = (H - 3) // stride + 1, W.shape[1]

    def patches(x):
        """(N, H, H, E) -> (N, places, 9, E)"""
        x = x.unfold(1, 3, stride).unfold(2, 3, stride)
        return x.permute(0, 1, 2, 4, 5, 3).reshape(len(x), side * side, 9, -1)
    child = patches(torch.arange(H * H).reshape(1, H, H, 1)).reshape(-1)                # (places*9,) which each copy is

    def summed(x):
        """(N, places, 9*B): add up all copies of each child, and hand the sum back to them"""
        total = torch.zeros((len(x), H * H, B), dtype=x.dtype).index_add(1, child, x.reshape(len(x), -1, B))
        return total[:, child].reshape(x.shape)

    def normalise(logits):
        highest = torch.full((N, H * H, B), -torch.inf, dtype=logits.dtype).index_reduce(
            1, child, logits.detach().amax(-1).reshape(N, -1, B), "amax")[:, child].reshape(logits.shape[:3])
        e = (logits - highest[..., None]).exp()
        return e / summed(e.sum(-1))[..., None]
    M = patches(pose.flatten(3)).reshape(N, side * side, 9 * B, P, P)
    children = patches(a).reshape(N, side * side, 9 * B)
    V = torch.einsum("nlirq,ijqc->nlijrc", M, W).reshape(N, side * side, 9 * B, C, P * P)
    start = 1 / (C * summed(torch.ones(N, side * side, 9 * B, dtype=V.dtype)))[..., None]
    mu, x = em_routing(V, children, p[name + "_beta_u"], p[name + "_beta_a"], side * side * C / (H * H * B), normalise,
                       start, n_iters)
    return mu.reshape(N, side, side, C, P * P), torch.sigmoid(x).reshape(N, side, side, C)


def em_scores(p, x, config, places):
    """The primary capsules x (N, B*17, H, W) -> scores (N, J)"""
    x, D, J, P = x.permute(0, 2, 3, 1), smallnorb.D, smallnorb.N_CLASSES, smallnorb.P
    B = x.shape[-1] // (D + 1)
    pose, a = x[..., :B * D].reshape(*x.shape[:3], B, D), torch.sigmoid(x[..., B * D:])
    for name, stride in smallnorb.CONV_CAPS if config.model == "caps" else ():
        pose, a = conv_caps(p, name, pose, a, stride, config.routing_iters)
    N, side, _, B = a.shape
    V = torch.einsum("nlirq,ijqc->nlijrc", pose.reshape(N, side * side, B, P, P), p["class_W"])
    add = torch.zeros(side * side, P, P, dtype=V.dtype)
    add[:, :2, 3] = places.to(V.dtype)
    V = (V + add[:, None, None]).reshape(N, 1, side * side * B, J, D)
    _, x = em_routing(V, a.reshape(N, 1, -1), p["class_beta_u"], p["class_beta_a"], J / (side * side * B),
                      lambda x: x.softmax(-1), torch.full((1, 1, 1, 1), 1 / J, dtype=V.dtype), config.routing_iters)
    return x[:, 0]


LOSSES = {multimnist: multimnist_loss, affnist: affnist_loss, smallnorb: smallnorb_loss}


def as_torch(module, name, p):
    """A weight as PyTorch has it: kernels (F, C, row, column)"""
    if module is not smallnorb and name == "conv1_w":                                   # see im2col_rows
        return p[0].permute(2, 1, 0)[:, None]
    return p.permute(3, 2, 0, 1) if p.ndim == 4 and name.endswith("_w") else p


def to_torch(module, params, samples, dtype):
    """-> weights that have gradients, and all samples as a batch"""
    batch = module.to_batch(samples, np.arange(len(samples["labels"])), dtype)
    return ({name: as_torch(module, name, torch.from_numpy(p.astype(dtype))).contiguous().requires_grad_()
             for name, p in params.items()}, {name: torch.from_numpy(a) for name, a in batch.items()})


def gradients_differ(module, config):
    """By how much PyTorch's float64 loss and gradients differ from ours on one group of samples, relative to the loss
    and to each parameter's largest gradient"""
    params = {name: p.astype(np.float64) for name, p in module.init_params(config).items()}
    samples = random_samples(module, config, 8)
    terms, grads, _ = module.loss_and_grads(params, module.to_batch(samples, np.arange(8), np.float64), config)
    theirs, batch = to_torch(module, params, samples, np.float64)
    loss = LOSSES[module](config)(theirs, batch)
    loss.backward()
    worst = abs(loss.item() - terms["loss"]) / terms["loss"]
    for name, grad in grads.items():
        ours = as_torch(module, name, torch.from_numpy(np.ascontiguousarray(grad)))
        worst = max(worst, float((theirs[name].grad - ours).abs().max() / ours.abs().max()))
    return worst


def torch_steps(module, config, threads):
    """-> {"eager": step, "compiled": step}"""
    torch.set_num_threads(threads)
    torch._dynamo.reset()                          # else the networks before count against the limit of recompilations
    samples = random_samples(module, config, config.batch_size)

    def stepper(loss_of):
        params, batch = to_torch(module, module.init_params(config), samples, np.float32)
        adam = torch.optim.Adam(params.values(), lr=0.0, fused=True)

        def run():
            adam.zero_grad(set_to_none=True)
            loss = loss_of(params, batch)
            loss.backward()
            adam.step()
            return loss.item()
        return run
    loss_of = LOSSES[module](config)
    return {"eager": stepper(loss_of), "compiled": stepper(torch.compile(loss_of, dynamic=False))}


# -------------------------------------------------------------- timing

def time_in_turn(steps, rounds, repeats):
    """-> {name: milliseconds per round}: in each every step function runs `repeats` times; its median is kept"""
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            run()                                                                       # wake its threads
            runs = []
            for _ in range(repeats):
                start = time.perf_counter()
                run()
                runs.append(1e3 * (time.perf_counter() - start))
            times[name].append(np.median(runs))
    return {name: np.array(t) for name, t in times.items()}


def times_of(module, config, args):
    """-> {name: milliseconds of each round}"""
    with module.Runner(args.threads, config.batch_size) as runner:
        steps = {"numpy": numpy_step(module, config, runner)}
        if torch and not args.no_torch:
            error = gradients_differ(module, config)
            if not error < AGREEMENT:
                raise module.InputError(f"{config.model}: PyTorch's gradients differ by {error}, so that the times "
                                        "would be of different things")
            steps |= torch_steps(module, config, args.threads)
        for run in steps.values():
            run()                                                                       # compiles here
        return time_in_turn(steps, args.rounds, args.repeats)


# -------------------------------------------------------------- command line

def main():
    parser = affnist.Parser(__doc__)
    parser.add_argument("experiment", choices=tuple(EXPERIMENTS))
    for name, default, text in (
            ("--models", "", "networks to time, separated by commas"), ("--preset", "", "their preset")):
        parser.add_argument(name, default=default, metavar="NAME", help=text)
    for name, default, text in (
            ("--routing-iters", 0, "iterations (default: the network's)"), ("--batch-size", 32, "samples in a step"),
            ("--threads", os.cpu_count(), "of either side"), ("--rounds", 5, "each times all in turn"),
            ("--repeats", 10, "steps of each in a round")):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default {default})")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")
    args = parser.parse_args()
    EXPERIMENTS[args.experiment].run_cli(lambda: bench(EXPERIMENTS[args.experiment], args))


def bench(module, args):
    for name in "batch_size", "threads", "rounds", "repeats":
        if getattr(args, name) < 1:
            raise module.InputError(f"{module.flag_of(name)} {getattr(args, name)}: must be at least 1")
    module.check_writable(args.out_json)
    models, given = (args.models or USUAL[args.experiment]).split(","), {"batch_size": args.batch_size}
    given |= {name: getattr(args, name) for name in ("preset", "routing_iters") if getattr(args, name)}
    choices = {f.name: f.metadata.get("choices") for f in module.options(module.Config)}
    for flag, names, known in (("--models", models, choices["model"]), ("--preset", [args.preset], choices["preset"])):
        if unknown := [name for name in names if name not in ("", *known) or (name, module) in UNTIMED]:
            raise module.InputError(f"{flag}: {unknown[0]} is none of {', '.join(known)} or is not timed")
    configs = {model: module.Config(model=model, **given) for model in models}
    version = torch.__version__ if torch and not args.no_torch else None
    print(f"{args.experiment}, {platform.platform()}, {os.cpu_count()} cores, {args.threads} threads, batch "
          f"{args.batch_size}, NumPy {np.__version__}, PyTorch {version or 'not used'}")
    times = {model: times_of(module, config, args) for model, config in configs.items()}
    found = {"steps": {model: {name: {"ms": np.median(t), "min": t.min(), "max": t.max(),
                                      "ratio": np.median(of["numpy"] / t)} for name, t in of.items()}
                       for model, of in times.items()}}
    print("\n| one training step | | ms (median) | min | max | NumPy's time / its time |\n" + "|---" * 6 + "|")
    for model, of in found["steps"].items():
        for name, row in of.items():
            print(f"| {model} | {name} | " + " | ".join(f"{value:.2f}" for value in row.values()) + " |")
    if args.out_json:
        untrained = {"source": "noise", "epochs": [], "seconds": 0.0, "steps": 0}
        found |= {"bench": {"threads": args.threads, "rounds": args.rounds, "repeats": args.repeats},
                  "kernel_choices": {name: os.environ[name] for name in KERNEL_CHOICES if name in os.environ}}
        result = module.result_of(configs[models[0]], {}, untrained, found)
        result["versions"]["torch"] = version
        module.write_json(args.out_json, result)


if __name__ == "__main__":
    affnist.run_cli(main)
