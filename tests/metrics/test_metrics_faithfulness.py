"""SaCo, single deletion, completeness, eMPRT: closed forms, literal pair loops, and quantus where it has the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vitreous.metrics import faithfulness as faith
from vitreous.metrics.metric import MetricError

# Sums of a few dozen numbers of order 1 in float64, in another order.
ROUNDING = 1e-12
VALUES = st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 3))


def literal_saco(saliences, effects) -> float:
    """The pairs, one after the other."""
    found, total = 0.0, 0.0
    for i in range(len(saliences)):
        for j in range(i + 1, len(saliences)):
            weight = saliences[i] - saliences[j]
            if effects[i] < effects[j]:
                weight = -weight
            found += weight
            total += abs(weight)
    return found / total


@given(arrays(float, 6, elements=VALUES, unique=True), arrays(float, 6, elements=VALUES))
def test_saco_is_its_loop_over_pairs(saliences, effects):
    falling = np.sort(saliences)[::-1]
    assert faith.salience_coefficient(falling, effects) == pytest.approx(literal_saco(falling, effects), abs=ROUNDING)


def test_saco_of_a_right_a_wrong_and_an_empty_order():
    saliences = np.array([[4.0, 2.0, 1.0]] * 2 + [[1.0, 1.0, 1.0]])
    effects = np.array([[0.9, 0.3, 0.1], [0.1, 0.3, 0.9], [0.9, 0.3, 0.1]])
    assert faith.salience_coefficient(saliences, effects).tolist() == [1.0, -1.0, 0.0]


def test_saco_counts_a_tie_of_effects_for_the_map_as_the_paper_does():
    assert faith.salience_coefficient([2.0, 1.0], [0.5, 0.5]) == 1.0


def test_groups_fall_in_salience_and_cover_everything_once():
    map_ = np.array([[0.1, 0.9, 0.5], [0.9, -1.0, 0.0]])
    groups = faith.salience_groups(map_, 3)
    assert [group.tolist() for group in groups] == [[1, 3], [2, 0], [5, 4]]
    with pytest.raises(MetricError, match="6 features cannot be divided into 7 groups"):
        faith.salience_groups(map_, 7)


def test_one_group_has_nothing_to_compare_with():
    with pytest.raises(MetricError, match="at least two groups"):
        faith.salience_coefficient([1.0], [1.0])


def test_single_deletion_of_constant_maps_and_outputs():
    assert faith.single_deletion_correlation([1.0, 1.0, 1.0], [0.1, 0.2, 0.3]) == 0.0
    assert np.isnan(faith.single_deletion_correlation([1.0, 2.0, 3.0], [0.2, 0.2, 0.2]))
    assert faith.single_deletion_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1, abs=ROUNDING)


def test_completeness_error_is_bounded_and_0_where_sums_agree():
    found = faith.completeness_error([0.0, 5.0, 5.0, 0.0], [0.0, 5.0, -5.0, 3.0])
    assert found.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_a_map_with_nan_is_refused():
    for measure in (faith.histogram_entropy, lambda map_: faith.salience_groups(map_, 2)):
        with pytest.raises(MetricError, match="not finite"):
            measure([0.0, np.nan, 1.0])


def test_rise_of_complexity_is_that_of_quantus():
    functions = pytest.importorskip("quantus.functions.complexity_func", reason="quantus comes with vitreous[peers]")
    random = np.random.default_rng(0)
    own, randomised = random.normal(size=(14, 14)) ** 3, random.normal(size=(14, 14))
    before, after = (functions.discrete_entropy(a=map_, x=map_) for map_ in (own, randomised))
    assert faith.histogram_entropy(own) == pytest.approx(before, abs=ROUNDING)
    assert faith.complexity_rise(own, randomised) == pytest.approx((after - before) / before, abs=ROUNDING)


def test_a_map_of_one_value_has_no_rise():
    assert np.isnan(faith.complexity_rise(np.ones(5), np.arange(5.0)))
