"""Architecture: what a run of a model shows, whatever its modules are called."""

from vitreous.architecture.description import Architecture, Block, Point, StreamAxes
from vitreous.architecture.survey import find_architecture

__all__ = ["Architecture", "Block", "Point", "StreamAxes", "find_architecture"]
