"""Check a routing layer of your own, in NumPy, PyTorch or any framework, against the papers, and name its mistakes.

    python3 conformance/check.py mymodule:route            # route(u_hat, n_iters) -> v, dynamic routing
    python3 conformance/check.py mymodule:layer --layer    # layer(u, W, n_iters) -> v
    python3 conformance/check.py mymodule:em_route --em    # em_route(V, a, beta_u, beta_a, lambdas) -> mu, a
    python3 conformance/check.py mymodule:loss --margin-loss    # loss(lengths, present) -> a number, or one per sample

mymodule is a Python file in the current folder; path/to/mymodule.py:route works, too. Your function gets NumPy arrays,
or PyTorch tensors if its module imports torch, and returns arrays or tensors of any kind. All axes have different
sizes, so that their order is found from the shape of the output, without looking at its values.

docs/conformance.md shows how to connect a module with weights of its own, and lists all mistakes that are named.
Exit code 0: everything agrees. 1: something differs. 2: the function could not be called.
"""
import argparse
import importlib.util
import inspect
import itertools
import os
import sys

import numpy as np

from . import calls
from .calls import INTERFACES, Call, MarginCall, Unusable, load
from .check import Check


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="module:function, or path/to/file.py:function")
    which = parser.add_mutually_exclusive_group()
    for kind in ("layer", "em", "margin-loss"):
        which.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind.split("-")[0],
                           help=f"the function is {INTERFACES[kind.split('-')[0]].what}")
    parser.add_argument("--iterations", type=int, nargs="+", metavar="T", default=[1, 2, 3],
                        help="numbers of routing iterations to check (default: 1 2 3)")
    parser.add_argument("--axes", nargs="+", metavar="NAME=ORDER", default=[],
                        help="order of the axes of an input, such as u_hat=JNIE; 1 is a singleton, PQ a 4x4 matrix")
    parser.add_argument("--sizes", nargs="+", metavar="AXIS=N", default=[],
                        help="sizes for a function that works for its own only, such as I=1152 J=10 E=16")
    parser.add_argument("--lambdas", type=float, nargs="+", metavar="X",
                        help="[--em] inverse temperatures that your function uses by itself; it is then called with "
                        "the number of iterations in place of a list of them")
    parser.add_argument("--backward", metavar="TARGET",
                        help="module:function of your backward pass: backward(dv, u_hat, n_iters) -> du_hat; with "
                        "several inputs, their gradients in the same order")
    parser.add_argument("--dtype", choices=("float64", "float32"),
                        help="of the inputs (default: float64, or float32 if the function accepts no other)")
    parser.add_argument("--framework", choices=("numpy", "torch"),
                        help="of the inputs (default: torch if the module imports it)")
    parser.add_argument("--tolerance", type=float, metavar="X", help="relative to the largest entry of an output "
                        "(default: 1e-9; float32 1e-4)")
    return parser.parse_args(argv)


def pairs(given, what):
    for text in given:
        if "=" not in text:
            raise Unusable(f"{what} {text}: write NAME=VALUE, such as {'u_hat=NIJE' if what == '--axes' else 'I=1152'}")
    return dict(text.split("=", 1) for text in given)


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
        if letter not in used or not text.isdecimal() or not 2 <= int(text) <= 100_000:
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


def takes_a_count(function, interface):
    """Return False if a function takes the inputs and no number of iterations; True if not, or if it does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    if named := [p.name for p in parameters if p.kind == p.KEYWORD_ONLY and p.default is p.empty]:
        raise Unusable(f"your function takes {', '.join(named)} by name only. Move the * of its definition behind it")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) != len(interface.inputs) or any(p.kind == p.VAR_POSITIONAL for p in parameters)


def main(argv=None):
    args = parse(argv)
    kind = args.kind or "routing"
    interface = INTERFACES[kind]
    try:
        fixed = pairs(args.axes, "--axes")
        check_axes(fixed, interface)
        sizes = own_sizes(pairs(args.sizes, "--sizes"), interface)
        iterations = [1] if kind == "margin" else sorted(set(args.iterations))
        if iterations[0] < 1:
            raise Unusable("--iterations: at least 1")
        if args.tolerance is not None and not 0 < args.tolerance <= 0.01:
            raise Unusable("--tolerance: between 0 and 0.01, such as 1e-6")
        if args.lambdas and kind != "em":
            raise Unusable("--lambdas has no effect without --em. Leave it out")
        if args.framework == "torch" and not importlib.util.find_spec("torch"):
            raise Unusable("--framework torch: PyTorch is not installed here. Install it, or leave --framework out")
        lambdas = args.lambdas or [0.02 + 0.015 * t for t in range(max(iterations))]
        if len(lambdas) < max(iterations):
            raise Unusable(f"--lambdas: {len(lambdas)} given for {max(iterations)} iterations. Give one for each, or "
                           "lower --iterations.")
        fresh = load(args.target)
        function = fresh()                                     # imports the module, and with it perhaps torch
        counted = kind == "margin" or takes_a_count(function, interface)
        if not counted and len(iterations) > 1:
            raise Unusable(f"{args.target} has no argument for the number of iterations. Say how many it runs, such "
                           "as: --iterations 3")
        frameworks = [args.framework] if args.framework else ["torch", "numpy"] if "torch" in sys.modules else ["numpy"]
        count = None
        if kind != "margin" and counted:
            def count(n):
                return lambdas[:n] if kind == "em" and not args.lambdas else n
        problems, found = [], []
        backward = args.backward and load(args.backward)()
        for framework, dtype in itertools.product(frameworks, [args.dtype] if args.dtype else ["float64", "float32"]):
            call = (MarginCall if kind == "margin" else Call)(interface, fresh, framework, dtype, sizes, count)
            checked = Check(kind, call, lambdas, iterations, args.tolerance, backward)
            fits = call.search(checked.inputs, max(iterations), fixed)
            try:
                found.append((checked, next(fits), fits))
            except Unusable as problem:
                problems.append(problem)
                continue
            if framework == frameworks[-1] or not call.converts_tensors(checked.inputs, max(iterations)):
                break
        if not found:
            raise min(problems, key=lambda text: "Tensor" in str(text) or "ndarray" in str(text))    # not of a mixture
        checked, first, fits = found[-1] if found[-1][0].call.framework == "numpy" else found[0]
        shown = "" if kind == "margin" else f"({', '.join([*interface.inputs, interface.count])})"
        with np.errstate(all="ignore"):
            return checked.run(first, fits, f"{args.target}{shown} against {interface.what}")
    except Unusable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except MemoryError:
        print("error: not enough memory for these sizes. Give smaller ones to --sizes", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def command():
    """Run main() as a program, whose output may be a pipe that is closed or a disk that is full."""
    try:
        code = main()
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:                                    # of a pipe such as | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:                                   # such as a full disk
        print(f"error: {error.filename or 'the report cannot be written'}: {error.strerror}", file=sys.stderr)
        code = 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
