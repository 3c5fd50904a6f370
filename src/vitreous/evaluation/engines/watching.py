"""What an engine tells while it works."""

from __future__ import annotations

import warnings
from typing import Protocol

from vitreous.evaluation.store.store import Store


class Watcher(Protocol):
    """Somebody who is told how a run goes on."""

    def begin(self, store: Store, done: int) -> None:
        """``done`` of the run's images are there already."""

    def advance(self, images: int) -> None:
        """So many more images are done."""

    def notice(self, text: str) -> None:
        """Something happened that does not stop the run and that people should know."""


class Silent:
    """A watcher for programs: no progress, notices as warnings."""

    def begin(self, store: Store, done: int) -> None:
        pass

    def advance(self, images: int) -> None:
        pass

    def notice(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)
