"""Small random instances of the Vision Transformers that people use: of packages, and as they write them themselves."""

from functools import partial

from own_models import MODELS
from own_reference import weights as own_weights
from spelling_reference import weights
from spelling_variants import ALL, build
from zoo.entry import CLASSES, Entry
from zoo.own_zoo import OWN
from zoo.timm_zoo import TIMM
from zoo.transformers_zoo import TRANSFORMERS
from zoo.vit_pytorch_zoo import VIT_PYTORCH
from zoo.volumes_zoo import VOLUMES

SPELLED = [Entry(f"spellings/{variant}, {name}", partial(build, variant, name, weights())) for variant, name in ALL]
# ViTs in other people's hands. Not among the entries: test_own_written_models.py compares them as a whole.
OWN_WRITTEN = [
    Entry(f"own/{name}", partial(make, own_weights())) for name, (_, make) in MODELS.items() if name != "Compiled"
]
ENTRIES: list[Entry] = [*SPELLED, *VIT_PYTORCH, *OWN, *TIMM, *TRANSFORMERS]

__all__ = ["CLASSES", "ENTRIES", "OWN_WRITTEN", "VOLUMES", "Entry"]
