"""The import graph of the package goes one way: a layer imports from earlier layers only.

Imports are read from the sources: those inside of functions and under ``TYPE_CHECKING`` count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "vitreous"

# From the first layer to the last. Rooms of one layer do not import each other. A room is a package or a module
# directly below vitreous, or below vitreous.evaluation; several names are one room until they are one package.
LAYERS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"errors": ("errors",)},
    {
        "_utils": (
            *("cautions", "close_match", "compiling", "defaults", "error_boundary", "float64", "method_trials"),
            *("paths", "plain_tensors", "printable", "reason", "source_code", "storage", "torch_state", "user_file"),
        )
    },
    {"inputs": ("class_names", "frame", "images", "inputs", "patch_geometry", "targets", "texts")},
    {"datasets": ("datasets",), "metrics": ("metrics",), "outputs": ("outputs",)},
    {"architecture": ("architecture",), "models": ("models", "pixels", "stored_preprocessing")},
    {"tape": ("batching", "deferred_logits", "output_detection", "predicted", "tape")},
    {
        "methods": (
            *("aggregate", "cost", "methods", "parts", "plugin", "plugin_errors", "precision", "spelling"),
            "unrecorded",
        )
    },
    {"explanation": ("explanation", "explanation_folder", "provenance", "text_explanation")},
    {"explain": ("explaining", "inspection", "support", "text_explaining")},
    {"pictures": ("pictures",)},
    {"html": ("html",)},
    {"evaluation.statistics": ("evaluation.statistics",), "evaluation.tasks": ("evaluation.tasks",)},
    {"evaluation.protocols": ("evaluation.protocols",), "evaluation.store": ("evaluation.store",)},
    {"evaluation.runner": ("evaluation.runner",)},
    {"evaluation.engines": ("evaluation.engines",), "evaluation.report": ("evaluation.report",)},
    {"evaluation": ("evaluation", "evaluation.evaluate")},
    {"speed": ("speed",)},
    {"vitreous": ("",)},  # the public names, which the page and the command line use as anyone would
    {"web": ("web",)},
    {"cli": ("cli",)},
    {"__main__": ("__main__",), "deprecated": ("benchmark", "protocols")},
)

# Edges against the direction that are to be removed, each with the reason; an entry that is not needed fails.
KNOWN = {
    ("outputs", "architecture"): "what an output is found to be belongs behind the architecture",
    ("outputs", "models"): "settles the outputs of a loaded model",
    ("explanation", "pictures"): "Explanation draws itself; pictures are to register how they show it",
    ("explanation", "html"): "Explanation writes its own page; pages are to register how they show it",
    ("explain", "pictures"): "explain keeps the base image of a picture",
    ("pictures", "html"): "words of a text are drawn as HTML",
    ("web", "cli"): "the page shows the command that does the same",
}


def modules() -> dict[str, Path]:
    """Every module by its dotted name below vitreous; the package itself is the empty name."""
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(file: Path, known: set[str]) -> Iterator[str]:
    """The modules of this package that a file imports; ``from vitreous import __version__`` is data, and none."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, inner = name.partition(".")
            if package == "vitreous" and inner != "__version__":
                yield inner if inner in known else inner.rpartition(".")[0]


def part_of(module: str) -> str:
    """The name below vitreous, or below vitreous.evaluation, that a module belongs to."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "evaluation" else parts[0]


def rooms() -> dict[str, tuple[str, int]]:
    """The room and the number of the layer that every name belongs to."""
    return {
        name: (room, number) for number, layer in enumerate(LAYERS) for room, names in layer.items() for name in names
    }


@cache
def edges() -> dict[tuple[str, str], list[str]]:
    """Every import between two rooms, with the modules that have it."""
    known, places = modules(), rooms()
    found: dict[tuple[str, str], list[str]] = {}
    for module, file in known.items():
        for target in imported(file, set(known)):
            edge = places[part_of(module)][0], places[part_of(target)][0]
            if edge[0] != edge[1]:
                found.setdefault(edge, []).append(f"vitreous.{module} imports vitreous.{target}")
    return found


def against_the_direction() -> dict[tuple[str, str], list[str]]:
    layer = {room: number for number, layer in enumerate(LAYERS) for room in layer}
    return {edge: found for edge, found in edges().items() if layer[edge[0]] <= layer[edge[1]]}


def test_every_module_belongs_to_a_layer():
    unknown = {part_of(module) for module in modules()} - set(rooms())
    assert not unknown, f"say in LAYERS where these belong: {sorted(unknown)}"


def test_every_name_of_a_layer_exists():
    gone = set(rooms()) - {part_of(module) for module in modules()}
    assert not gone, f"these are no more; take them out of LAYERS: {sorted(gone)}"


def test_imports_go_one_way():
    wrong = {edge: found for edge, found in against_the_direction().items() if edge not in KNOWN}
    assert not wrong, "\n".join(line for found in wrong.values() for line in found)


@pytest.mark.parametrize("edge", KNOWN, ids=" to ".join)
def test_a_known_edge_is_still_there(edge):
    assert edge in against_the_direction(), f"{edge} is removed: take it out of KNOWN"


class TestTheReader:
    """An import that is not seen would pass for one that is not there."""

    @pytest.mark.parametrize(
        "text",
        [
            "import vitreous.cli.app",
            "from vitreous.cli import app",
            "from vitreous.cli.app import main",
            "def f():\n    from vitreous.cli import app",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vitreous.cli.app import main",
        ],
    )
    def test_every_form_of_an_import_is_seen(self, tmp_path, text):
        (tmp_path / "module.py").write_text(text)
        assert list(imported(tmp_path / "module.py", {"", "cli", "cli.app"})) == ["cli.app"]

    def test_the_version_and_other_packages_are_not_edges(self, tmp_path):
        (tmp_path / "module.py").write_text("from vitreous import __version__\nimport torch")
        assert not list(imported(tmp_path / "module.py", {"", "cli"}))

    def test_a_public_name_of_the_package_is_an_edge_to_it(self, tmp_path):
        (tmp_path / "module.py").write_text("from vitreous import explain")
        assert list(imported(tmp_path / "module.py", {"", "cli"})) == [""]
