#!/usr/bin/env python3
"""Time a training step (to_batch, forward, backward, Adam) of four of our networks against PyTorch on the CPU.

    python3 bench/pytorch_capsnet.py [--network paper multimnist cnn-gap em] [--threads 1 2] [--no-compile]

Ours is train()'s step with --muon 0. PyTorch, eager or compiled, must first compute the same numbers. Two versions
(of em, matrix capsules of the paper's small network, see pytorch_em.py):
  public  the paper's network as public PyTorch repositories write it: a convolution for each dimension of the primary
          capsules, votes by a broadcast product, routing logits as large as the votes, Adam's defaults
  tuned   as fast as we could: one convolution, votes by one batched product, a logit per vote, Adam(fused=True)
"""
import argparse
import itertools
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import affnist_capsnet as affnist  # before numpy: it sets the number of BLAS threads
from lab.files import check_writable, machine, write_json
from lab.messages import InputError, fail, run_cli

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit(fail(f"PyTorch is missing: {sys.executable} -m pip install torch --index-url "
                  "https://download.pytorch.org/whl/cpu"))
import numpy as np
import pytorch_em
from threads import NETWORKS, setting, training_step

VERSIONS = {"paper": ("public", "tuned"), "multimnist": ("tuned",), "cnn-gap": ("tuned",), "em": ("public", "tuned")}
ERRORS = {"multimnist": 0.1, "cnn-gap": 0.1}       # of gradients: see bench/README.md, "The same numbers"


def squash(s):
    norm = torch.sqrt((s * s).sum(-1, keepdim=True) + affnist.SQUASH_EPS)
    return s * (norm / (1 + norm * norm))


def convolve(p, x, conv):
    """Return a convolution of ours; its normalization is over groups of 16 samples"""
    x = F.conv2d(x, p[conv.name + "_w"], p.get(conv.name + "_b"), conv.stride)
    if (norm := conv.name + "_norm") + "_gamma" in p:
        x = torch.cat([F.batch_norm(group, None, None, p[norm + "_gamma"], p[norm + "_beta"], True)
                       for group in x.split(16)])
    x = F.max_pool2d(x, 2) if conv.pool else x
    return x if conv.name == "primary" else F.relu(x)


def write(module, config, public):
    """Return two functions, convert(ours) -> p and forward(p, batch) -> outputs, loss"""
    if config.model == "matrix-capsnet":
        return pytorch_em.write(module, config, public, convolve)
    convolutions, E = module.convolutions(config), module.E

    def convert(ours):
        """Return our weights, or gradients, as tensors: kernels (F, C, Ky, Kx), matrices (F, C). If public, W is (J, I,
        E, D), its capsules ordered (type, row, column), and each dimension of the primary capsules has a kernel."""
        axes = {name: {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[a.ndim] for name, a in ours.items()}
        axes |= {"conv1_w": (3, 0, 2, 1), "W": (0, 1, 2, 3)}            # conv1_w is (1, Kx, Ky, F), see im2col_rows
        p = {name: torch.from_numpy(a.transpose(axes[name])) for name, a in ours.items()}
        if public:
            p["W"] = p["W"].unflatten(0, (-1, len(p["primary_b"]) // E)).permute(3, 1, 0, 2, 4).flatten(1, 2)
            for end, a in ("w", p.pop("primary_w")), ("b", p.pop("primary_b")):
                p |= {f"primary{e}_{end}": a[e::E] for e in range(E)}
        return {name: a.clone(memory_format=torch.contiguous_format) for name, a in p.items()}

    def forward(p, batch):
        x, labels = batch["images"][:, None], batch["labels"].view(len(batch["labels"]), -1)
        x = F.pad(x, [getattr(config, "padding", 0)] * 4)
        for conv in convolutions[:-1] if public else convolutions:
            x = convolve(p, x, conv)
        if config.model == "cnn-gap":
            x = F.linear(x.mean((2, 3)), p["fc1_w"], p["fc1_b"])
            return {"scores": x}, F.cross_entropy(x, labels[:, 0])
        if public:
            u = torch.stack([F.conv2d(x, p[f"primary{e}_w"], p[f"primary{e}_b"], 2).flatten(1) for e in range(E)], -1)
            u_hat = squash(u)[None, :, :, None] @ p["W"][:, None]                       # (J, N, I, 1, D)
        else:                                      # u_hat lies in memory as (I, N, J, D)
            u = squash(x.permute(0, 2, 3, 1).reshape(len(x), -1, E))                    # (N, I, E)
            u_hat = (u.transpose(0, 1) @ p["W"].flatten(2)).unflatten(2, (-1, 1, module.D)).permute(2, 1, 0, 3, 4)
        b = torch.zeros_like(u_hat) if public else u_hat.new_zeros(len(u_hat), 1, 1, 1, 1)
        for r in range(config.routing_iters):
            v = squash((torch.softmax(b, 0) * u_hat).sum(2, keepdim=True))
            b = b + (u_hat * v).sum(-1, keepdim=True) if r < config.routing_iters - 1 else b
        v, kept = v[:, :, 0, 0].transpose(0, 1), F.one_hot(labels, config.n_classes).to(x.dtype)  # (N, J, D), (N, R, J)
        recon = (v[:, None] * kept[..., None]).flatten(2).flatten(0, 1)
        for k in 1, 2, 3:
            recon = F.linear(recon, p[f"dec{k}_w"], p[f"dec{k}_b"])
            recon = F.relu(recon) if k < 3 else torch.sigmoid(recon)
        error = recon - batch.get("sources", batch["images"]).reshape(recon.shape)
        lengths, present = torch.sqrt((v * v).sum(-1) + affnist.SQUASH_EPS), kept.sum(1)
        margin = present * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - present) * F.relu(lengths - 0.1) ** 2
        return {"v": v, "recon": recon}, (margin.sum() + config.recon_weight * (error * error).sum()) / len(v)
    return convert, forward


def programs(name, n, threads, modes):
    """Return {program: function that does a training step}. PyTorch must first compute our loss and gradients."""
    module, config, ours, samples = setting(name, n, threads=threads, muon=0.0)
    rows, steps = np.arange(n), {"ours": training_step(module, config, samples)}
    with module.worker_threads(config) as workers:
        terms, shards, _ = module.batch_gradients(ours, samples, rows, config, workers)
    for version, mode in itertools.product(VERSIONS[name], modes):
        convert, forward = write(module, config, version == "public")
        forward = torch.compile(forward, dynamic=False) if mode == "compiled" else forward
        p = {name: a.requires_grad_() for name, a in convert(ours).items()}
        adam = torch.optim.Adam(p.values(), fused=version == "tuned" or None)

        def backward(forward=forward, p=p, adam=adam):
            adam.zero_grad()
            batch = module.to_batch(samples, rows, np.float32)
            loss = forward(p, {name: torch.from_numpy(a) for name, a in batch.items()})[1]
            loss.backward()
            return loss.item()
        loss, grads = abs(backward() / terms["loss"] - 1), convert({key: sum(g[key] for g in shards) for key in ours})
        error = max(float((grads[key] - p[key].grad).abs().max() / grads[key].abs().max()) for key in p)
        assert loss < 1e-4 and error < ERRORS.get(name, 1e-3), (name, version, mode, loss, error)
        steps[f"{version}, {mode}"] = lambda backward=backward, adam=adam: (backward(), adam.step())
    return steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each, after one untimed (default: 15)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--no-compile", action="store_true", help="time eager PyTorch only")
    parser.add_argument("--out-json", metavar="FILE")
    args, rows, versions = parser.parse_args(), [], {"torch": torch.__version__, "numpy": np.__version__}
    if min(args.repeats, args.batch_size, *args.threads) < 1:
        raise InputError("--repeats, --batch-size and --threads must be at least 1")
    check_writable(args.out_json)
    result = vars(args) | machine() | versions | {"load": os.getloadavg(), "rows": rows}
    print(result, "| network | threads | program | ms an image | time / ours (range) |", "|---" * 5 + "|", sep="\n")
    for threads, name in itertools.product(args.threads, args.network):
        torch.set_num_threads(threads)
        torch.compiler.reset()                     # so that no other network counts as the same one with other shapes
        eager = args.no_compile or (name == "em" and threads > 1)       # compiled, em corrupts memory (PyTorch 2.13)
        steps = programs(name, args.batch_size, threads, ("eager", "compiled")[:2 - eager])
        ms = {program: [] for program in steps}
        for k, program in enumerate([*steps] * (1 + args.repeats)):
            time.sleep(0.02)                       # OpenMP's threads wait busily for some milliseconds after a step
            start = time.perf_counter()
            steps[program]()
            ms[program] += [1000 * (time.perf_counter() - start) / args.batch_size] * (k >= len(steps))
        for program, taken in ms.items():
            low, ratio, high = np.quantile(np.divide(taken, ms["ours"]), (0, 0.5, 1))
            rows.append({"network": name, "threads": threads, "program": program, "ms": taken})
            print(f"| {name} | {threads} | {program} | {np.median(taken):.1f} | {ratio:.2f} ({low:.2f}-{high:.2f}) |")
    if args.out_json:
        write_json(args.out_json, result)


if __name__ == "__main__":
    run_cli(main)
