"""The loop that every process on a run's folder goes through, and the worker process of the local engine.

``python -m vitreous.evaluation.engines.worker FOLDER PARENT_PID`` is a worker process; it reads the run from standard
input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from vitreous.errors import VitreousError
from vitreous.evaluation.runner.context import open_context
from vitreous.evaluation.runner.measure import compute_shard
from vitreous.evaluation.store.run import Run, Shard
from vitreous.evaluation.store.store import Store

_PAUSE = 0.2  # seconds between two checks of shards that other processes hold


class ProgressCallback(Protocol):
    """Receives the progress of a run."""

    def begin(self, store: Store, done: int) -> None:
        """``done`` of the run's images are stored already."""

    def advance(self, images: int) -> None:
        """So many more images are finished."""

    def notice(self, text: str) -> None:
        """Something happened that the user should know; the run continues."""


class SilentProgress:
    """Reports no progress, and notices as warnings."""

    def begin(self, store: Store, done: int) -> None:
        pass

    def advance(self, images: int) -> None:
        pass

    def notice(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)


def worker_loop(
    store: Store,
    compute: Callable[[Shard], pa.Table],
    progress: ProgressCallback,
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Compute all missing shards, together with other processes that do the same, and wait for theirs.

    Args:
        store: the run's folder.
        compute: the shard function.
        progress: receives the progress.
        go_on: called before every shard; the loop ends when it returns False.
    """
    waiting = missing_shards(store, progress)
    while waiting:
        held = []
        for shard in waiting:
            if not go_on():
                return
            if _compute_one(store, shard, compute):
                progress.advance(len(shard))
            else:
                held.append(shard)
        if len(held) == len(waiting):
            time.sleep(_PAUSE)
        waiting = held


def missing_shards(store: Store, progress: ProgressCallback) -> list[Shard]:
    """Clean up, report how much is stored, and return the missing shards."""
    store.clean()
    waiting = store.missing(progress.notice)
    progress.begin(store, store.run.wanted - sum(map(len, waiting)))
    return waiting


def _compute_one(store: Store, shard: Shard, compute: Callable[[Shard], pa.Table]) -> bool:
    """Compute a shard; False where another process holds it."""
    claim = store.claim(shard)
    if claim is None:
        return False
    try:
        if not claim.done:
            store.write(shard, compute(shard))
    finally:
        claim.release()
    return True


def main() -> None:
    """Compute shards until none is left or the parent process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    starter = int(sys.argv[2])  # an argument, not getppid(): the parent may die while this process starts
    store = Store(Path(sys.argv[1]), Run.from_json(json.loads(sys.stdin.read())))
    try:
        context = open_context(store.run)
        worker_loop(
            store,
            lambda shard: compute_shard(store.run, context, shard),
            SilentProgress(),
            go_on=lambda: os.getppid() == starter,
        )
    except VitreousError:
        sys.exit(1)  # the parent meets the same error when it computes the rest, and reports it


if __name__ == "__main__":
    main()
