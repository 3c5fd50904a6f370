"""The grid is the one that the picture's edges show, also where a convolution made the patches and says another."""

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


class ConvolutionPatches(nn.Module):
    """What a stem makes of a picture, laid out in tokens between a class token and registers, and a ViT's blocks."""

    def __init__(self, stem: nn.Module | None = None, lay_out=lambda made: made.flatten(2).mT, behind: int = 0) -> None:
        super().__init__()
        self.stem, self.lay_out = stem or nn.Conv2d(3, WIDTH, 8, 8), lay_out
        self.class_token, self.registers = (nn.Parameter(torch.empty(1, count, WIDTH)) for count in (1, behind))
        inside = small_vit(depth=2, embed_dim=WIDTH)
        self.blocks, self.norm, self.head = inside.blocks, inside.norm, inside.head
        randomise(self.double().eval())

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.lay_out(self.stem(images))
        around = (part.expand(len(tokens), -1, -1) for part in (self.class_token, self.registers))
        tokens = torch.cat((next(around), tokens, *around), dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens)[:, 0])


class First(nn.Module):
    """Does something to pictures or patches."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: Tensor) -> Tensor:
        return self.function(values)


def behind_a(function) -> nn.Module:
    """A convolution of what a function makes of the pictures."""
    return nn.Sequential(First(function), nn.Conv2d(3, WIDTH, 8, 8))


def convolutional_stem(norm: type[nn.Module] = nn.Identity) -> nn.Module:
    """Patches of 8 x 8 pixels that overlap."""
    steps = [
        (nn.Conv2d(i, o, 3, 2, 1), norm(4, o) if norm is nn.GroupNorm else norm(o)) for i, o in ((3, 12), (12, 24))
    ]
    return nn.Sequential(*(part for step in steps for part in (*step, nn.ReLU())), nn.Conv2d(24, WIDTH, 3, 2, 1))


def middle_of(images: Tensor) -> Tensor:
    rows, columns = ((size - 32) // 2 for size in images.shape[-2:])
    return images[..., rows : rows + 32, columns : columns + 32]


def made_square(images: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    return F.pad(images, (0, 0, 0, width - height))


def blanked(made: Tensor) -> Tensor:
    """Patches 1 and 15 give way to something that is no patch, as in masked pretraining."""
    tokens = made.flatten(2).mT.clone()
    tokens[:, [1, 15]] = 0.5
    return tokens


BEHIND = {
    "a register behind them": ConvolutionPatches(behind=1),
    "registers behind them": ConvolutionPatches(behind=3),
    "a row of registers behind them": ConvolutionPatches(behind=4),
    "many registers behind them": ConvolutionPatches(behind=9),
    "registers behind overlapping ones": ConvolutionPatches(convolutional_stem(), behind=2),
    "a row of registers behind overlapping ones": ConvolutionPatches(convolutional_stem(), behind=4),
    "registers behind patches that see everything": ConvolutionPatches(convolutional_stem(nn.GroupNorm), behind=2),
}
ELSEWHERE = {
    "column by column": ConvolutionPatches(lay_out=lambda made: made.mT.flatten(2).mT),
    "overlapping ones column by column": ConvolutionPatches(
        convolutional_stem(), lay_out=lambda made: made.mT.flatten(2).mT
    ),
    "mirrored": ConvolutionPatches(lay_out=lambda made: made.flip(3).flatten(2).mT),
    "enlarged": ConvolutionPatches(lay_out=lambda made: F.interpolate(made, scale_factor=2).flatten(2).mT),
}


@pytest.mark.parametrize("case", BEHIND)
def test_registers_behind_the_patches_are_no_patches(case):
    """That the maps are right, tests/architecture/test_token_order.py shows."""
    model, images = BEHIND[case], pictures(32, 32)
    found = vitreous.explain(model, images, "ixg", 1)
    assert found.grid == (4, 4)
    assert found.scores["ixg"].isfinite().all()


@pytest.mark.parametrize("case", ELSEWHERE)
def test_patches_of_a_convolution_that_stand_elsewhere_are_refused(case):
    with pytest.raises(
        UnsupportedModelError, match=r"makes 4 x 4 patches, but the last 16 of \d+ tokens do not change"
    ):
        vitreous.explain(ELSEWHERE[case], pictures(32, 32), "rollout")


def test_a_border_that_is_cut_off_inside_the_model_is_refused():
    model = ConvolutionPatches(behind_a(middle_of))
    with pytest.raises(InputError, match="rows or columns at an edge of images of 48 x 40 pixels are in no patch"):
        vitreous.explain(model, pictures(48, 40), "rollout")
    assert vitreous.explain(model, pictures(32, 32), "rollout").grid == (4, 4)


def test_whole_patches_of_padding_are_refused():
    model = ConvolutionPatches(behind_a(made_square))
    with pytest.raises(InputError, match=r"images of 24 x 40 pixels to 40 x 40, and an edge of its 5 x 5 patches"):
        vitreous.explain(model, pictures(24, 40), "rollout")
    assert vitreous.explain(model, pictures(38, 40), "rollout").grid == (5, 5)


def test_patches_of_a_convolution_in_their_place_are_taken():
    assert vitreous.explain(ConvolutionPatches(), pictures(24, 40), "rollout").grid == (3, 5)
    assert vitreous.explain(ConvolutionPatches(), pictures(8, 40), "rollout").grid == (1, 5)
    for norm in (nn.Identity, nn.BatchNorm2d, nn.GroupNorm):  # the last makes every patch see the whole picture
        assert vitreous.explain(ConvolutionPatches(convolutional_stem(norm)), pictures(24, 40), "rollout").grid == (
            3,
            5,
        )
    assert vitreous.explain(ConvolutionPatches(lay_out=blanked), pictures(32, 32), "rollout").grid == (4, 4)
    blind = ConvolutionPatches()
    nn.init.zeros_(blind.stem.weight)
    assert vitreous.explain(blind, pictures(32, 32), "rollout").grid == (4, 4)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "area"])
@pytest.mark.parametrize("size", [(24, 24), (33, 47), (64, 64), (75, 100), (224, 96)])
def test_pictures_may_be_scaled_inside_the_model(mode, size):
    model = ConvolutionPatches(behind_a(lambda images: F.interpolate(images, (32, 32), mode=mode)))
    assert vitreous.explain(model, pictures(*size), "rollout").grid == (4, 4)


def shuffled(patches: Tensor) -> Tensor:
    """Another order for each picture and run, as masked autoencoders have it even if they mask nothing."""
    return torch.stack([rows[torch.randperm(len(rows))] for rows in patches])


@pytest.mark.parametrize(
    "build",
    [
        lambda: ConvolutionPatches(lay_out=lambda made: shuffled(made.flatten(2).mT)),
        lambda: LinearPatches(lambda images: shuffled(squares(images)), 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shuffled_patches_are_refused(dtype, build):
    model = build().to(dtype)
    for _ in range(4):  # chance may not let one through
        with pytest.raises(UnsupportedModelError, match="in another order each time"):
            vitreous.explain(model, torch.randn(2, 3, 32, 32).to(dtype), "ixg")


def test_a_model_that_takes_few_pictures_at_once_is_believed():
    def few(images: Tensor) -> Tensor:
        if len(images) > 2:
            raise TypeError("two pictures at most")
        return images

    assert vitreous.explain(ConvolutionPatches(behind_a(few)), pictures(32, 32), "rollout").grid == (4, 4)


def test_the_grid_of_a_convolution_is_checked_once_for_a_size():
    sizes = []

    def noted(images: Tensor) -> Tensor:
        sizes.append(len(images))
        return images

    model = ConvolutionPatches(behind_a(noted))
    for height in (32, 32, 24, 32, 24):
        vitreous.explain(model, pictures(height, 32), "rollout")
    # Two to see the architecture, the two that are explained, 14 probes and two for the blocks; once for a size.
    assert sizes == [2, 2, 14, 2, 2, 2, 2, 14, 2, 2, 2]


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_check_leaves_a_model_in_training_as_it_was(around):
    model = ConvolutionPatches(convolutional_stem(nn.BatchNorm2d)).float().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = pictures(32, 32).float()
    same = images.clone()
    with around():
        assert vitreous.explain(model, images, "rollout").grid == (4, 4)
        with pytest.raises(UnsupportedModelError, match="the last 16 of 17 tokens"):
            vitreous.explain(ELSEWHERE["column by column"].float().train(), images, "rollout")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(images, same)
