"""What a process needs to compute shards, opened once: the model, the data set and the protocol of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from vitreous.benchmark.run import ModelChoice, Run, RunError
from vitreous.datasets import DataSet, open_dataset
from vitreous.errors import MethodError
from vitreous.models import LoadedModel, load_model
from vitreous.plugin import load_entry_points, load_plugin
from vitreous.protocols import Protocol, find_protocol


@dataclass(frozen=True)
class Workbench:
    """A model, a data set and a protocol, opened."""

    model: LoadedModel
    data: DataSet
    protocol: Protocol


def open_workbench(run: Run) -> Workbench:
    """Open what a run is made of, or give it as it was opened before in this process.

    Raises:
        RunError: this machine has another model, data set, plugin or protocol than the run was started with.
    """
    register_plugins(run.plugins)
    bench = Workbench(load(run.model), open_data(run.data), find_protocol(run.protocol))
    found = {
        "weights of the model": (bench.model.fingerprint, run.weights),
        "data set": (bench.data.fingerprint, run.data_fingerprint),
        "plugins": (hash_files(run.plugins), run.plugins),
        "protocol": (bench.protocol.settings(), run.settings),
    }
    for what, (here, expected) in found.items():
        if here != expected:
            raise RunError(f"the {what} found here is not what the run was started with")
    return bench


@lru_cache(maxsize=1)
def load(choice: ModelChoice) -> LoadedModel:
    """Load a model, or give it as it was loaded before."""
    return load_model(choice.name, mean=choice.mean, std=choice.std, image_size=choice.image_size, device=choice.device)


@lru_cache(maxsize=1)
def open_data(spec: str) -> DataSet:
    """Open a data set, or give it as it was opened before."""
    return open_dataset(spec)


@lru_cache(maxsize=1)
def _register_installed() -> None:
    load_entry_points()


@lru_cache
def _register(file: str) -> None:
    load_plugin(file)


def register_plugins(files: Iterable[str]) -> None:
    """Register the methods of installed plugins and of the files given, each once in this process."""
    _register_installed()
    for file in files:
        _register(file)


def hash_files(files: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each file."""
    try:
        return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}
    except OSError as error:
        raise MethodError(f"{error.filename}: the plugin cannot be read: {error.strerror}") from error
