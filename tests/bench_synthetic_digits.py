#!/usr/bin/env python3
"""How much the synthetic digits are like handwriting, measured with a small CNN.

    python3 tests/bench_synthetic_digits.py --digits mnist

Real to synthetic: a CNN trained on MNIST's first 55,000 training images reads 10,000 synthetic digits. Synthetic to
real: the same CNN trained on synthetic digits alone reads MNIST's 10,000 test images. The CNN: 5x5 stride 2, 16
channels; 5x5 stride 2, 32 channels; 128 units; 10 classes; ReLU, cross-entropy, Adam with cosine decay. MNIST is
taken from where the experiment takes it; without it, only what needs none is measured.
"""
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import multimnist_capsnet as capsnet  # before numpy: it sets BLAS to one thread

import numpy as np

BATCH, LR = 50, 2e-3
LAYERS = (("conv2d", "conv1", 5, 2, 16), ("relu",), ("conv2d", "conv2", 5, 2, 32), ("relu",), ("flatten",),
          ("linear", "fc1", 128), ("relu",), ("linear", "fc2", 10))


def init_cnn(rng):
    """He-normal weights, biases 0"""
    shapes = capsnet.work_out(LAYERS, 28, 1).shapes
    return {name: rng.standard_normal(s, np.float32) * np.float32(np.sqrt(2 / np.prod(s[:-1])))
            if name.endswith("_w") else np.zeros(s, np.float32) for name, s in shapes.items()}


def cnn_forward(params, images):
    """images (N, 28, 28) uint8 -> logits (N, 10), caches"""
    return capsnet.layers_forward(params, images.astype(np.float32)[..., None] / 255, LAYERS)


def cnn_grads(params, images, labels):
    """Cross-entropy, mean over the batch -> grads"""
    (logits, caches), grads = cnn_forward(params, images), {}
    dlogits = np.exp(logits - logits.max(1, keepdims=True))
    dlogits /= dlogits.sum(1, keepdims=True)
    dlogits[np.arange(len(labels)), labels] -= 1
    capsnet.layers_backward(dlogits / np.float32(len(labels)), caches, LAYERS, grads, need_dx=False)
    return grads


def train_cnn(images, labels, n_epochs, seed):
    rng = np.random.default_rng(seed)
    params = init_cnn(rng)
    adam_m, adam_v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    step, n_steps = 0, n_epochs * (len(images) // BATCH)
    with capsnet.Runner(1) as runner:
        for _ in range(n_epochs):
            order = rng.permutation(len(images))
            for start in range(0, len(images) - BATCH + 1, BATCH):
                rows = order[start:start + BATCH]
                grads = cnn_grads(params, images[rows], labels[rows])
                lr = LR * 0.5 * (1 + np.cos(np.pi * step / n_steps))
                step += 1
                capsnet.adam_step(params, [grads], adam_m, adam_v, step, lr, runner)
    return params


def accuracy(params, images, labels):
    """-> the share of images named right, its Wilson interval"""
    hits = sum((cnn_forward(params, images[k:k + 500])[0].argmax(1) == labels[k:k + 500]).sum()
               for k in range(0, len(images), 500))
    return hits / len(images), capsnet.wilson_interval(int(hits), len(images))


def main():
    parser = capsnet.Parser(__doc__)
    parser.add_argument("--digits", choices=("auto", "mnist"), default="auto", help="mnist: fail where there is none")
    parser.add_argument("--mnist-dir", default="", metavar="DIR", help="as the experiment's")
    parser.add_argument("--n-synthetic", type=int, default=50000, metavar="N", help="digits to train on (default "
                        "50000)")
    parser.add_argument("--n-epochs", type=int, default=6, metavar="N", help="epochs of each CNN (default 6)")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write settings and results to this file")
    args = parser.parse_args()
    if args.n_synthetic < BATCH:
        raise capsnet.InputError(f"--n-synthetic {args.n_synthetic}: must be at least {BATCH}")
    config = capsnet.Config(**{name: value for name, value in vars(args).items() if name != "n_synthetic"})
    capsnet.check_options(config)
    try:
        mnist = capsnet.load_digits(capsnet.Config(digits="mnist", mnist_dir=config.mnist_dir))
    except capsnet.NotAtHand:
        if config.digits == "mnist":
            raise
        mnist = None
    start = time.perf_counter()
    digits = capsnet.synthesize_digits(args.n_synthetic, config.seed)[:2]
    speed = args.n_synthetic / (time.perf_counter() - start)
    print(f"{speed:.0f} synthetic digits/s")
    unseen = capsnet.synthesize_digits(max(args.n_synthetic // 5, 100), config.seed + 1)[:2]
    found = dict.fromkeys(("synthetic_reads_mnist", "mnist_reads_mnist", "mnist_reads_synthetic"))
    tests = {"synthetic": unseen} | ({"mnist": mnist["test"]} if mnist else {})
    for name, known in (("synthetic", digits), *([("mnist", mnist["train"])] if mnist else [])):
        reader = train_cnn(*known, args.n_epochs, config.seed)
        for read, those in tests.items():
            key = f"{name}_reads_{read}"
            found[key], (low, high) = accuracy(reader, *those)
            found[key + "_ci95"] = low, high
            print(f"trained on {name} digits, reads {read} digits: {found[key]:.4f}, 95% interval [{low:.4f}, "
                  f"{high:.4f}]", flush=True)
    if args.out_json:
        bench = {"n_synthetic": args.n_synthetic, "n_unseen": len(unseen[0]), "n_epochs": args.n_epochs}
        trained = {"source": "mnist" if mnist else "synthetic", "epochs": [], "seconds": 0.0, "steps": 0}
        capsnet.write_json(args.out_json, capsnet.result_of(config, {}, trained, {
            "bench": bench, "digits_per_second": speed, **found}))


if __name__ == "__main__":
    capsnet.run_cli(main)
