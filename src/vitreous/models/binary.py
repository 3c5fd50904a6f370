"""A model with one logit for "yes" as a model of two classes, so that either answer can be explained."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitreous.errors import UnsupportedModelError


class TwoSided(nn.Module):
    """Answers [-z/2, z/2] where the model inside answers z.

    The softmax of that is the sigmoid of z, so probabilities stay what they were, and the score of class 0 is the
    opposite of that of class 1: explaining class 0 explains -z. Methods that treat positive and negative parts of every
    layer apart (transattr, plrp, lrp_rollout, abslrp) see the halving as one more layer, and give nothing or something
    else for the side that the model is against.
    """

    sides: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Whatever the model inside says of its one output: of these two, one is right.
        self.config = SimpleNamespace(problem_type="single_label_classification")
        # Not part of the weights: a checkpoint of the model inside stays one.
        self.register_buffer("sides", torch.tensor([[-0.5], [0.5]]), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the two scores, (batch, 2)."""
        logit: Tensor = self.model(images)
        logit = logit.unsqueeze(-1) if logit.ndim == 1 else logit
        if logit.ndim != 2 or logit.shape[1] != 1:
            raise UnsupportedModelError(f"the model has {tuple(logit.shape)[1:]} outputs where one logit is needed")
        return functional.linear(logit, self.sides.to(logit.dtype))
