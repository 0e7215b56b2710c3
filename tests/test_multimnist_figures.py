"""What the figures compute: metrics of errors and of routing; a picture's ink, and the confidence of a prediction."""
import dataclasses
import re
from types import SimpleNamespace

import multimnist_capsnet as mc
from lab import data, figures, networks
from lab.messages import InputError

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import TINY
from test_multimnist_meaning import decoded

import visualize_multimnist_capsnet as viz


def run_of(pairs, scores, config=TINY):
    """Return a Run of an untrained network with given scores"""
    run = viz.Run("capsnet", config, TINY, mc.init_params(TINY), {"source": "synthetic", "epochs": []},
                  {"source": "synthetic"})
    run.__dict__.update(test_pairs=pairs, scores=scores)                 # instead of drawing and classifying them
    return run


def test_errors_by_visible_ink(digits):
    """Four pairs, one missed, of whose digits one lies under the other; merged by adding, what is not clipped shows"""
    a, b, c = np.zeros((3, 36, 36), np.uint8)
    a[:2], b[1:3], c[:3] = 255, 255, 255                    # a and b share a row of two, c covers a
    pairs = {"labels": np.array([[1, 2], [2, 1], [3, 4], [4, 3]]), "sources": np.array([[a, c], *[[a, b]] * 3])}
    pairs["composites"] = pairs["sources"].max(1)
    run = run_of(pairs, 0.1 + 0.8 * mc.k_hot(np.array([[1, 7], [1, 2], [3, 4], [3, 4]]), float, 10))
    visible, groups, _ = viz.visible_ink(run)
    np.testing.assert_allclose(visible, [[0, 1 / 3], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    assert sum(size for _, _, size in groups) == 4 and sum(n_correct for _, n_correct, _ in groups) == 3
    assert viz.error_metrics(run)["least_hidden"] == pytest.approx([0.5, 1])
    added = {"labels": pairs["labels"], "sources": pairs["sources"] // 255 * 170}
    added["composites"] = np.minimum(added["sources"].sum(1, dtype=int), 255).astype(np.uint8)
    visible, _, _ = viz.visible_ink(run_of(added, mc.k_hot(added["labels"], np.float32, 10)))
    np.testing.assert_allclose(visible, [[1 / 2, 2 / 3], [0.75, 0.75], [0.75, 0.75], [0.75, 0.75]], rtol=1e-5)
    pairs = next(mc.stream_pairs(digits, "test", 80, TINY, mc.EVALUATION, 1))
    assert viz.draw_errors(run_of(pairs, mc.k_hot(pairs["labels"], np.float32, 10)))                # without an error


def test_routing_metrics_by_hand(digits):
    """One iteration leaves every coupling coefficient at 1/10; with long votes three iterations do not"""
    pairs = next(mc.stream_pairs(digits, "test", 12, TINY, mc.EVALUATION, 1))
    lengths = mc.k_hot(pairs["labels"], np.float32, 10)
    run = run_of(pairs, lengths.copy())
    once = run_of(pairs, lengths.copy(), dataclasses.replace(TINY, routing_iters=1))
    hidden = viz.visible_ink(run)[2] == 0
    lengths[hidden.argmax()] = 1 - lengths[hidden.argmax()]                # a pair that is correct only with routing
    metrics = viz.routing_metrics(once, lengths)
    assert metrics["exact_match"] == pytest.approx([11 / 12, 1])
    assert metrics["exact_match_most_hidden"] == pytest.approx([1 - 1 / hidden.sum(), 1])
    assert metrics["largest_coupling"] == pytest.approx(0.1)
    assert metrics["coupling_to_digits_there"] + metrics["coupling_to_others"] == pytest.approx([0.1] * 4)
    run.params["W"] *= 30
    assert viz.routing_metrics(run, lengths)["largest_coupling"] > 0.11


def written(dark=True, size=(150, 210), noise=0.0, tilt=0.0):
    """A cross of two strokes, 60 px high and 40 wide, at (40, 70), on paper under slanting light -> gray levels"""
    gray = np.full(size, 0.85) if dark else np.full(size, 0.1)
    gray += tilt * np.linspace(-1, 1, size[1]) + noise * np.random.default_rng(0).standard_normal(size)
    ink = np.zeros(size)
    ink[40:100, 86:94] = ink[66:74, 70:110] = 1
    return np.where(ink > 0, 0.1 if dark else 0.9, gray).clip(0, 1), ink


@pytest.mark.parametrize("dark", [True, False])
@pytest.mark.parametrize("noise, tilt", [(0, 0), (0.02, 0), (0.01, 0.12)])
def test_ink_is_what_stands_out_of_the_ground_dark_or_light(dark, noise, tilt):
    gray, ink = written(dark, noise=noise, tilt=tilt)
    np.testing.assert_allclose(data.find_ink(gray), ink, atol=0.05)


def test_specks_lines_and_what_touches_the_edge_are_no_ink():
    """Lines a quarter as dark as the pen, of more pixels than it; a crop in which hardly half of it is plain ground"""
    gray, ink = written()
    ruled, soft, specks = gray.copy(), gray, gray.copy()
    specks[10:12, 10:12] = specks[120:140, :15] = 0
    np.testing.assert_allclose(data.find_ink(specks), ink, atol=0.05)
    assert data.ink_box(data.find_ink(gray[40:100, 70:110])) == (0, 60, 0, 40)   # every stroke touches the edge
    ruled[::8] -= 0.18 * (ink[::8] == 0)
    assert data.ink_box(data.find_ink(ruled)) == (40, 100, 70, 110)
    for _ in range(4):                                                                  # blurred by a few px
        soft = (soft + np.roll(soft, 1, 0) + np.roll(soft, -1, 0) + np.roll(soft, 1, 1) + np.roll(soft, -1, 1)) / 5
    crop = soft[34:106, 64:116] + 0.004 * np.random.default_rng(0).standard_normal((72, 52))
    np.testing.assert_allclose(data.ink_box(data.find_ink(crop)), (6, 66, 6, 46), atol=1)


def test_the_canvas_holds_the_ink_centered_in_its_size_each_pixel_its_share():
    """Scale 22 / 60: a bar 60 px high becomes 22, and 24 px wide 8.8; its last column covers 0.4 of a pixel on each
    side; the sum is the ink's area. Thin strokes, of 0.3 px of the canvas, are broadened to what handwriting has"""
    ink, expected, thin = np.zeros((100, 90)), np.zeros((36, 36), np.float32), np.zeros((300, 300))
    ink[20:80, 33:57] = 1
    expected[7:29, 14:22], expected[7:29, 13], expected[7:29, 22] = 1, 0.4, 0.4
    canvas = viz.to_canvas(ink)
    np.testing.assert_allclose(canvas, expected, atol=1e-6)
    assert canvas.dtype == np.float32 and viz.to_canvas(np.kron(ink, np.ones((3, 3)))).sum() == pytest.approx(22 * 8.8)
    thin[50:250, 100:103] = thin[50:53, 100:200] = thin[247:250, 100:200] = 1
    canvas = viz.to_canvas(thin)
    stroke, long = canvas[18], np.nonzero(canvas.max(1) > 0.5)[0]                       # across the upright; its ends
    assert 1.7 < stroke.sum() < 2.8 and stroke.max() > 0.9 and (long[0], long[-1]) == (7, 28)


@pytest.fixture
def picture(tmp_path):
    def save(pixels, name="x.png"):
        imageio.imwrite(tmp_path / name, pixels)
        return tmp_path / name
    return save


def test_a_picture_is_read_in_whatever_form(picture):
    """8 and 16 bits, gray and color, with and without transparency, JPEG, large: the same gray levels"""
    gray, _ = written()
    levels = np.round(gray * 255).astype(np.uint8)
    for pixels, white in ((levels, 255), (levels[..., None].repeat(3, -1), 255),
                          (levels.astype(np.uint16) * 257, levels.max())):               # 16 bits: the largest is white
        np.testing.assert_allclose(data.read_picture(picture(pixels)), levels / white, atol=1e-6)
    np.testing.assert_allclose(data.read_picture(picture(levels, "x.jpg")), levels / 255, atol=0.2)
    for shade, white in ((0, 1), (255, 0)):                                             # dark, so on white; and light
        clear = np.full((*levels.shape, 4), shade, np.uint8)
        clear[..., 3] = np.where(levels < 100, 255, 0)
        np.testing.assert_allclose(data.read_picture(picture(clear)), (clear[..., 3] == 0) == white)
    large = data.read_picture(picture(np.kron(levels, np.ones((9, 9), np.uint8))))
    assert large.shape == (1350 // 7, 1890 // 7) and data.ink_box(data.find_ink(large))[1] > 0


STORED = {                         # EXIF orientation: how a camera stores an upright picture (0 is no orientation)
    0: lambda a: a, 1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
    5: lambda a: a.T, 6: lambda a: np.rot90(a), 7: lambda a: a[::-1, ::-1].T, 8: lambda a: np.rot90(a, -1)}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_a_photograph_is_turned_upright(tmp_path, orientation, ending):
    """In all nine orientations, whatever the version of imageio"""
    from PIL import Image
    upright = np.full((80, 60), 255, np.uint8)
    upright[10:30, 5:25], upright[60:64, 5:55] = 0, 100                     # no two of its turns are the same
    image = Image.fromarray(np.ascontiguousarray(STORED[orientation](upright)))
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(tmp_path / f"x.{ending}", exif=exif, quality=95)
    np.testing.assert_allclose(data.read_picture(tmp_path / f"x.{ending}"), upright / 255, atol=0.15)


NOISE = np.random.default_rng(0)
NO_INK = {"white": np.full((80, 80), 255), "light falling off": np.tile(np.arange(60, 240), (80, 1)),
          "noise": 200 + 8 * NOISE.standard_normal((80, 80)), "static": NOISE.integers(0, 256, (80, 80))}
BROKEN = {"cut off": lambda raw: raw[:len(raw) // 2], "empty": lambda raw: b"", "text": lambda raw: b"hello\n" * 9,
          "changed": lambda raw: raw[:60] + b"????" + raw[64:]}


@pytest.mark.parametrize("name", [*NO_INK, *BROKEN, "tiny", "missing", "a folder"])
def test_what_holds_no_ink_or_is_no_picture_is_refused_by_name_in_one_line(picture, tmp_path, name):
    good = np.round(written(noise=0.02)[0] * 255).astype(np.uint8)
    path = picture(NO_INK.get(name, good[:4, :9] if name == "tiny" else good).clip(0, 255).astype(np.uint8))
    if name in BROKEN:
        path.write_bytes(BROKEN[name](path.read_bytes()))
    path = {"missing": tmp_path / "none.png", "a folder": tmp_path}.get(name, path)
    fault = "no ink" if name in NO_INK else ""
    args = SimpleNamespace(image=path, only=[], results=None, load=None, out_json=None)
    with pytest.raises(InputError, match=re.escape(f"--image {path}: {fault}")) as error:
        viz.draw_image(args)
    assert "\n" not in str(error.value)


SHIPPED = networks.load_network(mc, mc.PRETRAINED[0])
IMAGES, LABELS, _ = mc.synthesize_digits(60, 3)


def test_the_square_of_the_centers_by_hand():
    """deep and residual: centers at 11.5, 15.5, 19.5, 23.5 of 0 to 35 px; one position: the whole image"""
    along = viz.field_centers(SHIPPED.config)
    assert (along * 18 + 17.5).tolist() == pytest.approx([11.5, 15.5, 19.5, 23.5])
    assert viz.square_of_centers(along, 36) == pytest.approx((9.5, 16))
    assert viz.square_of_centers(np.zeros(1), 36) == pytest.approx((-0.5, 36))


def n_evaluated(first, second):
    """Return the lines printed for two overlapping synthetic digits, dark on white, and the figure's title"""
    both = np.maximum(IMAGES[first], np.roll(IMAGES[second], (1, -1), (0, 1)))
    gray, said = np.kron(np.pad(1 - both / 255, 4, constant_values=1), np.ones((6, 6))), []
    return said, viz.draw_picture(SHIPPED, gray, data.find_ink(gray), said.append).get_suptitle()


@pytest.mark.parametrize("first, second", [(0, 20), (1, 21), (0, 0), (2, 2), (0, "twin"), (4, "twin")])
def test_low_confidence_is_reported_in_the_line_and_in_the_figure(first, second):
    """For a digit alone, and for two digits of one class; not for two clear digits of different classes"""
    if second == "twin":
        second = next(k for k in range(60) if LABELS[k] == LABELS[first] and k != first)
    said, title = n_evaluated(first, second)
    kind, one, other, a, b, c = re.match(
        r"(predicted|low confidence): (\d) and (\d); capsule lengths (\S+) and (\S+), next longest \d with (\S+)",
        said[0]).groups()
    assert title.startswith(f"{kind.capitalize()}: {one} and {other}") and float(a) >= float(b) >= float(c)
    assert kind == ("low confidence" if LABELS[first] == LABELS[second] else "predicted")
    if kind == "predicted":
        assert len(said) == 1 and "capsule" not in title and {int(one), int(other)} == {*LABELS[[first, second]]}
    else:
        reason = "shorter than 0.8" if float(b) < 0.8 else "less than 0.5 longer than the third"
        assert "two capsule lengths near 0.9" in said[1] and f"(second longest capsule {reason})" in title


@pytest.mark.parametrize("second, third, kind", [
    (0.81, 0.3, "predicted"), (0.81, 0.32, "low confidence"), (0.79, 0.1, "low confidence")])
def test_what_low_confidence_is(monkeypatch, second, third, kind):
    """The second longest capsule is short, or little longer than the third"""
    whole, lengths = mc.forward, np.array([[0.95, second, third, *[0.1] * 7]])
    monkeypatch.setattr(mc, "forward", lambda params, images, config: (
        whole(params, images, config, np.array([[0, 1]]))[0] | {"scores": lengths}, None))
    assert n_evaluated(0, 20)[0][0].startswith(f"{kind}: 0 and 1")


def test_training_curves_show_each_term_of_each_history():
    """A line for each network and key, with its values; panels of terms that no network has are left out"""
    one = [{"epoch": k, "train_loss": 2 / k, "val_loss": 3 / k, "train_margin": 1 / k, "train_accuracy": 0.2 * k,
            "val_exact_match": 0.1 * k} for k in (1, 2, 3)]
    other = [{"epoch": k, "train_loss": 1 / k, "train_accuracy": 0.3 * k, "familiar": 0.25 * k, "novel": 0.2 * k}
             for k in (1, 2)]
    fig = figures.training_curves({"a": {"epochs": one}, "b": {"epochs": other}})
    assert [ax.get_title() for ax in fig.axes] == ["total loss", "margin loss", "accuracy"]
    loss, margin, accuracy = ({line.get_label(): line.get_ydata().tolist() for line in ax.lines} for ax in fig.axes)
    assert loss == {"a, training": [2, 1, 2 / 3], "a, validation": [3, 1.5, 1], "b, training": [1, 0.5]}
    assert margin == {"a, training": [1, 0.5, 1 / 3]}
    assert accuracy["a, validation"] == pytest.approx([0.1, 0.2, 0.3])
    assert accuracy["b, novel views"] == [0.2, 0.4]
    assert len(accuracy) == 5 and len({line.get_color() for line in fig.axes[0].lines}) == 2
    alone = figures.training_curves({"a": {"epochs": one}})
    assert [line.get_label() for line in alone.axes[0].lines] == ["training", "validation"]


def test_perturbed_reconstructions_change_one_dimension_of_one_capsule(rng):
    """A row per dimension, a column per step of 0.05; the middle column is the capsule as it is"""
    params = mc.init_params(TINY)
    v = (0.1 * rng.standard_normal(16)).astype(np.float32)
    images = figures.perturbed_reconstructions(mc, params, TINY, v, 3)
    assert images.shape == (16, 11, 36, 36) and np.allclose(np.diff(figures.PERTURBATIONS), 0.05)
    for dimension, column, step in (0, 0, -0.25), (7, 8, 0.15), (15, 10, 0.25), (4, 5, 0):
        capsules = np.tile(v, (1, 10, 1))
        capsules[0, 3, dimension] += step
        np.testing.assert_allclose(images[dimension, column], decoded(params, capsules, [[3]])[0, 0], atol=1e-6)
    fig = figures.new_figure(2, "a title")
    figures.show_perturbations(fig.subplots(), images)
    assert "are faint" in fig.get_supxlabel()                              # before any training


def test_bars_are_labeled_by_the_names_of_classes_if_these_fit():
    ax = figures.new_figure(2, "a title").subplots()
    for names, width, shown in (["a", "ring"], 100, "a"), (["a", "ring"], 40, "0"), (["5", "6"], 100, "5"):
        figures.label_classes(ax, names, width)
        assert ax.get_xticklabels()[0].get_text() == shown
