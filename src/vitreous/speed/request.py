"""Run a measurement by names of model and methods, and store its rows with date, versions and command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vitreous._utils.storage import write_text
from vitreous.evaluation.runner.prepare_run import expand_methods
from vitreous.explanation.folder import collect_provenance
from vitreous.models import load_model
from vitreous.speed.measuring import SPEED_METHODS, measure_speed
from vitreous.speed.peers import find_peers, usual_spellings
from vitreous.speed.timing import SpeedRow


@dataclass(frozen=True)
class Request:
    """The options of a measurement.

    Attributes:
        model: a model name, see ``load_model``.
        methods: method spellings and groups; by default those of the peers, or ``SPEED_METHODS``.
        batch: images per batch.
        size: height and width of the images; the model's own by default.
        repeats: number of repetitions.
        peers: libraries to compare with; ``all`` for every installed one.
        together: also measure all methods in one call.
        device: device of the model.
        command: the command line, for the provenance.
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
    """The rows of a measurement with their provenance."""

    rows: list[SpeedRow]
    provenance: dict[str, Any]

    def save(self, file: Path) -> None:
        """Write JSON with one line per row, for readable diffs."""
        lines = ",\n".join(json.dumps(row.as_json(), ensure_ascii=False) for row in self.rows)
        head = json.dumps(self.provenance, ensure_ascii=False, indent=1).removesuffix("\n}")
        write_text(file, f'{head},\n "rows": [\n{lines}\n]}}\n')


def run(request: Request, notice: Callable[[str], object] = lambda _: None) -> Measured:
    """Run a measurement."""
    peers = find_peers(request.peers)
    methods = expand_methods(request.methods) or usual_spellings(peers) or list(SPEED_METHODS)
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
