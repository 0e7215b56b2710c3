"""Toys: rays against marching in small steps, normals, light by hand; the structure of smallNORB; the cache."""

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest

import visualize_smallnorb_novel_viewpoint

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
@pytest.mark.parametrize("seed", range(2))
def test_rays_meet_a_part_where_marching_does(name, seed):
    """From far away towards the toy in steps of 1/500; the normal leads out of the part, and is what the surface is
    across: a step along it leaves the part, a step against it enters"""
    kind, M, center = a_part(KINDS[name], seed)
    side, azimuth, elevation = 24, 50 + 70 * seed, 35
    hit, normals = sn.cast_rays([(kind, M, center)], azimuth, elevation, side)
    R = sn.view_rotation(azimuth, elevation)
    at = ((np.arange(side) + 0.5) / side * 2 - 1) / sn.REACH
    steps = np.linspace(1.5, -1.5, 1501)
    x, y, z = np.meshgrid(at, -at, steps)                                               # (row, column, step)
    local = np.linalg.solve(R @ M, np.stack([x, y, z]).reshape(3, -1) - (R @ center)[:, None])
    marched = inside(kind, local).reshape(x.shape)
    assert (hit != marched.any(2)).mean() < 0.01                        # rays that graze it may differ
    sure = hit & (marched.sum(2) > 10)
    assert sure.sum() > 20
    first = marched.argmax(2)[sure]
    points = np.stack([x[sure][:, 0], y[sure][:, 0], steps[first]])
    n = normals[:, sure]
    np.testing.assert_allclose(np.square(n).sum(0), 1, atol=1e-5)
    for sign, expected in ((1, False), (-1, True)):
        moved = np.linalg.solve(R @ M, points + sign * 0.015 * n - (R @ center)[:, None])
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


def test_light_by_hand(monkeypatch):
    """A face towards a lamp of strength s: ambient + s; one at 60 degrees: ambient + s / 2; turned away: ambient"""
    monkeypatch.setattr(sn, "LIGHTINGS", ((0.8, 0.2, ((0, 30, 0.5),)), (0.7, 0.2, ((90, 0, 0.5), (-90, 0, 0.25)))))
    hit = np.array([[True, True, True, False]])
    normals = np.zeros((3, 1, 4), np.float32)
    normals[:, 0, 0] = [0, 0.5, np.sqrt(0.75)]                                          # towards the first lamp
    normals[:, 0, 1] = [0, 1, 0]                                                        # 60 degrees from it
    normals[:, 0, 2] = [1, 0, 0]
    images = sn.shade(hit, normals, 0)
    assert images[0, 0].tolist() == [round(255 * v) for v in (0.7, 0.45, 0.2, 0.8)]
    assert images[1, 0].tolist() == [round(255 * v) for v in (0.2, 0.2, 0.7, 0.7)]
    lifted = sn.shade(hit, normals, 30)                              # the camera is beside the lamp, at (0, 0, 1)
    assert lifted[0, 0, 0] == round(255 * (0.2 + 0.5 * np.sqrt(0.75))) and lifted[0, 0, 1] == round(255 * 0.2)


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


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache of its own"""
    monkeypatch.setattr(sn, "TOYS_CACHE", f"{tmp_path}/cache/toys-{{}}-version-1")
    return tmp_path / "cache"


@pytest.fixture
def drawn(monkeypatch, cache):
    """In place of toys, images that tell toy, seed, view and lighting -> list of the views that were drawn"""
    views = []

    def draw_view(toy, elevation, azimuth, side):
        images = np.zeros((6, 2, side, side), np.uint8)
        views.append((*toy, sn.toy_views(elevation, azimuth)))
        images[:, 0, :2, :2], images[:, 1, :2, :2] = 10 * toy[0] + toy[1], toy[2]
        images[:, 0, :2, 2:4], images[:, 1, :2, 2:4] = views[-1][3], np.arange(6)[:, None, None]
        return images
    monkeypatch.setattr(sn, "make_toy", lambda *toy: toy)
    monkeypatch.setattr(sn, "draw_view", draw_view)
    return views


def table(*rows):
    """A table of rows (label, instance, elevation, azimuth, lighting)"""
    return dict(zip(("labels", "instances", "elevations", "azimuths", "lightings"), np.array(rows).T))


def images_of(*rows, toy_seed=0):
    """The upper left corner of the images that add_toy_images makes of a table"""
    shown = table(*rows)
    sn.add_toy_images([shown], sn.Config(toy_seed=toy_seed))
    return shown["images"][:, 0, :2].tolist()


def test_tables_have_smallnorbs_structure():
    for split in ("train", "test"):
        tables = sn.toy_tables(split)
        rows = np.stack(list(tables.values()), 1)
        assert rows.shape == (24300, 5) and len(np.unique(rows, axis=0)) == 24300 and rows.dtype == np.int64
        assert sorted(set(tables["instances"])) == sorted(sn.TOY_SPLITS[split])
        assert sorted(set(tables["azimuths"])) == list(range(0, 360, 20))
        assert sorted(set(tables["elevations"])) == list(range(30, 75, 5)) and set(tables["lightings"]) == set(range(6))
        numbers = sn.toy_views(tables["elevations"], tables["azimuths"]).reshape(25, 162, 6)
        assert (numbers == np.arange(162)[:, None]).all()
    assert not set(sn.TOY_SPLITS["train"]) & set(sn.TOY_SPLITS["test"])


def test_images_are_of_the_view_that_their_row_says(cache):
    rows = table((0, 4, 30, 20, 0), (1, 0, 30, 0, 3), (4, 9, 70, 340, 2))
    sn.add_toy_images([rows], sn.Config(toy_seed=3))
    assert rows["images"].shape == (3, 48, 48, 2) and rows["images"].dtype == np.uint8
    for image, (category, instance, elevation, azimuth, lighting) in zip(
            rows["images"], zip(*(rows[name] for name, *_ in sn.NORB_CODES))):
        toy = sn.make_toy(category, instance, 3)
        for camera, shift in enumerate((-2.5, 2.5)):
            whole = sn.shade(*sn.cast_rays(toy, azimuth + shift, elevation, 96), elevation)[lighting]
            four = whole.astype(int).reshape(48, 2, 48, 2).sum((1, 3))
            assert np.array_equal(image[..., camera], (four + 2) // 4)


def test_views_of_one_test_toy_are_the_nearest_stored_ones(drawn):
    """Class 3, its first test toy 0; 355 degrees is nearer to 0 than to 340, 58 to 60 than to 55"""
    views = visualize_smallnorb_novel_viewpoint.views_of(sn.Config(toy_seed=7), 3, [355, 100], [30, 58], lighting=2)
    assert views["azimuths"].tolist() == [0, 100] and views["elevations"].tolist() == [30, 60]
    assert views["labels"].tolist() == [3, 3] and views["instances"].tolist() == [0, 0]
    assert views["images"][:, 0, :2].tolist() == [[[30, 7], [0, 2]], [[30, 7], [6 * 18 + 5, 2]]]


def test_views_of_shapes_are_rendered_from_exactly_there():
    views = visualize_smallnorb_novel_viewpoint.views_of(sn.Config(data="shapes"), 1, [12.5, -90], [33, 70])
    assert views["azimuths"].tolist() == [12.5, 270] and views["elevations"].tolist() == [33, 70]
    expected = sn.render(np.array([1, 1]), np.array([12.5, -90]), np.array([33.0, 70]), sn.rng_for(0, sn.EVALUATION, 2))
    np.testing.assert_array_equal(views["images"], expected)


def test_the_cache_spares_drawing_and_a_damaged_toy_is_drawn_anew_and_no_other(drawn, cache):
    rows = [(category, 4, 30, azimuth, 0) for category in range(5) for azimuth in (0, 20)]
    first = images_of(*rows)
    assert drawn == [(category, 4, 0, view) for category in range(5) for view in (0, 1)]
    names = [f"toys-0-version-1/{name}-4.npz" for name in sorted(sn.NORB_NAMES)]
    assert sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*.*")) == names
    drawn.clear()
    assert images_of(*rows) == first and not drawn
    path = sn.toy_path(3, 4, 0)
    raw = path.read_bytes()
    spoilt = [raw[:-300], b"", raw[:9000] + b"????" + raw[9004:]]
    for views, images in (([0], np.zeros((2, 6))), (np.array({"a": 1}, object), np.zeros(2))):
        np.savez(path, views=views, images=images)
        spoilt.append(path.read_bytes())
    for content in spoilt:
        path.write_bytes(content)
        assert images_of(*rows) == first and drawn == [(3, 4, 0, 0), (3, 4, 0, 1)]
        assert path.read_bytes() == raw
        drawn.clear()


def test_views_that_a_toys_file_has_not_are_drawn_and_added_to_it(drawn):
    """and those that it has are kept, not drawn again; of another seed all are missing"""
    images_of((2, 6, 30, 40, 0), (2, 6, 30, 60, 3))
    path = sn.toy_path(2, 6, 0)
    before, more = sn.read_toy(path), ((2, 6, 45, 20, 1), (2, 6, 30, 60, 5), (2, 6, 30, 40, 2), (3, 0, 30, 0, 0))
    expected = [[[26, 0], [55, 1]], [[26, 0], [3, 5]], [[26, 0], [2, 2]], [[30, 0], [0, 0]]]
    assert images_of(*more) == expected
    assert drawn == [(2, 6, 0, 2), (2, 6, 0, 3), (2, 6, 0, 55), (3, 0, 0, 0)]
    after = sn.read_toy(path)
    assert sorted(before) == [2, 3] and sorted(after) == [2, 3, 55]
    assert all(np.array_equal(after[view], before[view]) for view in before)
    drawn.clear()
    assert images_of(*more) == expected and not drawn
    assert images_of(*more, toy_seed=9)[0] == [[26, 9], [55, 1]]
    assert drawn == [(2, 6, 9, 2), (2, 6, 9, 3), (2, 6, 9, 55), (3, 0, 9, 0)] and len(sn.read_toy(path)) == 3


def test_a_cache_that_cannot_be_written_is_done_without(drawn, cache):
    cache.write_text("in the way", "utf-8")
    assert images_of((1, 5, 30, 20, 4), toy_seed=2) == [[[15, 2], [1, 4]]]


@pytest.mark.parametrize("split", ["azimuth", "elevation"])
def test_a_test_subset_is_of_whole_views_the_same_for_every_seed(split):
    """--n-test 0, or more than there are, is all; no seed, neither of training nor of the toys, changes which; more are
    those, and others"""
    def chosen(**changes):
        return sn.select_images(sn.Config(**dict(split=split, n_test=100) | changes))
    some, again, other = chosen(), chosen(seed=7), chosen(toy_seed=3, n_train_toys=1)
    every, more, many = chosen(n_test=0), chosen(n_test=24300), chosen(n_test=600)
    for name, count in (("familiar", 8100), ("novel", 16200)):
        assert len(every[name]["labels"]) == len(more[name]["labels"]) == count
        views = np.stack([some[name][key] for key in ("labels", "instances", "elevations", "azimuths")])
        shown, lightings = np.unique(views, axis=1, return_counts=True)
        assert shown.shape[1] == 17 and (lightings == 6).all() and len(set(shown[0])) == 5
        assert set(map(tuple, views.T)) < set(zip(*(many[name][key] for key in (
            "labels", "instances", "elevations", "azimuths"))))
        for data in again, other:
            assert all(np.array_equal(some[name][key], data[name][key]) for key in some[name])
    assert split != "azimuth" or sorted(map(tuple, shown.T.tolist()))[:2] == [(0, 0, 55, 200), (0, 2, 30, 200)]
    assert len(some["train"]["labels"]) == len(every["train"]["labels"]) == 8100
    assert len(other["train"]["labels"]) == 8100 // 5 and set(other["train"]["instances"]) == {4}


def test_the_standard_task_shows_all_views_and_holds_toys_out():
    """As LeCun et al. split smallNORB; familiar toys are those of training, of which --n-train-toys leaves some"""
    config = dict(split="instance", n_test=0, n_train_toys=1)
    data = sn.select_images(sn.Config(**config))
    assert all(np.array_equal(data["train"][name], data["familiar"][name]) for name in data["train"])
    views = {name: set(zip(data[name]["azimuths"], data[name]["elevations"])) for name in ("train", "novel")}
    assert views["train"] == views["novel"] and len(views["train"]) == 162
    assert set(data["train"]["instances"]) == {4} and set(data["novel"]["instances"]) == set(sn.TOY_SPLITS["test"])
    some = sn.select_images(sn.Config(**config, train_azimuths="340:380", test_azimuths="0:60"))
    assert set(some["train"]["azimuths"]) == set(some["familiar"]["azimuths"]) == {340, 0, 20}
    assert set(some["novel"]["azimuths"]) == {0, 20, 40, 60}
    with pytest.raises(sn.InputError, match="no train images: none has azimuths in .*. Widen"):
        sn.select_images(sn.Config(train_azimuths="301:319"))


AS_DRAWN = (206.86, 196.94, 208.11, 200.61, 170.7, 201.93, 207.53, 189.61, 197.04)


def test_the_toys_are_those_of_their_version():
    """Cached images are used as long as the version in TOYS_CACHE is the same, and results are of these toys: raise
    it, and rerun them, if this must change. Mean gray levels of nine squares of a view, over a toy of each class"""
    toys = [sn.make_toy(category, instance, 0) for category, instance in ((0, 0), (1, 5), (2, 7), (3, 2), (4, 9))]
    pictures = np.stack([sn.draw_view(toy, 45, 120, 48)[0, 0] for toy in toys]).reshape(5, 3, 16, 3, 16)
    assert sn.TOYS_CACHE.endswith("version-1")
    np.testing.assert_allclose(pictures.mean((0, 2, 4)).ravel(), AS_DRAWN, atol=0.06)


MEAN_GRAY = (                      # of one view of each toy: a row per class, a column per instance
    (197.94, 204.02, 202.18, 199.91, 200.95, 200.51, 203.16, 202.16, 201.52, 202.07),
    (201.33, 198.21, 195.96, 197.43, 198.63, 197.32, 196.55, 199.87, 194.85, 199.37),
    (204.22, 200.01, 203.26, 202.42, 198.38, 199.51, 203.30, 202.17, 198.00, 202.90),
    (192.79, 190.00, 189.81, 190.01, 189.44, 196.28, 198.21, 191.77, 194.89, 197.90),
    (194.76, 189.10, 194.81, 195.27, 192.83, 199.09, 195.42, 195.33, 190.81, 201.28))


def test_each_toy_is_that_of_its_version():
    """All fifty, and so each style of each class and the parts that few toys have. One of the 48x48 px may differ,
    by 255 at most, where a processor rounds otherwise"""
    for category, row in enumerate(MEAN_GRAY):
        found = [sn.draw_view(sn.make_toy(category, instance, 0), 45, 120, 48)[0, 0].mean() for instance in range(10)]
        np.testing.assert_allclose(found, row, atol=0.12)
