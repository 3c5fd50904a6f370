"""Explanations of text: token-F1 against human rationales, comprehensiveness and sufficiency (DeYoung et al., 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from vitreous.metrics.metric import (
    Curve,
    Floats,
    Metric,
    MetricError,
    Weighted,
    finite,
    mean_of,
    same_shape,
    whole,
    yes_or_no,
)
from vitreous.metrics.perturbation import aopc

GRADTOKEN_TOP = tuple(range(10, 81, 10))
OLDER_TOP = tuple(range(5, 81, 5))


def word_scores(piece_scores: ArrayLike, word_of_piece: ArrayLike, *, clamped: bool = True) -> Floats:
    """Score each word by the highest of its word pieces.

    Args:
        piece_scores: relevance of every piece, (pieces,).
        word_of_piece: index of the word each piece belongs to, -1 for pieces of no word, (pieces,).
        clamped: take 0 for words whose score is below 0, as is done before they are held against a rationale.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.word_scores([0.1, 0.9, -0.5], word_of_piece=[0, 0, 1]).tolist()
        [0.9, 0.0]
    """
    scores, words = finite(piece_scores, "scores of word pieces"), whole(word_of_piece, "words of pieces")
    same_shape(scores, words, "scores of word pieces and their words")
    best = np.full(int(words.max()) + 1, 0.0 if clamped else -np.inf)
    np.maximum.at(best, words[words >= 0], scores[words >= 0])
    return best


def token_f1(scores: ArrayLike, rationale: ArrayLike, top: int) -> float:
    """Compare the ``top`` highest scores with a human rationale by F1; of equal scores the earlier token is taken.

    The metric of [deyoung2020eraser][].

    NaN where the rationale is empty. A text with fewer tokens than ``top`` is taken whole.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.token_f1([0.9, 0.1, 0.8], rationale=[1, 0, 0], top=1)
        1.0
    """
    values, wanted = finite(scores, "scores of tokens"), yes_or_no(rationale, "a rationale")
    same_shape(values, wanted, "scores of tokens and their rationale")
    if values.ndim != 1:
        raise MetricError(f"scores of tokens are one row, not of shape {values.shape}")
    if int(top) != top or top < 1:
        raise MetricError(f"a whole number of tokens is needed, at least one, not {top}")
    if not wanted.any():
        return float("nan")
    chosen = np.argsort(-values, kind="stable")[: int(top)]
    return float(2 * wanted[chosen].sum() / (len(chosen) + wanted.sum()))


def comprehensiveness(original: ArrayLike, without: ArrayLike) -> Floats:
    """Average over the shares of tokens by how much the probability falls without the rationale, (..., shares).

    The metric of [deyoung2020eraser][].

    Examples:
        >>> from vitreous import metrics
        >>> metrics.comprehensiveness(original=[1.0], without=[[0.5, 0.25]]).tolist()
        [0.625]
    """
    return aopc(original, without)


def sufficiency(original: ArrayLike, alone: ArrayLike) -> Floats:
    """Average over the shares of tokens by how much the probability falls with the rationale alone, (..., shares).

    The metric of [deyoung2020eraser][].

    Examples:
        >>> from vitreous import metrics
        >>> metrics.sufficiency(original=[1.0], alone=[[0.75, 1.0]]).tolist()
        [0.125]
    """
    return aopc(original, alone)


def token_f1_columns(tops: Sequence[int] = GRADTOKEN_TOP) -> tuple[str, ...]:
    """Name the token-F1 of several sizes: ``token_f1_10`` and so on."""
    return tuple(f"token_f1_{top}" for top in tops)


def average_token_f1(tops: Sequence[int] = GRADTOKEN_TOP, name: str = "token-F1") -> Metric:
    """Make the mean over texts and sizes of the token-F1."""
    if not tops:
        raise MetricError("a mean needs at least one number of tokens")
    weights = (1 / len(tops),) * len(tops)
    sizes = f"{len(tops)} sizes from {tops[0]} to {tops[-1]}"
    description = f"Mean F1 of the highest tokens against the rationale, over {sizes}."
    columns = token_f1_columns(tops)
    curve = Curve("token-F1", "words taken, the highest first", tuple(map(float, tops)), columns)
    return Metric(name, "higher", (0.0, 1.0), description, columns, Weighted(weights), (curve,))


def mean_comprehensiveness() -> Metric:
    """Make the mean of ``comprehensiveness``, kept in ``comprehensiveness``."""
    description = "Mean fall of the target's probability without the rationale."
    return mean_of("comprehensiveness", "comprehensiveness", "higher", (-1.0, 1.0), description)


def mean_sufficiency() -> Metric:
    """Make the mean of ``sufficiency``, kept in ``sufficiency``."""
    description = "Mean fall of the target's probability with the rationale alone."
    return mean_of("sufficiency", "sufficiency", "lower", (-1.0, 1.0), description)


METRICS = (average_token_f1(), mean_comprehensiveness(), mean_sufficiency())
