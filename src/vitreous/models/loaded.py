"""``LoadedModel``: a model with its preprocessing and class names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from vitreous._utils.messages import error_message
from vitreous.errors import ModelError
from vitreous.inputs.outputs import OutputActivation, scale_of
from vitreous.models.fingerprint import cached_fingerprint_of

if TYPE_CHECKING:
    from torch import Tensor

    from vitreous.models.preprocessing import Preprocessing
    from vitreous.models.text_models import LoadedTextModel


@dataclass(frozen=True)
class LoadedModel:
    """A model with known preprocessing: loaded by name, or passed by the caller.

    Attributes:
        name: The name it was loaded by, or the name of its class.
        model: The network; in eval mode if vitreous loaded it.
        preprocessing: How images are turned into its input.
        class_names: The class names in index order; None if unknown.
        code: Hash of the user code that built it; empty if there is none.
        outputs: What its outputs are; None to read the configuration or detect it.
        stage: The default stage of a hierarchical model; None for the last.
    """

    name: str
    model: nn.Module
    preprocessing: Preprocessing
    class_names: tuple[str, ...] | None
    code: str = ""
    outputs: OutputActivation | None = None
    stage: int | None = None

    def example_input(self) -> Tensor:
        """Return a black image as model input, for tracing the architecture."""
        like = next(self.model.parameters(), torch.zeros(()))
        dtype = like.dtype if like.is_floating_point() else torch.float32
        return torch.zeros(1, 3, *self.preprocessing.image_size, dtype=dtype, device=like.device)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its modules, their settings and all weights; computed again when a weight changes."""
        return cached_fingerprint_of(self.model)


Network = TypeVar("Network", bound=nn.Module)


def put_on(device: str | torch.device, network: Network) -> Network:
    """Move a network to a device.

    Raises:
        ModelError: The device is unknown to torch or not available.
    """
    try:
        if torch.device(device).type == "meta":
            raise ModelError("the device meta cannot be used: it holds shapes and no numbers")
        return network.to(device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        raise ModelError(f"the device {device!s} cannot be used: {error_message(error)}") from error


AnyModel = TypeVar("AnyModel", bound="LoadedModel | LoadedTextModel")


def with_outputs(model: AnyModel, outputs: OutputActivation | None) -> AnyModel:
    """Return a loaded model with declared outputs; ``None`` keeps its own declaration."""
    return model if outputs is None else replace(model, outputs=outputs)


def with_resolved_outputs(model: AnyModel) -> AnyModel:
    """Return a loaded model with declared outputs, so that they are not detected batch by batch."""
    return with_outputs(model, resolved_outputs(model.model, model.outputs))


def resolved_outputs(network: nn.Module, declared: OutputActivation | None) -> OutputActivation:
    """Return what the outputs of a network are without detection: as declared, as configured, or logits."""
    return declared or scale_of(network) or "logits"
