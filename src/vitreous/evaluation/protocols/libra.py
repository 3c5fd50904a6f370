"""The evaluation of LibraGrad (CVPR 2025)."""

from __future__ import annotations

from vitreous.evaluation.protocols.protocol import Protocol
from vitreous.evaluation.tasks.token_masking import InfluenceDeletion

MIF = Protocol(
    name="libra-mif",
    title="How often the model keeps its answer while the most or the least influential patches are dropped",
    paper="LibraGrad: Balancing Gradient Flow for Universally Better Vision Transformer Attributions, CVPR 2025",
    version=1,
    tasks=(InfluenceDeletion(),),
    resize="model",
    notes=(
        "Accuracy is against the class that the model predicts of the whole photo, so no label is needed.",
        "MIF and LIF are areas under that accuracy; for MIF lower is better, for LIF higher.",
    ),
)

PROTOCOLS = (MIF,)
