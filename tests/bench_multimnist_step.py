#!/usr/bin/env python3
"""How long a training step takes, and where the time goes.

    python3 tests/bench_multimnist_step.py [--preset residual|classic|paper] [--norm none] [--batch-size 32]
    [--threads 2] [--rounds 9] [--no-torch] [--out-json FILE]
    python3 tests/bench_multimnist_step.py --threads 1,2,4,8 --batch-size 128 [--preset residual|classic|paper]
    [--norm none] [--out-json FILE]

One step is: pixels to float32, forward, backward through all routing iterations, sum over shards, Adam for all weights,
with a learning rate of 0. Compared in one run, in turn, round by round (ratios are medians over rounds, so that a
machine whose speed drifts favours nobody):
  floor     the matrix products of that step and nothing else: each as one bare float32 matmul on contiguous operands
            that are there already, shard by shard on the same worker threads
  eager     the same arithmetic in PyTorch with autograd and fused Adam, if torch can be imported
  compiled  the same under torch.compile
Then the milliseconds of each stage on one thread, and the peak memory of a process that only trains.

With several numbers of threads: this program's step with each, in turn; speed-up and efficiency against one thread.

--out-json writes a result for results/. Its stamp is of that process's 40 training steps; it vouches for the bits that
this code makes, not for the milliseconds.

Both sides choose their kernels by the processor. To hold both to AVX2, set OPENBLAS_CORETYPE=Haswell
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2.
"""
import contextlib
import cProfile
import dataclasses
import inspect
import json
import math
import os
import platform
import pstats
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import multimnist_capsnet as capsnet  # noqa: E402  (before numpy: it sets BLAS to one thread)

import numpy as np  # noqa: E402

KERNEL_CHOICES = ("OPENBLAS_CORETYPE", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def random_pairs(n, rng):
    """Pairs with random pixels: the time of a step does not depend on what is drawn"""
    digits = rng.integers(0, 256, (500, 28, 28), dtype=np.uint8) * (rng.random((500, 28, 28)) < 0.2)
    return capsnet.generate_multimnist(digits.astype(np.uint8), np.arange(500, dtype=np.uint8) % 10, n, rng)


def numpy_step(config, samples, runner, module=capsnet, lr=None):
    """-> a function that does one training step of an experiment's network; lr: another learning rate than its own"""
    params = module.init_params(config)
    adam_m, adam_v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    state = module.init_state(params)
    rows, step = np.arange(config.batch_size), 0

    def run():
        nonlocal step
        step += 1
        _, grads, statistics = runner.loss_and_grads(params, samples, rows, config)
        module.adam_step(params, grads, adam_m, adam_v, step, config.lr if lr is None else lr, runner)
        module.fold_statistics(state, statistics, step)
    return run


def step_products(config, n):
    """The matrix products of one step on n samples: (batch, rows, inner, columns) each. Routing's weighted sums and
    agreements are counted with the arithmetic they need, as products with one column."""
    E = config.primary_dim
    D = config.digit_dim
    J = capsnet.N_CLASSES
    pixels, T = capsnet.CANVAS ** 2, 2 * config.routing_iters - 1
    layers = ((J * D, config.decoder_hidden1), (config.decoder_hidden1, config.decoder_hidden2),
              (config.decoder_hidden2, pixels))
    convs = []
    side = capsnet.CANVAS
    trunk = capsnet.trunk(config)
    for operation, *options in trunk.layers:
        if operation == "conv2d":
            name, stride = options
            Kh, K, C, F = trunk.shapes[name + "_w"]
            side = (side - K) // stride + 1
            places, inner = n * side * side, Kh * K * C
            convs += [(1, places, inner, F), (1, inner, places, F)] + [(1, places, F, inner)] * (name != "conv1")
        side += 2 * options[0] if operation == "pad" else 0
        side = side // 2 if operation == "pool" else side
    I = side * side * config.primary_types
    votes = [(I, n, E, J * D), (I, E, n, J * D), (I, n, J * D, E)]
    routing = [(n * J, 1, I, D), (n * J, I, D, 1)] * (T - 1) + [(n * J, 1, I, D), (n * J, I, T, D)]
    decoder = [product for a, b in layers for product in ((1, 2 * n, a, b), (1, a, 2 * n, b), (1, 2 * n, b, a))]
    return convs + votes + routing + decoder


def floor_step(config, runner):
    """-> a function that does the bare matrix products of one step, and their floating point operations"""
    size = capsnet.SHARD_SIZE
    shards = [min(size, config.batch_size - start) for start in range(0, config.batch_size, size)]

    def operands(n):
        return [
            tuple(np.ones((batch, *shape), np.float32) for shape in ((rows, inner), (inner, columns), (rows, columns)))
            for batch, rows, inner, columns in step_products(config, n)]
    work = [operands(n) for n in shards]
    flops = sum(2 * int(np.prod(product)) for n in shards for product in step_products(config, n))
    return lambda: runner.map(lambda products: [np.matmul(a, b, out=c) for a, b, c in products] and None, work), flops


def torch_steps(config, pairs, threads):
    """-> {"eager": step, "compiled": step} with the same network, loss, gradient and optimiser"""
    import torch
    import torch.nn.functional as F
    torch.set_num_threads(threads)
    batch = capsnet.to_batch(pairs, np.arange(config.batch_size))
    x, target = (torch.from_numpy(batch[name]) for name in ("images", "sources"))
    labels, present = torch.from_numpy(batch["labels"]), torch.from_numpy(capsnet.k_hot(batch["labels"], np.float32))
    types, E = config.primary_types, config.primary_dim
    layers = capsnet.trunk(config).layers
    convs = [options[0] for operation, *options in layers if operation == "conv2d"]

    def squash(s):
        norm = (s.square().sum(-1, keepdim=True) + capsnet.SQUASH_EPS).sqrt()
        return s * (norm / (1 + norm * norm))

    def loss_of(p):
        u, kept = x[:, None], []
        for operation, *options in layers:                                              # at last (N, P, side, side)
            if operation == "pad":
                u = F.pad(u, 4 * options)
            elif operation == "keep":
                kept.append(u)
            elif operation == "add":
                u = u + kept.pop()
            elif operation == "conv2d":
                name, stride = options
                u = F.conv2d(u, p[name + "_w"], p.get(name + "_b"), stride=stride)
            elif operation == "norm":                                                   # of the whole batch, as usual
                u = F.batch_norm(u, None, None, p[options[0] + "_gamma"], p[options[0] + "_beta"], True, 0,
                                 capsnet.NORM_EPS)
            else:
                u = F.max_pool2d(u, 2) if operation == "pool" else F.relu(u)
        u = squash(u.reshape(len(u), types, E, -1).permute(0, 3, 1, 2).reshape(len(u), -1, E))
        u_hat = torch.einsum("nie,iejd->nijd", u, p["W"])
        b = torch.zeros(u_hat.shape[:3])
        for r in range(config.routing_iters):
            v = squash(torch.einsum("nij,nijd->njd", b.softmax(2), u_hat))
            if r < config.routing_iters - 1:
                b = b + torch.einsum("nijd,njd->nij", u_hat, v)
        lengths = (v.square().sum(-1) + capsnet.SQUASH_EPS).sqrt()
        margin = ((present * F.relu(0.9 - lengths).square() + 0.5 * (1 - present) * F.relu(lengths - 0.1).square())
                  .sum(1) .mean())
        mask = F.one_hot(labels, capsnet.N_CLASSES).to(v.dtype)                                # (N, 2, J)
        z = (mask[..., None] * v[:, None]).reshape(2 * len(v), -1)
        z = F.relu(z @ p["dec1_w"] + p["dec1_b"])
        z = F.relu(z @ p["dec2_w"] + p["dec2_b"])
        z = torch.sigmoid(z @ p["dec3_w"] + p["dec3_b"]).reshape(target.shape)
        return margin + config.recon_weight * (z - target).square().sum((1, 2, 3)).mean()

    def stepper(loss_function):
        params = {name: torch.from_numpy(p) for name, p in capsnet.init_params(config).items()}
        params["conv1_w"] = params["conv1_w"][0].permute(2, 1, 0)[:, None]                     # (F, 1, row, column)
        params |= {name + "_w": params[name + "_w"].permute(3, 2, 0, 1) for name in convs[1:]}
        params = {name: p.contiguous().requires_grad_() for name, p in params.items()}
        adam = torch.optim.Adam(params.values(), lr=config.lr, fused=True)

        def run():
            adam.zero_grad(set_to_none=True)
            loss = loss_function(params)
            loss.backward()
            adam.step()
            return loss.item()
        return run
    return {"eager": stepper(loss_of), "compiled": stepper(torch.compile(loss_of))}, torch.__version__


def time_in_turn(steps, rounds, repeats):
    """-> {name: milliseconds per round}: each round times every step function once, `repeats` runs of it, and keeps
    the median"""
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            run()                                                                              # wake its threads
            runs = []
            for _ in range(repeats):
                start = time.perf_counter()
                run()
                runs.append(1e3 * (time.perf_counter() - start))
            times[name].append(np.median(runs))
    return {name: np.array(t) for name, t in times.items()}


def stage_table(module, run, steps=20, least=0.01):
    """-> {function of module: milliseconds a step, with what it calls}, those above `least` of the whole, in the order
    in which they stand. run: does a step on one thread; the profiler makes it a little slower."""
    for _ in range(3):
        run()
    profile = cProfile.Profile(builtins=False)
    for _ in range(steps):
        profile.runcall(run)
    found = pstats.Stats(profile).stats.items()
    spent = {(name, line): 1e3 * total / steps for (file, line, name), (_, _, _, total, _) in found
             if file == module.__file__}
    functions = [
        (name, thing.__code__.co_firstlineno) for name, thing in vars(module).items() if inspect.isfunction(thing)]
    stages = {key: spent[key] for key in functions if key in spent}
    return {name: spent[name, line] for name, line in sorted(stages, key=lambda key: key[1])
            if spent[name, line] > least * max(stages.values())}


def config_to_stamp(**settings):
    """The Config of as many steps on synthetic digits as a result's stamp needs"""
    batch_size = settings.get("batch_size", capsnet.Config.batch_size)
    return capsnet.Config(n_epochs=1, n_train=capsnet.STAMP_STEPS * batch_size, n_val=256, n_test=1, digits="synthetic",
                          **settings)


def trained_elsewhere(config):
    """-> the result of a process of its own that only trains: settings, peak memory, versions, machine, stamps"""
    code = ("import json, sys; sys.path.insert(0, sys.argv[1]); import multimnist_capsnet as c; "
            "config = c.config_of(json.loads(sys.argv[2]), ''); params, history = c.train(config); "
            "print(json.dumps(c.result_of(config, params, history, {})))")
    settings = json.dumps(capsnet.settings_of(dataclasses.replace(config, quiet=True)))
    done = subprocess.run([sys.executable, "-c", code, str(Path(capsnet.__file__).parent), settings],
                          capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
        raise capsnet.InputError(f"the process that only trains failed ({why}); see whether the experiment runs alone")
    result = json.loads(done.stdout)
    unsaid = ("seconds_train", "ms_per_step", "history")           # of so few steps they say nothing
    return {key: value for key, value in result.items() if key not in unsaid}


def numbers_of_threads(text):
    """"1,2,4" -> [1, 2, 4]"""
    try:
        counts = [int(word) for word in text.split(",")]
        if min(counts) < 1 or len(set(counts)) < len(counts):
            raise ValueError
    except ValueError:
        raise capsnet.InputError(f"--threads {text}: must be a number of threads, or several like 1,2,4, each at least "
                                 "1, none of them twice") from None
    return counts


def scaling(config, pairs, counts, rounds, repeats):
    """-> {number of threads, 1 and `counts`: ms, min and max of a step, speed-up against one thread, efficiency}"""
    with contextlib.ExitStack() as stack:
        runners = {n: stack.enter_context(capsnet.Runner(n, config.batch_size)) for n in sorted({1, *counts})}
        times = time_in_turn({n: numpy_step(config, pairs, runner) for n, runner in runners.items()}, rounds, repeats)
    faster = {n: float(np.median(times[1] / t)) for n, t in times.items()}
    return {n: {"ms": np.median(t), "min": t.min(), "max": t.max(), "speedup": faster[n], "efficiency": faster[n] / n}
            for n, t in times.items()}


def print_scaling(found, config):
    shards = math.ceil(config.batch_size / capsnet.SHARD_SIZE)
    print(f"preset {config.preset}, batch {config.batch_size}: {shards} shard{'s' * (shards > 1)} of at most "
          f"{capsnet.SHARD_SIZE}; more threads than that, or than cores, have nothing to do\n")
    print("| threads | ms (median) | min-max over rounds | speed-up | efficiency |\n|---|---|---|---|---|")
    for n, row in found.items():
        print(f"| {n} | {row['ms']:.1f} | {row['min']:.1f}-{row['max']:.1f} | {row['speedup']:.2f} | "
              f"{row['efficiency']:.0%} |")


def require(args, experiment=capsnet, **least):
    """Raise the experiment's InputError for a number that is too low, or a file that cannot be written"""
    for name, bound in least.items():
        if getattr(args, name) < bound:
            raise experiment.InputError(f"{capsnet.flag_of(name)} {getattr(args, name)}: must be at least {bound}")
    if args.out_json:
        experiment.check_writable(args.out_json)


def main():
    parser = capsnet.Parser(__doc__)
    parser.add_argument("--preset", choices=capsnet.PRESETS, default="deep", help="the network (default deep)")
    parser.add_argument("--norm", choices=("batch", "none"), help="batch normalisation, on both sides (default: the "
                        "preset's)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="pairs in a step (default 32)")
    parser.add_argument("--threads", default=str(os.cpu_count()), metavar="N", help="default: one per core; several, "
                        "as 1,2,4: what each is worth")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="each times all in turn (default 9)")
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="steps of each in a round (default 10)")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")
    args = parser.parse_args()
    require(args, batch_size=1, rounds=1, repeats=1)
    counts = numbers_of_threads(args.threads)
    threads = max(counts)
    config = config_to_stamp(
        preset=args.preset, norm=args.norm, batch_size=args.batch_size, threads=threads)
    # Steps that went anywhere would fit their one batch, until numbers next to zero made PyTorch twice as slow.
    still = dataclasses.replace(config, lr=0.0)
    pairs = random_pairs(args.batch_size, np.random.default_rng(0))
    bench = {"threads": args.threads if len(counts) > 1 else threads, "rounds": args.rounds, "repeats": args.repeats}
    if len(counts) > 1:
        found = scaling(still, pairs, counts, args.rounds, args.repeats)
        print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy "
              f"{np.__version__}")
        print_scaling(found, config)
        if args.out_json:
            result = trained_elsewhere(config)
            result["versions"]["torch"] = None
            capsnet.write_json(args.out_json, result | {
                "kernel_choices": {name: os.environ[name] for name in KERNEL_CHOICES if name in os.environ},
                "bench": bench, "scaling": found})
        return
    with capsnet.Runner(threads, args.batch_size) as runner:
        floor, flops = floor_step(config, runner)
        steps, torch_version = {"numpy": numpy_step(still, pairs, runner), "floor": floor}, "not used"
        if not args.no_torch:
            try:
                more, torch_version = torch_steps(still, pairs, threads)
                for run in more.values():
                    run()                                                                      # compiles here
                steps.update(more)
            except ImportError:
                torch_version = "not installed"
        times = time_in_turn(steps, args.rounds, args.repeats)
    print(f"{platform.platform()}, {os.cpu_count()} cores, {threads} threads, Python {platform.python_version()}, "
          f"NumPy {np.__version__}, PyTorch {torch_version}")
    print("kernels: "
          + (", ".join(f"{name}={os.environ[name]}" for name in KERNEL_CHOICES if name in os.environ) or "own choice"))
    print(f"preset {args.preset}, norm {config.norm}, batch {args.batch_size}, {flops / 1e9:.2f} GFLOP a step in "
          "matrix products\n")
    print("| one training step | ms (median) | min-max over rounds | NumPy's time / its time |\n|---|---|---|---|")
    for name, t in times.items():
        print(f"| {name} | {np.median(t):.1f} | {t.min():.1f}-{t.max():.1f} | {np.median(times['numpy'] / t):.2f} |")
    print("\n| stage, one thread | ms a step |\n|---|---|")
    with capsnet.Runner(1) as runner:
        stages = stage_table(capsnet, numpy_step(still, pairs, runner))
    for name, t in stages.items():
        print(f"| {name} | {t:.2f} |")
    result = trained_elsewhere(config)
    print(f"\npeak memory of training: {result['peak_rss_mb'] or np.nan:.0f} MB")
    if args.out_json:
        result["versions"]["torch"] = torch_version if "eager" in times else None
        capsnet.write_json(args.out_json, result | {
            "kernel_choices": {name: os.environ[name] for name in KERNEL_CHOICES if name in os.environ},
            "bench": bench,
            "gflop": flops / 1e9,
            "steps": {name: {"ms": np.median(t), "min": t.min(), "max": t.max(), "ratio": np.median(times["numpy"] / t)}
                      for name, t in times.items()},
            "stages": stages})


if __name__ == "__main__":
    capsnet.run_cli(main)
