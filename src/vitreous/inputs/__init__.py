"""Inputs and targets: image files, texts, what the outputs of a model are, and which class is explained."""
