"""The kind ``labelled``: a folder of photos with a ``labels.csv``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from vitreous.datasets.files import FileDataSet, Item, by_stem, photo_names, stem_of
from vitreous.datasets.label_table import NAMES, TABLE, read_class_names, read_labels


class Labelled(FileDataSet):
    """Photos next to or below a ``labels.csv``; a ``class_names.json`` next to it names the classes."""

    kind = "labelled"
    summary = "a folder of photos with a labels.csv (columns such as file and class_index)"
    origin = "such a set is a folder of your own photos with a labels.csv that has the columns file and class_index"

    def _list(self) -> Sequence[Item]:
        folder = self.path if self.path.is_dir() else self.path.parent
        table = next((place / TABLE for place in (folder, folder.parent) if (place / TABLE).is_file()), None)
        if table is None:
            raise self._error(f"there is no {TABLE} in it or above it")
        self._names = read_class_names(table.parent / NAMES)
        listed = read_labels(table, self._names)
        labels, self._classes = listed.labels, listed.classes(self._names)
        places = (table.parent, folder, table.parent / "images")  # where the table's names may start from
        candidates = ((place, _files(place, labels)) for place in places)
        found = next((each for each in candidates if any(_is_file(each[0] / file) for file in each[1])), None)
        if found is None:
            raise self._error(f"none of the {len(labels)} photos that {TABLE} names is there")
        self.root, files = found
        return [Item(name, file, label) for file, (name, label) in zip(files, labels.items(), strict=True)]

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self._names

    @property
    def classes(self) -> int | None:
        return self._classes


def _is_file(place: Path) -> bool:
    try:
        return place.is_file()
    except OSError:  # no file can be called so
        return False


def _files(folder: Path, names: Collection[str]) -> list[str]:
    """Return the file of each name: a table may leave out the suffix."""
    complete = all(stem_of(name) != name for name in names)
    found = {} if complete else by_stem(photo_names(folder))
    return [found.get(name, name) for name in names]
