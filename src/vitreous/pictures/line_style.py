"""Which colour and which dashes the lines of a chart have."""

from __future__ import annotations

from collections.abc import Sequence


def line_style(number: int, colours: Sequence[str], dashes: Sequence[str]) -> tuple[str, str]:
    """Give the colour and the dashes of a line; where colours begin again, the dashes are others."""
    return colours[number % len(colours)], dashes[(number // len(colours) + number) % len(dashes)]
