"""Which patches a patch draws on in one block: rows of its attention, and of the vectors that attention brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from vitreous.errors import UnsupportedModelError
from vitreous.methods.decomposition import ContributionMatrix
from vitreous.models import LoadedModel
from vitreous.pictures.recording import recorded
from vitreous.pictures.strips import depth_of
from vitreous.spelling import parse
from vitreous.tape.diagnosis import missing_linear_part


@dataclass(frozen=True)
class BlockRows:
    """What patches draw on in one block, for all patches.

    Attributes:
        block: Which block.
        grid: Rows and columns of patches.
        attention: Attention averaged over heads, (patches, patches); a row sums to less than 1 where class or register
            tokens are looked at as well.
        contribution: How long the vectors are that attention brings from each patch (``attin``), (patches, patches);
            ``None`` where the model's attention does not reach its stream by a plain projection.
    """

    block: int
    grid: tuple[int, int]
    attention: Tensor
    contribution: Tensor | None

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return self.attention.nbytes + (0 if self.contribution is None else self.contribution.nbytes)


def block_rows(model: LoadedModel, pixels: Tensor, block: int) -> BlockRows:
    """Run the model once and read one block.

    Raises:
        UnsupportedModelError: the block's attention cannot be seen.
    """
    if not 0 <= block < depth_of(model, pixels):
        raise UnsupportedModelError(f"there is no block {block}: this model has {depth_of(model, pixels)} of them")
    recipe = parse(f"attin:layer={block}")
    with recorded(model, pixels, recipe) as view:
        if block in view.tape.unseen_attention or view.tape.other_attention is not None:
            raise UnsupportedModelError(f"no attention was seen in block {block} of this model, or more than one")
        layout = view.layout
        patches = slice(layout.prefix, layout.prefix + layout.patches)
        attention = view.attention(block).rows(patches).mean(dim=1)[0][:, patches].clone().cpu()
        contribution = None
        if missing_linear_part(view.tape, recipe.needs(view.depth)) is None:
            read = cast("ContributionMatrix", recipe.readout).reader(view, block)
            contribution = read(patches)[0][:, patches].clone().cpu()
        return BlockRows(block, layout.grid, attention, contribution)
