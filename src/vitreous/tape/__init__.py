"""Tape: one forward pass of a model, recorded, with backward passes under a rule."""

from vitreous.tape.attention import AttentionRecord
from vitreous.tape.intervention import Intervention
from vitreous.tape.layout import Layout
from vitreous.tape.plan import PIXELS, GradientNeeds, Needs, Pass, Plan, unite
from vitreous.tape.tape import Gradients, Tape, record

__all__ = [
    "PIXELS",
    "AttentionRecord",
    "GradientNeeds",
    "Gradients",
    "Intervention",
    "Layout",
    "Needs",
    "Pass",
    "Plan",
    "Tape",
    "record",
    "unite",
]
