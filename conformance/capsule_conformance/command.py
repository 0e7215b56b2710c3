"""Check a routing layer of your own, in NumPy, PyTorch or any framework, against the papers, and name its mistakes.

    python3 conformance/check.py mymodule:route            # route(u_hat, n_iters) -> v, dynamic routing
    python3 conformance/check.py mymodule:layer --layer    # layer(u, W, n_iters) -> v
    python3 conformance/check.py mymodule:em_route --em    # em_route(V, a, beta_u, beta_a, lambdas) -> mu, a
    python3 conformance/check.py mymodule:loss --margin-loss    # loss(lengths, present) -> a number, or one per sample
    python3 conformance/check.py mymodule:spread --spread-loss  # spread(a, present, m) -> a number, or one per sample

mymodule is a Python file in the current folder; path/to/mymodule.py:route works, too. Your function gets NumPy arrays,
or PyTorch tensors if its module imports torch, and returns arrays or tensors of any kind. All axes have different
sizes, so that their order is found from the shape of the output, without looking at its values.

docs/reference/conformance.md shows how to connect a module with weights of its own, and lists all mistakes that are
named.
Exit code 0: everything agrees. 1: something differs. 2: the function could not be called.
"""
import argparse
import json
import os
import sys
from dataclasses import asdict

from .calls import INTERFACES, Unusable, load
from .conform import examine


def parse(argv):
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            if "--json" not in (sys.argv[1:] if argv is None else argv):
                super().error(message)
            print(json.dumps({"error": message}))
            self.exit(2)
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="module:function, or path/to/file.py:function")
    which = parser.add_mutually_exclusive_group()
    for kind in ("layer", "em", "margin-loss", "spread-loss"):
        which.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, default="dynamic",
                           help=f"the function is {INTERFACES[kind].what}")
    parser.add_argument("--iterations", type=int, nargs="+", metavar="T", default=[1, 2, 3],
                        help="numbers of routing iterations to check (default: 1 2 3)")
    parser.add_argument("--axes", nargs="+", metavar="NAME=ORDER", default=[],
                        help="order of the axes of an input, such as u_hat=JNIE; 1 is a singleton, PQ a 4x4 matrix")
    parser.add_argument("--sizes", nargs="+", metavar="AXIS=N", default=[],
                        help="sizes for a function that works for its own only, such as I=1152 J=10 E=16")
    parser.add_argument("--lambdas", type=float, nargs="+", metavar="X",
                        help="[--em] inverse temperatures that your function uses by itself; it is then called with "
                        "the number of iterations in place of a list of them")
    parser.add_argument("--m", type=float, metavar="X",
                        help="[--spread-loss] margin of a loss that has no argument for it (default: 0.2, 0.5 and 0.9)")
    parser.add_argument("--backward", metavar="TARGET",
                        help="module:function of your backward pass: backward(dv, u_hat, n_iters) -> du_hat; with "
                        "several inputs, their gradients in the same order")
    parser.add_argument("--dtype", choices=("float64", "float32"),
                        help="of the inputs (default: float64, or float32 if the function accepts no other)")
    parser.add_argument("--framework", choices=("numpy", "torch"),
                        help="of the inputs (default: torch if the module imports it)")
    parser.add_argument("--tolerance", type=float, metavar="X", help="relative to the largest entry of an output "
                        "(default: 1e-9; float32 1e-4)")
    parser.add_argument("--allow", nargs="+", metavar="KIND", default=[],
                        help='kinds of mistake that you mean, by the beginnings of their names, such as "no epsilon"')
    parser.add_argument("--require-gradient", action="store_true",
                        help="exit with 1 if the gradient was not checked, as without --backward in NumPy")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_true", help="print one line")
    shown.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser.parse_args(argv)


def pairs(given, what):
    for text in given:
        if "=" not in text:
            raise Unusable(f"{what} {text}: write NAME=VALUE, such as {'u_hat=NIJE' if what == '--axes' else 'I=1152'}")
    return dict(text.split("=", 1) for text in given)


def main(argv=None):
    args = parse(argv)
    try:
        options = {name: value for name, value in vars(args).items() if name not in ("target", "kind", "quiet", "json")}
        options |= {"axes": pairs(args.axes, "--axes"), "sizes": pairs(args.sizes, "--sizes"),
                    "backward": args.backward and load(args.backward)()}
        report = examine(load(args.target), args.kind, args.target, **options)
    except (Unusable, MemoryError) as problem:
        text = "not enough memory for these sizes. Give smaller ones to --sizes" if isinstance(
            problem, MemoryError) else str(problem)
        print(json.dumps({"error": text}) if args.json else f"error: {text}", file=sys.stdout if args.json else
              sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(asdict(report), indent=1))
    elif args.quiet:
        why = ", ".join(filter(None, (*report.mistakes, report.reason)))
        if report.verdict == "DIFFERS":                        # the mistakes are those of the other order
            why = report.reason
        allowed = " (allowed)" if report.allowed and report.passed else ""
        print(f"{args.target}: {report.verdict}{': ' if why else ''}{why}{allowed}")
    else:
        print(report.text, end="")
    return 0 if report.passed else 1


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
