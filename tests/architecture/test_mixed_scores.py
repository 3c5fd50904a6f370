"""GradToken and the methods of attention where more lies between q kᵀ and A than a softmax.

q and k are the operands of q kᵀ, A is what multiplies the values, and dy/dq is autograd's own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitreous
from spelling_reference import DEPTH, HEADS, SCALE, TOP, Weights, embedded, images, reference, weights
from spelling_variants import ALL, build
from vitreous.speed.timing import one_thread

AGREES = {"rtol": 1e-9, "atol": 1e-12}  # float64: the same sums in another order
TARGET = torch.tensor([1, 3])


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


def half(product: Tensor) -> Tensor:
    """Each factor gets half of the gradient."""
    return (product + product.detach()) / 2


def attnlrp_by_hand(given: Weights, pictures: Tensor, variant: str) -> Tensor:
    """AttnLRP's rules by what is detached: deviations, f(u) / u, and half of every product."""

    def linear(name: str, tokens: Tensor) -> Tensor:
        return tokens @ given[f"{name}.weight"].T + given[f"{name}.bias"]

    def norm(name: str, tokens: Tensor) -> Tensor:
        centred = tokens - tokens.mean(dim=-1, keepdim=True)
        deviation = (centred.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt().detach()
        return centred / deviation * given[f"{name}.weight"] + given[f"{name}.bias"]

    def mixed(name: str, matrix: Tensor) -> Tensor:
        return torch.einsum("gh,bhij->bgij", given[name], matrix) if variant == "talking_heads" else matrix

    start = embedded(given, pictures).requires_grad_()
    tokens = start
    for layer in range(DEPTH):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in linear(f"{layer}.qkv", norm(f"{layer}.norm1", tokens)).chunk(3, dim=-1)
        )
        scores = mixed(f"{layer}.before", SCALE * half(q @ k.mT))
        if variant == "top_k":
            least = scores.sort(dim=-1, descending=True).values[..., TOP - 1 : TOP]
            scores = scores.masked_fill(scores < least, float("-inf"))
        heads = half(mixed(f"{layer}.after", scores.softmax(dim=-1)) @ v)
        tokens = tokens + linear(f"{layer}.out", heads.transpose(1, 2).flatten(2))
        hidden = linear(f"{layer}.fc1", norm(f"{layer}.norm2", tokens))
        gate = (torch.nn.functional.gelu(hidden) / hidden).detach()
        tokens = tokens + linear(f"{layer}.fc2", hidden * gate)
    logits = linear("head", norm("norm", tokens[:, 0]))
    (slope,) = torch.autograd.grad(logits.gather(1, TARGET[:, None]).sum(), start)
    return (start * slope).sum(dim=-1)[:, 1:].detach()


@pytest.mark.parametrize("beside", [[], ["gae", "decompx"]], ids=str)
@pytest.mark.parametrize("variant", ["plain", "talking_heads", "top_k"])
def test_attnlrp_follows_every_step_from_the_product_to_the_weights(variant: str, beside: list[str]) -> None:
    given, pictures = weights(), images()
    expected = attnlrp_by_hand(given, pictures, variant)
    for name in [name for each, name in ALL if each == variant][:3]:
        model = build(variant, name, given)
        found = vitreous.explain(model, pictures, ["attnlrp", *beside], TARGET).scores["attnlrp"]
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-10, name
