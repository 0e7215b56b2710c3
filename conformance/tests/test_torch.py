"""conformance/check.py with PyTorch: autograd, labels as integers, a module with weights inside, own precision."""
import subprocess
import sys
from pathlib import Path

import pytest
from test_check import ROUTE as NUMPY_ROUTE
from test_check import named, run  # noqa: F401  (run is a fixture)

torch = pytest.importorskip("torch")
from capsule_conformance import assert_conforms, command

ROOT = Path(__file__).resolve().parents[2]
ROUTE = '''
import torch

def route(u_hat, n_iters):
    b = torch.zeros_like(u_hat[..., 0])
    for t in range(n_iters):
        c = torch.softmax(b, dim=2)
        s = (c[..., None] * u_hat).sum(1)
        square = (s * s).sum(-1, keepdim=True)
        v = s * torch.sqrt(square + 1e-9) / (1 + square)
        b = b + (u_hat * v[:, None]).sum(-1)
    return v
'''


@pytest.mark.parametrize(("changes", "names"), [
    ([], []),
    ([("zeros_like(u_hat[..., 0])", "zeros(u_hat.shape[:3], dtype=torch.float32)"),
      ("    return v", "    assert u_hat.dtype == torch.float32\n    return v")], []),
    ([("c[..., None] * u_hat", "c.detach()[..., None] * u_hat")], ["gradient of inner iterations stopped"]),
    ([("* v[:, None]", "* v.detach()[:, None]")], ["output capsules stopped in the agreement"]),
    ([("c[..., None] * u_hat", "c[..., None] * (u_hat if t == n_iters - 1 else u_hat.detach())")],
     ["votes stopped in the inner sums"]),
    ([("(u_hat * v[", "(u_hat.detach() * v[")], ["votes stopped in the agreement"]),
    ([("c[..., None] * u_hat", "c.detach()[..., None] * u_hat"), ("dim=2", "dim=1")],
     ["softmax over input capsules", "gradient of inner iterations stopped"]),
    ([("s * torch.sqrt(square + 1e-9) / (1 + square)", "square / (1 + square) * s / torch.sqrt(square)")],
     ["no epsilon in the squash, forward"]),
    ([("torch.sqrt(square + 1e-9)", "(torch.sqrt(square) + 1e-9)")], ["no epsilon in the squash, gradient"])])
def test_stopped_and_missing_gradients_are_named(run, changes, names):  # noqa: F811
    code, text = run(ROUTE, changes=changes)
    found = [name.split(":")[0] for name in named(text)]
    assert found == names and code == bool(names), text


@pytest.mark.parametrize("returned", [
    "torch.utils.checkpoint.checkpoint(again, u_hat, use_reentrant=False)", "([c, c], v)", "([s, s], [s, v])",
    "{'couplings': [c, c], 'poses': v}"])
def test_a_backward_pass_that_makes_tensors_and_lists_of_tensors(run, returned):  # noqa: F811
    """A tensor without a dtype has the checked one there, too; lists of tensors need no array"""
    again = ("    def again(u_hat):\n        return v + 0 * u_hat.sum() * (u_hat @ torch.ones(6, 1)).sum()\n"
             f"    return {returned}")
    code, text = run(ROUTE, changes=[("import torch", "import torch.utils.checkpoint"), ("    return v", again)])
    assert code == 0, text


def test_a_reentrant_checkpoint_is_differentiated_too(run):  # noqa: F811
    """It refuses autograd.grad, and is right all the same; with detached couplings it is not"""
    changes = [("import torch", "import torch.utils.checkpoint"), ("def route(", "def inner("),
               ("    return v", "    return v\n\n\ndef route(u_hat, n_iters):\n    return "
                                "torch.utils.checkpoint.checkpoint(inner, u_hat, n_iters, use_reentrant=True)")]
    code, text = run(ROUTE, changes=changes)
    assert code == 0 and "gradient agrees" in text, text
    code, text = run(ROUTE, changes=[*changes, ("c[..., None] * u_hat", "c.detach()[..., None] * u_hat")])
    assert code == 1 and named(text) == ["gradient of inner iterations stopped"], text


def test_what_cannot_be_differentiated_is_said_and_no_gradient_is_named(run):  # noqa: F811
    """Values that no mistake explains, or NaN: no traceback, and no factor of a gradient"""
    for changes in ([("    return v", "    v = torch.exp(v)\n    w = v * v\n    v += 1\n    return w")],
                    [("c = torch.softmax(b, dim=2)", "c = b / b.sum(2, keepdim=True)")]):
        code, text = run(ROUTE, changes=changes)
        assert code == 1 and not named(text) and "no known mistake. Compare" not in text, text


def test_a_gradient_that_is_nan_agrees_with_nothing(run):  # noqa: F811
    """also if it is not that of the first input"""
    source = ROUTE + """
class Scaled(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, g: g * torch.nan)

def layer(u, W, n_iters):
    return route(torch.einsum('nid,ijed->nije', u, Scaled.apply(W)), n_iters)
"""
    code, text = run(source, "--layer")
    assert code == 1 and "gradient differs by NaN" in text and "gradient agrees" not in text, text


def test_a_module_is_called_by_the_names_of_its_forward(run):  # noqa: F811
    source = ROUTE + ("\nclass Routing(torch.nn.Module):\n    def forward(self, u_hat, scale=1.0, n_iters=3):\n"
                      "        return route(scale * u_hat, n_iters)\nrouting = Routing()\n")
    code, text = run(source)
    assert code == 0, text


def test_a_detached_output_is_reported(run):  # noqa: F811
    code, text = run(ROUTE, changes=[("return v", "return v.detach()")])
    assert code == 1 and "gradient does not reach u_hat" in text


def test_low_precision_hides_no_stopped_gradient(run):  # noqa: F811
    """whose error, about 30%, is below 20 times bfloat16's tolerance; and the verdict says how precise it is"""
    low = [("return v", "return v.bfloat16()")]
    code, text = run(ROUTE, changes=low)
    assert code == 0 and "says, to 5%. Smaller mistakes do not show" in text, text
    code, text = run(ROUTE, changes=[*low, ("c[..., None] * u_hat", "c.detach()[..., None] * u_hat")])
    assert code == 1 and named(text) == ["gradient of inner iterations stopped"], text


def test_low_precision_gets_no_invented_diagnosis(run):  # noqa: F811
    code, text = run(ROUTE, changes=[("return v", "return (v + 0.1 * torch.sin(9 * v)).bfloat16()")])
    assert code == 1 and "NOT THIS PROCEDURE" in text and not named(text), text


def test_an_axis_of_length_1_does_not_excuse_an_average_over_the_batch(run):  # noqa: F811
    code, text = run(ROUTE, changes=[(".sum(-1)\n    return", ".sum(-1).mean(0, keepdim=True)\n    return")])
    assert code == 1 and named(text) == ["logits averaged over the batch"] and "--axes" not in text, text


def test_the_gradient_of_a_margin_loss_with_labels(run):  # noqa: F811
    source = '''
import torch

def loss(labels, v):
    lengths, present = v.norm(dim=-1), torch.nn.functional.one_hot(labels, v.shape[1])
    short, long = torch.relu(0.9 - lengths), torch.relu(lengths - 0.1)
    return (present * short ** 2 + 0.5 * (1 - present) * long ** 2).sum(1).mean()
'''
    code, text = run(source, "--margin-loss")
    assert code == 0 and "labels (numbers), capsules" in text and "gradient agrees" in text, text
    code, text = run(source, "--margin-loss", changes=[("lengths - 0.1)", "lengths.detach() - 0.1)")])
    assert code == 1 and "output agrees, gradient differs" in text, text


@pytest.mark.parametrize(("example", "flags", "expected"), [
    ("torch_right.py:route", (), []), ("torch_module.py:layer", ("--layer",), []),
    ("torch_wrong.py:route", (), ["logits averaged over the batch", "gradient of inner iterations stopped",
                                  "no epsilon in the squash, forward"])])
def test_examples(example, flags, expected, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = command.main([str(ROOT / "conformance/examples" / example), *flags])
    assert [name.split(":")[0] for name in named(capsys.readouterr().out)] == expected and code == bool(expected)


def test_a_pytorch_loss_is_called_with_tensors(tmp_path):
    """In a process of its own, in which nothing else has imported torch"""
    (tmp_path / "mine.py").write_text('''
import torch

def loss(lengths, labels):
    present, absent = torch.clamp(0.9 - lengths, min=0) ** 2, torch.clamp(lengths - 0.1, min=0) ** 2
    return (labels * present + 0.5 * (1 - labels) * absent).sum(dim=1).mean()
''', encoding="utf-8")
    done = subprocess.run([sys.executable, ROOT / "conformance/check.py", "mine:loss", "--margin-loss"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "PyTorch float64" in done.stdout, done.stdout + done.stderr


def test_a_numpy_function_beside_pytorch_ones_is_called_with_arrays(run):  # noqa: F811
    """NumPy's functions take tensors without gradients, too, so that the first calls succeed"""
    code, text = run('''
import numpy as np
import torch

def loss(lengths, present):
    short, long = np.maximum(0, 0.9 - lengths), np.maximum(0, lengths - 0.1)
    return (present * short ** 2 + 0.5 * (1 - present) * long ** 2).sum(1).mean()
''', "--margin-loss")
    assert code == 0 and "NumPy float64" in text, text


def test_functions_of_pytorch_and_of_numpy_conform_in_a_test(run):  # noqa: F811
    """with the gradient by autograd, and names for what was detached"""
    made = {}
    exec(ROUTE, made)
    assert_conforms(made["route"], require_gradient=True)
    exec(ROUTE.replace("c[..., None] * u_hat", "c.detach()[..., None] * u_hat"), made)
    with pytest.raises(AssertionError, match="gradient of inner iterations stopped"):
        assert_conforms(made["route"])
    assert_conforms(made["route"], allow=["gradient of inner iterations"])
    exec(NUMPY_ROUTE, made)
    assert_conforms(made["route"])


def test_a_stopped_gradient_shows_beside_a_missing_epsilon(run):  # noqa: F811
    """The verdict is then not that all is right but for a capsule without votes"""
    code, text = run(ROUTE, changes=[("s * torch.sqrt(square + 1e-9) / (1 + square)", "square / (1 + square) * s / "
                                      "torch.sqrt(square)")])
    assert code == 1 and "RIGHT EXCEPT WITHOUT VOTES" in text and "VALUES" not in text, text
    code, text = run(ROUTE, "--allow", "no epsilon", changes=[
        ("s * torch.sqrt(square + 1e-9) / (1 + square)", "square / (1 + square) * s / torch.sqrt(square)"),
        ("* v[:, None]", "* v.detach()[:, None]")])
    assert code == 1 and "WRONG" in text and "Allowed:" not in text, text


def test_batch_normalization_in_training_mode_is_sent_to_eval(run):  # noqa: F811
    source = ROUTE + '''
def layer(u_hat, n_iters):
    norm = torch.nn.BatchNorm1d(u_hat.shape[1] * u_hat.shape[2] * u_hat.shape[3]){mode}
    return route(norm(u_hat.flatten(1)).reshape(u_hat.shape), n_iters)
'''
    code, text = run(source.replace("{mode}", ""))
    assert code == 1 and "NOT THIS PROCEDURE" in text and "call its eval() first" in text, text
    code, text = run(source.replace("{mode}", ".eval()"), "--tolerance", "1e-4")
    assert code == 0 and "RIGHT" in text, text


@pytest.mark.parametrize("second", ["", "softmax over input capsules"])
def test_a_stop_in_the_first_iterations_is_named_and_where_no_gradient_arrives_is_said(run, second):  # noqa: F811
    """There, the first iterations are the last ones"""
    changes = [("        c = torch", "        votes = u_hat.detach() if t < 2 else u_hat\n        c = torch"),
               ("c[..., None] * u_hat", "c[..., None] * votes"), ("(u_hat * v[", "(votes * v[")]
    code, text = run(ROUTE, changes=[*changes, *([("dim=2)", "dim=1)")] if second else [])])
    assert code == 1 and "The gradient does not reach u_hat at 1 and 2 iterations, as with a stop in the first" in text
    names = [name for name in named(text) if not name.startswith("The gradient")]
    assert names == [*([second] if second else []), "gradient of inner iterations stopped"], text


def test_a_module_sized_from_its_weights_takes_no_search_for_other_orders(run):  # noqa: F811
    """whatever their order, where the diagnosis is complete"""
    source = ROUTE.replace("dim=2", "dim=1") + """
class Caps(torch.nn.Module):
    def __init__(self, W):
        super().__init__()
        self.W = torch.nn.Parameter(torch.randn(W.shape))

    def forward(self, u, n_iters):
        return route(torch.einsum("nid,ijed->nije", u, self.W), n_iters)

def layer(u, W, n_iters):
    return torch.func.functional_call(Caps(W), {"W": W}, (u, n_iters))
"""
    code, text = run(source, "--layer")
    assert code == 1 and named(text) == ["softmax over input capsules"] and "Not all orders" not in text, text
