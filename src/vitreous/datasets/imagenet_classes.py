"""The thousand classes of ImageNet in the order of every model's outputs: their WordNet numbers, sorted."""

from __future__ import annotations

from functools import cache

CLASSES = 1000


@cache
def imagenet_names() -> tuple[str, ...]:
    """Return the name of every class in index order."""
    from timm.data.imagenet_info import ImageNetInfo  # noqa: PLC0415  (timm takes a second to import)

    return tuple(ImageNetInfo("imagenet-1k").label_descriptions())


@cache
def imagenet_indices() -> dict[str, int]:
    """Return the index of every class by its WordNet number, such as n01440764."""
    from timm.data.imagenet_info import ImageNetInfo  # noqa: PLC0415

    numbers: list[str] = ImageNetInfo("imagenet-1k").label_names()  # type: ignore[no-untyped-call]
    return {number: index for index, number in enumerate(numbers)}


def is_wordnet_number(text: str) -> bool:
    """Tell whether this looks like n01440764."""
    return len(text) == 9 and text[0] == "n" and text[1:].isdecimal()
