"""What a model hands to its first block; the blocks themselves are not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.tape.inputs import Inputs, ask, outside_inference
from vitreous.tape.interception import Handler, Interception, Listener
from vitreous.tape.torch_state import outside_inference_mode


class SeenEnough(BaseException):  # no error, and nothing in a model may catch it
    """A listener has seen what it was to see: the rest need not run."""


class _FirstBlock:
    """Sees what the first block is given, and ends the run."""

    stream: Tensor | None = None

    def enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Only the first block is listened to."""
        del module
        if arguments and isinstance(arguments[0], Tensor):
            self.stream = arguments[0]
        raise SeenEnough

    def leave(self, module: nn.Module, output: Any) -> Any:
        """Never gets here."""
        del module, output


def first_block_input(anatomy: Anatomy, model: nn.Module, inputs: Inputs) -> Tensor | None:
    """The stream in front of the first block; ``None`` where the model fails or ends before it."""
    first = _FirstBlock()
    with suppress(Exception):  # a recorded run says what is wrong
        run_until_seen(first, {}, anatomy, model, inputs)
    return first.stream


def run_until_seen(
    listener: Listener,
    handlers: Mapping[Callable[..., Any], Handler],
    anatomy: Anatomy,
    model: nn.Module,
    inputs: Inputs,
) -> None:
    """Run a model without a graph until a listener on its first block, or a handler of calls, has seen enough."""
    listening = Interception(listener, handlers, frozenset({anatomy.blocks[0].module}))
    with suppress(SeenEnough), outside_inference_mode(), torch.no_grad(), listening:
        ask(model, outside_inference(inputs))
