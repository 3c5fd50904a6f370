"""Read-outs: a score for every token or a matrix between tokens at one layer; and sums of pixels over patches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from vitreous._utils.messages import warn_caller
from vitreous._utils.tensors import at_least_float32
from vitreous.errors import MethodError
from vitreous.inputs.patch_geometry import PatchGeometry, Size, along_axes, patch_of_line
from vitreous.methods.view import Row, View
from vitreous.tape import AttentionRecord, GradientNeeds, Layout, Needs, Pass
from vitreous.tape.attention import Rows
from vitreous.tape.recording.plan import Layers

RuleName = Literal["plain", "frozen", "libra", "attnlrp", "conservative", "residual"]

Resolution = Literal["patch", "pixel"]
ResolutionOption = Annotated[Resolution, "one score per patch, the sum of its pixels, or one per pixel"]


def input_scores(attributions: Tensor, layout: Layout, resolution: Resolution) -> Tensor:
    """Sum attributions of the input to scores of patches or pixels.

    Attributions are those of an image (batch, channel, height, width), of a volume or clip with one axis more, or of
    tokens (batch, tokens, channels).
    """
    if attributions.dim() > 3:
        pixels = attributions.sum(dim=layout.channel_axis)
        maps = pixels if resolution == "pixel" else patch_sums(pixels, layout.grid, layout.geometry)
        return maps.flatten(1)
    if resolution == "pixel":
        raise MethodError("resolution=pixel needs an image: a text has no pixels")
    return attributions.sum(dim=-1)[:, layout.prefix :]


def patch_sums(pixels: Tensor, grid: Size, geometry: PatchGeometry | None = None) -> Tensor:
    """Sum pixels (batch, height, width) over the patches of a grid: (batch, rows, columns); of volumes likewise.

    Every pixel counts once, even if the grid does not divide the image, so the sum of the map is preserved.
    """
    cells = [
        _cells(patch_of_line(length, cells, geometry, axis), cells, pixels)
        for axis, (length, cells) in enumerate(zip(pixels.shape[1:], grid, strict=True))
    ]
    return along_axes(pixels, cells)


def patch_means(maps: Tensor, size: Size, grid: Size, geometry: PatchGeometry | None = None) -> Tensor:
    """Average maps (..., height x width) over the pixels of every patch: (..., patches)."""
    pixels = maps.reshape(-1, *size)
    sums = patch_sums(pixels, grid, geometry) / patch_sums(torch.ones_like(pixels[:1]), grid, geometry)
    return sums.reshape(*maps.shape[:-1], -1)


def layout_means(maps: Tensor, size: Size, layout: Layout) -> Tensor:
    """Average maps (..., height x width) over the pixels of every patch of a layout: (..., patches)."""
    return patch_means(maps, size, layout.grid, layout.geometry)


def _cells(patches: Tensor, cells: int, like: Tensor) -> Tensor:
    """Return the one-hot matrix (cells, length) of the patch of each pixel along one axis."""
    return torch.nn.functional.one_hot(patches, cells).T.to(like)


FORMER_NAMES = {"values": "activations", "slopes": "gradients"}  # of what a read-out declares

Residual = Literal["add", "half", "none"]
ReadRows = Callable[[Rows], Tensor]


class Readout(ABC):  # noqa: B024 - the kinds below have the abstract methods
    """What a method reads at a layer, and what a tape has to hold for it.

    Attributes:
        activations: activations that are read at the layer, names of ``Needs`` fields.
        gradients: activations whose gradient is read at the layer, names of ``GradientNeeds`` fields.
        backward: the backward pass of its gradients.
        signed: whether the sign of its scores carries meaning; ``None`` to use the registry entry.
        runs_again: whether it runs the model again, which makes a method expensive.
        evaluations: number of forward passes per image, if its options determine it.
    """

    activations: ClassVar[tuple[str, ...]] = ()
    gradients: ClassVar[tuple[str, ...]] = ()
    backward: Pass = Pass("plain", "logit")
    signed: bool | None = None
    runs_again: bool = False
    evaluations: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for former, name in FORMER_NAMES.items():
            if former in vars(cls):
                warn_caller(f"{cls.__name__}.{former} is now called {name}", DeprecationWarning)
                setattr(cls, name, vars(cls)[former])

    def needs(self, layer: int, depth: int) -> Needs:
        """What the tape must hold to read ``layer`` of a model with ``depth`` blocks."""
        del depth
        here: Layers = frozenset({layer})
        activations: dict[str, Any] = dict.fromkeys(self.activations, here)
        gradients = GradientNeeds(**dict.fromkeys(self.gradients, here))
        return Needs(**activations, gradients={self.backward: gradients} if self.gradients else {})

    def under(self, rule: RuleName) -> Self:
        """Take the gradients under a rule, and return this read-out.

        The gradient of an attention matrix is (dy/dO) Vᵀ with dy/dO under the rule, even if the rule does not propagate
        it further.
        """
        if rule == "residual" and "attention" not in self.gradients:
            raise MethodError(
                "under rule=residual no gradient passes through attention, so none gets from the class token to "
                "patches; use it with methods that read the attention's gradient"
            )
        self.backward = Pass(rule, self.backward.objective)
        return self


class TokenReadout(Readout):
    """A score for every token."""

    @abstractmethod
    def read(self, view: View, layer: int) -> Tensor:
        """Scores of all tokens at a layer, (batch, tokens)."""

    def read_sum(self, view: View, layers: range) -> Tensor:
        """Scores summed over layers; terms that several layers share may count once."""
        return total(self.read(view, layer) for layer in layers)


class Procedure(Readout):
    """A method that is not a read-out of layers but computes its map directly.

    Attributes:
        resolution: whether its map has patches or pixels.
    """

    runs_again = True
    resolution: Resolution = "patch"

    @abstractmethod
    def map(self, view: View) -> Tensor:
        """Scores of the patches (batch, patches), or of all pixels (batch, height x width)."""


class MatrixReadout(Readout):
    """A matrix between tokens (to, from), used only through row vector x matrix.

    Attributes:
        residual: the default residual connection in a rollout: ``add`` I + M, ``half`` (I + M)/2, ``none`` M.
        unmoved_by: options of a rollout that have no effect, each with the reason.
        only_as_product: whether it is a product of blocks with a final step, so that single blocks have no map and
            cannot be summed.
    """

    residual: Residual = "add"
    unmoved_by: ClassVar[Mapping[str, str]] = {}
    only_as_product: ClassVar[bool] = False

    @abstractmethod
    def reader(self, view: View, layer: int) -> ReadRows:
        """Return a function that computes some rows of the layer's matrix, (batch, rows, tokens)."""

    def row_times(self, view: View, layer: int, row: Row) -> Tensor:
        """``row`` times the layer's matrix, (batch, tokens)."""
        read = self.reader(view, layer)
        return total(times(weights, read(rows)) for rows, weights in _row_pieces(view.attention(layer), row))

    def top_row(self, view: View) -> Row:
        """The start of a rollout: the class token, the pooled tokens, or the row of an attention pooling."""
        queries = view.layout.pooling_queries
        if queries is None:
            return view.read_row
        weights = view.read_row.weights.new_full((len(view.tape.logits), len(queries)), 1 / len(queries))
        entries = self.row_times(view, view.depth, Row(weights, queries))
        # The pooling may exclude the prefix tokens.
        excluded = view.layout.tokens - entries.shape[1]
        return Row(torch.nn.functional.pad(entries, (excluded, 0)), slice(None))

    def step(self, view: View, layer: int, row: Row, residual: Residual) -> Row:
        """One block of a rollout, from the top down."""
        moved = self.row_times(view, layer, row)
        if residual == "none":
            return Row(moved, slice(None))
        kept = row.dense(moved.shape[1])
        return Row((kept + moved) / 2 if residual == "half" else kept + moved, slice(None))

    def finish(self, view: View, row: Row) -> Tensor:
        """The scores from the final row of a rollout."""
        return row.dense(view.layout.tokens)


def _row_pieces(attention: AttentionRecord, row: Row) -> Iterator[tuple[Rows, Tensor]]:
    """Yield the rows of the entries of a row vector with these entries, in pieces that bound memory."""
    for piece in attention.pieces(row.weights.shape[1]):
        yield piece if isinstance(row.rows, slice) else row.rows[piece], row.weights[:, piece]


def mean_over_heads(matrices: Tensor) -> Tensor:
    """mean_h of (batch, head, rows, tokens), in float32 at least."""
    return at_least_float32(matrices).mean(dim=1)


def projected_lengths(value: Tensor, projection: Tensor) -> Tensor:
    """||v W_O|| of every head, (batch, head, tokens).

    v W_O (batch, head, tokens, channels) is never built: ||v W_O||² = v (W_O W_Oᵀ) vᵀ with a Gram matrix of the head's
    channels.
    """
    gram = torch.einsum("dhk,dhl->hkl", projection, projection)
    return ((value @ gram) * value).sum(-1).clamp_(min=0).sqrt_()


def times(weights: Tensor, matrix: Tensor) -> Tensor:
    """(batch, rows) x (batch, rows, tokens) -> (batch, tokens), in the finer of their precisions."""
    dtype = torch.promote_types(weights.dtype, matrix.dtype)
    return torch.bmm(weights[:, None].to(dtype), matrix.to(dtype))[:, 0]


def total(parts: Iterable[Tensor]) -> Tensor:
    """Sum tensors in place, into the first one."""
    parts = iter(parts)
    result = next(parts)
    for part in parts:
        result.add_(part)
    return result
