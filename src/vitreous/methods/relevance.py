"""Methods that propagate relevance: Transformer Attribution, LRP, partial LRP, LRP rollout, absLRP, AttnLRP's gamma."""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from vitreous.errors import MethodError
from vitreous.methods.readout import (
    MatrixReadout,
    Procedure,
    Readout,
    ReadRows,
    Resolution,
    ResolutionOption,
    View,
    input_scores,
    mean_over_heads,
)
from vitreous.methods.registry import register
from vitreous.tape import PIXELS, GradientNeeds, Needs, Pass
from vitreous.tape.attention import Rows
from vitreous.tape.rules import add_gamma_rule

Rules = Annotated[Literal["orig", "ours"], "the relevance rules: the baselines' or Transformer Attribution's own"]


class AttentionRelevance(MatrixReadout):
    """mean_h (R_A)^+, or mean_h (dy_c/dA * R_A)^+ (Chefer et al. CVPR 2021, eq. 13) if weighted by the gradient."""

    activations = ("attention",)

    def __init__(self, rules: Literal["orig", "ours"], *, weighed: bool) -> None:
        self.relevance = Pass(f"lrp_{rules}", "logit")
        self.weighed = weighed

    def needs(self, layer: int, depth: int) -> Needs:
        """Attention, the relevance at its output, and if weighted the gradient there."""
        here = GradientNeeds(attention=frozenset({layer}))
        passes = {self.backward: here, self.relevance: here} if self.weighed else {self.relevance: here}
        return super().needs(layer, depth) | Needs(gradients=passes)

    def reader(self, view: View, layer: int) -> ReadRows:
        """The mean over heads of the positive part."""

        def read(rows: Rows) -> Tensor:
            relevance = view.attention_relevance(self.relevance, layer, rows)
            if self.weighed:
                relevance.mul_(view.attention_gradient(self.backward, layer, rows))
            return mean_over_heads(relevance.clamp_(min=0))

        return read


class PixelRelevance(Procedure):
    """The relevance that arrives at the input, summed over channels; linear layers after Bach et al. eq. 60, α = 1.

    The input is the image or a text's embedded tokens. ``ours`` is that rule without biases. ``orig`` normalises the
    contributions of positive and of negative inputs separately, which is the same if no input is negative.
    """

    runs_again = False

    def __init__(self, passes: tuple[Pass, ...], resolution: Resolution) -> None:
        self.passes = passes
        self.resolution = resolution

    def needs(self, layer: int, depth: int) -> Needs:
        """The relevance of the image."""
        del layer, depth
        return Needs(gradients=dict.fromkeys(self.passes, GradientNeeds(tokens=frozenset({PIXELS}))))

    def map(self, view: View) -> Tensor:
        """Scores of patches or pixels."""
        return input_scores(self.channels(view), view.layout, self.resolution)

    def channels(self, view: View) -> Tensor:
        """The relevance of every value of the image, (batch, channel, height, width), or of a text's tokens."""
        return view.token_gradient(self.passes[0], PIXELS)


class GammaRelevance(Procedure):
    """The input times its gradient under AttnLRP with the gamma rule, which is its relevance.

    The input is the image or a text's first tokens.
    """

    runs_again = False

    def __init__(self, rule: str, resolution: Resolution) -> None:
        self.backward, self.resolution = Pass(rule, "logit"), resolution

    def needs(self, layer: int, depth: int) -> Needs:
        """The gradient at the input, and a text's tokens."""
        del layer, depth
        slopes = GradientNeeds(tokens=frozenset({PIXELS, 0}))
        return Needs(tokens=frozenset({0}), gradients={self.backward: slopes})

    def map(self, view: View) -> Tensor:
        """Scores of patches or pixels."""
        if view.tape.reads_text:
            relevance = view.tokens(0) * view.token_gradient(self.backward, 0)
        else:
            relevance = view.runner.images * view.token_gradient(self.backward, PIXELS)
        return input_scores(relevance, view.layout, self.resolution)


class ContrastiveRelevance(PixelRelevance):
    """The relevance of the class minus that of the others, propagated separately and normalised to 1 in every module.

    So the map depends on how a library splits a model into modules: q, k and v in one layer or in three, dropouts.
    """

    def channels(self, view: View) -> Tensor:
        """The difference."""
        target, others = (view.token_gradient(backward, PIXELS) for backward in self.passes)
        return target - others


@register(
    "transattr",
    family="relevance",
    paper="Chefer et al., Transformer Interpretability Beyond Attention Visualization",
    year=2021,
    arxiv="2012.09838",
    aggregation="rollout",
    class_specific=True,
    signed=False,
)
def transattr() -> Readout:
    """Rollout of attention's relevance x its positive gradient (Transformer Attribution)."""
    return AttentionRelevance("ours", weighed=True)


@register(
    "lrp_rollout",
    family="relevance",
    paper="Chefer et al., Transformer Interpretability Beyond Attention Visualization",
    note="from the authors' code: relevance instead of attention in a rollout",
    year=2021,
    arxiv="2012.09838",
    aggregation="rollout",
    class_specific=True,
    signed=False,
)
def lrp_rollout(*, rules: Rules = "ours") -> Readout:
    """Rollout of attention's positive relevance."""
    return AttentionRelevance(rules, weighed=False)


@register(
    "plrp",
    family="relevance",
    paper="Voita et al., Analyzing Multi-Head Self-Attention: Specialized Heads Do the Heavy Lifting, the Rest Can "
    "Be Pruned",
    note="partial LRP, as in Chefer et al. 2021",
    year=2019,
    arxiv="1905.09418",
    layer=-1,
    class_specific=True,
    signed=False,
)
def plrp(
    *,
    rules: Rules = "orig",
    weighed: Annotated[Literal["none", "gradient"], "weight relevance by the gradient, an ablation"] = "none",
) -> Readout:
    """Positive relevance of the last block's attention, averaged over heads."""
    return AttentionRelevance(rules, weighed=weighed == "gradient")


@register(
    "lrp",
    family="relevance",
    paper="Bach et al., On Pixel-Wise Explanations for Non-Linear Classifier Decisions by Layer-Wise Relevance "
    "Propagation",
    note="as in Chefer et al. 2021",
    year=2015,
    doi="10.1371/journal.pone.0130140",
    class_specific=True,
    signed=True,
)
def lrp(*, rules: Rules = "orig", resolution: ResolutionOption = "patch") -> Readout:
    """Relevance propagated through every layer to the pixels."""
    return PixelRelevance((Pass(f"lrp_{rules}", "logit"),), resolution)


@register(
    "abslrp",
    family="relevance",
    paper="Vukadin et al., Advancing Attribution-Based Neural Network Explainability through Relative Absolute "
    "Magnitude Layer-Wise Relevance Propagation and Multi-Component Evaluation",
    year=2024,
    arxiv="2412.09311",
    class_specific=True,
    signed=True,
)
def abslrp(
    *,
    shortcut: Annotated[
        Literal["program", "share"], "a residual shortcut's relevance: with the gradient through the branch, or without"
    ] = "program",
    resolution: ResolutionOption = "patch",
) -> Readout:
    """Relevance by absolute magnitude, of the class minus that of all others."""
    rule = "abslrp" if shortcut == "program" else "abslrp_share"
    return ContrastiveRelevance((Pass(rule, "logit"), Pass(rule, "others")), resolution)


@register(
    "attnlrp_gamma",
    family="relevance",
    paper="Achtibat et al., AttnLRP: Attention-Aware Layer-Wise Relevance Propagation for Transformers",
    note="with the gamma rule, the authors' setting for images; gammas from the grid of their program",
    year=2024,
    arxiv="2402.05602",
    class_specific=True,
    signed=True,
)
def attnlrp_gamma(
    *,
    linear: Annotated[float, "gamma of linear layers; 0 is the ordinary gradient"] = 0.05,
    convolution: Annotated[float, "gamma of the patch embedding"] = 0.25,
    softmax: Annotated[
        Literal["attnlrp", "constant"],
        "as AttnLRP, or the attention matrix held constant as their program does for images",
    ] = "attnlrp",
    resolution: ResolutionOption = "patch",
) -> Readout:
    """AttnLRP with the gamma rule in linear layers and patch embedding, down to the pixels."""
    if linear < 0 or convolution < 0:
        raise MethodError("linear and convolution must be numbers from 0 up")
    return GammaRelevance(add_gamma_rule(linear, convolution, softmax), resolution)
