"""Terminal output: results go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from contextlib import contextmanager, redirect_stdout
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.text import Text

from vitreous._utils.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """Print a line literally: without markup, and not wrapped at the width of the terminal."""
    console.print(Text(one_line(text), style=style), soft_wrap=True)


def print_error(text: str, console: Console | None = None) -> None:
    """Print an error on standard error."""
    print_line(console or stderr_console(), f"error: {text}", "bold red")


def print_warning(text: str, console: Console | None = None) -> None:
    """Print a warning on standard error."""
    print_line(console or stderr_console(), f"warning: {text}", "yellow")


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
