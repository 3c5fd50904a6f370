"""Decompositions worked out with hooks and autograd: the vectors that token j contributes to token i, (n, n, d).

The copy of the model has its attention written out and its norms' deviations detached, so that the stream behind the
attention is affine in the block's input. No weight is looked up by name: W_O is seen as the derivative of the stream
by the heads' output, and values without biases are the derivative of the values by the tokens, times the tokens.
"""

from __future__ import annotations

import torch
from hooked import (
    NORMS,
    FrozenNorm,
    Listening,
    Pooling,
    Read,
    Reference,
    first_attribute,
    identity_like,
    is_post_norm,
    read_row,
)
from torch import Tensor


class Decomposition:
    """The matrices of all blocks of a model, for some images."""

    def __init__(self, reference: Reference, images: Tensor) -> None:
        self.reference = reference
        self.norms = [tuple(first_attribute(block, names) for names in NORMS) for block in reference.blocks]
        with Listening([norm for pair in self.norms for norm in pair] + reference.blocks) as self.heard:
            self.run = reference.run(images)
        self.known_parts: dict[tuple[int, bool], Tensor] = {}

    def rollout(self, spelling: str, read: Read) -> Tensor:
        """The full product of the layers' matrices; the row that the head reads."""
        product = identity_like(self.run.matrices[0])
        for layer in range(len(self.reference.blocks)):
            product = self.matrix(spelling, layer) @ product
        pooling = self.run.behind[read.call].mean(1) if isinstance(read, Pooling) else None
        return read_row(product, pooling, read).detach()

    def matrix(self, spelling: str, layer: int) -> Tensor:
        """GlobEnc's or ALTI's matrix of one block, (batch, n, n)."""
        block, (first, second) = self.reference.blocks[layer], self.norms[layer]
        post = is_post_norm(block)
        attended = self.heard.inputs[first if post else second]
        original = spelling == "alti:setting=original"
        key = layer, post or original
        if key not in self.known_parts:
            self.known_parts[key] = self.parts(layer, attended, biases=post or original)
        parts = self.known_parts[key]
        if post:
            parts = norm_of_parts(first, parts, self.stream(attended))
        if original:
            whole = self.stream(self.heard.outputs[first] if post else attended)
            return shares(parts, whole, 1e-6)
        if post:
            parts = norm_of_parts(second, parts, self.stream(self.heard.inputs[second]))
        else:
            parts = parts + norm_of_parts(second, parts, self.stream(attended))
        output = self.heard.outputs[block]
        output = output[0] if isinstance(output, tuple) else output
        return parts.norm(dim=-1) if spelling == "globenc" else shares(parts, self.stream(output), 0.0)

    def parts(self, layer: int, attended: Tensor, *, biases: bool) -> Tensor:
        """What attention and residual connection bring from token j to token i, (batch, i, j, channels)."""
        (attention,) = (module for module in self.reference.blocks[layer].modules() if "matrix" in module.__dict__)
        tokens = self.run.tokens[layer]
        heads, width = attention.head_values.shape[1], attention.head_values.shape[3]
        if biases:
            value = attention.head_values
        else:
            gradients = each_gradient(attention.head_values.transpose(1, 2).flatten(2).sum(dim=(0, 1)), tokens)
            linear = torch.stack([(self.stream(tokens * gradient)).sum(-1) for gradient in gradients], dim=-1)
            value = linear.unflatten(-1, (heads, width)).transpose(1, 2)
        projection = each_gradient(self.stream(attended)[0, 0], attention.output)[:, 0, 0].unflatten(1, (heads, width))
        carried = torch.einsum("bhjc,dhc->bhjd", value, projection)
        own = identity_like(attention.matrix)[..., None] * self.stream(tokens)[:, None]
        return (torch.einsum("bhij,bhjd->bijd", attention.matrix, carried) + own).detach()

    def stream(self, tokens: Tensor) -> Tensor:
        return self.reference.stream(tokens)


def each_gradient(outputs: Tensor, by: Tensor) -> Tensor:
    """The gradient of every number of a vector, one row each."""
    (gradients,) = torch.autograd.grad(
        outputs, by, torch.eye(len(outputs), dtype=outputs.dtype), retain_graph=True, is_grads_batched=True
    )
    return gradients


def norm_of_parts(norm: FrozenNorm, parts: Tensor, whole: Tensor) -> Tensor:
    """Each part through the norm without its bias, divided by the deviation of the whole token i."""
    if norm.centred:
        parts, whole = (tokens - tokens.mean(-1, keepdim=True) for tokens in (parts, whole))
    parts = parts / (whole.pow(2).mean(-1) + norm.eps).sqrt()[..., None, None]
    return parts if norm.weight is None else parts * norm.weight


def shares(parts: Tensor, whole: Tensor, shift: float) -> Tensor:
    """(||y_i||_1 - ||T_i(x_j) - y_i||_1)^+ with rows that sum to 1."""
    nearness = whole.abs().sum(-1)[..., None] - (parts - whole[:, :, None] + shift).abs().sum(-1)
    nearness = nearness.clamp(min=0)
    return nearness / nearness.sum(-1, keepdim=True)
