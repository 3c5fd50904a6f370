"""Vision Transformers written by hand around nn.TransformerEncoder, and one that nobody here wrote."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from checks import AGREES, CLASSES, DEPTH, Family, FamilyChecks, randomised
from torch import Tensor, nn

import vitreous

PATCH = 8
WIDTH = 48


class ConvolutionPatches(nn.Module):
    def __init__(self, patch: int = PATCH, width: int = WIDTH) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class UnfoldedPatches(nn.Module):
    """Patches cut out with unfold and mapped by a linear layer: there is no convolution to see a grid at."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * PATCH * PATCH, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(nn.functional.unfold(images, PATCH, stride=PATCH).transpose(1, 2))


class EncoderViT(nn.Module):
    """A classifier as people write it themselves."""

    def __init__(
        self,
        *,
        norm_first: bool = True,
        activation: object = "gelu",
        batch_first: bool = True,
        pooling: str = "class",
        patches: type[nn.Module] = ConvolutionPatches,
        tokens: int = 24,
        final_norm: bool = False,
    ) -> None:
        super().__init__()
        self.batch_first, self.pooling = batch_first, pooling
        self.patch_embed = patches()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH)) if pooling == "class" else None
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens + (pooling == "class"), WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 96, dropout=0.1, activation=activation, batch_first=batch_first, norm_first=norm_first
        )
        norm = nn.LayerNorm(WIDTH) if final_norm else None
        self.encoder = nn.TransformerEncoder(layer, DEPTH, norm=norm, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patch_embed(images)
        if self.cls_token is not None:
            tokens = torch.cat((self.cls_token.expand(len(tokens), -1, -1), tokens), dim=1)
        tokens = tokens + self.pos_embed
        if not self.batch_first:
            tokens = tokens.transpose(0, 1)
        tokens = self.encoder(tokens)
        if not self.batch_first:
            tokens = tokens.transpose(0, 1)
        return self.head(tokens[:, 0] if self.pooling == "class" else tokens.mean(dim=1))


def family(name: str, **options: object) -> Family:
    pooled = options.get("pooling") == "mean"
    return Family(
        name,
        partial(EncoderViT, **options),
        "encoder.layers",
        prefix=0 if pooled else 1,
        read="patches" if pooled else (0,),
        batch_first=options.get("batch_first", True),
    )


FAMILIES = [
    family(
        f"{'pre' if norm_first else 'post'}_norm_{activation}_{'batch' if batch_first else 'tokens'}_first_{pooling}",
        norm_first=norm_first,
        activation=activation,
        batch_first=batch_first,
        pooling=pooling,
    )
    for norm_first, activation, batch_first, pooling in itertools.product(
        (True, False), ("gelu", "relu"), (True, False), ("class", "mean")
    )
]
FAMILIES += [
    family("unfolded_class", patches=UnfoldedPatches),
    family("unfolded_mean", patches=UnfoldedPatches, pooling="mean"),
    family("silu_module", activation=nn.SiLU(), final_norm=True),
    family("selu", activation=nn.functional.selu),
    family("celu", activation=nn.functional.celu),
    family("inplace_relu_module", activation=nn.ReLU(inplace=True)),
]


@pytest.mark.parametrize("case", FAMILIES, ids=str)
class TestPlainEncoder(FamilyChecks):
    pass


class CifarViT(nn.Module):
    """The model of ../shared/data/cifar, as its README and its tensors' names describe it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = ConvolutionPatches(patch=4, width=128)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 128))
        self.pos_embed = nn.Parameter(torch.zeros(1, 65, 128))
        layer = nn.TransformerEncoderLayer(128, 8, 256, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.mlp_head = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed(images)
        tokens = torch.cat((self.cls_token.expand(len(patches), -1, -1), patches), dim=1) + self.pos_embed
        return self.mlp_head(self.transformer(tokens)[:, 0])


@pytest.mark.shared
class TestCifar:
    """A trained post-norm ReLU model on real photos, where activations reach exact zeros."""

    @pytest.fixture
    def folder(self) -> Path:
        folder = Path(__file__).parents[3] / "shared" / "data" / "cifar"
        if not folder.is_dir():
            pytest.skip(f"the development data is not at {folder}")
        return folder

    @pytest.fixture
    def case(self, folder: Path) -> Family:
        return Family("cifar", CifarViT, "transformer.layers", image=(32, 32), grid=(8, 8))

    @pytest.fixture
    def model(self, folder: Path) -> nn.Module:
        from safetensors.torch import load_file

        model = CifarViT()
        model.load_state_dict(load_file(folder / "vit_cifar10.safetensors"))
        return model.double().eval()

    @pytest.fixture
    def photos(self, folder: Path) -> tuple[Tensor, Tensor]:
        import numpy as np

        arrays = np.load(folder / "cifar10_test_1000.npz")
        images, labels = (torch.from_numpy(arrays[name]) for name in arrays.files)
        images = images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)
        mean, deviation = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (MEAN, DEVIATION))
        return (images.double() / 255 - mean) / deviation, labels

    def test_the_model_was_read_rightly(self, model: nn.Module, photos: tuple[Tensor, Tensor]) -> None:
        images, labels = photos
        with torch.no_grad():
            right = (model(images[:150]).argmax(1) == labels[:150]).double().mean()
        assert right > 0.6  # 71.7% on all of the test set

    def test_maps_agree_with_the_reference(self, case: Family, model: nn.Module, photos: tuple[Tensor, Tensor]) -> None:
        images, target = photos[0][:2], case.target()
        methods = [f"decompx:layer={layer}" for layer in range(6)]
        explanation = vitreous.explain(model, images, [*methods, "rollout", "gae", "tokentm"], target)
        assert explanation.grid == (8, 8)
        torch.testing.assert_close(explanation.logits, model(images).detach(), rtol=1e-12, atol=1e-12)
        frozen = case.reference(model, frozen=True).input_times_gradient(images, target)
        for method, expected in zip(methods, frozen, strict=True):
            torch.testing.assert_close(explanation.scores[method], expected[:, 1:], **case.agrees)
        plain = case.reference(model, frozen=False)
        torch.testing.assert_close(explanation.scores["rollout"], plain.rollout(images, [0])[:, 1:], **case.agrees)
        torch.testing.assert_close(explanation.scores["gae"], plain.gae(images, target, [0])[:, 1:], **case.agrees)


MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class OwnBlock(nn.Module):
    """A block around nn.MultiheadAttention, which may want tokens first where the stream has images first."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=not turned)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))
        self.turned = turned

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.norm1(tokens).transpose(0, 1) if self.turned else self.norm1(tokens)
        attended, _ = self.attn(normed, normed, normed, need_weights=False)
        tokens = tokens + (attended.transpose(0, 1) if self.turned else attended)
        return tokens + self.mlp(self.norm2(tokens))


def own_blocks(*, turned: bool) -> nn.Module:
    model = EncoderViT(tokens=4)
    model.encoder = nn.Sequential(*(OwnBlock(turned=turned) for _ in range(DEPTH)))
    return randomised(model)


@pytest.mark.parametrize("batch", [1, 2, 5])  # 5 is the number of tokens too: no shape tells them apart
def test_attention_that_is_turned_around_inside_its_block_gives_the_same_maps(batch: int) -> None:
    images = torch.randn(batch, 3, 2 * PATCH, 2 * PATCH, dtype=torch.float64)
    methods = ["gae", "tokentm", "gradtoken", "decompx.skipplus", "attnlrp", "fullgrad:rule=libra", "globenc"]
    methods += ["legrad", "lrp", "atman", "occlusion:by=drop", "integrated_gradients:steps=2"]
    plain = vitreous.explain(own_blocks(turned=False), images, methods).scores
    turned = vitreous.explain(own_blocks(turned=True), images, methods).scores
    for method in methods:
        torch.testing.assert_close(turned[method], plain[method], **AGREES)
