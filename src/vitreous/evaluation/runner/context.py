"""The model, the data set and the protocol of a run, opened once per process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vitreous._utils.user_code import source_hash
from vitreous.datasets import DataSet, Shuffled, open_dataset
from vitreous.datasets.dataset import Things
from vitreous.errors import MethodError
from vitreous.evaluation.protocols import Protocol, find_protocol
from vitreous.evaluation.runner.adapters import SampleAdapter, adapter_for, label_outputs
from vitreous.evaluation.store.run import ModelChoice, Run, RunError, hash_of
from vitreous.methods import own_code
from vitreous.methods.spelling import parse
from vitreous.models import LoadedModel, load_model
from vitreous.models.fingerprint import fingerprint_of
from vitreous.models.loaded import given_outputs, settled_outputs
from vitreous.models.text_models import LoadedTextModel, load_text_model
from vitreous.plugin import load_plugins
from vitreous.tape.rules import RULES, own_rules

AnyModel = LoadedModel | LoadedTextModel


@dataclass(frozen=True)
class EvaluationContext:
    """A model, a data set and a protocol, opened; all three for images, or all for texts."""

    model: AnyModel
    data: DataSet
    protocol: Protocol

    @cached_property
    def adapter(self) -> SampleAdapter:
        """One adapter for all shards: it caches what it finds out about the model."""
        return adapter_for(self.model, self.protocol)


_opened: dict[str, EvaluationContext] = {}


def open_context(run: Run) -> EvaluationContext:
    """Open the model, the data set and the protocol of a run, once per process.

    Raises:
        RunError: this machine has another model, data set, plugin or protocol than the run was started with.
    """
    if run.key not in _opened:
        _opened.clear()  # keep one model in memory
        _opened[run.key] = _open(run)
    return _opened[run.key]


def _open(run: Run) -> EvaluationContext:
    load_plugins(run.plugins)
    protocol = find_protocol(run.protocol)
    data = open_data(run.data, run.seed if run.shuffled else None)
    context = EvaluationContext(settled_outputs(load(run.model, protocol.reads)), data, protocol)
    found = {
        "weights of the model": (weights_of(context.model), run.weights),
        "preprocessing": (hash_of(preprocessing_of(context.model)), hash_of(run.preprocessing)),
        "data set": (context.data.fingerprint, run.data_fingerprint),
        "plugins": (hash_files(run.plugins), run.plugins),
        "code of its own methods": (own_code_of(run.methods), run.own_methods),
        "protocol": (context.protocol.settings(), run.settings),
    }
    for what, (here, expected) in found.items():
        if here != expected:
            raise RunError(f"the {what} found here is not what the run was started with")
    return context


def load(choice: ModelChoice, reads: Things) -> AnyModel:
    """Load a model for images or texts, with the outputs of the choice."""
    if reads == "texts":
        if choice != ModelChoice(choice.name, device=choice.device, outputs=choice.outputs):
            raise RunError("mean, standard deviation, size and stage apply to images, but this protocol reads texts")
        return given_outputs(load_text_model(choice.name, device=choice.device), choice.outputs)
    model = load_model(
        choice.name, mean=choice.mean, std=choice.std, image_size=choice.image_size, device=choice.device
    )
    return replace(given_outputs(model, choice.outputs), stage=choice.stage)


def weights_of(model: AnyModel) -> str:
    """The fingerprint of a model: its weights, its modules, and the user's code that built it."""
    found = fingerprint_of(model.model)
    code = model.code if isinstance(model, LoadedModel) else ""
    return hash_of([found, code]) if code else found


def preprocessing_of(model: AnyModel) -> dict[str, Any]:
    """The preprocessing of a model and which outputs stand for which labels, as JSON values."""
    if not isinstance(model, LoadedTextModel):
        return asdict(model.preprocessing)
    outputs = label_outputs(model)
    # Names may be the caller's, which no fingerprint covers. The data set's own order is the default.
    named = {} if outputs == tuple(range(len(outputs))) else {"outputs": list(outputs)}
    return {**model.reader.settings, **named}


def open_data(spec: str, shuffled_by: int | None) -> DataSet:
    """Open a data set, in its own order or shuffled by a seed."""
    listed = open_dataset(spec)
    return listed if shuffled_by is None else Shuffled(listed, shuffled_by)


def own_code_of(spellings: Iterable[str]) -> dict[str, str]:
    """The methods and rules that are not of this package, by name, each with the hash of its code."""
    recipes = [parse(spelling) for spelling in spellings]
    rules = {recipe.readout.backward.rule for recipe in recipes}.intersection(
        (*own_rules(), *own_rules(relevance=True))
    )
    methods = own_code(dict.fromkeys(recipe.info.name for recipe in recipes))
    return methods | {f"rule {name}": source_hash(type(RULES[name])) for name in sorted(rules)}


def hash_files(files: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each file."""
    try:
        return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}
    except OSError as error:
        raise MethodError(f"{error.filename}: the plugin cannot be read: {error.strerror}") from error
