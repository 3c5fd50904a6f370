"""What the outputs of a model are, and how likely they make its classes: one definition for all who ask."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

# softmax: one class is right; sigmoid: every class is right or not; value: a quantity, which has no probability.
Scale = Literal["softmax", "sigmoid", "value"]

_PROBLEMS: dict[str, Scale] = {"multi_label_classification": "sigmoid", "regression": "value"}


def scale_of(model: nn.Module) -> Scale | None:
    """What a model's configuration says of its outputs (``problem_type``); ``None`` where their number decides.

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


def likelihoods(logits: Tensor, scale: Scale | None, *, log: bool = False) -> Tensor:
    """The probability of every class or its logarithm, (..., classes); a value is given as it is.

    A single output is a yes-or-no model unless it is said to be a value; its softmax would be 1 whatever it says.
    """
    if scale == "value":
        return logits
    if scale == "sigmoid" or logits.shape[-1] == 1:
        return torch.nn.functional.logsigmoid(logits) if log else torch.sigmoid(logits)
    return torch.log_softmax(logits, dim=-1) if log else torch.softmax(logits, dim=-1)


def likelihood_slope(logits: Tensor, target: Tensor, scale: Scale | None) -> Tensor:
    """dp_c/dy of the class ``target`` (images,) of every image, (images, classes); a value's is that of the value.

    p_c (1{j=c} - p_j) of a softmax, p_c (1 - p_c) at c of a sigmoid, where 1 - p_c is what the others have or
    sigmoid(-y_c): from p_c itself nothing would be left of it where a model is sure, for float32 takes 1 - 3e-8 for 1.
    """
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, target[:, None], value=True)
    if scale == "value":
        return chosen.to(logits.dtype)
    likely = likelihoods(logits, scale)
    if scale == "sigmoid" or logits.shape[-1] == 1:
        return torch.where(chosen, likely * torch.sigmoid(-logits), 0)
    others = likely.masked_fill(chosen, 0)
    return likely.gather(1, target[:, None]) * torch.where(chosen, others.sum(dim=1, keepdim=True), -others)
