"""What a model of the zoo is: how it is built small, and what pictures it takes."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 4


@dataclass(frozen=True)
class Entry:
    """A small model with random weights.

    Attributes:
        name: package/model, with the setting where there are several.
        construct: makes the module.
        size: height and width of its pictures, behind the depth of volumes.
        channels: of its pictures.
        kind: what holds for its patches: ``plain`` (one stream of patch tokens, attention between all of them),
            ``hierarchical`` (stages, windows, or several streams), or ``other`` (no class scores, or no attention).
        dtype: what it can run in.
    """

    name: str
    construct: Callable[[], nn.Module]
    size: tuple[int, ...] = (32, 32)
    channels: int = 3
    kind: str = "plain"
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return self.name

    @property
    def package(self) -> str:
        return self.name.partition("/")[0]

    def model(self) -> nn.Module:
        """The same one for every test that leaves it as it is."""
        return _built(self)

    def build(self) -> nn.Module:
        """A copy of its own in evaluation mode with the same random weights every time."""
        return copy.deepcopy(_built(self))

    def images(self, batch: int = 2) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(batch, self.channels, *self.size, generator=generator, dtype=self.dtype)


@functools.lru_cache(maxsize=4)
def _built(entry: Entry) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = entry.construct().to(entry.dtype).eval()
        with torch.no_grad():
            # Libraries start with biases, class tokens, LayerScale or heads that are zero, or with maps so small that
            # little of the picture arrives at the head.
            for parameter in model.parameters():
                fan_in = math.prod(parameter.shape[1:]) if parameter.dim() >= 2 else 0
                parameter.add_((max(0.1, fan_in**-0.5) if fan_in else 0.1) * torch.randn_like(parameter))
        _calibrate(model, entry.images(8))
    return model


def _calibrate(model: nn.Module, pictures: Tensor) -> None:
    """Set the statistics of batch norms, so that what differs between pictures is not lost on the way."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0  # the statistics become those of this batch
    if norms:
        with torch.no_grad():
            model(pictures)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum
