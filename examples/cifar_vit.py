"""A small Vision Transformer for CIFAR-10, built of PyTorch's own encoder, as an example of a model of your own.

Use it as ``--model py/examples/cifar_vit.py:build@vit_cifar10.safetensors``.
"""
# ruff: noqa: INP001

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitreous.models import Preprocessing

WIDTH = 128
PATCH = 4
EDGE = 32


class PatchEmbedding(nn.Module):
    """Cuts pictures into patches and gives each a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)

    def forward(self, images: Tensor) -> Tensor:
        """Return (batch, patches, width)."""
        vectors: Tensor = self.proj(images)
        return vectors.flatten(2).transpose(1, 2)


class CifarViT(nn.Module):
    """A class token, 64 patches and six post-norm blocks."""

    # Whoever loads the model by name learns from these how photos are prepared and what the classes are called.
    preprocessing = Preprocessing(image_size=(EDGE, EDGE), mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = PatchEmbedding()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (EDGE // PATCH) ** 2, WIDTH))
        block = nn.TransformerEncoderLayer(WIDTH, nhead=8, dim_feedforward=256, batch_first=True)
        self.transformer = nn.TransformerEncoder(block, num_layers=6)
        self.mlp_head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(self.class_names)))

    def forward(self, images: Tensor) -> Tensor:
        """Return one score per class, (batch, 10)."""
        patches = self.patch_embed(images)
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1) + self.pos_embed
        scores: Tensor = self.mlp_head(self.transformer(tokens)[:, 0])
        return scores


def build() -> nn.Module:
    """Return the model, untrained."""
    return CifarViT()
