"""``evaluate``: measures methods on a data set under a named protocol, in a run that can be stopped and resumed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from vitreous._utils.storage import expanded
from vitreous._utils.torch_state import preserves_torch_state
from vitreous.datasets import DataSet
from vitreous.evaluation.engines import ProgressCallback, SilentProgress, run_locally, run_on_ray
from vitreous.evaluation.options import EvaluateOptions, resolve_options
from vitreous.evaluation.protocols import Protocol
from vitreous.evaluation.report.results import Results
from vitreous.evaluation.runner.measure import EvaluationContext
from vitreous.evaluation.runner.prepare_run import WHITE_BOX, Model, prepare_run
from vitreous.evaluation.store import Store


@preserves_torch_state
def evaluate(
    model: Model,
    data: str | DataSet,
    protocol: str | Protocol,
    methods: str | Sequence[str] | None = None,
    *,
    out: str | Path = "vitreous-runs",
    progress: ProgressCallback | None = None,
    watcher: ProgressCallback | None = None,
    **options: Unpack[EvaluateOptions],
) -> Results:
    """Measure methods on a data set under a protocol.

    The run's folder in ``out`` is named by everything that its numbers depend on: the same call resumes a run that was
    stopped, and another model, data set, protocol or list of methods has a folder of its own.

    Args:
        model: a name that ``load_model`` understands, or ``load_text_model`` for a protocol on texts; a ``ModelChoice``
            to change its preprocessing or device; or a model object, as ``explain`` takes it with image files, or a
            loaded text model or a pair of model and tokenizer (one process only).
        data: ``KIND:PATH``, or an open data set (one process only).
        protocol: a protocol or its name.
        methods: spellings, families of methods, or ``white-box`` for all methods except perturbation methods, which is
            also the default. The controls ``random``, ``centre`` and ``edges`` are added, unless ``controls=False``;
            ``oracle`` or ``ceiling`` adds the greedy order found by asking the model.
        out: the folder that holds the folders of runs.
        progress: receives progress and notices; by default notices become warnings.
        watcher: deprecated name of ``progress``.
        **options: see ``vitreous.evaluation.options.EvaluateOptions``.

    Raises:
        VitreousError: an argument does not exist, or the arguments do not fit together.

    Examples:
        >>> import vitreous
        >>> results = vitreous.evaluate(model, "labelled:photos", "chefer-2021-perturbation", ["gae", "rollout"])
        >>> results.methods, len(results.images)
        (('gae', 'rollout', 'random', 'centre', 'edges'), 2)
    """
    if watcher is not None:
        warnings.warn("evaluate(watcher=...) is deprecated, use progress=...", DeprecationWarning, stacklevel=3)
    chosen = resolve_options(options)
    callback = progress or watcher or SilentProgress()
    given = WHITE_BOX if methods is None else methods
    spellings = [given] if isinstance(given, str) else list(given)
    store, context = prepare_run(model, data, protocol, spellings, expanded(out), chosen, callback.notice)
    compute(store, context, chosen, callback)
    return Results((store,), context.protocol)


def compute(store: Store, context: EvaluationContext, options: EvaluateOptions, progress: ProgressCallback) -> None:
    """Compute the missing shards of a run on the chosen engine."""
    if options["retry_failed"]:
        store.forget_failed(progress.notice)
    if options["engine"] == "ray":
        run_on_ray(store, progress, tasks=options["workers"])
    else:
        run_locally(store, context, progress, workers=options["workers"] or 1)
