"""One patch or window at a time: occlusion, PAMI, AtMan and CAAP.

Occlusion [zeiler2014visualizing][] hides the window, PAMI [shi2023pami][] hides everything else, AtMan
[deiseroth2023atman][] suppresses the attention to it, CAAP [izadi2026causal][] puts its activations into an image
without content.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.errors import MethodError
from vitreous.methods.integrated import blank_images
from vitreous.methods.perturbation import (
    By,
    PatchMasks,
    PerturbationMethod,
    all_targets,
    few_at_once,
    masked_outputs,
    original_output,
    rerun,
    run_pairs,
    windows,
    windows_within,
)
from vitreous.methods.readout import View
from vitreous.methods.registry import MOST_EVALUATIONS, AtMost, register
from vitreous.tape import Intervention, Needs
from vitreous.tape.output import Quantity

Of = Literal["probability", "logit"]
Painting = Annotated[By, "paint patches with 0, or drop their tokens"]
WindowBudget = Annotated[
    int | None,
    "maximum number of forward passes per image; with more squares, the stride is raised until they fit, and the "
    "square with it, so that the whole image is covered; unlimited by default",
    AtMost(100_000),
]
Stride = Annotated[int, "stride of the squares, in patches", AtMost(1000)]


def check_windows(window: int, stride: int, budget: int | None) -> None:
    """Check the options before the model runs."""
    if budget is not None and budget < 1:
        raise MethodError("budget must be at least 1")
    windows((1, 1), window, stride)


class Occlusion(PerturbationMethod):
    """f(x) - f(x without a window), averaged over the windows that contain a patch (Zeiler and Fergus, section 4.2).

    Args:
        by: paint patches or drop their tokens.
        of: the output f.
        window: edge of a window, in patches.
        stride: stride of the windows, in patches.
        budget: maximum number of windows, see ``windows_within``; ``None`` for no limit.
    """

    def __init__(self, *, by: By, of: Of, window: int, stride: int, budget: int | None = None) -> None:
        check_windows(window, stride, budget)
        self._by, self._of, self._window, self._stride, self._budget = by, of, window, stride, budget

    def evaluations_on(self, grid: tuple[int, ...] | None) -> int | None:
        """One forward pass per window."""
        return None if grid is None else len(self.windows(grid))

    def windows(self, grid: tuple[int, ...]) -> Tensor:
        """The patches of every window, (windows, patches)."""
        return windows_within(self._budget, grid, self._window, self._stride)

    def maps(self, view: View) -> Tensor:
        """Drop of the output when each patch is hidden."""
        hidden = self.windows(view.layout.grid)
        outputs = masked_outputs(view, PatchMasks(~hidden, view.layout, view.runner.size), self._by, self._of)
        return average_over(hidden, original_output(view, self._of)[..., None] - outputs.mT)


class Pami(PerturbationMethod):
    """f(a window of x alone), averaged over the windows that contain a patch (PAMI section 3).

    Args:
        by: paint patches or drop their tokens.
        of: the output f.
        window: edge of a window, in patches; ``None`` for a quarter of the image.
        stride: stride of the windows, in patches.
        budget: maximum number of windows, see ``windows_within``; ``None`` for no limit.
    """

    def __init__(self, *, by: By, of: Of, window: int | None, stride: int, budget: int | None = None) -> None:
        check_windows(1 if window is None else window, stride, budget)
        self._by, self._of, self._window, self._stride, self._budget = by, of, window, stride, budget
        self.signed = of == "logit"

    def evaluations_on(self, grid: tuple[int, ...] | None) -> int | None:
        """One forward pass per window."""
        return None if grid is None else len(self.windows(grid))

    def windows(self, grid: tuple[int, ...]) -> Tensor:
        """The patches of every window, (windows, patches)."""
        return windows_within(self._budget, grid, self._window or max(1, round(min(grid) / 4)), self._stride)

    def maps(self, view: View) -> Tensor:
        """Output for each patch with its neighbours alone."""
        shown = self.windows(view.layout.grid)
        outputs = masked_outputs(view, PatchMasks(shown, view.layout, view.runner.size), self._by, self._of)
        return average_over(shown, outputs.mT)


def average_over(inside: Tensor, values: Tensor) -> Tensor:
    """Average ``values`` (..., windows) over the windows that contain each patch, (..., patches); 0 if none does."""
    inside = inside.to(values)
    return values @ inside / inside.sum(dim=0).clamp(min=1)


@register(
    "occlusion",
    family="perturbation",
    paper="Zeiler and Fergus, Visualizing and Understanding Convolutional Networks",
    year=2014,
    arxiv="1311.2901",
    class_specific=True,
    signed=True,
)
def occlusion(
    *,
    by: Painting = "paint",
    of: Annotated[Of, "the output whose change is measured"] = "probability",
    window: Annotated[int, "edge of the hidden square, in patches", AtMost(1000)] = 1,
    stride: Stride = 1,
    budget: WindowBudget = None,
) -> Occlusion:
    """Drop of the output when a square of patches is hidden; one forward pass per square."""
    return Occlusion(by=by, of=of, window=window, stride=stride, budget=budget)


@register(
    "pami",
    family="perturbation",
    paper="Shi et al., PAMI: Partition Input and Aggregate Outputs for Model Interpretation",
    year=2023,
    arxiv="2302.03318",
    class_specific=True,
    signed=False,
)
def pami(
    *,
    by: Painting = "paint",
    of: Annotated[Of, "the output that is measured"] = "probability",
    window: Annotated[
        int | None, "edge of the visible square, in patches; a quarter of the image by default", AtMost(1000)
    ] = None,
    stride: Stride = 1,
    budget: WindowBudget = None,
) -> Pami:
    """Output when only a square of patches is visible; one forward pass per square."""
    return Pami(by=by, of=of, window=window, stride=stride, budget=budget)


Measure = Literal["loss", "logit", "probability"]


class AtMan(PerturbationMethod):
    """L(target | token i suppressed) - L(target) (AtMan eq. 5), L the cross entropy.

    Suppressed means that in all heads and blocks column k of the scores before the softmax is multiplied by 1 - f s_ik,
    where s_ik is the cosine similarity of the first block's input tokens, for k = i and for all patches with s_ik ≥ η
    (eqs. 6 and 7; f = 0.9, as in the authors' code). Attention pooling is treated alike.

    Args:
        factor: f.
        similarity: η.
        of: the output that is compared; the loss in the paper.
        budget: forward passes per image. With more patches, the patches of a square are suppressed together, each
            column by the smallest factor of the square, and share the score; the squares are the smallest that fit.
            ``None`` for every patch by itself, as in the paper.
    """

    def __init__(
        self, *, factor: float = 0.9, similarity: float = 0.7, of: Measure = "loss", budget: int | None = None
    ) -> None:
        if not 0 < factor < 1:
            raise MethodError("factor must lie between 0 and 1")
        if budget is not None and budget < 1:
            raise MethodError("budget must be at least 1")
        self._budget = budget
        self._factor, self._similarity = factor, similarity
        self._of: Quantity = "log_probability" if of == "loss" else of

    def needs(self, layer: int, depth: int) -> Needs:
        """The first block's input tokens, and attention that can be intercepted."""
        del layer
        return Needs(tokens=frozenset({0}), attention_rows=frozenset({depth - 1}))

    def evaluations_on(self, grid: tuple[int, ...] | None) -> int | None:
        """One forward pass per square."""
        return None if grid is None else len(windows_within(self._budget, grid, 1, 1))

    def maps(self, view: View) -> Tensor:
        """Drop of the output when every patch, or its square, is suppressed."""
        runner, squares = view.runner, windows_within(self._budget, view.layout.grid, 1, 1)
        single = self.factors(view)
        factors = torch.stack([single[:, square].amin(dim=1) for square in squares], dim=1)
        outputs = run_pairs(
            view,
            [torch.arange(len(squares))],
            lambda image, square: runner.logits_of_damped(runner.inputs[image], factors[image, square]),
            self._of,
        )
        return average_over(squares, original_output(view, self._of)[..., None] - outputs.mT)

    def factors(self, view: View) -> Tensor:
        """Factors of every column when a patch is suppressed, (batch, patches, tokens)."""
        prefix = view.layout.prefix
        patches = torch.nn.functional.normalize(view.tokens(0)[:, prefix:], dim=-1)
        alike = (patches @ patches.mT).clamp(max=1)
        alike = alike.masked_fill(alike < self._similarity, 0)
        alike.diagonal(dim1=1, dim2=2).fill_(1)
        return 1 - self._factor * torch.nn.functional.pad(alike, (prefix, 0))


@register(
    "atman",
    family="perturbation",
    paper="Deiseroth et al., AtMan: Understanding Transformer Predictions Through Memory Efficient Attention "
    "Manipulation",
    year=2023,
    arxiv="2301.08110",
    class_specific=True,
    signed=True,
)
def atman(
    *,
    factor: Annotated[float, "suppression of attention scores; 1 would set them to 0"] = 0.9,
    similarity: Annotated[float, "patches with at least this similarity are suppressed together; above 1: none"] = 0.7,
    of: Annotated[Measure, "the output whose change is measured"] = "loss",
    budget: Annotated[
        int | None,
        "maximum number of forward passes per image; with more patches, the smallest squares that fit are suppressed "
        "together; unlimited by default",
        MOST_EVALUATIONS,
    ] = None,
) -> AtMan:
    """Drop of the output when the attention to each patch is suppressed; one forward pass per patch."""
    return AtMan(factor=factor, similarity=similarity, of=of, budget=budget)


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
