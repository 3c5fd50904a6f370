"""The independent reference for text classifiers, with attention, head, norms and activations written out.

As in ``hooked``, nothing is shared with ``vitreous.tape``. Texts come without padding, so there are no masks.
"""

from __future__ import annotations

import copy

import torch
from hooked import Reference, WrittenOut, exchange_parts, split_heads
from torch import Tensor, nn


class BertAttention(WrittenOut):
    """The attention of BERT, RoBERTa, ELECTRA and DistilBERT, which differ in names."""

    def forward(self, tokens: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        own = self.original
        heads = getattr(own, "num_attention_heads", None) or own.n_heads
        names = ("query", "key", "value") if hasattr(own, "query") else ("q_lin", "k_lin", "v_lin")
        query, key, value = (split_heads(getattr(own, name)(tokens), heads) for name in names)
        output = self.attend(query, key, value, query.shape[-1] ** -0.5)
        return (own.out_lin(output) if hasattr(own, "out_lin") else output), None


class MPNetAttention(WrittenOut):
    """MPNet's, whose scores get a bias by relative position."""

    def forward(self, tokens: Tensor, _: Tensor | None, bias: Tensor, **__: object) -> tuple[Tensor]:
        own = self.original
        query, key, value = (split_heads(getattr(own, name)(tokens), own.num_attention_heads) for name in "qkv")
        return (own.o(self.attend(query, key, value, query.shape[-1] ** -0.5, bias)),)


class ModernAttention(WrittenOut):
    """ModernBERT's, with positions by rotation; the texts are shorter than what a block sees of them."""

    def forward(self, tokens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: object) -> tuple[Tensor, None]:
        from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

        own = self.original
        heads = own.config.num_attention_heads
        query, key, value = (split_heads(part, heads) for part in own.Wqkv(tokens).chunk(3, dim=-1))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)  # in float32, as the model has it
        return own.Wo(self.attend(query, key, value, query.shape[-1] ** -0.5)), None


class DisentangledAttention(WrittenOut):
    """DeBERTa's: A is what the original says it is, v is projected once more."""

    def forward(self, tokens: Tensor, mask: Tensor, *_: object, **named: object) -> tuple[Tensor, None]:
        own = self.original
        named = {name: value for name, value in named.items() if name != "output_attentions"}
        _, matrix = own(tokens, mask, output_attentions=True, **named)
        self.matrix = matrix.detach() if self.frozen else matrix
        self.head_values = split_heads(own.value_proj(tokens), own.num_attention_heads)
        self.output = torch.einsum("bhij,bhjc->bihc", self.matrix, self.head_values).flatten(2)
        return self.output, None


class FrozenHead(nn.Module):
    """A linear layer and f(u) as u times the constant f(u)/u, for heads that call their activation as a function."""

    def __init__(self, linear: nn.Linear, function, *, first_token: bool, last: nn.Linear | None) -> None:
        super().__init__()
        self.linear, self.function, self.first_token, self.last = linear, function, first_token, last

    def forward(self, tokens: Tensor) -> Tensor:
        u = self.linear(tokens[:, 0] if self.first_token else tokens)
        output = u * (self.function(u) / u).detach()
        return output if self.last is None else self.last(output)


class Called(nn.Module):
    """A text classifier that takes its arguments as one mapping, as pictures' models take one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, parts: dict[str, Tensor]) -> Tensor:
        return self.model(**parts).logits


class TextReference(Reference):
    """A copy of a text classifier under the plain or the frozen rule."""

    def __init__(self, model: nn.Module, blocks: list[str], *, frozen: bool) -> None:
        own = copy.deepcopy(model).eval().requires_grad_(requires_grad=True)
        exchange_parts(own, frozen=frozen)
        self.blocks = [own.get_submodule(path) for path in blocks]
        for block in self.blocks:
            parent, name = self.place_of_attention(block)
            original = getattr(parent, name)
            setattr(parent, name, self.kind_of_attention(original)(original, frozen=frozen))
        if frozen:
            self.freeze_head(own)
        self.model, self.batch_first = Called(own), True

    @staticmethod
    def place_of_attention(block: nn.Module) -> tuple[nn.Module, str]:
        if hasattr(block, "attn"):
            return block, "attn"
        inside = next((name for name in ("self", "attn") if hasattr(block.attention, name)), None)
        return (block.attention, inside) if inside else (block, "attention")

    @staticmethod
    def kind_of_attention(original: nn.Module) -> type[WrittenOut]:
        by_name = {"query_proj": DisentangledAttention, "Wqkv": ModernAttention, "o": MPNetAttention}
        return next((kind for name, kind in by_name.items() if hasattr(original, name)), BertAttention)

    @staticmethod
    def freeze_head(model: nn.Module) -> None:
        if type(model).__name__.startswith(("Roberta", "MPNet")):
            head = model.classifier
            model.classifier = FrozenHead(head.dense, torch.tanh, first_token=True, last=head.out_proj)
        elif type(model).__name__.startswith("Deberta"):
            model.pooler = FrozenHead(model.pooler.dense, nn.functional.gelu, first_token=True, last=None)
