"""Finding the architecture of a model in one run of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

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
    ALIAS,
    JOIN,
    MULTI_HEAD,
    NORM,
    SLICE,
    is_linear,
    linear_weight,
    moves_numbers,
    replay,
    replay_from,
    scales,
    value_of,
    walk_back,
)
from vitreous.architecture.overwriting import changed_through_a_view, find_overwriting
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


def describe(trace: Trace, name: str, stage: int | None = None) -> Architecture:
    """What a run shows.

    Raises:
        UnsupportedModelError: there is no stream of tokens in it.
    """
    calls = find_attention(trace)
    seen = [_StageReader(trace, found, name) for found in find_stages(trace, find_segments(trace, calls))]
    stages = [reader for reader in seen if reader.is_stream]
    if not stages and any(reader.stage.attention for reader in seen):
        sizes = " x ".join(map(str, next(reader for reader in seen if reader.stage.attention).stage.root.shape))
        several = trace.batch > 1
        raise UnsupportedModelError(
            f"the blocks of {name} run over {sizes} numbers where it was given {trace.batch} "
            f"image{'s' if several else ''}: images are joined, repeated or cut up inside of it, so that no row of "
            f"tokens is one image's; explain {'one image at a time, or ' if several else ''}the model inside"
        )
    if not stages:
        raise UnsupportedModelError(
            f"{name} has no residual stream of tokens: no sum of tokens with something that was made from them was seen "
            "in its run, so no method here serves it"
        )
    described = [StreamStage(reader.grid, reader.channels, tuple(reader.blocks())) for reader in stages]
    chosen = _choose(stages, described, trace.batch) if stage is None else range(len(stages))[stage]
    owned = {call.output_step for each in stages for call in each.stage.attention}
    last = described[chosen].blocks[-1].output.step
    pooling = tuple(call for call in calls if call.output_step not in owned and call.output_step > last)
    later = tuple(call for reader in stages[chosen + 1 :] for call in reader.stage.attention)
    return Architecture(
        name,
        tuple(described),
        chosen,
        tuple(step.operation for step in trace.steps),
        find_overwriting(trace, described[chosen].blocks, name),
        pooling=tuple(
            stages[chosen].with_head_order(call)
            for call in sorted((*pooling, *later), key=lambda call: call.output_step)
        ),
        chosen=stage,
    )


def _choose(readers: list[_StageReader], stages: list[StreamStage], batch: int) -> int:
    """The last stage in which every token attends to every other; where there is none, the last of several tokens."""
    whole = [place for place, reader in enumerate(readers) if reader.attends_to_all(batch)]
    several = [place for place, stage in enumerate(stages) if stage.tokens > 1 and not readers[place].only_pools]
    attending = [place for place in several if stages[place].blocks and stages[place].blocks[0].attention]
    return max(whole or attending or several or [len(stages) - 1])


class _StageReader:
    """Reads the blocks of one stage of the stream."""

    def __init__(self, trace: Trace, stage: Stage, name: str) -> None:
        self._trace, self.stage, self._name = trace, stage, name
        self._writes = stage.writes
        self._known: dict[torch.Size, StreamAxes] = {}
        self.axes = self._axes_of(stage.root)

    @property
    def is_stream(self) -> bool:
        """Whether it has images, tokens and channels."""
        return self.axes.batch >= 0 and len(self.axes.token_axes) >= 1

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
        if value.index not in step.outputs:
            raise changed_through_a_view(self._name)
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
        between_all = all(
            call.queries == call.keys == self.tokens and call.rows % batch == 0 and call.over_tokens for call in calls
        )
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
        calls = tuple(self.with_head_order(call) for write in writes for call in write.attention)
        call = calls[0] if len(calls) == 1 else None
        module = self._module(start, output)
        span = self._attention_span(start, first, calls)
        return Block(
            input=self._point(start),
            residual_mid=self._point(attending.result),
            residual_post=self._point(last.result),
            output=self._point(output),
            attention=calls,
            first_norm=first,
            second_norm=second,
            norm_place=place,
            output_projection=None if call is None else self._projection(call, attending),
            value_map=None if call is None or first is None else self._value_map(call, first),
            attention_steps=span,
            module=None if module is None else module.module,
            name="" if module is None else module.name,
            writes=tuple(write.step.number for write in writes),
        )

    def _norm_place(
        self, start: Value, attending: ResidualWrite, writes: list[ResidualWrite], following: Value | None
    ) -> NormPlace:
        trace = self._trace
        behind = [write for write in writes if write.step.number > attending.step.number]
        continued = behind[0].source if behind else following
        moved_on = continued is not None and continued.comes_from(attending.result)
        if moved_on and continued is not None and not self._same(continued, attending.result):
            return "post"
        ends = trace.maker(walk_back(trace, attending.branch, moves_numbers, scales))
        if ends is not None and ends.operation in NORM and _is_identity(self._first_norm(start, attending)):
            return "branch"
        return "pre"

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
                found.append((source, trace.values[step.outputs[0]], step.number, self._module_of(step)))
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

    def _module_of(self, step: Step) -> nn.Module | None:
        """The module that a step is all there is to."""
        for call in self._trace.calls:
            if call.first <= step.number < call.last and len(call.outputs) == 1 and call.outputs[0] == step.outputs[0]:
                children = any(True for _ in call.module.children())
                if not children:
                    return call.module
        return None

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
            elif step.operation == "add":
                parts = [trace.values[index] for index in step.operands]
                parts = [part for part in parts if part.comes_from(heads)]
                if len(parts) != 1:
                    return None
                value = parts[0]
            elif not inside and linear_weight(step, self._depends(step)) is not None:
                linear, mixed = step.number, value_of(trace, step)
                break  # whether its input is O in another order is seen below
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
        places[moved.flatten()] = channels.flatten()
        places = places.reshape(heads.shape)
        if call.spelling == "written":
            arranged = call.output_arrangement().arrange(places, self._trace.batch)
        else:
            arranged = self._by_head(call, places)
        return None if arranged is None else arranged[0, :, 0]

    def with_head_order(self, call: AttentionCall) -> AttentionCall:
        """Find out, where heads and images lie along one axis, which of them come first."""
        trace = self._trace
        step = trace.steps[call.output_step]
        rows = len(trace.values[call.output].shape) == 3
        if call.spelling == "multi_head" or not rows or call.rows <= trace.batch or call.rows % trace.batch:
            return call
        for index in step.operands:
            value = trace.values[index]
            for _, before in self._linears_before(value) or ():
                moved = replay(trace, before, value) if before.shape[0] == trace.batch else None
                if moved is not None and moved.dim() == 3 and len(moved) == call.rows:
                    images = moved[:, 0, 0] // (before.shape.numel() // trace.batch)
                    return replace(call, heads_first=bool(images[0] != images[1]))
        output = trace.values[call.output]
        for value in trace.values[output.index + 1 :]:
            # Where values are more than moved, what becomes of O tells it.
            moved = replay(trace, output, value) if value.comes_from(output) and len(value.shape) > 2 else None
            if moved is not None and len(moved) == trace.batch and moved.numel() == output.shape.numel():
                row_numbers = moved[0] // (output.shape.numel() // call.rows)
                return replace(call, heads_first=bool(row_numbers.max() >= call.rows // trace.batch))
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
        # Projections of queries, keys and values may be joined before heads are told apart.
        linears = self._linears_before(value)
        moved = None if linears is None else replay_from(trace, [before for _, before in linears], value)
        if linears is None or moved is None:
            return None
        first = 0
        for linear, before in linears:
            last = first + before.shape.numel()
            if bool(((moved >= first) & (moved < last)).all()):
                heads = self._by_head(call, (moved - first) % before.shape[-1])
                return None if heads is None else ValueMap(linear.number, heads[0, :, 0].flatten())
            first = last
        return None

    def _linears_before(self, value: Value) -> list[tuple[Step, Value]] | None:
        """The linear layers whose outputs a value was put together from; ``None`` where other numbers are in it."""
        trace, found, open_values, seen = self._trace, {}, [value], set[int]()
        while open_values:
            value = open_values.pop()
            step = trace.maker(value)
            if step is None or value.index in seen:
                continue
            seen.add(value.index)
            if linear_weight(step, self._depends(step)) is not None and step.operation in {"linear", "matmul", "addmm"}:
                found[value.index] = step, value
            elif step.operation in ALIAS | SLICE | JOIN:
                open_values += [trace.values[index] for index in step.operands]
            else:
                return None
        return [found[index] for index in sorted(found)] or None

    def _by_head(self, call: AttentionCall, values: Tensor) -> Tensor | None:
        """A tensor that lies as the values of a call do, as (batch, head, token, channel)."""
        if call.spelling == "written":
            return call.value_arrangement().arrange(values, self._trace.batch)
        batch = self._trace.batch
        if values.dim() == 3 and len(values) % batch == 0:
            if call.heads_first:
                return values.reshape(-1, batch, *values.shape[1:]).transpose(0, 1)
            return values.reshape(batch, -1, *values.shape[1:])
        return values if values.dim() == 4 else None

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
