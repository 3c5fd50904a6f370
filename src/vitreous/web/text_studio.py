"""What the page can do with texts, without the page: read one within limits and explain it once."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import vitreous
from vitreous.errors import InputError
from vitreous.models.text_models import LoadedTextModel
from vitreous.web.cache import BoundedCache
from vitreous.web.jobs import Job, Pace, Worker, watched
from vitreous.web.shelf import TextShelf
from vitreous.web.text_record import TextRecord
from vitreous.web.wanted import Ask, Wanted, begin, check_classes, classes_of, expect, groups, make

MOST_CHARACTERS = 20_000  # some eight pages


@dataclass(frozen=True)
class TextVisit:
    """What a visitor looks at: a text with a model.

    Attributes:
        text: The text.
        model: The model's name.
        windows: Whether a text that is too long for the model is explained in windows; otherwise it is cut.
    """

    text: str
    model: str
    windows: bool = False

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise InputError("Write or paste a text first.")
        if len(self.text) > MOST_CHARACTERS:
            raise InputError(
                f"The text has {len(self.text):,} characters, and no more than {MOST_CHARACTERS:,} are taken here."
            )

    @property
    def key(self) -> tuple[str, str, bool]:
        """By what it is found again."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest(), self.model, self.windows


class TextStudio:
    """Texts and their models, with everything that was found out about them.

    ``explain`` takes a ``Job`` and must run on the worker; everything else may be called from any thread at any time.

    Args:
        shelf: The models.
        worker: The thread that runs models, those for pictures too.
        cache_bytes: How much is remembered.

    Attributes:
        runs: How many texts models have been asked about since the start.
    """

    def __init__(self, shelf: TextShelf, worker: Worker, *, cache_bytes: int = 16 * 2**20) -> None:
        self.shelf, self.worker = shelf, worker
        self.cache: BoundedCache[TextRecord] = BoundedCache(cache_bytes)
        self.runs = 0
        self._paces: dict[str, Pace] = {}

    def known(self, visit: TextVisit, wanted: Wanted) -> TextRecord | None:
        """Give the record of a text if it holds all that is wanted already: then nothing has to be waited for."""
        record = self.cache.get(visit.key)
        if record is None or record.missing(wanted.methods, classes_of(wanted, record)):
            return None
        return record

    def explain(self, visit: TextVisit, wanted: Wanted, job: Job) -> TextRecord:
        """Find the scores that are wanted and not there yet."""
        job.things = "texts"
        job.begin(f"loading {visit.model}")
        model = self.shelf.take(visit.model)
        job.pace = self._paces.setdefault(visit.model, job.pace)
        record = self.cache.get(visit.key) or _read(visit, model)
        try:
            with watched(model.model, job, self._count):
                if record.sample is None:
                    job.begin("explaining the text")
                    expect(job, wanted.methods, max(1, len(wanted.classes)))
                    begin(record, wanted, _asking(model, visit, record, wanted.classes), job)
                classes = classes_of(wanted, record)
                check_classes(classes, record)
                missing = record.missing(wanted.methods, classes)
                expect(job, missing, len(classes))
                for group in groups(missing):
                    job.begin("explaining the text" if len(group) > 1 else f"explaining by {group[0]}")
                    make(record, group, _asking(model, visit, record, classes), job)
        finally:
            # What was found out is kept, also where the rest is stopped or fails.
            if record.sample is not None:
                self.cache.put(visit.key, record)
        return record

    def _count(self, texts: int) -> None:
        self.runs += texts


def _read(visit: TextVisit, model: LoadedTextModel) -> TextRecord:
    """Cut a text into pieces.

    Raises:
        InputError: there is nothing in it that the model reads.
    """
    reader = model.reader
    pieces = len(reader.read(visit.text, "the text").pieces)
    fits = visit.windows or reader.capacity is None
    return TextRecord(visit.text, pieces, pieces if fits else min(pieces, reader.capacity or pieces))


def _asking(model: LoadedTextModel, visit: TextVisit, record: TextRecord, classes: Sequence[int]) -> Ask:
    """How methods are asked about a text."""

    def ask(methods: Sequence[str]) -> None:
        target = [list(classes)] if classes else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the page itself says that a text was cut
            record.keep(vitreous.explain_text(model, visit.text, methods, target, windows=visit.windows))

    return ask
