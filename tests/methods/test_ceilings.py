"""MDA and LiMA: both searches written out plainly, regions, sizes that keep the order, and that they are ceilings."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import PATCHES, golden_model, random_images, small_vit
from vitreous.errors import MethodError
from vitreous.methods import list_controls, list_methods
from vitreous.methods.controls import _decreasing
from vitreous.methods.spelling import parse

Ask = Callable[[tuple[int, ...]], Tensor]


def asking(model: nn.Module, image: Tensor) -> Ask:
    """Probabilities with some patches alone, by running the parts of timm's model one after the other."""
    known: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def ask(kept: tuple[int, ...]) -> Tensor:
        kept = tuple(sorted(kept))
        if kept not in known:
            stream = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))
            stream = torch.cat((stream[:, :1], stream[:, [place + 1 for place in kept]]), dim=1)
            known[kept] = model.forward_head(model.norm(model.blocks(stream))).softmax(-1)[0]
        return known[kept]

    return ask


def lima_by_hand(ask: Ask, target: int, count: int) -> list[int]:
    """The order, with F written out."""
    everything = set(range(count))

    def value(some: list[int]) -> float:
        inside, outside = ask(tuple(some)), ask(tuple(everything - set(some)))
        entropy = -float((inside * inside.log()).sum())
        sure = 1 - entropy / math.log(len(inside))
        return 20 * float(inside[target]) + 5 * (1 - float(outside[target])) + 0.01 * sure

    front: list[int] = []
    end: list[int] = []
    while len(rest := sorted(everything - set(front) - set(end))) > 1:
        by_value = sorted(rest, key=lambda number: value([*front, number]))
        best = by_value[-1]
        worst = [number for number in by_value[:8] if number != best] if len(rest) > 8 else []
        front.append(best)
        if worst:
            end.append(min(worst, key=lambda number: value([*end, number])))
    return [*front, *rest, *reversed(end)]


def mda_by_hand(ask: Ask, target: int, count: int) -> list[int]:
    """The order: insertion to 0.9, the rest from the end."""
    everything = tuple(range(count))
    whole = float(ask(everything)[target])

    def score(some: list[int]) -> float:
        return float(ask(tuple(some))[target])

    loss = {number: whole - score([other for other in everything if other != number]) for number in everything}
    ranked = sorted(everything, key=lambda number: -loss[number])
    wide = 2 * int(count**0.5)
    front: list[int] = []
    start = None
    while len(front) < count:
        candidates = [number for number in ranked if number not in front][:wide]
        outputs = {number: score([*front, number]) for number in candidates}
        start = min(outputs.values()) if start is None else start
        front.append(max(outputs, key=outputs.get))
        if outputs[front[-1]] - start >= 0.9 * (whole - start):
            break
    end: list[int] = []
    while len(front) + len(end) < count:
        candidates = [number for number in reversed(ranked) if number not in front and number not in end][:wide]
        end.append(min(candidates, key=lambda number: score([*end, number])))
    return [*front, *reversed(end)]


@pytest.mark.parametrize(("name", "by_hand"), [("lima:cells=0", lima_by_hand), ("mda", mda_by_hand)])
def test_the_order_is_that_of_the_search_written_out(name, by_hand):
    model, images = golden_model()
    target = model(images).argmax(1)
    found = vitreous.explain(model, images, name, target).scores[name]
    for image, number, map_ in zip(images, target.tolist(), found, strict=True):
        assert map_.argsort(descending=True).tolist() == by_hand(asking(model, image), number, PATCHES)


def test_regions_are_squares_of_patches():
    model, images = small_vit(), random_images(1)
    for name in ("lima:cells=2", "mda:cells=2"):
        squares = vitreous.explain(model, images, name, 1).scores[name].view(2, 2, 2, 2)
        assert torch.equal(squares, squares[:, :1, :, :1].expand_as(squares))
        assert len(squares.unique()) == 4


def test_a_search_keeps_the_prediction_with_fewer_patches_than_a_random_order_needs():
    """That makes them ceilings: the mean probability while the first patches are put in, on a trained model."""
    model, images = golden_model()
    target = model(images).argmax(1)
    scores = vitreous.explain(model, images, ["lima:cells=0", "mda", "random"], target).scores

    def inserted(name: str) -> float:
        curves = []
        for image, number, map_ in zip(images, target.tolist(), scores[name], strict=True):
            ask, order = asking(model, image), map_.argsort(descending=True).tolist()
            curves += [float(ask(tuple(order[:step]))[number]) for step in range(1, PATCHES)]
        return sum(curves) / len(curves)

    assert min(inserted("lima:cells=0"), inserted("mda")) > inserted("random") + 0.02


def test_they_are_ceilings_and_no_methods():
    families = {info.name: info.family for info in list_controls()}
    assert families["mda"] == families["lima"] == "ceiling"
    assert not {"mda", "lima"} & {info.name for info in list_methods()}


def test_the_nearest_falling_numbers():
    found = _decreasing(torch.tensor([3.0, 1.0, 2.0, 5.0, 0.0], dtype=torch.float64))
    # 1, 2, 5 rise: their mean is 8/3, below 3.
    torch.testing.assert_close(found, torch.tensor([3.0, 8 / 3, 8 / 3, 8 / 3, 0.0], dtype=torch.float64))


def test_a_negative_number_of_regions_is_refused():
    with pytest.raises(MethodError, match="cells"):
        parse("lima:cells=-1")
