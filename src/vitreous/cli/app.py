"""The ``vitreous`` application: its commands, ``vitreous serve``, and how errors become one line and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
import textwrap
import traceback
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from vitreous import __version__
from vitreous.cli.console import (
    DEBUG,
    DebugOption,
    ExitCode,
    PluginOption,
    print_error,
    print_line,
    print_usage_error,
    stderr_console,
    stdout_console,
)
from vitreous.cli.evaluate import audit, evaluate, recommend, report
from vitreous.cli.explain import explain
from vitreous.cli.explain_text import explain_text
from vitreous.cli.figure import figure
from vitreous.cli.listings import check, datasets, methods, models_app, protocols
from vitreous.cli.similar import similar
from vitreous.cli.speed import speed
from vitreous.errors import VitreousError


def serve(
    *,
    model: Annotated[
        str, typer.Option(help="The initial model, see `vitreous models`; users can choose others.")
    ] = "demo",
    text_model: Annotated[
        str | None,
        typer.Option(
            help="A text classifier with its tokenizer for the texts tab: hf/ID or hf/FOLDER.",
            show_default="demo-text",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 opens the page to everyone who can reach this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    allow_folder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="A folder whose checkpoints and images users may load. Repeat the option for several."
        ),
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder that `vitreous audit` has written, to browse in the audit tab."),
    ] = None,
    max_upload_mb: Annotated[int, typer.Option(min=1, max=200, help="Maximum size of an uploaded image.")] = 20,
    cache_mb: Annotated[int, typer.Option(min=16, help="Size of the cache of results.")] = 256,
    max_seconds: Annotated[float, typer.Option(min=1, help="Time limit of one request.")] = 120,
    max_memory_mb: Annotated[int, typer.Option(min=64, help="Memory limit of one request, without the models.")] = 2048,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    plugin: PluginOption = None,
    _debug: DebugOption = False,
) -> None:
    """Serve a web page that explains the predictions for images and texts.

    Nothing is uploaded to other machines. Only models that are chosen by name are downloaded.
    """
    from vitreous.plugin import load_plugins  # noqa: PLC0415  # imports torch
    from vitreous.web.jobs import Limits  # noqa: PLC0415
    from vitreous.web.server import Settings, start  # noqa: PLC0415

    load_plugins(plugin or [])
    settings = Settings(
        model=model,
        text_model=text_model,
        host=host,
        port=port,
        folders=tuple(allow_folder or ()),
        upload_bytes=max_upload_mb * 2**20,
        cache_bytes=cache_mb * 2**20,
        limits=Limits(max_seconds, max_memory_mb * 2**20),
        audit=audit,
    )
    print_line(stderr_console(), "loading the model and the page ...")
    server = start(settings)
    try:
        print_line(stdout_console(), f"the page is at {server.address} - press Ctrl+C to stop")
        if open_browser and not webbrowser.open(server.address):
            print_line(stderr_console(), "no browser was found on this machine: open the address yourself")
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()


_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_UsageError: type[Any] = typer.BadParameter.__mro__[1]  # typer has its own copy of click since 0.26
_HELP_INDENT = 30  # columns of option names in a help text, at most
_HELP = "Explain Vision Transformers: which image regions led to a prediction?"


def _format_params(command: Any, ctx: Any, formatter: Any) -> None:
    """Write arguments and options with their help; options that take no value have no type."""
    rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for param in command.get_params(ctx):
        if param.param_type_name == "argument":
            rows["argument"].append((param.display_name_raw, param.help or ""))
            continue
        if param.metavar is None:
            param.metavar = "" if param.is_flag else _metavar(param, ctx)
        name, text = param.get_help_record(ctx)
        rows["option"].append((name, text))
    for kind, records in rows.items():
        _write_rows(formatter, f"{kind.title()}s", records)


def _write_rows(formatter: Any, heading: str, rows: list[tuple[str, str]]) -> None:
    """Write names and their descriptions in two columns. Lines end at blanks: names such as demo-text stay whole."""
    if not rows:
        return
    indent = min(_HELP_INDENT, 4 + max(len(name) for name, _ in rows))
    formatter.write(f"\n{heading}:\n")
    for name, text in rows:
        start = f"  {name}".ljust(indent)
        if len(name) + 4 > indent:  # the description starts on the next line
            formatter.write(f"  {name}\n")
            start = " " * indent
        formatter.write(
            textwrap.fill(
                text,
                formatter.width,
                initial_indent=start,
                subsequent_indent=" " * indent,
                break_on_hyphens=False,
                break_long_words=False,
            )
            + "\n"
        )


def _metavar(param: Any, ctx: Any) -> str:
    """Return the placeholder of a value: its choices, N for numbers, FILE or DIR for paths, else the option's name."""
    kind = param.display_type(ctx).strip("<>")
    if "|" in kind:
        return str(kind)
    if kind.startswith(("int", "float")):
        return "N"
    return {"path": "FILE", "file": "FILE", "dir": "DIR"}.get(kind) or str(param.opts[0].lstrip("-").upper())


class PlainHelpCommand(TyperCommand):
    """A command whose help is plain text: it fits 80 columns, and no word is cut."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        _format_params(self, ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line; a required argument is a bare word."""
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]


class PlainHelpGroup(TyperGroup):
    """A command group whose help is plain text, with the whole first sentence of each command."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options and commands."""
        _format_params(self, ctx, formatter)
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        _write_rows(formatter, "Commands", [(name, _first_paragraph(command)) for name, command in commands])


def _first_paragraph(command: Any) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split())


class ErrorReportingGroup(PlainHelpGroup):
    """A command group that reports expected errors in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before the name of a command."""
        with _usage_errors():
            parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Known errors become one line on standard error and an exit code."""
        try:
            with _usage_errors():
                result = super().invoke(ctx)
            sys.stdout.flush()  # detects a closed pipe here instead of at interpreter shutdown
        except VitreousError as error:
            if ctx.meta.get(DEBUG):
                traceback.print_exc()
            print_error(str(error))
            raise typer.Exit(ExitCode.FAILED) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from interrupt
        except BrokenPipeError as closed:
            _discard_output()
            raise typer.Exit(ExitCode.BROKEN_PIPE) from closed
        except OSError as error:
            if ctx.meta.get(DEBUG) or (error.errno not in _CANNOT_WRITE and error.filename is None):
                raise
            _discard_output()
            print_error(f"{error.filename or 'the output cannot be written'}: {error.strerror}")
            raise typer.Exit(ExitCode.FAILED) from error
        except MemoryError as error:
            if ctx.meta.get(DEBUG):
                raise
            print_error(f"not enough memory: {error}".rstrip(": "))
            raise typer.Exit(ExitCode.FAILED) from error
        except EOFError as error:  # click would report it as "Aborted." without a reason
            raise RuntimeError(f"unexpected end of data: {error}") from error
        return result


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Print errors in the arguments as all errors are printed, with the usage below."""
    try:
        yield
    except _UsageError as error:
        if error.ctx is None or type(error).__name__ == "NoArgsIsHelpError":  # the help is the message
            raise
        message = error.format_message().rstrip(".").replace("Input should be", "it must be")
        message = re.sub(r", unable to parse .*", "", message)
        usage = " ".join(error.ctx.get_usage().split())
        print_usage_error(f"{message[:1].lower()}{message[1:]}", f"{usage}; see {error.ctx.command_path} --help")
        raise typer.Exit(error.exit_code) from error


def _discard_output() -> None:
    """Send buffered output to the null device: writing it would fail again and print a traceback."""
    for stream in _unwritable_streams():
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream)
        os.close(null)


def _unwritable_streams() -> Iterator[int]:
    """Yield the file descriptors of standard output and error that cannot be flushed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            yield stream.fileno()


app = typer.Typer(
    name="vitreous",
    help=_HELP,
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
    add_completion=False,
)
for command in (explain, explain_text, similar, figure, serve, evaluate, report, recommend, audit, speed, methods):
    app.command(cls=PlainHelpCommand)(command)
models_app.command(cls=PlainHelpCommand)(check)
app.add_typer(models_app, name="models", cls=PlainHelpGroup)
app.command(cls=PlainHelpCommand)(protocols)
app.command(cls=PlainHelpCommand)(datasets)


def _print_version(value: bool) -> None:  # noqa: FBT001  # typer's signature
    if value:
        typer.echo(f"vitreous {__version__}")
        raise typer.Exit


@app.callback(help=_HELP)
def root(
    *,
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    _debug: DebugOption = False,
) -> None:
    """Options before the name of a command."""
