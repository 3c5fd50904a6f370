"""How the command line ends: every foreseen error is one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from vitreous.cli.console import say_error
from vitreous.errors import VitreousError

if TYPE_CHECKING:
    from collections.abc import Iterator

PHOTOS_FAILED = 1
WRONG_USE = 2
UNEXPECTED = 70
INTERRUPTED = 130
PIPE_CLOSED = 141

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_DEBUG = "vitreous.debug"


def _remember_debug(ctx: typer.Context, value: bool) -> bool:  # noqa: FBT001  # typer's signature
    if value:
        ctx.meta[_DEBUG] = True  # shared by a command and its group, so it can be given before or after its name
    return value


DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_remember_debug, is_eager=True)
]


class GuardedGroup(TyperGroup):
    """A group of commands whose errors are reported here."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command and turn what it raises into a line and an exit code."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # so that a closed pipe is noticed here and not while the interpreter shuts down
        except VitreousError as error:
            if ctx.meta.get(_DEBUG):
                traceback.print_exc()
            say_error(str(error))
            raise typer.Exit(WRONG_USE) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(INTERRUPTED) from interrupt
        except BrokenPipeError as closed:
            _silence_output()
            raise typer.Exit(PIPE_CLOSED) from closed
        except OSError as error:
            if ctx.meta.get(_DEBUG) or (error.errno not in _NO_ROOM and error.filename is None):
                raise
            _silence_output()
            say_error(f"{error.filename or 'the output cannot be written'}: {error.strerror}")
            raise typer.Exit(WRONG_USE) from error
        except MemoryError as error:
            if ctx.meta.get(_DEBUG):
                raise
            say_error(f"there is not enough memory for what was asked for: {error}".rstrip(": "))
            raise typer.Exit(WRONG_USE) from error
        except EOFError as error:  # would be taken for an end of what is typed, and only "Aborted." be said
            raise RuntimeError(f"unexpected end of data: {error}") from error
        return result


def _silence_output() -> None:
    """Send what is still buffered nowhere: nobody reads it, and failing to write it would print a traceback."""
    for stream in _standard_streams():
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)


def _standard_streams() -> Iterator[int]:
    """Give the standard output's and error's descriptors, as far as they are the process's own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            yield stream.fileno()
