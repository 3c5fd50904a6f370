"""Vitreous: see through Vision Transformers."""
