"""The project's own results: each is of a network that its flags make; documents and figures say what they say."""
import importlib
import json
import math
import re
import shlex
import sys

from lab import figures

import pytest
from conftest import ROOT, configs, golden, runs
from PIL import Image

sys.path.insert(0, str(ROOT / "results"))
import render  # noqa: E402
import result_files  # noqa: E402


@pytest.fixture(scope="module")
def kept():
    return result_files.read(ROOT / "results")


def test_every_run_has_a_pin_and_every_result_is_of_a_run_in_its_place_and_names_no_path(kept):
    assert all(map(result_files.since, result_files.BY_NAME.values())) and kept.keys() <= result_files.BY_NAME.keys()
    for path in (ROOT / "results").rglob("*.jsonl"):
        texts = path.read_text("utf-8").splitlines()
        places = [(line["setting"], line["seed"]) for line in map(json.loads, texts)]
        assert places == sorted(places), path
        assert not any(re.search(r'"/(home|root|tmp|work|Users)/|\\\\', text) for text in texts), path


def test_every_result_is_of_a_network_of_its_flags_size(kept):
    """Were a setting to change its flags and keep its name, an older result would stand for another network"""
    for name, line in kept.items():
        run, module = result_files.BY_NAME[name], golden.modules[line["experiment"]]
        if "python3" not in run.flags:
            config, = configs(line["experiment"], shlex.split(run.flags))
            if getattr(config, "task", "") == "images":                 # golden's have the size of the results'
                config = module.fit_to_data(config, golden.tiny_data(line["experiment"], config))
            assert line["n_params"] == sum(map(math.prod, module.param_shapes(config).values())), name


def test_every_training_command_is_accepted_at_toy_size(tmp_path, monkeypatch):
    """Each flag applies to the network and to the data"""
    monkeypatch.chdir(tmp_path)
    for result in {result.name.rpartition("-")[0]: result for result in runs.RESULTS}.values():
        words = shlex.split(runs.shell_command(result, "r.json", toy=True))
        if words[1] == f"{result.experiment}.py":
            configs(result.experiment, words[2:])


def test_the_projects_documents_say_what_its_results_say():
    said = []
    assert render.render(ROOT, ROOT / "results", check=True, say=said.append) == 0, said


@pytest.mark.parametrize("experiment", [*runs.EXPERIMENTS, "findings"])
def test_figures_of_results_are_drawn_from_the_results_of_today(experiment, tmp_path, monkeypatch):
    """A PNG holds a digest of what it shows. If it fails, draw anew: visualize_EXPERIMENT.py --results, or
    results/render.py --pictures"""
    results, shown = render.Results(ROOT / "results"), {}
    monkeypatch.setattr(figures, "write_figure", lambda fig, path, say: shown.update({path.stem: fig}))
    with figures.style():
        if experiment == "findings":
            render.pictures(results, tmp_path)
        else:
            module = importlib.import_module(f"visualize_{experiment}")
            shown = {name: draw(results) for name, draw in module.OF_RESULTS.items()}
    stale = [name for name, fig in shown.items() if figures.content_digest(fig) != Image.open(
        ROOT / "viz" / experiment / f"{name}.png").text.get("Content")]
    assert shown and not stale


def test_the_digest_of_a_figure_follows_its_points_and_its_texts():
    def digest(y=1.0, low=0.5, label="n = 3"):
        fig = figures.new_figure(2, "title")
        axes = fig.subplots()
        axes.errorbar([0, 1], [y, 2], [0.1, 0.2])
        axes.set_title(label)
        axes.fill_between([0, 1], [low, low], [2, 2])
        return figures.content_digest(fig)
    assert digest() == digest() == digest(1.0000001)
    assert len({digest(), digest(1.001), digest(low=0.51), digest(label="n = 4")}) == 4
