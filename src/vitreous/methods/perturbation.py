"""Perturbation methods: run the model with parts of the image painted or dropped, in batches over images and masks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from vitreous._utils.tensors import exact
from vitreous.methods.masks import Masks, PatchMasks
from vitreous.methods.readout import Procedure
from vitreous.methods.view import View
from vitreous.tape import Needs
from vitreous.tape.output import Quantity

By = Literal["paint", "drop"]
RunMasked = Callable[[Tensor, Tensor], Tensor]


def masked_outputs(view: View, masks: Masks, by: By, quantity: Quantity) -> Tensor:
    """The model's output of every target for every mask, (batch, masks, targets).

    Painted parts become 0, the mean colour of normalised images; dropped patches are removed from the sequence (only
    masks of whole patches can be dropped), and masks that keep equally many patches share batches.
    """
    runner = view.runner
    if by == "paint":
        return run_pairs(
            view,
            [torch.arange(len(masks))],
            lambda image, mask: runner.logits(runner.images[image] * masks.pixels(mask).to(runner.images)),
            quantity,
        )
    assert isinstance(masks, PatchMasks)
    counts = masks.kept.sum(dim=1)

    def run(image: Tensor, mask: Tensor) -> Tensor:
        patches = masks.kept[mask].nonzero()[:, 1].view(len(mask), -1)
        return runner.logits_of_kept(runner.inputs[image], patches)

    return run_pairs(view, [torch.where(counts == count)[0] for count in sorted(set(counts.tolist()))], run, quantity)


def run_pairs(view: View, groups: Iterable[Tensor], run: RunMasked, quantity: Quantity) -> Tensor:
    """(batch, masks, targets) from ``run(image numbers, mask numbers)``, which returns logits.

    The masks of one group may be run together; every mask is in one group.
    """
    runner, targets = view.runner, all_targets(view)
    batch = len(runner.inputs)
    groups = list(groups)
    found = exact(view.tape.logits).new_empty(batch, sum(map(len, groups)), targets.shape[1])
    for group in groups:
        image, mask = torch.arange(batch).repeat_interleave(len(group)), group.repeat(batch)
        for images, masks in zip(*(torch.split(numbers, runner.batch) for numbers in (image, mask)), strict=True):
            outputs = runner.explained(exact(run(images, masks)), quantity)
            found[images, masks] = outputs.gather(1, targets[images])
    return found


def original_output(view: View, quantity: Quantity) -> Tensor:
    """The model's output of every target for the original image, (batch, targets), from the tape."""
    return view.runner.explained(exact(view.tape.logits), quantity).gather(1, all_targets(view))


def all_targets(view: View) -> Tensor:
    """All targets that are explained, (batch, targets): one run of the model serves all of them."""
    return view.target[:, None] if view.runner.targets is None else view.runner.targets


class PerturbationMethod(Procedure):
    """A method that runs the model on masked inputs, once for all targets."""

    _by: By = "paint"

    def needs(self, layer: int, depth: int) -> Needs:
        """Painting needs an image; tokens of a text can be dropped too."""
        del layer, depth
        return Needs(picture=self._by == "paint")

    def map(self, view: View) -> Tensor:
        """The map of the view's target."""
        memory = view.runner.memory
        if self not in memory:
            memory[self] = self.maps(view)
        (column, *_) = torch.where((all_targets(view) == view.target[:, None]).all(dim=0))[0].tolist()
        return memory[self][:, column]

    @abstractmethod
    def maps(self, view: View) -> Tensor:
        """The maps of all targets, (batch, targets, patches or pixels)."""
