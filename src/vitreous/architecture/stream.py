"""The residual stream in a run: sums of a value with something that was made from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitreous.architecture.attention import AttentionCall
from vitreous.architecture.description import Block, Point
from vitreous.architecture.operations import (
    CONVOLUTION,
    MULTI_HEAD,
    PRODUCT,
    SUM,
    moves_numbers,
    replay,
    scales,
    walk_back,
    way_back,
)
from vitreous.architecture.trace import Step, Trace, Value, memory_of
from vitreous.errors import UnsupportedModelError


@dataclass
class ResidualWrite:
    """One sum x + f(x).

    Attributes:
        step: the sum.
        source: x, before it was scaled or given another shape.
        skip: x as the sum got it.
        branch: f(x) as the sum got it; of an interpolation of x and x + f(x), as the inner sum got it.
        result: the sum's output.
        attention: the attention calls in f.
        inner: the sum x + f(x), where it is interpolated with x.
        summed: what was added to x by the step itself.
    """

    step: Step
    source: Value
    skip: Value
    branch: Value
    result: Value
    attention: list[AttentionCall] = field(default_factory=list)
    inner: ResidualWrite | None = None

    def __post_init__(self) -> None:
        self.summed = self.branch


@dataclass
class Segment:
    """Residual writes one after the other, of one size.

    Attributes:
        root: the value that the first of them was added to.
        writes: the sums.
    """

    root: Value
    writes: list[ResidualWrite]

    @property
    def last(self) -> Value:
        """The stream behind the last sum."""
        return self.writes[-1].result


def find_segments(trace: Trace, attention: Sequence[AttentionCall]) -> list[Segment]:
    """All chains of residual writes, each with the attention calls that belong to no chain inside it."""
    segments: list[Segment] = []
    holders: dict[int, Segment] = {}  # by value: the segment whose stream it is
    writes: dict[int, ResidualWrite] = {}  # by the value that it gave
    for step in trace.steps:
        write = _residual_write(trace, step, writes)
        if write is None:
            continue
        writes[write.result.index] = write
        way = way_back(trace, write.source, moves_numbers, scales)
        segment = next((holders[value.index] for value in way if value.index in holders), None)
        if segment is None:
            segment = Segment(write.source, [])
            segments.append(segment)
        holders[write.source.index] = segment
        earlier = writes.get(walk_back(trace, write.branch, moves_numbers, scales).index)
        if earlier is not None and earlier in segment.writes and earlier.source is write.source:
            # x and x + f(x) are interpolated: one write of f(x).
            segment.writes.remove(earlier)
            write.branch, write.inner = earlier.branch, earlier
        segment.writes.append(write)
        holders[write.result.index] = segment
    # nn.MultiheadAttention is given the stream itself.
    queries = [_query_residual(trace, call, segments) for call in attention if call.spelling != "multi_head"]
    segments = [segment for segment in segments if not any(segment is found for found in queries)]
    for call in attention:
        owner = _owner(trace.values[call.output], segments)
        if owner is not None:
            owner.attention.append(call)
    return segments


def _query_residual(trace: Trace, call: AttentionCall, segments: list[Segment]) -> Segment | None:
    """The chain that adds O to the queries it was made with, inside the attention branch, as pooled attention does."""
    step = trace.steps[call.score_step if call.score_step >= 0 else call.output_step]
    made_with = {
        value.index for index in step.operands for value in way_back(trace, trace.values[index], moves_numbers, scales)
    }
    for segment in segments:
        write = segment.writes[0]
        if len(segment.writes) == 1 and write.source.index in made_with:
            heads = walk_back(trace, write.branch, moves_numbers)
            if heads is walk_back(trace, trace.values[call.output], moves_numbers):
                return segment
    return None


def _residual_write(trace: Trace, step: Step, writes: dict[int, ResidualWrite]) -> ResidualWrite | None:
    operands = _summed(trace, step)
    if operands is None or not step.outputs:
        return None
    result = trace.values[step.outputs[0]]
    first, second = operands
    if first is second or first.shape != second.shape or first.shape != result.shape or len(result.shape) < 3:
        return None
    ways = [way_back(trace, operand, moves_numbers, scales) for operand in (first, second)]
    pairs = ((first, second, ways[0], ways[1][-1]), (second, first, ways[1], ways[0][-1]))
    for skip, branch, way, other in pairs:
        # The latest form of x that both the sum and its branch were made from.
        source = next((value for value in way if value is not other and other.comes_from(value)), None)
        if source is not None:
            return ResidualWrite(step, _before_casts(trace, source, way, other), skip, branch, result)
    # A second branch beside the first: (x + f(x)) + g(x).
    for skip, branch, way, other in pairs:
        for source in way:
            earlier = writes.get(source.index)
            if earlier is not None and other.comes_from(earlier.source):
                return ResidualWrite(step, source, skip, branch, result)
    return None


def _before_casts(trace: Trace, source: Value, way: list[Value], branch: Value) -> Value:
    """X in front of a cast, where the branch was made from x itself and reads the cast besides."""
    for earlier in way[way.index(source) + 1 :]:
        if earlier.shape != source.shape:
            break
        between = trace.values[earlier.index + 1 : branch.index + 1]
        if any(
            branch.comes_from(value)
            and value.comes_from(earlier)
            and not value.comes_from(source)
            and not source.comes_from(value)
            for value in between
        ):
            source = earlier
    return source


def _summed(trace: Trace, step: Step) -> tuple[Value, Value] | None:
    """The two values that a step adds up; ``None`` where it does something else."""
    if step.operation in SUM and len(step.operands) >= 2:
        last = 1 if step.operation == "lerp" else -1
        return trace.values[step.operands[0]], trace.values[step.operands[last]]
    if step.operation == "sum" and len(step.operands) == 1:
        stacked = trace.maker(trace.values[step.operands[0]])
        axis = step.argument(1, "dim")
        if stacked is not None and stacked.operation == "stack" and len(stacked.operands) == 2:
            along = stacked.argument(1, "dim", 0)
            return (trace.values[stacked.operands[0]], trace.values[stacked.operands[1]]) if axis == along else None
    return None


def _owner(output: Value, segments: list[Segment]) -> ResidualWrite | None:
    """The innermost write in whose branch an attention call's output is."""
    found: ResidualWrite | None = None
    for segment in segments:
        if output is segment.root or not output.comes_from(segment.root):
            continue
        for write in segment.writes:
            if not write.branch.comes_from(output):
                continue
            if found is None or write.step.number < found.step.number:
                found = write
            break
    return found


def branch_start(segments: Sequence[Segment], write: ResidualWrite) -> Value:
    """Where a write's branch leaves the stream: the latest value of the stream that it was made from."""
    candidates = [write.source]
    for segment in segments:
        candidates.append(segment.root)
        candidates += [value for earlier in segment.writes for value in (earlier.source, earlier.result)]
    found = [value for value in candidates if value is not write.result and write.branch.comes_from(value)]
    return max(found, key=lambda value: value.index, default=write.source)


def is_inside(inner: Segment, write: ResidualWrite) -> bool:
    """Whether a chain of sums stands in the branch of a write of another chain."""
    if inner.last is write.result or not write.branch.comes_from(inner.last):
        return False
    return inner.root.comes_from(write.source) and inner.root is not write.source


@dataclass
class Stage:
    """The stream as far as it has one size.

    Attributes:
        segments: the chains of sums, in order; a norm between two sums begins another one.
    """

    segments: list[Segment]

    @property
    def writes(self) -> list[ResidualWrite]:
        """All sums, in order."""
        return sorted((write for segment in self.segments for write in segment.writes), key=lambda w: w.step.number)

    @property
    def root(self) -> Value:
        """The value that the first sum was added to."""
        return min((segment.root for segment in self.segments), key=lambda value: value.index)

    @property
    def attention(self) -> list[AttentionCall]:
        """The attention calls in its branches."""
        return [call for write in self.writes for call in write.attention]


def find_stages(segments: list[Segment]) -> list[Stage]:
    """The streams of a run, one for every size of tokens, in the order in which they begin."""
    attending = [segment for segment in segments if any(write.attention for write in segment.writes)]
    chosen = []
    for segment in segments:
        containers = [other for other in segments if other is not segment]
        own = segment in attending
        inside = any(
            is_inside(segment, write) and not (own and not write.attention) and not _holds_attention(write, attending)
            for other in containers
            for write in other.writes
        )
        # Sums that begin and end while a stream goes on, and are no part of it: values mixed with those of block 0.
        beside = not own and any(
            other.root.index < segment.root.index and segment.last.index < other.last.index for other in attending
        )
        if not inside and not beside:
            chosen.append(segment)
    stages: list[Stage] = []
    for segment in sorted(chosen, key=lambda each: each.root.index):
        for stage in stages:
            if stage.root.shape.numel() == segment.root.shape.numel() and segment.root.comes_from(stage.root):
                stage.segments.append(segment)
                break
        else:
            stages.append(Stage([segment]))
    return stages


def _holds_attention(write: ResidualWrite, attending: list[Segment]) -> bool:
    """Whether a sum spans whole chains that attend: a skip connection around many blocks."""
    return any(is_inside(segment, write) for segment in attending if write not in segment.writes)


def mixes_tokens(trace: Trace, write: ResidualWrite, tokens: int) -> bool:
    """Whether a branch lets tokens see each other: by attention, a convolution over neighbours, a map over tokens."""
    steps = trace.between(write.source, write.branch)
    return bool(write.attention) or any(_mixes(trace, step, write.source, tokens) for step in steps)


def _mixes(trace: Trace, step: Step, source: Value, tokens: int) -> bool:
    if step.operation in CONVOLUTION:
        return step.operation == "conv1d" or any(size > 1 for size in step.argument(1, "weight").shape[2:])
    if step.operation in PRODUCT and len(set(step.operands)) > 1:
        return True
    if step.operation in {"linear", "matmul"} and step.operands:
        given = trace.values[step.operands[0]]
        over_tokens = given.shape[-1] == tokens and given.shape[-1] != source.shape[-1]
        return over_tokens and walk_back(trace, given, moves_numbers) is not given
    return "pool" in step.operation or step.operation.startswith("fft") or step.operation in {"roll", "einsum"}


def channel_axis(trace: Trace, root: Value) -> int | None:
    """The axis along which the first layer behind a value multiplies or normalises."""
    dims = len(root.shape)
    for step in trace.steps[root.step + 1 :]:
        for index in step.operands:
            given = trace.values[index]
            same = walk_back(trace, given, moves_numbers) is walk_back(trace, root, moves_numbers)
            if not given.comes_from(root) or not same:
                continue
            axis = _layer_axis(step, given)
            if axis is None:
                continue
            moved = replay(trace, root, given) if given is not root else None
            if given is root or moved is None:
                return axis % len(given.shape) if given is root or len(given.shape) == dims else dims - 1
            return _axis_of_step(moved, axis, root.shape)
    return _axis_of_neighbours(trace, root) if dims == 4 else None


def _axis_of_neighbours(trace: Trace, root: Value) -> int | None:
    """The axis by the first layer behind a grid that works on one of the same size, made of it by whatever steps."""
    for step in trace.steps[root.step + 1 :]:
        for given in (trace.values[index] for index in step.operands):
            axis = _layer_axis(step, given) if len(given.shape) == 4 and given.comes_from(root) else None
            if axis == 1 and given.shape[2:] == root.shape[2:]:
                return 1
            if axis == -1 and given.shape[1:3] == root.shape[1:3]:
                return 3
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


def find_overwriting(trace: Trace, blocks: Iterable[Block], name: str) -> frozenset[int]:
    """The steps that change the stream of some block in place.

    Raises:
        UnsupportedModelError: the stream is changed through a view, or is read through one afterwards, so that a copy
            would not be seen by all who read it.
    """
    kept, writes, embedded = set[int](), set[int](), set[int]()
    for block in blocks:
        points = [block.input, block.residual_mid, block.residual_post, block.output]
        points += [norm.output for norm in (block.first_norm, block.second_norm) if norm is not None]
        kept.update(value_at(trace, point) for point in points if point.step >= 0)
        writes.update(block.writes)
        start = trace.values[value_at(trace, block.input)] if block.input.step >= 0 else trace.values[0]
        embedded |= {value.index for value in way_back(trace, start, moves_numbers)}
    memory = {memory_of(trace.values[index].tensor): index for index in sorted(kept, reverse=True)}  # the earliest
    found, makes = set[int](), set[int]()
    for step in trace.steps:
        if not step.in_place:
            continue
        if step.number in writes or step.operands[0] in kept:
            found.add(step.number)
        elif step.outputs[0] in embedded:
            makes.add(step.number)  # positions that are added in place, perhaps
        elif memory.get(memory_of(trace.values[step.operands[0]].tensor), step.outputs[0]) < step.outputs[0]:
            raise changed_through_a_view(name)
    read_elsewhere = (trace.values[parent].step for index in trace.stale for parent in trace.values[index].parents)
    read = set(read_elsewhere)
    if found & read:
        raise changed_through_a_view(name)
    return frozenset(found | (makes - read))


def value_at(trace: Trace, point: Point) -> int:
    """The value that a step gives at a point of the stream."""
    return trace.steps[point.step].outputs[point.output]


def changed_through_a_view(name: str) -> UnsupportedModelError:
    """What is wrong with a stream that another tensor of the same memory changes."""
    return UnsupportedModelError(
        f"{name} changes tokens in place through a view of them, so that those in front of its blocks are lost; make a "
        "new tensor instead (x = x + y, torch.cat)"
    )
