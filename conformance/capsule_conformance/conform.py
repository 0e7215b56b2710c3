"""Checks a function of the user's: what the command and assert_conforms share."""
import importlib.util
import inspect
import itertools
import re
import sys

import numpy as np

from . import calls
from .calls import INTERFACES, Call, LossCall, Unusable
from .check import MARGINS, Check, Report, plain
from .kinds import KINDS
from .properties import MORE
from .reference import EM_STOPS, MISTAKES, STOPS


def assert_conforms(function, kind="dynamic", **options):
    """Raise AssertionError, whose text is the report, if a function differs from the paper.

    function: route(u_hat, n_iters) -> v, or what else docs/reference/conformance.md lists. kind: "dynamic", "layer",
    "em", "margin-loss" or "spread-loss". options: those of `examine`, such as allow=["no epsilon"],
    require_gradient=True, backward=route_backward or sizes={"I": 1152}. ValueError if the function cannot be called.
    """
    report = examine(calls.given(function), kind, getattr(function, "__name__", type(function).__name__), **options)
    if not report.passed:
        raise AssertionError("\n" + report.text)


def examine(fresh, kind, target, *, allow=(), require_gradient=False, backward=None, iterations=(1, 2, 3), axes=None,
            sizes=None, lambdas=None, m=None, dtype=None, framework=None, tolerance=None):
    """Return a Report on a function.

    fresh: returns the function, imported anew if it can be. target: its name. The others are the flags of the command,
    as it explains them: allow, a list of names; axes and sizes, dicts; backward, a function.
    """
    if kind not in INTERFACES:
        raise Unusable(f"kind {kind!r}: write one of {', '.join(INTERFACES)}")
    interface, lambdas = INTERFACES[kind], None if lambdas is None else [float(x) for x in lambdas]
    for name, given, example in ("axes", axes, '{"u_hat": "JNIE"}'), ("sizes", sizes, '{"I": 1152}'):
        if given and not isinstance(given, dict):
            raise Unusable(f"{name}: write a dict, such as {name}={example}")
    fixed, is_loss = axes or {}, "loss" in kind
    check_axes(fixed, interface)
    allow = [allow] if isinstance(allow, str) else allow
    iterations = [iterations] if isinstance(iterations, int) else iterations
    check_allowed(allow)
    sizes = own_sizes(sizes or {}, interface)
    cases = {"margin-loss": [1], "spread-loss": MARGINS if m is None else [m]}.get(kind) or sorted(set(iterations))
    if not is_loss and cases[0] < 1:
        raise Unusable("--iterations: at least 1")
    if tolerance is not None and not 0 < tolerance <= 0.01:
        raise Unusable("--tolerance: between 0 and 0.01, such as 1e-6")
    if lambdas and kind != "em":
        raise Unusable("--lambdas has no effect without --em. Leave it out")
    if m is not None and kind != "spread-loss":
        raise Unusable("--m has no effect without --spread-loss. Leave it out")
    if m is not None and not 0 < m < 10:
        raise Unusable("--m: a positive number, such as 0.2")
    if framework == "torch" and not importlib.util.find_spec("torch"):
        raise Unusable("--framework torch: PyTorch is not installed here. Install it, or leave --framework out")
    schedule = lambdas or [0.02 + 0.015 * t for t in range(int(max(cases)) + MORE)]
    if not is_loss and len(schedule) < max(cases):
        raise Unusable(f"--lambdas: {len(schedule)} given for {max(cases)} iterations. Give one for each, or lower "
                       "--iterations.")
    fresh = count_last(fresh, interface)                       # imports the module, and with it perhaps torch
    function = fresh()
    if kind == "dynamic" and (flag := flag_of_a_loss(function)):
        raise Unusable(f"{target} seems to be a loss, by the names of its arguments. Add {flag}")
    if flag := flag_of_a_layer(function, kind):
        raise Unusable(f"{target} takes other arguments than dynamic routing's u_hat and n_iters. {flag}")
    counted = kind == "margin-loss" or takes_a_count(function, interface)
    if not counted and len(cases) > 1:
        if is_loss:
            raise Unusable(f"{target} has no argument for the margin m. Say which it has, such as: --m 0.2")
        advice = "Say how many it runs, such as: --iterations 3"
        if kind == "layer":
            advice += ". If it is route(u_hat, n_iters), leave --layer out"
        raise Unusable(f"{target} has no argument for the number of iterations. {advice}")
    frameworks = [framework] if framework else ["torch", "numpy"] if "torch" in sys.modules else ["numpy"]
    count = None
    if kind != "margin-loss" and counted:
        def count(n):
            return schedule[:n] if kind == "em" and not lambdas else n
    problems, found = [], []
    for framework, precision in itertools.product(frameworks, [dtype] if dtype else ["float64", "float32"]):
        call = (LossCall if is_loss else Call)(interface, fresh, framework, precision, sizes, count)
        checked = Check(kind, call, schedule, cases, tolerance, backward, allow, require_gradient)
        fits = call.search(checked.inputs, max(cases), fixed)
        try:
            found.append((checked, next(fits), fits))
        except Unusable as problem:
            problems.append(problem)
            continue
        if framework == frameworks[-1] or not call.converts_tensors(checked.inputs, max(cases)):
            break
    if not found:
        raise min(problems, key=lambda text: "Tensor" in str(text) or "ndarray" in str(text))    # not of a mixture
    checked, first, fits = found[-1] if found[-1][0].call.framework == "numpy" else found[0]
    shown = "" if is_loss else f"({', '.join(checked.call.order)})"
    with np.errstate(all="ignore"):
        return checked.run(first, fits, Report(target + shown, interface.what))


def check_allowed(allow):
    names = [kind[0] for kind in KINDS] + [m.name for m in (*itertools.chain(*MISTAKES.values()), *STOPS, *EM_STOPS)]
    for text in allow:
        with_value = plain(text).startswith(("large epsilon", "gradient multiplied by"))
        if not with_value and (not plain(text) or not any(plain(name).startswith(plain(text)) for name in names)):
            raise Unusable(f"--allow {text!r}: no kind of mistake begins so. Copy a name from the report, such as "
                           '"logits not accumulated"')


def check_axes(fixed, interface):
    names = ("order", "lengths", "present") if interface.votes is None else interface.inputs
    for name, layout in fixed.items():
        if name not in names:
            raise Unusable(f"--axes {name}={layout}: there is no input {name}. Inputs: {', '.join(names)}")
        axes = interface.inputs.get(name, "")
        if interface.votes and sorted(layout.replace("1", "").replace("PQ", "H")) != sorted(axes):
            raise Unusable(f"--axes {name}={layout}: use each of {', '.join(axes)} once, and 1 for a singleton")


def own_sizes(given, interface):
    sizes = dict(calls.SIZES)
    used = sorted(set("".join([*interface.inputs.values(), *interface.outputs.values()])))
    for letter, text in given.items():
        if letter not in used or not str(text).isdecimal() or not 2 <= int(text) <= 100_000:
            raise Unusable(f"--sizes {letter}={text}: write AXIS=N with an axis of {', '.join(used)} and N from 2 "
                           "to 100000")
        sizes[letter] = int(text)
    alike = [(a, b) for a, b in itertools.combinations(used, 2) if sizes[a] == sizes[b]]
    if alike:
        a, b = alike[0]
        other, free = b if a in given else a, next(n for n in range(2, 99) if n not in sizes.values())
        raise Unusable(f"--sizes: {a} and {b} are both {sizes[a]}, but the order of the axes is found by their sizes. "
                       f"Add, for example: {other}={free}")
    if "H" in used and round(sizes["H"] ** 0.5) ** 2 != sizes["H"]:
        raise Unusable(f"--sizes H={sizes['H']}: H is the number of entries of a square pose matrix, such as 16")
    return sizes


def flag_of_a_loss(function):
    """Return the flag for a function whose arguments are named as those of a loss, or None."""
    names = [name.lower() for name in calls.parameter_names(function)]
    if not any(len(name) > 2 and not name.startswith(("n_", "num")) and calls.is_target(name) for name in names):
        return None
    return {2: "--margin-loss", 3: "--spread-loss"}.get(len(names))


def flag_of_a_layer(function, kind):
    """Return what to do about a function with as many arguments as another kind has, "" if it has its own"""
    try:
        parameters = calls.signature_of(function).parameters.values()
    except (TypeError, ValueError):
        return ""
    needed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
              and p.default is p.empty]
    if kind == "dynamic" and len(needed) == 3:
        return "If it is a layer(u, W, n_iters), add --layer"
    if kind == "dynamic" and len(needed) == 5:
        return "If it is EM routing (V, a, beta_u, beta_a, lambdas), add --em"
    return ""


def count_last(fresh, interface):
    """Return fresh, or one whose function takes the number of iterations after the inputs, where the user's takes it by
    name only or after parameters that have defaults, such as route(u_hat, eps=1e-9, n_iters=3)."""
    try:
        parameters = [*calls.signature_of(fresh()).parameters.values()]
    except (TypeError, ValueError):
        return fresh
    n = len(interface.inputs)
    inputs, rest = [p.replace(default=p.empty) for p in parameters[:n]], parameters[n:]
    count = [p for p in rest if re.fullmatch(calls.NAMES.get(interface.count, ""), p.name.lower())]
    count = [p for p in count if len(p.name) > 1] or count                 # n_iters, and not a temperature t beside it
    if len(count) != 1 or rest[0] is count[0] and count[0].kind != count[0].KEYWORD_ONLY:
        return fresh
    own, others = count[0].name, [p for p in rest if p is not count[0]]
    has_name = count[0].kind in (count[0].POSITIONAL_OR_KEYWORD, count[0].KEYWORD_ONLY)
    without_names = all(p.kind <= p.POSITIONAL_OR_KEYWORD for p in inputs)
    optional = all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in others)
    if not (has_name and without_names and optional):
        return fresh

    def fresh_with_count_last():
        function = fresh()

        def called(*given):
            return function(*given[:-1], **{own: given[-1]})
        called.__signature__ = inspect.Signature(
            [*inputs, inspect.Parameter(own, inspect.Parameter.POSITIONAL_OR_KEYWORD)])
        return called
    vars(fresh_with_count_last).update(vars(fresh))
    return fresh_with_count_last


def takes_a_count(function, interface):
    """Return False if a function takes the inputs and no number of iterations; True if not, or if it does not say."""
    try:
        parameters = calls.signature_of(function).parameters.values()
    except (TypeError, ValueError):
        return True
    if named := [p.name for p in parameters if p.kind == p.KEYWORD_ONLY and p.default is p.empty]:
        raise Unusable(f"your function takes {', '.join(named)} by name only. Put a function around it")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) != len(interface.inputs) or any(p.kind == p.VAR_POSITIONAL for p in parameters)
