"""Reports of an audit: a JSON file and pictures of examples, an HTML page made of both, and the tests as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vitreous import __version__
from vitreous._utils.storage import atomic_file, write_text
from vitreous.auditing.audit import Audit
from vitreous.auditing.collected import Bools
from vitreous.auditing.testing import Tested
from vitreous.datasets.dataset import Sample
from vitreous.errors import VitreousError
from vitreous.html.page import data_uri, render
from vitreous.models import LoadedModel
from vitreous.pictures.style import overlay

EFFECTS = ("removal", "insertion")
_EXAMPLES = "audit-examples"  # the folder of their pictures, beside audit.json
_SIDE = 240  # pixels of an example
_OUTLINE = (255, 255, 255)
_KINDS = (
    "corners, edges and the border",
    "background",
    "clusters of maps outside of the object",
    "colour of whole photos",
)


def write_reports(audit: Audit, folder: Path | None = None, *, examples: int = 6) -> dict[str, Path]:
    """Write ``audit.json`` with pictures of examples, ``audit.html`` made of them, and ``audit.csv``.

    Args:
        audit: what was found.
        folder: where to write; by default the audit's folder.
        examples: photos shown per finding.

    Returns:
        The files by their kind: ``html``, ``json``, ``csv``.
    """
    place = audit.store.folder if folder is None else folder
    files = {kind: place / f"audit.{kind}" for kind in ("html", "json", "csv")}
    content = _finite(audit.as_json())
    for number, (row, tested) in enumerate(zip(content["findings"], audit.findings, strict=True), start=1):
        row["examples"] = list(_write_examples(audit, tested, number, place, examples))
    write_text(files["json"], json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    write_text(files["csv"], as_csv(audit))
    write_text(files["html"], as_html(content, place))
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


def as_html(content: Mapping[str, Any], folder: Path) -> str:
    """Render the report of an audit for a reader who did not run it.

    Args:
        content: what ``audit.json`` holds.
        folder: the folder of ``audit.json``, which the names of pictures start from.
    """
    examined = content["examined"]
    title = f"Audit of {examined['model']['name'].partition('@')[0]} on {examined['data'].rpartition('/')[2]}"
    return render(
        "audit.html",
        title=title,
        heading=title,
        style="audit.css",
        version=__version__,
        facts=_facts(content),
        findings=[
            {
                **row,
                "effects": [(name, *_cells(row[name])) for name in EFFECTS if name in row],
                "pictures": list(read_examples(row, folder)),
            }
            for row in content["findings"]
        ],
        observations=[row["sentence"] for row in content["observations"]],
        rejected=[_rejected(row) for row in content["not confirmed"]],
        power=_power(content["power"]),
        too_few=all(each["share"] is None for each in content["power"]),
        kinds=_KINDS,
        left_out=content["suspicions left out"],
        settings=json.dumps(content["settings"]),
        fingerprint=content["fingerprint"],
        tests=content["tests"],
        failures=examined["not explained"][:200],
        decision=content["settings"]["decision"],
    )


def read_examples(row: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    """Read the pictures of a finding's examples.

    Args:
        row: a finding of ``audit.json``.
        folder: the folder of ``audit.json``.

    Yields:
        The picture as a data URI, and its caption. Missing pictures are left out.
    """
    for example in row.get("examples", ()):
        file = folder / _EXAMPLES / Path(str(example["picture"])).name  # never a file of another folder
        if file.is_file():
            caption = f"{example['photo']} · {_percent(example['probability'])}"
            yield data_uri(file.read_bytes(), "image/jpeg"), caption


def _facts(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    told = content["examined"]
    accuracy = "no labels of its classes" if told["accuracy"] is None else _percent(told["accuracy"])
    masks = f"{told['masks']} photos with masks" if told["masks"] else "none: objects are estimated"
    return [
        ("model", f"{told['model']['name']}, weights {told['weights']}"),
        ("data", f"{told['data']}, fingerprint {told['data fingerprint']}"),
        ("photos", f"{told['photos']} examined, {len(told['not explained'])} could not be; {told['classes']} classes"),
        ("agreement of predictions and labels", accuracy),
        ("masks", masks),
        ("maps", f"{told['method']}, {told['grid'][0]} x {told['grid'][1]} patches, of the predicted class"),
        ("versions", ", ".join(f"{name} {version}" for name, version in told["versions"].items())),
        ("started", told["created"]),
        ("command", _command(told["command"])),
        ("run", told["run"]),
    ]


def _command(words: Sequence[str]) -> str:
    """The command as a person types it; of a Python program, how it was started."""
    return shlex.join(["vitreous", *words[1:]] if list(words[1:2]) == ["audit"] else words)


def _cells(effect: Mapping[str, Any]) -> tuple[str, ...]:
    interval = f"{_percent(effect['excess'])} [{_percent(effect['low'])}, {_percent(effect['high'])}]"
    numbers = (_number(effect["probability"], "+.3f"), _number(effect["p"], ".2g"), _number(effect["q"], ".2g"))
    return (_percent(effect["changed"]), _percent(effect["control"]), interval, *numbers, str(effect["n"]))


def _rejected(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A suspicion that was not confirmed: class, what, why, the effects, and what had been found."""
    logits = row["kind"] == "shared evidence"
    named = {"place", "background", "colour"}  # the place says the kind as well
    what = row["place"] if row["kind"] in named else f"{row['place']} ({row['kind']})"
    effects = [row.get(name) for name in EFFECTS]
    told = [
        "not tested"
        if effect is None
        else f"{_number(effect['probability'], '+.2f') + ' logits' if logits else _percent(effect['excess'])}, "
        f"q {_number(effect['q'], '.2g')}"
        for effect in effects
    ]
    found = [effect["detectable"] for effect in effects if effect is not None and effect["detectable"] is not None]
    largest = max(found, default=None)
    detectable = f"{_number(largest, '.2f')} logits" if logits else _percent(largest)
    return (row["class name"], what, row["suspected because"], *told, detectable)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _power(classes: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """By class, the smallest part of its photos whose shortcut had become a suspicion with a power of 80%."""
    rows = [
        (each["class name"], str(each["photos"]), f"{_percent(each['share'])} of its photos")
        for each in classes
        if each["share"] is not None
    ]
    few = [each["photos"] for each in classes if each["share"] is None]
    if few:
        rows.append((f"{len(few)} {'further classes' if rows else 'classes'}", f"at most {max(few)}", "too few photos"))
    return rows


def _write_examples(
    audit: Audit, tested: Tested, number: int, folder: Path, count: int
) -> Iterator[dict[str, str | float]]:
    """Draw photos that show a finding, with their maps and the suspected patches outlined."""
    suspicion, collected = tested.suspicion, audit.collected
    model = audit.context.model
    assert isinstance(model, LoadedModel)
    order = np.argsort(-collected.probability[suspicion.photos], kind="stable")
    for place, row in enumerate(order[:count].tolist(), start=1):
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
        name = f"{_EXAMPLES}/{number}-{place}.jpg"
        with atomic_file(folder / name) as draft:
            shown.convert("RGB").save(draft, format="JPEG", quality=88)
        yield {"picture": name, "photo": collected.names[photo], "probability": float(collected.probability[photo])}


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
