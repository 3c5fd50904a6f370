"""What is read of a model's output: class scores, then the numbers of targets; and the quantity that is explained.

A reader turns what a model returns into columns, (batch, columns). The first are the class scores; every target that is
not a class has one column more, so that a method explains it as it explains a class: by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.errors import InputError, TargetError
from vitreous.inputs import model_io as outputs
from vitreous.inputs.model_io import OutputActivation, OutputPart, find_part, likelihood_slope, likelihoods
from vitreous.inputs.target import OriginalRun, Target, score_of
from vitreous.inputs.target_objects import Class, Probability

Quantity = Literal["probability", "logit", "log_probability"]


def class_scores(output: Any, name: str, batch: int) -> Tensor:
    """The logits (batch, classes) in the output of the model called ``name``.

    Raises:
        InputError: there are none, or they are not numbers.
    """
    try:
        found = outputs.class_scores(output)
    except InputError:
        found = output
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != batch or found.shape[1] == 0:
        given = outputs.described_output(found)
        raise InputError(f"{name} must return class scores of shape (batch, classes), but returned {given}")
    if bool((found.isnan() | found.isposinf()).any()):
        raise InputError(f"{name} returned NaN or infinite class scores for these images in {found.dtype}")
    return found


@dataclass(frozen=True)
class OutputReader:
    """Reads the class scores.

    Attributes:
        part: which part of what the model returns; ``None`` for all of it.
    """

    part: OutputPart | None = None

    def read(self, output: Any, name: str, batch: int) -> Tensor:
        """The columns of an output of the model called ``name``, (batch, columns)."""
        return class_scores(find_part(output, self.part), name, batch)

    def head_columns(self, columns: Tensor) -> Tensor:
        """The columns whose gradients show which tokens the head reads."""
        return columns

    def targets_in(self, columns: Tensor) -> int:
        """How many of the columns are no class scores; they are the last."""
        del columns
        return 0

    @property
    def may_read_any_token(self) -> bool:
        """Whether a single patch may be all that is read of the tokens; class scores are read of a class token."""
        return False

    def has_own_reading(self, target: Tensor) -> bool:
        """Whether targets, (batch,) columns, may read other tokens than all columns together do."""
        del target
        return False

    def at_class_scores(self, columns: Tensor, gradient: Tensor) -> Tensor:
        """A gradient at the columns with that of probabilities moved to the class scores which they are made of."""
        del columns
        return gradient

    def check_differentiable(self, target: Tensor) -> None:
        """Raise unless all targets, (batch,) columns, have a gradient; class scores are checked elsewhere."""


CLASS_SCORES = OutputReader()


@dataclass
class Columns:
    """What the first output has shown of targets.

    Attributes:
        numbers: the column of every target, (batch, k).
        targets: those that are not classes, in the order of their columns.
        classes: how many columns are class scores.
        scale: what the class scores are.
        without_gradient: columns that have none in the last recorded run.
    """

    numbers: Tensor | None = None
    targets: tuple[Target, ...] = ()
    classes: int = 0
    scale: OutputActivation | None = None
    without_gradient: set[int] = field(default_factory=set)

    def numbers_on(self, device: torch.device) -> Tensor:
        """The column of every target, (batch, k); an output has been read."""
        assert self.numbers is not None
        return self.numbers.to(device)


@dataclass(frozen=True)
class TargetReader(OutputReader):
    """Reads the class scores, where there are any, and the numbers of targets.

    What a target depends on (the predicted class, say) shows in the first output that is read, which has to be that of
    the explained images; afterwards the columns stay the same.

    Attributes:
        targets: the targets of every image, (batch, k).
        find_scale: what class scores (batch, classes) are.
        image_size: height and width of the model's input.
        found: what the first output has shown.
    """

    targets: Sequence[Sequence[Target]] = ()
    find_scale: Callable[[Tensor], OutputActivation | None] = lambda _logits: None
    image_size: tuple[int, int] = (0, 0)
    found: Columns = field(default_factory=Columns)

    def read(self, output: Any, name: str, batch: int) -> Tensor:
        """Class scores, then one column for every target that is not a class."""
        output = find_part(output, self.part)
        logits = _class_scores_or_none(output, name, batch)
        if self.found.numbers is None:
            self._find_columns(output, logits)
        classes = [] if logits is None else [logits]
        scores = [score_of(target, output, batch)[:, None] for target in self.found.targets]
        if torch.is_grad_enabled():
            numbered = enumerate(scores, self.found.classes)
            self.found.without_gradient = {column for column, score in numbered if not score.requires_grad}
        return torch.cat([*classes, *scores], dim=1)

    def _find_columns(self, output: Any, logits: Tensor | None) -> None:
        detached = None if logits is None else logits.detach()
        classes = 0 if detached is None else detached.shape[1]
        scale = None if detached is None else self.find_scale(detached)
        original = OriginalRun(output, detached, scale, self.image_size)
        targets: dict[Target, int] = {}

        def column(target: Target) -> int:
            return target.index if isinstance(target, Class) else targets.setdefault(target, classes + len(targets))  # type: ignore[return-value]

        numbers = [[column(each.resolve(original, image)) for each in row] for image, row in enumerate(self.targets)]
        self.found.numbers, self.found.targets = torch.tensor(numbers), tuple(targets)
        self.found.classes, self.found.scale = classes, scale

    def head_columns(self, columns: Tensor) -> Tensor:
        """The class scores where all targets are made of them, otherwise the targets."""
        found = self.found
        classes, targets = columns[:, : found.classes], columns[:, found.classes :]
        if found.classes and all(target.reads_classes for target in found.targets):
            return classes
        if found.without_gradient and not found.classes:
            self.check_differentiable(torch.tensor(sorted(found.without_gradient)))
        if found.without_gradient:
            return classes
        # Their sum may be 0 whatever the signs (a target and its opposite), but not with weights that have no ratio.
        return targets * torch.arange(1, targets.shape[1] + 1, device=targets.device).sqrt()

    def targets_in(self, columns: Tensor) -> int:
        """How many targets there are that are not classes."""
        return columns.shape[1] - self.found.classes

    @property
    def may_read_any_token(self) -> bool:
        """Whether some target reads more than class scores."""
        return not all(target.reads_classes for target in self.found.targets)

    def has_own_reading(self, target: Tensor) -> bool:
        """Whether one of several targets reads more than class scores, and has a gradient that shows what."""
        found, numbers = self.found, set(target.tolist())
        if len(found.targets) < 2 or numbers & found.without_gradient:
            return False
        others = [found.targets[number - found.classes] for number in numbers if number >= found.classes]
        return any(not target.reads_classes for target in others)

    def at_class_scores(self, columns: Tensor, gradient: Tensor) -> Tensor:
        """The same gradient, of which nothing is left at probabilities.

        That of a probability near 1 is smaller than float16 can hold. At the class scores it is known in float32,
        before it enters the graph of a model in half precision, and can be scaled.
        """
        classes, moved = self.found.classes, gradient.clone()
        logits = at_least_float32(columns[:, :classes].detach())
        for column, target in enumerate(self.found.targets, classes):
            if isinstance(target, Probability):
                chosen = torch.full((len(logits),), int(target.index or 0), device=logits.device)
                moved[:, :classes] += gradient[:, column, None] * likelihood_slope(logits, chosen, target.scale)
                moved[:, column] = 0
        return moved

    def check_differentiable(self, target: Tensor) -> None:
        """Raise unless all targets have a gradient."""
        for column in sorted(set(target.tolist()) & self.found.without_gradient):
            raise TargetError(
                f"the target {self.found.targets[column - self.found.classes]} does not depend on the model's output, "
                "or not in a way that has a gradient (argmax, round, detach, item)"
            )


def _class_scores_or_none(output: Any, name: str, batch: int) -> Tensor | None:
    """The class scores, checked; ``None`` where an output has none, such as that of a dense head."""
    try:
        outputs.class_scores(output)
    except InputError:
        return None
    return class_scores(output, name, batch)


def explained(columns: Tensor, quantity: Quantity, scale: OutputActivation | None, targets: int = 0) -> Tensor:
    """The explained quantity of every class, (batch, classes); the last ``targets`` columns stay as they are.

    A value, of which there is no probability, is explained itself.
    """
    if quantity == "logit":
        return columns
    if not targets:
        return likelihoods(columns, scale, log=quantity == "log_probability")
    logits, others = columns[:, :-targets], columns[:, -targets:]
    likely = likelihoods(logits, scale, log=quantity == "log_probability") if logits.shape[1] else logits
    return torch.cat([likely, others], dim=1)


def output_gradient(
    columns: Tensor, target: Tensor, objective: str, scale: OutputActivation | None, targets: int = 0
) -> Tensor:
    """The explained quantity's gradient at the columns, in float32 at least: bfloat16 takes 0.999 for 1.

    Args:
        columns: what a reader has read, (batch, columns).
        target: the column that is explained of each image, (batch,).
        objective: ``logit``, ``probability`` or ``others``, see ``vitreous.tape.Pass``.
        scale: what the class scores are.
        targets: how many of the columns, the last, are no class scores: they have no probability and no others.
    """
    columns = at_least_float32(columns)
    chosen = torch.zeros_like(columns).scatter_(1, target[:, None], 1)
    if targets:
        classes = columns.shape[1] - targets
        of_class = target < classes
        start = torch.zeros_like(columns) if objective == "others" else chosen.clone()
        if bool(of_class.any()):
            some = output_gradient(columns[of_class, :classes], target[of_class], objective, scale)
            start[of_class] = torch.nn.functional.pad(some, (0, targets))
        return start
    if objective == "probability":
        return likelihood_slope(columns, target, scale)
    # A single output has no others.
    return chosen if objective == "logit" else (1 - chosen) / max(1, columns.shape[1] - 1)
