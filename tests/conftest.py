"""Fixtures that several test files share.

Nothing large is imported here: the process that hands out the tests reads this file before it starts the others.
"""

from __future__ import annotations

import gc
import logging
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import forked
from nothing_skipped import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401  # pytest finds them here

if TYPE_CHECKING:
    from PIL import Image

# Files that take longest, by processor time or because they wait for servers and browsers: they are begun first, so
# that none is left for one process alone in the end. Those that mostly wait (server, browser, Ray) do not stand beside
# each other, or processors have nothing to do. ``make test`` keeps this order.
LONG = (
    *("web/test_web_server", "docs/test_readme", "architecture/test_zoo", "families/test_timm", "web/test_web_browser"),
    *("baseline/test_baseline", "methods/test_on_photos", "evaluation/test_evaluation_killed", "docs/test_notebooks"),
    *("evaluation/test_evaluation_ray", "pictures/test_figures", "tape/test_tape", "architecture/test_stages"),
    *("families/test_transformers", "docs/test_api_examples", "families/test_texts", "families/test_plain_encoder"),
    *("web/test_web_images", "methods/test_perturbation", "methods/test_completeness", "web/test_web_limits"),
    *("evaluation/test_evaluate", "pictures/test_print", "pictures/test_golden_figures", "models/test_loading"),
    *("cli/test_cli", "families/test_unsupported", "cli/test_cli_evaluate", "methods/test_decomposition"),
    *("cli/test_cli_audit", "docs/test_docs", "inputs/test_targets", "methods/test_attention_zoo"),
    *("evaluation/test_evaluation_texts", "evaluation/test_recommend", "evaluation/test_evaluation_store"),
    *("tape/test_interrupts", "families/test_open_clip", "baseline/test_evaluation_baseline", "models/test_demo_clip"),
    *("methods/test_operation_counts", "tape/test_gradient_breaks", "pictures/test_input_pictures"),
    *("methods/test_literal", "text/test_prompts", "methods/test_properties", "auditing/test_audit"),
)


def pytest_configure(config: pytest.Config) -> None:
    logging.getLogger().addHandler(logging.NullHandler())  # or warnings of libraries are printed among what tests read
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole and config.getoption("numprocesses", None):  # this process hands the tests out to others
        forked.share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {Path(__file__).parent / f"{name}.py": rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_collection() -> None:
    """While all is imported hardly anything is garbage; to look for it again and again takes a third of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What imports and collection left, some millions of objects, need not be looked through by every collection."""
    gc.freeze()
    gc.set_threshold(700, 10, 100)  # whatever survived that long is seldom garbage
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries tell of it at the end


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    import torch

    torch.set_num_threads(1)  # models this small only wait for each other's threads


@pytest.fixture(autouse=True, scope="session")
def _one_command_line():
    """Typer's runner builds all commands for each call, which takes as long as most of them; nothing changes them."""
    from typer import testing

    testing._get_command = cache(testing._get_command)


@pytest.fixture(autouse=True)
def _seed():
    """Random numbers are the same whichever tests run before."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def shared() -> Path:
    """The development data beside the repository; the test is skipped where it is absent."""
    folder = Path(__file__).parents[2] / "shared"
    if not (folder / "data").is_dir():
        pytest.skip(f"the development data is not at {folder}")
    return folder


@pytest.fixture
def registry():
    """The methods, rules and figures that a test registers are forgotten again."""
    from vitreous.explanation.views import _PROVIDERS, _views
    from vitreous.methods.registry import _methods
    from vitreous.tape.rules import RULES

    for provider in _PROVIDERS:
        import_module(provider)  # they register once, when they are imported
    tables = (_methods, RULES, _views)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture
def photo() -> Image.Image:
    """A photo-like image, 301 x 211 pixels: smooth colours with some noise, neither square nor even."""
    import numpy as np
    from PIL import Image

    rows, columns = np.mgrid[0:211, 0:301]
    noise = np.random.default_rng(0).integers(0, 40, (211, 301))
    channels = [rows + noise, columns * 0.7 + noise, (rows + columns) * 0.4 + noise]
    return Image.fromarray(np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8))


VALUE_MODEL = """
import types
import timm
import torch

def build():
    model = timm.create_model("test_vit", img_size=32, num_classes=1)
    torch.nn.init.constant_(model.head.bias, 7.5)  # far from what a probability could be
    model.config = types.SimpleNamespace(problem_type="regression")
    model.image_size, model.mean, model.std = 32, 0.5, 0.5
    return model
"""


@pytest.fixture
def value_model(tmp_path) -> str:
    """The name of a model of one's own whose only output is a value, near 7.5."""
    file = tmp_path / "value_model.py"
    file.write_text(VALUE_MODEL)
    return f"py/{file}:build"
