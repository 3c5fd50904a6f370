"""What an import loads, asked of processes in which nothing but torch, which takes longest, was imported before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

# Each import has a process of its own, forked from the interpreter that has torch. That one lives as long as the tests.
_PROGRAM = """
import json, os, sys
import torch
for line in sys.stdin:
    process = os.fork()
    if not process:
        exec(json.loads(line))
        print(json.dumps(sorted(sys.modules)), flush=True)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0, line
"""


@cache
def _interpreter() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )


def modules_after(codes: Sequence[str]) -> list[set[str]]:
    """Run each code in an interpreter that has imported torch alone: all modules that are there afterwards."""
    interpreter, found = _interpreter(), []
    for code in codes:
        print(json.dumps(code), file=interpreter.stdin, flush=True)
        answer = interpreter.stdout.readline()
        assert answer, code  # it failed, and said why on standard error
        found.append(set(json.loads(answer)))
    return found
