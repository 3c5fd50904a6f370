"""Engines: where the shards of a run are computed, on one machine or on a cluster, with the same shard function."""
