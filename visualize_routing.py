#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0", "matplotlib>=3.8.4", "imageio>=2.31.0"]
# ///
"""Draw the computation graphs of dynamic routing (Sabour et al. 2017) and of EM routing (Hinton et al. 2018): how
values flow forward through the routing iterations, and how gradients flow back and accumulate. Each step shows the name
of its function and the shape of its result, which comes from a run of that function.

    python3 visualize_routing.py                                     # 3 iterations of each: seconds
    python3 visualize_routing.py --n-iters 2 --outdir viz/routing    # 2 iterations, into a folder of one's choice
"""
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))                # for Python's -P, which leaves it out
import multimnist_capsnet as capsnet  # before numpy: it sets the number of BLAS threads
import smallnorb_novel_viewpoint as norb
from lab import figures
from lab.figures import GRAY
from lab.files import make_outdir
from lab.messages import InputError, Parser, counted, run_cli

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

FORWARD, READS_VOTES, BACKWARD, TERMS = "#DCE9F5", "#A9CDEB", "#FBE3C0", "#F4B183"
SIZES = {"N": 2, "J": 3, "I": 5, "D": 16}      # all different, so that a shape names its axes
COLUMNS = (0.95, 2.65, 4.35, 6.25, 7.95, 9.65)   # centers of the columns, inches: three forward, three backward
BOX = 1.5, 0.56                    # width and height of a box, inches
ROW, HEAD, FOOT, WIDTH = 1.6, 1.35, 0.85, 10.6   # height of an iteration, of the head and of the foot; width, inches


def record_shapes(module, names, run):
    """Call run() and return {name: list of (shapes of the arguments, shapes of the results)} of the named functions."""
    calls, originals = {name: [] for name in names}, {name: getattr(module, name) for name in names}

    def shapes(values):
        return [value.shape for value in (values if isinstance(values, tuple) else [values])
                if isinstance(value, np.ndarray)]

    def recorder(name):
        def record(*args, **kwargs):
            found = originals[name](*args, **kwargs)
            first = found[0] if isinstance(found, tuple) and name.endswith("_forward") else found
            calls[name].append((shapes(args), shapes(first)))
            return found
        return record
    try:
        for name in names:
            setattr(module, name, recorder(name))
        run()
    finally:
        for name, function in originals.items():
            setattr(module, name, function)
    return calls


def letters(shape, sizes=SIZES):
    """Return a shape with axis letters, such as (N, J, I)"""
    names = {size: name for name, size in sizes.items()} | {1: "1"}
    last = "," if len(shape) == 1 else ""
    return f"({', '.join(names[size] for size in shape)}{last})"


@functools.cache
def dynamic_shapes(n_iters):
    """Return record_shapes of dynamic routing's functions, forward and backward."""
    rng, (N, J, I, D) = np.random.default_rng(0), SIZES.values()
    u_hat = rng.standard_normal((N, J, I, D))

    def run():                     # the squash is given: a default argument would not be the recorded function
        v, cache = capsnet.routing_forward(u_hat, n_iters, capsnet.squash_forward)
        capsnet.routing_backward(np.ones_like(v), cache, capsnet.squash_backward)
    return record_shapes(capsnet, ("softmax_forward", "softmax_backward", "squash_forward", "squash_backward",
                                   "routing_forward", "routing_backward"), run)


@functools.cache
def em_shapes(n_iters):
    """Return record_shapes of EM routing's functions, forward and backward."""
    rng, (N, J, I, D) = np.random.default_rng(0), SIZES.values()
    V, a, beta = rng.standard_normal((N, J, I, D)), rng.random((N, I)), np.zeros(J)

    def run():
        (mu, x), cache = norb.em_routing_forward(V, a, beta, beta, n_iters)
        norb.em_routing_backward(np.ones_like(mu), np.ones_like(x), cache)
    return record_shapes(norb, ("m_step_forward", "m_step_backward", "e_step_forward", "e_step_backward",
                                "responsibilities_forward", "responsibilities_backward", "votes_gradient"), run)


class Graph:
    """A figure with boxes in COLUMNS, an iteration in each row; forward on the left, backward on the right."""

    def __init__(self, n_iters, title, note):
        self.n_iters, self.height = n_iters, HEAD + ROW * n_iters + FOOT
        self.fig = Figure((WIDTH, self.height))
        self.ax = self.fig.add_axes((0, 0, 1, 1))
        self.ax.set(xlim=(0, WIDTH), ylim=(0, self.height), xticks=[], yticks=[])
        self.ax.spines[:].set_visible(False)
        self.ax.text(WIDTH / 2, self.height - 0.22, title, ha="center", va="center", fontsize=13)
        self.ax.text(WIDTH / 2, 0.16, note, ha="center", va="center", fontsize=9.5, color=GRAY)
        for column, text in ((1, "forward: from top to bottom"), (3.5, "backward: from bottom to top")):
            x = np.interp(column, range(len(COLUMNS)), COLUMNS)
            self.ax.text(x, self.y(0, 1.06), text, ha="center", fontsize=10.5, color=GRAY)
        for t in range(n_iters):
            self.ax.axhline(self.y(t, 0.98), color="#DDDDDD", linewidth=1)
            self.ax.text(0.08, self.y(t, 0.9), f"iteration {t + 1}", fontsize=9.5, color=GRAY, va="center")

    def y(self, t, part):
        """Return a height in the row of iteration t, from 0 (its bottom) to 1 (its top)"""
        return FOOT + ROW * (self.n_iters - 1 - t + part)

    def box(self, column, t, part, text, color):
        """Draw a box at a height of an iteration's row and return its center"""
        return self.draw_box(COLUMNS[column], self.y(t, part), text, color)

    def head_box(self, column, text, color):
        """Draw a box above all iterations and return its center"""
        return self.draw_box(COLUMNS[column], self.y(0, 1.18), text, color)

    def draw_box(self, x, y, text, color):
        width, height = BOX
        self.ax.add_patch(FancyBboxPatch((x - width / 2, y - height / 2), width, height, facecolor=color,
                                         edgecolor="#555555", linewidth=0.8, boxstyle="round,pad=0,rounding_size=0.06"))
        self.ax.text(x, y, text, ha="center", va="center", fontsize=8.5, linespacing=1.35)
        return x, y

    def ends(self, forward, backward):
        """Draw what leaves the last forward box and what enters the first backward box"""
        y = self.y(self.n_iters - 1, 0.25) - BOX[1] / 2
        for x, text, style in ((COLUMNS[2], forward, "<|-"), (COLUMNS[3], backward, "-|>")):
            self.ax.annotate(text, (x, y), (x, y - 0.45), ha="center", va="center", fontsize=9.5, arrowprops={
                "arrowstyle": style, "color": "#333333", "shrinkA": 0, "shrinkB": 0})

    def arrows(self, *pairs, dashed=False, bend=0.0, across=False):
        """Draw arrows between the edges of boxes, each given by two centers; None: no arrow. bend: below the box
        between. across: first sideways, then upwards"""
        for start, end in (pair for pair in pairs if None not in pair):
            (x0, y0), (x1, y1) = start, end
            level, upright = abs(y1 - y0) < 0.1, abs(x1 - x0) < 0.1
            side = np.sign(x1 - x0) * BOX[0] / 2
            rise = np.sign(y1 - y0) * BOX[1] / 2
            if bend and not upright:                                     # over the box between
                start, end = (x0 + side * 0.6, y0 - BOX[1] / 2), (x1 - side * 0.6, y1 - BOX[1] / 2)
            elif level:
                start, end = (x0 + side, y0), (x1 - side, y1)
            elif upright:
                shift = 0.68 if dashed else 0
                start, end = (x0 + shift, y0 + rise), (x1 + shift, y1 - rise)
            elif across:
                start, end = (x0 + side, y0), (x1, y1 - rise)
            else:
                start, end = (x0, y0 + rise), (x1 - side, y1)
            style = f"arc3,rad={bend if bend and not upright else 0}" if level or upright else (
                f"angle,angleA={0 if across else 90},angleB={90 if across else 0}")
            self.ax.annotate("", end, start, arrowprops={
                "arrowstyle": "-|>", "color": "#333333", "linewidth": 1, "linestyle": "--" if dashed else "-",
                "connectionstyle": style, "shrinkA": 0, "shrinkB": 0})

    def legend(self, votes, terms):
        for x, (color, text) in zip((0.2, 1.5, 3.6, 5.1), ((FORWARD, "forward"), (READS_VOTES, f"reads {votes}"),
                                                          (BACKWARD, "backward"), (TERMS, terms))):
            self.ax.add_patch(FancyBboxPatch((x, self.height - 0.62), 0.22, 0.15, facecolor=color, edgecolor="#555555",
                                             linewidth=0.8, boxstyle="round,pad=0,rounding_size=0.03"))
            self.ax.text(x + 0.3, self.height - 0.55, text, fontsize=9.5, va="center")


def draw_dynamic_routing(n_iters=3):
    """Return the computation graph of routing_forward and routing_backward, a Figure."""
    graph = Graph(n_iters, f"Dynamic routing, {counted(n_iters, 'iteration')}: routing_forward and routing_backward",
                  "The first c is uniform, a constant: no gradient flows into it. Dashed: b and db accumulate.")
    graph.legend("the votes u_hat", "terms of du_hat")
    calls = dynamic_shapes(n_iters)
    shape = {name: [(letters(args[0]), letters(results[0])) for args, results in of] for name, of in calls.items()}
    votes, v, logits = letters(calls["routing_forward"][0][0][0]), None, None
    for t in range(n_iters):                                                            # forward
        v_before, b_before = v, logits if t > 1 else None
        s, after = shape["squash_forward"][t]
        if t:
            b, c = shape["softmax_forward"][t - 1]
            logits = graph.box(0, t, 0.65, f"u_hat . v\nb += {b}", READS_VOTES)
        coupling = graph.box(0, t, 0.25, f"softmax_forward(b)\nc {c}" if t else "1 / J\nc (1, I)", FORWARD)
        total = graph.box(1, t, 0.25, f"sum_i c u_hat\ns {s}", READS_VOTES)
        v = graph.box(2, t, 0.25, f"squash_forward(s)\nv {after}", FORWARD)
        graph.arrows((v_before, logits), (logits, coupling), (coupling, total), (total, v))
        graph.arrows((b_before, logits), dashed=True)
    end = graph.head_box(5, f"sum of all terms\ndu_hat {votes}", TERMS)
    graph.ends("v, to the loss", "dv, from the loss")
    dv = logits = None
    for k, t in enumerate(reversed(range(n_iters))):                                    # backward
        dv_after, db_after = dv, logits
        before, ds = shape["squash_backward"][k]
        squash = graph.box(3, t, 0.25, f"squash_backward(dv)\nds {ds}", BACKWARD)
        term = graph.box(5, t, 0.25, "+ c ds", TERMS)
        graph.arrows((dv_after, squash))
        if not t:
            graph.arrows((squash, term), (term, end))
            break
        dc, db = shape["softmax_backward"][k]
        agreement = graph.box(4, t, 0.25, f"u_hat . ds\ndc {dc}", READS_VOTES)
        logits = graph.box(4, t, 0.65, f"softmax_backward(dc)\ndb += {db}", BACKWARD)
        dv = graph.box(3, t, 0.65, f"sum_i db u_hat\ndv {before}", READS_VOTES)
        other = graph.box(5, t, 0.65, "+ db v, v of the\nprevious iteration", TERMS)
        graph.arrows((squash, agreement), (agreement, logits), (logits, dv), (logits, other), (term, other),
                     (other, (COLUMNS[5], graph.y(t - 1, 0.25))))
        graph.arrows((squash, term), bend=0.25)
        graph.arrows((db_after, logits), dashed=True, bend=-0.3)
    return graph.fig


def draw_em_routing(n_iters=3):
    """Return the computation graph of em_routing_forward and em_routing_backward, a Figure."""
    graph = Graph(n_iters, f"EM routing, {counted(n_iters, 'iteration')}: em_routing_forward and em_routing_backward",
                  "The first R is uniform, a constant: no gradient flows into it. da, dbeta_u and dbeta_a accumulate.")
    graph.legend("the votes V", "terms of dV")
    calls = em_shapes(n_iters)

    def shapes(name, k, part):
        """Return the shapes of the arguments (0) or results (1) of the k-th call, with axis letters; L: positions of
        parents in a batch"""
        return [letters(shape).replace("N", "L") for shape in calls[name][k][part]]
    votes, step = letters(calls["votes_gradient"][0][1][0]).replace("N", "L"), None
    for t in range(n_iters):                                                            # forward
        before = step
        R = shapes("responsibilities_forward", t - 1, 1)[0] if t else "(L, 1, I)"
        mu, sigma2, x = shapes("m_step_forward", t, 1)
        if t:
            found = shapes("e_step_forward", t - 1, 1)[0]
            logits = graph.box(0, t, 0.65, f"e_step_forward\n(mu, sigma2, x)\nlogits {found}", READS_VOTES)
            graph.arrows((before, logits))
        else:
            logits = None
        assignment = graph.box(0, t, 0.25, f"responsibilities_\nforward(logits)\nR {R}" if t else
                               f"1 / parents\nR {R}", FORWARD)
        weight = graph.box(1, t, 0.25, f"R a\nr {R}", FORWARD)
        step = graph.box(2, t, 0.25, f"m_step_forward(r)\nmu, sigma2 {mu}\nx {x}", READS_VOTES)
        graph.arrows((logits, assignment), (assignment, weight), (weight, step))
    end = graph.head_box(5, f"votes_gradient(terms)\ndV {votes}", TERMS)
    graph.ends("mu and a = logistic(x)", "dmu and dx")
    back = None
    for k, t in enumerate(reversed(range(n_iters))):                                    # backward
        after, dr = back, shapes("m_step_backward", k, 1)[0]
        step = graph.box(3, t, 0.25, f"m_step_backward\n(dmu, dsigma2, dx)\ndr {dr}", READS_VOTES)
        term = graph.box(5, t, 0.25, "+ r (dsum_V +\n2 V dsum_V2)", TERMS)
        graph.arrows((after, step), across=True)
        if not t:
            da = graph.box(4, t, 0.25, "sum_j dr R\nda += (L, I)", BACKWARD)
            graph.arrows((step, da), (term, end))
            graph.arrows((step, term), bend=0.25)
            break
        logits = shapes("responsibilities_backward", k, 1)[0]
        dmu, _, dx = shapes("e_step_backward", k, 1)[:3]
        assignment = graph.box(4, t, 0.25, f"responsibilities_\nbackward(dr a)\ndlogits {logits}", BACKWARD)
        back = graph.box(4, t, 0.65, f"e_step_backward\ndmu, dsigma2 {dmu}\ndx {dx}", READS_VOTES)
        other = graph.box(5, t, 0.65, "+ dlogits (linear +\n2 V quadratic)", TERMS)
        graph.arrows((step, assignment), (term, other), (other, (COLUMNS[5], graph.y(t - 1, 0.25))),
                     (assignment, back))
        graph.arrows((step, term), bend=0.25)
        graph.arrows((back, other))
    return graph.fig


FIGURES = {"dynamic_routing": draw_dynamic_routing, "em_routing": draw_em_routing}


@figures.style()
def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--n-iters", type=int, default=3, metavar="N", help="routing iterations (default: 3)")
    parser.add_argument("--outdir", type=Path, default=Path("runs", "routing", "figures"), metavar="DIR",
                        help="folder for the figures (default: %(default)s)")
    args = parser.parse_args()
    if not 1 <= args.n_iters <= 5:
        raise InputError(f"--n-iters {args.n_iters}: must be between 1 and 5")
    make_outdir(args.outdir, FIGURES)
    for name, draw in FIGURES.items():
        figures.write_figure(draw(args.n_iters), args.outdir / f"{name}.png")


if __name__ == "__main__":
    run_cli(main)
