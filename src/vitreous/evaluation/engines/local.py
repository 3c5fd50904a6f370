"""The engine on this machine: in this process, or in several that share the run's folder.

The loop that every process on a run's folder goes through, and the worker process of the local engine.

``python -m vitreous.evaluation.engines.local FOLDER PARENT_PID`` is a worker process; it reads the run from standard
input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from vitreous._utils.text import reason_of
from vitreous.errors import VitreousError
from vitreous.evaluation.runner.measure import EvaluationContext, compute_shard, open_context
from vitreous.evaluation.store.run import Run, RunError, Shard
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


_PAUSE_BETWEEN_CHECKS = 0.3  # seconds between two checks of the workers' progress


def run_locally(store: Store, context: EvaluationContext, progress: ProgressCallback, *, workers: int = 1) -> None:
    """Compute a run's missing shards.

    Args:
        store: the run's folder.
        context: the run's model, data set and protocol.
        progress: receives the progress.
        workers: number of processes; several open the model and the data set by name.

    Raises:
        RunError: a worker cannot be started.
    """
    if workers > 1:
        with _workers(store, workers) as processes:
            _watch(store, processes, progress)
            failed = sum(process.returncode != 0 for process in processes)
            if failed:
                progress.notice(f"{failed} of {workers} workers ended early; this process computes the rest")
    # Nothing is left to do here, unless workers died or met an error: then this process raises it.
    worker_loop(store, lambda shard: compute_shard(store.run, context, shard), progress)


@contextmanager
def _workers(store: Store, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start worker processes, and end them on any exit, also while others are being started.

    Raises:
        RunError: one cannot be started.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        try:
            for _ in range(count):
                processes.append(_start(store))
                _tell(processes[-1], store.run)
        except OSError as error:  # a broken pipe here must not be taken for one of the program's own output
            raise RunError(
                f"the workers cannot be started ({reason_of(error)}): give fewer of them, or one to compute here"
            ) from error
        yield processes
    finally:
        for process in processes:
            process.kill()  # a run can be resumed wherever they are killed
            process.wait()


def _start(store: Store) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(store.run.threads)}
    module = "vitreous.evaluation.engines.local"
    command = [sys.executable, "-m", module, str(store.folder), str(os.getpid())]
    return subprocess.Popen(  # noqa: S603  # this program itself, with a folder as its argument
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )


def _tell(process: subprocess.Popen[bytes], run: Run) -> None:
    """Send the run to a worker."""
    assert process.stdin is not None
    with process.stdin as told:
        told.write(json.dumps(run.as_json()).encode())


def _watch(store: Store, processes: Sequence[subprocess.Popen[bytes]], progress: ProgressCallback) -> None:
    """Report the progress of the workers until all have ended."""
    waiting = missing_shards(store, progress)
    while any(process.poll() is None for process in processes):
        time.sleep(_PAUSE_BETWEEN_CHECKS)
        there = {shard for shard in waiting if store.is_there(shard)}
        progress.advance(sum(map(len, there)))
        # From the same set: a shard that appeared meanwhile would never be reported.
        waiting = [shard for shard in waiting if shard not in there]
