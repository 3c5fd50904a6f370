"""Defaults, choices and help texts that several packages share; no heavy imports."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from vitreous.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Iterable


RECIPE = "twoscale"  # the map that is shown where no purpose is known
# What may stand beside it: the methods that come near it, with one forward pass and five backward passes for all.
# The first of them takes its place on models that do not allow it.
RUNNERS_UP = ("decompx.skipplus", "tokentm", "gae", "fullgrad_plus:rule=libra")
# What ``explain`` tries where no methods are named; of these it keeps two, see ``RUNNER_UP_HELP``.
DEFAULT_METHODS = (RECIPE, *RUNNERS_UP, "gradtoken")
RUNNER_UP_HELP = f"{RECIPE}, and the one of {', '.join(RUNNERS_UP)} that agrees least with it"
PAPERS = ("tokentm", "gradtoken", "decompx.skipplus")  # the methods that this project started from
# What methods="auto" and ``recommend`` choose from: the methods of these papers, the ones that lead a column of the
# results, and their sum. They share one forward pass and five backward passes.
CANDIDATES = (
    *PAPERS,
    "gae",
    "fullgrad_plus:rule=libra",
    "decompx.skipplus.propagate",
    RECIPE,
)
AUTO = "auto"
DEFAULT_OPACITY = 0.85  # of a heatmap over its image
SHARD_SIZE = 16  # images that are computed and stored together

OutputActivation = Literal["logits", "probabilities", "sigmoid", "value"]  # what the outputs of a model are
OUTPUTS_HELP = "What the model outputs: logits (softmax), probabilities, sigmoid (multi-label logits) or a value."
OUTPUTS_DEFAULT = "from the model's configuration"

PLUGIN_ENTRY_POINTS = "vitreous.methods"  # group of entry points of installed packages that register methods
PLUGIN_HELP = "A Python file that registers your own methods; see the docs."


def split_spellings(values: Iterable[str]) -> list[str]:
    """Split comma-separated method spellings; duplicates are dropped and the order is kept.

    Commas also separate the options of one method. A part of the form ``key=value`` belongs to the spelling before it:
    ``gradtoken:propagation=none,heads=average,tokentm`` is two methods.

    Raises:
        MethodError: A value names no method, or starts with an option.
    """
    return list(dict.fromkeys(spelling for value in values for spelling in _split(value)))


def _split(value: str) -> list[str]:
    spellings: list[str] = []
    for part in filter(None, (part.strip() for part in value.split(","))):
        if not re.fullmatch(r"\w+\s*=[^:]*", part):
            spellings.append(part)
        elif spellings:
            spellings[-1] += f",{part}"
        else:
            raise MethodError(f"{part!r} is a method option without a method before it; write METHOD:{part}")
    if not spellings:
        raise MethodError("the method name is empty; `vitreous methods` lists all methods")
    return spellings
