"""Data sets in one file: ImageNet-Segmentation's HDF5, CIFAR's batches, and the movie reviews."""

import io
import json
import os
import pickle
import random
import shutil
import tarfile
from contextlib import suppress

import numpy as np
import pytest

from segmentation_file import write_segmentation
from time_limit import one_minute
from vitreous.datasets import DataError, Shuffled, open_dataset, read_movies
from vitreous.datasets.cifar import read_plain_pickle


def error_of(call, *arguments):
    with pytest.raises(DataError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("nested", "dtype"), [(True, np.uint8), (False, bool), (True, np.int16), (False, np.float64)])
def test_imagenet_segmentation(tmp_path, nested, dtype):
    """Pixels of -1, as Chefer's program ignores them, do not count."""
    image, mask = write_segmentation(tmp_path / "gtsegs_ijcv.mat", nested=nested, dtype=dtype)
    data = open_dataset(f"imagenet-seg:{tmp_path}")
    again = pickle.loads(pickle.dumps(data))
    assert data.fingerprint == again.fingerprint
    for opened in (data, again, open_dataset(f"imagenet-seg:{tmp_path / 'gtsegs_ijcv.mat'}")):
        first, second = opened.load(0), opened.load(1)
        assert np.array_equal(np.asarray(first.image), image)
        assert np.array_equal(first.mask, mask)
        assert (first.name, first.label, first.objects) == ("0000-n02119789_7", 278, (278,))
        assert opened.classes == 1000
        # A class that is none of the thousand: the object is there, but no output of a model is right.
        assert (second.name, second.label, second.objects) == ("0001-n00000001_9", None, (None,))


@pytest.mark.parametrize("codes", [[-1.5], [2**40], "references"])
def test_imagenet_segmentation_with_damaged_names(tmp_path, codes):
    h5py = pytest.importorskip("h5py")
    file = tmp_path / "gtsegs_ijcv.mat"
    write_segmentation(file)
    with h5py.File(file, "r+") as content:
        odd = np.array([h5py.Reference()], dtype=h5py.ref_dtype) if codes == "references" else np.array(codes)
        content["odd"] = odd
        content["value/id"][0, 0] = content["odd"].ref
    assert "the names in /value/id cannot be read" in error_of(open_dataset, f"imagenet-seg:{file}")


def test_imagenet_segmentation_that_is_damaged(tmp_path):
    h5py = pytest.importorskip("h5py")
    file = tmp_path / "gtsegs_ijcv.mat"
    file.write_bytes(b"MATLAB 5.0")
    assert "not an HDF5 file" in error_of(open_dataset, f"imagenet-seg:{file}")
    write_segmentation(file)
    with h5py.File(file, "r+") as content:
        content["value/img"][0, 0] = h5py.Reference()  # points nowhere
        del content["value/id"]
    data = open_dataset(f"imagenet-seg:{file}")
    assert "image 0000: it cannot be read" in error_of(data.load, 0)
    assert data.load(1).label is None
    with h5py.File(tmp_path / "other.mat", "w") as content:
        content["value/img"] = [1]
    assert "there is no /value/gt" in error_of(open_dataset, f"imagenet-seg:{tmp_path / 'other.mat'}")


def cifar_arrays(classes):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3)).astype(np.uint8)
    return pixels, [0, classes - 1, 3, 1, 2, 5]


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    ("kind", "classes", "python", "binary", "field"),
    [
        ("cifar10", 10, "cifar-10-batches-py/test_batch", "cifar-10-batches-bin/test_batch.bin", "labels"),
        ("cifar100", 100, "cifar-100-python/test", "cifar-100-binary/test.bin", "fine_labels"),
    ],
)
def test_cifar_is_the_same_in_every_form(tmp_path, kind, classes, python, binary, field, protocol):
    pixels, labels = cifar_arrays(classes)
    rows = pixels.transpose(0, 3, 1, 2).reshape(6, -1)
    batch = {b"data": rows.copy(), field.encode(): labels, b"coarse_labels": [0] * 6, b"filenames": [b"x.png"] * 6}
    coarse = [np.full((6, 1), 9, dtype=np.uint8)] if classes == 100 else []
    column = np.array(labels, dtype=np.uint8)[:, None]
    for name, content in (
        (python, pickle.dumps(batch, protocol=protocol)),
        (binary, np.hstack([*coarse, column, rows]).tobytes()),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content)
    np.savez(tmp_path / "test.npz", images=pixels, labels=np.array(labels))
    places = [
        tmp_path,
        (tmp_path / python).parent,
        tmp_path / python,
        (tmp_path / binary).parent,
        tmp_path / "test.npz",
    ]
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "test.npz", tmp_path / "alone")
    opened = [open_dataset(f"{kind}:{place}") for place in (*places, tmp_path / "alone")]
    assert len({data.fingerprint for data in opened}) == 1
    for data in opened:
        sample = pickle.loads(pickle.dumps(data)).load(1)
        assert (len(data), sample.name, sample.label) == (6, "test-00001", classes - 1)
        assert data.classes == classes
        assert np.array_equal(np.asarray(sample.image), pixels[1])
    shutil.copy(tmp_path / "test.npz", tmp_path / "alone" / "again.npz")
    assert "of again.npz, test.npz, give one" in error_of(open_dataset, f"{kind}:{tmp_path / 'alone'}")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"\x93NUMPY\x01\x00"])
def test_an_archive_of_cifar_that_is_damaged(tmp_path, content):
    (tmp_path / "test.npz").write_bytes(content)
    assert "not an archive with the arrays" in error_of(open_dataset, f"cifar10:{tmp_path / 'test.npz'}")


def test_an_array_is_no_archive_of_cifar(tmp_path):
    np.save(tmp_path / "test.npy", np.zeros(3))
    (tmp_path / "test.npy").rename(tmp_path / "test.npz")
    assert "not an archive with the arrays" in error_of(open_dataset, f"cifar10:{tmp_path / 'test.npz'}")


def test_cifar100_names_come_from_beside(tmp_path):
    pixels, labels = cifar_arrays(100)
    np.savez(tmp_path / "test.npz", images=pixels, labels=labels)
    assert open_dataset(f"cifar100:{tmp_path / 'test.npz'}").class_names is None
    names = [f"name{number}" for number in range(100)]
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": [name.encode() for name in names]}, protocol=2))
    assert open_dataset(f"cifar100:{tmp_path / 'test.npz'}").class_names == tuple(names)
    (tmp_path / "meta").unlink()
    (tmp_path / "fine_label_names.txt").write_bytes(b"caf\xe9\n")
    named = open_dataset(f"cifar100:{tmp_path / 'test.npz'}")
    assert "fine_label_names.txt is not text" in error_of(lambda: named.class_names)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("module", [b"numpy._core", b"numpy.core"])
@pytest.mark.parametrize("number", [np.int64, np.uint8, np.int32])
@pytest.mark.parametrize("order", ["C", "F"])
def test_cifar_with_labels_that_are_numbers_of_numpy(tmp_path, protocol, module, number, order):
    """As numpy 2 writes them, and numpy 1 by its own names; with columns first, where an array is stored so."""
    pixels, labels = cifar_arrays(10)
    rows = np.array(pixels.transpose(0, 3, 1, 2).reshape(6, -1), order=order)
    content = pickle.dumps({b"data": rows, b"labels": [number(label) for label in labels]}, protocol=protocol)
    named = renamed(content, module)
    assert (b"numpy._core" in named) == (module == b"numpy._core")
    (tmp_path / "test_batch").write_bytes(named)
    data = open_dataset(f"cifar10:{tmp_path / 'test_batch'}")
    assert [data.load(index).label for index in range(6)] == labels
    assert all(np.array_equal(np.asarray(data.load(index).image), pixels[index]) for index in range(6))


def renamed(content, module):
    """Write a pickle again with another name for numpy's inner module, opcode by opcode."""
    found = bytes(content)
    for name in (b"multiarray", b"numeric"):
        for written in (b"numpy._core", b"numpy.core"):
            old, new = b"%s.%s" % (written, name), b"%s.%s" % (module, name)
            found = found.replace(b"\x8c%c%s" % (len(old), old), b"\x8c%c%s" % (len(new), new))  # a short text
            found = found.replace(b"c%s\n" % old, b"c%s\n" % new)  # a line
    return unframed(found)


def unframed(content):
    """Drop the frames of protocol 4 on, which tell lengths that have changed; they are not needed."""
    return content if content[1] < 4 else content[:2] + content[11:]


class Malicious:
    def __init__(self, call, *arguments):
        self.answer = call, arguments

    def __reduce__(self):
        return self.answer


@pytest.mark.parametrize(
    "content",
    [
        lambda file: Malicious(open, str(file), "w"),
        lambda file: Malicious(eval, f"open({str(file)!r}, 'w')"),
        lambda file: np.array([Malicious(open, str(file), "w")], dtype=object),
        lambda file: Malicious(np.save, str(file), np.zeros(1)),
        lambda file: Malicious(getattr, "text", "upper"),
        lambda file: Malicious(np.frombuffer, b"1"),
        lambda file: Malicious(np.dtype, "O"),
        lambda file: np.str_("text"),
    ],
)
def test_nothing_in_a_pickle_is_run(tmp_path, content):
    made = tmp_path / "made-by-the-pickle"
    batch = tmp_path / "cifar-10-batches-py" / "test_batch"
    batch.parent.mkdir()
    batch.write_bytes(pickle.dumps({b"data": content(made), b"labels": [1]}, protocol=2))
    assert "nothing of it was run" in error_of(open_dataset, f"cifar10:{tmp_path}")
    assert not made.exists()


class Mistyped:
    """Numbers of eight bytes that say of themselves that they are places of objects in memory."""

    def __init__(self, code):
        self.code = code

    def __reduce__(self):
        return np.dtype, (self.code, False, True), (3, "|", None, None, None, -1, -1, 63)


class Pointers:
    """Arrays of numbers whose type turns them into places of objects."""

    def __init__(self, code, way):
        self.code, self.way = code, way

    def __reduce__(self):
        content = b"\x41" * 8
        if self.way == "bytes":
            return np.zeros(1).__reduce_ex__(5)[0], (content, Mistyped(self.code), (1,), "C")
        if self.way == "number":
            return np.int64(1).__reduce__()[0], (Mistyped(self.code), content)
        return np.zeros(1).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, (1,), Mistyped(self.code), False, content)


@pytest.mark.parametrize("code", ["u8", ">u8", "<u8", "=u8"])
@pytest.mark.parametrize("way", ["bytes", "number", "array"])
def test_a_pickle_cannot_make_objects_of_numbers(tmp_path, code, way):
    file = tmp_path / "pickled"
    file.write_bytes(pickle.dumps(Pointers(code, way), protocol=2))
    found = np.asarray(read_plain_pickle(file))
    assert found.dtype == np.uint64
    assert not found.dtype.hasobject
    assert found.ravel().tolist() == [0x4141414141414141]
    assert not np.dtype("u8").hasobject


def test_a_class_of_arrays_cannot_be_called(tmp_path):
    file = tmp_path / "pickled"
    file.write_bytes(pickle.dumps(Malicious(np.ndarray, (2**40,)), protocol=2))
    assert "not a pickled array" in error_of(read_plain_pickle, file)


def test_cifar_that_is_damaged(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    assert "neither cifar-10-batches-py/test_batch nor" in error_of(open_dataset, f"cifar10:{tmp_path}")
    (folder / "test_batch.bin").write_bytes(b"\0" * 3072)
    assert "not a number of rows of 3073" in error_of(open_dataset, f"cifar10:{tmp_path}")
    (folder / "test_batch.bin").write_bytes(b"\x0a" + b"\0" * 3072)
    assert "outside of 0 to 9" in error_of(open_dataset, f"cifar10:{tmp_path}")
    (tmp_path / "test_batch").write_bytes(b"\x80\x02garbage")
    message = error_of(open_dataset, f"cifar10:{tmp_path / 'test_batch'}")
    assert "not a pickled array" in message
    assert "CIFAR-10 comes from" in message
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b")
    assert "unpack it" in error_of(open_dataset, f"cifar10:{tmp_path / 'cifar-10-python.tar.gz'}")
    np.savez(tmp_path / "x.npz", other=np.zeros(1))
    assert "images and labels" in error_of(open_dataset, f"cifar10:{tmp_path / 'x.npz'}")


def movies(folder):
    def row(name, label, *spans):
        parts = [{"docid": name, "start_token": start, "end_token": end} for start, end in spans]
        return json.dumps({"annotation_id": name, "classification": label, "evidences": [parts], "query": "?"})

    docs = folder / "docs"
    docs.mkdir(parents=True)
    for name in ("negR_0.txt", "posR_1.txt", "posR_2.txt"):
        (docs / name).write_text("a film\nthat is  n't one .\n")
    rows = [row("negR_0.txt", "NEG", (3, 6), (5, 7)), row("posR_1.txt", "POS", (0, 1)), row("posR_2.txt", "POS")]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "val.jsonl").write_text(rows[1] + "\n")
    (folder / "test.jsonl").write_text(row("posR_2.txt", "POS", (5, 8)) + "\n")
    return folder


def test_movies_from_folder_and_archive(tmp_path):
    folder = movies(tmp_path / "movies")
    archive = tmp_path / "movies.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, arcname="movies")
        outside = tarfile.TarInfo("../outside.txt")
        outside.size = 4
        packed.addfile(outside, io.BytesIO(b"text"))
    before = sorted(tmp_path.parent.rglob("*"))
    for place in (folder, tmp_path, archive):
        training = read_movies(place, "train")
        # The validation review is listed in train.jsonl too, and left out.
        assert [(review.name, review.label) for review in training] == [("negR_0.txt", 0), ("posR_2.txt", 1)]
        assert training[0].words == ("a", "film", "that", "is", "n't", "one", ".")
        assert training[0].rationale.tolist() == [False] * 3 + [True] * 4
        assert not training[1].rationale.any()
        assert [review.name for review in read_movies(place, "val")] == ["posR_1.txt"]
        assert "words 5 to 8" in error_of(read_movies, place, "test")
    assert sorted(tmp_path.parent.rglob("*")) == before


def test_movies_whose_lists_hold_letters_that_end_lines_elsewhere(tmp_path):
    """JSON may hold U+0085, which older reviews have for an ellipsis, and U+2028 as they are."""
    folder = movies(tmp_path / "movies")
    for part in ("train", "val"):
        rows = (folder / f"{part}.jsonl").read_text().splitlines()
        told = [json.dumps({**json.loads(row), "query": "so\u0085 what\u2028"}, ensure_ascii=False) for row in rows]
        (folder / f"{part}.jsonl").write_text("\r\n".join(told), encoding="utf-8", newline="")
    assert [review.name for review in read_movies(folder, "train")] == ["negR_0.txt", "posR_2.txt"]


def test_movies_as_a_data_set(tmp_path):
    """The test reviews, or the part whose list the path ends in; folder and archive are the same set."""
    folder = movies(tmp_path / "movies")
    (folder / "test.jsonl").write_text((folder / "train.jsonl").read_text().splitlines()[0] + "\n")
    archive = tmp_path / "movies.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, arcname="movies")
    (tmp_path / "packed").mkdir()
    shutil.copy(archive, tmp_path / "packed")
    fingerprints = set()
    for place in (folder, archive, tmp_path / "packed"):
        tested = open_dataset(f"eraser-movies:{place}")
        assert (tested.holds, tested.class_names, len(tested)) == ("texts", ("NEG", "POS"), 1)
        assert tested.name(0) == tested.load(0).name == "negR_0.txt"
        again = pickle.loads(pickle.dumps(tested))
        fingerprints |= {
            tested.fingerprint,
            again.fingerprint,
            open_dataset(f"eraser-movies:{place}/test.jsonl").fingerprint,
        }
        held_out = open_dataset(f"eraser-movies:{place}/val.jsonl")
        shuffled = Shuffled(held_out, seed=3)
        assert (shuffled.path, shuffled.origin, shuffled.name(0)) == (held_out.path, held_out.origin, held_out.name(0))
        assert [held_out.name(index) for index in range(len(held_out))] == ["posR_1.txt"]
        assert held_out.fingerprint not in fingerprints
        assert len(open_dataset(f"eraser-movies:{place}/train.jsonl")) == 2
    assert len(fingerprints) == 1
    (folder / "docs" / "negR_0.txt").write_text("a film that is n't ONE .")
    assert open_dataset(f"eraser-movies:{folder}").fingerprint not in fingerprints


def test_movies_that_are_damaged(tmp_path):
    folder = movies(tmp_path / "movies")
    assert "train, val and test" in error_of(read_movies, folder, "dev")
    (folder / "docs" / "posR_1.txt").unlink()
    assert "there is no docs/posR_1.txt; ERASER" in error_of(read_movies, folder, "val")
    (folder / "val.jsonl").write_text('{"annotation_id": "../../x", "classification": "POS", "evidences": []}\n')
    assert "does not name a review" in error_of(read_movies, folder, "val")
    (folder / "val.jsonl").write_text('{"annotation_id": "x\\udce9", "classification": "POS", "evidences": []}\n')
    assert "does not name a review" in error_of(read_movies, folder, "val")
    (folder / "val.jsonl").write_text("{\n")
    assert "line 1 of val.jsonl is not JSON" in error_of(read_movies, folder, "val")
    (folder / "val.jsonl").write_text("[" * 100_000)
    assert "line 1 of val.jsonl is not JSON" in error_of(read_movies, folder, "val")
    part = '{"annotation_id": "posR_2.txt", "classification": "POS", "evidences": [[%s]]}\n'
    (folder / "val.jsonl").write_text(part % '{"start_token": 0, "end_token": Infinity}')
    assert "lacks start_token or end_token" in error_of(read_movies, folder, "val")
    (folder / "val.jsonl").write_bytes(part.encode() + b"\xe9")
    assert "val.jsonl cannot be read" in error_of(read_movies, folder, "val")
    with tarfile.open(tmp_path / "latin.tar.gz", "w:gz") as packed:
        packed.add(folder, arcname="movies")
    assert "val.jsonl is not text" in error_of(read_movies, tmp_path / "latin.tar.gz", "val")
    (tmp_path / "x.tar.xz").write_bytes(b"\xfd7zXZ\0" + b"\xff" * 40)
    assert "not a tar archive" in error_of(read_movies, tmp_path / "x.tar.xz", "val")
    (tmp_path / "x.tar.gz").write_bytes(b"no archive")
    assert "not a tar archive" in error_of(read_movies, tmp_path / "x.tar.gz", "val")
    assert "no such file" in error_of(read_movies, tmp_path / "absent", "val")


@pytest.mark.shared
def test_the_real_movies(shared):
    archive = shared / "data" / "movies" / "movies.tar.gz"
    sizes = {split: len(read_movies(archive, split)) for split in ("train", "val", "test")}
    assert sizes == {"train": 1600, "val": 200, "test": 199}
    first = read_movies(archive, "train")[0]
    marked = [word for word, chosen in zip(first.words, first.rationale, strict=True) if chosen]
    assert " ".join(marked).startswith("what 's the deal ?")
    assert " ".join(marked).endswith("pretty redundant skip it !")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name, of POSIX")
@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("eraser-movies", "movies/test.jsonl"),
        ("eraser-movies", "movies/docs/posR_2.txt"),
        ("eraser-movies", "movies.tar.gz"),
        ("cifar10", "some.npz"),
        ("cifar10", "test_batch"),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, kind, file):
    """What was waited for before was that somebody writes into it."""
    if file.startswith("movies/"):
        movies(tmp_path / "movies")
    pipe = tmp_path / file
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    with one_minute():
        error_of(open_dataset, f"{kind}:{pipe if file == 'movies.tar.gz' else tmp_path}")
        if kind == "cifar10":
            error_of(open_dataset, f"{kind}:{pipe}")


def test_flipped_bits_in_hdf5_are_errors_of_the_data_set(tmp_path):
    """Whatever h5py raises for a damaged structure is a DataError; in pixels damage cannot be noticed."""
    file = tmp_path / "gtsegs_ijcv.mat"
    write_segmentation(file)
    whole = file.read_bytes()
    draws = random.Random(0)
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(3):
            content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        file.write_bytes(content)
        with one_minute(), suppress(DataError):
            data = open_dataset(f"imagenet-seg:{file}")
            for index in range(len(data)):
                with suppress(DataError):
                    data.load(index)
