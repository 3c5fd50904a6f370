"""The subject of an explanation: a model and images that may be asked again, with other images or fewer tokens.

Methods that need more than one run (integrated gradients, perturbation) see this, never the model itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.tape import Needs, Plan, Tape, record


@dataclass
class Subject:
    """A model with the images that are explained.

    Attributes:
        images: the model's input, (batch, channel, height, width).
        evaluations: how many images the model has been asked about so far, besides the recorded run.
    """

    _model: nn.Module
    _anatomy: Anatomy
    images: Tensor
    evaluations: int = 0

    def record(self, images: Tensor, needs: Needs) -> AbstractContextManager[Tape]:
        """Run the model on other images and keep what ``needs`` asks for, until the context ends."""
        self.evaluations += len(images)
        return record(self._model, self._anatomy, images, Plan(self._anatomy.depth, needs))

    def logits(self, images: Tensor) -> Tensor:
        """What the model says of other images, (images, classes); they are asked in batches of the original size."""
        self.evaluations += len(images)
        with torch.inference_mode(mode=False), torch.no_grad():
            return torch.cat([self._ask(part) for part in torch.split(images, len(self.images))])

    def _ask(self, images: Tensor) -> Tensor:
        with record(self._model, self._anatomy, images, Plan(self._anatomy.depth, Needs())) as tape:
            return tape.logits
