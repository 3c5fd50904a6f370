"""Similar images: nearest neighbours in a folder with the maps that explain them, and which patches match which.

The similarity of two images is the cosine u · v of their embeddings. A method that is linear in what it explains splits
u into a vector c_p for every patch of the first image and v into d_q for every patch of the second, so that the
relevance of a pair of patches is c_p · d_q (for LRP: Eberle et al., Building and Interpreting Deep Similarity Models,
2020). Summed over all patches, prefix tokens and biases of one image, this is the map of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from vitreous._utils.torch_state import preserves_torch_state
from vitreous.api.explain import explain, find_recipes, network_of
from vitreous.architecture.evaluation_copy import run_in_evaluation
from vitreous.errors import InputError, MethodError, UnsupportedModelError
from vitreous.explanation.explanation import Explanation
from vitreous.inputs.images import find_images
from vitreous.inputs.model_io import ask, embeddings, encoding_methods
from vitreous.inputs.patch_geometry import plane
from vitreous.models import LoadedModel
from vitreous.models.dual_encoder import DualEncoder, ImageTower, SimilarityHead, find_dual_encoder
from vitreous.models.pixels import Images, Model, find_model, find_pixels

# Relative to the largest score; float32 sums of a few hundred products are off by less.
_LINEAR = 1e-3
_BATCH = 16
_MANY_ROWS = 32  # of a matrix, from which looking for zeros pays


class EmbeddingTower(nn.Module):
    """The part of a model that embeds images: (batch, width), not normalised.

    Of a dual encoder the image tower; of timm's classifiers what their head reads; of transformers' classifiers the
    model inside; of any other network its output, or the mean over the last tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """The embeddings of images."""
        if callable(forward_head := getattr(self.model, "forward_head", None)):
            pooled: Tensor = forward_head(self.model.forward_features(images), pre_logits=True)  # type: ignore[operator]
            return embeddings(pooled)
        return embeddings(ask(self.model, images))


def embedding_tower(network: nn.Module) -> nn.Module:
    """The part of a network that embeds images."""
    methods = encoding_methods(network)
    if methods is not None:
        return ImageTower(network, methods[0]).eval()
    inside = getattr(network, "base_model", None)
    classifies = "ForImageClassification" in type(network).__name__ and isinstance(inside, nn.Module)
    return EmbeddingTower(inside if classifies and inside is not None else network).eval()


class _CoordinatesAndCosines(nn.Module):
    """Embeddings of length 1, followed by their cosines with fixed ones: (batch, width + fixed)."""

    def __init__(self, tower: nn.Module, fixed: Tensor) -> None:
        super().__init__()
        self.tower = tower
        self.register_buffer("fixed", fixed)

    def forward(self, images: Tensor) -> Tensor:
        unit = functional.normalize(self.tower(images), dim=-1)
        return torch.cat([unit, unit @ self.fixed.T.to(unit)], dim=-1)  # type: ignore[operator]


class SkipZeroRows(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class
    """Leaves rows and columns of zeros out of matrix products.

    The gradient of a class token is 0 in all other rows of the last block's feed-forward part, and under rules that
    hold attention constant in the columns of queries and keys: one pass for every coordinate of an embedding would
    mostly multiply zeros.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; a product with many zeros on what is left without them."""
        del types
        if func is torch.ops.aten.mm.default and len(args[0]) >= _MANY_ROWS:
            return _sparse_product(*args)
        return func(*args, **(kwargs or {}))


def _sparse_product(first: Tensor, second: Tensor) -> Tensor:
    """The product of two matrices without rows, or without columns, of zeros of the first; equal up to rounding."""
    used = first != 0
    rows = used.any(dim=1).nonzero()[:, 0]
    if 2 * len(rows) <= len(first):
        product = first.new_zeros(len(first), second.shape[1])
        product[rows] = first[rows] @ second
        return product
    columns = used.any(dim=0).nonzero()[:, 0]
    if 2 * len(columns) <= first.shape[1]:
        return first[:, columns] @ second[columns]
    return first @ second


class _Similarities(nn.Module):
    """The cosines of images with fixed embeddings."""

    def __init__(self, tower: nn.Module, fixed: Tensor, names: Sequence[str]) -> None:
        super().__init__()
        self.head = SimilarityHead(tower, fixed)
        self.class_names = tuple(names)

    def forward(self, images: Tensor) -> Tensor:
        cosines: Tensor = self.head(images)
        return cosines


class PatchPair(NamedTuple):
    """A patch of the first image and one of the second, each by row and column, and their relevance."""

    first: tuple[int, int]
    second: tuple[int, int]
    score: float


@dataclass(frozen=True, eq=False)
class PatchMatch:
    """The relevance of every pair of patches of two images for their similarity.

    Attributes:
        scores: (patches of the first image, patches of the second).
        first: the first image's own map, (patches,): with all of the second, its prefix tokens and biases included.
        second: the second image's own map, (patches,).
        grids: rows and columns of both.
        similarity: the cosine of the two embeddings.
        method: the spelling of the method.
    """

    scores: Tensor
    first: Tensor
    second: Tensor
    grids: tuple[tuple[int, int], tuple[int, int]]
    similarity: float
    method: str

    def best(self, row: int, column: int) -> tuple[int, int]:
        """The patch of the second image that matches a patch of the first one best: its row and column."""
        return divmod(int(self.scores[row * self.grids[0][1] + column].argmax()), self.grids[1][1])

    def pairs(self, count: int = 10) -> list[PatchPair]:
        """The pairs of patches that match best, each patch in one pair at most.

        Pairs below 0 speak against the similarity and are left out.
        """
        left = self.scores.clone()
        found: list[PatchPair] = []
        while len(found) < min(count, *left.shape):
            first, second = divmod(int(left.argmax()), left.shape[1])
            score = float(left[first, second])
            if not score > 0:
                break
            found.append(PatchPair(divmod(first, self.grids[0][1]), divmod(second, self.grids[1][1]), score))
            left[first], left[:, second] = -torch.inf, -torch.inf
        return found


@preserves_torch_state
def match_patches(
    model: Model | DualEncoder, first: Images, second: Images, method: str = "decompx:layer=-1"
) -> PatchMatch:
    """Explain which patches of an image match which of another one.

    Args:
        model: a model as ``explain`` takes it, without a head or with one that is left out, or a dual encoder.
        first: one image.
        second: another one.
        method: a method that is linear in what it explains, such as decompx, ixg, cat or attcat. It explains every
            coordinate of both embeddings, a backward pass each: of the last block alone, as by default, these are
            cheap.

    Raises:
        MethodError: the method is not linear.

    Examples:
        >>> import vitreous
        >>> found = vitreous.match_patches(model, "demo.jpg", "other.jpg")
        >>> found.scores.shape == (found.first.numel(), found.second.numel())
        True
    """
    spelling = find_recipes(method)[0].spelling
    loaded, tower = _find_tower(model, first)
    pixels = [_one_image(loaded, tower, image) for image in (first, second)]
    alike = pixels[0].shape == pixels[1].shape
    batches = [torch.cat(pixels)] if alike else pixels
    units = torch.cat([_embedded(tower, batch) for batch in batches])
    head = _CoordinatesAndCosines(tower, units).eval()
    columns = list(range(units.shape[1] + len(units)))
    with SkipZeroRows():  # type: ignore[no-untyped-call]
        found = [explain(head, batch, spelling, [columns] * len(batch), outputs="value") for batch in batches]
    maps = [image for each in found for image in each.scores[spelling]]  # (width + 2, patches) each
    shares = [image[: units.shape[1]] for image in maps]
    own = [shares[0].T @ units[1], shares[1].T @ units[0]]
    for whole, image in ((maps[0][-1], own[0]), (maps[1][-2], own[1])):
        if float((whole - image).abs().max()) > _LINEAR * float(image.abs().max()):
            raise MethodError(
                f"{spelling} is not linear in what it explains, so that no relevance of a pair of patches follows from "
                "it; use decompx, ixg, cat or attcat"
            )
    grids = (plane(found[0].grid), plane(found[-1].grid))
    return PatchMatch(shares[0].T @ shares[1], own[0], own[1], grids, float(units[0] @ units[1]), spelling)


@dataclass(frozen=True, eq=False)
class SimilarImages:
    """The images of a folder that are most similar to another one, the most similar first.

    Attributes:
        files: the images.
        similarities: their cosines with the query.
        query: the query's maps, one for every neighbour: ``target`` k is why it is similar to ``files[k]``.
        neighbours: the neighbours' maps, one image each: why they are similar to the query.
    """

    files: tuple[Path, ...]
    similarities: tuple[float, ...]
    query: Explanation
    neighbours: Explanation


@preserves_torch_state
def similar(
    model: Model | DualEncoder,
    query: str | Path,
    folder: str | Path | Iterable[str | Path],
    methods: str | Sequence[str] = "decompx.skipplus",
    *,
    k: int = 5,
) -> SimilarImages:
    """Find the images of a folder that a model takes for most similar to another one, and explain why.

    Args:
        model: a model as ``explain`` takes it with files: its embedding is compared, its classes are not.
        query: an image file.
        folder: a folder, or files; the query itself is left out.
        methods: spellings, as for ``explain``.
        k: how many neighbours.

    Examples:
        >>> import vitreous
        >>> found = vitreous.similar(model, "demo.jpg", ".", "gae", k=1)
        >>> found.files[0].name
        'other.jpg'
        >>> found.neighbours.scores["gae"].shape == found.query.scores["gae"][0].shape
        True
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InputError(f"k must be a whole number above 0, not {k!r}")
    find_recipes(methods)
    loaded, tower = _find_tower(model, query)
    if not isinstance(loaded, LoadedModel):
        raise InputError("similar() reads image files, so the model's preprocessing has to be known")
    places = [folder] if isinstance(folder, str | Path) else list(folder)
    files = [file for file in find_images([Path(place) for place in places]) if file.resolve() != Path(query).resolve()]
    if not files:
        raise InputError("there is no other image to compare the query with")
    wanted = _embedded(tower, _one_image(loaded, tower, query))
    found = torch.cat([
        _embedded(tower, find_pixels(loaded, tower, files[start : start + _BATCH])[0])
        for start in range(0, len(files), _BATCH)
    ])  # fmt: skip
    order = (found @ wanted[0]).topk(min(k, len(files))).indices.tolist()
    names = [files[number].name for number in order]

    def explained(images: Images, fixed: Tensor, called: Sequence[str], target: Any) -> Explanation:
        head = LoadedModel(loaded.name, _Similarities(tower, fixed, called).eval(), loaded.preprocessing, tuple(called))
        return explain(head, images, methods, target=target, outputs="value")

    return SimilarImages(
        tuple(files[number] for number in order),
        tuple(float(found[number] @ wanted[0]) for number in order),
        explained(str(query), found[order], names, [list(range(len(order)))]),
        explained([files[number] for number in order], wanted, [Path(query).name], 0),
    )


def _find_tower(model: Model | DualEncoder, images: Images) -> tuple[LoadedModel | nn.Module, nn.Module]:
    """The model, with its preprocessing where that is known, and the part of it that embeds images."""
    given: Any = model
    if isinstance(given, DualEncoder) or (isinstance(given, str) and given.startswith("open_clip/")):
        dual = find_dual_encoder(given)
        given = dual.loaded(dual.model)
    loaded = find_model(given, images)
    return loaded, embedding_tower(network_of(loaded))


def _one_image(loaded: LoadedModel | nn.Module, tower: nn.Module, image: Images) -> Tensor:
    pixels, _ = find_pixels(loaded, tower, image)
    if len(pixels) != 1:
        raise InputError(f"one image is compared with another one, not {len(pixels)}")
    return pixels


def _embedded(tower: nn.Module, pixels: Tensor) -> Tensor:
    """Embeddings of length 1, (images, width)."""
    with torch.no_grad():
        found = run_in_evaluation(tower, lambda network: network(pixels))
    if not bool((found.norm(dim=-1) > 0).all()):
        raise UnsupportedModelError("the embedding of an image is 0, so that it has no direction to compare")
    return functional.normalize(found, dim=-1)
