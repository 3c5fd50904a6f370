"""A compiled model for bare evaluations: what is recorded has to run as it is written, what is only asked need not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vitreous.errors import UnsupportedModelError


def compiled(model: nn.Module) -> Callable[..., Any]:
    """The model by ``torch.compile``; it is compiled when it is first asked, and not again for the same model."""
    fast = torch.compile(model)

    def run(*arguments: Any, **options: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415 - takes seconds to import

        try:
            return fast(*arguments, **options)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split("\n")[:2]).strip() or type(error).__name__
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be compiled here: {reason}; leave out compile"
            ) from error

    return run
