"""What an error of somebody else's says, in one line of ours."""

from __future__ import annotations

_LONGEST = 200


def reason_of(error: BaseException) -> str:
    """The error's message on one line and not too long, or its type where it says nothing."""
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__


def shown(value: object) -> str:
    """A value that a caller gave, on one line and not too long: a tensor's own text has many."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  # whatever an object of somebody else's raises when it is asked for its text
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
