"""``F.multi_head_attention_forward`` opened up, so that q, k, v and O of ``nn.MultiheadAttention`` can be seen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from vitreous.tape.attention.record import additive_bias, attention_rows

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def can_open(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call is an ordinary batched one: no extra key and value rows, no given projections."""
    given = _arguments(args, kwargs)
    extras = ("bias_k", "bias_v", "static_k", "static_v")
    return given["query"].dim() == 3 and not given["add_zero_attn"] and all(given[name] is None for name in extras)


def open_up(
    attend: Attend, linear: Linear, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Do what the function does, but with ``attend(q, k, v, bias)`` for the attention itself.

    ``linear`` applies the projections to (batch, token, channel).

    Tokens come first: (token, batch, channel), as in the original.
    """
    given = _arguments(args, kwargs)
    heads, (tokens, batch, width) = given["num_heads"], given["query"].shape
    query, key, value = (
        part.reshape(*part.shape[:2], heads, -1).transpose(1, 2) for part in _projections(given, linear)
    )
    bias = _bias(given, query, key.shape[2])
    output = attend(query, key, value, bias)
    output = output.transpose(1, 2).reshape(batch, tokens, width)
    output = linear(output, given["out_proj_weight"], given["out_proj_bias"]).transpose(0, 1)
    if not given["need_weights"]:
        return output, None
    bias = None if bias is None else bias.detach()
    weights = attention_rows(query.detach(), key.detach(), query.shape[-1] ** -0.5, bias)
    return output, weights.mean(dim=1) if given["average_attn_weights"] else weights


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _projections(given: dict[str, Any], linear: Linear) -> Sequence[Tensor]:
    if given["query"] is given["key"] is given["value"] and not given["use_separate_proj_weight"]:
        # Self-attention has one layer for all three, and a rule that scales the relevance of a layer counts it once.
        return linear(given["query"].transpose(0, 1), given["in_proj_weight"], given["in_proj_bias"]).chunk(3, dim=-1)
    if given["use_separate_proj_weight"]:
        weights = [given[f"{part}_proj_weight"] for part in "qkv"]
    else:
        weights = list(given["in_proj_weight"].chunk(3))
    biases = [None] * 3 if given["in_proj_bias"] is None else list(given["in_proj_bias"].chunk(3))
    inputs = (given[part].transpose(0, 1) for part in ("query", "key", "value"))
    return [linear(tokens, weight, bias) for tokens, weight, bias in zip(inputs, weights, biases, strict=True)]


def _bias(given: dict[str, Any], query: Tensor, keys: int) -> Tensor | None:
    """Attention mask and key padding mask as one score bias; here a boolean mask hides where it is true."""
    batch, heads = query.shape[:2]
    total: Tensor | None = None
    for mask, shape in (
        (given["attn_mask"], (-1, heads) if _per_head(given) else (1, 1)),
        (given["key_padding_mask"], (batch, 1, 1)),
    ):
        if mask is not None:
            bias = additive_bias(~mask if mask.dtype == torch.bool else mask, query, keys, causal=False)
            assert bias is not None
            bias = bias.reshape(*shape, *bias.shape[-2:]) if len(shape) == 2 else bias.reshape(*shape, keys)
            total = bias if total is None else total + bias
    return total


def _per_head(given: dict[str, Any]) -> bool:
    return given["attn_mask"] is not None and given["attn_mask"].dim() == 3
