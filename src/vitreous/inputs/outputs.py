"""What the outputs of a model are, and how likely they make its classes: one definition for everything that reads them.

| outputs | the probability of a class |
| --- | --- |
| ``logits`` | their softmax; the sigmoid of a single output, whose softmax would be 1 whatever it is |
| ``probabilities`` | the output itself: the model ends in its own softmax or sigmoid |
| ``sigmoid`` | the sigmoid of each output by itself (multi-label) |
| ``value`` | none: regression, a distance, a score |
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vitreous._utils.defaults import OutputActivation as OutputActivation  # noqa: PLC0414  # re-exported
from vitreous.errors import InputError

ClassOutputs = Literal["logits", "probabilities", "sigmoid"]  # those that have probabilities

_PROBLEMS: dict[str, OutputActivation] = {"multi_label_classification": "sigmoid", "regression": "value"}
# Rows that add up to 1 within this are probabilities: a softmax in float16 or bfloat16 is off by as much.
_ROUNDING = 4e-3


def check_outputs(outputs: Any) -> None:
    """Raise unless ``outputs`` is ``None`` or one of the kinds of outputs.

    Raises:
        InputError: it is something else.
    """
    if outputs is not None and outputs not in get_args(OutputActivation):
        raise InputError(f"outputs must be one of {', '.join(get_args(OutputActivation))}, not {outputs!r}")


def scale_of(model: nn.Module) -> OutputActivation | None:
    """What a model's configuration says of its outputs (``problem_type``); ``None`` where it says nothing.

    A wrapper has no configuration of its own, so that the one inside counts: the outermost that says something.
    """
    said = {
        name: problem
        for name, part in model.named_modules()
        if (problem := getattr(getattr(part, "config", None), "problem_type", None)) is not None
    }
    outermost = min(said, key=lambda name: len(name.split(".")) if name else 0, default=None)
    return None if outermost is None else _PROBLEMS.get(str(said[outermost]))


def percent(probability: float) -> str:
    """Write a probability."""
    return f"{probability:.1%}" if probability >= 0.001 else "< 0.1%"


def are_probabilities(outputs: Tensor) -> bool:
    """Whether all rows (batch, classes) of several classes lie in [0, 1] and add up to 1, within rounding."""
    sums = outputs.to(torch.float32).sum(dim=-1)
    return outputs.shape[-1] > 1 and in_unit_interval(outputs) and bool(((sums - 1).abs() < _ROUNDING).all())


def in_unit_interval(outputs: Tensor) -> bool:
    """Whether all outputs lie in [0, 1], within rounding."""
    return bool(((outputs >= -_ROUNDING) & (outputs <= 1 + _ROUNDING)).all())


def likelihoods(logits: Tensor, scale: OutputActivation | None, *, log: bool = False) -> Tensor:
    """The probability of every class or its logarithm, (..., classes); a value is given as it is.

    The logarithm of a probability of 0, which a model's own softmax rounds to, is that of the smallest number.
    """
    if scale == "value":
        return logits
    if scale == "probabilities":
        return logits.clamp(min=torch.finfo(logits.dtype).tiny).log() if log else logits
    if scale == "sigmoid" or logits.shape[-1] == 1:
        return torch.nn.functional.logsigmoid(logits) if log else torch.sigmoid(logits)
    return torch.log_softmax(logits, dim=-1) if log else torch.softmax(logits, dim=-1)


def likelihood_slope(logits: Tensor, target: Tensor, scale: OutputActivation | None) -> Tensor:
    """dp_c/dy of the class ``target`` (images,) of every image, (images, classes).

    p_c (1{j=c} - p_j) of a softmax, p_c (1 - p_c) at c of a sigmoid, where 1 - p_c is what the others have or
    sigmoid(-y_c): from p_c itself nothing would be left of it where a model is sure, for float32 takes 1 - 3e-8 for 1.
    A probability or value that the model gives itself is y_c, so that its slope is 1 at c.
    """
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, target[:, None], value=True)
    if scale in {"value", "probabilities"}:
        return chosen.to(logits.dtype)
    likely = likelihoods(logits, scale)
    if scale == "sigmoid" or logits.shape[-1] == 1:
        return torch.where(chosen, likely * torch.sigmoid(-logits), 0)
    others = likely.masked_fill(chosen, 0)
    return likely.gather(1, target[:, None]) * torch.where(chosen, others.sum(dim=1, keepdim=True), -others)
