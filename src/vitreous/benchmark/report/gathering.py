"""Which runs a folder holds, and which of them belong in one table."""

from __future__ import annotations

from pathlib import Path

from vitreous.benchmark.results import Results
from vitreous.benchmark.store import Store, read_manifest
from vitreous.storage import MANIFEST, StorageError


def gather(folder: Path) -> list[Results]:
    """Give the results in ``folder``, which is a run's folder or holds some.

    Runs that have their protocol, model, data set and number of images in common are one table; a method that several
    of them have measured is taken from the one that was started last.

    Raises:
        StorageError: there is no run, or none has stored anything yet.
    """
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a folder")
    folders = [folder] if (folder / MANIFEST).exists() else sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    if not folders:
        raise StorageError(f"{folder} holds no run of `vitreous evaluate`")
    groups: dict[tuple[str, int], list[Store]] = {}
    for place in sorted(folders, key=_started, reverse=True):
        store = Store.open(place)
        groups.setdefault((store.run.context, store.run.wanted), []).append(store)
    results = [Results(tuple(stores)) for stores in groups.values()]
    begun = [result for result in results if len(result.images)]
    if not begun:
        raise StorageError(f"the runs in {folder} have not stored anything yet")
    return sorted(begun, key=lambda result: (result.run.protocol, result.run.model.name, result.run.data))


def _started(folder: Path) -> str:
    return str(read_manifest(folder).get("created", ""))
