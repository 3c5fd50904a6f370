"""Finding the architecture of a model in one run of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vitreous.architecture.attention import AttentionCall, find_attention
from vitreous.architecture.description import (
    Architecture,
    Block,
    Norm,
    NormPlace,
    Point,
    Projection,
    StreamAxes,
    StreamStage,
    ValueMap,
)
from vitreous.architecture.operations import (
    MULTI_HEAD,
    NORM,
    is_linear,
    linear_weight,
    moves_numbers,
    replay,
    scales,
    value_of,
    walk_back,
)
from vitreous.architecture.stream import (
    ResidualWrite,
    Stage,
    branch_start,
    find_segments,
    find_stages,
    mixes_tokens,
)
from vitreous.architecture.trace import ModuleCall, Step, Trace, Value
from vitreous.errors import UnsupportedModelError

_Part = TypeVar("_Part")


def describe(trace: Trace, name: str, stage: int | None = None) -> Architecture:
    """What a run shows.

    Raises:
        UnsupportedModelError: there is no stream of tokens in it.
    """
    calls = find_attention(trace)
    stages = [_StageReader(trace, found) for found in find_stages(trace, find_segments(trace, calls))]
    stages = [reader for reader in stages if reader.is_stream]
    if not stages:
        raise UnsupportedModelError(
            f"{name} has no residual stream of tokens: no sum of tokens with something that was made from them was seen "
            "in its run, so no method here serves it"
        )
    described = [StreamStage(reader.grid, reader.channels, tuple(reader.blocks())) for reader in stages]
    chosen = _choose(stages, described, trace.batch, calls) if stage is None else range(len(stages))[stage]
    owned = {call.output_step for each in stages for call in each.stage.attention}
    last = described[chosen].blocks[-1].output.step
    pooling = tuple(call for call in calls if call.output_step not in owned and call.output_step > last)
    later = tuple(call for reader in stages[chosen + 1 :] for call in reader.stage.attention)
    return Architecture(
        name,
        tuple(described),
        chosen,
        tuple(step.operation for step in trace.steps),
        frozenset(step.number for step in trace.steps if step.in_place),
        pooling=tuple(sorted((*pooling, *later), key=lambda call: call.output_step)),
        chosen=stage,
        batch=trace.batch,
    )


def _choose(
    readers: list[_StageReader], stages: list[StreamStage], batch: int, calls: list[AttentionCall]
) -> int:
    """The last stage in which every token attends to every other; where there is none, the last of several tokens."""
    spatial = [place for place in range(len(stages)) if not _made_by_attention(readers, place, calls)]
    whole = [place for place in spatial if readers[place].attends_to_all(batch)]
    several = [place for place in spatial if stages[place].tokens > 1 and not readers[place].only_pools]
    attending = [place for place in several if stages[place].blocks and stages[place].blocks[0].attention]
    return max(whole or attending or several or [len(stages) - 1])


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

    def __init__(self, trace: Trace, stage: Stage) -> None:
        self._trace = self.trace = trace
        self.stage = stage
        self._writes = stage.writes
        self._known: dict[torch.Size, StreamAxes] = {}
        self.axes = self._axes_of(stage.root)

    @property
    def is_stream(self) -> bool:
        """Whether it has images, tokens and channels."""
        values = (self.stage.root, *(write.result for write in self._writes))
        return all(axes.batch >= 0 and axes.token_axes for axes in map(self._axes_of, values))

    def _axes_of(self, value: Value) -> StreamAxes:
        """Which axes of the stream are images and channels; behind the last block no layer may show it any more."""
        if value.shape not in self._known:
            dims, channel = len(value.shape), _channel_axis(self._trace, value)
            channel = dims - 1 if channel is None else channel
            axes = (axis for axis in range(dims) if axis != channel and value.shape[axis] == self._trace.batch)
            self._known[value.shape] = StreamAxes(dims, next(axes, -1), channel)
        return self._known[value.shape]

    def _point(self, value: Value) -> Point:
        """Where a value of the stream is made."""
        step = self._trace.maker(value)
        if step is None:
            return Point(-1, 0)
        return Point(step.number, step.outputs.index(value.index), self._axes_of(value))

    def _same(self, first: Value, second: Value) -> bool:
        """Whether two values hold the same numbers, perhaps in another shape or scaled."""
        return self._root(first) is self._root(second)

    def _root(self, value: Value) -> Value:
        return walk_back(self._trace, value, moves_numbers, scales)

    @property
    def grid(self) -> tuple[int, ...]:
        """The sizes of the axes of its tokens."""
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
        calls = self.stage.attention
        between_all = all(call.queries == call.keys == self.tokens and call.rows % batch == 0 for call in calls)
        return bool(calls) and between_all and self.tokens > 1

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
        trace = self._trace
        attending = next((write for write in writes if write.attention), writes[0])
        last = writes[-1]
        place = self._norm_place(start, attending, writes, following)
        output = following if following is not None else self._last_output(last, place)
        first, second = self._norms(start, attending, writes, place, output)
        calls = tuple(self._with_head_order(call) for write in writes for call in write.attention)
        module = self._module(start, output)
        span = self._attention_span(start, first, calls)
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
            output_projections=_all_known([self._projection(call, attending) for call in calls]),
            value_maps=() if first is None else _all_known([self._value_map(call, first) for call in calls]),
            attention_steps=span,
            module=None if module is None else module.module,
            name="" if module is None else module.name,
            writes=tuple(write.step.number for write in writes),
            one_sum=len(writes) == 1 and len(calls) <= 1 and self._adds_branches(attending),
            joined=len(attending.attention) == len(calls) and not self._in_series(calls),
        )

    def _in_series(self, calls: tuple[AttentionCall, ...]) -> bool:
        """Whether one attention call reads what another has given."""
        outputs = [self._trace.values[call.output] for call in calls]
        return any(one is not other and one.comes_from(other) for one in outputs for other in outputs)

    def _middle(self, attending: ResidualWrite, writes: list[ResidualWrite], place: NormPlace) -> Value:
        """The stream that the feed-forward branch reads."""
        behind = [write for write in writes if write.step.number > attending.step.number]
        return behind[0].source if behind and place == "post" else attending.result

    def _adds_branches(self, write: ResidualWrite) -> bool:
        """Whether a branch is a sum of two."""
        step = self._trace.maker(walk_back(self._trace, write.branch, moves_numbers, scales))
        return step is not None and step.operation == "add" and len(set(step.operands)) > 1

    def _norm_place(
        self, start: Value, attending: ResidualWrite, writes: list[ResidualWrite], following: Value | None
    ) -> NormPlace:
        trace = self._trace
        behind = [write for write in writes if write.step.number > attending.step.number]
        continued = behind[0].source if behind else following
        moved_on = continued is not None and continued.comes_from(attending.result)
        if moved_on and continued is not None and not self._same(continued, attending.result):
            if self._normalised_between(attending.result, continued):
                return "post"
        ends = trace.maker(walk_back(trace, attending.branch, moves_numbers, scales))
        if ends is not None and ends.operation in NORM and _is_identity(self._first_norm(start, attending)):
            return "branch"
        return "pre"

    def _normalised_between(self, before: Value, after: Value) -> bool:
        """Whether nothing but a norm lies between two values of the stream."""
        steps = [step for step in self._trace.between(before, after) if step.number > before.step]
        return self._looks_like_norm(steps)

    def _last_output(self, last: ResidualWrite, place: NormPlace) -> Value:
        """The stream behind the last block, normalised where the blocks do so themselves."""
        if place != "post":
            return last.result
        for norm in self._norms_of(last.result):
            return norm[1]
        return last.result

    def _norms_of(self, value: Value) -> list[tuple[Value, Value, int | None, nn.Module | None]]:
        """The norms that a value is given to: input, output, step and module."""
        trace = self._trace
        found: list[tuple[Value, Value, int | None, nn.Module | None]] = []
        for step in trace.steps[value.step + 1 :]:
            source = value_of(trace, step)
            if step.operation in NORM and source is not None and self._same(source, value):
                call = self._call_around(step)
                made = step.outputs[0] if call is None else call.outputs[0]
                found.append((source, trace.values[made], step.number, None if call is None else call.module))
        for call in trace.calls:
            given = [trace.values[index] for index in call.inputs]
            made = [trace.values[index] for index in call.outputs]
            if len(given) == len(made) == 1 and self._same(given[0], value):
                steps = trace.steps[call.first : call.last]
                if given[0].shape == made[0].shape and steps and self._looks_like_norm(steps):
                    found.append((given[0], made[0], None, call.module))
        return sorted(found, key=lambda norm: norm[1].index)

    def _looks_like_norm(self, steps: list[Step]) -> bool:
        """Whether steps work on a token's channels alone and divide by their length."""
        names = {step.operation for step in steps}
        lengths = {"rsqrt", "sqrt", "std", "norm", "vector_norm", "normalize", "pow", "var", "std_mean", "var_mean"}
        return bool(names & {*NORM, *lengths}) and not any(is_linear(step, self._depends(step)) for step in steps)

    def _call_around(self, step: Step) -> ModuleCall | None:
        """The call of a module that a step is all there is to, but for another dtype."""
        made = self._root(self._trace.values[step.outputs[0]])
        for call in self._trace.calls:
            inside = call.first <= step.number < call.last and len(call.outputs) == 1
            if inside and self._root(self._trace.values[call.outputs[0]]) is made:
                return call if not any(True for _ in call.module.children()) else None
        return None

    def _module_of(self, step: Step) -> nn.Module | None:
        """The module that a step is all there is to."""
        call = self._call_around(step)
        return None if call is None else call.module

    def _first_norm(self, start: Value, attending: ResidualWrite) -> Norm | None:
        """The norm between the stream and the first linear map of a branch."""
        trace = self._trace
        steps = trace.between(start, attending.branch)
        linear = next((step for step in steps if is_linear(step, self._depends(step)) or step.operation == "scaled_dot_product_attention"), None)
        for source, made, step, module in self._norms_of(start):
            if linear is not None and any(trace.values[index].comes_from(made) for index in linear.operands):
                return Norm(self._point(source), self._point(made), step, module)
        if linear is not None and any(self._same(trace.values[index], start) for index in linear.operands):
            return Norm(self._point(start), self._point(start), identity=True)
        return None

    def _norms(
        self, start: Value, attending: ResidualWrite, writes: list[ResidualWrite], place: NormPlace, output: Value
    ) -> tuple[Norm | None, Norm | None]:
        trace = self._trace
        behind = [write for write in writes if write.step.number > attending.step.number]
        if place == "post":
            middle = behind[0].source if behind else output
            first = self._norm_between(attending.result, middle)
            second = self._norm_between(behind[-1].result, output) if behind else None
            return first, second
        if place == "branch":
            return self._norm_of_branch(attending), self._norm_of_branch(behind[-1]) if behind else None
        first = self._first_norm(start, attending)
        second = self._first_norm(branch_start(self.stage.segments, behind[0]), behind[0]) if behind else None
        del trace
        return first, second

    def _norm_between(self, before: Value, after: Value) -> Norm | None:
        for source, made, step, module in self._norms_of(before):
            if self._same(after, made):
                return Norm(self._point(source), self._point(made), step, module)
        return None

    def _norm_of_branch(self, write: ResidualWrite) -> Norm | None:
        trace = self._trace
        made = walk_back(trace, write.branch, moves_numbers, scales)
        step = trace.maker(made)
        source = None if step is None else value_of(trace, step)
        if step is None or source is None or step.operation not in NORM:
            return None
        return Norm(self._point(source), self._point(made), step.number, self._module_of(step))

    def _depends(self, step: Step) -> Callable[[Any], bool]:
        tensors = {id(self._trace.values[index].tensor) for index in step.operands}
        return lambda value: isinstance(value, Tensor) and id(value) in tensors

    def _projection(self, call: AttentionCall, write: ResidualWrite) -> Projection | None:
        """The one linear map between O and the stream."""
        trace = self._trace
        heads, value = trace.values[call.output], write.branch
        if write.step.operation not in {"add", "sum"} or write.step.kwargs.get("alpha", 1) != 1:
            return None
        if walk_back(trace, write.skip, moves_numbers) is not walk_back(trace, write.source, moves_numbers):
            return None  # the stream itself is scaled
        inside = call.spelling == "multi_head"
        linear: int | None = call.output_step if inside else None
        mixed: Value | None = None
        scaling: list[int] = []
        while value is not heads:
            step = trace.maker(value)
            if step is None or value.index <= heads.index:
                return None
            moved, scaled = moves_numbers(trace, step, value), scales(trace, step, value)
            if moved is not None:
                value = moved
            elif scaled is not None:
                scaling.append(step.number)
                value = scaled
            elif step.operation in {"add", "cat", "stack"}:
                parts = [trace.values[index] for index in step.operands]
                parts = [part for part in parts if part.comes_from(heads)]
                if len(parts) != 1:
                    return None
                value = parts[0]
            elif linear is None and linear_weight(step, self._depends(step)) is not None:
                linear = step.number
                mixed = value_of(trace, step)
                if mixed is None:
                    return None
                value = mixed
            else:
                return None
        if linear is None or inside:
            return None if linear is None else Projection(linear, tuple(scaling), None)
        columns = None if mixed is None else self._columns(call, heads, mixed)
        return None if columns is None else Projection(linear, tuple(scaling), columns)

    def _columns(self, call: AttentionCall, heads: Value, mixed: Value) -> Tensor | None:
        """Which input channel of W_O each channel of each head is, (head, channel)."""
        moved = replay(self._trace, heads, mixed)
        if moved is None:
            return None
        places = torch.empty(heads.shape.numel(), dtype=torch.int64)
        channels = torch.arange(mixed.shape[-1]).expand(mixed.shape)
        here = moved.flatten() >= 0
        places[moved.flatten()[here]] = channels.flatten()[here]
        places = places.reshape(heads.shape)
        if call.spelling == "written":
            arranged = call.output_arrangement().arrange(places, self._trace.batch)
        elif places.dim() == 3:
            arranged = places.unflatten(0, (self._trace.batch, -1)) if len(places) % self._trace.batch == 0 else None
        else:
            arranged = places if places.dim() == 4 else None
        return None if arranged is None else arranged[0, :, 0]

    def _with_head_order(self, call: AttentionCall) -> AttentionCall:
        """Find out, where heads and images lie along one axis, which of them come first."""
        trace = self._trace
        step = trace.steps[call.output_step]
        rows = len(trace.values[call.output].shape) == 3
        if call.spelling == "multi_head" or not rows or call.rows <= trace.batch or call.rows % trace.batch:
            return call
        for index in step.operands:
            value = trace.values[index]
            _, before = self._linear_before(value)
            moved = None if before is None or before.shape[0] != trace.batch else replay(trace, before, value)
            if moved is None or moved.dim() != 3 or len(moved) != call.rows:
                continue
            images = moved[:, 0, 0] // (before.shape.numel() // trace.batch)  # type: ignore[union-attr]
            return replace(call, heads_first=bool(images[0] != images[1]))
        return call

    def _value_map(self, call: AttentionCall, norm: Norm) -> ValueMap | None:
        """The rows of the linear layer that makes the values of the first norm's output."""
        trace = self._trace
        step = trace.steps[call.output_step]
        if call.spelling == "multi_head":
            width = step.argument(0, "query").shape[-1]
            rows = torch.arange(width)
            return ValueMap(step.number, rows)
        if call.spelling == "fused":
            tensor = step.argument(2, "value")
        else:
            operands = [trace.values[index] for index in step.operands]
            tensor = operands[1 if call.weights_first else 0].tensor
        value = next((trace.values[index] for index in step.operands if trace.values[index].tensor is tensor), None)
        if value is None:
            return None
        linear, before = self._linear_before(value)
        if linear is None or before is None:
            return None
        moved = replay(trace, before, value)
        if moved is None:
            return None
        heads = self._by_head(call, moved % before.shape[-1])
        return None if heads is None else ValueMap(linear.number, heads[0, :, 0].flatten())

    def _by_head(self, call: AttentionCall, values: Tensor) -> Tensor | None:
        """A tensor that lies as the values of a call do, as (batch, head, token, channel)."""
        if call.spelling == "written":
            return call.value_arrangement().arrange(values, self._trace.batch)
        if values.dim() == 3 and len(values) % self._trace.batch == 0:
            return values.unflatten(0, (self._trace.batch, -1))
        return values if values.dim() == 4 else None

    def _linear_before(self, value: Value) -> tuple[Step | None, Value | None]:
        """The linear layer whose output a value is a part of."""
        trace = self._trace
        for _ in range(len(trace.steps)):
            step = trace.maker(value)
            if step is None:
                return None, None
            if linear_weight(step, self._depends(step)) is not None and step.operation == "linear":
                return step, value
            source = value_of(trace, step)
            if source is None:
                return None, None
            value = source
        return None, None

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
            given = [self._root(trace.values[index]).index for index in call.inputs]
            made = [self._root(trace.values[index]).index for index in call.outputs]
            if self._root(output).index in made and self._root(start).index in given:
                found = call
        return found


def _all_known(parts: list[_Part | None]) -> tuple[_Part, ...]:
    """All of several parts, or none where one of them is not known."""
    return tuple(part for part in parts if part is not None) if None not in parts else ()


def _is_identity(norm: Norm | None) -> bool:
    return norm is None or norm.identity


def _channel_axis(trace: Trace, root: Value) -> int | None:
    """The axis along which the first layer behind a value multiplies or normalises."""
    dims = len(root.shape)
    for step in trace.steps[root.step + 1 :]:
        for index in step.operands:
            given = trace.values[index]
            if not given.comes_from(root) or walk_back(trace, given, moves_numbers) is not walk_back(trace, root, moves_numbers):
                continue
            axis = _layer_axis(step, given)
            if axis is None:
                continue
            moved = replay(trace, root, given) if given is not root else None
            if given is root or moved is None:
                return axis % len(given.shape) if given is root or len(given.shape) == dims else dims - 1
            return _axis_of_step(moved, axis, root.shape)
    return None


def _layer_axis(step: Step, given: Value) -> int | None:
    if step.operation in {"layer_norm", "rms_norm", "linear", MULTI_HEAD, "native_layer_norm", "normalize"}:
        return -1
    if step.operation in {"matmul", "addmm", "mm"} and len(step.operands) == 1:
        return -1
    if step.operation in {"conv1d", "conv2d", "conv3d", "batch_norm", "group_norm", "instance_norm"}:
        return 1 if len(given.shape) > 2 else -1
    if step.operation in {"mean", "var", "var_mean", "std", "std_mean", "norm", "vector_norm"}:
        axis = step.argument(1, "dim") if step.kwargs.get("keepdim") else None
        return axis if isinstance(axis, int) else axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else None
    return None


def _axis_of_step(moved: Tensor, axis: int, shape: torch.Size) -> int:
    """Along which axis of ``shape`` one goes, going along ``axis`` of a tensor of flat indices."""
    if moved.shape[axis] < 2:
        return len(shape) - 1
    distance = int((moved.select(axis, 1) - moved.select(axis, 0)).flatten()[0])
    strides = [shape[place + 1 :].numel() for place in range(len(shape))]
    return strides.index(distance) if distance in strides else len(shape) - 1


def check_order(architecture: Architecture) -> bool:
    """Whether blocks follow each other."""
    return all(first.output == second.input for first, second in pairwise(architecture.blocks))
