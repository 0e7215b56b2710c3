"""Each experiment's command line: trained, resumed, loaded, kept, with the same answers."""
import json
import sys

import pins
import pytest
from conftest import EXPERIMENTS, SMALL, toy


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """cli(experiment, *flags) -> exit code, stdout, stderr in this process, in tmp_path, with few synthetic digits"""
    monkeypatch.chdir(tmp_path)

    def call(experiment, *flags):
        module = EXPERIMENTS[experiment]
        if hasattr(module, "N_SYNTHETIC"):
            monkeypatch.setattr(module, "N_SYNTHETIC", {"train": 80, "val": 40, "test": 80})
        monkeypatch.setattr(sys, "argv", [f"{experiment}.py", *map(str, flags)])
        try:
            module.run_cli(module.main)
        except SystemExit as stop:
            return stop.code, *capsys.readouterr()
        return 0, *capsys.readouterr()
    return call


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_trained_resumed_loaded_and_kept(cli, tmp_path, experiment):
    (config, _), module, found = toy(experiment), EXPERIMENTS[experiment], []
    given = {f.name: getattr(config, f.name) for f in module.options(config) if f.type is not bool
             and f.name in pins.SIZES.keys() | SMALL.get(experiment, {}).keys() and module.means_something(f, config)}
    small = [f"{module.flag_of(name)}={value}" for name, value in given.items()]
    train, few = [*small, "--checkpoint=run.npz"], [word for word in small if word.startswith("--n-test")]
    for flags in (train, [*train, "--resume", "--out-weights=net.npz"], ["--load=run.npz", *few],
                  ["--load=net.npz", *few]):
        code, out, err = cli(experiment, *flags, "--out-json", "out.json")
        assert code == 0 and not err and out, err
        found.append(json.loads((tmp_path / "out.json").read_text()))
    bits = [one.get("hit_bits") or one["runs"][0]["hit_bits"] for one in found]
    assert bits[0] == bits[1] == bits[2] and found[2]["loaded"]["file"] == "run.npz"
    assert found[3]["loaded"]["file"] == "net.npz" and bits[3].keys() == bits[0].keys()
    code, out, err = cli(experiment, *train)
    assert code == 2 and "run.npz: holds this run already" in err and err.count("\n") == 1
