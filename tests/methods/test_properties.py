"""Properties that hold whatever the images, weights and classes are; examples are drawn by hypothesis, always the same.

All in float64. ``ROUNDING`` is what two orders of the same arithmetic may differ by, as a part of the largest score:
some hundred roundings of 1e-16 and the loss of digits where signed terms cancel.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitreous
from small_models import CLASSES, PATCHES, SIZE, largest_difference, random_images, small_vit
from vitreous.speed.timing import one_thread

ROUNDING = 1e-11

LINEAR = ["ixg", "decompx", "cat", "attixg", "attcat", "decompx.plus", "decompx.skipplus", "decompx.skipplus.propagate"]
HOMOGENEOUS = [*LINEAR, "gradient", "gradtoken", "gradtoken:heads=average", "gradsam", "attcam"]
WITHOUT_GRADIENT = ["raw_attention", "rollout"]
METHODS = [*HOMOGENEOUS, *WITHOUT_GRADIENT, "gae", "tokentm", "tokentm:gradient=logit", "tokentm:variant=third_party"]

seeds = st.integers(0, 10_000)
classes = st.integers(0, CLASSES - 1)
factors = st.floats(-3, 3, allow_nan=False).filter(lambda value: abs(value) > 1e-2)
drawn = settings(max_examples=6, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def model_of(seed):
    return small_vit(depth=3, seed=seed, reg_tokens=seed % 3)


def explain(model, images, methods, target):
    return vitreous.explain(model, images, methods, target=target).scores


def check(found, expected, tolerance=ROUNDING):
    assert set(found) == set(expected)
    for name, maps in found.items():
        assert largest_difference(maps, expected[name]) < tolerance, name


# Batches --------------------------------------------------------------------------------------------------------------


@drawn
@given(seeds, st.permutations(range(4)), st.lists(classes, min_size=4, max_size=4))
def test_permuting_the_images_permutes_the_maps(seed, order, target):
    model, images = model_of(seed), random_images(4, seed)
    straight = explain(model, images, METHODS, target)
    permuted = explain(model, images[order], METHODS, [target[number] for number in order])
    check(permuted, {name: maps[order] for name, maps in straight.items()})


@drawn
@given(seeds, st.integers(0, 2), classes)
def test_an_image_alone_is_explained_as_in_a_batch(seed, number, target):
    model, images = model_of(seed), random_images(3, seed)
    together = explain(model, images, METHODS, target)
    alone = explain(model, images[number : number + 1], METHODS, target)
    check(alone, {name: maps[number : number + 1] for name, maps in together.items()})


# The head -------------------------------------------------------------------------------------------------------------


def with_head(model, change):
    """A copy whose head's weight and bias went through ``change``."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        change(changed.head.weight, changed.head.bias)
    return changed


@drawn
@given(seeds, factors, factors)
def test_a_class_that_is_a_sum_of_two_is_explained_by_their_sum(seed, a, b):
    def combine(weight, bias):
        weight[4] = a * weight[0] + b * weight[1]
        bias[4] = a * bias[0] + b * bias[1]

    model, images = with_head(model_of(seed), combine), random_images(2, seed)
    first, second, combined = (explain(model, images, LINEAR, target) for target in (0, 1, 4))
    for name in LINEAR:
        parts = (a * first[name], b * second[name])
        difference = (combined[name] - sum(parts)).abs().max()
        # Against the size of the parts: their sum may cancel.
        assert difference < ROUNDING * max(part.abs().max() for part in parts), name


def test_other_methods_are_not_linear_in_the_class():
    """So the property above is one that a method can fail."""

    def combine(weight, bias):
        weight[4] = weight[0] - 2 * weight[1]

    model, images = with_head(model_of(1), combine), random_images(2)
    for name in ("gae", "gradsam", "gradient", "gradtoken", "tokentm"):
        first, second, combined = (explain(model, images, [name], target)[name] for target in (0, 1, 4))
        assert largest_difference(first - 2 * second, combined) > 0.01, name


@drawn
@given(seeds, st.floats(0.01, 100), classes)
def test_a_head_times_a_factor_gives_maps_times_that_factor(seed, factor, target):
    def scale(weight, bias):
        weight *= factor
        bias *= factor

    model, images = model_of(seed), random_images(2, seed)
    before = explain(model, images, [*HOMOGENEOUS, *WITHOUT_GRADIENT], target)
    after = explain(with_head(model, scale), images, [*HOMOGENEOUS, *WITHOUT_GRADIENT], target)
    for name in HOMOGENEOUS:
        assert largest_difference(after[name], factor * before[name]) < ROUNDING, name
    for name in WITHOUT_GRADIENT:
        assert torch.equal(after[name], before[name]), name


@drawn
@given(seeds, st.floats(-20, 20), classes)
def test_a_constant_added_to_all_logits_changes_no_map(seed, constant, target):
    """The gradient of a logit does not see it, and softmax takes it out again.

    For TokenTM the softmax of logits that are up to 20 larger is rounded 20 times more coarsely.
    """

    def shift(weight, bias):
        bias += constant

    model, images = model_of(seed), random_images(2, seed)
    check(explain(with_head(model, shift), images, METHODS, target), explain(model, images, METHODS, target))


@drawn
@given(seeds, st.permutations(range(CLASSES)), classes)
def test_the_order_of_the_classes_does_not_matter(seed, order, target):
    def reorder(weight, bias):
        weight.copy_(weight[order])
        bias.copy_(bias[order])

    model, images = model_of(seed), random_images(2, seed)
    check(explain(with_head(model, reorder), images, METHODS, target), explain(model, images, METHODS, order[target]))


# Inside the model -----------------------------------------------------------------------------------------------------


@drawn
@given(seeds, st.permutations(range(3)), classes)
def test_the_order_of_the_heads_does_not_matter(seed, order, target):
    model, images = model_of(seed), random_images(2, seed)
    reordered = copy.deepcopy(model)
    with torch.no_grad():
        attention = reordered.blocks[1].attn
        for parameter in (attention.qkv.weight, attention.qkv.bias):
            by_head = parameter.unflatten(0, (3, 3, 8))  # q, k, v; head; channel
            parameter.copy_(by_head[:, order].flatten(0, 2))
        attention.proj.weight.copy_(attention.proj.weight.unflatten(1, (3, 8))[:, order].flatten(1))
    check(explain(reordered, images, METHODS, target), explain(model, images, METHODS, target))


@drawn
@given(seeds, st.permutations(range(PATCHES)), classes)
def test_moving_the_patches_with_their_positions_moves_the_map(seed, order, target):
    model, images = model_of(seed), random_images(2, seed)
    side = SIZE // 8
    patches = images.unflatten(2, (side, 8)).unflatten(4, (side, 8)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    moved_images = patches[:, order].unflatten(1, (side, side)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    moved = copy.deepcopy(model)
    prefix = model.num_prefix_tokens
    with torch.no_grad():
        positions = model.pos_embed
        moved.pos_embed.copy_(torch.cat([positions[:, :prefix], positions[:, prefix:][:, order]], dim=1))
    expected = {name: maps[:, order] for name, maps in explain(model, images, METHODS, target).items()}
    check(explain(moved, moved_images, METHODS, target), expected)


@drawn
@given(seeds, classes)
def test_rows_of_a_rollout_sum_to_one_with_the_prefix(seed, target):
    """What the patches get and what stays on class token and registers is all there is."""
    model, images = model_of(seed), random_images(2, seed)
    scores = explain(model, images, ["rollout", "raw_attention"], target)
    for maps in scores.values():
        assert (maps >= 0).all()
        assert (maps.sum(dim=1) < 1).all()
        assert (maps.sum(dim=1) > 0).all()
