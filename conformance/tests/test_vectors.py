"""The test vectors in conformance/ agree with the plain loops of literal.py, which share no code with their source."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance import literal, make

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "conformance"


def flat(x):
    return [number for item in x for number in flat(item)] if isinstance(x, list) else [x]


def shape(x):
    return (len(x), *shape(x[0])) if isinstance(x, list) else ()


def squash(x):
    def total(s):
        return literal.inner([literal.squash(row) for row in s], x["g"])
    return {"v": [literal.squash(row) for row in x["s"]], "ds": literal.gradient(total, x["s"])}


def votes(x):
    return {"u_hat": literal.votes(x["u"], x["W"]),
            "du": literal.gradient(lambda u: literal.inner(literal.votes(u, x["W"]), x["g"]), x["u"]),
            "dW": literal.gradient(lambda W: literal.inner(literal.votes(x["u"], W), x["g"]), x["W"])}


def dynamic_routing(x):
    iterations = []
    for n_iters in (1, 2, 3):
        def gradient(n_iters=n_iters, **kwargs):
            return literal.gradient(lambda u_hat: literal.inner(
                literal.dynamic_routing(u_hat, n_iters, **kwargs)[-1]["v"], x["g"]), x["u_hat"])
        last = literal.dynamic_routing(x["u_hat"], n_iters)[-1]
        iterations.append({"n_iters": n_iters, "c": last["c"], "v": last["v"], "du_hat": gradient(),
                           "du_hat_constant_couplings": gradient(constant_couplings=True)})
    return {"iterations": iterations}


def margin_loss(x):
    return {"loss": literal.margin_loss(x["lengths"], x["present"]),
            "dlengths": literal.gradient(lambda lengths: literal.margin_loss(lengths, x["present"]), x["lengths"])}


def reconstruction(x):
    return {"masked": literal.mask(x["v"], x["labels"]),
            "loss": literal.reconstruction_loss(x["reconstructed"], x["images"]),
            "dreconstructed": literal.gradient(
                lambda reconstructed: literal.reconstruction_loss(reconstructed, x["images"]), x["reconstructed"])}


def em_routing(x):
    names = ("V", "a", "beta_u", "beta_a")
    iterations = []
    for n_iters in (1, 2, 3):
        def route(n_iters=n_iters, **changed):
            given = {name: x[name] for name in names} | changed
            return literal.em_routing(*given.values(), x["lambdas"][:n_iters])[-1]

        def gradient(name, route=route):
            def total(value):
                last = route(**{name: value})
                return literal.inner([last["mu"], last["a"]], [x["g_mu"], x["g_a"]])
            return literal.gradient(total, x[name])
        last = route()
        iterations.append({"n_iters": n_iters, "R": last["R"], "mu": last["mu"], "sigma2": last["sigma2"],
                           "a_out": last["a"], **{"d" + name: gradient(name) for name in names}})
    return {"iterations": iterations}


def spread_loss(x):
    return {"loss": literal.spread_loss(x["a"], x["labels"], x["m"]),
            "da": literal.gradient(lambda a: literal.spread_loss(a, x["labels"], x["m"]), x["a"])}


def matrix_votes(x):
    V = literal.matrix_votes(x["M"], x["W"])
    return {"V": V, "V_with_coordinates": literal.coordinate_addition(V, x["positions"])}


LITERAL = {f.__name__: f for f in (squash, votes, dynamic_routing, margin_loss, reconstruction, em_routing, spread_loss,
                                   matrix_votes)}


def assert_equal(found, expected, where):
    """Compare nested dicts and lists of numbers: to 1e-11 of an array's largest entry."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_equal(found[name], expected[name], f"{where} {name}")
    elif isinstance(expected, list) and isinstance(expected[0], dict):
        for k, (one, other) in enumerate(zip(found, expected)):
            assert_equal(one, other, f"{where} {k + 1}")
    else:
        assert shape(found) == shape(expected), where
        scale = max(abs(number) for number in flat(expected))
        difference = max(abs(one - other) for one, other in zip(flat(found), flat(expected)))
        assert difference <= 1e-11 * max(scale, 1e-3), f"{where}: differs by {difference}"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name == "em_routing" else [])
                                  for name in make.FILES])
def test_vectors_agree_with_plain_loops(name):
    vectors = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert_equal(LITERAL[name](vectors["inputs"]), vectors["expected"], name)
    for array, order in vectors["axes"].items():               # every array is described, and has as many axes
        places = [vectors["inputs"], vectors["expected"], *vectors["expected"].get("iterations", [])[:1]]
        value, = [place[array] for place in places if array in place]
        assert len(shape(value)) == order.count("["), array
    for what, value in vectors.get("mistakes", {}).items():    # and a mistake shows
        assert abs(value / vectors["expected"]["loss"] - 1) > 0.05, what


@pytest.mark.parametrize("name", make.FILES)
def test_make_writes_the_committed_vectors(name):
    committed = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    made = json.loads(make.make(name))
    assert_equal(made.pop("expected"), committed.pop("expected"), name)
    assert made == committed


def test_every_file_of_vectors_has_its_loops():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(make.FILES) == set(LITERAL)


def test_the_pages_show_all_kinds_and_a_report_as_it_is_printed():
    """whole in the reference, and parts of it in the page for users, with ... between them"""
    page, reference = ((ROOT / name).read_text(encoding="utf-8")
                       for name in ("docs/conformance.md", "docs/reference/conformance.md"))
    assert make.kinds_tables() in reference
    command = [sys.executable, "conformance/check.py", "conformance/examples/numpy_wrong.py:route"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and f"```text\n{done.stdout.rstrip()}\n```" in reference
    excerpt = page.partition("```text\n")[2].partition("```")[0]
    parts = [part for part in excerpt.split("...\n") if part]
    assert len(parts) > 1 and all(part in done.stdout for part in parts), parts
