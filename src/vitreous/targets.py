"""What is explained: a class, a contrast of two, a similarity, pixels of a dense output, or any function.

Every target maps the output of a model to one number per image; see docs/targets.md.

Examples:
    >>> import vitreous
    >>> from vitreous.targets import Contrast
    >>> explanation = vitreous.explain(model, "demo.jpg", ["gae", "decompx"], target=Contrast(3, 1))
    >>> explanation.label()
    'class 3 rather than class 1'
"""

from vitreous.inputs.dense_targets import Box, Pixels, Query, Token
from vitreous.inputs.target import OriginalRun, Target, TargetContext, register_stored
from vitreous.inputs.target_objects import Class, Contrast, Logit, Output, Probability, Similarity
from vitreous.models.prompt_target import Prompt

__all__ = [
    "Box",
    "Class",
    "Contrast",
    "Logit",
    "OriginalRun",
    "Output",
    "Pixels",
    "Probability",
    "Prompt",
    "Query",
    "Similarity",
    "Target",
    "TargetContext",
    "Token",
    "register_stored",
]
