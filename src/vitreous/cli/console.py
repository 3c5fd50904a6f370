"""What commands share: options with their help texts and checks, and terminal output.

Results go to standard output, messages and progress to standard error. Progress is a bar or a status line on a
terminal, and plain lines at intervals elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import contextmanager, redirect_stdout
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.color import Color
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.style import Style
from rich.text import Text

from vitreous._utils.defaults import (
    OUTPUTS_DEFAULT,
    OUTPUTS_HELP,
    PAPERS,
    PLUGIN_HELP,
    RUNNER_UP_HELP,
    OutputActivation,
)
from vitreous._utils.messages import printable
from vitreous._utils.storage import expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from PIL import Image


DEBUG = "vitreous.debug"  # key in the metadata that a command and its group share

METHOD_HELP = "A method, see `vitreous methods`. Repeat the option or separate methods by commas."
METHODS_HELP = (
    "Methods separated by commas, a family of methods, or a group: white-box (all but the perturbation family, which "
    "runs the model on masked images), one-run (white-box methods without a second forward pass), all."
)


def _set_debug(ctx: typer.Context, value: bool) -> bool:  # noqa: FBT001  # typer's signature
    if value:
        ctx.meta[DEBUG] = True  # so that --debug works before and after the name of a command
    return value


DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_set_debug, is_eager=True)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
PluginOption = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE", help=PLUGIN_HELP),
]
MethodOption = Annotated[
    list[str] | None,
    typer.Option("--method", "--methods", help=METHOD_HELP, show_default=RUNNER_UP_HELP),
]
TextMethodOption = Annotated[
    list[str] | None,
    typer.Option("--method", "--methods", help=METHOD_HELP, show_default=", ".join(PAPERS)),
]
TargetOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CLASS",
        help="The class to explain, by index or name; or a contrast, 'tabby vs tiger cat', 'tabby vs next', 'predicted "
        "vs next'. Repeat the option for several.",
        show_default="predicted class",
    ),
]
TextTargetOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CLASS",
        help="The class to explain, by index or name; or a contrast, 'positive vs negative', 'predicted vs next'. "
        "Repeat the option for several.",
        show_default="predicted class",
    ),
]
PromptOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A text to compare the images with, for models of images and texts (demo-clip, CLIP, SigLIP). Repeat the "
        "option for several.",
        metavar="TEXT",
        show_default=False,
    ),
]
OutputsOption = Annotated[
    OutputActivation | None,
    typer.Option(help=OUTPUTS_HELP, show_default=OUTPUTS_DEFAULT),
]
MeanOption = Annotated[
    str | None, typer.Option(help="Mean of the channels, one number or three: 0.5 or 0.48,0.46,0.41.")
]
StdOption = Annotated[str | None, typer.Option(help="Standard deviation of the channels, one number or three.")]
ImageSizeOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Size of the model's input, 224 or HEIGHTxWIDTH.")
]
InputSizeOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Size of the model's input, 224 or HEIGHTxWIDTH; DEPTHxHEIGHTxWIDTH of a model of volumes.",
    ),
]
StageOption = Annotated[
    int | None,
    typer.Option(
        help="Stage of a hierarchical model (Swin, PVT, ...) to read: 0 is the first, -1 the last.",
        show_default="last",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Device of the model: cpu, cuda, cuda:1, mps.")]


def parse_channels(text: str | None, option: str) -> tuple[float, ...] | None:
    """Parse one number or three, separated by commas."""
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) not in {1, 3} or not all(map(math.isfinite, values)):
        raise typer.BadParameter(f"{text!r} is not one number or three separated by commas", param_hint=option)
    return values


def parse_image_size(text: str | None, option: str = "--image-size") -> tuple[int, int] | None:
    """Parse one number, or height and width as in ``224x192``."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,8})(?:[x,]([1-9]\d{0,8}))?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 224 or 224x192", param_hint=option)
    return int(match[1]), int(match[2] or match[1])


def parse_input_size(text: str | None, option: str = "--image-size") -> tuple[int, ...] | None:
    """Parse an image size, or depth, height and width as in ``16x112x112``."""
    match = None if text is None else re.fullmatch(r"([1-9]\d{0,8})[x,]([1-9]\d{0,8})[x,]([1-9]\d{0,8})", text.strip())
    return parse_image_size(text, option) if match is None else tuple(int(length) for length in match.groups())


def parse_window(text: str | None, option: str = "--window") -> tuple[float, float] | Literal["range"] | None:
    """Parse ``range``, or centre and width as in ``40,400``."""
    if text is None or text.strip() == "range":
        return None if text is None else "range"
    try:
        centre, width = (float(part) for part in text.split(","))
    except ValueError:
        centre, width = math.nan, math.nan
    if not (math.isfinite(centre) and math.isfinite(width) and width > 0):
        raise typer.BadParameter(f"{text!r} is neither range nor CENTRE,WIDTH with a width above 0", param_hint=option)
    return centre, width


def parse_html_path(path: Path | None, option: str) -> Path | None:
    """Expand ``~`` and require the suffix .html, so that an image given by mistake is not overwritten."""
    if path is None:
        return None
    if path.suffix.lower() not in {".html", ".htm"}:
        raise typer.BadParameter(f"the report must be an .html file, not {path.name}", param_hint=option)
    return expanded(path)


def check_prompts(prompts: Sequence[str] | None, target: Sequence[str] | None, topk: int | None) -> None:
    """Refuse ``--prompt`` together with other targets or ``--topk``, and empty prompts."""
    if prompts and (target or topk):
        raise typer.BadParameter(
            f"it cannot be combined with --{'target' if target else 'topk'}", param_hint="--prompt"
        )
    if not all(prompt.strip() for prompt in prompts or ()):
        raise typer.BadParameter("the prompt is empty: say in a few words what to look for", param_hint="--prompt")


def check_target_or_topk(target: Sequence[str] | None, topk: int | None) -> None:
    """Refuse ``--target`` together with ``--topk``."""
    if target and topk:
        raise typer.BadParameter("it cannot be combined with --topk", param_hint="--target")


_STDOUT, _STDERR = 1, 2  # file descriptors
_JOINERS = "\u200c\u200d"  # zero-width (non-)joiner, part of Persian words and of many emoji


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    SOME_FAILED = 1  # some inputs failed and the others are done
    FAILED = 2
    UNEXPECTED = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class _Console(Console):
    """A console that raises on a closed pipe; the application handles it."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def stdout_console() -> Console:
    """Return the console for results. It respects ``NO_COLOR`` and prints plain text outside of a terminal."""
    return _Console(highlight=False)


def stderr_console() -> Console:
    """Return the console for progress, warnings and errors."""
    return _Console(stderr=True, highlight=False)


def one_line(text: str) -> str:
    """Make a text printable on one line.

    Line breaks and other white space become blanks. Control characters, characters that change the writing direction
    and characters that cannot be encoded are escaped.
    """
    flat = " ".join(text.splitlines())
    return printable("".join(map(_visible, flat)))


def _visible(character: str) -> str:
    if character.isspace():
        return " "
    return character if character.isprintable() or character in _JOINERS else ascii(character)[1:-1]


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print a line literally, without markup. A terminal gets it wrapped at words; a path stays in one piece."""
    line = one_line(text)
    width = max(1, console.width)
    wrapped = textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) if console.is_terminal else []
    for part in wrapped or [line]:
        console.print(Text(part, style=style), soft_wrap=True)


def print_error(text: str, console: Console | None = None) -> None:
    """Print an error on standard error."""
    print_line(console or stderr_console(), f"error: {text}", "bold red")


def print_usage_error(text: str, usage: str) -> None:
    """Print an error in how a command was called, and how it is called."""
    console = stderr_console()
    print_error(text, console)
    print_line(console, usage, "dim")


def print_warning(text: str, console: Console | None = None) -> None:
    """Print a warning on standard error."""
    print_line(console or stderr_console(), f"warning: {text}", "yellow")


def shows_pictures(console: Console) -> bool:
    """Return whether a console is a terminal with enough colours for pictures."""
    return console.is_terminal and not console.no_color and console.color_system in {"truecolor", "256"}


def print_pictures(console: Console, pictures: Sequence[tuple[str, Image.Image]], columns: int = 36) -> None:
    """Print pictures side by side with captions, as upper half blocks: two pixels above each other in a character."""
    columns = max(1, min(columns, (console.width + 1) // len(pictures) - 1))
    small = [picture.convert("RGB").resize((columns, _height(columns, picture))) for _, picture in pictures]
    captions = [_cut(one_line(caption), columns) for caption, _ in pictures]
    lines = [Text(" ".join(f"{caption:<{columns}}" for caption in captions).rstrip())]
    for row in range(0, max(picture.height for picture in small), 2):
        line = Text()
        for picture in small:
            line.append(" " if line else "")
            if row >= picture.height:
                line.append(" " * columns)
                continue
            for column in range(columns):
                above, below = picture.getpixel((column, row)), picture.getpixel((column, row + 1))
                line.append("▀", style=Style(color=_colour(above), bgcolor=_colour(below)))
        lines.append(line)
    for line in lines:
        console.print(line, no_wrap=True, crop=False)


def _height(columns: int, picture: Image.Image) -> int:
    """Return the height of a picture of this many columns, an even number of pixels."""
    return max(2, 2 * round(columns * picture.height / picture.width / 2))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def _colour(pixel: Any) -> Color:
    return Color.from_rgb(*pixel)


@contextmanager
def plain_warnings(console: Console) -> Iterator[None]:
    """Print each ``UserWarning`` once, without its source location, and hide other categories."""

    def show(message: Warning | str, category: type[Warning], *_location: Any, **_more: Any) -> None:
        if issubclass(category, UserWarning):
            print_warning(str(message), console)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error while other libraries print.

    The file descriptor itself is redirected, which also covers threads, C++ libraries and child processes.
    """
    sys.stdout.flush()
    try:
        before = os.dup(_STDOUT)
    except OSError:  # standard output is closed: nothing to redirect
        yield
        return
    try:
        os.dup2(_STDERR, _STDOUT)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(before, _STDOUT)
        os.close(before)


def print_json(value: Any) -> None:
    """Print JSON on standard output. NaN and infinity, which JSON lacks, become null."""
    sys.stdout.write(json.dumps(json_values(value), indent=2, allow_nan=False) + "\n")


def json_values(value: Any) -> Any:
    """Return a value as JSON values: tuples become lists, NaN and infinity become ``None``."""
    if isinstance(value, dict):
        return {name: json_values(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_UNTIL_REPEATED = 30.0  # of the same step


@contextmanager
def steps(console: Console, first: str = "") -> Iterator[Callable[[str], None]]:
    """Show the current step; the function yielded sets the next one.

    Without a terminal, a line is printed at most every few seconds and only when the step has changed, or when it has
    lasted long. A short command prints nothing.
    """
    if console.is_terminal:
        with console.status(escape(one_line(first))) as status:
            yield lambda text: status.update(escape(one_line(text)))
        return
    lines = _StepLines(console, first)
    lines.start()
    try:
        yield lines.set_step
    finally:
        lines.stop()


class _StepLines(threading.Thread):
    """A thread that prints the current step at intervals."""

    def __init__(self, console: Console, first: str) -> None:
        super().__init__(name="vitreous-progress", daemon=True)
        self._console, self._text = console, first
        self._step_started = time.monotonic()
        self._stopped = threading.Event()

    def set_step(self, text: str) -> None:
        """Start another step."""
        self._step_started, self._text = time.monotonic(), text

    def stop(self) -> None:
        """Stop printing; a line in progress is finished first."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Print until stopped."""
        shown, when = "", 0.0
        while not self._stopped.wait(_SECONDS_BETWEEN_LINES):
            text, now = self._text, time.monotonic()
            if not text or (text == shown and now - when < _SECONDS_UNTIL_REPEATED):
                continue
            since = f" (for {now - self._step_started:.0f} s)" if text == shown else ""
            print_line(self._console, f"{text}{since}")
            shown, when = text, now


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many images are explained; the function yielded adds to the count. A single image gets no bar."""
    if not console.is_terminal:
        with _counted_steps(console, total) as advance:
            yield advance
        return
    columns = (TextColumn("Explaining"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=total < 2) as progress:
        task = progress.add_task("images", total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _counted_steps(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    done = 0
    with steps(console, f"explaining, 0 of {total} done") as step:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            step(f"explaining, {done} of {total} done")

        yield advance
