"""All spellings of a function give its logits, and the values that the reference names are those the model passes."""

from __future__ import annotations

import pytest
import torch

from spelling_reference import CLASSES, DEPTH, HEADS, PATCHES, VARIANTS, images, reference, weights
from spelling_variants import ALL, SPELLINGS, build

# Float64; sums in another order through three blocks. A wrong term shows far above.
AGREES = {"rtol": 1e-11, "atol": 1e-12}


def test_there_are_many():
    assert set(SPELLINGS) == set(VARIANTS)
    assert len(SPELLINGS["plain"]) >= 30


@pytest.mark.parametrize(("variant", "name"), ALL, ids="-".join)
def test_logits_are_those_of_the_reference(variant, name):
    given, pictures = weights(), images()
    with torch.no_grad():
        found = build(variant, name, given)(pictures)
    torch.testing.assert_close(found, reference(given, pictures, variant).logits.detach(), **AGREES)


def test_variants_are_different_functions():
    given, pictures = weights(), images()
    logits = torch.stack([reference(given, pictures, variant).logits.detach() for variant in VARIANTS])
    differences = (logits[:, None] - logits[None]).abs().amax(dim=(2, 3)) + torch.eye(len(VARIANTS))
    assert differences.min() > 1e-2


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_of_the_reference(variant):
    """Shapes, rows of A that sum to 1, and a stream by which the logits can be derived."""
    run = reference(weights(), images(), variant)
    tokens = PATCHES + (variant != "mean_pooled")
    assert len(run.x) == DEPTH + 1
    assert run.logits.shape == (2, CLASSES)
    for matrix, heads, written in zip(run.attention, run.heads, run.written, strict=True):
        assert matrix.shape == (2, HEADS, tokens, tokens)
        assert heads.shape == written.shape == run.x[0].shape
        if variant != "talking_heads":
            torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]), **AGREES)
    gradients = torch.autograd.grad(run.logits[:, 1].sum(), [*run.x[:-1], *run.attention])
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients)


@pytest.mark.parametrize("variant", ["plain", "shared", "interpolated", "gated_values", "mean_pooled"])
def test_the_stream_of_the_reference_is_the_blocks_input(variant):
    given, pictures = weights(), images()
    model = build(variant, next(iter(SPELLINGS[variant])), given)
    seen = []
    blocks = [model.block] if variant == "shared" else model.blocks
    for block in blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    with torch.no_grad():
        model(pictures)
    for found, expected in zip(seen, reference(given, pictures, variant).x, strict=False):
        torch.testing.assert_close(found, expected.detach(), **AGREES)
    assert len(seen) == DEPTH
