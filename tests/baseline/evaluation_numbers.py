"""Numbers of every protocol on a few generated photos and texts: how they are computed, and how they are stored."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import baseline_models as small
import numpy as np
import timm
from PIL import Image

import vitreous
from vitreous.datasets import DataSet, Review, Sample
from vitreous.evaluation.protocols import find_protocol, list_protocols
from vitreous.models import LoadedModel, Preprocessing
from vitreous.models.hf_models import LoadedTextModel

FILE = Path(__file__).parent / "evaluation.npz"
METHODS = ("gae", "rollout", "ixg", "tokentm")
CLASSES = 20  # fits all protocols, VOC's included
DEPTH = 3
SIZE = (32, 32)
_SAMPLES = 4
_LABELS = (10, 15, 10, 15)  # the model's first or second class, so that accuracy is neither 0 nor 1
_WORDS = ("the", "film", "was", "not", "good", "very", "bad", "story", "!")
_SUMMARY = ("mean", "low", "high")


class _Samples(DataSet):
    """Samples in memory."""

    kind, summary, origin = "memory", "", ""

    def __init__(self, samples: list) -> None:
        self.path, self._samples = Path("memory"), samples

    @property
    def holds(self) -> str:
        return "texts" if isinstance(self._samples[0], Review) else "photos"

    def __len__(self) -> int:
        return len(self._samples)

    def name(self, index: int) -> str:
        return self._samples[index].name

    def load(self, index: int) -> Sample | Review:
        return self._samples[index]

    def _records(self) -> Iterator[str]:
        yield "generated"


def _photos(labels: Sequence[int]) -> list[Sample]:
    """Noise with a label and a mask of two objects, a border that does not count and a background."""
    random = np.random.default_rng(0)
    found = []
    for number, label in enumerate(labels):
        mask = np.zeros((40, 48), np.int16)
        mask[4 : 18 + number, 5:25] = 1
        mask[22:30, 10:20] = 2
        mask[20:22, 5:25] = -1
        pixels = Image.fromarray(random.integers(0, 256, (*mask.shape, 3), dtype=np.uint8))
        found.append(Sample(f"photo-{number}", pixels, label, mask, (label, (label + 1) % CLASSES)))
    return found


def _texts() -> list[Review]:
    random = np.random.default_rng(0)
    found = []
    for number in range(_SAMPLES):
        words = tuple(str(word) for word in random.choice(_WORDS, 8 + number))
        rationale = random.random(len(words)) < 0.3
        rationale[1] = True
        found.append(Review(f"review-{number}", words, int(random.integers(2)), rationale))
    return found


def _photo_model() -> LoadedModel:
    sizes = {"img_size": SIZE, "embed_dim": 24, "depth": DEPTH, "num_heads": 3, "patch_size": 8}
    model = small.fill(timm.create_model("vit_base_patch16_224", num_classes=CLASSES, **sizes))
    preprocessing = Preprocessing(SIZE, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), interpolation="bilinear")
    return LoadedModel("small", model, preprocessing, None)


def _text_model() -> LoadedTextModel:
    name = next(iter(small.TEXT_MODELS))
    model = small.fill(small.TEXT_MODELS[name]())
    return LoadedTextModel("small", model, small.tokenizer(), ("NEG", "POS", "neutral", "other")[: small.CLASSES])


def numbers_of(name: str, out: Path) -> dict[str, np.ndarray]:
    """Run one protocol and return its per-sample columns, (methods, samples, columns), and its table of results."""
    protocol = find_protocol(name)
    texts = protocol.reads == "texts"
    labels = _LABELS if protocol.mosaic is None else tuple(range(protocol.mosaic**2))
    model, samples = (_text_model(), _texts()) if texts else (_photo_model(), _photos(labels))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        methods = None if protocol.methods is not None else METHODS
        results = vitreous.evaluate(model, _Samples(samples), protocol, methods, out=out, threads=1, controls=False)
        columns, methods = results.run.columns, results.methods
        values = results.values(columns)
        rows = sorted(results.rows(), key=lambda row: methods.index(row["method"]))  # tables sort them by their means
    names = {
        "methods": list(methods),
        "columns": list(columns),
        "rows": [[row["method"], row["metric"], row["n"]] for row in rows],
        "failures": len(results.failures()),
    }
    summary = [[np.nan if row[each] is None else row[each] for each in _SUMMARY] for row in rows]
    return {
        "names": np.array(json.dumps(names)),
        "values": np.stack([values[method] for method in methods]),
        "summary": np.array(summary),
    }


def save(out: Path, names: Sequence[str] | None = None) -> None:
    """Run every protocol, or some, and store their numbers; what is stored of others stays as it is."""
    found = {protocol.name: load(protocol.name) for protocol in list_protocols() if protocol.name in stored_names()}
    found |= {name: numbers_of(name, out) for name in names or [protocol.name for protocol in list_protocols()]}
    np.savez_compressed(
        FILE, **{f"{name}|{part}": each for name, parts in found.items() for part, each in parts.items()}
    )


def load(name: str) -> Mapping[str, np.ndarray]:
    """Return what ``save`` stored of a protocol."""
    with np.load(FILE) as stored:
        return {part: stored[f"{name}|{part}"] for part in ("names", "values", "summary")}


def stored_names() -> list[str]:
    """Return the names of the stored protocols."""
    with np.load(FILE) as stored:
        return [key.removesuffix("|names") for key in stored.files if key.endswith("|names")]
