"""The components of the page; events are handled in ``image_tab`` and ``text_tab``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import gradio as gr

from vitreous.web import rendering
from vitreous.web.requests import MAX_CLASSES

TITLE = (
    '<div class="v-title-line"><h1>Vitreous</h1>'
    "<p>Which parts of a photo, or which words of a text, explain the prediction?</p></div>"
)
TEXT_EXAMPLES = (
    "A truly wonderful film, with a story that is never dull and a cast that could not be better.",
    "Two hours that I will never get back: the jokes are old, the plot is thin, and nobody seems to care.",
)
_TEXT_METHODS = ("decompx", "gae")
# A value that was set while the page was still being built is no change: it is looked for a little later as well.
_RECEIVE = """
const receive = () => window.vitreous.receive(props.value);
watch('value', receive);
for (const delay of [0, 500, 2000, 5000]) setTimeout(receive, delay);
"""
_TEXT_HINT = "<p>Write or paste a text, or choose an example, and press <b>Explain</b>.</p>"


@dataclass(frozen=True)
class ImageComponents:
    """The components of the image tab.

    ``photo`` is the session's ``ImageInput`` and ``second`` the upload that it is compared with; ``pending`` holds, for
    each panel, the task whose result it will show. ``query`` carries the requests of the page's scripts, which press
    the hidden buttons ``open``, ``show`` and ``trust``; ``view`` carries the answers.
    """

    photo: Any
    second: Any
    pending: dict[str, Any]
    query: Any
    open: Any
    show: Any
    trust: Any
    view: Any
    upload: Any
    second_upload: Any
    model: Any
    status: Any
    stop: Any
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

    def session(self) -> list[Any]:
        """Inputs of every event that needs a request: its text, the photo and the second one."""
        return [self.query, self.photo, self.second]


def build_image_tab(models: Sequence[str]) -> ImageComponents:
    """Create the components of the image tab; what the scripts draw has ids that begin with ``v-``."""
    panels = ("maps", "rows", "curves", "trust", "download")
    parts: dict[str, Any] = {
        "photo": gr.State(None),
        "second": gr.State(None),
        "pending": {panel: gr.State(None) for panel in panels},
    }
    with gr.Row(elem_classes="vitreous-columns"):
        with gr.Column(scale=2, min_width=280, elem_classes="v-side"):
            parts |= _image_inputs(models)
        with gr.Column(scale=5, min_width=280, elem_classes="v-main"):
            parts |= _maps()
            parts |= _patch() | _curves() | _downloads()
    gr.HTML('<button type="button" id="v-drawer-open" aria-expanded="false">Settings</button>', elem_id="v-drawer-bar")
    return ImageComponents(**{part.name: parts[part.name] for part in fields(ImageComponents)})


def _image_inputs(models: Sequence[str]) -> dict[str, Any]:
    with gr.Column(elem_classes="v-input"):
        upload = gr.File(
            label="Photo: drop it here, or click to choose", file_types=["image"], height=110, elem_id="vitreous-upload"
        )
        gr.HTML('<div id="v-examples" role="group" aria-label="Examples"></div>')
        gr.HTML('<div id="v-predictions"></div>')
    with gr.Column(elem_classes="v-drawer"):
        gr.HTML('<div id="v-question"></div>')
        with gr.Accordion("Compare with a second photo", open=False, elem_id="vitreous-second-box"):
            second = gr.File(label="Second photo", file_types=["image"], height=110, elem_id="vitreous-second")
        gr.HTML('<h3>Methods</h3><div id="v-picker"></div>')
        model = gr.Dropdown(
            list(models),
            value=models[0],
            label="Model",
            info="demo, demo-clip, timm/NAME or hf/NAME; press Enter",
            allow_custom_value=True,
            elem_id="vitreous-model",
        )
    return {"upload": upload, "second_upload": second, "model": model}


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
    with gr.Column(elem_classes="v-stage-top"):
        gr.HTML('<div id="v-head"></div>')
        gr.HTML('<div id="v-toolbar"></div>')
        status, stop = status_bar()
    gr.HTML('<div id="v-stage"></div>')
    gr.HTML('<section id="v-trust" class="v-trust" aria-label="Trust"></section>')
    buttons = {
        name: gr.Button(name, visible="hidden", elem_id=f"vitreous-{name}") for name in ("open", "show", "trust")
    }
    return {
        "status": status,
        "stop": stop,
        "query": gr.Textbox(visible="hidden", elem_id="vitreous-query"),
        "view": gr.HTML(None, html_template="<span></span>", js_on_load=_RECEIVE, elem_id="vitreous-view"),
    } | buttons


def _patch() -> dict[str, Any]:
    with gr.Accordion("Which patches does a patch attend to?", open=False, elem_id="vitreous-patch-box"), gr.Row():
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
    with gr.Accordion(
        "How faithful are the maps? Deletion and insertion curves", open=False, elem_id="vitreous-curves-box"
    ):
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
        with gr.Column(scale=2, min_width=280, elem_classes="v-text-side"):
            parts |= _text_inputs(models)
            with gr.Column(elem_classes="vitreous-choices"):
                parts |= method_choices(_TEXT_METHODS, "", prefix="text-", texts=True)
        with gr.Column(scale=5, min_width=280, elem_classes="v-main"):
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
            info="demo-text, or another text classifier, hf/NAME; press Enter",
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
