"""Perturbation curves against the bare forward passes that they need, and against quantus, in one interleaved run.

    python benchmarks/perturbation_curves.py [--model vit_tiny_patch16_224] [--photos 8] [--repeats 5] [--json FILE]

(a) Curves over erased pixels, both directions and nine steps, against as many pictures through the bare model.
(b) The same curve by quantus' PixelFlipping, on a model with one channel, since quantus erases single values: first
    the two must agree, then they are timed.
(c) Which part of a whole run of chefer-2021-perturbation, from JPEG files to rows, is spent inside the model's forward
    and backward passes.
(d) A deletion curve at 0%, 10%, ... 90% by dropped tokens, from photos and maps to logits, the whole photos included,
    against ten passes of whole pictures.

Processor time is counted, since it does not depend on what else the machine does; (c) also gives the share of the time
on the clock.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from rows import bare, ratio_in_turn, write_rows
from token_dropping import PERCENT, Curves
from torch import Tensor, nn

from vitreous.datasets import open_dataset
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.runner.measure import measure
from vitreous.evaluation.tasks.pixel_masking import erased_logits, find_orders
from vitreous.evaluation.tasks.task import Batch, Case, Picture
from vitreous.models import LoadedModel, Preprocessing
from vitreous.tape.runner import ModelRunner

Row = dict[str, Any]

AT_ONCE = 16
NINE = [percent * 224 * 224 // 100 for percent in range(10, 100, 10)]


def row_of(measured: str, against: str, ratio: float, wanted: str | None = None, **more: float) -> Row:
    """A row of the table, which is also printed."""
    print(
        f"{measured} / {against}: {ratio:.3f}", *(f"({name} {number:.1e})" for name, number in more.items()), flush=True
    )
    return {"measured": measured, "against": against, "ratio": ratio, "wanted": wanted, **more}


def batch_of(model: nn.Module, images: Tensor, maps: Tensor) -> Batch:
    """Photos with one map each."""
    runner = ModelRunner(model, images, black=images.new_full((images.shape[1],), -1.0))
    logits = runner.logits(images)
    pictures = tuple(Picture(f"{number}", int(row.argmax()), len(row)) for number, row in enumerate(logits))
    given = {
        Case(number, "random"): {picture.predicted: map_}
        for number, (picture, map_) in enumerate(zip(pictures, maps, strict=True))
    }
    return Batch(None, runner, pictures, logits, given)


def orders_of(batch: Batch) -> object:
    """The orders of all maps."""
    return find_orders(batch, [(case, batch.pictures[case.image].predicted) for case in batch.maps])


def pixel_curve(batch: Batch) -> Tensor:
    """Both directions and nine steps, from maps of patches to logits."""
    batch.memory.clear()
    orders = orders_of(batch).different
    return erased_logits(batch, orders, NINE, ("positive", "negative"), filling="black before normalisation")


def against_forwards(name: str, photos: int, repeats: int) -> list[Row]:
    """(a)."""
    model = timm.create_model(name).eval()
    images = torch.randn(photos, 3, 224, 224)
    batch = batch_of(model, images, torch.rand(photos, 14, 14))
    pictures = torch.randn(AT_ONCE, 3, 224, 224)
    passes = 2 * len(NINE) * photos
    ratio = ratio_in_turn(lambda: pixel_curve(batch), lambda: bare(model, pictures, passes), repeats)
    return [row_of("curves over erased pixels", f"{passes} bare forward passes", ratio, "at most 1.1")]


def against_quantus(name: str, photos: int, repeats: int) -> list[Row]:
    """(b)."""
    import quantus  # noqa: PLC0415  (only this part needs it)

    model = timm.create_model(name, in_chans=1).eval()
    nn.init.normal_(model.head.weight, std=0.3)  # as it is made, it finds all pictures alike
    images, maps = torch.randn(photos, 1, 224, 224), torch.rand(photos, 224, 224)
    batch = batch_of(model, images, maps)
    in_step = 224 * 224 // 8
    counts = [in_step * step for step in range(1, 9)]
    classes = [picture.predicted for picture in batch.pictures]
    flipping = quantus.PixelFlipping(
        features_in_step=in_step, perturb_baseline=0.0, normalise=False, disable_warnings=True
    )

    def theirs() -> np.ndarray:
        arrays = (images.numpy(), np.array(classes), maps[:, None].numpy())
        return np.array(flipping(model, *arrays, softmax=True, device="cpu", batch_size=AT_ONCE))

    def ours() -> np.ndarray:
        batch.memory.clear()
        orders = orders_of(batch).different
        logits = erased_logits(batch, orders, counts, ("positive",), filling="zero after normalisation")[:, 0]
        return logits.softmax(dim=-1)[range(photos), :, classes].numpy()

    found = ours()
    assert found.std(axis=1).min() > 1e-3, "the curve is flat, so that any other would agree with it"
    difference = float(np.abs(found - theirs()).max())
    # Probabilities in float32 from differently sized batches.
    assert difference < 1e-5, f"quantus gives other numbers, up to {difference}"
    passes = photos * len(counts)
    pictures = torch.randn(AT_ONCE, 1, 224, 224)
    ratio = ratio_in_turn(ours, theirs, repeats)
    rows = [row_of("a curve of quantus, by vitreous", "the same by quantus", ratio, "at most 1", difference=difference)]
    for who, job in (("vitreous", ours), ("quantus", theirs)):
        ratio = ratio_in_turn(job, lambda: bare(model, pictures, passes), repeats)
        rows.append(row_of(f"the same curve by {who}", f"{passes} bare forward passes", ratio))
    return rows


@dataclass
class Inside:
    """Time spent inside the model, by the processor and on the clock."""

    processor: float = 0.0
    clock: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what happens in this context."""
        processor, clock = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            self.processor += time.thread_time() - processor
            self.clock += time.perf_counter() - clock


class Timed(nn.Module):
    """A model that counts the time of its forward passes."""

    def __init__(self, model: nn.Module, inside: Inside) -> None:
        super().__init__()
        self.model, self.inside = model, inside

    def forward(self, images: Tensor) -> Tensor:
        """Run the model."""
        with self.inside.counted():
            return self.model(images)


def write_photos(folder: Path, count: int) -> None:
    """Photos of noise in a common size, with a table of labels."""
    random = np.random.default_rng(0)
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["file", "label"])
        for number in range(count):
            coarse = random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg")
            table.writerow([f"{number}.jpg", int(random.integers(1000))])


def share_inside(name: str, photos: int, methods: list[str]) -> list[Row]:
    """(c)."""
    inside, whole = Inside(), Inside()
    network = Timed(timm.create_model(name), inside).eval()
    model = LoadedModel(name, network, Preprocessing((224, 224), (0.5,) * 3, (0.5,) * 3), None)
    backward = torch.autograd.grad

    def counted_backward(*arguments: object, **options: object) -> object:
        with inside.counted():
            return backward(*arguments, **options)

    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder), photos)
        data = open_dataset(f"labelled:{folder}")
        torch.autograd.grad = counted_backward
        try:
            with whole.counted():
                samples = [data.load(number) for number in range(len(data))]
                rows = measure(model, samples, find_protocol("chefer-2021-perturbation"), methods)
        finally:
            torch.autograd.grad = backward
    assert all(row["error"] is None for row in rows), rows[0]["error"]
    measured = f"inside the model: {', '.join(methods)} on {photos} photos"
    return [
        row_of(measured, "chefer-2021-perturbation, on the clock", inside.clock / whole.clock, "at least 0.85"),
        row_of(measured, "chefer-2021-perturbation, processor time", inside.processor / whole.processor),
    ]


def dropped_tokens(name: str, repeats: int) -> list[Row]:
    """(d)."""
    model = timm.create_model(name).eval()
    images = torch.randn(AT_ONCE, 3, 224, 224)
    curves = Curves(model, images, torch.rand(AT_ONCE, 1, 14, 14))
    passes = len(PERCENT) * AT_ONCE
    ratio = ratio_in_turn(curves.dropped, lambda: bare(model, images, passes), repeats)
    return [row_of("deletion curves by dropped tokens", f"{passes} bare forward passes", ratio, "at most 0.65")]


def main() -> None:
    """Print all ratios, and write them if a file was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--photos", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", default="tokentm,gradtoken,decompx.skipplus,gae")
    parser.add_argument("--parts", default="abcd")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[Row] = []
    if "a" in options.parts:
        rows += against_forwards(options.model, options.photos, options.repeats)
    if "b" in options.parts:
        rows += against_quantus(options.model, options.photos, options.repeats)
    if "c" in options.parts:
        rows += share_inside(options.model, options.photos, options.methods.split(","))
    if "d" in options.parts:
        rows += dropped_tokens(options.model, options.repeats)
    settings = {"model": options.model, "batch": AT_ONCE, "photos": options.photos, "repeats": options.repeats}
    write_rows(options.json, rows, **settings, methods=options.methods)


if __name__ == "__main__":
    main()
