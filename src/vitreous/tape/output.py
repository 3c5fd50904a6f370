"""The class scores in a model's output, and the quantity that is explained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from vitreous.errors import InputError
from vitreous.inputs.outputs import OutputActivation, likelihoods

Quantity = Literal["probability", "logit", "log_probability"]


def class_scores(output: Any, name: str, batch: int) -> Tensor:
    """The logits (batch, classes) in the output of the model called ``name``.

    Raises:
        InputError: there are none, or they are not numbers.
    """
    found = output
    if not isinstance(found, Tensor):
        named = (_named(output, part) for part in ("logits", "image_embeds", "pooler_output"))
        first = output[0] if isinstance(output, tuple) and output else output
        found = next((value for value in named if isinstance(value, Tensor)), first)
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != batch or found.shape[1] == 0:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"{name} must return class scores of shape (batch, classes), but returned {shape}")
    if bool((found.isnan() | found.isposinf()).any()):
        raise InputError(f"{name} returned NaN or infinite class scores for these images in {found.dtype}")
    return found


def _named(output: Any, name: str) -> Any:
    """An attribute of an output, or an entry of a dictionary."""
    found = getattr(output, name, None)
    return output.get(name) if found is None and isinstance(output, Mapping) else found


def explained(logits: Tensor, quantity: Quantity, scale: OutputActivation | None) -> Tensor:
    """The explained quantity of every class, (batch, classes).

    A value, of which there is no probability, is explained itself.
    """
    return logits if quantity == "logit" else likelihoods(logits, scale, log=quantity == "log_probability")
