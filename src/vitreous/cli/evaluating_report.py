"""What ``vitreous evaluate`` prints at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from vitreous.benchmark.results import Results


def as_json(results: Results) -> list[dict[str, Any]]:
    return []


def show(results: Results, console: Console) -> None:
    pass
