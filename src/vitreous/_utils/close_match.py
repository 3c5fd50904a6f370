"""What a word that is not known may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def close_match(word: str, words: Iterable[str]) -> str:
    """``; did you mean ...?`` where something close exists."""
    close = difflib.get_close_matches(word.lower(), list(words), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""
