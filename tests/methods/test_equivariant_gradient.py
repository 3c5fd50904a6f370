"""DAVE: shifts by whole pixels by plain indexing and a written-out frozen model, moves, the low-pass."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import vitreous
from literal.ruled import run_under
from small_models import SIZE, largest_difference, random_images, small_vit
from vitreous.errors import MethodError
from vitreous.methods.integrated import EquivariantGradient, low_pass, warp
from vitreous.methods.spelling import parse

EXACT = 1e-10  # float64: sums of some thousand terms in another order


def frozen_pixel_gradient(model: nn.Module, image: Tensor, target: int) -> Tensor:
    """The gradient at the tokens of a model with constants detached, through the patch embedding's weights by hand."""
    run = run_under("frozen", model, image)
    (slope,) = torch.autograd.grad(run.logits[target], run.tokens[0])
    weight, pixels = model.patch_embed.proj.weight.detach(), torch.zeros_like(image)
    for number, row in enumerate(slope[model.num_prefix_tokens :]):
        top, left = 8 * (number // 4), 8 * (number % 4)
        pixels[:, top : top + 8, left : left + 8] = torch.einsum("d,dchw->chw", row, weight)
    return pixels


def shifted(image: Tensor, down: int, right: int) -> Tensor:
    """Read at a place that far down and right of each pixel; the edge repeats."""
    places = torch.arange(SIZE)
    return image[:, (places + down).clamp(0, SIZE - 1)][:, :, (places + right).clamp(0, SIZE - 1)]


def smoothed(image: Tensor, deviation: float) -> Tensor:
    """By four nested loops' worth of shifts."""
    reach = math.ceil(4 * deviation)
    weights = {offset: math.exp(-(offset**2) / (2 * deviation**2)) for offset in range(-reach, reach + 1)}
    total = sum(weights.values())
    rows = sum(weight / total * shifted(image, offset, 0) for offset, weight in weights.items())
    return sum(weight / total * shifted(rows, 0, offset) for offset, weight in weights.items())


def test_the_formula(monkeypatch):
    model, images = small_vit(), random_images()
    shifts = [(0, 0), (2, -3), (-4, 1)]

    def moves(_self: EquivariantGradient, _grid: tuple[int, int]) -> Tensor:
        found = torch.eye(3, dtype=torch.float64).repeat(len(shifts), 1, 1)
        found[:, 0, 2] = torch.tensor([right * 2 / SIZE for _, right in shifts])
        found[:, 1, 2] = torch.tensor([down * 2 / SIZE for down, _ in shifts])
        return found

    monkeypatch.setattr(EquivariantGradient, "moves", moves)
    spelling = "dave:samples=3,blur=0.1,resolution=pixel"
    found = vitreous.explain(model, images, [spelling, "dave:samples=3,blur=0.1"], [1, 3]).scores
    expected = []
    for image, target in zip(images, (1, 3), strict=True):
        slopes = [
            shifted(frozen_pixel_gradient(model, shifted(image, down, right), target), -down, -right)
            for down, right in shifts
        ]
        expected.append((image * smoothed(sum(slopes) / 3, 0.8)).sum(dim=0))
    pixels = torch.stack(expected)
    assert largest_difference(found[spelling], pixels.flatten(1)) < EXACT
    patches = pixels.unflatten(1, (4, 8)).unflatten(3, (4, 8)).sum(dim=(2, 4)).flatten(1)
    assert largest_difference(found["dave:samples=3,blur=0.1"], patches) < EXACT


def test_one_sample_without_blur_is_input_times_the_frozen_gradient():
    model, images = small_vit(), random_images(1)
    spelling = "dave:samples=1,blur=0,resolution=pixel"
    found = vitreous.explain(model, images, spelling, 2).scores[spelling]
    expected = (images[0] * frozen_pixel_gradient(model, images[0], 2)).sum(dim=0)
    assert largest_difference(found[0], expected.flatten()) < EXACT


def test_moves_stay_within_their_bounds_and_come_from_the_seed():
    options = {"resolution": "patch", "samples": 50, "angle": 5.0, "shift": 0.5, "blur": 0.0}
    moves = EquivariantGradient(**options, seed=3).moves((4, 4))
    assert torch.equal(moves[0], torch.eye(3, dtype=torch.float64))
    assert float(moves[:, :2, 2].abs().max()) <= 0.5 * 2 / 4
    assert float(torch.asin(moves[:, 1, 0]).abs().max()) <= math.radians(5)
    assert torch.equal(moves, EquivariantGradient(**options, seed=3).moves((4, 4)))
    assert not torch.equal(moves, EquivariantGradient(**options, seed=4).moves((4, 4)))


def test_a_quarter_turn_is_that_of_torch():
    image = torch.arange(16.0, dtype=torch.float64).view(1, 1, 4, 4)
    turn = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    turned = warp(image, turn)
    assert any(torch.allclose(turned, torch.rot90(image, number, (2, 3))) for number in (1, 3))
    torch.testing.assert_close(warp(turned, torch.linalg.inv(turn)), image)


def test_the_low_pass_keeps_what_is_flat():
    flat = torch.full((1, 2, 6, 5), 3.0, dtype=torch.float64)
    torch.testing.assert_close(low_pass(flat, [1.5, 0.7]), flat)


def test_what_cannot_be_is_refused():
    with pytest.raises(MethodError, match="at least 1"):
        parse("dave:samples=0")
    assert parse("dave").signed
