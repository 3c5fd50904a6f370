"""Which output of a text model stands for each label of a data set: what its class names say, or else their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitreous.datasets.eraser_movies import LABELS
from vitreous.errors import UnsupportedModelError
from vitreous.models.text_models import LoadedTextModel
from vitreous.outputs import scale_of

# How models call what the movie reviews call NEG and POS.
_CALLED = {"neg": 0, "negative": 0, "pos": 1, "positive": 1}


def label_outputs(model: LoadedTextModel, outputs: int | None = None) -> tuple[int, ...]:
    """The number of the model's output for each of the labels NEG and POS.

    Args:
        model: a text classifier; it may have further classes, such as neutral, where its names tell which are which.
        outputs: how many outputs it has, where that was seen; otherwise as many as its names or configuration say.

    Raises:
        UnsupportedModelError: neither the names nor the number of the outputs tell.
    """
    count = outputs or _count(model)
    if count == 1:
        raise UnsupportedModelError("the model has one output; a protocol for texts needs one for every class")
    if (model.outputs or scale_of(model.model)) == "value":
        raise UnsupportedModelError("the model's outputs are values (regression); a protocol for texts needs classes")
    names = model.class_names or ()
    if len(names) != count or all(_is_placeholder(name, number) for number, name in enumerate(names)):
        if count != len(LABELS):
            raise UnsupportedModelError(
                f"the model has {count} classes without names, so it is not known which of them are {_listed(LABELS)}"
            )
        return tuple(range(len(LABELS)))
    meant = [_CALLED.get(name.strip().casefold()) for name in names]
    if any(meant.count(label) != 1 for label in range(len(LABELS))):
        raise UnsupportedModelError(
            f"the model's classes are called {_listed(names)}, which does not tell which of them are {_listed(LABELS)}"
        )
    return tuple(meant.index(label) for label in range(len(LABELS)))


def _count(model: LoadedTextModel) -> int:
    """How many outputs a model says to have; where it says nothing, the run will show."""
    if model.class_names is not None:
        return len(model.class_names)
    config: Any = getattr(model.model, "config", None)
    return int(getattr(config, "num_labels", len(LABELS)))


def _is_placeholder(name: str, number: int) -> bool:
    return name.strip().casefold() in {str(number), f"label_{number}", f"label{number}"}


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
