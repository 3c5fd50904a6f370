"""Audits: what a model relies on over a whole data set, each suspicion tested by intervention."""
