"""Baselines of the measurements: plain passes of the same model on the same images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.architecture import Architecture
from vitreous.speed.timing import Passes
from vitreous.tape import PIXELS, Needs
from vitreous.tape.output import class_scores

FORWARD, BOTH = "forward", "forward + backward"


@dataclass(frozen=True)
class PlainModel:
    """A model without recording: fused attention, frozen parameters."""

    network: nn.Module
    architecture: Architecture
    images: Tensor
    target: Tensor

    def forward(self) -> Tensor:
        """Run one forward pass without a graph."""
        with torch.no_grad():
            return class_scores(self.network(self.images), self.architecture.name, len(self.images))

    def forward_backward(self) -> Tensor:
        """Run one forward pass with a graph, and return the gradient of the target at the pixels."""
        (gradient,) = self.to_blocks((PIXELS,))
        return gradient

    def to_blocks(self, lowest: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Run one forward pass whose graph starts at the lowest of these blocks, and a backward pass to each."""
        entering: dict[int, Tensor] = {}
        start = min(lowest)
        pixels = self.images.clone().requires_grad_() if start == PIXELS else self.images
        entering[PIXELS] = pixels
        with ExitStack() as hooks:
            for layer in set(lowest) - {PIXELS}:
                block = self.architecture.blocks[layer].module
                assert block is not None, f"block {layer} is no module"
                hook = _remember(entering, layer, starts=layer == start)
                hooks.enter_context(block.register_forward_pre_hook(hook))
            output = self.network(pixels)
        logits = class_scores(output, self.architecture.name, len(pixels))
        chosen = logits.gather(1, self.target[:, None]).sum()
        last = len(lowest) - 1
        return tuple(
            torch.autograd.grad(chosen, entering[layer], retain_graph=number < last)[0]
            for number, layer in enumerate(lowest)
        )


def _remember(entering: dict[int, Tensor], layer: int, *, starts: bool) -> Callable[..., tuple[Any, ...]]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        del module
        stream = arguments[0].detach().requires_grad_() if starts else arguments[0]
        entering[layer] = stream
        return (stream, *arguments[1:])

    return hook


@dataclass(frozen=True)
class Limit:
    """The minimum of plain passes that a method needs.

    Attributes:
        lowest: the lowest block that each backward pass has to reach; empty if a forward pass is enough.
    """

    lowest: tuple[int, ...]

    @property
    def name(self) -> str:
        """Description of the passes."""
        ends = ["backward" + ("" if layer == PIXELS else f" (from block {layer})") for layer in self.lowest]
        return " + ".join(["forward", *ends])

    def job(self, plain: PlainModel) -> Callable[[], object]:
        """Return a function that runs the passes."""
        return (lambda: plain.to_blocks(self.lowest)) if self.lowest else plain.forward

    def seconds(self, seconds: Mapping[str, Sequence[float]]) -> Sequence[float]:
        """Look up their times among those of all jobs."""
        return seconds[self.name]


@dataclass(frozen=True)
class CountedLimit:
    """As many plain passes as were counted, for methods that run the model many times.

    The ratio measures the overhead besides the passes, not whether fewer passes would suffice.
    """

    passes: Passes

    @property
    def name(self) -> str:
        """Description of the passes."""
        return f"the same passes, plain: {self.passes}"

    def seconds(self, seconds: Mapping[str, Sequence[float]]) -> list[float]:
        """F forward + B (forward and backward - forward), from the times of the two plain jobs."""
        forwards, backwards = self.passes.forward_passes, self.passes.backward_passes
        return [
            forwards * forward + backwards * (both - forward)
            for forward, both in zip(seconds[FORWARD], seconds[BOTH], strict=True)
        ]


def limit_of(needs: Needs, depth: int) -> Limit:
    """Return the limit of methods that read one recorded run: one plain backward pass for each of theirs.

    Gradients after the last block cost no more than the head, so their limit is the forward pass.
    """
    found = (part.lowest for part in needs.gradients.values())
    return Limit(tuple(sorted((layer for layer in found if layer is not None and layer < depth), reverse=True)))
