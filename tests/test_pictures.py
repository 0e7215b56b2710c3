"""Pictures as objects are read as their files are: every mode of PIL, with transparency, turned upright."""
import io

import multimnist_capsnet as mc
from lab import data
from lab.messages import InputError

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

import make_idx
from predict import load, predict

IMAGES, LABELS, _ = mc.synthesize_digits(20, 11)
BIG = [np.kron(image, np.ones((3, 3), np.uint8)) for image in IMAGES]
MODES = {"P": "png", "L": "png", "1": "png", "RGB": "png", "RGBA": "png", "LA": "png", "CMYK": "tiff", "YCbCr": "tiff",
         "HSV": None, "La": None, "I;16": "png", "I": "tiff", "F": "tiff", "PA": None}


def picture(gray, mode):
    """Return a dark digit on light paper in a mode of PIL; in P with colors that are not in order, in LA, PA and RGBA
    on nothing"""
    ink = Image.fromarray(gray)
    dark = Image.fromarray(255 - gray)
    if mode == "I;16":
        return Image.fromarray((255 - gray).astype(np.uint16) * 257)
    if mode in ("I", "F"):
        return Image.fromarray((255 - gray).astype(np.int32 if mode == "I" else np.float32))
    if mode == "P":
        order = np.random.default_rng(0).permutation(256)
        found = Image.fromarray(order[(255 - gray)].astype(np.uint8)).convert("P")
        palette = np.zeros((256, 3), np.uint8)
        palette[order] = np.arange(256)[:, None]
        found.putpalette(palette.tobytes())
        return found
    if mode == "La":                                                    # premultiplied alpha
        return picture(gray, "LA").convert("La")
    if mode in ("LA", "RGBA", "PA"):
        found = Image.new(mode, ink.size)
        found.putalpha(ink)
        return found
    return dark.convert(mode)


@pytest.fixture(scope="module")
def network():
    return load(ROOT / "weights/affnist_cnn-gap.npz")


@pytest.mark.parametrize("mode", MODES)
def test_a_picture_of_pil_is_read_as_its_file_is(network, tmp_path, mode):
    pictures = [picture(gray, mode) for gray in BIG]
    result = predict(network, pictures)
    expected = predict(network, [255 - gray for gray in BIG])
    assert (result.classes == expected.classes).mean() >= 0.95 and (result.classes == LABELS).mean() >= 0.9
    assert predict(network, pictures[3]).classes.tolist() == [result.classes[3]]
    if MODES[mode]:
        pictures[0].save(tmp_path / f"x.{MODES[mode]}")
        of_file = data.read_picture(tmp_path / f"x.{MODES[mode]}")
        np.testing.assert_allclose(data.gray_levels(*data.pixels_of(pictures[0])), of_file, atol=0.01)
    make_idx.make(tmp_path / "data", (pictures, LABELS % 2))
    images = mc.read_idx_folder(tmp_path / "data")["test"][0]
    assert images[:, 4:24, 4:24].max((1, 2)).min() > 200 and 20 < images.mean() < 80


def test_pictures_of_several_kinds_and_arrays_are_taken_together(network):
    """Also from a generator, or in an array of objects; one that is turned in its EXIF data is upright"""
    mixed = [picture(BIG[0], "P"), 255 - BIG[1], picture(BIG[2], "RGBA"), np.pad(255 - BIG[3], 4, constant_values=255)]
    expected = predict(network, [255 - gray for gray in BIG[:4]]).classes.tolist()
    several = np.empty(4, object)
    several[:] = mixed
    assert predict(network, mixed).classes.tolist() == expected
    assert predict(network, (each for each in mixed)).classes.tolist() == expected
    assert predict(network, several).classes.tolist() == expected
    exif = Image.Exif()
    exif[data.ORIENTATION] = 6                                          # to be turned by 90 degrees
    turned, file = Image.fromarray(np.rot90(255 - BIG[0])), io.BytesIO()
    turned.save(file, "jpeg", exif=exif)
    np.testing.assert_allclose(data.gray_levels(*data.pixels_of(Image.open(file))), 1 - BIG[0] / 255, atol=0.2)


def test_transparent_arrays_are_on_paper(network):
    """A drawing that is black and transparent has no other gray levels"""
    expected = predict(network, [255 - gray for gray in BIG]).classes
    ink = np.stack(BIG)
    black = np.zeros((*ink.shape, 4), np.uint8)
    black[..., 3] = ink
    for arrays in (black, black / 255, [each for each in black]):
        assert (predict(network, arrays).classes == expected).mean() >= 0.95


class Tensor:
    """As of PyTorch: with a gradient it refuses to become an array"""

    def __init__(self, array, has_gradient=True):
        self.array, self.has_gradient = array, has_gradient
        self.shape, self.dtype = array.shape, array.dtype

    def __array__(self, *arguments, **words):
        if self.has_gradient:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad")
        return self.array

    def __iter__(self):
        return (Tensor(each) for each in self.array)

    def __len__(self):
        return len(self.array)

    def detach(self):
        return Tensor(self.array, False)

    def cpu(self):
        return self


class Stubborn(Tensor):
    detach = cpu = property()


def test_a_tensor_with_a_gradient_is_its_numbers(network, tmp_path):
    """What cannot become an array is refused in one line"""
    expected = predict(network, np.stack(IMAGES)).classes.tolist()
    assert predict(network, Tensor(np.stack(IMAGES))).classes.tolist() == expected
    assert predict(network, [Tensor(image) for image in IMAGES]).classes.tolist() == expected
    make_idx.make(tmp_path / "data", (Tensor(np.stack(IMAGES)), Tensor(LABELS % 2)))
    for images, labels in ((Stubborn(IMAGES), LABELS), (IMAGES, Stubborn(LABELS))):
        with pytest.raises(InputError, match="type Stubborn becomes no array .*requires grad.*Give a NumPy array"):
            make_idx.make(tmp_path / "x", (images, labels))
