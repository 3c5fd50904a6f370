"""GradToken and the methods of attention where more lies between q kᵀ and A than a softmax.

q and k are the operands of q kᵀ, A is what multiplies the values, and dy/dq is autograd's own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitreous
from spelling_reference import HEADS, SCALE, images, reference, weights
from spelling_variants import build
from vitreous.speed.timing import one_thread

AGREES = {"rtol": 1e-9, "atol": 1e-12}  # float64: the same sums in another order


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def gradtoken(queries: Tensor, keys: Tensor, attention: list[Tensor], score: Tensor) -> Tensor:
    """Eqs. 6-18 with every matrix written out: M = k . dy/dq of the class token, Ā M, mean_h of the positive part."""
    slope = torch.autograd.grad(score.sum(), queries, retain_graph=True)[0].sum(dim=2)
    maps = (keys[:, :, 1:] * slope[:, :, None]).sum(-1)  # (batch, head, patch)
    below = [matrix.mean(dim=1)[:, 1:, 1:] for matrix in attention[:-1]]
    spread = torch.stack(below).sum(0) / len(attention)
    return (maps @ spread.transpose(1, 2)).clamp(min=0).mean(dim=1)


@pytest.mark.parametrize(
    ("variant", "name"),
    [("plain", "einsum"), ("talking_heads", "linear"), ("talking_heads", "einsum"), ("top_k", "masked")],
)
def test_gradtoken_is_its_equations_where_heads_or_scores_are_mixed(variant: str, name: str) -> None:
    given, pictures = weights(), images()
    run = reference(given, pictures, variant)
    expected = gradtoken(run.q[-1], run.k[-1], run.attention, run.logits[:, 1])
    model = build(variant, name, given)
    found = vitreous.explain(model, pictures, "gradtoken", 1).scores["gradtoken"]
    torch.testing.assert_close(found, expected.detach(), **AGREES)


class MixedBehind(nn.Module):
    """Heads are mixed behind the softmax alone, and rows no longer sum to 1 (DeepViT's re-attention)."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.patch, self.mix, self.cls = noise(24, 3, 8, 8), noise(HEADS, HEADS), noise(1, 1, 24)
        self.qkv, self.out, self.head = noise(2, 72, 24), noise(2, 24, 24), noise(4, 24)
        self.kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, pictures: Tensor) -> Tensor:
        self.kept = []
        x = nn.functional.conv2d(pictures, 0.1 * self.patch, stride=8).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        for layer in range(2):
            normed = nn.functional.layer_norm(x, (24,))
            q, k, v = (0.3 * normed @ self.qkv[layer].T).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            attention = (q @ k.mT * SCALE).softmax(dim=-1)
            attention = torch.einsum("gh,bhij->bgij", self.mix, attention)
            self.kept.append((q, k, attention))
            x = x + (attention @ v).transpose(1, 2).flatten(2) @ self.out[layer].T
        return nn.functional.layer_norm(x[:, 0], (24,)) @ self.head.T


def test_gradtoken_is_its_equations_where_heads_are_mixed_behind_the_softmax() -> None:
    model, pictures = MixedBehind(), images()
    score = model(pictures)[:, 1]
    (q, k, _), attention = model.kept[-1], [each[2] for each in model.kept]
    expected = gradtoken(q, k, attention, score).detach()
    found = vitreous.explain(model, pictures, "gradtoken", 1).scores["gradtoken"]
    torch.testing.assert_close(found, expected, **AGREES)


@pytest.mark.parametrize(("variant", "name"), [("talking_heads", "linear"), ("top_k", "masked")])
def test_gae_reads_the_weights_that_multiply_the_values(variant: str, name: str) -> None:
    given, pictures = weights(), images()
    run = reference(given, pictures, variant)
    slopes = torch.autograd.grad(run.logits[:, 1].sum(), run.attention)
    relevance = torch.eye(17, dtype=torch.float64).expand(2, -1, -1)
    for matrix, slope in zip(run.attention, slopes, strict=True):
        relevance = relevance + (matrix * slope).clamp(min=0).mean(dim=1) @ relevance
    found = vitreous.explain(build(variant, name, given), pictures, "gae", 1).scores["gae"]
    torch.testing.assert_close(found, relevance[:, 0, 1:].detach(), **AGREES)
