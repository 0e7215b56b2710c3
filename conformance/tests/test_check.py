"""conformance/check.py names the mistakes of functions that were written without it, and passes the right ones."""
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from capsule_conformance import calls, check, command, naming, reference

from conformance import literal

ROOT = Path(__file__).resolve().parents[2]
VECTORS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "conformance").glob("*.json")}

# functions as people write them; a mistake is a change of their text
ROUTE = '''
import numpy as np

def squash(s, axis=-1):
    square = (s * s).sum(axis, keepdims=True)
    return s * np.sqrt(square) / (1 + square)

def route(u_hat, n_iters):
    b = np.zeros(u_hat.shape[:3])
    for t in range(n_iters):
        c = np.exp(b) / np.exp(b).sum(2, keepdims=True)
        s = (c[..., None] * u_hat).sum(1)
        v = squash(s)
        b = b + (u_hat * v[:, None]).sum(-1)
    return v
'''
ROUTE_MISTAKES = {
    "softmax over input capsules": [("sum(2,", "sum(1,")],
    "softmax over the batch": [("sum(2,", "sum(0,")],
    "logistic function in place of the softmax": [("np.exp(b) / np.exp(b).sum(2, keepdims=True)",
                                                   "1 / (1 + np.exp(-b))")],
    "votes averaged over input capsules": [("u_hat).sum(1)", "u_hat).mean(1)")],
    "agreement subtracted": [("b = b + ", "b = b - ")],
    "logits averaged over the batch": [(".sum(-1)\n", ".sum(-1).mean(0)\n")],
    "logits summed over the batch": [(".sum(-1)\n", ".sum(-1).sum(0)\n")],
    "logits not accumulated": [("b = b + ", "b = ")],
    "one iteration more": [("range(n_iters)", "range(n_iters + 1)")],
    "one iteration fewer": [("range(n_iters)", "range(max(n_iters - 1, 1))")],
    "squash of each component": [("square = (s * s).sum(axis, keepdims=True)", "square = s * s")],
    "squash over output capsules": [("squash(s)", "squash(s, axis=1)")],
    "squash over the batch": [("squash(s)", "squash(s, axis=0)")],
    "squash with 0.5 in place of 1": [("(1 + square)", "(0.5 + square)")],
    "squash without the square": [("s * np.sqrt(square) / (1 + square)", "s / (1 + np.sqrt(square))")],
    "squash with the square below only": [("s * np.sqrt(square) / (1 + square)", "s / (1 + square)")],
    "squash not divided by the length": [("np.sqrt(square)", "square")],
    "final squash missing": [("return v", "return s")],
    "squash in the last iteration only": [("* v[:", "* s[:")],
    "logits kept from the batch before": [("b = np.zeros", "b = KEPT.pop() if KEPT else np.zeros"),
                                          ("    return v", "    KEPT.append(b)\n    return v"),
                                          ("def route", "KEPT = []\n\ndef route")],
    "initial logits trained per batch slot": [("b = np.zeros(u_hat.shape[:3])", "b = np.zeros(u_hat.shape[:3]) + "
                                               "np.random.default_rng(0).normal(size=u_hat.shape[:3])")],
    "bias in the output capsules": [(".sum(1)\n", ".sum(1) + 0.1\n")],
    "no epsilon in the squash, forward": [("s * np.sqrt(square) / (1 + square)",
                                           "square / (1 + square) * s / np.sqrt(square)")],
    "leaky routing": [("np.exp(b).sum(2, keepdims=True)", "(1 + np.exp(b).sum(2, keepdims=True))")],
    "logits divided by the square root of the dimension": [("b = b + (u_hat * v[:, None]).sum(-1)",
                                                            "b = b + (u_hat * v[:, None]).sum(-1) / 6 ** 0.5")],
    "logits divided by their maximum": [(".sum(-1)\n    return", ".sum(-1)\n        b = b / b.max(2, keepdims=True)\n"
                                         "    return")],
    "agreement with the direction of v": [
        ("u_hat * v[:, None]", "u_hat * (v / np.sqrt((v * v).sum(-1, keepdims=True) + 1e-30))[:, None]")],
    "cosine in place of the agreement": [("(u_hat * v[:, None])", "(unit(u_hat) * unit(v)[:, None])"),
                                        ("def route", "def unit(x):\n    return x / np.sqrt((x * x).sum(-1, "
                                         "keepdims=True) + 1e-30)\n\ndef route")],
    "unit vector in place of the squash": [("s * np.sqrt(square) / (1 + square)", "s / np.sqrt(square + 1e-12)")],
    "exponential in the squash": [("s * np.sqrt(square) / (1 + square)",
                                   "s / np.sqrt(square + 1e-20) * (1 - 1 / np.exp(np.sqrt(square)))")],
    "Something is random": [("b = np.zeros(u_hat.shape[:3])", "b = np.random.normal(size=u_hat.shape[:3])")],
}
EM = '''
import numpy as np

def em_route(V, a, beta_u, beta_a, lambdas):
    R = np.full(V.shape[:3], 1 / V.shape[2])
    for lambda_ in lambdas:
        r = R * a[:, :, None]
        mass = r.sum(1)
        mu = (r[..., None] * V).sum(1) / mass[..., None]
        square = (V - mu[:, None]) ** 2
        sigma2 = (r[..., None] * square).sum(1) / mass[..., None] + 1e-6
        cost = ((beta_u[:, None] + np.log(sigma2) / 2) * mass[..., None]).sum(-1)
        a_out = 1 / (1 + np.exp(-lambda_ * (beta_a - cost)))
        p = np.exp(-(square / (2 * sigma2[:, None])).sum(-1)) / np.sqrt(sigma2).prod(-1)[:, None]
        ap = a_out[:, None] * p
        R = ap / ap.sum(2, keepdims=True)
    return mu, a_out
'''
EM_MISTAKES = {
    "EM: children's activations cancel": [("mass = r.sum(1)", "r = r / r.sum(2, keepdims=True); mass = r.sum(1)")],
    "EM: floor under the weights of children": [("R * a[:, :, None]", "np.maximum(R * a[:, :, None], 0.01)")],
    "EM: wrong exponent of the density": [("(2 * sigma2", "(4 * sigma2")],
    "EM: density without 1 / sigma": [(" / np.sqrt(sigma2).prod(-1)[:, None]", "")],
    "EM: log of the variance in the cost": [("np.log(sigma2) / 2", "np.log(sigma2)")],
    "EM: mass factor in the cost": [("* mass[..., None])", "* mass[..., None] * V.shape[2] / V.shape[1])")],
    "EM: mass missing in the cost": [(" * mass[..., None]).sum(-1)", ").sum(-1)")],
    "EM: log sigma subtracted in the cost": [("+ np.log(sigma2) / 2", "- np.log(sigma2) / 2")],
    "EM: variance around 0": [("(r[..., None] * square).sum(1)", "(r[..., None] * V ** 2).sum(1)")],
    "EM: cost added": [("(beta_a - cost)", "(beta_a + cost)")],
    "EM: last lambda in all iterations": [("-lambda_ *", "-lambdas[-1] *")],
    "EM: first lambda in all iterations": [("-lambda_ *", "-lambdas[0] *")],
    "EM: beta_u once per parent": [("((beta_u[:, None] + np.log(sigma2) / 2) * mass[..., None]).sum(-1)",
                                    "((np.log(sigma2) / 2).sum(-1) + beta_u) * mass")],
    "EM: softmax in place of the logistic": [("a_out = 1 / (1 + np.exp(-lambda_ * (beta_a - cost)))",
                                              "e = np.exp(lambda_ * (beta_a - cost)); a_out = e / e.sum(1)[:, None]")],
    "EM: activation missing in the E-step": [("ap = a_out[:, None] * p", "ap = p")],
    "EM: assignments normalized over the children": [("ap.sum(2,", "ap.sum(1,")],
    "EM: initial assignments not divided": [("1 / V.shape[2])", "1.0)")],
    "EM: lambda multiplies the cost alone": [("-lambda_ * (beta_a - cost)", "lambda_ * cost - beta_a")],
    "EM: lambda missing": [("-lambda_ * (beta_a", "-(beta_a")],
    "EM: one iteration more": [("in lambdas:", "in [*lambdas, lambdas[-1]]:")],
    "EM: one iteration fewer": [("in lambdas:", "in lambdas[:max(len(lambdas) - 1, 1)]:")],
    "EM: no epsilon on the variance": [(" + 1e-6", "")],
    "EM: cost standardized over the parents": [
        ("(beta_a - cost)", "(beta_a + (cost.mean(1)[:, None] - cost) / (cost.std(1)[:, None] + 1e-7))")],
    "EM: one beta_u for all parents": [("beta_u[:, None]", "beta_u[0]")],
    "EM: one beta_a for all parents": [("beta_a - cost", "beta_a.mean() - cost")],
}
SPREAD = '''
import numpy as np

def spread(a, labels, m):
    true = a[np.arange(len(a)), labels][:, None]
    short = np.maximum(0, m - (true - a))
    short[np.arange(len(a)), labels] = 0
    return (short ** 2).sum(1).mean()
'''
SPREAD_MISTAKES = {
    "spread loss without squares": [("short ** 2", "short")],
    "spread loss without max": [("np.maximum(0, m - (true - a))", "m - (true - a)")],
    "true class in the spread loss": [("    short[np.arange(len(a)), labels] = 0\n", "")],
    "spread loss averaged over classes": [(".sum(1).mean()", ".mean()")],
    "spread loss averaged over the other classes": [(".sum(1).mean()", ".sum(1).mean() / (a.shape[1] - 1)")],
    "largest term of the spread loss alone": [(".sum(1).mean()", ".max(1).mean()")],
    "square of the sum in the spread loss": [("(short ** 2).sum(1)", "(short.sum(1) ** 2)")],
    "spread loss halved": [("return (", "return 0.5 * (")],
    "difference reversed in the spread loss": [("(true - a)", "(a - true)")],
    "spread loss of softmaxed activations": [("    true =", "    a = np.exp(a) / np.exp(a).sum(1)[:, None]\n"
                                              "    true =")],
}
LOSS = '''
import numpy as np

def loss(lengths, present):
    short, long = np.maximum(0, 0.9 - lengths), np.maximum(0, lengths - 0.1)
    return (present * short ** 2 + 0.5 * (1 - present) * long ** 2).sum(1).mean()
'''
LOSS_MISTAKES = {
    "margin loss without squares": [("short ** 2", "short"), ("long ** 2", "long")],
    "margin loss of softmaxed lengths": [("    short, ", "    lengths = np.exp(lengths)\n    lengths = lengths / "
                                          "lengths.sum(1, keepdims=True)\n    short, ")],
    "margin loss of squared lengths": [("    short, ", "    lengths = lengths ** 2\n    short, ")],
    "margin loss averaged over classes": [(".sum(1).mean()", ".mean()")],
    "margin loss halved": [("return (", "return 0.5 * (")],
    "absent classes not down-weighted": [("0.5 * (1", "(1")],
    "factor 0.5 squared": [("0.5 * (1 - present) * long ** 2", "(0.5 * (1 - present) * long) ** 2")],
    "present classes down-weighted": [("(present * ", "(0.5 * present * "), ("0.5 * (1", "(1")],
    "margin loss without max": [("np.maximum(0, 0.9 - lengths)", "0.9 - lengths"),
                                ("np.maximum(0, lengths - 0.1)", "lengths - 0.1")],
    "margins 1 and 0": [("0.9", "1.0"), ("0.1", "0.0")],
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that checks a source text and returns the exit code and what was printed."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(source, *flags, name="mine", changes=()):
        for old, new in changes:
            assert old in source, old
            source = source.replace(old, new)
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        function = re.findall(r"^def (\w+)", source, re.M)[-1]
        code = command.main([f"{tmp_path / name}.py:{function}", *flags])
        sys.modules.pop(name, None)
        printed = capsys.readouterr()
        return code, printed.out + printed.err
    return run


def named(text):
    """Return the names of the mistakes in a report."""
    return re.findall(r"^\* ([^\n]+)", text, re.M)


CASES = {"margin-loss": (1,), "spread-loss": check.MARGINS}


# ---- the reference ----

def nearly(found, expected, tolerance=1e-11):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1e-3))


def test_reference_reproduces_the_test_vectors():
    x, expected = ({name: np.array(value) for name, value in VECTORS[file][part].items()} for file, part in (
        ("dynamic_routing", "inputs"), ("dynamic_routing", "expected")))
    direction = np.random.default_rng(0).normal(size=x["u_hat"].shape)
    for entry in VECTORS["dynamic_routing"]["expected"]["iterations"]:
        nearly(reference.dynamic_routing(x["u_hat"], entry["n_iters"]), entry["v"])
        for stop, gradient in (("", "du_hat"), ("couplings", "du_hat_constant_couplings")):
            slope = reference.derivative(lambda u_hat, n=entry["n_iters"], stop=stop: (
                reference.dynamic_routing(u_hat, n, stop=stop) * x["g"]).sum(), x["u_hat"], direction)
            nearly(slope, (np.array(entry[gradient]) * direction).sum(), 1e-9)
    x = {name: np.array(value) for name, value in VECTORS["margin_loss"]["inputs"].items()}
    nearly(reference.margin_loss(**x).mean(), VECTORS["margin_loss"]["expected"]["loss"])
    x = {name: np.array(value) for name, value in VECTORS["em_routing"]["inputs"].items()}
    for entry in VECTORS["em_routing"]["expected"]["iterations"]:
        mu, a = reference.em_routing(x["V"], x["a"], x["beta_u"], x["beta_a"], x["lambdas"][:entry["n_iters"]])
        nearly(mu, entry["mu"])
        nearly(a, entry["a_out"])
        slope = reference.derivative(lambda beta_u, n=entry["n_iters"]: sum((y * g).sum() for y, g in zip(
            reference.em_routing(x["V"], x["a"], beta_u, x["beta_a"], x["lambdas"][:n]), (x["g_mu"], x["g_a"]))),
            x["beta_u"], np.array([1.0, -2.0, 0.5]))
        nearly(slope, np.array(entry["dbeta_u"]) @ [1.0, -2.0, 0.5], 1e-8)


def test_the_spread_loss_agrees_with_the_loops_and_by_hand():
    x = {name: np.array(value) for name, value in VECTORS["spread_loss"]["inputs"].items()}
    present = np.eye(x["a"].shape[1])[x["labels"].astype(int)]
    nearly(reference.spread_loss(x["a"], present, x["m"]).mean(), VECTORS["spread_loss"]["expected"]["loss"])
    # m = 0.5, a_t = 0.9: 0.8 is 0.4 too near, 0.5 is 0.1, and 0.1 is far enough
    loss = reference.spread_loss(np.array([[0.8, 0.9, 0.5, 0.1]]), np.array([[0, 1, 0, 0]]), 0.5)
    assert loss == pytest.approx([0.16 + 0.01])


def test_a_softmax_per_position_by_hand():
    # four output capsules: two positions of two types each, neighbors or apart
    b = np.log(np.array([1.0, 3.0, 1.0, 1.0])).reshape(1, 1, 4)
    nearly(reference.couplings(b, (2, 2)), [[[0.25, 0.75, 0.5, 0.5]]])
    nearly(reference.couplings(b, (-2, 2)), [[[0.5, 0.75, 0.5, 0.25]]])
    nearly(reference.couplings(b, "leaky"), [[[1 / 7, 3 / 7, 1 / 7, 1 / 7]]])
    assert len(reference.per_position(6)) == 4 and not reference.per_position(5)


def test_a_stopped_gradient_by_hand():
    # one input capsule, two outputs, one entry, votes 1 and 2: with v constant in the agreement, b_j = u_j v_j has the
    # derivative v_j; with the votes constant, u_j dv_j/du_j. Both together make the whole.
    u_hat, d = np.array([[[[1.0], [2.0]]]]), np.array([[[[1.0], [0.0]]]])

    def slope(stop):
        return reference.derivative(lambda x: reference.dynamic_routing(x, 2, stop=stop).sum(), u_hat, d)
    whole, couplings, v, votes = (slope(stop) for stop in ("", "couplings", "v", "votes"))
    assert whole - couplings == pytest.approx((v - couplings) + (votes - couplings))
    # first iteration: s = 1/2, 1; v = (1/4) / (5/4) = 1/5, 1/2. c_1 = 1 / (1 + exp(2 * 1/2 - 1 * 1/5)), dc_1/db_1 =
    # c_1 c_2, and the outputs are squash(c_1 1) and squash(c_2 2), of slope 2 s / (1 + s^2)^2
    c = 1 / (1 + np.exp(0.8))
    s = np.array([c, 2 * (1 - c)])
    rate = 2 * s / (1 + s * s) ** 2
    assert couplings == pytest.approx(rate[0] * c)
    assert v - couplings == pytest.approx(c * (1 - c) * (rate[0] - 2 * rate[1]) / 5)


# lengths of sample 0 of the probe P in docs/reference/conformance.md, computed by other code
P = np.array([[[[0.6, 0.8], [1.2, -1.6]]], [[[1.2, 1.6], [0.6, -0.8]]]])


@pytest.mark.parametrize(("name", "lengths"), [
    (None, (0.0134, 0.7573)), ("softmax over input capsules", (0.5, 0.8)),
    ("logits averaged over the batch", (0.2, 0.5)),
    ("logits not accumulated", (0.0491, 0.7049)), ("one iteration more", (0.0008, 0.7905)),
    ("one iteration fewer", (0.0877, 0.6557)), ("squash of each component", (0.0091, 0.8546)),
    ("squash over output capsules", (0.0628, 0.8404)), ("final squash missing", (0.1167, 1.7665))])
def test_switches_give_the_lengths_of_the_survey(name, lengths):
    settings = next((m.settings for m in reference.ROUTING if m.name == name), {})
    v = reference.dynamic_routing(P, 3, **settings)
    assert np.linalg.norm(v[0], axis=-1) == pytest.approx(lengths, abs=6e-5)


@pytest.mark.parametrize(("kind", "mistakes"), [("dynamic", reference.ROUTING), ("em", reference.EM),
                                                ("margin-loss", reference.MARGIN),
                                                ("spread-loss", reference.SPREAD)])
def test_sets_of_up_to_three_mistakes_are_told_apart(kind, mistakes):
    """Sets that compute the same differ by less than 1e-12, all others by 1e-8. Of sets of three: a third of them"""
    x = check.probe(kind, check.calls.SIZES)
    cases, rng, sets = CASES.get(kind, (1, 2, 3)), np.random.default_rng(0), reference.combinations(mistakes)
    assert any(len(chosen) == 3 for chosen in sets)
    sets = [chosen for k, chosen in enumerate(sets) if len(chosen) < 3 or "loss" in kind or k % 3 == 0]
    mixed, rows = {}, []                                       # 8 random sums of the outputs of every case
    for chosen in sets:
        row = []
        for n in cases:
            with np.errstate(all="ignore"):
                y = check.expected(kind, x, n, [0.02, 0.035, 0.05], **reference.settings_of(chosen))
            y = None if y is None else np.concatenate([np.ravel(part) for part in y])
            if n not in mixed:
                mixed[n] = rng.normal(size=(8, len(y))) / len(y) ** 0.5
            row.append(np.full(8, np.nan) if y is None else mixed[n] @ y)
        rows.append(np.concatenate(row))
    rows = np.array(rows)
    close = same = 0
    for k in range(len(rows) - 1):
        gaps = np.nanmax(np.abs(rows[k + 1:] - rows[k]), axis=1)
        assert not ((gaps > 1e-12) & (gaps < 1e-8)).any(), sets[k]
        close, same = close + (gaps < 1e-3).sum(), same + (gaps <= 1e-12).sum()
    n_pairs = len(rows) * (len(rows) - 1) / 2
    assert same < 0.005 * n_pairs and close - same < 0.01 * n_pairs
    singles = [k for k, chosen in enumerate(sets) if len(chosen) <= 1]
    assert all(np.nanmax(np.abs(rows[i] - rows[j])) > 1e-4 for i in singles for j in singles if i < j)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mistakes"), [("dynamic", reference.ROUTING), ("em", reference.EM),
                                                ("margin-loss", reference.MARGIN),
                                                ("spread-loss", reference.SPREAD)])
def test_every_set_is_named_or_one_that_computes_the_same(kind, mistakes):
    x, cases = check.probe(kind, check.calls.SIZES), CASES.get(kind, (1, 2, 3))

    def predict(settings, n):
        return check.expected(kind, x, n, [0.02, 0.035, 0.05], **settings)
    sets = reference.combinations(mistakes)
    for chosen in sets[::40 if kind == "em" else 10] + sets[:len(mistakes) + 1]:
        with np.errstate(all="ignore"):
            found = {n: y for n in cases if (y := predict(reference.settings_of(chosen), n)) is not None}
        if not all(np.isfinite(part).all() for y in found.values() for part in y):
            continue
        matches, worst = naming.explain(found, predict, mistakes, 1e-9)
        assert worst <= 1e-9 and len(matches[0]) <= len(chosen)
        if len(matches[0]) == len(chosen):
            assert chosen in matches


def test_every_mistake_says_what_it_is():
    for mistake in (*reference.ROUTING, *reference.per_position(6), *reference.STOPS, *reference.MARGIN,
                    *reference.SPREAD, *reference.EM, *reference.EM_STOPS):
        text = reference.describe(mistake)
        assert re.search(r"201[78], (Eq\. \d|Procedure 1|Section \d)|2017 run Procedure 1", text), mistake.name
        assert mistake.fix and "{" not in mistake.fix.format(**check.calls.SIZES, logits="(N, I, J)", axis=2)


def test_the_reference_agrees_with_the_loops_on_its_own_probes():
    x = check.probe("em", check.calls.SIZES)
    lists = {name: value.tolist() for name, value in x.items()}
    expected = literal.em_routing(*lists.values(), [0.02, 0.035], epsilon=0.01)[-1]
    mu, a = reference.em_routing(*x.values(), [0.02, 0.035], epsilon=0.01)
    nearly(mu, expected["mu"])
    nearly(a, expected["a"])
    u_hat = check.probe("dynamic", check.calls.SIZES)["u_hat"]
    v = reference.dynamic_routing(u_hat, 3)
    nearly(v, literal.dynamic_routing(u_hat.tolist(), 3)[-1]["v"])
    lengths = np.linalg.norm(v, axis=-1)
    assert np.mean((lengths > 0.2) & (lengths < 0.85)) > 0.7   # long or short capsules would hide mistakes


# ---- whole checks ----

@pytest.mark.parametrize(("source", "flags"), [(ROUTE, ()), (EM, ("--em",)), (LOSS, ("--margin-loss",)),
                                               (SPREAD, ("--spread-loss",))])
def test_right_functions_pass(run, source, flags):
    code, text = run(source, *flags)
    assert code == 0 and "RIGHT" in text and "NO " not in text, text


@pytest.mark.parametrize(("name", "source", "changes", "flags"), [
    *((name, ROUTE, changes, ()) for name, changes in ROUTE_MISTAKES.items()),
    *(pytest.param(name, EM, changes, ("--em",), marks=[pytest.mark.slow] if k % 8 else [])
      for k, (name, changes) in enumerate(EM_MISTAKES.items())),
    *((name, LOSS, changes, ("--margin-loss",)) for name, changes in LOSS_MISTAKES.items()),
    *((name, SPREAD, changes, ("--spread-loss",)) for name, changes in SPREAD_MISTAKES.items())])
def test_a_mistake_in_a_function_is_named_and_nothing_else(run, name, source, changes, flags):
    code, text = run(source, *flags, changes=changes)
    if name == "EM: floor under the weights of children":       # is seen, but not in the values
        assert code == 1 and "NOT THIS PROCEDURE" in text and "as with a floor under the weights" in text, text
        return
    assert code == 1 and ("RIGHT EXCEPT" if "no epsilon" in name else "WRONG") in text, text
    assert ("--axes u_hat=JINE" in text) == (name == "softmax over the batch")   # right, if N and J are exchanged
    names = named(text)
    assert names[0].startswith(name) and len(names) == 1, text


@pytest.mark.parametrize("names", [("softmax over input capsules", "logits averaged over the batch",
                                    "squash over output capsules"),
                                   ("logits not accumulated", "one iteration more", "squash without the square"),
                                   ("logits averaged over the batch", "no epsilon in the squash, forward"),
                                   ("softmax over input capsules", "logits kept from the batch before")])
def test_several_mistakes_in_a_function_are_named(run, names):
    code, text = run(ROUTE, changes=[change for name in names for change in ROUTE_MISTAKES[name]])
    assert code == 1 and [next(n for n in names if found.startswith(n)) for found in named(text)] == list(names), text


def changed(source, names, mistakes):
    """Return the last function of a source that has some mistakes."""
    for old, new in [change for name in names for change in mistakes[name]]:
        assert old in source, old
        source = source.replace(old, new)
    made = {}
    exec(source, made)
    return made[re.findall(r"^def (\w+)", source, re.M)[-1]]


@pytest.mark.parametrize("names", [
    ("leaky routing", "squash with 0.5 in place of 1"), ("logits divided by the square root of the dimension",
                                                         "squash over output capsules"),
    ("logits divided by their maximum", "final squash missing"),
    ("agreement with the direction of v", "logits not accumulated", "squash with 0.5 in place of 1"),
    ("cosine in place of the agreement", "softmax over input capsules"),
    ("unit vector in place of the squash", "logits not accumulated"),
    ("exponential in the squash", "logits averaged over the batch"),
    ("EM: cost standardized over the parents", "EM: activation missing in the E-step"),
    ("EM: log of the variance in the cost", "EM: initial assignments not divided"),
    ("EM: one beta_u for all parents", "EM: wrong exponent of the density"),
    ("EM: one beta_a for all parents", "EM: children's activations cancel")])
def test_what_public_code_does_is_named_together_with_another_mistake(names):
    kind = "em" if "EM" in names[0] else "dynamic"
    function = changed(*((EM, names, EM_MISTAKES) if kind == "em" else (ROUTE, names, ROUTE_MISTAKES)))
    x, lambdas = check.probe(kind, check.calls.SIZES), [0.02, 0.035, 0.05]

    def predict(settings, n):
        return check.expected(kind, x, n, lambdas, **settings)
    found = {n: list(function(*x.values(), lambdas[:n])) if kind == "em" else [function(*x.values(), n)]
             for n in (1, 2, 3)}
    places = check.EM_EPSILONS if kind == "em" else check.SQUASH_EPSILONS
    matches, _, _ = naming.explain_with_epsilon(found, predict, reference.MISTAKES[kind], 1e-9, places)
    assert {mistake.name for mistake in matches[0]} == set(names) and len(matches) == 1


def test_a_softmax_per_position_is_named(run):
    """where the output capsules are types at positions: three positions of two types"""
    per_position = [("np.exp(b).sum(2, keepdims=True)", "per_position(np.exp(b))"),
                    ("def route", "def per_position(x):\n    x = x.reshape(*x.shape[:2], 3, 2)\n    return x.sum(3)."
                     "repeat(2, axis=2)\n\ndef route")]
    for second in ((), ("logits not accumulated",)):
        code, text = run(ROUTE, "--sizes", "J=6", "E=8", changes=[
            *per_position, *(change for name in second for change in ROUTE_MISTAKES[name])])
        assert code == 1 and set(named(text)) == {"softmax per position", *second}, text
        assert "over 2 of the 6 output capsules" in text


def test_a_bias_is_read_from_the_output_without_votes(run):
    bias = [("(c[..., None] * u_hat).sum(1)", "(c[..., None] * u_hat).sum(1) + BIAS"),
            ("def route", "BIAS = np.linspace(-0.2, 0.3, 30).reshape(5, 6)\n\ndef route")]
    for second in ((), ("squash with 0.5 in place of 1",), ("logits averaged over the batch", "leaky routing")):
        code, text = run(ROUTE, changes=[*bias, *(change for name in second for change in ROUTE_MISTAKES[name])])
        assert code == 1 and set(named(text)) == {"bias in the output capsules", *second}, text


@pytest.mark.parametrize(("epsilon", "shown"), [
    ("np.sqrt(square + 1e-7)", "epsilon 1e-07 added to |s|^2 inside the root"),
    ("(np.sqrt(square) + 3e-8)", "3e-08 added"), ("np.sqrt(square + 1.2e-4)", "epsilon 0.00012 added")])
def test_an_epsilon_is_allowed_and_reported(run, epsilon, shown):
    code, text = run(ROUTE, changes=[("np.sqrt(square)", epsilon)])
    assert code == 0 and shown in text.replace("e-8", "e-08").replace("e-7", "e-07"), text
    code, text = run(ROUTE, changes=[("np.sqrt(square)", epsilon), *ROUTE_MISTAKES["logits not accumulated"]])
    assert code == 1 and named(text) == ["logits not accumulated"]


@pytest.mark.slow
def test_large_or_unusual_epsilons_are_not(run):
    code, text = run(ROUTE, changes=[("np.sqrt(square)", "np.sqrt(square + 0.05)")])
    assert code == 1 and named(text) == ["large epsilon 0.05 added to |s|^2 inside the root"], text
    code, text = run(EM, "--em", changes=[("+ 1e-6", "+ 0.05")])
    assert code == 1 and named(text) == ["large epsilon 0.05 added to the variance"], text
    changes = [("return v", "return v * (1 + 2e-6 * np.sin(9 * v))")]
    code, text = run(ROUTE, changes=changes)
    assert code == 1 and "NEARLY RIGHT" in text and "as several epsilons would" in text, text
    assert run(ROUTE, "--tolerance", text.split("--tolerance ")[1].split()[0], changes=changes)[0] == 0


def test_a_large_epsilon_is_a_mistake_with_its_value(run):
    for value in ("0.002", "0.01"):
        large = ("np.sqrt(square)", f"np.sqrt(square + {value})")
        name = f"large epsilon {value} added to |s|^2 inside the root"
        code, text = run(ROUTE, changes=[large])
        assert code == 1 and named(text) == [name] and "agree" not in text and "NOT THIS" not in text, text
    assert f"WRONG: {name}" in run(ROUTE, "--quiet", changes=[large])[1]
    assert run(ROUTE, "--allow", "large epsilon", changes=[large])[0] == 0
    code, text = run(ROUTE, changes=[large, *ROUTE_MISTAKES["softmax over input capsules"]])
    assert code == 1 and named(text) == ["softmax over input capsules", name], text


def test_names_tell_the_order_of_arguments(run):
    other = ("V, a, beta_u, beta_a, lambdas", "V, a, beta_a, beta_u, lam")
    code, text = run(EM, "--em", changes=[other, ("in lambdas", "in lam")])
    assert code == 0 and "arguments, by their names: V, a, beta_a, beta_u, lambdas" in text, text
    for names, order in (("W, x, n", ["W", "u", "n_iters"]), ("p, q, r", ["u", "W", "n_iters"]),
                         ("x, u, W", ["u", "W", "n_iters"])):
        function = eval(f"lambda {names}: 0")
        assert calls.argument_order(function, calls.INTERFACES["layer"], True) == order
    function = eval("lambda poses, act_in, lam, beta_v, beta_a: 0")
    assert calls.argument_order(function, calls.INTERFACES["em"], True) == ["V", "a", "lambdas", "beta_u", "beta_a"]
    function = eval("lambda votes, a, ba, bv, lambdas: 0")
    assert calls.argument_order(function, calls.INTERFACES["em"], True) == ["V", "a", "beta_a", "beta_u", "lambdas"]


@pytest.mark.parametrize("parameters", [
    "u_hat, eps=1e-9, n_iters=3", "u_hat, *, n_iters", "u_hat, b=None, *, n_iters=3", "u_hat=None, *, n_iters"])
def test_a_count_may_be_taken_by_name_only_or_after_other_parameters(run, parameters):
    code, text = run(ROUTE, changes=[("u_hat, n_iters", parameters)])
    assert code == 0 and "route(u_hat, n_iters)" in text and "2 iterations: output agrees" in text, text


def test_an_error_of_the_users_own_is_shown_and_not_that_of_another_order(run):
    layer = ROUTE + """
def layer(u, W, n_iters):
    u_hat = np.einsum("nid,jied->nije", u, W)
    return route(u_hat, {})
"""
    for wrong, words in (("u.n_iterations", "AttributeError: 'numpy.ndarray' object has no attribute 'n_iterations'"),
                         ("n_iterations", "NameError: name 'n_iterations' is not defined")):
        code, text = run(layer.format(wrong), "--layer")
        assert code == 2 and words in text and "No order" not in text, text
    code, text = run(ROUTE, changes=[("    return v\n", "")])
    assert code == 2 and "your function returned None. End it with a return" in text and "No order" not in text


def test_a_gradient_in_another_order_of_axes_and_a_factor(run, tmp_path):
    example = (ROOT / "conformance/examples/numpy_right.py").read_text(encoding="utf-8")
    other = example + """

def backward(dv, u_hat, n_iters):
    return {} * route_backward(dv, u_hat.transpose(0, 2, 1, 3), n_iters)

def routed(u_hat, n_iters):
    return route(u_hat.transpose(0, 2, 1, 3), n_iters)
"""
    flags = ("--backward", f"{tmp_path}/mine.py:backward", "--axes", "u_hat=NJIE")
    code, text = run(other.format(1), *flags)
    assert code == 0 and "gradient of u_hat with the axes NIJE, where u_hat itself has NJIE" in text, text
    code, text = run(other.format(2), *flags)
    assert code == 1 and named(text) == ["gradient multiplied by 2"] and "no known mistake" not in text, text


def test_what_a_smaller_or_repeated_batch_shows(run):
    code, text = run(ROUTE, changes=[("return v", "return v.squeeze()")])
    assert code == 1 and "squeeze() without an axis" in text
    code, text = run(ROUTE, changes=[("    return v", "    u_hat *= 2\n    return v")])
    assert code == 1 and "changes its inputs" in text
    code, text = run(LOSS, "--margin-loss", changes=[(".sum(1).mean()", ".sum() / 3")])
    assert code == 1 and "Divide by len(lengths)" in text
    one_class = [("    short", "    present = np.eye(5)[present.argmax(1)]\n    short")]
    code, text = run(LOSS, "--margin-loss", changes=one_class)         # a sample with two classes shows it
    assert code == 1 and "For samples of one class it agrees, for one of two classes it does not" in text, text


def test_functions_with_habits_of_their_own(run, tmp_path, capsys):
    fixed = [("range(n_iters)", "range(3)")]
    code, text = run(ROUTE, changes=fixed)
    assert code == 1 and "--iterations 3" in text
    assert run(ROUTE, "--iterations", "3", changes=fixed)[0] == 0
    assert run(ROUTE, "--iterations", "3", changes=[*fixed, ("u_hat, n_iters", "u_hat")])[0] == 0
    code, text = run(ROUTE, changes=[("    return v", "    print('hello')\n    return {'s': s, 'v': v}")])
    assert code == 0 and "hello" not in text                   # of several arrays of one shape, the last
    for call in ("np.array(v).tolist()", "[v]"):
        assert run(ROUTE, changes=[("return v", f"return {call}")])[0] == 0
    once = "import builtins\nassert not hasattr(builtins, 'once')\nbuiltins.once = 1\nimport argparse\nargparse." \
           "ArgumentParser().parse_args()\n"
    assert run(once + ROUTE)[0] == 0                           # imported once only, and reads the command line
    (tmp_path / "sub").mkdir()
    (tmp_path / "mine.py").write_text(ROUTE, encoding="utf-8")
    (tmp_path / "sub/mine.py").write_text(ROUTE.replace("sum(2,", "sum(1,"), encoding="utf-8")
    assert command.main([f"{tmp_path}/sub/mine.py:route"]) == 1 and "softmax over input" in capsys.readouterr().out
    for result, words in (("None", "returned None. End"), ("'0.5'", "no array"), ("v.astype(int)", "type int")):
        code, text = run(ROUTE, changes=[("return v", f"return {result}")])
        assert code == 2 and words in text and text.count("\n") == 1, text
    assert "finite output" in run(ROUTE, changes=[("return v", "return v * np.nan")])[1]
    code, text = run("import sys\nsys.exit(0)\ndef route(): pass\n")
    assert code == 2 and "ends the program when it is imported" in text
    assert run(ROUTE, changes=[("    return v", "    import sys\n    sys.exit(0)")])[0] == 2


def test_of_several_outputs_that_fit_the_right_one_is_compared(run):
    for source, flags, old, returned in (
            (ROUTE, (), "return v", "return v, s"), (ROUTE, (), "return v", "return {'v': v, 's': s}"),
            (EM, ("--em",), "return mu,", "return mu, mu ** 2,")):             # of two outputs, each has its own
        code, text = run(source, *flags, changes=[(old, returned)])
        assert code == 0 and ("the first is compared as" in text) == ("{" not in returned), text
    code, text = run(EM, "--em", changes=[("return mu, a_out", "return mu, mu ** 2, 3 * a_out, a_out")])
    assert code == 0 and "the first is compared as mu and the last is compared as a" in text, text
    code, text = run(ROUTE, changes=[("return v", "return s, v, 0 * v")])
    assert code == 0 and "number 2 is compared as v" in text, text
    code, text = run(ROUTE, changes=[("return v", "return v, s"), *ROUTE_MISTAKES["softmax over input capsules"]])
    assert code == 1 and named(text) == ["softmax over input capsules"]
    scalars = LOSS + "\ndef several(lengths, present):\n    L = loss(lengths, present)\n    return float(L), 0.5\n"
    assert run(scalars, "--margin-loss")[0] == 0


@pytest.mark.parametrize("parameters", [
    "u_hat, eps=1e-9, n_iterations=3", "u_hat, W=None, T=3", "u_hat, *, n_iterations", "u_hat, t=1.0, n_iters=3",
    "u_hat, dim=2, num_routing_iterations=3"])
def test_the_number_of_iterations_has_many_names(run, parameters):
    """and the parameters before it keep their defaults"""
    name = re.search(r"(\w+)(?:=3)?$", parameters)[1]
    changes = [("u_hat, n_iters", parameters), ("range(n_iters)", f"range({name})"),
               ("    b = np", "    assert not locals().get('W') and locals().get('eps', 0) < 1\n    b = np")]
    assert run(ROUTE, changes=changes)[0] == 0


def test_a_constant_coupling_of_1_and_limits_of_epsilons(run):
    code, text = run(ROUTE, changes=[("np.exp(b) / np.exp(b).sum(2, keepdims=True)", "np.ones_like(b)")])
    assert code == 1 and named(text) == ["softmax over an axis of length 1"], text
    for value, names in (("1e-3", []), ("2e-3", ["large epsilon 0.002 added to |s|^2 inside the root"])):
        code, text = run(ROUTE, changes=[("np.sqrt(square)", f"np.sqrt(square + {value})")])
        assert named(text) == names and code == bool(names), text
    capsules = LOSS + ("\ndef of_capsules(v, present):\n    return loss(np.sqrt((v * v).sum(-1) + EPSILON), present)\n")
    for value, code in (("1e-5", 0), ("0", 0), ("0.1", 1)):
        assert run(capsules.replace("EPSILON", value), "--margin-loss")[0] == code


def test_float32_inputs_are_compared_as_such(run):
    """in an output that zeros() of the function's own made float64"""
    code, text = run(ROUTE, "--dtype", "float32")
    assert code == 0 and "float64, relative tolerance 1e-4" in text, text


def test_weights_that_are_not_used_are_named(run):
    code, text = run(ROUTE + "\ndef layer(u, W, n_iters):\n    own = np.random.default_rng(0).normal(size=W.shape)\n"
                     "    return route(np.einsum('nid,ijed->nije', u, own), n_iters)\n", "--layer")
    assert code == 1 and "does not depend on W" in text and "bias" not in text, text


IN_ORDER = '''
from conftest_route import route as inner

def route(u_hat, n_iters):
    v = inner(u_hat.{inputs}, n_iters)
    return v.{outputs}
'''


@pytest.mark.parametrize(("inputs", "outputs", "shown", "flags", "expected"), [
    ("transpose(0, 2, 1, 3)", "copy()", "u_hat (N, J, I, E)", (), 0),
    ("transpose(2, 1, 0, 3)", "swapaxes(0, 1)", "u_hat (N, I, J, E)", (), 1),   # fits as (N, I, J, E): the user decides
    ("transpose(2, 1, 0, 3)", "swapaxes(0, 1)", "u_hat (J, I, N, E)", ("--axes", "u_hat=JINE"), 0),
    ("reshape(u_hat.shape[:4])", "reshape(3, 1, 5, 6, 1)", "v (N, 1, J, E, 1)", (), 0),
    ("transpose(3, 0, 1, 2)", "astype('f4')", "float32", (), 0)])
def test_axes_are_found_by_shape(run, tmp_path, inputs, outputs, shown, flags, expected):
    (tmp_path / "conftest_route.py").write_text(ROUTE, encoding="utf-8")
    source = IN_ORDER.format(inputs=inputs, outputs=outputs)
    code, text = run(source, *flags, name="ordered")
    sys.modules.pop("conftest_route", None)
    assert code == expected and shown in text, text
    assert expected == 0 or "--axes u_hat=JINE" in text


def test_own_sizes_and_4x4_matrices(run):
    code, text = run(ROUTE, "--sizes", "I=36", "J=10", "E=16", changes=[
        ("    b = np", "    assert u_hat.shape[1:] == (36, 10, 16)\n    b = np")])
    assert code == 0 and "(3, 36, 10, 16)" in text, text
    code, text = run(EM, "--em", changes=[
        ("    R = np", "    assert V.shape[3:] == (4, 4)\n    V = V.reshape(*V.shape[:3], 16)\n    R = np"),
        ("return mu,", "return mu.reshape(-1, 5, 4, 4),")])
    assert code == 0 and "V (N, I, J, 4, 4)" in text and "mu (N, J, 4, 4)" in text, text


def test_what_cannot_be_called_is_said(run):
    """Not that it differs from the paper"""
    by_name = ROUTE.replace("def route(u_hat, n_iters)", "def route(u_hat, n_iters, *, scale)")
    assert by_name != ROUTE
    for source, flags, words in (
            (by_name, (), "takes scale by name only"), ("from . import mine\n" + ROUTE, (), "PACKAGE.mine:route"),
            (ROUTE, ("--lambdas", "1", "1", "1"), "--lambdas has no effect"),
            (ROUTE, ("--framework", "torch"), "PyTorch is not installed") if not importlib.util.find_spec("torch") else
            (by_name, (), "by name only")):
        code, text = run(source, *flags)
        assert code == 2 and words in text and text.count("\n") == 1, text
    code, text = run(ROUTE + "\ndef route_nan(u_hat, n_iters):\n    return 0 * route(u_hat, n_iters) + np.nan\n")
    assert code == 1 and "not compared, since the output is NaN" in text


def test_modules_of_ones_own_may_have_any_name(tmp_path):
    """As a process: those of the check are called reference, calls and so on"""
    (tmp_path / "reference.py").write_text("import naming\n" + ROUTE, "utf-8")
    (tmp_path / "naming.py").write_text("", "utf-8")
    done = subprocess.run([sys.executable, str(ROOT / "conformance" / "check.py"), "reference:route"], cwd=tmp_path,
                          capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "") and "RIGHT" in done.stdout


def test_a_backward_pass_of_ones_own(run):
    example = ROOT / "conformance/examples/numpy_right.py"
    forward_only = example.read_text(encoding="utf-8").rpartition("\n\n\ndef")[0]
    code, text = run(forward_only, "--backward", f"{example}:route_backward")
    assert code == 0 and "gradient agrees" in text
    code, text = run(ROUTE + "\ndef backward(dv, u_hat, n): return 0 * u_hat\n\ndef route_again(u_hat, n):\n"
                     "    return route(u_hat, n)\n", "--backward", f"{example}:route")
    assert code == 2 and "--backward raised" in text
    loss = LOSS + '''
def dloss(lengths, present):
    return (-2 * present * np.maximum(0, 0.9 - lengths) + {} * (1 - present) * np.maximum(0, lengths - 0.1)) / 3

def again(lengths, present):
    return loss(lengths, present)
'''
    for factor, expected in ((1, 0), (2, 1)):
        code, text = run(loss.format(factor), "--margin-loss", "--backward", "mine:dloss")
        assert code == expected, text


@pytest.mark.parametrize(("example", "flags", "expected"), [
    ("numpy_right.py:route", (), []), ("numpy_em.py:em_route", ("--em",), []),
    ("numpy_wrong.py:route", (), ["softmax over input capsules", "logits not accumulated"])])
def test_examples(example, flags, expected, capsys):
    code = command.main([str(ROOT / "conformance/examples" / example), *flags])
    assert named(capsys.readouterr().out) == expected and code == bool(expected)


@pytest.mark.slow
def test_our_own_functions(run, capsys):
    for function, flags in (("routing_forward", ()), ("margin_loss", ("--margin-loss",))):
        assert command.main([f"{ROOT}/multimnist_capsnet.py:{function}", *flags]) == 0
    capsys.readouterr()
    _, text = run('''
import smallnorb_novel_viewpoint as norb

def em(V, a, beta_u, beta_a, n_iters):
    (mu, x), _ = norb.em_routing_forward(V, a, beta_u, beta_a, n_iters)
    return mu, norb.sigmoid(x)
''', "--em", "--lambdas", *[str(1 / 16)] * 3)
    assert named(text) == ["EM: mass factor in the cost", "EM: lambda multiplies the cost alone"]
    assert "epsilon 0.0005 added to the variance" in text      # as its docstring says


@pytest.mark.parametrize(("source", "flags", "message"), [
    (ROUTE, ("--axes", "u_hat=NIJ"), "--axes u_hat=NIJ: use each of N, I, J, E once, and 1 for a singleton"),
    (ROUTE, ("--axes", "V=NIJE"), "there is no input V. Inputs: u_hat"),
    (ROUTE, ("--axes", "NIJE"), "--axes NIJE: write NAME=VALUE, such as u_hat=NIJE"),
    (ROUTE, ("--sizes", "I=6"), "E and I are both 6"),
    (ROUTE, ("--sizes", "I=1"), "write AXIS=N with an axis of E, I, J, N and N from 2"),
    (ROUTE, ("--iterations", "0"), "--iterations: at least 1"), (ROUTE, ("--sizes", "I=\u00b2"), "write AXIS=N"),
    (ROUTE, ("--tolerance", "0"), "--tolerance: between 0 and 0.01"),
    (LOSS, ("--margin-loss", "--axes", "order=x"), "no such reading"),
    (EM, ("--em", "--lambdas", "0.1"), "--lambdas: 1 given for 3 iterations"),
    ("def route(u_hat, n_iters):\n    return u_hat.mean()\n", (), "returned ()"),
    ("def route(u_hat):\n    return u_hat.sum(1)\n", (), "Say how many it runs, such as: --iterations 3"),
    ("import nowhere_to_be_found\ndef route(u_hat, n_iters):\n    pass\n", (), "imports nowhere_to_be_found"),
    ("def route(:\n", (), "cannot be imported: SyntaxError"),
    (EM, (), "add --em"),
    (LOSS, (), "seems to be a loss, by the names of its arguments. Add --margin-loss"),
    (SPREAD, (), "Add --spread-loss"),
    ("import numpy as np\ndef route(lengths, labels):\n    return (lengths * np.eye(10)[labels]).sum()\n",
     ("--margin-loss",), "shapes (3,5) (3,10). If your loss has a fixed number of classes, give it, such"),
    ("def route(u_hat, n_classes):\n    return u_hat.mean()\n", (), "returned ()")])
def test_functions_that_cannot_be_checked(run, source, flags, message):
    code, text = run(source, *flags) if "def route(:" not in source else run(source + "\ndef route(): pass\n", *flags)
    assert code == 2 and message in text and text.startswith("error: ") and text.count("\n") == 1, text


@pytest.mark.parametrize(("target", "message"), [
    ("route", "write module:function"), ("nowhere.py:route", "no such file"),
    ("no_such_module:route", "no module named"),
    (f"{ROOT}/conformance/examples/numpy_right.py:nothing", "It has: route, route_backward"),
    (f"{ROOT}/conformance/examples/numpy_right.py:__name__", "is not a function"),
    ("fractions:Fraction", "is a class. Write"), ("fractions:Fraction.limit_denominator", "is a method"),
    ("numpy:linalg.norm", "No order of the axes"),
    ("numpy:routed", "more")])
def test_targets_that_are_not_there(target, message, capsys):
    assert command.main([target]) == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_outputs_that_cannot_be_written_are_reported_in_one_line(tmp_path):
    example = str(ROOT / "conformance/examples/numpy_right.py") + ":route"
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([sys.executable, ROOT / "conformance/check.py", example], stdout=full,
                              stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == "error: the report cannot be written: No space left on device\n"
    (tmp_path / "file").write_text("", encoding="utf-8")
    done = subprocess.run([sys.executable, ROOT / "conformance/make.py", "--outdir", tmp_path / "file"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: --outdir") and done.stderr.count("\n") == 1
