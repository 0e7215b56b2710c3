"""The commands of the two small NumPy reproductions that the first two experiments grew from work as their READMEs have
them; here with fewer epochs, images and frames."""
import shlex
from types import SimpleNamespace

import figures

import imageio.v3 as imageio
import pytest

PAIRS = "--n-epochs 1 --n-train 96 --n-val 32 --n-test 64"                              # what is given last counts
VIEWS = "--n-epochs 1 --n-train-toys 1 --n-test 60 --preset small"
FEW = "--train-azimuths 0:10 --test-azimuths 80:90"                                     # viewpoints to be rendered
COMMANDS = {
    "multimnist_capsnet.py --n-epochs 8 --n-train 6000 --seed 0": PAIRS,
    "visualize_multimnist_capsnet.py --n-epochs 8 --n-train 6000 --outdir viz": PAIRS,
    "make_multimnist_capsnet_gif.py --n-epochs 8 --n-train 6000 --snapshot-every 75 --fps 6":
        f"{PAIRS} --snapshot-every 2",
    "smallnorb_novel_viewpoint.py --n-epochs 10 --lr 2e-3 --seed 0 --train-azimuths 0:150 --test-azimuths 200:330":
        f"{VIEWS} {FEW}",
    "visualize_smallnorb_novel_viewpoint.py --seed 1 --n-epochs 10": f"{VIEWS} {FEW}",
    "make_smallnorb_novel_viewpoint_gif.py --seed 1 --n-epochs 8 --snapshots 8 --sweep-frames 12 --fps 10":
        f"{VIEWS} {FEW} --snapshots 2 --sweep-frames 3"}


@pytest.fixture(scope="module")
def run(run_script):
    """run(script, *flags): the script in a process of its own, with few synthetic digits"""
    few = {"train": 60, "val": 40, "test": 80}

    def run(script, *flags):
        experiment = "affnist_capsnet" if "affnist" in script else "multimnist_capsnet"
        code = (f"import {experiment} as experiment, {script.removesuffix('.py')} as script; "
                f"experiment.N_SYNTHETIC = {few}; experiment.run_cli(script.main)")
        return run_script("-c", code, *flags) if "smallnorb" not in script else run_script(script, *flags)
    return run


@pytest.mark.parametrize("command, shorter", COMMANDS.items(), ids=[command.split()[0] for command in COMMANDS])
def test_an_original_command_runs(run, command, shorter):
    done = run(*shlex.split(f"{command} {shorter}"))
    assert done.returncode == 0, done.stderr


def test_fps_is_the_animations_speed(run, tmp_path):
    """100 ms per frame at 10 frames per second; impossible speeds are refused"""
    script, out = "make_affnist_capsnet_gif.py", tmp_path / "a.gif"
    done = run(script, "--digits", "synthetic", "--frames", 3, "--index", 1, "--fps", 10, "--out", out)
    assert done.returncode == 0, done.stderr
    assert imageio.immeta(out, index=1, plugin="pillow")["duration"] == 100
    for fps in (0, float("nan")):
        with pytest.raises(figures.InputError, match=f"--fps {fps:g}: must be between 0.1 and 50"):
            figures.check_animation_flags(SimpleNamespace(fps=fps, out=out), None, {})
