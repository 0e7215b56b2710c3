"""Statistics of several seeds: intervals, differences that are paired by seed, and their table."""
import itertools
import math

import numpy as np


def wilson_interval(hits, n, z=1.959964):
    """Return the 95% Wilson score interval (low, high) of the proportion hits / n, which it always contains"""
    p, z2n = hits / n, z * z / n
    center, half = (p + z2n / 2) / (1 + z2n), z * np.sqrt(p * (1 - p) / n + z2n / (4 * n)) / (1 + z2n)
    return float(max(0, min(p, center - half))), float(min(1, max(p, center + half)))


T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)     # Student's t, 1 to 9 degrees


def mean_and_interval(values):
    """Return the mean and half the width of its 95% t interval, nan for one value"""
    df = len(values) - 1
    if df < 1:
        return float(np.mean(values)), math.nan
    t = T95[df - 1] if df <= len(T95) else 1.95996 + 2.3722 / df + 2.8225 / df ** 2 + 2.5558 / df ** 3
    return float(np.mean(values)), float(t * np.std(values, ddof=1) / math.sqrt(df + 1))


def prediction_interval(values):
    """Return the mean of some values and half the width of the 95% prediction interval of a new one: t * s *
    sqrt(1 + 1/n), nan for one value"""
    mean, half = mean_and_interval(values)
    return mean, half * (len(values) + 1) ** 0.5               # half: t * s / sqrt(n)


def compare(found):
    """Compare networks over several seeds: (name, seed, {metric: value}) of each run.

    Return {"seeds": [...], "networks": {name: {metric: [mean, low, high]}}, "differences": {"A - B": the same}}: means
    and 95% t intervals over the seeds, nan for one seed, of the metrics that all runs have. Differences are paired by
    seed, of networks with at least two seeds in common.
    """
    rows = {}
    for name, seed, values in found:
        rows.setdefault(name, {})[seed] = values

    def summarize(values):
        mean, half = mean_and_interval(values)
        return [mean, mean - half, mean + half]
    metrics = [metric for metric in found[0][2] if all(metric in values for *_, values in found)]
    networks = {name: {metric: summarize([values[metric] for values in row.values()]) for metric in metrics}
                for name, row in rows.items()}
    differences = {f"{a} - {b}": {metric: summarize([rows[a][k][metric] - rows[b][k][metric] for k in common])
                                  for metric in metrics}
                   for a, b in itertools.combinations(rows, 2)
                   if len(common := [k for k in rows[a] if k in rows[b]]) > 1}
    return {"seeds": list(dict.fromkeys(seed for _, seed, _ in found)), "networks": networks,
            "differences": differences}


def comparison_table(summary, fractions):
    """Return compare's result as text: a line per network, then a line per difference, in percentage points.

    fractions: the metrics between 0 and 1; the others are counts, which need no interval and no difference.
    """
    networks, differences, n = summary["networks"], summary["differences"], len(summary["seeds"])

    def cell(scale, form, mean, low, high):
        found = [f"{scale * number:{form}}" for number in (mean, low, high)]
        return found[0] + f" [{found[1]}, {found[2]}]" * math.isfinite(low)

    def line(name, row, *style):
        return [name, *(cell(*style, *row[metric]) if metric in fractions else
                        f"{row[metric][0]:,.0f}" * (style[0] == 1) for metric in row)]
    metrics = list(next(iter(networks.values())))
    above = [["network", *metrics], *(line(name, row, 1, ".3f") for name, row in networks.items())]
    below = [line(name, row, 100, "+.1f") for name, row in differences.items()]
    widths = [max(map(len, column)) for column in zip(*above, *below)]
    above, below = (["  ".join(f"{text:{width}}" for text, width in zip(cells, widths)).rstrip() for cells in rows]
                    for rows in (above, below))
    note = [f"mean [95% t interval] over {n} seeds"] if n > 1 else ["one seed: no interval; other seeds differ"]
    return "\n".join([*above, *note, *["\nDifference in percentage points, paired by seed [95% CI]"] * bool(below),
                      *below])
