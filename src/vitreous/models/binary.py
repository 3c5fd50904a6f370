"""A model with one output for "yes" as a model of two classes, so that either answer can be explained."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitreous.errors import UnsupportedModelError


class TwoSided(nn.Module):
    """Answers [-z, z] where the model inside answers z, two classes of which each has its sigmoid as probability.

    So probabilities stay what they were and add up to 1, and explaining class 1 is explaining z, explaining class 0 is
    explaining -z, at their own size: methods that add the gradient to an identity (gae, transattr, iia) would give
    another map for a part of z. Methods that treat positive and negative parts of every layer apart (transattr, plrp,
    lrp_rollout, abslrp) see the sign as one more layer, and give nothing or something else for the side that the model
    is against.

    Where the model inside answers a probability p (``probability``), the answer is [1 - p, p].
    """

    sides: Tensor

    def __init__(self, model: nn.Module, *, probability: bool = False) -> None:
        super().__init__()
        self.model, self.probability = model, probability
        # Whatever the model inside says of its one output: a sigmoid makes a probability of each of these.
        problem = None if probability else "multi_label_classification"
        self.config = SimpleNamespace(problem_type=problem)
        # Not part of the weights: a checkpoint of the model inside stays one.
        self.register_buffer("sides", torch.tensor([[-1.0], [1.0]]), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the two scores, (batch, 2)."""
        logit: Tensor = self.model(images)
        logit = logit.unsqueeze(-1) if logit.ndim == 1 else logit
        if logit.ndim != 2 or logit.shape[1] != 1:
            raise UnsupportedModelError(f"the model has {tuple(logit.shape)[1:]} outputs where one logit is needed")
        sides = self.sides.to(logit)
        # 1 - p for "no": half of 1 - (-1) and of 1 - 1.
        return functional.linear(logit, sides, (1 - sides[:, 0]) / 2 if self.probability else None)
