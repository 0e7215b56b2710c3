"""Intervals: Wilson's of a proportion, Student's of a mean."""
import math
import sys

import multimnist_capsnet as mc

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "results"))
import render  # noqa: E402


@pytest.mark.parametrize("hits, n, interval", [
    (50, 100, (0.403832, 0.596168)), (0, 10, (0, 0.277533)), (10, 10, (0.722467, 1)), (8, 10, (0.490162, 0.943318)),
    (1, 1, (0.206543, 1))])
def test_wilson_interval(hits, n, interval):
    assert mc.wilson_interval(hits, n) == pytest.approx(interval, abs=1e-5)


def test_wilsons_interval_holds_its_proportion():
    for n in range(1, 400):
        for hits in (0, n // 3, n):
            low, high = mc.wilson_interval(hits, n)
            assert 0 <= low <= hits / n <= high <= 1


def share_within(t, df):
    """P(|T| <= t), by Simpson's rule over the density, which is symmetric"""
    x, step = np.linspace(0, t, 4001, retstep=True)
    log_factor = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(math.pi * df)
    density = np.exp(log_factor - (df + 1) / 2 * np.log1p(x * x / df))
    return 2 * step / 3 * (density[0] + 4 * density[1:-1:2].sum() + 2 * density[2:-1:2].sum() + density[-1])


def test_mean_and_interval():
    """1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7, t of 2 degrees of freedom; and t holds 95% for every n"""
    assert render.mean_and_interval([1, 2, 6]) == pytest.approx((3, 4.3027 * math.sqrt(7 / 3)), rel=1e-4)
    assert render.mean_and_interval([0.25] * 5) == (0.25, 0)
    for n in (*range(2, 60), 200, 10 ** 4):
        values = np.arange(n) % 2 * 1.0
        mean, half = render.mean_and_interval(values)
        assert mean == values.mean() and all(type(number) is float for number in (mean, half))
        assert share_within(half / (values.std(ddof=1) / math.sqrt(n)), n - 1) == pytest.approx(0.95, abs=2e-5), n
    assert math.isnan(render.mean_and_interval([0.25])[1])                                  # one value has none
