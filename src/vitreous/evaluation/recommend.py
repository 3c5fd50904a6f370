"""``recommend``: the method to use for each purpose, measured on a small sample of the user's images.

It is a resumable run of ``evaluate``, with the same tasks, controls, intervals and paired tests.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vitreous._utils.defaults import CANDIDATES
from vitreous._utils.storage import expanded
from vitreous._utils.torch_state import preserves_torch_state
from vitreous.api.explain import explain
from vitreous.datasets import DataSet, Sample, open_dataset
from vitreous.datasets.files import FileDataSet, Item, image_names
from vitreous.errors import DataError, InputError
from vitreous.evaluation.engines import ProgressCallback
from vitreous.evaluation.evaluate import evaluate
from vitreous.evaluation.protocols import Protocol
from vitreous.evaluation.report.results import Results, counted_values
from vitreous.evaluation.run import ModelChoice
from vitreous.evaluation.runner.measure import load
from vitreous.evaluation.runner.prepare_run import Model
from vitreous.evaluation.statistics import Estimate, estimates, paired
from vitreous.evaluation.tasks.faithfulness import FillingCurves, PixelFilling, ShiftStability
from vitreous.evaluation.tasks.segmentation import Segmentation
from vitreous.methods import is_control
from vitreous.metrics.metric import Metric
from vitreous.models import LoadedModel
from vitreous.models.loading import infer_preprocessing

Goal = Literal["faithfulness", "localisation", "speed"]
_SURE = 0.05  # p of the paired test against the best control, times the number of methods that were tried
_REPEATS = 3  # of a timing, after one to warm up
_STEPS = (10, 30, 50, 70, 90)


@dataclass(frozen=True)
class Figures:
    """The measurements of one method or control.

    Attributes:
        method: its spelling.
        control: whether it is a control, which explains nothing.
        metrics: mean, interval and number of images by metric.
        cost: time of its map as a multiple of a forward pass; None for a control.
    """

    method: str
    control: bool
    metrics: Mapping[str, Estimate]
    cost: float | None = None


@dataclass(frozen=True)
class Choice:
    """The method for one purpose.

    Attributes:
        purpose: ``faithfulness``: what the prediction depends on; ``localisation``: where the object is; ``speed``: the
            cheapest method that is not distinguishable from the most faithful one.
        method: None if no method beats the controls.
        metric: the metric that was compared.
        best: the method with the best mean, whether it beats the controls or not.
        control: the best control.
        p: p-value of the paired test of the two, multiplied by the number of methods; at most 1.
        tied: other methods that a paired test does not distinguish from the best.
        sentence: a summary.
    """

    purpose: Goal
    method: str | None
    metric: str
    best: Figures
    control: Figures
    p: float
    tied: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class Recommendation:
    """Which method to use for which purpose.

    Attributes:
        model: the model's name.
        data: the data set.
        photos: number of images that counted.
        choices: the choice for each purpose.
        rows: the measurements of all methods and controls, most faithful first.
        removal: ``dropped``, or ``mean`` if patches cannot be dropped and were painted with the mean colour.
        folder: the folder of the run, for ``vitreous report``.
        notes: remarks on the result.
    """

    model: str
    data: str
    photos: int
    choices: Mapping[str, Choice]
    rows: tuple[Figures, ...]
    removal: str
    folder: Path
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        sentences = [choice.sentence for choice in self.choices.values()]
        return "\n".join([*sentences, *(f"Note: {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """Give everything as JSON values; numbers that are not known are None."""
        values = {**asdict(self), "folder": str(self.folder), "rows": [asdict(row) for row in self.rows]}
        found: dict[str, Any] = _without_nan(values)
        return found


@preserves_torch_state
def recommend(
    model: Model,
    data: str | Path | DataSet,
    methods: str | Sequence[str] | None = None,
    *,
    limit: int = 16,
    out: str | Path = "vitreous-runs",
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Recommendation:
    """Measure methods on a sample of images and recommend one for each purpose.

    Faithfulness is measured by dropping patches, most and least relevant first, at five steps: half of the difference
    of the two areas; deletion and insertion are reported too. Localisation is the mAP of the map against the mask, if
    the data set has masks. Stability is the rank correlation with the map of the image shifted by one pixel. Cost is
    the time of a map as a multiple of a forward pass. The controls ``random``, ``centre`` and ``edges`` are measured
    as well. A method is recommended only if it beats the best control in a paired test (p times the number of methods
    below 0.05).

    Each method costs 10 runs on half of the patches per image, and all methods together 4 more explanations for
    stability: about 100 forward passes per image with the default candidates.

    Args:
        model: see ``evaluate``.
        data: ``KIND:PATH``, an open data set, or a folder of images.
        methods: spellings or groups; by default the candidates of ``explain(methods="auto")``.
        limit: number of images: a stratified sample if labels are known, otherwise a random one.
        out: the folder of all runs; the same call resumes an interrupted run.
        seed: seed of the sample and of everything else that is random.
        progress: see ``evaluate``.

    Examples:
        >>> import vitreous
        >>> found = vitreous.recommend(model, "photos", ["gae", "rollout"], limit=2)
        >>> sorted(found.choices)
        ['faithfulness', 'speed']
    """
    if limit < 2:
        raise InputError("limit must be at least 2: methods are compared image by image")
    listed = _opened(data)
    with_masks = _has_mask(listed)
    candidates = list(CANDIDATES) if methods is None else methods
    labelled = listed.labels() is not None
    results, removal = None, "dropped"
    for filling in ("dropped", "mean"):
        protocol = _protocol(filling, with_masks=with_masks)
        results = evaluate(
            model,
            _named(data, listed),
            protocol,
            candidates,
            out=out,
            progress=progress,
            limit=limit,
            seed=seed,
            stratify=labelled,
            shuffle=not labelled,
        )
        removal = filling
        if _is_measured(results, _main(protocol)):
            break
    assert results is not None
    return _concluded(results, removal, _costs(model, listed, results), with_masks=with_masks)


class PhotoFolder(FileDataSet):
    """A folder of images without labels, including subfolders."""

    kind = "folder"
    summary = "a folder of images without labels"
    origin = "give a folder that holds image files"

    def _list(self) -> Sequence[Item]:
        folders = [self.path, *sorted(path for path in self.path.rglob("*") if path.is_dir())]
        found = [folder / name for folder in folders for name in image_names(folder)]
        return [Item(str(file.relative_to(self.path)), str(file.relative_to(self.path))) for file in found]


def _opened(data: str | Path | DataSet) -> DataSet:
    if isinstance(data, DataSet):
        found = data
    elif isinstance(data, Path) or expanded(data).is_dir() or ":" not in data:
        found = PhotoFolder(data)
    else:
        found = open_dataset(data)
    if found.holds == "volumes":
        raise DataError(
            "methods are recommended for images, which are erased and shifted; for volumes and clips, compare methods "
            "by `evaluate` with a protocol that drops tokens, such as skipplus-faithfulness"
        )
    if found.holds != "photos":
        raise DataError(f"{found.kind} holds {found.holds}; methods are recommended for images only")
    return found


def _named(data: str | Path | DataSet, listed: DataSet) -> str | DataSet:
    """By name where it has one, as an evaluation is best resumed."""
    return data if isinstance(data, str) and not isinstance(listed, PhotoFolder) else listed


def _has_mask(listed: DataSet) -> bool:
    first = listed.load(0) if len(listed) else None
    return isinstance(first, Sample) and first.mask is not None


def _protocol(filling: Literal["dropped"] | PixelFilling, *, with_masks: bool) -> Protocol:
    where = (Segmentation(),) if with_masks else ()
    return Protocol(
        name="recommendation" if filling == "dropped" else f"recommendation-{filling}",
        title="Faithfulness, stability and, where there are masks, localisation of a few methods on a few photos",
        paper="deletion and insertion as in SkipPLUS (CVPRW 2024), segmentation as in Chefer et al. (CVPR 2021)",
        version=1,
        tasks=(FillingCurves(fillings=(filling,), percent=_STEPS, separate=True), ShiftStability(pixels=(1,)), *where),
        resize="model",
    )


def _main(protocol: Protocol) -> Metric:
    """Half of the difference between LeRF and MoRF."""
    return protocol.metrics()[0]


def _is_measured(results: Results, metric: Metric) -> bool:
    values = counted_values(results, metric.columns)
    return any(bool(np.isfinite(table).all(axis=1).any()) for table in values.values())


def _costs(model: Model, listed: DataSet, results: Results) -> dict[str, float]:
    """Measure the time of each method's map of one image, as a multiple of a forward pass in the same run."""
    loaded = _loaded(model, results.protocol)
    sample = listed.load(0)
    assert isinstance(sample, Sample)
    pixels = loaded.preprocessing([sample.image]).to(next(loaded.model.parameters(), torch.empty(0)))

    def forward() -> None:
        with torch.no_grad():
            loaded.model(pixels)

    one = _seconds(forward)
    found = {}
    for method in results.measured_methods:
        if not is_control(method):
            found[method] = _seconds(lambda method=method: explain(loaded, pixels, method)) / one
    return found


def _loaded(model: Model, protocol: Protocol) -> LoadedModel:
    """The model once more, to be timed; it has been evaluated, so that it can be loaded."""
    choice = ModelChoice(model) if isinstance(model, str) else model
    found = load(choice, protocol) if isinstance(choice, ModelChoice) else choice
    known = found if isinstance(found, LoadedModel) else infer_preprocessing(found)  # type: ignore[arg-type]
    assert isinstance(known, LoadedModel)
    return known


def _seconds(run: Any) -> float:
    run()
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _concluded(results: Results, removal: str, costs: Mapping[str, float], *, with_masks: bool) -> Recommendation:
    metrics = list(results.protocol.metrics())
    found: dict[str, dict[str, Estimate]] = {method: {} for method in results.measured_methods}
    for metric in metrics:
        values = counted_values(results, metric.columns)
        for one in estimates(values, metric.columns, [metric], seed=results.run.seed):
            found[one.method][metric.name] = one
    rows = [Figures(method, is_control(method), each, costs.get(method)) for method, each in found.items()]
    main = _main(results.protocol)
    rows.sort(key=lambda row: _order(row, main))
    choices = {"faithfulness": _choice("faithfulness", results, main, rows)}
    if with_masks:
        (map_metric,) = (metric for metric in metrics if metric.name == "mAP")
        choices["localisation"] = _choice("localisation", results, map_metric, rows)
    choices["speed"] = _fastest(choices["faithfulness"], rows)
    return Recommendation(
        model=results.run.model.name,
        data=results.run.data,
        photos=int(results.counted.sum()),
        choices=choices,
        rows=tuple(rows),
        removal=removal,
        folder=results.stores[0].folder,
        notes=_notes(results, removal, with_masks=with_masks),
    )


def _order(row: Figures, metric: Metric) -> float:
    mean = row.metrics[metric.name].mean
    if not math.isfinite(mean):
        return math.inf
    return -mean if metric.direction == "higher" else mean


def _choice(purpose: Goal, results: Results, metric: Metric, rows: Sequence[Figures]) -> Choice:
    ordered = sorted(rows, key=lambda row: _order(row, metric))
    explaining = [row for row in ordered if not row.control]
    best, control = explaining[0], next(row for row in ordered if row.control)
    values = counted_values(results, metric.columns)

    def p_against(first: str, second: str) -> float:
        return paired(values, metric.columns, metric, first, second, seed=results.run.seed).p

    p = min(1.0, p_against(best.method, control.method) * len(explaining))
    beats = _order(best, metric) < _order(control, metric) and p < _SURE
    tied = tuple(row.method for row in explaining[1:] if p_against(row.method, best.method) >= _SURE) if beats else ()
    method = best.method if beats else None
    found = Choice(purpose, method, metric.name, best, control, p, tied, "")
    return _with_sentence(found, metric, int(results.counted.sum()))


def _fastest(faithful: Choice, rows: Sequence[Figures]) -> Choice:
    """The cheapest of the most faithful method and those that are not distinguishable from it."""
    if faithful.method is None:
        sentence = "Speed: no method is faithful enough to be chosen by its cost."
        return Choice("speed", None, faithful.metric, faithful.best, faithful.control, faithful.p, (), sentence)
    alike = [row for row in rows if row.method in (faithful.method, *faithful.tied)]
    cheapest = min(alike, key=lambda row: math.inf if row.cost is None else row.cost)
    likeness = (
        "the most faithful method itself" if cheapest.method == faithful.method else "not distinguishable from that"
    )
    sentence = f"Speed: {cheapest.method} takes {cheapest.cost:.1f} times a forward pass and is {likeness}."
    return Choice("speed", cheapest.method, faithful.metric, cheapest, faithful.control, faithful.p, (), sentence)


def _with_sentence(choice: Choice, metric: Metric, photos: int) -> Choice:
    best, control = (_figure(row.metrics[metric.name], metric) for row in (choice.best, choice.control))
    p = "p < 0.01" if choice.p < 0.01 else f"p = {choice.p:.2f}"
    name = choice.purpose.capitalize()
    if choice.method is None:
        sentence = (
            f"{name}: no method beats the controls on these {photos} images. The best, {choice.best.method}, has "
            f"{best}, the control {choice.control.method} {control} ({metric.name}, {p}). Do not rely on these maps "
            "for this purpose, or measure more images."
        )
    else:
        others = f" Not distinguishable from it: {', '.join(choice.tied)}." if choice.tied else ""
        sentence = (
            f"{name}: use {choice.method}, {best}; the best control, {choice.control.method}, has {control} "
            f"({metric.name}, {photos} images, {p}).{others}"
        )
    return Choice(**{**vars(choice), "sentence": sentence})


def _figure(one: Estimate, metric: Metric) -> str:
    return f"{metric.format(one.mean)} [{metric.format(one.low)}, {metric.format(one.high)}]"


def _notes(results: Results, removal: str, *, with_masks: bool) -> tuple[str, ...]:
    notes = []
    if removal != "dropped":
        notes.append("patches were painted with the mean colour, because the model cannot do without them")
    if not with_masks:
        notes.append("the data set has no masks, so that localisation was not measured")
    failed = [method for method in results.methods if method not in results.measured_methods]
    if failed:
        notes.append(f"could not be measured: {', '.join(failed)}")
    return tuple(notes)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
