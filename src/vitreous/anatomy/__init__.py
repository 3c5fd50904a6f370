"""Anatomy: where are the blocks of this model, and what parts does a block have?"""

from vitreous.anatomy.description import Anatomy, Block
from vitreous.anatomy.find import find_anatomy

__all__ = ["Anatomy", "Block", "find_anatomy"]
