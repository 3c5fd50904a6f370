"""Data sets in their published layouts: images with labels and masks, texts with rationales, volumes with labels."""

from vitreous.datasets.dataset import (
    DataSet,
    Review,
    Sample,
    Shuffled,
    Stratified,
    VolumeSample,
    list_datasets,
    open_dataset,
)
from vitreous.datasets.eraser_movies import read_movies
from vitreous.datasets.folders import Mosaics
from vitreous.errors import DataError

__all__ = [
    "DataError",
    "DataSet",
    "Mosaics",
    "Review",
    "Sample",
    "Shuffled",
    "Stratified",
    "VolumeSample",
    "list_datasets",
    "open_dataset",
    "read_movies",
]
