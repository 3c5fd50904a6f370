"""Under which names the model families keep the parts of a block. To support a new family, add its names here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.anatomy.description import Block, NormPlace

# timm, torchvision, open_clip, transformers, nn.TransformerEncoderLayer; the BERT kinds; then older transformers.
ATTENTION = ("attn", "self_attention", "self_attn", "attention.self", "attention")
# What people call it in models of their own; only where no module is called any of the above, for pooling heads, too,
# have parts of these names.
OWN_ATTENTION = ("mha", "msa", "mhsa", "multihead_attn", "multi_head_attention", "multihead_attention")
# Norms of text encoders, whose first may stand in front of the attention or behind it: the BERT kinds, DistilBERT;
# MPNet, ESM and RoBERTa with norms in front; Megatron; ModernBERT; EuroBERT.
FIRST_TEXT_NORM = (
    *("attention.output.LayerNorm", "sa_layer_norm", "attention.LayerNorm"),
    *("attention.ln", "attn_norm", "input_layernorm"),
)
# A norm behind the feed-forward part's sum with the stream: the BERT kinds and MPNet, DistilBERT.
SECOND_POST_NORM = ("output.LayerNorm", "output_layer_norm")
SECOND_TEXT_NORM = (
    *SECOND_POST_NORM,
    *("intermediate.LayerNorm", "LayerNorm", "ln", "mlp_norm", "post_attention_layernorm"),
)
FIRST_NORM = (
    *("norm1", "ln_1", "layer_norm1", "layernorm_before", *FIRST_TEXT_NORM),
    *("layer_norm_1", "attention_norm", "rms_norm1"),
)
SECOND_NORM = (
    *("norm2", "ln_2", "layer_norm2", "layernorm_after", *SECOND_TEXT_NORM),
    *("layer_norm_2", "ffn_norm", "rms_norm2"),
)
PROJECTION = (
    *("proj", "out_proj", "o_proj", "output.dense", "out_lin", "attn.o", "Wo"),
    *("projection", "projection_layer", "out"),
)
# Where the block, not the attention module, holds the projection: the BERT kinds, then models of people's own.
PROJECTION_BESIDE = ("attention.output.dense", "proj")
# The value projection: by itself, or as the last third of a joint one for q, k and v.
VALUE = (
    *("v_proj.weight", "value.weight", "attention.value.weight", "v_proj_weight"),
    *("v_lin.weight", "value_proj.weight", "attn.v.weight", "proj_v.weight"),
)
QUERY_KEY_VALUE = ("qkv.weight", "in_proj_weight", "Wqkv.weight")
LAYER_SCALE = ("ls1.gamma", "gamma_1", "ls_1.gamma", "lambda_1", "layer_scale1.lambda1")
# Parts that stand between the attention's output and the projection, or between the projection and the stream.
BETWEEN = ("attn.norm", "attn.gate", "attn.inner_attn_ln", "attn.ln_inner", "ln_attn", "attn.head_scale")


def describe_block(module: nn.Module) -> Block:
    """Look up the parts of one block by name."""
    attention = attention_of(module)
    place = norm_place(module)
    linear = attention is not None and place != "branch" and not any(_does_something(module, path) for path in BETWEEN)
    projection = None if attention is None else first_of(attention, PROJECTION)
    if projection is None:
        projection = first_of(module, PROJECTION_BESIDE)

    def heads_to_stream() -> Tensor:
        assert isinstance(projection, nn.Module)
        weight, scale = projection.weight, first_of(module, LAYER_SCALE)
        assert isinstance(weight, Tensor)
        # In float32 at least: a LayerScale of 1e-5 times a weight is next to nothing in half precision.
        weight = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
        return weight * scale.detach()[:, None] if isinstance(scale, Tensor) else weight

    return Block(
        module=module,
        attention=attention,
        heads_to_stream=heads_to_stream if linear and isinstance(projection, nn.Linear) else None,
        projection=projection if isinstance(projection, nn.Module) else None,
        value_weight=_value_weight(attention),
        first_norm=_module(module, FIRST_NORM),
        second_norm=_module(module, SECOND_NORM),
        norm_place=place,
    )


def attention_of(module: nn.Module, *, own_names: bool = True) -> nn.Module | None:
    """The attention part of a block, by its name; with ``own_names`` also any ``nn.MultiheadAttention`` in it."""
    found = first_of(module, ATTENTION)
    if not isinstance(found, nn.Module) and own_names:
        found = first_of(module, OWN_ATTENTION)
        if not isinstance(found, nn.Module):
            found = next((part for part in module.children() if isinstance(part, nn.MultiheadAttention)), None)
    return found if isinstance(found, nn.Module) else None


def norm_place(module: nn.Module) -> NormPlace:
    """Where a block normalises; pre-norm unless it says otherwise."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return "pre" if module.norm_first else "post"
    # timm's ResPostBlock, ResPostRelPosBlock and EvaBlockPostNorm: x + norm(f(x)).
    if "ResPost" in type(module).__name__ or "PostNorm" in type(module).__name__:
        return "branch"
    return "pre" if first_of(module, SECOND_POST_NORM) is None else "post"


def first_of(module: nn.Module, paths: tuple[str, ...]) -> Any:
    """The first attribute that exists among dotted ``paths``, or ``None``."""
    for path in paths:
        found: Any = module
        for name in path.split("."):
            found = getattr(found, name, None)
        if isinstance(found, nn.Module | Tensor):
            return found
    return None


def _value_weight(attention: nn.Module | None) -> Callable[[], Tensor] | None:
    if attention is None:
        return None

    def find() -> Tensor | None:
        alone, joint = first_of(attention, VALUE), first_of(attention, QUERY_KEY_VALUE)
        if isinstance(alone, Tensor):
            return alone.detach()
        return joint.detach().chunk(3)[-1] if isinstance(joint, Tensor) else None

    def value_weight() -> Tensor:
        found = find()  # when it is needed: pruning puts another tensor there in every run
        assert found is not None
        return found

    return None if find() is None else value_weight


def _module(module: nn.Module, paths: tuple[str, ...]) -> nn.Module | None:
    found = first_of(module, paths)
    return found if isinstance(found, nn.Module) else None


def _does_something(module: nn.Module, path: str) -> bool:
    found = first_of(module, (path,))
    return found is not None and not isinstance(found, torch.nn.Identity)
