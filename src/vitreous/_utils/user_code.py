"""Python files of users: running a plugin or model file, and telling versions of their code apart."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


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


# Folders in which one package has nothing to do with the next.
_INSTALLED = {"site-packages", "dist-packages"}


def source_hash(written: Any) -> str:
    """Return the sha256 of a module's file, or of that of a function or class, so that what it calls there counts too.

    Files beside it count too, where its module imports from them, and they from each other. What was typed into an
    interactive session has no file: the function's instructions count then, or of a class those of its functions.
    """
    try:
        content = Path(inspect.getsourcefile(written) or "").read_bytes()
    except (TypeError, OSError):
        functions = vars(written).values() if inspect.isclass(written) else (written,)
        codes = [getattr(function, "__code__", None) for function in functions]
        content = "\n".join(_instructions(code) for code in codes if code is not None).encode()
    module = written if isinstance(written, ModuleType) else sys.modules.get(written.__module__)
    hashes = [hashlib.sha256(content).hexdigest(), *sorted(_hashes_beside(module))]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _hashes_beside(start: ModuleType | None) -> Iterator[str]:
    """Yield the sha256 of every other file that a module needs of its own package or folder."""
    file = _file_of(start)
    if start is None or file is None:
        return
    known, waiting = {file}, [start]
    while waiting:
        for module in _imported_by(waiting.pop()):
            other = _file_of(module)
            if other is not None and other not in known and _belongs(module, other, start, file):
                known.add(other)
                waiting.append(module)
                yield hashlib.sha256(other.read_bytes()).hexdigest()


def _imported_by(module: ModuleType) -> Iterator[ModuleType]:
    """Yield the modules that a module has imported, or has imported something from."""
    for value in list(vars(module).values()):
        name = getattr(value, "__module__", None)
        found = value if isinstance(value, ModuleType) else sys.modules.get(name) if isinstance(name, str) else None
        if found is not None:
            yield found


def _belongs(module: ModuleType, file: Path, start: ModuleType, beside: Path) -> bool:
    package = start.__name__.partition(".")[0]
    if module.__name__.partition(".")[0] == package:
        return True
    return beside.parent in file.parents and not _is_installed(file, beside)


def _is_installed(file: Path, beside: Path) -> bool:
    """Return whether a file below one's own folder is of an environment that lies there too, such as ``.venv``."""
    folder = beside.parent
    if not _INSTALLED.isdisjoint((folder.name, *file.relative_to(folder).parts)):
        return True
    places = map(Path, (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), str(Path(__file__).parents[1])))
    # An environment that one's own file is inside of says nothing: a home may be one, as with conda.
    return any(place in file.parents and place not in beside.parents for place in places)


def _file_of(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    file = Path(name).absolute() if isinstance(name, str) else None
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _instructions(code: CodeType) -> str:
    """Tell what a function does; functions inside it are among its constants."""
    constants = [_instructions(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
