"""The evaluations of Chefer et al., Transformer Interpretability Beyond Attention Visualization (CVPR 2021)."""

from __future__ import annotations

from vitreous.evaluation.protocols.protocol import Protocol
from vitreous.evaluation.tasks.pixel_perturbation import ErasingAccuracy
from vitreous.evaluation.tasks.segmentation import Segmentation

PAPER = "Chefer et al., Transformer Interpretability Beyond Attention Visualization, CVPR 2021"

SEGMENTATION = Protocol(
    name="chefer-2021-segmentation",
    title="Foreground segmentation by the map of the predicted class, thresholded at its mean",
    paper=PAPER,
    version=1,
    tasks=(Segmentation(),),
)

PERTURBATION = Protocol(
    name="chefer-2021-perturbation",
    title="Accuracy while pixels are erased, most or least relevant first, for the predicted and the true class",
    paper=PAPER,
    version=1,
    tasks=(ErasingAccuracy(),),
    notes=(
        "The program prints accuracies and leaves the area to the reader, so both conventions are given.",
        "The trapezoid goes over the ratio from 0 to 0.9 with the unperturbed photo, so 90 is the most.",
    ),
)

PROTOCOLS = (SEGMENTATION, PERTURBATION)
