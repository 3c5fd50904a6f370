"""Dual encoders, from the side of the text: which words of a prompt made its similarity to an image.

The score of an image and a prompt is s = logit scale x u · t, with u and t their embeddings of length 1. A method that
is linear in what it explains (decompx, ixg, cat, fullgrad_plus, attcat) splits u into a vector c_p for every patch and
t into a vector d_w for every word; s is bilinear, so the relevance of a patch with a word is logit scale x c_p · d_w.
Summed over words, special tokens and biases, this is the patch's own score; summed over patches, it is the word's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitreous._utils.defaults import PAPERS
from vitreous._utils.torch_state import preserves_torch_state
from vitreous.api.explain import explain, find_recipes, network_of
from vitreous.errors import InputError, MethodError
from vitreous.inputs.patch_geometry import plane
from vitreous.inputs.texts import TokenizedText, Word
from vitreous.models.dual_encoder import DualEncoder, SimilarityHead, TextScorer, UnitTower, find_dual_encoder
from vitreous.models.hf_models import LoadedTextModel
from vitreous.models.pixels import Images, find_pixels
from vitreous.text.explain import explain_pieces, explain_read, several_texts
from vitreous.text.explanation import TextExplanation

# Relative to the largest score; float32 sums of a few hundred products have smaller errors.
_LINEAR = 1e-3


@preserves_torch_state
def explain_words(
    model: Any, prompts: str | Sequence[str], images: Images, methods: str | Sequence[str] | None = None
) -> TextExplanation:
    """Explain which words of a prompt its similarity to an image comes from, through the text tower.

    Args:
        model: a model of images and texts, as ``explain`` takes it with a ``Prompt``.
        prompts: one or several.
        images: one or several; every prompt is explained for each of them.
        methods: spellings, as for ``explain_text``.

    Returns:
        Scores of every word piece of every prompt: (pieces,) for one image, (images, pieces) for several. ``logits``
        are logit scale x cosine (plus the logit bias) of every prompt with every image.

    Examples:
        >>> import vitreous
        >>> explanation = vitreous.explain_words(clip, "a photo of a cat", "demo.jpg", "decompx")
        >>> [word.text for word in explanation.words[0]]
        ['a', 'photo', 'of', 'a', 'cat']
    """
    recipes = find_recipes(PAPERS if methods is None else methods)
    dual = find_dual_encoder(model)
    read = _read(dual, several_texts(prompts))
    pixels = _pixels(dual, images)
    scorer = TextScorer(dual.text_tower, dual.embed_images(pixels), dual.scale, dual.bias, _names(images, len(pixels)))
    target = 0 if len(pixels) == 1 else [list(range(len(pixels)))] * len(read)
    return explain_pieces(_loaded(dual, scorer), read, recipes, target, optional=methods is None)


@dataclass(frozen=True, eq=False)
class PatchWordMap:
    """The relevance of every patch of an image with every word of a prompt.

    Attributes:
        scores: (patches, words); a word has the sum over its pieces.
        rest: the relevance of patches with special tokens and biases of the text tower, (patches,).
        words: the words.
        grid: rows and columns of patches.
        score: logit scale x cosine of image and prompt, plus the logit bias.
        method: the spelling of the method.
    """

    scores: Tensor
    rest: Tensor
    words: tuple[Word, ...]
    grid: tuple[int, int]
    score: float
    method: str

    @property
    def patches(self) -> Tensor:
        """The map of the whole prompt, (patches,): the sum over its words and the rest."""
        return self.scores.sum(dim=1) + self.rest

    def word(self, number: int) -> Tensor:
        """The map of one word, (rows, columns)."""
        return self.scores[:, number].view(self.grid)


@preserves_torch_state
def match_words(model: Any, image: Images, prompt: str, method: str = "decompx.skipplus") -> PatchWordMap:
    """Explain which patches of an image match which words of a prompt.

    Args:
        model: a model of images and texts.
        image: one image.
        prompt: one text.
        method: a method that is linear in what it explains, such as decompx, ixg, cat or attcat.

    Raises:
        MethodError: the method is not linear.

    Examples:
        >>> import vitreous
        >>> found = vitreous.match_words(clip, "demo.jpg", "a photo of a cat")
        >>> found.scores.shape == (found.grid[0] * found.grid[1], len(found.words))
        True
    """
    spelling = find_recipes(method)[0].spelling
    dual = find_dual_encoder(model)
    (read,) = _read(dual, [prompt])
    pixels = _pixels(dual, image)
    if len(pixels) != 1:
        raise InputError(f"match_words takes one image, not {len(pixels)}")
    text, embedding = dual.embed_texts([prompt])[0], dual.embed_images(pixels)[0]
    of_pieces = _shares_of_pieces(dual, read, spelling, len(text))
    scorer = _loaded(dual, TextScorer(dual.text_tower, embedding[None]))
    whole = explain_read(scorer, [read], find_recipes(spelling), 0)[0][0].scores[spelling]
    _check_linear(embedding @ of_pieces, whole, spelling)
    directions = torch.stack([of_pieces[:, _pieces_of(read, place)].sum(dim=1) for place in range(len(read.words))])
    directions = torch.cat([directions, (text - directions.sum(dim=0))[None], text[None]])
    head = SimilarityHead(dual.image_tower, directions, dual.scale)
    found = explain(_FromImages(head), pixels, spelling, target=[list(range(len(directions)))], outputs="value")
    maps = found.scores[spelling][0]
    _check_linear(maps[:-1].sum(dim=0), maps[-1], spelling)
    score = dual.scale * float(text @ embedding) + (dual.bias or 0.0)
    return PatchWordMap(maps[:-2].T.contiguous(), maps[-2], read.words, plane(found.grid), score, spelling)


class _FromImages(nn.Module):
    """A head whose only input are images."""

    def __init__(self, head: SimilarityHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(images)
        return scores


class _TextTowerModel(LoadedTextModel):
    """A text tower in the form that ``explain_text`` takes, with a reader of prompts."""

    @property
    def reader(self) -> Any:
        return self.tokenizer  # holds a reader of prompts


def _loaded(dual: DualEncoder, scorer: nn.Module) -> LoadedTextModel:
    names = getattr(scorer, "class_names", None)
    return _TextTowerModel(dual.name, network_of(scorer), dual.reader, names, "value")


def _read(dual: DualEncoder, prompts: Sequence[str]) -> list[TokenizedText]:
    return [dual.reader.fitted(prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]


def _pixels(dual: DualEncoder, images: Images) -> Tensor:
    model = dual.loaded(dual.image_tower)
    pixels, _ = find_pixels(model, dual.model, images)
    return pixels


def _names(images: Images, count: int) -> list[str]:
    """The names of images: those of their files, or their numbers."""
    given = [images] if isinstance(images, str | Path | Image.Image) else images
    paths = isinstance(given, Sequence) and all(isinstance(image, str | Path) for image in given)
    return [Path(image).name for image in given] if paths else [f"image {number}" for number in range(count)]  # type: ignore[arg-type]


def _pieces_of(read: TokenizedText, word: int) -> list[int]:
    return [place for place, piece in enumerate(read.pieces) if piece.word == word]


def _shares_of_pieces(dual: DualEncoder, read: TokenizedText, spelling: str, width: int) -> Tensor:
    """The contribution of every piece to every coordinate of the text's embedding, (width, pieces).

    One batch holds a copy of the text for every coordinate, and each copy explains its own coordinate.
    """
    tower = _loaded(dual, UnitTower(dual.text_tower))
    results, _, _ = explain_read(tower, [read] * width, find_recipes(spelling), torch.arange(width))
    return torch.stack([result.scores[spelling] for result in results])


def _check_linear(parts: Tensor, whole: Tensor, spelling: str) -> None:
    if float((parts - whole).abs().max()) > _LINEAR * float(whole.abs().max()):
        raise MethodError(
            f"{spelling} is not linear in what it explains, so that no relevance of a patch with a word follows from "
            "it; use decompx, ixg, cat or attcat"
        )
