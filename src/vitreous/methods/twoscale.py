"""Maps of two scales: what single patches contribute, and which regions contribute.

No single read-out ranks patches well for every purpose. What a patch contributes itself finds the parts that decide,
and leaves out the rest of the object; attention and the likeness of tokens tell which patches belong together, and blur
what decides. ``twoscale`` adds the two, each standardised over the patches of a picture. The fine scale has three
terms, which differ in what they ask:

- F: how much of the logit comes from a patch? FullGrad+ under the libra rule; its sum is complete at every block.
- O: how much of what tells the class from the others? The same of the probability. Up to a factor, which
  standardising takes away, its gradient is that of the log-odds: evidence that also speaks for other classes is gone.
- H: how much would the probability lose if the patch were hidden? F and O follow evidence from where it is; H follows
  what the other tokens would read in its place, to the first order: without key j the softmax of row i is normalised
  anew, so that the output of a head moves by A_ij (o_i - v_j) / (1 - A_ij).

The region's scale R is made of z(Ā F') and z(S Ā F'): F' is F of the upper half of the blocks, spread over patches that
the model treats as one thing: by Ā, the mean attention of all blocks but the last (GradToken's propagation), and by S,
the likeness of tokens halfway up. It tells object from ground, where the fine scale marks single patches.

A gradient explains the image as it is. Once the best patches are gone, others decide that counted little before. So
``refined`` computes the fine scale again while patches are dropped, the best first (what has to go to destroy the
prediction) and the worst first (what has to stay to keep it), and averages it over these runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import torch
from torch import Tensor

from vitreous.errors import MethodError
from vitreous.methods.gradient import FullGradient
from vitreous.methods.readout import Procedure, TokenReadout, View, total
from vitreous.methods.registry import AtMost, register
from vitreous.methods.spelling import Plus, Propagate, SkipPlus
from vitreous.tape import Needs, Pass

_ODDS, _HIDDEN = Pass("libra", "probability"), Pass("plain", "probability")
_LOWEST, _HIGHEST = -2.0, 3.0  # standard deviations that a term of the fine scale may count for
_OF_ODDS = 0.5  # how much O counts beside F and H
_TEMPERATURE = 0.2  # of the likeness of tokens
_OF_AVERAGE = 2.0  # how much the standardised average over runs counts: the standard deviation of a fine scale
_LEAST = 1e-3  # of the attention that a row keeps without a key


def standardised(scores: Tensor) -> Tensor:
    """Scores (batch, patches) with mean 0 and standard deviation 1; a map of one value is 0 everywhere."""
    centred = scores - scores.mean(dim=1, keepdim=True)
    deviation = centred.pow(2).mean(dim=1, keepdim=True).sqrt()
    # What is left of equal scores is rounding, and no score.
    flat = deviation <= 8 * torch.finfo(scores.dtype).eps * scores.abs().amax(dim=1, keepdim=True)
    return (centred / deviation.masked_fill(flat, 1)).masked_fill(flat, 0)


def bounded(scores: Tensor) -> Tensor:
    """Standardised scores in which no patch counts for more than some standard deviations, standardised again."""
    return standardised(standardised(scores).clamp(min=_LOWEST, max=_HIGHEST))


class Hidden(TokenReadout):
    """H: Σ_h,i A_ij (G_ij - Σ_k A_ik G_ik) / (1 - A_ij), i ≠ j, G = dp/dA: what the output loses if key j is hidden.

    dp/dA_ij = g_i · v_j with g = dp/dO, and Σ_k A_ik G_ik = g_i · o_i, so that this is -g_i times the move of O_i. The
    row of a token itself goes with it.
    """

    activations = ("attention",)
    gradients = ("attention",)
    backward = _HIDDEN

    def read(self, view: View, layer: int) -> Tensor:
        """The sum over heads and rows of one block, (batch, tokens)."""
        attention = view.attention(layer)
        return total(self._lost(view, layer, rows) for rows in attention.pieces())

    def read_pooling(self, view: View) -> Tensor:
        """The same of the attention that pools the tokens, over its queries, (batch, tokens)."""
        queries = view.layout.pooling_queries
        assert queries is not None
        lost = _lost_without(
            view.attention_matrix(view.depth, queries), view.attention_gradient(self.backward, view.depth, queries)
        ).sum(dim=(1, 2))
        return torch.nn.functional.pad(lost, (view.layout.tokens - lost.shape[1], 0))

    def _lost(self, view: View, layer: int, rows: slice) -> Tensor:
        lost = _lost_without(view.attention_matrix(layer, rows), view.attention_gradient(self.backward, layer, rows))
        lost.diagonal(offset=rows.start, dim1=-2, dim2=-1).zero_()
        return lost.sum(dim=(1, 2))


def _lost_without(attention: Tensor, slope: Tensor) -> Tensor:
    mean = (attention * slope).sum(dim=-1, keepdim=True)
    return attention * (slope - mean) / (1 - attention).clamp_(min=_LEAST)


class TwoScale(Procedure):
    """z(c(F) + c(O) / 2 + c(H) + w R), R = z(z(Ā F') + z(S Ā F')).

    F is FullGrad+ under the libra rule, O the same of the probability, H what the probability loses to the first order
    if a patch is hidden from the attention of all blocks; F' is F of the upper half of the blocks, Ā the mean attention
    of all blocks but the last, S the softmax of the cosines, over 0.2, of the centred tokens halfway up. z gives a map
    mean 0 and standard deviation 1 over the patches of a picture; c is z with values below -2 and above 3 cut off. 0
    is the mean patch.

    Args:
        region: w.
    """

    runs_again = False

    def __init__(self, region: float) -> None:
        if not 0 <= region < float("inf"):
            raise MethodError("region must be a number from 0 on")
        self._region = region
        self._every, self._upper, self._spread = Plus(), SkipPlus(), Propagate()
        self._full, self._odds, self._hidden = FullGradient().under("libra"), FullGradient().under("libra"), Hidden()
        self._odds.backward = _ODDS

    def needs(self, layer: int, depth: int) -> Needs:
        """F and O of all blocks, all attention with its gradient, and the tokens halfway up."""
        del layer
        return self.fine_needs(depth) | self._spread.needs(depth) | Needs(tokens=frozenset({depth // 2}))

    def fine_needs(self, depth: int) -> Needs:
        """What F, O and H need."""
        full, odds, hidden = (self._every.needs(each, depth) for each in (self._full, self._odds, self._hidden))
        return full | odds | hidden

    def map(self, view: View) -> Tensor:
        """Both scales together."""
        return standardised(self.fine(view) + self._region * self.regions(view))

    def fine(self, view: View) -> Tensor:
        """c(F) + c(O) / 2 + c(H), (batch, patches)."""
        odds, hidden = (self._every.combine(each, view) for each in (self._odds, self._hidden))
        if view.layout.pooled_by_attention:
            hidden = hidden + self._hidden.read_pooling(view)
        prefix = view.layout.prefix
        return bounded(self.own(view)) + _OF_ODDS * bounded(odds[:, prefix:]) + bounded(hidden[:, prefix:])

    def own(self, view: View) -> Tensor:
        """F: what every patch contributes, (batch, patches)."""
        return self._every.combine(self._full, view)[:, view.layout.prefix :]

    def regions(self, view: View) -> Tensor:
        """R = z(z(Ā F') + z(S Ā F')), (batch, patches)."""
        upper = self._upper.combine(self._full, view)[:, view.layout.prefix :]
        spread = self._spread.apply(view, upper)
        tokens = view.tokens(view.depth // 2)[:, view.layout.prefix :]
        tokens = torch.nn.functional.normalize(tokens - tokens.mean(dim=1, keepdim=True), dim=-1)
        alike = (tokens @ tokens.mT / _TEMPERATURE).softmax(dim=-1)
        regions = (alike @ spread[..., None].to(alike.dtype))[..., 0]
        return standardised(standardised(spread) + standardised(regions))


class Refined(TwoScale):
    """z(2 z(M) + w R), M the fine scale averaged over runs with fewer and fewer patches.

    Two series of runs begin with the whole image. In one the best part of the patches is dropped again and again, in
    the other the worst, each time by the fine scale of the run before. The mean of the standardised fine scale of a
    patch is taken over the runs of a series in which it is there, and M is the sum of both series.

    Args:
        region: w.
        budget: how many passes it may cost in all; a series drops as many equal parts of the patches.
    """

    runs_again = True

    def __init__(self, region: float, budget: int) -> None:
        super().__init__(region)
        if budget < 2:
            raise MethodError("budget must be at least 2: one pass of the image, and one without some patches")
        self._budget = budget
        self.evaluations = 2 * (budget - 1)

    def needs(self, layer: int, depth: int) -> Needs:
        """Also gradients of runs of the image without some patches."""
        return super().needs(layer, depth) | Needs(gradients_again=True, picture=True)

    def map(self, view: View) -> Tensor:
        """Both scales together, the fine one averaged."""
        fine = self.fine(view)
        average = total(averaged(self.series(view, fine, best_first=best_first)) for best_first in (True, False))
        return standardised(_OF_AVERAGE * standardised(average) + self._region * self.regions(view))

    def series(self, view: View, fine: Tensor, *, best_first: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs in which equal parts of the patches are dropped, one part more in each.

        Args:
            view: the run of the whole images.
            fine: their fine scale.
            best_first: whether the best or the worst patches are dropped first.

        Yields:
            The patches that are left, (batch, k), ascending in every row, and their fine scale, the same shape; the
            whole images first.
        """
        batch, patches = fine.shape
        steps = min(self._budget, patches)
        kept, scores = torch.arange(patches, device=fine.device).expand(batch, -1), fine
        yield kept, scores
        for step in range(1, steps):
            ranked = kept.gather(1, scores.argsort(dim=1, descending=best_first, stable=True))
            dropped = step * patches // steps - (step - 1) * patches // steps
            kept = ranked[:, dropped:].sort(dim=1).values
            scores = self.fine_of_kept(view, kept)
            yield kept, scores

    def fine_of_kept(self, view: View, kept: Tensor) -> Tensor:
        """The fine scale of a run without all patches but ``kept``, (batch, k), ascending in every row."""
        needs = self.fine_needs(view.depth)
        with view.runner.record_kept(view.runner.images, kept, needs) as tape:
            found = {backward: tape.backward(backward, view.target, part) for backward, part in needs.gradients.items()}
            return self.fine(View(tape, found, view.target, view.runner))


def averaged(series: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The mean of the standardised fine scale over the runs of a series in which a patch is there, (batch, patches)."""
    runs = iter(series)
    _, fine = next(runs)
    summed, count = standardised(fine), torch.ones_like(fine)
    for kept, scores in runs:
        summed = summed.scatter_add(1, kept, standardised(scores))
        count = count.scatter_add(1, kept, torch.ones_like(scores))
    return summed / count


RegionWeight = Annotated[float, "how much it counts whether a patch lies in a region that contributes; localisation"]
_PAPER = "Mehri et al., LibraGrad: Balancing Gradient Flow for Universally Better Vision Transformer Attributions"
_NOTE = "its FullGrad+, of logit and probability, with hidden patches and regions added by this project"


@register(
    "twoscale",
    family="gradient",
    paper=_PAPER,
    note=_NOTE,
    year=2025,
    arxiv="2411.16760",
    propagates=True,
    class_specific=True,
    signed=False,
)
def twoscale(*, region: RegionWeight = 2.0) -> TwoScale:
    """What patches contribute, what hiding them would lose, and whether they lie in a region that contributes."""
    return TwoScale(region)


@register(
    "refined",
    family="perturbation",
    paper=_PAPER,
    note=_NOTE,
    year=2025,
    arxiv="2411.16760",
    propagates=True,
    class_specific=True,
    signed=False,
)
def refined(
    *,
    budget: Annotated[
        int,
        "how many passes of the whole image it may cost; patches are dropped in as many parts, the best and the "
        "worst first",
        AtMost(1000),
    ] = 8,
    region: RegionWeight = 2.0,
) -> Refined:
    """The same, averaged over runs in which the best, or the worst, patches are dropped."""
    return Refined(region, budget)
