"""All rules, by name."""

from __future__ import annotations

from collections.abc import Mapping

from vitreous.tape.rules.abslrp import AbsoluteLrpRule, ProgramAbsoluteLrpRule
from vitreous.tape.rules.gradient_rules import AttnLrpRule, ConservativeRule, FrozenRule, LibraRule, ResidualRule, Rule
from vitreous.tape.rules.lrp import LrpRule, OriginalLrpRule

RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        *(Rule(), FrozenRule(), LibraRule(), AttnLrpRule(), ConservativeRule(), ResidualRule()),
        *(LrpRule(), OriginalLrpRule(), AbsoluteLrpRule(), ProgramAbsoluteLrpRule()),
    )
}
