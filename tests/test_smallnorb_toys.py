"""Toys: rays against marching in small steps, normals, light by hand; the structure of smallNORB; cache and files."""
import json
import os
import subprocess
import sys
import time

import smallnorb_novel_viewpoint as sn

import bench_toys
import numpy as np
import pytest
from conftest import ROOT

KINDS = {"ellipsoid": sn.ELLIPSOID, "box": sn.BOX, "cylinder": sn.CYLINDER, "cone": sn.CONE}


def inside(kind, p):
    """Whether points p (3, ...) are in a unit part"""
    x, y, z = p
    return {sn.ELLIPSOID: x * x + y * y + z * z <= 1, sn.BOX: np.abs(p).max(0) <= 1,
            sn.CYLINDER: (x * x + y * y <= 1) & (abs(z) <= 1),
            sn.CONE: (x * x + y * y <= ((1 - z) / 2) ** 2) & (abs(z) <= 1)}[kind]


def a_part(kind, seed):
    rng = np.random.default_rng(seed)
    M = np.linalg.qr(rng.standard_normal((3, 3)))[0] @ np.diag(rng.uniform(0.2, 0.6, 3))
    return kind, M, rng.uniform(-0.2, 0.2, 3)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_rays_meet_a_part_where_marching_does(name, seed):
    """From far away towards the toy in steps of 1/500; the normal leads out of the part, and is what the surface is
    across: a step along it leaves the part, a step against it enters"""
    kind, M, centre = a_part(KINDS[name], seed)
    side, azimuth, elevation = 24, 50 + 70 * seed, 35
    hit, normals = sn.cast_rays([(kind, M, centre)], azimuth, elevation, side)
    R = sn.rotation_of(azimuth, elevation)
    at = ((np.arange(side) + 0.5) / side * 2 - 1) / sn.REACH
    steps = np.linspace(1.5, -1.5, 1501)
    x, y, z = np.meshgrid(at, -at, steps)                                               # (row, column, step)
    local = np.linalg.solve(R @ M, np.stack([x, y, z]).reshape(3, -1) - (R @ centre)[:, None])
    marched = inside(kind, local).reshape(x.shape)
    assert (hit != marched.any(2)).mean() < 0.01                        # rays that graze it may differ
    sure = hit & (marched.sum(2) > 10)
    assert sure.sum() > 20
    first = marched.argmax(2)[sure]
    points = np.stack([x[sure][:, 0], y[sure][:, 0], steps[first]])
    n = normals[:, sure]
    np.testing.assert_allclose(np.square(n).sum(0), 1, atol=1e-5)
    for sign, expected in ((1, False), (-1, True)):
        moved = np.linalg.solve(R @ M, points + sign * 0.015 * n - (R @ centre)[:, None])
        assert (inside(kind, moved) == expected).mean() > 0.93                                  # not on its edges
    assert (n[2] > -1e-3).all() and not normals[:, ~hit].any()          # towards the camera


def test_the_nearest_part_hides_the_others():
    ball, wall = sn.part(sn.ELLIPSOID, (0, 0, 0.5), (0.5, 0.5, 0.5)), sn.part(sn.BOX, (0, 0, 0), (2, 2, 0.1))
    for toy in ([ball, wall], [wall, ball]):
        hit, normals = sn.cast_rays(toy, 0, 0, 41)
        assert hit[20, 20] and normals[2, 20, 20] == pytest.approx(1) and normals[0, 20, 23] > 0.2      # the ball
        assert normals[:, 20, 36] == pytest.approx([0, 0, 1])                                           # the wall
    _, behind = sn.cast_rays([ball, wall], 180, 0, 41)                                  # seen from the back: wall alone
    assert behind[:, 20, 23] == pytest.approx([0, 0, 1], abs=1e-6)


def test_views_by_hand():
    """At azimuth 90 the toy's front, +x, has turned to the back; raised by 90 degrees the camera sees its top"""
    x, y, z = np.eye(3)
    assert sn.rotation_of(90, 0) @ x == pytest.approx(-z) and sn.rotation_of(90, 0) @ z == pytest.approx(x)
    assert sn.rotation_of(0, 90) @ y == pytest.approx(z)
    np.testing.assert_allclose(sn.rotation_of(33, 44), sn.rotation(np.array([33.0]), np.array([44.0]))[0], atol=1e-12)


def test_light_by_hand(monkeypatch):
    """A face towards a lamp of strength s: ambient + s; one at 60 degrees: ambient + s / 2; turned away: ambient"""
    monkeypatch.setattr(sn, "LIGHTINGS", ((0.8, 0.2, ((0, 30, 0.5),)), (0.7, 0.2, ((90, 0, 0.5), (-90, 0, 0.25)))))
    hit = np.array([[True, True, True, False]])
    normals = np.zeros((3, 1, 4), np.float32)
    normals[:, 0, 0] = [0, 0.5, np.sqrt(0.75)]                                          # towards the first lamp
    normals[:, 0, 1] = [0, 1, 0]                                                        # 60 degrees from it
    normals[:, 0, 2] = [1, 0, 0]
    images = sn.light_up(hit, normals, 0)
    assert images[0, 0].tolist() == [round(255 * v) for v in (0.7, 0.45, 0.2, 0.8)]
    assert images[1, 0].tolist() == [round(255 * v) for v in (0.2, 0.2, 0.7, 0.7)]
    lifted = sn.light_up(hit, normals, 30)                              # the camera is beside the lamp, at (0, 0, 1)
    assert lifted[0, 0, 0] == round(255 * (0.2 + 0.5 * np.sqrt(0.75))) and lifted[0, 0, 1] == round(255 * 0.2)


def test_a_mirrored_part_is_the_part_at_the_other_side():
    left, right = sn.pair(sn.CONE, (0.1, 0.2, 0.3), (0.3, 0.2, 0.6), sn.turn("x", -70))
    mirror = np.diag([1, 1, -1.0])
    points = np.random.default_rng(0).uniform(-1, 1, (3, 2000))
    in_left = inside(sn.CONE, np.linalg.solve(left[1], points - left[2][:, None]))
    in_right = inside(sn.CONE, np.linalg.solve(right[1], mirror @ points - right[2][:, None]))
    assert in_left.any() and np.array_equal(in_left, in_right)


def test_a_rod_goes_from_start_to_end():
    _, M, centre = sn.rod(sn.CYLINDER, (0.1, 0.2, 0.3), (0.4, -0.5, 0.6), 0.2, 0.1)
    np.testing.assert_allclose(centre - M[:, 2], [0.1, 0.2, 0.3])
    np.testing.assert_allclose(centre + M[:, 2], [0.4, -0.5, 0.6])
    np.testing.assert_allclose(np.linalg.norm(M[:, :2], axis=0), [0.1, 0.05])
    np.testing.assert_allclose(M.T @ M, np.diag(np.diag(M.T @ M)), atol=1e-12)


# ---------------------------------------------------------------- toys

def test_every_toy_is_its_own_and_fills_the_frame():
    """All views of all toys lie in the frame, and reach nearly all of it; no two toys, and no two of some views of one,
    look alike"""
    sights = {}
    for category in range(5):
        for instance in range(10):
            toy = sn.make_toy(category, instance, 0)
            assert 0.85 < np.linalg.norm(sn.corners(toy), axis=1).max() < 1 + np.sqrt(3) * sn.OFFSET
            for azimuth in (0, 100, 200, 280):
                hit, normals = sn.cast_rays(toy, azimuth, 40, 48)
                assert not (hit[0].any() or hit[-1].any() or hit[:, 0].any() or hit[:, -1].any())
                assert 0.03 < hit.mean() < 0.6
                sights[category, instance, azimuth] = np.where(hit, normals[2], 0).ravel()
    names, pictures = list(sights), np.stack(list(sights.values()))
    square = np.square(pictures).sum(1)
    distance = square[:, None] + square - 2 * pictures @ pictures.T + 1e9 * np.eye(len(names))
    assert distance.min() > 5                                                           # of some 400 px in an image


def test_the_toys_are_those_of_their_seed_alone():
    first, again, other = sn.make_toy(2, 3, 0), sn.make_toy(2, 3, 0), sn.make_toy(2, 3, 1)
    assert all(np.array_equal(a[1], b[1]) and np.array_equal(a[2], b[2]) for a, b in zip(first, again))
    assert len(first) != len(other) or not np.array_equal(first[0][1], other[0][1])


def test_small_products_and_inverses():
    A, B = np.random.default_rng(0).standard_normal((2, 3, 3))
    np.testing.assert_allclose(sn.times(A, B), A @ B)
    np.testing.assert_allclose(sn.inverse(A), np.linalg.inv(A))


# ---------------------------------------------------------------- the data set

@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Drawing in this process, a cache of its own -> list of (category, instance, toy_seed, views) that were drawn"""
    monkeypatch.setattr(sn, "TOYS_CACHE", tmp_path / "cache")
    tasks_seen = []

    def here(draw, tasks, say, threads):
        for task in tasks:
            tasks_seen.append(task)
            yield task, draw(*task)
    monkeypatch.setattr(sn, "in_parallel", here)
    return tasks_seen


@pytest.fixture
def few(monkeypatch, drawn):
    """Two toys of each class, two views each"""
    monkeypatch.setattr(sn, "TOY_SPLITS", {"train": (4,), "test": (0,)})
    monkeypatch.setattr(sn, "TOY_ELEVATIONS", range(30, 35, 5))
    monkeypatch.setattr(sn, "TOY_AZIMUTHS", range(0, 40, 20))
    return drawn


@pytest.fixture
def noise(monkeypatch, drawn):
    """No drawing: images that tell toy, seed and view, all others being 0"""
    def fake(category, instance, toy_seed, views):
        images = np.zeros((len(views), 6, sn.NORB_SIDE, sn.NORB_SIDE, 2), np.uint8)
        images[:, :, 0, 0, 0], images[:, :, 0, 0, 1] = 10 * category + instance, toy_seed
        images[:, :, 0, 1, 0], images[:, :, 0, 1, 1] = np.array(views)[:, None], np.arange(6)
        return images
    monkeypatch.setattr(sn, "draw_views", fake)
    return drawn


def table(*rows):
    """A table of rows (label, instance, elevation, azimuth, lighting)"""
    return dict(zip(("labels", "instances", "elevations", "azimuths", "lightings"), np.array(rows).T))


class Said(list):
    """Where say() puts its texts"""

    def __call__(self, text, end="\n"):
        self.append(text)


def test_tables_have_smallnorbs_structure():
    for split in ("train", "test"):
        tables = sn.toy_tables(split)
        rows = np.stack(list(tables.values()), 1)
        assert rows.shape == (24300, 5) and len(np.unique(rows, axis=0)) == 24300 and rows.dtype == np.int64
        assert sorted(set(tables["instances"])) == sorted(sn.TOY_SPLITS[split])
        assert sorted(set(tables["azimuths"])) == list(range(0, 360, 20))
        assert sorted(set(tables["elevations"])) == list(range(30, 75, 5)) and set(tables["lightings"]) == set(range(6))
    assert not set(sn.TOY_SPLITS["train"]) & set(sn.TOY_SPLITS["test"])


def test_images_are_of_the_view_that_their_row_says(few):
    data = sn.load_toys(0)["train"]
    assert data["images"].shape == (5 * 2 * 6, 48, 48, 2) and data["images"].dtype == np.uint8
    for row in (0, 7, 33, 59):
        category, instance, elevation, azimuth, lighting = (
            data[name][row] for name in ("labels", "instances", "elevations", "azimuths", "lightings"))
        toy = sn.make_toy(category, instance, 0)
        for camera, shift in enumerate((-2.5, 2.5)):
            whole = sn.light_up(*sn.cast_rays(toy, azimuth + shift, elevation, 96), elevation)[lighting]
            four = whole.astype(int).reshape(48, 2, 48, 2).sum((1, 3))
            assert np.array_equal(data["images"][row, ..., camera], (four + 2) // 4)


def test_the_images_of_some_rows_are_those_of_the_whole_set(few, monkeypatch, tmp_path):
    """add_toy_images gives any rows, in any order, more than once, the images that load_toys gives them"""
    whole = sn.load_toys(0)["test"]
    rows = np.random.default_rng(0).permutation(60)[[3, 14, 15, 9, 2, 3]]
    some = {"source": "toys", "other": {name: a[rows] for name, a in whole.items() if name != "images"}}
    sn.add_toy_images(some, 0)
    assert np.array_equal(some["other"]["images"], whole["images"][rows]) and some["source"] == "toys"
    few.clear()
    monkeypatch.setattr(sn, "TOYS_CACHE", tmp_path / "new")
    sn.add_toy_images(some, 0)
    assert np.array_equal(some["other"]["images"], whole["images"][rows])
    labels, instances, elevations, azimuths = (
        some["other"][name] for name in ("labels", "instances", "elevations", "azimuths"))
    views = set(zip(labels, instances, sn.toy_views(elevations, azimuths)))
    assert {(category, toy, view) for category, toy, _, some_views in few for view in some_views} == views


def test_views_are_numbered_in_the_order_of_the_tables():
    tables = sn.toy_tables("train")
    numbers = sn.toy_views(tables["elevations"], tables["azimuths"]).reshape(25, 162, 6)
    assert (numbers == np.arange(162)[:, None]).all()


def test_a_few_real_views_in_other_processes(monkeypatch, tmp_path):
    """As the command does it: the pool's images are those drawn here, one file a toy"""
    monkeypatch.setattr(sn, "TOYS_CACHE", tmp_path / "cache")
    data, said = {"train": table((0, 4, 30, 20, 0), (0, 4, 35, 0, 5), (4, 9, 70, 340, 2))}, Said()
    sn.add_toy_images(data, 3, said)
    assert sorted(path.relative_to(tmp_path / "cache").as_posix() for path in (tmp_path / "cache").rglob("*.npz")) == [
        f"toys-3-version-{sn.TOYS_VERSION}/animal-4.npz", f"toys-3-version-{sn.TOYS_VERSION}/car-9.npz"]
    views = (0, 4, 1, 0), (0, 4, 18, 5), (4, 9, 161, 2)
    for image, (category, toy, view, light) in zip(data["train"]["images"], views):
        assert np.array_equal(image, sn.draw_views(category, toy, 3, [view])[0, light])
    assert said and all(text.startswith("\r") for text in said)                         # for a terminal's live line


def test_the_cache_spares_drawing_and_a_damaged_toy_is_drawn_anew_and_no_other(few, tmp_path):
    said = Said()
    first = sn.load_toys(0, say=said)
    paths = sorted((tmp_path / "cache").rglob("*.npz"))
    assert len(paths) == len(few) == 10 and all(views == [0, 1] for *_, views in few)
    few.clear()
    again = sn.load_toys(0, say=said)
    assert not few and not said
    assert all(np.array_equal(first[s]["images"], again[s]["images"]) for s in first)
    path, raw = paths[3], paths[3].read_bytes()
    with np.load(path) as file:
        arrays = dict(file)
    others = {other: other.read_bytes() for other in paths if other != path}

    def saved(**changes):
        np.savez(path, **{name: a for name, a in (arrays | changes).items() if a is not None})
        return path.read_bytes()
    spoilt = [raw[:-300], b"", raw[:9000] + b"????" + raw[9004:], saved(images=255 - arrays["images"]),
              saved(views=arrays["views"][::-1]), saved(digest=None), saved(images=None), saved(views=None),
              saved(images=np.array({"a": 1}, object))]
    for content in spoilt:
        path.write_bytes(content)
        mended = sn.load_toys(0, say=said)
        assert f"{path} is damaged" in said.pop() and not said
        assert all(np.array_equal(mended[s]["images"], first[s]["images"]) for s in first)
        assert path.read_bytes() == raw and others == {other: other.read_bytes() for other in others}
        assert [f"{sn.NORB_NAMES[category]}-{toy}" for category, toy, *_ in few] == [path.stem]
        few.clear()
    sn.load_toys(1)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_views_that_a_toys_file_has_not_are_drawn_and_added_to_it(noise):
    """and those that it has are kept, not drawn again"""
    sn.add_toy_images({"train": table((2, 6, 30, 40, 0), (2, 6, 30, 60, 3))}, 0)
    path = sn.toy_path(2, 6, 0)
    before = sn.read_toy(path, pytest.fail)
    more = {"train": table((2, 6, 45, 20, 1), (2, 6, 30, 60, 5)), "test": table((2, 6, 30, 40, 2), (3, 0, 30, 0, 0))}
    sn.add_toy_images(more, 0)
    assert noise == [(2, 6, 0, [2, 3]), (2, 6, 0, [55]), (3, 0, 0, [0])]
    after = sn.read_toy(path, pytest.fail)
    assert sorted(before) == [2, 3] and sorted(after) == [2, 3, 55]
    assert all(np.array_equal(after[view], before[view]) for view in before)
    assert more["train"]["images"][:, 0, :2].tolist() == [[[26, 0], [55, 1]], [[26, 0], [3, 5]]]
    assert more["test"]["images"][:, 0, :2].tolist() == [[[26, 0], [2, 2]], [[30, 0], [0, 0]]]
    noise.clear()
    sn.add_toy_images(more, 0)
    assert not noise
    sn.add_toy_images(more, 9)                                          # of another seed all are missing
    assert noise == [(2, 6, 9, [2, 3, 55]), (3, 0, 9, [0])]
    assert more["train"]["images"][0, 0, 0].tolist() == [26, 9] and len(sn.read_toy(path, pytest.fail)) == 3


@pytest.mark.parametrize("obstacle", ["a file", "no room"])
def test_a_cache_that_cannot_be_written_is_done_without_with_a_word(noise, tmp_path, monkeypatch, obstacle):
    def full(path, write):
        raise sn.InputError(f"cannot write {path}: No space left on device; choose a writable place with room")
    if obstacle == "a file":
        (tmp_path / "cache").write_text("in the way")
    else:
        monkeypatch.setattr(sn, "write_atomically", full)
    said, data = Said(), {"test": table((1, 5, 30, 20, 4))}
    sn.add_toy_images(data, 2, said)
    assert len(said) == 1 and "cannot be kept" in said[0] and data["test"]["images"][0, 0, 0].tolist() == [15, 2]


def test_by_default_only_the_views_that_are_needed_are_drawn(noise):
    """Those of the training toys in the training range, and of the test toys the whole views of the test sets"""
    data = sn.load_data(sn.Config(quiet=True))
    assert {name: len(data[name]["labels"]) for name in ("train", "familiar", "held_out")} == {
        "train": 25 * 9 * 6 * 6, "familiar": 2004, "held_out": 2004}
    wanted, names = set(), ("labels", "instances", "elevations", "azimuths")
    for part in ("train", "familiar", "held_out"):
        rows = list(zip(*(data[part][name].tolist() for name in names)))
        views = set(rows)
        assert len(rows) == 6 * len(views)                                              # every view in all lightings
        assert {view[1] for view in views} == set(sn.TOY_SPLITS["train" if part == "train" else "test"])
        azimuths = {300, 320, 340, 0, 20, 40} if part != "held_out" else set(range(60, 281, 20))
        assert {view[3] for view in views} == azimuths
        wanted |= views
    found = {(category, toy, 30 + 5 * (view // 18), 20 * (view % 18)) for category, toy, _, views in noise
             for view in views}
    assert found == wanted and len(found) == sum(len(views) for *_, views in noise) == 25 * 54 + 2 * 334
    for part in ("train", "familiar", "held_out"):
        table, images = data[part], data[part]["images"]
        expected = np.stack([10 * table["labels"] + table["instances"],
                             18 * (table["elevations"] - 30) // 5 + table["azimuths"] // 20, table["lightings"]])
        assert np.array_equal(expected, [images[:, 0, 0, 0], images[:, 0, 1, 0], images[:, 0, 1, 1]])


@pytest.mark.parametrize("split, counts", [("azimuth", (8100, 16200)), ("elevation", (8100, 16200))])
def test_a_test_subset_is_of_whole_views_the_same_for_every_seed(split, counts, noise, monkeypatch):
    """--n-test 0, or more than there are, is all; no seed, neither of training nor of the toys, changes which"""
    monkeypatch.setattr(sn, "add_toy_images", lambda data, toy_seed, say, threads: None)
    config = sn.Config(split=split, n_test=100)
    some, again, other = (sn.load_data(changed) for changed in (
        config, sn.changed(config, seed=7), sn.changed(config, toy_seed=3, n_eval=5, n_train_toys=1)))
    every, more = (sn.load_data(sn.changed(config, n_test=n)) for n in (0, 10 ** 6))
    for name, count in zip(("familiar", "held_out"), counts):
        assert len(every[name]["labels"]) == len(more[name]["labels"]) == count
        assert len(some[name]["labels"]) == 102                                         # 17 views
        views = np.stack([some[name][key] for key in ("labels", "instances", "elevations", "azimuths")])
        shown, lightings = np.unique(views, axis=1, return_counts=True)
        assert shown.shape[1] == 17 and (lightings == 6).all() and len(set(shown[0])) == 5
        for data in again, other:
            assert all(np.array_equal(some[name][key], data[name][key]) for key in some[name])
    assert len(some["train"]["labels"]) == len(every["train"]["labels"]) == 8100
    assert len(other["train"]["labels"]) == 8100 // 5 and set(other["train"]["instances"]) == {4}


def test_a_subset_holds_the_smaller_ones(monkeypatch):
    """Views are kept in one order, drawn once: more of them are those, and others"""
    monkeypatch.setattr(sn, "add_toy_images", lambda data, toy_seed, say, threads: None)
    rows = []
    for n in 60, 600:
        part = sn.load_data(sn.Config(n_test=n))["held_out"]
        rows.append(set(zip(*(part[name].tolist() for name in part))))
    assert len(rows[0]) == 60 and len(rows[1]) == 600 and rows[0] < rows[1]
    views = sorted({row[:4] for row in rows[0]})                        # of every run, today and next year
    assert views[:2] == [(0, 0, 55, 200), (1, 1, 70, 240)]


@pytest.mark.parametrize("data, changes", [
    ("toys", dict(norb_dir="x")), ("toys", dict(elevations="30:60")), ("toys", dict(n_train_views=3)),
    ("toys", dict(n_test_views=3)), ("toys", dict(n_elev=2)), ("toys", dict(n_per_combo=2)),
    ("toys", dict(n_test_per_combo=3)), ("smallnorb", dict(toy_seed=1)), ("smallnorb", dict(n_per_combo=2)),
    ("shapes", dict(toy_seed=1)), ("shapes", dict(n_test=60)), ("shapes", dict(n_test=0)),
    ("shapes", dict(n_train_toys=2)), ("shapes", dict(norb_dir="x"))], ids=str)
def test_settings_of_other_data_are_refused(data, changes):
    """and accepted by the data that they are of"""
    (name, _), = changes.items()
    words = f"^{sn.flag_of(name)}: means nothing to --data {data}; leave it out, or give --data (toys|smallnorb|shapes)"
    with pytest.raises(sn.InputError, match=words):
        sn.check_config(sn.Config(data=data, **changes))
    f = next(f for f in sn.options(sn.Config) if f.name == name)
    assert data not in f.metadata["of"]
    for own in f.metadata["of"]:
        sn.check_config(sn.Config(data=own, **changes))


def test_files_of_the_toys_are_read_back_as_the_same_arrays(few, tmp_path):
    sn.write_norb(tmp_path / "norb", 0)
    assert sorted(path.name for path in (tmp_path / "norb").iterdir()) == sorted(sn.NORB_FILES.values())
    read, drawn = sn.load_norb(str(tmp_path / "norb")), sn.load_toys(0)
    for split in drawn:
        assert drawn[split].keys() == read[split].keys()
        assert all(np.array_equal(drawn[split][name], read[split][name]) for name in drawn[split])


def test_what_cannot_be_written_leaves_nothing(few, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(sn.InputError, match="--write-norb .*file: is a file; give a folder"):
        sn.write_norb(tmp_path / "file", 0)
    with pytest.raises(sn.InputError, match="--write-norb .*norb: cannot be written .Not a directory.; choose"):
        sn.write_norb(tmp_path / "file" / "norb", 0)
    monkeypatch.setattr(sn.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5e6}))
    with pytest.raises(sn.InputError, match="needs 897 MB, has 5; make room"):
        sn.write_norb(tmp_path / "norb", 0)
    monkeypatch.undo()

    def full(path, kind, n, parts):
        path.write_bytes(b"half")
        if kind == "dat":
            raise OSError(28, "No space left on device")
    monkeypatch.setattr(sn, "write_norb_file", full)
    with pytest.raises(sn.InputError, match="No space left"):
        sn.write_norb(tmp_path / "norb", 0)
    assert not list((tmp_path / "norb").iterdir())


def test_what_a_killed_process_left_half_written_goes(few, tmp_path):
    for name in (f"{sn.HALF_WRITTEN}x1", "notes"):
        (tmp_path / "norb" / name).mkdir(parents=True)
        (tmp_path / "norb" / name / "some.mat").write_text("half")
    sn.write_norb(tmp_path / "norb", 0)
    assert {path.name for path in (tmp_path / "norb").iterdir()} == {*sn.NORB_FILES.values(), "notes"}


def test_a_killed_write_norb_leaves_nothing(tmp_path):
    flags = ["--threads", "1", "--write-norb", tmp_path / "norb"]
    process = subprocess.Popen([sys.executable, ROOT / "smallnorb_novel_viewpoint.py", *flags],
                               env=os.environ | {"HOME": str(tmp_path)})
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("norb/*/*info*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 143 and not list((tmp_path / "norb").iterdir())


def test_training_on_toys(few):
    """The paper's split: held-out azimuths are none of those trained on; --seed leaves the images as they are"""
    config = sn.Config(train_azimuths="0:10", test_azimuths="15:25", n_epochs=1, model="dynamic-shared",
                       trunk_channels=2, head_types=2, baseline="none", threads=1, quiet=True)
    data, other = sn.load_data(config), sn.load_data(sn.changed(config, seed=5))
    assert data["source"] == "toys" and np.array_equal(data["train"]["images"], other["train"]["images"])
    assert set(data["train"]["azimuths"]) == set(data["familiar"]["azimuths"]) == {0}
    assert set(data["held_out"]["azimuths"]) == {20} and set(data["train"]["instances"]) == {4}
    assert set(data["held_out"]["instances"]) == {0}
    params, history = sn.train(config, data=data)
    assert params["conv1_w"].shape[2] == 2 and np.isfinite(history["epochs"][-1]["train_loss"])


def test_the_standard_task_shows_all_views_and_holds_toys_out(noise):
    """As LeCun et al. split smallNORB; familiar toys are those of training, of which --n-train-toys leaves some"""
    config = sn.Config(split="toys", n_test=0, n_train_toys=1)
    data = sn.load_data(config)
    assert all(np.array_equal(data["train"][name], data["familiar"][name]) for name in data["train"])
    views = {name: set(zip(data[name]["azimuths"], data[name]["elevations"])) for name in ("train", "held_out")}
    assert views["train"] == views["held_out"] == {
        (azimuth, elevation) for azimuth in sn.TOY_AZIMUTHS for elevation in sn.TOY_ELEVATIONS}
    assert set(data["train"]["instances"]) == {4} and set(data["held_out"]["instances"]) == set(sn.TOY_SPLITS["test"])
    some = sn.load_data(sn.changed(config, train_azimuths="340:380", test_azimuths="0:60"))
    assert set(some["train"]["azimuths"]) == set(some["familiar"]["azimuths"]) == {340, 0, 20}
    assert set(some["held_out"]["azimuths"]) == {0, 20, 40, 60}
    assert sn.distance_to_training(60, sn.changed(config, train_azimuths="340:380")) == 40
    assert sn.distance_to_training(200, config) == 0 and sn.Config(split="toys").train_azimuths == "0:340"


def test_write_norb_from_the_command_line(few, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sn.signal, "signal", lambda *_: None)
    for words, code, said in ((["--toy-seed", "3", "--threads", "1"], 0, "wrote smallNORB's six files"),
                              (["--toy-seed", "-1"], 2, "--toy-seed -1: must be at least 0"),
                              (["--data", "smallnorb"], 2, "--data: means nothing to --write-norb")):
        monkeypatch.setattr(sn.sys, "argv", ["x", "--write-norb", str(tmp_path / f"norb{code}"), *words])
        try:
            sn.run_cli(sn.main)
            found = 0
        except SystemExit as stop:
            found = stop.code
        out, err = capsys.readouterr()
        assert found == code and said in out + err and (tmp_path / f"norb{code}").exists() == (code == 0)
    assert np.array_equal(sn.load_norb(str(tmp_path / "norb0"))["test"]["images"], sn.load_toys(3)["test"]["images"])


# ---------------------------------------------------------------- what the toys of seed 0 look like

AS_DRAWN = {                       # mean grey levels of nine squares of a view's first picture, row by row
    (0, 0): (205.1, 197.3, 209.0, 193.5, 185.9, 198.6, 208.6, 183.0, 200.6),
    (1, 5): (209.0, 199.4, 204.6, 206.7, 148.5, 209.0, 206.3, 183.5, 209.0),
    (2, 7): (208.5, 204.9, 209.0, 207.2, 185.4, 196.3, 204.8, 198.4, 205.0),
    (3, 2): (202.6, 179.7, 209.0, 193.9, 152.1, 200.7, 209.0, 189.2, 172.1),
    (4, 9): (209.1, 203.5, 209.0, 201.8, 181.7, 205.0, 209.0, 193.9, 198.5)}


@pytest.mark.parametrize("category, instance", AS_DRAWN, ids=str)
def test_the_toys_are_those_of_their_version(category, instance):
    """Kept pictures are used as long as TOYS_VERSION is the same, and results are of these toys: raise it, and rerun
    them, if this must change"""
    picture = sn.draw_view(sn.make_toy(category, instance, 0), 45, 120, 48)[0, 0]
    assert sn.TOYS_VERSION == 1
    np.testing.assert_allclose(picture.reshape(3, 16, 3, 16).mean((1, 3)).ravel(), AS_DRAWN[category, instance],
                               atol=0.3)


# ---------------------------------------------------------------- how much they are like smallNORB

def test_distances_to_the_nearest_of_each_class_by_hand():
    known, labels = np.array([[0, 0], [3, 4], [6, 8]], np.float32), np.array([0, 1, 1])
    found = bench_toys.nearest_of_each_class(known, labels, np.array([[0, 0], [6, 9]], np.float32))
    np.testing.assert_allclose(found[:, :2] ** 2 * 2, [[0, 25], [117, 1]], rtol=1e-5)
    assert np.isinf(found[:, 2:]).all()


def test_the_nearest_views_are_of_one_toy_in_one_light():
    """Levels 10, 13 and 90 of one toy; 12 is another toy's, 11 another light's"""
    levels = np.array([10, 13, 90, 12, 11])
    table = {"images": np.broadcast_to(levels[:, None, None, None], (5, 4, 4, 2)).astype(np.uint8),
             "labels": np.zeros(5, int), "instances": np.array([1, 1, 1, 2, 1]), "lightings": np.array([0, 0, 0, 0, 3])}
    assert bench_toys.nearest_views(table) == pytest.approx(3)


def test_the_likeness_of_toys_from_the_command_line(noise, monkeypatch, tmp_path, capsys):
    path = tmp_path / "r.json"
    monkeypatch.setattr(sys, "argv", ["x", *f"--n-toys 1 --n-test 30 --out-json {path}".split()])
    bench_toys.main()
    found = json.loads(path.read_text())
    assert 0 <= found["nearest_error"] <= 1 and found["bench"] == {"toy_seed": 0, "n_toys": 1, "n_test": 30}
    assert "nearest neighbour: " in capsys.readouterr().out and len(found["weights_sha256"]) == 64
