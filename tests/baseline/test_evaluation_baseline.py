"""Every protocol gives the numbers that an earlier version stored; ``scripts/write_baseline.py`` wrote the file."""

from __future__ import annotations

import json

import evaluation_numbers
import numpy as np
import pytest
import torch

from vitreous.evaluation.protocols import list_protocols

# Models in float64: sums in another order differ by 1e-13; a score of another method, class or pixel by far more.
RELATIVE = 1e-9
ABSOLUTE = 1e-12


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only wait for each other's threads
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", evaluation_numbers.stored_names())
def test_numbers_are_those_from_before(name, tmp_path):
    stored = evaluation_numbers.load(name)
    found = evaluation_numbers.numbers_of(name, tmp_path)
    assert json.loads(str(found["names"])) == json.loads(str(stored["names"]))
    for part in ("values", "summary"):
        np.testing.assert_allclose(found[part], stored[part], rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)


def test_every_protocol_is_stored():
    # Prompts need a dual encoder; tests/evaluation/test_protocols_targets.py has their closed form.
    classified = {protocol.name for protocol in list_protocols() if protocol.prompt is None}
    assert set(evaluation_numbers.stored_names()) == classified


@pytest.mark.parametrize("name", evaluation_numbers.stored_names())
def test_the_numbers_are_of_use(name):
    """Nothing failed, and methods differ."""
    stored = evaluation_numbers.load(name)
    assert json.loads(str(stored["names"]))["failures"] == 0
    means = stored["summary"][:, 0]
    assert np.isfinite(means).mean() > 0.9
    assert len(np.unique(means)) > 3
