"""The patch grid of a model that cuts up its pictures without a convolution: what changes when their edges do.

Which pixels a token is made of cannot be told from the shapes of tensors: 33 tokens of a picture of 32 x 64 pixels may
be patches of 8 x 8, of 4 x 16 or of 16 x 4 pixels. But the first row of pixels is in the first row of patches alone,
and the first column in the first column.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.errors import InputError, UnsupportedModelError
from vitreous.tape.first_block import first_block_input
from vitreous.tape.half import exact

_NOISE = 10.0  # so large that the change of an edge is seen in half precision, too
_ROUNDING = 1e-3  # of what all pixels change of a token: one of its edges changes far more of it, rounding less


def grid_by_edges(anatomy: Anatomy, model: nn.Module, images: Tensor) -> tuple[int, int]:
    """Rows and columns of patches; costs the embedding of six pictures.

    Raises:
        InputError: the far edges of the picture are in no patch.
        UnsupportedModelError: patches in rows, behind all other tokens, would change in another way.
    """
    stream = first_block_input(anatomy, model, _with_other_edges(images[:1].detach()))
    if stream is None or stream.dim() != 3:
        raise _not_shown(anatomy.name)
    stream = exact(stream if anatomy.batch_first else stream.transpose(0, 1))
    change = (stream[1:] - stream[:1]).abs().amax(dim=-1)
    rounding = torch.maximum(_ROUNDING * change.amax(dim=0), _ROUNDING**2 * change.amax())
    whole, top, bottom, left, right = change > rounding
    if bool(whole.any()) and not bool(bottom.any() and right.any()):
        height, width = images.shape[-2:]
        raise InputError(
            f"the last rows or columns of images of {height} x {width} pixels are in no patch of {anatomy.name}, so "
            "that no map fits them; cut or scale them"
        )
    patches = whole & ~(top & bottom & left & right)  # some models have a token that says something of all pixels
    count, columns = int(patches.sum()), int((patches & top).sum())
    places = torch.arange(len(patches), device=patches.device) - (len(patches) - count)
    expected = [
        (patches, places >= 0),
        (patches & top, (places >= 0) & (places < columns)),
        (patches & bottom, places >= count - columns),
        (patches & left, (places >= 0) & (places % max(1, columns) == 0)),
    ]
    if count == 0 or columns == 0 or count % columns or not all(torch.equal(*pair) for pair in expected):
        raise _not_shown(anatomy.name)
    return count // columns, columns


def _with_other_edges(image: Tensor) -> Tensor:
    """A picture as it is, all of it changed, and its first and last rows and columns."""
    noise = torch.randn(image.shape[1:], generator=torch.Generator().manual_seed(0)) * _NOISE
    images = image.repeat(6, 1, 1, 1)
    every, first, last = slice(None), slice(1), slice(-1, None)
    for number, (rows, columns) in enumerate(
        ((every, every), (first, every), (last, every), (every, first), (every, last)), start=1
    ):
        images[number, :, rows, columns] += noise.to(image)[:, rows, columns]
    return images


def _not_shown(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} makes its patches without a convolution, and which of its tokens change with the edges of a picture "
        "does not show rows of patches behind all other tokens, so no map can be laid out; embed patches by a "
        "convolution whose kernel and stride are their size"
    )
