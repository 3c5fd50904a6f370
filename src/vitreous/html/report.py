"""The report of an explanation, and its views in notebooks: predictions, maps, curves, what the methods mean.

A report is written image by image, so that a folder of thousands needs no more memory than one image.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from PIL import Image

from vitreous._utils.storage import PNG_LEVEL, StorageError, atomic_file
from vitreous.errors import InputError, UnsupportedModelError, VitreousError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.trust import Trust, figures_of
from vitreous.explanation.views import register_view
from vitreous.html import page
from vitreous.html.page import Chart, Line, layout_chart, line_attributes, percent_axis, render
from vitreous.methods.spelling import AGGREGATIONS, parse
from vitreous.models import LoadedModel
from vitreous.models.pixels import Images
from vitreous.pictures.base_image import BaseImage, comparison
from vitreous.pictures.canvas import class_caption
from vitreous.pictures.curves import NO_CURVES, Curves, area, perturbation_curves

TITLE = "Why did the model say this?"
STYLE = "report.css"

_PICTURE = 560  # pixels of the longer side: sharp in a card, and a page of a hundred photos can still be sent
_TOP = 5


class ReportError(VitreousError):
    """A photo cannot be shown in a report."""


class _NoPhoto(Exception):  # noqa: N818  # not an error: it discards the draft
    """There is nothing to report on."""


@dataclass(frozen=True)
class Measured:
    """The curves of the maps for one class, and whether they go by patches or pixels."""

    curves: tuple[Curves, ...]
    by: str


@dataclass(frozen=True)
class _Map:
    method: str
    alt: str
    image: Image.Image | None = None
    error: str = ""


@dataclass(frozen=True)
class _Entry:
    method: str
    attributes: Mapping[str, str]
    area: float


@dataclass(frozen=True)
class _CurveChart:
    kind: str
    better: str
    chart: Chart
    entries: list[_Entry]


@dataclass(frozen=True)
class _Target:
    caption: str
    maps: list[_Map]
    charts: list[_CurveChart]


class ReportFile:
    """A report that is being written; see ``report_file``.

    Attributes:
        photos: Number of photos added so far.
    """

    def __init__(self, stream: IO[str], sections: IO[str], command: str, methods: Sequence[str]) -> None:
        self._stream, self._command, self._methods = stream, command, methods
        self._sections = sections  # separate, because the summary above them is written last
        self._contents: list[tuple[str, str, str]] = []
        self._provenance: Mapping[str, Any] = {}
        self._curves = True
        self.photos = 0

    def add(
        self,
        name: str,
        photo: Image.Image,
        explanation: Explanation,
        model: LoadedModel,
        trust: Trust | None = None,
    ) -> None:
        """Write the section of one photo, with its trust where that was measured; its curves are measured now.

        Raises:
            ReportError: It cannot be shown; nothing is written about it, and others can be added.
        """
        self.photos += 1
        self._curves = has_curves(explanation)
        self._provenance, self._methods = explanation.provenance, explanation.methods
        try:
            targets = range(explanation.classes_per_image if self._curves else 0)
            measured = [measure(model, photo, explanation, target) for target in targets]
            section = photo_section(name, photo, explanation, measured, trust, anchor=f"image-{self.photos}")
        except Exception as error:  # any failure: the results of the other images must not be lost
            reason = str(error) if isinstance(error, VitreousError) else f"unexpected {type(error).__name__}: {error}"
            raise ReportError(f"{name} is not in the report: {reason}") from error
        self._contents.append((f"image-{self.photos}", name, prediction_of(explanation)))
        self._sections.write(section)

    def finish(self, failures: Mapping[str, str]) -> None:
        """Write the report: summary, contents, images, and notes on all of them."""
        self._stream.write(page.opening(TITLE, style=STYLE))
        self._stream.write(contents_section(self._contents, self._methods, self._provenance))
        self._sections.seek(0)
        shutil.copyfileobj(self._sections, self._stream)
        self._stream.write(failures_section(failures))
        self._stream.write(methods_section(self._methods, curves=self._curves))
        self._stream.write(provenance_section(self._provenance, self._command))
        self._stream.write(page.closing())


@contextmanager
def report_file(path: Path, command: str, methods: Sequence[str]) -> Iterator[ReportFile]:
    """Open a report; it appears at ``path`` if the block ends without an exception and added a photo."""
    _check_no_folder(path)
    with (
        suppress(_NoPhoto),
        atomic_file(path) as draft,
        draft.open("w", encoding="utf-8") as stream,
        TemporaryFile("w+", encoding="utf-8") as sections,
    ):
        report = ReportFile(stream, sections, command, methods)
        yield report
        if not report.photos:
            raise _NoPhoto  # keeps an earlier report


@register_view(Explanation, "report")
def write_report(explanation: Explanation, path: Path, trusts: Sequence[Trust] = ()) -> Path:
    """Write a report on one explanation, without curves, which need the model; complete or not at all.

    Args:
        explanation: Of one or more images.
        path: The file.
        trusts: How reliable the maps of each image are, if that was measured.

    Raises:
        StorageError: The file cannot be written.
        InputError: The explanation holds no pictures.
    """
    _check_no_folder(path)
    alone = [explanation.select(index) for index in range(len(explanation))]
    listed = [(f"image-{index}", f"image {index}", prediction_of(one)) for index, one in enumerate(alone)]
    body = contents_section(listed, explanation.methods, explanation.provenance)
    measured: Sequence[Trust | None] = trusts or [None] * len(alone)
    body += "".join(
        photo_section(name, None, one, (), trust, anchor=anchor)
        for one, (anchor, name, _), trust in zip(alone, listed, measured, strict=True)
    )
    body += methods_section(explanation.methods, curves=False)
    body += provenance_section(explanation.provenance, "vitreous.explain, in Python")
    with atomic_file(path) as draft:
        draft.write_text(page.document(TITLE, body, style=STYLE), encoding="utf-8")
    return path


def measure(model: LoadedModel, photo: Images, explanation: Explanation, target: int) -> Measured:
    """Measure the curves of one photo: by patches, or by pixels for models that need all patches."""
    try:
        curves = perturbation_curves(model, photo, explanation, target_index=target)
    except UnsupportedModelError:
        curves = perturbation_curves(model, photo, explanation, target_index=target, by="pixels")
        return Measured(curves, "pixels")
    return Measured(curves, "patches")


_OF_CLASSES = "there are no curves: they follow the probability of a class, and another target is explained"


def has_curves(explanation: Explanation) -> bool:
    """Return whether perturbation curves can be measured: they follow the probability of a class."""
    return explanation.scale != "value" and not explanation.targets


def photo_section(
    name: str,
    photo: Image.Image | None,
    explanation: Explanation,
    measured: Sequence[Measured],
    trust: Trust | None = None,
    *,
    anchor: str = "",
) -> str:
    """Render the section of one photo.

    Args:
        name: Name of the photo.
        photo: The photo before preprocessing; by default the explanation's own image.
        explanation: The explanation of this photo alone.
        measured: The curves for each explained class, in their order; empty if there are none.
        trust: How reliable the maps are, where that was measured.
        anchor: What the contents refer to.
    """
    base = BaseImage.of(explanation, 0, photo).fitted(_PICTURE, _PICTURE)
    prefix = "" if explanation.class_names else "class "
    predictions = [
        (prefix + one.label.replace("_", " "), one.probability or 0.0, explanation.format_output(one.class_index))
        for one in explanation.top(_TOP)
    ]
    targets = [
        _Target(
            class_caption(explanation, 0, target),
            [_map(base, explanation, method, target) for method in explanation.methods],
            _curve_charts(measured[target]) if measured else [],
        )
        for target in range(explanation.classes_per_image)
    ]
    return page.render(
        "photo.html",
        anchor=anchor,
        name=name,
        base=base,
        predictions=page.clipped(predictions),
        targets=targets,
        no_curves="" if has_curves(explanation) else _no_curves(_OF_CLASSES if explanation.targets else NO_CURVES),
        trust=None if trust is None else _trust_card(trust),
    )


def _trust_card(found: Trust) -> dict[str, Any]:
    """What the section of a photo shows of its trust."""
    maps = sorted(found.maps.items(), key=lambda one: -one[1].gap)
    return {
        "verdict": found.verdict,
        "sentence": found.sentence.removeprefix(f"Trust: {found.verdict}. "),  # which is the heading
        "method": found.method,
        "figures": figures_of(found),
        "maps": [(name, f"{100 * one.gap:.1f} points", f"{one.beats} of {one.orders}") for name, one in maps],
    }


def prediction_of(explanation: Explanation) -> str:
    """Name the most likely class of one photo with its probability, or the first explained target with its value."""
    if not explanation.logits.shape[1]:
        return class_caption(explanation)
    (first,) = explanation.top(1)
    name = first.label.split(",")[0].replace("_", " ") if explanation.class_names else f"class {first.class_index}"
    return f"{name}, {explanation.format_output(first.class_index)}"


def contents_section(
    photos: Sequence[tuple[str, str, str]], methods: Sequence[str], provenance: Mapping[str, Any], noun: str = "image"
) -> str:
    """Render the summary, and a list of the images or texts if there are several.

    Args:
        photos: Of every image or text the anchor, the name and the prediction.
        methods: The methods.
        provenance: Of the last explanation.
        noun: What was explained.
    """
    count = f"{len(photos)} {noun}{'s' if len(photos) != 1 else ''}"
    model = provenance.get("model")
    summary = f"{count} explained by {_listed(methods)}" + (f", model {model}." if model else ".")
    if len(photos) == 1:
        summary += f" Prediction: {photos[0][2]}."
    return page.render("contents.html", summary=summary, photos=photos if len(photos) > 1 else [])


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def methods_section(methods: Sequence[str], *, curves: bool = True) -> str:
    """Render what each method means, and what curves mean if there are any."""
    return page.render(
        "methods.html", methods=[(method, meaning(method)) for method in methods], signs=_signs(methods), curves=curves
    )


def provenance_section(provenance: Mapping[str, Any], command: str) -> str:
    """Render how the report was made."""
    versions = provenance.get("versions", {})
    rows = [
        ("model", str(provenance.get("model"))),
        ("kind", f"{provenance.get('family')}, {provenance.get('model_class')}"),
        ("fingerprint", f"sha256 {provenance.get('fingerprint')}"),
        ("made", str(provenance.get("created"))),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    return page.render("provenance.html", command=command, rows=rows)


def failures_section(failures: Mapping[str, str]) -> str:
    """Render which photos could not be explained, and why."""
    return page.render("failures.html", errors=list(failures.values())) if failures else ""


def curve_cards(measured: Measured) -> str:
    """Render the charts of deletion and insertion with the areas under the curves."""
    return page.macro("macros.html", "curve_cards", _curve_charts(measured))


def no_curves() -> str:
    """Render why a model whose outputs are values has no curves."""
    return f'<p class="faint">{page.escape(_no_curves())}</p>\n'


def legend(methods: Sequence[str]) -> str:
    """Render what the colours of the methods' maps mean."""
    return page.macro("macros.html", "legend", _signs(methods))


def meaning(spelling: str) -> str:
    """Describe a spelling: the method's summary, its aggregations, and its paper."""
    recipe = parse(spelling)
    sentences = [recipe.info.summary.replace("``", "")]
    named = spelling.partition(":")[0].split(".")[1:]
    sentences += [(AGGREGATIONS[name].__doc__ or "").strip().splitlines()[0] for name in named if name in AGGREGATIONS]
    if recipe.propagate:
        sentences.append("Propagated by the average attention of the lower blocks.")
    return f"{' '.join(sentences)} ({recipe.info.paper}, {recipe.info.year})"


def _check_no_folder(path: Path) -> None:
    """Refuse a folder before the work is done, not when the draft is moved there."""
    if path.is_dir():
        raise StorageError(f"{path} cannot be written: it is a folder")


def _map(base: BaseImage, explanation: Explanation, method: str, target: int) -> _Map:
    scores, signed = explanation.scores_of(method, 0, target), explanation.signed[method]
    alt = f"map of {method} for {explanation.label(0, target)}"
    try:
        return _Map(method, alt, base.lay(scores, explanation.grid_of(method), signed=signed))
    except InputError as error:
        return _Map(method, alt, error=str(error))


def _curve_charts(measured: Measured) -> list[_CurveChart]:
    return [
        _curve_chart(measured, "deletion", "deleted", "low"),
        _curve_chart(measured, "insertion", "inserted", "high"),
    ]


def _curve_chart(measured: Measured, kind: str, done: str, better: str) -> _CurveChart:
    values = [one.deletion if kind == "deletion" else one.insertion for one in measured.curves]
    pairs = list(enumerate(zip(measured.curves, values, strict=True)))
    lines = [
        Line(one.method, (100 * one.fractions).tolist(), (100 * line).tolist(), line_attributes(number))
        for number, (one, line) in pairs
    ]
    chart = layout_chart(
        lines,
        title=f"{kind} curves",
        across=percent_axis(f"{measured.by} {done} (%)"),
        up=percent_axis("probability of the class (%)"),
    )
    entries = [
        _Entry(one.method, line_attributes(number), 100 * area(one.fractions, line)) for number, (one, line) in pairs
    ]
    return _CurveChart(kind, better, chart, entries)


def _signs(methods: Sequence[str]) -> list[bool]:
    return sorted({parse(method).signed for method in methods})


def _no_curves(reason: str = NO_CURVES) -> str:
    return f"{reason[:1].upper()}{reason[1:]}."


_MOST = 4  # images in an output cell
_TILE = 150
_TOP_IN_NOTEBOOKS = 3


@dataclass(frozen=True)
class _Shown:
    """One image: its comparison if it has a picture, and rows of class, output and whether it is explained."""

    drawn: Image.Image | None
    alt: str
    rows: list[tuple[str, str, bool]]


@register_view(Explanation, "notebook:html")
def as_html(explanation: Explanation) -> str:
    """Show the first few images, each with its comparison if it has a picture, and its predictions."""
    shown = [_shown(explanation, index) for index in range(min(len(explanation), _MOST))]
    return render(
        "notebook.html",
        images=shown,
        more=len(explanation) - len(shown),
        quantity=explanation.quantity,
        text=repr(explanation),
    )


@register_view(Explanation, "notebook:png")
def as_png(explanation: Explanation) -> bytes | None:
    """Draw the comparison of the first image, or nothing without a picture to draw on."""
    drawn = _comparison(explanation, 0)
    if drawn is None:
        return None
    stream = io.BytesIO()
    drawn.save(stream, format="PNG", compress_level=PNG_LEVEL)
    return stream.getvalue()


def _shown(explanation: Explanation, index: int) -> _Shown:
    explained = {explanation.class_index(index, number) for number in range(explanation.classes_per_image)}
    rows = [
        (label.replace("_", " "), explanation.format_output(number, index), number in explained)
        for number, label, _ in explanation.top(_TOP_IN_NOTEBOOKS, index=index)
    ]
    return _Shown(_comparison(explanation, index), f"maps of image {index}", rows)


def _comparison(explanation: Explanation, index: int) -> Image.Image | None:
    return None if explanation.images is None else comparison(explanation, index, tile=_TILE)
