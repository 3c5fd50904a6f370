"""The target ``Prompt``: the score of an image with a text, computed by the image tower of a dual encoder.

All prompts of a call share one forward pass of the image tower, and every text is embedded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._utils.messages import short_repr
from vitreous.errors import TargetError
from vitreous.inputs.model_io import encoding_methods
from vitreous.inputs.target import Target, register_stored
from vitreous.models.dual_encoder import DualEncoder, ImageTower, ZeroShotClassifier, without_text_tower

_PROMPT_SCORES = "prompt_scores"


class PromptHead(nn.Module):
    """The image tower followed by its scores with prompts, in a dictionary: prompts are no classes to predict."""

    def __init__(self, head: ZeroShotClassifier) -> None:
        super().__init__()
        self.head = head

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """The scores of images and prompts, (batch, prompts)."""
        return {_PROMPT_SCORES: self.head(images)}


@dataclass(frozen=True, eq=False)
class Prompt(Target):
    """The score of the image with a text: logit scale x cosine of their embeddings, plus the logit bias (SigLIP).

    The score is part of the recorded run, so that backward rules apply to it: libra and decompx hold the length of the
    image's embedding constant.

    Attributes:
        text: the prompt.
        embedding: the normalised embedding of the text, (width,); ``None``: ``explain`` computes it.
        scale: the factor on the cosine; ``None`` for the model's logit scale.
        bias: added to the score; ``None`` for the model's logit bias, if it has one.

    Examples:
        >>> import vitreous
        >>> from vitreous.targets import Prompt
        >>> explanation = vitreous.explain(clip, "demo.jpg", "gae", target=Prompt("a photo of a cat"))
        >>> explanation.label()
        'a photo of a cat'
    """

    text: str
    embedding: Tensor | None = None
    scale: float | None = None
    bias: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TargetError(f"a prompt is a text, not {short_repr(self.text)}")
        if not self.text.strip():
            raise TargetError("the prompt is empty: say in a few words what to look for")
        for name, value in (("scale", self.scale), ("bias", self.bias)):
            if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
                raise TargetError(f"the {name} of a prompt must be a finite number, not {short_repr(value)}")
        given = self.embedding
        if given is None:
            return
        if not isinstance(given, Tensor) or given.dim() != 1 or not given.is_floating_point():
            raise TargetError(f"the embedding of a prompt must be a floating tensor (width,), not {short_repr(given)}")
        if not bool(given.isfinite().all()) or not bool(given.any()):
            raise TargetError("the embedding of a prompt must be finite and not 0 in all channels")

    def module(self, network: nn.Module) -> nn.Module:
        """The image tower followed by its scores with all prompts of the call."""
        methods = encoding_methods(network)
        if methods is None:
            raise without_text_tower(type(network).__name__)
        prompts, _ = self._in_call()
        weights = torch.stack([prompt.weight for prompt in prompts])
        biases = None
        if any(prompt.bias for prompt in prompts):
            biases = torch.tensor([prompt.bias or 0.0 for prompt in prompts], dtype=torch.float64)
        return PromptHead(ZeroShotClassifier(ImageTower(network, methods[0]), weights, bias=biases)).eval()

    @property
    def weight(self) -> Tensor:
        """The embedding of the text times the scale."""
        if self.embedding is None:
            raise TargetError(f"the text of {self} is not embedded yet: explain() does that")
        return self.embedding * (1.0 if self.scale is None else self.scale)

    def score(self, output: Any) -> Tensor:
        """Scale x cosine + bias."""
        scores: Tensor = output[_PROMPT_SCORES][:, self._in_call()[1]]
        return scores

    def _in_call(self) -> tuple[Sequence[Prompt], int]:
        """All prompts of the call, and the position of this one among them."""
        found: tuple[Sequence[Prompt], int] | None = getattr(self, "_call", None)
        if found is None:
            raise TargetError(f"the text of {self} is not embedded yet: explain() does that")
        return found

    def embedded(self, dual: DualEncoder) -> Prompt:
        """The same prompt with the embedding of its text."""
        if self.embedding is not None:
            return replace(self)
        scale = dual.scale if self.scale is None else self.scale
        bias = dual.bias if self.bias is None else self.bias
        return replace(self, embedding=dual.embed_texts([self.text])[0], scale=scale, bias=bias)

    def label(self, class_names: Sequence[str] | None = None) -> str:
        """The text."""
        del class_names
        return self.text

    def __str__(self) -> str:
        return f"prompt({self.text})"


register_stored(Prompt)


def holds_prompts(target: Any) -> bool:
    """Whether there is a prompt among the targets."""
    if isinstance(target, list | tuple):
        return any(map(holds_prompts, target))
    return isinstance(target, Prompt)


def embed_prompts(dual: DualEncoder, target: Any) -> Any:
    """The targets with the embedding of every prompt; equal prompts are embedded once and become one target."""
    known: dict[tuple[Any, ...], Prompt] = {}

    def embed(each: Any) -> Any:
        if isinstance(each, list | tuple):
            return [embed(one) for one in each]
        if not isinstance(each, Prompt):
            return each
        key = (each.text, id(each.embedding), each.scale, each.bias)
        if key not in known:
            known[key] = each.embedded(dual)
        return known[key]

    targets, prompts = embed(target), list(known.values())
    for place, prompt in enumerate(prompts):
        object.__setattr__(prompt, "_call", (prompts, place))  # not a field: it belongs to this call, not to the target
    return targets
