"""Base maps of photos and mosaics, kept in a file, and everything that candidate maps are measured by.

    python benchmarks/recipe.py maps --model tiny --half choose --photos 40 --cache FOLDER
    python benchmarks/recipe_explore.py --model tiny --photos 40 --cache FOLDER
    python benchmarks/recipe_report.py --cache FOLDER

Photos are divided into two halves by a hash of their names: on one half candidates are compared and chosen, on the
other the chosen ones are measured once. A map of the mosaic of four photos of different classes explains the class of
one.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous.datasets import open_dataset
from vitreous.datasets.dataset import Sample
from vitreous.evaluation.runner.adapters import ImageAdapter
from vitreous.evaluation.tasks.patch_masking import InsertionDeletion
from vitreous.evaluation.tasks.pixel_masking import ErasingAccuracy
from vitreous.evaluation.tasks.segmentation import AveragePrecision, Segmentation
from vitreous.evaluation.tasks.task import Case, ImageBatch, enlarged
from vitreous.methods import Procedure, View, register
from vitreous.methods.twoscale import Refined, averaged
from vitreous.models import LoadedModel, load_model
from vitreous.tape import GradientNeeds, Needs, Pass

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
PASSES = tuple(Pass(rule, of) for rule in ("libra", "plain") for of in ("logit", "probability"))
BASES = (
    "gae",
    "gae:rule=libra",
    "attcat:rule=libra",
    "tokentm",
    "tokentm:rule=libra",
    "gradtoken",
    "decompx.skipplus",
    "decompx.skipplus.propagate",
    "fullgrad_plus:rule=libra",
    "twoscale",
    "recipe_probe",
)
TOGETHER = 8  # photos in one batch
_EDGE = 224


class ModelChoice(NamedTuple):
    """A model with its photos."""

    name: str
    data: str
    settings: Mapping[str, Any]
    masks: bool = True


MODELS = {
    "tiny": ModelChoice(
        f"timm/vit_tiny_patch16_224@{SHARED / 'vit_tiny_patch16_224.safetensors'}",
        f"pets:{SHARED / 'pets' / 'seg'}",
        {"mean": (0.5,) * 3, "std": (0.5,) * 3},
    ),
    "tiny-imagenet": ModelChoice(
        f"timm/vit_tiny_patch16_224@{SHARED / 'vit_tiny_patch16_224.safetensors'}",
        f"labelled:{SHARED / 'imagenet'}",
        {"mean": (0.5,) * 3, "std": (0.5,) * 3},
        masks=False,
    ),
    "demo": ModelChoice("demo", f"pets:{SHARED / 'pets' / 'seg'}", {}),
    "cifar": ModelChoice(
        f"py/{Path(__file__).resolve().parents[1] / 'examples' / 'cifar_vit.py'}:build"
        f"@{SHARED / 'cifar' / 'vit_cifar10.safetensors'}",
        f"cifar10:{SHARED / 'cifar' / 'cifar10_test_1000.npz'}",
        {},
        masks=False,
    ),
}


# What a run shows, read once ------------------------------------------------------------------------------------------

_probed: list[dict[str, Tensor]] = []


class Probe(Procedure):
    """Keeps what many candidates are made of, block by block, of four backward passes.

    By pass: input x gradient (``ixg``), bias x gradient (``bias``), what hiding a patch from the attention of a block
    would change by its first order (``hide``), the same counted for the read tokens alone (``hide_read``) and the read
    tokens' row of the positive part of attention x its gradient (``rows``).
    """

    runs_again = False

    def needs(self, layer: int, depth: int) -> Needs:
        """Everything under both rules, of the logit and the probability."""
        del layer
        every = frozenset(range(depth))
        slopes = GradientNeeds(tokens=every, attention=every, biases=frozenset(range(depth + 1)))
        plain = GradientNeeds(tokens=every, attention=every)
        return Needs(
            tokens=frozenset(range(depth + 1)),
            attention=every,
            gradients={each: slopes if each.rule == "libra" else plain for each in PASSES},
        )

    def map(self, view: View) -> Tensor:
        """FullGrad+; what it is made of is left in ``_probed``."""
        prefix, every = view.layout.prefix, range(view.depth)
        found: dict[str, list[Tensor]] = {}
        for backward in PASSES:
            key = f"{backward.rule} {backward.objective}"
            found[f"ixg {key}"] = [
                (view.tokens(layer) * view.token_gradient(backward, layer)).sum(-1)[:, prefix:] for layer in every
            ]
            if backward.rule == "libra":
                found[f"bias {key}"] = [view.biases(backward, layer)[:, prefix:] for layer in range(view.depth + 1)]
            for layer in every:
                attention = view.attention_matrix(layer)
                slope = view.attention_gradient(backward, layer)
                # Without a key its row is normalised anew: A_ij (G_ij - sum_k A_ik G_ik) / (1 - A_ij) is lost.
                lost = attention * (slope - (attention * slope).sum(-1, keepdim=True)) / (1 - attention).clamp(min=1e-3)
                lost.diagonal(dim1=-2, dim2=-1).zero_()  # the row of a patch goes with it
                found.setdefault(f"hide {key}", []).append(lost.sum((1, 2))[:, prefix:])
                read = view.layout.read
                found.setdefault(f"hide_read {key}", []).append(lost[:, :, read].sum((1, 2))[:, prefix:])
                positive = (attention[:, :, read] * slope[:, :, read]).clamp(min=0).mean((1, 2))
                found.setdefault(f"rows {key}", []).append(positive[:, prefix:])
        found["attention"] = [view.attention_matrix(layer).mean(1)[:, prefix:, prefix:].half() for layer in every]
        found["row"] = [view.attention_matrix(layer, view.layout.read).mean((1, 2))[:, prefix:] for layer in every]
        halves = (view.depth // 2, 3 * view.depth // 4, view.depth)
        found["features"] = [view.tokens(layer)[:, prefix:].half() for layer in halves]
        _probed.append({name: torch.stack(each, 1) for name, each in found.items()})
        return _probed[-1]["ixg libra logit"].sum(1) + _probed[-1]["bias libra logit"].sum(1)


@register("recipe_probe", family="plugin", paper="", year=2026, class_specific=True, signed=True)
def probe() -> Probe:
    """FullGrad+ under the libra rule, and what it is made of."""
    return Probe()


class Orders(Procedure):
    """Keeps what runs with fewer and fewer patches tell, the best dropped first (D) and the worst first (I).

    ``D`` and ``I`` are the orders in which patches go, from 0 to 1 with important patches near 1, ``MD`` and ``MI`` the
    standardised fine scale averaged over the runs in which a patch is there.
    """

    runs_again = True

    def __init__(self, steps: int) -> None:
        self._scale = Refined(1.0, steps)

    def needs(self, layer: int, depth: int) -> Needs:
        """What ``refined`` needs."""
        return self._scale.needs(layer, depth)

    def map(self, view: View) -> Tensor:
        """The fine scale; what the runs tell is left in ``_probed``."""
        fine = self._scale.fine(view)
        kept = {"fine": fine, "R": self._scale.regions(view)}
        for name, best_first in (("D", True), ("I", False)):
            series = list(self._scale.series(view, fine, best_first=best_first))
            kept[name], kept[f"M{name}"] = order_of(series, best_first=best_first), averaged(series)
        _probed.append(kept)
        return fine


def order_of(series: Sequence[tuple[Tensor, Tensor]], *, best_first: bool) -> Tensor:
    """The order in which the patches of a series go, from 0 to 1, with important patches near 1."""
    left, gone = [kept.shape[1] for kept, _ in series[1:]] + [0], []
    for (kept, scores), then in zip(series, left, strict=True):
        ranked = kept.gather(1, scores.argsort(dim=1, descending=best_first, stable=True))
        gone.append(ranked[:, : kept.shape[1] - then])
    fine = series[0][1]
    places = torch.arange(fine.shape[1], dtype=fine.dtype).expand_as(fine) / max(fine.shape[1] - 1, 1)
    ranks = torch.empty_like(fine).scatter_(1, torch.cat(gone, dim=1), places)
    return 1 - ranks if best_first else ranks


@register("recipe_orders", family="plugin", paper="", year=2026, class_specific=True, signed=True)
def orders(*, steps: int = 8) -> Orders:
    """The fine scale, and what runs with fewer and fewer patches tell."""
    return Orders(steps)


def half_of(name: str) -> str:
    """Which half of the photos one belongs to."""
    return "choose" if hashlib.sha256(f"recipe|{name}".encode()).digest()[0] % 2 else "report"


@cache
def open_model(name: str) -> tuple[LoadedModel, ImageAdapter]:
    """A model, and what prepares photos for it; they are squashed to its size."""
    choice = MODELS[name]
    model = load_model(choice.name, **choice.settings)
    return model, ImageAdapter(model, "squash")


def samples_of(name: str, half: str, count: int, first: int = 0) -> list[Sample]:
    """Photos of one half, in a random order that does not depend on the model."""
    data = open_dataset(MODELS[name].data)
    places = [place for place in range(len(data)) if half_of(data.name(place)) == half]
    places.sort(key=lambda place: hashlib.sha256(f"order|{data.name(place)}".encode()).digest())
    found = [data.load(place) for place in places[first : first + count]]
    if name != "demo":
        return found
    with (SHARED / "pets" / "seg" / "labels.csv").open(encoding="utf-8") as file:
        breeds = {line["id"]: int(line["breed_index"]) for line in csv.DictReader(file)}
    return [replace(each, label=breeds[each.name], objects=(breeds[each.name],)) for each in found]


def mosaics_of(samples: Sequence[Sample]) -> Iterator[Sample]:
    """For every photo a mosaic of 2 x 2 with three others of other classes; the mask is its own cell."""
    edge = min(_EDGE, samples[0].image.width)
    for place, sample in enumerate(samples):
        random = np.random.default_rng(place)
        others = [each for each in samples if each.label != sample.label]
        members = [others[number] for number in random.choice(len(others), 3, replace=False)]
        cell = int(random.integers(4))
        members.insert(cell, sample)
        mosaic = Image.new("RGB", (2 * edge, 2 * edge))
        mask = np.zeros((2 * edge, 2 * edge), dtype=np.int16)
        for number, member in enumerate(members):
            top, left = (edge * part for part in divmod(number, 2))
            mosaic.paste(member.image.resize((edge, edge), Image.Resampling.BICUBIC), (left, top))
            mask[top : top + edge, left : left + edge] = number == cell
        yield Sample(f"mosaic {sample.name}", mosaic, sample.label, mask, (sample.label,))


def base_maps(adapter: ImageAdapter, samples: Sequence[Sample], *, explained: str, bases: Sequence[str]) -> dict:
    """The base maps of photos for the predicted class or the label, and what the probe keeps."""
    parts: list[dict[str, Any]] = []
    for start in range(0, len(samples), TOGETHER):
        some = samples[start : start + TOGETHER]
        batch = adapter.open(some, [adapter.prepare(sample) for sample in some])
        targets = [[getattr(picture, explained)] for picture in batch.pictures]
        _probed.clear()
        maps = adapter.maps(batch, range(len(some)), targets, list(bases))
        scores = {
            base: torch.stack([maps[Case(number, base)][targets[number][0]].flatten() for number in range(len(some))])
            for base in bases
        }
        grid = tuple(maps[Case(0, bases[0])][targets[0][0]].shape)
        parts.append({**(_probed[0] if _probed else {}), "maps": scores, "target": torch.tensor(targets)[:, 0]})
        print(f"{start + len(some)} of {len(samples)}", flush=True)
    whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0] if key != "maps"}
    maps_of_all = {base: torch.cat([part["maps"][base] for part in parts]) for base in bases}
    return {**whole, "maps": maps_of_all, "grid": grid, "names": [sample.name for sample in samples]}


def cached(
    folder: Path, name: str, half: str, count: int, bases: Sequence[str] = BASES, kind: str = ""
) -> dict[str, dict]:
    """Base maps of photos and of mosaics, from a file where they have been made before."""
    file = folder / f"{name}-{half}-{count}{kind}.pt"
    if not file.exists():
        _, adapter = open_model(name)
        samples = samples_of(name, half, count)
        found = {
            "photos": base_maps(adapter, samples, explained="predicted", bases=bases),
            "mosaics": base_maps(adapter, list(mosaics_of(samples)), explained="label", bases=bases),
        }
        torch.save(found, file)
    return torch.load(file, weights_only=True)


# Columns --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One measure; ``better`` is 1 where higher is better and -1 where lower is."""

    name: str
    better: int


AP, ACC, IOU = Column("AP", 1), Column("pAcc", 1), Column("mIoU", 1)
DEL, DELACC = Column("deletion p", -1), Column("deletion acc", -1)
INS, INSACC = Column("insertion p", 1), Column("insertion acc", 1)
POS, NEG = Column("erasing +", -1), Column("erasing -", 1)
GRID, SACO = Column("grid", 1), Column("SaCo", 1)
COLUMNS = (AP, ACC, IOU, DEL, DELACC, INS, INSACC, POS, NEG, GRID, SACO)
Candidates = Mapping[str, Tensor]  # by name, (photos, patches)
Table = dict[str, dict[str, np.ndarray]]  # by column and candidate, one value per photo


def grid_game(mosaics: Mapping[str, Any], samples: Sequence[Sample], candidates: Candidates) -> Table:
    """Share of the positive scores that lies in the cell of the explained class, in percent; 25 is chance.

    A map without positive scores has none there: 0.
    """
    rows, columns = mosaics["grid"]
    found: dict[str, np.ndarray] = {}
    inside = torch.stack([cell_share(sample, rows, columns) for sample in samples])
    for name, maps in candidates.items():
        positive = maps.double().clamp(min=0)
        total = positive.sum(1)
        found[name] = (100 * (positive * inside).sum(1) / total.where(total > 0, torch.ones(()))).numpy()
    return {GRID.name: found}


def cell_share(sample: Sample, rows: int, columns: int) -> Tensor:
    """The part of every patch that lies in the mosaic's explained cell, (patches,)."""
    mask = torch.from_numpy(np.asarray(sample.mask) == 1).double()[None, None]
    return torch.nn.functional.adaptive_avg_pool2d(mask, (rows, columns)).flatten()


def trapezoid(values: np.ndarray, at: Sequence[float]) -> np.ndarray:
    """Area under a curve, in percent."""
    return 100 * np.trapezoid(values, at, axis=-1)


def with_maps(batch: ImageBatch, target: Tensor, grid: Sequence[int], candidates: Candidates, rows: slice) -> tuple:
    """The batch with the candidates' maps, and all cases."""
    maps = {
        Case(number, name): {int(target[rows][number]): scores.reshape(*grid).float()}
        for name, every in candidates.items()
        for number, scores in enumerate(every[rows])
    }
    return replace(batch, maps=maps), list(maps)


def saco(batch: ImageBatch, cases: Sequence[Case], groups: int = 10) -> list[float]:
    """SaCo: groups of pixels by salience, each replaced by the image's mean alone; in percent."""
    found = []
    for case in cases:
        picture, image = batch.pictures[case.image], batch.images[case.image]
        map_ = enlarged(batch.map_of(case, picture.predicted)[None].double(), batch.runner.size, "bilinear")[0]
        order = map_.flatten().argsort(descending=True, stable=True)
        parts = torch.tensor_split(order, groups)
        erased = torch.zeros(groups, order.numel(), dtype=torch.bool)
        for number, part in enumerate(parts):
            erased[number, part] = True
        mean = image.mean(dim=(1, 2), keepdim=True)
        filled = torch.where(erased.view(groups, 1, *map_.shape), mean, image)
        logits = torch.cat([batch.logits[case.image : case.image + 1], batch.runner.logits(filled)]).double()
        probability = logits.softmax(-1)[:, picture.predicted]
        effect = (probability[0] - probability[1:]).numpy()
        salience = np.array([float(map_.flatten()[part].sum()) for part in parts])
        first, second = np.triu_indices(groups, k=1)
        weights = salience[first] - salience[second]
        signs = np.where(effect[first] >= effect[second], 1.0, -1.0)
        found.append(100 * float((signs * weights).sum() / weights.sum()) if weights.sum() > 0 else 0.0)
    return found


def measured(  # noqa: C901 - one part after the other
    name: str,
    samples: Sequence[Sample],
    base: Mapping[str, Any],
    candidates: Candidates,
    parts: Sequence[str],
    percent: Sequence[int],
) -> Table:
    """Measure candidates on photos by ``segmentation``, ``tokens``, ``pixels`` and ``saco``, photo by photo."""
    _, adapter = open_model(name)
    assert [sample.name for sample in samples] == list(base["names"])
    table: Table = {}
    steps = tuple(percent)
    ratios = np.array(steps) / 100

    def add(column: Column, case: Case, value: float) -> None:
        table.setdefault(column.name, {}).setdefault(case.method, []).append(value)

    for start in range(0, len(samples), TOGETHER):
        some = samples[start : start + TOGETHER]
        opened = adapter.open(some, [adapter.prepare(sample) for sample in some])
        batch, cases = with_maps(opened, base["target"], base["grid"], candidates, slice(start, start + TOGETHER))
        if "segmentation" in parts:
            precision = AveragePrecision(explained="predicted").measure(
                replace(batch, pictures=tuple(replace(each, objects=(each.predicted,)) for each in batch.pictures)),
                cases,
            )
            for case, values, more in zip(cases, Segmentation().measure(batch, cases), precision, strict=True):
                add(ACC, case, _accuracy(values))
                add(IOU, case, _iou(values))
                add(AP, case, 100 * next(iter(more.values())))
        if "tokens" in parts:
            task = InsertionDeletion(explained="predicted", percent=steps)
            for case, values in zip(cases, task.measure(batch, cases), strict=True):
                picture = batch.pictures[case.image]
                p0 = float(batch.logits[case.image].double().softmax(-1)[picture.predicted])
                for way, probability, accuracy, at in (
                    ("deletion_", DEL, DELACC, [0, *ratios]),
                    ("insertion_", INS, INSACC, [*ratios, 1]),
                ):
                    drops = np.array([values[key] for key in values if key.startswith(f"{way}drop")])
                    hits = np.array([values[key] for key in values if key.startswith(f"{way}hit")])
                    add(probability, case, trapezoid(p0 - drops, at))
                    add(accuracy, case, trapezoid(hits, at))
        if "pixels" in parts:
            erasing = ErasingAccuracy(explained=("predicted",), percent=steps)
            for case, values in zip(cases, erasing.measure(batch, cases), strict=True):
                for way, column in (("positive", POS), ("negative", NEG)):
                    hits = [values[key] for key in values if key.startswith(f"predicted_{way}_")]
                    add(column, case, trapezoid(np.array(hits), [0, *ratios]))
        if "saco" in parts:
            for case, value in zip(cases, saco(batch, cases), strict=True):
                add(SACO, case, value)
        print(f"measured {start + len(some)} of {len(samples)}", *parts, flush=True)
    return {column: {each: np.array(values) for each, values in of.items()} for column, of in table.items()}


def _accuracy(values: Mapping[str, float]) -> float:
    correct = values["intersection_background"] + values["intersection_foreground"]
    return 100 * correct / (values["intersection_background"] + values["union_foreground"])


def _iou(values: Mapping[str, float]) -> float:
    parts = [values[f"intersection_{side}"] / max(values[f"union_{side}"], 1) for side in ("background", "foreground")]
    return 100 * sum(parts) / 2


def sign_flip(differences: np.ndarray, draws: int = 20_000, seed: int = 0) -> float:
    """Two-sided p of a paired permutation test: the signs of the differences are flipped at random."""
    random = np.random.default_rng(seed)
    signs = random.choice([-1.0, 1.0], size=(draws, len(differences)))
    found = np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9
    return float((found.sum() + 1) / (draws + 1))


def main() -> None:
    """Make base maps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["maps"])
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument("--half", choices=["choose", "report"], default="choose")
    parser.add_argument("--photos", type=int, default=40)
    parser.add_argument("--bases", nargs="+", default=list(BASES), help="alti.skipplus is the dearest by far")
    parser.add_argument("--kind", default="", help="what the file is called besides")
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cached(options.cache, options.model, options.half, options.photos, options.bases, options.kind)


if __name__ == "__main__":
    main()
