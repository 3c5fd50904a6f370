"""Tokens that stand behind the patches: maps are those of the same model with these tokens in front."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import random_images
from vitreous.errors import UnsupportedModelError

METHODS = ["tokentm", "gradtoken", "decompx.skipplus", "gae", "ixg", "gradcam", "fullgrad:rule=libra", "rollout"]
METHODS += ["globenc", "atman:budget=4", "rise:budget=4"]


class Registers(nn.Module):
    """A ViT whose registers are joined before the patches or behind them; blocks do not mind the order of tokens."""

    def __init__(self, *, behind: bool, reads_first: bool = False) -> None:
        super().__init__()
        self.behind, self.reads_first = behind, reads_first
        self.patch = nn.Conv2d(3, 24, 8, 8)
        self.position = nn.Parameter(torch.randn(1, 16, 24))
        self.registers = nn.Parameter(torch.randn(1, 3, 24))
        layer = nn.TransformerEncoderLayer(24, 3, 48, batch_first=True, norm_first=True, dropout=0.0)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(24, 5)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).transpose(1, 2) + self.position
        registers = self.registers.expand(len(patches), -1, -1)
        tokens = self.blocks(torch.cat([patches, registers] if self.behind else [registers, patches], dim=1))
        if self.reads_first:  # of the registers, which is the class token then
            return self.head(tokens[:, 16] if self.behind else tokens[:, 0])
        return self.head((tokens[:, :16] if self.behind else tokens[:, 3:]).mean(dim=1))


def models(*, reads_first: bool = False) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    in_front = Registers(behind=False, reads_first=reads_first).double().eval()
    behind = Registers(behind=True, reads_first=reads_first).double().eval()
    behind.load_state_dict(in_front.state_dict())
    return in_front, behind


@pytest.mark.parametrize("reads_first", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_registers_behind_the_patches(method, reads_first):
    in_front, behind = models(reads_first=reads_first)
    images = random_images()
    expected, found = (vitreous.explain(model, images, method, 1).scores[method] for model in (in_front, behind))
    # Float64; attention adds up its tokens in another order.
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10 * float(expected.abs().max()))


def test_patches_in_front_of_other_tokens_cannot_be_dropped():
    _, behind = models()
    with pytest.raises(UnsupportedModelError, match="by=paint"):
        vitreous.explain(behind, random_images(), "rise:by=drop,budget=4", 1)
