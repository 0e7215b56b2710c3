#!/usr/bin/env python3
"""Write the test vectors conformance/*.json: inputs and expected values (float64) for capsule layers in any language.

    python3 conformance/make.py [--outdir conformance]

Each file holds the formula and its equation, the axes of every array, the inputs (at most six decimals, so that they
are exact in any language) and the expected values with 12 significant digits, as nested lists. The values come from the
experiments' own functions, with every epsilon at 1e-60; conformance/tests/test_vectors.py computes them again with the
plain loops of literal.py, which share no code with those functions. docs/reference/conformance.md says how to use the
files.
"""
import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import multimnist_capsnet as capsnet  # before numpy: it sets the number of BLAS threads
import smallnorb_novel_viewpoint as norb
from lab.files import write_atomically
from lab.messages import InputError

import numpy as np
from capsule_conformance import reference
from capsule_conformance.kinds import KINDS

PAPER = {2017: "Sabour, Frosst and Hinton 2017, Dynamic routing between capsules",
         2018: "Hinton, Sabour and Frosst 2018, Matrix capsules with EM routing"}
AXES = {"n": "sample", "i": "input capsule (child)", "j": "output capsule (parent)", "k": "class", "p": "pixel",
        "d": "entry of an input capsule", "e": "entry of an output capsule", "t": "iteration",
        "h": "entry of a pose matrix, row by row"}


def draw(seed, *shape, low=-1.0, high=1.0):
    """Return uniform random numbers with four decimals."""
    return np.round(np.random.default_rng(seed).uniform(low, high, shape), 4)


def plain(x):
    """Return arrays as nested lists, and every number with 12 significant digits."""
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(x, (list, tuple, np.ndarray)):
        return [plain(item) for item in x]
    return int(x) if isinstance(x, (int, np.integer)) else float(f"{x:.12g}")


def votes_last(u_hat):
    """Exchange input and output capsules: ours are (N, J, I, E), those of the files are [n][i][j][e]."""
    return np.ascontiguousarray(np.swapaxes(u_hat, 1, 2))


# ---- 2017 ----

def squash_vectors():
    s, g = draw(1, 4, 6, low=-1.5, high=1.5), draw(2, 4, 6)
    s[3] = 0                                                   # 0 / 0 in Eq. 1 as printed; the limit is 0
    v, cache = capsnet.squash_forward(s)
    return dict(formula="v = |s|^2 / (1 + |s|^2) * s / |s|; 0 at s = 0", equation="Eq. 1", paper=2017,
                axes={"s": "je", "v": "je", "g": "je", "ds": "je"}, inputs={"s": s, "g": g},
                expected={"v": v, "ds": capsnet.squash_backward(g, cache)},
                gradients="ds is the gradient of sum(v * g) with respect to s")


def vote_vectors():
    u, W, g = draw(3, 3, 7, 4), draw(4, 7, 5, 6, 4), draw(5, 3, 7, 5, 6)
    u_hat, cache = capsnet.votes_forward(u, W.transpose(0, 3, 1, 2))
    du, dW = capsnet.votes_backward(votes_last(g), cache)
    return dict(formula="u_hat_j|i = W_ij u_i", equation="Eq. 2, right part", paper=2017,
                axes={"u": "nid", "W": "ijed", "u_hat": "nije", "g": "nije", "du": "nid", "dW": "ijed"},
                inputs={"u": u, "W": W, "g": g},
                expected={"u_hat": votes_last(u_hat), "du": du, "dW": dW.transpose(0, 2, 3, 1)},
                gradients="du and dW are the gradients of sum(u_hat * g)")


def dynamic_routing_vectors():
    u_hat, g = draw(6, 3, 7, 5, 4, low=-1.2, high=1.2), draw(7, 3, 5, 4)
    iterations = []
    for n_iters in (1, 2, 3):
        v, cache = capsnet.routing_forward(votes_last(u_hat), n_iters)
        c, _, v_cache = cache[1][-1]                        # of the last iteration
        ds = capsnet.squash_backward(g, v_cache)               # all of the gradient that is left, if c is a constant
        c = np.broadcast_to(c, (3, 5, 7)) if n_iters > 1 else np.full((3, 5, 7), 1 / 5)
        iterations.append({"n_iters": n_iters, "c": c.transpose(0, 2, 1), "v": v,
                           "du_hat": votes_last(capsnet.routing_backward(g, cache)),
                           "du_hat_constant_couplings": np.einsum("nji,nje->nije", c, ds)})
    return dict(formula="b = 0; in every iteration c_ij = softmax_j(b_ij), s_j = sum_i c_ij u_hat_j|i, "
                "v_j = squash(s_j), b_ij += u_hat_j|i . v_j", equation="Procedure 1", paper=2017,
                axes={"u_hat": "nije", "g": "nje", "c": "nij", "v": "nje", "du_hat": "nije",
                      "du_hat_constant_couplings": "nije"},
                inputs={"u_hat": u_hat, "g": g}, expected={"iterations": iterations},
                gradients="du_hat is the gradient of sum(v * g) through all iterations, which is the paper's; "
                "du_hat_constant_couplings is what is left of it if the coupling coefficients are constants. c and v "
                "are those of the last of n_iters iterations.")


def margin_loss_vectors():
    lengths = draw(8, 3, 5, low=0.0, high=1.0)
    lengths[0, 0], lengths[1, 2] = 0.95, 0.05                  # inside the margins: no loss
    present = np.array([[1, 0, 0, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 1]])
    loss, dlengths = capsnet.margin_loss(lengths, present)
    short, long = np.maximum(0, 0.9 - lengths), np.maximum(0, lengths - 0.1)
    softmaxed = np.exp(lengths) / np.exp(lengths).sum(1, keepdims=True)
    return dict(formula="L_k = T_k max(0, 0.9 - |v_k|)^2 + 0.5 (1 - T_k) max(0, |v_k| - 0.1)^2; L is summed over the "
                "classes k and averaged over the samples", equation="Eq. 4", paper=2017,
                axes={"lengths": "nk", "present": "nk", "dlengths": "nk"},
                inputs={"lengths": lengths, "present": present}, expected={"loss": loss, "dlengths": dlengths},
                gradients="dlengths is the gradient of the loss",
                mistakes={"without squares": float((present * short + 0.5 * (1 - present) * long).sum()) / 3,
                          "averaged over the classes": loss / 5, "without the factor 0.5": float(
                              (present * short ** 2 + (1 - present) * long ** 2).sum()) / 3,
                          "lengths squared": capsnet.margin_loss(lengths ** 2, present)[0],
                          "lengths softmaxed": capsnet.margin_loss(softmaxed, present)[0]})


def reconstruction_vectors():
    v, labels = draw(9, 3, 5, 4), np.array([4, 0, 2])
    reconstructed, images = draw(10, 3, 6, low=0.0), draw(11, 3, 6, low=0.0)
    loss, dreconstructed = capsnet.reconstruction_loss(reconstructed, images)
    return dict(formula="the decoder's input is v with all capsules but the labeled one set to 0; the loss is the sum "
                "of squared differences of a sample's pixels, averaged over the samples; it enters the total with the "
                "weight 0.0005", equation="Section 4.1", paper=2017,
                axes={"v": "nje", "labels": "n", "masked": "nje", "reconstructed": "np", "images": "np",
                      "dreconstructed": "np"},
                inputs={"v": v, "labels": labels, "reconstructed": reconstructed, "images": images},
                expected={"masked": v * np.eye(v.shape[1])[labels][..., None], "loss": loss,
                          "dreconstructed": dreconstructed},
                gradients="dreconstructed is the gradient of the unweighted loss",
                mistakes={"averaged over the pixels": loss / 6})


# ---- 2018 ----

def em_forward(V, a, beta_u, beta_a, lambdas):
    """Compute EM routing as in the paper: beta_a inside lambda, mass factor 1. V: (N, J, I, H). Return the steps."""
    R, steps, e_cache, R_cache = np.full(V[..., 0].shape, 1 / V.shape[1]), [], None, None
    for t, lambda_ in enumerate(lambdas):
        if t:
            logits, e_cache = norb.e_step_forward(V, *steps[-1][1])
            R, R_cache = norb.responsibilities_forward(logits, None)
        outputs, m_cache = norb.m_step_forward(V, R * a[:, None], beta_u, lambda_ * beta_a, lambda_, 1)
        steps.append((R, outputs, m_cache, e_cache, R_cache))
    return steps


def em_backward(dmu, dx, a, lambdas, steps):
    """Return the gradients of V, a, beta_u and beta_a, from those of the last mu and logit x."""
    V, dsigma2, terms, da, dbeta_u, dbeta_a = steps[0][2].V, 0, [], 0, 0, 0
    for t in reversed(range(len(steps))):
        R, _, m_cache, e_cache, R_cache = steps[t]
        term, dr, dbeta_u_t, dbeta_a_t = norb.m_step_backward(dmu, dsigma2, dx, m_cache)
        da = da + (dr * R).sum(1)
        dbeta_u, dbeta_a = dbeta_u + dbeta_u_t, dbeta_a + lambdas[t] * dbeta_a_t
        terms.append(term)
        if t:
            dlogits = norb.responsibilities_backward(dr * a[:, None], R_cache)
            term, dmu, dsigma2, dx = norb.e_step_backward(dlogits, e_cache)
            terms.append(term)
    return norb.votes_gradient(terms, V), da, dbeta_u, dbeta_a


def em_routing_vectors():
    H, lambdas = 16, [0.02, 0.035, 0.05]
    V = np.round(draw(12, 2, 5, 1, H) + 0.2 * draw(18, 2, 5, 3, H), 4)   # alike for all parents, so that they compete
    a = draw(13, 2, 5, low=0.1)
    beta_u, beta_a = draw(14, 3), draw(15, 3)
    g_mu, g_a = draw(16, 2, 3, H), draw(17, 2, 3)
    iterations = []
    for n_iters in (1, 2, 3):
        steps = em_forward(votes_last(V), a, beta_u, beta_a, lambdas[:n_iters])
        R, (mu, sigma2, x) = steps[-1][:2]
        activation = norb.sigmoid(x)
        dV, da, dbeta_u, dbeta_a = em_backward(g_mu, g_a * activation * (1 - activation), a, lambdas, steps)
        iterations.append({"n_iters": n_iters, "R": R.transpose(0, 2, 1), "mu": mu, "sigma2": sigma2,
                           "a_out": activation, "dV": votes_last(dV), "da": da, "dbeta_u": dbeta_u, "dbeta_a": dbeta_a})
    return dict(formula="R_ij = 1 / J; in every iteration r_ij = R_ij a_i, mu_jh = sum_i r_ij V_ijh / sum_i r_ij, "
                "sigma2_jh = sum_i r_ij (V_ijh - mu_jh)^2 / sum_i r_ij, cost_jh = (beta_u_j + log sigma_jh) sum_i "
                "r_ij, a_j = logistic(lambda (beta_a_j - sum_h cost_jh)); between two iterations R_ij = a_j p_j(V_ij) "
                "/ sum_k a_k p_k(V_ij), where p_j is the normal density of mean mu_j and diagonal covariance sigma2_j",
                equation="Procedure 1", paper=2018,
                axes={"V": "nijh", "a": "ni", "beta_u": "j", "beta_a": "j", "lambdas": "t", "g_mu": "njh", "g_a": "nj",
                      "R": "nij", "mu": "njh", "sigma2": "njh", "a_out": "nj", "dV": "nijh", "da": "ni",
                      "dbeta_u": "j", "dbeta_a": "j"},
                inputs={"V": V, "a": a, "beta_u": beta_u, "beta_a": beta_a, "lambdas": lambdas, "g_mu": g_mu,
                        "g_a": g_a},
                expected={"iterations": iterations},
                gradients="dV, da, dbeta_u and dbeta_a are the gradients of sum(mu * g_mu) + sum(a_out * g_a), through "
                "all iterations. R, mu, sigma2 and a_out are those of the last of n_iters iterations, which use the "
                "first n_iters of lambdas.")


def spread_loss_vectors():
    a, labels, m = draw(21, 3, 5, low=0.0), np.array([1, 4, 0]), 0.5
    loss, da = norb.spread_loss(a, labels, m)
    return dict(formula="L = sum_{i != t} max(0, m - (a_t - a_i))^2, averaged over the samples", equation="Eq. 3",
                paper=2018, axes={"a": "nk", "labels": "n", "da": "nk"}, inputs={"a": a, "labels": labels, "m": m},
                expected={"loss": loss, "da": da}, gradients="da is the gradient of the loss")


def matrix_vote_vectors():
    M, W = draw(19, 2, 6, 4, 4), draw(20, 6, 3, 4, 4)
    positions = np.array([[(row + 0.5) / 2, (column + 0.5) / 4] for row in range(2) for column in range(3)])
    V = np.stack([norb.pose_votes_forward(M[:, i].reshape(1, 2, 16), W[i][None])[0][0] for i in range(6)], 1)
    added = V.copy()
    added[..., 3] += positions[:, 0, None]                     # row 0 and row 1 of the right-hand column
    added[..., 7] += positions[:, 1, None]
    return dict(formula="V_ij = M_i W_ij (not W_ij M_i); coordinate addition adds the scaled row of the center of "
                "child i's receptive field to the first entry of the right-hand column of V_ij, and the scaled column "
                "to the second",
                equation="Section 2 and Section 4", paper=2018,
                axes={"M": "ni44", "W": "ij44", "positions": "i2", "V": "nijh", "V_with_coordinates": "nijh"},
                inputs={"M": M, "W": W, "positions": positions}, expected={"V": V, "V_with_coordinates": added})


GROUPS = (("Dynamic routing", 0, 14), ("Primary capsules", 14, 18), ("Losses and decoder", 18, 24),
          ("EM routing", 24, None))


def escaped(cell):
    """Return the text of a table's cell with its vertical bars escaped."""
    return cell.replace("|", "\\|")


def kinds_tables():
    """Return kinds.py as Markdown, one table for each part of a capsule network."""
    lines = []
    for title, start, stop in GROUPS:
        lines += [f"### {title}", "", "| kind | found in | what is computed | in training | finite differences "
                  "show it |", "|---|---|---|---|---|"]
        for name, description, symptom, shown, n in KINDS[start:stop]:
            cells = (name.removeprefix("EM: "), str(n), description, symptom, shown)
            lines.append(f"| {' | '.join(map(escaped, cells))} |")
        lines.append("")
    named = {kind[0] for kind in KINDS}
    others = {mistake.name: mistake for mistake in reversed((
        *reference.ROUTING, *reference.NOTHING_ROUTED[:1], *reference.per_position(4), *reference.STOPS,
        *reference.MARGIN, *reference.SPREAD, *reference.EM)) if mistake.name not in named}
    lines += ["### Other mistakes", "", "The check names these, too. The survey did not count them.",
              "", "| kind | what is computed |", "|---|---|"]
    lines += [f"| {name.removeprefix('EM: ')} | {escaped(others[name].what)} |" for name in reversed(others)]
    lines.append("")
    return "\n".join(lines).rstrip()


FILES = {"squash": squash_vectors, "votes": vote_vectors, "dynamic_routing": dynamic_routing_vectors,
         "margin_loss": margin_loss_vectors, "reconstruction": reconstruction_vectors, "em_routing": em_routing_vectors,
         "spread_loss": spread_loss_vectors, "matrix_votes": matrix_vote_vectors}


def make(name):
    """Return the text of one file. The experiments' epsilons are 1e-60 meanwhile: far below rounding, yet not 0 / 0."""
    epsilons = [(capsnet, "SQUASH_EPS"), (norb, "SIGMA2_EPS"), (norb, "MASS_EPS")]
    kept = [getattr(module, constant) for module, constant in epsilons]
    try:
        for module, constant in epsilons:
            setattr(module, constant, 1e-60)
        vectors = FILES[name]()
    finally:
        for (module, constant), value in zip(epsilons, kept):
            setattr(module, constant, value)
    vectors["paper"] = PAPER[vectors["paper"]]
    used = sorted(set("".join(vectors["axes"].values())) & set(AXES))
    vectors["axes"] = {name: "".join(f"[{axis}]" for axis in order) for name, order in vectors["axes"].items()}
    vectors["axis letters"] = {axis: AXES[axis] for axis in used}
    order = ("formula", "paper", "equation", "axis letters", "axes", "inputs", "expected", "gradients", "mistakes")
    vectors |= {key: plain(vectors[key]) for key in ("inputs", "expected", "mistakes") if key in vectors}
    lines = [f"{json.dumps(key)}: {json.dumps(vectors[key])}" for key in order if key in vectors]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outdir", default=str(HERE), metavar="DIR", help="folder to write to (default: conformance/)")
    outdir = Path(parser.parse_args(argv).outdir)
    texts = {name: make(name) for name in FILES}
    try:
        outdir.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(outdir / f"{name}.json", lambda file, text=text: file.write(text.encode()))
    except (OSError, InputError) as error:
        fault = getattr(error, "strerror", error)
        parser.exit(2, f"error: --outdir {outdir}: {fault}. Give a folder that can be written to\n")
    print(f"wrote {len(texts)} files to {outdir}")


if __name__ == "__main__":
    main()
