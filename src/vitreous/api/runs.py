"""How a model is run for an explanation, and what that gives: shared by recorded and unrecorded runs.

``find_outputs`` recognises models that return probabilities, so that no second softmax is applied.
``try_methods`` runs several methods on a model that may not serve all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous._utils.messages import warn_caller
from vitreous._utils.torch_state import preserves_torch_state
from vitreous.architecture.evaluation_copy import run_in_evaluation
from vitreous.errors import InputError, MethodError, RefusedMethodsError, UnsupportedModelError, VitreousError
from vitreous.explanation.prediction import ExplanationError
from vitreous.inputs.model_io import FAILURES, Inputs, OutputActivation, Texts, are_probabilities, in_unit_interval
from vitreous.inputs.target import Target
from vitreous.inputs.targets import Targets
from vitreous.tape import Layout
from vitreous.tape.output import CLASS_SCORES, OutputReader
from vitreous.tape.runner import ModelRunner


class DeferredLogits:
    """The model's output for images, computed when it is first read."""

    def __init__(self, network: nn.Module, runner: ModelRunner) -> None:
        self._network, self._runner = network, runner
        self._unchanged = unchanged_since_now(network, runner.images)

    @preserves_torch_state
    def compute(self) -> Tensor:
        """Run the model, in evaluation mode, also where it has been switched to training since.

        Raises:
            ExplanationError: model or images were changed since they were explained.
        """
        if not self._unchanged():
            raise ExplanationError(
                "the model or the images were changed after they were explained, before the logits were read: with a "
                "target given these methods need no logits; read explanation.logits before you change the model"
            )
        return run_in_evaluation(
            self._network, lambda network: self._runner.with_model(network).logits(self._runner.images)
        )


def unchanged_since_now(network: nn.Module, images: Tensor) -> Callable[[], bool]:
    """A function that tells whether a model and images still have the numbers that they have now.

    It does not keep the model alive; one that is gone is not unchanged.
    """

    def state(model: nn.Module) -> list[tuple[int, int, torch.dtype]]:
        tensors = (*model.parameters(), *model.buffers(), images)
        # Tensors of inference mode have no version, and only inference mode can change them.
        versions = [0 if one.is_inference() else one._version for one in tensors]  # noqa: SLF001 - torch documents it for this purpose
        return [(one.data_ptr(), version, one.dtype) for one, version in zip(tensors, versions, strict=True)]

    weak, seen = weakref.ref(network), state(network)
    return lambda: (model := weak()) is not None and state(model) == seen


class RawResult(NamedTuple):
    """The scores of all methods for one batch.

    Attributes:
        logits: the model's output, (batch, classes).
        targets: the classes that were explained; from ``classes`` on, ``objects`` by their places.
        layout: patch grid and prefix tokens.
        scores: by spelling, (batch, k, patches), or (batch, patches) for one class per image.
        family: the model's class.
        scale: what the outputs are; ``None`` for logits of which nothing more is known.
        deferred: computes the logits where no method has needed them; ``logits`` then only has their shape.
        objects: the targets that were explained and are not classes.
        values: the number that was explained of each, (batch, k), where target objects were given.
    """

    logits: Tensor
    targets: Targets
    layout: Layout
    scores: dict[str, Tensor]
    family: str
    scale: OutputActivation | None
    deferred: DeferredLogits | None = None
    objects: tuple[Target, ...] = ()
    values: Tensor | None = None

    @property
    def target(self) -> Tensor:
        """The classes in the shape in which the caller gave them: (batch, k) or (batch,)."""
        return self.targets.classes if self.targets.several else self.targets.classes[:, 0]

    @property
    def target_values(self) -> Tensor | None:
        """The numbers that were explained, in the same shape, where target objects were given."""
        return self.values if self.values is None or self.targets.several else self.values[:, 0]


@dataclass(frozen=True)
class RunSettings:
    """How a model is run.

    Attributes:
        black: what the model gets for a black pixel, where that is known.
        bare: the model in another form (compiled), for evaluations of which nothing is recorded.
        outputs: what the model's outputs are, where that is known.
        stage: which stage of the residual stream is read, where there are several.
        reader: what is read of the model's output.
    """

    black: Tensor | None = None
    bare: Callable[..., Any] | None = None
    outputs: OutputActivation | None = None
    stage: int | None = None
    reader: OutputReader = CLASS_SCORES


_INPUTS = 3  # outputs of at least so many different inputs have to look like probabilities
_SIGMOIDS = frozenset({torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_, torch.special.expit})


def find_outputs(
    network: nn.Module,
    inputs: Inputs,
    logits: Tensor,
    declared: OutputActivation | None,
    reader: OutputReader = CLASS_SCORES,
) -> OutputActivation | None:
    """Find the kind of a model's outputs: as declared, or else detected.

    Args:
        network: the model.
        inputs: its inputs.
        logits: its outputs for these, (batch, classes).
        declared: the kind given by the caller or the model's configuration.
        reader: how the outputs were read.

    Returns:
        ``None`` if nothing is declared and the outputs do not look like probabilities: they are logits.

    Raises:
        InputError: probabilities are declared, but the outputs are not between 0 and 1.
    """
    if declared == "probabilities" and not in_unit_interval(logits):
        raise InputError(
            f"outputs=probabilities was given, but the outputs of {type(network).__name__} go from "
            f"{float(logits.min()):.3g} to {float(logits.max()):.3g}: give outputs=logits, sigmoid or value"
        )
    if declared is not None:
        return declared
    reason = _reason(network, inputs, logits, reader)
    if reason is None:
        return None
    warn_caller(
        f"the outputs of {type(network).__name__} {reason}, so they are taken as probabilities: no softmax is applied, "
        "and gradients are those of the probabilities (without its last activation, the model's logits would be "
        'explained). Pass outputs="probabilities" to confirm, or outputs="logits", "sigmoid" or "value"'
    )
    return "probabilities"


def _reason(network: nn.Module, inputs: Inputs, logits: Tensor, reader: OutputReader) -> str | None:
    """Why outputs are taken as probabilities, or ``None``.

    Values between 0 and 1 that do not add up to 1 may be logits or similarities as well; there, the last operation has
    to be a sigmoid.
    """
    if not in_unit_interval(logits):
        return None
    changed = _changed(inputs, max(1, _INPUTS - len(logits)))
    if changed is None:
        return "lie between 0 and 1 and add up to 1" if are_probabilities(logits) else None
    runner = ModelRunner(network, changed, _reader=reader)
    with _Sigmoids() as sigmoids:
        try:
            others = runner.logits(changed)
        except (*FAILURES, InputError):  # the model does not accept the changed inputs
            others = logits[:0]
    if are_probabilities(torch.cat([logits, others])):
        return "lie between 0 and 1 and add up to 1"
    return "are those of a sigmoid" if in_unit_interval(others) and sigmoids.gave(others) else None


def _changed(inputs: Inputs, count: int) -> Inputs | None:
    """One to three other inputs of the same kind: an image flipped or negated, a text reversed."""
    if isinstance(inputs, Texts):
        numbers = inputs.parts.get("input_ids")
        return None if numbers is None else replace(inputs, parts={**inputs.parts, "input_ids": numbers.flip(-1)})
    first = inputs[:1]
    return torch.cat([first.flip(-1), first.flip(-2), -first][:count])


class _Sigmoids(TorchFunctionMode):
    """Keeps what sigmoids return."""

    def __init__(self) -> None:
        super().__init__()
        self._results: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func in _SIGMOIDS:
            self._results.append(result.detach())
        return result

    def gave(self, outputs: Tensor) -> bool:
        """Whether these are the outputs of a sigmoid."""
        alike = (result for result in self._results if result.numel() == outputs.numel())
        return bool(len(outputs)) and any(
            torch.equal(result.reshape_as(outputs).to(outputs), outputs) for result in alike
        )


Result = TypeVar("Result")


@dataclass(frozen=True)
class Trials(Generic[Result]):
    """What came of running methods.

    Attributes:
        served: the methods that work, in order.
        results: what the runs gave: one result for all methods, or one for each where they had to run one by one.
        errors: by method, why it does not work.
    """

    served: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    errors: dict[str, VitreousError] = field(default_factory=dict)

    @property
    def reasons(self) -> dict[str, str]:
        """By method, why it does not work, in words."""
        return {method: refusal_reason(error, method) for method, error in self.errors.items()}


def is_refusal(error: VitreousError) -> bool:
    """Whether an error is about the model's parts or a method, so that other methods may still work."""
    return isinstance(error, UnsupportedModelError | MethodError)


def try_methods(
    run: Callable[[list[str]], Result],
    methods: Sequence[str],
    refuses: Callable[[VitreousError], bool] = is_refusal,
) -> Trials[Result]:
    """Run methods together; without those that are refused, again; one by one where no error says which.

    Args:
        run: runs some of the methods together.
        methods: spellings.
        refuses: whether an error is one of the methods'; others are raised.
    """
    left, errors = list(methods), dict[str, VitreousError]()
    while left:
        try:
            return Trials(left, [run(left)], errors)
        except VitreousError as error:
            if not refuses(error):
                raise
            named = error.reasons.keys() & left if isinstance(error, RefusedMethodsError) else set()
            if not named and len(left) > 1:
                alone = [try_methods(run, [method], refuses) for method in left]
                return Trials(
                    [method for trial in alone for method in trial.served],
                    [result for trial in alone for result in trial.results],
                    errors | {method: each for trial in alone for method, each in trial.errors.items()},
                )
            errors |= dict.fromkeys((method for method in left if not named or method in named), error)
            left = [method for method in left if named and method not in named]
    return Trials(errors=errors)


def refusal_reason(error: VitreousError, method: str | None = None) -> str:
    """Why a method, or any of several, does not work; the message of a refusal also lists methods that do."""
    if not isinstance(error, RefusedMethodsError):
        return str(error)
    if method is not None and method in error.reasons:
        return error.reasons[method]
    return "; ".join(dict.fromkeys(error.reasons.values()))
