"""Slow, literal transcriptions of published equations: one image, explicit n x n matrices, plain loops, no tricks."""
