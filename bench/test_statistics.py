"""Running statistics gathered in several ways: where they are known, and the command."""
import dataclasses
import json
import sys

import multimnist_capsnet as mc

import multimnist_statistics
import numpy as np
import pytest

CONFIG = mc.Config(conv1_channels=4, conv3_channels=8, digits="synthetic", n_train=64, n_val=32, n_epochs=1,
                   threads=1, quiet=True)


@pytest.fixture
def trained(monkeypatch):
    """Data, and the state of a network that was trained for two steps"""
    monkeypatch.setattr(mc, "N_SYNTHETIC", {"train": 400, "val": 10, "test": 60})
    data = mc.load_data(CONFIG)
    return data, mc.train(CONFIG, data)


def all_in_one(data, config, n):
    """The n training pairs that `gather` draws, as one batch of images"""
    samples, = mc.epoch_samples(data, config.n_epochs, dataclasses.replace(config, n_train=n))
    return mc.to_batch(samples, np.arange(n))["images"]


def test_statistics_in_evaluation_are_those_that_fit(trained):
    """If the running statistics are those of the same images, layer by layer, evaluation finds them again; with others
    only the first layer's, on which no normalization has an effect, are the same"""
    data, state = trained
    images, fitting = all_in_one(data, CONFIG, 48), {}
    mc.convolutions_forward(state["params"], images, CONFIG, fitting)
    found = multimnist_statistics.evaluation_statistics(state["params"] | fitting, images, CONFIG)
    assert found.keys() == fitting.keys() == state["running"].keys()
    for name, value in fitting.items():
        np.testing.assert_allclose(found[name], value, rtol=5e-3, atol=2e-3, err_msg=name)
    other = multimnist_statistics.evaluation_statistics(mc.weights_of(state), images, CONFIG)
    assert np.allclose(other["conv1_norm_var"], fitting["conv1_norm_var"], rtol=1e-3)
    assert not np.allclose(other["conv2_norm_var"], fitting["conv2_norm_var"], rtol=0.01)


def test_the_first_group_replaces_what_was_there_and_the_second_counts_half(trained):
    data, state = trained
    images, first, second = all_in_one(data, CONFIG, 32), {}, {}
    for rows, found in (slice(0, 16), first), (slice(16, 32), second):
        mc.convolutions_forward(state["params"], images[rows], CONFIG, found)
    gathered = multimnist_statistics.gather(state, data, CONFIG, 32, 16, 0.01, False)
    for name, value in gathered.items():
        np.testing.assert_allclose(value, (first[name] + second[name]) / 2, rtol=1e-4, atol=1e-6)
    by_layer = multimnist_statistics.gather(state, data, CONFIG, 32, 32, 0.01, True)
    np.testing.assert_allclose(by_layer["conv1_norm_mean"], images_mean(state, images), rtol=1e-3, atol=1e-5)


def images_mean(state, images):
    """The mean of each channel of the first convolution"""
    w = state["params"]["conv1_w"]
    return mc.conv2d_forward(mc.im2col_rows(images, w.shape[1]), w, 1)[0].mean((0, 1, 2))


def test_the_command(trained, tmp_path, monkeypatch, capsys):
    data, state = trained
    mc.save(tmp_path / "w.npz", CONFIG, state)
    words = f"x --load {tmp_path}/w.npz --n-pairs 32 --digits synthetic --out-json {tmp_path}/r.json"
    monkeypatch.setattr(sys, "argv", words.split())
    multimnist_statistics.main()
    found = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert capsys.readouterr().out.count("validation accuracy") == len(multimnist_statistics.WAYS) + 2
    low, high = found["validation"]["layer_by_layer_ci95"]
    assert low <= found["validation"]["layer_by_layer"] <= high and found["loaded"]["file"] == "w.npz"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--n-pairs", "0"])
    with pytest.raises(Exception, match="--n-pairs 0: must be"):
        multimnist_statistics.main()
