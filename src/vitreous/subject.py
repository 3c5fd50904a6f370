"""The subject of an explanation: a model and images that may be asked again, with other images or fewer tokens.

Methods that need more than one run (integrated gradients, perturbation) see this, never the model itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.tape import Intervention, Needs, Plan, Tape, record

# So many images are run together even where fewer are explained: one at a time leaves most of a processor idle.
_A_FEW = 8


@dataclass
class Subject:
    """A model with the images that are explained.

    Attributes:
        images: the model's input, (batch, channel, height, width).
        black: what the model gets for a black pixel, (channel,), where its preprocessing is known.
        evaluations: how many images the model has been asked about so far, besides the recorded run.
    """

    _model: nn.Module
    _anatomy: Anatomy
    images: Tensor
    black: Tensor | None = None
    evaluations: int = field(default=0, kw_only=True)

    @property
    def at_once(self) -> int:
        """How many images fit into one run: as many as were explained together, and a few in any case."""
        return max(len(self.images), _A_FEW)

    def record(
        self, images: Tensor, needs: Needs, intervention: Intervention | None = None
    ) -> AbstractContextManager[Tape]:
        """Run the model on other images and keep what ``needs`` asks for, until the context ends."""
        self.evaluations += len(images)
        plan = Plan(self._anatomy.depth, needs, intervention or Intervention())
        return record(self._model, self._anatomy, images, plan)

    def logits(self, images: Tensor) -> Tensor:
        """What the model says of other images, (images, classes); a few are asked together."""
        self.evaluations += len(images)
        with torch.inference_mode(mode=False), torch.no_grad():
            return torch.cat([self._ask(part) for part in torch.split(images, self.at_once)])

    def _ask(self, images: Tensor) -> Tensor:
        with record(self._model, self._anatomy, images, Plan(self._anatomy.depth, Needs())) as tape:
            return tape.logits
