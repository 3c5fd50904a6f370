"""The ``vitreous`` command line. Commands import torch and other heavy packages only when they run."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

from vitreous.cli.app import app
from vitreous.cli.console import ExitCode, print_error

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line. An unexpected error is reported in one line; ``--debug`` shows its traceback."""
    _prepare_streams()
    _handle_termination()
    _hide_foreign_progress()
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        print_error(f"unexpected {type(error).__name__}: {error} (run again with --debug and report the traceback)")
        sys.exit(ExitCode.UNEXPECTED)


def _handle_termination() -> None:
    """Treat SIGTERM and SIGHUP like Ctrl+C, so that temporary files are removed.

    Signals that the parent process chose to ignore, as nohup does, stay ignored.
    """
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def _hide_foreign_progress() -> None:
    """Turn off the progress bars of other libraries, which read this setting when they are imported."""
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")


def _prepare_streams() -> None:
    """Escape characters that a stream cannot encode, and replace closed streams by the null device."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # open until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
