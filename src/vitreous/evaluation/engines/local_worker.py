"""A worker process of the local engine: ``python -m …local_worker FOLDER STARTER``, with the run on standard input."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from vitreous.errors import VitreousError
from vitreous.evaluation.engines.local import run_of
from vitreous.evaluation.engines.watching import Silent
from vitreous.evaluation.engines.working import work
from vitreous.evaluation.runner.shards import compute_shard
from vitreous.evaluation.runner.workbench import open_workbench
from vitreous.evaluation.store.store import Store


def main() -> None:
    """Compute shards until none is left or the process that started this one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at the keyboard goes to all; the starter ends this one
    starter = int(sys.argv[2])  # told, not asked for: it may have died while this process was starting
    store = Store(Path(sys.argv[1]), run_of(sys.stdin.read()))
    try:
        bench = open_workbench(store.run)
        work(
            store,
            lambda shard: compute_shard(store.run, bench, shard),
            Silent(),
            go_on=lambda: os.getppid() == starter,
        )
    except VitreousError:
        sys.exit(1)  # the starter meets the same error when it does what is left, and tells it


if __name__ == "__main__":
    main()
