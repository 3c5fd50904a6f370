"""Small random instances of the Vision Transformers that people use: of packages, and as they write them themselves."""

from zoo.entry import CLASSES, Entry
from zoo.own_zoo import OWN
from zoo.timm_zoo import TIMM
from zoo.transformers_zoo import TRANSFORMERS
from zoo.vit_pytorch_zoo import VIT_PYTORCH

ENTRIES: list[Entry] = [*VIT_PYTORCH, *OWN, *TIMM, *TRANSFORMERS]

__all__ = ["CLASSES", "ENTRIES", "Entry"]
