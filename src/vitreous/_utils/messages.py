"""Errors and warnings in one sentence: messages of other libraries, close matches, the caller's line."""

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


def reason_of(error: BaseException) -> str:
    """The error's message on one line and not too long, or its type where it says nothing."""
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__


def shown(value: object) -> str:
    """A value that a caller gave, on one line and not too long: a tensor's own text has many."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  # whatever an object of somebody else's raises when it is asked for its text
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def close_match(word: str, words: Iterable[str]) -> str:
    """``; did you mean ...?`` where something close exists."""
    close = difflib.get_close_matches(word.lower(), list(words), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""


def printable(text: str) -> str:
    """Return a text with an escape for everything in it that UTF-8 does not know."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


_INSIDE = f"{Path(__file__).parents[1]}{os.sep}"


def warn_caller(message: str) -> None:
    """Warn about what a caller of the library asked for."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


@contextmanager
def errors_as(kind: type[VitreousError], problem: str) -> Iterator[None]:
    """Turn every exception of the block that is not a ``VitreousError`` into one; interrupts pass.

    Args:
        kind: the type that callers expect.
        problem: the beginning of the sentence; the type and the message of the exception follow in brackets.
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
    """The type and the message of an exception on one line; a missing key's message alone says little."""
    reason, name = reason_of(error), type(error).__name__
    return name if reason == name else f"{name}: {reason}"
