"""Models with their preprocessing, loaded by name or passed by the caller."""

from vitreous.models.hf_models import LoadedTextModel
from vitreous.models.loading import LoadedModel, list_models, load_model
from vitreous.models.preprocessing import Preprocessing, VolumePreprocessing
from vitreous.models.wrap_model import TwoSided

__all__ = [
    "LoadedModel",
    "LoadedTextModel",
    "Preprocessing",
    "TwoSided",
    "VolumePreprocessing",
    "list_models",
    "load_model",
]
