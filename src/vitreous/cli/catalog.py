"""The catalog: what methods, protocols, models and data sets there are, as JSON values.

``catalog.json`` holds the catalog of this version, so that listing commands answer without importing torch. It is
written by ``scripts/write_catalog.py`` from the registries; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitreous._utils.defaults import PLUGIN_ENTRY_POINTS
from vitreous.cli.console import json_values

if TYPE_CHECKING:
    from vitreous.methods import OptionInfo

FILE = Path(__file__).with_name("catalog.json")


def load_catalog() -> dict[str, Any]:
    """Read the catalog of this version, without methods of plugins."""
    catalog: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return catalog


def load_methods(plugins: list[Path]) -> list[dict[str, Any]]:
    """Return all methods; with plugins, given or installed, from the registry."""
    from importlib import metadata  # noqa: PLC0415  # takes a while, and only this command needs it

    if not plugins and not metadata.entry_points(group=PLUGIN_ENTRY_POINTS):
        methods: list[dict[str, Any]] = load_catalog()["methods"]
        return methods
    from vitreous.plugin import load_plugins  # noqa: PLC0415  # imports torch

    load_plugins(plugins)
    return build_methods()


def build_catalog() -> dict[str, Any]:
    """Build the catalog from the registries."""
    from importlib import metadata  # noqa: PLC0415

    from vitreous.datasets import list_datasets  # noqa: PLC0415  # these import torch
    from vitreous.models import list_models  # noqa: PLC0415

    catalog: dict[str, Any] = json_values(
        {
            "methods": build_methods(),
            "aggregations": _build_aggregations(),
            "protocols": _build_protocols(),
            "models": {**list_models(), "timm_version": metadata.version("timm")},
            "datasets": [{"kind": kind, "help": summary} for kind, summary in list_datasets().items()],
        }
    )
    return catalog


def build_methods() -> list[dict[str, Any]]:
    """Return the registered methods as JSON values."""
    from vitreous.methods import list_methods  # noqa: PLC0415  # imports torch

    return [
        {
            "name": method.name,
            "family": method.family,
            "summary": method.summary,
            "paper": method.paper,
            "year": method.year,
            "note": method.note,
            "citation": method.citation,
            "link": method.link,
            "bf16": list(method.bf16),
            "class_specific": method.class_specific,
            "signed": method.signed,
            "cost": method.cost.label,
            "passes": list(method.cost.passes),
            "aggregations": list(method.aggregations),
            "options": _options_as_json(method.options),
        }
        for method in list_methods()
    ]


def _build_aggregations() -> list[dict[str, Any]]:
    from vitreous.methods.aggregation import AGGREGATIONS  # noqa: PLC0415  # these import torch
    from vitreous.methods.options import options_of  # noqa: PLC0415

    return [
        {"name": name, "summary": _summary(make), "options": _options_as_json(options_of(make))}
        for name, make in AGGREGATIONS.items()
    ]


def _build_protocols() -> list[dict[str, Any]]:
    from vitreous.evaluation.protocols import list_protocols  # noqa: PLC0415  # imports torch

    return [
        {
            "name": protocol.name,
            "title": protocol.title,
            "paper": protocol.paper,
            "version": protocol.version,
            "metrics": [
                {
                    "name": metric.name,
                    "direction": metric.direction,
                    "range": list(metric.range),
                    "description": metric.description,
                }
                for metric in protocol.metrics()
            ],
            "settings": protocol.settings(),
        }
        for protocol in list_protocols()
    ]


def _options_as_json(options: Mapping[str, OptionInfo]) -> dict[str, Any]:
    return {
        name: {
            "default": option.default,
            "choices": None if option.choices is None else list(option.choices),
            "help": option.help,
            "most": option.most,
        }
        for name, option in options.items()
    }


def _summary(make: Callable[..., object]) -> str:
    return (make.__doc__ or "").strip().splitlines()[0].replace("``", "")
