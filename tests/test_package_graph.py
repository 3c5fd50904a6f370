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
# directly below vitreous, or below vitreous.evaluation.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("_utils",),
    ("inputs",),
    ("datasets", "metrics", "models"),
    ("architecture",),
    ("tape",),
    ("methods", "rules"),
    ("plugin",),
    ("explanation",),
    ("api",),
    ("text",),
    ("pictures",),
    ("html",),
    ("evaluation.options", "evaluation.statistics", "evaluation.tasks"),
    ("evaluation.protocol", "evaluation.run"),
    ("evaluation.protocols", "evaluation.store"),
    ("evaluation.runner",),
    ("evaluation.engines", "evaluation.report"),
    ("evaluation", "evaluation.evaluate"),
    ("auditing", "evaluation.recommend", "integrations", "speed", "targets"),
    ("",),  # the public names, which the page and the command line use as anyone would
    ("web",),
    ("cli",),
    ("__main__", "benchmark", "protocols"),  # the last two are deprecated names
)


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


def layers() -> dict[str, int]:
    """By room, the number of its layer."""
    return {room: number for number, rooms in enumerate(LAYERS) for room in rooms}


@cache
def edges() -> dict[tuple[str, str], list[str]]:
    """Every import between two rooms, with the modules that have it."""
    known = modules()
    found: dict[tuple[str, str], list[str]] = {}
    for module, file in known.items():
        for target in imported(file, set(known)):
            edge = part_of(module), part_of(target)
            if edge[0] != edge[1]:
                found.setdefault(edge, []).append(f"vitreous.{module} imports vitreous.{target}")
    return found


def against_the_direction() -> dict[tuple[str, str], list[str]]:
    layer = layers()
    return {edge: found for edge, found in edges().items() if layer[edge[0]] <= layer[edge[1]]}


def test_every_module_belongs_to_a_layer():
    unknown = {part_of(module) for module in modules()} - set(layers())
    assert not unknown, f"say in LAYERS where these belong: {sorted(unknown)}"


def test_every_name_of_a_layer_exists():
    gone = set(layers()) - {part_of(module) for module in modules()}
    assert not gone, f"these are no more; take them out of LAYERS: {sorted(gone)}"


def test_imports_go_one_way():
    wrong = against_the_direction()
    assert not wrong, "\n".join(line for found in wrong.values() for line in found)


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
