"""Each experiment's command line: trained, resumed, loaded, kept, with the same answers."""
import json

import golden
import pytest
from conftest import EXPERIMENTS, SMALL, toy


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_trained_resumed_loaded_and_kept(call, tmp_path, experiment):
    (config, _), module, found = toy(experiment), EXPERIMENTS[experiment], []
    given = {f.name: getattr(config, f.name) for f in module.options(config) if f.type is not bool
             and f.name in golden.SIZES.keys() | SMALL.get(experiment, {}).keys()
             and module.is_applicable(f.metadata.get("only", {}), config)}
    small = [f"--model={config.model}", *(f"{module.flag_name(name)}={value}" for name, value in given.items())]
    train, few = [*small, "--checkpoint=run.npz"], [word for word in small if word.startswith("--n-test")]
    for flags in (train, [*train, "--out-weights=net.npz"], ["--load=run.npz", *few], ["--load=net.npz", *few]):
        code, out, err = call(module, module.main, *flags, "--out-json", "out.json")
        assert code == 0 and not err and out, err
        found.append(json.loads((tmp_path / "out.json").read_text("utf-8")))
    bits = [one["hit_bits"] for one in found]
    assert bits[0] == bits[1] == bits[2] and found[2]["loaded"]["file"] == "run.npz"
    assert found[3]["loaded"]["file"] == "net.npz" and bits[3].keys() == bits[0].keys()
    code, out, err = call(module, module.main, *train, "--seed=1")
    assert code == 2 and "run.npz: belongs to another run (seed 0, now 1)" in err and err.count("\n") == 1
