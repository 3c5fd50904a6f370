"""What a block does to its tokens (TokenTM, figures 1 and 2): attention, change of length, change of direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from vitreous._utils.torch_state import leaves_torch_as_it_was
from vitreous.api.explain import explain
from vitreous.errors import MethodError
from vitreous.explanation.explanation import Explanation
from vitreous.inputs.targets import AnyTarget
from vitreous.methods.spelling import parse
from vitreous.methods.tokentm import TokenTransformation
from vitreous.models.pixels import Images, Model, find_model
from vitreous.pictures.recording import recorded


@dataclass(frozen=True)
class Transformation:
    """What the attention of one block does to the patches, (patches,) each, averaged over heads.

    Attributes:
        explanation: TokenTM's explanation of the image.
        block: Index of the block.
        attention: A, from the class token to each patch; from the pooled tokens in models without a class token.
        length: L (eq. 10), the norm of the transformed patch token relative to that of the patch token.
        direction: NECC (eq. 12) times the number of tokens: above 1 where both point in a similar direction.
        combined: A x L x NECC of every head, then the mean, in the unit of ``attention``.

    Examples:
        >>> from vitreous.pictures import token_transformation
        >>> found = token_transformation(model, "demo.jpg")
        >>> found.block  # the last one
        5
    """

    explanation: Explanation
    block: int
    attention: Tensor
    length: Tensor
    direction: Tensor
    combined: Tensor


@leaves_torch_as_it_was
def token_transformation(model: Model, image: Images, block: int = -1, target: AnyTarget = None) -> Transformation:
    """Measure what one block does to its tokens, as TokenTM does ([wu2024token][], eqs. 10 and 12).

    Args:
        model: The model, in any form that ``explain`` takes.
        image: The image.
        block: Index of the block; negative numbers count from the top.
        target: The class to explain; the predicted one by default.

    Examples:
        >>> from vitreous.pictures import token_transformation
        >>> found = token_transformation(model, "demo.jpg", block=0)
        >>> found.block, found.attention.shape == found.combined.shape
        (0, True)
    """
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
