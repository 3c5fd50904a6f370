"""What happens to tokens in a block (TokenTM Figs. 1-2): attention, change of length, change of direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from vitreous.errors import MethodError
from vitreous.explaining import explain
from vitreous.explanation import Explanation
from vitreous.methods.tokentm import TokenTransformation
from vitreous.pictures.data.recording import recorded
from vitreous.pixels import Images, Model, find_model
from vitreous.spelling import parse
from vitreous.targets import Target
from vitreous.torch_state import leaves_torch_as_it_was


@dataclass(frozen=True)
class Transformation:
    """What the attention of one block does with the patches, (patches,) each, the mean over heads.

    Attributes:
        explanation: What the model says of the photo, and TokenTM's map of it.
        block: Which block.
        attention: A, how much the class token looks at each patch; the pooled tokens where there is no class token.
        length: L (eq. 10), the length of what a patch hands on, by the patch's own.
        direction: NECC (eq. 12) times the number of tokens: above 1 where what it hands on points the way that it does.
        combined: A x L x NECC of every head, then the mean, in the same unit as ``attention``.
    """

    explanation: Explanation
    block: int
    attention: Tensor
    length: Tensor
    direction: Tensor
    combined: Tensor


@leaves_torch_as_it_was
def token_transformation(model: Model, image: Images, block: int = -1, target: Target = None) -> Transformation:
    """Look into one block; negative numbers count from the top."""
    spelling = "tokentm:necc=rescaled"
    loaded = find_model(model, image)
    explanation = explain(loaded, image, spelling, target)
    recipe = parse(spelling)
    readout = cast("TokenTransformation", recipe.readout)
    ratio_alone = TokenTransformation("probability", "af_l", "paper")
    with recorded(loaded, image, recipe, target) as view:
        if not -view.depth <= block < view.depth:
            raise MethodError(f"block {block} does not exist: the model has {view.depth} blocks, 0 to {view.depth - 1}")
        layer = block % view.depth
        attention = view.attention(layer).rows(view.layout.read).mean(dim=2)[0]  # (head, tokens)
        of_length, of_both = (one.attention_weight(view, layer) for one in (ratio_alone, readout))
        assert of_length is not None
        assert of_both is not None
        length, weight = (one(view.layout.read).mean(dim=2)[0] for one in (of_length, of_both))  # (head, tokens)
        direction = torch.where(length > 0, weight / length, 0)
        parts = (attention, length, direction, attention * weight)
        patches = [part.mean(dim=0)[view.layout.prefix :].clone().cpu() for part in parts]
    return Transformation(explanation, layer, *patches)
