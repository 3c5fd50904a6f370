"""``LoadedModel``: a model with its preprocessing, class names and fingerprint.

The fingerprint is a hash of weights, structure, settings and user code.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitreous._utils.messages import error_message, source_hash
from vitreous.errors import ModelError
from vitreous.inputs.model_io import OutputActivation, scale_of
from vitreous.models.preprocessing import Preprocessing, VolumePreprocessing

if TYPE_CHECKING:
    from vitreous.models.hf_models import LoadedTextModel


# Settings that do not change the outputs: provenance, mode, and equivalent implementations.
_IRRELEVANT_SETTINGS = {
    *("training", "fused_attn", "gradient_checkpointing", "name_or_path", "transformers_version", "dtype"),
    *("torch_dtype", "architectures", "grad_checkpointing", "pretrained_cfg", "default_cfg"),
}
# The code of these libraries is identified by their version, all other code by its content.
_LIBRARIES = {"torch", "timm", "transformers", "torchvision", "open_clip"}


_CACHE: WeakKeyDictionary[nn.Module, tuple[object, str]] = WeakKeyDictionary()


def fingerprint_of(model: nn.Module) -> str:
    """Return the SHA-256 of a model's modules, their settings, and its state dict.

    The state dict alone does not identify a model: the number of heads, the activation or the pooling may differ.
    """
    digest = hashlib.sha256()
    for line in (*_code(model), *_structure(model)):
        digest.update(f"{line}\n".encode())
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"{key}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def cached_fingerprint_of(model: nn.Module) -> str:
    """Return the fingerprint, cached until a weight is replaced or modified in place.

    Changes that do not raise a tensor's version counter go unnoticed: settings, and writes through ``weight.data``.
    """
    weights = (*model.parameters(), *model.buffers())
    state = tuple((weight.data_ptr(), None if weight.is_inference() else weight._version) for weight in weights)  # noqa: SLF001
    cached = _CACHE.get(model)
    if cached is None or cached[0] != state:
        cached = _CACHE[model] = (state, fingerprint_of(model))
    return cached[1]


def _bytes(tensor: Tensor) -> memoryview:
    # Viewing the bytes as uint8 works for every dtype, including bfloat16.
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _code(model: nn.Module) -> list[str]:
    """Return the hashes of user code: classes, and functions assigned to modules of other libraries."""
    own = {written for written in _written(model) if _is_own(written)}  # many modules share a class
    return sorted({source_hash(written) for written in own})


def _written(model: nn.Module) -> Iterator[Any]:
    for part in model.modules():
        yield type(part)
        yield from (_callee(put) for put in (*vars(part).values(), *_hooks(part)) if callable(put))


def _callee(put: Any) -> Any:
    """Return the function or class behind something that can be called."""
    while isinstance(put, functools.partial):
        put = put.func
    function = getattr(put, "__func__", put)  # of a bound method
    return function if inspect.isfunction(function) or inspect.isclass(function) else type(function)


def _hooks(part: nn.Module) -> list[Any]:
    return [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]  # noqa: SLF001


def _is_own(written: Any) -> bool:
    package = written.__module__.partition(".")[0]
    return package not in _LIBRARIES and package not in sys.stdlib_module_names


def _structure(model: nn.Module) -> Iterator[str]:
    """Yield a line for each module, with its class and settings, and one for the configuration."""
    for name, part in model.named_modules():
        kind, hooks = type(part), _hooks(part)
        if hooks:
            yield f"{name}|{json.dumps(_plain(hooks))}"
        yield f"{name}|{kind.__module__}.{kind.__qualname__}|{json.dumps(_settings(vars(part)), sort_keys=True)}"
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if callable(to_dict):
        yield json.dumps(_settings(to_dict()), sort_keys=True)


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public attributes that are plain values."""
    plain = {
        name: _plain(value)
        for name, value in values.items()
        if not name.startswith("_") and name not in _IRRELEVANT_SETTINGS
    }
    return {name: value for name, value in plain.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return a number, text or function as JSON values; None for anything else."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if callable(value) and isinstance(name, str) else None


@dataclass(frozen=True)
class LoadedModel:
    """A model with known preprocessing: loaded by name, or passed by the caller.

    Attributes:
        name: The name it was loaded by, or the name of its class.
        model: The network; in eval mode if vitreous loaded it.
        preprocessing: How images are turned into its input; a ``VolumePreprocessing`` for volumes and clips.
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
        """Return a black image, or zeros as a volume, as model input, for tracing the architecture."""
        like = next(self.model.parameters(), torch.zeros(()))
        dtype = like.dtype if like.is_floating_point() else torch.float32
        return torch.zeros(1, *self.preprocessing.input_shape, dtype=dtype, device=like.device)

    @property
    def takes_volumes(self) -> bool:
        """Whether its inputs are volumes or clips, not images."""
        return isinstance(self.preprocessing, VolumePreprocessing)

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
