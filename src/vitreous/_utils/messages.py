"""One-line error messages and warnings: reasons, close matches, the caller's line."""

from __future__ import annotations

import difflib
import inspect
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vitreous.errors import VitreousError

_LONGEST = 200


def error_message(error: BaseException) -> str:
    """Return the message of an error on one line, truncated; its type if the message is empty."""
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__


def short_repr(value: object) -> str:
    """Return the repr of a value on one line, truncated."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  # a foreign __repr__ can raise any exception
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def close_match(word: str, words: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` with close matches; empty without any."""
    close = difflib.get_close_matches(word.lower(), list(words), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""


def printable(text: str) -> str:
    """Escape characters that UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


_INSIDE = f"{Path(__file__).parents[1]}{os.sep}"


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the stack level of the first caller outside of this package."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@contextmanager
def errors_as(kind: type[VitreousError], problem: str) -> Iterator[None]:
    """Convert exceptions of the block that are not a ``VitreousError``; interrupts pass.

    Args:
        kind: the type to raise.
        problem: the beginning of the message; the type and message of the exception follow in brackets.
    """
    try:
        yield
    except VitreousError:
        raise
    except MemoryError as error:
        raise kind(f"{problem}: there is not enough memory") from error
    except Exception as error:
        raise kind(f"{problem} ({described_error(error)})") from error


def described_error(error: BaseException) -> str:
    """Return type and message of an exception on one line."""
    reason, name = error_message(error), type(error).__name__
    return name if reason == name else f"{name}: {reason}"
