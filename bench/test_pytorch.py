"""Our outputs and gradients against PyTorch's autograd: the only test of our maths against code that others wrote."""
import importlib

import numpy as np
import pytest

pytestmark = pytest.mark.slow
PROGRAMS = [("paper", "public"), ("paper", "tuned"), ("multimnist", "tuned"), ("cnn-gap", "tuned"), ("em", "public"),
            ("em", "tuned")]
NARROW = {"paper": {"conv1_channels": 8}, "multimnist": {"conv1_channels": 4, "conv3_channels": 8},
          "cnn-gap": {"conv1_channels": 4}, "em": {"preset": "small", "routing_iters": 3}}


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed: python3 -m pip install torch --index-url "
                               "https://download.pytorch.org/whl/cpu")


@pytest.fixture(scope="module")
def bench(torch):
    return importlib.import_module("pytorch_capsnet")


def setting(bench, name, n, dtype, **given):
    """Return bench.setting's result with other weights: W 10 times as large, so that routing changes the coupling
    coefficients, and no bias 0, so that no unit is on a ReLU's kink"""
    module, config, ours, samples = bench.setting(name, n, **given)
    rng = np.random.default_rng(3)
    return module, config, {key: (p * (10 if key == "W" else 1) + 0.1 * rng.standard_normal(p.shape) * (p.ndim == 1)
                                  ).astype(dtype) for key, p in ours.items()}, samples


def differences(torch, bench, version, module, config, ours, samples):
    """Return max |ours - PyTorch's| / max |ours| of the outputs, with the loss, and of the gradients, two dicts"""
    n, dtype = len(samples["labels"]), ours["conv1_w"].dtype
    convert, forward = bench.write(module, config, version == "public")
    p = {name: a.requires_grad_() for name, a in convert(ours).items()}
    batch = module.to_batch(samples, slice(None), dtype)
    theirs, loss = forward(p, {name: torch.from_numpy(a) for name, a in batch.items()})
    loss.backward()
    with module.worker_threads(config) as workers:      # in shards of 16 samples, whose gradients add up
        terms, shards, _ = module.batch_gradients(ours, samples, np.arange(n), config, workers)
        grads = convert({name: sum(grads[name] for grads in shards) for name in ours})
    digits = {} if config.model == "matrix-capsnet" else {"digits": batch["labels"]}
    outs = [module.forward(ours, batch["images"][k:k + 16], config, statistics={},
                           **{name: labels[k:k + 16] for name, labels in digits.items()})[0] for k in range(0, n, 16)]
    assert p.keys() == grads.keys() and theirs.keys() <= outs[0].keys()

    def difference(a, b):
        return np.abs(np.ravel(a) - np.ravel(b)).max() / np.abs(a).max()
    outputs = {name: difference(np.concatenate([out[name] for out in outs]), x.detach()) for name, x in theirs.items()}
    outputs["loss"] = difference(terms["loss"], loss.detach())
    gradients = {name: difference(g.numpy(), p[name].grad) for name, g in grads.items()}
    print(f"{config.model}, {version}, {dtype}: outputs {max(outputs.values()):.1e}, gradients "
          f"{max(gradients.values()):.1e}")
    return outputs, gradients


@pytest.mark.parametrize("narrow", [True, False], ids=["narrow", "full"])
@pytest.mark.parametrize("name, version", PROGRAMS)
def test_float64_agrees(torch, bench, name, version, narrow):
    """A normalization over 16 samples and one over 3. Rounding leaves 1e-12; the public way to write the variance of
    a vote divides by MASS_EPS more"""
    found = setting(bench, name, 19, np.float64, **NARROW[name] if narrow else {})
    outputs, gradients = differences(torch, bench, version, *found)
    most = 1e-5 if (name, version) == ("em", "public") else 1e-9
    assert max(outputs.values()) < most and max(gradients.values()) < most, (outputs, gradients)


@pytest.mark.parametrize("name, version", PROGRAMS)
def test_float32_agrees(torch, bench, name, version):
    """Outputs to 1e-4, gradients to 1e-3, but to 0.1 below a max pooling: where two values of its window are equal to
    within rounding, the gradient may go to either, ours in one and PyTorch's in another of 593,920 windows"""
    outputs, gradients = differences(torch, bench, version, *setting(bench, name, 32, np.float32))
    below = {key for key in gradients if name in bench.ERRORS and key.startswith(("conv1", "conv2", "conv3", "conv4"))}
    assert max(outputs.values()) < 1e-4, outputs
    assert all(size < (0.1 if key in below else 1e-3) for key, size in gradients.items()), gradients


@pytest.mark.parametrize("wrong", ["over the input capsules", "constant"])
@pytest.mark.parametrize("name, version", PROGRAMS[:3])
def test_another_routing_does_not_agree(torch, bench, name, version, wrong, monkeypatch):
    """A softmax over the input capsules changes outputs, coupling coefficients taken as constants only gradients"""
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda b, axis: softmax(b, axis).detach() if wrong == "constant" else
                        softmax(b, 2))
    outputs, gradients = differences(torch, bench, version, *setting(bench, name, 3, np.float64, **NARROW[name]))
    assert max(gradients.values()) > 1e-3 and (max(outputs.values()) < 1e-9) == (wrong == "constant")


@pytest.mark.parametrize("name", NARROW)
def test_three_steps_of_adam_agree(torch, bench, name):
    module, config, ours, samples = setting(bench, name, 19, np.float64, muon=0.0, **NARROW[name])
    convert, forward = bench.write(module, config, False)
    p = {name: a.requires_grad_() for name, a in convert(ours).items()}
    adam = torch.optim.Adam(p.values(), config.lr)
    batch = {key: torch.from_numpy(a) for key, a in module.to_batch(samples, slice(None), np.float64).items()}
    state = module.initial_state(config, np.float64) | {"params": ours}
    with module.worker_threads(config) as workers:
        for step in range(3):
            _, grads, _ = module.batch_gradients(ours, samples, np.arange(19), config, workers)
            module.optimizer_step(state, grads, 1.0, config, workers)
            state["step"] = step + 1
            adam.zero_grad()
            forward(p, batch)[1].backward()
            adam.step()
    for key, expected in convert(ours).items():
        np.testing.assert_allclose(p[key].detach(), expected, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("flags, said", [
    (["--threads", "0"], "must be at least 1"), (["--repeats", "0"], "must be at least 1"),
    (["--out-json", "nowhere/bench.json"], "nowhere/bench.json")])
def test_bench_refuses_before_it_times(bench, monkeypatch, tmp_path, flags, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pytorch_capsnet.py", *flags])
    monkeypatch.setattr(bench, "programs", lambda *_: pytest.fail("timed"))
    with pytest.raises(bench.InputError, match=said):
        bench.main()
    assert not [*tmp_path.iterdir()]
