"""The evaluations of the SkipPLUS paper (CVPR Workshops 2024)."""

from __future__ import annotations

from vitreous.evaluation.protocols.protocol import Protocol
from vitreous.evaluation.tasks.segmentation import AveragePrecision
from vitreous.evaluation.tasks.token_masking import InsertionDeletion

PAPER = "SkipPLUS: Skip the First Few Layers to Better Explain Vision Transformers, CVPR Workshops 2024"
_BINARY = "One logit z (MURA) counts as two classes, -z and z with their sigmoids, so the target is the label."

FAITHFULNESS = Protocol(
    name="skipplus-faithfulness",
    title="Insertion and deletion of patches with True Token Masking, for the true class",
    paper=PAPER,
    version=1,
    tasks=(InsertionDeletion(),),
    resize="model",
    notes=(
        "The trapezoid goes over ratios from 0 to 0.9 or from 0.1 to 1, so 90 is the most before 100 - x is taken.",
        _BINARY,
    ),
)

LAYERS = Protocol(
    name="skipplus-layers",
    title="The same for every layer that PLUS may start at (Fig. 7)",
    paper=PAPER,
    version=1,
    tasks=(InsertionDeletion(),),
    resize="model",
    start_layers=True,
    notes=(
        "Every method is asked as .plus with start=0 to the last layer, whatever combined its layers before.",
        _BINARY,
    ),
)

SEGMENTATION = Protocol(
    name="skipplus-segmentation",
    title="Average precision of the map of the class with the largest area, averaged over photos",
    paper=PAPER,
    version=1,
    tasks=(AveragePrecision(),),
    resize="model",
    notes=(
        "The foreground is all objects of the explained class.",
        "Where a mask does not name classes, the photo's label is explained and all objects are foreground.",
        "The mask is resized and cropped as the photo is; what a crop adds outside of it does not count.",
    ),
)

PROTOCOLS = (FAITHFULNESS, LAYERS, SEGMENTATION)
