"""What the figures compute: R^2 of linear maps from capsules to known factors; what errors and routing say; the ink
of a picture."""
import dataclasses
import re
from types import SimpleNamespace

import multimnist_capsnet as mc

import imageio.v3 as imageio
import numpy as np
import pytest
from conftest import TINY

import visualize_multimnist_capsnet as viz

SIZES = (600, 200, 400)


def made():
    rng, n = np.random.default_rng(0), sum(SIZES)
    return rng, rng.integers(0, 10, n), rng.standard_normal((n, 5))


def test_r2_is_one_for_what_is_linear_in_each_class_and_zero_for_noise():
    rng, digits, features = made()
    maps = rng.standard_normal((10, 5))
    linear = np.einsum("nd,nd->n", features, maps[digits]) + digits
    factors = np.stack(
        [linear, linear + np.linalg.norm(maps[digits], axis=1) * rng.standard_normal(len(digits)),
         rng.standard_normal(len(digits))],
        1)
    r2 = viz.linear_r2(features, factors, digits, SIZES)
    assert r2[0] > 0.999 and r2[1] == pytest.approx(0.45, abs=0.12) and abs(r2[2]) < 0.12


def test_r2_gives_nothing_for_knowing_the_class():
    rng, digits, _ = made()
    names = np.eye(10)[digits] + 1e-3 * rng.standard_normal((len(digits), 10))
    assert abs(viz.linear_r2(names, (digits + 0.1 * rng.standard_normal(len(digits)))[:, None], digits, SIZES)[0]) < 0.2


def test_r2_survives_features_that_are_constant_where_it_is_fitted():
    _, digits, features = made()
    factors = features[:, :1].copy()
    features[:, 1], features[700:, 1] = 0, 1
    assert viz.linear_r2(features, factors, digits, SIZES)[0] > 0.99


def test_factors_are_the_placed_digits_own():
    pairs, factors = viz.factor_pairs(300, 5, TINY)
    images, labels, known = mc.synthesize_digits(225, 5)
    for n, k in ((0, 0), (7, 1), (299, 0)):
        digit = pairs["index"][n, k]
        assert pairs["labels"][n, k] == labels[digit]
        dy, dx = pairs["shifts"][n, k]
        np.testing.assert_array_equal(pairs["sources"][n, k], mc.shift_digits(images[[digit]], np.array([[dy, dx]]))[0])
        np.testing.assert_allclose(
            factors[n, k],
            [dx, dy, known["rotation"][digit], known["slant"][digit], np.log(known["aspect"][digit]),
             np.log(known["stroke"][digit])],
            rtol=1e-6)


def test_each_digits_own_capsule_is_probed(digits):
    pairs, params = mc.draw_pairs(digits, "val", 6, TINY, "data"), mc.init_params(TINY)
    with mc.Runner(1) as runner:
        out = runner.forward(params, pairs, TINY)
    features = viz.probed(out, pairs["labels"])
    for n in range(6):
        for k in (0, 1):
            np.testing.assert_array_equal(features[2 * n + k], out["v"][n, pairs["labels"][n, k]])


def test_networks_to_probe_differ_in_what_they_say_only():
    config = mc.Config(seed=1, n_train=40, batch_size=8, digits="synthetic")
    caps, silent, cnn = viz.networks_to_probe(config).values()
    assert caps == dataclasses.replace(config, min_iou=0.0) and silent == dataclasses.replace(caps, recon_weight=0.0)
    assert (cnn.model, cnn.n_train, cnn.seed, cnn.digits, cnn.min_iou, cnn.lr) == (
        "cnn", 40, 1, "synthetic", 0.0, mc.CNN["lr"])
    assert viz.networks_to_probe(dataclasses.replace(config, lr=1e-3))["CNN, last hidden layer"].lr == 1e-3
    mc.check_config(cnn)


@pytest.mark.parametrize("n, wrong", [(80, 5), (32, 0), (1250, 0)])
def test_the_error_figure_draws_groups_without_an_error(digits, n, wrong):
    pairs = mc.draw_pairs(digits, "test", n, TINY, "evaluation", 1)
    lengths = mc.k_hot(pairs["labels"], np.float32)
    lengths[:wrong] = lengths[:wrong, ::-1] + np.arange(10) / 100
    right = mc.both_right(mc.top_two(lengths), pairs["labels"])
    run = viz.Run(TINY, TINY, {}, {"source": "synthetic", "epochs": []}, "synthetic", {}, pairs, lengths, right, {})
    assert viz.draw_errors(run)


def test_the_answers_to_the_quiz_by_hand(digits):
    """128 pairs, of which the first 100 are asked; the network says 0 and 1 to the fourth, and is right elsewhere"""
    pairs = mc.draw_pairs(digits, "test", 128, TINY, "evaluation", 1)
    pairs["labels"][3] = 7, 2
    lengths = mc.k_hot(pairs["labels"], np.float32)
    lengths[3] = [0.9, 0.8, *[0.1] * 8]
    right = mc.both_right(mc.top_two(lengths), pairs["labels"])
    run = viz.Run(TINY, TINY, {}, {"source": "synthetic", "epochs": []}, "synthetic", {}, pairs, lengths, right, {})
    first, *lines = viz.quiz_answers(run).splitlines()
    assert "99 of 100" in first and len(lines) == 100
    assert lines[3] == "3: 2 7   (the network says 0 1)"
    low, high = sorted(pairs["labels"][99])
    assert lines[99] == f"99: {low} {high}"
    picture, = (image for ax in viz.draw_quiz(run).axes for image in ax.images)
    shown = picture.get_array()[..., 0]                                                 # 10 x 10 of 36 px, 3 px between
    np.testing.assert_allclose(shown[39:75, 117:153], pairs["composites"][13] / 255)


# ---------------------------------------------------------------- errors and routing, in numbers

def run_of(labels, named, sources):
    """What the findings read of a Run, whose network names what it is told to"""
    lengths = np.full((len(labels), 10), 0.1)
    for row, (first, second) in enumerate(named):
        lengths[row, first], lengths[row, second] = 0.9, 0.8
    labels = np.array(labels)
    return SimpleNamespace(test_pairs={"labels": labels, "sources": np.array(sources, np.uint8)}, lengths=lengths,
                           right=mc.both_right(mc.top_two(lengths), labels))


def test_errors_by_set_and_by_what_is_to_be_seen():
    """Two pairs of 1 and 2, one missed, two of 3 and 4, both named; of the missed one's digits one lies under the
    other"""
    a, b, c = np.zeros((3, 36, 36))
    a[:2], b[1:3], c[:3] = 255, 255, 255                    # a and b share a row of two, c covers a
    run = run_of([[1, 2], [2, 1], [3, 4], [4, 3]], [[1, 7], [1, 2], [3, 4], [3, 4]], [[a, c], [a, b], [a, b], [a, b]])
    found = viz.error_counts(run)
    assert found.total[2, 1] == found.total[4, 3] == 2 and found.total.sum() == 4
    assert found.wrong[2, 1] == found.wrong.sum() == 1
    np.testing.assert_allclose(found.shown, [[0, 1 / 3], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    assert sum(size for _, _, size in found.groups) == 4 and sum(hits for _, hits, _ in found.groups) == 3
    said = viz.error_findings(run, 1)
    assert said["hardest_sets"] == [(1, 2, 0.5)] and said["easiest_sets"] == [(3, 4, 0)]
    assert said["least_hidden"][0] == pytest.approx(0.5)


def test_routing_findings_by_hand():
    """Uniform couplings have the entropy of ten equals, log 10; one iteration changes nothing"""
    config = dataclasses.replace(TINY, routing_iters=1)
    rng = np.random.default_rng(0)
    pairs = mc.generate_multimnist(rng.integers(0, 256, (40, 28, 28), dtype=np.uint8), np.arange(40) % 10, 12, rng)
    run = SimpleNamespace(config=config, params=mc.init_params(config), test_pairs=pairs, right=np.ones(12, bool))
    lengths = mc.k_hot(pairs["labels"], np.float32)
    hidden = viz.error_counts(run).group == 0
    first = np.flatnonzero(hidden)[0]
    lengths[first] = 1 - lengths[first]                                          # one pair that only routing gets right
    said = viz.routing_findings(run, lengths)
    assert said["set_accuracy"] == pytest.approx([11 / 12, 1])
    assert said["set_accuracy_most_hidden"] == pytest.approx([1 - 1 / hidden.sum(), 1])
    assert said["entropy"] == pytest.approx([np.log(10)] * 2) and said["largest_coupling"] == pytest.approx(0.1)
    assert said["coupling_to_digits_there"] == said["coupling_to_others"] == pytest.approx([0.1, 0.1])
    run.config = dataclasses.replace(config, routing_iters=3)
    run.params["W"] *= 30
    assert viz.routing_findings(run, lengths)["entropy"][1] < np.log(10)


# ---------------------------------------------------------------- a picture of one's own

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
    found = viz.find_ink(gray, "x.png")
    np.testing.assert_allclose(found, ink, atol=0.05)
    assert viz.ink_box(found) == (40, 100, 70, 110)


def test_specks_and_what_touches_the_edge_are_no_ink():
    gray, ink = written()
    gray[10:12, 10:12] = gray[120:140, :15] = 0
    np.testing.assert_allclose(viz.find_ink(gray, "x.png"), ink, atol=0.05)
    cut = written()[0][40:100, 70:110]                                                  # every stroke touches the edge
    assert viz.ink_box(viz.find_ink(cut, "x.png")) == (0, 60, 0, 40)


def test_ruled_paper_and_a_tight_crop_with_soft_edges_leave_the_ink():
    """Lines a quarter as dark as the pen, of more pixels than it; a crop in which hardly half of it is plain ground"""
    gray, ink = written()
    ruled = gray.copy()
    ruled[::8] -= 0.18 * (ink[::8] == 0)
    assert viz.ink_box(viz.find_ink(ruled, "x.png")) == (40, 100, 70, 110)
    soft = gray.copy()
    for _ in range(4):                                                                  # blurred by a few px
        soft = (soft + np.roll(soft, 1, 0) + np.roll(soft, -1, 0) + np.roll(soft, 1, 1) + np.roll(soft, -1, 1)) / 5
    crop = soft[34:106, 64:116] + 0.004 * np.random.default_rng(0).standard_normal((72, 52))
    top, bottom, left, right = viz.ink_box(viz.find_ink(crop, "x.png"))
    assert abs(top - 6) <= 1 and abs(bottom - 66) <= 1 and abs(left - 6) <= 1 and abs(right - 46) <= 1


def test_the_canvas_holds_the_ink_centred_in_its_size_each_pixel_its_share():
    """Scale 22 / 60: a bar 60 px high becomes 22, and 24 px wide 8.8; its last column covers 0.4 of a pixel on each
    side; the sum is the ink's area"""
    ink = np.zeros((100, 90))
    ink[20:80, 33:57] = 1
    canvas = viz.to_canvas(ink)
    expected = np.zeros((36, 36), np.float32)
    expected[7:29, 14:22], expected[7:29, 13], expected[7:29, 22] = 1, 0.4, 0.4
    np.testing.assert_allclose(canvas, expected, atol=1e-6)
    assert canvas.dtype == np.float32 and viz.to_canvas(np.kron(ink, np.ones((3, 3)))).sum() == pytest.approx(22 * 8.8)


def test_thin_strokes_are_broadened_to_what_handwriting_has():
    thin = np.zeros((300, 300))
    thin[50:250, 100:103] = thin[50:53, 100:200] = thin[247:250, 100:200] = 1           # 0.3 px of the canvas
    canvas = viz.to_canvas(thin)
    stroke = canvas[18]                                                                 # across the upright
    assert 1.7 < stroke.sum() < 2.8 and stroke.max() > 0.9
    rows, columns = (np.nonzero(canvas.max(axis) > 0.5)[0] for axis in (1, 0))
    assert (rows[0], rows[-1]) == (7, 28) and 10 <= columns[-1] - columns[0] + 1 <= 13


@pytest.fixture
def picture(tmp_path):
    def save(pixels, name="x.png"):
        imageio.imwrite(tmp_path / name, pixels)
        return tmp_path / name
    return save


def test_a_picture_is_read_in_whatever_form(picture):
    """8 and 16 bits, gray and colour, with and without transparency, JPEG, large: the same gray levels"""
    gray, _ = written()
    levels = np.round(gray * 255).astype(np.uint8)
    ink = np.where(levels < 100, 255, 0).astype(np.uint8)
    clear = np.stack([0 * ink, 0 * ink, 0 * ink, ink], -1)
    forms = {"gray": levels, "colour": levels[..., None].repeat(3, -1), "16 bits": levels.astype(np.uint16) * 257}
    for name, pixels in forms.items():
        top = levels.max() if name == "16 bits" else 255                                # their white is their largest
        np.testing.assert_allclose(viz.read_picture(picture(pixels)), levels / top, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(viz.read_picture(picture(levels, "x.jpg")), levels / 255, atol=0.2)
    np.testing.assert_allclose(viz.read_picture(picture(clear)), ink == 0)                         # dark, so on white
    clear[..., :3] = 255
    np.testing.assert_allclose(viz.read_picture(picture(clear)), ink > 0)                          # light, so on black
    large = viz.read_picture(picture(np.kron(levels, np.ones((9, 9), np.uint8))))
    assert large.shape == (1350 // 7, 1890 // 7) and viz.ink_box(viz.find_ink(large, "x"))[1] > 0


NO_INK = {"white": np.full((80, 80), 255), "light falling off": np.tile(np.arange(60, 240), (80, 1)),
          "noise": 200 + 8 * np.random.default_rng(0).standard_normal((80, 80)),
          "static": np.random.default_rng(0).integers(0, 256, (80, 80))}


@pytest.mark.parametrize("name", NO_INK)
def test_a_picture_without_ink_is_refused(picture, name):
    path = picture(NO_INK[name].clip(0, 255).astype(np.uint8))
    with pytest.raises(mc.InputError, match=re.escape(f"--image {path}: holds no ink")):
        viz.find_ink(viz.read_picture(path), path)


BROKEN = {"cut off": lambda raw: raw[:len(raw) // 2], "empty": lambda raw: b"", "text": lambda raw: b"hello\n" * 9,
          "changed": lambda raw: raw[:60] + b"????" + raw[64:]}


@pytest.mark.parametrize("name", [*BROKEN, "tiny", "missing", "a folder"])
def test_what_is_no_picture_is_refused_by_name_in_one_line(picture, tmp_path, name):
    good = np.round(written(noise=0.02)[0] * 255).astype(np.uint8)
    path = picture(good[:4, :9] if name == "tiny" else good)
    if name in BROKEN:
        path.write_bytes(BROKEN[name](path.read_bytes()))
    path = {"missing": tmp_path / "none.png", "a folder": tmp_path}.get(name, path)
    with pytest.raises(mc.InputError, match=re.escape(f"--image {path}: ")) as error:
        viz.read_picture(path)
    assert "\n" not in str(error.value)
