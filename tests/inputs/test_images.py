"""Photos come out upright and in 8-bit RGB, or with an error that names the file."""

import io
import os
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from vitreous.errors import ImageError, InputError
from vitreous.inputs import images
from vitreous.inputs.images import find_images, read_image


def colour(image, x=0, y=0):
    assert image.mode == "RGB"
    return image.getpixel((x, y))


def error_of(source, name):
    with pytest.raises(ImageError) as caught:
        read_image(source)
    message = str(caught.value)
    assert str(name) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", [str, Path, lambda path: path.open("rb"), Image.open])
def test_path_file_and_pillow_image_give_the_same_photo(tmp_path, photo, kind):
    photo.save(tmp_path / "a.png")
    source = kind(tmp_path / "a.png")
    assert np.array_equal(np.asarray(read_image(source)), np.asarray(photo))
    if hasattr(source, "close"):
        source.close()


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA"])
def test_pixels_in_an_array_are_those_of_the_pillow_image(photo, mode):
    image = photo.convert(mode)
    image.putpixel((1, 2), 77 if mode == "L" else (77, 9, 200, 100)[: len(mode)])
    assert np.array_equal(np.asarray(read_image(np.asarray(image))), np.asarray(read_image(image)))


NO_PHOTOS = {
    "fractions": (np.zeros((4, 5, 3)), r"uint8 pixels .* not float64 \(4, 5, 3\)"),
    "16 bits": (np.zeros((4, 5), np.uint16), "not uint16"),
    "truth values": (np.zeros((4, 5), bool), "not bool"),
    "channels first": (np.zeros((3, 40, 50), np.uint8), r"\(3, 40, 50\)"),
    "a batch": (np.zeros((1, 4, 5, 3), np.uint8), r"\(1, 4, 5, 3\)"),
    "a row": (np.zeros(4, np.uint8), r"\(4,\)"),
    "a number in an array": (np.array(3, np.uint8), r"\(\)"),
    "no rows": (np.zeros((0, 5, 3), np.uint8), "no pixels"),
    "a tensor": (torch.zeros(3, 4, 5), "not Tensor"),
    "nothing": (None, "not NoneType"),
    "a number": (3, "not int"),
    "a list": ([[0, 1], [2, 3]], "not list"),
}


@pytest.mark.parametrize("case", NO_PHOTOS)
def test_what_is_no_photo(case):
    source, reason = NO_PHOTOS[case]
    with pytest.raises(InputError, match=reason):
        read_image(source)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(tmp_path, orientation):
    upright = Image.new("RGB", (40, 24), "blue")
    upright.paste("red", (0, 0, 16, 16))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "turned.png", exif=exif)
    assert np.array_equal(np.asarray(read_image(tmp_path / "turned.png")), np.asarray(upright))


def test_damaged_exif_does_not_lose_the_photo(tmp_path, photo):
    photo.save(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert read_image(tmp_path / "a.jpg").size == photo.size


def test_cmyk_becomes_the_same_colours(tmp_path):
    Image.new("RGB", (32, 32), (200, 40, 90)).convert("CMYK").save(tmp_path / "print.jpg", quality=95)
    assert np.allclose(colour(read_image(tmp_path / "print.jpg")), (200, 40, 90), atol=4)


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bit_gray_is_scaled_not_clipped(tmp_path, suffix):
    deep = np.array([[0, 257 * 10], [257 * 128, 65535]], dtype=np.uint16)
    path = tmp_path / f"deep.{suffix}"
    if suffix == "pgm":
        path.write_bytes(b"P5\n2 2\n65535\n" + deep.astype(">u2").tobytes())
    else:
        Image.fromarray(deep).save(path)
    assert np.asarray(read_image(path))[..., 0].tolist() == [[0, 10], [128, 255]]


@pytest.mark.parametrize("suffix", ["png", "pgm"])
def test_sixteen_bit_gray_that_is_dark_stays_dark(tmp_path, suffix):
    dark = np.array([[0, 50], [100, 257]], dtype=np.uint16)
    path = tmp_path / f"dark.{suffix}"
    if suffix == "pgm":
        path.write_bytes(b"P5\n2 2\n65535\n" + dark.astype(">u2").tobytes())
    else:
        Image.fromarray(dark).save(path)
    assert np.asarray(read_image(path))[..., 0].tolist() == [[0, 0], [0, 1]]


def test_sixteen_bit_colour_keeps_its_colours(tmp_path):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = np.array([[[65535, 32896, 0]]], dtype=">u2")
    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" + pixels.tobytes())) + chunk(b"IEND", b"")
    (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    assert colour(read_image(tmp_path / "deep.png")) == (255, 128, 0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[0.0, 7.0, 255.0]], np.float32), [0, 7, 255]),
        (np.array([[-2.0, 0.0, 2.0]], np.float32), [0, 128, 255]),
        (np.array([[3.0, 3.0, 3.0]], np.float32) * 1e6, [0, 0, 0]),
        (np.array([[0, 7, 255]], np.int32), [0, 7, 255]),
        (np.array([[0, 257, 65535]], np.int32), [0, 1, 255]),
        (np.array([[-(2**30), 0, 2**30]], np.int32), [0, 128, 255]),
    ],
)
def test_float_and_32_bit_gray_are_scaled(tmp_path, values, expected):
    Image.fromarray(values).save(tmp_path / "deep.tif")
    assert np.asarray(read_image(tmp_path / "deep.tif"))[0, :, 0].tolist() == expected


def test_gray_that_is_not_finite_is_refused(tmp_path):
    Image.fromarray(np.array([[0.0, np.nan]], np.float32)).save(tmp_path / "nan.tif")
    assert "finite" in error_of(tmp_path / "nan.tif", "nan.tif")


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "LA", "La", "PA", "RGBA", "RGBa", "RGBX"]
)
def test_every_usual_pillow_mode_gives_rgb(mode):
    opaque = Image.new("RGB", (8, 8), "white")
    steps = {"La": ("LA", "La"), "RGBa": ("RGBA", "RGBa"), "PA": ("P", "PA")}.get(mode, (mode,))
    for step in steps:
        opaque = opaque.convert(step)
    assert np.allclose(colour(read_image(opaque)), 255, atol=2)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_laid_on_white(tmp_path, mode):
    black = (0,) * (len(mode) - 1)
    image = Image.new(mode, (2, 1), (*black, 0))
    image.putpixel((1, 0), (*black, 255))
    image.save(tmp_path / "glass.png")
    photo = read_image(tmp_path / "glass.png")
    assert colour(photo) == (255, 255, 255)
    assert colour(photo, 1) == (0, 0, 0)


@pytest.mark.parametrize("suffix", ["png", "gif"])
def test_transparent_palette_entry_is_laid_on_white(tmp_path, suffix):
    image = Image.new("P", (2, 1), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / f"p.{suffix}", transparency=0)
    photo = read_image(tmp_path / f"p.{suffix}")
    assert colour(photo) == (255, 255, 255)
    assert colour(photo, 1) == (200, 100, 50)


def test_transparent_colour_key_is_laid_on_white(tmp_path):
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (9, 9, 9))
    image.save(tmp_path / "key.png", transparency=(1, 2, 3))
    photo = read_image(tmp_path / "key.png")
    assert colour(photo) == (255, 255, 255)
    assert colour(photo, 1) == (9, 9, 9)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "tif", "bmp"])
def test_truncated_file(tmp_path, photo, suffix):
    whole = io.BytesIO()
    photo.save(whole, {"jpg": "jpeg", "tif": "tiff"}.get(suffix, suffix))
    path = tmp_path / f"half.{suffix}"
    path.write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    error_of(path, path)


def test_text_renamed_to_jpg(tmp_path):
    (tmp_path / "note.jpg").write_text("this is not a photo")
    assert "not an image" in error_of(tmp_path / "note.jpg", "note.jpg")


def test_postscript_is_not_handed_to_an_interpreter(tmp_path):
    (tmp_path / "a.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    assert "not an image" in error_of(tmp_path / "a.jpg", "a.jpg")


def test_empty_file(tmp_path):
    (tmp_path / "empty.png").touch()
    assert "empty" in error_of(tmp_path / "empty.png", "empty.png")


def test_image_without_pixels():
    assert "no content" in error_of(Image.new("RGB", (0, 5)), "the image")


def test_missing_file(tmp_path):
    assert "no such file" in error_of(tmp_path / "gone.png", "gone.png")


def test_impossible_file_name():
    error_of("a\0b.png", ".png")


def test_folder(tmp_path):
    assert error_of(tmp_path, tmp_path) == f"{tmp_path}: this is a folder, not an image"


def test_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    assert "regular" in error_of(tmp_path / "pipe.png", "pipe.png")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_no_permission(tmp_path, photo):
    photo.save(tmp_path / "locked.png")
    (tmp_path / "locked.png").chmod(0)
    assert "permission" in error_of(tmp_path / "locked.png", "locked.png")


def test_text_mode_file(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with (tmp_path / "a.txt").open() as file:
        assert "binary" in error_of(file, "a.txt")


def test_too_many_bytes(tmp_path, photo, monkeypatch):
    photo.save(tmp_path / "big.png")
    monkeypatch.setattr(images, "MAX_BYTES", 1000)
    assert "larger" in error_of(tmp_path / "big.png", "big.png")


@pytest.mark.parametrize("edge", [9_000, 60_000])
def test_decompression_bomb_is_refused_by_its_header(tmp_path, edge):
    # 9,000 is above our limit only; Pillow itself refuses 60,000 before we see the size.
    Image.new("1", (1, 1)).save(tmp_path / "bomb.png")
    small = bytearray((tmp_path / "bomb.png").read_bytes())
    small[16:24] = struct.pack(">II", edge, edge)
    small[29:33] = struct.pack(">I", zlib.crc32(small[12:29]))
    (tmp_path / "bomb.png").write_bytes(small)
    assert "pixels, refused" in error_of(tmp_path / "bomb.png", "bomb.png")


def test_folders_are_expanded_sorted_and_files_kept(tmp_path):
    for name in ("b.PNG", "a.jpg", "c.Jpeg", "notes.txt", ".hidden.png"):
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    single = tmp_path / "notes.txt"
    found = find_images([single, tmp_path, str(tmp_path / "a.jpg")])
    assert found == [single, tmp_path / "a.jpg", tmp_path / "b.PNG", tmp_path / "c.Jpeg"]


def test_folder_without_photos(tmp_path):
    with pytest.raises(ImageError, match="no images"):
        find_images([tmp_path])


@pytest.mark.parametrize("kind", [np.uint16, np.float32, np.int32])
def test_deep_gray_is_converted_some_rows_at_a_time(kind, monkeypatch):
    """80 million pixels took 2.6 GB for copies in float64; in portions the result is the same to the bit."""
    values = np.random.default_rng(0).integers(0, 65536, (301, 211)).astype(kind)
    image = Image.fromarray(values)
    whole = read_image(image)
    monkeypatch.setattr(images, "_BAND_PIXELS", 1000)
    assert np.array_equal(np.asarray(read_image(image)), np.asarray(whole))


def test_deep_gray_needs_little_beside_the_picture():
    image = Image.new("I;16", (4000, 5000), 7)
    tracemalloc.start()
    try:
        read_image(image)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # One byte for the gray picture and one band in float64; copies of the whole picture took 26 bytes for each pixel.
    assert peak < 3 * image.width * image.height


@pytest.mark.parametrize("step", ["load", "convert"])
def test_too_little_memory_is_not_called_damage(tmp_path, photo, monkeypatch, step):
    def full(*_):
        raise MemoryError

    photo.save(tmp_path / "photo.png")
    if step == "load":
        monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", full)
    else:
        monkeypatch.setattr(images, "_as_rgb", full)
    with pytest.raises(ImageError, match="there is not enough memory for an image of 301 x 211 pixels"):
        read_image(tmp_path / "photo.png")
