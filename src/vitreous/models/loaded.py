"""A model together with what is needed to feed it photos and to name its answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from vitreous._utils.messages import reason_of
from vitreous.errors import ModelError
from vitreous.inputs.outputs import OutputActivation, scale_of
from vitreous.models.fingerprint import kept_fingerprint_of

if TYPE_CHECKING:
    from torch import Tensor

    from vitreous.models.preprocessing import Preprocessing
    from vitreous.models.text_models import LoadedTextModel


@dataclass(frozen=True)
class LoadedModel:
    """A model whose preprocessing is known: loaded by name, or brought by a caller.

    Attributes:
        name: The name it was asked for by, or what it is called.
        model: The network; in eval mode where vitreous loaded it.
        preprocessing: How photos become its input.
        class_names: The name of every class in index order, or None where they are unknown.
        code: The hash of the user's own code that built it, or nothing.
        outputs: What its outputs are; None where its configuration tells, or they are recognised.
        stage: Which stage of a hierarchical model is read where none is asked for, or None for the last.
    """

    name: str
    model: nn.Module
    preprocessing: Preprocessing
    class_names: tuple[str, ...] | None
    code: str = ""
    outputs: OutputActivation | None = None
    stage: int | None = None

    def example_input(self) -> Tensor:
        """A black photo as the model gets it: enough to see its architecture."""
        like = next(self.model.parameters(), torch.zeros(()))
        dtype = like.dtype if like.is_floating_point() else torch.float32
        return torch.zeros(1, 3, *self.preprocessing.image_size, dtype=dtype, device=like.device)

    @property
    def fingerprint(self) -> str:
        """The sha256 of its parts, their settings and all weights; worked out again when a weight was written to."""
        return kept_fingerprint_of(self.model)


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


AnyModel = TypeVar("AnyModel", bound="LoadedModel | LoadedTextModel")


def given_outputs(model: AnyModel, outputs: OutputActivation | None) -> AnyModel:
    """A loaded model whose outputs are declared; ``None`` leaves what was declared before."""
    return model if outputs is None else replace(model, outputs=outputs)


def settled_outputs(model: AnyModel) -> AnyModel:
    """A loaded model whose outputs are declared, the same for all batches: nothing is recognised any more."""
    return given_outputs(model, settled_kind(model.model, model.outputs))


def settled_kind(network: nn.Module, declared: OutputActivation | None) -> OutputActivation:
    """What the outputs of a network are, where nothing is recognised: declared, configured, or logits."""
    return declared or scale_of(network) or "logits"
