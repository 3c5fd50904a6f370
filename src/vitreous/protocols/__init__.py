"""Deprecated: ``vitreous.evaluation.protocols`` has taken the place of this package. Old imports work and warn."""

from __future__ import annotations

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    from vitreous.evaluation import protocols  # noqa: PLC0415  # only where an old import asks for it

    value = getattr(protocols, name, None)
    if value is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__} is deprecated, import {protocols.__name__}", DeprecationWarning, stacklevel=2)
    return value
