"""The commands of the two small NumPy reproductions that the first two experiments grew from work as their READMEs have
them; here with fewer epochs, images and frames."""
import shlex
import tempfile

import pytest
from conftest import run_offline

PAIRS = "--n-epochs 1 --n-train 96 --n-val 32 --n-test 64"                              # what is given last counts
VIEWS = "--n-epochs 1 --n-train-toys 1 --n-test 60 --preset small --routing-iters 1"
FEW = "--train-azimuths 0:10 --test-azimuths 80:90"                                     # viewpoints to be rendered
COMMANDS = {
    "multimnist_capsnet.py --n-epochs 8 --n-train 6000 --seed 0": PAIRS,
    "visualize_multimnist_capsnet.py --n-epochs 8 --n-train 6000 --outdir viz": f"{PAIRS} --only example_pairs errors",
    "make_multimnist_capsnet_gif.py --n-epochs 8 --n-train 6000 --snapshot-every 75 --fps 6":
        f"{PAIRS} --snapshot-every 2",
    "smallnorb_novel_viewpoint.py --n-epochs 10 --lr 2e-3 --seed 0 --train-azimuths 0:150 --test-azimuths 200:330":
        f"{VIEWS} {FEW}",
    "visualize_smallnorb_novel_viewpoint.py --seed 1 --n-epochs 10":
        f"{VIEWS} {FEW} --model matrix-capsnet --only example_views",
    "make_smallnorb_novel_viewpoint_gif.py --seed 1 --n-epochs 8 --snapshots 8 --sweep-frames 12 --fps 10":
        f"{VIEWS} {FEW} --snapshots 2 --sweep-frames 3"}


def run(command, shorter):
    """Run a command without network, in a process and a home of its own, with few synthetic digits"""
    script, *flags = shlex.split(f"{command} {shorter}")
    code = (f"import multimnist_capsnet as experiment, {script.removesuffix('.py')} as script; "
            "experiment.N_SYNTHETIC = {'train': 60, 'val': 40, 'test': 80}; script.run_cli(script.main)")
    with tempfile.TemporaryDirectory() as home:
        return run_offline(home, script, *flags) if "smallnorb" in script else run_offline(home, "-c", code, *flags)


@pytest.mark.parametrize("command, shorter", COMMANDS.items(), ids=[command.split()[0] for command in COMMANDS])
def test_an_original_command_runs(command, shorter):
    done = run(command, shorter)
    assert done.returncode == 0, done.stderr
