"""Numbers as they are typed on a command line."""

from __future__ import annotations

import math
import re

import typer


def channel_values(text: str | None, option: str) -> tuple[float, ...] | None:
    """Read one number or three, separated by commas."""
    if text is None:
        return None
    try:
        values = tuple(float(piece) for piece in text.split(","))
    except ValueError:
        values = ()
    if len(values) not in {1, 3} or not all(map(math.isfinite, values)):
        raise typer.BadParameter(f"{text!r} is not one number or three separated by commas", param_hint=option)
    return values


def height_and_width(text: str | None, option: str) -> tuple[int, int] | None:
    """Read one number, or height and width as ``224x192``."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,8})(?:[x,]([1-9]\d{0,8}))?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 224 or 224x192", param_hint=option)
    return int(match[1]), int(match[2] or match[1])
