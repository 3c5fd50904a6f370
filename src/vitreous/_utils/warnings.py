"""Warnings that point at the line which called the library, however deep inside of it they arise."""

from __future__ import annotations

import inspect
import os
import warnings
from pathlib import Path

_INSIDE = f"{Path(__file__).parents[1]}{os.sep}"


def warn_caller(message: str) -> None:
    """Warn about what a caller of the library asked for."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
