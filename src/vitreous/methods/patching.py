"""Activation patching: CAAP [izadi2026causal][], one patch's activations in an image without content."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous._utils.tensors import at_least_float32
from vitreous.errors import MethodError
from vitreous.methods.integrated import blank_images
from vitreous.methods.occlusion import Of
from vitreous.methods.options import AtMost
from vitreous.methods.perturbation import PerturbationMethod, all_targets, few_at_once, rerun
from vitreous.methods.registry import register
from vitreous.methods.view import View
from vitreous.tape import Intervention, Needs

Context = Literal["zero", "mean", "black"]


class ActivationPatching(PerturbationMethod):
    """f(blank image with x_l of one patch put in at every block from ``start`` to ``end``) - f(blank image).

    The tokens of the photo are put in where they enter a block, x_l for l = start..end, and nothing else of the blank
    run is changed; blocks below ``start`` are those of the blank image, so that only the others run again. The paper
    takes a middle range of layers; its bounds and its blank image could not be verified, so that both are options.

    Args:
        of: the output f.
        context: the blank image, as baselines of integrated gradients.
        start: the first block, a quarter of the depth by default.
        end: the last block, three quarters of the depth by default.
    """

    def __init__(self, *, of: Of, context: Context, start: int | None, end: int | None) -> None:
        if start is not None and start < 0:
            raise MethodError(f"start={start} must be a block from 0 up")
        if start is not None and end is not None and end < start:
            raise MethodError(f"end={end} lies before start={start}")
        self._of, self._context, self._start, self._end = of, context, start, end

    def blocks(self, depth: int) -> range:
        """The blocks at which tokens are put in.

        Raises:
            MethodError: the model has no such blocks.
        """
        start = depth // 4 if self._start is None else self._start
        end = max(start, 3 * depth // 4 - 1) if self._end is None else self._end
        if not start <= end < depth:
            raise MethodError(f"blocks {start} to {end} are not among the {depth} of the model")
        return range(start, end + 1)

    def needs(self, layer: int, depth: int) -> Needs:
        """The tokens that enter the blocks of the range."""
        del layer
        return Needs(tokens=frozenset(self.blocks(depth)), picture=True)

    def maps(self, view: View) -> Tensor:
        """What every patch adds to the output of the blank image, (batch, targets, patches)."""
        blocks, layout, batch = self.blocks(view.depth), view.layout, len(view.target)
        with rerun(view, blank_images(view, self._context), Needs(tokens=frozenset({blocks[0]}))) as blank:
            context, empty = blank.tokens(blocks[0]).clone(), self._outputs(view, blank.tape.logits)
        found = []
        dtype = view.tape.tokens(blocks[0]).dtype
        # Blocks below the range do not run again, so correspondingly more fit into memory.
        room = max(1, view.depth // (view.depth - blocks[0]))
        for patches in few_at_once(view, torch.arange(layout.patches, device=context.device), room=room):
            places = (patches + layout.prefix).repeat_interleave(batch)
            images = torch.arange(batch, device=places.device).repeat(len(patches))
            inserted = {layer: (places, view.tokens(layer)[images, places].to(dtype)) for layer in blocks}
            change = Intervention(blocks[0], context.repeat(len(patches), 1, 1).to(dtype), inserted=inserted)
            with rerun(view, view.runner.inputs[:1], Needs(), change) as run:
                outputs = self._outputs(view, run.tape.logits)
            found.append(torch.unflatten(outputs, 0, (len(patches), batch)))
        return (torch.cat(found) - empty).permute(1, 2, 0)

    def _outputs(self, view: View, logits: Tensor) -> Tensor:
        """The output of every target of the image that a row belongs to, (rows, targets)."""
        targets = all_targets(view)
        return view.runner.explained(at_least_float32(logits), self._of).gather(
            1, targets.repeat(len(logits) // len(targets), 1)
        )


@register(
    "caap",
    family="perturbation",
    paper="Izadi et al., Causal Attribution via Activation Patching",
    year=2026,
    arxiv="2603.13652",
    note="the range of blocks and the blank image are ours",
    class_specific=True,
    signed=True,
)
def caap(
    *,
    of: Annotated[Of, "the output that is read"] = "probability",
    context: Annotated[Context, "the blank image: 0 after normalisation, the image's mean colour, or black"] = "zero",
    start: Annotated[
        int | None, "the first block at which tokens are put in; a quarter of the depth by default", AtMost(1000)
    ] = None,
    end: Annotated[
        int | None, "the last block at which tokens are put in; three quarters of the depth by default", AtMost(1000)
    ] = None,
) -> ActivationPatching:
    """Output of a blank image with the activations of one patch of the photo put into its middle blocks."""
    return ActivationPatching(of=of, context=context, start=start, end=end)
