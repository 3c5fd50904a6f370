"""Relevance through what third-party models have and timm's do not: each against an equal model that has it not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import vitreous
from vitreous.speed.timing import one_thread

WIDTH, HEADS = 12, 2
EXACT = {"rtol": 1e-9, "atol": 1e-12}  # float64: the same sums in another order
METHODS = ["transattr", "lrp", "plrp"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def convolved(model: Small, pictures: Tensor) -> Tensor:
    return model.patch(pictures).flatten(2).mT


def linear(model: Small, pictures: Tensor) -> Tensor:
    """The same patches, cut out and multiplied."""
    patches = pictures.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    return F.linear(patches, model.patch.weight.flatten(1), model.patch.bias)


def viewed(model: Small, pictures: Tensor) -> Tensor:
    rows, columns = pictures.shape[2] // 8, pictures.shape[3] // 8
    patches = pictures.reshape(-1, 3, rows, 8, columns, 8).permute(0, 2, 4, 1, 3, 5).reshape(-1, rows * columns, 192)
    return F.linear(patches, model.patch.weight.flatten(1), model.patch.bias)


def padded(model: Small, pictures: Tensor) -> Tensor:
    return convolved(model, F.pad(pictures, (0, 0, 0, 0))).flip(1).flip(1)


def one_of_one(model: Small, pictures: Tensor) -> Tensor:
    grid = model.patch(pictures)
    return F.max_pool2d(grid, 1).flatten(2).mT


class Small(nn.Module):
    def __init__(
        self,
        embed: Callable[[Small, Tensor], Tensor] = convolved,
        bias: Tensor | None = None,
        unit: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__()
        self.embed, self.bias, self.unit = embed, bias, unit
        self.patch, self.qkv, self.out = nn.Conv2d(3, WIDTH, 8, 8), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.cls, self.head = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Linear(WIDTH, 4, bias=False)
        self.double().eval()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                parameter.copy_(0.3 * noise + (parameter.dim() == 1))

    def forward(self, pictures: Tensor) -> Tensor:
        tokens = self.embed(self, pictures)
        x = torch.cat([self.cls.expand(len(tokens), -1, -1), tokens], dim=1)
        for _ in range(2):
            q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            scores = q @ k.mT * 0.4
            attention = (scores if self.bias is None else scores + self.bias).softmax(dim=-1)
            x = x + self.out((attention @ v).transpose(1, 2).flatten(2))
            x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        feature = self.norms[2](x)[:, 0]
        return self.head(F.normalize(feature, dim=-1) if self.unit else feature)


def pictures() -> Tensor:
    return torch.randn(2, 3, 24, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def maps(model: nn.Module, methods: list[str]) -> dict[str, Tensor]:
    return vitreous.explain(model, pictures(), methods, 1).scores


@pytest.mark.parametrize("embed", [linear, viewed])
def test_a_linear_layer_on_patches_is_a_patch_embedding(embed: Callable[..., Tensor]) -> None:
    methods = [*METHODS, "abslrp"]
    expected, found = maps(Small(), methods), maps(Small(embed), methods)
    for method in methods:
        torch.testing.assert_close(found[method], expected[method], **EXACT)


@pytest.mark.parametrize("embed", [padded, one_of_one])
def test_padding_and_maxima_hand_relevance_on(embed: Callable[..., Tensor]) -> None:
    expected, found = maps(Small(), METHODS), maps(Small(embed), METHODS)
    for method in METHODS:
        torch.testing.assert_close(found[method], expected[method], **EXACT)


def test_what_is_added_to_scores_gets_no_relevance() -> None:
    """The same number for all keys of a query changes no weight, and has to change no relevance."""
    row = torch.linspace(-3, 3, 7, dtype=torch.float64)[:, None].expand(7, 7)
    expected, found = maps(Small(), METHODS), maps(Small(bias=row), METHODS)
    for method in METHODS:
        torch.testing.assert_close(found[method], expected[method], **EXACT)
    other = torch.linspace(-3, 3, 49, dtype=torch.float64).view(7, 7)
    for method, scores in maps(Small(bias=other), METHODS).items():
        assert not torch.allclose(scores, expected[method], rtol=1e-3)


def test_biases_of_scores_are_refused_where_modules_are_scaled() -> None:
    with pytest.raises(vitreous.errors.UnsupportedModelError, match="for which abslrp has no rule"):
        maps(Small(bias=torch.ones(7, 7, dtype=torch.float64).triu()), ["abslrp"])


def test_unit_length_is_a_norm() -> None:
    """Shares in a linear layer do not depend on the length of what enters it."""
    expected, found = maps(Small(), METHODS), maps(Small(unit=True), METHODS)
    for method in METHODS:
        # transattr multiplies with the gradient, which does depend on it: as a map, up to no factor at all.
        if method != "transattr":
            # 1e-9 is added to denominators of about 1e-1.
            torch.testing.assert_close(found[method], expected[method], rtol=1e-6, atol=1e-9)


def test_gradients_of_unit_length_are_the_ordinary_ones_beside_relevance() -> None:
    alone = {method: maps(Small(unit=True), [method])[method] for method in ("ixg", "decompx", "ixg:rule=libra", "lrp")}
    together = maps(Small(unit=True), list(alone))
    for method, expected in alone.items():
        torch.testing.assert_close(together[method], expected, **EXACT)


def test_what_lies_in_front_of_the_blocks_does_not_matter_to_what_ends_there() -> None:
    """lrp goes to the pixels, through a step without a rule; plrp ends in the last block."""

    def odd(model: Small, images: Tensor) -> Tensor:
        return torch.sin(convolved(model, images))

    alone = maps(Small(odd), ["plrp"])["plrp"]
    with pytest.raises(vitreous.errors.UnsupportedModelError, match=r"lrp cannot explain.*sin\(\)") as refusal:
        maps(Small(odd), ["plrp", "lrp"])
    assert "plrp" in str(refusal.value).partition("work on it")[2]
    assert alone.isfinite().all()
