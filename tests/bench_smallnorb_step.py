#!/usr/bin/env python3
"""How long a training step of each network takes, beside PyTorch with the same arithmetic, and where the time goes.

    python3 tests/bench_smallnorb_step.py [--models caps,gap] [--preset small|wide|paper] [--routing-iters 3]
    [--threads 2] [--rounds 5] [--repeats 5] [--no-torch] [--out-json FILE]

One step is: forward with batch statistics, backward through all routing iterations, sum over shards, Adam, on 32
images. Compared in one run, in turn, round by round (ratios are medians over rounds, so that a machine whose speed
drifts favours nobody):
  eager     the same arithmetic in PyTorch with autograd and fused Adam, if torch can be imported
  compiled  the same under torch.compile
EM's sums are written in two ways in PyTorch, as a user would: with broadcasting, and as batched products with V and
V^2. PyTorch normalises its whole batch of 32 at once, as its users do; these networks groups of 16.
Before that its loss and gradients are compared with ours in float64, on one group. Then the milliseconds of each stage
of the first network on one thread.

With two threads the compiled graph of caps, with three iterations, corrupts memory in PyTorch 2.13 on some processors;
then give --threads 1.

Both sides choose their kernels by the processor. To hold both to AVX2, set OPENBLAS_CORETYPE=Haswell
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2.
"""
import os
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import smallnorb_novel_viewpoint as norb  # noqa: E402  (before numpy: it sets BLAS to one thread)

import numpy as np  # noqa: E402
from bench_multimnist_step import KERNEL_CHOICES, numpy_step, stage_table, time_in_turn  # noqa: E402

D, J, P = norb.D, norb.N_CLASSES, norb.P
AGREEMENT = {"products": 1e-8, "broadcast": 1e-4}                   # of gradients; MASS_EPS is elsewhere in the latter
# Steps that went anywhere would fit their one batch, until numbers next to zero slowed PyTorch down.
LR = 0.0


def random_samples(config, n, seed=0):
    """Images of random pixels: the time of a step does not depend on what they show"""
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((n, norb.SIDE, norb.SIDE, norb.N_CHANNELS[config.data]), np.float32)
    return {"images": images, "labels": np.arange(n) % J, "margin": np.full(n, 0.9, np.float32)}


# -------------------------------------------------------------- the same in PyTorch

def torch_loss(config, how):
    """-> a function of (params, images, labels): the same network and loss in PyTorch; how: broadcast or products"""
    import torch
    import torch.nn.functional as F
    centres = norb.children_of(config).centres if config.model in norb.CAPSULES else None

    def layers(p, x):
        for operation, *options in norb.trunk(config):
            name = options[0] if options else None
            if operation == "conv2d":
                x = F.conv2d(x, p[name + "_w"], p.get(name + "_b"), stride=options[2])
            elif operation == "linear":
                x = F.linear(x, p[name + "_w"].T, p.get(name + "_b"))
            elif operation == "norm":
                x = F.batch_norm(x, None, None, p[name + "_gamma"], p[name + "_beta"], True, eps=norb.NORM_EPS)
            elif operation == "relu":
                x = F.relu(x)
            elif operation == "pool":
                x = F.max_pool2d(x, 2)
            elif operation == "pad":
                x = F.pad(x, [name] * 4)
            elif operation == "places":
                along = torch.tensor(options[0], dtype=x.dtype).expand(len(x), 1, *x.shape[2:])
                x = torch.cat([x, along, along.mT], 1)
            elif operation == "mean":
                x = x.mean((2, 3))
            elif operation == "flatten":
                x = x.permute(0, 2, 3, 1).flatten(1)
        return x

    def em(V, a, u, b, ratio, normalise, start):
        """V (N, L, I, J, D), a (N, L, I), normalise(logits (N, L, I, J)) -> R; start: R at first. -> mu, x"""
        R = start
        products = torch.cat([V, V * V], -1).transpose(2, 3) if how == "products" else None    # (N, L, J, I, 2D)
        for t in range(config.routing_iters):
            r = R * a[..., None]                                                               # (N, L, I, J)
            total = r.sum(2) + norb.MASS_EPS                                                   # (N, L, J)
            if how == "products":
                means = (r.transpose(2, 3)[..., None, :] @ products).squeeze(-2) / total[..., None]
                mu, square = means.split(D, -1)
                variance = F.relu(square - mu * mu)
            else:
                mu = (r[..., None] * V).sum(2) / total[..., None]
                variance = (r[..., None] * (V - mu[:, :, None]).square()).sum(2) / total[..., None]
            sigma2 = variance + norb.SIGMA2_EPS
            cost = (D * u + 0.5 * sigma2.log().sum(-1)) * total * ratio
            x = b - norb.LAMBDA * cost
            if t < config.routing_iters - 1:
                offset = F.logsigmoid(x) - 0.5 * sigma2.log().sum(-1)
                if how == "products":
                    weights = torch.cat([mu / sigma2, -0.5 / sigma2], -1)
                    logits = (products @ weights[..., None]).squeeze(-1).transpose(2, 3)
                    logits = logits + (offset - 0.5 * (mu * mu / sigma2).sum(-1))[:, :, None]
                else:
                    logits = offset[:, :, None] - 0.5 * ((V - mu[:, :, None]).square() / sigma2[:, :, None]).sum(-1)
                R = normalise(logits)
        return mu, x

    def conv_caps(p, name, pose, a, stride):
        """pose (N, H, H, B, D), a (N, H, H, B) -> mu (N, side, side, F, D), a (N, side, side, F)"""
        N, H, _, B = a.shape
        side, W = (H - 3) // stride + 1, p[name + "_W"]
        C = W.shape[1]

        def patches(x):
            """(N, H, H, E) -> (N, places, 9, E)"""
            x = x.unfold(1, 3, stride).unfold(2, 3, stride)
            return x.permute(0, 1, 2, 4, 5, 3).reshape(len(x), side * side, 9, -1)

        child = patches(torch.arange(H * H).reshape(1, H, H, 1)).reshape(-1)      # (places*9,) which child each copy is

        def over_places(x, kind):
            """(N, places, 9*B): add up, or take the largest of, all copies of each child, and hand it back to them"""
            columns = x.reshape(len(x), -1, B)
            total = torch.full((len(x), H * H, B), -torch.inf if kind == "amax" else 0.0, dtype=x.dtype)
            add = total.index_add(1, child, columns) if kind == "sum" else total.index_reduce(1, child, columns, "amax")
            return add[:, child].reshape(x.shape)

        def normalise(logits):
            e = (logits - over_places(logits.detach().amax(-1), "amax")[..., None]).exp()
            return e / over_places(e.sum(-1), "sum")[..., None]

        M = patches(pose.flatten(3)).reshape(N, side * side, 9 * B, P, P)
        children = patches(a).reshape(N, side * side, 9 * B)
        V = torch.einsum("nlirq,ijqc->nlijrc", M, W).reshape(N, side * side, 9 * B, C, D)
        start = 1 / (C * over_places(torch.ones(N, side * side, 9 * B, dtype=V.dtype), "sum"))[..., None]
        mu, x = em(V, children, p[name + "_beta_u"], p[name + "_beta_a"], side * side * C / (H * H * B), normalise,
                   start)
        return mu.reshape(N, side, side, C, D), torch.sigmoid(x).reshape(N, side, side, C)

    def em_scores(p, images):
        x = layers(p, images).permute(0, 2, 3, 1)                                              # (N, H, H, B*17)
        B = x.shape[-1] // (D + 1)
        pose, a = x[..., :B * D].reshape(*x.shape[:3], B, D), torch.sigmoid(x[..., B * D:])
        for name, stride in (("conv", 2), ("conv2", 1)) if config.model == "caps" else ():
            pose, a = conv_caps(p, name, pose, a, stride)
        N, side, _, B = a.shape
        V = torch.einsum("nlirq,ijqc->nlijrc", pose.reshape(N, side * side, B, P, P), p["class_W"])
        add = torch.zeros(side * side, P, P, dtype=V.dtype)
        add[:, :2, 3] = torch.from_numpy(centres).to(V.dtype)
        V = (V + add[:, None, None]).reshape(N, 1, side * side * B, J, D)
        _, x = em(V, a.reshape(N, 1, -1), p["class_beta_u"], p["class_beta_a"], J / (side * side * B),
                  lambda x: x.softmax(-1), torch.full((1, 1, 1, 1), 1 / J, dtype=V.dtype))
        return x[:, 0]

    def norm_of(s):
        return (s.square().sum(-1, keepdim=True) + norb.SQUASH_EPS).sqrt()

    def squash(s):
        norm = norm_of(s)
        return s * (norm / (1 + norm * norm))

    def lengths(p, images):
        x = layers(p, images).permute(0, 2, 3, 1)
        N, E, places = len(x), norb.VECTOR, len(centres)
        u = squash(x.reshape(N, places, -1, E))                                                # (N, L, B, E)
        if config.model == "dynamic":
            u_hat = torch.einsum("nie,iejd->njid", u.reshape(N, -1, E), p["W"])
        else:
            u_hat = torch.einsum("nlbe,bejd->njlbd", u, p["W"])
            at = torch.einsum("lk,kjd->jld", torch.from_numpy(centres).to(u.dtype), p["place_W"])
            u_hat = (u_hat + at[:, :, None] * norm_of(u)[:, None]).flatten(2, 3)               # (N, J, I, 16)
        if config.model == "self-routing":
            c = torch.einsum("nlbe,bej->njlb", u, p["route_W"]).flatten(2).softmax(1)
            v = squash((c[..., None, :] @ u_hat).squeeze(-2))
        else:
            b = torch.zeros_like(u_hat[..., 0])
            for t in range(config.routing_iters):
                v = squash((b.softmax(1)[..., None, :] @ u_hat).squeeze(-2))
                if t < config.routing_iters - 1:
                    b = b + (u_hat @ v[..., None]).squeeze(-1)
        return norm_of(v)[..., 0]

    def loss_of(p, images, labels):
        if config.model in norb.VECTOR_MODELS:
            long, there = lengths(p, images), F.one_hot(labels, J)
            return (there * F.relu(0.9 - long).square() + 0.5 * (1 - there) * F.relu(long - 0.1).square()).sum(1).mean()
        scores = F.logsigmoid(em_scores(p, images)) if config.model in norb.EM_MODELS else layers(p, images)
        return F.cross_entropy(scores, labels)
    return loss_of


def is_kernel(name):
    return name.startswith(("conv", "primary")) and name.endswith("_w")


def torch_params(params, dtype):
    import torch
    out = {}
    for name, p in params.items():
        p = torch.from_numpy(p).to(dtype)
        out[name] = (p.permute(3, 2, 0, 1) if is_kernel(name) else p).contiguous().requires_grad_()
    return out


def ways(config):
    return ("broadcast", "products") if config.model in norb.EM_MODELS else ("products",)


def check_gradients(config):
    """-> {how: the largest difference between PyTorch's float64 gradients and ours, relative to each parameter's
    largest gradient}, on one group of samples"""
    import torch
    params = {name: p.astype(np.float64) for name, p in norb.init_params(config).items()}
    batch = norb.to_batch(random_samples(config, 8), np.arange(8), np.float64)
    terms, grads, _ = norb.loss_and_grads(params, batch, config)
    worst = {}
    for how in ways(config):
        theirs = torch_params(params, torch.float64)
        loss = torch_loss(config, how)(
            theirs, torch.from_numpy(batch["images"]).permute(0, 3, 1, 2), torch.from_numpy(batch["labels"]))
        loss.backward()
        worst[how] = abs(loss.item() - terms["loss"]) / terms["loss"]
        for name, grad in grads.items():
            other = theirs[name].grad
            other = (other.permute(2, 3, 1, 0) if is_kernel(name) else other).numpy()
            worst[how] = max(worst[how], np.abs(other - grad).max() / np.abs(grad).max())
    return worst


def torch_steps(config, samples, threads):
    """-> {"eager, ...": step, "compiled, ...": step}, PyTorch's version"""
    import torch
    torch.set_num_threads(threads)
    torch._dynamo.reset()                          # else the networks before count against the limit of recompilations
    batch = norb.to_batch(samples, np.arange(config.batch_size))
    images = torch.from_numpy(np.ascontiguousarray(batch["images"].transpose(0, 3, 1, 2)))
    labels = torch.from_numpy(batch["labels"])

    def stepper(loss_function):
        params = torch_params(norb.init_params(config), torch.float32)
        adam = torch.optim.Adam(params.values(), lr=LR, fused=True)

        def run():
            adam.zero_grad(set_to_none=True)
            loss = loss_function(params, images, labels)
            loss.backward()
            adam.step()
            return loss.item()
        return run
    losses = {how: torch_loss(config, how) for how in ways(config)}
    compiled = {how: torch.compile(loss, dynamic=False) for how, loss in losses.items()}
    return ({f"eager, {how}": stepper(loss) for how, loss in losses.items()}
            | {f"compiled, {how}": stepper(loss) for how, loss in compiled.items()}), torch.__version__


def times_of(config, args):
    """-> {name: milliseconds of each round}, PyTorch's version"""
    samples, torch_version = random_samples(config, config.batch_size), None
    with norb.Runner(args.threads, config.batch_size) as runner:
        steps = {"numpy": numpy_step(config, samples, runner, norb, LR)}
        if not args.no_torch:
            try:
                errors = check_gradients(config)
                if not all(error < AGREEMENT[how] for how, error in errors.items()):
                    sys.exit(f"error: {config.model}: PyTorch's gradients differ by {errors}; the times would compare "
                             "different things")
                more, torch_version = torch_steps(config, samples, args.threads)
                for run in more.values():
                    run()                                                                      # compiles here
                steps |= more
            except ImportError:
                print("PyTorch is not installed: these times stand alone")
        return time_in_turn(steps, args.rounds, args.repeats), torch_version


def main():
    parser = norb.Parser(__doc__)
    parser.add_argument("--models", default=",".join(norb.MODELS[:-1]), metavar="NAMES", help="networks to time")
    parser.add_argument("--preset", choices=norb.SIZES, default="small", help="their sizes (default small)")
    parser.add_argument("--routing-iters", type=int, default=3, metavar="N", help="iterations (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="default: one per core")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="each times all in turn (default 5)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="steps of each in a round (default 5)")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")
    args = parser.parse_args()
    models = args.models.split(",")
    for model in models:
        if model not in norb.CAPSULES + norb.CNNS:
            raise norb.InputError(f"--models {args.models}: {model} is no network that is trained")
    for name in "routing_iters", "threads", "rounds", "repeats":
        if getattr(args, name) < 1:
            raise norb.InputError(f"{norb.flag_of(name)} {getattr(args, name)}: must be at least 1")
    norb.check_writable(args.out_json)
    steps, configs, torch_version = {}, {}, None
    for model in models:
        configs[model] = norb.network_of({"routing_iters": args.routing_iters, "preset": args.preset}, model)
        steps[model], torch_version = times_of(configs[model], args)
    print(f"{platform.platform()}, {os.cpu_count()} cores, {args.threads} threads, Python {platform.python_version()}, "
          f"NumPy {np.__version__}, PyTorch {torch_version or 'not used'}")
    print("kernels: "
          + (", ".join(f"{name}={os.environ[name]}" for name in KERNEL_CHOICES if name in os.environ) or "own choice"))
    print("\n| one training step | | ms (median) | min-max over rounds | NumPy's time / its time |\n|---|---|---|"
          "---|---|")
    for model, times in steps.items():
        for name, t in times.items():
            print(f"| {model} | {name} | {np.median(t):.1f} | {t.min():.1f}-{t.max():.1f} | "
                  f"{np.median(times['numpy'] / t):.2f} |")
    with norb.Runner(1) as runner:
        config = configs[models[0]]
        stages = stage_table(norb, numpy_step(config, random_samples(config, config.batch_size), runner, norb, LR))
    print(f"\n| stage of {models[0]}, one thread | ms a step |\n|---|---|")
    for name, t in stages.items():
        print(f"| {name} | {t:.2f} |")
    print(f"\npeak memory of this process: {norb.peak_rss_mb() or np.nan:.0f} MB")
    if args.out_json:
        config = configs[models[0]]
        history = {"source": "noise", "epochs": [], "seconds": 0.0, "steps": 0}
        result = norb.result_of(config, norb.init_params(config), history, {})
        result["versions"]["torch"] = torch_version
        norb.write_json(args.out_json, result | {
            "kernel_choices": {name: os.environ[name] for name in KERNEL_CHOICES if name in os.environ},
            "bench": {"threads": args.threads, "rounds": args.rounds, "repeats": args.repeats},
            "steps": {model: {name: {"ms": np.median(t), "ratio": np.median(times["numpy"] / t)}
                              for name, t in times.items()} for model, times in steps.items()},
            "stages": stages})


if __name__ == "__main__":
    norb.run_cli(main)
