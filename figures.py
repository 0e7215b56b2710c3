"""What the scripts that draw figures and animations share: their style, their output files and the networks that they
draw. It is imported by these scripts; it is not a command."""
from pathlib import Path

from multimnist_capsnet import InputError, check_writable, write_atomically  # before numpy: it sets BLAS threads

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
                            "image.interpolation": "nearest", "legend.frameon": False})
BLUE, ORANGE, RED, GREEN, PINK, GRAY = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#666666"  # Okabe & Ito
COLORS = (BLUE, RED, GREEN, PINK, "black")       # of networks in one figure; color-blind safe
LINES = ("-", "--", "-.", ":", "-")
WIDTH = 8                          # of a figure, inches


def make_outdir(outdir, names):
    """Create the folder of the figures `names`. Raise InputError if the folder or one of the PNGs cannot be written."""
    try:
        outdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--outdir {outdir}: cannot be created ({error.strerror}). Choose another folder") from None
    check_writable(*(outdir / f"{name}.png" for name in names))


def write_figure(fig, path, say=print):
    """Write a matplotlib Figure as a PNG, or as an SVG if `path` ends so, atomically"""
    format_ = Path(path).suffix[1:]
    metadata = {"Software": None} if format_ == "png" else {"Date": None}
    write_atomically(path, lambda file: fig.savefig(file, format=format_, dpi=100, metadata=metadata))
    say(f"wrote {path}  ({path.stat().st_size / 1e3:.0f} kB)")
