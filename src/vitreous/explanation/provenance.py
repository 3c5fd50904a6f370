"""Where a result came from: versions, model and methods, so that a number can be traced and made again."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from vitreous import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

# Listed only if imported: other libraries did not contribute to the result.
_PARTICIPANTS = ("timm", "transformers", "torchvision", "open_clip")


def collect_provenance(
    *,
    methods: Iterable[str] = (),
    model: str | None = None,
    model_class: str | None = None,
    family: str | None = None,
    fingerprint: str | None = None,
    **details: Any,
) -> dict[str, Any]:
    """Describe the running software and the model in plain JSON values.

    Args:
        methods: Method spellings.
        model: The name the model was loaded by.
        model_class: The qualified name of the model's class.
        family: The model's class.
        fingerprint: A hash of the model, its weights included, where it is known.
        **details: Anything else worth recording; JSON values only.
    """
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "model_class": model_class,
        "family": family,
        "fingerprint": fingerprint,
        "methods": list(methods),
        "versions": software_versions(),
        **details,
    }


def software_versions() -> dict[str, str]:
    """Give the versions of python, vitreous, torch and of the model libraries that are imported."""
    versions = {"python": platform.python_version(), "vitreous": __version__}
    for name in ("torch", *_PARTICIPANTS):
        module = sys.modules.get(name)
        if module is not None:
            versions[name] = str(getattr(module, "__version__", "unknown"))
    return versions
