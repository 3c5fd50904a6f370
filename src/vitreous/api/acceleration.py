"""Faster runs: bfloat16, for methods whose maps keep their order, and compiled models for perturbation methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from vitreous._utils.text import shown
from vitreous.errors import InputError, RefusedMethodsError, UnsupportedModelError
from vitreous.methods import list_methods
from vitreous.methods.spelling import Recipe

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


def compiled(model: nn.Module) -> Callable[..., Any]:
    """The model by ``torch.compile``; it is compiled when it is first asked, and not again for the same model."""
    fast = torch.compile(model)

    def run(*arguments: Any, **options: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415 - takes seconds to import

        try:
            return fast(*arguments, **options)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split("\n")[:2]).strip() or type(error).__name__
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be compiled here: {reason}; leave out compile"
            ) from error

    return run
