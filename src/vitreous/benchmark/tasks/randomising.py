"""Copies of a model whose weights are randomised from the top down (Adebayo et al., 2018)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.anatomy import find_anatomy
from vitreous.benchmark.tasks.batch import PhotoBatch, generator_of
from vitreous.float64 import in_float64
from vitreous.tape.interception import Interception

# Parts of a model that are randomised one after the other, the earlier ones staying random.
STAGES = ("head", "top quarter", "top half", "top three quarters", "all blocks", "everything")


def randomised_models(batch: PhotoBatch, stages: Sequence[str], seed: int) -> Iterator[tuple[str, nn.Module]]:
    """One copy of the model, more random at every stage; it must be used before the next stage is asked for."""
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


def _parts(batch: PhotoBatch) -> dict[str, set[str]]:
    """The names of the parameters that belong to each stage."""
    network = batch.model.model
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    blocks = [block.module for block in find_anatomy(network).blocks]

    def top(quarters: int) -> set[str]:
        count = math.ceil(len(blocks) * quarters / 4)
        return {names[id(each)] for block in blocks[len(blocks) - count :] for each in block.parameters()}

    head = {names[id(each)] for module in _behind(batch, blocks[-1]) for each in module.parameters(recurse=False)}
    return {
        "head": head - top(4),
        "top quarter": top(1),
        "top half": top(2),
        "top three quarters": top(3),
        "all blocks": top(4),
        "everything": set(names.values()),
    }


class _Behind:
    """Sees which modules run behind the last block: final norm, pooling and head."""

    def __init__(self, last_block: nn.Module) -> None:
        self._last_block = last_block
        self._passed = False
        self.modules: list[nn.Module] = []

    def enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Note a module, if the last block has run."""
        del arguments
        self.modules += [module] if self._passed else []
        return None

    def leave(self, module: nn.Module, output: Any) -> Any:
        """Note that the last block has run."""
        del output
        self._passed |= module is self._last_block


def _behind(batch: PhotoBatch, last_block: nn.Module) -> list[nn.Module]:
    """The modules that run behind the last block."""
    behind = _Behind(last_block)
    with Interception(behind, {}, frozenset(batch.model.model.modules())):
        batch.subject.logits(batch.images[:1])
    return behind.modules
