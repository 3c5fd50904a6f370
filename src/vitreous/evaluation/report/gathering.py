"""Which runs a folder holds, and which of them belong in one table."""

from __future__ import annotations

from pathlib import Path

from vitreous.errors import VitreousError
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.report.results import Results
from vitreous.evaluation.store.run import RunError
from vitreous.evaluation.store.store import Notice, Store, read_manifest
from vitreous.storage import MANIFEST, StorageError


def gather(folder: Path, notice: Notice) -> list[Results]:
    """Give the results in ``folder``, which is a run's folder or holds some.

    Runs that have their protocol, model and data set, the number of images they want and the images they have finished
    in common are one table; a method that several of them have measured is taken from the one that was started last.
    So finished runs stand together, and one that was killed or still goes on has a table of its own, behind them: it
    takes no images from a finished run.

    Args:
        folder: where to look.
        notice: told about every folder that is left out: it is no run, one of a protocol that is not known here, or
            one that has not stored anything yet; and about damaged files, whose images count as not finished.

    Raises:
        StorageError: nothing is left.
    """
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a folder")
    places = [path.parent for path in (*folder.glob(MANIFEST), *sorted(folder.glob(f"*/{MANIFEST}")))]
    found, left_out = _opened(places, notice)
    if not found:
        reasons = "; ".join(left_out)
        raise StorageError(f"{folder} holds no results of `vitreous evaluate`{reasons and f' ({reasons})'}")
    for reason in left_out:
        notice(f"left out: {reason}")
    groups: dict[tuple[str, int, bytes], list[Results]] = {}
    for results in sorted(found, key=_started, reverse=True):
        groups.setdefault((results.run.context, results.wanted, results.images.tobytes()), []).append(results)
    tables = [Results(tuple(one.stores[0] for one in alike), alike[0].protocol) for alike in groups.values()]
    return sorted(tables, key=_place)


def _opened(folders: list[Path], notice: Notice) -> tuple[list[Results], list[str]]:
    """The results of each run alone, and why some folders have none."""
    found, left_out = [], []
    for folder in folders:
        try:
            found.append(_results_in(folder, notice))
        except VitreousError as error:
            left_out.append(f"{folder.resolve().name}: {error}")
    return found, left_out


def _results_in(folder: Path, notice: Notice) -> Results:
    store = Store.open(folder)
    protocol = find_protocol(store.run.protocol)
    needed = {column for metric in protocol.metrics() for column in metric.columns}
    if store.run.settings != protocol.settings() or not needed <= {*store.run.columns}:
        raise RunError(f"it was measured by another version of {protocol.name}")
    results = Results((store.readable(notice),), protocol)
    if not len(results.images):
        raise StorageError(
            "nothing of it can be read" if results.stores[0].damaged else "it has not stored anything yet"
        )
    return results


def _started(results: Results) -> str:
    return str(read_manifest(results.stores[0].folder).get("created", ""))


def _place(results: Results) -> tuple[str, str, str, bool, int]:
    """Finished results stand before others of the same kind, and those of more images first."""
    run = results.run
    return run.protocol, run.model.name, run.data, not results.finished, -len(results.images)
