"""Text that can be encoded: names of files need not be, for a file may be called by any bytes."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text with an escape for everything in it that UTF-8 does not know."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
