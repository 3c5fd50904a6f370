"""The command line, ``vitreous``: one file per command, and nothing heavy imported before a command needs it."""

from __future__ import annotations

import sys

from vitreous.cli.app import app
from vitreous.cli.console import say_error
from vitreous.cli.guard import INTERRUPTED, UNEXPECTED

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; an error nobody foresaw is one line as well, unless ``--debug`` asks for the traceback."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        say_error(f"unexpected {type(error).__name__}: {error} (--debug shows where; please report it)")
        sys.exit(UNEXPECTED)
