"""The tape: one forward pass, recorded, and the backward passes that are asked of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.errors import InputError, UnsupportedModelError
from vitreous.tape.evaluation_mode import evaluation_mode
from vitreous.tape.layout import Layout, find_layout
from vitreous.tape.plan import Needs, Pass, Plan
from vitreous.tape.recorder import Recorder
from vitreous.tape.rules import RULES


@dataclass
class Gradients:
    """What one backward pass left: dy/dx_l as (batch, tokens, channels) and dy/dO_l as (batch, head, tokens, channels)."""

    tokens: Mapping[int, Tensor] = field(default_factory=dict)
    outputs: Mapping[int, Tensor] = field(default_factory=dict)


class Tape:
    """One recorded forward pass. Made by ``record``; holds the graph until that context ends."""

    def __init__(self, recorder: Recorder, logits: Tensor, image_size: tuple[int, int]) -> None:
        self._recorder = recorder
        self._logits = logits
        self.anatomy = recorder.anatomy
        self.logits = logits.detach()
        head_gradient = self._head_gradient()
        self.layout: Layout = find_layout(recorder, head_gradient, image_size)

    @property
    def depth(self) -> int:
        """L, the number of blocks."""
        return self.anatomy.depth

    def tokens(self, layer: int) -> Tensor:
        """x_l: the stream at the input of block ``layer``, (batch, tokens, channels)."""
        return self._batch_first(self._recorder.tokens[layer]).detach()

    def middle(self, layer: int) -> Tensor:
        """The stream between the attention and the feed-forward part of a block."""
        return self._batch_first(self._recorder.middles[layer]).detach()

    def end(self, layer: int) -> Tensor:
        """The stream with the feed-forward part of a block added, before a post-norm block normalises it."""
        return self._batch_first(self._recorder.ends[layer]).detach()

    def attention(self, layer: int) -> Any:
        """The attention call of a block; index L is a pooling attention behind the last block."""
        return self._recorder.attention[layer]

    def backward(self, backward: Pass, target: Tensor, needs: Needs) -> Gradients:
        """Gradients of the target's logit or probability, one class per image, under the pass's rule."""
        recorder = self._recorder
        tokens, outputs = sorted(needs.token_gradients), sorted(needs.attention_gradients)
        if outputs and self.layout.pooled_by_attention:
            outputs.append(self.depth)
        sources = [recorder.tokens[layer] for layer in tokens] + [recorder.outputs[layer] for layer in outputs]
        recorder.in_force.rule = RULES[backward.rule]
        objective = _objective(self._logits, target, backward.objective)
        found = torch.autograd.grad(objective, sources, retain_graph=True)
        return Gradients(
            {layer: self._batch_first(gradient) for layer, gradient in zip(tokens, found, strict=False)},
            dict(zip(outputs, found[len(tokens) :], strict=True)),
        )

    def _head_gradient(self) -> Tensor:
        """Where the gradient of the output lands in the last block's tokens: which tokens the head reads."""
        stream = self._recorder.tokens[self.anatomy.depth]
        self._recorder.in_force.rule = RULES["plain"]
        # Alternating signs, so that outputs which always sum to the same value do not cancel.
        signs = torch.ones_like(self._logits)
        signs[:, 1::2] = -1
        (gradient,) = torch.autograd.grad(self._logits, stream, signs, retain_graph=True, allow_unused=True)
        if gradient is None:
            raise UnsupportedModelError(f"the output of {self.anatomy.name} does not depend on its last block")
        return self._batch_first(gradient)

    def _batch_first(self, stream: Tensor) -> Tensor:
        return stream if self.anatomy.batch_first else stream.transpose(0, 1)


@contextmanager
def record(model: nn.Module, anatomy: Anatomy, images: Tensor, plan: Plan) -> Iterator[Tape]:
    """Run ``model`` once on ``images`` and keep what ``plan`` asks for, until the context ends.

    The model is not edited; it runs in evaluation mode and is put back; a caller's ``no_grad``, ``inference_mode`` or
    ``autocast`` may surround this.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        pixels = images.detach().clone() if images.is_inference() else images.detach()
        recorder = Recorder(anatomy, plan, len(images))
        with evaluation_mode(model), recorder.listening():
            output = model(pixels)
        yield Tape(recorder, _logits(output, anatomy.name, len(images)), (images.shape[-2], images.shape[-1]))


def _objective(logits: Tensor, target: Tensor, objective: str) -> Tensor:
    """Σ over images of the explained quantity: images do not mix, so the gradient of the sum is each one's own."""
    scores = logits
    if objective == "probability":
        # A single output is a yes-or-no model; its softmax would be 1 whatever it says.
        scores = torch.sigmoid(logits) if logits.shape[1] == 1 else torch.softmax(logits, dim=1)
    return scores.gather(1, target[:, None]).sum()


def _logits(output: Any, name: str, batch: int) -> Tensor:
    """The class scores in whatever a model returns."""
    found = output
    if not isinstance(found, Tensor):
        for attribute in ("logits", "image_embeds", "pooler_output"):
            if isinstance(getattr(output, attribute, None), Tensor):
                found = getattr(output, attribute)
                break
        else:
            found = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != batch:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"{name} must return class scores of shape (batch, classes), but returned {shape}")
    return found
