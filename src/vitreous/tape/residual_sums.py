"""What a block adds to its stream, at two tokens: enough to see in the run whether W_O is what its name says.

A weight that is called ``proj`` need not be all that stands between the heads and the stream: the block may scale what
it gives, or the module may have a forward of its own. So the sums of a block are noted where they happen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitreous.tape.half import HALF, exact
from vitreous.tape.interception import Handler
from vitreous.tape.plan import Layers

# Between two tokens biases cancel, and what W_O makes of the heads' difference is the difference in the stream: to
# rounding, relative to that difference (TF32 rounds to 5e-4, half precision to about 1% after a few steps) ...
_EXACT, _ROUNDED = 2e-3, 0.05
# ... and, where two tokens are nearly alike, to a few units in the last place of the tokens themselves; where a small
# LayerScale leaves next to nothing of them in half precision, to the four roundings of two tokens here and there.
_UNITS, _SMALLEST = 16, 4


class Sum(NamedTuple):
    """A sum of two streams, each at two tokens, (batch, 2, channels)."""

    first: Tensor
    second: Tensor
    total: Tensor


class ResidualSums:
    """Notes the sums inside some blocks.

    Args:
        layers: the blocks whose sums are wanted.
        batch_first: whether the stream is (batch, token, channel).
        reads_text: whether the tokens are a text's, of which those behind the first two may be padding.
    """

    def __init__(self, layers: Layers, *, batch_first: bool, reads_text: bool) -> None:
        self._layers, self._batch_first, self._reads_text = layers, batch_first, reads_text
        self._inputs: dict[int, Tensor] = {}
        self._sums: dict[int, list[Sum]] = {}
        self._layer: int | None = None
        self._shape = torch.Size()
        self._projecting = False

    def enter_block(self, layer: int, tokens: Tensor) -> None:
        """A block begins with these tokens."""
        if layer in self._layers:
            self._layer, self._shape, self._projecting = layer, tokens.shape, False
            self._inputs[layer], self._sums[layer] = self.two_tokens(tokens), []

    def leave_block(self) -> None:
        """The block has run."""
        self._layer = None

    def project(self, *, running: bool) -> None:
        """W_O's own module runs: what it adds up is its own business, only its result counts."""
        self._projecting = running

    def over(self, inner: Handler) -> Handler:
        """``inner``, a handler of sums, with a note of each that could be one of streams."""

        def handler(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._layer is None or self._projecting or kwargs or len(args) != 2 or not all(map(self._streams, args)):
                return inner(func, args, kwargs)
            first, second = map(self.two_tokens, args)  # before the call, which may work in place
            output = inner(func, args, kwargs)
            self._sums[self._layer].append(Sum(first, second, self.two_tokens(output)))
            return output

        return handler

    def two_tokens(self, stream: Tensor) -> Tensor:
        """The first token and one in the middle, or of a text the second, (batch, 2, channels)."""
        stream = stream.detach().reshape(self._shape)
        stream = stream if self._batch_first else stream.transpose(0, 1)
        return stream[:, self._two(stream.shape[1])].clone()

    def mix_of_heads(self, output: Tensor) -> Tensor:
        """O of the same two tokens, heads side by side: (batch, head, tokens, channels) -> (batch, 2, channels)."""
        return output.detach()[:, :, self._two(output.shape[2])].transpose(1, 2).flatten(2)

    def carry(self, layer: int, projected: Tensor) -> bool:
        """Whether ``projected``, W_O of the heads' mix at the two tokens, is added to the stream as it is.

        Directly, x + a, or as part of a sum: x + (a + m) and (x + m) + a, as parallel blocks have it.
        """
        if projected.shape != self._inputs[layer].shape:  # an attention that is narrower than the stream
            return False
        streams = [self._inputs[layer]]
        carrying: list[Tensor] = []
        for first, second, total in self._sums[layer]:
            for part, rest in ((second, first), (first, second)):  # x + a is more usual than a + x
                carries = _alike(part, [projected, *carrying])
                if not _alike(rest, streams):
                    carrying += [total] if carries else []
                elif carries:
                    return True
                else:
                    streams.append(total)
        return False

    def _two(self, tokens: int) -> slice:
        distance = 1 if self._reads_text else max(1, tokens // 2)
        return slice(0, distance + 1, distance)

    def _streams(self, value: Any) -> bool:
        """Whether a value is as large as the stream; some blocks give it another shape for a while."""
        return (
            isinstance(value, Tensor)
            and value.dim() > 1
            and value.shape[-1] == self._shape[-1]
            and value.numel() == self._shape.numel()
        )


def _alike(found: Tensor, references: list[Tensor]) -> bool:
    """Whether two tokens differ as those of one of the references do: what is added to both does not count."""
    return any(_differ_alike(found, reference) for reference in references)


def _differ_alike(found: Tensor, reference: Tensor) -> bool:
    coarse = max((found.dtype, reference.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    found, reference = exact(found), exact(reference)
    expected = reference[:, 0] - reference[:, -1]
    error = (found[:, 0] - found[:, -1] - expected).abs().amax()
    unit, smallest = torch.finfo(coarse).eps, torch.finfo(coarse).smallest_normal
    rounding = _UNITS * unit * found.abs().amax() + _SMALLEST * unit * smallest
    return bool(error <= (_ROUNDED if coarse in HALF else _EXACT) * expected.abs().amax() + rounding)
