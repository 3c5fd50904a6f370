"""The calls of the package: ``explain``, ``supported``, ``inspect``, and how they run methods on a model."""
