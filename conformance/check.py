#!/usr/bin/env python3
"""Check a routing function from this folder, without installing anything: python3 conformance/check.py --help"""
import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
sys.path.insert(0, HERE)
try:
    from capsule_conformance.command import command
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise
    print("error: the check needs NumPy. Install it, or run the check with the Python that has it and your framework",
          file=sys.stderr)
    sys.exit(2)

sys.path[:] = [place for place in sys.path if place and str(Path(place).resolve()) != HERE]    # a user's modules may be
command()                                                                           # called check, make or literal, too
