"""What ``vitreous explain`` tells about the photos that are done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vitreous.cli.classes import class_as_json
from vitreous.cli.console import one_line, say
from vitreous.cli.explaining import COMPARISON
from vitreous.defaults import DEFAULT_METHODS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from vitreous.cli.explaining import Explained, Outcome, Request
    from vitreous.explanation import Explanation, Prediction

_TOP = 5
_DETAILED = 3


def show(outcome: Outcome, request: Request, console: Console) -> None:
    """Print the predictions and where the pictures are: in full for a few photos, a line each for many."""
    if len(outcome.explained) > _DETAILED:
        _show_summary(outcome.explained, console)
    else:
        for explained in outcome.explained:
            _show_photo(explained, console)
    if outcome.explained and request.report is not None:
        say(console, f"report:    {request.report}")


def as_json(outcome: Outcome, request: Request) -> dict[str, Any]:
    """Give the outcome as JSON values."""
    return {
        "model": request.model,
        "methods": list(_methods(outcome, request)),
        "left_out": dict(outcome.explained[0].explanation.left_out) if outcome.explained else {},
        "report": None if request.report is None or not outcome.explained else str(request.report),
        "photos": [_photo_as_json(explained) for explained in outcome.explained],
        "failures": [{"photo": photo, "error": error} for photo, error in outcome.failures.items()],
    }


def _methods(outcome: Outcome, request: Request) -> Sequence[str]:
    """Give what was asked for, or where nothing was what was used."""
    used = [one.explanation.methods for one in outcome.explained]
    return request.methods or (used[0] if used else DEFAULT_METHODS)


def _show_photo(explained: Explained, console: Console) -> None:
    explanation = explained.explanation
    table = Table(title=Text(one_line(explained.photo.name)), title_justify="left", title_style="bold", box=None)
    table.add_column("class")
    table.add_column(explanation.quantity, justify="right")
    table.add_column()
    for prediction in explanation.top(_TOP):
        table.add_row(
            _name(explanation, prediction), explanation.format_output(prediction.class_index), _bar(prediction)
        )
    console.print(table)
    say(console, f"explained: {'; '.join(_targets(explanation))}")
    say(console, f"pictures:  {explained.folder / COMPARISON}")
    console.print()


def _show_summary(explained: Sequence[Explained], console: Console) -> None:
    table = Table(box=None)
    for heading in ("photo", "class"):
        table.add_column(heading, overflow="fold")
    table.add_column(explained[0].explanation.quantity, justify="right")
    table.add_column()
    for one in explained:
        first = one.explanation.top(1)[0]
        photo = Text(one_line(one.photo.name))
        table.add_row(
            photo, _name(one.explanation, first), one.explanation.format_output(first.class_index), _bar(first, 10)
        )
    console.print(table)
    say(console, f"pictures: {explained[0].folder.parent / 'PHOTO' / COMPARISON}, one folder for each photo")


def _bar(prediction: Prediction, width: int = 24) -> ProgressBar:
    return ProgressBar(total=1, completed=prediction.probability or 0.0, width=width)


def _name(explanation: Explanation, prediction: Prediction) -> Text:
    return Text(one_line(prediction.label if explanation.class_names else f"class {prediction.label}"))


def _targets(explanation: Explanation) -> list[str]:
    numbers = range(explanation.classes_per_image)
    prefix = "" if explanation.class_names else "class "
    return [f"{prefix}{explanation.label(0, number)}" for number in numbers]


def _photo_as_json(explained: Explained) -> dict[str, Any]:
    explanation = explained.explanation
    targets = [explanation.class_index(0, number) for number in range(explanation.classes_per_image)]
    return {
        "photo": str(explained.photo),
        "folder": str(explained.folder),
        "comparison": str(explained.folder / COMPARISON),
        "predictions": [class_as_json(explanation, found.class_index) for found in explanation.top(_TOP)],
        "targets": [class_as_json(explanation, target) for target in targets],
    }
