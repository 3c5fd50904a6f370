"""Which methods to run: spellings, and names of groups of methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from vitreous.api.explain import explain
from vitreous.api.method_trials import try_methods
from vitreous.errors import MethodError, RefusedMethodsError
from vitreous.methods import list_methods
from vitreous.methods.registry import FAMILIES, cost_of
from vitreous.methods.spelling import parse
from vitreous.models import LoadedModel
from vitreous.models.loaded import settled_outputs
from vitreous.models.text_models import LoadedTextModel
from vitreous.text.explain import explain_text

WHITE_BOX = "white-box"
ONE_RUN = "one-run"
ALL = "all"
_BLACK_BOX_FAMILIES = ("perturbation", "plugin")
_FAMILY_SUFFIX = "-methods"


def choose_methods(
    asked: Sequence[str],
    model: LoadedModel | LoadedTextModel,
    expand: Callable[[Sequence[str]], list[str]],
    notice: Callable[[str], None],
) -> list[str]:
    """Resolve spellings and groups of methods to spellings, each once.

    ``white-box`` is every method except the family perturbation and plugins. ``one-run`` is those of them that need no
    run beyond forward and backward, ``all`` every method there is, and the name of a family all its methods
    (``gradient-methods`` where a method has the same name). Methods of a group that the model or the protocol does not
    support are left out with a notice; one that was given by name is an error.

    Args:
        asked: spellings and names of groups.
        model: the model to explain.
        expand: turns spellings into the rows of a protocol.
        notice: receives what is left out.

    Raises:
        MethodError: a spelling is wrong, or the protocol does not support it.
        UnsupportedModelError: a method that was given by name does not work on the model.
    """
    spelled, grouped = [], []
    chosen: dict[str, None] = {}
    for word in asked:
        members = _group(word.strip())
        if members is None:
            spelled.append(parse(word).spelling)
        else:
            grouped += members
        chosen |= dict.fromkeys([spelled[-1]] if members is None else members)
    _ask(model, expand(spelled))
    left_out = _unsupported(model, expand, [name for name in dict.fromkeys(grouped) if name not in spelled])
    for name, reason in left_out.items():
        notice(f"{name} is left out: {reason}")
    return [spelling for spelling in chosen if spelling not in left_out]


def spelled_out(asked: Sequence[str]) -> list[str]:
    """Resolve spellings and groups of methods to spellings, each once, without checking a model."""
    found = (_group(word.strip()) or [parse(word).spelling] for word in asked)
    return list(dict.fromkeys(spelling for group in found for spelling in group))


def _group(word: str) -> list[str] | None:
    """The methods of a group, or None for a spelling."""
    methods = list_methods()
    names = {method.name for method in methods}
    if word == ALL:
        return [method.name for method in methods]
    white_box = [method.name for method in methods if method.family not in _BLACK_BOX_FAMILIES]
    if word == WHITE_BOX:
        return white_box
    if word == ONE_RUN:
        return [name for name in white_box if cost_of(name).one_run]
    family = word.removesuffix(_FAMILY_SUFFIX)
    if family in FAMILIES and word not in names:
        return [method.name for method in methods if method.family == family]
    return None


def _unsupported(
    model: LoadedModel | LoadedTextModel, expand: Callable[[Sequence[str]], list[str]], names: Sequence[str]
) -> dict[str, str]:
    """Why the protocol or the model does not support some of the methods."""
    reasons: dict[str, str] = {}
    rows: dict[str, list[str]] = {}
    for name in names:
        try:
            rows[name] = expand([name])
        except MethodError as error:
            reasons[name] = str(error)
    return reasons | _refused(model, rows)


def _refused(model: LoadedModel | LoadedTextModel, rows: Mapping[str, list[str]]) -> dict[str, str]:
    """Why the model does not support some of the methods, each with its rows."""

    def run(names: list[str]) -> None:
        try:
            _ask(model, [row for name in names for row in rows[name]])
        except RefusedMethodsError as error:  # per row; reasons are reported per method
            told = {name: error.reasons[row] for name in names for row in rows[name] if row in error.reasons}
            raise RefusedMethodsError(str(error), told) from error

    return try_methods(run, list(rows)).reasons


def _ask(model: LoadedModel | LoadedTextModel, spellings: Sequence[str]) -> None:
    """Explain a zero image or a short text: whether a method works shows in a run.

    Outputs are settled first, because those of a zero image are not typical.
    """
    if isinstance(model, LoadedTextModel):
        if spellings:
            explain_text(settled_outputs(model), "a", spellings)
        return
    # Skips perturbation methods: they need many forward passes.
    tried = [spelling for spelling in spellings if not parse(spelling).readout.runs_again]
    if tried:
        explain(settled_outputs(model), empty_picture(model), tried)


def empty_picture(model: LoadedModel) -> Tensor:
    """A zero image, (1, 3, height, width), to try a model with."""
    height, width = model.preprocessing.image_size
    like = next(model.model.parameters(), torch.empty(0))
    return torch.zeros(1, 3, height, width, dtype=like.dtype, device=like.device)
