"""More of the second experiment's data: what images, viewpoints, epochs and settings must be whatever the flags."""
import dataclasses
import itertools
import math

import numpy as np
import pytest
import smallnorb_novel_viewpoint as sn
from smallnorb_toy import TINY, tiny
from test_smallnorb_files import write_norb

PARTS = ("train", "familiar", "held_out")


@pytest.fixture(scope="module")
def data():
    return sn.load_data(sn.Config())


# ---------------------------------------------------------------- shapes and images

def test_shapes_are_five_lists_of_different_points_in_the_cube():
    shapes = sn.shape_points()
    assert len(shapes) == len(sn.CLASS_NAMES) == sn.N_CLASSES == 5
    for points in shapes:
        assert points.ndim == 2 and points.shape[1] == 3 and np.abs(points).max() <= 1
        assert len(np.unique(points, axis=0)) >= 7
    assert len({tuple(sorted(map(tuple, points))) for points in shapes}) == 5


def test_rotations_are_orthonormal(rng):
    R = sn.rotation(rng.uniform(-400, 400, 50), rng.uniform(-90, 90, 50))
    np.testing.assert_allclose(R @ R.transpose(0, 2, 1), np.broadcast_to(np.eye(3), (50, 3, 3)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(R), 1, rtol=1e-12)


X, Y, Z = np.eye(3)                # right, up, towards the viewer


@pytest.mark.parametrize("azimuth, elevation, point, seen", [
    (0, 0, X, X), (0, 0, Y, Y), (90, 0, Z, X), (90, 0, X, -Z), (90, 0, Y, Y), (-90, 0, Z, -X), (180, 0, X, -X), (450, 0, Z, X),
    (0, 90, Y, Z), (0, 90, Z, -Y), (0, 90, X, X), (0, 30, Y, (0, math.cos(math.pi / 6), 0.5)), (90, 90, Z, X), (90, 90, X, Y)])
def test_a_turn_about_the_vertical_then_a_nod_towards_the_viewer(azimuth, elevation, point, seen):
    np.testing.assert_allclose(sn.rotation(np.array([azimuth]), np.array([elevation]))[0] @ point, seen, atol=1e-12)


def test_nearer_points_are_brighter_up_is_up_and_right_is_right(monkeypatch, rng):
    monkeypatch.setattr(sn, "NOISE", 0.0)
    near, far = np.array([[0, 0, 0.9]]), np.array([[0, 0, -0.9]])
    monkeypatch.setattr(sn, "shape_points", lambda: (near, far, np.array([[0.6, 0, 0]]), np.array([[0, 0.6, 0]]), near))
    images = sn.render(np.arange(4), np.zeros(4), np.zeros(4), rng)[..., 0]
    assert images[1].sum() / images[0].sum() == pytest.approx((0.75 - 0.225) / (0.75 + 0.225), rel=1e-5)
    rows, columns = np.indices((32, 32)) - 15.5
    centre = [((image * rows).sum() / image.sum(), (image * columns).sum() / image.sum()) for image in images[2:]]
    np.testing.assert_allclose(centre, [(0, 0.6 * sn.RADIUS), (-0.6 * sn.RADIUS, 0)], atol=0.02)


def test_pixels_are_in_range_and_the_noise_is_as_strong_as_it_says(data, monkeypatch, rng):
    for name in PARTS:
        images = data[name]["images"]
        assert images.dtype == np.float32 and images.min() == 0 and images.max() == 1 and 0.02 < images.mean() < 0.5
    where = np.zeros(2000, int), np.full(2000, 20.0), np.full(2000, 30.0)
    noisy = sn.render(*where, rng)
    monkeypatch.setattr(sn, "NOISE", 0.0)
    clean = sn.render(*(a[:1] for a in where), rng)[0]
    free = (clean > 0.25) & (clean < 0.75)                                                     # no clipping in reach of the noise
    assert free.sum() > 10 and (noisy - clean)[:, free].std() == pytest.approx(0.04, rel=0.02)
    assert abs((noisy - clean)[:, free].mean()) < 2e-3


def test_shapes_stay_inside_the_image(monkeypatch, rng):
    monkeypatch.setattr(sn, "NOISE", 0.0)
    views = sn.make_views(np.arange(0, 360, 30), np.array([0, 30, 70]), 1, rng)
    border = np.ones((32, 32, 1), bool)
    border[1:-1, 1:-1] = False
    assert views["images"][:, border].max() < 0.75


def test_every_shape_is_shown_from_every_viewpoint_equally_often(rng):
    views = sn.make_views(np.array([10, 350, 380]), np.array([30.0, 60.0]), 3, rng)
    assert {name: len(a) for name, a in views.items()} == dict.fromkeys(("images", "labels", "azimuths", "elevations"), 90)
    rows, counts = np.unique(np.stack([views["labels"], views["azimuths"], views["elevations"]], 1), axis=0, return_counts=True)
    assert set(map(tuple, rows)) == set(itertools.product(range(5), (10, 20, 350), (30, 60))) and np.all(counts == 3)


# ---------------------------------------------------------------- splits

@pytest.mark.parametrize("text, expected", [("0:150", (0, 150)), ("290:420", (290, 420)), ("-30:30.5", (-30, 30.5)),
                                            ("5:5", (5, 5))])
def test_parse_range(text, expected):
    assert sn.parse_range(text, "--flag") == expected


@pytest.mark.parametrize("text", ["", ":", "5", "0-150", "1:2:3", "a:b", "nan:3", "3:nan", "0:inf", "-inf:0", "150:0",
                                  "1e999:1e999"])
def test_parse_range_refuses_what_is_no_range(text):
    with pytest.raises(sn.InputError, match="^--flag ") as error:
        sn.parse_range(text, "--flag")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("train, test", [((0, 150), (200, 330)), ((290, 420), (90, 200)), ((-30, 40), (60, 280)),
                                         ((300, 400), (60, 280)),
                                         ((60, 280), (300, 400)), ((7, 7), (8, 366))])
def test_split_by_azimuth_on_the_circle(train, test):
    azimuths = np.arange(-720, 720)
    masks = sn.split_by_azimuth(azimuths, train, test)
    for mask, (low, high) in zip(masks, (train, test)):
        inside = {degree % 360 for degree in range(low, high + 1)}                             # ends included
        assert np.array_equal(mask, [azimuth % 360 in inside for azimuth in azimuths])
    assert not (masks[0] & masks[1]).any()


def test_ends_are_in_although_numbers_are_rounded():
    low, high = 0.1, 0.1 + 0.7
    azimuths = np.linspace(low, high, 8)
    assert sn.split_by_azimuth(azimuths % 360, (low, high), (200, 330))[0].all()
    assert sn.split_by_azimuth((azimuths - 1) % 360, (low - 1, high - 1), (200, 330))[0].all()
    assert sn.split_by_elevation(azimuths, (low, high), (45, 70))[0].all()


@pytest.mark.parametrize("one, other", [((0, 150), (150, 330)), ((0, 150), (100, 330)), ((0, 150), (20, 30)),
                                        ((290, 420), (50, 200)),
                                        ((290, 420), (60, 290)), ((0, 150), (330, 360)), ((0, 150), (360, 370)),
                                        ((0, 150), (-50, 0)),
                                        ((5, 5), (5, 5)), ((5, 5), (365, 365)), ((0, 359), (359.5, 360))])
def test_azimuth_ranges_that_meet_are_refused_in_either_order(one, other):
    for train, test in (one, other), (other, one):
        with pytest.raises(sn.InputError, match="overlap.*--train-azimuths"):
            sn.split_by_azimuth(np.arange(10), train, test)


@pytest.mark.parametrize("ranges", [((0, 360), (1, 2)), ((0, 1), (100, 500)), ((0, 10), (30, 20))])
def test_azimuth_ranges_that_go_round_the_circle_or_backwards_are_refused(ranges):
    with pytest.raises(sn.InputError, match="must span"):
        sn.split_by_azimuth(np.arange(10), *ranges)


CONFIGS = [{}, dict(split="elevation"), dict(train_azimuths="290:420", test_azimuths="100:250", n_train_views=4, n_test_views=7),
           dict(n_elev=1, n_train_views=1, n_test_views=1), dict(train_azimuths="-40:40", test_azimuths="60:280"),
           dict(split="elevation", train_elevations="60:70", test_elevations="20:50", n_elev=4),
           dict(train_azimuths="0.1:0.8", test_azimuths="200.3:330.7", n_train_views=8, n_test_views=11)]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_no_held_out_viewpoint_is_a_training_viewpoint(changes):
    config = sn.Config(n_per_combo=2, n_test_per_combo=1, **changes)
    data = sn.load_data(config)
    views = {name: set(zip(data[name]["azimuths"].round(6), data[name]["elevations"].round(6))) for name in PARTS}
    assert data["source"] == "synthetic" and views["familiar"] == views["train"] and not views["train"] & views["held_out"]
    elevations, angle = config.n_elev, 0 if config.split == "azimuth" else 1
    n_test_views = config.n_test_views if config.split == "azimuth" else config.n_train_views
    assert (len(views["train"]), len(views["held_out"])) == (config.n_train_views * elevations, n_test_views * elevations)
    assert [len(data[name]["labels"]) for name in PARTS] == [5 * k * len(views[name]) for name, k in zip(PARTS, (2, 1, 1))]
    apart = [abs((a[angle] - b[angle] + 180) % 360 - 180) for a in views["train"] for b in views["held_out"]]
    assert min(apart) > 4.9
    same = [{view[1 - angle] for view in views[name]} for name in PARTS]                       # the other angle is no difference
    assert same[0] == same[2]


def test_same_seed_same_bits_and_other_seed_other_noise(data):
    again, other = sn.load_data(sn.Config()), sn.load_data(sn.Config(seed=1))
    for name in PARTS:
        assert all(np.array_equal(data[name][key], again[name][key]) for key in data[name])
        assert np.array_equal(data[name]["labels"], other[name]["labels"])
        assert not np.array_equal(data[name]["images"], other[name]["images"])


def test_no_test_image_is_a_training_image(data):
    flat = {name: data[name]["images"].reshape(-1, 1024) for name in PARTS}
    every = np.concatenate(list(flat.values()))
    assert len(np.unique(every, axis=0)) == len(every)
    view = {name: (data[name]["labels"] == 2) & (data[name]["azimuths"] == 30) & (data[name]["elevations"] == 50)
            for name in PARTS[:2]}
    a, b = (flat[name][mask] for name, mask in view.items())
    assert len(a) and len(b) and 0.02 < np.abs(a[0] - b[0]).std() and np.corrcoef(a[0], b[0])[0, 1] > 0.9   # the view is the same


# ---------------------------------------------------------------- settings that depend on the network or the data

def test_what_is_given_wins_and_the_rest_comes_from_the_recipe():
    for model, source in itertools.product(sn.MODELS, sn.RANGES):
        config = sn.resolved(sn.Config(model=model, data=source))
        assert {name: getattr(config, name) for name in sn.RECIPES[model]} == sn.RECIPES[model]
        assert {name: getattr(config, name) for name in sn.RANGES[source]} == sn.RANGES[source]
        assert None not in dataclasses.asdict(config).values() and sn.resolved(config) == config
        given = {name: 0 if isinstance(value, float) else value for name, value in sn.RECIPES[model].items()}
        config = sn.resolved(sn.Config(model=model, data=source, test_azimuths="1:2", **given))
        assert {name: getattr(config, name) for name in given} == given and config.test_azimuths == "1:2"
    assert sn.RANGES["smallnorb"] == dict(train_azimuths="300:400", test_azimuths="60:280")
    assert sn.RECIPES.keys() == set(sn.MODELS)


# ---------------------------------------------------------------- epochs

def numbered(n, source="synthetic"):
    """Training data whose images say which they are, with a pixel lit in the middle"""
    images = np.zeros((n, 32, 32, 1), np.float32)
    images[:, 16, 16, 0] = 1 + np.arange(n)
    return {"source": source, "train": {"images": images, "labels": np.arange(n) % 5}}


def epoch(n=100, number=0, **changes):
    parts = list(sn.epoch_samples(numbered(n), number, tiny(**changes)))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, [len(part["labels"]) for part in parts]


def test_an_epoch_is_a_permutation_in_chunks_of_whole_batches(monkeypatch):
    monkeypatch.setattr(sn, "CHUNK", 64)                                                       # one batch of 30, less than three
    samples, sizes = epoch(batch_size=30)
    order = samples["images"].max((1, 2, 3)).astype(int) - 1
    assert sizes == [60, 40] and sorted(order) == list(range(100)) and list(order) != sorted(order)
    assert np.array_equal(samples["labels"], order % 5)
    assert epoch(batch_size=200)[1] == [100]


def test_epochs_differ_are_reproducible_and_do_not_depend_on_settings_of_others():
    first, _ = epoch()
    again, _ = epoch()
    assert all(np.array_equal(first[name], again[name]) for name in first)
    for other in (epoch(number=1)[0], epoch(seed=2)[0]):
        assert not np.array_equal(first["labels"], other["labels"]) and not np.array_equal(first["keep"], other["keep"])
    assert np.array_equal(first["labels"], epoch(dropout=0.0, max_shift=2)[0]["labels"])


@pytest.mark.parametrize("max_shift", [0, 1, 3])
def test_training_images_are_shifted_by_every_amount_equally_often(max_shift):
    images = epoch(2500, max_shift=max_shift)[0]["images"]
    y, x = (np.argmax(images.max(axis)[..., 0], 1) - 16 for axis in (2, 1))
    assert np.all(images.max((1, 2, 3)) > 0)                                                   # nothing leaves the image
    sides = 2 * max_shift + 1
    counts = np.zeros((sides, sides))
    np.add.at(counts, (y + max_shift, x + max_shift), 1)
    assert counts.sum() == 2500 and np.all(np.abs(counts - 2500 / sides ** 2) <= 5 * (2500 / sides ** 2) ** 0.5)


@pytest.mark.parametrize("model", sn.MODELS)
def test_the_dropout_mask_drops_its_share_and_keeps_the_mean(model):
    config = tiny(model=model, dropout=0.25)
    keep = epoch(1000, model=model, dropout=0.25)[0]["keep"]
    assert keep.shape == (1000, sn.n_dropped(config)) and keep.dtype == np.float32
    np.testing.assert_allclose(np.unique(keep), [0, 1 / 0.75], rtol=1e-6)
    sd = (0.75 * 0.25 / keep.size) ** 0.5
    assert abs((keep > 0).mean() - 0.75) < 5 * sd and len(np.unique(keep, axis=0)) > 1
    assert np.abs((keep > 0).mean(0) - 0.75).max() < 0.1
    assert "keep" not in epoch(model=model, dropout=0.0)[0]


@pytest.mark.parametrize("n_epochs, margins", [(8, np.linspace(0.2, 0.9, 8)), (2, [0.2, 0.9]), (1, [0.2])])
def test_the_margin_rises_in_a_straight_line(n_epochs, margins):
    for number, margin in enumerate(margins):
        samples, _ = epoch(20, number, n_epochs=n_epochs)
        np.testing.assert_allclose(samples["margin"], margin, rtol=1e-6)
        assert samples["margin"].shape == (20,)


def test_to_batch_keeps_labels_whole_numbers_and_makes_the_rest_floats():
    samples = {"images": np.arange(12).reshape(3, 4), "labels": np.array([2, 0, 1]), "keep": np.ones((3, 2))}
    batch = sn.to_batch(samples, np.array([2, 0]))
    assert {name: a.dtype for name, a in batch.items()} == {"images": np.float32, "labels": np.int64, "keep": np.float32}
    np.testing.assert_array_equal(batch["images"], [[8, 9, 10, 11], [0, 1, 2, 3]])
    np.testing.assert_array_equal(batch["labels"], [1, 2])


# ---------------------------------------------------------------- smallNORB

@pytest.fixture(scope="module")
def norb(tmp_path_factory):
    """Six files of 160 rows -> folder, their arrays"""
    folder = tmp_path_factory.mktemp("norb")
    return folder, write_norb(folder, 160)


@pytest.mark.parametrize("split, angle, train, held_out", [
    ("azimuth", 2, {0, 2, 4, 30, 32, 34}, set(range(6, 30, 2))), ("elevation", 1, {0, 1, 2}, {3, 4, 5, 6, 7, 8})])
def test_smallnorb_is_split_as_in_the_paper(norb, split, angle, train, held_out):
    """Training viewpoints of the training toys; the same and the others of the test toys"""
    folder, files = norb
    data = sn.load_data(sn.Config(data="smallnorb", norb_dir=str(folder), split=split))
    assert data["source"] == "smallnorb"
    for name, file, codes in (("train", "train", train), ("familiar", "test", train), ("held_out", "test", held_out)):
        rows = np.flatnonzero(np.isin(files[file, "info"][:, angle], sorted(codes)))
        assert len(rows) and np.array_equal(data[name]["labels"], files[file, "cat"][rows])
        assert np.array_equal(data[name]["images"], sn.halve(files[file, "dat"][rows]))
        assert np.array_equal(data[name]["azimuths"], 10 * files[file, "info"][rows, 2])
    assert len(data["familiar"]["labels"]) + len(data["held_out"]["labels"]) == 160


def test_smallnorb_is_cropped_at_random_in_training_and_in_the_middle_in_tests(norb):
    config = tiny(data="smallnorb", norb_dir=str(norb[0]), train_azimuths="300:400", test_azimuths="60:280")
    data = sn.load_data(config)
    part, = sn.epoch_samples(data, 0, config)
    order = sn.rng_for(config.seed, "batches", 0).permutation(len(data["train"]["labels"]))
    assert part["images"].shape == (len(order), 32, 32, 2) and part["images"].dtype == np.float32
    expected = sn.crop_batch(data["train"]["images"], order, sn.rng_for(config.seed, "batches", 0, 0))
    assert np.array_equal(part["images"], expected) and np.array_equal(part["labels"], data["train"]["labels"][order])
    first, second = (next(sn.epoch_samples(data, number, config))["images"] for number in (0, 1))
    assert len(np.unique(np.concatenate([first, second]).reshape(2 * len(order), -1), axis=0)) == 2 * len(order)
    test = np.concatenate([part["images"] for part in sn.prepared(data["held_out"], "smallnorb")])
    whole = data["held_out"]["images"].astype(float)
    whole = (whole - whole.mean((1, 2, 3), keepdims=True)) / whole.std((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(test, whole[:, 8:40, 8:40], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", ["synthetic", "smallnorb"])
def test_test_images_come_in_chunks_and_in_order(source, monkeypatch, rng):
    monkeypatch.setattr(sn, "CHUNK", 4)
    side, channels = (48, 2) if source == "smallnorb" else (32, 1)
    samples = {"images": rng.integers(0, 256, (10, side, side, channels), np.uint8), "labels": np.arange(10)}
    parts = list(sn.prepared(samples, source))
    assert [len(part["images"]) for part in parts] == [4, 4, 2]
    assert np.array_equal(np.concatenate([part["labels"] for part in parts]), np.arange(10))
    assert all(part["images"].shape[1:] == (32, 32, channels) for part in parts)


def test_a_range_without_images_is_refused(norb):
    for changes, name in ((dict(train_azimuths="301:310"), "train"), (dict(test_azimuths="61:79"), "held-out")):
        with pytest.raises(sn.InputError, match=f"no {name} images.*widen"):
            sn.load_data(sn.Config(data="smallnorb", norb_dir=str(norb[0]), **changes))


def test_the_toy_data_are_what_the_other_tests_take_them_for():
    assert [len(sn.load_data(TINY)[name]["labels"]) for name in PARTS] == [80, 20, 10]
