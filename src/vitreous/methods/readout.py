"""Read-outs, and the view that they read: a score for every token, or a matrix between tokens, at one layer.

A view has one tape and the gradients of one target, without access to the model.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from vitreous._utils.messages import warn_caller
from vitreous._utils.torch_state import at_least_float32
from vitreous.errors import MethodError, UnsupportedModelError
from vitreous.inputs.patch_geometry import PatchGeometry, Size, along_axes, patch_of_line
from vitreous.tape import AttentionRecord, GradientNeeds, Gradients, Layout, Needs, Pass, Tape
from vitreous.tape.attention import Rows
from vitreous.tape.recording.plan import Layers
from vitreous.tape.rules.lrp import attention_relevance
from vitreous.tape.runner import ModelRunner

_FORMER_NAMES = {
    "subject": "runner",
    "heads_to_stream": "output_projection",
    "attended": "residual_mid",
    "middle": "after_attention",
    "end": "residual_post",
}


@dataclass(frozen=True)
class Row:
    """A row vector over tokens, given by its entries at ``rows``: one row of a product of matrices.

    A rollout needs only one row, so matrices are multiplied from the left by a row vector and never by each other.
    """

    weights: Tensor  # (batch, rows)
    rows: Rows

    def dense(self, tokens: int) -> Tensor:
        """All entries, (batch, tokens)."""
        if isinstance(self.rows, slice):
            return self.weights
        return self.weights.new_zeros(len(self.weights), tokens).index_copy_(1, self.rows, self.weights)


@dataclass(frozen=True, repr=False)
class View:
    """One tape and the gradients of one target per image, by backward pass.

    What can be read for a block ``l`` (0 to ``depth`` - 1), and how a method declares it (``activations=("tokens",)``,
    ``gradients=("attention",)``):

    =========================================  =========================================  ==============================
    read                                       what                                       declared as
    =========================================  =========================================  ==============================
    ``tokens(l)``                              x_l, the block's input                     activation ``tokens``
    ``norm(l)``                                the first norm's output                    activation ``norms``
    ``residual_mid(l)``                        x_l plus the attention output              activation ``residual``
    ``after_attention(l)``                     that, normalised in a post-norm block       activation ``residual``
    ``residual_post(l)``                       that plus the feed-forward output          activation ``residual``
    ``attention(l)``, ``attention_matrix(l)``  A, all rows                                activation ``attention``
    ``value(l)``, a few rows of A              v of every head                            activation ``attention_rows``
    ``output_projection(l)``                   W_O of every head                          activation ``projections`` too
    ``token_gradient(backward, l)``            dy/dx_l                                    gradient ``tokens``
    ``norm_gradient(backward, l)``             the gradient at the first norm             gradient ``norms``
    ``attention_gradient(backward, l)``        dy/dA                                      gradient ``attention``
    ``attention_relevance(backward, l)``       R_A, under a rule that carries it          gradient ``attention``
    ``biases(backward, l)``                    bias x gradient                            gradient ``biases``
    =========================================  =========================================  ==============================

    Always available: ``layout``, ``depth``, ``dtype``, ``read_row``, ``last_attention``.

    Attributes:
        tape: the recorded run.
        gradients: the gradients of each backward pass.
        target: the explained class of each image, (batch,).
        runner: runs the model again, for methods that need it.
    """

    tape: Tape
    gradients: Mapping[Pass, Gradients]
    target: Tensor
    runner: ModelRunner

    def __dir__(self) -> list[str]:
        """List the public names: what can be read."""
        return [name for name in super().__dir__() if not name.startswith("_")]

    if not TYPE_CHECKING:  # type checkers report the former names as errors

        def __getattr__(self, name: str) -> Any:
            """Resolve names of earlier versions, with a warning."""
            if name not in _FORMER_NAMES:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            new = _FORMER_NAMES[name]
            warnings.warn(f"view.{name} is now called view.{new}", DeprecationWarning, stacklevel=2)
            return getattr(self, new)

    def __repr__(self) -> str:
        grid = " x ".join(map(str, self.layout.grid))
        return (
            f"{type(self).__name__}({len(self.target)} images, {self.depth} blocks, {self.layout.tokens} tokens, the "
            f"last {grid} of them patches; dir() lists what can be read)"
        )

    @property
    def layout(self) -> Layout:
        """Patch grid, prefix tokens and the tokens that the head reads."""
        return self.tape.layout

    @property
    def depth(self) -> int:
        """L, the number of blocks."""
        return self.tape.depth

    def tokens(self, layer: int) -> Tensor:
        """x_l, the input of a block, (batch, tokens, channels); layer L is the last block's output."""
        return at_least_float32(self.tape.tokens(layer))

    def token_gradient(self, backward: Pass, layer: int) -> Tensor:
        """dy/dx_l, (batch, tokens, channels)."""
        return at_least_float32(self.gradients[backward].tokens[layer])

    def norm(self, layer: int) -> Tensor:
        """The output of a block's first norm, (batch, tokens, channels)."""
        return at_least_float32(self.tape.norm(layer))

    def norm_gradient(self, backward: Pass, layer: int) -> Tensor:
        """The gradient at the output of a block's first norm, (batch, tokens, channels)."""
        return at_least_float32(self.gradients[backward].norms[layer])

    def biases(self, backward: Pass, layer: int) -> Tensor:
        """Bias x gradient of all biases in a block, (batch, tokens); index L is everything after the last block."""
        return self.gradients[backward].biases[layer]

    def attention(self, layer: int) -> AttentionRecord:
        """The attention call of a block: q, k, v, and A by ``rows(...)`` or indexed as a tensor."""
        return self.tape.attention(layer)

    def attention_matrix(self, layer: int, rows: Rows = slice(None)) -> Tensor:
        """A of a block, or some rows of it, (batch, head, rows, tokens)."""
        return at_least_float32(self.attention(layer).rows(rows))

    def residual_mid(self, layer: int) -> Tensor:
        """The stream after adding the attention output, before the norm of a post-norm block."""
        return at_least_float32(self.tape.residual_mid(layer))

    def after_attention(self, layer: int) -> Tensor:
        """The stream between the attention and the feed-forward part of a block, (batch, tokens, channels)."""
        return at_least_float32(self.tape.after_attention(layer))

    def residual_post(self, layer: int) -> Tensor:
        """The stream after adding the feed-forward output, before the norm of a post-norm block."""
        return at_least_float32(self.tape.residual_post(layer))

    def value(self, layer: int) -> Tensor:
        """The values v of every head, with all biases, (batch, head, tokens, channels)."""
        return at_least_float32(self.attention(layer).value)

    def output_projection(self, layer: int) -> Tensor:
        """W_O of every head, LayerScale included, (channels of the stream, head, channels of the head)."""
        projection = self.tape.head_projection(layer)
        assert projection is not None
        if not projection.same_for_all_tokens:
            raise UnsupportedModelError(
                f"in block {layer} the output of the attention heads is normalised or gated, token by token, before it "
                "is added to the residual stream, so there is no single W_O"
            )
        weight = at_least_float32(projection.weight)
        return weight.reshape(len(weight), self.attention(layer).heads, -1)

    def attention_gradient(self, backward: Pass, layer: int, rows: Rows = slice(None)) -> Tensor:
        """dy/dA = (dy/dO) Vᵀ for some rows, (batch, head, rows, tokens); GradToken eq. 4."""
        value = self.value(layer)
        output_gradient = self.gradients[backward].outputs[layer].to(value.dtype)
        return output_gradient[:, :, rows] @ value.transpose(-2, -1)

    def attention_relevance(self, backward: Pass, layer: int, rows: Rows = slice(None)) -> Tensor:
        """R_A for some rows, (batch, head, rows, tokens), under a rule that carries relevance."""
        return attention_relevance(self.attention(layer), rows, self.gradients[backward].outputs[layer][:, :, rows])

    @cached_property
    def read_row(self) -> Row:
        """The tokens that the head reads, with equal weights summing to 1: the class token's row."""
        read = self.layout.read
        weights = torch.full(
            (len(self.tape.logits), len(read)), 1 / len(read), dtype=self.dtype, device=self.tape.logits.device
        )
        return Row(weights, read)

    @property
    def last_attention(self) -> tuple[int, Tensor]:
        """The layer of the last attention and the rows that the output depends on: the class token's, or all pooled.

        Layer L is an attention pooling after the last block.
        """
        queries = self.layout.pooling_queries
        return (self.depth - 1, self.layout.read) if queries is None else (self.depth, queries)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores: the model's precision, at least float32."""
        return at_least_float32(self.tape.logits[:0]).dtype


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

    def evaluations_on(self, grid: tuple[int, ...] | None) -> int | None:
        """Return the number of forward passes per image of a grid of patches; ``None`` if it is not known before."""
        del grid
        return self.evaluations

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
