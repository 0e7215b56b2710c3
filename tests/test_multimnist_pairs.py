"""Pairs of digits that really overlap, drawn so that they depend on nothing but their seed."""
import dataclasses
import itertools
import math

import multimnist_capsnet as mc

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


def test_iou_and_legal_shift_pairs_by_hand():
    """On one axis 9, 16 and 14 of the 81 pairs of shifts differ by 0, 1 and 2. IoU >= 0.8 allows the offsets (0, 0),
    (0, 1), (1, 0), (1, 1), (0, 2), (2, 0): 9*9 + 2*9*16 + 16*16 + 2*9*14 = 877 of 6561."""
    for offset, iou in ((0, 0), 1), ((0, 1), 380 / 420), ((1, -1), 361 / 439), ((2, 0), 360 / 440), ((8, 7), 156 / 644):
        assert iou_reference([(-4, -3), np.add((-4, -3), offset)]) == pytest.approx(iou)
    every = list(itertools.product(itertools.product(range(-4, 5), repeat=2), repeat=2))
    ious = np.array([iou_reference(pair) for pair in every])
    for min_iou, n in ((0, 6561), (0.8, 877), (360 / 440, 877), (1, 81)):               # the bound itself is inside
        legal = [sum(pair, ()) for pair, iou in zip(every, ious) if iou >= min_iou]
        assert sorted(map(tuple, mc.allowed_shift_pairs(min_iou).reshape(-1, 4))) == legal and len(legal) == n


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
    """All 877 pairs of shifts are equally likely, and so are all images of other classes as the second digit, whatever
    the classes' sizes."""
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


def test_images_for_predictions_are_placed_at_the_center():
    """A digit's first pixel, 4 px from the edges of the canvas; a whole composite as it is"""
    for shape, corner in ((28, 28), 4), ((36, 36), 0):
        assert shape in mc.image_shapes(TINY)
        image = np.zeros((1, *shape), np.uint8)
        image[0, 0, 0] = 255
        prepared = mc.prepare_images(image, TINY)
        assert prepared.shape == (1, 36, 36) and prepared.dtype == np.float32
        assert np.argwhere(prepared).tolist() == [[0, corner, corner]] and prepared.max() == 1


def drawn(stream):
    """Return all pairs of a stream, {name: array}"""
    chunks = list(stream)
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def test_pairs_depend_on_seed_and_key_and_not_on_how_many_are_drawn(digits, monkeypatch):
    """A stream holds a chunk at a time, each from a generator of its own"""
    def val(n, config=TINY, key=0):
        return mc.stream_pairs(digits, "val", n, config, mc.EVALUATION, key, size=40)
    stream, many = val(10 ** 12), drawn(val(110))                                       # nothing is drawn ahead
    first, second = next(stream), next(stream)
    for name, array in many.items():
        assert len(array) == 110 and np.array_equal(np.concatenate([first[name], second[name]]), array[:80])
    others = (next(stream)["index"] for stream in (val(40, key=1), val(40, dataclasses.replace(TINY, seed=2))))
    assert not any(np.array_equal(first["index"], other) for other in (second["index"], *others))


def test_pairs_for_evaluation(digits, monkeypatch):
    """Validation and test pairs are of their own digits and generators; they are not deformed"""
    seen = []
    monkeypatch.setattr(mc, "evaluate", lambda weights, chunks, *_: seen.append(drawn(chunks)) or {})
    plain = dataclasses.replace(TINY, min_iou=0.0, merge="add", warp=2.0)
    for evaluate, split, n, key in ((mc.validate, "val", TINY.n_val, 0), (mc.evaluate_test, "test", TINY.n_test, 1)):
        for config in (TINY, plain):
            evaluate({}, digits, config, None)
            expected = drawn(mc.stream_pairs(digits, split, n, config, mc.EVALUATION, key))
            assert len(expected["labels"]) == n and np.array_equal(seen[-1]["index"], expected["index"])
        pairs, (images, _) = seen[-1], digits[split]
        assert min(map(iou_reference, pairs["shifts"])) < 0.5
        assert np.array_equal(pairs["composites"], pairs["sources"].sum(1, dtype=int).clip(max=255))
        assert np.array_equal(pairs["sources"].sum((2, 3)), images.sum((1, 2))[pairs["index"]])


def test_epochs_are_fresh_and_cut_into_chunks_of_whole_batches(digits, monkeypatch):
    def indices(epoch, sizes, **changes):
        parts = list(mc.epoch_samples(digits, epoch, dataclasses.replace(TINY, n_train=100, **changes)))
        assert [len(part["labels"]) for part in parts] == sizes
        return np.concatenate([part["index"] for part in parts])
    monkeypatch.setattr(mc, "CHUNK", 64)                                                # one batch of 40, less than two
    first = indices(0, [40, 40, 20])
    assert np.array_equal(first, indices(0, [40, 40, 20])) and not np.array_equal(first[:40], first[40:80])
    assert not np.array_equal(first, indices(1, [40, 40, 20]))
    assert not np.array_equal(first, indices(0, [40, 40, 20], seed=2))
    indices(0, [60, 40], batch_size=30)
    indices(0, [70, 30], batch_size=70)


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


def test_resampling_by_hand_and_against_loops(rng):
    images = rng.integers(0, 256, (2, 28, 28), dtype=np.uint8)

    def resampled(linear=((1, 0), (0, 1)), down=0, across=0):
        bend = np.broadcast_to(np.array([down, across], float)[:, None, None], (1, 2, mc.BEND_GRID, mc.BEND_GRID))
        return mc.resample(images[:1], np.array([linear]), bend)[0]
    np.testing.assert_array_equal(resampled(), images[0])
    np.testing.assert_array_equal(resampled(down=1, across=-2), np.pad(images[0, 1:, :-2], ((0, 1), (2, 0))))
    np.testing.assert_array_equal(resampled(linear=[[0, 1], [-1, 0]]), np.rot90(images[0]))
    linear = np.eye(2) + rng.normal(0, 0.2, (2, 2, 2))
    bend = rng.normal(0, 2, (2, 2, mc.BEND_GRID, mc.BEND_GRID))
    for k, found in enumerate(mc.resample(images, linear, bend)):
        np.testing.assert_allclose(found, resampled_by_loops(images[k].astype(float), linear[k], bend[k]), atol=0.6)


def test_warps_are_as_large_as_they_say(monkeypatch):
    """Rotated by up to 10 degrees, sheared by up to 0.1, sides scaled by up to 10%, times strength; of 2,000 digits"""
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
    """Labels and shifts do not change"""
    plain, warped = (next(mc.epoch_samples(digits, 0, dataclasses.replace(TINY, warp=warp))) for warp in (0.0, 1.0))
    assert np.array_equal(plain["labels"], warped["labels"]) and np.array_equal(plain["shifts"], warped["shifts"])
    changed = (plain["sources"] != warped["sources"]).any((2, 3))
    ink = warped["sources"].sum((2, 3)) / plain["sources"].sum((2, 3))
    assert changed.all() and 0.6 < ink.min() and ink.max() < 1.7
    assert np.array_equal(warped["composites"], warped["sources"].max(1))
