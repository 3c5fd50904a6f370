"""Plugins: write your own method as a function with a decorator.

    from vitreous.plugin import method

    @method("value_length", activations=("attention_rows",), summary="How long a token's value vectors are.")
    def value_length(view, layer):
        return view.value(layer).norm(dim=-1).mean(dim=1)

Use it with ``vitreous explain photo.jpg --plugin my_method.py --method value_length.skipplus``, or in Python after
importing the file. An installed package registers its module in the entry-point group ``vitreous.methods``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from vitreous._utils.defaults import PLUGIN_ENTRY_POINTS
from vitreous._utils.messages import close_match, described_error, run_user_file, warn_caller
from vitreous._utils.storage import expanded
from vitreous.errors import MethodError
from vitreous.methods import TokenReadout, View, register
from vitreous.methods.checked_view import line_in
from vitreous.methods.readout import FORMER_NAMES
from vitreous.tape import GradientNeeds, Needs, Pass
from vitreous.tape.recording.plan import Objective
from vitreous.tape.rules import RULES

Read = Callable[[View, int], Tensor]

_ACTIVATIONS = tuple(part.name for part in fields(Needs) if isinstance(part.default, frozenset))  # declared per layer
_FORMER_ACTIVATIONS = {"halves": "residual"}
_GRADIENTS = tuple(part.name for part in fields(GradientNeeds))


def method(
    name: str,
    *,
    activations: tuple[str, ...] = (),
    gradients: tuple[str, ...] = (),
    rule: str = "plain",
    objective: Objective = "logit",
    signed: bool = False,
    layer: int = 0,
    aggregation: Literal["plus", "skipplus"] | None = None,
    summary: str = "",
    paper: str = "unpublished",
    year: int = 0,
    **former: tuple[str, ...],
) -> Callable[[Read], Read]:
    """Register a function ``(view, layer) -> (batch, tokens)`` as a method: the scores of all tokens at one block.

    The aggregations ``.plus``, ``.skipplus`` and ``.propagate`` and the option ``:layer=`` are provided.

    Args:
        name: name of the method.
        activations: activations that the function reads at the layer, fields of ``vitreous.tape.Needs``: tokens, norms,
            residual, attention, attention_rows.
        gradients: activations whose gradient it reads, fields of ``vitreous.tape.GradientNeeds``: tokens, norms,
            attention, biases. With any of them, the method is class-specific.
        rule: the rule of the backward pass.
        objective: ``logit`` or ``probability``; for others see ``vitreous.tape.Pass``.
        signed: whether the sign of the scores carries meaning.
        layer: the block to read if the spelling does not combine several.
        aggregation: the default aggregation: ``plus``, ``skipplus`` or none.
        summary: one sentence on what the map shows; the first line of the docstring by default.
        paper: where it is published.
        year: the year of publication.
        former: ``values`` and ``slopes``, the former names of ``activations`` and ``gradients``.

    Raises:
        MethodError: an argument has an unknown value.

    Examples:
        >>> from vitreous.plugin import method
        >>> @method("token_length", activations=("tokens",), summary="Length of every token.")
        ... def token_length(view, layer):
        ...     return view.tokens(layer).norm(dim=-1)
        >>> vitreous.explain(model, "demo.jpg", "token_length.plus").methods
        ('token_length.plus',)
    """
    for argument in former:
        if argument not in FORMER_NAMES:
            raise TypeError(f"method() got an unexpected keyword argument {argument!r}")
        warn_caller(f"the method {name!r}: {argument}= is now called {FORMER_NAMES[argument]}=", DeprecationWarning)
    activations, gradients = former.get("values", activations), former.get("slopes", gradients)
    for word in set(_FORMER_ACTIVATIONS).intersection(activations):
        warn_caller(f"the method {name!r}: activations {word!r} is now called {_FORMER_ACTIVATIONS[word]!r}")
    _check(name, "activations", activations, (*_ACTIVATIONS, *_FORMER_ACTIVATIONS))
    activations = tuple(_FORMER_ACTIVATIONS.get(word, word) for word in activations)
    _check(name, "gradients", gradients, _GRADIENTS)
    _check(name, "rule", (rule,), RULES)
    _check(name, "objective", (objective,), get_args(Objective))
    if gradients == ("biases",):  # they are recorded during a backward pass, which needs a destination
        gradients = ("tokens", "biases")

    def enter(read: Read) -> Read:
        readout = _FunctionReadout(read, activations, gradients, Pass(rule, objective))

        def make() -> TokenReadout:
            return readout

        make.__doc__ = summary or read.__doc__ or name
        make.written = read  # type: ignore[attr-defined]  # the user's function, for hashes and error messages
        register(
            name,
            family="plugin",
            paper=paper,
            year=year,
            class_specific=bool(gradients),
            signed=signed,
            aggregation=aggregation,
            layer=layer,
        )(make)
        return read

    return enter


def _check(name: str, argument: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse unknown values at registration, not when the method runs."""
    if isinstance(given, str):
        raise MethodError(f"the method {name!r}: {argument} are several, so write {argument}=({given!r},)")
    for word in given:
        if word not in known:
            raise MethodError(
                f"the method {name!r}: {argument} {word!r} is not one of {', '.join(known)}{close_match(word, known)}"
            )


class _FunctionReadout(TokenReadout):
    """A read-out that calls a user's function."""

    def __init__(self, read: Read, activations: tuple[str, ...], gradients: tuple[str, ...], backward: Pass) -> None:
        self._read, self.backward = read, backward
        self.activations, self.gradients = activations, gradients  # type: ignore[misc]

    def read(self, view: View, layer: int) -> Tensor:
        scores = self._read(view, layer)
        expected = (len(view.tape.logits), view.layout.tokens)
        if not isinstance(scores, Tensor) or tuple(scores.shape) != expected:
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise MethodError(f"it must return scores of all tokens, {expected}, but returned {shape}")
        return scores


def load_plugin(path: str | Path) -> None:
    """Run a Python file that registers methods or rules. Running it again replaces them.

    Raises:
        MethodError: the file does not exist or raises an exception.
        InputError: the path is not valid.
    """
    file = expanded(path)
    try:
        module = run_user_file(file, "plugin")
    except Exception as error:
        line = line_in(str(file), error)
        place = f"{file}, line {line}" if line else str(file)
        if isinstance(error, MethodError):
            raise MethodError(f"{place}: {error}") from error
        raise MethodError(f"{place}: the plugin does not run: {described_error(error)}") from error
    if module is None:
        raise MethodError(f"{file}: there is no such plugin, a Python file that registers methods")


def load_plugins(files: Iterable[str | Path]) -> None:
    """Load installed plugins and the given plugin files."""
    load_entry_points()
    for file in files:
        load_plugin(file)


def load_entry_points() -> None:
    """Import the modules that installed packages register in the entry-point group ``vitreous.methods``."""
    for point in entry_points(group=PLUGIN_ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:
            raise MethodError(f"the plugin {point.name!r} ({point.value}) does not load: {error}") from error
