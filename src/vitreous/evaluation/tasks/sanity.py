"""Sanity checks of maps: model randomisation, sensitivity, concentration and faithfulness correlation."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitreous._utils.torch_state import float64_array, in_float64
from vitreous.api.explain import explain_again
from vitreous.architecture import Block
from vitreous.architecture.survey import trace_model
from vitreous.architecture.trace import tensors_in
from vitreous.evaluation.tasks.patch_masking import patch_scores
from vitreous.evaluation.tasks.pixel_masking import Filling, fill_of
from vitreous.evaluation.tasks.task import (
    EXPLAINED_TOGETHER,
    Case,
    Explained,
    ImageBatch,
    ImageTask,
    Picture,
    Values,
    explained_class,
    generator_of,
    seed_of,
)
from vitreous.methods.perturbation import patch_of_pixel
from vitreous.metrics.metric import Floats, Metric
from vitreous.metrics.sanity import (
    complexity,
    faithfulness_correlation,
    max_sensitivity,
    mean_complexity,
    mean_faithfulness_correlation,
    mean_max_sensitivity,
    mean_randomisation_spearman,
    mean_sparseness,
    random_subsets,
    sparseness,
    spearman,
)

# Parts of a model that are randomised one after the other, the earlier ones staying random.
STAGES = ("head", "top quarter", "top half", "top three quarters", "all blocks", "everything")


def randomised_models(batch: ImageBatch, stages: Sequence[str], seed: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield one copy of the model, more random at every stage; use it before the next stage is requested."""
    parts = _parts(batch)
    network = copy.deepcopy(batch.model.model)
    parameters = dict(network.named_parameters())
    done: set[str] = set()
    for stage in STAGES[: max(map(STAGES.index, stages)) + 1]:
        for name in parts[stage] - done:
            randomise(parameters[name], generator_of(name, str(seed)))
        done |= parts[stage]
        if stage in stages:
            yield stage, network


def randomise(parameter: Tensor, generator: torch.Generator) -> None:
    """Draw a parameter anew, normally distributed with the mean and the spread that it has."""
    with torch.no_grad():
        values = in_float64(parameter)
        spread = values.std() if values.numel() > 1 else values.abs().mean()
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(values.device)
        parameter.copy_(values.mean() + spread * noise)


def _parts(batch: ImageBatch) -> dict[str, set[str]]:
    """The names of the parameters that belong to each stage."""
    network, images = batch.model.model, batch.images[:1]
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    trace, blocks = trace_model(network, images), batch.runner.architecture.blocks
    used = [
        {names[id(part)] for part in tensors_in((step.args, step.kwargs)) if id(part) in names} for step in trace.steps
    ]

    def of_block(block: Block) -> set[str]:
        """What the block's module holds, where it is one, and what its steps use."""
        held = () if block.module is None else block.module.parameters()
        return {names[id(each)] for each in held}.union(*used[block.input.step + 1 : block.output.step + 1])

    def top(quarters: int) -> set[str]:
        count = math.ceil(len(blocks) * quarters / 4)
        return set().union(*map(of_block, blocks[len(blocks) - count :]))

    last = blocks[-1].output.step
    behind = [call.module for call in trace.calls if call.first > last]
    head = {names[id(each)] for module in behind for each in module.parameters(recurse=False)}.union(*used[last + 1 :])
    return {
        "head": head - top(4),
        "top quarter": top(1),
        "top half": top(2),
        "top three quarters": top(3),
        "all blocks": top(4),
        "everything": set(names.values()),
    }


@dataclass(frozen=True)
class MapTask(ImageTask):
    """A task about the map of one class.

    Attributes:
        explained: The class whose map is measured; the model's own answer on the untouched image.
    """

    explained: Explained = "predicted"

    def targets(self, picture: Picture) -> tuple[int, ...]:
        return (explained_class(picture, self.explained),)

    def map_of(self, batch: ImageBatch, case: Case) -> Floats:
        """The map of a case, flat."""
        return float64_array(self._raw(batch, case).flatten())

    def _raw(self, batch: ImageBatch, case: Case) -> Tensor:
        return batch.map_of(case, explained_class(batch.pictures[case.image], self.explained))

    def other_maps(
        self, batch: ImageBatch, cases: Sequence[Case], network: nn.Module, images: Tensor
    ) -> Iterator[tuple[Case, Floats]]:
        """Maps of the same cases and classes from another network or for other images, one for each image."""
        methods = list(dict.fromkeys(case.method for case in cases))
        wanted = sorted({case.image for case in cases})
        model = replace(batch.model, model=network)
        for first in range(0, len(wanted), EXPLAINED_TOGETHER):
            part = wanted[first : first + EXPLAINED_TOGETHER]
            targets = [explained_class(batch.pictures[image], self.explained) for image in part]
            scores = explain_again(model, images[part], methods, target=targets).scores
            for case in cases:
                if case.image in part:
                    yield case, float64_array(scores[case.method][part.index(case.image)])


@dataclass(frozen=True)
class Randomisation(MapTask):
    """Rank correlation of a map with that of the model with random weights: a map that stays does not show the model.

    Attributes:
        stages: Which parts are random, from the top down; earlier ones stay random.
        weights: What a parameter becomes.
        seed: Of the random weights, together with the parameter's name.
    """

    kind: ClassVar[str] = "model randomisation"

    stages: tuple[str, ...] = STAGES
    weights: Literal["normal, with the mean and the spread of each parameter"] = (
        "normal, with the mean and the spread of each parameter"
    )
    seed: int = 0

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(self._metric(stage) for stage in self.stages)

    def _metric(self, stage: str) -> Metric:
        prefix = f"{stage.replace(' ', '_')}_"
        return mean_randomisation_spearman(prefix, f"randomisation Spearman, {stage}")

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        values: dict[Case, Values] = {case: {} for case in cases}
        for stage, network in randomised_models(batch, self.stages, self.seed):
            for case, other in self.other_maps(batch, cases, network, batch.images):
                finite = bool(np.isfinite(other).all())
                similarity = spearman(self.map_of(batch, case), other) if finite else float("nan")
                values[case] |= self._metric(stage).row(similarity)
        return [values[case] for case in cases]


@dataclass(frozen=True)
class Sensitivity(MapTask):
    """The largest relative change of a map when noise is added to the image; the explained class stays.

    Attributes:
        noise: How it is distributed, on the normalised image.
        radius: Its largest value.
        draws: How often it is drawn, seeded by the image's name.
    """

    kind: ClassVar[str] = "max-sensitivity"

    noise: Literal["uniform"] = "uniform"
    radius: float = 0.2
    draws: int = 10

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (mean_max_sensitivity(),)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        generators = [generator_of(picture.name, "noise") for picture in batch.pictures]
        disturbed: dict[Case, list[Floats]] = {case: [] for case in cases}
        for _ in range(self.draws):
            noise = torch.stack([self._noise(batch.images[0], generator) for generator in generators])
            for case, other in self.other_maps(batch, cases, batch.model.model, batch.images + noise):
                disturbed[case].append(other)
        (metric,) = self.metrics
        return [metric.row(self._largest(self.map_of(batch, case), disturbed[case])) for case in cases]

    def _noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.rand(like.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return (drawn * self.radius).to(like)

    def _largest(self, map_: Floats, disturbed: list[Floats]) -> float:
        maps = np.stack(disturbed)
        return float(max_sensitivity(map_, maps)) if np.isfinite(maps).all() else float("nan")


@dataclass(frozen=True)
class Concentration(MapTask):
    """How few scores carry a map: Gini index (sparseness) and entropy (complexity) of its absolute values."""

    kind: ClassVar[str] = "sparseness and complexity"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return mean_sparseness(), mean_complexity()

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        maps = [self.map_of(batch, case) for case in cases]
        of_sparseness, of_complexity = self.metrics
        return [
            of_sparseness.row(float(sparseness(map_))) | of_complexity.row(float(complexity(map_))) for map_ in maps
        ]


@dataclass(frozen=True)
class Faithfulness(MapTask):
    """Correlation, over random sets of patches, of their summed scores with the fall of the logit without them.

    Attributes:
        subsets: How many sets are drawn, seeded by the image's name and the same for all methods.
        percent: How many patches each has, rounded down, at least one.
        filling: What their pixels become.
        score: What falls.
    """

    kind: ClassVar[str] = "faithfulness correlation"

    subsets: int = 64
    percent: int = 10
    filling: Filling = "black before normalisation"
    score: Literal["logit of the explained class"] = "logit of the explained class"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (mean_faithfulness_correlation(),)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        drawn = {image: self._subsets(batch, image) for image in dict.fromkeys(case.image for case in cases)}
        falls = {image: self._falls(batch, image, subsets) for image, subsets in drawn.items()}
        (metric,) = self.metrics
        found = []
        for case in cases:
            scores = float64_array(patch_scores(batch, self._raw(batch, case)))
            sums = scores[drawn[case.image]].sum(axis=1)
            found.append(metric.row(float(faithfulness_correlation(sums, falls[case.image]))))
        return found

    def _subsets(self, batch: ImageBatch, image: int) -> np.typing.NDArray[np.int64]:
        patches = batch.runner.layout.patches
        size = max(1, patches * self.percent // 100)
        return random_subsets(patches, size, self.subsets, seed_of(batch.pictures[image].name, "subsets"))

    def _falls(self, batch: ImageBatch, image: int, subsets: np.typing.NDArray[np.int64]) -> Floats:
        """By how much the logit of the explained class falls without each set."""
        runner = batch.runner
        target = explained_class(batch.pictures[image], self.explained)
        layout = runner.layout
        patch_of = patch_of_pixel(layout.grid, runner.size, layout.geometry).view(runner.size).to(runner.images.device)
        chosen = torch.zeros(len(subsets), runner.layout.patches, dtype=torch.bool)
        chosen.scatter_(1, torch.from_numpy(subsets), value=True)
        fill = fill_of(runner, self.filling)
        falls = []
        for part in torch.split(chosen.to(patch_of.device), runner.batch):
            pictures = torch.where(part[:, patch_of][:, None], fill, runner.images[image])
            falls.append(in_float64(batch.logits[image, target]) - in_float64(runner.logits(pictures)[:, target]))
        found: Floats = torch.cat(falls).cpu().numpy()
        return found
