"""The page: everything that runs have found, in one HTML file that asks nobody for anything."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitreous import __version__
from vitreous.evaluation.report.curves import Curves, curves_of, sweeps_of
from vitreous.evaluation.report.images import Extreme, Extremes, Thumbnails, extremes_of, thumbnails_of
from vitreous.evaluation.report.results import Failure, Results, summarise
from vitreous.evaluation.report.style import LINES, STYLE
from vitreous.evaluation.report.svg import curves_chart, radar_chart
from vitreous.evaluation.report.tables import (
    ResultTable,
    difference_parts,
    number_parts,
    published_rows,
    published_title,
    table_heading,
)
from vitreous.evaluation.store.store import read_manifest
from vitreous.html.page import document, escape
from vitreous.metrics.metric import Metric

_RADAR_METHODS = 6
_RADAR_METRICS = (3, 12)  # fewer axes are no area, more cannot be read
_PICTURED_METHODS = 12
_SHOWN_FAILURES = 200


def write_page(found: Sequence[Results], *, pictures: int = 3, published: bool = False) -> str:
    """Write the page.

    Args:
        found: results, each of one protocol, model and data set.
        pictures: how many of the best and of the worst images are shown of a method.
        published: whether numbers that papers print for a protocol are shown, apart.
    """
    sections = "".join(_section(results, pictures, published=published) for results in found)
    protocols = ", ".join(dict.fromkeys(results.run.protocol for results in found))
    body = f'<p class="faint">Measured by vitreous {escape(__version__)}.</p>\n{sections}'
    return document(f"{protocols} · Vitreous", body, heading="How good are these explanations?", style=STYLE)


def _section(results: Results, pictures: int, *, published: bool) -> str:
    table = summarise(results, published=published)
    leading = leaders(table)
    styles = {method: f"c{place}" for place, method in enumerate(leading[:LINES])}
    extremes = extremes_of(results, table.metrics, leading[:_PICTURED_METHODS], pictures) if pictures else []
    return "".join(
        (
            f"<h2>{escape(results.run.protocol)}</h2>",
            _facts(results),
            _own_table(table, results.run.things),
            _best_table(table, leading, results.run.things),
            _published_table(table),
            _charts("Curves", curves_of(results), styles),
            _charts("Metrics over a number in the spelling", sweeps_of(table.estimates), None),
            _radar(table, styles),
            _images(results, extremes),
            _failures(results),
            _manifests(results),
        )
    )


def leaders(table: ResultTable) -> list[str]:
    """The methods by the mean of their ranks over all metrics, best first."""
    order = table.methods
    if not table.ranks:
        return order

    def mean_rank(method: str) -> float:
        ranks = [ranks.get(method, len(order)) for ranks in table.ranks.values()]
        return sum(ranks) / len(ranks)

    return sorted(order, key=lambda method: (mean_rank(method), order.index(method)))


def _facts(results: Results) -> str:
    run, manifest = results.run, read_manifest(results.stores[0].folder)
    broken = results.uncounted
    done = len(results.images)
    images = f"{done} of {results.wanted}" + (f", of which {broken} do not count" if broken else "")
    facts = {
        "measured": manifest.get("title", ""),
        "published in": manifest.get("paper", ""),
        "model": run.model.name,
        "weights": f"sha256 {run.weights[:16]}…",
        "input": _preprocessing(run.preprocessing),
        "data": f"{run.data} ({run.images} {run.things}, fingerprint {run.data_fingerprint[:16]}…)",
        run.things: images,
        "methods": str(len(results.methods)),
        "computed with": ", ".join(f"{name} {version}" for name, version in manifest.get("software", {}).items()),
        "command": _command(manifest),
    }
    shown = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items() if text)
    note = ""
    if not results.finished:
        note = f'<p class="note">This run is not finished: {done} of {results.wanted} {run.things}.</p>'
    return f"{note}<dl>{shown}</dl>"


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


def _own_table(table: ResultTable, things: str) -> str:
    heads = "".join(
        f'<th title="{escape(metric.description)}">{escape(table_heading(metric))}</th>' for metric in table.metrics
    )
    rows = "".join(
        f"<tr><td>{escape(method)}</td>{''.join(_cell(table, method, metric) for metric in table.metrics)}</tr>"
        for method in leaders(table)
    )
    return (
        f'<h3>Results</h3><p class="faint">Mean with its 95% bootstrap interval over {things}, if two or more '
        "count. Methods that a paired test does not tell apart share a rank (#); ★ is the best mean of its column. "
        "Ordered by the mean of the ranks.</p>"
        f'<div class="scroll"><table><tr><th>method</th>{heads}</tr>{rows}</table></div>'
    )


def _cell(table: ResultTable, method: str, metric: Metric) -> str:
    estimate = table.estimate(method, metric.name)
    if estimate is None or not math.isfinite(estimate.mean):
        return "<td>–</td>"  # noqa: RUF001
    mean, bounds = number_parts(estimate, metric)
    rank = table.ranks.get(metric.name, {}).get(method)
    shown = "" if rank is None else f' <span class="rank">#{rank}</span>'
    interval = "" if bounds is None else f'<span class="interval">{bounds[0]} to {bounds[1]}</span>'
    best = ' class="best"' if table.is_best(estimate, metric) else ""
    return f'<td{best} title="n = {estimate.n}"><span class="mean">{mean}</span>{shown}{interval}</td>'


def _best_table(table: ResultTable, methods: Sequence[str], things: str) -> str:
    """What the ranks are made of: every method beside the best one."""
    metrics = [metric for metric in table.metrics if table.against_best.get(metric.name)]
    if not metrics:
        return ""
    heads = "".join(f"<th>{escape(table_heading(metric))}</th>" for metric in metrics)
    rows = "".join(
        f"<tr><td>{escape(method)}</td>{''.join(_difference(table, method, metric) for metric in metrics)}</tr>"
        for method in methods
    )
    return (
        '<details><summary>Against the best method</summary><p class="faint">Difference from the method with the best '
        f"mean (★), its 95% interval, and p of a paired bootstrap over {things}, two-sided and not corrected for the "
        "number of tests: below 0.05 the best method is better.</p>"
        f'<div class="scroll"><table><tr><th>method</th>{heads}</tr>{rows}</table></div></details>'
    )


def _difference(table: ResultTable, method: str, metric: Metric) -> str:
    compared = table.against_best[metric.name].get(method)
    if compared is None:
        return "<td>★</td>" if method in table.ranks.get(metric.name, {}) else "<td>–</td>"  # noqa: RUF001
    difference, bounds = difference_parts(compared, metric)
    interval = "" if bounds is None else f'<span class="interval">{bounds[0]} to {bounds[1]}</span>'
    return f'<td><span class="mean">{difference}</span> <span class="rank">p = {compared.p:.2g}</span>{interval}</td>'


def _published_table(table: ResultTable) -> str:
    if not table.published:
        return ""
    headings, rows = published_rows(table.published)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    heads = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    return (
        f"<h3>{escape(published_title(table.published))}</h3>"
        "<p class='faint'>Other models and other data: nothing here was measured by this run.</p>"
        f'<div class="scroll"><table class="published"><tr>{heads}</tr>{lines}</table></div>'
    )


def _charts(title: str, curves: Sequence[Curves], styles: Mapping[str, str] | None) -> str:
    if not curves:
        return ""
    if styles is None:
        names = dict.fromkeys(name for curve in curves for name in curve.lines)
        styles = {name: f"c{place}" for place, name in enumerate(list(names)[:LINES])}
    figures = "".join(
        f"<figure><figcaption>{escape(curve.title)}</figcaption>{curves_chart(curve, styles)}</figure>"
        for curve in curves
    )
    more = "" if all(len(curve.lines) <= LINES for curve in curves) else _grey_note()
    return f'<h3>{escape(title)}</h3>{_legend(styles)}{more}<div class="charts">{figures}</div>'


def _grey_note() -> str:
    return (
        '<p class="faint">The methods with the best mean rank are coloured, all others grey; a line tells its name.</p>'
    )


def _legend(styles: Mapping[str, str]) -> str:
    keys = "".join(
        f'<li><svg viewBox="0 0 26 6"><line class="{style}" x1="0" x2="26" y1="3" y2="3" stroke-width="4"/></svg>'
        f"<code>{escape(name)}</code></li>"
        for name, style in styles.items()
    )
    return f'<ul class="legend">{keys}</ul>'


def radar_of(table: ResultTable, methods: Sequence[str]) -> tuple[list[str], dict[str, list[float]]]:
    """Axes and, for every method, how far out it is on each: from the worst method of all (0) to the best (1)."""
    axes, columns = [], []
    for metric in table.metrics:
        means = {
            one.method: one.mean for one in table.estimates if one.metric == metric.name and math.isfinite(one.mean)
        }
        if metric.direction is None or not means or any(method not in means for method in methods):
            continue
        low, high = min(means.values()), max(means.values())
        shares = {method: (means[method] - low) / ((high - low) or 1.0) for method in methods}
        if metric.direction == "lower":
            shares = {method: 1 - share for method, share in shares.items()}
        axes.append(metric.name)
        columns.append(shares)
    return axes, {method: [shares[method] for shares in columns] for method in methods}


def _radar(table: ResultTable, styles: Mapping[str, str]) -> str:
    methods = list(styles)[:_RADAR_METHODS]
    axes, shapes = radar_of(table, methods)
    if not _RADAR_METRICS[0] <= len(axes) <= _RADAR_METRICS[1] or len(table.methods) < 2:
        return ""
    chosen = {method: styles[method] for method in methods}
    return (
        '<h3>Radar</h3><p class="faint">Every axis runs from the worst method of this table in the centre to the best '
        "at the rim.</p>"
        f'{_legend(chosen)}<div class="charts wide"><figure>{radar_chart(axes, shapes, chosen)}</figure></div>'
    )


def _images(results: Results, extremes: Sequence[Extremes]) -> str:
    shown = [each for each in extremes if each.best]
    if not shown:
        return ""
    thumbnails, problem = thumbnails_of(results, shown)
    note = f'<p class="note">Pictures are missing: {escape(problem)}.</p>' if problem else ""
    figures = "".join(
        f"<figure><figcaption><code>{escape(each.method)}</code></figcaption>"
        f"<h4>best by {escape(each.metric.name)}</h4>{_strip(each, each.best, thumbnails)}"
        f"<h4>worst</h4>{_strip(each, each.worst, thumbnails)}</figure>"
        for each in shown
    )
    things = results.run.things
    about = "Maps" if things == "images" else "The words around the highest one, what people marked underlined; scores"
    return (
        f'<h3>Best and worst {things}</h3><p class="faint">{about} of the predicted class; the number is the metric '
        f'on this one alone.</p>{note}<div class="images {things}">{figures}</div>'
    )


def _strip(each: Extremes, images: Iterable[Extreme], thumbnails: Thumbnails) -> str:
    tiles = []
    for image in images:
        picture = thumbnails.get((each.method, image.index), "")
        tiles.append(f"<div>{picture}{escape(image.name)} · {image.value:.3g}</div>")
    return f'<div class="strip">{"".join(tiles)}</div>'


def _failures(results: Results) -> str:
    failures = results.failures()
    if not failures:
        return ""
    lines = "".join(_failure(failure) for failure in failures[:_SHOWN_FAILURES])
    more = len(failures) - _SHOWN_FAILURES
    rest = f"<p>And {more} more.</p>" if more > 0 else ""
    return (
        f"<h3>Not measured ({len(failures)})</h3><p class='faint'>Of the {results.run.things}, those count "
        "where all methods could be measured.</p>"
        f'<div class="scroll"><table class="published"><tr><th>image</th><th>method</th><th>why</th></tr>{lines}'
        f"</table></div>{rest}"
    )


def _failure(failure: Failure) -> str:
    cells = (failure.image, failure.method or "all", failure.error)
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _manifests(results: Results) -> str:
    parts = []
    for store in results.stores:
        text = json.dumps(read_manifest(store.folder), indent=2, ensure_ascii=False)
        parts.append(
            f"<details><summary>Manifest of {escape(store.folder.name)}</summary><pre>{escape(text)}</pre></details>"
        )
    return "".join(parts)
