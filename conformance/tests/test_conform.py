"""assert_conforms and the flags of the command: verdicts, what is allowed, JSON, one line, a required gradient."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from capsule_conformance import assert_conforms, command
from test_check import EM, EM_MISTAKES, LOSS, ROUTE, ROUTE_MISTAKES, SPREAD, named, run  # noqa: F401

RIGHT = {}
exec(ROUTE + LOSS + EM, RIGHT)                                 # functions of these names
NO_EPSILON = ROUTE_MISTAKES["no epsilon in the squash, forward"]


def functions(source, changes):
    """Return the functions of a changed source."""
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    made = {}
    exec(source, made)
    return made


def test_a_right_function_conforms():
    assert_conforms(RIGHT["route"])
    assert_conforms(RIGHT["loss"], kind="margin-loss")
    assert_conforms(RIGHT["em_route"], kind="em", iterations=[1, 2])
    assert_conforms(lambda u_hat: RIGHT["route"](u_hat, 3), iterations=3, axes={"u_hat": "NIJE"}, sizes={"I": 9})
    assert_conforms(lambda u, W, n: RIGHT["route"](np.einsum("nid,ijed->nije", u, W), n), kind="layer")


def test_the_error_is_the_report():
    wrong = functions(ROUTE, ROUTE_MISTAKES["logits not accumulated"])["route"]
    with pytest.raises(AssertionError) as raised:
        assert_conforms(wrong)
    assert "route(u_hat, n_iters) against dynamic routing" in str(raised.value)
    assert named(str(raised.value)) == ["logits not accumulated"]
    assert_conforms(wrong, allow="logits not accumulated")
    with pytest.raises(AssertionError, match="softmax over input"):
        both = functions(ROUTE, [*ROUTE_MISTAKES["logits not accumulated"],
                                 *ROUTE_MISTAKES["softmax over input capsules"]])["route"]
        assert_conforms(both, allow=["logits not accumulated"])


def test_a_function_that_keeps_something_or_is_random():
    """which cannot be imported anew, as a module can"""
    for name in ("logits kept from the batch before", "Something is random"):
        with pytest.raises(AssertionError, match="A repeated call gives another output"):
            assert_conforms(functions(ROUTE, ROUTE_MISTAKES[name])["route"])


def test_signs_show():
    """An absolute value or a ReLU on agreements, or on the logits of activations, is not right"""
    agreement, logit = "(u_hat * v[:, None]).sum(-1)", "lambda_ * (beta_a - cost)"
    for source, old, new, kind in ((ROUTE, agreement, f"abs({agreement})", "dynamic"),
                                   (ROUTE, agreement, f"np.maximum(0, {agreement})", "dynamic"),
                                   (EM, logit, f"np.maximum(0, {logit})", "em")):
        with pytest.raises(AssertionError, match="NOT THIS PROCEDURE"):
            assert_conforms(functions(source, [(old, new)])["em_route" if kind == "em" else "route"], kind=kind)


def test_no_epsilon_is_right_but_for_a_capsule_without_votes(run):  # noqa: F811
    code, text = run(ROUTE, changes=NO_EPSILON)
    assert code == 1 and "VALUES RIGHT EXCEPT WITHOUT VOTES, GRADIENT NOT CHECKED" in text, text
    code, text = run(ROUTE, "--allow", "no epsilon", changes=NO_EPSILON)
    assert code == 0 and "Allowed: no epsilon in the squash, forward." in text
    assert_conforms(functions(ROUTE, NO_EPSILON)["route"], allow=["no epsilon"])
    code, text = run(EM, "--em", "--iterations", "1", "2", changes=EM_MISTAKES["EM: no epsilon on the variance"])
    assert code == 1 and "RIGHT EXCEPT WITH EQUAL VOTES" in text, text


def test_an_error_with_other_inputs_is_no_right(run):  # noqa: F811
    code, text = run(ROUTE, changes=[("    b = np", "    assert u_hat[:, :, 0].any()\n    b = np")])
    assert code == 1 and "WRONG" in text and "changed inputs: raised mine.py, line 9: AssertionError" in text, text


def test_a_gradient_can_be_required(run):  # noqa: F811
    assert_conforms(RIGHT["route"])
    with pytest.raises(AssertionError, match="The gradient is required, and was not checked"):
        assert_conforms(RIGHT["route"], require_gradient=True)
    assert run(ROUTE, "--require-gradient")[0] == 1

    def backward(lengths, present):
        return 2 * (-present * np.maximum(0, 0.9 - lengths) + 0.5 * (1 - present) * np.maximum(0, lengths - 0.1)) / 3
    assert_conforms(RIGHT["loss"], kind="margin-loss", backward=backward, require_gradient=True)


def test_json_and_one_line(run, tmp_path, capsys):  # noqa: F811
    changes = ROUTE_MISTAKES["softmax over input capsules"]
    code, text = run(ROUTE, "--quiet", changes=changes)
    assert code == 1 and text == f"{tmp_path}/mine.py:route: WRONG: softmax over input capsules\n"
    code, text = run(ROUTE, "--json", "--allow", "softmax over input", changes=changes)
    report = json.loads(text)
    assert code == 0 and report["passed"] and report["verdict"] == "WRONG" and report["precision"] == "float64"
    assert report["mistakes"] == report["allowed"] == ["softmax over input capsules"]
    assert not report["lines"][0]["holds"] and "1 iteration" in report["lines"][0]["what"]
    code, text = run(ROUTE, "--quiet")
    assert code == 0 and text.endswith("VALUES RIGHT, GRADIENT NOT CHECKED\n")


def test_float32_and_float16_are_right_up_to_precision(run):  # noqa: F811
    """in the output, in the inputs, or inside"""
    for changes, shown in (([("    return v", "    return v.astype('f4')")], "float32"),
                           ([("    return v", "    return v.astype('f2')")], "float16"),
                           ([("* v[:, None]).sum(-1)", "* v[:, None]).sum(-1).astype('f4')")], "with float32 inside"),
                           ([("    b = np", "    u_hat = u_hat.astype('f2').astype('f8')\n    b = np")],
                            "with float16 inside")):
        code, text = run(ROUTE, changes=changes)
        assert code == 0 and "RIGHT UP TO PRECISION" in text and shown in text, text
        code, text = run(ROUTE, changes=[*changes, *ROUTE_MISTAKES["softmax over input capsules"]])
        assert code == 1 and named(text) == ["softmax over input capsules"], text


def test_float32_in_a_part_alone_is_right_up_to_precision(run):  # noqa: F811
    """such as first logits in float32, which round the first coupling coefficients"""
    first = [("b = np.zeros(u_hat.shape[:3])", "b = np.zeros(u_hat.shape[:3], 'f4')")]
    code, text = run(ROUTE, changes=first)
    assert code == 0 and "VALUES RIGHT UP TO PRECISION" in text and "float32 in a part" in text, text
    code, text = run(ROUTE, changes=[*first, *ROUTE_MISTAKES["logits not accumulated"]])
    assert code == 1 and named(text) == ["logits not accumulated"], text


def test_a_curved_function_is_not_taken_for_low_precision(run):  # noqa: F811
    """as if its rounding bent it"""
    code, text = run(ROUTE, changes=[("v = squash(s)", "v = s / (s.sum(-1, keepdims=True) + 1e-20)")])
    assert code == 1 and "NumPy float64, relative" in text and "NOT THIS PROCEDURE" in text, text


def test_an_epsilon_added_to_v_is_right_up_to_precision(run):  # noqa: F811
    """although v is not 0 without votes"""
    for dtype in ("f8", "f4"):
        code, text = run(ROUTE, changes=[("v = squash(s)", "v = squash(s) + 1e-8"),
                                         ("    return v", f"    return v.astype('{dtype}')")])
        assert code == 0 and "VALUES RIGHT UP TO PRECISION" in text and "bias" not in text, text


def test_another_order_of_axes_is_offered_with_its_bias(run):  # noqa: F811
    """and not the order that the flag gave"""
    code, text = run(ROUTE, "--axes", "u_hat=NIJE1", changes=[
        ("    b = np", "    u_hat = u_hat[..., 0]\n    b = np"), *ROUTE_MISTAKES["bias in the output capsules"]])
    assert code == 1 and named(text) == ["bias in the output capsules"] and "DIFFERS, with its axes" not in text, text
    code, text = run(ROUTE, changes=[("    b = np", "    u_hat = u_hat.transpose(2, 1, 0, 3)\n    b = np"),
                                     ("    return v", "    return v.transpose(1, 0, 2)"),
                                     *ROUTE_MISTAKES["bias in the output capsules"]])
    assert code == 1 and "it agrees but for a bias. If that is yours, add: --axes u_hat=JINE" in text, text


def test_a_layer_may_normalize_its_matrices(run):  # noqa: F811
    """and depends on them then, though not on their scale"""
    layer = ROUTE + """
def layer(u, W, n_iters):
    return route(np.einsum("nid,ijed->nije", u, W / np.linalg.norm(W, axis=-1, keepdims=True)), n_iters)
"""
    code, text = run(layer, "--layer")
    assert code == 1 and "NOT THIS PROCEDURE" in text and "does not depend" not in text, text


@pytest.mark.slow
def test_float32_in_a_part_hides_no_other_order_of_the_axes(run):  # noqa: F811
    first = [("b = np.zeros(u_hat.shape[:3])", "b = np.zeros(u_hat.shape[:3], 'f4')")]
    order = [("    b = np", "    u_hat = u_hat.transpose(0, 3, 2, 1)\n    b = np"),
             ("return v", "return v.transpose(0, 2, 1)")]
    code, text = run(ROUTE, "--axes", "u_hat=NEJI", changes=[*first, *order])
    assert code == 0 and "float32 in a part" in text, text
    code, text = run(ROUTE, changes=[*first, *order])
    assert code == 1 and "--axes u_hat=NEJI" in text, text


def test_low_precision_gets_no_invented_diagnosis(run):  # noqa: F811
    """An unknown deviation of 4% is no mistake with a name, even where float16 would let several fit"""
    for dtype in ("f4", "f2"):
        code, text = run(ROUTE, changes=[("    return v", f"    return (v + 0.04 * np.sin(9 * v)).astype('{dtype}')")])
        assert code == 1 and "NOT THIS PROCEDURE" in text and not named(text), text


def test_what_cannot_be_used_is_said_in_one_line(run, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sys, "path", list(sys.path))
    for kind, options, words in (("routing", {}, "kind 'routing': write one of dynamic"),
                                 ("dynamic", {"allow": ["noepsilon"]}, "no kind of mistake begins so"),
                                 ("dynamic", {"m": 0.2}, "--m has no effect"),
                                 ("em", {}, "missing 3 required")):
        with pytest.raises(ValueError, match=words):
            assert_conforms(RIGHT["route"] if kind != "em" else lambda V, a, b, c, d, e, f, g: V, kind, **options)
    with pytest.raises(ValueError, match="a class"):
        assert_conforms(dict)
    assert command.main(["tour.ipynb:route"]) == 2
    assert "is a notebook" in capsys.readouterr().err
    code, text = run(ROUTE, changes=[("    b = np", "    assert len(u_hat) == 99\n    b = np")])
    assert code == 2 and text.startswith("error: mine.py, line 9: AssertionError"), text


def test_json_has_errors_too_and_says_numerical(run, capsys):  # noqa: F811
    for flags in (("--json", "--iterations", "0"), ("--json", "--layer")):
        code, text = run(ROUTE, *flags)
        assert code == 2 and list(json.loads(text)) == ["error"], text
    with pytest.raises(SystemExit) as stopped:
        command.main(["mine:route", "--json", "--nonsense"])
    assert stopped.value.code == 2 and "nonsense" in json.loads(capsys.readouterr().out)["error"]
    code, text = run(ROUTE, "--json")
    assert code == 0 and json.loads(text)["gradient"] == "numerical", text
    assert run(ROUTE, "--require-gradient")[0] == 1


@pytest.mark.parametrize(("module", "recipe"), [
    ("keras.src.layers",
     "a class of Keras. Write a function that calls it: docs/reference/conformance.md, \"A Keras layer\""),
    ("torch.nn", "a class of PyTorch"), ("mine", "is a class. Write")])
def test_a_class_leads_to_the_recipe_of_its_framework(module, recipe):
    base = type("Module", (), {"__module__": module})
    with pytest.raises(ValueError, match=recipe):
        assert_conforms(type("Caps", (base,), {}))


BATCH_SECOND = """
import numpy as np
def route(u_hat, n_iters):                                     # (J, N, I, E)
    b = np.zeros(u_hat.shape[:3])
    for _ in range(n_iters):
        c = np.exp(b) / np.exp(b).sum(0)
        s = (c[..., None] * u_hat).sum(2)
        square = (s * s).sum(-1, keepdims=True)
        v = s * square / (1 + square) / np.sqrt(square + 1e-300)
        b = b + (u_hat * v[:, :, None]).sum(-1)
    return v
"""


def test_one_line_does_not_call_another_order_of_the_axes_wrong(run):  # noqa: F811
    code, text = run(BATCH_SECOND, "--quiet")
    assert code == 1 and text.strip().endswith("add: --axes u_hat=JNIE")
    assert ": DIFFERS: " in text and "WRONG" not in text
    assert json.loads(run(BATCH_SECOND, "--json")[1])["verdict"] == "DIFFERS"
    assert run(BATCH_SECOND, "--quiet", "--axes", "u_hat=JNIE")[0] == 0


def test_a_function_of_another_kind_leads_to_its_flag(run):  # noqa: F811
    three = "def route(u, W, n_iters):\n    return u"
    assert "add --layer" in run(three)[1] and "add --em" in run("def route(V, a, beta_u, beta_a, lambdas): pass")[1]
    assert "leave --layer out" in run(ROUTE, "--layer", "--iterations", "1", "2")[1]


def test_axes_and_sizes_are_dicts():
    with pytest.raises(ValueError, match="axes: write a dict"):
        assert_conforms(lambda u, W, n_iters: u, kind="layer", axes="W=JIDE")
    with pytest.raises(ValueError, match="sizes: write a dict"):
        assert_conforms(lambda u_hat, n_iters: u_hat, sizes=["I=9"])


def test_numpy_that_is_missing_is_named():
    """python3 -S has no packages"""
    program = [sys.executable, "-S", "-I", str(Path(command.__file__).parents[1] / "check.py"), "mine.py:route"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: the check needs NumPy.")
    assert "Traceback" not in done.stderr


def test_the_header_of_a_spread_loss_has_the_users_order(run):  # noqa: F811
    assert "spread(labels, a, m) against" in run(SPREAD.replace("(a, labels, m)", "(labels, a, m)"), "--spread-loss")[1]
