"""Talking to the Hugging Face hub without making a user without network wait: one quick probe, then the cache."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

from vitreous.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable

_PROBE_SECONDS = 5


def is_reachable() -> bool:
    """Return whether the hub answers.

    The hub's own client retries every file for half a minute, so a machine without network is recognised here first.
    """
    try:
        get_session().head(huggingface_hub.constants.ENDPOINT, timeout=_PROBE_SECONDS)
    except Exception:  # noqa: BLE001  whatever the reason (DNS, proxy, offline mode), the hub cannot be used
        return False
    return True


def cached_file(repository: str, names: Iterable[str]) -> Path | None:
    """Return the first of these files that an earlier download left in the local cache."""
    for name in names:
        with contextlib.suppress(OSError, ValueError):  # not in the cache, or not a repository's name at all
            return Path(huggingface_hub.hf_hub_download(repository, name, local_files_only=True))
    return None


def has_file(repository: str, name: str, *, offline: bool) -> bool | None:
    """Return whether a repository has a file, or None where nobody can tell.

    Without network it is known where an earlier download found the file, or found that there is none.
    """
    if offline:
        found = huggingface_hub.try_to_load_from_cache(repository, name)
        return None if found is None else isinstance(found, str)
    try:
        return huggingface_hub.file_exists(repository, name)
    except Exception:  # noqa: BLE001  whatever the reason, the hub has not told
        return None


def unreachable(name: str, instead: str, lacking: str = "its weights are") -> ModelError:
    """Return the error for what is neither on this machine nor within reach."""
    return ModelError(
        f"{name}: {lacking} not on this machine and the model hub cannot be reached; connect, or use {instead}"
    )
