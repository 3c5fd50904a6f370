"""Evaluations: runs over a data set, their stored results, statistics and tables."""
