"""Explanations as data: scores, predictions, provenance, and the folder they are saved in."""

from vitreous.explanation.explanation import Explanation

__all__ = ["Explanation"]
