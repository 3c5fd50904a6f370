"""The evaluations of Cheng et al., GradToken (Neural Networks 2025)."""

from __future__ import annotations

from vitreous.evaluation.protocols.protocol import Protocol, Sweep
from vitreous.evaluation.tasks.pixel_perturbation import ErasingAccuracy
from vitreous.evaluation.tasks.segmentation import Segmentation
from vitreous.evaluation.tasks.thresholds import ClassSegmentation, ThresholdSearch

PAPER = "Cheng et al., GradToken, Neural Networks 2025"
_HALVES = "Halves go by the hash of a photo's name; where a few photos are all in one, there is no held-out number."
_PROPAGATIONS = ("rollout_elementwise", "rollout_matrix", "average_elementwise", "average_matrix")

SEGMENTATION = Protocol(
    name="gradtoken-segmentation",
    title="Foreground segmentation at the best of ten thresholds, and at one that was chosen on other photos",
    paper=PAPER,
    version=1,
    tasks=(ThresholdSearch(),),
    notes=(
        "The paper searches the threshold on the same photos that it reports; the held-out one is what others get.",
        "One threshold serves all metrics of a method: the one with the highest mIoU.",
        _HALVES,
    ),
)

VOC = Protocol(
    name="gradtoken-voc",
    title="Segmentation of several classes: every pixel gets the class whose map is highest there",
    paper=PAPER,
    version=1,
    tasks=(ClassSegmentation(),),
    notes=(
        "The classes that are explained are those of the photo's mask, so the model is not asked to find them.",
        "Maps are scaled one by one before they are compared, for scores of classes have no common scale.",
        "A model with 20 outputs has the classes of VOC in their order; one with 21 has background as output 0.",
        _HALVES,
    ),
)

ABLATION = Protocol(
    name="gradtoken-ablation",
    title="GradToken's ways to propagate, to integrate heads, and how deep it propagates",
    paper=PAPER,
    version=1,
    tasks=(Segmentation(), ThresholdSearch(), ErasingAccuracy()),
    methods=(
        *(
            f"gradtoken:propagation={propagation},heads={heads}"
            for propagation in ("none", *_PROPAGATIONS)
            for heads in ("average", "relu_average")
        ),
    ),
    sweeps=(Sweep("gradtoken:depth={number}", "blocks"),),
    notes=(
        "The rows are the paper's variants 0 to 4, each with i (heads averaged) and ii (ReLU, then averaged).",
        "gradtoken:depth=n propagates through the n blocks below the last one (Fig. 11).",
        "A photo without a mask has no numbers of segmentation, one without a label no accuracy.",
        _HALVES,
    ),
)

PROTOCOLS = (SEGMENTATION, VOC, ABLATION)
