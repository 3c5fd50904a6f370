"""Models by name, each with the preprocessing it was trained with."""

from vitreous.models.loading import LoadedModel, list_models, load_model
from vitreous.models.preprocessing import Preprocessing

__all__ = ["LoadedModel", "Preprocessing", "list_models", "load_model"]
