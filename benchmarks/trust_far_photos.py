"""Whether photos that a model knows are told from others by its energy, its largest logit or its largest probability.

    python benchmarks/trust_far_photos.py --model demo --known KIND:PATH --other FOLDER [--limit N] [--out FILE]

Half of the known photos, by the hash of their names, give the reference of ``vitreous.trust``: the lowest 10% of their
energy, log sum exp of the logits (Liu et al. 2020). All figures are those of the other half, against the other photos,
noise, and known photos whose pixels are shuffled.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from vitreous.datasets import DataSet, Sample, Shuffled, open_dataset
from vitreous.evaluation.recommend import PhotoFolder
from vitreous.metrics.segmentation import half_of
from vitreous.models import LoadedModel, load_model

SHARES = (2, 5, 10, 20)  # percent of the known photos that count as far; the package takes 10


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--known", required=True)
    parser.add_argument("--other", required=True)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(given.model)
    names, known = photos(open_dataset(given.known), given.limit, model)
    halves = [[image for name, image in zip(names, known, strict=True) if half_of(name) == half] for half in (0, 1)]
    _, others = photos(PhotoFolder(given.other), given.limit // 2, model)
    random = torch.Generator().manual_seed(0)
    noise = [torch.randn(known[0].shape, generator=random) for _ in range(given.limit // 4)]
    shuffled = [
        image.flatten(1)[:, torch.randperm(image[0].numel(), generator=random)].view_as(image) for image in halves[1]
    ]
    reference = scores(model, halves[0])
    bounds = {share: float(np.percentile(reference["energy"], share)) for share in SHARES}
    held_out = scores(model, halves[1])
    report: dict[str, object] = {"model": given.model, "reference photos": len(halves[0]), "energy bounds": bounds}
    report["held out"] = {"photos": len(halves[1]), **below(held_out["energy"], bounds)}
    groups = {"other photos": others, "noise": noise, "shuffled pixels": shuffled[: given.limit // 4]}
    for name, images in groups.items():
        found = scores(model, images)
        against = {score: auroc(held_out[score], found[score]) for score in found}
        report[name] = {"photos": len(images), **below(found["energy"], bounds), "AUROC": against}
    print(json.dumps(report, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def below(energies: np.ndarray, bounds: dict[int, float]) -> dict[str, float]:
    """The share of photos that each bound calls far."""
    return {f"below the {share}% bound": float((energies < bound).mean()) for share, bound in bounds.items()}


def photos(data: DataSet, limit: int, model: LoadedModel) -> tuple[list[str], list[torch.Tensor]]:
    """Names and preprocessed images of a random sample."""
    listed = Shuffled(data, 0)
    loaded = [listed.load(index) for index in range(min(limit, len(listed)))]
    found = [sample for sample in loaded if isinstance(sample, Sample)]
    return [sample.name for sample in found], [model.preprocessing([sample.image])[0] for sample in found]


def scores(model: LoadedModel, images: list[torch.Tensor]) -> dict[str, np.ndarray]:
    """Three scores that are high for what a model knows."""
    with torch.no_grad():
        logits = torch.cat([model.model(image[None]) for image in images]).double()
    return {
        "energy": logits.logsumexp(1).numpy(),
        "largest logit": logits.amax(1).numpy(),
        "largest probability": logits.softmax(1).amax(1).numpy(),
    }


def auroc(known: np.ndarray, others: np.ndarray) -> float:
    """How often a known photo scores above another; half where they are equal."""
    above = (known[:, None] > others).mean() + (known[:, None] == others).mean() / 2
    return float(above)


if __name__ == "__main__":
    main()
