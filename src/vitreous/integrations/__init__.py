"""Adapters to other libraries, one module each; see docs/integrations.md. A module needs the package it adapts.

``captum``, ``quantus`` and ``grad_cam`` have the interfaces of these packages, ``training`` logs maps during training,
``formats`` and ``medical`` read and write files, and ``maps`` evaluates maps made by other libraries.
"""
