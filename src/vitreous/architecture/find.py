"""Finding the architecture of a model in one run of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import torch

from vitreous.architecture.attention import AttentionCall
from vitreous.architecture.description import (
    Architecture,
    Block,
    HeadPath,
    Norm,
    NormPlace,
    Point,
    StreamAxes,
    StreamStage,
)
from vitreous.architecture.find_attention import find_attention
from vitreous.architecture.norms import BlockNorms, find_written_norms, root_of
from vitreous.architecture.operations import made_of_input, moves_numbers, scales, walk_back
from vitreous.architecture.positions import PixelPositions, Placement, Places, find_placements
from vitreous.architecture.projections import HeadMaps, NotLinearError
from vitreous.architecture.stream import (
    ResidualWrite,
    Stage,
    branch_start,
    changed_through_a_view,
    channel_axis,
    find_overwriting,
    find_segments,
    find_stages,
    mixes_tokens,
    value_at,
)
from vitreous.architecture.trace import ModuleCall, Trace, Value, tensors_in
from vitreous.errors import MethodError, UnsupportedModelError

_BEHIND = 16  # steps: so many a norm that is written out has at most

_Part = TypeVar("_Part")


def describe(trace: Trace, name: str, stage: int | None = None) -> Architecture:
    """What a run shows.

    Raises:
        UnsupportedModelError: there is no stream of tokens in it.
    """
    calls = find_attention(trace)
    readers = [_StageReader(trace, found, name) for found in find_stages(find_segments(trace, calls))]
    first = next((reader for reader in readers if reader.stage.attention), None)
    located = [reader for reader in readers if not reader.only_pools and not (reader.is_plain and reader is first)]
    if (located and len(readers) > 1) or any(not reader.is_plain for reader in located):
        last = max(write.step.number for reader in readers for write in reader.stage.writes)
        # A norm may stand behind the last sum.
        positions = PixelPositions(trace, last + _BEHIND, {reader.stage.root.shape.numel() for reader in readers})
        for reader in located:
            reader.locate(positions)
    seen, readers = readers, _used([reader for reader in readers if reader.is_stream], trace)
    if not readers and any(reader.stage.attention for reader in seen):
        shape = next(reader for reader in seen if reader.stage.attention).stage.root.shape
        raise _apart(trace, name, " x ".join(map(str, shape)))
    if not readers and calls and _sums_of_rows(trace, calls):
        raise UnsupportedModelError(
            f"the residual stream of {name} has images and tokens in one axis, (images x tokens, channels), so tokens "
            "cannot be assigned to images; keep the stream as (images, tokens, channels)"
        )
    if not readers and calls:
        raise UnsupportedModelError(
            f"{name} has no single residual stream of tokens: the output of attention is not added to its input tokens "
            "(several streams are mixed, as in hyper-connections, or tokens are weighted sums over earlier blocks), so "
            "no method supports it"
        )
    if not readers:
        raise UnsupportedModelError(
            f"{name} has no residual stream of tokens: its run never adds a branch to the tokens it was computed from, "
            "so no method supports it"
        )
    stages = [
        StreamStage(reader.grid, reader.channels, _without_unread(reader.blocks(), trace), reader.places)
        for reader in readers
    ]
    chosen = _choose(readers, stages, trace.batch, calls) if stage is None else _checked(stage, stages, name)
    if readers[chosen].holds_several_streams:
        raise UnsupportedModelError(
            f"{name} keeps several streams of tokens side by side (as hyper-connections do), so it has no single "
            "residual stream of tokens; no method supports it"
        )
    owned = {call.output_step for each in readers for call in each.stage.attention}
    blocks = stages[chosen].blocks
    pooling = [call for call in calls if call.output_step not in owned and call.output_step > blocks[-1].output.step]
    later: list[AttentionCall] = []
    ends = []
    for reader in readers[chosen + 1 :]:
        if reader.only_pools or (reader.tokens == 1 and stage is None):
            pooling += reader.stage.attention
        else:
            later += reader.stage.attention
            ends.append(reader.stage.writes[-1].step.number)
    maps = HeadMaps(trace)
    return Architecture(
        name,
        tuple(stages),
        chosen,
        tuple(step.operation for step in trace.steps),
        find_overwriting(trace, blocks, name),
        pooling=tuple(maps.with_head_order(call) for call in sorted(pooling, key=lambda call: call.output_step)),
        chosen=stage,
        later=tuple(later),
        stream_end=max([blocks[-1].output.step, *ends]),
        placements=readers[chosen].placements(blocks, max([blocks[-1].output.step, *ends])),
        batch=trace.batch,
        written_norms=find_written_norms(trace),
        read_layers=_read_layers(trace, blocks),
    )


def _apart(trace: Trace, name: str, sizes: str) -> UnsupportedModelError:
    """Blocks that run on something else than the tokens of each image."""
    several = "s" if trace.batch > 1 else ""
    if len(trace.values[0].shape) == 5:
        return UnsupportedModelError(
            f"the blocks of {name} run on a tensor of shape {sizes} for {trace.batch} volume{several} or "
            f"clip{several}: slices or frames are run apart (attention within frames and across frames in turn), so "
            "that no one stream has all patches and no map can be laid out"
        )
    return UnsupportedModelError(
        f"the blocks of {name} run on a tensor of shape {sizes} for {trace.batch} image{several}: images are joined, "
        "repeated or split inside it, so tokens cannot be assigned to images; explain "
        f"{'one image at a time, or ' if several else ''}the inner model"
    )


def _read_layers(trace: Trace, blocks: tuple[Block, ...]) -> dict[int, int]:
    """By step behind the last block that does not depend on that block, the last block on whose input it depends."""
    last = trace.values[value_at(trace, blocks[-1].output)]
    inputs = [trace.values[value_at(trace, block.input) if block.input.step >= 0 else 0] for block in blocks]
    found = {}
    for step in trace.steps[last.step + 1 :]:
        made = trace.values[step.outputs[0]]
        if not made.comes_from(last):
            layers = [layer for layer, value in enumerate(inputs) if made.comes_from(value)]
            found.update({step.number: max(layers)} if layers else {})
    return found


def _sums_of_rows(trace: Trace, calls: list[AttentionCall]) -> bool:
    """Whether what attention gives is added to as many rows as there are images and tokens together."""
    rows = trace.batch * calls[0].queries
    heads = trace.values[calls[0].output]
    sums = (trace.values[step.outputs[0]] for step in trace.steps if step.operation == "add" and step.outputs)
    return any(len(value.shape) == 2 and value.shape[0] == rows and value.comes_from(heads) for value in sums)


def _used(readers: list[_StageReader], trace: Trace) -> list[_StageReader]:
    """The streams that the output is made of; a model may compute something that it does not use."""
    outputs = _returned(trace)
    used = [reader for reader in readers if any(each.comes_from(reader.stage.writes[-1].result) for each in outputs)]
    return used or readers


def _returned(trace: Trace) -> list[Value]:
    """The values that the model returns."""
    returned = {id(tensor) for tensor in tensors_in(trace.output)}
    return [value for value in trace.values if id(value.tensor) in returned]


def _without_unread(blocks: list[Block], trace: Trace) -> tuple[Block, ...]:
    """The blocks up to the last one that the output is made of: a dense head may read earlier blocks alone."""
    outputs = _returned(trace)

    def is_read(block: Block) -> bool:
        made = trace.values[value_at(trace, block.output)]
        return any(value.comes_from(made) for value in outputs)

    last = next((number for number in reversed(range(len(blocks))) if is_read(blocks[number])), len(blocks) - 1)
    return tuple(blocks[: last + 1])


def _checked(stage: int, stages: list[StreamStage], name: str) -> int:
    if not -len(stages) <= stage < len(stages):
        sizes = ", ".join(f"{place}: {'x'.join(map(str, each.grid))} tokens" for place, each in enumerate(stages))
        raise MethodError(f"stage={stage}: {name} has {len(stages)} stages, counted from 0 ({sizes})")
    return range(len(stages))[stage]


def _choose(readers: list[_StageReader], stages: list[StreamStage], batch: int, calls: list[AttentionCall]) -> int:
    """The last stage of several tokens; a plain one in which every token attends to every other goes first."""
    spatial = [
        place
        for place, stage in enumerate(stages)
        if stage.places is not None or not _made_by_attention(readers, place, calls)
    ]
    several = [place for place in spatial if stages[place].tokens > 1 and not readers[place].only_pools]
    whole = [place for place in spatial if readers[place].attends_to_all(batch) and readers[place].is_plain]
    attending = [place for place in several if stages[place].blocks[0].attention]
    if whole and not any(readers[place].attends_to_parts(batch) for place in several):
        return max(whole)
    last = max(several, default=len(stages) - 1)
    # Convolutions that follow a stream of tokens in one picture's size are a head.
    return last if not attending or stages[last].places is not None else max(attending)


def _made_by_attention(readers: list[_StageReader], place: int, calls: list[AttentionCall]) -> bool:
    """Whether the tokens of a stage are mixed by attention from those of the one before, and so have no place."""
    if place == 0:
        return False
    owned = {call.output_step for reader in readers for call in reader.stage.attention}
    trace, before, root = readers[place].trace, readers[place - 1].stage, readers[place].stage.root
    pooled = (trace.values[call.output] for call in calls if call.output_step not in owned)
    last = max(write.result.index for write in before.writes)
    return any(last < value.index <= root.index and root.comes_from(value) for value in pooled)


class _StageReader:
    """Reads the blocks of one stage of the stream."""

    def __init__(self, trace: Trace, stage: Stage, name: str) -> None:
        self._trace = self.trace = trace
        self._maps = HeadMaps(trace)
        self.stage, self._name = stage, name
        self._writes = stage.writes
        self._known: dict[torch.Size | int, StreamAxes] = {}
        self._positions: PixelPositions | None = None
        self._patches_last: tuple[int, ...] | None = None
        self.axes = self._axes_of(stage.root)
        self._patches_last = self._order_of_joined(stage.root)
        self.axes = self._axes_of(stage.root)
        self.places: Places | None = None

    @property
    def _norms(self) -> BlockNorms:
        return BlockNorms(self._trace, self.stage, self._point)  # not kept: a cycle would keep the tensors of the run

    @property
    def is_stream(self) -> bool:
        """Whether it has images, tokens and channels."""
        values = (self.stage.root, *(write.result for write in self._writes))
        return all(axes.batch >= 0 and axes.token_axes for axes in map(self._axes_of, values))

    @property
    def is_plain(self) -> bool:
        """Whether it is (batch, tokens, channels) and its attention, if it has any, is between all tokens."""
        axes, calls = self.axes, self.stage.attention
        whole = all(self._is_whole(call) for call in calls)
        return axes.dims == 3 and axes.batch >= 0 and whole

    @property
    def holds_several_streams(self) -> bool:
        """Whether its tokens have an axis more than those that attend."""
        sizes = [self.stage.root.shape[axis] for axis in self.axes.token_axes]
        apart = [math.prod(sizes) // size for size in sizes]
        looking = {call.queries for call in self.stage.attention}
        return len(sizes) > 1 and self.places is None and len(looking) == 1 and looking <= set(apart) - {1}

    def _is_whole(self, call: AttentionCall) -> bool:
        between_all = call.queries == call.keys == self.tokens and call.rows % self._trace.batch == 0
        return between_all and call.over_tokens

    def locate(self, positions: PixelPositions) -> None:
        """Find out where its tokens stand in the picture."""
        root, axes = self.stage.root, self.axes
        self.places = positions.places(root, axes.batch, axes.channel)
        if self.places is not None:
            self._positions = positions
            self.axes = self._axes_of(root)

    def placements(self, blocks: tuple[Block, ...], last: int) -> dict[int, Placement]:
        """Which tokens the results of its steps belong to; none where every step works on tokens as they are."""
        if self.is_plain and self.stage.attention and self.axes.plain:
            return {}
        trace, point = self._trace, blocks[0].input
        start = trace.values[trace.steps[point.step].outputs[point.output]] if point.step >= 0 else trace.values[0]
        count = math.prod(start.shape[axis] for axis in point.axes.token_axes) * point.axes.fold
        numbers = torch.arange(trace.batch * count, device=start.tensor.device).view(trace.batch, count, 1)
        spread = point.axes.stream(numbers.expand(-1, -1, start.shape[point.axes.channel]), start.shape)
        return find_placements(trace, start, spread, last)

    def _axes_of(self, value: Value) -> StreamAxes:
        """Which axes of a value of the stream are which, and how its tokens are ordered."""
        axes = self._axes_by_shape(value)
        if self._positions is None or self.places is None:
            fits = self._patches_last is not None and axes.dims == 3 and len(value.shape) == 3
            return replace(axes, order=self._patches_last) if fits else axes
        places = self._positions.places(value, axes.batch, axes.channel) or self.places
        return replace(axes, batch=max(axes.batch, 0), fold=places.fold, order=places.order)

    def _order_of_joined(self, root: Value) -> tuple[int, ...] | None:
        """The order in which patches come last, where tokens of the model's own stand behind or among them."""
        if self.axes.dims != 3 or self.axes.batch < 0:
            return None
        made = made_of_input(self._trace, root).movedim(self.axes.token_axes[0], 0).flatten(1).any(dim=1).tolist()
        own = [place for place, of_picture in enumerate(made) if not of_picture]
        if not own or True not in made or max(own) < made.index(True):
            return None
        return (*own, *(place for place, of_picture in enumerate(made) if of_picture))

    def _axes_by_shape(self, value: Value) -> StreamAxes:
        """Which axes of the stream are images and channels; behind the last block no layer may show it any more."""
        dims = len(value.shape)
        # Grids with as many channels as rows look alike with channels first and last.
        key = value.index if dims == 4 else value.shape
        if key not in self._known:
            channel = channel_axis(self._trace, value)
            if channel is None and value.shape in self._known:
                return self._known[value.shape]
            channel = dims - 1 if channel is None else channel
            axes = (axis for axis in range(dims) if axis != channel and value.shape[axis] == self._trace.batch)
            self._known[key] = StreamAxes(dims, next(axes, -1), channel)
            self._known.setdefault(value.shape, self._known[key])
        return self._known[key]

    def _point(self, value: Value) -> Point:
        """Where a value of the stream is made."""
        step = self._trace.maker(value)
        if step is None:
            return Point(-1, 0)
        if value.index not in step.outputs:
            raise changed_through_a_view(self._name)
        return Point(step.number, step.outputs.index(value.index), self._axes_of(value))

    @property
    def grid(self) -> tuple[int, ...]:
        """The sizes of the axes of its tokens; rows and columns where they are known to be patches alone."""
        if self.places is not None and not self.places.prefix:
            return self.places.grid
        return tuple(self.stage.root.shape[axis] for axis in self.axes.token_axes)

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return math.prod(self.grid)

    @property
    def channels(self) -> int:
        """How many channels a token has."""
        return self.stage.root.shape[self.axes.channel]

    def attends_to_all(self, batch: int) -> bool:
        """Whether every token attends to every other, image by image."""
        del batch
        calls = self.stage.attention
        return bool(calls) and all(map(self._is_whole, calls)) and self.tokens > 1

    def attends_to_parts(self, batch: int) -> bool:
        """Whether tokens attend to some only: in windows, or to pooled ones."""
        return bool(self.stage.attention) and not self.attends_to_all(batch)

    @property
    def only_pools(self) -> bool:
        """Whether a few tokens attend to all others and the others to none, as in a head."""
        calls = self.stage.attention
        return bool(calls) and all(call.queries < min(self.tokens, call.keys) for call in calls)

    def blocks(self) -> list[Block]:
        """The blocks, in order."""
        starts = self._starts()
        ends = [*(value for value, _ in starts[1:]), None]
        places = [value.index for value, _ in starts]
        found = []
        for number, (value, _) in enumerate(starts):
            after = places[number + 1] if number + 1 < len(places) else None
            writes = [
                write
                for write in self._writes
                if write.result.index > value.index and (after is None or write.result.index <= after)
            ]
            found.append(self._block(value, writes, ends[number]))
        return found

    def _starts(self) -> list[tuple[Value, ResidualWrite]]:
        """Where attention branches leave the stream; of a stream without attention, branches that mix tokens."""
        leading = [write for write in self._writes if write.attention]
        if not leading:
            leading = [write for write in self._writes if mixes_tokens(self._trace, write, self.tokens)] or self._writes
        found: dict[int, tuple[Value, ResidualWrite]] = {}
        for write in leading:
            start = branch_start(self.stage.segments, write)
            found.setdefault(start.index, (start, write))
        return [found[index] for index in sorted(found)]

    def _block(self, start: Value, writes: list[ResidualWrite], following: Value | None) -> Block:
        attending = next((write for write in writes if write.attention), writes[0])
        last = writes[-1]
        place = self._norms.place(start, attending, writes, following)
        output = following if following is not None else self._norms.last_output(last, place)
        first, second = self._norms.of_block(start, attending, writes, place, output)
        calls = tuple(self._maps.with_head_order(call) for write in writes for call in write.attention)
        module = self._module(start, output)
        span = self._attention_span(start, first, calls)
        paths, gap = self._head_paths(attending, calls)
        return Block(
            input=self._point(start),
            residual_mid=self._point(attending.result),
            middle=self._point(self._middle(attending, writes, place)),
            residual_post=self._point(last.result),
            output=self._point(output),
            attention=calls,
            first_norm=first,
            second_norm=second,
            norm_place=place,
            head_paths=paths,
            path_gap=gap,
            skips=tuple(self._maps.skip(write) for write in [attending, *(w for w in writes if w is not attending)]),
            value_maps=() if first is None else _all_known([self._maps.value_map(call) for call in calls]),
            attention_steps=span,
            module=None if module is None else module.module,
            name="" if module is None else module.name,
            writes=tuple(write.step.number for write in writes),
            one_sum=len(writes) == 1 and len(calls) <= 1 and self._adds_branches(attending),
            joined=len(attending.attention) == len(calls)
            and not self._in_series(calls)
            and not self._share_values(calls),
        )

    def _in_series(self, calls: tuple[AttentionCall, ...]) -> bool:
        """Whether one attention call reads what another has given."""
        outputs = [self._trace.values[call.output] for call in calls]
        return any(one is not other and one.comes_from(other) for one in outputs for other in outputs)

    def _share_values(self, calls: tuple[AttentionCall, ...]) -> bool:
        """Whether calls weigh the same values, as in differential attention: what counts is A1 less some A2."""
        own = [call for call in calls if call.spelling != "multi_head"]  # which projects its values itself
        values = [value.index for call in own if (value := self._maps.values_of(call)) is not None]
        return len(values) > len(set(values))

    def _middle(self, attending: ResidualWrite, writes: list[ResidualWrite], place: NormPlace) -> Value:
        """The stream that the feed-forward branch reads."""
        behind = [write for write in writes if write.step.number > attending.step.number]
        return behind[0].source if behind and place == "post" else attending.result

    def _adds_branches(self, write: ResidualWrite) -> bool:
        """Whether a branch is a sum of two."""
        step = self._trace.maker(walk_back(self._trace, write.branch, moves_numbers, scales))
        return step is not None and step.operation == "add" and len(set(step.operands)) > 1

    def _head_paths(self, write: ResidualWrite, calls: tuple[AttentionCall, ...]) -> tuple[tuple[HeadPath, ...], str]:
        """The ways from the heads to the stream, or why they are not linear."""
        try:
            return tuple(self._maps.path_to_stream(call, write, calls) for call in calls), ""
        except NotLinearError as reason:
            return (), str(reason)

    def _attention_span(self, start: Value, norm: Norm | None, calls: tuple[AttentionCall, ...]) -> tuple[int, int]:
        """From the first step behind the norm to the last that gives O."""
        if not calls:
            return -1, -1
        last = max(call.output_step for call in calls)
        first = start.step if norm is None or norm.output.step > last else norm.output.step
        return first + 1, last

    def _module(self, start: Value, output: Value) -> ModuleCall | None:
        """The innermost module call that takes the stream in front of a block and gives the one behind it."""
        trace, found = self._trace, None
        for call in trace.calls:
            given = [root_of(trace, trace.values[index]).index for index in call.inputs]
            made = [root_of(trace, trace.values[index]).index for index in call.outputs]
            if root_of(trace, output).index in made and root_of(trace, start).index in given:
                found = call
        return found


def _all_known(parts: list[_Part | None]) -> tuple[_Part, ...]:
    """All of several parts, or none where one of them is not known."""
    return tuple(part for part in parts if part is not None) if None not in parts else ()
