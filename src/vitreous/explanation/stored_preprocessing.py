"""How photos were prepared, as a saved folder tells it: every value is checked before it is believed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, get_args

from PIL import Image

from vitreous._utils.storage import StorageError
from vitreous.errors import ModelError
from vitreous.models.preprocessing import CropRounding, Preprocessing, Resize

_LONGEST_EDGE = 2**31


def read_preprocessing(stored: object) -> Preprocessing | None:
    """Give what was saved; JSON has lists for tuples. Folders of earlier versions have none.

    Raises:
        StorageError: A field is missing, unknown, or holds what it cannot hold.
    """
    if stored is None:
        return None
    if not isinstance(stored, Mapping):
        raise StorageError("its preprocessing is no table")
    for name, value in stored.items():
        check = _CHECKS.get(name)
        if check is None:
            raise StorageError(f"its preprocessing has an unknown field {name!r}")
        if not check(value):
            raise StorageError(f"its preprocessing cannot have {name} = {value!r}")
    missing = next((name for name in ("image_size", "mean", "std") if name not in stored), None)
    if missing is not None:
        raise StorageError(f"its preprocessing lacks {missing}")
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
    }
    try:
        return Preprocessing(**fields)
    except ModelError as error:
        raise StorageError(f"its preprocessing is not valid: {error}") from error


def _is_number(value: Any) -> bool:
    # Written so that neither NaN nor a whole number that no float can hold passes.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_edge(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LONGEST_EDGE


def _is_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_edge, value))


def _is_triple(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_number, value))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "image_size": _is_size,
    "mean": _is_triple,
    "std": lambda value: _is_triple(value) and min(value) > 0,
    "interpolation": lambda value: isinstance(value, str) and value.upper() in Image.Resampling.__members__,
    "resize": lambda value: value in get_args(Resize),
    "resize_size": lambda value: value is None or _is_size(value),
    "rescale": lambda value: _is_number(value) and value > 0,
    "crop_rounding": lambda value: value in get_args(CropRounding),
}
