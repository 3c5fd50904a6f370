"""Token sampling by the model's own activations: TIS [englebert2023explaining][].

Clusters of the channels of all blocks group the patches; the model is run on half of the patches at a time, those where
a cluster is highest.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from vitreous._utils.tensors import at_least_float32
from vitreous.errors import MethodError
from vitreous.methods.options import AtMost
from vitreous.methods.perturbation import By, PatchMasks, PerturbationMethod, all_targets, seeded
from vitreous.methods.registry import register
from vitreous.methods.view import View
from vitreous.tape import Needs

_ROUNDS = 100
_MOVED = 1e-4  # of the largest centre: k-means stops when all centres move less


class TransformerInputSampling(PerturbationMethod):
    """sum_j p_c(x with the patches of M_j) M_j / sum_j M_j (TIS section 3).

    The activations that leave every block, without prefix tokens, are one map of patches for every channel and block.
    They are clustered by k-means into ``budget`` centres; M_j keeps the ``keep`` part of the patches where centre j is
    highest. The division corrects for patches that are in more masks than others; a patch in none gets 0.

    Args:
        by: drop the tokens, as in the paper, or paint the patches.
        budget: number of masks; with as few channels or fewer, every channel is a mask.
        keep: part of the patches that a mask keeps.
        seed: of the first centres, which are channels.
    """

    def __init__(self, *, by: By = "drop", budget: int = 1024, keep: float = 0.5, seed: int = 0) -> None:
        if budget < 1:
            raise MethodError("budget must be at least 1")
        if not 0 < keep < 1:
            raise MethodError("keep must lie between 0 and 1")
        self._by, self._budget, self._keep, self._seed = by, budget, keep, seed

    def needs(self, layer: int, depth: int) -> Needs:
        """What leaves every block."""
        return super().needs(layer, depth) | Needs(tokens=frozenset(range(1, depth + 1)))

    def maps(self, view: View) -> Tensor:
        """The mean probability of the masks that keep a patch; masks differ between images, which run one by one."""
        activations = torch.cat([view.tokens(layer) for layer in range(1, view.depth + 1)], dim=2)
        channels = activations[:, view.layout.prefix :].mT
        found = []
        for image, maps in enumerate(channels):
            masks = self.masks(maps)
            outputs = self._outputs(view, image, masks)
            weights = masks.to(outputs)
            found.append((outputs.mT @ weights) / weights.sum(dim=0).clamp(min=1))
        return torch.stack(found)

    def _outputs(self, view: View, image: int, masks: Tensor) -> Tensor:
        """The probability of every target with the patches of each mask, (masks, targets)."""
        runner, targets = view.runner, all_targets(view)[image]
        pixels = PatchMasks(masks, view.layout, runner.size)
        found = []
        for numbers in torch.split(torch.arange(len(masks), device=masks.device), runner.batch):
            inputs = runner.inputs[torch.full_like(numbers, image)]
            if self._by == "drop":
                logits = runner.logits_of_kept(inputs, masks[numbers].nonzero()[:, 1].view(len(numbers), -1))
            else:
                assert isinstance(inputs, Tensor)
                factors = pixels.pixels(numbers).to(inputs).unsqueeze(runner.channel_axis)
                logits = runner.logits(inputs * factors)
            found.append(runner.explained(at_least_float32(logits), "probability")[:, targets])
        return torch.cat(found)

    def masks(self, maps: Tensor) -> Tensor:
        """Which patches each mask keeps, (masks, patches), given the maps of all channels, (channels, patches)."""
        centres = maps if len(maps) <= self._budget else k_means(maps, self._budget, seeded(self._seed))
        count = max(1, int(self._keep * maps.shape[1]))
        highest = centres.argsort(dim=1, descending=True, stable=True)[:, :count]
        return torch.zeros_like(centres, dtype=torch.bool).scatter(1, highest, True)  # noqa: FBT003


def k_means(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` centres of points (n, dimensions) by Lloyd's algorithm, started at random points."""
    chosen = torch.randperm(len(points), generator=generator)[:count].to(points.device)
    centres = points[chosen]
    for _ in range(_ROUNDS):
        # The nearest centre has the largest x c - |c|² / 2.
        nearest = torch.addmm(-centres.square().sum(dim=1) / 2, points, centres.T).argmax(dim=1)
        members = torch.bincount(nearest, minlength=count).to(points)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        moved = torch.where(members[:, None] > 0, sums / members.clamp(min=1)[:, None], centres)
        shift, centres = float((moved - centres).abs().max()), moved
        if shift <= _MOVED * float(centres.abs().max()):
            break
    return centres


@register(
    "tis",
    family="perturbation",
    paper="Englebert et al., Explaining through Transformer Input Sampling",
    year=2023,
    url="https://github.com/aenglebert/Transformer_Input_Sampling",
    class_specific=True,
    signed=False,
)
def tis(
    *,
    by: Annotated[By, "drop the tokens of patches, or paint them with 0"] = "drop",
    budget: Annotated[int, "number of masks, one forward pass each", AtMost(10_000)] = 1024,
    keep: Annotated[float, "part of the patches that a mask keeps"] = 0.5,
    seed: Annotated[int, "seed of the clusters"] = 0,
) -> TransformerInputSampling:
    """Mean probability with the half of the patches where a cluster of the model's own channels is highest."""
    return TransformerInputSampling(by=by, budget=budget, keep=keep, seed=seed)
