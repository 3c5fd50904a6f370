"""The way from the attention heads to the residual sum, and from the first norm to the values, as a run shows them.

Between O, what the heads give, and the residual sum there may be more than the output projection W_O: LayerScale, a
norm (sandwich norm, sub-norm), gates, an activation. With statistics and gates held as they were in the run each of
these is a linear map of every token by itself, and so is the whole path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitreous.architecture.attention import AttentionCall
from vitreous.architecture.description import HeadPath, PathKind, PathStep, TokenAxes, ValueMap
from vitreous.architecture.operations import (
    ALIAS,
    CONVOLUTION,
    JOIN,
    REPEAT,
    SLICE,
    SUM,
    adds_constant,
    linear_weight,
    moves_numbers,
    replay,
    replay_from,
    scales,
    trailing_axes,
    way_back,
)
from vitreous.architecture.stream import ResidualWrite
from vitreous.architecture.trace import Step, Trace, Value

# Activations f with f(0) = 0, and their slope there: f(u) = (f(u) / u) u is a gate on u.
ACTIVATION_SLOPES = {"gelu": 0.5, "silu": 0.5, "relu": 0.0, "relu6": 0.0, "hardswish": 0.5, "mish": 0.6, "tanh": 1.0}


class NotLinearError(Exception):
    """The path from the heads to the stream is not a linear map of each token; the message gives the reason."""


@dataclass
class _Numbers:
    """What every number of a value belongs to.

    Attributes:
        image: the image, of the value's shape.
        token: the token.
        channel: the channel of what was last multiplied with weights, or of all heads; -1 for another call's.
    """

    image: Tensor
    token: Tensor
    channel: Tensor

    def moved(self, places: Tensor) -> _Numbers:
        """The same of a value whose numbers stood at ``places``; what stood behind the end is another call's."""
        other = places >= self.image.numel()
        places = places.masked_fill(other, 0)
        image, token, channel = (table.flatten()[places] for table in (self.image, self.token, self.channel))
        return _Numbers(image, token, channel.masked_fill(other, -1))


class HeadMaps:
    """Reads the linear maps around the attention calls of a run."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    # From the heads to the stream -------------------------------------------------------------------------------------

    def path_to_stream(self, call: AttentionCall, write: ResidualWrite, calls: Sequence[AttentionCall]) -> HeadPath:
        """What lies between O of an attention call and the residual sum.

        Raises:
            NotLinearError: no linear map of every token by itself leads there.
        """
        heads = self._trace.values[call.output]
        way = self._way(heads, write.summed)
        self._check_sums(way, write)
        base, numbers = heads, self._numbers_of_heads(call, heads)
        beside = [self._trace.values[other.output] for other in calls if other is not call]
        found: list[PathStep] = []
        for kind, step, source, result in way:
            numbers = self._moved(numbers, [base, *beside], source)
            if kind != "same":
                axis = 1 if step.operation in {*CONVOLUTION, "batch_norm"} else -1
                channels = _channels_along(numbers, axis) if kind in {"linear", "batch_norm"} else None
                axes, flat = (None, channels) if channels is not None else _axes_of(numbers)
                if flat is None:
                    raise NotLinearError(
                        f"which of their channels is which in front of {step.operation}() is not known"
                    )
                found.append(PathStep(step.number, kind, _position(step, source), axes, flat))
                if step.operation == "einsum" and kind == "linear":
                    numbers = self._behind_einsum(numbers, step, source, result)
                else:
                    numbers = _behind(kind, axis, numbers, axes, result)
            base, beside = result, []
        numbers = self._moved(numbers, [base, *beside], write.summed)
        axes, channels = _axes_of(numbers)
        if channels is None:  # tokens in windows, perhaps
            channels = _channels_along(numbers, -1)
        if channels is None:
            raise NotLinearError("their channels cannot be traced to those of the stream")
        found.append(PathStep(write.step.number, "sum", _position(write.step, write.summed), axes, channels))
        return HeadPath(tuple(found), call.output_step if call.spelling == "multi_head" else None)

    def _behind_einsum(self, numbers: _Numbers, step: Step, source: Value, result: Value) -> _Numbers:
        """Image, token and channel of every number behind a linear map whose channels may have several axes."""
        weight = linear_weight(step, self._depends(step))
        assert weight is not None
        summed, made = trailing_axes(source.shape, weight.shape[1]), trailing_axes(result.shape, weight.shape[0])
        view = (*source.shape[:-summed], *[1] * made)
        tables = [table.flatten(-summed)[..., 0].reshape(view) for table in (numbers.image, numbers.token)]
        image, token = (table.expand(result.shape) for table in tables)
        channels = torch.arange(len(weight)).reshape(result.shape[-made:]).expand(result.shape)
        return _Numbers(image, token, channels)

    def _check_sums(self, way: list[tuple[PathKind, Step, Value, Value]], write: ResidualWrite) -> None:
        """See to it that the stream itself is added by the residual sum alone: x + c (f(x) - x) is no x + c f(x)."""
        stream = {value.index for value in way_back(self._trace, write.skip, moves_numbers, scales)}
        inner = None if write.inner is None else write.inner.step.number
        for kind, step, source, _ in way:
            others = [self._trace.values[index] for index in step.operands if index != source.index]
            beside = (value for other in others for value in way_back(self._trace, other, moves_numbers, scales))
            if kind in {"same", "sum"} and step.number != inner and any(value.index in stream for value in beside):
                raise NotLinearError(f"the stream itself is part of what they are added to by {step.operation}()")

    def skip(self, write: ResidualWrite) -> tuple[PathStep, ...]:
        """The steps by which the stream itself is multiplied with constants on its way to a residual sum."""
        if write.inner is not None:  # x and x + f(x) are interpolated: x stays as it is
            return ()
        trace = self._trace
        way = way_back(trace, write.skip, moves_numbers, scales)
        steps = [trace.steps[value.step] for value in way[: way.index(write.source)]]
        constant = [step for step in steps if step.operation in {"mul", "div"}]
        found = [PathStep(step.number, "factor", _position(step, trace.values[step.operands[0]])) for step in constant]
        position = _position(write.step, write.skip)
        return (*found, PathStep(write.step.number, "sum", position))

    def _way(self, heads: Value, value: Value) -> list[tuple[PathKind, Step, Value, Value]]:
        """The steps from O to ``value`` that change numbers, in order: kind, step, what it was given and what it gave.

        Raises:
            NotLinearError: one of them is no linear map of every token by itself.
        """
        trace, found = self._trace, list[tuple[PathKind, Step, Value, Value]]()
        while value is not heads:
            step = trace.maker(value)
            if step is None or value.index <= heads.index:
                raise NotLinearError("the heads are read before their attention has ended")
            given = [trace.values[index] for index in dict.fromkeys(step.operands)]
            given = [each for each in given if each.comes_from(heads)]
            kind = self._kind(step, value, given)
            if kind is None:
                source = self._handed_on(heads, step, value, given)
            else:
                factors = [trace.values[index] for index in step.operands if trace.values[index].comes_from(heads)]
                source = given[0] if len(factors) == 1 else self._weighed(heads, step, factors)
                found.append((kind, step, source, value))
            value = source
        return found[::-1]

    def _kind(self, step: Step, result: Value, given: list[Value]) -> PathKind | None:
        """What a step does to a token; ``None`` where it hands numbers on or joins them."""
        name = step.operation
        tensors = {id(value.tensor) for value in given}
        if name in ALIAS | SLICE | JOIN:
            return None
        if linear_weight(step, lambda value: id(value) in tensors) is not None:
            return "linear"
        if name in {"mul", "div"}:
            return "factor"
        kind = self._sum_kind(step, result, given) if name in SUM else _kind_of_one(step, given[0], len(result.shape))
        if kind is None or (step.in_place and kind not in {"same", "sum"}):
            raise NotLinearError(f"{name}() is between them, which is not a linear map of each token")
        return kind

    def _sum_kind(self, step: Step, result: Value, given: list[Value]) -> PathKind | None:
        """What a sum or difference does: add something else, weighed or not, or take off the mean over channels."""
        if len(given) == 1 and given[0].shape == result.shape:
            plain = step.operation == "add" and step.kwargs.get("alpha", 1) == 1
            return "same" if plain else "sum"
        if len(given) == 2 and self._takes_off_mean(step):
            return "centre"
        raise NotLinearError(f"their output takes several paths, which join in {step.operation}()")

    def _handed_on(self, heads: Value, step: Step, result: Value, given: list[Value]) -> Value:
        """Which of its operands a step hands on; O itself where parts of it, moved alone, are put together again."""
        if len(given) == 1:
            return given[0]
        if step.operation in JOIN and replay(self._trace, heads, result) is not None:
            return heads
        ways = self._linear_ways(heads, given)
        if len(ways) == 1 and step.operation in JOIN:
            return ways[0]
        raise NotLinearError(f"their output takes several paths, which join in {step.operation}()")

    def _weighed(self, heads: Value, step: Step, given: list[Value]) -> Value:
        """Which factor of a product is the token; the other one is a gate or a statistic that is held constant."""
        if step.operation == "sub":
            return self._trace.values[step.operands[0]]
        ways = self._linear_ways(heads, given)
        if len(ways) != 1 or (step.operation == "div" and ways[0].index != step.operands[0]):
            raise NotLinearError(f"they are multiplied with each other ({step.operation}())")
        return ways[0]

    def _linear_ways(self, heads: Value, given: list[Value]) -> list[Value]:
        found = []
        for value in given:
            try:
                self._way(heads, value)
            except NotLinearError:
                continue
            found.append(value)
        return found

    def _takes_off_mean(self, step: Step) -> bool:
        """Whether a difference is u - mean(u) over channels."""
        token, taken = (self._trace.values[index] for index in step.operands)
        maker = self._trace.maker(taken) if step.operation == "sub" else None
        axis = None if maker is None else maker.argument(1, "dim")
        axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
        of_channels = isinstance(axis, int) and axis % len(token.shape) == len(token.shape) - 1
        return maker is not None and maker.operation == "mean" and maker.operands == (token.index,) and of_channels

    def _numbers_of_heads(self, call: AttentionCall, heads: Value) -> _Numbers:
        """Image, token and channel of every number of O; its channels are those of all heads, head by head."""
        places = torch.arange(heads.shape.numel()).reshape(heads.shape)
        if call.spelling == "multi_head":  # (tokens, images, channels), through the output projection already
            token, image, channel = (axis.flatten() for axis in torch.unravel_index(places.flatten(), heads.shape))
            return _Numbers(*(table.reshape(heads.shape) for table in (image, token, channel)))
        by_head = self.arranged_output(call, places)
        if by_head is None:
            raise NotLinearError("the axes of images and heads in their output are not known")
        width = by_head.shape[1] * by_head.shape[3]
        ordered = by_head.transpose(1, 2).flatten(2)  # (image, token, channel)
        tables = torch.unravel_index(torch.arange(ordered.numel()), (*ordered.shape[:2], width))
        where = ordered.flatten().argsort()
        image, token, channel = (table[where].reshape(heads.shape) for table in tables)
        return _Numbers(image, token, channel)

    def _moved(self, numbers: _Numbers, bases: list[Value], value: Value) -> _Numbers:
        """What the numbers of ``value`` belong to; it was made of the first of ``bases`` by moving numbers alone."""
        if value is bases[0]:
            return numbers
        moved = replay_from(self._trace, bases, value)
        if moved is None:
            raise NotLinearError("they are joined with other tokens on the way")
        return numbers.moved(moved)

    # From the first norm to the values --------------------------------------------------------------------------------

    def value_map(self, call: AttentionCall) -> ValueMap | None:
        """The rows of the linear layer that makes the values of the first norm's output."""
        trace = self._trace
        step = trace.steps[call.output_step]
        if call.spelling == "multi_head":
            return ValueMap(step.number, torch.arange(step.argument(0, "query").shape[-1]))
        value = self.values_of(call)
        if value is None:
            return None
        # Projections of queries, keys and values may be joined before heads are told apart.
        linears = self._linears_before(value)
        moved = None if linears is None else replay_from(trace, [before for _, before in linears], value, loosely=True)
        if linears is None or moved is None:
            return None
        first = 0
        for linear, before in linears:
            last = first + before.shape.numel()
            if bool(((moved < 0) | ((moved >= first) & (moved < last))).all()):
                numbers = self._channel_numbers(linear, before).flatten()[(moved - first).clamp(min=0)]
                heads, token = self._arranged_values(call, numbers), call.key_tokens[0] if call.key_tokens else 0
                return None if heads is None else ValueMap(linear.number, heads[0, :, token].flatten().clone())
            first = last
        return None

    def values_of(self, call: AttentionCall) -> Value | None:
        """What an attention call multiplies its weights with."""
        trace, step = self._trace, self._trace.steps[call.output_step]
        operands = [trace.values[index] for index in step.operands]
        if call.spelling == "fused":
            tensor = step.argument(2, "value")
        else:
            tensor = operands[1 if call.weights_first else 0].tensor
        return next((value for value in operands if value.tensor is tensor), None)

    def _linears_before(self, value: Value) -> list[tuple[Step, Value]] | None:
        """The linear layers whose outputs a value was put together from; ``None`` where other numbers are in it."""
        trace, found, open_values, seen = self._trace, {}, [value], set[int]()
        while open_values:
            value = open_values.pop()
            step = trace.maker(value)
            if step is None or value.index in seen:
                continue
            seen.add(value.index)
            if linear_weight(step, self._depends(step)) is not None:
                found[value.index] = step, value
            elif step.operation in ALIAS | SLICE | JOIN | REPEAT or adds_constant(trace, step, value):
                open_values += [trace.values[index] for index in step.operands]
            else:
                return None
        return [found[index] for index in sorted(found)] or None

    def _channel_numbers(self, linear: Step, made: Value) -> Tensor:
        """The number of its channel for every entry of what a linear layer gave."""
        weight = linear_weight(linear, self._depends(linear))
        assert weight is not None
        numbers = torch.arange(len(weight))
        if linear.operation in CONVOLUTION:
            return numbers.view(-1, *[1] * (len(made.shape) - 2)).expand(made.shape)
        return numbers.reshape(made.shape[-trailing_axes(made.shape, len(weight)) :]).expand(made.shape)

    def _depends(self, step: Step) -> Callable[[Any], bool]:
        tensors = {id(self._trace.values[index].tensor) for index in step.operands}
        return lambda value: isinstance(value, Tensor) and id(value) in tensors

    # How heads lie ----------------------------------------------------------------------------------------------------

    def arranged_output(self, call: AttentionCall, values: Tensor) -> Tensor | None:
        """A tensor that lies as O does, as (batch, head, token, channel)."""
        if call.spelling == "written":
            return call.arrangement("output").arrange(values, self._trace.batch)
        return self._split_rows(call, values)

    def _arranged_values(self, call: AttentionCall, values: Tensor) -> Tensor | None:
        """A tensor that lies as the values of a call do, as (batch, head, token, channel)."""
        if call.spelling == "written":
            return call.arrangement("value").arrange(values, self._trace.batch)
        return self._split_rows(call, values)

    def _split_rows(self, call: AttentionCall, values: Tensor) -> Tensor | None:
        batch = self._trace.batch
        if values.dim() == 3 and len(values) % batch == 0:
            if call.heads_first:
                return values.reshape(-1, batch, *values.shape[1:]).transpose(0, 1)
            return values.reshape(batch, -1, *values.shape[1:])
        return values if values.dim() == 4 else None

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


def _kind_of_one(step: Step, given: Value, dims: int) -> PathKind | None:
    """What a step that works on one value does to every token by itself."""
    name, last = step.operation, (-1, dims - 1)
    if name in {"layer_norm", "rms_norm"}:
        return "norm" if tuple(step.argument(1, "normalized_shape")) == given.shape[-1:] else None
    if name == "normalize":
        return "normalize" if step.argument(1, "p", 2.0) == 2 and step.argument(2, "dim", 1) in last else None
    if name == "batch_norm":
        return "batch_norm" if not step.argument(5, "training", default=False) else None
    if name == "glu":
        return "glu" if step.argument(1, "dim", -1) in last else None
    return "activation" if name in ACTIVATION_SLOPES else None


def _position(step: Step, value: Value) -> int:
    """Which argument of a step a value is; 0 where it is in a list."""
    arguments = [*step.args, *step.kwargs.values()]
    return next((place for place, argument in enumerate(arguments) if argument is value.tensor), 0)


def _varying(table: Tensor) -> set[int]:
    """The axes along which a table of numbers changes."""
    return {axis for axis in range(table.dim()) if bool((table != table.narrow(axis, 0, 1)).any())}


def _channels_along(numbers: _Numbers, axis: int) -> Tensor | None:
    """The channels along one axis, where all of them lie there."""
    axis %= numbers.channel.dim()
    if _varying(numbers.channel) - {axis}:
        return None
    return numbers.channel.movedim(axis, -1).reshape(-1, numbers.channel.shape[axis])[0].clone()  # not the whole table


def _axes_of(numbers: _Numbers) -> tuple[TokenAxes | None, Tensor | None]:
    """Which axes of a value are images, tokens and channels, and the channels in order; ``None`` where some mix."""
    image, token, channel = map(_varying, (numbers.image, numbers.token, numbers.channel))
    if image & token or image & channel or token & channel:
        return None, None
    images = sorted(image) or [min(set(range(numbers.image.dim())) - token - channel, default=-1)]
    channels = sorted(channel)
    if images == [-1] or not channels:
        return None, None
    tokens = [axis for axis in range(numbers.image.dim()) if axis not in (*images, *channels)]
    axes = TokenAxes((*images, *tokens, *channels), len(images), len(channels))
    laid = axes.tokens(numbers.token)
    in_order = torch.equal(laid, torch.arange(laid.shape[1])[None, :, None].expand(laid.shape))
    return (axes, axes.tokens(numbers.channel)[0, 0].clone()) if in_order else (None, None)


def _behind(kind: PathKind, axis: int, numbers: _Numbers, axes: TokenAxes | None, result: Value) -> _Numbers:
    """Image, token and channel of every number behind a step; channels are counted anew."""
    sizes = list(result.shape)
    if kind not in {"linear", "glu", "batch_norm"}:
        assert axes is not None
        return replace(numbers, channel=axes.channel_numbers(result.shape))
    if len(sizes) != numbers.image.dim():
        raise NotLinearError("a linear layer changes the axes of their output")
    image, token = (table.narrow(axis, 0, 1).expand(sizes) for table in (numbers.image, numbers.token))
    view = [1] * len(sizes)
    view[axis] = sizes[axis]
    return _Numbers(image, token, torch.arange(sizes[axis]).reshape(view).expand(sizes))
