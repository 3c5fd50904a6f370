"""Tape: one forward pass of a model, recorded, with backward passes under a rule."""

from vitreous.tape.attention.record import AttentionRecord
from vitreous.tape.patches.layout import Layout
from vitreous.tape.recording.plan import PIXELS, GradientNeeds, Intervention, Needs, Pass, Plan, unite
from vitreous.tape.runner import record
from vitreous.tape.tape import Gradients, Tape

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
