"""Tries methods on every model of the tests' zoo: which are served, which are refused and why, which crash.

    python scripts/sweep_models.py [--only TEXT ...] [--json FILE] [--resume]

The zoo has every model of vit-pytorch, settings of x-transformers, the ViTs of MONAI, kornia and self-attention-cv,
one model of every transformer-like family of timm, torchvision's, transformers' image classifiers, one small ViT in
many spellings, own-written models in many hands, and 3-D models of volumes and clips. All of it takes some five minutes
of one idle processor;
``--resume`` goes on where a run was stopped.

A model is served fully, partly, or not at all (refused: only errors of vitreous; crashed: any other exception). Models
are small and have random weights, so that this says what works, not what is good.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import vitreous
from vitreous.errors import RefusedMethodsError, VitreousError

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "support")]

from zoo import ENTRIES, OWN_WRITTEN, VOLUMES, Entry  # noqa: E402

MAIN = ("tokentm", "gradtoken", "decompx.skipplus", "gae", "ixg", "gradcam", "rise:budget=4")
METHODS = (
    *MAIN,
    *("raw_attention", "rollout", "transattr", "attnlrp", "conservative_lrp", "lrp", "abslrp", "ixg:rule=libra"),
    *("legrad", "globenc", "alti", "gradient", "fullgrad", "layercam", "vit_recipro_cam", "scorecam:budget=4"),
    *("integrated_gradients:steps=2", "smoothgrad:samples=2", "occlusion:window=2,stride=2"),
)
VERDICTS = ("full", "partly", "refused", "crashed")


@dataclass
class Row:
    """What became of one model.

    Attributes:
        name: the model.
        kind: what the zoo says of its patches.
        grid: rows and columns of the map, where a method was served.
        served: the methods that gave a finite map.
        refused: by method, the error and its message.
        crashed: by method, an exception that is none of vitreous, or that a map is not finite.
    """

    name: str
    kind: str
    grid: list[int] | None = None
    served: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    crashed: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``; a crash of one method counts most."""
        if self.crashed:
            return "crashed"
        return "refused" if not self.served else "partly" if self.refused else "full"


def row_of(entry: Entry, methods: Sequence[str]) -> Row:
    """Try methods on a model: all at once, then one by one where that fails without saying whose fault it is."""
    row = Row(entry.name, entry.kind)
    model, images = entry.build(), entry.images()
    pending = [list(methods)]
    while pending:
        asked = pending.pop()
        try:
            found = vitreous.explain(model, images, asked, 1)
        except RefusedMethodsError as error:
            refused = [method for method in asked if method in error.reasons] or asked
            row.refused |= {method: _told(error, error.reasons.get(method)) for method in refused}
            pending += [left] if (left := [method for method in asked if method not in refused]) else []
        except Exception as error:  # noqa: BLE001 - that there is any other exception is what is looked for
            if len(asked) > 1:
                pending += [[method] for method in asked]
            elif isinstance(error, VitreousError):
                row.refused[asked[0]] = _told(error)
            else:
                row.crashed[asked[0]] = _told(error)
        else:
            row.grid = list(found.grid)
            for method, scores in found.scores.items():
                if bool(scores.isfinite().all()):
                    row.served.append(method)
                else:
                    row.crashed[method] = "not finite"
    row.served.sort(key=methods.index)
    return row


def _told(error: Exception, reason: str | None = None) -> str:
    return f"{type(error).__name__}: {reason or error}"


def shares(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """How many models have which verdict: all, by package and by kind."""
    groups: dict[str, Counter[str]] = {}
    for row in rows:
        for group in ("all", f"package {row.name.partition('/')[0]}", f"kind {row.kind}"):
            groups.setdefault(group, Counter())[row.verdict] += 1
    return {
        group: {**{verdict: counts[verdict] for verdict in VERDICTS}, "models": counts.total()}
        for group, counts in groups.items()
    }


def by_reason(told: dict[str, str]) -> dict[str, list[str]]:
    """Methods by the beginning of what was said against them."""
    found: dict[str, list[str]] = {}
    for method, reason in told.items():
        found.setdefault(" ".join(reason.split())[:200], []).append(method)
    return found


def show(row: Row) -> None:
    """Print one line: the verdict, the main methods as + or -, and the first reason against one."""
    marks = "".join("+" if m in row.served else "!" if m in row.crashed else "-" for m in MAIN)
    problems = [*row.crashed.values(), *row.refused.values()]
    reason = " ".join(problems[0].split())[:110] if problems else ""
    print(f"{row.verdict:8} {marks} {len(row.served):2}/{len(METHODS)} {row.name:55} {reason}", flush=True)


def main() -> None:
    """Try everything, print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="models whose names contain one of these")
    parser.add_argument("--json", type=Path, help="written behind every model")
    parser.add_argument("--resume", action="store_true", help="keep the models that are in the file already")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: dict[str, Row] = {row.name: row for row in (kept_rows(given.json) if given.json and given.resume else ())}
    print(f"         {' '.join(MAIN)}")
    entries = [*ENTRIES, *OWN_WRITTEN, *VOLUMES]
    for entry in entries:
        if entry.name not in rows and any(part in entry.name for part in given.only):
            rows[entry.name] = row_of(entry, METHODS)
            show(rows[entry.name])
            if given.json is not None:
                write(given.json, [rows[each.name] for each in entries if each.name in rows])
    for group, counts in shares(list(rows.values())).items():
        print(f"{group:28}", ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def write(file: Path, rows: Sequence[Row]) -> None:
    """Write what became of models, a line for each."""
    models = [{**asdict(row), "refused": by_reason(row.refused), "crashed": by_reason(row.crashed)} for row in rows]
    text = json.dumps({"methods": METHODS, "models": models}, separators=(",", ":"))
    file.write_text(text.replace('{"name"', '\n{"name"') + "\n", encoding="utf-8")


def kept_rows(file: Path) -> list[Row]:
    """What a file has of models that were tried with the same methods."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"methods": [], "models": []}
    if found["methods"] != list(METHODS):
        return []
    return [
        Row(
            model["name"],
            model["kind"],
            model["grid"],
            model["served"],
            *(
                {method: reason for reason, methods in model[part].items() for method in methods}
                for part in ("refused", "crashed")
            ),
        )
        for model in found["models"]
    ]


if __name__ == "__main__":
    main()
