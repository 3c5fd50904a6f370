"""Access to the Hugging Face hub: one quick probe, and the local cache if the hub cannot be reached."""

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

    The hub client retries every file for half a minute, so a missing network is detected here first.
    """
    try:
        get_session().head(huggingface_hub.constants.ENDPOINT, timeout=_PROBE_SECONDS)
    except Exception:  # noqa: BLE001  any error (DNS, proxy, offline mode) means that the hub cannot be used
        return False
    return True


def cached_file(repository: str, names: Iterable[str]) -> Path | None:
    """Return the first of these files that is in the local cache."""
    for name in names:
        with contextlib.suppress(OSError, ValueError):  # not in the cache, or not a valid repository name
            return Path(huggingface_hub.hf_hub_download(repository, name, local_files_only=True))
    return None


def has_file(repository: str, name: str, *, offline: bool) -> bool | None:
    """Return whether a repository has a file; None if unknown.

    Offline, the cache records files that were downloaded, and files that were found to be missing.
    """
    if offline:
        found = huggingface_hub.try_to_load_from_cache(repository, name)
        return None if found is None else isinstance(found, str)
    try:
        return huggingface_hub.file_exists(repository, name)
    except Exception:  # noqa: BLE001  any error means unknown
        return None


def unreachable(name: str, instead: str, lacking: str = "its weights are") -> ModelError:
    """Return the error for a file that is not cached while the hub cannot be reached."""
    return ModelError(
        f"{name}: {lacking} not on this machine and the model hub cannot be reached; connect, or use {instead}"
    )
