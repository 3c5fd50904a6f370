"""Engines: where the shards of a run are computed, with the same shard function everywhere.

The local engine runs in this process, or in several that share the run's folder. Every process on a folder goes through
``worker_loop``; ``python -m vitreous.evaluation.engines FOLDER PARENT_PID`` is a worker process, which reads the run
from standard input.

The Ray engine runs the shards as tasks of a cluster, and the driver alone writes the run's folder. A task returns its
table. The model and the data set are opened by name on every node and have to be there, with the same content, which
each worker checks.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vitreous._utils.messages import error_message
from vitreous.errors import MissingDependencyError, VitreousError
from vitreous.evaluation.run import Run, RunError, Shard
from vitreous.evaluation.runner.measure import EvaluationContext, compute_shard, open_context
from vitreous.evaluation.store import Claim, Store

if TYPE_CHECKING:
    import pyarrow as pa

_PAUSE = 0.2  # seconds between two checks of shards that other processes hold
_QUEUED = 2  # shards in flight for each that can run at once, so that no worker waits for the driver
RETRIES = 5  # of a shard whose worker died
_PAUSE_BETWEEN_CHECKS = 0.3  # seconds between two checks of the workers' progress


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
    progress.begin(store, store.run.image_count - sum(map(len, waiting)))
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
                f"the workers cannot be started ({error_message(error)}): give fewer of them, or one to compute here"
            ) from error
        yield processes
    finally:
        for process in processes:
            process.kill()  # a run can be resumed wherever they are killed
            process.wait()


def _start(store: Store) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(store.run.threads)}
    module = "vitreous.evaluation.engines"
    command = [sys.executable, "-m", module, str(store.folder), str(os.getpid())]
    return subprocess.Popen(  # noqa: S603  # this program itself, with a folder as its argument
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )


def _tell(process: subprocess.Popen[bytes], run: Run) -> None:
    """Send the run to a worker."""
    assert process.stdin is not None
    with process.stdin as stream:
        stream.write(json.dumps(run.as_json()).encode())


def _watch(store: Store, processes: Sequence[subprocess.Popen[bytes]], progress: ProgressCallback) -> None:
    """Report the progress of the workers until all have ended."""
    waiting = missing_shards(store, progress)
    while any(process.poll() is None for process in processes):
        time.sleep(_PAUSE_BETWEEN_CHECKS)
        there = {shard for shard in waiting if store.is_there(shard)}
        progress.advance(sum(map(len, there)))
        # From the same set: a shard that appeared meanwhile would never be reported.
        waiting = [shard for shard in waiting if shard not in there]


def run_on_ray(store: Store, progress: ProgressCallback, *, tasks: int | None = None) -> None:
    """Compute a run's missing shards on Ray: the cluster that the process is connected to, or that RAY_ADDRESS names.

    Args:
        store: the run's folder, on the machine of the driver.
        progress: receives the progress.
        tasks: how many shards are computed at once; by default as many as the cluster has processors for.

    Raises:
        RunError: no node of the cluster has as many processors as the run has threads, or the workers of a shard died
            again and again.
    """
    ray = _ray()
    with _connected(ray):
        threads = store.run.threads
        _check_that_a_node_has(ray, threads)
        at_once = tasks or max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
        in_flight = _InFlight(ray, store, progress, _remote(ray, threads))
        try:
            for shard in missing_shards(store, progress):
                while len(in_flight) >= at_once * (1 if tasks else _QUEUED):
                    in_flight.finish_one()
                in_flight.start(shard)
            while len(in_flight):
                in_flight.finish_one()
        finally:
            in_flight.abandon()
    # Wait for shards of other processes, and compute them here if those died.
    worker_loop(store, lambda shard: compute_by_name(store.run, shard, str(Path.cwd())), progress)


def compute_by_name(run: Run, shard: Shard, folder: str) -> pa.Table:
    """Compute a shard in a Ray worker, which keeps the context open for the next shard.

    Args:
        run: what is evaluated.
        shard: which images.
        folder: what relative paths of models start from: the driver's working folder.
    """
    with suppress(OSError):
        os.chdir(folder)
    return compute_shard(run, open_context(run), shard)


class _InFlight:
    """The shards submitted to the cluster, each claimed by this driver until it is written."""

    def __init__(self, ray: Any, store: Store, progress: ProgressCallback, remote: Any) -> None:
        self._ray, self._store, self._progress, self._remote = ray, store, progress, remote
        self._run = ray.put(store.run)
        self._claims: dict[Any, tuple[Shard, Claim]] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def start(self, shard: Shard) -> None:
        """Submit a shard to the cluster, unless another process holds it."""
        claim = self._store.claim(shard)
        if claim is None:
            return
        if claim.done:
            claim.release()
            self._progress.advance(len(shard))
            return
        try:
            task = self._remote.remote(self._run, shard, str(Path.cwd()))
        except BaseException:
            claim.release()
            raise
        self._claims[task] = (shard, claim)

    def finish_one(self) -> None:
        """Wait for a shard and write it."""
        (done, *_), _ = self._ray.wait(list(self._claims), num_returns=1)
        shard, claim = self._claims.pop(done)
        try:
            self._store.write(shard, self._result(shard, done))
        finally:
            claim.release()
        self._progress.advance(len(shard))

    def abandon(self) -> None:
        """Release and cancel unfinished shards when the driver stops early."""
        while self._claims:
            task, (_, claim) = self._claims.popitem()
            claim.release()
            self._ray.cancel(task, force=True)

    def _result(self, shard: Shard, done: Any) -> Any:
        try:
            return self._ray.get(done)
        except self._ray.exceptions.RayTaskError as error:
            # Expected errors are raised as they are.
            cause = error.cause if isinstance(error.cause, VitreousError) else error
            raise cause from None
        except self._ray.exceptions.RayError as error:
            raise RunError(
                f"{shard.name} was not computed, though a worker that dies is replaced {RETRIES} times: "
                f"{error_message(error)}"
            ) from error


def _ray() -> Any:
    try:
        import ray  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise MissingDependencyError('the engine ray needs its package: pip install "vitreous[ray]"') from error
    return ray


def _check_that_a_node_has(ray: Any, threads: int) -> None:
    """Refuse tasks that are too large for every node: Ray would wait forever."""
    largest = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    # An autoscaling cluster may start without processors: its nodes come when tasks wait.
    if 0 < largest < threads:
        raise RunError(
            f"a task takes {threads} processors, one for each thread, and the largest node of the Ray cluster has "
            f"{largest}: give --threads {largest} or fewer and another --out, because a run keeps its number of threads"
        )


def _remote(ray: Any, threads: int) -> Any:
    """The shard function as a task that takes as many processors as it has threads, and survives its worker."""
    return ray.remote(num_cpus=threads, max_retries=RETRIES)(compute_by_name)


@contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Use the existing connection, or open one and close it."""
    if ray.is_initialized():
        yield
        return
    # Without RAY_ADDRESS no cluster is searched: one that runs here may belong to something else.
    settings = {} if os.environ.get("RAY_ADDRESS") else {"address": "local", "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level="warning", **settings)
    try:
        yield
    finally:
        ray.shutdown()


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
