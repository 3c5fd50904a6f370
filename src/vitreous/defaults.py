"""The methods that are used where none is asked for."""

from __future__ import annotations

DEFAULT_METHODS = ("tokentm", "gradtoken", "decompx.skipplus")
