"""Toys: rays against marching in small steps, normals, light by hand; the structure of smallNORB; cache and files."""
import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest

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
def few(monkeypatch, tmp_path):
    """Two toys of each class, four views each, drawn in this process, in a home of their own"""
    monkeypatch.setattr(sn, "TOY_SPLITS", {"train": (4,), "test": (0,)})
    monkeypatch.setattr(sn, "TOY_ELEVATIONS", range(30, 50, 10))
    monkeypatch.setattr(sn, "TOY_AZIMUTHS", range(0, 360, 180))
    monkeypatch.setattr(sn, "TOYS_CACHE", tmp_path / "cache")
    drawn = []

    def here(draw, toy_seed, split, say):
        for category in range(5):
            for instance in sn.TOY_SPLITS[split]:
                drawn.append((category, instance))
                yield draw(category, instance, toy_seed)
    monkeypatch.setattr(sn, "each_toy", here)
    return drawn


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
    assert data["images"].shape == (5 * 4 * 6, 48, 48, 2) and data["images"].dtype == np.uint8
    for row in (0, 7, 33, 119):
        category, instance, elevation, azimuth, lighting = (
            data[name][row] for name in ("labels", "instances", "elevations", "azimuths", "lightings"))
        toy = sn.make_toy(category, instance, 0)
        for camera, shift in enumerate((-2.5, 2.5)):
            whole = sn.light_up(*sn.cast_rays(toy, azimuth + shift, elevation, 96), elevation)[lighting]
            four = whole.astype(int).reshape(48, 2, 48, 2).sum((1, 3))
            assert np.array_equal(data["images"][row, ..., camera], (four + 2) // 4)


def test_the_cache_spares_drawing_and_a_damaged_one_is_drawn_anew(few, tmp_path):
    said = []
    first = sn.load_toys(0, say=said.append)
    n, path = len(few), next((tmp_path / "cache").iterdir())
    again = sn.load_toys(0, say=said.append)
    assert len(few) == n == 10 and not said
    assert all(np.array_equal(first[s]["images"], again[s]["images"]) for s in first)
    raw = path.read_bytes()
    for spoilt in (raw[:-300], b"", raw[:9000] + b"????" + raw[9004:]):
        path.write_bytes(spoilt)
        mended = sn.load_toys(0, say=said.append)
        assert "is damaged" in said.pop() and np.array_equal(mended["test"]["images"], first["test"]["images"])
        assert path.read_bytes() == raw
    sn.load_toys(1)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_without_room_for_a_cache_it_goes_on_with_a_word(few, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("in the way")
    said = []
    assert len(sn.load_toys(0, say=said.append)["train"]["labels"]) == 120 and "cannot be kept" in said.pop()


def test_files_of_the_toys_are_read_back_as_the_same_arrays(few, tmp_path):
    sn.write_norb(tmp_path / "norb", 0)
    assert sorted(path.name for path in (tmp_path / "norb").iterdir()) == sorted(sn.NORB_FILES.values())
    read, drawn = sn.load_norb(str(tmp_path / "norb")), sn.load_toys(0)
    for split in drawn:
        assert drawn[split].keys() == read[split].keys()
        assert all(np.array_equal(drawn[split][name], read[split][name]) for name in drawn[split])


def test_what_cannot_be_written_leaves_nothing(few, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(sn.InputError, match="--write-norb .*file: cannot be written"):
        sn.write_norb(tmp_path / "file", 0)
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


def test_training_on_toys(few):
    """The paper's split: held-out azimuths are none of those trained on; --seed leaves the images as they are"""
    config = sn.Config(data="toys", train_azimuths="0:10", test_azimuths="170:190", n_epochs=1, model="cnn",
                       baseline="none", threads=1, quiet=True)
    data, other = sn.load_data(config), sn.load_data(sn.changed(config, seed=5))
    assert data["source"] == "toys" and np.array_equal(data["train"]["images"], other["train"]["images"])
    assert set(data["train"]["azimuths"]) == set(data["familiar"]["azimuths"]) == {0}
    assert set(data["held_out"]["azimuths"]) == {180} and set(data["train"]["instances"]) == {4}
    assert set(data["held_out"]["instances"]) == {0}
    params, history = sn.train(config, data=data)
    assert params["conv1_w"].shape[2] == 2 and np.isfinite(history["epochs"][-1]["train_loss"])


def test_write_norb_from_the_command_line(few, tmp_path, monkeypatch, capsys):
    for words, code, said in ((["--toy-seed", "3"], 0, "wrote smallNORB's six files"),
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
