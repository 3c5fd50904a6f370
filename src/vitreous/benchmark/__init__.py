"""Measuring explanations: tasks, runs, statistics and tables."""
