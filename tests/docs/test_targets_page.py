"""The page on targets: its code runs, in order, on small models."""

from pathlib import Path

import pytest
import torch
from test_docs import BLOCK
from torch import nn

from small_models import random_images, small_vit

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"
BLOCKS = [code for language, code in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if language == "python"]


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit = small_vit(depth=2, num_classes=0)
        self.heads = nn.ModuleDict({"cat_head": nn.Linear(24, 3), "dog_head": nn.Linear(24, 4)}).double()

    def forward(self, images):
        features = self.vit(images)
        return {name: head(features) for name, head in self.heads.items()}


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit, self.head = small_vit(depth=2, num_classes=0), nn.Linear(24, 5).double()

    def forward(self, images):
        maps = self.head(self.vit.forward_features(images)[:, 1:]).transpose(1, 2).unflatten(2, (4, 4))
        return nn.functional.interpolate(maps, images.shape[-2:])


class WithAge(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit = small_vit(depth=2)

    def forward(self, images, age):
        return self.vit(images) * age


def detector():
    import transformers

    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    config = transformers.YolosConfig(**small, image_size=[32, 32], patch_size=8, num_detection_tokens=5, num_labels=4)
    return transformers.YolosForObjectDetection(config).double().eval()


@pytest.fixture(scope="module")
def names():
    """What the page takes for granted; what a block defines, later blocks use."""
    torch.manual_seed(0)
    models = {"model": small_vit(depth=2), "backbone": small_vit(depth=2, num_classes=0), "segmenter": Segmenter()}
    models |= {"two_heads": TwoHeads(), "with_age": WithAge(), "detector": detector()}
    given = {name: model.eval() for name, model in models.items()}
    return {**given, "images": random_images(2), "other": random_images(1, seed=4)[0]}


def test_all_blocks_run_in_order(names):
    assert len(BLOCKS) > 8
    for number, code in enumerate(BLOCKS):
        exec(compile(code, f"targets.md block {number}", "exec"), names)
