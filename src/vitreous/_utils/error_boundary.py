"""The boundary between what users bring and this package: whatever fails inside becomes one sentence of our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vitreous._utils.text import reason_of
from vitreous.errors import VitreousError


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
