"""Aggregations: combine the read-outs of several layers into one map."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from vitreous.errors import MethodError
from vitreous.methods.gradtoken import spread
from vitreous.methods.readout import MatrixReadout, Readout, Residual, TokenReadout, total
from vitreous.methods.view import View
from vitreous.tape import Needs, unite


class Aggregation(ABC):
    """Which layers are read, and how they are combined."""

    @abstractmethod
    def layers(self, depth: int) -> range:
        """The layers that are read in a model of ``depth`` blocks."""

    @abstractmethod
    def combine(self, readout: Readout, view: View) -> Tensor:
        """Scores of all tokens, (batch, tokens)."""

    def needs(self, readout: Readout, depth: int) -> Needs:
        """What the tape must hold for these layers; for a matrix between tokens, only the rows that the head reads."""
        needs = unite(readout.needs(layer, depth) for layer in self.layers(depth))
        return needs.by_rows if isinstance(readout, MatrixReadout) else needs


class OneLayer(Aggregation):
    """The read-out of a single layer; negative numbers count from the top."""

    def __init__(self, *, layer: Annotated[int, "the block that is read; -1 is the last"] = 0) -> None:
        self.layer = layer

    def layers(self, depth: int) -> range:
        """The one layer."""
        layer = _within(self.layer, depth, "layer")
        return range(layer, layer + 1)

    def combine(self, readout: Readout, view: View) -> Tensor:
        """The layer's token scores, or the class token's row of its matrix."""
        (layer,) = self.layers(view.depth)
        if self.layer == -1 and isinstance(readout, MatrixReadout) and view.layout.pooled_by_attention:
            return readout.top_row(view).dense(view.layout.tokens)  # the last attention is the pooling one
        return _read(readout, view, layer)


class Plus(Aggregation):
    """PLUS (SkipPLUS eq. 4): the sum of the read-outs of all layers from ``start`` up."""

    def __init__(self, *, start: Annotated[int, "the first block that counts"] = 0) -> None:
        self.start = start

    def layers(self, depth: int) -> range:
        """All layers from the start."""
        return range(_within(self.start, depth, "start"), depth)

    def combine(self, readout: Readout, view: View) -> Tensor:
        """The sum over layers."""
        layers = self.layers(view.depth)
        if isinstance(readout, TokenReadout):
            return readout.read_sum(view, layers)
        return total(_read(readout, view, layer) for layer in layers)


class SkipPlus(Plus):
    """SkipPLUS: PLUS over the upper half only. The paper starts at ceil(L/2); its program at L//2."""

    def __init__(
        self, *, half: Annotated[Literal["ceil", "floor"], "where the upper half starts if the depth is odd"] = "ceil"
    ) -> None:
        self.half = half

    def layers(self, depth: int) -> range:
        """The upper half."""
        start = math.ceil(depth / 2) if self.half == "ceil" else depth // 2
        return range(min(start, depth - 1), depth)


class Rollout(Aggregation):
    """The product of the layers' matrices with the residual connection; only one row of it is computed."""

    def __init__(
        self,
        *,
        start: Annotated[int, "the lowest block of the product"] = 0,
        depth: Annotated[int | None, "how many blocks, counted from the lowest; all by default"] = None,
        residual: Annotated[
            Literal["default", "add", "half", "none"], "I + M, (I + M)/2, M; default: as the method's paper"
        ] = "default",
    ) -> None:
        self.start = start
        self.depth = depth
        self.residual = residual

    def layers(self, depth: int) -> range:
        """The layers of the product, lowest first."""
        start = _within(self.start, depth, "start")
        if self.depth is None:
            return range(start, depth)
        if not 0 < self.depth <= depth - start:
            raise MethodError(f"depth={self.depth} is not between 1 and {depth - start}, the number of blocks")
        return range(start, start + self.depth)

    def needs(self, readout: Readout, depth: int) -> Needs:
        """All rows of the matrices, except the topmost, where the product starts with the rows that the head reads."""
        *below, top = self.layers(depth)
        return unite([*(readout.needs(layer, depth) for layer in below), readout.needs(top, depth).by_rows])

    def combine(self, readout: Readout, view: View) -> Tensor:
        """The class token's row of the product."""
        assert isinstance(readout, MatrixReadout)
        residual: Residual = readout.residual if self.residual == "default" else self.residual
        row = readout.top_row(view)
        for layer in reversed(self.layers(view.depth)):
            row = readout.step(view, layer, row, residual)
        return readout.finish(view, row)


@dataclass(frozen=True)
class Propagate:
    """GradToken's propagation (its eq. 13) for any map: Ā[patches, patches] times the map."""

    def needs(self, depth: int) -> Needs:
        """The attention of all blocks but the last."""
        return Needs(attention=frozenset(range(depth - 1)))

    def apply(self, view: View, scores: Tensor) -> Tensor:
        """Spread patch scores (batch, patches) by the average attention of the lower blocks."""
        return spread(view, range(view.depth - 1), scores[..., None])[..., 0] if view.depth > 1 else scores


AGGREGATIONS: Mapping[str, Callable[..., Aggregation]] = {"rollout": Rollout, "plus": Plus, "skipplus": SkipPlus}


def _read(readout: Readout, view: View, layer: int) -> Tensor:
    if isinstance(readout, MatrixReadout):
        return readout.row_times(view, layer, readout.top_row(view))
    assert isinstance(readout, TokenReadout)
    return readout.read(view, layer)


def _within(layer: int, depth: int, name: str) -> int:
    if not -depth <= layer < depth:
        raise MethodError(f"{name}={layer} does not exist: the model has {depth} blocks, 0 to {depth - 1}")
    return layer % depth
