"""Rules for the backward pass, and how to write your own: see docs/own-rule.md.

    from vitreous.rules import Rule, register

    @register
    class Detached(Rule):
        name = "detached"
        softmax = "constant"

Use it as ``ixg:rule=detached``.
"""

from vitreous.tape.attention import AttentionRecord, plain_gradients, value_gradient
from vitreous.tape.rules import (
    RULES,
    AttnLrpRule,
    ConservativeRule,
    FrozenRule,
    LibraRule,
    LrpRule,
    RelevanceRule,
    ResidualRule,
    Rule,
    register,
)
from vitreous.tape.rules.calls import ElementwiseCall, NormCall

__all__ = [
    "RULES",
    "AttentionRecord",
    "AttnLrpRule",
    "ConservativeRule",
    "ElementwiseCall",
    "FrozenRule",
    "LibraRule",
    "LrpRule",
    "NormCall",
    "RelevanceRule",
    "ResidualRule",
    "Rule",
    "plain_gradients",
    "register",
    "value_gradient",
]
