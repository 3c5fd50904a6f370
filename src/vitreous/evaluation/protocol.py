"""A protocol: the evaluation of a paper as data, with the numbers that papers print for it.

Published numbers are never rows among own results, always a table of their own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vitreous.datasets.dataset import Things
from vitreous.evaluation.tasks.task import Purpose, Task
from vitreous.methods.spelling import parse, plus_from_every_layer
from vitreous.metrics.metric import Metric

Resize = Literal["squash", "model"]


@dataclass(frozen=True)
class Sweep:
    """Rows that depend on how many blocks a model has.

    Attributes:
        template: A spelling; ``{number}`` stands for a block or a count of blocks.
        over: ``blocks``: 0 to depth - 1; ``quarters``: a quarter, half, three quarters and all of the depth, rounded
            up.
    """

    template: str
    over: Literal["blocks", "quarters"]

    def spellings(self, depth: int) -> list[str]:
        """The rows for a model of ``depth`` blocks."""
        quarters = [math.ceil(depth * quarter / 4) for quarter in (1, 2, 3, 4)]
        numbers = range(depth) if self.over == "blocks" else dict.fromkeys(quarters)
        return [self.template.format(number=number) for number in numbers]


@dataclass(frozen=True)
class Protocol:
    """A named evaluation.

    Attributes:
        name: Its name.
        title: One line on what it measures.
        paper: Where it was published.
        version: Raised whenever a release changes numbers.
        tasks: What is measured; all of them on images, or all on texts.
        resize: ``squash``: a image is resized to the model's input size and nothing is cropped; ``model``: resized and
            cropped as the model's own preprocessing does. Size, interpolation, mean and standard deviation are always
            the model's.
        methods: The rows, where the protocol fixes them; otherwise they are the caller's.
        sweeps: Further rows, which depend on the model's depth.
        start_layers: Every row becomes one row for each layer that PLUS may start at.
        notes: What was decided where the paper leaves it open, one sentence each.
        mosaic: Photos stand in mosaics of different classes with so many cells in each direction, and the mask is the
            photo's own cell; None for photos as they are.
        mosaic_classes: How many classes a mosaic shows, each in equally many cells, the mask being all cells of the
            photo's class; None for as many as there are cells.
        prompt: A text with {} for the name of a class: the model is a dual encoder, and its outputs are the scores of
            the image with the prompts of all classes; None for a classifier.
    """

    name: str
    title: str
    paper: str
    version: int
    tasks: tuple[Task[Any, Any], ...]
    resize: Resize = "squash"
    methods: tuple[str, ...] | None = None
    sweeps: tuple[Sweep, ...] = ()
    start_layers: bool = False
    notes: tuple[str, ...] = ()
    mosaic: int | None = None
    mosaic_classes: int | None = None
    prompt: str | None = None

    @property
    def reads(self) -> Things:
        """What it is measured on."""
        return self.tasks[0].reads

    @property
    def takes_volumes(self) -> bool:
        """Whether it can be measured on volumes and clips as well."""
        return self.reads == "photos" and self.mosaic is None and all(task.volumes for task in self.tasks)

    @property
    def purpose(self) -> Purpose:
        """The purpose of its first task: localisation, faithfulness or another."""
        return self.tasks[0].purpose

    def spellings(self, requested: Sequence[str], depth: int) -> list[str]:
        """What is really evaluated on a model of ``depth`` blocks.

        Ignored if the protocol fixes its rows.

        Raises:
            MethodError: a spelling is wrong, or a method has no layers to start at.
        """
        rows = list(requested if self.methods is None else self.methods)
        rows += [spelling for sweep in self.sweeps for spelling in sweep.spellings(depth)]
        if self.start_layers:
            rows = [started for spelling in rows for started in plus_from_every_layer(spelling, depth)]
        # By spelling, for without surrounding blanks.
        return list(dict.fromkeys(parse(spelling).spelling for spelling in rows))

    def metrics(self) -> tuple[Metric, ...]:
        """All numbers that it ends in."""
        return tuple(dict.fromkeys(metric for task in self.tasks for metric in task.metrics))

    def settings(self) -> dict[str, Any]:
        """Every choice as JSON values; they are part of a run's key."""
        chosen = {
            "protocol": self.name,
            "version": self.version,
            **({"resize": self.resize} if self.reads == "photos" else {"reads": "texts", "long texts": "cut"}),
            **({} if self.mosaic is None else {"mosaic": self.mosaic}),
            **({} if self.mosaic_classes is None else {"mosaic_classes": self.mosaic_classes}),
            **({} if self.prompt is None else {"prompt": self.prompt}),
            "methods": self.methods,
            "sweeps": [asdict(sweep) for sweep in self.sweeps],
            "start_layers": self.start_layers,
            "tasks": [task.settings() for task in self.tasks],
        }
        settings: dict[str, Any] = json.loads(json.dumps(chosen))  # tuples become lists, as they would in a file
        return settings


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
