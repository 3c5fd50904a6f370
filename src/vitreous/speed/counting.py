"""Counts the passes of a model that a job really makes, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitreous.architecture import Architecture
from vitreous.architecture.trace import tensors_in
from vitreous.speed.timing import Job

_ROUNDING = 1e-6


@dataclass
class Passes:
    """What went through each block, in tokens of images; a pass of half of the images, or of their tokens, is half one.

    Attributes:
        whole: by block, what one pass of all images takes through it.
        forward: by block, what went through it.
        backward: by block, what the gradient went through.
    """

    whole: Sequence[float]
    forward: list[float]
    backward: list[float]

    @property
    def forward_passes(self) -> float:
        """Forward passes of the whole model, in work."""
        return _mean(self._shares(self.forward))

    @property
    def backward_passes(self) -> float:
        """Backward passes through all blocks, in work."""
        return _mean(self._shares(self.backward))

    def __str__(self) -> str:
        """In words: how many forward passes, and how many backward passes from which block on."""
        return ", ".join([f"{_number(self.forward_passes)} forward", *self._backward_in_words()])

    def _backward_in_words(self) -> Iterator[str]:
        # What goes through a block comes from above: where more goes through than through the block below, some stop.
        shares = self._shares(self.backward)
        stopping = [here - below for here, below in zip(shares, [0.0, *shares[:-1]], strict=True)]
        if min(stopping) < -_ROUNDING:  # gradients that start inside: only the sum says something
            yield f"{_number(self.backward_passes)} backward"
            return
        for block, count in enumerate(stopping):
            if count > _ROUNDING:
                yield f"{_number(count)} backward" + (f" (from block {block})" if block else "")

    def _shares(self, counts: Sequence[float]) -> list[float]:
        return [count / whole for count, whole in zip(counts, self.whole, strict=True)]


def whole_pass(architecture: Architecture, forward: Job) -> list[float]:
    """What one plain forward pass takes through each block."""
    with counted_passes(architecture, [1.0] * architecture.depth) as passes:
        forward()
    return passes.forward


@contextmanager
def counted_passes(architecture: Architecture, whole: Sequence[float]) -> Iterator[Passes]:
    """Count what anybody sends through the blocks while this is open.

    A backward pass counts where the last step of a block is really undone, not where a gradient stops at its output.
    """
    passes = Passes(whole, [0.0] * architecture.depth, [0.0] * architecture.depth)
    with ExitStack() as hooks:
        for number, block in enumerate(architecture.blocks):
            if block.module is not None:
                hooks.enter_context(block.module.register_forward_hook(_counting(passes, number), with_kwargs=True))
        yield passes


def _counting(passes: Passes, number: int) -> Callable[..., None]:
    def count(module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        del module
        stream = output[0] if isinstance(output, tuple) else output
        assert isinstance(stream, Tensor)
        # What it got: another stream may have been put in the place of what it gave. No call of torch is made, which
        # would be one more step of the run.
        tokens = next(tensors_in((arguments, named)), stream).shape[:-1].numel()
        passes.forward[number] += tokens
        if stream.grad_fn is not None:
            stream.grad_fn.register_prehook(lambda _: undo(tokens))

    def undo(tokens: int) -> None:
        passes.backward[number] += tokens

    return count


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
