"""Vitreous explains Vision Transformers: which image regions, or words, led to a prediction?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "TextExplanation",
    "__version__",
    "add_test_time_registers",
    "audit",
    "errors",
    "evaluate",
    "evaluate_maps",
    "explain",
    "explain_text",
    "explain_words",
    "inspect",
    "list_methods",
    "load_dual_encoder",
    "load_model",
    "load_text_model",
    "match_patches",
    "match_words",
    "recommend",
    "rules",
    "similar",
    "speed",
    "supported",
    "targets",
    "trust",
    "zero_shot",
]

if TYPE_CHECKING:
    from vitreous import errors, rules, speed, targets
    from vitreous.api.explain import explain
    from vitreous.api.inspection import inspect, supported
    from vitreous.api.similarity import match_patches, similar
    from vitreous.api.trust import trust
    from vitreous.auditing.audit import audit
    from vitreous.evaluation.evaluate import evaluate
    from vitreous.evaluation.recommend import recommend
    from vitreous.explanation.explanation import Explanation
    from vitreous.integrations.maps import evaluate_maps
    from vitreous.methods import list_methods
    from vitreous.methods.registers import add_test_time_registers
    from vitreous.models import load_model
    from vitreous.models.dual_encoder import load_dual_encoder, zero_shot
    from vitreous.models.hf_models import load_text_model
    from vitreous.text.explain import explain_text
    from vitreous.text.explanation import TextExplanation
    from vitreous.text.prompts import explain_words, match_words

# The same for the interpreter: the module of each name, or None for a submodule. A test compares the two.
_MODULES = {
    "Explanation": "vitreous.explanation.explanation",
    "TextExplanation": "vitreous.text.explanation",
    "add_test_time_registers": "vitreous.methods.registers",
    "audit": "vitreous.auditing.audit",
    "errors": None,
    "evaluate": "vitreous.evaluation.evaluate",
    "evaluate_maps": "vitreous.integrations.maps",
    "explain": "vitreous.api.explain",
    "explain_text": "vitreous.text.explain",
    "explain_words": "vitreous.text.prompts",
    "inspect": "vitreous.api.inspection",
    "list_methods": "vitreous.methods",
    "load_dual_encoder": "vitreous.models.dual_encoder",
    "load_model": "vitreous.models",
    "load_text_model": "vitreous.models.hf_models",
    "match_patches": "vitreous.api.similarity",
    "match_words": "vitreous.text.prompts",
    "recommend": "vitreous.evaluation.recommend",
    "rules": None,
    "similar": "vitreous.api.similarity",
    "speed": None,
    "supported": "vitreous.api.inspection",
    "targets": None,
    "trust": "vitreous.api.trust",
    "zero_shot": "vitreous.models.dual_encoder",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562), so that ``import vitreous`` does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    value = import_module(f"{__name__}.{name}") if module is None else getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names for completion, imported or not."""
    return sorted(__all__)
