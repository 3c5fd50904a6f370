"""Numbers that papers print for a protocol: never rows among own results, always a table of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MISSING = "-"
_TOKENTM = "Wu et al., Token Transformation Matters (TokenTM), CVPR 2024"
_GRADTOKEN = "Cheng et al., GradToken, Neural Networks 2025"
_TRANSATTR = "Chefer et al., Transformer Interpretability Beyond Attention Visualization, CVPR 2021"
_GAE = "Chefer et al., Generic Attention-model Explainability, ICCV 2021"
_ROLLOUT = "Abnar and Zuidema, Quantifying Attention Flow in Transformers, ACL 2020"
_AGCAM = "Leem and Seo, Attention Guided CAM, AAAI 2024"
_VITCX = "Xie et al., ViT-CX, IJCAI 2023"

_SEGMENTATION = (
    (_TOKENTM, "DeiT", "TokenTM", (81.79, 86.45, 64.22)),
    (_TOKENTM, "ViT-B", "TokenTM", (78.22, 85.69, 60.29)),
    (_AGCAM, None, "AGCAM", (81.15, 87.77, 63.70)),
    (_TRANSATTR, None, "TransAttr", (79.70, 86.03, 61.95)),
    (_GAE, "DeiT", "GAE", (79.05, 85.71, 61.56)),
    (_ROLLOUT, "ViT-B", "Rollout", (73.54, 84.76, 55.42)),
    (_ROLLOUT, "DeiT", "Rollout", (59.01, 73.76, 39.43)),
)
_BEST_THRESHOLD = ((_GRADTOKEN, "ViT-B", "GradToken", (84.51, 86.10, 68.24)),)
# Of the predicted class.
_PERTURBATION = (
    (_TOKENTM, None, "TokenTM", (15.75, 58.12)),
    (_GRADTOKEN, None, "GradToken", (15.97, 58.37)),
    (_VITCX, None, "ViT-CX", (14.78, 55.86)),
    (_GAE, None, "GAE", (15.88, 57.53)),
    (_TRANSATTR, None, "TransAttr", (17.03, 54.16)),
    (_ROLLOUT, None, "Rollout", (20.05, 53.10)),
)
_TABLES = (
    ("chefer-2021-segmentation", "ImageNet-Segmentation", ("pixel accuracy", "mAP", "mIoU"), _SEGMENTATION),
    (
        "gradtoken-segmentation",
        "ImageNet-Segmentation",
        ("pixel accuracy (best threshold)", "mAP", "mIoU (best threshold)"),
        _BEST_THRESHOLD,
    ),
    ("chefer-2021-perturbation", "ImageNet", ("AUC positive", "AUC negative"), _PERTURBATION),
)


@dataclass(frozen=True)
class PublishedResult:
    """One number of a paper.

    Attributes:
        protocol: the protocol here that it comes nearest to.
        paper: the paper that proposes the method; the number may have been printed in a later comparison.
        model: as far as it is known.
        data: the data set that it was measured on.
        method: as the papers call it.
        metric: as the metric here is called.
        value: as printed, in percent.
    """

    protocol: str
    paper: str
    model: str | None
    data: str
    method: str
    metric: str
    value: float


PUBLISHED = tuple(
    PublishedResult(protocol, paper, model, data, method, metric, value)
    for protocol, data, metrics, lines in _TABLES
    for paper, model, method, values in lines
    for metric, value in zip(metrics, values, strict=True)
)


def published_results(protocol: str) -> tuple[PublishedResult, ...]:
    """Give what papers print for a protocol; nothing where no number is known."""
    return tuple(result for result in PUBLISHED if result.protocol == protocol)


def published_title(results: Sequence[PublishedResult]) -> str:
    """Say what others' results are, and on which data set: own results may be of another one."""
    return f"Published by others, not measured here (percent), on {published_data(results)}"


def published_data(results: Sequence[PublishedResult]) -> str:
    """Name the data set that others measured on."""
    return ", ".join(dict.fromkeys(result.data for result in results))


def published_rows(results: Sequence[PublishedResult]) -> tuple[list[str], list[list[str]]]:
    """Arrange others' results with one line per method, model and paper."""
    metrics = list(dict.fromkeys(result.metric for result in results))
    lines: dict[tuple[str, str | None, str], dict[str, str]] = {}
    for result in results:
        numbers = lines.setdefault((result.method, result.model, result.paper), {})
        numbers[result.metric] = f"{result.value:.2f}"
    rows = [
        [method, model or _MISSING, *(numbers.get(metric, _MISSING) for metric in metrics), paper]
        for (method, model, paper), numbers in lines.items()
    ]
    return ["method", "model", *metrics, "method's paper"], rows
