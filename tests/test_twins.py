"""Where the two experiments need the same primitive, each holds its own copy, the same to the letter."""
import inspect

import multimnist_capsnet as mc
import pytest
import smallnorb_novel_viewpoint as sn

OWN = {"Config", "announce", "backward", "check_config", "evaluate", "forward", "forward_rows", "init_params", "loss_and_grads", "main",
       "open_ended", "param_shapes", "report", "to_batch", "train"}              # what an experiment is made of: the same contract, another body


def definitions(module):
    return {name: thing for name, thing in vars(module).items()
            if (inspect.isfunction(thing) or inspect.isclass(thing)) and thing.__module__ == module.__name__}


SAME = sorted(definitions(mc).keys() & definitions(sn).keys())


@pytest.mark.parametrize("name", SAME)
def test_twins(name):
    same = inspect.getsource(getattr(mc, name)) == inspect.getsource(getattr(sn, name))
    assert same == (name not in OWN)


def test_constants_of_twins():
    for name in ("BETA1", "BETA2", "ADAM_EPS", "ADAM_CHUNK", "SHARD_SIZE", "CHUNK", "PURPOSES"):
        assert getattr(mc, name) == getattr(sn, name)


def test_there_are_twins():
    assert {"im2col", "conv2d_backward", "adam_step", "Runner", "Arena", "save_checkpoint", "write_atomically"} <= set(SAME)
