"""Files of a run, there as a whole or not at all whenever a process dies; what killed ones left is found by name.

``storage.complete_file`` is for files that one process writes for a person: it follows links and waits for no disk.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

DRAFT_ENDING = ".part"


@contextmanager
def durable_file(place: Path, name: str) -> Iterator[BinaryIO]:
    """Give a draft to write, which is on the disk before it becomes ``place``, if the block ends well.

    Args:
        place: where the file will be.
        name: what drafts of it are known by, see ``remove_drafts``.
    """
    draft = place.with_name(f"{name}.{secrets.token_hex(8)}{DRAFT_ENDING}")
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(place)
        _sync(place.parent)
    finally:
        draft.unlink(missing_ok=True)


def remove_drafts(folder: Path, name: str) -> None:
    """Remove what killed writers of a file left behind; only for who holds its lock."""
    for draft in folder.glob(f"{name}.*{DRAFT_ENDING}"):
        draft.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make a rename survive a loss of power, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
