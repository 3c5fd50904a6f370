"""The kind ``eraser-movies``: movie reviews with human rationales."""

from __future__ import annotations

import hashlib
import json
import lzma
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from vitreous._utils.storage import expanded
from vitreous.datasets.dataset import DataSet, Review, Things
from vitreous.datasets.files import ListError, check_regular
from vitreous.errors import DataError

ERASER_MOVIES = "eraser-movies"
LABELS = ("NEG", "POS")

Split = Literal["train", "val", "test"]

_LIST_ENDING = ".jsonl"
_ORIGIN = "ERASER's set of movie reviews (movies.tar.gz) comes from https://www.eraserbenchmark.com"
_ARCHIVE = "movies.tar.gz"
_MOST_BYTES = 200 * 2**20


def read_movies(path: str | Path, split: Split) -> list[Review]:
    """Read one split from ``movies.tar.gz`` or from the extracted folder.

    The published ``train.jsonl`` contains the validation reviews; here ``train`` excludes them.

    Raises:
        DataError: A file is missing or damaged. The message names the file and where to obtain the data set.
    """
    if split not in get_args(Split):
        raise DataError(f"the parts of {ERASER_MOVIES} are train, val and test, not {split!r}")
    source = _open(expanded(path))
    held_out = {row["annotation_id"] for row in _rows(source, "val")} if split == "train" else set()
    return [_review(source, row) for row in _rows(source, split) if row["annotation_id"] not in held_out]


class EraserMovies(DataSet):
    """The test reviews, or another split if the path ends in its list, such as ``movies.tar.gz/val.jsonl``."""

    kind = ERASER_MOVIES
    holds: ClassVar[Things] = "texts"
    summary = "movies.tar.gz or its folder, for the test reviews; PATH/val.jsonl or PATH/train.jsonl for another part"
    origin = _ORIGIN
    class_names = LABELS

    def __init__(self, path: str | Path) -> None:
        self.path = expanded(path)  # may be a list inside an archive, which does not exist as a file
        place, split = _part_of(self.path)
        self._reviews = read_movies(place, split)
        self._refuse_repeated((review.name for review in self._reviews), f" in {split}{_LIST_ENDING}")

    def __len__(self) -> int:
        return len(self._reviews)

    def name(self, index: int) -> str:
        return self._reviews[index].name

    def load(self, index: int) -> Review:
        return self._reviews[index]

    def _records(self) -> Iterator[str]:
        for review in self._reviews:
            words = hashlib.sha256(" ".join(review.words).encode(errors="surrogateescape")).hexdigest()
            yield f"{review.name}|{review.label}|{words}|{np.packbits(review.rationale).tobytes().hex()}"


def _part_of(path: Path) -> tuple[Path, Split]:
    """Return the archive or folder, and the split."""
    for split in get_args(Split):
        if path.name == f"{split}{_LIST_ENDING}":
            return path.parent, split
    return path, "test"


class _Source(ABC):
    """The files of the data set: in a folder or in an archive."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def read(self, name: str) -> str:
        """Return the text of a file such as ``docs/negR_000.txt``."""

    def missing(self, name: str) -> DataError:
        return DataError(f"{self.path}: there is no {name}; {_ORIGIN}")

    def damaged(self, problem: str) -> DataError:
        return DataError(f"{self.path}: {problem}; {_ORIGIN}")


class _Folder(_Source):
    def read(self, name: str) -> str:
        root = self.path / "movies" if (self.path / "movies").is_dir() else self.path
        try:
            check_regular(root / name)
            return (root / name).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise self.missing(name) from error
        except (OSError, UnicodeError, ListError) as error:
            raise self.damaged(f"{name} cannot be read ({error})") from error


class _Archive(_Source):
    """A tar archive, read once into memory: nothing is extracted, so member paths cannot escape a folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            with tarfile.open(path) as archive:
                self._texts = self._read_all(archive)
        except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise self.damaged("this is not a tar archive, or a damaged one") from error

    def read(self, name: str) -> str:
        if name not in self._texts:
            raise self.missing(name)
        try:
            return self._texts[name].decode("utf-8")
        except UnicodeError as error:
            raise self.damaged(f"{name} is not text") from error

    def _read_all(self, archive: tarfile.TarFile) -> dict[str, bytes]:
        texts: dict[str, bytes] = {}
        room = _MOST_BYTES
        for member in archive:
            if not member.isfile() or not member.name.endswith((".txt", ".jsonl")):
                continue
            room -= member.size
            if room < 0:
                raise self.damaged(f"it holds more than {_MOST_BYTES // 2**20} MiB of text")
            content = archive.extractfile(member)
            assert content is not None
            texts[member.name.removeprefix("./").removeprefix("movies/")] = content.read()
        return texts


def _open(path: Path) -> _Source:
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder; {_ORIGIN}")
    if not path.is_dir():
        if not path.is_file():
            raise DataError(f"{path}: this is neither a file nor a folder; {_ORIGIN}")
        return _Archive(path)
    unpacked = any((path / name).exists() for name in ("movies", "docs"))
    return _Archive(path / _ARCHIVE) if not unpacked and (path / _ARCHIVE).is_file() else _Folder(path)


def _rows(source: _Source, split: str) -> list[dict[str, Any]]:
    name = f"{split}{_LIST_ENDING}"
    rows = []
    for number, line in enumerate(source.read(name).split("\n"), start=1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise source.damaged(f"line {number} of {name} is not JSON") from error
        if row is not None:
            rows.append(_checked(source, row, f"line {number} of {name}"))
    return rows


def _checked(source: _Source, row: Any, where: str) -> dict[str, Any]:
    fields = row if isinstance(row, dict) else {}
    name, label, evidence = (fields.get(key) for key in ("annotation_id", "classification", "evidences"))
    if not isinstance(name, str) or not name.isprintable() or "/" in name or "\\" in name or name[:1] in ("", "."):
        raise source.damaged(f"{where} does not name a review")
    if label not in LABELS or not isinstance(evidence, list):
        raise source.damaged(f"{where} lacks a classification (NEG or POS) or evidences")
    return fields


def _review(source: _Source, row: dict[str, Any]) -> Review:
    name = row["annotation_id"]
    words = tuple(source.read(f"docs/{name}").split())
    rationale = np.zeros(len(words), dtype=bool)
    for start, end in _spans(source, row):
        if not 0 <= start <= end <= len(words):
            raise source.damaged(f"{name}: its evidence, words {start} to {end}, is outside of its {len(words)} words")
        rationale[start:end] = True
    return Review(name, words, LABELS.index(row["classification"]), rationale)


def _spans(source: _Source, row: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the start and end word of every marked span; the end is exclusive."""
    try:
        return [(int(part["start_token"]), int(part["end_token"])) for group in row["evidences"] for part in group]
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # JSON may contain Infinity
        raise source.damaged(f"{row['annotation_id']}: its evidence lacks start_token or end_token") from error
