"""Start time: ``import vitreous``, help texts and listings need no heavy package."""

import ast
import inspect
import json
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


# What all commands begin with is run once, by an interpreter that then forks for each of them: a command's time is that
# of the interpreter up to there and that of the fork.
PROGRAM = """
import json, os, sys, time
from vitreous.cli import main
import typer.rich_utils
begun = time.process_time()
for line in sys.stdin:
    reading, writing = os.pipe()
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = ["vitreous", *json.loads(line)]
        code = 0
        try:
            main()
            sys.stdout.flush()
        except SystemExit as end:
            code = end.code
        os.write(writing, json.dumps([code or 0, begun + time.process_time(), sorted(sys.modules)]).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        print(answer.read(), flush=True)
    os.wait()
"""


@pytest.fixture(scope="module")
def answers():
    """Run a command: its exit code, its processor time, and all modules that it has imported."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as interpreter:

        def ask(arguments):
            print(json.dumps(arguments), file=interpreter.stdin, flush=True)
            code, seconds, modules = json.loads(interpreter.stdout.readline())
            return code, seconds, set(modules)

        yield ask
        interpreter.stdin.close()


@pytest.mark.parametrize("arguments", FAST, ids=" ".join)
def test_help_and_listings_answer_in_half_a_second_without_heavy_packages(answers, arguments):
    times = []
    # Other processes on the machine make the same work take longer; the fastest of a few runs is the work itself.
    while len(times) < 8 and min(times, default=LIMIT) >= LIMIT:
        code, seconds, modules = answers(arguments)
        assert code == 0
        assert modules & HEAVY == set()
        times.append(seconds)
    assert min(times) < LIMIT, times


def test_importing_the_package_imports_nothing_heavy():
    program = "import vitreous, sys; dir(vitreous); vitreous.errors.InputError; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & HEAVY == set()


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
            text = file.read_text()
            if "vitreous.cli" in text or "import cli" in text:  # to read the others takes long
                imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
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
