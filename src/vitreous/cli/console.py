"""What reaches the terminal: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.text import Text

from vitreous.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

_STDOUT, _STDERR = 1, 2  # file descriptors
_JOINERS = "\u200c\u200d"  # zero width non-joiner and joiner, without which Persian and many emoji are written wrongly


class _Console(Console):
    """A console that lets a closed pipe end the program in one place, see ``guard``."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def results() -> Console:
    """Give the console for results. It respects ``NO_COLOR`` and is plain text when it is not a terminal."""
    return _Console(highlight=False)


def messages() -> Console:
    """Give the console for progress and errors."""
    return _Console(stderr=True, highlight=False)


def one_line(text: str) -> str:
    """Give a text that stays on its line: no line breaks, no control characters, nothing that cannot be encoded.

    White space of any kind is a blank, and what joins letters or emoji stays; what turns the direction of writing is
    written out, for it could make a line read as another.
    """
    flat = " ".join(text.splitlines())
    return printable("".join(map(_visible, flat)))


def _visible(character: str) -> str:
    if character.isspace():
        return " "
    return character if character.isprintable() or character in _JOINERS else ascii(character)[1:-1]


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line as it is: no markup in it is interpreted and it is not broken at the terminal's width."""
    console.print(Text(one_line(text), style=style), soft_wrap=True)


def say_error(text: str, console: Console | None = None) -> None:
    """Print one red line on standard error."""
    say(console or messages(), f"error: {text}", "bold red")


def say_warning(text: str, console: Console | None = None) -> None:
    """Print one yellow line on standard error."""
    say(console or messages(), f"warning: {text}", "yellow")


@contextmanager
def plain_warnings(console: Console) -> Iterator[None]:
    """Print warnings as lines, each once and without a place in the program: that is not for who reads our output."""

    def show(message: Warning | str, category: type[Warning], *_place: Any, **_more: Any) -> None:
        if issubclass(category, UserWarning):
            say_warning(str(message), console)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what others print on standard output to standard error: standard output is for results.

    The file descriptor itself is redirected, so this holds for other threads, for libraries in C++ and for processes
    that are started meanwhile.
    """
    sys.stdout.flush()
    try:
        before = os.dup(_STDOUT)
    except OSError:  # it is closed, so that nothing can come there
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
    """Print JSON and nothing else on standard output; a number that is none, which JSON cannot say, is null."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
