"""Start time: ``import vitreous``, help texts and listings need no heavy package."""

import ast
import inspect
import json
import resource
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import vitreous
from fresh_imports import modules_after
from loading_scripts import load_script
from vitreous.cli import app
from vitreous.cli.listings import FILE, load_catalog

HEAVY = {
    *("torch", "torchvision", "timm", "transformers", "huggingface_hub", "numpy", "scipy", "pandas", "PIL"),
    *("matplotlib", "gradio", "ray", "pyarrow", "jinja2"),
}
LIMIT = 0.5  # seconds of processor time, user and system
COMMANDS = list(typer.main.get_command(app).commands)
LISTINGS = ("methods", "protocols", "models", "datasets")
FAST = [
    ("--help",),
    *((command, "--help") for command in COMMANDS),
    ("models", "check", "--help"),
    ("figure", "--list"),
    *((listing,) for listing in LISTINGS),
    *((listing, "--json") for listing in LISTINGS),
]


# Prints the heavy packages that were imported when the interpreter ends.
REPORT = f"import atexit, sys; atexit.register(lambda: print(*{HEAVY!r} & sys.modules.keys(), file=sys.stderr)); "


def run_program(code: str, *arguments: str) -> tuple[set[str], float]:
    """Run code in a new interpreter; return the heavy packages it imported and its processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", REPORT + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return set(done.stderr.split()), (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


@pytest.mark.parametrize("arguments", FAST, ids=" ".join)
def test_help_and_listings_answer_in_half_a_second_without_heavy_packages(arguments):
    times = []
    # Other processes on the machine make the same work take longer; the fastest of a few runs is the work itself.
    while len(times) < 8 and min(times, default=LIMIT) >= LIMIT:
        heavy, time = run_program("from vitreous.cli import main; main()", *arguments)
        assert heavy == set()
        times.append(time)
    assert min(times) < LIMIT, times


def test_importing_the_package_imports_nothing_heavy():
    heavy, _ = run_program("import vitreous; dir(vitreous); vitreous.errors.InputError")
    assert heavy == set()


UNUSED = {
    "vitreous.cli.explain_images": {"gradio", "ray", "pyarrow", "matplotlib", "pandas", "transformers", "scipy"},
    "vitreous.cli.figure_drawing": {"gradio", "ray", "pyarrow", "pandas", "transformers", "scipy"},
    "vitreous.evaluation.evaluate": {"gradio", "ray", "matplotlib", "pandas", "transformers", "scipy"},
    "vitreous.speed.measuring": {"gradio", "ray", "pyarrow", "matplotlib", "pandas", "transformers", "scipy"},
}


def test_commands_do_not_import_packages_that_they_do_not_use():
    found = modules_after([f"import {module}" for module in UNUSED])
    assert {module: unused & loaded for (module, unused), loaded in zip(UNUSED.items(), found, strict=True)} == {
        module: set() for module in UNUSED
    }


def test_only_the_entry_point_imports_the_command_line():
    package = Path(vitreous.__path__[0])
    for file in package.rglob("*.py"):
        place = file.relative_to(package).as_posix()
        if place != "__main__.py" and not place.startswith("cli/"):
            imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
            modules = [f"{line.module}.{name.name}" for line in imports for name in line.names]
            assert not [module for module in modules if module.startswith("vitreous.cli.")], place


class TestPublicNames:
    def test_type_checkers_and_the_interpreter_see_the_same(self):
        """The imports under TYPE_CHECKING name the modules that ``__getattr__`` imports from."""
        tree = ast.parse(inspect.getsource(vitreous))
        (block,) = (node for node in tree.body if isinstance(node, ast.If))
        declared = {
            name.name: None if line.module == "vitreous" else line.module for line in block.body for name in line.names
        }
        assert declared == vitreous._MODULES
        assert {*declared, "__version__"} == set(vitreous.__all__) == set(dir(vitreous))

    @pytest.mark.parametrize("name", vitreous.__all__)
    def test_each_one_exists(self, name):
        assert getattr(vitreous, name) is getattr(vitreous, name)

    def test_others_are_an_attribute_error(self):
        with pytest.raises(AttributeError, match="module 'vitreous' has no attribute 'explian'"):
            vitreous.explian  # noqa: B018


class TestCatalog:
    """``catalog.json``, which the listings are read from, says what the registries say."""

    def test_it_is_up_to_date(self, monkeypatch):
        written = load_script("write_catalog", monkeypatch).text()
        stored, built = load_catalog(), json.loads(written)
        if stored["models"]["timm_version"] != metadata.version("timm"):  # another timm has other names
            for catalog in (stored, built):
                del catalog["models"]["timm_version"], catalog["models"]["timm_vision_transformers"]
            assert stored == built, "run `make catalog`"
        else:
            assert FILE.read_text(encoding="utf-8") == written, "run `make catalog`"

    def test_it_is_installed_with_the_package(self):
        """Setuptools installs data files that are named in pyproject.toml, and no others."""
        root = Path(__file__).parents[2]
        named = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["vitreous"]
        assert FILE.relative_to(root / "src" / "vitreous").as_posix() in named

    def test_methods_of_a_plugin_are_listed(self, registry, tmp_path):
        """With a plugin the registry is listed, not the file."""
        plugin = tmp_path / "own.py"
        plugin.write_text(
            "from vitreous.plugin import method\n\n"
            '@method("own_method", values=("tokens",), summary="A method of a plugin.")\n'
            "def own(view, layer):\n    return view.tokens(layer).sum(-1)\n"
        )
        table, listed = (
            CliRunner().invoke(app, ["methods", *form, "--plugin", str(plugin)]).stdout for form in ([], ["--json"])
        )
        assert "own_method" in table
        assert "A method of a plugin." in table
        by_name = {method["name"]: method for method in json.loads(listed)}
        own, others = by_name.pop("own_method"), list(by_name.values())
        assert own["family"] == "plugin"
        assert others == load_catalog()["methods"]
