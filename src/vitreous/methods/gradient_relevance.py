"""Relevance as input x gradient under a rule: conservative LRP [ali2022xai][] and AttnLRP [achtibat2024attnlrp][]."""

from __future__ import annotations

from vitreous.methods.gradient import InputGradient
from vitreous.methods.readout import Readout
from vitreous.methods.registry import register


@register(
    "conservative_lrp",
    family="relevance",
    paper="Ali et al., XAI for Transformers: Better Explanations through Conservative Propagation",
    year=2022,
    arxiv="2202.07304",
    bf16=("conservative_lrp",),
    class_specific=True,
    signed=True,
)
def conservative_lrp() -> Readout:
    """Token x gradient with attention (eq. 8) and the norms' variance (eq. 9) held constant."""
    return InputGradient().under("conservative")


@register(
    "attnlrp",
    family="relevance",
    paper="Achtibat et al., AttnLRP: Attention-Aware Layer-Wise Relevance Propagation for Transformers",
    year=2024,
    arxiv="2402.05602",
    bf16=("attnlrp",),
    class_specific=True,
    signed=True,
)
def attnlrp() -> Readout:
    """Token x gradient with variance (prop. 3.4) and gates (eq. 9) constant and products' gradients halved (eq. 7)."""
    return InputGradient().under("attnlrp")
