"""The evaluations of Wu et al., Token Transformation Matters (CVPR 2024)."""

from __future__ import annotations

from vitreous.evaluation.protocols.protocol import Protocol, Sweep
from vitreous.evaluation.tasks.pixel_perturbation import ErasingAccuracy, ErasingProbability
from vitreous.evaluation.tasks.segmentation import Segmentation

PAPER = "Wu et al., Token Transformation Matters, CVPR 2024"

PROBABILITY = Protocol(
    name="tokentm-probability",
    title="AOPC and LOdds: the fall of the predicted class's probability while the most relevant pixels are erased",
    paper=PAPER,
    version=1,
    tasks=(ErasingProbability(),),
    notes=(
        "Steps, filling and order of pixels are those of chefer-2021-perturbation.",
        "AOPC averages p0 - pk; AttCAT's program averages its absolute value.",
        "LOdds is log(pk / p0); SkipPLUS' program logs the inverse, the opposite sign.",
    ),
)

ABLATION = Protocol(
    name="tokentm-ablation",
    title="TokenTM without its parts, and over a part of the blocks, in segmentation and perturbation",
    paper=PAPER,
    version=1,
    tasks=(Segmentation(), ErasingAccuracy(), ErasingProbability()),
    methods=(
        "tokentm:components=baseline",
        "tokentm:components=af",
        "tokentm:components=af_l",
        "tokentm",
        "tokentm:necc=rescaled",
    ),
    sweeps=(Sweep("tokentm.rollout:depth={number}", "quarters"),),
    notes=(
        "The paper's rows are baseline, + AF, + AF + L, + AF + L + NECC, and aggregation over the first blocks only.",
        "The first quarter, half, three quarters and all of the blocks are 3, 6, 9 and 12 of twelve.",
        "necc=rescaled multiplies NECC by the number of tokens, to show what its order of 1/n costs.",
        "A photo without a mask has no numbers of segmentation, one without a label no accuracy.",
    ),
)

PROTOCOLS = (PROBABILITY, ABLATION)
