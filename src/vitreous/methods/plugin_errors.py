"""Errors in methods that are not of this package: they name the method, its file and line, and what is wrong."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vitreous._utils.error_boundary import described_error
from vitreous.errors import MethodError, VitreousError
from vitreous.methods.registry import MethodInfo


@contextmanager
def plugin_errors(info: MethodInfo) -> Iterator[None]:
    """Turn what code outside this package raises into a ``MethodError`` that names it; methods of this one pass.

    Errors about the model or the input stay as they are, as does a lack of memory.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not info.is_own or (isinstance(error, VitreousError) and type(error) is not MethodError):
            raise
        said = str(error) if isinstance(error, MethodError) else described_error(error)
        raise MethodError(f"method {info.name} ({place_of(info, error)}): {said}") from error


def place_of(info: MethodInfo, error: BaseException) -> str:
    """Where in the method's file an error arose, or where the method begins if that was behind its end."""
    code = getattr(info.written, "__code__", None)
    file = code.co_filename if code is not None else inspect.getfile(info.written)
    line = line_in(file, error) or (code.co_firstlineno if code is not None else None)
    # What was typed into a notebook has the name of a file that is not there.
    named = f"{Path(file).name}, " if Path(file).is_file() else ""
    return f"{named}line {line}" if line else Path(file).name


def line_in(file: str, error: BaseException) -> int | None:
    """Give the innermost line of a file that an error passed."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None
