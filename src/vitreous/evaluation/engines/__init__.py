"""Engines: who computes the shards of a run, one machine or many; the shards themselves are the same everywhere."""
