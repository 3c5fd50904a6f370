"""The evaluations of Chefer et al., Transformer Interpretability Beyond Attention Visualization (CVPR 2021)."""

from __future__ import annotations

from vitreous.benchmark.tasks.segmentation import Segmentation
from vitreous.protocols.protocol import Protocol

PAPER = "Chefer et al., Transformer Interpretability Beyond Attention Visualization, CVPR 2021"

SEGMENTATION = Protocol(
    name="chefer-2021-segmentation",
    title="Foreground segmentation by the map of the predicted class, thresholded at its mean",
    paper=PAPER,
    version=1,
    tasks=(Segmentation(),),
)

PROTOCOLS = (SEGMENTATION,)
