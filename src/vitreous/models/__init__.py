"""Models by name, each with the preprocessing it was trained with."""

from vitreous.models.binary import TwoSided
from vitreous.models.loading import LoadedModel, list_models, load_model
from vitreous.models.preprocessing import Preprocessing

__all__ = ["LoadedModel", "Preprocessing", "TwoSided", "list_models", "load_model"]
