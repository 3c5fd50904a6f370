"""Attention: the calls as they were recorded, in whatever way a model spells them."""

from vitreous.tape.attention.record import (
    AttentionRecord,
    Rows,
    attend_fused,
    pieces_of,
    plain_gradients,
    row_pieces,
    score_gradient,
    value_gradient,
)

__all__ = [
    "AttentionRecord",
    "Rows",
    "attend_fused",
    "pieces_of",
    "plain_gradients",
    "row_pieces",
    "score_gradient",
    "value_gradient",
]
