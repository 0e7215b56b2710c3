"""Finds the smallest set of mistakes, and the epsilon, with which the reference computes what a function computed."""
import numpy as np

from . import reference

LOOSE = 1e-5                       # with two epsilons, of which one is fitted, sets of mistakes are named to this
NEAREST = 40                       # sets of mistakes for which epsilons are fitted
PLAUSIBLE = 0.3                    # difference up to which epsilons may be the reason,
PLAUSIBLE_AT_ONCE = 0.05           # and after one iteration
ROUGH = 1e-7                       # tolerances above it leave room for rounding, in which sets of mistakes may differ
NEARLY = 1e-3                      # difference that several epsilons leave, of which at most one is fitted


def difference(found, wanted):
    """Return the largest difference of two lists of arrays, relative to each array's largest entry."""
    with np.errstate(all="ignore"):
        worst = [np.abs(x - y).max() / max(np.abs(y).max(), 1e-12) for x, y in zip(found, wanted)]
    return float("inf") if not np.isfinite(worst).all() else float(max(worst))


def distance(found, predict, settings, limit=float("inf")):
    """Return the largest difference over all cases; infinity if it exceeds the limit, or if nothing can be compared."""
    worst = -1.0
    for case, arrays in found.items():
        with np.errstate(all="ignore"):
            wanted = predict(settings, case)
        if wanted is not None:
            worst = max(worst, difference(arrays, wanted))
        if worst > (min(limit, PLAUSIBLE_AT_ONCE) if case == 1 and limit == PLAUSIBLE else limit):
            return float("inf")
    return worst if worst >= 0 else float("inf")


def explain(found, predict, mistakes, tolerance, most=3):
    """Return the smallest sets of mistakes whose outputs equal what was found in every case, and the difference.

    found: case -> list of arrays. predict(settings, case) -> list of arrays, or None where there is nothing to
    compare. Return a list of tuples of mistakes, empty if none fits, and the largest difference of the first.
    """
    matches = []
    if tolerance > 1e-3:                                       # of float16, in which too many sets would fit
        tolerance, most = tolerance / 2, min(most, 2)
    for chosen in reference.combinations(mistakes, most):
        if matches and len(chosen) > len(matches[0][1]) and tolerance <= ROUGH:
            break
        d = distance(found, predict, reference.settings_of(chosen), tolerance)
        if d <= tolerance:
            matches.append((d, chosen))
    if tolerance > ROUGH and matches:                          # the smallest of those that fit about as the best does
        best = min(d for d, _ in matches)
        near = [(d, chosen) for d, chosen in matches if d <= 4 * best]
        size = min(len(chosen) for _, chosen in near)
        matches = sorted([match for match in near if len(match[1]) == size], key=lambda match: match[0])
    matches.sort(key=lambda match: match[0] > tolerance / 100)
    return [chosen for _, chosen in matches], matches[0][0] if matches else None


def fit_epsilons(found, predict, settings, names):
    """Return the epsilons, by name of their setting, with which the outputs come nearest, and the difference.

    Gauss-Newton steps on all names together, with exact derivatives by the complex step.
    """
    best = dict.fromkeys(names, 0.0), float("inf")
    for start in (0.0, 1e-4):
        x = np.full(len(names), start)
        for _ in range(10):
            residual, slopes = [], []
            for k in range(len(names)):
                at = dict(zip(names, x + 1j * reference.STEP * (np.arange(len(x)) == k)))
                pairs = []
                for case, arrays in found.items():
                    with np.errstate(all="ignore"):
                        pairs += list(zip(arrays, predict(settings | at, case) or ()))
                residual = [(one - y.real).ravel() for one, y in pairs]
                slopes.append([np.imag(y).ravel() / reference.STEP for _, y in pairs])
            if not residual:
                return best
            residual, A = np.concatenate(residual), np.stack([np.concatenate(slope) for slope in slopes], 1)
            if not (np.isfinite(residual).all() and np.isfinite(A).all()):
                break
            scale = np.maximum(np.abs(A).max(0), 1e-300)
            step = np.linalg.lstsq(A / scale, residual, rcond=1e-12)[0] / scale
            x, before = np.maximum(x + step, 0.0), x
            if (np.abs(x - before) <= 1e-9 * x).all():
                break
        values = dict(zip(names, map(float, x)))
        d = distance(found, predict, settings | values)
        if d < best[1]:
            best = values, d
        if d < 1e-9:
            break
    return best


def explain_with_epsilon(found, predict, mistakes, tolerance, places, most=3):
    """As `explain`, also for outputs that epsilons move. Return matches, difference, and settings of the epsilons.

    places: (fixed settings, names of epsilons that are fitted together), the usual ones first. No mistake with an
    epsilon comes first, then single mistakes and the nearest sets. If none fits to the tolerance, the best that fits to
    1e-5 is returned, or else a set of up to two that fits to 1e-3, and ten times better than any other of its size.
    What comes within 1e-3 without a mistake gets no name.
    """
    right = distance(found, predict, {}, tolerance)
    if right <= tolerance:
        if tolerance > ROUGH and right > tolerance / 50:       # one mistake may explain what rounding does not
            matches, worst = explain(found, predict, mistakes, tolerance, most=1)
            if matches and worst < right / 10:
                return matches, worst, {}
        return [()], right, {}
    fitting = []

    close = tolerance if tolerance <= ROUGH else tolerance / 10

    def fit(chosen):
        if tolerance > 1e-3:                                   # an epsilon would explain too much
            return False
        settings = reference.settings_of(chosen)
        for k, (fixed, names) in enumerate(places):
            if "cost_epsilon" in names and not settings.get("standardized"):
                continue
            epsilons, d = fit_epsilons(found, predict, settings | fixed, names)
            used = {name: value for name, value in epsilons.items() if value > 1e-13}         # else: rounding
            if max(used.values(), default=0) > 0.1:            # no epsilon any more
                continue
            if d <= LOOSE and used:
                fitting.append((len(chosen), d, chosen, fixed | used))
            if d <= close and used:
                return True
            if chosen and k == 0 and d > 0.01:                 # another epsilon will not make up for that
                return False
        return False
    if distance(found, predict, {}, PLAUSIBLE) <= PLAUSIBLE and fit(()):
        return [()], fitting[-1][1], fitting[-1][3]
    matches, worst = explain(found, predict, mistakes, tolerance, most)
    if matches:
        return matches, worst, {}
    if tolerance > 1e-3:
        return [], None, {}
    if distance(found, predict, {}, NEARLY) <= NEARLY:
        _, worst, chosen, epsilon = min(fitting, default=(0, None, None, {}), key=lambda entry: entry[:2])
        return [] if worst is None else [chosen], worst, epsilon
    every = reference.combinations(mistakes, most)
    apart = [distance(found, predict, reference.settings_of(chosen), PLAUSIBLE) for chosen in every]
    near = [k for k in sorted(range(len(every)), key=lambda k: float(f"{apart[k]:.3e}")) if apart[k] <= PLAUSIBLE]
    fitting += [(len(every[k]), apart[k], every[k], {}) for k in near if apart[k] <= LOOSE]
    for k in [*[k for k in near if len(every[k]) == 1], *[k for k in near if len(every[k]) > 1]][:NEAREST]:
        if fit(every[k]):
            return [every[k]], fitting[-1][1], fitting[-1][3]
        if len(every[k]) > 1 and fitting and len(min(fitting, key=lambda entry: entry[:2])[2]) <= 1:
            break                                              # one mistake and several epsilons
    if not fitting:
        return nearest(every, apart)
    _, worst, chosen, epsilon = min(fitting, key=lambda entry: entry[:2])
    return [chosen], worst, epsilon


def nearest(every, apart):
    """Return a set of one or two mistakes that alone comes within NEARLY, as a match without epsilons, or none.

    apart: the difference of each set.
    """
    for size in (1, 2):
        fits = sorted((d, k) for k, d in enumerate(apart) if d <= NEARLY and len(every[k]) == size)
        if fits and (len(fits) == 1 or fits[0][0] <= fits[1][0] / 10):
            return [every[fits[0][1]]], fits[0][0], {}
        if fits:
            break
    return [], None, {}
