"""Write docs/api*.md: one mkdocstrings entry for every public name.

python scripts/write_api_pages.py [--check]
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType

import vitreous
from vitreous import metrics, pictures
from vitreous.architecture import __all__ as architecture_names
from vitreous.methods import __all__ as methods_names

DOCS = Path(__file__).parents[1] / "docs"
NOTICE = "Written by `scripts/write_api_pages.py`; the text comes from docstrings.\n"
# By name, for importing the modules takes the packages that they adapt to.
INTEGRATIONS = {
    "captum": ("VitreousAttribution", "attribution_class"),
    "quantus": ("explain_func",),
    "grad_cam": ("VitreousCAM", "cam_class"),
    "maps": ("MapResults", "pixel_maps"),
    "training": (
        *("watch", "Watcher", "lightning_callback", "find_logger"),
        *("MapLogger", "TensorBoardLogger", "MLflowLogger", "WandbLogger"),
    ),
    "formats": ("heatmap_masks", "to_coco", "write_voc_masks", "write_maps", "read_maps", "add_fiftyone_heatmaps"),
    "medical": ("read_dicom", "read_nifti", "read_volume", "write_secondary_capture"),
}
INHERITED = "    options:\n      inherited_members: true\n"
_WITH_INHERITED = ("vitreous.Explanation", "vitreous.TextExplanation")
CONTEXT = """In the examples, `model` is a model, `explanation` its explanation of the image `demo.jpg`,
`clip` a model of images and texts, and `hf/text-model` the folder of a text classifier. The test suite runs them.
"""


def pages() -> dict[str, str]:
    """Give the pages by file name."""
    package = [name for name in vitreous.__all__ if not name.startswith("_") and not _is_module(name)]
    classes = [name for name in methods_names if inspect.isclass(getattr(vitreous.methods, name))]
    return {
        "api.md": _page(
            "API: vitreous",
            f"{CONTEXT}\nSee also [methods](api-methods.md), [pictures](api-pictures.md), [metrics](api-metrics.md).\n",
            {
                "Functions and classes": [f"vitreous.{name}" for name in package],
                "Targets": [f"vitreous.targets.{name}" for name in vitreous.targets.__all__],
                "Models": ["vitreous.models.LoadedModel", "vitreous.models.Preprocessing"],
                "What inspection shows": [
                    "vitreous.api.inspection.Inspection",
                    "vitreous.api.inspection.Supported",
                    *(f"vitreous.architecture.{name}" for name in architecture_names),
                ],
                "What trust measures": [
                    f"vitreous.explanation.trust.{name}" for name in ("Trust", "MapTrust", "Account", "Share")
                ],
                "Speed": [f"vitreous.speed.{name}" for name in vitreous.speed.__all__],
                "Errors": [f"vitreous.errors.{name}" for name in _errors()],
            },
        ),
        "api-methods.md": _page(
            "API: methods",
            "All methods with their formulas are on [a page of their own](methods.md).\n",
            {
                "Your own method": ["vitreous.plugin.method", "vitreous.plugin.load_plugin"],
                "Your own rule": ["vitreous.rules.Rule", "vitreous.rules.register"],
                "The registry": ["vitreous.methods.registry.register", "vitreous.methods.MethodInfo"],
                "Read-outs": [f"vitreous.methods.{name}" for name in classes if name != "MethodInfo"],
            },
        ),
        "api-pictures.md": _page(
            "API: vitreous.pictures", CONTEXT, {"": [f"vitreous.pictures.{name}" for name in pictures.__all__]}
        ),
        "api-metrics.md": _page(
            "API: vitreous.metrics",
            "A metric is a pure function of arrays. [Metrics](metrics.md) lists the numbers over a data set.\n",
            {"": [f"vitreous.metrics.{name}" for name in metrics.__all__]},
        ),
        "api-integrations.md": _page(
            "API: vitreous.integrations",
            "[Other tools](integrations.md) shows each of them.\n",
            {
                name: [f"vitreous.integrations.{name}.{member}" for member in members]
                for name, members in INTEGRATIONS.items()
            },
        ),
    }


def _page(title: str, introduction: str, sections: dict[str, list[str]]) -> str:
    parts = [f"# {title}\n", NOTICE, introduction]
    for heading, names in sections.items():
        if heading:
            parts.append(f"## {heading}\n")
        parts += [f"::: {name}\n{INHERITED if name in _WITH_INHERITED else ''}" for name in names]
    return "\n".join(parts)


def _is_module(name: str) -> bool:
    return isinstance(getattr(vitreous, name), ModuleType)


def _errors() -> list[str]:
    return [name for name, found in vars(vitreous.errors).items() if inspect.isclass(found)]


def main() -> None:
    """Write the pages, or with --check fail if they are not what the public names say."""
    for name, text in pages().items():
        file = DOCS / name
        if "--check" not in sys.argv[1:]:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{file} is out of date: run scripts/write_api_pages.py")


if __name__ == "__main__":
    main()
