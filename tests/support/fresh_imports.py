"""What an import loads, asked of processes in which nothing but torch, which takes longest, was imported before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

# Each import has a process of its own, forked from the interpreter that has torch.
_PROGRAM = """
import json, os, sys
import torch
for code in json.loads(sys.argv[1]):
    sys.stdout.flush()
    process = os.fork()
    if not process:
        exec(code)
        print(json.dumps(sorted(sys.modules)), flush=True)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0, code
"""


def modules_after(codes: Sequence[str]) -> list[set[str]]:
    """Run each code in an interpreter that has imported torch alone: all modules that are there afterwards."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(list(codes))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in done.stdout.splitlines()]
