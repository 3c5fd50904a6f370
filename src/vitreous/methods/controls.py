"""Controls and ceilings: maps that say nothing about the model, and an order found by asking it.

They stand in every evaluation as rows of their own: a method that does not beat ``random``, ``centre`` and ``edges``
has shown nothing about the model, and ``oracle`` is close to the most that an order of patches can reach. None of
them explains anything, so they are listed apart and never recommended.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous._utils.tensors import at_least_float32
from vitreous.errors import MethodError
from vitreous.inputs.model_input import Inputs, Texts
from vitreous.methods.options import AtMost
from vitreous.methods.perturbation import PerturbationMethod, all_targets, seeded
from vitreous.methods.readout import Procedure, layout_means
from vitreous.methods.registry import register
from vitreous.methods.view import View
from vitreous.tape import Needs

OracleOrder = Literal["deletion", "insertion", "both"]
_SHARPNESS = 3  # how far the first patches of an order stand out where two orders are added


class Control(Procedure):
    """A map that is made without reading the model."""

    runs_again = False

    def needs(self, layer: int, depth: int) -> Needs:
        """Nothing is recorded; a text has neither a centre nor edges."""
        del layer, depth
        return Needs(picture=True)


class RandomOrder(Control):
    """Independent uniform numbers, seeded by ``seed`` and the content of the model's input.

    The same input has the same map in every batch, process and run; the sha256 of its numbers in float32 (of a text:
    of its token numbers) is the seed.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def needs(self, layer: int, depth: int) -> Needs:
        """Nothing; tokens of a text have an order, too."""
        del layer, depth
        return Needs()

    def map(self, view: View) -> Tensor:
        """One number for every patch."""
        inputs = view.runner.inputs
        drawn = [
            torch.rand(
                view.layout.patches, generator=seeded(content_seed(inputs, row, self._seed)), dtype=torch.float64
            )
            for row in range(len(inputs))
        ]
        return torch.stack(drawn).to(inputs.device, view.dtype)


def content_seed(inputs: Inputs, row: int, seed: int) -> int:
    """A seed that depends on the numbers of one input and on ``seed``, and on nothing else."""
    if isinstance(inputs, Texts):
        numbers = inputs.parts["input_ids"][row].cpu().numpy()
    else:
        numbers = inputs[row].detach().to("cpu", torch.float32).numpy()
    return int.from_bytes(hashlib.sha256(f"{seed}|".encode() + numbers.tobytes()).digest()[:8], "big") >> 1


class CentredGaussian(Control):
    """exp(-(u² + v²) / 2 s²) with u and v the distance from the centre as a part of the image's height and width.

    Of a volume also its depth counts, of a clip its length.
    """

    def __init__(self, spread: float = 0.25) -> None:
        if not spread > 0:
            raise MethodError("spread must be above 0")
        self._spread = spread

    def map(self, view: View) -> Tensor:
        """The same for every image."""
        bell = torch.ones((), dtype=torch.float64)
        for cells in view.layout.grid:
            distances = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells - 0.5
            bell = bell[..., None] * torch.exp(-(distances**2) / (2 * self._spread**2))
        return bell.flatten().to(view.runner.inputs.device, view.dtype).repeat(len(view.target), 1)


class Edges(Control):
    """Mean over channels and pixels of a patch of the Sobel gradient's length, of the image as the model sees it."""

    def needs(self, layer: int, depth: int) -> Needs:
        """A picture: the Sobel gradient is that of a plane."""
        return super().needs(layer, depth) | Needs(plane=True)

    def map(self, view: View) -> Tensor:
        """How much changes inside of each patch."""
        images = at_least_float32(view.runner.images.detach())
        across = images.new_tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        kernels = torch.stack((across, across.T))[:, None]
        batch, channels, height, width = images.shape
        framed = torch.nn.functional.pad(images.reshape(-1, 1, height, width), (1, 1, 1, 1), mode="replicate")
        lengths = torch.nn.functional.conv2d(framed, kernels).square().sum(dim=1).sqrt()
        pixels = lengths.view(batch, channels, -1).mean(dim=1)
        return layout_means(pixels, (height, width), view.layout).to(view.dtype)


class GreedyOracle(PerturbationMethod):
    """An order of patches found by greedy search on p_c itself, with dropped tokens.

    In each of ``steps`` rounds every patch that is left is dropped alone; then an equal share of the patches goes for
    good: for ``deletion`` those whose loss lowers log p_c most, the first of them ranking highest; for ``insertion``
    those whose loss lowers it least, the last that stay ranking highest. ``both`` adds the cubes of the two ranks.
    """

    _by = "drop"

    def __init__(self, steps: int = 8, order: OracleOrder = "both") -> None:
        if steps < 1:
            raise MethodError("steps must be at least 1")
        self._steps, self._order = steps, order

    def maps(self, view: View) -> Tensor:
        """Ranks from 0 to 1, the highest for what matters most."""
        return torch.stack([self._ranks(view, target) for target in all_targets(view).unbind(dim=1)], dim=1)

    def _ranks(self, view: View, target: Tensor) -> Tensor:
        if self._order == "both":
            both = [self._search(view, target, most_first=first) for first in (True, False)]
            return torch.stack(both).pow(_SHARPNESS).mean(dim=0)
        return self._search(view, target, most_first=self._order == "deletion")

    def _search(self, view: View, target: Tensor, *, most_first: bool) -> Tensor:
        """The rank of every patch in one direction, (batch, patches)."""
        patches, batch = view.layout.patches, len(target)
        left = torch.arange(patches, device=target.device).repeat(batch, 1)
        gone: list[Tensor] = []
        bounds = [round(patches * step / self._steps) for step in range(self._steps + 1)]
        for count in (end - start for start, end in pairwise(bounds) if end > start):
            order = self._without_one(view, target, left).argsort(dim=1, stable=True, descending=not most_first)
            left = left.gather(1, order)
            gone.append(left[:, :count])
            left = left[:, count:].sort(dim=1).values
        ranks = torch.linspace(1, 0, patches, dtype=view.dtype, device=target.device).expand(batch, -1)
        if not most_first:
            ranks = ranks.flip(1)
        return torch.zeros_like(ranks).scatter(1, torch.cat(gone, dim=1), ranks)

    def _without_one(self, view: View, target: Tensor, left: Tensor) -> Tensor:
        """The log p_c with each of the patches that are left dropped alone, (batch, left)."""
        runner, (batch, count) = view.runner, left.shape
        if count == 1:  # nothing to compare, and some models have nothing else to read
            return left.new_zeros(batch, 1, dtype=view.dtype)
        others = torch.arange(count, device=left.device).repeat(count, 1)
        others = others[~torch.eye(count, dtype=torch.bool, device=left.device)].view(count, count - 1)
        kept = left[:, others].flatten(0, 1)
        image = torch.arange(batch, device=left.device).repeat_interleave(count)
        found = [
            runner.explained(
                at_least_float32(runner.logits_of_kept(runner.inputs[rows], kept[part])), "log_probability"
            )
            .gather(1, target[rows][:, None])
            .squeeze(1)
            for part in torch.split(torch.arange(len(image), device=left.device), runner.batch)
            for rows in (image[part],)
        ]
        return torch.cat(found).view(batch, count).to(view.dtype)


@register(
    "random",
    family="control",
    paper="Samek et al., Evaluating the Visualization of What a Deep Neural Network Has Learned",
    year=2017,
    arxiv="1509.06321",
    class_specific=False,
    signed=False,
)
def random_order(*, seed: Annotated[int, "of the numbers, together with the image"] = 0) -> RandomOrder:
    """Control: random numbers, the same for the same image; what any method must beat."""
    return RandomOrder(seed)


@register(
    "centre",
    family="control",
    paper="Judd et al., Learning to Predict Where Humans Look",
    year=2009,
    doi="10.1109/ICCV.2009.5459462",
    class_specific=False,
    signed=False,
)
def centre(
    *, spread: Annotated[float, "standard deviation, as a part of the image's height and width"] = 0.25
) -> CentredGaussian:
    """Control: a Gaussian in the centre of the image, where photographers put objects."""
    return CentredGaussian(spread)


@register(
    "edges",
    family="control",
    paper="Adebayo et al., Sanity Checks for Saliency Maps",
    year=2018,
    arxiv="1810.03292",
    class_specific=False,
    signed=False,
)
def edges() -> Edges:
    """Control: how strong the edges of the image are in each patch, whatever the model does."""
    return Edges()


@register(
    "oracle",
    family="ceiling",
    paper="Hase et al., The Out-of-Distribution Problem in Explainability and Search Methods for Feature Importance "
    "Explanations",
    year=2021,
    arxiv="2106.00786",
    note="greedy search instead of their parallel local search",
    class_specific=True,
    signed=False,
)
def oracle(
    *,
    steps: Annotated[
        int, "rounds of a search; on n patches one search costs about n (steps + 1) / 2 evaluations", AtMost(10_000)
    ] = 8,
    order: Annotated[
        OracleOrder, "search what lowers the output when it goes, what keeps it up, or add both ranks"
    ] = "both",
) -> GreedyOracle:
    """Ceiling: the order of patches found by asking the model itself, for curves of deletion and insertion."""
    return GreedyOracle(steps, order)
