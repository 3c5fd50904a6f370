"""Memory of an audit while its maps are made: the process after so many photos of a small model.

The model is a ViT of 4 x 4 patches, two blocks wide 16, with random weights; the photos are drawn, not read, so that
what grows is the audit's own.

    python benchmarks/audit_memory.py --photos 10000
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import vitreous
from vitreous.datasets.dataset import DataSet, Sample
from vitreous.models import LoadedModel, Preprocessing


class Drawn(DataSet):
    """Photos of noise, of which nothing is kept; prints the memory of the process at some of them."""

    kind, summary, origin = "drawn", "", ""

    def __init__(self, count: int) -> None:
        self.path, self._count, self._told = Path(), count, 0

    def __len__(self) -> int:
        return self._count

    def name(self, index: int) -> str:
        return f"photo-{index:05d}"

    def load(self, index: int) -> Sample:
        if index >= self._told and index % max(400, self._count // 10) == 400:
            self._told = index + 1
            print(f"photo {index}: {resident_memory()} MB", flush=True)
        pixels = np.random.default_rng(index).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        return Sample(self.name(index), Image.fromarray(pixels), index % 3)

    def _records(self) -> Iterator[str]:
        yield str(self._count)


def resident_memory() -> int:
    """What the process holds now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


def main() -> None:
    """Run an audit and print the memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=int, default=10_000)
    parser.add_argument("--method", default="gae")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3).eval()
    model = LoadedModel("small", network, Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3), None)
    with tempfile.TemporaryDirectory() as folder:
        found = vitreous.audit(
            model, Drawn(given.photos), method=given.method, out=folder, threads=1, photos=8, suspicions=4
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10
    print(f"maps and tests of {len(found.collected)} photos: {resident_memory()} MB at the end, {peak} MB at most")


if __name__ == "__main__":
    main()
