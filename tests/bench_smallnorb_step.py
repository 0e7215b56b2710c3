#!/usr/bin/env python3
"""How long a training step of the matrix capsules takes, beside PyTorch with the same arithmetic, and where the time
goes.

    python3 tests/bench_smallnorb_step.py [--threads 2] [--em-iters 3] [--rounds 9] [--no-torch]

One step is: forward, backward through all EM iterations, sum over shards, Adam, on 32 images, with A=32 B=4 C=8.
Compared in one run, in turn, round by round (ratios are medians over rounds, so that a machine whose speed drifts
favours nobody):
  eager     the same arithmetic in PyTorch with autograd and fused Adam, if torch can be imported
  compiled  the same under torch.compile
PyTorch's sums are written in two ways, as a user would: with broadcasting, and as batched products with V and V^2; the
faster counts.
Before that its loss and gradients are compared with ours in float64. Then the milliseconds of each stage on one thread.

Both sides choose their kernels by the processor. To hold both to AVX2, set OPENBLAS_CORETYPE=Haswell
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2.
"""
import argparse
import os
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import smallnorb_novel_viewpoint as norb  # noqa: E402  (before numpy: it sets BLAS to one thread)

import numpy as np  # noqa: E402
from bench_multimnist_step import KERNEL_CHOICES, stage_table, time_in_turn  # noqa: E402


def numpy_step(config, samples, runner):
    """-> a function that does one training step"""
    params = norb.init_params(config)
    adam_m, adam_v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    rows, step = np.arange(config.batch_size), 0

    def run():
        nonlocal step
        step += 1
        _, grads, _ = runner.loss_and_grads(params, samples, rows, config)
        norb.adam_step(params, grads, adam_m, adam_v, step, config.lr, runner)
    return run


def torch_loss(config, how):
    """-> a function of (params, images, labels): the same network and loss in PyTorch; how: broadcast or products"""
    import torch
    import torch.nn.functional as F
    P = norb.P
    D = norb.D
    J = norb.N_CLASSES
    B = config.primary_types
    C = config.conv_types
    K = config.primary_kernel
    H = (norb.SIDE - 5) // 2 + 1 - K + 1
    side = (H - 3) // 2 + 1
    centres = norb.field_centres(config)

    def em(V, a, u, b, ratio, normalise, start):
        """V (N, L, I, J, D), a (N, L, I), normalise(logits (N, L, I, J)) -> R; start: R at first"""
        R = start
        products = torch.cat([V, V * V], -1).transpose(2, 3) if how == "products" else None    # (N, L, J, I, 2D)
        for t in range(config.em_iters):
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
            x = norb.inverse_temperature(t, config.final_lambda) * (b - cost)
            if t < config.em_iters - 1:
                offset = F.logsigmoid(x) - 0.5 * sigma2.log().sum(-1)
                if how == "products":
                    weights = torch.cat([mu / sigma2, -0.5 / sigma2], -1)
                    logits = (products @ weights[..., None]).squeeze(-1).transpose(2, 3)
                    logits = logits + (offset - 0.5 * (mu * mu / sigma2).sum(-1))[:, :, None]
                else:
                    logits = offset[:, :, None] - 0.5 * ((V - mu[:, :, None]).square() / sigma2[:, :, None]).sum(-1)
                R = normalise(logits)
        return mu, torch.sigmoid(x)

    def patches(x):
        """(N, H, H, E) -> (N, places, 9, E)"""
        x = x.unfold(1, 3, 2).unfold(2, 3, 2)                                                 # (N, side, side, E, 3, 3)
        return x.permute(0, 1, 2, 4, 5, 3).reshape(len(x), side * side, 9, -1)

    child = torch.arange(H * H).reshape(1, H, H, 1)
    child = patches(child).reshape(-1)                                            # (places*9,) which child each copy is

    def over_places(x, how):
        """(N, places, 9*B): add up, or take the largest of, all copies of each child, and hand it back to them"""
        columns = x.reshape(len(x), -1, B)
        total = torch.full((len(x), H * H, B), -torch.inf if how == "amax" else 0.0, dtype=x.dtype)
        total = total.index_add(1, child, columns) if how == "sum" else total.index_reduce(1, child, columns, "amax")
        return total[:, child].reshape(x.shape)

    def loss_of(p, images, labels):
        N = len(images)
        h = F.relu(F.conv2d(images, p["conv1_w"], p["conv1_b"], stride=2))
        x = F.conv2d(h, p["primary_w"], p["primary_b"]).permute(0, 2, 3, 1)                    # (N, H, H, B*17)
        M = patches(x[..., :B * D]).reshape(N, side * side, 9 * B, P, P)
        a = patches(torch.sigmoid(x[..., B * D:])).reshape(N, side * side, 9 * B)
        V = torch.einsum("nlirq,ijqc->nlijrc", M, p["conv_W"]).reshape(N, side * side, 9 * B, C, D)

        def normalise(logits):
            e = (logits - over_places(logits.detach().amax(-1), "amax")[..., None]).exp()
            return e / over_places(e.sum(-1), "sum")[..., None]

        start = 1 / (C * over_places(torch.ones(N, side * side, 9 * B, dtype=V.dtype), "sum"))[..., None]
        mu, a = em(V, a, p["conv_beta_u"], p["conv_beta_a"], side * side * C / (H * H * B), normalise, start)
        V = torch.einsum("nlirq,ijqc->nlijrc", mu.reshape(N, side * side, C, P, P), p["class_W"])
        add = torch.zeros(side * side, P, P, dtype=V.dtype)
        add[:, :2, 3] = torch.from_numpy(centres).to(V.dtype)
        V = (V + add[:, None, None]).reshape(N, 1, side * side * C, J, D)
        mu, a = em(V, a.reshape(N, 1, -1), p["class_beta_u"], p["class_beta_a"], J / (side * side * C),
                   lambda x: x.softmax(-1), torch.full((1, 1, 1, 1), 1 / J, dtype=V.dtype))
        scores = mu.square().sum(-1)[:, 0] / D + 4 * (a[:, 0] - 0.5)
        return F.cross_entropy(scores, labels)
    return loss_of


def torch_params(params, dtype):
    import torch
    out = {}
    for name, p in params.items():
        p = torch.from_numpy(p).to(dtype)
        out[name] = (p.permute(3, 2, 0, 1) if name in ("conv1_w", "primary_w") else p).contiguous().requires_grad_()
    return out


def check_gradients(config, samples):
    """-> {how: the largest difference between PyTorch's float64 gradients and ours, relative to each parameter's
    largest gradient}

    The broadcast form differs from the other by MASS_EPS, which is in the mean of V^2 as well as in mu^2.
    """
    import torch
    params = {name: p.astype(np.float64) for name, p in norb.init_params(config).items()}
    batch = norb.to_batch(samples, np.arange(8), np.float64)
    terms, grads, _ = norb.loss_and_grads(params, batch, config)
    worst = {}
    for how in "broadcast", "products":
        theirs = torch_params(params, torch.float64)
        loss = torch_loss(config, how)(
            theirs, torch.from_numpy(batch["images"]).permute(0, 3, 1, 2), torch.from_numpy(batch["labels"]))
        loss.backward()
        worst[how] = abs(loss.item() - terms["loss"]) / terms["loss"]
        for name, grad in grads.items():
            other = theirs[name].grad
            other = (other.permute(2, 3, 1, 0) if name in ("conv1_w", "primary_w") else other).numpy()
            worst[how] = max(worst[how], np.abs(other - grad).max() / np.abs(grad).max())
    return worst


def torch_steps(config, samples, threads):
    """-> {"eager, ...": step, "compiled, ...": step}, PyTorch's version"""
    import torch
    torch.set_num_threads(threads)
    batch = norb.to_batch(samples, np.arange(config.batch_size))
    images = torch.from_numpy(np.ascontiguousarray(batch["images"].transpose(0, 3, 1, 2)))
    labels = torch.from_numpy(batch["labels"])

    def stepper(loss_function):
        params = torch_params(norb.init_params(config), torch.float32)
        adam = torch.optim.Adam(params.values(), lr=config.lr, fused=True)

        def run():
            adam.zero_grad(set_to_none=True)
            loss = loss_function(params, images, labels)
            loss.backward()
            adam.step()
            return loss.item()
        return run
    losses = {how: torch_loss(config, how) for how in ("broadcast", "products")}
    return ({f"eager, {how}": stepper(loss) for how, loss in losses.items()}
            | {f"compiled, {how}": stepper(torch.compile(loss)) for how, loss in losses.items()}), torch.__version__


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--em-iters", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-torch", action="store_true")
    args = parser.parse_args()
    config = norb.Config(conv1_channels=32, primary_types=4, primary_kernel=3, conv_types=8, em_iters=args.em_iters,
                         dropout=0.0, batch_size=32)
    samples = next(norb.epoch_samples(norb.load_data(config), 0, config))
    torch_version = "not used"
    with norb.Runner(args.threads, config.batch_size) as runner:
        steps = {"numpy": numpy_step(config, samples, runner)}
        if not args.no_torch:
            try:
                errors = check_gradients(config, samples)
                print("PyTorch's loss and gradients agree with these, in float64, to " + " and ".join(
                    f"{error:.1e} ({how})" for how, error in errors.items()))
                if not (errors["products"] < 1e-8 and errors["broadcast"] < 1e-4):
                    sys.exit("error: they do not; the times would compare different things")
                more, torch_version = torch_steps(config, samples, args.threads)
                for run in more.values():
                    run()                                                                      # compiles here
                steps.update(more)
            except ImportError:
                torch_version = "not installed"
        times = time_in_turn(steps, args.rounds, args.repeats)
    print(f"{platform.platform()}, {os.cpu_count()} cores, {args.threads} threads, Python {platform.python_version()}, "
          f"NumPy {np.__version__}, PyTorch {torch_version}")
    print("kernels: "
          + (", ".join(f"{name}={os.environ[name]}" for name in KERNEL_CHOICES if name in os.environ) or "own choice"))
    print(f"batch 32, A=32 B=4 C=8, {args.em_iters} EM iterations\n")
    print("| one training step | ms (median) | min-max over rounds | NumPy's time / its time |\n|---|---|---|---|")
    for name, t in times.items():
        print(f"| {name} | {np.median(t):.1f} | {t.min():.1f}-{t.max():.1f} | {np.median(times['numpy'] / t):.2f} |")
    print("\n| stage, one thread | ms a step |\n|---|---|")
    with norb.Runner(1) as runner:
        for name, t in stage_table(norb, numpy_step(config, samples, runner)).items():
            print(f"| {name} | {t:.2f} |")
    print(f"\npeak memory of this process: {norb.peak_rss_mb():.0f} MB")


if __name__ == "__main__":
    main()
