"""CAAP: blocks run by hand with one token replaced, the range of blocks, the blank picture."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import PATCHES, random_images, small_vit
from vitreous.errors import MethodError
from vitreous.methods.spelling import parse

# Float64: the same arithmetic in batches of another size.
SAME = {"rtol": 1e-9, "atol": 1e-12}


def embedded(model: nn.Module, image: Tensor) -> Tensor:
    return model.norm_pre(model._pos_embed(model.patch_embed(image[None])))


@torch.no_grad()
def caap_by_hand(model: nn.Module, image: Tensor, target: int, blocks: range, blank: Tensor, of: str) -> Tensor:
    """One run for every patch; tokens are replaced where they enter a block."""
    source, stream = [], embedded(model, image)
    for block in model.blocks:
        source.append(stream)
        stream = block(stream)

    def output(patch: int | None) -> float:
        stream = embedded(model, blank)
        for number, block in enumerate(model.blocks):
            if patch is not None and number in blocks:
                stream[0, patch + model.num_prefix_tokens] = source[number][0, patch + model.num_prefix_tokens]
            stream = block(stream)
        logits = model.forward_head(model.norm(stream))[0]
        return float((logits.softmax(-1) if of == "probability" else logits)[target])

    return torch.tensor([output(patch) - output(None) for patch in range(PATCHES)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("spelling", "blocks", "of", "blank"),
    [
        ("caap", range(1, 3), "probability", "zero"),
        ("caap:of=logit,start=0,end=3", range(4), "logit", "zero"),
        ("caap:start=2,end=2,context=mean", range(2, 3), "probability", "mean"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2, "no_embed_class": True}])
def test_the_formula(spelling, blocks, of, blank, options):
    model, images = small_vit(**options), random_images()
    found = vitreous.explain(model, images, spelling, [1, 3]).scores[spelling]
    for image, target, map_ in zip(images, (1, 3), found, strict=True):
        mean = image.mean(dim=(1, 2), keepdim=True).expand_as(image)
        empty = torch.zeros_like(image) if blank == "zero" else mean
        torch.testing.assert_close(map_, caap_by_hand(model, image, target, blocks, empty, of), **SAME)


def test_a_blank_photo_has_nothing_to_put_in():
    model, blank = small_vit(), torch.zeros(1, 3, 32, 32, dtype=torch.float64)
    # The same numbers in another batch.
    assert float(vitreous.explain(model, blank, "caap", 1).scores["caap"].abs().max()) < 1e-14


def test_several_targets_share_the_runs():
    model, images = small_vit(), random_images()
    both = vitreous.explain(model, images, "caap", [[0, 3], [3, 1]]).scores["caap"]
    for place, target in ((0, [0, 3]), (1, [3, 1])):
        torch.testing.assert_close(
            vitreous.explain(model, images, "caap", target).scores["caap"], both[:, place], **SAME
        )


@pytest.mark.parametrize(("options", "reason"), [("start=-1", "from 0 up"), ("start=3,end=2", "lies before")])
def test_a_range_that_is_none_is_refused(options, reason):
    with pytest.raises(MethodError, match=reason):
        parse(f"caap:{options}")


def test_blocks_that_the_model_does_not_have_are_refused():
    with pytest.raises(MethodError, match="not among the 4"):
        vitreous.explain(small_vit(), random_images(), "caap:end=4", 1)
