"""Vitreous: see through Vision Transformers. Which parts of a picture made the model say this class?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "TextExplanation",
    "__version__",
    "errors",
    "evaluate",
    "explain",
    "explain_text",
    "inspect",
    "list_methods",
    "load_model",
    "load_text_model",
    "rules",
    "speed",
    "supported",
]

if TYPE_CHECKING:
    from vitreous import errors, rules, speed
    from vitreous.benchmark.evaluation import evaluate
    from vitreous.explaining import explain
    from vitreous.explanation import Explanation
    from vitreous.inspection import inspect
    from vitreous.methods import list_methods
    from vitreous.models import load_model
    from vitreous.models.text_models import load_text_model
    from vitreous.support import supported
    from vitreous.text_explaining import explain_text
    from vitreous.text_explanation import TextExplanation

_HOMES = {
    "explain": "vitreous.explaining",
    "evaluate": "vitreous.benchmark.evaluation",
    "Explanation": "vitreous.explanation",
    "inspect": "vitreous.inspection",
    "supported": "vitreous.support",
    "list_methods": "vitreous.methods",
    "load_model": "vitreous.models",
    "explain_text": "vitreous.text_explaining",
    "TextExplanation": "vitreous.text_explanation",
    "load_text_model": "vitreous.models.text_models",
    "errors": "vitreous.errors",
    "rules": "vitreous.rules",
    "speed": "vitreous.speed",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``vitreous --help`` does not wait for torch."""
    from importlib import import_module  # noqa: PLC0415

    if name not in _HOMES:
        raise AttributeError(f"module 'vitreous' has no attribute {name!r}")
    module = import_module(_HOMES[name])
    value = module if _HOMES[name] == f"vitreous.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not: what completion in a shell shows."""
    return sorted(__all__)
