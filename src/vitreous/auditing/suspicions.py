"""Suspicions: what maps, tokens and colours of a class have that those of other classes have not.

Nothing here is a finding. A suspicion names photos of one predicted class and what is suspected in each of them:
patches at a place, patches of the background, or a colour. Interventions decide about it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitreous.auditing.collected import Bools, Collected, Floats, Ints, middle_of, name_of_place, places_of
from vitreous.errors import MissingDependencyError

Kind = Literal["place", "background", "cluster", "colour", "shared evidence", "unusual photo"]
SHORTCUTS: tuple[Kind, ...] = ("place", "background", "cluster", "colour")

_RARE = 0.95  # quantile of other classes' photos above which a photo of a class is conspicuous
_MUCH = 0.4  # part of a class that must differ in a direction of colour, as fur near the border does in less
_MOST_CLUSTERED = 2000  # photos of a class
_COMPONENTS = 10
_TOP = 0.1  # part of the patches that counts as the peak of a map


@dataclass(frozen=True, eq=False)
class Suspicion:
    """What may decide about a class.

    Attributes:
        kind: what is suspected.
        target: the class.
        place: where it is, in words.
        photos: rows of ``Collected`` that show it.
        regions: the suspected patches of each of them, (photos, patches); of a colour, none.
        reason: why it is suspected.
        excess: how conspicuous it is: the part of the class that shows it, beyond that of other classes.
        other: the other class of shared evidence.
        gains: the colour of the photos over that of other classes, per channel.
    """

    kind: Kind
    target: int
    place: str
    photos: Ints
    regions: Bools
    reason: str
    excess: float
    other: int | None = None
    gains: tuple[float, ...] = ()
    details: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A hash of all that its tests depend on."""
        digest = hashlib.sha256(f"{self.kind}|{self.target}|{self.place}|{self.other}|{self.gains}".encode())
        digest.update(self.photos.astype(np.int64).tobytes() + np.packbits(self.regions).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class SuspicionSettings:
    """When something becomes a suspicion.

    Attributes:
        photos: fewest photos of a class that must show it.
        share: smallest part of the class's photos.
        most: suspicions that are tested, the most conspicuous first.
        unusual: photos with an unusual explanation that are tested at most.
        seed: of the clusterings.
    """

    photos: int = 6
    share: float = 0.15
    most: int = 40
    unusual: int = 5
    seed: int = 0


def find_suspicions(collected: Collected, settings: SuspicionSettings) -> tuple[list[Suspicion], int]:
    """Find what is conspicuous, the most conspicuous first, and how much was left out for being too many."""
    shortcuts: list[Suspicion] = []
    for number in collected.classes:
        if len(collected.of_class(number)) >= settings.photos:
            shortcuts += _of_class(collected, number, settings)
    shortcuts.sort(key=lambda one: -one.excess)
    others = [*_shared_evidence(collected, settings), *_unusual(collected, settings)]
    return shortcuts[: settings.most] + others, max(0, len(shortcuts) - settings.most)


def _of_class(collected: Collected, number: int, settings: SuspicionSettings) -> Iterator[Suspicion]:
    places = list(_places(collected, number, settings))
    yield from places
    yield from _background(collected, number, settings)
    yield from _clusters(collected, number, settings, [each.regions[0] for each in places])
    yield from _colour(collected, number, settings)


def _conspicuous(own: Floats, others: Floats, settings: SuspicionSettings, usual: float) -> tuple[Bools, str, float]:
    """Which photos of a class are conspicuous by a share of their evidence, why, and by how much."""
    fewest = max(settings.photos, settings.share * len(own))
    if len(others):
        high = own > np.quantile(others, _RARE)
        if high.sum() >= fewest:
            text = f"{high.mean():.0%} of its photos have more evidence there than 95% of the photos of other classes"
            return high, text, float(high.mean()) - (1 - _RARE)
    high = own > 2 * usual
    if high.sum() >= fewest and own.mean() > 2 * usual:
        return high, f"{own.mean():.0%} of the evidence lies there, on {usual:.0%} of the patches", float(own.mean())
    return np.zeros(len(own), dtype=bool), "", 0.0


def _places(collected: Collected, number: int, settings: SuspicionSettings) -> Iterator[Suspicion]:
    """Corners, edges and the border."""
    own, others = collected.of_class(number), np.flatnonzero(collected.predicted != number)
    for name, region in places_of(collected.grid).items():
        shares = collected.shares[:, region].sum(axis=1).astype(np.float64)
        high, reason, excess = _conspicuous(shares[own], shares[others], settings, float(region.mean()))
        if high.any():
            photos = own[high]
            yield Suspicion("place", number, name, photos, np.tile(region, (len(photos), 1)), reason, excess)


def _background(collected: Collected, number: int, settings: SuspicionSettings) -> Iterator[Suspicion]:
    """Evidence outside of the object: more than other classes have, or more than its share of the picture."""
    background = collected.background
    known: Bools = np.asarray(background.any(axis=1))
    own = collected.of_class(number)
    own = own[known[own]]
    if len(own) < settings.photos:
        return
    others = np.flatnonzero((collected.predicted != number) & known)
    shares = np.where(background, collected.shares, 0).sum(axis=1).astype(np.float64)
    high, reason, excess = _conspicuous(shares[own], shares[others], settings, 1.0)
    area = background[own].mean(axis=1)
    if not high.any() and float(shares[own].mean()) > float(area.mean()):
        high = shares[own] > area
        reason = f"the maps ignore the object: {shares[own].mean():.0%} of the evidence is outside of it"
        excess = float(shares[own].mean() - area.mean())
    if not high.any() and collected.masked[own].all():
        high = np.ones(len(own), dtype=bool)
        reason = "with masks the background of every class is tested"
        excess = 0.0
    photos = own[high]
    # All of the background: patches chosen photo by photo by their map would beat random ones whatever they show.
    regions = background[photos]
    if len(photos) >= settings.photos:
        how = "mask" if collected.masked[photos].all() else "estimated"
        details = {"evidence on the object": float(1 - shares[own].mean()), "masked": float(how == "mask")}
        yield Suspicion("background", number, "background", photos, regions, reason, excess, details=details)


def _clusters(
    collected: Collected, number: int, settings: SuspicionSettings, known: Sequence[Bools]
) -> Iterator[Suspicion]:
    """Groups of photos of a class that share where the evidence lies and what lies there, if it is not the object."""
    own, others = collected.of_class(number), np.flatnonzero(collected.predicted != number)
    if len(own) < 2 * settings.photos:
        return
    random = np.random.default_rng([settings.seed, number])
    if len(own) > _MOST_CLUSTERED:
        own = np.sort(random.choice(own, _MOST_CLUSTERED, replace=False))
    labels = cluster(_described(collected, own), settings.photos, settings.seed)
    usual = collected.shares[others].mean(axis=0) if len(others) else 1 / collected.shares.shape[1]
    for label in sorted(set(labels.tolist()) - {-1}):
        photos = own[labels == label]
        if len(photos) < max(settings.photos, settings.share * len(own)):
            continue
        contrast = collected.shares[photos].mean(axis=0) - usual
        region = _peak(contrast)
        on_object = np.nan_to_num(collected.objects[photos][:, region].astype(np.float32), nan=1.0).mean()
        if not collected.masked[photos].all():  # an estimate alone takes parts of the object for background
            on_object = max(on_object, middle_of(collected.grid)[region].mean())
        if on_object >= 0.5 or any(_overlap(region, other) > 0.5 for other in known):
            continue
        masked = float(collected.masked[photos].all())
        details = {"evidence on the object": float(on_object), "masked": masked}
        excess = float(collected.shares[photos][:, region].sum(axis=1).mean())
        place = name_of_place(region, collected.grid)
        reason = f"{len(photos)} photos with like maps have {excess:.0%} of their evidence in the same patches"
        regions = np.tile(region, (len(photos), 1))
        yield Suspicion("cluster", number, place, photos, regions, reason, excess, details=details)


def _described(collected: Collected, photos: Ints) -> Floats:
    """Maps and the tokens under their peaks, reduced to their main directions and of equal weight."""
    parts = [np.sqrt(collected.shares[photos]).astype(np.float64)]
    if collected.features is not None:
        parts.append(collected.features[photos].astype(np.float64))
    return np.concatenate([_reduced(part) for part in parts], axis=1)


def _reduced(table: Floats) -> Floats:
    centred = table - table.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    kept = left[:, :_COMPONENTS] * sizes[:_COMPONENTS]
    scale = np.sqrt((kept**2).sum(axis=1).mean())
    reduced: Floats = kept / scale if scale > 0 else kept
    return reduced


def cluster(table: Floats, fewest: int, seed: int) -> NDArray[np.int64]:
    """Label rows by spectral clustering into two to four groups, as many as separate best; -1 where none does.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    try:
        from sklearn.cluster import SpectralClustering  # noqa: PLC0415  # an extra
        from sklearn.metrics import silhouette_score  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError('audits need scikit-learn: pip install "vitreous[audit]"') from error
    best, labels = 0.1, np.full(len(table), -1, dtype=np.int64)  # below, groups are none
    squares = ((table[:, None] - table[None]) ** 2).sum(axis=2) if len(table) <= 500 else _squares(table)
    typical = float(np.median(squares[squares > 0])) if (squares > 0).any() else 0.0
    if typical == 0.0:
        return labels
    affinity = np.exp(-squares / typical)
    for count in (2, 3, 4):
        if len(table) < count * fewest:
            break
        grouping = SpectralClustering(count, affinity="precomputed", random_state=seed, assign_labels="cluster_qr")
        found = grouping.fit_predict(affinity)
        score = silhouette_score(table, found) if len(set(found.tolist())) > 1 else 0.0
        if score > best:
            best, labels = float(score), found.astype(np.int64)
    return labels


def _squares(table: Floats) -> Floats:
    lengths = (table**2).sum(axis=1)
    squares: Floats = np.maximum(lengths[:, None] + lengths[None] - 2 * table @ table.T, 0)
    return squares


def _peak(contrast: NDArray[np.floating[Any]]) -> Bools:
    """The patches that stand out, a quarter of all at most and one at least."""
    region: Bools = contrast > contrast.mean() + 1.5 * contrast.std()
    most = max(1, len(contrast) // 4)
    if region.sum() > most or not region.any():
        region = np.zeros(len(contrast), dtype=bool)
        region[np.argsort(-contrast, kind="stable")[: most if contrast.std() > 0 else 1]] = True
    return region


def _overlap(one: Bools, other: Bools) -> float:
    return float((one & other).sum() / max((one | other).sum(), 1))


def _colour(collected: Collected, number: int, settings: SuspicionSettings) -> Iterator[Suspicion]:
    """Colours near the border, where the object rarely is, that photos of other classes do not have.

    Looked for in two ways: photos of a colour that is rare in any direction, and, since a slight cast is rare in none,
    a direction in which much of the class differs (Fisher's discriminant).
    """
    own, others = collected.of_class(number), np.flatnonzero(collected.predicted != number)
    if len(others) < settings.photos:
        return
    logs = np.log(np.maximum(collected.colours, 1e-6))
    middle = np.median(logs[others], axis=0)
    spread = np.linalg.inv(np.cov(logs[others].T) + 1e-6 * np.eye(3))
    distances = np.sqrt(np.einsum("pc,cd,pd->p", logs - middle, spread, logs - middle))
    high, _, excess = _conspicuous(distances[own], distances[others], settings, np.inf)
    known = np.zeros(len(own), dtype=bool)
    if high.any():
        # A cast is one direction: photos that differ in other directions are left out.
        shift = np.median(logs[own[high]], axis=0) - middle
        high &= (logs[own] - middle) @ spread @ shift > 0
        if high.sum() >= max(settings.photos, settings.share * len(own)):
            known = high
            yield _coloured(number, own, high, logs, middle, excess)
    scores = logs @ _discriminant(logs[own], logs[others])
    high = scores[own] > np.quantile(scores[others], _RARE)
    if high.sum() >= max(settings.photos, _MUCH * len(own)) and not np.array_equal(high, known):
        yield _coloured(number, own, high, logs, middle, float(high.mean()) - (1 - _RARE))


def _coloured(number: int, own: Ints, high: Bools, logs: Floats, middle: Floats, excess: float) -> Suspicion:
    shift = np.median(logs[own[high]], axis=0) - middle
    gains = tuple(round(float(gain), 6) for gain in np.exp(shift))
    reason = f"{high.mean():.0%} of its photos differ in colour more than 95% of the photos of other classes"
    empty = np.zeros((int(high.sum()), 0), dtype=bool)
    return Suspicion("colour", number, "colour of the whole photo", own[high], empty, reason, excess, gains=gains)


def _discriminant(own: Floats, others: Floats) -> Floats:
    """Fisher's direction between two groups of colours."""
    weights = len(own) - 1, len(others) - 1
    pooled = sum(weight * np.cov(each.T) for weight, each in zip(weights, (own, others), strict=True)) / sum(weights)
    direction: Floats = np.linalg.solve(pooled + 1e-6 * np.eye(3), own.mean(axis=0) - others.mean(axis=0))
    return direction


def peaks(collected: Collected, photos: Ints) -> Bools:
    """The highest tenth of the patches of each map, (photos, patches)."""
    count = max(1, round(_TOP * collected.shares.shape[1]))
    order = np.argsort(-collected.maps[photos].astype(np.float32), axis=1, kind="stable")[:, :count]
    chosen = np.zeros((len(photos), collected.shares.shape[1]), dtype=bool)
    np.put_along_axis(chosen, order, values=True, axis=1)
    return chosen


def _shared_evidence(collected: Collected, settings: SuspicionSettings) -> list[Suspicion]:
    """Pairs of classes of which the second is the next answer and has like tokens under its maps."""
    found = []
    for number in collected.classes:
        own = collected.of_class(number)
        seconds = collected.second[own]
        if len(own) < settings.photos or not (seconds >= 0).any():
            continue
        values, counts = np.unique(seconds[seconds >= 0], return_counts=True)
        other = int(values[counts.argmax()])
        photos = own[seconds == other]
        if len(photos) < max(settings.photos, 0.4 * len(own)) or len(collected.of_class(other)) < settings.photos:
            continue
        alike = _alikeness(collected, number, other)
        reason = f"it is the next answer for {len(photos) / len(own):.0%} of its photos"
        regions = peaks(collected, photos)
        details = {} if alike is None else {"cosine of tokens": alike}
        found.append(
            Suspicion(
                "shared evidence",
                number,
                "the peaks of its maps",
                photos,
                regions,
                reason,
                len(photos) / len(own),
                other=other,
                details=details,
            )
        )
    found.sort(key=lambda one: -one.excess)
    return found[: settings.most // 4]


def _alikeness(collected: Collected, one: int, other: int) -> float | None:
    if collected.features is None:
        return None
    usual = collected.features.astype(np.float64).mean(axis=0)
    own = [collected.features[collected.of_class(each)].astype(np.float64) for each in (one, other)]
    means = [features.mean(axis=0) - usual for features in own]
    lengths = np.linalg.norm(means, axis=1)
    return None if not lengths.all() else float(means[0] @ means[1] / lengths.prod())


def _unusual(collected: Collected, settings: SuspicionSettings) -> list[Suspicion]:
    """Photos whose map and tokens are far from those of all others of their class."""
    found: list[tuple[float, int]] = []
    for number in collected.classes:
        own = collected.of_class(number)
        if not 2 * settings.photos <= len(own):
            continue
        table = _described(collected, own[:_MOST_CLUSTERED])
        distances = np.sqrt(np.sort(_squares(table), axis=1)[:, 1:4].mean(axis=1))
        middle = np.median(distances)
        scale = 1.4826 * np.median(np.abs(distances - middle))
        scores = (distances - middle) / scale if scale > 0 else np.zeros(len(distances))
        found += [(float(score), int(photo)) for score, photo in zip(scores, own, strict=False) if score > 4]
    found.sort(reverse=True)
    suspicions = []
    for score, photo in found[: settings.unusual]:
        photos = np.array([photo])
        reason = f"its explanation is {score:.1f} deviations further from its class's than usual"
        place = collected.names[photo]
        target = int(collected.predicted[photo])
        regions = peaks(collected, photos)
        suspicions.append(Suspicion("unusual photo", target, place, photos, regions, reason, score))
    return suspicions
