"""What a model multiplies its written-out attention scores with weighs GradToken's heads, however it is spelled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import largest_difference, random_images, randomise, small_vit
from vitreous.speed.timing import one_thread

# Float64: the same arithmetic in another order, 1e-15 per step; a lost factor shows far above 1e-10.
EXACT = 1e-10
HEADS = 3
METHOD = "gradtoken:propagation=none,heads=average"

Step = Callable[[Tensor, Tensor], Tensor]  # what becomes of scores, given a number for every head


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def in_place(scores: Tensor, temperature: Tensor) -> Tensor:
    scores *= temperature
    return scores


KNOWN: dict[str, Step] = {
    "a number": lambda scores, _: scores * 0.7,
    "a number in a tensor": lambda scores, _: scores / torch.tensor(3.0, dtype=torch.float64).sqrt(),
    "a number for every head": lambda scores, temperature: scores * temperature,
    "in front of the scores": lambda scores, temperature: temperature * scores,
    "divided by": lambda scores, temperature: scores / temperature[None],
    "in place": in_place,
    "made of a parameter": lambda scores, temperature: scores * temperature.exp(),
    "several": lambda scores, temperature: (scores * temperature).contiguous() / 2 * temperature + 0.3,
}
# What nobody follows, but what is the same as a factor in the end.
MEASURED: dict[str, Step] = {
    "without its largest": lambda scores, _: scores * 0.7 - (scores * 0.7).amax(dim=-1, keepdim=True),
    "kept in bounds": lambda scores, temperature: (scores * temperature).clamp(-1e4, 1e4),
    "in another shape": lambda scores, temperature: (scores * temperature).view(scores.shape),
}
FOLLOWED: dict[str, Step] = {
    "capped": lambda scores, _: torch.tanh(scores),
    "by the tokens": lambda scores, _: scores * scores.mean(dim=-1, keepdim=True),
    "for every token": lambda scores, _: scores * torch.linspace(0.5, 1.5, scores.shape[-1], dtype=scores.dtype),
}


class Tempered(nn.Module):
    """Attention that does something to its scores."""

    def __init__(self, step: Step, width: int = 24) -> None:
        super().__init__()
        self.step = step
        self.projection, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        parts = self.projection(tokens).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        self.query, self.key, value = parts.unbind()
        weights = self.step(self.query @ self.key.transpose(-2, -1), self.temperature).softmax(dim=-1)
        return self.output((weights @ value).transpose(1, 2).flatten(2))


def tempered(step: Step) -> nn.Module:
    model = small_vit(depth=2)
    for block in model.blocks:
        block.attn = Tempered(step)
    model = randomise(model, 3).double()
    for block in model.blocks:
        block.attn.temperature.data = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64).view(HEADS, 1, 1)
    return model


def expected_map(model: nn.Module, images: Tensor, target: int) -> Tensor:
    """mean_h k_h . Σ_i dy_c/dq_i of the last block, by autograd."""
    logits, attention = model(images), model.blocks[-1].attn
    (gradient,) = torch.autograd.grad(logits[:, target].sum(), attention.query)
    return torch.einsum("bhnk,bhk->bhn", attention.key, gradient.sum(dim=2)).mean(dim=1)[:, 1:]


@pytest.mark.parametrize("beside", [[], ["decompx"], ["fullgrad"]], ids=str)
@pytest.mark.parametrize("form", KNOWN | MEASURED | FOLLOWED)
def test_heads_weigh_what_their_scores_are_multiplied_with(form, beside):
    """Also where other methods in the same call have other operations intercepted."""
    model, images = tempered((KNOWN | MEASURED | FOLLOWED)[form]), random_images()
    found = vitreous.explain(model, images, [METHOD, *beside], 1).scores[METHOD]
    assert largest_difference(found, expected_map(model, images, 1)) < EXACT


def test_a_factor_that_is_measured_leaves_the_map_as_it_is_in_float32():
    """By least squares over a row of rounded scores: 1e-4 of the largest is what is taken for the same."""
    model, images = tempered(MEASURED["kept in bounds"]), random_images()
    expected = expected_map(model, images, 1).detach()
    found = vitreous.explain(model.float(), images.float(), METHOD, 1).scores[METHOD].double()
    assert largest_difference(found, expected) < 1e-4 * float(expected.abs().max())
