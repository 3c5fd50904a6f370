"""What stands where on the photo tab; what happens when it is used is in ``events``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gradio as gr

from vitreous.defaults import DEFAULT_OPACITY
from vitreous.web import cards
from vitreous.web.drawing import SIGNS
from vitreous.web.wanted import MOST_CLASSES

TITLE = "<h1>Vitreous</h1><p>Which parts of a picture, or words of a text, made the model say this class?</p>"
_CHOSEN = ("tokentm", "gradtoken")
_SPELLED = "decompx.skipplus"
_HINT = "<p>Drop a photo on the left, or pick the example.</p>"


@dataclass(frozen=True)
class Parts:
    """The parts of the page that are read or changed."""

    visit: Any
    model: Any
    photo: Any
    example: Any
    predictions: Any
    classes: Any
    methods: list[Any]
    spelled: Any
    status: Any
    stop: Any
    opacity: Any
    threshold: Any
    sign: Any
    smooth: Any
    depth: Any
    maps: Any
    picture: Any
    block: Any
    row: Any
    column: Any
    look: Any
    rows: Any
    measure: Any
    curves: Any
    png: Any
    npz: Any
    report: Any
    download: Any

    def wanted(self) -> list[Any]:
        """Give what says which maps are wanted, and how they are shown, in the order of ``events.read_controls``."""
        shown = [self.depth, self.opacity, self.sign, self.threshold, self.smooth]
        return [self.visit, self.classes, self.spelled, *shown, *self.methods]


def lay_out(models: Sequence[str], examples: Sequence[Path]) -> Parts:
    """Make the parts, inside the tab that is being built."""
    parts: dict[str, Any] = {"visit": gr.State(None)}
    with gr.Row(elem_classes="vitreous-columns"):
        with gr.Column(scale=2, min_width=280, elem_classes="vitreous-column"):
            parts |= _photo(models, examples)
            with gr.Column(elem_id="vitreous-choices", elem_classes="vitreous-choices"):
                parts |= method_choices(_CHOSEN, _SPELLED)
        with gr.Column(scale=5, min_width=280, elem_classes="vitreous-column"):
            with gr.Column(elem_classes="vitreous-shown"):
                parts |= _maps()
            with gr.Column(elem_id="vitreous-more", elem_classes="vitreous-more"):
                parts |= _patch() | _curves() | _downloads()
    return Parts(**{part.name: parts[part.name] for part in fields(Parts)})


def _photo(models: Sequence[str], examples: Sequence[Path]) -> dict[str, Any]:
    return {
        "photo": gr.File(
            label="Photo: drop it here, or press to choose", file_types=["image"], height=130, elem_id="vitreous-upload"
        ),
        "example": gr.Dataset(
            components=[gr.Image(visible=False, type="filepath")],
            samples=[[str(example)] for example in examples],
            type="index",
            label="Examples",
            elem_id="vitreous-examples",
        ),
        "predictions": gr.HTML(cards.no_predictions(), elem_id="vitreous-predictions"),
        "classes": class_choice("vitreous-classes"),
        "model": gr.Dropdown(
            list(models),
            value=models[0],
            label="Model",
            info="demo, timm/NAME or hf/NAME; press Enter",
            allow_custom_value=True,
            elem_id="vitreous-model",
        ),
    }


def class_choice(name: str) -> Any:
    """Give what classes are chosen with."""
    return gr.Dropdown(
        [],
        label="Classes to explain",
        info=f"Type to search; up to {MOST_CLASSES}. None: what the model says.",
        multiselect=True,
        max_choices=MOST_CLASSES,
        elem_id=name,
    )


def status_bar(prefix: str = "") -> tuple[Any, Any]:
    """Give what tells how far work is, and the button that stops it."""
    with gr.Row(elem_classes="vitreous-bar"):
        with gr.Column(scale=5, min_width=200):
            status = gr.HTML(cards.status("Ready."), elem_id=f"vitreous-{prefix}status")
        stop = gr.Button(
            "Stop",
            variant="stop",
            size="sm",
            interactive=False,
            scale=0,
            min_width=90,
            elem_id=f"vitreous-{prefix}stop",
        )
    return status, stop


def method_choices(chosen: Sequence[str], spelling: str, *, prefix: str = "", texts: bool = False) -> dict[str, Any]:
    """Give the methods to tick, by family, and a line for all other spellings."""
    groups = []
    gr.HTML("<h2>Methods, by family</h2>")
    for family, members in cards.families(texts=texts).items():
        title = "CAM" if family == "cam" else f"{family[:1].upper()}{family[1:]}"
        count = f"{len(members)} method{'s' if len(members) > 1 else ''}"
        with gr.Accordion(f"{title} ({count})", open=False, elem_id=f"vitreous-{prefix}family-{family}"):
            group = gr.CheckboxGroup(
                members,
                value=[name for _, name in members if name in chosen],
                label=f"Methods of the family {family}",
                show_label=False,
                container=False,
                elem_id=f"vitreous-{prefix}{family}",
                elem_classes="vitreous-methods",
            )
            gr.HTML(cards.papers(family, texts=texts))
        groups.append(group)
    spelled = gr.Textbox(
        spelling,
        label="More methods, as they are spelled",
        info="name[.aggregation][:option=value], separated by commas; press Enter",
        elem_id=f"vitreous-{prefix}spelled",
    )
    return {"methods": groups, "spelled": spelled}


def _maps() -> dict[str, Any]:
    status, stop = status_bar()
    with gr.Row():
        opacity = gr.Slider(0, 1, DEFAULT_OPACITY, step=0.05, label="Opacity", elem_id="vitreous-opacity")
        threshold = gr.Slider(0, 1, 0, step=0.01, label="Threshold", elem_id="vitreous-threshold")
        depth = gr.Slider(1, 12, 12, step=1, label="Depth, in blocks", elem_id="vitreous-depth", interactive=True)
    with gr.Row():
        sign = gr.Radio(
            [("for and against", "both"), *((name, name) for name in SIGNS if name != "both")],
            value="both",
            label="Sign",
            elem_id="vitreous-sign",
        )
        smooth = gr.Checkbox(value=True, label="Smooth between patches", elem_id="vitreous-smooth")
    maps = gr.HTML(_HINT, elem_id="vitreous-maps", elem_classes="vitreous-maps")
    return {
        "status": status,
        "stop": stop,
        "opacity": opacity,
        "threshold": threshold,
        "depth": depth,
        "sign": sign,
        "smooth": smooth,
        "maps": maps,
    }


def _patch() -> dict[str, Any]:
    with gr.Accordion("Which patches does a patch draw on?", open=True), gr.Row():
        with gr.Column(scale=2, min_width=240):
            picture = gr.Image(
                label="Press on a patch",
                interactive=False,
                type="pil",
                format="jpeg",
                buttons=[],
                height=300,
                elem_id="vitreous-photo",
                alt_text="The photo; press on a patch to see what it draws on",
            )
            block = gr.Slider(0, 11, 11, step=1, label="Block", elem_id="vitreous-block", interactive=True)
            with gr.Row():
                row = gr.Number(0, label="Row", precision=0, minimum=0, min_width=70, elem_id="vitreous-row")
                column = gr.Number(0, label="Column", precision=0, minimum=0, min_width=70, elem_id="vitreous-column")
                look = gr.Button("Look", size="sm", min_width=70, elem_id="vitreous-look")
        with gr.Column(scale=4, min_width=280):
            rows = gr.HTML("", elem_id="vitreous-rows", elem_classes="vitreous-rows")
    return {"picture": picture, "block": block, "row": row, "column": column, "look": look, "rows": rows}


def _curves() -> dict[str, Any]:
    with gr.Accordion("Do the maps tell the truth? Deletion and insertion", open=True):
        measure = gr.Button("Measure the curves of these maps", elem_id="vitreous-measure")
        curves = gr.HTML("", elem_id="vitreous-curves")
    return {"measure": measure, "curves": curves}


def _downloads() -> dict[str, Any]:
    with gr.Row():
        png = gr.Button("Download picture (PNG)", min_width=150, elem_id="vitreous-png")
        npz = gr.Button("Download numbers (NPZ)", min_width=150, elem_id="vitreous-npz")
        report = gr.Button("Download report (HTML)", min_width=150, elem_id="vitreous-report")
        download = gr.DownloadButton("Download", visible="hidden", elem_id="vitreous-download")
    return {"png": png, "npz": npz, "report": report, "download": download}
