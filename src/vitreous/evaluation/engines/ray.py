"""The engine on a Ray cluster: the same shard function as tasks; the driver alone writes the run's folder.

A task returns its table, so that only the driver needs the folder. The model and the data set are opened by name on
every node and have to be there, with the same content, which each worker checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitreous._utils.text import reason_of
from vitreous.errors import MissingDependencyError, VitreousError
from vitreous.evaluation.engines.local import ProgressCallback, missing_shards, worker_loop
from vitreous.evaluation.store.run import Run, RunError, Shard
from vitreous.evaluation.store.store import Claim, Store

if TYPE_CHECKING:
    import pyarrow as pa

RETRIES = 5  # of a shard whose worker died
_QUEUED = 2  # shards in flight for each that can run at once, so that no worker waits for the driver


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
    # torch is imported by workers alone
    from vitreous.evaluation.runner.measure import compute_shard, open_context  # noqa: PLC0415

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
                f"{reason_of(error)}"
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
            f"{largest}: give --threads {largest} or fewer and another --out, for a run keeps its number of threads"
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
