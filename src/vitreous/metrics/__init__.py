"""Metrics of explanations: pure functions on arrays, and numbers over a data set with their direction and range."""

from vitreous.metrics import faithfulness, localisation, perturbation, sanity, segmentation, text
from vitreous.metrics.faithfulness import (
    completeness_error,
    complexity_rise,
    histogram_entropy,
    salience_coefficient,
    salience_groups,
    single_deletion_correlation,
)
from vitreous.metrics.localisation import energy_in_mask, pointing_game, rank_accuracy
from vitreous.metrics.metric import Curve, Direction, Metric, MetricError, min_max, prefixed, row
from vitreous.metrics.perturbation import (
    aopc,
    change_of_highest,
    curve_area,
    drops,
    hits,
    log_odds,
    of_class,
    probabilities,
)
from vitreous.metrics.sanity import (
    average_sensitivity,
    complexity,
    effective_complexity,
    faithfulness_correlation,
    max_sensitivity,
    pearson,
    relative_changes,
    sparseness,
    spearman,
    structural_similarity,
)
from vitreous.metrics.segmentation import (
    above_mean,
    above_threshold,
    average_precision,
    count_at_thresholds,
    count_classes,
    count_pixels,
    mask_average_precision,
    two_class_average_precision,
)
from vitreous.metrics.text import comprehensiveness, sufficiency, token_f1, word_scores

__all__ = [
    "Curve",
    "Direction",
    "Metric",
    "MetricError",
    "above_mean",
    "above_threshold",
    "aopc",
    "average_precision",
    "average_sensitivity",
    "change_of_highest",
    "completeness_error",
    "complexity",
    "complexity_rise",
    "comprehensiveness",
    "count_at_thresholds",
    "count_classes",
    "count_pixels",
    "curve_area",
    "drops",
    "effective_complexity",
    "energy_in_mask",
    "faithfulness_correlation",
    "histogram_entropy",
    "hits",
    "list_metrics",
    "log_odds",
    "mask_average_precision",
    "max_sensitivity",
    "min_max",
    "of_class",
    "pearson",
    "pointing_game",
    "prefixed",
    "probabilities",
    "rank_accuracy",
    "relative_changes",
    "row",
    "salience_coefficient",
    "salience_groups",
    "single_deletion_correlation",
    "sparseness",
    "spearman",
    "structural_similarity",
    "sufficiency",
    "token_f1",
    "two_class_average_precision",
    "word_scores",
]

_MODULES = (segmentation, localisation, perturbation, faithfulness, sanity, text)


def list_metrics() -> dict[str, Metric]:
    """Return every metric in its usual form, by name: the ``METRICS`` of all modules.

    Examples:
        >>> from vitreous import metrics
        >>> {name: metric.direction for name, metric in metrics.list_metrics().items() if name in ("mIoU", "MIF")}
        {'mIoU': 'higher', 'MIF': 'lower'}
    """
    return {metric.name: metric for module in _MODULES for metric in module.METRICS}
