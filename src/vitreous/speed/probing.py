"""A job run once, before it is timed: what it answers, the passes it makes and the memory it takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitreous._utils.tensors import in_float64
from vitreous.speed.counting import Passes, counted_passes, whole_pass
from vitreous.speed.memory import peak_memory
from vitreous.speed.rows import Agreement
from vitreous.speed.yardsticks import Plain

# Rounding in float32 over some dozens of blocks, seen from the largest value of a map; another method is far above it.
_SAME = 1e-3


@dataclass(frozen=True)
class Probe:
    """What is known of a job before it is timed.

    Attributes:
        job: what was run.
        answer: its map, (batch, patches).
        passes: what it sent through the model.
        memory: its peak, as a part of that of a plain forward and backward pass; None where a device does not tell.
    """

    job: Callable[[], Tensor]
    answer: Tensor
    passes: Passes
    memory: float | None


class Prober:
    """Runs jobs on one model and its images."""

    def __init__(self, plain: Plain) -> None:
        self._plain, self._device = plain, plain.images.device
        self._whole = whole_pass(plain.architecture, plain.forward)
        plain.forward_backward()  # what is made once, at the first run, is not what a run takes
        self._memory = peak_memory(plain.forward_backward, self._device)

    def probe(self, job: Callable[[], Tensor]) -> Probe:
        """Run a job once."""
        answers: list[Tensor] = []
        with counted_passes(self._plain.architecture, self._whole) as passes:
            memory = peak_memory(lambda: answers.append(job()), self._device)
        return Probe(job, answers[0], passes, memory / self._memory if self._memory else None)


def agreement_of(theirs: Tensor, ours: Tensor) -> Agreement:
    """How far another map is from ours, (batch, patches) both."""
    found, expected = in_float64(theirs.detach().to(ours.device)), in_float64(ours.detach())
    scale = float(expected.abs().max())
    difference = float((found - expected).abs().max())
    largest = difference / scale if scale > 0 else difference
    correlation = float(torch.corrcoef(torch.stack((found.flatten(), expected.flatten())))[0, 1])
    return Agreement(largest < _SAME, None if math.isnan(correlation) else correlation, largest)
