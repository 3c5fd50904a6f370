"""What an error of somebody else's says, in one line of ours."""

from __future__ import annotations

_LONGEST = 200


def reason_of(error: BaseException) -> str:
    """The error's message on one line and not too long, or its type where it says nothing."""
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__
