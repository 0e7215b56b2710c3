#!/usr/bin/env python3
"""Check the routing of public implementations again, each described by a formula, and compare with the table.

    python3 conformance/implementations.py            # check all, and compare with docs/reference/implementations.md
    python3 conformance/implementations.py ageron     # those whose name has this text
    python3 conformance/implementations.py --table    # print the table

No code of these repositories is here, and nothing is fetched. `routing` and `em_routing` compute the papers' procedures
in plain NumPy; their keywords are what an implementation does otherwise. ROWS says which ones each has, as it was read,
and what the check said of the implementation itself. Exit code 1 if the check says something else of the formula.
"""
import argparse
import contextlib
import io
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
from capsule_conformance import calls, conform

# name: of the repository, and which of its functions. differs: in words. verdict: of the check. kind: of function.
# formula: keywords of `routing` or `em_routing`. options: of the check
Row = namedtuple("Row", "name differs verdict formula kind options", defaults=("dynamic", {}))
STEP = 1e-30                       # of the complex step, which makes derivatives exact


# ---- dynamic routing ----

def length(x, axis=-1):
    return np.sqrt((x * x).sum(axis, keepdims=True))


def root(square):
    """Return the square root, whose derivative at 0 is infinite, and NaN in a gradient."""
    if np.iscomplexobj(square):
        return np.where(square.real == 0, np.nan, np.sqrt(square))
    return np.sqrt(square)


def squashed(s, axis=-1, one=1.0, inside=0.0, outside=0.0, form="paper"):
    """Return v = |s|^2 / (one + |s|^2) s / |s| with |s| over the axes, or another form. s: (N, J, E)."""
    square = s * s if axis is None else (s * s).sum(axis, keepdims=True)
    norm = root(square + inside) + outside
    if form == "unit":
        return s / norm
    if form == "divided by the square":
        return square / (one + square) * s / square
    if form == "sum of entries":
        return square / (1 + square) * s / np.sign(s.real) / (s * np.sign(s.real)).sum(-1, keepdims=True)
    return square / (one + square) * s / norm


def softmax(b, axis):
    e = np.exp(b - b.real.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def couplings(b, over, is_last):
    """Return c, (N, I, J). over: outputs, inputs, leaky, inputs but in the last iteration, or types at a position."""
    if over == "leaky":
        return softmax(np.concatenate([0 * b[:, :, :1], b], 2), 2)[:, :, 1:]
    if over == "types":                                        # two of them at each position
        return softmax(b.reshape(*b.shape[:2], -1, 2), 3).reshape(b.shape)
    inputs = over == "inputs" or over == "inputs but in the last" and not is_last
    return softmax(b, 1 if inputs else 2)


def routing(u_hat, n_iters, over="outputs", average=False, replace=False, more=0, runs=None, axis=-1, agreement="v",
            divide=False, stop=False, bias=0.0, start=0.0, added=0.0, first=0.0, dtype=None, drop=False, **squash):
    """Return v, (N, J, E), of votes (N, I, J, E).

    average: logits over the batch. replace: the logits. more: iterations than asked for. runs: as many, whatever is
    asked for. axis: of the squash's norm. agreement: of the votes with v, with v / |v|, or another. divide: logits by
    their maximum. stop: what the inner iterations compute is constant for the gradient. bias: added to s. start: of the
    logits, times a fixed matrix. added: to v. first: rounding of the first coupling coefficients. drop: squeeze().
    """
    N, I, J, _ = u_hat.shape
    b = start * np.random.default_rng(0).normal(size=(I, J)) + np.zeros((N, 1, 1))
    T = n_iters + more if runs is None else runs
    for t in range(T):
        is_last = t == T - 1
        votes = u_hat.real if stop and not is_last else u_hat
        c = couplings(b, over, is_last) * (1 + first * (t == 0))
        s = (c[..., None] * votes).sum(1) + bias
        v = squashed(s, axis, **squash) + added
        towards = v / np.sqrt((v * v).sum(-1, keepdims=True) + 1e-24) if agreement == "direction" else v
        agreed = (votes * towards[:, None]).sum(-1)
        if agreement == "distance":
            agreed = 1 - ((votes - v[:, None]) ** 2).sum(-1)
        if average:
            agreed = agreed.mean(0, keepdims=True) + np.zeros((N, 1, 1))
        b = agreed if replace else b + agreed
        if divide:
            b = b / np.take_along_axis(b, b.real.argmax(2)[:, :, None], 2)
    v = v.squeeze() if drop else v
    return v.astype(dtype) if dtype and not np.iscomplexobj(v) else v


def attention(u_hat, n_iters, inverted=False):
    """Return v of self-attention over the votes; inverted: with the queries v, and layer normalization."""
    if inverted:
        v = u_hat.mean(1)
        for _ in range(n_iters):
            c = softmax((u_hat * v[:, None]).sum(-1) / u_hat.shape[3] ** 0.5, 2)
            v = (c[..., None] * u_hat).sum(1)
            v = v - v.mean(-1, keepdims=True)
            v = v / np.sqrt((v * v).mean(-1, keepdims=True))
        return v
    A = np.einsum("nije,nkje->nij", u_hat, u_hat) / u_hat.shape[3] ** 0.5
    s = (softmax(A, 2)[..., None] * u_hat).sum(1)
    return s / length(s) * (1 - np.exp(-length(s)))


def weighted(u_hat, n_iters):
    """Return the average of the votes, weighted by their lengths."""
    return (u_hat * length(u_hat)).sum(1) / length(u_hat).sum(1)


def backward_of(function):
    """Return the backward pass of a function of votes, entry by entry."""
    def backward(dv, u_hat, n_iters):
        gradient = np.zeros(u_hat.shape)
        for place in np.ndindex(u_hat.shape):
            moved = u_hat.astype(complex)
            moved[place] += 1j * STEP
            gradient[place] = (np.imag(function(moved, n_iters)) * dv).sum() / STEP
        return gradient
    return backward


# ---- EM routing ----

def em_routing(V, a, beta_u, beta_a, lambdas, epsilon=0.0, cancel=False, activation="logistic", double_log=False,
               exponent=0.5, with_a=True, standardized=False, factor=1.0, floor=0.0, floor_of_variance=0.0,
               summed=False, in_densities=0.0, small=0.0):
    """Return mu, (N, J, H), and a, (N, J), of votes (N, I, J, H) and activations (N, I).

    cancel: R a is divided by its sum over the parents. activation: logistic, or a softmax, of the mass alone but in the
    last iteration. double_log: log sigma^2 in the cost. exponent: of the density, before (V - mu)^2 / sigma^2; None:
    (V - mu)^2. with_a: in the E-step. factor: of the cost. floor: under R a. summed: densities over the entries.
    in_densities: added to a density without its factor (2 pi)^(-H/2). small: added to two sums of R a.
    """
    N, I, J, _ = V.shape
    R = np.full((N, I, J), 1 / J)
    for t, lambda_ in enumerate(lambdas):
        is_last = t == len(lambdas) - 1
        r = R * a[:, :, None]
        r = r / (r.sum(2, keepdims=True) + small) if cancel else np.maximum(r, floor)
        mass = r.sum(1) + small
        mu = (r[..., None] * V).sum(1) / mass[..., None]
        square = (V - mu[:, None]) ** 2
        sigma2 = np.maximum((r[..., None] * square).sum(1) / mass[..., None] + epsilon, floor_of_variance)
        log_sigma = np.log(sigma2) / (1 if double_log else 2)
        cost = ((beta_u[:, None] + log_sigma) * mass[..., None]).sum(-1) * factor
        if standardized:
            cost = (cost - cost.mean(1, keepdims=True)) / cost.std(1, keepdims=True)
        if activation == "logistic":
            a_out = 1 / (1 + np.exp(-lambda_ * (beta_a - cost)))
        else:
            a_out = softmax(lambda_ * (beta_a - cost) if is_last else mass, 1)
        spread = square if exponent is None else exponent * square / sigma2[:, None]
        log_p = -spread - np.log(sigma2)[:, None] / 2
        p = np.exp(log_p).sum(-1) if summed else np.exp(log_p.sum(-1))
        p = (p + in_densities) * (a_out[:, None] if with_a else 1)
        R = p / p.sum(2, keepdims=True)
    return mu, a_out


# ---- the implementations ----

NO = {}                            # no epsilon
ROOT = {"inside": 1e-9}            # added to |s|^2 inside the root
OUT = {"outside": 1e-9}            # added to |s|
F4 = {"dtype": "float32"}
POSITIONS = {"sizes": {"J": 6, "E": 8}}
NO_GRADIENT = {"backward": False}
INPUTS, AVERAGE, REPLACE, STOP = {"over": "inputs"}, {"average": True}, {"replace": True}, {"stop": True}
COMPONENT, OUTPUTS, MORE, HALF = {"axis": None}, {"axis": 1}, {"more": 1}, {"one": 0.5}
EXCEPT = "RIGHT EXCEPT WITHOUT VOTES"
PRECISE, PRECISE_EXCEPT = "RIGHT UP TO PRECISION", "RIGHT UP TO PRECISION EXCEPT WITHOUT VOTES"
THREE_LOSSY = "softmax over inputs; batch average; squash of components"
THREE_NAMES = "WRONG: softmax over input capsules; logits averaged over the batch; squash of each component; no epsilon"

ROWS = (
    Row("Sarasra/models", "no epsilon", PRECISE_EXCEPT, NO | F4),
    Row("Sarasra/models, leaky", "an extra class of logit 0; no epsilon", "WRONG: leaky routing; no epsilon",
        NO | F4 | {"over": "leaky"}),
    Row("Sarasra/models, with its bias", "a bias of 0.1", "WRONG: bias in the output capsules",
        ROOT | F4 | {"bias": 0.1}),
    Row("XifengGuo/CapsNet-Keras", "nothing", PRECISE, ROOT | F4),
    Row("InnerPeace-Wu/CapsNet-tensorflow", "no epsilon", PRECISE_EXCEPT, NO | F4),
    Row("laubonghaudoi/CapsNet_guide_PyTorch", "no epsilon", EXCEPT, NO),
    Row("EscVM/Efficient-CapsNet, original CapsNet", "nothing", PRECISE, ROOT | F4),
    Row("EscVM/Efficient-CapsNet, with its bias", "a bias", "WRONG: bias in the output capsules",
        ROOT | F4 | {"bias": 0.05}),
    Row("EscVM/Efficient-CapsNet, self-attention", "another procedure", "NOT THIS PROCEDURE", attention),
    Row("leftthomas/CapsuleLayer, dynamic", "nothing", "RIGHT", ROOT),
    Row("leftthomas/CapsuleLayer, k-means", "starts from the mean; agreement with v / |v|; logits replaced; one sum "
        "more", "WRONG: agreement with the direction of v; logits not accumulated; one iteration more",
        ROOT | REPLACE | MORE | {"agreement": "direction"}),
    Row("XifengGuo/CapsNet-Pytorch", "inner gradient stopped", "WRONG: gradient of inner iterations stopped",
        ROOT | STOP),
    Row("naturomics/CapsNet-Tensorflow, bias 0", "inner gradient stopped",
        "WRONG: gradient of inner iterations stopped", ROOT | STOP | F4),
    Row("shinseung428/CapsNet_Tensorflow", "inner gradient stopped", "WRONG: gradient of inner iterations stopped",
        ROOT | STOP | F4),
    Row("higgsfield (tutorial)", THREE_LOSSY, THREE_NAMES, NO | INPUTS | AVERAGE | COMPONENT),
    Row("jindongwang/Pytorch-CapsuleNet", THREE_LOSSY, THREE_NAMES, NO | INPUTS | AVERAGE | COMPONENT),
    Row("cedrickchee/capsule-net-pytorch", "batch average; no epsilon",
        "WRONG: logits averaged over the batch; no epsilon", NO | AVERAGE),
    Row("timomernick/pytorch-capsule", "softmax over inputs; batch average; squash over outputs",
        "WRONG: softmax over input capsules; logits averaged over the batch; squash over output capsules",
        ROOT | INPUTS | AVERAGE | OUTPUTS),
    Row("adambielski/CapsNet-pytorch", "n + 1 iterations; no epsilon", "WRONG: one iteration more; no epsilon",
        NO | MORE),
    Row("adambielski/CapsNet-pytorch, trained logits", "n + 1 iterations; initial logits; no epsilon",
        "NOT THIS PROCEDURE", NO | MORE | {"start": 0.3}),
    Row("davrot/CapsNet-pytorch", "n + 1 iterations; no epsilon", "WRONG: one iteration more; no epsilon, gradient",
        OUT | MORE),
    Row("davrot/CapsNet-pytorch, squash_L1", "n + 1 iterations; s divided by the sum of its entries",
        "NOT THIS PROCEDURE", MORE | {"form": "sum of entries"}),
    Row("spikefairway/CapsNet-PyTorch", "inner gradient stopped; no epsilon",
        "WRONG: gradient of inner iterations stopped; no epsilon", NO | STOP),
    Row("peerdavid/capsnet-limitations", "1e-8 added to v", PRECISE, ROOT | F4 | {"added": 1e-8}),
    Row("peerdavid/capsnet-limitations, with its bias", "a bias of 0.1", "WRONG: bias in the output capsules",
        ROOT | F4 | {"bias": 0.1}),
    Row("danielhavir/capsule-network", "inner gradient stopped; epsilon outside the root",
        "WRONG: gradient of inner iterations stopped; no epsilon, gradient", OUT | STOP),
    Row("lidq92/pytorch-dynamic-routing-between-capsules", "inner gradient stopped; epsilon outside the root",
        "WRONG: gradient of inner iterations stopped; no epsilon, gradient", OUT | STOP),
    Row("jeong-tae/CapsNet-pytorch", "squash over outputs", "WRONG: squash over output capsules", ROOT | OUTPUTS),
    Row("ageron/handson-ml, asked for three iterations", "runs two", "WRONG: one iteration fewer",
        ROOT | F4 | {"runs": 2}, "dynamic", {"iterations": [3]}),
    Row("keras-team (cifar10_cnn_capsule)", "0.5 in the squash; logits replaced",
        "WRONG: logits not accumulated; squash with 0.5 in place of 1", ROOT | F4 | REPLACE | HALF),
    Row("bojone/Capsule", "0.5 in the squash; logits replaced; agreement with s / |s|", "WRONG: agreement with the "
        "direction of v; logits not accumulated; squash with 0.5 in place of 1",
        ROOT | REPLACE | HALF | {"agreement": "direction"}),
    Row("binzhouchn/capsule-pytorch", "s / |s|; logits replaced",
        "WRONG: logits not accumulated; unit vector in place of the squash", ROOT | REPLACE | {"form": "unit"}),
    Row("andyweizhao/capsule_text_classification", "0.5 in the squash", "WRONG: squash with 0.5 in place of 1",
        ROOT | HALF),
    Row("andyweizhao/NLP-Capsule, dynamic", "leaky; 0.5 in the squash; no epsilon",
        "WRONG: leaky routing; squash with 0.5 in place of 1; no epsilon, gradient", OUT | HALF | {"over": "leaky"}),
    Row("andyweizhao/NLP-Capsule, KDE", "another procedure, with 0.5 in the squash",
        "WRONG (a part): squash with 0.5 in place of 1", ROOT | HALF | {"agreement": "distance"}),
    Row("cezannec/capsule_net_pytorch", "softmax over inputs; no epsilon",
        "WRONG: softmax over input capsules; no epsilon", NO | INPUTS),
    Row("gram-ai/capsule-networks", "softmax over inputs; no epsilon",
        "WRONG: softmax over input capsules; no epsilon", NO | INPUTS),
    Row("benedekrozemberczki/CapsGNN", "batch average; squash over outputs",
        "WRONG: logits averaged over the batch; squash over output capsules", ROOT | AVERAGE | OUTPUTS),
    Row("CapsGNN, before its logits / maximum was removed", "these, and logits / maximum", "WRONG: logits divided by "
        "their maximum; logits averaged over the batch; squash over output capsules",
        ROOT | AVERAGE | OUTPUTS | {"divide": True}),
    Row("dmlc/dgl", "batch average; no epsilon", "WRONG: logits averaged over the batch; no epsilon", NO | AVERAGE),
    Row("haofengac/pyCapsNet, NumPy", THREE_LOSSY, THREE_NAMES + ", gradient", OUT | INPUTS | AVERAGE | COMPONENT),
    Row("haofengac/pyCapsNet, PyTorch", "softmax over inputs; squash of components; returns after one iteration",
        "WRONG: squash of each component; nothing is routed", ROOT | INPUTS | COMPONENT | {"runs": 1}),
    Row("qbeer/capsule-net", "logits replaced; squeeze() drops a batch of one", "WRONG: logits not accumulated",
        ROOT | REPLACE | {"drop": True}),
    Row("soskek (Chainer), ported", "first logits in float32",
        "VALUES RIGHT UP TO PRECISION, GRADIENT NOT CHECKED", ROOT | {"first": 3e-8}, "dynamic", NO_GRADIENT),
    Row("lalonderodney/SegCaps, positions in J", "softmax per position; a bias of 0.1",
        "WRONG: bias in the output capsules; softmax per position", ROOT | F4 | {"over": "types", "bias": 0.1},
        "dynamic", POSITIONS),
    Row("brjathu/deepcaps, positions in J", "squash over positions and entries together", "NOT THIS PROCEDURE",
        ROOT | F4 | {"axis": (1, 2)}, "dynamic", POSITIONS),
    Row("naturomics/CapsLayer, leaky", "an extra class of logit 0; no epsilon", "WRONG: leaky routing; no epsilon",
        NO | F4 | {"over": "leaky"}),
    Row("Enigmatisms/CapsNet", "softmax over inputs in all iterations but the last", "NOT THIS PROCEDURE",
        ROOT | {"over": "inputs but in the last"}),
    Row("apple/ml-capsules-inverted-attention-routing", "another procedure, with layer normalization",
        "NOT THIS PROCEDURE", lambda u_hat, n_iters: attention(u_hat, n_iters, inverted=True)),
    Row("KellerJordan/CapsNet-Adversarial", "softmax over inputs; no epsilon",
        "WRONG: softmax over input capsules; no epsilon", NO | INPUTS),
    Row("yanx27/PointCapsNet", "no epsilon", EXCEPT, NO),
    Row("ethanleet/CapsNet, bias 0", "squeeze() drops a batch of one", "WRONG", {"inside": 1e-16, "drop": True}),
    Row("mavanb/capsnet_pytorch", "squeeze() drops a batch of one, and a single output capsule", "WRONG",
        {"inside": 1e-7, "drop": True}),
    Row("VladLevochko/CapsNets, logits from 0", "random initial logits; inner gradient stopped",
        "WRONG: gradient of inner iterations stopped; no epsilon, gradient", OUT | STOP),
    Row("gchochla/capsules-utils", "no epsilon", EXCEPT, NO),
    Row("hiepph/capsules-pytorch", "batch average; s / (1 + |s|^2); no epsilon", "WRONG: logits averaged over the "
        "batch; squash with the square below only; no epsilon", AVERAGE | {"form": "divided by the square"}),
    Row("jpitoskas/VectorCapsules-Thesis", "n + 1 iterations; NaN gradient at s = 0",
        "WRONG: one iteration more; no epsilon, gradient", OUT | MORE),
    Row("jpitoskas/VectorCapsules-Thesis, average", "votes averaged by their lengths", "NOT THIS PROCEDURE", weighted),
    Row("kazukiii/caps-net-pytorch, three iterations", "softmax over inputs; batch average; squash over outputs",
        "WRONG: softmax over input capsules; logits averaged over the batch; squash over output capsules",
        ROOT | INPUTS | AVERAGE | OUTPUTS | {"runs": 3}, "dynamic", {"iterations": [3]}),
    Row("akhdanfadh/efficient-capsnet-pytorch", "another procedure: self-attention", "NOT THIS PROCEDURE", attention),
    Row("IBM/matrix-capsules-with-em-routing", "cost times 100 parents / children", "NOT THIS PROCEDURE",
        {"factor": 100 * 5 / 7, "epsilon": 1e-9}, "em"),
    Row("gyang274/capsulesEM", "cost standardized; no epsilon on the variance",
        "WRONG: cost standardized over the parents; no epsilon on the variance", {"standardized": True}, "em"),
    Row("www0wwwjs1/Matrix-Capsules-EM-Tensorflow", "activations cancel; softmax in place of the logistic, without the "
        "cost inside; lambda in the last iteration only", "WRONG (a part): children's activations cancel; softmax in "
        "place of the logistic", {"cancel": True, "activation": "softmax", "epsilon": 1e-4}, "em"),
    Row("yl-1993/Matrix-Capsules-EM-PyTorch", "activations cancel", "WRONG: children's activations cancel",
        {"cancel": True, "epsilon": 1e-6}, "em"),
    Row("shzygmyx/Matrix-Capsules-pytorch", "two floors; log sigma^2; exponent; R stopped",
        "WRONG (a part): wrong exponent of the density; log of the variance in the cost",
        {"floor": 0.01, "floor_of_variance": 0.01, "double_log": True, "exponent": None}, "em"),
    Row("naturomics/CapsLayer", "no log a in the E-step; exponent 1/4",
        "WRONG: wrong exponent of the density; activation missing in the E-step",
        {"with_a": False, "exponent": 0.25, "epsilon": 1e-7}, "em"),
    Row("peerdavid/capsnet-limitations, EM", "log sigma^2; epsilons of 1e-8 in the densities",
        "WRONG (a part): log of the variance in the cost", {"double_log": True, "in_densities": 1e-8 * (2 * np.pi) ** 8,
                                                            "epsilon": 1e-4}, "em"),
    Row("lidq92, EM", "densities summed; children's activations in the E-step, where they cancel; log sigma^2; R "
        "stopped", "WRONG (a part): log of the variance in the cost",
        {"summed": True, "with_a": False, "double_log": True}, "em"),
    Row("ds2268/Matrix-Capsules-EM-PyTorch", "activations cancel; epsilons of 1e-8 on the variance and on two sums",
        "WRONG: children's activations cancel", {"cancel": True, "epsilon": 1e-8, "small": 1e-8}, "em"),
)
HEADS = ("implementation", "what differs in its routing, as read", "what the check says")


def function_of(row):
    """Return the function that a row describes."""
    if callable(row.formula):
        return row.formula
    if row.kind == "em":
        return lambda V, a, beta_u, beta_a, lambdas: em_routing(V, a, beta_u, beta_a, lambdas, **row.formula)
    return lambda u_hat, n_iters: routing(u_hat, n_iters, **row.formula)


def said(row):
    """Return what the check says of a row's function, as in the table."""
    function, options = function_of(row), dict(row.options)
    if row.kind == "dynamic" and options.pop("backward", True) and not callable(row.formula):
        options["backward"] = backward_of(lambda u_hat, n: routing(u_hat, n, **(row.formula | {"dtype": None})))
    with np.errstate(all="ignore"), contextlib.redirect_stderr(io.StringIO()):
        report = conform.examine(calls.given(function), row.kind, row.name, **options)
    names = [name.removeprefix("EM: ").replace(" in the squash, forward", "").replace(" in the squash,", ",")
             for name in report.mistakes]
    if report.verdict != "WRONG":
        return report.verdict
    part = " (a part)" if "WRONG: a part of your function" in report.text else ""
    return f"WRONG{part}{': ' if names else ''}{'; '.join(names)}"


def table():
    """Return the rows as Markdown."""
    def cells(row):
        return " | ".join(text.replace("|", "\\|") for text in (row.name, row.differs, row.verdict))
    return "\n".join([f"| {' | '.join(HEADS)} |", "|---|---|---|", *(f"| {cells(row)} |" for row in ROWS)])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TEXT", help="check only implementations whose name has this text")
    parser.add_argument("--table", action="store_true", help="print the table and check nothing")
    args = parser.parse_args(argv)
    if args.table:
        print(table())
        return 0
    rows = [row for row in ROWS if not args.names or any(text in row.name for text in args.names)]
    if not rows:
        parser.error(f"no implementation has {' or '.join(args.names)} in its name. --table prints all")
    wrong = 0
    for row in rows:
        start = time.monotonic()
        found = said(row)
        wrong += found != row.verdict
        mark = "ok " if found == row.verdict else "NO "
        print(f"{mark} {time.monotonic() - start:5.1f} s  {row.name}: {found}", flush=True)
        if found != row.verdict:
            print(f"             the table has: {row.verdict}")
    print(f"{len(rows) - wrong} of {len(rows)} as in the table")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
