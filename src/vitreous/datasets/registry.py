"""Data sets by name: the one function that turns ``KIND:PATH`` into a data set."""

from __future__ import annotations

from vitreous.close_match import close_match
from vitreous.datasets.cifar import Cifar10, Cifar100
from vitreous.datasets.dataset import DataSet
from vitreous.datasets.eraser_movies import EraserMovies
from vitreous.datasets.folders import Labelled, MaskedFolder
from vitreous.datasets.imagenet import ImageNet
from vitreous.datasets.imagenet_s import ImageNetS
from vitreous.datasets.imagenet_segmentation import ImageNetSegmentation
from vitreous.datasets.mura import Mura
from vitreous.datasets.pets import Pets
from vitreous.datasets.voc import Voc
from vitreous.errors import DataError

_ALL: tuple[type[DataSet], ...] = (
    ImageNet,
    ImageNetSegmentation,
    ImageNetS,
    Voc,
    Cifar10,
    Cifar100,
    Mura,
    Pets,
    MaskedFolder,
    Labelled,
    EraserMovies,
)
_KINDS = {kind.kind: kind for kind in _ALL}


def open_dataset(spec: str) -> DataSet:
    """Open a data set in its original layout, without reading a photo.

    Args:
        spec: ``KIND:PATH``, with one of the kinds that ``list_datasets`` describes.

    Raises:
        DataError: The kind is unknown, or the set is missing or damaged; it says what is missing and where it comes
            from.
        MissingDependencyError: The kind needs an extra that is not installed.
    """
    kind, colon, path = spec.partition(":")
    if not colon or not path:
        raise DataError(f"a data set is spelled KIND:PATH, not {spec!r}; kinds are {', '.join(_KINDS)}")
    if kind not in _KINDS:
        hint = close_match(kind, _KINDS) or f"; kinds are {', '.join(_KINDS)}"
        raise DataError(f"there is no kind of data set {kind!r}{hint}")
    return _KINDS[kind](path)


def list_datasets() -> dict[str, str]:
    """Return the kinds of data sets with a line each on what is expected at the path."""
    return {kind: opened.summary for kind, opened in _KINDS.items()}
