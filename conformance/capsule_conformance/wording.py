"""Numbers in words."""
import numpy as np


def power(x):
    """Return a small number such as 5e-7."""
    return f"{x:.0e}".replace("e-0", "e-")


def plural(n, noun):
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def percent(x):
    """Return a relative difference in words."""
    if not np.isfinite(x):
        return "NaN or infinity"
    return power(x) if x < 1e-4 else f"{100 * x:.2g}%" if x < 0.1 else f"{100 * x:.0f}%" if x < 10 else "over 1000%"
