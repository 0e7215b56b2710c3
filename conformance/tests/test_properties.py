"""Functions that are right for most inputs and wrong for some: the check says for which, and the smallest of them."""
import re

import numpy as np
import pytest
from capsule_conformance import calls, check, properties
from test_check import EM, LOSS, ROUTE, ROUTE_MISTAKES, named, run  # noqa: F401

BODY = "        b = b + (u_hat * v[:, None]).sum(-1)\n"
KEEP = ("def route", "CACHE = {}\n\ndef route")


@pytest.mark.parametrize(("changes", "words", "smallest"), [
    ([(BODY, BODY + "        b = b * (1 if t < 3 else 0.5)\n")], "Wrong with 5 iterations",
     "u_hat (1, 2, 2, 1), 5 iterations"),
    ([("range(n_iters)", "range(min(n_iters, 3))")], "Wrong with 5 iterations", "u_hat (1, 1, 2, 1), 4 iterations"),
    ([("np.exp(b) / np.exp(b).sum(2, keepdims=True)", "1 / (1 + np.exp(-b)) if b.shape[2] == 1 else np.exp(b) / "
       "np.exp(b).sum(2, keepdims=True)")], "Wrong with one output capsule", "u_hat (1, 1, 1, 1), 1 iteration"),
    ([("    return v", "    return v if len(v) > 1 else v / 2")], "Wrong with one sample", "u_hat (1, 1, 1, 1), 1"),
    ([("    b = np", "    u_hat = np.lib.stride_tricks.as_strided(u_hat, strides=np.empty(u_hat.shape).strides)\n"
       "    b = np")], "Wrong with strided arrays", "u_hat (1, 1, 1, 2), 1 iteration"),
    ([("v = squash(s)", "v = squash(s, axis=s.shape.index(u_hat.shape[-1]))")], "Wrong with equal sizes",
     "u_hat (2, 2, 2, 2), 1 iteration"),
    ([(BODY, BODY + "        b = b.clip(-10, 10)\n")], "Wrong with large votes", "u_hat (1, 1, 2, 1), 2 iterations"),
    ([("    b = np", "    u_hat = u_hat[:4]\n    b = np")], "Wrong with more samples", "u_hat (5, 1, 1, 1), 1")])
def test_a_function_that_is_wrong_for_some_inputs_only(run, changes, words, smallest):  # noqa: F811
    code, text = run(ROUTE, changes=changes)
    assert code == 1 and "WRONG" in text and words in text, text
    assert smallest in text and "Smallest input" in text, text
    assert "not all that must hold for every input" in text and len(named(text)) == 1, text


def test_the_numbers_of_the_smallest_input_are_shown(run):  # noqa: F811
    code, text = run(ROUTE, changes=[("    return v", "    return v if len(v) > 1 else v / 2")])
    shown = re.search(r"\(u_hat = \[(.*)\]: \[(.*)\] in place of \[(.*)\]\)", text)
    u, found, wanted = map(float, shown.groups())
    assert wanted == pytest.approx(u * abs(u) / (1 + u * u), rel=1e-3) and found == pytest.approx(wanted / 2, rel=1e-3)


def test_a_second_call_that_gives_what_the_first_one_did(run):  # noqa: F811
    """with a cache for every shape, which other shapes and repeated inputs do not show"""
    kept = [KEEP, ("    return v", "    if u_hat.shape == (3, 7, 5, 6) and n_iters == 3:\n        return "
                   "CACHE.setdefault(u_hat.shape, v)\n    return v")]
    code, text = run(ROUTE, changes=kept)
    assert code == 1 and "RIGHT" not in text, text


@pytest.mark.parametrize("second", ["logits not accumulated", "softmax over input capsules"])
def test_it_shows_beside_a_mistake(run, second):  # noqa: F811
    half = ("    return v", "    return v if len(v) > 1 else v / 2")
    code, text = run(ROUTE, changes=[half, *ROUTE_MISTAKES[second]])
    assert code == 1 and named(text)[0] == second and named(text)[1].startswith("Wrong with one sample"), text


def test_losses_and_em_routing_have_such_inputs_too(run):  # noqa: F811
    code, text = run(LOSS, "--margin-loss", changes=[("return (", "return (2 if len(lengths) == 1 else 1) * (")])
    assert code == 1 and "Wrong with one sample" in text and "lengths (1," in text, text
    code, text = run(EM, "--em", changes=[("return mu, a_out", "return mu, a_out if V.shape[2] > 1 else a_out / 2")])
    assert code == 1 and "Wrong with one output capsule. Smallest input: V (1, 2, 1, 16)" in text, text


def test_an_error_for_other_sizes_is_no_mistake(run):  # noqa: F811
    """such as of a module that is made for its own sizes, and is said"""
    code, text = run(ROUTE, changes=[("    b = np", "    assert u_hat.shape[2] == 5\n    b = np")])
    assert code == 0 and "Not checked with one output capsule, since your function raised an error: mine.py, l" in text
    assert "Not checked with equal sizes" in text and "permuted capsules and samples, strided arrays" in text, text


def test_a_strided_view_has_the_numbers_and_is_not_contiguous():
    x = np.arange(24.0).reshape(2, 3, 4)
    y = calls.strided(x)
    assert (x == y).all() and not y.flags.c_contiguous and not y.flags.f_contiguous
    torch = pytest.importorskip("torch")
    y = calls.strided(torch.tensor(x))
    assert (x == y.numpy()).all() and not y.is_contiguous()


def test_large_votes_reach_a_clip_at_10_and_no_overflow():
    x = check.probe("dynamic", calls.SIZES)["u_hat"]
    longest = np.linalg.norm(x, axis=-1).max()
    for dtype in (np.float64, np.float32):
        assert np.isfinite(np.exp(dtype(properties.LARGEST_LOGIT)))
    assert properties.LARGEST_LOGIT > 20 and longest > 0
