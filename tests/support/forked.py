"""Programs in processes of their own that need not import torch again.

A new interpreter takes three to seven seconds of processor time to import what a command needs. Here a server imports
it once, runs nothing, and forks: what is started has its own memory, streams, working directory, signals and exit code
like any process. Tests of what an interpreter does from its beginning (what is imported, how quickly, how a broken
output is met) start a real one.

All processes of a run of the whole suite share one server, which the first of them starts and names in the environment.
"""

from __future__ import annotations

import atexit
import gc
import io
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import IO

SHARED = "VITREOUS_FORK_SERVER"  # the process and the address of a server that another process has started
PAGE = ("gradio", "vitreous.web.server")  # most programs do without


def share() -> None:
    """Start a server for this process and for all that it starts."""
    _start_server(("preloaded", *PAGE))
    server = forkserver._forkserver
    os.environ[SHARED] = f"{server._forkserver_pid} {server._forkserver_address}"


@cache
def _server() -> multiprocessing.context.ForkServerContext:
    process, _, address = os.environ.get(SHARED, "").partition(" ")
    if not address:
        return _start_server(("preloaded",))
    server = forkserver._forkserver
    server._forkserver_pid, server._forkserver_address = int(process), address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # it ends with the process that started it
    server.ensure_running = resource_tracker.ensure_running
    return multiprocessing.get_context("forkserver")


def _start_server(modules: tuple[str, ...]) -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [path])])
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if path is not None:
            os.environ["PYTHONPATH"] = path
    return context


def parent_of_all() -> int:
    """The process that what is started has for its parent."""
    _server()
    return forkserver._forkserver._forkserver_pid


class Forked:
    """A running program; what of ``subprocess.Popen`` the tests use."""

    stdin: IO[bytes] | None = None
    stdout = stderr = None  # they are files

    def __init__(
        self,
        arguments: list[str],
        output: Path,
        errors: Path,
        cwd: Path | None,
        env: dict[str, str] | None,
        given: Path = Path(os.devnull),
    ) -> None:
        self.args, self._output, self._errors = arguments, output, errors
        streams = (given, output, errors)
        options = (list(map(str, arguments)), streams, cwd, dict(os.environ) if env is None else env)
        # A daemon: it is ended with the tests if a test that fails leaves it.
        self._process = _server().Process(target=_run, args=options, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def output(self) -> str:
        """What it has written by now."""
        return self._output.read_text("utf-8") if self._output.exists() else ""

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self._output.read_text("utf-8"), self._errors.read_text("utf-8")


def start(
    arguments: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None, given: str = ""
) -> Forked:
    """Start ``-m module ...`` or a script without waiting for it; its output is kept in files."""
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    (folder / "given").write_text(given, "utf-8")
    process = Forked(arguments, folder / "output", folder / "errors", cwd, env, folder / "given")
    weakref.finalize(process, shutil.rmtree, folder, ignore_errors=True)
    return process


def run(
    arguments: list[str],
    *,
    timeout: float = 240,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    given: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run ``-m module ...`` or a script to its end; it reads ``given``."""
    process = start(arguments, cwd=cwd, env=env, given=given)
    output, errors = process.communicate(timeout)
    return subprocess.CompletedProcess(arguments, process.wait(), output, errors)


def run_code(code: str, *arguments: str) -> str:
    """Run a program that is given as text, which must not fail: what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(code, "utf-8")
        done = run([str(file), *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run(arguments: list[str], streams: tuple[Path, Path, Path], cwd: Path | None, environment: dict[str, str]) -> None:
    """What the forked process does: what an interpreter does once it has begun."""
    os.setsid()
    gc.freeze()  # hardly any of what was imported is garbage, so it is never looked through
    gc.enable()
    for number, file in enumerate(streams):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb"), "utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(number, "wb"), "utf-8", line_buffering=number == 2) for number in (1, 2)
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The server has the mask of the thread that started it, and Ray blocks signals where it starts processes.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    if cwd is not None:
        os.chdir(cwd)
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()  # a forked process ends without them
        sys.stdout.flush()
