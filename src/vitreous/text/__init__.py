"""Explanations of texts."""
