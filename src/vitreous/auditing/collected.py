"""What a run over the data set has kept of every photo, read back shard by shard, and places in the grid of patches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitreous.errors import RunError
from vitreous.evaluation.store import Store

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_NUMBERS = ("predicted", "label", "probability", "second", "rows", "columns", "masked", "red", "green", "blue")
_LISTS = ("map[]", "object[]", "features[]")


@dataclass(frozen=True, eq=False)
class Collected:
    """Photos that could be explained, with their maps; rows of all arrays are photos in the order of the data set.

    Attributes:
        index: their numbers in the data set.
        names: their names.
        predicted: the predicted class, whose map was kept.
        label: the true class; -1 where it is not known.
        probability: of the predicted class.
        second: the class with the second highest output; -1 for none.
        grid: rows and columns of patches.
        maps: scores, (photos, patches), half precision.
        objects: the part of every patch that the object covers, (photos, patches), half precision; NaN: not known.
        masked: whether ``objects`` comes from a mask of the data set; otherwise it is estimated.
        features: the mean token under the peak of every map, (photos, channels); None where the model shows none.
        colours: the mean of every channel above black near the border, (photos, 3).
        failures: names and reasons of photos that could not be explained.
    """

    index: Ints
    names: tuple[str, ...]
    predicted: Ints
    label: Ints
    probability: Floats
    second: Ints
    grid: tuple[int, int]
    maps: NDArray[np.float16]
    objects: NDArray[np.float16]
    masked: Bools
    features: NDArray[np.float16] | None
    colours: Floats
    failures: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def shares(self) -> NDArray[np.float32]:
        """How the evidence above the mean of each map is shared out among patches, (photos, patches)."""
        maps = self.maps.astype(np.float32)
        above = np.maximum(maps - maps.mean(axis=1, keepdims=True), 0)
        total = above.sum(axis=1, keepdims=True)
        uniform = np.float32(1 / maps.shape[1])
        shares: NDArray[np.float32] = np.where(total > 0, above / np.where(total > 0, total, 1), uniform)
        return shares

    @cached_property
    def background(self) -> Bools:
        """Patches outside of the object, (photos, patches); of an estimated object also without its neighbours."""
        known: Bools = np.asarray(np.isfinite(self.objects).all(axis=1))
        covered = np.nan_to_num(self.objects.astype(np.float64), nan=1.0)
        inside: Bools = np.asarray(covered >= np.where(self.masked, 0.1, 0.5)[:, None])
        estimated = ~self.masked
        inside[estimated] = _dilated(inside[estimated], self.grid)
        return ~inside & known[:, None]

    def of_class(self, number: int) -> Ints:
        """The photos that are predicted as a class."""
        return np.flatnonzero(self.predicted == number)

    def labelled(self, number: int) -> Bools | None:
        """Which photos have a class as their label.

        None where a label is not known, or where predictions agree with labels no more than by chance, as with labels
        of another list of classes.
        """
        by_chance = sum(float((self.predicted == each).mean() * (self.label == each).mean()) for each in self.classes)
        if (self.label < 0).any() or (self.predicted == self.label).mean() <= by_chance:
            return None
        own: Bools = self.label == number
        return own

    @property
    def classes(self) -> list[int]:
        """The classes that any photo is predicted as."""
        return sorted({int(number) for number in self.predicted})


def _dilated(inside: Bools, grid: tuple[int, int]) -> Bools:
    """Objects with the patches beside them."""
    padded = np.pad(inside.reshape(-1, *grid), ((0, 0), (1, 1), (1, 1)))
    rows, columns = grid
    parts = [padded[:, down : down + rows, across : across + columns] for down in range(3) for across in range(3)]
    wider: Bools = np.any(parts, axis=0).reshape(inside.shape)
    return wider


def read_collected(store: Store) -> Collected:
    """Read what a finished run has kept.

    Raises:
        RunError: no photo could be explained.
    """
    numbers: dict[str, list[NDArray[Any]]] = {name: [] for name in ("index", *_NUMBERS)}
    lists: dict[str, list[NDArray[np.float16] | None]] = {name: [] for name in _LISTS}
    names: list[str] = []
    failures: list[tuple[str, str]] = []
    for shard in store.run.shards():
        table = store.read([shard], ["index", "image", "error", *_NUMBERS, *_LISTS])
        good = table["error"].is_null().to_numpy()
        failures += [
            (image, error)
            for image, error in zip(table["image"].to_pylist(), table["error"].to_pylist(), strict=True)
            if error is not None
        ]
        kept = table.filter(table["error"].is_null())
        names += kept["image"].to_pylist()
        for name, found in numbers.items():
            column = table[name].to_numpy(zero_copy_only=False)[good]
            found.append(column.astype(np.float64))
        for name, rows in lists.items():
            rows.extend(_rows(kept[name].combine_chunks()))
    if not names:
        reason = f": {failures[0][1]}" if failures else ""
        raise RunError(f"no photo of {store.run.data} could be explained{reason}")
    return _assembled(names, {name: np.concatenate(parts) for name, parts in numbers.items()}, lists, failures)


def _rows(column: Any) -> list[NDArray[np.float16] | None]:
    """Rows of a column of lists, without a Python object for every number."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return [
        values[end - length : end] if there else None
        for end, length, there in zip(ends.tolist(), lengths.tolist(), valid.tolist(), strict=True)
    ]


def _assembled(
    names: Sequence[str],
    numbers: dict[str, NDArray[Any]],
    lists: dict[str, list[NDArray[np.float16] | None]],
    failures: Iterable[tuple[str, str]],
) -> Collected:
    grids = np.stack([numbers["rows"], numbers["columns"]], axis=1).astype(np.int64)
    found, counts = np.unique(grids, axis=0, return_counts=True)
    grid = found[counts.argmax()]
    alike = (grids == grid).all(axis=1)
    failures = [
        *failures,
        *((name, "its grid of patches is another") for name, same in zip(names, alike, strict=True) if not same),
    ]
    kept: list[int] = np.flatnonzero(alike).tolist()
    patches = int(grid.prod())
    features = [lists["features[]"][place] for place in kept]
    nothing = np.full(patches, np.nan, np.float16)
    number = {name: column[kept] for name, column in numbers.items()}
    objects = [lists["object[]"][place] for place in kept]
    return Collected(
        index=number["index"].astype(np.int64),
        names=tuple(names[place] for place in kept),
        predicted=number["predicted"].astype(np.int64),
        label=np.nan_to_num(number["label"], nan=-1).astype(np.int64),
        probability=number["probability"],
        second=np.nan_to_num(number["second"], nan=-1).astype(np.int64),
        grid=(int(grid[0]), int(grid[1])),
        maps=np.stack([_present(lists["map[]"][place]) for place in kept]),
        objects=np.stack([nothing if each is None else each for each in objects]),
        masked=number["masked"] > 0,
        features=None if any(each is None for each in features) else np.stack([_present(each) for each in features]),
        colours=np.stack([number[name] for name in ("red", "green", "blue")], axis=1),
        failures=tuple(failures),
    )


def _present(row: NDArray[np.float16] | None) -> NDArray[np.float16]:
    assert row is not None
    return row


def places_of(grid: tuple[int, int]) -> dict[str, Bools]:
    """Corners, edges and the border of a grid of patches, (patches,) each; none of a grid below 4 x 4.

    A corner is a quarter of each side, an edge an eighth of one side, the border a sixteenth of all sides, and at least
    one patch.
    """
    rows, columns = grid
    if min(grid) < 4:
        return {}
    down, across = (max(1, round(count / 4)) for count in grid)
    high, wide = (max(1, round(count / 8)) for count in grid)
    upper, lower = slice(0, down), slice(rows - down, rows)
    left, right = slice(0, across), slice(columns - across, columns)
    everything = slice(None)
    cut: dict[str, list[tuple[slice, slice]]] = {
        "upper-left corner": [(upper, left)],
        "upper-right corner": [(upper, right)],
        "lower-left corner": [(lower, left)],
        "lower-right corner": [(lower, right)],
        "upper edge": [(slice(0, high), everything)],
        "lower edge": [(slice(rows - high, rows), everything)],
        "left edge": [(everything, slice(0, wide))],
        "right edge": [(everything, slice(columns - wide, columns))],
    }
    thin, narrow = (max(1, round(count / 16)) for count in grid)
    cut["border"] = [(slice(0, thin), everything), (slice(rows - thin, rows), everything)]
    cut["border"] += [(everything, slice(0, narrow)), (everything, slice(columns - narrow, columns))]
    found = {}
    for name, parts in cut.items():
        chosen = np.zeros(grid, dtype=bool)
        for part in parts:
            chosen[part] = True
        found[name] = chosen.ravel()
    return found


def middle_of(grid: tuple[int, int]) -> Bools:
    """The patches that lie in the middle two thirds of both sides, where objects usually are, (patches,)."""
    down, across = (np.abs((np.arange(count) + 0.5) / count - 0.5) < 1 / 3 for count in grid)
    middle: Bools = (down[:, None] & across[None, :]).ravel()
    return middle


def name_of_place(region: Bools, grid: tuple[int, int]) -> str:
    """Name where most of a region lies: a corner, an edge, the border, or a part of the middle."""
    best, place = 0.0, ""
    for name, other in places_of(grid).items():
        overlap = float((region & other).sum() / max((region | other).sum(), 1))
        if overlap > best:
            best, place = overlap, name
    if best >= 0.5:
        return place
    chosen = np.argwhere(region.reshape(grid))
    if not len(chosen):
        return "nowhere"
    down, across = (chosen.mean(axis=0) + 0.5) / np.array(grid)
    vertical = "upper" if down < 0.4 else "lower" if down > 0.6 else ""
    horizontal = "left" if across < 0.4 else "right" if across > 0.6 else ""
    words = [word for word in (vertical, horizontal) if word]
    return f"{'-'.join(words)} part" if words else "centre"
