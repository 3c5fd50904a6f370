"""Recognises models that give probabilities already, so that no second softmax is put on top of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous._utils.messages import warn_caller
from vitreous.errors import InputError
from vitreous.inputs.model_input import FAILURES, Inputs, Texts
from vitreous.inputs.outputs import OutputActivation, are_probabilities, in_unit_interval
from vitreous.tape.output import CLASS_SCORES, OutputReader
from vitreous.tape.runner import ModelRunner

_INPUTS = 3  # outputs of at least so many different inputs have to look like probabilities
_SIGMOIDS = frozenset({torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_, torch.special.expit})


def find_outputs(
    network: nn.Module,
    inputs: Inputs,
    logits: Tensor,
    said: OutputActivation | None,
    reader: OutputReader = CLASS_SCORES,
) -> OutputActivation | None:
    """What a model's outputs are: what was said of them, or else what they look like.

    Args:
        network: the model.
        inputs: what it was given.
        logits: its outputs for these, (batch, classes).
        said: what the caller or the model's configuration says.
        reader: how they were read.

    Returns:
        ``None`` where nothing is said and the outputs do not look like probabilities: they are logits then.

    Raises:
        InputError: it is said that they are probabilities, and they are not between 0 and 1.
    """
    if said == "probabilities" and not in_unit_interval(logits):
        raise InputError(
            f"outputs=probabilities was given, but the outputs of {type(network).__name__} go from "
            f"{float(logits.min()):.3g} to {float(logits.max()):.3g}: give outputs=logits, sigmoid or value"
        )
    if said is not None:
        return said
    reason = _reason(network, inputs, logits, reader)
    if reason is None:
        return None
    warn_caller(
        f"the outputs of {type(network).__name__} {reason}, so they are taken as probabilities: no softmax is applied, "
        "and gradients are those of the probabilities (without its last activation, the model's logits would be "
        'explained). outputs="probabilities" confirms this, outputs="logits", "sigmoid" or "value" says otherwise'
    )
    return "probabilities"


def _reason(network: nn.Module, inputs: Inputs, logits: Tensor, reader: OutputReader) -> str | None:
    """Why outputs are taken as probabilities, or ``None``.

    Values between 0 and 1 that do not add up to 1 may be logits or similarities as well; there, the last operation has
    to be a sigmoid.
    """
    if not in_unit_interval(logits):
        return None
    changed = _changed(inputs, max(1, _INPUTS - len(logits)))
    if changed is None:
        return "lie between 0 and 1 and add up to 1" if are_probabilities(logits) else None
    runner = ModelRunner(network, changed, _reader=reader)
    with _Sigmoids() as sigmoids:
        try:
            others = runner.logits(changed)
        except (*FAILURES, InputError):  # the model cannot do with these inputs, which nobody asked for
            others = logits[:0]
    if are_probabilities(torch.cat([logits, others])):
        return "lie between 0 and 1 and add up to 1"
    return "are those of a sigmoid" if in_unit_interval(others) and sigmoids.gave(others) else None


def _changed(inputs: Inputs, count: int) -> Inputs | None:
    """One to three other inputs of the same kind: a picture mirrored or negated, a text backwards."""
    if isinstance(inputs, Texts):
        numbers = inputs.parts.get("input_ids")
        return None if numbers is None else replace(inputs, parts={**inputs.parts, "input_ids": numbers.flip(-1)})
    first = inputs[:1]
    return torch.cat([first.flip(-1), first.flip(-2), -first][:count])


class _Sigmoids(TorchFunctionMode):
    """Keeps what sigmoids return."""

    def __init__(self) -> None:
        super().__init__()
        self._results: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func in _SIGMOIDS:
            self._results.append(result.detach())
        return result

    def gave(self, outputs: Tensor) -> bool:
        """Whether these are the outputs of a sigmoid."""
        alike = (result for result in self._results if result.numel() == outputs.numel())
        return bool(len(outputs)) and any(
            torch.equal(result.reshape_as(outputs).to(outputs), outputs) for result in alike
        )
