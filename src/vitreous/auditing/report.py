"""Reports of an audit: one self-contained HTML page for an auditor, JSON with everything, CSV with one row per test."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image, ImageDraw

from vitreous import __version__
from vitreous._utils.storage import write_text
from vitreous.auditing.audit import Audit
from vitreous.auditing.collected import Bools
from vitreous.auditing.testing import Effect, Tested
from vitreous.datasets.dataset import Sample
from vitreous.errors import VitreousError
from vitreous.html.page import picture, render
from vitreous.models import LoadedModel
from vitreous.pictures.style import overlay

_SIDE = 160  # pixels of an example
_OUTLINE = (255, 255, 255)
_KINDS = {
    "place": "corners, edges and the border",
    "background": "background",
    "cluster": "clusters of maps outside of the object",
    "colour": "colour of whole photos",
}


@dataclass(frozen=True)
class _Card:
    """A finding as the page shows it."""

    number: int
    sentence: str
    reason: str
    rows: list[tuple[str, ...]]
    examples: list[tuple[Markup, str]]
    covers: list[str]


def write_reports(audit: Audit, folder: Path | None = None, *, examples: int = 6) -> dict[str, Path]:
    """Write ``audit.html``, ``audit.json`` and ``audit.csv``, by default into the audit's folder.

    Args:
        audit: what was found.
        folder: where to write.
        examples: photos shown per finding.

    Returns:
        The files by their kind: ``html``, ``json``, ``csv``.
    """
    place = audit.store.folder if folder is None else folder
    files = {kind: place / f"audit.{kind}" for kind in ("html", "json", "csv")}
    write_text(files["json"], json.dumps(_finite(audit.as_json()), indent=2, ensure_ascii=False) + "\n")
    write_text(files["csv"], as_csv(audit))
    write_text(files["html"], as_html(audit, examples=examples))
    return files


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_csv(audit: Audit) -> str:
    """One row per suspicion and effect."""
    stream = io.StringIO()
    fields = ("changed", "control", "excess", "low", "high", "probability", "p", "q", "detectable", "n")
    rows = csv.writer(stream, lineterminator="\n")
    heading = ("result", "kind", "class", "class name", "place", "photos", "share of class", "decided", "effect")
    rows.writerow((*heading, *fields))
    for each in audit.tested:
        suspicion = each.suspicion
        result = ("finding" if each.is_shortcut else "observation") if each.finding else "not confirmed"
        about = (
            "explained by another" if each.covered_by is not None else result,
            *(suspicion.kind, suspicion.target, audit.class_name(suspicion.target), suspicion.place),
            *(len(suspicion.photos), f"{each.shown_share:.6g}", f"{each.decided:.6g}"),
        )
        for name, effect in each.effects.items() or [("not tested", None)]:
            numbers = ["" if effect is None else f"{getattr(effect, field):.6g}" for field in fields]
            rows.writerow((*about, name, *numbers))
    return stream.getvalue()


def as_html(audit: Audit, *, examples: int = 6) -> str:
    """The page for an auditor."""
    cards = [_card(audit, number, each, examples) for number, each in enumerate(audit.findings, start=1)]
    rejected = [
        (
            audit.class_name(each.suspicion.target),
            _what(each),
            each.suspicion.reason,
            *(_told(each, name) for name in ("removal", "insertion")),
            _detectable(each),
        )
        for each in audit.rejected
    ]
    run = audit.run
    title = f"Audit of {run.model.name.partition('@')[0]} on {run.data.rpartition('/')[2]}"
    return render(
        "audit.html",
        title=title,
        heading=title,
        style="audit.css",
        version=__version__,
        facts=_facts(audit),
        cards=cards,
        observations=[audit.sentence(each) for each in audit.observations],
        rejected=rejected,
        power=_power(audit),
        kinds=list(_KINDS.values()),
        left_out=audit.left_out,
        settings=json.dumps(dict(audit.settings)),
        fingerprint=audit.fingerprint,
        tests=sum(len(each.effects) for each in audit.tested),
        failures=audit.collected.failures[:200],
        decision=audit.settings["decision"],
    )


def _facts(audit: Audit) -> list[tuple[str, str]]:
    told = audit.as_json()["examined"]
    accuracy = "no labels of its classes" if told["accuracy"] is None else _percent(told["accuracy"])
    masks = f"{told['masks']} photos with masks" if told["masks"] else "none: objects are estimated"
    return [
        ("model", f"{audit.run.model.name}, weights {audit.run.weights}"),
        ("data", f"{audit.run.data}, fingerprint {audit.run.data_fingerprint}"),
        ("photos", f"{told['photos']} examined, {len(told['not explained'])} could not be; {told['classes']} classes"),
        ("agreement of predictions and labels", accuracy),
        ("masks", masks),
        ("maps", f"{told['method']}, {told['grid'][0]} x {told['grid'][1]} patches, of the predicted class"),
        ("versions", ", ".join(f"{name} {version}" for name, version in told["versions"].items())),
        ("started", told["created"]),
        ("command", shlex.join(map(str, told["command"]))),
        ("run", told["run"]),
    ]


def _card(audit: Audit, number: int, tested: Tested, examples: int) -> _Card:
    place = audit.tested.index(tested)
    covers = [audit.sentence(each) for each in audit.tested if each.covered_by == place]
    rows = [(name, *_cells(effect)) for name, effect in tested.effects.items()]
    shown = list(_examples(audit, tested, examples))
    return _Card(number, audit.sentence(tested), tested.suspicion.reason, rows, shown, covers)


def _cells(effect: Effect) -> tuple[str, ...]:
    interval = f"{_percent(effect.excess)} [{_percent(effect.low)}, {_percent(effect.high)}]"
    tests = (f"{effect.probability:+.3f}", f"{effect.p:.2g}", f"{effect.q:.2g}", str(effect.n))
    return (_percent(effect.changed), _percent(effect.control), interval, *tests)


def _what(tested: Tested) -> str:
    """What is suspected; the place alone where it says the kind as well."""
    suspicion = tested.suspicion
    told = {"place", "background", "colour"}
    return suspicion.place if suspicion.kind in told else f"{suspicion.place} ({suspicion.kind})"


def _told(tested: Tested, name: str) -> str:
    effect = tested.effects.get(name)
    if effect is None:
        return "not tested"
    logits = tested.suspicion.kind == "shared evidence"
    return f"{f'{effect.probability:+.2f} logits' if logits else _percent(effect.excess)}, q {effect.q:.2g}"


def _detectable(tested: Tested) -> str:
    """The smallest change that had been found with a power of 80%; of shared evidence, of a logit."""
    largest = max((effect.detectable for effect in tested.effects.values()), default=math.nan)
    return f"{largest:.2f} logits" if tested.suspicion.kind == "shared evidence" else _percent(largest)


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%" if math.isfinite(value) else "-"


def _power(audit: Audit) -> list[tuple[str, str, str]]:
    """By class, the smallest part of its photos whose shortcut had become a suspicion with a power of 80%."""
    rows = [
        (each["class name"], str(each["photos"]), f"{_percent(each['share'])} of its photos")
        for each in audit.power
        if each["share"] is not None
    ]
    few = [each["photos"] for each in audit.power if each["share"] is None]
    if few:
        rows.append((f"{len(few)} {'further classes' if rows else 'classes'}", f"at most {max(few)}", "too few photos"))
    return rows


def _examples(audit: Audit, tested: Tested, count: int) -> Iterator[tuple[Markup, str]]:
    """Photos that show a finding, with their maps and the suspected patches outlined."""
    suspicion, collected = tested.suspicion, audit.collected
    model = audit.context.model
    assert isinstance(model, LoadedModel)
    order = np.argsort(-collected.probability[suspicion.photos], kind="stable")
    for row in order[:count].tolist():
        photo = int(suspicion.photos[row])
        try:
            sample = audit.context.data.load(int(collected.index[photo]))
        except VitreousError:
            continue
        assert isinstance(sample, Sample)
        seen = model.preprocessing.displayed(sample.image)
        scale = max(1, round(_SIDE / max(seen.size)))
        seen = seen.resize((seen.width * scale, seen.height * scale))
        region = suspicion.regions[row] if suspicion.regions.size else None
        shares = collected.shares[photo].reshape(collected.grid)
        shown = _drawn(seen, shares, region, collected.grid)
        shown.thumbnail((_SIDE, _SIDE))
        name = collected.names[photo]
        yield Markup(picture(shown, name)), f"{name} · {_percent(float(collected.probability[photo]))}"  # noqa: S704


def _drawn(seen: Image.Image, shares: Any, region: Bools | None, grid: tuple[int, int]) -> Image.Image:
    heat = Image.fromarray((shares / max(float(shares.max()), 1e-12)).astype(np.float32))
    coloured = overlay(seen, np.asarray(heat.resize(seen.size, Image.Resampling.BILINEAR)), signed=False)
    if region is None or not region.size:
        return coloured
    draw = ImageDraw.Draw(coloured)
    inside = np.pad(region.reshape(grid), 1)
    high, wide = seen.height / grid[0], seen.width / grid[1]
    for row, column in np.argwhere(region.reshape(grid)):
        top, left = round(row * high), round(column * wide)
        bottom, right = round((row + 1) * high) - 1, round((column + 1) * wide) - 1
        sides = {
            (0, 1): (left, top, right, top),
            (2, 1): (left, bottom, right, bottom),
            (1, 0): (left, top, left, bottom),
            (1, 2): (right, top, right, bottom),
        }
        for (down, across), line in sides.items():  # only where the neighbour does not belong to it
            if not inside[row + down, column + across]:
                draw.line(line, fill=_OUTLINE, width=2)
    return coloured
