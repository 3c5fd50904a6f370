"""Running a model in bfloat16, for methods whose maps survive that."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vitreous.errors import InputError, RefusedMethodsError
from vitreous.reason import shown
from vitreous.spelling import Recipe

PRECISIONS = ("model", "bf16")

# Maps in bfloat16 must rank the patches of every photo as those in float32 do, up to this correlation of ranks.
TOLERANCE = 0.99
# The methods that did in docs/speed/precision.json, which benchmarks/precision_and_compile.py measured on a trained
# ViT-Ti/16; a test holds this list against that file.
KEEP_THEIR_ORDER = frozenset(
    {
        *("raw_attention", "rollout", "gae", "gradsam", "agcam", "tokentm"),
        *("gradient", "ixg", "cat", "attixg", "attcat", "fullgrad", "fullgrad_plus"),
        *("gradcam_elementwise", "eigencam"),
        *("conservative_lrp", "attnlrp", "attin", "attin_residual", "globenc", "decompx"),
        *("gae.propagate", "attcat.skipplus", "ixg.plus", "ixg.skipplus", "fullgrad_plus.skipplus", "alti.skipplus"),
        *("decompx.plus", "decompx.skipplus", "decompx.propagate", "decompx.skipplus.propagate"),
    }
)


def running_in(precision: str, device: torch.device, recipes: Sequence[Recipe]) -> AbstractContextManager[Any]:
    """The context in which the model runs: as it is, or with its matrix products in bfloat16.

    Raises:
        RefusedMethodsError: maps of methods in bfloat16 are not within the tolerance, or were not measured.
    """
    if not isinstance(precision, str) or precision not in PRECISIONS:
        given = precision if isinstance(precision, str) else shown(precision)
        raise InputError(f"precision={given} is not one of {', '.join(PRECISIONS)}")
    if precision == "model":
        return nullcontext()
    refused = [recipe.spelling for recipe in recipes if not _keeps_its_order(recipe)]
    if refused:
        reason = (
            f"was not found to rank patches in bf16 as in float32 (rank correlation {TOLERANCE} or more on every photo)"
        )
        raise RefusedMethodsError(
            f"{refused[0]} {reason}: leave out precision. Methods that do: {', '.join(sorted(KEEP_THEIR_ORDER))}",
            dict.fromkeys(refused, f"it {reason}"),
        )
    return torch.autocast(device.type, dtype=torch.bfloat16)


def _keeps_its_order(recipe: Recipe) -> bool:
    """Whether this very spelling was measured; another rule, option or aggregation is another map."""
    return recipe.spelling in KEEP_THEIR_ORDER
