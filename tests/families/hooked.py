"""An independent reference: what the methods mean, worked out with module hooks and ordinary autograd.

Nothing here is shared with ``vitreous.tape``. A deep copy of the model gets its attention modules exchanged for ones
that write the attention matrix out; for the frozen rule also its norms and activations are exchanged for modules in
which the variance and the gate f(u)/u are detached. Forward pre-hooks on the blocks give x_l, and gradients are those
of ``torch.autograd.grad``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

ACTIVATIONS = (
    *("GELU", "GELUTanh", "QuickGELU", "SiLU", "ReLU", "Tanh"),
    *("GELUActivation", "QuickGELUActivation", "SiLUActivation", "NewGELUActivation", "FastGELUActivation"),
)
POOLS = ("AttentionPoolLatent",)
TIMM_ATTENTION = ("Attention", "AttentionRope", "EvaAttention", "RelPosAttention")


# Parts that take the place of a model's own --------------------------------------------------------------------------


class FrozenNorm(nn.Module):
    """LayerNorm or RMSNorm as a linear map: the deviation is a constant, the mean is not."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        self.eps, self.centred = norm.eps, isinstance(norm, nn.LayerNorm)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.centred:
            tokens = tokens - tokens.mean(-1, keepdim=True)
        deviation = (tokens.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
        tokens = tokens / deviation.detach()
        if self.weight is not None:
            tokens = tokens * self.weight
        return tokens if self.bias is None else tokens + self.bias


class FrozenActivation(nn.Module):
    """u times the constant f(u)/u."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, tokens: Tensor) -> Tensor:
        fixed = tokens.detach()
        return tokens * (self.function(fixed.clone()) / fixed)


class WrittenOut(nn.Module):
    """An attention module that keeps A and v, (batch, head, ..., ...), and A v with the heads side by side."""

    def __init__(self, original: nn.Module, *, frozen: bool) -> None:
        super().__init__()
        self.original, self.frozen = original, frozen
        self.matrix: Tensor | None = None
        self.head_values: Tensor | None = None
        self.output: Tensor | None = None

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:  # containers ask their attention module for its settings
            return getattr(super().__getattr__("original"), name)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
        self.matrix, self.head_values = attention_matrix(query, key, scale, bias), value
        self.output = gathered(self.matrix.detach() if self.frozen else self.matrix, value)
        return self.output


def attention_matrix(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    scores = torch.einsum("bhic,bhjc->bhij", query, key) * scale
    scores = scores if bias is None else scores + bias
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def gathered(matrix: Tensor, value: Tensor) -> Tensor:
    """A v with the heads side by side again: (batch, token, channel)."""
    return torch.einsum("bhij,bhjc->bihc", matrix, value).flatten(2)


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)


class TimmAttention(WrittenOut):
    """timm's attention modules: ViT, rotary, EVA, BEiT and relative position ones."""

    def forward(
        self,
        tokens: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        shared_rel_pos_bias: Tensor | None = None,
        shared_rel_pos: Tensor | None = None,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - timm's signature
    ) -> Tensor:
        assert attn_mask is None
        assert not is_causal
        own = self.original
        query, key, value = (split_heads(part, own.num_heads) for part in self.projections(tokens))
        query = own.q_norm(query) if hasattr(own, "q_norm") else query
        key = own.k_norm(key) if hasattr(own, "k_norm") else key
        if rope is not None:
            query, key = self.rotated(query, rope), self.rotated(key, rope)
        shared = shared_rel_pos if shared_rel_pos_bias is None else shared_rel_pos_bias
        output = self.attend(query, key, value, own.scale, self.position_bias(shared))
        output = own.norm(output) if hasattr(own, "norm") else output
        gate = getattr(own, "gate", None)
        if gate is not None:
            weights = gate(tokens).sigmoid()
            output = output * (weights.detach() if self.frozen else weights)
        return own.proj(output)

    def projections(self, tokens: Tensor) -> Sequence[Tensor]:
        own = self.original
        if own.qkv is None:
            return own.q_proj(tokens), own.k_proj(tokens), own.v_proj(tokens)
        bias = own.qkv.bias
        if getattr(own, "q_bias", None) is not None:
            bias = torch.cat((own.q_bias, own.k_bias, own.v_bias))
        projected = tokens @ own.qkv.weight.T
        return (projected if bias is None else projected + bias).chunk(3, dim=-1)

    def rotated(self, tokens: Tensor, rope: Tensor) -> Tensor:
        """The rotation of channel pairs, neighbours or halves, for all but the prefix tokens."""
        prefix = self.original.num_prefix_tokens
        still, moving = tokens[:, :, :prefix], tokens[:, :, prefix:]
        sine, cosine = rope.chunk(2, dim=-1)
        if self.original.rotate_half:
            first, second = moving.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
        else:
            turned = torch.stack((-moving[..., 1::2], moving[..., ::2]), dim=-1).flatten(-2)
        return torch.cat((still, moving * cosine + turned * sine), dim=2)

    def position_bias(self, shared: Tensor | None) -> Tensor | None:
        own, bias = self.original, shared
        if getattr(own, "rel_pos", None) is not None:
            return own.rel_pos.get_bias()
        if getattr(own, "relative_position_bias_table", None) is not None:
            table = own.relative_position_bias_table[own.relative_position_index].permute(2, 0, 1)
            bias = table if bias is None else bias + table
        return bias


class TimmPool(WrittenOut):
    """timm's pooling by a learned query."""

    def forward(self, tokens: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        assert attn_mask is None
        own = self.original
        query = split_heads(own.q(own.latent.expand(len(tokens), -1, -1)), own.num_heads)
        key, value = (split_heads(part, own.num_heads) for part in own.kv(tokens).chunk(2, dim=-1))
        pooled = own.proj(self.attend(own.q_norm(query), own.k_norm(key), value, own.scale))
        pooled = pooled + own.mlp(own.norm(pooled))
        return pooled[:, 0] if own.pool == "token" else pooled.mean(1)


class TorchAttention(WrittenOut):
    """nn.MultiheadAttention (torchvision, open_clip, nn.TransformerEncoder, SigLIP's pooling head)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: object) -> tuple[Tensor, None]:
        own = self.original
        inputs = (query, key, value) if own.batch_first else tuple(part.transpose(0, 1) for part in (query, key, value))
        weights = (own.q_proj_weight, own.k_proj_weight, own.v_proj_weight)
        if own.in_proj_weight is not None:
            weights = own.in_proj_weight.chunk(3)
        projected = [tokens @ weight.T for tokens, weight in zip(inputs, weights, strict=True)]
        if own.in_proj_bias is not None:
            projected = [part + bias for part, bias in zip(projected, own.in_proj_bias.chunk(3), strict=True)]
        output = self.attend(*(split_heads(part, own.num_heads) for part in projected), own.head_dim**-0.5)
        output = own.out_proj(output)
        return (output if own.batch_first else output.transpose(0, 1)), None


class OpenClipAttention(WrittenOut):
    """open_clip's own attention, with its optional norms on q, k and on the heads' output."""

    def forward(self, tokens: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        assert attn_mask is None
        own = self.original
        parts = (tokens @ own.in_proj_weight.T + own.in_proj_bias).chunk(3, dim=-1)
        query, key, value = (split_heads(part, own.num_heads) for part in parts)
        output = self.attend(own.ln_q(query), own.ln_k(key), value, own.scale)
        if own.head_scale is not None:
            output = (output.unflatten(-1, (own.num_heads, -1)) * own.head_scale.transpose(0, 1)).flatten(2)
        return own.out_proj(own.ln_inner(output))


class MonaiAttention(WrittenOut):
    """MONAI's SABlock, which spells its attention by einsum."""

    def forward(self, tokens: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        assert attn_mask is None
        own = self.original
        parts = (split_heads(part, own.num_heads) for part in own.qkv(tokens).chunk(3, dim=-1))
        return own.out_proj(self.attend(*parts, own.scale))


def replaced(module: nn.Module, *, frozen: bool) -> nn.Module:
    """The module that takes the place of ``module``, whose own parts have been seen to; itself if it may stay."""
    kind, family = type(module).__name__, type(module).__module__.split(".")[0]
    if isinstance(module, nn.MultiheadAttention):
        return TorchAttention(module, frozen=frozen)
    if family == "timm" and kind in TIMM_ATTENTION:
        return TimmAttention(module, frozen=frozen)
    if family == "timm" and kind in POOLS:
        return TimmPool(module, frozen=frozen)
    if family == "open_clip" and kind == "Attention":
        return OpenClipAttention(module, frozen=frozen)
    if family == "monai" and kind == "SABlock":
        return MonaiAttention(module, frozen=frozen)
    if frozen and (isinstance(module, nn.LayerNorm | nn.RMSNorm) or kind == "RmsNorm"):
        return FrozenNorm(module)
    if frozen and kind in ACTIVATIONS:
        return FrozenActivation(module)
    return module


def exchange_parts(parent: nn.Module, *, frozen: bool) -> None:
    for name, child in list(parent.named_children()):
        exchange_parts(child, frozen=frozen)
        part = replaced(child, frozen=frozen)
        if part is not child:
            setattr(parent, name, part)
    if frozen and isinstance(parent, nn.TransformerEncoderLayer) and not isinstance(parent.activation, nn.Module):
        parent.activation = FrozenActivation(parent.activation)


def write_out_transformers(model: nn.Module, *, frozen: bool) -> None:
    """transformers' models take any attention function by name; this one leaves its matrix on the module."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module, query, key, value, attention_mask, scaling, **_):
        matrix = attention_matrix(query, key, scaling, attention_mask)
        module.matrix, module.head_values = matrix, value
        module.output = output = gathered(matrix.detach() if frozen else matrix, value)
        return output.unflatten(-1, (query.shape[1], -1)), matrix

    name = f"written_out_{'frozen' if frozen else 'plain'}"
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config._attn_implementation = name


# Running it ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pooling:
    """A head that reads the tokens through attention: some queries of one of the calls behind the blocks."""

    queries: tuple[int, ...] = (0,)
    call: int = 0


Read = Sequence[int] | Pooling


@dataclass
class Run:
    """What a forward pass left: logits, x_l and A_l of every block, and A of the attention calls behind them."""

    logits: Tensor
    tokens: list[Tensor]
    matrices: list[Tensor]
    behind: list[Tensor]


class Reference:
    """A copy of a model with attention written out, under the plain or the frozen rule."""

    def __init__(self, model: nn.Module, blocks: str, *, frozen: bool = False, batch_first: bool = True) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(requires_grad=True)
        exchange_parts(self.model, frozen=frozen)
        if any(type(module).__module__.startswith("transformers.") for module in model.modules()):
            write_out_transformers(self.model, frozen=frozen)
        self.blocks = list(self.model.get_submodule(blocks))
        self.batch_first = batch_first

    def run(self, images: Tensor) -> Run:
        streams: list[Tensor] = []
        hooks = [
            block.register_forward_pre_hook(lambda _, arguments: streams.append(arguments[0])) for block in self.blocks
        ]
        for module in self.model.modules():
            if hasattr(module, "matrix"):
                module.matrix = None
        try:
            logits = logits_of(self.model(images))
        finally:
            for hook in hooks:
                hook.remove()
        inside = {module for block in self.blocks for module in block.modules()}
        behind = [module.matrix for module in self.model.modules() if keeps_matrix(module) and module not in inside]
        return Run(logits, streams, [self.matrix(block) for block in self.blocks], behind)

    def matrix(self, block: nn.Module) -> Tensor | None:
        found = [module.matrix for module in block.modules() if keeps_matrix(module)]
        assert len(found) <= 1
        return found[0] if found else None

    def token_transformation(self, images: Tensor, target: Tensor, read: Read) -> Tensor:
        """TokenTM's eqs. 8-20 as full products of U_attention and U_ffn, with Ẽ (batch, head, token, channel) built."""
        norms = [tuple(first_attribute(block, names) for names in NORMS) for block in self.blocks]
        with Listening([norm for pair in norms for norm in pair] + self.blocks) as heard:
            run = self.run(images)
        pooled = [run.behind[read.call]] if isinstance(read, Pooling) else []
        sources = [*run.matrices, *pooled]
        gradients = torch.autograd.grad(
            objective(run.logits.softmax(-1), target), sources, retain_graph=True, materialize_grads=True
        )
        product = torch.diag_embed(self.stream(run.tokens[0]).norm(dim=-1))
        for layer, block in enumerate(self.blocks):
            first, second = norms[layer]
            after_norm = is_post_norm(block)
            added = self.stream(heard.inputs[first if after_norm else second])
            middle = self.stream(heard.outputs[first] if after_norm else heard.inputs[second])
            end = self.stream(heard.inputs[second] if after_norm else heard.outputs[block])
            (attention,) = (module for module in block.modules() if keeps_matrix(module))
            transformed = heads_in_the_stream(attention, added)
            original = self.stream(run.tokens[layer])
            weighed = attention.matrix * token_weights(original[:, None], transformed)[:, :, None]
            update = (gradients[layer].clamp(min=0) * weighed).mean(1)
            product = product + update @ product
            product = product + token_weights(middle, end - middle)[..., None] * product
        pooling = (gradients[-1].clamp(min=0) * pooled[0]).mean(1) if pooled else None
        return read_row(product, pooling, read).detach()

    def stream(self, tokens: Tensor) -> Tensor:
        return tokens if self.batch_first else tokens.transpose(0, 1)

    def input_times_gradient(self, images: Tensor, target: Tensor) -> list[Tensor]:
        """Σ_channels x_l dy/dx_l of every block, (batch, tokens) each."""
        run = self.run(images)
        gradients = torch.autograd.grad(objective(run.logits, target), run.tokens)
        scores = [(tokens * gradient).sum(-1) for tokens, gradient in zip(run.tokens, gradients, strict=True)]
        return [self.stream(score).detach() for score in scores]

    def rollout(self, images: Tensor, read: Read) -> Tensor:
        """Π of the row-normalised mean_h A + I, as full products; the row that the head reads."""
        run = self.run(images)
        product = identity_like(run.matrices[0])
        for matrix in run.matrices:
            layer = matrix.detach().mean(1) + identity_like(matrix)
            product = layer / layer.sum(-1, keepdim=True) @ product
        pooling = run.behind[read.call].detach().mean(1) if isinstance(read, Pooling) else None
        return read_row(product, pooling, read)

    def gae(self, images: Tensor, target: Tensor, read: Read) -> Tensor:
        """R += mean_h (A * dA)^+ R over the blocks, as full products (GAE eqs. 5-6)."""
        run = self.run(images)
        sources = [*run.matrices, run.behind[read.call]] if isinstance(read, Pooling) else run.matrices
        gradients = torch.autograd.grad(objective(run.logits, target), sources)
        weighed = [(a * g).clamp(min=0).mean(1).detach() for a, g in zip(sources, gradients, strict=True)]
        product = identity_like(run.matrices[0])
        for layer in weighed[: len(run.matrices)]:
            product = product + layer @ product
        return read_row(product, weighed[-1] if isinstance(read, Pooling) else None, read)


class Listening:
    """Forward hooks on some modules for as long as the context lasts; what went in and came out, last call only."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}

    def __enter__(self) -> Self:
        self.hooks = [module.register_forward_hook(self.hear) for module in self.modules]
        return self

    def hear(self, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        self.inputs[module], self.outputs[module] = arguments[0], output

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


# The norm that belongs to the attention and the one that belongs to the feed-forward part, family by family.
NORMS = (
    (
        *("norm1", "ln_1", "layer_norm1", "layernorm_before"),
        *("attention.output.LayerNorm", "sa_layer_norm", "attention.LayerNorm", "attn_norm"),
    ),
    (
        *("norm2", "ln_2", "layer_norm2", "layernorm_after"),
        *("output.LayerNorm", "output_layer_norm", "mlp_norm"),
    ),
)


def first_attribute(module: nn.Module, names: Sequence[str]) -> nn.Module:
    inside = dict(module.named_modules())
    return next(inside[name] for name in names if name in inside)


def is_post_norm(block: nn.Module) -> bool:
    """Whether norms come behind the sums: BERT's kinds always, torch's own where it was asked for."""
    if isinstance(block, nn.TransformerEncoderLayer):
        return not block.norm_first
    if type(block).__name__ == "NormsBehind":  # a test's own, under timm's names
        return True
    if hasattr(block, "layernorm_before"):  # VideoMAE has BERT's names besides
        return False
    return any(hasattr(block, name) for name in ("intermediate", "sa_layer_norm")) and hasattr(block, "attention")


def heads_in_the_stream(attention: nn.Module, added: Tensor) -> Tensor:
    """Ẽ_h = v_h W_O^h with W_O seen, not looked up: how the sum of stream and attention changes with the heads' A v."""
    columns = torch.stack(
        [
            torch.autograd.grad(added[..., channel].sum(), attention.output, retain_graph=True)[0][0, 0]
            for channel in range(added.shape[-1])
        ]
    )
    heads = attention.head_values.shape[1]
    return torch.einsum("bhjc,dhc->bhjd", attention.head_values, columns.unflatten(1, (heads, -1)))


def token_weights(original: Tensor, transformed: Tensor) -> Tensor:
    """||Ẽ_j|| / ||E_j|| * softmax_j cos(E_j, Ẽ_j) (eqs. 10-13)."""
    cosine = torch.cosine_similarity(original, transformed, dim=-1, eps=0)
    return transformed.norm(dim=-1) / original.norm(dim=-1) * cosine.softmax(-1)


def keeps_matrix(module: nn.Module) -> bool:
    return module.__dict__.get("matrix") is not None


def identity_like(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand(len(matrix), -1, -1)


def read_row(product: Tensor, pooling: Tensor | None, read: Read) -> Tensor:
    """The row of the product at the tokens that the head reads; a pooling attention's rows come on top."""
    if isinstance(read, Pooling):
        assert pooling is not None
        seen = product[:, product.shape[1] - pooling.shape[2] :]  # prefix tokens may be left out
        return (pooling[:, list(read.queries)] @ seen).mean(1)
    return product[:, list(read)].mean(1)


def objective(logits: Tensor, target: Tensor) -> Tensor:
    return logits[torch.arange(len(logits)), target].sum()


def logits_of(output: object) -> Tensor:
    for attribute in ("logits", "image_embeds", "pooler_output"):
        if isinstance(getattr(output, attribute, None), Tensor):
            return getattr(output, attribute)
    return output[0] if isinstance(output, tuple) else output


def block_inputs_times_gradients(
    model: nn.Module, blocks: str, images: Tensor, target: Tensor, *, batch_first: bool = True
) -> list[Tensor]:
    """Input x gradient at every block of the model itself, nothing exchanged: hooks and autograd alone."""
    streams: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, arguments: streams.append(arguments[0]))
        for block in model.get_submodule(blocks)
    ]
    try:
        gradients = torch.autograd.grad(objective(logits_of(model(images)), target), streams)
    finally:
        for hook in hooks:
            hook.remove()
    scores = [(tokens * gradient).sum(-1).detach() for tokens, gradient in zip(streams, gradients, strict=True)]
    return [score if batch_first else score.T for score in scores]
