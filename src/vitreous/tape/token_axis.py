"""Which axis of the stream its tokens lie along, where names leave that open.

``nn.MultiheadAttention`` takes tokens first unless told otherwise. The stream of such a model may run that way too, or
the block may turn it around for its attention alone. One image shows it: the axis of size 1 is the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.tape.evaluation_mode import evaluation_mode
from vitreous.tape.inputs import Inputs, ask, outside_inference
from vitreous.tape.interception import Interception


class _ReachedBlocks(BaseException):  # no error, and nothing in a model may catch it
    """The first block is about to run: that is all there is to see."""


class _FirstBlock:
    """Sees what the first block is given, and ends the run."""

    shape = torch.Size()

    def enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Only the first block is listened to."""
        del module
        if arguments and isinstance(arguments[0], Tensor):
            self.shape = arguments[0].shape
        raise _ReachedBlocks

    def leave(self, module: nn.Module, output: Any) -> Any:
        """Never gets here."""
        del module, output


def with_token_axis(anatomy: Anatomy, model: nn.Module, inputs: Inputs) -> Anatomy:
    """The anatomy with the axis that the stream of ``model`` really has; costs its embedding of one image.

    A model that fails before its first block is left to fail where that is reported.
    """
    if anatomy.batch_first:
        return anatomy
    first = _FirstBlock()
    listening = Interception(first, {}, frozenset({anatomy.blocks[0].module}))
    try:
        with torch.inference_mode(mode=False), torch.no_grad(), evaluation_mode(model), listening:
            ask(model, outside_inference(inputs[:1]))
    except (_ReachedBlocks, AssertionError, ValueError, RuntimeError, IndexError):
        turned = len(first.shape) == 3 and first.shape[0] == 1 < first.shape[1]
        return replace(anatomy, batch_first=turned)
    return anatomy
