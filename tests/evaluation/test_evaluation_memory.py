"""A long run needs no more memory than a short one: images stream, and only columns that are asked for are read."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from vitreous.datasets import DataSet, Sample
from vitreous.evaluation.evaluate import evaluate
from vitreous.evaluation.report.results import summarise
from vitreous.models import LoadedModel, Preprocessing

IMAGES = 3_000
SIDE = 16


class Noise(DataSet):
    """Pictures of noise that are made when they are asked for; each has a label and a mask."""

    kind = "noise"
    summary = origin = "made up"

    def __len__(self):
        return IMAGES

    def name(self, index):
        return f"{index}.png"

    def load(self, index):
        pixels = np.random.default_rng(index).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        mask = np.zeros((SIDE, SIDE), dtype=np.int16)
        mask[4 : 8 + index % 6, 4:12] = 1
        return Sample(self.name(index), Image.fromarray(pixels), label=index % 3, mask=mask, objects=(None,))

    def _records(self):
        yield from map(self.name, range(IMAGES))


class Memory:
    """A progress that looks at the resident memory after every shard."""

    def __init__(self):
        self.seen = {}
        self.done = 0

    def begin(self, store, done):
        pass

    def advance(self, images):
        self.done += images
        if self.done % 1000 < images:
            gc.collect()
            self.seen[self.done] = resident()

    def notice(self, text):
        raise AssertionError(text)


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm, which only Linux has")
def test_memory_does_not_grow_with_the_data_set(tmp_path):
    network = VisionTransformer(
        img_size=SIDE, patch_size=8, embed_dim=8, depth=1, num_heads=1, mlp_ratio=1, num_classes=3
    ).eval()
    preprocessing = Preprocessing(image_size=(SIDE, SIDE), mean=(0.5,) * 3, std=(0.5,) * 3)
    model = LoadedModel("one block", network, preprocessing, None)
    memory = Memory()
    results = evaluate(
        model,
        Noise(tmp_path),
        "skipplus-segmentation",
        ["raw_attention"],
        out=tmp_path / "out",
        shard_size=250,
        threads=1,
        controls=False,
        progress=memory,
    )
    first, last = memory.seen[1000], memory.seen[IMAGES]
    # 2,000 more images: their pixels alone are 1.5 MB, tapes would be about 27 MB. The allocator may keep a few.
    assert last - first < 15, memory.seen
    before = resident()
    (estimate,) = summarise(results).estimates
    assert estimate.n == IMAGES
    # The bootstrap's 2,000 resamples of 3,000 images are 6 MB of bytes, and 24 MB at once as numbers.
    assert resident() - before < 60
