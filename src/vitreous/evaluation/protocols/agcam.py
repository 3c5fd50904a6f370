"""The evaluation of AGCAM (Leem and Seo, AAAI 2024)."""

from __future__ import annotations

from vitreous.evaluation.protocols.protocol import Protocol
from vitreous.evaluation.tasks.pixel_perturbation import AreaBetweenCurves

PERTURBATION = Protocol(
    name="agcam-perturbation",
    title="Area between the probabilities with the least and with the most relevant pixels erased first (ABPC)",
    paper="Leem and Seo, Attention Guided CAM, AAAI 2024",
    version=1,
    tasks=(AreaBetweenCurves(),),
    notes=("Erased pixels are 0 after normalisation, and all eleven points from 0% to 100% count equally.",),
)

PROTOCOLS = (PERTURBATION,)
