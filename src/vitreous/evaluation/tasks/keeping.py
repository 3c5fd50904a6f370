"""Asking a model about photos of which only some patches are kept, the others being dropped (True Token Masking).

Patches are ranked once per map; what keeps equally many patches goes through the model together, whatever photo, map or
curve it belongs to, and nothing is asked twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vitreous.evaluation.tasks.batch import PhotoBatch
from vitreous.evaluation.tasks.erasing import Orders
from vitreous.methods.pixel_maps import layout_means

Side = Literal["top", "bottom"]


class Kept(NamedTuple):
    """How many patches are kept, and which: the most or the least relevant."""

    side: Side
    number: int


class _Question(NamedTuple):
    name: Hashable
    image: int
    patches: Tensor


def kept_logits(batch: PhotoBatch, orders: Orders, kept: Sequence[Kept]) -> Tensor:
    """What the model says of the kept patches, (orders, kept, classes)."""
    names = [[("kept", order.key, each) for each in kept] for order in orders.different]
    questions: dict[int, dict[Hashable, _Question]] = {}
    for order, row in zip(orders.different, names, strict=True):
        ranking = patch_scores(batch, order.map).argsort(descending=True, stable=True)
        for name, (side, count) in zip(row, kept, strict=True):
            if count == len(ranking):  # the whole photo, of which the answer is known
                batch.memory[name] = batch.logits[order.image]
            patches = ranking[:count] if side == "top" else ranking[len(ranking) - count :]
            if name not in batch.memory:
                questions.setdefault(count, {})[name] = _Question(name, order.image, patches)
    for alike in questions.values():
        _ask(batch, list(alike.values()))
    flat = [batch.memory[name] for row in names for name in row]
    shape = (len(names), len(kept), batch.logits.shape[1])
    return torch.stack(flat).view(shape) if flat else batch.logits.new_empty(shape)


def patch_scores(batch: PhotoBatch, map_: Tensor) -> Tensor:
    """One score per patch, (patches,); of a map of pixels, the means over the patches."""
    layout = batch.runner.layout
    if tuple(map_.shape) == layout.grid:
        return map_.flatten()
    return layout_means(map_.flatten(), (map_.shape[0], map_.shape[1]), layout)


def _ask(batch: PhotoBatch, questions: Sequence[_Question]) -> None:
    """Ask about equally many patches of each, a batch at a time, so that photos are copied a few at a time."""
    runner = batch.runner
    for first in range(0, len(questions), runner.batch):
        part = questions[first : first + runner.batch]
        images = runner.images[[question.image for question in part]]
        logits = runner.logits_of_kept(images, torch.stack([question.patches for question in part]))
        batch.memory.update(zip((question.name for question in part), logits, strict=True))
