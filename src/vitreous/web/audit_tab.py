"""The audit tab: browse the findings of audits that ``vitreous audit`` has written, with examples and maps."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from vitreous.auditing.report import read_examples
from vitreous.errors import InputError
from vitreous.html.page import render
from vitreous.web.tab_controller import SHARED_OPTIONS

HOW = (
    '<div class="v-how"><h3>What does a model rely on over a whole data set?</h3>'
    "<p>An audit maps every photo, looks for evidence besides the object (corners, borders, backgrounds, colours), and "
    "tests each suspicion by intervention. Make one, and show it here:</p>"
    "<pre><code>vitreous audit demo labelled:FOLDER --out audits\nvitreous serve --audit audits</code></pre>"
    "<p class='v-faint'>FOLDER has photos and labels.csv (file, class_index); <code>vitreous datasets</code> lists "
    "other kinds of data. An audit needs the extra vitreous[audit].</p></div>"
)
_EVERY = "all classes"
# What can be listed: its title, and where it is in audit.json.
_LISTS = (
    ("Findings", "findings"),
    ("Observations", "observations"),
    ("Explained by findings", "explained by other findings"),
    ("Not confirmed", "not confirmed"),
)
_EFFECTS = {"removal": "Removing it", "insertion": "Pasting it into photos of other classes"}
_MOST_CARDS = 100  # of one list; the report has all


@dataclass(frozen=True)
class AuditReport:
    """What one audit has written.

    Attributes:
        folder: Its folder.
        content: ``audit.json``.
    """

    folder: Path
    content: dict[str, Any]

    @property
    def title(self) -> str:
        """Model, data and time, for the list of audits."""
        examined = self.content["examined"]
        return f"{examined['model']['name']} on {self.data}, {str(examined['created'])[:16].replace('T', ' ')}"

    @property
    def data(self) -> str:
        """The last part of the path of the data: visitors need not know where it lies."""
        return str(self.content["examined"]["data"]).rstrip("/").rpartition("/")[2]

    @property
    def page(self) -> Path:
        """The self-contained report."""
        return self.folder / "audit.html"

    def rows(self, which: str, name: str | None = None) -> list[tuple[int, dict[str, Any]]]:
        """The numbered entries of a list, of one class or all."""
        found = enumerate(self.content.get(which, []), start=1)
        return [(number, row) for number, row in found if name in (None, _EVERY, row["class name"])]

    def class_names(self, which: str) -> list[str]:
        """The classes that a list has entries of."""
        return sorted({str(row["class name"]) for _, row in self.rows(which)})


def find_audits(folder: Path) -> list[AuditReport]:
    """Read the audits of a folder: its own, or those of its subfolders, the newest first.

    Raises:
        InputError: there is none.
    """
    files = [folder / "audit.json"] if (folder / "audit.json").is_file() else sorted(folder.glob("*/audit.json"))
    found = []
    for file in files:
        try:
            content = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError):  # being written, or of another program
            continue
        if isinstance(content, dict) and content.get("format") == "vitreous audit":
            found.append(AuditReport(file.parent, content))
    if not found:
        raise InputError(f"{folder} holds no audit: make one with `vitreous audit MODEL DATA --out {folder}`")
    return sorted(found, key=lambda audit: str(audit.content["examined"]["created"]), reverse=True)


def audit_html(audit: AuditReport, place: int, which: str, name: str | None) -> str:
    """Render one list of an audit; ``place`` is that of the audit, for the link to its report."""
    rows = audit.rows(which, name)
    cards = [
        {
            "number": number,
            "row": row,
            "effects": [(title, row[kind]) for kind, title in _EFFECTS.items() if isinstance(row.get(kind), dict)],
            "examples": list(read_examples(row, audit.folder)),
        }
        for number, row in rows[:_MOST_CARDS]
    ]
    return render(
        "audit_tab.html",
        cards=cards,
        left=len(rows) - len(cards),
        which=which,
        findings=len(audit.content["findings"]),
        examined=audit.content["examined"],
        data=audit.data,
        report=f"audit/{place}" if audit.page.is_file() else None,
    )


def report_routes(audits: Sequence[AuditReport]) -> list[Route]:
    """The routes that serve the reports of the audits: ``/audit/0`` and so on."""

    async def report(request: Request) -> Response:
        place = int(request.path_params["place"])
        if place >= len(audits) or not audits[place].page.is_file():
            return PlainTextResponse("There is no such audit.", 404)
        return FileResponse(audits[place].page, media_type="text/html")

    return [Route("/audit/{place:int}", report)]


def build_audit_tab(audits: Sequence[AuditReport]) -> None:
    """Create the tab and its events; without audits it says how to make one."""
    if not audits:
        gr.HTML(HOW, elem_id="vitreous-audit-none")
        return
    with gr.Row(elem_classes="vitreous-columns"):
        with gr.Column(scale=2, min_width=280, elem_classes="v-audit-side"):
            chosen = gr.Dropdown(
                [(audit.title, place) for place, audit in enumerate(audits)],
                value=0,
                label="Audit",
                visible=len(audits) > 1,
                elem_id="vitreous-audit",
            )
            which = gr.Radio(_choices(audits[0]), value="findings", label="Show", elem_id="vitreous-audit-list")
            name = gr.Dropdown(
                [_EVERY, *audits[0].class_names("findings")],
                value=_EVERY,
                label="Class",
                elem_id="vitreous-audit-class",
            )
        with gr.Column(scale=5, min_width=280, elem_classes="v-main"):
            shown = gr.HTML(audit_html(audits[0], 0, "findings", None), elem_id="vitreous-audit-shown")

    def choose(place: int) -> dict[Any, Any]:
        audit = _audit(audits, place)
        names = [_EVERY, *audit.class_names("findings")]
        return {
            which: gr.update(choices=_choices(audit), value="findings"),
            name: gr.update(choices=names, value=_EVERY),
            shown: audit_html(audit, int(place), "findings", None),
        }

    def change_list(place: int, kind: str) -> dict[Any, Any]:
        audit, kind = _audit(audits, place), _kind(kind)
        names = [_EVERY, *audit.class_names(kind)]
        return {name: gr.update(choices=names, value=_EVERY), shown: audit_html(audit, int(place), kind, None)}

    def change_class(place: int, kind: str, one: str) -> str:
        return audit_html(_audit(audits, place), int(place), _kind(kind), str(one or _EVERY))

    options: dict[str, Any] = SHARED_OPTIONS
    chosen.input(choose, chosen, [which, name, shown], **options)
    which.input(change_list, [chosen, which], [name, shown], **options)
    name.input(change_class, [chosen, which, name], shown, **options)


def _choices(audit: AuditReport) -> list[tuple[str, str]]:
    return [(f"{title} ({len(audit.content.get(key, []))})", key) for title, key in _LISTS]


def _audit(audits: Sequence[AuditReport], place: int) -> AuditReport:
    if not isinstance(place, int) or not 0 <= place < len(audits):
        raise InputError("There is no such audit.")
    return audits[place]


def _kind(kind: str) -> str:
    if kind not in {key for _, key in _LISTS}:
        raise InputError(f"An audit has no list {html.escape(str(kind))}.")
    return kind
