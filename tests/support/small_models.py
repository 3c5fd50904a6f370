"""Small Vision Transformers with all weights drawn at random: no bias, scale or norm is trivially 0 or 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

GOLDEN = Path(__file__).parents[1] / "golden" / "model.npz"

SIZE = 32
PATCHES = 16  # 32 x 32 pixels in patches of 8 x 8
CLASSES = 5


def small_vit(*, depth: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64, **options) -> VisionTransformer:
    """A class-token ViT of 16 patches with LayerScale, in evaluation mode; ``options`` go to timm."""
    settings = {"img_size": SIZE, "patch_size": 8, "embed_dim": 24, "num_heads": 3}
    settings |= {"num_classes": CLASSES, "init_values": 0.5}
    model = VisionTransformer(depth=depth, **{**settings, **options})
    return randomise(model, seed).to(dtype).eval()


def cheap_spelling(info) -> str:
    """The spelling of a method with as few forward passes as it takes."""
    fewer = {"budget": 24, "steps": 2, "samples": 2, "points": 2}
    given = {name: info.options[name].default for name in fewer if name in info.options}
    options = ",".join(f"{name}={min(fewer[name], default or fewer[name])}" for name, default in given.items())
    return f"{info.name}:{options}" if options else info.name


def small_case(seed: int, **options) -> tuple[VisionTransformer, Tensor]:
    """A ``small_vit`` whose weights take no gradients, and two images that go with its seed."""
    return small_vit(seed=seed, **options).requires_grad_(requires_grad=False), random_images(2, seed=seed)


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill a model with random weights that keep its activations of order 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            if name.endswith((".gamma", "norm.weight", "norm1.weight", "norm2.weight")):
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() >= 2 and not name.endswith(("_embed", "_token")):
                parameter.copy_(noise * 1.5 / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(0.5 * noise)
    return model


def golden_model(dtype: torch.dtype = torch.float64) -> tuple[VisionTransformer, Tensor]:
    """The tiny trained ViT of tests/golden and its three images."""
    with np.load(GOLDEN) as stored:
        weights = {name[3:]: torch.from_numpy(stored[name]) for name in stored.files if name.startswith("sd/")}
        pictures = torch.from_numpy(stored["images"])
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3, num_classes=10)
    model.load_state_dict(weights)
    return model.to(dtype).eval(), pictures.to(dtype)


def random_images(batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64, channels: int = 3) -> Tensor:
    """Images of random pixels."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(batch, channels, SIZE, SIZE, generator=generator, dtype=torch.float64).to(dtype)


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest expected value; maps of zeros must be matched exactly."""
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    scale = float(expected.abs().max())
    difference = float((found - expected).abs().max())
    return difference / scale if scale > 0 else difference
