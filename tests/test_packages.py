"""What the packages hold and say of themselves: data files, citations, and the README's table of other libraries.

``make package`` builds them and runs the demo from an empty environment; ``.ci/run`` does so.
"""

import importlib
import inspect
import re
import tomllib
import warnings
from pathlib import Path

import pytest

import vitreous
from vitreous.evaluation.protocols import list_protocols
from vitreous.methods import list_methods

yaml = pytest.importorskip("yaml", reason="comes with mkdocs (extra vitreous[docs])")

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
PACKAGE = ROOT / "src" / "vitreous"
VERSIONS = dict(re.findall(r"(captum|grad-cam|lxt|quantus) ([\d.]+) \|", README))


def test_every_file_that_is_no_python_is_package_data():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["vitreous"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}]
    assert [str(path.relative_to(PACKAGE)) for path in files if path not in packed] == []
    assert any(path.name == "cat-and-dog.jpg" for path in files)


def test_every_folder_with_python_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_versions_are_the_same_everywhere():
    assert CITATION["version"] == vitreous.__version__
    assert f"dist/vitreous-{vitreous.__version__}-py3-none-any.whl" in README
    assert f"version = {{{vitreous.__version__}}}" in README
    assert f"| Vitreous {vitreous.__version__} |" in README


def test_the_citation_has_the_fields_that_the_format_asks_for():
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["title"]
    assert CITATION["message"]
    assert CITATION["license"] == PROJECT["project"]["license"]
    for work in [CITATION, *CITATION["references"]]:
        assert all("name" in author or {"family-names", "given-names"} == set(author) for author in work["authors"])


@pytest.mark.parametrize("paper", CITATION["references"], ids=lambda paper: paper["title"].split()[0])
def test_papers_of_the_citation_are_in_the_bibtex_and_in_the_registry(paper):
    assert f"title     = {{{paper['title']}}}" in README or f"title   = {{{paper['title']}}}" in README
    names = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    assert names in README
    papers = [info.citation.lower() for info in list_methods()]
    start = paper["title"].lower().removesuffix(" network")
    assert any(start in known for known in papers), start


def test_addresses_of_the_project_are_those_of_papers():
    links = {info.link for info in list_methods()}
    assert set(PROJECT["project"]["urls"].values()) <= links


class TestOtherLibraries:
    """Rows of the README's table that can be checked by importing."""

    def load(self, distribution, module):
        metadata = importlib.import_module("importlib.metadata")
        try:
            found = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{distribution} is not installed (make test installs it)")
        assert found == VERSIONS[distribution], "the README's table is about another version: check it again"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)

    def test_vitreous(self):
        assert len(list_methods()) > 50
        assert len(list_protocols()) > 20
        assert len({metric.name for protocol in list_protocols() for metric in protocol.metrics()}) > 60

    def test_captum(self):
        attributions = self.load("captum", "captum.attr")
        base = attributions.Attribution
        found = [getattr(attributions, name) for name in attributions.__all__]
        kinds = [kind for kind in found if inspect.isclass(kind) and issubclass(kind, base)]
        plain = [kind for kind in kinds if not kind.__name__.startswith(("Layer", "Neuron"))]
        assert 15 <= len(plain) <= 27  # with a few base classes
        assert not re.search("rollout|attention", " ".join(kind.__name__ for kind in kinds), re.IGNORECASE)
        assert {"LLMAttribution", "LLMGradientAttribution"} <= set(dir(attributions))
        assert importlib.import_module("captum.concept").TCAV
        assert importlib.import_module("captum.influence").TracInCP
        metrics = importlib.import_module("captum.metrics")
        assert {"infidelity", "sensitivity_max"} <= set(dir(metrics))

    def test_grad_cam(self):
        library = self.load("grad-cam", "pytorch_grad_cam")
        assert {"target_layers", "reshape_transform"} <= set(inspect.signature(library.GradCAM).parameters)
        base = importlib.import_module("pytorch_grad_cam.base_cam").BaseCAM
        maps = [kind for kind in vars(library).values() if inspect.isclass(kind) and issubclass(kind, base)]
        assert 15 <= len(maps) <= 25
        assert importlib.import_module("pytorch_grad_cam.metrics.road")

    def test_lxt(self):
        library = self.load("lxt", "lxt")
        models = {path.stem for path in Path(library.__file__).parent.joinpath("efficient", "models").glob("*.py")}
        assert {"llama", "vit_torch"} <= models
        assert not [name for name in models if name.startswith(("timm", "deit"))]

    def test_quantus(self):
        library = self.load("quantus", "quantus")
        assert sum(map(len, library.AVAILABLE_METRICS.values())) == 37
        assert "**37, for any explanation**" in README
