"""Metrics of explanations: pure functions on arrays, and numbers over a data set with their direction and range."""
