"""Digits moved and transformed: against slow literal references, by hand; all ink on the canvas; the real files."""
import dataclasses
import itertools
import sys
import tracemalloc

import affnist_capsnet as ac

import numpy as np
import pytest

CONFIG = ac.Config(n_train=64, n_val=20, n_test=30, batch_size=16, threads=1, digits="synthetic", quiet=True)


def dots(n, row, column):
    """n images of one dot, and their labels"""
    images = np.zeros((n, 28, 28), np.uint8)
    images[:, row, column] = 200
    return images, np.zeros(n, np.uint8)


def corners_of(images):
    """Row and column of each image's one dot, (n, 2)"""
    _, *at = np.nonzero(images)
    assert len(at[0]) == len(images) and images.max() == 200
    return np.stack(at, 1)


# ---------------------------------------------------------------- moving

def test_a_digit_is_placed_by_its_corner_and_cut_off_at_the_edge():
    image = np.arange(784).reshape(28, 28).astype(np.uint8)
    corners = np.array([[3, 7], [-2, 12], [39, -27], [-28, 0], [40, 40], [90, -90]])
    placed = ac.place_digits(np.stack([image] * len(corners)), corners, 40)
    for canvas, (row, column) in zip(placed, corners):
        expected = np.zeros((40, 40), np.uint8)
        for y, x in np.ndindex(28, 28):
            if 0 <= row + y < 40 and 0 <= column + x < 40:
                expected[row + y, column + x] = image[y, x]
        np.testing.assert_array_equal(canvas, expected)
    assert not placed[-3:].any()


@pytest.mark.parametrize("side, most", [(40, 6), (28, 2), (28, 0)])
def test_moved_digits_reach_every_shift_and_no_further(side, most, rng):
    images, _ = dots(3000, 13, 14)
    shifts = corners_of(ac.translate_digits(images, side, most, rng)) - [13, 14] - (side - 28) // 2
    assert len(np.unique(shifts, axis=0)) == (2 * most + 1) ** 2 and abs(shifts).max(initial=0) == most


def test_digits_anywhere_keep_every_pixel_and_reach_every_place(rng):
    """Ink of 3x2 px, at (10, 12) of its image, on 40x40: 38 x 39 places for its corner, and no other"""
    image = np.zeros((28, 28), np.uint8)
    image[10:13, 12:14] = [[1, 2], [3, 4], [5, 6]]
    corners = set()
    for part in np.split(ac.translate_digits(np.broadcast_to(image, (30000, 28, 28)), 40, None, rng), 10):
        assert (part.reshape(len(part), -1).sum(1) == 21).all()
        at = np.argwhere(part == 1)
        assert (part[at[:, 0], at[:, 1] + 2, at[:, 2] + 1] == 6).all()
        corners |= set(map(tuple, at[:, 1:]))
    assert len(corners) == 38 * 39 and max(corners) == (37, 38)


@pytest.mark.parametrize("task, side, corner", [("affnist", 40, 6), ("mnist", 28, 0)])
def test_images_for_predictions_are_placed_at_the_center(task, side, corner):
    """A digit's first pixel, or a whole canvas as it is"""
    config = ac.Config(task=task)
    assert set(ac.image_shapes(config)) == {(side, side), (28, 28)}
    for shape, at in ((28, 28), corner), ((side, side), 0):
        image = np.zeros((1, *shape), np.uint8)
        image[0, 0, 0] = 255
        prepared = ac.prepare_images(image, config)
        assert prepared.shape == (1, side, side) and prepared.dtype == np.float32
        assert np.argwhere(prepared).tolist() == [[0, at, at]] and prepared.max() == 1


# ---------------------------------------------------------------- affine transformations

def test_matrices_by_hand():
    """Columns (y, x), y downwards; first scaled, then sheared, then rotated"""
    near = np.testing.assert_allclose
    near(ac.affine_matrix(0, 0, 1, 1), [np.eye(2)], atol=1e-15)
    near(ac.affine_matrix(0, 0, 1.2, 0.8)[0], [[1.2, 0], [0, 0.8]])
    near(ac.affine_matrix(90, 0, 1, 1)[0] @ [0, 1], [-1, 0], atol=1e-15)                # right becomes up
    near(ac.affine_matrix(0, 0.2, 1, 1)[0] @ [1, 0], [1, 0.2])                          # what is low moves to the right
    near(ac.affine_matrix(0, 0.2, 2, 1)[0] @ [1, 0], [2, 0.4])                          # scaled before it is sheared
    near(ac.affine_matrix(90, 0.5, 1, 1)[0] @ [1, 0], [-0.5, 1], atol=1e-15)            # sheared before it is rotated
    assert ac.affine_matrix([0, 5], 0, 1, [1, 2]).shape == (2, 2, 2)


def test_factors_fill_affnists_ranges(digits, monkeypatch):
    drawn, matrix = [], ac.affine_matrix
    monkeypatch.setattr(ac, "affine_matrix", lambda **factors: drawn.append(factors) or matrix(**factors))
    many = digits | {"test": tuple(np.tile(a, (40,) + (1,) * (a.ndim - 1)) for a in digits["test"])}
    list(ac.stream_digits(many, dataclasses.replace(CONFIG, n_test=0), "affine"))
    for name, low, high in (("rotation", -20, 20), ("shear", -0.2, 0.2), ("scale_y", 0.8, 1.2), ("scale_x", 0.8, 1.2)):
        found, width = np.concatenate([factors[name] for factors in drawn]), high - low
        assert low <= found.min() < low + width / 50 and high - width / 50 < found.max() <= high and len(found) == 2400
        assert abs(found.mean() - (low + high) / 2) < width / 40
    assert list(drawn[0]) == list(ac.IDENTITY)


def test_the_sampler_against_literal_loops(rng):
    images = rng.integers(0, 256, (3, 28, 28)).astype(np.uint8)
    images[:, :6], images[:, :, 20:] = 0, 0
    matrices = ac.affine_matrix([20, -11, 3], [-0.2, 0.13, 0], [1.1, 0.8, 1], [0.9, 1.2, 1])
    placed, centers = ac.transform_digits(images, matrices, rng, 40)
    for image, matrix, center, found in zip(images, matrices, centers, placed):
        back = np.linalg.inv(matrix)
        for y, x in itertools.product(range(0, 40, 3), range(40)):
            v, u = back @ ([y, x] - center) + 13.5
            value = 0.0
            for row, column in itertools.product(*((int(np.floor(a)), int(np.floor(a)) + 1) for a in (v, u))):
                if 0 <= row < 28 and 0 <= column < 28:
                    value += (1 - abs(v - row)) * (1 - abs(u - column)) * image[row, column]
            assert abs(value - float(found[y, x])) <= 0.5 + 1e-6


def test_all_ink_lies_on_the_canvas_and_may_lie_anywhere(rng):
    """A filled 20x20 box, the largest ink that MNIST has, under the largest transformations"""
    image = np.zeros((28, 28), np.uint8)
    image[4:24, 4:24] = 255
    corners = np.array([*itertools.product((-20, 20), (-0.2, 0.2), (0.8, 1.2), (0.8, 1.2))])
    matrices = np.repeat(ac.affine_matrix(*corners.T), 40, 0)
    placed, centers = ac.transform_digits(np.repeat(image[None], len(matrices), 0), matrices, rng, 40)
    expected = image.sum() * np.abs(np.linalg.det(matrices))
    np.testing.assert_allclose(placed.sum((1, 2)), expected, rtol=0.005)    # nothing is cut off
    small = centers[np.repeat((corners[:, 2:] == 0.8).all(1), 40)]
    assert np.ptp(small, 0).min() > 8                                       # of about 13 px of room
    lying = np.zeros((28, 28), np.uint8)
    lying[11:17, 6:22] = 255
    ink = ac.transform_digits(lying[None].repeat(4000, 0), ac.affine_matrix(np.zeros(4000), 0, 1, 1), rng, 40)[0] > 0
    assert ink.any((0, 2)).all() and ink.any((0, 1)).all()                  # up to the edge on all sides


def test_what_just_fits_is_placed_and_what_does_not_is_centered_and_cut_off(rng):
    image = np.full((1, 28, 28), 9, np.uint8)
    for side in (28, 29):                                                   # no room, and a pixel's
        placed, _ = ac.transform_digits(image, ac.affine_matrix(0, 0, 1, 1), rng, side)
        assert placed.sum() == pytest.approx(9 * 784, rel=0.1)
    large, centers = ac.transform_digits(image, ac.affine_matrix(0, 0, 1.2, 1), rng, 28)
    assert centers[0] == pytest.approx([13.5, 13.5]) and (large[0] == 9).all()


def test_centered_digits_have_their_center_at_that_of_the_canvas(digits):
    images = np.pad(digits["test"][0][:30].astype(float), ((0, 0), (6, 6), (6, 6)))
    for degrees, expected in ((0.0, images), (90.0, np.rot90(images, axes=(1, 2)))):
        (part,) = ac.stream_digits(digits, CONFIG, "centered", ac.IDENTITY | {"rotation": degrees})
        np.testing.assert_allclose(part["images"], expected, atol=1)


def test_what_does_not_fit_in_the_middle_goes_as_near_to_it_as_it_can():
    image = np.zeros((1, 28, 28), np.uint8)
    image[0, 1:27, 1:6] = 255                                  # left of the middle: 1.4 times as wide it would be cut
    placed, centers = ac.transform_digits(image, ac.affine_matrix(0, 0, 1, 1.6), None, 40)
    assert placed.sum(dtype=float) == pytest.approx(1.6 * image.sum(dtype=float), rel=0.02)
    assert centers[0, 0] == 19.5 and 19.5 < centers[0, 1] < 23


# ---------------------------------------------------------------- streams

def same(a, b):
    return all(np.array_equal(x[key], y[key]) for x, y in zip(a, b, strict=True) for key in x)


def streamed(digits, config, kind, **more):
    return list(ac.stream_digits(digits, config, kind, **more))


def test_streams_are_of_their_splits_and_the_same_again(digits, monkeypatch):
    monkeypatch.setattr(ac, "CHUNK", 8)
    for kind, n, split in (("val", 20, "val"), *((kind, 30, "test") for kind in ac.KINDS[1:])):
        parts = streamed(digits, CONFIG, kind)
        assert [len(part["labels"]) for part in parts] == [8] * (n // 8) + [n % 8] * (n % 8 > 0)
        assert all(part["images"].shape == (len(part["labels"]), 40, 40) for part in parts)
        labels = np.concatenate([part["labels"] for part in parts])
        np.testing.assert_array_equal(labels, digits[split][1][:n])
        upright = streamed(digits, CONFIG, kind, factors=ac.IDENTITY)
        ink = np.concatenate([part["images"] for part in upright]).sum((1, 2), dtype=float)
        np.testing.assert_allclose(ink, digits[split][0][:n].sum((1, 2)), rtol=0.01)    # of these images, no others
        assert same(parts, streamed(digits, CONFIG, kind))
        assert not same(parts, streamed(digits, dataclasses.replace(CONFIG, seed=1), kind))
    assert not same(streamed(digits, CONFIG, "affine"), streamed(digits, CONFIG, "test"))
    parts = streamed(digits, dataclasses.replace(CONFIG, eval_split="val"), "any_position")
    ink = np.concatenate([part["images"].sum((1, 2)) for part in parts])
    np.testing.assert_array_equal(ink, digits["val"][0][:30].sum((1, 2)))


def test_every_chunk_draws_its_own(digits, monkeypatch):
    """Two chunks of one and the same digit"""
    monkeypatch.setattr(ac, "CHUNK", 8)
    one = {split: (np.repeat(digits[split][0][:1], 16, 0), np.zeros(16, np.uint8)) for split in ("val", "test")}
    for kind in ac.KINDS:
        first, second = streamed(one, dataclasses.replace(CONFIG, n_val=16, n_test=16), kind)
        assert not np.array_equal(first["images"], second["images"])


def test_digits_trained_anywhere_reach_every_edge_and_keep_their_ink(digits):
    """A dot, which fits everywhere; validation digits, too"""
    data = digits | {"train": dots(60, 20, 5), "val": dots(60, 20, 5)}
    (samples,) = ac.epoch_samples(data, 0, ac.Config(train_shift="full", n_train=2000))
    assert all(set(rows) == set(range(40)) for rows in corners_of(samples["images"]).T)
    (part,) = streamed(data, ac.Config(train_shift="full"), "val")
    at = corners_of(part["images"])
    assert at.min(0).max() < 7 and at.max(0).min() > 32                                 # beyond 6 px from 20, 5


def test_mnists_test_digits_stay_as_they_are_and_its_training_digits_move_by_two(digits):
    config = ac.Config(task="mnist", n_train=500, n_val=20, n_test=30, batch_size=16)
    (part,) = streamed(digits, config, "test")
    np.testing.assert_array_equal(part["images"], digits["test"][0][:30])
    (samples,) = ac.epoch_samples(digits | {"train": dots(500, 13, 14)}, 0, config)
    assert samples["images"].shape == (500, 28, 28) and config.padding == 0
    shifts = corners_of(samples["images"]) - [13, 14]
    assert all(sorted(set(along)) == list(range(-2, 3)) for along in shifts.T)


def test_an_epoch_has_every_digit_once_before_one_comes_again(digits, monkeypatch):
    config = dataclasses.replace(CONFIG, n_train=150, train_shift="0")                  # of 60
    rows, images = [], {image.tobytes(): k for k, image in enumerate(digits["train"][0])}
    monkeypatch.setattr(ac, "CHUNK", 48)                                                # three batches of 16
    for samples in ac.epoch_samples(digits, 0, config):
        assert len(samples["labels"]) in (48, 6)
        rows += [images[np.ascontiguousarray(image[6:34, 6:34]).tobytes()] for image in samples["images"]]
    counts = np.bincount(rows[:120], minlength=60)
    assert len(rows) == 150 and (counts == 2).all() and len(set(rows[:60])) == 60
    first, second = (list(ac.epoch_samples(digits, epoch, config)) for epoch in (0, 1))
    assert same(first, list(ac.epoch_samples(digits, 0, config))) and not same(first, second)


def test_a_long_epoch_is_never_held_whole(digits):
    """10 million numbers would be 80 MB"""
    tracemalloc.start()
    list(itertools.islice(ac.epoch_samples(digits, 0, dataclasses.replace(CONFIG, n_train=10_000_000)), 2))
    assert tracemalloc.get_traced_memory()[1] < 60e6
    tracemalloc.stop()


def test_few_digits_a_class_are_other_ones_for_each_seed(digits):
    chosen = []
    for seed in (0, 0, 1):
        config = dataclasses.replace(CONFIG, n_per_class=2, seed=seed)
        images, labels = (a[ac.training_rows(digits, config)] for a in digits["train"])
        assert np.bincount(labels).tolist() == [2] * 10 and len({image.tobytes() for image in images}) == 20
        chosen.append(images)
    assert np.array_equal(chosen[0], chosen[1]) and not np.array_equal(chosen[0], chosen[2])
    with pytest.raises(ac.InputError, match="--n-per-class 7: a class has fewer"):
        ac.training_rows(digits, dataclasses.replace(CONFIG, n_per_class=7))


# ---------------------------------------------------------------- affNIST's own files

def write_affnist(path, images, labels):
    scipy_io = pytest.importorskip("scipy.io")
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy_io.savemat(path, {"affNISTdata": {"image": images.reshape(len(images), -1).T, "label_int": labels[None]}})


def test_affnists_files_are_read(tmp_path, rng):
    found = [(rng.integers(0, 256, (n, 40, 40)).astype(np.uint8), rng.integers(0, 10, n).astype(np.uint8))
             for n in (5, 2)]
    for k, (images, labels) in enumerate(found, 9):
        write_affnist(tmp_path / "test_batches" / f"{k}.mat", images, labels)
    parts = list(ac.read_affnist(str(tmp_path)))
    assert len(parts) == 2                                                  # 9 comes before 10
    for part, (images, labels) in zip(parts, found):
        np.testing.assert_array_equal(part["images"], images)
        np.testing.assert_array_equal(part["labels"], labels)


@pytest.mark.parametrize("fault", ["empty", "torn", "other", "shape"])
def test_files_that_are_wrong_are_named(tmp_path, fault, rng):
    scipy_io = pytest.importorskip("scipy.io")
    images, labels = rng.integers(0, 256, (4, 40, 40)).astype(np.uint8), np.arange(4, dtype=np.uint8)
    path = tmp_path / "test_batches" / "1.mat"
    if fault != "empty":
        write_affnist(path, images[:, :39] if fault == "shape" else images, labels)
    if fault == "torn":
        path.write_bytes(path.read_bytes()[:200])
    elif fault == "other":
        scipy_io.savemat(path, {"other": images})
    with pytest.raises(ac.InputError, match=f"--affnist-dir {tmp_path}: .*Give a folder with test_batches"):
        list(ac.read_affnist(str(tmp_path)))


def test_without_scipy_one_line_says_what_is_missing(tmp_path, monkeypatch):
    for name in ("scipy", "scipy.io"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ac.InputError, match="scipy"):
        list(ac.read_affnist(str(tmp_path)))
