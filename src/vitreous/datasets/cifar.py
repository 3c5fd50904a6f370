"""The kinds ``cifar10`` and ``cifar100``: the test images, 32 x 32 pixels, in any of the published forms."""

from __future__ import annotations

import hashlib
import pickle
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitreous.datasets.dataset import DataSet, Sample
from vitreous.datasets.files import read_list
from vitreous.errors import DataError

_MOST_BYTES = 200 * 2**20
_NUMBERS = "biuf"  # kinds of dtypes
_ARRAY = object()  # placeholder for numpy.ndarray in a pickle; it cannot be called

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
_EDGE = 32
_BYTES = 3 * _EDGE * _EDGE
_MOST_SAMPLES = 60_000


def read_plain_pickle(file: Path) -> Any:
    """Unpickle a file that contains only plain values and numpy arrays and scalars.

    Python 2 strings are returned as bytes.

    Raises:
        DataError: The file is damaged, too large, or names a function or class that arrays and scalars do not need.
    """
    if file.stat().st_size > _MOST_BYTES:
        raise DataError(f"{file}: the file is larger than {_MOST_BYTES // 2**20} MiB")
    try:
        with file.open("rb") as content:
            return _PlainUnpickler(content, encoding="bytes").load()
    except _ForbiddenNameError as error:
        raise DataError(f"{file}: it names {error}, which is not part of an array; nothing of it was run") from error
    except Exception as error:  # damaged bytes can raise any exception
        raise DataError(f"{file}: this is not a pickled array, or a damaged one") from error


class _ForbiddenNameError(Exception):
    """A pickle names something that is not part of an array."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module.replace("numpy._core", "numpy.core"), name))
        if allowed is None:
            raise _ForbiddenNameError(f"{module}.{name}")
        return allowed

    def persistent_load(self, _identifier: Any) -> NoReturn:
        raise _ForbiddenNameError("a persistent object")


def _empty_array(kind: Any, _shape: Any, _dtype: Any) -> Any:
    """Replace ``numpy.core.multiarray._reconstruct`` for plain arrays only; the content follows later."""
    if kind is not _ARRAY:
        raise _ForbiddenNameError("an array of another kind")
    return np.ndarray.__new__(np.ndarray, (0,), dtype=np.int8)


def _array_of_bytes(content: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    """Replace ``numpy.core.numeric._frombuffer`` (pickle protocol 5) for bytes inside the file."""
    array = np.frombuffer(_plain_bytes(content), _checked(dtype))
    if order == "K":  # since numpy 2.4: any order of axes
        return array.reshape(shape).transpose(axes)
    return array.reshape(shape, order=order)


def _number_of_bytes(dtype: Any, content: Any) -> Any:
    """Replace ``numpy.core.multiarray.scalar``."""
    (number,) = np.frombuffer(_plain_bytes(content), _checked(dtype))
    return number


def _plain_bytes(content: Any) -> bytes:
    if not isinstance(content, bytes | bytearray):
        raise _ForbiddenNameError("an array of something else than bytes")
    return bytes(content)


def _checked(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype) or dtype.kind not in _NUMBERS:
        raise _ForbiddenNameError(f"an array of {dtype}")
    return dtype


def _plain_dtype(code: Any, *_flags: Any) -> np.dtype[Any]:
    """Return a numeric dtype; object arrays are refused."""
    dtype = _checked(np.dtype(code.decode() if isinstance(code, bytes) else code))
    # A built-in dtype ignores the pickled state that follows, which could otherwise turn it into an object dtype.
    # Non-native byte order is lost and the values are then refused by the caller's checks.
    return np.dtype(dtype.type)


def _latin_bytes(text: Any, encoding: Any) -> bytes:
    """Return the bytes that Python 3 pickles as text for Python 2 (``_codecs.encode``)."""
    if encoding not in ("latin1", b"latin1") or not isinstance(text, str | bytes):
        raise _ForbiddenNameError("an encoding")
    return text if isinstance(text, bytes) else text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy.core.multiarray", "scalar"): _number_of_bytes,
    ("numpy.core.numeric", "_frombuffer"): _array_of_bytes,
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _plain_dtype,
    ("_codecs", "encode"): _latin_bytes,
}


class _Cifar(DataSet):
    """A data set whose images are rows of one array, kept in memory: 10,000 images take 31 MB."""

    classes: ClassVar[int]
    python_file: ClassVar[str]
    binary_file: ClassVar[str]

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        try:
            pixels, labels = self._read()
        except OSError as error:
            raise self._unreadable(error) from error
        if not 0 < len(labels) <= _MOST_SAMPLES or pixels.shape != (len(labels), _EDGE, _EDGE, 3):
            raise self._error(f"it holds {len(labels)} labels and images of shape {pixels.shape}, which do not fit")
        if labels.min() < 0 or labels.max() >= self.classes:
            raise self._error(f"a label is outside of 0 to {self.classes - 1}")
        self._pixels, self._labels = pixels, labels

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        return f"test-{range(len(self))[index]:05d}"

    def load(self, index: int) -> Sample:
        return Sample(self.name(index), Image.fromarray(self._pixels[index]), int(self._labels[index]))

    def labels(self) -> list[int | None] | None:
        return [int(label) for label in self._labels]

    def _records(self) -> Iterator[str]:
        for content in (self._labels, self._pixels):
            yield hashlib.sha256(np.ascontiguousarray(content).data).hexdigest()

    def _read(self) -> tuple[Pixels, Labels]:
        if self.path.is_file():
            return self._read_file(self.path)
        for name in (self.python_file, self.binary_file):
            for file in (self.path / name, self.path / Path(name).name):
                if file.is_file():
                    return self._read_file(file)
        archives = sorted(file for file in self.path.glob("*.npz") if file.is_file())
        if len(archives) == 1:
            return self._read_file(archives[0])
        several = f"; of {', '.join(file.name for file in archives)}, give one" if archives else ""
        raise self._error(f"there is neither {self.python_file} nor {self.binary_file}{several}")

    def _read_file(self, file: Path) -> tuple[Pixels, Labels]:
        if file.suffix == ".npz":
            return self._read_npz(file)
        return self._read_binary(file) if file.suffix == ".bin" else self._read_python(file)

    def _read_npz(self, file: Path) -> tuple[Pixels, Labels]:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                return _pixels(arrays["images"]), _labels(arrays["labels"])
        except Exception as error:  # damaged bytes can raise any exception
            raise self._error(f"{file.name} is not an archive with the arrays images and labels") from error

    # Not torchvision.datasets.CIFAR10: it unpickles without restrictions and requires the training batches.
    def _read_python(self, file: Path) -> tuple[Pixels, Labels]:
        if file.suffix in {".gz", ".tar", ".zip"}:
            raise self._error(f"{file.name} is an archive; unpack it, and give the folder that is in it")
        try:
            content = read_plain_pickle(file)
        except DataError as error:
            raise self._error(str(error)) from error
        try:
            fields = {_text(key): value for key, value in content.items()}
            return _pixels(_channels_last(np.asarray(fields["data"]))), _labels(fields[self._label_field()])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._error(f"{file.name} does not hold data and {self._label_field()}") from error

    def _read_binary(self, file: Path) -> tuple[Pixels, Labels]:
        row = self._label_bytes() + _BYTES
        size = file.stat().st_size
        if size % row or size > row * _MOST_SAMPLES:
            raise self._error(f"{file.name} has {size} bytes, which is not a number of rows of {row}")
        rows = np.fromfile(file, dtype=np.uint8).reshape(-1, row)
        return _channels_last(rows[:, self._label_bytes() :]), rows[:, self._label_bytes() - 1].astype(np.int64)

    @abstractmethod
    def _label_field(self) -> str:
        """Return the key of the labels in the Python version."""

    @abstractmethod
    def _label_bytes(self) -> int:
        """Return the number of bytes before the pixels in the binary version; the last one is the label."""

    def _names_beside(self, python_file: str, field: str, binary_file: str) -> tuple[str, ...] | None:
        """Return the class names stored next to the images."""
        folder = self.path if self.path.is_dir() else self.path.parent
        for name in (self.python_file, self.binary_file):
            for place in (folder, folder / Path(name).parent):
                if (place / python_file).is_file():
                    content = read_plain_pickle(place / python_file)
                    return self._checked_names([_text(name) for name in _entry(content, field)])
                if (place / binary_file).is_file():
                    return self._checked_names(read_list(place / binary_file).split())
        return None

    def _checked_names(self, names: Sequence[str]) -> tuple[str, ...] | None:
        return tuple(names) if len(names) == self.classes else None


class Cifar10(_Cifar):
    """The test part of CIFAR-10."""

    kind = "cifar10"
    summary = "CIFAR-10: cifar-10-batches-py/test_batch, cifar-10-batches-bin/test_batch.bin, or an .npz"
    origin = "CIFAR-10 comes from https://www.cs.toronto.edu/~kriz/cifar.html"
    classes = 10
    python_file = "cifar-10-batches-py/test_batch"
    binary_file = "cifar-10-batches-bin/test_batch.bin"

    @property
    def class_names(self) -> tuple[str, ...]:
        return ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def _label_field(self) -> str:
        return "labels"

    def _label_bytes(self) -> int:
        return 1


class Cifar100(_Cifar):
    """The test part of CIFAR-100 with its fine labels."""

    kind = "cifar100"
    summary = "CIFAR-100: cifar-100-python/test, cifar-100-binary/test.bin, or an .npz; fine labels"
    origin = "CIFAR-100 comes from https://www.cs.toronto.edu/~kriz/cifar.html"
    classes = 100
    python_file = "cifar-100-python/test"
    binary_file = "cifar-100-binary/test.bin"

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self._names_beside("meta", "fine_label_names", "fine_label_names.txt")

    def _label_field(self) -> str:
        return "fine_labels"

    def _label_bytes(self) -> int:
        return 2


def _channels_last(rows: NDArray[Any]) -> NDArray[Any]:
    """Reshape rows of 1024 red, 1024 green and 1024 blue values to (n, 32, 32, 3)."""
    return rows.reshape(-1, 3, _EDGE, _EDGE).transpose(0, 2, 3, 1)


def _pixels(values: NDArray[Any]) -> Pixels:
    if values.dtype != np.uint8:
        raise ValueError(values.dtype)
    return values


def _labels(values: Any) -> Labels:
    array = np.asarray(values)
    if array.dtype.kind not in "ui" or array.ndim != 1:
        raise ValueError(array.dtype)
    return array.astype(np.int64)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _entry(content: Any, field: str) -> Any:
    for key in (field, field.encode()):
        if isinstance(content, dict) and key in content:
            return content[key]
    raise DataError(f"there is no {field} among the class names")
