"""Inputs of a model: images as one tensor, or texts as several tensors with a row for every text."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._utils.messages import described_error, error_message
from vitreous.errors import InputError, UnsupportedModelError

Rows = slice | Tensor
_MOST_CHANNELS = 4  # of an image: red, green, blue, alpha
# Methods of CLIP-like models that embed images and texts.
TRANSFORMERS_ENCODERS = ("get_image_features", "get_text_features")
OPEN_CLIP_ENCODERS = ("encode_image", "encode_text")
# Exceptions of models that do not accept an input: another image size, or fewer tokens.
FAILURES = (AssertionError, ValueError, RuntimeError, IndexError)
_BY_POSITION = {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL}
_REST = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


@dataclass(frozen=True)
class Texts:
    """Texts as the numbers of their tokens, padded behind their end to one length.

    Attributes:
        parts: by the names of the model's arguments (``input_ids``, ``attention_mask``, ...), (batch, tokens) each.
        lengths: how many tokens each text has without padding, (batch,).
        content: which tokens are of the text itself, neither special tokens nor padding, (batch, tokens).
        blanks: the numbers of tokens that say nothing, by name: ``pad``, ``mask``.
        prefix: how many special tokens in front of each text have no score of their own: its class token, or none.
        end: whether the model may read the token behind a text instead of the one in front of it, as CLIP's text tower
            does.
    """

    parts: Mapping[str, Tensor]
    lengths: Tensor
    content: Tensor
    blanks: Mapping[str, int]
    prefix: int = 1
    end: bool = False

    def __len__(self) -> int:
        """Give the number of texts."""
        return len(self.lengths)

    def __getitem__(self, rows: Rows) -> Texts:
        """Some of the texts, with their padding."""
        parts = {name: part[rows] for name, part in self.parts.items()}
        # Lengths are on the processor also where tokens are not, and no tensor there is indexed from another device.
        lengths = self.lengths[rows if isinstance(rows, slice) else rows.to(self.lengths.device)]
        return replace(self, parts=parts, lengths=lengths, content=self.content[rows])

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self.content.device

    @property
    def tokens(self) -> int:
        """How many tokens every text has with its padding."""
        return self.content.shape[1]

    @property
    def padded(self) -> bool:
        """Whether there is padding behind some text."""
        return bool((self.lengths < self.tokens).any())

    def by_length(self) -> Iterator[tuple[int, Tensor]]:
        """Every length that some texts have without padding, and which texts these are."""
        for length in sorted(set(self.lengths.tolist())):
            yield length, torch.where(self.lengths == length)[0]

    def cut(self, rows: Rows, count: int) -> Texts:
        """Some of the texts, and of them the first ``count`` tokens."""
        some = self[rows]
        parts = {name: part[:, :count] for name, part in some.parts.items()}
        return replace(some, parts=parts, content=some.content[:, :count])

    def blanked(self, blank: str) -> Texts:
        """The same texts with every token replaced by a neutral one."""
        numbers = self.parts["input_ids"].masked_fill(self.content, self.blanks[blank])
        return replace(self, parts={**self.parts, "input_ids": numbers})


Inputs = Tensor | Texts


def texts_of(inputs: Inputs, rows: int) -> Texts | None:
    """The texts that a run of ``rows`` rows has read; none for images.

    None as well where other streams were put in the place of the texts' own: then there is a row for each of these.
    """
    return inputs if isinstance(inputs, Texts) and len(inputs) == rows else None


def ask(model: Callable[..., Any], inputs: Inputs) -> Any:
    """The model's own output, whatever that is.

    Raises:
        UnsupportedModelError: it cannot be called with images alone.
    """
    if isinstance(inputs, Texts):
        return model(**inputs.parts)
    name = _name_of_images(model)
    return model(inputs) if name is None else model(**{name: inputs})


def encoding_methods(model: nn.Module) -> tuple[str, str] | None:
    """The names of a network's methods that embed images and texts, or ``None`` where it does not have both."""
    pairs = (TRANSFORMERS_ENCODERS, OPEN_CLIP_ENCODERS)
    return next((pair for pair in pairs if all(hasattr(model, each) for each in pair)), None)


def takes_cut_patches(model: nn.Module) -> bool:
    """Whether some part of a model is given patches that were cut out before, and their shapes (NaFlex SigLIP 2)."""
    return any("spatial_shapes" in _parameters(part) for part in model.modules())


def _name_of_images(model: Callable[..., Any]) -> str | None:
    """The argument that images have to be given by, where they cannot be given by position."""
    parameters = _parameters(model).values()
    kinds = {parameter.kind for parameter in parameters}
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is Parameter.empty and parameter.kind not in _REST
    ]
    by_position = bool(kinds & _BY_POSITION)
    by_name = [parameter for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY]
    if not kinds or (by_position and len(required) <= 1 and not any(each.name in required for each in by_name)):
        return None
    if not by_position and len(required) == 1:
        return required[0]
    wanted = f"needs {', '.join(required)}" if required else "takes everything by name and needs nothing"
    raise UnsupportedModelError(
        f"{type(model).__name__} cannot be called with images alone: its forward {wanted}; "
        "wrap it in a module whose forward takes one tensor of images"
    )


def _parameters(model: Callable[..., Any]) -> Mapping[str, Parameter]:
    """The arguments of a model's forward; none where they cannot be known."""
    try:
        return signature(getattr(model, "forward", model)).parameters
    except (TypeError, ValueError):  # compiled to something that is no function of Python
        return {}


def outside_inference(inputs: Inputs) -> Inputs:
    """The same numbers in tensors that may be saved for a backward pass."""
    if isinstance(inputs, Texts):
        return replace(inputs, parts={name: _plain(part) for name, part in inputs.parts.items()})
    return _plain(inputs)


def _plain(values: Tensor) -> Tensor:
    return values.detach().clone() if values.is_inference() else values.detach()


def failed_on(model: nn.Module, inputs: Inputs, error: Exception) -> Exception:
    """What is wrong with inputs that a model cannot even embed."""
    name = type(model).__name__
    if _is_about_flex_attention(error):
        return failed_inside(name, error)
    if not isinstance(inputs, Texts) and encoding_methods(model) is not None:
        return UnsupportedModelError(
            f"{name} reads images and texts, and cannot be called with images alone ({described_error(error)}): give "
            "target=vitreous.targets.Prompt(TEXT), or call= with a function that gives it both"
        )
    if not isinstance(inputs, Texts) and takes_cut_patches(model):
        return InputError(
            f"{name} takes patches that were cut out of a picture before, with spatial_shapes, not the picture itself; "
            "wrap it in a module whose forward takes images and cuts them"
        )
    return InputError(f"{name} cannot take {_described(inputs)}: {error_message(error)}")


def failed_inside(name: str, error: Exception) -> Exception:
    """What a model's failure behind its first block is for the user; memory that runs out stays what it is."""
    if isinstance(error, torch.OutOfMemoryError):
        return error
    if _is_about_flex_attention(error):
        return UnsupportedModelError(
            f"{name} attends by flex_attention, which is compiled and shows neither A nor its gradients; use another "
            'attention, if the model has one (attn_implementation="sdpa" or "eager" in transformers)'
        )
    return UnsupportedModelError(f"{name} fails when it runs ({described_error(error)})")


def _is_about_flex_attention(error: BaseException) -> bool:
    """By the files that the error came through, or by its text: what was compiled is in no file."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return "flex_attention" in str(error) or any(Path(file).stem == "flex_attention" for file in files)


def _described(inputs: Inputs) -> str:
    if isinstance(inputs, Texts):
        return f"texts of {inputs.tokens} tokens"
    if inputs.dim() == 5:
        return f"volumes or clips of shape {tuple(inputs.shape)}"
    _, channels, height, width = inputs.shape
    what = f"images of {height} x {width} pixels in {channels} channel{'s' if channels > 1 else ''}"
    # Where the last axis is as short as only channels are, that is what it probably is.
    channels_last = width <= _MOST_CHANNELS < channels
    return f"{what} (channels come first: {tuple(inputs.shape)})" if channels_last else what
