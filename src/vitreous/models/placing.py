"""Putting a network where it is to run."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from vitreous.errors import ModelError
from vitreous.reason import reason_of

Network = TypeVar("Network", bound=nn.Module)


def put_on(device: str | torch.device, network: Network) -> Network:
    """Move a network to a device.

    Raises:
        ModelError: torch does not know the device, or this machine does not have it.
    """
    try:
        if torch.device(device).type == "meta":
            raise ModelError("the device meta cannot be used: it holds shapes and no numbers")
        return network.to(device)
    except (RuntimeError, AssertionError) as error:  # torch says it like this where CUDA is not compiled in
        raise ModelError(f"the device {device!s} cannot be used: {reason_of(error)}") from error
