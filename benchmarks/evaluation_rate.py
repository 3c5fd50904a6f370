"""How long protocols take: images per second of one core, and what 50,000 images cost at that rate.

python benchmarks/evaluation_rate.py [--protocols a,b] [--methods a,b] [--model NAME] [--images 32] [--price 0.05]

Photos are noise of 500 x 375 pixels with a label and a mask, for the time does not depend on what they show; the model
has random weights. One thread, one process; the first shard is not counted (it opens the model). Rates are per second
of processor time, which another program on the machine does not change much; the wall time is printed beside it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from vitreous.datasets import DataSet, Sample
from vitreous.evaluation.evaluate import evaluate
from vitreous.evaluation.store import Store

PROTOCOLS = ("chefer-2021-segmentation", "chefer-2021-perturbation", "skipplus-faithfulness", "tokentm-probability")
METHODS = "tokentm,gradtoken,decompx.skipplus,gae,rollout"
FULL = 50_000
SHARD = 16
CORES = (1, 8, 64, 512)


class Noise(DataSet):
    """Photos of noise, made when they are asked for."""

    kind = "noise"
    summary = origin = "made up"

    def __init__(self, path: Path, images: int) -> None:
        super().__init__(path)
        self._images = images

    def __len__(self) -> int:
        return self._images

    def name(self, index: int) -> str:
        """Name an image."""
        return f"{index}.jpg"

    def load(self, index: int) -> Sample:
        """Make an image, its label and its mask."""
        pixels = np.random.default_rng(index).integers(0, 256, (375, 500, 3), dtype=np.uint8)
        mask = np.zeros((375, 500), dtype=np.int16)
        mask[100:250, 150:400] = 1
        return Sample(self.name(index), Image.fromarray(pixels), label=index % 1000, mask=mask, objects=(None,))

    def _records(self) -> Iterator[str]:
        yield from map(self.name, range(self._images))


class Clock:
    """A progress that measures from the end of the first shard to the end of the last."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, float, float]] = []

    def begin(self, store: Store, done: int) -> None:
        """Nothing is measured before the first shard is done."""

    def advance(self, images: int) -> None:
        """Remember when a shard was done."""
        self.marks.append((images, time.process_time(), time.perf_counter()))

    def notice(self, text: str) -> None:
        """Print what people should know."""
        print(f"  {text}")

    def rates(self) -> tuple[float, float]:
        """Images per second of processor time and per second on the wall."""
        images = sum(mark[0] for mark in self.marks[1:])
        (_, processor, wall), (_, processor_end, wall_end) = self.marks[0], self.marks[-1]
        return images / (processor_end - processor), images / (wall_end - wall)


def main() -> None:
    """Print rates and what they mean for a whole validation set."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--protocols", default=",".join(PROTOCOLS))
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--model", default="timm/vit_tiny_patch16_224@random")
    parser.add_argument("--images", type=int, default=32, help="counted images, besides the first shard")
    parser.add_argument("--price", type=float, default=0.05, help="of one core for one hour, in your currency")
    given = parser.parse_args()
    methods = given.methods.split(",")
    print(f"{given.model}, {len(methods)} methods: {given.methods}; one thread\n")
    columns = ["images/s/core", "on the wall", "core hours", *(f"{cores} cores" for cores in CORES), "price"]
    print(f"{'protocol':28}" + "".join(f"{column:>14}" for column in columns) + f"   ({FULL:,} images)")
    for protocol in given.protocols.split(","):
        with tempfile.TemporaryDirectory() as folder:
            clock, data = Clock(), Noise(Path(folder), SHARD + given.images)
            options = {"out": folder, "threads": 1, "shard_size": SHARD, "progress": clock}
            evaluate(given.model, data, protocol, methods, **options)
        rate, wall = clock.rates()
        hours = FULL / rate / 3600
        times = "".join(f"{_duration(hours / cores):>14}" for cores in CORES)
        print(f"{protocol:28}{rate:14.2f}{wall:14.2f}{hours:14.1f}{times}{hours * given.price:14.2f}", flush=True)


def _duration(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"


if __name__ == "__main__":
    main()
