"""Pairs of digits that really overlap, drawn so that they depend on nothing but their seed."""
import dataclasses
import itertools
import json
import math
import sys

import multimnist_capsnet as mc

import bench_multimnist_nearest as bench
import numpy as np
import pytest
from conftest import TINY


def iou_reference(shifts):
    """IoU of two 20x20 boxes, by painting them"""
    canvas = np.zeros((2, 36, 36), bool)
    for k, (dy, dx) in enumerate(shifts):
        canvas[k, 8 + dy:28 + dy, 8 + dx:28 + dx] = True
    return (canvas[0] & canvas[1]).sum() / (canvas[0] | canvas[1]).sum()


def placed(image, dy, dx):
    """A 28x28 image in the middle of 36x36 px, then moved down and right"""
    canvas = np.zeros((36, 36), np.uint8)
    canvas[4 + dy:32 + dy, 4 + dx:32 + dx] = image
    return canvas


@pytest.mark.parametrize("shifts, iou", [(((0, 0), (0, 0)), 1), (((-4, 4), (-4, 4)), 1), (((0, 0), (0, 1)), 380 / 420),
                                         (((1, 0), (0, 1)), 361 / 439), (((2, 0), (0, 0)), 360 / 440),
                                         (((0, 1), (2, 0)), 342 / 458), (((-4, -4), (4, 4)), 144 / 656)])
def test_box_iou_by_hand(shifts, iou):
    assert mc.box_iou(np.array(shifts)) == pytest.approx(iou) == pytest.approx(iou_reference(shifts))


def test_legal_shift_pairs_by_hand():
    """On one axis 9, 16 and 14 of the 81 pairs of shifts are 0, 1 and 2 apart. IoU >= 0.8 allows the offsets (0, 0),
    (0, 1), (1, 0), (1, 1), (0, 2), (2, 0): 9*9 + 2*9*16 + 16*16 + 2*9*14 = 877 of 6561."""
    every = list(itertools.product(itertools.product(range(-4, 5), repeat=2), repeat=2))
    assert sorted(map(tuple, mc.allowed_shift_pairs(0).reshape(-1, 4))) == sorted(a + b for a, b in every)
    legal = mc.allowed_shift_pairs(0.8)
    assert len(legal) == 877 == sum(iou_reference(pair) >= 0.8 for pair in every)
    assert len(mc.allowed_shift_pairs(1)) == 81 and mc.box_iou(legal).min() == pytest.approx(360 / 440)
    assert len(mc.allowed_shift_pairs(360 / 440)) == 877  # the bound itself is inside


@pytest.mark.parametrize("min_iou, merge", [(0.8, "max"), (0, "add"), (1, "max")])
def test_every_pair_is_what_it_says(digits, min_iou, merge):
    images, labels = digits["train"]
    pairs = mc.generate_multimnist(images, labels, 300, np.random.default_rng(0), min_iou, merge)
    assert {name: (a.shape, a.dtype) for name, a in pairs.items()} == {
        "composites": ((300, 36, 36), np.uint8), "sources": ((300, 2, 36, 36), np.uint8),
        "labels": ((300, 2), np.int64), "shifts": ((300, 2, 2), np.int64), "index": ((300, 2), np.int64)}
    assert np.all(pairs["labels"][:, 0] != pairs["labels"][:, 1]) and np.abs(pairs["shifts"]).max() == 4
    for k, (index, shifts) in enumerate(zip(pairs["index"], pairs["shifts"])):
        assert iou_reference(shifts) >= min_iou
        sources = np.array([placed(images[i], *shift) for i, shift in zip(index, shifts)])
        merged = sources.max(0) if merge == "max" else sources.sum(0, dtype=int).clip(max=255)
        np.testing.assert_array_equal(pairs["composites"][k], merged)
        np.testing.assert_array_equal(pairs["sources"][k], sources)
        np.testing.assert_array_equal(pairs["labels"][k], labels[index])
    batch, rows = mc.to_batch(pairs, [3, 1]), [3, 1]
    for name, of in (("images", "composites"), ("sources", "sources")):
        np.testing.assert_allclose(batch[name], pairs[of][rows] / 255, rtol=1e-6)


def test_placements_and_partners_are_uniform(digits):
    """All 877 placements occur alike; the second digit is any image of another class, alike, whatever the classes'
    sizes."""
    labels = np.repeat(np.arange(4, dtype=np.uint8), [1, 2, 3, 6])[np.random.default_rng(1).permutation(12)]
    images, rng = np.zeros((12, 28, 28), np.uint8), np.random.default_rng(0)
    parts = [mc.generate_multimnist(images, labels, 2000, rng) for _ in range(15)]
    index, shifts = (np.concatenate([part[name] for part in parts]) for name in ("index", "shifts"))
    _, counts = np.unique(shifts.reshape(-1, 4), axis=0, return_counts=True)
    assert len(counts) == 877 and np.abs(counts - 30000 / 877).max() < 5 * (30000 / 877) ** 0.5
    table = np.zeros((12, 12))
    np.add.at(table, (index[:, 0], index[:, 1]), 1)
    allowed = labels[:, None] != labels
    expected = allowed / allowed.sum(1, keepdims=True) * 30000 / 12
    assert not table[~allowed].any() and np.all(np.abs(table - expected) <= 5 * expected ** 0.5)
    with pytest.raises(mc.InputError, match="two classes"):
        mc.generate_multimnist(digits["train"][0][:3], np.array([4, 4, 4]), 2, np.random.default_rng(0))


def test_pairs_depend_on_seed_and_key_and_not_on_how_many_are_drawn(digits, monkeypatch):
    """A stream holds a chunk at a time, each from a generator of its own"""
    monkeypatch.setattr(mc, "CHUNK", 40)
    stream = mc.stream_pairs(digits, "val", 10 ** 12, TINY, "evaluation", 0)            # nothing is drawn ahead
    first, second = next(stream), next(stream)
    many = mc.draw_pairs(digits, "val", 110, TINY, "evaluation", 0)
    for name, array in many.items():
        assert len(array) == 110 and np.array_equal(np.concatenate([first[name], second[name]]), array[:80])
    others = (mc.draw_pairs(digits, "val", 40, config, "evaluation", key)["index"] for config, key in
              ((TINY, 1), (dataclasses.replace(TINY, seed=2), 0)))
    assert not any(np.array_equal(first["index"], other) for other in (second["index"], *others))
    val, = mc.validation_pairs(digits, TINY)
    assert np.array_equal(val["index"], mc.draw_pairs(digits, "val", TINY.n_val, TINY, "evaluation", 0)["index"])
    plain = dataclasses.replace(TINY, min_iou=0.0, merge="add", warp=2.0)
    pairs = mc.draw_pairs(digits, "test", 60, plain, "evaluation", 1)                   # not warped
    assert mc.box_iou(pairs["shifts"]).min() < 0.5 and np.isin(pairs["sources"], digits["test"][0]).all()
    assert np.array_equal(pairs["composites"], pairs["sources"].sum(1, dtype=int).clip(max=255))


def test_epochs_are_fresh_and_cut_into_chunks_of_whole_batches(digits, monkeypatch):
    def drawn(epoch, sizes, **changes):
        parts = list(mc.epoch_samples(digits, epoch, dataclasses.replace(TINY, n_train=100, **changes)))
        assert [len(part["labels"]) for part in parts] == sizes
        return np.concatenate([part["index"] for part in parts])
    monkeypatch.setattr(mc, "CHUNK", 64)                                                # one batch of 40, less than two
    first = drawn(0, [40, 40, 20])
    assert np.array_equal(first, drawn(0, [40, 40, 20])) and not np.array_equal(first[:40], first[40:80])
    assert not np.array_equal(first, drawn(1, [40, 40, 20]))
    assert not np.array_equal(first, drawn(0, [40, 40, 20], seed=2))
    drawn(0, [60, 40], batch_size=30)
    drawn(0, [70, 30], batch_size=70)


IDENTITY = np.eye(2)[None]


def bent(down, across):
    """A bend that moves every pixel by the same px"""
    return np.broadcast_to(np.array([down, across], float)[:, None, None], (1, 2, mc.BEND_GRID, mc.BEND_GRID))


def resampled_by_loops(image, linear, bend):
    """Pixel by pixel, bilinear twice: the bend between its nodes, the image between its pixels"""
    side, middle = len(image), (len(image) - 1) / 2

    def between(grid, y, x):
        y0, x0 = math.floor(y), math.floor(x)
        return sum((1 - abs(y - i)) * (1 - abs(x - j)) * (grid[i, j] if max(i, j) < len(grid) and min(i, j) >= 0 else 0)
                   for i in (y0, y0 + 1) for j in (x0, x0 + 1))

    out = np.zeros((side, side))
    for y, x in np.ndindex(side, side):
        node = np.array([y, x]) / (side - 1) * (mc.BEND_GRID - 1)
        at = linear @ (np.array([y, x]) - middle) + [between(grid, *node) for grid in bend] + middle
        out[y, x] = between(image, *at)
    return out


def test_resampling_by_hand(rng):
    images = rng.integers(0, 256, (1, 28, 28), dtype=np.uint8)
    image, = images
    np.testing.assert_array_equal(mc.resample(images, IDENTITY, bent(0, 0))[0], image)
    moved, = mc.resample(images, IDENTITY, bent(1, -2))                 # from one down, two to the left
    np.testing.assert_array_equal(moved[:-1, 2:], image[1:, :-2])
    assert not moved[-1].any() and not moved[:, :2].any()
    turned, = mc.resample(images, np.array([[[0, 1], [-1, 0]]]), bent(0, 0))
    np.testing.assert_array_equal(turned, np.rot90(image))


def test_resampling_against_loops(rng):
    images = rng.integers(0, 256, (2, 28, 28), dtype=np.uint8)
    linear = np.eye(2) + rng.normal(0, 0.2, (2, 2, 2))
    bend = rng.normal(0, 2, (2, 2, mc.BEND_GRID, mc.BEND_GRID))
    for k, found in enumerate(mc.resample(images, linear, bend)):
        np.testing.assert_allclose(found, resampled_by_loops(images[k].astype(float), linear[k], bend[k]), atol=0.6)


def test_warps_are_as_large_as_they_say(monkeypatch):
    """Turned by up to 10 degrees, sheared by up to 0.1, sides scaled by up to 10%, times strength; of 2,000 digits"""
    asked, images = [], np.zeros((2000, 28, 28), np.uint8)
    monkeypatch.setattr(mc, "resample", lambda images, *how: asked.append(how) or images)
    for strength in (1, 2):
        asked.clear()
        assert len(mc.warp_digits(images, strength, np.random.default_rng(0))) == 2000
        linear, bend = (np.concatenate(parts) for parts in zip(*asked))
        down, across = np.linalg.norm(linear[:, :, 0], axis=1), np.linalg.det(linear)
        across = across / down                                           # a shear keeps areas
        turn = np.arctan2(-linear[:, 1, 0], linear[:, 0, 0])
        second = linear[:, :, 1] / across[:, None]                       # turned back: (shear, 1)
        shear = np.cos(turn) * second[:, 0] - np.sin(turn) * second[:, 1]
        for values, most in (down - 1, 0.1), (across - 1, 0.1), (np.rad2deg(turn), 10), (shear, 0.1):
            assert abs(values).max() == pytest.approx(strength * most, rel=0.02) and abs(values.mean()) < 0.1 * most
        assert bend.std() == pytest.approx(0.5 * strength, rel=0.02) and bend.shape == (2000, 2, 5, 5)


def test_training_digits_are_warped_each_drawn_one_anew(digits):
    """Pairs and placements stay what they were"""
    plain, warped = (next(mc.epoch_samples(digits, 0, dataclasses.replace(TINY, warp=warp))) for warp in (0.0, 1.0))
    assert np.array_equal(plain["labels"], warped["labels"]) and np.array_equal(plain["shifts"], warped["shifts"])
    changed = (plain["sources"] != warped["sources"]).any((2, 3))
    ink = warped["sources"].sum((2, 3)) / plain["sources"].sum((2, 3))
    assert changed.all() and 0.6 < ink.min() and ink.max() < 1.7
    assert np.array_equal(warped["composites"], warped["sources"].max(1))


def test_pairs_named_after_their_nearest_by_hand(monkeypatch):
    """Four known pairs, each a point of light; of five test pairs two are named whole, one in the other order"""
    known = np.zeros((4, 2, 2), np.uint8)
    known.reshape(4, 4)[np.arange(4), np.arange(4)] = 200
    labels = np.array([[3, 1], [4, 5], [0, 9], [7, 2]])
    pairs = {"composites": known[[0, 1, 2, 3, 3]], "labels": np.array([[1, 3], [4, 5], [0, 8], [5, 7], [0, 1]])}
    monkeypatch.setattr(bench, "in_the_middle", np.asarray)
    both, (low, high) = bench.accuracy(known, labels, [pairs])
    assert both == 2 / 5 and low < both < high
    monkeypatch.undo()
    image = np.zeros((1, 7, 7), np.uint8)
    image[0, 0, 1], image[0, 0, 5] = 100, 200                                           # its center: (0, 3 2/3)
    middle, = bench.in_the_middle(image)
    assert middle[3, 0] == 100 and middle[3, 4] == 200 and middle.sum() == 300


def test_the_pairs_nearest_neighbor_from_the_command_line(digits, monkeypatch, tmp_path):
    path = tmp_path / "r.json"
    monkeypatch.setattr(mc, "load_digits", lambda config: digits)                       # the others take seconds
    monkeypatch.setattr(sys, "argv", f"x --n-known 50 --n-test 20 --digits synthetic --out-json {path}".split())
    bench.main()
    found = json.loads(path.read_text("utf-8"))
    low, high = found["nearest_ci95"]
    assert low <= found["nearest"] <= high
