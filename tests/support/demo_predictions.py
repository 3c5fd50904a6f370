"""What the demo model says of the 500 photos that it has not seen, kept in a file: all of them take over a minute.

``python tests/support/demo_predictions.py`` writes the file anew, after a change of the model or its preprocessing.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vitreous.inputs.images import read_image
from vitreous.models import LoadedModel, demo, load_model

FILE = Path(__file__).parents[1] / "golden" / "demo_predictions.csv"
PHOTOS = Path("data/pets/seg")  # in the development data
_AT_ONCE = 25


@dataclass(frozen=True)
class Prediction:
    """The predicted class of a photo, and its probability."""

    photo: str
    predicted: int
    probability: float


def labels(shared: Path) -> dict[str, int]:
    """The breed of every photo."""
    with (shared / PHOTOS / "labels.csv").open(newline="") as table:
        return {row["id"]: int(row["breed_index"]) for row in csv.DictReader(table)}


def predict(loaded: LoadedModel, shared: Path, photos: Sequence[str]) -> list[Prediction]:
    """What the model says of some of the photos."""
    found = []
    for start in range(0, len(photos), _AT_ONCE):
        some = photos[start : start + _AT_ONCE]
        pictures = [read_image(shared / PHOTOS / "images" / f"{photo}.jpg") for photo in some]
        with torch.inference_mode():
            best = loaded.model(loaded.preprocessing(pictures)).softmax(dim=1).max(dim=1)
        found += map(Prediction, some, best.indices.tolist(), best.values.tolist())
    return found


def weights() -> str:
    """The sha256 of the weights: the backbone has to have the one that the package names, the head is shipped."""
    return demo._BACKBONE_SHA256 + hashlib.sha256(demo.HEAD_FILE.read_bytes()).hexdigest()


def stored() -> tuple[str, list[Prediction]]:
    """Of which weights the stored predictions are, and the predictions."""
    with FILE.open(newline="") as file:
        origin = file.readline().strip()
        rows = list(csv.DictReader(file))
    return origin, [Prediction(row["photo"], int(row["predicted"]), float(row["probability"])) for row in rows]


def main() -> None:
    shared = Path(__file__).parents[3] / "shared"
    torch.set_num_threads(1)
    found = predict(load_model("demo"), shared, list(labels(shared)))
    lines = [weights(), "photo,predicted,probability"]
    lines += [f"{one.photo},{one.predicted},{one.probability:.4f}" for one in found]
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
