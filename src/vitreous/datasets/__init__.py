"""Photos with labels and masks, and texts with rationales, from data sets in their original layouts."""

from vitreous.datasets.dataset import DataSet, Review, Sample, Shuffled, list_datasets, open_dataset
from vitreous.datasets.eraser_movies import read_movies
from vitreous.errors import DataError

__all__ = ["DataError", "DataSet", "Review", "Sample", "Shuffled", "list_datasets", "open_dataset", "read_movies"]
