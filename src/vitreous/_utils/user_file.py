"""Runs a Python file of the user's own: a plugin, or a function that builds a model."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType


def run_user_file(file: Path, kind: str) -> ModuleType | None:
    """Run a file as a module and give it, or None where there is no such file; what it raises is the caller's.

    Args:
        file: the Python file.
        kind: what it is for; part of the module's name, so that a plugin and a model of one name do not meet.
    """
    name = f"vitreous_{kind}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with redirect_stdout(sys.stderr):  # the standard output is for results
        spec.loader.exec_module(module)
    return module
