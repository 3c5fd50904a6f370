"""Evaluation of methods on data sets under named protocols, and what the results say.

``tasks`` measure maps; ``protocols`` fix every choice of an evaluation; ``store`` keeps runs; ``runner`` turns samples
into rows of numbers; ``engines`` compute the shards of a run; ``statistics`` and ``report`` make tables and pages. A
room imports from those before it only.
"""
