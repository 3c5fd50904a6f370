"""Data sets of files in their original layouts: names, labels, masks, order, fingerprints, and errors."""

import os
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from time_limit import one_minute
from vitreous.datasets import DataError, list_datasets, open_dataset
from vitreous.datasets.imagenet import imagenet_indices, imagenet_names
from vitreous.errors import ImageError, VitreousError

# Neither square nor symmetric, so that a transposed or flipped mask is another one.
REGION = np.zeros((5, 8), dtype=np.uint8)
REGION[0, :] = 1
REGION[1:3, 0] = 1


def photo(file, size=(8, 5), colour=(200, 10, 10)):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file, format="PNG" if file.suffix == ".png" else "JPEG")


def png(file, values, mode=None):
    """Save numbers; of a palette, number 0 is black, as in the masks of VOC, and the others are colours."""
    file.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values)
    if mode == "P":
        image = image.convert("P") if image.mode != "L" else Image.frombytes("P", image.size, image.tobytes())
        image.putpalette([0, 0, 0, *(value for index in range(1, 256) for value in (index, 255 - index, 7))])
    image.save(file)


def text(file, content):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)


def error_of(spec):
    with pytest.raises(DataError) as caught:
        open_dataset(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names_and_labels(data):
    return [(data.name(index), data.load(index).label) for index in range(len(data))]


@pytest.mark.parametrize("header", ["file,class_index", "Filename,label", "image,class", "path,index", "id,target"])
def test_labelled_takes_the_usual_column_names(tmp_path, header):
    photo(tmp_path / "b.jpg")
    photo(tmp_path / "a.jpg")
    text(tmp_path / "labels.csv", f"{header}\nb.jpg,7\na.jpg,0\n")
    assert names_and_labels(open_dataset(f"labelled:{tmp_path}")) == [("b.jpg", 7), ("a.jpg", 0)]


def test_labelled_does_not_take_the_number_of_a_row_for_a_class(tmp_path):
    for name in ("a.jpg", "b.jpg"):
        photo(tmp_path / name)
    text(tmp_path / "labels.csv", "index,file,label\n0,a.jpg,4\n1,b.jpg,3\n")
    assert names_and_labels(open_dataset(f"labelled:{tmp_path}")) == [("a.jpg", 4), ("b.jpg", 3)]


def test_labelled_finds_the_table_above_and_names_of_classes(tmp_path):
    photo(tmp_path / "images" / "x.jpg")
    text(tmp_path / "labels.csv", "file,label\nx.jpg,dog\n")
    text(tmp_path / "class_names.json", '["cat", "dog"]')
    for place in (tmp_path, tmp_path / "images", tmp_path / "labels.csv"):
        data = open_dataset(f"labelled:{place}")
        assert names_and_labels(data) == [("x.jpg", 1)]
        assert data.class_names == ("cat", "dog")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_labelled_takes_a_table_as_spreadsheets_write_it(tmp_path, separator):
    """With a mark in front, carriage returns, quotes, and semicolons where numbers are written with a comma."""
    for name in ("a, b; c.jpg", "d.jpg"):
        photo(tmp_path / name)
    rows = [("File", "Notes", "Class_Index"), ('"a, b; c.jpg"', '"says ""dog"""', "7"), ("d.jpg", "", "0")]
    table = "\ufeff" + "".join(separator.join(row) + "\r\n" for row in rows)
    (tmp_path / "labels.csv").write_bytes(table.encode())
    (tmp_path / "class_names.json").write_bytes('\ufeff["cat", "dog"]'.encode())
    data = open_dataset(f"labelled:{tmp_path}")
    assert names_and_labels(data) == [("a, b; c.jpg", 7), ("d.jpg", 0)]
    assert data.class_names == ("cat", "dog")


def test_labelled_finds_its_photos_where_the_first_one_is_missing(tmp_path):
    """One lost photo is an error of that photo, also where it would have told in which folder the others are."""
    for name in ("b.jpg", "c.jpg"):
        photo(tmp_path / "images" / name)
    text(tmp_path / "labels.csv", f"file,label\na.jpg,0\n{'x' * 300}.jpg,1\nb.jpg,2\nc.jpg,3\n")
    data = open_dataset(f"labelled:{tmp_path}")
    assert [data.load(index).label for index in (2, 3)] == [2, 3]
    with pytest.raises(ImageError, match=r"images/a\.jpg: there is no such file"):
        data.load(0)


def test_labelled_does_not_choose_between_classes_of_one_name(tmp_path):
    photo(tmp_path / "x.jpg")
    text(tmp_path / "labels.csv", "file,label\nx.jpg,crane\n")
    text(tmp_path / "class_names.json", '["tench", "crane", "dog", "crane"]')
    assert "several classes of class_names.json are called 'crane': 1 and 3" in error_of(f"labelled:{tmp_path}")


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("photo,class_index\na.jpg,1\n", "no column names a file"),
        ("file,colour\na.jpg,1\n", "no column names a class"),
        ("file,label\na.jpg,dog\n", "is not a class index"),
        ("file,label\na.jpg,-1\n", "is not a class index"),
        ("file,label\na.jpg,1\na.jpg,2\n", "listed twice"),
        ("file,label\n.,1\n", "inside the data set"),
        pytest.param(f"file,label\na.jpg,{'9' * 5000}\n", "is not a class index", id="5000 digits"),
        ("file,label\n../a.jpg,1\n", "inside the data set"),
        ("file,label\n/etc/a.jpg,1\n", "inside the data set"),
        ("file,label\na.jpg\n", "columns"),
        ("file,label\n", "no rows"),
        ("file,label\nb.jpg,1\n", "none of the 1 images"),
    ],
)
def test_labelled_says_what_is_wrong_with_its_table(tmp_path, table, reason):
    photo(tmp_path / "a.jpg")
    text(tmp_path / "labels.csv", table)
    assert reason in error_of(f"labelled:{tmp_path}")


def test_a_broken_photo_is_an_error_of_that_photo_only(tmp_path):
    photo(tmp_path / "a.jpg")
    text(tmp_path / "b.jpg", "this is no photo")
    text(tmp_path / "labels.csv", "file,label\na.jpg,1\nb.jpg,2\nc.jpg,3\n")
    data = open_dataset(f"labelled:{tmp_path}")
    assert len(data) == 3
    assert data.load(0).image.size == (8, 5)
    for index in (1, 2):
        with pytest.raises(ImageError, match=data.name(index)):
            data.load(index)
    with pytest.raises(IndexError):
        data.load(3)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name, of POSIX")
def test_a_pipe_among_the_photos_is_not_waited_for(tmp_path):
    text(tmp_path / "labels.csv", "file,label\na.jpg,0\nb.jpg,1\n")
    photo(tmp_path / "a.jpg")
    os.mkfifo(tmp_path / "b.jpg")
    data = open_dataset(f"labelled:{tmp_path}")
    assert len(data.fingerprint) == 64
    with pytest.raises(ImageError, match=r"b\.jpg"):
        data.load(1)


def test_fingerprint_follows_content_and_not_place(tmp_path):
    for folder in ("one", "other"):
        photo(tmp_path / folder / "a.jpg")
        text(tmp_path / folder / "labels.csv", "file,label\na.jpg,1\n")
    one, other = (open_dataset(f"labelled:{tmp_path / folder}") for folder in ("one", "other"))
    assert one.fingerprint == other.fingerprint == pickle.loads(pickle.dumps(one)).fingerprint
    text(tmp_path / "other" / "labels.csv", "file,label\na.jpg,2\n")
    assert open_dataset(f"labelled:{tmp_path / 'other'}").fingerprint != one.fingerprint
    photo(tmp_path / "one" / "a.jpg", size=(80, 50))
    assert open_dataset(f"labelled:{tmp_path / 'one'}").fingerprint != one.fingerprint


def test_fingerprint_sees_every_byte_of_a_large_file(tmp_path):
    text(tmp_path / "labels.csv", "file,label\na.bmp,1\n")
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    found = set()
    for row in (0, 12, 20, 40, 63):
        pixels[row] = 255
        Image.fromarray(pixels).save(tmp_path / "a.bmp")
        found.add(open_dataset(f"labelled:{tmp_path}").fingerprint)
    assert len(found) == 5


def test_a_pickled_set_is_small_and_opens_from_another_folder(tmp_path, monkeypatch):
    photo(tmp_path / "a.jpg")
    text(tmp_path / "labels.csv", "file,label\na.jpg,1\n" + "".join(f"x{n}.jpg,1\n" for n in range(2000)))
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(open_dataset("labelled:."))
    assert len(pickled) < 1000
    monkeypatch.chdir("/")
    assert pickle.loads(pickled).load(0).name == "a.jpg"


def pets_original(root):
    for name in ("Abyssinian_1", "american_bulldog_2"):
        photo(root / "images" / f"{name}.jpg")
        png(root / "annotations" / "trimaps" / f"{name}.png", np.where(REGION, 1, 2).astype(np.uint8))
    trimap = np.where(REGION, 1, 2).astype(np.uint8)
    trimap[4, 7] = 3
    png(root / "annotations" / "trimaps" / "Abyssinian_1.png", trimap)
    text(
        root / "annotations" / "list.txt",
        "#Image CLASS-ID SPECIES BREED ID\nAbyssinian_1 1 1 1\namerican_bulldog_2 2 2 1\n",
    )
    return root


def test_pets_in_the_original_layout(tmp_path):
    data = open_dataset(f"pets:{pets_original(tmp_path)}")
    assert names_and_labels(data) == [("Abyssinian_1", 0), ("american_bulldog_2", 1)]
    assert data.classes == 37  # whichever of them are there
    sample = data.load(0)
    expected = REGION.astype(np.int16)
    expected[4, 7] = -1
    assert sample.mask.dtype == np.int16
    assert np.array_equal(sample.mask, expected)
    assert sample.objects == (0,)
    text(tmp_path / "annotations" / "test.txt", "american_bulldog_2 2 2 1\n")
    assert names_and_labels(open_dataset(f"pets:{tmp_path}")) == [("american_bulldog_2", 1)]


def test_a_trimap_of_one_bit_holds_numbers(tmp_path):
    """A program that saves space may store an animal that fills its photo as one bit per pixel."""
    pets_original(tmp_path)
    Image.new("1", (8, 5), 1).save(tmp_path / "annotations" / "trimaps" / "Abyssinian_1.png")
    assert (open_dataset(f"pets:{tmp_path}").load(0).mask == 1).all()


def test_pets_say_what_is_missing(tmp_path):
    pets_original(tmp_path)
    png(tmp_path / "annotations" / "trimaps" / "Abyssinian_1.png", REGION)
    with pytest.raises(DataError, match="1, 2 and 3 only, not 0"):
        open_dataset(f"pets:{tmp_path}").load(0)
    shutil.rmtree(tmp_path / "annotations" / "trimaps")
    assert "no folder annotations/trimaps" in error_of(f"pets:{tmp_path}")
    shutil.rmtree(tmp_path / "annotations")
    message = error_of(f"pets:{tmp_path}")
    assert "annotations/test.txt" in message
    assert "robots.ox.ac.uk" in message


@pytest.mark.shared
def test_the_squashed_pets(shared):
    data = open_dataset(f"pets:{shared / 'data' / 'pets' / 'seg'}")
    sample = data.load(1)
    assert (len(data), sample.name, sample.label, sample.objects) == (500, "american_pit_bull_terrier_93", 180, (180,))
    assert set(np.unique(sample.mask)) == {-1, 0, 1}
    assert len(data.class_names) == data.classes == 1000


@pytest.mark.parametrize(("column", "classes"), [("breed_index", 37), ("imagenet_index", 1000), ("label", None)])
def test_a_copy_of_the_pets_says_what_its_labels_count(tmp_path, column, classes):
    photo(tmp_path / "images" / "a.jpg")
    png(tmp_path / "trimaps" / "a.png", np.where(REGION, 1, 2).astype(np.uint8))
    text(tmp_path / "labels.csv", f"id,{column}\na,3\n")
    assert open_dataset(f"pets:{tmp_path}").classes == classes


@pytest.mark.parametrize("name", ["a.jpg", "images/a.jpg", "images\\a.jpg"])
def test_a_copy_of_the_pets_may_list_files(tmp_path, name):
    photo(tmp_path / "images" / "a.jpg")
    png(tmp_path / "trimaps" / "a.png", np.where(REGION, 1, 2).astype(np.uint8))
    text(tmp_path / "labels.csv", f"file,label\n{name},3\na.png,4\n")
    assert "a is listed twice" in error_of(f"pets:{tmp_path}")
    text(tmp_path / "labels.csv", f"file,label\n{name},3\n")
    sample = open_dataset(f"pets:{tmp_path}").load(0)
    assert (sample.name, sample.label) == ("a", 3)
    assert np.array_equal(sample.mask, REGION)


def test_masks_in_two_folders_or_side_by_side(tmp_path):
    for name in ("b", "a"):
        photo(tmp_path / "two" / "images" / f"{name}.jpg")
        png(tmp_path / "two" / "masks" / f"{name}.png", REGION * 255)
        photo(tmp_path / "side" / f"{name}.jpg")
        png(tmp_path / "side" / f"{name}_mask.png", REGION * 9, mode="P")
    text(tmp_path / "side" / "labels.csv", "file,label\na.jpg,4\n")
    for folder, label in (("two", None), ("side", 4)):
        data = open_dataset(f"masks:{tmp_path / folder}")
        assert [data.name(index) for index in range(2)] == ["a.jpg", "b.jpg"]
        sample = data.load(0)
        assert np.array_equal(sample.mask, REGION)
        assert (sample.label, sample.objects) == (label, (label,))


def palette_mask(region, numbers, colours):
    """The region as a picture of two palette numbers, each shown in its colour: background first."""
    values = np.where(region, numbers[1], numbers[0]).astype(np.uint8)
    image = Image.frombytes("P", values.shape[::-1], values.tobytes())
    palette = np.full((256, 3), 99)
    palette[list(numbers)] = colours
    image.putpalette(palette.ravel().tolist())
    return image


BLACK, WHITE, RED = (0, 0, 0), (255, 255, 255), (255, 0, 0)


@pytest.mark.parametrize("suffix", ["png", "gif"])
@pytest.mark.parametrize(
    ("numbers", "colours"),
    [((1, 0), (BLACK, WHITE)), ((0, 1), (BLACK, WHITE)), ((5, 3), (BLACK, RED)), ((1, 0), (BLACK, (0, 0, 1)))],
)
@pytest.mark.parametrize("transparent", [None, 0])
def test_masks_with_a_palette_are_judged_by_their_colours(tmp_path, suffix, numbers, colours, transparent):
    photo(tmp_path / "a.jpg")
    options = {} if transparent is None else {"transparency": transparent}
    palette_mask(REGION, numbers, colours).save(tmp_path / f"a_mask.{suffix}", **options)
    assert np.array_equal(open_dataset(f"masks:{tmp_path}").load(0).mask, REGION)


def test_a_mask_that_pillow_reduced_to_two_colours(tmp_path):
    photo(tmp_path / "a.jpg")
    reduced = Image.fromarray(REGION * 255).convert("RGB").quantize(2)
    # The point of the test: the number 0 is white here.
    assert np.array_equal(np.asarray(reduced), 1 - REGION)
    reduced.save(tmp_path / "a_mask.png")
    assert np.array_equal(open_dataset(f"masks:{tmp_path}").load(0).mask, REGION)
    # Transparency in bytes, one for each of the palette's colours.
    reduced.save(tmp_path / "a_mask.png", transparency=b"\x80\xff")
    assert np.array_equal(open_dataset(f"masks:{tmp_path}").load(0).mask, REGION)


def stored_as(upright, orientation):
    """The pixels that EXIF's orientation turns into the upright ones, from the standard's own words.

    It names the side of the photo that is the first row, and the side that is the first column, of what is stored.
    """
    flipped_rows = orientation in (3, 4, 7, 8)
    flipped_columns = orientation in (2, 3, 6, 7)
    turned = upright[:: -1 if flipped_rows else 1, :: -1 if flipped_columns else 1]
    return np.swapaxes(turned, 0, 1) if orientation >= 5 else turned


def orient(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


COLOURED = np.stack([REGION * 255] * 3, axis=-1)  # the photo is white where the mask is: they can be compared
SQUARE = REGION[:, :5]


@pytest.mark.parametrize("suffix", ["png", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_mask_is_turned_with_the_pixels_that_it_was_drawn_on(tmp_path, orientation, suffix):
    for name, region in (("oblong", REGION), ("square", SQUARE)):
        for folder in ("images", "masks"):
            (tmp_path / folder).mkdir(exist_ok=True)
        stored = np.ascontiguousarray(stored_as(region, orientation) * 255)
        coloured = Image.fromarray(np.stack([stored] * 3, axis=-1))
        coloured.save(tmp_path / "images" / f"{name}.{suffix}", exif=orient(orientation))
        png(tmp_path / "masks" / f"{name}.png", stored)
    data = open_dataset(f"masks:{tmp_path}")
    for index, region in enumerate((REGION, SQUARE)):
        sample = data.load(index)
        assert np.array_equal(np.asarray(sample.image)[..., 0], region * 255)
        assert np.array_equal(sample.mask, region)


@pytest.mark.parametrize("orientation", range(5, 9))
def test_a_mask_of_the_upright_photo_is_left_as_it_is(tmp_path, orientation):
    stored = Image.fromarray(np.ascontiguousarray(stored_as(COLOURED, orientation)))
    stored.save(tmp_path / "a.png", exif=orient(orientation))
    png(tmp_path / "a_mask.png", REGION)
    assert np.array_equal(open_dataset(f"masks:{tmp_path}").load(0).mask, REGION)


@pytest.mark.parametrize("suffix", ["png", "tiff"])
@pytest.mark.parametrize("own", range(1, 9))
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_mask_that_says_how_it_is_turned_is_believed(tmp_path, orientation, own, suffix):
    stored = Image.fromarray(np.ascontiguousarray(stored_as(COLOURED[:, :5], orientation)))
    stored.save(tmp_path / "a.png", exif=orient(orientation))
    mask = Image.fromarray(np.ascontiguousarray(stored_as(SQUARE, own)))
    mask.save(tmp_path / f"a_mask.{suffix}", exif=orient(own))
    assert np.array_equal(open_dataset(f"masks:{tmp_path}").load(0).mask, SQUARE)


def test_classes_and_what_is_not_counted_are_turned_with_the_photo(tmp_path):
    pets_original(tmp_path)
    Image.new("RGB", (8, 5)).save(tmp_path / "images" / "Abyssinian_1.jpg", exif=orient(3))
    expected = REGION.astype(np.int16)
    expected[4, 7] = -1
    assert np.array_equal(open_dataset(f"pets:{tmp_path}").load(0).mask, expected[::-1, ::-1])


@pytest.mark.parametrize(("high", "mode"), [(255, "L"), (255, "RGB"), (90, "L")])
def test_a_mask_in_a_jpeg_has_the_edges_that_it_was_drawn_with(tmp_path, high, mode):
    """Around an edge a JPEG stores almost black for black, which made objects five percent larger."""
    down, right = np.mgrid[:60, :80]
    drawn = (right - 35) ** 2 + (down - 30) ** 2 < 20**2
    photo(tmp_path / "images" / "a.jpg", size=(80, 60))
    photo(tmp_path / "images" / "empty.jpg", size=(80, 60))
    (tmp_path / "masks").mkdir()
    Image.fromarray((drawn * high).astype(np.uint8)).convert(mode).save(tmp_path / "masks" / "a.jpg", quality=75)
    Image.new(mode, (80, 60)).save(tmp_path / "masks" / "empty.jpg")
    stored = np.asarray(Image.open(tmp_path / "masks" / "a.jpg"))
    assert (stored.reshape(60, 80, -1).max(-1) > 0).sum() > 1.1 * drawn.sum()
    data = open_dataset(f"masks:{tmp_path}")
    assert np.array_equal(data.load(0).mask, drawn)
    assert not data.load(1).mask.any()


def test_labels_of_masks_keep_photos_of_one_name_apart(tmp_path):
    for name in ("a.jpg", "a.png", "b.jpg", "c.png"):
        photo(tmp_path / "images" / name)
    for name in ("a.png", "b.png", "c.png"):
        png(tmp_path / "masks" / name, np.ones((5, 8), np.uint8))
    text(tmp_path / "labels.csv", "file,label\na.jpg,1\na.png,2\nb.png,3\nc,4\n")
    data = open_dataset(f"masks:{tmp_path}")
    assert names_and_labels(data) == [("a.jpg", 1), ("a.png", 2), ("b.jpg", 3), ("c.png", 4)]
    text(tmp_path / "labels.csv", "file,label\ncats/a.jpg,1\ndogs/a.jpg,2\n")
    assert "a.jpg is listed twice in labels.csv" in error_of(f"masks:{tmp_path}")


def test_masks_that_do_not_fit_or_are_absent(tmp_path):
    for name in ("a", "b", "c"):
        photo(tmp_path / "images" / f"{name}.jpg")
    png(tmp_path / "masks" / "a.png", REGION.T.copy())
    png(tmp_path / "masks" / "b.png", np.stack([REGION * 0, REGION * 3, REGION * 0], axis=-1))
    data = open_dataset(f"masks:{tmp_path}")
    with pytest.raises(DataError, match="5 x 8 pixels, but the image has 8 x 5"):
        data.load(0)
    assert np.array_equal(data.load(1).mask, REGION)
    with pytest.raises(ImageError, match=r"c\.png"):
        data.load(2)
    shutil.rmtree(tmp_path / "masks")
    assert "no folder masks" in error_of(f"masks:{tmp_path}")


def test_voc(tmp_path):
    root = tmp_path / "VOCdevkit" / "VOC2012"
    values = np.zeros((5, 8), dtype=np.uint8)
    values[0, :] = 15  # person
    values[1:3, 0] = 8  # cat
    values[4, 7] = 255
    for name in ("2007_000033", "2007_000123"):
        photo(root / "JPEGImages" / f"{name}.jpg")
        png(root / "SegmentationClass" / f"{name}.png", values, mode="P")
    photo(root / "JPEGImages" / "2007_999999.jpg")  # of another part
    text(root / "ImageSets" / "Segmentation" / "val.txt", "2007_000123\n2007_000033\n")
    for place in (tmp_path, tmp_path / "VOCdevkit", root):
        data = open_dataset(f"voc:{place}")
        assert [data.name(index) for index in range(len(data))] == ["2007_000123", "2007_000033"]
        sample = data.load(0)
        expected = np.zeros((5, 8), dtype=np.int16)
        expected[0, :], expected[1:3, 0], expected[4, 7] = 2, 1, -1
        assert np.array_equal(sample.mask, expected)
        assert sample.objects == (7, 14)
        assert sample.label == 14
        assert data.class_names[14] == "person"
        assert data.classes == 20
    png(root / "SegmentationClass" / "2007_000033.png", np.full((5, 8), 21, dtype=np.uint8), mode="P")
    with pytest.raises(DataError, match="21, but there are 20 classes"):
        data.load(1)
    (root / "ImageSets" / "Segmentation" / "val.txt").unlink()
    assert "there is no ImageSets/Segmentation/val.txt; PASCAL VOC 2012 comes from" in error_of(f"voc:{tmp_path}")


def test_mura(tmp_path):
    root = tmp_path / "MURA-v1.1"
    files = [f"valid/XR_WRIST/patient11185/study1_{answer}/image1.png" for answer in ("positive", "negative")]
    for file in files:
        photo(root / file)
    text(root / "valid_image_paths.csv", "".join(f"MURA-v1.1/{file}\n" for file in files))
    for place in (tmp_path, root):
        assert names_and_labels(open_dataset(f"mura:{place}")) == [(files[0], 1), (files[1], 0)]
    text(root / "valid_image_paths.csv", "MURA-v1.1/valid/../../study1_positive/image1.png\n")
    assert "line 1" in error_of(f"mura:{root}")
    text(root / "valid_image_paths.csv", ".\n")
    assert "line 1" in error_of(f"mura:{root}")
    (root / "valid_image_paths.csv").unlink()
    assert "there is no valid_image_paths.csv; MURA comes from" in error_of(f"mura:{root}")


def test_imagenet_in_folders_knows_the_index_of_a_subset(tmp_path):
    # n01440764 is class 0 and n15075141 the last; two folders alone would give 0 and 1.
    for number in ("n15075141", "n01440764", "n02119789"):
        photo(tmp_path / "val" / number / f"ILSVRC2012_val_{number[-8:]}.JPEG")
    for place in (tmp_path, tmp_path / "val"):
        data = open_dataset(f"imagenet:{place}")
        assert [label for _, label in names_and_labels(data)] == [0, 278, 999]
        assert data.name(0) == "n01440764/ILSVRC2012_val_01440764.JPEG"
    assert data.class_names[278].startswith("kit fox")
    photo(tmp_path / "val" / "n00000001" / "x.JPEG")
    assert "n00000001 is none of the 1000 classes" in error_of(f"imagenet:{tmp_path}")


def test_a_stray_picture_does_not_hide_the_folders_of_imagenet(tmp_path):
    photo(tmp_path / "val" / "n01440764" / "a.JPEG")
    photo(tmp_path / "preview.jpg")
    assert names_and_labels(open_dataset(f"imagenet:{tmp_path}")) == [("n01440764/a.JPEG", 0)]


def flat_imagenet(root):
    for number in (1, 3):
        photo(root / f"ILSVRC2012_val_{number:08d}.JPEG")
    return root


def labels_of(root):
    return [label for _, label in names_and_labels(open_dataset(f"imagenet:{root}"))]


def test_imagenet_flat_with_the_label_files_of_kaggle_and_caffe(tmp_path):
    flat_imagenet(tmp_path / "val")
    assert "there is no label file" in error_of(f"imagenet:{tmp_path}")
    text(tmp_path / "val.txt", "ILSVRC2012_val_00000001.JPEG 65\nILSVRC2012_val_00000003.JPEG 230\n")
    assert labels_of(tmp_path) == labels_of(tmp_path / "val") == [65, 230]
    kaggle = "ImageId,PredictionString\nILSVRC2012_val_00000003,n02119789 85 1 499 272 \n"
    text(tmp_path / "LOC_val_solution.csv", kaggle + "ILSVRC2012_val_00000001,n01440764 1 2 3 4 n01440764 5 6 7 8\n")
    assert labels_of(tmp_path) == [0, 278]
    text(tmp_path / "LOC_val_solution.csv", "ILSVRC2012_val_00000003,n02119789 85 1 499 272\n")
    assert "does not list ILSVRC2012_val_00000001.JPEG" in error_of(f"imagenet:{tmp_path}")


def test_imagenet_flat_with_wordnet_numbers_for_indices(tmp_path):
    flat_imagenet(tmp_path)
    line = "ILSVRC2012_val_0000000{} {}\n"
    text(tmp_path / "val.txt", line.format("1.JPEG", "n02119789") + "\n" + line.format("3.JPEG", "n01440764"))
    assert labels_of(tmp_path) == [278, 0]
    for second, reason in (
        ("230", "line 2: indices and WordNet IDs are mixed"),
        ("n00000001", "line 2: this is not an image's name and an index below 1000 or a WordNet ID"),
        ("1000", "line 2: this is not"),
        ("dog", "line 2: this is not"),
    ):
        text(tmp_path / "val.txt", line.format("1.JPEG", "n02119789") + line.format("3.JPEG", second))
        message = error_of(f"imagenet:{tmp_path}")
        assert reason in message
        assert "image-net.org" in message
    text(tmp_path / "val.txt", line.format("1.JPEG", "65") + line.format("3.JPEG", "n02119789"))
    assert "mixed" in error_of(f"imagenet:{tmp_path}")


def test_imagenet_flat_with_a_list_of_wordnet_numbers(tmp_path):
    flat_imagenet(tmp_path)
    file = "imagenet_2012_validation_synset_labels.txt"
    text(tmp_path / file, "n02119789\nn01440764\nn01440764\n")
    assert labels_of(tmp_path) == [278, 0]
    text(tmp_path / file, "n02119789\nn00000001\n")
    assert "line 2: this is not a WordNet ID of the 1000 classes" in error_of(f"imagenet:{tmp_path}")


def test_imagenet_flat_with_a_table_of_labels(tmp_path):
    flat_imagenet(tmp_path)
    row = "ILSVRC2012_val_0000000{}.JPEG,{}\n"
    text(tmp_path / "labels.csv", "file,class_index\n" + row.format(3, 278) + row.format(1, 65))
    assert labels_of(tmp_path) == [65, 278]
    named = [f'"{imagenet_names()[index]}"' for index in (0, 278)]
    text(tmp_path / "labels.csv", "file,class_name\n" + row.format(3, named[1]) + row.format(1, named[0]))
    assert labels_of(tmp_path) == [0, 278]
    text(tmp_path / "labels.csv", "file,class_index\n" + row.format(3, 1000) + row.format(1, 65))
    message = error_of(f"imagenet:{tmp_path}")
    assert "ILSVRC2012_val_00000003.JPEG has class 1000, and there are 1000 classes" in message
    assert "image-net.org" in message


def test_imagenet_flat_with_the_development_kit(tmp_path):
    flat_imagenet(tmp_path / "val")
    kit = tmp_path / "ILSVRC2012_devkit_t12" / "data"
    text(kit / "ILSVRC2012_validation_ground_truth.txt", "1\n5\n2\n")
    assert "needs meta.mat or map_clsloc.txt" in error_of(f"imagenet:{tmp_path}")
    # The kit's own order: here backwards, so that number 1 is the last class and 2 the one before.
    backwards = list(reversed(imagenet_indices()))
    text(kit / "map_clsloc.txt", "".join(f"{word} {n} name\n" for n, word in enumerate(backwards, start=1)))
    assert labels_of(tmp_path) == [999, 998]
    (kit / "map_clsloc.txt").unlink()
    scipy_io = pytest.importorskip("scipy.io")
    fields = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("num_children", object)]
    rows = [(n, word, "words", 0) for n, word in enumerate(backwards, start=1)] + [(1001, "n00001740", "entity", 2)]
    scipy_io.savemat(kit / "meta.mat", {"synsets": np.array(rows, dtype=fields).reshape(-1, 1)})
    assert labels_of(tmp_path) == [999, 998]
    text(kit / "meta.mat", "damaged")
    assert "meta.mat" in error_of(f"imagenet:{tmp_path}")


def imagenet_s(root, numbers):
    values = np.zeros((5, 8), dtype=np.int64)
    values[0, :], values[1:3, 0], values[4, 7] = 2, 300, 1000
    colours = np.stack([values % 256, values // 256, values * 0], axis=-1).astype(np.uint8)
    for number in numbers:
        photo(root / "validation" / number / "ILSVRC2012_val_00000001.JPEG")
        png(root / "validation-segmentation" / number / "ILSVRC2012_val_00000001.png", colours)


def test_imagenet_s_numbers_classes_by_the_whole_list(tmp_path):
    listed = list(imagenet_indices())[::3][:300]
    imagenet_s(tmp_path, [listed[1], listed[299]])
    assert "there is no list" in error_of(f"imagenet-s:{tmp_path}")
    text(tmp_path / "ImageNetS_categories_im300.txt", "\n".join(listed))
    data = open_dataset(f"imagenet-s:{tmp_path}")
    sample = data.load(0)
    expected = np.zeros((5, 8), dtype=np.int16)
    expected[0, :], expected[1:3, 0], expected[4, 7] = 1, 2, -1
    assert np.array_equal(sample.mask, expected)
    # Number 2 of the set is ImageNet's class 3, number 300 is 3 x 299.
    assert sample.objects == (3, 897)
    assert sample.label == 3
    assert sample.name == f"{listed[1]}/ILSVRC2012_val_00000001"
    shutil.rmtree(tmp_path / "validation-segmentation")
    assert "no folder validation-segmentation; ImageNet-S comes from" in error_of(f"imagenet-s:{tmp_path}")


def test_imagenet_s_believes_a_list_even_where_the_folders_could_be_a_whole_set(tmp_path):
    """Fifty folders of the 919: by themselves they would be numbered from 1 to 50."""
    numbers = list(imagenet_indices())
    three_hundred, most = numbers[::3][:300], numbers[:919]
    root = tmp_path / "set"
    folders = numbers[1:6] + numbers[20:920:20]
    imagenet_s(root, folders)
    data = open_dataset(f"imagenet-s:{root}")
    # Number 2 is the second of 50 folders, but number 300 is none of them.
    with pytest.raises(DataError, match="300, but there are 50 classes"):
        data.load(0)
    # A list that lacks a folder is of another set.
    text(root / "ImageNetS_categories_im300.txt", "\n".join(three_hundred))
    with pytest.raises(DataError, match="300, but there are 50 classes"):
        open_dataset(f"imagenet-s:{root}").load(0)
    # The list of 919 holds them all, beside the set or above it; it need not be in order.
    for place in (tmp_path, root):
        text(place / "ImageNetS_categories_im919.txt", "\n".join(reversed(most)))
        assert open_dataset(f"imagenet-s:{root}").load(0).objects == (1, 299)
    # Two lists that hold all folders and number them differently do not tell which is right.
    text(root / "ImageNetS_categories_im300.txt", "\n".join(folders + [n for n in most if n not in folders][:250]))
    assert "im300.txt and ImageNetS_categories_im919.txt" in error_of(f"imagenet-s:{root}")
    # Unless one of them is just these folders.
    text(root / "ImageNetS_categories_im50.txt", "\n".join(folders))
    with pytest.raises(DataError, match="300, but there are 50 classes"):
        open_dataset(f"imagenet-s:{root}").load(0)


@pytest.mark.parametrize(
    ("kind", "file", "name", "classes"),
    [
        ("imagenet", "LOC_val_solution.csv", "ILSVRC2012_val_00000001", (",n01440764 1 2 3 4", ",n01443537 1 2 3 4")),
        ("imagenet", "val.txt", "ILSVRC2012_val_00000001", (".JPEG 65", ".JPEG 66")),
        ("pets", "annotations/list.txt", "Abyssinian_1", (" 1 1 1", " 2 2 1")),
    ],
)
def test_a_list_that_gives_a_photo_two_classes_is_refused(tmp_path, kind, file, name, classes):
    pets_original(tmp_path / "pets")
    photo(tmp_path / "imagenet" / "val" / "ILSVRC2012_val_00000001.JPEG")
    text(tmp_path / kind / file, "".join(f"{name}{each}\n" for each in classes))
    assert f"{file}, line 2: {name} is listed twice" in error_of(f"{kind}:{tmp_path / kind}")


def test_another_list_of_imagenet_s_is_another_data_set(tmp_path):
    """It gives the same masks other classes, so that results of the one must not go on with the other."""
    numbers = list(imagenet_indices())
    root, folders = tmp_path / "set", numbers[10:60]
    imagenet_s(root, folders)
    before = open_dataset(f"imagenet-s:{root}").fingerprint
    text(tmp_path / "ImageNetS_categories_im919.txt", "\n".join(numbers[:919]))
    assert open_dataset(f"imagenet-s:{root}").fingerprint != before
    text(tmp_path / "ImageNetS_categories_im50.txt", "\n".join(folders))  # says what was taken for granted
    assert open_dataset(f"imagenet-s:{root}").fingerprint == before


def test_masks_of_imagenet_s_may_end_in_capitals(tmp_path):
    numbers = list(imagenet_indices())[::3][:300]
    imagenet_s(tmp_path, numbers)
    mask = tmp_path / "validation-segmentation" / numbers[0] / "ILSVRC2012_val_00000001.png"
    mask.rename(mask.with_suffix(".PNG"))
    assert open_dataset(f"imagenet-s:{tmp_path}").load(0).objects == (3, 897)


def test_imagenet_s_needs_no_list_where_all_folders_are_there(tmp_path):
    imagenet_s(tmp_path, list(imagenet_indices())[::3][:300])
    assert open_dataset(f"imagenet-s:{tmp_path}").load(1).objects == (3, 897)


def pets_copy(root):
    photo(root / "images" / "a.jpg")
    png(root / "trimaps" / "a.png", np.where(REGION, 1, 2).astype(np.uint8))


def voc_folders(root):
    photo(root / "JPEGImages" / "a.jpg")
    png(root / "SegmentationClass" / "a.png", REGION)


LATIN = "caf\xe9 1\n".encode("latin-1")
UNCLOSED = b'file,label\na.jpg,"' + b"x" * 200_000  # more than a cell may hold


@pytest.mark.parametrize("content", [LATIN, LATIN.decode("latin-1").encode("utf-16")])
@pytest.mark.parametrize(
    ("kind", "write", "file"),
    [
        ("voc", voc_folders, "ImageSets/Segmentation/val.txt"),
        ("mura", lambda root: photo(root / "valid" / "a.png"), "valid_image_paths.csv"),
        ("pets", pets_original, "annotations/list.txt"),
        ("pets", pets_original, "annotations/test.txt"),
        ("pets", pets_copy, "labels.csv"),
        ("labelled", lambda root: photo(root / "a.jpg"), "labels.csv"),
        ("labelled", lambda root: text(root / "labels.csv", "file,label\na.jpg,1\n"), "class_names.json"),
        ("masks", voc_folders, "labels.csv"),
        ("imagenet", lambda root: flat_imagenet(root / "val"), "LOC_val_solution.csv"),
        ("imagenet", lambda root: flat_imagenet(root / "val"), "val.txt"),
        ("imagenet", lambda root: flat_imagenet(root / "val"), "devkit/data/ILSVRC2012_validation_ground_truth.txt"),
        ("imagenet-s", lambda root: imagenet_s(root, ["n01440764"]), "ImageNetS_categories_im50.txt"),
    ],
)
def test_a_list_that_is_not_text_is_named(tmp_path, kind, write, file, content):
    write(tmp_path)
    if kind == "masks":
        (tmp_path / "JPEGImages").rename(tmp_path / "images")
        (tmp_path / "SegmentationClass").rename(tmp_path / "masks")
    if "devkit" in file:
        backwards = list(reversed(imagenet_indices()))
        text(
            tmp_path / "devkit/data/map_clsloc.txt",
            "".join(f"{word} {n} name\n" for n, word in enumerate(backwards, start=1)),
        )
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(content)
    assert str(tmp_path / file) in error_of(f"{kind}:{tmp_path}")


@pytest.mark.parametrize(("kind", "file"), [("labelled", "labels.csv"), ("imagenet", "LOC_val_solution.csv")])
def test_a_table_that_is_damaged_otherwise_is_named(tmp_path, kind, file):
    flat_imagenet(tmp_path)
    (tmp_path / file).write_bytes(UNCLOSED)
    message = error_of(f"{kind}:{tmp_path}")
    assert f"{tmp_path / file} is not a table" in message
    assert "comes from http" in message or "of your own" in message


def test_names_of_classes_may_be_in_any_encoding_where_nobody_looks_at_them(tmp_path):
    flat_imagenet(tmp_path / "val")
    kit = tmp_path / "devkit" / "data"
    text(kit / "ILSVRC2012_validation_ground_truth.txt", "1\n5\n2\n")
    backwards = list(reversed(imagenet_indices()))
    lines = "".join(f"{word} {n} cr\xeape\n" for n, word in enumerate(backwards, start=1))
    (kit / "map_clsloc.txt").write_bytes(lines.encode("latin-1"))
    assert labels_of(tmp_path) == [999, 998]


def test_a_name_that_no_file_can_have_is_an_error_of_that_photo_only(tmp_path):
    photo(tmp_path / "a.jpg")
    (tmp_path / "labels.csv").write_bytes(b"file,label\na.jpg,1\nb\0.jpg,2\n")
    data = open_dataset(f"labelled:{tmp_path}")
    assert data.fingerprint
    with pytest.raises(ImageError):
        data.load(1)


def test_names_that_are_no_text_are_escaped_and_stay_unique(tmp_path):
    """Linux lets a file be called by any bytes; paths keep them, names must be fit for a table."""
    written = [b"b\xe9.png", b"b\\udce9.png", b"b\xe8.png", "b\xe9.png".encode()]
    try:
        for colour, name in enumerate(written):
            photo(tmp_path / "images" / os.fsdecode(name), colour=(colour, 0, 0))
            png(tmp_path / "masks" / os.fsdecode(name), REGION)
    except OSError:
        pytest.skip("this file system takes only names that are text")
    data = open_dataset(f"masks:{tmp_path}")
    names = {int(np.asarray(data.load(index).image)[0, 0, 0]): data.name(index) for index in range(4)}
    assert names == {0: "b\\udce9.png_", 1: "b\\udce9.png", 2: "b\\udce8.png", 3: "b\xe9.png"}
    assert [data.load(index).name for index in range(4)] == [data.name(index) for index in range(4)]
    assert pickle.loads(pickle.dumps(data)).fingerprint == data.fingerprint


@pytest.mark.parametrize("kind", sorted(list_datasets()))
def test_every_kind_says_where_it_comes_from(tmp_path, kind):
    for place in (tmp_path, tmp_path / "absent"):
        message = error_of(f"{kind}:{place}")
        assert "comes from http" in message or "of your own" in message


def test_spellings_that_are_none(tmp_path):
    assert "KIND:PATH" in error_of("imagenet")
    assert "did you mean imagenet" in error_of("imagnet:/x")
    assert issubclass(DataError, VitreousError)


@pytest.mark.parametrize(
    ("kind", "file", "line"),
    [
        ("imagenet", "val.txt", "ILSVRC2012_val_00000001.JPEG {}"),
        ("imagenet", "labels.csv", "file,label\nILSVRC2012_val_00000001.JPEG,{}"),
        ("pets", "annotations/list.txt", "Abyssinian_1 {} 1 1"),
    ],
)
@pytest.mark.parametrize("digits", [10, 5000])
def test_a_number_of_any_length_is_one_sentence(tmp_path, kind, file, line, digits):
    """Python refuses to read numbers of more than 4,300 digits, by a ValueError."""
    pets_original(tmp_path / "pets")
    photo(tmp_path / "imagenet" / "val" / "ILSVRC2012_val_00000001.JPEG")
    text(tmp_path / kind / file, line.format("9" * digits) + "\n")
    assert file.rpartition("/")[2] in error_of(f"{kind}:{tmp_path / kind}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name, of POSIX")
@pytest.mark.parametrize(("kind", "file"), [("imagenet", "val.txt"), ("pets", "annotations/list.txt")])
def test_a_pipe_in_the_place_of_a_list_is_not_waited_for(tmp_path, kind, file):
    pets_original(tmp_path / "pets")
    photo(tmp_path / "imagenet" / "val" / "ILSVRC2012_val_00000001.JPEG")
    place = tmp_path / kind / file
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    with one_minute():
        error_of(f"{kind}:{tmp_path / kind}")
