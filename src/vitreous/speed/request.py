"""A measurement as it is asked for by name, and as it is kept: rows with date, versions and command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vitreous._utils.storage import write_text
from vitreous.evaluation.runner.prepare_run import spelled_out
from vitreous.explanation.provenance import collect_provenance
from vitreous.models import load_model
from vitreous.speed.measuring import SPEED_METHODS, measure_speed
from vitreous.speed.peers import find_peers, usual_spellings
from vitreous.speed.rows import SpeedRow


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        model: a name that ``load_model`` understands.
        methods: spellings and words for groups of methods; where there are none, what the peers have, or a few.
        batch: images at once.
        size: height and width of the images, where they are not the model's own.
        repeats: how often everything is timed.
        peers: whose forms are measured too; ``all`` for every one there is.
        together: whether all methods are also asked at once.
        device: where the model runs.
        command: what was typed.
    """

    model: str
    methods: Sequence[str] = ()
    batch: int = 4
    size: tuple[int, int] | None = None
    repeats: int = 5
    peers: Sequence[str] = ()
    together: bool = False
    device: str = "cpu"
    command: str = ""


@dataclass(frozen=True)
class Measured:
    """What was found, and where it comes from."""

    rows: list[SpeedRow]
    provenance: dict[str, Any]

    def save(self, file: Path) -> None:
        """Keep it as JSON, a line for each row, so that changes can be seen."""
        lines = ",\n".join(json.dumps(row.as_json(), ensure_ascii=False) for row in self.rows)
        head = json.dumps(self.provenance, ensure_ascii=False, indent=1).removesuffix("\n}")
        write_text(file, f'{head},\n "rows": [\n{lines}\n]}}\n')


def run(request: Request, notice: Callable[[str], object] = lambda _: None) -> Measured:
    """Measure what was asked for."""
    peers = find_peers(request.peers)
    methods = spelled_out(request.methods) or usual_spellings(peers) or list(SPEED_METHODS)
    model = load_model(request.model, image_size=request.size, device=request.device)
    rows = measure_speed(
        model,
        methods=methods,
        batch=request.batch,
        repeats=request.repeats,
        peers=request.peers,
        together=request.together,
        notice=notice,
    )
    provenance = collect_provenance(
        methods=methods,
        model=request.model,
        model_class=type(model.model).__name__,
        batch=request.batch,
        size=list(model.preprocessing.image_size),
        repeats=request.repeats,
        device=request.device,
        command=request.command,
    )
    provenance["versions"] |= {peer.name: _version(peer.name) for peer in peers if not peer.problem}
    return Measured(rows, provenance)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
