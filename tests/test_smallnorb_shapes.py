"""The five embedded shapes: what their images show, which views are trained on and which are held out."""
import itertools
import math

import smallnorb_novel_viewpoint as sn

import numpy as np
import pytest
from conftest import assert_refused, configs, runs
from reference_smallnorb import PARTS

import visualize_smallnorb_novel_viewpoint as looks

SHAPES = sn.Config(data="shapes")
X, Y, Z = np.eye(3)                # right, up, towards the viewer


@pytest.fixture(scope="module")
def data():
    return sn.load_data(SHAPES)


def test_shapes_are_what_they_are_called():
    shapes = cross, ell, tee, frame, tripod = sn.shape_points()
    assert len(shapes) == len(sn.SHAPE_NAMES) == sn.N_CLASSES == 5
    for points in shapes:
        assert points.ndim == 2 and points.shape[1] == 3 and np.abs(points).max() <= 1
        assert len(np.unique(points, axis=0)) >= 7
    assert len(cross) == 7 and sorted(np.count_nonzero(cross, axis=1)) == [0] + [1] * 6
    assert len(np.unique(frame, axis=0)) == 8 + 12 * 3                             # corners, and three points an edge
    arms = tripod[np.any(tripod != 0, axis=1)]
    assert (np.count_nonzero(arms, axis=1) == 1).all() and len(np.unique(np.argmax(np.abs(arms), 1))) == 3
    assert (tee[:, 2] == 0).all() and (np.unique(tee[tee[:, 1] < 0.79][:, 0]) == 0).all()
    assert np.isclose(np.ptp(ell[:, 2]), 0.6)                                      # the short prong


@pytest.mark.parametrize("azimuth, elevation, point, seen", [
    (0, 0, X, X), (90, 0, Z, X), (90, 0, X, -Z), (90, 0, Y, Y), (-90, 0, Z, -X), (450, 0, Z, X), (0, 90, Y, Z),
    (0, 90, Z, -Y), (0, 30, Y, (0, math.cos(math.pi / 6), 0.5)), (90, 90, Z, X), (90, 90, X, Y)])
def test_a_turn_about_the_vertical_then_a_nod_towards_the_viewer(azimuth, elevation, point, seen):
    R = sn.view_rotation(azimuth, elevation)
    np.testing.assert_allclose(R @ point, seen, atol=1e-12)
    np.testing.assert_allclose(R @ R.T, np.eye(3), atol=1e-12)


@pytest.mark.parametrize("label", range(5))
def test_render_by_loops(label, monkeypatch):
    """Nearer points are brighter, up is up and right is right"""
    monkeypatch.setattr(sn, "NOISE", 0)
    image = sn.render(np.array([label]), np.array([40.0]), np.array([30.0]), np.random.default_rng(0))[0, ..., 0]
    expected, (rows, columns) = np.zeros((32, 32)), np.indices((32, 32)) - 15.5
    for point in sn.shape_points()[label]:
        x, y, z = sn.view_rotation(40, 30) @ point
        d2 = (columns - sn.RADIUS * x) ** 2 + (rows + sn.RADIUS * y) ** 2
        expected += (0.75 + 0.25 * min(1, max(-1, z))) * np.exp(-d2 / (2 * sn.BLOB ** 2))
    np.testing.assert_allclose(image, np.minimum(expected, 1), atol=1e-5)


def test_pixels_are_in_range_and_the_noise_is_as_strong_as_it_says(data, monkeypatch, rng):
    for name in PARTS:
        images = data[name]["images"]
        assert images.dtype == np.float32 and images.min() == 0 and images.max() == 1 and 0.02 < images.mean() < 0.5
    where = np.zeros(1000, int), np.full(1000, 20.0), np.full(1000, 30.0)
    noisy = sn.render(*where, rng)
    monkeypatch.setattr(sn, "NOISE", 0.0)
    clean = sn.render(*(a[:1] for a in where), rng)[0]
    free = (clean > 0.25) & (clean < 0.75)                                  # no clipping in reach of the noise
    assert free.sum() > 10 and (noisy - clean)[:, free].std() == pytest.approx(0.04, rel=0.03)


def clean_views(azimuths, elevations=(30, 50, 70)):
    """Noise-free images (class, view, pixels) of every shape at every azimuth and elevation, degrees"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sn, "NOISE", 0.0)
        views = sn.make_views(np.asarray(azimuths, float), np.asarray(elevations, float), 1, np.random.default_rng(0))
    return views["images"].reshape(5, -1, 1024)


def distances(images, others):
    """Of each image the Euclidean distance to the nearest of the others"""
    return np.sqrt(((images[:, None] - others) ** 2).sum(2).min(1))


@pytest.mark.parametrize("train, test, azimuths, apart", [
    ("0:150", "200:330", np.arange(0, 151, 2), 4), ("0:60", "180:240", np.linspace(0, 60, 6), 6)])
def test_what_held_out_azimuths_show_was_seen_in_training_of_three_shapes(train, test, azimuths, apart):
    """Noise apart, every held-out azimuth of cross, frame and T is a view from within the training range, and with the
    gap's ranges even one of the training images; none of L's and the tripod's is near one. So 3/5 of the images ask
    nothing of a novel viewpoint; and no two shapes look alike."""
    data = sn.load_data(sn.Config(data="shapes", train_azimuths=train, test_azimuths=test))
    seen, unseen = clean_views(azimuths), clean_views(sorted(set(data["novel"]["azimuths"])))
    for name, images, others in zip(sn.SHAPE_NAMES, unseen, seen):
        if name in ("L", "tripod"):
            assert distances(images, others).min() > apart, name
        else:
            assert distances(images, others).max() < 1e-5, name
    for one, other in itertools.permutations(range(5), 2):
        assert distances(unseen[one], unseen[other]).min() > 3.5 and distances(unseen[one], seen[other]).min() > 3.5


@pytest.mark.parametrize("low, high", [(0, 150), (290, 420), (-30, 40), (7, 7), (0.1, 0.1 + 0.7)])
def test_ranges_go_around_the_circle_and_include_their_ends(low, high):
    azimuths = np.concatenate([np.arange(-720, 720), np.linspace(low, high, 8) % 360])
    inside = [any(low - 1e-9 <= azimuth + 360 * k <= high + 1e-9 for k in range(-3, 5)) for azimuth in azimuths]
    assert np.array_equal(sn.in_range(azimuths, (low, high)), inside) and sum(inside) > 7


@pytest.mark.parametrize("one, other", [
    ("0:150", "150:330"), ("0:150", "20:30"), ("290:420", "50:200"), ("290:420", "60:290"), ("0:150", "330:360"),
    ("0:150", "-50:0"), ("5:5", "5:5"), ("5:5", "365:365"), ("300:400", "30:60"), ("350:355", "-15:5")])
def test_azimuth_ranges_that_meet_are_refused_in_either_order(one, other):
    for train, test in (one, other), (other, one):
        with pytest.raises(sn.InputError, match="--train-azimuths .* meet"):
            sn.Config(train_azimuths=train, test_azimuths=test)
        sn.Config(train_azimuths=train, test_azimuths=test, split="instance")
    for train, test in ("300:400", "60:280"), ("-30:40", "60:280"), ("7:7", "8:366"):
        sn.Config(train_azimuths=train, test_azimuths=test)


@pytest.mark.parametrize("changes", [
    {}, dict(split="elevation"), dict(train_azimuths="290:420", test_azimuths="100:250"),
    dict(train_azimuths="0.1:0.8", test_azimuths="200.3:330.7")], ids=str)
def test_no_held_out_viewpoint_is_a_training_viewpoint(changes):
    config = sn.Config(data="shapes", **changes)
    data, angle = sn.load_data(config), int(config.split == "elevation")
    views = {name: set(zip(data[name]["azimuths"].round(6), data[name]["elevations"].round(6))) for name in PARTS}
    assert data["source"] == "shapes" and views["familiar"] == views["train"]
    assert [len(views[name]) for name in PARTS] == [18, 18, 18] and not views["train"] & views["novel"]
    apart = [abs((a[angle] - b[angle] + 180) % 360 - 180) for a in views["train"] for b in views["novel"]]
    assert min(apart) > 4.9
    assert {view[1 - angle] for view in views["train"]} == {view[1 - angle] for view in views["novel"]}


def test_default_data(data):
    """Every shape from every viewpoint equally often; no image twice, and of another seed other noise"""
    assert [len(data[name]["labels"]) for name in PARTS] == [450, 180, 180]
    for name, azimuths in zip(PARTS, (range(0, 151, 30), range(0, 151, 30), range(200, 331, 26))):
        shown = np.stack([data[name][key] for key in ("labels", "azimuths", "elevations")])
        rows, counts = np.unique(shown, axis=1, return_counts=True)
        assert set(map(tuple, rows.T)) == set(itertools.product(range(5), azimuths, (30, 50, 70)))
        assert np.all(counts == (5 if name == "train" else 2))
    elevation = sn.load_data(sn.Config(data="shapes", split="elevation"))
    assert set(elevation["train"]["elevations"]) == {30, 35, 40}
    assert set(elevation["novel"]["elevations"]) == {45, 57.5, 70}
    every = np.concatenate([data[name]["images"].reshape(-1, 1024) for name in PARTS])
    assert len(np.unique(every, axis=0)) == len(every)
    again, other = sn.load_data(SHAPES), sn.load_data(sn.Config(data="shapes", seed=1))
    assert np.array_equal(again["train"]["images"], data["train"]["images"])
    assert not np.array_equal(other["train"]["images"], data["train"]["images"])


def test_a_range_that_begins_with_a_minus_is_joined_to_its_flag(call):
    """argparse takes it for a flag; the form that works is in the error, also of the programs outside"""
    words = "--train-azimuths", "-40:40"
    for main in sn.main, looks.main:
        assert_refused(call(sn, main, *words), "as in --train-azimuths=-40:40")
    config, = configs(runs.NORB, ["--model", "cnn", "=".join(words)])
    assert sn.angle_ranges(config) == ((-40, 40), (60, 280))


def test_a_network_of_other_images_is_not_tested_on_shapes(call):
    assert_refused(call(sn, sn.main, "--load", sn.PRETRAINED[1], "--data", "shapes"), "has other layers or classes")
    assert_refused(call(sn, sn.main, "--load", "--data", "smallnorb", "--norb-dir", "nowhere"), "nowhere")


def test_several_models_that_were_cut_off_in_the_first_epoch_begin_again(tmp_path):
    """Their folders are there, and empty; a folder with anything else is refused"""
    folder = tmp_path / "runs"
    (folder / "capsnet").mkdir(parents=True)
    sn.check_several(folder, ["capsnet", "cnn"])
    (folder / "notes.txt").touch()
    with pytest.raises(sn.InputError, match="holds other files .notes.txt."):
        sn.check_several(folder, ["capsnet", "cnn"])
    (folder / "capsnet" / "weights.npz").touch()
    sn.check_several(folder, ["capsnet", "cnn"])
    (folder / "weights.npz").touch()
    with pytest.raises(sn.InputError, match="holds other files .weights.npz."):
        sn.check_several(folder, ["capsnet", "cnn"])
