"""The grid of patches that were cut out without a convolution is the one that the picture's edges show."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import vitreous
from small_models import randomise, small_vit
from vitreous.errors import InputError, UnsupportedModelError

WIDTH = 24


def cut(images: Tensor, height: int, width: int) -> Tensor:
    """Patches side by side, row by row: (batch, row, column, pixels)."""
    return images.unfold(2, height, height).unfold(3, width, width).permute(0, 2, 3, 1, 4, 5).flatten(3)


def squares(images: Tensor) -> Tensor:
    return cut(images, 8, 8).flatten(1, 2)


def reshaped(images: Tensor) -> Tensor:
    """As einops writes "b c (h p) (w q) -> b (h w) (p q c)"."""
    batch, channels, height, width = images.shape
    parts = images.reshape(batch, channels, height // 8, 8, width // 8, 8)
    return parts.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, 64 * channels)


def flat_ones(images: Tensor) -> Tensor:
    return cut(images, 4, 16).flatten(1, 2)


def overlapping(images: Tensor) -> Tensor:
    return F.unfold(images, 8, stride=4).mT


def by_columns(images: Tensor) -> Tensor:
    return cut(images, 8, 8).transpose(1, 2).flatten(1, 2)


class LinearPatches(nn.Module):
    """Patches through a linear layer, behind so many tokens of the model's own, and through a ViT's blocks."""

    def __init__(self, patches, prefix: int, *, pool: str = "token", normalised: bool = False) -> None:
        super().__init__()
        self.patches, self.pool = patches, pool
        self.embedding = nn.Sequential(nn.LayerNorm(192) if normalised else nn.Identity(), nn.Linear(192, WIDTH))
        self.prefix_token = nn.Parameter(torch.empty(1, prefix, WIDTH))
        inside = small_vit(depth=2, embed_dim=WIDTH)
        self.blocks, self.norm, self.head = inside.blocks, inside.norm, inside.head
        randomise(self.double().eval())

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embedding(self.patches(images))
        tokens = torch.cat((self.prefix_token.expand(len(tokens), -1, -1), tokens), dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        tokens = self.norm(tokens)
        return self.head(tokens[:, 0] if self.pool == "token" else tokens[:, self.prefix_token.shape[1] :].mean(dim=1))


class WithMeanToken(LinearPatches):
    """One token in front says something of all pixels."""

    def forward(self, images: Tensor) -> Tensor:
        self.prefix_token.data[:] = 0
        mean = F.pad(images.mean(dim=(2, 3)), (0, WIDTH - 3))
        tokens = torch.cat((mean[:, None], self.embedding(self.patches(images))), dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens)[:, 0])


def pictures(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


GRIDS = {
    "squares": (LinearPatches(squares, 1), (32, 32), (4, 4), 1),
    "einops": (LinearPatches(reshaped, 1), (32, 32), (4, 4), 1),
    "a wide picture": (LinearPatches(reshaped, 1), (24, 40), (3, 5), 1),
    "one row": (LinearPatches(squares, 1), (8, 40), (1, 5), 1),
    "one column": (LinearPatches(squares, 1), (40, 8), (5, 1), 1),
    "normalised patches": (LinearPatches(squares, 1, normalised=True), (32, 32), (4, 4), 1),
    "no class token": (LinearPatches(squares, 0, pool="mean"), (32, 32), (4, 4), 0),
    "registers": (LinearPatches(squares, 5), (32, 32), (4, 4), 5),
    "flat patches": (LinearPatches(flat_ones, 1), (32, 64), (8, 4), 1),
    "overlapping patches": (LinearPatches(overlapping, 1), (32, 32), (7, 7), 1),
    "overlapping patches and their mean": (LinearPatches(overlapping, 0, pool="mean"), (32, 32), (7, 7), 0),
    "as many as another grid would have": (LinearPatches(squares, 16), (56, 56), (7, 7), 16),
    "a token of all pixels": (WithMeanToken(squares, 1), (32, 32), (4, 4), 1),
}


@pytest.mark.parametrize("case", GRIDS)
def test_the_grid_is_that_of_the_pixels(case):
    model, size, grid, prefix = GRIDS[case]
    images, inputs = pictures(*size), []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    (gradient,) = torch.autograd.grad(model(images)[:, 2].sum(), inputs)
    hook.remove()
    explanation = vitreous.explain(model, images, "ixg", target=2)
    assert explanation.grid == grid
    # Float64, the same operations.
    expected = (inputs[0] * gradient).sum(dim=-1)[:, prefix:]
    torch.testing.assert_close(explanation.scores["ixg"], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_does_not_hide_the_grid(dtype):
    model = LinearPatches(overlapping, 1).to(dtype)
    assert vitreous.explain(model, pictures(32, 32).to(dtype), "rollout").grid == (7, 7)


def behind_the_patches(images: Tensor) -> Tensor:
    return F.pad(squares(images), (0, 0, 0, 2))


@pytest.mark.parametrize("patches", [by_columns, behind_the_patches])
def test_what_is_not_laid_out_row_by_row_is_refused(patches):
    with pytest.raises(UnsupportedModelError, match="does not show rows of patches behind all other tokens"):
        vitreous.explain(LinearPatches(patches, 1), pictures(32, 32), "ixg")


def test_a_border_in_no_patch_is_refused():
    with pytest.raises(InputError, match="the last rows or columns of images of 34 x 36 pixels are in no patch"):
        vitreous.explain(LinearPatches(overlapping, 1), pictures(34, 36), "ixg")
