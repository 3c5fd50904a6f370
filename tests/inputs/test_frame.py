"""Maps lie in a photo where the model looked, to a fraction of a pixel."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitreous.inputs.patch_geometry import Frame
from vitreous.models.preprocessing import Preprocessing
from vitreous.pictures import Look
from vitreous.pictures.base_image import BaseImage

HALF = (0.5, 0.5, 0.5)


def preprocessing(**options):
    return Preprocessing(**{"image_size": (48, 48), "mean": HALF, "std": HALF, **options})


SETTINGS = [
    {},
    {"resize_size": (54, 54)},
    {"resize": "squash", "resize_size": (60, 60)},
    {"image_size": (40, 56), "resize_size": (50, 60), "crop_rounding": "down"},
    {"resize_size": (40, 40)},  # smaller than the crop: a border that is not in the photo
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", [(120, 160), (160, 120), (100, 100), (37, 53)])
def test_the_frame_is_where_the_displayed_picture_comes_from(settings, size):
    """Photos whose pixels tell their own position: what the model sees tells where it comes from."""
    chosen = preprocessing(**settings, interpolation="bilinear")
    height, width = size
    frame = chosen.frame(size)
    for axis, (length, start, stop) in enumerate(((height, frame.top, frame.bottom), (width, frame.left, frame.right))):
        ramp = np.linspace(0, 255, length)
        pixels = np.broadcast_to(ramp[:, None] if axis == 0 else ramp, size)
        photo = Image.fromarray(np.repeat(np.rint(pixels).astype(np.uint8)[..., None], 3, axis=-1))
        seen = np.asarray(chosen.displayed(photo), dtype=np.float64)[..., 0]
        line = seen[:, seen.shape[1] // 2] if axis == 0 else seen[seen.shape[0] // 2]
        count = len(line)
        expected = start + (np.arange(count) + 0.5) / count * (stop - start) - 0.5
        # Away from the edges, where resampling is cut off and borders are black; 1 of 255 for rounding to bytes, twice.
        inside = (expected > 0.06 * length) & (expected < 0.94 * length)
        assert inside.sum() > count / 2
        assert np.abs(line / 255 * (length - 1) - expected)[inside].max() < 1.1 * length / 255 + 0.05


@pytest.mark.parametrize("smooth", [True, False])
def test_a_whole_frame_is_plain_interpolation(smooth):
    maps = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mode = {"mode": "bilinear", "align_corners": False} if smooth else {"mode": "nearest-exact"}
    expected = torch.nn.functional.interpolate(maps, size=(33, 47), **mode)
    assert torch.allclose(Frame.whole((33, 47)).place(maps, smooth=smooth), expected, atol=1e-12)


def test_cells_are_rectangles_between_their_edges():
    frame = Frame((10, 20), 1, 4, 9, 16)
    assert (frame.rows, frame.columns) == (slice(1, 9), slice(4, 16))
    placed = frame.place(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), smooth=False)
    assert torch.equal(placed, torch.tensor([[1.0, 2, 3], [4, 5, 6]]).repeat_interleave(4, 0).repeat_interleave(4, 1))


def test_a_border_that_the_photo_does_not_have_is_left_out():
    frame = Frame((10, 10), -5, -5, 15, 15)
    assert (frame.rows, frame.columns) == (slice(0, 10), slice(0, 10))
    rows = torch.arange(4.0)[:, None].expand(4, 4)
    assert frame.place(rows, smooth=False)[:, 0].tolist() == [1.0] * 5 + [2.0] * 5


@pytest.mark.parametrize(
    ("start", "stop", "seen"),
    [(4.6, 5.3, 4), (4.9, 5.2, 5), (2.55, 2.6, 2), (-0.3, 0.2, 0), (9.6, 10.0, 9), (12, 13, 9)],
)
def test_what_is_thinner_than_a_pixel_is_one_pixel(start, stop, seen):
    frame = Frame((10, 10), start, start, stop, stop)
    assert frame.rows == frame.columns == slice(seen, seen + 1)
    maps = torch.arange(4.0).view(2, 2)
    for smooth in (True, False):
        (value,) = frame.place(maps, smooth=smooth).flatten().tolist()
        assert 0 <= value <= 3


@pytest.mark.parametrize("size", [(1, 1000), (3000, 1), (1, 1), (2, 997)])
def test_a_strip_of_a_photo_can_be_drawn_on(size):
    backdrop = BaseImage(Image.new("RGB", size[::-1]), preprocessing(resize_size=(54, 54)).frame(size))
    for shown in (backdrop, backdrop.fitted(420, 420), backdrop.fitted(420, 560)):
        for look in (Look(smooth=True), Look(smooth=False)):
            drawn = shown.lay(torch.arange(9.0), (3, 3), signed=False, look=look)
            assert drawn.size == shown.photo.size


def test_scaling_a_frame_keeps_its_place():
    frame = Frame((100, 200), 10, 20, 90, 180).scaled((50, 400))
    assert (frame.top, frame.left, frame.bottom, frame.right) == (5, 40, 45, 360)


def test_only_what_the_model_saw_is_coloured_and_the_size_is_the_photos():
    photo = Image.new("RGB", (90, 60), "#808080")
    frame = preprocessing(resize_size=(60, 60)).frame((60, 90))
    drawn = BaseImage(photo, frame).lay(torch.ones(9) * torch.arange(9), (3, 3), signed=False, look=Look(smooth=False))
    assert drawn.size == photo.size
    pixels = np.asarray(drawn).astype(int)
    coloured = np.ptp(pixels, axis=-1) > 3
    expected = np.zeros((60, 90), dtype=bool)
    expected[6:54, 21:69] = True
    assert not (coloured & ~expected).any()
    assert coloured[expected].mean() > 0.8  # the lowest cell is transparent
    assert (pixels[0, 0] == round(128 * 0.4)).all()  # dimmed


def test_maps_that_share_a_span_are_on_one_scale():
    backdrop = BaseImage(Image.new("RGB", (8, 8), "#808080"), Frame.whole((8, 8)))
    look = Look(smooth=False)
    weak, strong = torch.tensor([0.0, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.5, 0.0, 1.0])
    first, second = (
        np.asarray(backdrop.lay(scores, (2, 2), signed=True, look=look, span=(0.0, 1.0))) for scores in (weak, strong)
    )
    assert np.array_equal(first[0, 7], second[0, 7])
    alone = np.asarray(backdrop.lay(weak, (2, 2), signed=True, look=look))
    assert not np.array_equal(first[0, 7], alone[0, 7])
