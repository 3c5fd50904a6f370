"""A model together with what is needed to feed it photos and to name its answers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from vitreous.models.preprocessing import Preprocessing


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode that vitreous loaded by name.

    Attributes:
        name: The name it was asked for by.
        model: The network, in eval mode.
        preprocessing: How photos become its input.
        class_names: The name of every class in index order, or None where they are unknown.
    """

    name: str
    model: nn.Module
    preprocessing: Preprocessing
    class_names: tuple[str, ...] | None

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of all names, types, shapes and values in the state dict."""
        return fingerprint_of(self.model)


def fingerprint_of(model: nn.Module) -> str:
    """Return the sha256 of all names, types, shapes and values in the state dict."""
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"{key}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        # Reading the bytes as integers works for every type, bfloat16 included.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
