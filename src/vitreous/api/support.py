"""``supported``: which methods work on a model, and why others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from vitreous._utils.torch_state import preserves_torch_state
from vitreous.api.explain import black_pixel, declared_outputs, find_recipes, find_wanted, network_of
from vitreous.api.run_methods import run_on_images, target_reader
from vitreous.api.runs import RunSettings, try_methods
from vitreous.architecture import find_architecture
from vitreous.architecture.evaluation_copy import run_in_evaluation
from vitreous.errors import UnsupportedModelError
from vitreous.inputs.outputs import OutputPart
from vitreous.inputs.targets import One, TargetObjects
from vitreous.methods import list_methods
from vitreous.methods.spelling import Recipe
from vitreous.models import LoadedModel
from vitreous.models.loaded import resolved_outputs
from vitreous.models.pixels import Images, Model, find_model, find_pixels
from vitreous.models.wrap_model import called_by
from vitreous.tape import Needs, Plan, record
from vitreous.tape.output import OutputReader
from vitreous.tape.runner import EvaluationLimitReached, limited_evaluations

Found = TypeVar("Found")

_EVALUATIONS = 2  # of a method that runs the model again: the first of them show whether it works


@dataclass(frozen=True)
class Supported:
    """Which methods work on a model.

    Attributes:
        methods: spellings of those that work.
        refused: by spelling, why the others do not.
    """

    methods: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, method: object) -> bool:
        """Whether a method works."""
        return method in self.methods

    def __iter__(self) -> Iterator[str]:
        """The methods that work."""
        return iter(self.methods)

    def __len__(self) -> int:
        """How many methods work."""
        return len(self.methods)

    def __str__(self) -> str:
        lines = [f"methods that work: {', '.join(self.methods) or 'none'}"]
        by_reason: dict[str, list[str]] = {}
        for method, reason in self.refused.items():
            by_reason.setdefault(reason, []).append(method)
        lines += [f"not {', '.join(methods)}: {reason}" for reason, methods in by_reason.items()]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {"methods": list(self.methods), "refused": dict(self.refused)}


@preserves_torch_state
def supported(
    model: Model,
    images: Images,
    methods: str | Sequence[str] | None = None,
    target: One | None = None,
    *,
    output: OutputPart | None = None,
    call: Callable[[nn.Module, Tensor], Any] | None = None,
) -> Supported:
    """Find which methods work on a model, by trying them on the first image.

    Args:
        model: what ``explain`` takes.
        images: what ``explain`` takes; the first one is used.
        methods: spellings; ``None`` for all methods there are.
        target: one class, or one target of ``vitreous.targets``; a dense output needs one.
        output: what ``explain`` takes.
        call: what ``explain`` takes.

    Returns:
        The methods that work, and why the others do not. Methods that run the model many times (perturbation) are
        stopped after a few runs.

    Raises:
        InputError: the model does not take the images.

    Examples:
        >>> import vitreous
        >>> found = vitreous.supported(model, "demo.jpg", methods=["gae", "tokentm"])
        >>> "gae" in found, dict(found.refused)
        (True, {})
    """
    return examine_model(model, images, methods, partial(find_supported, target=target, output=output), call)


def examine_model(
    model: Model,
    images: Images,
    methods: str | Sequence[str] | None,
    examine: Callable[[nn.Module, LoadedModel | nn.Module, Tensor, Sequence[Recipe]], Found],
    call: Callable[[nn.Module, Tensor], Any] | None = None,
) -> Found:
    """Call ``examine`` with the network in evaluation mode, the model, its input for one image and the methods."""
    recipes = find_recipes([info.name for info in list_methods()] if methods is None else methods)
    loaded = find_model(model, images)
    network = network_of(loaded)
    if call is not None:
        network = called_by(network, call)
    pixels, _ = find_pixels(loaded, network, images)
    return run_in_evaluation(network, lambda copy: examine(copy, loaded, pixels[:1], recipes))


def find_supported(
    network: nn.Module,
    loaded: LoadedModel | nn.Module,
    pixels: Tensor,
    recipes: Sequence[Recipe],
    *,
    target: One | None = None,
    output: OutputPart | None = None,
) -> Supported:
    """Find which methods work on a network in evaluation mode, given the input for one image."""
    by_spelling = {recipe.spelling: recipe for recipe in recipes}
    network, wanted = find_wanted(loaded, network, pixels, target, None, output)
    outputs = resolved_outputs(network, declared_outputs(loaded))
    settings = RunSettings(black_pixel(loaded, pixels), outputs=outputs, reader=OutputReader(output))
    reader = settings.reader
    if isinstance(wanted, TargetObjects):
        reader = target_reader(network, pixels, wanted, settings)
    try:
        architecture = find_architecture(network, pixels)
        with record(network, architecture, pixels, Plan(architecture.depth, Needs()), reader):
            pass
    except UnsupportedModelError as error:  # of no method in particular: none of them has to be tried
        return Supported((), dict.fromkeys(by_spelling, str(error)))

    def run(spellings: list[str]) -> None:
        some = [by_spelling[spelling] for spelling in spellings]
        with _a_few_evaluations():
            run_on_images(network, pixels, some, wanted, None, settings)

    # One that is stopped would stop those that it runs together with.
    groups = [[name for name, recipe in by_spelling.items() if not recipe.readout.runs_again]]
    groups += [[name] for name, recipe in by_spelling.items() if recipe.readout.runs_again]
    reasons: dict[str, str] = {}
    for group in groups:
        reasons |= try_methods(run, group).reasons
    refused = {name: reasons[name] for name in by_spelling if name in reasons}
    return Supported(tuple(name for name in by_spelling if name not in refused), refused)


@contextmanager
def _a_few_evaluations() -> Iterator[None]:
    """Stop a method that works after a few further runs of the model."""
    try:
        with limited_evaluations(_EVALUATIONS):
            yield
    except EvaluationLimitReached:
        pass
