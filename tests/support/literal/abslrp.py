"""absLRP written out module after module for one image, each by the one formula that defines it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from literal.forward import gelu, linear, scaled
from literal.relevance import all_tokens, cut, embedded_patches

SMALL = 1e-9
Function = Callable[..., Tensor]


def unit(relevance: Tensor) -> Tensor:
    return relevance / (relevance.abs().sum() + SMALL)


def spread(function: Function, absolute: Function, relevance: Tensor, *inputs: Tensor) -> list[Tensor]:
    """R_in = x * d/dx [(y + y_abs) R / (|y| + 1e-9)], scaled to absolute sum 1 for each input."""
    with torch.enable_grad():
        leaves = [value.detach().clone().requires_grad_() for value in inputs]
        output = function(*leaves)
        both = output + absolute(*[leaf.abs() for leaf in leaves])
        slopes = torch.autograd.grad(both, leaves, relevance / (output.detach().abs() + SMALL))
    return [unit(value * slope) for value, slope in zip(inputs, slopes, strict=True)]


def same(values: Tensor) -> Tensor:
    return values * 1


def through_linear(module: nn.Linear, tokens: Tensor, relevance: Tensor) -> Tensor:
    function = lambda x: x @ module.weight.T + module.bias  # noqa: E731
    return spread(function, lambda x: x @ module.weight.abs().T + module.bias.abs(), relevance, tokens)[0]


def norm(module: nn.LayerNorm, tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """With mean and variance as constants."""
    centre = tokens.mean(dim=-1, keepdim=True).detach()
    variance = tokens.var(dim=-1, keepdim=True, unbiased=False).detach()
    return (tokens - centre) / torch.sqrt(variance + module.eps) * weight + bias


def through_norm(module: nn.LayerNorm, tokens: Tensor, relevance: Tensor) -> Tensor:
    function = lambda x: norm(module, x, module.weight, module.bias)  # noqa: E731
    absolute = lambda x: norm(module, x, module.weight.abs(), module.bias.abs())  # noqa: E731
    return spread(function, absolute, relevance, tokens)[0]


def softmax(scores: Tensor) -> Tensor:
    """With its sum as a constant."""
    powers = torch.exp(scores - scores.amax(dim=-1, keepdim=True).detach())
    return powers / powers.sum(dim=-1, keepdim=True).detach()


def product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


def scaling(module: nn.Module, values: Tensor, relevance: Tensor) -> Tensor:
    if isinstance(module, nn.Identity):
        return relevance
    return spread(lambda x: x * module.gamma, lambda x: x * module.gamma.abs(), relevance, values)[0]


def shortcut_of(branch: Function, stream: Tensor, relevance: Tensor) -> Tensor:
    """The program's: the sum's derivative with respect to the shortcut, on which the branch depends too."""
    with torch.enable_grad():
        leaf = stream.detach().clone().requires_grad_()
        added = branch(leaf)
        output = added + leaf
        ratio = relevance / (output.detach().abs() + SMALL)
        (slope,) = torch.autograd.grad(output + added.abs() + leaf.abs(), leaf, ratio)
    return unit(stream * slope)


class Attention:
    """One attention module, run and explained."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.heads = module, module.num_heads

    def parts(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stacked = linear(self.module.qkv, tokens).reshape(len(tokens), 3, self.heads, -1).permute(1, 2, 0, 3)
        return stacked[0] * stacked.shape[-1] ** -0.5, stacked[1], stacked[2]

    def run(self, tokens: Tensor) -> Tensor:
        query, key, value = self.parts(tokens)
        output = softmax(query @ key.mT) @ value
        return linear(self.module.proj, output.transpose(0, 1).flatten(1))

    def explain(self, tokens: Tensor, relevance: Tensor) -> Tensor:
        query, key, value = self.parts(tokens)
        scores = query @ key.mT
        matrix = softmax(scores)
        output = (matrix @ value).transpose(0, 1).flatten(1)
        relevance = spread(same, same, relevance, linear(self.module.proj, output))[0]
        relevance = through_linear(self.module.proj, output, relevance)
        relevance = relevance.reshape(len(tokens), self.heads, -1).transpose(0, 1)
        of_matrix, of_value = spread(product, product, relevance, matrix, value)
        of_matrix = spread(same, same, of_matrix, matrix)[0]
        of_scores = spread(softmax, softmax, of_matrix, scores)[0]
        of_query, of_key = spread(lambda q, k: q @ k.mT, lambda q, k: q @ k.mT, of_scores, query, key)
        stacked = torch.stack([of_query, of_key, of_value]).permute(2, 0, 1, 3).flatten(1)
        return through_linear(self.module.qkv, tokens, stacked)


class FeedForward:
    """One feed-forward module, run and explained."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def run(self, tokens: Tensor) -> Tensor:
        return linear(self.module.fc2, gelu(linear(self.module.fc1, tokens)))

    def explain(self, tokens: Tensor, relevance: Tensor) -> Tensor:
        hidden = linear(self.module.fc1, tokens)
        relevance = spread(same, same, relevance, linear(self.module.fc2, gelu(hidden)))[0]
        relevance = through_linear(self.module.fc2, gelu(hidden), relevance)
        relevance = spread(same, same, relevance, gelu(hidden))[0]
        relevance = spread(gelu, gelu, relevance, hidden)[0]
        return through_linear(self.module.fc1, tokens, relevance)


@torch.no_grad()
def propagate(model: VisionTransformer, image: Tensor, start: Tensor, *, program: bool) -> Tensor:
    """The relevance of every value of the picture, (3, height, width), for relevance ``start`` of the logits."""
    tokens = all_tokens(model, embedded_patches(model, image))
    stream = tokens + model.pos_embed[0]
    halves = []
    for block in model.blocks:
        for normalise, scale, part in (
            (block.norm1, block.ls1, Attention(block.attn)),
            (block.norm2, block.ls2, FeedForward(block.mlp)),
        ):
            halves.append((stream, normalise, scale, part))
            stream = stream + scaled(scale, part.run(norm(normalise, stream, normalise.weight, normalise.bias)))
    last = norm(model.norm, stream, model.norm.weight, model.norm.bias)
    relevance = through_linear(model.head, last[0], start)
    relevance = spread(same, same, relevance, last[0])[0]
    relevance = spread(lambda x: x[0], lambda x: x[0], relevance, last)[0]
    relevance = through_norm(model.norm, stream, relevance)
    for stream, normalise, scale, part in reversed(halves):

        def branch(values: Tensor, normalise=normalise, scale=scale, part=part) -> Tensor:
            return scaled(scale, part.run(norm(normalise, values, normalise.weight, normalise.bias)))

        normed = norm(normalise, stream, normalise.weight, normalise.bias)
        added, past = spread(torch.add, torch.add, relevance, branch(stream), stream)
        past = shortcut_of(branch, stream, relevance) if program else past
        added = part.explain(normed, scaling(scale, part.run(normed), added))
        relevance = through_norm(normalise, stream, added) + past
    relevance = spread(torch.add, torch.add, relevance, tokens, model.pos_embed[0])[0][model.num_prefix_tokens :]
    return to_pixels(model, image, relevance)


def to_pixels(model: VisionTransformer, image: Tensor, relevance: Tensor) -> Tensor:
    weight, result = model.patch_embed.proj.weight, torch.zeros_like(image)
    ratios = relevance / (embedded_patches(model, image).abs() + SMALL)
    for into, patch, ratio in zip(cut(model, result), cut(model, image), ratios, strict=True):
        parts = weight * patch + weight.abs() * patch.abs()  # (d, 3, size, size)
        into.copy_((parts * ratio[:, None, None, None]).sum(dim=0))
    return unit(result)


def abslrp(model: VisionTransformer, image: Tensor, target: int, *, program: bool = True) -> Tensor:
    """For the class minus for the others, summed over channels, (pixels,)."""
    classes = model.head.out_features
    start = torch.zeros(classes, dtype=torch.float64)
    start[target] = 1
    against = (1 - start) / (classes - 1)
    return sum(
        sign * propagate(model, image, relevance, program=program).sum(dim=0).flatten()
        for sign, relevance in ((1, start), (-1, against))
    )
