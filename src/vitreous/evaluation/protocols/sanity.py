"""What the field expects of a map and the papers here do not measure."""

from __future__ import annotations

from vitreous.evaluation.protocols.protocol import Protocol
from vitreous.evaluation.tasks.localisation import Localisation
from vitreous.evaluation.tasks.sanity import Concentration, Faithfulness, Randomisation, Sensitivity

SANITY = Protocol(
    name="sanity",
    title="Model randomisation, max-sensitivity, sparseness, complexity and faithfulness correlation",
    paper="Adebayo et al. 2018; Yeh et al. 2019; Chalasani et al. 2020; Bhatt et al. 2020",
    version=1,
    tasks=(Randomisation(), Sensitivity(), Concentration(), Faithfulness()),
    resize="model",
    notes=(
        "Weights are randomised on a copy of the model, which itself is never changed.",
        "A stage of the cascade is named by what is random: the head, the upper blocks, all blocks, everything.",
        "A method whose map hardly changes (rank correlation near 1) does not show what the model has learned.",
    ),
)

LOCALISATION = Protocol(
    name="localisation",
    title="Pointing game, energy in the mask and rank accuracy of the map of the predicted class",
    paper="Zhang et al. 2016; Wang et al. 2020; Arras et al. 2022",
    version=1,
    tasks=(Localisation(),),
)

PROTOCOLS = (SANITY, LOCALISATION)
