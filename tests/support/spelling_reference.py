"""A small ViT written out in plain tensor operations: its weights, its logits, and every value in between.

It is what the models of ``spellings`` are compared with. ``Variant`` names the functions, which differ; ``spellings``
has the ways to write each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

SIZE, PATCH, WIDTH, HEADS, HIDDEN, DEPTH, CLASSES = 32, 8, 24, 3, 40, 3, 4
PATCHES = (SIZE // PATCH) ** 2
SCALE = (WIDTH // HEADS) ** -0.5
TOP = 6  # how many keys a query keeps in the variant top_k
STEP = 0.3  # of the variant interpolated
Weights = dict[str, Tensor]

VARIANTS = (
    "plain",  # pre-norm, class token
    "mean_pooled",  # the head reads the mean of all patches; there is no class token
    "post_norm",
    "parallel",  # attention and feed-forward part read the same tokens, and one sum takes both
    "sandwich_norm",  # a second norm behind either part
    "interpolated",  # x <- x + 0.3 (y - x)
    "shared",  # one block, run three times
    "talking_heads",  # a linear map over heads before and after the softmax
    "top_k",  # a query keeps its six largest scores
    "gated_values",  # A v is multiplied by a gate of the tokens before W_O
)


def weights(seed: int = 0) -> Weights:
    """Random weights in float64 for all variants: no bias is 0, no norm's weight is 1."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found: Weights = {"cls": 0.5 * noise(WIDTH), "pos": 0.5 * noise(PATCHES + 1, WIDTH)}

    def linear(name: str, inputs: int, outputs: int) -> None:
        found[f"{name}.weight"] = 1.2 * noise(outputs, inputs) / math.sqrt(inputs)
        found[f"{name}.bias"] = 0.3 * noise(outputs)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = 0.8 + 0.3 * noise(WIDTH)
        found[f"{name}.bias"] = 0.3 * noise(WIDTH)

    linear("patch", 3 * PATCH**2, WIDTH)
    for layer in range(DEPTH):
        for name in ("norm1", "norm2", "norm3", "norm4"):
            norm(f"{layer}.{name}")
        linear(f"{layer}.qkv", WIDTH, 3 * WIDTH)
        linear(f"{layer}.out", WIDTH, WIDTH)
        linear(f"{layer}.gate", WIDTH, WIDTH)
        linear(f"{layer}.fc1", WIDTH, HIDDEN)
        linear(f"{layer}.fc2", HIDDEN, WIDTH)
        for name in ("before", "after"):
            found[f"{layer}.{name}"] = torch.eye(HEADS, dtype=torch.float64) + 0.3 * noise(HEADS, HEADS)
    norm("norm")
    linear("head", WIDTH, CLASSES)
    return found


def images(batch: int = 2, seed: int = 0) -> Tensor:
    """Pictures of noise."""
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randn(batch, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)


@dataclass
class Run:
    """Everything that a run of the model passes, by block; all with their graph, so that gradients can be asked for.

    Attributes:
        x: the stream where the attention branch of block l starts, (batch, tokens, channels); and behind the last.
        middle: the stream behind the attention's sum; in a parallel block, which has one sum, there is none.
        q: queries, (batch, heads, tokens, channels of a head), before any scale.
        k: keys.
        v: values.
        attention: A, (batch, heads, to, from), what values are multiplied with.
        heads: A v (gated, where the variant gates it), heads side by side, (batch, tokens, channels).
        written: W_O applied to the heads, with its bias: what the attention writes (before a norm behind it).
        logits: (batch, classes).
    """

    x: list[Tensor] = field(default_factory=list)
    middle: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    attention: list[Tensor] = field(default_factory=list)
    heads: list[Tensor] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))


def reference(given: Weights, pictures: Tensor, variant: str = "plain") -> Run:
    """Run the model of a variant."""
    run = Run()
    x = embedded(given, pictures, class_token=variant != "mean_pooled").requires_grad_()
    run.x.append(x)
    for layer in range(DEPTH):
        x = _block(given, 0 if variant == "shared" else layer, x, variant, run)
        run.x.append(x)
    pooled = x.mean(dim=1) if variant == "mean_pooled" else x[:, 0]
    run.logits = _linear(given, "head", pooled if variant == "post_norm" else _norm(given, "norm", pooled))
    return run


def embedded(given: Weights, pictures: Tensor, *, class_token: bool = True) -> Tensor:
    """x_0: every patch of 3 x 8 x 8 numbers by a linear map, in rows, behind the class token."""
    side = SIZE // PATCH
    patches = (
        pictures.reshape(-1, 3, side, PATCH, side, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(-1, PATCHES, 3 * PATCH**2)
    )
    tokens = _linear(given, "patch", patches)
    if not class_token:
        return tokens + given["pos"][1:]
    return torch.cat([given["cls"].expand(len(tokens), 1, WIDTH), tokens], dim=1) + given["pos"]


def _block(given: Weights, layer: int, x: Tensor, variant: str, run: Run) -> Tensor:
    def norm(name: str, tokens: Tensor) -> Tensor:
        return _norm(given, f"{layer}.{name}", tokens)

    if variant == "post_norm":
        middle = norm("norm1", x + _attention(given, layer, x, variant, run))
        run.middle.append(middle)
        return norm("norm2", middle + _mlp(given, layer, middle))
    attended = _attention(given, layer, norm("norm1", x), variant, run)
    if variant == "parallel":
        return x + attended + _mlp(given, layer, norm("norm1", x))
    if variant == "sandwich_norm":
        attended = norm("norm3", attended)
    middle = x + STEP * (attended - x) if variant == "interpolated" else x + attended
    run.middle.append(middle)
    fed = _mlp(given, layer, norm("norm2", middle))
    if variant == "sandwich_norm":
        fed = norm("norm4", fed)
    return middle + STEP * (fed - middle) if variant == "interpolated" else middle + fed


def _attention(given: Weights, layer: int, tokens: Tensor, variant: str, run: Run) -> Tensor:
    q, k, v = (
        part.reshape(*part.shape[:2], HEADS, -1).transpose(1, 2)
        for part in _linear(given, f"{layer}.qkv", tokens).chunk(3, dim=-1)
    )
    scores = SCALE * (q[:, :, :, None] * k[:, :, None]).sum(dim=-1)
    if variant == "talking_heads":
        scores = (given[f"{layer}.before"][:, :, None, None] * scores[:, None]).sum(dim=2)
    if variant == "top_k":
        least = scores.sort(dim=-1, descending=True).values[..., TOP - 1 : TOP]
        scores = torch.where(scores >= least, scores, torch.full_like(scores, -math.inf))
    matrix = (scores - scores.logsumexp(dim=-1, keepdim=True)).exp()
    if variant == "talking_heads":
        matrix = (given[f"{layer}.after"][:, :, None, None] * matrix[:, None]).sum(dim=2)
    heads = (matrix[..., None] * v[:, :, None]).sum(dim=3).transpose(1, 2).flatten(2)
    if variant == "gated_values":
        heads = heads * _linear(given, f"{layer}.gate", tokens).sigmoid()
    written = _linear(given, f"{layer}.out", heads)
    for kept, value in zip(
        (run.q, run.k, run.v, run.attention, run.heads, run.written), (q, k, v, matrix, heads, written), strict=True
    ):
        kept.append(value)
    return written


def _mlp(given: Weights, layer: int, tokens: Tensor) -> Tensor:
    return _linear(given, f"{layer}.fc2", nn.functional.gelu(_linear(given, f"{layer}.fc1", tokens)))


def _linear(given: Weights, name: str, tokens: Tensor) -> Tensor:
    return tokens @ given[f"{name}.weight"].T + given[f"{name}.bias"]


def _norm(given: Weights, name: str, tokens: Tensor) -> Tensor:
    centred = tokens - tokens.mean(dim=-1, keepdim=True)
    deviation = (centred.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    return centred / deviation * given[f"{name}.weight"] + given[f"{name}.bias"]
