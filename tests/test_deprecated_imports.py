"""Import paths of earlier versions work and warn."""

from __future__ import annotations

from importlib import import_module

import pytest

import vitreous


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vitreous.benchmark.evaluation", "evaluate"),
        ("vitreous.benchmark.measuring", "measure"),
        ("vitreous.benchmark.results", "Results"),
        ("vitreous.benchmark.run", "ModelChoice"),
        ("vitreous.benchmark.starting", "Model"),
        ("vitreous.benchmark.statistics", "paired"),
        ("vitreous.benchmark.store", "Store"),
        ("vitreous.benchmark.summary", "summarise"),
        ("vitreous.benchmark.tables", "as_markdown"),
        ("vitreous.protocols", "find_protocol"),
        ("vitreous.protocols", "Protocol"),
    ],
)
def test_an_old_path_works_and_names_the_new_one(module, name):
    with pytest.warns(DeprecationWarning, match="vitreous.evaluation") as warned:
        found = getattr(import_module(module), name)
    new = str(warned[0].message).rpartition(" ")[2]
    assert found is getattr(import_module(new), name)
    assert warned[0].filename == __file__


def test_from_imports_work():
    with pytest.warns(DeprecationWarning, match="vitreous.evaluation.evaluate"):
        from vitreous.benchmark.evaluation import evaluate
    assert evaluate is vitreous.evaluate


def test_a_name_that_never_was_is_an_attribute_error():
    with pytest.raises(AttributeError):
        _ = import_module("vitreous.benchmark.run").nothing
    with pytest.raises(ImportError):
        from vitreous.protocols import nothing  # noqa: F401
