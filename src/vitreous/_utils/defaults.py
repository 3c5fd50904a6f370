"""Defaults, choices and help texts that several parts share; no heavy imports."""

from __future__ import annotations

from typing import Literal

DEFAULT_METHODS = ("tokentm", "gradtoken", "decompx.skipplus")
DEFAULT_OPACITY = 0.85  # of a heatmap over its image
SHARD_SIZE = 16  # images that are computed and stored together

OutputActivation = Literal["logits", "probabilities", "sigmoid", "value"]  # what the outputs of a model are
OUTPUTS_HELP = "What the model outputs: logits (softmax), probabilities, sigmoid (multi-label logits) or a value."
OUTPUTS_DEFAULT = "from the model's configuration"

PLUGIN_ENTRY_POINTS = "vitreous.methods"  # group of entry points of installed packages that register methods
PLUGIN_HELP = "A Python file that registers your own methods; see the docs."
