"""Asking a model about photos whose pixels are erased step by step, in the order of a map.

Pixels are ranked once per map; all photos, maps, directions and steps go through the model in full batches, and nothing
is asked twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vitreous.errors import ProtocolError
from vitreous.evaluation.tasks.batch import Case, PhotoBatch, enlarged
from vitreous.tape.runner import ModelRunner

Sign = Literal["positive", "negative"]
Filling = Literal["black before normalisation", "zero after normalisation"]


class Order(NamedTuple):
    """A photo of a batch, by its position, a map (height, width) that ranks its pixels, and a name for the two."""

    image: int
    map: Tensor
    key: Hashable


class Orders(NamedTuple):
    """Orders that differ from each other, and which of them each of the asked ones is."""

    different: list[Order]
    positions: list[int]


def find_orders(batch: PhotoBatch, asked: Iterable[tuple[Case, int]]) -> Orders:
    """The maps of cases for classes; equal maps of a photo, by whatever method or for whatever class, are one."""
    different: list[Order] = []
    known: dict[Hashable, int] = {}
    positions = []
    for case, target in asked:
        map_ = batch.map_of(case, target)
        key = (case.image, tuple(map_.shape), map_.cpu().numpy().tobytes())
        if key not in known:
            known[key] = len(different)
            different.append(Order(case.image, map_, key))
        positions.append(known[key])
    return Orders(different, positions)


def ranks(map_: Tensor) -> Tensor:
    """The place of every pixel of a map (height, width), 0 for the highest; of equal ones the upper left is first."""
    order = map_.flatten().argsort(descending=True, stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return places.view(map_.shape)


def erased_logits(
    batch: PhotoBatch,
    orders: Sequence[Order],
    counts: Sequence[int],
    directions: Sequence[Sign],
    *,
    filling: Filling,
    upsampling: str = "bilinear",
) -> Tensor:
    """What the model says of photos with pixels erased.

    Args:
        batch: The photos.
        orders: In which order their pixels go; maps smaller than the photo are enlarged first.
        counts: How many pixels are erased at each step.
        directions: ``positive`` erases the highest first, ``negative`` the lowest.
        filling: What erased pixels become.
        upsampling: How maps are enlarged.

    Returns:
        Logits (orders, directions, counts, classes).
    """
    runner = batch.runner
    pixels = runner.size[0] * runner.size[1]
    fill = fill_of(runner, filling)

    def name_of(order: Order, direction: Sign, count: int) -> Hashable:
        # Nothing erased and everything erased look the same whatever the order.
        if count in (0, pixels):
            return ("erased", filling, order.image if count == 0 else "all")
        return ("erased", filling, upsampling, order.key, direction, count)

    for order in orders:
        batch.memory[name_of(order, "positive", 0)] = batch.logits[order.image]
    names = [[[name_of(order, way, count) for count in counts] for way in directions] for order in orders]
    work = []
    known = set(batch.memory)
    for order, rows in zip(orders, names, strict=True):
        asked = zip(directions, rows, strict=True)
        steps = {name: (way, count) for way, row in asked for name, count in zip(row, counts, strict=True)}
        work.append((order, {name: step for name, step in steps.items() if name not in known}))
        known |= steps.keys()
    for painted, pictures in _pictures(runner, work, fill, upsampling):
        batch.memory.update(zip(painted, runner.logits(pictures), strict=True))
    flat = [batch.memory[name] for rows in names for row in rows for name in row]
    shape = (len(orders), len(directions), len(counts), batch.logits.shape[1])
    return torch.stack(flat).view(shape) if flat else batch.logits.new_empty(shape)


def _pictures(
    runner: ModelRunner,
    work: Sequence[tuple[Order, Mapping[Hashable, tuple[Sign, int]]]],
    fill: Tensor,
    upsampling: str,
) -> Iterator[tuple[list[Hashable], Tensor]]:
    """Full batches of erased photos and the name of each; all are painted into one buffer."""
    pixels = runner.size[0] * runner.size[1]
    buffer = runner.images.new_empty((runner.batch, *runner.images.shape[1:]))
    names: list[Hashable] = []
    for order, steps in work:
        if not steps:
            continue
        rank = ranks(enlarged(order.map[None], runner.size, upsampling, runner.geometry)[0])
        for name, (direction, count) in steps.items():
            erased = rank < count if direction == "positive" else rank >= pixels - count
            torch.where(erased, fill, runner.images[order.image], out=buffer[len(names)])
            names.append(name)
            if len(names) == len(buffer):
                yield names, buffer
                names = []
    if names:
        yield names, buffer[: len(names)]


def fill_of(runner: ModelRunner, filling: Filling) -> Tensor:
    """What erased pixels become, (channel, 1, 1)."""
    if filling == "zero after normalisation":
        return runner.images.new_zeros((runner.images.shape[1], 1, 1))
    if runner.black is None:
        raise ProtocolError("what a black pixel is to this model is not known: its preprocessing is missing")
    return runner.black[:, None, None]
