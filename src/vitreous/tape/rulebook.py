"""All rules, by name."""

from __future__ import annotations

from collections.abc import Mapping

from vitreous.tape.absolute_relevance import AbsoluteLrpRule, ProgramAbsoluteLrpRule
from vitreous.tape.relevance import LrpRule, OriginalLrpRule
from vitreous.tape.rules import AttnLrpRule, ConservativeRule, FrozenRule, LibraRule, ResidualRule, Rule

RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        *(Rule(), FrozenRule(), LibraRule(), AttnLrpRule(), ConservativeRule(), ResidualRule()),
        *(LrpRule(), OriginalLrpRule(), AbsoluteLrpRule(), ProgramAbsoluteLrpRule()),
    )
}
