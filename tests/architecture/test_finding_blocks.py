"""What a model's blocks are: all of them, in the order in which they run, wherever they are kept."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import largest_difference, random_images, small_vit
from vitreous.architecture import find_architecture
from vitreous.architecture.trace import Trace
from vitreous.errors import UnsupportedModelError

METHODS = ["gae", "tokentm", "decompx", "rollout", "ixg", "alti"]
TARGET = torch.tensor([1, 3])


class Chunk(nn.ModuleList):
    """A list that is called."""

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self:
            tokens = block(tokens)
        return tokens


def in_chunks(*, padded: bool) -> nn.Module:
    """Two blocks each; padded, a block has the same number in its chunk as in the model, as in DINOv2's own code."""
    model = small_vit()
    blocks = list(model.blocks)
    chunks = [Chunk([nn.Identity()] * (start * padded) + blocks[start : start + 2]) for start in (0, 2)]
    model.blocks = nn.Sequential(*chunks)
    return model


def assert_same_maps(model: nn.Module, whole: nn.Module) -> None:
    images = random_images()
    assert find_architecture(model, images).depth == 4
    expected, found = (vitreous.explain(each, images, METHODS, TARGET).scores for each in (whole, model))
    for method in METHODS:
        assert largest_difference(found[method], expected[method]) < 1e-12, method  # float64: the same operations


@pytest.mark.parametrize("padded", [True, False])
def test_chunks_are_one_stack(*, padded: bool) -> None:
    assert_same_maps(in_chunks(padded=padded), small_vit())


class OneApart(nn.Module):
    """A ViT with one of its blocks outside of the list, in front or behind; it may be there and not used."""

    def __init__(self, where: str, *, tokens: int = 17) -> None:
        super().__init__()
        self.where, self.tokens, self.vit = where, tokens, small_vit()
        blocks = list(self.vit.blocks)
        self.vit.blocks = nn.Sequential(*blocks[1:])
        self.apart = nn.ModuleList([blocks[0], nn.LayerNorm(24).double()]) if where == "in a list" else blocks[0]

    def forward(self, images: Tensor) -> Tensor:
        tokens, apart = self.vit._pos_embed(self.vit.patch_embed(images)), self.apart
        if self.where == "in front":
            tokens = torch.cat((apart(tokens[:, : self.tokens]), tokens[:, self.tokens :]), dim=1)
        tokens = self.vit.blocks(tokens)
        if self.where in ("behind", "in a list"):
            read = (apart if self.where == "behind" else apart[0])(tokens[:, : self.tokens])
            tokens = torch.cat((read, tokens[:, self.tokens :]), dim=1)
        return self.vit.forward_head(self.vit.norm(tokens))


@pytest.mark.parametrize("where", ["in front", "behind", "in a list"])
def test_a_block_that_is_kept_outside_of_the_stack_is_one_of_them(where: str) -> None:
    whole = small_vit()
    if where != "in front":
        whole.blocks = nn.Sequential(*whole.blocks[1:], whole.blocks[0])
    assert_same_maps(OneApart(where).eval(), whole)


@pytest.mark.parametrize(("where", "tokens"), [("nowhere", 17), ("in front", 1)])
def test_one_that_does_not_run_on_the_tokens_is_no_block(where: str, tokens: int) -> None:
    """As the layer that ``nn.TransformerEncoder`` copies, or a part of the embedding."""
    scores = vitreous.explain(OneApart(where, tokens=tokens).eval(), random_images(), "gae", TARGET).scores["gae"]
    assert (scores.std(dim=1) > 0).all()


def test_the_layer_that_an_encoder_is_made_of_may_stay_beside_it() -> None:
    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Conv2d(3, 24, 8, 8), nn.Linear(24, 5)
            self.layer = nn.TransformerEncoderLayer(24, 3, 48, batch_first=True)
            self.encoder = nn.TransformerEncoder(self.layer, 3, enable_nested_tensor=False)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.encoder(self.embed(images).flatten(2).mT).mean(dim=1))

    assert vitreous.explain(Copied().double().eval(), random_images(), "gae", TARGET).grid == (4, 4)


class Held(nn.Module):
    """The blocks in a dictionary, as GPTs hold them, and their parts in dictionaries of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = small_vit()
        blocks = [nn.ModuleDict(dict(block.named_children())) for block in self.vit.blocks]
        self.transformer = nn.ModuleDict({"h": nn.ModuleList(blocks)})
        self.vit.blocks = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.vit._pos_embed(self.vit.patch_embed(images))
        for block in self.transformer["h"]:
            tokens = tokens + block["ls1"](block["attn"](block["norm1"](tokens)))
            tokens = tokens + block["ls2"](block["mlp"](block["norm2"](tokens)))
        return self.vit.forward_head(self.vit.norm(tokens))


def test_parts_in_a_dictionary_are_blocks() -> None:
    assert_same_maps(Held().eval(), small_vit())


def test_a_model_without_a_stream_is_refused() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.GELU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(64, 5))
    with pytest.raises(UnsupportedModelError, match="Sequential has no residual stream of tokens"):
        vitreous.explain(layers.double().eval(), random_images(), "ixg", TARGET)


def test_no_tensor_of_the_traced_run_is_kept():
    """What was traced is freed at once, without the garbage collector; of tables of numbers only rows are kept."""
    model, images = small_vit(), random_images()
    gc.collect()
    gc.disable()
    try:
        before = {id(thing) for thing in gc.get_objects()}
        explained = vitreous.explain(model, images, ["tokentm", "globenc"], TARGET)
        kept = [thing for thing in gc.get_objects() if id(thing) not in before]
    finally:
        gc.enable()
    assert not [thing for thing in kept if type(thing) is Trace]
    tables = [thing for thing in kept if type(thing) is torch.Tensor and thing.dtype == torch.int64]
    assert tables
    assert all(table.untyped_storage().nbytes() == table.nbytes for table in tables)
    del explained


class Collecting(nn.Module):
    """A ViT that keeps its hidden states in the list which its tokens were joined from."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor) -> Tensor:
        vit = self.vit
        states = [vit.cls_token.expand(len(images), -1, -1), vit.patch_embed(images)]
        tokens = torch.cat(states, dim=1) + vit.pos_embed
        for block in vit.blocks:
            tokens = block(tokens)
            states.append(tokens)
        return vit.head(vit.norm(tokens)[:, 0])


def test_a_list_that_is_filled_later_is_traced_as_it_was() -> None:
    assert_same_maps(Collecting(small_vit()), small_vit())
