"""Pairs of digits that really overlap, drawn so that they depend on nothing but their seed."""
import dataclasses
import itertools
import json
import math
import sys
import time

import multimnist_capsnet as mc

import bench_multimnist_nearest
import numpy as np
import pytest
from conftest import TINY


def iou_reference(shifts):
    """IoU of two 20x20 boxes, by painting them"""
    canvas = np.zeros((2, 36, 36), bool)
    for k, (dy, dx) in enumerate(shifts):
        canvas[k, 8 + dy:28 + dy, 8 + dx:28 + dx] = True
    return (canvas[0] & canvas[1]).sum() / (canvas[0] | canvas[1]).sum()


# -------------------------------------------------------------- placements

@pytest.mark.parametrize("shifts, iou", [(((0, 0), (0, 0)), 1), (((-4, 4), (-4, 4)), 1), (((0, 0), (0, 1)), 380 / 420),
                                         (((1, 0), (0, 1)), 361 / 439), (((2, 0), (0, 0)), 360 / 440),
                                         (((0, 1), (2, 0)), 342 / 458),
                                         (((-4, -4), (4, 4)), 144 / 656)])
def test_box_iou_by_hand(shifts, iou):
    assert mc.box_iou(np.array(shifts)) == pytest.approx(iou) == pytest.approx(iou_reference(shifts))


def test_legal_shift_pairs_by_hand():
    """On one axis 9, 16 and 14 of the 81 pairs of shifts are 0, 1 and 2 apart. IoU >= 0.8 allows the offsets (0, 0),
    (0, 1), (1, 0), (1, 1), (0, 2), (2, 0): 9*9 + 2*9*16 + 16*16 + 2*9*14 = 877 of 6561."""
    every = list(itertools.product(itertools.product(range(-4, 5), repeat=2), repeat=2))
    assert sorted(map(tuple, mc.legal_shift_pairs(0).reshape(-1, 4))) == sorted(a + b for a, b in every)
    legal = mc.legal_shift_pairs(0.8)
    assert len(legal) == 877 == sum(iou_reference(pair) >= 0.8 for pair in every)
    assert len(mc.legal_shift_pairs(1)) == 81 and mc.box_iou(legal).min() == pytest.approx(360 / 440)
    assert len(mc.legal_shift_pairs(360 / 440)) == 877                                      # the bound itself is inside


@pytest.mark.parametrize("dy, dx", [(0, 0), (4, -4), (-4, 4), (-1, 3)])
def test_shift_moves_down_and_right(dy, dx):
    image = np.zeros((1, 28, 28), np.uint8)
    image[0, 10, 5] = 9
    image[0, 27, 27] = 7
    image[0, 0, 0] = 5
    canvas = mc.shift_digits(image, np.array([[dy, dx]]))
    assert canvas.shape == (1, 36, 36) and canvas.sum() == 21
    assert (canvas[0, 14 + dy, 9 + dx], canvas[0, 31 + dy, 31 + dx], canvas[0, 4 + dy, 4 + dx]) == (9, 7, 5)


def test_merges():
    sources = np.array([[[[0, 200, 255]], [[10, 100, 255]]]], np.uint8)
    np.testing.assert_array_equal(mc.merge_sources(sources, "max"), [[[10, 200, 255]]])
    np.testing.assert_array_equal(mc.merge_sources(sources, "add"), [[[10, 255, 255]]])
    assert mc.merge_sources(sources, "max").dtype == mc.merge_sources(sources, "add").dtype == np.uint8


@pytest.mark.parametrize("merge", ["max", "add"])
def test_overlay_pair(digits, merge):
    a, b = digits["train"][0][:2]
    composite, sources = mc.overlay_pair(a, b, (1, -2), (0, 4), merge)
    np.testing.assert_array_equal(sources[0, 5:33, 2:30], a)
    np.testing.assert_array_equal(sources[1, 4:32, 8:36], b)
    merged = sources.max(0) if merge == "max" else sources.sum(0, dtype=int).clip(max=255)
    np.testing.assert_array_equal(composite, merged)
    assert composite.dtype == np.uint8 and composite.shape == (36, 36)


# -------------------------------------------------------------- pairs

@pytest.mark.parametrize("min_iou, merge", [(0.8, "max"), (0, "add"), (1, "max")])
def test_every_pair_is_what_it_says(digits, min_iou, merge):
    images, labels = digits["train"]
    pairs = mc.generate_multimnist(images, labels, 500, np.random.default_rng(0), min_iou, merge)
    assert {name: (a.shape, a.dtype) for name, a in pairs.items()} == {
        "composites": ((500, 36, 36), np.uint8), "sources": ((500, 2, 36, 36), np.uint8),
        "labels": ((500, 2), np.int64), "shifts": ((500, 2, 2), np.int64), "index": ((500, 2), np.int64)}
    assert np.all(pairs["labels"][:, 0] != pairs["labels"][:, 1]) and np.abs(pairs["shifts"]).max() <= 4
    for k in range(500):
        assert iou_reference(pairs["shifts"][k]) >= min_iou
        composite, sources = mc.overlay_pair(*images[pairs["index"][k]], *pairs["shifts"][k], merge)
        np.testing.assert_array_equal(pairs["composites"][k], composite)
        np.testing.assert_array_equal(pairs["sources"][k], sources)
        np.testing.assert_array_equal(pairs["labels"][k], labels[pairs["index"][k]])


def test_placements_and_partners_are_uniform():
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


def test_one_class_is_refused(digits):
    with pytest.raises(mc.InputError, match="two classes"):
        mc.generate_multimnist(digits["train"][0][:3], np.array([4, 4, 4]), 2, np.random.default_rng(0))


def test_sampling_is_fast(digits):
    def pairs_per_second():
        began = time.perf_counter()
        mc.generate_multimnist(*digits["train"], 2048, np.random.default_rng(0))
        return 2048 / (time.perf_counter() - began)
    assert max(pairs_per_second() for _ in range(10)) > 20000


def test_pairs_do_not_depend_on_one_another_or_on_how_many_are_drawn(digits, monkeypatch):
    monkeypatch.setattr(mc, "CHUNK", 40)
    few, many = (mc.draw_pairs(digits, "val", n, TINY, "evaluation", 0) for n in (80, 110))
    test, other_seed = (mc.draw_pairs(digits, "val", 80, config, "evaluation", key) for config, key in
                        ((TINY, 1), (dataclasses.replace(TINY, seed=2), 0)))
    assert len(many["labels"]) == 110 and np.array_equal(few["index"], many["index"][:80])
    assert not np.array_equal(few["index"][:40], few["index"][40:])
    assert not np.array_equal(few["index"], test["index"]) and not np.array_equal(few["index"], other_seed["index"])


def test_a_stream_holds_a_chunk_at_a_time_and_gives_the_same_pairs(digits, monkeypatch):
    monkeypatch.setattr(mc, "CHUNK", 40)
    stream = mc.stream_pairs(digits, "val", 10 ** 12, TINY, "evaluation", 0)            # nothing is drawn ahead
    first, second = next(stream), next(stream)
    whole = mc.draw_pairs(digits, "val", 110, TINY, "evaluation", 0)
    parts = list(mc.in_chunks(whole))
    assert [len(part["labels"]) for part in parts] == [40, 40, 30]
    for name, array in whole.items():
        assert np.array_equal(np.concatenate([part[name] for part in parts]), array)
        assert np.array_equal(np.concatenate([first[name], second[name]]), array[:80])


def test_accuracies_do_not_depend_on_the_chunks(digits, monkeypatch):
    pairs, params = mc.draw_pairs(digits, "val", 70, TINY, "evaluation", 0), mc.init_params(TINY)
    with mc.Runner(1) as runner:
        whole = mc.evaluate(params, [pairs], TINY, runner)
        monkeypatch.setattr(mc, "CHUNK", 32)
        assert mc.evaluate(params, mc.in_chunks(pairs), TINY, runner) == pytest.approx(whole, rel=1e-6)


def test_epochs_are_fresh_unless_the_pool_is_fixed(digits, monkeypatch):
    monkeypatch.setattr(mc, "CHUNK", 64)                                                # one batch of 40, less than two
    def drawn(epoch, **changes):
        parts = list(mc.epoch_samples(digits, epoch, dataclasses.replace(TINY, n_train=100, **changes)))
        assert [len(part["labels"]) for part in parts] == [40, 40, 20]
        return np.concatenate([part["index"] for part in parts])
    first = drawn(0)
    assert np.array_equal(first, drawn(0))
    assert not np.array_equal(first, drawn(1)) and not np.array_equal(first, drawn(0, seed=2))
    assert np.array_equal(drawn(0, fixed_pool=True), drawn(1, fixed_pool=True))
    assert not np.array_equal(first[:40], first[40:80])


def test_to_batch_scales_to_one(digits):
    pairs = mc.draw_pairs(digits, "train", 5, TINY, "data")
    batch = mc.to_batch(pairs, np.array([3, 1]))
    np.testing.assert_allclose(batch["images"], pairs["composites"][[3, 1]] / 255, rtol=1e-6)
    np.testing.assert_allclose(batch["sources"], pairs["sources"][[3, 1]] / 255, rtol=1e-6)
    assert np.array_equal(batch["labels"], pairs["labels"][[3, 1]]) and batch["images"].dtype == np.float32


# ---------------------------------------------------------------- warped digits

IDENTITY = np.eye(2)[None]


def bent(down, across, n=1):
    """A bend that moves every pixel by the same px"""
    return np.broadcast_to(np.array([down, across], float)[:, None, None], (n, 2, mc.BEND_GRID, mc.BEND_GRID))


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
    np.testing.assert_array_equal(mc.resampled(images, IDENTITY, bent(0, 0))[0], image)
    moved, = mc.resampled(images, IDENTITY, bent(1, -2))                 # from one down, two to the left
    np.testing.assert_array_equal(moved[:-1, 2:], image[1:, :-2])
    assert not moved[-1].any() and not moved[:, :2].any()
    turned, = mc.resampled(images, np.array([[[0, 1], [-1, 0]]]), bent(0, 0))
    np.testing.assert_array_equal(turned, np.rot90(image))
    half, = mc.resampled(images, IDENTITY, bent(0.5, 0))
    np.testing.assert_allclose(half[:-1], (image[1:].astype(float) + image[:-1]) / 2, atol=0.51)


def test_resampling_against_loops(rng):
    images = rng.integers(0, 256, (3, 28, 28), dtype=np.uint8)
    linear = np.eye(2) + rng.normal(0, 0.2, (3, 2, 2))
    bend = rng.normal(0, 2, (3, 2, mc.BEND_GRID, mc.BEND_GRID))
    for k, found in enumerate(mc.resampled(images, linear, bend)):
        np.testing.assert_allclose(found, resampled_by_loops(images[k].astype(float), linear[k], bend[k]), atol=0.6)


def test_warps_are_as_large_as_they_say(monkeypatch):
    """Turned by up to 10 degrees, sheared by up to 0.1, sides scaled by up to 10%, times strength; of 2,000 digits"""
    asked = []
    monkeypatch.setattr(mc, "resampled", lambda images, *how: asked.append(how) or images)
    images = np.zeros((2000, 28, 28), np.uint8)
    for strength in (1, 2):
        asked.clear()
        assert len(mc.warp_digits(images, strength, np.random.default_rng(0))) == 2000
        linear, bend = (np.concatenate(parts) for parts in zip(*asked))
        down, across = np.linalg.norm(linear[:, :, 0], axis=1), np.linalg.det(linear)
        across = across / down                                           # a shear keeps areas
        turn = np.rad2deg(np.arctan2(-linear[:, 1, 0], linear[:, 0, 0]))
        second = linear[:, :, 1] / across[:, None]                       # turned back: (shear, 1)
        back = np.deg2rad(turn)
        shear = np.cos(back) * second[:, 0] - np.sin(back) * second[:, 1]
        for values, most in (down - 1, 0.1), (across - 1, 0.1), (turn, 10), (shear, 0.1):
            assert abs(values).max() == pytest.approx(strength * most, rel=0.02) and abs(values.mean()) < 0.1 * most
        assert bend.std() == pytest.approx(0.5 * strength, rel=0.02)


def test_only_training_digits_are_warped(digits):
    """Each drawn digit anew; pairs, placements and what is looked at stay what they were"""
    plain, warped = (next(mc.epoch_samples(digits, 0, dataclasses.replace(TINY, warp=warp))) for warp in (0.0, 1.0))
    assert np.array_equal(plain["labels"], warped["labels"]) and np.array_equal(plain["shifts"], warped["shifts"])
    images = digits["train"][0]
    for k in range(5):
        row = plain["index"][k]
        assert np.array_equal(plain["composites"][k], mc.overlay_pair(*images[row], *plain["shifts"][k])[0])
        assert not np.array_equal(plain["composites"][k], warped["composites"][k])
        ink = [pairs["sources"][k].sum() for pairs in (plain, warped)]
        assert 0.6 < ink[1] / ink[0] < 1.7
    assert np.array_equal(warped["composites"], warped["sources"].max(1))
    val = [mc.draw_pairs(digits, "val", 20, dataclasses.replace(TINY, warp=warp), "evaluation", 0)["composites"]
           for warp in (0.0, 1.0)]
    assert np.array_equal(*val)


# -------------------------------------------------------------- the nearest neighbour beside the networks

def test_pairs_named_after_their_nearest_by_hand():
    """Four known pairs, each a point of light; of five test pairs two are named whole, one in the other order, of two
    one digit is right, one is wrong"""
    known = np.zeros((4, 2, 2), np.uint8)
    known.reshape(4, 4)[np.arange(4), np.arange(4)] = 200
    labels = np.array([[3, 1], [4, 5], [0, 9], [7, 2]])
    pairs = {"composites": known[[0, 1, 2, 3, 3]], "labels": np.array([[1, 3], [4, 5], [0, 8], [5, 7], [0, 1]])}
    both, (low, high), one = bench_multimnist_nearest.accuracies(known, labels, [pairs], np.asarray)
    assert (both, one) == (2 / 5, 4 / 5) and low < both < high


def test_the_pairs_nearest_neighbour_from_the_command_line(digits, monkeypatch, tmp_path, capsys):
    path = tmp_path / "r.json"
    monkeypatch.setattr(mc, "load_digits", lambda config: digits)                       # the others take seconds
    monkeypatch.setattr(sys, "argv", f"x --n-known 50 --n-test 20 --digits synthetic --out-json {path}".split())
    bench_multimnist_nearest.main()
    found, said = json.loads(path.read_text()), capsys.readouterr().out
    for key, name in (("placed", "as placed"), ("centred", "ink in the middle")):
        low, high = found[f"nearest_{key}_ci95"]
        assert low <= found[f"nearest_{key}"] <= high and found[f"nearest_{key}"] <= found[f"nearest_{key}_one"]
        assert f"{name}: set accuracy {found[f'nearest_{key}']:.4f}" in said
    assert len(found["weights_sha256"]) == 64 and found["bench"]["source"] == "synthetic"
