"""Wilson's interval of a proportion, in the experiments and outside."""
import multimnist_capsnet as mc
from lab import statistics

import pytest


@pytest.mark.parametrize("hits, n, interval", [
    (50, 100, (0.403832, 0.596168)), (0, 10, (0, 0.277533)), (10, 10, (0.722467, 1)), (8, 10, (0.490162, 0.943318)),
    (1, 1, (0.206543, 1))])
def test_wilson_interval(hits, n, interval):
    assert mc.wilson_interval(hits, n) == statistics.wilson_interval(hits, n) == pytest.approx(interval, abs=1e-5)


def test_wilsons_interval_holds_its_proportion():
    for n in range(1, 400):
        for hits in (0, n // 3, n):
            low, high = mc.wilson_interval(hits, n)
            assert 0 <= low <= hits / n <= high <= 1
