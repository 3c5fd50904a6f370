"""All metrics by name, with their direction and range as data."""

from __future__ import annotations

from collections.abc import Iterable

from vitreous.metrics import concentration, correlation, localisation, perturbation, randomisation, sensitivity, text
from vitreous.metrics import segmentation as seg
from vitreous.metrics import thresholds as thr
from vitreous.metrics.metric import Metric

VOC_CLASSES = 21


def list_metrics() -> dict[str, Metric]:
    """Give every metric in its usual form, by name.

    Examples:
        >>> from vitreous import metrics
        >>> {name: metric.direction for name, metric in metrics.list_metrics().items() if name in ("mIoU", "MIF")}
        {'mIoU': 'higher', 'MIF': 'lower'}
    """
    everything: Iterable[Metric] = (*_segmentation(), *_perturbation(), *_others())
    return {metric.name: metric for metric in everything}


def _segmentation() -> tuple[Metric, ...]:
    return (
        seg.pixel_accuracy(),
        seg.mean_iou(),
        seg.foreground_iou(),
        seg.mean_average_precision(),
        seg.two_class_map(),
        seg.classes_pixel_accuracy(VOC_CLASSES, name="pixel accuracy (21 classes)"),
        seg.classes_mean_iou(VOC_CLASSES, name="mIoU (21 classes)"),
        thr.best_threshold(seg.pixel_accuracy),
        thr.best_threshold_miou(),
        thr.held_out_threshold(seg.pixel_accuracy),
        thr.held_out_threshold_miou(),
        localisation.pointing_accuracy(),
        localisation.mean_energy_in_mask(),
        localisation.mean_rank_accuracy(),
    )


def _perturbation() -> tuple[Metric, ...]:
    nine = perturbation.NINE
    return (
        perturbation.accuracy_auc("positive_", direction="lower"),
        perturbation.accuracy_auc("negative_", direction="higher"),
        perturbation.accuracy_auc("positive_", nine, "mean", direction="lower", name="mean of nine positive"),
        perturbation.accuracy_auc("negative_", nine, "mean", direction="higher", name="mean of nine negative"),
        perturbation.probability_auc("positive_", direction="lower"),
        perturbation.probability_auc("negative_", direction="higher"),
        perturbation.area_between_curves(),
        perturbation.mean_aopc(),
        perturbation.mean_log_odds(),
        perturbation.insertion_accuracy(),
        perturbation.deletion_accuracy(),
        perturbation.insertion_aopc(),
        perturbation.deletion_aopc(),
        perturbation.mif(),
        perturbation.lif(),
        correlation.mean_faithfulness_correlation(),
    )


def _others() -> tuple[Metric, ...]:
    return (
        sensitivity.mean_max_sensitivity(),
        sensitivity.mean_average_sensitivity(),
        randomisation.mean_randomisation_spearman(),
        randomisation.mean_randomisation_ssim(),
        concentration.mean_sparseness(),
        concentration.mean_complexity(),
        concentration.mean_effective_complexity(),
        text.average_token_f1(),
        text.mean_comprehensiveness(),
        text.mean_sufficiency(),
    )
