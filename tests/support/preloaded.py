"""What the processes of ``forked`` have imported when they begin; importing this file imports it all.

Hardly any of it is garbage, so nothing is collected before a program begins.
"""

from __future__ import annotations

import gc
import importlib.util
from contextlib import suppress
from pathlib import Path

PACKAGES = ("torch", "torchvision", "timm", "transformers", "safetensors.torch", "matplotlib.figure", "pyarrow.parquet")


def _modules_of_vitreous() -> list[str]:
    """All but the page's, which imports Gradio, and the adapters', which import other libraries."""
    found = importlib.util.find_spec("vitreous")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    files = [file.relative_to(root.parent).with_suffix("") for file in sorted(root.rglob("*.py"))]
    names = [".".join(part for part in file.parts if part != "__init__") for file in files]
    apart = ("vitreous.web", "vitreous.integrations")
    return [name for name in names if not name.startswith(apart) and not name.endswith("__main__")]


gc.disable()
for _name in (*PACKAGES, *_modules_of_vitreous()):
    with suppress(ImportError):
        importlib.import_module(_name)
