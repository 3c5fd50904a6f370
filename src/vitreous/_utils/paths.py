"""Places as people write them."""

from __future__ import annotations

from pathlib import Path

from vitreous.errors import InputError


def expanded(path: str | Path) -> Path:
    """Follow ``~`` and ``~name``.

    Raises:
        InputError: Nobody is called so, or no file can be, as with a name of more than 255 bytes.
    """
    try:
        place = Path(path).expanduser()
        place.exists()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except RuntimeError as error:
        raise InputError(f"{path}: there is no such home folder") from error
    return place
