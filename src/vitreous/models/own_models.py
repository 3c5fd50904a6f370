"""Loads a user's own network: a function in a Python file that builds it, and weights from a file where asked for."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from vitreous._utils.paths import expanded
from vitreous._utils.text import reason_of
from vitreous._utils.user_code import run_user_file, source_hash
from vitreous.errors import ModelError, VitreousError
from vitreous.models.checkpoints import load_strictly, read_checkpoint
from vitreous.models.loaded import LoadedModel
from vitreous.models.preprocessing import Preprocessing, as_image_size
from vitreous.models.wrap_model import infer_preprocessing, own_class_names

_SPELLING = re.compile(r"(?P<file>.+?\.py):(?P<function>[A-Za-z_]\w*)(?:@(?P<weights>.+))?")
_SEED = 0


def load_own(
    identifier: str,
    image_size: tuple[int, int] | None,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> LoadedModel:
    """Load ``FILE.py:FUNCTION`` or ``FILE.py:FUNCTION@WEIGHTS``; the file is run, as a plugin is.

    The function takes no arguments and returns an ``nn.Module`` or a ``LoadedModel``. A module may say how photos are
    prepared by an attribute ``preprocessing`` (a ``Preprocessing``) or by ``image_size``, ``mean`` and ``std``, and one
    that timm made says it in its configuration; what is given here comes first.
    """
    name = f"py/{identifier}"
    spelled = _SPELLING.fullmatch(identifier)
    if spelled is None:
        raise ModelError(f"{name}: your own model is spelled py/FILE.py:FUNCTION or py/FILE.py:FUNCTION@WEIGHTS")
    module = _run(name, expanded(spelled["file"]))
    built = _build(name, module, spelled["function"])
    network = built.model if isinstance(built, LoadedModel) else built
    if spelled["weights"]:
        load_strictly(network, read_checkpoint(spelled["weights"]), source=spelled["weights"])
    if isinstance(built, LoadedModel):
        preprocessing, class_names = built.preprocessing.override(image_size=image_size), built.class_names
    else:
        preprocessing, class_names = _preprocessing(name, network, image_size, mean, std), own_class_names(network)
    # A file may change what its function builds in ways that no part of the network shows.
    return LoadedModel(name, network.eval(), preprocessing, class_names, source_hash(module))


def _build(name: str, module: ModuleType, function: str) -> nn.Module | LoadedModel:
    build = getattr(module, function, None)
    if not callable(build):
        raise ModelError(f"{name}: there is no function {function} in {module.__file__}")
    torch.manual_seed(_SEED)  # so that a model whose weights are random is the same one in every process
    try:
        with redirect_stdout(sys.stderr):  # the standard output is for results
            built = build()
    except VitreousError:
        raise
    except Exception as error:
        raise ModelError(f"{name}: {function} fails: {type(error).__name__}: {reason_of(error)}") from error
    if not isinstance(built, nn.Module | LoadedModel):
        raise ModelError(f"{name}: {function} must return an nn.Module, not {type(built).__name__}")
    return built


def _run(name: str, file: Path) -> ModuleType:
    """Run the file as a module; modules beside it can be imported."""
    folder = str(file.resolve().parent)
    if file.is_file() and folder not in sys.path:
        sys.path.append(folder)  # at the end, so that nothing installed is hidden
    try:
        module = run_user_file(file, "model")
    except Exception as error:
        raise ModelError(f"{name}: {file} does not run: {type(error).__name__}: {reason_of(error)}") from error
    if module is None:
        raise ModelError(f"{name}: there is no file {file}")
    return module


def _preprocessing(
    name: str,
    model: nn.Module,
    image_size: tuple[int, int] | None,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> Preprocessing:
    """Return how photos are prepared, from what was asked for and what the model says of itself."""
    known: Any = getattr(model, "preprocessing", None)
    if isinstance(known, Preprocessing):
        return known.override(mean=mean, std=std, image_size=image_size)
    size = image_size or getattr(model, "image_size", None)
    mean = getattr(model, "mean", None) if mean is None else mean
    std = getattr(model, "std", None) if std is None else std
    if brought := infer_preprocessing(model):  # timm's configuration, where attributes do not say otherwise
        return brought.preprocessing.override(mean=mean, std=std, image_size=size)
    wanted = (("--image-size", "image_size", size), ("--mean", "mean", mean), ("--std", "std", std))
    missing = [(option, attribute) for option, attribute, value in wanted if value is None]
    if missing:
        options, attributes = (" ".join(words) for words in zip(*missing, strict=True))
        raise ModelError(
            f"{name}: the model does not say how its photos are prepared; give {options}, or set its attributes "
            f"{attributes.replace(' ', ', ')}"
        )
    assert size is not None
    plain = Preprocessing(image_size=as_image_size(size), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return plain.override(mean=mean, std=std)
