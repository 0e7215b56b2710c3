"""The table of public implementations is that of implementations.py, and the check says of each formula what it has."""
import re
from pathlib import Path

import numpy as np
import pytest
from capsule_conformance import reference
from capsule_conformance.kinds import KINDS

from conformance import implementations

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/implementations.md").read_text(encoding="utf-8")
QUICK = ("laubonghaudoi/CapsNet_guide_PyTorch", "XifengGuo/CapsNet-Pytorch", "cedrickchee/capsule-net-pytorch",
         "haofengac/pyCapsNet, PyTorch", "gyang274/capsulesEM", "ethanleet/CapsNet, bias 0")


def test_the_page_has_the_table():
    assert implementations.table() in PAGE
    assert len({row.name for row in implementations.ROWS}) == len(implementations.ROWS) >= 64


@pytest.mark.parametrize("row", [
    pytest.param(row, marks=[] if row.name in QUICK else [pytest.mark.slow], id=row.name)
    for row in implementations.ROWS])
def test_the_check_says_what_the_table_has(row):
    assert implementations.said(row) == row.verdict


def test_verdicts_have_names_that_the_check_has():
    known = {kind[0] for kind in KINDS} | {"no epsilon", "no epsilon, gradient"} | {
        m.name for m in (*reference.STOPS, *reference.EM_STOPS, *reference.NOTHING_ROUTED, *reference.per_position(4),
                         *(m for mistakes in reference.MISTAKES.values() for m in mistakes))}
    known = {name.removeprefix("EM: ") for name in known}
    for row in implementations.ROWS:
        head, _, names = row.verdict.partition(": ")
        assert re.fullmatch(r"(VALUES )?RIGHT[A-Z ,]*|WRONG( \(a part\))?|NOT THIS PROCEDURE", head), row
        assert all(name in known for name in names.split("; ") if name), row


def test_what_the_survey_calls_exact_the_check_calls_right():
    exact = PAGE.partition("These compute Procedure 1")[2].partition("For EM")[0]
    exact = re.findall(r"\[([\w.-]+/[\w.-]+)\]", exact)
    assert len(exact) == 6
    for name in exact:
        row = next(row for row in implementations.ROWS if row.name.split(",")[0] == name)
        assert row.verdict.startswith("RIGHT"), name


def test_without_keywords_the_formulas_are_the_procedures():
    """by the reference, which shares no code with them"""
    rng = np.random.default_rng(0)
    u_hat = rng.normal(size=(2, 4, 3, 5))
    for n in (1, 2, 3):
        np.testing.assert_allclose(implementations.routing(u_hat, n), reference.dynamic_routing(u_hat, n), atol=1e-12)
    V, a = rng.normal(size=(2, 4, 3, 16)), rng.uniform(0.2, 1, (2, 4))
    beta_u, beta_a, lambdas = rng.normal(size=3), rng.normal(size=3), [0.02, 0.04]
    found = implementations.em_routing(V, a, beta_u, beta_a, lambdas, epsilon=0.01)
    for x, y in zip(found, reference.em_routing(V, a, beta_u, beta_a, lambdas, epsilon=0.01)):
        np.testing.assert_allclose(x, y, atol=1e-10)


def test_the_command_says_what_differs(capsys, monkeypatch):
    assert implementations.main(["--table"]) == 0 and "| gchochla/capsules-utils |" in capsys.readouterr().out
    assert implementations.main(["yanx27"]) == 0 and "1 of 1 as in the table" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        implementations.main(["nobody"])
    assert stopped.value.code == 2 and "no implementation has nobody in its name" in capsys.readouterr().err
    row = next(row for row in implementations.ROWS if row.name.startswith("yanx27"))
    monkeypatch.setattr(implementations, "ROWS", [row._replace(verdict="RIGHT")])
    assert implementations.main([]) == 1 and "the table has: RIGHT" in capsys.readouterr().out
