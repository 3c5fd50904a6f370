"""Models with their preprocessing, loaded by name or passed by the caller."""

from vitreous.models.hf_models import LoadedTextModel
from vitreous.models.loading import LoadedModel, TwoSided, list_models, load_model
from vitreous.models.preprocessing import Preprocessing, VolumePreprocessing

__all__ = [
    "LoadedModel",
    "LoadedTextModel",
    "Preprocessing",
    "TwoSided",
    "VolumePreprocessing",
    "list_models",
    "load_model",
]
