"""A ``vitreous serve`` of its own for a test, ended by its own process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forked import Forked

TINY = "timm/test_vit@random"


@dataclass(frozen=True)
class RunningServer:
    """Where a server listens, what it writes, and its process."""

    address: str
    log: Path
    process: Forked | subprocess.Popen[bytes]

    def resident_bytes(self) -> int:
        """The memory that the process has now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024


@contextmanager
def running_server(folder: Path, *options: str, model: str = TINY, forked: bool = True) -> Iterator[RunningServer]:
    """Start a server on a free port of this machine, and end it; ``forked`` or in a new interpreter."""
    with serving(folder, "serve", "--model", model, *options, forked=forked) as server:
        yield server


@contextmanager
def serving(folder: Path, *arguments: str, cwd: Path | None = None, forked: bool = True) -> Iterator[RunningServer]:
    """Run a command of ``vitreous`` that serves the page, on a free port, and end it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.log"
    command = ["-m", "vitreous", *arguments, "--port", str(port)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    log.touch()
    if forked:
        process: Forked | subprocess.Popen[bytes] = Forked(command, log, log, cwd, settings)
    else:
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, env=settings, cwd=cwd
            )
    try:
        server = RunningServer(f"http://127.0.0.1:{port}/", log, process)
        _wait(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=20)


def _wait(server: RunningServer) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended: {server.log.read_text()}")
        if "the page is at" in server.log.read_text():
            urllib.request.urlopen(server.address, timeout=30).close()
            return
        time.sleep(0.1)
    raise RuntimeError("the server did not start")
