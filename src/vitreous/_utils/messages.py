"""What users see and bring: one-line messages and warnings; plugin and model files, run and hashed."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from vitreous.errors import VitreousError

_LONGEST = 200


def error_message(error: BaseException) -> str:
    """Return the message of an error on one line, truncated; its type if the message is empty."""
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__


def short_repr(value: object) -> str:
    """Return the repr of a value on one line, truncated."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  # a foreign __repr__ can raise any exception
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def close_match(word: str, words: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` with close matches; empty without any."""
    close = difflib.get_close_matches(word.lower(), list(words), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""


def printable(text: str) -> str:
    """Escape characters that UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


_INSIDE = f"{Path(__file__).parents[1]}{os.sep}"


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the stack level of the first caller outside of this package."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@contextmanager
def errors_as(kind: type[VitreousError], problem: str) -> Iterator[None]:
    """Convert exceptions of the block that are not a ``VitreousError``; interrupts pass.

    Args:
        kind: the type to raise.
        problem: the beginning of the message; the type and message of the exception follow in brackets.
    """
    try:
        yield
    except VitreousError:
        raise
    except MemoryError as error:
        raise kind(f"{problem}: there is not enough memory") from error
    except Exception as error:
        raise kind(f"{problem} ({described_error(error)})") from error


def described_error(error: BaseException) -> str:
    """Return type and message of an exception on one line."""
    reason, name = error_message(error), type(error).__name__
    return name if reason == name else f"{name}: {reason}"


def run_user_file(file: Path, kind: str) -> ModuleType | None:
    """Run a file as a module and return it; None if the file does not exist. Exceptions of the file are not caught.

    Args:
        file: the Python file.
        kind: part of the module name, so that a plugin and a model file with the same name do not collide.
    """
    name = f"vitreous_{kind}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with redirect_stdout(sys.stderr):  # standard output is for results
        spec.loader.exec_module(module)
    return module


# Folders of installed packages, which are unrelated to each other.
_INSTALLED = {"site-packages", "dist-packages"}


def source_hash(written: Any) -> str:
    """Return the SHA-256 of the file of a module, function or class, and of the user files that it imports.

    Imported files count if they belong to the same package or folder. Code typed into an interactive session has no
    file: the bytecode of the function is hashed, or that of the methods of a class.
    """
    try:
        content = Path(inspect.getsourcefile(written) or "").read_bytes()
    except (TypeError, OSError):
        functions = vars(written).values() if inspect.isclass(written) else (written,)
        codes = [getattr(function, "__code__", None) for function in functions]
        content = "\n".join(_instructions(code) for code in codes if code is not None).encode()
    module = written if isinstance(written, ModuleType) else sys.modules.get(written.__module__)
    hashes = [hashlib.sha256(content).hexdigest(), *sorted(_hashes_of_imports(module))]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _hashes_of_imports(start: ModuleType | None) -> Iterator[str]:
    """Yield the SHA-256 of every file of its own package or folder that a module imports, directly or not."""
    file = _file_of(start)
    if start is None or file is None:
        return
    visited, pending = {file}, [start]
    while pending:
        for module in _imported_by(pending.pop()):
            other = _file_of(module)
            if other is not None and other not in visited and _belongs(module, other, start, file):
                visited.add(other)
                pending.append(module)
                yield hashlib.sha256(other.read_bytes()).hexdigest()


def _imported_by(module: ModuleType) -> Iterator[ModuleType]:
    """Yield the modules that a module imports, or imports names from."""
    for value in list(vars(module).values()):
        name = getattr(value, "__module__", None)
        found = value if isinstance(value, ModuleType) else sys.modules.get(name) if isinstance(name, str) else None
        if found is not None:
            yield found


def _belongs(module: ModuleType, file: Path, start: ModuleType, user_file: Path) -> bool:
    package = start.__name__.partition(".")[0]
    if module.__name__.partition(".")[0] == package:
        return True
    return user_file.parent in file.parents and not _is_installed(file, user_file)


def _is_installed(file: Path, user_file: Path) -> bool:
    """Whether a file below the user's folder belongs to an environment inside it, such as ``.venv``."""
    folder = user_file.parent
    if not _INSTALLED.isdisjoint((folder.name, *file.relative_to(folder).parts)):
        return True
    places = map(Path, (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), str(Path(__file__).parents[1])))
    # An environment that contains the user's file itself does not count: with conda it may be the home folder.
    return any(place in file.parents and place not in user_file.parents for place in places)


def _file_of(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    file = Path(name).absolute() if isinstance(name, str) else None
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _instructions(code: CodeType) -> str:
    """Return a text of the bytecode of a function, nested functions included."""
    constants = [_instructions(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
