"""Which modules are a model's blocks: all of them in the order they run, or a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import largest_difference, random_images, small_vit
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


def test_numbered_chunks_are_one_stack() -> None:
    whole, chunked, images = small_vit(), in_chunks(padded=True), random_images()
    assert find_anatomy(chunked).depth == 4
    expected, found = (vitreous.explain(model, images, METHODS, TARGET).scores for model in (whole, chunked))
    for method in METHODS:
        assert largest_difference(found[method], expected[method]) < 1e-12  # float64: the same operations


def test_lists_without_numbers_may_be_branches() -> None:
    with pytest.raises(UnsupportedModelError, match=r"2 separate stacks of attention blocks: blocks\.0 .*, blocks\.1 "):
        find_anatomy(in_chunks(padded=False))


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
@pytest.mark.parametrize("method", ["gae", "rollout", "ixg", "decompx", "occlusion"])
def test_a_block_that_runs_outside_of_the_stack_is_not_left_out_in_silence(where: str, method: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match="OneApart runs another Block on its tokens than the 3 of its stack"
    ):
        vitreous.explain(OneApart(where).eval(), random_images(), method, TARGET)


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


def test_a_list_in_a_dictionary_is_no_list_of_parts() -> None:
    """As GPTs hold their blocks; what is missing is a known name for their attention."""

    class Held(nn.Module):
        def __init__(self, **blocks: nn.Module) -> None:
            super().__init__()
            self.transformer = nn.ModuleDict(blocks)

    block = nn.ModuleDict({"sa": nn.Linear(24, 24)})
    with pytest.raises(UnsupportedModelError, match=r"has no stack of transformer blocks: in no nn\.ModuleList"):
        find_anatomy(Held(h=nn.ModuleList([nn.Sequential(nn.Linear(24, 24))] * 3)))
    with pytest.raises(UnsupportedModelError, match="keeps the parts of its blocks in lists"):
        find_anatomy(Held(h=nn.ModuleList([block] * 3)))
