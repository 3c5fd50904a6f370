"""Reads pickled arrays and lists without running anything that a pickle could name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from vitreous.errors import DataError

_MOST_BYTES = 200 * 2**20
_NUMBERS = "biuf"  # kinds of dtypes
_ARRAY = object()  # stands for numpy.ndarray where a pickle says of what class an array is; it cannot be called


def read_plain_pickle(file: Path) -> Any:
    """Return what was pickled, as long as it is made of plain values and numpy's arrays and numbers.

    Text of Python 2 comes as bytes.

    Raises:
        DataError: The file is damaged, too large, or names any function or class besides those of arrays and numbers.
    """
    if file.stat().st_size > _MOST_BYTES:
        raise DataError(f"{file}: the file is larger than {_MOST_BYTES // 2**20} MiB")
    try:
        with file.open("rb") as content:
            return _PlainUnpickler(content, encoding="bytes").load()
    except _ForbiddenNameError as error:
        raise DataError(f"{file}: it names {error}, which is not part of an array; nothing of it was run") from error
    except Exception as error:  # damaged bytes fail with any type there is
        raise DataError(f"{file}: this is not a pickled array, or a damaged one") from error


class _ForbiddenNameError(Exception):
    """A pickle asks for something that is not part of an array."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module.replace("numpy._core", "numpy.core"), name))
        if allowed is None:
            raise _ForbiddenNameError(f"{module}.{name}")
        return allowed

    def persistent_load(self, _identifier: Any) -> NoReturn:
        raise _ForbiddenNameError("a persistent object")


def _empty_array(kind: Any, _shape: Any, _dtype: Any) -> Any:
    """Do what numpy's own function does for its own arrays, and for nothing else: the content follows later."""
    if kind is not _ARRAY:
        raise _ForbiddenNameError("an array of another kind")
    return np.ndarray.__new__(np.ndarray, (0,), dtype=np.int8)


def _array_of_bytes(content: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    """Do what numpy's own function does, since protocol 5 of pickling, for bytes that are in the file."""
    array = np.frombuffer(_plain_bytes(content), _checked(dtype))
    if order == "K":  # since numpy 2.4: axes in an order of their own
        return array.reshape(shape).transpose(axes)
    return array.reshape(shape, order=order)


def _number_of_bytes(dtype: Any, content: Any) -> Any:
    """Do what numpy's own function does for one number."""
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
    """Return a dtype of numbers; pickled objects inside of an array are not needed for photos."""
    dtype = _checked(np.dtype(code.decode() if isinstance(code, bytes) else code))
    # Numpy's own one of that kind: it ignores the state that follows, which could say of any other that its numbers are
    # places of objects in memory. Numbers of another machine's order of bytes are wrong for it, and refused by readers.
    return np.dtype(dtype.type)


def _latin_bytes(text: Any, encoding: Any) -> bytes:
    """Return the bytes that Python 3 writes as text where it pickles for Python 2."""
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
