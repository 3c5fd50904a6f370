"""The engine on this machine: in this process, or in several that share the run's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vitreous._utils.text import reason_of
from vitreous.evaluation.engines.worker import ProgressCallback, missing_shards, worker_loop
from vitreous.evaluation.runner.context import EvaluationContext
from vitreous.evaluation.runner.measure import compute_shard
from vitreous.evaluation.store.run import Run, RunError
from vitreous.evaluation.store.store import Store

_PAUSE = 0.3  # seconds between two checks of the workers' progress


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
    module = "vitreous.evaluation.engines.worker"
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
        time.sleep(_PAUSE)
        there = {shard for shard in waiting if store.is_there(shard)}
        progress.advance(sum(map(len, there)))
        # From the same set: a shard that appeared meanwhile would never be reported.
        waiting = [shard for shard in waiting if shard not in there]
