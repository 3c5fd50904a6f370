"""Methods that integrate attention gradients over scaled images or attention: IIA, DIX, TAM, Beyond Intuition."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.errors import MethodError
from vitreous.methods.attention import GradientAttention, MeanAttention
from vitreous.methods.perturbation import few_at_once, rerun_scaled, sum_of_variations
from vitreous.methods.readout import Procedure, Readout, ReadRows, Residual, Row, View, times, total
from vitreous.methods.registry import AtMost, register
from vitreous.tape import GradientNeeds, Needs, Pass
from vitreous.tape.attention import row_pieces, value_gradient

PLAIN = Pass("plain", "logit")
_AUTHORS_STEPS = 20  # of Transition Attention Maps and Beyond Intuition, both ends included


class IteratedIntegral(Procedure):
    """Gradient rollout of matrices averaged over scaled images and over scaled attention of the last block.

    IIA (Barkan et al., ICCV 2023): eq. 9 iterates integrals over representations, here the image a x (baseline 0) and
    the last block's attention b A (baseline 0, the matrix as a constant); the integrand of a Vision Transformer is the
    gradient rollout, in which (A * dy_c/dA)^+ takes the place of A. As in the authors' program the integrals are means
    over equidistant points with both ends, per block and head before heads are averaged, and I + M has its rows
    normalised. DIX (Barkan et al., CIKM 2023) is the same without the integral over the image.
    """

    def __init__(self, points: int, *, scale_images: bool) -> None:
        if points < 2:
            raise MethodError(f"points={points} is too few: both ends of the integral count")
        self.points, self.scale_images = points, scale_images
        self.evaluations = points**2 if scale_images else points

    def scales(self) -> Tensor:
        """Scales of the image and of the last block's attention for every run, (runs, 2)."""
        ends = torch.linspace(0, 1, self.points, dtype=torch.float64)
        return torch.cartesian_prod(ends if self.scale_images else torch.ones(1, dtype=torch.float64), ends)

    def needs(self, layer: int, depth: int) -> Needs:
        """Attention, to check that it can be recorded, and the first block's tokens, the input of a text."""
        del layer
        return Needs(tokens=frozenset({0}), attention_rows=frozenset({depth - 1}), gradients_again=True)

    def map(self, view: View) -> Tensor:
        """The class token's row of the product of row-normalised I + mean (A * dA)^+."""
        entries, matrices = self.means(view)
        for matrix in reversed(matrices):
            weights = entries / (matrix.sum(dim=-1) + 1)
            entries = weights + times(weights, matrix)
        return entries[:, view.layout.prefix :]

    def means(self, view: View) -> tuple[Tensor, list[Tensor]]:
        """Average over all runs: the start of the rollout (batch, tokens), and mean_h (A * dA)^+ of every block.

        Rows are normalised after averaging, so one (batch, tokens, tokens) matrix per block is kept.
        """
        readout, batch = GradientAttention(), len(view.target)
        blocks = frozenset(range(view.depth))
        needs = Needs(attention=blocks, gradients={readout.backward: GradientNeeds(attention=blocks)})
        all_scales = self.scales()
        start: Tensor | None = None
        matrices: dict[int, Tensor] = {}
        for scales in few_at_once(view, all_scales):
            factors = scales[:, 1].repeat_interleave(batch)
            with rerun_scaled(view, scales[:, 0], needs, {view.depth - 1: factors}) as run:
                row = sum_of_variations(readout.top_row(run).dense(run.layout.tokens), batch)
                start = row if start is None else start.add_(row)
                for block in blocks:
                    matrix = _sum_of_matrices(readout, run, block, batch)
                    matrices[block] = matrices[block].add_(matrix) if block in matrices else matrix
        assert start is not None  # there are at least two points
        return start / len(all_scales), [matrices[block] / len(all_scales) for block in range(view.depth)]


def _sum_of_matrices(readout: GradientAttention, run: View, block: int, batch: int) -> Tensor:
    """Sum mean_h (A * dA)^+ over the variations of a run, (batch, tokens, tokens)."""
    read = readout.reader(run, block)
    return sum_of_variations(torch.cat([read(rows) for rows in run.attention(block).pieces()], dim=1), batch)


def integrated_gradient_row(view: View, steps: int) -> Tensor:
    """mean_h of (the mean of dy_c/dA over images a x, a from 0 to 1)^+: the last attention's class token row.

    (batch, tokens). If the head reads several tokens, their rows are averaged. Several methods use it, so it is cached
    for each target of a runner.
    """
    memory, key = view.runner.memory, (integrated_gradient_row, steps, tuple(view.target.tolist()))
    if key in memory:
        return memory[key]
    needs = Needs(gradients={PLAIN: GradientNeeds(attention=frozenset({view.depth - 1}))})
    layer, rows = view.last_attention

    def gradient(scales: Tensor) -> Tensor:
        with rerun_scaled(view, scales, needs) as run:
            return sum_of_variations(run.attention_gradient(PLAIN, layer, rows), len(view.target))

    points = torch.linspace(0, 1, steps, dtype=torch.float64)
    row = (total(map(gradient, few_at_once(view, points))) / steps).clamp_(min=0).mean(dim=(1, 2))
    # Attention pooling may exclude the prefix tokens.
    memory[key] = torch.nn.functional.pad(row, (view.layout.tokens - row.shape[1], 0))
    return memory[key]


class Feedback(MeanAttention):
    """A product of matrices whose class token row is weighted, at its end, by the integrated gradient of the last A."""

    residual: Residual = "add"
    only_as_product = True
    runs_again = True

    def __init__(self, steps: int) -> None:
        if steps < 2:
            raise MethodError(f"steps={steps} is too few: both ends of the integral count")
        self.steps = self.evaluations = steps

    def needs(self, layer: int, depth: int) -> Needs:
        """Also the first block's tokens, the input of a text."""
        return super().needs(layer, depth) | Needs(tokens=frozenset({0}), gradients_again=True)

    def finish(self, view: View, row: Row) -> Tensor:
        """The row, entry by entry times the integrated gradient."""
        return row.dense(view.layout.tokens).abs() * integrated_gradient_row(view, self.steps)


class TransitionAttention(Feedback):
    """A Markov chain of attention (Yuan et al. 2021): state 0 is the class token's row of the last block's mean_h A.

    A block below takes a state s to s A + s, A its mean over heads and the identity its residual connection. The last
    state is weighted by the integrated gradient of the last block's A. The order of the operations, 20 points with both
    ends, and the gradient of the logit are those of the authors' code, which omits the lowest four of twelve blocks
    (``start=4``); the numbers of the paper's equations could not be verified.
    """

    def step(self, view: View, layer: int, row: Row, residual: Residual) -> Row:
        """One transition; the first state is the row itself."""
        first = layer == view.last_attention[0]
        return super().step(view, layer, row, "none" if first else residual)


class TokenwiseAttention(Feedback):
    """I + mean_h A diag(||v_j W_O|| / ||x_j||), x_j the token that enters the block (Beyond Intuition, token-wise).

    The attention perception of Chen et al. (TMLR 2023): the norm of a token's projected value over the norm of the
    token, over all heads, LayerScale included and without the bias of the projection. The reasoning feedback is the
    integrated gradient of the last A. Taken from the authors' code, in which the product starts above the lowest blocks
    (its ``start_layer`` is counted from 1: ``start=5`` here is its default of 6); the paper's equations could not be
    consulted.
    """

    activations = ("tokens", "attention", "projections")

    def row_times(self, view: View, layer: int, row: Row) -> Tensor:
        """Row x mean_h A diag(...)."""
        moved = super().row_times(view, layer, row)
        return moved if layer == view.depth else moved * self.length_ratio(view, layer)

    def length_ratio(self, view: View, layer: int) -> Tensor:
        """||v_j W_O|| / ||x_j||, (batch, tokens)."""
        value = view.value(layer)
        projected = torch.einsum("bhnk,dhk->bnd", value, view.output_projection(layer).to(value.dtype))
        length = view.tokens(layer).norm(dim=-1)
        ratio: Tensor = projected.norm(dim=-1) / length.clamp_min(torch.finfo(length.dtype).tiny)
        return ratio


class HeadwiseAttention(Feedback):
    """I + Σ_h I_h A_h, I_h the mean over all entries of |A_hᵀ dy_c/dA_h|, divided by its sum (Beyond Intuition).

    The head-wise attention perception of Chen et al. (TMLR 2023). A_hᵀ dA_h = (A_hᵀ dO_h) V_hᵀ, so that the product of
    two matrices between tokens is never formed. From the authors' code, whose default ``start_layer`` of 4 is
    ``start=3`` here; there all heads of a batch share one sum, so the two agree for single images. The paper's
    equations could not be consulted.
    """

    gradients = ("attention",)
    backward = PLAIN

    def reader(self, view: View, layer: int) -> ReadRows:
        """Σ_h I_h A_h."""
        attention = view.attention(layer)
        importance = self.head_importance(view, layer)[:, :, None, None]
        return lambda rows: (importance * attention.rows(rows)).sum(dim=1)

    def head_importance(self, view: View, layer: int) -> Tensor:
        """I_h, (batch, head)."""
        attention, value = view.attention(layer), view.value(layer)
        reaching_values = at_least_float32(value_gradient(attention, view.gradients[self.backward].outputs[layer]))
        batch, heads, tokens = value.shape[:3]
        size = total(
            (reaching_values[:, :, rows].to(value.dtype) @ value.transpose(-2, -1)).abs_().sum(dim=(2, 3))
            for rows in row_pieces(batch * heads, tokens, tokens)
        )
        return size / size.sum(dim=1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)


Points = Annotated[int, "points of each integral, both ends included", AtMost(100)]
Steps = Annotated[
    int,
    "number of images between black (0) and the original over which the gradient is averaged, both included",
    AtMost(1000),
]


@register(
    "iia",
    family="attention",
    paper="Barkan et al., Visual Explanations via Iterated Integrated Attributions",
    year=2023,
    url="https://yonisgit.github.io/iterated-integrated-attributions/",
    class_specific=True,
    signed=False,
)
def iia(*, points: Points = 6) -> Readout:
    """Gradient rollout integrated over the image's scale and over the last block's attention."""
    return IteratedIntegral(points, scale_images=True)


@register(
    "dix",
    family="attention",
    paper="Barkan et al., Deep Integrated Explanations",
    year=2023,
    class_specific=True,
    signed=False,
)
def dix(*, points: Points = 6) -> Readout:
    """Gradient rollout integrated over the last block's attention."""
    return IteratedIntegral(points, scale_images=False)


@register(
    "tam",
    family="attention",
    paper="Yuan et al., Explaining Information Flow Inside Vision Transformers Using Markov Chain",
    year=2021,
    url="https://openreview.net/forum?id=TT-cf6QSDaQ",
    aggregation="rollout",
    class_specific=True,
    signed=False,
)
def tam(*, steps: Steps = _AUTHORS_STEPS) -> Readout:
    """Attention as the transitions of a Markov chain, weighted by the integrated gradient of the last attention."""
    return TransitionAttention(steps)


@register(
    "bi_token",
    family="attention",
    paper="Chen et al., Beyond Intuition: Rethinking Token Attributions inside Transformers",
    note="token-wise",
    year=2023,
    url="https://openreview.net/forum?id=rm0zIzlhcX",
    aggregation="rollout",
    class_specific=True,
    signed=False,
)
def bi_token(*, steps: Steps = _AUTHORS_STEPS) -> Readout:
    """Rollout of attention x norm ratio of each token's value, weighted by the integrated gradient."""
    return TokenwiseAttention(steps)


@register(
    "bi_head",
    family="attention",
    paper="Chen et al., Beyond Intuition: Rethinking Token Attributions inside Transformers",
    note="head-wise",
    year=2023,
    url="https://openreview.net/forum?id=rm0zIzlhcX",
    aggregation="rollout",
    class_specific=True,
    signed=False,
)
def bi_head(*, steps: Steps = _AUTHORS_STEPS) -> Readout:
    """Rollout with heads weighted by their share of the gradient, times the integrated gradient."""
    return HeadwiseAttention(steps)
