#!/usr/bin/env python3
"""Check a routing function from this folder, without installing anything: python3 conformance/check.py --help"""
import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
sys.path.insert(0, HERE)
from capsule_conformance.command import command

sys.path[:] = [place for place in sys.path if place and str(Path(place).resolve()) != HERE]    # a user's modules may be
command()                                                                           # called check, make or literal, too
