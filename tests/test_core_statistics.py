"""Intervals: Wilson's of a proportion, Student's of a mean."""
import math

import multimnist_capsnet as mc

import numpy as np
import pytest


@pytest.mark.parametrize("hits, n, interval", [
    (50, 100, (0.403832, 0.596168)), (0, 10, (0, 0.277533)), (10, 10, (0.722467, 1)), (8, 10, (0.490162, 0.943318)),
    (1, 1, (0.206543, 1))])
def test_wilson_interval(hits, n, interval):
    low, high = mc.wilson_interval(hits, n)
    assert (low, high) == pytest.approx(interval, abs=1e-5)


def test_intervals_hold_their_proportion():
    for n in range(1, 400):
        for hits in (0, n // 3, n):
            low, high = mc.wilson_interval(hits, n)
            assert 0 <= low <= hits / n <= high <= 1


@pytest.mark.parametrize("df, t", [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622),
                                   (10, 2.2281), (11, 2.2010), (19, 2.0930), (20, 2.0860), (30, 2.0423), (100, 1.9840)])
def test_student_t_of_printed_tables(df, t):
    assert mc.student_t(df) == pytest.approx(t, abs=6e-5)


def share_within(t, df):
    """P(|T| <= t), by Simpson's rule over the density, which is symmetric"""
    x, step = np.linspace(0, t, 4001, retstep=True)
    log_factor = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(math.pi * df)
    density = np.exp(log_factor - (df + 1) / 2 * np.log1p(x * x / df))
    return 2 * step / 3 * (density[0] + 4 * density[1:-1:2].sum() + 2 * density[2:-1:2].sum() + density[-1])


def test_student_t_holds_its_share_of_the_density_for_every_n():
    """n = 2 ... 200 and beyond, both parities of the degrees of freedom, and other levels than 95%"""
    for df in (*range(1, 201), 499, 500, 2001, 10 ** 4):
        assert share_within(mc.student_t(df), df) == pytest.approx(0.95, abs=1e-7), df
    for df, level in ((1, 0.5), (2, 0.9), (7, 0.99), (30, 0.5)):
        assert share_within(mc.student_t(df, level), df) == pytest.approx(level, abs=1e-7)


def test_student_t_falls_to_the_normal_distributions_quantile():
    values = [mc.student_t(df) for df in (*range(1, 201), 500, 10 ** 3, 10 ** 5)]
    assert all(a > b for a, b in zip(values, values[1:])) and values[-1] == pytest.approx(1.95996, abs=3e-5)


def test_mean_and_interval_by_hand():
    """1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7, t of 2 degrees of freedom; two values: t of one"""
    assert mc.mean_and_interval([1, 2, 6]) == pytest.approx((3, 4.3027 * math.sqrt(7 / 3)), rel=1e-4)
    assert mc.mean_and_interval([0.5, 0.7]) == pytest.approx((0.6, 12.7062 * 0.1), rel=1e-4)
    assert mc.mean_and_interval([0.25] * 5) == (0.25, 0)
    assert all(type(number) is float for number in mc.mean_and_interval([1, 2]))


def test_one_value_has_no_interval():
    mean, half = mc.mean_and_interval([0.25])
    assert mean == 0.25 and math.isnan(half)
