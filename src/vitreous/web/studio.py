"""What the web page can do, without the page: explain a photo, look into a block, measure curves; all of it once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import vitreous
from vitreous.explaining import network_of
from vitreous.html.report import measure
from vitreous.models import LoadedModel
from vitreous.pictures.curves import Curves
from vitreous.pictures.strips import depth_of
from vitreous.web.cache import BoundedCache
from vitreous.web.depths import all_depths, at_depth
from vitreous.web.jobs import Job, Limits, Pace, Worker, watched
from vitreous.web.photo import Upload, develop, receive
from vitreous.web.record import Record
from vitreous.web.rows import BlockRows, block_rows
from vitreous.web.shelf import Shelf
from vitreous.web.wanted import Ask, Wanted, begin, check_classes, classes_of, expect, groups, is_quick, make

CURVE_POINTS = 11  # of each of the two curves


@dataclass(frozen=True)
class Visit:
    """What a visitor looks at: a photo with a model."""

    upload: Upload
    model: str

    @property
    def key(self) -> tuple[str, str]:
        """By what it is found again: the content counts, not the file's name."""
        return self.upload.digest, self.model


class Studio:
    """Photos and models, with everything that was found out about them.

    What needs the model is a method that takes a ``Job`` and must run on ``worker``; everything else may be called from
    any thread at any time.

    Attributes:
        worker: The thread that runs models.
        runs: How many images models have been asked about since the start.
    """

    def __init__(
        self,
        shelf: Shelf,
        *,
        cache_bytes: int = 256 * 2**20,
        upload_bytes: int = 20 * 2**20,
        limits: Limits | None = None,
    ) -> None:
        self.shelf = shelf
        self.upload_bytes = upload_bytes
        self.cache: BoundedCache[Record] = BoundedCache(cache_bytes)
        self.worker = Worker(limits)
        self.runs = 0
        self._paces: dict[str, Pace] = {}

    def receive(self, path: str | Path, name: str, model: str) -> Visit:
        """Take in a photo's file."""
        return Visit(receive(path, name, self.upload_bytes), model)

    def known(self, visit: Visit, wanted: Wanted) -> Record | None:
        """Give the record of a photo if it holds all that is wanted already: then nothing has to be waited for."""
        record = self.cache.get(visit.key)
        if record is None or record.sample is None:
            return None
        return None if record.missing(_shown(wanted, record.depth), classes_of(wanted, record)) else record

    def explain(self, visit: Visit, wanted: Wanted, job: Job) -> Record:
        """Make the maps that are wanted and not there yet."""
        model, record = self._open(visit, job)
        with self._keeping(visit, record), self._watching(model, job):
            if record.sample is None:
                job.begin("explaining the photo")
                expect(job, wanted.methods, max(1, len(wanted.classes)))
                begin(record, wanted, _asking(model, record, wanted.classes), job)
            classes = classes_of(wanted, record)
            check_classes(classes, record)
            shown = _shown(wanted, record.depth)
            ahead = _ahead(wanted, record.depth) if record.missing(shown, classes) else []
            missing = record.missing([*shown, *ahead], classes)
            expect(job, missing, len(classes))
            for group in groups(missing):
                job.begin("explaining the photo" if len(group) > 1 else f"explaining by {group[0]}")
                make(record, group, _asking(model, record, classes), job)
        return record

    def rows(self, visit: Visit, block: int, job: Job) -> BlockRows:
        """Find out what patches draw on in a block."""
        model, record = self._open(visit, job)
        if block not in record.rows:
            with self._keeping(visit, record), self._watching(model, job):
                job.begin(f"looking into block {block}", 1)
                record.rows[block] = block_rows(model, record.photo.pixels, block)
        return record.rows[block]

    def known_rows(self, visit: Visit, block: int) -> BlockRows | None:
        """Give what patches draw on in a block if it was found out before."""
        record = self.cache.get(visit.key)
        return None if record is None else record.rows.get(block)

    def curves(self, visit: Visit, wanted: Wanted, job: Job) -> tuple[Record, list[list[Curves]]]:
        """Measure deletion and insertion by the maps that are shown, for every class; none where outputs are values."""
        record = self.explain(visit, wanted, job)
        model = self.shelf.take(visit.model)
        methods = shown_methods(record, wanted) if record.has_curves else []
        classes = classes_of(wanted, record)
        todo = {one: [method for method in methods if (method, one) not in record.curves] for one in classes}
        with self._keeping(visit, record), self._watching(model, job):
            job.begin("measuring curves", 2 * CURVE_POINTS * sum(map(len, todo.values())))
            for one, missing in todo.items():
                if missing:
                    explanation = record.explanation(missing, [one])
                    found = measure(model, record.photo.pixels, explanation, 0)
                    record.curves |= {(curve.method, one): curve for curve in found.curves}
                    record.by = found.by
        return record, [[record.curves[method, one] for method in methods] for one in classes]

    def close(self) -> None:
        """Stop all work."""
        self.worker.close()

    def _open(self, visit: Visit, job: Job) -> tuple[LoadedModel, Record]:
        job.begin(f"loading {visit.model}")
        model = self.shelf.take(visit.model)
        job.pace = self._paces.setdefault(visit.model, job.pace)
        record = self.cache.get(visit.key)
        if record is None:
            job.begin("reading the photo")
            photo = develop(visit.upload, model, self.upload_bytes)
            record = Record(photo, depth_of(model))
        job.check()
        return model, record

    @contextmanager
    def _watching(self, model: LoadedModel, job: Job) -> Iterator[None]:
        with watched(network_of(model), job, self._count):
            yield

    def _count(self, images: int) -> None:
        self.runs += images

    @contextmanager
    def _keeping(self, visit: Visit, record: Record) -> Iterator[None]:
        """Keep what is found out, also where the rest is stopped or fails."""
        try:
            yield
        finally:
            if record.sample is not None:
                self.cache.put(visit.key, record)


def _asking(model: LoadedModel, record: Record, classes: Sequence[int]) -> Ask:
    """How methods are asked about a photo."""

    def ask(methods: Sequence[str]) -> None:
        target = [list(classes)] if classes else None
        record.keep(vitreous.explain(model, record.photo.pixels, methods, target))

    return ask


def shown_methods(record: Record, wanted: Wanted) -> list[str]:
    """Give the spellings whose maps are shown: those wanted, at the depth that is wanted, that work on this model."""
    return [method for method in _shown(wanted, record.depth) if method not in record.failed]


def _shown(wanted: Wanted, depth: int) -> list[str]:
    if wanted.depth is None:
        return list(wanted.methods)
    return [at_depth(method, wanted.depth, depth) or method for method in wanted.methods]


def _ahead(wanted: Wanted, depth: int) -> list[str]:
    """Give the maps for all other positions of the depth slider once it has been moved: they share the same runs."""
    if wanted.depth is None or wanted.depth >= depth:
        return []
    return [spelling for method in wanted.methods if is_quick(method) for spelling in all_depths(method, depth)]
