"""What is used where nothing else is asked for; known without importing anything heavy."""

from __future__ import annotations

DEFAULT_METHODS = ("tokentm", "gradtoken", "decompx.skipplus")
DEFAULT_OPACITY = 0.85  # of a map over its photo
SHARD_SIZE = 16  # images that are computed and stored as one
