"""Statistics of batch normalization, recomputed layer by layer after training: workflow/recompute_statistics.py."""
import dataclasses
import json
import re

import multimnist_capsnet as mc

import numpy as np
import pytest
import recompute_statistics as tool
from conftest import EXPERIMENTS, SMALL, assert_same, runs, toy

FILE = runs.ROOT / "weights" / "smallnorb_cnn-bn.npz"
NETWORKS = [(runs.MULTI, {"preset": "residual"}), (runs.NORB, {"model": "cnn-bn"}), (runs.AFF, {"model": "capsnet"})]


@pytest.fixture(params=NETWORKS, ids=lambda param: param[0])
def trained(request):
    """-> module, Config, weights and 40 training samples of a toy run, in float64"""
    name, settings = request.param
    module, (config, data) = EXPERIMENTS[name], toy(name)
    config = dataclasses.replace(module.Config(**{"model": config.model} | SMALL[name] | settings), n_epochs=1,
                                 quiet=True, **{} if name == runs.NORB else {"n_train": 40, "n_val": 8, "warmup": 0})
    weights, _ = module.train(config, data=data, dtype=np.float64)
    return module, config, weights, tool.training_samples(module, data, config, 40)


def inputs_of_normalizations(module, weights, samples, config, monkeypatch):
    """Return (mean, variance) of the input of each normalization in evaluation, and those that it used"""
    forward, backward = module.LAYERS["norm"]
    found, used = [], []

    def recording(x, gamma, beta, running, *rest):
        found.append((x.mean((0, 1, 2)), x.var((0, 1, 2), ddof=1)))
        used.append(running)
        return forward(x, gamma, beta, running, *rest)
    with monkeypatch.context() as patch:
        patch.setitem(module.LAYERS, "norm", (recording, backward))
        module.forward_rows(weights, samples, np.arange(len(samples["labels"])), config, np.empty)
    return np.concatenate(found, 1), np.concatenate(used, 1)


def test_every_normalization_then_uses_the_mean_and_variance_of_its_input_in_evaluation(trained, monkeypatch):
    """Which is the definition: all layers together in evaluation, over the samples that were used"""
    module, config, weights, samples = trained
    recomputed = tool.recompute_statistics(module, weights, samples, config)
    changed = [name for name in weights if not np.array_equal(weights[name], recomputed[name])]
    assert sorted(changed) == sorted(name for name in weights if name.endswith(module.STATE_SUFFIXES))
    np.testing.assert_allclose(*inputs_of_normalizations(module, recomputed, samples, config, monkeypatch), rtol=1e-9)
    found, used = inputs_of_normalizations(module, weights, samples, config, monkeypatch)
    assert abs(found - used).max() > 0.01
    assert module.LAYERS["norm"] == (module.norm_forward, module.norm_backward)


def test_the_samples_are_those_of_the_epochs_that_would_follow():
    config, data = toy(runs.MULTI)
    config = dataclasses.replace(config, n_epochs=3, n_train=40, batch_size=40)
    samples = tool.training_samples(mc, data, config, 100)
    wanted = [next(mc.epoch_samples(data, epoch, config))["composites"] for epoch in (3, 4, 5)]
    np.testing.assert_array_equal(samples["composites"], np.concatenate(wanted)[:100])
    assert len(samples["labels"]) == 100


def run_tool(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["recompute_statistics.py", *map(str, words)])
    mc.run_cli(tool.main)


def test_with_earlier_layers_as_in_training_the_statistics_are_means_over_the_groups(trained):
    """The control: of groups of equal size, means of the means; the variances add that of the means"""
    module, config, weights, samples = trained
    samples = {name: a[:32] for name, a in samples.items()}
    found = tool.recompute_statistics(module, weights, samples, config, "training")
    groups = [module.loss_and_grads(weights, module.to_batch(samples, slice(k, k + 16), np.float64), config)[2]
              for k in (0, 16)]
    for name in [name for name in weights if name.endswith("_mean")]:
        np.testing.assert_allclose(found[name], (groups[0][name] + groups[1][name]) / 2, rtol=1e-9, atol=1e-12)


def test_the_command_tests_what_it_writes_and_recomputes_on_training_images(trained, monkeypatch, tmp_path):
    module, config, weights, _ = trained
    path, out = tmp_path / "net.npz", tmp_path / "out.npz"
    source = "shapes" if module.EXPERIMENT == runs.NORB else "synthetic"
    monkeypatch.setattr(module, "N_SYNTHETIC", {"train": 200, "val": 100, "test": 100}, raising=False)
    module.save_weights(path, config, weights, {"source": source, "epochs": [], "steps": 1, "seconds": 1.0})
    more = ["--quiet", "--threads", "1"] + ["--digits", "synthetic", "--n-test", "32"] * (source == "synthetic")

    def tested(main, *words):
        to = tmp_path / "result.json"
        monkeypatch.setattr("sys.argv", ["script.py", *map(str, words), *more, "--out-json", str(to)])
        module.run_cli(main)
        result = json.loads(to.read_text("utf-8"))
        return {key: value for key, value in result.items() if key not in ("loaded", "config", "recomputed")}

    found = tested(tool.main, f"--load={path}", "--n-samples", 40, "--out-weights", out)
    assert found == tested(module.main, "--load", out) != tested(module.main, "--load", path)
    old, new = module.load_network(path), module.load_network(out)
    assert new.history["recomputed"] == {"n_samples": 40, "source": source, "earlier_layers": "evaluation"}
    data = module.load_data(old.config) if source == "shapes" else module.load_digits(
        dataclasses.replace(old.config, digits="synthetic"), lambda text: None)
    samples = tool.training_samples(module, {"train": data["train"]}, old.config, 40)
    assert_same(new.weights, tool.recompute_statistics(module, old.weights, samples, old.config))


@pytest.mark.parametrize("words, message", [
    ((), "required: --load"), (("--load", "none.npz"), "none.npz: No such file"),
    (("--load", runs.ROOT / "weights" / "smallnorb_cnn.npz"), "has no batch normalization"),
    (("--load", FILE, "--n-samples", 1), "must be at least 2"),
    (("--load", FILE, "--out-weights", FILE), "--out-weights .*smallnorb_cnn-bn.npz: this is the network's own file")])
def test_bad_input_is_one_line(monkeypatch, capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        run_tool(monkeypatch, *words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and re.search(message, error) and error.count("\n") == 1
