"""Inputs and outputs of a model: images as one tensor or texts as several, and what the returned numbers are.

How likely an output makes its classes is defined here once, for everything that reads it:

| outputs | the probability of a class |
| --- | --- |
| ``logits`` | their softmax; the sigmoid of a single output, whose softmax would be 1 whatever it is |
| ``probabilities`` | the output itself: the model ends in its own softmax or sigmoid |
| ``sigmoid`` | the sigmoid of each output by itself (multi-label) |
| ``value`` | none: regression, a distance, a score |
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vitreous._utils.defaults import OutputActivation as OutputActivation  # noqa: PLC0414  # re-exported
from vitreous._utils.messages import described_error, error_message, errors_as, short_repr
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


ClassOutputs = Literal["logits", "probabilities", "sigmoid"]  # those that have probabilities
# Which part of what a model returns is read: a name or a path of names, a place, or a function that finds it.
OutputPart = str | int | Callable[[Any], Any]

_PROBLEMS: dict[str, OutputActivation] = {"multi_label_classification": "sigmoid", "regression": "value"}
# Rows that add up to 1 within this are probabilities: a softmax in float16 or bfloat16 is off by as much.
_ROUNDING = 4e-3


# Where class scores are in what a model returns, the first that is there.
_SCORES = ("logits", "image_embeds", "pooler_output")
_EMBEDDINGS = ("image_embeds", "pooler_output", "logits")
_TOKENS = "last_hidden_state"


def named_part(output: Any, name: str) -> Any:
    """An attribute of an output, or an entry of a dictionary; ``None`` where there is none."""
    found = getattr(output, name, None)
    return output.get(name) if found is None and isinstance(output, Mapping) else found


def class_scores(output: Any) -> Tensor:
    """The class scores (batch, classes) in what a model returns; a single number per image, (batch,), is one class.

    Raises:
        InputError: there are none.
    """
    found = output
    if not isinstance(found, Tensor):
        named = (named_part(output, part) for part in _SCORES)
        first = output[0] if isinstance(output, tuple) and output else output
        found = next((value for value in named if isinstance(value, Tensor)), first)
    if isinstance(found, Tensor) and found.dim() == 1 and found.is_floating_point():
        return found[:, None]
    if not isinstance(found, Tensor) or found.dim() != 2 or found.shape[1] == 0:
        raise InputError(f"class scores have shape (batch, classes), but the model returned {described_output(found)}")
    return found


def embeddings(output: Any) -> Tensor:
    """The embedding (batch, channels) in what a model returns: its pooled output, or the mean over the last tokens.

    Raises:
        InputError: there is none.
    """
    found = output
    if not isinstance(found, Tensor):
        named = (named_part(output, part) for part in (*_EMBEDDINGS, _TOKENS))
        first = output[0] if isinstance(output, tuple) and output else output
        found = next((value for value in named if isinstance(value, Tensor)), first)
    if isinstance(found, Tensor) and found.dim() == 3:
        found = found.mean(dim=1)
    if not isinstance(found, Tensor) or found.dim() != 2 or found.shape[1] == 0:
        raise InputError(f"an embedding has shape (batch, channels), but the model returned {described_output(found)}")
    return found


def described_output(output: Any) -> str:
    """The shape of a tensor, the names and shapes in a dictionary or dataclass, or a type."""
    if isinstance(output, Tensor):
        return str(tuple(output.shape))
    parts = _parts_of(output)
    if not any(isinstance(part, Tensor) for part in parts.values()):
        return type(output).__name__
    listed = (f"{name} {described_output(part)}" for name, part in parts.items() if part is not None)
    return f"{type(output).__name__} of {', '.join(listed)}"


def _parts_of(output: Any) -> dict[str, Any]:
    """The parts of what a model returns, by the name or number that finds them."""
    if isinstance(output, Mapping):
        return {str(name): part for name, part in output.items()}
    if isinstance(output, tuple | list):
        names = getattr(output, "_fields", range(len(output)))
        return {str(name): part for name, part in zip(names, output, strict=True)}
    return dict(getattr(output, "__dict__", {}))


def find_part(output: Any, part: OutputPart | None) -> Any:
    """The part of what a model returns that is read; all of it where none is named.

    Raises:
        InputError: there is no such part.
    """
    if part is None:
        return output
    if not isinstance(part, str | int) or isinstance(part, bool):
        if not callable(part):
            raise InputError(f"output must be a name, a number or a function, not {short_repr(part)}")
        with errors_as(InputError, "the function given as output fails on what the model returns"):
            return part(output)
    found = output
    for step in str(part).split("."):
        inner = _step(found, step)
        if inner is None:
            raise InputError(f"the model returns no output {part!r}: it returned {described_output(output)}")
        found = inner
    return found


def _step(output: Any, name: str) -> Any:
    if name.lstrip("-").isdigit():
        values = list(_parts_of(output).values())
        number = int(name)
        if isinstance(output, Mapping) and name in output:
            return output[name]
        return values[number] if -len(values) <= number < len(values) else None
    return None if isinstance(output, Tensor) else named_part(output, name)


def check_outputs(outputs: Any) -> None:
    """Raise unless ``outputs`` is ``None`` or one of the kinds of outputs.

    Raises:
        InputError: it is something else.
    """
    if outputs is not None and outputs not in get_args(OutputActivation):
        raise InputError(f"outputs must be one of {', '.join(get_args(OutputActivation))}, not {outputs!r}")


def scale_of(model: nn.Module) -> OutputActivation | None:
    """Read the kind of outputs from a model's configuration (``problem_type``); ``None`` if it is not set.

    For a wrapper without a configuration, the outermost configuration inside counts.
    """
    problems = {
        name: problem
        for name, part in model.named_modules()
        if (problem := getattr(getattr(part, "config", None), "problem_type", None)) is not None
    }
    outermost = min(problems, key=lambda name: len(name.split(".")) if name else 0, default=None)
    return None if outermost is None else _PROBLEMS.get(str(problems[outermost]))


def percent(probability: float) -> str:
    """Write a probability."""
    return f"{probability:.1%}" if probability >= 0.001 else "< 0.1%"


def are_probabilities(outputs: Tensor) -> bool:
    """Whether all rows (batch, classes) of several classes lie in [0, 1] and add up to 1, within rounding."""
    sums = outputs.to(torch.float32).sum(dim=-1)
    return outputs.shape[-1] > 1 and in_unit_interval(outputs) and bool(((sums - 1).abs() < _ROUNDING).all())


def in_unit_interval(outputs: Tensor) -> bool:
    """Whether all outputs lie in [0, 1], within rounding."""
    return bool(((outputs >= -_ROUNDING) & (outputs <= 1 + _ROUNDING)).all())


def likelihoods(logits: Tensor, scale: OutputActivation | None, *, log: bool = False) -> Tensor:
    """The probability of every class or its logarithm, (..., classes); a value is given as it is.

    The logarithm of a probability of 0, which a model's own softmax rounds to, is that of the smallest number.
    """
    if scale == "value":
        return logits
    if scale == "probabilities":
        return logits.clamp(min=torch.finfo(logits.dtype).tiny).log() if log else logits
    if scale == "sigmoid" or logits.shape[-1] == 1:
        return torch.nn.functional.logsigmoid(logits) if log else torch.sigmoid(logits)
    return torch.log_softmax(logits, dim=-1) if log else torch.softmax(logits, dim=-1)


def likelihood_slope(logits: Tensor, target: Tensor, scale: OutputActivation | None) -> Tensor:
    """dp_c/dy of the class ``target`` (images,) of every image, (images, classes).

    p_c (1{j=c} - p_j) of a softmax, p_c (1 - p_c) at c of a sigmoid, where 1 - p_c is what the others have or
    sigmoid(-y_c): from p_c itself nothing would be left of it where a model is sure, for float32 takes 1 - 3e-8 for 1.
    A probability or value that the model gives itself is y_c, so that its slope is 1 at c.
    """
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, target[:, None], value=True)
    if scale in {"value", "probabilities"}:
        return chosen.to(logits.dtype)
    likely = likelihoods(logits, scale)
    if scale == "sigmoid" or logits.shape[-1] == 1:
        return torch.where(chosen, likely * torch.sigmoid(-logits), 0)
    others = likely.masked_fill(chosen, 0)
    return likely.gather(1, target[:, None]) * torch.where(chosen, others.sum(dim=1, keepdim=True), -others)
