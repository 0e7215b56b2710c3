"""--recompute-statistics: statistics of batch normalization over many samples at once, layer by layer."""

import numpy as np
import pytest
from conftest import EXPERIMENTS, assert_same, runs, toy, toy_flags

RECOMPUTING = runs.MULTI, runs.AFF


@pytest.mark.parametrize("experiment", RECOMPUTING)
def test_every_normalization_then_uses_the_mean_and_variance_of_its_input_in_evaluation(experiment, monkeypatch):
    """Which is the definition: all layers together in evaluation, over the samples that were used"""
    module = EXPERIMENTS[experiment]
    config, data = toy(experiment, warmup=0, lr_schedule="constant", n_train=40)
    state = module.train(config, data)
    samples, good, seen = next(iter(module.epoch_samples(data, config.n_epochs, config))), module.norm_forward, []
    n = min(32, len(samples["labels"]))

    def recording(x, gamma, beta, running=None):
        seen.append((x.mean((0, 1, 2)), x.var((0, 1, 2)), *running))
        return good(x, gamma, beta, running)
    statistics = module.recompute_statistics(state, data, config, n)
    assert statistics.keys() == state["running"].keys()
    images = module.to_batch(samples, np.arange(n))["images"]
    distance = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "norm_forward", recording)
        for running in state["running"], statistics:
            seen.clear()
            module.forward(state["params"] | running, images, config)
            distance.append(max(np.abs(np.concatenate([mean - used, var / used_var - 1])).max()
                                for mean, var, used, used_var in seen))
    assert len(seen) == len(statistics) / 2 and distance[1] < 0.02 < distance[0], distance


@pytest.mark.parametrize("experiment", RECOMPUTING)
def test_the_flag_changes_the_statistics_of_a_trained_network_and_no_weight(call, experiment):
    """They can be kept in a new folder, whose file says that they were recomputed"""
    module, flags = EXPERIMENTS[experiment], toy_flags(experiment)
    few = [flag for flag in flags if flag.startswith(("--n-test=", "--digits="))]
    for words in ([*flags, "--outdir=net"], ["--load=net", "--recompute-statistics=20", "--outdir=new", *few]):
        assert call(module, module.main, *words, "--quiet") == (0, "", "")
    (_, old), (_, new) = module.load("net"), module.load("new")
    assert_same(old["params"], new["params"])
    assert not any(np.array_equal(a, new["running"][name]) for name, a in old["running"].items())
    assert "recomputed" not in old["history"] and new["history"]["recomputed"] == 20


@pytest.mark.parametrize("n_steps, before, word", [
    (10_000, 0.895, ""), (10_000, 0.885, "1.5 points more with --recompute-statistics 800"),
    (499, 0.845, "5.5 points more with"), (499, 0.855, "")])
@pytest.mark.parametrize("experiment", RECOMPUTING)
def test_a_run_says_so_if_its_running_statistics_do_not_fit(experiment, n_steps, before, word, monkeypatch, capsys):
    """If recomputed ones, of the same weights, have an accuracy that is more than a point higher, or, after a short
    run, five points"""
    module = EXPERIMENTS[experiment]
    config, data = toy(experiment, quiet=False)
    state = module.initial_state(config)
    state["history"]["epochs"].append({module.WATCHED: before})
    state["step"] = n_steps
    recomputed = {name: 7 + a for name, a in state["running"].items()}
    monkeypatch.setattr(module, "recompute_statistics", lambda *_: recomputed)

    def validate(weights, *_):
        assert_same(weights, state["params"] | recomputed)
        return {module.WATCHED: 0.9}
    monkeypatch.setattr(module, "validate", validate)
    module.check_statistics(state, data, config, None)
    assert word in (out := capsys.readouterr().out) and bool(out) == bool(word)
