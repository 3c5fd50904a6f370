"""What the outputs of a model are, and how likely they make its classes: one definition for everything that reads them.

| outputs | the probability of a class |
| --- | --- |
| ``logits`` | their softmax; the sigmoid of a single output, whose softmax would be 1 whatever it is |
| ``probabilities`` | the output itself: the model ends in its own softmax or sigmoid |
| ``sigmoid`` | the sigmoid of each output by itself (multi-label) |
| ``value`` | none: regression, a distance, a score |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vitreous._utils.defaults import OutputActivation as OutputActivation  # noqa: PLC0414  # re-exported
from vitreous._utils.messages import errors_as, short_repr
from vitreous.errors import InputError

ClassOutputs = Literal["logits", "probabilities", "sigmoid"]  # those that have probabilities
# Which part of what a model returns is read: a name or a path of names, a place, or a function that finds it.
OutputPart = str | int | Callable[[Any], Any]

_PROBLEMS: dict[str, OutputActivation] = {"multi_label_classification": "sigmoid", "regression": "value"}
# Rows that add up to 1 within this are probabilities: a softmax in float16 or bfloat16 is off by as much.
_ROUNDING = 4e-3


# Where class scores are in what a model returns, the first that is there.
_SCORES = ("logits", "image_embeds", "pooler_output")
_EMBEDDINGS = ("image_embeds", "pooler_output", "logits")
_TOKENS = "last_hidden_state"


def named_part(output: Any, name: str) -> Any:
    """An attribute of an output, or an entry of a dictionary; ``None`` where there is none."""
    found = getattr(output, name, None)
    return output.get(name) if found is None and isinstance(output, Mapping) else found


def class_scores(output: Any) -> Tensor:
    """The class scores (batch, classes) in what a model returns; a single number per image, (batch,), is one class.

    Raises:
        InputError: there are none.
    """
    found = output
    if not isinstance(found, Tensor):
        named = (named_part(output, part) for part in _SCORES)
        first = output[0] if isinstance(output, tuple) and output else output
        found = next((value for value in named if isinstance(value, Tensor)), first)
    if isinstance(found, Tensor) and found.dim() == 1 and found.is_floating_point():
        return found[:, None]
    if not isinstance(found, Tensor) or found.dim() != 2 or found.shape[1] == 0:
        raise InputError(f"class scores have shape (batch, classes), but the model returned {described_output(found)}")
    return found


def embeddings(output: Any) -> Tensor:
    """The embedding (batch, channels) in what a model returns: its pooled output, or the mean over the last tokens.

    Raises:
        InputError: there is none.
    """
    found = output
    if not isinstance(found, Tensor):
        named = (named_part(output, part) for part in (*_EMBEDDINGS, _TOKENS))
        first = output[0] if isinstance(output, tuple) and output else output
        found = next((value for value in named if isinstance(value, Tensor)), first)
    if isinstance(found, Tensor) and found.dim() == 3:
        found = found.mean(dim=1)
    if not isinstance(found, Tensor) or found.dim() != 2 or found.shape[1] == 0:
        raise InputError(f"an embedding has shape (batch, channels), but the model returned {described_output(found)}")
    return found


def described_output(output: Any) -> str:
    """The shape of a tensor, the names and shapes in a dictionary or dataclass, or a type."""
    if isinstance(output, Tensor):
        return str(tuple(output.shape))
    parts = _parts_of(output)
    if not any(isinstance(part, Tensor) for part in parts.values()):
        return type(output).__name__
    listed = (f"{name} {described_output(part)}" for name, part in parts.items() if part is not None)
    return f"{type(output).__name__} of {', '.join(listed)}"


def _parts_of(output: Any) -> dict[str, Any]:
    """The parts of what a model returns, by the name or number that finds them."""
    if isinstance(output, Mapping):
        return {str(name): part for name, part in output.items()}
    if isinstance(output, tuple | list):
        names = getattr(output, "_fields", range(len(output)))
        return {str(name): part for name, part in zip(names, output, strict=True)}
    return dict(getattr(output, "__dict__", {}))


def find_part(output: Any, part: OutputPart | None) -> Any:
    """The part of what a model returns that is read; all of it where none is named.

    Raises:
        InputError: there is no such part.
    """
    if part is None:
        return output
    if not isinstance(part, str | int) or isinstance(part, bool):
        if not callable(part):
            raise InputError(f"output must be a name, a number or a function, not {short_repr(part)}")
        with errors_as(InputError, "the function given as output fails on what the model returns"):
            return part(output)
    found = output
    for step in str(part).split("."):
        inner = _step(found, step)
        if inner is None:
            raise InputError(f"the model returns no output {part!r}: it returned {described_output(output)}")
        found = inner
    return found


def _step(output: Any, name: str) -> Any:
    if name.lstrip("-").isdigit():
        values = list(_parts_of(output).values())
        number = int(name)
        if isinstance(output, Mapping) and name in output:
            return output[name]
        return values[number] if -len(values) <= number < len(values) else None
    return None if isinstance(output, Tensor) else named_part(output, name)


def check_outputs(outputs: Any) -> None:
    """Raise unless ``outputs`` is ``None`` or one of the kinds of outputs.

    Raises:
        InputError: it is something else.
    """
    if outputs is not None and outputs not in get_args(OutputActivation):
        raise InputError(f"outputs must be one of {', '.join(get_args(OutputActivation))}, not {outputs!r}")


def scale_of(model: nn.Module) -> OutputActivation | None:
    """Read the kind of outputs from a model's configuration (``problem_type``); ``None`` if it is not set.

    For a wrapper without a configuration, the outermost configuration inside counts.
    """
    problems = {
        name: problem
        for name, part in model.named_modules()
        if (problem := getattr(getattr(part, "config", None), "problem_type", None)) is not None
    }
    outermost = min(problems, key=lambda name: len(name.split(".")) if name else 0, default=None)
    return None if outermost is None else _PROBLEMS.get(str(problems[outermost]))


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
