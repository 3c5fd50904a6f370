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
# that none is left for one process alone in the end. ``make test`` keeps this order.
LONG = (
    *("docs/test_readme", "web/test_web_server", "evaluation/test_evaluation_ray", "web/test_web_browser"),
    *("architecture/test_zoo", "methods/test_on_photos", "families/test_timm", "evaluation/test_evaluation_killed"),
    *("pictures/test_figures", "cli/test_cli", "tape/test_tape", "baseline/test_baseline", "architecture/test_stages"),
    *("families/test_transformers", "docs/test_notebooks", "families/test_texts", "evaluation/test_evaluation_store"),
    *("cli/test_cli_evaluate", "evaluation/test_protocols_targets", "pictures/test_print", "tape/test_interrupts"),
    *("families/test_plain_encoder", "methods/test_decomposition", "evaluation/test_evaluate", "cli/test_startup"),
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
