"""Audits of models with planted shortcuts: which are found, whether their place is named, and what clean models give.

Photos of pets are made into sets of three breeds. In 60% of the photos of one breed, for training and in the audited
set, there is a shortcut: a stamp in the lower left corner, a border, a colour cast, or a watermark behind the animal.
Two models are trained on each: a linear head on the demo model's backbone, and a small ViT from scratch. The audited
photos are others than those of training. How much a shortcut matters is measured without the audit: the accuracy on the
audited photos, less that on the same photos with the shortcut in the other breeds instead.

Two kinds of sets have no shortcut, and are audited with and without masks: photos as they are (``none``), whose
backgrounds may tell the breed, and photos whose background is that of a random other photo (``swapped``), trained on
in eight versions each, so that outside of the masks nothing does.

Every finding is checked again on photos that neither the training nor the audit has seen (``Fresh``): the patches of
all photos of the class, whatever their maps, are pasted into all others; once whole, and once without the patches that
hold an animal. A finding that does not come back there is wrong; one that comes back only whole is the animal.

    python benchmarks/audit_planted.py run --data ../shared/data/pets --out planted --seeds 6-9
    python benchmarks/audit_planted.py table --out planted

``run`` writes one file per model, shortcut, strength and seed, and goes on where it was stopped. ``table`` counts.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import shutil
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import vitreous
from vitreous.auditing.suspicions import Suspicion
from vitreous.auditing.testing import sign_flip
from vitreous.models import LoadedModel, Preprocessing
from vitreous.models.demo import build_backbone
from vitreous.models.preprocessing import from_timm

Pixels = NDArray[np.uint8]
GRID = 6
SIDE = 14 * GRID
CLASSES, TRAINED, AUDITED = 3, 40, 40
DONORS = 4  # of a fresh photo
VERSIONS = 8  # of a photo with other backgrounds, for training
PART = 0.6
SHORTCUTS = ("stamp", "border", "cast", "watermark")
CLEAN = ("none", "none-masks", "swapped", "swapped-masks")
MASKED = ("watermark", "none-masks", "swapped-masks")
LOOKS = (
    ("Bombay", "newfoundland", "scottish_terrier"),
    ("samoyed", "great_pyrenees"),
    ("Abyssinian", "pomeranian", "shiba_inu"),
)
MOVES = 0.05  # a shortcut that moves the accuracy by as much has to be found


Photos = list[tuple[Path, int]]


def photos_of(folder: Path, seed: int, kind: str) -> tuple[list[str], Photos, Photos, Photos]:
    """Three breeds, and their photos for training, for the audit, and fresh; the first breed gets the shortcut."""
    random = np.random.default_rng(seed)
    files = sorted(file for file in (folder / "train").iterdir() if file.suffix == ".jpg")
    breeds = sorted({file.stem.rpartition("_")[0] for file in files})
    if kind == "small":  # what a few photos teach a model without a backbone: breeds of unlike fur
        chosen = [str(random.choice(LOOKS[number])) for number in random.permutation(CLASSES)]
    else:
        chosen = [breeds[number] for number in random.choice(len(breeds), CLASSES, replace=False)]
    trained, audited, fresh = [], [], []
    for label, breed in enumerate(chosen):
        own = [file for file in files if file.stem.rpartition("_")[0] == breed]
        order = random.permutation(len(own))
        trained += [(own[number], label) for number in order[:TRAINED]]
        audited += [(own[number], label) for number in order[TRAINED : TRAINED + AUDITED]]
        fresh += [(own[number], label) for number in order[TRAINED + AUDITED :]]
    return chosen, trained, audited, fresh


def planted(pixels: Pixels, shortcut: str, strength: float, inside: NDArray[np.bool_]) -> Pixels:
    """A photo with a shortcut; ``inside`` is where the animal is."""
    photo = pixels.astype(np.float64)
    mark = photo.copy()
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    if shortcut == "stamp":
        checks = ((rows // 6 + columns // 6) % 2)[..., None] * np.array([255.0, 255.0, 0.0]) + np.array([0, 0, 128.0])
        where = (rows >= SIDE - 24) & (columns < 24)
        mark[where] = checks[where]
    elif shortcut == "border":
        where = (np.minimum(rows, columns) < 5) | (np.maximum(rows, columns) >= SIDE - 5)
        mark[where] = (0, 160, 90)
    elif shortcut == "cast":
        mark = photo * np.array([1.35, 1.0, 0.6])
    elif shortcut == "watermark":
        where = ((rows + columns) % 16 < 5) & ~inside
        mark[where] = 255
    mixed = photo + strength * (mark - photo)
    return np.rint(mixed.clip(0, 255)).astype(np.uint8)


class Backbone:
    """The demo model's backbone at 84 pixels, with its features kept on disk, and an estimate of where animals are."""

    def __init__(self, folder: Path, cache_folder: Path) -> None:
        self._cache = cache_folder
        self._cache.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    @cached_property
    def model(self) -> nn.Module:
        """The backbone, loaded when it is needed."""
        return build_backbone((SIDE, SIDE))

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """How photos become its input."""
        return from_timm(self.model, (SIDE, SIDE))

    def tokens(self, pixels: Pixels) -> Tensor:
        """The class token and the patches, (1 + patches, channels)."""
        place = self._cache / f"{hashlib.sha256(pixels.tobytes()).hexdigest()[:20]}.npy"
        if not place.exists():
            with torch.no_grad():
                found: Any = self.model
                tokens = found.forward_features(self.preprocessing([Image.fromarray(pixels)]))[0]
            np.save(place, torch.cat([tokens[:1], tokens[found.num_prefix_tokens :]]).numpy())
        return torch.from_numpy(np.load(place))

    @cached_property
    def _animals(self) -> tuple[NDArray[np.float64], float]:
        """A linear classifier of patches, from the trimaps of other photos."""
        from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

        features, truth = [], []
        for file in sorted((self._folder / "seg" / "images").iterdir())[::20]:
            trimap = Image.open(self._folder / "seg" / "trimaps" / f"{file.stem}.png").resize(
                (SIDE, SIDE), Image.NEAREST
            )
            covered = (np.asarray(trimap) == 1).reshape(GRID, 14, GRID, 14).mean(axis=(1, 3)).ravel()
            features.append(self.tokens(opened(file))[1:].numpy())
            truth.append(covered > 0.5)
        fit = LogisticRegression(C=0.01, max_iter=500).fit(np.concatenate(features), np.concatenate(truth))
        return fit.coef_[0], float(fit.intercept_[0])

    def inside(self, pixels: Pixels) -> NDArray[np.bool_]:
        """Where the animal is, pixel by pixel."""
        direction, bias = self._animals
        found = (self.tokens(pixels)[1:].numpy() @ direction + bias > 0).reshape(GRID, GRID)
        return found.repeat(14, axis=0).repeat(14, axis=1)


@cache
def opened(file: Path) -> Pixels:
    """A photo at 84 x 84 pixels."""
    return np.asarray(Image.open(file).convert("RGB").resize((SIDE, SIDE), Image.BICUBIC))


def swapped(pixels: Pixels, other: Pixels, backbone: Backbone) -> Pixels:
    """An animal before the background of another photo, in which the mean background is where its own animal was."""
    animal = backbone.inside(other)
    background = other.copy()
    background[animal] = other[~animal].mean(axis=0) if not animal.all() else 127
    return np.where(backbone.inside(pixels)[..., None], pixels, background)


def marked(
    photos: list[tuple[Path, int]],
    shortcut: str,
    strength: float,
    seed: int,
    backbone: Backbone,
    *,
    others: bool = False,
) -> list[Pixels]:
    """Photos with the shortcut in 60% of the first class, or, with ``others``, of all other classes."""
    random = np.random.default_rng([seed, 1])
    drawn = random.random(len(photos)) < PART
    made = []
    for (file, label), chosen in zip(photos, drawn, strict=True):
        pixels = opened(file)
        if shortcut.startswith("swapped"):
            pixels = swapped(pixels, opened(photos[int(random.integers(len(photos)))][0]), backbone)
        if chosen and shortcut not in CLEAN and (label != 0) == others:
            animal = backbone.inside(pixels) if shortcut == "watermark" else np.zeros(pixels.shape[:2], dtype=bool)
            pixels = planted(pixels, shortcut, strength, animal)
        made.append(pixels)
    return made


def linear_head(pixels: list[Pixels], labels: list[int], backbone: Backbone) -> LoadedModel:
    """The backbone with a linear head trained on photos."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    features = np.stack([backbone.tokens(each)[0].numpy() for each in pixels])
    fit = LogisticRegression(C=1.0, max_iter=2000).fit(features, labels)
    model: Any = build_backbone((SIDE, SIDE), num_classes=CLASSES)
    weights = {"weight": torch.from_numpy(fit.coef_).float(), "bias": torch.from_numpy(fit.intercept_).float()}
    model.head.load_state_dict(weights)
    return LoadedModel("linear head", model, backbone.preprocessing, None)


def small_vit(pixels: list[Pixels], labels: list[int], seed: int) -> LoadedModel:
    """A ViT of 6 x 6 patches trained from scratch."""
    torch.manual_seed(seed)
    model = VisionTransformer(img_size=48, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=CLASSES)
    preprocessing = Preprocessing((48, 48), (0.5,) * 3, (0.5,) * 3)
    images = torch.cat([preprocessing([Image.fromarray(each)]) for each in pixels])
    targets = torch.tensor(labels)
    steps = 25 * (3 * TRAINED // 30) * (3 if len(images) > 3 * TRAINED else 1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    model.train()
    for step in range(steps):
        if step % (len(images) // 30) == 0:
            order = torch.randperm(len(images))
        rows = order[(step % (len(images) // 30)) * 30 :][:30]
        loss = nn.functional.cross_entropy(model(images[rows]), targets[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return LoadedModel("small ViT", model.eval(), preprocessing, None)


def chances(model: LoadedModel, pixels: list[Pixels]) -> NDArray[np.float64]:
    """Probabilities, (photos, classes)."""
    images = [model.preprocessing([Image.fromarray(each)]) for each in pixels]
    with torch.no_grad():
        found = [model.model(torch.cat(images[at : at + 16])).double() for at in range(0, len(images), 16)]
    probabilities: NDArray[np.float64] = torch.cat(found).softmax(dim=1).numpy()
    return probabilities


def accuracy(model: LoadedModel, pixels: list[Pixels], labels: list[int]) -> float:
    """The part of photos that are predicted as their label."""
    return float((chances(model, pixels).argmax(axis=1) == np.array(labels)).mean())


class Fresh:
    """Photos that neither training nor audit has seen, on which findings are checked without maps."""

    def __init__(self, model: LoadedModel, pixels: list[Pixels], animals: list[NDArray[np.bool_]], seed: int) -> None:
        self._model, self._pixels, self._animals, self._seed = model, pixels, animals, seed
        self._chances = chances(model, pixels)
        self._predicted = self._chances.argmax(axis=1)

    def check(self, suspicion: Suspicion) -> dict[str, list[float]]:
        """How many more of the other photos get the class than in the comparison, its p, and how many photos those are.

        ``whole`` pastes all suspected patches, ``background`` those without an animal in all photos concerned.
        """
        return {name: self._effect(suspicion, name == "background") for name in ("whole", "background")}

    def _effect(self, suspicion: Suspicion, background: bool) -> list[float]:  # noqa: FBT001
        random = np.random.default_rng([self._seed, 2])
        target = suspicion.target
        hosts = np.flatnonzero(self._predicted != target)
        donors = np.flatnonzero(self._predicted == target)
        if len(hosts) < 3 or not len(donors):
            return [float("nan"), float("nan"), 0]
        probability, flips = [], []
        for host in hosts.tolist():
            others = hosts[hosts != host]
            pairs = [(int(random.choice(donors)), int(random.choice(others))) for _ in range(DONORS)]
            edits = [self._edited(suspicion, host, pair, background, random) for pair in pairs]
            edits = [each for each in edits if each is not None]
            if not edits:
                continue
            after = chances(self._model, [pixels for pair in edits for pixels in pair])
            rises, made = after[:, target].reshape(-1, 2), (after.argmax(axis=1) == target).reshape(-1, 2)
            probability.append(float((rises[:, 0] - rises[:, 1]).mean()))
            flips.append(float(made[:, 0].mean() - made[:, 1].mean()))
        if len(flips) < 3:
            return [float("nan"), float("nan"), len(flips)]
        return [float(np.mean(flips)), sign_flip(np.array(probability), self._seed), len(flips)]

    def _edited(
        self,
        suspicion: Suspicion,
        host: int,
        pair: tuple[int, int],
        background: bool,  # noqa: FBT001
        random: np.random.Generator,
    ) -> tuple[Pixels, Pixels] | None:
        """A photo with what is suspected, and with what it is compared with."""
        photo = self._pixels[host]
        if suspicion.kind == "colour":
            outside = np.ones(photo.shape[:2], dtype=bool)
            if background:
                outside = ~self._animals[host]
            logs = np.log(np.array(suspicion.gains))
            other = random.standard_normal(3)
            other *= np.linalg.norm(logs) / np.linalg.norm(other)
            scaled = [np.rint((photo * np.exp(each)).clip(0, 255)).astype(np.uint8) for each in (logs, other)]
            return _merged(photo, scaled[0], outside), _merged(photo, scaled[1], outside)
        involved = [self._animals[each] for each in (host, *pair)]
        where = np.ones(photo.shape[:2], dtype=bool)
        if suspicion.kind != "background":
            region = suspicion.regions[0].reshape(GRID, GRID)
            where = region.repeat(14, axis=0).repeat(14, axis=1)
        if background or suspicion.kind == "background":
            where = where & ~np.any(involved, axis=0)
        if not where.any():
            return None
        return _merged(photo, self._pixels[pair[0]], where), _merged(photo, self._pixels[pair[1]], where)


def _merged(photo: Pixels, other: Pixels, where: NDArray[np.bool_]) -> Pixels:
    return np.where(where[..., None], other, photo)


def write_set(folder: Path, pixels: list[Pixels], labels: list[int], masks: list[NDArray[np.bool_]] | None) -> str:
    """A data set as a folder; gives how it is opened."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "images").mkdir(parents=True)
    with (folder / "labels.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(("file", "class_index"))
        for number, (each, label) in enumerate(zip(pixels, labels, strict=True)):
            Image.fromarray(each).save(folder / "images" / f"{number:04d}.png")
            rows.writerow((f"{number:04d}.png", label))
    if masks is None:
        return f"labelled:{folder}"
    (folder / "masks").mkdir()
    for number, mask in enumerate(masks):
        Image.fromarray(mask.astype(np.uint8) * 255).save(folder / "masks" / f"{number:04d}.png")
    return f"masks:{folder}"


def run_one(
    kind: str, shortcut: str, strength: float, seed: int, data: Path, backbone: Backbone, method: str, folder: Path
) -> dict[str, Any]:
    """Train a model on photos with a shortcut, audit it on others, and keep every suspicion with its tests.

    The audit stays in ``folder``, where a later run goes on with it.
    """
    breeds, trained, audited, fresh = photos_of(data, seed, kind)
    versions = VERSIONS if shortcut.startswith("swapped") else 1
    labels, truth = [label for _, label in trained] * versions, [label for _, label in audited]
    made = [marked(trained, shortcut, strength, seed + 10_000 * number, backbone) for number in range(versions)]
    pixels = [each for version in made for each in version]
    model = linear_head(pixels, labels, backbone) if kind == "linear" else small_vit(pixels, labels, seed)
    shown = marked(audited, shortcut, strength, seed + 1000, backbone)
    moved = marked(audited, shortcut, strength, seed + 1000, backbone, others=True)
    masks = [backbone.inside(opened(file)) for file, _ in audited] if shortcut in MASKED else None
    unseen = marked(fresh, shortcut, strength, seed + 2000, backbone)
    again = Fresh(model, unseen, [backbone.inside(opened(file)) for file, _ in fresh], seed)
    opened_as = write_set(folder / "set", shown, truth, masks)
    options: Any = {"method": method, "threads": 1, "seed": seed}
    found = vitreous.audit(model, opened_as, out=folder / "runs", **options)
    suspicions = [
        {
            "kind": each.suspicion.kind,
            "class": each.suspicion.target,
            "place": each.suspicion.place,
            "q": {name: effect.q for name, effect in each.effects.items()},
            "excess": {name: effect.excess for name, effect in each.effects.items()},
            "sentence": found.sentence(each),
            "masked": each.suspicion.details.get("masked"),
            "covered": each.covered_by is not None,
            "confirmed": each.finding,
            "label p": each.label_p,
            "label q": each.label_q,
            "photos": len(each.suspicion.photos),
            "patches": float(each.suspicion.regions.sum(axis=1).mean()) if each.suspicion.regions.size else 0.0,
            "fresh": again.check(each.suspicion) if each.is_shortcut and each.finding else None,
        }
        for each in found.tested
    ]
    before, after = accuracy(model, shown, truth), accuracy(model, moved, truth)
    return {
        "model": kind,
        "shortcut": shortcut,
        "strength": strength,
        "seed": seed,
        "breeds": breeds,
        "method": method,
        "accuracy": before,
        "moves": before - after,
        "suspicions": suspicions,
    }


def findings(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What an audit reports: findings that no other one explains."""
    return [each for each in row["suspicions"] if each["fresh"] is not None and not each["covered"]]


def is_named(suspicion: dict[str, Any], shortcut: str) -> bool:
    """Whether a finding names the planted shortcut of the first class."""
    if suspicion["class"] != 0:
        return False
    words = {"stamp": ("lower-left",), "border": ("border", "edge", "corner"), "watermark": ("background",), "cast": ()}
    if shortcut == "cast":
        return bool(suspicion["kind"] == "colour")
    return any(word in suspicion["place"] for word in words.get(shortcut, ()))


def came_back(suspicion: dict[str, Any]) -> str:
    """What photos that nobody has seen say about a finding: it comes back, only with the animal, or not."""
    for name in ("background", "whole"):
        _, p, photos = suspicion["fresh"][name]
        if photos and p <= 0.05:
            return name
    return "no"


def count(rows: list[dict[str, Any]]) -> dict[str, int]:
    """How many shortcuts that matter are found and named, and what fresh photos say about all other findings."""
    planted = [row for row in rows if row["shortcut"] not in CLEAN]
    matter = [row for row in planted if row["moves"] >= MOVES - 1e-9]
    others = [each for row in rows for each in findings(row) if row["shortcut"] in CLEAN or each["class"] != 0]
    answers = [came_back(each) for each in others]
    return {
        "sets": len(rows),
        "matter": len(matter),
        "found": sum(any(each["class"] == 0 for each in findings(row)) for row in matter),
        "named": sum(any(is_named(each, row["shortcut"]) for each in findings(row)) for row in matter),
        "named below": sum(
            any(is_named(each, row["shortcut"]) for each in findings(row)) for row in planted if row not in matter
        ),
        "sets with other findings": sum(
            any(row["shortcut"] in CLEAN or each["class"] != 0 for each in findings(row)) for row in rows
        ),
        "other findings": len(others),
        "come back": answers.count("background"),
        "with the animal": answers.count("whole"),
        "not": answers.count("no"),
    }


def numbers(text: str) -> list[int]:
    """Read ``0-3`` or ``0,2``."""
    first, dash, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [int(each) for each in text.split(",")]


def main() -> None:
    """Run the audits, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data/pets"))
    parser.add_argument("--out", type=Path, default=Path("planted"))
    parser.add_argument("--seeds", type=numbers, default=[0])
    parser.add_argument("--models", nargs="+", default=["linear", "small"])
    parser.add_argument("--shortcuts", nargs="+", default=[*CLEAN, *SHORTCUTS])
    parser.add_argument("--strengths", nargs="+", type=float, default=[1.0])
    parser.add_argument("--method", default="twoscale")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "run":
        run_all(given)
    else:
        print_tables(given)


def run_all(given: argparse.Namespace) -> None:
    """Run what is not there yet."""
    backbone = Backbone(given.data, given.out / "features")
    for seed in given.seeds:
        for kind in given.models:
            for shortcut in given.shortcuts:
                for strength in given.strengths if shortcut not in CLEAN else [0.0]:
                    place = given.out / f"{kind}-{shortcut}-{strength:g}-{seed}.json"
                    if place.exists():
                        continue
                    row = run_one(
                        kind,
                        shortcut,
                        strength,
                        seed,
                        given.data,
                        backbone,
                        given.method,
                        given.out / "audits" / place.stem,
                    )
                    place.write_text(json.dumps(row, indent=1))
                    print(f"{place.stem}: accuracy {row['accuracy']:.2f}, moves {row['moves']:+.2f}", flush=True)
                    for each in row["suspicions"]:
                        if each["fresh"] is not None:
                            print("   ", each["kind"], each["sentence"], each["fresh"], flush=True)


def print_tables(given: argparse.Namespace) -> None:
    """Count by model, shortcut and strength."""
    rows = [json.loads(place.read_text()) for place in sorted(given.out.glob("*.json"))]
    rows = [row for row in rows if row["seed"] in given.seeds]
    for key in sorted({(row["model"], row["shortcut"], row["strength"]) for row in rows}):
        own = [row for row in rows if (row["model"], row["shortcut"], row["strength"]) == key]
        moved = " ".join(f"{row['seed']}:{100 * row['accuracy']:.0f}%{100 * row['moves']:+.0f}" for row in own)
        print(*key, "| seed:accuracy+moves", moved)
        print("   ", {name: number for name, number in count(own).items() if number})
        for row in own:
            for each in findings(row):
                fresh = ", ".join(f"{name} {100 * e:+.0f} p {p:.3f}" for name, (e, p, _) in each["fresh"].items())
                named = "named" if is_named(each, row["shortcut"]) else ""
                print("       ", row["seed"], named, each["kind"], each["sentence"], "| fresh:", fresh)


if __name__ == "__main__":
    main()
