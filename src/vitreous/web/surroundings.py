"""What Gradio finds in this process while a page runs; what was there before comes back with the last page's end."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from vitreous.web.gate import fetch_nothing

_VARIABLE = "GRADIO_TEMP_DIR"
_NAME = "DEFAULT_TEMP_DIR"  # of what Gradio has read from it once, when it was imported
_lock = threading.Lock()
_folders: list[Path] = []  # of the pages that run
_before: dict[str, Any] = {}


def occupy(folder: Path) -> None:
    """Let uploads go into a folder that nobody else can read, and nothing be fetched from elsewhere."""
    from gradio import processing_utils, routes  # noqa: PLC0415  # an extra, and slow to import

    with _lock:
        if not _folders:
            _before["folder"] = os.environ.get(_VARIABLE)
            _before["download"] = processing_utils.async_ssrf_protected_download
            _before["routes"] = getattr(routes, _NAME)
        _folders.append(folder)
        os.environ[_VARIABLE] = str(folder)
        setattr(routes, _NAME, str(folder))
        processing_utils.async_ssrf_protected_download = fetch_nothing


def leave(folder: Path) -> None:
    """Give back what a page occupied; while another one runs, that stays as closed as it was."""
    from gradio import processing_utils, routes  # noqa: PLC0415

    with _lock:
        if folder not in _folders:  # closed already
            return
        _folders.remove(folder)
        if _folders:
            os.environ[_VARIABLE] = str(_folders[-1])
            setattr(routes, _NAME, str(_folders[-1]))
            return
        setattr(routes, _NAME, _before["routes"])
        processing_utils.async_ssrf_protected_download = _before["download"]
        if _before["folder"] is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = _before["folder"]
