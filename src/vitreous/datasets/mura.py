"""The kind ``mura``: MURA, radiographs of the upper limb, labelled normal or abnormal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from vitreous.datasets.files import FileDataSet, Item
from vitreous.datasets.lists import read_list

_FOLDER = "MURA-v1.1"
_LIST = "valid_image_paths.csv"
_LABELS = {"negative": 0, "positive": 1}


class Mura(FileDataSet):
    """The validation split of MURA-v1.1; the folder of a study ends in ``positive`` (abnormal) or ``negative``."""

    kind = "mura"
    summary = f"MURA-v1.1: {_LIST} and valid/; label 1 for positive (abnormal) studies"
    origin = "MURA comes from https://stanfordmlgroup.github.io/competitions/mura"

    def _list(self) -> Sequence[Item]:
        self.root = next((p for p in (self.path, self.path / _FOLDER) if (p / _LIST).is_file()), self.path)
        if not (self.root / _LIST).is_file():
            raise self._error(f"there is no {_LIST}")
        if not (self.root / "valid").is_dir():
            raise self._error("there is no folder valid")
        lines = read_list(self.root / _LIST).splitlines()
        return [self._item(line.strip(), number) for number, line in enumerate(lines, start=1) if line.strip()]

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(_LABELS)

    def _item(self, line: str, number: int) -> Item:
        """Read ``MURA-v1.1/valid/XR_WRIST/patient11185/study1_positive/image1.png``."""
        parts = PurePosixPath(line).parts
        inside = parts[1:] if parts[:1] == (_FOLDER,) else parts
        answer = inside[-2].rpartition("_")[2] if len(inside) > 1 else ""
        if answer not in _LABELS or ".." in inside or inside[0] != "valid":
            raise self._error(f"line {number} of {_LIST} does not name an image of a positive or negative study")
        file = "/".join(inside)
        return Item(file, file, _LABELS[answer])
