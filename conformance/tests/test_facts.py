"""What the check says of a function that no set of mistakes explains: where the difference begins, what can be seen."""
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from capsule_conformance import facts as facts_of
from test_check import EM, EM_MISTAKES, LOSS, ROUTE, ROUTE_MISTAKES, SPREAD, named, run  # noqa: F401

ROOT = Path(__file__).parents[2]
UNKNOWN = [("b = b + (u_hat * v[:, None]).sum(-1)", "b = b + np.tanh((u_hat * v[:, None]).sum(-1))")]


def facts(text):
    return text.split("What is known:\n")[1] if "What is known:" in text else ""


def test_an_unknown_agreement_begins_at_the_second_iteration(run):  # noqa: F811
    code, text = run(ROUTE, changes=UNKNOWN)
    assert code == 1 and "NOT THIS PROCEDURE" in text and not named(text) and "To mend" not in text
    assert "One iteration agrees in values: the mistake lies in the agreement, the logits" in facts(text)


def test_it_does_not_hide_what_one_iteration_shows(run):  # noqa: F811
    code, text = run(ROUTE, changes=[*UNKNOWN, *ROUTE_MISTAKES["squash with 0.5 in place of 1"]])
    assert code == 1 and "WRONG: a part of your function" in text, text
    assert named(text) == ["squash with 0.5 in place of 1"] and "More differs from two iterations on" in facts(text)


@pytest.mark.slow
def test_a_difference_from_the_third_iteration_on(run):  # noqa: F811
    code, text = run(ROUTE, changes=[("b = b + (u", "b = b * 0.7 + (u")])
    assert code == 1 and "Two iterations agree in values" in facts(text), text


def test_what_outputs_show():
    s = np.random.default_rng(0).normal(size=(3, 5, 6)) + 0.3
    unit = s / np.linalg.norm(s, axis=-1, keepdims=True)
    for v, fact in (((s - s.mean(-1, keepdims=True)) / s.std(-1, keepdims=True), "zero mean and equal variance"),
                    (2.5 * unit, "All output capsules have the length 2.5."), (np.abs(s), "No entry of an output is "),
                    (s, "Outputs are longer than 1, up to")):
        assert any(fact in text for text in facts_of.of_capsules(SimpleNamespace(kind="layer"), {3: [v]})), fact
    assert not facts_of.of_capsules(SimpleNamespace(kind="layer"), {3: [s / 9]})
    assert facts_of.of_activations({1: [s, s]})[0].endswith("outside of 0 to 1.")
    assert "sum to 1" in facts_of.of_activations({1: [s, np.full((3, 5), 0.2)]})[0]


@pytest.mark.parametrize(("returned", "fact"), [
    ("s * np.arctan(square_of(s))", "After one iteration every output has the direction of the sum of the votes"),
    pytest.param("s * 0.3", "Votes twice as long give outputs twice as long", marks=pytest.mark.slow),
    pytest.param("v + 0.1 * v.mean(0)", "The samples of a batch influence each other.", marks=pytest.mark.slow)])
def test_what_one_iteration_and_other_votes_show(run, returned, fact):  # noqa: F811
    code, text = run("def square_of(s):\n    return (s * s).sum(-1, keepdims=True)\n" + ROUTE, changes=[
        ("return v", f"return {returned}")])
    assert code == 1 and "NOT THIS PROCEDURE" in text and fact in facts(text), text


@pytest.mark.slow
def test_iterations_that_change_nothing(run):  # noqa: F811
    code, text = run(ROUTE, changes=[("range(n_iters)", "range(2)"), *UNKNOWN])
    assert code == 1 and "The number of iterations changes nothing." in text


def test_votes_and_matrices_that_are_not_used(run):  # noqa: F811
    code, text = run(ROUTE, changes=[("    b = np", "    u_hat = u_hat[:, :6]\n    b = np")])
    assert code == 1 and "does not depend on the votes of every input capsule i = 6." in facts(text), text
    source = ROUTE + ("\ndef layer(u, W, n_iters):\n    W = W.copy()\n    W[2, 3] = W[2, 4]\n"
                      "    return route(np.einsum('nid,ijed->nije', u, W), n_iters)\n")
    code, text = run(source, "--layer")
    assert code == 1 and "depend on the W_ij of 1 pair of capsules, such as (i, j) = (2, 3)." in facts(text), text


def test_of_em_routing_the_means_and_the_activations_are_judged_apart(run):  # noqa: F811
    unknown = [("1 / (1 + np.exp(-lambda_ * (beta_a - cost)))", "1 / (1 + np.exp(-lambda_ * (beta_a - cost))) ** 2"),
               ("ap = a_out[:, None] * p", "ap = np.sqrt(a_out)[:, None] * p")]
    code, text = run(EM, "--em", "--iterations", "1", "2", changes=unknown)
    assert code == 1 and "mu agrees in all iterations, a does not" in facts(text), text


@pytest.mark.slow
def test_a_mistake_of_the_means_is_named_beside_an_unknown_one_of_the_activations(run):  # noqa: F811
    code, text = run(EM, "--em", "--iterations", "1", "2", changes=[
        ("1 / (1 + np.exp(-lambda_ * (beta_a - cost)))", "1 / (1 + np.exp(-lambda_ * (beta_a - cost))) ** 2"),
        *EM_MISTAKES["EM: activation missing in the E-step"]])
    assert code == 1 and named(text) == ["EM: activation missing in the E-step"], text
    assert "mu alone equals the paper's with EM: activation missing in the E-step." in facts(text)


def test_a_loss_that_is_none(run):  # noqa: F811
    code, text = run(LOSS, "--margin-loss", changes=[("return (", "return -1.3 * (")])
    assert code == 1 and "The loss is negative" in facts(text), text


def test_other_margins_and_cross_entropy(run):  # noqa: F811
    code, text = run(LOSS, "--margin-loss", changes=[("0.9", "0.95"), ("0.1", "0.05")])
    assert code == 1 and "margins m+ = 0.95 and m- = 0.05" in facts(text), text
    code, text = run(SPREAD, "--spread-loss", changes=[("0, m -", "0, m + 0.1 -")])
    assert code == 1 and "With m = 0.9, the loss equals that with m = 1." in facts(text), text
    entropy = "import numpy as np\ndef entropy(labels, lengths):\n    return -np.log(lengths[np.arange(3), labels])\n"
    code, text = run(entropy, "--margin-loss")
    assert code == 1 and "unbounded as the lengths of true classes go to 0, as cross-entropy" in facts(text), text
    code, text = run(LOSS, "--margin-loss", changes=[("return (", "return 0.1 + (")])
    assert code == 1 and "What is known" not in text, text


def test_batch_normalization_in_training_mode_is_sent_to_eval(run):  # noqa: F811
    norm = [("    b = np", "    u_hat = (u_hat - u_hat.mean((0, 1))) / u_hat.std((0, 1))\n    b = np")]
    code, text = run(ROUTE, changes=[*norm, *ROUTE_MISTAKES["softmax over input capsules"]])
    assert code == 1 and "call its eval() first" in facts(text) and not named(text), text


def test_facts_need_finite_outputs():
    assert facts_of.of(SimpleNamespace(ambiguous=()), {1: [np.array([np.nan])]}) == ((), [])


@pytest.mark.parametrize(("number", "mistake"), [
    (1, "softmax over input capsules"), (2, "logits not accumulated"),
    (3, "gradient of inner iterations stopped")])
def test_the_mistakes_of_exercises_are_named(tmp_path, number, mistake):
    """Each diff is the mistake that its text says, no other: in a process, since a script of this name is imported"""
    shutil.copy(ROOT / "microcapsnet.py", tmp_path)
    subprocess.run(["git", "apply", ROOT / f"docs/exercises/{number:02d}.diff"], cwd=tmp_path, check=True)
    (tmp_path / "mine.py").write_text("""import microcapsnet
def route(u_hat, n_iters):
    return microcapsnet.route(u_hat, n_iters)[0]
def backward(dv, u_hat, n_iters):
    return microcapsnet.route_back(dv, microcapsnet.route(u_hat, n_iters)[1])
""", "utf-8")
    words = [ROOT / "conformance" / "check.py", "mine.py:route", "--backward", "mine.py:backward"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and named(done.stdout) == [mistake], done.stdout + done.stderr
