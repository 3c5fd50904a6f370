"""Gradio's settings in this process while a page runs, and a session state that does not grow."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

_SETTINGS = ("GRADIO_TEMP_DIR", "GRADIO_ANALYTICS_ENABLED")
MAX_SESSIONS = 1000
_lock = threading.Lock()
_folders: list[Path] = []  # of the running pages
_original: dict[str, str | None] = {}


def acquire(folder: Path) -> None:
    """Point Gradio's uploads to a private folder and turn its analytics off."""
    with _lock:
        if not _folders:
            _original.update({name: os.environ.get(name) for name in _SETTINGS})
        _folders.append(folder)
        _set(folder)


def release(folder: Path) -> None:
    """Restore the environment when the last page ends; until then the settings of another page apply."""
    with _lock:
        if folder not in _folders:  # released already
            return
        _folders.remove(folder)
        if _folders:
            _set(_folders[-1])
            return
        for name, value in _original.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _set(folder: Path) -> None:
    os.environ |= dict(zip(_SETTINGS, (str(folder), "False"), strict=True))


def limit_session_state(page: Any) -> None:
    """Keep what a launched page stores per session small.

    Gradio stores the last value of every component in every session, megabytes of pictures, for links to a state of
    the page. No option turns that off, so the class of its session state is replaced.
    """
    from gradio.blocks import Block  # noqa: PLC0415  # an optional dependency, and slow to import
    from gradio.state_holder import SessionState, StateHolder  # noqa: PLC0415

    class SmallSessionState(SessionState):
        def __init__(self, blocks: Any) -> None:
            super().__init__(blocks)
            self.config_values = {}

        def __setitem__(self, key: int, value: Any) -> None:
            if isinstance(value, Block):
                value._id = key  # noqa: SLF001  # an updated component has a new id, under which it would be kept too
            super().__setitem__(key, value)
            self.config_values.clear()

        def _update_config(self, key: int) -> None:
            """Store nothing."""

        def _update_value_in_config(self, key: int, value: Any) -> None:
            """Store nothing."""

    class SmallStateHolder(StateHolder):
        def __getitem__(self, session_id: str) -> SessionState:
            if session_id not in self.session_data:
                self.session_data[session_id] = SmallSessionState(self.blocks)
            return super().__getitem__(session_id)

    holder = SmallStateHolder()  # type: ignore[no-untyped-call]
    holder.set_blocks(page)
    page.app.state_holder = holder
