"""Photos with labels and masks from data sets in their original layouts."""

from vitreous.datasets.dataset import DataSet
from vitreous.datasets.opening import list_datasets, open_dataset
from vitreous.datasets.sample import Sample
from vitreous.errors import DataError

__all__ = ["DataError", "DataSet", "Sample", "list_datasets", "open_dataset"]
