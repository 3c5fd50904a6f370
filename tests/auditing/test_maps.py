"""What is kept of every photo for an audit: maps in half precision, objects, colours, and files that show damage."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

import vitreous
from audited import GRID, NAMES, Squares, reader
from vitreous.auditing.collected import read_collected
from vitreous.evaluation.evaluate import evaluate
from vitreous.evaluation.protocols import find_protocol, list_protocols
from vitreous.evaluation.run import content_hash, schema_of
from vitreous.evaluation.tasks.patch_masking import estimated_object


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    out = tmp_path_factory.mktemp("maps")
    results = evaluate(
        reader(), Squares(9, masks=True), "audit-maps", "gae", out=out, controls=False, threads=1, shard_size=4
    )
    return results.stores[0]


def test_maps_are_those_of_explain_in_half_precision(stored):
    found = read_collected(stored)
    data = Squares(9)
    assert found.names == tuple(map(data.name, range(9)))
    for index in (0, 1, 5):
        explanation = vitreous.explain(reader(), [data.load(index).image], "gae")
        scores = explanation.scores["gae"].flatten().numpy()
        # Half precision keeps 11 bits: a relative error of 2^-11, and 2^-25 near 0.
        np.testing.assert_allclose(found.maps[index], scores / np.abs(scores).max(), rtol=2**-11, atol=2**-25)
    assert found.maps.dtype == np.float16
    assert found.grid == (GRID, GRID)


def test_objects_classes_and_colours(stored):
    found = read_collected(stored)
    np.testing.assert_array_equal(found.predicted, found.label)  # the model reads these photos without a mistake
    np.testing.assert_array_equal(found.objects.sum(axis=1), 4)
    assert found.masked.all()
    # Patches that the object touches at all are no background.
    np.testing.assert_array_equal(found.background.sum(axis=1), GRID * GRID - 4)
    for index in (1, 2):  # without a stamp
        pixels = np.asarray(Squares(9).load(index).image, dtype=np.float64)
        outer = np.ones((32, 32), dtype=bool)
        outer[5:-5, 5:-5] = False
        # The model sees (x / 255 - 0.5) / 0.5, so 2 x / 255 above black.
        np.testing.assert_allclose(found.colours[index], 2 * pixels[outer].mean(axis=0) / 255, rtol=1e-6)


def test_shares_are_what_lies_above_the_mean(stored):
    found = read_collected(stored)
    np.testing.assert_allclose(found.shares.sum(axis=1), 1.0, rtol=1e-5)
    assert (found.shares >= 0).all()
    stamp = np.zeros((GRID, GRID), dtype=bool)
    stamp[6:, :2] = True
    stamped = found.predicted == NAMES.index("stamped")
    assert (found.shares[stamped][:, stamp.ravel()].sum(axis=1) > 0.5).all()


def test_a_changed_map_changes_the_hash():
    schema = schema_of(["x", "map[]"])
    rows = {"index": [0, 1], "image": ["a", "b"], "method": ["m", "m"], "error": [None, "e"], "x": [1.0, None]}

    def table(values):
        return pa.table({**rows, "map[]": values}, schema=schema)

    first = table([np.array([0.5, 1.0], np.float16), None])
    assert content_hash(first) == content_hash(table([np.array([0.5, 1.0], np.float16), None]))
    others = [
        [np.array([0.5, 0.9995], np.float16), None],  # the next number of half precision
        [np.array([0.5], np.float16), None],
        [np.array([0.5, 1.0], np.float16), np.array([], np.float16)],
        [np.array([0.5], np.float16), np.array([1.0], np.float16)],
    ]
    assert len({content_hash(first), *(content_hash(table(values)) for values in others)}) == 5


def test_a_damaged_shard_is_reported(stored, tmp_path):
    file = min(stored.folder.glob("shard-*.parquet"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    kept = file.read_bytes()
    file.write_bytes(content)
    told = []
    try:
        assert len(stored.missing(told.append)) == 1
    finally:
        file.write_bytes(kept)
    assert "it is recomputed" in told[0]


def test_the_object_is_estimated_where_tokens_are_unlike_the_outer_ones():
    tokens = torch.zeros(8, 8, 4, dtype=torch.float64)
    tokens[..., 0] = 1.0
    tokens[3:5, 2:5] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    found = estimated_object(tokens.reshape(64, 4), (8, 8)).reshape(8, 8)
    expected = torch.zeros(8, 8, dtype=torch.float64)
    expected[3:5, 2:5] = 1.0
    assert torch.equal(found, expected)


def test_the_protocol_is_found_by_name_but_not_listed():
    assert find_protocol("audit-maps").tasks[0].metrics == ()
    assert "audit-maps" not in {protocol.name for protocol in list_protocols()}
