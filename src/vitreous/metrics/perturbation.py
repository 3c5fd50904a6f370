"""What becomes of a model's answer while the pixels or patches that a map ranks are taken away or put in.

Curves have one value per ratio; they start at the unperturbed image or end there, depending on the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitreous.metrics.metric import Curve, Direction, Floats, Metric, MetricError, Weighted, finite, mean_of, whole

Convention = Literal["trapezoid", "mean"]
Quantity = Literal["hit", "probability", "drop", "difference"]

NINE = tuple(step / 10 for step in range(1, 10))
FROM_ZERO = (0.0, *NINE)
TO_ONE = (*NINE, 1.0)
ELEVEN = (0.0, *NINE, 1.0)

_IN_WORDS: dict[Quantity, str] = {
    "hit": "accuracy",
    "probability": "target's probability",
    "drop": "fall of the target's probability",
    "difference": "difference of two classes' outputs",
}
_TITLES: dict[Quantity, str] = {
    "hit": "accuracy",
    "probability": "probability",
    "drop": "fall of the probability",
    "difference": "f_A - f_B",
}
_PREFIXES = {
    "mif": "MIF",
    "lif": "LIF",
    "label": "true class",
    "class": "map of class A",
    "morf": "MoRF",
    "lerf": "LeRF",
    "road": "ROAD",
}


def hits(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """Say of logits (..., batch, classes) where the highest is the label's (batch,): 1 or 0, (..., batch).

    Examples:
        >>> from vitreous import metrics
        >>> metrics.hits([[2.0, 1.0], [0.0, 3.0]], labels=[0, 0]).tolist()
        [1.0, 0.0]
    """
    scores = finite(logits, "logits")
    right: Floats = (scores.argmax(axis=-1) == _labels(labels, scores)).astype(np.float64)
    return right


def probabilities(
    logits: ArrayLike,
    *,
    exclusive: bool = True,
    outputs: Literal["logits", "probabilities", "sigmoid"] | None = None,
) -> Floats:
    """Turn a model's outputs (..., classes) into probabilities.

    Args:
        logits: the outputs.
        exclusive: one class is right, so take the softmax over them; otherwise each is right or not, by its sigmoid.
        outputs: what they are, instead of ``exclusive``: ``logits`` get a softmax, ``sigmoid`` a sigmoid each, and
            ``probabilities`` stay what they are, but that 0 becomes the smallest number, so that it has a logarithm.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.probabilities([0.0, 0.0]).tolist()
        [0.5, 0.5]
        >>> metrics.probabilities([0.0, 0.0], outputs="sigmoid").tolist()
        [0.5, 0.5]
    """
    scores = finite(logits, "logits")
    kind = outputs or ("logits" if exclusive else "sigmoid")
    if kind == "probabilities":
        return np.maximum(scores, np.finfo(np.float32).tiny)
    if kind == "sigmoid":
        return np.exp(-np.logaddexp(0.0, -scores))
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def of_class(values: ArrayLike, classes: ArrayLike) -> Floats:
    """Take the value of each image's class from values (..., batch, classes) -> (..., batch).

    Examples:
        >>> from vitreous import metrics
        >>> metrics.of_class([[0.9, 0.1], [0.3, 0.7]], classes=[0, 1]).tolist()
        [0.9, 0.7]
    """
    scores = finite(values, "scores of classes")
    taken: Floats = np.take_along_axis(scores, _labels(classes, scores)[..., None], axis=-1)[..., 0]
    return taken


def _labels(classes: ArrayLike, scores: Floats) -> NDArray[np.int64]:
    """Take a class for everything that has scores (..., classes), or one for several as numpy broadcasts."""
    labels = whole(classes, "labels")
    if labels.min() < 0 or labels.max() >= scores.shape[-1]:
        raise MetricError(f"a label lies outside 0..{scores.shape[-1] - 1}")
    try:
        return np.broadcast_to(labels, scores.shape[:-1])
    except ValueError as error:
        raise MetricError(f"labels of shape {labels.shape} do not go with scores of shape {scores.shape}") from error


def drops(original: ArrayLike, perturbed: ArrayLike) -> Floats:
    """Say by how much each step's probability fell: p0 (...) - pk (..., steps).

    Examples:
        >>> from vitreous import metrics
        >>> metrics.drops(original=[1.0], perturbed=[[0.75, 0.5]]).tolist()
        [[0.25, 0.5]]
    """
    before, after = _pairs(original, perturbed)
    fallen: Floats = before - after
    return fallen


def _pairs(original: ArrayLike, perturbed: ArrayLike) -> tuple[Floats, Floats]:
    """p0 (..., 1) and pk (..., steps); numpy would also set every image's p0 against the pk of all others."""
    before, after = finite(original, "probabilities"), finite(perturbed, "probabilities")
    if after.shape[:-1] != before.shape or not after.ndim:
        raise MetricError(
            f"probabilities of shape {after.shape} are not those of every step for originals of shape {before.shape}"
        )
    return before[..., None], after


def change_of_highest(original: ArrayLike, perturbed: ArrayLike) -> Floats:
    """Say how the highest of the scores (..., classes) changed, whichever class has it.

    This is what the program of Chefer et al. (2021) keeps as difference of probabilities and of logits.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.change_of_highest(original=[[0.25, 0.75]], perturbed=[[0.5, 0.5]]).tolist()
        [-0.25]
    """
    change: Floats = finite(perturbed, "scores").max(axis=-1) - finite(original, "scores").max(axis=-1)
    return change


def aopc(original: ArrayLike, perturbed: ArrayLike, *, absolute: bool = False) -> Floats:
    """Average over the steps by how much the probability fell.

    The metric of [samek2017evaluating][].

    Args:
        original: p0, (...).
        perturbed: pk at every step, (..., steps).
        absolute: average |p0 - pk|, as AttCAT's program does, instead of p0 - pk.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.aopc(original=[1.0], perturbed=[[0.75, 0.5]]).tolist()
        [0.375]
    """
    fallen = drops(original, perturbed)
    mean: Floats = (np.abs(fallen) if absolute else fallen).mean(axis=-1)
    return mean


def log_odds(original: ArrayLike, perturbed: ArrayLike, *, inverted: bool = False) -> Floats:
    """Average over the steps the logarithm of pk / p0, or of p0 / pk where ``inverted`` (as SkipPLUS' program does).

    Args:
        original: p0, (...).
        perturbed: pk at every step, (..., steps).
        inverted: the opposite sign.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.log_odds(original=[0.5], perturbed=[[0.5, 0.25]]).round(4).tolist()
        [-0.3466]
    """
    before, after = _pairs(original, perturbed)
    if before.min() <= 0 or after.min() <= 0:
        raise MetricError("log-odds need probabilities above 0")
    mean: Floats = (np.log(after) - np.log(before)).mean(axis=-1)
    return -mean if inverted else mean


def curve_area(values: ArrayLike, ratios: Sequence[float], convention: Convention = "trapezoid") -> Floats:
    """Measure the area under curves (..., ratios), as a fraction: a curve of ones from 0 to 0.9 has 0.9, or mean 1.

    Examples:
        >>> from vitreous import metrics
        >>> float(metrics.curve_area([1.0, 0.5, 0.0], ratios=[0.0, 0.5, 1.0]))
        0.5
    """
    heights = finite(values, "a curve")
    if heights.shape[-1:] != (len(ratios),):
        raise MetricError(f"curves of shape {heights.shape} do not have one value for each of {len(ratios)} ratios")
    weighted: Floats = Weighted(area_weights(ratios, convention))(heights)
    return weighted


def area_weights(ratios: Sequence[float], convention: Convention) -> tuple[float, ...]:
    """Give the weight of every point of a curve in its area."""
    if convention not in get_args(Convention):
        raise MetricError(f"a curve's area is taken as {' or '.join(get_args(Convention))}, not as {convention!r}")
    if convention == "mean":
        if not ratios:
            raise MetricError("a mean needs at least one ratio")
        return (1 / len(ratios),) * len(ratios)
    places = np.asarray(ratios, dtype=np.float64)
    steps = np.diff(places)
    if len(places) < 2 or not (steps > 0).all():
        raise MetricError("a trapezoid needs at least two ratios in rising order")
    weights = (np.append(steps, 0.0) + np.insert(steps, 0, 0.0)) / 2
    return tuple(weights.tolist())


def curve_columns(prefix: str, quantity: Quantity, ratios: Sequence[float]) -> tuple[str, ...]:
    """Name the points of a curve: ``positive_hit_10``, ``positive_hit_20`` and so on, the ratios in percent."""
    return tuple(f"{prefix}{quantity}_{100 * ratio:.6g}" for ratio in ratios)


def curve_of(prefix: str, quantity: Quantity, ratios: Sequence[float]) -> Curve:
    """Describe the curve over the columns ``<prefix><quantity>_<percent>``."""
    words = [_PREFIXES.get(word, word) for word in prefix.split("_") if word]
    axis = "share kept (%)" if "insertion" in prefix else "share erased (%)"
    steps = tuple(round(100 * ratio, 9) for ratio in ratios)
    return Curve(", ".join([*words, _TITLES[quantity]]), axis, steps, curve_columns(prefix, quantity, ratios))


def curve_metric(
    curves: Sequence[Curve],
    weights: Sequence[float],
    bounds: tuple[float, float],
    name: str,
    direction: Direction,
    description: str,
) -> Metric:
    """Make Σ weight x mean(column) over the columns of some curves; ``bounds`` are those of one column."""
    low = sum(min(weight * bound for bound in bounds) for weight in weights)
    high = sum(max(weight * bound for bound in bounds) for weight in weights)
    # Rounded, because sums of tenths are inexact in floating point.
    range_ = (round(low, 9), round(high, 9))
    columns = tuple(column for curve in curves for column in curve.columns)
    return Metric(name, direction, range_, description, columns, Weighted(tuple(weights)), tuple(curves))


def accuracy_auc(
    prefix: str,
    ratios: Sequence[float] = FROM_ZERO,
    convention: Convention = "trapezoid",
    *,
    direction: Direction,
    name: str | None = None,
) -> Metric:
    """Make the area under the mean accuracy curve, in percent.

    Args:
        prefix: of the columns ``<prefix>hit_<percent>``.
        ratios: the points. Papers differ: nine points and their ``mean``, or ten with the 0% point and a ``trapezoid``
            over the ratio from 0 to 0.9, so that 90 is the most.
        convention: how the points become one number.
        direction: ``lower`` where the most relevant goes first, ``higher`` where the least relevant does.
        name: what a table calls it.
    """
    name = name or f"AUC {prefix.rstrip('_')}".rstrip()
    return _area(prefix, "hit", ratios, convention, direction, name)


def probability_auc(
    prefix: str,
    ratios: Sequence[float] = ELEVEN,
    convention: Convention = "mean",
    *,
    direction: Direction,
    name: str | None = None,
) -> Metric:
    """Make the area under the mean curve of the target's probability, in percent; AGCAM takes the mean of 11 points.

    The arguments are those of ``accuracy_auc``, the columns are ``<prefix>probability_<percent>``.
    """
    name = name or f"probability AUC {prefix.rstrip('_')}".rstrip()
    return _area(prefix, "probability", ratios, convention, direction, name)


def _area(
    prefix: str,
    quantity: Quantity,
    ratios: Sequence[float],
    convention: Convention,
    direction: Direction,
    name: str,
) -> Metric:
    weights = [100 * weight for weight in area_weights(ratios, convention)]
    curve = curve_of(prefix, quantity, ratios)
    description = f"{_convention_in_words(ratios, convention)} of the curve of the {_IN_WORDS[quantity]}, in percent."
    bounds = (-1.0 if quantity == "drop" else 0.0, 1.0)
    return curve_metric([curve], weights, bounds, name, direction, description)


def _convention_in_words(ratios: Sequence[float], convention: Convention) -> str:
    if convention == "mean":
        return f"Mean of the {len(ratios)} points"
    return f"Area (trapezoid over the ratio from {ratios[0]:g} to {ratios[-1]:g})"


def area_between_curves(
    quantity: Literal["hit", "probability"] = "probability", ratios: Sequence[float] = ELEVEN
) -> Metric:
    """Make AGCAM's area between the perturbation curves: negative - positive, in percent."""
    weights = [100 * weight for weight in area_weights(ratios, "mean")]
    curves = [curve_of(prefix, quantity, ratios) for prefix in ("negative_", "positive_")]
    description = "Curve of the least relevant first minus curve of the most relevant first, averaged, in percent."
    both = [*weights, *(-weight for weight in weights)]
    return curve_metric(curves, both, (0.0, 1.0), "ABPC", "higher", description)


def insertion_accuracy(*, ratios: Sequence[float] = TO_ONE) -> Metric:
    """Make SkipPLUS' area under the accuracy while the top patches are put in, 10% to 100%, in percent."""
    return accuracy_auc("insertion_", ratios, direction="higher", name="insertion accuracy")


def deletion_accuracy(*, ratios: Sequence[float] = FROM_ZERO, complement: bool = True) -> Metric:
    """Make SkipPLUS' area under the accuracy while the top patches are dropped, 0% to 90%, as 100 - x."""
    plain = accuracy_auc("deletion_", ratios, direction="lower", name="deletion accuracy (100 - x)")
    return _complement(plain) if complement else plain


def insertion_aopc(*, ratios: Sequence[float] = TO_ONE) -> Metric:
    """Make SkipPLUS' area under the fall p0 - pk of the target's probability while patches are put in, as 100 - x."""
    return _complement(_area("insertion_", "drop", ratios, "trapezoid", "lower", "insertion AOPC (100 - x)"))


def deletion_aopc(*, ratios: Sequence[float] = FROM_ZERO) -> Metric:
    """Make SkipPLUS' area under the fall p0 - pk of the target's probability while patches are dropped, in percent."""
    return _area("deletion_", "drop", ratios, "trapezoid", "higher", "deletion AOPC")


def _complement(metric: Metric) -> Metric:
    """Turn x in percent into 100 - x, which is better the other way round."""
    assert isinstance(metric.combine, Weighted)
    combine = Weighted(tuple(-weight for weight in metric.combine.weights), 100 - metric.combine.offset)
    low, high = metric.range
    description = f"100 minus: {metric.description[0].lower()}{metric.description[1:]}"
    direction: Direction = "higher" if metric.direction == "lower" else "lower"
    return replace(metric, direction=direction, range=(100 - high, 100 - low), description=description, combine=combine)


def mif(*, ratios: Sequence[float] = FROM_ZERO) -> Metric:
    """Make the area under the accuracy while the most influential patches are dropped first (LibraGrad)."""
    return accuracy_auc("mif_", ratios, direction="lower", name="MIF")


def lif(*, ratios: Sequence[float] = FROM_ZERO) -> Metric:
    """Make the area under the accuracy while the least influential patches are dropped first (LibraGrad)."""
    return accuracy_auc("lif_", ratios, direction="higher", name="LIF")


def contrast_deletion(*, ratios: Sequence[float] = FROM_ZERO) -> Metric:
    """Make the area under f_A - f_B while the patches that speak most for A rather than B are dropped."""
    return _difference_area("deletion_", ratios, "lower", "deletion f_A - f_B")


def contrast_insertion(*, ratios: Sequence[float] = TO_ONE) -> Metric:
    """Make the area under f_A - f_B while the patches that speak most for A rather than B are put in."""
    return _difference_area("insertion_", ratios, "higher", "insertion f_A - f_B")


def contrast_deletion_gain(*, ratios: Sequence[float] = FROM_ZERO) -> Metric:
    """Make by how much lower f_A - f_B is when patches are dropped by the contrast's map than by the class's."""
    return _difference_gain("deletion_", ratios, ("class_", ""))


def contrast_insertion_gain(*, ratios: Sequence[float] = TO_ONE) -> Metric:
    """Make by how much higher f_A - f_B is when patches are put in by the contrast's map than by the class's."""
    return _difference_gain("insertion_", ratios, ("", "class_"))


def _difference_area(prefix: str, ratios: Sequence[float], direction: Direction, name: str) -> Metric:
    words = f"{_convention_in_words(ratios, 'trapezoid')} of the curve of the {_IN_WORDS['difference']}."
    weights = area_weights(ratios, "trapezoid")
    curve = curve_of(prefix, "difference", ratios)
    return curve_metric([curve], weights, (-np.inf, np.inf), name, direction, words)


def _difference_gain(prefix: str, ratios: Sequence[float], prefixes: tuple[str, str]) -> Metric:
    """Make the area of the first curve minus that of the second."""
    weights = area_weights(ratios, "trapezoid")
    curves = [curve_of(f"{which}{prefix}", "difference", ratios) for which in prefixes]
    both = [*weights, *(-weight for weight in weights)]
    description = (
        "Area between the curves of f_A - f_B with patches in the order of the contrast's map and of the map of "
        "class A; 0 for a method whose map does not depend on the target."
    )
    return curve_metric(
        curves, both, (-np.inf, np.inf), f"{prefix.rstrip('_')} gain over class map", "higher", description
    )


def mean_aopc(prefix: str = "", name: str = "AOPC", *, most_relevant_first: bool = True) -> Metric:
    """Make the mean over images of ``aopc``, kept in the column ``<prefix>aopc``."""
    direction: Direction = "higher" if most_relevant_first else "lower"
    description = "Mean over images or texts and steps of the fall of the target's probability."
    return mean_of(f"{prefix}aopc", name, direction, (-1.0, 1.0), description)


def mean_log_odds(
    prefix: str = "", name: str = "LOdds", *, most_relevant_first: bool = True, inverted: bool = False
) -> Metric:
    """Make the mean over images of ``log_odds``, kept in the column ``<prefix>log_odds``."""
    direction: Direction = "higher" if most_relevant_first == inverted else "lower"
    description = f"Mean over images or texts and steps of log({'p0 / pk' if inverted else 'pk / p0'}) of the target."
    return mean_of(f"{prefix}log_odds", name, direction, (-np.inf, np.inf), description)


METRICS = (
    accuracy_auc("positive_", direction="lower"),
    accuracy_auc("negative_", direction="higher"),
    accuracy_auc("positive_", NINE, "mean", direction="lower", name="mean of nine positive"),
    accuracy_auc("negative_", NINE, "mean", direction="higher", name="mean of nine negative"),
    probability_auc("positive_", direction="lower"),
    probability_auc("negative_", direction="higher"),
    area_between_curves(),
    mean_aopc(),
    mean_log_odds(),
    insertion_accuracy(),
    deletion_accuracy(),
    insertion_aopc(),
    deletion_aopc(),
    mif(),
    lif(),
    contrast_deletion(),
    contrast_insertion(),
    contrast_deletion_gain(),
    contrast_insertion_gain(),
)
