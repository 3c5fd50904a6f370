"""Tasks: what is measured of a map, each with its settings as plain data."""
