"""Which axis of the stream its tokens lie along, where names leave that open.

``nn.MultiheadAttention`` takes tokens first unless told otherwise. The stream of such a model may run that way too, or
the block may turn it around for its attention alone. One image shows it: the axis of size 1 is the batch.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from vitreous.anatomy import Anatomy
from vitreous.tape.first_block import first_block_input
from vitreous.tape.inputs import Inputs


def with_token_axis(anatomy: Anatomy, model: nn.Module, inputs: Inputs) -> Anatomy:
    """The anatomy with the axis that the stream of ``model`` really has; costs its embedding of one image.

    A model that fails before its first block is left to fail where that is reported.
    """
    if anatomy.batch_first:
        return anatomy
    stream = first_block_input(anatomy, model, inputs[:1])
    turned = stream is not None and stream.dim() == 3 and stream.shape[0] == 1 < stream.shape[1]
    return replace(anatomy, batch_first=turned)
