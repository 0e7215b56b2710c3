"""The embedded shapes, their viewpoints, and which of them are trained on."""
import math
import time

import numpy as np
import pytest
import smallnorb_novel_viewpoint as sn
from test_smallnorb_files import write_norb

QUIET = dict(quiet=True, threads=1)


def test_shapes_are_what_they_are_called():
    cross, ell, tee, frame, tripod = sn.shape_points()
    assert all(np.abs(points).max() <= 1 for points in sn.shape_points())
    assert len(cross) == 7 and sorted(np.count_nonzero(cross, axis=1)) == [0] + [1] * 6
    assert len(np.unique(frame, axis=0)) == 8 + 12 * 3                                         # corners, and three points an edge
    arms = tripod[np.any(tripod != 0, axis=1)]
    assert (np.count_nonzero(arms, axis=1) == 1).all() and len(np.unique(np.argmax(np.abs(arms), 1))) == 3
    assert (tee[:, 2] == 0).all() and np.isclose(tee[:, 1].max(), 0.8) and (np.unique(tee[tee[:, 1] < 0.79][:, 0]) == 0).all()
    assert np.isclose(np.ptp(ell[:, 2]), 0.6)                                                  # the short prong


def test_rotation_by_hand():
    R = sn.rotation(np.array([0.0, 90.0, 0.0, 37.0]), np.array([0.0, 0.0, 90.0, 20.0]))
    np.testing.assert_allclose(R[0], np.eye(3), atol=1e-12)
    np.testing.assert_allclose(R[1] @ [0, 0, 1], [1, 0, 0], atol=1e-12)                        # what was near goes right
    np.testing.assert_allclose(R[1] @ [0, 1, 0], [0, 1, 0], atol=1e-12)                        # about the vertical axis
    np.testing.assert_allclose(R[2] @ [0, 1, 0], [0, 0, 1], atol=1e-12)                        # the top nods to the viewer
    np.testing.assert_allclose(R[3] @ R[3].T, np.eye(3), atol=1e-12)
    assert np.isclose(np.linalg.det(R[3]), 1)


@pytest.mark.parametrize("label", range(5))
def test_render_by_loops(label, monkeypatch):
    monkeypatch.setattr(sn, "NOISE", 0)
    image = sn.render(np.array([label]), np.array([40.0]), np.array([30.0]), np.random.default_rng(0))[0, ..., 0]
    expected = np.zeros((32, 32))
    for point in sn.shape_points()[label]:
        x, y, z = sn.rotation(np.array([40.0]), np.array([30.0]))[0] @ point
        for row in range(32):
            for column in range(32):
                d2 = (column - 15.5 - sn.RADIUS * x) ** 2 + (row - 15.5 + sn.RADIUS * y) ** 2
                expected[row, column] += (0.75 + 0.25 * min(1, max(-1, z))) * math.exp(-d2 / (2 * sn.BLOB ** 2))
    np.testing.assert_allclose(image, np.minimum(expected, 1), atol=1e-5)


def test_default_data():
    start = time.perf_counter()
    data = sn.load_data(sn.Config())
    assert time.perf_counter() - start < 1
    assert [len(data[name]["labels"]) for name in ("train", "familiar", "held_out")] == [450, 180, 180]
    for name, azimuths in ("train", range(0, 151, 30)), ("familiar", range(0, 151, 30)), ("held_out", range(200, 331, 26)):
        part = data[name]
        assert np.bincount(part["labels"]).tolist() == [len(part["labels"]) // 5] * 5
        assert sorted(set(part["azimuths"])) == list(azimuths) and sorted(set(part["elevations"])) == [30, 50, 70]
        assert part["images"].dtype == np.float32 and part["images"].min() >= 0 and part["images"].max() <= 1
    assert not set(data["train"]["azimuths"]) & set(data["held_out"]["azimuths"])
    assert not any((a == b).all() for a in data["train"]["images"] for b in data["familiar"]["images"][:20])     # new noise


def test_elevation_split():
    data = sn.load_data(sn.Config(split="elevation"))
    assert set(data["train"]["elevations"]) == {30, 35, 40} and set(data["held_out"]["elevations"]) == {45, 57.5, 70}
    assert set(data["train"]["azimuths"]) == set(data["held_out"]["azimuths"])


def test_same_seed_same_data():
    a, b, c = (sn.load_data(sn.Config(seed=seed)) for seed in (1, 1, 2))
    assert np.array_equal(a["held_out"]["images"], b["held_out"]["images"])
    assert not np.array_equal(a["held_out"]["images"], c["held_out"]["images"])


def test_split_by_azimuth():
    train, test = sn.split_by_azimuth(np.arange(0, 360, 10), (290, 420), (90, 240))
    assert np.flatnonzero(train).tolist() == [0, 1, 2, 3, 4, 5, 6, 29, 30, 31, 32, 33, 34, 35]
    assert np.flatnonzero(test).tolist() == list(range(9, 25)) and not (train & test).any()
    train, test = sn.split_by_azimuth(np.arange(0, 360, 20), (300, 400), (60, 280))            # the paper's
    assert (train.sum(), test.sum()) == (6, 12)


@pytest.mark.parametrize("train, test", [((0, 150), (150, 200)), ((0, 150), (100, 120)), ((100, 120), (0, 150)), ((300, 400), (30, 60)),
                                         ((0, 60), (340, 361)), ((350, 355), (-15, 5))])
def test_overlapping_azimuths_are_refused(train, test):
    for ranges in (train, test), (test, train):
        with pytest.raises(sn.InputError, match="overlap"):
            sn.split_by_azimuth([], *ranges)


def test_split_by_elevation():
    train, test = sn.split_by_elevation(30 + 5 * np.arange(9), (30, 40), (45, 70))
    assert np.flatnonzero(train).tolist() == [0, 1, 2] and np.flatnonzero(test).tolist() == [3, 4, 5, 6, 7, 8]
    for ranges in ((30, 45), (45, 70)), ((45, 70), (30, 45)), ((30, 70), (40, 50)):
        with pytest.raises(sn.InputError, match="overlap"):
            sn.split_by_elevation([], *ranges)


@pytest.mark.parametrize("text", ["", "5", "a:b", "1:2:3", "10:5", "nan:3", "0:inf"])
def test_bad_ranges(text):
    with pytest.raises(sn.InputError, match="--train-azimuths"):
        sn.check_config(sn.Config(train_azimuths=text))


def test_shift_by_loops(rng):
    images, shifts = rng.random((4, 5, 6, 2)), np.array([[0, 0], [2, -1], [-2, 2], [1, 0]])
    moved = sn.shift_images(images, shifts)
    for n, (down, right) in enumerate(shifts):
        for y, x in np.ndindex(5, 6):
            inside = 0 <= y - down < 5 and 0 <= x - right < 6
            assert np.array_equal(moved[n, y, x], images[n, y - down, x - right] if inside else [0, 0])


def test_epoch_samples():
    config = sn.resolved(sn.Config(dropout=0.25))
    data = sn.load_data(config)
    samples, again, other = (next(sn.epoch_samples(data, epoch, config)) for epoch in (3, 3, 4))
    assert all(np.array_equal(samples[name], again[name]) for name in samples)
    assert not np.array_equal(samples["labels"], other["labels"])
    assert np.array_equal(np.sort(samples["images"].sum((1, 2, 3))), np.sort(data["train"]["images"].sum((1, 2, 3))))
    keep = samples["keep"]
    assert keep.shape == (450, 8 * 25) and set(np.unique(keep)) == {0, np.float32(1 / 0.75)} and abs(keep.mean() - 1) < 0.01
    shifted = next(sn.epoch_samples(data, 3, sn.resolved(sn.Config(max_shift=2))))
    assert np.array_equal(shifted["labels"], samples["labels"]) and not np.array_equal(shifted["images"], samples["images"])


def test_smallnorb(tmp_path):
    """The paper's ranges by default: training azimuths 300 to 40 of the training toys, held-out ones 60 to 280 of the test toys"""
    arrays = write_norb(tmp_path, 60, gz=True)
    data = sn.load_data(sn.Config(data="smallnorb", norb_dir=str(tmp_path)))
    azimuths = {split: 10 * arrays[split, "info"][:, 2] for split in ("train", "test")}
    near = {split: ((a - 300) % 360 <= 100) for split, a in azimuths.items()}
    assert len(data["train"]["labels"]) == near["train"].sum() and len(data["familiar"]["labels"]) == near["test"].sum()
    assert len(data["held_out"]["labels"]) == ((azimuths["test"] >= 60) & (azimuths["test"] <= 280)).sum()
    assert np.array_equal(data["train"]["labels"], arrays["train", "cat"][near["train"]])
    samples = next(sn.epoch_samples(data, 0, sn.resolved(sn.Config(data="smallnorb"))))
    assert samples["images"].shape[1:] == (32, 32, 2) and samples["images"].dtype == np.float32
