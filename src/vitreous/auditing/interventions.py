"""Interventions: suspected patches are dropped, replaced and pasted, and the same is done with patches to compare.

What is compared with: for removal, patches of the same number and shape elsewhere in the same photo; for pasting,
patches at the same place of photos that are predicted as other classes. All of it is paired photo by photo. Removal is
about the photos that show what is suspected, pasting about all photos of the class.

Where labels are known, the same is pasted once more from photos that are labelled as the class, compared with photos
that are not. What does not go with the labels makes no difference there, however much the model reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous._utils.torch_state import float64_array
from vitreous.auditing.collected import Bools, Collected, Floats, Ints
from vitreous.auditing.suspicions import Suspicion
from vitreous.datasets.dataset import Sample
from vitreous.errors import UnsupportedModelError
from vitreous.evaluation.runner.measure import EvaluationContext
from vitreous.evaluation.tasks.task import ImageBatch, enlarged
from vitreous.metrics.perturbation import probabilities

_KEPT_PHOTOS = 48  # decoded photos in memory
_TRIED_SHIFTS = 8
_LARGE = 1 / 3  # part of the patches
_LABELLED = 32  # photos labelled as a class that patches are pasted of, at least: only a part of them may show any
_RANDOM_DROPS = 20  # that one unusual photo is compared with

Effects = dict[str, list[float]]


@dataclass(frozen=True)
class InterventionSettings:
    """How suspicions are tested.

    Attributes:
        photos: photos per suspicion, drawn at random where there are more.
        controls: regions elsewhere that each removal is compared with.
        seed: of photos, regions and hosts.
    """

    photos: int = 32
    controls: int = 2
    seed: int = 0


class Interventions:
    """Runs a model on edited photos of a data set.

    Args:
        context: model and data set.
        collected: what is known of the photos.
        settings: how many, and the seed.
    """

    def __init__(self, context: EvaluationContext, collected: Collected, settings: InterventionSettings) -> None:
        self._context, self._collected, self._settings = context, collected, settings
        first = context.data.load(int(collected.index[0]))
        batch: Any = context.adapter.open([first], [context.adapter.prepare(first)])
        self._batch: ImageBatch = batch
        self._runner = self._batch.runner
        self._can_drop = True
        self._pixels = lru_cache(_KEPT_PHOTOS)(self._load)

    def _load(self, photo: int) -> Tensor:
        """A photo as the model's input, (1, channel, height, width)."""
        sample = self._context.data.load(int(self._collected.index[photo]))
        assert isinstance(sample, Sample)
        prepared: Tensor = self._context.adapter.prepare(sample)
        return prepared

    def test(self, suspicion: Suspicion) -> Effects:
        """Intervene on the photos of a suspicion; by name, one number per photo, NaN where it could not be done."""
        random = np.random.default_rng([self._settings.seed, int(suspicion.key[:15], 16)])
        rows = np.arange(len(suspicion.photos))
        if len(rows) > self._settings.photos:
            rows = np.sort(random.choice(rows, self._settings.photos, replace=False))
        if suspicion.kind == "unusual photo":
            return self._unusual(suspicion, random)
        if suspicion.kind == "colour":
            found = self._recoloured(suspicion, suspicion.photos[rows], random)
        else:
            test = self._both_classes if suspicion.kind == "shared evidence" else self._removal
            found = [
                {"photo": float(photo), **test(suspicion, int(photo), region, random)}
                for photo, region in zip(suspicion.photos[rows], suspicion.regions[rows], strict=True)
            ]
            if suspicion.kind != "shared evidence":
                found += self._insertions(suspicion, random)
                found += self._labelled_insertions(suspicion)
        names = dict.fromkeys(name for effects in found for name in effects)
        return {name: [effects.get(name, float("nan")) for effects in found] for name in names}

    def _removal(
        self, suspicion: Suspicion, photo: int, region: Bools, random: np.random.Generator
    ) -> dict[str, float]:
        """Drop the suspected patches of one photo, and replace them by those of a photo of another class."""
        region = self._outside(photo, region)
        if not region.any():
            return {}
        own, thin = self._pixels(photo), _is_thin(suspicion, region)
        moved = [self._elsewhere(region, random) for _ in range(self._settings.controls)]
        effects = {} if thin else self._dropped(own, photo, suspicion.target, region, moved)
        _, donor = self._others(suspicion.target, random)
        if donor is None:
            return effects
        given = self._pixels(donor)
        edits = [self._put(own, given, other, region, thin=thin, moved=False) for other in (region, *moved)]
        chances, whole = self._chances(torch.cat(edits)), float(self._collected.probability[photo])
        effects |= _removed("replace", whole, chances[0], suspicion.target)
        return effects | _removed_from("replace_control", whole, chances[1:], suspicion.target)

    def _insertions(self, suspicion: Suspicion, random: np.random.Generator) -> list[dict[str, float]]:
        """Paste patches into photos of other classes: of any photos of the class, not those that their maps selected.

        Where a map points to a place, that place matters for this one photo, whatever the class relies on.
        """
        photos = self._collected.of_class(suspicion.target)
        if len(photos) > self._settings.photos:
            photos = np.sort(random.choice(photos, self._settings.photos, replace=False))
        return [{"photo": float(photo), **self._insertion(suspicion, int(photo), random)} for photo in photos]

    def _labelled_insertions(self, suspicion: Suspicion) -> list[dict[str, float]]:
        """Paste patches of photos that are labelled as the class, and of photos that are not, into others."""
        own = self._collected.labelled(suspicion.target)
        if own is None or not own.any() or own.all():
            return []
        random = np.random.default_rng([self._settings.seed, int(suspicion.key[:15], 16), 1])
        photos, others = np.flatnonzero(own), np.flatnonzero(~own)
        most = max(self._settings.photos, _LABELLED)
        if len(photos) > most:
            photos = np.sort(random.choice(photos, most, replace=False))
        found = []
        for photo in photos.tolist():
            host, _ = self._others(suspicion.target, random)
            donor = int(random.choice(_one_class(self._collected.label, others, random)))
            if host is None or host == donor:
                continue
            region, pasted = self._pasted(suspicion, photo, host, donor)
            if not pasted.any():
                continue
            sources = [self._pixels(each) for each in (photo, donor)]
            thin, there = _is_thin(suspicion, region), self._pixels(host)
            chances = self._chances(
                torch.cat([*(self._put(there, source, pasted, pasted, thin=thin) for source in sources), there])
            )
            effects = {"photo": float(photo)}
            for name, after in zip(("labelled", "labelled_control"), chances[:-1], strict=True):
                effects |= _added(name, chances[-1], after, suspicion.target)
            found.append(effects)
        return found

    def _pasted(self, suspicion: Suspicion, photo: int, host: int, donor: int) -> tuple[Bools, Bools]:
        """The suspected patches of a photo, and those of them that are known to be background in all three photos."""
        background = suspicion.kind == "background"
        region = self._collected.background[photo] if background else suspicion.regions[0]
        region = self._outside(photo, region)
        pasted = region
        for other in (host, donor):
            if background or self._collected.masked[other]:
                pasted = pasted & self._collected.background[other]
        return region, pasted

    def _insertion(self, suspicion: Suspicion, photo: int, random: np.random.Generator) -> dict[str, float]:
        target = suspicion.target
        host, donor = self._others(target, random)
        if host is None or donor is None:
            return {}
        region, pasted = self._pasted(suspicion, photo, host, donor)
        if not region.any():
            return {}
        own, there, given = (self._pixels(each) for each in (photo, host, donor))
        thin = _is_thin(suspicion, region)
        away = self._elsewhere(region, random)
        places = [(pasted, pasted), (away, region)]
        edits = [self._put(there, source, *place, thin=thin) for place in places for source in (own, given)]
        chances = self._chances(torch.cat([*edits, there]))
        effects: dict[str, float] = {}
        names = ("paste", "paste_control", "elsewhere", "elsewhere_control")
        for name, after in zip(names, chances[:-1], strict=True):
            if "paste" not in name or pasted.any():
                effects |= _added(name, chances[-1], after, target)
        return effects

    def _outside(self, photo: int, region: Bools) -> Bools:
        """Patches of a region without the object, where it is known by a mask."""
        return region & self._collected.background[photo] if self._collected.masked[photo] else region

    def _dropped(self, own: Tensor, photo: int, target: int, region: Bools, moved: Sequence[Bools]) -> dict[str, float]:
        """Drop the tokens of a region, and as many elsewhere; nothing where the model cannot do without tokens."""
        chances = self._without(own, (region, *moved))
        if chances is None:
            return {}
        whole = float(self._collected.probability[photo])
        return _removed("drop", whole, chances[0], target) | _removed_from("drop_control", whole, chances[1:], target)

    def _recoloured(self, suspicion: Suspicion, photos: Ints, random: np.random.Generator) -> list[dict[str, float]]:
        """Take a colour out of its photos and put it into others, compared with as strong a change of other colours.

        The same is put into all others, so these may be more than the photos that have the colour.
        """
        target, logs = suspicion.target, np.log(np.array(suspicion.gains))
        predicted = self._collected.predicted
        hosts = np.flatnonzero(predicted != target)
        if len(hosts) < 2:
            return []
        weights = 1 / np.bincount(predicted[hosts])[predicted[hosts]]  # classes count alike
        count = min(len(hosts), self._settings.photos)
        hosts = random.choice(hosts, count, replace=False, p=weights / weights.sum())
        found = []
        for photo in photos.tolist():
            whole, chances = float(self._collected.probability[photo]), self._scaled(photo, -logs, random)
            controls = _removed_from("replace_control", whole, chances[1:-1], target)
            found.append({"photo": float(photo), **_removed("replace", whole, chances[0], target), **controls})
        for host in hosts.tolist():
            chances = self._scaled(host, logs, random)
            added = [_added("paste_control", chances[-1], each, target) for each in chances[1:-1]]
            controls = {name: float(np.mean([each[name] for each in added])) for name in added[0]}
            found.append({"photo": float(host), **_added("paste", chances[-1], chances[0], target), **controls})
        return found

    def _scaled(self, photo: int, logs: Floats, random: np.random.Generator) -> Floats:
        """Probabilities of a photo in another colour, in as many random ones as there are controls, and as it is."""
        pixels = self._pixels(photo)
        changes = [logs, *(_turned(logs, random) for _ in range(self._settings.controls))]
        return self._chances(torch.cat([*(self._recolour(pixels, photo, each) for each in changes), pixels]))

    def _recolour(self, pixels: Tensor, photo: int, logs: Floats) -> Tensor:
        """Scale the channels of a photo: outside of its object where there is a mask, else all of it."""
        gains = torch.from_numpy(np.exp(logs)).to(pixels)[: pixels.shape[1], None, None]
        black = self._runner.black
        floor = pixels.amin(dim=(0, 2, 3)) if black is None else black.to(pixels)
        floor = floor[:, None, None]
        scaled = floor + (pixels - floor) * gains
        if not self._collected.masked[photo]:
            return scaled
        mask = torch.from_numpy(self._collected.background[photo].reshape(1, *self._collected.grid)).double()
        size = pixels.shape[-2], pixels.shape[-1]
        outside = enlarged(mask, size, "nearest", self._runner.layout.geometry)[0] > 0.5
        return torch.where(outside.to(pixels.device), scaled, pixels)

    def _both_classes(
        self, suspicion: Suspicion, photo: int, region: Bools, random: np.random.Generator
    ) -> dict[str, float]:
        """Drop what is evidence for one class: does the other class lose by it, compared with all further classes?"""
        own = self._pixels(photo)
        moved = [self._elsewhere(region, random) for _ in range(self._settings.controls)]
        without = self._logits_without(own, (region, *moved))
        if without is None or suspicion.other is None:
            return {}
        scores = np.concatenate([float64_array(self._runner.logits(own)), without])
        further = [number for number in range(scores.shape[1]) if number not in (suspicion.target, suspicion.other)]
        if not further:
            return {}
        lead = scores[:, suspicion.other] - scores[:, further].mean(axis=1)
        return {"drop": float(lead[0] - lead[1]), "drop_control": float(lead[0] - lead[2:].mean())}

    def _unusual(self, suspicion: Suspicion, random: np.random.Generator) -> Effects:
        """Drop the peaks of one photo, and as many patches elsewhere many times."""
        photo, region, target = int(suspicion.photos[0]), suspicion.regions[0], suspicion.target
        found: Effects = {"photo": [float(photo)]}
        moved = [_scattered(region, random) for _ in range(_RANDOM_DROPS)]
        chances = self._without(self._pixels(photo), [region, *moved])
        if chances is not None:
            falls = float(self._collected.probability[photo]) - chances[:, target]
            found |= {"drop": [float(falls[0])], "random": falls[1:].tolist()}
            found["drop_flip"] = [float(int(chances[0].argmax()) != target)]
        return found

    def _without(self, own: Tensor, regions: Sequence[Bools]) -> Floats | None:
        """The probabilities without the tokens of equally large regions; None where the model needs all tokens."""
        logits = self._logits_without(own, regions)
        return None if logits is None else probabilities(logits, outputs=self._batch.outputs)

    def _logits_without(self, own: Tensor, regions: Sequence[Bools]) -> Floats | None:
        if not self._can_drop or regions[0].all():
            return None
        kept = torch.from_numpy(np.stack([np.flatnonzero(~each) for each in regions]))
        try:
            return float64_array(self._runner.logits_of_kept(own.expand(len(kept), -1, -1, -1), kept))
        except UnsupportedModelError:
            self._can_drop = False
            return None

    def _others(self, target: int, random: np.random.Generator) -> tuple[int | None, int | None]:
        """A photo to paste into and one to compare with, of other classes than ``target``, and of two if there are."""
        predicted = self._collected.predicted
        possible = np.flatnonzero(predicted != target)
        if len(possible) < 2:
            return None, None
        host = int(random.choice(_one_class(predicted, possible, random)))
        further = possible[predicted[possible] != predicted[host]]
        further = further if len(further) else possible[possible != host]
        return host, int(random.choice(_one_class(predicted, further, random)))

    def _elsewhere(self, region: Bools, random: np.random.Generator) -> Bools:
        """A region of the same shape elsewhere, moved around the picture: of some moves the one that overlaps least."""
        grid = region.reshape(self._collected.grid)
        moves = [tuple(random.integers(0, side) for side in grid.shape) for _ in range(_TRIED_SHIFTS)]
        moved = [np.roll(grid, move, axis=(0, 1)) for move in moves]
        best: Bools = min(moved, key=lambda other: int((other & grid).sum())).ravel()
        return best

    def _put(
        self, into: Tensor, source: Tensor, where: Bools, which: Bools, *, thin: bool = False, moved: bool = True
    ) -> Tensor:
        """A photo with patches of another.

        Args:
            into: the photo.
            source: the other one.
            where: the places of the patches: ``which``, moved around the picture.
            which: the patches.
            thin: exchange only what of them lies in the outer twelfth of the picture.
            moved: whether the patches come from ``which``, rather than from ``where``.
        """
        size = into.shape[-2], into.shape[-1]
        rows, columns = self._collected.grid
        mask = torch.from_numpy(which.reshape(1, rows, columns)).double()
        pixels = enlarged(mask, size, "nearest", self._runner.layout.geometry)[0] > 0.5
        if thin:
            high, wide = (max(1, side // 12) for side in size)
            pixels[high:-high, wide:-wide] = False
        if not np.array_equal(where, which):
            down, across = _move(which.reshape(rows, columns), where.reshape(rows, columns))
            shift = down * size[0] // rows, across * size[1] // columns
            pixels = torch.roll(pixels, shift, dims=(0, 1))
            source = torch.roll(source, shift, dims=(2, 3)) if moved else source
        return torch.where(pixels.to(into.device), source, into)

    def _chances(self, images: Tensor) -> Floats:
        return probabilities(float64_array(self._runner.logits(images)), outputs=self._batch.outputs)


def _is_thin(suspicion: Suspicion, region: Bools) -> bool:
    """Whether only a frame of pixels is exchanged and nothing dropped: a border of patches may be half of a photo."""
    return suspicion.place == "border" and bool(region.mean() > _LARGE)


def _one_class(predicted: Any, photos: Any, random: np.random.Generator) -> Any:
    """The photos of one class, drawn so that classes count alike."""
    return photos[predicted[photos] == random.choice(np.unique(predicted[photos]))]


def _scattered(region: Bools, random: np.random.Generator) -> Bools:
    other = np.zeros(len(region), dtype=bool)
    other[random.choice(len(region), int(region.sum()), replace=False)] = True
    return other


def _move(which: Bools, where: Bools) -> tuple[int, int]:
    """By how many rows and columns a region was moved around."""
    for down in range(which.shape[0]):
        for across in range(which.shape[1]):
            if np.array_equal(np.roll(which, (down, across), axis=(0, 1)), where):
                return down, across
    raise AssertionError("the region was not moved but changed")


def _turned(logs: Floats, random: np.random.Generator) -> Floats:
    """A change of colour as strong, in a random direction."""
    direction = random.standard_normal(len(logs))
    turned: Floats = direction * np.linalg.norm(logs) / np.linalg.norm(direction)
    return turned


def _removed(name: str, whole: float, after: Floats, target: int) -> dict[str, float]:
    """How much the probability of the class falls, and whether another class is predicted."""
    return {name: whole - float(after[target]), f"{name}_flip": float(int(after.argmax()) != target)}


def _removed_from(name: str, whole: float, after: Floats, target: int) -> dict[str, float]:
    flips = after.argmax(axis=1) != target
    return {name: whole - float(after[:, target].mean()), f"{name}_flip": float(flips.mean())}


def _added(name: str, before: Floats, after: Floats, target: int) -> dict[str, float]:
    """How much the probability of the class rises, and whether it is predicted then."""
    return {name: float(after[target] - before[target]), f"{name}_flip": float(int(after.argmax()) == target)}
