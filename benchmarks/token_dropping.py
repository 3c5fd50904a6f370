"""Deletion curves by dropped tokens against straightforward ones that keep all tokens, in one interleaved run.

    python benchmarks/token_dropping.py [--models vit_tiny_patch16_224 ...] [--photos 8] [--maps 2] [--repeats 5]
        [--json FILE]

A photo's patches go in the order of a map, 0%, 10%, ... 90% of them. Three ways to ask the model:

- dropped: as ``vitreous evaluate`` does it. The tokens are gone from the first block on, and what keeps equally many
  goes through the model together, whatever photo or map it belongs to; a whole photo is asked about once for all maps.
- masked: all tokens stay and an attention mask hides the dropped ones; curve after curve, all ratios of one together.
  The same logits, which is checked first.
- painted: the patches are painted over in the picture. Other logits, for the model then sees a flat patch.

Processor time of one thread, as pictures per second and as the median of ratios that were measured side by side.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import timm
import torch
from rows import median_ratio, time_in_turn, write_rows
from torch import Tensor, nn

from vitreous.evaluation.tasks.patch_masking import Kept, kept_logits
from vitreous.evaluation.tasks.pixel_masking import find_orders
from vitreous.evaluation.tasks.task import Batch, Case, Picture
from vitreous.tape.runner import ModelRunner

PERCENT = range(0, 100, 10)


class Curves:
    """The photos and maps of one measurement, and the three ways to get their curves, (photos x maps, ratios, classes).

    Args:
        model: a timm ViT with a class token.
        images: the photos.
        maps: (photos, maps, rows, columns).
    """

    def __init__(self, model: nn.Module, images: Tensor, maps: Tensor) -> None:
        self.model, self.images, self.maps = model, images, maps
        self.runner = ModelRunner(model, images)
        self.patches = self.runner.layout.patches
        self.kept = [self.patches - percent * self.patches // 100 for percent in PERCENT]

    def dropped(self) -> Tensor:
        """As an evaluation asks: whole photos first, then what is left of them."""
        logits = self.runner.logits(self.images)
        pictures = tuple(Picture(f"{number}", 0, logits.shape[1]) for number in range(len(self.images)))
        found = {
            Case(photo, f"{number}"): {0: map_}
            for photo, maps in enumerate(self.maps)
            for number, map_ in enumerate(maps)
        }
        batch = Batch(None, self.runner, pictures, logits, found)
        orders = find_orders(batch, [(case, 0) for case in found])
        return kept_logits(batch, orders, [Kept("bottom", count) for count in self.kept])

    @torch.no_grad()
    def masked(self) -> Tensor:
        """All tokens, some hidden from attention; all ratios of a curve at once."""
        curves = []
        prefix = self.model.num_prefix_tokens
        for image, map_ in self._curves():
            visible = torch.cat([torch.ones(len(PERCENT), prefix, dtype=torch.bool), self._stay(map_)], dim=1)
            images = image.expand(len(PERCENT), -1, -1, -1)
            features = self.model.forward_features(images, attn_mask=visible[:, None, None])
            curves.append(self.model.forward_head(features))
        return torch.stack(curves)

    @torch.no_grad()
    def painted(self) -> Tensor:
        """All tokens, some of them of grey patches; all ratios of a curve at once."""
        rows, columns = self.runner.layout.grid
        curves = []
        for image, map_ in self._curves():
            stay = self._stay(map_).view(-1, 1, rows, columns).to(image.dtype)
            curves.append(self.model(image * nn.functional.interpolate(stay, image.shape[-2:], mode="nearest")))
        return torch.stack(curves)

    def _curves(self) -> list[tuple[Tensor, Tensor]]:
        return [(image, map_) for image, maps in zip(self.images, self.maps, strict=True) for map_ in maps]

    def _stay(self, map_: Tensor) -> Tensor:
        """Which patches stay at each ratio, (ratios, patches)."""
        ranking = map_.flatten().argsort(descending=True, stable=True)
        stay = torch.zeros(len(self.kept), self.patches, dtype=torch.bool)
        for row, count in zip(stay, self.kept, strict=True):
            row[ranking[self.patches - count :]] = True
        return stay


def measure(name: str, photos: int, maps: int, repeats: int) -> dict[str, Any]:
    """The row of one model."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval().requires_grad_(requires_grad=False)
    size = model.pretrained_cfg["input_size"][-1]
    curves = Curves(model, torch.randn(photos, 3, size, size), torch.rand(photos, maps, *model.patch_embed.grid_size))
    dropped, masked = curves.dropped(), curves.masked()
    difference = float((dropped - masked).abs().max() / masked.abs().max())
    # The same sums in another order, in float32.
    assert difference < 1e-4, f"dropped and masked tokens give other logits, up to {difference:.1e} of the largest"
    jobs = {"dropped": curves.dropped, "masked": curves.masked, "painted": curves.painted}
    times = time_in_turn(jobs, repeats)
    pictures = photos * maps * len(PERCENT)
    row: dict[str, Any] = {
        "model": name,
        "photos": photos,
        "maps": maps,
        "pictures": pictures,
        "difference": difference,
    }
    row |= {f"{job}_per_second": pictures / statistics.median(took) for job, took in times.items()}
    row |= {f"ratio_{job}": median_ratio(times[job], times["dropped"]) for job in ("masked", "painted")}
    print(
        f"{name}, {pictures} pictures: dropped {row['dropped_per_second']:.1f}/s, {row['ratio_masked']:.2f} x masked, "
        f"{row['ratio_painted']:.2f} x painted; difference {difference:.1e}",
        flush=True,
    )
    return row


def main() -> None:
    """Print and write one row per model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit_tiny_patch16_224", "vit_base_patch16_224"])
    parser.add_argument("--photos", type=int, default=8)
    parser.add_argument("--maps", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, given.photos, given.maps, given.repeats) for name in given.models]
    write_rows(given.json, rows, percent=list(PERCENT))


if __name__ == "__main__":
    main()
