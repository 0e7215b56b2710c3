"""Names of classes in figures are text: with a dollar sign, a backslash, or letters that the default font lacks."""
import warnings

import affnist_capsnet as ac
import multimnist_capsnet as mc
from lab import figures

import numpy as np
import pytest
from conftest import toy
from matplotlib.text import Text

import make_affnist_capsnet_gif as affnist_film
import visualize_affnist_capsnet as affnist_figures
import visualize_multimnist_capsnet as multi_figures

NAMES = [r"$\frac$", "$1 to $2", r"a\b_{c}", "日本", "\U0001F9A6", "é", "x^2", "%", "~", "$"]


def run_of(module, kind):
    """Return a Network of toy size whose classes have such names"""
    config, data = toy(module.EXPERIMENT)
    data = data | {"names": NAMES, "source": "drawings", "n_classes": 10}
    state = module.initial_state(config)
    state["history"] |= {"source": "drawings", "names": NAMES, "epochs": []}
    return kind("net", config, config, module.weights_of(state), state["history"], data)


@pytest.mark.parametrize("module, scripts", [(ac, affnist_figures), (mc, multi_figures)], ids=["affnist", "multimnist"])
def test_every_figure_shows_the_names_as_they_are(module, scripts, tmp_path):
    """with one line, and no warning, for the letters that no font has"""
    run = run_of(module, getattr(scripts, "Run", figures.Network))
    said, shown = [], ""
    with warnings.catch_warnings(), figures.style():
        warnings.simplefilter("error")
        for name, drawing in scripts.FIGURES.items():
            if name != "training_curves" and drawing.applies(run.config):
                fig = drawing.draw([run] if drawing.kind == "all" else run)
                figures.write_figure(fig, tmp_path / f"{name}.png", said.append)
                shown += " ".join(text.get_text() for text in fig.findobj(Text))
    assert r"$\frac$" in shown and "$1 to $2" in shown
    notes = [line for line in said if not line.startswith("wrote")]
    assert all(line.startswith("note: no font here has") and "Install a font" in line for line in notes)
    assert len(notes) <= len(scripts.FIGURES)


def test_another_font_of_the_machine_is_used_if_it_has_the_letters(monkeypatch, tmp_path):
    """Here the default font is one that lacks letters, and the other is DejaVu Sans"""
    entries = {font.name: font for font in figures.font_manager.fontManager.ttflist}
    first, other = entries["cmr10"], entries["DejaVu Sans"]
    monkeypatch.setattr(figures.font_manager, "findfont", lambda *_, **__: first.fname)
    monkeypatch.setattr(figures.font_manager.fontManager, "ttflist", [first, other])
    figures.fonts_for.cache_clear()
    assert figures.fonts_for(frozenset("aЖ")) == (["DejaVu Sans"], set())
    families, lacking = figures.fonts_for(frozenset("aЖ日"))
    assert families == ["DejaVu Sans"] and lacking == {"日"}
    figures.fonts_for.cache_clear()


def test_an_animation_shows_them_too(recwarn):
    run = run_of(ac, figures.Network)
    with figures.style():
        frames = affnist_film.draw_frames([(0, run.data["test"][0][0], 0)], [run], 2)
    assert len(frames) > 1 and frames[0].dtype == np.uint8
    assert not [str(each.message) for each in recwarn if "Glyph" in str(each.message)]
