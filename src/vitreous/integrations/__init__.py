"""Adapters to other libraries, each in a module of its own that needs its package; docs/integrations.md shows them.

``captum``, ``quantus`` and ``grad_cam`` have the interfaces of these packages, ``training`` logs maps while a model is
trained, ``formats`` and ``medical`` read and write files, and ``maps`` measures maps that others made.
"""
