"""Reports of results: one self-contained HTML file, or text for other documents (Markdown, LaTeX, CSV, JSON)."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vitreous import __version__
from vitreous.evaluation.protocol import published_rows, published_title
from vitreous.evaluation.report.figures import (
    Curves,
    Extreme,
    Extremes,
    Thumbnails,
    curves_chart,
    curves_of,
    dots_chart,
    extremes_of,
    sweeps_of,
    thumbnails_of,
)
from vitreous.evaluation.report.overall import EXPLAINED, Overall, agreement_grid, overall_results
from vitreous.evaluation.report.results import Results, summarise
from vitreous.evaluation.report.tables import (
    COLUMNS,
    ResultTable,
    as_latex,
    as_markdown,
    as_rows,
    difference_parts,
    is_tied,
    markdown_grid,
    number_parts,
    published_as_rows,
    row_label,
    table_heading,
)
from vitreous.evaluation.store import read_manifest
from vitreous.html.page import render
from vitreous.methods import is_control
from vitreous.metrics.metric import Metric

COLOURS, DASHES = 8, 3  # evaluation.css has as many
_SHOWN_DOTS = 4  # charts of metrics that are not folded away
_PICTURED_METHODS = 12
_NAMED_TIES = 3
_SHOWN_FAILURES = 200
_AGREEMENT = "**How alike the columns rank the methods** (Spearman, each turned so that higher is better)"
_MISSING = "–"  # noqa: RUF001


@dataclass(frozen=True)
class _Heading:
    text: str
    about: str = ""


@dataclass(frozen=True)
class _Cell:
    """A cell of a table: a mean with rank and interval, or a text alone."""

    mean: str = ""
    interval: str = ""
    rank: str = ""
    about: str = ""
    best: bool = False
    tied: bool = False
    text: str = ""


@dataclass(frozen=True)
class _Table:
    headings: list[_Heading]
    rows: list[tuple[str, str, list[_Cell]]]  # label, CSS class, cells


@dataclass(frozen=True)
class _Grid:
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class _Published:
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class _ChartGroup:
    title: str
    styles: Mapping[str, str]
    charts: list[tuple[str, Markup]]
    grey: bool


@dataclass(frozen=True)
class _SampleTile:
    shown: Markup
    name: str
    value: str


@dataclass(frozen=True)
class _MethodSamples:
    method: str
    metric: str
    best: list[_SampleTile]
    worst: list[_SampleTile]


@dataclass(frozen=True)
class _Samples:
    about: str
    problem: str | None
    methods: list[_MethodSamples]


@dataclass(frozen=True)
class _Failures:
    count: int
    rows: list[tuple[str, str, str]]
    more: int


@dataclass(frozen=True)
class _Run:
    """The section of one run, as its template reads it."""

    anchor: str
    title: str
    summary: str
    protocol: str
    noun: str
    unfinished: str
    facts: list[tuple[str, str]]
    results: _Table
    against_best: _Table | None
    published: _Published | None
    charts: list[_ChartGroup]
    dots: list[tuple[str, Markup]]
    more_dots: list[tuple[str, Markup]]
    agreement: _Grid | None
    main: str
    samples: _Samples | None
    failures: _Failures | None
    manifests: list[tuple[str, str]]


def write_page(found: Sequence[Results], *, pictures: int = 3, published: bool = False) -> str:
    """Render the report.

    Args:
        found: Results, each of one protocol, model and data set.
        pictures: How many of the best and of the worst images are shown per method.
        published: Whether numbers that papers print for a protocol are shown, in a table of their own.
    """
    protocols = ", ".join(dict.fromkeys(results.run.protocol for results in found))
    tables = [summarise(results, published=published) for results in found]
    styles = MethodStyles()
    return render(
        "evaluation.html",
        title=f"{protocols} · Vitreous",
        heading="How good are these explanations?",
        style="evaluation.css",
        version=__version__,
        overall_about=EXPLAINED,
        overall=[_overall(each) for each in overall_results(zip(found, tables, strict=True))],
        runs=[
            _run(results, table, pictures, styles, f"run-{number}")
            for number, (results, table) in enumerate(zip(found, tables, strict=True), start=1)
        ],
    )


def _overall(found: Overall) -> tuple[str, _Grid]:
    return found.title, _Grid(*found.grid())


def summary_of(results: Results, table: ResultTable) -> str:
    """Say in a sentence what was measured, which method is best, and what a test does not tell apart from it."""
    metric = table.main
    compared = [method for method in table.methods if not is_control(method)]
    noun = results.run.noun
    measured = f"{len(compared)} method{'s' if len(compared) != 1 else ''} on {int(results.counted.sum())} {noun}"
    best = [] if metric is None else [one for one in compared if _leads(table, one, metric)]
    if metric is None or not best:
        return f"{measured}, model {results.run.model.name}."
    estimate = table.estimate(best[0], metric.name)
    assert estimate is not None
    mean, bounds = number_parts(estimate, metric)
    unit = "%" if metric.label.endswith("(%)") else ""
    interval = "" if bounds is None else f" (95% interval {bounds[0]} to {bounds[1]})"
    tied = [one for one in compared if one not in best and is_tied(table, one, metric)]
    sentence = f"{measured}: {' and '.join(best)} has the best {metric.name}, {mean}{unit}{interval}"
    if not tied:
        return f"{sentence}."
    others = ", ".join(tied[:_NAMED_TIES]) + (f" and {len(tied) - _NAMED_TIES} more" if len(tied) > _NAMED_TIES else "")
    return f"{sentence}; a paired test does not tell {others} apart from it."


def _leads(table: ResultTable, method: str, metric: Metric) -> bool:
    estimate = table.estimate(method, metric.name)
    return estimate is not None and math.isfinite(estimate.mean) and table.is_best(estimate, metric)


def _run(results: Results, table: ResultTable, pictures: int, styles: MethodStyles, anchor: str) -> _Run:
    leading = table.methods
    dots = _dots(table, styles)
    agreement = agreement_grid(table)
    pictured = [method for method in leading if not is_control(method)][:_PICTURED_METHODS]
    extremes = extremes_of(results, table.metrics, pictured, pictures) if pictures else []
    done = len(results.images)
    charts = [
        _charts("Curves", curves_of(results, leading[:COLOURS]), styles),
        _charts("Metrics over a number in the spelling", sweeps_of(table.estimates, table.metrics), styles),
    ]
    return _Run(
        anchor=anchor,
        title=table.title,
        summary=summary_of(results, table),
        protocol=results.run.protocol,
        noun=results.run.noun,
        unfinished="" if results.finished else f"{done} of {results.image_count} {results.run.noun}",
        facts=_facts(results),
        results=_own_table(table, leading),
        against_best=_best_table(table, leading),
        published=_Published(published_title(table.published), *published_rows(table.published))
        if table.published
        else None,
        charts=[group for group in charts if group is not None],
        dots=dots[:_SHOWN_DOTS],
        more_dots=dots[_SHOWN_DOTS:],
        agreement=None if agreement is None else _Grid(*agreement),
        main="" if table.main is None else table.main.name,
        samples=_samples(results, extremes),
        failures=_failures(results),
        manifests=[
            (store.folder.name, json.dumps(read_manifest(store.folder), indent=2, ensure_ascii=False))
            for store in results.stores
        ],
    )


class MethodStyles(Mapping[str, str]):
    """The CSS classes of methods: a method has the same ones in every table and chart of a report.

    Colours are assigned in the order of the methods, then again with other dashes; what comes after
    that is grey. Controls and ceilings have a style of their own.
    """

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def __getitem__(self, method: str) -> str:
        if is_control(method):
            return "control"
        if method not in self._given:
            dash, colour = divmod(len(self._given), COLOURS)
            self._given[method] = "other" if dash >= DASHES else f"c{colour}" + (f" d{dash}" if dash else "")
        return self._given[method]

    def get(self, method: str, default: Any = None) -> Any:
        """The classes of a method; every method has some."""
        del default
        return self[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def coloured(self, methods: Iterable[str]) -> dict[str, str]:
        """Those of some methods that are not grey, with their classes, for a legend."""
        return {method: self[method] for method in methods if self[method] != "other"}


def _facts(results: Results) -> list[tuple[str, str]]:
    run, manifest = results.run, read_manifest(results.stores[0].folder)
    broken = results.uncounted
    images = f"{len(results.images)} of {results.image_count}" + (f", of which {broken} do not count" if broken else "")
    facts = {
        "measured": manifest.get("title", ""),
        "published in": manifest.get("paper", ""),
        "model": run.model.name,
        "weights": f"sha256 {run.weights[:16]}…",
        "input": _preprocessing(run.preprocessing),
        "data": f"{run.data} ({run.images} {run.noun}, fingerprint {run.data_fingerprint[:16]}…)",
        run.noun: images,
        "methods": str(len(results.methods)),
        "computed with": ", ".join(f"{name} {version}" for name, version in manifest.get("software", {}).items()),
        "command": _command(manifest),
    }
    return [(name, text) for name, text in facts.items() if text]


def _preprocessing(values: Mapping[str, Any]) -> str:
    if "pieces" in values:
        longest = "any number of" if values["pieces"] is None else f"the first {values['pieces']}"
        return f"{longest} word pieces, tokenizer sha256 {values['tokenizer'][:16]}…"
    size = "x".join(map(str, values.get("image_size", ())))
    means, deviations = (", ".join(f"{number:g}" for number in values.get(name, ())) for name in ("mean", "std"))
    return f"{size}, mean {means}, standard deviation {deviations}"


def _command(manifest: Mapping[str, Any]) -> str:
    words = [str(word) for word in manifest.get("command", [])]
    return shlex.join(["vitreous", *words[1:]]) if words[1:2] == ["evaluate"] else shlex.join(words)


def _own_table(table: ResultTable, methods: Sequence[str]) -> _Table:
    headings = [_Heading(table_heading(metric), metric.description) for metric in table.metrics]
    return _Table(headings, _rows(methods, lambda method: [_cell(table, method, metric) for metric in table.metrics]))


def _rows(methods: Sequence[str], cells: Callable[[str], list[_Cell]]) -> list[tuple[str, str, list[_Cell]]]:
    """The lines of a table; controls and ceilings stand apart."""
    apart = [method for method in methods if is_control(method)]

    def look(method: str) -> str:
        return "" if method not in apart else "apart first" if method == apart[0] else "apart"

    return [(row_label(method), look(method), cells(method)) for method in methods]


def _cell(table: ResultTable, method: str, metric: Metric) -> _Cell:
    estimate = table.estimate(method, metric.name)
    if estimate is None or not math.isfinite(estimate.mean):
        return _Cell(text=_MISSING)
    mean, bounds = number_parts(estimate, metric)
    return _Cell(
        mean=mean,
        interval=_interval(bounds),
        about=f"n = {estimate.n}",
        best=table.is_best(estimate, metric),
        tied=is_tied(table, method, metric),
    )


def _best_table(table: ResultTable, methods: Sequence[str]) -> _Table | None:
    """Compare every method with the best one: what the shading is made of."""
    metrics = [metric for metric in table.metrics if table.against_best.get(metric.name)]
    if not metrics:
        return None
    headings = [_Heading(table_heading(metric)) for metric in metrics]
    compared = [method for method in methods if not is_control(method)]
    return _Table(headings, _rows(compared, lambda method: [_difference(table, method, metric) for metric in metrics]))


def _difference(table: ResultTable, method: str, metric: Metric) -> _Cell:
    compared = table.against_best[metric.name].get(method)
    if compared is None:
        return _Cell(text="★" if method in table.ranks.get(metric.name, {}) else _MISSING)
    difference, bounds = difference_parts(compared, metric)
    return _Cell(mean=difference, interval=_interval(bounds), rank=f"p = {compared.p:.2g}")


def _interval(bounds: tuple[str, str] | None) -> str:
    return "" if bounds is None else f"{bounds[0]} to {bounds[1]}"


def _charts(title: str, curves: Sequence[Curves], styles: MethodStyles) -> _ChartGroup | None:
    if not curves:
        return None
    charts = [(curve.title, Markup(curves_chart(curve, styles))) for curve in curves]  # noqa: S704
    names = dict.fromkeys(name for curve in curves for name in curve.lines)
    coloured = styles.coloured(names)
    return _ChartGroup(title, coloured, charts, grey=len(coloured) < len(names))


def _dots(table: ResultTable, styles: Mapping[str, str]) -> list[tuple[str, Markup]]:
    """One labelled chart for every metric that has a better direction."""
    metrics = [metric for metric in table.metrics if metric.direction is not None]
    return [
        (table_heading(metric), Markup(dots_chart(table, metric, styles)))  # noqa: S704  # rendered by our own templates
        for metric in metrics
    ]


def _samples(results: Results, extremes: Sequence[Extremes]) -> _Samples | None:
    shown = [each for each in extremes if each.best]
    if not shown:
        return None
    thumbnails, problem = thumbnails_of(results, shown)
    images = results.run.noun == "images"
    return _Samples(
        about="Maps" if images else "The words around the highest one, with human rationales underlined; scores",
        problem=problem,
        methods=[
            _MethodSamples(
                each.method,
                each.metric.name,
                _tiles(each, each.best, thumbnails),
                _tiles(each, each.worst, thumbnails),
            )
            for each in shown
        ],
    )


def _tiles(each: Extremes, images: Iterable[Extreme], thumbnails: Thumbnails) -> list[_SampleTile]:
    return [
        _SampleTile(
            Markup(thumbnails.get((each.method, image.index), "")),  # noqa: S704  # rendered by our own templates
            image.name,
            f"{each.metric.format(image.value)}{'%' if each.metric.label.endswith('(%)') else ''}",
        )
        for image in images
    ]


def _failures(results: Results) -> _Failures | None:
    failures = results.failures()
    if not failures:
        return None
    rows = [(failure.image, failure.method or "all", failure.error) for failure in failures[:_SHOWN_FAILURES]]
    return _Failures(len(failures), rows, max(0, len(failures) - _SHOWN_FAILURES))


def write_document(
    found: Sequence[Results], form: str, *, pictures: int = 3, published: bool = False, p_values: bool = False
) -> str:
    """Write results as ``html``, ``markdown``, ``latex``, ``csv`` or ``json``.

    Args:
        found: what was measured.
        form: one of these.
        pictures: how many of the best and of the worst images the page shows of a method.
        published: whether numbers that papers print go with them, apart; CSV has own results alone.
        p_values: whether Markdown and LaTeX have the paired tests against the best method; all others always do.
    """
    if form == "html":
        return write_page(found, pictures=pictures, published=published)
    if form == "json":
        return json.dumps([_as_json(results, published=published) for results in found], indent=2) + "\n"
    if form == "csv":
        return as_csv((_about(results), summarise(results)) for results in found)
    tables = [summarise(results, published=published) for results in found]
    if form == "latex":
        return "\n".join(as_latex(table, p_values=p_values) for table in tables)
    parts = [_overall_as_markdown(each) for each in overall_results(zip(found, tables, strict=True))]
    for table in tables:
        parts.append(as_markdown(table, p_values=p_values))
        if agreement := agreement_grid(table):
            parts.append(f"{_AGREEMENT}\n\n{markdown_grid(*agreement)}\n")
    return "\n".join(parts)


def _overall_as_markdown(found: Overall) -> str:
    return f"**{found.title}**\n\n{markdown_grid(*found.grid())}\n\n{EXPLAINED}\n"


def _as_json(results: Results, *, published: bool) -> dict[str, Any]:
    table = summarise(results, published=published)
    return {
        **_about(results),
        "rows": as_rows(table),
        **({"published": published_as_rows(table)} if published else {}),
        "failures": [vars(failure) for failure in results.failures()],
        "runs": [str(store.folder) for store in results.stores],
    }


def _about(results: Results) -> dict[str, Any]:
    run = results.run
    context = {"protocol": run.protocol, "model": run.model.name, "data": run.data}
    return {**context, "images": len(results.images), "wanted": results.image_count}


def as_csv(described: Iterable[tuple[Mapping[str, Any], ResultTable]]) -> str:
    """One table for all; in front of every row what it is of, and how many images are finished of those wanted."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ("protocol", "model", "data", "images", "wanted", *COLUMNS), lineterminator="\n")
    writer.writeheader()
    for about, table in described:
        writer.writerows({**about, **row} for row in as_rows(table))
    return text.getvalue()
