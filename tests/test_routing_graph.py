"""The computation graphs of routing: their steps are those of the code, with the shapes of a run."""
import re

import multimnist_capsnet as mc
import smallnorb_novel_viewpoint as sn

import pytest

import visualize_routing as graphs

STEPS = {                          # boxes of three iterations: (function, or value, and its shape): how many
    "dynamic_routing": {"1 / J\nc (1, I)": 1, "softmax_forward(b)\nc (N, J, I)": 2,
                        "sum_i c u_hat\ns (N, J, D)": 3, "squash_forward(s)\nv (N, J, D)": 3,
                        "u_hat . v\nb += (N, J, I)": 2, "squash_backward(dv)\nds (N, J, D)": 3,
                        "u_hat . ds\ndc (N, J, I)": 2, "softmax_backward(dc)\ndb += (N, J, I)": 2,
                        "sum_i db u_hat\ndv (N, J, D)": 2, "+ c ds": 3, "sum of all terms\ndu_hat (N, J, I, D)": 1},
    "em_routing": {"1 / parents\nR (L, 1, I)": 1, "m_step_forward(r)\nmu, sigma2 (L, J, D)\nx (L, J)": 3,
                   "e_step_forward\n(mu, sigma2, x)\nlogits (L, J, I)": 2, "sum_j dr R\nda += (L, I)": 1,
                   "responsibilities_\nforward(logits)\nR (L, J, I)": 2, "R a\nr (L, J, I)": 2,
                   "m_step_backward\n(dmu, dsigma2, dx)\ndr (L, J, I)": 2,
                   "e_step_backward\ndmu, dsigma2 (L, J, D)\ndx (L, J)": 2,
                   "votes_gradient(terms)\ndV (L, J, I, D)": 1}}


@pytest.mark.parametrize("name", graphs.FIGURES)
def test_the_steps_are_those_of_the_code(name):
    """Each function named exists; each step of a routing with three iterations is there as often as it is computed"""
    texts = [text.get_text() for text in graphs.FIGURES[name](3).axes[0].texts]
    assert {step: texts.count(step) for step in STEPS[name]} == STEPS[name]
    module = mc if name == "dynamic_routing" else sn
    named = set(re.findall(r"\w+_(?:forward|backward|gradient)\b", " ".join(texts).replace("_\n", "_")))
    assert len(named) > 4 and all(hasattr(module, function) for function in named)
    assert all(getattr(module, function).__name__ == function for function in named)               # restored
    assert len(graphs.FIGURES[name](1).axes[0].texts) < len(texts)


def test_the_command_writes_both_graphs(call, tmp_path):
    code, out, err = call(mc, graphs.main, "--n-iters", 2)
    assert (code, err) == (0, "")
    drawn = {path.name for path in (tmp_path / "runs" / "routing" / "figures").iterdir()}
    assert drawn == {f"{name}.png" for name in graphs.FIGURES}
    assert call(mc, graphs.main, "--n-iters", 9)[0] == 2
