"""Running a model in bfloat16, for methods whose maps keep their order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vitreous.errors import InputError, RefusedMethodsError
from vitreous.methods import list_methods
from vitreous.reason import shown
from vitreous.spelling import Recipe

PRECISIONS = ("model", "bf16")

# Maps in bfloat16 must rank the patches of every photo as those in float32 do, up to this rank correlation. Which
# spellings do is declared where a method is registered (``bf16=``) and was measured on a trained ViT-Ti/16:
# docs/speed/precision.json, written by benchmarks/precision_and_compile.py.
TOLERANCE = 0.99


def bf16_spellings() -> frozenset[str]:
    """Give the spellings whose maps keep their order in bfloat16; another option or aggregation is another map."""
    return frozenset(spelling for info in list_methods() for spelling in info.bf16)


def running_in(precision: str, device: torch.device, recipes: Sequence[Recipe]) -> AbstractContextManager[Any]:
    """Give the context in which the model runs: as it is, or with its matrix products in bfloat16.

    Raises:
        RefusedMethodsError: Maps of methods in bfloat16 are not within the tolerance, or were not measured.
    """
    if not isinstance(precision, str) or precision not in PRECISIONS:
        given = precision if isinstance(precision, str) else shown(precision)
        raise InputError(f"precision={given} is not one of {', '.join(PRECISIONS)}")
    if precision == "model":
        return nullcontext()
    fit = bf16_spellings()
    refused = [recipe.spelling for recipe in recipes if recipe.spelling not in fit]
    if refused:
        reason = (
            f"was not found to rank patches in bf16 as in float32 (rank correlation {TOLERANCE} or more on every photo)"
        )
        raise RefusedMethodsError(
            f"{refused[0]} {reason}: leave out precision. Methods that do: {', '.join(sorted(fit))}",
            dict.fromkeys(refused, f"it {reason}"),
        )
    return torch.autocast(device.type, dtype=torch.bfloat16)
