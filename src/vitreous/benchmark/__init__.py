"""Deprecated: ``vitreous.evaluation`` has taken the place of this package. Old imports work and warn."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

_MOVED = {
    "evaluation": "vitreous.evaluation.evaluate",
    "measuring": "vitreous.evaluation.runner.measure",
    "results": "vitreous.evaluation.report.results",
    "run": "vitreous.evaluation.run",
    "starting": "vitreous.evaluation.runner.prepare_run",
    "statistics": "vitreous.evaluation.statistics",
    "store": "vitreous.evaluation.store",
    "summary": "vitreous.evaluation.report.results",
    "tables": "vitreous.evaluation.report.tables",
}


class _MovedModule(ModuleType):
    """A module whose names are looked up in the module that replaced it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        moved_to = _MOVED[self.__name__.rpartition(".")[2]]
        value = getattr(import_module(moved_to), name)
        warnings.warn(f"{self.__name__} is deprecated, import {moved_to}", DeprecationWarning, stacklevel=2)
        return value


for _name in _MOVED:
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = _MovedModule(f"{__name__}.{_name}")
