"""The statistics of audits against values that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vitreous.auditing.collected import name_of_place, places_of
from vitreous.auditing.suspicions import cluster
from vitreous.auditing.testing import adjust, permutation_test, sign_flip


def test_sign_flip_is_exact_for_few_pairs():
    assert sign_flip(np.ones(5)) == 1 / 32  # one of all signs gives as much
    assert sign_flip(np.array([1.0, -1.0])) == 0.75  # 0 or more: three of four
    assert sign_flip(-np.ones(4)) == 1.0
    assert sign_flip(np.zeros(6)) == 1.0


def test_sign_flip_of_many_pairs_has_a_floor():
    assert sign_flip(np.ones(40)) == 1 / 10_000
    # Under no effect p is as likely below 0.1 as it says; 200 draws have a deviation of 0.02.
    random = np.random.default_rng(0)
    low = [sign_flip(random.standard_normal(30), seed) <= 0.1 for seed in range(200)]
    assert abs(np.mean(low) - 0.1) < 0.06


def test_benjamini_hochberg():
    # Worked out by hand: 4 p / rank, then the minimum from the largest down.
    assert adjust([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.5])
    assert adjust([]) == []


def test_places_of_a_grid():
    places = places_of((8, 8))
    assert {name: int(region.sum()) for name, region in places.items()} == {
        "upper-left corner": 4,
        "upper-right corner": 4,
        "lower-left corner": 4,
        "lower-right corner": 4,
        "upper edge": 8,
        "lower edge": 8,
        "left edge": 8,
        "right edge": 8,
        "border": 28,
    }
    assert all(name_of_place(region, (8, 8)) == name for name, region in places.items())
    assert places["lower-left corner"].reshape(8, 8)[6:, :2].all()
    assert places_of((3, 8)) == {}
    middle = np.zeros((8, 8), dtype=bool)
    middle[3:5, 3:5] = True
    assert name_of_place(middle.ravel(), (8, 8)) == "centre"
    middle = np.zeros((8, 8), dtype=bool)
    middle[1:4, 3:5] = True
    assert name_of_place(middle.ravel(), (8, 8)) == "upper part"


def test_clusters_are_found_where_there_are_some():
    random = np.random.default_rng(0)
    table = random.standard_normal((60, 5)) * 0.1
    table[40:] += 3.0
    labels = cluster(table, 6, 0)
    assert len(set(labels[:40])) == len(set(labels[40:])) == 1
    assert labels[0] != labels[-1]
    assert set(cluster(np.zeros((20, 3)), 6, 0)) == {-1}


def test_permutations_of_labels_are_as_likely_as_they_say():
    own = np.arange(8) < 4
    # One of the 70 choices of four values of eight has as high a sum; the observed one counts besides.
    p = permutation_test(np.array([5.0, 6, 7, 8, 1, 2, 3, 4]), own)
    assert abs(p - 1 / 70) < 0.004  # three deviations of 9,999 draws
    assert permutation_test(np.zeros(8), own) == 1.0
    random = np.random.default_rng(0)
    low = [permutation_test(random.standard_normal(20), np.arange(20) < 7, seed) <= 0.1 for seed in range(100)]
    assert abs(np.mean(low) - 0.1) < 0.09
