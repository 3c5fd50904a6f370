"""What stands where on the text tab; what happens when it is used is in ``text_events``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from vitreous.web import cards, text_cards
from vitreous.web.layout import class_choice, method_choices, status_bar

_CHOSEN = ("decompx", "gae")
EXAMPLES = (
    "A truly wonderful film, with a story that is never dull and a cast that could not be better.",
    "Two hours that I will never get back: the jokes are old, the plot is thin, and nobody seems to care.",
)


@dataclass(frozen=True)
class TextParts:
    """The parts of the text tab that are read or changed."""

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

    def wanted(self) -> list[Any]:
        """Give what says what is wanted, and how it is shown, in the order of ``text_events.read_controls``."""
        return [self.text, self.model, self.long, self.classes, self.spelled, self.by, *self.methods]


def lay_out_texts(models: Sequence[str]) -> TextParts:
    """Make the parts, inside the tab that is being built."""
    parts: dict[str, Any] = {}
    with gr.Row(elem_classes="vitreous-columns"):
        with gr.Column(scale=2, min_width=280, elem_classes="vitreous-column"):
            parts |= _text(models)
            with gr.Column(elem_classes="vitreous-choices"):
                parts |= method_choices(_CHOSEN, "", prefix="text-", texts=True)
        with gr.Column(scale=5, min_width=280, elem_classes=["vitreous-column", "vitreous-shown"]):
            parts |= _shown()
    return TextParts(**parts)


def _text(models: Sequence[str]) -> dict[str, Any]:
    return {
        "text": gr.Textbox(
            label="Text: write it, or paste it",
            lines=5,
            max_lines=14,
            placeholder="A review, a letter, a sentence …",
            elem_id="vitreous-text",
        ),
        "explain": gr.Button("Explain", variant="primary", elem_id="vitreous-text-explain"),
        "example": gr.Dataset(
            components=[gr.Textbox(visible=False)],
            samples=[[example] for example in EXAMPLES],
            type="index",
            label="Examples",
            elem_id="vitreous-text-examples",
        ),
        "predictions": gr.HTML(cards.no_predictions(), elem_id="vitreous-text-predictions"),
        "classes": class_choice("vitreous-text-classes"),
        "long": gr.Radio(
            [("cut them, with a note", "cut"), ("explain in windows", "windows")],
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


def _shown() -> dict[str, Any]:
    status, stop = status_bar("text-")
    by = gr.Radio(
        [("the largest of its pieces", "max"), ("their sum", "sum")],
        value="max",
        label="The score of a word",
        elem_id="vitreous-text-by",
    )
    words = gr.HTML(text_cards.HINT, elem_id="vitreous-text-words")
    with gr.Row():
        save = gr.Button("Download page (HTML)", min_width=150, elem_id="vitreous-text-save")
        download = gr.DownloadButton("Download", visible="hidden", elem_id="vitreous-text-download")
    return {"status": status, "stop": stop, "by": by, "words": words, "save": save, "download": download}
