"""The command line, ``vitreous``: one file per command, and nothing heavy imported before a command needs it."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

from vitreous.cli.app import app
from vitreous.cli.console import say_error
from vitreous.cli.guard import INTERRUPTED, UNEXPECTED

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; an error nobody foresaw is one line as well, unless ``--debug`` asks for the traceback."""
    _open_streams()
    _end_tidily()
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        say_error(f"unexpected {type(error).__name__}: {error} (--debug shows where; please report it)")
        sys.exit(UNEXPECTED)


def _end_tidily() -> None:
    """Take the end of a session or a polite kill for an interrupt, so that drafts and uploads are removed.

    What whoever started the program chose to ignore, as nohup does, stays ignored.
    """
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def _open_streams() -> None:
    """Have streams that take every character: letters that are lacking are written out; a closed one leads nowhere."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # open to the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
