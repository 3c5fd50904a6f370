"""A run of ``vitreous evaluate``, with its progress on the terminal."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from vitreous.cli.console import plain_warnings, say, say_error, say_warning, stdout_to_stderr
from vitreous.cli.evaluating_progress import EvaluationProgress
from vitreous.evaluation.evaluate import evaluate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from vitreous.evaluation.report.results import Results
    from vitreous.evaluation.runner.prepare_run import Options
    from vitreous.evaluation.store.run import ModelChoice

_SHOWN_FAILURES = 5


def run(
    model: ModelChoice,
    data: str,
    protocol: str,
    methods: Sequence[str],
    out: Path,
    options: Options,
    console: Console,
) -> Results:
    """Evaluate, and say what could not be measured.

    Ray prints messages of its own, about workers that died for example; they are no results.
    """
    own_output = stdout_to_stderr() if options.engine == "ray" else nullcontext()
    with own_output, plain_warnings(console), EvaluationProgress(console) as progress:
        results = evaluate(model, data, protocol, methods, out=out, progress=progress, **vars(options))
    _tell_failures(results, console)
    return results


def _tell_failures(results: Results, console: Console) -> None:
    never = set(results.methods) - set(results.measured_methods) if results.measured_methods else set()
    broken = results.uncounted
    if not never and not broken:
        return
    failures = results.failures()
    for method in [method for method in results.methods if method in never]:
        reason = next(failure.error for failure in failures if failure.method == method)
        say_warning(f"{method} could not be measured on any of the {results.run.things}: {reason}", console)
    if not broken:
        return
    others = [failure for failure in failures if failure.method not in never]
    for failure in others[:_SHOWN_FAILURES]:
        by = "" if failure.method is None else f" ({failure.method})"
        say_warning(f"{failure.image}{by}: {failure.error}", console)
    if len(others) > _SHOWN_FAILURES:
        say_warning(f"and {len(others) - _SHOWN_FAILURES} more", console)
    if not results.measured_methods:
        say_error(f"none of the {len(results.images)} {results.run.things} could be measured", console)
    else:
        some = f"{broken} of {len(results.images)} {results.run.things}"
        say(console, f"{some} could not be measured and do not count{_alone_to_blame(results)}", "yellow")


def _alone_to_blame(results: Results) -> str:
    """Which method takes most of what does not count away from all others, if one does."""
    failed = {method: results.failed[method] for method in results.measured_methods}
    together = sum(flags.astype(int) for flags in failed.values())
    alone = {method: int((flags & (together == 1)).sum()) for method, flags in failed.items()}
    worst = max(alone, key=alone.__getitem__)
    if len(failed) == 1 or 2 * alone[worst] <= results.uncounted:
        return ""
    return f", {alone[worst]} of them because of {worst} alone: without it they would"
