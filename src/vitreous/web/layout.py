"""The components of the page and its style sheet; events are handled in ``image_tab`` and ``text_tab``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gradio as gr

from vitreous._utils.defaults import DEFAULT_OPACITY
from vitreous.web import rendering
from vitreous.web.rendering import SIGNS
from vitreous.web.requests import MAX_CLASSES

TITLE = "<h1>Vitreous</h1><p>Which parts of a photo, or which words of a text, explain the prediction?</p>"
TEXT_EXAMPLES = (
    "A truly wonderful film, with a story that is never dull and a cast that could not be better.",
    "Two hours that I will never get back: the jokes are old, the plot is thin, and nobody seems to care.",
)
_METHODS = ("tokentm", "gradtoken")
_SPELLED_METHODS = "decompx.skipplus"
_TEXT_METHODS = ("decompx", "gae")
_IMAGE_HINT = "<p>Drop a photo on the left, or choose an example.</p>"
_TEXT_HINT = "<p>Write or paste a text on the left, and press <b>Explain</b>.</p>"


@dataclass(frozen=True)
class ImageComponents:
    """The components of the image tab.

    ``photo`` is the session's ``ImageInput``; ``pending`` holds, for each panel, the task whose result it will show.
    """

    photo: Any
    pending: dict[str, Any]
    model: Any
    upload: Any
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

    def controls(self) -> list[Any]:
        """Input components, in the order ``image_tab.read_image_controls`` expects."""
        shown = [self.depth, self.opacity, self.sign, self.threshold, self.smooth]
        return [self.photo, self.classes, self.spelled, *shown, *self.methods]


def build_image_tab(models: Sequence[str], examples: Sequence[Path]) -> ImageComponents:
    """Create the components of the image tab."""
    panels = ("maps", "rows", "curves", "download")
    parts: dict[str, Any] = {"photo": gr.State(None), "pending": {panel: gr.State(None) for panel in panels}}
    with gr.Row(elem_classes="vitreous-columns"):
        with gr.Column(scale=2, min_width=280, elem_classes="vitreous-column"):
            parts |= _image_inputs(models, examples)
            with gr.Column(elem_id="vitreous-choices", elem_classes="vitreous-choices"):
                parts |= method_choices(_METHODS, _SPELLED_METHODS)
        with gr.Column(scale=5, min_width=280, elem_classes="vitreous-column"):
            with gr.Column(elem_classes="vitreous-shown"):
                parts |= _maps()
            with gr.Column(elem_id="vitreous-more", elem_classes="vitreous-more"):
                parts |= _patch() | _curves() | _downloads()
    return ImageComponents(**{part.name: parts[part.name] for part in fields(ImageComponents)})


def _image_inputs(models: Sequence[str], examples: Sequence[Path]) -> dict[str, Any]:
    return {
        "upload": gr.File(
            label="Photo: drop it here, or click to choose", file_types=["image"], height=130, elem_id="vitreous-upload"
        ),
        "example": gr.Dataset(
            components=[gr.Image(visible=False, type="filepath")],
            samples=[[str(example)] for example in examples],
            type="index",
            label="Examples",
            elem_id="vitreous-examples",
        ),
        "predictions": gr.HTML(rendering.NO_PREDICTION, elem_id="vitreous-predictions"),
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
    """Create the class selector."""
    return gr.Dropdown(
        [],
        label="Classes to explain",
        info=f"Type to search; up to {MAX_CLASSES}. Empty: the predicted class.",
        multiselect=True,
        max_choices=MAX_CLASSES,
        elem_id=name,
    )


def status_bar(prefix: str = "") -> tuple[Any, Any]:
    """Create the status line and the Stop button."""
    with gr.Row(elem_classes="vitreous-bar"):
        with gr.Column(scale=5, min_width=200):
            status = gr.HTML(rendering.status_html("Ready."), elem_id=f"vitreous-{prefix}status")
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
    """Create the checkboxes of the methods, by family, and a text field for other spellings."""
    groups = []
    gr.HTML("<h2>Methods, by family</h2>")
    for family, members in rendering.method_families(texts=texts).items():
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
            gr.HTML(rendering.papers_html(family, texts=texts))
        groups.append(group)
    spelled = gr.Textbox(
        spelling,
        label="More methods",
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
    maps = gr.HTML(_IMAGE_HINT, elem_id="vitreous-maps", elem_classes="vitreous-maps")
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
    with gr.Accordion("Which patches does a patch attend to?", open=True), gr.Row():
        with gr.Column(scale=2, min_width=240):
            picture = gr.Image(
                label="Click on a patch",
                interactive=False,
                type="pil",
                format="jpeg",
                buttons=[],
                height=300,
                elem_id="vitreous-photo",
                alt_text="The photo; click on a patch to see what it attends to",
            )
            block = gr.Slider(0, 11, 11, step=1, label="Block", elem_id="vitreous-block", interactive=True)
            with gr.Row():
                row = gr.Number(0, label="Row", precision=0, minimum=0, min_width=70, elem_id="vitreous-row")
                column = gr.Number(0, label="Column", precision=0, minimum=0, min_width=70, elem_id="vitreous-column")
                look = gr.Button("Show", size="sm", min_width=70, elem_id="vitreous-look")
        with gr.Column(scale=4, min_width=280):
            rows = gr.HTML("", elem_id="vitreous-rows", elem_classes="vitreous-rows")
    return {"picture": picture, "block": block, "row": row, "column": column, "look": look, "rows": rows}


def _curves() -> dict[str, Any]:
    with gr.Accordion("How faithful are the maps? Deletion and insertion curves", open=True):
        measure = gr.Button("Measure curves of these maps", elem_id="vitreous-measure")
        curves = gr.HTML("", elem_id="vitreous-curves")
    return {"measure": measure, "curves": curves}


def _downloads() -> dict[str, Any]:
    with gr.Row():
        png = gr.Button("Download picture (PNG)", min_width=150, elem_id="vitreous-png")
        npz = gr.Button("Download numbers (NPZ)", min_width=150, elem_id="vitreous-npz")
        report = gr.Button("Download report (HTML)", min_width=150, elem_id="vitreous-report")
        download = gr.DownloadButton("Download", visible="hidden", elem_id="vitreous-download")
    return {"png": png, "npz": npz, "report": report, "download": download}


@dataclass(frozen=True)
class TextComponents:
    """The components of the text tab.

    ``shown_model`` is the model of the explanation that is shown; ``pending`` is as for images.
    """

    pending: dict[str, Any]
    shown_model: Any
    text: Any
    explain: Any
    example: Any
    long: Any
    predictions: Any
    classes: Any
    model: Any
    methods: list[Any]
    spelled: Any
    status: Any
    stop: Any
    by: Any
    words: Any
    save: Any
    download: Any

    def controls(self) -> list[Any]:
        """Input components, in the order ``text_tab.read_text_controls`` expects."""
        return [self.text, self.model, self.long, self.classes, self.spelled, self.by, *self.methods]


def build_text_tab(models: Sequence[str]) -> TextComponents:
    """Create the components of the text tab."""
    pending = {panel: gr.State(None) for panel in ("words", "download")}
    parts: dict[str, Any] = {"pending": pending, "shown_model": gr.State(models[0])}
    with gr.Row(elem_classes="vitreous-columns"):
        with gr.Column(scale=2, min_width=280, elem_classes="vitreous-column"):
            parts |= _text_inputs(models)
            with gr.Column(elem_classes="vitreous-choices"):
                parts |= method_choices(_TEXT_METHODS, "", prefix="text-", texts=True)
        with gr.Column(scale=5, min_width=280, elem_classes=["vitreous-column", "vitreous-shown"]):
            parts |= _words()
    return TextComponents(**parts)


def _text_inputs(models: Sequence[str]) -> dict[str, Any]:
    return {
        "text": gr.Textbox(
            label="Text",
            lines=5,
            max_lines=14,
            placeholder="Write or paste a text",
            elem_id="vitreous-text",
        ),
        "explain": gr.Button("Explain", variant="primary", elem_id="vitreous-text-explain"),
        "example": gr.Dataset(
            components=[gr.Textbox(visible=False)],
            samples=[[example] for example in TEXT_EXAMPLES],
            type="index",
            label="Examples",
            elem_id="vitreous-text-examples",
        ),
        "predictions": gr.HTML(rendering.NO_PREDICTION, elem_id="vitreous-text-predictions"),
        "classes": class_choice("vitreous-text-classes"),
        "long": gr.Radio(
            [("truncate", "cut"), ("explain in windows", "windows")],
            value="cut",
            label="Texts that are too long for the model",
            elem_id="vitreous-text-long",
        ),
        "model": gr.Dropdown(
            list(models),
            value=models[0],
            label="Model",
            info="A text classifier, hf/NAME; press Enter",
            allow_custom_value=True,
            elem_id="vitreous-text-model",
        ),
    }


def _words() -> dict[str, Any]:
    status, stop = status_bar("text-")
    by = gr.Radio(
        [("maximum of its tokens", "max"), ("sum of its tokens", "sum")],
        value="max",
        label="Score of a word",
        elem_id="vitreous-text-by",
    )
    words = gr.HTML(_TEXT_HINT, elem_id="vitreous-text-words")
    with gr.Row():
        save = gr.Button("Download page (HTML)", min_width=150, elem_id="vitreous-text-save")
        download = gr.DownloadButton("Download", visible="hidden", elem_id="vitreous-text-download")
    return {"status": status, "stop": stop, "by": by, "words": words, "save": save, "download": download}


# Colours are Gradio's own, for its light and its dark theme.
CSS = """
.gradio-container { max-width: 86rem !important; margin: 0 auto !important; }
:root { --body-text-color-subdued: #565d6b !important; --block-info-text-color: #565d6b !important; }
.dark { --body-text-color-subdued: #aab2c0 !important; --block-info-text-color: #aab2c0 !important; }
.gradio-container h2 { font-size: 1.15rem !important; margin: .6rem 0 .4rem !important; }
.gradio-container h1 { font-size: 1.7rem; margin: 0; }
.vitreous-faint { color: var(--body-text-color-subdued); }
.vitreous-bar { align-items: center; }
.gradio-container a { color: var(--link-text-color); text-decoration: underline; }
#vitreous-title { margin: .25rem 0 0; }
#vitreous-title p { margin: .1rem 0 .5rem; color: var(--body-text-color-subdued); }
.vitreous-grid, .vitreous-curves .grid { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 15.5rem), 1fr)); margin: .4rem 0 1rem; }
.vitreous-curves .grid { grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }
.vitreous-grid figure, .vitreous-curves figure { margin: 0; padding: .5rem; border-radius: .5rem;
  background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary); }
.vitreous-grid img { display: block; margin: 0 auto !important; border-radius: .25rem; }
.vitreous-grid figcaption, .vitreous-curves figcaption { margin-top: .4rem; font-size: .9rem; overflow-wrap: anywhere; }
.vitreous-grid figcaption span { color: var(--body-text-color-subdued); display: block; font-size: .8rem; }
.vitreous-curves svg { max-width: 100%; height: auto; display: block; margin: 0 auto; }
.entry { display: flex; gap: .45rem; align-items: center; } .entry svg { flex: none; margin: 0 !important; }
.vitreous-words { --vitreous-strength: 1; }
.dark .vitreous-words { --vitreous-strength: .62; }
.vitreous-words h3 { font-size: 1.05rem; margin: .8rem 0 .2rem; }
.vitreous-texts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.vitreous-texts figcaption { margin: 0 0 .4rem; font-weight: 600; }
.vitreous-texts p { line-height: 1.75; overflow-wrap: anywhere; }
.vitreous-strongest { display: flex; flex-wrap: wrap; gap: .2rem .9rem; list-style: none; margin: .6rem 0 0 !important;
  padding: .45rem 0 0 !important; border-top: 1px solid var(--border-color-primary); font-size: .85rem; }
.vitreous-strongest li { margin: 0 !important; overflow-wrap: anywhere; }
.vitreous-strongest li > span:first-child { padding: 0 .3em; border-radius: .2em; }
.vitreous-strongest .number { color: var(--body-text-color-subdued); font-variant-numeric: tabular-nums; }
.vitreous-maps h3, .vitreous-rows h3, .vitreous-curves h3 { font-size: 1.05rem; margin: .6rem 0 .3rem; }
.bars { display: grid; grid-template-columns: fit-content(50%) 1fr 3.6rem; gap: .3rem .6rem; align-items: center; }
.bar { height: .65rem; border-radius: .35rem; overflow: hidden; background: var(--background-fill-secondary);
  border: 1px solid var(--border-color-primary); }
.bar span { display: block; height: 100%; background: var(--color-accent); }
.bars .number { text-align: right; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 2rem; font-size: .85rem; color: var(--body-text-color-subdued); }
.legend div { display: flex; gap: .5rem; align-items: center; }
.legend img { width: 8rem; height: .7rem !important; border-radius: .2rem; margin: 0 !important; }
.vitreous-status { margin: 0; min-height: 1.5rem; display: flex; gap: .75rem; align-items: center; flex-wrap: wrap; }
.vitreous-error { color: var(--error-text-color, #b91c1c); font-weight: 600; }
.dark .vitreous-error { color: #fca5a5; }
.vitreous-papers { font-size: .85rem; margin: .25rem 0; }
.vitreous-methods label { width: 100%; align-items: flex-start !important; }
.vitreous-methods label span { white-space: normal; }
.gradio-container :focus-visible { outline: 2px solid var(--color-accent); outline-offset: 2px; }
.label-wrap span { text-align: left; }
.vitreous-grid figcaption code { font-size: .85rem; padding: 0; }
#vitreous-photo img { cursor: crosshair; }
/* A phone shows one column: the photo, then the maps, then the long list of methods. */
@media (max-width: 640px) {
  .gradio-container, .gradio-container > main { padding: .25rem !important; }
  .vitreous-columns { flex-direction: column; flex-wrap: nowrap; align-items: stretch; }
  .vitreous-column { display: contents; }
  .vitreous-shown { order: 1; } .vitreous-choices { order: 2; } .vitreous-more { order: 3; }
  .vitreous-grid { grid-template-columns: repeat(auto-fill, minmax(min(100%, 9rem), 1fr)); gap: .4rem; }
  .vitreous-grid figure { padding: .3rem; }
  .vitreous-texts { grid-template-columns: 1fr; }
  .vitreous-texts figure { padding: .5rem; }
}
"""
