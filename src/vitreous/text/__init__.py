"""Explanations of text classifiers: ``explain_text`` and ``TextExplanation``."""
