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


def t_quantile(df):
    """Return the 97.5% quantile of Student's t for df >= 1 degrees of freedom, which need not be an
    integer"""
    if df > len(T95):
        return 1.95996 + 2.3722 / df + 2.8225 / df ** 2 + 2.5558 / df ** 3
    below = int(df)
    if below == df:
        return T95[below - 1]
    # between two integers the logarithm is nearly linear in 1 / df
    share = (1 / below - 1 / df) / (1 / below - 1 / (below + 1))
    return T95[below - 1] * (T95[below] / T95[below - 1]) ** share


def mean_and_interval(values):
    """Return the mean and half the width of its 95% t interval, nan for one value"""
    df = len(values) - 1
    if df < 1:
        return float(np.mean(values)), math.nan
    return float(np.mean(values)), float(t_quantile(df) * np.std(values, ddof=1) / math.sqrt(df + 1))


def crossed_interval(values, classes):
    """Return the mean and half the width of its 95% interval for other seeds and other groups, such
    as toys: all groups were measured with every seed (a crossed design), nan for one seed.

    values: (seeds, groups). classes: (groups,), the class of each group; the groups of a class are
    a sample, the classes are all that there are. Every class needs two groups.

    A value is the mean of its class plus an effect of the seed, of variance S, one of the group, of
    variance G, and a rest, of variance R. The variance of the mean over s seeds and g groups is

        S / s + G / g + R / (s g) = (mean square of seeds + of groups - of the rest) / (s g)

    in expectation (the analysis of variance of two crossed factors). It is taken to be no less than
    with seeds alone or groups alone. Its degrees of freedom are Satterthwaite's."""
    values, classes = np.asarray(values, float), np.asarray(classes)
    n_seeds, n_groups = values.shape
    mean = float(values.mean())
    if n_seeds < 2:
        return mean, math.nan
    group_deviation = np.zeros(n_groups)                   # from the mean of the class
    rest = np.zeros_like(values)
    for label in np.unique(classes):
        own = values[:, classes == label]
        of_groups, of_seeds = own.mean(0), own.mean(1, keepdims=True)
        group_deviation[classes == label] = of_groups - own.mean()
        rest[:, classes == label] = own - of_groups - of_seeds + own.mean()

    seed_df, group_df = n_seeds - 1, n_groups - len(np.unique(classes))
    rest_df = seed_df * group_df
    by_seed = n_groups * float(np.var(values.mean(1), ddof=1))
    by_group = n_seeds * float((group_deviation ** 2).sum()) / group_df
    by_rest = float((rest ** 2).sum()) / rest_df
    mean_square = by_seed + by_group - by_rest
    if max(by_seed, by_group, by_rest) == 0:               # all values of a class are equal
        return mean, 0.0
    df = mean_square ** 2 / (by_seed ** 2 / seed_df + by_group ** 2 / group_df + by_rest ** 2 / rest_df)
    for least, its_df in ((by_seed, seed_df), (by_group, group_df)):
        if mean_square < least:
            mean_square, df = least, its_df
    return mean, t_quantile(max(1, df)) * math.sqrt(mean_square / (n_seeds * n_groups))


def proportion_interval(values):
    """Return the mean of some proportions, and the ends of its 95% t interval within 0 and 1, nan for one value"""
    mean, half = mean_and_interval(values)
    return mean, *np.clip([mean - half, mean + half], 0, 1).tolist()


def bootstrap_interval(classes, groups, correct, sign=None, n_draws=2000):
    """Return the 95% interval (low, high) of an accuracy by a bootstrap over groups of images that are no independent
    samples, such as the views of a toy; with sign, of the difference of two accuracies over the same groups.

    classes, groups, correct: (n,), of every image its class, its group, and whether it was correctly classified. sign:
    (n,), 1 for images of the first accuracy, -1 for those of the second. Of the m groups of a class m - 1 are drawn
    with replacement, so that the variance is not too small by (m - 1) / m; nan for a class with one group."""
    rng, sign = np.random.default_rng(0), np.ones(len(correct)) if sign is None else sign
    hits, n = np.zeros((2, 2, n_draws))                                 # of the first accuracy, of the second
    for label in np.unique(classes):
        own = classes == label
        _, index = np.unique(groups[own], return_inverse=True)
        m = index.max() + 1
        times = rng.multinomial(m - 1, np.full(m, 1 / m), n_draws) * (m / (m - 1) if m > 1 else math.nan)
        for k, part in enumerate((sign[own] > 0, sign[own] < 0)):
            hits[k] += times @ np.bincount(index, correct[own] * part, m)
            n[k] += times @ np.bincount(index, part, m)
    with np.errstate(invalid="ignore"):
        accuracy = hits / n
    drawn = accuracy[0] - (accuracy[1] if (sign < 0).any() else 0)
    return tuple(np.nanpercentile(drawn, [2.5, 97.5]).tolist()) if np.isfinite(drawn).any() else (math.nan, math.nan)


def prediction_interval(values):
    """Return the mean of some values and half the width of the 95% prediction interval of a new one: t * s *
    sqrt(1 + 1/n), nan for one value"""
    mean, half = mean_and_interval(values)
    return mean, half * (len(values) + 1) ** 0.5               # half: t * s / sqrt(n)


def compare(found, signed=()):
    """Compare networks over several seeds: (name, seed, {metric: value}) of each run. A value that is an int, as the
    number of parameters, is a fact of the network. The others are proportions, but for the metrics in `signed`.

    Return {"seeds": [...], "n": {name: number of its seeds}, "networks": {name: {metric: int, or [mean, low, high]}},
    "differences": {"A - B": the same}}, of the metrics that all runs have: means and 95% t intervals over the seeds,
    nan for one seed. Differences are paired by seed, of networks with at least two seeds in common.
    """
    rows = {}
    for name, seed, values in found:
        rows.setdefault(name, {})[seed] = values
    metrics = [metric for metric in found[0][2] if all(metric in values for *_, values in found)]
    facts = [metric for metric in metrics if isinstance(found[0][2][metric], int)]

    def summarize(values, is_signed=True):
        mean, half = mean_and_interval(values)
        return [mean, mean - half, mean + half] if is_signed else [*proportion_interval(values)]

    def difference(a, b, common):
        return {metric: summarize([a[seed][metric] - b[seed][metric] for seed in common])
                for metric in metrics if metric not in facts}
    networks = {name: {metric: next(iter(row.values()))[metric] if metric in facts else
                       summarize([values[metric] for values in row.values()], metric in signed) for metric in metrics}
                for name, row in rows.items()}
    differences = {f"{a} - {b}": difference(rows[a], rows[b], common) for a, b in itertools.combinations(rows, 2)
                   if len(common := [seed for seed in rows[a] if seed in rows[b]]) > 1}
    return {"seeds": list(dict.fromkeys(seed for _, seed, _ in found)), "n": {name: len(rows[name]) for name in rows},
            "networks": networks, "differences": differences}


def comparison_table(summary):
    """Return compare's result as text: a line per network, then a line per difference, in percentage points"""
    networks, differences, n = summary["networks"], summary["differences"], sorted(set(summary["n"].values()))

    def cell(scale, form, numbers):
        if isinstance(numbers, int):
            return f"{numbers:,}"
        mean, low, high = (f"{scale * number:{form}}" for number in numbers)
        return f"{mean} [{low}, {high}]" if math.isfinite(numbers[1]) else mean
    metrics = list(next(iter(networks.values())))
    rows = [["network", *metrics],
            *([name, *(cell(1, ".3f", row[metric]) for metric in metrics)] for name, row in networks.items()),
            *([name, *(cell(100, "+.1f", row[metric]) if metric in row else "" for metric in metrics)]
              for name, row in differences.items())]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(f"{text:{width}}" for text, width in zip(row, widths)).rstrip() for row in rows]
    seeds = " to ".join(map(str, n[:1] + n[1:][-1:]))
    heading = "one seed each: no intervals"
    if n != [1]:
        heading = f"mean [95% t interval] over {seeds} seeds"
        if differences:
            heading += "\n\nDifference in percentage points, paired by seed [95% CI]"
    lines.insert(len(networks) + 1, heading)
    return "\n".join(lines)
