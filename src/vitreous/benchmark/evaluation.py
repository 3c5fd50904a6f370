"""``evaluate``: methods measured on a data set under a named protocol, in a run that can be stopped and go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from vitreous.benchmark.engines.local import run_locally
from vitreous.benchmark.engines.watching import Silent, Watcher
from vitreous.benchmark.results import Results
from vitreous.benchmark.selection import WHITE_BOX
from vitreous.benchmark.starting import Model, Options, OptionValues, start
from vitreous.benchmark.store import Store
from vitreous.benchmark.workbench import Workbench
from vitreous.datasets import DataSet
from vitreous.paths import expanded
from vitreous.protocols import Protocol
from vitreous.torch_state import leaves_torch_as_it_was


@leaves_torch_as_it_was
def evaluate(
    model: Model,
    data: str | DataSet,
    protocol: str | Protocol,
    methods: str | Sequence[str] | None = None,
    *,
    out: str | Path = "vitreous-runs",
    watcher: Watcher | None = None,
    **options: Unpack[OptionValues],
) -> Results:
    """Measure methods on a data set under a protocol.

    The run's folder in ``out`` is named by everything that its numbers depend on: the same call goes on where an
    earlier one was stopped, and another model, data set, protocol or list of methods has a folder of its own.

    Args:
        model: a name that ``load_model`` understands, or ``load_text_model`` for a protocol on texts; a ``ModelChoice``
            where its preprocessing or device is to be changed; or a model that is there already, as ``explain`` takes
            it with photos, or one for texts as what ``load_text_model`` gave or a pair of model and tokenizer (one
            process only).
        data: ``KIND:PATH``, or a data set that is open already (one process only).
        protocol: a protocol or its name.
        methods: spellings, families of methods, or ``white-box`` for all methods but those that ask the model about
            masked pictures, which is also what ``None`` stands for.
        out: the folder that holds the folders of runs.
        watcher: who is told about progress.
        **options: the fields of ``Options``: limit, shuffle, engine, workers, threads, shard_size, seed, plugins,
            retry_failed, outputs.

    Raises:
        VitreousError: something that was asked for does not exist or does not go together.

    Examples:
        >>> import vitreous
        >>> results = vitreous.evaluate(model, "labelled:photos", "chefer-2021-perturbation", ["gae", "rollout"])
        >>> results.methods, len(results.images)
        (('gae', 'rollout'), 2)
    """
    chosen = Options(**options)
    told = watcher or Silent()
    asked = WHITE_BOX if methods is None else methods
    words = [asked] if isinstance(asked, str) else list(asked)
    store, bench = start(model, data, protocol, words, expanded(out), chosen, told)
    compute(store, bench, chosen, told)
    return Results((store,), bench.protocol)


def compute(store: Store, bench: Workbench, options: Options, watcher: Watcher) -> None:
    """Compute what a run still lacks on the engine that was asked for."""
    if options.retry_failed:
        store.forget_failed(watcher.notice)
    if options.engine == "ray":
        from vitreous.benchmark.engines.ray import run_on_ray  # noqa: PLC0415  # its package is an extra

        run_on_ray(store, watcher, tasks=options.workers)
    else:
        run_locally(store, bench, watcher, workers=options.workers or 1)
