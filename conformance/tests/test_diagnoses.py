"""Functions that public code has, and for which a false picture is near: what the check says of each, and what not."""
import time
from pathlib import Path

import pytest
from capsule_conformance import check, command, reference
from test_check import EM, EM_MISTAKES, ROUTE, ROUTE_MISTAKES, named, run  # noqa: F401

SECOND = ("softmax over input capsules", "logits averaged over the batch", "squash with 0.5 in place of 1")
CAPSULES_FIRST = ("return v", "return v.transpose(1, 0, 2)")


# ---- the order of the axes ----

def test_usual_inputs_come_before_usual_outputs(run):  # noqa: F811
    """(N, I, J, E) in, (J, N, E) out: not (J, I, N, E) in, with a softmax over the batch"""
    code, text = run(ROUTE, changes=[CAPSULES_FIRST])
    assert code == 0 and "u_hat (N, I, J, E) = (3, 7, 5, 6) -> v (J, N, E) = (5, 3, 6)" in text, text
    for second in SECOND:
        code, text = run(ROUTE, changes=[CAPSULES_FIRST, *ROUTE_MISTAKES[second]])
        assert code == 1 and named(text) == [second] and "-> v (J, N, E)" in text, text
        assert "Also fits, by the shape of its output: --axes u_hat=" in text, text


def test_inputs_with_outputs_first_and_a_matrix_with_its_entries_first(run):  # noqa: F811
    """which are as usual as each other, so that the output decides"""
    code, text = run(ROUTE + "\ndef layer(u, W, n_iters):\n"
                     "    return route(np.einsum('nid,iejd->nije', u, W), n_iters)\n", "--layer")
    assert code == 0 and "W (I, E, J, D)" in text, text


ENTRIES_BEFORE_CAPSULES = [("    b = np", "    u_hat = u_hat.transpose(0, 1, 3, 2)\n    b = np"),
                           ("return v", "return v.transpose(0, 2, 1)")]


@pytest.mark.parametrize("names", [("logits not accumulated",), pytest.param(
    ("softmax over input capsules", "one iteration more"), marks=pytest.mark.slow)])
def test_of_several_orders_the_one_with_the_fewest_mistakes_is_explained(run, names):  # noqa: F811
    """(N, I, E, J): as (N, I, J, E), nothing explains it"""
    code, text = run(ROUTE, changes=[*ENTRIES_BEFORE_CAPSULES, *(
        change for name in names for change in ROUTE_MISTAKES[name])])
    assert code == 1 and named(text) == list(names) and "u_hat (N, I, E, J)" in text, text
    assert "needs the fewest mistakes" in text and "Also fits, by the shape of its output: --axes u_h" in text


def test_a_function_that_is_right_in_another_order_does_not_pass(run):  # noqa: F811
    """The user decides"""
    code, text = run(ROUTE, changes=ENTRIES_BEFORE_CAPSULES)
    assert code == 1 and "it agrees. If that is yours, add: --axes u_hat=NIEJ" in text, text


# ---- EM routing ----

SOFTMAX_OF_DENSITIES = [
    ("np.sqrt(sigma2).prod(-1)[:, None]", "np.sqrt(2 * np.pi * sigma2).prod(-1)[:, None]"),
    ("R = ap / ap.sum(2, keepdims=True)", "e = np.exp(ap - ap.max(2)[:, :, None]); R = e / e.sum(2)[:, :, None]")]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_softmax_of_densities_is_no_iteration_fewer(run, dtype):  # noqa: F811
    code, text = run(EM, "--em", "--dtype", dtype, changes=SOFTMAX_OF_DENSITIES)
    assert code == 1 and named(text) == ["EM: softmax of the densities"] and "iteration fewer" not in text, text
    for second in ("EM: initial assignments not divided", "EM: log of the variance in the cost"):
        code, text = run(EM, "--em", "--dtype", dtype, changes=[*SOFTMAX_OF_DENSITIES, *EM_MISTAKES[second]])
        assert code == 1 and set(named(text)) == {"EM: softmax of the densities", second}, text


@pytest.mark.slow
def test_assignments_that_stay_uniform_are_said(run):  # noqa: F811
    """where an unknown activation hides what they are"""
    unknown = ("(-lambda_ * (beta_a - cost)))", "(-lambda_ * (beta_a - cost))) ** 1.1")
    code, text = run(EM, "--em", "--dtype", "float32", changes=[
        *SOFTMAX_OF_DENSITIES, ("e = np.exp(ap -", "ap = ap / 1e6; e = np.exp(ap -"), unknown])
    assert code == 1 and "iteration fewer" not in text, text
    assert "The second iteration changes nothing: the assignments stay uniform, as with a softmax of" in text, text


def test_a_number_of_iterations_needs_more_than_uniform_coupling(run):  # noqa: F811
    """which two iterations that equal one do not show"""
    x = check.probe("dynamic", check.calls.SIZES)
    one = [reference.dynamic_routing(x["u_hat"], 1)]
    for iterations, known in (([1, 2], False), ([1, 2, 3], True), ([3], True)):
        made = check.Check.__new__(check.Check)
        made.kind, made.mistakes = "dynamic", reference.ROUTING
        names = {m.name for m in made.mistakes_for({n: [one[0] * n] for n in iterations})}
        assert ("one iteration fewer" in names) == known and "one iteration more" in names


def test_three_mistakes_with_betas_and_an_epsilon_are_named(run):  # noqa: F811
    """by the first M-step alone"""
    without = [("1 / V.shape[2])", "1.0)"), ("(beta_u[:, None] + np.log(sigma2) / 2)", "(np.log(sigma2) / 2)"),
               ("(beta_a - cost)", "(-cost)"), ("+ 1e-6", "+ 1e-4")]
    wanted = {"EM: initial assignments not divided", "EM: beta_u missing", "EM: beta_a missing"}
    code, text = run(EM, "--em", changes=without)
    assert code == 1 and set(named(text)) == wanted and "epsilon 0.0001 added to the variance" in text, text
    code, text = run(EM, "--em", changes=[*without, *EM_MISTAKES["EM: activation missing in the E-step"]])
    assert code == 1 and set(named(text)) == {*wanted, "EM: activation missing in the E-step"}, text


# ---- epsilons, means, biases ----

THREE_EPSILONS = [("s * np.sqrt(square) / (1 + square)", "square / (1 + square + 1e-5) * s / (np.sqrt(square + 1e-5) + "
                   "1e-5)")]


def test_several_epsilons_are_nearly_right_and_a_tolerance_accepts_them(run):  # noqa: F811
    code, text = run(ROUTE, changes=THREE_EPSILONS)
    assert code == 1 and "NEARLY RIGHT: your function differs from the paper's by at most " in text, text
    assert "as several epsilons would" in text and "What is known" not in text and "NOT THIS" not in text, text
    tolerance = text.split("--tolerance ")[1].split()[0]
    assert run(ROUTE, "--tolerance", tolerance, changes=THREE_EPSILONS)[0] == 0
    quiet = run(ROUTE, "--quiet", changes=THREE_EPSILONS)[1]
    assert "NEARLY RIGHT: differs by at most" in quiet and f"--tolerance {tolerance} accepts it" in quiet


@pytest.mark.parametrize("second", SECOND[:2])
def test_a_mistake_beside_several_epsilons_is_named(run, second):  # noqa: F811
    code, text = run(ROUTE, changes=[*THREE_EPSILONS, *ROUTE_MISTAKES[second]])
    assert code == 1 and named(text) == [second], text


@pytest.mark.parametrize(("returned", "words"), [
    ("u_hat.mean(1)", "the mean of the votes after"), ("u_hat.sum(1)", "the sum of the votes after"),
    ("squash(u_hat.mean(1))", "the squash of the mean of the votes"),
    ("u_hat.sum(1) / u_hat.shape[2]", "the sum of the votes divided by the number of output capsules"),
    ("squash(u_hat.sum(1) / u_hat.shape[2])", "that of one iteration")])
def test_a_function_that_routes_nothing(run, returned, words):  # noqa: F811
    code, text = run(ROUTE, changes=[("return v", f"return {returned}")])
    assert code == 1 and named(text) == ["nothing is routed"] and f"The output is {words}" in text, text
    assert "always runs as many" not in text


@pytest.mark.parametrize("second", ["squash of each component", "squash with 0.5 in place of 1"])
def test_a_function_that_routes_nothing_with_another_mistake(run, second):  # noqa: F811
    code, text = run(ROUTE, changes=[("return v", "return squash(u_hat.mean(1))"), *ROUTE_MISTAKES[second]])
    assert code == 1 and set(named(text)) == {"nothing is routed", second}, text


BIAS = [("(c[..., None] * u_hat).sum(1)", "(c[..., None] * u_hat).sum(1) + BIAS"),
        ("def route", "BIAS = np.linspace(-0.2, 0.3, 30).reshape(5, 6)\n\ndef route")]


def test_a_bias_that_hides_what_else_differs_is_set_to_0(run):  # noqa: F811
    unknown = [("b = b + (u_hat * v[:, None]).sum(-1)", "b = b + np.tanh((u_hat * v[:, None]).sum(-1))")]
    four = [change for name in ("softmax over input capsules", "logits averaged over the batch", "one iteration more",
                                "squash with 0.5 in place of 1") for change in ROUTE_MISTAKES[name]]
    for changes, facts in ((unknown, 1), (four, 2)):           # of four, that samples influence each other
        code, text = run(ROUTE, changes=[*BIAS, *changes])
        assert code == 1 and not named(text), text
        assert text.count("Set the bias to 0 and check again") == 1 and text.count("\n- ") == facts, text


def test_a_bias_is_read_also_where_the_squash_runs_over_output_capsules(run):  # noqa: F811
    code, text = run(ROUTE, changes=[*BIAS, *ROUTE_MISTAKES["squash over output capsules"]])
    assert code == 1 and set(named(text)) == {"bias in the output capsules", "squash over output capsules"}, text


# ---- time ----

def test_the_search_for_other_orders_has_a_limit_that_is_said(run, monkeypatch):  # noqa: F811
    """and a complete diagnosis needs none of them"""
    layer = ROUTE + """
import time
def layer(u, W, n_iters):
    time.sleep(0.02)
    I, J, E, D = W.shape
    return route(np.tanh(np.einsum('nid,ijed->nije', u.reshape(len(u), I, D), W)), n_iters)
"""
    monkeypatch.setattr(check, "SECONDS_FOR_ORDERS", 1.0)
    start = time.monotonic()
    code, text = run(layer, "--layer")
    assert code == 1 and "Not all orders of the axes were tried within 1 s" in text, text
    assert time.monotonic() - start < 25
    code, text = run(layer.replace("np.tanh", ""), "--layer", changes=ROUTE_MISTAKES["softmax over input capsules"])
    assert code == 1 and named(text) == ["softmax over input capsules"] and "Not all orders" not in text, text


# ---- recipes, and one line ----

def test_a_layer_with_one_size_is_checked_through_its_votes(run):  # noqa: F811
    """as docs/reference/conformance.md shows"""
    chapter = (Path(__file__).parents[2] / "docs/reference/conformance.md").read_text(encoding="utf-8")
    recipe = chapter.partition("### A layer whose input and output capsules have one size")[2]
    recipe = recipe.partition("```python\n")[2].partition("```")[0]
    layer = ROUTE.replace("def route", "def inner") + """
def layer(u, W, n_iters):
    assert W.shape[2] == W.shape[3]
    return inner(np.einsum("nid,ijed->nije", u, W), n_iters)

"""
    assert run(layer + recipe)[0] == 0
    code, text = run(layer + recipe, changes=ROUTE_MISTAKES["softmax over input capsules"])
    assert code == 1 and named(text) == ["softmax over input capsules"], text



def test_one_line_says_that_a_gradient_is_required(run):  # noqa: F811
    code, text = run(ROUTE, "--quiet", "--require-gradient")
    assert code == 1 and text.endswith("VALUES RIGHT, GRADIENT NOT CHECKED: gradient required, not checked\n"), text


def test_a_package_is_named_with_dots(tmp_path, monkeypatch, capsys):
    (tmp_path / "caps").mkdir()
    (tmp_path / "caps/__init__.py").write_text("", "utf-8")
    (tmp_path / "caps/routing.py").write_text(ROUTE, "utf-8")
    monkeypatch.chdir(tmp_path)
    assert command.main(["caps.routing:route", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("caps.routing:route: VALUES RIGHT")
