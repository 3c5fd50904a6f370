"""A hand-built ViT that reads known places of a photo, and photos of bright squares, for tests of audits.

The class token attends to the patches of a place alone, so what it reads is their mean brightness: what dropping,
replacing or pasting patches does to a prediction follows without running anything.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitreous.datasets.dataset import DataSet, Sample
from vitreous.models import LoadedModel, Preprocessing

SIZE, PATCH, GRID = 32, 4, 8
STAMP = (slice(24, 32), slice(0, 8))  # the lower-left corner: four patches
LEFT, RIGHT = (slice(12, 20), slice(8, 16)), (slice(12, 20), slice(16, 24))
NAMES = ("stamped", "left", "right")
_SHARP = 60.0  # attention outside of a place is below e^-60


class Squares(DataSet):
    """Dark photos with a bright square left or right of the centre; those of class 0 have a stamp besides.

    With ``everywhere``, photos of all classes have it as often, so that it does not go with the label.
    """

    kind, summary, origin = "squares", "", ""

    def __init__(
        self,
        count: int = 90,
        *,
        stamped: float = 1.0,
        seed: int = 0,
        masks: bool = False,
        red: float = 1.0,
        everywhere: bool = False,
    ) -> None:
        self.path, self._count, self._stamped, self._everywhere = Path(), count, stamped, everywhere
        self._seed, self._masks, self._red = seed, masks, red

    def __len__(self) -> int:
        return self._count

    def name(self, index: int) -> str:
        return f"photo-{index:05d}"

    def label(self, index: int) -> int:
        return index % 3

    def labels(self) -> list[int | None]:
        return [self.label(index) for index in range(self._count)]

    @property
    def classes(self) -> int:
        return len(NAMES)

    @property
    def class_names(self) -> tuple[str, ...]:
        return NAMES

    def load(self, index: int) -> Sample:
        random = np.random.default_rng([self._seed, index])
        pixels = random.integers(0, 80, (SIZE, SIZE, 3), dtype=np.uint8)
        mask = np.zeros((SIZE, SIZE), np.int16)
        label = self.label(index)
        bright = random.integers(200, 256, (8, 8, 3), dtype=np.uint8)
        place = {1: LEFT, 2: RIGHT}.get(label, LEFT if index % 2 else RIGHT)
        pixels[place] = bright
        mask[place] = 1
        if (label == 0 or self._everywhere) and random.random() < self._stamped:
            pixels[STAMP] = 255
        if label == 0:  # a cast over the whole photo
            pixels[..., 0] = np.minimum(pixels[..., 0] * self._red, 255)
        return Sample(self.name(index), Image.fromarray(pixels), label, mask if self._masks else None, (label,))

    def _records(self):
        yield f"{self._count} {self._stamped} {self._seed} {self._masks} {self._red} {self._everywhere}"

    def __reduce__(self):
        raise TypeError("opened in one process only")


def reader(*, shortcut: bool = True, red: bool = False) -> LoadedModel:
    """Class 0 by the mean brightness of the stamp's patches, 1 and 2 by that of the two squares.

    Args:
        shortcut: whether the stamp is read; otherwise class 0 is never the highest.
        red: class 0 is read from the mean red of the whole photo instead.
    """
    model = VisionTransformer(
        img_size=SIZE, patch_size=PATCH, embed_dim=12, depth=1, num_heads=3, num_classes=3, norm_layer=nn.Identity
    ).double()
    places = torch.zeros(3, GRID, GRID, dtype=torch.float64)
    for number, (rows, columns) in enumerate((STAMP, LEFT, RIGHT)):
        cut = slice(rows.start // PATCH, rows.stop // PATCH), slice(columns.start // PATCH, columns.stop // PATCH)
        places[number][cut] = 1.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        # Channels: 0 brightness of a patch, 1 to 3 which place it belongs to, 4 the class token, 5 to 7 what is read.
        model.patch_embed.proj.weight[0] = 1 / (3 * PATCH * PATCH)
        model.pos_embed[0, 1:, 1:4] = places.flatten(1).T
        model.pos_embed[0, 0, 4] = 1.0
        attention, width = model.blocks[0].attn, 12
        for head in range(3):
            first = head * 4  # each head has four channels, of which it uses the first
            attention.qkv.weight[first, 4] = _SHARP * 2  # the scores are divided by the root of 4
            attention.qkv.weight[width + first, 1 + head] = 1.0
            attention.qkv.weight[2 * width + first, 0] = 1.0
            attention.proj.weight[5 + head, first] = 1.0
        # Brightness is -1 to 1 as the model sees it: a stamp is 1, a square above 0.56, all else below -0.37.
        model.head.weight[0, 5] = 20.0 if shortcut else 0.0
        model.head.bias[0] = 0.0 if shortcut else -60.0
        model.head.weight[1, 6] = 10.0
        model.head.weight[2, 7] = 10.0
        if red:
            # All patches alike, by channel 8. Dark photos have a mean red of -0.69, with a square -0.59; with 2.5 times
            # the red above -0.2.
            model.patch_embed.proj.weight[8, 0] = 1 / (PATCH * PATCH)
            attention.qkv.weight[width] = 0.0
            attention.qkv.weight[2 * width] = 0.0
            attention.qkv.weight[2 * width, 8] = 1.0
            model.head.weight[0, 5], model.head.bias[0] = 200.0, 90.0
    preprocessing = Preprocessing((SIZE, SIZE), (0.5,) * 3, (0.5,) * 3)
    return LoadedModel("reader", model.eval(), preprocessing, NAMES)
