"""What a run shows of a model: the residual stream, its blocks, and where in the run their parts are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from vitreous.architecture.attention import AttentionCall
from vitreous.architecture.positions import Placement, Places
from vitreous.inputs.model_io import OutputActivation

# Where a block normalises: x + f(norm(x)), norm(x + f(x)), or x + norm(f(x)).
NormPlace = Literal["pre", "post", "branch"]


@dataclass(frozen=True)
class StreamAxes:
    """How the residual stream lies in memory.

    Attributes:
        dims: how many axes it has.
        batch: the axis of the images.
        channel: the axis of the channels; the others are the tokens.
        fold: how many places of the images' axis are one image's: a part of its tokens lies there.
        order: by place, row by row behind the prefix, the token that stands there; ``None`` where tokens lie so.
    """

    dims: int = 3
    batch: int = 0
    channel: int = 2
    fold: int = 1
    order: tuple[int, ...] | None = None

    @property
    def token_axes(self) -> tuple[int, ...]:
        """The axes of the tokens."""
        return tuple(axis for axis in range(self.dims) if axis not in (self.batch, self.channel))

    @property
    def plain(self) -> bool:
        """Whether it is (batch, tokens, channels)."""
        return (self.dims, self.batch, self.channel, self.fold) == (3, 0, 2, 1) and self.order is None

    def tokens(self, stream: Tensor) -> Tensor:
        """The stream as (batch, tokens, channels), patches row by row."""
        if self.plain:
            return stream
        tokens = stream.permute(self.batch, *self.token_axes, self.channel).flatten(1, -2)
        if self.fold > 1:
            tokens = tokens.reshape(len(tokens) // self.fold, -1, tokens.shape[-1])
        return tokens if self.order is None else tokens[:, torch.tensor(self.order, device=tokens.device)]

    def stream(self, tokens: Tensor, like: torch.Size) -> Tensor:
        """(batch, tokens, channels) as the model has its stream; ``like`` is the shape of the model's own."""
        if self.plain:
            return tokens
        if self.order is not None:
            tokens = tokens[:, torch.tensor(self.order, device=tokens.device).argsort()]
        if self.fold > 1:
            tokens = tokens.reshape(len(tokens) * self.fold, -1, tokens.shape[-1])
        sizes = [like[axis] for axis in self.token_axes]
        spread = tokens.reshape(len(tokens), *sizes, tokens.shape[-1])
        order = (self.batch, *self.token_axes, self.channel)
        return spread.permute([order.index(axis) for axis in range(self.dims)])

    @property
    def batch_first(self) -> bool:
        """Whether images come before tokens."""
        return self.batch == 0


@dataclass(frozen=True)
class Point:
    """A tensor of a run that can be found again in another run of the same model.

    Attributes:
        step: the number of the step that makes it.
        output: which of the step's results it is.
        axes: what its axes are, where it is the stream.
    """

    step: int
    output: int = 0
    axes: StreamAxes = StreamAxes()


@dataclass(frozen=True)
class Norm:
    """A normalisation of the stream.

    Attributes:
        input: what it was given.
        output: what it gave.
        step: the step, where it is a single one.
        module: the module that did it, where one did.
        identity: whether there is none: the branch starts at the stream as it is.
        alone: whether all that an attention call reads is its output; a model may normalise anew for every projection.
    """

    input: Point
    output: Point
    step: int | None = None
    module: nn.Module | None = None
    identity: bool = False
    alone: bool = True


@dataclass(frozen=True)
class WrittenNorm:
    """A norm that a module of the model writes out: mean, square root, quotient.

    Attributes:
        input: what it is given.
        output: what it gives.
        first: the first of its steps.
    """

    input: Point
    output: Point
    first: int


# What a step does to every token by itself, statistics and gates held constant: multiply it with a matrix or with
# factors, normalise it (LayerNorm, RMSNorm; to length 1; by BatchNorm), take off its mean, gate it (an activation f as
# f(u) / u, a GLU), add something else, or add it to the stream, perhaps weighed.
PathKind = Literal["linear", "factor", "norm", "normalize", "batch_norm", "centre", "activation", "glu", "same", "sum"]


@dataclass(frozen=True)
class TokenAxes:
    """Which axes of a tensor are images, tokens and channels; heads may have an axis of their own among the latter.

    Attributes:
        order: its axes: images, tokens, channels.
        images: how many of them are images.
        channels: how many of them are channels.
    """

    order: tuple[int, ...]
    images: int
    channels: int

    def tokens(self, tensor: Tensor) -> Tensor:
        """A tensor as (batch, tokens, channels)."""
        ordered = tensor.permute(self.order)
        first = len(self.order) - self.channels
        sizes = ordered.shape
        return ordered.reshape(sizes[: self.images].numel(), sizes[self.images : first].numel(), sizes[first:].numel())

    def channel_numbers(self, shape: torch.Size) -> Tensor:
        """The number of its channel for every entry of a tensor of that shape."""
        sizes = [shape[axis] for axis in self.order]
        first = len(sizes) - self.channels
        numbers = torch.arange(math.prod(sizes[first:])).reshape(sizes[first:]).expand(sizes)
        return numbers.permute([self.order.index(axis) for axis in range(len(sizes))])

    def spread(self, factor: Tensor, shape: torch.Size) -> Tensor | None:
        """A factor that a tensor of that shape is multiplied with, (batch, tokens, .) or (1, 1, .)."""
        if factor.dim() > len(shape):
            return None
        factor = factor.reshape(*[1] * (len(shape) - factor.dim()), *factor.shape)
        first = len(self.order) - self.channels
        sizes = list(factor.shape)
        for axes in (self.order[:first], self.order[first:]):
            if any(sizes[axis] > 1 for axis in axes):
                for axis in axes:
                    sizes[axis] = shape[axis]
        return self.tokens(factor.expand(sizes))


@dataclass(frozen=True)
class PathStep:
    """A step on the way from the heads to the residual sum.

    Attributes:
        step: its number.
        kind: what it does.
        position: which of its arguments is on the way; another one is a factor.
        axes: how that argument lies; ``None`` where only its channels count.
        channels: which channel each of its channels was behind the step before; at first, of all heads, head by head;
            -1 for those of another attention call. ``None`` on the stream's own way.
    """

    step: int
    kind: PathKind
    position: int = 0
    axes: TokenAxes | None = None
    channels: Tensor | None = None


@dataclass(frozen=True)
class HeadPath:
    """The way from the heads of an attention call to the residual sum.

    Attributes:
        steps: what happens on it, in order; the last is the sum.
        multi_head: the step that is attention and output projection in one, if it is one.
    """

    steps: tuple[PathStep, ...]
    multi_head: int | None = None


@dataclass(frozen=True)
class ValueMap:
    """The linear map from the first norm to the values.

    Attributes:
        step: the linear layer.
        rows: the rows of its weight that make the values, head by head.
    """

    step: int
    rows: Tensor


@dataclass(frozen=True)
class Block:
    """One transformer block: what lies between two places where an attention branch leaves the stream.

    Attributes:
        input: x_l, the stream where the block's attention branch starts.
        residual_mid: the stream with the attention branch added.
        middle: the stream that the feed-forward branch reads; in a post-norm block, normalised.
        residual_post: the stream with the feed-forward branch added, before a post-norm block normalises it.
        output: x_{l+1}.
        attention: the attention calls in it.
        first_norm: the norm that belongs to the attention branch.
        second_norm: the norm that belongs to the feed-forward branch.
        norm_place: where the norms stand.
        head_paths: the way of every attention call's heads to the stream; empty where it is not linear.
        path_gap: why it is not, in words.
        skips: by residual sum, attention first, the steps by which the stream itself is multiplied with constants.
        value_maps: W_V of every attention call; empty where values are no linear map of the first norm.
        joined: whether several attention calls read the same tokens side by side: one attention with all their heads.
        attention_steps: the first and the last step of the attention branch up to O.
        module: the module that the block is, where it is one; a label, nothing depends on it.
        name: its dotted name.
        writes: the steps that add something to the stream.
        one_sum: whether attention and feed-forward branch are added at once, so that there is no stream between them.
    """

    input: Point
    residual_mid: Point
    middle: Point
    residual_post: Point
    output: Point
    attention: tuple[AttentionCall, ...]
    first_norm: Norm | None
    second_norm: Norm | None
    norm_place: NormPlace
    head_paths: tuple[HeadPath, ...]
    value_maps: tuple[ValueMap, ...]
    attention_steps: tuple[int, int] = (-1, -1)
    module: nn.Module | None = None
    name: str = ""
    writes: tuple[int, ...] = ()
    one_sum: bool = False
    joined: bool = False
    path_gap: str = ""
    skips: tuple[tuple[PathStep, ...], ...] = ()

    @property
    def normalised(self) -> Point:
        """The output of the first norm; the block's input where it has none that gives tokens."""
        return self.input if self.first_norm is None else self.first_norm.output


@dataclass(frozen=True)
class StreamStage:
    """The stream while it has one size; a plain Vision Transformer has one stage.

    Attributes:
        grid: rows and columns, or the sizes of the axes of its tokens in the traced run: a single one where they lie
            in one row and other tokens are among them.
        channels: how many channels a token has.
        blocks: the blocks, in order.
        places: where in the picture its tokens stand, where that was followed from the pixels.
    """

    grid: tuple[int, ...]
    channels: int
    blocks: tuple[Block, ...]
    places: Places | None = None

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return math.prod(self.grid)


@dataclass(frozen=True)
class Architecture:
    """What a run of a model showed.

    Attributes:
        name: the model's class.
        stages: the stages of its stream, in order.
        stage: which of them is read.
        steps: how many steps the run had.
        operations: what each step does; a run that does something else is another one.
        in_place: the steps that change the stream of the blocks in place.
        scale: kind of its outputs, if its configuration declares it.
        pooling: attention calls behind the stage that is read.
        chosen: the stage that the caller chose, if one was.
        later: attention calls in the blocks of later stages.
        stream_end: the last step of the stage that is read, or of attention in later ones.
        placements: by step in the blocks of the stage that is read, which tokens its result belongs to; empty where the
            blocks work on (batch, tokens, channels) alone.
        batch: how many images or texts the run had.
        written_norms: the norms that modules write out.
        read_layers: by step behind the last block that works on tokens of earlier blocks alone, the last block whose
            input they are: a head may read several.
    """

    name: str
    stages: tuple[StreamStage, ...]
    stage: int
    operations: tuple[str, ...]
    in_place: frozenset[int] = frozenset()
    scale: OutputActivation | None = None
    pooling: tuple[AttentionCall, ...] = ()
    chosen: int | None = None
    later: tuple[AttentionCall, ...] = ()
    stream_end: int = -1
    placements: Mapping[int, Placement] = field(default_factory=dict)
    batch: int = 1
    written_norms: tuple[WrittenNorm, ...] = ()
    read_layers: Mapping[int, int] = field(default_factory=dict)

    def with_outputs(self, outputs: OutputActivation | None) -> Architecture:
        """The same model with declared outputs, overriding its configuration; ``None`` changes nothing."""
        return self if outputs is None else replace(self, scale=outputs)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the stage that is read."""
        return self.stages[self.stage].blocks

    @property
    def depth(self) -> int:
        """L, the number of blocks."""
        return len(self.blocks)

    @property
    def has_attention(self) -> bool:
        """Whether every block attends."""
        return all(block.attention for block in self.blocks)
