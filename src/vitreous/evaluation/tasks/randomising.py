"""Copies of a model whose weights are randomised from the top down (Adebayo et al., 2018)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vitreous.architecture import Block
from vitreous.architecture.survey import trace_model
from vitreous.architecture.trace import tensors_in
from vitreous.evaluation.tasks.batch import PhotoBatch, generator_of
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
    network, images = batch.model.model, batch.images[:1]
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    trace, blocks = trace_model(network, images), batch.runner.architecture.blocks
    used = [
        {names[id(part)] for part in tensors_in((step.args, step.kwargs)) if id(part) in names} for step in trace.steps
    ]

    def of_block(block: Block) -> set[str]:
        """What the block's module holds, where it is one, and what its steps use."""
        held = () if block.module is None else block.module.parameters()
        return {names[id(each)] for each in held}.union(*used[block.input.step + 1 : block.output.step + 1])

    def top(quarters: int) -> set[str]:
        count = math.ceil(len(blocks) * quarters / 4)
        return set().union(*map(of_block, blocks[len(blocks) - count :]))

    last = blocks[-1].output.step
    behind = [call.module for call in trace.calls if call.first > last]
    head = {names[id(each)] for module in behind for each in module.parameters(recurse=False)}.union(*used[last + 1 :])
    return {
        "head": head - top(4),
        "top quarter": top(1),
        "top half": top(2),
        "top three quarters": top(3),
        "all blocks": top(4),
        "everything": set(names.values()),
    }
