"""Tells versions of somebody's own code apart: the file that a function or class is written in, or the code itself."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from types import CodeType
from typing import Any


def source_hash(written: Any) -> str:
    """Return the sha256 of the file of a function or class, so that what it calls there counts as well.

    What was typed into an interactive session has no file: the function's instructions count then, or of a class those
    of its functions.
    """
    try:
        content = Path(inspect.getsourcefile(written) or "").read_bytes()
    except (TypeError, OSError):
        functions = vars(written).values() if inspect.isclass(written) else (written,)
        codes = [getattr(function, "__code__", None) for function in functions]
        content = "\n".join(_instructions(code) for code in codes if code is not None).encode()
    return hashlib.sha256(content).hexdigest()


def _instructions(code: CodeType) -> str:
    """Tell what a function does; functions inside it are among its constants."""
    constants = [_instructions(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
