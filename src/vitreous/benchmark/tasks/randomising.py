"""Copies of a model whose weights are randomised from the top down (Adebayo et al., 2018)."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vitreous.anatomy import find_anatomy
from vitreous.benchmark.tasks.batch import PhotoBatch
from vitreous.float64 import in_float64

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
            randomise(parameters[name], f"{seed}|{name}")
        done |= parts[stage]
        if stage in stages:
            yield stage, network


def randomise(parameter: Tensor, seed: str) -> None:
    """Draw a parameter anew, normally distributed with the mean and the spread that it has."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") >> 1
    generator = torch.Generator().manual_seed(number)
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


def _behind(batch: PhotoBatch, last_block: nn.Module) -> list[nn.Module]:
    """The modules that run behind the last block: final norm, pooling and head."""
    passed = False
    found: list[nn.Module] = []

    def leave(*_: object) -> None:
        nonlocal passed
        passed = True

    def enter(module: nn.Module, *_: object) -> None:
        if passed:
            found.append(module)

    hooks = [module.register_forward_pre_hook(enter) for module in batch.model.model.modules()]
    hooks.append(last_block.register_forward_hook(leave))
    try:
        batch.subject.logits(batch.images[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return found
