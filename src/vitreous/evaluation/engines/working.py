"""The loop that every process on a run's folder goes through: take a shard that nobody has, compute it, store it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa

from vitreous.evaluation.engines.watching import Watcher
from vitreous.evaluation.store.run import Shard
from vitreous.evaluation.store.store import Store

_PAUSE = 0.2  # seconds between two looks at shards that other processes work on


def work(
    store: Store,
    compute: Callable[[Shard], pa.Table],
    watcher: Watcher,
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Compute all shards that are missing, together with whoever else does the same, and wait for theirs.

    Args:
        store: the run's folder.
        compute: the shard function.
        watcher: who is told.
        go_on: asked before every shard.
    """
    waiting = begin(store, watcher)
    while waiting:
        held = []
        for shard in waiting:
            if not go_on():
                return
            if _compute_one(store, shard, compute):
                watcher.advance(len(shard))
            else:
                held.append(shard)
        if len(held) == len(waiting):
            time.sleep(_PAUSE)
        waiting = held


def begin(store: Store, watcher: Watcher) -> list[Shard]:
    """Clean up, tell how much is there, and give the shards that are missing."""
    store.clean()
    waiting = store.missing(watcher.notice)
    watcher.begin(store, store.run.wanted - sum(map(len, waiting)))
    return waiting


def _compute_one(store: Store, shard: Shard, compute: Callable[[Shard], pa.Table]) -> bool:
    """Whether the shard is done now; not where another process holds it."""
    claim = store.claim(shard)
    if claim is None:
        return False
    try:
        if not claim.done:
            store.write(shard, compute(shard))
    finally:
        claim.release()
    return True
